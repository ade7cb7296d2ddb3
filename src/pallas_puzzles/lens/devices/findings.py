"""What the machine finds wrong with kernels on several devices, as data; diagnose/devices.py has the words."""

import dataclasses
from collections.abc import Hashable

from ...ir.capture import SourceLine

# The kinds that are not wrong by themselves; the others are, whatever the values.
NOTES = frozenset(["unwritten", "unread"])


@dataclasses.dataclass(frozen=True)
class Access:
    """One access. who: 'device 1', or 'the copy from device 0 to device 1'. verb: "reads" or "writes"."""

    who: str
    verb: str
    line: SourceLine | None


@dataclasses.dataclass(frozen=True)
class Waiter:
    """A device that waits when nobody can go on. what: the semaphore or collective; got, needed: how much of it.

    unit: "bytes", or "" for signals. sources: (who, line) of those that have ever signalled it on this device.
    lines: those that signal the same semaphore on any device.
    """

    device: str
    line: SourceLine | None
    what: str
    got: int
    needed: int
    unit: str = ""
    sources: tuple[tuple[str, SourceLine | None], ...] = ()
    lines: tuple[SourceLine, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    kind: what it is, one of those that diagnose/devices.py has words for. ref: the Ref or semaphore, with indices.
    device: whose memory it is. first, second: of a race, in the order in which the machine came to them. semaphore: of
    a race, one that was waited for, where the wait may have been ended by another copy. count: elements, copies or
    signals. waiters, ended: of a deadlock.
    """

    kind: str
    ref: str
    device: str
    first: Access
    second: Access | None = None
    semaphore: str = ""
    count: int = 0
    waiters: tuple[Waiter, ...] = ()
    ended: tuple[str, ...] = ()
    times: int = 1

    @property
    def key(self) -> Hashable:
        sides = frozenset((a.line, a.verb) for a in (self.first, self.second) if a is not None)
        return self.kind, self.ref.split("[")[0], sides
