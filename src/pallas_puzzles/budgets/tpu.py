"""A right answer that costs too much: the figure, the budget, and where it goes."""

import collections
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..diagnose.findings import Finding
from ..ir.capture import SourceLine, everywhere, line_of
from ..ir.ops import cost
from ..ir.program import lines_of
from ..lens.flight import Transfer
from ..lens.machine import Figures, Run, Trace, listed
from ..lens.tally import tally
from ..text import human_bytes, plural
from .budget import Budget, over
from .costs import branches, in_a_row, no_product, over_flops, stored_again, wide_products, written_out
from .overlap import kept_findings, overlap_findings


def dropped(run: Run, blocks: Mapping[str, Any]) -> list[Finding]:
    """A limit that was asked for, and that does not reach the pallas_call: nothing else would notice it here."""
    limit = blocks.get("vmem_limit_bytes")
    for trace in run.traces if limit is not None else ():
        got = trace.call.vmem_limit_bytes
        if got != limit:
            text = (
                f"Right answer, but the kernel was called with vmem_limit_bytes={limit:,}, and {trace.call.name} "
                f"compiles with {'the default' if got is None else f'{got:,}'}: blocks that the caller has made room "
                "for would be refused by the TPU compiler. Pass it on, to pltpu.CompilerParams."
            )
            return [Finding("dropped", text, [], trace.call.where)]
    return []


def over_budget(run: Run, costs: list[Figures], budget: Budget) -> list[Finding]:
    """'Right answer, but ...': the figure, the budget, and where the bytes go. costs: the figures of each call."""
    if budget.calls is not None and len(costs) != budget.calls:  # then every other figure is another one, too
        return [_calls(run, costs, budget.calls, budget.hbm_bytes)]
    found = [*_blocks(run, costs, budget)]
    steps = sum(c.steps for c in costs)
    if (most := budget.grid_steps) is not None and steps > most:
        grids = "; ".join(
            f"{t.call.name} has the grid {tuple(map(int, t.call.grid))}, and makes blocks of {t.call.outs[0].block}"
            for t in run.traces
        )
        text = f"it takes {steps} grid steps; the budget is {most}. Do more per step, or skip steps: {grids}."
        found.append(over("grid_steps", text))
    elif (most := budget.serial_steps) is not None:  # with too many steps it is no wonder that many follow one another
        found += [f for trace in run.traces for f in in_a_row(trace, most)]
    if budget.mxu_bits is not None:
        found += no_product([trace.call for trace in run.traces])
    for bound, check in _EACH_CALL.items():
        if (most := getattr(budget, bound)) is not None:
            found += [f for trace in run.traces for f in check(trace, most)]
    flops = sum(c.flops for c in costs)
    if (most := budget.flops) is not None and flops > most:
        found.append(over_flops(run.traces, flops, most))
    special = sum(c.transcendentals for c in costs)
    if (most := budget.transcendentals) is not None and special > most:
        text = f"it takes {special:,} exponentials, roots and their like; the budget is {most:,}. Some are not needed."
        eqns = [eqn for trace in run.traces for _, eqn in everywhere(trace.call.kernel) if cost(eqn)[1]]
        found.append(over("transcendentals", text, near=dict.fromkeys(map(line_of, eqns))))
    if (most := budget.selected) is not None:
        found += _too_much_masked(run, most)
    if (most := budget.new_bytes) is not None:
        found += _too_much_allocated(run, most)
    if (most := budget.vmem_bytes) is not None and not any(f.operand == "vmem_bytes" for f in found):
        found += kept_findings(run, costs, most)
    return found + overlap_findings(run, budget.exposed_bytes, budget.in_flight_bytes)


# bound -> findings about a call that exceeds it
_EACH_CALL: dict[str, Callable[[Trace, int], Iterator[Finding]]] = {
    "mxu_bits": wide_products,
    "branches": branches,
    "operations": written_out,
    "output_stores": stored_again,
}


def _calls(run: Run, costs: list[Figures], wanted: int, most_bytes: int | None) -> Finding:
    text = f"it uses {plural(len(costs), 'pallas_call')}; this puzzle asks for {wanted}."
    hbm = sum(c.hbm_bytes for c in costs)
    if most_bytes is not None and hbm > most_bytes:
        text += f" Together they move {human_bytes(hbm)}; the budget is {human_bytes(most_bytes)}."
    outside = [o.line for o in sorted(run.outside, key=lambda o: -o.flops)]
    near = [line for trace in run.traces for line in trace.call.callers]
    return over("calls", text, _where_bytes_go(run, costs), near=[*near, *outside])


def _blocks(run: Run, costs: list[Figures], budget: Budget) -> Iterator[Finding]:
    """What blocks cost: bytes that move, bytes that are held."""
    hbm = sum(c.hbm_bytes for c in costs)
    if (most := budget.hbm_bytes) is not None and hbm > most:
        advice, near = _moved_most(run, costs)
        text = f"it moves {human_bytes(hbm)} between HBM and VMEM; the budget is {human_bytes(most)}. {advice}"
        yield over("hbm_bytes", text, _where_bytes_go(run, costs), near=near)
    calls = zip(run.traces, costs, strict=True)
    trace, largest = max(calls, key=lambda pair: pair[1].vmem_bytes, default=(None, None))
    if trace and largest and (most := budget.vmem_bytes) is not None and largest.vmem_bytes > most:
        rows = [
            f"{r.operand.name}: {r.buffers} x {human_bytes(r.operand.block_bytes)}, blocks of {_block(r)}"
            for r in sorted(largest.operands, key=lambda r: -r.vmem_bytes)
        ]
        rows += [f"scratch: {human_bytes(largest.scratch_bytes)}"] if largest.scratch_bytes else []
        text = f"it holds {human_bytes(largest.vmem_bytes)} of VMEM; the budget is {human_bytes(most)}."
        yield over("vmem_bytes", f"{text} Use smaller blocks.", rows, near=trace.call.callers)


