"""matmul.py before the TPU compiler: bundles beside JAX's own matmul, and the picked tiles beside the roofline."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_puzzles.course import curriculum, session
from pallas_puzzles.targets.tpu.chips import CHIPS
from pallas_puzzles.view.tpu_report import tpu_report
from tpu_kernels import needs_compiler, remembered

pytestmark = [needs_compiler, remembered]


@functools.cache
def solution(puzzle_id):
    file = curriculum.course_folder() / "solutions" / "matmul.py"
    return session.run(puzzle_id, overlay=file, judge=False).subject.fn


def square(size):
    return jax.ShapeDtypeStruct((size, size), jnp.bfloat16)


def only_kernel(fn, size, tpu, **blocks):
    report = tpu_report(fn, square(size), square(size), tpu=tpu, simulate=False, **blocks)
    assert report, report.refusal or report.unavailable
    (kernel,) = report.kernels
    return kernel


@pytest.mark.parametrize("tpu", CHIPS)
def test_no_more_bundles_than_jax(tpu):
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    ours = only_kernel(solution("matmul/3"), 2048, tpu, bm=512, bn=512, bk=512)
    theirs = only_kernel(functools.partial(matmul, block_shape=(512, 512), block_k=512), 2048, tpu)
    assert ours.steps == theirs.steps == 64
    assert ours.mean_step <= theirs.mean_step


# The schedule alone is within 10% of the roofline on both. The estimate adds the fill and 0.25 us a step, and on a v6e
# those alone are 10% of 4096 x 4096 x 4096, for any tiles (see the last puzzle).
@pytest.mark.parametrize(
    ("tpu", "size", "within"),
    [
        ("v5e", 4096, 1.04),
        pytest.param("v6e", 4096, 1.12, marks=pytest.mark.thorough),
        pytest.param("v6e", 8192, 1.07, marks=pytest.mark.thorough),
    ],
)
def test_the_picked_tiles_are_near_the_roofline(tpu, size, within):
    fn, chip = solution("matmul/12"), CHIPS[tpu]
    figures = fn.__globals__[tpu.upper()]
    assert figures.flops_per_s == chip.flops_per_s()
    assert figures.hbm_bytes_per_s == chip.hbm_bytes_per_s
    roofline = max(2 * size**3 / chip.flops_per_s(), 3 * 2 * size**2 / chip.hbm_bytes_per_s)
    kernel = only_kernel(fn, size, tpu, chip=figures, vmem_limit_bytes=96 << 20)
    assert max(kernel.times["MXU"], kernel.times["bundles"]) <= 1.05 * roofline
    assert roofline <= kernel.time_s <= within * roofline
    blocks = fn.__globals__["pick_blocks"](size, size, size, figures)
    model = fn.__globals__["plan_time"](size, size, size, *blocks, figures)
    assert model == pytest.approx(kernel.time_s, rel=0.01)


def test_no_tiles_of_4096_reach_ten_per_cent_on_v6e():
    names = solution("matmul/12").__globals__
    chip, sizes = names["V6E"], names["tile_sizes"](4096)
    plans = [(bm, bn, bk) for bm in sizes for bn in sizes for bk in sizes]
    assert len(plans) == 216
    best = min(names["plan_time"](4096, 4096, 4096, *plan, chip) for plan in plans)  # whatever VMEM they take
    assert best > 1.10 * 2 * 4096**3 / chip.flops_per_s
