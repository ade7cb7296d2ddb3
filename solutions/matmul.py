"""The answers to puzzles/matmul.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# Puzzle 2
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# Puzzle 3
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# Puzzle 4
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# Puzzle 5
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# Puzzle 6
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# Puzzle 7
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# Puzzle 7b
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    bm, bn = o_ref.shape

    def add_tile(k, acc):
        part = pl.ds(k * bk, bk)
        return acc + jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32)

    num_tiles = pl.cdiv((pl.program_id(1) + 1) * bm, bk)
    acc = jax.lax.fori_loop(0, num_tiles, add_tile, jnp.zeros((bm, bn), jnp.float32))
    o_ref[...] = acc.astype(o_ref.dtype)


# Puzzle 8
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# Puzzle 9
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = so_far(acc_ref) + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# Puzzle 10
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]


# Puzzle 11
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# Puzzle 12
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))
