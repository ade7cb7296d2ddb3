"""Several devices as a picture: a row for each, what it does on the logical clock, and an arrow for each copy."""

import dataclasses
import html
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..lens import devices
from ..lens.devices import Event, Transfer
from ..text import COLUMNS, human_bytes, plural
from .costs import gained
from .draw import Displayed, image, sentence_html, tried
from .paper import END, SANS, card, px, svg_text

_MOST_DEVICES, _MOST_EVENTS, _MOST_ARROWS = 16, 1500, 400
_PAGE_PX, _LEFT_PX, _BAR_PX, _ROW_PX, _MARGIN = 860.0, 90.0, 12.0, 44.0, 14.0

# kind of event -> (colour, letter in a terminal, in words)
_KINDS = {
    "compute": ("orange", "C", "the device computes"),
    "wait": ("padding", "·", "it waits for a copy"),
    "barrier": ("tint", ":", "it waits for a signal"),
}


def _y(device: int) -> float:
    return 6 + device * _ROW_PX


def _svg(run: devices.Run) -> str:
    count = min(run.mesh.size, _MOST_DEVICES)
    until = max(run.counts.ticks, 1e-9)
    scale, marks = (_PAGE_PX - _LEFT_PX) / until, []
    for device in range(count):
        y = _y(device)
        marks.append(svg_text(_LEFT_PX - 8, y + _BAR_PX - 2, run.mesh.name(device), 11, "ink", SANS, END))
        path = f"M{px(_LEFT_PX)} {px(y + _BAR_PX)}H{px(_PAGE_PX)}"
        marks.append(f'<path d="{path}" stroke="var(--line)" stroke-width=".5"/>')
    shown = [e for e in run.events if e.device < count][:_MOST_EVENTS]
    marks += [_bar(e, scale) for e in shown]
    arrows = [t for t in run.transfers if max(t.source, t.target) < count][:_MOST_ARROWS]
    marks += [_arrow(t, scale, run) for t in arrows]
    y = _y(count) - 18
    for n in range(5):
        end = n == 4
        x = _LEFT_PX + n * (_PAGE_PX - _LEFT_PX) / 4
        words = f"{until * n / 4:,.4g}" + (" ticks" if end else "")
        marks.append(svg_text(x, y, words, 10, "muted", SANS, END if end else ' text-anchor="middle"'))
    marks += _legend(y + 20, {e.kind for e in shown}, bool(arrows))
    w, h = _PAGE_PX + 2 * _MARGIN, y + 26 + 2 * _MARGIN
    return card(w, h, f'<g transform="translate({px(_MARGIN)},{px(_MARGIN)})">{"".join(marks)}</g>')


def _bar(e: Event, scale: float) -> str:
    x, w = _LEFT_PX + e.start * scale, max(1.0, (e.end - e.start) * scale - 0.5)
    edge = "" if e.kind == "compute" else ' stroke="var(--frame)" stroke-width=".6" stroke-dasharray="2 2"'
    about = f" ({e.ref})" if e.ref else ""
    where = f", {e.line}: {e.line.text}" if e.line is not None else ""
    title = f"{_KINDS[e.kind][2]}{about}, ticks {e.start:,.4g}-{e.end:,.4g}{where}"
    return (
        f'<rect x="{px(x)}" y="{px(_y(e.device))}" width="{px(w)}" height="{px(_BAR_PX)}" rx="2" '
        f'fill="var(--{_KINDS[e.kind][0]})"{edge}><title>{html.escape(title)}</title></rect>'
    )


def _arrow(t: Transfer, scale: float, run: devices.Run) -> str:
    """From the sender's row, where a copy starts, to the receiver's, where it has arrived."""
    down = t.target > t.source
    x1, x2 = _LEFT_PX + t.start * scale, _LEFT_PX + t.end * scale
    y1, y2 = _y(t.source) + (_BAR_PX if down else 0), _y(t.target) + (0 if down else _BAR_PX)
    tip = -5.0 if down else 5.0
    where = f", {t.line}: {t.line.text}" if t.line is not None else ""
    title = (
        f"{run.mesh.name(t.source)} to {run.mesh.name(t.target)}: {t.ref}, {human_bytes(t.nbytes)} over "
        f"{plural(t.hops, 'link')}, ticks {t.start:,.4g}-{t.end:,.4g}{where}"
    )
    return (
        f'<g stroke="var(--blue)" fill="var(--blue)" opacity=".75"><title>{html.escape(title)}</title>'
        f'<path d="M{px(x1)} {px(y1)}L{px(x2)} {px(y2 + tip)}" fill="none" stroke-width="1.2"/>'
        f'<path d="M{px(x2)} {px(y2)}l-2.5 {px(tip)}h5z" stroke="none"/></g>'
    )


