# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 2}
# ---

# %% [markdown]
# # Softmax: from one row to a trained loss
#
# In ten puzzles you write what comes between the matrix multiplications of a transformer. You write softmax for rows
# too wide for one block, LayerNorm, RMSNorm, and a cross-entropy that never stores a probability. You also write
# backward passes, and `jax.grad` calls them by itself. At the end a small classifier trains on them.
#
# You need what `basics.py` taught: Refs and BlockSpecs, masks at the ragged edge, sums that grow from step to step,
# scratch. You also need a habit: counting bytes. A matrix multiplication uses every number that it fetches hundreds of
# times. These kernels use it a handful of times. So their cost is mostly the bytes that they move, and every puzzle
# here has a budget of bytes.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_puzzles import (
    check,
    hint,
    integers,
    normal,
    progress,
    setup,
    show,
    tpu_report,
    unwritten,  # for the last cell: which of your functions are still empty
)

setup()

# %% [markdown]
# ## Puzzle 1: Softmax of a row
#
# **Goal.** Turn each row of `x` into probabilities: `exp(x)`, divided by its sum over the row. Write it yourself,
# without `jax.nn.softmax`: from Puzzle 2 on, no block holds a whole row, and `jax.nn.softmax` needs one.
#
# ### Theory
#
# In float32, exp(89) is infinity: the largest float32 is 3.4e38, which is exp(88.7). A score of 89 is nothing special.
# Two vectors of 128 elements of size 3 can have a dot product of 1152. If exp gives infinity, inf / inf is NaN, and one
# NaN ends a training run. Very negative scores fail, too. Below about -87.4, `jnp.exp` of a float32 is 0 (whatever is
# smaller than the smallest normal float32 is flushed to 0). A row with only such scores gives 0 / 0.
#
# One fact helps. Subtract the same number `c` from a whole row, and its softmax stays the same: `exp(x - c)` is
# `exp(x) / exp(c)`, and the `exp(c)` cancels.
#
# ```text
#     a row of x     [   90       88       80    ]
#     exp(x)         [   inf   1.7e38   5.5e34   ]     sum: inf
#     x - c          [    ?        ?        ?    ]
#     exp(x - c)     [    ?        ?        ?    ]     sum: neither inf nor 0, whatever the row
# ```
#
# Which `c`? It has to work for every row, at 10,000 and at -10,000. Inside a block, reduce with plain `jnp`, as in
# basics.py Puzzle 9. `x.sum(axis=1, keepdims=True)` turns (bm, N) into (bm, 1): one number per row.


# %%
def row_softmax_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.softmax(x, axis=1)


def row_softmax_kernel(x_ref, o_ref):
    # x_ref, o_ref: (bm, N), whole rows
    pass  # YOUR CODE HERE


def row_softmax(x: Float32[Array, "M N"], *, bm: int = 16) -> Float32[Array, "M N"]:
    M, N = x.shape
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        row_softmax_kernel,
        grid=(M // bm,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


# %%
# Budget for x (48, 384): hbm_bytes=147_456, vmem_bytes=98_304. hbm_bytes: x in, the result out, 73,728 bytes each. In
# this notebook, your code may not call jax.nn.softmax or anything like it.
check("softmax/1", row_softmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You want two things. Nothing in the row may overflow, so no exponent should be large; an exponent of 0 or less is
# safe. And not everything may vanish, so at least one exponent should stay near 0. Which number of the row gives you
# both? Choose it for each row by itself: with one `c` for the whole block, a high row can drown a low one.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def row_softmax_kernel(x_ref, o_ref):
#     x = x_ref[...]
#     e = jnp.exp(x - ____)     # (bm, N) minus (bm, 1)
#     o_ref[...] = e / ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def row_softmax_kernel(x_ref, o_ref):
#     x = x_ref[...]
#     e = jnp.exp(x - x.max(axis=1, keepdims=True))
#     o_ref[...] = e / e.sum(axis=1, keepdims=True)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With the maximum subtracted, the largest term is exp(0) = 1, so the sum lies between 1 and N. It can
# neither overflow nor vanish. The traffic is as low as it can be, too: `x` comes in once, and the result goes out once.
# That took a block as wide as the row. What if there is no room for one?

# %% [markdown]
# ## Puzzle 2: Rows too wide for one block
#
# **Goal.** How sure is the model? For each row of scores, compute the largest of its probabilities. The row comes in
# blocks.
#
# ### Theory
#
# A vocabulary of 262,144 tokens makes rows of 1 MiB in float32. A block has at least eight (basics.py Puzzle 4). In two
# buffers they are 16 MiB: all of the VMEM that a kernel on a v5e gets by default. So a row comes in blocks (basics.py
# Puzzle 9). But you need the maximum before you can compute any exponential, and the maximum needs the whole row.
#
# So go over the row twice. One pass over all blocks is called a **sweep**, and it is a grid axis like any other. The
# index map of `x` ignores the axis `sweep`, so the same blocks come in again.
#
# ```text
#     grid (i, sweep, j)          i = 0                          i = 1
#     sweep                 0 0 0 0 0  1 1 1 1 1           0 0 0 0 0  1 1 1 1 1
#     block j of x          0 1 2 3 4  0 1 2 3 4           0 1 2 3 4  0 1 2 3 4
#     m_ref                 max ---->  .........           max ---->  .........
#     l_ref                            sum ---->                      sum ---->
# ```
#
# `m_ref` and `l_ref` are scratch, one number per row. To recognise the last step, you need the length of an axis:
# `pl.num_programs(2)` is the number of steps along axis 2. If two conditions have to hold at once, join them with `&`,
# each in brackets: `@pl.when((a == 0) & (b == 0))`.


# %%
def confidence_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M 1"]:
    return jax.nn.softmax(x, axis=1).max(axis=1, keepdims=True)


def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
    # x_ref: (bm, bn), block (i, j) of x      o_ref: (bm, 1), one number per row
    # m_ref: (bm, 1), scratch for the maximum      l_ref: (bm, 1), scratch for the sum of exp(x - maximum)
    pass  # YOUR CODE HERE


def confidence(x: Float32[Array, "M N"], *, bm: int = 8, bn: int = 128) -> Float32[Array, "M 1"]:
    M, N = x.shape
    return pl.pallas_call(
        confidence_kernel,
        grid=(M // bm, 2, N // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, sweep, j: (i, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, sweep, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32), pltpu.VMEM((bm, 1), jnp.float32)],
    )(x)


# %%
# Budget for x (24, 640): hbm_bytes=122_976, vmem_bytes=8_320, output_stores=1. hbm_bytes: x is 61,440 bytes and comes
# in twice; 96 bytes go out. vmem_bytes: far too little for whole rows.
check("softmax/2", confidence)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down what each step does. Which steps set the two buffers to their starting values, which feed `m_ref`, which
# feed `l_ref`, and which store the result? A sum starts from 0, because adding 0 changes nothing. What does a maximum
# start from? (Not from 0.) And at the end, what is the numerator of the largest probability?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
#     sweep, j = pl.program_id(1), pl.program_id(2)
#
#     @pl.when((sweep == 0) & (____))
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, ____)
#         l_ref[...] = ____
#
#     @pl.when(sweep == 0)
#     def _():
#         m_ref[...] = jnp.maximum(____, ____)
#
#     @pl.when(sweep == 1)
#     def _():
#         l_ref[...] += ____
#
#     @pl.when((sweep == 1) & (____))
#     def _():
#         o_ref[...] = ____     # exp(0), over the sum
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def confidence_kernel(x_ref, o_ref, m_ref, l_ref):
#     sweep, j = pl.program_id(1), pl.program_id(2)
#
#     @pl.when((sweep == 0) & (j == 0))
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#
#     @pl.when(sweep == 0)
#     def _():
#         m_ref[...] = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
#
#     @pl.when(sweep == 1)
#     def _():
#         l_ref[...] += jnp.exp(x_ref[...] - m_ref[...]).sum(axis=1, keepdims=True)
#
#     @pl.when((sweep == 1) & (j == pl.num_programs(2) - 1))
#     def _():
#         o_ref[...] = 1 / l_ref[...]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With two sweeps, VMEM no longer limits the length of a row. But every byte of `x` came in twice. With
# large blocks the copies take most of the time, so the second sweep takes about as long as the first. Could the sum
# start before you know the maximum?

# %% [markdown]
# ## Puzzle 3: Online softmax
#
# **Goal.** Compute the same numbers as in Puzzle 2 in a single sweep, with half the bytes.
#
# ### Theory
#
# 8192 rows of 262,144 float32 scores are 8 GiB. At the 820 GB/s of a v5e one sweep takes 10.5 ms, and two take 21.
#
# So guess. Use the largest number so far as the maximum, and start to sum. Later, a larger number may turn up. Then
# every old term is too large, and all of them by the same factor. Say the maximum grows from 5 to 7: you have added
# exp(x - 5), and that is exp(x - 7) times exp(7 - 5). So one multiplication corrects the whole sum. You need not see
# its terms again:
#
# ```text
#     a row:   [ 2  5 | 7  4 | 6  3 ]
#
#     block    m          l, the sum of exp(x - m) so far
#     2 5      5          exp(2-5) + exp(5-5)                          = 1.0498
#     7 4      5 -> 7     1.0498 x 0.13534 = 0.1421, and the new terms
#                         0.1421 + exp(7-7) + exp(4-7)                 = 1.1919
#     6 3      7          1.1919 x 1 + exp(6-7) + exp(3-7)             = 1.5781
#
#     all at once:   exp(-5) + exp(-2) + exp(0) + exp(-3) + exp(-1) + exp(-4) = 1.5781
# ```
#
# The second and the third block multiply the old sum: by 0.13534, then by 1. Where do these two numbers come from?
# Multiplying by this factor is called **rescaling**. It is the trick at the heart of flash attention.


# %%
def online_kernel(x_ref, o_ref, m_ref, l_ref):
    # x_ref: (bm, bn), block (i, j) of x      o_ref: (bm, 1), one number per row
    # m_ref: (bm, 1), the maximum so far      l_ref: (bm, 1), the sum of exp(x - m_ref) so far
    pass  # YOUR CODE HERE


def online_confidence(x: Float32[Array, "M N"], *, bm: int = 8, bn: int = 128) -> Float32[Array, "M 1"]:
    M, N = x.shape
    return pl.pallas_call(
        online_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32), pltpu.VMEM((bm, 1), jnp.float32)],
    )(x)


