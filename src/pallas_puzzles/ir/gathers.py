"""XLA's gather and scatter in NumPy: a window at each of a list of places in an array."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

FILL_OR_DROP, CLIP = jax.lax.GatherScatterMode.FILL_OR_DROP, jax.lax.GatherScatterMode.CLIP


def gather(
    x: np.ndarray,
    indices: np.ndarray,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> np.ndarray:
    """What is there; beyond the end, what lies nearest to it inside, or fill_value."""
    d = dimension_numbers
    batching = dict(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True))
    windows = _Windows(x.shape, indices, slice_sizes, d.start_index_map, d.collapsed_slice_dims, batching)
    found = np.transpose(x, windows.order)[windows.key]
    if mode == FILL_OR_DROP and not windows.inside.all():
        outside = ~windows.inside.reshape(windows.inside.shape + (1,) * len(windows.kept))
        found = np.where(outside, _nothing(x.dtype) if fill_value is None else np.asarray(fill_value, x.dtype), found)
    batch = windows.inside.ndim
    found = np.transpose(found, (*range(batch), *(batch + windows.axes.index(dim) for dim in windows.kept)))
    return np.moveaxis(found, range(batch, found.ndim), d.offset_dims)


def scatter(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, **how: Any) -> np.ndarray:
    """A copy of x with the updates in it; of several for one place the last."""
    out, there, key, new = _targets(x, indices, updates, **how)
    there[key] = new
    return out


def scatter_add(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, **how: Any) -> np.ndarray:
    out, there, key, new = _targets(x, indices, updates, **how)
    np.add.at(there, key, new)
    return out


def _targets(
    x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, dimension_numbers: Any, mode: Any, **_: Any
) -> tuple[np.ndarray, np.ndarray, Any, np.ndarray]:
    """(a copy of x, a view of it, its key of the places that lie inside, what goes there)."""
    d = dimension_numbers
    batching = dict(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True))
    window = iter(updates.shape[n] for n in d.update_window_dims)
    gone = {*d.inserted_window_dims, *batching}
    sizes = [1 if dim in gone else next(window) for dim in range(x.ndim)]
    windows = _Windows(x.shape, indices, sizes, d.scatter_dims_to_operand_dims, d.inserted_window_dims, batching)
    out, batch = np.array(x), windows.inside.ndim
    new = np.moveaxis(updates, d.update_window_dims, range(batch, updates.ndim))
    new = np.transpose(new, (*range(batch), *(batch + windows.kept.index(dim) for dim in windows.axes)))
    key: Any = windows.key
    if mode != CLIP and not windows.inside.all():
        key = tuple(each[windows.inside] for each in np.broadcast_arrays(*key))
        new = new[windows.inside]
    return out, np.transpose(out, windows.order), key, new


class _Windows:
    """Windows of an array of this shape, one at each index.

    order: of the dimensions of the array for `key`, which picks the windows. axes: of its dimensions those that what
    is picked has, behind those of the indices. kept: the same in ascending order. inside: which windows lie inside.
    """

    def __init__(
        self,
        shape: Sequence[int],
        indices: np.ndarray,
        sizes: Sequence[int],
        indexed: Sequence[int],
        gone: Sequence[int],
        batching: Mapping[int, int],
    ) -> None:
        batch = indices.shape[:-1]
        self.kept = [dim for dim in range(len(shape)) if dim not in gone and dim not in batching]
        whole = [dim for dim in self.kept if dim not in indexed and sizes[dim] == shape[dim]]
        parts = [dim for dim in range(len(shape)) if dim not in whole]
        cut = [dim for dim in self.kept if dim not in whole]
        self.order, self.axes = (*parts, *whole), [*cut, *whole]
        self.inside = np.ones(batch, bool)
        starts: dict[int, Any] = {dim: np.indices(batch, sparse=True)[axis] for dim, axis in batching.items()}
        for n, dim in enumerate(indexed):
            start, last = indices[..., n].astype(np.int64), shape[dim] - sizes[dim]
            self.inside &= (start >= 0) & (start <= last)
            starts[dim] = np.clip(start, 0, last)
        key = []
        for dim in parts:
            start = starts.get(dim, np.zeros(batch, np.int64))
            start = start.reshape(start.shape + (1,) * len(cut))
            along = [-1 if dim == other else 1 for other in cut]
            key.append(start + np.arange(sizes[dim]).reshape(along) if dim in cut else start)
        self.key = tuple(key)


def _nothing(dtype: np.dtype) -> Any:
    """What a gather has beyond the end: NaN, the smallest signed or the largest unsigned integer."""
    if jax.numpy.issubdtype(dtype, np.inexact):
        return np.asarray(np.nan, dtype)
    if dtype.kind == "b":
        return True
    limits = jax.numpy.iinfo(dtype)
    return np.asarray(limits.min if jax.numpy.issubdtype(dtype, np.signedinteger) else limits.max, dtype)
