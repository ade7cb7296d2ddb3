"""Calls of the TPU kernels that JAX ships, jax.experimental.pallas.ops.tpu."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foreign_jobs import BF16, GROUPS, JOBS, Job, integers, job, normal


def flash(**options: Any) -> Job:
    from jax.experimental.pallas.ops.tpu import flash_attention as f

    sizes = {field.name: 128 for field in dataclasses.fields(f.BlockSizes)} | {"block_b": 1}
    fn = functools.partial(f.flash_attention, block_sizes=f.BlockSizes(**sizes), **options)
    return fn, tuple(normal(1, 2, 256, 128, seed=n) for n in range(3))


job("jax", "flash attention")(flash)
job("jax", "flash attention, causal")(functools.partial(flash, causal=True))


@job("jax", "flash attention, with a bias")
def flash_bias() -> Job:
    fn, args = flash()
    return lambda q, k, v, ab: fn(q, k, v, ab), (*args, normal(1, 2, 256, 256))


@job("jax", "flash attention, segments")
def flash_segments() -> Job:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds

    fn, args = flash()
    segments = np.repeat(np.arange(2, dtype=np.int32), 128)[None]
    return lambda q, k, v, s: fn(q, k, v, segment_ids=SegmentIds(s, s)), (*args, segments)


@job("jax", "flash attention, gradient")
def flash_gradient() -> Job:
    fn, args = flash(causal=True)
    return jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2)), args


def splash(mask: Any, *, heads: int = 2, mqa: bool = False, dtype: Any = np.float32, **options: Any) -> Job:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute block_q_dq block_kv_dq"
    sizes = kernel.BlockSizes(**dict.fromkeys(names.split(), 128))
    make = kernel.make_splash_mqa_single_device if mqa else kernel.make_splash_mha_single_device
    fn = make(masks.MultiHeadMask([mask(masks)] * heads), block_sizes=sizes, **options)
    kv = (256, 128) if mqa else (heads, 256, 128)
    return fn, (
        normal(heads, 256, 128, dtype=dtype),
        normal(*kv, dtype=dtype, seed=1),
        normal(*kv, dtype=dtype, seed=2),
    )


def causal(masks: Any) -> Any:
    return masks.CausalMask((256, 256))


job("jax", "splash attention, causal")(functools.partial(splash, causal))
job("jax", "splash attention, causal, bf16")(functools.partial(splash, causal, dtype=BF16))
job("jax", "splash attention, soft cap")(functools.partial(splash, causal, attn_logits_soft_cap=30.0))
job("jax", "splash attention, one kv head")(functools.partial(splash, causal, mqa=True))
job("jax", "splash attention, full")(functools.partial(splash, lambda m: m.FullMask((256, 256))))
job("jax", "splash attention, local")(functools.partial(splash, lambda m: m.LocalMask((256, 256), (100, 0), 0)))


@job("jax", "splash attention, segments")
def splash_segments() -> Job:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    fn, args = splash(causal)
    ids = np.repeat(np.arange(2, dtype=np.int32), 128)
    return lambda q, k, v, s: fn(q, k, v, segment_ids=kernel.SegmentIds(s, s)), (*args, ids)


@job("jax", "splash attention, gradient")
def splash_gradient() -> Job:
    fn, args = splash(causal)
    return jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2)), args


PAGES = np.array([[3, 0, 5, 5], [1, 7, 2, 6]], np.int32)


def paged(dtype: Any = np.float32, **options: Any) -> Job:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    fn = functools.partial(paged_attention, pages_per_compute_block=2, **options)
    kv = [normal(2, 8, 16, 128, dtype=dtype, seed=n) for n in (1, 2)]
    return fn, (normal(2, 8, 128, dtype=dtype), *kv, np.array([23, 50], np.int32), PAGES)


job("jax", "paged attention")(paged)
job("jax", "paged attention, bf16")(functools.partial(paged, BF16))
job("jax", "paged attention, a head at a time")(functools.partial(paged, inline_seq_dim=False))


@job("jax", "paged attention, int8")
def paged_int8() -> Job:
    from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils as quantised

    fn, args = paged()

    def int8(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        pages = (quantised.QuantizedTensor(*quantised.quantize_to_int8(x)) for x in (k, v))
        return fn(q, *pages, *rest)

    return int8, args


def plain_paged(**options: Any) -> Any:
    def attention(*args: Any) -> Any:
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

        return ref_ragged_paged_attention(*map(jnp.asarray, args), **options)

    return attention


@job("jax", reference=plain_paged())
def ragged_paged_attention() -> Job:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as kernel

    fn = functools.partial(kernel, num_kv_pages_per_block=2, num_queries_per_block=16)
    q, kv = normal(64, 4, 128, dtype=BF16), normal(16, 16, 4, 128, dtype=BF16, seed=1)
    lengths, starts = np.array([20, 40, 0, 0], np.int32), np.array([0, 10, 40, 40, 40], np.int32)
    first = lambda *args: fn(*args)[:40]  # noqa: E731 # the rest is not written
    return first, (q, kv, lengths, integers(0, 16, 4, 8), starts, np.array([2], np.int32))


@job("jax")
def megablox_gmm() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return functools.partial(gmm, tiling=(128, 128, 128)), (normal(256, 128), normal(4, 128, 256), GROUPS)


@job("jax", "megablox gmm, transposed weights")
def megablox_gmm_transposed() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    fn = functools.partial(gmm, tiling=(128, 128, 128), transpose_rhs=True)
    return fn, (normal(256, 128, dtype=BF16), normal(4, 256, 128, dtype=BF16), GROUPS)


@job("jax")
def megablox_tgmm() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return functools.partial(tgmm, tiling=(128, 128, 128)), (normal(128, 256), normal(256, 128), GROUPS)


@job("jax", "matmul, bf16")
def matmul() -> Job:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    fn = functools.partial(matmul, block_shape=(128, 128), block_k=128, out_dtype=jnp.float32)
    return fn, (normal(256, 256, dtype=BF16), normal(256, 256, dtype=BF16, seed=1))


@job("jax", "random bits, threefry")
def threefry() -> Job:
    from jax.experimental.pallas.ops.tpu.random.threefry import threefry_2x32_count

    fn = functools.partial(threefry_2x32_count, shape=(256, 256), unpadded_shape=(256, 256), block_size=(8, 128))
    return fn, (np.array([3, 7], np.uint32),)


@job("jax", "random bits, philox")
def philox() -> Job:
    from jax.experimental.pallas.ops.tpu.random.philox import philox_random_bits

    return functools.partial(philox_random_bits, bit_width=32, shape=(256, 256)), (np.array([3, 7], np.uint32),)


@job("jax", "all gather, several devices")
def all_gather() -> Job:
    from jax.experimental.pallas.ops.tpu.all_gather import all_gather as kernel

    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return functools.partial(kernel, mesh=mesh, axis_name="x"), (normal(32, 128),)


# the same kernels, in other shapes and with other options


@job("jax", "flash attention, bf16, small blocks of queries")
def flash_bf16() -> Job:
    fn, args = flash(causal=True, sm_scale=0.1)
    return fn, tuple(x.astype(BF16) for x in args)


@job("jax", "flash attention, one block of keys")
def flash_short() -> Job:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return functools.partial(flash_attention, causal=True), tuple(normal(2, 2, 128, 128, seed=n) for n in range(3))


@job("jax", "flash attention, with a bias, gradient")
def flash_bias_gradient() -> Job:
    fn, (*args, ab) = flash_bias()
    return jax.grad(lambda q, k, v, ab: fn(q, k, v, ab).sum(), argnums=(0, 1, 2, 3)), (*args, ab)


@job("jax", "flash attention, segments, gradient")
def flash_segments_gradient() -> Job:
    fn, (*args, segments) = flash_segments()
    return lambda s, *qkv: jax.grad(lambda q, k, v: fn(q, k, v, s).sum(), argnums=(0, 1, 2))(*qkv), (segments, *args)


job("jax", "splash attention, bf16, full")(functools.partial(splash, lambda m: m.FullMask((256, 256)), dtype=BF16))
job("jax", "splash attention, local, soft cap")(
    functools.partial(splash, lambda m: m.LocalMask((256, 256), (64, 64), 0), attn_logits_soft_cap=20.0)
)
job("jax", "splash attention, causal, shifted")(functools.partial(splash, lambda m: m.CausalMask((256, 256), 64)))
job("jax", "splash attention, causal or local")(
    functools.partial(splash, lambda m: m.CausalMask((256, 256)) & m.LocalMask((256, 256), (128, 0), 0))
)
job("jax", "splash attention, a mask of numbers")(
    functools.partial(splash, lambda m: m.NumpyMask(np.random.default_rng(0).random((256, 256)) < 0.6))
)
job("jax", "splash attention, one kv head, full")(
    functools.partial(splash, lambda m: m.FullMask((256, 256)), mqa=True, heads=4)
)


@job("jax", "splash attention, one kv head, gradient")
def splash_mqa_gradient() -> Job:
    fn, args = splash(causal, mqa=True)
    return jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2)), args


@job("jax", "splash attention, local, gradient")
def splash_local_gradient() -> Job:
    fn, args = splash(lambda m: m.LocalMask((256, 256), (100, 0), 0))
    return jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2)), args


@job("jax", "splash attention, residuals")
def splash_residuals() -> Job:
    return splash(causal, save_residuals=True)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal, not scaled."""
    scores = np.where(np.tri(*q.shape[-2:-1], k.shape[-2], dtype=bool), q @ k.swapaxes(-1, -2), -np.inf)
    return jax.nn.softmax(scores) @ v


