"""Wrong values that one small change in the kernel or an index map puts right: which change, and at which line.

Each candidate is tried: the call runs again with it, up to the first block that is still wrong.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from .capture import Call, SourceLine, is_readers_file, source_line
from .findings import Finding, Tolerance, default_tolerance
from .incidents import at
from .machine import Buffer, Run, Trace, _Execution, _Machine, _plan, _region, fed_by, run_call, spans

_MOST_TRIALS = 400
SECONDS = 4.0  # that trials may take, on a machine that is busy
_UNEXPLAINED = frozenset("values zeros nan".split())

_GENERAL_ADVICE = (  # what is said of wrong values when nothing is known of them
    " Follow one element of that block by hand",
    " Only blocks that hang over the edge are wrong",
)

Edit = Callable[["_Edited", list[Any]], list[Any]]  # what an equation gets instead of its operands
Label = tuple[str, Any]  # ("id", grid axis) or ("scalar", name of a prefetched Ref)


@dataclasses.dataclass(frozen=True)
class _Site:
    """An equation of the kernel or of an index map. frames: the reader's lines that made it, innermost first."""

    eqn: Any
    frames: tuple[SourceLine, ...]
    labels: tuple[Label | None, ...]  # of its operands: which number of the step each is


@dataclasses.dataclass(frozen=True)
class _Change:
    """Edits by id() of the equation, or other primitives in their place; in words, and where."""

    words: str
    sites: tuple[_Site, ...]
    edits: dict[int, Edit]
    others: dict[int, str] = dataclasses.field(default_factory=dict)
    line: SourceLine | None = None


def changed(findings: list[Finding], run: Run, want: Any, tolerance: Tolerance | None) -> list[Finding]:
    """The findings, the first of them with the change that puts all wrong values right, where there is one."""
    if not findings or findings[0].kind not in _UNEXPLAINED or any(f.kind not in _UNEXPLAINED for f in findings):
        return findings
    first = findings[0]
    if first.kind == "nan" and _let_in(run, want, tolerance, first):
        return [first]
    found = _found(run, want, tolerance)
    if found is None:
        return findings
    for start in _GENERAL_ADVICE:
        first.cause = first.cause.split(start)[0]
    first.cause = f"{first.cause.rstrip(' .')}. One change puts all of it right: {found.words}"
    frames = [f for site in found.sites[:1] for f in reversed(site.frames)]
    first.near = [*([found.line] if found.line else []), *frames]
    first.line = first.near[0] if first.near else first.line
    return [first]


def _found(run: Run, want: Any, tolerance: Tolerance | None) -> _Change | None:
    got_leaves, want_leaves = jax.tree.leaves(run.outputs), jax.tree.leaves(want)
    wrong: dict[int, dict[int, np.ndarray]] = {}  # number of the trace -> output -> what is expected
    bad = set()
    for got, expected in zip(got_leaves, want_leaves, strict=True):
        got, expected = np.asarray(got), np.asarray(expected)
        place = next(
            ((n, j) for n, t in enumerate(run.traces) for j, out in enumerate(t.outputs) if _equal(out, got)), None
        )
        right = (tolerance or default_tolerance(expected.dtype)).close(*_floats(got, expected)).all()
        if place is not None:
            wrong.setdefault(place[0], {})[place[1]] = expected.reshape(run.traces[place[0]].call.outs[place[1]].shape)
            bad |= set() if right else {place[0]}
        elif not right:
            return None
    if not bad:
        return None
    number = min(bad)
    trace = run.traces[number]
    made = [trace.outputs[j] for j in wrong[number]]
    if not bad <= {number, *fed_by(run, number, made)}:
        return None  # two mistakes, or more
    tried: set[Any] = set()
    until = time.monotonic() + SECONDS
    for change in _changes(trace.call):
        key = (frozenset(change.edits) | frozenset(change.others), change.words)
        if key in tried:
            continue
        tried.add(key)
        if len(tried) > _MOST_TRIALS or time.monotonic() > until:
            return None
        if _puts_right(trace, change, wrong[number], tolerance):
            return change
    return None


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    x, y = _floats(a.reshape(-1), b.reshape(-1))
    return a.size == b.size and np.array_equal(x, y, equal_nan=True)


