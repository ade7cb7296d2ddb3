"""The TPU compiler in a child process that stays warm: an exported program in, the compiler's own dumps out.

libtpu is an optional extra; `missing()` says how to get it. The flags below are libtpu's own, seen on libtpu 0.0.50 and
0.0.51.
"""

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...installation import install_line
from .chips import Chip, devices_in

HOW_TO_GET_IT = f"the TPU compiler is not installed: {install_line('tpu-compiler')} (600 MB, Linux x86-64)"
TIME_LIMIT_S = 120.0
START_LIMIT_S = 120.0

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the child asks libtpu for its compiler, never for a device
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to a cloud's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # without these two libtpu complains on stderr
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: any number of processes may compile
}


class CompilerError(Exception):
    """The compiler refused a program. The text is libtpu's."""


class CompilerDied(Exception):
    """The compiler's process aborted, was killed, or did not come back in time. The next request starts a new one."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel in a compiled program. results, operands: HLO shapes, as 'f32[8,128]'."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program. files: what the compiler dumped, name -> text; copies: XLA's own, around the kernels."""

    kernels: tuple[Kernel, ...]
    copies: int
    files: Mapping[str, str]

    @property
    def operands_in_vmem(self) -> bool:
        """XLA moves arrays into VMEM before some kernel starts."""
        return any("inlined_call_operand.vmem" in text for text in self.files.values())

    def of(self, kernel: str, suffix: str) -> str | None:
        """The text of the dump of one kernel whose name ends in `suffix`."""
        for name in sorted(self.files):
            if re.fullmatch(rf"\d+-{re.escape(kernel)}-\d+-{suffix}", name):
                return self.files[name]
        return None


def nothing_in_vmem(chip: Chip) -> dict[str, str]:
    """Options that give a kernel all of VMEM: XLA otherwise moves small arrays there before the kernel starts."""
    return {"xla_tpu_scoped_vmem_limit_kib": str(chip.vmem_bytes >> 10)}


def missing() -> str | None:
    """Why there is no TPU compiler here and how to get it, or None when there is one."""
    absent = [name for name in ("libtpu", "flatbuffers") if importlib.util.find_spec(name) is None]
    return HOW_TO_GET_IT if absent else None


def compile_program(
    blob: bytes,
    chip: Chip,
    axes: Mapping[str, int] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    timeout_s: float = TIME_LIMIT_S,
) -> Compiled:
    """Compiles what jax.export serialised. Raises CompilerError, or CompilerDied."""
    answer, files = _COMPILER.ask(blob, chip, axes, options, timeout_s)
    kernels = tuple(Kernel(k["name"], tuple(k["results"]), tuple(k["operands"])) for k in answer["kernels"])
    return Compiled(kernels, answer["copies"], files)


def simulate_cycles(
    blob: bytes,
    chip: Chip,
    axes: Mapping[str, int] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> dict[str, int]:
    """Kernel name -> cycles, by libtpu's simulator of the compiled program. Raises CompilerError, or CompilerDied."""
    _, files = _SIMULATOR.ask(blob, chip, axes, options, timeout_s)
    cycles = {}
    for name, text in files.items():
        found = re.search(r"estimated_cycles: (\d+)", text)
        if found and name.endswith("static_llo_profile.textproto"):
            cycles[name.partition(f"_{chip.kind}")[0]] = int(found[1])
    return cycles


class _Child:
    """One warm process with libtpu in it. `flags` may name its dump folder as {folder}."""

    def __init__(self, flags: str) -> None:
        self._flags = flags
        self._lock = threading.Lock()  # one request at a time: a dump belongs to whoever asked last
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._answers = -1
        self._unread = b""
        self._ready = False
        self._folder = Path()

    def warm(self) -> None:
        """Starts the process and does not wait for it."""
        with self._lock:
            self._start()

    def ask(
        self,
        blob: bytes,
        chip: Chip,
        axes: Mapping[str, int] | None,
        options: Mapping[str, str] | None,
        timeout_s: float,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        with self._lock:
            self._start()
            if not self._ready:
                with self._alive_or_gone():
                    self._read(time.monotonic() + START_LIMIT_S, START_LIMIT_S)
                self._ready = True
            program = self._folder / "program"
            program.write_bytes(blob)
            devices = devices_in(axes)
            request = {
                "blob": str(program),
                "topology": chip.topology_for(devices),
                "mesh": (list(axes or ["x"]), list((axes or {"x": 1}).values())),
                "options": dict(options or {}),
            }
            with self._alive_or_gone():
                answer = self._exchange(request, timeout_s)
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
        self._folder = Path(tempfile.mkdtemp(prefix="pallas-puzzles-tpu-"))
        self._clear()
        read, write = os.pipe()
        flags = self._flags.format(folder=self._folder / "dumps")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("child.py")), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[write],
                start_new_session=True,  # Ctrl-C is for the reader's process
                cwd=self._folder,
                env={**os.environ, **_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags},
            )
        os.close(write)
        self._answers, self._unread, self._ready = read, b"", False

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it waited: reading says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read(time.monotonic() + timeout_s, timeout_s)

    def _read(self, deadline: float, limit_s: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CompilerDied(f"the TPU compiler did not finish within {limit_s:g} s")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise CompilerDied(self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        """Why the process ended: the fatal line that libtpu logs before it aborts, or the signal."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        log = (self._folder / "log").read_text(errors="replace")
        fatal = re.search(r"^F\d+ .*?\] (.*)$", log, re.MULTILINE)
        code = self._process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"the TPU compiler {how}" + (f": {fatal[1]}" if fatal else "")

    def stop(self) -> None:
        """Ends the process, if it is ours, and removes its folder."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(OSError):
            os.close(self._answers)
        shutil.rmtree(self._folder, ignore_errors=True)


_COMPILER = _Child("--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=^final_")
_SIMULATOR = _Child("--xla_jf_dump_static_llo_profile_to={folder}")


def warm(*, simulator: bool = True) -> None:
    """Starts the processes in the background: each takes some two seconds until it can compile."""
    _COMPILER.warm()
    if simulator:
        _SIMULATOR.warm()


@atexit.register
def stop() -> None:
    """Ends the warm processes; the next request starts new ones."""
    _COMPILER.stop()
    _SIMULATOR.stop()
