"""Judges plain array code, without a kernel in it: under jit, exact in value, shape and dtype, and drawn when wrong."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..budgets.arrays import over_budget
from ..diagnose.diagnose import result_names, rounded, structure
from ..diagnose.errors import explain_array_error
from ..diagnose.findings import Diagnosis, Finding, Tolerance, default_tolerance
from ..diagnose.lookout import Lookout
from ..diagnose.rounding import Course
from ..ir.capture import Programs, capture, source_line
from ..ir.exact import traceable
from ..ir.ops import Beyond
from ..ir.program import count_operations
from ..ir.readers import for_the_reader
from ..lens import devices
from ..lens.machine import Run, run_call
from ..lens.watchdog import TimeLimit, time_limit
from ..view import costs
from ..view.verdict import Verdict
from .collecting import is_brief
from .guard import Guard, is_ours
from .inputs import Draw, Explain
from .machines import DEVICES, trace

TIME_LIMIT_S = 20.0
_SHOWN_DIFFERENCES = 3


@dataclasses.dataclass(eq=False)
class ArrayJudge:
    """Judges an answer on one draw after the other, up to the first thing that is wrong: here array code, and in Judge
    what has kernels.

    explain(*args, got=, want=, **keywords) returns what a wrong result means, in words, and a picture of it as text.
    course: makes the course's result of the same data. also: says what the course's solution does, too. example: the
    first draw, once it has passed. figures: what it costs; of array code, what is sent between devices, if there are
    any. operations: how many there are in array code.
    """

    fn: Callable[..., Any]
    tolerance: Tolerance | None
    explain: Explain | None = None
    guard: Guard = dataclasses.field(default_factory=Guard)
    lookout: Lookout = dataclasses.field(default_factory=lambda: Lookout({}, {}, ()))
    wanted: "Kept" = dataclasses.field(default_factory=dict)
    course: Callable[[Draw, Any], Course | None] | None = None  # of a draw, and what the answer makes of it
    also: Callable[..., frozenset[Any]] = lambda draw: frozenset()
    example: Draw | None = None
    figures: list[Any] = dataclasses.field(default_factory=list)
    operations: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    explain_error = staticmethod(explain_array_error)

    def passed(self) -> Verdict:
        """Says what a right answer costs, in a line."""
        gained = costs.gained(self.figures)
        if self.operations and not gained:
            fewest, most = min(self.operations), max(self.operations)
            count = f"{most}" if fewest == most else f"{fewest} to {most}"
            words = f"{count} array operation{'s' if most != 1 else ''}"
            gained = f"It runs under jit, whatever the values are: {words}."
        return self.verdict("passed", [], gained=gained)

    def confirmed(self, passed: Verdict, spec: Callable[..., Any]) -> Verdict:
        """The verdict after JAX has been asked about the first case, too."""
        assert self.example, "what has passed has passed on its first draw"
        args, keywords = self.example.args, keywords_of(spec, self.example.case.blocks)
        refused = self.confirm(self.example, lambda: expected(spec, args, keywords))
        return self.passed() if refused is None else refused  # with what it has noted

    def failed(self, findings: Sequence[Finding], **more: Any) -> Verdict:
        return self.verdict("failed", findings, **more)

    def error(self, error: BaseException) -> Verdict:
        """The verdict on an answer that has raised."""
        if isinstance(error, Exception) and is_ours(error):
            raise error
        finding = Finding("error", "".join(traceback.format_exception_only(error)).strip().splitlines()[0])
        with self.guard.explaining():
            finding = self.explain_error(error)
        frames = traceback.extract_tb(error.__traceback__)
        near = [source_line(f.filename, f.lineno) for f in reversed(frames) if f.lineno is not None]
        direct = [line for line, called in itertools.pairwise(near[::-1]) if called == finding.line]
        if direct and finding.line and direct[-1].file == finding.line.file:  # in a helper: which of its calls it was
            finding = finding.but(evidence=(*finding.evidence, f"called at {direct[-1]}: {direct[-1].text}"))
        return self.verdict("error", [finding.but(near=near)], traceback="".join(traceback.format_exception(error)))

    def verdict(self, status: str, findings: Sequence[Finding], **more: Any) -> Verdict:
        word = {"passed": "Right.", "failed": "Not yet.", "error": "Not yet.", "unjudged": ""}[status]
        return Verdict("", status, [*findings], word, notes=[*self.notes], figures=self.figures, **more)

    def rounded(self, run: Run, draw: Draw) -> Diagnosis | None:
        """What is wrong with the rounding of a result, next to the course's of the same data."""
        with self.guard.explaining():
            course = self.course(draw, run.outputs) if self.course else None
            return rounded(run, draw.want, course) if course else None
        return None

    def explained(self, got: Any, draw: Draw) -> tuple[str, str]:
        """The puzzle's own word about what the values mean, and its picture of them."""
        keywords = {**keyword_only(self.fn), **draw.case.blocks}
        got, want = (jax.tree.map(np.asarray, tree) for tree in (got, draw.want))
        return self.explain(*draw.args, got=got, want=want, **keywords) if self.explain else ("", "")

    def run_case(self, draw: Draw) -> Verdict | None:
        """The verdict on one draw when it is not a pass, else None."""
        want, case = draw.want, draw.case
        try:
            got, jaxpr, run = self._traced(draw)
        except (Exception, TimeLimit) as error:
            if self.lookout.found is None:
                return self.error(error)
        if self.lookout.found is not None:
            return self.failed([self.lookout.found])
        self.operations.append(count_operations(jaxpr))
        if on_devices := isinstance(run, devices.Run):
            self.figures = self.figures or DEVICES.figures(run)
            seen = DEVICES.diagnose(run, want, self.tolerance).findings
            if seen and seen[0].kind != "values":
                return self.failed(seen[:1])
        finding, picture = compare(got, want, self.tolerance), ""
        if finding is None:
            rough = self.rounded(Run([], got, [], [], []), draw)
            found = rough.findings if rough else []
            if not found and case.budget:
                found = over_budget(functools.partial(self.fn, **case.blocks), draw.args, jaxpr, case.budget)
                found += DEVICES.over_budget(run, [], case.budget) if on_devices else []
            return self.failed(found[:1]) if found else None
        if finding.kind in ("values", "shape"):
            words = ""
            with self.guard.explaining():
                words, picture = self.explained(got, draw)
            if words:
                finding = finding.but(kind="explained", cause=f"{finding.cause} {words}")
        return self.failed([finding], picture=picture)

    def _traced(self, draw: Draw) -> tuple[Any, Any, Run | None]:
        """What the function returns under jit, as NumPy arrays, its program, and the machine's run of it."""
        fn, run = functools.partial(self.fn, **draw.case.blocks), None
        programs: Programs = {}
        with time_limit(TIME_LIMIT_S, "your function"), self.lookout.watching():
            try:  # nothing is compiled before it is right
                run = trace(fn, *draw.args, programs=programs)
                got = run.outputs
            except Beyond:
                got = self._compiled(draw)
        traced = [known[0] for known in programs.values() if isinstance(known, tuple)]
        return jax.tree.map(np.asarray, got), next(iter(traced), None) or jax.make_jaxpr(fn)(*draw.args), run

    def _compiled(self, draw: Draw) -> Any:
        """What the function returns under jit, as NumPy arrays."""
        fn = jax.jit(functools.partial(self.fn, **draw.case.blocks))
        with time_limit(TIME_LIMIT_S, "your function"), jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, for_the_reader(fn, *map(jax.numpy.asarray, draw.args)))

    def confirm(self, draw: Draw, want: Callable[[], Any]) -> Verdict | None:
        """What JAX has to say against a pass, or None. want: makes what is right."""
        if is_brief():
            return None
        try:
            got = self._compiled(draw)
        except (Exception, TimeLimit) as error:
            return self.error(error)
        finding = compare(got, want(), self.tolerance)
        return None if finding is None else self.failed([finding])


