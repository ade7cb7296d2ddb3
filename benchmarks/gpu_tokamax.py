"""Calls of the kernels of tokamax for Hopper, https://github.com/openxla/tokamax, on small shapes.

Each is a function without arguments that returns (a call, its arguments, what plain JAX says), as those in
tests/gpu_library.py.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_kernels import normal
from gpu_library import GROUPS, Case

BF16 = jnp.bfloat16


def _ops(name: str) -> Any:
    return importlib.import_module(f"tokamax._src.ops.{name}")


def _f32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _attention(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """Plain attention of (T, H, D); mask: (H or 1, T, t) or None."""
    k, v = (jnp.repeat(_f32(x), q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = jnp.einsum("qhd,khd->hqk", _f32(q), k) * q.shape[-1] ** -0.5
    s = s + (0 if bias is None else _f32(bias))
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    return s, jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, -1), v)


def attend(
    kv_heads: int = 2,
    d: int = 64,
    causal: bool = False,
    bias: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    window: bool = False,
    residuals: bool = False,
    rescale: float = 1.0,
    chip: str = "sm90",
    t: int = 256,
    **config: Any,
) -> Case:
    """bias, mask: their shape; window: keys 10 back from the query only."""
    kernel = _ops(f"attention.pallas_mosaic_gpu_kernel_{chip}")
    q = normal(t, 2, d, dtype=BF16)
    k, v = (normal(t, kv_heads, d, dtype=BF16, seed=s) for s in (1, 2))
    added = None if bias is None else normal(*bias, dtype=BF16, seed=3)
    seen = None if mask is None else np.random.default_rng(4).random(mask) < 0.7
    start = np.maximum(np.arange(t, dtype=np.int32) - 100, 0)[None] if window else None
    end = (np.arange(t, dtype=np.int32) + 1)[None] if window else None
    rows, columns = np.mgrid[:t, :t]
    allowed = (columns <= rows) & (columns >= rows - 100 if window else True) if causal or window else None
    if seen is not None:
        allowed = seen if allowed is None else seen & allowed
    chosen = kernel.Config(**{"block_q": 64, "block_kv": 64, "num_stages": 2, **config})

    def fn(q: Any, k: Any, v: Any) -> Any:
        return kernel.flash_attention_kernel(
            q,
            k,
            v,
            None if added is None else jnp.asarray(added),
            None if seen is None else jnp.asarray(seen),
            None if start is None else jnp.asarray(start),
            None if end is None else jnp.asarray(end),
            is_causal=causal,
            logits_soft_cap=None,
            logits_scale=d**-0.5,
            out_dtype=jnp.dtype(BF16),
            normalize_output=True,
            return_residuals=residuals,
            use_stable_softmax=True,
            rescale_threshold=rescale,
            config=chosen,
        )[0]

    return fn, (q, k, v), _attention(q, k, v, added, allowed)[1]


def gradients(
    which: int,
    causal: bool = False,
    bias: tuple[int, ...] | None = None,
    chip: str = "sm90",
    block: int = 64,
    **config: Any,
) -> Case:
    """which: 0, 1 or 2 for dq, dk or dv."""
    t, d = 256, 64
    q, k, v, dout = (normal(t, 2, d, dtype=BF16, seed=s) for s in range(4))
    added = None if bias is None else normal(*bias, dtype=BF16, seed=4)
    allowed = np.tril(np.ones((t, t), bool))[None] if causal else None
    s, out = _attention(q, k, v, added, allowed)
    m = s.max(-1)
    residuals = np.asarray(m), np.asarray(jnp.exp(s - m[..., None]).sum(-1))
    module = _ops(f"attention.pallas_mosaic_gpu_vjp_kernel_{chip}")
    kernel = module.flash_attention_vjp_kernel
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    chosen = module.Config(**blocks, **{"num_stages": 2, **config})

    def fn(q: Any, k: Any, v: Any, out: Any, dout: Any) -> Any:
        return kernel(
            *(q, k, v, tuple(map(jnp.asarray, residuals)), out, dout),
            *(None if added is None else jnp.asarray(added), None, None, None),
            logits_scale=d**-0.5,
            logits_soft_cap=None,
            is_causal=causal,
            ds_dtype=None if added is None else jnp.dtype(BF16),
            config=chosen,
        )[which]

    def plain(*x: Any) -> Any:
        k, v = x[1:]
        s = jnp.einsum("qhd,khd->hqk", x[0], k) * d**-0.5 + (0 if added is None else _f32(added))
        s = s if allowed is None else jnp.where(allowed, s, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, -1), v)

    want = jax.vjp(plain, *(jnp.asarray(_f32(x)) for x in (q, k, v)))[1](jnp.asarray(_f32(dout)))[which]
    return fn, (q, k, v, np.asarray(out, BF16), dout), want


def _config(**config: Any) -> Any:
    blocks = {"block_m": 64, "block_n": 64, "block_k": 64, "num_stages": 2, "split_k": 1}
    return _ops("ragged_dot.pallas_mosaic_gpu_common").Config(**{**blocks, **config})


def grouped(kernel: str = "sm90.ragged_dot_kernel", **config: Any) -> Case:
    x, w = normal(256, 128, dtype=BF16), normal(4, 128, 128, dtype=BF16, seed=1)
    module, name = kernel.split(".")
    kernel = getattr(_ops(f"ragged_dot.pallas_mosaic_gpu_kernel_{module}"), name)
    fn = functools.partial(kernel, out_dtype=jnp.dtype(BF16), config=_config(**config))
    return lambda x, w, sizes: fn(x, w, sizes), (x, w, GROUPS), jax.lax.ragged_dot(_f32(x), _f32(w), GROUPS)


def grouped_int8() -> Case:
    import qwix

    kernel = _ops("ragged_dot.pallas_mosaic_gpu_kernel_sm90_quant").ragged_dot_quantized_kernel
    x, w = normal(256, 128, dtype=BF16), np.random.default_rng(1).integers(-127, 127, (4, 128, 128)).astype(np.int8)
    scale = (np.abs(normal(4, 1, 128, seed=2)) / 127).astype(BF16)
    fn = functools.partial(kernel, out_dtype=jnp.dtype(BF16), config=_config())

    def call(x: Any, w: Any, scale: Any, sizes: Any) -> Any:
        return fn(x, qwix.QArray(w, scale, qtype=jnp.int8), sizes)

    return call, (x, w, scale, GROUPS), jax.lax.ragged_dot(_f32(x), _f32(w) * _f32(scale), GROUPS)


def grouped_contracting() -> Case:
    x, y = normal(256, 128, dtype=BF16), normal(256, 128, dtype=BF16, seed=1)
    kernel = _ops("ragged_dot.pallas_mosaic_gpu_kernel_sm90").ragged_contracting_dim_dot_kernel
    fn = functools.partial(kernel, out_dtype=jnp.dtype(BF16), config=_config())
    ends = np.cumsum(GROUPS)
    want = np.stack([_f32(x)[e - n : e].T @ _f32(y)[e - n : e] for n, e in zip(GROUPS, ends, strict=True)])
    return lambda x, y, sizes: fn(x, y, sizes), (x, y, GROUPS), want


def gated(chip: str = "sm90", **config: Any) -> Case:
    kernel = _ops(f"gated_linear_unit.pallas_mosaic_gpu_kernel_{chip}").gated_linear_unit
    common = _ops("gated_linear_unit.pallas_mosaic_gpu_common")
    if along := config.pop("along", None):
        config["wg_dimension"] = getattr(common.MatmulDimension, along)
    tiles = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "num_stages": 2, "epi_tile_m": 64, "epi_tile_n": 64}
    x, w = normal(512, 128, dtype=BF16), (normal(128, 2, 256, seed=1) / 8).astype(BF16)
    fn = functools.partial(kernel, activation=jax.nn.silu, config=common.Config(**{**tiles, **config}))
    gate, up = (_f32(x) @ _f32(w)[:, i] for i in range(2))
    return lambda x, w: fn(x, w), (x, w), jax.nn.silu(gate) * up


TOKAMAX: dict[str, Callable[[], Case]] = {
    "attention": attend,
    "attention, persistent": lambda: attend(persistent=True),
    "attention, d 128": lambda: attend(d=128),
    "attention, grouped queries": lambda: attend(kv_heads=1),
    "attention, three slots, 128 queries": lambda: attend(num_stages=3, block_q=128),
    "attention, causal": lambda: attend(causal=True),
    "attention, a bias": lambda: attend(bias=(2, 256, 256)),
    "attention, a bias for all queries": lambda: attend(bias=(1, 1, 256)),
    "attention, a mask": lambda: attend(mask=(1, 256, 256)),
    "attention, a mask for all queries": lambda: attend(mask=(1, 1, 256), block_kv=128),
    "attention, bias and mask, persistent": lambda: attend(bias=(2, 256, 256), mask=(1, 256, 256), persistent=True),
    "attention, a window": lambda: attend(window=True),
    "attention, residuals": lambda: attend(residuals=True),
    "attention, rescaled rarely": lambda: attend(rescale=0.5, residuals=True),
    "attention, dq": lambda: gradients(0),
    "attention, dk": lambda: gradients(1),
    "attention, dv": lambda: gradients(2),
    "attention, causal, dq": lambda: gradients(0, causal=True),
    "attention, causal, dk": lambda: gradients(1, causal=True),
    "attention, a bias, dq": lambda: gradients(0, bias=(2, 256, 256)),
    "attention, a bias, dk": lambda: gradients(1, bias=(2, 256, 256)),
    "ragged_dot": grouped,
    "ragged_dot, persistent": lambda: grouped(persistent=True),
    "ragged_dot, int8": grouped_int8,
    "ragged_dot, over the groups": grouped_contracting,
    "gated linear unit": gated,
    "gated linear unit, warpgroups along n": lambda: gated(along="N"),
    "gated linear unit, clusters along m": lambda: gated(cluster_size_m=2),
    "gated linear unit, clusters along n": lambda: gated(cluster_size_n=2),
}
_B200 = {"chip": "sm100", "block_q": 128, "block_kv": 128, "t": 512}
_RAGGED = "sm100.ragged_dot_gpu_non_quant_blackwell_kernel"
ON_B200: dict[str, Callable[[], Case]] = {
    "attention": lambda: attend(**_B200, collective=False),
    "attention, two CTAs": lambda: attend(**{**_B200, "block_q": 256}, collective=True),
    "attention, causal": lambda: attend(**_B200, collective=False, causal=True),
    "attention, a bias": lambda: attend(**_B200, collective=False, bias=(2, 512, 512)),
    "attention, a mask": lambda: attend(**_B200, collective=False, mask=(1, 512, 512)),
    "attention, dq": lambda: gradients(0, chip="sm100", block=128),
    "attention, dk": lambda: gradients(1, chip="sm100", block=128),
    "attention, causal, dk": lambda: gradients(1, chip="sm100", block=128, causal=True),
    "ragged_dot": lambda: grouped(_RAGGED, block_m=128),
    "ragged_dot, two CTAs": lambda: grouped(_RAGGED, block_m=128, collective=True),
    "gated linear unit": lambda: gated("sm100", tile_m=128),
}
TOKAMAX = {f"tokamax: {name}": make for name, make in TOKAMAX.items()}
ON_B200 = {f"tokamax, B200: {name}": make for name, make in ON_B200.items()}
