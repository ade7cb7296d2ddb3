"""The course's own result on the data of a check, and the exact one: what a reader's rounding is compared with."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..diagnose.findings import Tolerance
from ..diagnose.narrow import kernels_of, narrow_kinds
from ..diagnose.origin import Origin, Values, origin
from ..diagnose.rounding import Course
from ..diagnose.wrong import never_read
from ..ir.exact import in_float64
from ..ir.ops import is_floating, witnessed
from ..lens.machine import Incident, Trace
from . import cases
from .arrays import Kept, compare, kept, keywords_of
from .inputs import Draw
from .machines import trace


def course_of(
    puzzle: str, spec: Callable[..., Any], tolerance: Tolerance | None, draw: Draw, got: Any
) -> Course | None:
    """What the course makes of a draw. None where there is nothing to compare `got` with: it is bit by bit the
    course's, it has no floats, the course's solution does not fit this call, or is not right there."""
    if not any(is_floating(np.asarray(x).dtype) for x in jax.tree.leaves(got)):
        return None
    try:
        results, narrow = _results(puzzle, draw)
        made, right = map(jax.tree.leaves, (got, draw.want))
        if all(map(np.array_equal, made, results)) or compare(results, right, tolerance):
            return None
        exact = in_float64(spec, draw.args, keywords_of(spec, draw.case.blocks))
        rounded = [x.astype(s.dtype) for x, s in zip(exact, results, strict=True)]
        return None if compare(results, rounded, tolerance) else Course(results, exact, narrow)
    except Exception:  # the reader's own function and spec, or a program that cannot be followed: there is no course
        return None


def seen_in_course(puzzle: str, draw: Draw) -> frozenset[Any]:
    """What the machine sees in the course's solution, too, on the same draw: marks of incidents, and of blocks
    that nobody reads."""
    with contextlib.suppress(Exception):  # the solution does not fit this call
        run = trace(cases.official(puzzle).fn, *draw.args, **draw.case.blocks)
        seen = {mark_of(t, incident) for t in run.traces for incident in t.incidents}
        missing = ((k, never_read(t, k)) for t in run.traces for k in range(len(t.call.operands)))
        return frozenset(seen | {("unread", k, str(blocks[0])) for k, blocks in missing if blocks})
    return frozenset()


def origin_of(puzzle: str, fn: Callable[..., Any], draw: Draw) -> Origin | None:
    """Where an answer parts from the course's solution on the same draw: see `diagnose.origin`."""
    answer, course = Values(), Values()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # both have run before
            with witnessed(course):
                trace(cases.official(puzzle).fn, *draw.args, **draw.case.blocks)
            with witnessed(answer):
                trace(fn, *draw.args, **draw.case.blocks)
    except Exception:  # the solution does not fit this call, or the lens cannot follow the answer
        return None
    return origin(answer, course)


def mark_of(trace: Trace, incident: Incident) -> tuple[Any, ...]:
    """The same for the same incident in two kernels that call their Refs otherwise."""
    refs = [*(o.name for o in trace.call.operands), *(s.name for s in trace.call.scratch)]
    place = refs.index(incident.ref) if incident.ref in refs else -1
    return incident.kind, place, str(incident.detail.get("what"))


_known: Kept = {}


def _results(puzzle: str, draw: Draw) -> tuple[list[np.ndarray], frozenset[str]]:
    """What the course's solution returns, and the kinds of places where it rounds; run once for the same data."""
    return kept(_known, draw, (puzzle, draw.case.blocks), lambda: _run(puzzle, draw))


def _run(puzzle: str, draw: Draw) -> tuple[list[np.ndarray], frozenset[str]]:
    with contextlib.redirect_stdout(io.StringIO()):  # whatever the notebook's cells print
        solved = cases.official(puzzle)
    run = trace(solved.fn, *draw.args, **draw.case.blocks)
    return [np.asarray(x) for x in jax.tree.leaves(run.outputs)], narrow_kinds(kernels_of(run))
