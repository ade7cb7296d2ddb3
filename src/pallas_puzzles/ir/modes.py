"""A function with its kernels built anew: a pallas_call keeps the mode (interpreted, compiled) that it was built in,
and a shard_map its mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .capture import holds_call, is_call, named, tracing
from .meshes import mesh_of
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


def axes_of(fn: Callable[..., Any], shapes: Sequence[Any]) -> dict[str, int]:
    """The axes of the mesh of several devices that fn itself names in a shard_map, and their sizes; {} without one."""
    meshes = map(mesh_of, named(_program(fn, shapes)[0], "shard_map"))
    return next((mesh.axes for mesh in meshes if mesh.size > 1), {})


def on_mesh(fn: Callable[..., Any], shapes: Sequence[Any], mesh: Any) -> Callable[..., Any]:
    """fn, with each shard_map on this mesh, which has the same axes, and with its kernels to be compiled.

    shapes: what it is called with. Raises whatever tracing fn raises.
    """
    program, shape = _program(fn, shapes)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shape), _replayed(program, jax.tree.leaves(args), False, mesh))

    return run


def _program(fn: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(shapes))
    with tracing():
        return jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*plain)


def _replayed(program: Any, values: Sequence[Any], mode: Any, mesh: Any = None) -> list[Any]:
    """The results of a program with its kernels built anew. mesh: on which its shard_maps are to run."""
    return interpret(program, values, lambda eqn, given: _apply(eqn, given, mode, mesh))


def _apply(eqn: Any, values: list[Any], mode: Any, mesh: Any) -> list[Any]:
    inner = inlined(eqn)
    if inner is not None and (mesh is not None or holds_call(inner)):
        return _replayed(inner, values, mode, mesh)
    params = eqn.params
    if mesh is not None and eqn.primitive.name == "shard_map":

        def body(*given: Any) -> tuple[Any, ...]:
            return tuple(_replayed(params["jaxpr"], given, mode, mesh))  # all inlined: their types name the old mesh

        ins, outs = tuple(params["in_specs"]), tuple(params["out_specs"])
        moved = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=params["check_vma"])
        return list(moved(*values))
    if not is_call(eqn):
        params = {name: _rebuilt(value, mode, mesh) for name, value in params.items()}
    if mesh is not None:
        params = {name: _placed(value) for name, value in params.items()}
    if is_call(eqn):
        params = {**params, "interpret": mode}
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _rebuilt(value: Any, mode: Any, mesh: Any) -> Any:
    """A parameter of an equation: its programs are traced anew where they hold kernels, or name the old mesh."""
    if isinstance(value, list | tuple):
        any_program = any(hasattr(item, "eqns") for item in value)
        return type(value)(_rebuilt(item, mode, mesh) for item in value) if any_program else value
    if not hasattr(value, "eqns") or (mesh is None and not holds_call(value)):
        return value
    avals = tuple(v.aval for v in value.invars)
    avals = avals if mesh is None else _placed(avals)
    return jax.make_jaxpr(lambda *given: _replayed(value, given, mode, mesh))(*avals)


def _placed(value: Any) -> Any:
    """A parameter of an equation on the mesh that is traced on now.

    The sharding of an iota and the out_avals of a pallas_call know the mesh of their tracing: seen on jax 0.11.2 and
    0.12.0.1.
    """
    if isinstance(value, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), value.spec)
    if isinstance(value, tuple) and value and all(isinstance(v, jax.core.ShapedArray) for v in value):
        return tuple(v.update(sharding=_placed(v.sharding)) for v in value)
    return value


def compiled(fn: Callable[..., Any], shapes: Sequence[Any]) -> Callable[..., Any]:
    """fn, with its kernels built anew where they were built to be interpreted: after `setup`, or by interpret=True.

    shapes: what it is called with. Raises whatever tracing fn raises.
    """
    kernels = calls_in(jax.jit(lambda *a: fn(*a)).trace(*shapes).jaxpr)
    return fn if all(is_built_for(kernel, False) for kernel in kernels) else built_for(fn, False)


def is_built_for(kernel: Any, mode: Any) -> bool:
    """Whether a pallas_call equation has this mode. Its parameter `interpret`: seen on jax 0.11.2 and 0.12.0.1."""
    return kernel.params["interpret"] == mode
