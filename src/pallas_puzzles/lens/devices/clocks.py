"""What each device and each copy knows of, which shows whether anything orders two accesses to the same memory.

Vector clocks (Fidge, Mattern): a device counts its own steps, and each half of a copy, its read and its write, happens
once. Who has waited for something knows all that it knew.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from ..regions import Region
from .findings import Access


@dataclasses.dataclass(slots=True)
class Clock:
    """devices: how many steps of each device are known. copies: a bit for each half of a copy that is."""

    devices: list[int]
    copies: int = 0

    def join(self, other: "Clock") -> None:
        self.devices = list(map(max, self.devices, other.devices))
        self.copies |= other.copies


@dataclasses.dataclass(frozen=True, slots=True)
class Who:
    """A device, or half of a copy. half: its number; None for a device, of which count is the step."""

    device: int
    count: int
    half: int | None = None

    def known_to(self, clock: Clock) -> bool:
        return clock.devices[self.device] >= self.count if self.half is None else bool(clock.copies >> self.half & 1)


class _Past(NamedTuple):
    who: Who
    region: Region
    access: Access

    @property
    def writes(self) -> bool:
        return self.access.verb == "writes"


class History:
    """The accesses to a buffer that a later one may collide with."""

    def __init__(self) -> None:
        self.past: list[_Past] = []

    def add(self, who: Who, clock: Clock, region: Region, access: Access) -> list[tuple[_Past, Region]]:
        """The accesses that collide with a new one, each with the part that they share."""
        new, found, kept = _Past(who, region, access), [], []
        for old in self.past:
            known = old.who.known_to(clock)
            mine = old.who.device == who.device and old.who.half is None and who.half is None
            if known and old.region == region and (new.writes or (mine and not old.writes)):
                continue  # whoever collides with the old one collides with this one, too
            kept.append(old)
            collide = not known and (new.writes or old.writes) and old.who != who
            if collide and old.region.meets(region):
                found.append((old, old.region.shared(region)))
        self.past = [*kept, new]
        return found

    def unread(self) -> Iterator[tuple[Access, Region]]:
        """What copies have brought, and nobody has read or written over since."""
        for n, last in enumerate(self.past):
            later = self.past[n + 1 :]
            if last.writes and last.who.half is not None and not any(last.region.meets(each.region) for each in later):
                yield last.access, last.region