def expected(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The spec's result as JAX computes it on the CPU, in full precision, as NumPy arrays."""
    for traced, rest in traceable(spec, args, keywords):
        with contextlib.suppress(Exception):
            return _run_by_jax(jax.jit(traced, compiler_options={"xla_allow_excess_precision": False}), rest, {})
    return _run_by_jax(spec, args, keywords)


def _run_by_jax(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, for_the_reader(spec, *map(jax.numpy.asarray, args), **keywords))


def quickly_expected(
    spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any], programs: Programs | None = None
) -> Any:
    """The spec's result by the lens's own arithmetic: no compilation. JAX's word is asked before anything passes.

    programs: see ir.capture, of this spec with these keywords.
    """
    for traced, rest in traceable(spec, args, keywords):
        known = programs if len(rest) == len(args) else None  # else some values are a part of the program
        with contextlib.suppress(Exception):
            return capture(traced, *rest, on_call=lambda call, *_: run_call(call).outputs, programs=known).outputs
    with contextlib.suppress(Exception):  # a spec in NumPy
        return jax.tree.map(np.asarray, spec(*map(np.asarray, args), **keywords))
    return _run_by_jax(spec, args, keywords)


# What has been worked out of the draws of a check, by their places, with what was asked and of which data
Kept = dict[tuple[int, int], tuple[Any, list[Any], Any]]


