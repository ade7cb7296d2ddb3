"""JAX's own GPU simulator behind one call, which always comes back: it runs in a process of its own.

A kernel may wait in it for ever, in threads of XLA's that nothing can end but the end of their process. The process is
kept for the next call, as starting one takes a second or more. A function travels by value, with all that it refers to.
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

_ALONE = threading.Lock()
_START_S = 90.0  # a process that imports JAX takes a second, or many on a busy machine
_SIZE = 8  # bytes of the length before each message


def simulate(fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0, **kwargs: Any) -> Any:
    """The outputs of `fn(*args, **kwargs)` under JAX's GPU simulator: the pytree that fn returns, of NumPy arrays.

    args: arrays or pytrees of arrays; kwargs: static. Uninitialised memory is NaN. Raises SimulatorError for what goes
    wrong in the kernel, SimulatorTimeout when it does not end, and SimulatorUnable for what the simulator cannot run.
    """
    import cloudpickle

    arrays = jax.tree.map(np.asarray, args)
    try:
        request = cloudpickle.dumps((fn, arrays, kwargs))
    except Exception as error:
        raise SimulatorUnable(f"the function cannot be handed to another process: {_first_line(error)}") from error
    with _ALONE:
        answer = _asked(pickle.dumps((_paths(), request)), timeout_s)
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Child:
    """The process, and the one in it now."""

    process: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def there(cls) -> "subprocess.Popen[bytes]":
        """The process that runs, a new one where there is none, or the last one has ended."""
        if cls.process is None or cls.process.poll() is not None:
            command = [sys.executable, "-m", "pallas_puzzles.targets.gpu_simulator_child"]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(_paths())}
            pipe = subprocess.PIPE
            quiet = subprocess.DEVNULL
            cls.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=environment)
            try:
                _message(cls.process, _START_S)
            except TimeoutError:
                raise SimulatorUnable(f"its process did not start within {_START_S:g} s") from None
        return cls.process

    @classmethod
    def end(cls) -> None:
        process, cls.process = cls.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


atexit.register(_Child.end)


def _paths() -> list[str]:
    return [path for path in sys.path if path] + [os.getcwd()]


def _asked(request: bytes, timeout_s: float) -> Any:
    """What the process answers; it ends with whatever goes wrong in it."""
    done = False
    try:
        process = _Child.there()
        assert process.stdin is not None, "a pipe"
        process.stdin.write(len(request).to_bytes(_SIZE, "big") + request)
        process.stdin.flush()
        answer = pickle.loads(_message(process, timeout_s))
        done = not isinstance(answer, Exception)  # a kernel that failed leaves the simulator in disorder
        return answer
    except TimeoutError:
        raise SimulatorTimeout(f"the kernel ran for more than {timeout_s:g} s and was stopped") from None
    except (BrokenPipeError, EOFError) as error:
        raise SimulatorUnable("its process ended without an answer") from error
    finally:
        if not done:
            _Child.end()


def _message(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """The next message of the process. Raises TimeoutError, and EOFError where it has ended."""
    found: list[bytes] = []

    def read() -> None:
        assert process.stdout is not None, "a pipe"
        with contextlib.suppress(ValueError, OSError):  # closed, as it came too late
            size = int.from_bytes(process.stdout.read(_SIZE), "big")
            found.append(process.stdout.read(size))

    reader = threading.Thread(target=read, name="answer of the simulator", daemon=True)
    reader.start()
    try:
        reader.join(timeout_s)
        late = reader.is_alive()
    finally:
        if reader.is_alive():
            process.kill()
            reader.join()
    if late:
        raise TimeoutError
    if not found or process.poll() is not None:
        raise EOFError
    return found[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
