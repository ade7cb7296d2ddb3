"""The contract of every puzzle: it has its parts, the solution passes, wrong answers are refused."""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bank
from course import PUZZLES, functions
from pallas_puzzles.course import cases, curriculum, session
from pallas_puzzles.course.arrays import expected, keywords_of
from pallas_puzzles.course.curriculum import Notebook, Puzzle
from pallas_puzzles.course.inputs import Draw, Question, draw
from pallas_puzzles.diagnose.diagnose import diagnose
from pallas_puzzles.lens.machine import Run
from pallas_puzzles.view.verdict import Verdict

judge = importlib.import_module("pallas_puzzles.course.check")  # the module; pallas_puzzles.check is the function in it

BOOKS = curriculum.notebooks()
WRONG_ANSWERS = bank.read_all()
assert WRONG_ANSWERS, "no wrong answer found"

MAX_THEORY_WORDS = 220
MOST_LINES_OF_AN_EDIT = 3

each_puzzle = pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.id)
each_book = pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.name)


def for_gpu(puzzle: Puzzle) -> bool:
    return book_of(puzzle).accelerator == "gpu"


def book_of(puzzle: Puzzle) -> Notebook:
    return next(book for book in BOOKS if book.name == puzzle.notebook)


def markdown(puzzle: Puzzle) -> list[str]:
    """The markdown cells of one puzzle."""
    cells = book_of(puzzle).cells
    return [cell.source for cell in cells if cell.kind == "markdown" and cell.section == puzzle.number]


def theory(puzzle: Puzzle) -> str:
    """The prose under `### Theory`, without code and pictures."""
    (text,) = [source for source in markdown(puzzle) if "### Theory" in source]
    text = text.partition("### Theory")[2]
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "|"))]
    return "\n".join(lines)


# ---- what every puzzle has -------------------------------------------------------------------------------------------


@each_puzzle
def test_a_puzzle_has_its_parts(puzzle: Puzzle) -> None:
    assert puzzle.title
    assert puzzle.goal
    assert puzzle.holes, "no function with # YOUR CODE HERE"
    assert len(puzzle.hints) == 3, "a question that points, the pattern with gaps, the solution"
    assert all(puzzle.hints)
    assert "```python" not in puzzle.hints[0], "the first hint is a question, not code"
    cells = book_of(puzzle).cells
    last = cells[puzzle.check_cell]
    after = [cell for cell in cells[puzzle.check_cell + 1 :] if cell.section == puzzle.number]
    assert last.source.count("check(") == 1
    assert any("<details>" in cell.source for cell in after), "the hints come after the check"


def budget_line(question: Question, fn: Any) -> str:
    """What the check cell says first: its budget, and for which inputs; "" where there is none."""

    def array(x: Any) -> str:
        small = isinstance(x, np.ndarray) and x.dtype.kind == "i" and x.size <= 8
        return str(x.tolist() if small else tuple(x.shape))

    first = question.cases[0]
    if first.budget is None:
        return ""
    costs = {field.name: getattr(first.budget, field.name) for field in dataclasses.fields(first.budget)}
    allowed = ", ".join(f"{name}={cost:_}" for name, cost in costs.items() if cost is not None)
    arrays = [f"{name} {array(x)}" for name, x in zip(inspect.signature(fn).parameters, first.inputs, strict=False)]
    return f"Budget for {', '.join(arrays)}: {allowed}."


@each_puzzle
def test_a_check_is_short_and_says_the_budget(puzzle: Puzzle) -> None:
    if cases.entry(puzzle) is None:
        pytest.skip("the check says all itself")
    *comments, call = book_of(puzzle).cells[puzzle.check_cell].source.splitlines()
    assert call == f'check("{puzzle.id}", {curriculum.checked(puzzle)})'
    assert all(line.startswith("# ") for line in comments)
    official = cases.official(puzzle.id)
    line = budget_line(official, official.fn)
    assert " ".join(comment[2:] for comment in comments).startswith(line)


