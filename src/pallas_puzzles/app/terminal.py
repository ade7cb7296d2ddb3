"""What the command shows on a terminal, or on a pipe: the map, markdown, questions."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from ..course import curriculum
from ..course.progress import Progress, bar, load


class NobodyToAsk(Exception):
    """A question came up where nobody can answer it; the message says what to pass instead."""


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
    text = printable(str(thing))
    if out.is_terminal:
        out.print(text, markup=False)
    else:
        print(text)


def say_laid_out(text: str) -> None:
    """Text whose lines are as wide as they should be."""
    print(printable(text))


def printable(text: str) -> str:
    """The text without letters that the output cannot print."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        from ..text import plain  # it imports JAX

        return plain(text, sys.stdout.encoding)
    return text


def warn(text: str) -> None:
    """One line on stderr."""
    sys.stdout.flush()
    print(f"puzzles: {text}", file=sys.stderr)


def agreed(question: str, yes: bool) -> bool:
    """Asks, and takes yes for an answer. Raises NobodyToAsk where stdin is no terminal and `yes` is not passed."""
    if yes:
        return True
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise NobodyToAsk(f"{question} There is nobody to ask here: pass --yes")
    import typer

    return typer.confirm(question)


def map_lines(state: Progress, width: int, here: str = "") -> list[tuple[str, str]]:
    """(style, line) of the map: every notebook with its bar, and the puzzles of one, by default that of the next."""
    upcoming = state.next()
    books = curriculum.notebooks()
    shown = here or (upcoming.notebook if upcoming else "")
    names = max(len(book.name) for book in books)
    lines = []
    for book in books:
        done, total, hints = state.solved_in(book), len(book.puzzles), state.hints_in(book)
        seen = f"{hints} hint{'' if hints == 1 else 's'}" if hints else ""
        bar_width = 20 if width >= 72 else 8
        line = f"{book.name:{names}}  {bar(done, total, bar_width)} {done:>2}/{total:<2}  {seen:8}  {book.title}"
        if len(line) > width:
            line = line.partition(": ")[0]  # a title whose second half has no room
        lines.append(("green" if done == total else "", _cut(line, width)))
        for each in book.puzzles if book.name == shown else ():
            word = state.word(each)
            counted = state.entry(each.id)["hints"]
            about = f"{'?' * min(counted, 3):3}  {each.title}"
            style = {"next": "bold", "solved": "green", "locked": "dim"}.get(word, "")
            lines.append((style, _cut(f"  {each.number:>4}  {word:6}  {about}", width)))
    return lines


def say_map(state: Progress, here: str = "") -> None:
    out = console()
    for style, line in map_lines(state, columns(), here):
        out.print(line, style=style, markup=False, no_wrap=True, overflow="ignore", crop=False)
    if any(state.entry(each.id)["hints"] for each in curriculum.all_puzzles()):
        out.print("? is a hint that you have seen", style="dim", markup=False)
    out.print(state.advice(), style="bold", markup=False)


def standing_line(puzzle: curriculum.Puzzle) -> str:
    """How far one has come in the notebook of a puzzle."""
    state, book = load(), curriculum.notebook(puzzle.path)
    return f"{book.name}  {bar(state.solved_in(book), len(book.puzzles), 20)}  {state.standing(book)}"


def _cut(line: str, width: int) -> str:
    line = line.rstrip()
    return line if len(line) <= width else f"{line[: width - 3]}..."
