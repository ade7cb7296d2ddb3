# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 1}
# ---

# %% [markdown]
# # Pallas basics: from one line to a fused matmul
#
# Thirteen puzzles take you from adding ten to a tiled matrix multiplication. You will keep the running sum on the chip,
# multiply a whole batch, fuse a bias and a GELU, and move fewer bytes. Kernels inside real models have the same
# skeleton.
#
# You need to know JAX and NumPy. You do not need a TPU: your kernels run here in a simulator. The same code runs on a
# TPU.
#
# Each puzzle is a function whose body says `YOUR CODE HERE`. Fill it in and run the `check` below it. The check runs
# your kernel one step at a time and says what is wrong. Where it can, it names the step and your line. Stuck? Three
# hints are folded away under every check: a nudge, the pattern, the solution. `show` draws what your kernel did. Nobody
# is timing you.

# %%
import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl  # Pallas
from jax.experimental.pallas import tpu as pltpu  # what only TPUs have
from jaxtyping import Array, BFloat16, Float, Float32  # Float[Array, "M N"]: floats in M rows and N columns

from pallas_puzzles import check, hint, normal, progress, setup, show, tpu_report, unwritten

setup()  # a real TPU if there is one, else JAX's simulator of one

# %% [markdown]
# ## Puzzle 1: Add ten
#
# **Goal.** Write a kernel that adds 10 to every element of `x`.
#
# ### Theory
#
# One attention head over 8192 tokens has 8192 x 8192 scores: 256 MiB of float32. You would like to use them without
# ever storing them. `jit` gives you no way to ask for that. In Pallas, you decide what is stored where.
#
# Two memories matter. **HBM** is large and slow (16 GB on a TPU v5e). Your arrays live there. **VMEM** is small and
# fast (a kernel on a v5e gets 16 MiB unless it asks for more).
#
# A **kernel** is a function that computes in VMEM. You write only the kernel. `add_ten` is given. It calls your kernel
# on arrays in HBM. The call does this:
#
# ```text
#     HBM      x                       result
#              | copy in                  ^ copy out
#              v                          |
#     VMEM   x_ref  ---- kernel ---->  o_ref
# ```
#
# `x_ref` and `o_ref` are **Refs**: buffers in VMEM, not arrays. `ref[...]` reads a buffer and gives you an array.
# `ref[...] = value` overwrites the buffer; the value must have exactly its shape, and JAX does not turn a float32 array
# into a bfloat16 one for you. A kernel returns nothing. It leaves its result in `o_ref`, which starts out as garbage.


# %%
def add_ten_spec(x: Float[Array, "N"]) -> Float[Array, "N"]:
    return x + 10


def add_ten_kernel(x_ref, o_ref):
    # x_ref: all of x, (N,)      o_ref: the result, (N,), garbage so far
    pass  # YOUR CODE HERE


