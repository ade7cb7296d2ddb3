"""Where the values of an answer part from those of a right one, however differently the two are written.

Both run on the same data. A value of the answer that the right one has as well, at whatever step and under whatever
name, is right. What is computed from such values alone and is none of them is where the answer leaves the way, unless
a later value that depends on it is right again: then it was another way to the same place.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..ir.capture import SourceLine, callers_of, is_call, primitive_of
from ..ir.ops import around, is_floating, observed
from ..lens import gpu
from ..lens.devices.world import this_device

_CLOSE = {2: 2e-2, 1: 2e-2}  # by bytes of a float: how much two ways to round one value may differ
_LARGE = 1e30  # stands for minus infinity in many a mask
_LEVEL = 1e-3  # a value whose elements differ by less than this, in units of its size, says nothing: zeros, ones
# What gives some elements of an operand: they may be right where others are not.
_CHOOSES = frozenset("reduce_max reduce_min argmax argmin max min get slice dynamic_slice gather".split())
_MOST = 200_000  # values that are remembered

Shape = tuple[int, ...]


def first_apart(right: Callable[[], Any], answer: Callable[[], Any]) -> list[SourceLine]:
    """The reader's lines on the way to the first value of answer() that is none of right()'s, the innermost first.

    [] where the two part nowhere. On several devices, what another one of them has is right, unless all is right so.
    """
    known = _Known()
    with observed(known.add):
        right()
    known.close()
    ways = [_Way(known, own) for own in ((False, True) if known.devices else (False,))]

    def follow(*done: Any) -> None:
        for way in ways:
            way.follow(*done)

    with observed(follow):
        run = answer()
    instrs = [i for each in run.calls for i in each.kernel.program.everything()] if isinstance(run, gpu.Run) else []
    callers = {id(i.eqn): i.callers for i in instrs}
    roots = (way.roots[n] for way in ways for n in sorted(way.latest - way.right_again))
    found = (callers.get(id(chain[0])) or [line for eqn in chain for line in callers_of(eqn)] for chain in roots)
    return next((lines for lines in found if lines), [])  # inside of a library's function there may be none


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What two equal values have in common, whatever the order of their sums: their size, projections, infinities."""

    shape: Shape
    numbers: tuple[float, ...]


def _mark(value: Any) -> _Mark | None:
    """None for what has one element, or all elements the same, and for conditions: such values say little."""
    if (
        not isinstance(value, np.ndarray)
        or value.size < 2
        or not (is_floating(value.dtype) or value.dtype.kind in "iu")
    ):
        return None
    x = np.squeeze(value).astype(np.float64)
    real = np.isfinite(x) & (np.abs(x) < _LARGE)
    x = np.where(real, x, 0)
    if (x == x.flat[0]).all():
        return None
    weights, norm = _weights(x.size), np.sqrt(x.size)
    unreal = weights[0] @ ~real.ravel() / norm
    sums = np.sqrt(np.mean(x * x)), np.mean(x), *(weights @ x.ravel() / norm), unreal
    return _Mark(x.shape, tuple(map(float, sums)))


@functools.lru_cache(16)
def _weights(size: int) -> np.ndarray:
    """(4, size): of 16-bit values that differ, one weighted sum is too often the same."""
    return np.cos(np.outer([12.9898, 78.233, 37.719, 4.581], np.arange(size)) + 1.7)


class _Known:
    """The values of the right answer: on any device, and on each. devices: whether there are several."""

    def __init__(self) -> None:
        self.found: dict[Any, list[tuple[float, ...]]] = collections.defaultdict(list)
        self.arrays: dict[Any, np.ndarray] = {}
        self.count = 0
        self.devices = False

    def add(self, eqn: Any, operands: list[Any], results: list[Any]) -> None:
        for value in (*operands, *results):
            mark = _mark(value) if self.count < _MOST else None
            if mark is None:
                continue
            self.count += 1
            self._note(mark)
            if len(mark.shape) == 2:
                turned = _mark(np.squeeze(value).T)
                assert turned is not None, "the transpose of an array of floats"
                self._note(turned)

    def _note(self, mark: _Mark) -> None:
        device = this_device()
        self.found[None, mark.shape].append(mark.numbers)
        if device is not None:
            self.devices = True
            self.found[device, mark.shape].append(mark.numbers)

    def close(self) -> None:
        self.arrays = {key: np.unique(np.array(numbers), axis=0) for key, numbers in self.found.items()}

    def has(self, mark: _Mark, itemsize: int, own: bool) -> bool:
        """own: on this device, and not on another one."""
        there = self.arrays.get((this_device() if own else None, mark.shape))
        if there is None:
            return False
        mine = np.array(mark.numbers)
        size = (there[:, :1] + mine[0]) / 2
        close = np.abs(there[:, :-1] - mine[:-1]) <= _CLOSE.get(itemsize, 1e-4) * size + 1e-9
        return bool((close.all(1) & (np.abs(there[:, -1] - mine[-1]) < 1e-9)).any())


class _Way:
    """Follows an answer. roots: the equations at which it may have left the way, in their order, one each time, with
    those around it.

    latest: the roots of the last value that is none of the right answer's. What came to nothing before does not count.
    own: what is right on another device is not.
    """

    def __init__(self, known: _Known, own: bool) -> None:
        self.known, self.own = known, own
        self.roots: list[Any] = []
        self.right_again: set[int] = set()
        self.latest: frozenset[int] = frozenset()
        self.from_roots: dict[_Mark, frozenset[int]] = {}

    def follow(self, eqn: Any, operands: list[Any], results: list[Any]) -> None:
        origins = self.latest if is_call(eqn) else frozenset[int]()  # what a kernel returns, it has made
        for mark, counts in self._unknown([] if is_call(eqn) else operands):
            origins |= self.from_roots.get(mark) or (frozenset({self._root(eqn)}) if counts else frozenset())
        for mark, counts in self._unknown(results):
            if origins or counts or primitive_of(eqn) == "dot_general":
                self.latest = self.from_roots[mark] = origins or frozenset({self._root(eqn)})
        if origins and not is_call(eqn) and primitive_of(eqn) not in _CHOOSES and any(map(self._is_right, results)):
            self.right_again |= origins

    def _unknown(self, values: list[Any]) -> Iterator[tuple[_Mark, bool]]:
        """The values that are none of the right answer's, and whether they count: integers tell positions, mostly."""
        for value in values:
            mark = _mark(value)
            if mark is not None and not self.known.has(mark, value.dtype.itemsize, self.own):
                yield mark, is_floating(value.dtype)

    def _is_right(self, value: Any) -> bool:
        mark = _mark(value)
        return mark is not None and _varies(value) and self.known.has(mark, value.dtype.itemsize, self.own)

    def _root(self, eqn: Any) -> int:
        self.roots.append((eqn, *around.get()))
        return len(self.roots) - 1


def _varies(value: np.ndarray) -> bool:
    x = value.astype(np.float64)
    x = x[np.isfinite(x)]
    return x.size > 0 and bool(np.std(x) > _LEVEL * np.sqrt(np.mean(x * x)))
