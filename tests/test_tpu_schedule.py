"""Reading the compiler's program: loops, branches, slots, on programs written out by hand."""

import numpy as np
import pytest

from pallas_puzzles.targets.tpu.schedule import read, vmem_buffers

SLOTS = "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
CAPACITY = "2 2 4 2 1 3 3 2 2 2"

# A loop over grid steps: set-up, the pipeline's own branch around a step, two bodies under pl.when, one in the other.
PROGRAM = """
     0   :  { %s1 = smov 0 }
   0x1   :  {}
   0x2 LB: > { %p0 = scmp.ge %s1, 9 } /* Start region 10 */
   0x3   : > { %4 = sbr.rel (%p0) target = $region20 }
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > {} /* Start region 11 */
   0x8   : > { %5 = dma.done.wait %s2, 16 /* pipeline-emitter-dma-wait */ }
   0x9   : > { %6 = sbr.rel (!%p1) target = $region12 }
   0xa   : > { %v1 = vadd.f32 %v0, %v0 }
   0xb   : > {}
   0xc   : > {}
   0xd   : > {}
   0xe   : > { %v2 = vmul.f32 %v1, %v1 }
   0xf   : > { %7 = sbr.rel (%p2) target = $region13 }
  0x10   : > {}
  0x11   : > {}
  0x12   : > {}
  0x13   : > {}
  0x14   : > { %v3 = vmax.f32 %v1, %v1 }
  0x15   : > { %v4 = vmax.f32 %v3, %v1 }
  0x16 PF: > { %8 = vst [vmem:%s3] %v4 } /* Start/End empty region 13 */
  0x17 PF: > { %9 = vst [vmem:%s3] %v2 } /* Start/End empty region 12 :: End region 11 */
  0x18 PF: > { %s1 = sadd.s32 1, %s1 } /* Start/End empty region 20 */
  0x19   : > { %p3 = scmp.ge.s32.totalorder %s1, 6 /* loop exit test */ }
  0x1a   : > { %10 = sbr.rel (!%p3) target = $region10 }
  0x1b   : > {}
  0x1c   : > {}
  0x1d   : > {}
  0x1e   : > {}
  0x1f   :  { %11 = vsyncpa %s2, 1 }
"""


def table(*, rows=32, names=SLOTS, capacity=CAPACITY, use=None):
    """A table of slots in which bundle -> {column: count} is in use."""
    columns = [name.strip() for name in names.split(",")]
    lines = ["== CAPACTIY:", names, capacity, "== UTILIZATION:"]
    for row in range(rows):
        lines.append(" ".join(str((use or {}).get(row, {}).get(name, 0)) for name in columns))
    return "\n".join(lines) + "\n"


def schedule(**options):
    return read(PROGRAM, table(**options), looped=True)


def test_the_loop_over_steps():
    plan = schedule()
    assert plan.bundles == 32
    assert (plan.body.first, plan.body.last, plan.body.depth, plan.body.trips) == (0x2, 0x1E, 1, 6)
    assert plan.body.length == plan.longest_step == 29


def test_what_pl_when_may_leave_out():
    """A branch takes effect after its delay slots. That of the pipeline around the whole step is none of pl.when's."""
    plan = schedule()
    assert [(skip.first, skip.last) for skip in plan.skips] == [(0xE, 0x16), (0x14, 0x15)]
    assert [plan.own(0), plan.own(1)] == [7, 2]
    assert plan.shortest_step == 29 - 9


def test_steps_differ_by_what_they_run():
    outer, inner = np.array([1, 0, 1, 1]), np.array([1, 0, 0, 1])
    assert schedule().step_lengths([outer, inner]).tolist() == [29, 20, 27, 29]


def test_one_step_is_the_whole_program():
    plan = read(PROGRAM, table(), looped=False)
    assert plan.body is None
    assert plan.longest_step == 3 + 6 * 29, "the loop is then the kernel's own, and counts six times"


def test_an_inner_loop_counts_as_often_as_it_runs():
    nested = PROGRAM.replace("  0x14   : > {", "  0x14 LB: >> {").replace("  0x15   : > {", "  0x15   : >> {")
    assert read(nested, table(), looped=True).longest_step == 29
    assert read(nested, table(), looped=True, trips=[1, 5]).longest_step == 27 + 2 * 5
    assert read(nested, table(), looped=True, trips=[5, 7]).longest_step == 29, "which of the two is it?"
    known = nested.replace(
        "%v4 = vmax.f32", "%p9 = scmp.ge.s32.totalorder %s9, 3 /* loop exit test */ ;; %v4 = vmax.f32"
    )
    assert read(known, table(), looped=True, trips=[5]).longest_step == 27 + 2 * 3


