"""What the Refs of a kernel hold, and what is known of each element: does it hold something, and who stored it last.

Both are one value for a whole buffer as long as its elements agree, so a large block costs no more bookkeeping than a
small one. Values are shared, not copied, until somebody stores into a part of them.
"""

import dataclasses
from typing import Any

import numpy as np

from ..ir.ops import poison


@dataclasses.dataclass(slots=True)
class Place:
    """Where in a buffer: a chain of NumPy keys, or (where keys cannot chain) a flat index array."""

    keys: list[Any]
    flat: np.ndarray | None = None

    def get(self, array: np.ndarray) -> Any:
        if self.flat is not None:
            return array.reshape(-1)[self.flat]
        view, key = self._last(array)
        return view[key]

    def set(self, array: np.ndarray, value: Any) -> None:
        if self.flat is not None:
            array.reshape(-1)[self.flat] = value
        else:
            view, key = self._last(array)
            view[key] = value

    def _last(self, array: np.ndarray) -> tuple[np.ndarray, Any]:
        for key in self.keys[:-1]:
            array = array[key]
        return array, self.keys[-1] if self.keys else ...

    def part(self, key: tuple[Any, ...]) -> "Place":
        """A part of this place."""
        if self.flat is not None:
            return Place([], self.flat[key])
        return Place([*self.keys, key])

    def box(self) -> tuple[Any, ...]:
        key = self.keys[-1] if self.keys else ()
        key = key if isinstance(key, tuple) else (key,)
        return tuple((k.start, k.stop, k.step) if isinstance(k, slice) else k for k in key if k is not Ellipsis)

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether it is all of an array of this shape, each element in its own place."""
        if self.flat is not None or len(self.keys) > 1:
            return False
        key = self.keys[0] if self.keys else ()
        if not isinstance(key, tuple):
            return False
        parts = [k for k in key if k is not Ellipsis]
        return all(
            k.start == 0 and k.stop == n and k.step == 1 if isinstance(k, slice) else n == 1 and isinstance(k, int)
            for k, n in zip(parts, shape, strict=False)
        )


WHOLE = Place([])


class Marks:
    """One mark for each element of a buffer: `one` for all of them, or `each` its own."""

    __slots__ = ("dtype", "each", "one", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, one: Any):
        self.shape, self.dtype, self.one = shape, dtype, one
        self.each: np.ndarray | None = None

    def at(self, place: Place) -> Any:
        """The marks of a part: one for all of it where all agree, else an array of its shape."""
        return self.one if self.each is None else place.get(self.each)

    def put(self, place: Place, marks: Any, whole: bool) -> None:
        if whole and np.ndim(marks) == 0:
            self.one, self.each = marks, None
        elif whole:
            self.each = np.array(marks, self.dtype).reshape(self.shape)
        elif self.each is not None:
            place.set(self.each, marks)
        elif np.ndim(marks) or marks != self.one:
            self.each = self.array()
            place.set(self.each, marks)

    def array(self) -> np.ndarray:
        return np.full(self.shape, self.one, self.dtype) if self.each is None else self.each


class Buffer:
    """A Ref: its values, which elements hold something (None: all of them), and the last step that stored each.

    clock: the machine whose steps are counted here, that of the grid that this memory belongs to.
    """

    __slots__ = ("_blank", "_shared", "clock", "left_at", "name", "role", "space", "values", "writer", "written")

    def __init__(self, name: str, values: np.ndarray, space: str, role: str, written: bool, clock: Any = None):
        self.name, self.space, self.role, self.clock = name, space, role, clock
        self.values = np.ascontiguousarray(values).reshape(np.shape(values))
        self._shared = True
        self._blank: np.ndarray | None = None
        shape = self.values.shape
        self.written = None if written else Marks(shape, bool, False)
        self.writer = Marks(shape, np.int32, -1) if role in ("out", "scratch") else None
        self.left_at = -1  # outputs: the last step of the visit before this one

    @classmethod
    def empty(
        cls, name: str, shape: tuple[int, ...], dtype: np.dtype, space: str, role: str, clock: Any = None
    ) -> "Buffer":
        made = cls(name, poison(shape, dtype), space, role, written=False, clock=clock)
        made._shared = False
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def arrive(self, left_at: int) -> None:
        """A new visit of an output block: what the buffer held belongs to another block."""
        if self._blank is None:
            self._blank = poison(self.values.shape, self.values.dtype)
        self.values, self._shared = self._blank, True
        self.written = Marks(self.shape, bool, False)
        self.writer = Marks(self.shape, np.int32, -1)
        self.left_at = left_at

    def filled(self, values: np.ndarray, written: np.ndarray | None) -> None:
        """A new block has come in. written: which of its elements hold something, None: all."""
        self.values, self._shared = values, True
        self.written = None
        if written is not None:
            self.written = Marks(self.shape, bool, False)
            self.written.put(WHOLE, written, whole=True)

    def load(self, place: Place, whole: bool) -> np.ndarray:
        """What is there now, whatever is stored later."""
        if whole:
            self._shared = True
            return place.get(self.values)
        return np.array(place.get(self.values))

    def store(self, place: Place, values: Any, whole: bool) -> None:
        if whole:
            values = np.broadcast_to(values, self.shape) if np.ndim(values) == 0 else values
            self.values = np.ascontiguousarray(values, self.values.dtype).reshape(self.shape)
            self._shared = True
            return
        if self._shared:
            self.values, self._shared = np.array(self.values), False
        place.set(self.values, values)

    def mark(self, place: Place, written: Any, step: int, whole: bool) -> None:
        """Notes a store: which elements now hold something, and the step that they are from."""
        if self.written is not None:
            self.written.put(place, written, whole)
        if self.writer is not None:
            self.writer.put(place, step, whole)
