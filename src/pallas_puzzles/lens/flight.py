"""Copies that are on their way: which memory they use until a wait says that they have arrived, and what is computed
meanwhile.

A wait on a semaphore says that so many bytes have come, and not whose. So a copy has surely arrived only when all that
was started on its semaphore has been waited for.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.capture import SourceLine, line_of
from ..ir.held import Kept
from ..ir.places import Place
from .memory import Buffer
from .regions import Region, region_of


@dataclasses.dataclass(eq=False)
class Transfer:
    """One copy that a kernel started, from a part of a Ref, src, to one of another, dst.

    It reads and writes as late as possible: when somebody waits for it. value, known: what it has read, if it has.

    start, end: of its flight, as numbers of moments (see Flight.moments); end is None while nobody knows that it has
    arrived. work: FLOPs before it. exposed: nothing was computed between. passed: a wait on its semaphore has returned,
    which may have been for another copy. kept_bytes: of values loaded from its target that are needed after it has
    started, see `ir.held.kept`; kept_of: one of the loads. Or of values that are computed before its wait and needed
    after it; then kept_of is None. line, waited_at, loaded_at: the reader's, of the start, the wait and that load.
    """

    src: Buffer
    reads: Place
    dst: Buffer
    writes: Place
    eqn: Any
    value: np.ndarray | None = None
    known: Any = None
    start: int = 0
    work: float = 0.0
    end: int | None = None
    exposed: bool = False
    kept_bytes: int = 0
    kept_of: Any = None
    passed: bool = False
    wait_eqn: Any = None

    @functools.cached_property
    def parts(self) -> list[tuple[Buffer, Region, bool]]:
        """The memory that it uses, and whether it writes there."""
        ends = (self.src, self.reads, False), (self.dst, self.writes, True)
        return [(ref, region_of(place, ref.shape), writes) for ref, place, writes in ends]

    @property
    def source(self) -> str:
        """ "x_buf[1]"."""
        return label(self.src.name, self.parts[0][1])

    @property
    def target(self) -> str:
        return label(self.dst.name, self.parts[1][1])

    @property
    def nbytes(self) -> int:
        return self.writes.nbytes

    @property
    def hbm(self) -> bool:
        """Whether it is to or from HBM."""
        return bool({"any", "hbm"} & {self.src.space, self.dst.space})

    @property
    def comes_in(self) -> bool:
        """Whether it is out of HBM."""
        return self.src.space in ("any", "hbm")

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn)

    @property
    def loaded_at(self) -> SourceLine | None:
        return line_of(self.kept_of)

    @property
    def waited_at(self) -> SourceLine | None:
        return line_of(self.wait_eqn)


@dataclasses.dataclass(eq=False, slots=True)
class Semaphore:
    """count: what has been signalled, or has arrived. due: (what brings more, how much), in the order of the starts.

    open: copies that no wait has named. A wait takes bytes, whichever copy has brought them. flying: copies that may be
    on their way; owed: how much was started or signalled and not waited for.
    """

    name: str
    count: int = 0
    due: list[tuple[Callable[[Transfer], None], Transfer, int]] = dataclasses.field(default_factory=list)
    open: list[Transfer] = dataclasses.field(default_factory=list)
    flying: list[Transfer] = dataclasses.field(default_factory=list)
    owed: int = 0

    def arrive(self, needed: float) -> None:
        """Lets as many copies arrive as it takes."""
        while self.due and self.count < needed:
            happen, copy, nbytes = self.due.pop(0)
            happen(copy)
            self.count += nbytes

    def named(self, target: str) -> None:
        """A wait names a copy; or another one of as many bytes, and then it is for the oldest."""
        if self.open:
            self.open.pop(next((n for n, copy in enumerate(self.open) if copy.target == target), 0))


@dataclasses.dataclass(slots=True)
class Moment:
    """Something that a kernel did, in the order of the program.

    kind: "start", "wait" or "compute". flops: what was computed, from one copy or wait to the next; eqn: what began it.
    transfers: those that are started, or known to have arrived. uses: parts of scratch memory, each with whether it was
    stored into.
    """

    kind: str
    eqn: Any
    flops: float = 0.0
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    uses: list[tuple[str, bool]] = dataclasses.field(default_factory=list)

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn)


class Flight:
    """The copies of one call. expected: it has semaphores, so what it does before its first copy is noted, too.

    kept: of each dma_start and dma_wait, the large values that are needed after it.
    """

    def __init__(self, expected: bool = False, kept: Mapping[int, Sequence[Kept]] | None = None) -> None:
        self.noted = expected
        self.kept = kept or {}
        self.loaded: dict[int, tuple[Buffer, Region]] = {}  # id() of a `get` -> from where it has loaded last
        self.transfers: list[Transfer] = []
        self.moments: list[Moment] = []
        self.open: dict[Buffer, list[tuple[Transfer, Semaphore]]] = {}  # copies that use it, on their way
        self.work = self.carried = 0.0  # FLOPs; FLOPs x bytes on their way
        self.bytes_open = 0

    def start(self, transfer: Transfer, semaphore: Semaphore, amount: int) -> None:
        self.noted = True
        transfer.start, transfer.work = len(self.moments), self.work
        self.moments.append(Moment("start", transfer.eqn, transfers=[transfer]))
        self.transfers.append(transfer)
        semaphore.flying.append(transfer)
        semaphore.owed += amount
        for buffer, _, _ in transfer.parts:
            self.open.setdefault(buffer, []).append((transfer, semaphore))
        self.bytes_open += transfer.nbytes if transfer.hbm else 0
        for value in self.kept.get(id(transfer.eqn), ()):
            lost = [load for load in value.loads if self._overwrites(transfer, load)]
            transfer.kept_bytes += value.nbytes if lost else 0
            transfer.kept_of = lost[0] if lost else transfer.kept_of

    def _overwrites(self, transfer: Transfer, load: Any) -> bool:
        """Whether a copy is into memory that a `get` has loaded."""
        if id(load) not in self.loaded:
            return False
        buffer, part = self.loaded[id(load)]
        return any(written and other is buffer and part.meets(there) for other, there, written in transfer.parts)

    def waited(self, semaphore: Semaphore, amount: int | None, eqn: Any) -> None:
        """A wait for so much has returned. None: for all there is."""
        semaphore.owed = 0 if amount is None else max(0, semaphore.owed - amount)
        arrived: list[Transfer] = []
        if semaphore.owed == 0:
            arrived, semaphore.flying = semaphore.flying, []
        for transfer in semaphore.flying:
            transfer.passed = True
        for transfer in arrived:
            transfer.end, transfer.wait_eqn = len(self.moments), eqn
            transfer.exposed = transfer.work == self.work
            self.bytes_open -= transfer.nbytes if transfer.hbm else 0
            for buffer, _, _ in transfer.parts:
                self.open[buffer].remove((transfer, semaphore))
        over = sum(value.nbytes for value in self.kept.get(id(eqn), ()))
        if arrived and over > arrived[0].kept_bytes:
            arrived[0].kept_bytes, arrived[0].kept_of = over, None
        if arrived:
            self.moments.append(Moment("wait", eqn, transfers=arrived))

    def computed(self, eqn: Any, flops: float) -> None:
        self.work += flops
        self.carried += flops * self.bytes_open
        if self.noted:
            self._computing(eqn).flops += flops

    def _computing(self, eqn: Any) -> Moment:
        """The computation that is going on."""
        if not self.moments or self.moments[-1].kind != "compute":
            self.moments.append(Moment("compute", eqn))
        return self.moments[-1]

    def touched(self, buffer: Buffer, place: Place, writes: bool, eqn: Any) -> None:
        """Notes a load or a store, of memory that copies may use."""
        if buffer.role == "scratch":
            part = region_of(place, buffer.shape)
            if not writes:
                self.loaded[id(eqn)] = buffer, part
            use = label(buffer.name, part), writes
            uses = self._computing(eqn).uses
            if use not in uses:
                uses.append(use)

    def clashes(self, buffer: Buffer, place: Place, writes: bool) -> Iterator[tuple[str, Transfer, Semaphore]]:
        """Copies on their way that use an access's memory: (what is wrong, the copy, its semaphore).

        What is wrong: "no-wait" (it is still written), "reused" (it is still read) or "shared-semaphore" (a wait has
        returned, and does not say for which copy).
        """
        known = self.open.get(buffer)
        if not known:
            return
        part = region_of(place, buffer.shape)
        for transfer, semaphore in known:
            for other, there, written in transfer.parts:
                if other is buffer and (written or writes) and part.meets(there):
                    yield (
                        "shared-semaphore" if transfer.passed else "no-wait" if written else "reused",
                        transfer,
                        semaphore,
                    )

    @property
    def exposed_bytes(self) -> int:
        """Of copies between HBM and VMEM: those during whose flight nothing was computed."""
        return sum(t.nbytes for t in self.transfers if t.hbm and (t.exposed or t.end is None))

    @property
    def kept_bytes(self) -> int:
        """What values take of VMEM, or of time: a copy overwrites what they were loaded from, or is waited for."""
        return max((t.kept_bytes for t in self.transfers), default=0)

    @property
    def in_flight_bytes(self) -> float:
        """Of copies between HBM and VMEM that are on their way while the kernel computes, on average over its FLOPs."""
        return self.carried / self.work if self.work else 0.0


def label(name: str, part: Region) -> str:
    """'x_buf[1]' of the part of x_buf of which only that index of its first dimension is there; 'x_hbm[64:128]'."""
    return name if part.cells is not None else part.named(name, 1)
