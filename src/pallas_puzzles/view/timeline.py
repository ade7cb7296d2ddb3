"""The timeline of kernels for a GPU: who was busy when on the machine's logical clock, as a picture and as text.

A row for each warpgroup of a CTA, one for its tensor cores and one for its copy engine; copies that are on their way at
the same time lie below one another. Below them a row for each slot in SMEM, as it is filled and emptied, and from an
arrival at a barrier an arrow to who waits for it: so that double buffering is seen at a glance.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..diagnose.gpu import findings_of
from ..lens import gpu
from ..lens.gpu import Event, Launched
from ..text import capital, human_bytes, plural
from .bars import BAR_PX, ROW_PX, Chart, Look, Row, Sheet, arrow, source, svg, text_lines, tracks
from .costs import gained
from .draw import Displayed, html_table, sentence_html, tried
from .slots import ref_of, short, slot_events

KERNELS_DRAWN = 4
_HANDOVERS = "an arrival at a barrier, and who waits for it; pale: nobody had to wait"
_MOST_ARROWS, _MOST_REFS = 200, 4

# kind of event -> (colour, letter in a terminal, in words)
_KINDS = {
    "load": ("blue", "L", "copy from GMEM"),
    "store": ("green", "S", "copy to GMEM"),
    "product": ("vermilion", "P", "product of the tensor cores"),
    "compute": ("orange", "C", "a warpgroup loads, computes, stores"),
    "wait": ("padding", "·", "a warpgroup waits"),
    "full": ("tint", "=", "a slot of SMEM holds data that is still needed"),
}


def _events(launched: Launched) -> list[Event]:
    """What the first CTAs do, each of a kind that is drawn."""

    def kind(event: Event) -> str:
        if event.lane.startswith("warpgroup"):
            return "wait" if event.kind == "wait" else "compute"
        return event.kind if event.kind in _KINDS else "product"

    return [dataclasses.replace(event, kind=kind(event)) for event in launched.events]


def _rows(events: Iterable[Event]) -> list[Row]:
    """The lanes of the first CTAs: warpgroups, tensor cores, copy engine, slots in SMEM as they are first used."""
    lanes: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        lanes.setdefault((event.cta, event.lane), []).append(event)

    def order(key: tuple[int, str]) -> tuple[int, int, str]:
        cta, lane = key
        return (cta, 0, lane) if lane.startswith("warpgroup") else (cta, {"tensor": 1, "copy": 2}.get(lane, 3), "")

    called = {"tensor": "tensor cores", "copy": "copy engine"}
    in_order = sorted(lanes.items(), key=lambda pair: order(pair[0]))
    return [Row(f"CTA {cta}", lane, called.get(lane, short(lane)), tracks(each)) for (cta, lane), each in in_order]


# --- the drawing -----------------------------------------------------------------------------------------------------


def _arrows(launched: Launched, sheet: Sheet) -> Iterator[str]:
    """From each arrival at a barrier to who waits for it; paler where nobody had to wait."""
    places = sheet.places
    drawn = [h for h in launched.handovers if h.end <= sheet.until and (f"CTA {h.cta}", h.lane) in places]
    for handover in drawn[:_MOST_ARROWS]:
        if (source := places.get((f"CTA {handover.cta}", handover.source))) is None:
            continue
        y, row = source
        last = (n for n, track in enumerate(row.tracks) if any(abs(e.end - handover.arrived) < 1e-6 for e in track))
        y1 = y + next(last, 0) * ROW_PX + BAR_PX / 2
        target = places[f"CTA {handover.cta}", handover.lane][0]
        y2 = target + (BAR_PX if target < y1 else 0.0)
        x1, x2 = sheet.left + handover.arrived * sheet.scale, sheet.left + handover.end * sheet.scale
        title = f"{short(handover.barrier)}: {handover.lane} goes on, cycle {handover.end:,.0f}"
        yield arrow(x1, y1, x2, y2, _LOOK, title, "" if handover.waited else ' opacity=".35"')


def _words(event: Event) -> str:
    """'copy from GMEM of x_gmem, cycles 0-3,063, a.py:7: plgpu.copy_gmem_to_smem(...)'."""
    about = f" for {event.ref}" if event.kind == "wait" and event.ref else f" of {event.ref}" if event.ref else ""
    return f"{_KINDS[event.kind][2]}{about}, cycles {event.start:,.0f}-{event.end:,.0f}{source(event.line)}"


_LOOK = Look(_KINDS, _words, "cycles")

# --- the table, and the text -----------------------------------------------------------------------------------------

_HEADS = ("line", "what", "times", "cycles", "waited for")


def _table(events: Iterable[Event]) -> list[tuple[str, str, str, str, str]]:
    """What each line of the reader's does in the first CTAs, in the order of the lines."""
    found: dict[Any, list[Event]] = {}
    for event in events:
        found.setdefault((event.line, event.kind), []).append(event)
    rows = []
    in_order = sorted(found.items(), key=lambda each: (each[0][0].file, each[0][0].line) if each[0][0] else ("~", 0))
    for (line, kind), events in in_order:
        cycles = sum(e.end - e.start for e in events)
        refs = list(dict.fromkeys(short(ref_of(e.ref)) for e in events if e.ref and kind == "wait"))
        waited_for = ", ".join([*refs[:_MOST_REFS], *(["..."] if len(refs) > _MOST_REFS else [])])
        where = f"{line}: {line.text}" if line is not None else "in a library"
        rows.append((where, _KINDS[kind][2], f"{len(events)}", f"{cycles:,.0f}", waited_for))
    return rows


