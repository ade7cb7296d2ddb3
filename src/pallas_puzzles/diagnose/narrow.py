"""Where a kernel keeps in 16 bits what could have 32: the places that round, each with what to do instead."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.capture import SourceLine, line_of, primitive_of
from ..ir.ops import is_floating, out_dtype
from ..ir.program import (
    NARROWED,
    early_casts,
    lines_of,
    narrow_arithmetic,
    narrow_products,
    rounded_operands,
)
from ..lens import gpu
from ..lens.machine import Run, Trace
from .findings import Finding
from .rounding import Excess, times
from .wrong import keeps

SUMS = frozenset({"product", "scratch", "output"})  # kinds of places where a sum grows, or is made


@dataclasses.dataclass(frozen=True)
class Narrow:
    """One place that rounds. `kind`: the same for such a place in another kernel, whatever it is called there."""

    kind: str
    words: str
    line: SourceLine | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one kernel of a run computes with: its program, and names with dtypes.

    results: what the outputs hold. sums: memory in which a sum may grow, beside the outputs. kept: the outputs that a
    step reads as an earlier one has left them. stored: the line of the last store into each output.
    """

    name: str
    program: Any
    results: Sequence[np.ndarray]
    outs: Sequence[tuple[str, Any]]
    sums: Sequence[tuple[str, Any]]
    kept: frozenset[str]
    stored: dict[str, SourceLine]


def kernels_of(run: Run) -> list[Kernel]:
    """The kernels of a run, in their order."""
    return [*map(_of_launched, run.calls)] if isinstance(run, gpu.Run) else [*map(_of_call, run.traces)]


def _of_call(trace: Trace) -> Kernel:
    call = trace.call
    outs = [(o.name, o.dtype) for o in call.outs]
    sums = [(s.name, s.dtype) for s in call.scratch if s.space == "vmem"]
    kept = frozenset(name for name, _ in outs if keeps([e for e in trace.events if e.ref == name]))
    stored = {e.ref: e.line for e in trace.events if e.op == "store" and e.line is not None}
    return Kernel(call.name, call.kernel, trace.outputs, outs, sums, kept, stored)


def _of_launched(launched: gpu.Launched) -> Kernel:
    kernel = launched.kernel
    outs = [(name, dtype) for name, _, dtype in kernel.outputs]
    allocs = [alloc for instr in kernel.program.everything() for alloc in instr.p.get("allocs", ())]
    sums = [(alloc.name, alloc.dtype) for alloc in allocs if alloc.kind == "acc" or alloc.space == "tmem"]
    lines = [[w.instr.line for w in writes if w is not None and w.instr is not None] for _, writes in launched.written]
    stored = {name: line for (name, _), mine in zip(outs, lines, strict=True) for line in mine if line is not None}
    return Kernel(kernel.name, kernel.jaxpr, launched.outputs, outs, sums, frozenset(), stored)


def narrow_places(kernel: Kernel, number: int) -> Iterator[Narrow]:
    """The places in the kernel that makes output `number`, the likeliest first."""
    out, dtype = kernel.outs[number]
    for eqn in narrow_products(kernel.program):
        words = (
            f"A product of 16-bit tiles is asked for in 16 bits: its result is {out_dtype(eqn)}, as its operands are, "
            "and what the MXU has summed in 32 bits is rounded before any cast. Ask for more where the product is "
            "made: preferred_element_type=jnp.float32."
        )
        yield Narrow("product", words, line_of(eqn))
    for name, held in kernel.sums:
        if _narrow(held):
            yield Narrow("scratch", f"{name} is {held}, and every addition to it rounds: accumulate in float32.")
    if _narrow(dtype) and out in kernel.kept:
        words = (
            f"The sum grows in {out}, which is 16-bit ({dtype}), and every addition to it rounds: keep it in "
            "a float32 scratch buffer, and cast once at the end."
        )
        yield Narrow("output", words)
    for eqn in early_casts(kernel.program):
        words = (
            f"A value is cast to 16-bit {_made(eqn)}, and the kernel goes on with the rounded number. Cast only what "
            "goes into a matrix product, and what is stored at the end."
        )
        yield Narrow("cast", words, line_of(eqn))
    for eqn in narrow_arithmetic(kernel.program):
        name = NARROWED[primitive_of(eqn)]
        words = (
            f"{'An' if name[0] in 'aeiou' else 'A'} {name} is done in 16-bit {_made(eqn)}, and each of its results is "
            "rounded: do it later, where the numbers are float32, or cast what goes into it (.astype(jnp.float32)), "
            "and back once at the end."
        )
        yield Narrow(name, words, line_of(eqn))
    for eqn in rounded_operands(kernel.program):
        words = (
            f"What goes into the matrix product was computed in float32 and cast to 16-bit {_made(eqn)}: every element "
            "is rounded before it is summed. Multiply first; do the rest with the sum, which is float32."
        )
        yield Narrow("operand", words, line_of(eqn))


def handed_on(kernels: Sequence[Kernel], last: int) -> Iterator[Narrow]:
    """16-bit results of kernels that a later one, at the latest number `last`, may work with."""
    for kernel in kernels[:last]:
        for name, dtype in kernel.outs:
            if _narrow(dtype):
                words = (
                    f"{name} of {kernel.name} is {dtype}, so a later call computes with rounded numbers. Store them in "
                    "float32."
                )
                yield Narrow("handed on", words)


def narrow_kinds(kernels: Sequence[Kernel]) -> frozenset[str]:
    """The kinds of places that a run has. What a right answer does, too, is no mistake."""
    own = {p.kind for k in kernels for number in range(len(k.outs)) for p in narrow_places(k, number)}
    return frozenset(own | {p.kind for p in handed_on(kernels, len(kernels) - 1)})


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
    out, _ = kernel.outs[where[1]]
    places = [p for p in (*narrow_places(kernel, where[1]), *handed_on(kernels, where[0])) if p.kind not in known]
    place = next((p for p in places if p.kind in SUMS or excess.rounds), None)
    if place is None:
        cause = f"{excess.words} {excess.advice}"
    else:  # a sum in 16 bits may lose more than it rounds: its errors may well point one way
        size = f"the error is {times(excess.ratio)} the course's, though each value is nearly right."
        cause = f"{size if excess.one_way else f'rounding, not logic: {excess.words}'} {place.words}"
    line = (place and place.line) or kernel.stored.get(out)
    kind = "rounding" if place is None else "narrow"
    return Finding(kind, f"{out}: {cause}", [], line, operand=out, near=list(lines_of(kernel.program)))


def _narrow(dtype: Any) -> bool:
    return is_floating(dtype) and dtype.itemsize < 4


def _made(eqn: Any) -> str:
    return f"{out_dtype(eqn)} ({line_of(eqn)})"
