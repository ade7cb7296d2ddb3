"""From a trace and the expected result to findings in plain English: cause first, then what to try, then evidence."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .capture import (
    EXPONENTIALS,
    Call,
    Operand,
    Outside,
    SourceLine,
    filled_with,
    holds_exponential,
    holds_primitive,
    line_of,
    subprograms,
    where_defined,
    with_ref_names,
)
from .machine import NOT_STORED, NOT_VISITED, STALE, Event, Incident, Run, Trace, history, listed, run_call, spans
from .ops import is_floating, np_dtype

Block = tuple[int, ...]


@dataclasses.dataclass
class Finding:
    """One thing that is wrong. `cause`: one or two sentences, with what to try. `evidence`: which blocks, how wrong."""

    kind: str
    cause: str
    evidence: list[str] = dataclasses.field(default_factory=list)
    line: SourceLine | None = None
    step: int | None = None
    at: tuple[int, ...] | None = None
    operand: str | None = None
    block: Block | None = None
    maps: list[SourceLine] = dataclasses.field(default_factory=list)  # the index maps that may be to blame
    size: int = 0  # elements of the output that it is about
    near: list[SourceLine] = dataclasses.field(default_factory=list)  # whatever the kernel or index map is made of


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|got - want| <= atol + rtol * |want|; atol is `relative` times the root mean square of `want`.

    rms: the root mean square of all errors may be at most this, relative to that of `want`.
    """

    relative: float
    rms: float | None = None

    def close(self, got: np.ndarray, want: np.ndarray) -> np.ndarray:
        """Element by element; NaN is never close."""
        if self.relative == 0:
            return got == want
        return np.isclose(got, want, rtol=self.relative, atol=self.atol(want))

    def atol(self, want: np.ndarray) -> float:
        return self.relative * _rms(want) or _BESIDE_ZERO

    def too_rough(self, got: np.ndarray, want: np.ndarray) -> bool:
        """Whether the errors, each of them small enough, are too large taken together."""
        return self.rms is not None and bool(_rms(got - want) > self.rms * _rms(want))


_FOLLOWED_STORES = 64  # into one block: with more, nobody looks what each of them did
_BESIDE_ZERO = 1e-12  # where every expected value is 0: what is left when numbers of an ordinary size cancel


def _rms(x: np.ndarray) -> float:
    finite = x[np.isfinite(x)].astype(np.float64)
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def default_tolerance(dtype: np.dtype) -> Tolerance:
    """A few units in the last place after a long sum: 3e-5 for float32, 2e-2 for bfloat16, 4e-3 for float16, 0 else."""
    if not is_floating(dtype):
        return Tolerance(0.0)
    return Tolerance({8: 1e-9, 4: 3e-5}.get(dtype.itemsize, 4e-3 if dtype == np.float16 else 2e-2))


@dataclasses.dataclass
class Diagnosis:
    """What is wrong with a run. Empty findings: nothing. `tiles`: block -> "ok" or what is wrong with it."""

    findings: list[Finding]
    operand: Operand | None = None
    tiles: dict[Block, str] = dataclasses.field(default_factory=dict)
    summary: str = ""
    steps: frozenset[int] = frozenset()  # those that visit a wrong block


# Which finding is the likelier root of the others: lower comes first.
_ORDER = (
    "structure shape dtype hbm-load hbm-store hang map-bounds ref-bounds unwaited race unvisited revisit never-stored "
    "garbage unwritten stale clobbered reset overwritten repeated partly-stored sometimes-stored carry padding "
    "input-store max-fill max-start "
    "no-rescale overflow exp-positive born exchanged rebound local-position mask "
    "moved unread unused transposed permuted flipped precision rounding offset scaled row-offset row-scaled row-term "
    "row-missing wrong-axis reciprocal nan zeros values"
).split()
_VALUES = frozenset(
    "moved unread unused transposed permuted flipped precision rounding offset scaled row-offset row-scaled row-term "
    "row-missing wrong-axis reciprocal nan zeros values local-position mask".split()
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
    "padding": frozenset({"map-bounds"}),
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
# Reads of memory that holds whatever it held: what comes of them must not depend on it.
GARBAGE_READS = frozenset("padding unwritten stale".split())
FATAL = frozenset("hbm-load hbm-store hang map-bounds ref-bounds unwaited revisit".split())


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
        for name, got, expected in zip(result_names(want), got_leaves, want_leaves, strict=True):
            found = _output(run, np.asarray(got), np.asarray(expected), tolerance, name)
            if found is not None:
                wrong = True
                diagnosis.findings += found.findings
                if diagnosis.operand is None:
                    diagnosis.operand, diagnosis.tiles = found.operand, found.tiles
                    diagnosis.summary, diagnosis.steps = found.summary, found.steps
    diagnosis.findings += _exchanged(run, got_leaves, want_leaves, tolerance) if wrong else []
    diagnosis.findings += _rebound(run, diagnosis.operand) if wrong else []
    for f in diagnosis.findings:
        f.maps = f.maps or [m for t in run.traces for m in _index_maps(t)]
    poisoned = {id(t) for t in run.traces if _has_nan(t.outputs)}
    for trace in run.traces:
        seen = list(_incidents(trace, wrong, diagnosis.steps))
        if poisoned and id(trace) not in poisoned:  # whatever it has read, its own result is clean
            seen = [f for f in seen if f.kind not in GARBAGE_READS]
        diagnosis.findings += seen
        diagnosis.findings += _unscaled(trace) if wrong else []
        diagnosis.findings += list(_races(trace))
    if all(np.isfinite(np.asarray(x, np.float64)).all() for x in got_leaves):
        diagnosis.findings = [f for f in diagnosis.findings if f.kind != "born"]  # it never reached the result
    diagnosis.findings = _roots(diagnosis.findings, poisoned=_has_nan(got_leaves))
    if diagnosis.findings and diagnosis.summary:
        diagnosis.findings[0].evidence.insert(0, diagnosis.summary)
    return diagnosis


def result_names(want: Any) -> list[str]:
    """What to call each result: by its field where the spec returns a NamedTuple, else by its number."""
    import jax

    fields, count = getattr(want, "_fields", ()), len(jax.tree.leaves(want))
    if len(fields) == count:
        return [f"result.{field}" for field in fields]
    return [f"result {n} of {count}, counted from 0," for n in range(count)] if count > 1 else ["the result"]


def _exchanged(run: Run, got: list[Any], want: list[Any], tolerance: Tolerance | None) -> Iterator[Finding]:
    """Two results of one shape that have changed places."""
    names = {id(out): o.name for t in run.traces for o, out in zip(t.call.outs, t.outputs, strict=True)}
    for a, b in itertools.combinations(range(len(got)), 2):
        x, y, u, v = (np.asarray(z) for z in (got[a], got[b], want[a], want[b]))
        close = (tolerance or default_tolerance(u.dtype)).close
        if x.shape != y.shape or close(x, u).all() or close(y, v).all():
            continue
        if close(x, v).all() and close(y, u).all():
            first, second = (names.get(id(z), f"result {n}") for n, z in ((a, got[a]), (b, got[b])))
            cause = f"{first} holds what belongs in {second}, and the other way round: the two have changed places."
            yield Finding("exchanged", cause, [])


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
        if f.kind in _VALUES and kinds & _ROOTS - ({"padding", "unwritten", "stale"} if not poisoned else set()):
            return f.kind not in ("moved", "transposed", "unread", "unused") or bool(
                kinds & {"map-bounds", "unvisited", "revisit"}
            )
        if f.kind == "padding" and not poisoned:
            return True
        if f.kind in ("stale", "carry") and ("unwritten", f.operand) in by_ref:
            return True
        if f.kind in ("values", "nan", "offset", "scaled") and kinds & {"unused", "unread"}:
            return True
        return bool(kinds & _FOLLOWS.get(f.kind, frozenset()))

    def order(f: Finding) -> tuple[int, int]:
        rank = _ORDER.index(f.kind) if f.kind in _ORDER else len(_ORDER)
        late = len(_ORDER) if f.kind in ("unwritten", "stale") and not poisoned else 0
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
        return [Finding("structure", f"the function returns {len(got)} array(s), the spec {len(want)}.")]
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


# --- incidents: what the machine saw ---------------------------------------------------------------------------------


def at(trace: Trace, step: int) -> str:
    """'step 4, grid index (1, 0)'."""
    index = tuple(int(i) for i in trace.steps[step]) if trace.n else ()
    return f"step {step}, grid index {index}" if index else "the only step"


def _incidents(trace: Trace, wrong: bool, steps: frozenset[int]) -> Iterator[Finding]:
    """One finding per kind, ref and line; those that harm only a wrong result are left out of a right one."""
    groups: dict[Any, list[Incident]] = collections.OrderedDict()
    for incident in trace.incidents:
        groups.setdefault((incident.kind, incident.ref, id(incident.eqn)), []).append(incident)
    seen: set[tuple[str, str]] = set()
    harmless = _harmless_padding(trace, {ref for kind, ref, _ in groups if kind == "padding"}) if wrong else set()
    # what is NaN comes of a NaN: an inf may well be meant
    in_order = sorted(groups.items(), key=lambda item: item[0][0] == "born" and "NaN" not in item[1][0].detail["what"])
    for (kind, ref, _), group in in_order:
        if (kind not in FATAL and not wrong) or (kind == "padding" and ref in harmless):
            continue
        if (kind, ref) in seen or kind not in _EXPLAIN:
            continue
        if kind == "carry":
            group = [i for i in group if _grows_here(trace, i)]
            if not group:
                continue
        seen.add((kind, ref))
        if kind == "padding":  # elsewhere it may well be harmless
            group = [i for i in group if i.step in steps] or group
        first = group[0]
        cause = _EXPLAIN[kind](trace, first)
        if cause:
            more = f"the same happens at {len(group) - 1} more step(s), up to step {group[-1].step}"
            evidence = [more] if len(group) > 1 else []
            line = first.line or _map_line(trace, ref, kind)
            maps = _index_maps(trace) if line is None or kind in ("map-bounds", "revisit") else []
            operand = next((o for o in trace.call.operands if o.name == ref and o.index_map is not None), None)
            in_map = operand is not None and kind == "map-bounds"
            near = list(_lines_of(operand.index_map if in_map and operand else trace.call.kernel))
            yield Finding(kind, cause, evidence, line, first.step, first.at, ref, first.block, maps, near=near)


def _times_held(jaxpr: Any, name: str) -> int:
    """How many equations anywhere inside `jaxpr` are of a primitive."""
    inner = (sum(_times_held(sub, name) for sub in subprograms(e)) for e in jaxpr.eqns)
    return sum(e.primitive.name == name for e in jaxpr.eqns) + sum(inner)


def _harmless_padding(trace: Trace, refs: set[str]) -> set[str]:
    """Which of these Refs' padding has no say in the result: with zeros in its place, the same comes out."""

    def matters(clean: set[str]) -> bool:
        again = run_call(trace.call, detail=False, clean=frozenset(clean)).outputs
        return not all(
            np.array_equal(a, b, equal_nan=is_floating(a.dtype)) for a, b in zip(again, outputs, strict=True)
        )

    outputs = trace.outputs
    fills = [filled_with(e, _producers(jaxpr)) for jaxpr, _ in with_ref_names(trace.call) for e in jaxpr.eqns]
    if any(fill is not None and (math.isnan(fill) or fill == math.inf) for fill in fills):
        return set()  # what a mask has put there is no better than garbage
    if not refs or not matters(refs):
        return refs
    guilty = {ref for ref in refs if matters({ref})} if len(refs) > 1 else refs
    return refs - guilty if guilty else set()


def _lines_of(program: Any) -> Iterator[SourceLine]:
    """The reader's lines that a kernel or an index map is made of, in the order of its equations."""
    program = getattr(program, "jaxpr", program)
    for eqn in getattr(program, "eqns", ()):
        line = line_of(eqn)
        if line is not None:
            yield line
        for inner in subprograms(eqn):
            yield from _lines_of(inner)


def _grows_here(trace: Trace, i: Incident) -> bool:
    """Whether the visit in which a buffer is read also stores into it. One that is only read is carried on purpose."""
    last = i.step
    moves = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    while last + 1 < trace.n and all(trace.blocks[k][last + 1] == trace.blocks[k][i.step] for k in moves):
        last += 1
    return any(e.op == "store" and e.ref == i.ref and i.step <= e.step <= last for e in trace.events)


def _index_maps(trace: Trace) -> list[SourceLine]:
    """Where the index maps of a call are defined, outputs last."""
    lines = [where_defined(o.index_map) for o in trace.call.operands if o.index_map is not None]
    return [line for line in lines if line is not None]


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


def _map_line(trace: Trace, ref: str, kind: str) -> SourceLine | None:
    operand = next((o for o in trace.call.operands if o.name == ref), None)
    if operand is None or operand.index_map is None or kind not in ("map-bounds", "revisit"):
        return None
    return where_defined(operand.index_map)


def still_axes(trace: Trace, k: int) -> list[int]:
    """The grid axes along which the block of operand k does not change: those it is revisited or reduced over."""
    grid, blocks = trace.call.grid, trace.blocks[k]
    by_step = dict(zip(trace.steps, blocks, strict=True))
    axes = []
    for d, size in enumerate(grid):
        if size < 2 or d in trace.call.vmapped:
            continue
        if all(by_step[s] == by_step[(*s[:d], 0, *s[d + 1 :])] for s in trace.steps):
            axes.append(d)
    return axes


def _reduction_axes(trace: Trace) -> list[int]:
    """Grid axes that every pipelined output stays put on, as program_id counts them."""
    outs = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    shared = set.intersection(*(set(still_axes(trace, k)) for k in outs)) if outs else set()
    return _own_axes(trace, shared)


def _own_axes(trace: Trace, axes: Iterable[int]) -> list[int]:
    """Grid axes as program_id counts them."""
    own = [d for d in range(len(trace.call.grid)) if d not in trace.call.vmapped]
    return sorted(own.index(d) for d in axes)


def _first_step_test(trace: Trace, ref: str = "") -> str:
    """When a buffer is to be set: an output by the steps that it stays for, scratch by those of all outputs."""
    own = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and o.name == ref and not o.in_hbm]
    axes = _own_axes(trace, still_axes(trace, own[0])) if own else _reduction_axes(trace)
    if not axes:
        return "before the first read"
    tests = " & ".join(f"(pl.program_id({d}) == 0)" if len(axes) > 1 else f"pl.program_id({d}) == 0" for d in axes)
    return f"on the first step of every output block: @pl.when({tests}), or jnp.where with this condition"


