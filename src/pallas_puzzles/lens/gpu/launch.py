"""Launches the CTAs of a kernel, runs whoever can go on, the one that is furthest behind first, and says who cannot."""

import collections
import contextlib
import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...ir.capture import SourceLine
from ...ir.effort import READ, spend
from ...ir.gpu import Kernel
from ...ir.gpu_program import Program
from ...ir.ops import Beyond
from .accesses import indices
from .banks import inside, note_layouts
from .barriers import NAMED, Arrivals, Several, Slot, Wait
from .engines import Engines
from .findings import Finding, Waiter
from .memory import NEVER, Buffer
from .threads import Cluster, Cta, Spawn, Thread
from .timeline import Chip

MOST_CTAS = 1 << 16


class Launch(Engines):
    """One launch of a kernel. sms: how many CTAs can run at the same time."""

    def __init__(self, kernel: Kernel, chip: Chip, sms: int):
        super().__init__(kernel, chip)
        given = [(name, np.asarray(a)) for (name, *_), a in zip(kernel.inputs, kernel.arrays, strict=True)]
        self.inputs = [Buffer(name, a.shape, a.dtype, "gmem", a) for name, a in given]
        self.outputs = [Buffer(n, shape, dtype, "gmem") for n, shape, dtype in kernel.outputs]
        for i, o in kernel.aliases.items():
            self.outputs[o] = self.inputs[i]
            self.inputs[i].read_only = False
        size = math.prod(kernel.cluster.values())
        if len(self.pending) * size > MOST_CTAS:
            raise Beyond(f"a grid of more than {MOST_CTAS} CTAs")
        counts = self.timeline.counts
        arrays = {id(b): b.values.nbytes for b in (*self.inputs, *self.outputs)}  # aliased ones once
        counts.once_bytes = sum(arrays.values())
        counts.smem_bytes = _held_smem(kernel.program)
        note_layouts(kernel.program)
        self.threads: list[Thread] = []  # that have not ended
        self.ctas = self.steps = 0
        self.stuck: list[Wait] = []  # when nobody can go on: one for each barrier and line
        self.most_steps = math.inf
        self.ended: list[str] = []
        self.free = [0.0] * max(1, sms // size)  # when each of the places for clusters is free

    def run_all(self) -> list[np.ndarray]:
        """Runs the kernel to its end, or to where nobody can go on; returns its outputs."""
        at_once = 1
        if any(i.kind == "cancel" for i in self.kernel.program.everything()):
            at_once = max(1, min(len(self.free), len(self.pending) // 2))
        with np.errstate(all="ignore"):
            self._drive(at_once)
        spend(self.instructions + READ * sum(1 for _ in self.kernel.program.everything()))
        counts = self.timeline.counts
        counts.ctas = self.ctas
        counts.cycles = max([*self.free, *(t.now for t in self.threads)])
        limit = self.timeline.chip.smem_limit_bytes
        if counts.smem_bytes > limit:
            self.found.add(Finding("smem", "SMEM", self.kernel.where, "", count=counts.smem_bytes, total=limit))
        for output in self.outputs:
            if not self.threads and (missing := int(np.count_nonzero(output.writer == NEVER))):
                total, where = output.writer.size, self.kernel.where
                self.found.add(Finding("output-unwritten", output.name, where, "", count=missing, total=total))
        return [o.values for o in self.outputs]

    def _drive(self, at_once: int) -> None:
        """Starts clusters, so many at once at first, and runs their threads until nobody can go on."""
        while (self.pending or self.threads) and self.steps < self.most_steps:
            while self.pending and len({id(t.cta.cluster) for t in self.threads}) < at_once:
                self._start()
            if self._step():
                continue
            if self.pending and self.free:
                self._start()  # those who wait may wait for a CTA that has not started
            elif self.threads:
                self._stuck()
                break

    def _start(self) -> None:
        kernel, cluster = self.kernel, Cluster(self.pending.popleft(), start=heapq.heappop(self.free))
        for inner in indices(kernel.cluster):
            index = {**cluster.index, **inner}
            at = tuple(index.values())
            name = f"CTA {at if len(at) != 1 else at[0]}" if at else ""
            cta = cluster.ctas[tuple(inner.values())] = Cta(self.ctas, name, index, cluster)
            self.ctas += 1
            for w in range(kernel.threads):
                who = f"warpgroup {w} of {name}" if name else f"warpgroup {w}"
                own = {**index, kernel.thread_name: w} if kernel.thread_name is not None else index
                t = Thread(cta, name if name and kernel.threads == 1 else who, f"warpgroup {w}", own, cluster.start)
                t.going = self.run(kernel.program, [*self.inputs, *self.outputs], t)
                self.threads.append(t)

    def _step(self) -> bool:
        """Runs the thread that is furthest behind up to its next wait. False: nobody can go on."""
        ready = [t for t in self.threads if t.wait is None or t.wait.ready()]
        if not ready:
            return False
        t = min(ready, key=lambda t: t.now)
        self.steps += 1
        try:
            t.wait = next(t.going)
        except StopIteration:
            self._done(t)
            return True
        if isinstance(t.wait, Spawn):
            self.threads += t.wait.children
        return True

    def _done(self, t: Thread) -> None:
        self.threads.remove(t)
        self.end(t)
        t.done = True
        if len(self.ended) < 1 << 12:
            self.ended.append(t.name)
        cluster = t.cta.cluster
        cluster.end = max(cluster.end, t.now)
        if any(other.cta.cluster is cluster for other in self.threads):
            return
        heapq.heappush(self.free, cluster.end)
        counts, life = self.timeline.counts, cluster.end - cluster.start
        for cta in cluster.ctas.values():
            for access, buffer in cta.coming.values():
                self.finding("load-in-flight", buffer, t, access.instr, "ends")
            counts.cta_bytes = max(counts.cta_bytes, cta.moved)
            counts.tensor_busy += cta.tensor.busy
            counts.copy_busy += cta.copy.busy
            counts.tensor_idle += life - cta.tensor.busy if cta.tensor.busy else 0
            counts.copy_idle += life - cta.copy.busy if cta.copy.busy else 0

    # -- nobody can go on

    def _stuck(self) -> None:
        candidates = _candidates(self.kernel.program)
        until = 1.1 * max([1.0, *(e.end for e in self.timeline.events), *(t.now for t in self.threads)])
        alike: dict[Any, list[tuple[Thread, Wait]]] = collections.defaultdict(list)
        for t in self.threads:
            if isinstance(t.wait, Wait):
                name = t.wait.what.name
                self.timeline.add(t.at, "wait", t.now, until, t.wait, name)
                alike[name, t.wait.line].append((t, t.wait))
        self.stuck = [wait for (_, wait), *_ in alike.values()]
        waiters = [_waiter(*first, candidates, len(others)) for first, *others in alike.values()]
        first, done = waiters[0], tuple(dict.fromkeys(self.ended))
        where = Finding("deadlock", first.what, first.line, first.who, "waits for", waiters=tuple(waiters), ended=done)
        self.found.add(where)

    def brought_by(self, number: int, most_steps: int) -> list[list[tuple[str, SourceLine | None]]]:
        """Who arrives, and at which line, on what each of those waits for that are stuck, when one of them, by its
        number, gets what it waits for. Its thread, and then others, go on, for so many steps at most."""
        waits = self.stuck
        before, wait = [each.what.arrived.copy() for each in waits], waits[number]
        if isinstance(wait.what, Slot):
            wait.what.end_round()
        else:
            wait.what.count = wait.number
        self.most_steps = self.steps + most_steps
        with contextlib.suppress(Exception), np.errstate(all="ignore"):  # on what never came, anything may happen
            self._drive(1)
        return [list(each.what.arrived - then) for each, then in zip(waits, before, strict=True)]


def _waiter(t: Thread, wait: Wait, candidates: "dict[int, list[SourceLine]]", alike: int) -> Waiter:
    what, here = wait.what, (t.name, wait.line)
    more: dict[str, Any] = {"needed": wait.number, "round": -1}
    if isinstance(what, Slot):
        more = {"needed": what.needed, "round": wait.number, "parts": what.parts, "spare": tuple(_spare(what, t.cta))}
        more["came"] = _listed(what.arrived - what.earlier)
        more["waited"] = _listed(what.waits - collections.Counter([here]))
    lines = tuple(candidates.get(id(what.alloc), ()))
    arrived = _listed(what.arrived)
    return Waiter(*here, what.name, what.count, arrived=arrived, candidates=lines, alike=alike, **more)


def _listed(arrivals: Arrivals) -> tuple[tuple[str, SourceLine | None, int], ...]:
    return tuple((who, line, n) for (who, line), n in arrivals.items())


def _spare(slot: Slot, cta: Cta) -> Iterator[tuple[str, int, tuple[SourceLine, ...]]]:
    """The other barriers of a CTA that have ended rounds which nobody has waited for: (name, how many, lines of the
    arrivals). One such round of a barrier of another kind is nothing special: it says that a slot is free."""
    there = (ref for refs in cta.shared.values() for ref in refs if isinstance(ref, Several))
    for other in (other for several in there for other in several.slots.values()):
        if isinstance(other, Slot) and other is not slot:
            spare = other.round - other.waited
            if spare > (0 if other.alloc is slot.alloc else 1):
                yield other.name, spare, other.lines


def _held_smem(program: Program) -> int:
    """The bytes of SMEM that a program takes: a scope's, on top of those around it."""
    each = (
        sum(a.nbytes for a in instr.p.get("allocs", ()) if a.space == "smem")
        + max((_held_smem(inner) for inner in instr.p.get("programs", ())), default=0)
        for instr in program.instrs
    )
    return max(each, default=0)


_ARRIVES = {"arrive", "arrive_wait", "load_tma", "tcgen05", "tcgen05_arrive", "cancel", "signal"}


def _candidates(program: Program) -> "dict[int, list[SourceLine]]":
    """The lines of a program that arrive on each barrier or semaphore that it allocates, by id() of its Alloc."""
    found: dict[int, dict[SourceLine, None]] = collections.defaultdict(dict)

    def walk(inner: Program, known: dict[int, Any]) -> None:
        for instr in inner.instrs:
            if instr.kind == "named" and instr.line is not None:
                found[id(NAMED)][instr.line] = None
            view = instr.p.get("barrier")
            alloc = known.get(view.ref) if view is not None else None
            if alloc is not None and instr.kind in _ARRIVES and instr.line is not None:
                found[id(alloc)][instr.line] = None
            for sub, slots in inside(instr):
                passed = [known.get(s) for s in slots] + list(instr.p.get("allocs", ()))
                walk(sub, dict(zip(sub.ins, passed, strict=False)))

    walk(program, {})
    return {key: list(lines) for key, lines in found.items()}
