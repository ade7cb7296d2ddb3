"""A report on a GPU kernel as text for a terminal, as a roofline and a table for a notebook, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from ..targets.gpu.chips import CHIPS, LAUNCH_S, MAX_CTAS_PER_SM, REACHED, SMEM_PER_CTA, TMEM_COLUMNS, Chip
from ..text import LINES, Lines, cut, fitted, human_bytes, plural, wrapped
from . import roofline
from .draw import LEFT, RIGHT, card_html, image, row_html
from .facts import FONT, WIDE, as_json, capital, fact_html, refusal_html, refusal_lines, table
from .paper import BAD, GOOD, NEUTRAL
from .roofline import achieved, count_words, digits, human_count, human_time, percent, ridge

if TYPE_CHECKING:
    from .gpu_report import KernelReport, Report

_REGISTERS = 255  # that an instruction can name
# How KernelReport.time_s comes about; the names are those of KernelReport.times
FORMULA = (
    f"max(tensor / {REACHED['tensor']:g}, HBM / {REACHED['HBM']:g}, L2, instructions, MUFU) + {LAUNCH_S * 1e6:g} us, "
    "if all of it overlaps"
)
BOUNDS = {
    "tensor": "its tensor cores: the matrix products take longer than all else",
    "instructions": "its instructions: the schedulers take longer to issue them than anything else takes",
    "MUFU": "its special functions (exp, division): the MUFU takes longer than all else",
    "L2": "L2: its copies between L2 and the SMs take longer than all else; larger blocks need fewer bytes",
    "HBM": "HBM: its bytes take longer than all else",
}


def labels(report: Report) -> list[str]:
    """The kernels' names, numbered where there are several: two of them may have the same."""
    names = [kernel.name for kernel in report.kernels]
    return names if len(names) == 1 else [f"{number}. {name}" for number, name in enumerate(names, 1)]


def target_words(chip: Chip) -> str:
    return f"an {chip.title}" if chip.title.startswith("H") else f"a {chip.title}"


# --- the facts, which text and table share ---------------------------------------------------------------------------


def headline(report: Report) -> str:
    verb = "compiles" if report else "does not compile"
    return f"{report.name} {verb} for {target_words(report.chip)}."


def kernel_headline(kernel: KernelReport, label: str) -> str:
    where = f" ({kernel.where})" if kernel.where else ""
    if kernel.time_s is None or kernel.bound is None:
        return f"{label}{where}: no time is estimated"
    return f"{label}{where} takes about {human_time(kernel.time_s)} (an estimate), bounded by {BOUNDS[kernel.bound]}"


def facts(kernel: KernelReport, report: Report) -> Iterator[tuple[str, str]]:
    """(what, in words), from top to bottom; the table of lines belongs under "lines"."""
    chip = report.chip
    yield "grid", _grid_words(kernel, chip)
    if kernel.times:
        longest_first = sorted(kernel.times.items(), key=lambda pair: -pair[1])
        times = [f"{name} {human_time(seconds)}" for name, seconds in longest_first if seconds]
        yield "times", f"{', '.join(times)}, each on its own"
    yield "registers", _register_words(kernel)
    yield "SMEM", _smem_words(kernel)
    if kernel.tmem_columns:
        yield "TMEM", f"{kernel.tmem_columns} of {TMEM_COLUMNS} columns"
    yield "occupancy", _occupancy_words(kernel)
    kinds = ", ".join(f"{kind} {count}" for kind, count in kernel.kinds.items())
    told = ", ".join(f"{name} {count}" for name, count in kernel.opcodes.items() if name in _TOLD)
    among = f"; among them {told}" if told else ""
    yield "SASS", f"{count_words(kernel.instructions)} instructions: {kinds}{among}"
    yield "lines", "instructions, and how often a CTA's warpgroups run them"
    if kernel.gmem_bytes is not None and kernel.hbm_bytes is not None:
        yield "GMEM", _gmem_words(kernel.gmem_bytes, kernel.hbm_bytes, chip)
        yield "FLOPs", _flop_words(kernel, chip)
    for words, line in kernel.warnings:
        yield "ptxas", f"{line}: {words}" if line else words


_TOLD = frozenset("HGMMA UTCHMMA UTMALDG UTMASTG UBLKCP SYNCS LDTM LDSM STSM LDG STG LDL STL".split())


def _grid_words(kernel: KernelReport, chip: Chip) -> str:
    axes = " × ".join(f"{name} {size}" for name, size in kernel.grid.items()) or "1"
    clusters = f", in clusters of {kernel.cluster}" if kernel.cluster > 1 else ""
    waves = f"{digits(kernel.waves)} waves" if kernel.waves > 1 else "one wave"
    held = f"{waves} of {chip.sms} SMs with {plural(kernel.ctas_per_sm, 'CTA')} each"
    return f"{axes} = {plural(kernel.ctas, 'CTA')} of {kernel.threads} threads{clusters}: {held}"