def _starting_values(trace: Trace) -> str:
    maximum = holds_primitive(trace.call.kernel, "reduce_max")
    return "(zero for a sum, -inf for a maximum)" if maximum else "(zero, for a sum)"


def _explain_hbm(trace: Trace, i: Incident) -> str:
    verb, way = ("reads", "from HBM into VMEM") if i.kind == "hbm-load" else ("writes", "from VMEM out to HBM")
    return (
        f"{at(trace, i.step)}: the kernel {verb} {i.ref} directly, but {i.ref} lives in HBM (memory_space=pl.ANY) and "
        f"a kernel can only touch VMEM and SMEM. Copy it {way} first, with pltpu.sync_copy or make_async_copy."
    )


def _explain_hang(trace: Trace, i: Incident) -> str:
    d = i.detail
    if d["dma"]:
        flight = "no copy that uses it is in flight" if not d["got"] else f"only {d['got']} bytes are in flight"
        return (
            f"{at(trace, i.step)}: the kernel waits for {d['needed']} bytes on DMA semaphore {i.ref}, but {flight}: "
            "on a "
            "TPU it waits for ever. Call .start() on the copy before .wait(), and wait once per copy."
        )
    return (
        f"{at(trace, i.step)}: the kernel waits for {d['needed']} on semaphore {i.ref}, whose count is {d['got']}, and "
        "nobody will signal it: on a TPU it waits for ever. Signal it first (pl.semaphore_signal), or drop the wait."
    )


def _explain_unwaited(trace: Trace, i: Incident) -> str:
    return (
        f"{i.count} copy into {i.ref} is started but never waited for: what the kernel reads from {i.ref} is what was "
        "there before. Call .wait() on the copy before reading."
    )


def _axis_range(o: Operand, start: Sequence[int], d: int) -> str:
    return f"elements {start[d]} to {start[d] + o.block[d] - 1} of {o.shape[d]}"


def _explain_map_bounds(trace: Trace, i: Incident) -> str:
    o: Operand = i.detail["operand"]
    start, block = i.detail["start"], i.block or ()
    d = next(d for d, (s, size) in enumerate(zip(start, o.shape, strict=True)) if s < 0 or s >= size)
    head = (
        f"{at(trace, i.step)}: the index map of {o.name} returns block {block}, out of bounds: along dimension {d} "
        "that "
        f"is {_axis_range(o, start, d)}, where the block indices run from 0 to {o.tiles[d] - 1}. "
    )
    if o.dims[d].kind == "blocked" and o.block[d] > 1 and block[d] % o.block[d] == 0 and block[d] > 0:
        return head + f"An index map returns block indices, not element offsets: leave out the factor {o.block[d]}."
    if block[d] == o.tiles[d] and len(trace.call.grid) == 1 and trace.n > math.prod(o.tiles):
        return head + f"The grid is longer than the array: it has {o.tiles[d]} block(s) along this dimension."
    return head + "Look at what the index map returns, and at the order and the size of the grid's axes."


def _explain_ref_bounds(trace: Trace, i: Incident) -> str:
    d = i.detail
    what = f"index {d['first']}" if d["first"] == d["last"] else f"elements {d['first']} to {d['last']}"
    head = (
        f"{at(trace, i.step)}: the kernel {d['verb']} {i.ref} at {what}, out of bounds: this dimension of the Ref has "
        f"{d['dim']} elements. "
    )
    operand = next((o for o in trace.call.operands if o.name == i.ref), None)
    if d["first"] == d["last"] < 0 and -d["first"] <= d["dim"]:
        head += f"A Ref does not count from the end: write {d['dim'] + d['first']} instead of {d['first']}."
    elif operand is not None and not operand.in_hbm:
        head += (
            "A blocked Ref is one block and counts from its own start: the index map has already chosen which block, "
            "so no offset is to be added."
        )
    else:
        head += "Look at the start and the size of the slice."
    return head


def _explain_revisit(trace: Trace, i: Incident) -> str:
    left = i.detail["left_at"]
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    first = left
    while first and trace.blocks[k][first - 1] == i.block:
        first -= 1
    if not any(e.op == "store" and e.ref == i.ref and first <= e.step <= left for e in trace.events):
        return (
            f"{at(trace, first)}: output block {i.block} of {i.ref} is in VMEM, nothing is stored in it before it "
            f"leaves at {at(trace, left)}, and so garbage is written to HBM; at {at(trace, i.step)} it comes a second "
            f"time. An output block leaves whenever its number changes: {_until_it_is_stored(trace, k)}"
        )
    axes = _reduction_axes(trace)
    axis = f" (grid axis {axes[0]})" if axes else ""
    return (
        f"{at(trace, i.step)}: output block {i.block} of {i.ref} is visited again, after it was left at step "
        f"{i.detail['left_at']} and written back; on a TPU its earlier contents do not come back. Make the axis{axis} "
        "that returns to the same block the last one of the grid, so that all its steps follow each other."
    )


def _until_it_is_stored(trace: Trace, k: int) -> str:
    """What to do about an output block that comes and goes before there is anything to store."""
    axes = _reduction_axes(trace)
    block = tuple(b for b in trace.call.operands[k].block if b != 1)
    sums = [s.name for s in trace.call.scratch if tuple(b for b in s.shape if b != 1) == block]
    if not axes or not sums:
        return "let the index map stay on one block as long as there is nothing to store."
    return (
        f"while {sums[0]} holds a sum for it, it has to stay. Make grid axis {axes[0]}, along which the sum runs, the "
        "last one of the grid."
    )


def _explain_unwritten(trace: Trace, i: Incident) -> str:
    kind = "scratch memory" if i.ref in {s.name for s in trace.call.scratch} else "an output block"
    if not any(o.name == i.ref for o in trace.call.outs) and kind == "an output block":
        kind = "scoped memory"
    copying = any(p.kind == "unwaited" and p.ref == i.ref for p in trace.incidents)
    if copying:
        return ""
    multiplied = _multiplied_by_a_condition(trace, i.ref)
    return (
        f"{at(trace, i.step)}: the kernel reads {i.count} elements of {i.ref} that nobody has written: {kind} starts "
        f"out as garbage. {multiplied}Set {i.ref} to its starting value {_starting_values(trace)} "
        f"{_first_step_test(trace, i.ref)}."
    )


def _multiplied_by_a_condition(trace: Trace, ref: str) -> str:
    """What to say when what is read is multiplied by a comparison, 0 or 1, in place of a choice."""
    for jaxpr, names in with_ref_names(trace.call):
        made = _producers(jaxpr)
        for e in (e for e in jaxpr.eqns if e.primitive.name == "mul"):
            for v, other in (e.invars, e.invars[::-1]):
                source = None if hasattr(v, "val") else _made_by(made, v, _SAME_VALUE)
                read = source is not None and source.primitive.name == "get" and names[source.invars[0]] == ref
                if read and _asks_for(made, other, _ORDERED | {"eq", "ne"}):
                    return (
                        f"Multiplied by 0 ({line_of(e)}), NaN is NaN: jnp.where chooses, and lets none of it through. "
                    )
    return ""


def _explain_stale(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    here, before = trace.blocks[k][i.step], trace.blocks[k][i.detail["left_at"]]
    return (
        f"{at(trace, i.step)}: the kernel reads {i.ref} before storing anything in block {here}: the buffer still "
        "holds "
        f"what step {i.detail['left_at']} left there for block {before}. Set it to its starting value "
        f"{_starting_values(trace)} {_first_step_test(trace, i.ref)}, not only once."
    )


def _explain_carry(trace: Trace, i: Incident) -> str:
    gathered = _gathered_before(trace, i)
    if gathered:
        return (
            f"{at(trace, i.step)}: {i.ref} is complete after steps {spans(gathered)}, and is changed again here, where "
            "a result is stored from it: the results of one sweep are measured with different numbers. Guard the "
            "update with @pl.when, so that it runs in the sweep that gathers and in no other."
        )
    return (
        f"{at(trace, i.step)}: the kernel reads {i.ref} as step {i.detail['left_at']} left it, and that step "
        "belonged to "
        f"another output block. Scratch keeps its contents from step to step: set it to its starting value "
        f"{_starting_values(trace)} {_first_step_test(trace)}, not only once."
    )


def _gathered_before(trace: Trace, i: Incident) -> list[int]:
    """The steps that only gather in a buffer, when it is updated once more at a step that stores a result from it."""

    def steps(op: str, names: set[str], first: int = 0) -> set[int]:
        return {e.step for e in trace.events if e.op == op and e.ref in names and first <= e.step <= i.step}

    outs = {o.name for o in trace.call.outs}
    loads = {(e.step, e.ref): n for n, e in reversed(list(enumerate(trace.events))) if e.op == "load"}
    sets = [
        e.step
        for n, e in enumerate(trace.events)
        if e.op == "store" and e.ref == i.ref and e.whole and e.step <= i.step and n < loads.get((e.step, e.ref), n + 1)
    ]
    if not sets or _reduction_axes(trace):
        return []
    updated, results = steps("store", {i.ref}, sets[-1]), steps("store", outs, sets[-1])
    if i.step not in updated & results or not results <= updated:
        return []
    return sorted(s for s in updated if s < min(results))


def _explain_padding(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    o = trace.call.operands[k]
    told = _way_past_the_mask(trace, i)
    masked = told or (
        "some of it passes the mask: the mask must be true for the positions of real data, counted in the whole array,"
    )
    masked += "" if told else " and for no others."
    if not told and not _masks_by_position(trace):
        masked = (
            "mask it before it mixes with real data, with jnp.where(position < size, x, 0); multiplying by zero leaves "
            "NaN NaN."
        )
    return (
        f"{at(trace, i.step)}: {i.count} of the {i.total} elements that the kernel reads from {i.ref} lie beyond the "
        "edge "
        f"of the array: block {trace.blocks[k][i.step]} hangs over shape {o.shape}, and that padding holds garbage. "
        f"{masked[0].upper()}{masked[1:]}"
    )


_REACHED = {"reduce_max": "a maximum", "reduce_sum": "a sum", "dot_general": "a matrix product"}
_REACHED |= {name: name for name in EXPONENTIALS}
_ORDERED = frozenset("lt le gt ge".split())


def _way_past_the_mask(trace: Trace, i: Incident) -> str:
    """How padding gets past a mask by position, or what comes of a right one; "" where neither is plain."""
    raw: list[tuple[Any, Any]] = []
    chosen: list[tuple[Any, Any]] = []
    for jaxpr, names in with_ref_names(trace.call):
        made = _producers(jaxpr)
        held = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "get" and names[e.invars[0]] == i.ref}
        for e in jaxpr.eqns:
            mine = [n for n, v in enumerate(e.invars) if not hasattr(v, "val") and v in held]
            if not mine:
                continue
            if e.primitive.name in _SAME_VALUE - {"select_n"}:
                held |= set(e.outvars)
            elif e.primitive.name == "select_n" or e.params.get("name") == "_where":
                chosen += [(jaxpr, e)] if _asks_for(made, e.invars[0], _ORDERED) else []
            elif any(_asks_for(made, v, _ORDERED) for n, v in enumerate(e.invars) if n not in mine):
                word = {"mul": "multiplied by", "add": "added to", "sub": "added to"}.get(e.primitive.name)
                if word and not chosen:
                    return _MASK_BY_ARITHMETIC.format(word, line_of(e))
            else:
                raw.append((jaxpr, e))
    return _unmasked_use(trace, i, raw, chosen)


_MASK_BY_ARITHMETIC = (
    "the mask is {} it ({}), and that does not remove it: NaN times anything is NaN, and so is NaN plus anything. "
    "Choose instead: jnp.where(position < size, x, what the reduction does not notice)."
)


def _summed_in_product(trace: Trace, i: Incident, eqn: Any) -> bool | None:
    """Whether a matrix product of a Ref sums over the dimension that hangs over the edge; None: no such product."""
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    o, block = trace.call.operands[k], trace.blocks[k][i.step]
    kept = [d for d, dim in enumerate(o.dims) if dim.kind != "squeezed"]
    over = {n for n, d in enumerate(kept) if (block[d] + 1) * o.block[d] > o.shape[d]}
    if eqn.primitive.name != "dot_general" or len(kept) != len(o.ref_shape):
        return None
    for v, dims in zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True):
        if getattr(v.aval, "shape", None) == o.ref_shape and over & set(dims):
            return True
    return False


def _unmasked_use(trace: Trace, i: Incident, raw: list[tuple[Any, Any]], chosen: list[tuple[Any, Any]]) -> str:
    """What to say of padding by the equations that use it as it is, and those that choose by position."""
    maximum = holds_primitive(trace.call.kernel, "reduce_max")
    fill = "-inf" if maximum else "0"
    for jaxpr, eqn in reversed(raw):
        what = next((_REACHED[e.primitive.name] for e in _after(jaxpr, eqn) if e.primitive.name in _REACHED), "")
        if what and chosen:
            return (
                f"a mask is there ({line_of(chosen[0][1])}), but what goes into {what} ({line_of(eqn)}) is what was "
                "read, without it: go on with what jnp.where returns, and with nothing else."
            )
        summed = _summed_in_product(trace, i, eqn)
        if summed:
            return (
                f"it goes into the sum of a matrix product ({line_of(eqn)}), and 0 times NaN is NaN: that the other "
                "factor is 0 there does not keep it out. Replace it by 0 first, with jnp.where(position < size, x, 0)."
            )
        if what and maximum and summed is False:
            return (
                f"a matrix product ({line_of(eqn)}) makes whole rows or columns of garbage of it, and no mask by "
                "position stands between them and the maximum: replace them, with jnp.where(position < size, product, "
                "-inf)."
            )
        if what and maximum:
            return (
                f"no mask by position keeps it out of {what} ({line_of(eqn)}): replace it before it mixes with real "
                f"data, with jnp.where(position < size, x, {fill})."
            )
    for jaxpr, eqn in [] if raw else chosen:
        value = filled_with(eqn, _producers(jaxpr))
        if value is not None and (math.isnan(value) or value == math.inf):
            stays = "NaN stays NaN in whatever it goes into"
            why = stays if math.isnan(value) else "it is the maximum of every row that it is in"
            return (
                f"the mask ({line_of(eqn)}) puts {value:g} in its place, and {why}. Fill with {fill}"
                f"{': no maximum notices it, and exp(-inf) is 0' if maximum else ', which no sum notices'}."
            )
    return ""