# %%
# Budget for x (24, 640): hbm_bytes=61_536, vmem_bytes=8_320, output_stores=1. hbm_bytes: x comes in once, 61,440 bytes;
# 96 go out. No kernel that reads every score can move fewer bytes.
check("softmax/3", online_confidence)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The sum in `l_ref` was measured against the old maximum. The terms that you add are measured against the new one.
# Before you add them up, which of the two has to change, and by what factor? When the maximum stays, that factor must
# be 1. Mind the order: once you overwrite `m_ref`, the old maximum is gone. The very first block has no old maximum at
# all: what is exp(-inf)?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def online_kernel(x_ref, o_ref, m_ref, l_ref):
#     j = pl.program_id(1)
#     ____                          # starting values, as in Puzzle 2
#
#     x = x_ref[...]
#     m_old = m_ref[...]
#     m_new = ____
#     l_ref[...] = l_ref[...] * ____ + ____
#     m_ref[...] = m_new
#
#     ____                          # the last step
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def online_kernel(x_ref, o_ref, m_ref, l_ref):
#     j = pl.program_id(1)
#
#     @pl.when(j == 0)
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#
#     x = x_ref[...]
#     m_old = m_ref[...]
#     m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
#     l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
#     m_ref[...] = m_new
#
#     @pl.when(j == pl.num_programs(1) - 1)
#     def _():
#         o_ref[...] = 1 / l_ref[...]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You can sum exponentials without knowing what comes next. All you have to remember is two numbers per
# row, `m` and `l`. Here are the two kernels. The strip shows what moves at each step. Look for the blocks of `x` that
# come twice in the first picture, and compare the two figures for HBM: 120 KiB against 60.

# %%
show(confidence, normal((24, 640)))

# %%
show(online_confidence, normal((24, 640)))

# %% [markdown]
# ## Puzzle 4: Softmax of a wide row
#
# **Goal.** Compute all of the softmax, not only its largest element, for rows that come in blocks. Write the kernel,
# the grid and the index map of the result, and stay within the budget of bytes.
#
# ### Theory
#
# You cannot write the first probability of a row before you have read its last score. By then, the first block is no
# longer in VMEM. It has to come in again. If every sweep goes from left to right, you need at least two reads and one
# write:
#
# ```text
#     sweeps                          bytes, for an x of 61,440
#     maximum; sum; write             3 reads + 1 write = 245,760
#     ?; write                        2 reads + 1 write = 184,320      <- the budget
# ```
#
# There is a trap in the sweeps that only read. An output block leaves VMEM when its number changes (basics.py Puzzle
# 5), **whether or not anything was stored in it**. Suppose the output's map returns (i, j) in both sweeps. Then that
# sweep writes five blocks of garbage to HBM, and the second sweep comes back to each of them. What you wrote into a
# block that has left does not come back. So the check refuses a second visit, even one that overwrites all of it.
#
# So keep the output on one block while there is nothing to write. An index map gets all grid indices, and it may use
# any of them:
#
# ```text
#     sweep             0 0 0 0 0   1 1 1 1 1
#     j                 0 1 2 3 4   0 1 2 3 4
#     block of x        0 1 2 3 4   0 1 2 3 4
#     block of result   ? ? ? ? ?   0 1 2 3 4
# ```


# %%
def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    # x_ref, o_ref: (bm, bn)      m_ref, l_ref: (bm, 1), scratch
    pass  # YOUR CODE HERE


def wide_softmax_grid(M, N, bm, bn):
    # Return the grid. Its axes are: i (blocks down), sweep, j (blocks across).
    pass  # YOUR CODE HERE


