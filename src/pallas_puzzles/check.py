"""One verdict on an answer: out of the lens, the budget, the TPU front end, and JAX's own simulator."""

import contextlib
import contextvars
import dataclasses
import dis
import functools
import inspect
import re
import secrets
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import ArrayJudge, Explain, expected, explained, keyword_only, keywords_of, quickly_expected
from .inputs import Budget, Case, Input, draw

if TYPE_CHECKING:
    from .claims import Choice, Claim
    from .lens.changes.trial import Example, Examples
    from .lens.findings import Finding, Tolerance
    from .lens.machine import Figures, Run
    from .verdict import Verdict

TIME_LIMIT_S = 20.0
CONFIRM_LIMIT_S = 90.0  # what the lens has passed does end: JAX's simulator may take its time on a busy machine
DRAWS = 3
OTHER_GARBAGE = 0.7  # in the second run of a kernel that reads uninitialised memory: a value like any other


@dataclasses.dataclass
class _Collection:
    verdicts: list["Verdict"]
    thorough: bool
    judge: bool


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a check is about: the reader's function, what it should compute, and what it is run on."""

    fn: Callable[..., Any]
    spec: Callable[..., Any]
    cases: tuple[Case, ...]
    kernel: bool = True


_collection: contextvars.ContextVar[_Collection | None] = contextvars.ContextVar("collection", default=None)


@contextlib.contextmanager
def collecting(*, thorough: bool = False, judge: bool = True) -> Iterator[list["Verdict"]]:
    """While active, verdicts are appended to the list it yields, and neither displayed nor recorded as progress.

    thorough: JAX's simulator confirms every variant, not only the first draw. A collection inside another inherits it.
    judge=False: nothing is run; the verdicts of answers that are there are "unjudged" and carry their Subject.
    """
    outer = _collection.get()
    token = _collection.set(_Collection([], thorough or (outer is not None and outer.thorough), judge))
    try:
        yield _collection.get().verdicts  # type: ignore[union-attr]
    finally:
        _collection.reset(token)


