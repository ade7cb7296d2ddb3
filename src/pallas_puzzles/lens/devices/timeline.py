"""The logical clock of several devices: what takes how long, which links are busy, what overlaps.

A tick is the time in which a link moves 4 KB, the tile of 8 x 128 float32. A device makes 1,024 elements of a result in
a tick, or that many dot products of depth 128; between HBM and VMEM 16 tiles move in a tick. It is a model: it says
what overlaps and what does not, not how fast a chip is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ...ir.capture import SourceLine
from ...ir.meshes import Mesh

TILE_BYTES, ELEMENTS, DEPTH, HBM_TILES = 4096, 1024, 128, 16
_HOP = 0.25  # ticks until the first byte has come over a link


@dataclasses.dataclass(slots=True)
class Event:
    """A stretch of one device. kind: "compute", "wait" or "barrier" (a wait for a signal). start, end: ticks."""

    device: int
    kind: str
    start: float
    end: float
    line: SourceLine | None = None
    ref: str = ""


@dataclasses.dataclass(slots=True)
class Transfer:
    """A copy to another device, or what a collective sends. start, end: ticks. hops: links on its way."""

    source: int
    target: int
    nbytes: int
    hops: int
    start: float
    end: float
    line: SourceLine | None
    ref: str = ""


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a function costs on a mesh, over all devices.

    devices: of the mesh. ici_bytes: sent to other devices. bytes_hops: the same, each byte counted on every link of its
    way. link_bytes: over the busiest link, in one direction. exposed_ici_bytes: sent while neither of the two devices
    computes. copies: to other devices. signals: to semaphores of other devices. waited: ticks that devices wait, in
    all. ticks: until the last device ends.
    """

    devices: int = 1
    ici_bytes: int = 0
    bytes_hops: int = 0
    link_bytes: int = 0
    exposed_ici_bytes: int = 0
    copies: int = 0
    signals: int = 0
    waited: float = 0
    ticks: float = 0


class Timeline:
    """Keeps the time of each device and the load of each link."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.now = [0.0] * mesh.size
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []
        self.signals = 0
        self._last: dict[int, Event] = {}  # by device, while it goes on computing
        self._free: dict[tuple[int, str, int], float] = {}
        self._load: dict[tuple[int, str, int], int] = {}

    def compute(self, device: int, flops: int, product: bool, line: Callable[[], Any]) -> None:
        """Arithmetic of one equation. line: called for the reader's line, where a new stretch begins."""
        took = flops / (2 * DEPTH * ELEMENTS if product else ELEMENTS)
        start = self.now[device]
        self.now[device] = start + took
        last = self._last.get(device)
        if last is not None and last.end == start and last.kind == "compute":
            last.end = self.now[device]
            return
        self._last[device] = Event(device, "compute", start, self.now[device], line())
        self.events.append(self._last[device])

    def wait(self, device: int, until: float, kind: str, line: SourceLine | None, ref: str) -> None:
        start = self.now[device]
        if until > start:
            self.events.append(Event(device, kind, start, until, line, ref))
            self._last.pop(device, None)
            self.now[device] = until

    def local(self, device: int, nbytes: int) -> float:
        """When a copy between HBM and VMEM that starts now has arrived."""
        return self.now[device] + nbytes / (TILE_BYTES * HBM_TILES)

    def send(self, source: int, target: int, nbytes: int, line: SourceLine | None, ref: str) -> tuple[float, float]:
        """(when a copy that starts now has left, when it has arrived)."""
        route = self.mesh.route(source, target)
        start = max([self.now[source], *(self._free.get(link, 0.0) for link in route)])
        leaves = start + nbytes / TILE_BYTES
        for link in route:
            self._free[link] = leaves
            self._load[link] = self._load.get(link, 0) + nbytes
        arrives = leaves + _HOP * len(route)
        self.transfers.append(Transfer(source, target, nbytes, len(route), start, arrives, line, ref))
        return leaves, arrives

    def counts(self) -> Counts:
        computing: list[list[tuple[float, float]]] = [[] for _ in self.now]
        for event in self.events:
            if event.kind == "compute":
                computing[event.device].append((event.start, event.end))
        hidden = sum(t.nbytes * _shared(t, computing) for t in self.transfers)
        sent = sum(t.nbytes for t in self.transfers)
        return Counts(
            devices=self.mesh.size,
            ici_bytes=sent,
            bytes_hops=sum(t.nbytes * t.hops for t in self.transfers),
            link_bytes=max(self._load.values(), default=0),
            exposed_ici_bytes=round(sent - hidden),
            copies=len(self.transfers),
            signals=self.signals,
            waited=sum(e.end - e.start for e in self.events if e.kind != "compute"),
            ticks=max(self.now),
        )


def _shared(t: Transfer, computing: list[list[tuple[float, float]]]) -> float:
    """The part of a copy's time in which one of its two devices computes: of the one that does so longer."""
    if t.end <= t.start:
        return 0.0
    shares = [
        sum(max(0.0, min(b, t.end) - max(a, t.start)) for a, b in computing[device]) for device in (t.source, t.target)
    ]
    return max(shares) / (t.end - t.start)
