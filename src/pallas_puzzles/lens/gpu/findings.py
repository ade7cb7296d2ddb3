"""What the machine finds wrong, as data. What is said of it is the business of diagnose/gpu.py."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ...ir.capture import SourceLine

# The kinds that are not wrong by themselves; the others are, whatever the values. unfenced-read: the PTX memory model
# (8.9.5) orders the two accesses by a proxy fence only, but JAX's own pipelines do without, and no wrong element was
# seen in 50 runs of 528 CTAs x 64 refills on an H200. load-in-flight: JAX's own causal attention ends so, and no PTX
# text was found that forbids it. unwaited-load: JAX's documentation asks for that wait; tokamax does without where it
# has used what was loaded. padding: right, as long as what it brings is masked. garbage: kernels for ragged shapes
# multiply rows that they drop.
NOTES = frozenset(["unfenced-read", "load-in-flight", "unwaited-load", "padding", "output-unwritten", "garbage"])


@dataclasses.dataclass(frozen=True)
class Waiter:
    """Somebody who waits when nobody can go on. what: the barrier or semaphore; got, needed: arrivals in this round;
    round: -1 for a semaphore.

    parts: of multicast copies that other CTAs of the cluster have not brought. arrived: (who, line, how often) of those
    who ever did; came: in this round; waited: who has waited for the rounds before. candidates: lines of the program
    that could arrive. spare: (barrier, rounds, lines of its arrivals) of those that have ended more rounds than anybody
    has waited for. alike: how many others wait for the same at the same line.
    """

    who: str
    line: SourceLine | None
    what: str
    got: int
    needed: int
    round: int = 0
    parts: int = 0
    arrived: tuple[tuple[str, SourceLine | None, int], ...] = ()
    came: tuple[tuple[str, SourceLine | None, int], ...] = ()
    waited: tuple[tuple[str, SourceLine | None, int], ...] = ()
    candidates: tuple[SourceLine, ...] = ()
    spare: tuple[tuple[str, int, tuple[SourceLine, ...]], ...] = ()
    alike: int = 0


# [n][m]: who would arrive, and at which line, on what waiter m waits for, if what waiter n waits for had its arrivals.
Brought = Sequence[Sequence[Sequence[tuple[str, SourceLine | None]]]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    kind: what it is, one of those that diagnose/gpu.py has words for. ref: the Ref. line: the reader's, of the access
    that is wrong. verb: what it does, and other_verb, other_line: what it collides with. who: "warpgroup 1 of CTA (0,
    3)"; other: whose the other access is, where it is somebody else's. count, total: elements. engine: what the other
    access is by: "copy", "store", "wgmma", "tcgen05" or "" for loads and stores. later: that copy is not the first one
    at its barrier that is known of. apart: the axes along which the two differ, where both run the same line; same:
    they are in the same place. waiters: of a deadlock, one for each barrier and line; brought: what each of them keeps
    from coming, found by trying, which takes a run for each. ended: who has ended by then. times: how often it was
    seen.
    """

    kind: str
    ref: str
    line: SourceLine | None
    who: str
    verb: str = ""
    other_verb: str = ""
    other_line: SourceLine | None = None
    other: str = ""
    engine: str = ""
    count: int = 0
    total: int = 0
    detail: tuple[Any, ...] = ()
    later: bool = False
    apart: tuple[str, ...] = ()
    same: bool = False
    waiters: tuple[Waiter, ...] = ()
    brought: Callable[[], Brought] = dataclasses.field(default=tuple, compare=False, repr=False)
    ended: tuple[str, ...] = ()
    times: int = 1

    @property
    def key(self) -> Hashable:
        return self.kind, self.ref, self.line, self.other_line, self.verb
