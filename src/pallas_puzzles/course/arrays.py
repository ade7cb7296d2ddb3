"""Judges plain array code, without a kernel in it: under jit, exact in value, shape and dtype, and drawn when wrong."""

import collections
import contextlib
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.readers import for_the_reader
from .collecting import is_brief
from .guard import Guard, is_ours
from .inputs import Budget, Case

if TYPE_CHECKING:
    from ..diagnose.findings import Finding, Tolerance
    from ..diagnose.lookout import Lookout
    from ..diagnose.rounding import Course
    from ..lens.machine import Run
    from ..view.verdict import Verdict

TIME_LIMIT_S = 20.0
_SHOWN_DIFFERENCES = 3
_MANY_TURNS = 3  # of the same operation from one line: a loop
CourseOf = Callable[..., "Course | None"]  # (args, blocks, got, want) -> reference.course_of
Explain = Callable[..., tuple[str, str]]  # (*args, got=, want=, **keywords) -> in words, and as a picture


class ArrayJudge:
    """Runs array code on one case after the other, and stops at the first thing that is wrong.

    explain(*args, got=, want=, **keywords) returns what a wrong result means, in words, and a picture of it as text.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        spec: Callable[..., Any],
        tolerance: "Tolerance | None",
        explain: Explain | None,
        guard: Guard,
        lookout: "Lookout",
        course: "CourseOf | None" = None,
    ):
        self.fn, self.spec, self.tolerance, self.explain = fn, spec, tolerance, explain
        self.guard, self.lookout, self.course = guard, lookout, course
        self.operations: list[int] = []
        self.figures: list[Any] = []  # what is sent from device to device, where there are several
        self.wanted = Wanted()
        self.example: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the first case, once it has passed

    def run_case(self, args: tuple[Any, ...], case: Case, number: int, i: int) -> "Verdict | None":
        """The verdict on draw i of case `number` when it is not a pass, else None."""
        from ..diagnose.findings import Finding
        from ..ir.program import count_operations
        from ..lens import devices
        from ..lens.watchdog import TimeLimit
        from .machines import DEVICES

        keywords = keywords_of(self.spec, case.blocks)
        want = self.wanted.of(number, i, self.spec, args, keywords)
        try:
            got, jaxpr, run = self._run(args, case.blocks)
        except (Exception, TimeLimit) as error:
            if self.lookout.found is None:
                return self._error(error)
        if self.lookout.found is not None:
            return self._failed(self.lookout.found)
        operations = count_operations(jaxpr)
        self.operations.append(operations)
        on_devices = run if isinstance(run, devices.Run) else None
        if on_devices is not None:
            self.figures = self.figures or [on_devices.counts]
            seen = DEVICES.diagnose(on_devices, want, self.tolerance).findings
            if seen and seen[0].kind != "values":
                return self._failed(seen[0])
        finding = compare(got, want, self.tolerance)
        if finding is not None:
            if finding.kind not in ("values", "shape") or self.explain is None:
                return self._failed(finding)
            keywords = {**keyword_only(self.spec), **case.blocks}
            words = picture = ""
            with self.guard.explaining():
                words, picture = self.explain(*args, got=got, want=want, **keywords)
            if words:
                finding = finding.but(kind="explained", cause=f"{finding.cause} {words}")
            return self._failed(finding, picture)
        off = self._rounded(args, case.blocks, got, want)
        if off is not None:
            return self._failed(off)
        most = case.budget.operations if case.budget else None
        if most is not None and operations > most:
            cause = f"Right answer, but it takes {operations} array operations; the budget is {most}."
            if _repeats(jaxpr):
                cause += " Under jit a Python loop is written out, turn by turn: let one operation do all at once."
            return self._failed(Finding("budget", cause))
        large = _too_large(jaxpr, case.budget.elements) if case.budget and case.budget.elements is not None else None
        wide = _too_wide(jaxpr, case.budget.mxu_bits) if case.budget and case.budget.mxu_bits is not None else None
        costly = (
            large
            or wide
            or (_too_costly(functools.partial(self.fn, **case.blocks), args, case.budget) if case.budget else None)
        )
        if costly is not None:
            return self._failed(costly)
        over = DEVICES.over_budget(on_devices, [], case.budget) if on_devices is not None and case.budget else []
        if over:
            return self._failed(over[0])
        self.example = self.example or (args, case.blocks)
        return None

    def _run(self, args: tuple[Any, ...], blocks: dict[str, Any]) -> "tuple[Any, Any, Run | None]":
        """What the function returns under jit, as NumPy arrays, its program, and the machine's run of it."""
        import jax

        from ..ir.capture import Programs
        from ..ir.ops import Beyond
        from ..lens.watchdog import time_limit
        from .machines import trace

        fn, programs, run = functools.partial(self.fn, **blocks), Programs(), None
        with time_limit(TIME_LIMIT_S, "your function"), self.lookout.watching():
            try:  # nothing is compiled before it is right
                run = trace(fn, *args, programs=programs, detail=False)
                got = run.outputs
            except Beyond:
                got = self._compiled(args, blocks)
        traced = [known[0] for known in programs.values() if isinstance(known, tuple)]
        return jax.tree.map(np.asarray, got), next(iter(traced), None) or jax.make_jaxpr(fn)(*args), run

    def _compiled(self, args: tuple[Any, ...], blocks: dict[str, Any]) -> Any:
        """What the function returns under jit, as NumPy arrays."""
        import jax

        from ..lens.watchdog import time_limit

        fn = jax.jit(functools.partial(self.fn, **blocks))
        with time_limit(TIME_LIMIT_S, "your function"), jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, for_the_reader(fn, *map(jax.numpy.asarray, args)))

    def confirmed(self, passed: "Verdict") -> "Verdict":
        """The verdict after JAX has compiled and run the first case, and the spec."""
        from ..lens.watchdog import TimeLimit

        if self.example is None or is_brief():
            return passed
        args, blocks = self.example
        try:
            got = self._compiled(args, blocks)
        except (Exception, TimeLimit) as error:
            return self._error(error)
        finding = compare(got, expected(self.spec, args, keywords_of(self.spec, blocks)), self.tolerance)
        return passed if finding is None else self._failed(finding)

    def _rounded(self, args: tuple[Any, ...], blocks: dict[str, Any], got: Any, want: Any) -> "Finding | None":
        from ..diagnose.diagnose import rounded
        from ..lens.machine import Run

        found = None
        with self.guard.explaining():
            course = self.course(args, blocks, got, want) if self.course else None
            found = rounded(Run([], got, [], [], []), want, course) if course else None
        return found.findings[0] if found else None

    def passed(self) -> "Verdict":
        from ..view import costs

        fewest, most = min(self.operations), max(self.operations)
        count = f"{most}" if fewest == most else f"{fewest} to {most}"
        gained = f"It runs under jit, whatever the values are: {count} array operation{'s' if most != 1 else ''}."
        gained = costs.gained(self.figures) or gained
        return self._verdict("passed", [], gained=gained, figures=self.figures)

    def _failed(self, finding: "Finding", picture: str = "") -> "Verdict":
        return self._verdict("failed", [finding], picture=picture)

    def _error(self, error: BaseException) -> "Verdict":
        from ..diagnose.errors import explain_array_error

        if isinstance(error, Exception) and is_ours(error):
            raise error
        text = "".join(traceback.format_exception(error))
        return self._verdict("error", [explain_array_error(error)], traceback=text)

    def _verdict(self, status: str, findings: "list[Finding]", **more: Any) -> "Verdict":
        from ..view.verdict import Verdict

        return Verdict("", status, findings, "Right." if status == "passed" else "Not yet.", **more)


