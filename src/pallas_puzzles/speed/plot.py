"""The picture of a benchmark: the share of the speed of light by size, a panel for each function and chip."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..text import cut
from ..view.paper import BOLD, END, SANS, card, px, svg_text
from ..view.roofline import human_count, human_time, percent
from .show import blocks
from .work import ESTIMATE

if TYPE_CHECKING:
    from .results import Results, Row

# Of a panel, in px: its size, its axes in it, and of letters
_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 440.0, 268.0, 52.0, 46.0, 330.0, 206.0
_TEXT, _SMALL, _LINE = 12.0, 10.5, 14.0
_MIDDLE = ' text-anchor="middle"'
_ACROSS = 2
_TITLE, _MARGIN = 44, 12.0  # characters; px around everything
# Of the first line in a panel, which is ours, the second, ...: colour, dashes, mark. Each differs in all three.
_LOOKS = (
    ("blue", "", "circle"),
    ("vermilion", "7 3", "square"),
    ("green", "2 3", "triangle"),
    ("purple", "9 3 2 3", "diamond"),
    ("orange", "4 2", "cross"),
)


def svg(results: Results) -> str:
    """As a standalone SVG."""
    panels = [*_panels(results)]
    if not panels:
        words = "Nothing to draw: no share of the speed of light is known."
        return card(_WIDE, 40, svg_text(16, 24, words, _TEXT, "ink", SANS))
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    marks = []
    for number, panel in enumerate(panels):
        y, x = divmod(number, across)
        where = f"translate({px(_MARGIN + x * _WIDE)} {px(_MARGIN + y * _HIGH)})"
        marks.append(f'<g transform="{where}">{"".join(_panel(*panel))}</g>')
    return card(2 * _MARGIN + across * _WIDE, 2 * _MARGIN + down * _HIGH, "".join(marks))


def _panels(results: Results) -> Iterator[tuple[str, str, list[Row]]]:
    """What is drawn in each: one function, in one dtype, on one chip."""
    for work, chip, rows in blocks(results):
        for dtype in dict.fromkeys(row.dtype for row in rows):
            if drawn := [row for row in rows if row.share and row.dtype == dtype]:
                yield f"{work}, {dtype}", chip, drawn


def _panel(title: str, chip: str, rows: Sequence[Row]) -> Iterator[str]:
    yield svg_text(_LEFT, 14, cut(title, _TITLE, "…"), _TEXT + 1, "ink", SANS, BOLD)
    yield svg_text(_LEFT, 31, cut(f"{chip}: share of the speed of light", 62, "…"), _SMALL, "muted", SANS)
    ticks = _ticks(rows)
    top = max(1.12, *(1.08 * row.share for row in rows if row.share))
    yield from _axes(ticks, top, rows[-1].bound)
    ends = []
    series: dict[str, list[Row]] = {}  # a line for each function; what is measured stands before its peers
    for row in rows:
        series.setdefault(row.who, []).append(row)
    for (colour, dashes, mark), (name, each) in zip(itertools.cycle(_LOOKS), series.items(), strict=False):
        points = [(_x(ticks, _amount(row)[0]), _y(row.share, top)) for row in each if row.share]
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        path = "L".join(f"{px(x)} {px(y)}" for x, y in points)
        width = "2.4" if not dashes else "1.8"
        yield f'<path d="M{path}" fill="none" stroke="var(--{colour})" stroke-width="{width}"{dash}/>'
        hollow = each[0].kind == ESTIMATE
        yield from (_mark(mark, x, y, colour, hollow) for x, y in points)
        ends.append((points[-1], name, each[-1], colour, mark, hollow))
    yield from _labels(ends)


# --- axes ------------------------------------------------------------------------------------------------------------


def _ticks(rows: Sequence[Row]) -> dict[float, str]:
    """Places to the right -> what is there: bytes, or FLOP where those decide, on a logarithmic axis."""
    return {amount: human_count(amount, unit) for amount, unit in sorted({_amount(row) for row in rows if row.share})}


def _amount(row: Row) -> tuple[float, str]:
    return (row.hbm_bytes, "B") if row.bound == "HBM" else (row.flops, "FLOP")


def _x(ticks: dict[float, str], amount: float) -> float:
    least, most = math.log(min(ticks)), math.log(max(ticks))
    share = 0.5 if most == least else (math.log(amount) - least) / (most - least)
    return _LEFT + 14 + share * (_RIGHT - _LEFT - 28)


def _y(share: float | None, top: float) -> float:
    return _BOTTOM - (share or 0.0) / top * (_BOTTOM - _TOP)


def _axes(ticks: dict[float, str], top: float, bound: str) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, colour = _y(share, top), "ink" if share == 1 else "muted"
        line = 'stroke="var(--ink)" stroke-width="1.6"' if share == 1 else 'stroke="var(--line)" stroke-width=".7"'
        yield f'<path d="M{px(_LEFT)} {px(y)}H{px(_RIGHT)}" {line}/>'
        yield svg_text(_LEFT - 6, y + 4, f"{share:.0%}", _SMALL, colour, SANS, END)
    roof = "speed of light: the bandwidth of HBM" if bound == "HBM" else f"speed of light: the peak for {bound}"
    yield svg_text(_RIGHT, y - 5, roof, _SMALL - 0.5, "muted", SANS, END)
    last = -math.inf
    for amount, words in ticks.items():
        x = _x(ticks, amount)
        yield f'<path d="M{px(x)} {px(_BOTTOM)}v4" stroke="var(--frame)"/>'
        if x - last > 46:
            yield svg_text(x, _BOTTOM + 17, words, _SMALL, "muted", SANS, _MIDDLE)
            last = x
    what = "bytes that have to move" if next(iter(ticks.values())).endswith("B") else "work in matrix products"
    yield svg_text((_LEFT + _RIGHT) / 2, _BOTTOM + 35, what, _SMALL, "ink", SANS, _MIDDLE)


# --- marks -----------------------------------------------------------------------------------------------------------


def _mark(kind: str, x: float, y: float, colour: str, hollow: bool) -> str:
    """hollow: an estimate."""
    ink = f'fill="var(--{"paper" if hollow else colour})" stroke="var(--{colour})" stroke-width="1.5"'
    r = 4.0
    if kind == "circle":
        return f'<circle cx="{px(x)}" cy="{px(y)}" r="{px(r)}" {ink}/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
        "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        "cross": ((-1, -1), (1, 1), (0, 0), (1, -1), (-1, 1), (0, 0)),
    }[kind]
    path = "L".join(f"{px(x + r * dx)} {px(y + r * dy)}" for dx, dy in corners)
    return f'<path d="M{path}Z" {ink}/>'


def _labels(ends: Sequence[tuple[tuple[float, float], str, Row, str, str, bool]]) -> Iterator[str]:
    """Right of the lines: whose each is, its time and share at the largest size, with room between them."""
    ordered = sorted(ends, key=lambda end: end[0][1])
    room = 2 * _LINE
    lowest = _TOP - room
    places = []
    for (_, y), *_rest in ordered:
        lowest = max(y, lowest + room)
        places.append(lowest)
    over = max(0.0, (places[-1] if places else 0.0) - (_BOTTOM + 4))
    for place, ((x, y), name, row, colour, mark, hollow) in zip(places, ordered, strict=True):
        at = place - over
        assert row.median_s is not None
        assert row.share is not None
        yield f'<path d="M{px(x + 6)} {px(y)}L{px(_RIGHT + 2)} {px(at)}" stroke="var(--muted)" stroke-width=".7"/>'
        yield _mark(mark, _RIGHT + 9, at, colour, hollow)
        more = BOLD if colour == _LOOKS[0][0] else ""
        yield svg_text(_RIGHT + 18, at + 4, cut(name, 16, "…"), _SMALL + 0.5, "ink", SANS, more)
        words = f"{human_time(row.median_s)}, {percent(row.share)}"
        yield svg_text(_RIGHT + 18, at + 4 + _LINE - 2, words, _SMALL - 0.5, "muted", SANS)
