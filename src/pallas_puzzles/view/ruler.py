"""Intervals along an axis, drawn as text: which rows belong to which group, to which tile."""

from collections.abc import Mapping, Sequence

Interval = tuple[int, int, str]  # start, end (not included), label


def ruler(size: int, lanes: Mapping[str, Sequence[Interval]], *, ticks: Sequence[int] = (), width: int = 72) -> str:
    """One line per lane with its intervals of [0, size) to scale, under a line that numbers the ticks.

    Intervals of no length are listed behind their lane, as they have no room in it.
    """
    margin = max(map(len, [*lanes, "rows"])) + 2
    lines = [f"{'rows':<{margin}}{_numbers(size, ticks or [0, size], width)}".rstrip()]
    for name, intervals in lanes.items():
        empty = [label for start, end, label in intervals if end <= start]
        tail = f"   empty: {', '.join(empty)}" if empty else ""
        lines.append(f"{name:<{margin}}{_lane(size, intervals, width)}{tail}".rstrip())
    return "\n".join(lines)


def _column(row: int, size: int, width: int) -> int:
    return round(row * (width - 1) / max(size, 1))


def _numbers(size: int, ticks: Sequence[int], width: int) -> str:
    """The ticks' numbers, each from its own column on; one that has no room is left out."""
    line = ""
    for tick in sorted(set(ticks)):
        column = _column(tick, size, width)
        if column > len(line) or not line:
            line = line.ljust(column) + str(tick)
    return line


def _lane(size: int, intervals: Sequence[Interval], width: int) -> str:
    cells = [" "] * width
    for start, end, label in intervals:
        first, last = (_column(min(max(row, 0), size), size, width) for row in (start, end))
        if end <= start:
            continue
        for column in range(first, last + 1):
            cells[column] = "|" if column in (first, last) else "-" if cells[column] == " " else cells[column]
        room = last - first - 1
        if room >= len(label):
            begin = first + 1 + (room - len(label)) // 2
            cells[begin : begin + len(label)] = label
    return "".join(cells)
