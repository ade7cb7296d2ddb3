"""Plain calls of a plgpu.kernel where there is no GPU for it: JAX hands each to a function of ours.

JAX refuses such a kernel on a CPU. With `run_on_cpu`, a call outside of jit runs at once, and one in a jitted function
is a callback in the compiled program. Not public API: the primitive mpmd_map, its parameters, and that it has one
lowering for all platforms. Seen on jax 0.11.2 and 0.12.0.1.
"""

import contextlib
import dataclasses
import functools
import logging
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from .gpu import Kernel, OnKernel, describe_gpu
from .ops import Beyond, following

# Changed, never replaced: an answer that replaces parts of a module of ours gets no verdict.
_now = types.SimpleNamespace(on_kernel=None)


def run_on_cpu(on_kernel: OnKernel | None) -> None:
    """From now on on_kernel runs every plgpu.kernel that is called on the CPU, and returns its outputs. None: nobody.

    What it raises reaches the caller as it is, and a Beyond as a NotImplementedError. Out of a jitted function they
    come as the last line of a JaxRuntimeError. A kernel that was built for JAX's own GPU simulator runs in that.
    """
    _now.on_kernel = on_kernel
    if on_kernel is not None:
        _register()


@functools.cache
def _register() -> None:
    from jax._src.interpreters.mlir import _lowerings
    from jax._src.pallas.mpmd import mpmd_map_p as primitive

    by_jax, lowered_by_jax = primitive.impl, _lowerings[primitive].rule

    def at_once(*args: Any, **params: Any) -> Any:
        if not _is_ours(params):
            return by_jax(*args, **params)
        if any(isinstance(x, jax.Ref) for x in args):  # jit makes a Ref a value that goes in and comes back out
            return jax.jit(functools.partial(primitive.bind, **params))(*args)
        kernel = _described(primitive, args, params)
        return [jnp.asarray(out) for out in _run(kernel, *args)]

    def lowered(ctx: Any, *nodes: Any, **params: Any) -> Any:
        if not _is_ours(params):
            return lowered_by_jax(ctx, *nodes, **params)
        kernel = _described(primitive, ctx.avals_in, params)
        outs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]
        call = functools.partial(jax.pure_callback, functools.partial(_run, kernel), outs)
        return mlir.lower_fun(lambda *arrays: call(*arrays), multiple_results=True)(ctx, *nodes)

    primitive.def_impl(at_once)
    mlir.register_lowering(primitive, lowered, platform="cpu")
    logging.getLogger("jax._src.callback").addFilter(_told_already)


def _is_ours(params: dict[str, Any]) -> bool:
    """Whether a kernel is for a GPU, and not built for JAX's own simulator of one."""
    for_gpu = all(hasattr(mesh, "cluster_names") for mesh in params["meshes"])
    simulated = type(params["interpret"]).__name__ == "InterpretGPUParams"  # not every jaxlib can import it
    return _now.on_kernel is not None and for_gpu and not simulated


def _described(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Kernel:
    with _said(params["name"]):
        (eqn,) = jax.make_jaxpr(lambda *given: primitive.bind(*given, **params))(*args).eqns
        return describe_gpu(eqn)


def _run(kernel: Kernel, *arrays: Any) -> list[np.ndarray]:
    with _said(kernel.name):
        outputs: list[np.ndarray] = _now.on_kernel(dataclasses.replace(kernel, arrays=[np.asarray(x) for x in arrays]))
        return outputs


@contextlib.contextmanager
def _said(name: Any) -> Iterator[None]:
    """What stops us is said to whoever has called the kernel."""
    try:
        with following(name):
            yield
    except Beyond as error:
        raise NotImplementedError(f"{name} cannot run here, on the CPU: the lens does not follow {error}") from error


def _told_already(record: logging.LogRecord) -> bool:
    """Of the logger that JAX reports a failing callback to: what _run has raised is in the error that follows."""
    error = record.exc_info[1] if record.exc_info else None
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    return all(frame.f_code is not _run.__code__ for frame, _ in frames)
