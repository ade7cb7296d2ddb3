"""What a Ref on a GPU holds, who has written each element, and who has read it since: where races are seen.

Writers are a number for each element, reads are regions: a large block costs one comparison of arrays.
"""

import dataclasses
from typing import Any

import numpy as np

from ...ir.gpu_program import Instr
from ...ir.ops import bits_of, poison
from ...ir.places import Place
from ..regions import Region

NEVER, GIVEN = -1, 0  # numbers of writers: nobody; whoever launched the kernel


@dataclasses.dataclass(slots=True)
class Access:
    """One read or write. engine: "copy", "store", "wgmma", "tcgen05", "load" or "fill" (of TMEM), or "".

    index: of its thread, where it is the thread's own. unread: of a copy, the write whose values it overwrites, if its
    thread knows that they are there; readers: who has read them. barrier: the Slot that it arrives on, if it is the
    first write there.
    """

    agent: int
    time: int
    instr: Instr
    who: str
    verb: str
    engine: str = ""
    index: dict[Any, int] | None = None
    unread: "Access | None" = None
    readers: frozenset[str] = frozenset()
    barrier: Any = None

    @property
    def is_async(self) -> bool:
        return self.engine != ""


class Buffer:
    """A Ref in GMEM, SMEM, TMEM or registers.

    values: of an array that the kernel is called with. twins: other Refs that lie in the same memory (a RefUnion), each
    `offset` bytes from its start.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, space: str, values: np.ndarray | None = None
    ):
        self.name, self.space, self.shape, self.dtype = name, space, shape, dtype
        self.read_only = values is not None
        self.values = poison(shape, dtype) if values is None else np.array(values)
        self.tracked = space != "regs"
        self.writer = np.full(shape if self.tracked else (), NEVER, np.int32)
        if values is not None:
            self.writer = np.broadcast_to(np.int32(GIVEN), shape)
        self.writes: list[Access | None] = [None]  # by number
        self.reads: dict[Any, tuple[Region, Access]] = {}
        self.twins: list[Buffer] = []
        self.offset = 0
        self.part_of: tuple[Buffer, Any] | None = None
        self.parts: dict[Any, Buffer] = {}  # of a RefUnion

    def writers_of(self, place: Place) -> list[int]:
        """The numbers of the writes that what is there comes from."""
        marks = np.asarray(place.get(self.writer, marks=True))
        if not marks.size:
            return []
        first = marks.flat[0]
        return [int(first)] if (marks == first).all() else [int(w) for w in np.unique(marks)]

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
        first, last, _ = region.hull()
        mine, its = bits_of(self.dtype), bits_of(twin.dtype)
        start = (first * mine + 8 * (self.offset - twin.offset)) // its
        stop = -(-(last * mine + 8 * (self.offset - twin.offset)) // its)
        return slice(min(max(start, 0), twin.writer.size), min(max(stop, 0), twin.writer.size))

    def overwritten(self, part: slice) -> None:
        """Another Ref has been stored into where this one lies: what it held is gone."""
        self.writer.reshape(-1)[part] = NEVER
        self.values.reshape(-1)[part] = poison((), self.dtype)
