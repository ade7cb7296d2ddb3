"""What benchmarks/foreign.py runs: a registry of calls of kernels, and what makes their arrays."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

BF16 = jnp.bfloat16
GROUPS = np.array([100, 0, 28, 128], np.int32)

Job = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of arrays, the arrays
JOBS: dict[str, tuple[str, Callable[[], Job]]] = {}  # name of a row -> package, what makes its job
REFERENCES: dict[str, Callable[..., Any]] = {}  # name of a row -> the same in plain arrays


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


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)