def check(
    puzzle: str,
    fn: Callable[..., Any],
    spec: Callable[..., Any],
    *inputs: Any,
    variants: Sequence[Case] = (),
    budget: Budget | None = None,
    tol: float | None = None,
    rms_tol: float | None = None,
    allow: Sequence[str] = (),
    forbid: Sequence[str] | Mapping[str, str] = (),
    seed: int | None = None,
    kernel: bool = True,
    explain: Explain | None = None,
    explain_cost: Callable[..., str] | None = None,
    claims: "Sequence[Claim | Choice]" = (),
) -> "Verdict":
    """Judges an answer and says why. Displays the verdict and records it as progress.

    puzzle: its name, "basics/9". fn: the reader's function, arrays -> arrays, block sizes as keyword arguments.
    spec: what fn should compute, arrays -> arrays in plain jnp; it is given those keywords of a case that it has, too.
    inputs: Inputs such as normal((24, 512)), or arrays. variants: more inputs and block sizes that fn must get right.
    budget: what it may cost on `inputs`.
    tol: relative tolerance; by default that of the result's dtype (lens.findings.default_tolerance). rms_tol: the same
    for the root mean square of all errors, each within tol: it finds what is rounded once too often. It needs tol.
    allow: names of JAX primitives that may work on arrays outside of the kernels, or of dtypes ("int32"), where all
    work whose results are of them is allowed. forbid: names that the reader's code may not use, because they do the
    puzzle's work, or name -> another reason; also JAX primitives that may not work outside of a kernel, unless on a
    dtype that is allowed: "scatter-add", when several values go to one place. seed: repeats given draws.
    kernel=False: fn is plain array code. It runs under jit; value, shape and dtype must be the spec's. The only budget
    that counts is Budget(operations=, elements=). explain: called as explain(*args, got=, want=, **keywords) when
    values are wrong; it returns what they mean, in words, and a picture as text, either of which may be "".
    explain_cost: called as explain_cost(*args, **keywords) when a kernel is right and over its budget; it returns what
    to say first. If it has a keyword over=, it gets the name of the budget that is exceeded, the grids= of all calls
    and those keywords that it knows, and what it returns takes the place of the advice.
    claims: what functions of the reader's say of a kernel, compared with the kernel before it is judged; and what they
    choose for it, compared with every other choice when it is right (claims.py).
    """
    from . import curriculum
    from .verdict import Verdict, emit

    try:
        known = curriculum.puzzle(puzzle)
    except curriculum.CurriculumError:
        known = None  # a kernel of the reader's own, outside of the course
    title = f"{puzzle} {known.title}" if known else puzzle
    holes = _holes(known, fn, sys._getframe(1).f_globals) if known else {}
    open_holes = _untouched(known, holes) if known else []
    collection = _collection.get()
    cases = (Case(inputs, {}, budget), *variants)
    if open_holes:
        from .lens.machine import listed

        to_write = f"Write {listed(open_holes)}, where it says YOUR CODE HERE."
        verdict = Verdict(puzzle, "unsolved", [], f"{title}: not solved yet.", next=to_write)
    elif collection is not None and not collection.judge:
        verdict = Verdict(puzzle, "unjudged", [], f"{title}: not judged.", subject=Subject(fn, spec, cases, kernel))
    else:
        helpers = _helpers(known, holes, sys._getframe(1).f_globals) if known else []
        barred = {**dict.fromkeys(_specs(known, spec), SPEC_IS_BARRED), **_reasons(forbid)}
        own = getattr(inspect.unwrap(fn), "__code__", None)
        codes = [*holes.values(), *helpers] or ([own] if own is not None else [])
        refused = _forbidden(codes, barred)
        if refused is not None:
            verdict = refused
        elif kernel:
            untrue = _claimed([c for c in claims if not c.last])
            tolerance = _tolerance(tol, rms_tol)
            verdict = (
                untrue
                if untrue is not None
                else _judge(_Judge(fn, tolerance, allow, explain, explain_cost, barred), spec, cases, seed)
            )
            poor = _claimed([c for c in claims if c.last]) if verdict else None
            verdict = poor if poor is not None else verdict
        else:
            verdict = _judge_arrays(ArrayJudge(fn, spec, _tolerance(tol, rms_tol), explain), cases, seed)
        if known and refused is None:
            named = any(re.search(rf"\b{hole}\b", f.cause) for hole in holes for f in verdict.findings)
            if kernel or named or len(holes) == 1:  # which of several functions has made a wrong array, nobody knows
                _point_into_holes(verdict, holes, helpers)
            verdict.notes += _changed(known, holes, (fn, spec))
        verdict.puzzle = puzzle
        verdict.headline = f"{title}: {'solved.' if verdict else 'not yet.'}"
        following = curriculum.next_puzzle(puzzle) if known and verdict else None
        if following:
            verdict.next = f"Next: {following.id} {following.title}"
    if collection is not None:
        collection.verdicts.append(verdict)
        return verdict
    finished = None
    if known and verdict.status != "unsolved":
        from .finale import finale
        from .progress import record
        from .verdict import totals

        newly = record(puzzle, bool(verdict), totals(verdict.figures))
        finished = finale(puzzle) if newly else None
    emit(verdict)
    if finished is not None:
        emit(finished)
    return verdict


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
    judge = _Judge(fn, _tolerance(tol, None), allow)
    verdict = judge.run_case(tuple(args), want, Case(tuple(args), blocks, budget), first=True)
    if verdict is None and confirm:
        verdict = judge.confirm(tuple(args), blocks, want)
    return judge.passed() if verdict is None else verdict


# --- holes -----------------------------------------------------------------------------------------------------------


def _holes(known: Any, fn: Any, caller_globals: dict[str, Any]) -> dict[str, types.CodeType]:
    """The code of the functions that the reader has put into the holes of a puzzle."""
    from . import curriculum

    spaces = [getattr(inspect.unwrap(fn), "__globals__", {}), caller_globals]
    found = {}
    for name in curriculum.pristine_code(known):
        function = next((space[name] for space in spaces if name in space), None)
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


def _changed(known: Any, holes: dict[str, types.CodeType], given: Sequence[Callable[..., Any]]) -> list[str]:
    """A word about given functions that are no longer as they were given."""
    from . import curriculum

    changed = []
    for plain in map(inspect.unwrap, given):
        name, code = getattr(plain, "__name__", ""), getattr(plain, "__code__", None)
        pristine = curriculum.given_codes(known, name) if code is not None and name not in holes else []
        if pristine and code is not None and _program(code) not in map(_program, pristine):
            changed.append(f"{name} was given and has been changed: this is about your version of the puzzle.")
    return changed


def _helpers(known: Any, holes: dict[str, types.CodeType], names: dict[str, Any]) -> list[types.CodeType]:
    """The code of functions that the reader has written beside the holes."""
    from . import curriculum

    files, given = {code.co_filename for code in holes.values()}, curriculum.given_names(known)
    codes = [getattr(value, "__code__", None) for name, value in names.items() if name not in given]
    return [c for c in codes if isinstance(c, types.CodeType) and c.co_filename in files]


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


