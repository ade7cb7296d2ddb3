"""One verdict on an answer: out of the lens, the budget, the TPU front end, and JAX's own simulator."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import re
import sys
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import (
    ArrayJudge,
    CourseOf,
    Explain,
    compare,
    expected,
    keyword_only,
    keywords_of,
    quickly_expected,
)
from .guard import Guard, is_ours
from .inputs import Budget, Case, Input, Question, Subject, draw, question, seed_of
from .reference import course_of

if TYPE_CHECKING:
    from ..diagnose.corrections import Correction
    from ..diagnose.findings import Diagnosis, Finding, Tolerance
    from ..diagnose.lookout import Lookout
    from ..lens.machine import Figures, Run
    from ..view.verdict import Verdict
    from .claims import Choice, Claim, Helper

TIME_LIMIT_S = 20.0
CONFIRM_LIMIT_S = 90.0  # what the lens has passed does end: JAX's simulator may take its time on a busy machine
DRAWS = 3
OTHER_GARBAGE = 0.7  # in the second run of a kernel that reads uninitialised memory: a value like any other


@dataclasses.dataclass
class _Collection:
    verdicts: list["Verdict"]
    thorough: bool
    judge: bool
    brief: bool


_collection: contextvars.ContextVar[_Collection | None] = contextvars.ContextVar("collection", default=None)


@contextlib.contextmanager
def collecting(*, thorough: bool = False, judge: bool = True, brief: bool = False) -> Iterator[list["Verdict"]]:
    """While active, verdicts are appended to the list it yields, and neither displayed nor recorded as progress.

    thorough: JAX's simulator confirms every variant, not only the first draw. A collection inside another inherits it.
    judge=False: nothing is run; the verdicts of answers that are there are "unjudged" and carry their Subject.
    brief: verdicts say right or wrong as readers get it, and no more: without explanations, and without JAX's
    simulator, which is only asked about what is right. A collection inside another inherits it, too.
    """
    outer = _collection.get()
    thorough, brief = thorough or (outer is not None and outer.thorough), brief or _brief()
    token = _collection.set(_Collection([], thorough, judge, brief))
    try:
        yield _collection.get().verdicts  # type: ignore[union-attr]
    finally:
        _collection.reset(token)


def _brief() -> bool:
    collection = _collection.get()
    return collection is not None and collection.brief


def check(puzzle: str, fn: Callable[..., Any], *asked: Any, **options: Any) -> "Verdict":
    """Judges an answer and says why. Displays the verdict and records it as progress.

    puzzle: its name, "basics/9". fn: the reader's function, arrays -> arrays, block sizes as keyword arguments.
    What is asked of it stands in the course's cases/NAME.py. asked, options: a spec, inputs, and whatever else
    inputs.question takes. They are for puzzles that are not in that file, for kernels outside of the course, and for
    experiments: such a verdict on a puzzle that is in the file is not recorded.
    """
    from ..view.verdict import Verdict, emit
    from . import cases, curriculum

    try:
        known = curriculum.puzzle(puzzle)
    except curriculum.CurriculumError:
        if not (asked or options):
            raise
        known = None  # a kernel of the reader's own, outside of the course
    entry = cases.entry(known) if known else None
    if not asked and (options or entry is None):
        why = "options need a spec and inputs, too" if options else f"{puzzle} is not in the course's cases"
        raise TypeError(f'{why}: check("{puzzle}", fn, spec, *inputs, ...)')
    title = f"{puzzle} {known.title}" if known else puzzle
    names = ChainMap(getattr(inspect.unwrap(fn), "__globals__", {}), sys._getframe(1).f_globals)
    holes = _holes(known, names) if known else {}
    open_holes = _untouched(known, holes) if known else []
    collection = _collection.get()
    apart: list[str] = []
    if open_holes:
        from ..lens.machine import listed

        to_write = f"Write {listed(open_holes)}, where it says YOUR CODE HERE."
        verdict = Verdict(puzzle, "unsolved", [], f"{title}: not solved yet.", next=to_write)
    else:
        given = cases.given(known, names) if known and entry else {}
        own = question(*asked, **options) if asked else None
        put = own or entry(types.SimpleNamespace(**given))  # type: ignore[misc]
        if collection is not None and not collection.judge:
            verdict = Verdict(puzzle, "unjudged", [], f"{title}: not judged.", subject=Subject(fn, put))
        else:
            put = dataclasses.replace(put, explain=None, explain_cost=None) if _brief() else put
            verdict = _judged(puzzle, known, fn, put, holes, names)
            if known and not _brief():
                apart = _apart(known, fn, entry is not None and own is not None, given, names)
                changed = _changed(known, [getattr(put.spec, "__name__", "")], names)
                says = [f"{name} was given and has been changed. {_NOT_RECORDED if own else _OURS}" for name in changed]
                apart += says if own else []
                verdict.notes = [*apart, *verdict.notes, *([] if own else says)]
            if verdict and apart:
                verdict.status = "unrecorded"
            words = {"passed": "solved.", "unrecorded": "right, but not recorded."}
            otherwise = "not yet." if verdict.findings else "not judged."
            verdict.puzzle, verdict.headline = puzzle, f"{title}: {words.get(verdict.status, otherwise)}"
            following = curriculum.next_puzzle(puzzle) if known and verdict else None
            if following:
                verdict.next = f"Next: {following.id} {following.title}"
    if collection is not None:
        collection.verdicts.append(verdict)
        return verdict
    finished = None
    if known and verdict.status != "unsolved" and not apart:
        from ..view.verdict import totals
        from .finale import finale
        from .progress import record

        newly = record(puzzle, bool(verdict), totals(verdict.figures))
        finished = finale(puzzle) if newly else None
    if known:
        from .finale import around

        around(verdict, known, holes)
    emit(verdict)
    if finished is not None:
        emit(finished)
    return verdict


def _judged(
    puzzle: str,
    known: Any,
    fn: Callable[..., Any],
    asked: Question,
    holes: dict[str, types.CodeType],
    names: Mapping[str, Any],
    only: tuple[int, int] | None = None,
) -> "Verdict":
    """The verdict on an answer, with findings that point at lines of the reader's.

    only: one case and draw of it, and nothing but right or wrong.
    """
    from ..diagnose.lookout import Lookout
    from .told import tell

    guard = Guard()

    def judged() -> "Verdict":
        helpers = _helpers(known, holes, names) if known else []
        barred = {**dict.fromkeys(_specs(known, asked.spec), SPEC_IS_BARRED), **_reasons(asked.forbid)}
        own = getattr(inspect.unwrap(fn), "__code__", None)
        codes = [*holes.values(), *helpers] or ([own] if own is not None else [])
        lookout = Lookout({}, {}, ()) if _brief() else _lookout(known, asked.spec, barred, codes, names)
        tolerance = _tolerance(asked.tol)
        course = functools.partial(course_of, known.id, asked.spec, tolerance) if known else None
        if asked.kernel:
            judge = _Judge(fn, tolerance, asked.allow, asked.explain, asked.explain_cost, barred, guard, lookout)
            judge.course = course
            untrue = None if only else _claimed([c for c in asked.claims if not c.last], judge)
            verdict = _judge(puzzle, judge, asked, only) if untrue is None else untrue
            poor = _claimed([c for c in asked.claims if c.last], judge) if verdict and not only else None
            verdict = verdict if poor is None else poor
        else:
            arrays = ArrayJudge(fn, asked.spec, tolerance, asked.explain, guard, lookout, course)
            verdict = _judge_arrays(puzzle, arrays, asked, only)
        if not _brief():
            with guard.explaining():
                named = any(re.search(rf"\b{hole}\b", f.cause) for hole in holes for f in verdict.findings)
                if known and (asked.kernel or named or len(holes) == 1):  # which of several it is, nobody knows
                    _point_into_holes(verdict, holes, helpers)
        return verdict

    def explained() -> "Verdict":
        verdict = judged()
        if not known or _brief():
            return verdict
        if verdict.findings and verdict.findings[0].kind != "forbidden":
            with guard.explaining():
                found = _isolated(puzzle, verdict, known, fn, names)
                if len(known.holes) > 1 or not all(c.whole and c.function in known.holes for c in found):
                    tell(verdict, found, {c.function: _code_of(names[c.function]).co_filename for c in found})
        for finding in verdict.findings:
            finding.function = finding.function or _function_at(finding.line, holes)
        return verdict

    return _guarded(explained, guard)


def _isolated(
    puzzle: str, verdict: "Verdict", known: Any, fn: Callable[..., Any], names: Mapping[str, Any]
) -> "list[Correction]":
    """What would have to change in an answer, found by trying."""
    from .isolate import isolated

    def right(fn: Callable[..., Any], asked: Question, only: tuple[int, int] | None) -> bool:
        with collecting(brief=True):
            return bool(_judged(puzzle, known, fn, asked, {}, {}, only))

    used = _names_used(fn, getattr(inspect.unwrap(fn), "__globals__", {}), set())
    here = functools.partial(right, only=verdict.draw)
    return isolated(known, names, used, here, functools.partial(right, only=None))


def check_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    want: Any,
    *,
    budget: Budget | None = None,
    tol: float | None = None,
    allow: Sequence[str] | None = None,
    confirm: bool = True,
    **blocks: Any,
) -> "Verdict":
    """Judges one run of `fn(*args, **blocks)` against the expected result, without a puzzle around it.

    allow=None: any work outside of the kernels is fine. confirm: let the TPU front end and JAX's simulator have a say.
    """
    judge = _Judge(fn, _tolerance(tol), allow)

    def verdict() -> "Verdict":
        found = judge.run_case(tuple(args), want, Case(tuple(args), blocks, budget), first=True)
        if found is None and confirm:
            found = judge.confirm(tuple(args), blocks, want)
        return judge.passed() if found is None else found

    return _guarded(verdict, judge.guard)


def _guarded(judged: "Callable[[], Verdict]", guard: Guard) -> "Verdict":
    """The verdict of judged(); where a bug of ours leaves none, one that says only that."""
    from ..view.verdict import Verdict

    try:
        verdict = judged()
    except Exception as error:
        if not is_ours(error):
            raise
        guard.keep(error)
        verdict = Verdict("", "error", [], "Not judged.")
    guard.tell(verdict)
    return verdict


# --- holes -----------------------------------------------------------------------------------------------------------


def _holes(known: Any, names: Mapping[str, Any]) -> dict[str, types.CodeType]:
    """The code of the functions that the reader has put into the holes of a puzzle."""
    from . import curriculum

    found = {}
    for name in curriculum.pristine_code(known):
        function = names.get(name)
        code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
        if code is not None:
            found[name] = code
    return found


def unwritten(fn: Callable[..., Any]) -> list[str]:
    """The holes of the course that `fn` uses and that still hold the skeleton's code."""
    from . import curriculum

    plain = inspect.unwrap(fn)
    names = getattr(plain, "__globals__", {})
    used = _names_used(plain, names, set())
    found = []
    for puzzle in curriculum.all_puzzles():
        if used & set(puzzle.holes):
            holes = {n: getattr(names.get(n), "__code__", None) for n in puzzle.holes if n in used}
            found += _untouched(puzzle, {n: c for n, c in holes.items() if c is not None})
    return found