def _floats(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(x if x.dtype.kind in "iub" else x.astype(np.float64) for x in arrays)


def _let_in(run: Run, want: Any, tolerance: Tolerance | None, finding: Finding) -> bool:
    """Says which input the NaN of a result come in with, where the kernel should have kept them out."""
    trace, expected = run.traces[-1], jax.tree.leaves(want)
    outputs = trace.outputs
    if len(outputs) != 1 or len(expected) != 1 or outputs[0].size != np.size(expected[0]):
        return False
    w = np.asarray(expected[0]).reshape(outputs[0].shape)
    for n, (o, x) in enumerate(zip(trace.call.ins, trace.call.inputs, strict=True)):
        if x.dtype.kind in "iub" or not np.isnan(_floats(x)[0]).any():
            continue
        inputs = [*trace.call.inputs[:n], np.nan_to_num(x), *trace.call.inputs[n + 1 :]]
        again = run_call(dataclasses.replace(trace.call, inputs=inputs), detail=False).outputs[0]
        if not (tolerance or default_tolerance(w.dtype)).close(*_floats(again, w)).all():
            continue
        loads = [e for e in trace.events if e.op == "load" and e.ref == o.name]
        k = trace.call.operands.index(o)
        for event in loads:
            full, _, _ = _region(o, trace.starts[k][event.step])
            block = np.isnan(_floats(x[full])[0])
            if block.any():
                rows = np.flatnonzero(block.reshape(-1, block.shape[-1]).any(axis=1)).tolist()
                finding.cause = (
                    f"{at(trace, event.step)}: rows {spans(rows)} of block {trace.blocks[k][event.step]} of {o.name} "
                    f"are NaN, and they get into {trace.call.outs[0].name}: with 0 in their place all of it would be "
                    "right. That they meet a factor of 0 does not keep them out: 0 times NaN is NaN. Replace them "
                    "first, with jnp.where(position < length, x, 0)."
                )
                finding.line = event.line
                return True
    return False


# --- trying a change -------------------------------------------------------------------------------------------------


class _Edited(_Machine):
    def __init__(self, call: Call, change: _Change):
        super().__init__(call, detail=False)
        self.change, self.by_step = change, True
        self.scalar: dict[str, Any] = {}  # what was read last from a prefetched Ref
        self.read_in: dict[str, tuple[int, ...]] = {}  # the step in which the kernel read it
        self.entries: dict[Any, Any] = {}  # (its name, step) -> the entry that an index map looked up
        self.planning = True  # index maps run first, all of them

    def apply(self, eqn: Any, values: list[Any]) -> Any:
        edit = self.change.edits.get(id(eqn))
        if edit is not None:
            values = edit(self, values)
        other = self.change.others.get(id(eqn))
        if other is not None:
            out = _OTHERWISE[other](*values).astype(getattr(eqn.outvars[0].aval, "dtype", None))
            return [out] if eqn.primitive.multiple_results else out
        if eqn.primitive.name == "program_id" and edit is not None:
            return values[0]
        out = super().apply(eqn, values)
        if eqn.primitive.name == "get" and np.ndim(out) == 0 and isinstance(values[0], Buffer):
            name = values[0].name
            self.scalar[name] = out
            if self.planning:
                self.entries[name, tuple(self.index)] = out
            else:
                self.read_in[name] = tuple(self.index)
        return out

    def number(self, label: Label) -> Any:
        if label[0] == "id":
            return np.int32(self.index[self.grid_axes[label[1]]])
        name, now = label[1], tuple(self.index)
        if self.planning or self.read_in.get(name) == now:
            return self.scalar[name]
        return self.entries[name, now] if (name, now) in self.entries else self.scalar[name]


def _puts_right(trace: Trace, change: _Change, want: dict[int, np.ndarray], tolerance: Tolerance | None) -> bool:
    """Whether the call, changed, leaves every block of these outputs as expected."""
    call = trace.call
    outs = [k for k, o in enumerate(call.operands) if o.role == "out"]
    if any(call.operands[outs[j]].in_hbm for j in want):
        return False
    wrong = [False]
    checks = {j: (tolerance or default_tolerance(w.dtype)) for j, w in want.items()}
    slack = {j: checks[j].atol(w.astype(np.float64)) for j, w in want.items()}
    try:
        machine = _Edited(call, change)
        scalars = [
            Buffer(n, np.array(v), "smem", "scalar", written=True)
            for n, v in zip(call.scalar_names, call.scalars, strict=True)
        ]
        plan, changed = _plan(machine, scalars)
        if any(i.kind in ("map-bounds", "ref-bounds") for i in machine.incidents):
            return False
        machine.planning = False
        execution = _Execution(machine, plan, changed, scalars, frozenset())

        def look(step: int) -> bool:
            for j, expected in want.items():
                k = outs[j]
                if plan.flushed[k][step]:
                    o = call.operands[k]
                    full, local, _ = _region(o, plan.starts[k][step])
                    got, w = _floats(execution.local[k].values.reshape(o.block)[local], expected[full])
                    close = np.abs(got - w) <= slack[j] + checks[j].relative * np.abs(w)
                    wrong[0] |= not close.all()
            return wrong[0]

        with np.errstate(all="ignore"):
            execution.run(look)
    except Exception:  # a change may ask for what is not there
        return False
    visited = all(set(plan.blocks[outs[j]]) == set(trace.blocks[outs[j]]) for j in want)
    fatal = any(i.kind in ("map-bounds", "ref-bounds", "revisit") for i in machine.incidents)
    return not wrong[0] and visited and not fatal


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "add": np.add,
    "sub": np.subtract,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor_divide": np.floor_divide,
    "remainder": np.remainder,
}
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_AT_EQUALITY = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


