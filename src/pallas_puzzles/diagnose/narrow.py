"""Where a kernel keeps in 16 bits what could have 32: the places that round, each with what to do instead."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.capture import SourceLine, line_of
from ..ir.ops import out_dtype
from ..ir.program import NARROWED, early_casts, lines_of, narrow_arithmetic, narrow_products
from ..lens import gpu
from ..lens.machine import Run, Trace
from .findings import Finding
from .rounding import Excess, times


@dataclasses.dataclass(frozen=True)
class Narrow:
    """One place that rounds. `kind`: the same for such a place in another kernel, whatever it is called there."""

    kind: str
    words: str
    line: SourceLine | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a run: its program, the names of its outputs and what they hold, and the line of the last store
    into each."""

    program: Any
    results: Sequence[np.ndarray]
    outs: Sequence[str]
    stored: dict[str, SourceLine]


def kernels_of(run: Run) -> list[Kernel]:
    """The kernels of a run, in their order."""
    return [*map(_of_launched, run.calls)] if isinstance(run, gpu.Run) else [*map(_of_call, run.traces)]


def _of_call(trace: Trace) -> Kernel:
    stored = {e.ref: e.line for e in trace.events if e.op == "store" and e.line is not None}
    return Kernel(trace.call.kernel, trace.outputs, [o.name for o in trace.call.outs], stored)


def _of_launched(launched: gpu.Launched) -> Kernel:
    outs = [name for name, _, _ in launched.kernel.outputs]
    lines = [[w.instr.line for w in writes if w is not None and w.instr is not None] for _, writes in launched.written]
    stored = {name: line for name, mine in zip(outs, lines, strict=True) for line in mine if line is not None}
    return Kernel(launched.kernel.jaxpr, launched.outputs, outs, stored)


def narrow_places(kernel: Kernel) -> Iterator[Narrow]:
    """The places in a kernel, the likeliest first."""
    for eqn in narrow_products(kernel.program):
        words = (
            f"A product of 16-bit tiles is asked for in 16 bits: its result is {out_dtype(eqn)}, as its operands are, "
            "and what the MXU has summed in 32 bits is rounded before any cast. Ask for more where the product is "
            "made: preferred_element_type=jnp.float32."
        )
        yield Narrow("product", words, line_of(eqn))
    for eqn in early_casts(kernel.program):
        words = (
            f"A value is cast to 16-bit {_made(eqn)}, and the kernel goes on with the rounded number. Cast once, "
            "at the end, in what is stored."
        )
        yield Narrow("cast", words, line_of(eqn))
    for eqn in narrow_arithmetic(kernel.program):
        name = NARROWED[eqn.primitive.name]
        words = (
            f"{'An' if name[0] in 'aeiou' else 'A'} {name} is done in 16-bit {_made(eqn)}, and each of its results is "
            "rounded: cast what goes into it first (.astype(jnp.float32)), and back once at the end."
        )
        yield Narrow(name, words, line_of(eqn))


def narrow_kinds(kernels: Sequence[Kernel]) -> frozenset[str]:
    """The kinds of places that a run has. What a right answer does, too, is no mistake."""
    return frozenset(p.kind for k in kernels for p in narrow_places(k))


def too_rough(
    kernels: Sequence[Kernel], where: tuple[int, int] | None, name: str, excess: Excess, known: frozenset[str]
) -> Finding:
    """A result of which every value is within tolerance, and all of them together are not.

    where: the numbers of the kernel and of its output that it comes from, if it does. known: narrow_kinds of a right
    answer.
    """
    if where is None:
        return Finding("rounding", f"{name}: {excess.words} {excess.advice}")
    kernel = kernels[where[0]]
    out = kernel.outs[where[1]]
    places = [p for p in narrow_places(kernel) if p.kind not in known]
    place = next((p for p in places if p.kind == "product" or not excess.one_way), None)
    if place is None:
        cause = f"{excess.words} {excess.advice}"
    else:  # a sum in 16 bits may lose more than it rounds: its errors may well point one way
        size = f"the error is {times(excess.ratio)} the course's, though each value is nearly right."
        cause = f"{size if excess.one_way else f'rounding, not logic: {excess.words}'} {place.words}"
    line = (place and place.line) or kernel.stored.get(out)
    return Finding("rounding", f"{out}: {cause}", [], line, operand=out, near=list(lines_of(kernel.program)))


def _made(eqn: Any) -> str:
    return f"{out_dtype(eqn)} ({line_of(eqn)})"
