"""Questions to a program of JAX's: its lines, its size, and where it computes with 16-bit floats."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from .capture import (
    SourceLine,
    everywhere,
    instruction_of,
    is_call,
    line_of,
    named,
    space_of,
    subprograms,
)
from .ops import in_dtypes, is_floating, is_literal, nbytes_of, np_dtype, out_avals, out_dtype

_MANY_TURNS = 3  # in which one place in the code makes all its operations again: a loop


def calls_in(jaxpr: Any) -> Iterator[Any]:
    """Every pallas_call equation in a program, but none inside of another."""
    return (eqn for _, eqn in everywhere(jaxpr, in_kernels=False) if is_call(eqn))


def equations(jaxpr: Any, line: SourceLine | None = None) -> Iterator[tuple[Any, SourceLine | None]]:
    """Every equation in a program, inner ones first, with the line of the outermost one around it that has one."""
    for eqn in jaxpr.eqns:
        here = line or line_of(eqn)
        for inner in subprograms(eqn):
            yield from equations(inner, here)
        yield eqn, here


def has_python_loop(jaxpr: Any) -> bool:
    """Whether an instruction of the reader's code makes all its primitives again and again: in a loop of Python's."""
    made: dict[Any, list[str]] = {}
    for eqn in jaxpr.eqns:
        made.setdefault(instruction_of(eqn), []).append(eqn.primitive.name)
    made.pop(None, None)
    return any(min(collections.Counter(names).values()) >= _MANY_TURNS for names in made.values())


def inside(kernels: Iterable[Any]) -> Iterator[tuple[Any, SourceLine | None]]:
    """The equations of the programs of kernels, each with its line."""
    return (found for kernel in kernels for body in subprograms(kernel) for found in equations(body))


def lines_of(program: Any) -> Iterator[SourceLine]:
    """The reader's lines that a kernel or an index map is made of, in the order of its equations."""
    lines = (line_of(eqn) for _, eqn in everywhere(program)) if program is not None else ()
    return (line for line in lines if line is not None)


def count_operations(jaxpr: Any) -> int:
    """How many primitives a program consists of, with those of the programs inside of it."""
    return sum(next(subprograms(eqn), None) is None for _, eqn in everywhere(jaxpr))


def temporaries(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], Any, SourceLine | None]]:
    """(shape, dtype, line) of every array that a program makes on its way; Refs that it allocates in VMEM, too.

    In a library's jit, it is the line that calls it.
    """
    for eqn, line in equations(jaxpr):
        for aval in [*out_avals(eqn), *_scoped(eqn)]:
            if hasattr(aval, "shape"):
                yield tuple(aval.shape), np_dtype(aval), line


def scoped_bytes(jaxpr: Any) -> int:
    """The VMEM that a kernel holds at once by pl.run_scoped. What lies in one another is held together."""
    most = 0
    for eqn in jaxpr.eqns:
        own = sum(nbytes_of(ref.shape, np_dtype(ref)) for ref in _scoped(eqn))
        most = max(most, own + max(map(scoped_bytes, subprograms(eqn)), default=0))
    return most


def _scoped(eqn: Any) -> list[Any]:
    """The types of the Refs in VMEM that an equation allocates."""
    refs = [v.aval for v in eqn.params["jaxpr"].invars] if eqn.primitive.name == "run_scoped" else []
    return [ref for ref in refs if space_of(ref) == "vmem"]


# --- arithmetic in 16 bits -------------------------------------------------------------------------------------------

NARROWED = {"mul": "multiplication", "add": "addition", "sub": "subtraction", "div": "division", "reduce_sum": "sum"}


def _has_16_bits(dtype: Any) -> bool:
    return is_floating(dtype) and dtype.itemsize == 2


def _rounds(eqn: Any) -> bool:
    """A cast of 32 bits, a float's or an exact sum's, to a 16-bit float."""
    (before,) = in_dtypes(eqn)
    return before.itemsize == 4 and _has_16_bits(out_dtype(eqn))


def _users(jaxpr: Any, eqn: Any) -> set[str]:
    """The primitives, or functions of jax.numpy, that take an equation's first result, in whatever shape."""
    users = [e for e in jaxpr.eqns if any(v is eqn.outvars[0] for v in e.invars)]
    further = [_users(jaxpr, e) for e in users if e.primitive.name in _SHAPED]
    return set().union(*further, {str(e.params.get("name", e.primitive.name)) for e in users})


_SHAPED = frozenset("reshape broadcast_in_dim squeeze expand_dims".split())


def early_casts(kernel: Any) -> Iterator[Any]:
    """Casts of 32 bits to a 16-bit float whose result goes into arithmetic other than a matrix product."""
    harmless = set(
        "swap masked_swap dot_general wgmma_ref layout_cast reshape broadcast_in_dim select_n _where".split()
    )
    for jaxpr, eqn in everywhere(kernel):
        if eqn.primitive.name == "convert_element_type" and _rounds(eqn) and _users(jaxpr, eqn) - harmless:
            yield eqn


def rounded_operands(kernel: Any) -> Iterator[Any]:
    """Casts to a 16-bit float of what was computed in float32, and goes into a matrix product."""
    for jaxpr, eqn in everywhere(kernel):
        if eqn.primitive.name != "dot_general":
            continue
        made = {v: e for e in jaxpr.eqns for v in e.outvars}
        for cast in (None if is_literal(v) else made.get(v) for v in eqn.invars):
            if cast is None or cast.primitive.name != "convert_element_type" or is_literal(cast.invars[0]):
                continue
            source = made.get(cast.invars[0])
            if _rounds(cast) and source is not None and source.primitive.name in NARROWED:
                yield cast


def narrow_arithmetic(kernel: Any) -> Iterator[Any]:
    """Sums, products and the like of whole tiles that are made in a 16-bit float, and go into more arithmetic."""
    for jaxpr, eqn in everywhere(kernel):
        narrow = eqn.primitive.name in NARROWED and out_avals(eqn)[0].shape and _has_16_bits(out_dtype(eqn))
        if narrow and _users(jaxpr, eqn) - {"swap"}:
            yield eqn


def narrow_products(kernel: Any) -> Iterator[Any]:
    """The matrix products of 16-bit floats whose result has 16 bits, too."""
    products = named(kernel, "dot_general")
    return (eqn for eqn in products if all(map(_has_16_bits, [*in_dtypes(eqn), out_dtype(eqn)])))
