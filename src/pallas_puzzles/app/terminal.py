"""What the command shows on a terminal, or on a pipe: the map, markdown, questions."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from ..course import curriculum
from ..course.progress import Progress, bar, load
from ..text import plain


def console() -> Any:
    """A rich Console for stdout: colours where it is a terminal that has them and NO_COLOR is not set."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def has_colours() -> bool:
    """Whether that console shows colours, without importing rich: a verdict comes coloured, and should come soon."""
    known = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return known and not os.environ.get("NO_COLOR") and sys.stdout is not None and sys.stdout.isatty()


def columns() -> int:
    """How wide the terminal is; 80 where there is none."""
    return max(shutil.get_terminal_size().columns, 20)


def say_markdown(text: str) -> None:
    """Rendered on a terminal; elsewhere as it is, for programs and files."""
    out = console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text))
    else:
        say_laid_out(text)


def say(thing: Any) -> None:
    """Text as it is, on any terminal: folded between words, and without letters that the output cannot print."""
    out = console()
    if out.is_terminal:
        out.print(printable(str(thing)), markup=False)
    else:
        say_laid_out(str(thing))


def say_laid_out(text: str) -> None:
    """Text whose lines are as wide as they should be."""
    print(printable(text))


def printable(text: str) -> str:
    """The text without letters that the output cannot print."""
    return plain(text, sys.stdout.encoding)


def warn(text: str) -> None:
    """One line on stderr."""
    sys.stdout.flush()
    print(f"puzzles: {text}", file=sys.stderr)


def agreed(question: str, yes: bool) -> bool:
    """Asks, and takes yes for an answer. Raises CurriculumError where nobody can answer and `yes` is not passed."""
    if yes:
        return True
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise curriculum.CurriculumError(f"{question} There is nobody to ask here: pass --yes")
    import click

    return click.confirm(question)


def say_map(state: Progress, here: str = "") -> None:
    """The map: every notebook with its bar, and the puzzles of one, by default that of the next."""
    out = console()
    for style, line in state.lines(columns(), here):
        out.print(line, style=style, markup=False, no_wrap=True, overflow="ignore", crop=False)


def standing_line(puzzle: curriculum.Puzzle) -> str:
    """How far one has come in the notebook of a puzzle."""
    state, book = load(), curriculum.notebook(puzzle.path)
    return f"{book.name}  {bar(state.solved_in(book), len(book.puzzles))}  {state.standing(book)}"


def say_finale(puzzle_id: str) -> None:
    """What was built, if this puzzle has completed its notebook."""
    from ..course.finale import finale

    if finished := finale(puzzle_id):
        print()
        say(finished)
