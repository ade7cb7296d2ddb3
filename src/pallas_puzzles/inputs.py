"""What a check runs on: inputs drawn afresh for every seed, variants, and budgets."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Input:
    """An array to be drawn: `draw(rng)` gives a new one of this shape and dtype."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    params: tuple[float, ...]

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        a, b = self.params
        if self.kind == "normal":
            return (rng.standard_normal(self.shape, np.float32) * a + b).astype(self.dtype)
        if self.kind == "uniform":
            return rng.uniform(a, b, self.shape).astype(self.dtype)
        if self.kind == "groups":
            cuts = np.sort(rng.integers(0, int(a) + 1, self.shape))
            empty = rng.random(self.shape) < b
            sizes = np.diff(cuts, prepend=0)
            return np.where(empty, 0, sizes).astype(self.dtype)
        return rng.integers(int(a), int(b), self.shape).astype(self.dtype)


def _shape(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if np.ndim(shape) == 0 else tuple(int(s) for s in shape)


def _dtype(dtype: Any) -> np.dtype:
    if dtype in ("bfloat16", "bf16"):
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def normal(shape: Any, dtype: Any = "float32", *, scale: float = 1.0, shift: float = 0.0) -> Input:
    """Normally distributed values with standard deviation `scale` around `shift`."""
    return Input("normal", _shape(shape), _dtype(dtype), (scale, shift))


def uniform(shape: Any, low: float = 0.0, high: float = 1.0, dtype: Any = "float32") -> Input:
    """Values spread evenly over [low, high)."""
    return Input("uniform", _shape(shape), _dtype(dtype), (low, high))


def integers(shape: Any, low: int, high: int, dtype: Any = "int32") -> Input:
    """Whole numbers from low to high - 1."""
    return Input("integers", _shape(shape), _dtype(dtype), (low, high))


def groups(num_groups: int, num_rows: int, *, empty: float = 0.2) -> Input:
    """Sizes of groups, int32, that sum to num_rows at most; at least about the fraction `empty` of them is 0."""
    return Input("groups", (num_groups,), np.dtype(np.int32), (num_rows, empty))


def draw(inputs: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Every Input of a sequence drawn; arrays pass through."""
    return tuple(x.draw(rng) if isinstance(x, Input) else x for x in inputs)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Upper bounds on what an answer may cost; None leaves a cost unbounded.

    hbm_bytes: bytes moved between HBM and VMEM. vmem_bytes: VMEM held by one call (blocks x buffers + scratch).
    grid_steps: steps over all calls. calls: exact number of pallas_calls. output_stores: in how many steps of one
    visit an output block may be stored. flops: arithmetic over all calls. serial_steps: steps of one call that have to
    follow one another, when every index along its parallel axes has a core of its own. mxu_bits: how wide the operands
    of matrix products may be; there has to be a product, too. branches: pl.when, cond and loops in a kernel.
    selected: elements of the results of jnp.where, over all calls and steps, which is what masks cost. operations: of
    array code without a kernel, how many primitives it may consist of; elements: how many the largest array that it
    makes may have. outside_flops: arithmetic of matrix products outside of the kernels.
    """

    hbm_bytes: int | None = None
    vmem_bytes: int | None = None
    grid_steps: int | None = None
    calls: int | None = None
    output_stores: int | None = None
    flops: int | None = None
    serial_steps: int | None = None
    mxu_bits: int | None = None
    branches: int | None = None
    selected: int | None = None
    operations: int | None = None
    elements: int | None = None
    outside_flops: int | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs and block sizes that a check runs."""

    inputs: tuple[Any, ...]
    blocks: dict[str, Any]
    budget: Budget | None = None


def case(*inputs: Any, budget: Budget | None = None, **blocks: Any) -> Case:
    """A variant for `check`: other inputs, and block sizes to call the function with."""
    return Case(inputs, blocks, budget)
