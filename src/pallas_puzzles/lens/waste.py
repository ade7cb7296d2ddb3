"""Work and copies of a right answer that change nothing: which steps, which blocks, which lines."""

import collections
import itertools
from collections.abc import Iterator

import numpy as np

from ..ir.capture import Scratch, SourceLine, line_of, subprograms
from ..ir.ops import is_floating
from .machine import Run, Trace, history, spans

_FOLLOWED_STEPS = 512  # of a call with more, nobody looks what each of them did


def idle_products(run: Run) -> Iterator[str]:
    """Per call, the steps that compute although what the kernel gathers stays as it was."""
    for trace in run.traces:
        changed = changing_steps(trace)
        if changed is None:
            continue
        most = max(trace.flops, default=0)
        idle = [s for s in range(trace.n) if trace.flops[s] > most / 2 and s not in changed]
        if idle:
            names = " and ".join(s.name for s in _gathering(trace))
            yield (
                f"{trace.call.name}: {len(idle)} of its {trace.n} steps compute and change nothing ({_spans(idle)}): "
                f"what is in {names} stays as it is. They cost {sum(trace.flops[s] for s in idle):,} FLOPs."
            )


def idle_copies(run: Run) -> Iterator[tuple[str, list[SourceLine], bool]]:
    """Per input, the copies of blocks that leave VMEM again before any step has gathered anything from them; and the
    lines of its index map and of what calls the kernel; whether they are not even read. The dearest first."""
    found = []
    for trace in run.traces:
        changed = changing_steps(trace)
        if changed is None:
            continue
        loads = collections.defaultdict(set)
        for e in trace.events:
            if e.op == "load":
                loads[e.ref].add(e.step)
        for k, o in enumerate(trace.call.operands):
            if o.role != "in" or o.in_hbm or o.name not in loads:
                continue
            starts = [s for s in range(trace.n) if trace.fetched[k][s]]
            ends = [*starts[1:], trace.n]
            needed = loads[o.name] & changed
            idle = [a for a, b in zip(starts, ends, strict=True) if not any(a <= s < b for s in needed)]
            if idle:
                s = idle[0]
                index = tuple(map(int, trace.steps[s]))
                text = (
                    f"{trace.call.name}: {len(idle)} of {len(starts)} blocks of {o.name} come in and go unused, the "
                    f"first at step {s}, grid index {index}: block {trace.blocks[k][s]}"
                )
                lines = [*_lines(o.index_map), *trace.call.callers]
                unread = not any(
                    a <= s < b for a, b in zip(starts, ends, strict=True) if a in idle for s in loads[o.name]
                )
                found.append((len(idle) * o.block_bytes, text, lines, unread))
    for _, text, lines, unread in sorted(found, key=lambda f: -f[0]):
        yield text, lines, unread


def _gathering(trace: Trace) -> list[Scratch]:
    """Scratch that some step reads and stores into."""
    uses = collections.defaultdict(set)
    for e in trace.events:
        uses[e.ref].add(e.op)
    return [s for s in trace.call.scratch if s.space == "vmem" and {"load", "store"} <= uses[s.name]]


def changing_steps(trace: Trace) -> set[int] | None:
    """The steps that change what the kernel gathers in scratch; None where it gathers nothing."""
    gathering = _gathering(trace)
    if not gathering or trace.n > _FOLLOWED_STEPS:
        return None
    changing = {0}
    for scratch in gathering:
        held = history(trace.call, scratch.name, range(trace.n))
        for a, b in itertools.pairwise(range(trace.n)):
            if not np.array_equal(held[a], held[b], equal_nan=is_floating(held[a].dtype)):
                changing.add(b)
    return changing


def _spans(steps: list[int]) -> str:
    text = spans(steps)
    return text if text.count(",") < 4 else ", ".join(text.split(", ")[:3]) + ", ..."


def _lines(program: object) -> Iterator[SourceLine]:
    program = getattr(program, "jaxpr", program)
    for eqn in getattr(program, "eqns", ()):
        line = line_of(eqn)
        if line is not None:
            yield line
        for inner in subprograms(eqn):
            yield from _lines(inner)
