"""Copies that are on their way: which memory they use until a wait says that they have arrived, and what is computed
meanwhile.

A wait on a semaphore says that so many bytes have come, and not whose. So a copy has surely arrived only when all that
was started on its semaphore has been waited for.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..ir.capture import SourceLine, line_of
from ..ir.held import Kept
from ..ir.places import Place
from .memory import Buffer
from .regions import Region, region_of


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """One copy that a kernel started. source, target: its Refs, "x_buf[1]". nbytes: of it; hbm: to or from HBM.

    start, end: of its flight, as numbers of moments (see Flight.moments); end is None while nobody knows that it has
    arrived. exposed: nothing was computed between. passed: a wait on its semaphore has returned, which may have been
    for another copy. kept_bytes: of values loaded from its target that are needed after it has started, see
    `ir.held.kept`; kept_of: one of the loads. Or of values that are computed before its wait and needed after it; then
    kept_of is None. line, waited_at, loaded_at: the reader's, of the start, the wait and that
    load.
    """

    source: str
    target: str
    nbytes: int
    hbm: bool
    eqn: Any
    semaphore: str
    start: int
    work: float
    parts: list[tuple[Buffer, Region, bool]]
    end: int | None = None
    exposed: bool = False
    kept_bytes: int = 0
    kept_of: Any = None
    passed: bool = False
    wait_eqn: Any = None

    @property
    def comes_in(self) -> bool:
        """Whether it is out of HBM."""
        return any(buffer.space in ("any", "hbm") for buffer, _, written in self.parts if not written)

    @property
    def line(self) -> SourceLine | None:
        return _line(self.eqn)

    @property
    def loaded_at(self) -> SourceLine | None:
        return _line(self.kept_of)

    @property
    def waited_at(self) -> SourceLine | None:
        return _line(self.wait_eqn)


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
        return _line(self.eqn)


def _line(eqn: Any) -> SourceLine | None:
    return line_of(eqn) if eqn is not None else None


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
        self.open: dict[Buffer, list[Transfer]] = {}
        self.of: dict[Any, list[Transfer]] = {}  # semaphore -> copies that may be on their way
        self.owed: dict[Any, int] = {}  # semaphore -> started and not waited for
        self.work = self.carried = 0.0  # FLOPs; FLOPs x bytes on their way
        self.bytes_open = 0

    def start(self, transfer: Transfer, semaphore: Any, amount: int) -> None:
        self.noted = True
        transfer.start = len(self.moments)
        self.moments.append(Moment("start", transfer.eqn, transfers=[transfer]))
        self.transfers.append(transfer)
        self.of.setdefault(semaphore, []).append(transfer)
        self.owed[semaphore] = self.owed.get(semaphore, 0) + amount
        for buffer, _, _ in transfer.parts:
            self.open.setdefault(buffer, []).append(transfer)
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

    def signalled(self, semaphore: Any, amount: int) -> None:
        self.owed[semaphore] = self.owed.get(semaphore, 0) + amount

    def waited(self, semaphore: Any, amount: int | None, eqn: Any) -> None:
        """A wait for so much has returned. None: for all there is."""
        self.owed[semaphore] = 0 if amount is None else max(0, self.owed.get(semaphore, 0) - amount)
        arrived = []
        if self.owed[semaphore] <= 0:
            arrived = self.of.pop(semaphore, [])
        for transfer in self.of.get(semaphore, ()):
            transfer.passed = True
        for transfer in arrived:
            transfer.end, transfer.wait_eqn = len(self.moments), eqn
            transfer.exposed = transfer.work == self.work
            self.bytes_open -= transfer.nbytes if transfer.hbm else 0
            for buffer, _, _ in transfer.parts:
                self.open[buffer].remove(transfer)
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

    def clashes(self, buffer: Buffer, place: Place, writes: bool) -> Iterator[tuple[str, Transfer, int]]:
        """Copies on their way that use an access's memory: (what is wrong, the copy, how many are on its semaphore).

        What is wrong: "no-wait" (it is still written), "reused" (it is still read) or "shared-semaphore" (a wait has
        returned, and does not say for which copy).
        """
        known = self.open.get(buffer)
        if not known:
            return
        part = region_of(place, buffer.shape)
        for transfer in known:
            for other, there, written in transfer.parts:
                if other is buffer and (written or writes) and part.meets(there):
                    kind = "shared-semaphore" if transfer.passed else "no-wait" if written else "reused"
                    yield kind, transfer, len(next((each for each in self.of.values() if transfer in each), []))

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
