"""Kernels that nobody wrote for this project, through the lens: writes benchmarks/foreign.md.

    uv run --extra tpu-compiler python benchmarks/foreign.py [-k WORD] [--no-report]

JAX's own kernels, and those of tokamax where it is installed (the lock does not have it):

    uv run --with tokamax python benchmarks/foreign.py -k tokamax

Rows of kernels that do not run this time (-k, a package that is not installed) stay in the table as they are.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles.diagnose.diagnose import diagnose
from pallas_puzzles.lens import machine
from pallas_puzzles.lens.watchdog import TimeLimit, time_limit
from pallas_puzzles.targets.simulate import SimulatorError, simulate
from pallas_puzzles.view.tpu_report import tpu_report

TABLE = Path(__file__).with_name("foreign.md")
COLUMNS = ["kernel", "the lens", "findings", "agrees with JAX's simulator to", "report", "lens, s", "simulator, s"]
LIMIT_S = 60.0
BF16, I32 = jnp.bfloat16, np.int32

Job = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of arrays, the arrays
JOBS: dict[str, tuple[str, Callable[[], Job]]] = {}  # name of a row -> package, what makes its job


def job(package: str, name: str = "") -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    def register(make: Callable[[], Job]) -> Callable[[], Job]:
        JOBS[f"{package}: {name or make.__name__.replace('_', ' ')}"] = (package, make)
        return make

    return register


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


# --- jax.experimental.pallas.ops.tpu ---------------------------------------------------------------------------------


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


@job("jax")
def ragged_paged_attention() -> Job:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as kernel

    fn = functools.partial(kernel, num_kv_pages_per_block=2, num_queries_per_block=16)
    q, kv = normal(64, 4, 128, dtype=BF16), normal(16, 16, 4, 128, dtype=BF16, seed=1)
    lengths, starts = np.array([20, 40, 0, 0], np.int32), np.array([0, 10, 40, 40, 40], np.int32)
    first = lambda *args: fn(*args)[:40]  # noqa: E731 # nobody writes the rest
    return first, (q, kv, lengths, integers(0, 16, 4, 8), starts, np.array([2], np.int32))


GROUPS = np.array([100, 0, 28, 128], np.int32)


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


# --- tokamax ---------------------------------------------------------------------------------------------------------


def tokamax(name: str) -> Any:
    return importlib.import_module(f"tokamax._src.ops.{name}")


def gmm_v2(dtype: Any = np.float32, **options: Any) -> Job:
    fn = functools.partial(tokamax("gmm_v2.gmm_v2").gmm_v2, **options)
    weights = normal(4, 256, 256, dtype=dtype, seed=1)
    return lambda *args: fn(*args), (normal(96, 256, dtype=dtype), weights, np.array([30, 0, 50, 16], np.int32))


job("tokamax", "gmm_v2")(gmm_v2)
job("tokamax", "gmm_v2, bf16")(functools.partial(gmm_v2, BF16))
job("tokamax", "gmm_v2, silu")(functools.partial(gmm_v2, BF16, fuse_act="silu"))


@job("tokamax", "tgmm_v2")
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


@job("tokamax", "top k, on the SparseCore")
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


@job("tokamax", "projection with saved state")
def proj_and_save_state() -> Job:
    kernel = tokamax("proj_and_save_state.pallas_mosaic_tpu_kernel").proj_and_save_state
    slots = np.where(np.arange(16) < 14, np.random.default_rng(0).permutation(32)[:16], -1).astype(np.int32)
    cache = integers(0, 256, 2, 256, 4, 128).astype(np.uint8)
    args = normal(16, 256), normal(256, 2 * 1024), normal(4, 1024), integers(0, 999, 16), slots, cache
    return functools.partial(kernel, compress_ratio=4), args


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


@job("tokamax", "batched ragged paged attention")
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


@job("tokamax", "mla over pages")
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


@job("tokamax", "gather of two caches, on the SparseCore")
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


@job("tokamax", "convolution and gated delta rule")
def gdn() -> Job:
    kernel = tokamax("causal_conv1d_gated_delta_rule.wrapper").fused_conv1d_gdn
    sizes = {"n_kq": 2, "n_v": 4, "d_k": 128, "d_v": 128, "kernel_size": 4}
    names = (
        "qkv b a conv_state recurrent_state conv_weight conv_bias a_log dt_bias query_start_loc state_indices "
        "distribution seq_lens"
    ).split()
    arrays = (
        normal(16, 1024, dtype=BF16), normal(16, 4, dtype=BF16), normal(16, 4, dtype=BF16, seed=1),
        normal(5, 3, 1024, dtype=BF16), normal(5, 4, 128, 128), normal(1024, 1, 4, dtype=BF16), None, normal(4),
        normal(4, seed=1), np.array([0, 1, 2, 16, 16], np.int32), np.array([1, 2, 3, 4], np.int32),
        np.array([2, 2, 3], np.int32), np.array([5, 7, 14, 0], np.int32),
    )  # fmt: skip
    return lambda *args: kernel(**dict(zip(names, args, strict=True)), **sizes), arrays


# --- one row ---------------------------------------------------------------------------------------------------------


def row(make: Callable[[], Job], report: bool) -> list[str]:
    """What the table says of one kernel, behind its name."""
    try:
        fn, args = make()
        (run, error), lens_s = timed(lambda: machine.trace(fn, *args))
    except Exception as e:
        return [f"the call: {short(e)}", "", "", "", "", ""]
    (outputs, simulator), simulator_s = timed(
        lambda: simulate(fn, *args, timeout_s=LIMIT_S, chip=run.chip if run else "TPU v5e")
    )
    ran = f"{len(run.traces)} kernel{'s' if len(run.traces) != 1 else ''}" if run is not None else short(error)
    findings = ""
    if run is not None:
        found = diagnose(run, outputs if outputs is not None else run.outputs).findings
        findings = ", ".join(f.kind for f in found) or "none"
    agrees = (
        f"cannot run it: {short(simulator)}"
        if outputs is None
        else difference(run.outputs, outputs)
        if run is not None
        else ""
    )
    said = told(fn, args) if report else ""
    return [ran, findings, agrees, said, f"{lens_s:.2f}", f"{simulator_s:.2f}" if outputs is not None else ""]


def timed(work: Callable[[], Any]) -> tuple[tuple[Any, BaseException | None], float]:
    start = time.perf_counter()
    result: tuple[Any, BaseException | None]
    try:
        with time_limit(LIMIT_S):
            result = work(), None
    except (Exception, TimeLimit) as error:
        result = None, error
    return result, time.perf_counter() - start


def short(error: BaseException | None) -> str:
    kind = "" if isinstance(error, machine.Beyond | SimulatorError) else f"{type(error).__name__}: "
    text = (kind + " ".join(str(error).split())).replace("|", "/")
    return text if len(text) < 90 else text[:87] + "..."


def difference(got: Any, want: Any) -> str:
    """The largest difference, by the largest number that is wanted."""
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        if not np.array_equal(np.isfinite(g), np.isfinite(w)):
            return "not at all: inf or NaN"
        finite = np.isfinite(w)
        worst = max(
            worst, float(np.abs(g - w)[finite].max(initial=0)) / max(1.0, float(np.abs(w[finite]).max(initial=0)))
        )
    return f"{worst:.1e}" if worst else "the bit"


def told(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    (report, error), _ = timed(lambda: tpu_report(fn, *args, simulate=False))
    if report is None:
        return f"raises {short(error)}"
    if report.refusal is not None:
        return f"refused: {short(Exception(report.refusal.sentence))}".replace("Exception: ", "")
    return report.unavailable or f"{len(report.kernels)} compiled"


def rows_before() -> dict[str, list[str]]:
    lines = TABLE.read_text("utf-8").splitlines() if TABLE.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {first: rest for first, *rest in cells if first in JOBS}


def written(rows: dict[str, list[str]], missing: list[str]) -> str:
    ran = sum(r[0].endswith(("kernel", "kernels")) and not r[0].startswith("0 ") for r in rows.values())
    clean = sum(r[1] == "none" for r in rows.values())
    head = [
        "# Kernels that nobody wrote for this project",
        "",
        "Written by `benchmarks/foreign.py`. Small shapes, one process on a CPU, first runs: the seconds are for",
        f"orientation only. JAX {jax.__version__}.",
        "",
        f"The lens ran {ran} of {len(rows)}, {clean} of them without a finding.",
        *[f"{name} is not installed here: its rows are of an earlier run, or left out." for name in missing],
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    return "\n".join(head + [f"| {' | '.join([name, *rows[name]])} |" for name in JOBS if name in rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only rows whose name has this in it")
    parser.add_argument("--no-report", action="store_true", help="without tpu_report, which takes seconds a kernel")
    asked = parser.parse_args()
    rows = rows_before()
    missing = [name for name in sorted({p for p, _ in JOBS.values()}) if importlib.util.find_spec(name) is None]
    for name, (package, make) in JOBS.items():
        if asked.k.lower() in name.lower() and package not in missing:
            rows[name] = row(make, report=not asked.no_report)
            print(name, *rows[name], sep=" | ", flush=True)
    TABLE.write_text(written(rows, missing), "utf-8")


if __name__ == "__main__":
    main()
