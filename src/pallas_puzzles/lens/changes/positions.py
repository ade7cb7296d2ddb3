"""Changes of positions: which number of the step stands where, in the kernel and in the index maps, and comparisons."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jec
import numpy as np

from ..capture import Call, SourceLine, is_readers_file, source_line, where_defined
from .trial import Change, Edit, Edited, Label


@dataclasses.dataclass(frozen=True)
class _Site:
    """An equation of the kernel or of an index map. frames: the reader's lines that made it, innermost first."""

    eqn: Any
    frames: tuple[SourceLine, ...]
    labels: tuple[Label | None, ...]  # of its operands: which number of the step each is
    inside: tuple["_Site", ...] = ()  # of its branches


_FUNCTIONS: dict[str, Callable[..., Any]] = {
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


def changes(call: Call) -> Iterator[Change]:
    """The changes of positions that a call can have, the likelier ones first."""
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
    yield from _returned(call, own, numbers)
    for s in sites:
        yield from _from_zero(s, numbers)
    for s in sites:
        yield from _arithmetic(s)
    for line, group in innermost.items():
        if len(group) > 1:
            yield from _arithmetic_together(line, group)


def _near(sites: Sequence[_Site], line: SourceLine | None = None) -> tuple[SourceLine, ...]:
    """The lines to look at, for a change of all these equations under one line."""
    return (*([line] if line else []), *(f for site in sites[:1] for f in site.frames))


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
        branches = eqn.params["branches"] if name == "cond" else ()
        inside = tuple(s for branch in branches for s in _sites(branch, labels[1:]))
        yield _Site(eqn, _frames(eqn), labels, inside)
        yield from inside
        if eqn.params.get("name") == "arange" or (name in ("jit", "pjit") and _only_iota(eqn)):
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


def _rounded(group: Sequence[_Site]) -> Iterator[Change]:
    """Divisions that round up: n - 1 is added, and the sum divided by n."""
    divisors = {_number(s.eqn) for s in group if s.eqn.primitive.name == "div"}
    up = [s for s in group if s.eqn.primitive.name == "add" and (_number(s.eqn) or 0) + 1 in divisors]
    if up:
        edits = {id(s.eqn): _without(s.eqn, 0) for s in up}
        yield Change("the division rounds up here, and has to round down.", _near(up), edits)


def _divided(group: Sequence[_Site]) -> Iterator[Change]:
    """// and % of a number of the step, each in the other's place."""
    for name, other, words in (
        ("remainder", "floor_divide", "the remainder (%) of {} is taken here where the quotient (//) is meant."),
        ("floor_divide", "remainder", "the quotient (//) of {} is taken here where the remainder (%) is meant."),
    ):
        for label in dict.fromkeys(s.labels[0] for s in group if s.eqn.params.get("name") == name and s.labels):
            if label is not None and label[0] in ("id", "scalar"):
                mine = [s for s in group if s.eqn.params.get("name") == name and s.labels[0] == label]
                yield Change(words.format(_named(label)), _near(mine), {}, {id(s.eqn): _FUNCTIONS[other] for s in mine})


def _other_constants(sites: Sequence[_Site]) -> Iterator[Change]:
    """Two tests for equality, each with the constant of the other."""
    tests = [s for s in sites if s.eqn.primitive.name == "eq" and _number(s.eqn) is not None]
    for a, b in itertools.combinations(tests, 2):
        x, y = _number(a.eqn), _number(b.eqn)
        if x is not None and y is not None and x != y and a.eqn.invars[0] is b.eqn.invars[0]:
            words = f"what is done where it is {x:g} and what is done where it is {y:g} have changed places."
            yield Change(words, _near([a, b]), {id(a.eqn): _without(a.eqn, y), id(b.eqn): _without(b.eqn, x)})


def _flips(group: Sequence[_Site]) -> Iterator[Change]:
    for name, other in _AT_EQUALITY.items():
        mine = [s for s in group if s.eqn.primitive.name == name]
        if mine:
            word = "has to hold" if other in ("le", "ge") else "must not hold"
            words = f"the comparison {_SIGNS[name]} {word} where both sides are equal."
            yield Change(words, _near(mine), {}, {id(s.eqn): _FUNCTIONS[other] for s in mine})


def _put(new: dict[Label, Label], labels: Sequence[Label | None]) -> Edit:
    """Operands with some of the step's numbers replaced by others."""

    def edit(machine: Edited, values: list[Any]) -> list[Any]:
        if not values:  # program_id
            return [machine.number(new[labels[0]])]  # type: ignore[index]
        return [machine.number(new[label]) if label in new else v for label, v in zip(labels, values, strict=True)]

    return edit


def _concerned(group: Sequence[_Site], labels: Sequence[Label]) -> list[_Site]:
    return [s for s in group if any(label in labels for label in s.labels)]


def _in_branch(group: Sequence[_Site], labels: Sequence[Label]) -> tuple[SourceLine, ...]:
    """Where a branch that comes first uses these numbers: the decorator above it says nothing."""
    return next((s.frames for s in _concerned(group[0].inside, labels) if s.frames), ())


def _replaced(line: SourceLine, group: Sequence[_Site], numbers: Sequence[Label]) -> Iterator[Change]:
    for a in (n for n in numbers if any(n in s.labels for s in group)):
        for b in (n for n in numbers if n != a):
            mine = _concerned(group, [a])
            words = f"{_named(a)} is the wrong number here, and {_named(b)} belongs in its place."
            near = (*_in_branch(mine, [a]), *_near(mine, line))
            yield Change(words, near, {id(s.eqn): _put({a: b}, s.labels) for s in mine})


def _exchanged(line: SourceLine, group: Sequence[_Site], numbers: Sequence[Label]) -> Iterator[Change]:
    there = [n for n in numbers if any(n in s.labels for s in group)]
    for a, b in itertools.combinations(there, 2):
        mine = _concerned(group, [a, b])
        words = f"{_named(a)} and {_named(b)} stand in each other's place here."
        near = (*_in_branch(mine, [a, b]), *_near(mine, line))
        yield Change(words, near, {id(s.eqn): _put({a: b, b: a}, s.labels) for s in mine})


def _named(label: Label) -> str:
    return f"the step's index along grid axis {label[1]}" if label[0] == "id" else f"what {label[1]} holds"


def _returned(call: Call, own: Sequence[int], numbers: Sequence[Label]) -> Iterator[Change]:
    """What an index map returns as it came in, or a constant: another number of the step in its place."""
    alike: dict[Any, list[int]] = {}
    for k, o in enumerate(call.operands):
        if o.role == "in" and o.index_map is not None:
            alike.setdefault(where_defined(o.index_map) or k, []).append(k)
    for group in alike.values():
        jaxpr = getattr(call.operands[group[0]].index_map, "jaxpr", call.operands[group[0]].index_map)
        axes: list[Label | None] = [("id", own.index(d)) if d in own else None for d in range(len(call.grid))]
        known = dict(zip(jaxpr.invars, axes, strict=False))
        names = " and ".join(call.operands[k].name for k in group)
        near = [line for line in [where_defined(jaxpr)] if line]
        for d, v in enumerate(jaxpr.outvars):
            constant = isinstance(v, jec.Literal)
            label = None if constant else known.get(v)
            if label is None and not constant:
                continue
            for number in (n for n in numbers if n != label):
                what = _named(label) if label else f"{v.val}"
                words = (
                    f"the index map of {names} returns {what} along dimension {d}, and {_named(number)} belongs there."
                )
                yield Change(words, tuple(near), outs={(k, d): number for k in group})


def _from_zero(site: _Site, numbers: Sequence[Label]) -> Iterator[Change]:
    """Positions within a block that are compared as if they were positions in the array."""
    if site.eqn.primitive.name not in _SIGNS:
        return
    for n, label in enumerate(site.labels):
        if label != ("iota", None):
            continue
        size = max(site.eqn.invars[n].aval.shape)
        for number in numbers:

            def edit(
                machine: Edited, values: list[Any], n: int = n, number: Label = number, size: int = size
            ) -> list[Any]:
                return [v + machine.number(number) * size if m == n else v for m, v in enumerate(values)]

            words = (
                f"positions are counted from 0 in every block here; the block starts at {size} times "
                f"{_named(number)}, and that has to be added."
            )
            key = f"from 0, {_named(number)}"
            yield Change(words, _near([site]), {id(site.eqn): edit}, key=key)


def _arithmetic(site: _Site) -> Iterator[Change]:
    yield from _arithmetic_together(None, [site])


def _arithmetic_together(line: SourceLine | None, group: Sequence[_Site]) -> Iterator[Change]:
    def of(name: str) -> list[_Site]:
        return [s for s in group if s.eqn.primitive.name == name]

    rounded = [s for s in group if s.eqn.primitive.name in ("add", "sub") and _number(s.eqn) is not None]
    if len(rounded) == 2 and any(_number(s.eqn) == 1 for s in rounded):
        edits = {id(s.eqn): _without(s.eqn, 0) for s in rounded}
        yield Change("the division rounds up here, and has to round down.", _near(rounded, line), edits)
    for name, neutral, text in (
        ("mul", 1, "the factor {:.6g} is too much here."),
        ("add", 0, "{:.6g} is added here, and should not be."),
        ("sub", 0, "{:.6g} is subtracted here, and should not be."),
    ):
        mine = [s for s in of(name) if _number(s.eqn) not in (None, neutral)]
        mine = [s for s in mine if name != "mul" or s.eqn.outvars[0].aval.dtype.kind not in "iu"]
        if mine:
            edits = {id(s.eqn): _without(s.eqn, neutral) for s in mine}
            yield Change(text.format(_number(mine[0].eqn)), _near(mine, line), edits, key=text)
    for name, other, words in (
        ("exp2", "exp", "exp2 is taken where exp is meant."),
        ("exp", "exp2", "exp is taken where exp2 is meant."),
        ("add", "sub", "a sum is taken where a difference is meant."),
        ("sub", "add", "a difference is taken where a sum is meant."),
    ):
        if of(name):
            others = {id(s.eqn): _FUNCTIONS[other] for s in of(name)}
            yield Change(words, _near(of(name), line), {}, others)


def _number(eqn: Any) -> float | None:
    """The one constant operand of an equation."""
    found = [float(v.val) for v in eqn.invars if isinstance(v, jec.Literal) and np.ndim(v.val) == 0]
    return found[0] if len(found) == 1 else None


def _without(eqn: Any, neutral: float) -> Edit:
    n = next(n for n, v in enumerate(eqn.invars) if isinstance(v, jec.Literal))

    def edit(machine: Edited, values: list[Any]) -> list[Any]:
        return [np.asarray(neutral, np.asarray(v).dtype) if m == n else v for m, v in enumerate(values)]

    return edit
