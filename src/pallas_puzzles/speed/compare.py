"""Two runs of the same functions: what became faster or slower by more than noise."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..text import cut, plural, wrapped
from ..view.roofline import human_time
from .conditions import SAME
from .show import COLUMNS

if TYPE_CHECKING:
    from .results import Results, Row

_NOISE = 0.03  # what two runs on the same GPU differ by, whatever each of them says of its own spread


@dataclasses.dataclass(frozen=True)
class Change:
    """A row, and the same row of an older run. ratio: new over old time. beyond_noise: whether it counts."""

    row: Row
    ratio: float
    beyond_noise: bool

    @property
    def words(self) -> str:
        if not self.beyond_noise:
            return "the same"
        return f"faster: {self.ratio:.2f}" if self.ratio < 1 else f"slower: {self.ratio:.2f}"


def changes(new: Results, old: Results) -> list[Change]:
    """What both runs have. A change counts when four fifths of the one run lie outside of those of the other, and it is
    more than 3%, which is what two runs of the same program may differ by.
    """
    before = {row.key: (row.median_s, *_span(row)) for row in old.rows if row.median_s}
    found = []
    for row in new.rows:
        if row.median_s and row.key in before:
            median, least, most = before[row.key]
            ratio, (low, high) = row.median_s / median, _span(row)
            apart = low > most or high < least
            found.append(Change(row, ratio, apart and max(ratio, 1 / ratio) > 1 + _NOISE))
    return found


def _span(row: Row) -> tuple[float, float]:
    """In which four fifths of the calls lie; an estimate has its time alone."""
    return row.low_s or row.median_s or 0.0, row.high_s or row.median_s or 0.0


def compared(new: Results, old: Results, columns: int = COLUMNS) -> str:
    """What became faster or slower beyond the noise."""
    found = changes(new, old)
    if not found:
        return "The two runs have nothing in common: no function, size and chip is in both."
    counted = [change for change in found if change.beyond_noise]
    same = len(found) - len(counted)
    ratios = sorted(change.ratio for change in found)
    span = f"New over old time: {ratios[0]:.3f} to {ratios[-1]:.3f}, median {ratios[len(ratios) // 2]:.3f}."
    both = f"{plural(len(found), 'time')} {'is' if len(found) == 1 else 'are'} in both runs"
    words = f"{both}; {same} {'is' if same == 1 else 'are'} the same within the noise. {span}"
    lines = [line for _, line in wrapped(words, "", columns=columns)]
    for change in sorted(counted, key=lambda change: change.ratio):
        row, took = change.row, f"{human_time(change.row.median_s or 0.0):>8}"
        words = f"  {change.words:>12}  {took}  {row.work.partition(' ')[0]} {row.size} {row.dtype} {row.who}"
        lines.append(cut(words, columns))
    then, now = old.conditions, new.conditions
    if others := [f"{n}: {then.get(n)}, now {now.get(n)}" for n in SAME if then.get(n) != now.get(n)]:
        lines += [line for _, line in wrapped(f"The conditions differ: {'; '.join(others)}.", "", columns=columns)]
    return "\n".join(lines)
