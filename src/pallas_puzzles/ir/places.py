"""Where in an array a Ref's transforms point: slices, gathers, reshapes, transposes and bitcasts, one after the other.

The names of the transforms and their fields are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .ops import Beyond, bitcast, bits_of, nbytes_of, poison

OutOfBounds = Callable[[int, int, int], None]  # first and last index, and how many elements there are
_SUBLANES, _LANES, _WORD_BITS = 8, 128, 32


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """The same elements in another shape, or the same bits as another type.

    see: an array -> what is seen of it. back: the other way. marks: these two for an array with a mark per element.
    """

    see: Callable[[np.ndarray], np.ndarray]
    back: Callable[[np.ndarray], np.ndarray]
    marks: "_View | None" = None


class Place:
    """A part of an array: NumPy keys and views, one after the other.

    shape, dtype: of what is there. clipped: a part of it lies beyond the end of the array, and there is less.
    """

    __slots__ = ("clipped", "dtype", "shape", "steps")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.steps: list[Any] = []
        self.clipped = False

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)

    def get(self, array: np.ndarray, marks: bool = False) -> Any:
        """What is there, as a view where NumPy can. marks: the array has one mark for each element of another one."""
        for step in self.steps:
            array = _seen(array, step, marks)
        return array

    def read(self, array: np.ndarray, beyond: Callable[..., np.ndarray] = poison) -> np.ndarray:
        """A copy of what is there, with garbage for what lies beyond the end, or what else an array is made of."""
        return self._filled(self.get(array), beyond) if self.clipped else np.array(self.get(array))

    def marked(self, array: np.ndarray) -> np.ndarray:
        """The marks of what is there; none for what lies beyond the end."""
        found = self.get(array, marks=True)
        return self._filled(found, lambda shape, _: np.zeros(shape, array.dtype)) if self.clipped else found

    def _filled(self, found: Any, empty: Callable[..., np.ndarray]) -> np.ndarray:
        whole = empty(self.shape, self.dtype)
        whole[tuple(slice(n) for n in np.shape(found))] = found
        return whole

    def set(self, array: np.ndarray, value: Any, marks: bool = False) -> None:
        if self.clipped and np.ndim(value):
            value = value[tuple(slice(n) for n in np.shape(self.get(array, marks)))]
        if not self.steps:
            array[...] = value
        else:
            _set(array, self.steps, value, marks)

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is all of an array of this shape, each element in its own place."""
        if not self.steps:
            return True
        key = self.steps[0]
        if len(self.steps) > 1 or self.clipped or not isinstance(key, tuple):
            return False
        parts = [k for k in key if k is not Ellipsis]
        return all(
            k.start == 0 and k.stop == n and k.step in (1, None)
            if isinstance(k, slice)
            else n == 1 and isinstance(k, int)
            for k, n in zip(parts, shape, strict=False)
        )

    def part(self, key: tuple[slice, ...]) -> "Place":
        """A part of this place: a slice of each of its dimensions."""
        part = Place(tuple(k.stop - k.start for k in key), self.dtype)
        part.steps = [*self.steps, key] if key else self.steps
        return part


def _seen(array: np.ndarray, step: Any, marks: bool) -> np.ndarray:
    if not isinstance(step, _View):
        return array[step]
    return (step.marks or step).see(array) if marks else step.see(array)


def _set(array: np.ndarray, steps: Sequence[Any], value: Any, marks: bool) -> None:
    step, rest = steps[0], steps[1:]
    view = isinstance(step, _View)
    if not rest and not view:
        array[step] = value
        return
    inner = _seen(array, step, marks)
    if rest:
        _set(inner, rest, value, marks)
    else:
        inner[...] = value
    if np.may_share_memory(inner, array):
        return
    if view:
        array[...] = ((step.marks or step) if marks else step).back(inner)
    else:
        array[step] = inner


def locate(
    shape: tuple[int, ...],
    dtype: np.dtype,
    transforms: Sequence[Any],
    out_of_bounds: OutOfBounds,
    *,
    value_of: Callable[[Any], Any] = np.asarray,
    tiled: bool = False,
    clips: bool = False,
) -> Place:
    """The place in an array that a Ref's transforms point to. Raises Beyond for a kind that is not known here.

    out_of_bounds is told of an access outside of the array, which is then clamped, as interpret mode does. tiled: the
    array has whole tiles of memory, so that a slice may end in the padding of its last one. clips: a slice may end
    anywhere beyond the array, and only what is inside is there. value_of: what an index holds that is a Ref itself.
    """
    place = Place(shape, dtype)
    there = shape  # what there really is of place.shape
    last = next((n for n in reversed(range(len(transforms))) if _is_indexer(transforms[n])), -1)
    for n, t in enumerate(transforms):
        kind = type(t).__name__
        if kind == "MemorySpaceCastTransform":
            continue
        if _is_indexer(t):
            room = _whole_tiles(there, place.dtype) if tiled else there
            noted = out_of_bounds if n == last and not clips else None
            key, place.shape, there = _key(t, there, room, noted, value_of)
            place.steps.append(key)
            place.clipped = there != place.shape
            for axis, size in _repeats(t):
                if place.clipped:
                    raise Beyond("a slice beyond the end of a Ref, and one of stride 0")
                place.steps.append(_repeated(axis, size))
                place.shape = there = (*there[:axis], size, *there[axis + 1 :])
            continue
        if place.clipped:
            raise Beyond("a slice beyond the end of a Ref, in another shape")
        if kind == "ReshapeTransform":
            place.steps.append(_reshaped(place.shape, tuple(t.shape)))
            place.shape = tuple(t.shape)
        elif kind == "TransposeTransform":
            place.steps.append(_transposed(tuple(t.permutation)))
            place.shape = tuple(place.shape[i] for i in t.permutation)
        elif kind == "BitcastTransform":
            place.steps.append(_cast(place.dtype, np.dtype(t.dtype)))
            rows = place.shape[-2] * bits_of(place.dtype) // bits_of(t.dtype) if len(place.shape) > 1 else 0
            place.shape = (*place.shape[:-2], rows, place.shape[-1]) if len(place.shape) > 1 else place.shape
            place.dtype = np.dtype(t.dtype)
        else:
            raise Beyond(f"a Ref seen through {kind}")
        there = place.shape
    return place


