"""A report as text for a terminal, as a roofline and a table for a notebook, as plain data for programs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..targets.tpu.chips import CHIPS, STEP_OVERHEAD_S, Chip
from ..targets.tpu.lowering import Refusal
from ..text import LINES, Lines, cut, fitted, human_bytes, plural, wrapped
from .draw import LEFT, RIGHT, card_html, image, row_html, source_html
from .paper import BAD, BOLD, END, GOOD, NEUTRAL, SANS, SANS_EM, card, px, svg_text

if TYPE_CHECKING:
    from .tpu_report import KernelReport, Report

# How KernelReport.time_s comes about; the names are those of KernelReport.times
FORMULA = f"max(MXU, bundles, HBM - fill) + fill + {STEP_OVERHEAD_S * 1e6:g} us a step; fill: first blocks in, last out"
BOUNDS = {
    "MXU": "the MXU: the matrix products take longer than all else",
    "bundles": "its bundles: the instructions of a step take longer than its copies",
    "HBM": "HBM: the copies take longer than all else",
    "steps": "its steps: what each costs beyond its work adds up to the most; larger blocks need fewer",
}


# --- numbers and names -----------------------------------------------------------------------------------------------


def digits(number: float) -> str:
    """Three significant digits, never an exponent for large numbers: 2109.25 -> '2109', 14.25 -> '14.2'."""
    if number >= 99.95:
        return count_words(round(number))
    return f"{number:.3g}"


def count_words(count: int) -> str:
    return f"{count:,}" if count >= 10_000 else str(count)


def human_time(seconds: float) -> str:
    """Microseconds, the unit of kernels, unless that gives long numbers."""
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if seconds * scale < (99.95 if unit == "ns" else 999.5):
            return f"{digits(seconds * scale)} {unit}" if seconds else "0 us"
    return f"{digits(seconds)} s"


def human_count(count: float, unit: str) -> str:
    """17.2e9 -> '17.2 GFLOP'; decimal, as peaks and bandwidths are stated."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 999.5 or prefix == "P":
            break
        count /= 1000
    return f"{digits(count)} {prefix}{unit}"


def target_words(chip: Chip) -> str:
    name = chip.title
    return f"{name} (one of its two TensorCores)" if name == "TPU7x" else f"TPU {name}"


def labels(report: Report) -> list[str]:
    """The kernels' names, numbered where there are several: two of them may have the same."""
    names = [kernel.name for kernel in report.kernels]
    return names if len(names) == 1 else [f"{number}. {name}" for number, name in enumerate(names, 1)]


def ridge(chip: Chip, dtype: str = "bfloat16") -> float:
    """FLOP per byte from which on the MXU's peak for `dtype` is the roof, and no longer HBM."""
    return chip.flops_per_s(dtype) / chip.hbm_bytes_per_s


def roof_at(intensity: float, chip: Chip, dtype: str = "bfloat16") -> float:
    """The most FLOP/s at so many FLOP per byte."""
    return min(chip.flops_per_s(dtype), intensity * chip.hbm_bytes_per_s)


def achieved(kernel: KernelReport, chip: Chip) -> tuple[float, float] | None:
    """(FLOP/s at the estimated time, its share of the roof); None where nobody can know, or there are no FLOPs."""
    if not kernel.intensity or not kernel.time_s:
        return None
    speed = kernel.flops / kernel.time_s
    return speed, speed / roof_at(kernel.intensity, chip, kernel.mxu_dtype or "bfloat16")


# --- the facts, which text and table share ---------------------------------------------------------------------------


def headline(report: Report) -> str:
    verb = "compiles" if report else "does not compile"
    return f"{report.name} {verb} for a {target_words(report.chip)}."


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def kernel_headline(kernel: KernelReport, label: str) -> str:
    where = f" ({kernel.where})" if kernel.where else ""
    if kernel.time_s is None or kernel.bound is None:
        return f"{label}{where}: no time is estimated"
    return f"{label}{where} takes about {human_time(kernel.time_s)}, bounded by {BOUNDS[kernel.bound]}"


