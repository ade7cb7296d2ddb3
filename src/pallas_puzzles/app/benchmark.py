"""`puzzles bench` on this side of the process that measures: its files, what is left of it when it dies, the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..course.curriculum import CurriculumError
from . import terminal
from .worker import Message

if TYPE_CHECKING:
    from ..speed.results import Results

_SUFFIXES = (".csv", ".json", ".svg")


def files(*asked: Path | None) -> list[Path]:
    """Where to write, once it is known that it can be. Raises CurriculumError before anything is measured."""
    for path, suffix in zip(asked, _SUFFIXES, strict=True):
        if path is None:
            continue
        if path.suffix != suffix:
            raise CurriculumError(f"{path} has to end in {suffix}")
        if not path.parent.is_dir():
            raise CurriculumError(f"there is no folder {path.parent} to write {path.name} into: make it first")
    return [path for path in asked if path is not None]


def older(path: Path | None) -> Results | None:
    """The run to compare with. Raises CurriculumError where it cannot be read."""
    if path is None:
        return None
    from ..speed.results import read

    try:
        return read(path)
    except ValueError as error:
        raise CurriculumError(str(error)) from None


def results_of(answer: Message, path: Path) -> Results | None:
    """What was measured: all of it, or what was kept until the process died; None where there is nothing at all."""
    from ..speed.results import of_json

    if "results" in answer:
        return of_json(answer["results"])
    if "none" not in answer or not path.is_file():
        return None
    return kept(path, f"It did not get to its end. {answer['none']}")


def kept(path: Path, why: str) -> Results:
    """The rows that were saved before the end, with a sentence on what ended it."""
    from ..speed.results import Results, read

    results = read(path) if path.is_file() else Results()
    results.note(f"{why} {'What was measured before is kept.' if results else 'Nothing was measured before.'}")
    return results


def has_own(results: Results) -> bool:
    """Whether the reader's own kernel has a time: at one size at least."""
    from ..speed.work import YOURS

    return any(row.who == YOURS and row.median_s is not None for row in results.rows)


def say(results: Results, files: Sequence[Path], old: Results | None) -> None:
    """The table, what has changed, and the files."""
    from ..speed.compare import compared
    from ..speed.show import text

    columns = min(terminal.columns(), 100)
    terminal.say_laid_out(text(results, columns))
    if old is not None:
        terminal.say_laid_out(f"\n{compared(results, old, columns)}")
    for path in files:
        try:
            results.save(path)
            print(f"wrote {path}")
        except OSError as error:
            terminal.warn(f"{path} could not be written: {error.strerror}")
