"""Wrong rows of a result, and wrong sums over rows: whose rows they are, and what they hold instead."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .groups import NOBODY, Explained, close, draw_groups, owners, rows_named, rows_of, visits_of


def _mask_mistake(holder: np.ndarray, sizes: np.ndarray, bm: int) -> str:
    """The mistake in the test for a group's own rows that gives every row to whom it was given; "" if none is known."""
    num_rows, starts = len(holder), np.cumsum(sizes) - sizes

    def given(test: Callable[[np.ndarray, int, int, int, int], np.ndarray]) -> np.ndarray:
        result = np.full(num_rows, NOBODY)
        for v, (tile, group) in enumerate(visits_of(sizes, num_rows, bm)):
            g = group if group != NOBODY else len(sizes) - 1
            rows = np.arange(tile * bm, min((tile + 1) * bm, num_rows))
            own = test(rows, v, tile, int(starts[g]), int(starts[g] + sizes[g]))
            result[rows[own]] = g
        return result

    known = [
        (
            lambda r, v, t, a, b: (a <= r - t * bm) & (r - t * bm < b),
            f"That is what a mask does that counts rows from the start of the tile, 0 to {bm - 1}, while offsets count "
            "them in the whole array: add the tile's number times bm.",
        ),
        (
            lambda r, v, t, a, b: (a <= r - t * bm + v * bm) & (r - t * bm + v * bm < b),
            "That is what a mask does that takes the number of the visit, v, for the number of the tile: after the "
            "first tile that is visited twice they differ. Look it up, m_tile_ids_ref[v].",
        ),
        (
            lambda r, v, t, a, b: (a <= r) & (r < b - 1),
            "The last row of each group is left out: offsets[g + 1] is the first row that is not its own, rows < end.",
        ),
        (
            lambda r, v, t, a, b: (a < r) & (r < b),
            "The first row of each group is left out: it is offsets[g] itself, offsets[g] <= rows.",
        ),
        (
            lambda r, v, t, a, b: (a <= r) & (r <= b),
            "One row too many for each group: offsets[g + 1] is the first row that is not its own, rows < end.",
        ),
        (
            lambda r, v, t, a, b: a <= r,
            "Half a mask: rows are tested against where the group begins, and not against where it ends.",
        ),
        (
            lambda r, v, t, a, b: r < b,
            "Half a mask: rows are tested against where the group ends, and not against where it begins.",
        ),
        (
            lambda r, v, t, a, b: r == r,
            "There is no mask: each visit stores its whole tile. Only the rows of its own group are to be stored.",
        ),
    ]
    same = [text for test, text in known if np.array_equal(given(test), holder)]
    if same and same[0] == known[-2][1] and same[-1] == known[-1][1]:
        return (  # a tile's last group goes on beyond it everywhere: the rows behind its end cannot tell
            "Either there is no mask, and the whole tile is stored at each visit, or it is half a mask, which does not "
            "test where the group begins: offsets[g] <= rows."
        )
    if same:
        return same[0]
    return ""


