"""How far the course's GPU kernels, JAX's own and the libraries are from the speed of light, on this machine's GPU.

    uv run python benchmarks/bench.py FOLDER [--quick] [--seconds 250] [--read] [--kernels]

Needs a Hopper or Blackwell GPU, or a TPU, where it measures the solutions of the notebooks for TPUs. Measures all
twice, and compares the two: what differs is noise. Writes bench.json and bench.csv of the first run, the same of the
second, again.json and again.csv, and bench.md and bench.svg: the table and the picture. --read measures nothing, and
writes these two from the files that are there. --kernels times the kernels of gpu.py instead, once: kernels.json.
What lies in folders beside this file, gpu.py and tpu.py write into gpu.md and tpu.md.
Nothing is lost when one of the kernels fails: it has a line that says so. Each run stops after --seconds.
"""

import argparse
import functools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measured import shape

from pallas_puzzles.course import curriculum
from pallas_puzzles.speed import conditions, puzzles, run
from pallas_puzzles.speed.compare import compared
from pallas_puzzles.speed.meter import DeviceMeter
from pallas_puzzles.speed.results import Results, read
from pallas_puzzles.speed.show import text
from pallas_puzzles.speed.work import Work, size
from pallas_puzzles.view.roofline import human_time


def libraries(quick: bool) -> Iterator[Work]:
    """What a GPU gives to a copy, to cuBLAS and cuDNN, and to the kernels that JAX itself has."""
    copies = [size(shape(2**n, dtype=jnp.float32)) for n in ((24,) if quick else (22, 24, 26, 28))]
    yield Work("copy", lambda x: x + 1, copies, {}, "x + 1, by XLA", "gpu")

    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

    along = hopper.MatmulDimension.M
    tiles = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}
    config = hopper.TuningConfig(**tiles, grid_tile_width=8, grid_minor_dim=along, cluster_dimension=along)
    sizes = [size(shape(n, n), shape(n, n), flops=2 * n**3) for n in ((2048,) if quick else (2048, 4096, 8192))]
    ours = functools.partial(lambda a, b, config: hopper.matmul(a, b, None, config), config=config)
    yield Work("matmul", ours, sizes, {"cuBLAS": lambda a, b: a @ b}, "JAX's Hopper", "gpu")

    for causal in (False, True):
        yield attention(causal, (1024,) if quick else (1024, 4096, 8192))


def attention(causal: bool, lengths: tuple[int, ...]) -> Work:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    config = mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal)
    b, h, d = 4, 16, 128
    sizes = [
        size(*[shape(b, s, h, d, dtype=jnp.float16)] * 3, flops=4 * b * h * s * s * d / (2 if causal else 1))
        for s in lengths
    ]

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        # JAX's kernel does not scale. Its program for XLA would keep all scores, which no GPU holds at 8192.
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", scale=1.0, is_causal=causal)

    ours = functools.partial(mgpu.attention, config=config)
    return Work("attention, causal" if causal else "attention", ours, sizes, {"cuDNN": cudnn}, "JAX's", "gpu")


def everything(quick: bool) -> list[Work]:
    here = jax.default_backend()
    books = [book.name for book in curriculum.notebooks() if book.accelerator == here]
    works = [work for book in books for work in puzzles.solutions(book, every_size=not quick)]
    return [*works, *(libraries(quick) if here == "gpu" else ())]


def kernels(quick: bool) -> list[Work]:
    """Those that gpu.py has estimates of."""
    import gpu

    here = conditions.device_chip()
    name = here.name if here else ""
    jobs = [job for job in gpu.jobs() if name in job.chips][: 2 if quick else None]
    return [
        Work(j.name, j.fn, [size(*j.args, flops=j.flops, hbm_bytes=j.nbytes or None)], {}, "kernel", "gpu")
        for j in jobs
    ]


def once(name: str, folder: Path, works: Iterable[Work], seconds: float) -> Results:
    """One run, saved as it goes."""
    begin = time.perf_counter()
    results = Results()

    def in_time() -> Iterator[Work]:
        for work in works:
            if time.perf_counter() - begin < seconds:
                yield work
            else:
                results.note(f"{work.name} is left out: the {seconds:.0f} seconds of this run were over.")

    def saved(so_far: Results) -> None:
        so_far.save(folder / f"{name}.json")
        last = so_far.rows[-1]
        print(f"{time.perf_counter() - begin:6.1f} s  {last.work}, {last.size} {last.dtype}", flush=True)
        for row in so_far.rows:
            if (row.work, row.size) == (last.work, last.size):
                print(f"          {row.who}: {human_time(row.median_s) if row.median_s else row.problem}", flush=True)

    with conditions.watched(results):
        run.measure(in_time(), results, DeviceMeter(), saved=saved)
    for kind in ("json", "csv"):
        results.save(folder / f"{name}.{kind}")
    return results


def written(folder: Path) -> str:
    """The table of the first run, and what the second says."""
    first, second = (read(folder / f"{name}.json") for name in ("bench", "again"))
    first.save(folder / "bench.svg")
    clocks = first.conditions
    ran = (
        f"The SM's clock was {clocks['sm_clock_mhz']:.0f} MHz in the median, {clocks['lowest_sm_clock_mhz']:.0f} MHz "
        f"at the lowest; up to {clocks['temperature_c']:.0f} C. "
        if "sm_clock_mhz" in clocks
        else ""
    )
    parts = [
        f"# How far from the speed of light: {clocks['device']}",
        f"Written by `uv run python benchmarks/bench.py` on a machine with that GPU. {ran}How to read the table: "
        "[docs/bench.md](../../docs/bench.md). The picture of it: [bench.svg](bench.svg).",
        f"```\n{text(first)}\n```",
        "## The same again, against the first run",
        f"```\n{compared(second, first)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="the largest size of each puzzle, small ones of all else")
    parser.add_argument("--seconds", type=float, default=250, help="after which a run starts nothing new")
    parser.add_argument("--kernels", action="store_true", help="the kernels of gpu.py, once")
    parser.add_argument("--read", action="store_true", help="measure nothing: write the table of what is in FOLDER")
    asked = parser.parse_args()
    if not asked.read:
        if jax.default_backend() == "cpu":
            raise SystemExit("JAX finds no GPU or TPU here. Estimates are in benchmarks/gpu.md and benchmarks/tpu.md.")
        asked.folder.mkdir(parents=True, exist_ok=True)
        if asked.kernels:
            print(text(once("kernels", asked.folder, kernels(asked.quick), asked.seconds)))
            return
        for name in ("bench", "again"):
            once(name, asked.folder, everything(asked.quick), asked.seconds)
    words = written(asked.folder)
    (asked.folder / "bench.md").write_text(words)
    print(words)


if __name__ == "__main__":
    main()
