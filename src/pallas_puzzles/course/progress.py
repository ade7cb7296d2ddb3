"""What the reader has solved and which hints they have seen: one small JSON file, shared by notebooks and command."""

from __future__ import annotations

import contextlib
import datetime
import html
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import LOCK_TIMEOUT_S, locked, write_whole
from ..installation import upgrade_line
from ..text import cut, plural
from . import curriculum
from .curriculum import Notebook, Puzzle

VERSION = 1

# {"solved": "2026-01-31T12:00:00Z" | None, "hints": 2, "attempts": 5}, and where there is a reason: "opened": True,
# out of order, and "figures": what the right answer costs (verdict.totals)
Entry = dict[str, Any]
NEW: Entry = {"solved": None, "hints": 0, "attempts": 0}

_Change = Callable[[dict[str, Entry]], object]  # of all entries

_said: set[str] = set()  # notices of this process
_unsaved: list[_Change] = []  # what this process could not write; the next write that works takes it along


class _Unusable(Exception):
    """Progress cannot be recorded; the message says why and what to do."""


@dataclass(frozen=True)
class Progress:
    """What is solved. As text, as HTML, and for the `puzzles` command: the map of notebooks and what is next."""

    puzzles: dict[str, Entry]

    def solved(self, puzzle_id: str) -> bool:
        return bool(self.entry(puzzle_id)["solved"])

    def entry(self, puzzle_id: str) -> Entry:
        return {**NEW, **self.puzzles.get(puzzle_id, {})}

    def solved_in(self, book: Notebook) -> int:
        return sum(self.solved(each.id) for each in book.puzzles)

    def standing(self, book: Notebook) -> str:
        """ "3 of 13 solved"."""
        return f"{self.solved_in(book)} of {len(book.puzzles)} solved"

    def hints_in(self, book: Notebook) -> int:
        return sum(self.entry(each.id)["hints"] for each in book.puzzles)

    def waits_for(self, puzzle: Puzzle) -> Puzzle | None:
        """The puzzle to be solved before this one opens; None when it is open, also because somebody has tried it."""
        entry = self.entry(puzzle.id)
        if entry["solved"] or entry["attempts"] or entry.get("opened"):
            return None
        before = [None, *curriculum.until(puzzle)][-2]
        return before if before and not self.solved(before.id) else None

    def next(self) -> Puzzle | None:
        """The first unsolved puzzle of the notebook that was last solved in, else of the whole course."""
        everything = curriculum.all_puzzles()
        latest = max(everything, key=lambda each: self.entry(each.id)["solved"] or "").notebook
        unsolved = [each for each in everything if not self.solved(each.id)]
        return min(unsolved, key=lambda each: each.notebook != latest, default=None)  # the first of equals

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.lines())

    def lines(self, width: int = 100, here: str = "") -> list[tuple[str, str]]:
        """(style for rich, line) of the map: notebooks, the puzzles of `here` or else of the next one, the advice."""
        upcoming, books = self.next(), curriculum.notebooks()
        shown = here or (upcoming.notebook if upcoming else "")
        names = max(len(book.name) for book in books)
        lines = []
        for book in books:
            done, total, hints = self.solved_in(book), len(book.puzzles), self.hints_in(book)
            seen = plural(hints, "hint") if hints else ""
            drawn = bar(done, total, 20 if width >= 72 else 8)
            line = f"{book.name:{names}}  {drawn} {done:>2}/{total:<2}  {seen:8}  {book.title}"
            if len(line) > width:
                line = line.partition(": ")[0]  # a title whose second half has no room
            lines.append(("green" if done == total else "", line))
            for each in book.puzzles if book.name == shown else ():
                word, counted = self.word(each), self.entry(each.id)["hints"]
                style = {"next": "bold", "solved": "green", "locked": "dim"}.get(word, "")
                lines.append((style, f"  {each.number:>4}  {word:6}  {'?' * min(counted, 3):3}  {each.title}"))
        lines += [("dim", "? is a hint that you have seen")] if any(map(self.hints_in, books)) else []
        return [*((style, cut(line.rstrip(), width)) for style, line in lines), ("bold", self.advice())]

    def _repr_html_(self) -> str:
        upcoming = self.next()
        blocks = []
        for book in curriculum.notebooks():
            words = {each.id: self.word(each).replace("locked", "").replace("open", "") for each in book.puzzles}
            rows = "".join(  # on the page of a notebook everything lies open
                f"<tr><td>{each.number}</td><td style='text-align:left'>{html.escape(each.title)}</td>"
                f"<td style='text-align:left'>{words[each.id]}</td></tr>"
                for each in book.puzzles
            )
            here = " open" if upcoming and upcoming.notebook == book.name else ""
            blocks.append(
                f"<details{here}><summary><code>{book.name}</code> {html.escape(book.title)}: "
                f"{self.standing(book)}</summary><table>{rows}</table></details>"
            )
        return f"<div>{self.drawing()}{''.join(blocks)}<p>{html.escape(self.advice())}</p></div>"

    def drawing(self) -> str:
        """The course as an <img>: a row of tiles per notebook, a tile per puzzle, filled when it is solved."""
        from ..view.draw import image
        from ..view.paper import MONO_EM, card, svg_text

        books = curriculum.notebooks()
        counts = [self.standing(book).removesuffix(" solved") for book in books]
        left = 12 + max(len(book.name) for book in books) * 12 * MONO_EM + 14
        right = left + max(len(book.puzzles) for book in books) * 15 + 8
        marks = []
        for row, (book, count) in enumerate(zip(books, counts, strict=True)):
            y = 12 + 20 * row
            marks += [svg_text(12, y + 11, book.name, 12), svg_text(right, y + 11, count, 12, "muted")]
            for column, each in enumerate(book.puzzles):
                fill, stroke = ("var(--green)",) * 2 if self.solved(each.id) else ("none", "var(--frame)")
                marks.append(
                    f'<rect x="{left + 15 * column + 0.5:.1f}" y="{y + 0.5}" width="12" height="12" rx="2.5" '
                    f'fill="{fill}" stroke="{stroke}"/>'
                )
        words = "; ".join(f"{book.name}: {self.standing(book)}" for book in books)
        return image(card(right + 72, 16 + 20 * len(books), "".join(marks)), f"{words}.")

    def advice(self) -> str:
        """One line: what is next."""
        upcoming = self.next()
        return f"next: {upcoming.id}  {upcoming.title}" if upcoming else "every puzzle is solved"

    def word(self, puzzle: Puzzle) -> str:
        """Where the reader stands with a puzzle: "solved", "next", "open", or "locked" (see `waits_for`)."""
        upcoming = self.next()
        if self.solved(puzzle.id):
            return "solved"
        if upcoming and puzzle.id == upcoming.id:
            return "next"
        return "locked" if self.waits_for(puzzle) else "open"


