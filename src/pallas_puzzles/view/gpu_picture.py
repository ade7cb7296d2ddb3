"""What is known of kernels on a GPU, and what a report says of it."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from ..ir.capture import SourceLine
from ..targets.gpu.chips import CHIPS, LAUNCH_S, MAX_CTAS_PER_SM, REACHED, SMEM_PER_CTA, TMEM_COLUMNS, Chip, Occupancy
from ..text import human_bytes, plural
from .report import Fact, flop_words, times_words
from .report import Report as ChipReport
from .roofline import Kernel, count_words, digits, human_count, percent

_REGISTERS = 255  # that an instruction can name
_TOLD = frozenset("HGMMA UTCHMMA UTMALDG UTMASTG UBLKCP SYNCS LDTM LDSM STSM LDG STG LDL STL".split())
_RANKS = {"grid": 1, "times": 1, "ptxas": 1, "lines": 2, "": 2, "registers": 2, "SMEM": 2, "occupancy": 2, "GMEM": 2}


@dataclasses.dataclass(frozen=True)
class Line:
    """The instructions that come from one line. runs: how often the warpgroups of a CTA run it; None: not known.

    opcodes: without modifiers -> count; once: the same, where loops are not unrolled. line: None for what the compiler
    adds.
    """

    line: SourceLine | None
    opcodes: dict[str, int]
    once: dict[str, float]
    runs: float | None

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def cycles(self) -> float:
        """What issuing them takes one CTA: each warp of a warpgroup has a scheduler of its own."""
        return sum(self.once.values()) * (1.0 if self.runs is None else self.runs)


@dataclasses.dataclass(kw_only=True)
class KernelReport(Kernel):
    """One plgpu.kernel on one GPU. Times are in seconds, sizes in bytes.

    grid: CTAs by axis; cluster: CTAs in one. threads, smem_bytes, tmem_columns: of a CTA; registers, spill_store_bytes,
    spill_load_bytes: of a thread. waves: how often all SMs together are filled. kinds, opcodes: instructions of the
    program, see targets/gpu/sass.py. lines: the ones that take longest first. warnings: of ptxas. gmem_bytes: between
    L2 and the SMs; hbm_bytes: the same, each array counted once at the most. time_s: see `gpu_report`.
    """

    grid: dict[str, int]
    ctas: int
    cluster: int
    threads: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    tmem_columns: int
    occupancy: Occupancy
    waves: float
    kinds: dict[str, int]
    opcodes: dict[str, int]
    lines: list[Line]
    warnings: list[tuple[str, SourceLine | None]]
    gmem_bytes: float | None = None
    reached = REACHED

    @property
    def instructions(self) -> int:
        return sum(self.kinds.values())

    @property
    def ctas_per_sm(self) -> int:
        return self.occupancy.ctas


@dataclasses.dataclass(eq=False, repr=False)
class Report(ChipReport[Chip, KernelReport]):
    """What `gpu_report` found. fusions: XLA's own kernels."""

    fusions: int = 0
    chips = CHIPS
    between = "HBM and L2"
    # the names are those of KernelReport.times
    formula = (
        f"max(tensor / {REACHED['tensor']:g}, HBM / {REACHED['HBM']:g}, L2, instructions, MUFU) + {LAUNCH_S * 1e6:g} "
        "us, if all of it overlaps"
    )
    takes = "takes about {} (an estimate)"
    bounds: ClassVar = {
        "tensor": "its tensor cores: the matrix products take longer than all else",
        "instructions": "its instructions: the schedulers take longer to issue them than anything else takes",
        "MUFU": "its special functions (exp, division): the MUFU takes longer than all else",
        "L2": "L2: its copies between L2 and the SMs take longer than all else; larger blocks need fewer bytes",
        "HBM": "HBM: its bytes take longer than all else",
    }
    under = "lines"
    sides = "<><c"
    rows = 3
    ranks = _RANKS
    columns = 12

    def target(self) -> str:
        return f"an {self.chip.title}" if self.chip.title.startswith("H") else f"a {self.chip.title}"

    def facts(self, kernel: KernelReport) -> Iterator[Fact]:
        chip = self.chip
        axes = " × ".join(f"{name} {size}" for name, size in kernel.grid.items()) or "1"
        clusters = f", in clusters of {kernel.cluster}" if kernel.cluster > 1 else ""
        waves = f"{digits(kernel.waves)} waves" if kernel.waves > 1 else "one wave"
        held = f"{waves} of {chip.sms} SMs with {plural(kernel.ctas_per_sm, 'CTA')} each"
        yield "grid", f"{axes} = {plural(kernel.ctas, 'CTA')} of {kernel.threads} threads{clusters}: {held}"
        if kernel.times:
            yield "times", times_words(kernel)
        spilled = "none is spilled"
        if kernel.spill_store_bytes or kernel.spill_load_bytes:
            spilled = f"{kernel.spill_store_bytes} bytes of a thread are spilled, {kernel.spill_load_bytes} reloaded"
            spilled += ": use smaller blocks, or more warpgroups"
        yield "registers", f"{kernel.registers} per thread, of {_REGISTERS}; {spilled}"
        share = f"{percent(kernel.smem_bytes / SMEM_PER_CTA)} of the {human_bytes(SMEM_PER_CTA)} that it may use"
        yield "SMEM", f"{human_bytes(kernel.smem_bytes)} per CTA, {share}"
        if kernel.tmem_columns:
            yield "TMEM", f"{kernel.tmem_columns} of {TMEM_COLUMNS} columns"
        by = ", ".join(f"{name} {ctas}" for name, ctas in kernel.occupancy.by.items() if ctas < MAX_CTAS_PER_SM)
        warps = kernel.ctas_per_sm * -(-kernel.threads // 32)
        held = f"{plural(kernel.ctas_per_sm, 'CTA')} per SM ({plural(warps, 'warp')})"
        yield "occupancy", f"{held}, limited by {' and '.join(kernel.occupancy.limits)}; room by each: {by}"
        kinds = ", ".join(f"{kind} {count}" for kind, count in kernel.kinds.items())
        told = ", ".join(f"{name} {count}" for name, count in kernel.opcodes.items() if name in _TOLD)
        instructions = f"{count_words(kernel.instructions)} instructions: {kinds}"
        yield "SASS", f"{instructions}; among them {told}" if told else instructions
        yield "lines", "instructions, and how often a CTA's warpgroups run them"
        if kernel.gmem_bytes is not None and kernel.hbm_bytes is not None:
            speed = human_count(chip.hbm_bytes_per_s, "B/s")
            from_hbm = f"at least {human_bytes(kernel.hbm_bytes)} from or to HBM, at {speed}"
            yield "GMEM", f"{human_bytes(kernel.gmem_bytes)} between L2 and the SMs; {from_hbm}"
            yield "FLOPs", flop_words(kernel, chip, "tensor cores")
        for words, line in kernel.warnings:
            yield "ptxas", f"{line}: {words}" if line else words

    def table(self, kernel: KernelReport, most: int) -> list[list[str]]:
        """(line, instructions, how often a CTA's warpgroups run it, its text), those that take longest first."""
        rows = []
        for each in kernel.lines[:most]:
            place = str(each.line) if each.line else "(the compiler's own)"
            runs = "?" if each.runs is None else f"× {digits(each.runs)}"
            rows.append([place, str(each.instructions), runs, each.line.text.strip() if each.line else ""])
        return rows

    def remarks(self) -> Iterator[Fact]:
        if self.fusions:
            yield "XLA", f"adds {plural(self.fusions, 'kernel')} of its own, which no figure here counts"
