"""What the GPU compiler makes of JAX's own GPU kernels, of a few of ours, and of every solution: writes gpu.md.

    uv run --all-groups --extra gpu-compiler python benchmarks/gpu.py [--gpu h100,h200,b200]

Needs the extra gpu-compiler, and no GPU. Times are estimates (see `gpu_report`). Beside them stand the times that
bench.py has measured on a GPU, with their conditions: see measured.py.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attention
import jax
import jax.numpy as jnp
import matmul
import measured
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from measured import shape

MATMUL = Path(__file__).parent / "h200" / "matmul.json"  # of matmul.py
ATTENTION = Path(__file__).parent / "h200" / "attention.json"  # of attention.py
COLUMNS = ["GPU", "threads", "registers", "spills", "SMEM", "CTAs per SM", "waves", "SASS", "HGMMA", "TMA", "barriers"]
COLUMNS += ["bound by", "estimate", "measured", "estimate / measured"]
BARRIERS = ("SYNCS", "BAR", "UTCBAR")


@dataclasses.dataclass
class Job:
    """A function of arrays. flops, nbytes: what it has to do, for a rate that can be compared with a peak."""

    name: str
    fn: Callable[..., Any]
    args: list[Any]
    chips: tuple[str, ...] = ("h100", "h200")
    flops: float = 0.0
    nbytes: float = 0.0


# --- kernels of ours, each bounded by one part of a GPU --------------------------------------------------------------

ALL = ("h100", "h200", "b200")


def softmax(x: Any) -> Any:
    """Softmax of each row: HBM."""

    def kernel(x_gmem: Any, o_gmem: Any) -> None:
        row = jax.lax.axis_index("row")
        x = x_gmem[row]
        p = jnp.exp(x - jnp.max(x))
        o_gmem[row] = p / jnp.sum(p)

    return plgpu.kernel(kernel, out_type=x, grid=(x.shape[0],), grid_names=("row",))(x)


def arithmetic(x: Any, *, step: Callable[[Any], Any], steps: int) -> Any:
    """`steps` times the same on values in registers: instructions, or MUFU."""

    def kernel(x_gmem: Any, o_gmem: Any) -> None:
        row = jax.lax.axis_index("row")
        o_gmem[row] = jax.lax.fori_loop(0, steps, lambda _, x: step(x), x_gmem[row])

    return plgpu.kernel(kernel, out_type=x, grid=(x.shape[0],), grid_names=("row",))(x)


def reads(x: Any, *, ctas: int, rounds: int) -> Any:
    """Every CTA copies all of x, of (blocks, rows, columns), into SMEM, `rounds` times: L2."""
    blocks, rows, columns = x.shape
    slots = 4

    def kernel(x_gmem: Any, o_gmem: Any, x_smem: Any, o_smem: Any, barriers: Any) -> None:
        first = jax.lax.axis_index("cta") * 7

        def copy(i: Any) -> None:
            block, slot = jax.lax.rem(first + i, blocks), jax.lax.rem(i, slots)
            plgpu.copy_gmem_to_smem(x_gmem.at[block], x_smem.at[slot], barriers.at[slot])

        for i in range(slots):
            copy(i)

        @functools.partial(jax.lax.fori_loop, 0, rounds * blocks - slots, init_val=None)
        def _(i: Any, _: None) -> None:
            plgpu.barrier_wait(barriers.at[jax.lax.rem(i, slots)])
            copy(i + slots)

        for i in range(slots):
            plgpu.barrier_wait(barriers.at[(rounds * blocks + i) % slots])
        o_smem[...] = x_smem[0, 0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[jax.lax.axis_index("cta")])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=shape(ctas, columns, dtype=x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=[
            plgpu.SMEM((slots, rows, columns), x.dtype),
            plgpu.SMEM((columns,), x.dtype),
            plgpu.Barrier(num_barriers=slots),
        ],
    )(x)


def ours() -> Iterator[Job]:
    f32 = functools.partial(shape, dtype=jnp.float32)
    for rows in (4096, 65536):
        x = f32(rows, 4096)
        yield Job(f"row softmax, {rows} x 4096 f32", softmax, [x], ALL, nbytes=2 * 4 * rows * 4096)
    x = f32(4096, 4096)
    fma = functools.partial(arithmetic, step=lambda x: x * 0.999 + 0.001, steps=256)
    yield Job("256 multiply-adds, 4096 x 4096 f32", fma, [x], ALL, flops=2 * 256 * 4096**2)
    exp2 = functools.partial(arithmetic, step=lambda x: jnp.exp2(-x), steps=64)
    yield Job("64 exp2, 4096 x 4096 f32", exp2, [x], ALL, flops=64 * 4096**2)
    l2 = functools.partial(reads, ctas=132, rounds=16)
    yield Job("132 CTAs read 16 MiB 16 times, f32", l2, [f32(512, 64, 128)], ("h100", "h200"), nbytes=132 * 16 * 2**24)


# --- JAX's own -------------------------------------------------------------------------------------------------------


def matmuls() -> Iterator[Job]:
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as blackwell
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

    tiles = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}
    snake = {"grid_tile_width": 8, "grid_minor_dim": hopper.MatmulDimension.M}
    for n in (4096, 8192):
        for words, more in (
            ("", {}),
            (", snake", snake),
            (", snake, clusters of 2", {**snake, "cluster_dimension": hopper.MatmulDimension.M}),
        ):
            config = hopper.TuningConfig(**tiles, **more)
            fn = functools.partial(lambda a, b, config: hopper.matmul(a, b, None, config), config=config)
            yield Job(f"hopper_matmul, {n}^3 bf16{words}", fn, [shape(n, n)] * 2, ("h100", "h200"), flops=2 * n**3)
        for collective in (False, True):
            config = blackwell.TuningConfig(**tiles, collective=collective)
            fn = functools.partial(blackwell.matmul_kernel, config=config)
            words = ", collective" if collective else ""
            yield Job(f"blackwell_matmul, {n}^3 bf16{words}", fn, [shape(n, n)] * 2, ("b200",), flops=2 * n**3)


def attentions() -> Iterator[Job]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    b, s, h, d = 4, 8192, 16, 128
    args = [shape(b, s, h, d, dtype=jnp.float16)] * 3
    flops = 4 * b * h * s * s * d
    for words, kernel, more in (
        ("attention", mgpu.attention, {"use_schedule_barrier": False}),
        ("attention, ping-pong", mgpu.attention, {}),
        ("attention, causal", mgpu.attention, {"causal": True}),
        ("attention_with_pipeline_emitter", mgpu.attention_with_pipeline_emitter, {}),
    ):
        config = mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, **more)
        fn = functools.partial(kernel, config=config)
        half = 2 if "causal" in words else 1
        yield Job(f"{words}, B{b} S{s} H{h} D{d} f16", fn, args, ("h100", "h200"), flops=flops / half)


def ragged() -> Iterator[Job]:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as mgpu

    m, k, n, groups = 16384, 4096, 4096, 16
    sizes = np.random.default_rng(0).multinomial(m, [1 / groups] * groups).astype(np.int32)
    blocks = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}

    def fn(x: Any, w: Any, group_sizes: Any) -> Any:
        return mgpu.ragged_dot(x, w, group_sizes=group_sizes, **blocks)

    args = [shape(m, k), shape(groups, k, n), sizes]
    yield Job(f"ragged_dot, {m} x {k} x {n}, {groups} groups, bf16", fn, args, ("h100", "h200"), flops=2 * m * k * n)


def jobs() -> list[Job]:
    return [*ours(), *matmuls(), *attentions(), *ragged()]


def solutions() -> Iterator[Job]:
    """Every solution for a GPU, at the first shapes and blocks of its check."""
    from pallas_puzzles.course import cases, curriculum

    books = [book for book in curriculum.notebooks() if book.accelerator == "gpu"]
    for puzzle in (each for book in books for each in book.puzzles):
        official = cases.official(puzzle.id)
        first = official.cases[0]
        if official.kernel:
            fn = functools.partial(official.fn, **first.blocks)
            yield Job(f"{puzzle.id} {puzzle.title}", fn, list(first.inputs), ("h100", "h200", "b200"))


def in_the_machine() -> Iterator[list[str]]:
    """What the machine of lens/gpu takes for each solution: all cases of its check, the first time and the second."""
    from pallas_puzzles.course import cases, curriculum
    from pallas_puzzles.course.inputs import draw
    from pallas_puzzles.lens import gpu
    from pallas_puzzles.lens.gpu.timeline import in_l2

    for puzzle in (each for book in curriculum.notebooks() if book.accelerator == "gpu" for each in book.puzzles):
        official = cases.official(puzzle.id)
        if not official.kernel:
            continue
        ctas, seconds = 0, [0.0, 0.0]
        for case in official.cases:
            args = draw(case.inputs, np.random.default_rng(0))
            for again in range(2):
                start = time.process_time()
                with in_l2(case.l2):
                    run = gpu.run(official.fn, *args, **case.blocks)
                seconds[again] += time.process_time() - start
            ctas += run.counts.ctas
        yield [f"{puzzle.id} {puzzle.title}", f"{len(official.cases)}", f"{ctas}", *(f"{s:.2f}" for s in seconds)]


# --- the table -------------------------------------------------------------------------------------------------------


def rows(job: Job, gpus: list[str]) -> Iterator[list[str]]:
    from pallas_puzzles.text import human_bytes
    from pallas_puzzles.view.gpu_report import gpu_report

    for gpu in gpus:
        if gpu not in job.chips:
            continue
        report = gpu_report(job.fn, *job.args, chip=gpu)
        if gpu == "b200" and report.refusal and "no `wgmma`" in report.refusal.sentence:
            continue  # an instruction of Hopper GPUs alone
        if not report:
            raise SystemExit(f"{job.name} on {gpu}: {report.unavailable or report.refusal}")
        for kernel in report.kernels:
            time_s = kernel.time_s
            took = measured.seconds(gpu, job.name)
            count = kernel.opcodes.get
            yield [
                job.name,
                gpu,
                f"{kernel.threads}",
                f"{kernel.registers}",
                f"{kernel.spill_store_bytes} B",
                human_bytes(kernel.smem_bytes),
                f"{kernel.ctas_per_sm}",
                f"{kernel.waves:.3g}",
                f"{kernel.instructions}",
                f"{count('HGMMA', 0) + count('UTCHMMA', 0)}",
                f"{kernel.kinds.get('TMA', 0)}",
                f"{sum(count(name, 0) for name in BARRIERS)}",
                kernel.bound or "?",
                "?" if time_s is None else f"{time_s * 1e6:.4g} us",
                "" if took is None else f"{took * 1e6:.4g} us",
                "" if took is None or time_s is None else f"{time_s / took:.2f}",
            ]


def table(first: str, lines: list[list[str]]) -> str:
    return measured.markdown([[first, *COLUMNS], *lines])


_IN_THE_MACHINE = (
    "Seconds of a processor that the machine on a laptop takes for the course's solution, all cases of the check "
    f"together: the first time, and once more. Here: one of {os.cpu_count()} cores. Tracing is included, JAX's "
    "simulator is not."
)
_HOW_MEASURED = (
    "By `benchmarks/bench.py`: medians of normal inputs. Device: the device's own clock, by JAX's profiler. Wall: "
    "calls that were enqueued in a row, with their dispatch. Clock: of the SM, the median of the run. Driver, clock "
    "and date are missing where nobody wrote them down. See [docs/bench.md](../docs/bench.md)."
)


def how_far(lines: list[list[str]]) -> str:
    """How far the estimates are from what was measured."""
    ratios = sorted(float(line[-1]) for line in lines if line[-1])
    if not ratios:
        return ""
    median, within = statistics.median(ratios), sum(0.8 <= ratio <= 1.25 for ratio in ratios)
    return (
        f"Estimate over measured time: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median:.2f}; {within} of "
        f"{len(ratios)} lie between 0.8 and 1.25."
    )


def written(gpus: list[str]) -> str:
    names = ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    parts = [
        "# What the GPU compiler makes of kernels",
        f"Written by `uv run python benchmarks/gpu.py` ({versions}); no GPU was there. Registers: of a thread. Spills: "
        "bytes of a thread. HGMMA: instructions for the tensor cores; on the B200, UTCHMMA. TMA: those for copies. "
        f"Barriers: {', '.join(BARRIERS)}. The estimate and what bounds it: see `gpu_report`.",
    ]
    everything = {job.name: list(rows(job, gpus)) for job in jobs()}
    mine = {job.name for job in ours()}
    if far := how_far([line for lines in everything.values() for line in lines]):
        parts.append(
            "Measured: by `benchmarks/bench.py --kernels`; the conditions are in a table below. What the estimate "
            "takes from this GPU is what cuBLAS, the copy and the kernel that only reads reach; nothing is fitted to "
            "the others, but how loops are counted was settled on the multiply-adds. " + far
        )
    for title, names in (("JAX's own", everything.keys() - mine), ("One part of a GPU each", mine)):
        lines = [line for name in everything if name in names for line in everything[name]]
        parts += [f"## {title}", table("kernel", lines)]
    lines = [line for job in solutions() for line in rows(job, gpus)]
    parts += ["## Every solution, at the first shapes and blocks of its check", table("puzzle", lines)] if lines else []
    head = ["puzzle", "cases", "CTAs", "first time", "again"]
    parts += ["## The machine's seconds a puzzle", _IN_THE_MACHINE, measured.markdown([head, *in_the_machine()])]
    if lines := measured.table("gpu"):
        parts += ["## Measured, each row with its conditions", _HOW_MEASURED, lines]
    if MATMUL.exists():
        parts.append(matmul.tables(MATMUL))
    if ATTENTION.exists():
        parts.append(attention.table(ATTENTION))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100,h200,b200", help="which ones, commas between")
    asked = parser.parse_args()
    from pallas_puzzles.targets.gpu import compiler
    from pallas_puzzles.targets.gpu.chips import chips

    if reason := compiler.missing():
        raise SystemExit(reason)
    file = Path(__file__).with_suffix(".md")
    file.write_text(written([chip.name for chip in chips(asked.gpu)]))
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