def wide_softmax_out_map(i, sweep, j):
    # Return the number of the block of the result that is in VMEM at this step.
    pass  # YOUR CODE HERE


def wide_softmax(x: Float32[Array, "M N"], *, bm: int = 8, bn: int = 128) -> Float32[Array, "M N"]:
    M, N = x.shape
    return pl.pallas_call(
        wide_softmax_kernel,
        grid=wide_softmax_grid(M, N, bm, bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, sweep, j: (i, j))],
        out_specs=pl.BlockSpec((bm, bn), wide_softmax_out_map),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32), pltpu.VMEM((bm, 1), jnp.float32)],
    )(x)


# %%
# Budget for x (24, 640): hbm_bytes=184_320, vmem_bytes=16_448, calls=1.
check("softmax/4", wide_softmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which kernel of yours already has the maximum *and* the sum after one sweep? After that, the last sweep takes a single
# line. For the map: during the first sweep, the output has to wait on one block. Only one of the five is right. Any
# other block would leave VMEM, full of garbage, when the second sweep begins, and would be visited again later. Which
# block does the second sweep write first? And remember that index maps are traced: you cannot use `if`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
#     sweep, j = pl.program_id(1), pl.program_id(2)
#     ____                          # at the very first step of a row: starting values
#
#     @pl.when(sweep == 0)
#     def _():
#         ____                      # Puzzle 3
#
#     @pl.when(sweep == 1)
#     def _():
#         o_ref[...] = ____
#
#
# def wide_softmax_grid(M, N, bm, bn):
#     return (____, ____, ____)
#
#
# def wide_softmax_out_map(i, sweep, j):
#     return (i, ____)              # 0 as long as sweep is 0
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
#     sweep, j = pl.program_id(1), pl.program_id(2)
#
#     @pl.when((sweep == 0) & (j == 0))
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#
#     @pl.when(sweep == 0)
#     def _():
#         x = x_ref[...]
#         m_old = m_ref[...]
#         m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
#         l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
#         m_ref[...] = m_new
#
#     @pl.when(sweep == 1)
#     def _():
#         o_ref[...] = jnp.exp(x_ref[...] - m_ref[...]) / l_ref[...]
#
#
# def wide_softmax_grid(M, N, bm, bn):
#     return (M // bm, 2, N // bn)
#
#
# def wide_softmax_out_map(i, sweep, j):
#     return (i, sweep * j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Every sweep moves all of `x`. Rescaling saves a sweep and costs little arithmetic. For this `x`, one
# sweep moves 120 KiB (Puzzle 1, when a row fits), your two move 180, and three would move 240. In the picture, watch
# the result wait on its first block. (Still hungry? Let the second sweep walk backwards, as the snake of basics.py
# Puzzle 13 does. It then begins with the block that the first sweep has just read, and that block need not be copied
# again. With three rows of blocks this saves three copies: 168 KiB.)

# %%
show(wide_softmax, normal((24, 640)))

# %% [markdown]
# ## Puzzle 5: A loss without probabilities
#
# **Goal.** Compute the cross-entropy: for each row of scores, minus the logarithm of the probability of its label. Use
# one call and one sweep. Write the kernel and the call.
#
# ### Theory
#
# 8192 rows and a vocabulary of 262,144 tokens make 8 GiB of scores in float32. Their softmax is another 8 GiB. Together
# they do not even fit into the 16 GB of a v5e. And the loss needs only one probability of each row.
#
# You have nearly all of it. After one sweep, a score `t` of the row has the probability `exp(t - m) / l`. So the loss
# is `log(l) - (t - m)`. Keep the brackets: scores near -10,000 are among the cases, and there neighbours in float32 are
# 0.001 apart. The difference of two such scores is exact, but a small number added to one of them is rounded. (Two
# helpers now do Puzzle 3's work on `m` and `l`.) Only `t` is missing, the score of the label. In NumPy that is
# `x[row, label]`. In a TPU kernel, `x[row, label]` is refused.
#
# Instead, compare **positions**. The column numbers of the block are a row, and the labels are a column. Broadcasting
# turns them into a table with at most one True per row:
#
# ```text
#                   columns of this block: 256 257 258 259
#     label  257                            .   T   .   .
#     label    3                            .   .   .   .      (it is in another block)
#     label  259                            .   .   .   T
# ```
#
# Where it is True, keep the score. Elsewhere, put 0. Sum each row, and add up the sums of all blocks. What do you get?


# %%
def start_statistics(m_ref, l_ref):
    # the starting values of Puzzle 3; call it at the first step of a row
    m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
    l_ref[...] = jnp.zeros(l_ref.shape)


def update_statistics(m_ref, l_ref, x):
    # x: (bm, bn), an array. Afterwards m_ref and l_ref (bm, 1) are the maximum and the sum of everything up to x
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, x.max(axis=1, keepdims=True))
    l_ref[...] = l_ref[...] * jnp.exp(m_old - m_new) + jnp.exp(x - m_new).sum(axis=1, keepdims=True)
    m_ref[...] = m_new


# %%
def cross_entropy_spec(x: Float32[Array, "M V"], labels: Int[Array, "M 1"]) -> Float32[Array, "M 1"]:
    return -jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32), axis=1), labels, axis=1)


def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
    # x_ref: (bm, bn), block (i, j) of the scores      label_ref: (bm, 1), int32      o_ref: (bm, 1), the loss of rows
    # m_ref, l_ref: (bm, 1), scratch, as in Puzzle 3      t_ref: (bm, 1), scratch for the score of the label
    pass  # YOUR CODE HERE


def cross_entropy(
    x: Float32[Array, "M V"], labels: Int[Array, "M 1"], *, bm: int = 8, bn: int = 128
) -> Float32[Array, "M 1"]:
    # Return the result of one pallas_call of cross_entropy_kernel. Blocks of x are (bm, bn); labels come in, and losses
    # go out, in blocks of (bm, 1). The three scratch buffers are (bm, 1), float32. bm divides M, bn divides V.
    pass  # YOUR CODE HERE


