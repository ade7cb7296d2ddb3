"""What a kernel's values take of VMEM while others are computed, before anything runs."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from .capture import SourceLine, everywhere, line_of, named, subprograms
from .ops import is_literal, nbytes_of, np_dtype

_SMALL = 64 << 10  # registers hold as much
_REGISTERS = 256 << 10  # all that a TensorCore has, of v5e and later: 64 of 4 KiB (How to Scale Your Model, chapter 2)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A value that is made before a copy starts, or is waited for, and needed after that.

    nbytes: of it; loads: the `get`s it is made of.
    """

    nbytes: int
    loads: list[Any]


def kept(jaxpr: Any) -> dict[int, list[Kept]]:
    """id() of each dma_start and dma_wait of a kernel -> the values kept over it that all registers cannot hold.

    If a copy overwrites what a value was loaded from, it cannot be read again: it takes VMEM, or is used up before the
    copy starts. A sum of squares through one slot, by libtpu 0.0.50 for v5e: with tiles of 1 MiB 532 KiB are spilled,
    and 356 KiB with two slots; of 320 KiB 20 KiB, and nothing with two. Over a wait, what is computed before it takes
    VMEM, too. Products that wait for the tile before, and are stored then: of 320 KiB 92 KiB are spilled, of 640 KiB
    412 KiB, and nothing where the wait comes first.
    """
    found: dict[int, list[Kept]] = collections.defaultdict(list)
    programs = [jaxpr, *(body for _, eqn in everywhere(jaxpr) for body in subprograms(eqn))]
    for program in programs if next(named(jaxpr, "dma_start"), None) is not None else []:
        for n, eqn in enumerate(program.eqns):
            inside = (e for body in subprograms(eqn) for _, e in everywhere(body))
            starts = {id(e): name == "dma_start" for e in (eqn, *inside) if (name := e.primitive.name) in _COPIES}
            loaded, computed = _over(program, n) if starts else ([], [])
            for at, is_start in starts.items():
                found[at] += computed + (loaded if is_start else [])
    return found


_COPIES = ("dma_start", "dma_wait")


def _over(program: Any, n: int) -> tuple[list[Kept], list[Kept]]:
    """The large values that are kept over equation n: those that can be had again, and those that are computed."""
    maker = {v: eqn for eqn in program.eqns[:n] for v in eqn.outvars if _nbytes(v) > _REGISTERS}
    later = {v for eqn in program.eqns[n + 1 :] for v in eqn.invars if not is_literal(v)}
    later.update(v for v in program.outvars if not is_literal(v))

    def loads(v: Any) -> list[Any]:
        eqn = maker.get(v)
        if eqn is None or eqn.primitive.name == "get":
            return [] if eqn is None else [eqn]
        return [load for u in eqn.invars if not is_literal(u) for load in loads(u)]

    values: tuple[list[Kept], list[Kept]] = [], []
    for v in maker:
        if v in later:
            values[maker[v].primitive.name not in _MADE_ANEW].append(Kept(_nbytes(v), loads(v)))
    return values


def _nbytes(v: Any) -> int:
    shape = getattr(v.aval, "shape", None)
    return nbytes_of(shape, np_dtype(v.aval)) if shape and hasattr(v.aval, "dtype") else 0


def _sizes(jaxpr: Any) -> dict[Any, int]:
    """The computed arrays of a program that registers do not hold, with their bytes."""
    computed = (eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _MADE_ANEW)
    return {v: size for eqn in computed for v in eqn.outvars if (size := _nbytes(v)) > _SMALL}


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
