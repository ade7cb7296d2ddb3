"""JAX's own GPU simulator, and a GPU of this machine, each behind one call that always comes back.

Each runs in a process of its own. A kernel may wait there for ever, where nothing can end it but the end of its
process; on a GPU, a wild access leaves nothing of the process that can be used. A process is kept for the next call, as
starting one takes seconds. A function travels by value, with all that it refers to.
"""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .simulate import SimulatorTimeout, SimulatorUnable
from .warm import killed_after

_ALONE = threading.Lock()
_START_S = 90.0  # a process that imports JAX takes a second, or many on a busy machine


def simulate(fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0, **kwargs: Any) -> Any:
    """The outputs of `fn(*args, **kwargs)` under JAX's GPU simulator: the pytree that fn returns, of NumPy arrays.

    args: arrays or pytrees of arrays; kwargs: static. Uninitialised memory is NaN. Raises SimulatorError for what goes
    wrong in the kernel, SimulatorTimeout when it does not end, and SimulatorUnable for what the simulator cannot run.
    """
    return _SIMULATOR.outputs(fn, args, kwargs, timeout_s)


def run_compiled(fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
    """The same on the GPU of this machine, compiled. SimulatorUnable: also where there is none that JAX can use."""
    return _GPU.outputs(fn, args, kwargs, timeout_s)


def start(compiled: bool) -> None:
    """Starts the process of `simulate`, or that of `run_compiled`, so that the first call need not wait for it."""
    with _ALONE, contextlib.suppress(SimulatorUnable, EOFError, RuntimeError):  # Python may be about to end
        (_GPU if compiled else _SIMULATOR).there()


class _Child:
    """A process, and the one in it now. environment: its own, on top of that of this one; None takes away."""

    def __init__(self, environment: "dict[str, str | None]") -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = environment
        atexit.register(self.end)

    def outputs(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], timeout_s: float) -> Any:
        import cloudpickle

        arrays = jax.tree.map(np.asarray, args)
        try:
            packed = cloudpickle.dumps((fn, arrays, kwargs))
        except Exception as error:
            raise SimulatorUnable(f"the function cannot be handed to another process: {_first_line(error)}") from error
        with _ALONE:
            answer = self._asked((_paths(), packed, self is _GPU), timeout_s)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _asked(self, request: Any, timeout_s: float) -> Any:
        """What the process answers; it ends with whatever goes wrong in it."""
        done = False
        try:
            process = self.there()
            assert process.stdin is not None, "a pipe"
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = _message(process, timeout_s)
            done = not getattr(answer, "running", False)  # a kernel that failed leaves its process in disorder
            return answer
        except TimeoutError:
            raise SimulatorTimeout(f"the kernel ran for more than {timeout_s:g} s and was stopped") from None
        except (BrokenPipeError, EOFError) as error:
            raise SimulatorUnable("its process ended without an answer") from error
        finally:
            if not done:
                self.end()

    def there(self) -> "subprocess.Popen[bytes]":
        """The process that runs, a new one where there is none, or the last one has ended."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-m", "pallas_puzzles.targets.gpu_simulator_child"]
            merged = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), **self.environment}
            environment = {name: value for name, value in merged.items() if value is not None}
            pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=environment)
            try:
                _message(self.process, _START_S)
            except TimeoutError:
                raise SimulatorUnable(f"its process did not start within {_START_S:g} s") from None
        return self.process

    def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_SIMULATOR = _Child({"JAX_PLATFORMS": "cpu"})
# The process that asks may have taken most of the GPU's memory: this one takes what it needs.
_GPU = _Child({"JAX_PLATFORMS": None, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _paths() -> list[str]:
    return [path for path in sys.path if path] + [os.getcwd()]


def _message(process: "subprocess.Popen[bytes]", timeout_s: float) -> Any:
    """The next answer of the process. Raises TimeoutError, and EOFError where it has ended."""
    assert process.stdout is not None, "a pipe"
    with killed_after(process, timeout_s):
        try:
            answer = pickle.load(process.stdout)
        except (ValueError, OSError, pickle.UnpicklingError):  # it has ended
            raise EOFError from None
    if process.poll() is not None:
        raise EOFError
    return answer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
