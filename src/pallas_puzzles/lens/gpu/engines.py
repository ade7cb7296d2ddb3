"""What works beside the warpgroups: the copy engine (TMA) and the tensor cores (wgmma, tcgen05)."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir.gpu_program import Instr, View
from ...ir.ops import bits_of, matmul, notice, poison
from ...ir.places import Place
from .accesses import Env
from .banks import of_operand
from .barriers import Slot
from .machine import Control, Going, flat
from .memory import Access, Buffer
from .threads import Cta, Thread
from .timeline import Product


class Engines(Control):
    """The rules for copies and products."""

    # -- from GMEM to SMEM

    def go_load_tma(self, t: Thread, instr: Instr, env: Env) -> Going:
        if self.held_back(instr, env):
            return []
        yield None
        p = instr.p
        src, here = self.place(t, instr, p["src"], env, "copies from", clips=True)
        dst, there = self.place(t, instr, p["dst"], env, "copies into")
        slot = self.slot(t, p["barrier"], env)
        if here.clipped:
            self.finding("padding", src, t, instr, "copies from", total=int(np.prod(here.shape, dtype=int)))
        axes = flat(p["axes"])
        ctas = self.partners(t.cta, axes) if axes else [t.cta]
        if len(ctas) > 1:
            self._multicast(t, instr, env, (src, here), (dst, there), slot, ctas)
            return []
        self.timeline.counts.arrivals += 1
        data = _within(here, src.values)
        access = Access(slot.agent, slot.round + 1, instr, t.name, "the copy into", "copy")
        self.reads(src, here, t, Access(slot.agent, slot.round + 1, instr, t.name, "copies from", "copy"))
        start, end = self._fetch(t, instr, src, here, 1)
        told = t.tell()
        self._into((dst, there), t, access, slot, data, end)
        self.use(t.cta, dst, there, "load", start, end)
        slot.arrive(t.name, instr.line, told, end, (t.cta.number, "copy"))
        return []

    def _into(
        self,
        target: tuple[Buffer, Place],
        t: Thread,
        access: Access,
        slot: Slot,
        data: np.ndarray,
        end: float,
        parts: int = 0,
    ) -> None:
        """Data that lands in SMEM with a round of a barrier; what is there until then is garbage."""
        dst, there = target
        self.writes(dst, there, t, access)
        there.set(dst.values, poison((), dst.dtype))

        coming = t.cta.coming
        coming[id(access)] = access, dst

        def land() -> None:
            coming.pop(id(access), None)
            there.set(dst.values, data.reshape(there.shape))

        slot.bring(land, parts, end)

    def _fetch(self, t: Thread, instr: Instr, src: Buffer, here: Place, shared: int) -> tuple[float, float]:
        """The time of a copy out of GMEM: its start, and when it is all there. shared: by how many CTAs the work is."""
        chip, counts = self.timeline.chip, self.timeline.counts
        nbytes = _inside_bytes(here, src) // shared
        counts.gmem_read_bytes += nbytes
        t.cta.moved += nbytes
        counts.copies += 1
        start, busy = t.cta.copy.take(t.now, nbytes / self.timeline.gmem_rate)
        self.timeline.add(t.cta.number, "copy", "load", start, busy + chip.latency, instr, src.name)
        return start, busy + chip.latency

    def _multicast(
        self,
        t: Thread,
        instr: Instr,
        env: Env,
        source: tuple[Buffer, Place],
        target: tuple[Buffer, Place],
        slot: Slot,
        ctas: list[Cta],
    ) -> None:
        """A copy that the CTAs of a cluster share: each brings its part to all of them. With a leader: each brings its
        part to itself, and the barrier of the first one counts all of them."""
        (src, here), (dst, there) = source, target
        n, mine, leader = len(ctas), ctas.index(t.cta), instr.p["leader"]
        at = next(k for k, s in env[instr.p["barrier"].ref].slots.items() if s is slot)
        barrier = env[instr.p["barrier"].ref]
        slots = [slot if c is t.cta else self.in_cta(barrier, c, t.cta).slots[at] for c in ctas]
        start, end = self._fetch(t, instr, src, here, n)
        told = t.tell()
        if leader is not None:
            key = (...,) if leader < 0 else _split(here.shape, n, mine, leader)
            access = Access(slots[0].agent, slots[0].round + 1, instr, t.name, "the copy into", "copy")
            self.reads(src, here, t, access)
            self._into((dst, there), t, access, slots[0], _within(here, src.values)[key], end, parts=-1)
            self.use(t.cta, dst, there, "load", start, end)
            if mine == 0:
                self.timeline.counts.arrivals += 1
                slot.parts += n
                slot.arrive(t.name, instr.line, told, end, (t.cta.number, "copy"))
            return
        self.timeline.counts.arrivals += 1
        axis = next((d for d, size in enumerate(there.shape) if size % n == 0), 0)
        data = _within(here, src.values)
        key = _split(there.shape, n, mine, axis)
        for cta, theirs in zip(ctas, slots, strict=True):
            ref = dst if cta is t.cta else self.in_cta(dst, cta, t.cta)
            access = Access(theirs.agent, theirs.round + 1, instr, t.name, "the copy into", "copy")
            self._into((ref, there.part(key)), t, access, theirs, data.reshape(there.shape)[key], end, parts=-1)
            self.use(cta, ref, there, "load", start, end)
        self.reads(src, here, t, Access(slot.agent, slot.round + 1, instr, t.name, "copies from", "copy"))
        slot.parts += n
        slot.arrive(t.name, instr.line, told, end, (t.cta.number, "copy"))

    # -- from SMEM to GMEM

    def go_store_tma(self, t: Thread, instr: Instr, env: Env) -> Going:
        if self.held_back(instr, env):
            return []
        yield None
        p = instr.p
        src, here = self.place(t, instr, p["src"], env, "copies from")
        dst, there = self.place(t, instr, p["dst"], env, "copies into", clips=True)
        group = t.groups + 1
        reduce = p["reduce"]
        self.reads(src, here, t, Access(t.reading, group, instr, t.name, "the copy to GMEM reads", "store"))
        engine = "reduce" if reduce else "store"
        if reduce:
            self.reads(dst, there, t, Access(t.storing, group, instr, t.name, "the copy adds to", engine))
        self.writes(dst, there, t, Access(t.storing, group, instr, t.name, "the copy into", engine))
        chip, counts = self.timeline.chip, self.timeline.counts
        nbytes = _inside_bytes(there, dst)
        counts.gmem_write_bytes += nbytes
        t.cta.moved += nbytes
        counts.stores += 1
        start, busy = t.cta.copy.take(t.now, nbytes / self.timeline.gmem_rate)
        self.timeline.add(t.cta.number, "copy", "store", start, busy, instr, dst.name)
        self.use(t.cta, src, here, "store", start, busy)

        def land() -> None:
            value = here.read(src.values).reshape(there.shape)
            there.set(dst.values, _REDUCE[str(reduce)](_within(there, dst.values), value) if reduce else value)

        t.stores.append((group, land, busy, busy + chip.latency, instr, src))
        if p["commit"]:
            t.groups = group
        return []

    def do_commit_group(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        t.groups += 1
        return []

    def do_wait_stores(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        last, start = t.groups - instr.p["n"], t.now
        for store in [s for s in t.stores if s[0] <= last]:
            _, land, has_read, done, *_ = store
            land()
            t.now = max(t.now, has_read if instr.p["read_only"] else done)
            t.stores.remove(store)
        clock = t.knowledge.clock
        clock[t.reading] = max(clock.get(t.reading, 0), last)
        if not instr.p["read_only"]:
            clock[t.storing] = max(clock.get(t.storing, 0), last)
        self.timeline.waited(t.cta.number, t.lane, start, t.now, instr)
        return []

    def end(self, t: Thread) -> None:
        """A thread ends: its stores must have read their SMEM."""
        for _, land, _, done, instr, src in t.stores:
            land()
            t.now = max(t.now, done)
            self.finding("store-in-flight", src, t, instr, "ends")
        t.stores.clear()
        collections.deque(self.finish_products(t, None, 0), maxlen=0)

    # -- tensor cores

    def go_wgmma(self, t: Thread, instr: Instr, env: Env) -> Going:
        yield None
        p, t.products = instr.p, t.products + 1
        number = t.products
        acc, where = self.place(t, instr, p["acc"], env, "adds to")
        left = self._operand(t, instr, p["a"], env, number)
        right = self._operand(t, instr, p["b"], env, number)

        def add() -> None:
            a, b = left(), right()
            total = (where.read(acc.values) + matmul(a, b)).astype(acc.dtype)
            where.set(acc.values, total)
            notice(instr.eqn, [a, b], [total])

        k, width = self._depth(p["a"], env, t, instr)
        conflicts = self._bank_conflicts(t, instr, env, (p["a"], p["b"]), where.shape[0] // 64)
        held = [
            self.place(t, instr, view, env, "multiplies") for view in (p["a"], p["b"]) if self._in_memory(view, env)
        ]

        def over(product: Product) -> None:
            for start, end in product.slices:
                self.timeline.add(t.cta.number, "tensor", "wgmma", start, end, instr)
            for buffer, place in held:
                self.use(t.cta, buffer, place, "read", product.issued, product.end)

        instructions = max(1, k * width // 256)  # of 32 bytes along K
        cycles = self._cycles(2 * int(np.prod(where.shape)) * k, width, conflicts)
        product = Product(cycles / instructions, instructions, t.now, over)
        t.cta.tensor.issue(t.lane, product)
        t.wgmmas.append((number, add, product, acc))
        return []

    @staticmethod
    def _in_memory(view: View, env: Env) -> bool:
        return isinstance(env[view.ref], Buffer)

    def _read_until(self, t: Thread, instr: Instr, view: View, env: Env, end: float) -> None:
        """Until when a product reads an operand, for the timeline."""
        if isinstance(env[view.ref], Buffer):
            buffer, place = self.place(t, instr, view, env, "multiplies")
            self.use(t.cta, buffer, place, "read", t.now, end)

    def _bank_conflicts(self, t: Thread, instr: Instr, env: Env, operands: tuple[View, View], times: int) -> int:
        """The conflicts of reading both operands. times: how often the right one is read, for 64 rows each time."""
        total = 0
        for view, n in zip(operands, (1, times), strict=True):
            if isinstance(buffer := env[view.ref], Buffer) and buffer.space == "smem":
                buffer, place = self.place(t, instr, view, env, "multiplies")
                shape = place.shape[::-1] if view.transposed else place.shape
                total += n * of_operand(shape, bits_of(buffer.dtype) // 8, view.tiling)
        return self.conflicts(instr, total)

    def _depth(self, view: View, env: Env, t: Thread, instr: Instr) -> tuple[int, int]:
        """(the summed dimension of a left operand, bits of its elements)."""
        ref = env[view.ref]
        if not isinstance(ref, Buffer):
            return np.shape(ref)[-1], bits_of(np.asarray(ref).dtype)
        buffer, place = self.place(t, instr, view, env, "multiplies")
        return place.shape[-1], bits_of(buffer.dtype)

    def _multiply(self, t: Thread, instr: Instr, kind: str, flops: int, width: int, conflicts: int = 0) -> float:
        """The time of a product: when it is done. conflicts: cycles that its operands come late by."""
        start, end = t.cta.tensor.take(t.now, self._cycles(flops, width, conflicts))
        self.timeline.add(t.cta.number, "tensor", kind, start, end, instr)
        return end

    def _cycles(self, flops: int, width: int, conflicts: int) -> float:
        """How long the tensor cores take for a product, which is counted."""
        self.timeline.counts.products += 1
        self.timeline.counts.flops += flops
        return flops / self.timeline.chip.tensor_flops * width / 16 + conflicts

    def _operand(self, t: Thread, instr: Instr, view: View, env: Env, number: int) -> Callable[[], np.ndarray]:
        """How to get at an operand when the product is carried out; a note of what it reads."""
        ref = env[view.ref]
        if not isinstance(ref, Buffer):
            return lambda: np.asarray(ref)
        buffer, place = self.place(t, instr, view, env, "multiplies")
        self.reads(buffer, place, t, Access(t.multiplying, number, instr, t.name, "wgmma reads", "wgmma"))
        return lambda: place.read(buffer.values)

    def finish_products(self, t: Thread, instr: Instr | None, n: int) -> Going:
        """Waits until at most n wgmmas of a thread are on their way."""
        start, tensor = t.now, t.cta.tensor
        while len(t.wgmmas) > n:
            number, add, product, _ = t.wgmmas[0]
            while (end := tensor.expected(product)) > t.now:
                t.now = end
                yield None  # what others issue until then may make it later
            tensor.advance(t.now)
            t.wgmmas.popleft()
            add()
            t.knowledge.clock[t.multiplying] = number
        if instr is not None:
            self.timeline.waited(t.cta.number, t.lane, start, t.now, instr)
        return []

    def go_wgmma_wait(self, t: Thread, instr: Instr, env: Env) -> Going:
        yield from self.finish_products(t, instr, instr.p["n"])
        return []

    def go_acc_read(self, t: Thread, instr: Instr, env: Env) -> Going:
        acc, wait = env[instr.ins[0]], instr.p.get("wait_n", 0)
        if wait is not None:
            yield from self.finish_products(t, instr, int(wait))
        if any(a is acc for *_, a in t.wgmmas):
            self.finding("acc-in-flight", acc, t, instr, "reads", engine="wgmma")
        return [acc.values.copy()]

    def go_acc_write(self, t: Thread, instr: Instr, env: Env) -> Going:
        acc, value = (env[i] for i in instr.ins)
        yield from self.finish_products(t, instr, 0)
        acc.values = np.array(value)
        return [value] * len(instr.outs)  # JAX gives the store a result, which is of no use

    def do_mma(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        acc, a, b = (np.asarray(env[i]) for i in instr.ins)
        self._multiply(t, instr, "mma", 2 * acc.size * a.shape[-1], bits_of(a.dtype))
        return [(acc + matmul(a, b)).astype(acc.dtype)]

    # -- Blackwell: accumulators in TMEM, and products that a barrier ends

    def go_tcgen05(self, t: Thread, instr: Instr, env: Env) -> Going:
        yield None
        p, cta = instr.p, t.cta
        ctas = self.partners(cta, flat([p["axis"]])) if p["axis"] is not None else [cta]
        if ctas[0] is not cta:  # the first CTA of a pair multiplies for both
            return []
        cta.products += 1
        number, keep = cta.products, bool(np.asarray(env[p["accumulate"]]))
        acc, where = self.place(t, instr, p["acc"], env, "adds to")
        _, a_place = self.place(t, instr, p["a"], env, "multiplies")
        _, b_place = self.place(t, instr, p["b"], env, "multiplies")

        def access(verb: str) -> Access:
            return Access(cta.tensor_agent, number, instr, t.name, verb, "tcgen05")

        def parts(ref: Buffer) -> list[Buffer]:
            return [ref if c is cta else self.in_cta(ref, c, cta) for c in ctas]

        lefts, rights, accs = parts(self.buffer(t, p["a"], env)), parts(self.buffer(t, p["b"], env)), parts(acc)
        for refs, place in ((lefts, a_place), (rights, b_place)):
            for ref in refs:
                self.reads(ref, place, t, access("tcgen05_mma reads"))
        for ref in accs:
            if keep:
                self.reads(ref, where, t, access("tcgen05_mma adds to"))
            self.writes(ref, where, t, access("tcgen05_mma writes"))

        def add() -> None:
            whole = np.concatenate([b_place.read(r.values) for r in rights], axis=-1)
            for left, ref in zip(lefts, accs, strict=True):
                a = a_place.read(left.values)
                total = ((where.read(ref.values) if keep else 0) + matmul(a, whole)).astype(ref.dtype)
                where.set(ref.values, total)
                notice(instr.eqn, [a, whole], [total])

        flops = 2 * int(np.prod(where.shape)) * a_place.shape[-1]
        conflicts = self._bank_conflicts(t, instr, env, (p["a"], p["b"]), 1)
        end = self._multiply(t, instr, "tcgen05", flops, bits_of(lefts[0].dtype), conflicts)
        for view in (p["a"], p["b"]):
            self._read_until(t, instr, view, env, end)
        cta.mmas.append((number, add, end))
        if "barrier" in p:
            self._commit_mmas(t, instr, env, ctas)
        return []

    def do_tcgen05_arrive(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        axis = instr.p["axis"]
        ctas = self.partners(t.cta, flat([axis])) if axis is not None else [t.cta]
        if not self.held_back(instr, env) and ctas[0] is t.cta:
            self._commit_mmas(t, instr, env, ctas)
        return []

    def _commit_mmas(self, t: Thread, instr: Instr, env: Env, ctas: list[Cta]) -> None:
        """Arrives on a barrier, in each of these CTAs, when all products so far are done."""
        cta, view = t.cta, instr.p["barrier"]
        slot, barrier = self.slot(t, view, env), env[view.ref]
        at = next(k for k, s in barrier.slots.items() if s is slot)
        due, last = list(cta.mmas), cta.products
        end = max((e for _, _, e in due), default=t.now)

        def land() -> None:
            for mma in due:
                if mma in cta.mmas:
                    mma[1]()
                    cta.mmas.remove(mma)

        told = t.tell()
        told.clock[cta.tensor_agent] = last
        for other in ctas:
            theirs = slot if other is cta else self.in_cta(barrier, other, cta).slots[at]
            self.timeline.counts.arrivals += 1
            theirs.bring(land, 0, end)
            theirs.arrive(t.name, instr.line, told, end, (cta.number, "tensor"))

    def do_wait_tmem(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        t.knowledge.clock[t.loading] = t.tmem
        self.loaded[t.loading].append((t.tmem, t.agent, t.epoch))
        return []

    def do_fence_tensor(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        t.knowledge.fence_tensor()
        return []

    def do_commit_tmem(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        t.knowledge.clock[t.filling] = t.tmem
        return []


def _within(place: Place, array: np.ndarray) -> np.ndarray:
    """What is there, zeros beyond the end of the array: what the copy engine brings."""
    found = np.asarray(place.get(array))
    if not place.clipped:
        return np.array(found)
    whole = np.zeros(place.shape, array.dtype)
    whole[tuple(slice(n) for n in found.shape)] = found
    return whole


def _inside_bytes(place: Place, buffer: Buffer) -> int:
    """How many bytes of a place are inside of its array."""
    if not place.clipped:
        return place.nbytes
    return int(np.size(place.get(buffer.values))) * bits_of(buffer.dtype) // 8


def _split(shape: tuple[int, ...], n: int, which: int, axis: int) -> tuple[slice, ...]:
    """The part of one of n CTAs along an axis."""
    size = -(-shape[axis] // n)
    return tuple(
        slice(which * size, min((which + 1) * size, length)) if d == axis else slice(0, length)
        for d, length in enumerate(shape)
    )


_REDUCE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
