# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 9}
# ---

# %% [markdown]
# # GPU attention: flash attention on Hopper
#
# In flash_attention.py you wrote attention for a TPU. On a Hopper GPU the idea is the same. The work is different.
# Scores and probabilities live in registers. Copies, tensor cores and threads are three machines, and each should
# have work at all times. These puzzles build the kernel step by step: scores, online softmax, a producer with two
# consumers, and a schedule in which one warpgroup computes its softmax while the other one multiplies. Then you write
# what a server needs for a model that writes: groups of heads, one query against a long cache, a cache in pages. Then
# the backward pass, with which a small layer learns.
#
# You need flash_attention.py (Puzzles 1 to 6; for Puzzles 8 to 10c here, 7 to 11 and 13, too) and gpu_matmul.py
# (Puzzles 1 to 8; for Puzzle 11, 9 and 11, too). You need no GPU. Puzzles 1 to 7b here are the kernel. After them, 8 to
# 9b (serving), 10 to 10c (training) and 11 (choosing) can be done in any order, or left out. Up to Puzzle 8 all arrays
# are (head, token, D), where D is 64 or 128. A batch is more heads: `(B, H, S, D)` becomes `(B * H, S, D)`, and no byte
# moves.

# %%
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_puzzles import Curve, check, gpu_report, normal, progress, setup, show, unwritten

setup("gpu")  # a Hopper GPU if there is one, else this package's machine

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # gpu_matmul.py Puzzle 2

# %% [markdown]
# ## Puzzle 1: S = QK^T
#
# **Goal.** Compute the scores of 64 queries and `bkv` keys in each CTA: their dot products, divided by sqrt(D).
#
# ### Theory
#
# A score starts as the dot product of a query and a key, both rows of D values. A product `a @ b` takes rows of `a` and
# *columns* of `b`. So it needs the keys transposed:
#
# ```text
#                               k_smem.T (D, bkv)
#                             +-------------------+
#     q_smem (64, D)          |  keys as columns  |
#     +-------------+         +-------------------+
#     |   queries   |    @                             ->   scores (64, bkv), float32
#     +-------------+
# ```
#
# For 8192 tokens, transposing the keys of a head would read 2 MiB and write 2 MiB. Here it costs nothing. The tensor
# cores read `b` from SMEM through a description of how it lies there, and `k_smem.T` is another description of the same
# bytes. (wgmma reads values of 16 bits from SMEM by rows or by columns, for either operand.)
#
# `block_scores` returns scores without the scale. Puzzle 2 says why.
# `scores_kernel` scales: after the product, in float32. A scaled query would be rounded to bfloat16 once more.


# %%
def scores_spec(q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"]) -> Float[Array, "H Sq Skv"]:
    scale = q.shape[-1] ** -0.5
    return jnp.einsum("hqd,hkd->hqk", q.astype(jnp.float32), k.astype(jnp.float32)) * scale


def block_scores(q_smem, k_smem):
    # q_smem: (64, D)      k_smem: (bkv, D)      Return their dot products, not scaled: (64, bkv), float32.
    # gpu_matmul.py Puzzle 1: pl.run_scoped(multiply, plgpu.ACC(shape)) calls multiply(acc)
    pass  # YOUR CODE HERE


def scores_kernel(q_gmem, k_gmem, s_gmem, q_smem, k_smem, loaded, *, bkv):
    # q_gmem: (H, Sq, D)      k_gmem: (H, Skv, D)      s_gmem: (H, Sq, Skv), float32
    # q_smem: (64, D)         k_smem: (bkv, D)         loaded: a barrier of two arrivals
    # The names of the grid are "h", for a head each, "i", for 64 queries each, and "j", for bkv keys each.
    pass  # YOUR CODE HERE


def scores(q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], *, bkv: int = 128) -> Float[Array, "H Sq Skv"]:
    (H, Sq, D), Skv = q.shape, k.shape[1]
    return plgpu.kernel(
        functools.partial(scores_kernel, bkv=bkv),
        out_type=jax.ShapeDtypeStruct((H, Sq, Skv), jnp.float32),
        grid=(H, Sq // 64, Skv // bkv),
        grid_names=("h", "i", "j"),
        scratch_types=[
            plgpu.SMEM((64, D), q.dtype, transforms=SWIZZLED),
            plgpu.SMEM((bkv, D), k.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(q, k)


# %%
# Budget for q (2, 128, 128), k (2, 384, 128): gmem_bytes=983_040, ctas=12. Twelve CTAs copy 16 KiB of queries and
# 32 KiB of keys each, and store 32 KiB of scores.
check("gpu_attention/1", scores)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# gpu_matmul.py Puzzle 1 has the same five steps: two copies, one wait, one product, one store. New are the indices and
# one letter. Which head, which queries and which keys does this CTA need? With 128 keys of 128 values the product also
# works without the transpose. What would it multiply then?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def block_scores(q_smem, k_smem):
#     def multiply(acc):
#         plgpu.wgmma(acc, ____, ____)
#         return acc[...]
#
#     return pl.run_scoped(multiply, plgpu.ACC(____))
#
#
# def scores_kernel(q_gmem, k_gmem, s_gmem, q_smem, k_smem, loaded, *, bkv):
#     h, rows, keys = lax.axis_index("h"), pl.ds(____, 64), pl.ds(____, bkv)
#     plgpu.copy_gmem_to_smem(q_gmem.at[____], q_smem, loaded)
#     plgpu.copy_gmem_to_smem(k_gmem.at[____], k_smem, loaded)
#     plgpu.barrier_wait(loaded)
#     s_gmem[____] = block_scores(q_smem, k_smem) * ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def block_scores(q_smem, k_smem):
#     def multiply(acc):
#         plgpu.wgmma(acc, q_smem, k_smem.T)
#         return acc[...]
#
#     return pl.run_scoped(multiply, plgpu.ACC((q_smem.shape[0], k_smem.shape[0])))
#
#
# def scores_kernel(q_gmem, k_gmem, s_gmem, q_smem, k_smem, loaded, *, bkv):
#     h, rows, keys = lax.axis_index("h"), pl.ds(lax.axis_index("i") * 64, 64), pl.ds(lax.axis_index("j") * bkv, bkv)
#     plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], q_smem, loaded)
#     plgpu.copy_gmem_to_smem(k_gmem.at[h, keys], k_smem, loaded)
#     plgpu.barrier_wait(loaded)
#     s_gmem[h, rows, keys] = block_scores(q_smem, k_smem) * q_gmem.shape[2] ** -0.5
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One letter, `.T`, and no data moves. But look at the budget: of 960 KiB, 384 KiB are scores. For 8192
# tokens it is 256 MiB a head. From here on, no score leaves the registers.

# %% [markdown]
# ## Worked example: a number for each row
#
# A row of an accumulator is spread over four threads. A reduction along the row leaves its result in all four of them:
#
# ```text
#     s (64, 128), Layout.WGMMA                        s.max(axis=1): (64,), Layout.WGMMA.reduce(1)
#
#     row 0   | t0 t0 t1 t1 t2 t2 t3 t3 | t0 t0 ...    | t0 t1 t2 t3 |    the same number in four threads
#     row 1   | t4 t4 t5 t5 t6 t6 t7 t7 | t4 t4 ...    | t4 t5 t6 t7 |
# ```
#
# So every thread that holds scores of a row also holds the row's number. `lax.broadcast_in_dim(m, s.shape, (0,))` gives
# each score the number of its row, as `m[:, None]` does, and moves nothing. `(0,)` says which dimension of the result
# `m` runs along. Numbers that you make yourself have no layout yet: `plgpu.layout_cast` gives them the one of a
# reduction.
#
# This kernel subtracts from each score the larger of two numbers: 100, and the maximum of its row.


# %%
def column(value):
    # (64,), float32, the same number for each row of an accumulator. Layout.WGMMA.reduce(1) is the layout that a
    # reduction along axis 1 leaves.
    return plgpu.layout_cast(jnp.full((64,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def below_kernel(s_gmem, o_gmem, s_smem, loaded):
    plgpu.copy_gmem_to_smem(s_gmem, s_smem, loaded)
    plgpu.barrier_wait(loaded)
    s = plgpu.load(s_smem, layout=plgpu.Layout.WGMMA)
    m = jnp.maximum(column(100), s.max(axis=1))  # (64,)
    o_gmem[...] = s - lax.broadcast_in_dim(m, s.shape, (0,))


def below(s: Float[Array, "64 N"]) -> Float[Array, "64 N"]:
    return plgpu.kernel(below_kernel, out_type=s, scratch_types=[plgpu.SMEM(s.shape, s.dtype), plgpu.Barrier()])(s)


# Try it: take column(0) instead of column(100), and run this cell again.
print(below(jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8))[::9])

# %% [markdown]
# ## Puzzle 2: Online softmax in registers
#
# **Goal.** Take one block of scores into the running maximum and the running sum of each row. The kernel around it
# walks over all keys, and stores the logarithm of the sum. To check your `p` and `alpha`, the kernel makes the same sum
# once more from these two, and stores its logarithm, too.
#
# ### Theory
#
# You know the online softmax from softmax.py and flash_attention.py: keep a maximum `m` and a sum `l` for each row, and
# rescale the sum when the maximum grows. Both are a number for each row now, as in the worked example.
#
# As in flash_attention.py, powers are of two: the chip has an instruction for 2^x and none for e^x. New is
# that the scores come unscaled, as `block_scores` leaves them. Their scale and log2(e) are one factor:
#
# ```text
#     exp(s * scale - max)  =  exp2(s * c - m)      c = scale * log2(e)      m = the maximum of s * c, not of s
# ```
#
# And `s * c - m` is one instruction: a multiply-add.


# %%
LOG2E = math.log2(math.e)


def nothing_yet():
    # given: m and l before the first block. The smallest float, as -inf - -inf would be NaN.
    return column(float(jnp.finfo(jnp.float32).min)), column(0)


# %%
def sums_spec(q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"]) -> Float[Array, "2 H Sq"]:
    logarithms = jax.scipy.special.logsumexp(scores_spec(q, k), axis=2)
    return jnp.stack([logarithms, logarithms])  # of your l, and of a sum that the kernel makes with your p and alpha


def online(s, c, m, l):
    # s: (64, bkv), float32: products that are not scaled      c: a number, the scale times log2(e)
    # m: (64,), the maximum of s * c so far      l: (64,), the sum so far of 2 ** (s * c - m)
    # Return p, alpha, m, l:  p: (64, bkv), 2 ** (s * c - m) with the new m      alpha: (64,), what old sums are to be
    # multiplied by      m, l: the new ones.
    pass  # YOUR CODE HERE


# %%
def sums_kernel(q_gmem, k_gmem, o_gmem, q_smem, k_smem, loaded, *, bkv):
    h, rows = lax.axis_index("h"), pl.ds(lax.axis_index("i") * 64, 64)
    c = q_gmem.shape[2] ** -0.5 * LOG2E
    plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], q_smem, loaded)
    plgpu.barrier_wait(loaded)

    def step(j, state):
        plgpu.copy_gmem_to_smem(k_gmem.at[h, pl.ds(j * bkv, bkv)], k_smem, loaded)
        plgpu.barrier_wait(loaded)
        m, l, same = state
        p, alpha, m, l = online(block_scores(q_smem, k_smem), c, m, l)
        return m, l, same * alpha + p.sum(axis=1)

    m, l, same = lax.fori_loop(0, k_gmem.shape[1] // bkv, step, (*nothing_yet(), column(0)))
    o_gmem[0, h, rows] = (m + jnp.log2(l)) / LOG2E
    o_gmem[1, h, rows] = (m + jnp.log2(same)) / LOG2E


def sums(q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], *, bkv: int = 128) -> Float[Array, "2 H Sq"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        functools.partial(sums_kernel, bkv=bkv),
        out_type=jax.ShapeDtypeStruct((2, H, Sq), jnp.float32),
        grid=(H, Sq // 64),
        grid_names=("h", "i"),
        scratch_types=[
            plgpu.SMEM((64, D), q.dtype, transforms=SWIZZLED),
            plgpu.SMEM((bkv, D), k.dtype, transforms=SWIZZLED),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),  # exp2 in one instruction
    )(q, k)


# %%
# Inputs: q (2, 128, 128), k (2, 384, 128). A variant has scores of up to 700, where e^x is too large for a float32.
check("gpu_attention/2", sums)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with the new maximum of a row: the larger one of the old one and of the block's. Is the block's maximum one of
# `s`, or one of `s * c`? Everything that was summed with the old `m` is 2^(something - m). What is it to be multiplied
# by, so that it is 2^(something - new m)? For a row without any key so far, that number has to be 0 or harmless.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def online(s, c, m, l):
#     new = jnp.maximum(m, ____)
#     p = jnp.exp2(____ - lax.broadcast_in_dim(____, s.shape, ____))
#     alpha = jnp.exp2(____)
#     return p, alpha, new, ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def online(s, c, m, l):
#     new = jnp.maximum(m, s.max(axis=1) * c)
#     p = jnp.exp2(s * c - lax.broadcast_in_dim(new, s.shape, (0,)))
#     alpha = jnp.exp2(m - new)
#     return p, alpha, new, l * alpha + p.sum(axis=1)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Two numbers a row, in registers, and 64 x 128 scores that are gone after four lines. An SM computes 16
# values of exp2 in a cycle, and 4096 FLOPs in its tensor cores. For D = 128, the exp2 of a block takes as long as each
# of the two products. Keep that in mind until Puzzle 6.

# %% [markdown]
# ## Worked example: an accumulator that you can write
#
# `acc[...]` waits until all products that you have started are over. `wgmma` then adds to whatever `acc` holds. In
# gpu_matmul.py that was zero, or the products before. But you can also write it: `acc[...] = acc[...] * 2` stores into
# the accumulator, as into any other Ref. This kernel doubles a product, and adds the same product once more:
#
# ```text
#     wgmma                    acc = a @ b
#     acc[...] = acc[...] * 2  acc = 2 * (a @ b)
#     wgmma                    acc = 2 * (a @ b) + a @ b
# ```


# %%
def three_times_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
    plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
    plgpu.barrier_wait(loaded)

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        acc[...] = acc[...] * 2
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 128)))


def three_times(a: Float[Array, "64 64"], b: Float[Array, "64 128"]) -> Float[Array, "64 128"]:
    return plgpu.kernel(
        three_times_kernel,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((64, 128), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)


print(three_times(jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16))[0, :4], "= 3 * 64")

# %% [markdown]
# ## Puzzle 3: P from registers
#
# **Goal.** Attention: weigh the values with the probabilities, without writing them anywhere.
#
# ### Theory
#
# For 8192 tokens and one head, naive attention has 268 MB of scores in float32 and 134 MB of probabilities in bfloat16.
# Each is written once and read once: 0.8 GB.
#
# The second product is `p @ v`. `p` comes out of Puzzle 2 in registers, 64 rows of it. Must it go to SMEM, as wgmma
# reads SMEM? No: the *left* operand of wgmma may be an array in registers.
#
# ```text
#     q_smem  k_smem.T        SMEM   x SMEM   ->  s    in registers
#             online                               |
#                                                  v
#     p       v_smem          registers x SMEM ->  acc in registers
# ```
#
# As an operand, `p` needs the dtype of `v`: 16 bits. So the weights are rounded, and their sum `l` is not.
#
# `acc` is an accumulator that lives as long as the kernel's loop. Two functions are yours: what happens to `acc` at
# each block, and what comes out at the end.


# %%
def attention_spec(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"]
) -> Float[Array, "H Sq D"]:
    p = jax.nn.softmax(scores_spec(q, k), axis=2)
    return jnp.einsum("hqk,hkd->hqd", p, v.astype(jnp.float32)).astype(v.dtype)


def weigh(acc, p, alpha, v_smem):
    # acc: an accumulator, (64, D), of what was weighed before      p: (64, bkv), float32      alpha: (64,)
    # v_smem: (bkv, D)      Rescale acc, and add the product of p and the values. Return when the product is over.
    pass  # YOUR CODE HERE


def finish(acc, l):
    # l: (64,), the sum of each row      Return the mean of the values, weighted by the softmax: (64, D), float32.
    pass  # YOUR CODE HERE


# %%
def store_rows(o, o_part, smem):
    # given: stores o, (64, D), in o_part, in GMEM, by way of smem: the queries' SMEM, which nobody needs any more
    smem[...] = o.astype(smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o_part)
    plgpu.wait_smem_to_gmem(0)


def attend_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, *, bkv):
    h, rows = lax.axis_index("h"), pl.ds(lax.axis_index("i") * 64, 64)
    c = q_gmem.shape[2] ** -0.5 * LOG2E

    def loop(acc):
        def step(j, state):
            block = pl.ds(j * bkv, bkv)
            plgpu.copy_gmem_to_smem(k_gmem.at[h, block], k_smem, loaded.at[0])
            plgpu.copy_gmem_to_smem(v_gmem.at[h, block], v_smem, loaded.at[1])
            plgpu.barrier_wait(loaded.at[0])
            p, alpha, m, l = online(block_scores(q_smem, k_smem), c, *state)
            plgpu.barrier_wait(loaded.at[1])
            weigh(acc, p, alpha, v_smem)
            return m, l

        _, l = lax.fori_loop(0, k_gmem.shape[1] // bkv, step, nothing_yet())
        return finish(acc, l)

    plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], q_smem, loaded.at[0])
    plgpu.barrier_wait(loaded.at[0])
    store_rows(pl.run_scoped(loop, plgpu.ACC((64, q_gmem.shape[2]))), o_gmem.at[h, rows], q_smem)


# %%
def attend(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    block = plgpu.SMEM((bkv, D), k.dtype, transforms=SWIZZLED)
    return plgpu.kernel(
        functools.partial(attend_kernel, bkv=bkv),
        out_type=q,
        grid=(H, Sq // 64),
        grid_names=("h", "i"),
        scratch_types=[plgpu.SMEM((64, D), q.dtype, transforms=SWIZZLED), block, block, plgpu.Barrier(num_barriers=2)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (2, 128, 128), k (2, 384, 128), v (2, 384, 128): gmem_bytes=917_504, copies=28, smem_bytes=82_000. No
# byte is for probabilities, in GMEM or in SMEM.
check("gpu_attention/3", attend)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What is in `acc` was weighed with the old maximum. Puzzle 2 gave you the number that mends it, one for each row, and
# the way to give it to a whole row. Then the product: what is its left operand, and in which dtype? For `finish`: the
# weights in `acc` are not divided by their sum yet. 64 divisions are cheaper than 64 x 128.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def weigh(acc, p, alpha, v_smem):
#     acc[...] = acc[...] * lax.broadcast_in_dim(____, acc.shape, ____)
#     plgpu.wgmma(acc, ____, v_smem)
#     ____
#
#
# def finish(acc, l):
#     return acc[...] * lax.broadcast_in_dim(____, acc.shape, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def weigh(acc, p, alpha, v_smem):
#     acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
#     plgpu.wgmma(acc, p.astype(v_smem.dtype), v_smem)
#     plgpu.wgmma_wait(0)
#
#
# def finish(acc, l):
#     return acc[...] * lax.broadcast_in_dim(1 / l, acc.shape, (0,))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The scores never exist in memory, nor do the probabilities. This is flash attention. It is not fast yet:
# see who waits for whom. (JAX's own simulator has no stores into accumulators. So from here on most verdicts say that
# it could not confirm the values. That is no doubt about your answer.) (`l2=True`: copies come out of L2 and not out of
# HBM, as if another CTA of the same head had just read the block. Where checks of later puzzles count cycles, they
# assume it, too.)

# %%
show(attend, *(normal((1, tokens, 128), "bfloat16") for tokens in (64, 512, 512)), l2=True)

# %% [markdown]
# ## Puzzle 4: Slots for K and V
#
# **Goal.** Give K and V slots of their own, so that blocks come in while threads and tensor cores work.
#
# ### Theory
#
# In the picture above everything waits for the copies. gpu_matmul.py Puzzle 3 had an answer: slots, and copies that are
# started early. There both tiles of a step arrived at one barrier. Here they are needed at different times, and they
# are free at different times:
#
# ```text
#     threads, tensor cores   | QK^T | softmax | PV |
#     k slot                  |######|--- block j + slots comes in ---
#     v slot                  |###########################|--- block j + slots comes in ---
# ```
#
# The scores need K alone. After them the slot of K is free, half a step before that of V. So K and V have slots and
# barriers of their own, and you wait for each where it is needed, and refill each where it becomes free.
#
# When is a slot free? When no product reads it any more. `block_scores` and `weigh` both return after their products
# are over.
#
# `k` and `v` are each a `Stream`: slots in SMEM, and a barrier for each slot. `load_block` is given.


# %%
class Stream(NamedTuple):
    """What comes in block by block."""

    smem: Any  # (slots, bkv, D)
    full: Any  # a barrier for each slot: its block is there
    empty: Any = None  # a barrier for each slot: it may be filled again (from Puzzle 5 on)


def load_block(j, part, stream):
    # given: starts the copy of block j of part, (Skv, D) in GMEM, into its slot
    slots, bkv = stream.smem.shape[:2]
    slot = lax.rem(j, slots)
    plgpu.copy_gmem_to_smem(part.at[pl.ds(j * bkv, bkv)], stream.smem.at[slot], stream.full.at[slot])


# %%
def slots_step(j, steps, c, m, l, acc, q_smem, k_part, v_part, k, v):
    # j: this step, traced      steps: how many there are      c, m, l: Puzzle 2      acc: (64, D), Puzzle 3
    # k_part, v_part: (Skv, D), in GMEM      k, v: Streams. The first blocks, one for each slot, are on their way.
    # Take block j into acc, and start the copies of block j + slots, if there is one. Return the new m and l.
    pass  # YOUR CODE HERE


# %%
def slots_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, k_full, v_full):
    h, rows = lax.axis_index("h"), pl.ds(lax.axis_index("i") * 64, 64)
    c, k_part, v_part = q_gmem.shape[2] ** -0.5 * LOG2E, k_gmem.at[h], v_gmem.at[h]
    k, v = Stream(k_smem, k_full), Stream(v_smem, v_full)
    slots, bkv, D = k_smem.shape
    steps = k_gmem.shape[1] // bkv
    plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], q_smem, loaded)
    for j in range(min(slots, steps)):
        load_block(j, k_part, k)
        load_block(j, v_part, v)
    plgpu.barrier_wait(loaded)

    def loop(acc):
        def step(j, state):
            return slots_step(j, steps, c, *state, acc, q_smem, k_part, v_part, k, v)

        _, l = lax.fori_loop(0, steps, step, nothing_yet())
        return finish(acc, l)

    store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, rows], q_smem)


