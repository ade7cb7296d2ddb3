"""Refs, who reads and writes them, and whether anything orders that: what the rules of the machine share."""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...ir.gpu import Kernel
from ...ir.gpu_program import Instr, View
from ...ir.ops import Beyond, bits_of
from ...ir.places import Place
from ..findings import Findings
from ..regions import Region, region_of
from .barriers import Several, Slot
from .findings import Finding
from .memory import NEVER, Access, Buffer
from .threads import Cta, Thread
from .timeline import CTAS_DRAWN, Chip, Event, Timeline

Env = list[Any]


def indices(sizes: dict[Any, int]) -> Iterator[dict[Any, int]]:
    """Each place along these axes."""
    for at in itertools.product(*(range(n) for n in sizes.values())):
        yield dict(zip(sizes, at, strict=True))


class Core:
    """What the rules share: Refs, orders between accesses, findings."""

    scope: Callable[[Cta, Any], list[Any]]

    def __init__(self, kernel: Kernel, chip: Chip) -> None:
        self.kernel, self.found, self.timeline = kernel, Findings(), Timeline(chip)
        self.pending = collections.deque(indices(kernel.grid))  # clusters that have not started
        self.semaphores: dict[Any, Several] = {}
        self._regions: dict[int, tuple[Place, Region]] = {}
        # Waits of threads for their loads from TMEM, by the agent of these: (how many, agent and epoch of the thread).
        self.loaded: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)

    # -- Refs

    def _of_peer(self, ref: Any, t: Thread, view: View, env: Env) -> Any:
        """The Ref, or the same one in the CTA of the cluster that a view names."""
        if view.peer is None:
            return ref
        block = view.block([env[i] for i in view.leaves])
        place = tuple(block.get(axis, t.cta.index[axis]) for axis in self.kernel.cluster)
        return self.in_cta(ref, t.cta.cluster.ctas[place], t.cta)

    def _part(self, union: Buffer, alias: tuple[Any, ...]) -> Buffer:
        """One of the Refs that share the memory of a RefUnion."""
        offset, shape, dtype, group = alias
        found = union.parts.get(alias)
        if found is None:
            found = union.parts[alias] = Buffer(union.name, shape, dtype, union.space)
            found.offset, found.part_of = offset, (union, alias)
            nbytes = math.prod(shape) * bits_of(dtype) // 8
            for (other, its, kind, number), twin in union.parts.items():
                last = other + math.prod(its) * bits_of(kind) // 8
                if number != group and other < offset + nbytes and offset < last:
                    twin.twins.append(found)
                    found.twins.append(twin)
        return found

    def in_cta(self, ref: Any, cta: Cta, mine: Cta) -> Any:
        """The same Ref in another CTA of the cluster, which may not have come as far as to make it."""
        if isinstance(ref, Buffer) and ref.part_of is not None:
            union, alias = ref.part_of
            return self._part(self.in_cta(union, cta, mine), alias)
        key = next((k for k, refs in mine.shared.items() if any(r is ref for r in refs)), None)
        if key is None:
            raise Beyond(f"{ref.name} of another CTA: it is in a scope that is not collective")
        number = next(i for i, r in enumerate(mine.shared[key]) if r is ref)
        return self.scope(cta, key)[number]

    def place(
        self, t: Thread, instr: Instr, view: View, env: Env, verb: str, clips: bool = False
    ) -> tuple[Buffer, Place]:
        """The memory that a view is of, and where in it."""
        own = env[view.ref] if view.alias is None else self._part(env[view.ref], view.alias)
        buffer: Buffer = self._of_peer(own, t, view, env)

        def out_of_bounds(first: int, last: int, size: int) -> None:
            self.finding("bounds", buffer, t, instr, verb, detail=(first, last, size))

        numbers = [env[i] for i in view.leaves]
        return buffer, view.at(buffer.shape, buffer.dtype, numbers, out_of_bounds, clips)

    def region(self, buffer: Buffer, place: Place) -> Region:
        found = self._regions.get(id(place))
        if found is None:
            found = self._regions[id(place)] = (place, region_of(place, buffer.shape))
        return found[1]

    def finding(self, kind: str, ref: Any, t: Thread, instr: Instr | None, verb: str, **more: Any) -> None:
        line = instr.line if instr is not None else None
        self.found.add(Finding(kind, ref.name, line, t.name, verb, **more))

    # -- orders

    def reads(self, buffer: Buffer, place: Place, t: Thread, access: Access) -> None:
        """Notes a read, and what it collides with."""
        if not buffer.tracked:
            return
        for number in buffer.writers_of(place):
            if number == NEVER:
                missing = int(np.count_nonzero(place.get(buffer.writer, marks=True) == NEVER))
                total = int(np.prod(place.shape, dtype=int))
                self.finding("unwritten", buffer, t, access.instr, access.verb, count=missing, total=total)
                continue
            before = buffer.writes[number]
            if before is not None:
                self._in_order(buffer, before, t, access, written=True)
        if not buffer.read_only:
            region = self.region(buffer, place)
            buffer.reads[region, access.agent, access.verb] = region, access

    def writes(self, buffer: Buffer, place: Place, t: Thread, access: Access) -> None:
        """Notes a write, and what it collides with."""
        if not buffer.tracked:
            return
        region = self.region(buffer, place)
        for number in buffer.writers_of(place):
            before = buffer.writes[number] if number > 0 else None
            if before is not None:
                self._in_order(buffer, before, t, access, written=True, place=place)
        read = [before for theirs, before in buffer.reads.values() if theirs.meets(region)]
        for before in read:
            self._in_order(buffer, before, t, access, written=False)
        if access.engine == "copy":
            access.readers = frozenset(each.who for each in read)
            there = [buffer.writes[n] for n in buffer.writers_of(place) if n > 0]
            access.unread = next((before for before in there if before and t.knowledge.knows(before)), None)
            access.barrier = None if there else access.barrier
        for twin in buffer.twins:
            self._writes_twin(buffer, twin, region, t, access)
        buffer.note_write(place, region, access)

    def _writes_twin(self, buffer: Buffer, twin: Buffer, region: Region, t: Thread, access: Access) -> None:
        """A write to memory that is another Ref's, too."""
        part = buffer.shared_with(region, twin)
        if part.start >= part.stop:
            return
        for theirs, before in list(twin.reads.values()):
            first, last, _ = theirs.hull()
            if first < part.stop and part.start < last:
                self._in_order(buffer, before, t, access, written=False)
        for number in np.unique(twin.writer.reshape(-1)[part]):
            if number > 0 and (earlier := twin.writes[number]) is not None:
                self._in_order(buffer, earlier, t, access, written=True)
        if buffer.space != "tmem" and region.hull()[2]:
            twin.overwritten(part)

    def _in_order(
        self, buffer: Buffer, before: Access, t: Thread, access: Access, written: bool, place: Place | None = None
    ) -> None:
        """Whether an access is after an earlier one, by what its thread knows. written: the earlier one is a write.
        place: of an access that writes, too."""
        if before.agent == access.agent or (before.engine == access.engine == "reduce"):
            return
        if before.engine == "load" and access.engine == "fill" and before.agent == t.loading:
            return  # it stores what it has computed from what it has loaded
        knows = t.knowledge
        if knows.knows(before):
            crosses = access.is_async and not before.is_async and buffer.space == "smem"
            if not crosses or before.time <= knows.fenced.get(before.agent, 0):
                return
            kind = "no-commit" if written else "unfenced-read"
        elif before.engine == "load" and not any(
            number >= before.time and epoch <= knows.clock.get(agent, 0)
            for number, agent, epoch in self.loaded[before.agent]
        ):
            kind = "unwaited-load"
        elif before.is_async and (before.engine not in ("store", "reduce") or before.who == t.name):
            kind = "reused" if not written else "early" if _too_early(before, t) else "no-wait"
        else:
            kind = "race"
        later = kind == "no-wait" and knows.clock.get(before.agent, 0) > 0
        self.finding(
            kind,
            buffer,
            t,
            access.instr,
            access.verb,
            detail=_crowded(before.barrier) if later and before.barrier is not None else (),
            other_verb=before.verb,
            other_line=before.instr.line,
            other=before.who if before.who != t.name else "",
            engine=before.engine,
            later=later,
            apart=tuple(_apart(access, before)),
            same=before.instr is access.instr and self._covers(buffer, before, place),
        )

    def _covers(self, buffer: Buffer, before: Access, place: Place | None) -> bool:
        """Whether all that an earlier write has left lies where another one is, and nothing else does."""
        number = next((n for n, access in enumerate(buffer.writes) if access is before), 0)
        marks = place.get(buffer.writer, marks=True) if place is not None else None
        return marks is not None and bool((marks == number).all()) and np.sum(buffer.writer == number) == np.size(marks)

    def own(self, t: Thread, instr: Instr, verb: str, space: str = "") -> Access:
        """An access by a thread itself; in TMEM one that wait_load_tmem or commit_tmem waits for."""
        if space == "tmem":
            t.tmem += 1
            reads = verb == "reads"
            return Access(t.loading if reads else t.filling, t.tmem, instr, t.name, verb, "load" if reads else "fill")
        return Access(t.agent, t.epoch, instr, t.name, verb, index=t.index)

    def use(self, cta: Cta, buffer: Buffer, place: Place, kind: str, start: float, end: float) -> None:
        """Something happens in a part of SMEM, for the timeline."""
        if buffer.space == "smem":
            region = self.region(buffer, place)
            one = region.cells is None and len(region.box) > 2 and len(region.box[0]) == 1  # one of several slots
            name = f"{buffer.name}[{region.box[0].start}]" if one else buffer.name
            if cta.number < CTAS_DRAWN:
                self.timeline.uses.append(Event(cta.number, name, kind, start, end))

    def slot(self, t: Thread, instr: Instr, env: Env) -> Any:
        """The barrier or semaphore that an instruction is about."""
        return self.slots(t, instr.p["barrier"], env, [t.cta])[0]

    def slots(self, t: Thread, view: View, env: Env, ctas: Sequence[Cta]) -> list[Slot]:
        """The barrier or semaphore that a view is of, in each of these CTAs."""
        barrier = env[view.ref]
        if not isinstance(barrier, Several):
            raise Beyond("a semaphore that is handed to a kernel")

        def out_of_bounds(first: int, last: int, size: int) -> None:
            self.finding("bounds", barrier, t, None, "waits for", detail=(first, last, size))

        shape, numbers = barrier.alloc.shape, [env[i] for i in view.leaves]
        place = view.at(shape, np.dtype(np.int32), numbers, out_of_bounds, False)
        at = tuple(each.start for each in region_of(place, shape).box)
        own = self._of_peer(barrier, t, view, env)
        return [(own if cta is t.cta else self.in_cta(barrier, cta, t.cta)).slots[at] for cta in ctas]


def _crowded(slot: Slot) -> tuple[Any, ...]:
    """A barrier that has ended a round before all copies of it had arrived: its name, the arrivals of a round, how many
    there were, and their lines."""
    return slot.name, slot.needed, slot.arrived.total(), slot.lines


def _too_early(copy: Access, t: Thread) -> bool:
    """Whether a copy overwrites what a thread could have read before, and has not."""
    return copy.unread is not None and t.knowledge.knows(copy.unread) and t.name not in copy.readers


def _apart(one: Access, other: Access) -> Iterator[str]:
    """The axes along which two threads that run the same line are not in the same place."""
    if one.instr is other.instr and one.index is not None and other.index is not None:
        yield from (name for name, at in one.index.items() if isinstance(name, str) and other.index.get(name) != at)
