"""Runs the program of a plgpu.kernel, one warpgroup at a time: control flow, Refs, barriers, semaphores.

A thread is a generator: it yields why it cannot go on, and None where others may go first. What copies and products do
lands as late as their waits allow, so that a missing wait shows in the values, the same way in every run.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ...ir.gpu_program import Alloc, Instr, Program
from ...ir.ops import bits_of, scan_groups, scan_order, scan_results, witness_now
from ...ir.places import Place
from .accesses import Core, Env
from .banks import of_warps
from .barriers import NAMED, Semaphore, Several, Slot, Wait
from .memory import Access, Buffer
from .threads import Cta, Going, Spawn, Thread

Waiting = Generator[Wait | Spawn | None, None, None]  # of what gives no result


class Control(Core):
    """Control flow, loads and stores, scopes, barriers and semaphores: one method for each kind of instruction."""

    instructions = 0  # that were run, each program's when it begins

    def run(self, program: Program, values: Iterable[Any], t: Thread) -> Going:
        """Runs a program; returns its results."""
        env, witness = program.template.copy(), witness_now()
        self.instructions += len(program.instrs)
        for slot, value in zip(program.ins, values, strict=True):
            env[slot] = value
        for instr in program.instrs:
            kind = instr.kind
            if kind == "array":
                out = instr.evaluate([env[i] for i in instr.ins])
                if instr.flops or instr.specials:
                    self._compute(t, instr)
            elif (predicate := instr.p.get("predicate")) is not None and not bool(np.asarray(env[predicate])):
                out = []
            elif (plain := getattr(self, "do_" + kind, None)) is not None:
                out = plain(t, instr, env)
            else:
                out = yield from getattr(self, "go_" + kind)(t, instr, env)
            if witness is not None and instr.eqn is not None:
                witness(instr.eqn, [env[i] for i in instr.ins], out or ())
            for slot, value in zip(instr.outs, out or (), strict=True):
                env[slot] = value
        return [env[i] for i in program.outs]

    def _compute(self, t: Thread, instr: Instr) -> None:
        chip, counts = self.timeline.chip, self.timeline.counts
        start = t.now
        t.now += instr.flops / chip.alu + instr.specials / chip.special
        counts.flops += instr.flops
        self.timeline.worked(t.at, "compute", start, t.now, instr)

    def do_silent(self, t: Thread, instr: Instr, env: Env) -> None:
        """What makes no difference here."""

    def do_same(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        return [env[i] for i in instr.ins]

    def do_axis_index(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        names = instr.p["axis_name"]
        names = names if isinstance(names, tuple) and names not in t.index else (names,)
        sizes = {**self.kernel.grid, **self.kernel.cluster, self.kernel.thread_name: self.kernel.threads}
        index = 0
        for name in names:
            index = index * sizes.get(name, 1) + t.index[name]
        return [np.int32(index)]

    # -- control flow

    def go_inline(self, t: Thread, instr: Instr, env: Env) -> Going:
        return (yield from self.run(instr.p["programs"][0], [env[i] for i in instr.ins], t))

    def go_cond(self, t: Thread, instr: Instr, env: Env) -> Going:
        which, *values = (env[i] for i in instr.ins)
        branches = instr.p["programs"]
        return (yield from self.run(branches[min(max(int(which), 0), len(branches) - 1)], values, t))

    def go_while(self, t: Thread, instr: Instr, env: Env) -> Going:
        (test, body), (nt, nb) = instr.p["programs"], instr.p["consts"]
        values = [env[i] for i in instr.ins]
        state = values[nt + nb :]
        while bool(np.asarray((yield from self.run(test, [*values[:nt], *state], t))[0])):
            state = yield from self.run(body, [*values[nt : nt + nb], *state], t)
        return state

    def go_scan(self, t: Thread, instr: Instr, env: Env) -> Going:
        consts, carry, xs = scan_groups(instr.eqn, [env[i] for i in instr.ins])
        stacked, n = [], len(carry)
        for i in scan_order(instr.eqn):
            values = [*consts, *carry, *(np.asarray(x)[i] for x in xs)]
            out = yield from self.run(instr.p["programs"][0], values, t)
            carry = out[:n]
            stacked.append(out[n:])
        return scan_results(instr.eqn, carry, stacked)

    def go_warps(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        values = [env[i] for i in instr.ins]
        children = []
        for w in range(instr.p["warps"]):
            name, lane, index = f"warp {w} of {t.name}", f"{t.lane} warp {w}", {**t.index, instr.p["axis"]: w}
            warp = Thread(t.cta, name, lane, index, t.now, width=32)
            warp.knowledge.learn(t.knowledge)
            warp.seen, warp.scopes, warp.tries = t.seen.copy(), t.scopes.copy(), t.tries
            warp.going = self.run(instr.p["programs"][0], values, warp)
            children.append(warp)
        t.tell()
        yield Spawn(children)
        for warp in children:
            t.knowledge.learn(warp.tell())
            t.now = max(t.now, warp.now)
            t.seen |= warp.seen

    # -- scopes

    def go_run_scoped(self, t: Thread, instr: Instr, env: Env) -> Going:
        collective = self.kernel.thread_name in instr.p["axes"] or self.kernel.threads == 1
        refs = self.scope(t.cta, (instr, t.scopes[instr], None if collective else t.name))
        t.scopes[instr] += 1
        return (yield from self.run(instr.p["programs"][0], [*(env[i] for i in instr.ins), *refs], t))

    def scope(self, cta: Cta, key: Any) -> list[Any]:
        """What a CTA has of a scope, and makes when somebody needs it first. key: begins with its instruction."""
        if key not in cta.shared:
            cta.shared[key] = [self._allocate(alloc, key, i) for i, alloc in enumerate(key[0].p["allocs"])]
        refs: list[Any] = cta.shared[key]
        return refs

    def _allocate(self, alloc: Alloc, key: Any, number: int) -> Any:
        if alloc.kind == "barrier":
            needed = alloc.arrivals * math.prod(self.kernel.cluster[a] for a in alloc.axes)
            self.timeline.counts.barriers += math.prod(alloc.shape)
            return Several(alloc, lambda name: Slot(name, alloc, needed=needed))
        if alloc.kind == "semaphore":
            if (key[0], number) not in self.semaphores:
                self.semaphores[key[0], number] = Several(alloc, lambda name: Semaphore(name, alloc))
            return self.semaphores[key[0], number]
        zeros = np.zeros(alloc.shape, alloc.dtype) if alloc.kind == "acc" else None
        return Buffer(alloc.name, alloc.shape, alloc.dtype, alloc.space, zeros)

    # -- loads and stores

    def do_read(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        buffer, place = self.place(t, instr, instr.p["view"], env, "reads")
        self.reads(buffer, place, t, self.own(t, instr, "reads", buffer.space))
        self._move(t, instr, buffer, place, "load")
        value = place.read(buffer.values)
        return [value, *([] if len(instr.outs) == 1 else [value.max(-1)])]

    def do_write(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        buffer, place = self.place(t, instr, instr.p["view"], env, "stores into")
        value = np.asarray(env[instr.p["value"]])
        old = place.read(buffer.values) if instr.outs or instr.p["add"] else None
        self.writes(buffer, place, t, self.own(t, instr, "stores into", buffer.space))
        self._move(t, instr, buffer, place, "store")
        place.set(buffer.values, old + value if instr.p["add"] else value)
        return [old] if instr.outs else []

    def _move(self, t: Thread, instr: Instr, buffer: Buffer, place: Place, kind: str) -> None:
        """The time and the bytes of a load or store by a thread."""
        chip, counts, nbytes = self.timeline.chip, self.timeline.counts, place.nbytes
        start = t.now
        if buffer.space == "gmem":
            _, end = t.cta.copy.take(t.now, nbytes / self.timeline.gmem_rate)
            t.now = end + (chip.latency if kind == "load" else 0)
            counts.thread_bytes += nbytes
            self.moved(t, instr, kind, nbytes)
            self.timeline.worked(t.at, kind, start, t.now, instr, buffer.name)
        elif buffer.space == "smem":
            t.now += nbytes / chip.smem_bytes
            t.now += self.conflicts(instr, _bank_conflicts(instr, buffer, place))
            self.use(t.cta, buffer, place, "read" if kind == "load" else "compute", start, t.now)
            self.timeline.worked(t.at, kind, start, t.now, instr, buffer.name)

    def moved(self, t: Thread, instr: Instr, kind: str, nbytes: int) -> None:
        """Counts bytes between GMEM and an SM. kind: "load" or "store"."""
        counts = self.timeline.counts
        counts.moved_at[instr.line] += nbytes
        t.cta.moved += nbytes
        if kind == "load":
            counts.gmem_read_bytes += nbytes
        else:
            counts.gmem_write_bytes += nbytes

    def conflicts(self, instr: Instr, conflicts: int) -> int:
        """Counts bank conflicts. Each takes a cycle."""
        if conflicts:
            self.timeline.counts.bank_conflicts += conflicts
            self.timeline.counts.conflicts_at[instr.line] += conflicts
        return conflicts

    def do_commit_smem(self, t: Thread, instr: Instr, env: Env) -> None:
        """The async proxy sees all that the thread knows of."""
        t.knowledge.fenced = t.tell().clock

    # -- barriers

    def do_arrive(self, t: Thread, instr: Instr, env: Env) -> None:
        """One arrival; on a ClusterBarrier, one at each CTA that shares it."""
        self.timeline.counts.arrivals += 1
        told, view = t.tell(), instr.p["barrier"]
        for peer in self.slots(t, view, env, self.partners(t.cta, env[view.ref].alloc.axes)):
            peer.arrive(t.name, instr.line, told, t.now, t.at)

    def partners(self, cta: Cta, axes: Sequence[Any]) -> list[Cta]:
        """The CTAs of a cluster that differ along these axes only, in order; without any, the CTA alone."""
        same = [axis for axis in self.kernel.cluster if axis not in axes]
        return [other for other in cta.cluster.ctas.values() if all(other.index[a] == cta.index[a] for a in same)]

    def go_wait(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        slot = self.slot(t, instr, env)
        number = t.seen[slot]
        t.seen[slot] += 1
        slot.waited = max(slot.waited, number + 1)
        slot.waits[t.name, instr.line] += 1
        yield from self._wait_for(t, instr, slot, number)

    def _wait_for(self, t: Thread, instr: Instr, slot: Slot, number: int) -> Waiting:
        """Waits for a round of a barrier."""
        yield None
        while slot.round <= number:
            yield Wait(lambda: slot.round > number, instr.line, slot, number)
        if slot.round > number + 1:
            self.finding("lapped", slot, t, instr, "waits for", detail=(number, slot.round))
        ended = slot.land(number)
        t.knowledge.learn(ended.knowledge)
        self.timeline.waited(t.at, t.now, ended.time, instr, slot.name, ended.last)
        self.timeline.handover(t.at, slot.name, ended.last, t.now)
        if ended.time > t.now:
            t.now, t.held = ended.time, (ended.time, ended.last[2])
        yield None  # those who are behind now take the engines first

    def go_arrive_wait(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        self.do_arrive(t, instr, env)
        yield from self.go_wait(t, instr, env)

    def go_named(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        """bar.sync and bar.arrive: barriers that have a number, and count threads (PTX ISA 9.7.13.1). Every thread that
        arrives is counted, those that wait included; what it did before is known to all that wait."""
        p = instr.p
        number = p["number"] if "number" in p else int(np.asarray(env[p["slot"]]))
        slot = t.cta.named.get(number)
        if slot is None:
            slot = t.cta.named[number] = Slot(f"the named barrier {number}", NAMED, needed=p["threads"])
        round_ = slot.round
        self.timeline.counts.arrivals += 1
        slot.arrive(t.name, instr.line, t.tell(), t.now, t.at, t.width)
        if p["waits"]:
            yield from self._wait_for(t, instr, slot, round_)

    def do_test(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        slot = self.slot(t, instr, env)
        number = t.seen[slot]
        if slot.round <= number:
            return [np.bool_(False)]
        slot.waited = max(slot.waited, number + 1)
        ended = slot.land(number)
        t.knowledge.learn(ended.knowledge)
        t.now = max(t.now, ended.time)
        return [np.bool_(True)]

    # -- semaphores

    def do_signal(self, t: Thread, instr: Instr, env: Env) -> None:
        semaphore = self.slot(t, instr, env)
        semaphore.count += int(np.asarray(env[instr.p["amount"]]))
        semaphore.knowledge.learn(t.tell())
        semaphore.time = max(semaphore.time, t.now)
        semaphore.arrived[t.name, instr.line] += 1

    def go_sem_wait(self, t: Thread, instr: Instr, env: Env) -> Waiting:
        semaphore = self.slot(t, instr, env)
        amount = int(np.asarray(env[instr.p["amount"]]))
        while semaphore.count < amount:
            yield Wait(lambda: semaphore.count >= amount, instr.line, semaphore, amount)
        decrement = instr.p.get("decrement")
        if decrement is None or bool(np.asarray(env[decrement])):
            semaphore.count -= amount
        t.knowledge.learn(semaphore.knowledge)
        self.timeline.waited(t.at, t.now, semaphore.time, instr, semaphore.name)
        t.now = max(t.now, semaphore.time)

    def do_sem_read(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        semaphore = self.slot(t, instr, env)
        t.knowledge.learn(semaphore.knowledge)
        return [np.int32(semaphore.count)]

    # -- work that is taken over from clusters that have not started

    def do_cancel(self, t: Thread, instr: Instr, env: Env) -> None:
        buffer, place = self.place(t, instr, instr.p["result"], env, "asks into")
        cluster, number = t.cta.cluster, t.tries
        t.tries += 1
        slot = self.slot(t, instr, env)
        if t.index.get(self.kernel.thread_name, 0) == 0:
            self.writes(buffer, place, t, Access(slot.agent, slot.round + 1, instr, t.name, "the answer to", "copy"))

        def answer() -> None:
            while len(cluster.claimed) <= number:
                cluster.claimed.append(self.pending.popleft() if self.pending else None)
            t.cta.shared[id(buffer), self.region(buffer, place)] = [cluster.claimed[number]]

        slot.bring(answer, 0, t.now)
        self.do_arrive(t, instr, env)

    def do_query(self, t: Thread, instr: Instr, env: Env) -> list[Any]:
        buffer, place = self.place(t, instr, instr.p["result"], env, "asks")
        self.reads(buffer, place, t, self.own(t, instr, "reads"))
        (index,) = t.cta.shared.get((id(buffer), self.region(buffer, place)), [None])
        names = instr.p["names"]
        return [*(np.int32(index[n] if index else 0) for n in names), np.bool_(index is not None)]


def _bank_conflicts(instr: Instr, buffer: Buffer, place: Place) -> int:
    """Those of a load or store by a warpgroup, as far as its layout and that of the Ref are known."""
    p = instr.p
    tiling, optimized = p["view"].tiling, p["optimized"]
    if p.get("layout") != "WGMMA" or p["view"].transposed or (tiling == (None, None) and optimized):
        return 0
    return of_warps(place.shape, bits_of(buffer.dtype) // 8, tiling, optimized)
