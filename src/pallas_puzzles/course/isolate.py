"""Which part of an answer is wrong: it runs again, with ever fewer of its differences from the course's undone."""

import ast
import contextlib
import dataclasses
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..diagnose.corrections import Correction, Names, corrections, followed
from ..diagnose.differences import Difference, Functions, applied, that_matter
from ..diagnose.paired import Form, paired
from ..diagnose.slips import slips
from ..diagnose.straight import (
    is_naming,
    key_of,
    name_of,
    reads_of,
    straightened,
    uses_of,
    values_with_names,
    with_helper,
)
from ..ir.effort import Effort, counted
from ..lens.machine import listed
from ..lens.watchdog import TimeLimit, time_limit
from . import cases, curriculum
from .curriculum import Puzzle
from .holes import code_of, parsed
from .inputs import Question

MOST_RUNS = 30
MOST_INSTRUCTIONS = 120_000  # of these runs, so many that another one begins: two seconds of a laptop
_TO_CHECK = 2  # times as many that it begins for what has been found
_MOST_PLACES = 3
_MOST_SLIPS = 16  # that are tried where nothing that can be told puts all of it right
_SLIP_S = 5.0  # far more than any of them takes; a number in the place of another may make a loop a long one


class _Enough(Exception):
    """The trials have taken too long."""


Works = Callable[[Callable[..., Any], Question], object]  # true of what works
Entry = Callable[[types.SimpleNamespace], Question]


def isolated(
    puzzle: Puzzle,
    names: Mapping[str, Any],
    used: set[str],
    works: Works,
    works_everywhere: Works,
    fails: bool,
    slipped: bool,
) -> list[Correction]:
    """What would have to change in an answer for it to work; [] where that can't be told.

    names: the reader's. used: the names that the function uses that is checked. works: whether a function, with what is
    asked of it, gets what the answer gets wrong right. works_everywhere: whether it gets everything right. fails: the
    answer is known not to work. slipped: a small change of it may be enough.
    """
    entry = cases.entry(puzzle)
    if entry is None:
        return []
    with counted() as effort:
        ways = [_Trials(puzzle, names, used, entry, effort, course) for course in cases.ways(puzzle)]
        tried: list[tuple[_Trials, list[Correction] | None]] = []
        for trials in sorted(ways, key=lambda trials: sum(d.size for d in trials.found)):
            trials.start, said = effort.instructions, None
            if fails:
                trials.known[_key(trials.answer), works] = False
            with contextlib.suppress(_Enough):
                if trials.tried(trials.answer, works):  # a draw that shows nothing without the judge of its rounding
                    works = works_everywhere
                said = _proven(trials, works, works_everywhere)
            tried.append((trials, said))
            if said and all(c.told for c in said):
                break
        else:
            trials, said = tried[0]  # the nearest
        if slipped and not (said and len(said) == 1 and said[0].told):
            said = _slipped(trials, works, works_everywhere) or said
        said = _guessed(trials, works, works_everywhere, fails) if said is None else said
    return [c for c in said if c.said or c.whole]


def is_the_courses(puzzle: Puzzle, names: Mapping[str, Any], used: set[str]) -> bool:
    """Whether all that a reader has written of what is used is the course's own solution."""
    course = {name: node for name, node in cases.solutions(puzzle).items() if name in used}
    return bool(course) and all(key_of(parsed(names.get(name))) == key_of(node) for name, node in course.items())


def ignored(puzzle: Puzzle, names: Mapping[str, Any], used: set[str]) -> list[tuple[str, str]]:
    """The arguments that functions of the reader's never use, and the course's do: (function, argument)."""
    found, course = [], cases.solutions(puzzle)
    for name, mine in _answer(puzzle, names, used).items():
        if name in course:
            both = zip(mine.args.args, course[name].args.args, strict=False)
            read, needed = reads_of(mine), reads_of(course[name])
            found += [(name, a.arg) for a, b in both if b.arg in needed and a.arg not in read and a.arg != "_"]
    return found


