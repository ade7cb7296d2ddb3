"""A machine for a shard_map over several devices, with pallas_calls that copy to other devices, or without.

    run = lens.devices.run(fn, *args)    # fn calls jax.shard_map over a mesh of several devices
    run.outputs      what fn returns, as NumPy arrays; None where the devices wait for ever
    run.findings     a list of Finding: races, deadlocks, copies that nobody waits for; [] for a right function
    run.notes        a list of Finding that are not wrong by themselves
    run.counts       Counts: bytes between devices, bytes x hops, what overlaps with compute, on a logical clock
    run.traces       what device 0 did, call by call; run.devices: the same for each device
    run.events, run.transfers    what each device did from when to when, and each copy between devices

Each device runs on its own until it waits. What orders accesses is followed by vector clocks, see clocks.py; no wait is
taken to say more than it does, see world.py. Where that depends on what comes later, everything runs once more.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...ir.capture import Call, Capture, Evaluator, Programs, capture, line_of, primitive_of
from ...ir.meshes import (
    COLLECTIVES,
    SAME,
    Mesh,
    Sharded,
    axes_of,
    collective,
    joined,
    names_in,
    part,
    sends,
    shard,
    sharded,
)
from ...ir.ops import Beyond
from .. import machine as lens
from ..findings import Hangs
from ..machine import Trace
from .findings import NOTES, Finding, Waiter
from .machine import left_over, run_on
from .timeline import Counts, Event, Transfer
from .world import Key, World

_RUNS = 4  # at most: until nothing new is found out about what may come before a wait


class Run(lens.Run):
    """A function run on a mesh. mesh: the largest. devices: of the last shard_map, by device, its calls."""

    mesh: Mesh
    devices: list[list[Trace]]
    findings: list[Finding]
    notes: list[Finding]
    counts: Counts
    events: list[Event]
    transfers: list[Transfer]
    joins: list[tuple[np.ndarray, Any, Mesh]]  # results of shard_maps: (the whole array, how it is cut, the mesh)

    def parts_of(self, output: np.ndarray) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """(device, its part) of an output that is the result of a shard_map; nothing for another one."""
        for whole, cuts, mesh in reversed(self.joins):
            if whole.shape == output.shape and np.array_equal(whole, output, equal_nan=whole.dtype.kind not in "iub"):
                for device in range(mesh.size):
                    cut = part(whole.shape, cuts, mesh, device)
                    yield device, (*cut, *(slice(0, size) for size in whole.shape[len(cut) :]))
                return

    @property
    def hangs(self) -> bool:
        return any(f.kind == "deadlock" for f in self.findings)


class _OnDevice(Evaluator):
    """Runs the body of a shard_map on one device."""

    def __init__(self, world: World, device: int) -> None:
        super().__init__(self._kernel)
        self.world, self.device = world, device
        self.traces: list[Trace] = []
        self.results: list[Any] = []
        self.met: dict[Any, int] = {}

    def _kernel(self, call: Call, eqn: Any, values: list[Any]) -> list[Any]:
        number = (len(self.traces),)
        trace = run_on(self.world, self.device, call, number, eqn)
        self.traces.append(trace)
        return list(trace.outputs)

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, mesh = primitive_of(eqn), self.world.mesh
        if name == "axis_index":
            return [np.int32(mesh.coordinates(self.device)[axes_of(eqn)[0]])]
        if name in SAME:
            return list(values)
        if name in COLLECTIVES:
            outputs = self._together(eqn, values)
            self._note_work(eqn, values, outputs)
            return outputs
        if name == "shard_map":
            raise Beyond("a shard_map inside of another one")
        if mesh.axes.keys() & names_in(eqn):
            raise Beyond(f"{name} between devices")
        return super().apply(eqn, values)

    def _together(self, eqn: Any, values: list[Any]) -> list[Any]:
        """A collective: waits until each device of the group has come, and knows of all that they knew."""
        world, names = self.world, axes_of(eqn)
        group = world.mesh.group(self.device, names)
        time = self.met[id(eqn)] = self.met.get(id(eqn), 0) + 1
        member, line = group.index(self.device), line_of(eqn)
        key: Key = (group[0], "collective", id(eqn), time)
        meeting = world.meetings.setdefault(key, {})
        told = world.tell(self.device)[1]
        came = world.timeline.now[self.device]
        for to, nbytes in sends(eqn, group, member):
            came = max(came, world.timeline.send(self.device, to, nbytes, line, primitive_of(eqn))[1])
        meeting[member] = values, told, came

        def waiter() -> Waiter:
            who, what = world.mesh.name(self.device), f"the other devices at {primitive_of(eqn)}"
            return Waiter(who, line, what, len(meeting), len(group))

        world.wait(self.device, lambda: len(meeting) == len(group), waiter)
        for _, clock, _ in meeting.values():
            world.clock[self.device].join(clock)
        world.timeline.wait(self.device, max(at for _, _, at in meeting.values()), "wait", line, primitive_of(eqn))
        return collective(eqn, [meeting[i][0] for i in range(len(group))])[member]


class _Meshes:
    """Runs the shard_maps of a function, one after the other."""

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.devices: list[list[Trace]] = []
        self.traces: list[Trace] = []
        self.calls: list[Call] = []  # reached, whether they have ended or not
        self.joins: list[tuple[np.ndarray, Any, Mesh]] = []

    def run(self, outer: Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
        of = sharded(eqn)
        early: dict[Any, Any] = {}
        for _ in range(_RUNS):
            world, on = self._once(of, early, values)
            if world.found.hangs or all(len(early.get(key, ())) >= len(found) for key, found in world.late.items()):
                break
            early = {**early, **world.late}
        self.worlds.append(world)
        self.devices = [each.traces for each in on]
        self.traces += on[0].traces
        self.calls += on[0].calls
        if world.found.hangs:
            raise Hangs
        left_over(world)
        outer.calls += on[0].calls
        outer.outside.update(on[0].outside)
        outputs = []
        for number, cuts in enumerate(of.outs):
            whole, apart = joined([each.results[number] for each in on], cuts, of.mesh)
            if apart is not None:
                one, other, line = of.mesh.name(0), of.mesh.name(apart), line_of(eqn)
                world.finding("unequal", f"result {number}", one, other, "returns", line)
            outputs.append(whole)
            self.joins.append((whole, cuts, of.mesh))
            if id(on[0].results[number]) in on[0].made:
                outer.keep([whole])
        return outputs

    def _once(self, of: Sharded, early: dict[Any, Any], values: list[Any]) -> tuple[World, list[_OnDevice]]:
        world = World(of.mesh, early)
        on = [_OnDevice(world, device) for device in range(of.mesh.size)]

        def body(device: int) -> None:
            given = [shard(x, cuts, of.mesh, device) for x, cuts in zip(values, of.ins, strict=True)]
            on[device].results = on[device].run(of.body, given)

        world.run(body)
        return world, on


def run(fn: Callable[..., Any], *args: Any, programs: Programs | None = None, **kwargs: Any) -> Run:
    """Runs `fn(*args, **kwargs)` with each shard_map over several devices in the machine.

    args: arrays or pytrees of arrays, the whole ones; kwargs: static. programs: see ir.capture.capture. Raises Beyond,
    and what the reader's code raises.
    """
    meshes = _Meshes()

    def on_call(call: Call, eqn: Any, values: list[Any]) -> list[Any]:
        meshes.calls.append(call)
        meshes.traces.append(lens.run_call(call))
        return list(meshes.traces[-1].outputs)

    try:
        seen = capture(fn, *args, on_call=on_call, on_mesh=meshes.run, programs=programs, **kwargs)
    except Hangs:
        seen = Capture(meshes.calls, None, [], [], "")
    found = [f for world in meshes.worlds for f in world.found.all()]
    made = Run(meshes.traces, seen.outputs, seen.outside, seen.from_kernel, seen.calls, seen.chip or lens.CHIP)
    made.findings, made.notes = ([f for f in found if (f.kind in NOTES) == noted] for noted in (False, True))
    made.devices, made.joins = meshes.devices, meshes.joins
    made.mesh = max((w.mesh for w in meshes.worlds), key=lambda m: m.size, default=Mesh({}))
    made.counts = _together([w.timeline.counts() for w in meshes.worlds])
    made.events = [e for w in meshes.worlds[:1] for e in w.timeline.events]
    made.transfers = [t for w in meshes.worlds[:1] for t in w.timeline.transfers]
    return made


def _together(each: list[Counts]) -> Counts:
    """What several shard_maps cost, one after the other."""
    sums = {field.name: sum(getattr(c, field.name) for c in each) for field in dataclasses.fields(Counts)}
    return Counts(**{**sums, "devices": max((c.devices for c in each), default=1)})


__all__ = ["Counts", "Event", "Finding", "Run", "Transfer", "run"]
