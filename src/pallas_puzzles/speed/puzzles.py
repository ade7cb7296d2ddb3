"""A puzzle as what is measured: its function at the sizes of cases/NAME.py, beside XLA's program of its spec."""

import types

from ..course import cases, curriculum
from ..course.inputs import Subject
from .work import XLA, YOURS, Size, Sizes, Work

SOLUTION = "the course's"


def work_of(subject: Subject, puzzle_id: str, *, every_size: bool, own: str = YOURS) -> Work:
    """A reader's answer as it is measured. every_size: the whole sweep, not its last size alone."""
    puzzle = curriculum.puzzle(puzzle_id)
    asked = sizes_of(puzzle, subject)
    sizes = asked.sizes if every_size else asked.sizes[-1:]
    name = f"{puzzle.id} {puzzle.title}"
    peers = {**asked.peers, XLA: asked.xla or subject.spec}
    return Work(name, subject.fn, sizes, peers, own, curriculum.notebook(puzzle.path).accelerator)


def sizes_of(puzzle: curriculum.Puzzle, subject: Subject) -> Sizes:
    """What bench_9 of cases/NAME.py returns; else what the check runs, which is small."""
    entry = cases.benchmark(puzzle)
    if entry is None:
        return Sizes([Size(case.inputs, case.blocks) for case in reversed(subject.cases)])
    names = cases.laid(puzzle, cases.solutions(puzzle), {}, {})
    return entry(types.SimpleNamespace(**names))


def solutions(book: str, every_size: bool = True) -> list[Work]:
    """The course's own answers to all puzzles of a notebook that have a kernel and a benchmark."""
    found = []
    for puzzle in next(each for each in curriculum.notebooks() if each.name == book).puzzles:
        subject = cases.official(puzzle.id)
        if subject.kernel and cases.benchmark(puzzle) is not None:
            found.append(work_of(subject, puzzle.id, every_size=every_size, own=SOLUTION))
    return found
