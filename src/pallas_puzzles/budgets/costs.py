"""What a right answer costs beyond its bytes: stores that nobody sees, steps in a row, wide products, branches."""

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..diagnose.findings import Finding
from ..diagnose.outside import place_of
from ..diagnose.steps import still_axes
from ..ir.capture import Call, Outside, everywhere, line_of, named, primitive_of
from ..ir.ops import in_dtypes, is_floating, out_dtype, summed_over
from ..ir.program import count_operations, has_python_loop, lines_of
from ..lens.machine import Trace, listed
from ..lens.tally import tally
from .budget import over


def stored_again(trace: Trace, most: int) -> Iterator[Finding]:
    """Outputs of which a block is stored at more steps of one visit than that."""
    times = "once" if most == 1 else f"{most} times"
    for o, visits in zip(trace.call.outs, trace.visits, strict=True):
        events = [e for e in trace.events if e.ref == o.name]
        stored = {e.step for e in events if e.op == "store"}
        stores = max((len(stored.intersection(visit)) for each in visits.values() for visit in each), default=0)
        if stores > most:
            why = (
                f"read back and stored again. If it holds a sum, keep the sum in scratch. Store the result {times}"
                if any(e.op == "load" for e in events)
                else f"and all but the last are thrown away: store it {times}"
            )
            ((line, _),) = collections.Counter(e.line for e in events if e.op == "store").most_common(1)
            yield over(
                o.name, f"{o.name} is stored at {stores} steps of each block, {why}, on the last step.", line=line
            )


def in_a_row(trace: Trace, most: int) -> Iterator[Finding]:
    """More steps that follow one another, when each index along the parallel axes has a core of its own, than that."""
    call = trace.call
    parallel = [d for d, s in enumerate(call.semantics) if "parallel" in s]
    serial = trace.n // max(1, math.prod(call.grid[d] for d in parallel))
    if serial <= most:
        return
    text = f"{serial} of its {trace.n} steps have to follow one another; the budget is {most}. "
    outs = [k for k, o in enumerate(call.operands) if o.role == "out" and not o.in_hbm]
    still = {d for k in outs for d in still_axes(trace, k)}
    own = [d for d in range(len(call.grid)) if d not in call.vmapped]
    apart = [str(n) for n, d in enumerate(own) if d not in still and d not in parallel and call.grid[d] > 1]
    if call.dynamic_bounds:  # JAX's simulator cannot run a grid in parallel whose length is data: no advice
        apart = []
    text += (
        f"Grid {'axes' if apart[1:] else 'axis'} {listed(apart)} may be shared between cores: each index there has "
        "output blocks of its own. Say so with 'parallel' in dimension_semantics."
        if apart
        else "Give each output block its own index along an axis that can be marked 'parallel'."
    )
    yield over("serial_steps", text, near=call.callers)


def wide_products(trace: Trace, bits: int) -> Iterator[Finding]:
    """Matrix products whose operands are wider than that, and those of integers that the compiler refuses."""
    for eqn in named(trace.call.kernel, "dot_general"):
        wide = wide_operands(eqn, bits)
        if wide is not None:
            yield wide
        elif is_floating(out_dtype(eqn)) and not is_floating(in_dtypes(eqn)[0]):
            text = (
                "its matrix product of integers is summed in floating point, which the TPU compiler refuses: the MXU "
                "adds integers as integers. Ask for preferred_element_type=jnp.int32."
            )
            yield over("mxu_bits", text, line=line_of(eqn))


def wide_operands(eqn: Any, bits: int) -> Finding | None:
    """A matrix product whose operands are wider than that, or None."""
    wide = [d for d in in_dtypes(eqn) if d.itemsize * 8 > bits]
    if not wide:
        return None
    text = f"its matrix product multiplies {wide[0]}: {wide[0].itemsize * 8} bits an operand, where {bits} are enough. "
    if summed_over(eqn) == 1:
        text += "It adds nothing up, so it is no work for the MXU: a column times a row, by *, gives the same table."
    else:
        text += (
            f"Wide operands take the MXU longer, or are rounded on the way in. Give it operands of {bits} bits, and "
        )
        text += "name the type of the sum: preferred_element_type."
    return over("mxu_bits", text, line=line_of(eqn))


