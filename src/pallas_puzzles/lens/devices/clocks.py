"""What each device and each copy knows of, which shows whether anything orders two accesses to the same memory.

Vector clocks (Fidge, Mattern): a device counts its own steps, and each half of a copy, its read and its write, happens
once. Who has waited for something knows all that it knew.
"""

import dataclasses
from collections.abc import Iterator

from ..regions import Region
from .findings import Access


class Clock:
    """devices: how many steps of each device are known. copies: a bit for each half of a copy that is."""

    __slots__ = ("copies", "devices")

    def __init__(self, devices: list[int], copies: int = 0) -> None:
        self.devices, self.copies = devices, copies

    def fork(self, half: int) -> "Clock":
        """The clock of a half of a copy that starts now."""
        return Clock(list(self.devices), self.copies | 1 << half)

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


@dataclasses.dataclass(slots=True)
class _Past:
    who: Who
    region: Region
    writes: bool
    access: Access


class History:
    """The accesses to a buffer that a later one may collide with. where: whose memory it is."""

    __slots__ = ("past", "where")

    def __init__(self, where: str) -> None:
        self.past: list[_Past] = []
        self.where = where

    def add(
        self, who: Who, clock: Clock, region: Region, writes: bool, access: Access
    ) -> list[tuple[Access, Who, Region]]:
        """The accesses that collide with a new one, each with the part that they share."""
        found, kept = [], []
        for old in self.past:
            known = old.who.known_to(clock)
            mine = old.who.device == who.device and old.who.half is None and who.half is None
            if known and old.region == region and (writes or (mine and not old.writes)):
                continue  # whoever collides with the old one collides with this one, too
            kept.append(old)
            collide = not known and (writes or old.writes) and old.who != who
            if collide and old.region.meets(region):
                found.append((old.access, old.who, old.region.shared(region)))
        self.past = [*kept, _Past(who, region, writes, access)]
        return found

    def unread(self) -> Iterator[tuple[Access, Region]]:
        """What copies have brought, and nobody has read or written over since."""
        for n, last in enumerate(self.past):
            later = self.past[n + 1 :]
            if last.writes and last.who.half is not None and not any(last.region.meets(each.region) for each in later):
                yield last.access, last.region