def _proven(trials: "_Trials", works: Works, works_everywhere: Works) -> list[Correction] | None:
    """What gets everything right if it is done; of a part of what is wrong, where that is; None where nothing is."""
    chosen = trials.chosen = trials.that_do(works)
    if chosen and not trials.tried(applied(trials.answer, chosen), works_everywhere):
        enough = trials.that_do(works, works_everywhere, needed=chosen)
        if not enough:  # it is a part of what is wrong
            return [c for c in trials.say(chosen, tell="where") if not c.whole]
        chosen = trials.chosen = enough
    trials.enough = bool(chosen)
    both_there = all(d.was and d.should for d in chosen)
    ways: list[dict[str, Any]] = [{"moved": trials.found}, {}, {"named": {}}, {"named": {}, "statements": True}]
    for how in ways:  # what is said is tried as well: a reader who follows it has to get there
        said = _once(trials.say(chosen, **how))
        if len(said) > _MOST_PLACES:
            break
        if len(said) > 1 and not all(c.told for c in said) and not both_there:
            continue  # to say what comes or goes is of no help without what is too long to be told
        mended, swapped = trials.done(said)
        known = trials.is_chosen(mended)  # what has been tried everywhere runs here, too
        if len(swapped) == len(said) or trials.tried(mended, works if known else works_everywhere, anyhow=known):
            needed = _needed(trials, said, works, works_everywhere)
            return [dataclasses.replace(c, tried=True) for c in needed]
    return None


def _needed(trials: "_Trials", said: list[Correction], *both: Works) -> list[Correction]:
    """Of several corrections that get everything right those without which it is not."""
    for c in [*said]:
        rest = [each for each in said if each is not c]
        if rest and all(trials.tried(trials.done(rest)[0], each, anyhow=True) for each in both):
            said = rest
    return said


def _once(said: Sequence[Correction]) -> list[Correction]:
    """The corrections, for each place in the text the first: what stands once may run twice, in a loop or a helper."""
    first: dict[Any, Correction] = {}
    for c in said:
        places = [edit.place for edit in c.edits if edit.old is not None]
        if not any(place in first for place in places):
            first.update(dict.fromkeys(places or [c], c))
    return [*dict.fromkeys(first.values())]


def _slipped(trials: "_Trials", works: Works, works_everywhere: Works) -> list[Correction]:
    """The first small change of a reader's function that gets everything right, whatever the course's looks like."""
    among = {name: trials.written[name] for name in dict.fromkeys(d.function for d in trials.found)}
    read = {name for node in among.values() for name in reads_of(node)}
    among |= {name: node for name, node in trials.helpers.items() if name in read}
    most = trials.effort.instructions + MOST_INSTRUCTIONS // 4
    for slip in itertools.islice(slips(among), _MOST_SLIPS):
        if trials.effort.instructions > most:
            break
        helper = slip.function if slip.function in trials.helpers else ""
        for c in corrections(among, [slip], _called(trials.puzzle), {}):
            if not c.told or c.line != c.last_line:
                continue
            said = [dataclasses.replace(c, helper=helper, tried=True)]
            mended, _ = trials.done(said)
            with contextlib.suppress(TimeLimit), time_limit(_SLIP_S, "a trial"):
                if trials.runs(mended, works) and trials.runs(mended, works_everywhere):
                    return said
    return []


def _guessed(trials: "_Trials", works: Works, works_everywhere: Works, fails: bool) -> list[Correction]:
    """What may be wrong, as far as trying has come."""
    answer, chosen = trials.answer, trials.chosen
    # of what comes and goes, nobody knows that it has to, unless it is all that differs
    replaced, rewritten = [d for d in chosen if d.was and d.should], any(d.whole for d in chosen)
    enough = trials.enough and all(c.told for c in trials.say(chosen))
    sure = rewritten or enough or len(chosen) in (len(replaced), len(trials.found))
    some = chosen if rewritten or enough else replaced or chosen
    some = [d for d in some if d.was or not is_naming(d.should)] or some  # only what is right needs the name
    said = trials.say(some, tell="like") if sure else []
    if fails and said and trials.runs(answer, works):  # in one form with the course's, it works
        return []
    if all(d.was for d in chosen) and not any(c.whole for c in said):
        with contextlib.suppress(_Enough):
            doubted = not trials.tried(trials.done(said)[0], works)  # who does it is not there yet
            said = [dataclasses.replace(c, doubted=doubted) for c in said]
    known = trials.with_known_names(said, some) if len(said) <= _MOST_PLACES else []
    if known:
        return known
    # a list of places helps nobody
    names_of = dict.fromkeys(d.function for d in chosen)
    whole = [Difference(name, (), answer[name], trials.right[name], answer[name].lineno) for name in names_of]
    with contextlib.suppress(_Enough):
        for some in [*([each] for each in whole), whole]:
            if 0 < len(some) < len(answer) and trials.tried(applied(answer, some), works_everywhere):
                return [dataclasses.replace(c, tried=True) for c in trials.say(some)]
    return []