def facts(kernel: KernelReport, report: Report) -> Iterator[tuple[str, str]]:
    """(what, in words), from top to bottom; the table of buffers belongs under "VMEM"."""
    chip = report.chip
    yield "grid", _grid_words(kernel)
    if kernel.runs > 1:
        yield "calls", f"{kernel.runs}; the figures are those of one call"
    if kernel.times:
        longest_first = sorted(kernel.times.items(), key=lambda pair: -pair[1])
        parts = [f"{name} {human_time(seconds)}" for name, seconds in longest_first]
        yield "times", f"{', '.join(parts)}, each on its own"
    yield "VMEM", _vmem_words(kernel, chip)
    yield "spills", _spill_words(kernel)
    yield "bundles", _bundle_words(kernel)
    least = f"{digits(kernel.mxu_cycles)} cycles per step at the least, for its matrix products"
    yield "MXU", least if kernel.mxu_cycles else "no matrix products"
    yield "slots", ", ".join(f"{slot} {share:.0%}" for slot, share in kernel.slots.items()) + " in use"
    yield "HBM", _hbm_words(kernel, chip)
    yield "FLOPs", _flop_words(kernel, chip)
    if kernel.cycles is not None:
        took = f"{human_time(kernel.cycles / chip.clock_hz)} at {digits(chip.clock_hz / 1e9)} GHz"
        yield "simulator", f"{kernel.cycles:,} cycles, {took} (libtpu's; its copies do not share the bandwidth)"
    elif not report.simulator:
        yield "simulator", "libtpu's simulator gives no cycles for this kernel"


def _grid_words(kernel: KernelReport) -> str:
    if kernel.steps is None:
        return "set at run time: nobody can know how many steps" if kernel.dynamic else "steps unknown"
    return f"{kernel.grid} = {plural(kernel.steps, 'step')}{', set at run time' if kernel.dynamic else ''}"


def _vmem_words(kernel: KernelReport, chip: Chip) -> str:
    limit = f"{human_bytes(kernel.vmem_limit_bytes)} that it may use; a TensorCore has {human_bytes(chip.vmem_bytes)}"
    if not kernel.buffers:
        return f"no buffers, of the {limit}"
    return f"{human_bytes(kernel.vmem_bytes)}, {percent(kernel.vmem_bytes / kernel.vmem_limit_bytes)} of the {limit}"


def percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.0995 else f"{share:.0%}"


def buffers(kernel: KernelReport, most: int = 1 << 20) -> list[tuple[str, str, str]]:
    """(name, size, share of what the kernel may use), the largest first; what is left after `most` rows in the last."""
    rows = sorted(kernel.buffers.items(), key=lambda pair: -pair[1])
    if len(rows) > most:
        shown, rest = rows[: most - 1], rows[most - 1 :]
        rows = [*shown, (f"and {len(rest)} more", sum(nbytes for _, nbytes in rest))]
    return [(name, human_bytes(nbytes), percent(nbytes / kernel.vmem_limit_bytes)) for name, nbytes in rows]


def _spill_words(kernel: KernelReport) -> str:
    if not kernel.spills and not kernel.fills:
        return "no vector register is spilled to VMEM"
    verb = "is" if kernel.spills == 1 else "are"
    return (
        f"{plural(kernel.spills, 'vector register')} {verb} spilled to VMEM, {kernel.fills:,} reloaded: "
        "a step has more values at hand than there are registers; with smaller blocks it has fewer"
    )


def _bundle_words(kernel: KernelReport) -> str:
    words = f"{digits(kernel.mean_step)} per step"
    if kernel.least_step != kernel.most_step:
        least, most = count_words(kernel.least_step), count_words(kernel.most_step)
        words += f" ({least} to {most}, by what pl.when leaves out)"
    return f"{words}, one a cycle; {count_words(kernel.bundles)} in all"


def _hbm_words(kernel: KernelReport, chip: Chip) -> str:
    if kernel.hbm_bytes is None:
        return "how many bytes it moves is not known"
    most = "" if kernel.hbm_exact else "at most "
    speed = human_count(chip.hbm_bytes_per_s, "B/s")
    return f"{most}{human_bytes(kernel.hbm_bytes)} between HBM and VMEM, which a {chip.title} moves at {speed}"