@job("jax", "splash attention, a batch of them", attention)
def splash_batch() -> Job:
    fn, args = splash(causal)
    return jax.vmap(fn), tuple(np.stack([x, x[::-1]]) for x in args)


@job("jax", "paged attention, soft cap")
def paged_soft_cap() -> Job:
    return paged(attn_logits_soft_cap=10.0)


@job("jax", "paged attention, one kv head")
def paged_mqa() -> Job:
    fn, (q, k, v, lengths, pages) = paged()
    return fn, (q, k[:1], v[:1], lengths, pages)


def ragged(**options: Any) -> Job:
    fn, args = JOBS["jax: ragged paged attention"][1]()
    inner = fn.__closure__[0].cell_contents  # what is cut to the rows that are written
    return lambda *given: functools.partial(inner, **options)(*given)[:40], args


window, cap = {"sliding_window": 9}, {"soft_cap": 20.0}
job("jax", "ragged paged attention, sliding window", plain_paged(**window))(functools.partial(ragged, **window))
job("jax", "ragged paged attention, soft cap", plain_paged(**cap))(functools.partial(ragged, **cap))


@job("jax", "megablox gmm, bf16, uneven tiles")
def megablox_gmm_uneven() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    sizes = np.array([37, 91, 0, 128], np.int32)
    return functools.partial(gmm, tiling=(64, 128, 256)), (
        normal(256, 384, dtype=BF16),
        normal(4, 384, 256, dtype=BF16),
        sizes,
    )


