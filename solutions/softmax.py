"""The answers to puzzles/softmax.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=1, keepdims=True))
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


# Puzzle 2
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    @pl.when(sweep == 0)
    def _():
        m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))

    @pl.when(sweep == 1)
    def _():
        l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# Puzzle 3
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# Puzzle 4
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    @pl.when(sweep == 0)
    def _():
        x = x_ref[...]
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x_ref[...] - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# Puzzle 5
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        start_statistics(m_ref, l_ref)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    update_statistics(m_ref, l_ref, x)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


def cross_entropy(x, labels, *, bm=8, bn=128):
    M, V = x.shape
    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        cross_entropy_kernel,
        grid=(M // bm, V // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), column],
        out_specs=column,
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
    )(x, labels)


# Puzzle 6
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# Puzzle 7
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# Puzzle 8
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)

    g = g_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd_ref[...]
    dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    along = (h * n).mean(axis=1, keepdims=True)
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# Puzzle 9
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def add_rms_norm(x, r, gamma, *, bm=16):
    M, N = x.shape
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((M, N), x.dtype)
    return pl.pallas_call(
        add_rms_norm_kernel,
        grid=(M // bm,),
        in_specs=[block, block, pl.BlockSpec((1, N), lambda i: (0, 0))],
        out_specs=[block, block],
        out_shape=[shape, shape],
    )(x, r, gamma)


# Puzzle 10
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        start_statistics(m_ref, l_ref)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    update_statistics(m_ref, l_ref, x)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])
