"""Calls of the TPU kernels of tokamax, https://github.com/openxla/tokamax."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foreign_jobs import BF16, GROUPS, Job, integers, job, normal
from foreign_plain import grouped_outer_product, grouped_product, named


def tokamax(name: str) -> Any:
    return importlib.import_module(f"tokamax._src.ops.{name}")


def plain(name: str, **options: Any) -> Any:
    """tokamax's own function in plain arrays, op.reference:function."""
    return functools.partial(named(f"tokamax._src.ops.{name}"), **options)


def gmm_v2(dtype: Any = np.float32, **options: Any) -> Job:
    fn = functools.partial(tokamax("gmm_v2.gmm_v2").gmm_v2, **options)
    weights = normal(4, 256, 256, dtype=dtype, seed=1)
    return lambda *args: fn(*args), (normal(96, 256, dtype=dtype), weights, np.array([30, 0, 50, 16], np.int32))


job("tokamax", "gmm_v2", grouped_product)(gmm_v2)
job("tokamax", "gmm_v2, bf16", grouped_product)(functools.partial(gmm_v2, BF16))
job("tokamax", "gmm_v2, silu", functools.partial(grouped_product, fuse_act="silu"))(
    functools.partial(gmm_v2, BF16, fuse_act="silu")
)


@job("tokamax", "tgmm_v2", grouped_outer_product)
def tgmm_v2() -> Job:
    fn = tokamax("gmm_v2.tgmm_v2").tgmm_v2
    args = normal(96, 256, dtype=BF16), normal(96, 256, dtype=BF16, seed=1), np.array([30, 0, 50, 16], np.int32)
    return lambda x, y, sizes: fn(x, y, sizes, 4, preferred_element_type=np.dtype(np.float32)), args


@job("tokamax")
def ragged_dot() -> Job:
    kernel = tokamax("ragged_dot.pallas_mosaic_tpu_kernel")
    precision = (jax.lax.Precision.DEFAULT,) * 2
    fn = functools.partial(kernel.gmm, precision=precision, out_dtype=np.dtype(np.float32))
    return fn, (normal(256, 128, dtype=BF16), normal(4, 128, 256, dtype=BF16), GROUPS)


@job("tokamax", "router top k")
def router_topk() -> Job:
    kernel = tokamax("router_topk.pallas_mosaic_tpu_kernel")
    return lambda scores: kernel.select(scores, 8, block_rows=128), (normal(256, 256),)


@job("tokamax", "top k, on the SparseCore", lambda scores: np.sort(jax.lax.top_k(scores, 128)[1]))
def topk() -> Job:
    kernel = tokamax("topk.pallas_mosaic_tpu_kernel")
    return lambda scores: kernel.sparsecore_topk(scores, 128), (normal(4, 1024),)


COS_SIN = np.concatenate([np.cos(normal(64, 32) * 9), np.sin(normal(64, 32) * 9)], -1)
POSITIONS = integers(0, 64, 32)


def rope(name: str) -> Job:
    kernel = getattr(tokamax("deepseek_rope.pallas_mosaic_tpu_kernel"), name)
    shape = (32, 128) if name == "rope_quant" else (32, 8, 512)
    return lambda *args: kernel(*args), (normal(*shape, dtype=BF16), POSITIONS, COS_SIN)


job("tokamax", "rope")(functools.partial(rope, "rope"))
job("tokamax", "rope with a norm")(functools.partial(rope, "qnorm_rope"))
job("tokamax", "rope, to fp8")(functools.partial(rope, "rope_quant"))


@job("tokamax", "grouped low-rank projection")
def lowrank() -> Job:
    kernel = tokamax("grouped_lowrank_proj.pallas_mosaic_tpu_kernel").fused_reverse_rope_wo_a_projection
    groups, rank, reduction = 2, 128, 8 * 512
    weights = normal(reduction, groups * rank).astype(jnp.float8_e4m3fn)
    args = normal(32, groups * 8, 512, dtype=BF16), POSITIONS, COS_SIN, weights, normal(groups * rank) ** 2
    return functools.partial(kernel, head_dim=512), args


@job("tokamax", "gather of cos and sin")
def gather_cos_sin() -> Job:
    kernel = tokamax("grouped_lowrank_proj.pallas_mosaic_tpu_kernel").gather_cos_sin
    return lambda *args: kernel(*args), (POSITIONS, COS_SIN)


