"""Mutants of the course's solutions: wrong answers that nobody had to write, and that every check should refuse.

    uv run puzzles dev mutants matmul/2 [-k TEXT] [--jobs N]

makes small mistakes in the solutions by program, and shows which of them the checks accept. It exits with 1 if a mutant
survives that is not listed as an equivalent, or if a line of that list is stale.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there: its threads wait for one another

import numpy as np

from course import functions
from edits import edits
from pallas_puzzles.course import curriculum, session
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.course.curriculum import CurriculumError, Puzzle
from pallas_puzzles.course.inputs import draw
from pallas_puzzles.course.machines import trace

COLUMNS = ("made", "refused", "equivalent", "survived", "crashed", "stale")
_FILE = "<overlay>"  # the name that session.run gives to code that is laid over the holes


@dataclass(frozen=True)
class Mutant:
    """The solution of a puzzle with one edit in one of its holes."""

    puzzle: str
    hole: str
    line: int  # in solutions/
    edit: str
    code: str  # functions for all holes of the puzzle

    @property
    def key(self) -> str:
        """What it is called in the list of equivalents; it stays as long as the edited text does."""
        return f"{self.puzzle} {self.hole}: {self.edit}"

    @property
    def id(self) -> str:
        return hashlib.sha1(self.key.encode()).hexdigest()[:7]


@dataclass(frozen=True)
class Judged:
    """A mutant and what became of it: "refused", "equivalent", "survived", or "crashed": a bug of the judge."""

    mutant: Mutant
    outcome: str
    words: str  # the first cause of a refusal, the reason of an equivalent, what went wrong


def mutants(puzzle: Puzzle) -> list[Mutant]:
    """Every mutant of a puzzle's solution, in the order of its text."""
    solution = _solution(puzzle)
    values = _values(puzzle, "\n\n".join(text for text, _ in solution.values()))
    made = []
    for hole, (text, first_line) in solution.items():
        for edit in edits(text, values.get(hole, {})):
            code = "\n\n".join(edit.code if name == hole else other for name, (other, _) in solution.items())
            made.append(Mutant(puzzle.id, hole, first_line + edit.line - 1, edit.text, code))
    return made


def judged(made: Sequence[Mutant], equivalents: dict[str, str], jobs: int = 1) -> Iterator[Judged]:
    """The verdict of the course's checks on each mutant, in order."""
    for mutant, (outcome, words) in zip(made, _outcomes(made, jobs), strict=True):
        if outcome == "survived" and mutant.key in equivalents:
            yield Judged(mutant, "equivalent", equivalents[mutant.key])
        else:
            yield Judged(mutant, outcome, words)


def _outcomes(made: Sequence[Mutant], jobs: int) -> Iterator[tuple[str, str]]:
    if jobs == 1:
        yield from map(_outcome, made)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=logging.disable) as pool:
        yield from pool.map(_outcome, made, chunksize=4)


def _outcome(mutant: Mutant) -> tuple[str, str]:
    try:
        verdict = _verdict(mutant.puzzle, mutant.code)
    except CurriculumError as error:
        return "refused", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return ("survived", "") if verdict else ("refused", _why(verdict))


def _verdict(puzzle_id: str, code: str, judge: bool = True) -> Any:
    with collecting(brief=True), contextlib.redirect_stdout(io.StringIO()):
        return session.run(puzzle_id, overlay=code, judge=judge)


def _why(verdict: Any) -> str:
    return verdict.findings[0].cause if verdict.findings else verdict.headline


# ---- the solution ----------------------------------------------------------------------------------------------------


def _solution(puzzle: Puzzle) -> dict[str, tuple[str, int]]:
    """The functions that fill the holes of a puzzle: name -> (source, its first line in solutions/)."""
    path = puzzle.path.parents[1] / "solutions" / f"{puzzle.notebook}.py"
    text = path.read_text("utf-8")
    found = {name: code for name, code in functions(text).items() if name in puzzle.holes}
    if missing := [hole for hole in puzzle.holes if hole not in found]:
        raise CurriculumError(f"{path} has no function {missing[0]}: {puzzle.id} needs it")
    return {name: (code, text[: text.index(code)].count("\n") + 1) for name, code in found.items()}


def _values(puzzle: Puzzle, code: str) -> dict[str, dict[str, str]]:
    """Hole -> expression -> the value that it has most often in the notebook's own example, and in claims about it."""
    trees = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    wanted = {name: _expressions(tree) for name, tree in trees.items()}
    seen = {name: {text: Counter[str]() for text in texts} for name, texts in wanted.items()}

    def returned(program: types.CodeType, offset: int, value: Any) -> Any:
        hole = program.co_qualname.partition(".")[0]
        if program.co_filename != _FILE or hole not in wanted:
            return sys.monitoring.DISABLE
        frame = sys._getframe(1)
        for text, compiled in wanted[hole].items():
            with contextlib.suppress(Exception):  # an inner function does not have all of the names
                seen[hole][text][_told(eval(compiled, {}, frame.f_locals))] += 1
        return None

    verdict = _verdict(puzzle.id, code)
    if not verdict:
        raise CurriculumError(f"the solution of {puzzle.id} does not pass its own check: {_why(verdict)}")
    subject = _verdict(puzzle.id, code, judge=False).subject
    example = subject.cases[0]
    with _on_return(returned):
        trace(subject.fn, *draw(example.inputs, np.random.default_rng(0)), **example.blocks)
        for claim in subject.claims:
            claim.finding()
    often = {name: {text: counts.most_common(1) for text, counts in texts.items()} for name, texts in seen.items()}
    return {
        name: {text: top[0][0] for text, top in texts.items() if top and top[0][0]} for name, texts in often.items()
    }