ONE_VALUE = {  # keywords that have one value in all cases, and why
    "matmul/12 vmem_limit_bytes": "it is handed to the compiler, and changes nothing else",
    "gpu_matmul/9 bm": "two warpgroups of 64 rows each, as wgmma wants them",
    "ladder/4 bq": "the kernel is given",
    "ladder/4 bkv": "the kernel is given",
}


@each_puzzle
def test_keywords_vary(puzzle: Puzzle) -> None:
    """Block sizes, slots and their like: what is written into a kernel in the place of one is wrong somewhere."""
    official = cases.official(puzzle.id)
    parameters = inspect.signature(official.fn).parameters.values()
    for each in [each for each in parameters if each.default not in (each.empty, None)]:
        given = {repr(case.blocks.get(each.name, each.default)) for case in official.cases}
        assert (len(given) > 1) != (f"{puzzle.id} {each.name}" in ONE_VALUE), f"{each.name} is {given} in every case"


@each_book
def test_the_cases_are_those_of_the_puzzles_in_their_order(book: Notebook) -> None:
    file = book.path.parents[1] / "cases" / f"{book.name}.py"
    if not file.is_file():
        pytest.skip("the checks say all themselves")
    tree = ast.parse(file.read_text("utf-8"))
    entries = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("puzzle_")]
    assert entries == [f"puzzle_{puzzle.number}" for puzzle in book.puzzles]
    assert all(cases.entry(puzzle) for puzzle in book.puzzles)


@each_puzzle
def test_the_theory_is_short(puzzle: Puzzle) -> None:
    words = len(theory(puzzle).split())
    assert 20 < words <= MAX_THEORY_WORDS, f"{words} words"


@each_puzzle
def test_a_skeleton_tells_what_it_is_given(puzzle: Puzzle) -> None:
    for hole, source in puzzle.skeletons.items():
        assert ast.parse(source)
        assert "pass  # YOUR CODE HERE" in source, hole


@each_book
def test_names_do_not_collide(book: Notebook) -> None:
    cells = [ast.parse(cell.source).body for cell in book.cells if cell.kind == "code"]
    defined = Counter(node.name for body in cells for node in body if isinstance(node, ast.FunctionDef))
    assert defined
    twice = [name for name, count in defined.items() if count > 1]
    assert not twice, f"defined twice in {book.name}: {twice}"


@each_book
def test_a_notebook_needs_no_badge_or_installer_of_its_own(book: Notebook) -> None:
    text = book.path.read_text("utf-8")
    assert "colab" not in text.lower()
    assert "pip install" not in text


# ---- solved ----------------------------------------------------------------------------------------------------------


@each_puzzle
def test_the_last_hint_is_the_solution(puzzle: Puzzle) -> None:
    solutions = functions((puzzle.path.parents[1] / "solutions" / f"{puzzle.notebook}.py").read_text("utf-8"))
    hinted = functions(puzzle.solution)
    assert set(puzzle.holes) <= set(hinted), "the last hint leaves a hole open"
    for hole in puzzle.holes:
        assert curriculum.ast_equal(hinted[hole], solutions[hole]), f"{hole}: the last hint and solutions/ differ"


