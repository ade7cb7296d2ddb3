"""What was measured on real chips, as Markdown: the results of bench.py that lie in folders beside this file.

And what several of the benchmarks beside it need.
"""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.speed.results import Results, Row, read
from pallas_puzzles.speed.show import cells_of
from pallas_puzzles.view.roofline import human_time

HERE = Path(__file__).parent
KERNELS, PUZZLES = "kernels.json", "bench.json"  # of bench.py: with --kernels, and without
COLUMNS = ["what", "size", "who", "time", "spread", "light", "rate", "calls", "L2", "clock", "device", "jax", "driver"]
COLUMNS += ["date"]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def notebook(name: str) -> types.SimpleNamespace:
    """What a notebook defines, with the solutions in its holes."""
    last = next(book for book in curriculum.notebooks() if book.name == name).puzzles[-1]
    return types.SimpleNamespace(**cases.laid(last, cases.solutions(last), {}, {}))


def results(platform: str, name: str) -> Iterator[Results]:
    """Of "gpu" or "tpu": a file for each device."""
    for file in sorted(HERE.glob(f"*/{name}")):
        found = read(file)
        if found.conditions.get("platform") == platform:
            yield found


def seconds(chip: str, row_of: str) -> float | None:
    """The median time of a kernel of `bench.py --kernels` on a GPU: "h200"."""
    for found in results("gpu", KERNELS):
        for row in found.rows:
            if row.work == row_of and chip in row.chip.lower():
                return row.median_s
    return None


def table(platform: str, names: tuple[str, ...] = (PUZZLES, KERNELS)) -> str:
    """Every row with its conditions; "" where nothing was measured."""
    lines = [line for name in names for found in results(platform, name) for line in _lines(found)]
    if not lines:
        return ""
    return markdown([COLUMNS, *lines])


def markdown(lines: list[list[str]]) -> str:
    """A table. lines: of cells; the first one is the head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rest])


def _lines(found: Results) -> Iterator[list[str]]:
    for row in found.rows:
        if row.median_s is not None:
            yield [row.work, *_figures(row), *_conditions(row, found)]


def _figures(row: Row) -> list[str]:
    size, who, _, spread, light, _, rate = cells_of(row, [row])
    return [size, who, human_time(row.median_s or 0), spread, light, rate]


def _conditions(row: Row, found: Results) -> list[str]:
    told = found.conditions
    clock = f"{told['sm_clock_mhz']:.0f} MHz" if "sm_clock_mhz" in told else ""
    calls = f"{row.count} sets of calls, wall" if row.how.startswith("wall") else f"{row.count}, device"
    flushed = "flushed" if row.l2_flushed else "as it is"
    versions = [str(told.get(name, "")) for name in ("jax", "driver")]
    return [calls, flushed, clock, row.chip, *versions, str(told.get("date", ""))[:10]]
