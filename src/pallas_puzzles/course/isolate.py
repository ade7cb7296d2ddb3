"""Which part of an answer is wrong: it runs again, with ever fewer of its differences from the course's undone."""

import ast
import contextlib
import dataclasses
import inspect
import logging
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..diagnose.corrections import Correction, corrections, followed
from ..diagnose.differences import Difference, Functions, applied, differences, that_matter
from ..diagnose.paired import paired
from ..diagnose.straight import key_of, reads_of, straightened, values_with_names, with_helper
from ..ir.effort import counted
from . import cases, curriculum
from .curriculum import Puzzle
from .holes import as_function, code_of
from .inputs import Question

MOST_RUNS = 30
MOST_INSTRUCTIONS = 120_000  # of these runs, so many that another one begins: two seconds of a laptop
_TO_CHECK = 2  # times as many that it begins for what has been found
_MOST_PLACES = 3


class _Enough(Exception):
    """The trials have taken too long."""


Works = Callable[[Callable[..., Any], Question], bool]


def isolated(
    puzzle: Puzzle,
    names: Mapping[str, Any],
    used: set[str],
    works: Works,
    works_everywhere: Works,
    fails: bool = False,
) -> list[Correction]:
    """What would have to change in an answer for it to work; [] where that can't be told.

    names: the reader's. used: the names that the function uses that is checked. works: whether a function, with what is
    asked of it, gets what the answer gets wrong right. works_everywhere: whether it gets everything right. fails: the
    answer is known not to work.
    """
    written = _answer(puzzle, names, used)
    course = cases.solutions(puzzle)
    extra, own = _extra(puzzle, names), set(puzzle.holes)
    helpers = _helpers(extra, [code_of(names[name]).co_filename for name in written])
    given = curriculum.notebook(puzzle.path).functions | course
    both = {name: paired(node, course[name], helpers, given) for name, node in written.items() if name in course}
    written |= {name: mine for name, (mine, _, _) in both.items()}
    answer = {name: both[name][1] if name in both else straightened(node) for name, node in written.items()}
    right = {name: theirs for name, (_, _, theirs) in both.items()}
    found = differences(answer, right)
    solution = _key(applied(answer, found)) if answer.keys() == set(_holes(puzzle, used)) else None
    known: dict[tuple[str, Works], bool] = {}
    entry = cases.entry(puzzle)
    if entry is None:
        return []

    def runs(functions: Functions, works: Works) -> bool:
        try:
            with _unheard():
                laid = cases.laid(puzzle, functions, extra, names)
                return works(laid[curriculum.checked(puzzle)], entry(types.SimpleNamespace(**laid)))
        except Exception:  # half of one answer and half of another need not fit
            return False

    def tried(functions: Functions, works: Works) -> bool:
        key = _key(functions)
        if (key, works) not in known:  # the course's solution is right; that needs no run
            if key != solution and effort.instructions > MOST_INSTRUCTIONS * (_TO_CHECK if chosen else 1):
                raise _Enough
            known[key, works] = key == solution or runs(functions, works)
        return known[key, works]

    def that_do(*both: Works, needed: Sequence[Difference] = ()) -> list[Difference]:
        def is_right(functions: Functions) -> bool | None:
            try:
                return all(tried(functions, each) for each in both)
            except _Enough:
                return None

        return that_matter(answer, found, is_right, MOST_RUNS, lambda name: name if name in own else "", needed)

    chosen, replaced = list[Difference](), list[Difference]()
    values = {name: values_with_names(node) for name, node in written.items()}

    def say(chosen: Sequence[Difference], named: Mapping[str, Mapping[str, str]], **how: Any) -> list[Correction]:
        for node in helpers.values():  # what is given to it has other names there
            if named and all(_is_in(node, d.line) for d in chosen):
                named = {name: {**known, **_given_to(node, written[name])} for name, known in named.items()}
        found = corrections(answer, chosen, _called(puzzle), named, **how)
        inside = {c: name for c in found for name, node in helpers.items() if _is_in(node, c.line)}
        inside = {c: name for c, name in inside.items() if not any(map(c.contradicts, found))}
        return [dataclasses.replace(c, helper=inside[c]) if c in inside else c for c in found]

    def as_chosen(functions: Functions) -> bool:
        """Whether these are, in one form, the program that has been tried already: the answer with `chosen` undone."""
        there = applied(answer, chosen)
        changed = [n for n in there if there[n] is not answer[n]]
        rest = all(key_of(functions.get(n)) == key_of(written[n]) for n in there if n not in changed)
        forms = {n: paired(functions[n], course[n], helpers, given)[1] for n in changed if n in functions and n in both}
        return rest and forms.keys() == {*changed} and all(key_of(forms[n]) == key_of(there[n]) for n in changed)

    if fails:
        known[_key(answer), works] = False
    with counted() as effort, contextlib.suppress(_Enough):
        if tried(answer, works):  # a draw that shows nothing without the judge of its rounding
            works = works_everywhere
        chosen = that_do(works)
        if chosen and not tried(applied(answer, chosen), works_everywhere):
            enough = that_do(works, works_everywhere, needed=chosen)
            if not enough:  # it is a part of what is wrong
                return [c for c in say(chosen, named=values, tell="where") if not c.whole]
            chosen = enough
        replaced = [d for d in chosen if d.was and d.should]
        ways: list[dict[str, Any]] = [
            {"named": values, "moved": found},
            {"named": values},
            {"named": {}},
            {"named": {}, "names": True},
            {"named": {}, "statements": True},
        ]
        for how in ways:  # what is said is tried as well: a reader who follows it has to get there
            said = say(chosen, **how)
            if len(said) > _MOST_PLACES:
                break
            if len(said) > 1 and not all(c.told for c in said) and len(replaced) < len(chosen):
                continue  # to say what comes or goes is of no help without what is too long to be told
            swapped = {c.function: right[c.function] for c in said if c.whole}
            mended = {**_followed(written, said, helpers), **swapped}
            everywhere = works if as_chosen(mended) else works_everywhere  # what has been tried there runs here, too
            if len(swapped) == len(said) or tried(mended, everywhere):
                return [dataclasses.replace(c, tried=True) for c in said]
    # of what comes and goes, nobody knows that it has to, unless it is all that differs
    rewritten = any(d.whole for d in chosen)
    sure = rewritten or len(chosen) in (len(replaced), len(found))
    said = say(chosen if rewritten else replaced or chosen, named=values, tell="like") if sure else []
    if fails and said and runs(answer, works):  # in one form with the course's, it works
        return []
    if 0 < len(said) <= _MOST_PLACES:
        return said
    # a list of places helps nobody
    names_of = dict.fromkeys(d.function for d in chosen)
    whole = [Difference(name, (), answer[name], right[name], answer[name].lineno) for name in names_of]
    with contextlib.suppress(_Enough):
        for some in [*([each] for each in whole), whole]:
            if 0 < len(some) < len(answer) and tried(applied(answer, some), works_everywhere):
                return say(some, named=values)
    return []


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
    found = {hole: _parsed(names.get(hole)) for hole in _holes(puzzle, used)}
    return {hole: node for hole, node in found.items() if node is not None}