class _Trials:
    """An answer beside the course's, with what trying one with parts of the other has shown.

    written: the reader's functions. extra: what else the reader has, beside the course's own names. answer, right:
    `written` and the course's, in one form. found: their differences. chosen: those that have to be undone, as far as
    is known. enough: whoever undoes them gets everything right. start: the effort when the trials began.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        names: Mapping[str, Any],
        used: set[str],
        entry: Entry,
        effort: Effort,
        course: dict[str, ast.FunctionDef],
    ) -> None:
        self.puzzle, self.names, self.entry, self.effort = puzzle, names, entry, effort
        self.written = _answer(puzzle, names, used)
        theirs = curriculum.notebook(puzzle.path).given
        self.extra = {name: value for name, value in names.items() if name not in theirs and not name.startswith("__")}
        inner = [n for node in self.written.values() for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
        self.local = [n for n in inner if n not in self.written.values() and not n.decorator_list and n.args.args]
        self.helpers = _helpers(self.extra, [code_of(names[name]).co_filename for name in self.written])
        self.course, self.given = course, curriculum.notebook(puzzle.path).functions | course
        mine = {name: node for name, node in self.written.items() if name in course}
        same = [name for name, node in mine.items() if key_of(node) == key_of(course[name])]  # of earlier puzzles
        both = {n: Form(f, f, f, []) if n in same else self._paired(n, f) for n, f in mine.items()}
        self.written |= {name: form.mine for name, form in both.items()}
        self.answer = {n: both[n].answer if n in both else straightened(node) for n, node in self.written.items()}
        self.right = {name: form.right for name, form in both.items()}
        self.found = [d for form in both.values() for d in form.found]
        self.chosen: list[Difference] = []
        self.enough, self.start = False, 0
        self.values = {name: values_with_names(node) for name, node in self.written.items()}
        whole = self.answer.keys() == set(_holes(puzzle, used))
        self.solution = _key(applied(self.answer, self.found)) if whole else None
        self.known: dict[tuple[str, Works], bool] = {}

    def _paired(self, name: str, function: ast.FunctionDef) -> Form:
        return paired(function, self.course[name], self.helpers, self.given)

    def runs(self, functions: Functions, works: Works) -> bool:
        try:
            with _unheard():
                laid = cases.laid(self.puzzle, functions, self.extra, self.names)
                return bool(works(laid[curriculum.checked(self.puzzle)], self.entry(types.SimpleNamespace(**laid))))
        except Exception:  # half of one answer and half of another need not fit
            return False

    def tried(self, functions: Functions, works: Works, anyhow: bool = False) -> bool:
        """Whether a program works. Raises _Enough where enough has been run already, but for one that has to be."""
        key = _key(functions)
        if (key, works) not in self.known:  # the course's solution is right; that needs no run
            most = MOST_INSTRUCTIONS * (_TO_CHECK if self.chosen else 1)
            if key != self.solution and self.effort.instructions - self.start > most and not anyhow:
                raise _Enough
            self.known[key, works] = key == self.solution or self.runs(functions, works)
        return self.known[key, works]

    def that_do(self, *both: Works, needed: Sequence[Difference] = ()) -> list[Difference]:
        """The differences that have to be undone for all of these to hold."""

        def is_right(functions: Functions) -> bool | None:
            try:
                return all(self.tried(functions, each) for each in both)
            except _Enough:
                return None

        groups = {name: name for name in self.puzzle.holes}
        return that_matter(self.answer, self.found, is_right, MOST_RUNS, lambda name: groups.get(name, ""), needed)

    def say(
        self, chosen: Sequence[Difference], named: Mapping[str, Mapping[str, str]] | None = None, **how: Any
    ) -> list[Correction]:
        """The corrections. named: as in corrections(), if these are not the names that the reader has given."""
        named = self.values if named is None else named
        for node in [*self.helpers.values(), *self.local]:  # what is given to it has other names there
            if named and all(_is_in(node, getattr(d.was, "lineno", d.line)) for d in chosen):
                named = {name: self._names_in(node, name, known) for name, known in named.items()}
        found = corrections(self.answer, chosen, _called(self.puzzle), named, **how)
        inside = {c: name for c in found for name, node in self.helpers.items() if _is_in(node, c.line)}
        return [self._with_helper(c, inside.get(c, "")) for c in found]

    def with_known_names(self, said: Sequence[Correction], some: Sequence[Difference]) -> list[Correction]:
        """Those of several corrections, of which nobody knows more, that mean the reader's values by their names.

        Where a value has other names than in the right program, it is not known which of them mean the same.
        """
        crossed: set[tuple[str, str]] = set()
        about_names: set[tuple[int, str]] = set()
        for d in (d for d in some if d.was and d.should and d.path and d.path[-1][0] == "targets"):
            own = {name_of(n) for n in ast.walk(self.written[d.function])} - {"_"}
            other = (uses_of(d.was)[1] ^ uses_of(d.should)[1]) & own
            crossed |= {(d.function, name) for name in other}
            about_names |= {(c.line, c.said) for c in self.say([d], tell="like") if other}
        known = [c for c in said if (c.line, c.said) not in about_names]
        return [c for c in known if not any((c.function, name) in crossed for name in c.new_names)]

    def _names_in(self, helper: ast.FunctionDef, name: str, known: Mapping[str, str]) -> Names:
        """The names that values have in a helper which a function of the reader's calls. known: in that function."""
        nodes = [n for n in ast.walk(self.written[name]) if isinstance(n, ast.Call)]
        calls = [n for n in nodes if getattr(n.func, "id", "") == helper.name]
        given = {ast.unparse(x): a.arg for call in calls for x, a in zip(call.args, helper.args.args, strict=False)}
        uses = [(n, getattr(n, "use", None)) for n in ast.walk(self.answer[name])]
        parts = {ast.unparse(n): use.id for n, use in uses if isinstance(use, ast.Name) and use.id in given}
        return Names({**parts, **known}, given)

    def _with_helper(self, c: Correction, helper: str) -> Correction:
        """helper: the one that the correction is about. A whole function may be wrong in a helper that it calls."""
        called = sorted(self.helpers.keys() & reads_of(self.written[c.function])) if c.whole else []
        more = f" (or {listed([f'`{each}`' for each in called])}, which it calls)" if called else ""
        return dataclasses.replace(c, helper=helper, called=f"{c.called}{more}")

    def done(self, said: Sequence[Correction]) -> tuple[dict[str, ast.FunctionDef], list[str]]:
        """The reader's functions after they have done what they were told, and which of them the course's replace."""
        swapped = {c.function: self.right[c.function] for c in said if c.whole}
        return {**_followed(self.written, said, self.helpers), **swapped}, [*swapped]

    def is_chosen(self, functions: Functions) -> bool:
        """Whether these are, in one form, the program that has been tried already: the answer with `chosen` undone."""
        there = applied(self.answer, self.chosen)
        changed = [n for n in there if there[n] is not self.answer[n]]
        rest = all(key_of(functions.get(n)) == key_of(self.written[n]) for n in there if n not in changed)
        forms = {n: self._paired(n, functions[n]).answer for n in changed if n in functions and n in self.right}
        return rest and forms.keys() == {*changed} and all(key_of(forms[n]) == key_of(there[n]) for n in changed)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What JAX logs of a program that is only tried is nothing that the reader's code has printed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _followed(written: Functions, said: Sequence[Correction], helpers: Functions) -> dict[str, ast.FunctionDef]:
    """The reader's functions, after they have done what they were told; without those where it can't be done.

    What is changed in a helper is changed for all that call it.
    """
    changed = {}
    for name, node in written.items():
        inside = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
        mine = [c for c in said if c.helper in reads_of(node) or (c.function == name and not c.helper)]
        for helper in {c.helper for c in mine} - inside - {""}:
            node = with_helper(node, helpers[helper])
        changed[name] = followed(node, {edit.key: edit for c in mine for edit in c.edits}.values())
    return {name: node for name, node in changed.items() if node is not None}


