"""Which elements of an array somebody reads or writes, and whether two of them meet."""

import dataclasses
import math

import numpy as np

from ..ir.places import Place


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Some elements of an array of this shape. box: ranges of its dimensions, of which they are the product.

    cells: where they are not all of the box, their numbers in row-major order; the box is then the smallest around
    them.
    """

    shape: tuple[int, ...]
    box: tuple[range, ...]
    cells: frozenset[int] | None = None

    def meets(self, other: "Region") -> bool:
        """Whether the two have an element in common."""
        if not all(_meet(a, b) for a, b in zip(self.box, other.box, strict=True)):
            return False
        if self.cells is None and other.cells is None:
            return True
        return not self.numbers().isdisjoint(other.numbers())

    def shared(self, other: "Region") -> "Region":
        """A box around what two that meet have in common."""
        both = zip(self.box, other.box, strict=True)
        return Region(self.shape, tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both))

    def holds(self, other: "Region") -> bool:
        """Whether all of `other` is in it; False where that is not plain."""
        if self.cells is not None or other.cells is not None:
            return self == other
        return all(
            a.start <= b.start and b.stop <= a.stop and (a.step == 1 or a == b)
            for a, b in zip(self.box, other.box, strict=True)
        )

    def hull(self) -> tuple[int, int, bool]:
        """(first element, one past the last, whether it has all between them), in row-major order."""
        if self.cells is not None:
            first, stop, count = min(self.cells, default=0), max(self.cells, default=-1) + 1, len(self.cells)
        else:
            count = math.prod(map(len, self.box))
            first = stop = 0
            for each, n in zip(self.box, self.shape, strict=True):
                first, stop = first * n + each.start, stop * n + (each[-1] if each else each.start)
            stop = stop + 1 if count else first
        return first, stop, stop - first == count

    def numbers(self) -> frozenset[int]:
        """Its elements, numbered in row-major order."""
        if self.cells is not None:
            return self.cells
        key = tuple(slice(each.start, each.stop, each.step) for each in self.box)
        return frozenset(np.arange(math.prod(self.shape)).reshape(self.shape)[key].ravel().tolist())

    def named(self, name: str, dimensions: int | None = None) -> str:
        """'o_ref[3]', 'buf[0, 8:16]': as a reader would write it. dimensions: so many of them, all by default."""
        keys = [
            ":" if len(each) == n else str(each.start) if len(each) == 1 else f"{each.start}:{each.stop}"
            for each, n in zip(self.box[:dimensions], self.shape[:dimensions], strict=True)
        ]
        while keys and keys[-1] == ":":
            keys.pop()
        return f"{name}[{', '.join(keys)}]" if keys else name


def _meet(a: range, b: range) -> bool:
    if a.start >= b.stop or b.start >= a.stop:
        return False
    return (a.step == 1 and b.step == 1) or not set(a).isdisjoint(b)


def region_of(place: Place, shape: tuple[int, ...]) -> Region:
    """The elements of an array of this shape that a place points to."""
    box, keys = [range(n) for n in shape], list(place.steps)
    dims = list(range(len(shape)))  # which dimension of the array each of what is seen so far is
    while keys and isinstance(keys[0], tuple):
        key = [k for k in keys.pop(0) if k is not Ellipsis]
        if not all(isinstance(k, int | slice) for k in key):
            return _by_number(place, shape)
        for d, k in zip(dims, key, strict=False):
            box[d] = range(box[d][k], box[d][k] + 1) if isinstance(k, int) else box[d][k]
        left = [d for d, k in zip(dims, key, strict=False) if isinstance(k, slice)]
        dims = [*left, *dims[len(key) :]]
    if any(isinstance(k, tuple) for k in keys):
        return _by_number(place, shape)
    return Region(shape, tuple(box))


def _by_number(place: Place, shape: tuple[int, ...]) -> Region:
    marks = np.zeros(shape, bool)
    place.set(marks, True, marks=True)
    numbers = np.flatnonzero(marks)
    box = [range(int(min(at)), int(max(at)) + 1) for at in np.unravel_index(numbers, shape)] if numbers.size else []
    return Region(shape, tuple(box or [range(0)] * len(shape)), frozenset(numbers.tolist()))