@each_book
def test_the_solutions_fill_the_holes_in_order(book: Notebook) -> None:
    tree = ast.parse((book.path.parents[1] / "solutions" / f"{book.name}.py").read_text("utf-8"))
    strangers = [
        ast.unparse(node).splitlines()[0]
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert not strangers, "imports and the functions that fill the holes, nothing else"
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert defined == [hole for puzzle in book.puzzles for hole in puzzle.holes]


def solved(puzzle: Puzzle) -> Verdict:
    return session.run(puzzle.id, overlay=puzzle.path.parents[1] / "solutions" / f"{puzzle.notebook}.py")


@pytest.mark.usefixtures("simulated_once")
@each_puzzle
def test_the_solution_passes(puzzle: Puzzle, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    def also_confirmed(name: str, one: Any, asked: Question, only: Any = None) -> Verdict:
        verdict = as_a_reader(name, one, asked, only)
        if not asked.kernel:
            return verdict
        for case in asked.cases[1:] if verdict and pytestconfig.getoption("--thorough") else []:
            drawn = Draw(case, seed=asked.seed or 0)
            want = expected(asked.spec, drawn.args, keywords_of(asked.spec, case.blocks))
            refused = one.confirm(drawn, lambda want=want: want)
            assert refused is None, str(refused)
        judged.append(name)
        return verdict

    as_a_reader, judged = judge.judge_cases, []
    monkeypatch.setattr(judge, "judge_cases", also_confirmed)
    if not pytestconfig.getoption("--thorough"):  # the course's rounding beside itself: there is nothing to find
        monkeypatch.setattr(judge, "course_of", lambda *_: None)
    verdict = solved(puzzle)
    assert verdict, str(verdict)
    assert verdict.status == "passed"
    assert verdict.gained, "a pass says what was gained"
    assert not verdict.findings
    # of kernels for GPUs, JAX's simulator runs some alone, and says so of the others
    notes = [note for note in verdict.notes if not (for_gpu(puzzle) and "GPU simulator cannot run it" in note)]
    assert not notes, "no solution is beyond the lens"
    assert judged == ([puzzle.id] if cases.official(puzzle.id).kernel else []), (
        "JAX's simulator has its say on every kernel"
    )


BLOCKS_OF_NOBODY = "flash_attention/10"  # in a variant, no query of some blocks sees a key


@pytest.mark.parametrize(
    "puzzle",
    [pytest.param(p, id=p.id, marks=() if p.id == BLOCKS_OF_NOBODY else pytest.mark.thorough) for p in PUZZLES],
)
def test_what_the_solution_does_too_is_no_finding(puzzle: Puzzle) -> None:
    """Judged by a spec that is off by 7, a solution is told that its values are wrong, and nothing else."""
    official = cases.official(puzzle.id)
    spec = official.spec

    def off(*args: Any, **keywords: Any) -> Any:
        return jax.tree.map(lambda x: x if x.dtype == bool else x + jnp.asarray(7, x.dtype), spec(*args, **keywords))

    functools.update_wrapper(off, spec)
    for case in official.cases if official.kernel else ():
        asked = dataclasses.replace(official, spec=off, cases=(case,), forbid=(), claims=(), explain=None)
        answer = judge._Answer(puzzle.id, puzzle, official.fn, {}, {}, {}, rounding=True)
        kinds = {finding.kind for finding in answer.judged(asked).findings}
        assert kinds <= {"values"}, case.about
        assert not answer.guard.errors


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize(
    ("puzzle_id", "ours", "theirs"),
    [("distributed/11c", "back[jnp.argsort(order)]", "jnp.zeros_like(back).at[order].set(back)")],
)
def test_a_right_answer_that_is_written_otherwise_passes(puzzle_id: str, ours: str, theirs: str) -> None:
    solution = curriculum.puzzle(puzzle_id).solution
    assert solution.count(ours) == 1
    verdict = session.run(puzzle_id, overlay=solution.replace(ours, theirs))
    assert verdict, str(verdict)


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize("path", sorted(cases.other_ways(PUZZLES[0]).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_other_ways_to_solve_a_puzzle_pass(path: Path) -> None:
    tried = 0
    for puzzle in curriculum.notebook(path.parents[2] / "puzzles" / path.name).puzzles:
        first, *others = cases.ways(puzzle)
        for way in others:
            verdict = session.run(puzzle.id, overlay="\n\n".join(ast.unparse(way[hole]) for hole in puzzle.holes))
            assert verdict, str(verdict)
            assert way.keys() == first.keys()
            tried += 1
    assert tried == path.read_text("utf-8").count("# Puzzle "), "each is under a line '# Puzzle 9: in words'"


@pytest.mark.skipif(jax.default_backend() != "tpu", reason="needs a TPU: the solutions run compiled there")
@pytest.mark.parametrize("puzzle", [each for each in PUZZLES if not for_gpu(each)], ids=lambda each: each.id)
def test_the_solution_runs_compiled(puzzle: Puzzle) -> None:
    official = cases.official(puzzle.id)
    for case in official.cases:
        args = draw(case.inputs, np.random.default_rng(0))
        outputs = jax.tree.map(np.asarray, official.fn(*map(jnp.asarray, args), **case.blocks))
        want = expected(official.spec, args, keywords_of(official.spec, case.blocks))
        findings = diagnose(Run([], outputs, [], [], []), want).findings
        assert not findings, findings[0].cause


# ---- wrong answers ---------------------------------------------------------------------------------------------------


@each_puzzle
def test_a_puzzle_has_at_least_three_wrong_answers(puzzle: Puzzle) -> None:
    mine = [answer for answer in WRONG_ANSWERS if answer.puzzle == puzzle.id]
    assert len({answer.code for answer in mine}) >= 3
    assert len({answer.title for answer in mine}) == len(mine), "two of them have the same title"


@pytest.mark.parametrize("path", sorted(bank.FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_answer_that_is_an_edit_is_written_as_one(path: Path) -> None:
    """Whoever reads the bank sees what is wrong, and when a solution changes, its edits go with it."""
    solutions = functions((path.parents[2] / "solutions" / path.name).read_text("utf-8"))
    for answer in bank.read(path):
        mine = functions(answer.code)
        if answer.is_edit or not mine.keys() <= solutions.keys():
            continue
        changes = [
            max(i2 - i1, j2 - j1)
            for name, text in mine.items()
            for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
                None, solutions[name].split("\n"), text.split("\n"), autojunk=False
            ).get_opcodes()
            if tag != "equal"
        ]
        assert len(changes) != 1 or changes[0] > MOST_LINES_OF_AN_EDIT, f"{answer.where}: write the edit"


def in_every_run() -> set[str]:
    """One wrong answer of every fifth puzzle, and the same ones in every run."""
    of_a_puzzle: dict[str, list[str]] = {}
    for answer in WRONG_ANSWERS:
        of_a_puzzle.setdefault(answer.puzzle, []).append(str(answer))
    return {min(mine, key=lambda text: zlib.crc32(text.encode())) for mine in [*of_a_puzzle.values()][::5]}


IN_EVERY_RUN = in_every_run()


def thorough(answer: bank.WrongAnswer) -> Any:
    return pytest.param(answer, id=str(answer), marks=() if str(answer) in IN_EVERY_RUN else pytest.mark.thorough)


@pytest.mark.parametrize("answer", [thorough(answer) for answer in WRONG_ANSWERS])
def test_a_wrong_answer_is_refused_and_explained(answer: bank.WrongAnswer) -> None:
    verdict = session.run(answer.puzzle, overlay=answer.code)
    text = str(verdict)
    assert not verdict, f"{answer.where}: accepted\n{text}"
    assert verdict.status in ("failed", "error"), f"{answer.where}\n{text}"
    assert len(text.splitlines()) <= 24, f"{answer.where}: more than a screen\n{text}"
    assert "has a bug" not in text, f"{answer.where}\n{text}\n{verdict.traceback}"
    assert verdict.findings, f"{answer.where}\n{text}"
    assert any(name in text for name in answer.functions), f"{answer.where}: names none of {answer.functions}\n{text}"
    if answer.lines and not answer.elsewhere:
        told = {finding.line.line for finding in verdict.findings if finding.line is not None}
        assert told & answer.lines, f"{answer.where}: names lines {told}, it is {answer.lines}\n{text}"
