"""JAX's own TPU kernels on small shapes: code that nobody wrote with the lens in mind."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.matmul import matmul
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from zoo import Exhibit, integers, normal, registers_in

PRODUCTION: dict[str, Exhibit] = {}
exhibit = registers_in(PRODUCTION)


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------
def np_attention(q, k, v, mask=None):
    """(..., bq, d), (..., bkv, d), (..., bkv, d) -> (..., bq, d), unscaled like the kernels below."""
    s = q @ k.swapaxes(-1, -2)  # (..., bq, bkv)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def np_attention_gradients(q, k, v, w, mask=None):
    """Gradients by q, k and v of (w * attention(q, k, v)).sum()."""
    s = q @ k.swapaxes(-1, -2)
    s = s if mask is None else np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = w @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ w


def lower_triangle(m: int, n: int) -> np.ndarray:
    return np.tril(np.ones((m, n), bool))


FLASH_BLOCKS = flash.BlockSizes(
    block_q=128, block_k_major=128, block_k=128, block_b=1,
    block_q_major_dkv=128, block_k_major_dkv=128, block_k_dkv=128, block_q_dkv=128,
    block_k_major_dq=128, block_k_dq=128, block_q_dq=128,
)  # fmt: skip
SPLASH_BLOCKS = splash.BlockSizes(
    block_q=128, block_kv=128, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=128, block_kv_dkv_compute=128,
    block_q_dq=128, block_kv_dq=128,
)  # fmt: skip


def small(*shape: int) -> np.ndarray:
    return (normal(*shape) / 4).astype(np.float32)


def flash_attention(q, k, v, *, causal=False):
    return flash.flash_attention(q, k, v, causal=causal, block_sizes=FLASH_BLOCKS)


@exhibit(small(1, 2, 128, 64), small(1, 2, 256, 64), normal(1, 2, 256, 64), want=np_attention)
def flash_attention_forward(q, k, v):
    return flash_attention(q, k, v)


@exhibit(
    small(1, 1, 256, 64), small(1, 1, 256, 64), normal(1, 1, 256, 64),
    want=partial(np_attention, mask=lower_triangle(256, 256)),
)  # fmt: skip
def flash_attention_causal(q, k, v):
    return flash_attention(q, k, v, causal=True)


@exhibit(
    small(1, 1, 256, 128), small(1, 1, 256, 128), normal(1, 1, 256, 128), normal(1, 1, 256, 128),
    want=partial(np_attention_gradients, mask=lower_triangle(256, 256)),
)  # fmt: skip
def flash_attention_gradient(q, k, v, w):
    return jax.grad(lambda q, k, v: (w * flash_attention(q, k, v, causal=True)).sum(), argnums=(0, 1, 2))(q, k, v)


def splash_attention(mask, q, k, v):
    per_head = masks.MultiHeadMask([mask] * q.shape[0])
    return splash.make_splash_mha_single_device(per_head, block_sizes=SPLASH_BLOCKS)(q, k, v)


@exhibit(
    small(2, 256, 128), small(2, 256, 128), normal(2, 256, 128),
    want=partial(np_attention, mask=lower_triangle(256, 256)),
)  # fmt: skip
def splash_attention_causal(q, k, v):
    return splash_attention(masks.CausalMask((256, 256)), q, k, v)


def near_diagonal(n: int, before: int) -> np.ndarray:
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return (distance >= 0) & (distance <= before)


@exhibit(
    small(1, 384, 128),
    small(1, 384, 128),
    normal(1, 384, 128),
    want=partial(np_attention, mask=near_diagonal(384, 100)),
)
def splash_attention_local(q, k, v):
    return splash_attention(masks.LocalMask((384, 384), window_size=(100, 0), offset=0), q, k, v)


@exhibit(
    small(1, 256, 128), small(1, 256, 128), normal(1, 256, 128), normal(1, 256, 128),
    want=partial(np_attention_gradients, mask=lower_triangle(256, 256)),
)  # fmt: skip
def splash_attention_gradient(q, k, v, w):
    mask = masks.CausalMask((256, 256))
    return jax.grad(lambda q, k, v: (w * splash_attention(mask, q, k, v)).sum(), argnums=(0, 1, 2))(q, k, v)


def np_paged_attention(q, k_pages, v_pages, lengths, page_indices):
    """q (batch, heads, d); pages (kv_heads, pages, page_size, d)."""
    heads_per_kv_head = q.shape[1] // k_pages.shape[0]
    out = np.zeros_like(q)
    for b, h in np.ndindex(q.shape[:2]):
        pages = page_indices[b]
        k, v = (p[h // heads_per_kv_head, pages].reshape(-1, q.shape[2])[: lengths[b]] for p in (k_pages, v_pages))
        out[b, h] = np_attention(q[b, h : h + 1], k, v)[0]
    return out


@exhibit(
    small(2, 8, 128), small(1, 8, 16, 128), normal(1, 8, 16, 128), np.array([23, 50], np.int32),
    np.array([[3, 0, 5, 5], [1, 7, 2, 6]], np.int32), want=np_paged_attention,
)  # fmt: skip
def paged_attention_uneven_lengths(q, k_pages, v_pages, lengths, page_indices):
    return paged_attention(q, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=2)


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products
# ---------------------------------------------------------------------------------------------------------------------
def np_gmm(x, w, group_sizes):
    ends = np.cumsum(group_sizes)
    return np.concatenate([x[e - s : e] @ w[g] for g, (s, e) in enumerate(zip(group_sizes, ends, strict=True))])


def np_tgmm(x, y, group_sizes):
    """x (k, m), y (m, n) -> (groups, k, n)"""
    ends = np.cumsum(group_sizes)
    return np.stack([x[:, e - s : e] @ y[e - s : e] for s, e in zip(group_sizes, ends, strict=True)])


@exhibit(normal(256, 128), normal(4, 128, 256), np.array([100, 0, 28, 128], np.int32), want=np_gmm)
def grouped_matmul_with_an_empty_group(x, w, group_sizes):
    return gmm(x, w, group_sizes, tiling=(128, 128, 128))


@exhibit(normal(128, 256), normal(256, 128), np.array([100, 90, 66], np.int32), want=np_tgmm)
def transposed_grouped_matmul(x, y, group_sizes):
    return tgmm(x, y, group_sizes, tiling=(128, 128, 128))


@exhibit(normal(128, 512), normal(512, 256), want=np.matmul)
def tiled_matmul(x, y):
    return matmul(x, y, block_shape=(128, 128), block_k=256)


@exhibit(integers(-3, 4, 128, 256).astype(jnp.bfloat16), integers(-3, 4, 256, 128).astype(jnp.bfloat16), want=np.matmul)
def tiled_matmul_bf16(x, y):
    return matmul(x, y, block_shape=(128, 128), block_k=128, out_dtype=jnp.float32)
