"""What would put a wrong kernel right: one thing at a time is changed in it, and tried."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..findings import Finding, Tolerance, WrongOutput, default_tolerance
from ..incidents import at
from ..machine import Run, fed_by, region, run_call, spans
from ..ops import is_floating
from . import operations, positions
from .trial import Clock, Examples, Most, Wrong, calls_of, first_that_helps, floats

_SHARE = 0.4  # of the time, for a place alone
_UNEXPLAINED = frozenset("values zeros nan".split())
# Kinds that know where, and at best guess why.
_UNSURE = frozenset("values row-term wrong-axis repeated".split())

_GENERAL_ADVICE = re.compile(  # what is said of wrong values when nothing is known of them, or guessed
    r"( Follow one element of that block by hand| Only blocks that hang over the edge are wrong"
    r"|: every step has its share in the sum).*",
    re.DOTALL,
)


def tell_change(
    findings: list[Finding],
    run: Run,
    want: Any,
    tolerance: Tolerance | None,
    outputs: Sequence[WrongOutput] = (),
    examples: Examples = list,
    most: Most = (None, None),
) -> list[Finding]:
    """The findings, the first of them with the change that puts all wrong values right, where there is one.

    outputs: what else is wrong, the likeliest first. examples: makes the other cases of the check, for which a change
    has to be right, too. most: bytes and FLOPs that it may take.
    """
    if not findings:
        return findings
    clock, examples = Clock(), functools.cache(examples)
    if findings[0].kind == "explained" and findings[0].unsure:
        _tell_place(findings[0], _one_wrong_call(run, want, tolerance, most), examples)
        return findings
    if all(f.kind in _UNEXPLAINED for f in findings):
        if findings[0].kind == "nan" and _let_in(run, want, tolerance, findings[0]):
            return findings[:1]
        if _tell_position(findings[0], _one_wrong_call(run, want, tolerance, most), clock, examples):
            return findings[:1]
    _tell_operation(findings, run, outputs, clock, examples)
    return findings


def _tell_place(finding: Finding, wrong: Wrong | None, examples: Examples) -> None:
    """A wrong result that the puzzle has a word for: at which line it comes about, if a change shows that."""
    found = wrong and first_that_helps(wrong, positions.changes, Clock(_SHARE), examples)
    if found and not found.refuted:
        finding.evidence = [_GENERAL_ADVICE.sub(".", text) for text in finding.evidence]
        finding.cause, finding.placed = f"{finding.cause} In the kernel: {found.change.words}", True
        finding.near = list(found.change.near)
        finding.line = finding.near[0] if finding.near else finding.line


def _tell_position(finding: Finding, wrong: Wrong | None, clock: Clock, examples: Examples) -> bool:
    found = wrong and first_that_helps(wrong, positions.changes, clock, examples)
    if not found:
        return False
    finding.evidence = [_GENERAL_ADVICE.sub(".", text) for text in finding.evidence]
    where = _GENERAL_ADVICE.sub("", finding.cause).rstrip(" .")
    finding.cause = f"{where}. One change puts all of it right: {found.change.words}{found.but}"
    finding.near = list(found.change.near)
    finding.line = finding.near[0] if finding.near else finding.line
    return True


def _one_wrong_call(run: Run, want: Any, tolerance: Tolerance | None, most: Most) -> Wrong | None:
    """The call that everything wrong comes of."""
    calls = calls_of(run, want, tolerance, most)
    bad = {n for n, wrong in (calls or {}).items() if not all(wrong.right(j) for j in wrong.want)}
    if not calls or not bad:
        return None
    first = calls[min(bad)]
    made = [first.trace.outputs[j] for j in first.want]
    return first if bad <= {first.number, *fed_by(run, first.number, made)} else None  # else: two mistakes, or more


def _tell_operation(
    findings: list[Finding], run: Run, outputs: Sequence[WrongOutput], clock: Clock, examples: Examples
) -> None:
    f = findings[0]
    output = f.output or next(iter(outputs), None)
    if f.kind not in _UNSURE or output is None:
        return
    call = output.trace.call
    o = call.outs[output.number]
    if o.in_hbm or call.vmapped or any(d.kind != "blocked" for d in o.dims) or not is_floating(output.want.dtype):
        return
    number = next(n for n, t in enumerate(run.traces) if t is output.trace)
    wrong = Wrong(run, number, {output.number: output.want}, output.tolerance)
    steering = f.kind == "repeated"
    found = first_that_helps(wrong, functools.partial(operations.changes, steering=steering), clock, examples)
    if found and not found.refuted:
        but = "" if found.factor == 1 else f", but for a factor of {found.factor:g}"
        change = f"{found.change.words}, the result is right{but}."
        f.cause = f.where + change if f.where else f"{f.cause} {change}"
        f.line = found.change.near[0] if found.change.near else f.line
        for other in findings[1:]:  # of the same mistake, most likely
            other.cause = other.where.strip() or other.cause


def _let_in(run: Run, want: Any, tolerance: Tolerance | None, finding: Finding) -> bool:
    """Says which input the NaN of a result come in with, where the kernel should have kept them out."""
    trace, expected = run.traces[-1], jax.tree.leaves(want)
    outputs = trace.outputs
    if len(outputs) != 1 or len(expected) != 1 or outputs[0].size != np.size(expected[0]):
        return False
    w = np.asarray(expected[0]).reshape(outputs[0].shape)
    for n, (o, x) in enumerate(zip(trace.call.ins, trace.call.inputs, strict=True)):
        if x.dtype.kind in "iub" or not np.isnan(floats(x)[0]).any():
            continue
        inputs = [*trace.call.inputs[:n], np.nan_to_num(x), *trace.call.inputs[n + 1 :]]
        again = run_call(dataclasses.replace(trace.call, inputs=inputs), detail=False).outputs[0]
        if not (tolerance or default_tolerance(w.dtype)).close(*floats(again, w)).all():
            continue
        loads = [e for e in trace.events if e.op == "load" and e.ref == o.name]
        k = trace.call.operands.index(o)
        for event in loads:
            full, _, _ = region(o, trace.starts[k][event.step])
            block = np.isnan(floats(x[full])[0])
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
