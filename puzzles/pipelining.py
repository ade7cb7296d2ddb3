# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 6}
# ---

# %% [markdown]
# # Pipelining: copies by hand
#
# So far `pallas_call` has copied your blocks. Here you take the copies over, in seven of eight puzzles. You start them,
# you wait for them, and you decide what is computed while they are on their way. The last kernel streams a weight
# matrix through as many slots as you like. That is the work of a TPU that generates one token.
#
# You need basics.py and matmul.py. In a kernel with copies of its own, a mistake often gives the right answer, because
# the copy happened to be fast. Here the copies are followed one by one, and `check` names the line that was lucky.
#
# There is a worked example, and there are puzzles. The example shows the calls for a copy in a kernel that is complete.
# Run it, look at the picture, and change it if you like.

# %%
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32

from pallas_puzzles import check, hint, normal, progress, setup, show

setup()

# %% [markdown]
# ## Worked example: out of HBM and back
#
# `pl.BlockSpec(memory_space=pltpu.HBM)` tells `pallas_call` to leave an array where it is. You get a Ref of all of it,
# and you cannot load from it: a kernel computes on what is in VMEM. So you copy. The **DMA engine** is the part of the
# chip that copies (DMA: direct memory access). It works beside the core, which runs your kernel. A copy takes three
# calls:
#
# ```text
#     copy = pltpu.make_async_copy(from_ref, to_ref, sem)     says what; nothing moves
#     copy.start()                                            the DMA engine begins; your kernel runs on
#     copy.wait()                                             stands still until the copy has arrived
# ```
#
# The **semaphore** `sem` is a counter of bytes. The engine adds to it when data arrives. `wait()` stands still until
# the copy's bytes are there, and takes them off again. So a semaphore can serve one copy after the other. Buffers and
# semaphores are scratch, as in basics.py: `pltpu.VMEM(shape, dtype)` and `pltpu.SemaphoreType.DMA`.
#
# `x_hbm.at[pl.ds(64, 128)]` is a Ref of 128 rows, from row 64 on. It loads nothing, and a copy takes it like any other
# Ref. The kernel below brings these rows into VMEM, and sends them to the result.
#
# To wait, you need not keep the object that you started. Build the same copy again: `wait()` uses only its semaphore
# and its size. The last line of the kernel does so.
#
# From its start to its wait, a copy is **in flight**. It is **exposed** if nothing is computed meanwhile. This kernel
# computes nothing, so both of its copies are exposed: in the picture, the kernel waits. A verdict says how many bytes
# are exposed. It also says how many bytes are in flight while the kernel computes, on average.

# %%
HBM = pl.BlockSpec(memory_space=pltpu.HBM)  # for an array that stays in HBM
DMA = pltpu.SemaphoreType.DMA


def middle_kernel(x_hbm, o_hbm, buf, sem):
    # x_hbm: (M, N) and o_hbm: (128, N), in HBM      buf: (128, N), in VMEM      sem: one semaphore
    copy_in = pltpu.make_async_copy(x_hbm.at[pl.ds(64, 128)], buf, sem)
    copy_in.start()
    copy_in.wait()  # 128 x 256 x 4 = 131,072 bytes
    pltpu.make_async_copy(buf, o_hbm, sem).start()
    pltpu.make_async_copy(buf, o_hbm, sem).wait()  # for the same copy


def middle(x: Float[Array, "M N"]) -> Float[Array, "128 N"]:
    N = x.shape[1]
    return pl.pallas_call(
        middle_kernel,
        out_shape=jax.ShapeDtypeStruct((128, N), x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.VMEM((128, N), x.dtype), DMA],
    )(x)


# Try it: leave out the last wait, and run this cell again. Nobody knows then that anything is in o_hbm.
show(middle, normal((320, 256)))

# %% [markdown]
# ## Puzzle 1: Two copies at once
#
# **Goal.** Compute `silu(a) * b`, where `silu(a)` is `a * sigmoid(a)`, of matrices that stay in HBM. Compute `silu(a)`
# while `b` is on its way.
#
# ### Theory
#
# Why by hand? A `BlockSpec` brings one block of each operand at a time, and only where the block's index changes. Paged
# attention gathers many pages of its cache, from wherever they are. JAX's kernel starts the copies of 4, 8 or 16 pages
# (its tuned sizes for a v6e) before it waits for one.
#
# `start()` returns at once, so your kernel can start a second copy, and it can compute:
#
# ```text
#     DMA     [ a in ]                      [ out ]
#             [ b in            ]
#     core            [ silu(a) ][ times b ]
# ```
#
# Nothing is computed while `a` is on its way, or the result. So these two copies are exposed. The copy of `b` is not:
# it is in flight while you compute.
#
# It matters where the waits are. If you read before the wait, you may read what was there before. If the kernel ends
# before the wait, it may leave half a result.
#
# Each copy has a semaphore of its own here: `a_sem`, `b_sem` and `o_sem`.


