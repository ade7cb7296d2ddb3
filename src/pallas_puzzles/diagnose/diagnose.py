"""From a run and the expected result to findings, the likeliest cause first."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.ops import is_floating
from ..lens.machine import Run, fed_by
from ..text import plural
from .findings import GARBAGE_READS, Diagnosis, Finding, Tolerance, default_tolerance
from .incidents import incidents_of, index_maps, races
from .narrow import kernels_of, too_rough
from .rounding import Course, excess
from .steps import at
from .wrong import Result, Wrong, diagnose_output, sample_of

# Which finding is the likelier root of the others: lower comes first.
ORDER = (
    "structure shape dtype hbm-load hbm-store hang map-bounds ref-bounds copy-shape unwaited no-wait reused "
    "shared-semaphore race unvisited revisit never-stored garbage unwritten stale overwritten partly-stored carry "
    "padding input-store overflow born moved unread unused narrow rounding values"
).split()

# What is seen in the values of a result alone, and what may only follow from something that was seen to happen.
SEEN_IN_VALUES = frozenset("moved unread unused narrow rounding values".split())
ROUGH = frozenset({"narrow", "rounding"})  # every value is nearly right
_ROOTS = frozenset(ORDER) - SEEN_IN_VALUES - {"race"}

# kind -> the kinds that explain it away
_FOLLOWS = {
    "padding": {"map-bounds"},
    "born": {"overflow"},
    "unvisited": {"map-bounds"},
    "no-wait": {"unwaited"},
    "reused": {"unwaited"},
    "unused": {"never-stored"},
    "unread": {"map-bounds"},
    "unwritten": {"hang", "unwaited", "copy-shape", "no-wait", "shared-semaphore", "never-stored"},
    "stale": {"map-bounds", "revisit", "unwritten"},
    "carry": {"map-bounds", "unwritten"},
    "overwritten": {"unvisited", "map-bounds"},
    "never-stored": {"map-bounds", "unwaited"},
    "revisit": {"map-bounds", "unvisited"},
}


def diagnose(run: Run, want: Any, tolerance: Tolerance | None = None) -> Diagnosis:
    """Compares a run with the expected result (a pytree of arrays) and explains what is wrong.

    Findings that are wrong whatever the values (a wait that never ends, an out-of-bounds block, a race) count even when
    the values agree: they agree by luck.
    """
    got_leaves = jax.tree.leaves(run.outputs)
    findings = structure(run.outputs, want, "pallas_call", "out_shape")
    wrong: list[Diagnosis] = []
    if not findings:
        for each in wrong_results(run.outputs, want, tolerance):
            wrong.append(_output(run, each, {id(known.operand) for known in wrong}))
        wrong = _not_inherited(run, wrong)
        findings = [f for each in wrong for f in each.findings]
    about = next((each for each in wrong if each.operand is not None), Diagnosis(()))
    maps = [m for t in run.traces for m in index_maps(t)]
    findings = [f.but(maps=f.maps or maps) for f in findings]
    for trace in run.traces:
        seen = [f for each in trace.with_pipelines() for f in incidents_of(each, bool(wrong), about.steps)]
        poisoned = _has_nan(trace.outputs) or not any(_has_nan(t.outputs) for t in run.traces)
        findings += [f for f in seen if poisoned or f.kind not in GARBAGE_READS]  # its own result is clean
        lost = any(f.kind == "map-bounds" for f in seen)  # blocks that go astray meet each other
        findings += [] if lost else list(races(trace))
    if all(np.isfinite(np.asarray(x, np.float64)).all() for x in got_leaves):
        findings = [f for f in findings if f.kind != "born"]  # it never reached the result
    findings = _roots(findings, poisoned=_has_nan(got_leaves))
    if findings and about.summary:
        findings[0] = findings[0].but(evidence=(about.summary, *findings[0].evidence))
    return dataclasses.replace(about, findings=findings)


def rounded(run: Run, want: Any, course: Course) -> Diagnosis | None:
    """The first result that is rounded worse than the course's, or None. Every value is within tolerance."""
    gots = [np.asarray(x) for x in jax.tree.leaves(run.outputs)]
    for name, got, theirs, exact in zip(result_names(want), gots, course.results, course.exact, strict=True):
        found = excess(got, theirs, exact) if is_floating(theirs.dtype) and got.shape == theirs.shape else None
        if found is not None:
            kernels = kernels_of(run)
            where = next(makers([kernel.results for kernel in kernels], got), None)
            return Diagnosis([too_rough(kernels, where, name, found, course.narrow)])
    return None