def slotted(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 64, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    blocks = plgpu.SMEM((slots, bkv, D), k.dtype, transforms=SWIZZLED)
    full = plgpu.Barrier(num_barriers=slots)
    return plgpu.kernel(
        slots_kernel,
        out_type=q,
        grid=(H, Sq // 64),
        grid_names=("h", "i"),
        scratch_types=[
            plgpu.SMEM((64, D), q.dtype, transforms=SWIZZLED),
            *(blocks, blocks, plgpu.Barrier(), full, full),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (1, 128, 128), k (1, 640, 128), v (1, 640, 128): copies=42, waited=16_200. waited: cycles that the
# warpgroups wait. If you wait for V before the scores, they wait for 17,630. A case with a single slot has
# waited=27_000. If K's slot is refilled after the softmax, they wait for 29,962 there.
check("gpu_attention/4", slotted)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the line of a step: QK^T, softmax, PV. Before which of the three do you need K, and before which V? After which
# of them is each slot free? Now put two waits and two refills into the line. Block `j + slots` lies in the slot of
# block `j`, and exists only if it is smaller than `steps`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def slots_step(j, steps, c, m, l, acc, q_smem, k_part, v_part, k, v):
#     slots = k.smem.shape[0]
#     slot = lax.rem(j, slots)
#     plgpu.barrier_wait(____)
#     s = block_scores(q_smem, ____)
#
#     @pl.when(____)
#     def _():
#         load_block(____, k_part, k)
#
#     p, alpha, m, l = online(s, c, m, l)
#     ____
#     weigh(acc, p, alpha, ____)
#
#     @pl.when(____)
#     def _():
#         load_block(____, v_part, v)
#
#     return m, l
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def slots_step(j, steps, c, m, l, acc, q_smem, k_part, v_part, k, v):
#     slots = k.smem.shape[0]
#     slot = lax.rem(j, slots)
#     plgpu.barrier_wait(k.full.at[slot])
#     s = block_scores(q_smem, k.smem.at[slot])
#
#     @pl.when(j + slots < steps)
#     def _():
#         load_block(j + slots, k_part, k)
#
#     p, alpha, m, l = online(s, c, m, l)
#     plgpu.barrier_wait(v.full.at[slot])
#     weigh(acc, p, alpha, v.smem.at[slot])
#
#     @pl.when(j + slots < steps)
#     def _():
#         load_block(j + slots, v_part, v)
#
#     return m, l
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The copies are out of the way. What is left is one line of work: scores, softmax, values, scores. While
# the threads compute, the tensor cores wait, and the other way round. One warpgroup cannot be in two places. So take
# two.

# %%
show(slotted, *(normal((1, tokens, 128), "bfloat16") for tokens in (64, 512, 512)), l2=True)

# %% [markdown]
# ## Puzzle 5: Two warpgroups and a producer
#
# **Goal.** Two warpgroups take 64 queries each and share the keys and values, through a few slots. A third one brings
# them. Write one step of each.
#
# ### Theory
#
# A block of K and one of V are 64 KiB for 128 keys. With 64 queries in a CTA, that is 64 FLOPs for each byte. With 128
# queries it is 128. Two warpgroups also have twice the registers: each has its own `m`, `l`, `acc` and `p`.
#
# The producer and the barriers are those of gpu_matmul.py Puzzle 5. There, too, a slot was empty when *both* warpgroups
# had given it back: `empty` needs two arrivals. Two things differ. One copy fills a slot, so `full` needs one arrival.
# And K and V are streams of their own, each with its `full` and its `empty`.
#
# ```text
#     producer      | K j | V j | K j+1 | V j+1 | ...       waits for empty, then starts a copy
#     warpgroup 0      | QK^T | softmax | PV | QK^T | ...   waits for full, arrives at empty
#     warpgroup 1      | QK^T | softmax | PV | QK^T | ...
# ```
#
# You found out in Puzzle 4 when a slot of each is free.
#
# The consumers get 232 registers for each thread: 64 for `acc`, 64 for the scores, and 32 for the bfloat16
# probabilities.


# %%
def produce(j, part, stream):
    # j: this step, traced      part: (Skv, D), in GMEM: all keys or all values of this head
    # stream: a Stream of K or V, with `empty`      Start the copy of block j as soon as its slot is free.
    pass  # YOUR CODE HERE


def consume(j, c, m, l, acc, q_smem, k, v):
    # q_smem: (64, D), your queries      k, v: Streams, which both warpgroups read      the rest: Puzzle 4
    # Take block j into acc, and give back each slot as soon as you are done with it. Return the new m and l.
    pass  # YOUR CODE HERE


# %%
def shared_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, k_full, v_full, k_empty, v_empty):
    wg, h, i = lax.axis_index("wg"), lax.axis_index("h"), lax.axis_index("i")
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    steps, D = k_gmem.shape[1] // k_smem.shape[1], q_gmem.shape[2]

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[h], k)
            produce(j, v_gmem.at[h], v)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine, rows = q_smem.at[wg], pl.ds(i * 128 + wg * 64, 64)
        plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], mine, loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            def step(j, state):
                return consume(j, D**-0.5 * LOG2E, *state, acc, mine, k, v)

            _, l = lax.fori_loop(0, steps, step, nothing_yet())
            return finish(acc, l)

        store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, rows], mine)


# %%
def scratch_of(D, dtype, bkv, slots):
    # given: SMEM for two tiles of queries, slots for K and V, and the barriers of all of them
    blocks = plgpu.SMEM((slots, bkv, D), dtype, transforms=SWIZZLED)
    full, empty = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_barriers=slots, num_arrivals=2)
    queries = plgpu.SMEM((2, 64, D), dtype, transforms=SWIZZLED)
    return [queries, blocks, blocks, plgpu.Barrier(num_barriers=2), full, full, empty, empty]


def shared(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        shared_kernel,
        out_type=q,
        grid=(H, Sq // 128),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_of(D, q.dtype, bkv, slots),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (2, 128, 128), k (2, 640, 128), v (2, 640, 128): gmem_bytes=786_432, copies=24. Both warpgroups read the
# same ten blocks of a head. A case with a single slot has tensor_idle=18_000: cycles in which the tensor cores have
# nothing to do. If K's slot is given back after the softmax, there are 19,973 of them, and after PV 28,165. One with
# three slots has tensor_idle=12_000.
check("gpu_attention/5", shared)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `produce` is the one of gpu_matmul.py Puzzle 5, with one copy instead of two. At the start all slots are empty, and
# nobody has said so. `consume` is Puzzle 4 without its refills. Where a refill was, the slot is free. Whom do you have
# to tell, and at which barrier?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def produce(j, part, stream):
#     slots = stream.smem.shape[0]
#
#     @pl.when(____)
#     def _():
#         plgpu.barrier_wait(____)
#
#     load_block(j, part, stream)
#
#
# def consume(j, c, m, l, acc, q_smem, k, v):
#     slot = lax.rem(j, k.smem.shape[0])
#     plgpu.barrier_wait(____)
#     s = block_scores(q_smem, k.smem.at[slot])
#     ____
#     p, alpha, m, l = online(s, c, m, l)
#     plgpu.barrier_wait(____)
#     weigh(acc, p, alpha, v.smem.at[slot])
#     ____
#     return m, l
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def produce(j, part, stream):
#     slots = stream.smem.shape[0]
#
#     @pl.when(j >= slots)
#     def _():
#         plgpu.barrier_wait(stream.empty.at[lax.rem(j, slots)])
#
#     load_block(j, part, stream)
#
#
# def consume(j, c, m, l, acc, q_smem, k, v):
#     slot = lax.rem(j, k.smem.shape[0])
#     plgpu.barrier_wait(k.full.at[slot])
#     s = block_scores(q_smem, k.smem.at[slot])
#     plgpu.barrier_arrive(k.empty.at[slot])
#     p, alpha, m, l = online(s, c, m, l)
#     plgpu.barrier_wait(v.full.at[slot])
#     weigh(acc, p, alpha, v.smem.at[slot])
#     plgpu.barrier_arrive(v.empty.at[slot])
#     return m, l
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Each block of K and V is read once for 128 queries. Two warpgroups could cover for each other now: one
# could multiply while the other one computes its softmax. Look at the picture. Do they?

# %%
show(shared, *(normal((1, tokens, 128), "bfloat16") for tokens in (128, 640, 640)), l2=True)

# %% [markdown]
# ## Puzzle 6: Ping-pong
#
# **Goal.** Make the warpgroups take turns at the tensor cores: while one of them computes its softmax, the other one
# multiplies.
#
# ### Theory
#
# In the picture above both warpgroups start their products together, and the tensor cores do an instruction of one,
# then one of the other. So both end together, too. Then both compute, and the tensor cores idle. Nothing pushes them
# apart. You do it, with two barriers of one arrival, `turns.at[0]` and `turns.at[1]`:
#
# ```text
#     warpgroup 0   |QK| softmax | PV |QK| softmax | PV |QK| softmax
#     warpgroup 1   wait  |QK| softmax | PV |QK| softmax | PV |QK|
#     tensor cores  | 0| | 1|    |  0    |  1      |  0    |  1    |
# ```
#
# A **turn** is PV of one step and QK^T of the next. It begins with a wait for your own barrier, and it ends with an
# arrival at the other one's. Arrive when your QK^T has been *started*: then the other one's products can be queued
# behind yours. (If you wait for its result first, an H200 is 2% slower. This package's machine errs here: it counts
# 5,434 idle cycles then, and 6,894 in the order above. Puzzle 6b starts from these 6,894.)
#
# That leaves two ends. Warpgroup 0 begins at once, warpgroup 1 waits for a turn first. And when the loop is over, is
# somebody waiting for a turn that nobody gives?


# %%
def first_turn(wg, turns):
    # wg: 0 or 1, traced: your number      turns: a barrier of one arrival for each warpgroup
    # What a warpgroup does before its first QK^T. Warpgroup 0 does nothing.
    pass  # YOUR CODE HERE


def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
    # Puzzle 5's consume. Start QK^T, give the turn away, and then wait for the result. Wait for your next turn just
    # before PV.
    pass  # YOUR CODE HERE


def last_turn(wg, turns):
    # What comes after the last PV.
    pass  # YOUR CODE HERE


# %%
def ping_pong_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, *barriers):
    k_full, v_full, k_empty, v_empty, turns = barriers
    wg, h, i = lax.axis_index("wg"), lax.axis_index("h"), lax.axis_index("i")
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    steps, D = k_gmem.shape[1] // k_smem.shape[1], q_gmem.shape[2]

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[h], k)
            produce(j, v_gmem.at[h], v)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine, rows = q_smem.at[wg], pl.ds(i * 128 + wg * 64, 64)
        plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], mine, loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            def step(j, state):
                return ping_pong(j, D**-0.5 * LOG2E, *state, acc, mine, k, v, wg, turns)

            first_turn(wg, turns)
            _, l = lax.fori_loop(0, steps, step, nothing_yet())
            last_turn(wg, turns)
            return finish(acc, l)

        store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, rows], mine)