def _answer(puzzle: Puzzle, names: Mapping[str, Any], used: set[str]) -> dict[str, ast.FunctionDef]:
    """The reader's functions in the holes of this puzzle, and in those of earlier ones that it uses."""
    found = {hole: parsed(names.get(hole)) for hole in _holes(puzzle, used)}
    return {hole: node for hole, node in found.items() if node is not None}


def _holes(puzzle: Puzzle, used: set[str]) -> list[str]:
    """The holes of this puzzle, and those of earlier ones that are used."""
    until = curriculum.until(puzzle)
    return [hole for each in until for hole in each.holes if each.id == puzzle.id or hole in used]


def _key(functions: Functions) -> str:
    """The same for the same programs, wherever they stand."""
    return "".join(ast.dump(node) for node in functions.values())


def _helpers(names: Mapping[str, Any], files: Sequence[str]) -> dict[str, ast.FunctionDef]:
    """Functions that the reader has written in these files beside the holes."""
    codes = {name: getattr(value, "__code__", None) for name, value in names.items()}
    found = {name: parsed(names[name]) for name, code in codes.items() if code and code.co_filename in files}
    return {name: node for name, node in found.items() if node is not None and node.name == name}


def _is_in(function: ast.FunctionDef, line: int) -> bool:
    return function.lineno <= line <= (function.end_lineno or function.lineno)


def _called(puzzle: Puzzle) -> dict[str, str]:
    """How to call the functions of earlier puzzles."""
    *earlier, _ = curriculum.until(puzzle)
    return {hole: f"your `{hole}` of Puzzle {each.number}" for each in earlier for hole in each.holes}