def _flop_words(kernel: KernelReport, chip: Chip) -> str:
    words = human_count(kernel.flops, "FLOP")
    if not kernel.intensity:
        return words
    point = ridge(chip, kernel.mxu_dtype or "bfloat16")
    place, what = ("below", "cannot") if kernel.intensity < point else ("above", "could")
    meaning = f", so HBM {what} keep its MXU busy" if kernel.mxu_dtype else ""
    least = "" if kernel.hbm_exact else "at least "
    words += f", {least}{digits(kernel.intensity)} per byte: {place} the ridge point of a {chip.title}, {digits(point)}"
    words += meaning
    if (reached := achieved(kernel, chip)) is not None:
        words += f"; {human_count(reached[0], 'FLOP/s')} is {percent(reached[1])} of the roof"
    return words


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """What is said once, below the kernels."""
    times = [kernel.time_s * kernel.runs for kernel in report.kernels if kernel.time_s is not None]
    if len(times) == len(report.kernels) and sum(kernel.runs for kernel in report.kernels) > 1:
        yield "together", human_time(sum(times))
    if times:
        yield "estimate", FORMULA
    if report.simulator:
        yield "simulator", report.simulator
    if report.copies:
        verb = "is" if report.copies == 1 else "are"
        yield "XLA", f"{plural(report.copies, 'array')} {verb} copied around the kernels, which no figure here counts"
    for note in report.notes:
        yield "note", note


# --- text ------------------------------------------------------------------------------------------------------------

Part = tuple[int, Lines]  # (rank, lines); where a screen is too small, the highest ranks are left out
_RANKS = {"grid": 1, "times": 1, "VMEM": 2, "bundles": 2, "HBM": 2, "FLOPs": 2, "spills": 3, "note": 3, "buffers": 5}
_NAME_COLUMNS, _MOST_NAME = 12, 48


def text(report: Report) -> str:
    """The report for a terminal: at most a screen for each kernel."""
    return "\n".join(line for _, line in _lines(report))


def rich(report: Report) -> Any:
    """The text with a little colour."""
    from rich.text import Text

    first = "bold green" if report else "bold" if report.unavailable else "bold yellow"
    styles = {"headline": first, "kernel": "bold", "cause": "bold", "line": "cyan"}
    return Text("\n").join(Text(line, style=styles.get(role, "")) for role, line in _lines(report))


def _lines(report: Report) -> Lines:
    if report.unavailable:
        return [("headline", _capital(report.unavailable))]
    lines = wrapped(headline(report), "headline", most=2)
    if report.refusal is not None:
        return lines + _refusal_lines(report.refusal)
    room = LINES - len(lines) - 1
    last = [_row(name, words) for name, words in remarks(report)]
    if len(report.kernels) == 1:
        return [*lines, ("", ""), *_kernel_lines(report, 0, last, room)]
    for number in range(len(report.kernels)):
        lines = [*lines, ("", ""), *_kernel_lines(report, number, [], room)]
    return [*lines, ("", ""), *fitted(last, room)] if last else lines


def _refusal_lines(refusal: Refusal) -> Lines:
    lines = [("", ""), *wrapped(refusal.sentence, "cause", "  ", most=10)]
    if refusal.line is not None:
        lines.append(("line", cut(f"    {refusal.line}   {refusal.line.text.strip()}")))
    return lines + wrapped(refusal.detail, "detail", "  ", most=6)


def _kernel_lines(report: Report, number: int, last: list[Part], room: int) -> Lines:
    """One kernel, and what comes after it, with as many of its buffers as there is room for."""
    kernel = report.kernels[number]
    title = (0, wrapped(kernel_headline(kernel, labels(report)[number]), "kernel", most=3))
    rows = [_row(name, words) for name, words in facts(kernel, report)]
    after = [title, *rows, *last, *(_row("note", note) for note in kernel.notes)]
    left = room - sum(len(lines) for _, lines in after)
    place = next(i for i, (_, lines) in enumerate(after) if lines[0][0] == "VMEM") + 1
    return fitted([*after[:place], (_RANKS["buffers"], _buffer_lines(kernel, max(2, left))), *after[place:]], room)


def _buffer_lines(kernel: KernelReport, most: int) -> Lines:
    rows = buffers(kernel, most)
    names = [cut(name, _MOST_NAME) for name, _, _ in rows]
    wide, deep = max(map(len, names), default=0), max((len(size) for _, size, _ in rows), default=0)
    indent = " " * (_NAME_COLUMNS + 2)
    return [
        ("buffer", f"{indent}{name:{wide}}  {size:>{deep}}  {share:>5}")
        for name, (_, size, share) in zip(names, rows, strict=True)
    ]


