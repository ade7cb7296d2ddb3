"""JAX's own GPU simulator, and a GPU of this machine, each behind one call that always comes back.

Each runs in a process of its own. A kernel may wait there for ever, where nothing can end it but the end of its
process; on a GPU, a wild access leaves nothing of the process that can be used. A process is kept for the next call, as
starting one takes seconds. A function travels by value, with all that it refers to.
"""

import contextlib
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..ir.gpu import as_on_gpu
from ..ir.modes import built_for
from .child import serve
from .simulate import SimulatorError, SimulatorTimeout, SimulatorUnable, _one_line, objections
from .warm import ProcessDied, Warm


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
    with contextlib.suppress(RuntimeError):  # Python may be about to end
        (_GPU if compiled else _SIMULATOR).warm()


class _Child(Warm):
    """A process of this module. environment: its own, on top of that of this one; None takes away."""

    def __init__(self, environment: "dict[str, str | None]") -> None:
        super().__init__()
        self._environment = environment

    def outputs(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], timeout_s: float) -> Any:
        import cloudpickle

        arrays = jax.tree.map(np.asarray, args)
        try:
            packed = cloudpickle.dumps((fn, arrays, kwargs))
        except Exception as error:
            (first, *_) = (str(error).strip() or type(error).__name__).splitlines()
            raise SimulatorUnable(f"the function cannot be handed to another process: {first}") from error
        try:
            answer = self.ask(timeout_s, paths=_paths(), packed=packed, compiled=self is _GPU)
        except TimeoutError:
            raise SimulatorTimeout(f"the kernel ran for more than {timeout_s:g} s and was stopped") from None
        except ProcessDied as error:
            raise SimulatorUnable(f"its process {error}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> Any:
        answer = super()._exchange(request, timeout_s)
        if getattr(answer, "running", False):  # a kernel that failed leaves its process in disorder
            self.stop()
        return answer

    def _begin(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pallas_puzzles.targets.gpu_simulator"]
        merged = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), **self._environment}
        environment = {name: value for name, value in merged.items() if value is not None}
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=environment)


_SIMULATOR = _Child({"JAX_PLATFORMS": "cpu"})
# The process that asks may have taken most of the GPU's memory: this one takes what it needs.
_GPU = _Child({"JAX_PLATFORMS": None, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _paths() -> list[str]:
    return [path for path in sys.path if path] + [os.getcwd()]


# --- in the process --------------------------------------------------------------------------------------------------


def _simulated(paths: list[str], packed: bytes, compiled: bool) -> Any:
    """The outputs of a function, or a SimulatorError. packed: it, its arrays and keywords; compiled: on a GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    try:
        sys.path[:] = list(dict.fromkeys([*sys.path, *paths]))
        fn, args, kwargs = pickle.loads(packed)
    except Exception as error:
        words = f"the function cannot be read in another process: {_one_line(error)}"
        return SimulatorUnable(words, running=False)
    if compiled and jax.default_backend() != "gpu":
        return SimulatorUnable("JAX finds no GPU here")
    mode = False if compiled else plgpu.InterpretGPUParams(uninitialized_memory="nan")
    run = built_for(functools.partial(fn, **kwargs), mode)
    try:
        with objections(ValueError), contextlib.nullcontext() if compiled else as_on_gpu():
            outputs = jax.tree.map(np.asarray, (jax.jit(run) if compiled else run)(*args))
            jax.effects_barrier()
            return outputs
    except SimulatorError as error:
        return error


if __name__ == "__main__":
    import jax.experimental.pallas.mosaic_gpu  # the slow part of the first request, done before it comes

    serve(_simulated)
