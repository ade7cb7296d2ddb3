"""From a trace and the expected result to findings in plain English: cause first, then what to try, then evidence."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.capture import Operand, Outside
from ..ir.ops import is_floating
from ..lens.machine import Run, Trace, fed_by
from ..lens.program import stores_toward
from ..text import plural
from .findings import (
    FATAL,
    GARBAGE_READS,
    Diagnosis,
    Finding,
    Tolerance,
    WrongOutput,
    default_tolerance,
)
from .incidents import at, crossed_lookups, incidents_of, index_maps, races, unscaled
from .output.base import sample_of
from .output.blocks import Blocks
from .rounding import Course, excess

# Which finding is the likelier root of the others: lower comes first.
ORDER = (
    "structure shape dtype hbm-load hbm-store hang map-bounds ref-bounds unwaited race unvisited revisit never-stored "
    "garbage unwritten stale clobbered reset overwritten repeated partly-stored sometimes-stored carry "
    "unmoved misfit padding "
    "input-store max-fill max-start "
    "no-rescale overflow exp-positive born exchanged rebound local-position mask "
    "moved unread unused transposed permuted flipped precision rounding offset scaled row-offset row-scaled row-term "
    "row-missing wrong-axis reciprocal nan zeros values"
).split()


SEEN_IN_VALUES = frozenset(
    "unmoved misfit moved unread unused transposed permuted flipped precision rounding offset scaled row-offset "
    "row-scaled row-term row-missing wrong-axis reciprocal nan zeros values local-position mask".split()
)


# Those that an index map is not to blame for.
_IN_THE_KERNEL = frozenset(
    "precision rounding offset scaled row-offset row-scaled row-term row-missing wrong-axis reciprocal".split()
)

_ROOTS = frozenset(
    "hang map-bounds ref-bounds unwaited revisit never-stored unvisited unwritten stale clobbered reset overwritten "
    "repeated "
    "partly-stored "
    "sometimes-stored carry padding max-fill max-start no-rescale overflow exp-positive born input-store exchanged "
    "rebound".split()
)


_LOST = frozenset("reset overwritten carry".split())


# kind -> the kinds that explain it away
_FOLLOWS = {
    "padding": frozenset({"map-bounds", "unmoved", "misfit", "moved"}),
    "moved": frozenset({"unmoved"}),
    **{kind: frozenset({"map-bounds"}) for kind in ("carry", "reset", "partly-stored")},
    "overflow": frozenset({"max-fill", "max-start"}) | _LOST,
    "exp-positive": frozenset({"max-fill", "max-start", "no-rescale", "overflow"}) | _LOST,
    "born": frozenset({"max-fill", "max-start", "no-rescale", "overflow", "exp-positive"}) | _LOST,
    "unvisited": frozenset({"map-bounds"}),
    "unused": frozenset({"never-stored"}),
    "unwritten": frozenset({"map-bounds", "hang", "unwaited", "never-stored"}),
    "stale": frozenset({"map-bounds", "revisit", "hang"}),
    "overwritten": frozenset({"unvisited", "map-bounds"}),
    "sometimes-stored": frozenset({"map-bounds", "revisit"}),
    "revisit": frozenset({"map-bounds", "unvisited"}),
}


def diagnose(run: Run, want: Any, tolerance: Tolerance | None = None) -> Diagnosis:
    """Compares a run with the expected result (a pytree of arrays) and explains what is wrong.

    Findings that are wrong whatever the values (a wait that never ends, an out-of-bounds block, a race) count even when
    the values agree: they agree by luck.
    """
    import jax

    got_leaves, want_leaves = jax.tree.leaves(run.outputs), jax.tree.leaves(want)
    findings = _structure(got_leaves, want_leaves)
    diagnosis = Diagnosis(findings)
    wrong = False
    if not findings:
        named = zip(result_names(want), got_leaves, want_leaves, strict=True)
        all_found = [_output(run, np.asarray(g), np.asarray(w), tolerance, name) for name, g, w in named]
        for found in _not_inherited(run, _not_rounded(run, [f for f in all_found if f is not None])):
            wrong = True
            diagnosis.findings += found.findings
            if diagnosis.operand is None:
                diagnosis.operand, diagnosis.tiles = found.operand, found.tiles
                diagnosis.summary, diagnosis.steps = found.summary, found.steps
    diagnosis.findings += _exchanged(run, got_leaves, want_leaves, tolerance) if wrong else []
    diagnosis.findings += [*_misnamed(run)] or _rebound(run, diagnosis.operand) if wrong else []
    for f in diagnosis.findings:
        f.maps = f.maps or [m for t in run.traces for m in index_maps(t)]
    poisoned = {id(t) for t in run.traces if _has_nan(t.outputs)}
    for trace in run.traces:
        seen = list(incidents_of(trace, wrong, diagnosis.steps))
        if poisoned and id(trace) not in poisoned:  # whatever it has read, its own result is clean
            seen = [f for f in seen if f.kind not in GARBAGE_READS]
        diagnosis.findings += seen
        diagnosis.findings += unscaled(trace) if wrong else []
        diagnosis.findings += crossed_lookups(trace) if wrong else []
        lost = any(f.kind == "map-bounds" for f in seen)  # blocks that go astray meet each other
        diagnosis.findings += [] if lost else list(races(trace))
    if all(np.isfinite(np.asarray(x, np.float64)).all() for x in got_leaves):
        diagnosis.findings = [f for f in diagnosis.findings if f.kind != "born"]  # it never reached the result
    if not any((np.isinf(g) & ~np.isinf(w)).any() for g, w in _pairs(got_leaves, want_leaves)):
        diagnosis.findings = [
            f for f in diagnosis.findings if f.kind != "born" or "log(0)" not in f.cause
        ]  # it is meant
    diagnosis.outputs = [f.output for f in diagnosis.findings if f.output]
    diagnosis.findings = _roots(diagnosis.findings, poisoned=_has_nan(got_leaves))
    _tell_unread(run, diagnosis.findings[:1])
    if diagnosis.findings and diagnosis.summary:
        diagnosis.findings[0].evidence.insert(0, diagnosis.summary)
    return diagnosis


def _not_rounded(run: Run, wrong: list[Diagnosis]) -> list[Diagnosis]:
    """The wrong results; one that is nearly right, beside one of the same call that is not, is not called rounded."""
    calls = [{id(o) for o in t.call.outs} for t in run.traces]
    for found in wrong:
        if not {f.kind for f in found.findings} <= {"precision", "rounding"}:
            continue
        mine: set[int] = next((outs for outs in calls if id(found.operand) in outs), set())
        beside = [f for f in wrong if f is not found and id(f.operand) in mine]
        if any(f.kind not in ("precision", "rounding") for other in beside for f in other.findings):
            found.findings = []
    return [found for found in wrong if found.findings]


def _not_inherited(run: Run, wrong: list[Diagnosis]) -> list[Diagnosis]:
    """The wrong results, the earliest call's first, without what may only be wrong because an earlier one is."""
    places = {id(o): (n, t, j) for n, t in enumerate(run.traces) for j, o in enumerate(t.call.outs)}
    placed = sorted((f for f in wrong if id(f.operand) in places), key=lambda f: places[id(f.operand)][0])
    fed: set[int] = set()
    kept = []
    for found in placed:
        number, trace, j = places[id(found.operand)]
        if number not in fed:
            kept.append(found)
            fed |= fed_by(run, number, [trace.outputs[j]])
            continue
        found.findings = [f for f in found.findings if f.kind not in SEEN_IN_VALUES]
        kept += [found] if found.findings else []
    return kept + [f for f in wrong if id(f.operand) not in places]


