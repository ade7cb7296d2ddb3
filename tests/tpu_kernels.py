"""Kernels for the tests of the TPU compiler, and the marks for tests that need it, or what it once said."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.targets.tpu import compiler

needs_compiler = pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
remembered = pytest.mark.usefixtures("compiled_once")  # kept.py: not for tests of the compiler's process


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def double(x, *, bm=8):
    spec = pl.BlockSpec((bm, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(double_kernel, grid=(x.shape[0] // bm,), in_specs=[spec], out_specs=spec, out_shape=x)(x)


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, *, bm, bk, bn):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        matmul_kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)