def _forbidden(codes: Sequence[types.CodeType], names: Mapping[str, str]) -> "Verdict | None":
    """The verdict on code that uses a name which it may not, or None."""
    from .lens.capture import source_line
    from .lens.findings import Finding
    from .verdict import Verdict

    for code in _with_inner(codes):
        used = next((name for name in names if name in code.co_names), None)
        if used is not None:
            cause = names[used].replace("{name}", used)
            line = next((at for at in _lines_of(code, used)), code.co_firstlineno)
            finding = Finding("forbidden", cause, [], source_line(code.co_filename, line))
            return Verdict("", "failed", [finding], "Not yet.")
    return None


def _with_inner(codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """Code objects, and those of the functions defined inside of them."""
    for code in codes:
        yield code
        yield from _with_inner([c for c in code.co_consts if isinstance(c, types.CodeType)])


def _lines_of(code: types.CodeType, name: str) -> Iterator[int]:
    """The lines on which a code object uses a name."""
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.positions and instruction.positions.lineno:
            yield instruction.positions.lineno


_ABOUT_THE_WHOLE = frozenset("budget exchanged rebound".split())


def _point_into_holes(verdict: "Verdict", holes: dict[str, types.CodeType], helpers: Sequence[types.CodeType]) -> None:
    """Findings name a line that the reader has written: not one of what was given around it."""
    from .lens.capture import source_line

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
    from .lens.capture import source_line

    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if word[-1:].isalnum() else re.escape(word))
    lines = (source_line(file, number) for file, first, last in ranges for number in range(first, last + 1))
    yield from (line for line in lines if line and whole.search(line.text) and line.text[:4] != "def ")


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([line for _, _, line in code.co_lines() if line is not None] + inner, default=code.co_firstlineno)


