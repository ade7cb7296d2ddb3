"""Inside the process that runs the reader's file: requests in, answers out, and nothing of the checker's replaced.

Both are lines of JSON. The first line says where we are: {"environment", "folder"}. A request is {"id", "do": "check" |
"show" | "tpu" | "gpu", "puzzle", "source", "overlay", "columns", "colour"}, or {"do": "stop"}; an answer has its id,
what the reader's code has printed, and "none", a sentence, where there is no verdict, or "wrong", where the question
was wrong; after one with "leaves" the process ends.

With an argument, the path of a socket: waits there, JAX imported, and forks a process for whoever connects.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import queue
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any, NoReturn

from .worker import Message, last_line

LIMIT_S = 600.0  # nobody waits for that long
MOST_PRINTED = 4000  # characters of what the reader's code prints; of more, the last SHOWN_LINES
SHOWN_LINES = 20
IDLE_S = 600.0  # how long to wait for the next one who connects
LOOK_S = 5.0  # how often to look whether the socket is still ours

# Parts of the package that no check needs, and that do not belong into a process that waits for one.
PACKAGE_NAME = (__package__ or "").partition(".")[0]  # the whole of it: what the checker consists of
APART = {"__main__", "cli", "lab", "lab_files", "watch", "formats", "notebooks", "serving", "child"}
# What the checker stands on, beside its own modules: an answer that replaces a function here gets no verdict.
STANDS_ON = (
    "builtins json json.decoder json.encoder numpy numpy.random numpy.testing jax jax.numpy jax.lax jax.random "
    "jax.experimental.pallas jax.experimental.pallas.tpu inspect functools contextlib ast linecache"
).split()


def main() -> None:
    if len(sys.argv) > 1:
        wait_at(Path(sys.argv[1]))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
        requests, answers = os.dup(0), os.dup(1)
        _settle(2)
        _import_everything()
        serve(os.fdopen(requests, encoding="utf-8"), os.fdopen(answers, "w", encoding="utf-8"), changed_since())


def serve(requests_in: IO[str], answers: IO[str], changed: Callable[[], str]) -> NoReturn:
    """Answers requests until whoever asks is gone. What it needs for that is in its locals, out of the reader's way."""
    from ..course.curriculum import CurriculumError
    from ..course.progress import state_folder
    from ..lens.watchdog import TimeLimit, time_limit

    dumps, write, flush, leave, answer_to = json.dumps, answers.write, answers.flush, os._exit, _answer
    requests: queue.Queue[Message] = queue.Queue()
    running: list[time_limit] = []
    _be_where(json.loads(requests_in.readline() or "{}"))
    touched = _guarded(state_folder())

    def listen() -> None:
        for line in requests_in:
            message = json.loads(line)
            if message["do"] == "stop":
                for each in running:
                    each.expire()
            else:
                requests.put(message)
        leave(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        message, printed = requests.get(), Tail()
        answer: Message
        try:
            with time_limit(LIMIT_S, "your file") as limit, redirect_stdout(printed), redirect_stderr(printed):
                running[:] = [limit]
                answer = answer_to(message)
        except TimeLimit as stop:
            answer = {"none": f"{stop}"}
        except CurriculumError as error:
            answer = {"wrong": str(error)}
        except BaseException as error:
            answer = {"none": f"There is no verdict: {type(error).__name__}: {error}"}
        running.clear()
        spoiled = touched() or changed()
        if spoiled:
            answer = {"none": spoiled}
        write(dumps({**answer, "id": message["id"], "printed": printed.text(), "leaves": bool(spoiled)}) + "\n")
        flush()
        if spoiled:
            leave(0)  # the next request gets another process


class Tail(io.TextIOBase):
    """Keeps the end of what is written to it, however much that is."""

    def __init__(self) -> None:
        self._kept, self._all = "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._kept = (self._kept + text)[-MOST_PRINTED:]
        self._all += len(text)
        return len(text)

    def text(self) -> str:
        if self._all <= MOST_PRINTED:
            return self._kept
        kept = (self._kept.partition("\n")[2] or self._kept).splitlines()[-SHOWN_LINES:]
        return "\n".join([f"(the end of {self._all:,} characters)", *kept])


def _settle(output: int) -> None:
    """What C code prints goes to `output`, so not among the answers; the reader's input() finds nothing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


_by_imports: dict[str, str] = {}  # what libraries have put into the environment, such as where their own files are


def _be_where(here: Message) -> None:
    os.environ.clear()
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", **_by_imports, **here.get("environment", {})})
    with contextlib.suppress(OSError):
        os.chdir(here.get("folder", "."))


def _import_everything() -> None:
    """Imports what a check may import: also so that nothing of ours comes in after somebody has looked at it."""
    before = dict(os.environ)
    import jax
    import rich.console
    import rich.text  # noqa: F401
    from jax.experimental import pallas  # noqa: F401
    from jax.experimental.pallas import tpu  # noqa: F401

    package = importlib.import_module(PACKAGE_NAME)
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not APART & set(each.name.split(".")):
            importlib.import_module(each.name)
    with contextlib.suppress(ImportError):
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    _by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})


# ---- what the reader's code may not do -------------------------------------------------------------------------------


def changed_since() -> Callable[[], str]:
    """A function that says which part of the checker is another one than now, in a sentence; "" if none is."""
    ours = [each for name, each in sys.modules.items() if name.partition(".")[0] == PACKAGE_NAME]
    others = [sys.modules[name] for name in STANDS_ON if name in sys.modules]
    look, kind, length = vars, type, len
    function, module = types.FunctionType, types.ModuleType

    def parts(value: Any) -> tuple[Any, ...]:
        """A thing, and what can be changed about it without putting another in its place."""
        inner = value.__func__ if kind(value) in (staticmethod, classmethod) else value
        functions = (inner.fget, inner.fset) if kind(inner) is property else (inner,)
        held = [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions if kind(f) is function]
        return (inner, *(part for each in held for part in each))

    def seen(owner: Any, name: str) -> dict[str, tuple[Any, ...]]:
        found = {}
        for key, value in look(owner).items():
            found[f"{name}.{key}"] = parts(value)
            if kind(value) is kind and look(value).get("__module__") == name:
                for inner, held in look(value).items():
                    found[f"{name}.{key}.{inner}"] = parts(held)
        return found

    before = {each.__name__: seen(each, each.__name__) for each in (*ours, *others)}
    own = {each.__name__ for each in ours}
    unimportant = ("__warningregistry__", "_abc_impl", "__doc__", "__annotations__")

    def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
        return length(a) == length(b) and all(x is y for x, y in zip(a, b, strict=True))

    def changed() -> str:
        for each in (*ours, *others):
            name = each.__name__
            then, now = before[name], seen(each, name)
            for key in then.keys() | now.keys() if name in own else then.keys():
                if key.endswith(unimportant) or (key not in then and isinstance(now[key][0], module)):
                    continue
                if key not in then or key not in now or not same(then[key], now[key]):
                    whose = "changes the checker" if name in own else "changes what the checker stands on"
                    return f"Your file {whose} ({key}): there is no verdict. Take that out, then check again."
        return ""

    return changed


def _guarded(folder: Path) -> Callable[[], str]:
    """Lets nobody in this process write the progress file; says in a sentence if somebody has tried to."""
    tried: list[str] = []
    place, split, absolute = str(folder), os.path.split, os.path.abspath
    writing = os.O_WRONLY | os.O_RDWR

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            paths = args[:1] if isinstance(args[2], int) and args[2] & writing else ()
        elif event in ("os.rename", "os.remove", "os.truncate", "os.link", "os.symlink"):
            paths = args[:2]
        else:
            return
        for each in paths:
            text = os.fsdecode(each) if isinstance(each, str | bytes | os.PathLike) else ""
            if "progress.json" in text and split(absolute(text))[0] == place:
                tried.append(text)
                raise PermissionError(1, "only the command that checks a file writes what is solved", text)

    sys.addaudithook(hook)
    return lambda: "Your file writes to the record of what is solved: there is no verdict." if tried else ""


# ---- answers ---------------------------------------------------------------------------------------------------------


def _answer(message: Message) -> Message:
    """What a request asks for; where there is nothing to show or to compile, the verdict that says why."""
    from ..course import session

    source, overlay = Path(message["source"]), message.get("overlay")
    if str(source.parent) not in sys.path:
        sys.path.append(str(source.parent))  # modules beside the file, as in Jupyter
    code = {"overlay": Path(overlay)} if overlay else {"source": source}
    verdict = session.run(message["puzzle"], **code, judge=message["do"] == "check")
    if message["do"] == "check" or verdict.subject is None:
        return _told(verdict, message)
    fn, first = verdict.subject.fn, verdict.subject.cases[0]
    if message["do"] == "show":
        from ..view.show import show

        picture = show(fn, *first.inputs, **first.blocks)
        return {"picture": str(picture), "html": picture._repr_html_()}
    if message["do"] == "bench":
        return _benched(verdict.subject, message)
    report: Any
    if message["do"] == "gpu":
        from ..view.gpu_report import gpu_report

        report = gpu_report(fn, *first.inputs, chip=message["chip"], **first.blocks)
    else:
        from ..view.tpu_report import tpu_report

        report = tpu_report(fn, *first.inputs, tpu=message["chip"], **first.blocks)
    return {"text": str(report), "compiles": bool(report), "unavailable": bool(report.unavailable)}


def _benched(subject: Any, message: Message) -> Message:
    """The results of a benchmark; what there is so far is also in the file message["kept"], whatever becomes of us."""
    from ..speed.choose import measure_or_estimate
    from ..speed.puzzles import work_of

    kept = Path(message["kept"])
    work = work_of(subject, message["puzzle"], every_size=message["sweep"])
    return {"results": measure_or_estimate([work], lambda results: results.save(kept)).to_json()}


def _told(verdict: Any, message: Message) -> Message:
    """A verdict as an answer: as data, and as text for the terminal of whoever asked."""
    from ..view.costs import totals

    command = f"puzzles check {message['puzzle']}"
    command += f" --with {message['overlay']}" if message.get("overlay") else ""
    said = {"columns": message["columns"], "traceback": f"`{command} --traceback`"}
    text = _in_colour(verdict.coloured(**said), message["columns"]) if message["colour"] else verdict.text(**said)
    whole = str(verdict.traceback)
    return {"verdict": verdict.to_json(), "totals": totals(verdict.figures), "text": text, "traceback": whole}


def _in_colour(text: Any, columns: int) -> str:
    from rich.console import Console

    console = Console(highlight=False, force_terminal=True, width=columns)
    with console.capture() as capture:
        console.print(text, soft_wrap=True)
    return capture.get().rstrip("\n")


# ---- one process that waits, and forks others ------------------------------------------------------------------------


def wait_at(path: Path) -> None:
    """Returns, in the process that was started, as soon as another waits at the socket; exits with 1 if none can."""
    _import_everything()
    if len(os.listdir("/proc/self/task")) > 1:  # a fork takes no other thread along, and leaves its locks held
        sys.exit(1)
    changed = changed_since()
    fresh = path.with_name(f"{secrets.token_hex(8)}.new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(fresh))  # in a folder that nobody else may enter
    listener.listen()
    listener.settimeout(LOOK_S)
    ours = fresh.stat().st_ino
    fresh.replace(path)
    if os.fork():
        os._exit(0)  # whoever has started us goes on

    since, still = time.monotonic(), True
    while still and time.monotonic() - since < IDLE_S:
        with contextlib.suppress(TimeoutError):
            connection = listener.accept()[0]
            if not os.fork():
                listener.close()
                _serve_one(connection, changed)
            connection.close()
            since = time.monotonic()
        if _any_child():
            since = time.monotonic()
        still = path.exists() and path.stat().st_ino == ours
    if still:
        path.unlink()


def _any_child() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _serve_one(connection: socket.socket, changed: Callable[[], str]) -> NoReturn:
    """Forks the process that serves a connection, waits for it, and tells the other side how it has ended."""
    import numpy as np

    try:
        with tempfile.TemporaryFile("w+b") as said:
            if pid := os.fork():
                ending = {"ended": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "last": last_line(said)}
                connection.sendall(f"\n{json.dumps(ending)}\n".encode())
                os._exit(0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _settle(said.fileno())
        np.random.seed()
        answers = connection.makefile("w", encoding="utf-8", newline="\n")
        answers.write(json.dumps({"pid": os.getpid()}) + "\n")
        answers.flush()
        serve(connection.makefile("r", encoding="utf-8", newline="\n"), answers, changed)
    finally:
        os._exit(1)


if __name__ == "__main__":
    importlib.import_module("pallas_puzzles.app.serving").main()  # under the name that `changed_since` knows
