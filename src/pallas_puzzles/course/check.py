"""One verdict on an answer: what is asked of it, how it is judged, explained, shown and recorded."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..diagnose.corrections import Correction
from ..diagnose.diagnose import ROUGH
from ..diagnose.findings import Finding, Tolerance
from ..diagnose.lookout import Lookout
from ..ir.capture import Programs, pointing_into
from ..lens.machine import listed
from ..view.costs import totals
from ..view.verdict import Verdict, emit
from . import cases, curriculum, isolate
from .arrays import ArrayJudge, Kept
from .claims import Claim
from .collecting import collecting, current, is_brief
from .finale import around, finale
from .guard import Guard, is_ours
from .holes import (
    code_of,
    function_at,
    helpers_of,
    holes_of,
    names_used,
    pointed_into_holes,
    ranges_of,
    untouched,
    unwritten_before,
    why_apart,
)
from .inputs import Budget, Case, Draw, Question, Subject, question
from .judge import CLAIMS, Judge, claimed, draws, judge_cases
from .progress import record
from .reference import course_of, origin_of, seen_in_course
from .told import told, with_origin, with_unused


def check(puzzle: str, fn: Callable[..., Any], *asked: Any, **options: Any) -> Verdict:
    """Judges an answer and says why. Displays the verdict and records it as progress.

    puzzle: its name, "basics/9". fn: the reader's function, arrays -> arrays, block sizes as keyword arguments.
    What is asked of it stands in the course's cases/NAME.py. asked, options: a spec, inputs, and whatever else
    inputs.question takes. They are for puzzles that are not in that file, for kernels outside of the course, and for
    experiments: such a verdict on a puzzle that is in the file is not recorded.
    """
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
    names = ChainMap(getattr(inspect.unwrap(fn), "__globals__", {}), sys._getframe(1).f_globals)
    answer = _Answer(puzzle, known, fn, names, {}, {} if asked else _wanted(puzzle))
    own = question(*asked, **options) if asked else None
    with _garbage_left():
        verdict = _guarded(lambda: answer.verdict(entry, own), answer.guard)
    verdict.puzzle, verdict.title = puzzle, f"{puzzle} {known.title}" if known else puzzle
    verdict.word = _WORDS.get(verdict.status, "not yet." if verdict.findings else "not judged.")
    collection = current()
    if collection is not None:
        collection.verdicts.append(verdict)
    else:
        _show(verdict, answer)
    return verdict


@contextlib.contextmanager
def _garbage_left() -> Iterator[None]:
    """Python seldom looks through all of JAX's objects for garbage, which takes it a third of a second each time."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and 100_000, 50, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@functools.lru_cache(maxsize=1)
def _wanted(puzzle: str) -> Kept:
    """What the course expects in one puzzle, kept while a reader works on it."""
    return {}


_WORDS = {
    "passed": "solved.",
    "unrecorded": "right, but not recorded.",
    "unsolved": "not solved yet.",
    "unjudged": "not judged.",
}


def _show(verdict: Verdict, answer: "_Answer") -> None:
    """Displays a verdict, with where it stands in the course, and records it."""
    guard, finished = answer.guard, None
    told = bool(guard.errors)
    with guard.explaining():
        newly = answer.counts and record(verdict.puzzle, bool(verdict), totals(verdict.figures))
        finished = finale(verdict.puzzle) if newly else None
        if answer.known:
            around(verdict, answer.known, answer.holes)
    if guard.errors and not told:
        guard.tell(verdict)
    for each in (verdict, finished):
        with guard.showing(each):
            if each is not None:
                emit(each)


