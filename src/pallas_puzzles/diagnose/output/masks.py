"""Masks that hide the wrong elements."""

from collections.abc import Iterator

import numpy as np

from ...ir.capture import holds_primitive
from ...lens.machine import NOT_STORED, NOT_VISITED, STALE
from ..findings import Block, Finding
from .base import WrongOutput


class Masks(WrongOutput):
    """A result with -inf in it: a mask that is not the expected one."""

    def _mask(self) -> Iterator[Finding]:
        """Every wrong element is -inf where it should not be, or is not where it should."""
        hidden, wanted = np.isneginf(self.got), np.isneginf(self.want)
        state = self.trace.state[self.j][self.bad]
        if (hidden == wanted)[self.bad].any() or np.isin(state, (NOT_VISITED, NOT_STORED, STALE)).any():
            return
        extra, lost = wanted & ~hidden, hidden & ~wanted  # to be hidden and is not; hidden and should not be
        name, values = self.o.name, np.unique(self.got[extra])
        first = tuple(int(n) for n in np.argwhere(self.bad)[0])
        if len(values) == 1 and not hidden.any():
            cause = (
                f"{name} holds {values[0]:g} where -inf is expected ({extra.sum()} elements). If a mask has put it "
                "there, it is a score like any other, after a maximum and exp. Fill with -inf: exp(-inf) is 0."
            )
        elif not hidden.any():
            cause = f"nothing in {name} is masked: {extra.sum()} elements should be -inf, {list(first)} is the first."
            if holds_primitive(self.trace.call.kernel, "iota"):
                cause += " Positions are compared: do they count from the start of the array, or of the block?"
        elif self.bad.sum() > 0.5 * self.bad.size and lost.any() and extra.any():
            cause = (
                f"the mask of {name} is the wrong way round: most of what should be -inf is not, and most of what "
                "should not be, is. Turn the comparison around."
            )
        else:
            cause = self._mask_moved(~hidden, ~wanted) or (
                f"the mask of {name} is wrong: {lost.sum()} elements are -inf and should not be, {extra.sum()} are not "
                f"and should be; {list(first)} is the first."
            )
        block = next(t for t in self.tiles if self.cut(self.bad, t).any())
        yield self._finding("mask", cause, block, [*self._repeated_mask(hidden)] if "block" not in cause else [])

    def _mask_moved(self, seen: np.ndarray, wanted: np.ndarray) -> str:
        """What to say when each row should see its first n columns: one too few, a constant too many, local ones."""
        repeated = "".join(self._repeated_mask(~seen))
        if repeated:
            return repeated
        size, columns = seen.shape[-1], np.arange(seen.shape[-1])
        got, want = seen.sum(axis=-1), wanted.sum(axis=-1)
        if any((array != (columns < array.sum(axis=-1, keepdims=True))).any() for array in (seen, wanted)):
            return ""
        inner = (got > 0) & (got < size) & (want > 0) & (want < size)
        off = np.unique((got - want)[inner])
        if len(off) != 1:
            return ""
        row = tuple(int(n) for n in np.argwhere(inner)[0])
        each = f"row {list(row)} of {self.o.name} has {got[row]} elements that are not -inf, expected {want[row]}"
        if abs(int(off[0])) == 1:
            many = "many" if off[0] > 0 else "few"
            return (
                f"the mask is off by one position: {each}, and every other row one too {many}, too. Look at the "
                "comparison: < or <=, and on which side."
            )
        return (
            f"the mask is off by {abs(int(off[0]))} positions: {each}, and so on in every row. The positions of rows "
            "or columns start from the wrong number."
        )

    def _repeated_mask(self, hidden: np.ndarray) -> Iterator[str]:
        """Every block along a dimension has the same mask, and should not."""
        for axis in range(len(self.count) - 2, len(self.count)):
            alike: dict[Block, list[np.ndarray]] = {}
            right: dict[Block, list[np.ndarray]] = {}
            for t in self.tiles:
                if self.cut(hidden, t).shape == self.o.block:
                    alike.setdefault((*t[:axis], *t[axis + 1 :]), []).append(self.cut(hidden, t))
                    right.setdefault((*t[:axis], *t[axis + 1 :]), []).append(self.cut(np.isneginf(self.want), t))
            same = all(np.array_equal(a, group[0]) for group in alike.values() for a in group)
            differ = any(not np.array_equal(a, group[0]) for group in right.values() for a in group)
            if same and differ and any(group[0].any() and not group[0].all() for group in alike.values()):
                yield (
                    f"the mask is the same in every block of {self.o.name} along dimension {axis}: positions are "
                    "counted from the start of the block. Add the number of the block times its size."
                )
                return
