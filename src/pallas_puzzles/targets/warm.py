"""A compiler in a child process that stays warm: a program in, its answer and its dumps out.

A compiler may abort the process that it lives in, talks on stderr, and takes its flags from the environment once, when
it is loaded. So it never lives in the reader's process.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

START_LIMIT_S = 120.0
_SCRIPT = Path(__file__).with_name("child.py")


class CompilerError(Exception):
    """The compiler refused a program. The text is the compiler's."""


class CompilerDied(Exception):
    """The compiler's process aborted, was killed, or did not come back in time. The next request starts a new one."""


@contextlib.contextmanager
def killed_after(process: "subprocess.Popen[Any]", timeout_s: float) -> Iterator[None]:
    """Kills the process if the block, which waits for an answer of it, takes longer; then raises TimeoutError."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(timeout_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TimeoutError


class Warm:
    """One warm process. It runs child.py, which answers each line of JSON with another one, on a pipe of its own.

    name: which compiler it holds, "TPU" or "GPU". fatal: a regular expression for what the compiler logs before it
    aborts. environment: what the process finds there beside ours, with {folder} for its own folder. links: name ->
    what it finds under that name in its folder.
    """

    def __init__(
        self, name: str, fatal: str, environment: Mapping[str, str], links: Mapping[str, Path] | None = None
    ) -> None:
        self._name, self._fatal, self._environment, self._links = name, fatal, environment, links or {}
        self._lock = threading.Lock()  # one request at a time: a dump belongs to whoever asked last
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._answers: IO[str] | None = None
        self._ready = False
        self._folder = Path()

    def warm(self) -> None:
        """Starts the process and does not wait for it."""
        with self._lock:
            self._start()

    def answer(self, blob: bytes, request: dict[str, Any], timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
        """(the answer, what was dumped: name -> text). Raises CompilerError, or CompilerDied."""
        with self._lock:
            self._start()
            if not self._ready:
                with self._alive_or_gone():
                    self._read(START_LIMIT_S)
                self._ready = True
            program = self._folder / "program"
            program.write_bytes(blob)
            with self._alive_or_gone():
                answer = self._exchange({"blob": str(program), **request}, timeout_s)
                files = {path.name: path.read_text(errors="replace") for path in self._dumps()}
                self._clear()
        if "error" in answer:
            raise CompilerError(answer["error"])
        return answer, files

    def _dumps(self) -> Iterator[Path]:
        for path in (self._folder / "dumps").iterdir():
            if not path.name.partition("-")[2].startswith("<late-"):
                yield path

    def _clear(self) -> None:
        shutil.rmtree(self._folder / "dumps", ignore_errors=True)
        (self._folder / "dumps").mkdir(exist_ok=True)

    @contextlib.contextmanager
    def _alive_or_gone(self) -> Iterator[None]:
        """Whatever interrupts a request, Ctrl-C included, leaves no process behind that still works on it."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return
        if self._owner == os.getpid():
            self.stop()
        self._owner = os.getpid()  # after a fork the parent's child is not ours
        self._folder = Path(tempfile.mkdtemp(prefix=f"pallas-puzzles-{self._name.lower()}-"))
        self._clear()
        for name, target in self._links.items():
            (self._folder / name).symlink_to(target)
        environment = {name: value.format(folder=self._folder) for name, value in self._environment.items()}
        read, write = os.pipe()
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), self._name.lower(), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[write],
                start_new_session=True,  # Ctrl-C is for the reader's process
                cwd=self._folder,
                env={**os.environ, **environment},
            )
        os.close(write)
        self._answers, self._ready = os.fdopen(read), False

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it waited: reading says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read(timeout_s)

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._answers is not None
        try:
            with killed_after(self._process, limit_s):
                line = self._answers.readline()
        except TimeoutError:
            raise CompilerDied(f"the {self._name} compiler did not finish within {limit_s:g} s") from None
        if not line.endswith("\n"):
            raise CompilerDied(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        """Why the process ended: the fatal line that the compiler logs before it aborts, or the signal."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        log = (self._folder / "log").read_text(errors="replace")
        fatal = re.search(self._fatal, log, re.MULTILINE)
        code = self._process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"the {self._name} compiler {how}" + (f": {fatal[1]}" if fatal else "")

    def stop(self) -> None:
        """Ends the process, if it is ours, and removes its folder."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, self._answers):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
