"""A function as eager JAX runs it, one program for each operation; and the matrix products that a function does."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .capture import SourceLine, is_call, is_readers_file, line_of, subprograms
from .ops import cost, in_avals, in_dtypes, inlined, interpret, nbytes_of, np_dtype, out_avals


@dataclasses.dataclass(eq=False)
class Array:
    """An array that exists only as a shape. of: the array that it is another view of."""

    shape: tuple[int, ...]
    dtype: Any
    of: "Array | None" = None

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)

    @property
    def whole(self) -> "Array":
        return self.of or self


@dataclasses.dataclass(frozen=True)
class Operation:
    """One program of an eager run. run: its arrays -> a list of arrays; outs: what it makes; line: who asks for it.

    held_bytes: of all arrays that exist when it ends and are neither arguments nor results of the whole function.
    """

    name: str
    run: Callable[..., list[Any]]
    arrays: tuple[Array, ...]
    outs: tuple[Array, ...]
    held_bytes: int
    line: SourceLine | None

    @property
    def moved_bytes(self) -> int:
        """What it takes and what it makes."""
        return sum(each.nbytes for each in [*self.arrays, *self.outs])


def operations(fn: Callable[..., Any], shapes: Sequence[Any], *, inside: bool = False) -> list[Operation]:
    """The programs that `fn(*arrays)` runs one after the other when nothing is jitted.

    A function that JAX itself jits, such as jax.nn.softmax, is one program. So is one that the reader jits, except with
    inside=True: then what it does counts as if it were not jitted. shapes: pytrees of ShapeDtypeStructs. Raises
    whatever tracing fn raises.
    """
    program = jax.make_jaxpr(fn)(*shapes)
    given = [Array(tuple(x.shape), x.dtype) for x in jax.tree.leaves(tuple(shapes))]
    ran: list[tuple[Any, list[Any], list[Array]]] = []

    def note(eqn: Any, values: list[Any]) -> list[Any]:
        jitted = eqn.primitive.name in ("pjit", "jit") and not (inside and _is_readers(eqn))
        inner = None if jitted else inlined(eqn)
        if inner is not None:
            return interpret(inner, values, note)
        outs = [Array(tuple(aval.shape), np_dtype(aval)) for aval in out_avals(eqn)]
        if eqn.primitive.name in _VIEWS and isinstance(values[0], Array) and _sizes(values[0]) == _sizes(outs[0]):
            return [dataclasses.replace(outs[0], of=values[0].whole)]
        ran.append((eqn, values, outs))
        return list(outs)

    results = interpret(program, given, note)
    outside = {id(each.whole) for each in [*given, *results] if isinstance(each, Array)}
    last = {id(v.whole): i for i, (_, values, _) in enumerate(ran) for v in values if isinstance(v, Array)}
    held: dict[int, Array] = {}
    found = []
    for i, (eqn, values, outs) in enumerate(ran):
        held |= {id(out): out for out in outs if id(out) not in outside}
        arrays = tuple(each for each in values if isinstance(each, Array))
        size = sum(each.nbytes for each in held.values())
        run = functools.partial(_run, eqn, values)
        name = str(eqn.params.get("name") or eqn.primitive.name)
        found.append(Operation(name, run, arrays, tuple(outs), size, line_of(eqn)))
        held = {key: each for key, each in held.items() if last.get(key, -1) > i}
    return found


_VIEWS = frozenset("reshape squeeze broadcast_in_dim".split())  # parts of a reduction with keepdims=True


def _sizes(array: Array) -> list[int]:
    """The axes longer than 1. A reshape that changes them is a program of its own, and on a TPU most often a copy."""
    return [size for size in array.shape if size != 1]


def _is_readers(eqn: Any) -> bool:
    """Whether what a jit is around stands in the reader's code."""
    return is_readers_file(str(eqn.params["jaxpr"].jaxpr.debug_info.func_filename or "<"))


def _run(eqn: Any, values: Sequence[Any], *arrays: Any) -> list[Any]:
    given = iter(arrays)
    operands = [next(given) if isinstance(value, Array) else value for value in values]
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def products(fn: Callable[..., Any], shapes: Sequence[Any]) -> dict[str, float]:
    """dtype of the operands -> FLOPs of the matrix products and convolutions outside of kernels, loops multiplied."""
    found: collections.Counter[str] = collections.Counter()

    def count(jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found[str(in_dtypes(eqn)[0])] += cost(eqn)[0] * times
            elif eqn.primitive.name == "conv_general_dilated":  # for each element of the result, those of a filter
                numbers, rhs = eqn.params["dimension_numbers"], in_avals(eqn)[1]
                elements = rhs.size // rhs.shape[numbers.rhs_spec[0]]
                found[str(in_dtypes(eqn)[0])] += 2 * out_avals(eqn)[0].size * elements * times
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in subprograms(eqn) if not is_call(eqn) else ():
                count(inner, times * trips)

    count(jax.make_jaxpr(fn)(*shapes).jaxpr, 1)
    return dict(found)
