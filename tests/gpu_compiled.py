"""Kernels for the tests of the GPU compiler, and the mark for tests that need it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_puzzles.targets.gpu import compiler

needs_compiler = pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def softmax(x):
    def kernel(x_gmem, o_gmem):
        row = jax.lax.axis_index("row")
        x = x_gmem[row]
        p = jnp.exp(x - jnp.max(x))
        o_gmem[row] = p / jnp.sum(p)

    return plgpu.kernel(kernel, out_type=x, grid=(x.shape[0],), grid_names=("row",))(x)


def copied(x, *, bm=64):
    """x + 1, by way of SMEM."""

    def kernel(x_gmem, o_gmem, x_smem, o_smem, barrier):
        rows = pl.ds(jax.lax.axis_index("i") * bm, bm)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)
        plgpu.barrier_wait(barrier)
        o_smem[...] = x_smem[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows])
        plgpu.wait_smem_to_gmem(0)

    block = plgpu.SMEM((bm, x.shape[1]), x.dtype)
    return plgpu.kernel(
        kernel,
        out_type=x,
        grid=(x.shape[0] // bm,),
        grid_names=("i",),
        scratch_types=[block, block, plgpu.Barrier()],
    )(x)


def matmul(a, b, *, tm=64, tn=64, tk=64):
    """a @ b by wgmma, a step at a time."""
    (m, k), n = a.shape, b.shape[1]
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, barrier):
        rows, columns = jax.lax.axis_index("i") * tm, jax.lax.axis_index("j") * tn

        def scope(acc_ref):
            @pl.loop(0, k // tk)
            def _(step):
                inner = pl.ds(step * tk, tk)
                plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(rows, tm), inner], a_smem, barrier)
                plgpu.copy_gmem_to_smem(b_gmem.at[inner, pl.ds(columns, tn)], b_smem, barrier)
                plgpu.barrier_wait(barrier)
                plgpu.wgmma(acc_ref, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            return acc_ref[...]

        o_smem[...] = pl.run_scoped(scope, plgpu.ACC((tm, tn))).astype(o_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(rows, tm), pl.ds(columns, tn)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=shape(m, n, dtype=a.dtype),
        grid=(m // tm, n // tn),
        grid_names=("i", "j"),
        scratch_types=[
            plgpu.SMEM((tm, tk), a.dtype, transforms=swizzled),
            plgpu.SMEM((tk, tn), a.dtype, transforms=swizzled),
            plgpu.SMEM((tm, tn), a.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)
