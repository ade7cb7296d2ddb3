"""Wrong lists of integers about groups: offsets, counts, visits."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...lens.machine import spans
from .groups import (
    NOBODY,
    Explained,
    Visit,
    draw_groups,
    first_wrong,
    numbered,
    rows_named,
    rows_of,
    visits_of,
    whose,
)


def offsets(group_sizes: Any, *, got: Any, want: Any, **_: Any) -> Explained:
    """Offsets of groups."""
    return _about_offsets(np.asarray(group_sizes), got, want), draw_groups(group_sizes)


def _about_offsets(sizes: np.ndarray, got: np.ndarray, want: np.ndarray) -> str:
    G = len(sizes)
    if got.shape == (G,) and np.array_equal(got, want[1:]):
        return (
            "These are the ends. Group 0 begins at row 0: without that in front, group g would get the rows of "
            f"group g + 1, and group {G - 1} none."
        )
    if got.shape == (G,) and np.array_equal(got, want[:-1]):
        return (
            f"These are the beginnings. Group {G - 1} has an end, too: a kernel asks for offsets[g + 1] of every group."
        )
    if got.shape != want.shape:
        return f"{G} groups have {G} beginnings, and the last one has an end: {G + 1} numbers."
    n = first_wrong(got, want)
    if n == 0:
        return f"Group 0 begins at row 0. With {got[0]}, its first {got[0]} rows would be skipped."
    size = int(got[n] - got[n - 1])
    before = f"behind the sizes before it, {' + '.join(map(str, sizes[:n].tolist()))}" if n < 6 else "behind all before"
    text = f"Group {n - 1} ends at row {want[n]}, {before}. With {got[n]} it would have {size} rows instead of "
    text += f"{sizes[n - 1]}"
    if n == G and got[n] > want[n]:
        return f"{text}: the {got[n] - want[n]} rows that are nobody's would be multiplied as its own."
    return f"{text}{'' if n == G else ', and every group behind it would begin at the wrong row'}."


def tiles(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """How many tiles each group has rows in."""
    sizes = np.asarray(group_sizes)
    return _about_tiles(sizes, got, want, bm), draw_groups(sizes, num_rows=num_rows, bm=bm)


def _about_tiles(sizes: np.ndarray, got: np.ndarray, want: np.ndarray, bm: int) -> str:
    if got.shape != want.shape:
        return f"One number for each of the {len(sizes)} groups."
    g = first_wrong(got, want)
    first, end = rows_of(g, sizes)
    if not sizes[g]:
        where = f" Row {first}, where it would begin, lies inside a tile: rounded down and up it differs by one."
        where = where if first % bm else ""
        return (
            f"Group {g} has no rows, so no tile has any of them.{where} With {got[g]}, a step for it multiplies "
            f"{bm} rows of others and keeps none; and every later visit moves on by {got[g]}."
        )
    head = f"Group {g} has {rows_named(first, end)}: {numbered('tile', range(first // bm, (end - 1) // bm + 1))}. "
    if np.array_equal(got, -(-sizes // bm)):
        return (
            f"{head}{got[g]} is ceil({sizes[g]} / {bm}), from its size alone: a group that begins inside a tile can "
            f"touch one more, and its rows from {(first // bm + int(got[g])) * bm} on would never be computed."
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    if np.array_equal(got, np.where(sizes > 0, offsets[1:] // bm - offsets[:-1] // bm, 0)):
        head = f"{head}Its end is rounded down, and the tile that it ends in is lost: round up. "
    elif np.array_equal(got, want - (sizes > 0)):
        head = f"{head}From tile a to tile b, both included, there are b - a + 1. "
    if got[g] < want[g]:
        lost = (first // bm + int(got[g])) * bm if got[g] > 0 else first
        return f"{head}With {got[g]}, its {rows_named(max(lost, first), end)} would never be computed."
    why = f"Its end, {end}, is the first row of tile {end // bm}, not a row of its own. " if end % bm == 0 else ""
    return f"{head}{why}With {got[g]}, one step more multiplies {bm} rows, none of which is its own."


def group_ids(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """The group of every visit."""
    sizes = np.asarray(group_sizes)
    words = _about_length(sizes, got, want, num_rows, bm) or _about_group_ids(sizes, got, want, num_rows, bm)
    return words, draw_groups(sizes, num_rows=num_rows, bm=bm)


def _about_length(sizes: np.ndarray, got: np.ndarray, want: np.ndarray, num_rows: int, bm: int) -> str:
    """What to say of a list of visits that has another length than the most visits that there can be."""
    if got.shape == want.shape:
        return ""
    G, T, n = len(sizes), -(-num_rows // bm), got.shape[0] if got.ndim == 1 else 0
    most = T + G - 1
    each = (
        f"{num_rows} rows in tiles of {bm} are {T} tiles"
        f"{f', the last of {num_rows % bm} rows' if num_rows % bm else ''}; "
        f"{G - 1} of {G} groups can begin inside one: {most} visits at most. "
    )
    if num_rows % bm and n == num_rows // bm + G - 1:
        return f"{each}Yours leaves out the tile that is not whole: round up, pl.cdiv(num_rows, bm)."
    if n == T + G:
        return f"{each}Group 0 begins at row 0, the first of tile 0, and never adds one: yours has a step too many."
    if n in (1024 // 128 + G - 1, -(-num_rows // 128) + G - 1, -(-1024 // bm) + G - 1) and n != T:
        return f"{each}Yours is that of other sizes: use num_rows={num_rows} and bm={bm}, as they are passed on."
    if n == T:
        return f"{each}With {n}, one for each tile, up to {G - 1} visits are cut off, and their rows never computed."
    if n < most:
        return f"{each}With {n}, up to {most - n} visits are cut off, and their rows never computed."
    return f"{each}With {n}, {n - most} steps more would multiply {bm} rows each, and nobody needs them."


def _about_group_ids(
    sizes: np.ndarray, got: np.ndarray, want: np.ndarray, num_rows: int, bm: int, every: bool = False
) -> str:
    G, n = len(sizes), first_wrong(got, want)
    real = [v for v in visits_of(sizes, num_rows, bm) if v[1] != NOBODY]
    if not 0 <= got[n] < G:
        return f"Visit {n} is said to be for group {got[n]}, and there are groups 0 to {G - 1}: no such weights."
    if every or n >= len(real):
        behind = "" if every else "Behind the last visit that a group needs, the last group goes on: "
        return f"{behind}visit {n} is group {want[n]}'s, not {got[n]}'s." if behind else ""
    tile, group = real[n]
    first, end = rows_of(group, sizes, tile, bm)
    again = sum(1 for t, g in real[:n] if g == group)
    nth = "" if not again else f" It has been in {again} tile{'s' if again > 1 else ''} before, and goes on here."
    return (
        f"Visit {n} is tile {tile}, for {rows_named(first, end)}, and they are group {group}'s.{nth} With {got[n]}, "
        f"they would never meet w[{group}]."
    )


def tile_visits(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """How often each tile is visited."""
    sizes = np.asarray(group_sizes)
    return _about_visits(sizes, got, want, num_rows, bm), draw_groups(sizes, num_rows=num_rows, bm=bm)


def _about_visits(sizes: np.ndarray, got: np.ndarray, want: np.ndarray, num_rows: int, bm: int) -> str:
    T = -(-num_rows // bm)
    if got.shape != want.shape:
        rest = f", the last with {num_rows % bm} of them" if num_rows % bm else ""
        return f"One number for each tile: {num_rows} rows in tiles of {bm} are {T} tiles{rest}."
    t = first_wrong(got, want)
    inside = [g for tile, g in visits_of(sizes, num_rows, bm) if tile == t and g != NOBODY]
    starts = np.cumsum(sizes) - sizes
    begin = [g for g in range(len(sizes)) if sizes[g] and starts[g] // bm == t and starts[g] % bm]
    empty = [g for g in range(len(sizes)) if not sizes[g] and starts[g] // bm == t]
    last = min((t + 1) * bm, num_rows)
    has = "has" if len(inside) == 1 else "have"
    head = f"Tile {t}, {rows_named(t * bm, last)}: {numbered('group', inside)} {has} rows in it. "
    head = head if inside else f"Tile {t} is nobody's. "
    if np.array_equal(got, want - 1):
        never = np.flatnonzero(got == 0).tolist()
        unwritten = f" Tiles {spans(never)}, where no group begins, get 0 visits: their rows come back as garbage."
        start = "A tile is visited once before anybody begins inside it: the count starts from 1, not from 0."
        return f"{head}{start}{unwritten if never else ''}"
    if got[t] < want[t] and not inside:
        return (
            f"{head}Somebody has to write zeros there: without a visit its {last - t * bm} rows come back as garbage."
        )
    if got[t] < want[t]:
        lost = inside[max(int(got[t]), 0) :]
        together = f"{numbered('Group', begin)} all begin inside it, at one index: .at[].add adds each of them, where "
        together += ".set keeps one. "
        together = together if len(begin) > 1 and got[t] == 2 else ""
        return f"{head}{together}With {got[t]}, the rows of {numbered('group', lost)} here are not computed."
    why = ""
    if empty and got[t] - want[t] <= len(empty):
        why = f"{numbered('Group', empty)} would begin here, but with no rows there is nothing to add. "
    elif any(sizes[g] and starts[g] == t * bm for g in range(len(sizes))):
        why = f"A group that begins at row {t * bm}, the tile's first, shares it with nobody, and adds nothing. "
    more = int(got[t] - want[t])
    times = "once more" if more == 1 else f"{more} times more"
    return f"{head}{why}With {got[t]}, it is multiplied {times}, {bm * more} rows for nothing."


def metadata(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """Offsets, the groups and the tiles of all visits, and how many visits there are."""
    sizes = np.asarray(group_sizes)
    words = _about_metadata(sizes, got, want, num_rows, bm)
    return words, draw_groups(sizes, num_rows=num_rows, bm=bm)


def tile_ids(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """The tile of every visit."""
    sizes = np.asarray(group_sizes)
    visits = visits_of(sizes, num_rows, bm)
    groups = [g for _, g in visits]
    if got.shape != want.shape:
        words = _about_length(sizes, got, want, num_rows, bm)
    else:
        words = _about_tile_ids(sizes, got, want, groups, visits, num_rows, bm)
    return words, draw_groups(sizes, num_rows=num_rows, bm=bm)


def _about_metadata(sizes: np.ndarray, got: Any, want: Any, num_rows: int, bm: int) -> str:
    visits = visits_of(sizes, num_rows, bm)
    if np.shape(got.num_tiles):
        return "How many visits there are is one number, of shape ()."
    if got.offsets.shape != want.offsets.shape or (got.offsets != want.offsets).any():
        return _about_offsets(sizes, got.offsets, want.offsets)
    for mine, right in ((got.group_ids, want.group_ids), (got.m_tile_ids, want.m_tile_ids)):
        if mine.shape != right.shape:
            return _about_length(sizes, mine, right, num_rows, bm)
    if np.array_equal(got.group_ids, want.m_tile_ids) and (got.group_ids != want.group_ids).any():
        return "These are the tiles: group_ids and m_tile_ids have changed places."
    if (got.group_ids != want.group_ids).any():
        return _about_group_ids(sizes, got.group_ids, want.group_ids, num_rows, bm)
    if (got.m_tile_ids != want.m_tile_ids).any():
        return _about_tile_ids(sizes, got.m_tile_ids, want.m_tile_ids, want.group_ids, visits, num_rows, bm)
    return _about_num_tiles(sizes, got, want, visits, num_rows, bm)


def _about_tile_ids(
    sizes: np.ndarray, got: np.ndarray, want: np.ndarray, groups: Any, visits: Sequence[Visit], num_rows: int, bm: int
) -> str:
    n, T = first_wrong(got, want), -(-num_rows // bm)
    mine = int(got[n])
    if n >= len(visits):
        there = "" if mine < T else f" Tiles end with {T - 1}: an index map would point beyond the array."
        return f"Behind the last visit the last tile, {T - 1}, goes on to the end of the list.{there}"
    if np.array_equal(got[: len(visits)], groups[: len(visits)]):
        return "These are the groups once more: repeat the numbers of the tiles, each as often as it is visited."
    tile, group = visits[n]
    text = f"Visit {n} is {whose(tile, group, sizes, bm)}. With tile {mine}, "
    if group == NOBODY:
        return f"{text}the {min(bm, num_rows - tile * bm)} rows of tile {tile} come back as garbage."
    if mine == n and not (got[:n] != np.arange(n)).any():
        return f"{text}its number, a tile moves on at every visit; a tile with two groups stays for two."
    return f"{text}w[{group}] would multiply rows that are not group {group}'s, and its own would be left out."


def _about_num_tiles(sizes: np.ndarray, got: Any, want: Any, visits: Sequence[Visit], num_rows: int, bm: int) -> str:
    nobodys, mine, right = [t for t, g in visits if g == NOBODY], int(got.num_tiles), int(want.num_tiles)
    if mine == right - len(nobodys) and nobodys:
        return (
            f"The groups have {mine} visits, and tiles {spans(nobodys)} are nobody's: one visit each. Without them "
            f"{num_rows - nobodys[0] * bm} rows come back as garbage."
        )
    if mine == len(want.group_ids):
        return (
            f"That is the length of the lists, the worst case. Here {right} visits are made, and {mine - right} "
            f"steps more, for every block of columns, would copy and multiply {bm} rows for nothing."
        )
    if mine < right:
        tile, group = visits[mine]
        shared = ", one for each tile: a tile with two groups is visited twice" if mine == -(-num_rows // bm) else ""
        first = whose(tile, group, sizes, bm)
        return f"With {mine} visits{shared}; the last {right - mine} would not be made, the first of them to {first}."
    return f"There are {right} visits: each pair of a tile and a group in it, and each tile of nobody's."


def every_group(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
    """Metadata in which every group is visited, and no tile of nobody's."""
    sizes = np.asarray(group_sizes)
    return _about_every_group(sizes, got, want, num_rows, bm), draw_groups(sizes, num_rows=num_rows, bm=bm)


