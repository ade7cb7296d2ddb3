"""A function with its kernels built anew: a pallas_call keeps the mode (interpreted, compiled) that it was built in,
and a shard_map its mesh."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .capture import holds_call, is_call, named, subprograms, tracing
from .ops import inlined, interpret, is_literal
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


def axes_of(fn: Callable[..., Any], shapes: Sequence[Any]) -> dict[str, int]:
    """The axes of the mesh of several devices that fn itself names in a shard_map, and their sizes; {} without one."""
    for eqn in named(_program(fn, shapes)[0], "shard_map"):
        axes = {str(name): int(size) for name, size in dict(eqn.params["mesh"].shape).items()}
        if math.prod(axes.values()) > 1:
            return axes
    return {}


def on_mesh(fn: Callable[..., Any], shapes: Sequence[Any], mesh: Any) -> Callable[..., Any]:
    """fn, with each shard_map on this mesh, which has the same axes, and with its kernels to be compiled.

    shapes: what it is called with. Raises whatever tracing fn raises.
    """
    program, shape = _program(fn, shapes)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shape), _moved(program, jax.tree.leaves(args), mesh))

    return run


def _program(fn: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(shapes))
    with tracing():
        return jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*plain)


def _moved(program: Any, values: Sequence[Any], mesh: Any) -> list[Any]:
    return interpret(program, values, lambda eqn, given: _apply_on(eqn, given, mesh))


def _apply_on(eqn: Any, values: list[Any], mesh: Any) -> list[Any]:
    # a number that is written into the program knows the mesh that it was traced on
    values = [np.asarray(v) if is_literal(atom) else v for atom, v in zip(eqn.invars, values, strict=True)]
    inner = inlined(eqn)
    if inner is not None:
        return _moved(inner, values, mesh)
    if eqn.primitive.name != "shard_map":
        return _apply(eqn.replace(params=_without_mesh(eqn)), values, False)
    p = eqn.params

    def body(*given: Any) -> tuple[Any, ...]:
        return tuple(_moved(p["jaxpr"], given, mesh))  # all inlined: their types name the old mesh

    specs = {"in_specs": tuple(p["in_specs"]), "out_specs": tuple(p["out_specs"]), "check_vma": p["check_vma"]}
    return list(jax.shard_map(body, mesh=mesh, **specs)(*values))


def _without_mesh(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation, without the mesh that it was traced on."""
    params = {k: None if isinstance(v, jax.sharding.NamedSharding) else v for k, v in eqn.params.items()}
    if is_call(eqn):
        params["out_avals"] = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in params["out_avals"])
    return params


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