def _program(code: types.CodeType) -> tuple[Any, ...]:
    """What a code object does, whatever file and line it stands in."""
    consts = tuple(_program(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, consts


# --- the judgement ---------------------------------------------------------------------------------------------------


def _claimed(claims: "Sequence[Claim | Choice]") -> "Verdict | None":
    """The verdict on the first claim that is not true, or None."""
    from .verdict import Verdict
    from .watchdog import TimeLimit, time_limit

    for claim in claims:
        try:
            with time_limit(CONFIRM_LIMIT_S, "your function"):  # many plans are tried
                finding = claim.finding()
        except (Exception, TimeLimit) as error:
            return _Judge(lambda: None, None, ())._error(error)
        if finding is not None:
            return Verdict("", "failed", [finding], "Not yet.")
    return None


def _judge(judge: "_Judge", spec: Callable[..., Any], cases: Sequence[Case], seed: int | None) -> "Verdict":
    collection = _collection.get()
    thorough = collection is not None and collection.thorough
    to_confirm = []
    for number, case, i, draw_seed in _draws(cases, seed):
        args = draw(case.inputs, np.random.default_rng(draw_seed))
        first = number == 0 and i == 0
        examples = functools.partial(_examples, judge, spec, cases, number)
        verdict = judge.run_case(
            args, quickly_expected(spec, args, keywords_of(spec, case.blocks)), case, first=first, examples=examples
        )
        if verdict is not None:
            if not first:
                verdict.notes.append(_which(args, case, number, draw_seed))
            return verdict
        if i == 0 and (number == 0 or thorough):
            to_confirm.append((args, case.blocks))
    for args, blocks in to_confirm:
        verdict = judge.confirm(args, blocks, expected(spec, args, keywords_of(spec, blocks)))
        if verdict is not None:
            return verdict
    return judge.passed()


def _most(budget: Budget | None) -> tuple[int | None, int | None]:
    """The bytes and the FLOPs that a case may take."""
    return (budget.hbm_bytes, budget.flops) if budget else (None, None)


_EXAMPLES = 2  # other cases that a change has to put right, too, before it is named
_EXAMPLE_LIMIT_S = 5.0


def _examples(judge: "_Judge", spec: Callable[..., Any], cases: Sequence[Case], wrong: int) -> "list[Example]":
    """An answer's runs on other cases than the one that it is wrong for; without those that fail or take long."""
    from .lens.changes.trial import Example
    from .lens.machine import trace
    from .watchdog import TimeLimit, time_limit

    found: list[Example] = []
    for number, case in enumerate(cases):
        if number == wrong or len(found) == _EXAMPLES:
            continue
        args = draw(case.inputs, np.random.default_rng(0))
        name = f"variant {number}" if number else "the notebook's own example"
        try:
            with time_limit(_EXAMPLE_LIMIT_S, "your kernel"):
                run = trace(judge.fn, *args, **case.blocks)
            want = quickly_expected(spec, args, keywords_of(spec, case.blocks))
            found.append(Example(name, run, want, _most(case.budget)))
        except (Exception, TimeLimit):  # it has nothing to say
            continue
    return found


def _judge_arrays(judge: ArrayJudge, cases: Sequence[Case], seed: int | None) -> "Verdict":
    for number, case, i, draw_seed in _draws(cases, seed):
        args = draw(case.inputs, np.random.default_rng(draw_seed))
        verdict = judge.run_case(args, case)
        if verdict is not None:
            if number or i:
                verdict.notes.append(_which(args, case, number, draw_seed))
            return verdict
    return judge.passed()


def _draws(cases: Sequence[Case], seed: int | None) -> Iterator[tuple[int, Case, int, int]]:
    """(number of the case, the case, number of the draw, its seed): several draws of the first case, one of others."""
    for number, case in enumerate(cases):
        drawn = any(isinstance(x, Input) for x in case.inputs)
        for i in range(DRAWS if number == 0 and drawn else 1):
            yield number, case, i, seed if seed is not None else i if i == 0 else secrets.randbits(32)


def _tolerance(tol: float | None, rms_tol: float | None) -> "Tolerance | None":
    from .lens.findings import Tolerance

    return None if tol is None else Tolerance(tol, rms_tol)


def _which(args: Sequence[Any], case: Case, number: int, seed: int) -> str:
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(np.asarray, args))
    blocks = "".join(f", {k}={v}" for k, v in case.blocks.items())
    what = "other random values" if number == 0 else f"variant {number}"
    return f"The notebook's own example passes. This is {what}: {shapes}{blocks} (seed={seed})."


# Findings after which a result has nothing to say: it has another form, or was never made.
_OTHERWISE_WRONG = frozenset(
    "structure shape dtype map-bounds ref-bounds unvisited revisit never-stored hang unwaited hbm-load "
    "hbm-store".split()
)


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
    ):
        self.fn, self.tolerance, self.allow = fn, tolerance, allow
        self.explain, self.explain_cost = explain, explain_cost
        self.barred = barred
        self.figures: list[Figures] = []
        self.notes: list[str] = []

    def run_case(
        self, args: tuple[Any, ...], want: Any, case: Case, *, first: bool, examples: "Examples" = list
    ) -> "Verdict | None":
        """The verdict on one draw when it is not a pass, else None. examples: makes runs of the other cases."""
        from .budgets import dropped, over_budget
        from .lens.changes import tell_change
        from .lens.costs import without_branches
        from .lens.diagnose import diagnose, explain_barred, explain_outside, too_much_outside
        from .lens.machine import figures
        from .watchdog import TimeLimit

        try:
            run = self._run(args, case.blocks)
        except (Exception, TimeLimit) as error:
            return self._error(error)
        costs = [figures(t) for t in run.traces]
        if first:
            self.figures = costs
        bypass = explain_barred(run.outside, self.barred, self.allow or ())
        if bypass is None and self.allow is not None:
            bypass = explain_outside(run.outside, self.allow)
        no_kernel = self._no_kernel(run) if self.allow is not None else None
        diagnosis = diagnose(run, want, self.tolerance)
        around = [bypass] if bypass and run.calls else [no_kernel, bypass]
        findings = [f for f in around if f] + diagnosis.findings
        picture = self._explained(findings, diagnosis.summary, run, args, case.blocks, want)
        findings = tell_change(findings, run, want, self.tolerance, diagnosis.outputs, examples, _most(case.budget))
        if not findings:
            findings = self._with_other_garbage(run, args, case.blocks, want)
        if not findings:
            findings = dropped(run, case.blocks)
        if not findings and case.budget:
            findings = over_budget(run, costs, case.budget)
            if case.budget.outside_flops is not None:
                outside = too_much_outside(run.outside, case.budget.outside_flops)
                findings[:0] = [outside] if outside else []
            for f in (f for f in findings if f.operand == "calls"):
                f.near = [line for trace in run.traces for line in trace.call.callers]
                f.near += [o.line for o in sorted(run.outside, key=lambda o: -o.flops) if o.line is not None]
            if findings and self.explain_cost is not None:
                self._explain_costs(findings, run, args, case.blocks)
        if not findings:
            return None
        if case.budget and case.budget.branches == 0:
            without_branches(findings)
        verdict = self._failed(findings, diagnosis)
        verdict.figures, verdict.picture = costs, picture
        return verdict

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

        from .lens.diagnose import SEEN_IN_VALUES

        about = next((f for f in findings if f.kind in SEEN_IN_VALUES), None)
        if self.explain is None or not findings or any(f.kind in _OTHERWISE_WRONG for f in findings):
            return ""
        got, want = (jax.tree.map(np.asarray, tree) for tree in (run.outputs, want))
        words, picture = explained(self.explain, args, got, want, {**keyword_only(self.fn), **blocks})
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
        from .lens.findings import Finding

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
        from .lens.diagnose import explain_garbage
        from .lens.findings import GARBAGE_READS
        from .lens.ops import garbage

        if not any(i.kind in GARBAGE_READS for t in run.traces for i in t.incidents):
            return []
        with garbage(OTHER_GARBAGE):
            again = self._run(args, blocks)
        found = explain_garbage(run, again, want, self.tolerance)
        return [found] if found else []

    def _run(self, args: tuple[Any, ...], blocks: dict[str, Any]) -> "Run":
        from .lens.machine import Beyond, Run, trace
        from .simulate import simulate
        from .watchdog import time_limit

        try:
            with time_limit(TIME_LIMIT_S, "your kernel"):
                return trace(self.fn, *args, **blocks)
        except Beyond as e:
            note = f"The lens cannot follow this: {e}. JAX's simulator judges instead."
            if note not in self.notes:
                self.notes.append(note)
            outputs = simulate(self.fn, *args, timeout_s=TIME_LIMIT_S, **blocks)
            return Run([], outputs, [], [], [])

    def confirm(self, args: tuple[Any, ...], blocks: dict[str, Any], want: Any) -> "Verdict | None":
        """The TPU front end and JAX's own simulator: None when both agree with a pass."""
        from .lens.diagnose import diagnose
        from .lens.findings import Finding
        from .lens.machine import Run
        from .simulate import SimulatorTimeout, simulate
        from .tpu.lowering import refusal
        from .watchdog import TimeLimit

        refused = refusal(self.fn, *args, **blocks)
        if refused is not None:
            return self._failed(
                [Finding("lowering", refused.sentence, [refused.detail] if refused.detail else [], refused.line)]
            )
        try:
            outputs = simulate(self.fn, *args, timeout_s=CONFIRM_LIMIT_S, **blocks)
        except (Exception, TimeLimit) as error:
            verdict = self._error(error)
            late = isinstance(error, SimulatorTimeout | TimeLimit)
            verdict.notes.append(_TOO_LATE if late else _DISAGREE)
            return verdict
        findings = diagnose(Run([], outputs, [], [], []), want, self.tolerance).findings
        if not findings:
            return None
        verdict = self._failed(findings)
        verdict.notes.append(_DISAGREE)
        return verdict

    def _no_kernel(self, run: "Run") -> "Finding | None":
        from .lens.findings import Finding

        if run.traces and all(run.from_kernel):
            return None
        if not run.traces and self.notes:
            return None  # beyond the lens
        what = "no pallas_call is reached" if not run.calls else "part of the result does not come out of a pallas_call"
        cause = f"{what}: the work is done outside of a kernel, and this puzzle is about doing it inside."
        return Finding("outside", cause, operand="result" if run.calls else None)

    def _error(self, error: BaseException) -> "Verdict":
        from .lens.capture import source_line
        from .lens.errors import explain_error

        finding, frames = explain_error(error), traceback.extract_tb(error.__traceback__)
        finding.near = [source_line(f.filename, f.lineno) for f in reversed(frames) if f.lineno is not None]
        text = "".join(traceback.format_exception(error))
        return self._verdict("error", [finding], traceback=text)

    def _failed(self, findings: "list[Finding]", diagnosis: Any = None) -> "Verdict":
        from .verdict import TileMap

        tiles = None
        if diagnosis is not None and diagnosis.operand is not None:
            tiles = TileMap(diagnosis.operand, diagnosis.tiles)
        return self._verdict("failed", findings, tiles=tiles)

    def passed(self) -> "Verdict":
        from .verdict import gained

        return self._verdict("passed", [], gained=gained(self.figures))

    def _verdict(self, status: str, findings: "list[Finding]", **more: Any) -> "Verdict":
        from .verdict import Verdict

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
