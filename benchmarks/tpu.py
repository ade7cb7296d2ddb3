"""What the TPU compiler makes of every solution, and of JAX's own kernels beside them: writes benchmarks/tpu.md.

    uv run --extra tpu-compiler python benchmarks/tpu.py [--tpu v5e,v6e,tpu7x]

Needs libtpu, the extra tpu-compiler, and no TPU.
Nothing here is timed: bundles and bytes are counted in the compiled program, times are estimates (see `tpu_report`).
What bench.py has measured on a TPU follows, with its conditions: see measured.py.
"""

import argparse
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import measured
import numpy as np
from measured import shape

from pallas_puzzles.course import curriculum, session
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.chips import CHIPS, chips
from pallas_puzzles.text import human_bytes
from pallas_puzzles.view.tpu_report import KernelReport, tpu_report

BF16 = jnp.bfloat16
COLUMNS = ["TPU", "VMEM", "spills", "bundles per step", "MXU ideal", "MXU", "VALU", "XLU", "EUP", "load", "store"]
COLUMNS += ["HBM", "FLOP per byte", "bound by", "estimate"]


def solution(puzzle_id: str) -> Any:
    """(the puzzle's function with the hidden solution in it, the cases of its check)."""
    file = curriculum.course_folder() / "solutions" / f"{curriculum.puzzle(puzzle_id).notebook}.py"
    subject = session.run(puzzle_id, overlay=file, judge=False).subject
    assert subject is not None, puzzle_id
    return subject


# --- JAX's own kernels, and ours at the same shapes and blocks -------------------------------------------------------

Job = tuple[str, Callable[..., Any], list[Any]]  # what to call it, a function of arrays, the arrays


def jax_matmul() -> Job:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    fn = functools.partial(matmul, block_shape=(512, 512), block_k=512)
    return "jax ops.tpu.matmul", fn, [shape(2048, 2048)] * 2


def our_matmul() -> Job:
    fn = functools.partial(solution("matmul/3").fn, bm=512, bn=512, bk=512)
    return "matmul/3 straight_matmul", fn, [shape(2048, 2048)] * 2


def jax_flash(causal: bool) -> Job:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    blocks = flash.BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)
    fn = functools.partial(flash.flash_attention, causal=causal, block_sizes=blocks)
    return f"jax flash_attention{' causal' if causal else ''}", fn, [shape(1, 4, 2048, 128)] * 3


def our_flash(causal: bool) -> Job:
    puzzle = "flash_attention/6" if causal else "flash_attention/5"
    subject = solution(puzzle)
    fn = functools.partial(subject.fn, bq=512, bkv=512)
    return f"{puzzle} {subject.fn.__name__}", fn, [shape(1, 4, 2048, 128)] * 3


def our_flash_fwd() -> Job:
    fn = functools.partial(solution("flash_attention/7").fn, bq=512, bkv=512)
    return "flash_attention/7 flash_attention_fwd causal, with lse", fn, [shape(1, 4, 2048, 128)] * 3


def jax_splash() -> Job:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((2048, 2048)) for _ in range(4)])
    blocks = splash.BlockSizes(block_q=512, block_kv=512, block_kv_compute=512)

    def fn(q: Any, k: Any, v: Any) -> Any:
        return splash.make_splash_mha_single_device(mask, block_sizes=blocks)(q, k, v)

    return "jax splash_attention causal", fn, [shape(4, 2048, 128)] * 3


GROUPED = [shape(1024, 1024), shape(4, 1024, 1024), np.array([100, 200, 500, 224], np.int32)]


def jax_gmm() -> Job:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    fn = functools.partial(gmm, preferred_element_type=BF16, tiling=(256, 256, 256))
    return "jax megablox gmm", fn, GROUPED


def our_gmm() -> Job:
    fn = functools.partial(solution("ragged_dot/6").fn, bm=256, bn=256, bk=256)
    return "ragged_dot/6 ragged_product", fn, GROUPED