def no_product(calls: Sequence[Call]) -> Iterator[Finding]:
    """Kernels without a single matrix product, where the MXU should have one."""
    if calls and not any(True for call in calls for _ in named(call.kernel, "dot_general")):
        text = (
            "there is no matrix product in it: elements are multiplied and added one by one, and the MXU has nothing "
            "to do. Let jnp.dot or jax.lax.dot_general do it."
        )
        near = list(lines_of(calls[0].kernel))
        yield over("mxu_bits", text, line=next(iter(near), None), near=near)


def over_flops(traces: Sequence[Trace], flops: int, most: int) -> Finding:
    """More arithmetic than there may be: how much, and the line that has the most of what can be spared."""
    lines = [(line, cost, trace.n) for trace in traces for line, cost in tally(trace.call).lines.items()]
    products = sum(cost[0] for _, cost, _ in lines)
    kind = 0 if products > most else 1  # products within the budget are wanted: then it is something else
    lines.sort(key=lambda line: -line[1][kind])
    said = [
        f"{line} has {mxu + others:,.0f}, at {steps} of {n} steps: {line.text.strip()}"
        for line, (mxu, others, steps), n in lines[:3]
    ]
    text = (
        f"it takes {flops:,} FLOPs; the budget is {most:,}. Some of its arithmetic is not needed, or is repeated at "
        "steps whose result is thrown away."
    )
    where = None
    if lines:
        where, (_, _, steps), n = lines[0]
        what = (
            "Most of it is in the product" if kind == 0 else "Products aside, most of it is" if products else "Most is"
        )
        text += f" {what} at {where}, at {f'all {n}' if steps == n else f'{steps} of {n}'} steps."
    by_call = [f"{t.call.name}: {sum(t.flops):,} FLOPs in {t.n} steps" for t in traces]
    return over("flops", text, [*(by_call if len(traces) > 1 else []), *said][:4], where)


def branches(trace: Trace, most: int) -> Iterator[Finding]:
    """More branches and loops in a kernel than there may be."""
    found = list(named(trace.call.kernel, "cond", "while", "scan"))
    if len(found) > most:
        many = "a branch" if len(found) == 1 else f"{len(found)} branches"
        advice = "Choose values instead of code: jnp.where." if most == 0 else "Do more of it in one of them."
        advice = advice if primitive_of(found[0]) == "cond" else "A grid makes a loop needless."
        text = f"with {many} (pl.when, cond, or a loop); the budget is {most}. {advice}"
        yield over("branches", text, [f"{line_of(e)}" for e in found[1:4]], line_of(found[0]))


def written_out(trace: Trace, most: int) -> Iterator[Finding]:
    """A kernel of more operations than it may have."""
    call = trace.call
    if (count := count_operations(call.kernel)) > most:
        why = ", because a Python loop is written out, turn by turn" if has_python_loop(call.kernel) else ""
        text = f"{call.name} consists of {count} operations{why}; the budget is {most}. "
        text += "The body of pl.loop is compiled once."
        lines = collections.Counter(line for _, eqn in everywhere(call.kernel) if (line := line_of(eqn)) is not None)
        yield over("operations", text, near=[line for line, _ in lines.most_common(1)])


def too_much_outside(outside: Sequence[Outside], most: int) -> Finding | None:
    """Matrix products outside of the kernels that are more work than what has to be done there."""
    flops = sum(o.flops for o in outside)
    if flops <= most:
        return None
    first, *others = sorted((o for o in outside if o.flops), key=lambda o: -o.flops)
    text = (
        f"products outside of the kernels do {flops:,} FLOPs; the budget is {most:,}. Most of them, {first.flops:,}, "
        f"make an array of shape {first.shape}. An index moves rows, and a kernel multiplies them."
    )
    evidence = [f"{o.flops:,} more{place_of(o)}" for o in others[:3]]
    return over("outside_flops", text, evidence, first.line, [o.line for o in (first, *others)])