def test_slots_are_shares_of_what_a_step_could_issue():
    use = {0x0: {"VALU": 4}, 0xA: {"VALU": 2, "MXU": 2}, 0xE: {"VALU": 4}, 0x17: {"VSTORE": 1}}
    plan = schedule(use=use)
    assert plan.slot_use()["VALU"] == pytest.approx(6 / (4 * 29)), "what comes before the loop does not count"
    assert plan.slot_use()["MXU"] == pytest.approx(2 / (2 * 29))
    assert plan.slot_use()["store"] == pytest.approx(1 / (2 * 29))
    assert plan.slot_use()["EUP"] == 0


def test_the_matrix_unit_of_a_later_compiler():
    names = SLOTS.replace("MXU,", "MATMUL, MATPUSH,")
    plan = schedule(names=names, capacity="4 " + CAPACITY.replace("2", "4", 1), use={0xA: {"MATMUL": 4, "MATPUSH": 1}})
    assert plan.slot_use()["MXU"] == pytest.approx(4 / (4 * 29))


def test_spills_and_fills():
    plan = schedule(use={0x3: {"VSTORE:SPILL": 2}, 0x1F: {"VSTORE:SPILL": 1, "VLOAD:FILL": 3}})
    assert (plan.spills, plan.fills) == (3, 3)


def test_more_delay_slots():
    """On TPU7x six bundles follow a branch before it takes effect: as many as follow the loop's own branch back."""
    later = PROGRAM.replace("  0x1f   :  {", "  0x1f   : > {}\n  0x20   : > {}\n  0x21   :  {")
    plan = read(later, table(rows=34), looped=True)
    assert plan.skips[0].first == 0x9 + 7


def test_arrays_that_are_in_vmem_before_the_kernel_starts():
    there = PROGRAM.replace(
        "%s1 = smov 0", "%s1 = inlined_call_operand.vmem [shape: f32[8,128], index: 0, kind: input]"
    )
    assert read(there, table(), looped=True).operands_in_vmem == 1
    assert schedule().operands_in_vmem == 0


def test_copies_are_not_what_pl_when_leaves_out():
    copying = PROGRAM
    for old in ("vadd.f32 %v0, %v0", "vmul.f32 %v1, %v1", "vmax.f32 %v1, %v1", "vmax.f32 %v3, %v1"):
        copying = copying.replace(old, "vld [vmem:%s4]")
    assert all(skip.copies for skip in read(copying, table(), looped=True).skips)
    assert not any(skip.copies for skip in schedule().skips)


@pytest.mark.parametrize(
    ("program", "slots"),
    [
        ("", table()),
        ("something else", table()),
        (PROGRAM.replace("   0x8   : >", "   0x8   - >"), table()),
        (PROGRAM, table(capacity="2 2 4")),
        (PROGRAM, "== CAPACITY\nMXU\n2\n"),
        (PROGRAM, table(rows=31)),
    ],
)
def test_another_format_is_an_error_and_no_figure(program, slots):
    with pytest.raises(ValueError, match=r"format|table of slots"):
        read(program, slots, looped=True)


def test_buffers():
    tags = [
        ("scratch operand", 64),
        ("input window allocation for operator input 2. The window shape is bf16[8,128]", 4096),
        ("output window allocation for operator output 0. The window shape is f32[8,128]", 8192),
    ]
    allocations = ", ".join(f'{{"tag": "{tag}", "size": {size}}}' for tag, size in tags)
    report = (
        f'<script>const DATA ={{"hlo_breakdowns": {{"mm.1": {{"blocks": [{{"block_type": "SCOPED", "allocations": '
        f'[{allocations}]}}, {{"block_type": "HEAP", "allocations": []}}]}}}}}};\nlet x = 1;</script>'
    )
    found = vmem_buffers(report, "mm.1")
    assert [(b.nbytes, b.window) for b in found] == [(64, None), (4096, ("input", 2)), (8192, ("output", 0))]
    assert vmem_buffers(report, "other") == []
    assert vmem_buffers('const DATA ={"hlo_breakdowns": null};', "mm.1") == []
    with pytest.raises(ValueError, match="format"):
        vmem_buffers("<html></html>", "mm.1")
