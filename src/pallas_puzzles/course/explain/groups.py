"""Groups of rows, tiles of rows, and visits: the pairs of a tile and a group in it."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...lens.machine import listed
from ...view.ruler import ruler

NOBODY = -1
Visit = tuple[int, int]  # a tile, and a group in it or NOBODY
Explained = tuple[str, str]  # in words; a picture


def owners(group_sizes: Any, num_rows: int) -> np.ndarray:
    """The group of each row."""
    owned = np.repeat(np.arange(len(group_sizes)), group_sizes)[:num_rows]
    return np.concatenate([owned, np.full(num_rows - len(owned), NOBODY)])


def visits_of(group_sizes: Any, num_rows: int, bm: int) -> list[Visit]:
    """Every pair of a tile and a group with rows in it, in order; a tile of nobody's once."""
    owner, visits = owners(group_sizes, num_rows).tolist(), []
    for tile in range(-(-num_rows // bm)):
        inside = dict.fromkeys(owner[tile * bm : (tile + 1) * bm])
        visits += [(tile, group) for group in inside if group != NOBODY] or [(tile, NOBODY)]
    return visits


def draw_groups(group_sizes: Any, *, num_rows: int | None = None, bm: int | None = None) -> str:
    """The groups, the rows that are nobody's, and the tiles, to scale."""
    ends = np.cumsum(group_sizes).astype(int)
    size, last = int(num_rows or ends[-1]), int(ends[-1])
    lanes = {"group": [(int(e - n), int(e), str(g)) for g, (n, e) in enumerate(zip(group_sizes, ends, strict=True))]}
    if last < size:
        lanes["nobody"] = [(last, size, "zeros")]
    if bm:
        lanes["tile"] = [(row, min(row + bm, size), str(row // bm)) for row in range(0, size, bm)]
    return ruler(size, lanes, ticks=[0, *ends.tolist(), size])


def numbered(word: str, numbers: Iterable[int]) -> str:
    """'tile 3', 'tiles 1 and 2', 'tiles 1, 4 and 5'; of many in a row, 'tiles 1 to 7'."""
    each = list(numbers)
    if len(each) > 3 and each == list(range(each[0], each[-1] + 1)):
        return f"{word}s {each[0]} to {each[-1]}"
    return f"{word}{'' if len(each) == 1 else 's'} {listed([str(n) for n in each])}"


def rows_named(first: int, end: int) -> str:
    return f"row {first}" if end == first + 1 else f"rows {first} to {end - 1}"


def rows_of(group: int, group_sizes: Any, tile: int | None = None, bm: int = 1) -> tuple[int, int]:
    """The rows of a group, or those of them that lie in a tile: first, end."""
    first = int(np.sum(group_sizes[:group]))
    end = first + int(group_sizes[group])
    return (first, end) if tile is None else (max(first, tile * bm), min(end, (tile + 1) * bm))


def whose(tile: int, group: int, group_sizes: Any, bm: int) -> str:
    if group == NOBODY:
        return f"tile {tile}, which is nobody's"
    return f"tile {tile} for group {group} ({rows_named(*rows_of(group, group_sizes, tile, bm))})"


def first_wrong(got: np.ndarray, want: np.ndarray) -> int:
    return int(np.flatnonzero(got != want)[0])


def close(got: np.ndarray, want: np.ndarray, scale: Any = None) -> bool:
    size = float(np.sqrt(np.mean(np.square(np.asarray(want if scale is None else scale, np.float32))))) or 1.0
    return bool(np.allclose(got, want, rtol=3e-2, atol=3e-2 * size))
