# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 7}
# ---

# %% [markdown]
# # GPU basics: from one CTA to a softmax at bandwidth
#
# Eleven puzzles take you from adding ten to a softmax that runs on an H200 at 98% of the speed of a copy. On the way
# you meet what every fast kernel on a Hopper GPU is made of: thousands of CTAs at once, values in registers, tiles in
# shared memory, a copy engine that works while you compute, and barriers that tell you when it is done.
#
# You need basics.py. You need no CUDA, and no GPU. A machine in this package runs your kernels. It finds the copy that
# you forgot to wait for, and the barrier that never opens. On Linux, NVIDIA's real compiler can look at them, too,
# without a GPU. On a machine with an H100 or H200, the same cells run compiled.
#
# There are puzzles, and there are worked examples. A worked example shows a few new calls in a kernel that is complete.
# Run it, look at the picture, and change it if you like. A puzzle is a function whose body says `YOUR CODE HERE`. Fill
# it in and run the `check` below it.

# %%
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu  # Pallas for Hopper and Blackwell GPUs
from jaxtyping import Array, Float, Float32

from pallas_puzzles import check, gpu_report, hint, normal, progress, setup, show, unwritten

setup("gpu")  # a Hopper or Blackwell GPU if there is one, else this package's machine

# %% [markdown]
# ## Worked example: one CTA, then four
#
# A **CTA** is a group of threads that run a kernel together. 128 threads are a **warpgroup**; the picture below shows
# one. `plgpu.kernel` starts your function in one CTA, if you do not ask for more. It copies nothing for you: your Refs
# are the whole arrays. They are in **GMEM** (global memory, 80 GB on an H100). You index a Ref as you index an array:
# `x_gmem[0, 5]` loads one number, `o_gmem[0, 5] = value` stores one, and `x_gmem[2]` loads a row.
#
# You write what happens to arrays. Which of the threads does which part of it is Pallas's work.


# %%
def double_kernel(x_gmem, o_gmem):
    o_gmem[...] = x_gmem[...] * 2


