"""What learners get wrong, one small kernel each. `# <- here` marks the line that a finding should point to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from zoo import F32, HBM, I32, Exhibit, integers, like, normal, np_softmax, registers_in, rows, tiles

MARK = "# <- here"


class Mistake(Exhibit):
    """A wrong kernel (two of them only look wrong), and what it should have returned."""

    @property
    def line(self) -> int | None:
        """Number of the marked line in this file, None where the mistake has no line of its own."""
        source, first = inspect.getsourcelines(self.fn)
        marked = [first + i for i, text in enumerate(source) if MARK in text]
        assert len(marked) <= 1, f"{self.name} marks {len(marked)} lines"
        return marked[0] if marked else None


MISTAKES: dict[str, Mistake] = {}
mistake = registers_in(MISTAKES, Mistake)

X = normal(32, 384)  # cut into blocks of (8, 128): a grid of (4, 3)
A, B = normal(64, 96), normal(96, 256)
SHORT = normal(100)
RAGGED = normal(20, 384)  # two and a half slabs of eight rows
TILE = tiles(8, 128)


def np_double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def np_row_sum(x: np.ndarray) -> np.ndarray:
    return x.sum(1, keepdims=True)


def same(x: np.ndarray) -> np.ndarray:
    return x


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def index(i: Any, j: Any) -> Any:
    return i, j


def per_tile(
    kernel: Callable[..., None], x: Any, dtype: Any = None, x_map: Any = index, o_map: Any = index, **more: Any
) -> Any:
    """One program per (8, 128) block of x, which reads and writes the blocks that the maps say."""
    grid, shape = (x.shape[0] // 8, x.shape[1] // 128), like(x, dtype=dtype)
    from_x, to_o = (pl.BlockSpec((8, 128), each) for each in (x_map, o_map))
    return pl.pallas_call(kernel, grid=grid, in_specs=[from_x], out_specs=to_o, out_shape=shape, **more)(x)


def per_row_block(kernel: Callable[..., None], x: Any, **more: Any) -> Any:
    """Step (i, j) sees block (i, j) of x and block (i, 0) of a column vector."""
    column = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
    shape = like(x, (x.shape[0], 1))
    return pl.pallas_call(kernel, grid=(4, 3), in_specs=[TILE], out_specs=column, out_shape=shape, **more)(x)


def matmul_call(kernel: Callable[..., None], a: Any, b: Any, grid: Any = (4, 2, 3), order: str = "ijk") -> Any:
    """Step (i, j, k), in any order, sees a[i, k] of (16, 32), b[k, j] of (32, 128), o[i, j], and an accumulator."""

    def spec(block: Any, axes: str) -> Any:
        return pl.BlockSpec(block, lambda *step: tuple(step[order.index(axis)] for axis in axes))

    return pl.pallas_call(
        kernel, grid=grid, in_specs=[spec((16, 32), "ik"), spec((32, 128), "kj")], out_specs=spec((16, 128), "ij"),
        out_shape=like(a, (64, 256)), scratch_shapes=[pltpu.VMEM((16, 128), F32)])(a, b)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Not stored, or not everywhere
# ---------------------------------------------------------------------------------------------------------------------
@mistake(X, want=np_double)
def nothing_stored(x):
    def kernel(x_ref, o_ref):  # <- here
        pass

    return per_tile(kernel, x)


@mistake(X, want=np_double)
def upper_half_stored(x):
    def kernel(x_ref, o_ref):
        o_ref[0:4, :] = 2 * x_ref[0:4, :]  # <- here

    return per_tile(kernel, x)


@mistake(X, want=np_double)
def even_rows_of_blocks_stored(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            o_ref[...] = 2 * x_ref[...]  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def ref_rebound_instead_of_stored(x):
    def kernel(x_ref, o_ref):  # <- here
        o_ref = x_ref[...]  # noqa: F841

    return per_tile(kernel, x)


@mistake(RAGGED, want=np_double)
def grid_by_floor_division(x):
    def o_map(i):  # <- here
        return i, 0

    slab, out = rows(8, 384), pl.BlockSpec((8, 384), o_map)
    return pl.pallas_call(double_kernel, grid=(20 // 8,), in_specs=[slab], out_specs=out, out_shape=like(x))(x)


@mistake(RAGGED, want=np_double)
def ragged_last_block_is_fine(x):
    slab = rows(8, 384)
    return pl.pallas_call(double_kernel, grid=(pl.cdiv(20, 8),), in_specs=[slab], out_specs=slab, out_shape=like(x))(x)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulators
# ---------------------------------------------------------------------------------------------------------------------
@mistake(A, B, want=np.matmul)
def accumulator_never_zeroed(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        acc_ref[...] += jnp.dot(a_ref[...], b_ref[...])  # <- here

        @pl.when(pl.program_id(2) == 2)
        def _():
            o_ref[...] = acc_ref[...]

    return matmul_call(kernel, a, b)


@mistake(A, B, want=np.matmul)
def accumulator_zeroed_once_for_all(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        i, j, k = (pl.program_id(axis) for axis in range(3))

        @pl.when((i == 0) & (j == 0) & (k == 0))
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(a_ref[...], b_ref[...])  # <- here

        @pl.when(k == 2)
        def _():
            o_ref[...] = acc_ref[...]

    return matmul_call(kernel, a, b)


@mistake(X, want=np_row_sum)
def output_never_zeroed(x):
    def kernel(x_ref, o_ref):
        o_ref[...] += x_ref[...].sum(1, keepdims=True)  # <- here

    return per_row_block(kernel, x)


@mistake(X, want=np_row_sum)
def overwritten_instead_of_accumulated(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(1, keepdims=True)  # <- here

    return per_row_block(kernel, x)


@mistake(SHORT, want=lambda x: x.sum(keepdims=True))
def padding_summed(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(keepdims=True)  # <- here

    return pl.pallas_call(
        kernel, grid=(4,), in_specs=[tiles(32)], out_specs=pl.BlockSpec((1,), lambda i: (0,)),
        out_shape=like(x, (1,)))(x)  # fmt: skip


@mistake(X, want=same)
def scratch_read_before_written(x):
    def kernel(x_ref, o_ref, offset_ref):
        o_ref[...] = x_ref[...] + offset_ref[...]  # <- here

    return per_tile(kernel, x, scratch_shapes=[pltpu.VMEM((8, 128), F32)])


@mistake(integers(-9, 9, 32, 384), want=same)
def integer_scratch_read_before_written(x):
    def kernel(x_ref, o_ref, offset_ref):
        o_ref[...] = x_ref[...] + offset_ref[...]  # <- here

    return per_tile(kernel, x, scratch_shapes=[pltpu.VMEM((8, 128), I32)])


# ---------------------------------------------------------------------------------------------------------------------
# Index maps
# ---------------------------------------------------------------------------------------------------------------------
@mistake(X, want=np_double)
def input_block_past_the_end(x):
    def x_map(i, j):  # <- here
        return i + 1, j

    return per_tile(double_kernel, x, x_map=x_map)


@mistake(X, want=np_double)
def input_block_before_the_start(x):
    def x_map(i, j):  # <- here
        return i - 1, j

    return per_tile(double_kernel, x, x_map=x_map)


@mistake(X, want=np_double)
def output_block_past_the_end(x):
    def o_map(i, j):  # <- here
        return i + 1, j

    return per_tile(double_kernel, x, o_map=o_map)


@mistake(X, want=np_double)
def offsets_instead_of_block_indices(x):
    def x_map(i, j):  # <- here
        return i * 8, j * 128

    return per_tile(double_kernel, x, x_map=x_map, o_map=x_map)


@mistake(normal(24, 384), want=same)
def rows_and_columns_swapped(x):
    def o_map(i, j):  # <- here
        return j, i

    return per_tile(copy_kernel, x, o_map=o_map)


@mistake(X, want=same)
def every_column_lands_in_the_first(x):
    def o_map(i, j):  # <- here
        return i, 0

    return per_tile(copy_kernel, x, o_map=o_map)


@mistake(X, want=lambda x: x + np.repeat(np.arange(4), 8)[:, None])
def wrong_program_id(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.program_id(1)  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def slice_past_the_ref(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 8, 8), :]  # <- here

    return per_tile(kernel, x)


@mistake(X, want=lambda x: np.where(np.arange(32)[:, None] % 8 == 7, 0, x))
def negative_index_into_a_ref(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[-1] = jnp.zeros(128)  # <- here

    return per_tile(kernel, x)


# ---------------------------------------------------------------------------------------------------------------------
# The order of steps
# ---------------------------------------------------------------------------------------------------------------------
def both_parallel() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))


@mistake(X, want=np_row_sum)
def reduction_axis_marked_parallel(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(1, keepdims=True)

    return per_row_block(kernel, x, compiler_params=both_parallel())


@mistake(X, want=lambda x: x.sum(0, keepdims=True))
def parallel_and_never_zeroed(x):
    def kernel(x_ref, o_ref):
        o_ref[...] += x_ref[...].sum(0, keepdims=True)

    return pl.pallas_call(
        kernel, grid=(3, 4), in_specs=[pl.BlockSpec((8, 128), lambda j, i: (i, j))],
        out_specs=pl.BlockSpec((1, 128), lambda j, i: (0, j)), out_shape=like(x, (1, 384)),
        compiler_params=both_parallel())(x)  # fmt: skip


@mistake(X, want=np_row_sum)
def reduction_axis_outermost(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(1, keepdims=True)

    return pl.pallas_call(
        kernel, grid=(3, 4), in_specs=[pl.BlockSpec((8, 128), lambda j, i: (i, j))],
        out_specs=pl.BlockSpec((8, 1), lambda j, i: (i, 0)), out_shape=like(x, (32, 1)))(x)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What JAX refuses while it traces
# ---------------------------------------------------------------------------------------------------------------------
@mistake(integers(-9, 9, 32, 384), want=lambda x: x // 2)
def float_into_an_integer_ref(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 0.5  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def float32_into_a_bfloat16_ref(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]  # <- here

    return per_tile(kernel, x, dtype=jnp.bfloat16)


@mistake(X, want=same)
def row_stored_into_a_block(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(0)  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def transposed_value_into_a_block(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def exception_of_their_own(x):
    def kernel(x_ref, o_ref):
        raise RuntimeError("to be written tomorrow")  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def misspelt_name(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = xref[...]  # noqa: F821  # <- here

    return per_tile(kernel, x)


@mistake(X, want=lambda x: x + 1)
def arithmetic_on_a_ref(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref + 1  # <- here

    return per_tile(kernel, x)


@mistake(X, want=same)
def python_if_on_a_program_id(x):
    def kernel(x_ref, o_ref):
        if pl.program_id(0) == 0:  # <- here
            o_ref[...] = x_ref[...]

    return per_tile(kernel, x)


@mistake(X, want=same)
def value_returned(x):
    def kernel(x_ref, o_ref):  # <- here
        return x_ref[...]

    return per_tile(kernel, x)


@mistake(X, want=same)
def kernel_with_too_few_refs(x):
    def kernel(x_ref):
        pass

    return per_tile(kernel, x)


@mistake(X, want=np_double)
def index_map_with_too_few_arguments(x):
    def x_map(i):
        return i, 0

    return per_tile(double_kernel, x, x_map=x_map)


@mistake(X, want=np_double)
def index_map_with_too_few_results(x):
    def x_map(i, j):  # <- here
        return i

    return per_tile(double_kernel, x, x_map=x_map)


@mistake(X, want=np_double)
def index_map_with_true_division(x):
    def x_map(i, j):  # <- here
        return i / 1, j

    return per_tile(double_kernel, x, x_map=x_map)


@mistake(X, want=lambda x: x + np.tile(np.arange(128), 3))
def array_captured_by_the_kernel(x):
    ramp = jnp.arange(128.0)

    def kernel(x_ref, o_ref):  # <- here
        o_ref[...] = x_ref[...] + ramp

    return per_tile(kernel, x)


@mistake(X, want=lambda x: x + 1)
def update_of_a_value_in_the_kernel(x):
    def kernel(x_ref, o_ref):  # <- here
        result = jnp.zeros(o_ref.shape)
        o_ref[...] = result.at[:].set(x_ref[...] + 1)

    return per_tile(kernel, x)


# ---------------------------------------------------------------------------------------------------------------------
# Copies and semaphores
# ---------------------------------------------------------------------------------------------------------------------
def copying(kernel: Callable[..., None], x: Any, buffer_rows: int) -> Any:
    """A kernel without grid: x in HBM, a buffer and a semaphore to copy it with."""
    shape = (buffer_rows, x.shape[1])
    scratch = [pltpu.VMEM(shape, x.dtype), pltpu.SemaphoreType.DMA]
    return pl.pallas_call(kernel, in_specs=[HBM], out_shape=like(x, shape), scratch_shapes=scratch)(x)


@mistake(X, want=same)
def copy_never_waited_for(x):
    def kernel(x_hbm, o_ref, buffer, sem):
        pltpu.make_async_copy(x_hbm, buffer, sem).start()  # <- here
        o_ref[...] = buffer[...]

    return copying(kernel, x, 32)


@mistake(X, want=same)
def wait_for_a_copy_never_started(x):
    def kernel(x_hbm, o_ref, buffer, sem):
        pltpu.make_async_copy(x_hbm, buffer, sem).wait()  # <- here
        o_ref[...] = buffer[...]

    return copying(kernel, x, 32)


@mistake(X, want=lambda x: x[8:24])
def copy_past_the_end(x):
    def kernel(x_hbm, o_ref, buffer, sem):
        first = 8 * pl.program_id(0) + 20
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(first, 8)], buffer, sem)
        copy.start()  # <- here
        copy.wait()
        o_ref[...] = buffer[...]

    return pl.pallas_call(
        kernel, grid=(2,), in_specs=[HBM], out_specs=rows(8, 384), out_shape=like(x, (16, 384)),
        scratch_shapes=[pltpu.VMEM((8, 384), F32), pltpu.SemaphoreType.DMA])(x)  # fmt: skip


@mistake(X, want=lambda x: x[24:])
def constant_slice_past_the_end(x):
    def kernel(x_hbm, o_ref):
        pltpu.sync_copy(x_hbm.at[pl.ds(28, 8)], o_ref)  # <- here

    return pl.pallas_call(kernel, in_specs=[HBM], out_shape=like(x, (8, 384)))(x)


@mistake(X, want=same)
def read_straight_from_hbm(x):
    def kernel(x_hbm, o_ref):
        o_ref[...] = x_hbm[...]  # <- here

    return pl.pallas_call(kernel, in_specs=[HBM], out_shape=like(x))(x)


@mistake(X, want=same)
def wait_for_a_signal_that_never_comes(x):
    def kernel(x_ref, o_ref, ready):
        pl.semaphore_wait(ready, 1)  # <- here
        o_ref[...] = x_ref[...]

    return per_tile(kernel, x, scratch_shapes=[pltpu.SemaphoreType.REGULAR])


# ---------------------------------------------------------------------------------------------------------------------
# Right everywhere but on the real chip
# ---------------------------------------------------------------------------------------------------------------------
@mistake(normal(32, 192), want=np_double)
def block_too_small_for_the_chip(x):
    spec = tiles(4, 32)
    return pl.pallas_call(double_kernel, grid=(8, 6), in_specs=[spec], out_specs=spec, out_shape=like(x))(x)


# ---------------------------------------------------------------------------------------------------------------------
# Maxima, exponentials, and numbers that belong to a row
# ---------------------------------------------------------------------------------------------------------------------
LOW = X - 60  # every row lies wholly below -50
COLUMN = pltpu.VMEM((8, 1), F32)


def np_sum_of_exponentials(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)


def per_rows(kernel: Callable[..., None], *arrays: Any, columns: int = 384) -> Any:
    """Step i sees rows 8 i to 8 i + 7, whole; the result has so many columns."""
    specs, shape = [rows(8, 384)] * len(arrays), like(arrays[0], (32, columns))
    return pl.pallas_call(kernel, grid=(4,), in_specs=specs, out_specs=rows(8, columns), out_shape=shape)(*arrays)


def rescaling_sum(x: Any, start: float = -np.inf, over: float | None = None) -> Callable[[Callable[..., None]], Any]:
    """Calls a kernel that updates m_ref and l_ref, between starting values and the final store."""

    def call(update: Callable[..., None]) -> Any:
        def kernel(x_ref, o_ref, m_ref, l_ref):
            j = pl.program_id(1)

            @pl.when(j == 0)
            def _():
                m_ref[...] = jnp.full(m_ref.shape, start)
                l_ref[...] = jnp.zeros(l_ref.shape)

            update(x_ref, m_ref, l_ref)

            @pl.when(j == 2)
            def _():
                o_ref[...] = l_ref[...] if over is None else over / l_ref[...]

        return per_row_block(kernel, x, scratch_shapes=[COLUMN, COLUMN])

    return call


def row_max(x: Any) -> Any:
    return x.max(axis=1, keepdims=True)


@mistake(LOW, want=np_sum_of_exponentials)
def running_maximum_from_zero(x):
    def update(x_ref, m_ref, l_ref):
        m_old, x = m_ref[...], x_ref[...]
        m_new = jnp.maximum(m_old, row_max(x))  # <- here
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    return rescaling_sum(x, start=0.0)(update)


@mistake(X, want=np_sum_of_exponentials)
def sum_not_rescaled(x):
    def update(x_ref, m_ref, l_ref):
        m_new = jnp.maximum(m_ref[...], row_max(x_ref[...]))
        l_ref[...] += jnp.exp(x_ref[...] - m_new).sum(axis=1, keepdims=True)  # <- here
        m_ref[...] = m_new

    return rescaling_sum(x)(update)


@mistake(X, want=np_sum_of_exponentials)
def old_maximum_read_when_it_is_gone(x):
    def update(x_ref, m_ref, l_ref):
        m_new = jnp.maximum(m_ref[...], row_max(x_ref[...]))
        m_ref[...] = m_new
        factor = jnp.exp(m_ref[...] - m_new)
        l_ref[...] = l_ref[...] * factor + jnp.exp(x_ref[...] - m_new).sum(axis=1, keepdims=True)  # <- here

    return rescaling_sum(x)(update)


@mistake(X, want=np_sum_of_exponentials)
def maximum_of_the_last_block(x):
    def update(x_ref, m_ref, l_ref):
        m_old, m_new = m_ref[...], row_max(x_ref[...])
        factor = jnp.exp(m_old - m_new)  # <- here
        l_ref[...] = l_ref[...] * factor + jnp.exp(x_ref[...] - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    return rescaling_sum(x)(update)


@mistake(X, want=np_row_sum)
def starting_value_set_again(x):
    def kernel(x_ref, o_ref, acc_ref):
        j = pl.program_id(1)

        @pl.when(j != 1)
        def _():
            acc_ref[...] = jnp.zeros(acc_ref.shape)  # <- here

        acc_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

        @pl.when(j == 2)
        def _():
            o_ref[...] = acc_ref[...]

    return per_row_block(kernel, x, scratch_shapes=[COLUMN])


@mistake(1e4 * X, want=np_softmax)
def maximum_of_all_rows_at_once(x):
    def kernel(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max())
        o_ref[...] = e / e.sum(axis=1, keepdims=True)  # <- here

    return per_rows(kernel, x)


@mistake(LOW[:, :300], want=lambda x: x.max(1, keepdims=True))
def mask_fills_with_zero(x):
    def kernel(x_ref, o_ref):
        j = pl.program_id(1)
        real = j * 128 + jnp.arange(128)[None, :] < 300

        @pl.when(j == 0)
        def _():
            o_ref[...] = jnp.full(o_ref.shape, -jnp.inf)

        o_ref[...] = jnp.maximum(o_ref[...], jnp.where(real, x_ref[...], 0).max(axis=1, keepdims=True))  # <- here

    return per_row_block(kernel, x)


@mistake(X, want=np_softmax)
def never_divided_by_the_sum(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...] - row_max(x_ref[...]))  # <- here

    return per_rows(kernel, x)


@mistake(X, want=lambda x: x - x.mean(1, keepdims=True))
def maximum_subtracted_instead_of_mean(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] - row_max(x_ref[...])  # <- here

    return per_rows(kernel, x)


@mistake(X, normal(32, 384), want=lambda y, g: y * (g - (g * y).sum(1, keepdims=True)))
def row_term_with_the_wrong_sign(y, g):
    def kernel(y_ref, g_ref, o_ref):
        y, g = y_ref[...], g_ref[...]
        o_ref[...] = y * (g + (g * y).sum(axis=1, keepdims=True))  # <- here

    return per_rows(kernel, y, g)


@mistake(X, want=np_softmax)
def softmax_down_the_columns(x):
    def kernel(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max(axis=0, keepdims=True))
        o_ref[...] = e / e.sum(axis=0, keepdims=True)  # <- here

    return per_rows(kernel, x)


@mistake(X, want=lambda x: x - x.mean(1, keepdims=True))
def mean_down_the_columns(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] - x_ref[...].mean(axis=0, keepdims=True)  # <- here

    return per_rows(kernel, x)


@mistake(X, want=lambda x: x.std(1, keepdims=True))
def divided_by_one_less(x):
    def kernel(x_ref, o_ref):
        centred = x_ref[...] - x_ref[...].mean(axis=1, keepdims=True)
        o_ref[...] = jnp.sqrt((centred * centred).sum(axis=1, keepdims=True) / 383)  # <- here

    return per_rows(kernel, x, columns=1)


@mistake(X + 1000, want=lambda x: x.var(1, keepdims=True))
def variance_by_cancellation(x):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        mean = x.mean(axis=1, keepdims=True)
        o_ref[...] = (x * x).mean(axis=1, keepdims=True) - mean * mean  # <- here

    return per_rows(kernel, x, columns=1)


@mistake(1e-3 * X, want=lambda x: 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5))
def constant_outside_of_the_root(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 1 / (jnp.sqrt(x_ref[...].var(axis=1, keepdims=True)) + 1e-5)  # <- here

    return per_rows(kernel, x, columns=1)


@mistake(X, want=lambda x: x[:, 200:201])
def columns_counted_from_the_start_of_the_block(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros(o_ref.shape)

        cols = jnp.arange(128)[None, :] + jnp.zeros((8, 1), I32)
        label = x_ref[...].astype(I32) * 0 + 72
        o_ref[...] += jnp.where(cols == label, x_ref[...], 0).sum(axis=1, keepdims=True)  # <- here

    return per_row_block(kernel, x)


@mistake(X, want=np_double)
def output_leaves_before_anything_is_stored(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 1)
        def _():
            o_ref[...] = 2 * x_ref[...]

    spec = pl.BlockSpec((8, 128), lambda i, sweep, j: (i, j))  # <- here
    return pl.pallas_call(kernel, grid=(4, 2, 3), in_specs=[spec], out_specs=spec, out_shape=like(x))(x)


@mistake(X, want=np_double)
def half_a_gradient(x):
    def kernel(g_ref, o_ref):
        @pl.when(pl.program_id(0) < 4)
        def _():
            o_ref[0:4, :] = 2 * g_ref[0:4, :]  # <- here

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (per_rows(kernel, g),))
    return jax.vjp(double, x)[1](x)[0]


@mistake(X, want=np_double)
def reduction_that_loses_its_dimension(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] - x_ref[...].max(axis=1)  # <- here

    return per_rows(kernel, x)


@mistake(X, want=np_double)
def forward_without_residuals(x):
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: 2 * x, lambda _, g: (2 * g,))
    return jax.vjp(double, x)[1](x)[0]


@mistake(X, want=np_double)
def backward_without_a_tuple(x):
    double = jax.custom_vjp(lambda x: 2 * x)
    double.defvjp(lambda x: (2 * x, None), lambda _, g: 2 * g)
    return jax.vjp(double, x)[1](x)[0]


@mistake(X, want=np_sum_of_exponentials)
def upside_down(x):
    def update(x_ref, m_ref, l_ref):
        m_old, m_new = m_ref[...], jnp.maximum(m_ref[...], row_max(x_ref[...]))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x_ref[...] - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    return jnp.reshape(rescaling_sum(x, over=1.0)(update), (-1, 1))


@mistake(A, B, want=np.matmul)
def read_in_vain_and_wrong_for_another_reason(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])  # garbage at first, and none of it gets through
        acc_ref[...] = before + jnp.dot(a_ref[...], b_ref[...])
        o_ref[...] = 2 * acc_ref[...]  # <- here

    return matmul_call(kernel, a, b)


@mistake(A, B, want=np.matmul)
def added_in_vain_and_wrong_for_another_reason(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        product = jnp.dot(a_ref[...], b_ref[...])
        acc_ref[...] = jnp.where(pl.program_id(2) == 0, product, acc_ref[...] + product)  # a sum with garbage goes
        o_ref[...] = 2 * acc_ref[...]  # <- here

    return matmul_call(kernel, a, b)


@mistake(A, B, want=np.matmul)
def zeroed_by_value_for_the_first_tile_only(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0)
        before = jnp.where(first, 0, acc_ref[...])  # <- here
        acc_ref[...] = before + jnp.dot(a_ref[...], b_ref[...])
        o_ref[...] = acc_ref[...]

    return matmul_call(kernel, a, b)


@mistake(A, B, want=np.matmul)
def scratch_replaced_and_stored_at_once(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        acc_ref[...] = jnp.dot(a_ref[...], b_ref[...])
        o_ref[...] = acc_ref[...]  # <- here

    return matmul_call(kernel, a, b)


@mistake(A, B, want=np.matmul)
def reduction_axis_first(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        k = pl.program_id(0)
        acc_ref[...] = jnp.where(k == 0, 0, acc_ref[...]) + jnp.dot(a_ref[...], b_ref[...])

        @pl.when(k == 2)
        def _():
            o_ref[...] = acc_ref[...]

    return matmul_call(kernel, a, b, grid=(3, 4, 2), order="kij")


@mistake(A, B, want=np.matmul)
def grid_cut_short_under_a_sum(a, b):
    def kernel(a_ref, b_ref, o_ref, acc_ref):
        acc_ref[...] = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...]) + jnp.dot(a_ref[...], b_ref[...])
        o_ref[...] = acc_ref[...]

    return matmul_call(kernel, a, b, grid=(3, 2, 3))


@mistake(
    X,
    np.array([2, 1, 3, 1], np.int32),
    want=lambda x, count: np.stack(
        [x[8 * i : 8 * i + 8, : 128 * n].reshape(8, n, 128).sum(1) for i, n in enumerate(count)]
    ).reshape(32, 128),
)
def the_last_block_added_again(x, count):
    def kernel(count_ref, x_ref, o_ref):
        o_ref[...] = jnp.where(pl.program_id(1) == 0, 0, o_ref[...]) + x_ref[...]  # <- here

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4, 3),
            in_specs=[pl.BlockSpec((8, 128), lambda i, s, count_ref: (i, jnp.minimum(s, count_ref[i] - 1)))],
            out_specs=pl.BlockSpec((8, 128), lambda i, s, count_ref: (i, 0))),
        out_shape=like(x, (32, 128)))(count, x)  # fmt: skip


@mistake(normal(32, 1), integers(-120, 120, 32, 128, dtype="int8"), want=lambda s, x: s * (x * 1.0) @ (x * 1.0).T)
def product_of_int8_in_int8(s, x):
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = s_ref[...] * jnp.dot(x_ref[...], x_ref[...].T)

    return pl.pallas_call(kernel, out_shape=like(s, (32, 32)))(s, x)


@mistake(A.astype("bfloat16"), want=lambda a: a)
def one_factor_in_16_bits(a):
    def kernel(a_ref, o_ref):
        o_ref[...] = (a_ref[...].astype(F32) * 0.503).astype(o_ref.dtype)  # <- here

    slab = rows(16, 96)
    return pl.pallas_call(kernel, grid=(4,), in_specs=[slab], out_specs=slab, out_shape=like(a))(a)


# What is refused while the kernel is traced, before there is a grid step to speak of.


@mistake(X, want=lambda x: np.maximum(x, 0))
def when_on_an_array(x):
    def kernel(x_ref, o_ref):
        @pl.when(x_ref[...] > 0)  # <- here
        def _():
            o_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=like(x))(x)


ORDER = jnp.array([2, 0, 3, 1])


@mistake(X, want=lambda x: x.reshape(4, 8, 384)[[2, 0, 3, 1]].reshape(32, 384))
def index_map_that_captures_an_array(x):
    def x_map(i):  # <- here
        return (ORDER[i], 0)

    return pl.pallas_call(
        copy_kernel, grid=(4,), in_specs=[pl.BlockSpec((8, 384), x_map)], out_specs=rows(8, 384), out_shape=like(x)
    )(x)


@mistake(X, want=np.ones_like)
def gradient_without_custom_vjp(x):
    return jax.grad(lambda x: pl.pallas_call(copy_kernel, out_shape=like(x))(x).sum())(x)  # <- here


@mistake(X, want=lambda x: x)
def one_block_spec_too_many(x):
    return pl.pallas_call(
        copy_kernel, grid=(4,), in_specs=[rows(8, 384)] * 2, out_specs=rows(8, 384), out_shape=like(x)
    )(x)  # fmt: skip


@mistake(A, B, want=np.matmul)
def factors_that_do_not_fit(a, b):
    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(b_ref[...], a_ref[...])  # <- here

    return pl.pallas_call(kernel, out_shape=like(a, (64, 256)))(a, b)