# --- which changes there are -----------------------------------------------------------------------------------------


def _changes(call: Call) -> Iterator[_Change]:
    programs: list[tuple[Any, list[Label | None]]] = []
    own = [d for d in range(len(call.grid)) if d not in call.vmapped]
    for o in call.operands:
        if o.index_map is not None and o.role == "in":
            names: list[Label | None] = [("id", own.index(d)) if d in own else None for d in range(len(call.grid))]
            programs.append((o.index_map, [*names, *(("ref", n) for n in call.scalar_names)]))
    refs: list[Label | None] = [("ref", n) for n in call.scalar_names]
    programs.append((call.kernel, [*refs, *[None] * (len(call.kernel.invars) - len(refs))]))
    sites = [s for program, names in programs for s in _sites(program, names)]
    if not any(s.frames for s in sites):
        return
    by_line: dict[SourceLine, list[_Site]] = {}
    for s in sites:
        for line in s.frames:
            by_line.setdefault(line, []).append(s)
    numbers: list[Label] = [("id", a) for a, d in enumerate(own) if call.grid[d] > 1]
    numbers += [("scalar", n) for n in call.scalar_names]
    innermost: dict[SourceLine, list[_Site]] = {}
    for s in sites:
        if s.frames:
            innermost.setdefault(s.frames[0], []).append(s)
    for group in innermost.values():
        yield from _flips(group)
        yield from _rounded(group)
        yield from _divided(group)
    yield from _other_constants(sites)
    bodies = {line: [s for s in group if s.eqn.primitive.name != "cond"] for line, group in by_line.items()}
    groups = [(line, group) for line, group in [*bodies.items(), *by_line.items()] if len(group) < 60]
    for vary in (_replaced, _exchanged):
        for line, group in groups:
            yield from vary(line, group, numbers)
    for s in sites:
        yield from _from_zero(s, call, numbers)
    for s in sites:
        yield from _arithmetic(s)
    for line, group in innermost.items():
        if len(group) > 1:
            yield from _arithmetic_together(line, group)


def _sites(program: Any, names: Sequence[Label | None]) -> Iterator[_Site]:
    jaxpr = getattr(program, "jaxpr", program)
    known: dict[Any, Label | None] = dict(zip(jaxpr.invars, names, strict=False))

    def label(v: Any) -> Label | None:
        return None if isinstance(v, jec.Literal) else known.get(v)

    for eqn in jaxpr.eqns:
        name, labels = eqn.primitive.name, tuple(label(v) for v in eqn.invars)
        if name == "program_id":
            known[eqn.outvars[0]] = ("id", eqn.params["axis"])
            yield _Site(eqn, _frames(eqn), (("id", eqn.params["axis"]),))
            continue
        if name == "get" and labels[0] is not None and labels[0][0] == "ref":
            known[eqn.outvars[0]] = ("scalar", labels[0][1])
        elif name in ("convert_element_type", "squeeze", "reshape", "broadcast_in_dim") and labels[:1]:
            scalar = not getattr(eqn.outvars[0].aval, "shape", ())
            known[eqn.outvars[0]] = labels[0] if scalar or labels[0] == ("iota", None) else None
        elif name == "iota":
            known[eqn.outvars[0]] = ("iota", None)
        yield _Site(eqn, _frames(eqn), labels)
        if name == "cond":
            for branch in eqn.params["branches"]:
                yield from _sites(branch, labels[1:])
        elif eqn.params.get("name") == "arange" or (name in ("jit", "pjit") and _only_iota(eqn)):
            known[eqn.outvars[0]] = ("iota", None)


