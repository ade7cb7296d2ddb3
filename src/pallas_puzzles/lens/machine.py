"""A small NumPy machine: runs a captured kernel one grid step at a time and remembers who wrote each element, and when.

An interpreter: its rules, and those of tally.py, read equations themselves, as ir/ does. The primitives on Refs (get,
swap, dma_start, ...) and their parameters are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import (
    CHIP,
    UNKNOWN,
    Call,
    Operand,
    Outside,
    Programs,
    SourceLine,
    arg_names,
    capture,
    describe_pipeline,
    everywhere,
    line_of,
    space_of,
)
from ..ir.folded import folded
from ..ir.held import held, kept
from ..ir.ops import (
    ELEMENTWISE,
    Beyond,
    all_finite,
    cost,
    evaluate,
    evaluator,
    following,
    holds_keys,
    inlined,
    inside_of,
    interpret,
    is_floating,
    nbytes_of,
    np_dtype,
    poison,
    run_scan,
    run_while,
    to_keys,
    to_numpy,
)
from ..ir.places import Place, locate
from ..ir.program import scoped_bytes, temporaries
from ..text import human_bytes, plural
from .copies import Copies, known_in, plain_ref
from .flight import Flight, Semaphore
from .memory import Buffer, Marks
from .sparse import SparseCore

MAX_STEPS = 16384
PLANNED_STEPS = 1 << 20
MOST_VMEM = 128 << 20  # bytes: what TPU v5e and v6e have, and no other has more
SURELY = 2  # the compiler may need so much less for temporaries than `ir.held` says
NOT_VISITED, NOT_STORED, STALE, WRITTEN = range(4)


@dataclasses.dataclass(slots=True)
class Event:
    """One load, store or delivered copy. `whole`: it touched every element of the ref."""

    step: int
    op: str  # "load" | "store" | "dma"
    ref: str
    whole: bool
    eqn: Any

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn)


@dataclasses.dataclass(frozen=True)
class Incident:
    """Something that the machine saw and that is wrong, or would explain a wrong result."""

    kind: str
    step: int
    at: tuple[int, ...]
    ref: str
    eqn: Any = None
    count: int = 0
    total: int = 0
    block: tuple[int, ...] | None = None
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn)


@dataclasses.dataclass
class Trace:
    """What a call did. Lists over operands are indexed by k (position in call.operands), over steps by s.

    changed: whether the block is another one than at the step before. moved: whether it is copied, before the step
    (inputs) or after it (outputs). state: per output and element NOT_VISITED, NOT_STORED, STALE or WRITTEN; writer: the
    last step that stored it, or -1.
    """

    call: Call
    steps: list[tuple[int, ...]]
    blocks: list[list[Any]] = dataclasses.field(default_factory=list)  # tuples of int; None where it stays in HBM
    changed: list[list[bool]] = dataclasses.field(default_factory=list)
    moved: list[list[bool]] = dataclasses.field(default_factory=list)
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    state: list[Marks] = dataclasses.field(default_factory=list)
    writer: list[Marks] = dataclasses.field(default_factory=list)
    visits: list[dict[tuple[int, ...], list[list[int]]]] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    flops: list[int] = dataclasses.field(default_factory=list)
    transcendentals: list[int] = dataclasses.field(default_factory=list)
    dma_bytes: list[int] = dataclasses.field(default_factory=list)
    pipelines: "list[Pipeline]" = dataclasses.field(default_factory=list)
    flight: Flight = dataclasses.field(default_factory=Flight)  # the copies that the kernel starts itself
    first: int = 0  # the number of the first step that is here, in a grid of which only a part is
    total: "Figures | None" = None  # what the whole grid costs, where only a part of it is here

    @property
    def n(self) -> int:
        return len(self.steps)

    def with_pipelines(self) -> "Iterator[Trace]":
        """This trace, and those of the pipelines inside of the kernel."""
        yield self
        for pipeline in self.pipelines:
            for inner in pipeline.traces:
                yield from inner.with_pipelines()


@dataclasses.dataclass(frozen=True)
class OperandFigures:
    """What one operand costs. once_bytes: moving the whole array once. exact: False where moves are estimated."""

    operand: Operand
    buffers: int
    vmem_bytes: int
    moves: int
    hbm_bytes: int
    once_bytes: int
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a call costs: bytes between HBM and VMEM, VMEM held, arithmetic done.

    temporary_bytes: an estimate of what values of the kernel take of VMEM besides, see `ir.held`. exposed_bytes,
    in_flight_bytes: of copies that the kernel starts itself, see `flight.Flight`.
    """

    name: str
    operands: list[OperandFigures]
    scratch_bytes: int
    vmem_bytes: int
    temporary_bytes: int
    dma_bytes: int
    hbm_bytes: int
    once_bytes: int
    flops: int
    transcendentals: int
    steps: int
    computed: bool  # whether the arithmetic is known
    exposed_bytes: int = 0
    in_flight_bytes: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the traffic is counted, not estimated."""
        return all(row.exact for row in self.operands)

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved between HBM and VMEM."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None


def figures(trace: Trace) -> Figures:
    """The costs of a traced call; blocks that hang over the edge count only their part inside the array."""
    if trace.total is not None:
        return trace.total
    rows = []
    for o, blocks, moved in zip(trace.call.operands, trace.blocks, trace.moved, strict=True):
        copied = [block for block, moves in zip(blocks, moved, strict=True) if moves]
        elements = elements_of(o, np.array(copied, np.int64).reshape(len(copied), len(o.dims)))
        rows.append(operand_figures(o, len(copied), nbytes_of((elements,), o.dtype)))
    return figures_of(
        trace.call,
        rows,
        trace.pipelines,
        sum(trace.dma_bytes),
        flops=sum(trace.flops),
        transcendentals=sum(trace.transcendentals),
        steps=trace.n,
        computed=len(trace.flops) == trace.n,
        exposed_bytes=trace.flight.exposed_bytes,
        in_flight_bytes=trace.flight.in_flight_bytes,
    )


def figures_of(
    call: Call, rows: list[OperandFigures], pipelines: "list[Pipeline]", dma_bytes: int, **work: Any
) -> Figures:
    """What a call moves and holds. pipelines: inside of it. work: the other fields of Figures."""
    scratch = sum(s.nbytes for s in call.scratch if s.space == "vmem") + scoped_bytes(call.kernel)
    inside = max((p.vmem_bytes for p in pipelines), default=0)  # they follow one another
    return Figures(
        name=call.name,
        operands=rows,
        scratch_bytes=scratch,
        vmem_bytes=scratch + sum(r.vmem_bytes for r in rows) + inside,
        temporary_bytes=held(call.kernel)[0],
        dma_bytes=dma_bytes,
        hbm_bytes=dma_bytes + sum(r.hbm_bytes for r in rows),
        once_bytes=sum(r.once_bytes for r in rows),
        **work,
    )


def elements_of(o: Operand, blocks: np.ndarray) -> int:
    """How many elements of the array are in these blocks, one a row."""
    inside = np.ones(len(blocks), np.int64)
    for place, d, size in zip(blocks.T.astype(np.int64), o.dims, o.shape, strict=True):
        start = place - d.padding[0] if d.kind == "element" else place * d.size
        inside *= np.maximum(np.minimum(start + d.size, size) - np.maximum(start, 0), 0)
    return int(inside.sum())


def operand_figures(o: Operand, moves: int, nbytes: int) -> OperandFigures:
    """What an operand costs whose blocks are copied so often, and are so many bytes together."""
    if o.in_hbm or not o.copied:
        return OperandFigures(o, 0, 0, 0, 0, o.array_bytes if o.in_hbm else 0)
    buffers = 1 if o.stays_whole else o.buffer_count
    vmem = buffers * o.block_bytes if o.space == "vmem" else 0
    return OperandFigures(o, buffers, vmem, moves, nbytes, o.array_bytes)


@dataclasses.dataclass
class Pipeline:
    """An emit_pipeline inside of a kernel: its first run, those with incidents, how often it runs, what all runs cost.

    hbm_bytes: between HBM and VMEM, over all runs. vmem_bytes: what it holds.
    """

    traces: list[Trace] = dataclasses.field(default_factory=list)
    runs: float = 0
    hbm_bytes: int = 0
    vmem_bytes: int = 0

    def add(self, trace: Trace, costs: Figures) -> None:
        if not self.traces or (trace.incidents and len(self.traces) < _KEPT_RUNS):
            self.traces.append(trace)
        self.runs += 1
        self.hbm_bytes += costs.hbm_bytes
        self.vmem_bytes = max(self.vmem_bytes, costs.vmem_bytes)


_KEPT_RUNS = 16

# --- the machine -----------------------------------------------------------------------------------------------------


_SILENT = frozenset(["debug_print", "debug_callback", "delay", "check", "trace_value", "prng_seed"])


def _selected_once(jaxpr: Any, v: Any) -> bool:
    """Whether the only use of a value, and of what is computed of it element by element, is as a case of a select."""
    users = [e for e in jaxpr.eqns if any(u is v for u in e.invars)]
    if len(users) != 1 or any(u is v for u in jaxpr.outvars):
        return False
    (user,) = users
    if user.primitive.name == "select_n":
        return user.invars[0] is not v
    if user.primitive.name in ELEMENTWISE and user.outvars[0].aval.shape == v.aval.shape:
        return _selected_once(jaxpr, user.outvars[0])
    inner = inlined(user)
    if inner is None or sum(u is v for u in user.invars) != 1:
        return False
    return _selected_once(inner, inner.invars[next(n for n, u in enumerate(user.invars) if u is v)])


_EXPONENTIALS = frozenset({"exp", "exp2"})
_WATCHED = frozenset([*_EXPONENTIALS, "div", "log", "sub", "mul"])


def _born(name: str, values: list[np.ndarray], out: np.ndarray) -> tuple[str, int]:
    """What makes an inf or NaN out of operands that have none (an inf may come out of an inf), and how often."""
    if name == "log":
        zero, negative = int(np.count_nonzero(values[0] == 0)), int(np.count_nonzero(values[0] < 0))
        return ("log(0) is -inf", zero) if zero else ("the log of a negative number is NaN", negative)
    a, b = np.broadcast_arrays(*values)
    if name == "div":
        zero_by_zero = int(np.count_nonzero((a == 0) & (b == 0)))
        by_zero = int(np.count_nonzero(np.isfinite(a) & (b == 0)))
        return ("0 / 0 is NaN", zero_by_zero) if zero_by_zero else ("a division by 0 is infinite", by_zero)
    bad = np.isnan(out)
    if bad.any():  # an infinity alone is none that has been made here
        bad &= ~(np.isnan(a) | np.isnan(b))
    return ("inf - inf is NaN" if name == "sub" else "0 times infinity is NaN"), int(np.count_nonzero(bad))


def _silent(eqn: Any, values: list[Any]) -> Any:
    return [] if eqn.primitive.multiple_results else values[0] if values else None


def _wanted(eqn: Any) -> bool:
    """Whether somebody looks at a result of an equation."""
    return any(type(v).__name__ != "DropVar" for v in eqn.outvars)


class Machine(Copies, SparseCore):
    """Runs the programs of one grid: a call's, or that of a pipeline inside of a kernel, whose machine is `outer`."""

    def __init__(self, call: Call, outer: "Machine | None" = None):
        self.call, self.outer = call, outer
        self.step = 0
        self.index: tuple[int, ...] = ()
        self.visit_start = 0
        self.events: list[Event] = []
        self.incidents: list[Incident] = []
        # reads of garbage that a select may leave out, and where they are noted
        self.unsure: list[tuple[np.ndarray, np.ndarray, Incident, list[Incident]]] = []
        self.flops = self.transcendentals = self.dma_bytes = 0
        self.pipelines: dict[int, Pipeline] = {}
        self.semaphores: dict[tuple[Buffer, int], Semaphore] = outer.semaphores if outer is not None else {}
        self.acts: dict[int, Callable[[Any, list[Any]], Any]] = {}
        self.flight: Flight = (
            outer.flight
            if outer is not None
            else Flight(any(s.space == "semaphore" for s in call.scratch), kept(call.kernel))
        )
        self.static: dict[int, Any] = {}
        self.places: dict[int, tuple[Place, bool]] = {}
        self.grid_axes = [d for d in range(len(call.grid)) if d not in call.vmapped]
        self.rules: dict[str, Callable[[Any, list[Any]], Any]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def incident(
        self, kind: str, ref: str, eqn: Any, count: int = 0, total: int = 0, block: Any = None, **more: Any
    ) -> None:
        at = tuple(int(i) for i in self.index)
        self.incidents.append(Incident(kind, self.step, at, ref, eqn, count, total, block, more))

    # -- programs

    def run(self, jaxpr: Any, values: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
        return interpret(jaxpr, values, self._results, consts)

    def _results(self, eqn: Any, values: list[Any]) -> list[Any]:
        out = self.apply(eqn, values)
        return (out or []) if eqn.primitive.multiple_results else [out]

    def apply(self, eqn: Any, values: list[Any]) -> Any:
        act = self.acts.get(id(eqn))
        if act is None:
            act = self.acts[id(eqn)] = self._act(eqn, values)
        return act(eqn, values)

    def _act(self, eqn: Any, values: list[Any]) -> Callable[[Any, list[Any]], Any]:
        """What an equation does, each time."""
        name = eqn.primitive.name
        if name in self.rules:
            return self.rules[name]
        if name in _SILENT:
            return _silent
        inner = inlined(eqn)
        if inner is not None:
            return lambda _, values: self.run(inner, values)
        if any(isinstance(v, Buffer) for v in values):
            raise Beyond(f"the primitive {name} on a Ref")
        return self._arithmetic(eqn)

    def _arithmetic(self, eqn: Any) -> Callable[[Any, list[Any]], Any]:
        name, run = eqn.primitive.name, evaluator(eqn)
        flops, transcendentals = (0, 0) if id(eqn) in folded(self.call.kernel) else cost(eqn)
        work = flops + transcendentals
        selects, elementwise = name == "select_n", name in ELEMENTWISE
        dtype = np_dtype(eqn.outvars[0].aval)
        watched = name in _WATCHED and is_floating(dtype)
        limit = math.log(np.finfo(dtype).max) if name == "exp" and dtype.kind == "f" else None

        def act(eqn: Any, values: list[Any]) -> Any:
            self.flops += flops
            self.transcendentals += transcendentals
            if work:
                self.flight.computed(eqn, work)
            fits = limit is not None and bool(np.max(values[0], initial=-np.inf) < limit)
            out = run(values, reuse=fits or not watched)
            if self.unsure and selects:
                self._withdraw(values[0], values[1:])
            elif self.unsure and elementwise:  # what is made of garbage is garbage, too
                self.unsure += [(out, *rest) for v, *rest in self.unsure if any(v is value for value in values)]
            if watched and not fits and not all_finite(out):
                self._watch(name, eqn, values, out)
            return out

        return act

    def _watch(self, name: str, eqn: Any, values: list[Any], out: np.ndarray) -> None:
        """Notes arithmetic that may explain a wrong result, not all of which is finite: where inf or NaN is born."""
        if name in _EXPONENTIALS:
            if np.isinf(out).any() and not np.isinf(np.asarray(values[0])).any():
                self.incident("overflow", "", eqn, largest=float(np.max(np.asarray(values[0]), initial=-np.inf)))
            return
        what, count = _born(name, [np.asarray(v) for v in values], out)
        if count:
            self.incident("born", "", eqn, what=what, count=count, total=out.size)

    def _do_cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self.run(eqn.params["branches"][int(np.asarray(values[0]))], values[1:])

    def _do_scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        return run_scan(eqn, values, lambda xs: self.run(eqn.params["jaxpr"], xs))

    def _do_while(self, eqn: Any, values: list[Any]) -> list[Any]:
        return run_while(eqn, values, self.run)

    def _do_run_scoped(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self.run(eqn.params["jaxpr"], self.scoped(eqn), values)

    def scoped(self, eqn: Any) -> list[Buffer]:
        """What a run_scoped allocates."""
        jaxpr = eqn.params["jaxpr"]
        return [
            Buffer.empty(n, tuple(getattr(v.aval, "shape", ())), np_dtype(v.aval), space_of(v.aval), "scratch", self)
            for n, v in zip(arg_names(jaxpr), jaxpr.invars, strict=True)
        ]

    def _do_emit_pipeline(self, eqn: Any, values: list[Any]) -> None:
        call, refs = describe_pipeline(eqn, values, self.call.name)
        places = []
        for o, ref in zip(call.operands, refs, strict=True):
            buffer, transforms = plain_ref(ref)
            places.append((buffer, self.locate(buffer, transforms, "blocks", eqn)))
            o.copied = buffer.space in ("any", "hbm")
        with inside_of(eqn):
            trace = Execution(self.within(call), places).run()
        costs = figures(trace)
        self.flops += costs.flops
        self.transcendentals += costs.transcendentals
        self.dma_bytes += costs.hbm_bytes
        self.pipelines.setdefault(id(eqn), Pipeline()).add(trace, costs)

    def within(self, call: Call) -> "Machine":
        """The machine of a pipeline inside of this kernel."""
        return Machine(call, self)

    def touched(self, ref: Buffer, place: Place, verb: str, line: SourceLine | None) -> None:
        """A pipeline reads or writes a block of a Ref. For machines that others can reach."""

    def _do_program_id(self, eqn: Any, values: list[Any]) -> Any:
        return np.int32(self.index[self.grid_axes[eqn.params["axis"]]])

    def _do_num_programs(self, eqn: Any, values: list[Any]) -> Any:
        return np.int32(self.call.grid[self.grid_axes[eqn.params["axis"]]])

    def _do_axis_index(self, eqn: Any, values: list[Any]) -> Any:
        name = eqn.params["axis_name"]
        if name in self.call.grid_names:
            return np.int32(self.index[self.call.grid_names.index(name)])
        if self.outer is not None:
            return self.outer._do_axis_index(eqn, values)
        raise Beyond(f"the position on the mesh axis {name!r}: several devices")

    def _do_multiple_of(self, eqn: Any, values: list[Any]) -> Any:
        return values[0]

    def _do_optimization_barrier(self, eqn: Any, values: list[Any]) -> list[Any]:
        return list(values)

    def _do_roll(self, eqn: Any, values: list[Any]) -> Any:
        x, shift = np.asarray(values[0]), int(np.asarray(values[1]))
        axis, stride, stride_axis = (eqn.params.get(k) for k in ("axis", "stride", "stride_axis"))
        if stride is None:
            return np.roll(x, shift, axis)
        rows = np.split(x, x.shape[stride_axis], stride_axis)
        return np.concatenate([np.roll(r, shift + i * stride, axis) for i, r in enumerate(rows)], stride_axis)

    # -- loads and stores

    def _do_get(self, eqn: Any, values: list[Any]) -> Any:
        return self.load(values[0], self._transforms(eqn, values[1:]), eqn)

    def _do_swap(self, eqn: Any, values: list[Any]) -> Any:
        if "has_mask" in eqn.params:  # the SparseCore has a primitive of this name, too
            return self.store_vector(eqn, values)
        return self.store(values[0], self._transforms(eqn, values[2:]), values[1], eqn)

    def _do_addupdate(self, eqn: Any, values: list[Any]) -> None:
        transforms = self._transforms(eqn, values[2:])
        old = self.load(values[0], transforms, eqn)
        self.store(values[0], transforms, old + np.asarray(values[1]).astype(old.dtype), eqn)

    def _do_masked_load(self, eqn: Any, values: list[Any]) -> Any:
        ref, transforms, mask, other = jax.tree.unflatten(eqn.params["args_tree"], values)
        ref, transforms = plain_ref(ref, transforms)
        loaded = self.load(ref, transforms, eqn, mask)
        if mask is None:
            return loaded
        fallback = poison(loaded.shape, loaded.dtype) if other is None else other
        return np.where(np.asarray(mask), loaded, fallback).astype(loaded.dtype, copy=False)

    def _do_masked_swap(self, eqn: Any, values: list[Any]) -> Any:
        ref, transforms, value, mask = jax.tree.unflatten(eqn.params["args_tree"], values)
        ref, transforms = plain_ref(ref, transforms)
        return self.store(ref, transforms, value, eqn, mask)

    def _transforms(self, eqn: Any, leaves: list[Any]) -> Any:
        """The index transforms of a Ref access; those without run-time values are built once per equation."""
        if leaves:
            return jax.tree.unflatten(eqn.params["tree"], leaves)
        if id(eqn) not in self.static:
            self.static[id(eqn)] = jax.tree.unflatten(eqn.params["tree"], ())
        return self.static[id(eqn)]

    def load(self, ref: Buffer, transforms: Any, eqn: Any, mask: Any = None) -> np.ndarray:
        home: Machine = ref.clock
        if ref.space in ("any", "hbm"):
            home.incident("hbm-load", ref.name, eqn)
        place, whole = self._where(ref, transforms, "reads", eqn)
        value = self.load_from(ref, place, eqn, mask, whole)
        return to_keys(value, eqn.outvars[0].aval) if holds_keys(value.dtype) else value

    def load_from(self, ref: Buffer, place: Place, eqn: Any, mask: Any = None, whole: bool = False) -> np.ndarray:
        value = ref.load(place, whole)
        if self.flight.noted:
            self.note_clash(ref, place, "reads", False, eqn)
            self.flight.touched(ref, place, False, eqn)
        if ref.written is not None or place.clipped:
            self._note_load(ref, place, value, mask, eqn)
        if ref.role != "scalar":
            self.note("load", ref, value.nbytes == ref.values.nbytes, eqn)
        return value

    def _note_load(self, ref: Buffer, place: Place, value: np.ndarray, mask: Any, eqn: Any) -> None:
        known = known_in(ref, place)
        if known is not True and mask is not None:
            known = known | ~np.asarray(mask, bool)
        home: Machine = ref.clock
        missing = 0 if known is True else int(np.count_nonzero(np.broadcast_to(~np.asarray(known), value.shape)))
        if missing:
            kind = "padding" if ref.role == "in" else "stale" if ref.left_at >= 0 else "unwritten"
            home.incident(kind, ref.name, eqn, count=missing, total=value.size, left_at=ref.left_at)
            self._doubt(value, ~np.asarray(known), eqn, home)
        elif ref.writer is not None and ref.role == "scratch" and value.size and ref.space != "semaphore":
            newest = int(np.max(ref.writer.at(place)))
            if 0 <= newest < home.visit_start:
                home.incident("carry", ref.name, eqn, count=value.size, total=value.size, left_at=newest)
                self._doubt(value, np.True_, eqn, home)

    # -- what is read in vain: jnp.where(first step, x, acc_ref[...] + x) reads garbage and lets none of it through

    def _doubt(self, value: np.ndarray, garbage: Any, eqn: Any, home: "Machine") -> None:
        """Remembers what has just been read, for as long as nothing but a select can look at it."""
        known = self.only_selected.get(id(eqn))
        if known == "at once" or (known and home.incidents[-1].kind != "padding"):
            self.unsure.append((value, np.broadcast_to(garbage, value.shape), home.incidents[-1], home.incidents))

    def _withdraw(self, which: Any, cases: Sequence[Any]) -> None:
        """Takes back the incidents of reads that a select has just left out, where they were garbage."""
        for n, case in enumerate(cases):
            for _, garbage, incident, noted in [u for u in self.unsure if u[0] is case]:
                if not (garbage & (np.asarray(which).astype(int) == n)).any():
                    noted[:] = [i for i in noted if i is not incident]

    @functools.cached_property
    def only_selected(self) -> dict[int, str]:
        """The `get` equations whose value goes into one select, at once or after some arithmetic, and nowhere else."""
        found: dict[int, str] = {}
        for jaxpr, e in everywhere(self.call.kernel):
            if e.primitive.name == "get" and _selected_once(jaxpr, e.outvars[0]):
                later = any(u.primitive.name in ELEMENTWISE and e.outvars[0] in u.invars for u in jaxpr.eqns)
                found[id(e)] = "later" if later else "at once"
        return found

    def store(self, ref: Buffer, transforms: Any, value: Any, eqn: Any, mask: Any = None) -> np.ndarray:
        home: Machine = ref.clock
        if ref.space in ("any", "hbm"):
            home.incident("hbm-store", ref.name, eqn)
        if ref.role == "in":
            home.incident("input-store", ref.name, eqn)
        place, whole = self._where(ref, transforms, "writes", eqn)
        if self.flight.noted:
            self.note_clash(ref, place, "stores into", True, eqn)
            self.flight.touched(ref, place, True, eqn)
        value = to_numpy(value).astype(place.dtype, copy=False)
        old = ref.load(place, whole) if whole or mask is not None or _wanted(eqn) else value
        if mask is not None:
            mask = np.broadcast_to(np.asarray(mask, bool), old.shape)
        self._put(ref, place, value if mask is None else np.where(mask, value, old), mask=mask)
        self.note("store", ref, old.nbytes == ref.values.nbytes and mask is None, eqn)
        return old

    def note(self, op: str, ref: Buffer, whole: bool, eqn: Any) -> None:
        ref.clock.events.append(Event(ref.clock.step, op, ref.name, whole, eqn))

    def _put(
        self, ref: Buffer, place: Place, value: np.ndarray, written: Any = True, mask: np.ndarray | None = None
    ) -> None:
        whole = place.covers(ref.shape)
        ref.store(place, value, whole)
        ref.mark(place, written, ref.clock.step, whole, mask)

    # -- addresses

    def _where(self, ref: Buffer, transforms: Any, verb: str, eqn: Any) -> tuple[Place, bool]:
        """(place, is it all of the Ref). Remembered where no index of it is known only at run time."""
        if not transforms:
            return Place(ref.shape, ref.values.dtype), True
        found = self.places.get(id(transforms))
        if found is None:
            before = len(self.incidents)
            place = self.locate(ref, transforms, verb, eqn)
            found = place, place.covers(ref.shape)
            if transforms is self.static.get(id(eqn)) and len(self.incidents) == before:
                self.places[id(transforms)] = found
        return found

    def locate(self, ref: Buffer, transforms: Any, verb: str, eqn: Any) -> Place:
        """Where a Ref's transforms point to. An index outside of the Ref is noted, unless nothing is done there."""

        def out_of_bounds(first: int, last: int, dim: int) -> None:
            if verb:
                self.incident("ref-bounds", ref.name, eqn, verb=verb, first=first, last=last, dim=dim)

        tiled = ref.space in ("any", "hbm") and verb not in ("reads", "writes")
        return locate(ref.shape, ref.values.dtype, transforms, out_of_bounds, value_of=self._index, tiled=tiled)

    def _index(self, index: Any) -> Any:
        """The indices of a gather, which may be in a Ref."""
        if isinstance(index, Buffer) or hasattr(index, "transforms"):
            ref, transforms = plain_ref(index)
            return self.locate(ref, transforms, "", None).get(ref.values)
        return index

    # -- random numbers

    def _do_prng_random_bits(self, eqn: Any, values: list[Any]) -> Any:
        """Zeros, as in JAX's simulator: what a TPU's own generator makes is known to that TPU alone."""
        self.incident("hardware-random", "", eqn)
        return np.zeros(eqn.outvars[0].aval.shape, np_dtype(eqn.outvars[0].aval))

    def _do_random_bits(self, eqn: Any, values: list[Any]) -> Any:
        return self._do_prng_random_bits(eqn, values) if _of_a_tpu(eqn.invars[0]) else evaluate(eqn, values)

    def _key(self, eqn: Any, values: list[Any]) -> Any:
        """A key for a TPU's own generator is as good as any other."""
        return values[0] if _of_a_tpu(eqn.outvars[0]) else evaluate(eqn, values)

    _do_random_fold_in = _do_random_wrap = _do_random_seed = _key

    def _beyond_rule(self, eqn: Any, values: list[Any]) -> Any:
        raise Beyond(f"{eqn.primitive.name}: its result differs from backend to backend")

    _do_stochastic_round = _beyond_rule


def _of_a_tpu(key: Any) -> bool:
    """Whether a PRNG key is for the generator that a TPU has."""
    return "pallas" in str(key.aval.dtype._impl.name)


# --- the grid --------------------------------------------------------------------------------------------------------


def is_elementwise(jaxpr: Any) -> bool:
    """Whether an index map can be run for many steps at once."""

    def each(eqn: Any) -> bool:
        name, inner = eqn.primitive.name, inlined(eqn)
        if inner is not None:
            return is_elementwise(inner)
        if name == "get":  # a number of a table, not a part of it
            return len(eqn.invars) - 1 == len(eqn.invars[0].aval.shape)
        return name in ELEMENTWISE or name in ("num_programs", "multiple_of")

    return all(map(each, jaxpr.eqns))


def block_rows(machine: Machine, o: Operand, columns: np.ndarray, scalars: list[Buffer]) -> np.ndarray:
    """The block index of operand `o` at steps whose grid indices are the columns, one row a step.

    All at once where its index map is plain arithmetic, also with numbers that it looks up.
    """
    count, rank = columns.shape[1], len(o.dims)
    if count and rank and is_elementwise(o.index_map):
        before = len(machine.incidents)
        out = machine.run(o.index_map, [*columns, *scalars], o.index_consts)
        if len(machine.incidents) == before:
            return np.stack([np.broadcast_to(np.asarray(x), count) for x in out], axis=1).reshape(count, rank)
        del machine.incidents[before:]  # noted again, with their steps
    found = np.zeros((count, rank), np.int64)
    for s, index in enumerate(columns.T):
        machine.step, machine.index = s, tuple(index.tolist())
        found[s] = [int(np.asarray(x)) for x in machine.run(o.index_map, [*index, *scalars], o.index_consts)]
    return found


def start_of(o: Operand, block: tuple[int, ...]) -> tuple[int, ...]:
    """Element offset of a block in its array."""
    return tuple(i - d.padding[0] if d.kind == "element" else i * d.size for i, d in zip(block, o.dims, strict=True))


def is_outside(o: Operand, block: tuple[int, ...]) -> bool:
    """Whether a block starts where there is nothing."""
    starts = zip(start_of(o, block), o.dims, o.shape, strict=True)
    return any(s < -d.padding[0] or s >= max(size + d.padding[1], 1) for s, d, size in starts)


def fed_by(run: "Run", number: int, made: Sequence[np.ndarray]) -> set[int]:
    """The calls that are given these arrays, made by call `number`, or what another call has made of them."""
    arrays, calls = list(made), set()
    for n, trace in enumerate(run.traces[number + 1 :], number + 1):
        if any(_same_array(x, a) for x in trace.call.inputs for a in arrays):
            calls.add(n)
            arrays += trace.outputs
    return calls


def _same_array(a: Any, b: Any) -> bool:
    """Whether these are one array, whatever its shape and however it was cast on the way."""
    a, b = np.asarray(a), np.asarray(b)
    if a.size != b.size or a.size < 2:
        return False
    x, y = (z.reshape(-1).astype(np.float64) for z in (a, b))
    return bool(np.array_equal(x, y, equal_nan=True))


def plan(machine: Machine, scalars: list[Buffer], first: int = 0, count: int | None = None) -> Trace:
    """Which block is where at `count` steps from `first` on, by default at all.

    first: at most so far that there are `count` steps.
    """
    call, n = machine.call, math.prod(machine.call.grid)
    count = n if count is None else min(count, n)
    first = max(0, min(first, n - count))
    lead = int(first > 0)
    around = np.arange(first - lead, min(first + count + 1, n))  # with a neighbour on each side: what has changed?
    columns = np.array(np.unravel_index(around, call.grid or (1,)), np.int32)[: len(call.grid)]
    steps = list(map(tuple, columns.T.tolist()))
    trace, here = Trace(call, steps[lead : lead + count], first=first), slice(lead, lead + count)
    for o in call.operands:
        blocks: list[Any] = [None] * len(steps)
        if not o.in_hbm:
            whole = o.index_map is None
            rows = [(0,) * len(o.shape)] * len(steps) if whole else block_rows(machine, o, columns, scalars).tolist()
            blocks = list(map(tuple, rows))
        changed = [s == 0 or blocks[s] != blocks[s - 1] for s in range(len(blocks))]
        leaves = [*changed[1:], first + count == n]
        trace.blocks.append(blocks[here])
        trace.changed.append(changed[here])
        trace.moved.append([False] * count if o.in_hbm else changed[here] if o.role == "in" else leaves[here])
    return trace


def run_call(call: Call, *, plan_only: bool = False) -> Trace:
    """Runs one captured call. Raises Beyond. `plan_only`: just which block is where at each step."""
    with following(call.name):
        machine = Machine(call)
        return planned(machine, scalars_of(machine)) if plan_only else Execution(machine).run()


def plan_pipeline(call: Call) -> Trace:
    """Which block of a pipeline inside of a kernel is where at each step, without running it. Raises Beyond."""
    with following(call.name):
        machine = Machine(call)
        for o in call.operands:  # what an index map reads: numbers, and tables of them
            consts = o.index_consts or ()
            if any(c is UNKNOWN for c in consts):
                raise Beyond(f"an index map of {call.name} that depends on the outer grid")
            tables = (Buffer("", np.asarray(c), "smem", "scalar", machine) for c in consts)
            o.index_consts = [table if table.shape else c for table, c in zip(tables, consts, strict=True)]
        return planned(machine, [], PLANNED_STEPS)


class Refused(Beyond):
    """What no TPU can do, or nobody waits for. kind: of a finding; cause: why, for the reader; lines: the reader's."""

    def __init__(self, call: Call, kind: str, cause: str, said: str, line: SourceLine | None = None) -> None:
        super().__init__(f"{call.name}{said}")
        self.kind, self.cause = kind, cause
        self.lines = [each for each in (line, *call.callers, call.where) if each is not None]


def check_sizes(call: Call) -> None:
    """Raises Refused for what cannot be in VMEM, before memory is allocated for it."""
    for what, nbytes, line in _in_vmem(call):
        if nbytes > MOST_VMEM:
            cause = (
                f"{what} takes {human_bytes(nbytes)}, and no TPU has more than {human_bytes(MOST_VMEM)} of VMEM. What "
                "a kernel makes lies in VMEM, as its blocks do: work on one block of it at a time."
            )
            raise Refused(call, "vmem", cause, f": {cause}", line)


def _in_vmem(call: Call) -> Iterator[tuple[str, int, SourceLine | None]]:
    """(what a kernel holds, how many bytes, whose line), and last of all what it holds at a time."""
    buffers = [(f"the block of {o.name}", nbytes_of(o.block, o.dtype)) for o in call.operands if not o.in_hbm]
    buffers += [(f"the scratch buffer {s.name}", s.nbytes) for s in call.scratch if s.space == "vmem"]
    yield from ((what, nbytes, call.where) for what, nbytes in buffers)
    for shape, dtype, line in temporaries(call.kernel):
        yield f"a temporary {dtype} array of shape {shape}", nbytes_of(shape, dtype), line
    temporary, line = held(call.kernel)
    needed = sum(nbytes for _, nbytes in buffers) + temporary // SURELY
    parts = f"{plural(len(buffers), 'buffer')} and the values that wait for others" if temporary else "its buffers"
    yield f"what the kernel holds at a time, {parts},", needed, line if temporary else call.where


def scalars_of(machine: Machine) -> list[Buffer]:
    """The prefetched scalars of a call."""
    named = zip(machine.call.scalar_names, machine.call.scalars, strict=True)
    return [Buffer(n, np.asarray(v), "smem", "scalar", machine) for n, v in named]


def planned(machine: Machine, scalars: list[Buffer], most: int = MAX_STEPS) -> Trace:
    """Which block is where at each step of a machine's grid. Raises Refused where it has more steps than that."""
    call, steps = machine.call, math.prod(machine.call.grid)
    if steps > most:
        blocks = [f"{o.name} has {math.prod(o.tiles):,}" for o in call.outs if not o.in_hbm]
        cause = f"The grid {call.grid} has {steps:,} steps; at most {most:,} can be run here. A grid counts blocks" + (
            f", and {listed(blocks)}." if blocks else "."
        )
        said = f" has {steps} grid steps, more than {most}; use smaller arrays or larger blocks"
        raise Refused(call, "grid-steps", cause, said)
    trace = plan(machine, scalars)
    trace.incidents, trace.flight = machine.incidents, machine.flight
    return trace


# Where a block lies: (its part of the array, the part of it that is inside of the array, does it start outside of it)
_Part = tuple[Place, tuple[slice, ...], bool]


class Execution:
    """The loop over grid steps: fetch what changed, run the body, write back what is about to change."""

    def __init__(self, machine: Machine, places: Sequence[tuple[Buffer, Place]] | None = None):
        """places: what the operands of a pipeline are; those of a call are its own arrays. Raises Beyond."""
        call, self.m, self.inner = machine.call, machine, places is not None
        if not self.inner:
            check_sizes(call)
        self.scalars = scalars_of(machine)
        self.t = trace = planned(machine, self.scalars)
        places = places if places is not None else [(h, Place(h.shape, h.values.dtype)) for h in self._arrays()]
        self.hbm, self.views = [buffer for buffer, _ in places], [place for _, place in places]
        self.local = [
            h if o.in_hbm else Buffer.empty(o.name, o.ref_shape, o.dtype, o.space, o.role, machine)
            for h, o in zip(self.hbm, call.operands, strict=True)
        ]
        self.parts: dict[tuple[int, tuple[int, ...]], _Part] = {}
        self.scratch = self._new_scratch()
        self.outs = [k for k, o in enumerate(call.operands) if o.role == "out"]
        trace.visits = [{} for _ in self.outs]
        if self.inner:
            return
        # what the input of an alias held counts as written
        states = [NOT_VISITED if self.hbm[k].written is not None else WRITTEN for k in self.outs]
        self.state = [Marks(o.shape, np.int8, state) for o, state in zip(call.outs, states, strict=True)]

    def _new_scratch(self) -> list[Buffer]:
        return [Buffer.empty(s.name, s.shape, s.dtype, s.space, "scratch", self.m) for s in self.t.call.scratch]

    def _arrays(self) -> list[Buffer]:
        """The arrays in HBM that a call works on; an output may be one of its inputs."""
        call = self.t.call
        inputs = [Buffer(o.name, x, "hbm", "in", self.m) for o, x in zip(call.ins, call.inputs, strict=True)]
        outputs = []
        for j, o in enumerate(call.outs):
            aliased = [inputs[i] for i, out in call.aliases.items() if out == j]
            for shared in aliased[:1]:
                shared.role, shared.writer = "out", Marks(shared.shape, np.int32, -1)
            outputs += aliased[:1] or [Buffer.empty(o.name, o.shape, o.dtype, "hbm", "out", self.m)]
        return [*inputs, *outputs]

    def run(self) -> Trace:
        m, t = self.m, self.t
        refs = [*self.scalars, *self.local, *self.scratch]
        parallel = t.call.parallel_axes
        for s, index in enumerate(t.steps):
            m.step, m.index = s, index
            if t.call.on_cores and s:  # each core has scratch memory of its own
                refs = [*self.scalars, *self.local, *self._new_scratch()]
            elif s and any(index[d] != t.steps[s - 1][d] for d in parallel):  # it may run on another core
                for ref in self.scratch:
                    ref.lose()
            m.flops = m.transcendentals = m.dma_bytes = 0
            m.unsure.clear()
            if any(t.changed[k][s] for k in self.outs if not t.call.operands[k].in_hbm):
                m.visit_start = s
            for k, o in enumerate(t.call.operands):
                if not o.in_hbm:
                    self._arrive(k, o, s)
            m.run(t.call.kernel, refs, t.call.consts)
            for j, k in enumerate(self.outs):
                if t.moved[k][s]:
                    self._flush(j, k, s)
            t.flops.append(m.flops)
            t.transcendentals.append(m.transcendentals)
            t.dma_bytes.append(m.dma_bytes)
        self._finish()
        return t

    def _arrive(self, k: int, o: Operand, s: int) -> None:
        t, block, changed = self.t, self.t.blocks[k][s], self.t.changed[k][s]
        if changed:
            place, local, outside = self._part(k, block)
            if outside:
                self.m.incident("map-bounds", o.name, None, block=block, start=start_of(o, block), operand=o)
            if o.role == "in":
                self._fetch(k, o, place, local)
        if o.role == "out":
            visits = t.visits[self.outs.index(k)].setdefault(block, [])
            if changed:
                if visits and not self.inner:
                    self.m.incident("revisit", o.name, None, block=block, left_at=visits[-1][-1])
                visits.append([])
                self.local[k].arrive(left_at=s - 1)
            visits[-1].append(s)

    def _part(self, k: int, block: tuple[int, ...]) -> _Part:
        found = self.parts.get((k, block))
        if found is None:
            o = self.t.call.operands[k]
            starts = start_of(o, block)
            sizes = list(zip(starts, o.block, o.shape, strict=True))
            inside = tuple(slice(max(0, min(s, d)), max(0, min(s + b, d))) for s, b, d in sizes)
            place = self.views[k].part(inside)
            local = tuple(slice(i.start - s, max(i.start - s, i.stop - s)) for i, s in zip(inside, starts, strict=True))
            found = self.parts[k, block] = place, local, is_outside(o, block)
        return found

    def _fetch(self, k: int, o: Operand, here: Place, local: tuple[slice, ...]) -> None:
        source, target = self.hbm[k], self.local[k]
        self._touched(source, here, "reads")
        known = True if source.written is None else source.written.at(here)
        if here.shape == o.block and known is True:
            target.filled(source.lend(here).reshape(o.ref_shape), None)
            return
        values, written = poison(o.block, o.dtype, o.name), np.zeros(o.block, bool)
        values[local] = here.get(source.values)
        written[local] = known
        target.filled(values.reshape(o.ref_shape), written.reshape(o.ref_shape))

    def _touched(self, ref: Buffer, place: Place, verb: str) -> None:
        if self.inner:
            self.m.touched(ref, place, verb, next(iter(self.t.call.callers), None))

    def _flush(self, j: int, k: int, s: int) -> None:
        o = self.t.call.operands[k]
        there, local, _ = self._part(k, self.t.blocks[k][s])
        block, target = self.local[k], self.hbm[k]
        self._touched(target, there, "writes")
        assert block.written is not None, "an output block arrives unwritten"

        def part(marks: Marks) -> Any:
            return marks.one if marks.each is None else marks.each.reshape(o.block)[local]

        written, whole = part(block.written), there.covers(target.shape)
        target.store(there, block.values.reshape(o.block)[local], whole)
        if self.inner:
            target.mark(there, written, target.clock.step, whole)
            return
        stored = block.written.one if block.written.each is None else block.written.each.any()
        missing = NOT_STORED if stored or block.left_at < 0 else STALE
        state = np.where(written, WRITTEN, missing) if np.ndim(written) else WRITTEN if written else missing
        self.state[j].put(there, state, whole)
        assert block.writer is not None, "an output block has writers"
        assert target.writer is not None, "and so has an output"
        target.writer.put(there, part(block.writer), whole)

    def _finish(self) -> None:
        t = self.t
        t.events, t.pipelines = self.m.events, list(self.m.pipelines.values())
        if self.inner:
            return
        for semaphore in self.m.semaphores.values():
            if semaphore.due:
                # one that no wait has named, or the oldest
                copy = semaphore.open[0] if len(semaphore.open) == len(semaphore.due) else semaphore.due[0][1]
                out = copy.dst.space in ("any", "hbm")
                self.m.incident("unwaited", copy.dst.name, copy.eqn, count=len(semaphore.due), out=out)
        outs = [self.hbm[k] for k in self.outs]
        t.writer = [array.writer for array in outs if array.writer is not None]
        t.state = [
            _marked(array) if o.in_hbm else state for o, array, state in zip(t.call.outs, outs, self.state, strict=True)
        ]
        t.outputs = [self._own(array.values) for array in outs]

    def _own(self, values: np.ndarray) -> np.ndarray:
        """An output that is none of the inputs' memory: blocks are lent, and may be stored as they are."""
        shared = any(np.may_share_memory(values, x) for x in self.t.call.inputs)
        return np.array(values) if shared or not values.flags.writeable else values


def _marked(array: Buffer) -> Marks:
    """The state of an output that stays in HBM."""
    written = array.written
    marks = Marks(array.shape, np.int8, WRITTEN if written is None or written.one else NOT_VISITED)
    if written is not None and written.each is not None:
        marks.put(Place(marks.shape, marks.dtype), np.where(written.each, WRITTEN, NOT_VISITED), whole=True)
    return marks


# --- a whole function ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A function run through a machine. from_kernel: per flat output, does it come out of a kernel?

    calls: the kernels that it reached. traces: of those for TPUs.
    """

    traces: list[Trace]
    outputs: Any
    outside: list[Outside]
    from_kernel: list[bool]
    calls: list[Any]
    chip: str = CHIP  # that the function was traced for

    @property
    def hangs(self) -> bool:
        """Whether it waits for ever, so that `calls` may lack the kernel that does."""
        return False


def trace(fn: Callable[..., Any], *args: Any, programs: Programs | None = None, **kwargs: Any) -> Run:
    """Runs `fn(*args, **kwargs)` with every pallas_call in the machine.

    args: arrays or pytrees of arrays; kwargs: static values such as block sizes. programs: see ir.capture.capture.
    Raises Beyond for what the machine cannot follow, and whatever tracing the reader's code raises.
    """
    traces: list[Trace] = []

    def on_call(call: Call, eqn: Any, values: list[Any]) -> list[Any]:
        traces.append(run_call(call))
        return list(traces[-1].outputs)

    seen = capture(fn, *args, on_call=on_call, programs=programs, **kwargs)
    return Run(traces, seen.outputs, seen.outside, seen.from_kernel, seen.calls, seen.chip)


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    groups = itertools.groupby(enumerate(sorted(set(map(int, numbers)))), lambda pair: pair[1] - pair[0])
    runs = [[v for _, v in g] for _, g in groups]
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def listed(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
