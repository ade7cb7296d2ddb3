"""A grid of any size: some of its steps in a row, and what all of them cost, without running any.

A block changes where a grid axis moves on and those behind it start again. So it is enough to look at the axes that an
index map depends on, and at one axis moving on at a time. Where those are too many,
places drawn at random stand for all.
"""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from ..ir.capture import Call, Operand, depends_on
from .machine import (
    PLANNED_STEPS,
    Machine,
    OperandFigures,
    Pipeline,
    Trace,
    block_rows,
    elements_of,
    figures,
    figures_of,
    is_elementwise,
    operand_figures,
    plan,
    plan_pipeline,
    scalars_of,
)
from .memory import Buffer
from .tally import Tally

_CHUNK = 1 << 18
_MOST = 1 << 22  # block indices that are looked at for a call: about a second
_ALONE = 1 << 9  # so much longer it takes where an index map has to be run for each step by itself


def survey(call: Call, counted: Tally, first: int, count: int) -> Trace:
    """The trace of `count` steps from `first` on, as far as there are, whose figures are those of the whole grid.

    counted: what `tally` says of the call. The blocks are exact, and nothing is run: no outputs, no events. Raises
    Beyond where the blocks cannot be known.
    """
    machine = Machine(call)
    scalars = scalars_of(machine)
    trace = plan(machine, scalars, first, count)
    most = _MOST // max(1, len(call.grid) * sum(not _stays(o) for o in call.operands))
    rows = [
        OperandFigures(o, 0, 0, 0, 0, o.array_bytes) if _stays(o) else _costs(machine, o, scalars, most)
        for o in call.operands
    ]
    for p in counted.pipelines:
        if p.costs is not None:  # its blocks are known
            first_run = [plan_pipeline(p.call)] if math.prod(p.call.grid) <= PLANNED_STEPS else []
            moved = round(p.costs.hbm_bytes * p.runs)
            trace.pipelines.append(Pipeline(first_run, p.runs, moved, p.costs.vmem_bytes))
    trace.total = figures_of(
        call,
        rows,
        trace.pipelines,
        sum(p.hbm_bytes for p in trace.pipelines),
        flops=round(counted.flops) if counted.exact else 0,
        transcendentals=round(counted.transcendentals) if counted.exact else 0,
        steps=math.prod(call.grid),
        computed=counted.exact,
    )
    return trace


def _stays(o: Operand) -> bool:
    """Whether no blocks of it are copied for the kernel."""
    return o.in_hbm or o.index_map is None


def _costs(machine: Machine, o: Operand, scalars: list[Buffer], most: int) -> OperandFigures:
    """What an operand costs over the whole grid; an estimate where more than `most` places would have to be seen."""
    moves, elements, exact = Fraction(), Fraction(), True
    for blocks, times, all_of_them in _visits(machine, o, scalars, most):
        moves += times * len(blocks)
        elements += times * elements_of(o, blocks)
        exact = exact and all_of_them
    return dataclasses.replace(operand_figures(o, round(moves), round(elements * o.itemsize)), exact=exact)


def _visits(
    machine: Machine, o: Operand, scalars: list[Buffer], most: int
) -> Iterator[tuple[np.ndarray, Fraction, bool]]:
    """(blocks that come into VMEM, one a row; how often that happens; whether these are all) over the whole grid."""
    most = max(1, most if is_elementwise(o.index_map) else most // _ALONE)
    grid = machine.call.grid
    if not math.prod(grid):
        return
    axes = depends_on(o.index_map, len(grid))
    yield block_rows(machine, o, np.zeros((len(grid), 1), np.int32), scalars), Fraction(1), True
    for d, size in enumerate(grid):
        behind = [e for e in axes if e > d and grid[e] > 1]
        if size < 2 or not (behind or d in axes):
            continue
        free = [e for e in axes if e <= d]
        sizes = [grid[e] - (e == d) for e in free]
        points = math.prod(sizes)
        seen = min(points, most)
        weight = Fraction(math.prod(grid[:d]) * (size - 1), seen)
        drawn = np.random.default_rng(0).integers(0, points, seen) if seen < points else np.arange(points)
        for low in range(0, seen, _CHUNK):
            flat = drawn[low : low + _CHUNK]
            old = np.zeros((len(grid), len(flat)), np.int32)
            if free:
                old[free] = np.unravel_index(flat, sizes)
            new = old.copy()
            new[d] += 1
            old[behind] = np.array([[grid[e] - 1] for e in behind], np.int32).reshape(-1, 1)
            here, there = (block_rows(machine, o, x, scalars) for x in (old, new))
            yield there[(here != there).any(axis=1)], weight, seen == points


def clip(trace: Trace, first: int, count: int) -> Trace:
    """`count` steps of a grid from `first` on, with the figures of all of them, of which the trace has some or all."""
    n = trace.n
    if n <= count and trace.total is None:
        return trace
    if trace.total is not None:
        if first == trace.first or math.prod(trace.call.grid) <= count:
            return trace
        machine = Machine(trace.call)
        part = plan(machine, scalars_of(machine), first, count)
        return dataclasses.replace(part, total=trace.total, pipelines=trace.pipelines)
    first = max(0, min(first, n - count))
    here = slice(first, first + count)
    parts: dict[str, Any] = {
        name: [column[here] for column in getattr(trace, name)] for name in ("blocks", "changed", "moved")
    }
    parts |= {name: getattr(trace, name)[here] for name in ("steps", "flops", "transcendentals", "dma_bytes")}
    return dataclasses.replace(trace, first=first, total=figures(trace), **parts)