def _names_used(fn: Any, names: dict[str, Any], seen: set[str]) -> set[str]:
    """The names in a function, and in the functions of its own file that it calls, also by way of a custom_vjp."""
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    if code is None or code.co_name in seen or getattr(inspect.unwrap(fn), "__globals__", None) is not names:
        return set()
    seen.add(code.co_name)
    used = {code.co_name, *(name for inner in _with_inner([code]) for name in inner.co_names)}
    for value in [names[name] for name in used if name in names]:
        for part in (value, getattr(value, "fwd", None), getattr(value, "bwd", None)):
            used |= _names_used(part, names, seen)
    return used


def _untouched(known: Any, holes: dict[str, types.CodeType]) -> list[str]:
    """The holes of a puzzle that still hold the skeleton's code."""
    from . import curriculum

    pristine = curriculum.pristine_code(known)
    return [name for name, code in holes.items() if _program(code) == _program(pristine[name])]


_OURS = "The check has used the course's own."
_NOT_RECORDED = "This is about your version of the puzzle, and is not recorded."


def _apart(
    known: Any, fn: Callable[..., Any], asks: bool, given: Mapping[str, Any], names: Mapping[str, Any]
) -> list[str]:
    """Why a verdict is not one on the puzzle as the course asks it; [] if it is. asks: the call says what to check."""
    from . import curriculum

    wanted, name = curriculum.checked(known), getattr(fn, "__name__", "something else")
    if asks:
        plain = f'check("{known.id}", {wanted})'
        return [f"This call says itself what to check, so its verdict is not recorded. The course's check is {plain}."]
    if not isinstance(fn, types.FunctionType) or name != wanted:
        return [f"The course checks {wanted} here; you have checked {name}. So this verdict is not recorded."]
    changed = _changed(known, [wanted, *sorted(_names_used(fn, fn.__globals__, set()) - {wanted})], names)
    if wanted in given and wanted not in known.holes and _defaults(fn) != _defaults(given[wanted]):
        changed.insert(0, wanted)
    return [f"{each} was given and has been changed. {_NOT_RECORDED}" for each in changed[:1]]


