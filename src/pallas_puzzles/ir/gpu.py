"""The seam to Pallas on GPUs: a plgpu.kernel of JAX's Mosaic GPU -> our own Kernel, made of Programs and Instrs.

JAX's equations are read once (gpu_reader.py) into instructions whose operands are slots of a table (gpu_program.py);
the machine in lens/gpu runs those and knows nothing of JAX. The parameters of a kernel's equation are not public API:
seen on jax 0.11.2 and 0.12.0.1.
"""

import ast
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import backend

from .capture import Capture, Evaluator, SourceLine, _own_lines, callers_of, for_the_reader, where_defined
from .gpu_program import Program
from .gpu_reader import read_program, written_at
from .ops import Beyond, following, np_dtype, to_numpy


@dataclasses.dataclass
class Kernel:
    """A plgpu.kernel with the arrays that it was given.

    grid, cluster: how many clusters there are, and CTAs in each, by the names of their axes. threads: warpgroups a CTA.
    inputs, outputs: (name, shape, dtype). aliases: input -> output that share memory. jaxpr: JAX's own program of it.
    """

    name: str
    where: SourceLine | None
    callers: list[SourceLine]
    grid: dict[Any, int]
    cluster: dict[Any, int]
    threads: int
    thread_name: Any
    program: Program
    inputs: list[tuple[str, tuple[int, ...], np.dtype]]
    outputs: list[tuple[str, tuple[int, ...], np.dtype]]
    aliases: dict[int, int]
    jaxpr: Any = dataclasses.field(repr=False)
    arrays: list[np.ndarray] = dataclasses.field(default_factory=list)


def describe_gpu(eqn: Any) -> Kernel:
    """A plgpu.kernel equation as a Kernel without arrays. Raises Beyond."""
    p = eqn.params
    if len(p["jaxprs"]) != 1:
        raise Beyond("several programs in one kernel (mpmd)")
    (jaxpr,), (mesh,) = p["jaxprs"], p["meshes"]
    first = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None  # the run_scoped that JAX puts around the reader's body
    body = first.params["jaxpr"] if first is not None and first.primitive.name == "run_scoped" else jaxpr
    n_in = len(eqn.invars)
    kinds = [(tuple(v.aval.shape), np_dtype(v.aval)) for v in jaxpr.invars]
    written = written_at(where_defined(body))
    name = p.get("name")
    if name in (None, "", "anonymous") and isinstance(written, ast.FunctionDef):  # so JAX calls a functools.partial
        name = written.name
    own = [a.arg for a in (*written.args.posonlyargs, *written.args.args)][: len(kinds)] if written is not None else []
    refs = [*own, *(f"in{i}" if i < n_in else f"out{i - n_in}" for i in range(len(own), len(kinds)))]
    described = [(ref, *kind) for ref, kind in zip(refs, kinds, strict=True)]
    return Kernel(
        name=name or str(body.debug_info.func_name),
        where=where_defined(body),
        callers=[*callers_of(eqn)],
        grid=dict(zip(mesh.grid_names, mesh.grid, strict=True)),
        cluster=dict(zip(mesh.cluster_names, mesh.cluster, strict=True)),
        threads=mesh.num_threads or 1,
        thread_name=mesh.thread_name,
        program=read_program(jaxpr),
        inputs=described[:n_in],
        outputs=described[n_in:],
        aliases=dict(p.get("input_output_aliases") or {}),
        jaxpr=jaxpr,
    )


OnKernel = Callable[[Kernel], list[np.ndarray]]


@contextlib.contextmanager
def as_on_gpu(kind: str = "NVIDIA H100", cores: int = 132) -> Iterator[None]:
    """Functions are traced as if a GPU with so many SMs were there."""
    device = jax.sharding.AbstractDevice(kind, cores, "gpu")
    before = backend.get_default_device  # kernels that fill a chip ask it how many SMs there are
    backend.get_default_device = lambda: _Device(before(), kind, cores)
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            yield
    finally:
        backend.get_default_device = before


class _Device:
    """The device that is there, as if it were a GPU."""

    def __init__(self, real: Any, kind: str, cores: int):
        self._real, self.device_kind, self.core_count, self.platform = real, kind, cores, "gpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def capture_gpu(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], on_kernel: OnKernel, device: tuple[str, int]
) -> Capture:
    """Runs `fn(*args, **kwargs)` eagerly; every plgpu.kernel goes to on_kernel, which returns its outputs. None of them
    is among the calls of what is returned.

    args: arrays or pytrees of arrays; kwargs: static; device: JAX's name of a GPU, and how many SMs it has.
    Raises what the reader's code raises, and Beyond.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [np.asarray(x) for x in leaves]

    def flat(*xs: Any) -> Any:
        return for_the_reader(fn, *jax.tree.unflatten(tree, xs), **kwargs)

    def followed(eqn: Any, values: list[Any]) -> list[Any]:
        with following(eqn.params.get("name")):
            kernel = describe_gpu(eqn)
            kernel.arrays = [to_numpy(v) for v in values]
            return list(on_kernel(kernel))

    def no_tpu(*_: Any) -> list[Any]:
        raise Beyond("a kernel for a TPU beside one for a GPU")

    with as_on_gpu(*device), _own_lines():
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return Evaluator(no_tpu, on_gpu=followed).capture(closed, shape, leaves, device[0])