def _is_indexer(transform: Any) -> bool:
    return type(transform).__name__ == "NDIndexer"


def _whole_tiles(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """What memory there is for an array that lies in tiles of 8 x 128 words of 32 bits."""
    tile = (_SUBLANES * max(1, _WORD_BITS // bits_of(dtype)), _LANES)
    padded = [-(-n // t) * t for n, t in zip(shape[-2:], tile[-len(shape[-2:]) :], strict=True)] if shape else []
    return (*shape[:-2], *padded)


def _key(
    indexer: Any,
    shape: tuple[int, ...],
    room: tuple[int, ...],
    out_of_bounds: OutOfBounds | None,
    value_of: Callable[[Any], Any],
) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """(a NumPy key, its shape, the shape of what there is under it). room: how far an index may reach;
    out_of_bounds=None: as far as it likes."""
    key: list[Any] = []
    asked: list[int] = []
    sizes: list[int] = []
    gathers = False
    for index, dim, most in zip(indexer.indices, shape, room, strict=True):
        if hasattr(index, "start") and hasattr(index, "size") and hasattr(index, "stride"):
            start, size, stride = int(index.start), int(index.size), int(index.stride)
            if stride == 0:  # one element, many times: see _repeats
                size = stride = 1
            last = start + max(size - 1, 0) * stride  # an empty one has to begin inside, too, as in JAX's simulator
            if start < 0 or (last >= most and out_of_bounds is not None):
                if out_of_bounds is not None:
                    out_of_bounds(start, last, dim)
                start = max(0, min(start, dim - 1 - (size - 1) * stride))
            stop = start + (size - 1) * stride + 1 if size else start
            key.append(slice(start, stop, stride))
            asked.append(size)
            sizes.append(size if stop <= dim else len(range(start, dim, stride)))
            continue
        positions = np.asarray(value_of(index))
        if positions.size and ((positions < 0).any() or (positions >= dim).any()):
            if out_of_bounds is not None:
                out_of_bounds(int(positions.min()), int(positions.max()), dim)
            positions = np.clip(positions, 0, dim - 1)
        key.append(positions if positions.ndim else int(positions))
        gathers |= positions.ndim > 0
    if not gathers:
        return (*key, ...), tuple(asked), tuple(sizes)
    there = np.broadcast_to(np.zeros((), bool), shape)[tuple(key)].shape
    if not asked:  # nothing can be cut off; and index maps are run for many steps at once
        return tuple(key), there, there
    return tuple(key), tuple(int(np.asarray(d)) for d in indexer.get_indexer_shape()), there


def _repeats(indexer: Any) -> list[tuple[int, int]]:
    """(dimension of the result, how many times) of slices with stride 0, that take the same element again and again."""
    sliced = [index for index in indexer.indices if hasattr(index, "stride")]
    found = [(axis, int(index.size)) for axis, index in enumerate(sliced) if int(index.stride) == 0]
    if found and any(np.ndim(index) for index in indexer.indices if not hasattr(index, "stride")):
        raise Beyond("a gather beside a slice of stride 0")
    return found


def _repeated(axis: int, size: int) -> _View:
    return _View(lambda a: np.repeat(a, size, axis), lambda a: a.take([-1], axis))


def _reshaped(before: tuple[int, ...], after: tuple[int, ...]) -> _View:
    return _View(lambda a: a.reshape(after), lambda a: a.reshape(before))


def _transposed(permutation: tuple[int, ...]) -> _View:
    back = tuple(np.argsort(permutation))
    return _View(lambda a: a.transpose(permutation), lambda a: a.transpose(back))


def _cast(before: np.dtype, after: np.dtype) -> _View:
    """Elements that become narrower are several along the second minor dimension, and the other way round."""
    there, back = bits_of(before), bits_of(after)
    if there == back:
        marks = _View(lambda a: a, lambda a: a)
    elif there > back:
        marks = _View(lambda a: np.repeat(a, there // back, -2), lambda a: _grouped(a, there // back).max(-2))
    else:  # all parts of an element are there, or it is not
        marks = _View(lambda a: _grouped(a, back // there).min(-2), lambda a: np.repeat(a, back // there, -2))
    return _View(lambda a: bitcast(a, after), lambda a: bitcast(a, before), marks)


def _grouped(array: np.ndarray, size: int) -> np.ndarray:
    *outer, rows, columns = array.shape
    return array.reshape(*outer, rows // size, size, columns)


def index_of(shape: tuple[int, ...], place: Place) -> int:
    """Which element of an array a place is that has one."""
    return int(np.asarray(place.get(np.arange(math.prod(shape)).reshape(shape))).reshape(-1)[0])