# What stands side by side: "blocks of 512" and so on, then ours (where there is one) and JAX's.
SIDE_BY_SIDE: list[tuple[str, list[Callable[[], Job]]]] = [
    ("Matrix product, 2048 x 2048 x 2048, bf16, blocks of 512", [our_matmul, jax_matmul]),
    (
        "Attention, 1 x 4 heads x 2048 x 128, bf16, blocks of 512",
        [
            functools.partial(our_flash, False),
            functools.partial(jax_flash, False),
            functools.partial(our_flash, True),
            our_flash_fwd,
            functools.partial(jax_flash, True),
            jax_splash,
        ],
    ),
    (
        "Grouped matrix product, 1024 rows in groups of 100, 200, 500, 224, 1024 x 1024, bf16, blocks of 256",
        [our_gmm, jax_gmm],
    ),
]


# --- the tables ------------------------------------------------------------------------------------------------------


def row(name: str, tpu: str, kernel: KernelReport) -> list[str]:
    if kernel.least_step == kernel.most_step:
        bundles = f"{kernel.most_step}"
    else:
        bundles = f"{kernel.mean_step:.0f} ({kernel.least_step} to {kernel.most_step})"
    slots = [f"{kernel.slots[slot]:.0%}" for slot in ("MXU", "VALU", "XLU", "EUP", "load", "store")]
    hbm = "?" if kernel.hbm_bytes is None else human_bytes(kernel.hbm_bytes)
    intensity = "?" if kernel.intensity is None else f"{kernel.intensity:.3g}"
    time = "?" if kernel.time_s is None else f"{kernel.time_s * 1e6:.3g} us"
    vmem, ideal = human_bytes(kernel.vmem_bytes), f"{kernel.mxu_cycles:.3g}"
    return [name, tpu, vmem, f"{kernel.spills}", bundles, ideal, *slots, hbm, intensity, kernel.bound or "?", time]


def rows(name: str, fn: Callable[..., Any], args: list[Any], tpus: list[str], **blocks: Any) -> Iterator[list[str]]:
    for tpu in tpus:
        report = tpu_report(fn, *args, tpu=tpu, simulate=False, **blocks)
        if not report:
            raise SystemExit(f"{name} on {tpu}: {report.unavailable or report.refusal}")
        for kernel in report.kernels:
            several = len(report.kernels) > 1
            yield row(f"{name}: {kernel.name}" if several else name, tpu, kernel)


def table(first: str, lines: list[list[str]]) -> str:
    return measured.markdown([[first, *COLUMNS], *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu", default=",".join(CHIPS), help="which ones, commas between")
    tpus = [chip.name for chip in chips(parser.parse_args().tpu)]
    if reason := compiler.missing():
        raise SystemExit(reason)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))
    parts = [
        "# What the TPU compiler makes of the kernels",
        f"Written by `uv run python benchmarks/tpu.py` ({versions}); no TPU was there. A bundle is what a TensorCore "
        "issues in a cycle: where a step's bundles vary, the mean over the grid, and the range in brackets. MXU ideal: "
        "cycles a step that its matrix products need at the MXU's peak. MXU to store: share of each kind of slot in "
        "use. The estimate and what bounds it: see `tpu_report`. TPU7x: one of its two TensorCores.",
    ]
    parts.append("## Beside JAX's own kernels")
    for title, jobs in SIDE_BY_SIDE:
        lines = [line for job in jobs for name, fn, args in [job()] for line in rows(name, fn, args, tpus)]
        lines.sort(key=lambda line: tpus.index(line[1]))
        parts += [f"### {title}", table("kernel", lines)]
    parts.append("## Every solution, at the first shapes and blocks of its check")
    for book in (each for each in curriculum.notebooks() if each.accelerator == "tpu"):
        lines = []
        for puzzle in book.puzzles:
            subject = solution(puzzle.id)
            first = subject.cases[0]
            lines += rows(f"{puzzle.id} {puzzle.title}", subject.fn, list(first.inputs), tpus, **first.blocks)
        parts += [f"### {book.name}", table("puzzle", lines)]
    if measurements := measured.table("tpu"):
        parts += ["## Measured, each row with its conditions", measurements]
    file = Path(__file__).with_suffix(".md")
    file.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {file}: {sum(part.count(' | v') + part.count(' | tpu') for part in parts)} rows")


if __name__ == "__main__":
    main()
