"""What is known of kernels on a TPU, and what a report says of it."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from ..targets.tpu.chips import CHIPS, STEP_OVERHEAD_S, Chip
from ..text import cut, human_bytes, plural
from .report import Fact, flop_words, times_words
from .report import Report as ChipReport
from .roofline import Kernel, count_words, digits, human_count, human_time, percent

_MOST_NAME = 48
_RANKS = {"grid": 1, "times": 1, "VMEM": 2, "bundles": 2, "HBM": 2, "FLOPs": 2, "spills": 3, "note": 3, "": 5}


@dataclasses.dataclass(kw_only=True)
class KernelReport(Kernel):
    """One pallas_call on one TPU. Times are in seconds, sizes in bytes.

    dynamic: the grid is set at run time. steered: prefetched scalars have a say in what runs. steps: None where nobody
    could know. runs: how often the function calls it. buffers: name -> VMEM held, all its copies; vmem_limit_bytes:
    what this kernel may use. least_step, mean_step, most_step: bundles of a grid step, which is cycles if nothing has
    to be waited for. slots: share of each kind of instruction slot in use. time_s: see `tpu_report`. cycles: by
    libtpu's simulator.
    """

    hlo_name: str
    grid: tuple[int, ...]
    dynamic: bool
    steered: bool
    steps: int | None
    runs: int
    buffers: dict[str, int]
    vmem_limit_bytes: int
    spills: int
    fills: int
    bundles: int
    least_step: int
    mean_step: float
    most_step: int
    slots: dict[str, float]
    mxu_cycles: float
    hbm_exact: bool
    cycles: int | None = None

    @property
    def vmem_bytes(self) -> int:
        return sum(self.buffers.values())


@dataclasses.dataclass(eq=False, repr=False)
class Report(ChipReport[Chip, KernelReport]):
    """What `tpu_report` found. copies: arrays that XLA itself copies around the kernels. simulator: why there are no
    simulated cycles, "" when there are."""

    copies: int = 0
    simulator: str = ""
    chips = CHIPS
    between = "HBM and VMEM"
    # the names are those of KernelReport.times
    formula = (
        f"max(MXU, bundles, HBM - fill) + fill + {STEP_OVERHEAD_S * 1e6:g} us a step; fill: first blocks in, last out"
    )
    takes = "takes about {}"
    bounds: ClassVar = {
        "MXU": "the MXU: the matrix products take longer than all else",
        "bundles": "its bundles: the instructions of a step take longer than its copies",
        "HBM": "HBM: the copies take longer than all else",
        "steps": "its steps: their fixed costs take longer than all else; larger blocks need fewer steps",
    }
    under = "VMEM"
    sides = "c>>"
    rows = 2
    ranks = _RANKS
    columns = 10

    def target(self) -> str:
        name = self.chip.title
        return f"a {name} (one of its two TensorCores)" if name == "TPU7x" else f"a TPU {name}"

    def facts(self, kernel: KernelReport) -> Iterator[Fact]:
        chip = self.chip
        yield "grid", _grid_words(kernel)
        if kernel.runs > 1:
            yield "calls", f"{kernel.runs}; the figures are those of one call"
        if kernel.times:
            yield "times", times_words(kernel)
        held = f"{human_bytes(kernel.vmem_bytes)}, {percent(kernel.vmem_bytes / kernel.vmem_limit_bytes)}"
        limit = f"{human_bytes(kernel.vmem_limit_bytes)} that it may use"
        has = f"a TensorCore has {human_bytes(chip.vmem_bytes)}"
        yield "VMEM", f"{held if kernel.buffers else 'no buffers,'} of the {limit}; {has}"
        yield "spills", _spill_words(kernel)
        yield "bundles", _bundle_words(kernel)
        least = f"{digits(kernel.mxu_cycles)} cycles per step at the least, for its matrix products"
        yield "MXU", least if kernel.mxu_cycles else "no matrix products"
        yield "slots", ", ".join(f"{slot} {share:.0%}" for slot, share in kernel.slots.items()) + " in use"
        if kernel.hbm_bytes is None:
            yield "HBM", "how many bytes it moves is not known"
        else:
            moved = f"{'' if kernel.hbm_exact else 'at most '}{human_bytes(kernel.hbm_bytes)} between HBM and VMEM"
            yield "HBM", f"{moved}, which a {chip.title} moves at {human_count(chip.hbm_bytes_per_s, 'B/s')}"
        yield "FLOPs", flop_words(kernel, chip, "MXU", "" if kernel.hbm_exact else "at least ")
        if kernel.cycles is not None:
            took = f"{human_time(kernel.cycles / chip.clock_hz)} at {digits(chip.clock_hz / 1e9)} GHz"
            yield "simulator", f"{kernel.cycles:,} cycles, {took} (libtpu's; its copies do not share the bandwidth)"
        elif not self.simulator:
            yield "simulator", "libtpu's simulator gives no cycles for this kernel"

    def table(self, kernel: KernelReport, most: int) -> list[list[str]]:
        """(buffer, size, share of what the kernel may use), the largest first; what is left after `most` rows last."""
        rows = sorted(kernel.buffers.items(), key=lambda pair: -pair[1])
        if len(rows) > most:
            shown, rest = rows[: most - 1], rows[most - 1 :]
            rows = [*shown, (f"and {len(rest)} more", sum(nbytes for _, nbytes in rest))]
        limit = kernel.vmem_limit_bytes
        return [[cut(name, _MOST_NAME), human_bytes(nbytes), percent(nbytes / limit)] for name, nbytes in rows]

    def remarks(self) -> Iterator[Fact]:
        if self.simulator:
            yield "simulator", self.simulator
        if self.copies:
            verb = "is" if self.copies == 1 else "are"
            yield "XLA", f"{plural(self.copies, 'array')} {verb} copied around the kernels, which no figure here counts"


def _grid_words(kernel: KernelReport) -> str:
    if kernel.steps is None:
        return "set at run time: nobody can know how many steps" if kernel.dynamic else "steps unknown"
    return f"{kernel.grid} = {plural(kernel.steps, 'step')}{', set at run time' if kernel.dynamic else ''}"


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