@job("jax", "megablox gmm, a shard of the groups")
def megablox_gmm_sharded() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    fn = functools.partial(gmm, tiling=(128, 128, 128))
    offset = np.array(1, np.int32)
    # nobody writes the rows of other shards
    return lambda x, w, sizes, first: fn(x, w, sizes, group_offset=first)[100:128], (
        normal(256, 128),
        normal(2, 128, 256),
        GROUPS,
        offset,
    )


@job("jax", "megablox gmm, gradient")
def megablox_gradient() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox import ops

    fn = functools.partial(ops.gmm, tiling=(128, 128, 128))
    grad = jax.grad(lambda x, w, sizes: fn(x, w, sizes, jnp.float32).sum(), argnums=(0, 1))
    return grad, (normal(256, 128), normal(4, 128, 256), GROUPS)


@job("jax", "matmul, f32, a long reduction")
def matmul_f32() -> Job:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    fn = functools.partial(matmul, block_shape=(128, 256), block_k=128)
    return fn, (normal(128, 512), normal(512, 256, seed=1))


@job("jax", "the example kernel")
def example() -> Job:
    from jax.experimental.pallas.ops.tpu import example_kernel

    return lambda x: example_kernel.double(x), (normal(256, 128),)


@job("jax", "random bits, threefry, small blocks")
def threefry_ragged() -> Job:
    from jax.experimental.pallas.ops.tpu.random.threefry import plthreefry_random_bits

    return functools.partial(plthreefry_random_bits, bit_width=32, shape=(24, 256)), (np.array([9, 1], np.uint32),)
