"""Parts of SMEM on the clock: since when each is being filled, holds data that is still read, or is copied out."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ..lens.gpu import Event

MOST_SLOTS = 8  # of one CTA
_MOST_LABEL = 24


def slot_events(uses: Iterable[Event]) -> tuple[list[Event], int]:
    """(bars, whose lane is the slot; how many slots of a CTA are left out). Kinds: "load" and "compute" for what fills
    it, "full", and "store" for a copy out of it."""
    by_slot: dict[tuple[int, str], list[Event]] = {}
    refs: dict[str, int] = {}  # in the order in which they are first used
    for use in uses:
        refs.setdefault(ref_of(use.lane), len(refs))
        by_slot.setdefault((use.cta, use.lane), []).append(use)
    events, seen, left = [], dict[int, int](), 0
    for (cta, slot), each in sorted(by_slot.items(), key=lambda item: (refs[ref_of(item[0][1])], item[0][1])):
        seen[cta] = seen.get(cta, 0) + 1
        if seen[cta] > MOST_SLOTS:
            left = max(left, seen[cta] - MOST_SLOTS)
            continue
        events += [Event(cta, slot, kind, start, end) for kind, start, end in _stretches(each) if end > start]
    return events, left


def ref_of(slot: str) -> str:
    """'x_smem' of 'x_smem[1]'."""
    return slot.rpartition("[")[0] or slot


def _stretches(uses: Sequence[Event]) -> Iterator[tuple[str, float, float]]:
    """(kind, start, end), from one filling to the next."""
    turns: list[list[Event]] = []
    for use in sorted(uses, key=lambda u: (u.start, u.end)):
        fills = use.kind in ("load", "compute")
        if not turns or (fills and any(u.kind not in ("load", "compute") for u in turns[-1])):
            turns.append([])
        turns[-1].append(use)
    for turn in turns:
        at = turn[0].start
        for use in turn:
            if use.kind == "read":
                continue
            if use.start > at:
                yield "full", at, use.start
            yield use.kind, max(at, use.start), use.end
            at = max(at, use.end)
        yield "full", at, max(use.end for use in turn)


def short(name: str) -> str:
    """The name of a Ref or a barrier as it stands beside a lane: of a library's, the part that tells it apart."""
    found = re.sub(r"^\w+(?:\[\d+\])*\['(\w+)'\]", r"\1", name)
    return found if len(found) <= _MOST_LABEL else "…" + found[1 - _MOST_LABEL :]
