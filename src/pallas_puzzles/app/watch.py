"""`puzzles watch`: the verdict on the puzzle being edited, at every save, and one prompt line below it.

One loop looks at the files, and takes events from two threads: a key, an answer of the worker that runs the file.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..course import curriculum
from ..course.curriculum import CurriculumError, Puzzle
from ..course.progress import forget, load, next_hint, record, record_opened
from ..files import signature_of
from . import pairing, workspace
from .terminal import columns, console, say, say_finale, say_laid_out, say_map, say_markdown, standing_line
from .worker import Message, Worker, judged, request

LOOK_S = 0.05  # how often to look at the files: ten of them take a tenth of a millisecond
SETTLE_NS = 20_000_000  # a file that was written just now may be half written
GONE = (0, 0)
GONE_S = 1.5  # a file may be away for that long without a word: editors rename
SLOW_S = 0.4  # from here on, say that something is running

QUIT = ("q", "\x04")
KEYS = {"n": "next", "h": "hint", "s": "show", "l": "list", "r": "reset", "q": "quit"}


@dataclass
class _File:
    """One file that is watched: how it looked, and its code by puzzle, when it was last looked at."""

    path: Path
    signature: tuple[int, int] | None = None
    code: dict[str, list[str]] = field(default_factory=dict)
    gone_since: float | None = None


class Watch:
    """One session. `only`: the notebook to stay in; `any_order`: locked puzzles are open, too."""

    def __init__(self, folder: Path, puzzle: Puzzle, *, only: str = "", any_order: bool = False) -> None:
        self.folder = folder
        self.puzzle = puzzle
        self.any_order = any_order
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        names = [book.name for book in curriculum.notebooks() if only in ("", book.name)]
        self.files = [_File(half) for name in names for half in pairing.halves(folder, name)]
        self.out = console()
        self.tty = self.out.is_terminal and not self.out.is_dumb_terminal
        self.number, self.asked = 0, ""  # the last request
        self.since: float | None = None  # when it was sent; None: nothing is running
        self.waiting_word = ""  # the line that says that something is running
        self.question: Callable[[], None] | None = None  # what y would do
        self.note = ""  # a word about the next verdict
        self.finished = False

    # -- the loop

    def run(self) -> None:
        """Until q, Ctrl-C, or the end of a terminal."""
        self._look(first=True)
        self.worker = Worker(lambda message: self.events.put(("answer", message)))
        with _keys(self.events):
            try:
                self.check()
                while not self.finished:
                    self._turn()
            finally:
                self.worker.kill()
                if self.tty:
                    print()

    def _turn(self) -> None:
        try:
            kind, what = self.events.get(timeout=LOOK_S)
        except queue.Empty:
            self._look()
            self._say_that_it_runs()
            return
        if kind == "key":
            self._key(what)
        elif kind == "again":
            self._prompt()
        elif what["id"] == self.number and self.since is not None:
            self._answer(what)

    # -- files

    def _look(self, first: bool = False) -> None:
        """Finds what has been saved since the last look, and checks the puzzle that was edited."""
        edited: list[Puzzle | None] = []
        for each in self.files:
            try:
                signature = signature_of(each.path)
            except OSError:
                self._gone(each)
                continue
            each.gone_since = None
            if signature == each.signature:
                continue
            if not first and each.code and (signature[1] == 0 or 0 <= time.time_ns() - signature[0] < SETTLE_NS):
                continue  # it is being written, or was emptied first: the next look finds the rest
            before, known = each.code, each.signature is not None
            each.signature, each.code = signature, pairing.by_puzzle(each.path, "code")
            if not first and pairing.current(self.folder, each.path.stem) == each.path:
                edited.append(self._edited(each, before) if known else None)
        if not edited:
            return
        puzzle = next((each for each in edited if each), self.puzzle)
        locked = self._locked(puzzle) if puzzle.id != self.puzzle.id else ""
        self.puzzle = self.puzzle if locked else puzzle
        self.check(f"{locked} This is about {self.puzzle.id}:" if locked else "")

    def _edited(self, file: _File, before: dict[str, list[str]]) -> Puzzle | None:
        """The puzzle whose code is another than before; None where that is not one, or the current one is among them.

        A save without a change is about the puzzle that one is at, if it is in that file.
        """
        changed = [key for key in {*before, *file.code} - {""} if before.get(key) != file.code.get(key)]
        here = file.path.stem == self.puzzle.notebook
        if (here and self.puzzle.number in changed) or len(changed) != 1:
            return None
        try:
            return curriculum.puzzle(f"{file.path.stem}/{changed[0]}")
        except CurriculumError:
            return None  # a puzzle of the reader's own

    def _locked(self, puzzle: Puzzle) -> str:
        """Why a puzzle is not open, "" if it is."""
        first = None if self.any_order else load().waits_for(puzzle)
        opens = f"`puzzles watch {puzzle.id} --any` opens it now."
        return f"{puzzle.id} opens when {first.id} is solved; {opens}" if first else ""

    def _gone(self, file: _File) -> None:
        file.gone_since = file.gone_since or time.monotonic()
        if file.signature not in (None, GONE) and time.monotonic() - file.gone_since > GONE_S:
            file.signature = GONE
            self._say(f"{file.path} is gone. It is checked again when it is back; `puzzles init` makes a new one.")

    # -- checking

    def check(self, note: str = "") -> None:
        """Has the current puzzle checked; what runs already is about an older text, and is stopped."""
        self.question = None
        if self.since is not None:
            self.worker.stop()
            self.since = None
        self.note = note
        self._ask("check")

    def _ask(self, what: str) -> None:
        try:
            path = workspace.current_file(self.folder, self.puzzle.notebook)
        except workspace.WorkspaceError as error:
            return self._say(str(error))
        self.number, self.asked = self.number + 1, what
        self.since = time.monotonic()
        self.waiting_word = ""
        self.worker.ask(request(self.number, what, self.puzzle.id, path))

    def _say_that_it_runs(self) -> None:
        if self.since is None or time.monotonic() - self.since < SLOW_S:
            return
        passed_s = int(time.monotonic() - self.since)
        words = f"checking {self.puzzle.id} ... {passed_s} s (x stops it, q quits)"
        if self.tty and words != self.waiting_word:
            self._erase_line()
            print(words[: columns() - 1], end="", flush=True)
        elif self.number == 1 and not self.waiting_word:
            self._line(f"checking {self.puzzle.id} ... (the first time takes a few seconds)")
        self.waiting_word = words

    def _answer(self, answer: Message) -> None:
        self.since = None
        self.question = None
        if "wrong" in answer:
            self._clear()
            self._line(answer["wrong"])
        elif self.asked == "show":
            self._erase_line()
            say(answer.get("picture") or f"Nothing to show yet. {judged(self.puzzle.id, answer)['text']}")
        else:
            self._verdict(answer)
        self._prompt()

    def _verdict(self, answer: Message) -> None:
        answer = judged(self.puzzle.id, answer)
        verdict = answer["verdict"]
        self._clear()
        say_laid_out(answer["text"])
        if answer["printed"].strip():
            self._line(f"\nprinted by your code:\n{answer['printed'].rstrip()}")
        if self.note:
            self._line(f"\n{self.note}")
        if verdict["status"] == "unsolved":
            self._line(f"\nGoal: {self.puzzle.goal}")
            if path := pairing.current(self.folder, self.puzzle.notebook):
                print(f"{path}:{hole_line(path, self.puzzle)}")  # as it is, for a terminal that opens what is clicked
        elif "totals" in answer and record(verdict["puzzle"], verdict["passed"], answer["totals"]):
            say_finale(self.puzzle.id)
        self._pair()
        self._line(f"\n{standing_line(self.puzzle)}")

    def _pair(self) -> None:
        """The other half follows, after the verdict: nobody should wait for it."""
        pair = pairing.sync(self.folder, self.puzzle.notebook)
        for each in self.files:  # what we have just written is no save of the reader's
            if each.path.stem == self.puzzle.notebook and pair is not None and each.path != pair.current:
                with contextlib.suppress(OSError):
                    each.signature, each.code = signature_of(each.path), pairing.by_puzzle(each.path, "code")
        if pair is not None and pair.problem:
            self._line(f"\n{pair.problem}")

    # -- keys

    def _key(self, key: str) -> None:
        question, self.question = self.question, None
        if key in QUIT or not key:
            self.finished = True
        elif question is not None:
            self._erase_line()
            question() if key.lower() == "y" else self._say("Nothing is reset.")
        elif self.since is not None and key == "x":
            self.worker.stop()
            self.since = None
            self._erase_line()
            self._say(f"The check of {self.puzzle.id} is stopped. Save again, or press c, to check again.")
        elif self.since is not None and key in "sc\r\n":
            return  # one thing at a time
        elif key in "\r\nc":
            self.check()
        elif key in KEYS:
            self._erase_line()
            getattr(self, f"_{KEYS[key]}")()
        else:
            self._erase_line()
            self._prompt()

    def _next(self) -> None:
        """Goes on, when asked, to the next puzzle that is not solved and open."""
        following = next_after(self.puzzle, load().solved)
        if following is None:
            return self._say("There is no puzzle left: all of them are solved.")
        if locked := self._locked(following):
            return self._say(locked)
        if not any(each.path.stem == following.notebook for each in self.files):
            return self._say(f"{following.notebook} is another notebook: `puzzles watch {following.notebook}`")
        if load().waits_for(following):
            record_opened(following.id)
        self.puzzle = following
        return self.check()

    def _hint(self) -> None:
        say_markdown(next_hint(self.puzzle, f"puzzles solution {self.puzzle.id}"))
        self._prompt()

    def _show(self) -> None:
        self._ask("show")

    def _list(self) -> None:
        say_map(load(), here=self.puzzle.notebook)
        self._prompt()

    def _reset(self) -> None:
        self.question = self._really_reset
        for line in workspace.losses(self.folder, [self.puzzle]):
            self._line(line)
        print(f"Reset {self.puzzle.id}? [y/N] ", end="", flush=True)

    def _really_reset(self) -> None:
        try:
            kept = workspace.reset(self.folder, self.puzzle)
        except CurriculumError as error:
            return self._say(str(error))
        forget([self.puzzle.id])
        self._look(first=True)
        return self.check(f"{self.puzzle.id} is as it was at the start. Your file of before: {kept[0]}")

    # -- the screen

    def _prompt(self) -> None:
        if self.since is not None or self.finished:
            return
        word = f"{self.puzzle.id}  "
        long = " ".join(f"{key}:{name}" for key, name in KEYS.items())
        short = " ".join(KEYS.values())
        line = next((each for each in (f"{word}{long} ", f"{long} ") if len(each) < columns()), f"{short} ")
        self.out.print(line, end="" if self.tty else "\n", style="reverse" if self.tty else "", markup=False)
        sys.stdout.flush()

    def _say(self, words: str) -> None:
        self._line(words)
        self._prompt()

    def _line(self, words: str) -> None:
        if self.waiting_word:
            self._erase_line()
        say(words)
        sys.stdout.flush()

    def _erase_line(self, control: str = "\r\x1b[2K") -> None:
        self.waiting_word = ""
        if self.tty:
            print(control, end="", flush=True)

    def _clear(self) -> None:
        self._erase_line("\x1b[2J\x1b[H")


# ---- what a file says ------------------------------------------------------------------------------------------------


def hole_line(path: Path, puzzle: Puzzle) -> int:
    """The line of a file at which the first hole of a puzzle is, filled or not; 1 where it is not found."""
    with contextlib.suppress(CurriculumError):
        cells = [each for each in curriculum.read_cells(path) if each.kind == "code" and each.section == puzzle.number]
        for cell in cells:
            for number, line in enumerate(cell.source.splitlines()):
                if any(line.startswith(f"def {hole}(") for hole in puzzle.holes):
                    return cell.line + number
    return 1


def next_after(puzzle: Puzzle, solved: Callable[[str], bool]) -> Puzzle | None:
    """The next unsolved puzzle after this one, from the top again after the last; None when there is no other."""
    everything = curriculum.all_puzzles()
    here = [each.id for each in everything].index(puzzle.id)
    order = everything[here + 1 :] + everything[:here]
    return next((each for each in order if not solved(each.id)), None)


# ---- where events come from ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _keys(events: queue.Queue[tuple[str, Any]]) -> Iterator[None]:
    """Puts ("key", letter) for every key, without Enter where stdin is a terminal; "" at the end of a terminal."""
    stdin = sys.stdin
    if stdin is None or stdin.closed:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: events.put(("key", "q")))
    with _raw(stdin, events) as read:

        def listen() -> None:
            while key := read():
                if stdin.isatty() or not key.isspace():
                    events.put(("key", key))
                if key in QUIT:
                    return  # what is typed next is for the shell
            if stdin.isatty():
                events.put(("key", ""))

        threading.Thread(target=listen, daemon=True).start()
        yield


@contextlib.contextmanager
def _raw(stdin: Any, events: queue.Queue[tuple[str, Any]]) -> Iterator[Callable[[], str]]:
    """A function that waits for one key. While it is there the terminal does not wait for Enter, nor show the keys.

    A library such as readchar sets the terminal anew for each key, and knows nothing of a shell that has stopped us.
    """
    if not stdin.isatty():
        yield lambda: stdin.read(1)
    elif sys.platform == "win32":
        import msvcrt

        yield msvcrt.getwch
    else:
        import termios
        import tty

        handle = stdin.fileno()
        before = termios.tcgetattr(handle)

        def again(*_: Any) -> None:  # the shell has taken its own settings back while we were stopped
            tty.setcbreak(handle, termios.TCSADRAIN)
            events.put(("again", None))

        tty.setcbreak(handle, termios.TCSADRAIN)
        signal.signal(signal.SIGCONT, again)
        try:
            yield lambda: os.read(handle, 1).decode("ascii", "replace")
        finally:
            termios.tcsetattr(handle, termios.TCSADRAIN, before)
