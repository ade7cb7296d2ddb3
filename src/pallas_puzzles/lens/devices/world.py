"""Several devices that run at the same time: who goes on, what each semaphore holds, which copies are on their way.

Each device has a thread, and one of them runs at a time, in an order that is always the same. A device that has to wait
lets the others go first, so that as much as possible is on its way before a wait is served; then the newest copies
arrive first. Nothing else may be relied on: a wait orders only what must have arrived, whatever came first.
"""

import contextvars
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ...ir.capture import SourceLine
from ...ir.effort import AMONG, counted, spend
from ...ir.meshes import Mesh
from ...ir.places import Place
from ..findings import Findings
from ..regions import region_of
from .clocks import Clock, History, Who
from .findings import Access, Finding, Waiter
from .timeline import Timeline

_LOOK_S = 0.05  # how often the caller looks up, so that time limits and Ctrl-C reach it
Key = tuple[Any, ...]


class Stopped(BaseException):
    """Ends the thread of a device."""


@dataclasses.dataclass(eq=False, slots=True)
class Arrival:
    """What brings a semaphore on: a signal, or half of a copy. happen: has not happened yet, if there is one."""

    event: Who
    amount: int
    clock: Clock
    who: str
    line: SourceLine | None
    at: float
    happen: Callable[[], None] | None = None
    mistaken: bool = False  # whether a wait has ended that may have been for it, or for another one


@dataclasses.dataclass(eq=False, slots=True)
class Semaphore:
    """count: what has arrived and was not taken. due: copies that are on their way. settled: what must have arrived at
    the last wait; open: what may have. taken: by waits. waits: the step of each of them."""

    name: str
    count: int = 0
    settled: int = 0
    taken: int = 0
    due: list[Arrival] = dataclasses.field(default_factory=list)
    open: list[Arrival] = dataclasses.field(default_factory=list)
    waits: list[int] = dataclasses.field(default_factory=list)
    sources: dict[tuple[str, SourceLine | None], None] = dataclasses.field(default_factory=dict)

    @property
    def coming(self) -> int:
        return self.count + sum(a.amount for a in self.due)


