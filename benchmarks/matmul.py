"""The kernels of gpu_matmul.py beside cuBLAS, XLA and JAX's own, and their configurations: writes matmul.json.

    python benchmarks/matmul.py FOLDER [--seconds 200] [--quick]

Needs a Hopper GPU. Everything of one size takes turns; medians of the device's time, the L2 flushed before each call;
a kernel whose result differs from its peers' has no time. Nothing new is started after --seconds. benchmarks/gpu.py
makes the table in gpu.md of the file.
"""

import argparse
import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench
import jax
import jax.numpy as jnp
import measured
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_puzzles.course import cases
from pallas_puzzles.course.inputs import normal
from pallas_puzzles.lens import gpu
from pallas_puzzles.lens.gpu.timeline import in_l2
from pallas_puzzles.speed import puzzles
from pallas_puzzles.speed.results import Results, Row, read
from pallas_puzzles.speed.work import Size, Work, size

BOOK, OWN = "gpu_matmul", puzzles.SOLUTION
PRODUCT, LAYER, RAGGED, WAY, CHOICE = "matmul", "bias and GELU", "ragged dot", "the way there", "configurations"
ORDERS = "orders of Puzzle 3"
WIDTHS = (1, 4, 8, 16)
ONE_WAVE = (704, 1536, 8192)  # M, N, K: 132 tiles of Puzzle 3, one for each SM
SM_BYTES, SYSTEM_BYTES = 228 << 10, 1 << 10  # SMEM of an SM, and what the system takes of it for each CTA


def with_answer(hole: str, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """A notebook with another answer in a hole. make: the notebook -> the answer."""
    nb = measured.notebook(BOOK)
    nb.best.__globals__[hole] = make(nb)
    return nb


def copies_first(nb: Any) -> Callable[..., None]:
    """multiply_step of Puzzle 3 in the other order: the copies are started before it waits for its own tiles."""

    def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
        slot = jax.lax.rem(k, slots)
        plgpu.wgmma_wait(0)

        @pl.when(k + slots - 1 < steps)
        def _():
            nb.load_step(k + slots - 1, slots, a_part, b_part, a_smem, b_smem, loaded)

        plgpu.barrier_wait(loaded.at[slot])
        plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])

    return multiply_step


def a_step_later(nb: Any) -> Callable[..., None]:
    """consume_tile of Puzzle 8 that gives each slot back one step later, as Puzzle 6 does."""

    def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
        @pl.loop(0, steps)
        def _(k):
            step = n * steps + k
            slot = jax.lax.rem(step, slots)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, a_smem.at[slot, rows], b_smem.at[slot])
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                plgpu.barrier_arrive(empty.at[jax.lax.rem(step - 1, slots)])

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[jax.lax.rem(n * steps + steps - 1, slots)])

    return consume_tile


def of_puzzle(number: int) -> Work:
    """A puzzle's solution at all sizes, beside its peers."""
    name = f"{BOOK}/{number}"
    return puzzles.work_of(cases.official(name), name, every_size=True, own=OWN)


def layers(nb: Any, products: Work) -> Work:
    """gelu(a @ b + bias), fused, and as XLA does it: in float32 between the two, and in bfloat16."""

    def xla(a: Any, b: Any, bias: Any) -> Any:
        return jax.nn.gelu(jnp.dot(a, b, preferred_element_type=jnp.float32) + bias).astype(a.dtype)

    def narrow(a: Any, b: Any, bias: Any) -> Any:
        return jax.nn.gelu(a @ b + bias.astype(a.dtype))

    sizes = [with_bias(each) for each in products.sizes]
    return Work(LAYER, nb.best, sizes, {"XLA, in bfloat16": narrow, "XLA": xla}, OWN, "gpu")


def with_bias(each: Size) -> Size:
    bias = jax.ShapeDtypeStruct((each.args[1].shape[1],), jnp.float32)
    return size(*each.args, bias, flops=each.flops, name=each.title, **each.blocks)


def configurations(nb: Any, products: Work, quick: bool) -> Iterator[Work]:
    """Every tile and cluster at each size, with as many slots as fit; then the order of the tiles."""
    for each in products.sizes:
        M, N = each.args[0].shape[0], each.args[1].shape[1]
        peers = {}
        for bm, bn, along in nb.plans(M, N)[: 1 if quick else None]:
            blocks = {"bm": bm, "bn": bn, "slots": nb.slots_that_fit(bm, bn), "along": along, "width": 4, "ctas": 132}
            peers[f"{bm} x {bn}, {along}"] = functools.partial(nb.clustered, **blocks)
        for width in WIDTHS[: 1 if quick else None]:
            blocks = {"slots": 4, "along": "m", "width": width, "ctas": 132}
            peers[f"width {width}"] = functools.partial(nb.clustered, **blocks)
        yield Work(CHOICE, lambda a, b: a @ b, [Size(each.args, {}, each.flops, None, each.title)], peers, "cuBLAS")