def _register_words(kernel: KernelReport) -> str:
    words = f"{kernel.registers} per thread, of {_REGISTERS}; "
    if not kernel.spill_store_bytes and not kernel.spill_load_bytes:
        return words + "none is spilled"
    spilled = f"{kernel.spill_store_bytes} bytes of a thread are spilled, {kernel.spill_load_bytes} reloaded"
    return f"{words}{spilled}: use smaller blocks, or more warpgroups"


def _smem_words(kernel: KernelReport) -> str:
    share = percent(kernel.smem_bytes / SMEM_PER_CTA)
    return f"{human_bytes(kernel.smem_bytes)} per CTA, {share} of the {human_bytes(SMEM_PER_CTA)} that it may use"


def _occupancy_words(kernel: KernelReport) -> str:
    by = ", ".join(f"{name} {ctas}" for name, ctas in kernel.occupancy.by.items() if ctas < MAX_CTAS_PER_SM)
    warps = kernel.ctas_per_sm * -(-kernel.threads // 32)
    held = f"{plural(kernel.ctas_per_sm, 'CTA')} per SM ({plural(warps, 'warp')})"
    return f"{held}, limited by {' and '.join(kernel.occupancy.limits)}; room by each: {by}"


def _gmem_words(gmem_bytes: float, hbm_bytes: float, chip: Chip) -> str:
    speed = human_count(chip.hbm_bytes_per_s, "B/s")
    from_hbm = f"at least {human_bytes(hbm_bytes)} from or to HBM, at {speed}"
    return f"{human_bytes(gmem_bytes)} between L2 and the SMs; {from_hbm}"


def _flop_words(kernel: KernelReport, chip: Chip) -> str:
    words = human_count(kernel.flops, "FLOP")
    if not kernel.intensity:
        return words
    point = ridge(chip, kernel.mxu_dtype or "bfloat16")
    place = "below" if kernel.intensity < point else "above"
    words += f", {digits(kernel.intensity)} per byte of HBM: {place} the {chip.title}'s ridge point, {digits(point)}"
    if (reached := achieved(kernel, chip)) is not None:
        words += f"; {human_count(reached[0], 'FLOP/s')} is {percent(reached[1])} of the roof"
    return words


def lines(kernel: KernelReport, most: int = 1 << 20) -> list[tuple[str, str, str, str]]:
    """(line, instructions, how often a CTA's warpgroups run it, its text), those that take longest first."""
    rows = []
    for each in kernel.lines[:most]:
        place = str(each.line) if each.line else "(the compiler's own)"
        runs = "?" if each.runs is None else f"× {digits(each.runs)}"
        rows.append((place, str(each.instructions), runs, each.line.text.strip() if each.line else ""))
    return rows


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """What is said once, below the kernels."""
    times = [kernel.time_s for kernel in report.kernels if kernel.time_s is not None]
    if len(times) == len(report.kernels) > 1:
        yield "together", human_time(sum(times))
    if times:
        yield "estimate", FORMULA
    if report.fusions:
        yield "XLA", f"adds {plural(report.fusions, 'kernel')} of its own, which no figure here counts"
    for note in report.notes:
        yield "note", note


# --- text ------------------------------------------------------------------------------------------------------------

_RANKS = {"grid": 1, "times": 1, "ptxas": 1, "lines": 2, "registers": 2, "SMEM": 2, "occupancy": 2, "GMEM": 2}
_NAME_COLUMNS = 12


def text(report: Report) -> str:
    """The report for a terminal: at most a screen for each kernel."""
    return "\n".join(line for _, line in _text_lines(report))


def rich(report: Report) -> Any:
    """The text with a little colour."""
    from rich.text import Text

    first = "bold green" if report else "bold" if report.unavailable else "bold yellow"
    styles = {"headline": first, "kernel": "bold", "cause": "bold", "line": "cyan", "ptxas": "yellow"}
    return Text("\n").join(Text(line, style=styles.get(role, "")) for role, line in _text_lines(report))


def _text_lines(report: Report) -> Lines:
    if report.unavailable:
        return [("headline", capital(report.unavailable))]
    told = wrapped(headline(report), "headline", most=2)
    if report.refusal is not None:
        return told + refusal_lines(report.refusal)
    room = LINES - len(told) - 1
    last = [_row(name, words) for name, words in remarks(report)]
    alone = len(report.kernels) == 1
    for number in range(len(report.kernels)):
        told = [*told, ("", ""), *_kernel_lines(report, number, last if alone else [], room)]
    return told if alone or not last else [*told, ("", ""), *fitted(last, room)]


def _kernel_lines(report: Report, number: int, last: list[tuple[int, Lines]], room: int) -> Lines:
    """One kernel, and what comes after it, with as many of its lines as there is room for."""
    kernel = report.kernels[number]
    title = (0, wrapped(kernel_headline(kernel, labels(report)[number]), "kernel", most=3))
    rows = [_row(name, words) for name, words in facts(kernel, report)]
    after = [title, *rows, *last, *(_row("note", note) for note in kernel.notes)]
    left = room - sum(len(part) for _, part in after)
    place = next(i for i, (_, part) in enumerate(after) if part[0][0] == "lines")
    rank, first = after[place]
    table_of_lines = (rank, [*first, *_table_lines(kernel, max(3, left))])
    return fitted([*after[:place], table_of_lines, *after[place + 1 :]], room)


def _table_lines(kernel: KernelReport, most: int) -> Lines:
    rows = lines(kernel, most)
    wide, deep, far = (max((len(row[i]) for row in rows), default=0) for i in range(3))
    indent = " " * (_NAME_COLUMNS + 2)
    return [
        ("buffer", cut(f"{indent}{place:{wide}}  {count:>{deep}} {runs:<{far}}  {code}"))
        for place, count, runs, code in rows
    ]


def _row(name: str, words: str) -> tuple[int, Lines]:
    return _RANKS.get(name, 4), wrapped(words, name, f"  {name:{_NAME_COLUMNS}}")


# --- HTML ------------------------------------------------------------------------------------------------------------

_MOST_ROWS = 16


def html(report: Report) -> str:
    """The roofline, and a table with the facts; colours are the page's own."""
    if report.unavailable:
        return card_html(NEUTRAL, f"<b>{escape(capital(report.unavailable))}</b>", FONT)
    first = f"<b>{escape(headline(report))}</b>"
    if report.refusal is not None:
        return card_html(BAD, first + refusal_html(report.refusal), FONT)
    tables = [_kernel_html(report, number) for number in range(len(report.kernels))]
    last = table([fact_html(name, escape(words)) for name, words in remarks(report)], WIDE)
    picture = image(roofline_of(report).svg(), roofline_of(report).words()) if report.kernels else ""
    return picture + card_html(GOOD, first + "".join(tables) + last, FONT)


def _kernel_html(report: Report, number: int) -> str:
    kernel = report.kernels[number]
    title = escape(kernel_headline(kernel, labels(report)[number]))
    rows = [
        fact_html(name, escape(words) + (_lines_html(kernel) if name == "lines" else ""))
        for name, words in facts(kernel, report)
    ]
    rows += [fact_html("note", escape(note)) for note in kernel.notes]
    return f'<div style="margin-top:8px"><b>{title}</b></div>{table(rows, WIDE)}'


def _lines_html(kernel: KernelReport) -> str:
    left, right = f'<td style="{LEFT}">{{}}</td>', f'<td style="{RIGHT}">{{}}</td>'
    code = f'<td style="{LEFT}"><code>{{}}</code></td>'
    rows = [
        [left.format(escape(place)), right.format(count), right.format(runs), code.format(escape(words))]
        for place, count, runs, words in lines(kernel, _MOST_ROWS)
    ]
    return table([row_html(row) for row in rows])


def roofline_of(report: Report) -> roofline.Roofline:
    """What a GPU could do at any number of FLOP per byte, and where the kernels are."""
    return roofline.Roofline(
        name=report.name,
        target=target_words(report.chip),
        chip=report.chip,
        chips=list(CHIPS.values()),
        dtype=roofline.peak_dtype(report.kernels),
        between="HBM and L2",
        entries=[
            roofline.entry(kernel, label, report.chip)
            for kernel, label in zip(report.kernels, labels(report), strict=True)
        ],
    )


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data with stable keys, for programs; what is not known is None."""
    told = {name: getattr(report, name) for name in ("name", "unavailable", "fusions", "notes")}
    refusal = report.refusal and dataclasses.asdict(report.refusal)
    compiles = None if report.unavailable else bool(report)
    kernels = [_kernel_json(kernel) for kernel in report.kernels]
    return {"version": 1, "gpu": report.chip.name, "compiles": compiles, "refusal": refusal, "kernels": kernels, **told}


def _kernel_json(kernel: KernelReport) -> dict[str, Any]:
    told = dataclasses.asdict(kernel)
    told |= {name: getattr(kernel, name) for name in ("instructions", "ctas_per_sm", "intensity", "bound")}
    times, time_s, told["occupancy"] = told.pop("times"), told.pop("time_s"), kernel.occupancy.by
    told["times_us"] = {name: seconds * 1e6 for name, seconds in times.items()}
    told["time_us"] = None if time_s is None else time_s * 1e6
    return {name: as_json(value) for name, value in told.items()}