def _row(name: str, words: str) -> Part:
    return _RANKS.get(name, 4), wrapped(words, name, f"  {name:{_NAME_COLUMNS - 2}}")


# --- HTML ------------------------------------------------------------------------------------------------------------

_FONT = f";font-size:13px;font-family:{SANS}"
_WIDE = ";width:100%"
_CELL = "vertical-align:top;white-space:normal"


def html(report: Report) -> str:
    """The roofline, and a table with the facts; colours are the page's own."""
    if report.unavailable:
        return card_html(NEUTRAL, f"<b>{escape(_capital(report.unavailable))}</b>", _FONT)
    first = f"<b>{escape(headline(report))}</b>"
    if report.refusal is not None:
        return card_html(BAD, first + _refusal_html(report.refusal), _FONT)
    tables = [_kernel_html(report, number) for number in range(len(report.kernels))]
    last = _table([_row_html(name, escape(words)) for name, words in remarks(report)], _WIDE)
    picture = image(roofline_svg(report), roofline_words(report)) if report.kernels else ""
    return picture + card_html(GOOD, first + "".join(tables) + last, _FONT)


def _refusal_html(refusal: Refusal) -> str:
    parts = [f'<div style="margin-top:8px"><b>{escape(refusal.sentence)}</b></div>']
    if refusal.line is not None:
        parts.append(source_html(str(refusal.line), refusal.line.text.strip()))
    if refusal.detail:
        parts.append(f'<div style="opacity:.8;font-size:92%">{escape(refusal.detail)}</div>')
    return "".join(parts)


def _kernel_html(report: Report, number: int) -> str:
    kernel = report.kernels[number]
    title = escape(kernel_headline(kernel, labels(report)[number]))
    rows = []
    for name, words in facts(kernel, report):
        rows.append(_row_html(name, escape(words) + (_buffers_html(kernel) if name == "VMEM" else "")))
    rows += [_row_html("note", escape(note)) for note in kernel.notes]
    return f'<div style="margin-top:8px"><b>{title}</b></div>{_table(rows, _WIDE)}'


def _buffers_html(kernel: KernelReport) -> str:
    name, number = (f'<td style="{LEFT}"><code>{{}}</code></td>', f'<td style="{RIGHT}">{{}}</td>')
    rows = buffers(kernel)
    return _table([row_html([name.format(escape(row[0])), *map(number.format, row[1:])]) for row in rows])


def _row_html(name: str, inner: str) -> str:
    head = f'<th scope="row" style="{LEFT};{_CELL};width:6em">{name}</th>'
    return row_html([head, f'<td style="{LEFT};{_CELL}">{inner}</td>'])


def _table(rows: Sequence[str], more: str = "") -> str:
    style = f"border-collapse:collapse;margin:4px 0;font-size:12px;border:0{more}"
    return f'<table style="{style}">{"".join(rows)}</table>' if rows else ""


# --- the roofline ----------------------------------------------------------------------------------------------------

_LEFT, _TOP, _RIGHT, _BOTTOM, _HEIGHT = 62.0, 66.0, 590.0, 372.0, 430.0  # the axes, and all of it
_MARGIN, _WIDE_MARGIN = 150.0, 200.0  # right of the axes: for the names of the roofs, and for a key to several dots
_TEXT, _LINE, _SMALL = 12.0, 15.0, 11.0  # sizes in px: of text, from line to line, of ticks
_GAP, _NEAR = 5.0, 12.0  # from a label to anything else at the least, and to its dot if no line leads there
_MOST_KEYS, _MOST_LABEL, _MOST_WORDS = 7, 23, 32
_MIDDLE = ' text-anchor="middle"'
_DASHES = {"v5e": "", "v6e": "9 4", "tpu7x": "2 3"}

_Box = tuple[float, float, float, float]  # left, top, right, bottom


class _Dot(NamedTuple):
    """A kernel in the picture. x: FLOP per byte, y: FLOP/s, roof: what y could be."""

    x: float
    y: float
    roof: float


class _Entry(NamedTuple):
    """A kernel, and what is said of it; without a dot, why there is none."""

    label: str
    words: str
    dot: _Dot | None = None


