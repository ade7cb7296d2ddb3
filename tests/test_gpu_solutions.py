"""Every solution for a GPU is taken by the front end for GPUs, and by their compiler, where that is installed."""

import functools

import jax
import pytest

from gpu_compiled import needs_compiler
from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.course.inputs import Case, Subject
from pallas_puzzles.targets.gpu.chips import CHIPS
from pallas_puzzles.targets.gpu.lowering import refusal
from pallas_puzzles.view.gpu_report import gpu_report

BOOKS = [book for book in curriculum.notebooks() if book.accelerator == "gpu"]
IDS = [puzzle.id for book in BOOKS for puzzle in book.puzzles]


def with_kernel(puzzle_id: str) -> Subject:
    official = cases.official(puzzle_id)
    if not official.kernel:
        pytest.skip("its answer is no kernel")
    return official


def shapes_of(case: Case) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.inputs]


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize("puzzle_id", IDS)
def test_the_front_end_takes_it(puzzle_id: str, pytestconfig: pytest.Config) -> None:
    """The last case for one GPU of each architecture; with --thorough, every case for all of them. Whoever judges the
    solution asks the front end about the first case."""
    official = with_kernel(puzzle_id)
    every = pytestconfig.getoption("--thorough")
    for case in official.cases if every else official.cases[-1:]:
        for chip in CHIPS.values() if every else {chip.arch: chip for chip in CHIPS.values()}.values():
            refused = refusal(functools.partial(official.fn, **case.blocks), *shapes_of(case), chip=chip)
            assert refused is None, (chip.name, refused)


SPILLED = {"gpu_attention/10c": 8}  # bytes of a thread: an address, stored once and loaded once in the whole kernel


@needs_compiler
@pytest.mark.parametrize("chip", ["h100", pytest.param("b200", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("puzzle_id", IDS)
def test_the_compiler_takes_it(puzzle_id: str, chip: str) -> None:
    official = with_kernel(puzzle_id)
    first = official.cases[0]
    report = gpu_report(official.fn, *first.inputs, chip=chip, **first.blocks)
    if chip == "b200" and report.refusal and "no `wgmma`" in report.refusal.sentence:
        pytest.skip("wgmma is an instruction of Hopper GPUs alone")
    assert report, report.unavailable or report.refusal
    for kernel in report.kernels:
        assert kernel.spill_store_bytes <= SPILLED.get(puzzle_id, 0)
        assert kernel.registers > 0
