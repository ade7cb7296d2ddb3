"""The machine's logical clock: what takes how long, who was busy when, and what a kernel costs.

Cycles of one SM, by the chip's published rates. It is a model: bandwidth is shared evenly among the SMs, there is no
L2, an instruction costs what it computes. It says what overlaps and what does not, not how fast a chip is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...ir.capture import SourceLine


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one SM, per cycle. tensor_flops: of 16-bit operands; wider ones take longer in proportion."""

    name: str
    kind: str
    sms: int
    ghz: float
    smem_limit_bytes: int
    gmem_bytes: float
    tensor_flops: float
    latency: float = 700  # cycles from the start of a copy out of GMEM to its first byte
    alu: float = 128
    special: float = 16
    smem_bytes: float = 128


# GMEM bandwidth and dense 16-bit FLOP/s of NVIDIA's data sheets, divided by SMs and clock.
CHIPS = {
    "h100": Chip("h100", "NVIDIA H100", 132, 1.83, 232448, 3350 / 132 / 1.83, 4096),
    "h200": Chip("h200", "NVIDIA H200", 132, 1.83, 232448, 4800 / 132 / 1.83, 4096),
    "b200": Chip("b200", "NVIDIA B200", 148, 1.85, 232448, 8000 / 148 / 1.85, 8192),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch on the clock. start, end: cycles. cta: its number; lane: "warpgroup 0", "copy" or "tensor".

    kind: "load", "store", "wgmma", "tcgen05", "compute", "wait", "arrive". ref: the Ref or barrier that it is about.
    """

    cta: int
    lane: str
    kind: str
    start: float
    end: float
    line: SourceLine | None = None
    ref: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What happens in a part of SMEM. slot: its name, "x_smem[1]". kind: "load", "compute" (a thread stores into it),
    "read", "store" (a copy out of it). start, end: cycles."""

    cta: int
    slot: str
    kind: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Handover:
    """A wait at a barrier, and the last arrival that it was for. waited: whether the arrival came after the wait."""

    cta: int
    barrier: str
    source: str
    arrived: float
    lane: str
    end: float
    waited: bool


@dataclasses.dataclass
class Counts:
    """What a kernel costs, over all CTAs. Bytes; cycles on the logical clock.

    once_bytes: of the arrays that it is given and makes. gmem_*: by copies and by loads and stores of threads; padding
    beyond an array costs nothing, multicast data counts once. thread_bytes: those that threads load and store
    themselves. cta_bytes: of GMEM, by the CTA that moves the most. smem_bytes, tmem_bytes: held at once by one CTA.
    arrivals: on barriers. cycles: until the last CTA ends. tensor_busy, copy_busy: summed over CTAs; tensor_idle,
    copy_idle: from a CTA's start to its end, where it uses them at all. waited: how long warpgroups stand at barriers,
    and for copies and products; waited_at: the same by line. bank_conflicts: in SMEM, see banks.py; conflicts_at: the
    same by line.
    """

    ctas: int = 0
    once_bytes: int = 0
    gmem_read_bytes: int = 0
    gmem_write_bytes: int = 0
    thread_bytes: int = 0
    cta_bytes: int = 0
    smem_bytes: int = 0
    tmem_bytes: int = 0
    barriers: int = 0
    arrivals: int = 0
    copies: int = 0
    stores: int = 0
    products: int = 0
    flops: int = 0
    cycles: float = 0
    tensor_busy: float = 0
    tensor_idle: float = 0
    copy_busy: float = 0
    copy_idle: float = 0
    waited: float = 0
    waited_at: dict[SourceLine | None, float] = dataclasses.field(default_factory=dict)
    bank_conflicts: int = 0
    conflicts_at: dict[SourceLine | None, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def together(cls, each: "Sequence[Counts]") -> "Counts":
        """Of several kernels, one after the other."""
        total = cls()
        for field in dataclasses.fields(cls):
            values = [getattr(c, field.name) for c in each]
            if field.name.endswith("_at"):
                by_line = getattr(total, field.name)
                for line, n in (item for found in values for item in found.items()):
                    by_line[line] = by_line.get(line, 0) + n
            else:
                together = max if field.name in ("cta_bytes", "smem_bytes", "tmem_bytes") else sum
                setattr(total, field.name, together(values) if values else 0)
        return total

    @property
    def gmem_bytes(self) -> int:
        """Bytes between GMEM and the SMs."""
        return self.gmem_read_bytes + self.gmem_write_bytes


class Engine:
    """A part of an SM that does one thing after another: the copy engine, the tensor cores."""

    __slots__ = ("busy", "free")

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def take(self, earliest: float, duration: float) -> tuple[float, float]:
        """(start, end) of work that can begin at `earliest`."""
        start = max(earliest, self.free)
        self.free = start + duration
        self.busy += duration
        return start, self.free


class Timeline:
    """Events of the first CTAs, and all that is counted."""

    def __init__(self, chip: Chip, ctas_drawn: int):
        self.chip, self.ctas_drawn = chip, ctas_drawn
        self.events: list[Event] = []
        self.uses: list[Use] = []
        self.handovers: list[Handover] = []
        self.counts = Counts()

    def add(self, cta: int, lane: str, kind: str, start: float, end: float, instr: Any, ref: str = "") -> None:
        if cta < self.ctas_drawn and end > start:
            self.events.append(Event(cta, lane, kind, start, end, instr.line if instr is not None else None, ref))

    def waited(self, cta: int, lane: str, start: float, end: float, instr: Any, ref: str = "") -> None:
        if end > start:
            self.counts.waited += end - start
            at = self.counts.waited_at
            at[instr.line] = at.get(instr.line, 0.0) + end - start
            self.add(cta, lane, "wait", start, end, instr, ref)

    def use(self, cta: int, slot: str, kind: str, start: float, end: float) -> None:
        if cta < self.ctas_drawn:
            self.uses.append(Use(cta, slot, kind, start, end))

    def handover(self, cta: int, barrier: str, source: tuple[int, str, float], lane: str, since: float) -> None:
        """source: the CTA, lane and time of the last arrival; since: when the wait began."""
        if cta < self.ctas_drawn and source[0] == cta and source[1] != lane:
            end, waited = max(since, source[2]), source[2] > since
            self.handovers.append(Handover(cta, barrier, source[1], source[2], lane, end, waited))
