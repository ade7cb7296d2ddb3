"""Every hidden solution compiles for one TPU, another one for each in turn; with --thorough, all of them for
all TPUs, at every shape and block size that their checks use."""

import itertools

import pytest

from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.targets.tpu.chips import CHIPS
from pallas_puzzles.view.tpu_report import tpu_report
from tpu_kernels import needs_compiler, remembered

pytestmark = [needs_compiler, remembered]
FOR_TPUS = [book for book in curriculum.notebooks() if book.accelerator == "tpu"]
PUZZLES = [puzzle.id for book in FOR_TPUS for puzzle in book.puzzles]
assert PUZZLES, "no puzzle found"

# At a ragged edge the compiler may make a branch of its own, which no pl.when stands behind.
OWN_BRANCH = "the compiler's branches do not match those of the kernel: the longest step is taken for all"
# What BlockSpecs copy overlaps with the kernel. What the kernel copies itself may, or may not.
OWN_COPIES = "the kernel starts copies of its own; how far they overlap is not known: no time is estimated"
TO_OTHERS = "the bytes of its own copies could not be counted"  # some of them go to other devices
ANY_GRID = "the grid is known only at run time: give arrays instead of shapes"  # on several devices: another on each


IN_TURN = dict(zip(PUZZLES, itertools.cycle(CHIPS)))


def asked(puzzle_id, tpu):
    always = tpu == IN_TURN[puzzle_id]
    return pytest.param(puzzle_id, tpu, marks=() if always else pytest.mark.thorough)


@pytest.mark.parametrize(("puzzle_id", "tpu"), [asked(puzzle_id, tpu) for puzzle_id in PUZZLES for tpu in CHIPS])
def test_the_solution_compiles(puzzle_id, tpu, pytestconfig):
    subject, every = cases.official(puzzle_id), pytestconfig.getoption("--thorough")
    if not subject.kernel and not every:
        pytest.skip("without a kernel there is nothing of ours to compile: with --thorough")
    compiled = set()
    for case in subject.cases[: None if every else 1]:
        program = repr([(x.shape, x.dtype) for x in case.inputs]), repr(case.blocks)
        if not subject.kernel and program in compiled:
            continue  # without a kernel, the values have no say in what is compiled or counted
        compiled.add(program)
        report = tpu_report(subject.fn, *case.inputs, tpu=tpu, simulate=False, **case.blocks)
        assert report, report.refusal or report.unavailable
        if not subject.kernel:
            assert report.notes == ["the function reaches no pallas_call"]
            assert not report.kernels
            continue
        assert not report.notes
        assert report.kernels
        several = any(TO_OTHERS in kernel.notes for kernel in report.kernels)
        for kernel in report.kernels:
            if several and ANY_GRID in kernel.notes:
                continue
            assert kernel.steps
            assert kernel.vmem_bytes <= kernel.vmem_limit_bytes
            assert (kernel.time_s is None) == (OWN_COPIES in kernel.notes)
            assert set(kernel.notes) <= {OWN_BRANCH, OWN_COPIES, TO_OTHERS}
    assert compiled
