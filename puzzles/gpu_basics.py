# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 6}
# ---

# %% [markdown]
# # GPU basics: from one CTA to a softmax at bandwidth
#
# Ten puzzles take you from adding ten to a softmax that runs as fast as an H200 can copy its input. On the way you
# meet what every fast kernel on a Hopper GPU is made of: thousands of CTAs at once, values in registers, tiles in
# shared memory, a copy engine that works while you compute, and barriers that tell you when it is done.
#
# You need basics.py. You need no CUDA, and no GPU. A machine in this package runs your kernels. It finds the copy that
# you forgot to wait for, and the barrier that never opens. On Linux, NVIDIA's real compiler can look at them, too,
# without a GPU. On a machine with an H100 or H200, the same cells run compiled.
#
# A puzzle is a function whose body says `YOUR CODE HERE`. Fill it in and run the `check` below it.

# %%
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu  # Pallas for Hopper and Blackwell GPUs
from jaxtyping import Array, Float

from pallas_puzzles import check, gpu_report, hint, normal, progress, setup, show, unwritten

setup("gpu")  # a Hopper or Blackwell GPU if there is one, else this package's machine

# %% [markdown]
# ## Puzzle 1: All at once
#
# **Goal.** Add 10 to a matrix. Each CTA takes one row, and `bn` of its columns.
#
# ### Theory
#
# An H100 (SXM) has 132 processors, called **SMs**. One of them alone gets 25 GB/s of the chip's 3350. So you start a
# kernel many times over. Each start is a **CTA**: 128 threads that run your kernel together. The **grid** says how many
# there are:
#
# ```text
#     grid=(4, 3), grid_names=("row", "part")
#
#                part 0    part 1    part 2
#     row 0    [  CTA    |  CTA    |  CTA    ]
#     row 1    [  CTA    |  CTA    |  CTA    ]      twelve CTAs,
#     row 2    [  CTA    |  CTA    |  CTA    ]      all at once
#     row 3    [  CTA    |  CTA    |  CTA    ]
# ```
#
# On a TPU the grid is a loop: one step follows the other. On a GPU many CTAs run at once, in any order. The SMs' room
# limits how many. So two CTAs must never store into the same place, and none may count on what another one has done.
#
# `plgpu.kernel` copies nothing for you. Your Refs are the whole arrays, in **GMEM** (global memory: 80 GB on an H100).
# `x_gmem[0, 5]` loads, `o_gmem[0, 5] = value` stores. `lax.axis_index("row")` says where in the grid this CTA is.
# `pl.ds(start, size)` is a slice whose start you compute: `x_gmem[0, pl.ds(256, 128)]` has columns 256 to 383 of row 0.


# %%
def add_ten_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return x + 10


def add_ten_kernel(x_gmem, o_gmem, *, bn):
    # x_gmem, o_gmem: all of x and all of the result, (M, N)      bn: how many columns a CTA takes, a multiple of 128
    # The names of the grid are "row" and "part".
    pass  # YOUR CODE HERE


def add_ten(x: Float[Array, "M N"], *, bn: int = 256) -> Float[Array, "M N"]:
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
# You write `jnp.max(x)`; the exchange is Pallas's work. A thread has 255 registers of 4 bytes. An SM has 65,536 of
# them, which is 256 KiB, and the whole H100 has 33 MiB. Registers are fast, and loads from GMEM are slow. A row that
# you load twice costs three trips instead of two: in, in, and out. So load each element once.
#
# (You know the rule of arithmetic: exp(89) is too large for float32, so the row's maximum is subtracted first. The
# factor exp(-max) cancels.)


# %%
def softmax_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return jax.nn.softmax(x, axis=1)


def softmax_kernel(x_gmem, o_gmem):
    # x_gmem, o_gmem: all of x and of the result, (M, N); N is a multiple of 128. The grid has one name, "row".
    pass  # YOUR CODE HERE