def explain_garbage(run: Run, run_again: Run, want: Any, tolerance: Tolerance | None = None) -> Finding | None:
    """A result that is right when uninitialised memory is NaN, and wrong in `run_again`, where it is something else."""
    again = diagnose(run_again, want, tolerance)
    for trace in (t for outer in run.traces for t in outer.with_pipelines()) if again.findings else ():
        reads = [i for i in trace.incidents if i.kind in GARBAGE_READS]
        for i in [i for i in reads if i.step in again.steps] or reads:
            advice = (
                "Tell by position which elements are real (jnp.where(position < size, x, 0)), never by their value."
                if i.kind == "padding"
                else f"Set {i.ref} before you read it."
            )
            cause = (
                f"{at(trace, i.step)}: {i.count} of the {i.total} elements that the kernel reads from {i.ref} are "
                "garbage, and the result depends on them: it is right when they happen to be NaN, and wrong when they "
                f"are not. {advice}"
            )
            return Finding("garbage", cause, [], i.line, i.step, i.at, i.ref)
    return None


def result_names(want: Any) -> list[str]:
    """What to call each result: by its field where the spec returns a NamedTuple, else by its number."""
    fields, count = getattr(want, "_fields", ()), len(jax.tree.leaves(want))
    if len(fields) == count:
        return [f"result.{field}" for field in fields]
    return [f"result {n} of {count}, counted from 0," for n in range(count)] if count > 1 else ["the result"]


def structure(got: Any, want: Any, kernel: str = "", declared: str = "") -> list[Finding]:
    """What is wrong with the number, shapes and dtypes of results. got, want: pytrees of arrays. declared: where the
    kernel that makes them says what they are."""
    made, wanted = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (got, want))
    if not made and wanted:
        of = f" of the {kernel}" if kernel else ""
        return [Finding("structure", f"the function returns nothing: return the result{of}.")]
    if len(made) != len(wanted):
        return [Finding("structure", f"the function returns {plural(len(made), 'array')}, the spec {len(wanted)}.")]
    if (form := _form(got)) != (right := _form(want)):
        return [Finding("structure", f"the function returns {form}, the spec {right}.")]
    for name, g, w in zip(result_names(want), made, wanted, strict=True):
        if g.shape != w.shape:
            advice = f": look at {declared} and at what is done to the result" if declared else ""
            return [Finding("shape", f"{name} has shape {g.shape}, the spec says {w.shape}{advice}.")]
        if g.dtype != w.dtype:
            advice = f"look at the dtype in {declared} and at astype." if declared else _about_dtype(g.dtype, w.dtype)
            return [Finding("dtype", f"{name} is {g.dtype}, the spec says {w.dtype}: {advice}")]
    return []


def _form(tree: Any) -> str:
    """How results lie in one another. Whether in a list or a tuple is all the same."""
    if isinstance(tree, list | tuple):
        return f"({', '.join(map(_form, tree))}{',' * (len(tree) == 1)})"
    return "None" if tree is None else "array"


def _about_dtype(got: np.dtype, want: np.dtype) -> str:
    if want.kind in "iu" and got.kind not in "iub":
        return "/ and jnp.zeros(n) make floats. Use // (rounds down) or pl.cdiv (rounds up), and dtype=, or .astype."
    if want.kind in "iu" and got.kind == "b":
        return "it is a comparison. To count, add .astype(jnp.int32), or choose with jnp.where."
    return f"say dtype={want}, or .astype, where it is made."


def wrong_results(outputs: Any, want: Any, tolerance: Tolerance | None) -> list[Result]:
    """The results that are not close to what is expected. outputs, want: pytrees of arrays of the same structure."""
    found = []
    for name, *pair in zip(result_names(want), jax.tree.leaves(outputs), jax.tree.leaves(want), strict=True):
        made, right = map(np.asarray, pair)
        allowed = tolerance or default_tolerance(right.dtype)
        got, expected = made.astype(np.float64), right.astype(np.float64)
        bad = ~allowed.close(got, expected)
        if bad.any():
            found.append(Result(name, made, got, expected, bad, allowed))
    return found


