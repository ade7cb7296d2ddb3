"""Wrong answers to puzzles/softmax.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% softmax/1: no maximum is subtracted
# row_softmax_kernel:
# -    x = x_ref[...]
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# +    e = jnp.exp(x_ref[...])

# %% softmax/1: the maximum of the whole block
# row_softmax_kernel: `(x - x.max(axis=1, keepdims=True))` -> `(x - x.max())`

# %% softmax/1: the mean is subtracted
# row_softmax_kernel: `= jnp.exp(x - x.max(axis=1, keepdims=True))` -> `= jnp.exp(x - x.mean(axis=1, keepdims=True))`

# %% softmax/1: down the columns instead of along the rows
# row_softmax_kernel: `x.max(axis=1, keepdims=True)` -> `x.max(axis=0, keepdims=True)`
# row_softmax_kernel: `e.sum(axis=1, keepdims=True)` -> `e.sum(axis=0, keepdims=True)`


# %% softmax/1: not divided by the sum
# row_softmax_kernel:
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# -    o_ref[...] = e / e.sum(axis=1, keepdims=True)
# +    o_ref[...] = jnp.exp(x - x.max(axis=1, keepdims=True))

# %% softmax/1: true for the notebook's example alone
# row_softmax_kernel:
# -    x = x_ref[...]
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# +    e = jnp.exp(x_ref[...] - 100)

# %% softmax/1: somebody else's softmax
# row_softmax_kernel:
# -    x = x_ref[...]
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# -    o_ref[...] = e / e.sum(axis=1, keepdims=True)
# +    o_ref[...] = jax.nn.softmax(x_ref[...], axis=1)

# %% softmax/1: a reduction that loses its dimension
# row_softmax_kernel: `(x - x.max(axis=1, keepdims=True))` -> `(x - x.max(axis=1))`
# row_softmax_kernel: `sum(axis=1, keepdims=True)` -> `sum(axis=1)`

# %% softmax/2: statistics of the last block only
# confidence_kernel:
# -    @pl.when((sweep == 0) & (j == 0))
# -    def _():
# -        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
# -        l_ref[...] = jnp.zeros(l_ref.shape)
# -
# confidence_kernel: `= jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))` -> `= x_ref[...].max(axis=1, keepdims=True)`
# confidence_kernel: `+` -> ``

# %% softmax/2: the maximum of the last block only
# confidence_kernel:
# -        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
# confidence_kernel: `= jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))` -> `= x_ref[...].max(axis=1, keepdims=True)`

# %% softmax/2: the maximum starts from zero
# confidence_kernel: `jnp.full(m_ref.shape, -jnp.inf)` -> `jnp.zeros(m_ref.shape)`

# %% softmax/2: the buffers are set at the first row block only
# confidence_kernel: `sweep, j =` -> `i, sweep, j = pl.program_id(0),`
# confidence_kernel:
# -    @pl.when((sweep == 0) & (j == 0))
# +    @pl.when((i == 0) & (sweep == 0) & (j == 0))

# %% softmax/2: set again in the second sweep
# confidence_kernel: `(sweep == 0) & (j == 0)` -> `j == 0`

# %% softmax/2: no maximum until the end
# confidence_kernel: `[...] - m_ref[...]).sum(axis` -> `[...]).sum(axis`
# confidence_kernel: `= 1 /` -> `= jnp.exp(m_ref[...]) /`


# %% softmax/2: everything in both sweeps, without rescaling
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
# online_kernel:
# -    m_old = m_ref[...]
# -    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
# +    l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)

# %% softmax/3: the maximum is stored first, and read again
# online_kernel:
# -    x = x_ref[...]
# -    m_old = m_ref[...]
# -    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# -    m_ref[...] = m_new
# +    m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
# +    l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)

# %% softmax/3: the old maximum is read when it is gone
# online_kernel:
# -    m_old = m_ref[...]
# -    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
# online_kernel:
# -    m_ref[...] = m_new
# +    m_ref[...] = m_new
# +    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)

# %% softmax/3: the running maximum starts from zero
# online_kernel: `jnp.full(m_ref.shape, -jnp.inf)` -> `jnp.zeros(m_ref.shape)`

# %% softmax/3: rescaled the wrong way round
# online_kernel: `m_old - m_new` -> `m_new - m_old`


# %% softmax/3: old and new terms are rescaled together
# online_kernel: `l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True` -> `(l_ref[...] + jnp.exp(x - m_new).sum(axis=1, keepdims=True)) * jnp.exp(m_old - m_new`

# %% softmax/3: the maximum of the last block, not of all so far
# online_kernel: `= jnp.maximum(m_old, x.max(axis=1, keepdims=True))` -> `= x.max(axis=1, keepdims=True)`


# %% softmax/3: measured against the first block for ever
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
# elsewhere: it is right, and one sweep longer than need be: no line of it is wrong by itself
# wide_softmax_kernel:
# -        x = x_ref[...]
# -        m_old = m_ref[...]
# -        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# -        m_ref[...] = m_new
# +        m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
# wide_softmax_kernel:
# -    @pl.when(sweep == 1)
# -    def _():
# +    @pl.when(sweep == 1)
# +    def _():
# +        l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)
# +
# +    @pl.when(sweep == 2)
# +    def _():
# wide_softmax_grid: `2` -> `3`
# wide_softmax_out_map: `(i, sweep * j)` -> `(i, sweep // 2 * j)`

# %% softmax/4: the result follows j in both sweeps
# wide_softmax_out_map: `(i, sweep * j)` -> `(i, j)`

# %% softmax/4: the result never moves
# wide_softmax_out_map: `sweep * j` -> `0`

# %% softmax/4: the sum is not rescaled
# wide_softmax_kernel:
# -        m_old = m_ref[...]
# -        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +        m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
# +        l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)

# %% softmax/4: not divided by the sum
# wide_softmax_kernel: `(x_ref[...] - m_ref[...]) / l_ref[...]` -> `(x_ref[...] - m_ref[...])`

# %% softmax/4: every block is a row of its own
# wide_softmax_kernel:
# -        o_ref[...] = jnp.exp(x_ref[...] - m_ref[...]) / l_ref[...]
# +        x = x_ref[...]
# +        e = jnp.exp(x - x.max(axis=1, keepdims=True))
# +        o_ref[...] = e / e.sum(axis=1, keepdims=True)

# %% softmax/4: the sweep is the last axis
# wide_softmax_grid: `2, N // bn` -> `N // bn, 2`

# %% softmax/4: the buffers are set once for all
# wide_softmax_kernel:
# -    @pl.when((sweep == 0) & (j == 0))
# +    @pl.when((pl.program_id(0) == 0) & (sweep == 0) & (j == 0))

# %% softmax/4: set again when the second sweep begins
# wide_softmax_kernel: `(sweep == 0) & (j == 0)` -> `j == 0`

# %% softmax/4: true for the notebook's example alone
# wide_softmax_grid: `M // bm, 2, N // bn` -> `3, 2, 5`

# %% softmax/4: the result rests on the last block, and then starts from the first
# wide_softmax_out_map: `sweep * j` -> `jnp.where(sweep == 0, 4, j)`

# %% softmax/5: columns counted from the start of the block
# cross_entropy_kernel: `= j * bn + jnp.` -> `= jnp.`

# %% softmax/5: the score of the label is overwritten
# cross_entropy_kernel:
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# +    t_ref[...] = jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)

# %% softmax/5: the sum is not rescaled
# cross_entropy_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_new = jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))
# +    l_ref[...] += jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_ref[...] = m_new

# %% softmax/5: the logarithm of a probability
# cross_entropy_kernel: `[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `[...] = -jnp.log(jnp.exp(t_ref[...] - m_ref[...]) / l_ref[...])`

# %% softmax/5: the sign
# cross_entropy_kernel: `[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `[...] = (t_ref[...] - m_ref[...]) - jnp.log(l_ref[...])`

# %% softmax/5: the maximum is forgotten
# cross_entropy_kernel: `(t_ref[...] - m_ref[...])` -> `t_ref[...]`

# %% softmax/5: two large numbers are subtracted last
# cross_entropy_kernel: `[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]`

# %% softmax/5: indexed as in NumPy
# cross_entropy_kernel:
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# +    here = label_ref[...][:, 0] - j * bn
# +    mine = (here >= 0) & (here < bn)
# +    picked = x[jnp.arange(x.shape[0]), jnp.clip(here, 0, bn - 1)]
# +    t_ref[...] += jnp.where(mine, picked, 0)[:, None]


# %% softmax/5: every row gets the labels of the first block
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
# cross_entropy_kernel:
# -        start_statistics(m_ref, l_ref)
# cross_entropy_kernel:
# -    x = x_ref[...]
# -    bn = x.shape[1]
# +    bn = x_ref.shape[1]
# cross_entropy_kernel:
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# -    update_statistics(m_ref, l_ref, x)
# +    t_ref[...] += jnp.where(cols == label_ref[...], x_ref[...], 0).sum(axis=1, keepdims=True)
# cross_entropy_kernel: `[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `[...] = -jnp.log(t_ref[...])`
# cross_entropy:
# -    )(x, labels)
# +    )(wide_softmax(x, bm=bm, bn=bn), labels)

# %% softmax/6: the row term is missing
# softmax_grad_kernel: `(g - (g * y).sum(axis=1, keepdims=True))` -> `g`

# %% softmax/6: the row term has the wrong sign
# softmax_grad_kernel: `-` -> `+`

# %% softmax/6: the sum leaves y out
# softmax_grad_kernel: `(g * y)` -> `g`

# %% softmax/6: only the diagonal
# softmax_grad_kernel: `(g - (g * y).sum(axis=1, keepdims=True))` -> `(1 - y) * g`

# %% softmax/6: the sum goes down the columns
# softmax_grad_kernel: `1` -> `0`

# %% softmax/6: the residual is x
# smooth_softmax_fwd:
# -    y = row_softmax(x, bm=bm)
# -    return y, y
# +    return row_softmax(x, bm=bm), x

# %% softmax/6: no residuals
# smooth_softmax_fwd:
# -    y = row_softmax(x, bm=bm)
# -    return y, y
# +    return row_softmax(x, bm=bm)

# %% softmax/6: not a tuple
# smooth_softmax_bwd: `return (softmax_grad(residuals, g, bm=bm),)` -> `return softmax_grad(residuals, g, bm=bm)`

# %% softmax/6: the product is taken outside
# softmax_grad_kernel: `= y * (g - (g * y).sum(axis=1, keepdims=True))` -> `= g - (g * y).sum(axis=1, keepdims=True)`
# smooth_softmax_bwd:
# -    return (softmax_grad(residuals, g, bm=bm),)
# +    return (residuals * softmax_grad(residuals, g, bm=bm),)

# %% softmax/6: the forward pass runs twice
# smooth_softmax_fwd:
# -    y = row_softmax(x, bm=bm)
# -    return y, y
# +    return row_softmax(x, bm=bm), x
# smooth_softmax_bwd:
# -    return (softmax_grad(residuals, g, bm=bm),)
# +    return (softmax_grad(row_softmax(residuals, bm=bm), g, bm=bm),)


# %% softmax/6: jax differentiates inside of the kernel
# softmax_grad_kernel: `y * (g - (g * y).sum(axis=1, keepdims=True))` -> `jax.vjp(lambda z: jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True), jnp.log(y))[1](g)[0]`

# %% softmax/7: the variance is divided by N - 1
# layer_norm_kernel: `).mean(axis=1, keepdims=True)` -> `).sum(axis=1, keepdims=True) / (x.shape[1] - 1)`

# %% softmax/7: eps outside of the root
# layer_norm_kernel:
# -    rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
# +    rstd = 1 / (jnp.sqrt((centred * centred).mean(axis=1, keepdims=True)) + 1e-5)


# %% softmax/7: mean of squares minus square of mean
# layer_norm_kernel: `centred * centred).mean(axis=1, keepdims=True)` -> `x * x).mean(axis=1, keepdims=True) - mean * mean`

# %% softmax/7: no eps
# layer_norm_kernel: `((centred * centred).mean(axis=1, keepdims=True) + 1e-5)` -> `((centred * centred).mean(axis=1, keepdims=True))`

# %% softmax/7: scale and shift are forgotten
# layer_norm_kernel: `rstd * gamma_ref[...] + beta_ref[...]` -> `rstd`


# %% softmax/7: mean and rstd have changed places
# layer_norm_kernel:
# -    mean_ref[...] = mean
# -    rstd_ref[...] = rstd
# +    mean_ref[...] = rstd
# +    rstd_ref[...] = mean

# %% softmax/7: the standard deviation is saved
# layer_norm_kernel: `= rstd` -> `= 1 / rstd`

# %% softmax/7: down the columns
# layer_norm_kernel: `x.mean(axis=1, keepdims=True)` -> `x.mean(axis=0, keepdims=True) + jnp.zeros((x.shape[0], 1))`
# layer_norm_kernel: `(centred * centred).mean(axis=1, keepdims=True) + 1e-5` -> `(centred * centred).mean(axis=0, keepdims=True) + 1e-5`
# layer_norm_kernel: `= mean` -> `= mean[:, :1]`
# layer_norm_kernel: `= rstd` -> `= jnp.broadcast_to(rstd[:, :1], rstd_ref.shape)`

# %% softmax/7: the residuals are forgotten
# elsewhere: it shows at another line of the function
# layer_norm_kernel:
# -    mean_ref[...] = mean
# -    rstd_ref[...] = rstd

# %% softmax/7: the residuals never move
# layer_norm_outputs: `((bm, 1), lambda i: (i, 0))` -> `((bm, 1), lambda i: (0, 0))`

# %% softmax/7: shapes in another order than specs
# layer_norm_outputs: `jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row` -> `per_row, per_row, jax.ShapeDtypeStruct((M, N), jnp.float32)`

# %% softmax/8: the sums are zeroed at every step
# layer_norm_grad_kernel:
# -    @pl.when(pl.program_id(0) == 0)
# -    def _():
# -        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
# -        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)
# +    dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
# +    dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)

# %% softmax/8: the sums are never zeroed
# layer_norm_grad_kernel:
# -    @pl.when(pl.program_id(0) == 0)
# -    def _():
# -        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
# -        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)

# %% softmax/8: the sums of the last block only
# layer_norm_grad_kernel:
# -    @pl.when(pl.program_id(0) == 0)
# -    def _():
# -        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
# -        dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)
# layer_norm_grad_kernel:
# -    dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
# -    dbeta_ref[...] += g.sum(axis=0, keepdims=True)
# +    dgamma_ref[...] = (g * n).sum(axis=0, keepdims=True)
# +    dbeta_ref[...] = g.sum(axis=0, keepdims=True)

# %% softmax/8: the sums move with the rows
# layer_norm_grad_out_specs: `i: (0, 0)` -> `i: (i, 0)`

# %% softmax/8: the mean of h is left out
# layer_norm_grad_kernel: `* (h - h.mean(axis=1, keepdims=True) - n * along)` -> `* (h - n * along)`

# %% softmax/8: the stretching term is left out
# layer_norm_grad_kernel: `(h - h.mean(axis=1, keepdims=True) - n * along)` -> `(h - h.mean(axis=1, keepdims=True))`

# %% softmax/8: the stretching term has the wrong sign
# layer_norm_grad_kernel: `(h - h.mean(axis=1, keepdims=True) - n * along)` -> `(h - h.mean(axis=1, keepdims=True) + n * along)`

# %% softmax/8: rstd is left out of dx
# layer_norm_grad_kernel: `rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)` -> `h - h.mean(axis=1, keepdims=True) - n * along`

# %% softmax/8: gamma is left out
# layer_norm_grad_kernel: `g * gamma_ref[...]` -> `g`

# %% softmax/8: the mean is not subtracted for dgamma
# layer_norm_grad_kernel: `g * n).sum(` -> `g * x_ref[...]).sum(`


# %% softmax/8: jax differentiates inside of the kernel
# layer_norm_grad_kernel: `rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)` -> `jax.vjp(lambda z: (z - z.mean(axis=1, keepdims=True)) * rstd_ref[...], x_ref[...])[1](h)[0]`

# %% softmax/9: the norm of x alone
# add_rms_norm_kernel: `h * h` -> `x_ref[...].astype(jnp.float32) ** 2`

# %% softmax/9: x is normalised, not the sum
# add_rms_norm_kernel:
# -    o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)
# +    o_ref[...] = (x_ref[...].astype(jnp.float32) * rstd * gamma_ref[...]).astype(o_ref.dtype)

# %% softmax/9: everything in bfloat16
# add_rms_norm_kernel: `[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)` -> `[...] + r_ref[...]`

# %% softmax/9: eps outside of the root
# add_rms_norm_kernel:
# -    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
# +    rstd = 1 / (jnp.sqrt((h * h).mean(axis=1, keepdims=True)) + 1e-6)

# %% softmax/9: no root
# add_rms_norm_kernel:
# -    rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
# +    rstd = 1 / ((h * h).mean(axis=1, keepdims=True) + 1e-6)

# %% softmax/9: the sum, not the mean of the squares
# add_rms_norm_kernel: `mean` -> `sum`

# %% softmax/9: the stream is not handed on
# elsewhere: it shows at another line of the function
# add_rms_norm_kernel:
# -    h_ref[...] = h.astype(h_ref.dtype)

# %% softmax/9: the stream gets x
# add_rms_norm_kernel: `h.astype(h_ref.dtype)` -> `x_ref[...]`

# %% softmax/9: the results in the other order
# elsewhere: it shows at another line of the function
# add_rms_norm: `return` -> `h, result =`
# add_rms_norm:
# -    )(x, r, gamma)
# +    )(x, r, gamma)
# +    return [result, h]

# %% softmax/9: the sum is taken outside
# add_rms_norm_kernel: `(jnp.float32) + r_ref[...].astype(jnp.float32)` -> `(jnp.float32)`
# add_rms_norm:
# -    )(x, r, gamma)
# +    )(x + r, r, gamma)


# %% softmax/9: two calls
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
# ragged_loss_kernel: `= jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `= x_ref[...].astype(jnp.float32)`

# %% softmax/10: the padding is zero
# ragged_loss_kernel: `(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `(cols < vocab, x_ref[...].astype(jnp.float32), 0)`

# %% softmax/10: the padding is zero, and left out of the sum
# ragged_loss_kernel: `(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `(cols < vocab, x_ref[...].astype(jnp.float32), 0)`
# ragged_loss_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.where(cols < vocab, jnp.exp(x - m_new), 0).sum(
# +        axis=1, keepdims=True
# +    )
# +    m_ref[...] = m_new

# %% softmax/10: masked by multiplication
# ragged_loss_kernel: `= jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `= x_ref[...].astype(jnp.float32) * (cols < vocab)`

# %% softmax/10: only the sum is masked
# ragged_loss_kernel: `= jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `= x_ref[...].astype(jnp.float32)`
# ragged_loss_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.where(cols < vocab, jnp.exp(x - m_new), 0).sum(
# +        axis=1, keepdims=True
# +    )
# +    m_ref[...] = m_new

# %% softmax/10: columns counted from the start of the block
# ragged_loss_kernel: `= j * bn + jnp.` -> `= jnp.`
# ragged_loss_kernel: `cols ==` -> `cols + j * bn ==`

# %% softmax/10: summed in bfloat16
# ragged_loss_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).astype(jnp.bfloat16).sum(
# +        axis=1, keepdims=True
# +    )
# +    m_ref[...] = m_new

# %% softmax/10: a padding of -100
# ragged_loss_kernel: `(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)` -> `(cols < vocab, x_ref[...].astype(jnp.float32), -100.0)`

# %% softmax/10: everything below the vocabulary plus one
# ragged_loss_kernel: `cols < vocab,` -> `cols <= vocab,`

# %% softmax/3: the sum instead of one over it
# online_kernel: `[...] = 1 / l_ref[...]` -> `[...] = l_ref[...]`

# %% softmax/5: picked with take_along_axis
# cross_entropy_kernel:
# -    cols = j * bn + jnp.arange(bn)[None, :]
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# +    here = label_ref[...] - j * bn
# +    picked = jnp.take_along_axis(x, jnp.clip(here, 0, bn - 1), axis=1)
# +    t_ref[...] += jnp.where((here >= 0) & (here < bn), picked, 0)

# %% softmax/10: two large numbers are subtracted last
# ragged_loss_kernel: `[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `[...] = m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]`

# %% softmax/10: the maximum is left out of the loss
# ragged_loss_kernel: `(t_ref[...] - m_ref[...])` -> `t_ref[...]`

# %% softmax/2: the maximum starts from -1000
# confidence_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# confidence_kernel: `jnp.inf` -> `1000.0`
# confidence_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# confidence_kernel: `= jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))` -> `= jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))`
# confidence_kernel:
# -        l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)
# +        l_ref[...] += jnp.exp(x - m_ref[...]).sum(axis=1, keepdims=True)

# %% softmax/2: conditions joined by and
# confidence_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# confidence_kernel: `(sweep == 0) & (j == 0)` -> `sweep == 0 and j == 0`
# confidence_kernel: `(m_ref.shape, -jnp.inf)` -> `(m_ref.shape, -jnp.inf, m_ref.dtype)`
# confidence_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# confidence_kernel: `= jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))` -> `= jnp.maximum(m_ref[...], x.max(axis=1, keepdims=True))`
# confidence_kernel:
# -        l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)
# +        l_ref[...] += jnp.exp(x - m_ref[...]).sum(axis=1, keepdims=True)


# %% softmax/3: the quotient of the maxima
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
# wide_softmax_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# wide_softmax_kernel: `jnp.inf` -> `1000.0`
# wide_softmax_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# wide_softmax_kernel:
# -        x = x_ref[...]
# wide_softmax_kernel: `[...] = jnp.exp(x_ref[...] - m_ref[...]) /` -> `[...] = jnp.exp(x - m_ref[...]) /`

# %% softmax/4: the maximum starts from zero
# wide_softmax_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# wide_softmax_kernel: `jnp.full(m_ref.shape, -jnp.inf)` -> `jnp.zeros(m_ref.shape, m_ref.dtype)`
# wide_softmax_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# wide_softmax_kernel:
# -        x = x_ref[...]
# wide_softmax_kernel: `[...] = jnp.exp(x_ref[...] - m_ref[...]) /` -> `[...] = jnp.exp(x - m_ref[...]) /`

# %% softmax/4: the update runs on in the second sweep
# wide_softmax_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# wide_softmax_kernel: `(m_ref.shape, -jnp.inf)` -> `(m_ref.shape, -jnp.inf, m_ref.dtype)`
# wide_softmax_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# wide_softmax_kernel:
# -    @pl.when(sweep == 0)
# -    def _():
# -        x = x_ref[...]
# -        m_old = m_ref[...]
# -        m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# -        l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# -        m_ref[...] = m_new
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_ref[...] = m_new
# wide_softmax_kernel: `[...] = jnp.exp(x_ref[...] - m_ref[...]) /` -> `[...] = jnp.exp(x - m_ref[...]) /`

# %% softmax/4: not divided, in one line
# wide_softmax_kernel:
# -    sweep, j = pl.program_id(1), pl.program_id(2)
# +    sweep, j = pl.program_id(1), pl.program_id(2)
# +    x = x_ref[...]
# wide_softmax_kernel: `(m_ref.shape, -jnp.inf)` -> `(m_ref.shape, -jnp.inf, m_ref.dtype)`
# wide_softmax_kernel: `(l_ref.shape)` -> `(l_ref.shape, l_ref.dtype)`
# wide_softmax_kernel:
# -        x = x_ref[...]
# wide_softmax_kernel: `(x_ref[...] - m_ref[...]) / l_ref[...]` -> `(x - m_ref[...])`

# %% softmax/5: the maximum starts from -1000
# cross_entropy_kernel:
# -    j = pl.program_id(1)
# +    j = pl.program_id(1)
# +    bn = x_ref.shape[1]
# +    x = x_ref[...]
# cross_entropy_kernel:
# -        start_statistics(m_ref, l_ref)
# +        m_ref[...] = jnp.full(m_ref.shape, -1000.0)
# +        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
# cross_entropy_kernel: `(t_ref.shape)` -> `(t_ref.shape, t_ref.dtype)`
# cross_entropy_kernel:
# -    x = x_ref[...]
# -    bn = x.shape[1]
# -    cols = j * bn + jnp.arange(bn)[None, :]
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# cross_entropy_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_ref[...] = m_new
# +    cols = j * bn + jnp.arange(bn)[None, :]
# +    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# cross_entropy_kernel: `jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]`
# cross_entropy:
# -    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
# +    col = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
# cross_entropy: `[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), column],` -> `[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), col],`
# cross_entropy: `=column,` -> `=col,`

# %% softmax/5: the maximum starts from zero
# cross_entropy_kernel:
# -    j = pl.program_id(1)
# +    j = pl.program_id(1)
# +    bn = x_ref.shape[1]
# +    x = x_ref[...]
# cross_entropy_kernel:
# -        start_statistics(m_ref, l_ref)
# +        m_ref[...] = jnp.zeros(m_ref.shape, m_ref.dtype)
# +        l_ref[...] = jnp.zeros(l_ref.shape, l_ref.dtype)
# cross_entropy_kernel: `(t_ref.shape)` -> `(t_ref.shape, t_ref.dtype)`
# cross_entropy_kernel:
# -    x = x_ref[...]
# -    bn = x.shape[1]
# -    cols = j * bn + jnp.arange(bn)[None, :]
# -    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# cross_entropy_kernel:
# -    update_statistics(m_ref, l_ref, x)
# +    m_old = m_ref[...]
# +    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
# +    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
# +    m_ref[...] = m_new
# +    cols = j * bn + jnp.arange(bn)[None, :]
# +    t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
# cross_entropy_kernel: `jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])` -> `m_ref[...] + jnp.log(l_ref[...]) - t_ref[...]`
# cross_entropy:
# -    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
# +    col = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
# cross_entropy: `[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), column],` -> `[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), col],`
# cross_entropy: `=column,` -> `=col,`

# %% softmax/6: jvp inside of the kernel
# softmax_grad_kernel:
# -    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))
# +    f = lambda z: jnp.exp(z) / jnp.exp(z).sum(axis=1, keepdims=True)
# +    dx_ref[...] = jax.jvp(f, (jnp.log(jnp.maximum(y, 1e-37)),), (g,))[1]

# %% softmax/6: g * y * (1 - y)
# softmax_grad_kernel: `= y * (g - (g * y).sum(axis=1, keepdims=True))` -> `= g * y * (1 - y)`


# %% softmax/7: no eps, variances near 1e-5
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
# add_rms_norm_kernel: `((h * h).mean(axis=1, keepdims=True) + 1e-6)` -> `((h * h).mean(axis=1, keepdims=True))`
# add_rms_norm:
# -    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
# -    shape = jax.ShapeDtypeStruct((M, N), x.dtype)
# +    rows = pl.BlockSpec((bm, N), lambda i: (i, 0))
# +    s = jax.ShapeDtypeStruct((M, N), jnp.bfloat16)
# add_rms_norm:
# -        in_specs=[block, block, pl.BlockSpec((1, N), lambda i: (0, 0))],
# -        out_specs=[block, block],
# -        out_shape=[shape, shape],
# +        in_specs=[rows, rows, pl.BlockSpec((1, N), lambda i: (0, 0))],
# +        out_specs=[rows, rows],
# +        out_shape=[s, s],


# %% softmax/10: a padding of -40,000
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: the maximum starts from -1000
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: a right mask, and the exponential of what was read
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: the mask is added
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: a padding of +inf
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: a padding of NaN
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/10: not masked at all
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
        o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])


# %% softmax/1: divided by way of a logarithm
# row_softmax_kernel:
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# -    o_ref[...] = e / e.sum(axis=1, keepdims=True)
# +    o_ref[...] = jnp.exp(x - jnp.logaddexp.reduce(x, axis=1, keepdims=True))

# %% softmax/1: the spec does it
# row_softmax_kernel:
# -    x = x_ref[...]
# -    e = jnp.exp(x - x.max(axis=1, keepdims=True))
# -    o_ref[...] = e / e.sum(axis=1, keepdims=True)
# +    o_ref[...] = row_softmax_spec(x_ref[...])

# %% softmax/6: the spec's own derivative
# softmax_grad_kernel:
# -    y, g = y_ref[...], g_ref[...]
# -    dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))
# +    dx_ref[...] = softmax_vjp_spec(jnp.log(y_ref[...] + 1e-30), g_ref[...])[1]

# %% softmax/4: the result waits for the example's five blocks
# wide_softmax_out_map: `sweep * j` -> `jnp.maximum(5 * sweep + j - 5, 0)`

# %% softmax/7: the mean is subtracted at the end
# layer_norm_kernel: `centred * rstd * gamma_ref[...] + beta_ref[...]` -> `x * (rstd * gamma_ref[...]) + (beta_ref[...] - mean * rstd * gamma_ref[...])`

# %% softmax/8: the mean is subtracted when it is scaled
# layer_norm_grad_kernel: `(x_ref[...] - mean_ref[...]) * rstd_ref[...]` -> `x_ref[...] * rstd_ref[...] - mean_ref[...] * rstd_ref[...]`