# %%
def flash(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        ping_pong_kernel,
        out_type=q,
        grid=(H, Sq // 128),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[*scratch_of(D, q.dtype, bkv, slots), plgpu.Barrier(num_barriers=2)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (1, 128, 128), k (1, 1280, 128), v (1, 1280, 128): tensor_idle=8_000. tensor_idle: cycles in which the
# tensor cores have nothing to do. Puzzle 5's kernel has 11,794 of them.
check("gpu_attention/6", flash)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Count. In a loop of n steps, how often does a warpgroup wait for its turn, and how often does it give one away? Each
# wait of warpgroup 1 needs an arrival of warpgroup 0, and it has one wait more. For the step: which two lines of
# `block_scores` does your arrival belong between?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def first_turn(wg, turns):
#     @pl.when(wg == ____)
#     def _():
#         ____
#
#
# def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
#     slot = lax.rem(j, k.smem.shape[0])
#     plgpu.barrier_wait(k.full.at[slot])
#
#     def multiply(s_acc):
#         plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
#         ____
#         return s_acc[...]
#
#     s = pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
#     plgpu.barrier_arrive(k.empty.at[slot])
#     p, alpha, m, l = online(s, c, m, l)
#     plgpu.barrier_wait(v.full.at[slot])
#     ____
#     weigh(acc, p, alpha, v.smem.at[slot])
#     plgpu.barrier_arrive(v.empty.at[slot])
#     return m, l
#
#
# def last_turn(wg, turns):
#     @pl.when(wg == ____)
#     def _():
#         ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def first_turn(wg, turns):
#     @pl.when(wg == 1)
#     def _():
#         plgpu.barrier_wait(turns.at[1])
#
#
# def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
#     slot = lax.rem(j, k.smem.shape[0])
#     plgpu.barrier_wait(k.full.at[slot])
#
#     def multiply(s_acc):
#         plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
#         plgpu.barrier_arrive(turns.at[1 - wg])
#         return s_acc[...]
#
#     s = pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
#     plgpu.barrier_arrive(k.empty.at[slot])
#     p, alpha, m, l = online(s, c, m, l)
#     plgpu.barrier_wait(v.full.at[slot])
#     plgpu.barrier_wait(turns.at[wg])
#     weigh(acc, p, alpha, v.smem.at[slot])
#     plgpu.barrier_arrive(v.empty.at[slot])
#     return m, l
#
#
# def last_turn(wg, turns):
#     @pl.when(wg == 0)
#     def _():
#         plgpu.barrier_arrive(turns.at[1])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The softmax of one warpgroup lies under the products of the other one. No instruction was saved, and no
# byte. FlashAttention-3 calls this ping-pong scheduling. On an H200, it is 570 TFLOP/s, and 540 for Puzzle 5.

# %%
show(flash, *(normal((1, tokens, 128), "bfloat16") for tokens in (128, 640, 640)), l2=True)

# %% [markdown]
# ## Worked example: the first of two products
#
# `acc[...]` waits until *all* products that you have started are over. `plgpu.wgmma_accumulator_load(acc, wait_n=1)`
# reads an accumulator, too, but waits only until at most *one* product is left. Products end in the order in which they
# were started. So you can read the first of two products while the second one goes on:
#
# ```text
#     tensor cores   | first | second    |
#     threads                | exp2(first) | + second
# ```


# %%
def two_products_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
    plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
    plgpu.barrier_wait(loaded)

    def multiply(first, second):
        plgpu.wgmma(first, a_smem, b_smem)
        plgpu.wgmma(second, a_smem, b_smem.T)
        p = jnp.exp2(plgpu.wgmma_accumulator_load(first, wait_n=1))
        return p + second[...]  # waits for the second one, too

    o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 128)), plgpu.ACC((64, 128)))


def two_products(a: Float[Array, "64 128"], b: Float[Array, "128 128"]) -> Float[Array, "64 128"]:
    return plgpu.kernel(
        two_products_kernel,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 128), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((128, 128), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b)


# Try it: read the first product with first[...], and run this cell again. What waits for what?
show(two_products, normal((64, 128), "bfloat16"), normal((128, 128), "bfloat16", scale=0.1), l2=True)

# %% [markdown]
# ## Puzzle 6b: The next scores first
#
# **Goal.** Keep the tensor cores busy while your own softmax is computed. Take no turns.
#
# ### Theory
#
# QK^T of block `j` needs no probabilities. So it need not wait until block `j - 1` is over. Start it early, and right
# behind it PV of block `j - 1`. While PV runs, compute the softmax of block `j`:
#
# ```text
#     tensor cores   | QK^T j | PV j-1 |                | QK^T j+1 | PV j |
#     threads                 | softmax j, rescale acc |           | softmax j+1 ...
# ```
#
# When you want the scores, two products are on their way. Read the first one, as in the worked example.
#
# What does PV read and write while it runs? It reads `p` of block `j - 1`, in registers, and the slot of V. It adds to
# `acc`. So leave all three alone until it is over: rescale `acc` after that, and give the slot back after that.
# (`wgmma_wait(0)` waits for it. So does `acc[...]`, by itself.) Which `alpha` does `acc` need then? It holds blocks 0
# to `j - 1`.


# %%
def ahead(j, c, p, m, l, acc, q_smem, k, v):
    # j: this step, 1 or more      p: (64, bkv), the probabilities of block j - 1, in v's dtype      m, l: up to j - 1
    # acc: blocks 0 to j - 2, weighed with the maxima up to j - 1      the rest: Puzzle 5
    # Start the scores of block j and the values of block j - 1. Give back both slots, each as soon as it is free.
    # Return p, m, l of block j. acc: blocks 0 to j - 1, weighed with the maxima up to j.
    pass  # YOUR CODE HERE


# %%
def begin(c, q_smem, k, dtype):
    # given: the scores of block 0
    plgpu.barrier_wait(k.full.at[0])
    p, _, m, l = online(block_scores(q_smem, k.smem.at[0]), c, *nothing_yet())
    plgpu.barrier_arrive(k.empty.at[0])
    return p.astype(dtype), m, l


def end(last, p, acc, v):
    # given: the values of the last block
    slot = lax.rem(last, v.smem.shape[0])
    plgpu.barrier_wait(v.full.at[slot])
    plgpu.wgmma(acc, p, v.smem.at[slot])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(v.empty.at[slot])


# %%
def ahead_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, k_full, v_full, k_empty, v_empty):
    wg, h, i = lax.axis_index("wg"), lax.axis_index("h"), lax.axis_index("i")
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    steps, D = k_gmem.shape[1] // k_smem.shape[1], q_gmem.shape[2]

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[h], k)
            produce(j, v_gmem.at[h], v)

    @pl.when(wg < 2)
    def _():
        # 8 more than in Puzzle 6: the scores and the last block's p are alive at the same time
        plgpu.set_max_registers(240, action="increase")
        mine, rows, c = q_smem.at[wg], pl.ds(i * 128 + wg * 64, 64), D**-0.5 * LOG2E
        plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], mine, loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            def step(j, state):
                return ahead(j, c, *state, acc, mine, k, v)

            p, _, l = lax.fori_loop(1, steps, step, begin(c, mine, k, v_smem.dtype))
            end(steps - 1, p, acc, v)
            return finish(acc, l)

        store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, rows], mine)


# %%
def overlapped(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        ahead_kernel,
        out_type=q,
        grid=(H, Sq // 128),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_of(D, q.dtype, bkv, slots),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (1, 128, 128), k (1, 1280, 128), v (1, 1280, 128): tensor_idle=6_400. Puzzle 6's kernel has 6,894 of
# these cycles, and Puzzle 5's has 11,794.
check("gpu_attention/6b", overlapped)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which barriers do the two products need, and which slots do they read? One of the slots is that of block `j - 1`.
# After `wgmma_accumulator_load` you know that one product is over. Which slot is free, then? What can you compute
# before you know that the other one is over, and what not?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def ahead(j, c, p, m, l, acc, q_smem, k, v):
#     slots = k.smem.shape[0]
#     slot, before = lax.rem(j, slots), lax.rem(____, slots)
#     ____  # two waits
#
#     def multiply(s_acc):
#         plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
#         plgpu.wgmma(acc, ____, ____)
#         s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
#         ____
#         new, alpha, new_m, new_l = online(s, c, m, l)
#         ____
#         return new.astype(p.dtype), new_m, new_l
#
#     return pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def ahead(j, c, p, m, l, acc, q_smem, k, v):
#     slots = k.smem.shape[0]
#     slot, before = lax.rem(j, slots), lax.rem(j - 1, slots)
#     plgpu.barrier_wait(k.full.at[slot])
#     plgpu.barrier_wait(v.full.at[before])
#
#     def multiply(s_acc):
#         plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
#         plgpu.wgmma(acc, p, v.smem.at[before])
#         s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
#         plgpu.barrier_arrive(k.empty.at[slot])
#         new, alpha, new_m, new_l = online(s, c, m, l)
#         plgpu.wgmma_wait(0)
#         plgpu.barrier_arrive(v.empty.at[before])
#         acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
#         return new.astype(p.dtype), new_m, new_l
#
#     return pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A product is on its way while the softmax is computed, and no other warpgroup has to wait for its turn.
# FlashAttention-3 calls this pipelining within a warpgroup. On an H200, it is 593 TFLOP/s, and 570 for Puzzle 6. It
# costs registers: `p` of one block and the scores of the next are alive at the same time.

# %%
show(overlapped, *(normal((1, tokens, 128), "bfloat16") for tokens in (128, 640, 640)), l2=True)

# %% [markdown]
# ## Puzzle 7: Causal
#
# **Goal.** No query sees a later key. Skip the blocks that nobody sees, and mask those that somebody sees in part. The
# last tile of queries and the last block of keys need not be full. The warpgroups take no turns: that is Puzzle 7b.
#
# ### Theory
#
# As in flash_attention.py Puzzle 2, query `r` has the position `r + offset`, where `offset` is `Skv - Sq`. A warpgroup
# meets three kinds of blocks:
#
# ```text
#                         block of keys    0     1     2     3
#     warpgroup 0, 64 queries            |clear|mask | skip| skip|
#     warpgroup 1, 64 queries            |clear|clear|mask | skip|
#     producer                           | load| load| load| skip|
# ```
#
# A **clear** block is one that all 64 queries see in full. It needs no mask. So there are two loops over one step:
# without a mask, then with one. You write where they end, and the mask.
#
# Warpgroup 0 may be done while block 2 is still to come. It never gives back block 2's slot. That does no harm: block 2
# is the last one. (With 64 keys or more in a block, warpgroup 0 misses one block at most.)
#
# `lax.div` divides traced integers, and rounds down if none is negative. (There are at least as many keys as queries.)


# %%
def causal_spec(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"]
) -> Float[Array, "H Sq D"]:
    Sq, Skv = q.shape[1], k.shape[1]
    seen = jnp.arange(Skv)[None, :] <= jnp.arange(Sq)[:, None] + Skv - Sq
    s = jnp.where(seen, scores_spec(q, k), -jnp.inf)
    p = jax.nn.softmax(s, axis=2)
    return jnp.einsum("hqk,hkd->hqd", p, v.astype(jnp.float32)).astype(v.dtype)


def clear_blocks(first, offset, bkv):
    # first: the number of a tile's first query      offset: the position of query 0      bkv: keys in a block
    # Return how many blocks of keys are clear: all queries of the tile see all of their keys.
    pass  # YOUR CODE HERE


def seen_blocks(first, rows, offset, bkv):
    # rows: how many queries the tile has      Return how many blocks of keys at least one of them sees.
    pass  # YOUR CODE HERE


def hide(s, first, first_key, offset):
    # s: (64, bkv), scores      first, first_key: the numbers of the query in row 0 and of the key in column 0
    # Return s, with -inf for every key that a query does not see.
    # plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) counts along an axis.
    pass  # YOUR CODE HERE


# %%
def masked_step(j, c, m, l, acc, q_smem, k, v, mask):
    # given: Puzzle 5's step, with mask(s, j) between the scores and the softmax
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])
    plgpu.barrier_arrive(k.empty.at[slot])
    p, alpha, m, l = online(mask(s, j), c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


def masked_loops(c, acc, mine, k, v, wg, first, offset, steps):
    # given: the two loops of a warpgroup; steps: what the producer brings; wg: for Puzzle 7b
    bkv = k.smem.shape[1]
    seen = jnp.minimum(seen_blocks(first, 64, offset, bkv), steps)
    clear = jnp.minimum(clear_blocks(first, offset, bkv), seen)

    def step(mask):
        return lambda j, state: masked_step(j, c, *state, acc, mine, k, v, mask)

    state = lax.fori_loop(0, clear, step(lambda s, j: s), nothing_yet())
    _, l = lax.fori_loop(clear, seen, step(lambda s, j: hide(s, first, j * bkv, offset)), state)
    return l


# %%
def causal_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, *barriers, loops):
    k_full, v_full, k_empty, v_empty, *turns = barriers
    wg, h = lax.axis_index("wg"), lax.axis_index("h")
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    (_, Sq, D), Skv, bkv = q_gmem.shape, k_gmem.shape[1], k_smem.shape[1]
    row = (pl.cdiv(Sq, 128) - 1 - lax.axis_index("i")) * 128  # long rows first: the last CTAs have to be short
    steps = jnp.minimum(seen_blocks(row, 128, Skv - Sq, bkv), pl.cdiv(Skv, bkv))

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[h], k)
            produce(j, v_gmem.at[h], v)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine, first = q_smem.at[wg], row + wg * 64
        plgpu.copy_gmem_to_smem(q_gmem.at[h, pl.ds(first, 64)], mine, loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            l = loops(D**-0.5 * LOG2E, acc, mine, k, v, wg, *turns, first, Skv - Sq, steps)
            return finish(acc, l)

        store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, pl.ds(first, 64)], mine)