def add_ten(x: Float[Array, "N"]) -> Float[Array, "N"]:
    # given: pallas_call turns your kernel into a function. out_shape is the result's shape and dtype, without data
    return pl.pallas_call(add_ten_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


# %%
# Budget for x (640,): calls=1. The inputs are random. A budget limits what an answer may use: here, one pallas_call.
check("basics/1", add_ten)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You have to read numbers from one buffer and write numbers into the other. Be careful with the second.
# `o_ref = something` is ordinary Python: it makes the *name* `o_ref` point to something else, and the buffer does not
# change. What does the theory offer instead?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def add_ten_kernel(x_ref, o_ref):
#     x = ____          # read the whole buffer
#     ____ = x + 10     # overwrite the whole buffer
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def add_ten_kernel(x_ref, o_ref):
#     o_ref[...] = x_ref[...] + 10
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A kernel fills buffers; `pallas_call` does the copying. Between reading and writing you use `jnp` and
# `jax.nn`. (Some of it does not exist on a TPU. The check tells you.) But all of `x` had to fit into VMEM. What if it
# does not?

# %% [markdown]
# ## Puzzle 2: Add two vectors, block by block
#
# **Goal.** Add two vectors, `b` elements at a time. Write the kernel, and say how many steps it takes.
#
# ### Theory
#
# A vector of 4 Mi (2^22) float32 is 16 MiB. One such vector fills all 16 MiB of VMEM. An addition needs three: `x`, `y`
# and the result. So you cut them into blocks.
#
# Two more arguments of `pallas_call` do that. On a TPU the **grid** is a loop around the kernel: `grid=(5,)` means five
# **steps**, one after the other, like `for i in range(5)`. (Several axes are nested loops; the last axis is the
# innermost.) A **`pl.BlockSpec`** says which block of one array is in VMEM at step `i`.
# `pl.BlockSpec((b,), lambda i: (i,))` means: blocks of `b` elements, and block number `i` at step `i`.
#
# ```text
#     x       [  0  |  1  |  2  |  3  |  4  ]      HBM
#     y       [  0  |  1  |  2  |  3  |  4  ]
#                      |
#                      | step i = 1: copy in
#                      v
#             x_ref + y_ref -> o_ref               VMEM, b elements each
#                                |
#                                | copy out
#                      +---------+
#                      v
#     result  [  0  |  1  |  2  |  3  |  4  ]      HBM
# ```
#
# For now: the input blocks are copied in before every step. The output block is copied out after it. (Puzzle 5 says
# when a copy is skipped.) The kernel receives its Refs in this order: inputs, then outputs.


# %%
def vector_add_spec(x: Float32[Array, "N"], y: Float32[Array, "N"]) -> Float32[Array, "N"]:
    return x + y


def vector_add_kernel(x_ref, y_ref, o_ref):
    # x_ref, y_ref, o_ref: (b,), block i of x, of y and of the result
    pass  # YOUR CODE HERE


def vector_add_grid(n, b):
    # n: how long the vectors are, a multiple of b      b: how long a block is
    # Return the grid: a tuple with the number of steps along each axis (here there is one).
    pass  # YOUR CODE HERE


def vector_add(x: Float32[Array, "N"], y: Float32[Array, "N"], *, b: int = 256) -> Float32[Array, "N"]:
    # b: 128, 256, 512, any multiple of 1024, or the whole array (Puzzle 4 is about sizes)
    block = pl.BlockSpec((b,), lambda i: (i,))
    return pl.pallas_call(
        vector_add_kernel,
        grid=vector_add_grid(x.shape[0], b),
        in_specs=[block, block],  # one BlockSpec per input
        out_specs=block,  # and one for the output
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, y)


# %%
# Budget for x (1280,), y (1280,): vmem_bytes=6_144. vmem_bytes: three blocks of b float32 numbers, times two: every
# block has two buffers (Puzzle 6 says why).
check("basics/2", vector_add)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The kernel never sees the vectors, only `b` elements of each. Write it as if the world were that small. For the grid,
# count blocks: every step fills one block of the result, and nothing but a step fills a block. With too few steps, some
# blocks keep their garbage. With too many, a step works on a block that does not exist, and the TPU compiler does not
# notice.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def vector_add_kernel(x_ref, y_ref, o_ref):
#     o_ref[...] = ____
#
#
# def vector_add_grid(n, b):
#     return (____,)    # a tuple, and integers in it: Python's / makes floats
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def vector_add_kernel(x_ref, y_ref, o_ref):
#     o_ref[...] = x_ref[...] + y_ref[...]
#
#
# def vector_add_grid(n, b):
#     return (n // b,)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With blocks of 256 elements you can add vectors of any length that 256 divides. (Puzzle 8 takes care of
# other lengths.) VMEM use no longer depends on the length. See for yourself: step through the picture, and watch which
# block of each array is in VMEM.

# %%
show(vector_add, normal((1280,)), normal((1280,)))

# %% [markdown]
# ## Puzzle 3: Last page first
#
# **Goal.** `x` is a sequence of pages of 256 elements. Return the pages in reverse order, each page itself unchanged.
# The kernel is given; write the index map.
#
# ### Theory
#
# A chat server stores the data that attention reads in pages. A page goes wherever there is free memory. If you sort 1
# GiB of pages first, you read 1 GiB and write 1 GiB. A v5e reads and writes HBM at 820 GB/s, so that takes 2.6 ms. But
# a kernel may read its pages in any order, at no extra cost.
#
# The function inside a `BlockSpec` decides the order. It is called an **index map**. It takes the grid index of the
# step, one argument per grid axis. It returns the block for this step: a tuple with one block *number* per dimension of
# the array. Pallas multiplies by the block size: with blocks of 256, block number 2 starts at element 512.
#
# ```text
#     step i            0    1    2    3    4
#                       ?    ?    ?    ?    ?    reverse_map
#     x              [ p0 | p1 | p2 | p3 | p4 ]
#     result         [ p4 | p3 | p2 | p1 | p0 ]
# ```
#
# JAX traces an index map, just as `jit` traces a function. Arithmetic works; a Python `if`, or a list indexed with `i`,
# does not. And the block has to exist: negative numbers do not count from the end, and the TPU compiler does not notice
# them.


# %%
def reverse_pages_spec(x: Float32[Array, "N"]) -> Float32[Array, "N"]:
    return x.reshape(-1, 256)[::-1].reshape(-1)


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def reverse_map(i, num_pages):
    # i: the step; it writes page i of the result      num_pages: how many pages x has
    # Return the number of the page of x to read, as a tuple.
    pass  # YOUR CODE HERE


def reverse_pages(x: Float32[Array, "N"]) -> Float32[Array, "N"]:
    num_pages = x.shape[0] // 256
    return pl.pallas_call(
        copy_kernel,
        grid=(num_pages,),
        # an index map gets the grid index and nothing else: partial fills in num_pages beforehand
        in_specs=[pl.BlockSpec((256,), functools.partial(reverse_map, num_pages=num_pages))],
        out_specs=pl.BlockSpec((256,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


# %%
# Budget for x (1280,): hbm_bytes=10_240, vmem_bytes=4_096. hbm_bytes: all the bytes that are copied, in and out.
check("basics/3", reverse_pages)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Make a table for five pages: which page belongs in place 0, in place 1, in place 4? Two numbers in every line of that
# table add up to the same thing. Pages are numbered from 0, so there is no page number `num_pages`. (`i` is traced, and
# `num_pages` is a Python integer. Their difference is traced, too. That is fine.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def reverse_map(i, num_pages):
#     last = ____              # the number of the last page
#     return (last ____ i,)    # a page number, not a position in x
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def reverse_map(i, num_pages):
#     return (num_pages - 1 - i,)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** An index map moves no data. The copies happen anyway. The map tells them where to read. Your reversal
# costs the 10,240 bytes of a plain copy, 5,120 in and 5,120 out. Any other order of the pages costs the same, if you
# can compute it from `i`.

# %% [markdown]
# ## Puzzle 4: Transpose, tile by tile
#
# **Goal.** Transpose a matrix. Write the kernel for one tile, and the index map of the result.
#
# ### Theory
#
# Transposing 8192 x 8192 float32 in one go would take 256 MiB of VMEM for the matrix and as much for the result. A tile
# of 128 x 256 takes 128 KiB. The grid now has two axes: `i` goes down, `j` goes across. `j` is the inner loop (Puzzle
# 2), so the steps go row by row. Index maps now take two arguments and return two block numbers.
#
# ```text
#     x (M, N)                       result (N, M)
#
#           j=0   j=1                  +---+---+---+
#         +-----+-----+                |   |   |   |
#     i=0 |  0  |  1  |                |   |   |   |
#         +-----+-----+                +---+---+---+
#     i=1 |  2  |  3  |                |   |   |   |
#         +-----+-----+                |   |   |   |
#     i=2 |  4  |  5  |                +---+---+---+
#         +-----+-----+
#      the number of the step          which step writes where?
# ```
#
# Tiles have a smallest size. A TPU register holds 8 rows and 128 columns of 32-bit numbers. So the second-to-last size
# of a block must be a **multiple of 8**, and its last size a **multiple of 128**. Either size may also equal the
# array's. Anything else is refused. This holds for every dtype.


# %%
def transpose_spec(x: Float32[Array, "M N"]) -> Float32[Array, "N M"]:
    return x.T


def transpose_kernel(x_ref, o_ref):
    # x_ref: (bm, bn), tile (i, j) of x      o_ref: (bn, bm), a tile of the result
    pass  # YOUR CODE HERE


def transpose_out_map(i, j):
    # Step (i, j) fills one tile of the result. Return the row and the column of that tile.
    pass  # YOUR CODE HERE


def transpose(x: Float32[Array, "M N"], *, bm: int = 128, bn: int = 256) -> Float32[Array, "N M"]:
    M, N = x.shape
    return pl.pallas_call(
        transpose_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((bn, bm), transpose_out_map),
        out_shape=jax.ShapeDtypeStruct((N, M), x.dtype),
    )(x)


# %%
# Budget for x (384, 512): vmem_bytes=524_288.
check("basics/4", transpose)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two things have to turn: the numbers inside a tile, and the place of the tile. Each of your two functions does one of
# them, and one without the other fails. Without the first, a tile does not fit into `o_ref`. Without the second, some
# tiles land outside the result. Follow step 1 through the drawing: its tile comes from the top right corner of `x`.
# Into which corner of the result does that corner go?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def transpose_kernel(x_ref, o_ref):
#     tile = x_ref[...]     # (bm, bn)
#     o_ref[...] = ____     # (bn, bm)
#
#
# def transpose_out_map(i, j):
#     # tile row ____ of the result came from tile column ____ of x
#     return (____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def transpose_kernel(x_ref, o_ref):
#     o_ref[...] = x_ref[...].T
#
#
# def transpose_out_map(i, j):
#     return (j, i)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You have tiles, index maps and nested loops, so you can walk over any matrix in any order. So far every
# step copied new blocks. You start to save when a step can keep an old one.
#
# Why not tiles of 8 x 128? First, the result's tiles would be 128 x 8, which is refused. Second, every step has a fixed
# cost: about 0.25 us on a v5e (from the times in JAX's matmul guide). In 8192 x 8192 there are 65,536 such
# tiles: their steps cost 16 ms. The 2048 steps of 128 x 256 cost 0.5 ms.

# %% [markdown]
# ## Puzzle 5: Scale the rows, shift the columns
#
# **Goal.** Compute `x * scale + shift`, with one scale per row and one shift per column. Write the kernel and the
# index maps of `scale` and `shift`.
#
# ### Theory
#
# Let `x` be 8192 x 4096 in float32. One shift per column is 4096 numbers, 16 KiB. If you broadcast them to the shape of
# `x` first, the kernel has to read 128 MiB of shifts, as much as `x` itself.
#
# Every operand has its own BlockSpec, and an index map may ignore a grid axis. Then the block number stays the same
# from one step to the next. Most of this notebook rests on this rule:
#
# **An input block is copied in at the first step, and again only when a number in its tuple changes. An output block is
# copied out when a number in its tuple changes, and after the last step.**
#
# In between, the block stays in VMEM: an input block is not fetched again, and an output block keeps what the kernel
# wrote there. The next output block starts out as garbage again.
#
# ```text
#     input at step (i, j)   0,0    0,1    0,2    1,0    1,1    1,2   ...
#     lambda i, j: (i, j)    copy   copy   copy   copy   copy   copy
#     lambda i, j: (0, 0)    copy    -      -      -      -      -
# ```


# %%
def scale_shift_spec(
    x: Float32[Array, "M N"], scale: Float32[Array, "M 1"], shift: Float32[Array, "1 N"]
) -> Float32[Array, "M N"]:
    return x * scale + shift


def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    # x_ref, o_ref: (bm, bn)      scale_ref: (bm, 1)      shift_ref: (1, bn)
    pass  # YOUR CODE HERE


def scale_map(i, j):
    # scale is (M, 1), cut into blocks of (bm, 1). Return the number of the block that tile (i, j) needs.
    pass  # YOUR CODE HERE


def shift_map(i, j):
    # shift is (1, N), cut into blocks of (1, bn). Return the number of the block that tile (i, j) needs.
    pass  # YOUR CODE HERE


def scale_shift(
    x: Float32[Array, "M N"], scale: Float32[Array, "M 1"], shift: Float32[Array, "1 N"], *, bm: int = 8, bn: int = 256
) -> Float32[Array, "M N"]:
    M, N = x.shape
    tile = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
    return pl.pallas_call(
        scale_shift_kernel,
        grid=(M // bm, N // bn),
        # Sizes of 1 are fine here: they span the whole dimension. (On a TPU an (8, 1) block still fills a whole 8 x 128
        # tile. The VMEM figures in this notebook count elements only.)
        in_specs=[tile, pl.BlockSpec((bm, 1), scale_map), pl.BlockSpec((1, bn), shift_map)],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x, scale, shift)


# %%
# Budget for x (32, 768), scale (32, 1), shift (1, 768): hbm_bytes=209_024, vmem_bytes=34_880.
check("basics/5", scale_shift)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Look at tile (2, 1) of `x`. It covers the rows of block row 2 and the columns of block column 1. Which of these does a
# scale belong to, and which does a shift? Each map returns two numbers, also for the other dimension. How many blocks
# are there along it? If `scale_map` returned `j` there, step (0, 1) would ask for a block that does not exist, and the
# TPU compiler would not notice. The kernel is ordinary `jnp` broadcasting.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
#     o_ref[...] = ____      # (bm, bn) with (bm, 1) and (1, bn)
#
#
# def scale_map(i, j):
#     return (____, ____)
#
#
# def shift_map(i, j):
#     return (____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
#     o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]
#
#
# def scale_map(i, j):
#     return (i, 0)
#
#
# def shift_map(i, j):
#     return (0, j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The scales take 4 copies in all, one for each block: `j` is the inner loop, and while it runs, the
# scales stay. The shifts take 12 copies in all, one for each step, because each step needs the next one. Look at the
# copies below. Then guess what happens if the two loops swap places. (Answer: 12 copies of scales, 3 of shifts.) In the
# example of Puzzle 13, such a swap cuts the traffic of the inputs to a seventh.

# %%
show(scale_shift, normal((32, 768)), normal((32, 1)), normal((1, 768)))

# %% [markdown]
# ## Puzzle 6: Wire it yourself
#
# **Goal.** Compute `x * sigmoid(g)` in bfloat16. Write everything: the kernel, and the whole `pallas_call`, with the
# largest blocks of whole rows that fit into `vmem_bytes`.
#
# ### Theory
#
# Every step has a fixed cost (Puzzle 4). 8192 rows in blocks of 8 are 1024 steps: 0.26 ms. In blocks of 256 they are 32
# steps: 8 us. So make blocks large. VMEM sets the limit.
#
# VMEM holds more than the blocks of one step. While the kernel works on step `i`, the inputs of step `i + 1` are
# coming in, and the result of step `i - 1` is going out:
#
# ```text
#     time --->
#     copy in     | 0 | 1 | 2 | 3 |
#     compute         | 0 | 1 | 2 | 3 |
#     copy out            | 0 | 1 | 2 | 3 |
# ```
#
# You write no code for this: Pallas runs the copies beside your kernel. But a buffer cannot be filled and read at the
# same time. So every block has **two buffers**, one in use and one in transit. (Only a block that is the whole array,
# whose index map returns constants, has one.)
#
# ```text
#     VMEM  =  2 x (bytes of a block of x  +  of a block of g  +  of a block of the result)
# ```
#
# A float32 has 4 bytes, a bfloat16 has 2. A Ref knows its dtype: `.astype(o_ref.dtype)` makes a value fit.


# %%
def gated_spec(x: Float32[Array, "M N"], g: Float32[Array, "M N"]) -> BFloat16[Array, "M N"]:
    return (x * jax.nn.sigmoid(g)).astype(jnp.bfloat16)


def gated_kernel(x_ref, g_ref, o_ref):
    # x_ref, g_ref: (bm, N), float32      o_ref: (bm, N), bfloat16
    pass  # YOUR CODE HERE


def gated(x: Float32[Array, "M N"], g: Float32[Array, "M N"], *, vmem_bytes: int = 262_144) -> BFloat16[Array, "M N"]:
    # vmem_bytes: the VMEM you may fill. (It is much less than 16 MiB, so that small arrays are enough here.)
    # x and g go in as they are, in float32. The result comes out in bfloat16.
    # 1. Blocks are (bm, N). Find bm: the largest multiple of 8 that divides M and keeps all buffers within vmem_bytes.
    # 2. Return the result of a pallas_call with that block. You know all of its arguments by now:
    #    kernel, grid, in_specs, out_specs, out_shape.
    pass  # YOUR CODE HERE


# %%
# Budget for x (80, 384), g (80, 384): hbm_bytes=307_200, vmem_bytes=262_144, grid_steps=5, calls=1. grid_steps: the
# number of steps with the largest block that fits. Blocks of 40 rows would take 300 KiB of VMEM, because every block
# has two buffers. If you expected 150 KiB, you counted one.
check("basics/6", gated)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start with one row. How many bytes does it have in `x`, in `g` and in the result, and how many buffers does each of
# these have? All sizes are plain Python integers when the function runs, so you can loop over candidates. For the call,
# take Puzzle 4 as a model. One grid axis is enough, and all three operands can share one BlockSpec.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def gated_kernel(x_ref, g_ref, o_ref):
#     o_ref[...] = (____).astype(____)
#
#
# def gated(x, g, *, vmem_bytes=262_144):
#     M, N = x.shape
#     bytes_per_row = ____                      # all three operands, two buffers each
#     fitting = [bm for bm in range(8, M + 1, 8) if ____ and ____]
#     bm = max(fitting)
#     block = pl.BlockSpec(____, lambda i: ____)
#     return pl.pallas_call(
#         gated_kernel, grid=____, in_specs=____, out_specs=____, out_shape=jax.ShapeDtypeStruct(____, ____)
#     )(x, g)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gated_kernel(x_ref, g_ref, o_ref):
#     o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)
#
#
# def gated(x, g, *, vmem_bytes=262_144):
#     M, N = x.shape
#     bytes_per_row = 2 * N * (4 + 4 + 2)
#     fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
#     bm = max(fitting)
#     block = pl.BlockSpec((bm, N), lambda i: (i, 0))
#     return pl.pallas_call(
#         gated_kernel,
#         grid=(M // bm,),
#         in_specs=[block, block],
#         out_specs=block,
#         out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
#     )(x, g)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** That was a complete kernel, written from an empty function. The copies run behind your arithmetic, and
# you wrote nothing for that. But the kernel cannot tell one block from another. It does not know where it is. Yet.

# %% [markdown]
# ## Puzzle 7: Which step am I?
#
# **Goal.** Element (q, k) of `x` is the score of query `q` and key `k`. Add `0.125 * (k - q)` to it: the further back a
# key lies, the lower its score.
#
# ### Theory
#
# Some language models (look for ALiBi) use this to tell near words from far ones. Stored as an array, the bias for 8192
# queries and 8192 keys is 256 MiB to read. But the kernel can compute it. It only has to know where in the grid it is.
#
# `pl.program_id(axis)` is the index of the current step along one axis of the grid. At step (2, 1), `pl.program_id(0)`
# is 2 and `pl.program_id(1)` is 1. You need it because a kernel sees its block and nothing around it. In every block,
# rows are numbered from 0:
#
# ```text
#     x, tiles of 32 x 128         the x_ref of step (2, 1)
#
#       +-----+-----+-----+            column 0 .. 127
#       | 0,0 | 0,1 | 0,2 |           +---------------+
#       +-----+-----+-----+     row 0 |               |
#       | 1,0 | 1,1 | 1,2 |       ..  |               |
#       +-----+-----+-----+        31 |               |
#       | 2,0 |#2,1#| 2,2 |           +---------------+
#       +-----+-----+-----+      where is that in x?
# ```
#
# A Ref has a `.shape`, like an array. A program id is traced, so you cannot use it where Python needs a number.
# `jnp.arange(8)` works in a kernel, and you can add a program id to it. `jnp.arange(start, stop)` with a program id
# does not work.


# %%
def distance_bias_spec(x: Float32[Array, "Q K"]) -> Float32[Array, "Q K"]:
    Q, K = x.shape
    return x + 0.125 * (jnp.arange(K)[None, :] - jnp.arange(Q)[:, None])


def distance_bias_kernel(x_ref, o_ref):
    # x_ref, o_ref: (bq, bk), tile (i, j)
    pass  # YOUR CODE HERE


def distance_bias(x: Float32[Array, "Q K"], *, bq: int = 32, bk: int = 128) -> Float32[Array, "Q K"]:
    Q, K = x.shape
    tile = pl.BlockSpec((bq, bk), lambda i, j: (i, j))
    return pl.pallas_call(
        distance_bias_kernel,
        grid=(Q // bq, K // bk),
        in_specs=[tile],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


# %%
# Budget for x (96, 512): hbm_bytes=393_216, vmem_bytes=65_536.
check("basics/7", distance_bias)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Work out one element by hand: at step (2, 1), with tiles of 32 x 128, which query and which key does the corner
# `x_ref[0, 0]` belong to? Count the rows and columns of the tiles before it. Then do it for all rows and all columns at
# once; `[:, None]` and `[None, :]` turn two vectors into a table. And compare `x_ref.shape` with the tile above: here
# they agree, but other cases of the check use other tiles.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def distance_bias_kernel(x_ref, o_ref):
#     bq, bk = x_ref.shape
#     q = ____ + jnp.arange(bq)     # (bq,), positions in x, not in the tile
#     k = ____ + jnp.arange(bk)     # (bk,)
#     o_ref[...] = x_ref[...] + 0.125 * ____     # (bq, bk)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def distance_bias_kernel(x_ref, o_ref):
#     bq, bk = x_ref.shape
#     q = pl.program_id(0) * bq + jnp.arange(bq)
#     k = pl.program_id(1) * bk + jnp.arange(bk)
#     o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A position in the array is the step times the block size, plus the position in the block. You will write
# this line again and again. Whatever you can compute from positions, you need not store: causal masks, for example. To
# see inside a kernel, write `pl.debug_print("row {}", pl.program_id(0))` into it and call
# `distance_bias(jnp.zeros((96, 512)))` yourself: every step prints a line. Next: what if the blocks do not divide the
# array?

# %% [markdown]
# ## Puzzle 8: The ragged edge
#
# **Goal.** The rows of `x` come in chunks of 16; the last chunk may be shorter. From every chunk, subtract its mean
# over the rows.
#
# ### Theory
#
# Prompts have 1000 tokens, or 1003. They rarely divide into blocks: 1000 rows are 62 full chunks of 16, and 8 rows
# more. So the grid is rounded up to `pl.cdiv(1000, 16)` = 63 steps, and the last block hangs over the edge of the
# array:
#
# ```text
#     100 rows, chunks of 16            320 columns, blocks of 128
#
#      0 +------------------+               0      128     256  320
#     16 +------------------+               +-------+-------+---+...+
#        ...                                |       |       |   |   :
#     96 +------------------+ <- last chunk |       |       |   | ? :
#    100 |   4 real rows    |               +-------+-------+---+...+
#        +..................+
#        : 12 rows of what? :
#    112 +..................+
# ```
#
# Every block has its full shape, at the edge too. On the way out, the part beyond the edge is **dropped**: you cannot
# damage anything there. On the way in, the part beyond the edge is **garbage**: any bits at all. They may be NaN, or
# look like a normal number. (NaN is the kind one: you notice it.)
#
# Often that is no problem: a garbage column of `x` becomes a garbage column of the result, beyond the edge. It is
# dropped. It is a problem when garbage and data meet in the same number, as in a mean over rows.


# %%
def centre_chunks_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    chunks = [x[start : start + 16] for start in range(0, x.shape[0], 16)]  # the last one may be shorter
    return jnp.concatenate([chunk - chunk.mean(axis=0) for chunk in chunks])


def centre_kernel(x_ref, o_ref, *, num_rows):
    # x_ref, o_ref: (16, bn), chunk i, column block j      num_rows: how many rows x has, M
    pass  # YOUR CODE HERE


def centre_chunks(x: Float32[Array, "M N"], *, bn: int = 128) -> Float32[Array, "M N"]:
    M, N = x.shape
    block = pl.BlockSpec((16, bn), lambda i, j: (i, j))
    return pl.pallas_call(
        functools.partial(centre_kernel, num_rows=M),
        grid=(pl.cdiv(M, 16), pl.cdiv(N, bn)),  # divided and rounded up
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


# %%
# Budget for x (100, 320): vmem_bytes=32_768.
check("basics/8", centre_chunks)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A row is real if its position in `x` (Puzzle 7) is below `num_rows`. Replace the other rows by something that does no
# harm to a sum. Do not multiply them by 0: NaN times 0 is NaN, so garbage survives a multiplication with a mask. And a
# mean is a sum divided by a count. Which count?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def centre_kernel(x_ref, o_ref, *, num_rows):
#     rows = ____ + jnp.arange(16)             # positions in x
#     real = ____                              # (16, 1), True for real rows
#     x = x_ref[...]
#     total = jnp.where(real, ____, ____).sum(axis=0, keepdims=True)
#     count = ____                             # 16, but less in the last chunk
#     o_ref[...] = x - total / count
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def centre_kernel(x_ref, o_ref, *, num_rows):
#     start = pl.program_id(0) * 16
#     real = (start + jnp.arange(16))[:, None] < num_rows
#     x = x_ref[...]
#     total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
#     count = jnp.minimum(16, num_rows - start)
#     o_ref[...] = x - total / count
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Mask by position whatever enters a reduction; ignore the rest. Next comes the opposite problem: a
# reduction that is too long for one block.

# %% [markdown]
# ## Puzzle 9: Row sum
#
# **Goal.** Sum the rows of `x`, which arrive in several column blocks. Write the kernel and the output's index map.
#
# ### Theory
#
# A large language model scores a vocabulary of 262,144 tokens. Eight rows of such scores are 8 MiB, and two buffers of
# that fill the 16 MiB of VMEM. So a row comes in pieces, and its sum has to grow from step to step.
#
# It can grow in `o_ref`. Recall Puzzle 5: while the number of an output block stays the same, the block stays in VMEM
# with what you wrote. You may also read it.
#
# ```text
#     x           j=0   j=1   j=2   j=3
#           i=0  [ a  |  b  |  c  |  d ]
#
#     o_ref     ? --> a --> a+b --> a+b+c --> a+b+c+d --> HBM
# ```
#
# The `?` is the problem: on the first visit the block holds garbage. To run code only at some steps, write:
#
# ```python
# @pl.when(condition)
# def _():          # the name does not matter: it is called at once, if the condition holds
#     ...
# ```
#
# A Python `if` cannot do this: the kernel is traced once, before any step runs. And `pl.when` skips its body, not the
# copies: the blocks of a step are copied in anyway.


# %%
def row_sum_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M 1"]:
    return x.sum(axis=1, keepdims=True)


def row_sum_kernel(x_ref, o_ref):
    # x_ref: (bm, bn), block (i, j) of x      o_ref: (bm, 1), the sums of these rows so far
    # Store an array with the shape of the Ref (Puzzle 1): an array of zeros works, the number 0 does not.
    pass  # YOUR CODE HERE


def row_sum_out_map(i, j):
    # The result is (M, 1), in blocks of (bm, 1). Return the number of the block that step (i, j) adds to.
    pass  # YOUR CODE HERE


def row_sum(x: Float32[Array, "M N"], *, bm: int = 8, bn: int = 128) -> Float32[Array, "M 1"]:
    M, N = x.shape
    return pl.pallas_call(
        row_sum_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, bn), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((bm, 1), row_sum_out_map),
        out_shape=jax.ShapeDtypeStruct((M, 1), x.dtype),
    )(x)


# %%
# Budget for x (24, 512): hbm_bytes=49_248, vmem_bytes=8_256.
check("basics/9", row_sum)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# An output block is visited for the first time, then it grows, then it leaves. Only the first visit needs special care.
# It happens once per row of blocks, not once per kernel. Which of the two grid axes tells you that a visit is the
# first? A sum that keeps its dimension (`keepdims=True`) already has the shape of `o_ref`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def row_sum_kernel(x_ref, o_ref):
#     @pl.when(____ == 0)
#     def _():
#         o_ref[...] = ____
#
#     o_ref[...] += ____       # reads, adds, writes
#
#
# def row_sum_out_map(i, j):
#     return (____, ____)      # must not change while j runs
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def row_sum_kernel(x_ref, o_ref):
#     @pl.when(pl.program_id(1) == 0)
#     def _():
#         o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)
#
#     o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)
#
#
# def row_sum_out_map(i, j):
#     return (i, 0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Zero on the first visit, add on every visit: this is how you sum something long. It works because the
# steps come in order, one output block at a time. (You can declare a grid axis parallel. Its steps may then run in any
# order, so no sum may run along it.) Watch the output below: the kernel visits each block four times, and it is copied
# to HBM once.

# %%
show(row_sum, normal((24, 512)))

# %% [markdown]
# ## Puzzle 10: Tiled matmul
#
# **Goal.** Multiply two bfloat16 matrices, tile by tile, with the sum in float32.
#
# ### Theory
#
# Tiles multiply as numbers do: tile (i, j) of the product is the sum over `k` of tile (i, k) of `x` times tile (k, j)
# of `y`. The grid is `(i, j, k)`. `k` is last, so the steps of one sum follow one another.
#
# ```text
#              K                 N                   N
#        +---+---+---+---+     +---+---+           +---+---+
#      M |   |   |   |   |     |   | 0 |           |   |   |
#        +---+---+---+---+     +---+---+           +---+---+
#        | 0 | 1 | 2 | 3 |  @  |   | 1 |    =    M |   |sum|
#        +---+---+---+---+     +---+---+           +---+---+
#        |   |   |   |   |   K |   | 2 |           |   |   |
#        +---+---+---+---+     +---+---+           +---+---+
#                              |   | 3 |
#                              +---+---+
# ```
#
# The sum cannot grow in `o_ref`. It is bfloat16, which has 8 significant bits, so 256 + 1 is 256. Try
# `jnp.bfloat16(256) + 1`.
#
# `scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)]` gives the kernel one more Ref: **scratch**, a buffer in VMEM that
# belongs to no array. Nothing is copied in or out, so it has only one buffer. It starts as garbage. It keeps what you
# write from step to step, and from tile to tile. Refs arrive in this order: inputs, outputs, scratch.


# %%
def matmul_spec(x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"]) -> BFloat16[Array, "M N"]:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    # x_ref: (bm, bk), bfloat16      y_ref: (bk, bn), bfloat16      o_ref: (bm, bn), bfloat16
    # acc_ref: (bm, bn), float32, the scratch      num_k: how many steps k takes
    # jnp.dot(..., preferred_element_type=jnp.float32) multiplies bfloat16 tiles into float32.
    pass  # YOUR CODE HERE


def matmul(
    x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, bm: int = 32, bn: int = 256, bk: int = 128
) -> BFloat16[Array, "M N"]:
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        functools.partial(matmul_kernel, num_k=K // bk),
        grid=(M // bm, N // bn, K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, y)


# %%
# Budget for x (96, 2048), y (2048, 512): vmem_bytes=212_992, output_stores=1. output_stores: how often each result may
# be stored.
check("basics/10", matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# It is Puzzle 9 with one more act. The scratch has a first visit as well, once per output tile: zero it then. Add at
# every step. But unlike in Puzzle 9, the sum is not yet where the result has to be. When exactly is it complete? If you
# store at every step, the result is still right, but each store costs a write to VMEM, and the budget allows one.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
#     k = ____
#
#     @pl.when(____)
#     def _():
#         ____ = jnp.zeros(acc_ref.shape, acc_ref.dtype)
#
#     acc_ref[...] += ____       # a product of two tiles, in float32
#
#     @pl.when(____)
#     def _():
#         o_ref[...] = ____      # mind the dtype
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
#     k = pl.program_id(2)
#
#     @pl.when(k == 0)
#     def _():
#         acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
#
#     acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(k == num_k - 1)
#     def _():
#         o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Zero, accumulate, store: the next two puzzles are variations on it. (`pl.num_programs(2)` would have
# told the kernel `num_k`; you will meet it in other people's code.) Below, `k` has four steps. It is the inner loop, so
# the output leaves at every fourth step.

# %%
show(matmul, normal((96, 512), "bfloat16"), normal((512, 512), "bfloat16"))

# %% [markdown]
# ## Puzzle 11: Batched matmul
#
# **Goal.** Multiply `B` pairs of matrices in one call, with the kernel of Puzzle 10 as it is. Write the BlockSpecs.
#
# ### Theory
#
# Attention multiplies matrices per head and per sentence: 32 heads and 16 sentences are 512 products. Suppose you make
# one call for each. Then every product has to wait for its first two tiles, and the chip computes nothing meanwhile.
# Two tiles of 512 x 512 bfloat16 are 1 MiB. Copying them takes 1.3 us at 820 GB/s. In 512 calls that is 0.66 ms. With
# one more grid axis in front, there is only one call. The next product's tiles come in while this one finishes.
#
# But `x` is now (B, M, K), and a block of (1, bm, bk) makes a three-dimensional Ref. `matmul_kernel` wants two
# dimensions.
#
# A **`None` in a block shape** takes one slice along that dimension and drops it from the Ref, as `x[3]` does in NumPy.
# The index map still returns a number for it: which slice. So it has one number per dimension of the *array*.
#
# ```text
#     array           block shape      Ref
#     (6, 40, 256)    (1, 8, 128)      (1, 8, 128)
#     (6, 40, 256)    (None, 8, 128)   (8, 128)
# ```
#
# To keep it short, blocks here span all of `N`.


# %%
def batched_matmul_spec(x: BFloat16[Array, "B M K"], y: BFloat16[Array, "B K N"]) -> BFloat16[Array, "B M N"]:
    return jnp.einsum("bmk,bkn->bmn", x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def batched_specs(bm, bk, N):
    # The grid is (b, i, k): batch, block of rows, step of the sum. matmul_kernel wants
    # x_ref: (bm, bk)      y_ref: (bk, N)      o_ref: (bm, N)
    # Return in_specs, out_specs: a list with the BlockSpecs of x and y, and the BlockSpec of the result.
    pass  # YOUR CODE HERE


def batched_matmul(
    x: BFloat16[Array, "B M K"], y: BFloat16[Array, "B K N"], *, bm: int = 32, bk: int = 256
) -> BFloat16[Array, "B M N"]:
    (B, M, K), (_, _, N) = x.shape, y.shape
    in_specs, out_specs = batched_specs(bm, bk, N)
    return pl.pallas_call(
        functools.partial(matmul_kernel, num_k=K // bk),  # your own, from Puzzle 10; k is axis 2 again
        grid=(B, M // bm, K // bk),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.ShapeDtypeStruct((B, M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, N), jnp.float32)],
    )(x, y)


# %%
# Budget for x (4, 64, 768), y (4, 768, 384): vmem_bytes=524_288, calls=1.
check("basics/11", batched_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Every Ref has to look as it did in Puzzle 10, so decide first how much of the batch the kernel may see. Then write the
# maps, one operand at a time. As `k` moves on, which dimension of `x` moves, and which one of `y`? Does the result move
# at all? Where a block spans a whole dimension, there is only block number 0.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def batched_specs(bm, bk, N):
#     x_spec = pl.BlockSpec((____, bm, bk), lambda b, i, k: (____, ____, ____))
#     y_spec = pl.BlockSpec((____, bk, N), lambda b, i, k: (____, ____, ____))
#     out_spec = ____
#     return [x_spec, y_spec], out_spec
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def batched_specs(bm, bk, N):
#     x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
#     y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))
#     out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))
#     return [x_spec, y_spec], out_spec
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Your kernel knows two dimensions, the arrays have three, and the kernel did not notice. `jax.vmap` of a
# `pallas_call` does the same trick for you: it puts a grid axis in front. Now you know how it works.

# %% [markdown]
# ## Puzzle 12: Matmul, bias, GELU
#
# **Goal.** Compute `gelu(x @ w + bias)` in one kernel. Write the kernel and the bias's index map.
#
# ### Theory
#
# Much of a transformer is a matmul, a bias and an activation. `jit` does not fuse the last two into your `pallas_call`:
# the product goes to HBM, comes back, and goes out again. A product of 8192 x 8192 bfloat16 moves 128 MiB out and 128
# MiB in for nothing. At the 820 GB/s of a v5e that is a third of a millisecond.
#
# There is a better moment. At the last `k`, the finished tile is in `acc_ref`: in VMEM, in float32, not yet rounded to
# bfloat16. If you finish the work there, the only extra traffic is the bias. This work is called the **epilogue**.
#
# ```text
#     k = 0       acc  =  x(i,0) @ w(0,j)
#     k = 1       acc +=  x(i,1) @ w(1,j)
#      ...
#     k = last    acc +=  x(i,k) @ w(k,j)
#                 epilogue:  acc --> o_ref --> HBM, once
# ```
#
# The epilogue has to wait for the last step, though. GELU is not linear: gelu(a) + gelu(b) is not gelu(a + b).


# %%
def fused_linear_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"], bias: Float[Array, "1 N"]
) -> BFloat16[Array, "M N"]:
    return jax.nn.gelu(jnp.dot(x, w, preferred_element_type=jnp.float32) + bias).astype(jnp.bfloat16)


def accumulate(x_ref, w_ref, acc_ref):
    # given, the first half of your Puzzle 10: zero acc_ref at the first k, and add a product of two tiles at every k
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


# %%
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    # x_ref: (bm, bk), bfloat16      w_ref: (bk, bn), bfloat16      bias_ref: (1, bn), float32
    # o_ref: (bm, bn), bfloat16      acc_ref: (bm, bn), float32      num_k: how many steps k takes
    pass  # YOUR CODE HERE


def bias_map(i, j, k):
    # bias is (1, N), in blocks of (1, bn). Return the number of the block that step (i, j, k) needs.
    pass  # YOUR CODE HERE


def fused_linear(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "K N"],
    bias: Float[Array, "1 N"],
    *,
    bm: int = 32,
    bn: int = 128,
    bk: int = 256,
) -> BFloat16[Array, "M N"]:
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        functools.partial(fused_linear_kernel, num_k=K // bk),
        grid=(M // bm, N // bn, K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, bn), bias_map),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, w, bias)


# %%
# Budget for x (96, 768), w (768, 256), bias (1, 256): hbm_bytes=1_526_784, vmem_bytes=197_632, calls=1,
# output_stores=1.
check("basics/12", fused_linear)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The activation needs the finished sum. How often is a sum finished, and at which step? What has to happen first there,
# the bias or the activation? Stay in float32 to the last: the scratch is float32, and a sum near 100 loses its decimals
# in bfloat16. For the map, remember that a block is copied in whether the body uses it or not. Which of `i`, `j` and
# `k` should be able to cause a copy of the bias?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
#     ____                      # one call: zero and accumulate
#
#     @pl.when(____)
#     def _():
#         y = ____              # (bm, bn), float32: the finished sum, and the bias
#         o_ref[...] = jax.nn.gelu(____)____
#
#
# def bias_map(i, j, k):
#     return (____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
#     accumulate(x_ref, w_ref, acc_ref)
#
#     @pl.when(pl.program_id(2) == num_k - 1)
#     def _():
#         y = acc_ref[...] + bias_ref[...]
#         o_ref[...] = jax.nn.gelu(y).astype(o_ref.dtype)
#
#
# def bias_map(i, j, k):
#     return (0, j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Bias, activation, scaling: do them on the finished tile, and you save the result a second trip to HBM.
# This is what people mean by a fused kernel. One thing is left: the order of the steps. Two orders can do the same
# arithmetic, and one may read seven times as many bytes as the other.

# %% [markdown]
# ## Puzzle 13: Fewer bytes
#
# **Goal.** Multiply `x` and `y` in the order of loops that moves fewer bytes. Write the whole
# `pallas_call`, and let the shapes decide which of the two loops goes outside.
#
# ### Theory
#
# If `K` is short enough for one block, there is no `k` loop: `x` comes in blocks of (bm, K), `y` in blocks of (K, bn).
# Any order of the tiles gives the same product, but not the same traffic. The rule of Puzzle 5 counts it:
#
# ```text
#     bytes of an operand  =  bytes of a block * (1 + how often its number changes between two steps)
#
#     2 rows and 3 columns of tiles, the loop over rows outside:
#
#         block of x   0 0 0 1 1 1
#         block of y   0 1 2 0 1 2
# ```
#
# That makes two copies of `x` blocks and six of `y` blocks. `x` follows the outer loop, so all of it comes in once. `y`
# follows the inner loop, so all of it comes in at every turn of the outer loop. (If an operand is a single block, it
# comes in only once.)
#
# Take (8192, 1024) @ (1024, 4096) in bfloat16, with bm = 128 and bn = 1024. With the loop over rows outside, `x` costs
# 16 MiB and `y` costs 64 * 8 = 512 MiB: 528 MiB together. With columns outside, `y` costs 8 MiB and `x` 4 times 16: 72
# MiB. At 820 GB/s that is 0.68 ms against 0.09 ms. At its peak of 197 TFLOP/s, a v5e does the arithmetic in 0.35 ms.
# One order keeps it waiting, the other does not.


# %%
def lean_matmul_spec(x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"]) -> BFloat16[Array, "M N"]:
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def dot_kernel(x_ref, y_ref, o_ref):
    # x_ref: (bm, K)      y_ref: (K, bn)      o_ref: (bm, bn)
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def lean_matmul(
    x: BFloat16[Array, "M K"], y: BFloat16[Array, "K N"], *, bm: int = 64, bn: int = 512
) -> BFloat16[Array, "M N"]:
    # Call dot_kernel on every tile. The blocks are fixed: (bm, K), (K, bn), (bm, bn). You choose the order: work out
    # the traffic of both orders, and build the grid and the index maps of the cheaper one.
    pass  # YOUR CODE HERE


# %%
# Budget for x (256, 128), y (128, 1536): hbm_bytes=1_376_256, vmem_bytes=425_984, calls=1. The better of the two orders
# moves exactly these bytes. Compute both totals: comparing M with N is not enough.
check("basics/13", lean_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Count elements instead of bytes: each element has 2 bytes. One order reads `x` once and `y` once per block of rows.
# What does the other one read? (Both write the result once, so it does not decide.) Shapes are plain Python integers,
# so an ordinary `if` can choose. The first grid index is always the outer loop: an index map may name its arguments
# `(j, i)`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def lean_matmul(x, y, *, bm=64, bn=512):
#     (M, K), (_, N) = x.shape, y.shape
#     rows, cols = M // bm, N // bn            # tiles down, tiles across
#     rows_outside = x.size + ____             # elements read
#     cols_outside = ____
#     if rows_outside <= cols_outside:
#         grid = (rows, cols)
#         x_map, y_map, out_map = lambda i, j: ____, lambda i, j: ____, lambda i, j: (i, j)
#     else:
#         grid = ____
#         x_map, y_map, out_map = lambda j, i: ____, lambda j, i: ____, lambda j, i: ____
#     return pl.pallas_call(____)(x, y)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def lean_matmul(x, y, *, bm=64, bn=512):
#     (M, K), (_, N) = x.shape, y.shape
#     rows, cols = M // bm, N // bn
#     rows_outside = x.size + rows * y.size
#     cols_outside = y.size + cols * x.size
#     if rows_outside <= cols_outside:
#         grid = (rows, cols)
#         x_map, y_map, out_map = lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
#     else:
#         grid = (cols, rows)
#         x_map, y_map, out_map = lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
#     return pl.pallas_call(
#         dot_kernel,
#         grid=grid,
#         in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
#         out_specs=pl.BlockSpec((bm, bn), out_map),
#         out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
#     )(x, y)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You did not change one multiplication, and the traffic still changed. Count bytes before you write a
# kernel. The order of the loops decides how many you copy. Still hungry? Walk like a snake, every second row backwards,
# and save one more copy per turn.

# %%
show(lean_matmul, normal((256, 128), "bfloat16"), normal((128, 1536), "bfloat16"))

# %% [markdown]
# ## What you built
#
# You built a matrix multiplication that goes through memory tile by tile. It sums in float32 in VMEM, ends each tile
# with a bias and a GELU, and writes each result once. Here is all of it, at work:

# %%
show(fused_linear, normal((96, 768), "bfloat16"), normal((768, 256), "bfloat16", scale=0.05), normal((1, 256)))

# %% [markdown]
# What would a TPU make of it? `tpu_report` asks the TPU's own compiler, and needs no TPU. (If the compiler is missing,
# the report says what to install.) Take a real size: 4096 in every direction, with blocks of 512. On a v5e the
# multiplications take 698 us. The copies take 696 us, at the same time. The solution's instructions take a little
# longer, and its 512 steps cost 128 us more. So the estimate is 858 us, 81% of what the chip can do. What does it say
# of your kernel?

# %%
# simulate=False leaves out the cycle count of a simulator, which takes a while.
tpu_report(
    fused_linear,
    normal((4096, 4096), "bfloat16"),
    normal((4096, 4096), "bfloat16"),
    normal((1, 4096)),
    bm=512,
    bn=512,
    bk=512,
    simulate=False,
)

# %% [markdown]
# **In a program of your own** there is no `setup()`. On a TPU, call your function, and JAX compiles the kernel. On any
# other machine, ask JAX for its simulator. It is slow, but it computes what a TPU would:

# %%
on_tpu = jax.default_backend() == "tpu"
if unwritten(fused_linear):
    print(f"Nothing to run yet. Still to be written: {', '.join(unwritten(fused_linear))}.")
else:
    with contextlib.nullcontext() if on_tpu else pltpu.force_tpu_interpret_mode():
        result = jax.jit(fused_linear)(
            jnp.ones((64, 512), jnp.bfloat16), jnp.ones((512, 256), jnp.bfloat16), jnp.ones((1, 256))
        )
    print("compiled for this TPU:" if on_tpu else "run by JAX's simulator:", result.shape, result.dtype, result[0, 0])

# %% [markdown]
# **Read next.** `jax.experimental.pallas.ops.tpu.matmul`, the matmul that ships with JAX. It is your Puzzle 10, almost
# line by line. Look for one difference: it stores the result at every `k`. Why is that still right, and what does it
# cost? (The rule of Puzzle 5 has the answer.) Its `compiler_params` declare two axes parallel. `matmul.py`, a later
# notebook, tells that story.
#
# **Next notebook.** `softmax.py`: reductions inside a block, rows too wide for one, and a way to rescale a running sum.
# That trick makes flash attention possible.

# %%
progress()
