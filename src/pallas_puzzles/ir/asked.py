"""What a spec asks for, as far as libraries have a name for it: one matrix product, or attention."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .capture import everywhere
from .ops import in_avals, inlined, is_literal, out_dtype

_PLAIN = frozenset("convert_element_type reshape squeeze transpose broadcast_in_dim copy stop_gradient".split())
_HEADS_FIRST, _ROWS_FIRST = ((0, 1), (0, 1)), ((0, 2), (0, 2))  # batch dimensions of the scores


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of the two arguments. dimensions: as jax.lax.dot_general takes them. dtype: of the result."""

    dimensions: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Attention:
    """softmax(scale * q @ k.T) @ v of three arguments: (B, H, S, D), or (B, S, H, D) where not heads_first."""

    heads_first: bool
    scale: float
    causal: bool


def asked(spec: Callable[..., Any], args: Sequence[Any]) -> Product | Attention | None:
    """args: arrays, or shapes with dtypes. None: something else, or nobody can tell.

    What is read of attention is a guess where a spec does more: whoever uses it has to compare the results.
    """
    try:
        program = jax.make_jaxpr(spec)(*args).jaxpr
    except Exception:  # a spec that computes with NumPy, say
        return None
    eqns = [eqn for _, eqn in everywhere(program) if inlined(eqn) is None]
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    others = {eqn.primitive.name for eqn in eqns} - {"dot_general"}
    if len(products) == 1 and others <= _PLAIN and len(program.outvars) == 1:
        if [tuple(x.shape) for x in args] != [tuple(aval.shape) for aval in in_avals(products[0])]:
            return None
        return Product(products[0].params["dimension_numbers"], out_dtype(eqns[-1]))
    if len(products) == 2 and {"exp", "div"} <= others and len(args) == 3:
        batch = tuple(map(tuple, products[0].params["dimension_numbers"][1]))
        if batch in (_HEADS_FIRST, _ROWS_FIRST) and all(len(x.shape) == 4 for x in args):
            return Attention(batch == _HEADS_FIRST, _scale(eqns), "iota" in others)
    return None


def _scale(eqns: Sequence[Any]) -> float:
    """The first number in the program that is not 1, and that an array is multiplied with or divided by."""
    for eqn in eqns:
        if eqn.primitive.name in ("mul", "div") and eqn.outvars[0].aval.shape:
            value = _number(eqn.invars[1], eqns)
            if value is not None and 0 < value != 1:
                return value if eqn.primitive.name == "mul" else 1 / value
    return 1.0


def _number(atom: Any, eqns: Sequence[Any]) -> float | None:
    """The value of an operand that is written into the program, through casts and broadcasts."""
    if is_literal(atom):
        return float(np.asarray(atom.val)) if np.size(atom.val) == 1 else None
    maker = next((eqn for eqn in eqns if any(v is atom for v in eqn.outvars)), None)
    return _number(maker.invars[0], eqns) if maker is not None and maker.primitive.name in _PLAIN else None