def _holes(puzzle: Puzzle, used: set[str]) -> list[str]:
    """The holes of this puzzle, and those of earlier ones that are used."""
    *earlier, this = curriculum.until(puzzle)
    return [hole for each in earlier for hole in each.holes if hole in used] + list(this.holes)


def _key(functions: Functions) -> str:
    """The same for the same programs, wherever they stand."""
    return "".join(ast.dump(node) for node in functions.values())


def _parsed(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function, with the line numbers of its file; None where there is no source."""
    plain = inspect.unwrap(function) if callable(function) else None
    code = getattr(plain, "__code__", None)
    if code is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)), code.co_filename)
    except (OSError, SyntaxError):
        return None
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    return as_function(tree.body[0])


def _helpers(names: Mapping[str, Any], files: Sequence[str]) -> dict[str, ast.FunctionDef]:
    """Functions that the reader has written in these files beside the holes."""
    codes = {name: getattr(value, "__code__", None) for name, value in names.items()}
    found = {name: _parsed(names[name]) for name, code in codes.items() if code and code.co_filename in files}
    return {name: node for name, node in found.items() if node is not None and node.name == name}


def _is_in(function: ast.FunctionDef, line: int) -> bool:
    return function.lineno <= line <= (function.end_lineno or function.lineno)


def _given_to(helper: ast.FunctionDef, function: ast.FunctionDef) -> dict[str, str]:
    """The names of a function's arguments, by the text of what another one gives it."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == helper.name]
    names = [a.arg for a in helper.args.args]
    return {ast.unparse(value): name for call in calls for value, name in zip(call.args, names, strict=False)}


def _extra(puzzle: Puzzle, names: Mapping[str, Any]) -> dict[str, Any]:
    """What the reader has beside the course's own names: modules, constants, helper functions."""
    given = curriculum.given_names(puzzle)
    return {name: value for name, value in names.items() if name not in given and not name.startswith("__")}


def _called(puzzle: Puzzle) -> dict[str, str]:
    """How to call the functions of earlier puzzles."""
    *earlier, _ = curriculum.until(puzzle)
    return {hole: f"your `{hole}` of Puzzle {each.number}" for each in earlier for hole in each.holes}
