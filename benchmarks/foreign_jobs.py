"""What benchmarks/foreign.py runs: a registry of calls of kernels, what makes their arrays, and a limit for each."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_puzzles.lens.watchdog import time_limit

BF16 = jnp.bfloat16
GROUPS = np.array([100, 0, 28, 128], np.int32)

Job = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of arrays, the arrays
JOBS: dict[str, tuple[str, Callable[[], Job]]] = {}  # name of a row -> package, what makes its job
REFERENCES: dict[str, Callable[..., Any]] = {}  # name of a row -> the same in plain arrays
HANGS_S = 900.0


def job(
    package: str, name: str = "", reference: Callable[..., Any] | None = None
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Registers a row. reference: the arguments -> the result, for what JAX's simulator cannot run."""

    def register(make: Callable[[], Job]) -> Callable[[], Job]:
        key = f"{package}: {name or make.__name__.replace('_', ' ')}"
        assert key not in JOBS, f"two rows are called {key}"
        JOBS[key] = (package, make)
        if reference is not None:
            REFERENCES[key] = reference
        return make

    return register


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Stops the block by TimeLimit after so much CPU time, which other processes do not add to; or where it hangs."""
    start, over = time.process_time(), threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if time.process_time() - start > seconds:
                limit.expire()
                return

    with time_limit(HANGS_S) as limit:
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)
