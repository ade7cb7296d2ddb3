"""A report as text for a terminal, as a roofline and a table for a notebook, as plain data for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from ..targets.tpu.chips import CHIPS, STEP_OVERHEAD_S, Chip
from ..text import LINES, Lines, cut, fitted, human_bytes, plural, wrapped
from . import roofline
from .draw import LEFT, RIGHT, card_html, image, row_html
from .facts import FONT, WIDE, as_json, capital, fact_html, refusal_html, refusal_lines, table
from .paper import BAD, GOOD, NEUTRAL
from .roofline import achieved, count_words, digits, human_count, human_time, percent, ridge

if TYPE_CHECKING:
    from .tpu_report import KernelReport, Report

# How KernelReport.time_s comes about; the names are those of KernelReport.times
FORMULA = f"max(MXU, bundles, HBM - fill) + fill + {STEP_OVERHEAD_S * 1e6:g} us a step; fill: first blocks in, last out"
BOUNDS = {
    "MXU": "the MXU: the matrix products take longer than all else",
    "bundles": "its bundles: the instructions of a step take longer than its copies",
    "HBM": "HBM: the copies take longer than all else",
    "steps": "its steps: their fixed costs take longer than all else; larger blocks need fewer steps",
}


# --- numbers and names -----------------------------------------------------------------------------------------------


def target_words(chip: Chip) -> str:
    name = chip.title
    return f"{name} (one of its two TensorCores)" if name == "TPU7x" else f"TPU {name}"


def labels(report: Report) -> list[str]:
    """The kernels' names, numbered where there are several: two of them may have the same."""
    names = [kernel.name for kernel in report.kernels]
    return names if len(names) == 1 else [f"{number}. {name}" for number, name in enumerate(names, 1)]


# --- the facts, which text and table share ---------------------------------------------------------------------------


def headline(report: Report) -> str:
    verb = "compiles" if report else "does not compile"
    return f"{report.name} {verb} for a {target_words(report.chip)}."


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
        return [("headline", capital(report.unavailable))]
    lines = wrapped(headline(report), "headline", most=2)
    if report.refusal is not None:
        return lines + refusal_lines(report.refusal)
    room = LINES - len(lines) - 1
    last = [_row(name, words) for name, words in remarks(report)]
    if len(report.kernels) == 1:
        return [*lines, ("", ""), *_kernel_lines(report, 0, last, room)]
    for number in range(len(report.kernels)):
        lines = [*lines, ("", ""), *_kernel_lines(report, number, [], room)]
    return [*lines, ("", ""), *fitted(last, room)] if last else lines


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


def html(report: Report) -> str:
    """The roofline, and a table with the facts; colours are the page's own."""
    if report.unavailable:
        return card_html(NEUTRAL, f"<b>{escape(capital(report.unavailable))}</b>", FONT)
    first = f"<b>{escape(headline(report))}</b>"
    if report.refusal is not None:
        return card_html(BAD, first + refusal_html(report.refusal), FONT)
    tables = [_kernel_html(report, number) for number in range(len(report.kernels))]
    last = table([fact_html(name, escape(words)) for name, words in remarks(report)], WIDE)
    picture = image(roofline_svg(report), roofline_words(report)) if report.kernels else ""
    return picture + card_html(GOOD, first + "".join(tables) + last, FONT)


def _kernel_html(report: Report, number: int) -> str:
    kernel = report.kernels[number]
    title = escape(kernel_headline(kernel, labels(report)[number]))
    rows = []
    for name, words in facts(kernel, report):
        rows.append(fact_html(name, escape(words) + (_buffers_html(kernel) if name == "VMEM" else "")))
    rows += [fact_html("note", escape(note)) for note in kernel.notes]
    return f'<div style="margin-top:8px"><b>{title}</b></div>{table(rows, WIDE)}'


def _buffers_html(kernel: KernelReport) -> str:
    name, number = (f'<td style="{LEFT}"><code>{{}}</code></td>', f'<td style="{RIGHT}">{{}}</td>')
    rows = buffers(kernel)
    return table([row_html([name.format(escape(row[0])), *map(number.format, row[1:])]) for row in rows])


# --- the roofline ----------------------------------------------------------------------------------------------------


def _roofline(report: Report) -> roofline.Roofline:
    entries = [
        roofline.entry(kernel, label, report.chip) for kernel, label in zip(report.kernels, labels(report), strict=True)
    ]
    return roofline.Roofline(
        name=report.name,
        target=f"a {target_words(report.chip)}",
        chip=report.chip,
        chips=list(CHIPS.values()),
        dtype=roofline.peak_dtype(report.kernels),
        between="HBM and VMEM",
        entries=entries,
    )


def roofline_svg(report: Report) -> str:
    """What a core could do at any number of FLOP per byte, and where the kernels are, as a standalone SVG."""
    return _roofline(report).svg()


def roofline_words(report: Report) -> str:
    """The picture in words."""
    return _roofline(report).words()


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
    return {name: as_json(value) for name, value in figures.items()}