MHC = {"rms_eps": 1e-6, "hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6, "hc_post_mult_value": 2.0, "sinkhorn_repeat": 20}


@job("tokamax", "mhc, before")
def mhc_pre() -> Job:
    kernel = tokamax("mhc.pre_kernel").mhc_pre
    args = normal(64, 4, 256, dtype=BF16), normal(24, 4 * 256), normal(3), normal(24, seed=1)
    return functools.partial(kernel, **MHC), args


@job("tokamax", "mhc, after")
def mhc_post() -> Job:
    kernel = tokamax("mhc.post_kernel").mhc_post
    args = normal(64, 256, dtype=BF16), normal(64, 4, 256, dtype=BF16), normal(64, 4, 1), normal(64, 4, 4)
    return lambda *args: kernel(*args), args


def state_of(save: Any) -> Any:
    """What a function has saved: the numbers of which four bytes each lie along an axis of the cache."""

    def call(*args: Any) -> Any:
        return jax.lax.bitcast_convert_type(jnp.moveaxis(save(*args, compress_ratio=4), 2, -1), jnp.float32)

    return call


@job("tokamax", "projection with saved state", state_of(plain("proj_and_save_state.reference:proj_and_save_state")))
def proj_and_save_state() -> Job:
    kernel = tokamax("proj_and_save_state.pallas_mosaic_tpu_kernel").proj_and_save_state
    rows = 2 * 1024 // 128  # of the cache, that a token takes
    slots = np.where(np.arange(16) < 14, rows * np.random.default_rng(0).permutation(32)[:16], -1).astype(np.int32)
    cache = np.moveaxis(normal(2, 256, 128).view(np.uint8).reshape(2, 256, 128, 4), 3, 2)
    args = normal(16, 256), normal(256, 2 * 1024), normal(4, 1024), integers(0, 999, 16), slots, cache
    return state_of(kernel), args


@job("tokamax", "linear softmax cross entropy")
def cross_entropy() -> Job:
    kernel = tokamax("linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel")
    fn = kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu
    blocks = {"b_block_size": 128, "h_block_size": 128, "v_block_size": 256}
    return functools.partial(fn, **blocks), (normal(256, 256), integers(0, 512, 256), normal(256, 512, seed=1))


@job("tokamax", "linear softmax cross entropy, gradient")
def cross_entropy_gradient() -> Job:
    kernel = tokamax("linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel")
    fn = kernel.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu
    blocks = {"b_block_size": 128, "h_block_size": 128, "v_block_size": 256}
    args = np.float32(1), normal(256) + 7, normal(256, 256), integers(0, 512, 256), normal(256, 512, seed=1)
    return functools.partial(fn, **blocks), args


@job("tokamax", "fp8 matmul")
def fp8_matmul() -> Job:
    kernel = tokamax("experimental.fused_fp8_matmul.pallas_mosaic_tpu_kernel").fused_fp8_matmul_pallas
    weights = normal(256, 256).astype(jnp.float8_e4m3fn)
    return functools.partial(kernel, bm=128, bk=128, bn=128), (
        normal(256, 256, dtype=BF16),
        weights,
        normal(256) ** 2,
    )


@job("tokamax", "gather of pages")
def page_ids() -> Job:
    kernel = tokamax("sparse_mla.pallas_mosaic_tpu_kernel").gather_page_ids
    args = integers(0, 99, 4 * 32), integers(0, 32, 16, 128), integers(0, 4, 16)
    return lambda *args: kernel(*args, 4), args


@job(
    "tokamax",
    "batched ragged paged attention",
    plain("batched_rpa.reference:batched_ragged_paged_attention_reference"),
)
def batched_rpa() -> Job:
    kernel = tokamax("batched_rpa.kernel.wrapper").ragged_paged_attention
    sizes = tokamax("batched_rpa.kernel.configs").BlockSizes(bq_sz=1, bq_c_sz=1, bkv_sz=128, batch_size=2, n_buffer=2)
    names = "queries keys values kv_cache kv_lens page_indices cu_q_lens distribution".split()
    arrays = (
        normal(4, 4, 128, dtype=BF16), normal(4, 2, 128, dtype=BF16, seed=1), normal(4, 2, 128, dtype=BF16, seed=2),
        normal(4, 128, 4, 128, dtype=BF16), np.full(4, 128, np.int32), np.arange(4, dtype=np.int32),
        np.arange(5, dtype=np.int32), np.full(3, 4, np.int32),
    )  # fmt: skip
    blocks = {"decode_block_sizes": sizes, "prefill_block_sizes": sizes}
    return lambda *args: kernel(**dict(zip(names, args, strict=True)), **blocks), arrays


@job("tokamax", "mla over pages", plain("experimental.mla.reference:mla_attention"))
def mla() -> Job:
    kernel = tokamax("experimental.mla.pallas_mosaic_tpu_kernel").mla_ragged_paged_attention
    args = (
        normal(4, 4, 128, dtype=BF16), normal(4, 4, 64, dtype=BF16, seed=1), normal(4, 128, dtype=BF16, seed=2),
        normal(4, 64, dtype=BF16, seed=3), normal(8, 8, 2, 256, dtype=BF16, seed=4), np.full(4, 30, np.int32),
        np.arange(8, dtype=np.int32), np.arange(5, dtype=np.int32), np.array([4, 4, 4], np.int32),
    )  # fmt: skip
    return functools.partial(kernel, num_kv_pages_per_block=2, num_queries_per_block=2, vmem_limit_bytes=64 << 20), args


def tokamax_splash(mask: str = "CausalMask", **options: Any) -> Job:
    kernel = tokamax("experimental.tpu.splash_attention.splash_attention_kernel")
    masks = tokamax("experimental.tpu.splash_attention.splash_attention_mask")
    names = "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute"
    config = kernel.SplashConfig(**dict.fromkeys(names.split(), 128), **options)
    fn = kernel.make_splash_mha_single_device(getattr(masks, mask)((256, 256)), config=config)
    return fn, tuple(normal(2, 256, 128, seed=n) for n in range(3))


job("tokamax", "splash attention, causal")(tokamax_splash)
job("tokamax", "splash attention, full")(functools.partial(tokamax_splash, "FullMask"))
job("tokamax", "splash attention, soft cap")(functools.partial(tokamax_splash, attn_logits_soft_cap=30.0))


@job("tokamax", "splash attention, gradient")
def tokamax_splash_gradient() -> Job:
    fn, args = tokamax_splash()
    return jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2)), args