@dataclasses.dataclass
class _Answer:
    """A reader's function, what is in the holes that it uses, and the names of the notebook around them.

    counts: whether the verdict is progress, or the lack of it.
    """

    puzzle: str
    known: curriculum.Puzzle | None
    fn: Callable[..., Any]
    names: Mapping[str, Any]
    holes: dict[str, types.CodeType]
    wanted: Kept
    rounding: bool = True  # whether results must be rounded as well as the course's
    kind: Programs = dataclasses.field(default_factory=dict)  # of its kernels, see machines.remembered
    counts: bool = False
    guard: Guard = dataclasses.field(default_factory=Guard)

    def verdict(self, entry: Callable[[Any], Question] | None, own: Question | None) -> Verdict:
        """entry: makes the course's question. own: another one, of the reader's."""
        known, collection = self.known, current()
        self.holes = holes_of(known, self.names) if known else {}
        if known and (to_write := untouched(known, self.holes)):
            said = f"Write {listed(to_write)}, where it says YOUR CODE HERE."
            return Verdict(self.puzzle, "unsolved", [], "", next=said)
        given = cases.laid(known, answers=self.names, tuples=True) if known and entry else {}
        asked = own or entry(types.SimpleNamespace(**given))  # type: ignore[misc]
        if collection is not None and not collection.judge:
            verdict = Verdict(self.puzzle, "unjudged", [], "", subject=Subject(fn=self.fn, **vars(asked)))
        else:
            verdict = self._explained(asked)
        if not known or is_brief():
            return verdict
        before: list[str] = []
        apart: list[str] = []
        notes: list[str] = []
        with self.guard.explaining():
            before = unwritten_before(known, self.fn) if verdict.status in ("failed", "error") else []
            apart, notes = why_apart(known, self.fn, asked.spec, own is not None, entry is not None, given, self.names)
        if before:
            said = f"This uses {listed(before)}, where it still says YOUR CODE HERE: write that first."
            verdict = Verdict(self.puzzle, "unsolved", [], "", next=said)
        verdict.notes = [*apart, *verdict.notes, *notes]
        if verdict and apart:
            verdict.status = "unrecorded"
        self.counts = not before and not apart
        return verdict

    def _explained(self, asked: Question) -> Verdict:
        """The verdict, with what has to change, found by trying, and with findings that point at the reader's lines."""
        verdict = self.judged(dataclasses.replace(asked, explain=None) if is_brief() else asked)
        if self.known and not is_brief():
            self._explain(verdict, asked)
        if self.known and verdict and (following := curriculum.next_puzzle(self.puzzle)):
            verdict.next = f"Next: {following.id} {following.title}"
        return verdict

    def judged(self, asked: Question, only: tuple[int, int] | None = None) -> Verdict:
        """The verdict, as it was seen. only: one case and draw of it, and nothing but right or wrong."""
        barred = _barred(self.known, asked)
        helpers = helpers_of(self.known, self.holes, self.names) if self.known else []
        lookout = Lookout({}, {}, ()) if is_brief() else self._lookout(asked.spec, barred, helpers)
        tolerance = None if asked.tol is None else Tolerance(asked.tol)
        answer = self.fn, tolerance, asked.explain, self.guard, lookout, self.wanted
        judge = ArrayJudge(*answer)
        if asked.kernel:
            judge = Judge(*answer, allow=asked.allow, barred=barred, kind=self.kind)
        if self.known and self.rounding:
            judge.also = functools.partial(seen_in_course, self.known.id)
        if self.known and self.rounding and not isolate.is_the_courses(self.known, self.names, names_used(self.fn)):
            judge.course = functools.partial(course_of, self.known.id, asked.spec, tolerance)
        with pointing_into(ranges_of([*self.holes.values(), *helpers])):
            verdict = self._judged(asked, judge, only)
        if self.known and not is_brief():
            with self.guard.explaining():
                # without a kernel, which of several functions it is, nobody knows
                if asked.kernel or len(self.holes) == 1:
                    asked_of = getattr(self.fn, "__name__", "")
                    holes = dict(sorted(self.holes.items(), key=lambda hole: hole[0] != asked_of))
                    verdict.findings = pointed_into_holes(verdict.findings, holes, helpers)
        return verdict

    def _judged(self, asked: Question, judge: ArrayJudge, only: tuple[int, int] | None) -> Verdict:
        first, last = ([c for c in asked.claims if c.last == late] for late in (False, True))
        if only == CLAIMS:
            untrue = claimed([*first, *last], judge)
            return judge.verdict("passed", []) if untrue is None else untrue
        if only is not None:
            return judge_cases(self.puzzle, judge, asked, only)
        untrue = claimed(first, judge)
        verdict = judge_cases(self.puzzle, judge, asked) if untrue is None else untrue
        costly = not is_brief() and {f.kind for f in verdict.findings} == {"budget"}  # a poor choice says why
        poor = claimed(last, judge) if verdict or costly else None
        if poor is not None and (verdict or poor.status == "failed"):
            poor.draw = CLAIMS if verdict else verdict.draw
            return poor
        return judge.confirmed(verdict, asked.spec) if verdict else verdict

    def _explain(self, verdict: Verdict, asked: Question) -> None:
        assert self.known
        if verdict.findings and verdict.findings[0].kind != "time-limit":  # trying takes as long, again and again
            with self.guard.explaining():
                found = self._isolated(verdict, asked)
                # "the mistake is in your one function" is no news
                if len(self.known.holes) == 1 and all(c.whole and c.function in self.known.holes for c in found):
                    found = []
                files = {c.function: code_of(self.names[c.function]).co_filename for c in found}
                formulas = {claim.fn.__name__ for claim in asked.claims} >= set(self.known.holes)
                seen_in = function_at(verdict.findings[0].line, self.holes)
                kind = verdict.findings[0].kind
                verdict.findings = told(verdict.findings, found, files, formulas, seen_in)
                if kind in {"values", "explained"} and all(c.whole for c in found):
                    verdict.findings = self._traced_back(verdict, asked, [c.function for c in found])
                if verdict.findings[0].kind == "model" or not (found and all(c.tried for c in found)):
                    unused = isolate.ignored(self.known, self.names, names_used(self.fn))
                    verdict.findings = with_unused(verdict.findings, unused)
        verdict.findings = [f.but(function=f.function or function_at(f.line, self.holes)) for f in verdict.findings]
        with self.guard.explaining():
            if verdict and not names_used(self.fn) & set(self.known.holes):  # what is checked is not the reader's own
                words = [claim.word() for claim in asked.claims if isinstance(claim, Claim)]
                verdict.gained = " ".join(words) or verdict.gained

    def _traced_back(self, verdict: Verdict, asked: Question, functions: Sequence[str]) -> list[Finding]:
        """The findings, the first where the answer parts from the course's solution, as far as that can be told.

        functions: that are known to be wrong, if any are.
        """
        assert self.known
        where = [each for each in draws(self.puzzle, asked.cases, asked.seed) if each.place == verdict.draw]
        codes = [self.holes[name] for name in functions if name in self.holes] or [*self.holes.values()]
        with pointing_into(ranges_of([*codes, *helpers_of(self.known, self.holes, self.names)])):
            found = origin_of(self.known.id, self.fn, where[0]) if where else None
        return with_origin(verdict.findings, found) if found else verdict.findings

    def _isolated(self, verdict: Verdict, asked: Question) -> list[Correction]:
        """What would have to change in an answer, found by trying."""
        rounding = bool(ROUGH & {f.kind for f in verdict.findings})

        def briefly(fn: Callable[..., Any], asked: Question, only: tuple[int, int] | None) -> Verdict:
            with collecting(brief=True), contextlib.redirect_stdout(io.StringIO()):  # the reader's prints are known
                judged_so = rounding or only is None
                tried = _Answer(self.puzzle, self.known, fn, self.names, {}, self.wanted, judged_so, self.kind)
                return _guarded(lambda: tried.judged(asked, only), tried.guard)

        def smallest() -> Verdict:
            """On the first of the draws, from the smallest on, that is wrong. Most of them have no budget."""
            drawn = [*draws(self.puzzle, asked.cases, asked.seed)] if kinds == {"budget"} else []
            for each in sorted(drawn, key=lambda each: each.size):
                if each.case.budget is not None and not (brief := briefly(self.fn, asked, each.place)):
                    return brief
            return briefly(self.fn, asked, None)

        assert self.known
        used, kinds = names_used(self.fn), {f.kind for f in verdict.findings}
        late = verdict.draw is not None and verdict.draw[1] > 0  # other values of a case are right
        # what a compiler refuses, it refuses of any size
        wrong = verdict if late or kinds == {"lowering"} else smallest()
        if wrong:  # what is wrong shows in no result: the simulator's word, say
            return []
        here = functools.partial(briefly, only=wrong.draw)
        fails = not ROUGH & {f.kind for f in wrong.findings}  # that is looked at in some runs alone

        def everywhere(fn: Callable[..., Any], asked: Question) -> bool:
            return bool(briefly(fn, asked, None) and (not late or here(fn, asked)))

        slipped = kinds != {"budget"}  # a right answer that costs too much
        return isolate.isolated(self.known, self.names, used, here, everywhere, fails, slipped)

    def _lookout(
        self, spec: Callable[..., Any], barred: Mapping[str, str], helpers: Sequence[types.CodeType]
    ) -> Lookout:
        """What looks out for calls of what is barred, in the reader's code."""
        mine = code_of(self.fn)
        codes = [*self.holes.values(), *helpers] or ([mine] if mine is not None else [])
        own = {getattr(inspect.unwrap(spec), "__name__", ""): spec, **self.names}
        specs = {name: own[name] for name, why in barred.items() if why == SPEC_IS_BARRED and name in own}
        course = curriculum.notebook(self.known.path).given if self.known else {}
        spec_code = code_of(spec)
        asking = str(cases.file(self.known)) if self.known else ""

        def given(code: types.CodeType) -> bool:
            outermost = code.co_qualname.partition(".<locals>")[0]
            return code is spec_code or outermost in course or code.co_filename == asking

        return Lookout(barred, specs, codes, given, [*self.names.values()])