def row_softmax(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
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
# **Takeaway.** Four lines and no buffer: registers are where a GPU computes. But they end somewhere. A row of 32,768
# float32 takes 256 registers of each thread, and there are 255. The compiler then **spills**: it keeps some values in
# GMEM. On an H200, rows of 16,384 run at 4121 GB/s, and rows of 32,768 at 2251 GB/s (measured). And registers have no
# address: you cannot index the element that your neighbour holds. What if you need it?

# %% [markdown]
# ## Puzzle 3: The copy engine
#
# **Goal.** Average each row with the two rows below it: `o[r] = (x[r] + x[r+1] + x[r+2]) / 3`. Copy each tile to SMEM
# once.
#
# ### Theory
#
# Each row is needed three times. With three loads from GMEM you would load three times the bytes. (A cache catches some
# of them, but you cannot count on it.) So you keep the tile in **SMEM** (shared memory): up to 227 KiB for a CTA. All
# of its threads can read any part. Slice the Ref, not the array: `x_smem[pl.ds(1, 64)]`.
#
# Each SM has a unit for that, the **copy engine** (NVIDIA calls it TMA). It copies the tile while your threads do
# something else. `plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem, loaded)` only *starts* a copy. The call
# returns at once, and x_smem holds garbage until the copy is done. Then the engine **arrives** at the barrier `loaded`.
# `plgpu.barrier_wait(loaded)` waits for that:
#
# ```text
#     threads       | start |..... barrier_wait .....| compute
#     copy engine           |##### 66 x 128 tile ####|
#     loaded                                         ^ arrives
# ```
#
# `x_gmem.at[rows, columns]` names a part of a Ref without loading it. Buffers and barriers are made for each CTA by
# `scratch_types=`. Your kernel gets them after the outputs.


# %%
def smooth_spec(x: Float[Array, "M N"]) -> Float[Array, "M-2 N"]:
    return (x[:-2] + x[1:-1] + x[2:]) / 3


def smooth_kernel(x_gmem, o_gmem, x_smem, loaded, *, bm, bn):
    # x_gmem: (M, N)      o_gmem: (M - 2, N)      x_smem: (bm + 2, bn), garbage      loaded: a barrier
    # The names of the grid are "i" and "j": this CTA computes rows i * bm to i * bm + bm - 1 of the result, and columns
    # j * bn to j * bn + bn - 1.
    pass  # YOUR CODE HERE


def smooth(x: Float[Array, "M N"], *, bm: int = 64, bn: int = 128) -> Float[Array, "M-2 N"]:
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
# Three things in this order: start the copy, wait, compute. 64 rows of the result need 66 rows of `x`. In `x_smem` you
# count from its own first row: the three summands are slices of `x_smem` with `bm` rows each. Where does each of them
# start? The result goes straight from registers to GMEM, as in Puzzle 1.
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
# **Takeaway.** Start, wait, use. Leave out the wait, and a GPU gives you garbage on some days and the right answer on
# others. Wait twice for one copy, and the kernel hangs: the second arrival never comes. Here you get your line instead.
# Try both.

# %%
show(smooth, normal((130, 256)))

# %% [markdown]
# ## Puzzle 4: Back out
#
# **Goal.** GELU of a matrix, tile by tile. The copy engine carries the tiles in both directions; your threads never
# touch GMEM.
#
# ### Theory
#
# A tile of 64 x 128 float32 is 64 values for each of 128 threads to store. The copy engine needs one instruction. So
# put the result into SMEM, and let the engine carry it out. Three calls do that. The table has them in the order of the
# alphabet; yours is another one.
#
# ```text
#     plgpu.commit_smem()              what threads have stored in SMEM so far, the engine sees from now on
#     plgpu.copy_smem_to_gmem(a, b)    starts a copy of a, in SMEM, to b, and returns at once
#     plgpu.wait_smem_to_gmem(n)       waits until at most n such copies are on their way
# ```
#
# Two things can go wrong. The engine reads SMEM on a path of its own: what your threads have just stored may still be
# on its way there. An engine that starts too early carries out what was in `o_smem` before.
#
# And SMEM is borrowed. When your kernel ends, the next CTA moves in. A copy that is still reading `o_smem` would carry
# out a stranger's numbers.


# %%
def gelu_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return jax.nn.gelu(x)


def gelu_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded, *, bm, bn):
    # x_smem, o_smem: (bm, bn)      loaded: a barrier. The names of the grid are "i" and "j", as in Puzzle 3.
    # jax.nn.gelu works in a kernel.
    pass  # YOUR CODE HERE


def tiled_gelu(x: Float[Array, "M N"], *, bm: int = 64, bn: int = 128) -> Float[Array, "M N"]:
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
# The way in is that of Puzzle 3, without the two extra rows. For the way out, store the result in o_smem, and then call
# the three functions of the table, each once. Which of them must lie between your store and the copy? Which must lie
# between the copy and the end? There is no barrier on the way out: the copies are counted.
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
# **Takeaway.** In: a barrier. Out: commit, copy, count down. That is the whole protocol. Every kernel that uses the
# copy engine follows it. Now look at the picture: the threads wait while the engine copies, and the engine waits while
# the threads compute. Somebody is always idle. That is the next puzzle.

# %%
show(tiled_gelu, normal((64, 128)))