def _only_iota(eqn: Any) -> bool:
    inner = eqn.params.get("jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    return inner is not None and not eqn.invars and any(e.primitive.name == "iota" for e in inner.eqns)


def _frames(eqn: Any) -> tuple[SourceLine, ...]:
    """The reader's lines that made an equation, innermost first, up to the library that called them."""
    traceback = eqn.source_info.traceback  # seen on jax 0.11.2 and 0.12.0.1, as in capture.line_of
    frames = [(f.file_name, f.line_num) for f in (traceback.frames if traceback is not None else ())]
    inside = itertools.dropwhile(lambda f: not is_readers_file(f[0]), frames)
    return tuple(source_line(*f) for f in itertools.takewhile(lambda f: is_readers_file(f[0]), inside))


def _rounded(group: Sequence[_Site]) -> Iterator[_Change]:
    """Divisions that round up: n - 1 is added, and the sum divided by n."""
    divisors = {_number(s.eqn) for s in group if s.eqn.primitive.name == "div"}
    up = [s for s in group if s.eqn.primitive.name == "add" and (_number(s.eqn) or 0) + 1 in divisors]
    if up:
        edits = {id(s.eqn): _without(s.eqn, 0) for s in up}
        yield _Change("the division rounds up here, and has to round down.", tuple(up), edits)


def _divided(group: Sequence[_Site]) -> Iterator[_Change]:
    """// and % of a number of the step, each in the other's place."""
    for name, other, words in (
        ("remainder", "floor_divide", "the remainder (%) of {} is taken here where the quotient (//) is meant."),
        ("floor_divide", "remainder", "the quotient (//) of {} is taken here where the remainder (%) is meant."),
    ):
        for label in dict.fromkeys(s.labels[0] for s in group if s.eqn.params.get("name") == name and s.labels):
            if label is not None and label[0] in ("id", "scalar"):
                mine = [s for s in group if s.eqn.params.get("name") == name and s.labels[0] == label]
                yield _Change(words.format(_named(label)), tuple(mine), {}, {id(s.eqn): other for s in mine})


def _other_constants(sites: Sequence[_Site]) -> Iterator[_Change]:
    """Two tests for equality, each with the constant of the other."""
    tests = [s for s in sites if s.eqn.primitive.name == "eq" and _number(s.eqn) is not None]
    for a, b in itertools.combinations(tests, 2):
        x, y = _number(a.eqn), _number(b.eqn)
        if x is not None and y is not None and x != y and a.eqn.invars[0] is b.eqn.invars[0]:
            words = f"what is done where it is {x:g} and what is done where it is {y:g} have changed places."
            yield _Change(words, (a, b), {id(a.eqn): _without(a.eqn, y), id(b.eqn): _without(b.eqn, x)})


def _flips(group: Sequence[_Site]) -> Iterator[_Change]:
    for name, other in _AT_EQUALITY.items():
        mine = [s for s in group if s.eqn.primitive.name == name]
        if mine:
            word = "has to hold" if other in ("le", "ge") else "must not hold"
            words = f"the comparison {_SIGNS[name]} {word} where both sides are equal."
            yield _Change(words, tuple(mine), {}, {id(s.eqn): other for s in mine}, None)


def _put(new: dict[Label, Label], labels: Sequence[Label | None]) -> Edit:
    """Operands with some of the step's numbers replaced by others."""

    def edit(machine: _Edited, values: list[Any]) -> list[Any]:
        if not values:  # program_id
            return [machine.number(new[labels[0]])]  # type: ignore[index]
        return [machine.number(new[label]) if label in new else v for label, v in zip(labels, values, strict=True)]

    return edit


def _concerned(group: Sequence[_Site], labels: Sequence[Label]) -> list[_Site]:
    return [s for s in group if any(label in labels for label in s.labels)]


def _replaced(line: SourceLine, group: Sequence[_Site], numbers: Sequence[Label]) -> Iterator[_Change]:
    for a in (n for n in numbers if any(n in s.labels for s in group)):
        for b in (n for n in numbers if n != a):
            mine = _concerned(group, [a])
            words = f"{_named(a)} is the wrong number here, and {_named(b)} belongs in its place."
            yield _Change(words, tuple(mine), {id(s.eqn): _put({a: b}, s.labels) for s in mine}, {}, line)


def _exchanged(line: SourceLine, group: Sequence[_Site], numbers: Sequence[Label]) -> Iterator[_Change]:
    there = [n for n in numbers if any(n in s.labels for s in group)]
    for a, b in itertools.combinations(there, 2):
        mine = _concerned(group, [a, b])
        words = f"{_named(a)} and {_named(b)} stand in each other's place here."
        yield _Change(words, tuple(mine), {id(s.eqn): _put({a: b, b: a}, s.labels) for s in mine}, {}, line)


def _named(label: Label) -> str:
    return f"the step's index along grid axis {label[1]}" if label[0] == "id" else f"what {label[1]} holds"


def _from_zero(site: _Site, call: Call, numbers: Sequence[Label]) -> Iterator[_Change]:
    """Positions within a block that are compared as if they were positions in the array."""
    if site.eqn.primitive.name not in _SIGNS:
        return
    for n, label in enumerate(site.labels):
        if label != ("iota", None):
            continue
        size = max(site.eqn.invars[n].aval.shape)
        for number in numbers:

            def edit(
                machine: _Edited, values: list[Any], n: int = n, number: Label = number, size: int = size
            ) -> list[Any]:
                return [v + machine.number(number) * size if m == n else v for m, v in enumerate(values)]

            words = (
                f"positions are counted from 0 in every block here; the block starts at {size} times "
                f"{_named(number)}, and that has to be added."
            )
            yield _Change(words, (site,), {id(site.eqn): edit})


def _arithmetic(site: _Site) -> Iterator[_Change]:
    yield from _arithmetic_together(None, [site])


def _arithmetic_together(line: SourceLine | None, group: Sequence[_Site]) -> Iterator[_Change]:
    def of(name: str) -> list[_Site]:
        return [s for s in group if s.eqn.primitive.name == name]

    rounded = [s for s in group if s.eqn.primitive.name in ("add", "sub") and _number(s.eqn) is not None]
    if len(rounded) == 2 and any(_number(s.eqn) == 1 for s in rounded):
        edits = {id(s.eqn): _without(s.eqn, 0) for s in rounded}
        yield _Change("the division rounds up here, and has to round down.", tuple(rounded), edits, {}, line)
    for name, neutral, text in (
        ("mul", 1, "the factor {:.6g} is too much here."),
        ("add", 0, "{:.6g} is added here, and should not be."),
        ("sub", 0, "{:.6g} is subtracted here, and should not be."),
    ):
        mine = [s for s in of(name) if _number(s.eqn) not in (None, neutral)]
        mine = [s for s in mine if name != "mul" or s.eqn.outvars[0].aval.dtype.kind not in "iu"]
        if mine:
            edits = {id(s.eqn): _without(s.eqn, neutral) for s in mine}
            yield _Change(text.format(_number(mine[0].eqn)), tuple(mine), edits, {}, line)
    for name, other, words in (
        ("exp2", "exp", "exp2 is taken where exp is meant."),
        ("exp", "exp2", "exp is taken where exp2 is meant."),
        ("add", "sub", "a sum is taken where a difference is meant."),
        ("sub", "add", "a difference is taken where a sum is meant."),
    ):
        if of(name):
            yield _Change(words, tuple(of(name)), {}, {id(s.eqn): other for s in of(name)}, line)


def _number(eqn: Any) -> float | None:
    """The one constant operand of an equation."""
    found = [float(v.val) for v in eqn.invars if isinstance(v, jec.Literal) and np.ndim(v.val) == 0]
    return found[0] if len(found) == 1 else None


def _without(eqn: Any, neutral: float) -> Edit:
    n = next(n for n, v in enumerate(eqn.invars) if isinstance(v, jec.Literal))

    def edit(machine: _Edited, values: list[Any]) -> list[Any]:
        return [np.asarray(neutral, np.asarray(v).dtype) if m == n else v for m, v in enumerate(values)]

    return edit