def _expressions(tree: ast.FunctionDef) -> dict[str, types.CodeType]:
    """The names, sizes and dtypes in a function."""
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and not (isinstance(node, ast.Attribute) and node.attr != "dtype")
        and not (isinstance(node, ast.Subscript) and not ast.unparse(node.value).endswith(".shape"))
    ]
    texts = dict.fromkeys(map(ast.unparse, nodes))
    return {text: compile(text, "<value>", "eval", dont_inherit=True) for text in texts}


def _told(value: Any) -> str:
    """A value as code: a number, a flag, a dtype; 0 for a scalar that the kernel works out, "" for anything else."""
    if isinstance(value, str) or value is None or (callable(value) and not isinstance(value, type)):
        return ""
    if isinstance(value, bool | int | float | np.integer | np.floating):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, np.dtype | type):
        return f"jnp.{np.dtype(value).name}"
    return "0" if getattr(value, "shape", None) == () and np.dtype(value.dtype).kind in "iu" else ""


@contextlib.contextmanager
def _on_return(callback: Any) -> Iterator[None]:
    """Calls callback(code, offset, value), in the frame that returns, for every function that does."""
    monitoring, tool = sys.monitoring, 4
    monitoring.use_tool_id(tool, "mutants")
    try:
        monitoring.register_callback(tool, monitoring.events.PY_RETURN, callback)
        monitoring.set_events(tool, monitoring.events.PY_RETURN)
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


# ---- equivalents -----------------------------------------------------------------------------------------------------


def equivalents_file(notebook: str) -> Path:
    """Where the mutants of a notebook's solutions that are right, too, are listed, each with the reason."""
    return curriculum.course_folder() / "tests" / "equivalent_mutants" / f"{notebook}.txt"


def equivalents(notebook: str) -> dict[str, str]:
    """Key of a mutant -> the reason why it is no mistake. Raises CurriculumError for a line without a reason."""
    path = equivalents_file(notebook)
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines() if path.is_file() else [], start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key, _, reason = line.partition("  # ")
        if not reason.strip() or key in found:
            wrong = "is there twice" if key in found else "has no reason: write two spaces, # and the reason after it"
            raise CurriculumError(f"{path}:{number}: this line {wrong}")
        found[key] = reason.strip()
    return found


def stale(puzzle: Puzzle, results: Sequence[Judged]) -> list[str]:
    """What is listed as an equivalent mutant of a puzzle, and is none: it is not made, or not accepted."""
    alive = {each.mutant.key for each in results if each.outcome == "equivalent"}
    return [key for key in equivalents(puzzle.notebook) if key.startswith(f"{puzzle.id} ") and key not in alive]


# ---- the command -----------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Judges every mutant that is asked for; 1 where one survives or a line is stale."""
    parser = argparse.ArgumentParser(description="Shows which small mistakes in the solutions the checks accept.")
    parser.add_argument("what", nargs="?", default="", metavar="NAME[/N]", help="default: the whole course")
    parser.add_argument(
        "-k", dest="holding", default="", metavar="TEXT", help="only mutants whose hole or edit holds it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes judge")
    asked = parser.parse_args(words)
    try:
        sums = _judge_all(_puzzles(asked.what), asked.holding, asked.jobs)
    except CurriculumError as error:
        parser.error(str(error))
    for name, numbers in [
        ("notebook", COLUMNS),
        *((name, [counts[c] for c in COLUMNS]) for name, counts in sums.items()),
    ]:
        print(f"{name:16}", *(f"{each:>10}" for each in numbers))
    together = sums["together"]
    return int(together["survived"] + together["crashed"] + together["stale"] > 0)


def _judge_all(puzzles: Sequence[Puzzle], holding: str, jobs: int) -> dict[str, Counter[str]]:
    """How many mutants of each notebook, and of all, came to what; prints those that should not be."""
    sums = {name: Counter[str]() for name in [*(each.notebook for each in puzzles), "together"]}
    for puzzle in puzzles:
        made = [each for each in mutants(puzzle) if holding in each.key]
        results = []
        for result in judged(made, equivalents(puzzle.notebook), jobs):
            results.append(result)
            if result.outcome in ("survived", "crashed"):
                print(_line(result), flush=True)
        old = [] if holding else stale(puzzle, results)
        for key in old:
            print(f"stale: {key}", flush=True)
        counts = Counter([each.outcome for each in results]) + Counter(made=len(made), stale=len(old))
        for name in (puzzle.notebook, "together"):
            sums[name].update(counts)
        print(f"{puzzle.id}: {len(made)} mutants, {counts['survived']} survived", file=sys.stderr, flush=True)
    return sums


def _puzzles(what: str) -> list[Puzzle]:
    if what in ("", *(book.name for book in curriculum.notebooks())):
        return [each for each in curriculum.all_puzzles() if what in ("", each.notebook)]
    return [curriculum.puzzle(what)]


def _line(result: Judged) -> str:
    mutant = result.mutant
    place = f"solutions/{mutant.puzzle.partition('/')[0]}.py:{mutant.line}"
    words = f"  ({result.words})" if result.words else ""
    return f"{result.outcome} {mutant.id}  {mutant.key}  [{place}]{words}"


if __name__ == "__main__":
    logging.disable()  # what JAX says of copies that a mutant does not start
    sys.exit(main())
