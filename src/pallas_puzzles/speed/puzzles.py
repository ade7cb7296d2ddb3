"""A puzzle as what is measured: its function at the sizes of cases/NAME.py, beside XLA's program of its spec."""

import dataclasses
import types

from ..course import cases, curriculum
from ..course.inputs import Subject
from . import libraries
from .work import XLA, YOURS, Size, Sizes, Work, narrowed

SOLUTION = "the course's"


def work_of(subject: Subject, puzzle_id: str, *, every_size: bool, own: str = YOURS) -> Work:
    """A reader's answer as it is measured. every_size: all sizes, and dtypes of one byte; else the last size alone."""
    puzzle = curriculum.puzzle(puzzle_id)
    asked = sizes_of(puzzle, subject)
    sizes = asked.sizes if every_size else asked.sizes[-1:]
    accelerator = curriculum.notebook(puzzle.path).accelerator
    known = libraries.peers(subject.spec, sizes[-1].args) if accelerator == "gpu" else {}
    peers = {**asked.peers, **known, XLA: asked.xla or subject.spec}
    work = Work(f"{puzzle.id} {puzzle.title}", subject.fn, sizes, peers, own, accelerator)
    return dataclasses.replace(work, sizes=[*sizes, *narrowed(work)]) if every_size else work


def sizes_of(puzzle: curriculum.Puzzle, subject: Subject) -> Sizes:
    """What bench_9 of cases/NAME.py returns; else what the check runs, which is small."""
    entry = cases.benchmark(puzzle)
    if entry is None:
        return Sizes(*(Size(case.inputs, case.blocks) for case in reversed(subject.cases)))
    names = cases.laid(puzzle, cases.solutions(puzzle))
    return entry(types.SimpleNamespace(**names))


def solutions(book: str, every_size: bool = True) -> list[Work]:
    """The course's own answers to all puzzles of a notebook that have a kernel and a benchmark."""
    found = []
    for puzzle in next(each for each in curriculum.notebooks() if each.name == book).puzzles:
        subject = cases.official(puzzle.id)
        if subject.kernel and cases.benchmark(puzzle) is not None:
            found.append(work_of(subject, puzzle.id, every_size=every_size, own=SOLUTION))
    return found
