"""A right answer that costs too much: the figure, the budget, and where it goes."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ir.capture import SourceLine
    from ..lens.machine import Figures, OperandFigures, Run
    from .findings import Finding


@dataclasses.dataclass(frozen=True)
class Budget:
    """Upper bounds on what an answer may cost; None leaves a cost unbounded.

    hbm_bytes: bytes moved between HBM and VMEM. vmem_bytes: VMEM held by one call (blocks x buffers + scratch), and by
    values that it keeps over a copy into the memory that they were loaded from. grid_steps: steps over all calls.
    calls: exact number of pallas_calls. output_stores: in how many steps of one visit an output block may be stored.
    flops: arithmetic over all calls. serial_steps: steps of one call that have to follow one another, when every index
    along its parallel axes has a core of its own. mxu_bits: how wide the operands of matrix products may be; there has
    to be a product, too. branches: pl.when, cond and loops in a kernel. selected: elements of the results of jnp.where,
    over all calls and steps, which is what masks cost. operations: of array code without a kernel, how many primitives
    it may consist of; elements: how many the largest array that it makes may have. Of such code, flops and mxu_bits are
    those of its matrix products, and hbm_bytes what moves when each operation is a program of its own, also inside of a
    jit of the reader's. outside_flops: arithmetic of matrix products outside of the kernels. exposed_bytes: of copies
    between HBM and VMEM that a kernel starts itself, those that nothing overlaps: no arithmetic is done between the
    start and the wait. in_flight_bytes, the one lower bound: bytes of such copies that are on their way while the
    kernel computes, on average over its FLOPs. new_bytes: HBM that the calls take for results that are written over no
    input.

    Of kernels for a GPU, beside calls, flops and outside_flops: gmem_bytes: bytes between GMEM and the SMs.
    thread_bytes: those of them that threads load and store themselves; cta_bytes: those that one CTA moves. copies: out
    of GMEM into SMEM; stores: out of SMEM into GMEM. smem_bytes: SMEM held by one CTA. ctas: over all kernels.
    arrivals: on barriers. bank_conflicts: in SMEM. waited: cycles that warpgroups wait for copies, products and
    barriers; tensor_idle, copy_idle: cycles of a CTA's life in which the tensor cores or the copy engine have nothing
    to do; all three over all CTAs, on the machine's logical clock.

    Of a shard_map over several devices, over all of them (lens.devices.timeline.Counts): ici_bytes: sent from device to
    device; bytes_hops: the same, each byte counted on every link of its way; link_bytes: over the busiest link, in one
    direction; exposed_ici_bytes: sent while neither of the two devices computes; copies: to other devices. The bounds
    on kernels hold on each device.
    """

    hbm_bytes: int | None = None
    vmem_bytes: int | None = None
    grid_steps: int | None = None
    calls: int | None = None
    output_stores: int | None = None
    flops: int | None = None
    serial_steps: int | None = None
    mxu_bits: int | None = None
    branches: int | None = None
    selected: int | None = None
    operations: int | None = None
    elements: int | None = None
    outside_flops: int | None = None
    exposed_bytes: int | None = None
    in_flight_bytes: int | None = None
    new_bytes: int | None = None
    gmem_bytes: int | None = None
    thread_bytes: int | None = None
    copies: int | None = None
    stores: int | None = None
    cta_bytes: int | None = None
    smem_bytes: int | None = None
    ctas: int | None = None
    arrivals: int | None = None
    bank_conflicts: int | None = None
    waited: int | None = None
    tensor_idle: int | None = None
    copy_idle: int | None = None
    ici_bytes: int | None = None
    bytes_hops: int | None = None
    link_bytes: int | None = None
    exposed_ici_bytes: int | None = None


def dropped(run: "Run", blocks: Mapping[str, Any]) -> "list[Finding]":
    """A limit that was asked for, and that does not reach the pallas_call: nothing else would notice it here."""
    from .findings import Finding

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


def over_budget(run: "Run", costs: "list[Figures]", budget: Budget) -> "list[Finding]":
    """'Right answer, but ...': the figure, the budget, and where the bytes go."""
    from ..lens.machine import listed
    from ..text import human_bytes, plural
    from .costs import branches, dead_stores, no_product, over_flops, serial_steps, wide_products
    from .findings import Finding
    from .overlap import kept_findings, overlap_findings

    findings = []

    def over(kind: str, text: str, evidence: Sequence[str] = (), near: "Sequence[SourceLine]" = ()) -> None:
        findings.append(Finding("budget", f"Right answer, but {text}", list(evidence), operand=kind, near=list(near)))

    hbm = sum(c.hbm_bytes for c in costs)
    if budget.calls is not None and len(costs) != budget.calls:  # then every other figure is another one, too
        text = f"it uses {plural(len(costs), 'pallas_call')}; this puzzle asks for {budget.calls}."
        if budget.hbm_bytes is not None and hbm > budget.hbm_bytes:
            text += f" Together they move {human_bytes(hbm)}; the budget is {human_bytes(budget.hbm_bytes)}."
        near = [line for trace in run.traces for line in trace.call.callers]
        near += [o.line for o in sorted(run.outside, key=lambda o: -o.flops) if o.line is not None]
        over("calls", text, _where_bytes_go(run, costs), near)
        return findings
    if budget.hbm_bytes is not None and hbm > budget.hbm_bytes:
        advice, near = _moved_most(run, costs)
        text = f"it moves {human_bytes(hbm)} between HBM and VMEM; the budget is {human_bytes(budget.hbm_bytes)}. "
        over("hbm_bytes", text + advice, _where_bytes_go(run, costs), near)
    vmem = max((c.vmem_bytes for c in costs), default=0)
    if budget.vmem_bytes is not None and vmem > budget.vmem_bytes:
        largest = max(costs, key=lambda c: c.vmem_bytes)
        rows = [
            f"{r.operand.name}: {r.buffers} x {human_bytes(r.operand.block_bytes)}, blocks of {_block(r)}"
            for r in sorted(largest.operands, key=lambda r: -r.vmem_bytes)
        ]
        rows += [f"scratch: {human_bytes(largest.scratch_bytes)}"] if largest.scratch_bytes else []
        text = (
            f"it holds {human_bytes(vmem)} of VMEM; the budget is {human_bytes(budget.vmem_bytes)}. Use smaller blocks."
        )
        most_held = max(zip(run.traces, costs, strict=True), key=lambda pair: pair[1].vmem_bytes)[0]
        over("vmem_bytes", text, rows, most_held.call.callers)
    steps = sum(c.steps for c in costs)
    if budget.grid_steps is not None and steps > budget.grid_steps:
        over(
            "grid_steps",
            f"it takes {steps} grid steps; the budget is {budget.grid_steps}. Do more per step, or skip steps: "
            f"{_grids(run)}.",
        )
    too_long = any(f.operand == "grid_steps" for f in findings)  # then it is no wonder that many follow one another
    for trace in run.traces if budget.serial_steps is not None and not too_long else ():
        serial, apart = serial_steps(trace)
        if serial > (budget.serial_steps or 0):
            text = f"{serial} of its {trace.n} steps have to follow one another; the budget is {budget.serial_steps}. "
            text += (
                f"Grid {'axes' if apart[1:] else 'axis'} {listed(list(map(str, apart)))} may be shared between cores: "
                "each index there has output blocks of its own. Say so with 'parallel' in dimension_semantics."
                if apart
                else "Give each output block its own index along an axis that can be marked 'parallel'."
            )
            over("serial_steps", text, near=trace.call.callers)
    for trace in run.traces if budget.mxu_bits is not None else ():
        findings += wide_products(trace.call, budget.mxu_bits or 0)
    if budget.mxu_bits is not None:
        findings += no_product([trace.call for trace in run.traces])
    for trace in run.traces if budget.branches is not None else ():
        findings += branches(trace.call, budget.branches or 0)
    most = budget.output_stores
    for trace in run.traces if most is not None else ():
        for name, stores in dead_stores(trace).items():
            if most is not None and stores > most:
                times = "once" if most == 1 else f"{most} times"
                back = any(e.op == "load" and e.ref == name for e in trace.events)
                why = (
                    f"read back and stored again. If it holds a sum, keep the sum in scratch. Store the result {times}"
                    if back
                    else f"and all but the last are thrown away: store it {times}"
                )
                stored = collections.Counter(e.line for e in trace.events if e.op == "store" and e.ref == name)
                lines = [line for line, _ in stored.most_common(1) if line is not None]
                found = Finding(
                    "budget",
                    f"Right answer, but {name} is stored at {stores} steps of each block, {why}, on the last step.",
                    [],
                    next(iter(lines), None),
                    operand=name,
                )
                findings.append(found)
    flops = sum(c.flops for c in costs)
    if budget.flops is not None and flops > budget.flops:
        by_call = [f"{t.call.name}: {sum(t.flops):,} FLOPs in {t.n} steps" for t in run.traces]
        findings.append(over_flops(run.traces, flops, budget.flops, by_call if len(by_call) > 1 else []))
    if budget.selected is not None:
        findings += _too_much_masked(run, budget.selected)
    if budget.new_bytes is not None:
        findings += _too_much_allocated(run, budget.new_bytes)
    if budget.vmem_bytes is not None and vmem <= budget.vmem_bytes:
        findings += kept_findings(run, costs, budget.vmem_bytes)
    return findings + overlap_findings(run, budget.exposed_bytes, budget.in_flight_bytes)


def _too_much_allocated(run: "Run", most: int) -> "list[Finding]":
    from ..text import human_bytes
    from .findings import Finding

    calls = [trace.call for trace in run.traces]
    new = [(call, n, o) for call in calls for n, o in enumerate(call.outs) if n not in call.aliases.values()]
    total = sum(math.prod(o.shape) * o.dtype.itemsize for _, _, o in new)
    if total <= most:
        return []
    cause = (
        f"Right answer, but its results take {human_bytes(total)} of new memory; the budget is {human_bytes(most)}. "
        "Write results over inputs that nobody needs any more: input_output_aliases={number of the input: number of "
        "the output}, counted from 0, scalars among the inputs."
    )
    evidence = [f"{call.name}: output {n}, {o.dtype} of shape {o.shape}, is an array of its own" for call, n, o in new]
    near = [line for call, _, _ in new for line in call.callers]
    return [Finding("budget", cause, evidence[:4], operand="new_bytes", near=near)]


def _grids(run: "Run") -> str:
    """The grid of each call, and which of its axes are as long as a value says."""
    return "; ".join(f"{t.call.name} has the grid {tuple(map(int, t.call.grid))}" for t in run.traces)


def _too_much_masked(run: "Run", most: int) -> "list[Finding]":
    from ..lens.tally import tally
    from .findings import Finding

    lines: collections.Counter[Any] = collections.Counter()
    for trace in run.traces:
        lines.update(tally(trace.call).selected)
    total = int(sum(lines.values()))
    if total <= most:
        return []
    cause = (
        f"Right answer, but jnp.where chooses {total:,} elements, over all steps; the budget is {most:,}. A block in "
        "which every element is real and seen needs no mask: give it a branch without one."
    )
    rows = [(line, int(count)) for line, count in lines.most_common(4) if line is not None]
    evidence = [f"{line}: {count:,} elements: {line.text}" for line, count in rows]
    return [Finding("budget", cause, evidence, operand="selected", near=[line for line, _ in rows])]


def _moved_most(run: "Run", costs: "list[Figures]") -> "tuple[str, list[SourceLine]]":
    """What to do about bytes: about those of the operand that moves most beyond once; and lines that it hangs on."""
    from ..ir.program import lines_of
    from ..text import human_bytes

    rule = "A block is copied whenever its index differs from the step before"
    rows = [(r.hbm_bytes - r.once_bytes, t, r) for t, c in zip(run.traces, costs, strict=True) for r in c.operands]
    more, trace, row = max(rows, key=lambda each: each[0], default=(0, None, None))
    if trace is None or row is None:
        return f"{rule}: look at which operand moves more often than it must.", []
    if more <= 0:  # nothing moves twice
        _, trace, row = max(rows, key=lambda each: (each[2].operand.role == "out", each[2].hbm_bytes))
        o = row.operand
        advice = (
            f"No block is copied twice, so it is the arrays that are too large, or too many: {o.name} is {o.dtype} of "
            f"shape {o.shape}, {human_bytes(row.hbm_bytes)}. Compare shapes and dtypes with the spec."
        )
        return advice, list(trace.call.callers)
    name = row.operand.name
    advice = f"{rule}: {name} moves {row.moves} times, {human_bytes(more)} more than its array holds."
    lines = list(lines_of(row.operand.index_map)) if row.operand.index_map is not None else []
    return f"{advice} Does it have to, at every one of those steps?", [*lines, *trace.call.callers]


def _where_bytes_go(run: "Run", costs: "list[Figures]") -> list[str]:
    from ..text import human_bytes

    names = [f"{trace.call.name}, " if len(costs) > 1 else "" for trace in run.traces]
    rows = sorted(((name, r) for name, c in zip(names, costs, strict=True) for r in c.operands), key=_most_bytes)
    return [
        f"{name}{r.operand.name}: {r.moves} moves of {_block(r)} {r.operand.dtype}, {human_bytes(r.hbm_bytes)} "
        f"({r.hbm_bytes / max(1, r.once_bytes):.2g} times the array)"
        for name, r in rows[:4]
    ]


def _most_bytes(row: "tuple[str, OperandFigures]") -> int:
    return -row[1].hbm_bytes


def _block(row: Any) -> str:
    """A block's shape, as BlockSpec has it."""
    o = row.operand
    return f"({', '.join(map(str, o.block))})"
