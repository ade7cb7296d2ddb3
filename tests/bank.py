"""Reads the bank of wrong answers, tests/wrong_answers/NAME.py.

A cell is one wrong answer: a header with the puzzle and what is wrong with the answer, and then how it differs from the
solution, or the functions that are laid over the puzzle's holes:

    # %% basics/9: the output is zeroed at the second step
    # row_sum_kernel: `j == 0` -> `j == 1`

    # %% basics/9: the output is never zeroed
    # row_sum_kernel:
    # -    @pl.when(j == 0)
    # -    def _():
    # -        o_ref[...] = jnp.zeros_like(o_ref)

    # %% basics/9: the sum is taken over the rows
    def row_sum_kernel(x_ref, o_ref):
        ...

What an edit takes away stands once in the function. The verdict has to name one of the functions that differ, and one
of the lines that were edited, unless the cell says `# elsewhere: why`.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from course import PUZZLES, functions

FOLDER = Path(__file__).parent / "wrong_answers"

HEADER = re.compile(r"^# %% (?P<puzzle>\w+/\w+): (?P<title>.+)$")
SMALL = re.compile(r"^# (?P<function>\w+): `(?P<old>.+)` -> `(?P<new>.*)`$")
BLOCK = re.compile(r"^# (?P<function>\w+):$")
ELSEWHERE = re.compile(r"^# elsewhere: (?P<why>.+)$")


@dataclass
class WrongAnswer:
    """One wrong answer. functions: those that differ from the solution. lines: of `code`, those that edits changed."""

    puzzle: str
    title: str
    where: str  # file and line of the header
    code: str = ""
    functions: list[str] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)
    elsewhere: str = ""
    is_edit: bool = False

    def __str__(self) -> str:
        return f"{self.puzzle}: {self.title}"


def read(path: Path) -> list[WrongAnswer]:
    """The wrong answers of one file, in order; what stands before the first header (imports) belongs to all of them."""
    answers: list[WrongAnswer] = []
    bodies: list[list[str]] = [[]]
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        where = f"{path.name}:{number}"
        if line.startswith("# %%"):
            header = HEADER.match(line)
            if header is None:
                raise ValueError(f"{where}: {line!r} is not of the form '# %% basics/9: what is wrong with it'")
            answers.append(WrongAnswer(header["puzzle"], header["title"].strip(), where))
            bodies.append([])
        else:
            bodies[-1].append(line)
    preamble = "\n".join(bodies[0]).strip()
    solutions = functions((path.parents[2] / "solutions" / path.name).read_text("utf-8"))
    for answer, body in zip(answers, bodies[1:], strict=True):
        _fill(answer, body, preamble, solutions)
    return answers


def read_all() -> list[WrongAnswer]:
    return [answer for path in sorted(FOLDER.glob("*.py")) for answer in read(path)]


def _fill(answer: WrongAnswer, body: list[str], preamble: str, solutions: dict[str, str]) -> None:
    holes = next(puzzle.holes for puzzle in PUZZLES if puzzle.id == answer.puzzle)
    edited: dict[str, list[tuple[str, str]]] = {}
    rest = []
    block: tuple[str, list[str], list[str]] | None = None
    for line in [*body, ""]:
        if block and re.match(r"^# ?[-+]", line):
            block[1 if line.startswith("# -") else 2].append(line[3:])
            continue
        if block:
            edited.setdefault(block[0], []).append(("\n".join(block[1]), "\n".join(block[2])))
            block = None
        if small := SMALL.match(line):
            edited.setdefault(small["function"], []).append((small["old"], small["new"]))
        elif named := BLOCK.match(line):
            block = (named["function"], [], [])
        elif elsewhere := ELSEWHERE.match(line):
            answer.elsewhere = elsewhere["why"]
        else:
            rest.append(line)
    code = "\n".join(rest).strip()
    answer.is_edit = bool(edited)
    if not edited:
        answer.code = f"{preamble}\n\n\n{code}\n".lstrip()
        mine = functions(code)
        answer.functions = [f for f, text in mine.items() if ast.dump(ast.parse(text)) != _dump(solutions.get(f, ""))]
        return
    if code:
        raise ValueError(f"{answer.where}: edits of the solution, and other code beside them")
    lines = preamble.split("\n")
    for hole in holes:
        lines += ["", ""]
        text = solutions[hole]
        for old, new in edited.pop(hole, []):
            if text.count(old) != 1:
                raise ValueError(f"{answer.where}: {old!r} stands {text.count(old)} times in {hole}, and not once")
            start = text[: text.index(old)].count("\n")
            text = text.replace(old, new)
            if not set(new.split("\n")) <= set(old.split("\n")):  # else nothing stands where something is missing
                written = text.split("\n")
                after = start + max(old.count("\n"), new.count("\n")) + 1
                while after < len(written) and not written[after].strip():
                    after += 1
                answer.lines |= {len(lines) + n + 1 for n in range(start - 1, after + 1)}  # or beside it
            answer.functions.append(hole)
        lines += text.split("\n")
    if edited:
        raise ValueError(f"{answer.where}: {answer.puzzle} has no hole {', '.join(edited)}")
    answer.code = "\n".join(lines) + "\n"


def _dump(code: str) -> str:
    return ast.dump(ast.parse(code))
