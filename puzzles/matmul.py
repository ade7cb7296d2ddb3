# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 3}
# ---

# %% [markdown]
# # Matmul: from a tile to the roofline
#
# In thirteen puzzles you write the matrix products of a transformer: with a transposed weight, with an epilogue,
# backwards, in int8, and with most blocks missing. You also write a function that picks the tile sizes for a given TPU.
# The tiles that it picks for 4096 x 4096 x 4096 are good: by the TPU compiler's own schedule, your kernel comes within
# 3% of the chip's limit, on a v5e and on a v6e. (That leaves out the first copies and the fixed cost of each step.)
#
# You need `basics.py`. Puzzles 6, 8 and 9 use `jax.custom_vjp`, which `softmax.py` Puzzle 6 teaches. Here all of that
# is given, so you do not need it. From Puzzle 1 on, every `check` prints your FLOPs per byte, and Puzzle 4 explains
# them. Watch that number: it says whether a TPU would wait for its memory or for its arithmetic.

# %%
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32, Int, Int8

from pallas_puzzles import check, hint, normal, progress, setup, show, tpu_report, unwritten

setup()

# %% [markdown]
# ## Puzzle 1: One tile
#
# **Goal.** Multiply bfloat16 tiles into float32, the way the hardware does.
#
# ### Theory
#
# The unit that multiplies matrices on a TPU is the **MXU**. On a v5e it is four squares of 128 x 128 multiply-adders.
# The chip loads a piece of `y` into a square. Then rows of `x` stream through it, one per cycle:
#
# ```text
#              128 columns of y, held in place
#              +---------------------------+
#     x  --->  |  *+  *+  *+  ...          |
#     rows     |  *+  *+  *+  ...          |     4 x 128 x 128 x 2 FLOP x 1.5 GHz = 197 TFLOP/s
#              +---------------------------+
#                 |   |   |
#                 v   v   v    sums: float32
# ```
#
# The operands are narrow: a bfloat16 has 8 significant bits, so it fits a small multiplier. The sums are wide, because
# a sum of 640 products needs more than 8 bits.
#
# By default, a product has the dtype of its inputs. By that rule the product of two bfloat16
# arrays is bfloat16. Then 16 of the 24 bits that the MXU computed are gone before you see them. A cast afterwards does
# not bring them back. If you cast `x` and `y` first, you ask for float32 operands. The MXU has none: by default it
# rounds them to bfloat16 on the way in.


