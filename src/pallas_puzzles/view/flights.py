"""The copies that a kernel for a TPU starts itself, over what it computes: so that overlap is seen at a glance.

Time is the order of the program. Each computation, and each wait for a copy that nothing overlaps, is drawn equally
long; all else takes no time. A copy's bar goes from its start to the wait after which it has surely arrived.
"""

from collections.abc import Iterator

from ..lens.flight import Flight, Moment
from ..lens.gpu.timeline import Event
from ..lens.machine import Trace
from ..text import human_bytes, plural
from .bars import Chart, Look, Row, source, svg, text_lines, tracks
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


_LOOK = Look(_KINDS, _about, "")


def flights(trace: Trace) -> Chart | None:
    """The core, its copies and the slots; None for a kernel that starts no copies to or from HBM itself.

    (A pipeline inside of it has the flights of its kernel.)
    """
    flight = trace.flight
    if trace.call.inside or not any(t.hbm for t in flight.transfers):
        return None
    rows, left_out = _rows(flight)
    notes = [
        "From left to right: the order of the program. Each computation is drawn equally long,",
        "and so is each wait for a copy during which nothing is computed.",
    ]
    if len(flight.moments) > _MOST_MOMENTS:
        notes.append(f"The first {_MOST_MOMENTS} of {len(flight.moments):,} starts, waits and computations are drawn.")
    if left_out:
        notes.append(f"{plural(left_out, 'more slot')} not drawn.")
    exposed = sum(t.exposed for t in flight.transfers)
    alt = (
        f"Timeline of what {trace.call.name} copies itself, {plural(len(flight.transfers), 'time')}: nothing is "
        f"computed during {exposed} of these copies, {human_bytes(flight.exposed_bytes)}."
    )
    return Chart(svg(rows, _LOOK, notes=notes), alt, [*text_lines(rows, _LOOK)])


def _rows(flight: Flight) -> tuple[list[Row], int]:
    """The core, its copies, and the memory that they use; and how many slots are left out."""
    moments = flight.moments[:_MOST_MOMENTS]
    times = list(_clock(moments))
    last = times[-1]
    ends = {id(t): time for time, moment in zip(times[1:], moments, strict=True) for t in moment.transfers}
    lanes: dict[str, list[Event]] = {"core": [], "copies": []}
    copied: list[Event] = []
    used: list[Event] = []
    for start, end, moment in zip(times, times[1:], moments, strict=False):
        if end > start:
            lanes["core"].append(Event(0, "core", moment.kind, start, end, moment.line))
        used += [Event(0, slot, "compute" if stored else "read", start, end) for slot, stored in moment.uses]
        for t in moment.transfers if moment.kind == "start" else ():
            arrives = ends[id(t)] if t.end is not None and t.end < len(moments) else last
            kind, name = ("load" if t.comes_in else "store") if t.hbm else "local", t.target if t.comes_in else t.source
            lanes["copies"].append(Event(0, "copies", kind, start, arrives, t.line, name))
            for (buffer, _, written), slot in zip(t.parts, (t.source, t.target), strict=True):
                if buffer.space not in ("any", "hbm"):
                    copied.append(Event(0, slot, "load" if written else "store", start, arrives))
    slots = {use.lane for use in copied}
    in_slots, left_out = slot_events([*copied, *(use for use in used if use.lane in slots)])
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