def _legend(y: float, kinds: set[str], arrows: bool) -> Iterator[str]:
    x = 0.0
    for colour, _, words in (_KINDS[kind] for kind in _KINDS if kind in kinds):
        yield f'<rect x="{px(x)}" y="{px(y - 9)}" width="11" height="11" rx="2" fill="var(--{colour})"/>'
        yield svg_text(x + 16, y, words, 11, "ink", SANS)
        x += 34 + len(words) * 6.2
    if arrows:
        yield f'<path d="M{px(x)} {px(y - 4)}h14" stroke="var(--blue)" stroke-width="1.2"/>'
        yield svg_text(x + 20, y, "a copy: where it starts, and where it has arrived", 11, "ink", SANS)


def _title(run: devices.Run) -> str:
    shape = " x ".join(f"{name}={size}" for name, size in run.mesh.axes.items())
    ends = "It never ends: this is how far it comes." if run.hangs else f"It takes {run.counts.ticks:,.4g} ticks."
    return f"{plural(run.mesh.size, 'device')}, {shape}. {ends}"


def _text_lines(run: devices.Run) -> Iterator[str]:
    columns = max(60, min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns))
    yield from textwrap.wrap(_title(run), columns)
    until, left = max(run.counts.ticks, 1e-9), max(len(run.mesh.name(d)) for d in range(run.mesh.size)) + 2
    for device in range(min(run.mesh.size, _MOST_DEVICES)):
        events = [e for e in run.events if e.device == device]
        yield run.mesh.name(device).rjust(left - 2) + "  " + _text_bar(events, until, columns - left)
    letters = "  ".join(f"{letter} {words}" for _, letter, words in _KINDS.values())
    yield from textwrap.wrap(letters, columns)
    for line, of in _by_line(run.transfers):
        pairs = ", ".join(dict.fromkeys(f"{t.source} → {t.target}" for t in of[:8]))
        sent = f"{plural(len(of), 'copy' if len(of) == 1 else 'copie')}, {human_bytes(sum(t.nbytes for t in of))}"
        yield from textwrap.wrap(f"{line}: {sent}: {pairs}{', ...' if len(of) > 8 else ''}", columns)
    yield from textwrap.wrap(gained([run.counts]), columns)


def _by_line(transfers: Sequence[Transfer]) -> list[tuple[str, list[Transfer]]]:
    found: dict[str, list[Transfer]] = {}
    for t in transfers:
        found.setdefault(str(t.line or "a library"), []).append(t)
    return list(found.items())


def _text_bar(events: Sequence[Event], until: float, wide: int) -> str:
    cells = [" "] * wide
    for e in sorted(events, key=lambda e: e.kind == "compute"):  # what is short is seen beside a long wait
        first, last = int(e.start / until * (wide - 1)), int(e.end / until * (wide - 1))
        cells[first : last + 1] = [_KINDS[e.kind][1]] * (last + 1 - first)
    return "".join(cells).rstrip()


@dataclasses.dataclass(eq=False, repr=False)
class DevicesPicture(Displayed):
    """What `show` returns for a function on several devices. run: None where there is nothing to draw."""

    run: devices.Run | None
    note: str = ""

    @property
    def empty(self) -> bool:
        return self.run is None

    def svg(self) -> str:
        """A standalone SVG file; hovering over a bar or an arrow says what it is, and its line."""
        return _svg(self.run) if self.run is not None else ""

    def text(self) -> str:
        lines = "\n".join(_text_lines(self.run)) if self.run is not None else ""
        return "\n\n".join(filter(None, [self.note, lines]))

    def _repr_html_(self) -> str:
        if self.run is None:
            return sentence_html(self.note)
        words = f"Timeline of {_title(self.run)} {gained([self.run.counts])}"
        head, foot = html.escape(_title(self.run)), html.escape(gained([self.run.counts]))
        return (
            f'<div style="margin:4px 0"><div style="margin:2px 12px 6px;font:12px {SANS}"><b>{head}</b></div>'
            f"{image(_svg(self.run), words)}"
            f'<div style="margin:2px 12px 10px;font:12px {SANS}">{foot}</div></div>{sentence_html(self.note)}'
        )


def on_devices(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DevicesPicture:
    """Runs a function in the machine for several devices; whatever goes wrong becomes the picture's note."""
    from ..diagnose.devices import findings_of

    return DevicesPicture(*tried(fn, lambda: devices.run(fn, *args, detail=False, **kwargs), findings_of))