SPEC_IS_BARRED = "{name} says what to compute, in jnp; your answer has to compute it itself."
_DOES_THE_WORK = "{name} does the work for you, and this puzzle is about writing it yourself."


def _barred(known: Any, asked: Question) -> dict[str, str]:
    """Name -> why it may not be used. An answer calls neither its own spec nor the specs of the other puzzles."""
    others = [name for name in curriculum.notebook(known.path).given if name.endswith("_spec")] if known else []
    specs = {getattr(inspect.unwrap(asked.spec), "__name__", ""), *others} - {"", "<lambda>"}
    forbid = asked.forbid if isinstance(asked.forbid, Mapping) else dict.fromkeys(asked.forbid, _DOES_THE_WORK)
    return {**dict.fromkeys(sorted(specs), SPEC_IS_BARRED), **forbid}


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
) -> Verdict:
    """Judges one run of `fn(*args, **blocks)` against the expected result, without a puzzle around it.

    allow=None: any work outside of the kernels is fine. confirm: let the TPU front end and JAX's simulator have a say.
    """
    draw = Draw(Case(tuple(args), blocks, budget), want=want)
    judge = Judge(fn, None if tol is None else Tolerance(tol), allow=allow)

    def verdict() -> Verdict:
        found = judge.run_case(draw)
        if found is None and confirm:
            found = judge.confirm(draw, lambda: want)
        return judge.passed() if found is None else found

    return _guarded(verdict, judge.guard)


def _guarded(judged: Callable[[], Verdict], guard: Guard) -> Verdict:
    """The verdict of judged(); where a bug of ours leaves none, one that says only that."""
    try:
        verdict = judged()
    except Exception as error:
        if not is_ours(error):
            raise
        guard.keep(error)
        verdict = Verdict("", "error", [], "Not judged.")
    guard.tell(verdict)
    return verdict