def kept(known: Kept, draw: Draw, asked: Any, make: Callable[[], Any]) -> Any:
    """What make() returns: worked out once for a draw, however often answers are tried."""
    data = [(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, jax.tree.leaves(draw.args))]
    before = known.get(draw.place)
    if before is None or before[:2] != (asked, data):
        before = known[draw.place] = asked, data, make()
    return before[2]


def wanted(known: Kept, draw: Draw, spec: Callable[..., Any], programs: Programs) -> Any:
    """What `quickly_expected` says of a draw. programs: of the spec for this case."""
    keywords = keywords_of(spec, draw.case.blocks)
    asked = getattr(spec, "__code__", spec), keywords
    return kept(known, draw, asked, lambda: quickly_expected(spec, draw.args, keywords, programs))


def keywords_of(spec: Callable[..., Any], blocks: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a case that its spec knows, too: those that decide the result."""
    names = keyword_only(spec)
    return {name: value for name, value in blocks.items() if name in names}


def compare(got: Any, want: Any, tolerance: Tolerance | None = None) -> Finding | None:
    """What is wrong with a result: structure, shape, dtype, or values. NaN is right only where it is expected."""
    if found := structure(got, want):
        return found[0]
    for name, g, w in zip(result_names(want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        right = (tolerance or default_tolerance(w.dtype)).close(g, w)
        if not right.all():
            return Finding("values", *_differences(name, g, w, ~right), size=int((~right).sum()))
    return None


def _differences(name: str, got: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> tuple[str, list[str]]:
    """In words: how many elements are wrong, and the first of them."""
    if got.ndim == 0:
        return f"{name} is {_number(got)}, not {_number(want)}.", []
    count = int(wrong.sum())
    places = [tuple(int(i) for i in index) for index in np.argwhere(wrong)[:_SHOWN_DIFFERENCES]]
    listed = [f"[{', '.join(map(str, p))}] is {_number(got[p])}, not {_number(want[p])}" for p in places]
    cause = f"{name} is wrong at {count} of {got.size} places: {'; '.join(listed)}."
    if count > _SHOWN_DIFFERENCES:
        cause = f"{cause[:-1]}; and so on."
    if got.ndim == 1 and got.size <= 32 and got.dtype.kind in "iub":
        return cause, [f"{whose}: [{' '.join(map(str, x.tolist()))}]" for whose, x in (("yours", got), ("right", want))]
    return cause, []


def _number(x: Any) -> str:
    return f"{x}" if x.dtype.kind in "iub" else f"{float(x):.6g}"


def keyword_only(fn: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of a function, and their defaults."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a NumPy ufunc has no signature
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
