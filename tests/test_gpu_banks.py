"""Bank conflicts that the machine counts, beside what the compiler says of the same accesses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gpu_kernels
from pallas_puzzles.course.check import check_call
from pallas_puzzles.course.inputs import Budget
from pallas_puzzles.ir.gpu import as_on_gpu
from pallas_puzzles.lens import gpu
from pallas_puzzles.lens.gpu import banks


def tiles(columns: int, swizzle: int | None) -> tuple[Any, ...]:
    swizzled = () if swizzle is None else (plgpu.SwizzleTransform(swizzle),)
    return (plgpu.TilingTransform((8, columns)), *swizzled)


@pytest.mark.parametrize(
    ("addresses", "width", "found"),
    [
        (np.arange(32) * 4, 4, 1),  # successive words
        (np.arange(32) * 8, 4, 2),
        (np.arange(32) * 128, 4, 32),  # a column of rows of 128 bytes
        (np.zeros(32, int), 4, 1),  # one word for all
        (np.arange(32) * 2, 2, 1),  # two lanes a word
        (np.arange(32) * 8, 8, 2),  # half a warp at once
        (np.arange(32) * 16, 16, 4),
        (np.arange(8) * 128, 16, 8),
    ],
)
def test_wavefronts(addresses: np.ndarray, width: int, found: int) -> None:
    assert banks.wavefronts(addresses[None], width) == found


STORED = [(jnp.bfloat16, 64, 128), (jnp.bfloat16, 32, 64), (jnp.bfloat16, 16, 32), (jnp.bfloat16, 64, None)]
STORED += [(jnp.float32, 32, 128), (jnp.float32, 16, 64), (jnp.float32, 32, None)]


@pytest.mark.parametrize(("dtype", "columns", "swizzle"), STORED)
def test_the_compiler_takes_what_has_no_conflicts(dtype: Any, columns: int, swizzle: int | None) -> None:
    """Mosaic GPU refuses a store for which it finds no order without bank conflicts."""
    kernel, args, want = gpu_kernels.epilogue(dtype, tiles(columns, swizzle))
    run = gpu.run(kernel, *args)
    np.testing.assert_array_equal(np.asarray(run.outputs, np.float32), want)
    with as_on_gpu():
        traced = jax.jit(kernel).trace(*args)
        if run.counts.bank_conflicts:
            with pytest.raises(ValueError, match="Failed to infer"):
                traced.lower(lowering_platforms=("cuda",))
        else:
            traced.lower(lowering_platforms=("cuda",))
    assert bool(run.counts.bank_conflicts) == (swizzle is None)


def test_conflicts_are_counted() -> None:
    """64 rows of 128 bytes: 8 of them that lie in the same banks are stored, or read, at once."""
    kernel, args, _ = gpu_kernels.epilogue(jnp.bfloat16, tiles(64, None))
    assert gpu.run(kernel, *args).counts.bank_conflicts == 64 * 64 * 2 // 128 * 7
    if hasattr(plgpu, "store"):  # from jax 0.12 on
        kernel, args, _ = gpu_kernels.epilogue(jnp.bfloat16, (), optimized=False)
        assert gpu.run(kernel, *args).counts.bank_conflicts == 64 * 64 * 2 // 128 * 7
    for swizzled, per_tile in ((None, 7 * 64), (128, 0)):
        kernel, args, _ = gpu_kernels.matmul(tiles=tiles(64, swizzled))
        counts = gpu.run(kernel, *args).counts
        assert counts.bank_conflicts == 4 * 2 * per_tile
        assert sum(counts.conflicts_at.values()) == counts.bank_conflicts


def test_conflicts_take_time() -> None:
    slow, fast = (gpu.run(k, *a).counts for k, a, _ in (gpu_kernels.matmul(tiles=tiles(64, n)) for n in (None, 128)))
    assert slow.tensor_busy - fast.tensor_busy == slow.bank_conflicts


def test_an_operand_without_a_swizzle_is_refused() -> None:
    kernel, args, want = gpu_kernels.matmul(tiles=tiles(64, None))
    (finding,) = check_call(kernel, args, want, budget=Budget(bank_conflicts=0)).findings
    assert "it has 3,584 bank conflicts in SMEM; the budget is 0" in finding.cause
    assert "SwizzleTransform(128)" in finding.cause
    assert finding.line is not None
    assert "plgpu.wgmma(acc, a, b_smem.at[slot])" in finding.line.text
    kernel, args, want = gpu_kernels.matmul()
    assert check_call(kernel, args, want, budget=Budget(bank_conflicts=0))
