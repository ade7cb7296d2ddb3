"""What each device and each copy knows of, which shows whether anything orders two accesses to the same memory.

Vector clocks (Fidge, Mattern): a device counts its own steps, and each half of a copy, its read and its write, happens
once. Who has waited for something knows all that it knew.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .findings import Access

if TYPE_CHECKING:
    from ...ir.places import Place


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


Box = tuple[tuple[int, int], ...]


def box_of(place: "Place", shape: tuple[int, ...]) -> tuple[Box, np.ndarray | None]:
    """(the smallest box around a place, which of its elements are meant where that is not all)."""
    if not place.steps:
        return tuple((0, n) for n in shape), None
    key = place.steps[0]
    if len(place.steps) == 1 and isinstance(key, tuple):
        parts = [k for k in key if k is not Ellipsis]
        if all(isinstance(k, int) or (isinstance(k, slice) and k.step in (1, None)) for k in parts):
            found = [
                (k, k + 1) if isinstance(k, int) else (k.start, min(k.stop, n))
                for k, n in zip(parts, shape, strict=False)
            ]
            return (*found, *((0, n) for n in shape[len(found) :])), None
    mask = np.zeros(shape, bool)
    place.set(mask, True, marks=True)
    hits = [np.flatnonzero(mask.any(axis=tuple(a for a in range(mask.ndim) if a != d))) for d in range(mask.ndim)]
    if any(not len(h) for h in hits):
        return tuple((0, 0) for _ in shape), None
    box = tuple((int(h[0]), int(h[-1]) + 1) for h in hits)
    inside = mask[tuple(slice(*b) for b in box)]
    return box, None if inside.all() else mask


@dataclasses.dataclass(slots=True)
class _Past:
    who: Who
    box: Box
    mask: np.ndarray | None
    writes: bool
    access: Access


class History:
    """The accesses to a buffer that a later one may collide with."""

    __slots__ = ("past",)

    def __init__(self) -> None:
        self.past: list[_Past] = []

    def add(
        self, who: Who, clock: Clock, area: tuple[Box, np.ndarray | None], writes: bool, access: Access
    ) -> list[tuple[Access, Who, Box]]:
        """The accesses that collide with a new one, each with the part that they share."""
        (box, mask), found, kept = area, [], []
        for old in self.past:
            known = old.who.known_to(clock)
            mine = old.who.device == who.device and old.who.half is None and who.half is None
            if known and mask is None and old.box == box and (writes or (mine and not old.writes)):
                continue  # whoever collides with the old one collides with this one, too
            kept.append(old)
            if known or not (writes or old.writes) or old.who == who:
                continue
            shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(old.box, box, strict=True))
            if any(a >= b for a, b in shared):
                continue
            masks = [m[tuple(slice(*b) for b in shared)] for m in (old.mask, mask) if m is not None]
            if masks and not np.logical_and.reduce(masks).any():
                continue
            found.append((old.access, old.who, shared))
        kept.append(_Past(who, box, mask, writes, access))
        self.past = kept
        return found


def named(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """'o_ref[3]', 'buf[0, 8:16]': as a reader would write it."""
    keys = [
        ":" if (a, b) == (0, n) else str(a) if b - a == 1 else f"{a}:{b}" for (a, b), n in zip(box, shape, strict=True)
    ]
    while keys and keys[-1] == ":":
        keys.pop()
    return f"{name}[{', '.join(keys)}]" if keys else name
