"""Several devices as a picture: a row for each, what it does on the logical clock, and an arrow for each copy."""

import functools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ..diagnose.devices import findings_of
from ..lens import devices
from ..lens.devices import Event, Transfer
from ..text import human_bytes, plural
from .bars import BAR_PX, Chart, Look, Row, Sheet, arrow, columns, source, svg, text_lines
from .costs import gained
from .draw import tried
from .timeline import Timeline

_MOST_DEVICES, _MOST_ARROWS = 16, 400

# kind of event -> (colour, letter in a terminal, in words)
_KINDS = {
    "compute": ("orange", "C", "the device computes"),
    "wait": ("padding", "·", "it waits for a copy"),
    "barrier": ("tint", ":", "it waits for a signal"),
}
_COPIES = "a copy: where it starts, and where it has arrived"


def _about(e: Event) -> str:
    about = f" ({e.ref})" if e.ref else ""
    return f"{_KINDS[e.kind][2]}{about}, ticks {e.start:,.4g}-{e.end:,.4g}{source(e.line)}"


_LOOK = Look(_KINDS, _about, "ticks", frozenset({"wait", "barrier"}), gap=27, arrow="blue")


def _arrows(run: devices.Run, sheet: Sheet) -> Iterator[str]:
    """From the sender's row, where a copy starts, to the receiver's, where it has arrived."""
    drawn = [t for t in run.transfers if max(t.source, t.target) < _MOST_DEVICES]
    for t in drawn[:_MOST_ARROWS]:
        down = t.target > t.source
        title = (
            f"{run.mesh.name(t.source)} to {run.mesh.name(t.target)}: {t.ref}, {human_bytes(t.nbytes)} over "
            f"{plural(t.hops, 'link')}, ticks {t.start:,.4g}-{t.end:,.4g}{source(t.line)}"
        )
        x1, x2 = sheet.left + t.start * sheet.scale, sheet.left + t.end * sheet.scale
        (y1, _), (y2, _) = (sheet.places["", str(device)] for device in (t.source, t.target))
        y1, y2 = (y1 + BAR_PX, y2) if down else (y1, y2 + BAR_PX)
        yield arrow(x1, y1, x2, y2, _LOOK, title, ' opacity=".75"')


def _title(run: devices.Run) -> str:
    shape = " x ".join(f"{name}={size}" for name, size in run.mesh.axes.items())
    ends = "It never ends: this is how far it comes." if run.hangs else f"It takes {run.counts.ticks:,.4g} ticks."
    return f"{plural(run.mesh.size, 'device')}, {shape}. {ends}"


def _senders(run: devices.Run) -> Iterator[str]:
    """Who sends to whom, by the line that does so."""
    by_line: dict[str, list[Transfer]] = {}
    for t in run.transfers:
        by_line.setdefault(str(t.line or "a library"), []).append(t)
    for line, of in by_line.items():
        pairs = ", ".join(dict.fromkeys(f"{t.source} → {t.target}" for t in of[:8]))
        sent = f"{plural(len(of), 'copy' if len(of) == 1 else 'copie')}, {human_bytes(sum(t.nbytes for t in of))}"
        yield from textwrap.wrap(f"{line}: {sent}: {pairs}{', ...' if len(of) > 8 else ''}", columns())


def on_devices(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timeline:
    """Runs a function in the machine for several devices; whatever goes wrong becomes the picture's note."""
    run, note = tried(fn, lambda: devices.run(fn, *args, **kwargs), findings_of)
    if run is None:
        return Timeline([], note, empty=True)
    of = [[e for e in run.events if e.device == device] for device in range(min(run.mesh.size, _MOST_DEVICES))]
    rows = [Row("", str(device), run.mesh.name(device), [events]) for device, events in enumerate(of)]
    drawn = svg(rows, _LOOK, functools.partial(_arrows, run), _COPIES if run.transfers else "")
    title, costs = _title(run), gained([run.counts])
    return Timeline(
        [Chart(drawn, f"Timeline of {title} {costs}", [*text_lines(rows, _LOOK), *_senders(run)], title, costs)], note
    )
