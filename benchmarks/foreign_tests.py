"""Which kernels of other projects are called as their own tests call them: entry -> the tests."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from foreign_jobs import Job
from foreign_plain import grouped_outer_product, grouped_product, named, scattered_rows
from harvest import harvest, readable, replace

ABSENT = (
    "torch vllm torchax torch_xla fastapi qwix flax transformers uvicorn orjson psutil huggingface_hub zmq requests "
    "PIL uvloop pathwaysutils tpu_info openai aiohttp modelscope tokamax._src.ops.experimental.gmm_v2"
).split()
PRODUCTS = {"gmm_v2": grouped_product, "tgmm_v2": grouped_outer_product}


@dataclasses.dataclass(frozen=True)
class Project:
    """A project whose tests call its kernels. checkout, root: where below --source, None for an installed package.

    kernels: module:function, below `modules` -> a file of tests, below `tests`. known: what functions say here, which
    would look for a TPU. plain: a kernel's function -> the same in plain arrays. unordered: functions whose results'
    order along the last axis is not promised.
    """

    package: str
    modules: str
    tests: str
    kernels: dict[str, str]
    checkout: str | None = None
    root: str = "."
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unordered: tuple[str, ...] = ()
    plain: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=lambda: PRODUCTS)


PROJECTS = {
    "tokamax": Project(
        "tokamax",
        "tokamax._src.ops.",
        "_src/ops",
        {
            "masked_dense_mla.pallas_mosaic_tpu_kernel:masked_dense_ragged_paged_attention": (
                "masked_dense_mla/pallas_mosaic_tpu_kernel_test.py"
            ),
            "masked_dense_mla.scatter_utils:scatter_rows": "masked_dense_mla/scatter_test.py",
            "dsv4_compressor.pallas_mosaic_tpu_kernel:compress_norm_rope_store": (
                "dsv4_compressor/pallas_mosaic_tpu_kernel_test.py"
            ),
            "lightning_indexer.kernel.streamindex_topk:streamindex_topk": (
                "lightning_indexer/kernel/streamindex_topk_test.py"
            ),
            "mhc.fused_post_pre_kernel:mhc_fused_post_pre": "mhc/mhc_test.py",
            "mhc.pre_kernel:mhc_pre_mixes": "mhc/mhc_test.py",
            "sparse_mla.pallas_mosaic_tpu_kernel:sparse_ragged_paged_attention": (
                "sparse_mla/pallas_mosaic_tpu_kernel_test.py"
            ),
            "experimental.mla_swa.pallas_mosaic_tpu_kernel:mla_sliding_window_ragged_paged_attention": (
                "experimental/mla_swa/pallas_mosaic_tpu_kernel_test.py"
            ),
            "ragged_gather_reduce.pallas_mosaic_tpu_kernel:ragged_gather_reduce": (
                "ragged_gather_reduce/pallas_mosaic_tpu_test.py"
            ),
            "gmm_v2.gmm_v2:gmm_v2": "gmm_v2/gmm_v2_test.py",
            "gmm_v2.tgmm_v2:tgmm_v2": "gmm_v2/gmm_v2_test.py",
            "router_topk.pallas_mosaic_tpu_kernel:select": "router_topk/pallas_mosaic_tpu_test.py",
            "batched_rpa.kernel.wrapper:ragged_paged_attention": "batched_rpa/kernel/speculative_decode_test.py",
        },
        unordered=("streamindex_topk",),
        plain={
            **PRODUCTS,
            "scatter_rows": scattered_rows,
            "compress_norm_rope_store": named("tokamax._src.ops.dsv4_compressor.reference:compress_norm_rope_store"),
            "streamindex_topk": named("tokamax._src.ops.lightning_indexer.reference:lightning_indexer"),
        },
    ),
    "tpu-inference": Project(
        "tpu_inference",
        "tpu_inference.kernels.",
        "tests/kernels",
        {
            "quantized_matmul.kernel:quantized_matmul_kernel": "quantized_matmul_kernel_test.py",
            "quantized_matmul.blockwise_kernel:quantized_matmul_kernel": "quantized_matmul_kernel_test.py",
            "megablox.gmm_v2:gmm_v2": "gmm_test.py",
            "ragged_paged_attention.v2.ragged_kv_cache_update:kv_cache_update": "ragged_kv_cache_update_v2_test.py",
            "ragged_paged_attention.v2.kernel:ragged_paged_attention": "ragged_paged_attention_kernel_v2_test.py",
            "ragged_paged_attention.v3.kernel:ragged_paged_attention": "ragged_paged_attention_kernel_v3_test.py",
            "ragged_paged_attention.v3.kernel_hd64:ragged_paged_attention_hd64": (
                "ragged_paged_attention_kernel_v3_hd64_test.py"
            ),
            "mla.v2.transpose:xpose_pipeline": "transpose_test.py",
            "causal_conv1d.causal_conv1d:ragged_causal_conv1d": "causal_conv1d_test.py",
            "gdn.v1.fused_gdn_kernel_wrapper:fused_gdn": "fused_gdn_kernel_test.py",
            "gdn.v2.gdn_decode_kernel:ragged_gated_delta_rule_decode_only": "gdn_decode_kernel_test.py",
            "gdn.v2.recurrent_scan_v2:recurrent_scan": "recurrent_scan_test.py",
            "gdn.v3.wrapper:fused_conv1d_gdn": "gdn_attention_v3_test.py",
            "structured_sparse_matmul.v1.spmm:structured_spmm": "spmm_v1_test.py",
            "sparse_core.ragged_gather_v2:ragged_gather_v2": "ragged_gather_v2_test.py",
            "sparse_core.ragged_gather_reduce_v2:ragged_gather_reduce": "ragged_gather_reduce_v2_test.py",
            "sparse_core.ragged_scatter:ragged_scatter": "ragged_scatter_test.py",
            "sparse_core.dense_gather_reduce:dense_gather_reduce": "dense_gather_reduce_test.py",
            "sparse_core.gather_reduce:sc_gather_reduce": "gather_reduce_test.py",
            "experimental.rpa_v3_cp.kernel:ragged_paged_attention": (
                "rpa_v3_cp/ragged_paged_attention_kernel_cp_test.py"
            ),
            "experimental.stacked_rpa.wrapper:ragged_paged_attention": ("stacked_rpa/stacked_rpa_kv_writeback_test.py"),
            "experimental.deepseek_v4.rope:qnorm_rope": "deepseek_v4/rope_test.py",
            "experimental.deepseek_v4.mhc.pre_kernel:mhc_pre": "deepseek_v4/mhc_test.py",
            "experimental.deepseek_v4.core_attention.sparse_mla:sparse_ragged_paged_attention": (
                "deepseek_v4/sparse_mla_test.py"
            ),
            "experimental.deepseek_v4.compress_and_store.kernel:compress_norm_rope_store": (
                "deepseek_v4/compress_store_test.py"
            ),
            "experimental.deepseek_v4.indexer.streamindex_topk:streamindex_topk": (
                "deepseek_v4/test_streamindex_topk.py"
            ),
        },
        "tpu-inference",
        known={"ragged_paged_attention.v3.util:get_tpu_version": 6},
    ),
    "sglang-jax": Project(
        "sgl_jax",
        "sgl_jax.srt.kernels.",
        "sgl_jax/test",
        {
            "biased_topk:biased_topk_pallas": "kernels/biased_topk_test.py",
            "biased_topk:topk_pallas": "kernels/biased_topk_test.py",
            "grouped_topk.v1.kernel:grouped_topk_pallas": "kernels/grouped_topk_test.py",
            "gmm.megablox_gmm_kernel.gmm:gmm": "kernels/gmm_test.py",
            "gmm.megablox_gmm_kernel.gmm_v2:gmm_v2": "kernels/gmm_test.py",
            "simple_gla.simple_gla_fused:decode_simple_gla_fused": "kernels/simple_gla_fused_test.py",
            "simple_gla.simple_gla:fused_recurrent_simple_gla": "kernels/simple_gla_fused_test.py",
            "kda.kda:chunk_kda_fwd": "kernels/kda_test.py",
            "kda.kda:kda_gate_chunk_cumsum": "kernels/kda_test.py",
            "speculative.verify_tree_greedy_kernel:verify_tree_greedy": "speculative/test_eagle_utils.py",
            "speculative.build_eagle_tree_structure_kernel:build_eagle_tree_structure": (
                "speculative/test_eagle_utils.py"
            ),
        },
        "sglang-jax",
        "python",
    ),
    "maxtext": Project(
        "maxtext",
        "maxtext.kernels.",
        "../tests/unit",
        {
            "megablox.pallas_mosaic_tpu_v2_gmm_kernel:gmm_v2": "pallas_mosaic_tpu_v2_kernel_test.py",
            "megablox.pallas_mosaic_tpu_v2_tgmm_kernel:tgmm_v2": "pallas_mosaic_tpu_v2_kernel_test.py",
        },
        "maxtext",
        "src",
    ),
}


def folder_of(name: str, source: Path | None) -> Path | str:
    """Where the modules of a project are, or in words why they are not to be had."""
    project = PROJECTS[name]
    if project.checkout is None:
        spec = importlib.util.find_spec(project.package)
        return Path(spec.origin).parent if spec and spec.origin else "is not installed here"
    if source is None or not (source / project.checkout).is_dir():
        return "is not among the checkouts of --source"
    return source / project.checkout / project.root


def calls_of(name: str, source: Path | None, word: str) -> Iterator[tuple[str, Job, Callable[..., Any] | None]]:
    """(name of a row, the call, the same in plain arrays) for the kernels of a project that has a folder, where the
    name has this word in it."""
    project, root = PROJECTS[name], folder_of(name, source)
    assert isinstance(root, Path)
    if project.checkout is not None:
        readable(root, project.package, tuple(ABSENT))
    for entry, value in project.known.items():
        replace(project.modules + entry, lambda value=value: value)
    tests = root / project.tests if (root / project.tests).exists() else root.parent / project.tests
    for entry, file in project.kernels.items():
        module, function = entry.split(":")
        title = f"{name}: {module.replace('pallas_mosaic_tpu_', '').replace('experimental.', '')}.{function}"
        if word not in title.lower():
            continue
        try:
            calls, why = harvest(project.modules + entry, str(tests / file))
        except Exception as error:
            calls, why = {}, f"{type(error).__name__}: {error}"
        if not calls:
            print(f"{title}: no call of it in {file}: {why}", flush=True)
        plain = project.plain.get(function)
        for test, (fn, args) in calls.items():
            fn = functools.partial(_in_order, fn) if function in project.unordered else fn
            yield f"{title}, {test}", (fn, args), functools.partial(fn, kernel=plain) if plain else None


def _in_order(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sort(x, -1), fn(*args, **options))