class World:
    """A mesh of devices. early: what may arrive before each wait, though it came later in an earlier run.

    buffers, homes: by what they are in the program, so that one device finds those of another. entered: (device,
    kernel) -> the step at which it began. meetings: who has come to a collective, and with what.
    """

    def __init__(self, mesh: Mesh, early: "dict[tuple[Key, int], list[Arrival]]") -> None:
        self.mesh, self.early = mesh, early
        self.late: dict[tuple[Key, int], list[Arrival]] = {}
        self.found, self.timeline = Findings(), Timeline(mesh)
        self.clock = [Clock([0] * mesh.size) for _ in range(mesh.size)]
        self.semaphores: dict[Key, Semaphore] = {}
        self.histories: dict[Any, History] = {}
        self.buffers: dict[tuple[int, Key], Any] = {}
        self.homes: dict[Any, tuple[int, Key]] = {}
        self.entered: dict[tuple[int, Key], int] = {}
        self.meetings: dict[Key, dict[int, Any]] = {}
        self.halves = 0
        self.ends: dict[Who, tuple[Arrival, Semaphore]] = {}  # of a half of a copy: what says that it is done
        self.dead = False
        self._turns = [threading.Semaphore(0) for _ in range(mesh.size)]
        self._queue = list(range(mesh.size))  # those that have not ended, whoever ran longest ago first
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], Waiter]]] = {}
        self._over = threading.Event()
        self._errors: list[BaseException] = []

    # -- who goes on

    def run(self, body: Callable[[int], None]) -> None:
        """Runs body(device) on every device. Raises what one of them raises, and ends them all then."""
        threads = []
        for device in range(self.mesh.size):
            context = contextvars.copy_context()
            threads.append(threading.Thread(target=context.run, args=(self._thread, body, device), daemon=True))
            threads[-1].start()
        try:
            self._turns[0].release()
            while not self._over.wait(_LOOK_S):
                pass
        finally:
            self.dead = True
            for turn in self._turns:
                turn.release()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _thread(self, body: Callable[[int], None], device: int) -> None:
        try:
            self._turns[device].acquire()
            if not self.dead:
                with counted() as effort:
                    body(device)
                spend((AMONG - 1) * effort.instructions)
        except Stopped:
            return
        except BaseException as error:
            self._errors.append(error)
            self._over.set()
            return
        self._queue.remove(device)
        self._next()

    def _next(self) -> None:
        """Gives the turn to the next device that can go on."""
        for device in self._queue:
            if device not in self._waiting or self._waiting[device][0]():
                self._turns[device].release()
                return
        if self._queue and not self.dead:
            self._deadlock()
        self._over.set()

    def wait(self, device: int, ready: Callable[[], bool], waiter: Callable[[], Waiter]) -> None:
        """Lets the others go first, until `ready`. waiter: says what it waits for, when nobody can go on."""
        self._queue.remove(device)
        self._queue.append(device)
        self._waiting[device] = ready, waiter
        self._next()
        self._turns[device].acquire()
        if self.dead:
            raise Stopped
        del self._waiting[device]

    def _deadlock(self) -> None:
        waiters = tuple(self._waiting[device][1]() for device in sorted(self._queue))
        ended = tuple(self.mesh.name(d) for d in range(self.mesh.size) if d not in self._queue)
        one = waiters[0]
        self.finding("deadlock", one.what, one.device, one.device, "waits", one.line, waiters=waiters, ended=ended)

    def finding(self, kind: str, ref: str, device: str, who: str, verb: str, line: Any, **more: Any) -> None:
        """who, verb, line: of the access that is wrong."""
        self.found.add(Finding(kind, ref, device, Access(who, verb, line), **more))

    # -- clocks

    def tick(self, device: int) -> Who:
        """The device's next step."""
        self.clock[device].devices[device] += 1
        return Who(device, self.clock[device].devices[device])

    def tell(self, device: int) -> tuple[Who, Clock]:
        """(the device's next step, what it knows then). What it does after that is not known to who is told this."""
        step, known = self.tick(device), self.clock[device]
        told = Clock(list(known.devices), known.copies)
        self.tick(device)
        return step, told

    def here(self, device: int) -> Who:
        return Who(device, self.clock[device].devices[device])

    def half(self, device: int, clock: Clock) -> tuple[Who, Clock]:
        """A half of a copy that comes after all that `clock` knows."""
        self.halves += 1
        return Who(device, 1, self.halves), Clock(list(clock.devices), clock.copies | 1 << self.halves)

    # -- semaphores

    def semaphore(self, key: Key, name: str) -> Semaphore:
        """key: (device, which semaphore, ...)."""
        return self.semaphores.setdefault(key, Semaphore(name))

    def arrive(self, key: Key, arrival: Arrival, name: str) -> None:
        """A signal comes, or a copy is on its way."""
        semaphore = self.semaphore(key, name)
        semaphore.open.append(arrival)
        self.ends[arrival.event] = arrival, semaphore
        semaphore.sources[arrival.who, arrival.line] = None
        if arrival.happen is None:
            semaphore.count += arrival.amount
        else:
            semaphore.due.append(arrival)
        for number, step in enumerate(semaphore.waits):
            if arrival.clock.devices[key[0]] < step:  # it could have come before that wait
                self.late.setdefault((key, number), []).append(arrival)

    def take(
        self, key: Key, needed: int, line: SourceLine | None, name: str, unit: str = "", take: bool = True
    ) -> None:
        """Waits until a semaphore holds what is needed; its device then knows of what must have arrived by then."""
        device, semaphore = key[0], self.semaphore(key, name)
        who = self.mesh.name(device)

        def waiter() -> Waiter:
            alike = [s for k, s in self.semaphores.items() if k[1:] == key[1:]]
            lines = dict.fromkeys(line for s in alike for _, line in s.sources if line is not None)
            sources = tuple(semaphore.sources)
            return Waiter(who, line, name, semaphore.coming, needed, unit, sources, tuple(lines))

        self.wait(device, lambda: semaphore.coming >= needed, waiter)
        came = 0.0
        while semaphore.count < needed:
            arrival = semaphore.due.pop()
            assert arrival.happen is not None, "what is due has not happened"
            arrival.happen()
            semaphore.count += arrival.amount
        step = self.tick(device).count
        if take:
            semaphore.count -= needed
        for arrival in self._must(semaphore, needed, self.early.get((key, len(semaphore.waits)), [])):
            semaphore.open.remove(arrival)
            semaphore.settled += arrival.amount
            self.clock[device].join(arrival.clock)
            came = max(came, arrival.at)
        for arrival in semaphore.open:
            arrival.mistaken = needed > 0
        semaphore.waits.append(step)
        semaphore.taken += needed if take else 0
        self.timeline.wait(device, came, "wait" if unit else "barrier", line, name)

    @staticmethod
    def _must(semaphore: Semaphore, needed: int, early: list[Arrival]) -> list[Arrival]:
        """What must have arrived when a wait ends: all that could have come without it would not have been enough."""
        may = [*semaphore.open, *early]
        return [
            one
            for one in semaphore.open
            if semaphore.settled + sum(a.amount for a in may if a is not one and not one.event.known_to(a.clock))
            < semaphore.taken + needed
        ]

    # -- memory

    def add(self, device: int, key: Key, buffer: Any) -> None:
        """A device has a buffer. key: what it is in the program."""
        self.buffers[device, key] = buffer
        self.homes[buffer] = device, key

    def home(self, buffer: Any) -> str:
        """Whose memory it is."""
        return self.mesh.name(self.homes[buffer][0])

    def access(self, buffer: Any, place: Place, who: Who, clock: Clock, access: Access) -> None:
        """Notes an access by somebody who knows so much, and what collides with it."""
        region = region_of(place, buffer.shape)
        for old, shared in self.histories.setdefault(buffer, History()).add(who, clock, region, access):
            ends = [self.ends[x] for x in (old.who, who) if x in self.ends]
            mistaken = next((semaphore.name for arrival, semaphore in ends if arrival.mistaken), "")
            name, where = shared.named(buffer.name), self.home(buffer)
            self.found.add(Finding("race", name, where, old.access, access, semaphore=mistaken))
