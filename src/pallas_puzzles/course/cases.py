"""What the course asks of an answer: cases/NAME.py, beside the solutions, and the definitions that it refers to."""

import ast
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import signature_of
from .curriculum import CurriculumError, Puzzle, checked, notebook, puzzle, top_functions, until
from .inputs import Question, Subject


def entry(puzzle: Puzzle) -> Callable[[Any], Question] | None:
    """The function puzzle_9 of cases/NAME.py, which makes the question of Puzzle 9; None where there is none.

    It is called with what the notebook defines, as attributes (see `laid`).
    """
    return _functions(puzzle).get(f"puzzle_{puzzle.number}")


def benchmark(puzzle: Puzzle) -> Callable[[Any], Any] | None:
    """The function bench_9 of the same file, which says at what sizes Puzzle 9 is measured, and beside what."""
    return _functions(puzzle).get(f"bench_{puzzle.number}")


def file(puzzle: Puzzle) -> Path:
    """Where the questions of a puzzle's notebook are, if there are any."""
    return puzzle.path.parents[1] / "cases" / f"{puzzle.notebook}.py"


def _functions(puzzle: Puzzle) -> dict[str, Any]:
    path = file(puzzle)
    return _read(path, *signature_of(path)) if path.is_file() else {}


@functools.lru_cache(maxsize=16)
def _read(path: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": f"cases.{path.stem}", "__file__": str(path)}
    exec(compile(path.read_text("utf-8"), str(path), "exec", dont_inherit=True), names)
    return names


def solutions(puzzle: Puzzle) -> dict[str, ast.FunctionDef]:
    """The course's own answers to a puzzle and to those before it, by the name of the hole."""
    return {name: node for each in until(puzzle) for name, node in top_functions(ast.parse(each.solution)).items()}


def other_ways(puzzle: Puzzle) -> Path:
    """Where right answers are that are written in another way, if there are any."""
    return puzzle.path.parents[1] / "solutions" / "other_ways" / f"{puzzle.notebook}.py"


_WAY = re.compile(r"^# Puzzle (\w+): .+$", re.M)


def ways(puzzle: Puzzle) -> Iterator[dict[str, ast.FunctionDef]]:
    """`solutions`, and the same with each of the other ways to solve this puzzle: under a line `# Puzzle 9: in words`,
    the functions that differ."""
    first, path = solutions(puzzle), other_ways(puzzle)
    yield first
    _, *parts = _WAY.split(path.read_text("utf-8")) if path.is_file() else ("",)
    for number, code in zip(parts[::2], parts[1::2], strict=True):
        if number == puzzle.number:
            yield first | top_functions(ast.parse(code))


def laid(
    puzzle: Puzzle,
    functions: Mapping[str, ast.FunctionDef] = {},
    extra: Mapping[str, Any] = {},
    answers: Mapping[str, Any] = {},
    *,
    tuples: bool = False,
) -> dict[str, Any]:
    """What the course's notebook defines, with these functions in its holes, and a reader's answers in the others: the
    reader's own changes do not count.

    tuples: those that have a name are the reader's, too, as theirs and the course's would be of two types.
    """
    book = notebook(puzzle.path)
    names: dict[str, Any] = {**extra, "__name__": book.name}
    for name, code in book.definitions:
        if name in functions:
            module = ast.Module([functions[name]], type_ignores=[])
            code = compile(module, f"<{name}>", "exec", dont_inherit=True)
        elif name in book.holes and name in answers:
            names[name] = answers[name]
            continue
        exec(code, names)
        fields = getattr(names.get(name), "_fields", None)
        if tuples and fields and fields == getattr(answers.get(name), "_fields", None):
            names[name] = answers[name]
    return names


@functools.cache
def official(puzzle_id: str) -> Subject:
    """A puzzle as the course solves it: its function with the solution in the holes, and what is asked of it."""
    known = puzzle(puzzle_id)
    names, asked = laid(known, solutions(known)), entry(known)
    if asked is None:
        raise CurriculumError(f"{puzzle_id} has no entry in cases/{known.notebook}.py")
    return Subject(fn=names[checked(known)], **vars(asked(types.SimpleNamespace(**names))))
