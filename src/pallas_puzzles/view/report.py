"""A report on what a compiler makes of a function: text for a terminal, a roofline and a table for a notebook."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, ClassVar, Self

from ..targets.tpu.lowering import Refusal
from ..text import LINES, Lines, capital, cut, fitted, rich_text, wrapped
from .draw import FONT, LEFT, Displayed, card_html, cells_html, image, row_html, source_html, still_to_be_written, table
from .paper import BAD, GOOD, NEUTRAL
from .roofline import Roofline, achieved, digits, human_count, human_time, percent, ridge

Fact = tuple[str, str]  # (what, in words)
_WIDE = ";width:100%"
_CELL = f"{LEFT};vertical-align:top;white-space:normal"


@dataclasses.dataclass(eq=False, repr=False)
class Report[C: Any, K](Displayed):
    """What was found, of kernels K on a chip C. Truthy when the program compiles.

    refusal: why it does not. unavailable: why nobody could tell, and what to do about it.

    The rest is the same for all kernels of one kind of machine, see tpu_picture.py and gpu_picture.py. between: what
    HBM's bytes lie between. formula: how a kernel's time_s comes about; takes: what it takes, around that time; bounds:
    what bounds it, in words. under: the fact under which the kernel's table is; sides: a letter for each column of the
    table, "<" to the left, ">" to the right, "c" for code; rows: how many a screen has at the least. ranks: where a
    screen is too small, the facts of the highest rank are left out; "" is the table. columns: for their names.
    """

    chip: C
    name: str
    kernels: list[K] = dataclasses.field(default_factory=list)
    refusal: Refusal | None = None
    unavailable: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    chips: ClassVar[Mapping[str, Any]]
    between: ClassVar[str]
    formula: ClassVar[str]
    takes: ClassVar[str]
    bounds: ClassVar[Mapping[str, str]]
    under: ClassVar[str]
    sides: ClassVar[str]
    rows: ClassVar[int]
    ranks: ClassVar[Mapping[str, int]]
    columns: ClassVar[int]

    def target(self) -> str:
        """The chip in words: 'a TPU v5e'."""
        raise NotImplementedError

    def facts(self, kernel: K) -> Iterator[Fact]:
        """What is said of a kernel, from top to bottom."""
        raise NotImplementedError

    def table(self, kernel: K, most: int) -> list[list[str]]:
        """The first `most` rows of a kernel's table."""
        raise NotImplementedError

    def remarks(self) -> Iterator[Fact]:
        """What is said once, below the kernels."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self.refusal is None and not self.unavailable

    def text(self) -> str:
        """The report for a terminal: at most a screen for each kernel."""
        return "\n".join(line for _, line in _lines(self))

    def __rich__(self) -> Any:
        """The text with a little colour."""
        first = "bold green" if self else "bold" if self.unavailable else "bold yellow"
        styles = {"headline": first, "kernel": "bold", "cause": "bold", "line": "cyan", "ptxas": "yellow"}
        return rich_text(_lines(self), styles)

    def _repr_html_(self) -> str:
        """The roofline, and a table with the facts; colours are the page's own."""
        if self.unavailable:
            return card_html(NEUTRAL, f"<b>{escape(capital(self.unavailable))}</b>", FONT)
        first = f"<b>{escape(_headline(self))}</b>"
        if self.refusal is not None:
            return card_html(BAD, first + _refusal_html(self.refusal), FONT)
        tables = [_kernel_html(self, number) for number in range(len(self.kernels))]
        last = table([_fact_html(name, escape(words)) for name, words in _remarks(self)], _WIDE)
        drawn = roofline_of(self)
        picture = image(drawn.svg(), drawn.words()) if self.kernels else ""
        return picture + card_html(GOOD, first + "".join(tables) + last, FONT)

    def without(self, holes: Sequence[str]) -> Self:
        """The report on a function with parts that the reader has still to write."""
        self.unavailable = f"nothing to compile yet: {still_to_be_written(holes)}"
        return self


def matched[A, B](kernels: Iterable[A], calls: Sequence[B], *by: tuple[str, ...]) -> list[tuple[A, B | None]]:
    """Each kernel of a compiled program with its call: the first left that has the same attributes, see `by`.

    by: names of attributes; where no call has all of the first ones, the next ones count.
    """
    left, pairs = list(calls), []
    for kernel in kernels:
        alike = (call for names in by for call in left if all(getattr(call, n) == getattr(kernel, n) for n in names))
        found = next(alike, None)
        pairs.append((kernel, found))
        left = [call for call in left if call is not found]
    return pairs


# --- the words that text and table share -----------------------------------------------------------------------------


def labels(report: Report[Any, Any]) -> list[str]:
    """The kernels' names, numbered where there are several: two of them may have the same."""
    names = [kernel.name for kernel in report.kernels]
    return names if len(names) == 1 else [f"{number}. {name}" for number, name in enumerate(names, 1)]


def _headline(report: Report[Any, Any]) -> str:
    verb = "compiles" if report else "does not compile"
    return f"{report.name} {verb} for {report.target()}."


def _kernel_headline(report: Report[Any, Any], number: int) -> str:
    kernel = report.kernels[number]
    label = labels(report)[number] + (f" ({kernel.where})" if kernel.where else "")
    if kernel.time_s is None or kernel.bound is None:
        return f"{label}: no time is estimated"
    return f"{label} {report.takes.format(human_time(kernel.time_s))}, bounded by {report.bounds[kernel.bound]}"