# %%
# Budget for x (24, 640), labels (24, 1): hbm_bytes=61_632, vmem_bytes=8_416, calls=1, output_stores=1. hbm_bytes: the
# scores once (61,440), and 96 bytes each for labels and loss. Each of the 24 rows has a random label from 0 to 639.
# Your code may not call jnp.take_along_axis: it compiles for blocks of 128 columns, and not for blocks of 512, which
# other cases have.
check("softmax/5", cross_entropy)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the positions: at which column of the row does block `j` start? For the call: how many rows do the labels have,
# and does their block change with `j`? For the loss: when has `t_ref` all it needs? Before that step it is a part.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
#     j = pl.program_id(1)
#     ____                                      # starting values, for three buffers
#
#     x = x_ref[...]
#     bn = x.shape[1]
#     cols = ____ + jnp.arange(bn)[None, :]     # (1, bn), positions in the whole row
#     t_ref[...] += jnp.where(____, x, 0).sum(axis=1, keepdims=True)
#     ____                                      # m_ref and l_ref
#
#     ____                                      # on the last step: the loss
#
#
# def cross_entropy(x, labels, *, bm=8, bn=128):
#     M, V = x.shape
#     column = pl.BlockSpec((bm, 1), ____)
#     return pl.pallas_call(
#         cross_entropy_kernel,
#         grid=____,
#         in_specs=[____, column],
#         out_specs=____,
#         out_shape=____,
#         scratch_shapes=____,
#     )(x, labels)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def cross_entropy_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref):
#     j = pl.program_id(1)
#
#     @pl.when(j == 0)
#     def _():
#         start_statistics(m_ref, l_ref)
#         t_ref[...] = jnp.zeros(t_ref.shape)
#
#     x = x_ref[...]
#     bn = x.shape[1]
#     cols = j * bn + jnp.arange(bn)[None, :]
#     t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
#     update_statistics(m_ref, l_ref, x)
#
#     @pl.when(j == pl.num_programs(1) - 1)
#     def _():
#         o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])
#
#
# def cross_entropy(x, labels, *, bm=8, bn=128):
#     M, V = x.shape
#     column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
#     return pl.pallas_call(
#         cross_entropy_kernel,
#         grid=(M // bm, V // bn),
#         in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), column],
#         out_specs=column,
#         out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
#         scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
#     )(x, labels)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You turned 8 GiB of scores into 8192 losses, with nothing stored in between. At 820 GB/s that takes 10.5
# ms, the time to read the scores. No kernel that looks at every score can be faster. Puzzle 4 reads the scores twice
# and stores the probabilities. That takes three times as long, before any loss. But what is a loss for? To be
# differentiated. Can JAX do that?

# %% [markdown]
# ## Puzzle 6: Softmax, backwards
#
# **Goal.** Teach JAX the gradient of your softmax. Write the backward kernel, and the two functions that connect it.
#
# ### Theory
#
# Try `jax.grad(lambda x: row_softmax(x).sum())(jnp.ones((16, 128)))`. You get an error: JAX cannot run your kernel
# backwards. You tell it how, with **`jax.custom_vjp`**:
#
# ```text
#     f(x)                    the function
#     fwd(x)                  returns the result, and residuals: whatever the way back will need
#     bwd(residuals, g)       returns a tuple: for each input, the gradient of the loss with respect to it
#     f.defvjp(fwd, bwd)      g is the gradient of the loss with respect to the result, and has its shape
# ```
#
# That is all that is new here. The rest is calculus that you know: y = softmax(x), for one row, has an N x N matrix of
# derivatives. For N = 4096 in float32 the matrix is 64 MiB, per row. But you never need to build it, because it has a
# simple form:
#
# ```text
#     dy[j] / dx[i]  =  y[j] * (1 - y[i])     for j = i
#                      -y[j] * y[i]           for j != i
#
#     dx[i]  =  sum over j of  g[j] * dy[j] / dx[i]
# ```
#
# Put the derivatives into the sum. Two terms remain: one for the element itself, and one sum that is the same for the
# whole row.


# %%
def softmax_vjp_spec(
    x: Float32[Array, "M N"], g: Float32[Array, "M N"]
) -> tuple[Float32[Array, "M N"], Float32[Array, "M N"]]:
    y, vjp = jax.vjp(lambda x: jax.nn.softmax(x, axis=1), x)
    return y, vjp(g)[0]


# %%
def softmax_grad_kernel(y_ref, g_ref, dx_ref):
    # y_ref: (bm, N), whole rows of the softmax      g_ref: (bm, N), the gradient that arrives
    # dx_ref: (bm, N), the gradient with respect to x
    pass  # YOUR CODE HERE


def softmax_grad(y: Float32[Array, "M N"], g: Float32[Array, "M N"], *, bm: int) -> Float32[Array, "M N"]:
    M, N = y.shape
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_grad_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
    )(y, g)


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))  # argument 1, bm, has no gradient: bwd gets it first
def smooth_softmax(x, bm):
    return row_softmax(x, bm=bm)  # your own, from Puzzle 1


def smooth_softmax_fwd(x, bm):
    # Return two things: the softmax of x, and the residuals: what softmax_grad needs besides g.
    pass  # YOUR CODE HERE


def smooth_softmax_bwd(bm, residuals, g):
    # Return a tuple with one entry: the gradient with respect to x. softmax_grad computes it.
    pass  # YOUR CODE HERE


smooth_softmax.defvjp(smooth_softmax_fwd, smooth_softmax_bwd)


# %%
def softmax_vjp(
    x: Float32[Array, "M N"], g: Float32[Array, "M N"], *, bm: int = 16
) -> tuple[Float32[Array, "M N"], Float32[Array, "M N"]]:
    y, vjp = jax.vjp(lambda x: smooth_softmax(x, bm), x)  # calls smooth_softmax_fwd
    return y, vjp(g)[0]  # calls smooth_softmax_bwd