def way(nb: Any, products: Work, quick: bool) -> Work:
    """The notebook's kernels, one after the other."""
    each = products.sizes[0 if quick else -1]
    persistent = {"slots": 4, "width": 8, "ctas": 132}
    peers = {
        "Puzzle 3, 2 slots": functools.partial(nb.k_loop, slots=2),
        "Puzzle 5, 2 slots": functools.partial(nb.specialised, slots=2),
        "Puzzle 5, 4 slots": functools.partial(nb.specialised, slots=4),
        "Puzzle 6, 2 slots": functools.partial(nb.pipelined, slots=2),
        "Puzzle 6, 4 slots": functools.partial(nb.pipelined, slots=4),
        "Puzzle 8": functools.partial(nb.persistent, **persistent),
        "Puzzle 8, slots a step later": functools.partial(
            with_answer("consume_tile", a_step_later).persistent, **persistent
        ),
        "Puzzle 9": functools.partial(nb.clustered, **persistent),
    }
    return Work(WAY, lambda a, b: a @ b, [Size(each.args, {}, each.flops, None, each.title)], peers, "cuBLAS")


def both_orders() -> dict[str, Any]:
    """The notebook by the order in which Puzzle 3 waits: for its own tiles first, or starting copies first."""
    return {"tiles first": measured.notebook(BOOK), "copies first": with_answer("multiply_step", copies_first)}


def orders(products: Work) -> Iterator[Work]:
    """Both orders of Puzzle 3: where each SM has one CTA and the arrays fit into L2; and where it has several."""
    books = both_orders()
    M, N, K = ONE_WAVE
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N)))
    wave, big = Size((a, b), {}, 2 * M * N * K, None, f"{M} x {N} x {K}"), products.sizes[-1]
    calls = {f"{o}, {n} slots": functools.partial(nb.k_loop, slots=n) for n in (2, 3, 4) for o, nb in books.items()}
    yield _in_turns(ORDERS, wave, calls)
    rooms = {
        f"{order}, CTAs an SM: {n}": functools.partial(roomy, nb, n)
        for n in (1, 2, 3, 4)
        for order, nb in books.items()
    }
    yield _in_turns(ORDERS, big, rooms)


def roomy(nb: Any, ctas: int, a: Any, b: Any, *, slots: int = 2) -> Any:
    """k_loop of Puzzle 3 with so much more SMEM that an SM has room for so many CTAs."""
    (M, _), N, bn = a.shape, b.shape[1], 128
    tiles = [plgpu.SMEM((slots, *tile), a.dtype, transforms=nb.SWIZZLED) for tile in ((64, 64), (64, bn))]
    more = SM_BYTES // ctas - SYSTEM_BYTES - slots * (64 + bn) * 64 * a.dtype.itemsize - 2048  # for barriers, alignment

    def kernel(a: Any, b: Any, o: Any, a_smem: Any, b_smem: Any, loaded: Any, room: Any) -> None:
        nb.k_loop_kernel(a, b, o, a_smem, b_smem, loaded, bn=bn, slots=slots)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // 64, N // bn),
        grid_names=("i", "j"),
        scratch_types=[*tiles, plgpu.Barrier(num_barriers=slots, num_arrivals=2), plgpu.SMEM((more,), jnp.int8)],
    )(a, b)


def _in_turns(name: str, size: Size, calls: dict[str, Any]) -> Work:
    """The first one is what the others' results are compared with."""
    (own, fn), *rest = calls.items()
    return Work(name, fn, [Size(size.args, {}, size.flops, None, size.title)], dict(rest), own)


def works(quick: bool) -> Iterator[Work]:
    nb = measured.notebook(BOOK)
    products = dataclasses.replace(of_puzzle(11), name=PRODUCT)
    yield products
    yield layers(nb, products)
    yield dataclasses.replace(of_puzzle(10), name=RAGGED)
    yield way(nb, products, quick)
    yield from configurations(nb, products, quick)
    yield from orders(products)


# --- the tables in gpu.md --------------------------------------------------------------------------------------------