def _runs(labels: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """(label, first, end) of each run of equal labels that are not None."""
    at = 0
    for label, group in itertools.groupby(labels):
        n = len(list(group))
        if label is not None:
            yield label, at, at + n
        at += n


def _rows_of_result(
    holds: Sequence[tuple[str, int] | None], sizes: np.ndarray, bm: int, what: Callable[[str, int], str]
) -> str:
    """In words, the first run of wrong rows: which tile, whose they are, what they hold. holds: for each row None, if
    it is right, or a kind and a group."""
    owner = owners(sizes, len(holds))
    labels = [None if h is None else (*h, int(owner[r]), r // bm) for r, h in enumerate(holds)]
    for (kind, group, whose, tile), first, end in _runs(labels):
        if kind == "else" and all(h is None or h[0] == "else" for h in holds):
            return ""  # where they are wrong, others can say as well
        mine = "nobody's, and should be 0," if whose == NOBODY else f"group {whose}'s"
        verb = "is" if end == first + 1 else "are"
        rows = rows_named(first, end)
        others = sum(label is not None for label in labels) - (end - first)
        more = f" ({others} more rows are wrong.)" if others else ""
        holds_what = f"hold{'s' if verb == 'is' else ''} {what(kind, group)}"
        return f"{rows[0].upper()}{rows[1:]}, in tile {tile}, {verb} {mine} and {holds_what}.{more}"
    return ""


def _advice(holds: Sequence[tuple[str, int] | None], sizes: np.ndarray, bm: int) -> str:
    """What to try, when every row holds the value of some group, or 0."""
    owner = owners(sizes, len(holds))
    holder = np.array(
        [
            int(owner[r]) if h is None else NOBODY if h[0] == "zero" else h[1] if h[0] == "group" else -2
            for r, h in enumerate(holds)
        ]
    )
    told = _mask_mistake(holder, sizes, bm)
    if told:
        return f" {told}"
    kinds = {h[0] for h in holds if h is not None}
    if kinds == {"zero"}:
        return (
            " Either no visit has counted them as its group's own (own_rows), or a later visit to the tile has put 0 "
            "in their place: only the first visit of a tile may."
        )
    return ""


def bias(x: Any, bias: Any, group_sizes: Any, *, got: Any, want: Any, bm: int, **_: Any) -> Explained:
    """x + bias[g] for the rows of group g, 0 for rows of nobody's."""
    sizes = np.asarray(group_sizes)
    got, x = np.asarray(got, np.float64), np.asarray(x, np.float64)
    rows = np.concatenate([np.asarray(bias, np.float64)[:, 0], np.zeros((1, x.shape[1]))])
    wrong = ~np.isclose(got, np.asarray(want, np.float64), rtol=1e-4, atol=1e-4)

    def held(r: int) -> tuple[str, int]:
        cut = wrong[r]
        if not np.isfinite(got[r][cut]).all():
            return "garbage", NOBODY
        if not got[r][cut].any():
            return "zero", NOBODY
        near = np.abs(got[r][cut] - x[r][cut] - rows[:, cut]).max(axis=1)
        best = int(near.argmin())
        if near[best] > 1e-2:
            return "else", NOBODY
        return ("x", NOBODY) if best == len(sizes) else ("group", best)

    holds = [held(r) if wrong[r].any() else None for r in range(len(x))]
    words = {"garbage": "garbage", "zero": "0", "x": "x itself, without a bias", "else": "something else"}
    first = _rows_of_result(holds, sizes, bm, lambda kind, g: words.get(kind, f"x + bias[{g}]"))
    kinds = {h[0] for h in holds if h is not None}
    advice = _advice(holds, sizes, bm)
    if kinds == {"x"}:
        advice = " Where a tile is not its group's own, keep what is in o_ref; and at its first visit, 0."
    return first + advice, draw_groups(sizes, num_rows=len(x), bm=bm)


def by_tile(experts: Any, x: Any, w: Any, *, got: Any, want: Any, **_: Any) -> Explained:
    """Each tile of x times the weights of its own expert."""
    experts, x, w, got = np.asarray(experts), *(np.asarray(a, np.float32) for a in (x, w, got))
    bm, used = len(x) // len(experts), {}
    for tile in range(len(experts)):
        cut = slice(tile * bm, (tile + 1) * bm)
        if not close(got[cut], np.asarray(want, np.float32)[cut]):
            used[tile] = next((e for e in range(len(w)) if close(got[cut], x[cut] @ w[e])), None)
    if not used:
        return "", ""
    tile, other = next(iter(used.items()))
    text = f"Tile {tile}, {rows_named(tile * bm, (tile + 1) * bm)}, asks for expert {experts[tile]} and "
    if other is None:
        return f"{text}holds the product with no expert's weights as they are. Do rows, columns and tiles fit?", ""
    if len(set(used.values())) == 1 and len(used) > 1:
        return (
            f"{text}holds the product with w[{other}], as every other wrong tile does: the map does not ask for data.",
            "",
        )
    return (
        f"{text}holds the product with w[{other}]: which number does the index map of w_ref look up, and by what?",
        "",
    )


def product(
    x: Any,
    w: Any,
    group_sizes: Any,
    *,
    got: Any,
    want: Any,
    bm: int,
    bk: int | None = None,
    turned: bool = False,
    **_: Any,
) -> Explained:
    """x @ w[g] for the rows of group g (w[g].T, if turned), 0 for rows of nobody's."""
    if turned:
        plain, w = _grouped(x, w, group_sizes), np.swapaxes(w, 1, 2)
        if close(np.asarray(got, np.float32), plain):
            return "Here dims are ((1,), (1,)), x @ w[g].T, and the result is x @ w[g]: the product ignores dims.", ""
    sizes, holds = _held_products(x, w, group_sizes, got, want, bm, bk or x.shape[1])
    K, bk = np.shape(x)[1], bk or np.shape(x)[1]
    words = {
        "garbage": "NaN",
        "zero": "0",
        "last": f"the product of the last block of K alone, columns {K - bk} to {K - 1} of x",
        "first": f"the product of the first block of K alone, columns 0 to {bk - 1} of x",
        "else": "something else",
    }

    def what(kind: str, g: int) -> str:
        visited = " and ".join(f"w[{h}]" for h in _before(sizes, len(x), bm, g))
        summed = f"the sum of the products with {visited}"
        return summed if kind == "sum" else words.get(kind, f"the product with w[{g}]")

    text = _rows_of_result(holds, sizes, bm, what)
    kinds = {h[0] for h in holds if h is not None}
    spoilt = np.flatnonzero(~np.isfinite(np.asarray(w, np.float32)).all(axis=(1, 2))).tolist()
    if "garbage" in kinds and spoilt:
        text += (
            f" w[{spoilt[0]}] is infinite, and 0 times infinity is NaN: rows that are 0 in the product are not out of "
            "it. Choose rows after the product."
        )
    elif "sum" in kinds:
        text += (
            " The sum has gone on from the visit before: it is a visit's own, and starts anew at its first block of "
            "K, although the tile is the same."
        )
    elif kinds & {"last", "first"}:
        text += " The result is the sum over all blocks of K: add in acc_ref, and store after the last one."
    elif kinds:
        owner = owners(sizes, len(holds))
        whole = [h for r, h in enumerate(holds) if h is not None and h[0] == "group" and _alone(owner, r, bm)]
        text += _advice(holds, sizes, bm)
        if whole and whole[0][1] != NOBODY and not _advice(holds, sizes, bm):
            text += (
                " No other group is in that tile: tile and weights do not belong together. Which Ref does each index "
                "map look its number up in, and by which grid index?"
            )
    return text, draw_groups(sizes, num_rows=len(x), bm=bm)


def wiring(x: Any, w: Any, group_sizes: Any, *, over: str, grids: Sequence[Sequence[int]], bm: int) -> str:
    """What to do about a grid (j, v, k) of a grouped product that is too long, or of which nothing is parallel."""
    visits, longest = len(visits_of(group_sizes, len(x), bm)), -(-len(x) // bm) + len(group_sizes) - 1
    if over == "grid_steps" and len(grids) == 1 and visits < longest in grids[0]:
        axis = list(grids[0]).index(longest)
        return (
            f"Of the `grid=`, axis {axis} has {longest} steps, the list's length; {visits} are visits. The others, for "
            f"every column block, multiply {bm} rows for nothing: how many visits there are is in the metadata, too."
        )
    if over == "serial_steps":
        return (
            "The grid is (j, v, k), and column blocks share nothing: axis 0, j, may be spread over cores. Say "
            "'parallel' for it, in `dimension_semantics`; visits may share a tile, and blocks of K a sum."
        )
    return ""


def _grouped(x: Any, w: Any, group_sizes: Any) -> np.ndarray:
    x, w, owner = np.asarray(x, np.float32), np.asarray(w, np.float32), owners(group_sizes, len(x))
    rows = [x[r] @ w[g] if g != NOBODY else np.zeros(w.shape[2]) for r, g in enumerate(owner.tolist())]
    return np.array(rows, np.float32)


def _alone(owner: np.ndarray, row: int, bm: int) -> bool:
    tile = owner[row // bm * bm : row // bm * bm + bm]
    return bool((tile == tile[0]).all()) and tile[0] != NOBODY


def _before(sizes: np.ndarray, num_rows: int, bm: int, g: int) -> list[int]:
    """The groups that have visited the first tile of group g, up to g."""
    tile = rows_of(g, sizes)[0] // bm
    return [h for t, h in visits_of(sizes, num_rows, bm) if t == tile and h <= g]


def _held_products(
    x: Any, w: Any, group_sizes: Any, got: Any, want: Any, bm: int, bk: int
) -> tuple[np.ndarray, list[tuple[str, int] | None]]:
    """What each wrong row of a grouped product holds."""
    sizes = np.asarray(group_sizes)
    x, w, got, want = (np.asarray(a, np.float32) for a in (x, w, got, want))
    num_rows, K = x.shape
    first = x @ w[0]
    size = float(np.sqrt(np.mean(np.square(first[np.isfinite(first)])))) or 1.0
    wrong = ~np.isclose(got, want, rtol=2e-2, atol=2e-2 * size)
    products = np.einsum("mk,gkn->gmn", x, w)
    owner, before = owners(sizes, num_rows), {g: _before(sizes, num_rows, bm, g) for g in range(len(sizes)) if sizes[g]}

    def near(r: int, value: np.ndarray) -> bool:
        cut = wrong[r]
        return bool(np.allclose(got[r][cut], value[cut], rtol=3e-2, atol=3e-2 * size))

    def held(r: int) -> tuple[str, int]:
        if np.isnan(got[r][wrong[r]]).any():
            return "garbage", NOBODY
        if not got[r][wrong[r]].any():
            return "zero", NOBODY
        group = int(owner[r])
        for g in range(len(sizes)):
            if g != group and near(r, products[g, r]):
                return "group", g
        if group == NOBODY:
            return "else", NOBODY
        if len(before[group]) > 1 and near(r, products[before[group], r].sum(axis=0)):
            return "sum", group
        for kind, cut in (("last", slice(K - bk, K)), ("first", slice(0, bk))):
            if bk < K and near(r, x[r, cut] @ w[group, cut]):
                return kind, group
        return "else", NOBODY

    return sizes, [held(r) if wrong[r].any() else None for r in range(num_rows)]


def grads(x: Any, w: Any, group_sizes: Any, g: Any, *, got: Any, want: Any, bm: int, **blocks: Any) -> Explained:
    """y, dx and dw of a grouped product: dw[e] is x.T @ g over the rows of group e."""
    sizes, picture = np.asarray(group_sizes), draw_groups(group_sizes, num_rows=len(x), bm=bm)
    x, g = np.asarray(x, np.float32), np.asarray(g, np.float32)
    for n, (name, what) in enumerate((("y", "the product"), ("dx", "g times the weights, transposed"))):
        if not close(np.asarray(got[n], np.float32), np.asarray(want[n], np.float32)):
            return f"Here {name} is wrong, {what}: the kernel of the grouped product makes it, not this one.", picture
    dw = np.asarray(got[2], np.float32)
    wrong = [e for e in range(len(sizes)) if not close(dw[e], np.asarray(want[2], np.float32)[e], want[2])]
    return (_about_group_sum(wrong, dw, x, g, sizes, bm) if wrong else ""), picture


def _about_group_sum(wrong: list[int], dw: np.ndarray, x: np.ndarray, g: np.ndarray, sizes: np.ndarray, bm: int) -> str:
    num_rows = len(x)
    groups = f"dw[{wrong[0]}]" + (f" (and dw of {len(wrong) - 1} more groups)" if len(wrong) > 1 else "")
    for e in wrong:
        first, end = rows_of(e, sizes)
        if not sizes[e]:
            if np.isfinite(dw[e]).all() and dw[e].any():
                return (
                    f"{groups} should be 0: group {e} has no rows. At its visit no row is its own, and the sum that "
                    "starts there has to stay 0."
                )
            continue
        start, stop = first // bm * bm, min(-(-end // bm) * bm, num_rows)
        tiles = f"tile {first // bm}" if (end - 1) // bm == first // bm else f"tiles {first // bm} to {(end - 1) // bm}"
        head = f"Group {e}'s dw should be the sum over {rows_named(first, end)}, its own. It is "
        if close(dw[e], x[start:stop].T @ g[start:stop]):
            return (
                f"{head}the sum over {rows_named(start, stop)}, all of {tiles}: {stop - start - (end - first)} rows of "
                "neighbours leak into it, into each of its elements. Replace them by 0 before the product."
            )
        last = (end - 1) // bm * bm
        if last > first and close(dw[e], x[last:end].T @ g[last:end]):
            rows = rows_named(last, end)
            return f"{head}that over {rows} alone, its last visit: the sum has to go on from visit to visit."
        if close(dw[e], x[:end].T @ g[:end]):
            return (
                f"{head}that over {rows_named(0, end)}: the sum has gone on from the groups before it. Start it anew."
            )
        if not dw[e].any():
            return f"{head}0: no visit has counted its rows as its own."
    return ""
