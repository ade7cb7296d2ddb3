"""What a Ref on a GPU holds, who has written each element, and who has read it since: where races are seen.

Writers are a number for each element, reads are boxes: a large block costs one comparison of arrays, not a set of its
elements.
"""

import dataclasses
from typing import Any

import numpy as np

from ...ir.gpu_program import Instr
from ...ir.ops import bits_of, poison
from ...ir.places import Place

NEVER, GIVEN = -1, 0  # numbers of writers: nobody; whoever launched the kernel


@dataclasses.dataclass(slots=True)
class Access:
    """One read or write. engine: "copy", "store", "wgmma", "tcgen05", "load" or "fill" (of TMEM), or ""."""

    agent: int
    time: int
    instr: Instr | None
    who: str
    verb: str
    engine: str = ""

    @property
    def is_async(self) -> bool:
        return self.engine != ""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Which elements of a Ref: a box, (start, stop, step) for each dimension; or, where it is none, their numbers."""

    box: tuple[tuple[int, int, int], ...] | None
    cells: frozenset[int] | None = None

    def meets(self, other: "Region", shape: tuple[int, ...]) -> bool:
        """Whether the two have an element in common."""
        if self.box is not None and other.box is not None:
            return all(_meet(a, b) for a, b in zip(self.box, other.box, strict=True))
        return bool(self.numbers(shape) & other.numbers(shape))

    def holds(self, other: "Region") -> bool:
        """Whether all of `other` is in it; False where that is not plain."""
        if self.box is None or other.box is None:
            return self == other
        return all(
            a[0] <= b[0] and b[1] <= a[1] and (a[2] == 1 or a == b) for a, b in zip(self.box, other.box, strict=True)
        )

    def hull(self, shape: tuple[int, ...]) -> tuple[int, int, bool]:
        """(first element, one past the last, whether it has all between them), in row-major order."""
        if self.box is None:
            cells = self.cells or frozenset()
            return (
                min(cells, default=0),
                max(cells, default=-1) + 1,
                max(cells, default=-1) + 1 - min(cells, default=0) == len(cells),
            )
        first = last = 0
        count = 1
        for (start, stop, step), n in zip(self.box, shape, strict=True):
            here = range(start, stop, step)
            count *= len(here)
            first, last = first * n + start, last * n + (here[-1] if here else start)
        return first, last + 1 if count else first, last + 1 - first == count

    def numbers(self, shape: tuple[int, ...]) -> frozenset[int]:
        if self.cells is not None:
            return self.cells
        key = tuple(slice(*b) for b in self.box or ())
        return frozenset(np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[key].ravel().tolist())


def _meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    if a[0] >= b[1] or b[0] >= a[1]:
        return False
    if a[2] == b[2] and a[2] > 1:
        return (a[0] - b[0]) % a[2] == 0
    return True


def region_of(place: Place, shape: tuple[int, ...]) -> Region:
    """The elements of an array of this shape that a place points to."""
    box, keys = [(0, n, 1) for n in shape], list(place.steps)
    dims = list(range(len(shape)))  # which dimension of the array each of what is seen so far is
    while keys and isinstance(keys[0], tuple):
        key = [k for k in keys.pop(0) if k is not Ellipsis]
        if not all(isinstance(k, int | slice) for k in key):
            return _by_number(place, shape)
        left = []
        for d, k in zip(dims, key, strict=False):
            start, _, step = box[d]
            if isinstance(k, int):
                box[d] = (start + k * step, start + k * step + 1, 1)
            else:
                each = k.step or 1
                stop = min(k.stop, len(range(*box[d])))
                box[d] = (
                    start + k.start * step,
                    start + (stop - 1) * step + 1 if stop > k.start else start,
                    step * each,
                )
                left.append(d)
        dims = [*left, *dims[len(key) :]]
    if any(isinstance(k, tuple) for k in keys):
        return _by_number(place, shape)
    return Region(tuple(box))


def _by_number(place: Place, shape: tuple[int, ...]) -> Region:
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    return Region(None, frozenset(np.asarray(place.get(numbers, marks=True)).ravel().tolist()))


class Buffer:
    """A Ref in GMEM, SMEM, TMEM or registers.

    role: "in", "out" or "scratch". twins: other Refs that lie in the same memory (a RefUnion), each `offset` bytes from
    its start.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype, space: str, role: str = "scratch"):
        self.name, self.space, self.role, self.shape, self.dtype = name, space, role, shape, dtype
        self.values = poison(shape, dtype)
        self.tracked = space != "regs"
        self.writer = np.full(shape if self.tracked else (), NEVER, np.int32)
        self.writes: list[Access | None] = [None]  # by number
        self.reads: dict[Any, tuple[Region, Access]] = {}
        self.twins: list[Buffer] = []
        self.offset = 0
        self.part_of: tuple[Buffer, Any] | None = None
        self.parts: dict[Any, Buffer] = {}  # of a RefUnion

    @classmethod
    def given(cls, name: str, values: np.ndarray, role: str) -> "Buffer":
        """An array that the kernel is called with."""
        made = cls.__new__(cls)
        made.name, made.space, made.role, made.shape, made.dtype = name, "gmem", role, values.shape, values.dtype
        made.values, made.tracked, made.writes = np.array(values), True, [None]
        made.writer = np.broadcast_to(np.int32(GIVEN), values.shape)
        made.reads, made.twins, made.parts, made.offset, made.part_of = {}, [], {}, 0, None
        return made

    def writers_of(self, place: Place) -> list[int]:
        """The numbers of the writes that what is there comes from."""
        marks = np.asarray(place.get(self.writer, marks=True))
        if not marks.size:
            return []
        first = marks.flat[0]
        return [int(first)] if (marks == first).all() else [int(w) for w in np.unique(marks)]

    def never_written(self, place: Place) -> int:
        return int(np.count_nonzero(np.asarray(place.get(self.writer, marks=True)) == NEVER))

    def note_read(self, region: Region, access: Access) -> None:
        if self.role != "in":
            self.reads[region, access.agent, access.verb] = (region, access)

    def note_write(self, place: Place, region: Region, access: Access) -> None:
        if not self.writer.flags.writeable:
            self.writer = np.array(self.writer)
        self.writes.append(access)
        place.set(self.writer, len(self.writes) - 1, marks=True)
        for key in [k for k, (r, _) in self.reads.items() if region.holds(r)]:
            del self.reads[key]

    def shared_with(self, region: Region, twin: "Buffer") -> slice:
        """The elements of a twin, in row-major order, that lie where a part of this Ref does. In TMEM they lie by
        columns: all of them."""
        if self.space == "tmem":
            return slice(0, twin.writer.size)
        first, last, _ = region.hull(self.shape)
        mine, its = bits_of(self.dtype), bits_of(twin.dtype)
        start = (first * mine + 8 * (self.offset - twin.offset)) // its
        stop = -(-(last * mine + 8 * (self.offset - twin.offset)) // its)
        return slice(min(max(start, 0), twin.writer.size), min(max(stop, 0), twin.writer.size))

    def overwritten(self, part: slice) -> None:
        """Another Ref has been stored into where this one lies: what it held is gone."""
        self.writer.reshape(-1)[part] = NEVER
        self.values.reshape(-1)[part] = poison((), self.dtype)

    def overlapping_reads(self, region: Region) -> list[Access]:
        return [a for r, a in self.reads.values() if r.meets(region, self.shape)]