def double(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    # out_type: shape and dtype of the result
    return plgpu.kernel(double_kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


show(double, normal((4, 256)))

# %% [markdown]
# An H100 (SXM) has 132 processors, called **SMs**, and a CTA runs on one of them. The other 131 are idle. An SM's share
# of the chip's 3350 GB/s is 25 GB/s. So you start many CTAs. The **grid** says how many, and gives each axis a name.
# `lax.axis_index("row")` says where in the grid a CTA is:
#
# ```text
#     grid=(4,), grid_names=("row",)
#
#     row 0    [  CTA  ]    lax.axis_index("row") is 0 here,
#     row 1    [  CTA  ]    1 here,
#     row 2    [  CTA  ]    2 here,
#     row 3    [  CTA  ]    and 3 here
# ```
#
# On a TPU the grid is a loop: one step follows the other. On a GPU many CTAs run at once, in any order. So two CTAs
# must never store into the same place, and none may count on what another one has done.


# %%
def double_rows_kernel(x_gmem, o_gmem):
    i = lax.axis_index("row")
    o_gmem[i] = x_gmem[i] * 2


def double_rows(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return plgpu.kernel(
        double_rows_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
    )(x)


# Try it: store into o_gmem[0] in place of o_gmem[i], and run this cell again.
show(double_rows, normal((4, 256)))

# %% [markdown]
# ## Puzzle 1: All at once
#
# **Goal.** Add 10 to a matrix. Each CTA takes one row, and `bn` of its columns.
#
# ### Theory
#
# A batch of 4 prompts is a matrix of 4 long rows. With one CTA for a row, 128 of the 132 SMs have nothing to do. So cut
# the rows into parts. The grid gets a second axis:
#
# ```text
#     grid=(4, 3), grid_names=("row", "part")
#
#                part 0    part 1    part 2
#     row 0    [  CTA    |  CTA    |  CTA    ]
#     row 1    [  CTA    |  CTA    |  CTA    ]      twelve CTAs,
#     row 2    [  CTA    |  CTA    |  CTA    ]      each with an index along both axes
#     row 3    [  CTA    |  CTA    |  CTA    ]
# ```
#
# A CTA's index is traced, so `x_gmem[0, 256 * j : 256 * j + 256]` does not work: Python's slices need numbers.
# `pl.ds(start, size)` is a slice whose start is computed, and may be traced. `x_gmem[0, pl.ds(256, 128)]` has columns
# 256 to 383 of row 0. The size is a Python integer. You use it to load and to store.


# %%
def add_ten_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return x + 10


def add_ten_kernel(x_gmem, o_gmem, *, bn):
    # x_gmem, o_gmem: all of x and all of the result, (M, N)      bn: how many columns a CTA takes, a multiple of 128
    # The names of the grid are "row" and "part".
    pass  # YOUR CODE HERE


def add_ten(x: Float32[Array, "M N"], *, bn: int = 256) -> Float32[Array, "M N"]:
    M, N = x.shape
    return plgpu.kernel(
        functools.partial(add_ten_kernel, bn=bn),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(M, N // bn),
        grid_names=("row", "part"),
    )(x)


# %%
# Budget for x (6, 768): gmem_bytes=36_864, cta_bytes=2_048, ctas=18. gmem_bytes: all that is loaded from GMEM and
# stored to it. cta_bytes: what a single CTA may load and store.
check("gpu_basics/1", add_ten)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A CTA first finds out who it is: it asks for its index along both names of the grid. One of the two is a row number
# already. The other one counts parts, and `pl.ds` wants the number of a column. How many columns lie in front of part
# 2? You need the same slice twice, once for the load and once for the store.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def add_ten_kernel(x_gmem, o_gmem, *, bn):
#     i = lax.axis_index(____)
#     j = lax.axis_index(____)
#     columns = pl.ds(____, bn)
#     o_gmem[____] = x_gmem[____] + 10
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def add_ten_kernel(x_gmem, o_gmem, *, bn):
#     i = lax.axis_index("row")
#     j = lax.axis_index("part")
#     columns = pl.ds(j * bn, bn)
#     o_gmem[i, columns] = x_gmem[i, columns] + 10
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A TPU kernel is told which block it has. A GPU kernel asks who it is, and takes its part of the arrays.
# A GPU does not check that the parts do not overlap. The machine here does: it reports two CTAs that store into the
# same place.

# %% [markdown]
# ## Puzzle 2: Softmax in four lines
#
# **Goal.** Softmax of every row: `exp(x)`, divided by its sum. A CTA takes one row, and loads it once.
#
# ### Theory
#
# `x = x_gmem[i]` is an array, as in NumPy. Where is it? In **registers**, the fastest memory of a GPU. Pallas deals the
# elements out to the 128 threads of the CTA, like cards:
#
# ```text
#     row of 1024        thread 0    thread 1   ...   thread 127
#     float32
#                        8 values    8 values         8 values       in registers
#
#     jnp.max(x)         each thread takes the maximum of its own,
#                        then the threads exchange theirs
# ```
#
# You write `jnp.max(x)`; the exchange is Pallas's work. What is in registers costs nothing to use again. GMEM is slow:
# the registers of an H100's SMs hold 33 MiB, and to load as much from GMEM takes 10 us. A row that you load twice may
# cost three trips instead of two: in, in, and out. So load each element once.
#
# (You know the rule of arithmetic: exp(89) is too large for float32, so the row's maximum is subtracted first. The
# factor exp(-max) cancels.)


# %%
def softmax_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.softmax(x, axis=1)


def softmax_kernel(x_gmem, o_gmem):
    # x_gmem, o_gmem: all of x and of the result, (M, N); N is a multiple of 128. The grid has one name, "row".
    pass  # YOUR CODE HERE


def row_softmax(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return plgpu.kernel(
        softmax_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
    )(x)


# %%
# Budget for x (6, 1024): gmem_bytes=49_152, ctas=6. Each element is loaded once and stored once. jax.nn.softmax is
# off limits here.
check("gpu_basics/2", row_softmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Every name in your kernel that holds an array holds registers. Where do you need the row for the first time, and where
# for the last time? If the same load stands in your kernel twice, GMEM is read twice: a compiler may not assume that
# nobody has changed it in between. The budget allows one load of the row and one store.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def softmax_kernel(x_gmem, o_gmem):
#     i = ____
#     x = x_gmem[i]                  # the only load
#     e = jnp.exp(x - ____)
#     o_gmem[i] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def softmax_kernel(x_gmem, o_gmem):
#     i = lax.axis_index("row")
#     x = x_gmem[i]
#     e = jnp.exp(x - jnp.max(x))
#     o_gmem[i] = e / jnp.sum(e)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Four lines and no buffer: registers are where a GPU computes. But they end somewhere: a thread has 255
# of them, with 4 bytes each. On an H200, rows of 16,384 float32 run at 4121 GB/s, and rows of 32,768, which need 256
# registers of each thread, at 2251 GB/s (measured). And registers have no address: a thread cannot index the element
# that its neighbour holds. What if it needs one?

# %% [markdown]
# ## Worked example: a tile in SMEM
#
# A CTA can have a memory of its own: **SMEM** (shared memory), up to 227 KiB. All of its threads can use all of it.
# Each SM also has a **copy engine** (NVIDIA calls it TMA). It copies tiles between GMEM and SMEM while your threads do
# something else. `scratch_types=` makes a buffer in SMEM and a **barrier** for each CTA. Your kernel gets both after
# the outputs.
#
# `plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)` only *starts* a copy. (`x_gmem.at[rows]` names a part of a
# Ref without loading it.) The call returns at once, and x_smem holds garbage until the copy is done. Then the engine
# **arrives** at the barrier `loaded`. `plgpu.barrier_wait(loaded)` waits for one arrival:
#
# ```text
#     threads       | start |..... barrier_wait .....| compute
#     copy engine           |##### 64 x 128 tile ####|
#     loaded                                         ^ arrives
# ```


# %%
def double_tiles_kernel(x_gmem, o_gmem, x_smem, loaded):
    rows = pl.ds(lax.axis_index("tile") * 64, 64)
    plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    o_gmem[rows] = x_smem[...] * 2


def double_tiles(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return plgpu.kernel(
        double_tiles_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((64, x.shape[1]), x.dtype), plgpu.Barrier()],
    )(x)


# Try it: leave out barrier_wait, and run this cell again. Then wait twice.
show(double_tiles, normal((128, 128)))

# %% [markdown]
# ## Puzzle 3: The copy engine
#
# **Goal.** Average each row with the two rows below it: `o[r] = (x[r] + x[r+1] + x[r+2]) / 3`. Copy each tile to SMEM
# once.
#
# ### Theory
#
# Each row is needed three times. With three loads from GMEM you would load three times the bytes. (A cache catches some
# of them, but you cannot count on it.) So let the copy engine put the rows into SMEM, once. Then slice *there*. A slice
# of a Ref in SMEM may start at any row, whichever thread needs it. Slice the Ref, not the array:
#
# ```text
#     x_smem, 66 rows         x_smem[pl.ds(1, 64)]
#
#     row  0  |        |
#     row  1  |        |      |########|
#      ...    |        |      |########|    64 rows,
#     row 64  |        |      |########|    beginning at the second one
#     row 65  |        |
# ```
#
# (A slice of the array, `x_smem[...][1:65]`, does not compile: rows would have to move from thread to thread.)
#
# Neighbouring tiles overlap: the last two rows of one are the first two of the next. Both CTAs copy them.


# %%
def smooth_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M-2 N"]:
    return (x[:-2] + x[1:-1] + x[2:]) / 3


def smooth_kernel(x_gmem, o_gmem, x_smem, loaded, *, bm, bn):
    # x_gmem: (M, N)      o_gmem: (M - 2, N)      x_smem: (bm + 2, bn), garbage      loaded: a barrier
    # The names of the grid are "i" and "j": this CTA computes rows i * bm to i * bm + bm - 1 of the result, and columns
    # j * bn to j * bn + bn - 1.
    pass  # YOUR CODE HERE


def smooth(x: Float32[Array, "M N"], *, bm: int = 64, bn: int = 128) -> Float32[Array, "M-2 N"]:
    M, N = x.shape
    return plgpu.kernel(
        functools.partial(smooth_kernel, bm=bm, bn=bn),
        out_type=jax.ShapeDtypeStruct((M - 2, N), x.dtype),
        grid=((M - 2) // bm, N // bn),
        grid_names=("i", "j"),
        scratch_types=[plgpu.SMEM((bm + 2, bn), x.dtype), plgpu.Barrier()],
    )(x)


# %%
# Budget for x (130, 256): gmem_bytes=266_240, thread_bytes=131_072. Four tiles of 66 x 128 come in, four of 64 x 128 go
# out. thread_bytes: what threads load from GMEM and store to it by themselves, here the result.
check("gpu_basics/3", smooth)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which rows of `x` does the first row of this CTA's result need, and which does the last one? That is what you copy.
# In `x_smem`, rows are counted from its own first row, so `i` has no place in its indices. The three summands have `bm`
# rows each. Where does each of them start? The result goes straight from registers to GMEM, as in Puzzle 1.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def smooth_kernel(x_gmem, o_gmem, x_smem, loaded, *, bm, bn):
#     i, j = lax.axis_index("i"), lax.axis_index("j")
#     columns = pl.ds(____, bn)
#     plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(____, ____), columns], ____, ____)
#     ____                                    # until the tile is there
#     total = x_smem[pl.ds(0, bm)] + ____
#     o_gmem[pl.ds(____, bm), columns] = total / 3
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def smooth_kernel(x_gmem, o_gmem, x_smem, loaded, *, bm, bn):
#     i, j = lax.axis_index("i"), lax.axis_index("j")
#     columns = pl.ds(j * bn, bn)
#     plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * bm, bm + 2), columns], x_smem, loaded)
#     plgpu.barrier_wait(loaded)
#     total = x_smem[pl.ds(0, bm)] + x_smem[pl.ds(1, bm)] + x_smem[pl.ds(2, bm)]
#     o_gmem[pl.ds(i * bm, bm), columns] = total / 3
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Start, wait, use. 33 KiB came in once, and each row was read three times from SMEM. Without the wait, a
# GPU gives you garbage on some days and the right answer on others. Here you get your line instead.

# %%
show(smooth, normal((130, 256)))

# %% [markdown]
# ## Worked example: the way out
#
# The copy engine works in the other direction, too. `plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[rows])` starts a copy of
# x_smem, and returns at once. There is no barrier on the way out: such copies are counted.
# `plgpu.wait_smem_to_gmem(n)` waits until at most `n` of them are still on their way.
#
# Why wait, if nothing follows? SMEM is borrowed. When your kernel ends, the next CTA moves in. A copy that is still
# reading x_smem would carry out that CTA's numbers.
#
# This kernel reverses the order of the tiles, like the pages of basics.py Puzzle 3. No thread touches a number.


# %%
def reverse_tiles_kernel(x_gmem, o_gmem, x_smem, loaded):
    i, last = lax.axis_index("tile"), x_gmem.shape[0] // 64 - 1
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 64, 64)], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[pl.ds((last - i) * 64, 64)])
    plgpu.wait_smem_to_gmem(0)


def reverse_tiles(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return plgpu.kernel(
        reverse_tiles_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((64, x.shape[1]), x.dtype), plgpu.Barrier()],
    )(x)


# Try it: leave out the last wait, and run this cell again.
show(reverse_tiles, normal((128, 128)))

# %% [markdown]
# ## Puzzle 4: Back out
#
# **Goal.** GELU of a matrix, tile by tile. The copy engine carries the tiles in both directions; your threads never
# touch GMEM.
#
# ### Theory
#
# A tile of 64 x 128 float32 is 64 values for each of 128 threads to store. The copy engine needs one instruction. So
# put the result into SMEM, `o_smem[...] = value`, and let the engine carry it out.
#
# Now threads write what the engine reads. They do not use the same path:
#
# ```text
#     threads       --- store --->   | on its way |   --->  o_smem
#                                                             |
#     copy engine   <------------------ reads ----------------+
# ```
#
# What your threads have just stored may still be on its way when the engine reads. Then it carries out what was in
# `o_smem` before. `plgpu.commit_smem()` takes care of that: what the threads have stored in SMEM before this call, the
# engine sees after it.


# %%
def gelu_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.gelu(x)


def gelu_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded, *, bm, bn):
    # x_smem, o_smem: (bm, bn)      loaded: a barrier. The names of the grid are "i" and "j", as in Puzzle 3.
    # jax.nn.gelu works in a kernel.
    pass  # YOUR CODE HERE


def tiled_gelu(x: Float32[Array, "M N"], *, bm: int = 64, bn: int = 128) -> Float32[Array, "M N"]:
    M, N = x.shape
    tile = plgpu.SMEM((bm, bn), x.dtype)
    return plgpu.kernel(
        functools.partial(gelu_kernel, bm=bm, bn=bn),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(M // bm, N // bn),
        grid_names=("i", "j"),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )(x)


# %%
# Budget for x (128, 256): gmem_bytes=262_144, thread_bytes=0. The threads load and store nothing in GMEM.
check("gpu_basics/4", tiled_gelu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The way in is that of Puzzle 3, without the two extra rows. The way out is that of the worked example, and two lines
# more: the result has to get into o_smem, and the engine has to see it there. What does the engine carry out if you
# commit before you store, and what if you commit after the copy has started?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def gelu_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded, *, bm, bn):
#     rows = pl.ds(lax.axis_index("i") * bm, bm)
#     columns = ____
#     plgpu.copy_gmem_to_smem(____)
#     ____
#     o_smem[...] = ____
#     ____                                   # the engine has to see it
#     plgpu.copy_smem_to_gmem(____)
#     ____                                   # and to be done with it
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gelu_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded, *, bm, bn):
#     rows = pl.ds(lax.axis_index("i") * bm, bm)
#     columns = pl.ds(lax.axis_index("j") * bn, bn)
#     plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem, loaded)
#     plgpu.barrier_wait(loaded)
#     o_smem[...] = jax.nn.gelu(x_smem[...])
#     plgpu.commit_smem()
#     plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
#     plgpu.wait_smem_to_gmem(0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** In: copy, wait. Out: copy, wait, and a commit before them if threads have stored there. That is the
# whole protocol. Every kernel that uses the copy engine follows it. Now look at the picture: the threads wait while the
# engine copies, and the engine waits while the threads compute. Somebody is always idle.

# %%
show(tiled_gelu, normal((64, 128)))

# %% [markdown]
# ## Worked example: a strip of tiles
#
# So far a CTA had one tile. Here it walks down a strip of them. `@pl.loop(0, n)` is `for t in range(n)` inside of a
# kernel; `t` is traced. One barrier will do for all tiles: each wait takes one arrival, and the next wait is for the
# next one.
#
# `plgpu.commit_smem()` has a second effect: all 128 threads wait there for one another. So nobody still reads x_smem
# when the next tile comes into it.


# %%
def one_slot_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded):
    columns = pl.ds(lax.axis_index("strip") * 128, 128)

    @pl.loop(0, x_gmem.shape[0] // 64)
    def _(t):
        rows = pl.ds(t * 64, 64)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem, loaded)
        plgpu.barrier_wait(loaded)
        o_smem[...] = jax.nn.gelu(x_smem[...])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def one_slot_gelu(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    tile = plgpu.SMEM((64, 128), x.dtype)
    return plgpu.kernel(
        one_slot_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // 128,),
        grid_names=("strip",),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )(x)


show(one_slot_gelu, normal((512, 128)))

# %% [markdown]
# The engine stands idle for 22,976 of 60,781 cycles. While it copies, the threads wait. While they compute, it waits.
# With two buffers, two copies can be on their way at once. Such a buffer is called a **slot**. Here `x_smem` is (2, 64,
# 128), and tile `t` lives in slot `t % 2`. You have to know *which* copy is done, so each slot has a barrier of its
# own: `loaded` has two, and `loaded.at[slot]` is one of them. `load_tile` will be of use below. In it, `lax.rem(t, 2)`
# is `t % 2` for a `t` that may be traced.
#
# This kernel takes the larger of two tiles, element by element. It starts both copies before it waits for one.


# %%
def load_tile(x_gmem, x_smem, loaded, t):
    # starts the copy of tile t into its slot
    columns, slot = pl.ds(lax.axis_index("strip") * 128, 128), lax.rem(t, 2)
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(t * 64, 64), columns], x_smem.at[slot], loaded.at[slot])


def larger_kernel(x_gmem, o_gmem, x_smem, loaded):
    load_tile(x_gmem, x_smem, loaded, 0)
    load_tile(x_gmem, x_smem, loaded, 1)
    plgpu.barrier_wait(loaded.at[0])
    first = x_smem[0]
    plgpu.barrier_wait(loaded.at[1])
    o_gmem[:, pl.ds(lax.axis_index("strip") * 128, 128)] = jnp.maximum(first, x_smem[1])


def larger(x: Float[Array, "128 N"]) -> Float[Array, "64 N"]:
    return plgpu.kernel(
        larger_kernel,
        out_type=jax.ShapeDtypeStruct((64, x.shape[1]), x.dtype),
        grid=(x.shape[1] // 128,),
        grid_names=("strip",),
        scratch_types=[plgpu.SMEM((2, 64, 128), x.dtype), plgpu.Barrier(num_barriers=2)],
    )(x)


show(larger, normal((128, 128)))

# %% [markdown]
# ## Puzzle 4b: One tile ahead
#
# **Goal.** GELU of a strip, with two slots. Write one step of the loop, so that the next tile comes in while you
# compute this one.
#
# ### Theory
#
# With one slot, copying in and computing take turns. With two, the engine fills one while you work in the other:
#
# ```text
#     one slot      copy engine   | tile 0 |        | tile 1 |        | tile 2 |
#                   threads                | GELU 0 |        | GELU 1 |        | GELU 2 |
#
#     two slots     copy engine   | tile 0 | tile 1 | tile 2 | ...
#                   threads                | GELU 0 | GELU 1 | GELU 2 |
# ```
#
# This is **double buffering**. Only the order of the calls decides it. Look at the second picture: when does the
# copy of tile 1 start? Your step has to ask for a tile before it needs it.
#
# The copy of tile 0 is started before the loop. `finish(t, x_tile)` is given. It computes the GELU of a tile that is in
# SMEM, and copies it out. `x_tile` may be a part of a Ref, such as `x_smem.at[slot]`.


# %%
def finish_tile(t, x_tile, o_smem, o_gmem):
    # given: Puzzle 4, with tile t
    columns = pl.ds(lax.axis_index("strip") * 128, 128)
    o_smem[...] = jax.nn.gelu(x_tile[...])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(t * 64, 64), columns])
    plgpu.wait_smem_to_gmem(0)


# %%
def ahead_gelu_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.gelu(x)


def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
    # t: the tile of this step, traced      x_smem: (2, 64, 128), two slots      loaded: two barriers
    # finish: a function of t and of the tile in SMEM      pl.when is of use for the last step.
    pass  # YOUR CODE HERE


def ahead_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded):
    num_tiles = x_gmem.shape[0] // 64
    finish = functools.partial(finish_tile, o_smem=o_smem, o_gmem=o_gmem)
    load_tile(x_gmem, x_smem, loaded, 0)

    @pl.loop(0, num_tiles)
    def _(t):
        strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish)


