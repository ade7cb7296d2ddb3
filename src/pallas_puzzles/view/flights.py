"""The copies that a kernel for a TPU starts itself, over what it computes: so that overlap is seen at a glance.

Time is the order of the program. Each computation, and each wait for a copy that nothing overlaps, is drawn equally
long; all else takes no time. A copy's bar goes from its start to the wait after which it has surely arrived.
"""

from collections.abc import Iterator

from ..lens.flight import Flight, Moment, Transfer
from ..lens.gpu.timeline import Event
from ..lens.machine import Trace
from ..text import human_bytes, plural
from .bars import Look, Row, source, svg, text_lines, tracks
from .slots import slot_events

_MOST_MOMENTS = 400  # of one picture: what comes after is left out

# kind of event -> (colour, letter in a terminal, in words)
_KINDS = {
    "load": ("blue", "L", "copy from HBM on its way"),
    "store": ("green", "S", "copy to HBM on its way"),
    "local": ("purple", "K", "another copy on its way"),
    "compute": ("orange", "C", "the kernel loads, computes, stores"),
    "wait": ("padding", "·", "the kernel waits, and nothing is computed"),
    "full": ("tint", "=", "the slot holds data that is still needed"),
}


def _about(event: Event) -> str:
    return f"{_KINDS[event.kind][2]}{f': {event.ref}' if event.ref else ''}{source(event.line)}"


_LOOK = Look(_KINDS, lambda event: event.kind, _about, "")


def has_flights(trace: Trace) -> bool:
    """Whether a kernel starts copies to or from HBM itself. (A pipeline inside of it has the flights of its kernel.)"""
    return not trace.call.inside and any(t.hbm for t in trace.flight.transfers)


def flights_svg(trace: Trace) -> str:
    """The core, its copies and the slots as a standalone SVG file; hovering over a bar says what it is."""
    rows, left_out = _rows(trace.flight)
    return svg(rows, _LOOK, notes=_notes(trace.flight, left_out))


def flights_text(trace: Trace) -> Iterator[str]:
    """The same in characters."""
    return text_lines(_rows(trace.flight)[0], _LOOK)


def flights_alt(trace: Trace) -> str:
    """The picture in words."""
    flight = trace.flight
    exposed = sum(t.exposed for t in flight.transfers)
    return (
        f"Timeline of what {trace.call.name} copies itself, {plural(len(flight.transfers), 'time')}: nothing is "
        f"computed during {exposed} of these copies, {human_bytes(flight.exposed_bytes)}."
    )


def _notes(flight: Flight, left_out: int) -> list[str]:
    notes = [
        "From left to right: the order of the program. Each computation is drawn equally long,",
        "and so is each wait for a copy during which nothing is computed.",
    ]
    if len(flight.moments) > _MOST_MOMENTS:
        notes.append(f"The first {_MOST_MOMENTS} of {len(flight.moments):,} starts, waits and computations are drawn.")
    return notes + ([f"{plural(left_out, 'more slot')} not drawn."] if left_out else [])


def _rows(flight: Flight) -> tuple[list[Row], int]:
    """The core, its copies, and the memory that they use; and how many slots are left out."""
    moments = flight.moments[:_MOST_MOMENTS]
    times = list(_clock(moments))
    last = times[-1] if times else 0.0
    ends = {id(t): time for time, moment in zip(times[1:], moments, strict=True) for t in moment.transfers}
    core = [e for pair in zip(times, times[1:], moments, strict=False) if (e := _of_core(*pair)) is not None]
    copies: list[Event] = []
    uses: list[Event] = []
    for time, moment in zip(times, moments, strict=False):
        if moment.kind == "start":
            for t in moment.transfers:
                end = ends[id(t)] if t.end is not None and t.end < len(moments) else last
                copies.append(Event(0, "copies", _kind(t), time, end, t.line, t.target if t.comes_in else t.source))
                uses += _uses_of(t, time, end)
    for start, end, moment in zip(times, times[1:], moments, strict=False):
        uses += [Event(0, slot, "compute" if stored else "read", start, end) for slot, stored in moment.uses]
    copied = {use.lane for use in uses if use.kind in ("load", "store")}
    in_slots, left_out = slot_events(use for use in uses if use.lane in copied)
    lanes = {"core": core, "copies": copies}
    for event in in_slots:
        lanes.setdefault(event.lane, []).append(event)
    return [Row("", lane, lane, tracks(events)) for lane, events in lanes.items() if events], left_out


def _clock(moments: list[Moment]) -> Iterator[float]:
    """When each moment begins, and when the last one ends."""
    time = 0.0
    for moment in moments:
        yield time
        waits = moment.kind == "wait" and any(t.exposed for t in moment.transfers)
        time += 1.0 if waits or moment.kind == "compute" else 0.0
    yield time


def _of_core(start: float, end: float, moment: Moment) -> Event | None:
    if end == start:
        return None
    kind = "compute" if moment.kind == "compute" else "wait"
    return Event(0, "core", kind, start, end, moment.line, "")


def _kind(transfer: Transfer) -> str:
    return "local" if not transfer.hbm else "load" if transfer.comes_in else "store"


def _uses_of(transfer: Transfer, start: float, end: float) -> Iterator[Event]:
    """What a copy does with memory that is not HBM."""
    for (buffer, _, written), name in zip(transfer.parts, (transfer.source, transfer.target), strict=True):
        if buffer.space not in ("any", "hbm"):
            yield Event(0, name, "load" if written else "store", start, end)