class _Axes:
    """Decades on paper: FLOP per byte to the right, FLOP/s upwards."""

    def __init__(self, dots: Sequence[_Dot], dtype: str):
        self.dtype = dtype
        least = min([0.1, *(dot.x / 1.5 for dot in dots)])
        most = max([1e4, *(dot.x * 1.5 for dot in dots)])
        self.x0, self.x1 = math.floor(math.log10(least)), math.ceil(math.log10(most))
        slowest = min(chip.hbm_bytes_per_s for chip in CHIPS.values()) * 10.0**self.x0
        fastest = max(chip.flops_per_s(dtype) for chip in CHIPS.values())
        self.y0 = math.floor(math.log10(min([slowest, *(dot.y / 1.5 for dot in dots)])))
        self.y1 = math.log10(max([2 * fastest, *(2 * dot.y for dot in dots)]))

    def x(self, intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - self.x0) / (self.x1 - self.x0) * (_RIGHT - _LEFT)

    def y(self, speed: float) -> float:
        return _BOTTOM - (math.log10(speed) - self.y0) / (self.y1 - self.y0) * (_BOTTOM - _TOP)

    def roof(self, chip: Chip) -> list[tuple[float, float]]:
        """Corners, in px."""
        ends = (10.0**self.x0, min(ridge(chip, self.dtype), 10.0**self.x1), 10.0**self.x1)
        return [(self.x(x), self.y(roof_at(x, chip, self.dtype))) for x in ends]


def roofline_svg(report: Report) -> str:
    """What a core could do at any number of FLOP per byte, and where the kernels are, as a standalone SVG."""
    entries = _entries(report)
    dots = [entry.dot for entry in entries if entry.dot is not None]
    axes, several = _Axes(dots, _peak_dtype(report)), len(entries) > 1
    caption = f"roofs: HBM bandwidth up to the ridge point (ring), then {_PEAKS[axes.dtype]} peak"
    caption += f"; {'dot' if len(dots) == 1 else 'dots'}: at the estimated time" if dots else ""
    marks = [
        svg_text(_LEFT, 24, cut(f"{report.name} on a {target_words(report.chip)}", 60, "…"), 14, "ink", SANS, BOLD),
        svg_text(_LEFT, 42, caption, _SMALL, "muted", SANS),
        *_ticks(axes),
        *(
            _roof_marks(axes, each, report.chip)
            for each in sorted(CHIPS.values(), key=lambda each: each is report.chip)
        ),
        *_roof_labels(axes, report.chip),
        *_dot_marks(axes, entries),
        *(_key(entries) if several else []),
    ]
    return card(_RIGHT + (_WIDE_MARGIN if several else _MARGIN), _HEIGHT, "".join(marks))


_PEAKS = {"bfloat16": "bf16", "int8": "int8"}


def _peak_dtype(report: Report) -> str:
    """Whose peak the roofs show: int8's where all products are of int8."""
    return "int8" if {kernel.mxu_dtype for kernel in report.kernels} == {"int8"} else "bfloat16"


def roofline_words(report: Report) -> str:
    """The picture in words."""
    dtype = _peak_dtype(report)
    roofs = [
        f"{each.title} {human_count(each.hbm_bytes_per_s, 'B/s')} up to {digits(ridge(each, dtype))} FLOP per byte, "
        f"then {human_count(each.flops_per_s(dtype), 'FLOP/s')}"
        for each in CHIPS.values()
    ]
    parts = [
        f"Roofline of {report.name} on a {target_words(report.chip)}. Roofs, in {_PEAKS[dtype]}: {'; '.join(roofs)}."
    ]
    for entry in _entries(report):
        at = f"{digits(entry.dot.x)} FLOP per byte, {human_count(entry.dot.y, 'FLOP/s')}, " if entry.dot else ""
        parts.append(f"{entry.label}: {at}{entry.words}.")
    return " ".join(parts)


def _entries(report: Report) -> list[_Entry]:
    return [_entry(kernel, label, report.chip) for kernel, label in zip(report.kernels, labels(report), strict=True)]


def _entry(kernel: KernelReport, label: str, chip: Chip) -> _Entry:
    if kernel.intensity and kernel.time_s and (reached := achieved(kernel, chip)):
        speed, share = reached
        words = f"{human_time(kernel.time_s)}, {percent(share)} of the roof"
        return _Entry(label, words, _Dot(kernel.intensity, speed, speed / share))
    why = "no HBM bytes" if kernel.hbm_bytes == 0 else "HBM bytes unknown"
    why = "no arithmetic" if not kernel.flops else why if kernel.intensity is None else "time unknown"
    return _Entry(label, f"no dot: {why}")


