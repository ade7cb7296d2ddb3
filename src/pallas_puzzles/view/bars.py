"""Bars on a clock: rows of what was done when, as SVG and in characters. Who is drawn, and in which colours, is said by
a Look."""

import dataclasses
import html
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ir.capture import SourceLine
from ..text import COLUMNS
from .paper import BOLD, END, MONO_EM, SANS, SMALL, card, image, legend, px, svg_text, swatch

Event = Any  # with a start and an end on the clock, a kind and a ref: that of a GPU's machine, or of several devices

_MOST_EVENTS = 1500  # of one picture: what comes after is left out
PAGE_PX, BAR_PX, ROW_PX, _MARGIN, _LABEL_SIZE = 860.0, 13.0, 17.0, 14.0, 11.0
_MOST_TRACKS = 6
_DASHED = ' stroke="var(--frame)" stroke-width=".6" stroke-dasharray="2 2"'


@dataclasses.dataclass(frozen=True)
class Look:
    """How events are drawn.

    kinds: kind -> (colour, letter in a terminal, in words); dashed: the kinds of bars with a dashed edge. about: an
    event in a sentence. unit: of the clock, "" where its numbers mean nothing. gap: px between rows. arrow: the colour
    of arrows.
    """

    kinds: dict[str, tuple[str, str, str]]
    about: Callable[[Event], str]
    unit: str
    dashed: frozenset[str] = frozenset({"wait"})
    gap: float = 3
    arrow: str = "ink"


@dataclasses.dataclass
class Row:
    """One lane: bars that overlap lie on tracks of their own. group: rows of one group follow a heading."""

    group: str
    lane: str
    label: str
    tracks: list[list[Event]]


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Where a drawing has its rows. left, scale: from the clock to x. places: (group, lane) -> (y, row)."""

    left: float
    scale: float
    until: float
    places: dict[tuple[str, str], tuple[float, Row]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """Rows on a clock: as a standalone SVG file, in words, in characters. Around it a title, a table in HTML, costs."""

    svg: str
    alt: str
    text: Sequence[str]
    title: str = ""
    costs: str = ""
    table: str = ""

    def lines(self) -> list[str]:
        """It in characters."""
        return [*textwrap.wrap(self.title, columns()), *self.text, *textwrap.wrap(self.costs, columns())]

    def html(self) -> str:
        head = f'<div style="{SMALL}"><b>{html.escape(self.title)}</b></div>' if self.title else ""
        foot = f'<div style="{SMALL}">{html.escape(self.costs)}</div>' if self.costs else ""
        return f'<div style="margin:4px 0">{head}{image(self.svg, self.alt)}{self.table}{foot}</div>'


def tracks(events: Sequence[Event]) -> list[list[Event]]:
    """Events on as few tracks as hold them side by side; what finds no room is put on the last one."""
    found: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        track = next((t for t in found if t[-1].end <= event.start + 1e-6), None)
        if track is None and len(found) < _MOST_TRACKS:
            found.append([])
        (track or found[-1]).append(event)
    return found


def shown(rows: Sequence[Row]) -> float:
    """How far the picture reaches: to the end, or as far as it can hold all bars."""
    ends = sorted(e.end for row in rows for track in row.tracks for e in track)
    last = ends[_MOST_EVENTS] if len(ends) > _MOST_EVENTS else max(ends, default=0.0)
    return max(last, 1.0)


def svg(
    rows: Sequence[Row],
    look: Look,
    arrows: Callable[[Sheet], Iterator[str]] | None = None,
    about_arrows: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Rows as a standalone SVG file. arrows: what is drawn over them; about_arrows: what that is, "" without any."""
    until = shown(rows)
    left = max((len(r.label) for r in rows), default=0) * _LABEL_SIZE * MONO_EM + 10
    wide = PAGE_PX - left
    y, group, marks = 4.0, "", []
    sheet = Sheet(left, wide / until, until, {})
    for row in rows:
        if row.group != group:
            group = row.group
            y += 14
            marks.append(svg_text(0, y, group, 12, "ink", SANS, BOLD))
            y += 6
        height = len(row.tracks) * ROW_PX
        sheet.places[row.group, row.lane] = (y, row)
        marks.append(svg_text(left - 8, y + BAR_PX - 2, row.label, _LABEL_SIZE, "ink", "", END))
        marks.append(f'<path d="M{px(left)} {px(y + height)}h{px(wide)}" stroke="var(--line)" stroke-width=".5"/>')
        for n, track in enumerate(row.tracks):
            marks += [_bar(e, look, left, y + n * ROW_PX, wide / until) for e in track if e.start < until]
        y += height + look.gap
    if arrows is not None:
        marks += arrows(sheet)
    if look.unit:
        marks += _axis(left, wide, y, until, look.unit)
    y += 30 if look.unit else 16
    entries = []
    for kind in used(rows, look):
        colour, _, words = look.kinds[kind]
        entries.append((swatch(f"var(--{colour})", _DASHED if kind in look.dashed else ""), words))
    if about_arrows:
        entries.append((arrow(5, 2, 5, -9, look, about_arrows), about_arrows))
    keys, y = legend(entries, PAGE_PX, y)
    for note in notes:
        y += 17
        keys.append(svg_text(0, y, note, 11, "muted", SANS))
    drawn = f'<g transform="translate({px(_MARGIN)},{px(_MARGIN)})">{"".join([*marks, *keys])}</g>'
    return card(PAGE_PX + 2 * _MARGIN, y + 2 * _MARGIN, drawn)


