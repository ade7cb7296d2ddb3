"""JAX's own kernels for GPUs on small shapes: (a call, its arguments, what plain JAX says, relative error)."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import attention_mgpu as attention
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as blackwell
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper
from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as mixed
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as ragged
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as transposed

from gpu_kernels import normal

SMS = 4  # that kernels which fill a chip believe to have
Case = tuple[Callable[..., Any], tuple[Any, ...], Any]
_DEVICE = SimpleNamespace(core_count=SMS)


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """What these kernels ask the machine about that they run on."""
    cuda = SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (attention, "cuda_versions", cuda),
            (transposed, "jax", _JaxWithAGpu()),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _JaxWithAGpu:
    def __getattr__(self, name: str) -> Any:
        return (lambda *_: [_DEVICE]) if name == "devices" else getattr(jax, name)


def _f32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def matmul(m: int = 256, n: int = 256, k: int = 256, **config: Any) -> Case:
    a, b = normal(m, k, dtype=jnp.bfloat16), normal(k, n, dtype=jnp.bfloat16, seed=1)
    tuned = hopper.TuningConfig(**{"tile_m": 64, "tile_n": 64, "tile_k": 64, "max_concurrent_steps": 2, **config})
    return lambda a, b: hopper.matmul(a, b, None, tuned), (a, b), _f32(a) @ _f32(b)


def on_blackwell(**config: Any) -> Case:
    a, b = normal(512, 256, dtype=jnp.bfloat16), normal(256, 512, dtype=jnp.bfloat16, seed=1)
    tiles = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 2, "collective": False}
    tuned = blackwell.TuningConfig(**{**tiles, **config})
    return lambda a, b: blackwell.matmul_kernel(a, b, tuned), (a, b), _f32(a) @ _f32(b)


def attend(fn: Any = attention.attention, d: int = 64, kv_heads: int = 2, causal: bool = False, **config: Any) -> Case:
    q = normal(1, 256, 2, d, dtype=np.float16)
    k, v = (normal(1, 256, kv_heads, d, dtype=np.float16, seed=s) for s in (1, 2))
    blocks = {"block_q": 64, "block_kv": 64, "max_concurrent_steps": 2, "causal": causal}
    tuned = attention.TuningConfig(**{**blocks, **config})
    return lambda *x: fn(*x, tuned), (q, k, v), attention.attention_reference(q, k, v, causal=causal)


def gradients(**config: Any) -> Case:
    args = tuple(normal(1, 256, 2, 64, dtype=np.float16, seed=s) for s in range(4))
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    tuned = attention.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, **blocks, **config)

    def of(fn: Any) -> Any:
        return lambda q, k, v, do: jnp.stack(jax.vjp(fn, q, k, v)[1](do))

    want = of(lambda *x: attention.attention_reference(*x).astype(np.float16))(*map(jnp.asarray, args))
    return of(lambda *x: attention.attention(*x, tuned)), args, want


GROUPS = np.array([100, 7, 0, 149], np.int32)


def grouped(transpose: bool = False) -> Case:
    x, w = normal(256, 128, dtype=np.float16), normal(4, 128, 128, dtype=np.float16, seed=1)
    blocks = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2, "grid_block_n": 2}

    def fn(x: Any, w: Any, sizes: Any) -> Any:
        return ragged.ragged_dot(x, w, group_sizes=sizes, transpose_rhs=transpose, **blocks)

    want = jax.lax.ragged_dot(_f32(x), _f32(w), GROUPS)
    return fn, (x, w.swapaxes(1, 2) if transpose else w, GROUPS), want


def grouped_backward() -> Case:
    x, y = normal(256, 128, dtype=np.float16), normal(256, 128, dtype=np.float16, seed=1)
    blocks = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2, "grid_block_n": 2}

    def fn(x: Any, y: Any, sizes: Any) -> Any:
        return transposed.transposed_ragged_dot(x, y, group_sizes=sizes, **blocks)

    return fn, (x, y, GROUPS), transposed.ref_transposed_ragged_dot(x, y, GROUPS)


def mixed_matmul() -> Case:
    a = np.random.default_rng(0).integers(-8, 8, (256, 256)).astype(np.int8)
    b = normal(256, 256, dtype=jnp.bfloat16)
    tuned = mixed.TuningConfig(tile_m=64, tile_n=128, tile_k=64, max_concurrent_steps=2, epi_tile_m=64, epi_tile_n=64)
    return (
        lambda a, b: mixed.mixed_matmul_kernel(a, b, out_dtype=jnp.bfloat16, config=tuned),
        (a, b),
        _f32(a) @ _f32(b),
    )


_WITH_PIPELINE = attention.attention_with_pipeline_emitter
LIBRARY: dict[str, Callable[[], Case]] = {
    "hopper_matmul": matmul,
    "hopper_matmul, 128 x 128": lambda: matmul(512, 512, tile_m=128, tile_n=128),
    "hopper_matmul, 4 slots": lambda: matmul(max_concurrent_steps=4),
    "hopper_matmul, warpgroups along n": lambda: matmul(wg_dimension=hopper.MatmulDimension.N),
    "hopper_matmul, clusters along m": lambda: matmul(cluster_dimension=hopper.MatmulDimension.M),
    "hopper_matmul, clusters along n": lambda: matmul(cluster_dimension=hopper.MatmulDimension.N),
    "hopper_mixed_type_matmul": mixed_matmul,
    "attention": attend,
    "attention, d 128": lambda: attend(d=128),
    "attention, grouped queries": lambda: attend(kv_heads=1),
    "attention, 4 slots": lambda: attend(max_concurrent_steps=4),
    "attention, without ping-pong": lambda: attend(use_schedule_barrier=False),
    "attention, causal": lambda: attend(causal=True),
    "attention, causal, wide": lambda: attend(causal=True, block_kv=128),
    "attention_with_pipeline_emitter": lambda: attend(_WITH_PIPELINE),
    "attention, backward": gradients,
    "attention, backward, 2 warpgroups": lambda: gradients(compute_wgs_bwd=2),
    "ragged_dot": grouped,
    "ragged_dot, transposed": lambda: grouped(transpose=True),
}
BLACKWELL: dict[str, Callable[[], Case]] = {
    "blackwell_matmul": on_blackwell,
    "blackwell_matmul, two CTAs": lambda: on_blackwell(tile_n=64, collective=True),
}


def error(got: Any, want: Any) -> float:
    """The largest error, relative to the largest expected value."""
    got, want = _f32(jax.tree.leaves(got)[0]), _f32(want)
    return float(np.max(np.abs(got - want)) / (np.max(np.abs(want)) or 1))
