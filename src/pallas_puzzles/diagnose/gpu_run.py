"""From a run of kernels for a GPU and the expected result to findings: which part is wrong, how, and who stored it."""

from collections.abc import Sequence

import numpy as np

from ..ir.capture import SourceLine
from ..lens.gpu import Launched, Run
from ..text import plural
from .diagnose import makers, structure, wrong_results
from .findings import Diagnosis, Finding, Tolerance
from .gpu import findings_of
from .wrong import Result, part_named, pattern_of, what_it_holds, where_in

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
    wrong = structure(run.outputs, want, "plgpu.kernel", "out_type") or [
        _output(run.calls, each).but(near=near) for each in wrong_results(run.outputs, want, tolerance)
    ]
    if not wrong:
        return Diagnosis(seen)
    first, *others = seen or wrong
    if not seen:  # a right answer may do so as well: it is no finding of its own
        also = findings_of(note for note in run.notes if note.kind == "padding")
        first = first.but(evidence=[*first.evidence, *(note.cause for note in also)])
    else:  # how wrong it is, is evidence of it
        first = first.but(evidence=[*wrong[0].evidence[:1], *first.evidence])
    return Diagnosis([first, *others])


def _output(calls: Sequence[Launched], wrong: Result) -> Finding:
    which, number = next(makers([each.outputs for each in calls], wrong.made), (-1, 0))
    if which < 0:
        return Finding("values", f"{wrong.name}: {wrong.summary(wrong.name)}")
    launched = calls[which]
    wrong, name = wrong.shaped(launched.outputs[number].shape), launched.kernel.outputs[number][0]
    summary, numbers = wrong.summary(name), launched.written[number][0]
    if (missing := wrong.bad & (numbers <= 0)).any():
        text = f"{plural(int(missing.sum()), 'element')} of {name} are never stored"
        where = where_in(missing)
        cause = f"{text}: {where}." if where else f"{text}. Copy or store the result into it."
        return Finding("never-stored", cause, [summary], launched.kernel.where, operand=name)
    return _part(launched, number, wrong).but(evidence=[summary])


def _part(launched: Launched, number: int, output: Result) -> Finding:
    """What the first wrong part of an output is, of the parts that one store each has left."""
    got, want, bad = output.got, output.want, output.bad
    (name, *_), (numbers, writes) = launched.kernel.outputs[number], launched.written[number]
    wrong = np.unique(numbers[bad]).tolist()
    every = np.unique(numbers[numbers > 0]).tolist()
    first = wrong[0]
    box, mine = _box(numbers == first), bad & (numbers == first)
    boxes = [_box(numbers == n) for n in every if n != first] if len(every) <= _PARTS else []
    others = {part_named(name, b, want.shape): want[b] for b in boxes}
    kind, words = pattern_of(got[box], want[box], mine[box], output.tolerance, others)
    by_chance = kind == "moved" or mine[box].mean() > _MOSTLY  # the others are right
    part = "" if by_chance else where_in(mine[box])
    inside = f" in {part} of it" if part else ""
    more = f", as {plural(len(wrong) - 1, 'other part')}" if len(wrong) > 1 else ""
    access = writes[first]
    assert access is not None, "a number above 0 is that of a write"
    line: SourceLine | None = access.instr.line if access.instr is not None else None
    who = access.who[:1].upper() + access.who[1:] if access.who else "This line"
    cause = f"{part_named(name, box, want.shape)} {what_it_holds(kind, words)}{inside}{more}. {who} stored it."
    return Finding(kind, cause, [], line, operand=name, size=want.size)


def _box(mask: np.ndarray) -> tuple[slice, ...]:
    """The smallest block around what is true."""
    hits = [np.flatnonzero(mask.any(axis=tuple(a for a in range(mask.ndim) if a != d))) for d in range(mask.ndim)]
    return tuple(slice(int(h[0]), int(h[-1]) + 1) for h in hits)