def bar(done: int, total: int, width: int = 20) -> str:
    """Progress in characters that every terminal has: "####....", full when all is done and only then."""
    filled = round(width * done / total) if total else 0
    filled = min(max(filled, int(done > 0)), width - int(done < total))
    return "#" * filled + "." * (width - filled)


# ---- what the rest of the package calls ------------------------------------------------------------------------------


def state_folder() -> Path:
    """Where progress lives: $PALLAS_PUZZLES_HOME, else the user's data folder."""
    if home := os.environ.get("PALLAS_PUZZLES_HOME"):
        return Path(home).expanduser().absolute()
    import platformdirs

    return platformdirs.user_data_path("pallas-puzzles", appauthor=False)


def load() -> Progress:
    """The map of notebooks and puzzles: what is solved, and what is next.

    Never raises: what cannot be read counts as nothing, and is said once.
    """
    recorded: dict[str, Entry] = {}
    try:
        with _locked():
            recorded = _read()
    except _Unusable as reason:
        _say(str(reason))
        with contextlib.suppress(_Unusable, OSError):
            recorded = _read()  # a folder that cannot be written may still be read
    return Progress(_changed(recorded))


progress = load  # the name in notebooks


def record(puzzle_id: str, solved: bool, figures: Mapping[str, float] | None = None) -> bool:
    """Counts an attempt; a puzzle that is solved once stays solved. True when this is what solved it. Never raises."""
    first, now = False, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"

    def change(entry: Entry) -> None:
        nonlocal first
        entry["attempts"] += 1
        first = solved and not entry["solved"]
        if first:
            entry["solved"] = now
        if solved and figures:
            entry["figures"] = dict(figures)

    _update(puzzle_id, change)
    return first


def record_hint(puzzle_id: str, most: float = math.inf) -> int:
    """Counts one more hint, up to `most`, and returns how many have been seen. Never raises."""
    entry = _update(puzzle_id, lambda entry: entry.update(hints=max(entry["hints"], min(entry["hints"] + 1, most))))
    return int(entry["hints"])


def record_solution_seen(puzzle: Puzzle) -> None:
    """Counts every hint, the last of which is the solution. Never raises."""
    _update(puzzle.id, lambda entry: entry.update(hints=max(entry["hints"], len(puzzle.hints))))


def record_opened(puzzle_id: str) -> None:
    """Opens a puzzle out of order, for good. Never raises."""
    _update(puzzle_id, lambda entry: entry.update(opened=True))