def _too_much_allocated(run: Run, most: int) -> Iterator[Finding]:
    calls = [trace.call for trace in run.traces]
    new = [(call, n, o) for call in calls for n, o in enumerate(call.outs) if n not in call.aliases.values()]
    total = sum(math.prod(o.shape) * o.dtype.itemsize for _, _, o in new)
    if total > most:
        text = (
            f"its results take {human_bytes(total)} of new memory; the budget is {human_bytes(most)}. Write results "
            "over inputs that nobody needs any more: input_output_aliases={number of the input: number of the output}, "
            "counted from 0, scalars among the inputs."
        )
        own = [f"{call.name}: output {n}, {o.dtype} of shape {o.shape}, is an array of its own" for call, n, o in new]
        yield over("new_bytes", text, own[:4], near=[line for call, _, _ in new for line in call.callers])


def _too_much_masked(run: Run, most: int) -> Iterator[Finding]:
    lines: collections.Counter[Any] = collections.Counter()
    for trace in run.traces:
        lines.update(tally(trace.call).selected)
    total = int(sum(lines.values()))
    if total > most:
        text = (
            f"jnp.where chooses {total:,} elements, over all steps; the budget is {most:,}. A block in which every "
            "element is real and seen needs no mask: give it a branch without one."
        )
        rows = [(line, int(count)) for line, count in lines.most_common(4) if line is not None]
        evidence = [f"{line}: {count:,} elements: {line.text}" for line, count in rows]
        yield over("selected", text, evidence, near=[line for line, _ in rows])


def _moved_most(run: Run, costs: list[Figures]) -> tuple[str, list[SourceLine]]:
    """What to do about bytes: about those of the operand that moves most beyond once; and lines that it hangs on."""
    rows = [(r.hbm_bytes - r.once_bytes, t, r) for t, c in zip(run.traces, costs, strict=True) for r in c.operands]
    more, trace, row = max(rows, key=lambda each: each[0])
    if more <= 0:  # nothing moves twice
        _, trace, row = max(rows, key=lambda each: each[2].hbm_bytes)
        if own := _own_copies(run):
            ends = [(end, line) for line, each in own for t in each for end in (f"to {t.target}", f"from {t.source}")]
            counts = collections.Counter(end for end, _ in ends)
            slots = {s.name for t in run.traces for s in t.call.scratch}  # memory that is meant to be used again
            copied_again = (end for end, n in counts.items() if n > 1 and end.split()[1].partition("[")[0] not in slots)
            again = next(copied_again, "")
            lines = list(dict.fromkeys(line for end, line in ends if end == again and line is not None))
            advice = "Some of the copies that it starts itself are not needed"
            if again:
                advice += (
                    f": copies {again}, for example, start more than once, at {listed([str(line) for line in lines])}"
                )
            near = [*lines, *(line for line, _ in own if line is not None)]
            return f"{advice}.", near
        o = row.operand
        advice = (
            f"No block is copied twice, so it is the arrays that are too large, or too many: {o.name} is {o.dtype} of "
            f"shape {o.shape}, {human_bytes(row.hbm_bytes)}. Compare shapes and dtypes with the spec."
        )
        return advice, list(trace.call.callers)
    advice = (
        f"A block is copied whenever its index differs from the step before: {row.operand.name} moves {row.moves} "
        f"times, {human_bytes(more)} more than its array holds. Does it have to, at every one of those steps?"
    )
    lines = list(lines_of(row.operand.index_map)) if row.operand.index_map is not None else []
    return advice, [*lines, *trace.call.callers]


def _own_copies(run: Run) -> list[tuple[SourceLine | None, list[Transfer]]]:
    """The copies between HBM and VMEM that kernels start themselves, by the line that does, the most bytes first."""
    moved = collections.defaultdict[Any, list[Transfer]](list)
    for transfer in (t for trace in run.traces for t in trace.flight.transfers if t.hbm):
        moved[transfer.line].append(transfer)
    return sorted(moved.items(), key=lambda pair: -sum(t.nbytes for t in pair[1]))


def _where_bytes_go(run: Run, costs: list[Figures]) -> list[str]:
    names = [f"{trace.call.name}, " if len(costs) > 1 else "" for trace in run.traces]
    rows = [(name, r) for name, c in zip(names, costs, strict=True) for r in c.operands]
    own = [
        f"{line}: {plural(len(each), 'start')}, {human_bytes(sum(t.nbytes for t in each))}: from "
        f"{', '.join(t.source for t in each[:6])}{', ...' if len(each) > 6 else ''}"
        for line, each in _own_copies(run)
    ]
    by_pipeline = [
        f"{name}{r.operand.name}: {r.moves} moves of {_block(r)} {r.operand.dtype}, {human_bytes(r.hbm_bytes)} "
        f"({r.hbm_bytes / max(1, r.once_bytes):.2g} times the array)"
        for name, r in sorted(rows, key=lambda row: -row[1].hbm_bytes)
        if r.moves or not own
    ]
    return [*by_pipeline, *own][:4]


def _block(row: Any) -> str:
    """A block's shape, as BlockSpec has it."""
    return f"({', '.join(map(str, row.operand.block))})"
