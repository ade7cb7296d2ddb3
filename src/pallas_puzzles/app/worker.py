"""A process that runs the reader's file, seen from outside: it may hang, abort or be killed, and we go on.

On Linux it is forked from one that has JAX imported and waits at a socket of this user (serving.py): each is as good as
new, within milliseconds. Elsewhere, and wherever that fails, it is a process started for the purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from ..course import curriculum
from ..installation import PACKAGE
from . import terminal

Message = dict[str, Any]

# What counts while Python and JAX are imported: a process that has imported them under other values is of no use.
EARLY = ("JAX", "XLA", "TPU", "LIBTPU", "CUDA", "PYTHON", "LD_", "LC_", "LANG", "OPENBLAS", "OMP", "MKL", "VIRTUAL_ENV")
START_LIMIT_S = 120.0
GRACE_S = 1.0  # how long a check that has become pointless may take to stop


class Worker:
    """Takes requests (serving.py). `tell` is called, in a thread of its own, with every answer.

    When the process ends without being asked to, the answer is a sentence on that: {"none": sentence}.
    """

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._process: _Process | None = None

    def ask(self, message: Message) -> None:
        """Sends a request; to a new process where the last one has died. Returns at once."""
        if self._process is None or not self._process.send(message):
            self._process = _Process(self._tell)
            self._process.send(message)

    def stop(self) -> None:
        """Ends what it is doing: politely, so that it stays warm, and then for good. Its answer may still be told."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing; `ask` takes another."""
        if self._process is not None:
            self._process.kill()


class Judge(Worker):
    """The same for a command, which waits for each answer: `with Judge() as judge: judge.answer("check", ...)`."""

    def __init__(self) -> None:
        self._answers: queue.Queue[Message] = queue.Queue()
        super().__init__(self._answers.put)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def answer(self, do: str, puzzle_id: str, source: Path, overlay: Path | None = None, **more: Any) -> Message:
        """The answer. Raises CurriculumError for what is no fault of an answer to the puzzle."""
        self.ask(request(0, do, puzzle_id, source, overlay=overlay and str(overlay), **more))
        answer = self._answers.get()
        if "wrong" in answer:
            raise curriculum.CurriculumError(answer["wrong"])
        return answer


def judged(puzzle_id: str, answer: Message) -> Message:
    """The same answer, with a verdict also where there is none: an error, which says why."""
    if "none" not in answer:
        return answer
    puzzle, cause = curriculum.puzzle(puzzle_id), answer["none"]
    headline = f"{puzzle.id} {puzzle.title}: no verdict."
    nowhere = dict.fromkeys(("line", "step", "at", "operand", "block"))
    verdict = {
        "puzzle": puzzle.id, "status": "error", "passed": False, "headline": headline, "gained": "", "next": "",
        "findings": [{"kind": "process", "cause": cause, "evidence": [], "function": "", **nowhere}],
        "picture": "", "figures": [], "notes": [],
    }  # fmt: skip
    words = textwrap.fill(cause, terminal.columns(), initial_indent="  ", subsequent_indent="  ")
    return {**answer, "verdict": verdict, "text": f"{headline}\n\n{words}", "traceback": ""}


def request(number: int, do: str, puzzle_id: str, source: Path, **more: Any) -> Message:
    """A request as serving.py takes it: what it says is laid out for this terminal."""
    looks = {"columns": terminal.columns(), "colour": terminal.has_colours()}
    return {"id": number, "do": do, "puzzle": puzzle_id, "source": str(source), **looks, **more}


