"""Wrong answers to puzzles/softmax.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% softmax/1: no maximum is subtracted
# first: overflows
# first: Subtract the maximum
# says: e = jnp.exp(x_ref[...])
def row_softmax_kernel(x_ref, o_ref):
    e = jnp.exp(x_ref[...])
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


# %% softmax/1: the maximum of the whole block
# first: 0 / 0 is NaN
# first: each row's own maximum
# says: variant
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max())
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


# %% softmax/1: the mean is subtracted
# first: overflows
# says: maximum
# says: variant
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.mean(axis=1, keepdims=True))
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


# %% softmax/1: down the columns instead of along the rows
# first: wrong axis
# first: axis=1 goes along a row
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=0, keepdims=True))
    o_ref[...] = e / e.sum(axis=0, keepdims=True)


# %% softmax/1: not divided by the sum
# first: each row has a factor of its own
# first: its sum
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jnp.exp(x - x.max(axis=1, keepdims=True))


# %% softmax/1: true for the notebook's example alone
# first: 0 / 0 is NaN
# says: variant 1
def row_softmax_kernel(x_ref, o_ref):
    e = jnp.exp(x_ref[...] - 100)
    o_ref[...] = e / e.sum(axis=1, keepdims=True)


# %% softmax/1: somebody else's softmax
# first: softmax does the work for you
# says: jax.nn.softmax(x_ref[...], axis=1)
def row_softmax_kernel(x_ref, o_ref):
    o_ref[...] = jax.nn.softmax(x_ref[...], axis=1)


# %% softmax/1: a reduction that loses its dimension
# first: keepdims=True
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(axis=1))
    o_ref[...] = e / e.sum(axis=1)


# %% softmax/2: statistics of the last block only
# first: overwritten
# first: only the last
# first: steps 0-4
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when(sweep == 0)
    def _():
        m_ref[...] = x_ref[...].max(axis=1, keepdims=True)

    @pl.when(sweep == 1)
    def _():
        l_ref[...] = jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/2: the maximum of the last block only
# first: m_ref
# first: overwritten
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        l_ref[...] = jnp.zeros(l_ref.shape)

    @pl.when(sweep == 0)
    def _():
        m_ref[...] = x_ref[...].max(axis=1, keepdims=True)

    @pl.when(sweep == 1)
    def _():
        l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/2: the maximum starts from zero
# first: starts from 0
# first: -inf
# says: variant 1
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape)
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


# %% softmax/2: the buffers are set at the first row block only
# first: m_ref
# first: step 10
# says: only once
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    i, sweep, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when((i == 0) & (sweep == 0) & (j == 0))
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


# %% softmax/2: set again in the second sweep
# first: step 5
# first: m_ref is set to its starting value again
# first: steps 0-4
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
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


# %% softmax/2: no maximum until the end
# first: 0 / 0 is NaN
# first: own maximum before exp
# says: variant 1
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
        l_ref[...] += jnp.exp(x_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = jnp.exp(m_ref[...]) / l_ref[...]


# %% softmax/2: everything in both sweeps, without rescaling
# first: l_ref that nobody has written
# says: exponentials
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)

    m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
    l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: no rescaling
# first: l_ref adds up exponentials while the maximum in m_ref is still growing
# first: exp(old maximum - new maximum)
# first: step 1
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
    l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the maximum is stored first, and read again
# first: l_ref adds up exponentials while the maximum in m_ref is still growing
# first: step 1
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
    l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the old maximum is read when it is gone
# first: read after m_ref was overwritten
# first: Read the old maximum before
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
    m_ref[...] = m_new
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the running maximum starts from zero
# first: starts from 0
# first: m_ref
# first: -inf
# says: variant 1
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: rescaled the wrong way round
# first: above 0
# first: old maximum - new maximum
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_new - m_old) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: old and new terms are rescaled together
# first: l_ref adds up exponentials
# first: and only then add
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = (l_ref[...] + jnp.exp(x - m_new).sum(axis=1, keepdims=True)) * jnp.exp(m_old - m_new)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the maximum of the last block, not of all so far
# first: above 0
# first: all that has been read so far
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = x.max(axis=1, keepdims=True)
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: measured against the first block for ever
# first: above 0
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)
    x = x_ref[...]

    @pl.when(j == 0)
    def _():
        m_ref[...] = x.max(axis=1, keepdims=True)
        l_ref[...] = jnp.zeros(l_ref.shape)

    l_ref[...] += jnp.exp(x - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: a result at every step
# first: Right answer, but
# first: o_ref is stored at 5 steps
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    x = x_ref[...]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    o_ref[...] = 1 / l_ref[...]


# %% softmax/4: three sweeps
# first: Right answer, but
# first: 240 KiB
# first: 180 KiB
# says: x_ref: 45 moves
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
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

    @pl.when(sweep == 2)
    def _():
        o_ref[...] = jnp.exp(x_ref[...] - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 3, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep // 2 * j)


# %% softmax/4: the result follows j in both sweeps
# first: step 0
# first: garbage is written to HBM
# first: stay on one block
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
    return (i, j)


# %% softmax/4: the result never moves
# first: never visited
# says: index map
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
    return (i, 0)


# %% softmax/4: the sum is not rescaled
# first: l_ref adds up exponentials
# first: exp(old maximum - new maximum)
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    @pl.when(sweep == 0)
    def _():
        x = x_ref[...]
        m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
        l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x_ref[...] - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: not divided by the sum
# first: each row has a factor of its own
# not: Scratch keeps
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
        o_ref[...] = jnp.exp(x_ref[...] - m_ref[...])


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: every block is a row of its own
# first: each row has a factor of its own
# first: not that of the whole row
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
        x = x_ref[...]
        e = jnp.exp(x - x.max(axis=1, keepdims=True))
        o_ref[...] = e / e.sum(axis=1, keepdims=True)


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: the sweep is the last axis
# first: block
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
    return (M // bm, N // bn, 2)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: the buffers are set once for all
# first: m_ref
# first: step 10
# first: not only once
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when((pl.program_id(0) == 0) & (sweep == 0) & (j == 0))
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


# %% softmax/4: set again when the second sweep begins
# first: set to its starting value again
# first: step 5
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
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


# %% softmax/4: true for the notebook's example alone
# first: block
# says: variant 1
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
    return (3, 2, 5)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: the result rests on the last block, and then starts from the first
# first: garbage
# first: stay on one block
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
    return (i, jnp.where(sweep == 0, 4, j))


# %% softmax/5: columns counted from the start of the block
# first: counted from 0 in every block
# first: pl.program_id
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

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


# %% softmax/5: the score of the label is overwritten
# first: t_ref
# first: overwritten
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] = jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

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


# %% softmax/5: the sum is not rescaled
# first: l_ref adds up exponentials
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
    l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

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


# %% softmax/5: the logarithm of a probability
# first: log(0) is -inf
# first: a - log(b)
# says: variant 2
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = -jnp.log(jnp.exp(t_ref[...] - m_ref[...]) / l_ref[...])


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


# %% softmax/5: the sign
# first: -1 times
# first: A sign is wrong
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = (t_ref[...] - m_ref[...]) - jnp.log(l_ref[...])


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


# %% softmax/5: the maximum is forgotten
# first: m_ref
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - t_ref[...]


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


# %% softmax/5: indexed as in NumPy
# first: cannot gather
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    here = label_ref[...][:, 0] - j * bn
    mine = (here >= 0) & (here < bn)
    picked = x[jnp.arange(x.shape[0]), jnp.clip(here, 0, bn - 1)]
    t_ref[...] += jnp.where(mine, picked, 0)[:, None]
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

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


# %% softmax/5: every row gets the labels of the first block
# first: label_ref
# first: never read
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


def cross_entropy(x, labels, *, bm=8, bn=128):
    M, V = x.shape
    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        cross_entropy_kernel,
        grid=(M // bm, V // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), pl.BlockSpec((bm, 1), lambda i, j: (0, 0))],
        out_specs=column,
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
    )(x, labels)


# %% softmax/5: the probabilities are written after all
# first: Right answer, but
# first: 240.2 KiB
# first: 60.19 KiB
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x_ref[...], 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = -jnp.log(t_ref[...])


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
    )(wide_softmax(x, bm=bm, bn=bn), labels)


# %% softmax/6: the row term is missing
# first: multiple of the same row of y_ref
# first: missing
# says: dx_ref
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * g


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: the row term has the wrong sign
# first: multiple of the same row of y_ref
# first: wrong sign
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g + (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: the sum leaves y out
# first: multiple of the same row of y_ref
# first: wrong number
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - g.sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: only the diagonal
# first: wrong
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (1 - y) * g


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: the sum goes down the columns
# first: axis=0
# first: Along a row it is axis=1
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=0, keepdims=True))


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: the residual is x
# first: y_ref of softmax_grad_kernel holds the very array that x_ref of row_softmax_kernel was given
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    return row_softmax(x, bm=bm), x


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: no residuals
# first: two things, the result and the residuals
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    return row_softmax(x, bm=bm)


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: not a tuple
# first: a tuple with one gradient for each input
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return softmax_grad(residuals, g, bm=bm)


# %% softmax/6: the product is taken outside
# first: outside of the kernel
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = g - (g * y).sum(axis=1, keepdims=True)


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (residuals * softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: the forward pass runs twice
# first: Right answer, but
# first: 504 KiB
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))


def smooth_softmax_fwd(x, bm):
    return row_softmax(x, bm=bm), x


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(row_softmax(residuals, bm=bm), g, bm=bm),)


# %% softmax/6: jax differentiates inside of the kernel
# first: vjp does the work for you
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = jax.vjp(lambda z: jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True), jnp.log(y))[1](g)[0]


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/7: the variance is divided by N - 1
# first: rstd_ref
# first: the square root of 383 / 384
# first: N - 1
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).sum(axis=1, keepdims=True) / (x.shape[1] - 1) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: eps outside of the root
# first: added outside of the root
# says: variant 1
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = 1 / (jnp.sqrt((centred * centred).mean(axis=1, keepdims=True)) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: mean of squares minus square of mean
# first: Mean of squares minus square of mean
# first: Subtract the mean first
# says: variant
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) - mean * mean + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: no eps
# says: variant 1
# first: rstd_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True))
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: scale and shift are forgotten
# first: never reads gamma_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: mean and rstd have changed places
# first: mean_ref holds what belongs in rstd_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = rstd
    rstd_ref[...] = mean


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: the standard deviation is saved
# first: rstd_ref
# not: block (0, 0) of o_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = 1 / rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: down the columns
# first: axis=0
# says: Along a row it is axis=1
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=0, keepdims=True) + jnp.zeros((x.shape[0], 1))
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=0, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean[:, :1]
    rstd_ref[...] = jnp.broadcast_to(rstd[:, :1], rstd_ref.shape)


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: the residuals are forgotten
# first: never stores anything into mean_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: the residuals never move
# first: never visited
# says: mean_ref
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    column = pl.BlockSpec((bm, 1), lambda i: (0, 0))
    per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
    out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
    return out_specs, out_shape


# %% softmax/7: shapes in another order than specs
# first: shape
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
    out_shape = [per_row, per_row, jax.ShapeDtypeStruct((M, N), jnp.float32)]
    return out_specs, out_shape


# %% softmax/8: the sums are zeroed at every step
# first: dgamma_ref is reset at every step
# first: pl.program_id(0) == 0
# says: dbeta_ref is reset
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
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


# %% softmax/8: the sums are never zeroed
# first: nobody has written
# first: dgamma_ref
# first: pl.program_id(0) == 0
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):

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


# %% softmax/8: the sums of the last block only
# first: overwritten
# first: only the last
# says: dbeta_ref
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):

    g = g_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd_ref[...]
    dgamma_ref[...] = (g * n).sum(axis=0, keepdims=True)
    dbeta_ref[...] = g.sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    along = (h * n).mean(axis=1, keepdims=True)
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: the sums move with the rows
# first: out of bounds
# first: dgamma_ref
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
    total = pl.BlockSpec((1, N), lambda i: (i, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: the mean of h is left out
# first: each row is off by a constant of its own
# first: dx_ref
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
    dx_ref[...] = rstd_ref[...] * (h - n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: the stretching term is left out
# first: multiple of the same row of x_ref, and a constant
# first: dx_ref
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
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True))


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: the stretching term has the wrong sign
# first: multiple of the same row of x_ref, and a constant
# first: wrong sign
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
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) + n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: rstd is left out of dx
# first: each row has a factor of its own
# first: dx_ref
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
    dx_ref[...] = h - h.mean(axis=1, keepdims=True) - n * along


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: gamma is left out
# first: never reads gamma_ref
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)

    g = g_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd_ref[...]
    dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
    h = g
    along = (h * n).mean(axis=1, keepdims=True)
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: the mean is not subtracted for dgamma
# first: dgamma_ref
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)

    g = g_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd_ref[...]
    dgamma_ref[...] += (g * x_ref[...]).sum(axis=0, keepdims=True)
    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    along = (h * n).mean(axis=1, keepdims=True)
    dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/8: jax differentiates inside of the kernel
# first: vjp does the work for you
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
    dx_ref[...] = jax.vjp(lambda z: (z - z.mean(axis=1, keepdims=True)) * rstd_ref[...], x_ref[...])[1](h)[0]


def layer_norm_grad_out_specs(N, bm):
    total = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]


# %% softmax/9: the norm of x alone
# first: each row has a factor of its own
# first: o_ref
# says: variance
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((x_ref[...].astype(jnp.float32) ** 2).mean(axis=1, keepdims=True) + 1e-6)
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


# %% softmax/9: x is normalised, not the sum
# first: o_ref
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (x_ref[...].astype(jnp.float32) * rstd * gamma_ref[...]).astype(o_ref.dtype)


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


# %% softmax/9: everything in bfloat16
# first: 16-bit
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...] + r_ref[...]
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


# %% softmax/9: eps outside of the root
# first: each row has a factor of its own
# says: outside of the root
# says: variant 2
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = 1 / (jnp.sqrt((h * h).mean(axis=1, keepdims=True)) + 1e-6)
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


# %% softmax/9: no root
# first: each row has a factor of its own
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = 1 / ((h * h).mean(axis=1, keepdims=True) + 1e-6)
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


# %% softmax/9: the sum, not the mean of the squares
# first: times what is expected
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).sum(axis=1, keepdims=True) + 1e-6)
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


# %% softmax/9: the stream is not handed on
# first: never stores anything into h_ref
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
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


# %% softmax/9: the stream gets x
# first: h_ref
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = x_ref[...]
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


# %% softmax/9: the results in the other order
# first: changed places
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def add_rms_norm(x, r, gamma, *, bm=16):
    M, N = x.shape
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((M, N), x.dtype)
    h, result = pl.pallas_call(
        add_rms_norm_kernel,
        grid=(M // bm,),
        in_specs=[block, block, pl.BlockSpec((1, N), lambda i: (0, 0))],
        out_specs=[block, block],
        out_shape=[shape, shape],
    )(x, r, gamma)
    return [result, h]


# %% softmax/9: the sum is taken outside
# first: add is done outside of the kernel
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32)
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
    )(x + r, r, gamma)


# %% softmax/9: two calls
# first: rounded once too often
# first: What an earlier call has stored in 16 bits is rounded already
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def first_result_kernel(x_ref, r_ref, h_ref):
    h_ref[...] = (x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)).astype(h_ref.dtype)


def second_result_kernel(h_ref, gamma_ref, o_ref):
    h = h_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def add_rms_norm(x, r, gamma, *, bm=16):
    M, N = x.shape
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    columns = pl.BlockSpec((1, N), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct((M, N), x.dtype)
    grid = (M // bm,)
    h = pl.pallas_call(first_result_kernel, grid=grid, in_specs=[block, block], out_specs=block, out_shape=shape)(x, r)
    second = pl.pallas_call(
        second_result_kernel, grid=grid, in_specs=[block, columns], out_specs=block, out_shape=shape
    )
    return [h, second(h, gamma)]


# %% softmax/10: no mask
# first: lie beyond the edge
# first: step 3
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = x_ref[...].astype(jnp.float32)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: the padding is zero
# first: a mask has put 0
# first: Fill with -inf
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), 0)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: the padding is zero, and left out of the sum
# first: a mask has put 0
# first: that is the maximum
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), 0)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.where(cols < vocab, jnp.exp(x - m_new), 0).sum(
        axis=1, keepdims=True
    )
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: masked by multiplication
# first: lie beyond the edge
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = x_ref[...].astype(jnp.float32) * (cols < vocab)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: only the sum is masked
# first: lie beyond the edge
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = x_ref[...].astype(jnp.float32)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.where(cols < vocab, jnp.exp(x - m_new), 0).sum(
        axis=1, keepdims=True
    )
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: columns counted from the start of the block
# first: positions of real data, counted in the whole array
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    t_ref[...] += jnp.where(cols + j * bn == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: summed in bfloat16
# first: 16-bit
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).astype(jnp.bfloat16).sum(
        axis=1, keepdims=True
    )
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: a padding of -100
# first: a mask has put -100
# says: variant 1
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -100.0)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: everything below the vocabulary plus one
# first: lie beyond the edge
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols <= vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/3: the sum instead of one over it
# first: one divided by what is expected
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
        o_ref[...] = l_ref[...]


# %% softmax/5: picked with take_along_axis
# first: take_along_axis does the work for you
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    x = x_ref[...]
    bn = x.shape[1]
    here = label_ref[...] - j * bn
    picked = jnp.take_along_axis(x, jnp.clip(here, 0, bn - 1), axis=1)
    t_ref[...] += jnp.where((here >= 0) & (here < bn), picked, 0)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

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


# %% softmax/10: the maximum is left out of the loss
# first: What m_ref holds in the end is never read
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        t_ref[...] = jnp.zeros(t_ref.shape)

    bn = x_ref.shape[1]
    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/2: the maximum starts from -1000
# first: m_ref starts from -1000
# first: -inf
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -1000.0)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    @pl.when(sweep == 0)
    def _():
        m_ref[...] = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))

    @pl.when(sweep == 1)
    def _():
        l_ref[...] += jnp.exp(x - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/2: conditions joined by and
# first: join them with `&`
# not: jnp.where
def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when(sweep == 0 and j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    @pl.when(sweep == 0)
    def _():
        m_ref[...] = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))

    @pl.when(sweep == 1)
    def _():
        l_ref[...] += jnp.exp(x - m_ref[...]).sum(axis=1, keepdims=True)

    @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the quotient of the maxima
# first: A rescaling is an exponential
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)
    x = x_ref[...]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * m_old / m_new + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/3: the sum starts from -inf
# first: read from l_ref. A sum starts from 0
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    j = pl.program_id(1)
    x = x_ref[...]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.full(l_ref.shape, -jnp.inf)

    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]


# %% softmax/4: the maximum starts from -1000
# first: m_ref starts from -1000
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -1000.0)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    @pl.when(sweep == 0)
    def _():
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: the maximum starts from zero
# first: m_ref starts from 0
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    @pl.when(sweep == 0)
    def _():
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: the update runs on in the second sweep
# first: m_ref is complete after steps 0-4
# first: Guard the update
# not: starting value
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x - m_ref[...]) / l_ref[...]


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/4: not divided, in one line
# first: factor of its own
# not: adds nothing
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    x = x_ref[...]

    @pl.when((sweep == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)

    @pl.when(sweep == 0)
    def _():
        m_old = m_ref[...]
        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
        m_ref[...] = m_new

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = jnp.exp(x - m_ref[...])


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)


# %% softmax/5: the maximum starts from -1000
# first: m_ref starts from -1000
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)
    bn = x_ref.shape[1]
    x = x_ref[...]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -1000.0)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


def cross_entropy(x, labels, *, bm=8, bn=128):
    M, V = x.shape
    col = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        cross_entropy_kernel,
        grid=(M // bm, V // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), col],
        out_specs=col,
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
    )(x, labels)


# %% softmax/5: the maximum starts from zero
# first: m_ref starts from 0
def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    j = pl.program_id(1)
    bn = x_ref.shape[1]
    x = x_ref[...]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    cols = j * bn + jnp.arange(bn)[None, :]
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


def cross_entropy(x, labels, *, bm=8, bn=128):
    M, V = x.shape
    col = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        cross_entropy_kernel,
        grid=(M // bm, V // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), col],
        out_specs=col,
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
    )(x, labels)


# %% softmax/6: jvp inside of the kernel
# first: jvp does the work for you
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    f = lambda z: jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True)
    dx_ref[...] = jax.jvp(f, (jnp.log(jnp.maximum(y, 1e-37)),), (g,))[1]


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/6: g * y * (1 - y)
# first: a term is missing
# first: y_ref times one number of the whole row
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    y, g = y_ref[...], g_ref[...]
    dx_ref[...] = g * y * (1 - y)


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)


# %% softmax/7: no eps, variances near 1e-5
# first: small constant (eps)
# first: right where the variance is large
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    d = x - mean
    rstd = jax.lax.rsqrt((d * d).mean(axis=1, keepdims=True))
    o_ref[...] = d * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    col = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    s = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), col, col], [jax.ShapeDtypeStruct((M, N), jnp.float32), s, s]


# %% softmax/7: the lists of outputs in another order
# first: the order of out_specs and out_shape
# first: rstd_ref has that shape
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    d = x - mean
    rstd = jax.lax.rsqrt((d * d).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = d * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = mean
    rstd_ref[...] = rstd


def layer_norm_outputs(M, N, bm):
    col = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    s = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    return [col, col, pl.BlockSpec((bm, N), lambda i: (i, 0))], [s, s, jax.ShapeDtypeStruct((M, N), jnp.float32)]


# %% softmax/7: mean into rstd_ref, and rstd into mean_ref
# first: changed places
# not: Follow one element
def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    x = x_ref[...]
    mean = x.mean(axis=1, keepdims=True)
    d = x - mean
    rstd = jax.lax.rsqrt((d * d).mean(axis=1, keepdims=True) + 1e-5)
    o_ref[...] = d * rstd * gamma_ref[...] + beta_ref[...]
    mean_ref[...] = rstd
    rstd_ref[...] = mean


def layer_norm_outputs(M, N, bm):
    col = pl.BlockSpec((bm, 1), lambda i: (i, 0))
    s = jax.ShapeDtypeStruct((M, 1), jnp.float32)
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), col, col], [jax.ShapeDtypeStruct((M, N), jnp.float32), s, s]


# %% softmax/8: a mean down the columns
# first: goes down the columns (axis=0
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    rstd = rstd_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd
    g = g_ref[...]

    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape, dgamma_ref.dtype)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape, dbeta_ref.dtype)

    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
    dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    dx_ref[...] = rstd * (h - h.mean(axis=0, keepdims=True) - n * (h * n).mean(axis=1, keepdims=True))


def layer_norm_grad_out_specs(N, bm):
    s = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), s, s]


# %% softmax/8: x where n belongs
# first: dgamma_ref is made of x_ref and g_ref
# first: mean_ref and rstd_ref have no part in it
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    rstd = rstd_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd
    g = g_ref[...]

    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape, dgamma_ref.dtype)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape, dbeta_ref.dtype)

    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
    dgamma_ref[...] += (g * x_ref[...]).sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    dx_ref[...] = rstd * (h - h.mean(axis=1, keepdims=True) - n * (h * n).mean(axis=1, keepdims=True))


def layer_norm_grad_out_specs(N, bm):
    s = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), s, s]


# %% softmax/8: the gradient of beta gets gamma
# first: dbeta_ref is wrong
# first: Without the multiplication by gamma_ref, the result is right
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    rstd = rstd_ref[...]
    n = (x_ref[...] - mean_ref[...]) * rstd
    g = g_ref[...]

    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape, dgamma_ref.dtype)
        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape, dbeta_ref.dtype)

    dbeta_ref[...] += (g * gamma_ref[...]).sum(axis=0, keepdims=True)
    dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
    h = g * gamma_ref[...]
    dx_ref[...] = rstd * (h - h.mean(axis=1, keepdims=True) - n * (h * n).mean(axis=1, keepdims=True))


def layer_norm_grad_out_specs(N, bm):
    s = pl.BlockSpec((1, N), lambda i: (0, 0))
    return [pl.BlockSpec((bm, N), lambda i: (i, 0)), s, s]


# %% softmax/9: the sum is rounded before the norm
# first: rounded once too often
# first: A float32 value is cast to 16-bit bfloat16
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    h = h.astype(jnp.bfloat16).astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def add_rms_norm(x, r, gamma, *, bm=16):
    M, N = x.shape
    rows = pl.BlockSpec((bm, N), lambda i: (i, 0))
    s = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
    return pl.pallas_call(
        add_rms_norm_kernel,
        grid=(M // bm,),
        in_specs=[rows, rows, pl.BlockSpec((1, N), lambda i: (0, 0))],
        out_specs=[rows, rows],
        out_shape=[s, s],
    )(x, r, gamma)


# %% softmax/9: no eps
# first: small constant (eps)
def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True))
    h_ref[...] = h.astype(h_ref.dtype)
    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)


def add_rms_norm(x, r, gamma, *, bm=16):
    M, N = x.shape
    rows = pl.BlockSpec((bm, N), lambda i: (i, 0))
    s = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
    return pl.pallas_call(
        add_rms_norm_kernel,
        grid=(M // bm,),
        in_specs=[rows, rows, pl.BlockSpec((1, N), lambda i: (0, 0))],
        out_specs=[rows, rows],
        out_shape=[s, s],
    )(x, r, gamma)


# %% softmax/10: a padding of -40,000
# first: -40000 in the place of what is not real
# first: -inf
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -40_000.0)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: the maximum starts from -1000
# first: m_ref starts from -1000
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -1000.0)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: a right mask, and the exponential of what was read
# first: A mask is there
# first: what goes into exp
# not: Some of it passes
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
    m_old = m_ref[...]
    raw = x_ref[...].astype(jnp.float32)
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(raw - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: the mask is added
# first: The mask is added to it
# first: NaN plus anything
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = x_ref[...].astype(jnp.float32) + (cols >= vocab) * -1e30
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: a padding of +inf
# first: puts inf in its place
# not: Some of it passes
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), jnp.inf)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: a padding of NaN
# first: puts nan in its place
# first: NaN stays NaN
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), jnp.nan)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/10: not masked at all
# first: No mask by position
# not: Some of it passes
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    j = pl.program_id(1)
    bn = x_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, m_ref.dtype)
        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
        t_ref[...] = jnp.zeros(t_ref.shape, t_ref.dtype)

    cols = j * bn + jnp.arange(bn)[None, :]
    x = x_ref[...].astype(jnp.float32)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new
    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]


# %% softmax/1: divided by way of a logarithm
# first: rounding, not logic
def row_softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jnp.exp(x - jnp.logaddexp.reduce(x, axis=1, keepdims=True))


# %% softmax/1: the spec does it
# first: row_softmax_spec says what to compute
# not: follow one element
def row_softmax_kernel(x_ref, o_ref):
    o_ref[...] = row_softmax_spec(x_ref[...])


# %% softmax/6: the spec's own derivative
# first: says what to compute
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    dx_ref[...] = softmax_vjp_spec(jnp.log(y_ref[...] + 1e-30), g_ref[...])[1]


def smooth_softmax_fwd(x, bm):
    y = row_softmax(x, bm=bm)
    return y, y


def smooth_softmax_bwd(bm, residuals, g):
    return (softmax_grad(residuals, g, bm=bm),)
