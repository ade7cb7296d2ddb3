"""Barriers in SMEM, round by round, and semaphores in GMEM."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from ...ir.capture import SourceLine
from ...ir.gpu_program import Alloc
from .clocks import Knowledge, new_agent
from .timeline import At, Last, Line

_REMEMBERED = 8  # rounds that have ended
# What stands for PTX's named barriers, which nobody allocates.
NAMED = Alloc("", "barrier", (), np.dtype(np.int64), "", tensor=True)


Arrivals = collections.Counter[tuple[str, SourceLine | None]]


@dataclasses.dataclass(slots=True)
class Round:
    """A round that has ended. knowledge, time: what whoever waits for it learns, and when it ended. effects: what lands
    first."""

    knowledge: Knowledge
    time: float
    effects: list[Callable[[], None]]
    last: Last


@dataclasses.dataclass(eq=False)
class Semaphore:
    """A counter in GMEM that all CTAs share. time: when it was last signalled; arrived: who has done so, in all."""

    name: str
    alloc: Alloc
    count: int = 0
    time: float = 0.0
    knowledge: Knowledge = dataclasses.field(default_factory=Knowledge)
    arrived: Arrivals = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(eq=False)
class Slot(Semaphore):
    """One barrier. needed: arrivals in a round; round: the number of the one that is going on; count: its arrivals.

    parts: of multicast copies that it still waits for; effects: what lands with this round. ended: the last rounds. An
    mbarrier remembers one bit. waited: how many rounds somebody has waited for; waits: who has. earlier: who has
    arrived before this round.
    """

    needed: int = 0
    agent: int = dataclasses.field(default_factory=new_agent)
    round: int = 0
    parts: int = 0
    effects: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    ended: "dict[int, Round]" = dataclasses.field(default_factory=dict)
    last: Last = (-1, ""), 0.0, None
    waited: int = 0
    waits: Arrivals = dataclasses.field(default_factory=collections.Counter)
    earlier: Arrivals = dataclasses.field(default_factory=collections.Counter)

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """Of its arrivals."""
        return tuple(dict.fromkeys(line for _, line in self.arrived if line is not None))

    def arrive(
        self, who: str, line: Line, knowledge: Knowledge, time: float, source: At, count: int = 1, cause: Line = None
    ) -> None:
        """An arrival, with what its thread knows. source: where it comes from; count: as how many it counts; cause: the
        line from which on it could not come earlier, if that is another one."""
        self.count += count
        self.last = max(self.last, (source, time, cause or line), key=lambda each: each[1])
        self.arrived[who, line] += 1
        self.knowledge.learn(knowledge, self.alloc.tensor)
        self.time = max(self.time, time)
        self._end()

    def bring(self, effect: Callable[[], None], parts: int, time: float) -> None:
        """A part of a copy is on its way: so many parts more to wait for."""
        self.parts += parts
        self.effects.append(effect)
        self.time = max(self.time, time)
        self._end()

    def _end(self) -> None:
        if self.count < self.needed or self.parts:
            return
        self.knowledge.clock[self.agent] = self.round + 1
        self.ended[self.round] = Round(self.knowledge.copy(), self.time, self.effects, self.last)
        self.ended.pop(self.round - _REMEMBERED, None)
        self.round, self.count, self.effects = self.round + 1, 0, []
        self.earlier = self.arrived.copy()

    def end_round(self) -> None:
        """Ends this round, whatever it lacks."""
        self.count, self.parts = max(self.count, self.needed), 0
        self._end()

    def land(self, number: int) -> Round:
        """Somebody has waited for a round: what came with it, and before, is there now."""
        for n in [n for n in self.ended if n <= number]:
            for effect in self.ended[n].effects:
                effect()
            self.ended[n].effects = []
        return self.ended.get(number) or self.ended[max(self.ended)]


class Several:
    """A Ref to barriers, one CTA's, or to semaphores. slots: by their place in it."""

    def __init__(self, alloc: Alloc, make: Callable[[str], Semaphore]) -> None:
        self.name, self.alloc = alloc.name, alloc
        self.slots = {at: make(alloc.name + "".join(f"[{i}]" for i in at)) for at in np.ndindex(*alloc.shape)}


@dataclasses.dataclass(eq=False)
class Wait:
    """Why a thread cannot go on. what: the barrier or semaphore, and the round or count that it waits for."""

    ready: Callable[[], bool]
    line: SourceLine | None
    what: Semaphore
    number: int
