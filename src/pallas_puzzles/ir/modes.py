"""A function with its kernels built anew: a pallas_call keeps the mode (interpreted, compiled) that it was built in."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .capture import holds_call, is_call, subprograms
from .ops import inlined, interpret
from .program import calls_in


def built_for(fn: Callable[..., Any], mode: Any) -> Callable[..., Any]:
    """fn, with every kernel in it built for `mode`, wherever it was built. mode: what interpret= of pallas_call takes.

    The function that is returned takes positional arrays, or pytrees of them.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        program, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = _replayed(program, jax.tree.leaves(args), mode)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def compiled(fn: Callable[..., Any], shapes: Sequence[Any]) -> Callable[..., Any]:
    """fn, with its kernels built anew where they were built to be interpreted: after `setup`, or by interpret=True.

    shapes: what it is called with. Raises whatever tracing fn raises.
    """
    kernels = calls_in(jax.jit(lambda *a: fn(*a)).trace(*shapes).jaxpr)
    return fn if all(is_built_for(kernel, False) for kernel in kernels) else built_for(fn, False)


def is_built_for(kernel: Any, mode: Any) -> bool:
    """Whether a pallas_call equation has this mode. Its parameter `interpret`: seen on jax 0.11.2 and 0.12.0.1."""
    return kernel.params["interpret"] == mode


def _replayed(program: Any, values: Sequence[Any], mode: Any) -> list[Any]:
    return interpret(program, values, lambda eqn, given: _apply(eqn, given, mode))


def _apply(eqn: Any, values: list[Any], mode: Any) -> list[Any]:
    inner = inlined(eqn)
    if inner is not None and holds_call(inner):
        return _replayed(inner, values, mode)
    params = eqn.params
    if is_call(eqn):
        params = {**params, "interpret": mode}
    elif any(holds_call(body) for body in subprograms(eqn)):
        params = {name: _rebuilt(value, mode) for name, value in params.items()}
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _rebuilt(value: Any, mode: Any) -> Any:
    """A parameter of an equation, with the kernels in its programs built anew."""
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(item, mode) for item in value) if any(_has(v) for v in value) else value
    if not _has(value):
        return value
    return jax.make_jaxpr(lambda *given: _replayed(value, given, mode))(*(v.aval for v in value.invars))


def _has(value: Any) -> bool:
    return hasattr(value, "eqns") and holds_call(value)
