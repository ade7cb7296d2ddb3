"""A small NumPy machine: runs a captured kernel one grid step at a time and remembers who wrote each element, and when.

An interpreter: its rules, and those of tally.py, read equations themselves, as ir/ does. The primitives on Refs (get,
swap, dma_start, ...) and their parameters are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import (
    CHIP,
    Call,
    Operand,
    Outside,
    SourceLine,
    arg_names,
    capture,
    everywhere,
    line_of,
    space_of,
)
from ..ir.ops import (
    ELEMENTWISE,
    Beyond,
    cost,
    evaluate,
    holds_keys,
    inlined,
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
from ..ir.program import temporaries
from ..text import human_bytes
from .copies import Copies, Semaphore, known_in, plain_ref
from .sparse import SparseCore

MAX_STEPS = 16384
MOST_VMEM = 128 << 20  # bytes: what TPU v5e and v6e have, and no other has more
NOT_VISITED, NOT_STORED, STALE, WRITTEN = range(4)


class Buffer:
    """A Ref: its values, which elements hold something (None: all of them), and the last step that stored each."""

    __slots__ = ("left_at", "name", "role", "space", "values", "writer", "written")

    def __init__(self, name: str, values: np.ndarray, space: str, role: str, written: bool):
        self.name, self.space, self.role = name, space, role
        self.written: np.ndarray | None
        self.writer: np.ndarray | None
        self.values = np.ascontiguousarray(values).reshape(np.shape(values))
        self.written = None if written else np.zeros(self.values.shape, bool)
        self.writer = np.full(self.values.shape, -1, np.int32) if role in ("out", "scratch") else None
        self.left_at = -1  # outputs: the last step of the visit before this one

    @classmethod
    def empty(cls, name: str, shape: tuple[int, ...], dtype: np.dtype, space: str, role: str) -> "Buffer":
        return cls(name, poison(shape, dtype), space, role, written=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def arrive(self, left_at: int) -> None:
        """A new visit of an output block: what the buffer held belongs to another block."""
        self.values = poison(self.values.shape, self.values.dtype)
        self.written = np.zeros(self.values.shape, bool)
        self.writer = np.full(self.values.shape, -1, np.int32)
        self.left_at = left_at


@dataclasses.dataclass(slots=True)
class Event:
    """One load, store or delivered copy. `whole`: it touched every element of the ref."""

    step: int
    op: str  # "load" | "store" | "dma"
    ref: str
    whole: bool
    count: int
    eqn: Any
    box: tuple[Any, ...] = ()

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn)


@dataclasses.dataclass
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
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def line(self) -> SourceLine | None:
        return line_of(self.eqn) if self.eqn is not None else None


@dataclasses.dataclass
class Trace:
    """What a call did. Lists over operands are indexed by k (position in call.operands), over steps by s."""

    call: Call
    steps: list[tuple[int, ...]]
    blocks: list[list[Any]]  # tuples of int; None where the operand stays in HBM
    starts: list[list[Any]]
    fetched: list[list[bool]]
    flushed: list[list[bool]]
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    state: list[np.ndarray] = dataclasses.field(default_factory=list)
    writer: list[np.ndarray] = dataclasses.field(default_factory=list)
    visits: list[dict[tuple[int, ...], list[list[int]]]] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    flops: list[int] = dataclasses.field(default_factory=list)
    transcendentals: list[int] = dataclasses.field(default_factory=list)
    dma_bytes: list[int] = dataclasses.field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.steps)


@dataclasses.dataclass(frozen=True)
class OperandFigures:
    """What one operand costs. `once_bytes`: moving the whole array exactly once."""

    operand: Operand
    buffers: int
    vmem_bytes: int
    moves: int
    hbm_bytes: int
    once_bytes: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a call costs: bytes between HBM and VMEM, VMEM held, arithmetic done."""

    name: str
    operands: list[OperandFigures]
    scratch_bytes: int
    vmem_bytes: int
    dma_bytes: int
    hbm_bytes: int
    once_bytes: int
    flops: int
    transcendentals: int
    steps: int

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved between HBM and VMEM."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None


