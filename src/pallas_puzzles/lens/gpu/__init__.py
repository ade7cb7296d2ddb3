"""A machine for plgpu.kernel, on a laptop without a GPU: results, what is wrong, what it costs, and who was busy when.

    run = lens.gpu.run(fn, *args, chip="h100")      # fn calls plgpu.kernel, once or several times
    run.outputs      what fn returns, as NumPy arrays
    run.findings     a list of Finding: races, missing waits and commits, deadlocks, garbage; [] for a right kernel
    run.notes        a list of Finding that are not wrong by themselves: see findings.NOTES
    run.counts       Counts: bytes, CTAs, arrivals, cycles, how long engines are idle and warpgroups wait
    run.calls        the same for each kernel of fn, a list of Launched; of the first CTAs with .events, what ran in
                     each lane from when to when on the logical clock, and its line; .uses of SMEM; and .handovers at
                     barriers

A CTA is a step of the grid, a warpgroup a thread. CTAs run one after the other as far as they do not wait for one
another; that they may run at the same time is known to the clocks that find races. TMA copies and products take place
as late as their waits allow.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir.gpu import Kernel, capture_gpu
from ...ir.ops import Beyond, garbage
from .. import machine as lens
from ..findings import Hangs
from .findings import NOTES, Brought, Finding
from .launch import Launch
from .memory import Access
from .timeline import CHIPS, Counts, Event, Handover

_OTHER_GARBAGE = 3.0
_MOST_TRIED = 400_000  # instructions of all these runs together
_FURTHER = 1000  # steps of a kernel that hangs, beside as many as it has taken, to see what would come next


@dataclasses.dataclass
class Launched:
    """One plgpu.kernel that ran.

    written: of each output, the number of the write that each element is of, 0 or less for none; and the writes.
    """

    kernel: Kernel
    outputs: list[np.ndarray]
    findings: list[Finding]
    notes: list[Finding]
    counts: Counts
    events: list[Event]
    uses: list[Event]
    handovers: list[Handover]
    written: list[tuple[np.ndarray, list[Access | None]]] = dataclasses.field(repr=False)

    @property
    def hangs(self) -> bool:
        """Whether it never ends; its outputs are what was there when nobody could go on."""
        return any(f.kind == "deadlock" for f in self.findings)


class Run(lens.Run):
    """A function run through the machine. calls: its kernels in order. outputs: None where one hangs."""

    calls: list[Launched]

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, whatever the values are."""
        return [f for each in self.calls for f in each.findings]

    @property
    def notes(self) -> list[Finding]:
        """What is not wrong by itself."""
        return [f for each in self.calls for f in each.notes]

    @property
    def counts(self) -> Counts:
        """What all kernels cost together; what is held at once is the most that one of them holds."""
        return Counts.together([each.counts for each in self.calls])


def launched(kernel: Kernel, chip: str = "h100", sms: int | None = None) -> Launched:
    """Runs one kernel, with the arrays that it has; the rest as in `run`."""
    relaunch = functools.partial(Launch, kernel, CHIPS[chip], sms or CHIPS[chip].sms)
    launch = relaunch()
    outputs = launch.run_all()
    found = launch.found.all()
    if any(f.kind == "unwritten" for f in found) and not launch.found.hangs:
        found = _told_apart(found, launch, relaunch)
    if launch.found.hangs:
        brought = functools.cache(functools.partial(_brought, launch, relaunch))
        found = [dataclasses.replace(f, brought=brought) if f.kind == "deadlock" else f for f in found]
    wrong, notes = ([f for f in found if (f.kind in NOTES) == noted] for noted in (False, True))
    timeline = launch.timeline
    drawn = timeline.events, timeline.uses, timeline.handovers
    written = [(o.writer, o.writes) for o in launch.outputs]
    return Launched(kernel, outputs, wrong, notes, timeline.counts, *drawn, written)


def _told_apart(found: list[Finding], launch: Launch, relaunch: Callable[[], Launch]) -> list[Finding]:
    """Garbage that is read is a mistake where an output depends on it: a second run starts with other garbage."""
    with garbage(_OTHER_GARBAGE):
        again = relaunch()
        again.run_all()
    for one, two in zip(launch.outputs, again.outputs, strict=True):
        stored = one.writer > 0
        if one.values[stored].tobytes() != two.values[stored].tobytes():
            return found
    return [dataclasses.replace(f, kind="garbage") if f.kind == "unwritten" else f for f in found]


def _brought(launch: Launch, relaunch: Callable[[], Launch]) -> Brought:
    """What would come if one of those who are stuck went on, for each of them: the kernel runs again up to there. []
    where that takes too long."""
    found = []
    for number in range(len(launch.stuck)) if launch.instructions * len(launch.stuck) <= _MOST_TRIED else ():
        again = relaunch()
        again.run_all()
        found.append(again.brought_by(number, launch.steps + _FURTHER))
    return found


def run(fn: Callable[..., Any], *args: Any, chip: str = "h100", sms: int | None = None, **kwargs: Any) -> Run:
    """Runs `fn(*args, **kwargs)` with every plgpu.kernel in the machine.

    args: arrays or pytrees of arrays; kwargs: static. chip: "h100", "h200" or "b200". sms: how many CTAs run at the
    same time, and what a kernel is told that asks; the chip's number by default. A kernel that never ends stops the
    run: outputs is None. Raises Beyond, ValueError for an unknown chip, and what the reader's code raises.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip={chip!r} is not known; choose one of {', '.join(CHIPS)}")
    calls: list[Launched] = []

    def on_kernel(kernel: Kernel) -> list[np.ndarray]:
        calls.append(launched(kernel, chip, sms))
        if calls[-1].hangs:
            raise Hangs
        return calls[-1].outputs

    try:
        seen = capture_gpu(fn, args, kwargs, on_kernel, (CHIPS[chip].kind, sms or CHIPS[chip].sms))
    except Hangs:
        return Run([], None, [], [], calls, CHIPS[chip].kind)
    return Run([], seen.outputs, seen.outside, seen.from_kernel, calls, seen.chip)


__all__ = ["CHIPS", "Beyond", "Counts", "Event", "Finding", "Launched", "Run", "launched", "run"]