# %%
def one_tile_spec(x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"]) -> Float[Array, "M N"]:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def one_tile_kernel(x_ref, y_ref, o_ref):
    # x_ref: (bm, K), bfloat16      y_ref: (K, N), bfloat16, all of y      o_ref: (bm, N), float32
    pass  # YOUR CODE HERE


def one_tile(x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, bm: int = 64) -> Float[Array, "M N"]:
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        one_tile_kernel,
        grid=(pl.cdiv(M, bm),),
        in_specs=[pl.BlockSpec((bm, K), lambda i: (i, 0)), pl.BlockSpec((K, N), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((bm, N), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x, y)


# %%
# Budget for x (192, 640), y (640, 256): hbm_bytes=770_048, vmem_bytes=622_592, mxu_bits=16. mxu_bits: how wide the
# operands of a product may be.
check("matmul/1", one_tile)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# When are the 16 bits lost: when the result is stored, or before? A cast after the product comes too late, and a cast
# before it makes the operands wide. Where else can you ask for float32? In basics.py Puzzle 10, a product was told what
# its elements should be. (The real TPU compiler refuses a product of 16-bit tiles into 16 bits.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def one_tile_kernel(x_ref, y_ref, o_ref):
#     o_ref[...] = jnp.dot(____, ____, ____=____)     # no astype anywhere
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def one_tile_kernel(x_ref, y_ref, o_ref):
#     o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Narrow in, wide out. Your verdict ends with FLOPs per byte: 81.7 here. In the time that a v5e needs to
# move one byte, its MXU does 240 FLOPs. So this product leaves the MXU idle two thirds of the time. The kernel is fine.
# The tiles that you feed it have to change.

# %% [markdown]
# ## Puzzle 2: The k loop
#
# **Goal.** Wire up a tiled product for any kernel and any blocks, and tell the compiler which steps do not depend on
# each other.
#
# ### Theory
#
# A TPU v4 or v5p has two cores that share one HBM. Each could run half of your grid. You say where it may be cut, with
# one word for each axis:
#
# ```text
#     compiler_params=pltpu.CompilerParams(dimension_semantics=("...", "...", "..."))
#
#     "parallel"     the indices of this axis may run in any order, on any core
#     "arbitrary"    they run one after the other (this is the default)
# ```
#
# Each core has its own VMEM. So take one axis. One core runs its index 0 while the other runs its index 1. Is the
# result still right? If both store into the same output block, each core holds half of a sum, and the one that writes
# last wins. That is a **data race**, and `check` looks for it. It also counts the steps that have to follow one
# another. If you declare nothing, all 60 do. The budget is 5.
#
# The blocks need not divide `M` and `N`. A block may hang over the edge of the result, because nothing beyond the edge
# is written back. But `bk` has to divide `K`. Why is `K` different?


# %%
def product_spec(x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"]) -> BFloat16[Array, "M N"]:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def acc_kernel(x_ref, y_ref, o_ref, acc_ref):
    # Given: basics.py Puzzle 10. pl.num_programs(2) is the length of grid axis 2.
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    # Return the result of one pallas_call of kernel(x_ref, y_ref, o_ref, acc_ref), which adds up along grid axis 2.
    # Axis 0 of the grid: blocks of rows. Axis 1: blocks of columns. Axis 1 is the inner loop of the two: for each block
    # of x's rows, it goes over all columns of y.
    # Blocks: (bm, bk) of x, (bk, bn) of y, (bm, bn) of the result, which has x's dtype. acc_ref: (bm, bn), float32.
    # Also pass vmem_limit_bytes to pltpu.CompilerParams: how much VMEM the call may use. None is the default.
    pass  # YOUR CODE HERE


def k_loop(
    x: BFloat16[Array, "M K"],
    y: BFloat16[Array, "K N"],
    *,
    bm: int = 64,
    bn: int = 128,
    bk: int = 256,
    vmem_limit_bytes: int | None = None,
) -> BFloat16[Array, "M N"]:
    return tiled(acc_kernel, x, y, bm=bm, bn=bn, bk=bk, vmem_limit_bytes=vmem_limit_bytes)


# %%
# Budget for x (256, 1280), y (1280, 384): hbm_bytes=6_094_848, vmem_bytes=262_144, calls=1, serial_steps=5.
# serial_steps: how many steps of a call have to follow one another. Steps with different indices along a parallel axis
# do not.
check("matmul/2", k_loop)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The wiring is that of basics.py Puzzle 10, with `pl.cdiv` where a size may be ragged. To choose the words, write down
# the output blocks of a few steps: (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0). Two steps that share an output block
# must stay in order. Along which axes does the block change? And if a block hung over the edge of `K`: beyond the edge
# of `x` there is garbage. Garbage times anything is garbage. Into which sums would it go?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
#     (M, K), (_, N) = x.shape, y.shape
#     return pl.pallas_call(
#         kernel,
#         grid=(____, ____, ____),
#         in_specs=[____, ____],
#         out_specs=____,
#         out_shape=____,
#         scratch_shapes=____,
#         compiler_params=pltpu.CompilerParams(
#             dimension_semantics=(____, ____, ____), vmem_limit_bytes=vmem_limit_bytes
#         ),
#     )(x, y)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
#     (M, K), (_, N) = x.shape, y.shape
#     return pl.pallas_call(
#         kernel,
#         grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
#         in_specs=[
#             pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
#             pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
#         ],
#         out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
#         out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
#         scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
#         compiler_params=pltpu.CompilerParams(
#             dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
#         ),
#     )(x, y)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** An axis is parallel when each of its indices has its own output blocks. A v5e has one core, so the words
# change nothing there. They are a promise about your program, and they are free. Puzzles 3, 4, 9 and 12 use this
# wiring. You get 41.4 FLOPs per byte: tiles of 64 x 128 are far too small for 240. Puzzle 4 mends that. First comes
# something that costs time and moves no bytes at all.

# %%
show(k_loop, normal((128, 512), "bfloat16"), normal((512, 256), "bfloat16"))

# %% [markdown]
# ## Puzzle 3: In one straight line
#
# **Goal.** Write the kernel of Puzzle 2 without a branch: no `pl.when`.
#
# ### Theory
#
# A TPU core issues one **bundle** per cycle (1.5 GHz on a v5e, 1.75 on a v6e): a group of instructions that run
# together. A `pl.when` around more than a few instructions is a jump, and the compiler packs nothing across a jump:
#
# ```text
#     with two branches       [zero?]|[ multiply, add ]|[store?]
#     without                 [ multiply, add, store, all packed together ]
# ```
#
# Here is what the TPU compiler makes of 4096 x 4096 x 4096 in tiles of 1024 x 1024 x 512: cycles per step (the mean),
# and the time of all 128 steps:
#
# ```text
#                              v5e                v6e
#     bundles, two branches  7692   735 us      2932   248 us
#     bundles, no branch     6609   735 us      2349   216 us
#     the MXU                8192               2048
#     the copies             4316               2517
# ```
#
# The three overlap, so the longest one counts. The times also include 0.25 us per step, and the first and the last
# copies. A v5e waits for its MXU anyway. On a v6e, the code with branches takes longer than the copies. Without
# branches it takes less, and the copies set the time. That saves 13%.
#
# So do everything at every step, and choose *values* instead of code. You may store a draft of the result at every `k`,
# because a block is copied out only when its number changes. But the sum has to start somewhere, and `acc_ref` starts
# as garbage, perhaps NaN.


# %%
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    # x_ref: (bm, bk)      y_ref: (bk, bn)      o_ref: (bm, bn), bfloat16      acc_ref: (bm, bn), float32
    pass  # YOUR CODE HERE


def straight_matmul(
    x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, bm: int = 64, bn: int = 128, bk: int = 256
) -> BFloat16[Array, "M N"]:
    return tiled(straight_kernel, x, y, bm=bm, bn=bn, bk=bk)  # your wiring, from Puzzle 2


# %%
# Budget for x (192, 1280), y (1280, 384): hbm_bytes=4_571_136, vmem_bytes=262_144, calls=1, mxu_bits=16, branches=0.
# branches: how many the kernel may have.
check("matmul/3", straight_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A grid of 3 x 3 tiles with 5 steps of `k` has 45 steps. At how many of them may you not trust what `acc_ref` holds?
# Which value do you want there instead? Two ways to choose a value look alike, and only one survives garbage. If you
# multiply by 0, NaN stays NaN. `jnp.where` computes both of its sides, and passes on nothing of the side that it does
# not pick, not even a NaN.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
#     before = jnp.where(____, 0, ____)
#     acc = before + ____
#     ____ = acc                        # for the next step
#     ____ = acc.astype(____)           # a draft, until the last step
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
#     before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
#     acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
#     acc_ref[...] = acc
#     o_ref[...] = acc.astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A `where` costs less than a jump when both of its sides are cheap. The matmul that ships with JAX
# branches once, to zero the sum, and stores at every step. For 2048 x 2048 x 2048 in tiles of 512, JAX's kernel takes
# 2056 bundles a step on a v5e and 828 on a v6e. Yours takes 1990 and 789. You have fewer bundles than JAX, and at this
# size they buy no time: on both chips the copies take longer than either version. Now for the bytes.

# %% [markdown]
# ## Puzzle 4: Arithmetic intensity
#
# **Goal.** Choose block sizes that move the fewest bytes and fit into the VMEM you are given.
#
# ### Theory
#
# A v5e does 197e12 FLOPs a second and moves 820e9 bytes: 240 FLOPs in the time of a byte. A kernel's FLOPs per byte are
# its **arithmetic intensity**. Below 240, a v5e waits for memory. Above 240, memory waits for the MXU. On logarithmic
# axes, this is the **roofline**:
#
# ```text
#     TFLOP/s
#       197 |            _____________    arithmetic is the limit
#           |          /
#           |        /
#           |      /                      bytes are the limit
#           |    /
#           +----------+---------------   FLOP per byte
#                     240
# ```
#
# *One* output tile takes 2 bm bn K FLOPs. How many bytes of `x` and `y` does it take? Divide, and you have its
# intensity (without the result).
#
# The quotient contains bm and bn, not bk. bk matters in one case: when it is all of K. If bk is K, a block stays when
# its number is the same for two neighbouring tiles (basics.py Puzzle 13). If K is cut, `k` is in the block numbers of
# both `x` and `y`, and every step copies both. VMEM holds two blocks each of `x`, `y` and the result, and the scratch
# once.


# %%
def tile_sizes(size):
    """Multiples of 128 that divide size: the block sizes to choose from."""
    return [b for b in range(128, size + 1, 128) if size % b == 0]


def plan_bytes(M, N, K, bm, bn, bk):
    # Return how many bytes your Puzzle 2 moves between HBM and VMEM. x and y may come in several times; count each.
    # Count the result once. An element has two bytes. The blocks divide M, N and K. Mind bk == K: what stays then?
    # plan_bytes(768, 640, 512, 256, 128, 256) is 6_881_280, and with bk = 512 it is 3_735_552.
    pass  # YOUR CODE HERE


def plan_vmem(bm, bn, bk):
    # Return how many bytes of VMEM it holds. plan_vmem(256, 128, 512) is 1_048_576.
    pass  # YOUR CODE HERE


def frugal_blocks(M, N, K, vmem_bytes):
    # Return (bm, bn, bk), each from tile_sizes. Of all plans that fit into vmem_bytes, take the one with the fewest
    # plan_bytes.
    pass  # YOUR CODE HERE


def frugal_matmul(
    x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, vmem_bytes: int = 1_048_576
) -> BFloat16[Array, "M N"]:
    (M, K), (_, N) = x.shape, y.shape
    bm, bn, bk = frugal_blocks(M, N, K, vmem_bytes)
    return tiled(straight_kernel, x, y, bm=bm, bn=bn, bk=bk)  # your Puzzles 2 and 3


# %%
# Budget for x (768, 512), y (512, 640): hbm_bytes=3_735_552, vmem_bytes=1_048_576. That is the best plan. The check
# compares your two functions with what your kernel does, and frugal_blocks with every other plan, for random sizes.
check("matmul/4", frugal_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One output tile takes bm whole rows of `x` and bn whole columns of `y`. Large bm and large bn both help, most of all
# when they are alike. Now think of all tiles: how many blocks of columns does the result have, and what does each of
# them need of `x`? When bk == K, write down the block numbers at a few steps: (0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0,
# 0). Which of the two operands keeps its number? A block that is all of its array always keeps it. There are few plans:
# try them all.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def plan_bytes(M, N, K, bm, bn, bk):
#     x_times = 1 if ____ else ____         # how often all of x comes in
#     y_times = 1 if ____ else ____
#     return 2 * (M * K * x_times + K * N * y_times + ____)
#
#
# def plan_vmem(bm, bn, bk):
#     return 2 * 2 * (____ + ____ + ____) + ____
#
#
# def frugal_blocks(M, N, K, vmem_bytes):
#     plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in ____ for bk in ____]
#     fitting = [plan for plan in plans if ____]
#     return min(fitting, key=lambda plan: ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def plan_bytes(M, N, K, bm, bn, bk):
#     x_times = 1 if bk == K else N // bn
#     y_times = 1 if bk == K and bn == N else M // bm
#     return 2 * (M * K * x_times + K * N * y_times + M * N)
#
#
# def plan_vmem(bm, bn, bk):
#     return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn
#
#
# def frugal_blocks(M, N, K, vmem_bytes):
#     plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
#     fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
#     return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The intensity of a tile is bm bn / (bm + bn): 64 x 128 gives 43, 512 x 512 gives 256, and 1024 x 1024
# gives 512. On a v5e (240), tiles of 512 are just large enough. On a v6e (920e12 against 1640e9: 561), tiles of 1024
# are just too small. You buy intensity with VMEM. In the example, the best plan takes K whole and reads `x` once: 3.6
# MiB. Of the plans that cut K, the best moves 5.4 (four steps of `k`).

# %% [markdown]
# ## Puzzle 5: A weight that lies on its side
#
# **Goal.** Compute `x @ w.T`, without ever making `w.T`. Write the kernel and the call.
#
# ### Theory
#
# PyTorch keeps the weight of an `nn.Linear` as (N, K): one row per output. So its checkpoints want `x @ w.T`. If you
# pass `w.T` to a `pallas_call`, a transposed copy is made first. For 4096 x 14336 in bfloat16 that reads 112 MiB and
# writes 112. It takes 0.29 ms at 820 GB/s.
#
# You do not need the copy. A matrix product does not care about rows and columns, only about which dimension you sum
# over. **`jax.lax.dot_general`** lets you say that:
#
# ```text
#     jax.lax.dot_general(a, b, ((a_dims, b_dims), ((), ())), preferred_element_type=...)
#
#     a_dims, b_dims     which dimension of a is summed against which of b: (1,), (0,) is a @ b
#     ((), ())           no batch dimensions
#     result             what is left of a, then what is left of b
# ```
#
# That settles what happens inside a tile. Which tile comes in is up to the BlockSpec:
#
# ```text
#          x (M, K)            w (N, K)             result (M, N)
#          k ->                k ->                 j ->
#        +--+--+--+          +--+--+--+            +--+--+
#      i |  |  |  |        j |  |  |  |          i |  |  |
#        +--+--+--+          +--+--+--+            +--+--+
# ```


# %%
def linear_spec(x: BFloat16[Array, "M K"], w: BFloat16[Array, "N K"]) -> BFloat16[Array, "M N"]:
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    # x_ref: (bm, bk)      w_ref: (bn, bk)      o_ref: (bm, bn), bfloat16      acc_ref: (bm, bn), float32
    # k is grid axis 2. In a straight line (Puzzle 3) or with pl.when, as you like.
    pass  # YOUR CODE HERE


def linear(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "N K"], *, bm: int = 64, bn: int = 128, bk: int = 256
) -> BFloat16[Array, "M N"]:
    # Return the result of one pallas_call of linear_kernel, on the grid (i, j, k). Start from a copy of your Puzzle 2:
    # only w is new. It comes as it is, in blocks of (bn, bk). vmem_limit_bytes is not needed.
    pass  # YOUR CODE HERE


# %%
# Budget for x (192, 768), w (640, 768): hbm_bytes=4_669_440, vmem_bytes=262_144, calls=1, serial_steps=3, mxu_bits=16.
check("matmul/5", linear)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Along which dimension does `k` run in `x_ref`, and along which in `w_ref`? The rows of `w_ref` become the columns of
# the result. For the block of `w`, follow the drawing: which of the three grid indices says how far down it lies, and
# which one how far across? In blocks of (128, 256), the block with rows 128 to 255 and columns 512 to 767 of `w` has
# the number (1, 2). (`jnp.dot` of two matrices always sums the last dimension of the first against the first of the
# second. So `jnp.dot` would need the tile transposed.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
#     before = ____
#     dims = ((____, ____), ((), ()))
#     product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
#     ____
#
#
# def linear(x, w, *, bm=64, bn=128, bk=256):
#     (M, K), (N, _) = x.shape, w.shape
#     return pl.pallas_call(
#         linear_kernel,
#         ____                              # as in Puzzle 2, but for the BlockSpec of w
#     )(x, w)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
#     before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
#     dims = (((1,), (1,)), ((), ()))
#     product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
#     acc_ref[...] = before + product
#     o_ref[...] = acc_ref[...].astype(o_ref.dtype)
#
#
# def linear(x, w, *, bm=64, bn=128, bk=256):
#     (M, K), (N, _) = x.shape, w.shape
#     return pl.pallas_call(
#         linear_kernel,
#         grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
#         in_specs=[
#             pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
#             pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
#         ],
#         out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
#         out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
#         scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
#         compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
#     )(x, w)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You can sum over either dimension of a tile, so you never need a transposed copy. (`w_ref[...].T` inside
# the kernel is as good. At 512 x 512 x 512 the TPU compiler makes the same 762 bundles of both on a v6e, where the
# plain product takes 789.) You get 40.5 FLOPs per byte, as many as if `w` were stored the other way round. The
# gradients of Puzzle 9 rely on this.

# %% [markdown]
# ## Puzzle 6: Not everything is a matmul
#
# **Goal.** This is practice: it has nothing new, only the lowest intensity of this notebook. Multiply a diagonal matrix
# by a matrix, `diag(a) @ b`, forward and backward.
#
# ### Theory
#
# On paper it is a matmul: 137 GFLOP for 4096 x 4096, 0.7 ms of a v5e's MXU in bfloat16. But everything off the diagonal
# is zero:
#
# ```text
#     [ a0       ]   [ b00 b01 b02 ]     [ a0 b00  a0 b01  a0 b02 ]
#     [    a1    ] @ [ b10 b11 b12 ]  =  [ a1 b10  a1 b11  a1 b12 ]
#     [       a2 ]   [ b20 b21 b22 ]     [ a2 b20  a2 b21  a2 b22 ]
# ```
#
# So it is one multiplication per element: 4 bytes in, 4 out, 0.125 FLOP per byte. 128 MiB take 0.16 ms. This is the
# left end of the roofline, where **bytes are the only cost**. So read once, write once.
#
# The same is true backward. Let `g` be the gradient of the loss with respect to the result. The product rule gives you
# `da` and `db`. Mind that one number `a[m]` multiplies a whole row. Both need `g`, so write both in one kernel, or `g`
# is read twice.
#
# The wiring is given. A kernel with several results has lists for `out_specs` and `out_shape`, and `jax.custom_vjp`
# says which functions run forward and backward (softmax.py Puzzles 6 and 7).


# %%
def diagonal_spec(
    a: Float32[Array, "M 1"], b: Float32[Array, "M N"], g: Float32[Array, "M N"]
) -> tuple[Float32[Array, "M N"], Float32[Array, "M 1"], Float32[Array, "M N"]]:
    result, vjp = jax.vjp(lambda a, b: a * b, a, b)
    return result, *vjp(g)


# %%
def scale_rows_kernel(a_ref, b_ref, o_ref):
    # a_ref: (bm, 1)      b_ref, o_ref: (bm, bn), block (i, j)
    pass  # YOUR CODE HERE


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    # a_ref: (bm, 1)      b_ref, g_ref: (bm, bn), block (i, j)
    # da_ref: (bm, 1), block (i, 0), the same one for every j      db_ref: (bm, bn), block (i, j)
    pass  # YOUR CODE HERE


# %%
# Given: the call of either kernel, and what makes diagonal_matmul differentiable.
def scale_rows_call(kernel, arrays, num_columns, num_tiles, bm, bn):
    """Runs kernel on the grid (i, j). It sees block (i, 0) of arrays (M, 1), and block (i, j) of arrays (M, N)."""
    M, N = arrays[-1].shape
    column = pl.BlockSpec((bm, 1), lambda i, j: (i, 0)), jax.ShapeDtypeStruct((M, 1), jnp.float32)
    tile = pl.BlockSpec((bm, bn), lambda i, j: (i, j)), jax.ShapeDtypeStruct((M, N), jnp.float32)
    outs = [column] * num_columns + [tile] * num_tiles  # several results: out_specs and out_shape are lists
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), N // bn),
        in_specs=[column[0] if x.shape[1] == 1 else tile[0] for x in arrays],
        out_specs=[spec for spec, _ in outs],
        out_shape=[shape for _, shape in outs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def diagonal_matmul(a, b, bm, bn):
    return scale_rows_call(scale_rows_kernel, [a, b], 0, 1, bm, bn)[0]


def diagonal_matmul_fwd(a, b, bm, bn):
    return diagonal_matmul(a, b, bm, bn), (a, b)


def diagonal_matmul_bwd(bm, bn, residuals, g):  # first what nondiff_argnums names, then residuals, then the gradient
    return tuple(scale_rows_call(scale_rows_grad_kernel, [*residuals, g], 1, 1, bm, bn))


diagonal_matmul.defvjp(diagonal_matmul_fwd, diagonal_matmul_bwd)


def diagonal_and_grads(a, b, g, *, bm: int = 32, bn: int = 256):
    result, vjp = jax.vjp(lambda a, b: diagonal_matmul(a, b, bm, bn), a, b)
    return result, *vjp(g)


# %%
# Budget for a (96, 1), b (96, 1024), g (96, 1024): hbm_bytes=1_967_232, vmem_bytes=197_120, calls=2, flops=393_600.
# hbm_bytes: forward b in, the result out; backward b and g in, db out. And a little for a and da. flops: 4 an element.
# Your code may not call jax.vjp, jax.grad or anything like them.
check("matmul/6", diagonal_and_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `a_ref` is a column and `b_ref` a tile: NumPy already knows what their product is. Backward, write down the gradient
# of one element, a[m] b[m, n], with respect to each factor. Then ask how many elements of the result each factor is in.
# An input that is in many of them adds up the gradients of all. A row comes in several blocks, so which of your two
# results has a first step, as in basics.py Puzzle 9? (You may read a Ref as often as you like: it is in VMEM. A second
# kernel would bring `g` in again, 384 KiB.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def scale_rows_kernel(a_ref, b_ref, o_ref):
#     o_ref[...] = ____
#
#
# def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
#     g = g_ref[...]
#     before = ____                # (bm, 1): 0 at the first step of a row
#     da_ref[...] = before + ____
#     db_ref[...] = ____           # (bm, bn)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def scale_rows_kernel(a_ref, b_ref, o_ref):
#     o_ref[...] = a_ref[...] * b_ref[...]
#
#
# def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
#     g = g_ref[...]
#     before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
#     da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
#     db_ref[...] = a_ref[...] * g
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get 0.2 FLOP per byte, and 240 would keep a v5e busy. The MXU sleeps through all of it, and it
# should. When the intensity is that low, forget the arithmetic and count arrays. Five of size (M, N) move here, forward
# and backward, and you need them all. The next puzzles wake the MXU up again.

# %%
show(diagonal_and_grads, normal((96, 1)), normal((96, 1024)), normal((96, 1024)))

# %% [markdown]
# ## Puzzle 7: How much work is worth a branch?
#
# **Goal.** Compute half of a transformer block's feed-forward layer in one kernel: `r + gelu(x @ w + bias)`. Write the
# kernel and the index map of the residual `r`.
#
# ### Theory
#
# You know the epilogue from basics.py Puzzle 12: work on the finished tile, in VMEM, saves a round trip to HBM. For a
# result of 8192 x 8192 in bfloat16 that is 256 MiB, 0.33 ms on a v5e.
#
# If you follow Puzzle 3, the epilogue runs at every step, on drafts that nobody reads. A cast was cheap, but GELU is a
# dozen operations for each element. Here is 4096 x 4096 x 4096 again, in tiles of 1024 x 1024 x 512:
#
# ```text
#     bundles per step, mean             v5e                v6e
#     epilogue at every step          7780   737 us      4274   348 us
#     epilogue behind pl.when         7042   737 us      2828   242 us
# ```
#
# With eight steps of `k`, seven of eight GELUs are useless. On a v5e they hide behind the MXU. A v6e's MXU is too fast
# to hide them.
#
# The rule: **cheap work runs at every step, expensive work waits behind a branch.** The budget has `output_stores=1`,
# so the store waits, too. `r` needs an index map. Should the block number of `r` change with `k`?


# %%
def gelu_residual_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"], bias: Float[Array, "1 N"], r: BFloat16[Array, "M N"]
) -> BFloat16[Array, "M N"]:
    y = jax.nn.gelu(jnp.dot(x, w, preferred_element_type=jnp.float32) + bias)
    return (r.astype(jnp.float32) + y).astype(jnp.bfloat16)


# %%
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    # x_ref: (bm, bk), w_ref: (bk, bn), bfloat16      bias_ref: (1, bn), float32      r_ref, o_ref: (bm, bn), bfloat16
    # acc_ref: (bm, bn), float32. Stay in float32 until the result is stored.
    pass  # YOUR CODE HERE


def residual_map(i, j, k):
    # r is (M, N), in blocks of (bm, bn). Return the number of the block that step (i, j, k) needs.
    pass  # YOUR CODE HERE


# %%
# Given: the call.
def gelu_residual(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "K N"],
    bias: Float[Array, "1 N"],
    r: BFloat16[Array, "M N"],
    *,
    bm: int = 64,
    bn: int = 128,
    bk: int = 256,
) -> BFloat16[Array, "M N"]:
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        gelu_residual_kernel,
        grid=(pl.cdiv(M, bm), N // bn, K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, bn), lambda i, j, k: (0, j)),
            pl.BlockSpec((bm, bn), residual_map),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w, bias, r)


# %%
# Budget for x (192, 1024), w (1024, 256), bias (1, 256), r (192, 256): hbm_bytes=2_558_976, vmem_bytes=295_936,
# calls=1, output_stores=1, flops=101_700_000, mxu_bits=16.
check("matmul/7", gelu_residual)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Sort the work into two piles: what has to happen at every step, and what once per output tile. Which of your kernels
# does the first pile in a straight line? For `r`: a block is copied when its number changes between two steps, whether
# the kernel looks at it or not. If the number followed `k`, four blocks of `r` would come in for each output tile, and
# you would use one.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
#     k = pl.program_id(2)
#     ____                              # the sum, as in Puzzle 3
#
#     @pl.when(____)
#     def _():
#         y = jax.nn.gelu(____)
#         o_ref[...] = (____ + y).astype(o_ref.dtype)
#
#
# def residual_map(i, j, k):
#     return (____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
#     k = pl.program_id(2)
#     before = jnp.where(k == 0, 0, acc_ref[...])
#     acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(k == pl.num_programs(2) - 1)
#     def _():
#         y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
#         o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)
#
#
# def residual_map(i, j, k):
#     return (i, j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get 39.6 FLOPs per byte: `r` is one more array to read, so the same tiles have less intensity than
# in Puzzle 2. With a trip to HBM in between it would be 36.8. A branch decides whether a step does some work. What
# if each step has a different amount?

# %% [markdown]
# ## Puzzle 7b: A loop in the kernel
#
# **Goal.** Multiply a lower triangular matrix by a matrix, `a @ y`. Loop over the tiles of a row inside the kernel, and
# stop where the zeros begin.
#
# ### Theory
#
# In causal models a token sees only those before it. The matrix that mixes tokens is then lower triangular, and half of
# the FLOPs of `a @ y` are wasted on zeros.
#
# `k` could be a grid axis, with `pl.when` around the product. But a step that does nothing still costs 0.25 us and its
# copies. 4096 x 4096 x 4096 in tiles of 512 has 512 steps: 128 us. Instead, let one step get a whole row of tiles, and
# put the loop into the kernel. Then there are 64 steps, 16 us. The loop is JAX's own. The slice of a Ref is new:
#
# ```text
#     pl.ds(start, size)            a slice of a Ref: x_ref[:, pl.ds(start, size)]. start counts elements (not blocks)
#                                   and may be computed by the kernel. size has to be a constant.
#
#     jax.lax.fori_loop(lower, upper, body, init)         value = init
#                                                         for k in range(lower, upper): value = body(k, value)
# ```
#
# The value keeps its shape and dtype. It is the sum so far, so you need no scratch. `upper` may depend on the step. A
# Python `for` cannot do that. In each row, count the tiles that hold a `#` or a `\`:
#
# ```text
#                tiles of bk = 128 columns
#     i = 0      \\  |    |    |    |         64 rows of a
#     i = 1      ##\\|    |    |    |
#     i = 2      ####|\\  |    |    |
#     i = 3      ####|##\\|    |    |
# ```


# %%
def triangle_spec(a: BFloat16[Array, "M M"], y: BFloat16[Array, "M N"]) -> BFloat16[Array, "M N"]:
    return jnp.dot(a, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


# %%
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    # Grid (j, i). a_ref: (bm, M), block i of the rows      y_ref: (M, bn), block j of the columns, all rows
    # o_ref: (bm, bn), bfloat16, block (i, j)      bk: how many columns of a_ref to use in one round of the loop
    pass  # YOUR CODE HERE


# %%
# Given: the call. bk divides M.
def triangle_matmul(
    a: BFloat16[Array, "M M"], y: BFloat16[Array, "M N"], *, bm: int = 64, bn: int = 128, bk: int = 128
) -> BFloat16[Array, "M N"]:
    M, N = y.shape
    return pl.pallas_call(
        functools.partial(triangle_kernel, bk=bk),
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, M), lambda j, i: (i, 0)), pl.BlockSpec((M, bn), lambda j, i: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), y.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )(a, y)


# %%
# Budget for a (640, 640), y (640, 384): hbm_bytes=3_440_640, vmem_bytes=524_288, grid_steps=30, calls=1,
# flops=190_000_000, mxu_bits=16, branches=1. flops: all of a would take 314,572,800. branches: your loop is the one.
check("matmul/7b", triangle_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Block i has bm rows. What is the number of its last row, and up to which column can that row hold anything but zero?
# The loop has to reach the tile of that column, and the diagonal may cut through it. `pl.cdiv` rounds up. For the
# slices: the columns of `a` in one round are multiplied by which rows of `y`? Slice the Refs, not what you have loaded
# from them: the TPU compiler refuses `x_ref[...]` cut at a place that the kernel has computed.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
#     bm, bn = o_ref.shape
#
#     def add_tile(k, acc):
#         part = pl.ds(____, ____)
#         return ____
#
#     num_tiles = pl.cdiv(____, bk)         # of this row that are not all zero
#     acc = jax.lax.fori_loop(0, num_tiles, add_tile, ____)
#     o_ref[...] = acc.astype(o_ref.dtype)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
#     bm, bn = o_ref.shape
#
#     def add_tile(k, acc):
#         part = pl.ds(k * bk, bk)
#         return acc + jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32)
#
#     num_tiles = pl.cdiv((pl.program_id(1) + 1) * bm, bk)
#     acc = jax.lax.fori_loop(0, num_tiles, add_tile, jnp.zeros((bm, bn), jnp.float32))
#     o_ref[...] = acc.astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get 55 FLOPs per byte. All of `a` would give 91, and that would be no better: the bytes are the
# same, and the additional FLOPs are zeros. For 4096 x 4096 x 4096 in tiles of 512, `tpu_report` estimates 725 us for
# all of `a` on a v5e, and 463 us for your loop. On a v6e it says 221 us for either, because the copies alone take 205.
# A loop saves arithmetic. Only an index map saves copies (Puzzle 11). JAX's splash attention takes slices of its block
# of keys with `pl.ds` in such a loop. Now for a product that is never written at all. Can it be worth computing?

# %% [markdown]
# ## Puzzle 8: The product that is never written
#
# **Goal.** For each row of `x`, compute the sum of the squares of `relu(x @ w)`: forward and backward, without ever
# writing `x @ w`.
#
# ### Theory
#
# How strongly does a layer fire? Take 16,384 tokens and a feed-forward layer of 28,672. `x @ w` is 1.75 GiB in float32,
# and you need only 16,384 numbers. On a v5e it takes 4.6 ms just to write the product and read it again. So finish a
# tile of it, square it, sum it along its rows, and forget it.
#
# Backward, the gradient needs all of `h = relu(x @ w)` again. You can store it, or **compute it again**, tile by tile.
# If you store an element in bfloat16, you write it once, and two kernels read it: 6 bytes. In that time a v5e does 1440
# FLOPs. Computing it again takes 2 * K FLOPs in each kernel, 4 * K in both. Up to K = 360 that is less.
# Beyond that, you pay time to save memory.
#
# ```text
#     e[m]      =  sum over n of h[m, n]^2                 h = relu(x @ w)
#     t[m, n]   =  g[m]  de[m] / d(x @ w)[m, n]            a tile of this, made from tiles of x and w and from g
#     dx        =  t @ w.T          summed over n
#     dw        =  x.T @ t          summed over m
# ```
#
# The kernels for `dx` and `dw` are given. They make each tile of `t` with your function.


# %%
def energy_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"], g: Float[Array, "M 1"]
) -> tuple[Float[Array, "M 1"], BFloat16[Array, "M K"], BFloat16[Array, "K N"]]:
    def energy(x, w):
        return jnp.square(jax.nn.relu(jnp.dot(x, w, precision="highest"))).sum(axis=1, keepdims=True)

    e, vjp = jax.vjp(energy, x.astype(jnp.float32), w.astype(jnp.float32))
    dx, dw = vjp(g)
    return e, dx.astype(jnp.bfloat16), dw.astype(jnp.bfloat16)


# %%
def row_energy_kernel(x_ref, w_ref, e_ref):
    # x_ref: (bm, K), whole rows      w_ref: (K, bn), whole columns      e_ref: (bm, 1), float32
    pass  # YOUR CODE HERE


def row_energy_call(x, w, *, bm, bn):
    # Return e, (M, 1), float32: one pallas_call of row_energy_kernel. There is no k loop. bm divides M, bn divides N.
    pass  # YOUR CODE HERE


def row_energy_grad_tile(x, w, g):
    # Arrays, not Refs. x: (bm, K), w: (K, bn), bfloat16      g: (bm, 1), float32, the gradient with respect to e
    # Return the tile t, (bm, bn), in bfloat16: the gradient with respect to x @ w.
    pass  # YOUR CODE HERE


# %%
# Given: the kernels of dx and dw. Each makes the tile t with your function, and multiplies it at once.
def dx_kernel(x_ref, w_ref, g_ref, dx_ref, acc_ref):
    t = row_energy_grad_tile(x_ref[...], w_ref[...], g_ref[...])
    before = jnp.where(pl.program_id(1) == 0, 0, acc_ref[...])
    over_n = (((1,), (1,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(t, w_ref[...], over_n, preferred_element_type=jnp.float32)
    dx_ref[...] = acc_ref[...].astype(dx_ref.dtype)


def dw_kernel(x_ref, w_ref, g_ref, dw_ref, acc_ref):
    t = row_energy_grad_tile(x_ref[...], w_ref[...], g_ref[...])
    before = jnp.where(pl.program_id(1) == 0, 0, acc_ref[...])
    over_m = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x_ref[...], t, over_m, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %%
# Given: the calls of these kernels.
def row_energy_grads(x, w, g, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    dx = pl.pallas_call(
        dx_kernel,
        grid=(M // bm, N // bn),
        in_specs=[
            pl.BlockSpec((bm, K), lambda i, j: (i, 0)),
            pl.BlockSpec((K, bn), lambda i, j: (0, j)),
            pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        ],
        out_specs=pl.BlockSpec((bm, K), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, K), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, K), jnp.float32)],
        compiler_params=semantics,
    )(x, w, g)
    dw = pl.pallas_call(
        dw_kernel,
        grid=(N // bn, M // bm),  # dw sums over m, so rows are the inner loop
        in_specs=[
            pl.BlockSpec((bm, K), lambda j, i: (i, 0)),
            pl.BlockSpec((K, bn), lambda j, i: (0, j)),
            pl.BlockSpec((bm, 1), lambda j, i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((K, bn), lambda j, i: (0, j)),
        out_shape=jax.ShapeDtypeStruct((K, N), w.dtype),
        scratch_shapes=[pltpu.VMEM((K, bn), jnp.float32)],
        compiler_params=semantics,
    )(x, w, g)
    return dx, dw


# %%
# Given: what makes row_energy differentiable.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def row_energy(x, w, bm, bn):
    return row_energy_call(x, w, bm=bm, bn=bn)


def row_energy_fwd(x, w, bm, bn):
    return row_energy(x, w, bm, bn), (x, w)  # the residuals are the inputs, and nothing of shape (M, N)


def row_energy_bwd(bm, bn, residuals, g):
    return row_energy_grads(*residuals, g, bm=bm, bn=bn)


row_energy.defvjp(row_energy_fwd, row_energy_bwd)


def energy_and_grads(x, w, g, *, bm: int = 32, bn: int = 128):
    e, vjp = jax.vjp(lambda x, w: row_energy(x, w, bm, bn), x, w)
    return e, *vjp(g)


# %%
# Budget for x (160, 256), w (256, 1024), g (160, 1): hbm_bytes=7_198_976, vmem_bytes=426_240, calls=3, mxu_bits=16.
# hbm_bytes: it leaves no room for an array of (M, N), which would be 655,360 bytes one way. Your code may not call
# jax.vjp, jax.grad or anything like them.
check("matmul/8", energy_and_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forward it is basics.py Puzzle 9, with a tile that you compute instead of read. The sum over n grows in `e_ref`, so
# which loop runs inside? For the tile t, use the chain rule, from the square back to x @ w. The relu usually needs a
# mask in its gradient. Here it does not: look at what h is where the mask would be 0. Each row has its own g, and a
# (bm, 1) array spreads over a (bm, bn) tile by itself.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def row_energy_kernel(x_ref, w_ref, e_ref):
#     ____                                    # the first step of a row of tiles
#
#     h = jax.nn.relu(____)                   # (bm, bn), float32
#     e_ref[...] += ____                      # (bm, 1)
#
#
# def row_energy_call(x, w, *, bm, bn):
#     (M, K), (_, N) = x.shape, w.shape
#     return pl.pallas_call(
#         row_energy_kernel,
#         grid=(____, ____),
#         in_specs=[pl.BlockSpec((bm, K), ____), pl.BlockSpec((K, bn), ____)],
#         out_specs=____,
#         out_shape=____,
#     )(x, w)
#
#
# def row_energy_grad_tile(x, w, g):
#     h = ____
#     return (____).astype(x.dtype)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def row_energy_kernel(x_ref, w_ref, e_ref):
#     @pl.when(pl.program_id(1) == 0)
#     def _():
#         e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)
#
#     h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
#     e_ref[...] += (h * h).sum(axis=1, keepdims=True)
#
#
# def row_energy_call(x, w, *, bm, bn):
#     (M, K), (_, N) = x.shape, w.shape
#     return pl.pallas_call(
#         row_energy_kernel,
#         grid=(M // bm, N // bn),
#         in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
#         out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
#         out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
#     )(x, w)
#
#
# def row_energy_grad_tile(x, w, g):
#     h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
#     return (2 * g * h).astype(x.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get about 59 FLOPs per byte over all three kernels, and not one byte of `x @ w` leaves the chip. The
# backward pass computes it a second and a third time, and with K = 256 that is a bargain. In attention K is the size of
# a head, 64 to 256. So flash attention does the same with its scores.

# %% [markdown]
# ## Puzzle 9: Backward
#
# **Goal.** Compute the gradients of `y = x @ w`. They are two more products. Write one kernel for both, and tell it
# what to sum over.
#
# ### Theory
#
# Two thirds of the FLOPs of training are backward passes, nearly all of them in these two products:
#
# ```text
#     y  = x @ w          (M, K) (K, N) -> (M, N)     summed over K
#     dx = g @ w.T        (M, N) (N, K) -> (M, K)     summed over ?
#     dw = x.T @ g        (K, M) (M, N) -> (K, N)     summed over ?
# ```
#
# For 16,384 tokens of 4096 features in bfloat16, a copy of `x.T` takes 0.33 ms at 820 GB/s, and the MXU needs 2.8 ms
# for a `dw` of 4096 x 4096. Since Puzzle 5 you need no such copy: one kernel can do all three products, if you tell it
# the dimensions. One output tile sums products along one axis, and those steps have to follow one another. So **the
# summed axis goes last in the grid**:
#
# ```text
#     grid of y    (i, j, k)        i: blocks of M
#     grid of dx   (i, k, j)        j: blocks of N
#     grid of dw   (k, j, i)        k: blocks of K
# ```
#
# For `dw`, that axis is the batch: thousands of tokens, and each of them adds to every weight. In bfloat16 the later
# ones would be lost (256 + 1 is 256). So the sum runs in float32, in `acc_ref`, and is rounded once. You have typed the
# start of such a sum often enough: `so_far` is given.


# %%
def linear_grads_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"], g: BFloat16[Array, "M N"]
) -> tuple[BFloat16[Array, "M K"], BFloat16[Array, "K N"]]:
    x, w, g = (a.astype(jnp.float32) for a in (x, w, g))
    _, vjp = jax.vjp(lambda x, w: jnp.dot(x, w, precision="highest"), x, w)
    return tuple(d.astype(jnp.bfloat16) for d in vjp(g))


# %%
def so_far(acc_ref):
    """What acc_ref holds, or 0 at the first step along grid axis 2: the first line of your Puzzle 3."""
    return jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])


def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    # Sums a_ref against b_ref along dims, ((d,), (e,)): dimension d of a_ref, e of b_ref. o_ref: bfloat16. acc_ref:
    # float32, of the same shape. The sum runs along grid axis 2.
    pass  # YOUR CODE HERE


def dx_plan(bm, bn, bk):
    # The grid is (i, k, j). Return dims, [BlockSpec of g, BlockSpec of w], BlockSpec of dx.
    pass  # YOUR CODE HERE


def dw_plan(bm, bn, bk):
    # The grid is (k, j, i). Return dims, [BlockSpec of x, BlockSpec of g], BlockSpec of dw.
    pass  # YOUR CODE HERE


# %%
# Given: the call for either plan.
def contraction(plan, grid, a, b, shape):
    dims, in_specs, out_spec = plan
    return pl.pallas_call(
        functools.partial(contract_kernel, dims=dims),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=jax.ShapeDtypeStruct(shape, a.dtype),
        scratch_shapes=[pltpu.VMEM(out_spec.block_shape, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(a, b)


# %%
# Given: what makes product differentiable. bm and bn divide M and N. bk need not divide K here: neither gradient is
# summed over K, so its last block may hang over the edge.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x, w, bm, bn, bk):
    return tiled(straight_kernel, x, w, bm=bm, bn=bn, bk=bk)  # your Puzzles 2 and 3


def product_fwd(x, w, bm, bn, bk):
    return product(x, w, bm, bn, bk), (x, w)


def product_bwd(bm, bn, bk, residuals, g):
    x, w = residuals
    rows, cols, inner = x.shape[0] // bm, w.shape[1] // bn, pl.cdiv(x.shape[1], bk)
    dx = contraction(dx_plan(bm, bn, bk), (rows, inner, cols), g, w, x.shape)
    dw = contraction(dw_plan(bm, bn, bk), (inner, cols, rows), x, g, w.shape)
    return dx, dw


product.defvjp(product_fwd, product_bwd)


def linear_grads(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "K N"],
    g: BFloat16[Array, "M N"],
    *,
    bm: int = 64,
    bn: int = 128,
    bk: int = 256,
) -> tuple[BFloat16[Array, "M K"], BFloat16[Array, "K N"]]:
    return product_bwd(bm, bn, bk, (x, w), g)


# %%
# Budget for x (320, 512), w (512, 384), g (320, 384): hbm_bytes=4_653_056, vmem_bytes=360_448, calls=2, serial_steps=5,
# mxu_bits=16. serial_steps: of each call. dx sums over 3 blocks, dw over 5.
check("matmul/9", linear_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which letter do the two operands share that the result does not have? You sum over that one. Then take each operand as
# it lies in memory: `g` as (M, N), `w` as (K, N), `x` as (M, K). Is that letter its first or its second dimension? The
# dimensions that are left, in this order, are those of the result. Forward, the letter is K: the second dimension of
# `x`, the first of `w`, and (M, N) is left. For the maps: an index map gets the grid indices in the order of the grid,
# and returns them in the order of the array.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
#     ____                                  # Puzzle 5, with (dims, ((), ()))
#
#
# def dx_plan(bm, bn, bk):
#     g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: ____)
#     w_spec = pl.BlockSpec((____, ____), lambda i, k, j: ____)
#     out_spec = ____
#     return ((____,), (____,)), [g_spec, w_spec], out_spec
#
#
# def dw_plan(bm, bn, bk):
#     x_spec = pl.BlockSpec(____, lambda k, j, i: ____)
#     ____
#     return ____, [x_spec, g_spec], out_spec
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
#     product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
#     acc_ref[...] = so_far(acc_ref) + product
#     o_ref[...] = acc_ref[...].astype(o_ref.dtype)
#
#
# def dx_plan(bm, bn, bk):
#     g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
#     w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
#     out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
#     return ((1,), (1,)), [g_spec, w_spec], out_spec
#
#
# def dw_plan(bm, bn, bk):
#     x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
#     g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
#     out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
#     return ((0,), (0,)), [x_spec, g_spec], out_spec
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One kernel does forward and backward, and you never transposed an array. Forward, these tiles give 39.5
# FLOPs per byte. Backward you get 54.4: the output tiles are 64 x 256 and 256 x 128, which are larger (Puzzle 4). And
# `jax.grad` finds your kernel by itself:

# %%
if unwritten(product) or unwritten(product_bwd) or unwritten(contraction):
    print("Nothing to differentiate yet: Puzzles 2, 3 and 9 come first.")
else:
    key_x, key_w = jax.random.split(jax.random.key(0))
    x0 = jax.random.normal(key_x, (64, 256), jnp.bfloat16)
    w0 = jax.random.normal(key_w, (256, 128), jnp.bfloat16)
    yours = jax.grad(lambda w: product(x0, w, 64, 128, 256).astype(jnp.float32).sum())(w0)
    theirs = jax.grad(lambda w: jnp.dot(x0, w).astype(jnp.float32).sum())(w0)
    yours, theirs = np.asarray(yours, np.float32), np.asarray(theirs, np.float32)
    print(
        f"largest difference to jnp.dot's gradient: {np.abs(yours - theirs).max():.2g}, of {np.abs(theirs).max():.3g}"
    )


# %% [markdown]
# ## Puzzle 10: Eight bits
#
# **Goal.** Multiply int8 matrices that carry a scale for each row of `x` and each column of `w`.
#
# ### Theory
#
# An int8 has half the bytes of a bfloat16, and on v5e and v6e the MXU multiplies it at twice the rate. So you store
# round(x / s) in int8 and keep the scale `s`. With one scale for a whole matrix, the small rows would be left with few
# bits. One scale for each row of `x` and each column of `w` costs next to nothing:
#
# ```text
#     x[m, k]  ~  sx[m] * x8[m, k]            w[k, n]  ~  sw[n] * w8[k, n]
#
#     y[m, n]  =  sum over k of  sx[m] x8[m, k] w8[k, n] sw[n]
#              =  ?
# ```
#
# Neither scale has a `k` in it. So what can you do with them?
#
# The products are whole numbers up to 127 x 127 = 16,129. Their sums are exact in **int32**, which has room for 133,000
# of the largest. The MXU adds in int32 if `preferred_element_type` says so. If you do not say it, the product of two
# int8 arrays is int8 again, and there 100 + 100 is -56.


# %%
def int8_spec(
    x: Int8[Array, "M K"], w: Int8[Array, "K N"], sx: Float32[Array, "M 1"], sw: Float32[Array, "1 N"]
) -> Float32[Array, "M N"]:
    x, w, sx, sw = (np.asarray(a, np.float64) for a in (x, w, sx, sw))
    return jnp.asarray((x * sx) @ (w * sw), jnp.float32)


def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    # x_ref: (bm, bk), w_ref: (bk, bn), int8      sx_ref: (bm, 1), sw_ref: (1, bn), float32
    # o_ref: (bm, bn), float32      acc_ref: (bm, bn), int32      k is grid axis 2 (so_far of Puzzle 9 fits)
    pass  # YOUR CODE HERE


def int8_matmul(
    x: Int8[Array, "M K"],
    w: Int8[Array, "K N"],
    sx: Float32[Array, "M 1"],
    sw: Float32[Array, "1 N"],
    *,
    bm: int = 64,
    bn: int = 128,
    bk: int = 256,
) -> Float32[Array, "M N"]:
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        int8_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            pl.BlockSpec((bm, 1), lambda i, j, k: (i, 0)),
            pl.BlockSpec((1, bn), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w, sx, sw)


# %%
# Budget for x (192, 1280), w (1280, 384), sx (192, 1), sw (1, 384): hbm_bytes=2_512_128, vmem_bytes=198_144, calls=1,
# mxu_bits=8. mxu_bits: the operands of a product have to be int8. Rows of x differ by a factor of up to 1000.
check("matmul/10", int8_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You can take whatever does not depend on `k` out of the sum over `k`. What kind of numbers is left inside, and when
# may they turn into floats? float32 holds every whole number up to 16,777,216, and the sums of two variants go beyond
# that. The scales are two multiplications for each element of the result. Is that cheap or expensive, in the sense of
# Puzzle 7?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
#     acc = ____ + jnp.dot(____, ____, preferred_element_type=____)
#     acc_ref[...] = acc
#     o_ref[...] = acc.astype(jnp.float32) * ____ * ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
#     acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
#     acc_ref[...] = acc
#     o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get about 75 operations per byte. The tiles are those of Puzzle 3, but the inputs are half as wide
# (and the result, in float32, is twice as wide). A sum of whole numbers is exact in any order, so you round only in the
# epilogue. (A TPU7x has no int8 peak in JAX's table: its MXU is fast with float8 instead.)

# %% [markdown]
# ## Puzzle 11: Blocks that are not there
#
# **Goal.** Most blocks of one matrix are zero. Multiply it by a dense matrix, and read only the blocks that are there.
#
# ### Theory
#
# A pruned weight of 4096 x 4096 has 32 MiB in bfloat16. If nine of ten of its blocks are zero, a dense kernel reads
# 28.8 MiB for nothing: 37 us on a v5e. An index map must not ask for those blocks. But which blocks exist is *data*,
# and so far a map got grid indices only.
#
# **Scalar prefetch** helps. Before the first step, the first operands of the call, small arrays of integers, are copied
# into SMEM (a memory for single numbers). Index maps get them as Refs after the grid indices. The kernel gets them
# first:
#
# ```text
#     grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, grid=..., in_specs=..., out_specs=..., ...)
#
#     def a_map(j, i, s, starts_ref, cols_ref): ... starts_ref[i] ...
# ```
#
# The blocks that exist lie in a stack, row by row. `starts` says where each row begins in the stack, and `cols` says in
# which column each block belongs:
#
# ```text
#     [ A . B . ]      blocks  [ A  B  C ]            slot s of row i: starts[i] + s
#     [ . . . . ]      cols    [ 0  2  3 ]
#     [ . . . C ]      starts  [ 0  2  2  3 ]         row 1 has none: its result is zero
# ```
#
# The grid's last axis has `most` steps, enough for the longest row. In the unused steps of a shorter row, the map
# should repeat the previous block number. Then nothing is copied. The first row may be empty, too, and a map may not
# return -1.


# %%
def sparse_case(num_cols, cols_of_row, bm, bk, N):
    """Inputs for sparse_matmul: starts, cols, the blocks (drawn at random), and a dense y of (num_cols * bk, N)."""
    starts = np.cumsum([0, *map(len, cols_of_row)]).astype(np.int32)
    cols = np.array([c for row in cols_of_row for c in row], np.int32)
    blocks = normal((len(cols), bm, bk), "bfloat16")
    return starts, cols, blocks, normal((num_cols * bk, N), "bfloat16", shift=0.5)


def sparse_spec(
    starts: Int[Array, "R+1"], cols: Int[Array, "L"], blocks: BFloat16[Array, "L bm bk"], y: BFloat16[Array, "K N"]
) -> BFloat16[Array, "R*bm N"]:
    (_, bm, bk), N = blocks.shape, y.shape[1]
    result = np.zeros(((len(starts) - 1) * bm, N), np.float32)
    for i in range(len(starts) - 1):
        for slot in range(int(starts[i]), int(starts[i + 1])):
            rows = np.asarray(y[int(cols[slot]) * bk :][:bk], np.float32)
            result[i * bm : (i + 1) * bm] += np.asarray(blocks[slot], np.float32) @ rows
    return jnp.asarray(result).astype(jnp.bfloat16)


# %%
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    # Grid (j, i, s). starts_ref, cols_ref: int32, in SMEM: starts_ref[i] is a number
    # blocks_ref: (bm, bk), the block in the slot of this step      y_ref: (bk, bn), the block of y that belongs to it
    # o_ref: (bm, bn), block (i, j)      acc_ref: (bm, bn), float32
    pass  # YOUR CODE HERE


def live_slot(i, s, starts_ref):
    # Return the slot of step s of row i. Beyond the end of the row, return one that need not be fetched.
    pass  # YOUR CODE HERE


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    # Return the number of the block of y, (bk, bn), that goes with the block in this step's slot.
    pass  # YOUR CODE HERE


# %%
# Given: the map of the blocks, which uses your slot, and the call.
def sparse_blocks_map(j, i, s, starts_ref, cols_ref):
    return (live_slot(i, s, starts_ref), 0, 0)


def sparse_matmul(starts, cols, blocks, y, *, most: int = 3, bn: int = 128):
    (_, bm, bk), (_, N), num_rows = blocks.shape, y.shape, starts.shape[0] - 1
    return pl.pallas_call(
        sparse_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(  # takes the arguments that say where things are
            num_scalar_prefetch=2,  # the first two operands: starts and cols
            grid=(pl.cdiv(N, bn), num_rows, most),
            in_specs=[
                pl.BlockSpec((None, bm, bk), sparse_blocks_map),
                pl.BlockSpec((bk, bn), sparse_y_map),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, i, s, starts_ref, cols_ref: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows * bm, N), y.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(starts, cols, blocks, y)


# %%
# Budget for starts [0, 2, 2, 5, 6, 6], cols [0, 2, 1, 3, 4, 2], blocks (6, 32, 128), y (640, 384): hbm_bytes=860_160,
# calls=1, output_stores=1, flops=18_948_096. hbm_bytes: the blocks that exist, once for each of the three block columns
# j of y, and the blocks of y by which they are multiplied.
check("matmul/11", sparse_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The difference of two neighbours in `starts` is the number of blocks in row i. In the steps after those, add nothing.
# But do not skip zeroing and storing there, or rows without blocks keep garbage. For the slot: which slot is in VMEM
# already when a row ends? It is the last one before the next row starts. Is that also true for a row without blocks?
# And what if such a row is the first one? (Maps run for every step, also where the kernel adds nothing.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
#     i, s = pl.program_id(1), pl.program_id(2)
#     ____                                      # zero, at the first step
#
#     @pl.when(s < ____)
#     def _():
#         acc_ref[...] += ____
#
#     ____                                      # store, at the last step
#
#
# def live_slot(i, s, starts_ref):
#     slot = jnp.minimum(____, ____)            # at most the last slot of the row
#     return jnp.maximum(slot, 0)
#
#
# def sparse_y_map(j, i, s, starts_ref, cols_ref):
#     return (____, j)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
#     i, s = pl.program_id(1), pl.program_id(2)
#
#     @pl.when(s == 0)
#     def _():
#         acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
#
#     @pl.when(s < starts_ref[i + 1] - starts_ref[i])
#     def _():
#         acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(s == pl.num_programs(2) - 1)
#     def _():
#         o_ref[...] = acc_ref[...].astype(o_ref.dtype)
#
#
# def live_slot(i, s, starts_ref):
#     return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)
#
#
# def sparse_y_map(j, i, s, starts_ref, cols_ref):
#     return (cols_ref[live_slot(i, s, starts_ref)], j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You get 22 FLOPs per byte, somewhat less than a dense product in the same tiles: the result is as large,
# and there are fewer FLOPs. Sparsity saves bytes and FLOPs, but it does not raise the intensity. An empty row costs
# steps. Its index map returns the block number of the step before, so nothing is copied in. Its zeros still go out.
# Mixtures of experts and splash attention are built on this: a list of what exists, and maps that read it.

# %%
show(sparse_matmul, *sparse_case(5, [[0, 2], [], [1, 3, 4], [2], []], bm=32, bk=128, N=384))

# %% [markdown]
# ## Puzzle 12: Pick the tiles
#
# **Goal.** Write a roofline model in code: a function that picks (bm, bn, bk) for any sizes and any TPU.
#
# ### Theory
#
# In Puzzle 4 only bytes counted. Time has two more terms:
#
# ```text
#     MXU   |      #########################################
#     HBM   | fill ##############################           fill
#             ^^^^                                          ^^^^
#             the MXU waits for the first blocks            the last block goes out, after the MXU is done
# ```
#
# **MXU** is FLOPs over peak, **HBM** is bytes over bandwidth. The **fill** is a part of HBM: the first block of `x`,
# the first of `y` and the last of the result. Which parts overlap in the picture, and which do not? Now let HBM
# take longer than MXU. Draw that, too, before you write the formula.
#
# Add `step_s` for every step: 0.25 us on a v5e, 0.43 on a v6e. On a v6e, a step of Puzzle 3 takes 2349 bundles, but its
# MXU work takes only 2048 cycles. In tiles of 512 it takes 789, and the MXU needs 512. So each step takes some 300 more
# (0.18 us).
#
# For 4096 x 4096 x 4096 on a v6e the MXU needs 149 us. In tiles of 512, the steps add 220. In tiles of 4096 x 4096 x
# 128 the fill would add 22. The best of the 216 plans are in between (three tie).


# %%
class Chip(NamedTuple):
    flops_per_s: float
    hbm_bytes_per_s: float
    vmem_bytes: int  # what a plan may use
    step_s: float  # seconds that every step takes in addition to its work


# VMEM: a plan may use half of the 128 MiB. The compiler needs some, too: the last cell lets it have three quarters.
V5E = Chip(flops_per_s=197e12, hbm_bytes_per_s=820e9, vmem_bytes=64 << 20, step_s=0.25e-6)
V6E = Chip(flops_per_s=920e12, hbm_bytes_per_s=1640e9, vmem_bytes=64 << 20, step_s=0.43e-6)
SMALL = Chip(1e12, 5e9, 6 << 20, 10e-6)  # nobody sells it: a chip for matrices that are quick to check


def plan_time(M, N, K, bm, bn, bk, chip):
    # Return the time in seconds that x @ y takes in these blocks on this chip, by the picture above: what overlaps, the
    # fill, the steps. plan_bytes of Puzzle 4 counts the bytes. bm, bn, bk divide M, N, K.
    # plan_time(1024, 768, 512, 512, 384, 128, SMALL) is 1.2086e-3: MXU 805 us, HBM 1049, fill 124.5, 16 steps 160.
    pass  # YOUR CODE HERE


def pick_blocks(M, N, K, chip):
    # Return (bm, bn, bk). Start from a copy of your frugal_blocks: the room is now the chip's, and what counts is time.
    pass  # YOUR CODE HERE


def planned_matmul(
    x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, chip: Chip = SMALL, vmem_limit_bytes: int | None = None
) -> BFloat16[Array, "M N"]:
    (M, K), (_, N) = x.shape, y.shape
    bm, bn, bk = pick_blocks(M, N, K, chip)
    return tiled(straight_kernel, x, y, bm=bm, bn=bn, bk=bk, vmem_limit_bytes=vmem_limit_bytes)


# %%
# Budget for x (1024, 512), y (512, 768): hbm_bytes=4_194_304, vmem_bytes=2_621_440, grid_steps=6. That is the best plan
# for SMALL. The check compares plan_time with the model, with figures counted in a run of your kernel. It compares
# pick_blocks with every other plan, for random sizes and chips.
check("matmul/12", planned_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The worked example in the comment of `plan_time` is bound by HBM: without the fill, its copies still take longer than
# the MXU (1049 - 124.5 > 805). What is left of the copies when the fill is over can hide behind the MXU, or the MXU
# behind it. Test your model on 4096 x 4096 x 4096 for a v6e, in blocks of (128, 128, 128), (256, 512, 4096) and (4096,
# 4096, 128). One has far too many steps, one has too many bytes, one has a long fill. Which is which, and how does each
# term of your sum show it?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def plan_time(M, N, K, bm, bn, bk, chip):
#     steps = ____
#     fill = ____ / chip.hbm_bytes_per_s
#     mxu = ____
#     hbm = plan_bytes(____) / ____
#     return max(____, ____) + ____ + ____
#
#
# def pick_blocks(M, N, K, chip):
#     plans = ____
#     fitting = ____
#     return min(fitting, key=____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def plan_time(M, N, K, bm, bn, bk, chip):
#     steps = (M // bm) * (N // bn) * (K // bk)
#     fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
#     mxu = 2 * M * N * K / chip.flops_per_s
#     hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
#     return max(mxu, hbm - fill) + fill + steps * chip.step_s
#
#
# def pick_blocks(M, N, K, chip):
#     plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
#     fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
#     return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You have written a performance model. `tpu_report` uses the same formula with one more term, the
# bundles. The report does not guess them. The compiler schedules your kernel for the blocks that you picked, and the
# report counts what comes out. If the schedule cannot keep the MXU fed, its time is longer than yours. A kernel gets
# less than half of VMEM unless it asks for more. So the last cell passes `vmem_limit_bytes`.

# %%
SQUARE = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def beside_the_compiler(name, chip):
    """Your pick for 4096 x 4096 x 4096, your time, the compiler's, and the roofline's."""
    blocks = pick_blocks(4096, 4096, 4096, chip)
    roofline = max(2 * 4096**3 / chip.flops_per_s, 3 * 2 * 4096**2 / chip.hbm_bytes_per_s)

    def line(what, seconds):
        print(f"  {what:62}{seconds * 1e6:8.1f} us, {seconds / roofline:.3f} times the roofline")

    print(f"{name}: 4096 x 4096 x 4096 in blocks of {blocks}")
    line("roofline: the MXU at its peak, and nothing else", roofline)
    report = tpu_report(planned_matmul, SQUARE, SQUARE, tpu=name, simulate=False, chip=chip, vmem_limit_bytes=96 << 20)
    if not report:
        print(f"  the compiler: {report.unavailable or report.refusal.sentence}")
    for kernel in report.kernels:
        busy = max(kernel.times["MXU"], kernel.times["bundles"])
        line(f"the compiler's schedule: bundles of its {kernel.steps} steps, at the clock", busy)
        line("the same with fill, and 0.25 us a step (tpu_report's estimate)", kernel.time_s)
    line("your plan_time: the MXU, fill, and step_s a step", plan_time(4096, 4096, 4096, *blocks, chip))


to_write = unwritten(planned_matmul) + unwritten(pick_blocks) + unwritten(frugal_blocks)
if to_write:
    print(f"Nothing to plan with yet. Still to be written: {', '.join(to_write)}.")
else:
    beside_the_compiler("v5e", V5E)
    beside_the_compiler("v6e", V6E)

# %% [markdown]
# ## What you built
#
# You built a matmul from the tile up: with transposes that cost nothing, an epilogue that runs once per tile, its own
# gradients, and triangular, int8 and sparse versions. You also built the model that says how far each is from the
# hardware's limit.
#
# The last cell printed two figures for each chip. The compiler's schedule of your kernel, step for step, takes 1.00
# times the roofline on a v5e and 1.02 times on a v6e. The stricter estimate adds the fill, and the cost of starting
# each step: 21 us on the v5e (1.03 times the roofline), 14 us on the v6e (1.12 times). The faster the chip, the more
# they count. By your model, no other tiles take less. What does it say of 8192 x 8192 x 8192?

# %%
show(straight_matmul, normal((192, 512), "bfloat16"), normal((512, 256), "bfloat16"))

# %% [markdown]
# **Read next.** `jax.experimental.pallas.ops.tpu.matmul` is the matmul that ships with JAX: your Puzzle 2, with one of
# its two branches taken away. Then read `gmm` in `jax.experimental.pallas.ops.tpu.megablox`. There scalar prefetch
# picks the weights of the expert for every tile of tokens. It uses your Puzzle 11, and also handles groups of any size.
#
# **Next notebook.** `flash_attention.py` has two matmuls with a softmax between them, and nothing in between leaves the
# chip.

# %%
progress()