# %%
# Budget for x (48, 384), g (48, 384): hbm_bytes=368_640, calls=2. hbm_bytes: forward x in, y out; backward y and g in,
# dx out. Five arrays of 73,728 bytes, in two calls. Your code may not call jax.vjp, jax.grad or anything like them, and
# all arithmetic belongs in the two kernels.
check("softmax/6", softmax_vjp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write every derivative as y[j] * (e - y[i]), where e is 1 for j = i and 0 otherwise, and multiply out. In the sum over
# `j`, move whatever belongs to `i` outside. One number per row is left inside, made of `g` and `y`. For the residuals,
# see which arrays occur in your formula: does `x`?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def softmax_grad_kernel(y_ref, g_ref, dx_ref):
#     y, g = y_ref[...], g_ref[...]
#     dx_ref[...] = y * (g - ____)     # (bm, 1): a sum over the row
#
#
# def smooth_softmax_fwd(x, bm):
#     y = ____
#     return y, ____
#
#
# def smooth_softmax_bwd(bm, residuals, g):
#     return (____,)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def softmax_grad_kernel(y_ref, g_ref, dx_ref):
#     y, g = y_ref[...], g_ref[...]
#     dx_ref[...] = y * (g - (g * y).sum(axis=1, keepdims=True))
#
#
# def smooth_softmax_fwd(x, bm):
#     y = row_softmax(x, bm=bm)
#     return y, y
#
#
# def smooth_softmax_bwd(bm, residuals, g):
#     return (softmax_grad(residuals, g, bm=bm),)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** `jax.grad` now calls your backward kernel. You also chose the residual.
# With `x` instead of `y`, the backward pass would move the same bytes, but it would have to compute the softmax again.
# `y` was there anyway. And nobody built a matrix of 64 MiB.

# %% [markdown]
# ## Puzzle 7: LayerNorm, and what it leaves behind
#
# **Goal.** Normalise each row to mean 0 and variance 1, then scale and shift its columns:
# `(x - mean) * rstd * gamma + beta`, with `rstd = 1 / sqrt(variance + 1e-5)`. Also return `mean` and `rstd` of every
# row, for the backward pass.
#
# ### Theory
#
# The backward pass needs mean and rstd of every row. It could compute them again: two more reductions over 4096
# numbers, per row. But the forward kernel already has them and can store them: 8 bytes per row, beside the 16 KiB of
# the row itself.
#
# For that it needs more than one output. Pass **a list of outputs**: `out_specs` is a list of BlockSpecs, and
# `out_shape` is a list of shapes, in the same order. The kernel gets one Ref for each output, after those of the
# inputs. The call returns the results in that order. Each output has its own blocks and its own index map.
#
# ```text
#     x      (M, N)  --->  +----------+  --->  result  (M, N)
#     gamma  (1, N)  --->  |  kernel  |  --->  mean    (M, 1)
#     beta   (1, N)  --->  +----------+  --->  rstd    (M, 1)
# ```
#
# The variance of a row is the mean of `(x - mean)` squared. (You divide by N, not by N - 1.) The 1e-5 is inside the
# root. Without it, a row of equal numbers would be divided by zero.


# %%
def layer_norm_spec(
    x: Float32[Array, "M N"], gamma: Float32[Array, "1 N"], beta: Float32[Array, "1 N"]
) -> tuple[Float32[Array, "M N"], Float32[Array, "M 1"], Float32[Array, "M 1"]]:
    mean = x.mean(axis=1, keepdims=True)
    rstd = 1 / jnp.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    return (x - mean) * rstd * gamma + beta, mean, rstd


def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
    # x_ref, o_ref: (bm, N), whole rows      gamma_ref, beta_ref: (1, N)      mean_ref, rstd_ref: (bm, 1)
    # jax.lax.rsqrt(a) is 1 / jnp.sqrt(a)
    pass  # YOUR CODE HERE


def layer_norm_outputs(M, N, bm):
    # Return out_specs, out_shape: two lists of three, for the result (M, N), mean (M, 1) and rstd (M, 1), all float32.
    # The grid is (i,), one step for bm rows.
    pass  # YOUR CODE HERE


def layer_norm(
    x: Float32[Array, "M N"], gamma: Float32[Array, "1 N"], beta: Float32[Array, "1 N"], *, bm: int = 16
) -> tuple[Float32[Array, "M N"], Float32[Array, "M 1"], Float32[Array, "M 1"]]:
    M, N = x.shape
    out_specs, out_shape = layer_norm_outputs(M, N, bm)
    columns = pl.BlockSpec((1, N), lambda i: (0, 0))
    return pl.pallas_call(
        layer_norm_kernel,
        grid=(M // bm,),
        in_specs=[pl.BlockSpec((bm, N), lambda i: (i, 0)), columns, columns],
        out_specs=out_specs,
        out_shape=out_shape,
    )(x, gamma, beta)


# %%
# Budget for x (48, 384), gamma (1, 384), beta (1, 384): hbm_bytes=150_912, vmem_bytes=101_632, calls=1. hbm_bytes: x in
# and the result out (73,728 each), gamma and beta in (1,536 each), mean and rstd out (192 each).
check("softmax/7", layer_norm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the kernel, mind an old trap. On paper, the variance is the mean of the squares minus the square of the mean. With
# a mean of 100 and a variance of 1 that is 10,001 - 10,000, in a float32 that keeps seven digits. Which order of the
# two steps avoids that? For the lists: which of the three outputs has blocks like `x`? The other two have one number
# per row.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
#     x = x_ref[...]
#     mean = ____
#     centred = x - mean
#     rstd = jax.lax.rsqrt(____)
#     o_ref[...] = ____
#     ____
#     ____
#
#
# def layer_norm_outputs(M, N, bm):
#     column = pl.BlockSpec(____, lambda i: ____)
#     out_specs = [____, column, column]
#     out_shape = [jax.ShapeDtypeStruct(____, jnp.float32), ____, ____]
#     return out_specs, out_shape
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def layer_norm_kernel(x_ref, gamma_ref, beta_ref, o_ref, mean_ref, rstd_ref):
#     x = x_ref[...]
#     mean = x.mean(axis=1, keepdims=True)
#     centred = x - mean
#     rstd = jax.lax.rsqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5)
#     o_ref[...] = centred * rstd * gamma_ref[...] + beta_ref[...]
#     mean_ref[...] = mean
#     rstd_ref[...] = rstd
#
#
# def layer_norm_outputs(M, N, bm):
#     column = pl.BlockSpec((bm, 1), lambda i: (i, 0))
#     per_row = jax.ShapeDtypeStruct((M, 1), jnp.float32)
#     out_specs = [pl.BlockSpec((bm, N), lambda i: (i, 0)), column, column]
#     out_shape = [jax.ShapeDtypeStruct((M, N), jnp.float32), per_row, per_row]
#     return out_specs, out_shape
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A kernel may return as many results as it likes. Here `x` comes in once and the result goes out once.
# That is the least, and the two residuals add only a quarter of a percent to it. Puzzle 8 uses `mean` and `rstd`.

# %% [markdown]
# ## Puzzle 8: LayerNorm, backwards
#
# **Goal.** Compute the gradients of `x`, `gamma` and `beta`, in one kernel that reads `x` once.
#
# ### Theory
#
# Call the normalised row n = (x - mean) * rstd, and let `g` be the gradient that arrives. The result was n * gamma +
# beta. All rows share one `gamma` and one `beta`. So the chain rule makes their gradients sums over **all** rows. What
# is summed? That is yours to find. For `x` the calculation is longer, and here is its end:
#
# ```text
#     h      = g * gamma                                          (M, N), the gradient with respect to n
#     dx     = rstd * (h - mean of h - n * mean of (h * n))       (M, N), both means along the row
#     dgamma = sum over rows of ?                                 (1, N)
#     dbeta  = sum over rows of ?                                 (1, N)
# ```
#
# Add a number to all of a row of x, and n stays as it is. Multiply the row by a positive number, and n hardly changes
# (only the 1e-5 notices). So these two changes do not change the loss, and dx has no part along them. The formula
# subtracts the part of h that would shift it (the first mean) and the part that would stretch it (the second).
#
# In basics.py Puzzle 9 one output stayed while its sum grew. Now **outputs of one kernel move at different paces**. For
# each of the three, say which of its blocks is in VMEM at each step:
#
# ```text
#     step i       0     1     2
#     dx           ?     ?     ?
#     dgamma       ?     ?     ?
#     dbeta        ?     ?     ?
# ```
#
# One read of `x` and `g` serves all three. With three calls, `g` comes in three times. For 8192 x 8192 in float32 that
# is 512 MiB more.


# %%
def layer_norm_vjp_spec(
    x: Float32[Array, "M N"], gamma: Float32[Array, "1 N"], beta: Float32[Array, "1 N"], g: Float32[Array, "M N"]
) -> tuple[Float32[Array, "M N"], Float32[Array, "1 N"], Float32[Array, "1 N"]]:
    return jax.vjp(lambda *args: layer_norm_spec(*args)[0], x, gamma, beta)[1](g)


# %%
def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
    # x_ref, g_ref, dx_ref: (bm, N), whole rows      mean_ref, rstd_ref: (bm, 1)
    # gamma_ref, dgamma_ref, dbeta_ref: (1, N)
    pass  # YOUR CODE HERE


def layer_norm_grad_out_specs(N, bm):
    # Return a list of three BlockSpecs: for dx (M, N), dgamma (1, N), dbeta (1, N). The grid is (i,), bm rows a step.
    pass  # YOUR CODE HERE


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def smooth_layer_norm(x, gamma, beta, bm):
    return layer_norm(x, gamma, beta, bm=bm)[0]  # your own, from Puzzle 7


def smooth_layer_norm_fwd(x, gamma, beta, bm):
    result, mean, rstd = layer_norm(x, gamma, beta, bm=bm)
    return result, (x, gamma, mean, rstd)


def smooth_layer_norm_bwd(bm, residuals, g):
    x, gamma, mean, rstd = residuals
    M, N = x.shape
    rows, column = pl.BlockSpec((bm, N), lambda i: (i, 0)), pl.BlockSpec((bm, 1), lambda i: (i, 0))
    total = jax.ShapeDtypeStruct((1, N), jnp.float32)
    grads = pl.pallas_call(
        layer_norm_grad_kernel,
        grid=(M // bm,),
        in_specs=[rows, pl.BlockSpec((1, N), lambda i: (0, 0)), column, column, rows],
        out_specs=layer_norm_grad_out_specs(N, bm),
        out_shape=[jax.ShapeDtypeStruct((M, N), jnp.float32), total, total],
    )(x, gamma, mean, rstd, g)
    return tuple(grads)


smooth_layer_norm.defvjp(smooth_layer_norm_fwd, smooth_layer_norm_bwd)


def layer_norm_vjp(
    x: Float32[Array, "M N"],
    gamma: Float32[Array, "1 N"],
    beta: Float32[Array, "1 N"],
    g: Float32[Array, "M N"],
    *,
    bm: int = 16,
) -> tuple[Float32[Array, "M N"], Float32[Array, "1 N"], Float32[Array, "1 N"]]:
    return jax.vjp(lambda *args: smooth_layer_norm(*args, bm), x, gamma, beta)[1](g)


# %%
# Budget for x (48, 384), gamma (1, 384), beta (1, 384), g (48, 384): hbm_bytes=377_088, calls=2. hbm_bytes: 150,912 for
# the forward pass (Puzzle 7). The backward pass moves x, g and dx (73,728 each), gamma, dgamma and dbeta (1,536 each),
# mean and rstd (192 each). Your code may not call jax.vjp, jax.grad or anything like them.
check("softmax/8", layer_norm_vjp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two of the outputs start as garbage and are added to. What must happen before the first addition, and at which step?
# Compare the shapes (1, N) and (bm, 1): which axis does each sum or mean remove? For the two sums: one element of
# `beta` is added to one column, in every row. One element of `gamma` is multiplied into it. So what does the chain rule
# put beside `g`?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
#     @pl.when(____)
#     def _():
#         ____                      # two sums start
#
#     g = g_ref[...]
#     n = ____                      # (bm, N)
#     dgamma_ref[...] += ____       # (1, N)
#     dbeta_ref[...] += ____        # (1, N)
#     h = g * gamma_ref[...]
#     dx_ref[...] = ____            # two means along the row
#
#
# def layer_norm_grad_out_specs(N, bm):
#     total = pl.BlockSpec((1, N), lambda i: ____)
#     return [____, total, total]
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def layer_norm_grad_kernel(x_ref, gamma_ref, mean_ref, rstd_ref, g_ref, dx_ref, dgamma_ref, dbeta_ref):
#     @pl.when(pl.program_id(0) == 0)
#     def _():
#         dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)
#         dbeta_ref[...] = jnp.zeros(dbeta_ref.shape)
#
#     g = g_ref[...]
#     n = (x_ref[...] - mean_ref[...]) * rstd_ref[...]
#     dgamma_ref[...] += (g * n).sum(axis=0, keepdims=True)
#     dbeta_ref[...] += g.sum(axis=0, keepdims=True)
#     h = g * gamma_ref[...]
#     along = (h * n).mean(axis=1, keepdims=True)
#     dx_ref[...] = rstd_ref[...] * (h - h.mean(axis=1, keepdims=True) - n * along)
#
#
# def layer_norm_grad_out_specs(N, bm):
#     total = pl.BlockSpec((1, N), lambda i: (0, 0))
#     return [pl.BlockSpec((bm, N), lambda i: (i, 0)), total, total]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** LayerNorm now works in both directions, and `jax.grad` uses both of your kernels. A backward pass has to
# move at least `x` and `g` in, `dx` out, and a few small arrays. Yours moves exactly that. See how the last two outputs
# stay where they are:

# %%
show(layer_norm_vjp, normal((48, 384)), normal((1, 384)), normal((1, 384)), normal((48, 384)))

# %% [markdown]
# ## Puzzle 9: RMSNorm and the residual stream
#
# **Goal.** This is practice: there is nothing new here, and you write all of it. Add `r` to `x`, and normalise the sum:
# `h = x + r`, and `h * rstd * gamma` with `rstd = 1 / sqrt(mean of h squared + 1e-6)`. Return both, in bfloat16.
#
# ### Theory
#
# Most language models do this between their layers. A stream `x` runs through the whole model. Each layer adds its
# output `r` to it. The sum is the new stream, and its normalised copy is the input of the next layer. So both results
# are needed. (RMSNorm is LayerNorm without mean and shift.)
#
# ```text
#     x ----> (+) ----> h --------------------> h        on to the next sum
#              ^          \
#              r           +--> RMSNorm ------> result   into the next layer
# ```
#
# Two kernels move five arrays: three in the first, two in the second: `x` and `r` in, `h` out; then `h` in, the result
# out. How often with one kernel? With 8192 tokens of 8192 bfloat16, each array is 128 MiB, 0.16 ms at 820 GB/s.
#
# The dtypes are those of basics.py Puzzle 12: bfloat16 in memory, float32 in between, and one cast for each result at
# the very end.


# %%
def add_rms_norm_spec(
    x: BFloat16[Array, "M N"], r: BFloat16[Array, "M N"], gamma: Float[Array, "1 N"]
) -> tuple[BFloat16[Array, "M N"], BFloat16[Array, "M N"]]:
    h = x.astype(jnp.float32) + r.astype(jnp.float32)
    rstd = 1 / jnp.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
    return h.astype(jnp.bfloat16), (h * rstd * gamma).astype(jnp.bfloat16)


def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
    # x_ref, r_ref, h_ref, o_ref: (bm, N), bfloat16, whole rows      gamma_ref: (1, N), float32
    pass  # YOUR CODE HERE


def add_rms_norm(
    x: BFloat16[Array, "M N"], r: BFloat16[Array, "M N"], gamma: Float[Array, "1 N"], *, bm: int = 16
) -> tuple[BFloat16[Array, "M N"], BFloat16[Array, "M N"]]:
    # Return h and the normalised result, in this order, from one pallas_call with bm rows a step.
    pass  # YOUR CODE HERE


# %%
# Budget for x (64, 384), r (64, 384), gamma (1, 384): hbm_bytes=198_144, vmem_bytes=99_840, calls=1. hbm_bytes: four
# arrays of 49,152 bytes, and gamma (1,536). All arithmetic belongs in the kernel, the casts too.
check("softmax/9", add_rms_norm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from the call of Puzzle 7. Here two inputs and two outputs share the same blocks, and `gamma` is the odd one
# out. In the kernel, `h_ref` gets a rounded copy. Which `h` should the norm see: the one in memory, or the one you
# still hold? And which mean square does it need: that of `x`, of `r`, or of the sum?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
#     h = ____                       # float32
#     rstd = ____                    # (bm, 1)
#     h_ref[...] = ____
#     o_ref[...] = ____
#
#
# def add_rms_norm(x, r, gamma, *, bm=16):
#     M, N = x.shape
#     block = ____
#     return pl.pallas_call(
#         add_rms_norm_kernel,
#         grid=____,
#         in_specs=[block, block, ____],
#         out_specs=____,
#         out_shape=____,
#     )(x, r, gamma)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def add_rms_norm_kernel(x_ref, r_ref, gamma_ref, h_ref, o_ref):
#     h = x_ref[...].astype(jnp.float32) + r_ref[...].astype(jnp.float32)
#     rstd = jax.lax.rsqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
#     h_ref[...] = h.astype(h_ref.dtype)
#     o_ref[...] = (h * rstd * gamma_ref[...]).astype(o_ref.dtype)
#
#
# def add_rms_norm(x, r, gamma, *, bm=16):
#     M, N = x.shape
#     block = pl.BlockSpec((bm, N), lambda i: (i, 0))
#     shape = jax.ShapeDtypeStruct((M, N), x.dtype)
#     return pl.pallas_call(
#         add_rms_norm_kernel,
#         grid=(M // bm,),
#         in_specs=[block, block, pl.BlockSpec((1, N), lambda i: (0, 0))],
#         out_specs=[block, block],
#         out_shape=[shape, shape],
#     )(x, r, gamma)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Four trips instead of five save a fifth of the traffic, and a transformer does this twice in each layer.
# With two inputs and two results, four is the least.

# %% [markdown]
# ## Puzzle 10: The loss, with GPT-2's vocabulary
#
# **Goal.** Compute the cross-entropy of Puzzle 5 for bfloat16 scores and a vocabulary that the blocks do not divide.
# Write the kernel.
#
# ### Theory
#
# GPT-2 knows 50,257 tokens. In blocks of 128, that is 392 full blocks and 81 columns over. In blocks of 2048, 1105
# columns are over. So the last block hangs over the edge, and beyond the edge is garbage (basics.py Puzzle 8):
#
# ```text
#     1000 tokens, blocks of 256
#
#     j = 0        j = 1        j = 2        j = 3
#     +------------+------------+------------+---------+..+
#     |            |            |            |   232   |24:
#     +------------+------------+------------+---------+..+
#                                                       ? what should stand here
# ```
#
# In basics.py garbage went into a sum, and you replaced it by 0, which changes no sum. Here the same block enters a
# maximum *and* a sum of exponentials. A 0 would be a score like any other. In a row that lies below -50 it would be the
# largest, and exp(0) would drown every real score. **Replace the padding by a value that changes neither reduction.**
# Which value leaves a maximum alone, and becomes 0 under exp?
#
# The scores are bfloat16, with 8 significant bits. A bfloat16 minus a float32 is float32. To be safe, cast the scores
# to float32 as soon as you read them (`.astype(jnp.float32)`).


# %%
def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
    # x_ref: (bm, bn), bfloat16, block (i, j) of the scores      label_ref: (bm, 1), int32, below vocab
    # o_ref: (bm, 1), float32      m_ref, l_ref, t_ref: (bm, 1), float32, scratch      vocab: how many columns are real
    pass  # YOUR CODE HERE


def ragged_loss(
    x: BFloat16[Array, "M V"], labels: Int[Array, "M 1"], *, bm: int = 16, bn: int = 256
) -> Float[Array, "M 1"]:
    M, V = x.shape
    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        functools.partial(ragged_loss_kernel, vocab=V),
        grid=(M // bm, pl.cdiv(V, bn)),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j)), column],
        out_specs=column,
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)] * 3,
    )(x, labels)


# %%
# Budget for x (32, 1000), labels (32, 1): hbm_bytes=64_256, vmem_bytes=16_832, output_stores=1. hbm_bytes: the scores
# once, 2 bytes each (64,000), and 128 bytes each for labels and loss. Your code may not call jnp.take_along_axis.
check("softmax/10", ragged_loss)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from Puzzle 5. One line is new. It decides by position which scores are real, and it has to come before anything
# else: garbage that has gone through `exp` or a product is still garbage. Which positions does block `j` hold, and when
# is one of them real? As for the value: `start_statistics` knows it. Scores near -300 are among the cases, so keep the
# brackets of Puzzle 5.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
#     j = pl.program_id(1)
#     ____                                           # starting values
#
#     bn = x_ref.shape[1]
#     cols = ____
#     x = jnp.where(____, ____, ____)                # (bm, bn), float32
#     ____                                           # from here on it is Puzzle 5
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def ragged_loss_kernel(x_ref, label_ref, o_ref, m_ref, l_ref, t_ref, *, vocab):
#     j = pl.program_id(1)
#
#     @pl.when(j == 0)
#     def _():
#         start_statistics(m_ref, l_ref)
#         t_ref[...] = jnp.zeros(t_ref.shape)
#
#     bn = x_ref.shape[1]
#     cols = j * bn + jnp.arange(bn)[None, :]
#     x = jnp.where(cols < vocab, x_ref[...].astype(jnp.float32), -jnp.inf)
#     t_ref[...] += jnp.where(cols == label_ref[...], x, 0).sum(axis=1, keepdims=True)
#     update_statistics(m_ref, l_ref, x)
#
#     @pl.when(j == pl.num_programs(1) - 1)
#     def _():
#         o_ref[...] = jnp.log(l_ref[...]) - (t_ref[...] - m_ref[...])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Your loss takes any vocabulary and any magnitude. It moves half the bytes, and stores not one
# probability. For GPT-2 and 8192 tokens that is 785 MiB of scores, read once. Time to train something on it.


# %% [markdown]
# ## What you built
#
# You built softmax for rows too wide for one block, a loss that reads its scores once and writes none, LayerNorm in
# both directions, and RMSNorm with the residual stream. Here is the loss, at work on a vocabulary that the blocks do
# not divide:

# %%
show(ragged_loss, normal((32, 1000), "bfloat16"), integers((32, 1), 0, 1000))

# %% [markdown]
# So far you counted bytes. Now count time. `tpu_report` asks the TPU's own compiler, and needs no TPU. (If the compiler
# is missing, the report says what to install.) Here is Puzzle 4 on 1 GiB of scores: two reads and one write, 3 GiB.
#
# On a v5e the bytes alone take 3.93 ms. For the solution the compiler's estimate is 4.18 ms, so it runs at 94% of the
# best possible speed. The rest is the cost of its 1024 steps, 0.25 us each (basics.py Puzzle 4). With the blocks of the
# check, (8, 128), there are 524,288 steps, and the estimate is 167 ms: 131 ms of step cost, and 36 ms of instructions.
# The bytes are the same. In the report, a **bundle** is a group of instructions that start together, one group a cycle.

# %%
# simulate=False leaves out the cycle count of a simulator, which takes half a minute here.
tpu_report(wide_softmax, normal((8192, 32768)), bm=256, bn=2048, simulate=False)

# %% [markdown]
# These are the estimates for three of the solutions at real sizes, in ms. Beside each: what the bytes alone take.
#
# ```text
#                                                            v5e                  v6e
#     Puzzle  4   8192 x 32768 float32,  (256, 2048)    4.18 (bytes 3.93)    2.22 (bytes 1.96)
#     Puzzle 10   8192 x 50257 bfloat16, (256, 2048)    1.20 (bytes 1.00)    0.98 (bytes 0.50)
#     Puzzle  9   8192 x 8192  bfloat16, 64 rows        0.69 (bytes 0.65)    0.36 (bytes 0.33)
# ```
#
# In five of these six cases the copies set the time. The exception is Puzzle 10 on a v6e. On a v5e the instructions
# (0.91 ms) hide behind the copies (1.00 ms). On a v6e the copies take only 0.50 ms, so the instructions (0.78 ms) set
# the limit.
#
# The next cell asks for that report. It also lists three copies that XLA makes around the kernel, and its times leave
# them out. One of them copies the scores themselves: XLA has stored that array column by column, and the kernel wants
# rows. So all 785 MiB are read and written once more. Even a fast kernel has to wait for its input.

# %%
scores, labels = normal((8192, 50257), "bfloat16"), integers((8192, 1), 0, 50257)
tpu_report(ragged_loss, scores, labels, bm=256, bn=2048, tpu="v6e", simulate=False)

# %% [markdown]
# Now train something with them. The images are the digits of a pocket calculator: seven segments on 16 x 8 pixels,
# under a good deal of noise. The classifier is a matrix, your LayerNorm, a ReLU, another matrix, your loss. It is
# trained twice, from the same start on the same digits: with your kernels, and with plain `jnp`.


# %%
def noisy_digits(seed, count):
    """Images of digits (count, 128), and which digits they are (count, 1)."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((7, 16, 8), np.float32)
    boxes = [(1, 2, 2, 6), (2, 7, 6, 7), (9, 14, 6, 7), (14, 15, 2, 6), (9, 14, 1, 2), (2, 7, 1, 2), (7, 9, 2, 6)]
    for segment, (top, bottom, left, right) in zip(segments, boxes, strict=True):
        segment[top:bottom, left:right] = 1
    lit = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]  # 0 to 9
    clean = np.stack([sum(segments["abcdefg".index(s)] for s in letters) for letters in lit])
    labels = rng.integers(0, 10, (count, 1))
    images = clean[labels[:, 0]].reshape(count, 128) + 0.6 * rng.standard_normal((count, 128))
    return images.astype(np.float32), labels.astype(np.int32)


# %% [markdown]
# The gradient of the loss is given: it is the softmax, with 1 subtracted at the label. The softmax comes from your
# Puzzle 1.


# %%
@jax.custom_vjp
def your_loss(logits, labels):
    return ragged_loss(logits, labels, bm=logits.shape[0], bn=logits.shape[1])


def your_loss_fwd(logits, labels):
    return your_loss(logits, labels), (logits, labels)


def your_loss_bwd(residuals, g):
    logits, labels = residuals
    at_label = jnp.arange(logits.shape[1])[None, :] == labels
    return (row_softmax(logits, bm=logits.shape[0]) - at_label) * g, None  # labels are integers: no gradient


your_loss.defvjp(your_loss_fwd, your_loss_bwd)


def your_norm(x, gamma, beta):
    return smooth_layer_norm(x, gamma, beta, x.shape[0] // 2)


def plain_norm(x, gamma, beta):
    return layer_norm_spec(x, gamma, beta)[0]


# %%
def losses(norm, loss, num_steps=60):
    """The loss at every step of training, as a list."""
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.standard_normal((128, 128), np.float32) / 11,
        "gamma": np.ones((1, 128), np.float32),
        "beta": np.zeros((1, 128), np.float32),
        "w2": rng.standard_normal((128, 10), np.float32) / 11,
    }

    def mean_loss(params, images, labels):
        hidden = jax.nn.relu(norm(images @ params["w1"], params["gamma"], params["beta"]))
        return loss(hidden @ params["w2"], labels).mean()

    @jax.jit
    def train_step(params, images, labels):
        value, grads = jax.value_and_grad(mean_loss)(params, images, labels)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), value

    curve = []
    for step in range(num_steps):
        params, value = train_step(params, *noisy_digits(step, 64))
        curve.append(float(value))
    return curve


# %%
def draw_curves(curves):
    """One character per step and curve; where they meet, an =."""
    marks, high = {"yours": "o", "jnp": "x"}, max(map(max, curves.values()))
    rows = [[" "] * len(curves["jnp"]) for _ in range(16)]
    for name, curve in curves.items():
        for step, value in enumerate(curve):
            row = rows[15 - min(15, int(value / high * 15.99))]
            row[step] = marks[name] if row[step] == " " else "="
    for n, row in enumerate(rows):
        print(f"{high * (15 - n) / 15.99:5.2f} |{''.join(row)}")
    print("      +" + "-" * len(curves["jnp"]) + f"  step {len(curves['jnp'])}")
    print("      o your kernels   x jnp   = both")


# %%
to_write = unwritten(layer_norm_vjp) + unwritten(row_softmax) + unwritten(ragged_loss)
if to_write:
    print(f"Nothing to train with yet. Still to be written: {', '.join(to_write)}.")
else:
    curves = {"jnp": losses(plain_norm, cross_entropy_spec), "yours": losses(your_norm, your_loss)}
    draw_curves(curves)
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    first, *_, last = curves["yours"]
    print(f"\nFrom {first:.3f} to {last:.3f}; the two curves are never more than {apart:.1g} apart.")
    if apart > 0.01:
        print("They should be the same: check Puzzles 1, 7, 8 and 10 again.")

# %% [markdown]
# **Read next.** `_flash_attention_kernel_single_batch` in `jax.experimental.pallas.ops.tpu.flash_attention`, which
# ships with JAX. Its `m_scratch_ref`, `l_scratch_ref` and `alpha` are `m`, `l` and the rescaling of your Puzzle 3, over
# blocks of keys. A third buffer, `acc_scratch_ref`, is rescaled, too; it is divided by `l` at every block, and not once
# at the end. Another difference: there, `m` and `l` are 128 columns wide and hold each number 128 times. (Recall
# basics.py Puzzle 5: a block of (8, 1) still fills a whole 8 x 128 tile.)
#
# **Next notebook.** `matmul.py`: how large a tile should be, what the matrix unit wants, and how close to the roofline
# you can get.

# %%
progress()
