"""What the Refs of a kernel hold, and what is known of each element: does it hold something, and who stored it last.

Both are one value for a whole buffer as long as its elements agree, so a large block costs no more bookkeeping than a
small one. Values are shared, not copied, until somebody stores into a part of them.
"""

from typing import Any

import numpy as np

from ..ir.ops import poison
from ..ir.places import Place


class Marks:
    """One mark for each element of a buffer: `one` for all of them, or `each` its own.

    A mark for a part is only noted: it is set when somebody asks for `each`.
    """

    __slots__ = ("_each", "_later", "dtype", "one", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, one: Any):
        self.shape, self.dtype, self.one = shape, dtype, one
        self._each: np.ndarray | None = None
        self._later: list[tuple[Place, Any]] = []

    @property
    def each(self) -> np.ndarray | None:
        """None where all agree."""
        if self._later:
            if self._each is None:
                self._each = np.full(self.shape, self.one, self.dtype)
            for place, mark in self._later:
                place.set(self._each, mark, marks=True)
            self._later.clear()
        return self._each

    def at(self, place: Place) -> Any:
        """The marks of a part: one for all of it where all agree, else an array of its shape."""
        each = self.each
        if each is None and not place.clipped:
            return self.one
        return place.marked(self.seen())

    def put(self, place: Place, marks: Any, whole: bool) -> None:
        if whole:
            self._later.clear()
            self._each = np.array(marks, self.dtype).reshape(self.shape) if np.ndim(marks) else None
            self.one = self.one if np.ndim(marks) else marks
        elif np.ndim(marks) or self._later or self._each is not None or marks != self.one:
            self._later.append((place, marks))
            if np.ndim(marks) or len(self._later) >= _NOTED:
                _ = self.each

    def seen(self) -> np.ndarray:
        """All marks, to be read only: those that agree take no memory."""
        each = self.each
        return np.broadcast_to(np.asarray(self.one, self.dtype), self.shape) if each is None else each


_NOTED = 1 << 12


class Buffer:
    """A Ref: its values, which elements hold something (None: all of them), and the last step that stored each.

    clock: the machine whose steps are counted here, that of the grid that this memory belongs to.
    """

    __slots__ = ("_blank", "_shared", "clock", "left_at", "name", "role", "space", "values", "writer", "written")

    def __init__(self, name: str, values: np.ndarray, space: str, role: str, clock: Any = None):
        self.name, self.space, self.role, self.clock = name, space, role, clock
        self.values = np.ascontiguousarray(values).reshape(np.shape(values))
        self._shared = True
        self._blank: np.ndarray | None = None
        shape = self.values.shape
        self.written: Marks | None = None
        self.writer = Marks(shape, np.int32, -1) if role in ("out", "scratch") else None
        self.left_at = -1  # outputs: the last step of the visit before this one

    @classmethod
    def empty(
        cls, name: str, shape: tuple[int, ...], dtype: np.dtype, space: str, role: str, clock: Any = None
    ) -> "Buffer":
        made = cls(name, poison((), dtype), space, role, clock)
        made.values = made._blank = np.broadcast_to(made.values, shape)  # one element, until something is stored
        made.written = Marks(shape, bool, False)
        made.writer = Marks(shape, np.int32, -1) if made.writer is not None else None
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def lose(self) -> None:
        """Nothing of what was stored is there any more. The marks stay: what was lost can be told."""
        if self._blank is None:
            self._blank = np.broadcast_to(poison((), self.values.dtype), self.shape)
        if self.space != "semaphore":
            self.values, self._shared = self._blank, True

    def arrive(self, left_at: int) -> None:
        """A new visit of an output block: what the buffer held belongs to another block."""
        self.lose()
        self.written = Marks(self.shape, bool, False)
        self.writer = Marks(self.shape, np.int32, -1)
        self.left_at = left_at

    def lend(self, place: Place) -> np.ndarray:
        """What is there now, whatever is stored later: a view of memory that is not written to."""
        if self.writer is not None:  # what is stored into again and again would be copied again and again
            return np.array(place.get(self.values))
        self._shared = True
        return place.get(self.values)

    def filled(self, values: np.ndarray, written: np.ndarray | None) -> None:
        """A new block has come in. written: which of its elements hold something, None: all."""
        self.values, self._shared, self.written = values, True, None
        if written is not None:
            self.written = Marks(self.shape, bool, False)
            self.written.put(Place(self.shape, self.values.dtype), written, whole=True)

    def load(self, place: Place, whole: bool) -> np.ndarray:
        """What is there now, whatever is stored later."""
        if whole:
            self._shared = True
            return place.get(self.values)
        return place.read(self.values)

    def store(self, place: Place, values: Any, whole: bool) -> None:
        if whole:
            values = np.broadcast_to(values, self.shape) if np.ndim(values) == 0 else values
            self.values = np.ascontiguousarray(values, self.values.dtype).reshape(self.shape)
            self._shared = True
            return
        if self._shared:
            blank = self.values is self._blank
            self.values = poison(self.shape, self.values.dtype) if blank else np.array(self.values, order="C")
            self._shared = False
        place.set(self.values, values)

    def mark(self, place: Place, written: Any, step: int, whole: bool, mask: np.ndarray | None = None) -> None:
        """Notes a store, perhaps under a mask: which elements now hold something, and the step that they are from."""
        if self.written is not None:
            self.written.put(place, written if mask is None else self.written.at(place) | mask, whole)
        if self.writer is not None:
            self.writer.put(place, step if mask is None else np.where(mask, step, self.writer.at(place)), whole)
