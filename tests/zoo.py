"""Small correct kernels, written as a learner would: what the lens must follow, step by step, without help."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

F32, BF16, I32, I8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8
RNG = np.random.default_rng(2024)


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """One kernel: a function of arrays, its arguments, and what NumPy says it should return."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    want: Callable[..., Any]

    @property
    def expected(self) -> Any:
        """The result in float64 where the arguments are floating point."""
        return self.want(*jax.tree.map(widened, self.args))


def registers_in(found: dict[str, Any], kind: type[Exhibit] = Exhibit) -> Callable[..., Any]:
    """A decorator that takes the arguments and `want`, and registers a function under its own name."""

    def with_arguments(*args: Any, want: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            assert fn.__name__ not in found, f"two of them are called {fn.__name__}"
            found[fn.__name__] = kind(fn.__name__, fn, args, want)
            return fn

        return register

    return with_arguments


ZOO: dict[str, Exhibit] = {}
exhibit = registers_in(ZOO)


def widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def normal(*shape: int, dtype: Any = F32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.dtype(dtype))


def integers(low: int, high: int, *shape: int, dtype: Any = I32) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.dtype(dtype))


def like(x: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype if dtype is None else dtype)


def tiles(*block: Any) -> pl.BlockSpec:
    """Block (i, j) at grid step (i, j)."""
    return pl.BlockSpec(block, lambda *index: index)


def rows(bm: int, n: int) -> pl.BlockSpec:
    """A slab of bm full rows at grid step i."""
    return pl.BlockSpec((bm, n), lambda i: (i, 0))


