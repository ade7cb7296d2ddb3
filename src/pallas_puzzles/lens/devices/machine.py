"""One device of a mesh: a machine whose copies and signals reach others, and whose accesses to memory are followed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...ir.capture import Call, SourceLine, asked_line_of, line_of
from ...ir.ops import Beyond, around, following, inside_of
from ...ir.places import Place
from ..copies import plain_ref
from ..flight import Transfer
from ..machine import Execution, Machine, Trace
from ..memory import Buffer
from ..regions import region_of
from .findings import Access, Finding, Waiter
from .world import Arrival, Key, Stopped, World


class Device(Machine):
    """The machine of one call, or of a pipeline inside of it, on one device. number: of the call on its device."""

    def __init__(
        self,
        call: Call,
        world: World,
        device: int,
        number: Key,
        collective_id: int | None,
        outer: "Device | None" = None,
    ) -> None:
        super().__init__(call, outer)
        self.world, self.device, self.number = world, device, number
        self.collective_id = collective_id
        self.scopes: dict[int, int] = outer.scopes if outer is not None else {}
        self.lines: dict[tuple[int, ...], SourceLine | None] = {}
        shared = Buffer("the barrier", np.zeros((), np.int32), "semaphore", "scratch", self)
        self.barrier: Buffer = outer.barrier if outer is not None else shared

    def within(self, call: Call) -> "Device":
        return Device(call, self.world, self.device, self.number, self.collective_id, self)

    def apply(self, eqn: Any, values: list[Any]) -> Any:
        if self.world.dead:
            raise Stopped
        return super().apply(eqn, values)

    def _do_cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        with inside_of(eqn):
            return super()._do_cond(eqn, values)

    def _line(self, eqn: Any) -> SourceLine | None:
        """The reader's line of an equation. pl.when(condition)(copy.start) has none of its own: JAX's code makes it."""
        chain = eqn, *around.get()
        key = tuple(map(id, chain))
        if key not in self.lines:
            found = (line_of(each) for each in chain)
            self.lines[key] = asked_line_of(chain) or next((line for line in found if line is not None), None)
        return self.lines[key]

    def _arithmetic(self, eqn: Any) -> Callable[[Any, list[Any]], Any]:
        act, product = super()._arithmetic(eqn), eqn.primitive.name == "dot_general"

        def timed(eqn: Any, values: list[Any]) -> Any:
            before = self.flops + self.transcendentals
            out = act(eqn, values)
            if done := self.flops + self.transcendentals - before:
                self.world.timeline.compute(self.device, done, product, lambda: self._line(eqn))
            return out

        return timed

    def _do_axis_index(self, eqn: Any, values: list[Any]) -> Any:
        name = eqn.params["axis_name"]
        if name in self.world.mesh.axes and name not in self.call.grid_names:
            return np.int32(self.world.mesh.coordinates(self.device)[name])
        return super()._do_axis_index(eqn, values)

    # -- memory

    @property
    def who(self) -> str:
        return self.world.mesh.name(self.device)

    def scoped(self, eqn: Any) -> list[Buffer]:
        buffers = super().scoped(eqn)
        time = self.scopes[id(eqn)] = self.scopes.get(id(eqn), 0) + 1
        for i, buffer in enumerate(buffers):
            self.world.add(self.device, (*self.number, id(eqn), time, i), buffer)
        return buffers

    def _where(self, ref: Buffer, transforms: Any, verb: str, eqn: Any) -> tuple[Place, bool]:
        found = super()._where(ref, transforms, verb, eqn)
        self.touched(ref, found[0], verb, self._line(eqn))
        return found

    def touched(self, ref: Buffer, place: Place, verb: str, line: SourceLine | None) -> None:
        if ref.role == "scalar" or ref.space == "semaphore" or ref not in self.world.homes:
            return
        clock = self.world.clock[self.device]
        self.world.access(ref, place, self.world.here(self.device), clock, Access(self.who, verb, line))

    # -- other devices

    def _target(self, device: Any, eqn: Any) -> int:
        """The number of the device that a copy or signal goes to."""
        mesh = self.world.mesh
        if device is None:
            return self.device
        by_number = "logical" in str(eqn.params.get("device_id_type", "")).lower()
        at = mesh.coordinates(self.device)
        if isinstance(device, dict):
            if any(not isinstance(name, str) or name not in mesh.axes for name in device):
                raise Beyond(f"a device_id over the axes {list(device)}, on a mesh with {list(mesh.axes)}")
            at |= {name: int(np.asarray(i)) for name, i in device.items()}
        elif by_number:
            number = int(np.asarray(device))
            at = mesh.coordinates(number) if 0 <= number < mesh.size else dict.fromkeys(mesh.axes, number)
        else:
            given = device if isinstance(device, tuple | list) else (device,)
            at = {name: int(np.asarray(i)) for name, i in zip(mesh.axes, given, strict=True)}
        found = mesh.device(at)
        if found is None:
            there = tuple(at.values())
            shown = f"device {there[0] if len(there) == 1 else there}"
            self.world.finding("no-device", shown, self.who, self.who, "addresses", self._line(eqn))
            found = mesh.device({name: i % mesh.axes[name] for name, i in at.items()})
            assert found is not None, "each index is within its axis"
        return found

    def _entered(self, target: int, ref: Buffer, eqn: Any) -> None:
        """Whether a device that a copy goes to is in this kernel, and whether this device can know."""
        if target == self.device:
            return
        key, world, line = (target, self.number), self.world, self._line(eqn)
        began = self.world.entered.get(key)
        if began is None or world.clock[self.device].devices[target] < began:
            world.finding("not-entered", ref.name, world.mesh.name(target), self.who, "copies into", line)
        if began is None:
            what = f"{world.mesh.name(target)} to enter the kernel"
            world.wait(self.device, lambda: key in world.entered, lambda: Waiter(self.who, line, what, 0, 1))

    def _peer(self, view: Any, target: int) -> tuple[Buffer, Any]:
        """(the buffer of a device that a Ref of this one stands for, its transforms)."""
        ref, transforms = plain_ref(view)
        if target == self.device:
            return ref, transforms
        _, key = self.world.homes[ref]
        found = self.world.buffers.get((target, key))
        if found is None:
            raise Beyond(f"a copy into {ref.name} of a device that does not have it yet")
        return found, transforms

    def _address(self, target: int, sem: Any, eqn: Any, transforms: Any = ()) -> tuple[Key, str]:
        """(the semaphore of a device, by what it is in the program, and its name)."""
        ref, number, name = self._number(sem, eqn, transforms)
        if ref is self.barrier:
            return (target, "barrier", self.collective_id), name
        return (target, *self.world.homes[ref][1], number), name

    # -- copies

    def _do_dma_start(self, eqn: Any, values: list[Any]) -> None:
        src, dst, dst_sem, src_sem, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        world, line, to = self.world, self._line(eqn), self._target(device, eqn)
        self._entered(to, plain_ref(dst)[0], eqn)
        (source, here), (target, there) = self._peer(src, self.device), self._peer(dst, to)
        reads, writes = self.locate(source, here, "copies from", eqn), self.locate(target, there, "copies to", eqn)
        if not writes.nbytes:
            return
        reader, read_clock = world.half(self.device, world.tell(self.device)[1])
        writer, write_clock = world.half(self.device, read_clock)
        name = f"the copy from {self.who}" + (f" to {world.mesh.name(to)}" if to != self.device else "")
        world.access(source, reads, reader, read_clock, Access(name, "reads", line))
        world.access(target, writes, writer, write_clock, Access(name, "writes", line))
        if to != self.device:
            shown = region_of(writes, target.shape).named(target.name)
            left, came = world.timeline.send(self.device, to, writes.nbytes, line, shown)
        else:
            left = came = world.timeline.local(self.device, writes.nbytes)
        copy = Transfer(source, reads, target, writes, eqn)
        for at, sem, where, event, clock, when, happen in (
            (3, src_sem, self.device, reader, read_clock, left, self._read),
            (2, dst_sem, to, writer, write_clock, came, self._deliver),
        ):
            if sem is not None:
                amount = writes.nbytes if self._counts_bytes(eqn, at) else 1
                key, sem_name = self._address(where, sem, eqn)
                later = functools.partial(happen, copy)
                world.arrive(key, Arrival(event, amount, clock, name, line, when, later), sem_name)

    def _read(self, copy: Transfer) -> None:
        if copy.value is not None:
            return
        super()._read(copy)
        assert copy.value is not None, "it has been read"
        if not np.all(copy.known):
            name = region_of(copy.reads, copy.src.shape).named(copy.src.name)
            count = int(copy.value.size - np.count_nonzero(np.broadcast_to(copy.known, copy.value.shape)))
            self.world.finding("unwritten", name, self.who, self.who, "sends", line_of(copy.eqn), count=count)

    def _is_traffic(self, copy: Transfer) -> bool:
        return copy.src.space != copy.dst.space and super()._is_traffic(copy)

    def _do_dma_wait(self, eqn: Any, values: list[Any]) -> None:
        _, dst, sem = jax.tree.unflatten(eqn.params["tree"], values)[:3]
        if nbytes := self._nbytes(dst, eqn):
            counts = self._counts_bytes(eqn, 2)
            self._wait(sem, (), nbytes if counts else 1, eqn, dma=counts)

    def _wait(self, sem: Any, transforms: Any, needed: int, eqn: Any, *, dma: bool, take: bool = True) -> None:
        key, name = self._address(self.device, sem, eqn, transforms)
        self.world.take(key, needed, self._line(eqn), name, "bytes" if dma else "", take)

    # -- signals

    def _do_get_barrier_semaphore(self, eqn: Any, values: list[Any]) -> Any:
        return self.barrier

    def _do_semaphore_signal(self, eqn: Any, values: list[Any]) -> None:
        ref, transforms, amount, device, core = jax.tree.unflatten(eqn.params["args_tree"], values)[:5]
        if core is not None:
            raise Beyond("a signal to another core")
        world, to = self.world, self._target(device, eqn)
        event, clock = world.tell(self.device)
        key, name = self._address(to, ref, eqn, transforms)
        if to != self.device:
            world.timeline.signals += 1
        n, now = int(np.asarray(amount)), world.timeline.now[self.device]
        arrival = Arrival(event, n, clock, self.who, self._line(eqn), now)
        world.arrive(key, arrival, name)

    def _do_semaphore_read(self, eqn: Any, values: list[Any]) -> Any:
        """What a semaphore holds: what is on its way arrives, and others go first, so that a loop of reads ends."""
        ref, transforms = jax.tree.unflatten(eqn.params["args_tree"], values)[:2]
        key, name = self._address(self.device, ref, eqn, transforms)
        semaphore = self.world.semaphore(key, name)
        self.world.take(key, semaphore.coming, self._line(eqn), name, take=False)
        return np.int32(semaphore.count)


def run_on(world: World, device: int, call: Call, number: Key, eqn: Any) -> Trace:
    """Runs a call on one device of a mesh. number: which of its calls it is. Raises Beyond."""
    collective_id = getattr(eqn.params.get("compiler_params"), "collective_id", None)
    with following(call.name):
        execution = Execution(Device(call, world, device, number, collective_id))
        for i, buffer in enumerate([*execution.local, *execution.scratch]):
            world.add(device, (*number, i), buffer)
        world.entered[device, number] = world.tick(device).count
        return execution.run()


def left_over(world: World) -> None:
    """What is wrong with semaphores, and with what was brought into scratch memory, once all devices have ended."""
    for key, semaphore in world.semaphores.items():
        where = world.mesh.name(key[0])
        if semaphore.due:
            first, count = semaphore.due[0], len(semaphore.due)
            world.finding("unwaited", semaphore.name, where, first.who, "is on its way", first.line, count=count)
        elif semaphore.count:
            who, line = next(reversed(semaphore.sources), (where, None))
            world.finding("left-over", semaphore.name, where, who, "signals", line, count=semaphore.count)
    for buffer, history in world.histories.items():
        for access, region in history.unread() if buffer.role == "scratch" else ():
            world.found.add(Finding("unread", region.named(buffer.name), world.home(buffer), access))