@job("tokamax", "gather of two caches, on the SparseCore", plain("csa_gather.reference:csa_gather", top_k=256))
def csa_gather() -> Job:
    kernel = tokamax("csa_gather.pallas_mosaic_tpu_kernel").csa_gather
    caches = integers(-999, 999, 8, 256, 128), integers(-999, 999, 8, 64, 128)
    return functools.partial(kernel, top_k=256), (*caches, integers(0, 2048, 512))


@job("tokamax", "kda, inside of chunks")
def kda() -> Job:
    kernel = tokamax("kda.pallas_mosaic_tpu_fwd_kernel").pallas_kda_fwd_intra_fused
    fn = functools.partial(kernel, scale=0.1, chunk_size=64)
    return fn, (*(normal(2, 1, 128, 128, seed=n) for n in range(3)), -(normal(2, 1, 128, 128) ** 2), normal(2, 1, 128))


@job("tokamax", "fp8 matmul, gradient")
def fp8_gradient() -> Job:
    kernel = tokamax("experimental.fused_fp8_matmul.pallas_mosaic_tpu_dlhs_kernel").fused_fp8_dlhs_pallas
    args = normal(256, 256, dtype=BF16), normal(256, 256).astype(jnp.float8_e4m3fn), normal(256) ** 2
    return functools.partial(kernel, bm=128, bk=128, bn=128), args


GDN = {"n_kq": 2, "n_v": 4, "d_k": 128, "d_v": 128, "kernel_size": 4}


@job(
    "tokamax",
    "convolution and gated delta rule",
    plain("causal_conv1d_gated_delta_rule.reference:run_jax_gdn_attention_local_ref", **GDN),
)
def gdn() -> Job:
    kernel = tokamax("causal_conv1d_gated_delta_rule.wrapper").fused_conv1d_gdn
    names = (
        "qkv b a conv_state recurrent_state conv_weight conv_bias a_log dt_bias query_start_loc state_indices "
        "distribution seq_lens"
    ).split()
    arrays = (
        normal(16, 1024, dtype=BF16), normal(16, 4, dtype=BF16), normal(16, 4, dtype=BF16, seed=1),
        normal(5, 3, 1024, dtype=BF16), normal(5, 4, 128, 128), normal(1024, 1, 4, dtype=BF16), None, normal(4),
        normal(4, seed=1), np.array([0, 1, 2, 16, 16], np.int32), np.array([1, 2, 3, 4], np.int32),
        np.array([2, 2, 3], np.int32), np.array([5, 7, 14, 1], np.int32),
    )  # fmt: skip
    return lambda *args: kernel(**dict(zip(names, args, strict=True)), **GDN), arrays
