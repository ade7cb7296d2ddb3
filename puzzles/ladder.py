# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 90}
# ---

# %% [markdown]
# # The ladder: when a kernel pays
#
# You can write kernels now. Should you? This notebook takes four parts of real models up the same five levels:
#
# ```text
#     1 op by op       eager JAX: every operation is a program of its own
#     2 jit            XLA fuses what it can
#     3 restructured   the same mathematics, written so that XLA can do better
#     4 a kernel       with the first block sizes that came to mind
#     5 a tuned one
# ```
#
# The parts are attention, norm + MLP, the patches of a vision transformer, and the messages of a graph network. At each
# level you predict a cost, or you change it, and the TPU compiler tells you what that bought. It needs no TPU. If it is
# not installed, you see figures that were made beforehand, and they are marked. With a TPU, what you write is measured.
#
# Some kernels here are not worth writing. The notebook says which.
#
# You need `flash_attention.py` up to Puzzle 5, and `matmul.py` up to Puzzle 12.

# %%
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_puzzles import (
    check,
    compare,
    hint,
    normal,
    op_by_op,
    progress,
    setup,
    show,
    unwritten,
)

setup()

# %% [markdown]
# ## Puzzle 1: What eager JAX moves
#
# **Goal.** Nothing is jitted. Say how many bytes attention moves between HBM and the chip.
#
# ### Theory
#
# Without `jax.jit`, JAX runs `s * 2` as a program of its own. The program reads `s` from HBM and writes its result to
# HBM. The next operation reads it again. So the cost of an eager function is easy to count: for each operation, add the
# sizes of the arrays that it reads and of the array that it writes.
#
# Below is attention for `H` heads, in nine operations. A table of scores has `H x T x T` numbers. In float32, at
# `H = 8` and `T = 4096`, it takes 512 MiB. The queries, keys and values take 8 MiB each.
#
# ```text
#     operation         reads                 writes
#     q @ k.T           q, k                  s     float32
#     s * scale         s                     s
#     max over keys     s                     m     (H, T, 1)
#     ...
# ```
#
# Constants such as `scale` cost nothing, and `keepdims=True` is part of its reduction.


# %%
def attention_spec(
    q: BFloat16[Array, "H T D"], k: BFloat16[Array, "H T D"], v: BFloat16[Array, "H T D"]
) -> BFloat16[Array, "H T D"]:
    s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    p = jax.nn.softmax(s * q.shape[2] ** -0.5, axis=2).astype(v.dtype)
    return jnp.einsum("hqk,hkd->hqd", p, v)