def _defaults(fn: Callable[..., Any]) -> list[Any]:
    """The default values of a function's arguments; functions among them by their names."""
    parameters = inspect.signature(fn).parameters.values()
    return [(p.name, repr(getattr(p.default, "__name__", p.default))) for p in parameters]


def _changed(known: Any, names_of: Iterable[str], names: Mapping[str, Any]) -> list[str]:
    """Which of these functions the notebook gives, and the reader has changed."""
    from . import curriculum

    changed = []
    for name in names_of:
        code = getattr(inspect.unwrap(names[name]) if callable(names.get(name)) else None, "__code__", None)
        pristine = curriculum.given_codes(known, name) if code is not None else []
        if pristine and code is not None and _program(code) not in map(_program, pristine):
            changed.append(name)
    return changed


def _helpers(known: Any, holes: dict[str, types.CodeType], names: Mapping[str, Any]) -> list[types.CodeType]:
    """The code of functions that the reader has written beside the holes."""
    from . import curriculum

    files, given = {code.co_filename for code in holes.values()}, curriculum.given_names(known)
    mine = [inspect.unwrap(value) for name, value in names.items() if name not in given and callable(value)]
    codes = [getattr(function, "__code__", None) for function in mine]
    return [c for c in codes if isinstance(c, types.CodeType) and c.co_filename in files]