def figures(trace: Trace) -> Figures:
    """The costs of a traced call; blocks that hang over the edge count only their part inside the array."""
    rows = [_operand_figures(trace, k) for k in range(len(trace.call.operands))]
    scratch = sum(s.nbytes for s in trace.call.scratch if s.space == "vmem")
    dma = sum(trace.dma_bytes)
    return Figures(
        name=trace.call.name,
        operands=rows,
        scratch_bytes=scratch,
        vmem_bytes=scratch + sum(r.vmem_bytes for r in rows),
        dma_bytes=dma,
        hbm_bytes=dma + sum(r.hbm_bytes for r in rows),
        once_bytes=sum(r.once_bytes for r in rows),
        flops=sum(trace.flops),
        transcendentals=sum(trace.transcendentals),
        steps=trace.n,
    )


def _operand_figures(trace: Trace, k: int) -> OperandFigures:
    o = trace.call.operands[k]
    if o.in_hbm:
        return OperandFigures(o, 0, 0, 0, 0, o.array_bytes)
    moved = trace.fetched[k] if o.role == "in" else trace.flushed[k]
    nbytes = 0
    for start, moves in zip(trace.starts[k], moved, strict=True):
        if moves and start is not None:
            inside = (max(0, min(s + b, d) - max(s, 0)) for s, b, d in zip(start, o.block, o.shape, strict=True))
            nbytes += nbytes_of([*inside], o.dtype)
    buffers = 1 if o.stays_whole else o.buffer_count
    vmem = buffers * o.block_bytes if o.space == "vmem" else 0
    return OperandFigures(o, buffers, vmem, sum(moved), nbytes, o.array_bytes)


# --- the machine -----------------------------------------------------------------------------------------------------


_SILENT = frozenset(["debug_print", "debug_callback", "delay", "check", "trace_value", "prng_seed"])


def _selected_once(jaxpr: Any, v: Any) -> bool:
    """Whether the only use of a value is as a case of a select."""
    users = [e for e in jaxpr.eqns if any(u is v for u in e.invars)]
    if len(users) != 1 or any(u is v for u in jaxpr.outvars):
        return False
    (user,) = users
    if user.primitive.name == "select_n":
        return user.invars[0] is not v
    if user.primitive.name == "convert_element_type":
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
    bad = np.isnan(out) & ~np.isnan(a) & ~np.isnan(b)
    return ("inf - inf is NaN" if name == "sub" else "0 times infinity is NaN"), int(np.count_nonzero(bad))