def _ticks(axes: _Axes) -> Iterator[str]:
    """A line and a number for every decade, and what the axes are."""
    line = 'stroke="var(--line)" stroke-width=".7"'
    for decade in range(axes.x0, axes.x1 + 1):
        x, words = axes.x(10.0**decade), f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:g}"
        yield f'<path d="M{px(x)} {px(_TOP)}V{px(_BOTTOM)}" {line}/>'
        yield svg_text(x, _BOTTOM + 17, words, _SMALL, "muted", SANS, _MIDDLE)
    for decade in range(axes.y0, math.floor(axes.y1) + 1):
        y = axes.y(10.0**decade)
        yield f'<path d="M{px(_LEFT)} {px(y)}H{px(_RIGHT)}" {line}/>'
        yield svg_text(_LEFT - 7, y + 4, human_count(10.0**decade, "").strip(), _SMALL, "muted", SANS, END)
    middle = (_LEFT + _RIGHT) / 2
    yield svg_text(middle, _BOTTOM + 38, "FLOP per byte between HBM and VMEM", _TEXT, "ink", SANS, _MIDDLE)
    yield svg_text(_LEFT - 7, _TOP - 8, "FLOP/s", _TEXT, "ink", SANS, END)


def _roof_marks(axes: _Axes, chip: Chip, mine: Chip) -> str:
    corners = axes.roof(chip)
    path = "L".join(f"{px(x)} {px(y)}" for x, y in corners)
    dash = f' stroke-dasharray="{_DASHES[chip.name]}"' if _DASHES[chip.name] else ""
    colour, width = ("var(--blue)", "2.4") if chip is mine else ("var(--frame)", "1.3")
    x, y = corners[1]
    return (
        f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>'
        f'<circle cx="{px(x)}" cy="{px(y)}" r="3" fill="var(--paper)" stroke="{colour}" stroke-width="1.3"/>'
    )


def _roof_labels(axes: _Axes, mine: Chip) -> Iterator[str]:
    """Beside the roofs' ends, from the highest down, with room for each."""
    lowest = -math.inf
    for chip in sorted(CHIPS.values(), key=lambda each: -each.flops_per_s(axes.dtype)):
        end = axes.roof(chip)[-1][1]
        y = lowest = max(end - 4, lowest + _LINE + 1)
        colour, more = ("blue", BOLD) if chip is mine else ("ink", "")
        yield f'<path d="M{px(_RIGHT)} {px(end)}L{px(_RIGHT + 8)} {px(y)}" stroke="var(--frame)" stroke-width=".8"/>'
        words = f"{chip.title}, ridge {digits(ridge(chip, axes.dtype))}"
        yield svg_text(_RIGHT + 11, y + 4, words, _TEXT, colour, SANS, more)


def _dot_marks(axes: _Axes, entries: Sequence[_Entry]) -> Iterator[str]:
    """The dots, each with its time and share or, where there are several, with its number in the key."""
    taken, places = _drawn(axes, entries), collections.defaultdict(list)
    for number, entry in enumerate(entries, 1):
        if entry.dot is not None:
            x, y = axes.x(entry.dot.x), axes.y(entry.dot.y)
            line = f"M{px(x)} {px(y)}V{px(axes.y(entry.dot.roof))}"
            yield f'<path d="{line}" stroke="var(--vermilion)" stroke-width="1"/>'
            places[x, y].append(str(number) if len(entries) > 1 else entry.words)
        elif len(entries) == 1:
            yield svg_text(_RIGHT - 8, _BOTTOM - 10, entry.words, _TEXT, "ink", SANS, END)
    for (x, y), words in places.items():
        ink = 'fill="var(--vermilion)" stroke="var(--paper)" stroke-width="1"'
        yield f'<circle cx="{px(x)}" cy="{px(y)}" r="5" {ink}/>'
        said = cut(", ".join(words), _MOST_WORDS, "…")
        box = _free_place(x, y, said, taken)
        if box is not None:
            yield from _label(box, x, y, said)
            middle = (box[1] + box[3]) / 2
            taken = np.concatenate([taken, np.linspace((box[0], middle), (box[2], middle), 60)])