def _remarks(report: Report[Any, Any]) -> Iterator[Fact]:
    runs = [getattr(kernel, "runs", 1) for kernel in report.kernels]
    times = [k.time_s * n for k, n in zip(report.kernels, runs, strict=True) if k.time_s is not None]
    if len(times) == len(report.kernels) and sum(runs) > 1:
        yield "together", human_time(sum(times))
    if times:
        yield "estimate", report.formula
    yield from report.remarks()
    for note in report.notes:
        yield "note", note


def times_words(kernel: Any) -> str:
    longest_first = sorted(kernel.times.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {human_time(s)}" for name, s in longest_first if s) + ", each on its own"


def flop_words(kernel: Any, chip: Any, unit: str, least: str = "") -> str:
    """How many, and where they lie on the roofline. unit: what computes matrix products."""
    words = human_count(kernel.flops, "FLOP")
    if not kernel.intensity:
        return words
    point = ridge(chip, kernel.mxu_dtype or "bfloat16")
    place, what = ("below", "cannot") if kernel.intensity < point else ("above", "could")
    per_byte = f"{least}{digits(kernel.intensity)} per byte"
    words += f", {per_byte}: {place} the ridge point of the {chip.title}, {digits(point)}"
    words += f", so HBM {what} keep its {unit} busy" if kernel.mxu_dtype else ""
    if (reached := achieved(kernel, chip)) is not None:
        words += f"; {human_count(reached[0], 'FLOP/s')} is {percent(reached[1])} of the roof"
    return words


# --- text ------------------------------------------------------------------------------------------------------------

Part = tuple[int, Lines]  # (rank, lines)
_MOST_ROWS = 16  # of a table in HTML


def _lines(report: Report[Any, Any]) -> Lines:
    if report.unavailable:
        return [("headline", capital(report.unavailable))]
    lines = wrapped(_headline(report), "headline", most=2)
    if report.refusal is not None:
        return lines + _refusal_lines(report.refusal)
    room = LINES - len(lines) - 1
    last = [_row(report, *fact) for fact in _remarks(report)]
    alone = len(report.kernels) == 1
    for number in range(len(report.kernels)):
        lines = [*lines, ("", ""), *_kernel_lines(report, number, last if alone else [], room)]
    return lines if alone or not last else [*lines, ("", ""), *fitted(last, room)]


def _refusal_lines(refusal: Refusal) -> Lines:
    lines = [("", ""), *wrapped(refusal.sentence, "cause", "  ", most=10)]
    if refusal.line is not None:
        lines.append(("line", cut(f"    {refusal.line}   {refusal.line.text.strip()}")))
    return lines + wrapped(refusal.detail, "detail", "  ", most=6)


def _kernel_lines(report: Report[Any, Any], number: int, last: list[Part], room: int) -> Lines:
    """One kernel, and what comes after it, with as much of its table as there is room for."""
    kernel = report.kernels[number]
    title = (0, wrapped(_kernel_headline(report, number), "kernel", most=3))
    rows = [_row(report, *fact) for fact in report.facts(kernel)]
    after = [title, *rows, *last, *(_row(report, "note", note) for note in kernel.notes)]
    left = room - sum(len(lines) for _, lines in after)
    place = next(i for i, (_, lines) in enumerate(after) if lines[0][0] == report.under)
    after.insert(place + 1, (report.ranks[""], _table_lines(report, report.table(kernel, max(report.rows, left)))))
    return fitted(after, room)


def _table_lines(report: Report[Any, Any], rows: list[list[str]]) -> Lines:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = report.sides.replace("c", "<")
    cells = [[f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True)] for row in rows]
    return [("row", cut((" " * 14 + "  ".join(row)).rstrip())) for row in cells]


def _row(report: Report[Any, Any], name: str, words: str) -> Part:
    return report.ranks.get(name, 4), wrapped(words, name, f"  {name:{report.columns}}")


# --- HTML ------------------------------------------------------------------------------------------------------------


def _refusal_html(refusal: Refusal) -> str:
    parts = [f'<div style="margin-top:8px"><b>{escape(refusal.sentence)}</b></div>']
    if refusal.line is not None:
        parts.append(source_html(str(refusal.line), refusal.line.text.strip()))
    if refusal.detail:
        parts.append(f'<div style="opacity:.8;font-size:92%">{escape(refusal.detail)}</div>')
    return "".join(parts)


def _fact_html(name: str, inner: str) -> str:
    return row_html([f'<th scope="row" style="{_CELL};width:6em">{name}</th>', f'<td style="{_CELL}">{inner}</td>'])


def _kernel_html(report: Report[Any, Any], number: int) -> str:
    kernel = report.kernels[number]
    below = table([row_html(cells_html(row, report.sides)) for row in report.table(kernel, _MOST_ROWS)])
    facts = report.facts(kernel)
    rows = [_fact_html(name, escape(words) + (below if name == report.under else "")) for name, words in facts]
    rows += [_fact_html("note", escape(note)) for note in kernel.notes]
    title = escape(_kernel_headline(report, number))
    return f'<div style="margin-top:8px"><b>{title}</b></div>{table(rows, _WIDE)}'


def roofline_of(report: Report[Any, Any]) -> Roofline:
    """What the chip could do at any number of FLOP per byte, and where the kernels are."""
    kernels = dict(zip(labels(report), report.kernels, strict=True))
    chips = list(report.chips.values())
    return Roofline(report.name, report.target(), report.chip, chips, report.between, kernels)