# %%
def masked(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        functools.partial(causal_kernel, loops=masked_loops),
        out_type=q,
        grid=(H, pl.cdiv(Sq, 128)),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_of(D, q.dtype, bkv, slots),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (1, 384, 128), k (1, 640, 128), v (1, 640, 128): flops=102_000_000, copies=30. Without skipping, it
# would be 127 million FLOPs and 36 copies.
check("gpu_attention/7", masked)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which is the last key that the *first* query of the tile sees? A block is clear if its last key is not beyond that
# one. And which is the last key that the *last* query sees? Somebody sees a block if its first key is not beyond that.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def clear_blocks(first, offset, bkv):
#     return lax.div(____, bkv)
#
#
# def seen_blocks(first, rows, offset, bkv):
#     return lax.div(____ + bkv - 1, bkv)
#
#
# def hide(s, first, first_key, offset):
#     count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
#     return jnp.where(____ <= ____, s, -jnp.inf)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def clear_blocks(first, offset, bkv):
#     return lax.div(first + offset + 1, bkv)
#
#
# def seen_blocks(first, rows, offset, bkv):
#     return lax.div(first + rows + offset + bkv - 1, bkv)
#
#
# def hide(s, first, first_key, offset):
#     count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
#     return jnp.where(first_key + count(1) <= first + count(0) + offset, s, -jnp.inf)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Only blocks that somebody sees are multiplied: here a fifth of the work is gone, and half of it for long
# sequences with as many queries as keys. Only the blocks on the diagonal pay for a mask. Lengths are freer, too. The
# copy engine fills what lies beyond the last key with zeros, the mask hides it, and rows beyond the last query are not
# stored. (The compiler for the chip still wants lengths that are multiples of 8, because the tiles in SMEM are built of
# eight rows each. This package's machine runs others, too.)

# %% [markdown]
# ## Puzzle 7b: Done early
#
# **Goal.** Bring Puzzle 6's turns into the causal kernel, where one warpgroup may have fewer steps than the other one.
#
# ### Theory
#
# In Puzzle 6 both warpgroups do the same number of steps. So each turn that is waited for is given. Here warpgroup 0
# may be done one block earlier:
#
# ```text
#     warpgroup 0   |QK| softmax | PV |  done
#     warpgroup 1   wait  |QK| softmax | PV |QK| softmax | wait for a turn that nobody gives
# ```
#
# Whoever is done early has to go on with the turns. So there is a third loop. Its steps compute nothing: each of them
# gives as many turns as a step of `ping_pong` and waits for as many.


# %%
def pass_on(wg, turns):
    # A step of ping_pong for a block that you do not see, and the other warpgroup does: the turns alone.
    pass  # YOUR CODE HERE


# %%
def causal_step(j, c, m, l, acc, q_smem, k, v, wg, turns, mask):
    # given: Puzzle 6's step, with mask(s, j) between the scores and the softmax
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
        plgpu.barrier_arrive(turns.at[1 - wg])
        return s_acc[...]

    s = pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
    plgpu.barrier_arrive(k.empty.at[slot])
    p, alpha, m, l = online(mask(s, j), c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    plgpu.barrier_wait(turns.at[wg])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


def causal_loops(c, acc, mine, k, v, wg, turns, first, offset, steps):
    # given: the three loops of a warpgroup; steps: what the producer brings
    bkv = k.smem.shape[1]
    seen = jnp.minimum(seen_blocks(first, 64, offset, bkv), steps)
    clear = jnp.minimum(clear_blocks(first, offset, bkv), seen)

    def step(mask):
        return lambda j, state: causal_step(j, c, *state, acc, mine, k, v, wg, turns, mask)

    first_turn(wg, turns)
    state = lax.fori_loop(0, clear, step(lambda s, j: s), nothing_yet())
    _, l = lax.fori_loop(clear, seen, step(lambda s, j: hide(s, first, j * bkv, offset)), state)

    @pl.loop(seen, steps)
    def _(j):
        pass_on(wg, turns)

    last_turn(wg, turns)
    return l


# %%
def causal(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, bkv: int = 128, slots: int = 2
) -> Float[Array, "H Sq D"]:
    H, Sq, D = q.shape
    return plgpu.kernel(
        functools.partial(causal_kernel, loops=causal_loops),
        out_type=q,
        grid=(H, pl.cdiv(Sq, 128)),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[*scratch_of(D, q.dtype, bkv, slots), plgpu.Barrier(num_barriers=2)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (1, 384, 128), k (1, 1088, 128), v (1, 1088, 128): tensor_idle=23_000. Puzzle 7's kernel has 29,859 of
# these cycles. In each tile, warpgroup 0 is done one block earlier.
check("gpu_attention/7b", causal)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through `ping_pong` line by line, and write down only its turns: which one does it give, which one does it wait
# for, and which of the two comes first? Do you have to wait for a turn that you do not use? Think of the other
# warpgroup's second step without you.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def pass_on(wg, turns):
#     plgpu.____(turns.at[____])
#     plgpu.____(turns.at[____])
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def pass_on(wg, turns):
#     plgpu.barrier_arrive(turns.at[1 - wg])
#     plgpu.barrier_wait(turns.at[wg])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Warpgroups that wait for each other have to agree on how often, whatever each of them computes. The same
# holds for CTAs of a cluster, and for devices in a ring.

# %% [markdown]
# ## Puzzle 8: Grouped queries
#
# **Goal.** Groups of heads share keys and values, and each head has few queries. Pack the heads of a group into one
# tile, and read each key once for all of them. The mask is causal.
#
# ### Theory
#
# With grouped queries, `H // Hkv` neighbouring heads of `q` share one head of `k` and `v`. A cache for 8 heads instead
# of 32 has a quarter of the bytes. But a kernel with a CTA for each head of `q` still *reads* it four times.
#
# If a head has few queries, most rows of its tile are empty, too. Two cases with few queries: the last piece of a
# prompt, and tokens that a small model has drafted and a large one checks. wgmma multiplies 64 rows in any case. So
# fill them with the heads of a group. Of four heads, a tile takes 16 tokens each:
#
# ```text
#     row of the tile    0 .. 15   | 16 .. 31  | 32 .. 47  | 48 .. 63          a CTA has two tiles:
#     head               h         | h + 1     | h + 2     | h + 3             warpgroup 0   tokens  0 .. 15
#     token              0 .. 15   | 0 .. 15   | 0 .. 15   | 0 .. 15           warpgroup 1   tokens 16 .. 31
# ```
#
# Products and softmax treat every row alike. Three things depend on which query a row is: where it comes from, which
# keys it sees, and where its result goes.
#
# `pack` is how many heads a tile has. Your `packed_grid` chooses it: the kernel divides `H` by your number of CTAs
# along "h". A group has 1, 2, 4 or 8 heads, so each head has 8 rows of a tile or more. (A copy into swizzled SMEM has
# to begin at a multiple of 8 rows.)


# %%
def grouped_spec(
    q: Float[Array, "H Sq D"], k: Float[Array, "Hkv Skv D"], v: Float[Array, "Hkv Skv D"]
) -> Float[Array, "H Sq D"]:
    group = q.shape[0] // k.shape[0]
    return causal_spec(q, jnp.repeat(k, group, axis=0), jnp.repeat(v, group, axis=0))


def packed_grid(H, Hkv, Sq):
    # Return how many CTAs there are along "h" and along "i". Each has two tiles of 64 rows, as in the picture.
    pass  # YOUR CODE HERE


def load_packed(h, first, q_gmem, q_smem, loaded, pack):
    # h: the first of the tile's heads      first: its first token      pack: how many heads, 1, 2, 4 or 8
    # q_gmem: (H, Sq, D)      q_smem: (64, D)      loaded: a barrier of `pack` arrivals      Start the copies.
    pass  # YOUR CODE HERE


def hide_packed(s, first, first_key, offset, pack):
    # Puzzle 7's hide for such a tile. The query of token t has the position t + offset. first: as above
    pass  # YOUR CODE HERE


def store_packed(o, h, first, o_gmem, smem, pack):
    # Puzzle 3's store_rows for such a tile      o: (64, D)      o_gmem: (H, Sq, D)      smem: (64, D)
    pass  # YOUR CODE HERE


# %%
def grouped_loops(c, acc, mine, k, v, wg, turns, first, offset, steps, pack):
    # given: Puzzle 7b's three loops, for a tile of 64 // pack tokens
    bkv = k.smem.shape[1]
    seen = jnp.minimum(seen_blocks(first, 64 // pack, offset, bkv), steps)
    clear = jnp.minimum(clear_blocks(first, offset, bkv), seen)

    def step(mask):
        return lambda j, state: causal_step(j, c, *state, acc, mine, k, v, wg, turns, mask)

    first_turn(wg, turns)
    state = lax.fori_loop(0, clear, step(lambda s, j: s), nothing_yet())
    _, l = lax.fori_loop(clear, seen, step(lambda s, j: hide_packed(s, first, j * bkv, offset, pack)), state)

    @pl.loop(seen, steps)
    def _(j):
        pass_on(wg, turns)

    last_turn(wg, turns)
    return l


# %%
def grouped_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, *barriers, pack):
    k_full, v_full, k_empty, v_empty, turns = barriers
    wg, h, tokens = lax.axis_index("wg"), lax.axis_index("h") * pack, 64 // pack
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    (H, Sq, D), (Hkv, Skv, _), bkv = q_gmem.shape, k_gmem.shape, k_smem.shape[1]
    hkv = lax.div(h, H // Hkv)
    token = (pl.cdiv(Sq, 2 * tokens) - 1 - lax.axis_index("i")) * 2 * tokens
    steps = jnp.minimum(seen_blocks(token, 2 * tokens, Skv - Sq, bkv), pl.cdiv(Skv, bkv))

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[hkv], k)
            produce(j, v_gmem.at[hkv], v)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine, first = q_smem.at[wg], token + wg * tokens
        load_packed(h, first, q_gmem, mine, loaded.at[wg], pack)
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            l = grouped_loops(D**-0.5 * LOG2E, acc, mine, k, v, wg, turns, first, Skv - Sq, steps, pack)
            return finish(acc, l)

        store_packed(pl.run_scoped(loop, plgpu.ACC((64, D))), h, first, o_gmem, mine, pack)


# %%
def grouped(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "Hkv Skv D"],
    v: Float[Array, "Hkv Skv D"],
    *,
    bkv: int = 128,
    slots: int = 2,
) -> Float[Array, "H Sq D"]:
    (H, Sq, D), Hkv = q.shape, k.shape[0]
    grid = packed_grid(H, Hkv, Sq)
    pack = H // grid[0]
    scratch = [*scratch_of(D, q.dtype, bkv, slots), plgpu.Barrier(num_barriers=2)]
    scratch[3] = plgpu.Barrier(num_barriers=2, num_arrivals=pack)  # loaded: a copy for each head
    return plgpu.kernel(
        functools.partial(grouped_kernel, pack=pack),
        out_type=q,
        grid=grid,
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %%
# Budget for q (8, 32, 128), k (2, 640, 128), v (2, 640, 128): gmem_bytes=786_432, copies=36. Two CTAs read the five
# blocks of a head of keys, and of values, once each. With a tile for each head of q, it would be 2,752,512 bytes.
check("gpu_attention/8", grouped)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many tokens of each head does a tile have? How many has a CTA, with its two tiles? Four heads are four pieces of
# `q`, so one copy cannot bring them. Each piece is a rectangle, though, and it has a place in the tile. For the mask,
# take row 17 of the picture: which token is it? Which operation makes 1 of 17, and 0 of 48?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def packed_grid(H, Hkv, Sq):
#     pack = ____
#     return ____, pl.cdiv(Sq, ____)
#
#
# def load_packed(h, first, q_gmem, q_smem, loaded, pack):
#     tokens = ____
#     for g in range(pack):
#         rows = pl.ds(____, tokens)
#         plgpu.copy_gmem_to_smem(q_gmem.at[____, ____], q_smem.at[rows], loaded)
#
#
# def hide_packed(s, first, first_key, offset, pack):
#     count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
#     token = first + ____
#     return jnp.where(first_key + count(1) <= ____, s, -jnp.inf)
#
#
# def store_packed(o, h, first, o_gmem, smem, pack):
#     tokens = ____
#     smem[...] = o.astype(smem.dtype)
#     plgpu.commit_smem()
#     for g in range(pack):
#         plgpu.copy_smem_to_gmem(____, ____)
#     plgpu.wait_smem_to_gmem(0)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def packed_grid(H, Hkv, Sq):
#     pack = H // Hkv
#     return Hkv, pl.cdiv(Sq, 128 // pack)
#
#
# def load_packed(h, first, q_gmem, q_smem, loaded, pack):
#     tokens = 64 // pack
#     for g in range(pack):
#         rows = pl.ds(g * tokens, tokens)
#         plgpu.copy_gmem_to_smem(q_gmem.at[h + g, pl.ds(first, tokens)], q_smem.at[rows], loaded)
#
#
# def hide_packed(s, first, first_key, offset, pack):
#     count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
#     token = first + lax.rem(count(0), 64 // pack)
#     return jnp.where(first_key + count(1) <= token + offset, s, -jnp.inf)
#
#
# def store_packed(o, h, first, o_gmem, smem, pack):
#     tokens = 64 // pack
#     smem[...] = o.astype(smem.dtype)
#     plgpu.commit_smem()
#     for g in range(pack):
#         rows = pl.ds(g * tokens, tokens)
#         plgpu.copy_smem_to_gmem(smem.at[rows], o_gmem.at[h + g, pl.ds(first, tokens)])
#     plgpu.wait_smem_to_gmem(0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Each key is read once for its group, and tiles are full as long as there are queries. You changed which
# queries are in a tile, and nothing in the loops. FlashAttention-3 has this as `pack_gqa`. How much does it save? If
# each head has a tile full of queries of its own, nothing: then 64 rows share a block of keys in any case. It counts
# where queries are few. The extreme is the next puzzle: one query.

# %% [markdown]
# ## Puzzle 9: Decoding
#
# **Goal.** One query of each head, against all keys that its sequence has so far. Split the keys among CTAs, and merge
# what they find.
#
# ### Theory
#
# A model writes one token at a time. For each, it reads the whole cache and does little with it: with groups of four
# heads, 4 FLOPs for each byte. So only bandwidth counts. As in Puzzle 8, the heads of a group share a tile, and each
# key is read once for them. But all SMs have to read. One sequence with 8 heads of keys is 8 CTAs, if each takes all
# keys of a head. Then 124 of 132 SMs have nothing to do.
#
# So split the keys into parts, with a CTA for each:
#
# ```text
#     blocks of keys    |  0  |  1  |  2  |  3  |  4  |  5  |  6  |      in block 6, keys beyond the length are hidden
#     part              |     0     |     1     |        2        |      a CTA each
#     it leaves             o, lse      o, lse        o, lse
#     second kernel     |                    o                    |
# ```
#
# A part leaves `o`, the mean of its values, weighted by its own softmax, and `lse`: log2 of the sum of `2 ** (s * c)`
# over its keys. So the maximum, which was subtracted, has to be added again. 2 ** `lse` says how much a part weighs
# among the parts.
#
# There may be more parts than blocks. A part without keys leaves an `o`, too. Make sure that it does no harm. (What is
# 0 * NaN?)


# %%
def decoding_spec(
    q: Float[Array, "B H D"], k: Float[Array, "B Hkv S D"], v: Float[Array, "B Hkv S D"], lengths: Int[Array, "B"]
) -> Float[Array, "B H D"]:
    (B, H, D), (_, Hkv, S, _) = q.shape, k.shape
    rows, k, v = (x.astype(jnp.float32) for x in (q.reshape(B, Hkv, H // Hkv, D), k, v))
    s = jnp.einsum("bhgd,bhsd->bhgs", rows, k) * D**-0.5
    p = jax.nn.softmax(jnp.where(jnp.arange(S) < lengths[:, None, None, None], s, -jnp.inf), axis=3)
    return jnp.einsum("bhgs,bhsd->bhgd", p, v).reshape(B, H, D).astype(q.dtype)


def part_of(p, parts, length, bkv):
    # p: which part, traced      parts: how many      length: how many keys the sequence has, traced, at least 1
    # bkv: keys in a block      Return start, stop: part p takes blocks start to stop - 1.
    # blocks: how many blocks have a key. No part may take more than pl.cdiv(blocks, parts) of them. Any part may be
    # empty: start >= stop.
    pass  # YOUR CODE HERE


def finish_part(acc, m, l):
    # acc, m, l: Puzzles 2 and 3, after the last block      Return o: (64, D), and lse: (64,), both float32.
    pass  # YOUR CODE HERE


def merged(o_parts, lse_parts):
    # o_parts: (parts, D), in GMEM      lse_parts: (parts,), in GMEM, float32: what the parts of one head have left
    # o_parts[p] is an array, lse_parts[p] a number; `parts` is known at compile time, so use Python's loops.
    # Return the attention of this head over all keys: (D,), float32.
    pass  # YOUR CODE HERE


# %%
def decode_step(j, stop, c, m, l, acc, q_smem, load_k, load_v, k, v, mask):
    # given: Puzzle 4's step, with a mask. load_k(j), load_v(j) start the copies of block j
    slots = k.smem.shape[0]
    slot = lax.rem(j, slots)
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])

    @pl.when(j + slots < stop)
    def _():
        load_k(j + slots)

    p, alpha, m, l = online(mask(s, j), c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])

    @pl.when(j + slots < stop)
    def _():
        load_v(j + slots)

    return m, l


# %%
def decode_loops(start, stop, length, acc, q_smem, load_k, load_v, k, v):
    # given: all blocks of a part; only one with keys beyond the length needs a mask
    slots, bkv, D = k.smem.shape
    for t in range(slots):

        @pl.when(start + t < stop)
        def _(t=t):
            load_k(start + t)
            load_v(start + t)

    def hide_beyond(s, j):
        keys = j * bkv + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(keys < length, s, -jnp.inf)

    def step(mask):
        c = D**-0.5 * LOG2E
        return lambda j, state: decode_step(j, stop, c, *state, acc, q_smem, load_k, load_v, k, v, mask)

    clear = lax.clamp(start, lax.div(length, bkv), stop)
    state = lax.fori_loop(start, clear, step(lambda s, j: s), nothing_yet())
    return lax.fori_loop(clear, stop, step(hide_beyond), state)


# %%
def decode_part(load_k, load_v, length, q_gmem, o_gmem, lse_gmem, q_smem, k, v, loaded):
    # given: what a CTA does      q_gmem: (B * H, D), o_gmem: (B, Hkv, parts, 8, D), lse_gmem: (B, Hkv, parts, 64)
    b, h, p = (lax.axis_index(name) for name in ("b", "h", "p"))
    (B, Hkv, parts, rows, D), bkv = o_gmem.shape, k.smem.shape[1]
    group = q_gmem.shape[0] // (B * Hkv)
    # A copy into swizzled SMEM begins at a multiple of 8. So 8 rows of q come in, and this group's heads are among
    # them. The tile needs 64 rows: the others are zeros.
    q_smem[...] = plgpu.layout_cast(jnp.zeros(q_smem.shape, q_smem.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    row = pl.multiple_of(lax.div((b * Hkv + h) * group, 8) * 8, 8)
    plgpu.copy_gmem_to_smem(q_gmem.at[pl.ds(row, 8)], q_smem.at[pl.ds(0, 8)], loaded)
    start, stop = part_of(p, parts, length, bkv)

    def loop(acc):
        plgpu.barrier_wait(loaded)
        return finish_part(acc, *decode_loops(start, stop, length, acc, q_smem, load_k, load_v, k, v))

    o, lse = pl.run_scoped(loop, plgpu.ACC((64, D)))
    lse_gmem[b, h, p] = lse
    q_smem[...] = o.astype(q_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, rows)], o_gmem.at[b, h, p])
    plgpu.wait_smem_to_gmem(0)


def merge_kernel(o_gmem, lse_gmem, out_gmem):
    # given: out_gmem: (B, H, D)
    b, h, (_, H, _) = lax.axis_index("b"), lax.axis_index("h"), out_gmem.shape
    hkv, row = lax.div(h, H // o_gmem.shape[1]), lax.rem(b * H + h, 8)
    out_gmem[b, h] = merged(o_gmem.at[b, hkv, :, row], lse_gmem.at[b, hkv, :, row]).astype(out_gmem.dtype)


# %%
def in_parts(kernel, q, Hkv, others, *, bkv, slots, parts, copies=1):
    # given: two kernels: the parts, and what merges them      copies: how many bring one block of keys
    (B, H, D), params = q.shape, plgpu.CompilerParams(approx_math=True)
    blocks = plgpu.SMEM((slots, bkv, D), q.dtype, transforms=SWIZZLED)
    full = plgpu.Barrier(num_barriers=slots, num_arrivals=copies)
    o, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, Hkv, parts, 8, D), q.dtype),
            jax.ShapeDtypeStruct((B, Hkv, parts, 64), jnp.float32),
        ),
        grid=(B, Hkv, parts),
        grid_names=("b", "h", "p"),
        scratch_types=[
            plgpu.SMEM((64, D), q.dtype, transforms=SWIZZLED),
            *(blocks, blocks, plgpu.Barrier(), full, full),
        ],
        compiler_params=params,
    )(q.reshape(B * H, D), *others)
    return plgpu.kernel(merge_kernel, out_type=q, grid=(B, H), grid_names=("b", "h"), compiler_params=params)(o, lse)


# %%
def decode_kernel(q_gmem, k_gmem, v_gmem, lengths_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, *barriers):
    loaded, k_full, v_full = barriers
    b, h, k, v = lax.axis_index("b"), lax.axis_index("h"), Stream(k_smem, k_full), Stream(v_smem, v_full)

    def load_k(j):
        load_block(j, k_gmem.at[b, h], k)

    def load_v(j):
        load_block(j, v_gmem.at[b, h], v)

    decode_part(load_k, load_v, lengths_gmem[b], q_gmem, o_gmem, lse_gmem, q_smem, k, v, loaded)


def decode(
    q: Float[Array, "B H D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    lengths: Int[Array, "B"],
    *,
    bkv: int = 64,
    slots: int = 2,
    parts: int = 2,
) -> Float[Array, "B H D"]:
    return in_parts(decode_kernel, q, k.shape[1], (k, v, lengths), bkv=bkv, slots=slots, parts=parts)


# %%
# Budget for q (3, 8, 128), k (3, 2, 512, 128), v (3, 2, 512, 128), lengths [512, 300, 70]: gmem_bytes=1_060_000,
# copies=72, cta_bytes=136_000. Each block with a key is read once for a group. cta_bytes: what one CTA moves.
check("gpu_attention/9", decode)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where does part p begin, so that part p - 1 ends there, part 0 begins with block 0, and the last part ends with the
# last block? Then `o`: what is `l` of a part without keys, and what does `finish` do with it? Then the merge: 2 ** lse
# of one part may be more than a float32 can hold. You have met that before, and know what to subtract. Which of the
# parts decides it?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def part_of(p, parts, length, bkv):
#     blocks = pl.cdiv(____, ____)
#     return lax.div(____, parts), lax.div(____, parts)
#
#
# def finish_part(acc, m, l):
#     return finish(acc, jnp.where(____, l, ____)), ____
#
#
# def merged(o_parts, lse_parts):
#     lse = [lse_parts[p] for p in range(lse_parts.shape[0])]
#     top = functools.reduce(____, lse)
#     weights = [____ for each in lse]
#     return sum(____ for p, weight in enumerate(weights)) / ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def part_of(p, parts, length, bkv):
#     blocks = pl.cdiv(length, bkv)
#     return lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)
#
#
# def finish_part(acc, m, l):
#     return finish(acc, jnp.where(l > 0, l, 1)), m + jnp.log2(l)
#
#
# def merged(o_parts, lse_parts):
#     lse = [lse_parts[p] for p in range(lse_parts.shape[0])]
#     top = functools.reduce(jnp.maximum, lse)
#     weights = [jnp.exp2(each - top) for each in lse]
#     return sum(o_parts[p] * weight for p, weight in enumerate(weights)) / sum(weights)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Attention over a set of keys is two things, `o` and `lse`. With both, sets can be merged in any order.
# This is called FlashDecoding. On an H200, one sequence of 131,072 tokens is read at 326 GB/s in one part, and at
# 3,499 GB/s in 64.
#
# Why two slots of 64 keys? Two CTAs fit on an SM then, and together they have up to 128 KiB on the way. An H200's
# memory gives 4.8 TB/s. If its latency is a microsecond under load, Little's law (gpu_basics.py Puzzle 7) asks for 36
# KiB on the way for each SM.

# %%
show(decode, normal((1, 4, 128), "bfloat16"), *[normal((1, 1, 512, 128), "bfloat16")] * 2, jnp.array([500]))

# %% [markdown]
# ## Puzzle 9b: Pages
#
# **Goal.** The cache lies in pages, wherever there was room. Find each block of keys by way of the page table.
#
# ### Theory
#
# A cache of `(B, Hkv, S, D)` has room for the longest sequence, `B` times. With room for 131,072 tokens, of which a
# sequence has 8,192, 15/16 of it are empty. As in flash_attention.py Puzzle 13, servers
# hand out pages instead, as sequences grow. `page_table[b, t]` is the number of the page with tokens `t * page` to
# `t * page + page - 1` of sequence b:
#
# ```text
#     pages of a head           0     1     2     3     4     5     6
#                             |     | B0  | A1  | B1  | A0  | A3  | A2  |
#
#     page_table of A           4, 2, 6, 5      block 0 of A:   pages 4, 2        (two pages in a block)
#                                               block 1 of A:   pages 6, 5
# ```
#
# On a TPU an index map looked the page up. Here you start the copies yourself, so you read the table in the kernel:
# `table_row[t]` is a number, and a number may choose a page in `pages.at[...]`.
#
# A block consists of several pages if they are smaller. Each has a copy and rows of its own in the slot, and all of
# them arrive at the slot's barrier. Everything else is Puzzle 9. (Each row of the table fills whole blocks.
# Entries beyond a sequence's length are numbers of pages that exist, so you may copy them. They hold ordinary numbers,
# whose weights are 0. In flash_attention.py Puzzle 13 they could hold NaN: here 0 * NaN would be NaN.)


# %%
def paged_spec(
    q: Float[Array, "B H D"],
    k_pages: Float[Array, "Hkv num_pages page D"],
    v_pages: Float[Array, "Hkv num_pages page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B H D"]:
    Hkv, _, _, D = k_pages.shape
    k, v = (jnp.moveaxis(x[:, page_table], 0, 1).reshape(len(page_table), Hkv, -1, D) for x in (k_pages, v_pages))
    return decoding_spec(q, k, v, lengths)


def load_pages(j, pages, table_row, stream):
    # pages: (num_pages, page, D), in GMEM: all keys or all values of a head      table_row: (max_pages,), in GMEM
    # stream: a Stream with slots of (bkv, D), and a barrier `full` of bkv // page arrivals for each
    # load_block for pages: start the copies of block j of this sequence into its slot.
    pass  # YOUR CODE HERE


# %%
def paged_kernel(q_gmem, k_gmem, v_gmem, table_gmem, lengths_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, *barriers):
    loaded, k_full, v_full = barriers
    b, h, k, v = lax.axis_index("b"), lax.axis_index("h"), Stream(k_smem, k_full), Stream(v_smem, v_full)

    def load_k(j):
        load_pages(j, k_gmem.at[h], table_gmem.at[b], k)

    def load_v(j):
        load_pages(j, v_gmem.at[h], table_gmem.at[b], v)

    decode_part(load_k, load_v, lengths_gmem[b], q_gmem, o_gmem, lse_gmem, q_smem, k, v, loaded)


def paged(
    q: Float[Array, "B H D"],
    k_pages: Float[Array, "Hkv num_pages page D"],
    v_pages: Float[Array, "Hkv num_pages page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
    *,
    bkv: int = 64,
    slots: int = 2,
    parts: int = 2,
) -> Float[Array, "B H D"]:
    (Hkv, _, page, _), others = k_pages.shape, (k_pages, v_pages, page_table, lengths)
    return in_parts(paged_kernel, q, Hkv, others, bkv=bkv, slots=slots, parts=parts, copies=bkv // page)


# %%
# Budget for q (3, 8, 128), k_pages (2, 36, 32, 128), v_pages (2, 36, 32, 128), page_table (3, 12), lengths [300, 64,
# 129]: gmem_bytes=665_000, copies=84. Each block is two copies, of a page each.
check("gpu_attention/9b", paged)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# With two pages in a block, which entries of the table belong to block 3? In which rows of the slot does each page
# belong? Does the order of the rows matter? (Which keys does the mask hide?) A slot's barrier opens after `bkv // page`
# arrivals. Who makes them?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def load_pages(j, pages, table_row, stream):
#     (slots, bkv, _), page = stream.smem.shape, pages.shape[1]
#     slot, each = lax.rem(j, slots), ____
#     for r in range(each):
#         rows = pl.ds(____, page)
#         plgpu.copy_gmem_to_smem(pages.at[____], stream.smem.at[slot, rows], ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def load_pages(j, pages, table_row, stream):
#     (slots, bkv, _), page = stream.smem.shape, pages.shape[1]
#     slot, each = lax.rem(j, slots), bkv // page
#     for r in range(each):
#         rows = pl.ds(r * page, page)
#         plgpu.copy_gmem_to_smem(pages.at[table_row[j * each + r]], stream.smem.at[slot, rows], stream.full.at[slot])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The copy engine does not care where a block comes from, as long as each copy is one rectangle. So a page
# costs one number, read from GMEM. Small pages cost more copies: for pages of 16 tokens, four times as many as for 64.

# %% [markdown]
# ## The forward pass leaves a number
#
# Training needs gradients. flash_attention.py Puzzles 7 to 10 say what the backward pass works with: the inputs, `o`,
# the gradient `do` that arrives for it, and for each query the log-sum-exp of its scores (`lse`) and the sum of
# `do * o` (`delta`). The kernel below is yours of Puzzle 7b, and it stores `lse`. All powers are of two here, so
# `lse = m + log2(l)`, and a probability is `exp2(s * c - lse)`.
#
# `offset` is the position of query 0 among the keys. For causal attention it is `Skv - Sq`, as before. With
# `offset = Skv` every query sees every key. So the same kernel serves both.


# %%
def forward_loops(c, acc, mine, k, v, wg, turns, first, offset, steps):
    # given: the three loops of Puzzle 7b, with m and l at the end
    bkv = k.smem.shape[1]
    seen = jnp.minimum(seen_blocks(first, 64, offset, bkv), steps)
    clear = jnp.minimum(clear_blocks(first, offset, bkv), seen)

    def step(mask):
        return lambda j, state: causal_step(j, c, *state, acc, mine, k, v, wg, turns, mask)

    first_turn(wg, turns)
    state = lax.fori_loop(0, clear, step(lambda s, j: s), nothing_yet())
    m, l = lax.fori_loop(clear, seen, step(lambda s, j: hide(s, first, j * bkv, offset)), state)

    @pl.loop(seen, steps)
    def _(j):
        pass_on(wg, turns)

    last_turn(wg, turns)
    return m, l


# %%
def forward_kernel(q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, loaded, *barriers, offset):
    k_full, v_full, k_empty, v_empty, turns = barriers
    wg, h = lax.axis_index("wg"), lax.axis_index("h")
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)
    (_, Sq, D), Skv, bkv = q_gmem.shape, k_gmem.shape[1], k_smem.shape[1]
    row = (pl.cdiv(Sq, 128) - 1 - lax.axis_index("i")) * 128
    steps = jnp.minimum(seen_blocks(row, 128, offset, bkv), pl.cdiv(Skv, bkv))

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, steps)
        def _(j):
            produce(j, k_gmem.at[h], k)
            produce(j, v_gmem.at[h], v)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine, first = q_smem.at[wg], row + wg * 64
        plgpu.copy_gmem_to_smem(q_gmem.at[h, pl.ds(first, 64)], mine, loaded.at[wg])
        plgpu.barrier_wait(loaded.at[wg])

        def loop(acc):
            m, l = forward_loops(D**-0.5 * LOG2E, acc, mine, k, v, wg, turns, first, offset, steps)
            lse_gmem[h, pl.ds(first, 64)] = m + jnp.log2(l)
            return finish(acc, l)

        store_rows(pl.run_scoped(loop, plgpu.ACC((64, D))), o_gmem.at[h, pl.ds(first, 64)], mine)


# %%
def offset_of(q, k, causal):
    # given: the position of query 0 among the keys. Skv: behind all of them
    if not causal and k.shape[1] % 128:
        raise ValueError(f"{k.shape[1]} keys without a causal mask: their number has to be a multiple of 128")
    return k.shape[1] - q.shape[1] if causal else k.shape[1]


def forward(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, causal: bool = True
) -> tuple[Float[Array, "H Sq D"], Float[Array, "H rows"]]:
    (H, _, D), tiles = q.shape, pl.cdiv(q.shape[1], 128)
    return plgpu.kernel(
        functools.partial(forward_kernel, offset=offset_of(q, k, causal)),
        out_type=[q, jax.ShapeDtypeStruct((H, tiles * 128), jnp.float32)],  # lse: whole tiles of queries
        grid=(H, tiles),
        grid_names=("h", "i"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[*scratch_of(D, q.dtype, 128, 2), plgpu.Barrier(num_barriers=2)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v)


# %% [markdown]
# ## Puzzle 10: Keys as rows
#
# **Goal.** Compute the gradients of the keys and the values. Each of two warpgroups keeps 64 keys, and blocks of 64
# queries pass by.
#
# ### Theory
#
# You know the formulas from flash_attention.py, with `c = scale * log2(e)`:
#
# ```text
#     p  = exp2(q k^T * c - lse)        dv = p^T do
#     ds = p * (do v^T - delta)         dk = ds^T q * scale
# ```
#
# `p^T` and `ds^T` are left operands here, so they should be in registers. But transposing registers means moving values
# between threads, and a (64, 64) tile is 32 values a thread, twice a block. So compute them transposed in the first
# place: `(q k^T)^T = k q^T`. Keys are the rows now, and queries the columns.
#
# ```text
#                    64 queries                       64 queries
#                 +--------------+                 +--------------+
#     64 keys     |  s^T = k q^T |     64 keys     | dp^T = v do^T|       both (64, 64), in registers
#                 +--------------+                 +--------------+
#                   lse: a number for each column    delta, too
# ```
#
# A number for each column lies in registers in another way than one for each row: `Layout.WGMMA.reduce(0)` instead of
# `reduce(1)`, as the bias of gpu_matmul.py Puzzle 7. `numbers` loads it like that. The mask, which queries see which
# keys, is given. From here on D is 128.


# %%
def attention_grads_spec(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "H Skv D"],
    v: Float[Array, "H Skv D"],
    do: Float[Array, "H Sq D"],
    *,
    causal: bool = True,
) -> tuple[Float[Array, "H Sq D"], Float[Array, "H Skv D"], Float[Array, "H Skv D"]]:
    given = [x.astype(jnp.float32) for x in (q, k, v)]
    _, vjp = jax.vjp(causal_spec if causal else attention_spec, *given)
    dq, dk, dv = vjp(do.astype(jnp.float32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def dkv_spec(q, k, v, do, *, causal: bool = True):
    return attention_grads_spec(q, k, v, do, causal=causal)[1:]


class Queries(NamedTuple):
    """Blocks of 64 queries that pass by, and what belongs to them."""

    q: Any  # (slots, 64, D)
    do: Any  # (slots, 64, D), the gradients of their results
    lse: Any  # (slots, 64), float32
    delta: Any  # (slots, 64), float32
    full: Any  # a barrier for each slot: all four are there
    empty: Any  # a barrier for each slot: both warpgroups are done with it


class Mine(NamedTuple):
    """What a warpgroup keeps."""

    k: Any  # (64, D), in SMEM
    v: Any  # (64, D), in SMEM
    dk_acc: Any  # (64, D), an accumulator
    dv_acc: Any  # (64, D), an accumulator


# %%
def numbers(smem):
    # given: (64,), float32, in SMEM -> in registers, a number for each column of an accumulator
    return plgpu.load(smem, layout=plgpu.Layout.WGMMA.reduce(0))


def probabilities(s, c, lse):
    # s: (64 keys, 64 queries), float32, not scaled      lse: (64,), as `numbers` loads it      Return p, transposed.
    pass  # YOUR CODE HERE


def score_gradients(p, dp, delta):
    # p, dp: (64 keys, 64 queries), float32      delta: (64,), as `numbers` loads it      Return ds, transposed.
    pass  # YOUR CODE HERE


def add_dkv(slot, mine, queries, mask):
    # slot: where the block of queries lies      mine: a Mine      queries: a Queries
    # mask(s) returns s, (64 keys, 64 queries), with -inf for each query that does not see the key.
    # Add the block's part to both accumulators, and return when that is done. Do not scale dk: the kernel does that
    # once, at the end.
    # Return ds, transposed, in q's dtype (for Puzzle 10b).
    pass  # YOUR CODE HERE


# %%
def spread(numbers, axis, shape):
    # given: (n,) -> shape. Number i stands in all places whose index along axis is i.
    return lax.broadcast_in_dim(numbers, shape, (axis,))


def counted(n, axis):
    # given: 0 to n - 1 along an axis of an accumulator. One number for each row or column takes fewer registers than
    # one for each score, and this kernel has none left.
    return plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=plgpu.Layout.WGMMA.reduce(1 - axis))


def hide_keys(s, first, first_key, offset):
    # given: Puzzle 7's mask for scores that are transposed
    keys, queries = first_key + counted(64, 0), first + offset + counted(64, 1)
    return jnp.where(spread(keys, 0, s.shape) <= spread(queries, 1, s.shape), s, -jnp.inf)


def load_queries(t, i, parts, queries):
    # given: step t brings block i. parts: q, do, lse and delta of a head
    slot = lax.rem(t, queries.q.shape[0])

    @pl.when(t >= queries.q.shape[0])
    def _():
        plgpu.barrier_wait(queries.empty.at[slot])

    for part, smem in zip(parts, queries[:4], strict=True):
        plgpu.copy_gmem_to_smem(part.at[pl.ds(i * 64, 64)], smem.at[slot], queries.full.at[slot])


def blocks_from(first_key, offset, Sq):
    # given: from which block of queries on some of them see some of 128 keys, from which on all see all, and the end
    end = pl.cdiv(Sq, 64)
    first = jnp.clip(lax.div(first_key - offset, 64), 0, end)
    return first, jnp.clip(lax.div(first_key - offset + 127 + 63, 64), first, end), end


def consume_queries(first_key, offset, queries, step, Sq):
    # given: the loops of a warpgroup whose first key is first_key. step(i, slot, mask): a block
    first, clear, end = blocks_from(lax.div(first_key, 128) * 128, offset, Sq)

    def go(mask):
        def one(i):
            slot = lax.rem(i - first, queries.q.shape[0])
            plgpu.barrier_wait(queries.full.at[slot])
            step(i, slot, functools.partial(mask, i))
            plgpu.barrier_arrive(queries.empty.at[slot])

        return one

    pl.loop(first, clear)(go(lambda i, s: hide_keys(s, i * 64, first_key, offset)))
    pl.loop(clear, end)(go(lambda i, s: s))


# %%
def keys_stay(gmem, dk_gmem, dv_gmem, scratch, step, offset):
    # given: gmem: q, do, lse, delta, k, v      step(i, slot, mine, queries, mask): a block of queries
    *parts, k_gmem, v_gmem = gmem
    k_smem, v_smem, *slots, loaded, full, empty = scratch
    queries, D = Queries(*slots, full, empty), k_gmem.shape[2]
    wg, h, tile = lax.axis_index("wg"), lax.axis_index("h"), lax.axis_index("j") * 128

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        plgpu.copy_gmem_to_smem(k_gmem.at[h, pl.ds(tile, 128)], k_smem, loaded)
        plgpu.copy_gmem_to_smem(v_gmem.at[h, pl.ds(tile, 128)], v_smem, loaded)
        first, _, end = blocks_from(tile, offset, parts[0].shape[1])

        @pl.loop(first, end)
        def _(i):
            load_queries(i - first, i, [part.at[h] for part in parts], queries)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(loaded)
        rows, keys = pl.ds(wg * 64, 64), pl.ds(tile + wg * 64, 64)

        def loop(dk_acc, dv_acc):
            def one(i, slot, mask):
                # wg is asked for in each step: addresses that never change would be kept in registers
                rows = pl.ds(lax.axis_index("wg") * 64, 64)
                step(i, slot, Mine(k_smem.at[rows], v_smem.at[rows], dk_acc, dv_acc), queries, mask)

            consume_queries(tile + wg * 64, offset, queries, one, parts[0].shape[1])
            return dk_acc[...] * D**-0.5, dv_acc[...]

        dk, dv = pl.run_scoped(loop, plgpu.ACC((64, D)), plgpu.ACC((64, D)))
        store_rows(dv, dv_gmem.at[h, keys], v_smem.at[rows])  # nobody else reads these rows of v_smem
        store_rows(dk, dk_gmem.at[h, keys], v_smem.at[rows])


# %%
def dkv_kernel(q, do, lse, delta, k, v, dk, dv, *scratch, offset):
    def step(i, slot, mine, queries, mask):
        add_dkv(slot, mine, queries, mask)

    keys_stay((q, do, lse, delta, k, v), dk, dv, scratch, step, offset)


def scratch_of_keys(D, dtype, slots):
    # given: SMEM for 128 keys and values, slots for queries, and the barriers of both
    tile, block = (
        plgpu.SMEM((128, D), dtype, transforms=SWIZZLED),
        plgpu.SMEM((slots, 64, D), dtype, transforms=SWIZZLED),
    )
    row = plgpu.SMEM((slots, 64), jnp.float32)
    full, empty = (plgpu.Barrier(num_barriers=slots, num_arrivals=n) for n in (4, 2))
    return [tile, tile, block, block, row, row, plgpu.Barrier(num_arrivals=2), full, empty]


def delta_of(o, do):
    return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=2)


# %%
def dkv(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "H Skv D"],
    v: Float[Array, "H Skv D"],
    do: Float[Array, "H Sq D"],
    *,
    causal: bool = True,
    slots: int = 2,
) -> tuple[Float[Array, "H Skv D"], Float[Array, "H Skv D"]]:
    o, lse = forward(q, k, v, causal=causal)
    return plgpu.kernel(
        functools.partial(dkv_kernel, offset=offset_of(q, k, causal)),
        out_type=[k, v],
        grid=(k.shape[0], pl.cdiv(k.shape[1], 128)),
        grid_names=("h", "j"),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch_of_keys(q.shape[2], q.dtype, slots),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, do, lse, delta_of(o, do), k, v)


# %%
# Inputs: q (1, 256, 128), k (1, 384, 128), v (1, 384, 128), do (1, 256, 128). Variants have other lengths, no mask, and
# three slots.
check("gpu_attention/10", dkv)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `block_scores(a, b)` returns the products of the rows of `a` with the rows of `b`, whatever they are. Which rows do
# you want to be the rows of the result? A reduction along axis 0 leaves a number for each column. Along which dimension
# of `s` does it run, then? And in which dtype are the left operands of the two products that follow?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def probabilities(s, c, lse):
#     return jnp.exp2(____ - lax.broadcast_in_dim(lse, s.shape, ____))
#
#
# def score_gradients(p, dp, delta):
#     return p * ____
#
#
# def add_dkv(slot, mine, queries, mask):
#     q, do = queries.q.at[slot], queries.do.at[slot]
#     s, dp = block_scores(____, ____), block_scores(____, ____)
#     p = probabilities(____, q.shape[1] ** -0.5 * LOG2E, ____)
#     ds = score_gradients(p, dp, ____).astype(q.dtype)
#     plgpu.wgmma(mine.dv_acc, ____, ____)
#     plgpu.wgmma(mine.dk_acc, ____, ____)
#     ____
#     return ds
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def probabilities(s, c, lse):
#     return jnp.exp2(s * c - lax.broadcast_in_dim(lse, s.shape, (1,)))
#
#
# def score_gradients(p, dp, delta):
#     return p * (dp - lax.broadcast_in_dim(delta, p.shape, (1,)))
#
#
# def add_dkv(slot, mine, queries, mask):
#     q, do = queries.q.at[slot], queries.do.at[slot]
#     s, dp = block_scores(mine.k, q), block_scores(mine.v, do)
#     p = probabilities(mask(s), q.shape[1] ** -0.5 * LOG2E, numbers(queries.lse.at[slot]))
#     ds = score_gradients(p, dp, numbers(queries.delta.at[slot])).astype(q.dtype)
#     plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)
#     plgpu.wgmma(mine.dk_acc, ds, q)
#     plgpu.wgmma_wait(0)
#     return ds
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A product can be had in either orientation at the same price. So choose the one that leaves its result
# where the next product wants it. Queries beyond the last one do no harm here: `do` and `delta` are 0
# there, so they add 0.

# %% [markdown]
# ## Worked example: one result, many CTAs
#
# Each CTA copies a tile and adds it to one result in GMEM. The copy engine can add while it stores:
# `copy_smem_to_gmem(..., reduction_op="add")`. CTAs add to the same elements at the same time, and no addition is lost.
# Their order changes from run to run, and so do the last bits.
#
# There has to be something to add to before the kernel begins. `jax.new_ref(array)` makes a Ref of an array. A kernel
# takes it like an input, and may write it. Afterwards `o[...]` is what is in it.


# %%
def total_kernel(x_gmem, o_gmem, x_smem, loaded):
    plgpu.copy_gmem_to_smem(x_gmem.at[lax.axis_index("i")], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.copy_smem_to_gmem(x_smem, o_gmem, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)


def total(x: Float[Array, "N M K"]) -> Float[Array, "M K"]:
    o = jax.new_ref(jnp.zeros(x.shape[1:], x.dtype))
    plgpu.kernel(
        total_kernel,
        out_type=[],
        grid=x.shape[:1],
        grid_names=("i",),
        scratch_types=[plgpu.SMEM(x.shape[1:], x.dtype), plgpu.Barrier()],
    )(x, o)
    return o[...]


print(total(jnp.arange(5 * 64 * 64, dtype=jnp.float32).reshape(5, 64, 64))[0, :3], "= 5 * 8192 and so on")

# %% [markdown]
# ## Puzzle 10b: Copies that add
#
# **Goal.** Compute `dq` in the same kernel. Each CTA adds its part to an array in GMEM.
#
# ### Theory
#
# `dq = ds k * scale` is a sum over all keys, and each CTA has 128 of them. A second kernel, in which queries stay,
# would compute `s` and `dp` again: 4 + 3 products. One kernel needs 5. So let each CTA add its part to `dq`, in
# float32, as in the worked example.
#
# Both warpgroups write their `ds^T` into the same slot in SMEM. Then each of them computes half of the *columns* of dq,
# from all 128 keys. (Each could also use its own 64 keys, for all columns. Then both would add to every column: twice
# the bytes.)
#
# ```text
#     both.ds[i % 2], (128 keys, 64 queries)          keys, both.k: your half     dq of the block, (64 queries, D)
#     +------------+                                  +---------+---------+       +---------+---------+
#     | of wg 0    |                                  |         |         |       |         |         |
#     +------------+    .T   @                        | for 0   | for 1   |   ->  | by wg 0 | by wg 1 |
#     | of wg 1    |                                  |         |         |       +---------+---------+
#     +------------+                                  +---------+---------+
# ```
#
# `both.written` has two arrivals, one of each warpgroup: after a wait for it, both halves are there. wgmma reads SMEM
# as the copy engine does, so `commit_smem` has to come between your stores and the arrival. Two slots for `ds` are
# enough, without a barrier that gives them back. Why?


# %%
class Both(NamedTuple):
    """What both warpgroups write and read."""

    k: Any  # (128, 64), your 64 columns of the keys of both
    ds: Any  # (2, 128, 64), the ds^T of both, in q's dtype
    dq: Any  # (2, 64, 64), float32: the columns of dq of each, on their way out
    written: Any  # a barrier of two arrivals: ds of a block is there


def share(i, wg, ds, both):
    # i: the number of the block of queries      ds: (64 keys, 64 queries), yours, in registers      both: a Both
    # Put ds into its half of slot i % 2, and tell the other warpgroup. Do not wait.
    pass  # YOUR CODE HERE


def add_dq(i, wg, both, dq_part):
    # dq_part: (64, D), float32, in GMEM: dq of block i of the queries
    # Wait for ds of both warpgroups, compute your 64 columns of dq, and start to add them to dq_part by way of both.dq.
    # plgpu.wait_smem_to_gmem(0) waits for your copies to GMEM, as far as there are any.
    pass  # YOUR CODE HERE


# %%
def plain_step(i, slot, wg, mine, queries, mask, both, dq_part):
    share(i, wg, add_dkv(slot, mine, queries, mask), both)
    add_dq(i, wg, both, dq_part)


def backward_kernel(q, do, lse, delta, k, v, dq, dk, dv, *scratch, step, offset):
    *scratch, ds_smem, dq_smem, written = scratch
    wg, h = lax.axis_index("wg"), lax.axis_index("h")
    # 64 columns of bfloat16 are one whole swizzled piece, so such a slice may be an operand of wgmma
    both = Both(scratch[0].at[:, pl.ds(wg * 64, 64)], ds_smem, dq_smem, written)

    def one(i, slot, mine, queries, mask):
        step(i, slot, wg, mine, queries, mask, both, dq.at[h, pl.ds(i * 64, 64)])

    keys_stay((q, do, lse, delta, k, v), dk, dv, scratch, one, offset)


# %%
def backward(q, k, v, o, lse, do, *, step, causal=True, slots=2):
    # given: dq, dk, dv. A Ref that is handed to a kernel can be written: dq starts as zeros, and everybody adds to it
    (H, Skv, D), dq = k.shape, jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = plgpu.kernel(
        functools.partial(backward_kernel, step=step, offset=offset_of(q, k, causal)),
        out_type=[k, v],
        grid=(H, pl.cdiv(Skv, 128)),
        grid_names=("h", "j"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            *scratch_of_keys(D, q.dtype, slots),
            plgpu.SMEM((2, 128, 64), q.dtype, transforms=SWIZZLED),
            plgpu.SMEM(
                (2, 64, 64), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
            ),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, do, lse, delta_of(o, do), k, v, dq)
    return (dq[...] * D**-0.5).astype(q.dtype), dk, dv


def plain_grads(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "H Skv D"],
    v: Float[Array, "H Skv D"],
    do: Float[Array, "H Sq D"],
    *,
    causal: bool = True,
    slots: int = 2,
) -> tuple[Float[Array, "H Sq D"], Float[Array, "H Skv D"], Float[Array, "H Skv D"]]:
    o, lse = forward(q, k, v, causal=causal)
    return backward(q, k, v, o, lse, do, step=plain_step, causal=causal, slots=slots)


# %%
# Budget for q (1, 256, 128), k (1, 384, 128), v (1, 384, 128), do (1, 256, 128): flops=148_000_000,
# gmem_bytes=1_600_000. Forward is in both, too. A second backward kernel that computes s and dp once more would make it
# 190 million FLOPs.
check("gpu_attention/10b", plain_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The products read `both.ds`, and you write it with stores. What has to be between the two, besides the barrier? For
# `add_dq`: which of the two operands is to be transposed? And before you write `both.dq`: who may still be reading it?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def share(i, wg, ds, both):
#     both.ds[____, pl.ds(____, 64)] = ds
#     ____
#     plgpu.barrier_arrive(____)
#
#
# def add_dq(i, wg, both, dq_part):
#     plgpu.barrier_wait(____)
#
#     def multiply(acc):
#         plgpu.wgmma(acc, ____, ____)
#         return acc[...]
#
#     dq = pl.run_scoped(multiply, plgpu.ACC((64, 64)))
#     ____
#     both.dq[wg] = dq
#     ____
#     plgpu.copy_smem_to_gmem(____, ____, reduction_op="add")
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def share(i, wg, ds, both):
#     both.ds[lax.rem(i, 2), pl.ds(wg * 64, 64)] = ds
#     plgpu.commit_smem()
#     plgpu.barrier_arrive(both.written)
#
#
# def add_dq(i, wg, both, dq_part):
#     plgpu.barrier_wait(both.written)
#
#     def multiply(acc):
#         plgpu.wgmma(acc, both.ds.at[lax.rem(i, 2)].T, both.k)
#         return acc[...]
#
#     dq = pl.run_scoped(multiply, plgpu.ACC((64, 64)))
#     plgpu.wait_smem_to_gmem(0)
#     both.dq[wg] = dq
#     plgpu.commit_smem()
#     plgpu.copy_smem_to_gmem(both.dq.at[wg], dq_part.at[:, pl.ds(wg * 64, 64)], reduction_op="add")
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Five products a block, and not seven. Two slots are enough because of the order: you write slot 0 again
# two steps later, and you have waited for `written` of the step between them. The other warpgroup arrives there after
# it is done with slot 0. But see how often the tensor cores wait.

# %%
if not unwritten(plain_grads):
    show(plain_grads, *(normal((1, tokens, 128), "bfloat16") for tokens in (256, 256, 256, 256)), causal=False, l2=True)

# %% [markdown]
# ## Puzzle 10c: Products in a queue
#
# **Goal.** Write the step once more, in an order in which a product is on its way while threads compute `p`, and while
# they wait for each other. The cell below it makes a function of it that `jax.grad` can differentiate.
#
# ### Theory
#
# A step has five products. In Puzzle 10b a warpgroup starts them, waits for them, and then computes: while it computes,
# none of its products is on its way. But `dp` needs nothing of `p`, and `dv` needs nothing of `ds`. So start them
# earlier:
#
# ```text
#     threads         wait for s |     p      | wait for dp |    ds    | share |   wait for dq   | dq out |
#     tensor cores    |    s     |      dp                  |          dv          |  dk  |  dq  |
# ```
#
# While you compute `p`, `dp` is on its way. And while you wait for the other warpgroup's `ds`, `dv` and `dk` are. (If
# `dv` starts right after `ds`, it makes less than 1% of a difference on an H200.) `acc[...]` waits for all products
# that you have started, so see to it which ones these are.
#
# Is it better to start `dp` with `s`, and to read `s` as in Puzzle 6b? No. The tensor cores take turns between the two
# warpgroups. With `dp` behind each `s`, one warpgroup would wait for its scores while the other one's `dp` is computed.
# On an H200 that took 3% longer.


# %%
def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
    # The arguments are those of add_dkv, share and add_dq. Do what the three do, in the order of the picture. You can
    # call block_scores, probabilities, score_gradients, share and add_dq.
    pass  # YOUR CODE HERE


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q, k, v, causal=True):
    return forward(q, k, v, causal=causal)[0]


def attention_fwd(q, k, v, causal):
    o, lse = forward(q, k, v, causal=causal)
    return o, (q, k, v, o, lse)


def attention_bwd(causal, residuals, do):
    return backward(*residuals, do, step=queued_step, causal=causal)


attention.defvjp(attention_fwd, attention_bwd)


def attention_grads(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "H Skv D"],
    v: Float[Array, "H Skv D"],
    do: Float[Array, "H Sq D"],
    *,
    causal: bool = True,
) -> tuple[Float[Array, "H Sq D"], Float[Array, "H Skv D"], Float[Array, "H Skv D"]]:
    _, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, causal), q, k, v)
    return vjp(do)


# %%
# Budget for q (1, 256, 128), k (1, 384, 128), v (1, 384, 128), do (1, 256, 128): tensor_idle=31_300. Forward has 9,951
# of these cycles. With Puzzle 10b's step it would be 35,698, and with `dp` started together with `s` 31,498.
check("gpu_attention/10c", attention_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the picture from left to right. `block_scores` waits for its product: for which of the five is that right?
# At each `acc[...]`, which products have you started, and do you want to wait for all of them? `add_dq` reads an
# accumulator with `acc[...]`. So what is over when it returns?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
#     q, do = queries.q.at[slot], queries.do.at[slot]
#     s = ____
#
#     def weights(dp_acc):
#         ____
#         p = probabilities(mask(s), ____, ____)
#         ____
#         ____
#         return score_gradients(p, ____, ____).astype(q.dtype)
#
#     ds = pl.run_scoped(weights, plgpu.ACC((64, 64)))
#     ____
#     ____
#     add_dq(i, wg, both, dq_part)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
#     q, do = queries.q.at[slot], queries.do.at[slot]
#     s = block_scores(mine.k, q)
#
#     def weights(dp_acc):
#         plgpu.wgmma(dp_acc, mine.v, do.T)
#         p = probabilities(mask(s), q.shape[1] ** -0.5 * LOG2E, numbers(queries.lse.at[slot]))
#         dp = dp_acc[...]
#         plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)
#         return score_gradients(p, dp, numbers(queries.delta.at[slot])).astype(q.dtype)
#
#     ds = pl.run_scoped(weights, plgpu.ACC((64, 64)))
#     share(i, wg, ds, both)
#     plgpu.wgmma(mine.dk_acc, ds, q)
#     add_dq(i, wg, both, dq_part)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Forward and backward are one function now, and `jax.grad` goes through it. On an H200 (four sequences
# of 8192 tokens, 16 heads, D = 128, bfloat16, causal, jax 0.11.2, medians of seven rounds) both passes together take
# 7.60 ms with this step, and 7.82 ms with that of Puzzle 10b. cuDNN's take 7.83 ms.

# %%
if not unwritten(attention_grads):
    show(
        attention_grads,
        *(normal((1, tokens, 128), "bfloat16") for tokens in (256, 256, 256, 256)),
        causal=False,
        l2=True,
    )

# %% [markdown]
# ## A layer that learns
#
# Does it train? A layer with one head reads a list of 32 pairs, a key and a value each, in any order. Then it is asked
# for 32 keys, some of them twice, and has to name their values. Nothing in its weights can know the values. So
# it has to learn to look them up: to make queries that fit the keys. That is what attention is for.
#
# ```text
#     d=3  a=7  c=1  b=0  ...  |  a?  d?  a?  ...        answers: 7  3  7
# ```
#
# Without a GPU, every step runs your forward and backward kernels in this package's machine, CTA by CTA. The 60 steps
# take 15 s on two quiet cores, and about a minute on busy ones. On a Hopper GPU the same cell runs them compiled.


# %%
KEYS, VALUES, STEPS = 32, 8, 60


def lists(rng, batch=2):
    """x (batch, 64, 72): a list of pairs, and what is asked. y (batch, 32): the right answers."""
    keys = np.stack([rng.permutation(KEYS) for _ in range(batch)])
    values, asked = rng.integers(0, VALUES, (batch, KEYS)), rng.integers(0, KEYS, (batch, KEYS))
    x, (b, t) = np.zeros((batch, 2 * KEYS, 2 * KEYS + VALUES), np.float32), np.indices((batch, KEYS))
    x[b, t, keys] = x[b, t, KEYS + values] = x[b, KEYS + t, KEYS + VALUES + keys[b, asked]] = 1
    return x, values[b, asked]


def scores_of(w, x, attend):
    """A score for each value, (batch, 32, VALUES). For `attend`, each list of the batch is a head."""
    q, k, v = (jnp.dot(x, w[name], precision="highest").astype(jnp.bfloat16) for name in "qkv")
    o = attend(q, k, v)[:, KEYS:].astype(jnp.float32)
    return jnp.dot(o, w["o"], precision="highest")


# %%
def new_layer(seed):
    rng = np.random.default_rng(seed)
    w = {name: 0.3 * rng.standard_normal((2 * KEYS + VALUES, 128)) for name in "qkv"}
    return jax.tree.map(jnp.float32, {**w, "o": 0.1 * rng.standard_normal((128, VALUES))})


# %%
def trained_layer(attend, curve):
    """The weights after STEPS steps of Adam. curve(loss) is called after each."""

    def loss_of(w, x, y):
        logs = jax.nn.log_softmax(scores_of(w, x, attend))
        return -jnp.take_along_axis(logs, y[..., None], axis=2).mean()

    @jax.jit
    def step(w, m, v, t, x, y):
        loss, g = jax.value_and_grad(loss_of)(w, x, y)
        m, v = (
            jax.tree.map(lambda a, b, r=r, n=n: r * a + (1 - r) * b**n, a, g) for a, r, n in ((m, 0.9, 1), (v, 0.99, 2))
        )
        sizes = jax.tree.map(lambda m, v: m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8), m, v)
        return jax.tree.map(lambda w, u: w - 0.03 * u, w, sizes), m, v, loss

    rng, w = np.random.default_rng(1), new_layer(0)
    m = v = jax.tree.map(jnp.zeros_like, w)
    for t in range(1, STEPS + 1):
        w, m, v, loss = step(w, m, v, t, *lists(rng))
        curve(loss)
    return w


# %%
if missing := unwritten(attention_grads):
    print(f"No layer yet. Still to be written: {', '.join(missing)}.")
else:
    print("Your kernels run", "compiled." if jax.default_backend() == "gpu" else "in the machine, on this CPU.")
    plain_curve = Curve(STEPS, "plain jnp")
    trained_layer(causal_spec, plain_curve)
    curve = Curve(STEPS, "your kernels", beside={"plain jnp": plain_curve.values})
    layer = trained_layer(attention, curve)
    x, y = lists(np.random.default_rng(2))
    right = (np.asarray(scores_of(layer, x, attention)).argmax(axis=2) == y).mean()
    print(f"Loss: from {curve.values[0]:.2f} to {curve.values[-1]:.4f}. For new lists, {right:.0%} of the answers fit.")

# %% [markdown]
# ## Puzzle 11: Choose
#
# **Goal.** Write down what a configuration needs, and how long it takes. Then let this model choose one.
#
# ### Theory
#
# On an H200, the best and the worst configuration measured for D = 128 took 3.560 and 4.274 ms: 20% apart.
#
# `configured` is Puzzle 6b's kernel with three choices. Two or three warpgroups compute (consumers, here called
# **readers**), with 64 queries each. A block has 64 to 256 keys, and each stream has one to four slots. Its CTAs are
# pairs that copy K and V once for both (gpu_matmul.py Puzzles 8 and 9). Without a mask, a pair takes tile after tile.
# With `causal=True`, each tile is a new pair's, and a block on the diagonal goes in parts of 64 keys: only those that
# somebody sees are multiplied.
#
# What stands in the way of more readers, keys and slots?
#
# ```text
#     registers   acc (64, D) and scores (64, bkv), float32, and p (64, bkv), 16 bits, shared by 128 threads:
#                 at most 216 for each thread with two readers, 136 with three
#     SMEM        232,448 bytes: queries, slots of K and V, 8 for each barrier
# ```
#
# A thread has 24 registers more, for addresses, maxima and sums. And what does a block of keys cost?
#
# ```text
#     tensor cores   4096 FLOPs a cycle, for both products of all readers
#     softmax        200 cycles a reader, plus 8.7 a key of the block (the same for two readers and for three).
#                    The tensor cores wait meanwhile
#     one slot       the copy of one block of V, 56 bytes a cycle, while all wait. With more slots: nothing
# ```
#
# 200 and 8.7 were fitted to the times at the end of this notebook. An SM has one tile at a time: 64 queries for each
# reader. Rounds, and `min` over plans, are as in gpu_matmul.py Puzzle 11. Of plans that take as many cycles, choose the
# one with the least SMEM. (The model leaves masks out: they halve the work of all plans.)


# %%
SMS, SMEM_BYTES = 132, 232_448
TENSOR_FLOPS, WARPGROUP_CYCLES, KEY_CYCLES, COPIED_BYTES = 4096, 200, 8.7, 56
REGISTERS = {2: (24, 240), 3: (32, 160)}  # readers -> of a thread of the producer, of a reader
FREE = {readers: most - 24 for readers, (_, most) in REGISTERS.items()}
PLANS = [(readers, bkv, slots) for readers in (2, 3) for bkv in (64, 128, 192, 256) for slots in (1, 2, 3, 4)]


def registers(D, bkv):
    # Return how many registers of a thread hold acc, the scores of a block and the probabilities of the one before.
    pass  # YOUR CODE HERE


def smem_bytes(D, readers, bkv, slots):
    # Return the bytes of SMEM that `configured` below takes for arrays of 16 bits. Its scratch_types say what is there.
    pass  # YOUR CODE HERE


def cycles(H, Sq, Skv, D, readers, bkv, slots):
    # Return the cycles of the whole kernel: rounds of tiles, each with all blocks of keys. The last ones may be ragged.
    pass  # YOUR CODE HERE


def choose(H, Sq, Skv, D):
    # Return the one of PLANS that fits, by registers and SMEM, and takes the fewest cycles; of those that take as many,
    # the one with the least SMEM.
    pass  # YOUR CODE HERE


# %%
# Given, up to the check. Of these cells you need only scratch_types in `configured`. The others show how it is done.
def first_block(c, q_smem, k, slot, limit, dtype):
    # given: Puzzle 6b's begin, without keys from `limit` on. limit: a number for all rows, or one for each
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])
    plgpu.barrier_arrive(k.empty.at[slot])
    s = jnp.where(spread(counted(s.shape[1], 1), 1, s.shape) < limit, s, -jnp.inf)
    p, _, m, l = online(s, c, *nothing_yet())
    return p.astype(dtype), m, l