def _about_every_group(sizes: np.ndarray, got: Any, want: Any, num_rows: int, bm: int) -> str:
    if np.shape(got.num_tiles):
        return "How many visits there are is one number, of shape ()."
    if (got.offsets.shape != want.offsets.shape) or (got.offsets != want.offsets).any():
        return _about_offsets(sizes, got.offsets, want.offsets)
    for mine, right in ((got.group_ids, want.group_ids), (got.m_tile_ids, want.m_tile_ids)):
        if mine.shape != right.shape:
            return _about_length(sizes, mine, right, num_rows, bm)
    T, G, made, right = -(-num_rows // bm), len(sizes), int(got.num_tiles), int(want.num_tiles)
    missing = sorted(set(range(G)) - set(got.group_ids.tolist()))
    if missing:
        return (
            f"No visit is for {numbered('group', missing)}, so that no step writes dw[{missing[0]}], and it comes back "
            "as garbage: an empty group is visited, too, once."
        )
    if made != right:
        return _about_visits_made(sizes, made, right, num_rows, bm)
    if (got.group_ids != want.group_ids).any():
        n = first_wrong(got.group_ids, want.group_ids)
        if n >= right:
            return f"Behind the last visit, place {n} has group {got.group_ids[n]}, and there are groups 0 to {G - 1}."
        return f"Visit {n} is group {want.group_ids[n]}'s: a group comes once for each of its tiles, an empty one once."
    n = first_wrong(got.m_tile_ids, want.m_tile_ids)
    mine, group = int(got.m_tile_ids[n]), int(want.group_ids[n])
    beyond = (
        f"its tile, {mine}, does not exist: tiles are 0 to {T - 1}, and an index map would point beyond the array. "
    )
    if n >= right:
        return f"Behind the last visit, at place {n}, {beyond}Cut the numbers off at the last tile."
    if not 0 <= mine < T:
        row = rows_of(group, sizes)[0]
        why = f"It has no rows, and begins at row {row}, behind the last tile. " if not sizes[group] else ""
        return f"Visit {n} is group {group}'s, and {beyond}{why}Cut the numbers off at the last tile."
    first, nth = min(rows_of(group, sizes)[0] // bm, T - 1), n - int(np.flatnonzero(want.group_ids == group)[0])
    lost = f" Its rows there would be missing from dw[{group}]." if sizes[group] else ""
    return (
        f"Visit {n} is number {nth}, counted from 0, of group {group}, whose first tile is {first}: tile "
        f"{want.m_tile_ids[n]}, not {mine}.{lost}"
    )


def _about_visits_made(sizes: np.ndarray, made: int, right: int, num_rows: int, bm: int) -> str:
    nobodys = sum(1 for _, g in visits_of(sizes, num_rows, bm) if g == NOBODY)
    empty = int(np.sum(sizes == 0))
    if made > right:
        extra = f"{nobodys} of yours are tiles of nobody's, which no dw needs. " if nobodys == made - right else ""
        return f"{extra}{made - right} steps too many for every block of dw, each a product of {bm} rows for nothing."
    why = f": the {empty} of the empty groups are not counted" if right - made == empty else ""
    return f"There are {right} visits, and {made} would be made{why}. What the last ones write comes back as garbage."