class _Process:
    """One process, from its start to its end. What is sent before it is there waits for it."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._over = False
        self._tell = tell
        self._unanswered: int | None = None  # the request that it is at
        self._told = threading.Condition()  # guards these
        self._kill: Callable[[], None] = lambda: None
        self._unsent: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        # the folder and the environment are the command's own: the process may be older than either
        self.send({"environment": dict(os.environ), "folder": os.getcwd()})
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """False where the process has ended, and nothing will come of it."""
        with self._told:
            self._unanswered = message.get("id", self._unanswered)
            self._unsent.put(message)
            return not self._over

    def stop(self) -> None:
        self.send({"do": "stop"})
        with self._told:
            stopped = self._told.wait_for(lambda: self._unanswered is None, GRACE_S)
        if not stopped:
            self.kill()

    def kill(self) -> None:
        self._over = True
        self._kill()
        self._thread.join(timeout=1)  # not for long: it may be waiting for a process that has never answered

    def _live(self) -> None:
        connection = _connected()
        code, last = self._live_forked(connection) if connection is not None else self._live_alone()
        with self._told:
            if not self._over and self._unanswered is not None:
                self._tell({"id": self._unanswered, "none": _ending(code, last), "printed": ""})
            self._over, self._unanswered = True, None
            self._told.notify()

    def _live_forked(self, connection: socket.socket) -> tuple[int | None, str]:
        with (
            connection,
            connection.makefile("r", encoding="utf-8", newline="\n") as answers,
            connection.makefile("w", encoding="utf-8", newline="\n") as requests,
        ):
            pid = json.loads(answers.readline() or '{"pid": 0}')["pid"]

            def kill() -> None:
                with contextlib.suppress(OSError):
                    if pid:
                        os.kill(pid, signal.SIGKILL)
                    connection.shutdown(socket.SHUT_RDWR)

            ending = self._talk(requests, answers, kill)
        return ending.get("ended"), ending.get("last", "")

    def _live_alone(self) -> tuple[int | None, str]:
        with tempfile.TemporaryFile("w+b") as said, _started(said) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            self._talk(process.stdin, process.stdout, process.kill)
            return process.wait(), last_line(said)

    def _talk(self, requests: IO[str], answers: IO[str], kill: Callable[[], None]) -> Message:
        """Sends what is to be sent and hands on what comes, to the end; how it ended, where that is said."""
        self._kill = kill
        if self._over:
            kill()
        writer = threading.Thread(target=self._write, args=(requests,), daemon=True)
        writer.start()
        ending: Message = {}
        with contextlib.suppress(OSError):
            for line in answers:
                try:
                    message = json.loads(line)
                except ValueError:  # half a line, from a process that dies
                    continue
                if "ended" in message:
                    ending = message
                    continue
                with self._told:
                    if not self._over:
                        self._over, self._unanswered = message["leaves"], None
                        self._tell(message)
                        self._told.notify()
        self._kill = lambda: None
        self._unsent.put(None)
        writer.join()
        return ending

    def _write(self, requests: IO[str]) -> None:
        with contextlib.suppress(OSError), requests:  # it has just died; the thread that listens says so
            for each in iter(self._unsent.get, None):
                requests.write(json.dumps(each) + "\n")
                requests.flush()


def last_line(file: IO[bytes]) -> str:
    """The last line of what a process has written, where it has ended with something to say."""
    file.seek(max(file.seek(0, os.SEEK_END) - 4000, 0))
    lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _ending(code: int | None, last: str) -> str:
    """What to tell a reader about the end of the process, in one sentence."""
    because = f" Its last words: {last}" if last else ""
    if code is None:
        return "The process that ran your file has gone, and gave no verdict. Check again."
    if code < 0:
        name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
        return (
            f"The process that ran your file was killed ({name}) and gave no verdict: "
            f"your code did that, or the machine ran out of memory.{because}"
        )
    return f"Your code ended the whole process (exit code {code}), as os._exit does: there is no verdict.{because}"


# ---- which process ---------------------------------------------------------------------------------------------------


def _started(said: IO[bytes]) -> subprocess.Popen[str]:
    # -P: a file beside the reader's own must not take the place of a library
    command = [sys.executable, "-P", "-m", "pallas_puzzles.app.serving"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
    return subprocess.Popen(command, text=True, encoding="utf-8", env=_environment(), **pipes)


def _environment() -> dict[str, str]:
    # the blocks of a puzzle are small: on a busy machine more threads are slower, by a factor of thirty
    return {"OPENBLAS_NUM_THREADS": "1", **os.environ}


def _connected() -> socket.socket | None:
    """A connection to a process that has just been forked for us; None where that is not possible."""
    with contextlib.suppress(OSError, subprocess.SubprocessError), contextlib.ExitStack() as undo:
        address = _address()
        if address is None:
            return None
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.connect(str(address))
        except OSError:  # nobody is there yet, or any more
            command = [sys.executable, "-P", "-m", "pallas_puzzles.app.serving", str(address)]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            how: dict[str, Any] = {**quiet, "env": _environment(), "cwd": "/", "start_new_session": True}
            subprocess.run(command, timeout=START_LIMIT_S, check=True, **how)
            connection.connect(str(address))
        undo.pop_all()
        return connection
    return None


def _address() -> Path | None:
    """The socket of the process that has imported what we would: the same Python, package, libraries, environment.

    None where forking is not safe: on macOS the system's own libraries may fail after it, Windows does not know it.
    Raises OSError where this user can have no folder that nobody else can write.
    """
    if sys.platform != "linux":
        return None
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(place) / f"pallas-puzzles-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        return None
    newest = max(each.stat().st_mtime_ns for each in PACKAGE.rglob("*.py"))
    installed = os.stat(sysconfig.get_path("purelib")).st_mtime_ns  # every installation changes it
    early = sorted((name, value) for name, value in os.environ.items() if name.startswith(EARLY))
    same = (sys.executable, sys.version, str(PACKAGE), newest, installed, early)
    return folder / f"{hashlib.sha256(ascii(same).encode()).hexdigest()[:16]}.socket"