def _drawn(axes: _Axes, entries: Sequence[_Entry]) -> np.ndarray:
    """Points that a label should not cover, on roofs, on dots, and on the lines between them: (n, 2) in px."""
    lines = [pair for chip in CHIPS.values() for pair in itertools.pairwise(axes.roof(chip))]
    for dot in (entry.dot for entry in entries if entry.dot is not None):
        lines.append(((axes.x(dot.x), axes.y(dot.y) + 3), (axes.x(dot.x), axes.y(dot.roof))))
    return np.concatenate([np.linspace(start, end, 240) for start, end in lines])


def _free_place(x: float, y: float, words: str, taken: np.ndarray) -> _Box | None:
    """The nearest place within the axes for the label of a dot at (x, y); right of it and below, if that is as near."""
    wide, high = len(words) * _TEXT * SANS_EM, _LINE
    across = np.arange(_LEFT + _GAP, _RIGHT - wide - _GAP, 4.0)
    down = np.arange(_TOP + _GAP, _BOTTOM - high - _GAP, 4.0)
    left, top = (each.ravel() for each in np.meshgrid(across, down))
    far = np.hypot(np.clip(x, left, left + wide) - x, np.clip(y, top, top + high) - y)
    cost = np.maximum(far, 2 * _GAP) + 5 * (left + wide < x) + 5 * (top + high < y)
    cost = cost + np.where(far > 1.5 * _GAP, 0.05 * abs(top + high / 2 - y), np.inf)
    for i in np.argsort(cost, kind="stable"):
        box = float(left[i]), float(top[i]), float(left[i]) + wide, float(top[i]) + high
        inside = (taken > np.array(box[:2]) - _GAP) & (taken < np.array(box[2:]) + _GAP)
        if math.isfinite(cost[i]) and not inside.all(axis=1).any():
            return box
    return None


def _label(box: _Box, x: float, y: float, words: str) -> Iterator[str]:
    """Text set against the side nearer to the dot, so that it is near whatever the font, and a line to it if not."""
    near = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
    if math.dist(near, (x, y)) > _NEAR:
        line = f"M{px(x)} {px(y)}L{px(near[0])} {px(near[1])}"
        yield f'<path d="{line}" stroke="var(--muted)" stroke-width=".8"/>'
    edge, anchor = (box[2], END) if box[0] + box[2] < 2 * x else (box[0], "")
    yield svg_text(edge, box[3] - 4, words, _TEXT, "ink", SANS, anchor)


def _key(entries: Sequence[_Entry]) -> Iterator[str]:
    """The numbered dots by name, right of the axes and below the roofs' names."""
    shown = len(entries) if len(entries) <= _MOST_KEYS else _MOST_KEYS - 1
    x, y = _RIGHT + 11, _BOTTOM - _MOST_KEYS * (2 * _LINE + 2) + 30
    for entry in entries[:shown]:
        yield svg_text(x, y, cut(entry.label, _MOST_LABEL, "…"), _TEXT, "ink", SANS, BOLD)
        yield svg_text(x, y + _LINE - 1, entry.words, _SMALL, "ink", SANS)
        y += 2 * _LINE + 2
    if shown < len(entries):
        yield svg_text(x, y, f"and {len(entries) - shown} more in the table", _SMALL, "ink", SANS)


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data with stable keys, for programs; what is not known is None."""
    told = {name: getattr(report, name) for name in ("name", "unavailable", "copies", "simulator", "notes")}
    refusal = report.refusal and dataclasses.asdict(report.refusal)
    compiles = None if report.unavailable else bool(report)
    kernels = [_kernel_json(kernel) for kernel in report.kernels]
    return {"version": 1, "tpu": report.chip.name, "compiles": compiles, "refusal": refusal, "kernels": kernels, **told}


def _kernel_json(kernel: KernelReport) -> dict[str, Any]:
    figures = dataclasses.asdict(kernel)
    figures |= {name: getattr(kernel, name) for name in ("vmem_bytes", "intensity", "bound")}
    times, time_s = figures.pop("times"), figures.pop("time_s")
    figures["times_us"] = {name: seconds * 1e6 for name, seconds in times.items()}
    figures["time_us"] = None if time_s is None else time_s * 1e6
    return {name: _plain(value) for name, value in figures.items()}


def _plain(value: Any) -> Any:
    """Only what JSON knows, which has neither tuples nor NaN nor infinities."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