def _lookout(
    known: Any,
    spec: Callable[..., Any],
    barred: Mapping[str, str],
    codes: Sequence[types.CodeType],
    names: Mapping[str, Any],
) -> "Lookout":
    """What looks out for calls of what is barred, in the reader's code."""
    from ..diagnose.lookout import Lookout
    from . import curriculum

    own = {getattr(inspect.unwrap(spec), "__name__", ""): spec, **names}
    specs = {name: own[name] for name, why in barred.items() if why == SPEC_IS_BARRED and name in own}
    course = curriculum.given_names(known) if known else frozenset()

    def given(function: types.FunctionType) -> bool:
        return function is inspect.unwrap(spec) or function.__qualname__ in course

    return Lookout(barred, specs, codes, given, [*names.values()])


SPEC_IS_BARRED = "{name} says what to compute, in jnp; your answer has to compute it itself."


def _specs(known: Any, spec: Callable[..., Any]) -> list[str]:
    """Names of functions that an answer may not call: its own spec, and the specs of the other puzzles."""
    from . import curriculum

    others = [name for name in curriculum.given_names(known) if name.endswith("_spec")] if known else []
    return sorted({getattr(inspect.unwrap(spec), "__name__", ""), *others} - {"", "<lambda>"})


def _reasons(forbid: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Name -> why it may not be used."""
    if isinstance(forbid, Mapping):
        return dict(forbid)
    return dict.fromkeys(forbid, "{name} does the work for you, and this puzzle is about writing it yourself.")


def _with_inner(codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """Code objects, and those of the functions defined inside of them."""
    for code in codes:
        yield code
        yield from _with_inner([c for c in code.co_consts if isinstance(c, types.CodeType)])


_ABOUT_THE_WHOLE = frozenset("budget exchanged rebound".split())


def _point_into_holes(verdict: "Verdict", holes: dict[str, types.CodeType], helpers: Sequence[types.CodeType]) -> None:
    """Findings name a line that the reader has written: not one of what was given around it."""
    from ..ir.capture import source_line

    if not holes:
        return
    written = [*holes.values(), *helpers]
    ranges = [(code.co_filename, code.co_firstlineno, _last_line(code)) for code in written]

    def own(line: Any) -> bool:
        return line is not None and any(line.file == f and a <= line.line <= b for f, a, b in ranges)

    for finding in verdict.findings:
        if finding.kind == "race":
            finding.line = _line_with("dimension_semantics", ranges) or finding.line
        if finding.kind == "explained" and not finding.placed:
            finding.line = _line_named(finding.cause, ranges) or finding.line
        if own(finding.line):
            continue
        about_grid = finding.maps or finding.kind.startswith("grid")
        grids = [code for name, code in holes.items() if name.endswith("grid") and about_grid]
        kernels = [code for name, code in holes.items() if name.endswith("kernel") and finding.operand == "flops"]
        about = [code for name, code in holes.items() if re.search(rf"\b{name}\b", finding.cause)]
        named = _line_named(finding.cause, ranges)
        if finding.kind == "exchanged" and named is None:
            last = list(holes.values())[-1]
            named = _line_with("return ", [(last.co_filename, last.co_firstlineno, _last_line(last))])
        if grids and finding.kind.startswith("grid"):
            named = _line_with("return ", [(c.co_filename, c.co_firstlineno, _last_line(c)) for c in grids])
        code = (grids or kernels or about or list(holes.values()))[-1 if finding.kind in _ABOUT_THE_WHOLE else 0]
        mine = [m for m in (*finding.near, *finding.maps) if own(m)]
        finding.line = mine[0] if mine and not grids else named or source_line(code.co_filename, code.co_firstlineno)


def _line_named(cause: str, ranges: Sequence[tuple[str, int, int]]) -> Any:
    """The first line, of those that the reader has written, with something that a cause calls by its name."""
    if (
        "your pl.when" in cause or "that pl.when" in cause
    ):  # one that asks for positions, not for the first or last step
        conditions = [line for line in _lines_with("pl.when", ranges) if not re.search(r"== 0|num_programs", line.text)]
        if conditions:
            return conditions[-1 if "your" in cause else 0]
    names = [word for quoted in re.findall(r"`([^`]+)`|(jnp\.\w+)", cause) for word in quoted if word]
    return next((line for line in (_line_with(name, ranges) for name in names) if line), None)


def _line_with(word: str, ranges: Sequence[tuple[str, int, int]]) -> Any:
    """The first line of the reader's functions in which a word stands."""

    return next(_lines_with(word, ranges), None)


def _lines_with(word: str, ranges: Sequence[tuple[str, int, int]]) -> Iterator[Any]:
    from ..ir.capture import source_line

    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if word[-1:].isalnum() else re.escape(word))
    lines = (source_line(file, number) for file, first, last in ranges for number in range(first, last + 1))
    yield from (line for line in lines if line and whole.search(line.text) and line.text[:4] != "def ")


