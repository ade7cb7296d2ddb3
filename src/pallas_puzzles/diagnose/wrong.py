"""A wrong output: what is wrong with each of its blocks, and what the steps that made them have in common."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir.capture import Operand, SourceLine, where_defined
from ..ir.program import lines_of
from ..lens.machine import NOT_STORED, NOT_VISITED, STALE, WRITTEN, Event, Trace, listed, spans
from ..text import plural
from .findings import Block, Diagnosis, Finding, Tolerance
from .steps import at, first_step_test, still_axes

_COMPARED = 64  # blocks: with more, nobody looks whether one holds the values of another
_LIKE = 0.02  # of what a factor differs from 1: one factor explains ratios that differ no more among themselves
_NEARLY = 0.01  # of the size of the result: an error that is as small on the whole is one of rounding


@dataclasses.dataclass(frozen=True)
class Result:
    """A wrong result as it was `made`; it and what is expected in float64; which elements are not close."""

    name: str
    made: np.ndarray
    got: np.ndarray
    want: np.ndarray
    bad: np.ndarray
    tolerance: Tolerance

    def shaped(self, shape: tuple[int, ...]) -> "Result":
        got, want, bad = (x.reshape(shape) for x in (self.got, self.want, self.bad))
        return dataclasses.replace(self, got=got, want=want, bad=bad)

    def summary(self, name: str = "") -> str:
        sample = sample_of(self.got, self.want, self.bad, name)
        return f"{int(self.bad.sum())} of {self.bad.size} elements are wrong: {sample}."


@dataclasses.dataclass
class Wrong:
    """Output `number` of a call, with what is expected of it, both in float64. bad: which elements are not close."""

    trace: Trace
    number: int
    got: np.ndarray
    want: np.ndarray
    bad: np.ndarray
    tolerance: Tolerance

    def __post_init__(self) -> None:
        self.o: Operand = self.trace.call.outs[self.number]
        self.k = [k for k, o in enumerate(self.trace.call.operands) if o.role == "out"][self.number]
        self.blocks: list[Block] = [*np.ndindex(*(self.o.tiles if not self.o.in_hbm else (1,) * len(self.o.shape)))]

    def cut(self, array: np.ndarray, block: Block) -> np.ndarray:
        if self.o.in_hbm:
            return array
        return array[tuple(slice(i * b, (i + 1) * b) for i, b in zip(block, self.o.block, strict=True))]

    def steps_of(self, block: Block) -> list[int]:
        if self.o.in_hbm or any(d.kind == "element" for d in self.o.dims):
            return []
        return [s for visit in self.trace.visits[self.number].get(block, []) for s in visit]


def diagnose_output(w: Wrong) -> Diagnosis:
    """What is wrong with an output."""
    status = {block: _status(w, block) for block in w.blocks}
    wrong = {block: s for block, s in status.items() if s[0] != "ok"}
    steps = frozenset(s for block in wrong for s in w.steps_of(block))
    findings = [*_missing(w, wrong), *_lost(w, [*wrong]), *_unread(w)]
    findings += [] if any(f.kind in _MISSING for f in findings) else [_values(w, wrong)]
    findings = [f.but(operand=f.operand or w.o.name) for f in findings]
    return Diagnosis(findings, w.o, {b: words for b, (_, words) in status.items()}, _summary(w, len(wrong)), steps)


_MISSING = frozenset("unvisited never-stored partly-stored".split())


def _summary(w: Wrong, wrong: int) -> str:
    with np.errstate(invalid="ignore"):
        error = np.abs(w.got - w.want)[w.bad]
    error = error[np.isfinite(error)]
    size = f"largest error {error.max():.3g}" if error.size else "no finite value among them"
    sample = sample_of(w.got, w.want, w.bad, w.o.name.removesuffix("_ref"))
    return (
        f"{w.o.name}: {wrong} of {len(w.blocks)} blocks wrong ({int(w.bad.sum())} of {w.bad.size} elements, {size}; "
        f"{sample})"
    )


# --- one block -------------------------------------------------------------------------------------------------------


def _status(w: Wrong, block: Block) -> tuple[str, str]:
    """(kind of finding, what is wrong with a block, in words)."""
    bad = w.cut(w.bad, block)
    if not bad.any():
        return "ok", "ok"
    state = w.cut(w.trace.state[w.number].seen(), block)[bad]
    if (state == NOT_VISITED).all():
        return ("unvisited", "never visited") if not w.o.in_hbm else ("never-stored", "never stored")
    if (state == NOT_STORED).all():
        return ("never-stored", "never stored") if bad.all() else ("partly-stored", f"not stored in {where_in(bad)}")
    if (state == STALE).all():
        return "never-stored", "left over from another block"
    got, want = w.cut(w.got, block), w.cut(w.want, block)
    others = [b for b in w.blocks if b != block] if got.size > 1 and len(w.blocks) <= _COMPARED else []
    return pattern_of(got, want, bad, w.tolerance, {f"block {b}": w.cut(w.want, b) for b in others})


def pattern_of(
    got: np.ndarray, want: np.ndarray, bad: np.ndarray, tolerance: Tolerance, others: Mapping[str, np.ndarray]
) -> tuple[str, str]:
    """(kind of finding, what wrong values have in common), of a part of a result. bad: which elements are wrong.
    others: what is expected in other parts, by their names."""
    with np.errstate(all="ignore"):
        apart = got - want
        difference, ratio = apart[bad], (got / want)[bad]
    if np.isnan(got[bad]).all() and not np.isnan(want[bad]).any():
        return "values", "NaN"
    if not np.isfinite(difference).all():
        return "values", "wrong values"
    if (got[bad] == 0).all():
        return "values", "0"
    other = next((name for name, belongs in others.items() if _same(tolerance, got, belongs)), None)
    if other is not None:
        return "moved", f"what belongs in {other}"
    most, noise = np.abs(difference).max(), 2e-6 * np.abs(want).max()  # what rounding in float32 makes of a constant
    if difference.size > 1 and np.ptp(difference) <= 1e-3 * most + noise < most:
        return "values", f"off by the constant {difference.mean():+.6g}"
    if (
        ratio.size > 1
        and np.isfinite(ratio).all()
        and np.ptp(ratio) <= _LIKE * min(abs(ratio.mean() - 1), abs(ratio.mean()))
    ):
        return "values", f"{ratio.mean():.6g} times what is expected"
    if bool(np.sqrt(np.mean(np.square(apart))) < _NEARLY * np.sqrt(np.mean(np.square(want)))):
        return "rounding", "nearly right"
    return "values", "wrong values"


def what_it_holds(kind: str, words: str) -> str:
    """What pattern_of says, as what is said of a block."""
    if kind == "moved" or words == "wrong values":
        return f"holds {words}"
    return f"is {words}"


def part_named(name: str, box: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """'o_gmem[64:128, :]', as the reader would write it."""
    keys = [
        ":" if (k.start, k.stop) == (0, n) else str(k.start) if k.stop - k.start == 1 else f"{k.start}:{k.stop}"
        for k, n in zip(box, shape, strict=True)
    ]
    return name if all(key == ":" for key in keys) else f"{name}[{', '.join(keys)}]"


def _same(tolerance: Tolerance, got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and bool(tolerance.close(got, want).all()) and bool(got.any())


def _values(w: Wrong, wrong: dict[Block, tuple[str, str]]) -> Finding:
    """What the first wrong block holds, and how many are like it."""
    first = next(iter(wrong))
    kind, words = wrong[first]
    alike = [block for block, status in wrong.items() if status == wrong[first]]
    more = f", as {plural(len(alike) - 1, 'other block')}" if len(alike) > 1 else ""
    part = where_in(w.cut(w.bad, first))
    inside = f" in {part}" if part else ""
    cause = f"block {first} of {w.o.name} {what_it_holds(kind, words)}{inside}{more}.{_made_of(w, first)}"
    line, step = _last_store(w, first)
    line = where_defined(w.o.index_map) or line if kind == "moved" and w.o.index_map is not None else line
    index = w.trace.steps[step] if step is not None else None
    near = list(lines_of(w.trace.call.kernel))
    return Finding(kind, cause, [], line, step, index, w.o.name, first, size=w.want.size, near=near)


def _made_of(w: Wrong, block: Block) -> str:
    """Which steps make a block, and which input blocks they find in VMEM."""
    steps, call = w.steps_of(block), w.trace.call
    if not steps:
        return ""
    moving = [k for k, o in enumerate(call.operands) if o.role == "in" and not o.in_hbm and math.prod(o.tiles) > 1]
    told = []
    for k in moving:
        seen = [*dict.fromkeys(w.trace.blocks[k][s] for s in steps)]
        which = listed([*map(str, seen)]) if len(seen) < 4 else f"{seen[0]} to {seen[-1]}"
        told.append(f"{call.operands[k].name} {which}")
    made = f"Step {steps[0]} makes" if len(steps) == 1 else f"Steps {_shortened(spans(steps))} make"
    return f" {made} it{f' from {listed(told)}' if told else ''}."


def _last_store(w: Wrong, block: Block) -> tuple[SourceLine | None, int | None]:
    """The line and the step that stored into a block last."""
    writer = w.cut(w.trace.writer[w.number].seen(), block)
    step = int(writer.max()) if writer.size else -1
    stores = [e for e in w.trace.events if e.op != "load" and e.ref == w.o.name and e.step == step]
    return (stores[-1].line, step) if stores else (None, None)


# --- what was not stored, not kept, not read -------------------------------------------------------------------------


def _missing(w: Wrong, wrong: dict[Block, tuple[str, str]]) -> Iterator[Finding]:
    groups = collections.defaultdict(list)
    for block, (kind, _) in wrong.items():
        groups[kind].append(block)
    if groups["unvisited"]:
        yield _unvisited(w, groups["unvisited"])
    for kind in ("never-stored", "partly-stored"):
        if groups[kind]:
            yield _not_stored(w, kind, groups[kind], wrong[groups[kind][0]][1])


def _unvisited(w: Wrong, blocks: list[Block]) -> Finding:
    o, call = w.o, w.trace.call
    cause = (
        f"{named_blocks(blocks)} of {o.name} {'is' if len(blocks) == 1 else 'are'} never visited: the grid {call.grid} "
        f"has {plural(w.trace.n, 'step')}, the array has {plural(len(w.blocks), 'block')} of {o.block}. "
    )
    reached = [max((b[d] for b in w.trace.visits[w.number]), default=-1) + 1 for d in range(len(o.tiles))]
    short = [d for d, n in enumerate(o.tiles) if reached[d] < n]
    if short and all(any(b[d] >= reached[d] for d in short) for b in blocks):
        for d in short:
            count = f"pl.cdiv({o.shape[d]}, {o.block[d]}) = {o.tiles[d]} blocks"
            cause += f"Dimension {d} has {count}; {reached[d]} of them {'is' if reached[d] == 1 else 'are'} visited. "
        cause = cause.rstrip()
    else:
        cause += f"No step's index map returns it: look at the index map of {o.name}."
    return Finding("unvisited", cause, [], where_defined(o.index_map), block=blocks[0], operand=o.name)


def _not_stored(w: Wrong, kind: str, blocks: list[Block], words: str) -> Finding:
    name, step = w.o.name, min([s for b in blocks for s in w.steps_of(b)], default=0)
    stores = [e for e in w.trace.events if e.op != "load" and e.ref == name]
    written = w.trace.state[w.number].seen() == WRITTEN
    if not stores and not (w.o.in_hbm and written.any()):  # a pipeline inside of a kernel writes by copies of its own
        cause = (
            f"no step stores anything into {name}: what you see is uninitialised memory. Write {name}[...] = value, "
            "under a condition that holds at some step."
        )
    elif w.o.in_hbm:
        where = where_in(w.cut(~written, blocks[0]))
        cause = f"no copy reaches {where or 'any part'} of {name}. Look at the slices that the copies out go to."
    elif kind == "partly-stored":
        cause = f"the kernel stores only part of {name}: {named_blocks(blocks)} {words}. Store {name}[...] = value."
    else:
        cause = (
            f"{named_blocks(blocks)} of {name} {'is' if len(blocks) == 1 else 'are'} visited at "
            f"{at(w.trace, step)}, but nothing is stored there. Look at the condition around the store."
        )
    line = stores[0].line if stores else w.trace.call.where
    return Finding(kind, cause, [], line, step, w.trace.steps[step], name, blocks[0])


def _lost(w: Wrong, wrong: Sequence[Block]) -> Iterator[Finding]:
    """A buffer that a step stores over, before anybody has read what an earlier step of the same visit stored."""
    visits = [v for block in wrong for v in w.trace.visits[w.number].get(block, []) if len(v) > 1]
    if not visits or w.o.in_hbm:
        return
    visit = max(visits, key=len)
    events = [e for e in w.trace.events if visit[0] <= e.step <= visit[-1]]
    scratch = [s.name for s in w.trace.call.scratch if s.space in ("vmem", "smem")]
    kept = any(keeps([e for e in events if e.ref == name]) for name in (w.o.name, *scratch))
    for name in [*scratch, *([] if kept else [w.o.name])]:  # else the output may be a draft of what they hold
        found = _overwritten([e for e in events if e.ref == name])
        if found is not None:
            before, event = found
            cause = (
                f"{name} is overwritten: step {event.step} stores into all of it before anybody has read what step "
                f"{before} stored, so that is lost. Combine the two instead ({name}[...] += ... for a sum), and set "
                f"it to its starting value {first_step_test(w.trace, name)}."
            )
            index = w.trace.steps[event.step]
            block = w.trace.blocks[w.k][event.step]
            yield Finding("overwritten", cause, [], event.line, event.step, index, name, block)
            return


def keeps(events: Sequence[Event]) -> bool:
    """Whether a step reads what an earlier one has left in a buffer."""
    stored_at = -1
    for e in events:
        if e.op == "load" and e.step != stored_at:
            return True
        stored_at = e.step if e.op != "load" and e.whole else stored_at
    return False


def _overwritten(events: Sequence[Event]) -> tuple[int, Event] | None:
    """(step that stored, the store of a later step that covers all of it), when nobody reads in between."""
    stored: int | None = None
    for e in events:
        if e.op == "load":
            stored = None
        elif stored is not None and e.whole and e.step > stored:
            return stored, e
        else:
            stored = e.step
    return None


def never_read(trace: Trace, k: int) -> list[Block]:
    """The blocks of operand k, an input, that no step reads."""
    o = trace.call.operands[k]
    return sorted(set(np.ndindex(*o.tiles)) - set(trace.blocks[k])) if _comes_in_blocks(o) else []


def _comes_in_blocks(o: Operand) -> bool:
    return o.role == "in" and not o.in_hbm and not any(d.kind == "element" for d in o.dims)


def _unread(w: Wrong) -> Iterator[Finding]:
    """Inputs, or blocks of them, that no step reads."""
    call = w.trace.call
    for k, o in enumerate(call.operands if not call.scalar_names else ()):
        if not _comes_in_blocks(o):
            continue
        if not any(e.op != "store" and e.ref == o.name for e in w.trace.events):
            cause = f"nothing that the kernel reads from {o.name} goes into the result: it cannot depend on it yet."
            yield Finding("unused", cause, [], call.where, operand=o.name)
            continue
        if missing := never_read(w.trace, k):
            still = [d for d in still_axes(w.trace, k) if call.grid[d] in o.tiles and call.grid[d] > 1]
            axes = f" Its index map ignores grid axis {still[0]}." if still else ""
            verb = "is" if len(missing) == 1 else "are"
            cause = f"{named_blocks(missing)} of {o.name} {verb} never read.{axes} Look at the index map of {o.name}."
            yield Finding("unread", cause, [], where_defined(o.index_map), operand=o.name, block=missing[0])


# --- words -----------------------------------------------------------------------------------------------------------


def sample_of(got: np.ndarray, want: np.ndarray, bad: np.ndarray, name: str) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{name}{list(index)} is {got[index]:.6g}, expected {want[index]:.6g}"


def named_blocks(blocks: Sequence[Block]) -> str:
    """'block (3, 0)' or 'blocks (0, 0), (0, 1), ... (12 of them)'."""
    if len(blocks) == 1:
        return f"block {tuple(blocks[0])}"
    shown = ", ".join(str(tuple(b)) for b in blocks[:3])
    return f"blocks {shown}" + (f", ... ({len(blocks)} of them)" if len(blocks) > 3 else "")


def where_in(bad: np.ndarray) -> str:
    """Which rows or columns of a block are wrong, in words; '' for all of it."""
    if bad.ndim == 0 or bad.all():
        return ""
    names = {1: ["elements"], 2: ["rows", "columns"]}.get(bad.ndim, [f"dim {d}:" for d in range(bad.ndim)])
    values = [np.unique(hit) for hit in np.nonzero(bad)]
    parts = [
        f"{name} {_shortened(spans(v.tolist()))}"
        for name, v, size in zip(names, values, bad.shape, strict=True)
        if len(v) < size
    ]
    return ", ".join(parts) or "scattered elements"


def _shortened(text: str) -> str:
    return text if text.count(",") < 4 else ", ".join(text.split(", ")[:3]) + ", ..."
