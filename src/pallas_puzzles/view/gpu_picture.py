"""What a report says of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..targets.gpu.chips import CHIPS, LAUNCH_S, MAX_CTAS_PER_SM, REACHED, SMEM_PER_CTA, TMEM_COLUMNS, Chip
from ..text import human_bytes, plural
from .report import Fact, Page, flop_words, times_words
from .roofline import count_words, digits, human_count, percent

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


def target_words(chip: Chip) -> str:
    return f"an {chip.title}" if chip.title.startswith("H") else f"a {chip.title}"


# --- the facts, which text and table share ---------------------------------------------------------------------------


def facts(kernel: KernelReport, report: Report) -> Iterator[Fact]:
    """(what, in words), from top to bottom; the table of lines belongs under "lines"."""
    chip = report.chip
    yield "grid", _grid_words(kernel, chip)
    if kernel.times:
        yield "times", times_words(kernel)
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
        yield "FLOPs", flop_words(kernel, chip, "tensor cores")
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


def _lines(kernel: KernelReport, most: int) -> list[list[str]]:
    """(line, instructions, how often a CTA's warpgroups run it, its text), those that take longest first."""
    rows = []
    for each in kernel.lines[:most]:
        place = str(each.line) if each.line else "(the compiler's own)"
        runs = "?" if each.runs is None else f"× {digits(each.runs)}"
        rows.append([place, str(each.instructions), runs, each.line.text.strip() if each.line else ""])
    return rows


def remarks(report: Report) -> Iterator[Fact]:
    if report.fusions:
        yield "XLA", f"adds {plural(report.fusions, 'kernel')} of its own, which no figure here counts"


PAGE = Page(
    chips=CHIPS,
    target=target_words,
    between="HBM and L2",
    formula=FORMULA,
    takes="takes about {} (an estimate)",
    bounds=BOUNDS,
    facts=facts,
    remarks=remarks,
    under="lines",
    table=_lines,
    sides="<><c",
    rows=3,
    ranks={"grid": 1, "times": 1, "ptxas": 1, "lines": 2, "": 2, "registers": 2, "SMEM": 2, "occupancy": 2, "GMEM": 2},
    columns=12,
)
