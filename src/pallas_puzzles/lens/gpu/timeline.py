"""The machine's logical clock: what takes how long, who was busy when, and what a kernel costs.

Cycles of one SM, by the chip's published rates. It is a model: each CTA has an SM of its own, bandwidth is shared
evenly among the SMs, all of GMEM is in HBM or, where `in_l2` says so, in L2; an instruction costs what it computes. It
says what overlaps and what does not, not how fast a chip is. benchmarks/gpu.md has it beside an H200.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...ir.capture import SourceLine
from ...ir.ops import holding


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one SM, per cycle. tensor_flops: of 16-bit operands; wider ones take longer in proportion."""

    kind: str
    sms: int
    smem_limit_bytes: int
    gmem_bytes: float
    tensor_flops: float
    latency: float = 700  # cycles from the start of a copy out of GMEM to its first byte
    alu: float = 128
    special: float = 16
    smem_bytes: float = 128
    l2_bytes: float = 39  # that an SM gets when all of them read: measured on an H200


# GMEM bandwidth and dense 16-bit FLOP/s of NVIDIA's data sheets, divided by SMs and clock.
CHIPS = {
    "h100": Chip("NVIDIA H100", 132, 232448, 3350 / 132 / 1.83, 4096),
    "h200": Chip("NVIDIA H200", 132, 232448, 4800 / 132 / 1.83, 4096),
    "b200": Chip("NVIDIA B200", 148, 232448, 8000 / 148 / 1.85, 8192),
}


CTAS_DRAWN = 3  # whose events are kept

_in_l2: contextvars.ContextVar[bool] = contextvars.ContextVar("in_l2", default=False)


def in_l2(active: bool = True) -> contextlib.AbstractContextManager[None]:
    """While active, copies come out of L2: the arrays are small, or many CTAs read the same part at the same time."""
    return holding(_in_l2, active)


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A stretch on the clock. start, end: cycles. cta: its number; lane: "warpgroup 0", "copy" or "tensor".

    kind: "load", "store", "wgmma", "tcgen05", "compute", "wait". ref: the Ref or barrier that it is about. Of a use of
    SMEM: lane: the slot, "x_smem[1]"; kind: "load", "compute" (a thread stores into it), "read", "store" (a copy out of
    it).
    """

    cta: int
    lane: str
    kind: str
    start: float
    end: float
    line: SourceLine | None = None
    ref: str = ""


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


Line = SourceLine | None
_none: Callable[[], Any] = functools.partial(collections.defaultdict, int)


@dataclasses.dataclass
class Counts:
    """What a kernel costs, over all CTAs. Bytes; cycles on the logical clock.

    once_bytes: of the arrays that it is given and makes. gmem_*: by copies and by loads and stores of threads; padding
    beyond an array costs nothing, multicast data counts once; moved_at: the same by line. thread_bytes: those that
    threads load and store themselves. cta_bytes: of GMEM, by the CTA that moves the most. smem_bytes: held at once by
    one CTA.
    arrivals: on barriers. cycles: until the last CTA ends. tensor_busy, copy_busy: summed over CTAs; tensor_idle,
    copy_idle: from a CTA's start to its end, where it uses them at all. waited: how long warpgroups stand at barriers,
    and for copies and products; waited_at: the same by line and cause. idle_at: of tensor_idle, between two wgmmas of a
    CTA, what the warpgroup that started the second one did before: (kind, line, cause). Its kind is "compute", "copy"
    (it waited for one) or "warpgroup" (it waited for another one). Its cause is the line from which on things could not
    go faster: the wait after which no product was left, the start of a copy that came late, or the arrival that did.
    bank_conflicts: in SMEM, see banks.py; conflicts_at: the same by line.
    """

    ctas: int = 0
    once_bytes: int = 0
    gmem_read_bytes: int = 0
    gmem_write_bytes: int = 0
    moved_at: dict[Line, int] = dataclasses.field(default_factory=_none)
    thread_bytes: int = 0
    cta_bytes: int = 0
    smem_bytes: int = 0
    barriers: int = 0
    arrivals: int = 0
    copies: int = 0
    stores: int = 0
    flops: int = 0
    cycles: float = 0
    tensor_busy: float = 0
    tensor_idle: float = 0
    copy_busy: float = 0
    copy_idle: float = 0
    waited: float = 0
    waited_at: dict[tuple[Line, Line], float] = dataclasses.field(default_factory=_none)
    idle_at: dict[tuple[str, Line, Line], float] = dataclasses.field(default_factory=_none)
    bank_conflicts: int = 0
    conflicts_at: dict[Line, int] = dataclasses.field(default_factory=_none)

    @classmethod
    def together(cls, each: "Sequence[Counts]") -> "Counts":
        """Of several kernels, one after the other."""
        total = cls()
        for field in dataclasses.fields(cls):
            values = [getattr(c, field.name) for c in each]
            if field.name.endswith("_at"):
                for line, n in (item for found in values for item in found.items()):
                    getattr(total, field.name)[line] += n
            else:
                together = max if field.name in ("cta_bytes", "smem_bytes") else sum
                setattr(total, field.name, together([0, *values]))
        return total

    @property
    def gmem_bytes(self) -> int:
        """Bytes between GMEM and the SMs."""
        return self.gmem_read_bytes + self.gmem_write_bytes


At = tuple[int, str]  # where something happens: a CTA's number, and a lane of it
# Of a barrier, the last arrival: where and when, and the line from which on it could not come earlier
Last = tuple[At, float, SourceLine | None]
_REMEMBERED = 64  # stretches of a warpgroup's time since its last product
_Stretch = tuple[float, float, str, Line, Line]  # start, end, and the rest as in idle_at


class Engine:
    """A part of an SM that does one thing after another."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def take(self, earliest: float, duration: float) -> tuple[float, float]:
        """(start, end) of work that can begin at `earliest`."""
        start = max(earliest, self.free)
        self.free = start + duration
        self.busy += duration
        return start, self.free


