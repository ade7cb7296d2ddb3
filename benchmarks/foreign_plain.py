"""The same in plain arrays, for kernels of benchmarks/foreign.py that JAX's simulator cannot run."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def named(entry: str) -> Callable[..., Any]:
    """A project's own function in plain arrays, module:function. Options that it does not know are left out.

    It works in float32 where the kernel is given bfloat16: JAX on a CPU does not have all products of bfloat16.
    """

    def call(*args: Any, **options: Any) -> Any:
        module, _, function = entry.partition(":")
        fn = getattr(importlib.import_module(module), function)
        known = inspect.signature(fn).parameters
        options = {name: value for name, value in options.items() if name in known}
        args, options = jax.tree.map(_widened, (args, options))
        return fn(*args, **options)

    return call


def _widened(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    return jnp.asarray(x, np.float32 if x.dtype == jnp.bfloat16 else x.dtype)


def grouped_product(
    x: Any, y: Any, sizes: Any, *, rhs_scale: Any = None, rhs_bias: Any = None, partial_sum: Any = None,
    group_offset: Any = 0, fuse_act: str | None = None, **_: Any
) -> Any:  # fmt: skip
    """(M, K) rows by group, (G, K, N) -> (M, N). rhs_scale: (G, blocks of K, 1, N); rhs_bias: (G, 1, N)."""
    ends, offset = np.cumsum(np.asarray(sizes)), int(np.ravel(0 if group_offset is None else group_offset)[0])
    out = np.zeros((len(x), y.shape[2]), np.float32)
    for group, end in enumerate(ends[offset : offset + len(y)]):
        rows = slice(end - int(sizes[offset + group]), end)
        weights = np.asarray(y[group], np.float32)
        if rhs_scale is not None:
            weights = weights * np.repeat(rhs_scale[group][:, 0], y.shape[1] // rhs_scale.shape[1], axis=0)
        out[rows] = np.asarray(x[rows], np.float32) @ weights
        for more in (
            rhs_bias[group] if rhs_bias is not None else 0,
            partial_sum[rows] if partial_sum is not None else 0,
        ):
            out[rows] += np.asarray(more, np.float32)
    if fuse_act is None:
        return out
    gate, up = np.split(out, 2, axis=1)
    if fuse_act != "silu":
        raise NotImplementedError(fuse_act)
    return jax.nn.silu(gate) * up


def grouped_outer_product(
    x: Any, y: Any, sizes: Any, groups: int = 0, *, group_offset: Any = 0, partial_sum: Any = 0, **_: Any
) -> Any:
    """Rows by group, (M, K) and (M, N) -> (G, K, N)."""
    parts = (np.split(np.asarray(each, np.float32), np.cumsum(np.asarray(sizes))[:-1]) for each in (x, y))
    offset = int(np.ravel(0 if group_offset is None else group_offset)[0])
    out = np.stack([a.T @ b for a, b in zip(*parts, strict=True)])[offset:][: groups or None]
    return out if partial_sum is None else out + np.asarray(partial_sum, np.float32)


def scattered_rows(cache: Any, rows: Any, at: Any, **_: Any) -> Any:
    """The cache with each of these rows in its place, where it has one."""
    out = np.array(cache).reshape(-1, rows.shape[1])
    there = (at >= 0) & (at < len(out))
    out[at[there]] = rows[there]
    return out.reshape(cache.shape)