def _asks_for(made: dict[Any, Any], v: Any, primitives: frozenset[str]) -> bool:
    """Whether a value is a comparison of one of these kinds, or made of nothing but such and constants."""
    for _ in range(8):
        e = None if hasattr(v, "val") else made.get(v)
        if e is None or e.primitive.name in primitives:
            return e is not None
        inside = [w for w in e.invars if not hasattr(w, "val")]
        if e.primitive.name not in _SAME_VALUE | {"mul", "and", "not", "or"} or not inside:
            return False
        v = inside[0]
    return False


def _after(jaxpr: Any, first: Any) -> Iterator[Any]:
    """An equation, and all that depend on it, in order."""
    held: set[Any] = set()
    for e in jaxpr.eqns:
        if e is first or any(not hasattr(v, "val") and v in held for v in e.invars):
            yield e
            held |= set(e.outvars)


def _masks_by_position(trace: Trace) -> bool:
    """Whether the kernel chooses element by element (jnp.where), by a comparison of more than one number."""
    for jaxpr, _ in with_ref_names(trace.call):
        for e in jaxpr.eqns:
            chooses = e.primitive.name == "select_n" or e.params.get("name") == "_where"
            if chooses and e.invars[0].aval.shape and not _one_number(_producers(jaxpr), e.invars[0]):
                return True
    return False


def _one_number(made: dict[Any, Any], v: Any) -> bool:
    """Whether an array holds one number, broadcast."""
    while not hasattr(v, "val") and v.aval.shape:
        e = made.get(v)
        if e is None or e.primitive.name not in _SAME_VALUE:
            return False
        v = e.invars[0]
    return True


def _explain_input_store(trace: Trace, i: Incident) -> str:
    return (
        f"{at(trace, i.step)}: the kernel stores into {i.ref}, which is an input: that changes the copy in VMEM and "
        "never "
        "reaches HBM. Store into the output Ref."
    )


def _explain_overflow(trace: Trace, i: Incident) -> str:
    head = f"{at(trace, i.step)}: exp of values up to {i.detail['largest']:.4g} overflows to infinity. "
    if i.detail.get("maxima"):
        return head + (
            "What is subtracted before is not the largest value: subtract the maximum of each row, over all that has "
            "been read of it, and nothing above 0 is left."
        )
    return head + "Subtract the maximum before taking exp: the quotient stays the same."


def _explain_exp_positive(trace: Trace, i: Incident) -> str:
    return (
        f"{at(trace, i.step)}: exp gets values up to {i.detail['largest']:.4g}. With the maximum subtracted none is "
        "above 0: x - maximum, and in a rescaling old maximum - new maximum, where the maximum is that of all that has "
        "been read so far."
    )


def _explain_born(trace: Trace, i: Incident) -> str:
    what = i.detail["what"]
    head = f"{at(trace, i.step)}: {what}, in {i.count} of {i.total} elements; the operands were not NaN yet. "
    if "0 / 0" in what and holds_exponential(trace.call.kernel):
        masked = " Or all that these rows see is masked: then divide by jnp.where(sum == 0, 1, sum)."
        vanished = "All the exponentials of these rows vanished: subtract each row's own maximum before exp."
        return head + vanished + (masked if holds_primitive(trace.call.kernel, "iota") else "")
    if "inf - inf" in what and holds_primitive(trace.call.kernel, "reduce_max"):
        return head + (
            "Of a row of which all is masked so far the maximum is -inf, too, and -inf - (-inf) is NaN: keep what is "
            "subtracted finite. A running maximum may start from the most negative finite number as well."
        )
    if "log(0)" in what and holds_exponential(trace.call.kernel):
        return head + "An exponential vanished before its log was taken: log(exp(a) / b) is a - log(b)."
    started = _infinite_start(trace, i) if "times infinity" in what else ""
    return head + (started or "Follow what comes out of it.")


def _infinite_start(trace: Trace, i: Incident) -> str:
    """Where an infinite factor comes from, when it was read from a Ref."""
    for jaxpr, names in with_ref_names(trace.call):
        if not any(e is i.eqn for e in jaxpr.eqns):
            continue
        made = _producers(jaxpr)
        for n in i.detail["infinite"]:
            source = _made_by(made, i.eqn.invars[n], _SAME_VALUE)
            if source is None or source.primitive.name != "get":
                continue
            ref = names[source.invars[0]]
            maxima = [e for e in jaxpr.eqns if e.primitive.name == "max"]
            if any(_made_by(made, v, _SAME_VALUE) is source for e in maxima for v in e.invars):
                return (
                    f"The infinite factor is the maximum in {ref} itself. A rescaling is an exponential: exp(old "
                    "maximum - new maximum), which is 0 as long as the old one is -inf."
                )
            return f"The infinite factor was read from {ref}. A sum starts from 0: adding 0 changes nothing."
    return ""


def _explain_max_fill(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"{at(trace, i.step)}: a mask has put {d['fill']:g} in the place of what is not real, and in {i.count} rows "
        f"that is the maximum; all real values there lie below (the highest at {d['high']:.4g}). {d['fill']:g} is a "
        "value like any other. Fill with -inf: no maximum notices it, and exp(-inf) is 0."
    )


def _explain_max_start(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"{at(trace, i.step)}: the maximum in {i.ref} starts from {d['start']:.4g}, and {i.count} of {i.total} maxima "
        f"of the data lie below (the lowest at {d['low']:.4g}): there it is never the maximum of the data. Start from "
        "-inf (jnp.full(shape, -jnp.inf)), which every number exceeds."
    )


_EXPLAIN: dict[str, Callable[[Trace, Incident], str]] = {
    "hbm-load": _explain_hbm,
    "hbm-store": _explain_hbm,
    "hang": _explain_hang,
    "unwaited": _explain_unwaited,
    "map-bounds": _explain_map_bounds,
    "ref-bounds": _explain_ref_bounds,
    "revisit": _explain_revisit,
    "unwritten": _explain_unwritten,
    "stale": _explain_stale,
    "carry": _explain_carry,
    "padding": _explain_padding,
    "input-store": _explain_input_store,
    "overflow": _explain_overflow,
    "exp-positive": _explain_exp_positive,
    "born": _explain_born,
    "max-start": _explain_max_start,
    "max-fill": _explain_max_fill,
}


# --- a sum that is measured against a running maximum ----------------------------------------------------------------


def _unscaled(trace: Trace) -> Iterator[Finding]:
    """Sums of exponentials that grow while the maximum they are measured against does, and are not rescaled."""
    seen = set()
    for jaxpr, names in with_ref_names(trace.call):
        for total, maximum, eqn, reread in _unscaled_sums(jaxpr, names):
            grown = sorted({e.step for e in trace.events if e.op == "store" and e.ref == total and e.eqn is eqn})
            if total in seen or len(grown) < 2:
                continue
            seen.add(total)
            why = (
                f"the factor that is to mend it is made of two numbers read after {maximum} was overwritten, so it is "
                f"exp(0) = 1. Read the old maximum before you store the new one."
                if reread
                else "multiply what it holds by exp(old maximum - new maximum), and only then add."
            )
            cause = (
                f"{total} adds up exponentials while the maximum in {maximum} is still growing: at "
                f"{at(trace, grown[1])}, what it holds was measured against an older maximum than what is added; {why}"
            )
            yield Finding("no-rescale", cause, [], line_of(eqn), grown[1], trace.steps[grown[1]], total)


def _unscaled_sums(jaxpr: Any, names: dict[Any, str]) -> Iterator[tuple[str, str, Any, bool]]:
    """(sum, maximum, the store into the sum, whether it has a factor that knows no old maximum) within one program."""
    labels = _labels(jaxpr, names)

    def of(v: Any) -> frozenset[Any]:
        return frozenset() if hasattr(v, "val") else labels.get(v, frozenset())  # a literal depends on nothing

    stores = {names[e.invars[0]]: (n, e) for n, e in enumerate(jaxpr.eqns) if e.primitive.name == "swap"}
    for maximum, (when, store) in stores.items():
        if ("new", maximum) not in of(store.invars[1]):
            continue
        for total, (_, into) in stores.items():
            if total == maximum or ("exp", maximum) not in of(into.invars[1]):
                continue
            use, other = _first_use(jaxpr, names, total)
            with_it = frozenset().union(*map(of, other))
            if use not in ("add", "mul") or ("exp", maximum) not in with_it:
                continue
            old = any(label[:2] == ("load", maximum) and label[2] < when for label in with_it)
            if use == "add" or not old:
                yield total, maximum, into, use == "mul"


_SAME_VALUE = frozenset("reshape squeeze expand_dims convert_element_type copy broadcast_in_dim select_n".split())


