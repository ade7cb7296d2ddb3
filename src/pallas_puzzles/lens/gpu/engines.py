"""What works beside the warpgroups: the copy engine (TMA) and the tensor cores (wgmma, tcgen05)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.gpu_program import Instr, View
from ...ir.ops import OPS, bits_of, matmul, nbytes_of, poison
from ...ir.places import Place
from .accesses import Env
from .banks import of_operand
from .barriers import Slot
from .clocks import join
from .machine import Control, Going, Waiting
from .memory import Access, Buffer
from .threads import Cta, Thread
from .timeline import Product


class Engines(Control):
    """The rules for copies and products."""

    # -- from GMEM to SMEM

    def go_load_tma(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        """A copy, which the CTAs of a cluster may share: each brings its part to all of them. With a leader: each
        brings its part to itself, and the barrier of the first one counts all of them."""
        yield None
        p, started = instr.p, t.now
        src, here = self.place(t, instr, p["src"], env, "copies from", clips=True)
        dst, there = self.place(t, instr, p["dst"], env, "copies into")
        if here.clipped:
            self.finding("padding", src, t, instr, "copies from", total=int(np.prod(here.shape, dtype=int)))
        ctas = self.partners(t.cta, p["axes"])
        n, mine, leader = len(ctas), ctas.index(t.cta), p["leader"] if len(ctas) > 1 else None
        slots = self.slots(t, p["barrier"], env, ctas)
        slot = slots[mine]
        self.timeline.counts.copies += 1
        start, end = self._transfer(t, instr, "load", src, here, n)
        told, data = t.tell(), here.read(src.values, np.zeros)  # zeros beyond the end of the array
        if leader is not None:
            key = (...,) if leader < 0 else _split(here.shape, n, mine, leader)
            parts = [(t.cta, slots[0], there, data[key])]
        else:
            key = _split(there.shape, n, mine, next((d for d, size in enumerate(there.shape) if size % n == 0), 0))
            part, data = there.part(key) if n > 1 else there, data.reshape(there.shape)[key]
            parts = [(cta, theirs, part, data) for cta, theirs in zip(ctas, slots, strict=True)]
        for cta, theirs, part, piece in parts:
            ref = dst if cta is t.cta else self.in_cta(dst, cta, t.cta)
            access = Access(theirs.agent, theirs.round + 1, instr, t.name, "the copy into", "copy", barrier=theirs)
            self._into(ref, part, t, access, theirs, piece, end)
            self.use(cta, ref, there, "load", start, end)
        first = slots[0] if leader is not None else slot
        self.reads(src, here, t, Access(first.agent, first.round + 1, instr, t.name, "copies from", "copy"))
        if leader is None or mine == 0:
            self.timeline.counts.arrivals += 1
            slot.parts += n
            at_once, cause = t.held[0] == started, t.held[1]
            slot.arrive(t.name, instr.line, told, end, (t.cta.number, "copy"), cause=cause if at_once else None)

    def _into(
        self, dst: Buffer, there: Place, t: Thread, access: Access, slot: Slot, data: np.ndarray, end: float
    ) -> None:
        """Data that lands in SMEM with a round of a barrier; what is there until then is garbage."""
        self.writes(dst, there, t, access)
        there.set(dst.values, poison((), dst.dtype))

        coming = t.cta.coming
        coming[id(access)] = access, dst

        def land() -> None:
            coming.pop(id(access), None)
            there.set(dst.values, data.reshape(there.shape))

        slot.bring(land, -1, end)

    def _transfer(
        self, t: Thread, instr: Instr, kind: str, buffer: Buffer, place: Place, shared: int = 1
    ) -> tuple[float, float]:
        """The time of a copy to or from a place in GMEM: its start, and when a load is all there, or a store has been
        read. shared: by how many CTAs the work is."""
        nbytes = nbytes_of(np.shape(place.get(buffer.values)), place.dtype) // shared  # of what is inside of the array
        self.moved(t, instr, kind, nbytes)
        start, end = t.cta.copy.take(t.now, nbytes / self.timeline.gmem_rate)
        end += self.timeline.chip.latency if kind == "load" else 0
        self.timeline.add((t.cta.number, "copy"), kind, start, end, instr, buffer.name)
        return start, end

    # -- from SMEM to GMEM

    def go_store_tma(self, t: Thread, instr: Instr, env: Env) -> Waiting:
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
        self.writes(dst, there, t, Access(t.storing, group, instr, t.name, "the copy into", engine, index=t.index))
        self.timeline.counts.stores += 1
        start, end = self._transfer(t, instr, "store", dst, there)
        self.use(t.cta, src, here, "store", start, end)

        def land() -> None:
            value = here.read(src.values).reshape(there.shape)
            there.set(dst.values, OPS[str(reduce)](there.read(dst.values), value) if reduce else value)

        t.stores.append((group, land, end, end + self.timeline.chip.latency, instr, src))
        if p["commit"]:
            t.groups = group

    def do_commit_group(self, t: Thread, instr: Instr, env: Env) -> None:
        t.groups += 1

    def do_wait_stores(self, t: Thread, instr: Instr, env: Env) -> None:
        last, start, only_read = t.groups - instr.p["n"], t.now, instr.p.get("wait_read_only")
        for store in [s for s in t.stores if s[0] <= last]:
            _, land, has_read, done, *_ = store
            land()
            t.now = max(t.now, has_read if only_read else done)
            t.stores.remove(store)
        join(t.knowledge.clock, {t.reading: last} if only_read else {t.reading: last, t.storing: last})
        self.timeline.waited(t.at, start, t.now, instr)

    def end(self, t: Thread) -> None:
        """A thread ends: its stores must have read their SMEM."""
        for _, land, _, done, instr, src in t.stores:
            land()
            t.now = max(t.now, done)
            self.finding("store-in-flight", src, t, instr, "ends")
        t.stores.clear()
        list(self.finish_products(t, None, 0))

    # -- tensor cores

    def go_wgmma(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        yield None
        p, t.products = instr.p, t.products + 1
        acc, where = self.place(t, instr, p["acc"], env, "adds to")
        left, right = operands = self._operands(t, instr, env)
        for each in operands:
            access = Access(t.multiplying, t.products, instr, t.name, "wgmma reads", "wgmma")
            self.reads(each.buffer, each.place, t, access)

        def add() -> None:
            a, b = left.value(), right.value()
            total = (where.read(acc.values) + matmul(a, b)).astype(acc.dtype)
            where.set(acc.values, total)

        def over(product: Product) -> None:
            for start, end in product.slices:
                self.timeline.add((t.cta.number, "tensor"), "wgmma", start, end, instr)
            self._used(t.cta, operands, product.issued, product.end)

        k, width = left.place.shape[-1], bits_of(left.buffer.dtype)
        conflicts = self._bank_conflicts(instr, operands, where.shape[0] // 64)
        instructions = max(1, k * width // 256)  # of 32 bytes along K
        cycles = self._cycles(2 * int(np.prod(where.shape)) * k, width, conflicts)
        product = Product(cycles / instructions, instructions, t.now, over)
        idle_since = t.cta.tensor.issue(t.lane, product)
        if idle_since is not None:
            self.timeline.idle(t.at, idle_since, t.now, t.finished)
        t.wgmmas.append((t.products, add, product, acc))

    def _operands(self, t: Thread, instr: Instr, env: Env) -> "tuple[_Operand, _Operand]":
        def operand(view: View) -> _Operand:
            if isinstance(env[view.ref], Buffer):
                return _Operand(view, *self.place(t, instr, view, env, "multiplies"))
            array = np.asarray(env[view.ref])
            buffer = Buffer("", array.shape, array.dtype, "regs", array)
            return _Operand(view, buffer, Place(array.shape, array.dtype))

        return operand(instr.p["a"]), operand(instr.p["b"])

    def _used(self, cta: Cta, operands: "Sequence[_Operand]", start: float, end: float) -> None:
        """Until when a product reads its operands, for the timeline."""
        for each in operands:
            self.use(cta, each.buffer, each.place, "read", start, end)

    def _bank_conflicts(self, instr: Instr, operands: "Sequence[_Operand]", times: int) -> int:
        """The conflicts of reading both operands. times: how often the right one is read, for 64 rows each time."""
        total = 0
        for each, n in zip(operands, (1, times), strict=True):
            if each.buffer.space == "smem":
                shape = each.place.shape[::-1] if each.view.transposed else each.place.shape
                total += n * of_operand(shape, bits_of(each.buffer.dtype) // 8, each.view.tiling)
        return self.conflicts(instr, total)

    def _multiply(self, t: Thread, instr: Instr, kind: str, flops: int, width: int, conflicts: int = 0) -> float:
        """The time of a product: when it is done. conflicts: cycles that its operands come late by."""
        start, end = t.cta.tensor.take(t.now, self._cycles(flops, width, conflicts))
        self.timeline.add((t.cta.number, "tensor"), kind, start, end, instr)
        return end

    def _cycles(self, flops: int, width: int, conflicts: int) -> float:
        """How long the tensor cores take for a product, which is counted."""
        self.timeline.counts.flops += flops
        return flops / self.timeline.chip.tensor_flops * width / 16 + conflicts

    def finish_products(self, t: Thread, instr: Instr | None, n: int) -> Waiting:
        """Waits until at most n wgmmas of a thread are on their way."""
        start, tensor = t.now, t.cta.tensor
        while len(t.wgmmas) > n:
            number, add, product, _ = t.wgmmas[0]
            while (end := tensor.expected(product)) > t.now:
                t.now = end
                yield None  # what others issue until then may make it later
            tensor.advance(t.now)
            t.wgmmas.pop(0)
            add()
            t.knowledge.clock[t.multiplying] = number
        if instr is not None:
            self.timeline.waited(t.at, start, t.now, instr)
            if t.now > start and not t.wgmmas:
                t.finished = instr.line

    def go_wgmma_wait(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        yield from self.finish_products(t, instr, instr.p["n"])

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

    def go_run_state(self, t: Thread, instr: Instr, env: Env) -> Going:
        values = iter([env[i] for i in instr.ins])
        cells: list[Any] = []
        for alloc, given in zip(instr.p["cells"], instr.p["given"], strict=True):
            value = next(values) if given else None
            cells.append(value if alloc is None else Buffer(alloc.name, alloc.shape, alloc.dtype, "regs", value))
        yield from self.run(instr.p["programs"][0], cells, t)
        yield from self.finish_products(t, instr, 0)
        return [c if alloc is None else c.values for c, alloc in zip(cells, instr.p["cells"], strict=True)]

    def do_mma(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        acc, a, b = (np.asarray(env[i]) for i in instr.ins)
        self._multiply(t, instr, "mma", 2 * acc.size * a.shape[-1], bits_of(a.dtype))
        return [(acc + matmul(a, b)).astype(acc.dtype)]

    # -- Blackwell: accumulators in TMEM, and products that a barrier ends

    def go_tcgen05(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        yield None
        p, cta = instr.p, t.cta
        ctas = self.partners(cta, p["axes"])
        if ctas[0] is not cta:  # the first CTA of a pair multiplies for both
            return
        cta.products += 1
        number, keep = cta.products, bool(np.asarray(env[p["accumulate"]]))
        acc, where = self.place(t, instr, p["acc"], env, "adds to")
        left, right = operands = self._operands(t, instr, env)

        def access(verb: str) -> Access:
            return Access(cta.tensor_agent, number, instr, t.name, verb, "tcgen05")

        def parts(ref: Buffer) -> list[Buffer]:
            return [ref if c is cta else self.in_cta(ref, c, cta) for c in ctas]

        lefts, rights, accs = parts(left.buffer), parts(right.buffer), parts(acc)
        for refs, each in ((lefts, left), (rights, right)):
            for ref in refs:
                self.reads(ref, each.place, t, access("tcgen05_mma reads"))
        for ref in accs:
            if keep:
                self.reads(ref, where, t, access("tcgen05_mma adds to"))
            self.writes(ref, where, t, access("tcgen05_mma writes"))

        def add() -> None:
            whole = np.concatenate([right.place.read(r.values) for r in rights], axis=-1)
            for its, ref in zip(lefts, accs, strict=True):
                a = left.place.read(its.values)
                total = ((where.read(ref.values) if keep else 0) + matmul(a, whole)).astype(ref.dtype)
                where.set(ref.values, total)

        flops = 2 * int(np.prod(where.shape)) * left.place.shape[-1]
        conflicts = self._bank_conflicts(instr, operands, 1)
        end = self._multiply(t, instr, "tcgen05", flops, bits_of(left.buffer.dtype), conflicts)
        self._used(cta, operands, t.now, end)
        cta.mmas.append((number, add, end))
        if "barrier" in p:
            self._commit_mmas(t, instr, env, ctas)

    def do_tcgen05_arrive(self, t: Thread, instr: Instr, env: Env) -> None:
        ctas = self.partners(t.cta, instr.p["axes"])
        if ctas[0] is t.cta:
            self._commit_mmas(t, instr, env, ctas)

    def _commit_mmas(self, t: Thread, instr: Instr, env: Env, ctas: list[Cta]) -> None:
        """Arrives on a barrier, in each of these CTAs, when all products so far are done."""
        cta = t.cta
        due, last = list(cta.mmas), cta.products
        end = max((e for _, _, e in due), default=t.now)

        def land() -> None:
            for mma in due:
                if mma in cta.mmas:
                    mma[1]()
                    cta.mmas.remove(mma)

        told = t.tell()
        told.clock[cta.tensor_agent] = last
        for theirs in self.slots(t, instr.p["barrier"], env, ctas):
            self.timeline.counts.arrivals += 1
            theirs.bring(land, 0, end)
            theirs.arrive(t.name, instr.line, told, end, (cta.number, "tensor"))

    def do_wait_tmem(self, t: Thread, instr: Instr, env: Env) -> None:
        t.knowledge.clock[t.loading] = t.tmem
        self.loaded[t.loading].append((t.tmem, t.agent, t.epoch))

    def do_fence_tensor(self, t: Thread, instr: Instr, env: Env) -> None:
        """tcgen05.fence::before_thread_sync."""
        t.knowledge.tensor = {agent: time for agent, time in t.knowledge.clock.items() if agent < 0}

    def do_commit_tmem(self, t: Thread, instr: Instr, env: Env) -> None:
        t.knowledge.clock[t.filling] = t.tmem


@dataclasses.dataclass(frozen=True, slots=True)
class _Operand:
    """What a product multiplies: a part of a Ref, or an array in registers."""

    view: View
    buffer: Buffer
    place: Place

    def value(self) -> np.ndarray:
        """What it holds now."""
        return self.place.read(self.buffer.values)


def _split(shape: tuple[int, ...], n: int, which: int, axis: int) -> tuple[slice, ...]:
    """The part of one of n CTAs along an axis."""
    size = -(-shape[axis] // n)
    key = [slice(0, length) for length in shape]
    key[axis] = slice(which * size, min((which + 1) * size, shape[axis]))
    return tuple(key)