# %%
def gate_spec(a: Float32[Array, "M N"], b: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.silu(a) * b


def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
    # a_hbm, b_hbm, o_hbm: (M, N), in HBM      a_buf, b_buf, o_buf: (M, N), in VMEM      a semaphore for each copy
    pass  # YOUR CODE HERE


def whole_gate(a: Float32[Array, "M N"], b: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    buffer = pltpu.VMEM(a.shape, a.dtype)
    return pl.pallas_call(
        whole_gate_kernel,
        out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype),
        in_specs=[HBM, HBM],
        out_specs=HBM,
        scratch_shapes=[buffer, buffer, buffer, DMA, DMA, DMA],
    )(a, b)


# %%
# Budget for a (64, 256), b (64, 256): hbm_bytes=196_608, exposed_bytes=131_072. Each of the three arrays has 65,536
# bytes, and moves once. exposed_bytes: the bytes of those copies during which nothing is computed. Here these are `a`
# and the result. With other sizes, `check` also asks for bytes in flight: those of `b`, during all of `silu(a)`.
check("pipelining/1", whole_gate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A kernel does two things that a copy can spoil: it loads from a buffer, and it ends. Which copy has to be over before
# each of your loads? What can you compute when only `a` is there? You can keep it in `o_buf`: a kernel may load from
# its scratch what it has stored there.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
#     a_in = pltpu.make_async_copy(____, ____, a_sem)
#     b_in = pltpu.make_async_copy(____, ____, b_sem)
#     ____
#     ____
#     a_in.wait()
#     o_buf[...] = ____
#     ____
#     o_buf[...] = ____
#     out = pltpu.make_async_copy(____, ____, o_sem)
#     ____
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
#     a_in = pltpu.make_async_copy(a_hbm, a_buf, a_sem)
#     b_in = pltpu.make_async_copy(b_hbm, b_buf, b_sem)
#     a_in.start()
#     b_in.start()
#     a_in.wait()
#     o_buf[...] = jax.nn.silu(a_buf[...])
#     b_in.wait()
#     o_buf[...] = o_buf[...] * b_buf[...]
#     out = pltpu.make_async_copy(o_buf, o_hbm, o_sem)
#     out.start()
#     out.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Start and wait are two calls, and what lies between them is yours. `pltpu.sync_copy(from_ref, to_ref)`
# is both at once. But all of `a` and `b` has to fit into VMEM. A v5e has 16 GB of HBM, and a kernel gets 16 MiB of VMEM
# unless it asks for more.

# %% [markdown]
# ## Puzzle 2: Tiles through one buffer
#
# **Goal.** Apply SiLU to any number of rows, with room for only one tile of `x` and one of the result.
#
# ### Theory
#
# The kernel runs once, without a grid, and has a loop of its own. `pl.loop` is a `for` whose index is traced, so its
# body is compiled once, however many tiles there are. (A Python `for` is written out: 4096 tiles would be 4096 bodies
# to compile.)
#
# ```text
#     @pl.loop(0, 5)
#     def _(t):             for t in range(5):
#         ...                   ...
# ```
#
# The start of a `pl.ds` may be traced, too. Tile 2 of 64 rows begins at row 128.
#
# ```text
#     HBM    x_hbm  [ 0 | 1 | 2 | 3 | 4 ]     o_hbm  [ 0 | 1 | 2 | 3 | 4 ]
#                         |                                ^
#     VMEM   x_buf      [ 1 ]   -- silu -->   o_buf      [ 1 ]
# ```


# %%
def silu_spec(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return jax.nn.silu(x)


def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    # x_hbm, o_hbm: (M, N), in HBM      x_buf, o_buf: (bm, N), one tile each, in VMEM      bm divides M
    pass  # YOUR CODE HERE


def tiled_silu(x: Float32[Array, "M N"], *, bm: int = 64) -> Float32[Array, "M N"]:
    buffer = pltpu.VMEM((bm, x.shape[1]), x.dtype)
    return pl.pallas_call(
        functools.partial(tiled_silu_kernel, bm=bm),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[buffer, buffer, DMA],
    )(x)


# %%
# Budget for x (320, 256): hbm_bytes=655_360, vmem_bytes=131_072. vmem_bytes: two tiles of 65,536 bytes. With 41 tiles,
# `check` also counts the operations that the kernel consists of.
check("pipelining/2", tiled_silu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The body of the loop takes one tile in, computes, and sends one tile out. How many tiles are there, and at which row
# does tile `t` begin? `x_hbm.shape` is known when the kernel is traced. One semaphore is enough for both copies if one
# of them is over before the other one starts: each wait takes off what its copy has added.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
#     @pl.loop(0, ____)
#     def _(t):
#         rows = pl.ds(____, bm)
#         copy_in = pltpu.make_async_copy(x_hbm.at[rows], ____, sem)
#         ...
#         o_buf[...] = ____
#         copy_out = pltpu.make_async_copy(____, ____, sem)
#         ...
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
#     @pl.loop(0, x_hbm.shape[0] // bm)
#     def _(t):
#         rows = pl.ds(t * bm, bm)
#         copy_in = pltpu.make_async_copy(x_hbm.at[rows], x_buf, sem)
#         copy_in.start()
#         copy_in.wait()
#         o_buf[...] = jax.nn.silu(x_buf[...])
#         copy_out = pltpu.make_async_copy(o_buf, o_hbm.at[rows], sem)
#         copy_out.start()
#         copy_out.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Your kernel now takes arrays of any length. But look at the sentence of the verdict that begins with "It
# moves". All 640 KiB are exposed: your kernel waits for them as soon as they are started. Nothing is copied while you
# compute, either. The picture shows the two taking turns.

# %%
show(tiled_silu, normal((320, 256)))

# %% [markdown]
# ## Puzzle 3: Two slots
#
# **Goal.** Sum the squares of each column, and copy the next tile while you sum this one.
#
# ### Theory
#
# Puzzle 2 read 320 KiB, and all of them were exposed. Here 64 KiB will be. A tile that is computed on and a tile that
# arrives need a buffer each. Two buffers are two **slots**: `x_buf` is now (2, bm, N), and tile `t` lives in slot
# `t % 2`. That is **double buffering**:
#
# ```text
#     one slot     DMA    [tile 0]        [tile 1]        [tile 2]
#                  core           [sum 0]         [sum 1]         [sum 2]
#
#     two slots    DMA    [tile 0][tile 1][tile 2]
#                  core           [sum 0] [sum 1] [sum 2]
# ```
#
# In each step, wait first: there is one semaphore, and it must have one copy at a time. (Puzzle 4 says why.) Then start
# the next tile, into the other slot. Then compute. The first tile is started before the loop. The last step must start
# nothing.
#
# `t % 2` works on a traced `t`. `lax.rem(t, 2)` is the same for t >= 0, and shorter code. `x_buf.at[slot]` is a Ref of
# one slot, (bm, N). `x_buf[slot]` loads it, and `x_buf[slot] = value` stores into it. Write this function inside of
# your kernel:
#
# ```text
#     def copy(t):
#         return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[lax.rem(t, 2)], sem)
# ```
#
# One tile is exposed in any case: while the first one is on its way, there is nothing to compute yet.


# %%
def energy_spec(x: Float32[Array, "M N"]) -> Float32[Array, "1 N"]:
    return jnp.sum(x * x, axis=0, keepdims=True)


def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
    # x_hbm: (M, N), in HBM      o_ref: (1, N), in VMEM, all of the result      bm divides M
    # x_buf: (2, bm, N), two slots      sem: one semaphore
    pass  # YOUR CODE HERE


def energy(x: Float32[Array, "M N"], *, bm: int = 64) -> Float32[Array, "1 N"]:
    N = x.shape[1]
    return pl.pallas_call(
        functools.partial(energy_kernel, bm=bm),
        out_shape=jax.ShapeDtypeStruct((1, N), x.dtype),
        in_specs=[HBM],
        scratch_shapes=[pltpu.VMEM((2, bm, N), x.dtype), DMA],
    )(x)


# %%
# Budget for x (320, 256): hbm_bytes=328_704, exposed_bytes=65_536. One tile has 65,536 bytes. With other sizes, `check`
# also asks for bytes in flight: one tile, during all steps but the last.
check("pipelining/3", energy)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the steps down for three tiles, one line for each call, and mark for each line which copies are on their way. If
# a start and its wait have no sum between them, that copy is exposed. How many copies are on their way when you wait?
# One semaphore is enough as long as one copy is on its way. `o_ref` holds garbage before the first tile: you may zero
# it while tile 0 is on its way.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
#     num_tiles = ____
#
#     def copy(t):
#         return pltpu.make_async_copy(____, x_buf.at[____], sem)
#
#     ____
#     o_ref[...] = ____
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(____)
#         def _():
#             ____
#
#         x = x_buf[____]
#         o_ref[...] += ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
#     num_tiles = x_hbm.shape[0] // bm
#
#     def copy(t):
#         return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[lax.rem(t, 2)], sem)
#
#     copy(0).start()
#     o_ref[...] = jnp.zeros_like(o_ref)
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(t + 1 < num_tiles)
#         def _():
#             copy(t + 1).start()
#
#         x = x_buf[lax.rem(t, 2)]
#         o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One tile is exposed instead of all of them, for one more buffer. A `BlockSpec` does the same for you:
# two buffers for each operand that is cut into blocks, and the next block on its way while your kernel runs.
#
# But one tile ahead is not enough on a real chip. A copy of 64 KiB into a v5e's VMEM takes 0.85 us, by the simulator in
# the TPU compiler (libtpu 0.0.50). In the first 0.76 us, nothing arrives. With one tile on its way at a time, you pay
# these 0.76 us for each tile. If two are on their way, their 0.76 us pass at the same time. What counts is **bytes in
# flight**.

# %%
show(energy, normal((320, 256)))

# %% [markdown]
# ## Puzzle 4: A semaphore per slot
#
# **Goal.** Find the largest absolute value of each column (the scale for int8). Keep *two* tiles on their way while you
# compute.
#
# ### Theory
#
# With three slots, one tile is read while two are on their way. But then one semaphore is not enough:
#
# ```text
#     start tile 1  --+
#     start tile 2  --+-->  sem: 65,536 bytes have arrived. Whose?
#     wait for tile 1       returns, perhaps because tile 2 was faster
# ```
#
# A semaphore counts bytes. It does not know which copy they are from, and nothing says in which order copies arrive. If
# each slot has a semaphore of its own, there is one copy on it at a time. `sems` has three: `sems.at[slot]` is one.
#
# A kernel with one semaphore for all of them gives the right answer on most days.


# %%
def absmax_spec(x: Float32[Array, "M N"]) -> Float32[Array, "1 N"]:
    return jnp.max(jnp.abs(x), axis=0, keepdims=True)


def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
    # x_hbm: (M, N), in HBM, at least two tiles      o_ref: (1, N), in VMEM      bm divides M
    # x_buf: (3, bm, N), three slots      sems: three semaphores
    pass  # YOUR CODE HERE


def absmax(x: Float32[Array, "M N"], *, bm: int = 64) -> Float32[Array, "1 N"]:
    N = x.shape[1]
    return pl.pallas_call(
        functools.partial(absmax_kernel, bm=bm),
        out_shape=jax.ShapeDtypeStruct((1, N), x.dtype),
        in_specs=[HBM],
        scratch_shapes=[pltpu.VMEM((3, bm, N), x.dtype), DMA((3,))],
    )(x)


# %%
# Budget for x (384, 256): hbm_bytes=394_240, exposed_bytes=65_536, in_flight_bytes=98_304. in_flight_bytes is the one
# budget that is a minimum: on average, at least so many bytes have to be on their way while you compute. Here it is 1.5
# tiles: 2, 2, 2, 2, 1, 0.
check("pipelining/4", absmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from Puzzle 3. How many copies start before the loop now? In step `t`, which slot was read last in step `t - 1`?
# That is the free one. Which tile belongs there, `t + 1` or `t + 2`? Copy, slot and semaphore go together, so let one
# function choose all three. Zeros are a good start for this maximum: no absolute value is smaller.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
#     ...
#     def copy(t):
#         slot = lax.rem(t, ____)
#         return pltpu.make_async_copy(____, x_buf.at[slot], ____)
#
#     copy(0).start()
#     ____
#     o_ref[...] = ____
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(____)
#         def _():
#             copy(____).start()
#
#         x = ____
#         o_ref[...] = jnp.maximum(____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
#     num_tiles = x_hbm.shape[0] // bm
#
#     def copy(t):
#         slot = lax.rem(t, 3)
#         return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[slot], sems.at[slot])
#
#     copy(0).start()
#     copy(1).start()
#     o_ref[...] = jnp.zeros_like(o_ref)
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(t + 2 < num_tiles)
#         def _():
#             copy(t + 2).start()
#
#         x = x_buf[lax.rem(t, 3)]
#         o_ref[...] = jnp.maximum(o_ref[...], jnp.max(jnp.abs(x), axis=0, keepdims=True))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One copy at a time on each semaphore: then a wait says what has arrived. In JAX's paged attention many
# small copies share a slot's semaphore, one for each page. That is right because the kernel waits for all of them
# before it reads any.

# %%
show(absmax, normal((384, 256)))

# %% [markdown]
# ## Puzzle 5: Output slots
#
# **Goal.** Write an outer product, `a * b`, and copy each tile out while you compute the next one. Write one step.
#
# ### Theory
#
# With one slot on the way out, this kernel has 320 KiB exposed, and with two 64 KiB. On the way in, a copy writes your
# slot. On the way out, it *reads* it. So after `start()` the slot is not yours. If you store into it now, the copy may
# take the new values, or half of each.
#
# ```text
#     core   [fill slot 0][fill slot 1][fill slot 0]        slot 0 again: has tile 0 left it?
#     DMA                 [ out 0     ][ out 1     ][ out 2     ]
# ```
#
# Before a step fills its slot, the copy that used this slot has to be over. The copy out of the other slot may go on.
# Compute behind that wait, not in front of it: until the slot is free, a result would have to stay in registers, and a
# large tile does not fit into them.
#
# The first steps have nothing to wait for: if no copy was started on a semaphore, a wait on it never ends.
#
# `store_tile(o_hbm, o_buf, sems, t, bm)` builds the copy of tile `t` out of its slot: give it `.start()` or `.wait()`.
# The loop is given, and so are the last two waits. (Puzzle 6 is about those.)


# %%
def store_tile(o_hbm, o_buf, sems, t, bm):
    # given: the copy of tile t out of its slot
    slot = lax.rem(t, 2)
    return pltpu.make_async_copy(o_buf.at[slot], o_hbm.at[pl.ds(t * bm, bm)], sems.at[slot])


def outer_spec(a: Float32[Array, "M 1"], b: Float32[Array, "1 N"]) -> Float32[Array, "M N"]:
    return a * b


def outer_step(t, a_ref, b_ref, o_hbm, o_buf, sems, *, bm):
    # t: the tile of this step      a_ref: (M, 1), b_ref: (1, N), in VMEM      o_hbm: (M, N), in HBM
    # o_buf: (2, bm, N), two slots      a_ref[pl.ds(start, bm)] loads bm rows of a
    pass  # YOUR CODE HERE


def outer_kernel(a_ref, b_ref, o_hbm, o_buf, sems, *, bm):
    num_tiles = o_hbm.shape[0] // bm  # at least two

    @pl.loop(0, num_tiles)
    def _(t):
        outer_step(t, a_ref, b_ref, o_hbm, o_buf, sems, bm=bm)

    store_tile(o_hbm, o_buf, sems, num_tiles - 2, bm).wait()
    store_tile(o_hbm, o_buf, sems, num_tiles - 1, bm).wait()


def outer(a: Float32[Array, "M 1"], b: Float32[Array, "1 N"], *, bm: int = 64) -> Float32[Array, "M N"]:
    M, N = a.shape[0], b.shape[1]
    return pl.pallas_call(
        functools.partial(outer_kernel, bm=bm),
        out_shape=jax.ShapeDtypeStruct((M, N), a.dtype),
        out_specs=HBM,
        scratch_shapes=[pltpu.VMEM((2, bm, N), a.dtype), DMA((2,))],
    )(a, b)


# %%
# Budget for a (320, 1), b (1, 256): hbm_bytes=329_984, exposed_bytes=65_536. Now it is the last tile that is exposed.
check("pipelining/5", outer)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three parts: make room, fill, send. Only the first one has a condition. Which tile was in your slot before, and from
# which step on is there such a tile? Each copy can be waited for only once. The kernel waits for the last two after the
# loop, so your steps must leave those two alone, and wait for all the others.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def outer_step(t, a_ref, b_ref, o_hbm, o_buf, sems, *, bm):
#     slot = ____
#
#     @pl.when(____)
#     def _():
#         store_tile(____).wait()
#
#     o_buf[slot] = a_ref[pl.ds(____)] * ____
#     store_tile(____).start()
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def outer_step(t, a_ref, b_ref, o_hbm, o_buf, sems, *, bm):
#     slot = lax.rem(t, 2)
#
#     @pl.when(t >= 2)
#     def _():
#         store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
#
#     o_buf[slot] = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
#     store_tile(o_hbm, o_buf, sems, t, bm).start()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Coming in, you wait before you read. Going out, you wait before you *write again*. Each wait in the loop
# is for a copy that was started two steps ago. The kernel has computed a whole tile meanwhile, so it waits for less
# time.

# %%
show(outer, normal((320, 1)), normal((1, 256)))

# %% [markdown]
# ## Puzzle 6: The drain
#
# **Goal.** SiLU once more, with two slots on each side, for any number of tiles: also for one. Write all of it.
#
# ### Theory
#
# In Puzzle 2 all 640 KiB were exposed. With two slots on each side, 128 KiB are: the first tile in, and the last one
# out.
#
# A pipeline has three parts. The **prologue** starts what the first step needs. The loop is the steady state. When the
# loop ends, the last copies out are still on their way, and a kernel must not end before them: the **drain** waits for
# them.
#
# ```text
#                prologue |             loop              | drain
#     in         [  0  ]  | [  1  ][  2  ][  3  ]         |
#     compute             | [  0  ][  1  ][  2  ][  3  ]  |
#     out                 |        [  0  ][  1  ][  2  ]  | [  3  ]
#     wait for out        |                  0      1     |  2  3
# ```
#
# How many copies does the drain wait for? With two output slots, the loop has waited for all but the last two. If there
# is only one tile, there is only one copy, and a second wait never ends. `num_tiles` is a Python integer, so the drain
# can be a Python loop.
#
# Both sides can have copies on their way at once: `in_sems` and `out_sems` have two semaphores each.


# %%
def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
    # x_hbm, o_hbm: (M, N), in HBM      x_buf, o_buf: (2, bm, N), two slots each      bm divides M
    pass  # YOUR CODE HERE


def streamed_silu(x: Float32[Array, "M N"], *, bm: int = 64) -> Float32[Array, "M N"]:
    slots = pltpu.VMEM((2, bm, x.shape[1]), x.dtype)
    return pl.pallas_call(
        functools.partial(streamed_silu_kernel, bm=bm),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[slots, slots, DMA((2,)), DMA((2,))],
    )(x)


# %%
# Budget for x (320, 256): hbm_bytes=655_360, exposed_bytes=131_072. That is two tiles. In Puzzle 2 it was all ten.
check("pipelining/6", streamed_silu)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You have all the parts: the way in from Puzzle 3, the way out from Puzzle 5. Write `load(t)` and `store(t)`, which
# only build a copy. What has to be over before you may compute tile `t` into its slot? That is two waits, and their
# order does not matter, because each side has its own semaphores. For which `t` has nobody waited for `store(t)` when
# the loop ends? Try 5 tiles, 2 and 1.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
#     ...
#     def load(t):
#         ...
#
#     def store(t):
#         ...
#
#     load(0).start()
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         @pl.when(t + 1 < num_tiles)
#         def _():
#             ____
#
#         load(t).wait()
#
#         @pl.when(t >= 2)
#         def _():
#             ____
#
#         slot = lax.rem(t, 2)
#         o_buf[slot] = jax.nn.silu(x_buf[slot])
#         store(t).start()
#
#     for t in range(____, num_tiles):
#         ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
#     num_tiles = x_hbm.shape[0] // bm
#
#     def load(t):
#         slot = lax.rem(t, 2)
#         return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[slot], in_sems.at[slot])
#
#     def store(t):
#         slot = lax.rem(t, 2)
#         return pltpu.make_async_copy(o_buf.at[slot], o_hbm.at[pl.ds(t * bm, bm)], out_sems.at[slot])
#
#     load(0).start()
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         @pl.when(t + 1 < num_tiles)
#         def _():
#             load(t + 1).start()
#
#         load(t).wait()
#
#         @pl.when(t >= 2)
#         def _():
#             store(t - 2).wait()
#
#         slot = lax.rem(t, 2)
#         o_buf[slot] = jax.nn.silu(x_buf[slot])
#         store(t).start()
#
#     for t in range(max(0, num_tiles - 2), num_tiles):
#         store(t).wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** This is what `pallas_call` has done for you since basics.py Puzzle 2: prologue, loop, drain, two slots
# for each operand that is cut into blocks. You have written it, so you can change it. For example, a loop that waits
# for store `t - 1` right after it has started store `t` overlaps as much, and leaves one wait for the drain.

# %%
show(streamed_silu, normal((320, 256)))

# %% [markdown]
# ## Puzzle 7: The library's pipeline
#
# **Goal.** Compute `silu(a) * b` of Puzzle 1, the gate of a SwiGLU layer, tile by tile, without a copy of your own.
#
# ### Theory
#
# The solution of Puzzle 6 has 23 lines, and one of them computes. `pltpu.emit_pipeline` does the work of the others.
# You call it *inside* of a kernel, on Refs in HBM:
#
# ```text
#     pltpu.emit_pipeline(body, grid=..., in_specs=[...], out_specs=[...])(a_hbm, b_hbm, o_hbm)
#
#     kernel, runs once
#        +-- emit_pipeline: a loop over its own grid
#               +-- body(a_ref, b_ref, o_ref): tiles in VMEM, as in any kernel of basics.py
# ```
#
# `grid` and the `BlockSpec`s are those of `pallas_call`: a block shape and an index map. `emit_pipeline` makes the
# slots and the semaphores, and runs prologue, loop and drain.
#
# Why not use the outer `pallas_call`? A kernel can run several pipelines. It can read from a table which part of an
# array each one goes over, and it can start copies to other chips in between.


# %%
def gate_tile(a_ref, b_ref, o_ref):
    # the body of the pipeline      a_ref, b_ref, o_ref: (bm, bn), in VMEM
    pass  # YOUR CODE HERE


def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
    # a_hbm, b_hbm, o_hbm: (M, N), in HBM      bm divides M, bn divides N
    pass  # YOUR CODE HERE


def gate(a: Float32[Array, "M N"], b: Float32[Array, "M N"], *, bm: int = 64, bn: int = 128) -> Float32[Array, "M N"]:
    return pl.pallas_call(
        functools.partial(gate_kernel, bm=bm, bn=bn),
        out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype),
        in_specs=[HBM, HBM],
        out_specs=HBM,
    )(a, b)


# %%
# Budget for a (192, 384), b (192, 384): hbm_bytes=884_736, vmem_bytes=196_608, branches=0. vmem_bytes: two slots of
# (64, 128) for each of the three arrays. branches: no pl.when and no loop of yours.
check("pipelining/7", gate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What does `i` count, and what `j`? How much VMEM would tiles of whole rows take, with two slots for each array? The
# three arrays can share one BlockSpec. `emit_pipeline(...)` alone copies nothing: it returns a function, and you call
# that with the Refs.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def gate_tile(a_ref, b_ref, o_ref):
#     o_ref[...] = ____
#
#
# def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
#     M, N = a_hbm.shape
#     tile = pl.BlockSpec(____, lambda i, j: ____)
#     pipeline = pltpu.emit_pipeline(gate_tile, grid=____, in_specs=[____], out_specs=[tile])
#     pipeline(____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gate_tile(a_ref, b_ref, o_ref):
#     o_ref[...] = jax.nn.silu(a_ref[...]) * b_ref[...]
#
#
# def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
#     M, N = a_hbm.shape
#     tile = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
#     pipeline = pltpu.emit_pipeline(gate_tile, grid=(M // bm, N // bn), in_specs=[tile, tile], out_specs=[tile])
#     pipeline(a_hbm, b_hbm, o_hbm)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Seven lines instead of 23. You know what the library's lines do, so you know when they are not enough:
# when the next copy depends on data, or when the order of copies is the point.

# %%
show(gate, normal((192, 384)), normal((192, 384)))

# %% [markdown]
# ## Puzzle 8: Deeper buffers
#
# **Goal.** Multiply a few rows by a large weight matrix: `x @ w`, where `w` streams from HBM through `slots` slots.
# Keep `slots - 1` tiles on their way.
#
# ### Theory
#
# A model that generates one token for each of 16 users multiplies 16 rows by all of its weights. For each byte of a
# bfloat16 weight that is 16 FLOPs. A v5e could do 240. So the copies set the time. All you can do is keep the memory
# busy. With one tile of 64 KiB in 0.85 us, as in Puzzle 3, a v5e reads 77 GB/s. Its memory has 820. How many bytes have
# to be on their way?
#
# ```text
#     bytes in flight = bandwidth x time of a copy = 820 GB/s x 0.85 us = 697 KB
# ```
#
# That is eleven tiles of 64 KiB on their way, and one more is read: twelve slots. So the number of slots becomes an
# argument, and tile `t` is in slot `t % slots`.
#
# `emit_pipeline` does this for a `BlockSpec` with `pipeline_mode=pl.Buffered(12)`. Write it once yourself, so that you
# know what the 12 buys.
#
# `x` is small and lies in VMEM. Tile `t` of `w` has rows `t * bk` to `t * bk + bk`; it meets the same *columns* of `x`:
# `x_ref[:, pl.ds(start, bk)]`. As in matmul.py, the product of bfloat16 is summed in float32.


# %%
def stream_spec(x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"]) -> Float[Array, "M N"]:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
    # x_ref: (M, K), in VMEM      w_hbm: (K, N), in HBM      o_ref: (M, N), float32, in VMEM      bk divides K
    # w_buf: (slots, bk, N)      sems: one for each slot      slots is a Python integer, 2 or more
    pass  # YOUR CODE HERE


def stream(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "K N"], *, bk: int = 128, slots: int = 4
) -> Float[Array, "M N"]:
    M, N = x.shape[0], w.shape[1]
    return pl.pallas_call(
        functools.partial(stream_kernel, bk=bk, slots=slots),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), HBM],
        scratch_shapes=[pltpu.VMEM((slots, bk, N), w.dtype), DMA((slots,))],
    )(x, w)


# %%
# Budget for x (16, 1024), w (1024, 256): hbm_bytes=573_440, exposed_bytes=65_536, in_flight_bytes=147_456. Of 8 tiles,
# 3, 3, 3, 3, 3, 2, 1 and 0 can be on their way while one is multiplied: 2.25 tiles of 65,536 bytes, on average.
check("pipelining/8", stream)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Puzzle 4 is this kernel for `slots = 3`. Where does a 2 or a 3 stand there, and what is it in terms of `slots`? Now
# take 6 slots and 2 tiles: which copies may the prologue start? A copy of a tile that does not exist reads past the end
# of `w`, and nobody waits for it. `min` of two Python integers is a Python integer, so it can be a bound of `range`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
#     ...
#     def copy(t):
#         slot = lax.rem(t, ____)
#         return ____
#
#     for t in range(____):
#         copy(t).start()
#     o_ref[...] = ____
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(____)
#         def _():
#             ____
#
#         x = x_ref[:, ____]
#         o_ref[...] += jnp.dot(x, ____, preferred_element_type=jnp.float32)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
#     num_tiles = w_hbm.shape[0] // bk
#
#     def copy(t):
#         slot = lax.rem(t, slots)
#         return pltpu.make_async_copy(w_hbm.at[pl.ds(t * bk, bk)], w_buf.at[slot], sems.at[slot])
#
#     for t in range(min(slots - 1, num_tiles)):
#         copy(t).start()
#     o_ref[...] = jnp.zeros_like(o_ref)
#
#     @pl.loop(0, num_tiles)
#     def _(t):
#         copy(t).wait()
#
#         @pl.when(t + slots - 1 < num_tiles)
#         def _():
#             copy(t + slots - 1).start()
#
#         x = x_ref[:, pl.ds(t * bk, bk)]
#         o_ref[...] += jnp.dot(x, w_buf[lax.rem(t, slots)], preferred_element_type=jnp.float32)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The depth of a pipeline is one number, and it follows from bandwidth, latency and the size of a tile.
# Here twelve slots take 768 KiB of VMEM, and 12 semaphores.

# %%
show(stream, normal((16, 1024), "bfloat16"), normal((1024, 256), "bfloat16"))

# %% [markdown]
# ## What you built
#
# You built a kernel that keeps as many copies on their way as the memory needs, and that is right in whatever order
# they arrive. You can say what each wait is for:
#
# - **Before a read:** the copy into this slot has arrived. Each slot has its own semaphore, so it is this copy and no
#   other.
# - **Before a refill:** what was in the slot has been read, or has left it.
# - **Before the end:** every copy that was started has been waited for.
#
# The next step is another chip, in distributed.py. `pltpu.make_async_remote_copy` takes that chip's number, and a
# second semaphore: one says that the data has left, the other one that it has arrived.
#
# **Read next.** `jax.experimental.pallas.ops.tpu.ragged_paged_attention` in JAX starts the copies of the next pages
# before it computes on these, with two slots. The page "Software Pipelining" in the Pallas documentation derives the
# drawing of Puzzle 6. `emit_pipeline` itself is Python in `jax/_src/pallas/mosaic/pipeline.py`: prologue, loop and
# drain, for any number of operands.

# %%
progress()
