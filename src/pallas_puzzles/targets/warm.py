"""A child process that stays warm: a request in, its answer out. A compiler in one: a program in, its answer out.

A compiler may abort the process that it lives in, talks on stderr, and takes its flags from the environment once, when
it is loaded. So it never lives in the reader's process.
"""

import atexit
import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_LIMIT_S = 120.0  # a process that imports JAX takes a second, or many on a busy machine
_SCRIPT = Path(__file__).with_name("child.py")


class ProcessDied(Exception):
    """A process ended, or did not start, which the text says. The next request starts a new one."""


class CompilerError(Exception):
    """The compiler refused a program. The text is the compiler's."""


class CompilerDied(Exception):
    """The compiler's process aborted, was killed, or did not come back in time. The next request starts a new one."""


class Warm:
    """One warm process, which `serve` of child.py runs in. Subclasses know how one is started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one request at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ready = False
        atexit.register(self.stop)

    def _begin(self) -> "subprocess.Popen[bytes]":
        raise NotImplementedError

    def warm(self) -> None:
        """Starts the process and does not wait for it."""
        with self._lock:
            self._start()

    def ask(self, timeout_s: float, **request: Any) -> Any:
        """The answer to a request. Raises TimeoutError, or ProcessDied.

        Whatever interrupts it, Ctrl-C included, leaves no process behind that still works on it.
        """
        with self._lock:
            try:
                self._start()
                self._get_ready()
                return self._exchange(request, timeout_s)
            except BaseException:
                self.stop()
                raise

    def _start(self) -> None:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.stop()
            self._owner, self._ready = os.getpid(), False
            self._process = self._begin()

    def _get_ready(self) -> None:
        if not self._ready:
            try:
                self._read(START_LIMIT_S)
            except TimeoutError:
                raise ProcessDied(f"did not start within {START_LIMIT_S:g} s") from None
            self._ready = True

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it waited: reading says so
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
        return self._read(timeout_s)

    def _read(self, limit_s: float) -> Any:
        """What the process says next; it is killed where that takes longer."""
        assert self._process is not None
        assert self._process.stdout is not None
        start, timer = time.monotonic(), threading.Timer(limit_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # it has ended
            if time.monotonic() - start >= limit_s:
                raise TimeoutError(f"did not finish within {limit_s:g} s") from None
            raise ProcessDied(self._last_words()) from None
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        """How the process ended."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        return f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        """Ends the process, if it is ours: after a fork the parent's child is not."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError), process:
                process.kill()
            self._clean()

    def _clean(self) -> None:
        """Removes what the process leaves behind."""


class Compiler(Warm):
    """A process with a compiler in it, in a folder of its own.

    name: which one, "TPU" or "GPU". fatal: a regular expression for what it logs before it aborts. environment: what it
    finds there beside ours, with {folder} for its folder. links: name -> what it finds under that name in its folder.
    """

    def __init__(
        self, name: str, fatal: str, environment: Mapping[str, str], links: Mapping[str, Path] | None = None
    ) -> None:
        super().__init__()
        self._name, self._fatal, self._environment, self._links = name, fatal, environment, links or {}
        self._folder = Path()

    def compiled(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """What child.py answers to a request. Raises CompilerDied."""
        try:
            return self.ask(timeout_s, **request)
        except (TimeoutError, ProcessDied) as error:
            raise CompilerDied(f"the {self._name} compiler {error}") from None

    def _begin(self) -> "subprocess.Popen[bytes]":
        self._folder = Path(tempfile.mkdtemp(prefix=f"pallas-puzzles-{self._name.lower()}-"))
        (self._folder / "dumps").mkdir()
        for name, target in self._links.items():
            (self._folder / name).symlink_to(target)
        environment = {name: value.format(folder=self._folder) for name, value in self._environment.items()}
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), self._name.lower()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the reader's process
                cwd=self._folder,
                env={**os.environ, **environment},
            )

    def _last_words(self) -> str:
        """Why the process ended: the fatal line that the compiler logs before it aborts, or the signal."""
        how = super()._last_words()
        fatal = re.search(self._fatal, (self._folder / "log").read_text(errors="replace"), re.MULTILINE)
        return f"{how}: {fatal[1]}" if fatal else how

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