def ahead_gelu(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    slots, tile = plgpu.SMEM((2, 64, 128), x.dtype), plgpu.SMEM((64, 128), x.dtype)
    return plgpu.kernel(
        ahead_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // 128,),
        grid_names=("strip",),
        scratch_types=[slots, tile, plgpu.Barrier(num_barriers=2)],
    )(x)


# %%
# Budget for x (512, 128): thread_bytes=0, copies=8, copy_idle=7_500. copy_idle: cycles in which the copy engine has
# nothing to do; with one slot there are 22,976 of them. copies: into SMEM; there are 8 tiles.
check("gpu_basics/4b", ahead_gelu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A step deals with two tiles: the one that comes next, and its own. Which of the two should it think of first? Into the
# slot of the next tile you may copy at once: the step before has finished with it.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
#     slot = lax.rem(t, 2)
#
#     @pl.when(____)
#     def _():
#         load_tile(____)
#
#     plgpu.barrier_wait(____)
#     finish(t, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
#     slot = lax.rem(t, 2)
#
#     @pl.when(t + 1 < num_tiles)
#     def _():
#         load_tile(x_gmem, x_smem, loaded, t + 1)
#
#     plgpu.barrier_wait(loaded.at[slot])
#     finish(t, x_smem.at[slot])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The same work takes 44,877 cycles now, and took 60,781 with one slot. A real H200 agrees: with one CTA
# for each SM, and a matrix of 32,768 x 16,896, one slot takes 1.72 ms, and two take 1.13 ms (jax 0.11.2). On a TPU,
# `pallas_call` did this behind your back. Look at the picture: at the end of each step the threads still wait for their
# result to leave.

# %%
show(ahead_gelu, normal((512, 128)))

# %% [markdown]
# ## Puzzle 5: Two slots
#
# **Goal.** Give the result two slots, too, so that tile t - 1 goes out while you compute tile t. Write what happens to
# a tile that has come in.
#
# ### Theory
#
# In Puzzle 4b, the engine was still idle for 7,072 cycles. `finish` waited for the copy out, because the next step
# would overwrite `o_smem`. With two slots, tile t does not touch the slot of tile t - 1. It needs the slot of tile t -
# 2:
#
# ```text
#     o_smem[0]     | GELU 0 |### out 0 ###|      | GELU 2 |### out 2 ###|
#     o_smem[1]              | GELU 1 |### out 1 ###|      | GELU 3 |### out 3 ###|
#                                                 ^
#                                  tile 2 needs slot 0: out 0 is done,
#                                  out 1 may still be on its way
# ```
#
# So wait for one copy, and let the newer one go on: the `n` of `plgpu.wait_smem_to_gmem(n)` is not always 0. The
# oldest copy is counted first.
#
# The step is your own, from Puzzle 4b. After the loop, the kernel waits for all copies.


# %%
def store_tile(o_smem, o_gmem, t):
    # given: starts the copy of tile t out of its slot
    columns = pl.ds(lax.axis_index("strip") * 128, 128)
    plgpu.copy_smem_to_gmem(o_smem.at[lax.rem(t, 2)], o_gmem.at[pl.ds(t * 64, 64), columns])


# %%
def strip_gelu_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.gelu(x)


def send_tile(t, x_tile, o_smem, o_gmem):
    # t: traced      x_tile: (64, 128), in SMEM, already there      o_smem: (2, 64, 128), two slots
    pass  # YOUR CODE HERE


def strip_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded):
    num_tiles = x_gmem.shape[0] // 64
    finish = functools.partial(send_tile, o_smem=o_smem, o_gmem=o_gmem)
    load_tile(x_gmem, x_smem, loaded, 0)

    @pl.loop(0, num_tiles)
    def _(t):
        strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish)

    plgpu.wait_smem_to_gmem(0)


