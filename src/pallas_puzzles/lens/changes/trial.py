"""Changes to a wrong kernel that are tried: the one that makes its result right is what is wrong."""

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..capture import Call, SourceLine, subprograms
from ..findings import Tolerance, default_tolerance
from ..machine import Buffer, Execution, Machine, Run, Trace, figures, plan, region
from ..ops import remembered_products

MOST = 400  # changes of one kind that are tried on one kernel
_FLOPS = 2e10  # arithmetic that may be spent on them
SECONDS = 4.0  # of this thread's own work; on a machine that is busy, three times that of the clock

Most = tuple[int | None, int | None]  # bytes between HBM and VMEM, and FLOPs, that all calls may take together
Label = tuple[str, Any]  # ("id", grid axis) or ("scalar", name of a prefetched Ref)
Edit = Callable[["Edited", list[Any]], list[Any]]  # what an equation gets instead of its operands
Generator = Callable[[Call], Iterator["Change"]]


@dataclasses.dataclass(frozen=True)
class Change:
    """A call that differs in one thing: in words, and near which of the reader's lines, the likeliest first.

    edits, others: by id() of an equation of the kernel or of an index map, other operands, and another function. outs:
    what the index map of operand k returns along dimension d, by (k, d). kernel: another program. factors: what the
    result may be wrong by all the same. key: the words, without numbers that belong to the sizes of one example.
    """

    words: str
    near: tuple[SourceLine, ...]
    edits: Mapping[int, Edit] = dataclasses.field(default_factory=dict)
    others: Mapping[int, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    outs: Mapping[tuple[int, int], Label] = dataclasses.field(default_factory=dict)
    kernel: Any = None
    factors: tuple[float, ...] = (1.0,)
    key: str = ""

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a change has in common with the same one to the call of another example."""
        return self.near, self.key or self.words

    @property
    def touched(self) -> tuple[Any, ...]:
        """What two changes have in common that are one, seen from two lines."""
        return frozenset(self.edits), frozenset(self.others), frozenset(self.outs), self.words


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A call, the last of these traces, with what is expected of its outputs, by their number and of their shapes."""

    run: Run
    number: int
    want: Mapping[int, np.ndarray]
    tolerance: Tolerance | None
    most: "Most" = (None, None)

    @property
    def trace(self) -> Trace:
        return self.run.traces[self.number]

    @property
    def call(self) -> Call:
        return self.trace.call

    def check(self, j: int) -> Tolerance:
        return self.tolerance or default_tolerance(self.want[j].dtype)

    @functools.cached_property
    def entries(self) -> Mapping[Any, Any]:
        """What the kernel reads from its prefetched Refs in each step, last: (name, step) -> entry."""
        if not self.call.scalar_names:
            return {}
        machine = Edited(self.call, Change("", ()), {})
        execution_of(machine, self.call)[0].run()
        return machine.entries

    @functools.cached_property
    def map_equations(self) -> frozenset[int]:
        """The equations of the index maps, by id()."""
        todo = [o.index_map for o in self.call.operands if o.index_map is not None]
        found: set[int] = set()
        while todo:
            program = todo.pop()
            for eqn in getattr(program, "jaxpr", program).eqns:
                found.add(id(eqn))
                todo += subprograms(eqn)
        return frozenset(found)

    def right(self, j: int) -> bool:
        return bool(self.check(j).close(*floats(self.trace.outputs[j], self.want[j])).all())


@dataclasses.dataclass(frozen=True)
class Helping:
    """A change that puts a call right; by what factor it is wrong still; the example that it leaves wrong, or ""."""

    change: Change
    factor: float
    refuted: str

    @property
    def but(self) -> str:
        return f" It does so here, and not for {self.refuted}: what is wrong is near." if self.refuted else ""


@dataclasses.dataclass(frozen=True)
class Example:
    """Another case of the same check, and what it is called."""

    name: str
    run: Run
    want: Any
    most: Most = (None, None)


Examples = Callable[[], Sequence[Example]]


def calls_of(run: Run, want: Any, tolerance: Tolerance | None, most: Most = (None, None)) -> dict[int, Wrong] | None:
    """The calls whose outputs are results, with what is expected of them; None: something wrong is no call's output."""
    wanted: dict[int, dict[int, np.ndarray]] = {}
    for got, expected in zip(jax.tree.leaves(run.outputs), jax.tree.leaves(want), strict=True):
        got, expected = np.asarray(got), np.asarray(expected)
        place = next(
            ((n, j) for n, t in enumerate(run.traces) for j, out in enumerate(t.outputs) if _equal(out, got)), None
        )
        if place is not None:
            n, j = place
            wanted.setdefault(n, {})[j] = expected.reshape(run.traces[n].call.outs[j].shape)
        elif not (tolerance or default_tolerance(expected.dtype)).close(*floats(got, expected)).all():
            return None
    return {n: Wrong(run, n, outputs, tolerance, most) for n, outputs in wanted.items()}


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.size != b.size:
        return False
    x, y = floats(a.reshape(-1), b.reshape(-1))
    return np.array_equal(x, y, equal_nan=True)


def floats(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Floats in double precision, integers as they are."""
    return tuple(x if x.dtype.kind in "iub" else x.astype(np.float64) for x in arrays)


class Clock:
    """The time that trials may take, all together: on one machine the same number of them, however busy it is."""

    def __init__(self, share: float = 1.0) -> None:
        self.work, self.clock = time.thread_time() + share * SECONDS, time.monotonic() + 3 * share * SECONDS

    def is_over(self) -> bool:
        return time.thread_time() > self.work or time.monotonic() > self.clock


def first_that_helps(wrong: Wrong, generate: Generator, clock: Clock, examples: Examples) -> Helping | None:
    """The first change that puts a call right, here and in the other examples; else the first that does so here.

    What helps in one example alone may do so by chance.
    """
    allowed = int(min(MOST, _FLOPS / max(1, sum(wrong.trace.flops[: _first_wrong_step(wrong) + 1]))))
    by_chance: Helping | None = None
    tried: set[Any] = set()
    count = 0
    with remembered_products():
        for change in _within(clock, generate(wrong.call)):
            if change.kernel is None and change.touched in tried:
                continue
            tried.add(change.touched)
            count += 1
            if count > allowed:
                break
            factor = _factor(wrong, change)
            if factor is None:
                continue
            refuted = next((e.name for e in examples() if _refutes(e, wrong, change, generate)), "")
            if not refuted:
                return Helping(change, factor, "")
            by_chance = by_chance or Helping(change, factor, refuted)
    return by_chance


def _within(clock: Clock, changes: Iterator[Change]) -> Iterator[Change]:
    while not clock.is_over():
        try:
            yield next(changes)
        except Exception:  # StopIteration, or a program that cannot be changed like that: what was found still stands
            return


def _first_wrong_step(wrong: Wrong) -> int:
    """The step at which the first wrong block is stored for the last time."""
    trace, last = wrong.trace, len(wrong.trace.steps) - 1
    outs = [k for k, o in enumerate(wrong.call.operands) if o.role == "out"]
    for j, expected in wrong.want.items():
        o, got = wrong.call.outs[j], trace.outputs[j]
        if o.in_hbm or np.shape(got) != expected.shape:
            continue
        bad = ~wrong.check(j).close(*floats(got, expected))
        for step in (s for s in range(last) if trace.flushed[outs[j]][s]):
            if bad[region(o, trace.starts[outs[j]][step])[0]].any():
                last = step
                break
    return last


def _refutes(other: Example, wrong: Wrong, change: Change, generate: Generator) -> bool:
    """Whether another example, with the same change made to the same call, is wrong still."""
    calls = calls_of(other.run, other.want, wrong.tolerance, other.most) or {}
    there = calls.get(wrong.number)
    if there is None or there.call.name != wrong.call.name or set(there.want) != set(wrong.want):
        return False
    same = next((c for c in generate(there.call) if c.identity == change.identity), None)
    if same is None:
        return False
    return _factor(there, same) is None


# --- trying one ------------------------------------------------------------------------------------------------------


class Edited(Machine):
    """The machine, for a call that a change has been made to."""

    def __init__(self, call: Call, change: Change, seen: Mapping[Any, Any], by_step: bool = True):
        super().__init__(call, detail=False)
        self.change, self.by_step = change, by_step
        self.entries: dict[Any, Any] = dict(seen)  # (name of a prefetched Ref, step) -> the entry that was read there
        self.maps = {id(o.index_map): k for k, o in enumerate(call.operands)}

    def run(self, jaxpr: Any, values: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        out = super().run(jaxpr, values, consts)
        if self.change.outs and id(jaxpr) in self.maps:
            k = self.maps[id(jaxpr)]
            return [self.number(self.change.outs[k, d]) if (k, d) in self.change.outs else v for d, v in enumerate(out)]
        return out

    def apply(self, eqn: Any, values: list[Any]) -> Any:
        edit = self.change.edits.get(id(eqn))
        if edit is not None:
            values = edit(self, values)
        other = self.change.others.get(id(eqn))
        if other is not None:
            out = other(*values).astype(getattr(eqn.outvars[0].aval, "dtype", None))
            return [out] if eqn.primitive.multiple_results else out
        if eqn.primitive.name == "program_id" and edit is not None:
            return values[0]
        out = super().apply(eqn, values)
        if eqn.primitive.name == "get" and np.ndim(out) == 0 and isinstance(values[0], Buffer):
            self.entries[values[0].name, tuple(self.index)] = out
        return out

    def number(self, label: Label) -> Any:
        """What a number of this step is now."""
        if label[0] == "id":
            return np.int32(self.index[self.grid_axes[label[1]]])
        return self.entries[label[1], tuple(self.index)]


def execution_of(machine: Machine, call: Call) -> tuple[Execution, Trace]:
    """A call that is about to run, and its plan: which block is where at each step."""
    scalars = [
        Buffer(n, np.array(v), "smem", "scalar", written=True)
        for n, v in zip(call.scalar_names, call.scalars, strict=True)
    ]
    planned, moves = plan(machine, scalars)
    return Execution(machine, planned, moves, scalars, frozenset()), planned


_GONE_ASTRAY = frozenset("map-bounds ref-bounds revisit".split())


def _factor(wrong: Wrong, change: Change) -> float | None:
    """What the outputs, changed, have to be multiplied by to be as expected; None: the change does not help."""
    try:
        with np.errstate(all="ignore"):
            return _tried(wrong, change)
    except Exception:  # a change may ask for what is not there: a shape, an entry, a wait without an end
        return None


def _tried(wrong: Wrong, change: Change) -> float | None:
    call, trace = wrong.call, wrong.trace
    if change.kernel is not None:
        call = dataclasses.replace(call, kernel=change.kernel)
    if change.outs:  # two operands may have one map
        own = [dataclasses.replace(o, index_map=copy.copy(o.index_map)) for o in call.operands]
        call = dataclasses.replace(call, operands=own)
    if any(call.outs[j].in_hbm for j in wrong.want):
        return None
    in_map = bool(change.outs) or not wrong.map_equations.isdisjoint({*change.edits, *change.others})
    machine = Edited(call, change, wrong.entries if change.edits or change.outs else {}, in_map)
    execution, planned = execution_of(machine, call)
    if any(i.kind in _GONE_ASTRAY for i in machine.incidents):
        return None
    outs = [k for k, o in enumerate(call.operands) if o.role == "out"]
    left = list(change.factors)
    slack = {j: wrong.check(j).atol(w.astype(np.float64)) for j, w in wrong.want.items()}

    def look(step: int) -> bool:
        for j, expected in wrong.want.items():
            k = outs[j]
            if planned.flushed[k][step]:
                o = call.operands[k]
                full, local, _ = region(o, planned.starts[k][step])
                got, w = floats(execution.local[k].values.reshape(o.block)[local], expected[full])
                most = slack[j] + wrong.check(j).relative * np.abs(w)
                left[:] = [f for f in left if (np.abs((got if f == 1 else got * f) - w) <= most).all()]
        return not left

    execution.run(look)
    if not left or any(i.kind in _GONE_ASTRAY for i in machine.incidents):
        return None
    visited = all(set(planned.blocks[outs[j]]) == set(trace.blocks[outs[j]]) for j in wrong.want)
    return left[0] if visited and _affordable(wrong, planned) else None


def _affordable(wrong: Wrong, changed: Trace) -> bool:
    """Whether all calls together, one of them changed, cost no more than they may: else it is not what was meant."""
    calls = [*wrong.run.traces[: wrong.number], changed, *wrong.run.traces[wrong.number + 1 :]]
    costs = [figures(t) for t in calls]
    taken = sum(c.hbm_bytes for c in costs), sum(c.flops for c in costs)
    return all(most is None or n <= most for n, most in zip(taken, wrong.most, strict=True))