def _output(run: Run, wrong: Result, taken: Collection[int]) -> Diagnosis:
    """taken: the outputs that other results come out of, if there are more that look alike."""
    made = [*makers([trace.outputs for trace in run.traces], wrong.made)]
    for number, j in sorted(made, key=lambda pair: id(run.traces[pair[0]].call.outs[pair[1]]) in taken):
        trace = run.traces[number]
        r = wrong.shaped(trace.call.outs[j].shape)
        return diagnose_output(Wrong(trace, j, r.got, r.want, r.bad, r.tolerance))
    sample = sample_of(wrong.got, wrong.want, wrong.bad, "")
    cause = f"{wrong.name} is wrong in {int(wrong.bad.sum())} of {wrong.bad.size} elements: {sample}."
    return Diagnosis([Finding("values", cause)])


def makers(outputs: Sequence[Sequence[np.ndarray]], got: np.ndarray) -> Iterator[tuple[int, int]]:
    """The numbers of the kernels and of their outputs that a result may have come out of, the last kernel first."""
    for number, made in reversed([*enumerate(outputs)]):
        for j, out in enumerate(made):
            same_nan = is_floating(out.dtype)
            if out.size == got.size and np.array_equal(out.reshape(-1), got.reshape(-1), equal_nan=same_nan):
                yield number, j


def _not_inherited(run: Run, wrong: list[Diagnosis]) -> list[Diagnosis]:
    """The wrong results, the earliest call's first, without what may only be wrong because an earlier one is."""
    places = {id(o): (n, t, j) for n, t in enumerate(run.traces) for j, o in enumerate(t.call.outs)}
    placed = sorted((f for f in wrong if id(f.operand) in places), key=lambda f: places[id(f.operand)][0])
    fed: set[int] = set()
    kept = []
    for found in placed:
        number, trace, j = places[id(found.operand)]
        if number in fed:
            own = [f for f in found.findings if f.kind not in SEEN_IN_VALUES]
            kept += [dataclasses.replace(found, findings=own)] if own else []
        else:
            fed |= fed_by(run, number, [trace.outputs[j]])
            kept.append(found)
    return kept + [f for f in wrong if id(f.operand) not in places]


def _has_nan(leaves: list[Any]) -> bool:
    """Whether uninitialised memory can have reached the result: it is NaN in floats, and cannot be told in integers."""
    arrays = [np.asarray(x) for x in leaves]
    return any(not is_floating(a.dtype) or bool(np.isnan(a.astype(np.float64)).any()) for a in arrays)


def _roots(findings: list[Finding], poisoned: bool) -> list[Finding]:
    """The likeliest cause first, without those that only follow from another. poisoned: garbage reached the result."""
    kinds = {f.kind for f in findings}
    roots = _ROOTS if poisoned else _ROOTS - GARBAGE_READS

    def follows(f: Finding) -> bool:
        if f.kind == "padding" and not poisoned:
            return True
        if f.kind in SEEN_IN_VALUES and kinds & roots:
            return True
        return bool(kinds & _FOLLOWS.get(f.kind, set()))

    def order(f: Finding) -> tuple[int, int]:
        late = len(ORDER) if f.kind in ("unwritten", "stale") and not poisoned else 0
        rank = ORDER.index(f.kind) + late
        return rank, f.size if f.kind == "values" else 0  # what is small comes first in a computation

    return _merged(sorted((f for f in findings if not follows(f)), key=order))


_IN_ALL = frozenset("map-bounds carry unwritten stale never-stored".split())


def _merged(findings: list[Finding]) -> list[Finding]:
    """Operands out of bounds, or buffers not set, at the same step have one cause: one finding, the others by name."""
    first: dict[Any, Finding] = {}
    for f in findings:
        key = (f.kind, f.step) if f.kind in _IN_ALL else id(f)
        known = first.get(key)
        first[key] = known.but(evidence=(*known.evidence, f"the same happens with {f.operand}")) if known else f
    return [*first.values()]