# %% [markdown]
# ## Puzzle 5: Two slots
#
# **Goal.** GELU once more. Now a CTA walks down a whole strip of tiles. Write one step of its loop, so that the next
# tile comes in while you compute this one.
#
# ### Theory
#
# With one buffer, copying and computing take turns:
#
# ```text
#     one slot      copy engine   | tile 0 |        | tile 1 |        | tile 2 |
#                   threads                | GELU 0 |        | GELU 1 |        | GELU 2 |
#
#     two slots     copy engine   | tile 0 | tile 1 | tile 2 | ...
#                   threads                | GELU 0 | GELU 1 | GELU 2 |
# ```
#
# With two buffers, two **slots**, the engine fills one while you work in the other. Tile `t` lives in slot `t % 2`.
# Each slot has a barrier of its own, because two copies are on their way at once: `x_smem` is (2, 64, 128), `loaded`
# has two barriers, and `loaded.at[slot]` is one of them.
#
# The result has two slots, too. Before you overwrite `o_smem.at[slot]`, the copy of tile t - 2 must have finished
# reading this slot. `plgpu.wait_smem_to_gmem(1, wait_read_only=True)` waits until at most one copy is still reading
# SMEM: the newest one may go on. (All 128 threads wait at `commit_smem` for one another. So nobody still reads the slot
# that the next tile goes into.)
#
# The loop and the two copies are given. On the machine here, the strip below takes 55,881 cycles with one slot, and
# 38,505 with two. The work is the same. A real H200 says the same: with one CTA for each SM, and a matrix of 32,768 x
# 16,896, one slot takes 1.69 ms, and two take 1.11 ms.


# %%
def load_tile(x_gmem, x_smem, loaded, t):
    # given: starts the copy of tile t into its slot
    columns, slot = pl.ds(lax.axis_index("strip") * 128, 128), lax.rem(t, 2)
    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(t * 64, 64), columns], x_smem.at[slot], loaded.at[slot])


def store_tile(o_smem, o_gmem, t):
    # given: starts the copy of tile t out of its slot
    columns = pl.ds(lax.axis_index("strip") * 128, 128)
    plgpu.copy_smem_to_gmem(o_smem.at[lax.rem(t, 2)], o_gmem.at[pl.ds(t * 64, 64), columns])


# %%
def strip_gelu_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return jax.nn.gelu(x)


def strip_step(t, num_tiles, x_gmem, o_gmem, x_smem, o_smem, loaded):
    # t: the tile of this step      x_smem, o_smem: (2, 64, 128), a slot each for even and odd tiles
    # The copy of tile t was started a step ago. t is traced: lax.rem(t, 2) for t % 2, @pl.when(...) for if.
    pass  # YOUR CODE HERE


def strip_kernel(x_gmem, o_gmem, x_smem, o_smem, loaded):
    num_tiles = x_gmem.shape[0] // 64
    load_tile(x_gmem, x_smem, loaded, 0)

    @pl.loop(0, num_tiles)  # for t in range(num_tiles), inside of a kernel
    def _(t):
        strip_step(t, num_tiles, x_gmem, o_gmem, x_smem, o_smem, loaded)

    plgpu.wait_smem_to_gmem(0)