_ASTRAY = frozenset("map-bounds moved unmoved misfit values".split())


def _tell_unread(run: Run, findings: list[Finding]) -> None:
    """Blocks that go astray in a call with a prefetched Ref that nothing reads: that Ref is the likely lack."""
    for trace in run.traces:
        call = trace.call
        kernel = getattr(call.kernel, "jaxpr", call.kernel)
        maps = [getattr(o.index_map, "jaxpr", o.index_map) for o in call.operands if o.index_map is not None]
        for n, name in enumerate(call.scalar_names):
            refs = [(kernel, kernel.invars[n]), *((m, m.invars[n - len(call.scalar_names)]) for m in maps)]
            if any(v is ref for program, ref in refs for e in program.eqns for v in e.invars):
                continue
            for f in [f for f in findings if f.kind in _ASTRAY]:
                f.cause += f" {name} is prefetched, and nothing reads it: no index map, and no line of the kernel."


def _pairs(got: list[Any], want: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Results and what is expected of them, in double precision, where their shapes agree."""
    for g, w in zip(got, want, strict=False):
        if np.shape(g) == np.shape(w):
            yield np.asarray(g, np.float64), np.asarray(w, np.float64)


def result_names(want: Any) -> list[str]:
    """What to call each result: by its field where the spec returns a NamedTuple, else by its number."""
    import jax

    fields, count = getattr(want, "_fields", ()), len(jax.tree.leaves(want))
    if len(fields) == count:
        return [f"result.{field}" for field in fields]
    return [f"result {n} of {count}, counted from 0," for n in range(count)] if count > 1 else ["the result"]


def _exchanged(run: Run, got: list[Any], want: list[Any], tolerance: Tolerance | None) -> Iterator[Finding]:
    """Two results of one shape that have changed places."""
    outs = [(o.name, out) for t in run.traces for o, out in zip(t.call.outs, t.outputs, strict=True)]
    made = [next((n for n, (_, out) in enumerate(outs) if out is z), None) for z in got]
    for a, b in itertools.combinations(range(len(got)), 2):
        x, y, u, v = (np.asarray(z) for z in (got[a], got[b], want[a], want[b]))
        close = (tolerance or default_tolerance(u.dtype)).close
        if x.shape != y.shape or close(x, u).all() or close(y, v).all():
            continue
        if close(x, v).all() and close(y, u).all():
            m, n = made[a], made[b]
            first = f"result {a}" if m is None else outs[m][0]
            second = f"result {b}" if n is None else outs[n][0]
            if m is not None and n is not None and m > n:
                cause = (
                    f"the results have changed places on the way out: what {first} holds is returned as result {a}, "
                    f"and what {second} holds as result {b}, counted from 0. The spec has them the other way round."
                )
                yield Finding("exchanged", cause, [])
                continue
            cause = f"{first} holds what belongs in {second}, and the other way round: the two have changed places."
            yield Finding("exchanged", cause, [])


def _misnamed(run: Run) -> Iterator[Finding]:
    """A call that gets a result of an earlier call under a name that belongs to another array of these calls."""
    for n, later in enumerate(run.traces):
        given = list(zip(later.call.ins, later.call.inputs, strict=True))
        for earlier in run.traces[:n]:
            made = list(zip(earlier.call.outs, earlier.outputs, strict=True))
            for o, x in given:
                other = next((p for p, y in made if p.name != o.name and _equal(x, y)), None)
                own = next((y for p, y in made if p.name == o.name), None)
                if other is None or any(p.name == o.name and _equal(x, y) for p, y in made):
                    continue
                elsewhere = [  # another call gets the array under its own name, and another array under this one
                    t.call.name
                    for t in run.traces[1:]
                    if t is not later
                    and any(
                        p.name == other.name and _equal(x, y) for p, y in zip(t.call.ins, t.call.inputs, strict=True)
                    )
                    and any(p.name == o.name for p in t.call.ins)
                ]
                if own is None and not elsewhere:
                    continue
                cause = f"{o.name} of {later.call.name} holds what {earlier.call.name} stored in {other.name}. " + (
                    f"{earlier.call.name} has stored something in its own {o.name}, too: have the two changed "
                    "places on the way, for instance among the residuals?"
                    if own is not None
                    else f"In {elsewhere[0]}, {o.name} is another array: look at the order of the arguments."
                )
                yield Finding("rebound", cause, [], operand=o.name)
                return


def _rebound(run: Run, wrong: Operand | None) -> Iterator[Finding]:
    """A call that gets what an earlier call was given under another name, and nothing of what that call returned."""
    for later in run.traces[1:]:
        if not any(o is wrong for o in later.call.outs):
            continue
        given = list(zip(later.call.ins, later.call.inputs, strict=True))
        for earlier in run.traces[:1]:  # two later calls may well be given one array: the gradient of the result
            alike = earlier.call.name == later.call.name  # one kernel that serves twice is given the same on purpose
            if alike or any(_equal(x, out) for _, x in given for out in earlier.outputs):
                continue
            first = list(zip(earlier.call.ins, earlier.call.inputs, strict=True))
            both = [(o, p) for o, x in given for p, y in first if o.name != p.name and _equal(x, y)]
            for o, p in both[:1]:
                cause = (
                    f"{o.name} of {later.call.name} holds the very array that {p.name} of {earlier.call.name} was "
                    f"given, and nothing that {earlier.call.name} returned: what was kept for this call is the input, "
                    f"and {o.name} sounds like the result."
                )
                yield Finding("rebound", cause, [], operand=o.name)


def _equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.size > 1 and np.array_equal(a, b)


def _has_nan(leaves: list[Any]) -> bool:
    """Whether uninitialised memory can have reached the result: it is NaN in floats, and cannot be told in integers."""
    arrays = [np.asarray(x) for x in leaves]
    return any(not is_floating(a.dtype) or bool(np.isnan(a.astype(np.float64)).any()) for a in arrays)


def _roots(findings: list[Finding], poisoned: bool) -> list[Finding]:
    """The likeliest cause first, without those that only follow from another."""
    kinds = {f.kind for f in findings}
    by_ref = {(f.kind, f.operand) for f in findings}

    def follows(f: Finding) -> bool:
        if "crossed-lookup" in kinds and f.kind not in FATAL | {"crossed-lookup", "race"}:
            return True
        if f.kind == "unread" and kinds & (_ROOTS if poisoned else _ROOTS - GARBAGE_READS):
            return True  # an index map that stays away from what a mask rules out is right
        if f.kind in SEEN_IN_VALUES and kinds & _ROOTS - ({"padding", "unwritten", "stale"} if not poisoned else set()):
            if f.kind not in ("unmoved", "misfit", "moved", "transposed", "unread", "unused"):
                return True
            return bool(kinds & ({"map-bounds", "unvisited", "revisit"} | _FOLLOWS.get(f.kind, frozenset())))
        if f.kind == "padding" and not poisoned:
            return True
        if f.kind in ("stale", "carry") and ("unwritten", f.operand) in by_ref:
            return True
        if f.kind in ("values", "nan", "offset", "scaled") and kinds & {"unused", "unread", "unmoved", "misfit"}:
            return True
        return bool(kinds & _FOLLOWS.get(f.kind, frozenset()))

    def order(f: Finding) -> tuple[int, int]:
        rank = ORDER.index(f.kind) if f.kind in ORDER else len(ORDER)
        late = len(ORDER) if f.kind in ("unwritten", "stale") and not poisoned else 0
        return rank + late, f.size if f.kind == "values" else 0  # what is small comes first in a computation

    roots = sorted((f for f in findings if not follows(f)), key=order)
    return _merged(roots)


def _merged(findings: list[Finding]) -> list[Finding]:
    """Operands out of bounds, or buffers not set, at the same step have one cause: one finding, the others by name."""
    first: dict[Any, Finding] = {}
    kept = []
    for f in findings:
        key: Any = (f.kind, f.step, f.block and len(f.block)) if f.kind == "map-bounds" else id(f)
        if f.kind == "carry":
            key = (f.kind, f.step, f.cause.replace(f.operand or "", ""))
        if key in first:
            first[key].evidence.append(f"the same happens with {f.operand}")
        else:
            first[key] = f
            kept.append(f)
    return kept


def _structure(got: list[Any], want: list[Any]) -> list[Finding]:
    if len(got) != len(want):
        if not got:
            return [Finding("structure", "the function returns nothing: return the result of the pallas_call.")]
        return [Finding("structure", f"the function returns {plural(len(got), 'array')}, the spec {len(want)}.")]
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        if g.shape != w.shape:
            cause = (
                f"the result has shape {g.shape}, the spec says {w.shape}: look at out_shape and at what is done to "
                "the result."
            )
            return [Finding("shape", cause)]
        if g.dtype != w.dtype:
            cause = f"the result is {g.dtype}, the spec says {w.dtype}: look at the dtype in out_shape and at astype."
            return [Finding("dtype", cause)]
    return []


def explain_garbage(run: Run, run_again: Run, want: Any, tolerance: Tolerance | None = None) -> Finding | None:
    """A result that is right when uninitialised memory is NaN, and wrong in `run_again`, where it is something else."""
    again = diagnose(run_again, want, tolerance)
    if not again.findings:
        return None
    for trace in run.traces:
        reads = [i for i in trace.incidents if i.kind in GARBAGE_READS]
        for i in [i for i in reads if i.step in again.steps] or reads:
            advice = (
                "Tell by position which elements are real (jnp.where(position < size, x, 0)), never by their value."
                if i.kind == "padding"
                else f"Set {i.ref} before you read it."
            )
            cause = (
                f"{at(trace, i.step)}: {i.count} of the {i.total} elements that the kernel reads from {i.ref} "
                "are garbage, "
                "and the result depends on them: it is right when they happen to be NaN, and wrong when they "
                "are not. "
                f"{advice}"
            )
            return Finding("garbage", cause, [], i.line, i.step, i.at, i.ref)
    return None


def _output(run: Run, got: np.ndarray, want: np.ndarray, tolerance: Tolerance | None, name: str) -> Diagnosis | None:
    tolerance = tolerance or default_tolerance(want.dtype)
    g, w = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (got, want))
    bad = ~tolerance.close(g, w)
    if not bad.any():
        return None
    for trace, j in _makers(run, got):
        shape = trace.call.outs[j].shape
        blocks = Blocks(trace, j, g.reshape(shape), w.reshape(shape), bad.reshape(shape), tolerance)
        found = blocks.diagnose()
        for finding in found.findings:
            finding.output = WrongOutput(trace, j, blocks.want, tolerance)
            if finding.kind in _IN_THE_KERNEL:
                finding.near = [*stores_toward(trace.call, trace.call.outs[j].name), *finding.near]
        blocks.named_by_products(found.findings)
        return found
    cause = f"{name} is wrong in {int(bad.sum())} of {bad.size} elements: {sample_of(g, w, bad, '')}."
    return Diagnosis([Finding("values", cause)])


def _makers(run: Run, got: np.ndarray) -> Iterator[tuple[Trace, int]]:
    """The calls that a result may have come out of, the last first, each with the number of the output."""
    for trace in reversed(run.traces):
        for j, out in enumerate(trace.outputs):
            if out.size == got.size and np.array_equal(
                out.reshape(-1), got.reshape(-1), equal_nan=is_floating(out.dtype)
            ):
                yield trace, j


def rounded(run: Run, want: Any, course: Course) -> Diagnosis | None:
    """The first result that is rounded worse than the course's, or None. Every value is within tolerance."""
    import jax

    gots = [np.asarray(x) for x in jax.tree.leaves(run.outputs)]
    for name, got, theirs, exact in zip(result_names(want), gots, course.results, course.exact, strict=True):
        found = excess(got, theirs, exact) if is_floating(theirs.dtype) and got.shape == theirs.shape else None
        if found is None:
            continue
        for trace, j in _makers(run, got):
            shape = trace.call.outs[j].shape
            g, w = (x.astype(np.float64).reshape(shape) for x in (got, theirs))
            blocks = Blocks(trace, j, g, w, np.ones(shape, bool), default_tolerance(got.dtype))
            return blocks.rounded(found, run.traces, course.narrow)
        return Diagnosis([Finding(found.kind_of_finding, f"{name}: {found.words} {found.advice}")])
    return None


def too_much_outside(outside: Sequence[Outside], most: int) -> Finding | None:
    """Matrix products outside of the kernels that are more work than what has to be done there."""
    flops = sum(o.flops for o in outside)
    if flops <= most:
        return None
    first, *others = sorted((o for o in outside if o.flops), key=lambda o: -o.flops)
    cause = (
        f"Right answer, but products outside of the kernels do {flops:,} FLOPs; the budget is {most:,}. Most of them, "
        f"{first.flops:,}, make an array of shape {first.shape}. An index moves rows, and a kernel multiplies them."
    )
    evidence = [f"{o.flops:,} more" + (f" at {o.line}: {o.line.text}" if o.line else "") for o in others[:3]]
    near = [o.line for o in (first, *others) if o.line is not None]
    return Finding("budget", cause, evidence, first.line, operand="outside_flops", near=near)


def explain_barred(outside: Sequence[Outside], barred: Mapping[str, str], allow: Sequence[str]) -> Finding | None:
    """A primitive that nobody may make, by whatever name; a scatter, when several values go to one place."""
    for o in outside:
        harmless = o.primitive.startswith("scatter") and not o.crowded
        if o.primitive in barred and not harmless and not o.dtypes <= frozenset(allow):
            cause = barred[o.primitive].replace("{name}", o.primitive).replace("{shape}", str(o.shape))
            return Finding("forbidden", cause, [], o.line)
    return None


def explain_outside(outside: Sequence[Outside], allow: Sequence[str]) -> Finding | None:
    """Array work outside of the kernels, beyond reshapes, casts and what is allowed: primitives, or dtypes made."""
    allowed = frozenset(allow)
    refused = [o for o in outside if o.primitive not in allowed and not (o.dtypes and o.dtypes <= allowed)]
    if not refused:
        return None
    names = ", ".join(dict.fromkeys(o.primitive for o in refused))
    first = refused[0]
    cause = (
        f"{names} {'are' if ', ' in names else 'is'} done outside of the kernel, on arrays of shape "
        f"{first.shape}: this puzzle is about doing the "
        "work inside "
        "pallas_call. Only reshapes and casts may happen outside."
    )
    evidence = [
        f"{o.primitive} on shape {o.shape}" + (f" at {o.line}: {o.line.text}" if o.line else "") for o in refused[1:4]
    ]
    return Finding("outside", cause, evidence, first.line)
