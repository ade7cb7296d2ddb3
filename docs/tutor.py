"""Builds the notebooks, and what the tutor in .claude knows of each puzzle, from the bank of wrong answers.

`./update_notebooks.sh` runs it. With `--check` it changes nothing, names what is out of date, and exits with 1 if
anything is.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / ".claude" / "skills" / "pallas-tutor"
sys.path.insert(0, str(ROOT / "tests"))

import bank  # noqa: E402
from pallas_puzzles.app.notebooks import in_line, update  # noqa: E402
from pallas_puzzles.course import curriculum  # noqa: E402
from pallas_puzzles.diagnose import errors  # noqa: E402
from pallas_puzzles.diagnose.diagnose import ORDER  # noqa: E402

GENERATED = "<!-- made by docs/tutor.py: change its sources, not this file -->"

# kinds of findings -> what they mean, and the question that leads there
FAMILIES = {
    "correction": (
        "Found by trying: with what the cause names in its place, everything is right. Do not read it out. What does "
        "this line do at the first step, and what at the last?"
    ),
    "structure shape dtype": "The result does not have the form of the spec. What does the spec's signature promise?",
    "garbage unwritten never-stored": (
        "The kernel uses memory that nobody has written. Outputs and scratch start with whatever was there. Who "
        "writes this element first, and at which step?"
    ),
    "unvisited": "A block of the result belongs to no step. How many blocks does it have, and which do the steps name?",
    "partly-stored": (
        "Some steps store nothing, or only a part of the block. Under which condition does the store run?"
    ),
    "stale revisit": (
        "A block comes back after others, and its earlier contents are gone. In which order does the grid walk, and "
        "when does a block leave VMEM?"
    ),
    "overwritten carry": (
        "A running value starts too often, too late, or never. For one block of the result: what is in the buffer "
        "before its first step, and what must be there after its last?"
    ),
    "map-bounds ref-bounds padding": (
        "An index runs past an edge. Index maps count blocks, Refs count elements of a block. Which of the two is "
        "this, and what is the largest value that it takes?"
    ),
    "moved unread unused": (
        "Right numbers in the wrong place, or an input that nobody reads. For step (1, 2): which block should come?"
    ),
    "overflow born": (
        "A number left the range of its dtype. What is the largest exponent, and which rows have nothing to add up?"
    ),
    "rounding": "Rounded too often. In which dtype does the sum grow, and how often is it rounded?",
    "narrow": "Rounded too often. In which dtype does the sum grow, and how often is it rounded?",
    "values input-store": (
        "The result is wrong, or the kernel stores into an input. What does the kernel store, and into which Ref?"
    ),
    "race": (
        "Two write, or one writes and one reads, the same elements, and nothing orders them. TPU: steps of a parallel "
        "axis; what does `parallel` promise to the compiler? GPU: CTAs, warpgroups, copies; who waits for whom?"
    ),
    "unwaited hang copy-shape hbm-load hbm-store": (
        "Copies of the reader's own: not waited for, waited for twice, of two shapes, or HBM touched without one. For "
        "each start, where is its wait?"
    ),
    "early no-wait reused store-in-flight load-in-flight unwaited-load acc-in-flight": (
        "A copy, or a product of a GPU, is on its way while its memory is used. Which call waits for it, and which "
        "line uses the memory next?"
    ),
    "shared-semaphore": (
        "Several copies on their way use one semaphore, which only counts bytes. After this wait, which of them has "
        "arrived for sure?"
    ),
    "no-commit unfenced-read": (
        "GPU: the copy engine and the tensor cores do not see what threads have stored in SMEM. Which call makes it "
        "seen, and between which two lines does it belong?"
    ),
    "deadlock lapped": (
        "GPU: somebody waits at a barrier that has its arrivals no more, or too early. For this barrier: how many "
        "arrivals end a round, who arrives, and how often does each wait?"
    ),
    "bounds output-unwritten": (
        "GPU: an index outside of an array, or elements that no CTA stores. Which rows does CTA 0 take, and which the "
        "last one?"
    ),
    "not-entered no-device": (
        "Several devices: a copy or signal goes to a device that may not be in the kernel yet, or is not on the mesh. "
        "Who copies into this device, and what does it wait for before the first copy?"
    ),
    "left-over unequal": (
        "Several devices: a semaphore keeps signals, or devices return different values where out_specs says the same. "
        "How many signals come, and how many waits? Which axis has nobody summed over?"
    ),
    "smem": "GPU: a CTA holds more SMEM than there is. What is the size of each scratch, times its slots?",
    "budget": "Right answer, but it costs too much. What is counted, and which loop or index map makes it so many?",
    "forbidden outside": (
        "The work is done by a library function, or outside of the kernel. Which part was the puzzle about?"
    ),
    "lowering": (
        "JAX refuses the kernel for a TPU or a GPU. Which rule does the sentence name, and which shape breaks it?"
    ),
}


def mistakes(book: curriculum.Notebook, answers: list[bank.WrongAnswer]) -> str:
    """One table for each puzzle of a notebook: the mistake, and the functions that it is in."""
    parts = [GENERATED, f"# What readers of `{book.name}` get wrong", "For the tutor's eyes: it gives answers away."]
    for puzzle in book.puzzles:
        mine = [each for each in answers if each.puzzle == puzzle.id]
        rows = [f"| {_cell(each.title)} | {', '.join(f'`{name}`' for name in each.functions)} |" for each in mine]
        table = "\n".join(["| the mistake | in |", "|---|---|", *rows])
        parts += [f"## {puzzle.id} {puzzle.title}", f"Holes: {', '.join(f'`{hole}`' for hole in puzzle.holes)}", table]
    return "\n\n".join(parts) + "\n"


def messages() -> str:
    """What the kinds of findings mean, and what JAX's own errors are turned into."""
    parts = [
        GENERATED,
        "# What a verdict says, and what to ask",
        "`kind` of a finding, in the JSON of `puzzles check`.",
    ]
    rows = [f"| {', '.join(kinds.split())} | {_cell(about)} |" for kinds, about in FAMILIES.items()]
    named = {kind for kinds in FAMILIES for kind in kinds.split()}
    others = [kind for kind in ORDER if kind not in named]
    if others:
        rows.append(f"| {', '.join(others)} | Read the cause: it says what to try. Ask for the line that decides it. |")
    parts.append("\n".join(["| kind | what it means, and a question |", "|---|---|", *rows]))
    rows = [f"| {kind} | {_cell(advice)} |" for kind, advice in {k: a for _, k, a in errors._ERRORS}.items()]
    parts += [
        "## Errors from JAX and Python",
        "The reader sees the sentence on the right, not the traceback. It names a rule. Let them say where it applies.",
        "\n".join(["| kind | what the reader is told |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def stale(check: bool = True) -> dict[str, str]:
    """What is not as the bank and the lens say, and what no notebook stands behind: see `in_line`."""
    answers = bank.read_all()
    made = {SKILL / "mistakes" / f"{book.name}.md": mistakes(book, answers) for book in curriculum.notebooks()}
    made[SKILL / "messages.md"] = messages()
    return in_line({path: text.encode() for path, text in made.items()}, SKILL / "mistakes", check, ROOT)


def main() -> int:
    parser = argparse.ArgumentParser("update_notebooks.sh", description="Builds the notebooks, and the tutor's tables.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is out of date")
    check = parser.parse_args().check
    found = {**update(check, root=ROOT), **stale(check)}
    for file, why in found.items():
        print(f"{file}: {why}")
    if not found:
        print("the notebooks and the tutor are up to date")
    else:
        print("run ./update_notebooks.sh" if check else f"updated {len(found)}")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
