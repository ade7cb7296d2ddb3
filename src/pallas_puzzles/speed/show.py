"""Results as a table in a terminal, and in a notebook with its picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..text import cut, wrapped
from ..view.draw import FONT, LEFT, RIGHT, card_html, cells_html, image, row_html, table
from ..view.paper import NEUTRAL
from ..view.roofline import human_count, human_time, percent
from .work import ESTIMATE, XLA

if TYPE_CHECKING:
    from .results import Results, Row

COLUMNS = 80
_MOST = (24, 13, 8, 6, 5, 9, 12)  # characters of each column


def text(results: Results, columns: int = COLUMNS) -> str:
    """The whole table: a block for each function and chip, conditions before them and notes after them."""
    lines = [line for _, line in wrapped(about(results), "", columns=columns)]
    for work, chip, rows in blocks(results):
        cells = [[cut(word, most, "~") for word, most in zip(cells_of(row, rows), _MOST, strict=True)] for row in rows]
        heads = [head[:most] for head, most in zip(_heads(rows), _MOST, strict=True)]
        widths = [max(map(len, column)) if any(column[1:]) else 0 for column in zip(heads, *cells, strict=True)]
        lines += ["", cut(f"{work} on {chip}", columns), _line(heads, widths)]
        before = ""
        for row, line in zip(rows, cells, strict=True):
            line[0], before = ("" if line[0] == before else line[0]), line[0]
            if row.problem:
                words = f"{_line(line[:2], widths)}  no time: {row.problem}"
                indent = " " * (4 + widths[0])
                lines += [each for _, each in wrapped(words, "", columns=columns)][:1]
                lines += [each for _, each in wrapped(words[len(lines[-1]) :].strip(), "", indent, columns=columns)]
            else:
                lines.append(_line(line, widths))
    for words in filter(None, [_key(results), *results.notes]):
        lines += ["", *(each for _, each in wrapped(words, "", columns=columns))]
    return "\n".join(line.rstrip() for line in lines)


def _key(results: Results) -> str:
    """What the columns are, of those that are filled."""
    rows = results.rows
    words = []
    if any(row.share is not None for row in rows):
        words.append(
            "light: the share of the speed of light, which is what the datasheet's peaks allow for the bytes that have "
            "to move and for matrix products."
        )
    if any(row.spread is not None for row in rows):
        words.append("spread: half of the span that holds four fifths of the calls.")
    if any(row.median_s and rival(each) not in ("", row.who) for *_, each in blocks(results) for row in each):
        words.append("vs: how many times as fast as that.")
    return " ".join(words)


def about(results: Results) -> str:
    """Device, versions and how it was measured, in a line or two."""
    told = results.conditions
    ways = {(row.how, row.l2_flushed) for row in results.rows if row.median_s and row.kind != ESTIMATE}
    counts = [row.count for row in results.rows if row.count]
    away = all(row.kind == ESTIMATE for row in results.rows)
    parts = ["" if away else str(told.get("device", "")), f"jax {told['jax']}" if told.get("jax") else ""]
    parts += [f"driver {told['driver']}" if told.get("driver") else "", str(told.get("date", ""))[:10]]
    for how, flushed in sorted(ways):
        parts.append(f"{how}; L2 {'flushed before each call' if flushed else 'not flushed'}")
    if ways:
        least, most = min(counts), max(counts)
        parts.append(f"medians of {least if least == most else f'{least} to {most}'}")
    return ", ".join(part for part in parts if part)


def blocks(results: Results) -> Iterator[tuple[str, str, list[Row]]]:
    """Rows of one function on one chip, with the function and the chip in words."""
    for (work, chip, kind), rows in itertools.groupby(results.rows, lambda row: (row.work, row.chip, row.kind)):
        yield work, f"{chip}{', ESTIMATED by its compiler' if kind == ESTIMATE else ''}", list(rows)


def rival(rows: Sequence[Row]) -> str:
    """Whom the others are compared with: XLA, or the last one."""
    names = list(dict.fromkeys(row.who for row in rows))
    return "" if len(names) < 2 else XLA if XLA in names else names[-1]


def _heads(rows: Sequence[Row]) -> list[str]:
    return ["size", "who", "time", "spread", "light", f"vs {rival(rows)}" if rival(rows) else "", "rate"]


def cells_of(row: Row, rows: Sequence[Row]) -> list[str]:
    first = [f"{row.size.replace(' x ', 'x')} {row.dtype}", row.who]
    if row.median_s is None:
        return [*first, *[""] * 5]
    other = next((r for r in rows if (r.size, r.dtype, r.who) == (row.size, row.dtype, rival(rows))), None)
    ratio = f"{other.median_s / row.median_s:.2f}x" if other and other.median_s and other is not row else ""
    rate = row.rate
    return [
        *first,
        human_time(row.median_s),
        "" if row.spread is None else f"{row.spread:.1%}",
        "" if row.share is None else percent(row.share),
        ratio,
        human_count(*rate) if rate and rate[0] else "",
    ]


def _line(words: Sequence[str], widths: Sequence[int]) -> str:
    """The first two columns to the left, numbers to the right; none that is empty."""
    pairs = enumerate(zip(words, widths, strict=False))
    cells = [word.ljust(wide) if i < 2 else word.rjust(wide) for i, (word, wide) in pairs if wide]
    return "  " + "  ".join(cells)


def html(results: Results) -> str:
    """The picture, and a table below it; colours are the page's own."""
    parts = [f'<div style="opacity:.8">{escape(about(results))}</div>']
    for work, chip, rows in blocks(results):
        styles = [LEFT, LEFT, *[RIGHT] * 5]
        lines = [row_html(f'<th style="{s}">{escape(h)}</th>' for s, h in zip(styles, _heads(rows), strict=True))]
        for row in rows:
            cells = cells_of(row, rows)
            if row.problem:
                wide = f'<td colspan="5" style="{LEFT};white-space:normal">no time: {escape(row.problem)}</td>'
                lines.append(row_html([*cells_html(cells[:2], "<<"), wide]))
            else:
                lines.append(row_html(cells_html(cells, "<<>>>>>")))
        parts.append(f'<div style="margin-top:8px"><b>{escape(f"{work} on {chip}")}</b></div>{table(lines)}')
    if key := _key(results):
        parts.append(f'<div style="opacity:.8;font-size:92%">{escape(key)}</div>')
    parts += [f'<div style="margin-top:6px">{escape(note)}</div>' for note in results.notes]
    picture = ""
    if any(row.share for row in results.rows):
        picture = image(results.svg(), f"Share of the speed of light by size. {about(results)}")
    return picture + card_html(NEUTRAL, "".join(parts), FONT)
