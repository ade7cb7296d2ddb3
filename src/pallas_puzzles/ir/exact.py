"""A spec in double precision: its program run with every float as a float64, and nothing rounded on the way."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .capture import Evaluator, is_call, tracing
from .ops import Beyond, inlined, is_floating, meaning, np_dtype, out_dtype


def in_float64(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> list[np.ndarray]:
    """The flat results of `spec(*args, **keywords)`: inputs as they are, and float64 from there on.

    Raises Beyond for what cannot be followed, and whatever tracing the spec raises.
    """
    with tracing():
        traced = _program(spec, args, keywords)
    if traced is None:
        return _in_numpy(spec, args, keywords)
    return [np.asarray(x) for x in _Wide(_no_calls).run(*traced)]


def _program(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, list[Any]] | None:
    """A spec's program, and what it takes; None for a spec that JAX cannot trace."""
    for traced, rest in traceable(spec, args, keywords):
        with contextlib.suppress(Exception):
            return jax.make_jaxpr(traced)(*rest), rest
    return None


def traceable(
    spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]
) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """(function, its arguments): a spec with everything to be traced, and with its integers as they are.

    A spec may look at integers: lengths, for instance, become shapes.
    """
    whole = [n for n, x in enumerate(args) if np.asarray(x).dtype.kind in "iu"]
    for kept in ([], whole) if whole else ([],):
        given = {n: np.asarray(args[n]) for n in kept}

        def traced(*rest: Any, given: dict[int, Any] = given) -> Any:
            others = iter(rest)
            return spec(*(given[n] if n in given else next(others) for n in range(len(args))), **keywords)

        yield traced, [np.asarray(x) for n, x in enumerate(args) if n not in given]


def _in_numpy(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> list[np.ndarray]:
    """A spec that looks at its arguments: the same function, for which every float type of NumPy and JAX is float64."""
    plain = inspect.unwrap(spec)
    wide = {k: _Widened(v) if v is np or v is jax.numpy else v for k, v in plain.__globals__.items()}
    again = types.FunctionType(plain.__code__, wide, plain.__name__, plain.__defaults__, plain.__closure__)
    again.__kwdefaults__ = plain.__kwdefaults__
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        result = again(*(_wide(np.asarray(x)) for x in args), **keywords)
        return [np.asarray(_wide(np.asarray(x))) for x in jax.tree.leaves(result)]


class _Widened:
    """A module whose float types are all float64."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return np.float64 if name in ("float16", "bfloat16", "float32") else getattr(self._module, name)


def _no_calls(call: Any, eqn: Any, values: list[Any]) -> list[Any]:
    raise Beyond("a kernel, which rounds where it says so")


def _wide(x: Any) -> Any:
    return np.asarray(x, np.float64) if is_floating(np_dtype(x)) else x


class _Wide(Evaluator):
    """Floats are float64 wherever they come from, and stay so, whatever the program says of their dtype."""

    every_scan = True

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        values = [_wide(x) for x in values]
        if is_call(eqn) or inlined(eqn) is not None or name in ("cond", "scan", "while"):
            return super().apply(eqn, values)
        if name == "reduce_precision":
            return values
        if (op := meaning(eqn)) is not None:
            with np.errstate(all="ignore"):
                out, dtype = np.asarray(op(*values)), out_dtype(eqn)
            return [out.astype(np.float64 if is_floating(dtype) else dtype, copy=False)]
        wide = np.dtype(np.float64)
        params = {k: wide if isinstance(v, np.dtype) and is_floating(v) else v for k, v in params.items()}
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            if name == "scatter-add":  # the program inside of it has the old dtypes
                add: Any = jax.lax.scatter_add
                kept = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
                return [np.asarray(add(*map(jax.numpy.asarray, values), **{k: params[k] for k in kept}))]
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
        return [np.asarray(x) for x in (out if eqn.primitive.multiple_results else [out])]
