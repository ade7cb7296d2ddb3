"""From a run of kernels for a GPU and the expected result to findings: which part is wrong, how, and who stored it."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ..ir.capture import SourceLine
from ..lens.gpu import Launched, Run
from ..text import plural
from .diagnose import result_names, rougher, structure
from .findings import Diagnosis, Finding, Tolerance, default_tolerance
from .gpu import findings_of
from .narrow import of_launched, too_rough
from .rounding import Course
from .wrong import pattern_of, sample_of, where_in

_PARTS = 64  # of one output: with more, nobody looks whether one holds the values of another

_MOSTLY = 0.98


def diagnose_gpu(run: Run, want: object, tolerance: Tolerance | None = None) -> Diagnosis:
    """Compares a run with the expected result (a pytree of arrays) and explains what is wrong.

    What the machine has seen to be wrong counts even where the values agree. Where they do not, it explains them.
    """
    near = [line for each in run.calls for line in (*each.kernel.callers, each.kernel.where) if line is not None]
    seen = [f.but(near=[*f.near, *near]) for f in findings_of(run.findings)]
    if any(each.hangs for each in run.calls):
        return Diagnosis(seen)
    gots, wants = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (run.outputs, want))
    wrong = structure(gots, wants, "plgpu.kernel", "out_type")
    for name, got, right in zip(result_names(want), gots, wants, strict=True) if not wrong else ():
        found = _output(run.calls, name, got, right, tolerance or default_tolerance(right.dtype))
        wrong += [found.but(near=near)] if found is not None else []
    if not wrong:
        return Diagnosis(seen)
    also = [*findings_of(note for note in run.notes if note.kind == "padding")]
    first, *others = seen or [*wrong, *also]
    if seen:  # how wrong it is, is evidence of it
        first = first.but(evidence=[*wrong[0].evidence[:1], *first.evidence])
    return Diagnosis([first, *others])


def rounded_gpu(run: Run, want: object, course: Course) -> Diagnosis | None:
    """The first result that is rounded worse than the course's, or None. Every value is within tolerance."""
    for name, got, found in rougher(run, want, course):
        launched, number = next(_makers(run.calls, got), (None, 0))
        where = next(((n, number) for n, each in enumerate(run.calls) if each is launched), None)
        return Diagnosis([too_rough([of_launched(each) for each in run.calls], where, name, found, course.narrow)])
    return None


def _output(
    calls: Sequence[Launched], name: str, got: np.ndarray, want: np.ndarray, tolerance: Tolerance
) -> Finding | None:
    """What is wrong with a result."""
    g, w = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (got, want))
    bad = ~tolerance.close(g, w)
    if not bad.any():
        return None
    launched, number = next(_makers(calls, got), (None, 0))
    if launched is not None:
        name, shape = launched.kernel.outputs[number][0], launched.outputs[number].shape
        g, w, bad = (x.reshape(shape) for x in (g, w, bad))
    summary = f"{int(bad.sum())} of {bad.size} elements are wrong: {sample_of(g, w, bad, name)}."
    if launched is None:
        return Finding("values", f"{name}: {summary}")
    numbers = launched.written[number][0]
    if (missing := bad & (numbers <= 0)).any():
        text = f"{plural(int(missing.sum()), 'element')} of {name} are never stored"
        where = where_in(missing)
        cause = f"{text}: {where}." if where else f"{text}. Copy or store the result into it."
        return Finding("never-stored", cause, [summary], launched.kernel.where, operand=name)
    return _part(launched, number, (g.astype(np.float64), w.astype(np.float64), bad), tolerance).but(evidence=[summary])


def _makers(calls: Sequence[Launched], got: np.ndarray) -> Iterator[tuple[Launched, int]]:
    """The kernels that a result may have come out of, the last first, each with the number of the output."""
    for launched in reversed(calls):
        for number, out in enumerate(launched.outputs):
            if out.nbytes == got.nbytes and np.array_equal(_bits(out), _bits(got)):
                yield launched, number


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _part(
    launched: Launched, number: int, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], tolerance: Tolerance
) -> Finding:
    """What the first wrong part of an output is, of the parts that one store each has left. arrays: (what it holds,
    what is expected, which elements are wrong)."""
    got, want, bad = arrays
    (name, *_), (numbers, writes) = launched.kernel.outputs[number], launched.written[number]
    wrong = np.unique(numbers[bad]).tolist()
    every = np.unique(numbers[numbers > 0]).tolist()
    first = wrong[0]
    box, mine = _box(numbers == first), bad & (numbers == first)
    boxes = [_box(numbers == n) for n in every if n != first] if len(every) <= _PARTS else []
    others = {_named(name, b, want.shape): want[b] for b in boxes}
    kind, words = pattern_of(got[box], want[box], mine[box], tolerance, others)
    holds = {"moved": f"holds {words}", "rounding": "is nearly right"}.get(kind, f"is {words}")
    holds = "holds wrong values" if words == "wrong values" else holds
    by_chance = kind == "moved" or mine[box].mean() > _MOSTLY  # the others are right
    part = "" if by_chance else where_in(mine[box])
    inside = f" in {part} of it" if part else ""
    more = f", as {plural(len(wrong) - 1, 'other part')}" if len(wrong) > 1 else ""
    access = writes[first]
    assert access is not None, "a number above 0 is that of a write"
    line: SourceLine | None = access.instr.line if access.instr is not None else None
    who = access.who[:1].upper() + access.who[1:] if access.who else "This line"
    cause = f"{_named(name, box, want.shape)} {holds}{inside}{more}. {who} stored it."
    return Finding(kind, cause, [], line, operand=name, size=want.size)


def _box(mask: np.ndarray) -> tuple[slice, ...]:
    """The smallest block around what is true."""
    hits = [np.flatnonzero(mask.any(axis=tuple(a for a in range(mask.ndim) if a != d))) for d in range(mask.ndim)]
    return tuple(slice(int(h[0]), int(h[-1]) + 1) for h in hits)


def _named(name: str, box: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """'o_gmem[64:128, :]', as the reader would write it."""
    keys = [
        ":" if (k.start, k.stop) == (0, n) else str(k.start) if k.stop - k.start == 1 else f"{k.start}:{k.stop}"
        for k, n in zip(box, shape, strict=True)
    ]
    return name if all(key == ":" for key in keys) else f"{name}[{', '.join(keys)}]"