def diagonal(j, n, c, m, l, acc, q_smem, k, v, first, offset):
    # given: block j, which some queries see in part, in parts of 64 keys. It is the n-th one in the slots.
    bkv, slot = k.smem.shape[1], lax.rem(n, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])
    plgpu.barrier_wait(v.full.at[slot])

    def part(r, state):
        keys = pl.ds(r * 64, 64)
        s = hide(block_scores(q_smem, k.smem.at[slot, keys]), first, j * bkv + r * 64, offset)
        p, alpha, m, l = online(s, c, *state)
        weigh(acc, p, alpha, v.smem.at[slot, keys])
        return m, l

    parts = jnp.minimum(seen_blocks(first, 64, offset, 64) - j * (bkv // 64), bkv // 64)
    state = lax.fori_loop(0, parts, part, (m, l))
    plgpu.barrier_arrive(k.empty.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return state


# %%
def attend_tile(n, steps, c, acc, q_smem, k, v, first, offset, limit):
    # given: all blocks of a tile; returns the sum of each row. n: how many blocks went through the slots before them
    # first: the number of the first query      offset: its position, None without a mask      limit: see first_block
    clear = seen = steps
    if offset is not None:
        seen = jnp.minimum(seen_blocks(first, 64, offset, k.smem.shape[1]), steps)
        clear = jnp.clip(clear_blocks(first, offset, k.smem.shape[1]), 1, seen)
    state = first_block(c, q_smem, k, lax.rem(n, k.smem.shape[0]), limit, q_smem.dtype)
    p, m, l = lax.fori_loop(1, clear, lambda j, state: ahead(n + j, c, *state, acc, q_smem, k, v), state)
    end(n + clear - 1, p, acc, v)
    if offset is None:
        return l

    def step(j, state):
        return diagonal(j, n + j, c, *state, acc, q_smem, k, v, first, offset)

    _, l = lax.fori_loop(clear, seen, step, (m, l))

    @pl.loop(n + seen, n + steps)
    def _(n):  # nobody sees these blocks, but the other CTA waits for its slots
        for stream in (k, v):
            plgpu.barrier_wait(stream.full.at[lax.rem(n, k.smem.shape[0])])
            plgpu.barrier_arrive(stream.empty.at[lax.rem(n, k.smem.shape[0])])

    return l


# %%
class Tiles(NamedTuple):
    """What the CTAs of `configured` share out: tiles of `rows` queries, each for all CTAs of a cluster."""

    shape: tuple[int, int, int, int]  # H, Sq, Skv, D
    rows: int
    bkv: int
    causal: bool

    @property
    def count(self):
        return self.shape[0] * pl.cdiv(self.shape[1], self.rows)

    @property
    def left_out(self):  # keys that are in blocks 0 and 1, so that the last block is full
        return 0 if self.causal else -self.shape[2] % self.bkv

    def place(self, t):
        # The head, the first query, and the number of blocks of tile t. With a mask, long rows come first.
        (_, Sq, Skv, _), last = self.shape, pl.cdiv(self.shape[1], self.rows) - 1
        h, i, steps = lax.div(t, last + 1), lax.rem(t, last + 1), pl.cdiv(Skv, self.bkv)
        if not self.causal:
            return h, i * self.rows, steps
        row = (last - i) * self.rows
        return h, row, jnp.minimum(seen_blocks(row, self.rows, Skv - Sq, self.bkv), steps)


def bring(n, part, stream, axes):
    # given: produce of Puzzle 5, for all CTAs of a cluster
    slot = lax.rem(n, stream.smem.shape[0])

    @pl.when(n >= stream.smem.shape[0])
    def _():
        plgpu.barrier_wait(stream.empty.at[slot])

    plgpu.copy_gmem_to_smem(part, stream.smem.at[slot], stream.full.at[slot], collective_axes=axes)


# %%
def bring_all(k_gmem, v_gmem, k, v, tiles, axes):
    # given: what the producer does
    slots, left_out = k.smem.shape[0], tiles.left_out

    # init_carry: what the body returns is `carry` for the next tile. After the last one it is in `total`.
    @plgpu.nd_loop((tiles.count,), collective_axes="cta", init_carry=0)
    def total(loop, carry):
        h, _, steps = tiles.place(loop.index[0])

        @pl.loop(0, steps)
        def _(j):
            keys = pl.ds(jnp.maximum(j * tiles.bkv - left_out, 0), tiles.bkv)
            bring(carry + j, k_gmem.at[h, keys], k, axes)
            bring(carry + j, v_gmem.at[h, keys], v, axes)

        return carry + steps

    @pl.loop(jnp.maximum(total - slots, 0), total)
    def _(n):  # a CTA must not end before the last arrival of the other one
        plgpu.barrier_wait(k.empty.at[lax.rem(n, slots)])
        plgpu.barrier_wait(v.empty.at[lax.rem(n, slots)])


# %%
def configured_kernel(q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, loaded, *barriers, tiles, axes):
    k_full, v_full, k_empty, v_empty = barriers
    wg, readers, (_, Sq, Skv, D) = lax.axis_index("wg"), q_smem.shape[0], tiles.shape
    k, v = Stream(k_smem, k_full, k_empty), Stream(v_smem, v_full, v_empty)

    @pl.when(wg == readers)
    def _():
        plgpu.set_max_registers(REGISTERS[readers][0], action="decrease")
        bring_all(k_gmem, v_gmem, k, v, tiles, axes)

    @pl.when(wg < readers)
    def _():
        plgpu.set_max_registers(REGISTERS[readers][1], action="increase")
        mine, before = q_smem.at[wg], wg * 64
        if axes:
            before += lax.axis_index(axes) * readers * 64

        @plgpu.nd_loop((tiles.count,), collective_axes="cta", init_carry=0)
        def _(loop, carry):
            h, row, steps = tiles.place(loop.index[0])
            first = row + before
            plgpu.copy_gmem_to_smem(q_gmem.at[h, pl.ds(first, 64)], mine, loaded.at[wg])
            plgpu.barrier_wait(loaded.at[wg])

            offset, limit = None, tiles.bkv - tiles.left_out
            if tiles.causal:
                offset = Skv - Sq
                limit = spread(first + offset + 1 + counted(64, 0), 0, (64, tiles.bkv))

            def attended(acc):
                l = attend_tile(carry, steps, D**-0.5 * LOG2E, acc, mine, k, v, first, offset, limit)
                return finish(acc, l)

            mine[...] = pl.run_scoped(attended, plgpu.ACC((64, D))).astype(mine.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, o_gmem.at[h, pl.ds(first, 64)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # until mine has been read: the next queries come in
            return carry + steps

        plgpu.wait_smem_to_gmem(0)


# %%
def configured(
    q: Float[Array, "H Sq D"],
    k: Float[Array, "H Skv D"],
    v: Float[Array, "H Skv D"],
    *,
    readers: int = 2,
    bkv: int = 128,
    slots: int = 2,
    cluster: int = 2,
    causal: bool = False,
) -> Float[Array, "H Sq D"]:
    (H, Sq, D), Skv = q.shape, k.shape[1]
    tiles = Tiles((H, Sq, Skv, D), 64 * readers * cluster, bkv, causal)
    stream = plgpu.SMEM((slots, bkv, D), q.dtype, transforms=SWIZZLED)
    full, count = plgpu.Barrier(num_barriers=slots), {"num_barriers": slots, "num_arrivals": readers}
    empty, pair = plgpu.Barrier(**count), {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **count)
        pair = {"cluster": (cluster,), "cluster_names": ("cluster",)}
    return plgpu.kernel(
        functools.partial(configured_kernel, tiles=tiles, axes="cluster" if cluster > 1 else None),
        out_type=q,
        # with a mask tiles differ in length: whoever is free takes the next one, as a new CTA
        grid=(tiles.count if causal else min(tiles.count, SMS // cluster),),
        grid_names=("cta",),
        num_threads=readers + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((readers, 64, D), q.dtype, transforms=SWIZZLED),
            *(stream, stream, plgpu.Barrier(num_barriers=readers), full, full, empty, empty),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **pair,
    )(q, k, v)


# %%
def configured_spec(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, causal: bool = False
) -> Float[Array, "H Sq D"]:
    return (causal_spec if causal else attention_spec)(q, k, v)


def best(
    q: Float[Array, "H Sq D"], k: Float[Array, "H Skv D"], v: Float[Array, "H Skv D"], *, causal: bool = False
) -> Float[Array, "H Sq D"]:
    readers, bkv, slots = choose(q.shape[0], q.shape[1], k.shape[1], q.shape[2])
    return configured(q, k, v, readers=readers, bkv=bkv, slots=slots, causal=causal)


# %%
# Budget for q (2, 384, 128), k (2, 640, 128), v (2, 640, 128): smem_bytes=163_920. The check also compares
# your figures with the kernel's, and your choice with every other one.
check("gpu_attention/11", best)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many elements do the three arrays have, and how many of them fit into a register of 32 bits? For SMEM, go through
# `scratch_types`: how many barriers are in each of the five? A product of (m, k) and (k, n) is 2 * m * k * n FLOPs. How
# many tiles are there, and how many of them does the SM have that has the most? Python compares tuples by their first
# elements first.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def registers(D, bkv):
#     return (____) // 128
#
#
# def smem_bytes(D, readers, bkv, slots):
#     queries = ____
#     blocks = ____
#     return queries + blocks + ____ * 8
#
#
# def cycles(H, Sq, Skv, D, readers, bkv, slots):
#     tensor = readers * ____ / TENSOR_FLOPS
#     softmax = ____
#     copy = ____ if slots == 1 else 0
#     rounds = pl.cdiv(____, SMS)
#     return rounds * ____ * (tensor + softmax + copy)
#
#
# def choose(H, Sq, Skv, D):
#     def fits(readers, bkv, slots):
#         return ____ and ____
#
#     return min(____, key=lambda plan: (____, ____))
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def registers(D, bkv):
#     return (64 * D + 64 * bkv + 64 * bkv // 2) // 128
#
#
# def smem_bytes(D, readers, bkv, slots):
#     return readers * 64 * D * 2 + 2 * slots * bkv * D * 2 + (readers + 4 * slots) * 8
#
#
# def cycles(H, Sq, Skv, D, readers, bkv, slots):
#     tensor = readers * 2 * (2 * 64 * bkv * D) / TENSOR_FLOPS
#     softmax = readers * WARPGROUP_CYCLES + bkv * KEY_CYCLES
#     copy = bkv * D * 2 / COPIED_BYTES if slots == 1 else 0
#     rounds = pl.cdiv(H * pl.cdiv(Sq, 64 * readers), SMS)
#     return rounds * pl.cdiv(Skv, bkv) * (tensor + softmax + copy)
#
#
# def choose(H, Sq, Skv, D):
#     def fits(readers, bkv, slots):
#         return registers(D, bkv) <= FREE[readers] and smem_bytes(D, readers, bkv, slots) <= SMEM_BYTES
#
#     return min(
#         (plan for plan in PLANS if fits(*plan)),
#         key=lambda plan: (cycles(H, Sq, Skv, D, *plan), smem_bytes(D, *plan)),
#     )
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** For 8192 tokens and D = 128 your model takes two readers and 192 keys, and for D = 64 three readers and
# 128 keys. On an H200 each of them was the fastest one measured. For D = 64, the best one with two readers took 16%
# longer. No kernel had to run to find them.

# %% [markdown]
# ## What you built
#
# The forward pass of flash attention with the parts that FlashAttention-3 has on Hopper: a producer, two consumers,
# online softmax and probabilities in registers, ping-pong, the next scores first, causal masks. Pairs of CTAs that
# share their copies come on top. And the backward pass, in one kernel. On an H200, beside cuDNN, tokamax and JAX's own
# kernel (four sequences of 8192 tokens, 16 heads, D = 128, bfloat16, jax 0.11.2, medians of seven rounds of 30 calls in
# which all took turns; causal kernels count half of the products, and forward + backward counts seven for a block, two
# and five):
#
# ```text
#     one warpgroup, slots (Puzzle 4)             412 TFLOP/s
#     two warpgroups and a producer (Puzzle 5)    540
#     ping-pong (Puzzle 6)                        570
#     the next scores first (Puzzle 6b)           593
#     pairs, tile after tile (Puzzle 11)          653
#     cuDNN                                       590
#     tokamax 0.0.17                              598
#     JAX's attention_mgpu (float16)              577
#
#     causal, no turns (Puzzle 7)                 515
#     causal (Puzzle 7b)                          557
#     pairs, causal (Puzzle 11)                   598
#     cuDNN, causal                               538
#     tokamax, causal                             562
#     JAX's attention_mgpu, causal (float16)      551
#
#     forward + backward, causal (Puzzle 10b)     492
#     the same, products in a queue (Puzzle 10c)  506
#     cuDNN, forward + backward, causal           492
#     tokamax, forward + backward, causal         456
# ```
#
# In the fastest of these kernels the chip draws its limit of 700 W. It lowers its clock to stay there: 1.4 to 1.7 GHz
# were read. So in the end it is energy that a kernel has to save. In a pair of CTAs, K and V leave L2 half as often. A
# CTA that goes on to the next tile saves the start of a new one.
#
# Decoding is bound by bandwidth. So a copy of as many bytes is beside it (32 heads over 8, D = 128, bfloat16). The copy
# reads half of these bytes and writes the other half. Decoding only reads, so it may be the faster one:
#
# ```text
#                        64 sequences of 8,192 tokens      one of 131,072
#     decode (Puzzle 9)   4 parts      4,157 GB/s          64 parts    3,499 GB/s
#     paged (Puzzle 9b)   2 parts      4,073
#     cuDNN                            4,027                           3,269
#     a copy                           4,045                           3,657
# ```
#
# How good is your model? These are configurations of Puzzle 11, measured on an H200 (64 heads, 8192 queries and keys,
# bfloat16, jax 0.11.2, medians of seven rounds of 20 calls), without clusters and with a CTA for each tile, as in
# Puzzle 6b. Each line divides your cycles by a measured time, which gives a clock. The two fitted figures make it about
# 2 GHz, whatever the chip's own clock was. What counts is that it stays between 1.89 and 2.06 GHz in all lines but one:
# 256 keys, which need more registers than there are. Plans that the model puts less than 5% apart may change places.

# %%
MEASURED_MS = {  # (D, readers, bkv, slots) -> milliseconds
    (128, 2, 192, 2): 3.560,
    (128, 2, 128, 2): 3.637,
    (128, 2, 128, 3): 3.728,
    (128, 3, 64, 2): 3.789,
    (128, 2, 64, 2): 3.968,
    (128, 2, 128, 1): 4.192,
    (128, 2, 192, 1): 4.274,
    (64, 3, 128, 2): 2.164,
    (64, 3, 128, 4): 2.224,
    (64, 2, 128, 4): 2.520,
    (64, 2, 192, 2): 2.620,
    (64, 3, 64, 4): 2.689,
    (64, 2, 256, 2): 2.736,
    (64, 2, 64, 2): 3.001,
}
if not unwritten(choose):
    print("You choose", {D: choose(64, 8192, 8192, D) for D in (128, 64)})
    for (D, *plan), ms in MEASURED_MS.items():
        predicted, held = cycles(64, 8192, 8192, D, *plan), registers(D, plan[1])
        told = f"{predicted:9,.0f} cycles, {held} registers, {ms:.3f} ms measured: {predicted / ms / 1e6:.2f} GHz"
        print(f"D = {D}, {tuple(plan)}: {told}")

# %% [markdown]
# What does NVIDIA's compiler say? `gpu_report` compiles your kernel for a chip that need not be there. First your
# choice: nothing is spilled. Then 256 keys, where your `registers` says 224, and 216 are free: the compiler has to move
# some of them to memory and back, in every step. (The report says 168 registers: what a thread has before
# `set_max_registers`.)

# %%
if not unwritten(best):
    big, narrow = (jax.ShapeDtypeStruct((4 * 16, 8192, D), jnp.bfloat16) for D in (128, 64))
    gpu_report(best, big, big, big, chip="h200")
    gpu_report(configured, narrow, narrow, narrow, bkv=256, chip="h200")

# %% [markdown]
# **Read next.** JAX's own kernel, `attention_mgpu` in `jax.experimental.pallas.ops.gpu`, is built from the same parts.
# The FlashAttention-3 paper (Shah et al., 2024) has both of them: ping-pong between warpgroups, and the pipelining of
# Puzzle 6b within each.

# %%
progress()