def expected(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The spec's result as JAX computes it on the CPU, in full precision, as NumPy arrays."""
    import jax

    from ..ir.exact import traceable

    for traced, rest in traceable(spec, args, keywords):
        with (
            contextlib.suppress(Exception),
            jax.default_device(jax.devices("cpu")[0]),
            jax.default_matmul_precision("highest"),
        ):
            compiled = jax.jit(traced, compiler_options={"xla_allow_excess_precision": False})
            return jax.tree.map(np.asarray, compiled(*rest))
    return _run_by_jax(spec, args, keywords)


def _run_by_jax(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    import jax

    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, for_the_reader(spec, *map(jax.numpy.asarray, args), **keywords))


def quickly_expected(spec: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The spec's result by the lens's own arithmetic: no compilation. JAX's word is asked before anything passes."""
    import jax

    from ..ir.capture import capture
    from ..ir.exact import traceable
    from ..lens.machine import run_call

    for traced, rest in traceable(spec, args, keywords):
        with contextlib.suppress(Exception):
            return capture(traced, *rest, on_call=lambda call, *_: run_call(call).outputs).outputs
    with contextlib.suppress(Exception):  # a spec in NumPy
        return jax.tree.map(np.asarray, spec(*map(np.asarray, args), **keywords))
    return _run_by_jax(spec, args, keywords)


class Wanted:
    """What a spec makes of the draws of a check: worked out once, however often answers are tried."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[Any, tuple[Any, ...], Any]] = {}

    def of(self, number: int, i: int, spec: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """quickly_expected(spec, args, keywords) of draw i of case `number`."""
        asked = getattr(spec, "__code__", spec), keywords
        before = self.known.get((number, i))
        if before is None or before[0] != asked or not all(map(np.array_equal, before[1], args)):
            before = self.known[number, i] = asked, args, quickly_expected(spec, args, keywords)
        return before[2]


def keywords_of(spec: Callable[..., Any], blocks: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a case that its spec knows, too: those that decide the result."""
    names = keyword_only(spec)
    return {name: value for name, value in blocks.items() if name in names}


def compare(got: Any, want: Any, tolerance: "Tolerance | None" = None) -> "Finding | None":
    """What is wrong with a result: structure, shape, dtype, or values. NaN is right only where it is expected."""
    import jax

    from ..diagnose.diagnose import result_names
    from ..diagnose.findings import Finding, default_tolerance
    from ..text import plural

    results, wanted = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(results) != len(wanted):
        if not results:
            return Finding("structure", "the function returns nothing: return the result.")
        return Finding("structure", f"the function returns {plural(len(results), 'array')}, the spec {len(wanted)}.")
    for name, g, w in zip(result_names(want), results, wanted, strict=True):
        if g.shape != w.shape:
            return Finding("shape", f"{name} has shape {g.shape}, the spec says {w.shape}.")
        if g.dtype != w.dtype:
            return Finding("dtype", f"{name} is {g.dtype}, the spec says {w.dtype}: {_about_dtype(g.dtype, w.dtype)}")
        right = (tolerance or default_tolerance(w.dtype)).close(g, w)
        if not right.all():
            return Finding("values", *_differences(name, g, w, ~right), size=int((~right).sum()))
    return None


def _about_dtype(got: np.dtype, want: np.dtype) -> str:
    if want.kind in "iu" and got.kind not in "iub":
        return "/ and jnp.zeros(n) make floats. Use // (rounds down) or pl.cdiv (rounds up), and dtype=, or .astype."
    if want.kind in "iu" and got.kind == "b":
        return "it is a comparison. To count, add .astype(jnp.int32), or choose with jnp.where."
    return f"say dtype={want}, or .astype, where it is made."


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
        return cause, [f"yours: {_row(got)}", f"right: {_row(want)}"]
    return cause, []


def _number(x: Any) -> str:
    value = np.asarray(x)
    return f"{value}" if value.dtype.kind in "iub" else f"{float(value):.6g}"


def _row(x: np.ndarray) -> str:
    return f"[{' '.join(map(str, x.tolist()))}]"


def keyword_only(fn: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of a function, and their defaults."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a NumPy ufunc has no signature
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _repeats(jaxpr: Any) -> bool:
    """Whether one of the reader's lines makes the same operation again and again, as a Python loop does."""
    from ..ir.program import equations

    made = collections.Counter((eqn.primitive.name, line) for eqn, line in equations(jaxpr) if line is not None)
    return max(made.values(), default=0) >= _MANY_TURNS


def _too_large(jaxpr: Any, most: int) -> "Finding | None":
    """The largest array that a program makes on its way, if it has more elements than it may."""
    from ..diagnose.findings import Finding
    from ..ir.program import arrays_made

    made = ((math.prod(shape), shape, line) for shape, line in arrays_made(jaxpr))
    size, shape, line = max(made, key=lambda each: each[0], default=(0, (), None))
    if size <= most:
        return None
    cause = (
        f"Right answer, but on the way it makes an array of shape {shape}, {size:,} numbers; the "
        f"largest may have {most:,} here. A table of everything against everything grows with the product of both: "
        "work out each number by itself, or fetch it by its index."
    )
    return Finding("budget", cause, [], line, operand="elements")


def _too_wide(jaxpr: Any, bits: int) -> "Finding | None":
    """The first matrix product of a program whose operands have more bits than they may."""
    from ..diagnose.costs import wide_operands
    from ..ir.program import equations

    products = ((eqn, line) for eqn, line in equations(jaxpr) if eqn.primitive.name == "dot_general")
    found = ((wide_operands(eqn, bits), line) for eqn, line in products)
    return next((finding.but(line=line) for finding, line in found if finding is not None), None)


def _too_costly(fn: Callable[..., Any], args: Sequence[Any], budget: Budget) -> "Finding | None":
    """More FLOPs in matrix products than there may be; or more bytes, where each operation is a program of its own."""
    import jax

    from ..diagnose.findings import Finding
    from ..ir.eager import operations, products
    from ..text import human_bytes

    shapes = [jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in args]
    if budget.flops is not None and (flops := sum(products(fn, shapes).values())) > budget.flops:
        cause = f"Right answer, but its matrix products take {flops:,.0f} FLOPs; the budget is {budget.flops:,}."
        return Finding("budget", cause, operand="flops")
    if budget.hbm_bytes is None:
        return None
    programs = operations(fn, shapes, inside=True)
    moved = sum(each.moved_bytes for each in programs)
    if moved <= budget.hbm_bytes:
        return None
    cause = (
        f"Right answer, but its {len(programs)} programs move {human_bytes(moved)}; the budget is "
        f"{human_bytes(budget.hbm_bytes)}. Each operation is a program here, also inside of a jax.jit of yours."
    )
    most = sorted(programs, key=lambda each: -each.moved_bytes)[:4]
    evidence = [f"{each.name}: {human_bytes(each.moved_bytes)}" for each in most]
    return Finding("budget", cause, evidence, most[0].line, operand="hbm_bytes")
