"""Where a kernel keeps in 16 bits what could have 32: the places that round, each with what to do instead."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..ir.capture import SourceLine, line_of
from ..ir.ops import is_floating, out_dtype
from ..ir.program import (
    NARROWED,
    early_casts,
    lines_of,
    narrow_arithmetic,
    narrow_products,
    rounded_factors,
    rounded_operands,
)
from ..lens.machine import Trace
from .findings import Diagnosis, Finding
from .rounding import Excess, times

SUMS = frozenset({"product", "scratch", "output"})  # kinds of places where a sum grows, or is made


@dataclasses.dataclass(frozen=True)
class Narrow:
    """One place that rounds. `kind`: the same for such a place in another kernel, whatever it is called there."""

    kind: str
    words: str
    line: SourceLine | None = None


def narrow_places(trace: Trace, number: int) -> Iterator[Narrow]:
    """The places in the call that makes output `number`, the likeliest first."""
    call, out = trace.call, trace.call.outs[number]
    for eqn in narrow_products(call.kernel):
        words = (
            f"A product of 16-bit tiles is asked for in 16 bits: its result is {out_dtype(eqn)}, as its operands are, "
            "and what the MXU has summed in 32 bits is rounded before any cast. Ask for more where the product is "
            "made: preferred_element_type=jnp.float32."
        )
        yield Narrow("product", words, line_of(eqn))
    for s in call.scratch:
        if _narrow(s.dtype) and s.space == "vmem":
            yield Narrow("scratch", f"{s.name} is {s.dtype}, and every addition to it rounds: accumulate in float32.")
    if _narrow(out.dtype) and any(e.op == "load" and e.ref == out.name for e in trace.events):
        words = (
            f"The sum grows in {out.name}, which is 16-bit ({out.dtype}), and every addition to it rounds: keep it in "
            "a float32 scratch buffer, and cast once at the end."
        )
        yield Narrow("output", words)
    for eqn in rounded_factors(call.kernel):
        bits = f", to the 8 bits of a {out_dtype(eqn)}" if str(out_dtype(eqn)) == "bfloat16" else ""
        words = (
            f"A factor is multiplied into an operand of the matrix product ({line_of(eqn)}), and what goes into the "
            f"product is 16-bit: every element is rounded before it is summed{bits}. Multiply the result of the "
            "product instead: it is float32."
        )
        yield Narrow("factor", words)
    for eqn in early_casts(call.kernel):
        words = (
            f"A value is cast to 16-bit {_made(eqn)}, and the kernel goes on with the rounded number. Cast once, "
            "at the end, in what is stored."
        )
        yield Narrow("cast", words, line_of(eqn))
    for eqn in narrow_arithmetic(call.kernel):
        name = NARROWED[eqn.primitive.name]
        words = (
            f"{'An' if name[0] in 'aeiou' else 'A'} {name} is done in 16-bit {_made(eqn)}, and each of its results is "
            "rounded: cast what goes into it first (.astype(jnp.float32)), and back once at the end."
        )
        yield Narrow(name, words, line_of(eqn))
    for eqn in rounded_operands(call.kernel):
        words = (
            f"What goes into the matrix product was computed in float32 and cast to 16-bit {_made(eqn)}: every element "
            "is rounded before it is summed. Multiply first; do the rest with the sum, which is float32."
        )
        yield Narrow("operand", words, line_of(eqn))


def handed_on(traces: Sequence[Trace], last: Trace) -> Iterator[Narrow]:
    """16-bit results of calls that a later one, at the latest `last`, may work with."""
    for trace in traces:
        if trace is last:
            return
        for o in trace.call.outs:
            if _narrow(o.dtype):
                words = (
                    f"{o.name} of {trace.call.name} is {o.dtype}, so a later call computes with rounded numbers. Store "
                    "them in float32."
                )
                yield Narrow("handed on", words)


def narrow_kinds(traces: Sequence[Trace]) -> frozenset[str]:
    """The kinds of places that a run has. What a right answer does, too, is no mistake."""
    own = {p.kind for t in traces for number in range(len(t.call.outs)) for p in narrow_places(t, number)}
    return frozenset(own | {p.kind for t in traces[-1:] for p in handed_on(traces, t)})


def too_rough(
    traces: Sequence[Trace], trace: Trace | None, number: int, name: str, excess: Excess, known: frozenset[str]
) -> Diagnosis:
    """A result of which every value is within tolerance, and all of them together are not.

    trace, number: the call and the output that it comes from, if it does. known: narrow_kinds of a right answer.
    """
    if trace is None:
        return Diagnosis([Finding("rounding", f"{name}: {excess.words} {excess.advice}")])
    out = trace.call.outs[number]
    places = [p for p in (*narrow_places(trace, number), *handed_on(traces, trace)) if p.kind not in known]
    place = next((p for p in places if p.kind in SUMS or not excess.one_way), None)
    if place is None:
        cause = f"{excess.words} {excess.advice}"
    else:  # a sum in 16 bits may lose more than it rounds: its errors may well point one way
        size = f"the error is {times(excess.ratio)} the course's, though each value is nearly right."
        cause = f"{size if excess.one_way else f'rounding, not logic: {excess.words}'} {place.words}"
    stores = [e.line for e in trace.events if e.op == "store" and e.ref == out.name and e.line is not None]
    line = (place and place.line) or next(reversed(stores), None)
    near = list(lines_of(trace.call.kernel))
    found = Finding("rounding", f"{out.name}: {cause}", [], line, operand=out.name, near=near)
    return Diagnosis([found], out)


def _narrow(dtype: Any) -> bool:
    return is_floating(dtype) and dtype.itemsize < 4


def _made(eqn: Any) -> str:
    return f"{out_dtype(eqn)} ({line_of(eqn)})"