def _bar(event: Event, look: Look, left: float, y: float, scale: float) -> str:
    x, w = left + event.start * scale, max(0.8, (event.end - event.start) * scale - 0.6)
    edge = _DASHED if event.kind in look.dashed else ""
    bar = (
        f'<rect x="{px(x)}" y="{px(y)}" width="{px(w)}" height="{px(BAR_PX)}" rx="2" '
        f'fill="var(--{look.kinds[event.kind][0]})"{edge}><title>{html.escape(look.about(event))}</title></rect>'
    )
    room = int((w - 6) / (9 * MONO_EM))
    if len(event.ref) > room or room < 2:
        return bar
    colour = "muted" if edge else "paper"
    return bar + svg_text(x + 3, y + BAR_PX - 3.5, event.ref, 9, colour)


def _axis(left: float, wide: float, y: float, until: float, unit: str) -> Iterator[str]:
    step = 1.0  # a round number of which at most six fit
    while until / step > 6:
        step *= 2 if str(step)[0] in "15" else 2.5
    for n in range(int(until / step) + 1):
        x = left + n * step * wide / until
        yield f'<path d="M{px(x)} {px(y)}v4" stroke="var(--muted)"/>'
        more = ' text-anchor="middle"' if n else ""
        if x < left + wide - 70:
            yield svg_text(x, y + 15, f"{n * step:,.0f}", 10, "muted", SANS, more)
    yield svg_text(left + wide, y + 15, f"{until:,.0f} {unit}", 10, "muted", SANS, END)


def used(rows: Sequence[Row], look: Look) -> list[str]:
    """The kinds of bars that there are."""
    there = {e.kind for row in rows for track in row.tracks for e in track}
    return [kind for kind in look.kinds if kind in there]


def arrow(x1: float, y1: float, x2: float, y2: float, look: Look, title: str, more: str = "") -> str:
    """From one row to another. title: what it says on hovering."""
    tip = 4.0 if y2 < y1 else -4.0
    return (
        f'<g stroke="var(--{look.arrow})" fill="var(--{look.arrow})"{more}><title>{html.escape(title)}</title>'
        f'<path d="M{px(x1)} {px(y1)}L{px(x2)} {px(y2 + tip)}" fill="none"/>'
        f'<path d="M{px(x2)} {px(y2)}l-2.5 {px(tip)}h5z" stroke="none"/></g>'
    )


def source(line: SourceLine | None) -> str:
    """', a.py:7: plgpu.copy_gmem_to_smem(...)'."""
    return f", {line}: {line.text}" if line is not None else ""


def columns() -> int:
    """As wide as text may be here."""
    return max(60, min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns))


def text_bar(track: Sequence[Event], look: Look, until: float, wide: int) -> str:
    """A letter for each column: what takes most of its time."""
    share: list[dict[str, float]] = [{} for _ in range(wide)]
    each = until / wide
    for event in track:
        first, last = int(event.start / each), min(wide - 1, int(event.end / each))
        for column in range(min(first, wide - 1), last + 1):
            inside = min(event.end, (column + 1) * each) - max(event.start, column * each)
            letter = look.kinds[event.kind][1]
            weight = inside * (0.25 if letter == "·" else 1)  # work that is short is seen beside a long wait
            share[column][letter] = share[column].get(letter, 0.0) + weight
    return "".join(max(s, key=lambda k: s[k]) if sum(s.values()) > each * 0.2 else " " for s in share).rstrip()


def text_lines(rows: Sequence[Row], look: Look) -> Iterator[str]:
    """Rows in characters, with the clock below them where its numbers mean something, and what the letters mean."""
    until = shown(rows)
    left = max((len(r.label) for r in rows), default=0) + 2
    wide = columns() - left
    group = ""
    for row in rows:
        if row.group != group:
            group = row.group
            yield group
        for n, track in enumerate(row.tracks):
            yield (row.label if n == 0 else "").rjust(left - 2) + "  " + text_bar(track, look, until, wide)
    if look.unit:
        yield " " * left + "0" + f"{until:,.0f} {look.unit}".rjust(wide - 1)
    words = "  ".join(f"{look.kinds[k][1]} {look.kinds[k][2]}".replace(" ", "\0") for k in used(rows, look))
    yield from (line.replace("\0", " ") for line in textwrap.wrap(words, columns()))  # each in one piece