def strip_gelu(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    slots = plgpu.SMEM((2, 64, 128), x.dtype)
    return plgpu.kernel(
        strip_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // 128,),
        grid_names=("strip",),
        scratch_types=[slots, slots, plgpu.Barrier(num_barriers=2)],
    )(x)


# %%
# Budget for x (512, 128): thread_bytes=0, copies=8, copy_idle=2_000. copy_idle: cycles in which the copy engine has
# nothing to do. With one tile after the other it idles for 18,000 of them. copies: into SMEM; there are 8 tiles.
check("gpu_basics/5", strip_gelu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One step has six lines, in three groups. First the future: which tile can be started now, and is there one? Its slot
# is the one that you left a step ago. Then the present: wait for your own tile, and for a free slot on the way out.
# Then Puzzle 4. The last step must not start a tile that does not exist.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def strip_step(t, num_tiles, x_gmem, o_gmem, x_smem, o_smem, loaded):
#     slot = lax.rem(t, 2)
#
#     @pl.when(____)
#     def _():
#         load_tile(____)
#
#     plgpu.barrier_wait(____)                              # tile t is there
#     plgpu.wait_smem_to_gmem(____, wait_read_only=True)    # this slot of o_smem is free
#     o_smem[slot] = ____
#     ____
#     store_tile(____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def strip_step(t, num_tiles, x_gmem, o_gmem, x_smem, o_smem, loaded):
#     slot = lax.rem(t, 2)
#
#     @pl.when(t + 1 < num_tiles)
#     def _():
#         load_tile(x_gmem, x_smem, loaded, t + 1)
#
#     plgpu.barrier_wait(loaded.at[slot])
#     plgpu.wait_smem_to_gmem(1, wait_read_only=True)
#     o_smem[slot] = jax.nn.gelu(x_smem[slot])
#     plgpu.commit_smem()
#     store_tile(o_smem, o_gmem, t)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** This is double buffering. On a TPU, `pallas_call` did it behind your back; now you have seen what it
# does. In the picture, the bars of the copy engine and of the threads lie above one another, and the engine never
# stops. Does it have to be so much typing? It does not.

# %%
show(strip_gelu, normal((512, 128)))

# %% [markdown]
# ## Puzzle 6: The library's pipeline
#
# **Goal.** Add a bias to each column and apply GELU. Write what happens to one tile, and say which tiles.
#
# ### Theory
#
# Puzzle 5 took you six lines of protocol for one line of arithmetic. `plgpu.emit_pipeline` writes the six: slots,
# barriers, waits, commits. You give it a body for one tile, and BlockSpecs as on a TPU. It is called *inside* of a
# kernel, so each CTA runs a pipeline of its own:
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
# them and writes them. It starts no copy and waits for none. An index map takes the loop's index and returns a block
# number for each dimension: (2, 1) is the third block down, the second one across.
#
# `max_concurrent_steps` is the number of slots. One thing differs from a TPU: a block whose number stays the same is
# copied in again at every step.


# %%
def bias_gelu_spec(x: Float[Array, "M N"], bias: Float[Array, "N"]) -> Float[Array, "M N"]:
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
        max_concurrent_steps=slots,
    )(x_gmem, bias_gmem, o_gmem)


def bias_gelu(
    x: Float[Array, "M N"], bias: Float[Array, "N"], *, bm: int = 64, bn: int = 128, slots: int = 2
) -> Float[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(bias_gelu_kernel, bm=bm, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[1] // bn,),
        grid_names=("strip",),
    )(x, bias)


# %%
# Budget for x (512, 256), bias (256,): gmem_bytes=1_056_768, thread_bytes=0.
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
# **Takeaway.** Three lines of yours, and the protocol of Puzzle 5 is around them. You know what it does, so you can
# read its timeline, and tell where it waits. JAX's own Hopper kernels are built on this function, or on its
# warp-specialised sister. But it asks a question that it does not answer: how many slots?

# %% [markdown]
# ## Puzzle 7: How deep?
#
# **Goal.** An int8 model needs to know how large each activation gets. The kernel is given: it takes the maximum over
# many small tiles. Say how many slots its pipeline needs.
#
# ### Theory
#
# A copy out of GMEM takes a while to begin: on the machine here, 700 cycles pass before its first byte arrives. An SM's
# share of an H100's bandwidth is 3350 GB/s / 132. At 1.83 GHz, that is 13.9 bytes a cycle. A tile of 16 x 128 float32
# has 8192 bytes: they take 590 cycles to come in, after 700 cycles of nothing.
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
# time: bandwidth times latency, 700 * 13.9 bytes. Those tiles are still waiting for their first byte. One slot more
# holds the tile whose bytes are coming in right now. (It is the law of every queue. A bakery that sells 20 loaves an
# hour, and bakes for two hours, has 40 in the oven.)
#
# Your threads need a full slot, too. But they are quick here: they are done before the slot is needed again. So more
# slots buy nothing, and cost SMEM.


# %%
LATENCY_CYCLES = 700  # from the start of a copy to its first byte
BYTES_PER_CYCLE = 13.9  # an SM's share of an H100's bandwidth


def slots_needed(tile_bytes):
    # tile_bytes: the size of a tile, a Python integer
    # Return the smallest number of slots that keeps the copy engine busy, a Python integer.
    pass  # YOUR CODE HERE


# %%
def largest_spec(x: Float[Array, "T R N"]) -> Float[Array, "R N"]:
    return jnp.max(jnp.abs(x), axis=0)


def largest_step(indices, x_smem, so_far):
    return jnp.maximum(so_far, jnp.abs(x_smem[...]))  # what a body returns goes into the next step


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


def largest(x: Float[Array, "T R N"]) -> Float[Array, "R N"]:
    T, R, N = x.shape
    return plgpu.kernel(
        functools.partial(largest_kernel, rows=R, slots=slots_needed(R * 128 * x.dtype.itemsize)),
        out_type=jax.ShapeDtypeStruct((R, N), x.dtype),
        grid=(N // 128,),
        grid_names=("strip",),
    )(x.reshape(T * R, N))


# %%
# Budget for x (32, 16, 256): smem_bytes=25_000, copy_idle=2_000. With one slot too few, the engine idles for 7,239
# cycles; one slot too many needs 33,000 bytes of SMEM. The check asks for other tiles, too.
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
# ## Puzzle 8: Who holds what
#
# **Goal.** RMSNorm of short rows: divide each row by the root of its mean square. A CTA takes 64 rows at once.
#
# ### Theory
#
# Transformers normalise each head's queries: rows of 128, a million of them. With a row a CTA, each thread would hold
# one single value. So take a tile of 64 rows. But which thread holds which element? That is the tile's **layout**, and
# a reduction along one axis depends on it:
#
# ```text
#     Layout.WGMMA: four neighbouring threads share a row
#
#     row 0    | t0 t0 t1 t1 t2 t2 t3 t3 | t0 t0 t1 t1 ...      the sum of row 0 is
#     row 1    | t4 t4 t5 t5 t6 t6 t7 t7 | t4 t4 t5 t5 ...      an exchange of four threads
# ```
#
# It is the layout in which the tensor cores leave a product (wgmma is their instruction), so you will meet it again.
# Pallas finds a layout by itself where it can. For a reduction along one axis of such a tile, it cannot. So you name it
# when you load: `plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)`. From there on it follows: `jnp.sum(x, axis=1)` gives
# 64 sums, held by the same threads, and `along_rows`, which is given, spreads them over their rows again. (`s[:, None]`
# would ask for a layout that does not exist.) Storing needs no name.


# %%
def rms_norm_spec(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)


def along_rows(s, shape):
    # given: s, one number a row, as an array of `shape`
    return lax.broadcast_in_dim(s, shape, (0,))


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


def rms_norm(x: Float[Array, "M N"]) -> Float[Array, "M N"]:
    tile = plgpu.SMEM((64, x.shape[1]), x.dtype)
    return plgpu.kernel(
        rms_norm_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("tile",),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )(x)


# %%
# Budget for x (128, 128): gmem_bytes=131_072, thread_bytes=0.
check("gpu_basics/8", rms_norm)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Load the tile with its layout, once. Then it is NumPy, with two exceptions: `keepdims=True` and `[:, None]` do not
# work, and `along_rows` takes their place. The mean is a sum, divided by a Python integer that `x_smem.shape` knows.
# Spread the root, not the squares: then there are 64 roots and not 8192.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def normed(x_smem):
#     x = plgpu.load(____, layout=____)
#     mean_square = jnp.sum(____, axis=____) / ____
#     return x * along_rows(____, x.shape)
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
#     return x * along_rows(lax.rsqrt(mean_square + 1e-6), x.shape)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** On a GPU an array in a kernel has a shape, a dtype, and a layout. You choose it where the tile enters
# the registers; arithmetic keeps it, reductions shrink it. When the compiler finds "no layout", two parts of your
# kernel ask for different ones.

# %% [markdown]
# ## Puzzle 9: Ragged edges
#
# **Goal.** Log-sum-exp of each column, for every 64 rows of `x`. The number of rows is a multiple of 8, not of 64.
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
# For that you need each element's row. `row_numbers(shape)`, which is given, holds 0 in row 0, 1 in row 1, and so on. A
# sum down the columns works in the layout of Puzzle 8, too. `along_columns` is given.


# %%
def lse_spec(x: Float[Array, "M N"]) -> Float[Array, "M/64 N"]:
    tiles = [x[start : start + 64] for start in range(0, x.shape[0], 64)]
    return jnp.stack([jax.nn.logsumexp(tile, axis=0) for tile in tiles])


def along_columns(s, shape):
    # given: s, one number a column, as an array of `shape`
    return lax.broadcast_in_dim(s, shape, (1,))


def row_numbers(shape):
    # given: the number of each element's row; it needs a layout, as a load does
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


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


def lse(x: Float[Array, "M N"]) -> Float[Array, "M/64 N"]:
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
# Budget for x (200, 256): gmem_bytes=208_896, ctas=8. Rows that do not exist are not copied.
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
#     e = jnp.exp(x - along_columns(____, x.shape))
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
#     e = jnp.exp(x - along_columns(top, x.shape))
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
# For rows of 4096 float32, ptxas (NVIDIA's assembler, which hands out the registers) gives your softmax 80 registers a
# thread. In bfloat16, load and store half as many bytes, but compute in float32: 8 significant bits are not enough for
# a sum of 4096.


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
# At rows of 4096 that is 98% of a copy, and 1.08 times XLA. In the last column the registers spill. (Flash attention's
# online softmax is the way out of that.)

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