def attention(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
    s = s * q.shape[2] ** -0.5
    m = s.max(axis=2, keepdims=True)
    s = s - m
    e = jnp.exp(s)
    l = e.sum(axis=2, keepdims=True)
    p = e / l
    p = p.astype(v.dtype)
    return jnp.einsum("hqk,hkd->hqd", p, v)


def eager_bytes(H, T, D):
    # Return the bytes that the nine operations of attention read and write. q, k, v and the result are bfloat16.
    pass  # YOUR CODE HERE


# %%
# The check compares eager_bytes with a count of the nine programs, for several H, T and D.
check("ladder/1", attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Give names to the four sizes that occur: the table in float32, the table in bfloat16, a column (one float32 for each
# query), and `q`. How often is each one read or written, over all nine lines? The line `s = s - m` alone reads a table
# and a column, and writes a table.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def eager_bytes(H, T, D):
#     table, column, x = 4 * H * T * T, ____, ____
#     return ____ * table + ____ * (table // 2) + ____ * column + ____ * x
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def eager_bytes(H, T, D):
#     table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
#     return 12 * table + 2 * (table // 2) + 4 * column + 4 * x
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 6.5 GiB move for 8 heads of 4096 tokens, and 32 MiB of them are the arguments and the result. At the
# 1640 GB/s of a v6e that is 4.3 ms. The matrix products take 0.075 ms of the MXU. Level 1 is for debugging.

# %% [markdown]
# ## Puzzle 2: What fusion leaves
#
# **Goal.** A compiler makes two programs out of the nine. Say how many bytes are left.
#
# ### Theory
#
# `jax.jit` gives the whole function to XLA, which **fuses** operations: one program computes several of them, and what
# lies between them never leaves the chip. Elementwise operations fuse with almost anything. But softmax has a
# dependency that no fusion removes. The second product needs `e`, and `l`, which is a sum over whole rows of `e`.
#
# Here are the two programs that XLA makes for a v6e, written by hand. A jitted function counts as one program: it reads
# its arguments and writes its results. What happens inside is free.
#
# ```text
#     q, k  -->  [ product, scale, max, subtract, exp, sum ]  -->  e, l  -->  [ divide, product ]  -->  result
#                                                                  v  ---------^
# ```
#
# The table is written once and read once. Eager JAX moved twelve of them, and two in bfloat16.


# %%
@jax.jit
def numerators(q, k):
    s = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * q.shape[2] ** -0.5
    e = jnp.exp(s - s.max(axis=2, keepdims=True))
    return e, e.sum(axis=2, keepdims=True)  # (H, T, T) and (H, T, 1), float32


@jax.jit
def weighted(e, l, v):
    return jnp.einsum("hqk,hkd->hqd", (e / l).astype(v.dtype), v)


def fused_attention(q, k, v):
    e, l = numerators(q, k)
    return weighted(e, l, v)


def fused_bytes(H, T, D):
    # Return the bytes that the two programs read and write.
    pass  # YOUR CODE HERE


# %%
# The check compares fused_bytes with a count of the two programs.
check("ladder/2", fused_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A program does not know what the other one left in VMEM. So how often does an array that goes from the first to the
# second cross HBM? Which arrays are these, and what are their dtypes?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def fused_bytes(H, T, D):
#     table, column, x = ____, ____, ____
#     return ____ * table + ____ * column + ____ * x
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def fused_bytes(H, T, D):
#     table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
#     return 2 * table + 2 * column + 4 * x
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A sixth of the bytes, for one word: `jit`. Below is what the compiler does with the real thing. On a v6e
# it moves what you counted, all but `l`, which stays in VMEM. On a v5e, two tables are written and read: four times 512
# MiB. What a compiler fuses depends on the chip and on the size, so look at the figures before you believe in a fusion.
# From here on, the cells show a v6e. The last cell of the notebook has both chips.

# %%
HEADS = [jax.ShapeDtypeStruct((8, 4096, 128), jnp.bfloat16)] * 3  # q, k, v
compare({"1 op by op": None, "2 jit": None}, *HEADS, made="ladder/attention")

# %% [markdown]
# ## Puzzle 3: Attention in chunks
#
# **Goal.** Compute attention for `c` queries at a time. No array may be as large as the table.
#
# ### Theory
#
# XLA keeps an array in VMEM when it is small enough. The table is not: 512 MiB. But nothing forces you to make all of
# it. One query needs one row of scores, and no other row. So cut the queries into chunks, and let a loop make the
# scores of one chunk, use them, and forget them:
#
# ```text
#     q  [ c queries ][ c queries ][ c queries ]        k, v: all of them, every time
#             |            |            |
#          (c, T)       (c, T)       (c, T)             one after the other, in the same memory
# ```
#
# `jax.lax.map(f, xs)` calls `f` on `xs[0]`, `xs[1]`, ... and stacks the results. It is one loop in the compiled
# program. A Python loop would be unrolled, and `jax.vmap` would make all chunks at once. The axis that `lax.map` walks
# along has to be the first one.


# %%
def chunked_attention(
    q: BFloat16[Array, "H T D"], k: BFloat16[Array, "H T D"], v: BFloat16[Array, "H T D"], *, c: int = 64
) -> BFloat16[Array, "H T D"]:
    # c divides T. Call attention on one chunk of queries at a time.
    pass  # YOUR CODE HERE


# %%
# Budget for q (2, 512, 16), k (2, 512, 16), v (2, 512, 16): operations=30, elements=65_536. operations: those of the
# program that JAX traces. The body of lax.map counts once, a Python loop counts at each turn. elements: of the largest
# array that it makes. 64 queries of 2 heads have 65,536 scores. The whole table has 524,288.
check("ladder/3", chunked_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `q` is (H, T, D), and the chunks lie along T. `reshape` can only split an axis where it is: what is the shape then,
# and which axis does `lax.map` want in front? The results come back stacked in the order of the chunks. What shape has
# that stack, and how far is it from (H, T, D)?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def chunked_attention(q, k, v, *, c=64):
#     H, T, D = q.shape
#     chunks = q.reshape(H, ____, c, D).swapaxes(____, ____)
#     out = jax.lax.map(lambda chunk: ____, chunks)
#     return out.swapaxes(____, ____).reshape(____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def chunked_attention(q, k, v, *, c=64):
#     H, T, D = q.shape
#     chunks = q.reshape(H, T // c, c, D).swapaxes(0, 1)
#     out = jax.lax.map(lambda chunk: attention(chunk, k, v), chunks)
#     return out.swapaxes(0, 1).reshape(q.shape)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Temporaries fall from 512 MiB to none on a v6e, and the estimated time from 0.92 to 0.42 ms. (On a v5e:
# to a fifth.) You have written no kernel. This is level 3: the same mathematics in a form that fits the memory.


# %%
def level_3(q, k, v):
    return chunked_attention(q, k, v, c=512)


compare({"2 jit": None, "3 chunks of 512": level_3}, *HEADS, made="ladder/attention", tpu="v6e")

# %% [markdown]
# ## Puzzle 4: Why this kernel is slow
#
# **Goal.** Flash attention is given, and it is slow with tiles of 128 x 128. From two figures, find out what a grid
# step costs.
#
# ### Theory
#
# The kernel is that of flash_attention.py Puzzle 5, written shorter: `m` and `l` are (bq, 1) here, and have base e.
# That costs a part of its speed (see the takeaway there). Tiles of 128 look natural: a vector register has 128 lanes.
# On a v6e, the compiler estimates 4.0 ms for it, 0.92 for plain `jit`, and 0.42 for the chunks. What makes it slow?
#
# ```text
#     8 heads, 4096 tokens, D = 128        128 x 128       1024 x 1024
#     MXU     69 GFLOP                      0.07 ms            0.07 ms
#     HBM     528 and 80 MiB                0.34 ms            0.05 ms
#     steps                                 8192               128
#     the compiler's estimate               4.02 ms            0.34 ms
# ```
#
# MXU and HBM work at the same time. The longer one is the **floor**. It explains a twelfth of the 4.02 ms. The steps
# are left, and no table says what a step costs in this kernel. But a difference of two figures cancels all that both
# have in common. Assume that the two differ in their floors and in their number of steps, and in nothing else.


# %%
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    dims = (((1,), (1,)), ((), ()))
    s = jax.lax.dot_general(q_ref[...], k_ref[...], dims, preferred_element_type=jnp.float32)
    s = s * q_ref.shape[1] ** -0.5
    m = jnp.maximum(m_ref[...], s.max(axis=1, keepdims=True))
    e = jnp.exp(s - m)
    rescale = jnp.exp(m_ref[...] - m)
    l_ref[...] = l_ref[...] * rescale + e.sum(axis=1, keepdims=True)
    ev = jnp.dot(e.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * rescale + ev
    m_ref[...] = m

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


def flash(q, k, v, *, bq=128, bkv=128):
    H, T, D = q.shape
    q_block = pl.BlockSpec((None, bq, D), lambda h, i, j: (h, i, 0))
    kv_block = pl.BlockSpec((None, bkv, D), lambda h, i, j: (h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(H, T // bq, T // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (1, 1, D)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=64 << 20
        ),
    )(q, k, v)


# %%
class Chip(NamedTuple):
    flops_per_s: float
    hbm_bytes_per_s: float
    vmem_bytes: int  # what the tiles may use
    step_s: float = 0.0  # seconds that every step takes in addition to its work
    score_s: float = 0.0  # Puzzle 5


V6E = Chip(920e12, 1640e9, 16 << 20)


def flash_bytes(H, T, D, bq, bkv):
    """q and the result once, k and v once for every block of queries, in bfloat16."""
    return 2 * (2 * H * T * D) * (1 + T // bq)


def flash_steps(H, T, bq, bkv):
    return H * (T // bq) * (T // bkv)


def flash_floor(H, T, D, bq, bkv, chip):
    """Seconds: both products at the chip's peak, or the bytes at its bandwidth."""
    return max(4 * H * T * T * D / chip.flops_per_s, flash_bytes(H, T, D, bq, bkv) / chip.hbm_bytes_per_s)


def step_cost(H, T, D, slow, quick, chip):
    # slow, quick: (bq, bkv, seconds). Return the seconds that one step costs.
    pass  # YOUR CODE HERE


# %%
# The check compares step_cost with figures that were made with a known cost of a step, for several sizes and chips.
check("ladder/4", flash)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A time is a floor, and so many steps, and something that is the same for both. 128 x 128 has 8064 steps more than 1024
# x 1024. By how much is its time longer, and how much of that do the floors explain?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def step_cost(H, T, D, slow, quick, chip):
#     rest, steps = [], []
#     for bq, bkv, seconds in (slow, quick):
#         rest.append(____)
#         steps.append(____)
#     return (____) / (____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def step_cost(H, T, D, slow, quick, chip):
#     rest, steps = [], []
#     for bq, bkv, seconds in (slow, quick):
#         rest.append(seconds - flash_floor(H, T, D, bq, bkv, chip))
#         steps.append(flash_steps(H, T, bq, bkv))
#     return (rest[0] - rest[1]) / (steps[0] - steps[1])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 0.42 us a step: 3.5 of the 4.0 ms. It is nearly what the steps of a matmul cost on a v6e (matmul.py
# Puzzle 12: 0.43). Each step has two products of 128 x 128 x 128, too short to keep the MXU busy. So on a v6e a kernel
# that is not tuned loses to `jit`. On a v5e, where `jit` writes the table twice, it wins narrowly: 4.2 ms against 4.6.


# %%
if not unwritten(step_cost):
    step_s = step_cost(8, 4096, 128, (128, 128, 4.021e-3), (1024, 1024, 0.3386e-3), V6E)
    print(f"a step costs {step_s * 1e6:.2f} us; 8192 of them, {8192 * step_s * 1e3:.1f} ms")

compare(
    {"2 jit": None, "3 chunks of 512": None, "4 tiles of 128 x 128": None},
    *HEADS,
    made="ladder/attention",
    tpu="v6e",
)

# %% [markdown]
# ## Puzzle 5: The unit that the model forgot
#
# **Goal.** The model of matmul.py Puzzle 12 has no softmax. Add it, fit it to one figure, and predict another.
#
# ### Theory
#
# For tiles of 1024 x 1024 on a v6e, that model says 0.13 ms: MXU 0.075, steps 0.054, fill 0.001. The compiler says
# 0.34. The vector unit is missing. It works beside the MXU, and makes an exponential, a maximum and a sum of each
# score. There are `H * T * T` scores, whatever the tiles:
#
# ```text
#     time = max(MXU, HBM - fill, SCORES) + fill + steps * step_s         SCORES = H * T * T * score_s
# ```
#
# The fill is one block of each of the four arrays, in bfloat16. No table has `score_s`. So turn the model round. Assume
# that SCORES is the longest of the three in the figure that you have, and solve for `score_s`.
#
# `pick_tiles` is given. It needs your model, and the VMEM: now with the scores of a tile, in float32.


# %%
SMALL = Chip(1e12, 5e9, 1 << 20, 2e-6, 4e-10)  # nobody sells it: a chip for arrays that are quick to check


def flash_vmem(D, bq, bkv):
    """Bytes of VMEM: two buffers for each block, the scratch, and the scores of a tile."""
    return 2 * 2 * (2 * bq * D + 2 * bkv * D) + 4 * bq * (D + 2) + 4 * bq * bkv


def flash_time(H, T, D, bq, bkv, chip):
    # Return the seconds that flash takes by the model above.
    pass  # YOUR CODE HERE


def score_cost(H, T, D, bq, bkv, seconds, chip):
    # flash took so many seconds, and SCORES was the longest of the three. Return score_s. chip.step_s is known.
    pass  # YOUR CODE HERE


def pick_tiles(H, T, D, chip):
    """The tiles that fit and take the least time; of equal times, the fewest bytes."""
    sizes = [b for b in range(128, T // 2 + 1, 128) if T % b == 0]
    fitting = [(bq, bkv) for bq in sizes for bkv in sizes if flash_vmem(D, bq, bkv) <= chip.vmem_bytes]
    return min(fitting, key=lambda b: (flash_time(H, T, D, *b, chip), flash_bytes(H, T, D, *b)))


def tuned_flash(q, k, v, *, chip: Chip = SMALL):
    H, T, D = q.shape
    bq, bkv = pick_tiles(H, T, D, chip)
    return flash(q, k, v, bq=bq, bkv=bkv)


# %%
# Budget for q (2, 1024, 64), k (2, 1024, 64), v (2, 1024, 64): hbm_bytes=2_621_440, vmem_bytes=460_800, grid_steps=16.
# That is the best choice for SMALL. The check compares flash_time and score_cost with the model, for several chips.
check("ladder/5", tuned_flash)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Both products multiply T x T numbers with D, for each head. How many FLOPs is one multiply-add? The blocks of `q` and
# of the result have `bq` rows each, those of `k` and `v` have `bkv`: how many bytes are all four? For `score_cost`: if
# SCORES is the longest, which terms of the sum are left, and do you know them all?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def flash_time(H, T, D, bq, bkv, chip):
#     mxu = ____ / chip.flops_per_s
#     fill = ____ / chip.hbm_bytes_per_s
#     hbm = ____ / chip.hbm_bytes_per_s
#     scores = ____
#     return max(____) + fill + ____ * chip.step_s
#
#
# def score_cost(H, T, D, bq, bkv, seconds, chip):
#     fill = ____ / chip.hbm_bytes_per_s
#     return (seconds - ____) / ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def flash_time(H, T, D, bq, bkv, chip):
#     mxu = 4 * H * T * T * D / chip.flops_per_s
#     fill = 4 * (bq + bkv) * D / chip.hbm_bytes_per_s
#     hbm = flash_bytes(H, T, D, bq, bkv) / chip.hbm_bytes_per_s
#     scores = H * T * T * chip.score_s
#     return max(mxu, hbm - fill, scores) + fill + flash_steps(H, T, bq, bkv) * chip.step_s
#
#
# def score_cost(H, T, D, bq, bkv, seconds, chip):
#     fill = 4 * (bq + bkv) * D / chip.hbm_bytes_per_s
#     return (seconds - fill - flash_steps(H, T, bq, bkv) * chip.step_s) / (H * T * T)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One score costs 2.1 ps. With it the model picks 2048 x 1024 and predicts 0.31 ms, which is what the
# compiler says of these tiles. It is a model: for 512 x 512 it says 0.50 ms, and the compiler 0.70. So try what a model
# says: `compare({"512": functools.partial(flash, bq=512, bkv=512)}, *HEADS)` asks the compiler.
#
# Tuned, the kernel is 13 times as fast as with tiles of 128, and beats `jit` and the chunks. It was the tiles, not the
# kernel. Yet it takes four times the floor. On a v5e it takes 1.4 times the floor: there the MXU is slower, and most of
# the softmax hides behind it. The faster the MXU, the more the rest counts: the softmax, and D = 128, which fills half
# of a v6e's MXU of 256 x 256.


# %%
if not (unwritten(step_cost) or unwritten(tuned_flash)):
    chip = V6E._replace(step_s=step_s)
    chip = chip._replace(score_s=score_cost(8, 4096, 128, 1024, 1024, 0.3386e-3, chip))
    tiles = pick_tiles(8, 4096, 128, chip)
    print(f"{chip.score_s * 1e12:.1f} ps a score; tiles {tiles}: {flash_time(8, 4096, 128, *tiles, chip) * 1e3:.2f} ms")

LADDER = {"1 op by op": None, "2 jit": None, "3 chunks of 512": None, "4 tiles of 128 x 128": None}
LADDER |= {"5 tiles of 1024 x 1024": None, "5 tiles of 2048 x 1024": None}
compare(LADDER, *HEADS, made="ladder/attention", tpu="v6e")

# %% [markdown]
# ## Puzzle 6: Fold the norm into the product
#
# **Goal.** An RMSNorm stands before an MLP. Compute both so that the normalised rows are never made.
#
# ### Theory
#
# `norm(x) = x * r * g`, where `r` is one number for each row, (M, 1), and `g` is one for each column, (1, D). The MLP
# multiplies it with `w1`, (D, F). A factor for each row of a matrix may move behind the product. A factor for each
# column may move into the other matrix:
#
# ```text
#     (x * r * g) @ w1   =   r * (x @ (g.T * w1))
#        M x D                    M x D   D x F
# ```
#
# So `x` can go into the product as it is. Here is restructuring as one finds it in papers. Whether it pays is another
# question. Before you look, predict it: what did level 2 do with the norm?


# %%
def mlp_spec(
    x: BFloat16[Array, "M D"], g: Float[Array, "1 D"], w1: BFloat16[Array, "D F"], w2: BFloat16[Array, "F D"]
) -> BFloat16[Array, "M D"]:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
    y = (y * g).astype(x.dtype)
    h = jax.nn.gelu(jnp.dot(y, w1, preferred_element_type=jnp.float32)).astype(x.dtype)
    return x + jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)


def folded_mlp(x, g, w1, w2):
    # What mlp_spec computes. x goes into the first product as it is, and g.T * w1 is rounded to w1.dtype before it.
    pass  # YOUR CODE HERE


# %%
# Budget for x (256, 128), g (1, 128), w1 (128, 64), w2 (64, 128): hbm_bytes=3_024_384, flops=8_388_608, mxu_bits=16.
# hbm_bytes: when each operation is a program of its own, jax.jit or not. The spec moves 3,449,344: it makes the
# normalised rows. mxu_bits: both products multiply bfloat16.
check("ladder/6", folded_mlp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which of the two factors, `r` or `g`, is known before `x` is? That one belongs to the weights. Where does the other
# one go, and what shape has the array that it multiplies there? GELU is not linear: it has to come after both.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def folded_mlp(x, g, w1, w2):
#     y = x.astype(jnp.float32)
#     r = jax.lax.rsqrt(____)
#     folded = ____.astype(w1.dtype)
#     h = jax.nn.gelu(____).astype(x.dtype)
#     return x + jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def folded_mlp(x, g, w1, w2):
#     y = x.astype(jnp.float32)
#     r = jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
#     folded = (g.T * w1).astype(w1.dtype)
#     h = jax.nn.gelu(r * jnp.dot(x, folded, preferred_element_type=jnp.float32)).astype(x.dtype)
#     return x + jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Right, fewer bytes op by op, and not worth it. Jitted for a v6e, it takes 173 us; the spec takes 170.
# (On a v5e: 449 and 407.) XLA had fused the norm into the product already, and now it has to scale the weights as well.
# Restructuring pays where it removes what XLA cannot fuse away, as in Puzzle 3.

# %%
ROWS = [
    jax.ShapeDtypeStruct(*each)
    for each in [
        ((4096, 1024), jnp.bfloat16),
        ((1, 1024), jnp.float32),
        ((1024, 4096), jnp.bfloat16),
        ((4096, 1024), jnp.bfloat16),
    ]
]
compare({"1 op by op": None, "2 jit": None, "3 norm folded": folded_mlp}, *ROWS, made="ladder/mlp", tpu="v6e")

# %% [markdown]
# ## Puzzle 7: Norm, MLP and residual in one kernel
#
# **Goal.** Do all of `mlp_spec` in one kernel. The hidden layer never reaches HBM.
#
# ### Theory
#
# What could a kernel still save? Not bytes. XLA fuses even the two products of an MLP: on a v6e, `jit` moves 40 MiB,
# and the hidden layer `h`, (M, F), would be 32 MiB alone. But it takes 170 us, where the MXU's floor is 75. The norm is
# a pass over `x` of its own, 21 of the 170 us. A kernel can do it where `x` is in VMEM anyway. And it chooses its
# blocks: compute `bf` columns of `h`, multiply them with the matching `bf` rows of `w2`, and add the product up.
#
# ```text
#     grid (i, j)        j = 0            j = 1            j = 2
#     y = norm(x)        made once -----  kept ----------  kept
#     h block            y @ w1[:, 0]     y @ w1[:, 1]     y @ w1[:, 2]
#     acc                h @ w2[0]     +  h @ w2[1]     +  h @ w2[2]      -->  x + acc
# ```
#
# All weights come in again for every block of rows. So large blocks of rows matter, as in Puzzle 5.


# %%
def mlp_kernel(x_ref, g_ref, w1_ref, w2_ref, o_ref, y_ref, acc_ref):
    # Grid (i, j). x_ref, o_ref: (bm, D), bfloat16      g_ref: (1, D)      w1_ref: (D, bf)      w2_ref: (bf, D)
    # scratch: y_ref, (bm, D), bfloat16, for the normalised rows      acc_ref, (bm, D), float32
    pass  # YOUR CODE HERE


def fused_mlp(x, g, w1, w2, *, bm: int = 64, bf: int = 128):
    (M, D), F = x.shape, w1.shape[1]
    rows = pl.BlockSpec((bm, D), lambda i, j: (i, 0))
    return pl.pallas_call(
        mlp_kernel,
        grid=(M // bm, F // bf),
        in_specs=[
            rows,
            pl.BlockSpec((1, D), lambda i, j: (0, 0)),
            pl.BlockSpec((D, bf), lambda i, j: (0, j)),
            pl.BlockSpec((bf, D), lambda i, j: (j, 0)),
        ],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, D), x.dtype), pltpu.VMEM((bm, D), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=64 << 20),
    )(x, g, w1, w2)


# %%
# Budget for x (192, 256), g (1, 256), w1 (256, 384), w2 (384, 256): calls=1, output_stores=1, flops=76_500_000,
# mxu_bits=16. flops: a norm that is made in every step is over it.
check("ladder/7", fused_mlp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three things happen at different times. What is done in the first step of a block of rows, what in every step, and
# what in the last one? `y_ref` is bfloat16, so a product of it with `w1_ref` is one for the MXU. What is the residual?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def mlp_kernel(x_ref, g_ref, w1_ref, w2_ref, o_ref, y_ref, acc_ref):
#     j = pl.program_id(1)
#
#     @pl.when(j == 0)
#     def _():
#         y = x_ref[...].astype(jnp.float32)
#         y_ref[...] = ____
#         acc_ref[...] = ____
#
#     h = jax.nn.gelu(____).astype(w2_ref.dtype)
#     acc_ref[...] += ____
#
#     @pl.when(____)
#     def _():
#         o_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def mlp_kernel(x_ref, g_ref, w1_ref, w2_ref, o_ref, y_ref, acc_ref):
#     j = pl.program_id(1)
#
#     @pl.when(j == 0)
#     def _():
#         y = x_ref[...].astype(jnp.float32)
#         y = y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
#         y_ref[...] = (y * g_ref[...]).astype(y_ref.dtype)
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     h = jnp.dot(y_ref[...], w1_ref[...], preferred_element_type=jnp.float32)
#     h = jax.nn.gelu(h).astype(w2_ref.dtype)
#     acc_ref[...] += jnp.dot(h, w2_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(j == pl.num_programs(1) - 1)
#     def _():
#         o_ref[...] = x_ref[...] + acc_ref[...].astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** On a v6e, `jit` takes 170 us. Untuned, with 128 rows, the kernel takes 466: the weights come in 32
# times. With 1024 rows it takes 105. It moves 80 MiB, twice as many as `jit`, but neither of the two waits for bytes.
# On a v5e, whose MXU is slower, the products alone take 349 us of the 407 of `jit`, and the tuned kernel gains a tenth.
# The closer `jit` is to the floor, the less a kernel can win.


# %%
def mlp_level_5(x, g, w1, w2):
    return fused_mlp(x, g, w1, w2, bm=1024, bf=512)


compare({"2 jit": None, "4 rows of 128": None, "5 rows of 1024": mlp_level_5}, *ROWS, made="ladder/mlp", tpu="v6e")

# %% [markdown]
# ## Puzzle 8: Patches are a matrix product
#
# **Goal.** A vision transformer cuts an image into patches of 16 x 16 pixels, and multiplies each with a matrix. Cut
# the patches so that one matrix product does the rest.
#
# ### Theory
#
# Model code often writes this as a convolution with stride `P`. Windows that do not overlap share no pixels, so this is
# one matrix product: the patches, (B, N, P P C), with the filters, (P P C, D). The work is in the layout. A row of the
# image runs through many patches:
#
# ```text
#     image (H, W, C)        rows of pixels         a patch: P pieces, one from each of P rows
#     y = P * patch row + py
#     x = P * patch column + px                     patch (row, column), then (py, px, C) inside of it
# ```
#
# The filters are (P, P, C, D). So inside of a patch, the order has to be py, px, C. `reshape` splits an axis into two.
# `transpose` puts the axes into another order. `reshape` then joins neighbours.


# %%
def patches_spec(images: BFloat16[Array, "B H W C"], w: BFloat16[Array, "P P C D"]) -> BFloat16[Array, "B N D"]:
    P, D = w.shape[0], w.shape[3]
    dims = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(images, w, (P, P), "VALID", dimension_numbers=dims)
    return out.reshape(images.shape[0], -1, D)


def cut_patches(images, P):
    # (B, H, W, C) -> (B, N, P * P * C): N patches, row by row. P divides H and W.
    pass  # YOUR CODE HERE


def patches_as_product(images, w):
    x = cut_patches(images, w.shape[0])
    return jnp.dot(x, w.reshape(-1, w.shape[3]), preferred_element_type=jnp.float32).astype(images.dtype)


# %%
# Budget for images (3, 32, 40, 3), w (8, 8, 3, 128): flops=2_949_120, operations=6. operations: a loop over the patches
# takes several for each of them.
check("ladder/8", patches_as_product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `reshape` joins only axes that are neighbours, in the order that they have. Split both axes of pixels first. Which six
# axes do you have then, in which order? Which of them count patches, and which are inside of one?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def cut_patches(images, P):
#     B, H, W, C = images.shape
#     x = images.reshape(B, H // P, P, ____, ____, C)
#     x = x.transpose(0, ____, ____, ____, ____, 5)
#     return x.reshape(B, ____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def cut_patches(images, P):
#     B, H, W, C = images.shape
#     x = images.reshape(B, H // P, P, W // P, P, C)
#     x = x.transpose(0, 1, 3, 2, 4, 5)
#     return x.reshape(B, (H // P) * (W // P), P * P * C)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Right, and slower. For 64 images of 224 x 224 on a v6e, the convolution takes 151 us. The cut and the
# product take 417 us, without two reshapes for which the compiler gives no cycles. (On a v5e: 259 and 625.) The floor
# is 24 us. Moving pieces of 48 numbers into place is what takes long. XLA's convolution knows a better way. Would a
# kernel?

# %%
IMAGES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(64, 224, 224, 3), (16, 16, 3, 768)]]
compare(
    {"1 op by op": None, "2 jit, convolution": None, "3 cut, product": patches_as_product},
    *IMAGES,
    made="ladder/patches",
    tpu="v6e",
)

# %% [markdown]
# ## Puzzle 9: The layout beats the kernel
#
# **Goal.** Cut the images where they come from, in the data loader. Then write the kernel for patches that are cut
# already, with a bias, so that each array moves once.
#
# ### Theory
#
# A kernel that cuts patches itself would move the same small pieces, in VMEM. Instead, choose the layout where the data
# is made: on the **host**, the computer that the TPU belongs to. There the threads of a data loader prepare the next
# batch while the TPU computes. NumPy's arrays have `reshape` and `transpose`, too, so the TPU has no part in the cut.
# The patches of all images arrive as one matrix, (B N, 768), and nothing is left but a product:
#
# ```text
#     patches (B N, K)    a block of bm rows, all of K        the grid has one axis
#     w       (K, D)      one block: the whole matrix         fetched once, for all steps
#     bias    (1, D)      one block
# ```
#
# An index map that always returns the same block costs one fetch. The 768 x 768 weights take 1.1 MiB in bfloat16: they
# can stay.


# %%
def embed_spec(
    patches: BFloat16[Array, "R K"], w: BFloat16[Array, "K D"], bias: Float[Array, "1 D"]
) -> BFloat16[Array, "R D"]:
    return (jnp.dot(patches, w, preferred_element_type=jnp.float32) + bias).astype(patches.dtype)


def host_patches(images, P):
    # In the loader. images: a NumPy array, (B, H, W, C). Return a NumPy array, (B N, P P C): all patches of the first
    # image, then those of the next. What jnp makes is on the device.
    pass  # YOUR CODE HERE


def embed_kernel(x_ref, w_ref, bias_ref, o_ref):
    # x_ref: (bm, K)      w_ref: (K, D)      bias_ref: (1, D), float32      o_ref: (bm, D)
    pass  # YOUR CODE HERE


def embed_patches(patches, w, bias, *, bm=64):
    # Return the result of one pallas_call of embed_kernel. bm need not divide the number of rows.
    pass  # YOUR CODE HERE


# %%
# Budget for patches (360, 192), w (192, 256), bias (1, 256): hbm_bytes=421_888, vmem_bytes=214_016, grid_steps=6,
# calls=1, mxu_bits=16. hbm_bytes: every array once. vmem_bytes: blocks of 64 rows. host_patches is checked by itself.
check("ladder/9", embed_patches)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Puzzle 8 has the cut: does your answer call jnp anywhere, and which two of its three axes does the matrix join? Which
# of the four arrays does the grid walk along, and what do the index maps of the others return at every step? With 360
# rows in blocks of 64, the last block hangs over. Pallas drops what is stored there, so you need no mask, but the grid
# needs that step. The product is float32 before you cast it, and so is the bias.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def host_patches(images, P):
#     return ____.reshape(____, ____)
#
#
# def embed_kernel(x_ref, w_ref, bias_ref, o_ref):
#     y = ____
#     o_ref[...] = (____).astype(o_ref.dtype)
#
#
# def embed_patches(patches, w, bias, *, bm=64):
#     (R, K), D = patches.shape, w.shape[1]
#     return pl.pallas_call(
#         embed_kernel,
#         grid=(____,),
#         in_specs=[____, ____, ____],
#         out_specs=____,
#         out_shape=____,
#     )(patches, w, bias)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def host_patches(images, P):
#     return cut_patches(images, P).reshape(-1, P * P * images.shape[3])
#
#
# def embed_kernel(x_ref, w_ref, bias_ref, o_ref):
#     y = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
#     o_ref[...] = (y + bias_ref[...]).astype(o_ref.dtype)
#
#
# def embed_patches(patches, w, bias, *, bm=64):
#     (R, K), D = patches.shape, w.shape[1]
#     return pl.pallas_call(
#         embed_kernel,
#         grid=(pl.cdiv(R, bm),),
#         in_specs=[
#             pl.BlockSpec((bm, K), lambda i: (i, 0)),
#             pl.BlockSpec((K, D), lambda i: (0, 0)),
#             pl.BlockSpec((1, D), lambda i: (0, 0)),
#         ],
#         out_specs=pl.BlockSpec((bm, D), lambda i: (i, 0)),
#         out_shape=jax.ShapeDtypeStruct((R, D), patches.dtype),
#     )(patches, w, bias)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 28 us on a v6e, where the convolution takes 151. But look at the rows above your kernel. Plain `jnp` on
# patches that are cut already takes 47 us, and your kernel in blocks of 56 rows takes 119. (On a v5e: 83, 259, 101 and
# 150.) The layout won most of it. The kernel wins the rest, and only when it is tuned. The cut costs the host some
# milliseconds (see below), while the TPU works on the batch before. Before you write a kernel, ask who chose the
# layout.

# %%
CUT = [
    jax.ShapeDtypeStruct((64 * 196, 768), jnp.bfloat16),
    jax.ShapeDtypeStruct((768, 768), jnp.bfloat16),
    jax.ShapeDtypeStruct((1, 768), jnp.float32),
]


if not unwritten(host_patches):
    batch = np.ones((64, 224, 224, 3), np.uint8)
    began = time.perf_counter()
    host_patches(batch, 16)
    print(f"64 images are cut in {1e3 * (time.perf_counter() - began):.0f} ms, on one core of this host.")


def embed_level_5(patches, w, bias):
    return embed_patches(patches, w, bias, bm=896)


compare(
    {
        "2 jit, convolution": None,
        "cut before, jit": None,
        "4 cut before, 56 rows": None,
        "5 cut before, 896 rows": embed_level_5,
    },
    *CUT,
    made="ladder/patches",
    tpu="v6e",
)

# %% [markdown]
# ## Puzzle 10: Messages
#
# **Goal.** In a graph network, each node adds up the features of its neighbours. Write it as a product with a matrix of
# which most blocks are empty, and skip those.
#
# ### Theory
#
# `out[dst] += x[src]` for each edge is a scatter: the MXU has no part in it, and the compiler gives no time for it.
# With an adjacency matrix `A`, (N, N), it is `A @ x`: quick for its size, but 8192 nodes make 128 MiB, nearly all of it
# zero. Number the nodes so that neighbours are near each other, and cut `A` into blocks. Most blocks hold no edge.
# Store the others, `L` of them, and two lists:
#
# ```text
#     blocks (L, b, b)     A0    A1    A2    A3    A4
#     rows                  0     0     1     1     2        sorted: the block's row in A
#     cols                  0     1     0     1     2        the block's column
# ```
#
# Grid step `t` multiplies `blocks[t]` with block `cols[t]` of `x`, and adds the product to block `rows[t]` of the
# result. The lists are prefetched, and the index maps read them (matmul.py Puzzle 11). A block of the result is
# complete when the next step has another row. Each row of blocks has at least one block.


# %%
def messages_spec(
    rows: Int[Array, "L"], cols: Int[Array, "L"], blocks: BFloat16[Array, "L b b"], x: BFloat16[Array, "N D"]
) -> BFloat16[Array, "N D"]:
    tiles = x.reshape(-1, blocks.shape[1], x.shape[1]).astype(jnp.float32)
    sent = jnp.einsum("lij,ljd->lid", blocks.astype(jnp.float32), tiles[cols], precision="highest")
    return jnp.zeros_like(tiles).at[rows].add(sent).reshape(x.shape).astype(x.dtype)


def messages_x_map(t, rows_ref, cols_ref):
    # Which block of x does step t need?
    pass  # YOUR CODE HERE


def messages_o_map(t, rows_ref, cols_ref):
    # Which block of the result does step t add to?
    pass  # YOUR CODE HERE


def messages_kernel(rows_ref, cols_ref, a_ref, x_ref, o_ref, acc_ref):
    # a_ref: (b, b), block t      x_ref, o_ref: (b, D)      acc_ref: (b, D), float32
    # A row of blocks starts at t == 0, and where rows_ref[t] differs from rows_ref[jnp.maximum(t - 1, 0)].
    pass  # YOUR CODE HERE


def messages(rows, cols, blocks, x):
    (L, b, _), D = blocks.shape, x.shape[1]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(L,),
        in_specs=[
            pl.BlockSpec((None, b, b), lambda t, rows_ref, cols_ref: (t, 0, 0)),
            pl.BlockSpec((b, D), messages_x_map),
        ],
        out_specs=pl.BlockSpec((b, D), messages_o_map),
        scratch_shapes=[pltpu.VMEM((b, D), jnp.float32)],
    )
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(messages_kernel, grid_spec=grid_spec, out_shape=out)(rows, cols, blocks, x)


# %%
# Budget for rows [0, 0, 1, 2, 2, 2], cols [0, 2, 1, 0, 1, 2], blocks (6, 128, 128), x (384, 256): hbm_bytes=786_432,
# grid_steps=6, calls=1, output_stores=1, mxu_bits=16.
check("ladder/10", messages)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The lists are Refs of numbers: `cols_ref[t]` is an index. A map returns one index for each axis of its array. In the
# kernel, the comment says when a row starts. Which two conditions, joined by `|`, say that it ends? The last step has
# no successor: what must not be read there?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def messages_x_map(t, rows_ref, cols_ref):
#     return ____, 0
#
#
# def messages_o_map(t, rows_ref, cols_ref):
#     return ____, 0
#
#
# def messages_kernel(rows_ref, cols_ref, a_ref, x_ref, o_ref, acc_ref):
#     t, last = pl.program_id(0), pl.num_programs(0) - 1
#     starts = (t == 0) | (rows_ref[t] != rows_ref[jnp.maximum(t - 1, 0)])
#     ends = (t == ____) | (____ != ____)
#     before = jnp.where(starts, ____, ____)
#     acc_ref[...] = before + ____
#
#     @pl.when(ends)
#     def _():
#         o_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def messages_x_map(t, rows_ref, cols_ref):
#     return cols_ref[t], 0
#
#
# def messages_o_map(t, rows_ref, cols_ref):
#     return rows_ref[t], 0
#
#
# def messages_kernel(rows_ref, cols_ref, a_ref, x_ref, o_ref, acc_ref):
#     t, last = pl.program_id(0), pl.num_programs(0) - 1
#     starts = (t == 0) | (rows_ref[t] != rows_ref[jnp.maximum(t - 1, 0)])
#     ends = (t == last) | (rows_ref[t] != rows_ref[jnp.minimum(t + 1, last)])
#     before = jnp.where(starts, 0, acc_ref[...])
#     acc_ref[...] = before + jnp.dot(a_ref[...], x_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(ends)
#     def _():
#         o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The kernel never touches an empty block. But untuned it loses once more. On a v6e, blocks of 128 take
# 109 us, and the dense product takes 101, although that one moves six times the bytes. Each step costs too much for its
# work. Blocks of 512 hold more zeros, move more bytes, and take 31 us. (On a v5e: 112, 236 and 51.) The scatters of
# levels 1 and 2 have no estimate, so whether they are slower only a TPU can say.


# %%
def clustered(nodes, b, reach=256):
    """The lists of a graph whose nodes have neighbours up to `reach` away, in blocks of b."""
    n = nodes // b
    near = [(i, j) for i in range(n) for j in range(n) if (abs(i - j) - 1) * b < reach]
    return tuple(np.array(near, np.int32).T)


def in_blocks(b, nodes=8192, D=128):
    rows, cols = clustered(nodes, b)
    return (
        rows,
        cols,
        jax.ShapeDtypeStruct((len(rows), b, b), jnp.bfloat16),
        jax.ShapeDtypeStruct((nodes, D), jnp.bfloat16),
    )


compare(
    {"2 jit, scatter": None, "3 dense product": None, "4 blocks of 128": None, "5 blocks of 512": messages},
    *in_blocks(512),
    made="ladder/messages",
    tpu="v6e",
)

# %% [markdown]
# ## What you built
#
# You built four parts of real models at five levels, and you know what each level cost. What holds for all four:
#
# - `jit` first. It is one word. For norm + MLP on a v6e, it takes 2084 us down to 170, and the best kernel then to 105.
# - Then ask which array should not exist, and restructure. Chunks of queries took attention from 512 MiB of temporaries
#   to none.
# - Then ask who chose the layout. Cutting patches beforehand won 104 us, and the kernel 20 more.
# - A kernel pays where the program that you want cannot be said to XLA: sums that are carried from block to block, or
#   blocks that are skipped. And it pays only when it is tuned.

# %%
PARTS = {
    "attention": [
        "1 op by op",
        "2 jit",
        "3 chunks of 512",
        "4 tiles of 128 x 128",
        "5 tiles of 1024 x 1024",
        "5 tiles of 2048 x 1024",
    ],
    "mlp": ["1 op by op", "2 jit", "3 norm folded", "4 rows of 128", "5 rows of 1024"],
    "patches": [
        "1 op by op",
        "2 jit, convolution",
        "3 cut, product",
        "cut before, jit",
        "4 cut before, 56 rows",
        "5 cut before, 896 rows",
    ],
    "messages": ["1 op by op", "2 jit, scatter", "3 dense product", "4 blocks of 128", "5 blocks of 512"],
}
for part, names in PARTS.items():
    print(f"\n{part}")
    compare(dict.fromkeys(names), made=f"ladder/{part}")

# %% [markdown]
# `compare` takes any functions of yours, with kernels or without: `compare({"jit": f, "mine": g}, *arrays)`. Give it
# shapes for arrays that are large.
#
# **Read next.** `jax.experimental.pallas.ops.tpu.flash_attention` has the tiles of Puzzle 5 as its `BlockSizes`, and
# tables of them for each chip are what production libraries ship beside their kernels.

# %%
progress()