def _title(launched: Launched) -> str:
    kernel, c = launched.kernel, launched.counts
    drawn = len({event.cta for event in launched.events})
    some = f", of which {drawn} are drawn" if c.ctas > drawn else ""
    threads = plural(kernel.threads, "warpgroup") + (" each" if c.ctas > 1 else "")
    size = f"{human_bytes(c.smem_bytes)} of SMEM" if c.smem_bytes else "no SMEM"
    ends = "It never ends: this is how far it comes." if launched.hangs else f"It takes {c.cycles:,.0f} cycles."
    return f"{kernel.name}: {plural(c.ctas, 'CTA')}{some}, {threads}, {size}. {ends}"


def _costs(launched: Launched) -> str:
    """Bytes, SMEM, barriers, FLOPs: in sentences."""
    c = launched.counts
    words = [gained([c])]
    if c.barriers:
        each = plural(c.barriers // max(1, c.ctas), "barrier")
        words.append(f"A CTA has {each}; {plural(c.arrivals, 'arrival')} in all.")
    if c.flops:
        ratio = f": {c.flops / c.gmem_bytes:.3g} per byte of GMEM" if c.gmem_bytes else ""
        words.append(f"It computes {c.flops:,} FLOPs{ratio}.")
    if c.bank_conflicts:
        words.append(f"SMEM has {plural(c.bank_conflicts, 'bank conflict')}.")
    return " ".join(words)


def _alt(launched: Launched) -> str:
    """The picture in words."""
    c = launched.counts
    engines = (("tensor cores", c.tensor_busy, c.tensor_idle), ("copy engines", c.copy_busy, c.copy_idle))
    busy = [f"the {name} are busy for {b:,.0f} of {b + idle:,.0f} cycles" for name, b, idle in engines if b]
    words = "; ".join([*busy, f"the warpgroups wait for {c.waited:,.0f} cycles"])
    return f"Timeline of {_title(launched)} {capital(words)}."


@dataclasses.dataclass(eq=False, repr=False)
class Timeline(Displayed):
    """What `show` returns for kernels for a GPU, one chart for each, and for a function on several devices.

    note: what is missing and why. empty: whether nothing comes out: there is no kernel, or none that is written.
    """

    charts: list[Chart]
    note: str = ""
    empty: bool = False

    def svg(self, call: int = 0) -> str:
        """One kernel as a standalone SVG file; hovering over a bar says what it is, and its line."""
        return self.charts[call].svg

    def text(self) -> str:
        """The picture in characters."""
        return "\n\n".join(filter(None, [self.note, *("\n".join(chart.lines()) for chart in self._drawn())]))

    def _repr_html_(self) -> str:
        return "".join(chart.html() for chart in self._drawn()) + sentence_html(self.note)

    def _drawn(self) -> list[Chart]:
        return [] if self.empty and self.note else self.charts


def _chart(launched: Launched) -> Chart:
    events, (in_slots, left_out) = _events(launched), slot_events(launched.uses)
    rows, legend = _rows([*events, *in_slots]), _HANDOVERS if launched.handovers else ""
    notes = [f"{plural(left_out, 'more slot')} of SMEM in a CTA are not drawn"] if left_out else []
    drawn = svg(rows, _LOOK, functools.partial(_arrows, launched), legend, notes)
    table = html_table(dict.fromkeys(_HEADS, ""), _table(events), "w<>>w")
    return Chart(drawn, _alt(launched), [*text_lines(rows, _LOOK)], _title(launched), _costs(launched), table)


def timeline(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timeline:
    """Runs a function in the machine for GPU kernels; whatever goes wrong becomes the picture's note."""
    run, note = tried(fn, lambda: gpu.run(fn, *args, **kwargs), findings_of)
    calls = run.calls if run is not None else []
    more = len(calls) - KERNELS_DRAWN
    left_out = f"and {plural(more, 'more kernel')} not drawn" if more > 0 else ""
    empty = not any(each.counts.gmem_write_bytes for each in calls)
    charts = [_chart(each) for each in calls[:KERNELS_DRAWN]]
    return Timeline(charts, " ".join(filter(None, [note, left_out])), empty)