@dataclasses.dataclass(eq=False, slots=True)
class Product:
    """Work of the tensor cores. cycles: of one instruction; left: instructions to come; issued, end: times.

    slices: when they worked on it. on_end: called when the last instruction is over.
    """

    cycles: float
    left: int
    issued: float
    on_end: Callable[["Product"], None]
    end: float = 0.0
    slices: list[tuple[float, float]] = dataclasses.field(default_factory=list)


class TensorCores(Engine):
    """The tensor cores of an SM. A warpgroup's products are done in order. Warpgroups that have some at the same time
    take turns, an instruction each: nothing but their own barriers makes one of them go first."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[Any, collections.deque[Product]] = {}
        self.last: Any = None

    def issue(self, who: Any, product: Product) -> float | None:
        """Returns since when there was nothing to do; None where there was something, and for the first product."""
        self.advance(product.issued)
        idle = self.free if self.busy and not any(self.queues.values()) and self.free < product.issued else None
        self.queues.setdefault(who, collections.deque()).append(product)
        return idle

    def advance(self, until: float) -> None:
        """Does the instructions that start before a time."""
        while (found := self._next()) and found[1] < until:
            self.last, start = found
            product = self.queues[self.last][0]
            self.free = start + product.cycles
            self.busy += product.cycles
            if product.slices and product.slices[-1][1] == start:
                start = product.slices.pop()[0]
            product.slices.append((start, self.free))
            product.left -= 1
            if not product.left:
                product.end = self.free
                self.queues[self.last].popleft()
                product.on_end(product)

    def expected(self, product: Product) -> float:
        """When a product ends, if nothing else is issued."""
        if not product.left:
            return product.end
        tried = TensorCores()
        tried.free, tried.last = self.free, self.last
        every = (p for queue in self.queues.values() for p in queue)
        copies = {id(p): dataclasses.replace(p, on_end=lambda _: None, slices=[]) for p in every}
        tried.queues = {who: collections.deque(copies[id(p)] for p in queue) for who, queue in self.queues.items()}
        tried.advance(math.inf)
        return copies[id(product)].end

    def _next(self) -> tuple[Any, float] | None:
        """(whose instruction is next, when it starts): the next one after `last`, of those that are there first."""
        issued = {who: queue[0].issued for who, queue in self.queues.items() if queue}
        if not issued:
            return None
        start, order = max(self.free, min(issued.values())), list(issued)
        there = [w for w in issued if issued[w] <= start]
        turn = order.index(self.last) + 1 if self.last in issued else 0
        return min(there, key=lambda w: (order.index(w) - turn) % len(order)), start


class Timeline:
    """Events of the first CTAs, and all that is counted."""

    def __init__(self, chip: Chip):
        self.chip = chip
        self.gmem_rate = chip.l2_bytes if _in_l2.get() else chip.gmem_bytes  # bytes a cycle
        self.events: list[Event] = []
        self.uses: list[Event] = []
        self.handovers: list[Handover] = []
        self.counts = Counts()
        self._lately: dict[At, collections.deque[_Stretch]] = collections.defaultdict(
            functools.partial(collections.deque, maxlen=_REMEMBERED)
        )

    def add(self, at: At, kind: str, start: float, end: float, instr: Any, ref: str = "") -> None:
        if at[0] < CTAS_DRAWN and end > start:
            self.events.append(Event(*at, kind, start, end, instr.line, ref))

    def worked(self, at: At, kind: str, start: float, end: float, instr: Any, ref: str = "") -> None:
        """A warpgroup has computed, loaded or stored."""
        self.add(at, kind, start, end, instr, ref)
        self._lately[at].append((start, end, "compute", instr.line, None))

    def waited(self, at: At, start: float, end: float, instr: Any, ref: str = "", last: Last | None = None) -> None:
        """last: the arrival that was waited for; a copy or a product, where there is none."""
        if end > start:
            (_, source), _, cause = last or ((-1, "copy"), end, None)
            self.counts.waited += end - start
            self.counts.waited_at[instr.line, cause] += end - start
            self.add(at, "wait", start, end, instr, ref)
            what = "copy" if source == "copy" else "warpgroup"
            self._lately[at].append((start, end, what, instr.line, cause))

    def idle(self, at: At, start: float, end: float, after: SourceLine | None) -> None:
        """The tensor cores of a CTA had nothing to do until this warpgroup started a product. after: its last wait for
        one."""
        for began, ended, what, line, cause in self._lately.pop(at, ()):
            if (both := min(ended, end) - max(began, start)) > 0:
                self.counts.idle_at[what, line, after if what == "compute" else cause] += both

    def handover(self, at: At, barrier: str, last: Last, since: float) -> None:
        """last: the last arrival; since: when the wait began."""
        (cta, source), arrived, _ = last
        if cta < CTAS_DRAWN and cta == at[0] and source != at[1]:
            end, waited = max(since, arrived), arrived > since
            self.handovers.append(Handover(cta, barrier, source, arrived, at[1], end, waited))