def forget(puzzle_ids: Iterable[str]) -> None:
    """Takes puzzles back to the start: not solved, no hints, no attempts. Never raises."""
    gone = [*puzzle_ids]
    _save(lambda puzzles: [puzzles.pop(each, None) for each in gone])


def hints_left(puzzle: Puzzle) -> int:
    """How many hints the reader has not seen; the last of a puzzle's hints is its solution, and does not count."""
    return max(len(puzzle.hints) - 1 - load().entry(puzzle.id)["hints"], 0)


def next_hint(puzzle: Puzzle, solution: str) -> str:
    """The next hint as markdown, which counts; after the last one, that `solution`, a command, shows the solution."""
    if not puzzle.hints:
        return f"{puzzle.id} has no hints."
    if not hints_left(puzzle):
        return f"You have seen every hint of {puzzle.id}. `{solution}` shows the solution."
    return hint_text(puzzle, record_hint(puzzle.id, most=len(puzzle.hints) - 1))


def hint_text(puzzle: Puzzle, number: int) -> str:
    """One hint as markdown, whether it has been seen or not."""
    total = len(puzzle.hints)
    last = " (the last one)" if number == total else ""
    return f"**{puzzle.id} {puzzle.title}: hint {number} of {total}{last}**\n\n{puzzle.hints[number - 1]}"


# ---- the file --------------------------------------------------------------------------------------------------------


def _update(puzzle_id: str, change: Callable[[Entry], None]) -> Entry:
    """One entry after a change to it."""
    return _save(lambda puzzles: change(puzzles.setdefault(puzzle_id, dict(NEW))))[puzzle_id]


def _save(change: _Change) -> dict[str, Entry]:
    """The entries after a change, made while nobody else makes one; in memory alone where writing is impossible."""
    try:
        with _locked():
            puzzles = _changed(_read(), change)
            _write(puzzles)
            _unsaved.clear()
            return puzzles
    except _Unusable as reason:
        _say(str(reason))
        _unsaved.append(change)
        return load().puzzles


def _changed(recorded: dict[str, Entry], *more: _Change) -> dict[str, Entry]:
    """The entries of the file, with what this process has yet to write."""
    puzzles = {key: {**NEW, **entry} for key, entry in recorded.items()}
    for change in [*_unsaved, *more]:
        change(puzzles)
    return puzzles


def _file() -> Path:
    return state_folder() / "progress.json"


def _read() -> dict[str, Entry]:
    """The entries in the file; a damaged file is moved aside first."""
    path = _file()
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        content = None
    if not _is_valid(content):
        _set_aside(path)
        return {}
    if content["version"] > VERSION:
        raise _Unusable(
            f"{path} was written by a newer pallas-puzzles and is left alone: progress is not recorded; "
            f"`{upgrade_line()}` brings it back"
        )
    return content["puzzles"]


def _is_valid(content: Any) -> bool:
    """Whether `content` is a progress file of this version, or of a newer one."""
    match content:
        case {"version": int(version)} if version > VERSION:
            return True
        case {"version": int(version), "puzzles": dict(puzzles)} if version >= 1:
            return all(map(_is_entry, puzzles.values()))
    return False


def _is_entry(entry: Any) -> bool:
    counts = isinstance(entry, dict) and all(type(entry.get(each, 0)) is int for each in ("hints", "attempts"))
    return counts and isinstance(entry.get("solved"), str | None)


def _set_aside(path: Path) -> None:
    stem = f"{path.name}.damaged-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    names = (path.with_name(stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))
    aside = next(each for each in names if not each.exists())
    path.rename(aside)
    _say(f"{path} is damaged: it is kept as {aside.name}, and progress starts anew")


def _write(puzzles: dict[str, Entry]) -> None:
    text = json.dumps({"version": VERSION, "puzzles": puzzles}, indent=1, sort_keys=True)
    write_whole(_file(), f"{text}\n".encode())


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Holds the lock of the state folder, which it makes where there is none. Files that cannot be used: _Unusable."""
    folder = state_folder()
    if not folder.is_absolute():  # no home: "~" would become a folder of that name
        raise _Unusable("there is no home folder to keep progress in: set PALLAS_PUZZLES_HOME to a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "progress.lock", LOCK_TIMEOUT_S):
            yield
    except TimeoutError:
        raise _Unusable(f"another program holds {folder / 'progress.lock'}: this is not recorded") from None
    except OSError as error:
        raise _Unusable(
            f"{folder} cannot be read and written ({error.strerror}): progress is not recorded; "
            f"set PALLAS_PUZZLES_HOME to a folder of yours"
        ) from None


def _say(notice: str) -> None:
    """One line on stderr, once in a process."""
    if notice not in _said:
        _said.add(notice)
        print(f"pallas-puzzles: {notice}", file=sys.stderr)