class Machine(Copies, SparseCore):
    def __init__(self, call: Call, detail: bool):
        self.call, self.detail = call, detail
        self.step = 0
        self.index: tuple[int, ...] = ()
        self.visit_start = 0
        self.events: list[Event] = []
        self.incidents: list[Incident] = []
        self.unsure: list[tuple[np.ndarray, np.ndarray, Incident]] = []  # reads of garbage that a select may leave out
        self.flops = self.transcendentals = self.dma_bytes = 0
        self.semaphores: dict[tuple[Buffer, int], Semaphore] = {}
        self.dma_semaphores: dict[tuple[int, int], bool] = {}
        self.costs: dict[int, tuple[int, int]] = {}
        self.static: dict[int, Any] = {}
        self.by_step = False  # index maps, too, are run one step at a time
        self.grid_axes = [d for d in range(len(call.grid)) if d not in call.vmapped]
        self.rules: dict[str, Callable[[Any, list[Any]], Any]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def incident(self, kind: str, ref: str, eqn: Any, **more: Any) -> None:
        count, total, block = more.pop("count", 0), more.pop("total", 0), more.pop("block", None)
        at = tuple(int(i) for i in self.index)
        self.incidents.append(Incident(kind, self.step, at, ref, eqn, count, total, block, more))

    # -- programs

    def run(self, jaxpr: Any, values: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
        return interpret(jaxpr, values, self._results, consts)

    def _results(self, eqn: Any, values: list[Any]) -> list[Any]:
        out = self.apply(eqn, values)
        return out if eqn.primitive.multiple_results else [out]

    def apply(self, eqn: Any, values: list[Any]) -> Any:
        name = eqn.primitive.name
        rule = self.rules.get(name)
        if rule is not None:
            return rule(eqn, values)
        if name in _SILENT:
            return [] if eqn.primitive.multiple_results else values[0] if values else None
        inner = inlined(eqn)
        if inner is not None:
            return self.run(inner, values)
        if any(isinstance(v, Buffer) for v in values):
            raise Beyond(f"the primitive {name} on a Ref")
        flops, transcendentals = self._cost(eqn)
        self.flops += flops
        self.transcendentals += transcendentals
        out = evaluate(eqn, values)
        if name == "select_n" and self.unsure:
            self._withdraw(values[0], values[1:])
        if name == "convert_element_type" and self.unsure:
            self.unsure += [(out, garbage, incident) for v, garbage, incident in self.unsure if v is values[0]]
        if name in _WATCHED:
            self._watch(name, eqn, values, out)
        return out

    def _watch(self, name: str, eqn: Any, values: list[Any], out: Any) -> None:
        """Notes arithmetic that may explain a wrong result: where the first inf or NaN is born, and the like."""
        out = np.asarray(out)
        if not is_floating(out.dtype):
            return
        if name in _EXPONENTIALS:
            if np.isinf(out).any() and not np.isinf(np.asarray(values[0])).any():
                self.incident("overflow", "", eqn, largest=float(np.max(np.asarray(values[0]), initial=-np.inf)))
        elif not np.isfinite(out).all():
            what, count = _born(name, [np.asarray(v, np.float64) for v in values], out.astype(np.float64))
            if count:
                self.incident("born", "", eqn, what=what, count=count, total=out.size)

    def _cost(self, eqn: Any) -> tuple[int, int]:
        found = self.costs.get(id(eqn))
        if found is None:
            found = self.costs[id(eqn)] = cost(eqn)
        return found

    def _do_cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        return self.run(eqn.params["branches"][int(np.asarray(values[0]))], values[1:])

    def _do_scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        return run_scan(eqn, values, lambda xs: self.run(eqn.params["jaxpr"], xs))

    def _do_while(self, eqn: Any, values: list[Any]) -> list[Any]:
        return run_while(eqn, values, self.run)

    def _do_run_scoped(self, eqn: Any, values: list[Any]) -> list[Any]:
        jaxpr = eqn.params["jaxpr"]
        names = arg_names(jaxpr)
        buffers = [
            Buffer.empty(n, tuple(getattr(v.aval, "shape", ())), np_dtype(v.aval), space_of(v.aval), "scratch")
            for n, v in zip(names, jaxpr.invars, strict=True)
        ]
        return self.run(jaxpr, buffers, values)

    def _do_program_id(self, eqn: Any, values: list[Any]) -> Any:
        return np.int32(self.index[self.grid_axes[eqn.params["axis"]]])

    def _do_num_programs(self, eqn: Any, values: list[Any]) -> Any:
        return np.int32(self.call.grid[self.grid_axes[eqn.params["axis"]]])

    def _do_axis_index(self, eqn: Any, values: list[Any]) -> Any:
        name = eqn.params["axis_name"]
        if name not in self.call.grid_names:
            raise Beyond(f"the position on the mesh axis {name!r}: several devices")
        return np.int32(self.index[self.call.grid_names.index(name)])

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

    def _do_addupdate(self, eqn: Any, values: list[Any]) -> list[Any]:
        transforms = self._transforms(eqn, values[2:])
        old = self.load(values[0], transforms, eqn)
        self.store(values[0], transforms, old + np.asarray(values[1]).astype(old.dtype), eqn)
        return []

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
        found = self.static.get(id(eqn))
        if found is None:
            found = self.static[id(eqn)] = jax.tree.unflatten(eqn.params["tree"], ())
        return found

    def load(self, ref: Buffer, transforms: Any, eqn: Any, mask: Any = None) -> np.ndarray:
        if ref.space in ("any", "hbm"):
            self.incident("hbm-load", ref.name, eqn)
        value = self.load_from(ref, self.locate(ref, transforms, "reads", eqn), eqn, mask)
        return to_keys(value, eqn.outvars[0].aval) if holds_keys(value.dtype) else value

    def load_from(self, ref: Buffer, place: Place, eqn: Any, mask: Any = None) -> np.ndarray:
        value = place.read(ref.values)
        if ref.written is not None or place.clipped:
            self._note_load(ref, place, value, mask, eqn)
        if self.detail and ref.role != "scalar":
            whole = value.nbytes == ref.values.nbytes
            self.events.append(Event(self.step, "load", ref.name, whole, value.size, eqn))
        return value

    def _note_load(self, ref: Buffer, place: Place, value: np.ndarray, mask: Any, eqn: Any) -> None:
        known = known_in(ref, place)
        if mask is not None:
            known = known | ~np.asarray(mask, bool)
        missing = int(value.size - np.count_nonzero(known))
        if missing:
            kind = "padding" if ref.role == "in" else "stale" if ref.left_at >= 0 else "unwritten"
            self.incident(kind, ref.name, eqn, count=missing, total=value.size, left_at=ref.left_at, space=ref.space)
            self._doubt(value, ~known, eqn)
        elif ref.role == "scratch" and value.size and ref.space != "semaphore":
            newest = int(np.max(place.marked(np.asarray(ref.writer))))
            if 0 <= newest < self.visit_start:
                self.incident("carry", ref.name, eqn, count=value.size, total=value.size, left_at=newest)
                self._doubt(value, np.ones(value.shape, bool), eqn)

    # -- what is read in vain: jnp.where(first step, 0, acc_ref[...]) reads garbage and lets none of it through

    def _doubt(self, value: np.ndarray, garbage: Any, eqn: Any) -> None:
        """Remembers what has just been read, for as long as nothing but a select can look at it."""
        known = self.only_selected.get(id(eqn))
        if known == "at once" or (known and self.incidents[-1].kind != "padding"):
            self.unsure.append((value, np.broadcast_to(garbage, value.shape), self.incidents[-1]))

    def _withdraw(self, which: Any, cases: Sequence[Any]) -> None:
        """Takes back the incidents of reads that a select has just left out, where they were garbage."""
        for n, case in enumerate(cases):
            for _, garbage, incident in [u for u in self.unsure if u[0] is case]:
                if not (garbage & (np.asarray(which).astype(int) == n)).any():
                    self.incidents[:] = [i for i in self.incidents if i is not incident]

    @functools.cached_property
    def only_selected(self) -> dict[int, str]:
        """The `get` equations whose value goes into one select, at once or after a cast, and nowhere else."""
        found: dict[int, str] = {}
        for jaxpr, e in everywhere(self.call.kernel):
            if e.primitive.name == "get" and _selected_once(jaxpr, e.outvars[0]):
                casts = any(u.primitive.name == "convert_element_type" and e.outvars[0] in u.invars for u in jaxpr.eqns)
                found[id(e)] = "after a cast" if casts else "at once"
        return found

    def store(self, ref: Buffer, transforms: Any, value: Any, eqn: Any, mask: Any = None) -> np.ndarray:
        if ref.space in ("any", "hbm"):
            self.incident("hbm-store", ref.name, eqn)
        if ref.role == "in":
            self.incident("input-store", ref.name, eqn)
        place = self.locate(ref, transforms, "writes", eqn)
        old = place.read(ref.values)
        value = to_numpy(value).astype(place.dtype, copy=False)
        if mask is None:
            self._put(ref, place, value)
        else:
            mask = np.broadcast_to(np.asarray(mask, bool), old.shape)
            place.set(ref.values, np.where(mask, value, old))
            if ref.written is not None:
                place.set(ref.written, place.marked(ref.written) | mask, marks=True)
            if ref.writer is not None:
                place.set(ref.writer, np.where(mask, self.step, place.marked(ref.writer)), marks=True)
        self.note_store(ref, place, old.size, eqn, whole=old.nbytes == ref.values.nbytes and mask is None)
        return old

    def note_store(self, ref: Buffer, place: Place, count: int, eqn: Any, whole: bool = False) -> None:
        if self.detail:
            self.events.append(Event(self.step, "store", ref.name, whole, count, eqn, place.box()))

    def note_copy(self, ref: Buffer, place: Place, count: int, eqn: Any) -> None:
        whole = place.nbytes == nbytes_of(ref.shape, ref.values.dtype)
        self.events.append(Event(self.step, "dma", ref.name, whole, count, eqn, place.box()))

    def _put(self, ref: Buffer, place: Place, value: np.ndarray, written: Any = True) -> None:
        place.set(ref.values, value)
        if ref.written is not None:
            place.set(ref.written, written, marks=True)
        if ref.writer is not None:
            place.set(ref.writer, self.step, marks=True)

    # -- addresses

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


def _is_elementwise(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        inner = inlined(eqn)
        if inner is not None:
            if not _is_elementwise(inner):
                return False
        elif eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name not in ("num_programs", "multiple_of"):
            return False
    return True


def _block_indices(machine: Machine, o: Operand, steps: list[Any], scalars: list[Buffer]) -> list[tuple[int, ...]]:
    """The block index of operand `o` at every step, all at once where its index map is plain arithmetic."""
    if steps and not machine.by_step and _is_elementwise(o.index_map):
        columns = np.asarray(steps, np.int32).reshape(len(steps), -1).T
        out = machine.run(o.index_map, [*columns, *scalars])
        return list(zip(*(np.broadcast_to(np.asarray(x), len(steps)).tolist() for x in out), strict=True)) or [
            () for _ in steps
        ]
    found = []
    for s, index in enumerate(steps):
        machine.step, machine.index = s, index
        out = machine.run(o.index_map, [*[np.int32(i) for i in index], *scalars])
        found.append(tuple(int(np.asarray(x)) for x in out))
    return found


def _start(o: Operand, block: tuple[int, ...]) -> tuple[int, ...]:
    """Element offset of a block in its array."""
    return tuple(i - d.padding[0] if d.kind == "element" else i * d.size for i, d in zip(block, o.dims, strict=True))


def _outside(o: Operand, start: tuple[int, ...]) -> bool:
    return any(
        s < -d.padding[0] or s >= max(size + d.padding[1], 1) for s, d, size in zip(start, o.dims, o.shape, strict=True)
    )


def _changes(blocks: list[Any]) -> list[bool]:
    return [s == 0 or blocks[s] != blocks[s - 1] for s in range(len(blocks))]


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


def plan(machine: Machine, scalars: list[Buffer]) -> tuple[Trace, list[list[bool]]]:
    call = machine.call
    steps: list[tuple[int, ...]] = list(np.ndindex(*call.grid)) if call.grid else [()]
    n = len(steps)
    blocks: list[list[Any]] = []
    starts: list[list[Any]] = []
    for o in call.operands:
        if o.in_hbm:
            blocks.append([None] * n)
            starts.append([None] * n)
            continue
        whole = o.index_map is None
        indices = [(0,) * len(o.shape)] * n if whole else _block_indices(machine, o, steps, scalars)
        blocks.append(list(indices))
        starts.append([_start(o, b) for b in indices])
    changed = [_changes(b) for b in blocks]
    fetched, flushed = [], []
    for k, o in enumerate(call.operands):
        nothing = [False] * n
        fetched.append(changed[k] if o.role == "in" and not o.in_hbm else nothing)
        last = [s == n - 1 or changed[k][s + 1] for s in range(n)]
        flushed.append(last if o.role == "out" and not o.in_hbm else nothing)
    return Trace(call, steps, blocks, starts, fetched, flushed), changed


def region(o: Operand, start: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...], bool]:
    """(slices of the array, slices of the block, does the block lie wholly inside)."""
    full, local, inside = [], [], True
    for s, b, d in zip(start, o.block, o.shape, strict=True):
        lo, hi = max(0, min(s, d)), max(0, min(s + b, d))
        full.append(slice(lo, hi))
        local.append(slice(lo - s, max(lo - s, hi - s)))
        inside &= lo == s and hi == s + b
    return tuple(full), tuple(local), inside


def run_call(
    call: Call,
    *,
    detail: bool = True,
    plan_only: bool = False,
    max_steps: int = MAX_STEPS,
) -> Trace:
    """Runs one captured call. Raises Beyond. `plan_only`: just which block is where at each step."""
    try:
        return _run_call(call, detail, plan_only, max_steps)
    except (NotImplementedError, KeyError, TypeError, IndexError, AttributeError, ValueError) as e:
        raise Beyond(f"{call.name} ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})") from e


class Refused(Beyond):
    """What no TPU can do, or nobody waits for. kind: of a finding; cause: why, for the reader; lines: the reader's."""

    kind: str
    cause: str
    lines: list[SourceLine]


class TooManySteps(Refused):
    """A grid that nobody waits for."""

    kind = "grid-steps"

    def __init__(self, call: Call, steps: int, most: int):
        advice = "use smaller arrays or larger blocks"
        super().__init__(f"{call.name} has {steps} grid steps, more than {most}; {advice}")
        blocks = [f"{o.name} has {math.prod(o.tiles):,}" for o in call.outs if not o.in_hbm]
        self.cause = (
            f"The grid {call.grid} has {steps:,} steps; at most {most:,} can be run here. A grid counts blocks"
            + (f", and {listed(blocks)}." if blocks else ".")
        )
        self.lines = [line for line in (*call.callers, call.where) if line is not None]


class TooLarge(Refused):
    """An array in a kernel that no TPU has the memory for."""

    kind = "vmem"

    def __init__(self, call: Call, what: str, nbytes: int, line: SourceLine | None):
        self.cause = (
            f"{what} takes {human_bytes(nbytes)}, and no TPU has more than {human_bytes(MOST_VMEM)} of VMEM. What a "
            "kernel makes lies in VMEM, as its blocks do: work on one block of it at a time."
        )
        self.lines = [x for x in (line, *call.callers, call.where) if x is not None]
        super().__init__(f"{call.name}: {self.cause}")


def _check_sizes(call: Call) -> None:
    """Raises TooLarge for an array that cannot be in VMEM, before memory is allocated for it."""
    held = [(f"the block of {o.name}", nbytes_of(o.block, o.dtype)) for o in call.operands if not o.in_hbm]
    held += [(f"the scratch buffer {s.name}", s.nbytes) for s in call.scratch if s.space == "vmem"]
    for what, nbytes in held:
        if nbytes > MOST_VMEM:
            raise TooLarge(call, what, nbytes, call.where)
    for shape, dtype, line in temporaries(call.kernel):
        if (nbytes := nbytes_of(shape, dtype)) > MOST_VMEM:
            raise TooLarge(call, f"a temporary {dtype} array of shape {shape}", nbytes, line)


def _run_call(call: Call, detail: bool, plan_only: bool, max_steps: int) -> Trace:
    steps = math.prod(call.grid)
    if steps > max_steps:
        raise TooManySteps(call, steps, max_steps)
    if not plan_only:
        _check_sizes(call)
    machine = Machine(call, detail)
    scalars = [  # copies: a kernel may store into them
        Buffer(n, np.array(v), "smem", "scalar", written=True)
        for n, v in zip(call.scalar_names, call.scalars, strict=True)
    ]
    trace, changed = plan(machine, scalars)
    trace.incidents = machine.incidents
    if not plan_only:
        Execution(machine, trace, changed, scalars).run()
    return trace


class Execution:
    """The loop over grid steps: fetch what changed, run the body, write back what is about to change."""

    def __init__(
        self,
        machine: Machine,
        trace: Trace,
        changed: list[list[bool]],
        scalars: list[Buffer],
    ):
        self.m, self.t, self.changed, self.scalars = machine, trace, changed, scalars
        call = trace.call
        source = iter(call.inputs)
        self.hbm: list[Buffer] = []
        for o in call.operands:
            if o.role == "in":
                value = np.array(next(source)) if o.in_hbm or call.aliases else next(source)
                self.hbm.append(Buffer(o.name, value, "hbm", "in", written=True))
            else:
                j = len(trace.visits)
                trace.visits.append({})
                aliased = [i for i, out in call.aliases.items() if out == j]
                self.hbm.append(self._output(o, aliased))
        self.local = [
            h if o.in_hbm else Buffer.empty(o.name, o.ref_shape, o.dtype, o.space, o.role)
            for h, o in zip(self.hbm, call.operands, strict=True)
        ]
        self.scratch = self._new_scratch()
        self.outs = [k for k, o in enumerate(call.operands) if o.role == "out"]
        trace.state = [np.zeros(o.shape, np.int8) for o in call.outs]
        trace.writer = [np.full(o.shape, -1, np.int32) for o in call.outs]
        for j, k in enumerate(self.outs):
            if self.hbm[k].written is None:
                trace.state[j][...] = WRITTEN  # what the aliased input held counts as written

    def _new_scratch(self) -> list[Buffer]:
        return [Buffer.empty(s.name, s.shape, s.dtype, s.space, "scratch") for s in self.t.call.scratch]

    def _output(self, o: Operand, aliased: list[int]) -> Buffer:
        if not aliased:
            return Buffer.empty(o.name, o.shape, o.dtype, "hbm", "out")
        shared = self.hbm[aliased[0]]
        shared.role = "out"
        shared.writer = np.full(shared.shape, -1, np.int32)
        return shared

    def run(self, after: Callable[[int], bool] | None = None) -> None:
        """Runs every step. after(step) is asked behind each body, and ends the run by True."""
        m, t = self.m, self.t
        refs = [*self.scalars, *self.local, *self.scratch]
        for s, index in enumerate(t.steps):
            m.step, m.index = s, index
            if t.call.on_cores and s:  # each core has scratch memory of its own
                refs = [*self.scalars, *self.local, *self._new_scratch()]
            m.flops = m.transcendentals = m.dma_bytes = 0
            m.unsure.clear()
            if any(self.changed[k][s] for k in self.outs if not t.call.operands[k].in_hbm):
                m.visit_start = s
            for k, o in enumerate(t.call.operands):
                if not o.in_hbm:
                    self._arrive(k, o, s)
            m.run(t.call.kernel, refs)
            if after is not None and after(s):
                return
            for j, k in enumerate(self.outs):
                if t.flushed[k][s]:
                    self._flush(j, k, s)
            t.flops.append(m.flops)
            t.transcendentals.append(m.transcendentals)
            t.dma_bytes.append(m.dma_bytes)
        self._finish()

    def _arrive(self, k: int, o: Operand, s: int) -> None:
        t = self.t
        start, block = t.starts[k][s], t.blocks[k][s]
        if self.changed[k][s]:
            if _outside(o, start):
                self.m.incident("map-bounds", o.name, None, block=block, start=start, operand=o)
            if o.role == "in":
                self._fetch(k, o, start)
        if o.role == "out":
            visits = t.visits[self.outs.index(k)].setdefault(block, [])
            if self.changed[k][s]:
                if visits:
                    self.m.incident("revisit", o.name, None, block=block, left_at=visits[-1][-1])
                visits.append([])
                self.local[k].arrive(left_at=s - 1)
            visits[-1].append(s)

    def _fetch(self, k: int, o: Operand, start: tuple[int, ...]) -> None:
        full, local, inside = region(o, start)
        source, target = self.hbm[k], self.local[k]
        if inside and source.written is None:
            target.values = np.array(source.values[full]).reshape(o.ref_shape)
            target.written = None
            return
        values, written = poison(o.block, o.dtype), np.zeros(o.block, bool)
        values[local] = source.values[full]
        written[local] = True if source.written is None else source.written[full]
        target.values, target.written = values.reshape(o.ref_shape), written.reshape(o.ref_shape)

    def _flush(self, j: int, k: int, s: int) -> None:
        o = self.t.call.operands[k]
        full, local, _ = region(o, self.t.starts[k][s])
        block, target = self.local[k], self.hbm[k]
        assert block.written is not None, "an output block arrives unwritten"
        assert block.writer is not None, "an output block has writers"
        written = block.written.reshape(o.block)[local]
        target.values[full] = block.values.reshape(o.block)[local]
        if target.written is not None:
            target.written[full] = written
        missing = NOT_STORED if block.written.any() or block.left_at < 0 else STALE
        self.t.state[j][full] = np.where(written, WRITTEN, missing)
        self.t.writer[j][full] = block.writer.reshape(o.block)[local]

    def _finish(self) -> None:
        t = self.t
        for semaphore in self.m.semaphores.values():
            if semaphore.due:
                _, copy, _ = semaphore.due[0]
                self.m.incident("unwaited", plain_ref(copy.dst)[0].name, copy.eqn, count=len(semaphore.due))
        for j, k in enumerate(self.outs):
            if t.call.operands[k].in_hbm:
                written = self.hbm[k].written
                t.state[j] = np.full(self.hbm[k].shape, WRITTEN, np.int8)
                if written is not None:
                    t.state[j] = np.where(written, WRITTEN, NOT_VISITED).astype(np.int8)
                t.writer[j] = np.asarray(self.hbm[k].writer)
        t.outputs = [self.hbm[k].values for k in self.outs]
        t.events = self.m.events


# --- a whole function ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A function run through the machine. `from_kernel`: per flat output, does it come out of a pallas_call?"""

    traces: list[Trace]
    outputs: Any
    outside: list[Outside]
    from_kernel: list[bool]
    calls: list[Call]
    chip: str = CHIP  # that the function was traced for


def trace(fn: Callable[..., Any], *args: Any, detail: bool = True, max_steps: int = MAX_STEPS, **kwargs: Any) -> Run:
    """Runs `fn(*args, **kwargs)` with every pallas_call in the machine.

    args: arrays or pytrees of arrays; kwargs: static values such as block sizes.
    Raises Beyond for what the machine cannot follow, and whatever tracing the reader's code raises.
    """
    traces: list[Trace] = []

    def on_call(call: Call, eqn: Any, values: list[Any]) -> list[Any]:
        traces.append(run_call(call, detail=detail, max_steps=max_steps))
        return list(traces[-1].outputs)

    seen = capture(fn, *args, on_call=on_call, **kwargs)
    return Run(traces, seen.outputs, seen.outside, seen.from_kernel, seen.calls, seen.chip)


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    groups = itertools.groupby(enumerate(sorted(set(map(int, numbers)))), lambda pair: pair[1] - pair[0])
    runs = [[v for _, v in g] for _, g in groups]
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def listed(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


__all__ = [
    "Beyond",
    "Figures",
    "Run",
    "Trace",
    "figures",
    "is_floating",
    "listed",
    "run_call",
    "spans",
    "trace",
]