def tables(file: Path) -> str:
    """What was measured, as Markdown."""
    results = read(file)
    c = results.conditions
    ran = (
        f"Written by `uv run python benchmarks/gpu.py` of {file.parent.name}/{file.name}, which "
        f"`python benchmarks/matmul.py` wrote on an {c['device']} (jax {c['jax']}, driver {c['driver']}, "
        f"{c['date'][:10]}). TFLOP/s of the median of up to 60 calls each, on the device's clock, with the L2 flushed "
        "before each call. The columns of a line took turns. Between lines the chip's clock differs: it was "
        f"{c['sm_clock_mhz']:.0f} MHz in the median and {c['lowest_sm_clock_mhz']:.0f} MHz at the lowest. Inputs are "
        "normal, bfloat16. JAX's: the faster of its kernel without clusters and with."
    )
    sizes = _by_size(results)
    parts = ["## The kernels of gpu_matmul.py, measured", ran]
    for work, peers in ((PRODUCT, ["XLA", "JAX's"]), (LAYER, ["XLA"]), (RAGGED, ["XLA", "JAX's"])):
        lines = [_compared(size, rows, peers) for (name, size), rows in sizes.items() if name == work]
        heads = ["cuBLAS" if work == PRODUCT and peer == "XLA" else peer for peer in peers]
        head = [work, "dtype", "the course's", *heads, *(f"over {peer}" for peer in heads)]
        parts.append(measured.markdown([head, *lines]))
    parts.append(_IN_THE_WAY)
    for work in (WAY, CHOICE, ORDERS):
        shapes = [size for name, size in sizes if name == work]
        names = list(dict.fromkeys(row.who for size in shapes for row in sizes[work, size]))
        lines = [[name, *(_rate(sizes[work, size], name) for size in shapes)] for name in names]
        parts += [measured.markdown([[work, *shapes], *lines])] if lines else []
    if wave := next((rows for (name, size), rows in sizes.items() if name == ORDERS and size.startswith("704")), []):
        parts += [
            _BESIDE,
            measured.markdown([["one CTA an SM", "the machine's cycles", "measured", "clock"], *beside(wave)]),
        ]
    return "\n\n".join(parts)


_IN_THE_WAY = (
    "4096 x 4096 x 1024 is the shape where cuBLAS is ahead. A tile has 16 steps there, and then an end of about 1,600 "
    "cycles, a tenth of them, in which the tensor cores wait. A variant that keeps a finished tile in registers, as "
    "bfloat16, and stores it during the first steps of the next one was 1% faster there and 4% slower at both other "
    "shapes: ptxas spills 52 bytes, and the loop fetches its descriptors from registers (R2UR) at each step. Three "
    "slots for the tiles and four for the result were 2% slower."
)
_BESIDE = (
    "The machine for GPU kernels beside these times. It gives each CTA an SM of its own, as this chip does here, and "
    "the arrays fit into L2. If it were right, each line would have the same clock; the chip's is at most 1.98 GHz. "
    "What the machine leaves out: copies take longer the more of them are on their way. Where three or four CTAs share "
    "an SM (the table above), there are so many that the other order is the faster one."
)


def beside(wave: list[Row]) -> Iterator[list[str]]:
    """Each measured order of Puzzle 3, and one CTA of it in the machine, with copies out of L2."""
    books = both_orders()
    args = [normal(shape, "bfloat16").draw(np.random.default_rng(0)) for shape in ((64, 8192), (8192, 128))]
    for row in wave:
        order, slots = row.who.split(", ")
        call = functools.partial(books[order].k_loop, slots=int(slots.split()[0]))
        with in_l2():
            cycles = gpu.run(call, *args, chip="h200").counts.cycles
        if row.median_s is not None:
            us = row.median_s * 1e6
            yield [row.who, f"{cycles:,.0f}", f"{us:.1f} us", f"{cycles / us / 1000:.2f} GHz"]


def _by_size(results: Results) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in results.rows:
        found[row.work, row.size].append(row)
    return found


def _compared(size: str, rows: list[Row], peers: list[str]) -> list[str]:
    """A line: the course's kernel, the fastest of each kind of peer, and how much faster the course's is."""
    ours = next(row for row in rows if row.who == OWN)
    assert ours.median_s is not None, ours.problem
    kinds = [("XLA", "cuBLAS") if peer == "XLA" else peer for peer in peers]
    fastest = [min(r.median_s for r in rows if r.who.startswith(kind) and r.median_s) for kind in kinds]
    ratios = [f"{seconds / ours.median_s:.2f}" for seconds in fastest]
    return [size, ours.dtype, *(f"{ours.flops / s / 1e12:.0f}" for s in (ours.median_s, *fastest)), *ratios]


def _rate(rows: list[Row], who: str) -> str:
    return next((f"{r.flops / r.median_s / 1e12:.0f}" for r in rows if r.who == who and r.median_s), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200, help="after which nothing new is started")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    asked = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("JAX finds no GPU here. The compiler's estimates are in benchmarks/gpu.md.")
    asked.folder.mkdir(parents=True, exist_ok=True)
    bench.once("matmul", asked.folder, works(asked.quick), asked.seconds)


if __name__ == "__main__":
    main()