def strip_gelu(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    slots = plgpu.SMEM((2, 64, 128), x.dtype)
    return plgpu.kernel(
        strip_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // 128,),
        grid_names=("strip",),
        scratch_types=[slots, slots, plgpu.Barrier(num_barriers=2)],
    )(x)


# %%
# Budget for x (512, 128): thread_bytes=0, copies=8, copy_idle=1_000. Of the idle cycles, 700 are left if all goes well.
check("gpu_basics/5", strip_gelu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# It is the way out of Puzzle 4, and one wait has moved. In Puzzle 4 it came last, and let nothing go on. Here it comes
# before something that would do harm if it were early. What is that? And when it is called, two copies at most may be
# on their way: how many of them may go on? The first two tiles wait for nothing, and the same call does that, too.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def send_tile(t, x_tile, o_smem, o_gmem):
#     plgpu.wait_smem_to_gmem(____)          # this slot of o_smem is free
#     o_smem[____] = ____
#     ____
#     store_tile(____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def send_tile(t, x_tile, o_smem, o_gmem):
#     plgpu.wait_smem_to_gmem(1)
#     o_smem[lax.rem(t, 2)] = jax.nn.gelu(x_tile[...])
#     plgpu.commit_smem()
#     store_tile(o_smem, o_gmem, t)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 60,781 cycles, then 44,877, now 38,505, and the work is the same. In the picture, the engine never
# stops. You may wait for less: with `wait_read_only=True`, `plgpu.wait_smem_to_gmem` waits until a copy has read SMEM;
# its bytes may still be on their way to GMEM. A slot needs no more than that. (The machine here counts the same cycles
# for both.) With it, an H200 takes 1.11 ms. The kernel of Puzzle 4b took 1.13 ms, so this step is a small one there.
# Does it have to be so much typing? It does not.

# %%
show(strip_gelu, normal((512, 128)))

# %% [markdown]
# ## Puzzle 6: The library's pipeline
#
# **Goal.** Add a bias to each column and apply GELU. Write what happens to one tile, and say which tiles.
#
# ### Theory
#
# Count the lines of Puzzle 5: about 20 are protocol, and one is arithmetic. `plgpu.emit_pipeline` writes the 20: slots,
# barriers, waits, commits. You give it a body for one tile, and BlockSpecs as on a TPU. (`plgpu.BlockSpec` is
# `pl.BlockSpec` with some options for GPUs.) `plgpu.emit_pipeline(...)` returns a function. You call it *inside* of a
# kernel with the Refs in GMEM, inputs first, then outputs. So each CTA runs a pipeline of its own:
#
# ```text
#     kernel, grid=(strips,)              the crowd: all strips at once
#        |
#        +-- emit_pipeline, grid=(8,)     a loop in one CTA: tile after tile
#               |
#               +-- body(indices, x_smem, bias_smem, o_smem)
# ```
#
# The body gets the loop's index, as a tuple, and then the Refs of this tile in SMEM, inputs before outputs. It reads
# them and writes them. It starts no copy and waits for none. An index map takes the loop's index. The map does not know
# the CTA's strip; `functools.partial` gives it to the map, in the kernel below.


# %%
def bias_gelu_spec(x: Float32[Array, "M N"], bias: Float32[Array, "N"]) -> Float32[Array, "M N"]:
    return jax.nn.gelu(x + bias)


def bias_gelu_step(indices, x_smem, bias_smem, o_smem):
    # x_smem, o_smem: (bm, bn)      bias_smem: (bn,)      NumPy's broadcasting works here.
    pass  # YOUR CODE HERE


def tile_map(i, strip):
    # i: the loop's index, from the top to the bottom      strip: which bn columns this CTA has
    # Return the number of the block of x (and of the result), as a tuple.
    pass  # YOUR CODE HERE


def bias_map(i, strip):
    # Return the number of the block of bias, as a tuple.
    pass  # YOUR CODE HERE


# %%
def bias_gelu_kernel(x_gmem, bias_gmem, o_gmem, *, bm, bn, slots):
    strip = lax.axis_index("strip")
    tile = plgpu.BlockSpec((bm, bn), functools.partial(tile_map, strip=strip))
    bias = plgpu.BlockSpec((bn,), functools.partial(bias_map, strip=strip))
    plgpu.emit_pipeline(
        bias_gelu_step,
        grid=(x_gmem.shape[0] // bm,),
        in_specs=[tile, bias],
        out_specs=[tile],
        max_concurrent_steps=slots,  # how many slots each operand has
    )(x_gmem, bias_gmem, o_gmem)


def bias_gelu(
    x: Float32[Array, "M N"], bias: Float32[Array, "N"], *, bm: int = 64, bn: int = 128, slots: int = 2
) -> Float32[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(bias_gelu_kernel, bm=bm, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // bn,),
        grid_names=("strip",),
    )(x, bias)


# %%
# Budget for x (512, 256), bias (256,): gmem_bytes=1_056_768, thread_bytes=0. x and the result are 1 MiB together, and
# 128 biases come in with each tile.
check("gpu_basics/6", bias_gelu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You have written the body before: on a TPU it was a kernel. For the maps, follow one CTA: which number stays the same
# for its whole life, and which one counts up? `x` has two dimensions, so its map returns two numbers. How many does the
# map of `bias` return? Block numbers, not elements: the pipeline multiplies.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def bias_gelu_step(indices, x_smem, bias_smem, o_smem):
#     o_smem[...] = ____
#
#
# def tile_map(i, strip):
#     return (____, ____)
#
#
# def bias_map(i, strip):
#     return (____,)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def bias_gelu_step(indices, x_smem, bias_smem, o_smem):
#     o_smem[...] = jax.nn.gelu(x_smem[...] + bias_smem[...])
#
#
# def tile_map(i, strip):
#     return (i, strip)
#
#
# def bias_map(i, strip):
#     return (strip,)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Three lines of yours, and the protocol of Puzzles 4 to 5 is around them. You know what it does, so you
# can read its timeline, and tell where it waits. Most of JAX's own Hopper kernels are built on this function, or on
# its warp-specialised sister. But it asks a question that it does not answer: how many slots?

# %% [markdown]
# ## Worked example: a pipeline with a carry
#
# An int8 model needs to know how large each activation gets. This kernel takes the maximum over many small tiles. The
# pipeline has no output: what the body returns is handed to the next step, and comes out after the last one. It begins
# with `init_carry`. You choose the number of slots. In the picture, the first one is called `in_smem_refs[0][0]`.
#
# One thing differs from a TPU: this pipeline copies a block at every step, also if its number stays the same. (The
# biases of Puzzle 6 came in again with each tile.)


# %%
def largest_step(indices, x_smem, so_far):
    return jnp.maximum(so_far, jnp.abs(x_smem[...]))  # this is so_far at the next step


def largest_kernel(x_gmem, o_gmem, *, rows, slots):
    strip = lax.axis_index("strip")
    result = plgpu.emit_pipeline(
        largest_step,
        grid=(x_gmem.shape[0] // rows,),
        in_specs=[plgpu.BlockSpec((rows, 128), lambda t: (t, strip))],
        max_concurrent_steps=slots,
        init_carry=jnp.zeros((rows, 128), jnp.float32),  # so_far at the first step, in registers
    )(x_gmem)
    o_gmem[:, pl.ds(strip * 128, 128)] = result


def largest_with(x: Float[Array, "T R N"], slots: int) -> Float[Array, "R N"]:
    T, R, N = x.shape
    return plgpu.kernel(
        functools.partial(largest_kernel, rows=R, slots=slots),
        out_type=jax.ShapeDtypeStruct((R, N), x.dtype),
        grid=(N // 128,),
        grid_names=("strip",),
    )(x.reshape(T * R, N))


# Try it: two slots, three, four.
show(largest_with, normal((8, 16, 128)), slots=1)

# %% [markdown]
# With one slot, the engine waits for 6,368 of 11,684 cycles. A copy out of GMEM takes a while to begin: on the machine
# here, 700 cycles pass before its first byte arrives. An SM's share of an H100's bandwidth is 3350 GB/s / 132. At 1.83
# GHz, that is 13.9 bytes a cycle. A tile of 16 x 128 float32 has 8192 bytes, so they take 590 cycles to come in, after
# 700 cycles of nothing.

# %% [markdown]
# ## Puzzle 7: How deep?
#
# **Goal.** Say how many slots the pipeline above needs, for tiles of any size.
#
# ### Theory
#
# With one slot, the engine waits 700 cycles for every 590 in which bytes come in:
#
# ```text
#     one slot       |..700..|#590#|..700..|#590#|..700..|#590#
#
#     three slots    |..700..|#590#|     |#590#|     |#590#|
#                      |..700..    |#590#|     |#590#|
#                         |..700..       |#590#|     |#590#|
# ```
#
# The engine runs dry if you ask for the next tile too late. **Little's law** says how much has to be asked for ahead of
# time: bandwidth times latency, 700 * 13.9 bytes. So 9,730 bytes of tiles have to be asked for that have not begun to
# arrive. One more slot is for the tile that is arriving now. (It is the law of every queue. A bakery that sells 20
# loaves an hour, and bakes for two hours, has 40 in the oven.)
#
# (You might expect a slot more, for the tile that the threads work on. Here they are done so early that it is hardly
# ever needed.) So more slots buy nothing, and cost SMEM.


# %%
LATENCY_CYCLES = 700  # from the start of a copy to its first byte
BYTES_PER_CYCLE = 13.9  # an SM's share of an H100's bandwidth


def largest_spec(x: Float32[Array, "T R N"]) -> Float32[Array, "R N"]:
    return jnp.max(jnp.abs(x), axis=0)


def slots_needed(tile_bytes):
    # tile_bytes: the size of a tile, a Python integer
    # Return the smallest number of slots that keeps the copy engine busy, a Python integer.
    pass  # YOUR CODE HERE


def largest(x: Float32[Array, "T R N"]) -> Float32[Array, "R N"]:
    return largest_with(x, slots_needed(x.shape[1] * 128 * x.dtype.itemsize))


# %%
# Budget for x (32, 16, 256): smem_bytes=25_000, copy_idle=2_000. With one slot too few, the engine idles for 7,751
# cycles; one slot too many needs 32,800 bytes of SMEM. The check asks for tiles of many sizes.
check("gpu_basics/7", largest)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many bytes have to be asked for ahead of time? How many tiles is that, if half a tile does not help? Then add the
# slot of the tile that is coming in. Try it by hand: 8192 bytes a tile, and 32,768. `pl.cdiv` divides integers and
# rounds up; `math.ceil` needs an import, and takes floats.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def slots_needed(tile_bytes):
#     ahead = ____                          # bytes that are asked for ahead of time
#     return ____ + pl.cdiv(int(ahead), ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def slots_needed(tile_bytes):
#     ahead = LATENCY_CYCLES * BYTES_PER_CYCLE
#     return 1 + pl.cdiv(int(ahead), tile_bytes)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Small tiles need many slots, large ones need two. What counts is the bytes on their way. If an SM runs
# several CTAs, theirs add up. A real chip is less tidy than this machine: its latency grows with its load. An H200,
# with one such CTA on each SM, and tiles of 8192 bytes, reads 1589 GB/s with one slot, 2795 with two, 3631 with three,
# 4119 with four, 4558 with eight. Little's law is where you start. A measurement is where you end.

# %%
show(largest, normal((32, 16, 256)))

# %% [markdown]
# ## Worked example: a layout
#
# A tile in registers: which thread holds which element? That is the tile's **layout**, and a reduction along one axis
# depends on it:
#
# ```text
#     Layout.WGMMA: four neighbouring threads share a row
#
#     row 0    | t0 t0 t1 t1 t2 t2 t3 t3 | t0 t0 t1 t1 ...      the sum of row 0 is
#     row 1    | t4 t4 t5 t5 t6 t6 t7 t7 | t4 t4 t5 t5 ...      an exchange of four threads
# ```
#
# (**Tensor cores** are the units of an SM that multiply matrices, and wgmma is their instruction on Hopper. They leave
# a product in this layout.) Pallas finds a layout by
# itself where it can. For a reduction along one axis of a tile of 64 rows, it cannot. So you name the layout when you
# load: `plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)`. From there on it follows: `jnp.sum(x, axis=1)` is 64 sums, each
# held by the threads of its row. An array that you make yourself needs a layout, too: `row_numbers` holds 0 in row 0, 1
# in row 1, and so on.
#
# The kernel sums each row up to the diagonal, as a causal mask does. Storing needs no layout.


# %%
def row_numbers(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def column_numbers(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def causal_sums_kernel(x_gmem, o_gmem, x_smem, loaded):
    i = lax.axis_index("head")
    plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
    seen = column_numbers(x.shape) <= row_numbers(x.shape)
    o_gmem[i] = jnp.sum(jnp.where(seen, x, 0), axis=1)


def causal_sums(x: Float[Array, "H 64 64"]) -> Float[Array, "H 64"]:
    return plgpu.kernel(
        causal_sums_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape[:2], x.dtype),
        grid=(x.shape[0],),
        grid_names=("head",),
        scratch_types=[plgpu.SMEM((64, 64), x.dtype), plgpu.Barrier()],
    )(x)


print(causal_sums(jnp.ones((1, 64, 64))))

# %% [markdown]
# ## Puzzle 8: Who holds what
#
# **Goal.** RMSNorm of short rows: divide each row by the root of its mean square. A CTA takes 64 rows at once.
#
# ### Theory
#
# Transformers normalise each head's queries: rows of 128, a million of them. With a row a CTA, each thread would hold
# one single value. So take a tile of 64 rows, in the layout of the worked example.
#
# The mean square of each row is a reduction. It leaves 64 numbers, and then each element has to be multiplied with the
# number of its row. In NumPy it makes no difference when you widen 64 numbers to (64, 1). Here it does. 64 numbers,
# held row by row, have a layout. A (64, 1) array has none. The only thing that you can do with it is to let it meet the
# tile: `x * s[:, None]` compiles, `s[:, None] / 2` does not. So do all of the arithmetic on 64 numbers, without
# `keepdims=True`, and widen last:
#
# ```text
#     s, (64,)             x * s[:, None]
#
#     s0  t0 t1 t2 t3      | x s0  x s0  x s0 ...      threads 0 to 3 have s0 already:
#     s1  t4 t5 t6 t7      | x s1  x s1  x s1 ...      no exchange
# ```


# %%
def rms_norm_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)


def normed(x_smem):
    # x_smem: (64, N), a tile, already there
    # Return the normalised tile, an array. 1e-6 is added to the mean; lax.rsqrt(v) is 1 / sqrt(v).
    pass  # YOUR CODE HERE


# %%
def rms_norm_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded):
    rows = pl.ds(lax.axis_index("tile") * 64, 64)
    plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    o_smem[...] = normed(x_smem)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows])
    plgpu.wait_smem_to_gmem(0)


def rms_norm(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    tile = plgpu.SMEM((64, x.shape[1]), x.dtype)
    return plgpu.kernel(
        rms_norm_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("tile",),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )(x)


# %%
# Budget for x (128, 128): gmem_bytes=131_072, thread_bytes=0, copy_idle=4_500. While the threads compute, the copy
# engine has nothing to do: for 4,218 cycles with the tile as a whole, and for 5,242 in a loop over its rows.
check("gpu_basics/8", rms_norm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Load the tile with its layout, once. How many roots do you need, 64 or 8192? Which of the sum, the division, 1e-6 and
# the root come before the numbers are widened? The mean is a sum, divided by a Python integer that `x_smem.shape`
# knows.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def normed(x_smem):
#     x = plgpu.load(____, layout=____)
#     mean_square = jnp.sum(____, axis=____) / ____
#     return x * ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def normed(x_smem):
#     x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
#     mean_square = jnp.sum(x * x, axis=1) / x_smem.shape[1]
#     return x * lax.rsqrt(mean_square + 1e-6)[:, None]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** On a GPU an array in a kernel has a shape, a dtype, and a layout. You choose it where the tile enters
# the registers; arithmetic keeps it, a reduction shrinks it, `[:, None]` widens it again. Softmax, LayerNorm and
# attention do these three steps for every tile.

# %% [markdown]
# ## Puzzle 9: Ragged edges
#
# **Goal.** Log-sum-exp of each column, for every 64 rows of `x`. The number of rows is a multiple of 8, and often
# not of 64.
#
# ### Theory
#
# Long contexts are cut into pieces. Each piece gives a log-sum-exp, `log(sum(exp(x)))`, and a later kernel merges them.
# The last piece is shorter. With 200 rows, the fourth tile has 8 rows of `x`, and 56 that do not exist:
#
# ```text
#     rows   0 -  63   [ tile 0 ]
#     rows  64 - 127   [ tile 1 ]
#     rows 128 - 191   [ tile 2 ]
#     rows 192 - 199   [ tile 3 ]
#          200 - 255   [  0 0 0 ]      what x_smem has there
# ```
#
# The copy engine knows the shape of the array. On the way in, it fills what lies beyond with zeros. On the way out, it
# skips that part. So copies need no care, and reductions do: exp(0) is 1, and 56 of them would be in your sum. Replace
# these elements by something that a sum of exponentials does not notice.
#
# To find out which elements exist, compare their row: `row_numbers` is in the worked example above. One number a column
# needs no `[:, None]`: NumPy's rule puts a (128,) array along the last axis, and so does Pallas.


# %%
def lse_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M/64 N"]:
    tiles = [x[start : start + 64] for start in range(0, x.shape[0], 64)]
    return jnp.stack([jax.nn.logsumexp(tile, axis=0) for tile in tiles])


def column_lse(x_smem, rows_left):
    # x_smem: (64, 128), a tile      rows_left: so many rows of x there are from the tile's first row on; traced
    # Return log(sum(exp(x))) of each column, (128,). Subtract the column's maximum before exp, and add it at the end.
    pass  # YOUR CODE HERE


# %%
def lse_kernel(x_gmem, o_gmem, x_smem, loaded):
    i, j = lax.axis_index("tile"), lax.axis_index("strip")
    columns = pl.ds(j * 128, 128)
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 64, 64), columns], x_smem, loaded)
    plgpu.barrier_wait(loaded)
    o_gmem[i, columns] = column_lse(x_smem, x_gmem.shape[0] - i * 64)


def lse(x: Float32[Array, "M N"]) -> Float32[Array, "M/64 N"]:
    M, N = x.shape
    tiles = pl.cdiv(M, 64)
    return plgpu.kernel(
        lse_kernel,
        out_type=jax.ShapeDtypeStruct((tiles, N), x.dtype),
        grid=(tiles, N // 128),
        grid_names=("tile", "strip"),
        scratch_types=[plgpu.SMEM((64, 128), x.dtype), plgpu.Barrier()],
    )(x)


# %%
# Budget for x (200, 256): gmem_bytes=208_896, ctas=8, copy_idle=14_000. Rows that do not exist are not copied.
# copy_idle: as in Puzzle 8, compute with the tile as a whole.
check("gpu_basics/9", lse)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The zeros do harm in two places: always in the sum, and in the maximum of a column that lies below -87, where every
# exp is 0. One replacement, before the maximum, takes care of both. Which number is never a maximum, and has the
# exponential 0? (Row 0 of every tile exists, so the maximum is never that number.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def column_lse(x_smem, rows_left):
#     x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
#     row = row_numbers(____)
#     x = jnp.where(____, x, ____)
#     top = jnp.max(x, axis=____)
#     e = jnp.exp(x - ____)
#     return ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def column_lse(x_smem, rows_left):
#     x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
#     row = row_numbers(x.shape)
#     x = jnp.where(row < rows_left, x, -jnp.inf)
#     top = jnp.max(x, axis=0)
#     e = jnp.exp(x - top)
#     return top + jnp.log(jnp.sum(e, axis=0))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The copy engine takes care of the edges of arrays. You take care of the edges of sums. (On a TPU the
# padding was garbage; here it is zeros. A zero in a sum of exponentials is as wrong, and harder to notice.)

# %% [markdown]
# ## Puzzle 10: Softmax at bandwidth
#
# **Goal.** Back to Puzzle 2, at its real size: 65,536 rows of 4096. Make it work for bfloat16, too. Then predict what
# it moves, and how many of its CTAs share an SM.
#
# ### Theory
#
# This softmax moves 2 GiB and hardly computes. Nothing can make it faster than a copy. To come near, an SM needs bytes
# on their way all the time (Puzzle 7). A CTA of Puzzle 2 loads its row, then computes, then stores. While one CTA
# computes, other CTAs on the same SM load. How many fit at the same time? The resource that runs out first decides.
# (The field's word for it is **occupancy**.)
#
# ```text
#     what an SM has                     what a CTA of 128 threads takes
#
#     65,536 registers                   128 * (registers of a thread, rounded up to a multiple of 8)
#     228 KiB of SMEM                    its SMEM, and 1 KiB for the system
#     room for 2048 threads              128
# ```
#
# For rows of 4096 float32, NVIDIA's compiler gives your softmax 80 registers a thread. In bfloat16, load and store half
# as many bytes, but compute in float32: 8 significant bits are not enough for a sum of 4096 (basics.py Puzzle 10).


# %%
def fast_softmax_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return jax.nn.softmax(x.astype(jnp.float32), axis=1).astype(x.dtype)


def fast_softmax_kernel(x_gmem, o_gmem):
    # x_gmem, o_gmem: (M, N), float32 or bfloat16. The grid has one name, "row".
    pass  # YOUR CODE HERE


def softmax_bytes(M, N, itemsize):
    # itemsize: bytes of an element. Return how many bytes the kernel moves to and from GMEM.
    pass  # YOUR CODE HERE


def ctas_per_sm(registers, smem_bytes):
    # registers: of a thread      smem_bytes: of a CTA of 128 threads
    # Return how many such CTAs an SM holds at the same time.
    pass  # YOUR CODE HERE


def fast_softmax(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return plgpu.kernel(
        fast_softmax_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        grid_names=("row",),
    )(x)


# %%
# Budget for x (8, 1024): gmem_bytes=32_768, ctas=8. This x is bfloat16. The check also compares softmax_bytes with a
# run, and ctas_per_sm with the table, at other sizes. jax.nn.softmax is off limits here.
check("gpu_basics/10", fast_softmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The kernel is Puzzle 2 with two casts; `o_gmem.dtype` says what the second one is to. For the occupancy, compute one
# number for each line of the table: how many CTAs would fit if only this line counted? By hand first: which line
# decides for 80 registers and 2 KiB, and which one for 40 registers and 60,000 bytes? Divisions round down. Registers
# are rounded up before.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def fast_softmax_kernel(x_gmem, o_gmem):
#     i = lax.axis_index("row")
#     x = x_gmem[i].astype(____)
#     ...
#     o_gmem[i] = ____
#
#
# def softmax_bytes(M, N, itemsize):
#     return ____
#
#
# def ctas_per_sm(registers, smem_bytes):
#     by_registers = 65_536 // (128 * ____)
#     by_smem = 228 * 1024 // ____
#     return min(by_registers, by_smem, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def fast_softmax_kernel(x_gmem, o_gmem):
#     i = lax.axis_index("row")
#     x = x_gmem[i].astype(jnp.float32)
#     e = jnp.exp(x - jnp.max(x))
#     o_gmem[i] = (e / jnp.sum(e)).astype(o_gmem.dtype)
#
#
# def softmax_bytes(M, N, itemsize):
#     return 2 * M * N * itemsize
#
#
# def ctas_per_sm(registers, smem_bytes):
#     by_registers = 65_536 // (128 * 8 * pl.cdiv(registers, 8))
#     by_smem = 228 * 1024 // (smem_bytes + 1024)
#     return min(by_registers, by_smem, 2048 // 128)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With 80 registers, an SM holds 6 CTAs: 6 rows of 16 KiB, and some of them are on their way at any time.
# For rows of 16,384 it holds 2. Fewer registers a thread, more CTAs per SM.

# %% [markdown]
# ## What you built
#
# You built a softmax that reads each row once and writes it once, with enough CTAs on each SM that bytes are always on
# their way.
#
# On an H200 (jax 0.11.2, 1 GiB of float32 in, 1 GiB out, medians of one run):
#
# ```text
#     rows of              1024    4096    16,384    32,768
#     a copy (x + 1)       4219    4223    4220      4213     GB/s
#     your softmax         4197    4140    4121      2251     GB/s
#     XLA's softmax        4020    3831    2347      2123     GB/s
# ```
#
# At rows of 4096 that is 98% of a copy, and 1.08 times XLA. In the last column a row does not fit into the registers.
# The compiler then **spills**: it keeps some values in GMEM. (Flash attention's online softmax is the way out of that.)

# %% [markdown]
# What does NVIDIA's compiler say? `gpu_report` compiles your kernel for a chip that need not be there, at its real
# size. (If the compiler is missing, the report says what to install.) Compare it with your own figures: bytes,
# registers, CTAs per SM.

# %%
if not unwritten(fast_softmax):
    # 2048 bytes of SMEM: Pallas's own, in which the threads exchange their maxima and sums
    print(f"you: {softmax_bytes(65536, 4096, 4):,} bytes; {ctas_per_sm(80, 2048)} CTAs per SM with 80 registers")
gpu_report(fast_softmax, jax.ShapeDtypeStruct((65536, 4096), jnp.float32), chip="h200")

# %% [markdown]
# **Read next.** The Pallas documentation has a page on Mosaic GPU, with the pipeline and the tensor cores. JAX's
# `hopper_mixed_type_matmul_mgpu` and `attention_mgpu` are in `jax.experimental.pallas.ops.gpu`: copies, barriers and
# slots are all yours by now.

# %%
progress()
