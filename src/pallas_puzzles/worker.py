"""A process that keeps JAX warm and runs the reader's file, again and again: it may hang, abort or be killed.

Requests are lines of JSON on its stdin, {"id", "do": "check" | "show", "puzzle", "source", "columns", "colour"} or
{"do": "stop"}; answers are lines of JSON on what was its stdout. What the reader's code prints comes with the answer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]

LIMIT_S = 600.0  # nobody waits for that long: the next save comes first, and stops it
MOST_PRINTED = 4000  # characters of what the reader's code prints


class Worker:
    """The process, seen from outside. `tell` is called, in a thread of its own, with every answer."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._closed = False
        self._start()

    def ask(self, message: Message) -> None:
        """Sends a request; starts a new process where the last one has died."""
        if self._process.poll() is not None:
            self._start()
        with contextlib.suppress(OSError):  # it has just died; the thread that listens says so
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing; `ask` starts another."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._closed = True
        self.kill()

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pallas_puzzles.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
            # the blocks of a puzzle are small: on a busy machine more threads are slower, by a factor of thirty
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
        )
        threading.Thread(target=self._listen, args=(self._process, self._said), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str], said: Any) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # half a line, from a process that dies
                self._tell(json.loads(line))
        code = process.wait()
        said.seek(0)
        last = [line.strip() for line in said.read().splitlines() if line.strip()][-1:]
        if not self._closed:
            self._tell({"died": code, "process": process.pid, "last": last[0] if last else ""})

    @property
    def pid(self) -> int:
        return self._process.pid


# ---- inside ----------------------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who watches
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests_in = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)  # what C code prints must not end up among the answers
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # nor may the reader's input() read requests
    _serve(requests_in, answers)


def _serve(requests_in: Any, answers: Any) -> None:
    from .watchdog import TimeLimit, time_limit

    requests: queue.Queue[Message] = queue.Queue()
    running: list[time_limit] = []

    def listen() -> None:
        for line in requests_in:
            message = json.loads(line)
            if message["do"] == "stop":
                for each in running:
                    each.expire()
            else:
                requests.put(message)
        os._exit(0)  # whoever asks is gone

    threading.Thread(target=listen, daemon=True).start()
    _warm_up()
    while True:
        message = requests.get()
        printed = io.StringIO()
        answer: Message
        try:
            with time_limit(LIMIT_S, "your file") as limit, _captured(printed):
                running[:] = [limit]
                answer = _check(message) if message["do"] == "check" else _show(message)
        except TimeLimit as stop:
            answer = {"error": f"{stop}"}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        running.clear()
        answer |= {"id": message["id"], "printed": printed.getvalue()[-MOST_PRINTED:]}
        print(json.dumps(answer), file=answers, flush=True)


def _warm_up() -> None:
    """Imports what the first check would import."""
    import jax
    from jax.experimental import pallas  # noqa: F401
    from jax.experimental.pallas import tpu  # noqa: F401

    from . import check, lens, simulate  # noqa: F401

    jax.devices()


@contextlib.contextmanager
def _captured(printed: io.StringIO) -> Any:
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield


def _check(message: Message) -> Message:
    from . import curriculum
    from .verdict import totals

    verdict = curriculum.run(message["puzzle"], source=Path(message["source"]))
    text = verdict.text(message["columns"])
    if message["colour"]:
        text = _in_colour(verdict.coloured(message["columns"]), message["columns"])
    return {"verdict": verdict.to_json(), "totals": totals(verdict.figures), "text": text}


def _show(message: Message) -> Message:
    from . import curriculum
    from .lens.draw import show

    verdict = curriculum.run(message["puzzle"], source=Path(message["source"]), judge=False)
    if verdict.subject is None:
        return {"text": f"Nothing to show yet. {verdict.text(message['columns'])}"}
    first = verdict.subject.cases[0]
    return {"text": str(show(verdict.subject.fn, *first.inputs, **first.blocks))}


def _in_colour(text: Any, columns: int) -> str:
    from rich.console import Console

    console = Console(highlight=False, force_terminal=True, width=columns)
    with console.capture() as capture:
        console.print(text, soft_wrap=True)
    return capture.get().rstrip("\n")


if __name__ == "__main__":
    main()
