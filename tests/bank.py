"""Reads the bank of wrong answers, tests/wrong_answers/NAME.py.

A cell is one wrong answer: a header with the puzzle and what is wrong with the answer, what the verdict has to say
about it, and the functions that are laid over the puzzle's holes:

    # %% basics/9: the output is never zeroed
    # first: zero          must occur in the cause of the first finding
    # says: step 0         must occur somewhere in the verdict (may be repeated)
    # not: transposed      must not occur in the verdict (may be repeated)
    def row_sum_kernel(x_ref, o_ref):
        ...
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "wrong_answers"

HEADER = re.compile(r"^# %% (?P<puzzle>\w+/\w+): (?P<title>.+)$")
DEMAND = re.compile(r"^# (?P<kind>first|says|not): (?P<text>.+)$")


@dataclass
class WrongAnswer:
    puzzle: str
    title: str
    where: str  # file and line of the header
    code: str = ""
    first: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    never: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.puzzle}: {self.title}"


def read(path: Path) -> list[WrongAnswer]:
    """The wrong answers of one file, in order; what stands before the first header (imports) belongs to all of them."""
    answers: list[WrongAnswer] = []
    preamble = ""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        where = f"{path.name}:{number}"
        if line.startswith("# %%"):
            header = HEADER.match(line)
            if header is None:
                raise ValueError(f"{where}: {line!r} is not of the form '# %% basics/9: what is wrong with it'")
            answers.append(WrongAnswer(header["puzzle"], header["title"].strip(), where))
        elif not answers:
            preamble += f"{line}\n"
        elif not answers[-1].code and (demand := DEMAND.match(line)):
            texts = {"first": answers[-1].first, "says": answers[-1].says, "not": answers[-1].never}
            texts[demand["kind"]].append(demand["text"].strip())
        elif answers[-1].code or line.strip():
            answers[-1].code += f"{line}\n"
    for answer in answers:
        answer.code = f"{preamble.strip()}\n\n\n{answer.code.strip()}\n".lstrip()
    return answers


def read_all() -> list[WrongAnswer]:
    return [answer for path in sorted(FOLDER.glob("*.py")) for answer in read(path)]