def _labels(jaxpr: Any, names: dict[Any, str]) -> dict[Any, frozenset[Any]]:
    """What each value of a program depends on: ("load", ref, n) a Ref read by equation n, ("new", ref) the maximum of a
    Ref and something else, ("exp", ref) an exponential of either."""
    labels: dict[Any, frozenset[Any]] = {}
    for n, e in enumerate(jaxpr.eqns):
        found = frozenset().union(*(labels.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name == "get":
            found = frozenset({("load", names[e.invars[0]], n)})
        elif e.primitive.name == "max":
            found = frozenset(("new", label[1]) if label[0] == "load" else label for label in found)
        elif e.primitive.name in EXPONENTIALS or any(holds_exponential(inner) for inner in subprograms(e)):
            found |= {("exp", label[1]) for label in found}
        labels.update((v, found) for v in e.outvars)
    return labels


def _first_use(jaxpr: Any, names: dict[Any, str], ref: str) -> tuple[str, list[Any]]:
    """The first arithmetic that is done with what is read from a Ref: its primitive, and its other operands."""
    held: list[Any] = []
    for e in jaxpr.eqns:
        mine = [v for v in e.invars if any(v is h for h in held)]
        if (e.primitive.name == "get" and names[e.invars[0]] == ref) or (mine and e.primitive.name in _SAME_VALUE):
            held += e.outvars
        elif mine:
            return e.primitive.name, [v for v in e.invars if not any(v is h for h in held)]
    return "", []


def _races(trace: Trace) -> Iterator[Finding]:
    call = trace.call
    parallel = [d for d, s in enumerate(call.semantics) if "parallel" in s and d not in call.vmapped]
    for k, o in enumerate(call.operands):
        if o.role != "out" or o.in_hbm or not parallel:
            continue
        writers: dict[Any, set[tuple[int, ...]]] = collections.defaultdict(set)
        for step, block in zip(trace.steps, trace.blocks[k], strict=True):
            writers[block].add(tuple(step[d] for d in parallel))
        block = next((b for b, w in writers.items() if len(w) > 1), None)
        if block is None:
            continue
        guilty = [d for p, d in enumerate(parallel) if len({w[p] for w in writers[block]}) > 1]
        axes = ", ".join(map(str, guilty))
        cause = (
            f"data race: grid axis {axes} is marked 'parallel', but {len(writers[block])} of its steps write the "
            "same block "
            f"{block} of {o.name}, and on two cores they would run at the same time. Mark axis {axes} 'arbitrary' in "
            "dimension_semantics, or give each step its own block."
        )
        yield Finding("race", cause, [], call.where, operand=o.name, block=block)


# --- wrong values ----------------------------------------------------------------------------------------------------


def _output(run: Run, got: np.ndarray, want: np.ndarray, tolerance: Tolerance | None, name: str) -> Diagnosis | None:
    tolerance = tolerance or default_tolerance(want.dtype)
    g, w = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (got, want))
    bad = ~tolerance.close(g, w)
    rough = not bad.any() and tolerance.too_rough(g, w)
    if rough:
        bad = g != w
    if not bad.any():
        return None
    for trace in reversed(run.traces):
        for j, out in enumerate(trace.outputs):
            if out.size == got.size and np.array_equal(
                out.reshape(-1), got.reshape(-1), equal_nan=is_floating(out.dtype)
            ):
                shape = trace.call.outs[j].shape
                blocks = _Blocks(trace, j, g.reshape(shape), w.reshape(shape), bad.reshape(shape), tolerance)
                return blocks.rounded_twice(len(run.traces)) if rough else blocks.diagnose()
    cause = f"{name} is wrong in {int(bad.sum())} of {bad.size} elements: {_sample(g, w, bad, '')}."
    return Diagnosis([Finding("values", cause)])


def _sample(got: np.ndarray, want: np.ndarray, bad: np.ndarray, name: str) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{name}{list(index)} is {got[index]:.6g}, expected {want[index]:.6g}"


@dataclasses.dataclass
class _Blocks:
    """A wrong output, block by block."""

    trace: Trace
    j: int
    got: np.ndarray
    want: np.ndarray
    bad: np.ndarray
    tolerance: Tolerance

    def __post_init__(self) -> None:
        self.o: Operand = self.trace.call.outs[self.j]
        self.k = [k for k, o in enumerate(self.trace.call.operands) if o.role == "out"][self.j]
        tiles = self.o.tiles if not self.o.in_hbm else (1,) * len(self.o.shape)
        self.tiles = list(np.ndindex(*tiles))
        self.count = tiles
        self.atol = max(self.tolerance.atol(self.want.astype(np.float64)), 1e-12)
        finite = self.want[np.isfinite(self.want.astype(np.float64))]
        self.noise = 2e-6 * float(np.abs(finite).max(initial=0))  # what float32 rounding can make of a constant
        self.corners: np.ndarray | None = None
        self.elementwise = any(d.kind == "element" for d in self.o.dims)

    def cut(self, array: np.ndarray, tile: Block) -> np.ndarray:
        if self.o.in_hbm:
            return array
        return array[tuple(slice(i * b, (i + 1) * b) for i, b in zip(tile, self.o.block, strict=True))]

    def steps_of(self, tile: Block) -> list[int]:
        if self.o.in_hbm or self.elementwise:
            return []
        return [s for visit in self.trace.visits[self.j].get(tile, []) for s in visit]

    def diagnose(self) -> Diagnosis:
        status = {t: self._status(t) for t in self.tiles}
        wrong = {t: s for t, s in status.items() if s != ("ok",)}
        findings = list(self._missing(wrong)) + list(self._lost()) + list(self._never_read())
        findings += list(self._mask()) or list(self._pattern(wrong))
        for finding in findings:
            finding.operand = finding.operand or self.o.name
        texts = {t: _STATUS_WORDS.get(s[0], s[0]) for t, s in status.items()}
        steps = frozenset(s for t in wrong for s in self.steps_of(t))
        return Diagnosis(findings, self.o, texts, self._summary(len(wrong)), steps)

    def rounded_twice(self, calls: int) -> Diagnosis:
        """Every value is within tolerance, and too many are off by their last bit."""
        status = {t: ("ok",) if not self.cut(self.bad, t).any() else ("precision",) for t in self.tiles}
        wrong = [t for t, s in status.items() if s != ("ok",)]
        cause = (
            f"{self.o.name} is rounded once too often: each value is nearly right, but {self.bad.mean():.0%} of them "
            f"are off by the last bit of {self.o.dtype}; one cast at the very end would leave next to none. "
        )
        stored = "What an earlier call has stored in 16 bits is rounded already, and this call computes with it."
        look = "Look for a cast to 16 bits whose result is computed with."
        early = [*self._narrowed_early(), stored if calls > 1 else look]
        finding = self._finding("precision", cause + early[0], wrong[0])
        texts = {t: _STATUS_WORDS.get(s[0], s[0]) for t, s in status.items()}
        steps = frozenset(s for t in wrong for s in self.steps_of(t))
        return Diagnosis([finding], self.o, texts, self._summary(len(wrong)), steps)

    def _summary(self, wrong: int) -> str:
        with np.errstate(invalid="ignore"):
            error = np.abs(self.got.astype(np.float64) - self.want.astype(np.float64))[self.bad]
        error = error[np.isfinite(error)]
        size = f"largest error {error.max():.3g}" if error.size else "no finite value among them"
        n = int(self.bad.sum())
        sample = _sample(self.got, self.want, self.bad, self.o.name.removesuffix("_ref"))
        return (
            f"{self.o.name}: {wrong} of {len(self.tiles)} blocks wrong ({n} of {self.bad.size} elements, {size}; "
            f"{sample})"
        )

    # -- an expected result with -inf in it: a mask

    def _mask(self) -> Iterator[Finding]:
        """Every wrong element is -inf where it should not be, or is not where it should."""
        hidden, wanted = np.isneginf(self.got), np.isneginf(self.want)
        state = self.trace.state[self.j][self.bad]
        if (hidden == wanted)[self.bad].any() or np.isin(state, (NOT_VISITED, NOT_STORED, STALE)).any():
            return
        extra, lost = wanted & ~hidden, hidden & ~wanted  # to be hidden and is not; hidden and should not be
        name, values = self.o.name, np.unique(self.got[extra])
        first = tuple(int(n) for n in np.argwhere(self.bad)[0])
        if len(values) == 1 and not hidden.any():
            cause = (
                f"the mask of {name} has put {values[0]:g} where -inf is expected ({extra.sum()} elements): after a "
                "maximum and exp that is a score like any other. Fill with -inf: exp(-inf) is 0."
            )
        elif not hidden.any():
            cause = f"nothing in {name} is masked: {extra.sum()} elements should be -inf, {list(first)} is the first."
            if holds_primitive(self.trace.call.kernel, "iota"):
                cause += " Positions are compared: do they count from the start of the array, or of the block?"
        elif self.bad.sum() > 0.5 * self.bad.size and lost.any() and extra.any():
            cause = (
                f"the mask of {name} is the wrong way round: most of what should be -inf is not, and most of what "
                "should not be, is. Turn the comparison around."
            )
        else:
            cause = self._mask_moved(~hidden, ~wanted) or (
                f"the mask of {name} is wrong: {lost.sum()} elements are -inf and should not be, {extra.sum()} are not "
                f"and should be; {list(first)} is the first."
            )
        block = next(t for t in self.tiles if self.cut(self.bad, t).any())
        yield self._finding("mask", cause, block, [*self._repeated_mask(hidden)] if "block" not in cause else [])

    def _mask_moved(self, seen: np.ndarray, wanted: np.ndarray) -> str:
        """What to say when each row should see its first n columns: one too few, a constant too many, local ones."""
        repeated = "".join(self._repeated_mask(~seen))
        if repeated:
            return repeated
        size, columns = seen.shape[-1], np.arange(seen.shape[-1])
        got, want = seen.sum(axis=-1), wanted.sum(axis=-1)
        if any((array != (columns < array.sum(axis=-1, keepdims=True))).any() for array in (seen, wanted)):
            return ""
        inner = (got > 0) & (got < size) & (want > 0) & (want < size)
        off = np.unique((got - want)[inner])
        if len(off) != 1:
            return ""
        row = tuple(int(n) for n in np.argwhere(inner)[0])
        each = f"row {list(row)} of {self.o.name} has {got[row]} elements that are not -inf, expected {want[row]}"
        if abs(int(off[0])) == 1:
            many = "many" if off[0] > 0 else "few"
            return (
                f"the mask is off by one position: {each}, and every other row one too {many}, too. Look at the "
                "comparison: < or <=, and on which side."
            )
        return (
            f"the mask is off by {abs(int(off[0]))} positions: {each}, and so on in every row. The positions of rows "
            "or columns start from the wrong number."
        )

    def _repeated_mask(self, hidden: np.ndarray) -> Iterator[str]:
        """Every block along a dimension has the same mask, and should not."""
        for axis in range(len(self.count) - 2, len(self.count)):
            alike: dict[Block, list[np.ndarray]] = {}
            right: dict[Block, list[np.ndarray]] = {}
            for t in self.tiles:
                if self.cut(hidden, t).shape == self.o.block:
                    alike.setdefault((*t[:axis], *t[axis + 1 :]), []).append(self.cut(hidden, t))
                    right.setdefault((*t[:axis], *t[axis + 1 :]), []).append(self.cut(np.isneginf(self.want), t))
            same = all(np.array_equal(a, group[0]) for group in alike.values() for a in group)
            differ = any(not np.array_equal(a, group[0]) for group in right.values() for a in group)
            if same and differ and any(group[0].any() and not group[0].all() for group in alike.values()):
                yield (
                    f"the mask is the same in every block of {self.o.name} along dimension {axis}: positions are "
                    "counted from the start of the block. Add the number of the block times its size."
                )
                return

    # -- what kind of wrong is one block

    def _status(self, tile: Block) -> tuple[Any, ...]:
        bad = self.cut(self.bad, tile)
        if not bad.any():
            return ("ok",)
        state = self.cut(self.trace.state[self.j], tile)[bad]
        if not self.o.in_hbm and not self.elementwise and not self.steps_of(tile):
            return ("unvisited",)
        if (state == NOT_VISITED).all():
            return ("unvisited",) if not self.o.in_hbm else ("never stored",)
        if (state == NOT_STORED).all():
            return ("never stored",) if bad.all() else ("partly stored", _where_in(bad))
        if (state == STALE).all():
            return ("left over",)
        return self._values(tile, bad)

    def _values(self, tile: Block, bad: np.ndarray) -> tuple[Any, ...]:
        got, want = self.cut(self.got, tile), self.cut(self.want, tile)
        here = _where_in(bad)
        if np.isnan(got[bad].astype(np.float64)).all() and not np.isnan(want[bad].astype(np.float64)).any():
            return ("nan", here)
        if got.ndim >= 2 and got.shape[-1] == got.shape[-2] and self._same(got, np.swapaxes(want, -1, -2)):
            return ("transposed",)
        for axis in range(got.ndim):
            if got.shape[axis] > 1 and self._same(got, np.flip(want, axis)):
                return ("flipped", axis)
        for other in self._candidates(got) if got.size > 1 and got.any() else ():  # zeros come from nowhere
            if other != tile and self._same(got, self.cut(self.want, other)):
                return ("holds", other)
        if got.size > 1 and np.array_equal(np.sort(got, axis=None), np.sort(want, axis=None)):
            return ("permuted",)
        with np.errstate(all="ignore"):
            difference = (got.astype(np.float64) - want.astype(np.float64))[bad]
            ratio = got[bad].astype(np.float64) / want[bad].astype(np.float64)
        if not np.isfinite(difference).all():
            return ("values", here)
        if (got[bad] == 0).all():
            return ("zeros", here)
        middle = float(difference.mean())
        if got.size > 1 and self._same(got * want, np.ones_like(want, np.float64)):
            return ("reciprocal",)
        if difference.size > 1 and abs(middle) > self.atol and np.ptp(difference) <= 1e-3 * abs(middle) + self.noise:
            return ("offset", middle, here)
        if self._only_rounding(tile):
            return ("rounding", float(np.abs(difference).max()), here)
        if ratio.size > 1 and np.isfinite(ratio).all() and np.ptp(ratio) <= 1e-3 * max(1.0, float(np.abs(ratio).max())):
            return ("scaled", float(ratio.mean()), here)
        return self._by_rows(tile) or ("values", here)

    def _only_rounding(self, tile: Block) -> bool:
        """Float32 errors of a few dozen units in the last place that follow no rule."""
        got, want = (self.cut(x, tile).astype(np.float64) for x in (self.got, self.want))
        if _has_narrow_floats(self.trace.call) or self.tolerance.relative > 1e-3 or [*self._arithmetic()]:
            return False
        with np.errstate(all="ignore"):
            relative = (got - want) / want
        bad = self.cut(self.bad, tile)
        near = np.isfinite(relative[bad]).all() and np.abs(relative[bad]).max() < 40 * self.tolerance.relative
        relative = relative[np.isfinite(relative)]
        return bool(near and relative.size > 1 and np.ptp(relative) > 0.2 * np.abs(relative).max())

    # -- errors that belong to the row

    def _by_rows(self, tile: Block) -> tuple[Any, ...] | None:
        """Every wrong row is off by a constant of its own, by a factor of its own, or by a multiple of an input's row:
        (kind, name of that input, the number of each wrong row)."""
        got, want = (self.cut(x, tile).astype(np.float64) for x in (self.got, self.want))
        if got.ndim != 2 or got.shape[1] < 8:
            return None
        rows = np.flatnonzero(self.cut(self.bad, tile).any(axis=1)).tolist()
        if len(rows) < 2:
            return None
        ones = np.ones_like(want)
        candidates = [("row-offset", "", [ones]), ("row-scaled", "", [want])]
        ins = zip(self.trace.call.ins, self.trace.call.inputs, strict=True)
        same = [(o.name, self.cut(x, tile).astype(np.float64)) for o, x in ins if x.shape == self.want.shape]
        candidates += [("row-term", name, [x]) for name, x in same]
        candidates += [("row-term", name, [x, ones]) for name, x in same]
        for kind, name, basis in candidates:
            numbers = [self._fit(got[r], want[r], [b[r] for b in basis]) for r in rows]
            factors = [1 + n for n in numbers if n is not None]
            if kind == "row-scaled" and len(factors) == len(rows) and np.ptp(factors) < 5e-3:
                return ("scaled", round(float(np.mean(factors)), 3), "")  # one for all, and 16-bit rounding
            if all(n is not None for n in numbers):
                return (kind, name, dict(zip(rows, numbers, strict=True)), len(basis) > 1)
        missing = self._missing_number(want, rows, same)
        return missing or (("wrong-axis",) if self._separable(got, want) else None)

    def _missing_number(self, want: np.ndarray, rows: list[int], same: list[Any]) -> tuple[Any, ...] | None:
        """A kernel that reduces nothing, where what is expected is a * b plus one number per row times a."""
        if any(e.primitive.name.startswith("reduce_") for j, _ in with_ref_names(self.trace.call) for e in j.eqns):
            return None
        for (a, x), (b, y) in itertools.permutations(same, 2):
            numbers = [self._fit(want[r], x[r] * y[r], [x[r]]) for r in rows]
            if all(n is not None for n in numbers):
                return ("row-missing", a, dict(zip(rows, numbers, strict=True)), b)
        return None

    @staticmethod
    def _separable(got: np.ndarray, want: np.ndarray) -> bool:
        """Whether got / want is a factor of the row times a factor of the column."""
        with np.errstate(all="ignore"):
            factor = np.log(got / want)
        if not np.isfinite(factor).all() or np.ptp(factor) < 1e-2:
            return False
        rest = factor - factor.mean(axis=0, keepdims=True) - factor.mean(axis=1, keepdims=True) + factor.mean()
        return bool(np.abs(rest).max() < 1e-3)

    def _fit(self, got: np.ndarray, want: np.ndarray, basis: list[np.ndarray]) -> float | None:
        """The first coefficient of the basis in got - want, where nothing else is wrong with the row."""
        error, columns = got - want, np.stack(basis, axis=1)
        if not np.isfinite(columns).all():
            return None
        numbers = np.linalg.lstsq(columns, error, rcond=None)[0]
        rest = error - columns @ numbers
        explained = np.square(rest).sum() < 0.04 * np.square(error).sum()
        size = np.maximum(np.abs(got), np.abs(want))
        close = np.abs(rest) <= self.atol + 2 * self.tolerance.relative * size + 1e-3 * np.abs(error)
        return float(numbers[0]) if explained and close.all() else None

    def _candidates(self, got: np.ndarray) -> list[Block]:
        """The blocks whose first expected element is the first one of `got`."""
        if self.corners is None:
            self.corners = np.array([self.cut(self.want, t).flat[0] for t in self.tiles])
        near = np.isclose(self.corners.astype(np.float64), float(got.flat[0]), rtol=0.05, atol=10 * self.atol)
        return [self.tiles[i] for i in np.flatnonzero(near)]

    def _same(self, a: np.ndarray, b: np.ndarray) -> bool:
        return a.shape == b.shape and bool(self.tolerance.close(a, b).all())

    # -- blocks that were not written as they should be

    def _missing(self, wrong: dict[Block, tuple[Any, ...]]) -> Iterator[Finding]:
        groups = collections.defaultdict(list)
        for tile, status in wrong.items():
            groups[status[0]].append(tile)
        if groups["unvisited"]:
            yield self._unvisited(groups["unvisited"])
        stored = any(e.op != "load" and e.ref == self.o.name for e in self.trace.events)
        if not stored and not self.o.in_hbm and self.trace.n:
            yield self._never_stored()
            return
        if groups["never stored"] or groups["left over"]:
            yield self._sometimes_stored(sorted(groups["never stored"] + groups["left over"]))
        if groups["partly stored"]:
            yield self._partly_stored(groups["partly stored"], wrong)

    def _unvisited(self, tiles: list[Block]) -> Finding:
        o, call = self.o, self.trace.call
        count = math.prod(self.count)
        cause = (
            f"{_blocks(tiles)} of {o.name} {'is' if len(tiles) == 1 else 'are'} never visited: the grid {call.grid} "
            "has "
            f"{self.trace.n} step(s), the array has {count} blocks of {o.block}. "
        )
        visited = self.trace.visits[self.j]
        extent = [max((t[d] for t in visited), default=-1) + 1 for d in range(len(o.shape))]
        short = [d for d in range(len(o.shape)) if extent[d] < self.count[d] and self._axis_of(d) is not None]
        if not self.trace.n:
            axes = [d for d, length in enumerate(call.grid) if length == 0]
            cause += (
                f"Grid axis {axes[0]} has no steps at all: a block that is longer than its array divides it 0 times."
                if axes
                else ""
            )
        elif self.trace.n < count or (short and all(any(t[d] >= extent[d] for d in short) for t in tiles)):
            axes = [d for d in range(len(o.shape)) if max(t[d] for t in tiles) + 1 == self.count[d]]
            d = (short or axes or [0])[0]
            cause += (
                f"The grid is too short: pl.cdiv({o.shape[d]}, {o.block[d]}) = {self.count[d]} steps along dimension "
                f"{d}."
            )
        else:
            cause += "No step's index map returns it: look at the index map of the output."
        return Finding("unvisited", cause, [], where_defined(o.index_map), block=tiles[0], operand=o.name)

    def _never_stored(self) -> Finding:
        name, call = self.o.name, self.trace.call
        store = _store_into(call.kernel, call.kernel.invars[len(call.scalar_names) + self.k])
        line = call.where if store is None else line_of(store)
        if store is None:
            cause = (
                f"the kernel never stores anything into {name}: what you see is uninitialised memory. Write "
                f"{name}[...] = value; {name} = value only gives the name to something else."
            )
        else:
            last = tuple(size - 1 for size in call.grid)
            cause = (
                f"the store into {name} is never reached: the condition around it holds at no step. Program ids count "
                f"from 0; at the last step they are {last}."
            )
        return Finding("never-stored", cause, [], line, 0, self.trace.steps[0], name)

    def _sometimes_stored(self, tiles: list[Block]) -> Finding:
        steps = [s for t in tiles for s in self.steps_of(t)]
        first = min(steps) if steps else 0
        cause = (
            f"{_blocks(tiles)} of {self.o.name} {'is' if len(tiles) == 1 else 'are'} visited, but nothing is stored "
            "there: at "
            f"{at(self.trace, first)}, the kernel stores nothing into {self.o.name}, and what is written back is "
            "whatever "
            "the buffer held. Look at the condition around the store."
        )
        line = next((e.line for e in self.trace.events if e.op == "store" and e.ref == self.o.name), None)
        return Finding("sometimes-stored", cause, [], line, first, self.trace.steps[first], self.o.name, tiles[0])

    def _partly_stored(self, tiles: list[Block], wrong: dict[Block, tuple[Any, ...]]) -> Finding:
        tile = tiles[0]
        stores = [e for e in self.trace.events if e.op == "store" and e.ref == self.o.name]
        step = next((e.step for e in stores if e.step in self.steps_of(tile)), 0)
        which = wrong[tile][1]
        cause = (
            f"the kernel stores only part of {self.o.name}: in {_blocks(tiles)} nobody writes {which}, which keep "
            "whatever "
            f"was in memory. Store the whole block: {self.o.name}[...] = value."
        )
        line = stores[0].line if stores else None
        return Finding("partly-stored", cause, [], line, step, self.trace.steps[step], self.o.name, tile)

    # -- accumulation that loses what came before

    def _lost(self) -> Iterator[Finding]:
        """Outputs and accumulators that are overwritten, or reset, at every step of one output block."""
        visits = [v for vs in self.trace.visits[self.j].values() for v in vs if len(v) > 1]
        if not visits or self.o.in_hbm:
            return
        names = [self.o.name, *(s.name for s in self.trace.call.scratch if s.space in ("vmem", "smem"))]
        events = collections.defaultdict(list)
        for e in self.trace.events:
            if e.ref in names:
                events[e.ref, e.step].append(e)
        clobbered = self._clobbered(events)
        if clobbered and not any(self._repeated(name, visits[0], events) for name in names):
            yield clobbered
            return
        for look in (self._reset, self._reset_late, self._reset_midway, self._reset_again, self._replaced):
            found = [f for f in (look(name, visits[0], events) for name in names) if f]
            if found:
                yield from found if look == self._replaced else found[-1:]
                return
        finding = self._overwritten(visits[0], events)
        if finding:
            yield finding
            return
        repeated = (f for visit in visits for name in names if (f := self._repeated(name, visit, events)))
        yield from itertools.islice(repeated, 1)

    def _reset(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """At every step of a visit the first thing that happens to `name` is a store of all of it, then it is read."""
        lines = []
        for s in visit:
            mine = events[name, s]
            if len(mine) < 2 or mine[0].op != "store" or not mine[0].whole:
                return None
            if not any(e.op == "load" for e in mine[1:]) or not any(e.op == "store" for e in mine[2:]):
                return None
            lines.append(mine[0])
        block = self.trace.blocks[self.k][visit[0]]
        cause = (
            f"{name} is reset at every step: steps {spans(visit)} all belong to block {block} of {self.o.name}, and "
            "each "
            f"throws away what the one before had added. Reset it only {_first_step_test(self.trace, name)}."
        )
        s = visit[1]
        return Finding("reset", cause, [], lines[1].line, s, self.trace.steps[s], name, block)

    def _reset_late(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """On the first step `name` is added to, and only then set to its starting value."""
        mine = events[name, visit[0]]
        if len(mine) < 3 or mine[0].op != "load" or not mine[-1].whole:
            return None
        if [e.op for e in mine[-2:]] != ["store", "store"] or len(events[name, visit[1]]) >= len(mine):
            return None
        s = visit[0]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value after this step has added to it: what the "
            "step added "
            f"is lost, and what it added to was garbage. Set it before the first read of {name}."
        )
        return Finding("reset", cause, [], mine[-1].line, s, self.trace.steps[s], name, self.trace.blocks[self.k][s])

    def _reset_midway(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """One step sets `name` to its starting value before adding, and it is not the first."""
        setting = [
            s
            for s in visit
            if len(mine := events[name, s]) > 2 and mine[0].op == "store" and mine[0].whole and mine[1].op == "load"
        ]
        if len(setting) != 1 or setting[0] == visit[0] or not any(e.op == "load" for e in events[name, visit[0]]):
            return None
        s = setting[0]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value only here, so what steps "
            f"{spans(visit[: visit.index(s)])} "
            f"have added is lost, and the first of them added to garbage. Set it {_first_step_test(self.trace, name)}."
        )
        line, block = events[name, s][0].line, self.trace.blocks[self.k][s]
        return Finding("reset", cause, [], line, s, self.trace.steps[s], name, block)

    def _reset_again(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """What sets `name` on the first step of a visit does so once more, after other steps have stored into it."""
        first = events[name, visit[0]]
        if not first or first[0].op != "store" or not first[0].whole:
            return None
        again = [s for s in visit[1:] if any(e.eqn is first[0].eqn for e in events[name, s])]
        gathered = [s for s in visit if any(e.op == "store" and e.eqn is not first[0].eqn for e in events[name, s])]
        if not again or len(again) > len(visit) // 2 or not any(s < again[0] for s in gathered):
            return None
        s, block = again[0], self.trace.blocks[self.k][visit[0]]
        before = [g for g in gathered if g < s]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value again, though block {block} of {self.o.name} is "
            f"still the same: what steps {spans(before)} have gathered in it is lost. Set it only "
            f"{_first_step_test(self.trace, name)}."
        )
        return Finding("reset", cause, [], first[0].line, s, self.trace.steps[s], name, block)

    def _replaced(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """A scratch buffer that one step after the other overwrites, before anybody has read it."""
        if name == self.o.name:
            return None
        steps: list[int] = []  # that overwrite it in a row
        for s in visit:
            mine = events[name, s]
            if mine and (mine[0].op != "store" or not mine[0].whole):
                break
            steps += [s] if mine else []
            if any(e.op == "load" for e in mine):
                break
        stores = [[e.eqn for e in events[name, s] if e.op == "store"][-1] for s in steps]
        if len(steps) < 2 or stores[0] is not stores[-1]:
            return None
        s, block = steps[-1], self.trace.blocks[self.k][visit[0]]
        maximum = holds_primitive(self.trace.call.kernel, "reduce_max")
        cause = (
            f"{name} is overwritten: steps {spans(steps)}, all of block {block} of {self.o.name}, store into it and "
            f"only the last, {at(self.trace, s)}, survives. Add to it instead ({name}[...] += ...), and set it to zero"
            f"{', or take jnp.maximum with what it holds, starting from -inf,' if maximum else ''} "
            f"{_first_step_test(self.trace, name)}."
        )
        return Finding("overwritten", cause, [], events[name, s][0].line, s, self.trace.steps[s], name, block)

    def _overwritten(self, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """The output is stored at several steps of a visit, and nothing remembers the earlier ones."""
        stores = [s for s in visit if any(e.op == "store" for e in events[self.o.name, s])]
        remembers = any(
            any(e.op == "load" for e in es) and not (es[0].op == "store" and es[0].whole)
            for (_, s), es in events.items()
            if s in visit
        )
        if len(stores) < 2 or remembers:
            return None
        block = self.trace.blocks[self.k][visit[0]]
        scratch = (s.name for s in self.trace.call.scratch if all(events[s.name, v] for v in stores))
        name = next(scratch, self.o.name)  # where the output only passes on what a scratch buffer holds
        last = events[name, stores[-1]][0 if name != self.o.name else -1]
        head = f"block {block} of {self.o.name} is overwritten"
        if name != self.o.name:
            head = f"{name} is overwritten, and with it block {block} of {self.o.name}"
        cause = (
            f"{head}: steps {spans(stores)} all store into it and only the last, {at(self.trace, stores[-1])}, "
            f"survives. Add to it instead ({name}[...] += ...), and set it to zero "
            f"{_first_step_test(self.trace, name)}."
        )
        return Finding("overwritten", cause, [], last.line, stores[-1], self.trace.steps[stores[-1]], name, block)

    def _clobbered(self, events: dict[Any, list[Event]]) -> Finding | None:
        """Whole rows that an earlier step of a visit had right, and that a later step of it has stored over."""
        for tile in (t for t in self.tiles if self.cut(self.bad, t).any()):
            for visit in self.trace.visits[self.j].get(tile, []):
                stores = [s for s in visit if any(e.op == "store" for e in events[self.o.name, s])]
                if not 2 <= len(stores) <= _FOLLOWED_STORES:
                    continue
                found = self._clobbered_in(tile, stores)
                if found is not None:
                    before, after, rows = found
                    line = next(e.line for e in reversed(events[self.o.name, after]) if e.op == "store")
                    cause = (
                        f"{at(self.trace, after)}: {self.o.name} is stored over. Rows {spans(rows)} of block {tile} "
                        f"were right: step {before} had stored them, and this step has replaced them. Where steps "
                        "share a block, each stores its own rows and keeps the others: "
                        f"jnp.where(own, new, {self.o.name}[...])."
                    )
                    return Finding("clobbered", cause, [], line, after, self.trace.steps[after], self.o.name, tile)
                return None
        return None

    def _clobbered_in(self, tile: Block, stores: list[int]) -> tuple[int, int, list[int]] | None:
        """(a step that stored rows rightly, the step that spoilt them, the rows of the block), the first there is."""
        want, bad = self.cut(self.want, tile), self.cut(self.bad, tile)
        kept = tuple(slice(0, n) for n in want.shape)
        width = want.shape[-1] if want.ndim else 1

        def right_rows(values: np.ndarray) -> np.ndarray:
            got = values.reshape(self.o.block)[kept].astype(np.float64)
            close = np.isclose(got, want, rtol=self.tolerance.relative, atol=self.atol) & np.isfinite(got)
            return np.asarray(close.reshape(-1, width).all(axis=1))

        spoilt = bad.reshape(-1, width).any(axis=1) & (want.reshape(-1, width) != 0).any(axis=1)
        if width < 2 or not spoilt.any():
            return None
        held = history(self.trace.call, self.o.name, stores)
        right = {s: right_rows(held[s]) & spoilt for s in stores}
        for before, after in itertools.pairwise(stores):
            rows = np.flatnonzero(right[before] & ~right[after])
            if rows.size:
                return before, after, rows.tolist()
        return None

    def _repeated(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """A sum grows at a step that has the same input blocks as the step before, which has added them already."""
        ins = [k for k, o in enumerate(self.trace.call.operands) if o.role == "in" and not o.in_hbm]
        blocks = {s: tuple(self.trace.blocks[k][s] for k in ins) for s in visit}
        adds = [e for s in visit for e in events[name, s] if e.op == "store"]
        grown = {s for s in visit if {e.op for e in events[name, s]} == {"load", "store"}}
        again = [s for s in visit[1:] if s in grown and s - 1 in grown and blocks[s] == blocks[s - 1]]
        if not again or not ins or not self.trace.call.scalar_names or not adds:
            return None
        s = again[0]
        held = history(self.trace.call, name, [s - 1, s])
        if np.array_equal(held[s - 1], held[s], equal_nan=is_floating(held[s].dtype)):
            return None  # it stores again what was there
        same = ", ".join(f"{self.trace.call.operands[k].name} {b}" for k, b in zip(ins, blocks[s], strict=True))
        cause = (
            f"{at(self.trace, s)}: {name} is added to, though the input blocks are those of the step before ({same}): "
            f"they count twice. Where an index map stays because there is nothing more to add, the kernel has to skip "
            "the addition (pl.when)."
        )
        line = next(e.line for e in events[name, s] if e.op == "store")
        return Finding("repeated", cause, [], line, s, self.trace.steps[s], name, self.trace.blocks[self.k][s])

    # -- inputs that are not read where they should be

    def _never_read(self) -> Iterator[Finding]:
        call = self.trace.call
        if call.scalar_names:
            return
        for k, o in enumerate(call.operands):
            if o.role != "in" or o.in_hbm or any(d.kind == "element" for d in o.dims):
                continue
            if not any(e.op != "store" and e.ref == o.name for e in self.trace.events):
                cause = f"the kernel never reads {o.name}: the result cannot depend on it yet."
                yield Finding("unused", cause, [], call.where, operand=o.name)
                continue
            missing = sorted(set(np.ndindex(*o.tiles)) - set(self.trace.blocks[k]))
            if not missing:
                continue
            idle = [a for a in still_axes(self.trace, k) if any(t > 1 and call.grid[a] == t for t in o.tiles)]
            own = [a for a in range(len(call.grid)) if a not in call.vmapped]
            axes = f" It does not move along grid axis {_axes([own.index(a) for a in idle])}." if idle else ""
            cause = (
                f"{_blocks(missing)} of {o.name} {'is' if len(missing) == 1 else 'are'} never read: no step's index "
                "map "
                f"returns {'it' if len(missing) == 1 else 'them'}.{axes} Look at the index map of {o.name}."
            )
            yield Finding("unread", cause, [], where_defined(o.index_map), operand=o.name, block=missing[0])

    # -- values that are wrong in a telling way

    def _pattern(self, wrong: dict[Block, tuple[Any, ...]]) -> Iterator[Finding]:
        by_kind: dict[str, dict[Block, tuple[Any, ...]]] = collections.defaultdict(dict)
        for tile, status in wrong.items():
            by_kind[status[0]][tile] = status
        near = {t: s for kind in ("values", "scaled", "offset") for t, s in by_kind[kind].items()}
        constant = len({round(s[1], 4) for s in by_kind["offset"].values()}) == 1 and len(by_kind["offset"]) == len(
            wrong
        )
        if near and len(near) == len(wrong) and not constant and self._imprecise() and not [*self._arithmetic()]:
            yield self._precision(near)
            return
        moved = {t: s[1] for t, s in by_kind["holds"].items()}
        if moved:
            yield self._moved(moved)
        offsets = {t: s[1] for t, s in by_kind["offset"].items()}
        if offsets:
            yield self._offset(offsets, by_kind["offset"])
        for kind in ("row-offset", "row-scaled", "row-term", "row-missing"):
            if by_kind[kind]:
                yield self._row_error(kind, by_kind[kind])
        for kind in (
            "rounding",
            "transposed",
            "permuted",
            "flipped",
            "scaled",
            "reciprocal",
            "wrong-axis",
            "zeros",
            "nan",
            "values",
        ):
            if by_kind[kind]:
                yield self._plain(kind, by_kind[kind])

    def _row_error(self, kind: str, tiles: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, (_, name, numbers, shifted) = next(iter(tiles.items()))
        sample = list(numbers.items())[:2]
        head = f"{_blocks(list(tiles))} of {self.o.name} {_is(tiles)} wrong in one way, row by row: "
        if kind == "row-offset":
            rows = ", ".join(f"row {r} by {v:+.4g}" for r, v in sample)
            cause = f"each row is off by a constant of its own ({rows}). A number that belongs to the row, such as its "
            cause += (
                "mean or its maximum, is left out, is added or subtracted wrongly, or is not that of the whole row."
            )
        elif kind == "row-scaled":
            rows = ", ".join(f"row {r} is {1 + v:.4g} times" for r, v in sample)
            cause = (
                f"each row has a factor of its own ({rows} what is expected). A number that belongs to the row, such "
            )
            cause += "as its sum or its variance, is left out, or is not that of the whole row."
        elif kind == "row-missing":
            rows = ", ".join(f"{v:.4g} in row {r}" for r, v in sample)
            cause = (
                f"a term is missing. Nothing is reduced in this kernel, so each element of {self.o.name} knows its own "
                f"column alone; what is expected holds {name} times one number of the whole row, too ({rows})."
            )
        else:
            rows = ", ".join(f"row {r}: {v:.4g} times" for r, v in sample)
            plus = ", and a constant" if shifted else ""
            cause = (
                f"the error is a multiple of the same row of {name}{plus} ({rows}). A term of that form, one number "
            )
            cause += f"per row times {name}, is missing, or has the wrong sign or the wrong number."
        clues = self._clues(tile)
        if kind == "row-scaled" and clues and "(eps)" in clues[0]:
            cause += f" {clues.pop(0)}"
        return self._finding(kind, head + cause, tile, clues)

    def _store_line(self, tile: Block) -> tuple[SourceLine | None, int | None]:
        """The line and step that last stored into a block."""
        writer = self.cut(self.trace.writer[self.j], tile)
        step = int(writer.max()) if writer.size else -1
        stores = [e for e in self.trace.events if e.op != "load" and e.ref == self.o.name and e.step == step]
        return (stores[-1].line, step) if stores else (None, None)

    def _finding(self, kind: str, cause: str, tile: Block, evidence: Sequence[str] = ()) -> Finding:
        line, step = self._store_line(tile)
        index = self.trace.steps[step] if step is not None else None
        near = list(_lines_of(self.trace.call.kernel))
        return Finding(kind, cause, list(evidence), line, step, index, self.o.name, tile, [], self.want.size, near)

    def _moved(self, moved: dict[Block, Block]) -> Finding:
        left_over = self._left_over(moved)
        if left_over:
            return left_over
        tile, source = next(iter(moved.items()))
        rule = _permutation(moved, self.count)
        example = f"block {tile} of {self.o.name} holds what belongs in block {source}"
        step = (self.steps_of(tile) or [0])[-1]
        cause = (
            f"{at(self.trace, step)}: {example}. "
            f"{rule or 'Look at the index maps: some block goes to the wrong place.'}"
        )
        more = [f"block {t} holds what belongs in block {s}" for t, s in list(moved.items())[1:4]]
        line = self._suspect_map()
        return Finding("moved", cause, more, line, step, self.trace.steps[step], self.o.name, tile)

    def _left_over(self, moved: dict[Block, Block]) -> Finding | None:
        """A block that holds the result of an earlier one, because the scratch it is stored from still did."""
        blocks = self.trace.blocks[self.k]
        for i in self.trace.incidents:
            if i.kind != "carry" or moved.get(blocks[i.step]) != blocks[i.detail["left_at"]]:
                continue
            cause = (
                f"{at(self.trace, i.step)}: block {blocks[i.step]} of {self.o.name} is stored from {i.ref} as step "
                f"{i.detail['left_at']} left it, with the result of block {blocks[i.detail['left_at']]}. Scratch keeps "
                f"its contents from step to step. Also where nothing is added, set {i.ref} to its starting value "
                f"{_first_step_test(self.trace, i.ref)}."
            )
            return Finding("carry", cause, [], i.line, i.step, i.at, i.ref, blocks[i.step])
        return None

    def _suspect_map(self) -> SourceLine | None:
        """The index map that most likely errs. Where an input and the output disagree: the one that is not plainly the
        grid index, and the input's where neither is; else the output's."""
        mine, plain = self.trace.blocks[self.k], self.trace.steps
        for k, o in enumerate(self.trace.call.operands):
            theirs = self.trace.blocks[k]
            if o.role == "in" and o.index_map is not None and o.tiles == self.o.tiles and theirs != mine:
                return where_defined(self.o.index_map if theirs == plain else o.index_map)
        return where_defined(self.o.index_map)

    def _offset(self, offsets: dict[Block, float], statuses: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, value = next(iter(offsets.items()))
        slopes = self._slopes(offsets)
        head = f"block {tile} of {self.o.name} is off by the constant {value:+.6g}"
        more = [f"block {t}: off by {v:+.6g}" for t, v in list(offsets.items())[1:4]]
        if slopes:
            return self._finding("local-position", f"{head}, {self._position_words(slopes)}", tile, more)
        everywhere = len(offsets) == len(self.tiles) and len({round(v, 4) for v in offsets.values()}) == 1
        where = ", as is every other block" if everywhere else _in(statuses[tile][2])
        cause = f"{head}{where}: something is added once too often or left out, or a position is off by one."
        return self._finding("offset", cause, tile, more)

    def _position_words(self, slopes: dict[int, float]) -> str:
        """What to look at when the error grows from block to block: where a block starts is computed wrongly."""
        starts = []
        for d, slope in slopes.items():
            axis = self._axis_of(d)
            what = "" if axis is None else f", where block i starts at pl.program_id({axis}) * {self.o.block[d]}"
            starts.append(f"by {slope:+.6g} per block along dimension {d}{what}")
        return (
            f"and that constant changes {' and '.join(starts)}. So the start of the block is left out "
            "or computed wrongly: check that it is the right program id, times the right size."
        )

    def _axis_of(self, d: int) -> int | None:
        """The grid axis that dimension d of the output's blocks follows, as program_id counts it."""
        own = [a for a in range(len(self.trace.call.grid)) if a not in self.trace.call.vmapped]
        for a in own:
            if self.trace.call.grid[a] > 1 and all(
                b[d] == step[a] for b, step in zip(self.trace.blocks[self.k], self.trace.steps, strict=True)
            ):
                return own.index(a)
        return None

    def _slopes(self, offsets: dict[Block, float]) -> dict[int, float] | None:
        """The offset as a linear function of the block index, block 0 being right: {dimension: slope}, or None."""
        slopes = {}
        for d in range(len(self.count)):
            unit = tuple(int(e == d) for e in range(len(self.count)))
            if self.count[d] > 1 and abs(offsets.get(unit, 0.0)) > 0:
                slopes[d] = offsets[unit]
        allowed = 10 * self.atol + 1e-4 * max(map(abs, offsets.values()))
        for t in self.tiles:
            if abs(sum(t[d] * v for d, v in slopes.items()) - offsets.get(t, 0.0)) > allowed:
                return None
        return slopes or None

    def _imprecise(self) -> bool:
        got, want = self.got.astype(np.float64), self.want.astype(np.float64)
        if not np.isfinite(got).all() or not _has_narrow_floats(self.trace.call):
            return False
        scale = np.sqrt(np.mean(np.square(want))) or 1.0
        return bool(np.sqrt(np.mean(np.square(got - want))) < 0.03 * scale) and bool(
            np.abs(got - want).max() < 0.3 * scale
        )

    def _precision(self, tiles: dict[Block, Any]) -> Finding:
        call = self.trace.call
        narrow = [s for s in call.scratch if is_floating(s.dtype) and s.dtype.itemsize < 4 and s.space == "vmem"]
        error = np.abs(self.got.astype(np.float64) - self.want.astype(np.float64)).max()
        head = f"the values are nearly right (largest error {error:.2g}): rounding, not logic. "
        grows = any(e.op == "load" and e.ref == self.o.name for e in self.trace.events)
        if narrow:
            tail = f"{narrow[0].name} is {narrow[0].dtype}, and every addition to it rounds: accumulate in float32."
        elif grows and self.o.itemsize < 4:
            tail = (
                f"The sum grows in {self.o.name}, which is 16-bit ({self.o.dtype}), and every addition to it rounds: "
                "keep it "
                "in a float32 scratch buffer, and cast once at the end."
            )
        else:
            tail = (
                "Somewhere a sum or a product is kept in a 16-bit float: keep it in float32 "
                "(preferred_element_type=jnp.float32 for jnp.dot) and cast once at the end."
            )
        return self._finding("precision", head + tail, next(iter(tiles)))

    def _plain(self, kind: str, tiles: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, status = next(iter(tiles.items()))
        which = _blocks(list(tiles))
        steps = self.steps_of(tile)
        when = f" (last stored at {at(self.trace, self._store_line(tile)[1] or 0)})" if steps else ""
        name = self.o.name
        if kind == "transposed":
            cause = (
                f"{which} of {name} {_is(tiles)} transposed inside the block{when}: rows and columns have changed "
                "places."
            )
        elif kind == "permuted":
            cause = (
                f"{which} of {name} {_is(tiles)} made of the right numbers in the wrong places{when}: a reshape "
                "keeps the order "
                "of the elements, a transpose (.T) turns rows into columns."
            )
        elif kind == "flipped":
            cause = f"{which} of {name} {_is(tiles)} reversed inside the block along dimension {status[1]}{when}."
        elif kind == "scaled":
            cause = (
                f"{which} of {name} {_is(tiles)} {status[1]:.6g} times what is expected{_in(status[2])}{when}: a "
                f"factor too much or too little.{self._known_factor(status[1])}"
            )
        elif kind == "reciprocal":
            cause = f"{which} of {name} {_is(tiles)} one divided by what is expected{when}."
        elif kind == "wrong-axis":
            cause = (
                f"{which} of {name} {_is(tiles)} wrong by a factor of the row times a factor of the column{when}: "
                "something is reduced along the wrong axis, or the two are mixed up. axis=1 goes along a row, axis=0 "
                "down a column, over the rows of this block only."
            )
        elif kind == "zeros":
            cause = (
                f"{which} of {name} {_is(tiles)} zero{_in(status[1])}{when}: the result is never added, is masked "
                "away, or is set to zero after the last addition."
            )
        elif kind == "rounding":
            cause = (
                f"{which} of {name} {_is(tiles)} nearly right{_in(status[2])}{when}, off by no more than "
                f"{status[1]:.2g}, and by no rule: rounding, not logic. A float32 keeps seven digits of a number, "
                "however large it is: a "
                "small difference of large numbers, or exp of a large number that was rounded, keeps fewer. Subtract "
                "first, while the numbers are exact."
            )
        elif kind == "nan":
            cause = (
                f"{which} of {name} {_is(tiles)} NaN{_in(status[1])}{when}: uninitialised memory is NaN here, and so "
                "is 0/0 or inf - inf."
            )
        else:
            cause = f"{which} of {name} {_is(tiles)} wrong{_in(status[1])}{when}. "
            repeated = [*self._overhanging(tiles), *self._clues(tile)]
            if repeated:
                return self._finding(kind, cause + repeated[0], tile, repeated[1:])
            made = "".join(self._made_of()) or "Follow one element of that block by hand."
            return self._finding(kind, cause + made, tile)
        return self._finding(kind, cause, tile, self._clues(tile))

    def _known_factor(self, factor: float) -> str:
        """Where a factor comes from, when it is one that everybody meets."""
        if abs(factor + 1) < 1e-6:
            return " A sign is wrong."
        if min(abs(factor - math.log2(math.e)), abs(factor - math.log(2))) < 1e-4:
            return (
                f" It is {'log2(e)' if factor > 1 else 'log(2)'}: exp2 and log2 count in base 2, exp and log in base e."
            )
        for n in sorted({n for o in self.trace.call.ins for n in o.shape if n > 7}):
            for power, words in ((0.5, f"the square root of {n}"), (-0.5, f"one over the square root of {n}")):
                if abs(factor / n**power - 1) < 1e-3:
                    wherefrom = next(o for o in self.trace.call.ins if n in o.shape)
                    return (
                        f" It is {words}, dimension {wherefrom.shape.index(n)} of {wherefrom.name}: look at the scale."
                    )
            for power, words in ((0.5, "the square root of "), (1.0, "")):
                for exponent in (power, -power):
                    if abs(factor / ((n - 1) / n) ** exponent - 1) < 2e-5 and abs(factor - 1) > 1e-4:
                        ratio = f"{n - 1} / {n}" if exponent > 0 else f"{n} / {n - 1}"
                        return f" It is {words}{ratio}: one divides by N, the other by N - 1."
        return ""

    def _clues(self, tile: Block) -> list[str]:
        """What the steps of one block have in common, or not, that may explain wrong values; the likeliest first."""
        steps = self.steps_of(tile)
        if len(steps) < 2:
            return [*self._narrowed_early(), *self._arithmetic(), *self._down_the_columns()]
        events = [e for e in self.trace.events if e.step in set(steps)]
        clues = [
            *self._narrowed_early(),
            *self._arithmetic(),
            *self._stored_early(events),
            *self._uneven(events, steps),
            *self._read_every_step(events, steps),
        ]
        clues += [*self._divided_again(events), *self._local_positions(), *self._down_the_columns()]
        measured = holds_primitive(self.trace.call.kernel, "reduce_max")  # against a maximum: exponentials do add up
        between = _times_held(self.trace.call.kernel, "dot_general") > 1  # two products: exp may stand between them
        if self.trace.flops and not measured and not between and all(self.trace.transcendentals[s] for s in steps):
            clues.append(
                f"Exp, tanh or the like is applied at every step of the sum (steps {spans(steps)}): what is not "
                "linear has "
                "to wait for the last step."
            )
        clues = clues or list(self._left_unread(events))
        if not clues and holds_primitive(self.trace.call.kernel, "exp2") and not self._scaled_for_exp2():
            clues.append("It takes exp2: exp(x) is exp2(x * log2(e)). Has all that goes into it been scaled by that?")
        return clues

    def _scaled_for_exp2(self) -> bool:
        """Whether something is multiplied by log2(e), or by that over the root of a size."""
        sizes = {1, *(n for o in self.trace.call.ins for n in o.shape)}
        wanted = [math.log2(math.e) / math.sqrt(n) for n in sizes]
        for jaxpr, _ in with_ref_names(self.trace.call):
            for e in (e for e in jaxpr.eqns if e.primitive.name == "mul"):
                numbers = [np.asarray(v.val, float) for v in e.invars if np.ndim(getattr(v, "val", [0])) == 0]
                if any(np.isclose(number, wanted, rtol=1e-5).any() for number in numbers):
                    return True
        return False

    def _overhanging(self, tiles: dict[Block, Any]) -> Iterator[str]:
        """Only blocks at the ragged edge are wrong, in a kernel that masks: the sum is right, the count is not."""
        if self.o.in_hbm or len(tiles) == len(self.tiles) or not _masks_by_position(self.trace):
            return
        cuts = {t: self.cut(self.want, t).shape for t in tiles}
        if all(shape != self.o.block for shape in cuts.values()):
            tile, shape = next(iter(cuts.items()))
            yield (
                f"Only blocks that hang over the edge are wrong, and no garbage gets in: block {tile} has {shape} real "
                f"elements, not {self.o.block}. Divide by, or count, the real ones only."
            )

    def _narrowed_early(self) -> Iterator[str]:
        """A float32 value that is cast to 16 bits, and only then computed with."""
        for eqn in _early_casts(self.trace.call.kernel):
            dtype, line = np_dtype(eqn.outvars[0].aval), line_of(eqn)
            yield (
                f"A float32 value is cast to 16-bit {dtype} ({line}), and computed with afterwards: stay in float32 "
                "until the "
                "result is stored."
            )
            return

    def _stored_early(self, events: list[Event]) -> Iterator[str]:
        """The output is stored from a scratch buffer that goes on growing afterwards."""
        name = self.o.name
        order = list(enumerate(events))
        last = max((n for n, e in order if e.op == "store" and e.ref == name), default=None)
        if last is None:
            return
        step = events[last].step
        for scratch in self.trace.call.scratch:
            final = max((n for n, e in order if e.op == "store" and e.ref == scratch.name), default=-1)
            read = any(e.op == "load" and e.ref == scratch.name and e.step == step for _, e in order[:last])
            if read and final > last:
                when = f"until step {events[final].step}" if events[final].step > step else "in the same step"
                yield (
                    f"{name} is stored from {scratch.name} at step {step}, but {scratch.name} still grows "
                    f"afterwards, {when}: "
                    "store it on the last step of the block, after the last addition."
                )

    def _uneven(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """A buffer that most steps of a block add to, and one does not."""
        for name in (self.o.name, *(s.name for s in self.trace.call.scratch)):
            stored = {e.step for e in events if e.op == "store" and e.ref == name}
            loaded = {e.step for e in events if e.op == "load" and e.ref == name}
            adding = stored & loaded
            idle = [s for s in steps if s not in adding]
            if len(adding) > 1 and len(idle) == 1 and not self._seen_before(idle[0], adding):
                yield (
                    f"Step {idle[0]} adds nothing to {name}, though the other steps of the block do "
                    f"({spans(sorted(adding))}): "
                    "every step has its share in the sum."
                )

    def _divided_again(self, events: list[Event]) -> Iterator[str]:
        """A sum that is carried on from step to step, and divided in each of them."""
        for jaxpr, names in with_ref_names(self.trace.call):
            made = _producers(jaxpr)
            for store in (e for e in jaxpr.eqns if e.primitive.name == "swap"):
                name = names[store.invars[0]]
                steps = {e.step for e in events if e.op == "store" and e.ref == name and e.eqn is store}
                division = _made_by(made, store.invars[1], _SAME_VALUE)
                if len(steps) < 2 or division is None or division.primitive.name != "div":
                    continue
                above = _made_by(made, division.invars[0], _SAME_VALUE)
                if above is not None and (
                    above.primitive.name == "add" or (above.primitive.name == "get" and names[above.invars[0]] == name)
                ):
                    yield (
                        f"{name} is divided at every step ({line_of(division)}, steps {spans(sorted(steps))}), and "
                        "the quotient is added to and divided again: keep the plain sum, and divide it once, on the "
                        "last step."
                    )
                    return

    def _seen_before(self, step: int, others: Iterable[int]) -> bool:
        """Whether a step gets the same blocks of all inputs as one of the others: a second look at the same data."""
        ins = [self.trace.blocks[k] for k, o in enumerate(self.trace.call.operands) if o.role == "in"]
        return any(all(blocks[step] == blocks[other] for blocks in ins) for other in others)

    def _read_every_step(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """An input whose block stays the same along a sum, and that takes part in every step."""
        for k, o in enumerate(self.trace.call.operands):
            reads = [e for e in events if e.op == "load" and e.ref == o.name]
            same = len({self.trace.blocks[k][s] for s in steps}) == 1
            added = {_first_use(j, n, o.name)[0] for j, n in with_ref_names(self.trace.call)} & {"add", "sub"}
            if o.role == "in" and same and added and len({e.step for e in reads}) == len(steps):
                yield (
                    f"{o.name} is read at every step of the sum ({reads[0].line}), though its block stays the same: "
                    "what is "
                    f"added at every step is added {len(steps)} times."
                )

    def _local_positions(self) -> Iterator[str]:
        """Positions within the block are compared with data, as if every block were the first one."""
        if self.trace.n < 2:
            return
        for jaxpr, _ in with_ref_names(self.trace.call):
            for eqn in _local_comparisons(jaxpr):
                yield (
                    f"Positions are counted from 0 in every block ({line_of(eqn)}): the block starts at "
                    "pl.program_id(axis) times its size, and that has to be added."
                )
                return

    def _down_the_columns(self) -> Iterator[str]:
        """Blocks hold whole rows, and everything is reduced over the rows that happen to share a block."""
        o = self.o
        if len(o.block) != 2 or o.block[1] != o.shape[1] or o.block[0] in (1, o.shape[0]):
            return
        for jaxpr, names in with_ref_names(self.trace.call):
            for e in _behind(jaxpr, names, o.name):
                if e.primitive.name.startswith("reduce_") and tuple(e.params["axes"]) == (0,):
                    yield (
                        f"A reduction goes down the columns (axis=0, {line_of(e)}), over the {o.block[0]} rows "
                        "that happen to share a block. Along a row it is axis=1."
                    )
                    return

    def _made_of(self) -> Iterator[str]:
        """Which inputs take part in an output, and which do not."""
        parts: set[str] = set()
        for jaxpr, names in with_ref_names(self.trace.call):
            parts |= {names[e.invars[0]] for e in _behind(jaxpr, names, self.o.name) if e.primitive.name == "get"}
        ins = [o.name for o in self.trace.call.ins]
        mine, rest = [n for n in ins if n in parts], [n for n in ins if n not in parts]
        if len(self.trace.call.outs) > 1 and mine and rest:
            yield (
                f"{self.o.name} is made of {listed(mine)}; {listed(rest)} {'have' if rest[1:] else 'has'} no part "
                "in it. Compare that with its formula, factor by factor."
            )

    def _left_unread(self, events: list[Event]) -> Iterator[str]:
        """Scratch whose last value nobody reads."""
        for s in self.trace.call.scratch:
            mine = [e for e in events if e.ref == s.name]
            kernel = self.trace.call.kernel  # a running maximum has done its work, unless a log still needs it
            measured = any(e.op == "load" for e in mine) and holds_exponential(kernel)
            measured = measured and not holds_primitive(kernel, "log")
            if mine and mine[-1].op == "store" and not measured:
                line = mine[-1].line
                yield f"What {s.name} holds in the end is never read ({line} stores it): is it part of the result?"

    def _arithmetic(self) -> Iterator[str]:
        """Formulas that are right on paper."""
        for jaxpr, _ in with_ref_names(self.trace.call):
            for eqn in _cancelling(jaxpr):
                yield (
                    f"Mean of squares minus square of mean ({line_of(eqn)}) is the variance on paper; in float32 two "
                    "nearly equal numbers cancel. Subtract the mean first, then square."
                )
            for eqn, fill in _filled_exponentials(jaxpr):
                yield (
                    f"exp is taken where a mask has put {fill:g} ({line_of(eqn)}), and the result is summed: so the "
                    "padding has a share in the sum. Fill with -inf: exp(-inf) is 0, and no maximum notices it."
                )
            for eqn in [] if [*_eps_outside(jaxpr)] else _bare_roots(jaxpr):
                yield (
                    f"The root is taken of a mean of squares with nothing added to it ({line_of(eqn)}). If a small "
                    "constant (eps) belongs inside, leaving it out is right where the variance is large, and wrong "
                    "where it is as small as eps."
                )
            for eqn in jaxpr.eqns:
                out = np_dtype(eqn.outvars[0].aval) if eqn.primitive.name == "dot_general" else None
                if out is not None and out.kind in "iu" and out.itemsize < 4:
                    yield (
                        f"A matrix product has the type {out} ({line_of(eqn)}), and its sums wrap around beyond "
                        f"{np.iinfo(out).max}: ask for an int32 result, with preferred_element_type."
                    )
            for eqn in _eps_outside(jaxpr):
                yield f"The small constant is added outside of the root ({line_of(eqn)}): 1 / sqrt(variance + eps)."


def _behind(jaxpr: Any, names: dict[Any, str], ref: str) -> list[Any]:
    """The equations that the values stored into a Ref are made by, within one program; what it held before left out."""
    wanted = {
        e.invars[1]
        for e in jaxpr.eqns
        if e.primitive.name == "swap" and names[e.invars[0]] == ref
        if not hasattr(e.invars[1], "val")
    }
    found = []
    for e in reversed(jaxpr.eqns):
        if (
            e.primitive.name == "swap"
            or wanted.isdisjoint(e.outvars)
            or (e.primitive.name == "get" and names[e.invars[0]] == ref)
        ):
            continue
        found.append(e)
        wanted |= {v for v in e.invars if not hasattr(v, "val")}
    return found[::-1]


def _producers(jaxpr: Any) -> dict[Any, Any]:
    return {v: e for e in jaxpr.eqns for v in e.outvars}


def _made_by(made: dict[Any, Any], v: Any, through: frozenset[str]) -> Any:
    """The equation that made a value, looking through operations that keep or merely scale it."""
    e = None if hasattr(v, "val") else made.get(v)
    while e is not None and e.primitive.name in through and not hasattr(e.invars[0], "val"):
        before = made.get(e.invars[0])
        if before is None:
            break
        e = before
    return e


_SCALED = frozenset("div mul reshape squeeze expand_dims convert_element_type copy broadcast_in_dim".split())
_SQUARES = frozenset("square integer_pow".split())


def _is_square(e: Any) -> bool:
    return e is not None and (
        e.primitive.name in _SQUARES or (e.primitive.name == "mul" and e.invars[0] is e.invars[1])
    )


def _cancelling(jaxpr: Any) -> Iterator[Any]:
    """Subtractions of the square of a mean from the mean of squares of what was read."""
    made = _producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name != "sub" or not _is_square(
            made.get(e.invars[1]) if not hasattr(e.invars[1], "val") else None
        ):
            continue
        total = _made_by(made, e.invars[0], _SCALED)
        squared = total is not None and total.primitive.name == "reduce_sum" and made.get(total.invars[0])
        mean = _made_by(made, made[e.invars[1]].invars[0], _SCALED)
        if _is_square(squared) and mean is not None and mean.primitive.name == "reduce_sum":
            yield e


def _filled_exponentials(jaxpr: Any) -> Iterator[tuple[Any, float]]:
    """Exponentials of values where a mask has put a finite number, and that number."""
    made = _producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name not in EXPONENTIALS:
            continue
        shifted = made.get(e.invars[0])
        if shifted is not None and shifted.primitive.name == "sub" and not hasattr(shifted.invars[0], "val"):
            masked = made.get(shifted.invars[0])
            fill = filled_with(masked, made) if masked is not None else None
            if fill is not None and math.isfinite(fill) and fill > -1e6:
                yield e, fill


def _bare_roots(jaxpr: Any) -> Iterator[Any]:
    """Roots of a mean of squares."""
    made = _producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name in ("sqrt", "rsqrt"):
            total = _made_by(made, e.invars[0], _SCALED)
            summed = total.invars[0] if total is not None and total.primitive.name == "reduce_sum" else None
            if summed is not None and _is_square(_made_by(made, summed, _SAME_VALUE - {"select_n"})):
                yield e


def _eps_outside(jaxpr: Any) -> Iterator[Any]:
    """Additions of a small constant to what has just come out of a root."""
    made = _producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name == "add" and any(hasattr(v, "val") and 0 < float(np.max(v.val)) < 1e-2 for v in e.invars):
            roots = [made.get(v) for v in e.invars if not hasattr(v, "val")]
            if any(r is not None and r.primitive.name in ("sqrt", "rsqrt") for r in roots):
                yield e


_COMPARISONS = frozenset("eq ne lt le gt ge".split())


def _local_comparisons(jaxpr: Any) -> Iterator[Any]:
    """Comparisons of an iota with something else, with no program id in it."""
    kinds: dict[Any, frozenset[str]] = {
        v: frozenset({"given"}) for v in jaxpr.invars if getattr(v.aval, "shape", 1) == ()
    }
    for e in jaxpr.eqns:
        found = frozenset().union(*(kinds.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name in ("iota", "program_id"):
            found |= {e.primitive.name}
        elif e.primitive.name in _COMPARISONS and found == {"iota"}:
            sides = [kinds.get(v, frozenset()) if not hasattr(v, "val") else frozenset() for v in e.invars]
            if sides.count(frozenset({"iota"})) == 1:
                yield e
        kinds.update((v, found) for v in e.outvars)


def _axes(numbers: Any) -> str:
    return " and ".join(map(str, numbers))


def _has_narrow_floats(call: Call) -> bool:
    """Whether a float of fewer than 32 bits takes part in a call: without one there is no rounding to speak of."""

    def narrow(aval: Any) -> bool:
        dtype = np_dtype(aval)
        return is_floating(dtype) and dtype.itemsize < 4

    def anywhere(jaxpr: Any) -> bool:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        return any(
            any(narrow(v.aval) for v in (*e.invars, *e.outvars) if hasattr(v.aval, "dtype"))
            or any(anywhere(inner) for inner in subprograms(e))
            for e in jaxpr.eqns
        )

    return anywhere(call.kernel)


def _early_casts(jaxpr: Any) -> Iterator[Any]:
    """Casts from float32 to a 16-bit float whose result goes into arithmetic other than a matrix product."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from _early_casts(inner)
        if eqn.primitive.name != "convert_element_type" or not hasattr(eqn.invars[0].aval, "shape"):
            continue
        before, after = np_dtype(eqn.invars[0].aval), np_dtype(eqn.outvars[0].aval)
        if not (is_floating(before) and is_floating(after) and before.itemsize == 4 and after.itemsize == 2):
            continue
        users = {
            str(e.params.get("name", e.primitive.name))
            for e in jaxpr.eqns
            if any(v is eqn.outvars[0] for v in e.invars)
        }
        if users - {"swap", "masked_swap", "dot_general", "reshape", "broadcast_in_dim", "select_n", "_where"}:
            yield eqn


def _store_into(jaxpr: Any, ref: Any) -> Any | None:
    """The first equation that stores into `ref`, anywhere in a kernel, reached or not."""
    for eqn in jaxpr.eqns:
        if not any(v is ref for v in eqn.invars):
            continue
        if eqn.primitive.name in ("swap", "masked_swap", "addupdate", "dma_start"):
            return eqn
        for inner in subprograms(eqn):
            inner = getattr(inner, "jaxpr", inner)
            shift = len(eqn.invars) - len(inner.invars)  # a cond's predicate, a while's other half
            for i, v in enumerate(eqn.invars):
                if v is ref and 0 <= i - shift < len(inner.invars):
                    found = _store_into(inner, inner.invars[i - shift])
                    if found is not None:
                        return found
    return None


_STATUS_WORDS = {
    "holds": "holds another block's values",
    "values": "wrong values",
    "offset": "off by a constant",
    "scaled": "off by a factor",
    "row-offset": "off by a constant per row",
    "row-scaled": "off by a factor per row",
    "row-term": "off by a term per row",
    "row-missing": "without a term per row",
    "precision": "rounded too often",
    "rounding": "rounded too roughly",
    "reciprocal": "upside down",
    "wrong-axis": "off by row and column factors",
    "nan": "NaN",
    "zeros": "zero",
    "unvisited": "never visited",
}


def _is(tiles: Any) -> str:
    return "is" if len(tiles) == 1 else "are"


def _in(where: str) -> str:
    return f" in {where}" if where else ""


def _blocks(tiles: Sequence[Block]) -> str:
    """'block (3, 0)' or 'blocks (0, 0), (0, 1), ... (12 of them)'."""
    if len(tiles) == 1:
        return f"block {tuple(tiles[0])}"
    shown = ", ".join(str(tuple(t)) for t in tiles[:3])
    return f"blocks {shown}" + (f", ... ({len(tiles)} of them)" if len(tiles) > 3 else "")


def _where_in(bad: np.ndarray) -> str:
    """Which rows or columns of a block are wrong, in words; '' for all of it."""
    if bad.ndim == 0 or bad.all():
        return ""
    hit = np.nonzero(bad)
    names = (
        ["elements"]
        if bad.ndim == 1
        else ["rows", "columns"]
        if bad.ndim == 2
        else [f"dim {d}:" for d in range(bad.ndim)]
    )
    parts = []
    for d, name in enumerate(names):
        values = np.unique(hit[d])
        if len(values) < bad.shape[d]:
            parts.append(f"{name} {_short_spans(values)}")
    return ", ".join(parts) or "scattered elements"


def _short_spans(values: np.ndarray) -> str:
    text = spans(values.tolist())
    return text if text.count(",") < 4 else ", ".join(text.split(", ")[:3]) + ", ..."


def _permutation(moved: dict[Block, Block], count: tuple[int, ...]) -> str | None:
    """A rule that says where every moved block came from, with what to look for."""
    if all(len(t) == 2 and s == (t[1], t[0]) for t, s in moved.items()):
        return "Row and column are swapped: look for an index map that returns (j, i) where (i, j) is meant."
    for axis in range(len(count)):
        rest = [d for d in range(len(count)) if d != axis]
        if any(t[d] != s[d] for t, s in moved.items() for d in rest):
            continue
        shifts = {s[axis] - t[axis] for t, s in moved.items()}
        if len({s[axis] for s in moved.values()}) == 1 and len(moved) > 1:
            return f"Every block comes from the same place: an index map does not move along dimension {axis}."
        if all(s[axis] == count[axis] - 1 - t[axis] for t, s in moved.items()):
            return f"The blocks are in reverse order along dimension {axis}: look at the index maps."
        if len(shifts) == 1:
            return (
                f"Every block comes from {abs(shifts.pop())} block(s) further along dimension {axis}: an index map is "
                "off by that much."
            )
        if len({(s[axis] - t[axis]) % count[axis] for t, s in moved.items()}) == 1:
            return f"The blocks are rotated along dimension {axis}: an index map is off by a constant."
        if len({s[axis] + t[axis] for t, s in moved.items()}) == 1 and len(moved) > 1:
            return f"The blocks run backwards along dimension {axis}: check both ends of the index map."
    return None


# --- around the kernel ------------------------------------------------------------------------------------------------


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


def dead_stores(trace: Trace) -> dict[str, int]:
    """Per output: the most steps of one visit that store into its block."""
    most: dict[str, int] = {}
    stored = collections.defaultdict(set)
    for e in trace.events:
        if e.op == "store":
            stored[e.ref].add(e.step)
    for j, o in enumerate(trace.call.outs):
        visits = itertools.chain.from_iterable(trace.visits[j].values())
        most[o.name] = max((len(stored[o.name] & set(v)) for v in visits), default=0)
    return most


def serial_steps(trace: Trace) -> tuple[int, list[int]]:
    """(steps that follow one another when each index along the parallel axes has a core of its own, the axes that could
    be parallel and are not)."""
    call = trace.call
    parallel = [d for d, s in enumerate(call.semantics) if "parallel" in s]
    serial = trace.n // max(1, math.prod(call.grid[d] for d in parallel))
    outs = [k for k, o in enumerate(call.operands) if o.role == "out" and not o.in_hbm]
    still = {d for k in outs for d in still_axes(trace, k)}
    if call.dynamic_bounds:
        return serial, []  # JAX's simulator cannot run a grid in parallel whose length is data: no advice
    own = [d for d in range(len(call.grid)) if d not in call.vmapped]
    return serial, [n for n, d in enumerate(own) if d not in still and d not in parallel and call.grid[d] > 1]


def wide_products(call: Call, bits: int) -> Iterator[Finding]:
    """Matrix products whose operands are wider than that."""
    for jaxpr, _ in with_ref_names(call):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "dot_general":
                continue
            wide = [d for d in (np_dtype(v.aval) for v in eqn.invars) if d.itemsize * 8 > bits]
            if wide:
                cause = (
                    f"Right answer, but its matrix product multiplies {wide[0]}: {wide[0].itemsize * 8} bits an "
                    f"operand, where {bits} are enough. Wide operands take the MXU longer, or are rounded on the way "
                    "in. Give it what the Refs hold, and name the type of the sum: preferred_element_type."
                )
                yield Finding("budget", cause, [], line_of(eqn), operand="mxu_bits")
            elif is_floating(np_dtype(eqn.outvars[0].aval)) and not is_floating(np_dtype(eqn.invars[0].aval)):
                cause = (
                    "Right answer, but its matrix product of integers is summed in floating point, which the TPU "
                    "compiler refuses: the MXU adds integers as integers. Ask for preferred_element_type=jnp.int32."
                )
                yield Finding("budget", cause, [], line_of(eqn), operand="mxu_bits")


def no_product(calls: Sequence[Call]) -> Iterator[Finding]:
    """Kernels without a single matrix product, where the MXU should have one."""
    if calls and not any(holds_primitive(call.kernel, "dot_general") for call in calls):
        cause = (
            "Right answer, but there is no matrix product in it: elements are multiplied and added one by one, and the "
            "MXU has nothing to do. Let jnp.dot or jax.lax.dot_general do it."
        )
        near = list(_lines_of(calls[0].kernel))
        yield Finding("budget", cause, [], near[0] if near else None, operand="mxu_bits")


_BRANCHES = frozenset("cond while scan".split())


def branches(call: Call, most: int) -> Iterator[Finding]:
    """More branches and loops in a kernel than there may be."""
    found = [e for jaxpr, _ in with_ref_names(call) for e in jaxpr.eqns if e.primitive.name in _BRANCHES]
    if len(found) > most:
        many = "a branch" if len(found) == 1 else f"{len(found)} branches"
        cause = (
            f"Right answer, but with {many} (pl.when, cond, or a loop); the budget is {most}. Choose values instead of "
            "code: jnp.where."
        )
        evidence = [f"{line_of(e)}" for e in found[1:4]]
        yield Finding("budget", cause, evidence, line_of(found[0]), operand="branches")
