"""What a report says of kernels on a TPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..targets.tpu.chips import CHIPS, STEP_OVERHEAD_S, Chip
from ..text import cut, human_bytes, plural
from .report import Fact, Page, flop_words, times_words
from .roofline import count_words, digits, human_count, human_time, percent

if TYPE_CHECKING:
    from .tpu_report import KernelReport, Report

_MOST_NAME = 48

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
    return f"a {name} (one of its two TensorCores)" if name == "TPU7x" else f"a TPU {name}"


# --- the facts, which text and table share ---------------------------------------------------------------------------


def facts(kernel: KernelReport, report: Report) -> Iterator[Fact]:
    """(what, in words), from top to bottom; the table of buffers belongs under "VMEM"."""
    chip = report.chip
    yield "grid", _grid_words(kernel)
    if kernel.runs > 1:
        yield "calls", f"{kernel.runs}; the figures are those of one call"
    if kernel.times:
        yield "times", times_words(kernel)
    yield "VMEM", _vmem_words(kernel, chip)
    yield "spills", _spill_words(kernel)
    yield "bundles", _bundle_words(kernel)
    least = f"{digits(kernel.mxu_cycles)} cycles per step at the least, for its matrix products"
    yield "MXU", least if kernel.mxu_cycles else "no matrix products"
    yield "slots", ", ".join(f"{slot} {share:.0%}" for slot, share in kernel.slots.items()) + " in use"
    yield "HBM", _hbm_words(kernel, chip)
    yield "FLOPs", flop_words(kernel, chip, "MXU", "" if kernel.hbm_exact else "at least ")
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


def _buffers(kernel: KernelReport, most: int) -> list[list[str]]:
    """(name, size, share of what the kernel may use), the largest first; what is left after `most` rows in the last."""
    rows = sorted(kernel.buffers.items(), key=lambda pair: -pair[1])
    if len(rows) > most:
        shown, rest = rows[: most - 1], rows[most - 1 :]
        rows = [*shown, (f"and {len(rest)} more", sum(nbytes for _, nbytes in rest))]
    limit = kernel.vmem_limit_bytes
    return [[cut(name, _MOST_NAME), human_bytes(nbytes), percent(nbytes / limit)] for name, nbytes in rows]


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


def remarks(report: Report) -> Iterator[Fact]:
    if report.simulator:
        yield "simulator", report.simulator
    if report.copies:
        verb = "is" if report.copies == 1 else "are"
        yield "XLA", f"{plural(report.copies, 'array')} {verb} copied around the kernels, which no figure here counts"


PAGE = Page(
    chips=CHIPS,
    target=target_words,
    between="HBM and VMEM",
    formula=FORMULA,
    takes="takes about {}",
    bounds=BOUNDS,
    facts=facts,
    remarks=remarks,
    under="VMEM",
    table=_buffers,
    sides="c>>",
    rows=2,
    ranks={"grid": 1, "times": 1, "VMEM": 2, "bundles": 2, "HBM": 2, "FLOPs": 2, "spills": 3, "note": 3, "": 5},
    columns=10,
)
