"""What a kernel's values take of VMEM while others are computed, before anything runs."""

from collections.abc import Iterator
from typing import Any

from .capture import SourceLine, line_of, subprograms
from .ops import is_literal, nbytes_of, np_dtype

_SMALL = 64 << 10  # registers hold as much
_MADE_ANEW = frozenset("iota broadcast_in_dim get load masked_load".split())  # or read again, where it is needed
_LOOPS = frozenset("scan while cond".split())
_ALL_FIRST = ("dot_general", "reduce_", "argmax", "argmin", "cum")  # no part of a result without all of an operand


def held(jaxpr: Any) -> tuple[int, SourceLine | None]:
    """(bytes, line) of the most that a kernel's values take of VMEM besides blocks and scratch; 0 where nothing has to.

    The compiler works through a kernel tile by tile, so that most values never lie in VMEM as a whole. These do: what
    waits for a reduction or a matrix product and is needed again with its result; a computed left side of a matrix
    product; what a loop or a branch takes along, twice. Of 14 kernels with arrays of 1024 x 1024, libtpu 0.0.51 for v5e
    spills under a tenth of an array to VMEM for the four that have 0 here, and 0.4 to 1.2 times this for the others.
    """
    most: tuple[int, SourceLine | None] = (0, None)
    sizes = _sizes(jaxpr)
    for n, eqn in enumerate(jaxpr.eqns):
        waiting = _waiting(jaxpr, n, sizes) if sizes else 0
        inner, line = max((held(body) for body in subprograms(eqn)), key=lambda found: found[0], default=(0, None))
        if waiting + inner > most[0]:
            most = waiting + inner, line_of(eqn) or line
    return most


def _sizes(jaxpr: Any) -> dict[Any, int]:
    """The computed arrays of a program that registers do not hold, with their bytes."""
    found = {}
    for eqn in jaxpr.eqns:
        for v in eqn.outvars if eqn.primitive.name not in _MADE_ANEW else ():
            shape = getattr(v.aval, "shape", None)
            if shape and hasattr(v.aval, "dtype") and (size := nbytes_of(shape, np_dtype(v.aval))) > _SMALL:
                found[v] = size
    return found


def _waiting(jaxpr: Any, n: int, sizes: dict[Any, int]) -> int:
    """Bytes of what has to lie in VMEM as a whole while equation n is computed."""
    eqn = jaxpr.eqns[n]
    name = eqn.primitive.name
    if name in _LOOPS:
        return 2 * sum(sizes.get(v, 0) for v in eqn.outvars)
    if not name.startswith(_ALL_FIRST):
        return 0
    needed = {v for v in eqn.invars[:1] if name == "dot_general" and not is_literal(v) and v in sizes}
    before = {v for e in jaxpr.eqns[:n] for v in e.outvars if v in sizes}
    if before:
        needed |= {v for e in _after(jaxpr, n) for v in e.invars if not is_literal(v) and v in before}
    return sum(sizes[v] for v in needed)


def _after(jaxpr: Any, n: int) -> Iterator[Any]:
    """The equations that equation n has a part in."""
    known = set(jaxpr.eqns[n].outvars)
    for eqn in jaxpr.eqns[n + 1 :]:
        if any(not is_literal(v) and v in known for v in eqn.invars):
            known.update(eqn.outvars)
            yield eqn
