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
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.speed import conditions, puzzles, run
from pallas_puzzles.speed.meter import DeviceMeter
from pallas_puzzles.speed.results import Results, Row, read
from pallas_puzzles.speed.work import Size, Work, size

BOOK, OWN = "gpu_matmul", puzzles.SOLUTION
PRODUCT, LAYER, RAGGED, WAY, CHOICE = "matmul", "bias and GELU", "ragged dot", "the way there", "configurations"
WIDTHS = (1, 4, 8, 16)


def notebook() -> types.SimpleNamespace:
    """What the notebook defines, with the solutions in its holes."""
    last = next(book for book in curriculum.notebooks() if book.name == BOOK).puzzles[-1]
    return types.SimpleNamespace(**cases.laid(last, cases.solutions(last), {}, {}))


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
        "Puzzle 9": functools.partial(nb.clustered, **persistent),
    }
    return Work(WAY, lambda a, b: a @ b, [Size(each.args, {}, each.flops, None, each.title)], peers, "cuBLAS")


def works(quick: bool) -> Iterator[Work]:
    nb = notebook()
    products = dataclasses.replace(of_puzzle(11), name=PRODUCT)
    yield products
    yield layers(nb, products)
    yield dataclasses.replace(of_puzzle(10), name=RAGGED)
    yield way(nb, products, quick)
    yield from configurations(nb, products, quick)


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
        parts.append(_table([head, *lines]))
    for work in (WAY, CHOICE):
        shapes = [size for name, size in sizes if name == work]
        names = list(dict.fromkeys(row.who for size in shapes for row in sizes[work, size]))
        lines = [[name, *(_rate(sizes[work, size], name) for size in shapes)] for name in names]
        parts.append(_table([[work, *shapes], *lines]))
    return "\n\n".join(parts)


def _by_size(results: Results) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in results.rows:
        found[row.work, row.size].append(row)
    return found


def _compared(size: str, rows: list[Row], peers: list[str]) -> list[str]:
    """A line: the course's kernel, the fastest of each kind of peer, and how much faster the course's is."""
    ours = next(row for row in rows if row.who == OWN)
    assert ours.median_s is not None, ours.problem
    fastest = [min(r.median_s for r in rows if r.who.startswith(peer) and r.median_s) for peer in peers]
    ratios = [f"{seconds / ours.median_s:.2f}" for seconds in fastest]
    return [size, ours.dtype, *(f"{ours.flops / s / 1e12:.0f}" for s in (ours.median_s, *fastest)), *ratios]


def _rate(rows: list[Row], who: str) -> str:
    return next((f"{r.flops / r.median_s / 1e12:.0f}" for r in rows if r.who == who and r.median_s), "")


def _table(lines: list[list[str]]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200, help="after which nothing new is started")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    asked = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("JAX finds no GPU here. The compiler's estimates are in benchmarks/gpu.md.")
    asked.folder.mkdir(parents=True, exist_ok=True)
    begin, results = time.perf_counter(), Results()

    def in_time() -> Iterator[Work]:
        for work in works(asked.quick):
            if time.perf_counter() - begin > asked.seconds:
                results.note(f"{work.name} is left out: the {asked.seconds:.0f} seconds of this run were over.")
            else:
                yield work

    def saved(so_far: Results) -> None:
        so_far.save(asked.folder / "matmul.json")
        last = [row for row in so_far.rows if (row.work, row.size) == (so_far.rows[-1].work, so_far.rows[-1].size)]
        for row in last:
            rate = f"{row.flops / row.median_s / 1e12:6.1f} TFLOP/s" if row.median_s else row.problem
            print(f"{time.perf_counter() - begin:6.1f} s  {row.work}, {row.size}: {row.who}: {rate}", flush=True)

    results.conditions["driver"] = conditions.driver()
    results.note(conditions.others())
    with conditions.Clocks() as clocks:
        run.measure(in_time(), results, DeviceMeter(), saved=saved)
        results.conditions |= clocks.told()
    results.save(asked.folder / "matmul.json")
    print(results.to_csv())


if __name__ == "__main__":
    main()