def _code_of(function: Any) -> types.CodeType:
    return inspect.unwrap(function).__code__


def _function_at(line: Any, holes: dict[str, types.CodeType]) -> str:
    """The hole that a line of the reader's stands in, "" if it is in none."""
    for name, code in holes.items():
        if line and line.file == code.co_filename and code.co_firstlineno <= line.line <= _last_line(code):
            return name
    return ""


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([line for _, _, line in code.co_lines() if line is not None] + inner, default=code.co_firstlineno)


def _program(code: types.CodeType) -> tuple[Any, ...]:
    """What a code object does, whatever file and line it stands in."""
    consts = tuple(_program(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, consts


# --- the judgement ---------------------------------------------------------------------------------------------------


def _claimed(claims: "Sequence[Claim | Choice | Helper]", judge: "_Judge") -> "Verdict | None":
    """The verdict on the first claim that is not true, or None."""
    from ..lens.watchdog import TimeLimit, time_limit
    from ..view.verdict import Verdict

    for claim in claims:
        try:
            with time_limit(CONFIRM_LIMIT_S, "your function"):  # many plans are tried
                finding = claim.finding()
        except (Exception, TimeLimit) as error:
            return judge._error(error)
        if finding is not None:
            return Verdict("", "failed", [finding], "Not yet.")
    return None


def _judge(puzzle: str, judge: "_Judge", asked: Question, only: tuple[int, int] | None = None) -> "Verdict":
    collection = _collection.get()
    thorough = collection is not None and collection.thorough
    to_confirm = []
    draws = _draws(puzzle, asked.cases, asked.seed)
    for number, case, i, draw_seed in sorted(draws, key=_size) if _brief() else draws:
        if only is not None and (number, i) != only:
            continue
        args = draw(case.inputs, np.random.default_rng(draw_seed))
        first = number == 0 and i == 0
        want = quickly_expected(asked.spec, args, keywords_of(asked.spec, case.blocks))
        verdict = judge.run_case(args, want, case, first=first)
        if verdict is not None:
            verdict.draw = number, i
            if not first:
                verdict.notes.append(_which(args, case, number, draw_seed))
            return verdict
        if i == 0 and (number == 0 or thorough):
            to_confirm.append((args, case.blocks))
    for args, blocks in to_confirm if only is None else ():
        verdict = judge.confirm(args, blocks, expected(asked.spec, args, keywords_of(asked.spec, blocks)))
        if verdict is not None:
            return verdict
    return judge.passed()


def _judge_arrays(puzzle: str, judge: ArrayJudge, asked: Question, only: tuple[int, int] | None = None) -> "Verdict":
    for number, case, i, draw_seed in _draws(puzzle, asked.cases, asked.seed):
        if only is not None and (number, i) != only:
            continue
        args = draw(case.inputs, np.random.default_rng(draw_seed))
        verdict = judge.run_case(args, case)
        if verdict is not None:
            verdict.draw = number, i
            if number or i:
                verdict.notes.append(_which(args, case, number, draw_seed))
            return verdict
    return judge.passed()


def _draws(puzzle: str, cases: Sequence[Case], seed: int | None) -> Iterator[tuple[int, Case, int, int]]:
    """(number of the case, the case, number of the draw, its seed): several draws of the first case, one of others."""
    for number, case in enumerate(cases):
        drawn = any(isinstance(x, Input) for x in case.inputs)
        for i in range(DRAWS if number == 0 and drawn else 1):
            yield number, case, i, seed if seed is not None else 0 if i == 0 else seed_of(puzzle, i)


def _size(drawn: tuple[int, Case, int, int]) -> int:
    """How many elements the inputs of a draw have."""
    return sum(math.prod(getattr(x, "shape", ())) for x in drawn[1].inputs)


def _tolerance(tol: float | None) -> "Tolerance | None":
    from ..diagnose.findings import Tolerance

    return None if tol is None else Tolerance(tol)


def _which(args: Sequence[Any], case: Case, number: int, seed: int) -> str:
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(np.asarray, args))
    blocks = "".join(f", {k}={v}" for k, v in case.blocks.items())
    what = "other random values" if number == 0 else f"variant {number}"
    what += f" ({case.about})" if case.about else ""
    return f"The notebook's own example passes. This is {what}: {shapes}{blocks} (seed={seed})."


# Findings after which a result has nothing to say: it has another form, or was never made.
_OTHERWISE_WRONG = frozenset(
    "structure shape dtype map-bounds ref-bounds unvisited revisit never-stored hang unwaited hbm-load "
    "hbm-store".split()
)


_NEARLY_RIGHT = frozenset({"precision", "rounding"})


class _Judge:
    """Runs an answer on one case after the other, and stops at the first thing that is wrong."""

    def __init__(
        self,
        fn: Callable[..., Any],
        tolerance: "Tolerance | None",
        allow: Sequence[str] | None,
        explain: Explain | None = None,
        explain_cost: Callable[..., str] | None = None,
        barred: Mapping[str, str] = types.MappingProxyType({}),
        guard: Guard | None = None,
        lookout: "Lookout | None" = None,
    ):
        from ..diagnose.lookout import Lookout

        self.fn, self.tolerance, self.allow = fn, tolerance, allow
        self.explain, self.explain_cost = explain, explain_cost
        self.barred = barred
        self.figures: list[Figures] = []
        self.notes: list[str] = []
        self.guard, self.lookout = guard or Guard(), lookout or Lookout({}, {}, ())
        self.course: CourseOf | None = None  # makes the course's result of the same data
        self.beyond = False  # whether JAX's simulator has run what the lens could not

    def run_case(self, args: tuple[Any, ...], want: Any, case: Case, *, first: bool) -> "Verdict | None":
        """The verdict on one draw when it is not a pass, else None."""
        import jax

        from ..diagnose.budgets import dropped
        from ..diagnose.costs import without_branches
        from ..diagnose.findings import Finding
        from ..lens.machine import TooManySteps, figures
        from ..lens.watchdog import TimeLimit

        try:
            run = self._run(args, case.blocks)
        except TooManySteps as error:
            line = next(iter(error.lines), None)
            return self._failed([Finding("grid-steps", error.cause, [], line, near=error.lines)])
        except (Exception, TimeLimit) as error:
            if self.lookout.found is None:
                return self._error(error)
        if self.lookout.found is not None:
            return self._failed([self.lookout.found])
        if _brief() and (wrong := compare(jax.tree.map(np.asarray, run.outputs), want, self.tolerance)) is not None:
            return self._failed([wrong])
        guard, picture = self.guard, ""
        costs: list[Figures] = []
        with guard.explaining():
            costs = [figures(t) for t in run.traces]
        if first:
            self.figures = costs
        diagnosis = self._diagnosis(run, want)
        if diagnosis.findings and {f.kind for f in diagnosis.findings} <= _NEARLY_RIGHT:
            diagnosis = self._rounded(run, args, case.blocks, want) or diagnosis
        findings = self._around(run) + diagnosis.findings
        if not _brief():
            with guard.explaining():
                picture = self._explained(findings, diagnosis.summary, run, args, case.blocks, want)
        if not findings:
            findings = self._with_other_garbage(run, args, case.blocks, want)
        if not findings and (rough := self._rounded(run, args, case.blocks, want)) is not None:
            diagnosis, findings = rough, rough.findings
        if not findings:
            with guard.explaining():
                findings = dropped(run, case.blocks)
        if not findings and case.budget:
            with guard.explaining():
                findings = self._over_budget(run, costs, args, case)
        if not findings:
            return None
        if case.budget and case.budget.branches == 0:
            without_branches(findings)
        verdict = self._failed(findings, diagnosis)
        verdict.figures, verdict.picture = costs, picture
        return verdict

    def _diagnosis(self, run: "Run", want: Any) -> "Diagnosis":
        """What is wrong with a result, and why; only what is wrong, if a rule of ours raises."""
        import jax

        from ..diagnose.diagnose import diagnose
        from ..diagnose.findings import Diagnosis

        with self.guard.explaining():
            return diagnose(run, want, self.tolerance)
        finding = compare(jax.tree.map(np.asarray, run.outputs), want, self.tolerance)
        return Diagnosis([finding] if finding else [])

    def _rounded(self, run: "Run", args: tuple[Any, ...], blocks: dict[str, Any], want: Any) -> "Diagnosis | None":
        """What is wrong with the rounding of a result, next to the course's of the same data."""
        from ..diagnose.diagnose import rounded

        with self.guard.explaining():
            course = self.course(args, blocks, run.outputs, want) if self.course else None
            return rounded(run, want, course) if course else None
        return None

    def _around(self, run: "Run") -> "list[Finding]":
        """What is done outside of the kernels, and may not be."""
        from ..diagnose.diagnose import explain_barred, explain_outside

        found: list[Finding | None] = []
        with self.guard.explaining():
            bypass = explain_barred(run.outside, self.barred, self.allow or ())
            if bypass is None and self.allow is not None:
                bypass = explain_outside(run.outside, self.allow)
            no_kernel = self._no_kernel(run) if self.allow is not None else None
            found = [bypass] if bypass and run.calls else [no_kernel, bypass]
        return [f for f in found if f]

    def _over_budget(self, run: "Run", costs: "list[Figures]", args: tuple[Any, ...], case: Case) -> "list[Finding]":
        """A right answer that costs too much."""
        from ..diagnose.budgets import over_budget
        from ..diagnose.diagnose import too_much_outside

        assert case.budget is not None, "asked without a budget"
        findings = over_budget(run, costs, case.budget)
        if case.budget.outside_flops is not None:
            outside = too_much_outside(run.outside, case.budget.outside_flops)
            findings[:0] = [outside] if outside else []
        for f in (f for f in findings if f.operand == "calls"):
            f.near = [line for trace in run.traces for line in trace.call.callers]
            f.near += [o.line for o in sorted(run.outside, key=lambda o: -o.flops) if o.line is not None]
        if findings and self.explain_cost is not None and not _brief():
            with self.guard.explaining():
                self._explain_costs(findings, run, args, case.blocks)
        return findings

    def _explained(
        self,
        findings: "list[Finding]",
        summary: str,
        run: "Run",
        args: tuple[Any, ...],
        blocks: dict[str, Any],
        want: Any,
    ) -> str:
        """Puts the puzzle's own word about wrong values where the lens has only seen that they are; -> its picture."""
        import jax

        from ..diagnose.diagnose import SEEN_IN_VALUES

        about = next((f for f in findings if f.kind in SEEN_IN_VALUES), None)
        if self.explain is None or not findings or any(f.kind in _OTHERWISE_WRONG for f in findings):
            return ""
        got, want = (jax.tree.map(np.asarray, tree) for tree in (run.outputs, want))
        words, picture = self.explain(*args, got=got, want=want, **{**keyword_only(self.fn), **blocks})
        if words and about is not None:
            kept = about.cause if about.kind == "values" and "by hand" not in about.cause else ""
            where = f"last stored at step {about.step}, grid index {about.at}" if about.step is not None else ""
            about.unsure = about.kind in ("values", "zeros")
            about.kind, about.cause = "explained", words
            about.evidence = [text for text in (summary, kept or where) if text]
            others = [f for f in findings if f.kind not in SEEN_IN_VALUES and f.operand != "result" and f is not about]
            findings[:] = [about, *others]
        elif words:  # the lens has seen how it came about; what it has led to is evidence
            findings[0].evidence.append(words)
        return picture

    def _explain_costs(
        self, findings: "list[Finding]", run: "Run", args: tuple[Any, ...], blocks: dict[str, Any]
    ) -> None:
        """Puts the puzzle's own word about a cost in front, or, if it asks what is over, in the place of the advice."""
        from ..diagnose.findings import Finding

        explain, known = self.explain_cost, keyword_only(self.explain_cost)  # type: ignore[arg-type]
        if "over" not in known:
            text = explain(*args, **blocks)  # type: ignore[misc]
            findings[:0] = [Finding("budget", text)] if text else []
            return
        about = {"over": findings[0].operand, "grids": [t.call.grid for t in run.traces]}
        keywords = {n: v for n, v in {**keyword_only(self.fn), **blocks, **about}.items() if n in known}
        text = explain(*args, **keywords)  # type: ignore[misc]
        if text:
            findings[0].cause = f"{findings[0].cause.split('. ')[0]}. {text}"

    def _with_other_garbage(
        self, run: "Run", args: tuple[Any, ...], blocks: dict[str, Any], want: Any
    ) -> "list[Finding]":
        """A kernel that reads uninitialised memory runs a second time, with other bits in it."""
        from ..diagnose.diagnose import explain_garbage
        from ..diagnose.findings import GARBAGE_READS
        from ..ir.ops import garbage

        if not any(i.kind in GARBAGE_READS for t in run.traces for i in t.incidents):
            return []
        found = None
        with self.guard.explaining(), garbage(OTHER_GARBAGE):
            found = explain_garbage(run, self._run(args, blocks), want, self.tolerance)
        return [found] if found else []

    def _run(self, args: tuple[Any, ...], blocks: dict[str, Any]) -> "Run":
        from ..lens.machine import Beyond, Run, TooManySteps, trace
        from ..lens.watchdog import time_limit
        from ..targets.simulate import simulate

        try:
            with time_limit(TIME_LIMIT_S, "your kernel"), self.lookout.watching():
                return trace(self.fn, *args, **blocks)
        except TooManySteps:
            raise
        except Beyond as e:
            note = f"The lens cannot follow this: {e}. JAX's simulator judges instead."
            if isinstance(e.__cause__, Exception) and not isinstance(e.__cause__, NotImplementedError):
                self.guard.keep(e.__cause__)
            elif note not in self.notes:
                self.notes.append(note)
        except Exception as e:
            if not is_ours(e):
                raise
            self.guard.keep(e)
        self.beyond = True
        outputs = simulate(self.fn, *args, timeout_s=TIME_LIMIT_S, **blocks)
        return Run([], outputs, [], [], [])

    def confirm(self, args: tuple[Any, ...], blocks: dict[str, Any], want: Any) -> "Verdict | None":
        """The TPU front end and JAX's own simulator: None when both agree with a pass."""
        from ..diagnose.findings import Finding
        from ..lens.machine import Run
        from ..lens.watchdog import TimeLimit
        from ..targets.simulate import SimulatorTimeout, simulate
        from ..targets.tpu.lowering import refusal

        refused = None
        with self.guard.explaining():
            refused = refusal(self.fn, *args, **blocks)
        if refused is not None:
            return self._failed(
                [Finding("lowering", refused.sentence, [refused.detail] if refused.detail else [], refused.line)]
            )
        if _brief():
            return None
        try:
            outputs = simulate(self.fn, *args, timeout_s=CONFIRM_LIMIT_S, **blocks)
        except (Exception, TimeLimit) as error:
            verdict = self._error(error)
            late = isinstance(error, SimulatorTimeout | TimeLimit)
            verdict.notes.append(_TOO_LATE if late else _DISAGREE)
            return verdict
        findings = self._diagnosis(Run([], outputs, [], [], []), want).findings
        if not findings:
            return None
        verdict = self._failed(findings)
        verdict.notes.append(_DISAGREE)
        return verdict

    def _no_kernel(self, run: "Run") -> "Finding | None":
        from ..diagnose.findings import Finding

        if run.traces and all(run.from_kernel):
            return None
        if not run.traces and self.beyond:
            return None
        what = "no pallas_call is reached" if not run.calls else "part of the result does not come out of a pallas_call"
        cause = f"{what}: the work is done outside of a kernel, and this puzzle is about doing it inside."
        return Finding("outside", cause, operand="result" if run.calls else None)

    def _error(self, error: BaseException) -> "Verdict":
        from ..diagnose.errors import explain_error
        from ..diagnose.findings import Finding
        from ..ir.capture import source_line

        if isinstance(error, Exception) and is_ours(error):
            raise error
        finding = Finding("error", "".join(traceback.format_exception_only(error)).strip().splitlines()[0])
        with self.guard.explaining():
            finding = explain_error(error)
        frames = traceback.extract_tb(error.__traceback__)
        finding.near = [source_line(f.filename, f.lineno) for f in reversed(frames) if f.lineno is not None]
        text = "".join(traceback.format_exception(error))
        return self._verdict("error", [finding], traceback=text)

    def _failed(self, findings: "list[Finding]", diagnosis: Any = None) -> "Verdict":
        from ..view.verdict import TileMap

        tiles = None
        if diagnosis is not None and diagnosis.operand is not None:
            tiles = TileMap(diagnosis.operand, diagnosis.tiles)
        return self._verdict("failed", findings, tiles=tiles)

    def passed(self) -> "Verdict":
        from ..view.verdict import gained

        return self._verdict("passed", [], gained=gained(self.figures))

    def _verdict(self, status: str, findings: "list[Finding]", **more: Any) -> "Verdict":
        from ..view.verdict import Verdict

        headline = {"passed": "Right.", "failed": "Not yet.", "error": "Not yet."}[status]
        return Verdict("", status, findings, headline, notes=list(self.notes), figures=self.figures, **more)


_TOO_LATE = (
    "The lens passed this; JAX's TPU simulator, which has the last word, was not done in time. On a busy machine that "
    "says nothing about your kernel: check again when there is less to do."
)
_DISAGREE = (
    "The lens passed this, JAX's TPU simulator did not. One of the two has a bug, most likely the lens: the "
    "simulator's "
    "word counts. Please report it."
)