def by_rows(kernel: Callable[..., None], *arrays: Any, bm: int = 8) -> Any:
    """Step i sees a slab of bm rows of each array; the result is like the last one."""
    specs = [rows(bm, x.shape[1]) for x in arrays]
    return pl.pallas_call(
        kernel, grid=(arrays[0].shape[0] // bm,), in_specs=specs, out_specs=specs[-1], out_shape=like(arrays[-1])
    )(*arrays)


HBM = pl.BlockSpec(memory_space=pl.ANY)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def np_softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# Grids of rank 0, 1, 2, 3, 4
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(normal(1), normal(16, 384), normal(16, 384), want=lambda a, x, y: a * x + y)
def axpy_without_grid(a, x, y):
    def kernel(a_ref, x_ref, y_ref, o_ref):
        o_ref[...] = a_ref[0] * x_ref[...] + y_ref[...]

    specs = [SMEM, pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec()]
    return pl.pallas_call(kernel, in_specs=specs, out_shape=like(x))(a, x, y)


@exhibit(normal(384), normal(384), want=np.add)
def add_vectors(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(kernel, grid=3, in_specs=[tiles(128), tiles(128)], out_specs=tiles(128), out_shape=like(x))(
        x, y
    )


@exhibit(normal(20, 256), want=np_softmax)
def softmax_with_ragged_rows(x):
    def kernel(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max(-1, keepdims=True))
        o_ref[...] = e / e.sum(-1, keepdims=True)

    spec = rows(8, x.shape[1])
    return pl.pallas_call(kernel, grid=(pl.cdiv(x.shape[0], 8),), in_specs=[spec], out_specs=spec, out_shape=like(x))(x)


@exhibit(normal(16, 300), want=lambda x: x.sum(1, keepdims=True))
def row_sum_with_masked_edge(x):
    n = x.shape[1]

    def kernel(x_ref, o_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        columns = j * 128 + lax.broadcasted_iota(I32, x_ref.shape, 1)
        o_ref[...] += jnp.where(columns < n, x_ref[...], 0.0).sum(1, keepdims=True)

    return pl.pallas_call(
        kernel, grid=(2, pl.cdiv(n, 128)), in_specs=[tiles(8, 128)],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (i, 0)), out_shape=like(x, (16, 1)))(x)  # fmt: skip


@exhibit(normal(24, 512), want=lambda x: x.sum(1))
def row_sum(x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(axis=1)

    return pl.pallas_call(
        kernel, grid=(3, 4), in_specs=[tiles(8, 128)], out_specs=pl.BlockSpec((8,), lambda i, j: (i,)),
        out_shape=like(x, (24,)))(x)  # fmt: skip


@exhibit(normal(24), normal(256), want=np.multiply.outer)
def outer_product(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...][:, None] * y_ref[...][None, :]

    return pl.pallas_call(
        kernel, grid=(3, 2), in_specs=[pl.BlockSpec((8,), lambda i, j: (i,)), pl.BlockSpec((128,), lambda i, j: (j,))],
        out_specs=tiles(8, 128), out_shape=like(x, (24, 256)))(x, y)  # fmt: skip


@exhibit(normal(24, 256), normal(1, 256), want=lambda x, b: np.maximum(x + b, 0))
def add_bias_and_relu(x, bias):
    def kernel(x_ref, bias_ref, o_ref):
        o_ref[...] = jax.nn.relu(x_ref[...] + bias_ref[...])

    # bias is fetched once per column of blocks: the grid walks down the rows first
    slab = pl.BlockSpec((8, 128), lambda j, i: (i, j))
    return pl.pallas_call(
        kernel, grid=(2, 3), in_specs=[slab, pl.BlockSpec((1, 128), lambda j, i: (0, j))], out_specs=slab,
        out_shape=like(x))(x, bias)  # fmt: skip


@exhibit(normal(24, 384), want=lambda x: x.T)
def transpose(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].T

    return pl.pallas_call(
        kernel, grid=(3, 3), in_specs=[tiles(8, 128)], out_specs=pl.BlockSpec((128, 8), lambda i, j: (j, i)),
        out_shape=like(x, (384, 24)))(x)  # fmt: skip


def matmul(x, y, *, bm=16, bn=128, bk=32, out_dtype=None):
    acc_dtype = I32 if x.dtype == I8 else F32

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=acc_dtype)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        kernel, grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=like(x, (m, n), out_dtype), scratch_shapes=[pltpu.VMEM((bm, bn), acc_dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)  # fmt: skip


@exhibit(normal(48, 96), normal(96, 256), want=np.matmul)
def matmul_f32(x, y):
    return matmul(x, y)


@exhibit(normal(32, 64, dtype=BF16), normal(64, 256, dtype=BF16), want=np.matmul)
def matmul_bf16(x, y):
    return matmul(x, y)


@exhibit(
    integers(-90, 90, 32, 64, dtype=I8), integers(-90, 90, 64, 128, dtype=I8),
    want=lambda x, y: x.astype(np.int64) @ y.astype(np.int64),
)  # fmt: skip
def matmul_int8(x, y):
    return matmul(x, y, out_dtype=I32)


@exhibit(normal(2, 3, 16, 32), normal(2, 3, 256, 32), want=lambda q, k: q @ k.swapaxes(-1, -2))
def scores_per_batch_and_head(q, k):
    def kernel(q_ref, k_ref, o_ref):
        o_ref[...] = lax.dot_general(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=F32)

    b, h, m, d = q.shape
    return pl.pallas_call(
        kernel, grid=(b, h, m // 8, k.shape[2] // 128),
        in_specs=[
            pl.BlockSpec((None, None, 8, d), lambda b, h, i, j: (b, h, i, 0)),
            pl.BlockSpec((pl.squeezed, pl.squeezed, 128, d), lambda b, h, i, j: (b, h, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, 8, 128), lambda b, h, i, j: (b, h, i, j)),
        out_shape=like(q, (b, h, m, k.shape[2])))(q, k)  # fmt: skip


@exhibit(normal(32, 16), normal(32, 128), want=lambda x, y: x.T @ y)
def matmul_with_transposed_left_side(x, y):
    def kernel(x_ref, y_ref, o_ref):
        part = lax.dot_general(x_ref[...], y_ref[...], (((0,), (0,)), ((), ())), preferred_element_type=F32)
        o_ref[...] = part + jnp.where(pl.program_id(0) == 0, 0.0, o_ref[...])

    return pl.pallas_call(
        kernel, grid=(4,), in_specs=[rows(8, 16), rows(8, 128)],
        out_specs=pl.BlockSpec((16, 128), lambda i: (0, 0)), out_shape=like(x, (16, 128)))(x, y)  # fmt: skip


@exhibit(normal(8, 128), normal(8, 128), want=lambda x, y: np.einsum("ij,ij->i", x, y)[:, None])
def einsum_of_each_row(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.einsum("ij,ij->i", x_ref[...], y_ref[...], precision="highest")[:, None]

    return pl.pallas_call(kernel, out_shape=like(x, (8, 1)))(x, y)


@exhibit(normal(2, 8, 16), normal(2, 16, 128), want=lambda x, y: np.einsum("bij,bjk->bik", x, y))
def einsum_over_a_batched_block(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.einsum("bij,bjk->bik", x_ref[...], y_ref[...], preferred_element_type=F32)

    return pl.pallas_call(kernel, out_shape=like(x, (2, 8, 128)))(x, y)


# ---------------------------------------------------------------------------------------------------------------------
# Grids known only at run time, or empty
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(np.array(3, np.int32), normal(40, 128), want=lambda n, x: x.reshape(5, 8, 128)[:n].sum(0))
def sum_of_the_first_blocks(n, x):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    @jax.jit
    def call(n, x):
        return pl.pallas_call(
            kernel, grid=(n,), in_specs=[rows(8, 128)], out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=like(x, (8, 128)))(x)  # fmt: skip

    return call(n, x)


@exhibit(normal(16, 128), want=lambda x: x)
def no_step_at_all(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    spec = tiles(8, 128)
    return pl.pallas_call(
        kernel, grid=(2, 0), in_specs=[spec], out_specs=spec, out_shape=like(x),
        input_output_aliases={0: 0})(x)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Scalar prefetch
# ---------------------------------------------------------------------------------------------------------------------
def prefetch(kernel, scalars, arrays, **spec):
    """pallas_call with len(scalars) scalar-prefetch operands."""
    out_shape = spec.pop("out_shape")
    grid_spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(scalars), **spec)
    return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=out_shape)(*scalars, *arrays)


def gather_kernel(ids_ref, table_ref, o_ref):
    del ids_ref
    o_ref[...] = table_ref[...]


def gather(ids, table):
    block = (pl.squeezed, *table.shape[1:])
    return prefetch(
        gather_kernel, [ids], [table], grid=(ids.shape[0],),
        in_specs=[pl.BlockSpec(block, lambda i, ids_ref: (ids_ref[i], 0, 0))],
        out_specs=pl.BlockSpec(block, lambda i, ids_ref: (i, 0, 0)),
        out_shape=like(table, (ids.shape[0], *table.shape[1:])))  # fmt: skip


@exhibit(np.array([3, 0, 0, 5, 1], np.int32), normal(6, 8, 128), want=lambda ids, table: table[ids])
def gather_blocks(ids, table):
    return gather(ids, table)


@exhibit(np.array([19], np.int32), normal(32, 128), want=lambda n, x: np.where(np.arange(32)[:, None] < n, x, 0))
def keep_the_first_rows(n, x):
    def kernel(n_ref, x_ref, o_ref):
        index = pl.program_id(0) * 8 + lax.broadcasted_iota(I32, o_ref.shape, 0)
        o_ref[...] = jnp.where(index < n_ref[0], x_ref[...], 0.0)

    spec = pl.BlockSpec((8, 128), lambda i, n_ref: (i, 0))
    return prefetch(kernel, [n], [x], grid=(4,), in_specs=[spec], out_specs=spec, out_shape=like(x))


def np_block_sparse(columns, counts, x, y):
    out = np.zeros((x.shape[0], y.shape[1]))
    for i, s in np.ndindex(columns.shape):
        if s < counts[i]:
            block = slice(16 * columns[i, s], 16 * columns[i, s] + 16)
            out[8 * i : 8 * i + 8] += x[8 * i : 8 * i + 8, block] @ y[block]
    return out


@exhibit(
    np.array([[0, 2, 2], [1, 3, 2], [3, 3, 3]], np.int32), np.array([2, 3, 0], np.int32),
    normal(24, 64), normal(64, 128), want=np_block_sparse,
)  # fmt: skip
def block_sparse_matmul(columns, counts, x, y):
    def kernel(columns_ref, counts_ref, x_ref, y_ref, o_ref):
        i, s = pl.program_id(0), pl.program_id(1)

        @pl.when(s == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        @pl.when(s < counts_ref[i])
        def _():
            o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    return prefetch(
        kernel, [columns, counts], [x, y], grid=columns.shape,
        in_specs=[
            pl.BlockSpec((8, 16), lambda i, s, columns_ref, counts_ref: (i, columns_ref[i, s])),
            pl.BlockSpec((16, 128), lambda i, s, columns_ref, counts_ref: (columns_ref[i, s], 0)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda i, s, *_: (i, 0)), out_shape=like(x, (24, 128)))  # fmt: skip


@exhibit(
    np.array([0, 0, 1, 3], np.int32), normal(32, 16), normal(4, 16, 256),
    want=lambda g, x, w: np.concatenate([x[8 * i : 8 * i + 8] @ w[e] for i, e in enumerate(g)]),
)  # fmt: skip
def grouped_matmul(group_ids, x, w):
    def kernel(group_ids_ref, x_ref, w_ref, o_ref):
        del group_ids_ref
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

    return prefetch(
        kernel, [group_ids], [x, w], grid=(2, 4),
        in_specs=[
            pl.BlockSpec((8, 16), lambda j, i, g: (i, 0)),
            pl.BlockSpec((None, 16, 128), lambda j, i, g: (g[i], 0, j)),
        ],
        out_specs=pl.BlockSpec((8, 128), lambda j, i, g: (i, j)), out_shape=like(x, (32, 256)))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds of blocks: overlapping, buffered once or three times, in SMEM
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(normal(26, 128), want=lambda x: (x[:-2] + x[1:-1] + x[2:]) / 3)
def moving_average_over_windows(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[0:8] + x_ref[1:9] + x_ref[2:10]) / 3

    windows = pl.BlockSpec((pl.Element(10), pl.Element(128)), lambda i: (8 * i, 0))
    return pl.pallas_call(
        kernel, grid=(3,), in_specs=[windows], out_specs=rows(8, 128), out_shape=like(x, (24, 128)))(x)  # fmt: skip


@exhibit(normal(24, 256), want=lambda x: x - np.roll(x, 1, 0) * (np.arange(24) > 0)[:, None])
def difference_with_padded_windows(x):
    def kernel(x_ref, o_ref):
        # row 0 of window 0 is padding: whatever it holds must not be used
        first = (pl.program_id(0) == 0) & (lax.broadcasted_iota(I32, o_ref.shape, 0) == 0)
        o_ref[...] = x_ref[1:9] - jnp.where(first, 0.0, x_ref[0:8])

    windows = pl.BlockSpec((pl.Element(9, padding=(1, 0)), pl.Element(128)), lambda i, j: (8 * i, 128 * j))
    return pl.pallas_call(
        kernel, grid=(3, 2), in_specs=[windows], out_specs=tiles(8, 128), out_shape=like(x))(x)  # fmt: skip


@exhibit(normal(32, 64), normal(64, 128), want=np.matmul)
def matmul_with_chosen_buffering(x, w):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

    specs = [
        pl.BlockSpec((8, 64), lambda i: (i, 0), pipeline_mode=pl.Buffered(3)),
        pl.BlockSpec((64, 128), lambda i: (0, 0), pipeline_mode=pl.Buffered(1)),
    ]
    return pl.pallas_call(
        kernel, grid=(4,), in_specs=specs, out_specs=rows(8, 128), out_shape=like(x, (32, 128)))(x, w)  # fmt: skip


@exhibit(normal(3, 4), normal(24, 128), want=lambda c, x: sum(np.repeat(c[:, [p]], 8, 0) * x**p for p in range(4)))
def polynomial_with_coefficients_in_smem(c, x):
    def kernel(c_ref, x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = c_ref[0, 0] + x * (c_ref[0, 1] + x * (c_ref[0, 2] + x * c_ref[0, 3]))

    coefficients = pl.BlockSpec((1, 4), lambda i: (i, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel, grid=(3,), in_specs=[coefficients, rows(8, 128)], out_specs=rows(8, 128),
        out_shape=like(x))(c, x)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# State that lives from step to step
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(normal(8, 384), want=lambda x: x.cumsum(1))
def running_sum_with_carry(x):
    def kernel(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        o_ref[...] = jnp.cumsum(x_ref[...], axis=1) + carry_ref[...]
        carry_ref[...] += x_ref[...].sum(1, keepdims=True)

    spec = pl.BlockSpec((8, 128), lambda j: (0, j))
    return pl.pallas_call(
        kernel, grid=(3,), in_specs=[spec], out_specs=spec, out_shape=like(x),
        scratch_shapes=[pltpu.VMEM((8, 1), F32)])(x)  # fmt: skip


@exhibit(normal(24, 128), want=lambda x: np.array([[(x > 0).sum()]]))
def count_positives_in_smem(x):
    def kernel(x_ref, o_ref, count_ref):
        i = pl.program_id(0)

        @pl.when(i == 0)
        def _():
            count_ref[0] = 0

        count_ref[0] = count_ref[0] + jnp.sum((x_ref[...] > 0).astype(I32))
        o_ref[0, 0] = count_ref[0]

    one = pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        kernel, grid=(3,), in_specs=[rows(8, 128)], out_specs=one, out_shape=like(x, (1, 1), I32),
        scratch_shapes=[pltpu.SMEM((1,), I32)])(x)  # fmt: skip


def np_attention(q, k, v):
    return np_softmax(q @ k.T / np.sqrt(q.shape[1])) @ v


@exhibit(normal(32, 16), normal(48, 16), normal(48, 16), want=np_attention)
def online_softmax_attention(q, k, v):
    (m, d), n, bq, bkv = q.shape, k.shape[0], 16, 16

    def kernel(q_ref, k_ref, v_ref, o_ref, max_ref, sum_ref, acc_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=F32) * d**-0.5  # (bq, bkv)
        new_max = jnp.maximum(max_ref[...], s.max(-1, keepdims=True))
        p, shrink = jnp.exp(s - new_max), jnp.exp(max_ref[...] - new_max)
        sum_ref[...] = shrink * sum_ref[...] + p.sum(-1, keepdims=True)
        acc_ref[...] = shrink * acc_ref[...] + jnp.dot(p, v_ref[...], preferred_element_type=F32)
        max_ref[...] = new_max

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...] / sum_ref[...]

    keys = pl.BlockSpec((bkv, d), lambda i, j: (j, 0))
    queries = pl.BlockSpec((bq, d), lambda i, j: (i, 0))
    scratch = [pltpu.VMEM((bq, 1), F32), pltpu.VMEM((bq, 1), F32), pltpu.VMEM((bq, d), F32)]
    return pl.pallas_call(
        kernel, grid=(m // bq, n // bkv), in_specs=[queries, keys, keys], out_specs=queries, out_shape=like(q),
        scratch_shapes=scratch)(q, k, v)  # fmt: skip


@exhibit(normal(16, 256), normal(8, 128), want=lambda x, y: x + np.pad(y, ((8, 0), (128, 0))))
def add_into_one_block_in_place(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    corner = pl.BlockSpec((8, 128), lambda i: (1, 1))
    return pl.pallas_call(
        kernel, grid=(1,), in_specs=[corner, pl.BlockSpec((8, 128), lambda i: (0, 0))], out_specs=corner,
        out_shape=like(x), input_output_aliases={0: 0})(x, y)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Control flow and indexing inside the kernel
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(np.abs(normal(16, 128)) + 1, want=np.sqrt)
def square_root_by_newton(x):
    def kernel(x_ref, o_ref):
        x = x_ref[...]

        def far_off(guess):
            return jnp.max(jnp.abs(guess * guess - x) / x) > 1e-5

        o_ref[...] = lax.while_loop(far_off, lambda guess: 0.5 * (guess + x / guess), x)

    return by_rows(kernel, x)


@exhibit(normal(16, 128), want=lambda x: x / np.sqrt((x * x).sum(1, keepdims=True)))
def normalise_row_by_row(x):
    def kernel(x_ref, o_ref):
        def body(r, carry):
            row = x_ref[pl.ds(r, 1), :]
            o_ref[pl.ds(r, 1), :] = row * lax.rsqrt(jnp.sum(row * row))
            return carry

        lax.fori_loop(0, x_ref.shape[0], body, None)

    return by_rows(kernel, x)


@exhibit(normal(32, 128), want=lambda x: np.cumsum(x.reshape(2, 4, 4, 128), 1).reshape(32, 128))
def running_sum_of_views(x):
    def add(into_ref, from_ref):
        into_ref[...] += from_ref[...]

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

        @pl.loop(1, 4)
        def _(g):
            add(o_ref.at[pl.ds(4 * g, 4)], o_ref.at[pl.ds(4 * g - 4, 4), :])

    return by_rows(kernel, x, bm=16)


@exhibit(normal(32, 128), want=lambda x: np.concatenate([np.exp(x[:8]), -x[8:16], x[16:24] ** 2, 0 * x[24:]]))
def a_function_per_block(x):
    def kernel(x_ref, o_ref):
        branches = [jnp.exp, jnp.negative, jnp.square]
        i = pl.program_id(0)
        value = lax.switch(jnp.minimum(i, 2), branches, x_ref[...])
        o_ref[...] = lax.cond(i == 3, jnp.zeros_like, lambda v: v, value)

    return by_rows(kernel, x)


@exhibit(normal(16, 128), want=lambda x: np.stack([x[0::2], x[1::2]]))
def deinterleave_with_a_stride(x):
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[pl.ds(0, 8, stride=2), :]
        o_ref[1] = x_ref[pl.ds(1, 8, 2), :]

    return pl.pallas_call(kernel, out_shape=like(x, (2, 8, 128)))(x)


@exhibit(np.array([5, 0, 0, 7, 2], np.int32), normal(8, 128), want=lambda ids, table: table[ids])
def gather_rows_in_the_kernel(ids, table):
    def kernel(ids_ref, table_ref, o_ref):
        for r in range(o_ref.shape[0]):
            o_ref[r] = table_ref[ids_ref[r]]

    specs = [SMEM, pl.BlockSpec(memory_space=pltpu.VMEM)]
    return pl.pallas_call(kernel, in_specs=specs, out_shape=like(table, (5, 128)))(ids, table)


@exhibit(integers(0, 8, 8, 128), normal(8, 128), want=lambda ids, x: np.take_along_axis(x, ids, 0))
def take_along_the_rows(ids, x):
    def kernel(ids_ref, x_ref, o_ref):
        o_ref[...] = jnp.take_along_axis(x_ref[...], ids_ref[...], axis=0)

    return pl.pallas_call(kernel, out_shape=like(x))(ids, x)


@exhibit(normal(8, 256), want=lambda x: x + np.roll(x, 3, 1) + np.roll(x, -1, 0))
def roll_both_ways(x):
    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x + pltpu.roll(x, 3, 1) + pltpu.roll(x, x.shape[0] - 1, 0)

    return pl.pallas_call(kernel, out_shape=like(x))(x)


@exhibit(normal(16, 384), want=lambda x: (x.min(1), x.max(1), x.argmax(1)))
def extremes_of_each_row(x):
    def kernel(x_ref, low_ref, high_ref, where_ref):
        x = x_ref[...]
        low_ref[...], high_ref[...] = x.min(1), x.max(1)
        where_ref[...] = jnp.argmax(x, axis=1).astype(I32)

    per_row = pl.BlockSpec((8,), lambda i: (i,))
    return pl.pallas_call(
        kernel, grid=(2,), in_specs=[rows(8, 384)], out_specs=[per_row] * 3,
        out_shape=[like(x, (16,)), like(x, (16,)), like(x, (16,), I32)])(x)  # fmt: skip


@exhibit(normal(16, 256), want=lambda x: (x > 0.5, np.floor(4 * x).astype(int) % 3, np.float64(x)))
def bool_int_and_bf16_outputs(x):
    def kernel(x_ref, big_ref, bucket_ref, narrow_ref):
        x = x_ref[...]
        big_ref[...] = x > 0.5
        bucket_ref[...] = jnp.floor(4 * x).astype(I32) % 3
        narrow_ref[...] = x.astype(narrow_ref.dtype)

    return pl.pallas_call(
        kernel, grid=(2, 2), in_specs=[tiles(8, 128)], out_specs=(tiles(8, 128),) * 3,
        out_shape=(like(x, dtype=jnp.bool_), like(x, dtype=I32), like(x, dtype=BF16)))(x)  # fmt: skip


@exhibit(
    integers(0, 2, 16, 128).astype(bool), integers(-99, 99, 16, 128, dtype=I8), integers(1, 9, 16, 128),
    want=lambda mask, x, y: np.where(mask, x // y, (4 * x.astype(int)) ^ y),
)  # fmt: skip
def integer_arithmetic_under_a_mask(mask, x, y):
    def kernel(mask_ref, x_ref, y_ref, o_ref):
        x, y = x_ref[...].astype(I32), y_ref[...]
        o_ref[...] = jnp.where(mask_ref[...], x // y, (x << 2) ^ y)

    return by_rows(kernel, mask, x, y)


@exhibit(normal(8, 128), want=lambda x: sum(x**p / (p + 1) for p in range(5)))
def scan_in_the_kernel(x):
    def kernel(x_ref, o_ref):
        def body(carry, divisor):
            power, total = carry
            return (power * x_ref[...], total + power / divisor), None

        start = (jnp.ones_like(x_ref[...]), jnp.zeros_like(x_ref[...]))
        o_ref[...] = lax.scan(body, start, lax.iota(I32, 5) + 1)[0][1]

    return pl.pallas_call(kernel, out_shape=like(x))(x)


@exhibit(normal(8, 256), want=lambda x: x / (1 + np.exp(-x)) + np.tanh(x) + np.log1p(np.exp(x)))
def library_functions_in_the_kernel(x):
    @jax.jit
    def gate(v):
        return v * jax.nn.sigmoid(v)

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = gate(x) + jnp.tanh(x) + jax.nn.softplus(x)

    return pl.pallas_call(kernel, grid=(2,), in_specs=[pl.BlockSpec((8, 128), lambda j: (0, j))],
                          out_specs=pl.BlockSpec((8, 128), lambda j: (0, j)), out_shape=like(x))(x)  # fmt: skip


@exhibit(normal(4, 8, 16), want=lambda x: np.concatenate([x.reshape(32, 16), np.zeros((32, 16))], 1).T)
def reshape_and_concatenate(x):
    def kernel(x_ref, o_ref):
        flat = x_ref[...].reshape(32, 16)
        o_ref[...] = jnp.concatenate([flat, jnp.zeros_like(flat)], axis=1).swapaxes(0, 1)

    return pl.pallas_call(kernel, out_shape=like(x, (32, 32)))(x)


@exhibit(normal(16, 256), want=lambda x: (x.astype(F32).view(np.int32), x.astype(np.dtype(BF16))))
def bits_taken_apart_and_put_together(x):
    def kernel(x_ref, bits_ref, narrow_ref):
        bits_ref[...] = pltpu.bitcast(x_ref[...], I32)
        pairs = pltpu.bitcast(x_ref[...].astype(BF16), I32)  # (4, 128)
        narrow_ref[...] = pltpu.bitcast(pairs, BF16)

    return pl.pallas_call(
        kernel, grid=(2, 2), in_specs=[tiles(8, 128)], out_specs=(tiles(8, 128),) * 2,
        out_shape=(like(x, dtype=I32), like(x, dtype=BF16)))(x)  # fmt: skip


@exhibit(normal(16, 256), want=lambda x: x + np.add.outer(np.repeat([0, 10], 8), np.repeat([0, 1], 128)))
def program_id_in_nested_functions(x):
    def tag():
        def digit(axis, weight):
            return pl.program_id(axis) * weight

        return digit(0, 10) + digit(1, 1)

    def kernel(x_ref, o_ref):
        @pl.when(pl.num_programs(1) == 2)
        def _():
            o_ref[...] = x_ref[...] + tag().astype(F32)

    return pl.pallas_call(
        kernel, grid=(2, 2), in_specs=[tiles(8, 128)], out_specs=tiles(8, 128), out_shape=like(x))(x)  # fmt: skip


@exhibit(normal(16, 128), want=lambda x: x + 1)
def print_from_the_kernel(x):
    def kernel(x_ref, o_ref):
        pl.debug_print("first element {}", x_ref[0, 0])
        o_ref[...] = x_ref[...] + 1

    return by_rows(kernel, x)


@exhibit(normal(16, 128), want=lambda x: np.maximum(x, 0))
def masked_store(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        pltpu.store(o_ref, x_ref[...], mask=x_ref[...] > 0)

    return by_rows(kernel, x)


# ---------------------------------------------------------------------------------------------------------------------
# Transformations and control flow around the call
# ---------------------------------------------------------------------------------------------------------------------
def double_and_add(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = 2 * x_ref[...] + y_ref[...]

    return by_rows(kernel, x, y)


@exhibit(normal(24, 128), normal(24, 128), want=lambda x, y: 2 * (2 * x + y) + x)
def two_calls_under_jit(x, y):
    return jax.jit(lambda x, y: double_and_add(jax.jit(double_and_add)(x, y), x))(x, y)


@exhibit(normal(3, 16, 128), normal(3, 16, 128), want=lambda x, y: 2 * x + y)
def vmapped(x, y):
    return jax.vmap(double_and_add)(x, y)


@exhibit(normal(16, 128), normal(2, 3, 16, 128), want=lambda x, y: 2 * x + y)
def vmapped_twice_over_one_operand(x, y):
    over_y = jax.vmap(double_and_add, in_axes=(None, 0))
    return jax.vmap(over_y, in_axes=(None, 0))(x, y)


@exhibit(
    np.array([[3, 0, 0], [1, 2, 3]], np.int32), normal(2, 4, 8, 128),
    want=lambda ids, table: np.stack([t[i] for i, t in zip(ids, table, strict=True)]),
)  # fmt: skip
def vmapped_gather(ids, table):
    return jax.vmap(gather)(ids, table)


@exhibit(normal(16, 128), normal(4, 16, 128), want=lambda x, ys: (16 * x + 8 * ys[0] + 4 * ys[1] + 2 * ys[2] + ys[3],
         2 * x + ys[0]))  # fmt: skip
def scan_around_the_call(x, ys):
    def body(x, y):
        new = double_and_add(x, y)
        return new, new[:8]

    last, heads = lax.scan(body, x, ys)
    return last, jnp.concatenate([heads[0], double_and_add(x, ys[0])[8:]])


@exhibit(np.abs(normal(8, 128)), want=lambda x: 4 * x if x.max() < 3 else -x)
def loop_and_branch_around_the_call(x):
    zero = jnp.zeros_like(x)
    x = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, double_and_add(s[1], zero)), (0, x))[1]
    return lax.cond(x.max() < 12, lambda v: v, lambda v: double_and_add(-v / 4, 3 * v / 4 - v / 2), x)


@jax.custom_vjp
def gate(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * jax.nn.sigmoid(x_ref[...])

    return by_rows(kernel, x)


def gate_backward(x, g):
    def kernel(x_ref, g_ref, o_ref):
        s = jax.nn.sigmoid(x_ref[...])
        o_ref[...] = g_ref[...] * s * (1 + x_ref[...] * (1 - s))

    return (by_rows(kernel, x, g),)


gate.defvjp(lambda x: (gate(x), x), gate_backward)


def np_gate_and_gradient(x, w):
    s = 1 / (1 + np.exp(-x))
    return (w * x * s).sum(), w * s * (1 + x * (1 - s))


@exhibit(normal(24, 128), normal(24, 128), want=np_gate_and_gradient)
def forward_and_backward(x, w):
    return jax.value_and_grad(lambda x: (w * gate(x)).sum())(x)


@exhibit(normal(16, 128), normal(16, 128), want=lambda x, y: 4 * x + 3 * y)
def rematerialised(x, y):
    return jax.checkpoint(lambda x, y: double_and_add(double_and_add(x, y), y))(x, y)


@exhibit(
    {"w": normal(8, 128), "b": normal(8, 128)}, want=lambda p: {"sum": p["w"] + p["b"], "product": p["w"] * p["b"]}
)
def trees_in_and_out(params):
    def kernel(p_ref, o_ref):
        o_ref["sum"][...] = p_ref["w"][...] + p_ref["b"][...]
        o_ref["product"][...] = p_ref["w"][...] * p_ref["b"][...]

    shape = {"sum": like(params["w"]), "product": like(params["w"])}
    return pl.pallas_call(kernel, out_shape=shape)(params)


# ---------------------------------------------------------------------------------------------------------------------
# Copies by hand
# ---------------------------------------------------------------------------------------------------------------------
@exhibit(normal(16, 256), want=lambda x: np.concatenate([x[8:], 2 * x[:8]]))
def swap_halves_by_copies(x):
    def kernel(x_hbm, o_hbm, buffer, sem):
        fetch = pltpu.make_async_copy(x_hbm.at[pl.ds(0, 8)], buffer, sem)
        fetch.start()
        fetch.wait()
        buffer[...] = 2 * buffer[...]
        back = pltpu.make_async_copy(buffer, o_hbm.at[pl.ds(8, 8)], sem)
        back.start()
        back.wait()
        pltpu.sync_copy(x_hbm.at[pl.ds(8, 8)], o_hbm.at[pl.ds(0, 8)])

    scratch = [pltpu.VMEM((8, 256), F32), pltpu.SemaphoreType.DMA]
    return pl.pallas_call(
        kernel, in_specs=[HBM], out_specs=HBM, out_shape=like(x), scratch_shapes=scratch)(x)  # fmt: skip


@exhibit(normal(40, 128), want=lambda x: x.reshape(5, 8, 128).sum(0))
def sum_with_double_buffering(x):
    chunks = x.shape[0] // 8

    def kernel(x_hbm, o_ref, buffers, sems):
        def fetch(c):
            slot = c % 2
            return pltpu.make_async_copy(x_hbm.at[pl.ds(8 * c, 8), :], buffers.at[slot], sems.at[slot])

        fetch(0).start()
        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.loop(0, chunks)
        def _(c):
            @pl.when(c + 1 < chunks)
            def _():
                fetch(c + 1).start()

            fetch(c).wait()
            o_ref[...] += buffers[c % 2]

    scratch = [pltpu.VMEM((2, 8, 128), F32), pltpu.SemaphoreType.DMA((2,))]
    return pl.pallas_call(
        kernel, in_specs=[HBM], out_shape=like(x, (8, 128)), scratch_shapes=scratch)(x)  # fmt: skip


@exhibit(normal(24, 128), want=lambda x: x[::-1])
def reverse_rows_with_scoped_memory(x):
    def kernel(x_hbm, o_ref):
        def body(buffer, sem):
            start = x_hbm.shape[0] - 8 - 8 * pl.program_id(0)
            pltpu.async_copy(x_hbm.at[pl.ds(start, 8)], buffer, sem).wait()
            for r in range(8):
                o_ref[r] = buffer[7 - r]

        pl.run_scoped(body, pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA)

    return pl.pallas_call(kernel, grid=(3,), in_specs=[HBM], out_specs=rows(8, 128), out_shape=like(x))(x)


@exhibit(normal(8, 128), want=lambda x: 3 * x)
def signal_and_wait(x):
    def kernel(x_ref, o_ref, sem):
        pl.semaphore_signal(sem, 2)
        o_ref[...] = 3 * x_ref[...]
        pl.semaphore_wait(sem, 1)
        pl.semaphore_wait(sem, 1)

    return pl.pallas_call(kernel, out_shape=like(x), scratch_shapes=[pltpu.SemaphoreType.REGULAR])(x)


@exhibit(normal(24, 256), want=lambda x: x.sum(1, keepdims=True))
def inner_pipeline_with_accumulation(x):
    def body(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(1, keepdims=True)

    def kernel(x_hbm, o_hbm):
        out_spec = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
        pltpu.emit_pipeline(body, grid=(3, 2), in_specs=[tiles(8, 128)], out_specs=[out_spec])(x_hbm, o_hbm)

    return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=like(x, (24, 1)))(x)


@exhibit(normal(16, 256), normal(256, 128), want=np.matmul)
def inner_pipeline_with_scratch(x, y):
    def body(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

        @pl.when(pl.program_id(1) == 1)
        def _():
            o_ref[...] = acc_ref[...]

    def kernel(x_hbm, y_hbm, o_hbm, acc_ref):
        pipeline = pltpu.emit_pipeline(
            functools.partial(body, acc_ref=acc_ref), grid=(2, 2),
            in_specs=[tiles(8, 128), pl.BlockSpec((128, 128), lambda i, k: (k, 0))],
            out_specs=[pl.BlockSpec((8, 128), lambda i, k: (i, 0))])  # fmt: skip
        pipeline(x_hbm, y_hbm, o_hbm)

    return pl.pallas_call(
        kernel, in_specs=[HBM, HBM], out_specs=HBM, out_shape=like(x, (16, 128)),
        scratch_shapes=[pltpu.VMEM((8, 128), F32)])(x, y)  # fmt: skip


@exhibit(normal(16, 128), want=lambda x: x + 1)
def kernel_form_on_a_core(x):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)

    @functools.partial(pl.kernel, out_type=like(x), mesh=mesh, scratch_types=[pltpu.VMEM(x.shape, x.dtype)])
    def kernel(x_hbm, o_hbm, buffer):
        pltpu.sync_copy(x_hbm, buffer)
        buffer[...] = buffer[...] + 1
        pltpu.sync_copy(buffer, o_hbm)

    return kernel(x)


@exhibit(112 * np.arange(8 * 128, dtype=np.int32).reshape(8, 128), want=lambda x: np.ceil(x * F32(1 / 112)))
def a_number_in_the_program_is_rounded_before_it_is_used(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.ceil(x_ref[...] * (1 / 112))

    return pl.pallas_call(kernel, out_shape=like(x, dtype=F32))(x)
