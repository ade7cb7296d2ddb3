# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 8}
# ---

# %% [markdown]
# # GPU matmul: from one wgmma to a warp-specialised kernel
#
# Matrix products are what a GPU is bought for. An H100 computes 67 TFLOP/s in float32 with its ordinary instructions,
# and 989 TFLOP/s in bfloat16 with its **tensor cores**. These puzzles take you from one instruction of the tensor
# cores to a kernel in which a producer, two consumers and the tensor cores all work at the same time. JAX's own Hopper
# kernels have this form.
#
# You need gpu_basics.py: CTAs, SMEM, the copy engine, barriers, slots. You need no GPU. The machine in this package
# runs your kernels, and NVIDIA's compiler can look at them on your laptop. On a machine with an H100 or H200, the same
# cells run compiled.
#
# As in gpu_basics.py, there are puzzles, and worked examples, which are complete. A puzzle is a function whose body
# says `YOUR CODE HERE`. Fill it in and run the `check` below it.

# %%
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_puzzles import check, gpu_report, normal, progress, setup, show, unwritten

setup("gpu")  # a Hopper or Blackwell GPU if there is one, else this package's machine

# %% [markdown]
# ## Worked example: an accumulator
#
# The instruction of the tensor cores is called **wgmma**: warpgroup matrix multiply-accumulate. A warpgroup is 128
# threads. They issue it together. It reads two tiles from SMEM, and adds their product to an **accumulator** in
# registers:
#
# ```text
#                         b_smem (64, 128)
#                       +----------------+
#                       |    bfloat16    |           acc += a_smem @ b_smem
#                       +----------------+
#     a_smem (64, 64)   +----------------+
#     +------------+    |      acc       |           float32, in the registers
#     |  bfloat16  |    |   (64, 128)    |           of 128 threads
#     +------------+    +----------------+
# ```
#
# `plgpu.ACC((64, 128))` makes an accumulator: float32, and zero at the start. It exists only inside of a function that
# you give to `pl.run_scoped`. That calls the function with the accumulator, and returns what it returns.
#
# `plgpu.wgmma(acc, a_smem, b_smem)` adds a product. The rows of `a` are a multiple of 64; one instruction takes 64 of
# them. `b` has at most 256 columns. `acc[...]` waits for the product and gives you its values. Each copy has a barrier
# of its own here.


# %%
def one_product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, a_loaded, b_loaded):
    plgpu.copy_gmem_to_smem(a_gmem, a_smem, a_loaded)
    plgpu.copy_gmem_to_smem(b_gmem, b_smem, b_loaded)
    plgpu.barrier_wait(a_loaded)
    plgpu.barrier_wait(b_loaded)

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 128)))


def one_product(a: Float[Array, "64 64"], b: Float[Array, "64 128"]) -> Float[Array, "64 128"]:
    a_smem, b_smem = plgpu.SMEM(a.shape, a.dtype), plgpu.SMEM(b.shape, b.dtype)
    return plgpu.kernel(
        one_product_kernel,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        scratch_types=[a_smem, b_smem, plgpu.Barrier(), plgpu.Barrier()],
    )(a, b)


# Try it: leave out one of the two waits, and run this cell again.
show(one_product, normal((64, 64), "bfloat16"), normal((64, 128), "bfloat16"))

# %% [markdown]
# ## Puzzle 1: One wgmma
#
# **Goal.** Multiply two bfloat16 matrices. Each CTA computes 64 rows and `bn` columns of the product, all of K at
# once.
#
# ### Theory
#
# One CTA has multiplied one pair of tiles. For larger matrices, start a CTA for each tile of the result:
#
# ```text
#                            b (K, N)
#                     |    | bn |    |    |          this CTA copies 64 rows of a,
#                     |    |####|    |    |          and bn columns of b
#
#       a (M, K)
#     |#########| 64  |    | ## |    |    |          and stores where they cross
#     |         |     |    |    |    |    |
# ```
#
# The tiles may be longer than 64 along K: `plgpu.wgmma` issues as many instructions as K needs.
#
# Two copies come in, and one barrier is enough for both. A barrier counts: `plgpu.Barrier(num_arrivals=2)` opens when
# two copies have arrived at it. So you give `loaded` to both copies, and wait for it once.


# %%
def product_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
    # a_gmem: (M, K)      b_gmem: (K, N)      o_gmem: (M, N), float32
    # a_smem: (64, K)     b_smem: (K, bn)     loaded: a barrier of two arrivals
    # The names of the grid are "i", for 64 rows each, and "j", for bn columns each.
    pass  # YOUR CODE HERE


def product(a: Float[Array, "M K"], b: Float[Array, "K N"], *, bn: int = 128) -> Float[Array, "M N"]:
    (M, K), N = a.shape, b.shape[1]
    return plgpu.kernel(
        functools.partial(product_kernel, bn=bn),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // 64, N // bn),
        grid_names=("i", "j"),
        scratch_types=[
            plgpu.SMEM((64, K), a.dtype),
            plgpu.SMEM((K, bn), b.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (192, 128), b (128, 256): gmem_bytes=491_520, ctas=6. Six CTAs copy 16 KiB of a and 32 KiB of b each.
check("gpu_matmul/1", product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Five steps: two copies, one wait, one product, one store. Which rows of `a` does this CTA need, and which columns of
# `b`? The result belongs where those rows and those columns cross. The product itself is a function of two lines: it
# takes the accumulator, multiplies into it, and returns its values. The store is outside of it.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
#     rows = pl.ds(____, 64)
#     columns = pl.ds(____, bn)
#     plgpu.copy_gmem_to_smem(a_gmem.at[____], a_smem, loaded)
#     plgpu.copy_gmem_to_smem(b_gmem.at[____], b_smem, loaded)
#     ____
#
#     def multiply(acc):
#         plgpu.wgmma(____)
#         return ____
#
#     o_gmem[rows, columns] = pl.run_scoped(multiply, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
#     rows = pl.ds(lax.axis_index("i") * 64, 64)
#     columns = pl.ds(lax.axis_index("j") * bn, bn)
#     plgpu.copy_gmem_to_smem(a_gmem.at[rows], a_smem, loaded)
#     plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)
#     plgpu.barrier_wait(loaded)
#
#     def multiply(acc):
#         plgpu.wgmma(acc, a_smem, b_smem)
#         return acc[...]
#
#     o_gmem[rows, columns] = pl.run_scoped(multiply, plgpu.ACC((64, bn)))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One line, and 128 threads multiply 15 times faster than their ordinary instructions could. wgmma takes
# its operands from SMEM. So the rest of this notebook is about one thing: how to have the next tiles there in time.

# %% [markdown]
# ## Worked example: banks
#
# SMEM has 32 **banks**. Each one gives 4 bytes, a word, at a time: together 128 bytes. The address decides: bytes 0 to
# 3 are in bank 0, bytes 4 to 7 in bank 1, and byte 128 is in bank 0 again. Two words of the same bank come one after
# the other: they need two turns. Each turn beyond the first is a **bank conflict**.
#
# `transforms=` says how SMEM holds a tile. With `TilingTransform((8, n))` it holds pieces of 8 rows and n columns. In
# float32, the rows of such a piece lie `4 * n` bytes apart. `plgpu.Layout.WGMMA` is the layout of a product's result.
# To load a tile in this layout, the threads take 32 bytes of each of four rows at once:
#
# ```text
#     each character is four banks
#
#     n = 32: 128 bytes apart       n = 16: 64 bytes apart        n = 8: 32 bytes apart
#
#     row 0   |##......|            row 0   |##......|            row 0   |##......|
#     row 1   |##......|            row 1   |....##..|            row 1   |..##....|
#     row 2   |##......|            row 2   |##......|            row 2   |....##..|
#     row 3   |##......|            row 3   |....##..|            row 3   |......##|
#              four turns                    two turns                     one turn
# ```


# %%
def sums_kernel(x_gmem, o_gmem, x_smem, loaded):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.barrier_wait(loaded)
    # optimized=False: a load that has conflicts is allowed, too
    x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA, optimized=False)
    o_gmem[...] = jnp.sum(x, axis=1)


def sums(x: Float[Array, "64 N"], *, columns: int) -> Float[Array, "64"]:
    return plgpu.kernel(
        sums_kernel,
        out_type=jax.ShapeDtypeStruct((64,), x.dtype),
        scratch_types=[
            plgpu.SMEM(x.shape, x.dtype, transforms=(plgpu.TilingTransform((8, columns)),)),
            plgpu.Barrier(),
        ],
    )(x)


# The last lines count the conflicts. Try it: 16 columns, then 8.
show(sums, normal((64, 32)), columns=32)

# %% [markdown]
# ## Puzzle 2: What a swizzle is
#
# **Goal.** Compute how long SMEM takes to serve the tensor cores, and choose the swizzle that makes it fast.
#
# ### Theory
#
# The tensor cores fetch 16 bytes (a **chunk**: four banks) from each of eight rows. With rows of 128 bytes, all eight
# chunks lie in the same banks: eight turns.
#
# ```text
#     rows of 128 bytes                          the same, swizzled
#
#     row 0   [0][1][2][3][4][5][6][7]           [0][1][2][3][4][5][6][7]
#     row 1   [0][1][2][3][4][5][6][7]           [1][0][3][2][5][4][7][6]
#     row 2   [0][1][2][3][4][5][6][7]           [2][3][0][1][6][7][4][5]
#     row 3   [0][1][2][3][4][5][6][7]           [3][2][1][0][7][6][5][4]
#              ^ chunk 0 of each row              chunk 0: other banks in each row
# ```
#
# A **swizzle** of 128 bytes puts chunk `c` of row `r` at position `c ^ (r % 8)`. Eight rows, eight different positions:
# one turn. The copy engine swizzles on the way in, and wgmma knows how to read it. There are swizzles of 128, 64 and 32
# bytes. A row is cut into pieces of that many bytes, so the swizzle has to divide it. The widest one needs the fewest
# pieces.
#
# `SwizzleTransform(128)` asks for it, after a `TilingTransform((8, n))` in which `n` elements are 128 bytes. wgmma
# wants the same swizzle for both operands.


# %%
def swizzled_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def turns(row_bytes):
    # row_bytes: how far apart the rows of a tile lie in SMEM without a swizzle: a power of 2, at least 16
    # Return how many turns SMEM takes for the first chunk of each of eight rows.
    pass  # YOUR CODE HERE


def swizzle_for(row_bytes):
    # row_bytes: the size of a row, a multiple of 32
    # Return the widest swizzle that divides it: 128, 64 or 32.
    pass  # YOUR CODE HERE


def tiles(row_bytes, dtype):
    # given: what plgpu.SMEM(..., transforms=) takes
    swizzle = swizzle_for(row_bytes)
    return (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))


def swizzled_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    columns = pl.ds(lax.axis_index("j") * bn, bn)
    plgpu.copy_gmem_to_smem(a_gmem.at[rows], a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)
    plgpu.barrier_wait(loaded)

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    o_gmem[rows, columns] = pl.run_scoped(multiply, plgpu.ACC((64, bn)))


def swizzled(a: Float[Array, "M K"], b: Float[Array, "K N"], *, bn: int = 128) -> Float[Array, "M N"]:
    (M, K), N = a.shape, b.shape[1]
    how = tiles(K * a.dtype.itemsize, a.dtype)
    return plgpu.kernel(
        functools.partial(swizzled_kernel, bn=bn),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // 64, N // bn),
        grid_names=("i", "j"),
        scratch_types=[
            plgpu.SMEM((64, K), a.dtype, transforms=how),
            plgpu.SMEM((K, bn), b.dtype, transforms=how),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (128, 64), b (64, 256): bank_conflicts=0. A conflict is a turn beyond the first. The check asks for rows
# of 64, 96, 192 and 256 bytes, too.
check("gpu_matmul/2", swizzled)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Row `r` begins at byte `r * row_bytes`. Where in the 128 bytes of the banks is that? With rows of 64 bytes, two rows
# lie side by side before the banks begin again. How many rows is that with 32 bytes, and with 256? With 16 bytes, all
# eight rows come in one turn. For the second function, 96 is the number to try: 64 fits into it, and does not divide
# it.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def turns(row_bytes):
#     rows_in_a_turn = 1
#     while rows_in_a_turn * row_bytes % ____:
#         rows_in_a_turn *= 2
#     return ____
#
#
# def swizzle_for(row_bytes):
#     for swizzle in ____:
#         if ____:
#             return swizzle
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def turns(row_bytes):
#     rows_in_a_turn = 1
#     while rows_in_a_turn * row_bytes % 128:
#         rows_in_a_turn *= 2
#     return 8 // rows_in_a_turn
#
#
# def swizzle_for(row_bytes):
#     for swizzle in (128, 64, 32):
#         if row_bytes % swizzle == 0:
#             return swizzle
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Eight turns instead of one: that is a tile of 64 bfloat16 columns without a swizzle. If you name no
# transforms, Pallas chooses some. From here on you name them, because you know what they are for.

# %% [markdown]
# ## Worked example: a k loop with one slot
#
# If K is too long for SMEM, the accumulator stays, and the tiles change: 64 columns of `a` and 64 rows of `b` at a
# time.
#
# `plgpu.wgmma` only *starts* a product, as a copy is only started. While the tensor cores read a tile, no copy may
# overwrite it. `plgpu.wgmma_wait(n)` waits until at most `n` products are still going on. With `n = 0`, it waits for
# all of them.
#
# Both tiles are swizzled from here on, and rows of 64 bfloat16 have 128 bytes.


# %%
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # for rows of 64 bfloat16, and longer ones


def one_slot_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
    def multiply(acc):
        @pl.loop(0, a_gmem.shape[1] // 64)
        def _(k):
            part = pl.ds(k * 64, 64)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, part], a_smem, loaded)
            plgpu.copy_gmem_to_smem(b_gmem.at[part], b_smem, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)

        return acc[...]

    o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 128)))


def one_slot(a: Float[Array, "64 K"], b: Float[Array, "K 128"]) -> Float[Array, "64 128"]:
    return plgpu.kernel(
        one_slot_kernel,
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((64, 128), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)


# Try it: leave out wgmma_wait, and run this cell again.
show(one_slot, normal((64, 512), "bfloat16"), normal((512, 128), "bfloat16"))

# %% [markdown]
# ## Puzzle 3: The k loop
#
# **Goal.** K is too long for SMEM. Walk along it in steps of 64, and keep the copy engine ahead of the tensor cores.
#
# ### Theory
#
# With one slot, the tensor cores waited for 22,140 of 24,188 cycles. With several, tile `t` lives in slot `t % slots`,
# as in gpu_basics.py Puzzle 4b, where `slots` was 2. The first `slots - 1` tiles are on their way before the loop
# begins.
#
# Products end in the order in which they were started. So `wgmma_wait(1)`, just after product `k` was started, means:
# product `k - 1` is done. Product `k` goes on, and your threads can give the next order at once:
#
# ```text
#     copy engine   | 0 |   | 1 |   | 2 |   | 3 |            two slots
#     tensor cores      | 0 |   | 1 |   | 2 |                wgmma_wait(0)
#
#     copy engine   | 0 | 1 | 2 | 3 |                        two slots
#     tensor cores      | 0 | 1 | 2 |                        wgmma_wait(1)
# ```
#
# (The picture is not to scale. `show` below the puzzle draws yours.)
#
# The slot of product `k - 1` is the one that becomes free. Which tile belongs into it?
#
# `load_step` is given. It starts both copies of a step, and both arrive at `loaded.at[slot]`.


# %%
def load_step(k, slots, a_part, b_part, a_smem, b_smem, loaded):
    # given: starts the copies of step k into its slot
    slot, part = lax.rem(k, slots), pl.ds(k * 64, 64)
    plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], loaded.at[slot])
    plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], loaded.at[slot])


# %%
def k_loop_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
    # k: this step, traced      steps: how many there are      slots: at least 2
    # acc: the accumulator      a_smem: (slots, 64, 64)      b_smem: (slots, 64, bn)
    # a_part, b_part: the rows of a and the columns of b that this CTA needs, in GMEM
    # Multiply step k, and start the copies of a later one.
    pass  # YOUR CODE HERE


def k_loop_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn, slots):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    columns = pl.ds(lax.axis_index("j") * bn, bn)
    a_part, b_part, steps = a_gmem.at[rows], b_gmem.at[:, columns], a_gmem.shape[1] // 64
    for k in range(min(slots - 1, steps)):
        load_step(k, slots, a_part, b_part, a_smem, b_smem, loaded)

    def multiply(acc):
        @pl.loop(0, steps)
        def _(k):
            multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded)

        return acc[...]

    o_gmem[rows, columns] = pl.run_scoped(multiply, plgpu.ACC((64, bn)))


def k_loop(a: Float[Array, "M K"], b: Float[Array, "K N"], *, bn: int = 128, slots: int = 2) -> Float[Array, "M N"]:
    M, N = a.shape[0], b.shape[1]
    return plgpu.kernel(
        functools.partial(k_loop_kernel, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // 64, N // bn),
        grid_names=("i", "j"),
        scratch_types=[
            plgpu.SMEM((slots, 64, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, 64, bn), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (128, 768), b (768, 256): copies=96, waited=125_000. waited: cycles that warpgroups wait. With
# wgmma_wait(0) in the place of wgmma_wait(1), they wait for 130,949 of them.
check("gpu_matmul/3", k_loop)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The step has two halves. First your own product: wait for its tiles, start it. Then the future. Which product has to
# be over before a copy may fill its slot, and how many products may still be going on then? That product's slot gets
# the tile that comes `slots` steps after it. Tile numbers end at `steps`.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
#     slot = lax.rem(k, slots)
#     plgpu.barrier_wait(____)
#     plgpu.wgmma(acc, ____, ____)
#     plgpu.wgmma_wait(____)
#
#     @pl.when(____ < steps)
#     def _():
#         load_step(____, slots, a_part, b_part, a_smem, b_smem, loaded)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
#     slot = lax.rem(k, slots)
#     plgpu.barrier_wait(loaded.at[slot])
#     plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
#     plgpu.wgmma_wait(1)
#
#     @pl.when(k + slots - 1 < steps)
#     def _():
#         load_step(k + slots - 1, slots, a_part, b_part, a_smem, b_smem, loaded)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Three things go on at the same time now: copies, products, and your threads, who only give orders. If
# you forget `wgmma_wait`, a GPU says nothing. It may multiply with half of the old tile and half of the new one.
#
# There is another order: wait for product `k - 1` at the top of the step, with `wgmma_wait(0)`, and start the copies
# before you wait for the step's own tiles. Then two tiles are on their way at a time. For the check's example, the
# machine counts 24,584 cycles instead of 32,284. It gives each CTA an SM of its own. An H200 agrees if an SM has room
# for one CTA only: 263 against 170 TFLOP/s at 8192 x 8192 x 8192. But it has room for four of these. They hide each
# other's waits, and still more copies at a time make it slower: 346 against 423. Ask what a model assumes.

# %%
show(k_loop, normal((64, 512), "bfloat16"), normal((512, 128), "bfloat16"))

# %% [markdown]
# ## Worked example: two warpgroups
#
# A CTA may have several warpgroups. `num_threads=2, thread_name="wg"` starts two in each CTA. (Pallas calls a warpgroup
# a thread.) Both run your kernel. They share its SMEM and its barriers, and each has registers of its own.
# `lax.axis_index("wg")` tells them apart.
#
# What both of them do is done twice. If both start a copy, it arrives twice. So one of them starts it. Both can wait at
# the same barrier. Each takes its rows with a `pl.ds` that begins at a traced row. `x_smem.at[mine]` is a Ref to these
# rows. wgmma takes such a Ref as it is, also that of a swizzled tile.


# %%
def halves_kernel(x_gmem, o_gmem, x_smem, loaded):
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)

    plgpu.barrier_wait(loaded)
    mine = pl.ds(wg * 64, 64)
    o_gmem[mine] = x_smem[mine] * 2


def halves(x: Float[Array, "128 N"]) -> Float[Array, "128 N"]:
    return plgpu.kernel(
        halves_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


# Try it: let both warpgroups start the copy, and run this cell again.
show(halves, normal((128, 128)))

# %% [markdown]
# ## Puzzle 4: The accumulator's budget
#
# **Goal.** Let two warpgroups share a large tile. Count the registers first.
#
# ### Theory
#
# A CTA with a tile of `bm` x `bn` copies `bm + bn` values for each of the K columns of `a`, and computes `bm * bn`
# products with them. So larger tiles need fewer bytes:
#
# ```text
#     tile          bytes a step of 64      FLOPs a byte
#
#      64 x 128          24,576                 43
#     128 x 128          32,768                 64
#     128 x 256          49,152                 85
# ```
#
# The accumulator sets the limit. It lies in registers, one float32 in each, and a thread has 255. NVIDIA's compiler
# says of a tile of 128 x 256 with one warpgroup: 255 registers, 1648 bytes spilled (kept in GMEM), "wgmma.mma_async
# instructions are serialized".
#
# Two warpgroups have twice as many threads, and so twice as many registers. Each takes half of the tile's rows:
#
# ```text
#                      b_smem (K, bn)
#     a_smem (bm, K)
#     | upper half |   | acc of warpgroup 0 |
#     | lower half |   | acc of warpgroup 1 |
# ```


# %%
def shared_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def accumulator_registers(bm, bn, warpgroups):
    # Return how many registers of a thread the accumulator takes, if a tile of bm x bn is shared by so many warpgroups.
    pass  # YOUR CODE HERE


def shared_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bm, bn):
    # a_smem: (bm, K)      b_smem: (K, bn)      loaded: a barrier of two arrivals
    # The names of the grid are "i", for bm rows each, and "j", for bn columns each; that of the warpgroups is "wg".
    # Warpgroup 0 computes the upper half of the tile's rows, warpgroup 1 the lower half.
    pass  # YOUR CODE HERE


def shared(a: Float[Array, "M K"], b: Float[Array, "K N"], *, bm: int = 128, bn: int = 256) -> Float[Array, "M N"]:
    (M, K), N = a.shape, b.shape[1]
    return plgpu.kernel(
        functools.partial(shared_kernel, bm=bm, bn=bn),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // bm, N // bn),
        grid_names=("i", "j"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((bm, K), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((K, bn), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (256, 128), b (128, 768): gmem_bytes=1_376_256, copies=12, ctas=6. Each tile is copied once for both.
check("gpu_matmul/4", shared)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many threads do the warpgroups have together? Each value of the tile lies in one register of one of them. For the
# kernel, take Puzzle 1 and ask of each line: should one warpgroup do it, or both, or each for its half? `pl.when(wg ==
# 0)` is for the first kind. Three lines are of the third kind: an accumulator, an operand, a store.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def accumulator_registers(bm, bn, warpgroups):
#     return bm * bn // ____
#
#
# def shared_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bm, bn):
#     wg = lax.axis_index("wg")
#     row, columns = lax.axis_index("i") * bm, pl.ds(lax.axis_index("j") * bn, bn)
#
#     @pl.when(____)
#     def _():
#         plgpu.copy_gmem_to_smem(____)
#         plgpu.copy_gmem_to_smem(____)
#
#     plgpu.barrier_wait(loaded)
#     half = bm // 2
#
#     def multiply(acc):
#         plgpu.wgmma(acc, a_smem.at[____], b_smem)
#         return acc[...]
#
#     o_gmem[____, columns] = pl.run_scoped(multiply, plgpu.ACC(____))
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def accumulator_registers(bm, bn, warpgroups):
#     return bm * bn // (128 * warpgroups)
#
#
# def shared_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bm, bn):
#     wg = lax.axis_index("wg")
#     row, columns = lax.axis_index("i") * bm, pl.ds(lax.axis_index("j") * bn, bn)
#
#     @pl.when(wg == 0)
#     def _():
#         plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(row, bm)], a_smem, loaded)
#         plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)
#
#     plgpu.barrier_wait(loaded)
#     half = bm // 2
#
#     def multiply(acc):
#         plgpu.wgmma(acc, a_smem.at[pl.ds(wg * half, half)], b_smem)
#         return acc[...]
#
#     o_gmem[pl.ds(row + wg * half, half), columns] = pl.run_scoped(multiply, plgpu.ACC((half, bn)))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 128 registers of accumulator for each thread, half of what there is. 128 x 256 is the tile of most fast
# Hopper kernels, and this is where the number comes from. But now there are two who read a slot. Who knows when both
# are done with it?

# %% [markdown]
# ## Worked example: a hand-over
#
# In Puzzle 3 the same threads gave orders to both engines. When they waited for one, the other got no orders. Here a
# warpgroup of its own gives the copies their orders. It is the **producer**. The others are **consumers**: they wait
# for tiles and multiply, each with its half of the rows. This is called **warp specialisation**. There are as many
# slots as steps. So no slot is used twice, the producer waits for nothing, and one barrier a slot is enough. It says:
# this slot is *full*.
#
# An SM has 65,536 registers. For 384 threads, that is 170 each; they come in eights, so 168. A producer needs few, so
# `plgpu.set_max_registers` takes some from it and gives them to the consumers: a thread of the producer keeps 40, a
# thread of a consumer gets 232.


# %%
def hand_over_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, full):
    wg, steps = lax.axis_index("wg"), a_gmem.shape[1] // 64

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for k in range(steps):
            load_step(k, steps, a_gmem, b_gmem, a_smem, b_smem, full)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(wg * 64, 64)

        def multiply(acc):
            for k in range(steps):
                plgpu.barrier_wait(full.at[k])
                plgpu.wgmma(acc, a_smem.at[k, mine], b_smem.at[k])
            return acc[...]

        o_gmem[mine] = pl.run_scoped(multiply, plgpu.ACC((64, 128)))


# %%
def hand_over(a: Float[Array, "128 K"], b: Float[Array, "K 128"]) -> Float[Array, "128 128"]:
    steps = a.shape[1] // 64
    return plgpu.kernel(
        hand_over_kernel,
        out_type=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((steps, 128, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((steps, 64, 128), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=steps, num_arrivals=2),
        ],
    )(a, b)


# Try it: K = 512 needs eight slots. Does SMEM have room for them?
show(hand_over, normal((128, 320), "bfloat16"), normal((320, 128), "bfloat16"))

# %% [markdown]
# ## Puzzle 5: Producer and consumer
#
# **Goal.** A third warpgroup does nothing but copy. The other two do nothing but multiply. Write one step of each.
#
# ### Theory
#
# A long K does not fit into SMEM, so slots have to be used again. A slot is free when *both* consumers have read it. So
# now the producer has to wait, too, at a second barrier for each slot:
#
# ```text
#     producer      | wait empty | copy k+1 | wait empty | copy k+2 | ...
#                         ^           |
#       empty[slot]       |           |     full[slot]
#       two arrivals      |           v     two arrivals
#     consumer 0    | wait full | wgmma k | arrive empty | ...
#     consumer 1    | wait full | wgmma k | arrive empty | ...
# ```
#
# The copies arrive at `full.at[slot]`: there are tiles. Each consumer arrives at `empty.at[slot]`, with
# `plgpu.barrier_arrive(...)`: I am done with them. As with copies, a wait takes one round of arrivals and no more, and
# the next wait is for the next round. At the start all slots are empty, and nobody has arrived to say so.


# %%
def specialised_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def produce(k, slots, a_part, b_part, a_smem, b_smem, full, empty):
    # k: this step, traced      a_smem: (slots, 128, 64)      b_smem: (slots, 64, bn)
    # a_part: (128, K), b_part: (K, bn): in GMEM, what this CTA needs      full, empty: `slots` barriers of two arrivals
    # Start the copies of step k as soon as its slot is free.
    pass  # YOUR CODE HERE


def consume(k, slots, acc, half, a_smem, b_smem, full, empty):
    # half: a pl.ds, the 64 rows of a tile of a that are yours      acc: (64, bn)
    # Multiply step k as soon as its tiles are there, and give its slot back.
    pass  # YOUR CODE HERE


# %%
def specialised_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, full, empty, *, bn, slots):
    wg, steps = lax.axis_index("wg"), a_gmem.shape[1] // 64
    row, columns = lax.axis_index("i") * 128, pl.ds(lax.axis_index("j") * bn, bn)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        a_part, b_part = a_gmem.at[pl.ds(row, 128)], b_gmem.at[:, columns]

        @pl.loop(0, steps)
        def _(k):
            produce(k, slots, a_part, b_part, a_smem, b_smem, full, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def multiply(acc):
            @pl.loop(0, steps)
            def _(k):
                consume(k, slots, acc, pl.ds(wg * 64, 64), a_smem, b_smem, full, empty)

            return acc[...]

        o_gmem[pl.ds(row + wg * 64, 64), columns] = pl.run_scoped(multiply, plgpu.ACC((64, bn)))


def specialised(
    a: Float[Array, "M K"], b: Float[Array, "K N"], *, bn: int = 256, slots: int = 2
) -> Float[Array, "M N"]:
    M, N = a.shape[0], b.shape[1]
    return plgpu.kernel(
        functools.partial(specialised_kernel, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct((M, N), jnp.float32),
        grid=(M // 128, N // bn),
        grid_names=("i", "j"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, 128, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, 64, bn), b.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (128, 640), b (640, 512): copies=40, copy_idle=4_000. Two CTAs, ten steps, two copies each.
check("gpu_matmul/5", specialised)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down who arrives at which barrier, and who waits for it, for a slot that is used three times. The producer
# waits before its second and its third use. What would its first wait wait for? In `consume`, four things happen in
# this order: tiles are there, a product starts, the product is over, the slot is free. If you leave the third one out,
# what may the producer do while the tensor cores read?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def produce(k, slots, a_part, b_part, a_smem, b_smem, full, empty):
#     slot, part = lax.rem(k, slots), pl.ds(k * 64, 64)
#
#     @pl.when(____)
#     def _():
#         plgpu.barrier_wait(____)
#
#     plgpu.copy_gmem_to_smem(a_part.at[____], a_smem.at[slot], ____)
#     plgpu.copy_gmem_to_smem(b_part.at[____], b_smem.at[slot], ____)
#
#
# def consume(k, slots, acc, half, a_smem, b_smem, full, empty):
#     slot = lax.rem(k, slots)
#     ____
#     plgpu.wgmma(acc, a_smem.at[slot, half], b_smem.at[slot])
#     ____
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def produce(k, slots, a_part, b_part, a_smem, b_smem, full, empty):
#     slot, part = lax.rem(k, slots), pl.ds(k * 64, 64)
#
#     @pl.when(k >= slots)
#     def _():
#         plgpu.barrier_wait(empty.at[slot])
#
#     plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot])
#     plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])
#
#
# def consume(k, slots, acc, half, a_smem, b_smem, full, empty):
#     slot = lax.rem(k, slots)
#     plgpu.barrier_wait(full.at[slot])
#     plgpu.wgmma(acc, a_smem.at[slot, half], b_smem.at[slot])
#     plgpu.wgmma_wait(0)
#     plgpu.barrier_arrive(empty.at[slot])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Nobody knows how far the others are, and nobody has to. Two barriers a slot are the whole agreement.
# JAX's kernels for Hopper are built like this, its attention too. In the picture, the copy engine hardly ever stops.

# %%
show(specialised, normal((128, 512), "bfloat16"), normal((512, 256), "bfloat16"))

# %% [markdown]
# ## Worked example: the library's producer
#
# `plgpu.emit_pipeline_warp_specialized` writes the producer of Puzzle 5, its barriers, and the loops. You give it
# BlockSpecs, as in gpu_basics.py Puzzle 6, and a body that the consumers run at each step:
#
# ```text
#     emit_pipeline_warp_specialized(body, grid=(steps,), in_specs=[...], compute_context=context, ...)
#        |
#        +-- warpgroup 2        the producer, written by the library
#        +-- warpgroups 0, 1    context: before the loop, the loop, after it
#               |
#               +-- body(indices, x_smem, carry) -> carry
# ```
#
# `compute_context=` is what the consumers do. It gets the loop as a function, `pipeline`. You call that with the first
# carry, and it returns the last one. (gpu_basics.py had `init_carry` for this.) The kernel takes the largest absolute
# value over all tiles, place by place. Each consumer has half of the rows.


# %%
def highest_step(indices, x_smem, so_far, *, half):
    return jnp.maximum(so_far, jnp.abs(x_smem[half]))


def highest_kernel(x_gmem, o_gmem, *, slots):
    half = pl.ds(lax.axis_index("wg") * 64, 64)

    def context(pipeline):
        o_gmem[half] = pipeline(jnp.zeros((64, 64), jnp.float32))

    plgpu.emit_pipeline_warp_specialized(
        functools.partial(highest_step, half=half),
        grid=(x_gmem.shape[1] // 64,),
        in_specs=[plgpu.BlockSpec((128, 64), lambda k: (0, k))],
        wg_axis="wg",  # the name of the warpgroups
        num_compute_wgs=2,  # so many are consumers; the last one is the producer
        memory_registers=40,  # of the producer, as set_max_registers(40) above
        max_concurrent_steps=slots,
        compute_context=context,
    )(x_gmem)


def highest(x: Float[Array, "128 N"], *, slots: int = 2) -> Float[Array, "128 64"]:
    return plgpu.kernel(
        functools.partial(highest_kernel, slots=slots),
        out_type=jax.ShapeDtypeStruct((128, 64), x.dtype),
        num_threads=3,
        thread_name="wg",
    )(x)


# Try it: one slot.
show(highest, normal((128, 512)), slots=2)

# %% [markdown]
# ## Puzzle 6: The library's pipeline
#
# **Goal.** The same kernel with `plgpu.emit_pipeline_warp_specialized`. Say which tiles, and what happens to one pair.
#
# ### Theory
#
# The carry of this pipeline is the accumulator: your body gets `acc`, and returns it. Where it comes from is in the
# `context`, which is given. `acc` is a Ref: the products are in it, so what `pipeline` returns is not needed.
#
# In Puzzle 5 a consumer waits for one product before it starts the next. Between the two, it has nothing on the tensor
# cores. `delay_release=1`, in the BlockSpecs, gives a slot back one step *later*:
#
# ```text
#     delay_release=0    | body 0 | free 0 | body 1 | free 1 | body 2 | free 2 |
#
#     delay_release=1    | body 0 |        | body 1 | free 0 | body 2 | free 1 |
# ```
#
# So when your body returns at step `k`, product `k` may still be going on, and product `k - 1` may not. What does the
# body have to wait for?
#
# An index map gets the step, and returns block numbers. `i` and `j` say which tile of the result the CTA has.


# %%
def pipelined_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)


def a_map(k, i):
    # Blocks of a are (128, 64). Return the number of the block for step k and the tile's row i, as a tuple.
    pass  # YOUR CODE HERE


def b_map(k, j):
    # Blocks of b are (64, bn). Return the number of the block for step k and the tile's column j, as a tuple.
    pass  # YOUR CODE HERE


def pipeline_step(indices, a_smem, b_smem, acc, *, half):
    # a_smem: (128, 64), b_smem: (64, bn): the tiles of this step, already there
    # half: a pl.ds, the 64 rows of a_smem that are yours      acc: (64, bn)
    pass  # YOUR CODE HERE


# %%
def pipelined_kernel(a_gmem, b_gmem, o_gmem, *, bn, slots):
    wg, i, j = lax.axis_index("wg"), lax.axis_index("i"), lax.axis_index("j")

    def context(pipeline):  # what the consumers do: before the loop, the loop, after it
        def multiply(acc):
            pipeline(acc)
            return acc[...]

        result = pl.run_scoped(multiply, plgpu.ACC((64, bn)))
        o_gmem[pl.ds(i * 128 + wg * 64, 64), pl.ds(j * bn, bn)] = result

    block = functools.partial(plgpu.BlockSpec, transforms=SWIZZLED, delay_release=1)
    plgpu.emit_pipeline_warp_specialized(
        functools.partial(pipeline_step, half=pl.ds(wg * 64, 64)),
        grid=(a_gmem.shape[1] // 64,),
        in_specs=[block((128, 64), functools.partial(a_map, i=i)), block((64, bn), functools.partial(b_map, j=j))],
        wg_axis="wg",
        num_compute_wgs=2,
        memory_registers=40,
        max_concurrent_steps=slots,
        compute_context=context,
    )(a_gmem, b_gmem)


def pipelined(a: Float[Array, "M K"], b: Float[Array, "K N"], *, bn: int = 256, slots: int = 2) -> Float[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(pipelined_kernel, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
        grid=(a.shape[0] // 128, b.shape[1] // bn),
        grid_names=("i", "j"),
        num_threads=3,
        thread_name="wg",
    )(a, b)


# %%
# Budget for a (256, 640), b (640, 768): copies=120, tensor_idle=260_000. With wgmma_wait(0) the tensor cores idle for
# about 300,000 cycles.
check("gpu_matmul/6", pipelined)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow one CTA along K. In which of the two dimensions of `a` does it move, and in which one of `b`? The other number
# stays where the CTA is. For the body, say in words what is true when it returns: the slot of step `k - 1` is given
# away right after. Which product may still read it then?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def a_map(k, i):
#     return (____, ____)
#
#
# def b_map(k, j):
#     return (____, ____)
#
#
# def pipeline_step(indices, a_smem, b_smem, acc, *, half):
#     plgpu.wgmma(acc, ____, ____)
#     plgpu.wgmma_wait(____)
#     return ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def a_map(k, i):
#     return (i, k)
#
#
# def b_map(k, j):
#     return (k, j)
#
#
# def pipeline_step(indices, a_smem, b_smem, acc, *, half):
#     plgpu.wgmma(acc, a_smem.at[half], b_smem)
#     plgpu.wgmma_wait(1)
#     return acc
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Five lines of yours, and Puzzle 5 around them. With `wgmma_wait(1)` the next product is queued before
# the last one is over. The price is that a slot is held for one step longer, so you need more of them: on an H200, two
# slots are slower here than in Puzzle 5, and four are about as fast (the table at the end).

# %% [markdown]
# ## Puzzle 7: The epilogue
#
# **Goal.** The layer of a transformer: `gelu(a @ b + bias)`, in bfloat16. Write what happens after the last product.
#
# ### Theory
#
# A kernel of its own for bias and GELU would read the whole product from GMEM and write it again. Here it is still in
# registers. What comes between the last product and the store is called the **epilogue**, and it costs no bytes.
#
# Threads store badly from the layout of the accumulator: four of them share 8 columns of a row, so a row gets only 16
# bytes at a time. The copy engine stores well, from SMEM. But 64 x 256 bfloat16 of each consumer are 64 KiB together,
# and from four slots on, the pipeline needs that room. So the result leaves in parts of 64 columns, through two slots:
#
# ```text
#     threads         | part 0 | part 1 | wait | part 2 | wait | part 3 |
#     o_smem[0]       |#### part 0 ####|      |#### part 2 ####|
#     o_smem[1]                |#### part 1 ####|      |#### part 3 ####|
#     copy engine              |  0  |    |  1  |      |  2  |
# ```
#
# All of that you know from gpu_basics.py Puzzles 4 and 5: `commit_smem`, `copy_smem_to_gmem`, and a wait before a slot
# is used again. `wait_smem_to_gmem(n)` counts each warpgroup's own copies. `result[:, 64:128]` is a part of the result,
# as in NumPy. A slice of columns stays in its thread, so it compiles. (One of rows did not, in gpu_basics.py.) The
# number of parts is static, so a Python loop will do.


# %%
def biases(bias_part, part):
    # given: the 64 biases of a part, in the layout that belongs to the columns of a product
    columns = pl.ds(part * 64, 64)
    layout = plgpu.Layout.WGMMA.reduce(0)  # of one number a column, as a sum along axis 0 leaves them
    return plgpu.load(bias_part.at[columns], layout=layout, optimized=False)


# %%
def fused_spec(a: Float[Array, "M K"], b: Float[Array, "K N"], bias: Float[Array, "N"]) -> Float[Array, "M N"]:
    product = a.astype(jnp.float32) @ b.astype(jnp.float32)
    return jax.nn.gelu(product + bias).astype(a.dtype)


def epilogue(result, bias_part, o_part, o_smem):
    # result: (64, bn), float32, in registers: the product      bias_part: (bn,), in GMEM
    # o_part: (64, bn), in GMEM, where the result belongs       o_smem: (2, 64, 64), two slots, yours alone
    # jax.nn.gelu works in a kernel; o_smem.dtype is the dtype of the result.
    pass  # YOUR CODE HERE


# %%
def fused_kernel(a_gmem, b_gmem, bias_gmem, o_gmem, o_smem, *, bn, slots):
    wg, i, j = lax.axis_index("wg"), lax.axis_index("i"), lax.axis_index("j")

    def context(pipeline):
        def multiply(acc):
            pipeline(acc)
            return acc[...]

        result = pl.run_scoped(multiply, plgpu.ACC((64, bn)))
        rows, columns = pl.ds(i * 128 + wg * 64, 64), pl.ds(j * bn, bn)
        epilogue(result, bias_gmem.at[columns], o_gmem.at[rows, columns], o_smem.at[wg])

    block = functools.partial(plgpu.BlockSpec, transforms=SWIZZLED, delay_release=1)
    plgpu.emit_pipeline_warp_specialized(
        functools.partial(pipeline_step, half=pl.ds(wg * 64, 64)),
        grid=(a_gmem.shape[1] // 64,),
        in_specs=[block((128, 64), functools.partial(a_map, i=i)), block((64, bn), functools.partial(b_map, j=j))],
        wg_axis="wg",
        num_compute_wgs=2,
        memory_registers=40,
        max_concurrent_steps=slots,
        compute_context=context,
    )(a_gmem, b_gmem)


def fused(
    a: Float[Array, "M K"], b: Float[Array, "K N"], bias: Float[Array, "N"], *, bn: int = 256, slots: int = 2
) -> Float[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(fused_kernel, bn=bn, slots=slots),
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(a.shape[0] // 128, b.shape[1] // bn),
        grid_names=("i", "j"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2, 2, 64, 64), a.dtype, transforms=SWIZZLED)],
        compiler_params=plgpu.CompilerParams(approx_math=True),  # the chip's own tanh: one instruction
    )(a, b, bias)


# %%
# Budget for a (256, 320), b (320, 512), bias (512,): gmem_bytes=1_253_376, thread_bytes=8_192, waited=280_000. Threads
# load the biases, and nothing else. If they wait until each part has left, they wait for 300,624 cycles.
check("gpu_matmul/7", fused)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One part is: some columns of the result, their biases, GELU, the cast, and the way out. Part 2 goes where part 0 was.
# So before you store into a slot, how many copies may still be reading SMEM? Two slots: the copy of the *other* one
# may go on. And at the end SMEM is given back, so nothing may go on any more.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def epilogue(result, bias_part, o_part, o_smem):
#     for part in range(result.shape[1] // 64):
#         slot, columns = ____, slice(____, ____)
#         x = result[:, columns]
#         x = jax.nn.gelu(____)
#         plgpu.wait_smem_to_gmem(____, wait_read_only=True)
#         o_smem[slot] = ____
#         ____
#         plgpu.copy_smem_to_gmem(o_smem.at[slot], o_part.at[:, columns])
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def epilogue(result, bias_part, o_part, o_smem):
#     for part in range(result.shape[1] // 64):
#         slot, columns = part % 2, slice(part * 64, part * 64 + 64)
#         x = result[:, columns]
#         x = jax.nn.gelu(x + biases(bias_part, part))
#         plgpu.wait_smem_to_gmem(1, wait_read_only=True)
#         o_smem[slot] = x.astype(o_smem.dtype)
#         plgpu.commit_smem()
#         plgpu.copy_smem_to_gmem(o_smem.at[slot], o_part.at[:, columns])
#     plgpu.wait_smem_to_gmem(0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Bias and GELU cost no bytes: the product never goes to GMEM without them. Residuals, scales of int8
# weights and the derivative of an activation belong here, too.

# %% [markdown]
# ## Worked example: dealing out tiles
#
# A grid with more CTAs than the chip has room for is worked off: when one CTA ends, the next one starts. You can also
# start fewer CTAs than there are tiles, and let each of them take several. Such CTAs are called **persistent**.
# `plgpu.nd_loop((tiles,), collective_axes="cta")` deals out the tiles. In its body, `loop.index` holds the tile's
# number, a tuple, and `loop.local_index` is how many tiles this CTA had before.
#
# The kernel marks each row of `x` with the CTA that had it (the tens), and with its `local_index` (the ones).


# %%
def dealt_kernel(x_gmem, o_gmem):
    @plgpu.nd_loop((x_gmem.shape[0],), collective_axes="cta")
    def _(loop):
        mark = 10 * lax.axis_index("cta") + loop.local_index
        o_gmem[loop.index[0]] = x_gmem[loop.index[0]] + mark


def dealt(x: Float[Array, "T N"], *, ctas: int) -> Float[Array, "T N"]:
    return plgpu.kernel(
        dealt_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
    )(x)


print(dealt(jnp.zeros((5, 128)), ctas=2)[:, 0])
# Try it: three CTAs.
show(dealt, normal((5, 128)), ctas=2)

# %% [markdown]
# Which tiles should be worked on at the same time? 132 CTAs have 132 tiles at a time, and each tile (i, j) needs part
# i of `a` (some rows) and part j of `b` (some columns). What several CTAs read at about the same time comes from
# the **L2 cache**, a memory that all SMs share, and leaves GMEM once. So the fewer different parts, the better:


# %%
def different_parts(tiles):
    return len({i for i, j in tiles}) + len({j for i, j in tiles})


one_row = [(0, t) for t in range(132)]
strip_of_8 = [(t // 8, t % 8) for t in range(132)]
print(f"132 tiles of one row need {different_parts(one_row)} parts of a and b;", end=" ")
print(f"132 tiles of a strip of 8 columns need {different_parts(strip_of_8)}.")

# %% [markdown]
# ## Puzzle 8: Persistent
#
# **Goal.** Start one CTA for each SM, and let it compute one tile after another. While one tile is stored, the copies
# of the next one come in.
#
# ### Theory
#
# A CTA of Puzzle 7 begins with empty slots and ends with an epilogue. In both, the tensor cores have nothing to do, and
# an SM has no room for a second such CTA. A persistent CTA has one start and one end for all of its tiles:
#
# ```text
#     producer      | tile 0 ........ | tile 1 ........ | tile 2 ..
#     consumers         | tile 0 ........ |st| tile 1 ........ |st|       st: the store
# ```
#
# What does that change? The barriers know nothing of tiles: their rounds go on. So the slot of a step, and whether the
# producer has to wait for it, depend on all steps of this CTA before it. `n`, the loop's `local_index`, tells you how
# many tiles it had.
#
# And the order of the tiles is yours. Count them in strips of `width` columns of tiles:
#
# ```text
#      0  1 | 8  9
#      2  3 |10 11        m_tiles = 4, width = 2
#      4  5 |12 13
#      6  7 |14 15
# ```


# %%
def store_tile(result, o_part, o_smem, finish=lambda x, part: x):
    # given: Puzzle 7 in parts of 64 x 64, without a wait at its end: the last copies may go on
    parts = [(r, c) for r in range(result.shape[0] // 64) for c in range(result.shape[1] // 64)]
    for n, (r, c) in enumerate(parts):
        part = slice(r * 64, r * 64 + 64), slice(c * 64, c * 64 + 64)
        x = finish(result[part], c)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        o_smem[n % 2] = x.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[n % 2], o_part.at[part])


# %%
def persistent_spec(a: Float[Array, "M K"], b: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return (a.astype(jnp.float32) @ b.astype(jnp.float32)).astype(a.dtype)


def tile_order(t, m_tiles, width):
    # t: the number of a tile, traced      m_tiles: rows of tiles      width: columns of a strip, which divides them all
    # Return the tile's row and column. lax.div and lax.rem take a traced number and an int.
    pass  # YOUR CODE HERE


def produce_tile(n, steps, slots, a_part, b_part, a_smem, b_smem, full, empty):
    # n: how many tiles this CTA had before, traced      steps: of each tile
    # a_part: (bm, K), b_part: (K, bn): what this tile needs      a_smem: (slots, bm, 64)      b_smem: (slots, 64, bn)
    # Start the copies of all steps of the tile, each as soon as its slot is free.
    pass  # YOUR CODE HERE


def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
    # rows: a pl.ds, the rows of a slot of a that are yours      acc: (bm // 2, bn)
    # Multiply all steps of the tile. One step is that of Puzzle 5.
    pass  # YOUR CODE HERE


# %%
def persistent_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, full, empty, *, width):
    wg, (slots, bm, _), bn = lax.axis_index("wg"), a_smem.shape, b_smem.shape[2]
    (M, K), N = a_gmem.shape, b_gmem.shape[1]
    steps, half, tiles = K // 64, bm // 2, (M // bm) * (N // bn)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.nd_loop((tiles,), collective_axes="cta")
        def _(loop):
            i, j = tile_order(loop.index[0], M // bm, width)
            a_part, b_part = a_gmem.at[pl.ds(i * bm, bm)], b_gmem.at[:, pl.ds(j * bn, bn)]
            produce_tile(loop.local_index, steps, slots, a_part, b_part, a_smem, b_smem, full, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(wg * half, half)

        @plgpu.nd_loop((tiles,), collective_axes="cta")
        def _(loop):
            i, j = tile_order(loop.index[0], M // bm, width)

            def multiply(acc):
                consume_tile(loop.local_index, steps, slots, acc, mine, a_smem, b_smem, full, empty)
                return acc[...]

            result = pl.run_scoped(multiply, plgpu.ACC((half, bn)))
            store_tile(result, o_gmem.at[pl.ds(i * bm + wg * half, half), pl.ds(j * bn, bn)], o_smem.at[wg])

        plgpu.wait_smem_to_gmem(0)


# %%
def persistent(
    a: Float[Array, "M K"],
    b: Float[Array, "K N"],
    *,
    bm: int = 128,
    bn: int = 256,
    slots: int = 3,
    width: int = 1,
    ctas: int = 2,
) -> Float[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(persistent_kernel, width=width),
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, bm, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, 64, bn), b.dtype, transforms=SWIZZLED),
            plgpu.SMEM((2, 2, 64, 64), a.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        ],
    )(a, b)


# %%
# Budget for a (256, 320), b (320, 1024): copies=80, ctas=2, copy_idle=5_000. With a CTA for each of the 8 tiles,
# the copy engines idle for more than 15,000 cycles. The check also asks what 132 CTAs share in your order.
check("gpu_matmul/8", persistent)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Give every step of this CTA a number that goes on from tile to tile: what is that of step `k` of its tile `n`? The
# slot and the first wait of the producer depend on this number. What the copies read depends on `k` alone. The
# consumers read no GMEM: does a step of theirs need `k` at all? For the order: a strip has `m_tiles * width` tiles.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tile_order(t, m_tiles, width):
#     strip, within = lax.div(t, ____), lax.rem(t, ____)
#     return lax.div(within, ____), ____
#
#
# def produce_tile(n, steps, slots, a_part, b_part, a_smem, b_smem, full, empty):
#     @pl.loop(0, steps)
#     def _(k):
#         step = ____
#         slot, part = lax.rem(____, slots), pl.ds(____, 64)
#         ...
#
#
# def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
#     @pl.loop(0, steps)
#     def _(k):
#         consume(____, slots, acc, rows, a_smem, b_smem, full, empty)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tile_order(t, m_tiles, width):
#     strip, within = lax.div(t, m_tiles * width), lax.rem(t, m_tiles * width)
#     return lax.div(within, width), strip * width + lax.rem(within, width)
#
#
# def produce_tile(n, steps, slots, a_part, b_part, a_smem, b_smem, full, empty):
#     @pl.loop(0, steps)
#     def _(k):
#         step = n * steps + k
#         slot, part = lax.rem(step, slots), pl.ds(k * 64, 64)
#
#         @pl.when(step >= slots)
#         def _():
#             plgpu.barrier_wait(empty.at[slot])
#
#         plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot])
#         plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])
#
#
# def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
#     @pl.loop(0, steps)
#     def _(k):
#         consume(n * steps + k, slots, acc, rows, a_smem, b_smem, full, empty)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** While a tile is stored, the slots fill for the next one. What a CTA computes is now a loop of your own,
# in an order of your own. You could give each slot back one step later, as in Puzzle 6. On an H200 that is no faster:
# with two consumers, the product of one goes on while the other waits. The picture shows two tiles of one CTA: look at
# the copy engine during the store.

# %%
show(persistent, normal((128, 320), "bfloat16"), normal((320, 512), "bfloat16"), ctas=1)

# %% [markdown]
# ## Worked example: one copy for two CTAs
#
# Hopper can start CTAs in **clusters**. They run at the same time, and a copy can write into the SMEM of all of them:
# **multicast**. `cluster=(2,), cluster_names=("cluster",)` starts pairs, and `lax.axis_index("cluster")` is a CTA's
# **rank**, 0 or 1.
#
# `copy_gmem_to_smem(src, dst, barrier, collective_axes="cluster")` copies for both. *Both* CTAs have to start it, with
# the same source. Each copies one half, into both SMEMs. Each CTA sees *one* arrival, at a barrier of its own, when
# both halves are there. The bytes leave GMEM once.
#
# The kernel scales two tiles of `x` by the same tile `y`.


# %%
def paired_kernel(x_gmem, y_gmem, o_gmem, x_smem, y_smem, loaded):
    mine = pl.ds(lax.axis_index("cluster") * 64, 64)
    plgpu.copy_gmem_to_smem(x_gmem.at[mine], x_smem, loaded)
    plgpu.copy_gmem_to_smem(y_gmem, y_smem, loaded, collective_axes="cluster")
    plgpu.barrier_wait(loaded)
    o_gmem[mine] = x_smem[...] * y_smem[...]


def paired(x: Float[Array, "128 N"], y: Float[Array, "64 N"]) -> Float[Array, "128 N"]:
    tile = plgpu.SMEM(y.shape, y.dtype)
    return plgpu.kernel(
        paired_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        cluster=(2,),
        cluster_names=("cluster",),
        scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
    )(x, y)


# Try it: leave out collective_axes, and compare the bytes.
show(paired, normal((128, 128)), normal((64, 128)))

# %% [markdown]
# ## Puzzle 9: Clusters
#
# **Goal.** Two CTAs work side by side on tiles that need the same part of `a` or `b`. Copy that part once for both.
#
# ### Theory
#
# A pair of CTAs whose tiles lie one below the other is a cluster along "m":
#
# ```text
#                     +--------+
#                     | b part |             a: each CTA copies its own
#                     +--------+
#     +--------+      +--------+             b: both need the same. Each copies
#     | a part |      | rank 0 |                one half, into both SMEMs
#     +--------+      +--------+
#     | a part |      | rank 1 |
#     +--------+      +--------+
# ```
#
# Now the copies of a CTA write into its partner's slots. So a slot is free when the consumers of *both* CTAs have
# given it back. That is what `plgpu.ClusterBarrier` is for: `barrier_arrive` arrives at it in both CTAs. `empty` is
# one. Four consumers arrive now, two of each CTA. `num_arrivals` names those of one CTA, so it is still 2.
# `consume_tile` stays as it is.
#
# `nd_loop` deals out pairs of tiles: both CTAs of a pair get the same number, and each has to find its own tile.


# %%
def clustered_spec(
    a: Float[Array, "M K"], b: Float[Array, "K N"], bias: Float[Array, "N"] | None = None
) -> Float[Array, "M N"]:
    product = a.astype(jnp.float32) @ b.astype(jnp.float32)
    return (product if bias is None else jax.nn.gelu(product + bias)).astype(a.dtype)


def partner_tile(t, m_tiles, width, along):
    # t: the number of a pair of tiles, traced      m_tiles: rows of tiles, an even number for "m"
    # along: "m" for a pair of tiles one below the other, "n" for a pair side by side, None for no pairs
    # Return the row and column of this CTA's tile. tile_order gives the pairs their order; width: in pairs.
    pass  # YOUR CODE HERE


def produce_shared(n, steps, slots, along, a_part, b_part, a_smem, b_smem, full, empty):
    # As produce_tile, but what the two CTAs of a pair both need is copied for both.
    pass  # YOUR CODE HERE


# %%
def clustered_kernel(a_gmem, b_gmem, bias_gmem, o_gmem, a_smem, b_smem, o_smem, full, empty, *, along, width):
    wg, (slots, bm, _), bn = lax.axis_index("wg"), a_smem.shape, b_smem.shape[2]
    (M, K), N = a_gmem.shape, b_gmem.shape[1]
    steps, half, pairs = K // 64, bm // 2, (M // bm) * (N // bn) // (2 if along else 1)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @plgpu.nd_loop((pairs,), collective_axes="cta")
        def _(loop):
            i, j = partner_tile(loop.index[0], M // bm, width, along)
            a_part, b_part = a_gmem.at[pl.ds(i * bm, bm)], b_gmem.at[:, pl.ds(j * bn, bn)]
            produce_shared(loop.local_index, steps, slots, along, a_part, b_part, a_smem, b_smem, full, empty)

        wait_for_all(pairs, steps, slots, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        mine = pl.ds(wg * half, half)

        @plgpu.nd_loop((pairs,), collective_axes="cta")
        def _(loop):
            i, j = partner_tile(loop.index[0], M // bm, width, along)

            def multiply(acc):
                consume_tile(loop.local_index, steps, slots, acc, mine, a_smem, b_smem, full, empty)
                return acc[...]

            result = pl.run_scoped(multiply, plgpu.ACC((half, bn)))
            rows, columns = pl.ds(i * bm + wg * half, half), pl.ds(j * bn, bn)
            finish = functools.partial(with_bias, bias_gmem, columns)
            store_tile(result, o_gmem.at[rows, columns], o_smem.at[wg], finish)

        plgpu.wait_smem_to_gmem(0)


# %%
def with_bias(bias_gmem, columns, x, part):
    # given: the epilogue of Puzzle 7, if there is a bias
    if bias_gmem is None:
        return x
    return jax.nn.gelu(x + biases(bias_gmem.at[columns], part))


def wait_for_all(tiles, steps, slots, empty):
    # given: a CTA must not end before the last arrival of its partner
    cta, ctas = lax.axis_index("cta"), lax.axis_size("cta")  # axis_size: how many there are along this axis
    total = lax.div(tiles - cta + ctas - 1, ctas) * steps  # steps of this CTA

    @pl.loop(lax.max(total - slots, 0), total)
    def _(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, slots)])


def clustered(
    a: Float[Array, "M K"],
    b: Float[Array, "K N"],
    bias: Float[Array, "N"] | None = None,
    *,
    bm: int = 128,
    bn: int = 256,
    slots: int = 3,
    along: str | None = "m",
    width: int = 1,
    ctas: int = 2,
) -> Float[Array, "M N"]:
    body = functools.partial(clustered_kernel, along=along, width=width)
    plain = lambda a, b, o, *scratch: body(a, b, None, o, *scratch)  # noqa: E731
    pair = {"cluster": (2,), "cluster_names": ("cluster",)} if along else {}
    both = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if along else plgpu.Barrier
    return plgpu.kernel(
        plain if bias is None else body,
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(ctas // 2 if along else ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, bm, 64), a.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, 64, bn), b.dtype, transforms=SWIZZLED),
            plgpu.SMEM((2, 2, 64, 64), a.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
            both(num_barriers=slots, num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **pair,
    )(a, b, *([] if bias is None else [bias]))


# %%
# Budget for a (512, 320), b (320, 512): gmem_bytes=1_835_008, copies=80. Without multicast it moves 2,490,368.
# The check also asks for pairs side by side, and for no pairs with bias and GELU.
check("gpu_matmul/9", clustered)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A pair along "m" is one tile of twice as many rows. How many rows of such pairs are there, and which row of tiles
# does a rank get? For the copies: two CTAs one below the other have different rows of `a`, and the same columns of
# `b`. Which one is copied for both, then, and which one for tiles side by side?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def partner_tile(t, m_tiles, width, along):
#     if along is None:
#         return ____
#     rank = lax.axis_index("cluster")
#     if along == "m":
#         i, j = tile_order(t, ____, width)
#         return ____, j
#     i, j = tile_order(t, m_tiles, width)
#     return i, ____
#
#
# def produce_shared(n, steps, slots, along, a_part, b_part, a_smem, b_smem, full, empty):
#     a_axes = "cluster" if ____ else None
#     b_axes = "cluster" if ____ else None
#     ...  # the rest is produce_tile, with collective_axes=
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def partner_tile(t, m_tiles, width, along):
#     if along is None:
#         return tile_order(t, m_tiles, width)
#     rank = lax.axis_index("cluster")
#     if along == "m":
#         i, j = tile_order(t, m_tiles // 2, width)
#         return 2 * i + rank, j
#     i, j = tile_order(t, m_tiles, width)
#     return i, 2 * j + rank
#
#
# def produce_shared(n, steps, slots, along, a_part, b_part, a_smem, b_smem, full, empty):
#     a_axes = "cluster" if along == "n" else None
#     b_axes = "cluster" if along == "m" else None
#
#     @pl.loop(0, steps)
#     def _(k):
#         step = n * steps + k
#         slot, part = lax.rem(step, slots), pl.ds(k * 64, 64)
#
#         @pl.when(step >= slots)
#         def _():
#             plgpu.barrier_wait(empty.at[slot])
#
#         plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot], collective_axes=a_axes)
#         plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot], collective_axes=b_axes)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A pair of 128 x 256 tiles reads as few bytes as one tile of 256 x 256, whose accumulator would take all
# registers of an SM.

# %%
show(clustered, normal((256, 320), "bfloat16"), normal((320, 256), "bfloat16"))

# %% [markdown]
# ## Worked example: two copies, one group
#
# `wait_smem_to_gmem(n)` counts **groups** of copies. So far, each copy made a group by itself. With
# `commit_group=False` it does not. `plgpu.commit_smem_to_gmem_group()` makes one group of all copies since the last
# one, also if there are none.
#
# You need that if a slot leaves in several copies: "at most one may go on" has to mean all copies of one slot. This
# kernel exchanges the halves of a tile on its way out.


# %%
def exchange_kernel(x_gmem, o_gmem, x_smem, loaded):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.barrier_wait(loaded)
    upper, lower = pl.ds(0, 32), pl.ds(32, 32)
    plgpu.copy_smem_to_gmem(x_smem.at[upper], o_gmem.at[lower], commit_group=False)
    plgpu.copy_smem_to_gmem(x_smem.at[lower], o_gmem.at[upper], commit_group=False)
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0)


def exchange(x: Float[Array, "64 N"]) -> Float[Array, "64 N"]:
    return plgpu.kernel(
        exchange_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


# Try it: leave out commit_smem_to_gmem_group, and run this cell again.
show(exchange, normal((64, 128)))

# %% [markdown]
# ## Puzzle 10: Groups of any size
#
# **Goal.** A ragged dot: each row of `x` belongs to a group, and each group has its own weights. Store a tile whose
# rows belong to two groups.
#
# ### Theory
#
# In a mixture of experts each token is sent to an expert, which is a weight matrix. The tokens are sorted: the first
# `sizes[0]` rows of `x` belong to `w[0]`, the next `sizes[1]` to `w[1]`. Each group gets tiles of 128 rows of its own.
# They begin at a multiple of 8 rows, as a swizzled tile has to:
#
# ```text
#     rows of x          96   100           107                            224        (not to scale)
#     groups             | 0  | 1            | 2
#     tile of group 1    |<---------------- 128 rows ---------------------->|
#     its own rows            |<------------>|
# ```
#
# A CTA computes all rows of its tile, and may store only those of its group.
#
# The shape of a copy is fixed when the kernel is compiled. How many rows it should store is known when it runs. But
# each number up to 64 is a sum of some of 64, 32, 16, 8, 4, 2 and 1. So write one copy for each of these, and skip
# those that are not needed. Together they are one group of copies.


# %%
def group_tile(t, sizes):
    # given: (group, first row of the tile, the group's first row, its end) of tile t, and how many tiles there are
    before = start = jnp.int32(0)
    found = (before,) * 4
    for g, size in enumerate(sizes):
        first = lax.div(start, 8) * 8
        count = jnp.where(size > 0, lax.div(start + size - first + 127, 128), 0)
        this = (jnp.int32(g), first + (t - before) * 128, start, start + size)
        here = (before <= t) & (t < before + count)
        found = tuple(jnp.where(here, new, old) for new, old in zip(this, found, strict=True))
        before, start = before + count, start + size
    return found, before


# %%
def ragged_spec(x: Float[Array, "M K"], w: Float[Array, "G K N"], sizes: Int[Array, "G"]) -> Float[Array, "M N"]:
    return lax.ragged_dot(x.astype(jnp.float32), w.astype(jnp.float32), sizes).astype(x.dtype)


def store_rows(o_slot, o_part, row, start, end):
    # o_slot: (64, 64), in SMEM: a part of a product      o_part: (64, 64), in GMEM, where it belongs
    # row: the row of the result at which o_part begins      start, end: the group's first row, the row after its last
    # All three are traced. Store the rows of o_slot that belong to the group, as one group of copies.
    pass  # YOUR CODE HERE


# %%
def ragged_kernel(x_gmem, w_gmem, sizes_gmem, o_gmem, x_smem, w_smem, o_smem, full, empty, *, width):
    wg, slots, bn = lax.axis_index("wg"), w_smem.shape[0], w_smem.shape[2]
    sizes = [sizes_gmem[g] for g in range(sizes_gmem.shape[0])]
    steps, (_, m_tiles) = x_gmem.shape[1] // 64, group_tile(0, sizes)
    each_tile = plgpu.nd_loop((m_tiles * (w_gmem.shape[2] // bn),), collective_axes="cta")

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @each_tile
        def _(loop):
            t, j = tile_order(loop.index[0], m_tiles, width)
            (group, row, _, _), _ = group_tile(t, sizes)
            x_part = x_gmem.at[pl.ds(pl.multiple_of(row, 8), 128)]  # a promise to the compiler: 8 divides row
            w_part = w_gmem.at[group, :, pl.ds(j * bn, bn)]
            produce_tile(loop.local_index, steps, slots, x_part, w_part, x_smem, w_smem, full, empty)

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")

        @each_tile
        def _(loop):
            t, j = tile_order(loop.index[0], m_tiles, width)
            (_, row, start, end), _ = group_tile(t, sizes)

            def multiply(acc):
                consume_tile(loop.local_index, steps, slots, acc, pl.ds(wg * 64, 64), x_smem, w_smem, full, empty)
                return acc[...]

            result = pl.run_scoped(multiply, plgpu.ACC((64, bn)))
            o_part = o_gmem.at[pl.ds(row + wg * 64, 64), pl.ds(j * bn, bn)]
            store_group(result, o_part, o_smem.at[wg], row + wg * 64, start, end)

        plgpu.wait_smem_to_gmem(0)


# %%
def store_group(result, o_part, o_smem, row, start, end):
    # given: as store_tile
    for part in range(result.shape[1] // 64):
        columns = slice(part * 64, part * 64 + 64)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        o_smem[part % 2] = result[:, columns].astype(o_smem.dtype)
        plgpu.commit_smem()
        store_rows(o_smem.at[part % 2], o_part.at[:, columns], row, start, end)


def ragged(
    x: Float[Array, "M K"],
    w: Float[Array, "G K N"],
    sizes: Int[Array, "G"],
    *,
    bn: int = 256,
    slots: int = 3,
    width: int = 1,
    ctas: int = 2,
) -> Float[Array, "M N"]:
    return plgpu.kernel(
        functools.partial(ragged_kernel, width=width),
        out_type=jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((slots, 128, 64), x.dtype, transforms=SWIZZLED),
            plgpu.SMEM((slots, 64, bn), w.dtype, transforms=SWIZZLED),
            plgpu.SMEM((2, 2, 64, 64), x.dtype, transforms=()),  # not swizzled: a copy may begin at any row
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
            plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        ],
    )(x, w, sizes)


# %%
# Budget for x (256, 192), w (4, 192, 512), sizes [100, 7, 0, 149]: gmem_bytes=1_362_016, thread_bytes=96, stores=112.
# The threads load the sizes, and nothing else. stores: copies out of SMEM. With one for each row, it would be 2,048.
check("gpu_matmul/10", ragged)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which row of `o_part` is the first one of the group, if the group began before the part, or inside of it? How many
# rows follow, if the group ends inside, beyond, or before the part? That number in binary says which copies are
# needed: `left & 16` is 16 or 0. Each copy begins where the one before it ended.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def store_rows(o_slot, o_part, row, start, end):
#     first = ____
#     left = ____
#     for size in (64, 32, 16, 8, 4, 2, 1):
#
#         @pl.when(____)
#         def _(size=size, first=first):
#             plgpu.copy_smem_to_gmem(____, ____, commit_group=False)
#
#         first = ____
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def store_rows(o_slot, o_part, row, start, end):
#     first = lax.max(start - row, 0)
#     left = lax.max(lax.min(end - row, 64) - first, 0)
#     for size in (64, 32, 16, 8, 4, 2, 1):
#
#         @pl.when(left & size > 0)
#         def _(size=size, first=first):
#             plgpu.copy_smem_to_gmem(o_slot.at[pl.ds(first, size)], o_part.at[pl.ds(first, size)], commit_group=False)
#
#         first = first + (left & size)
#     plgpu.commit_smem_to_gmem_group()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The products do not know that there are groups. Only two things changed: which weight a tile reads, and
# which rows it stores.

# %% [markdown]
# ## Worked example: rounds
#
# The tiles are dealt out to 132 CTAs in rounds. The last round takes as long as the others, also if most CTAs have
# nothing to do in it:
#
# ```text
#     512 tiles:   132 | 132 | 132 | 116 |      4 rounds
#     136 tiles:   132 |   4 |                  2 rounds
# ```
#
# Small tiles can waste less of the last round. But they need more bytes (Puzzle 4).


# %%
def print_rounds(M, N, bm, bn):
    tiles = (M // bm) * (N // bn)
    rounds = pl.cdiv(tiles, 132)
    lost = 1 - tiles / (rounds * 132)
    print(f"{M} x {N} in {bm} x {bn}: {tiles:4} tiles, {rounds} rounds, {lost:3.0%} of the time is lost")


print_rounds(4096, 4096, 128, 256)
print_rounds(2176, 2048, 128, 256)
# Try it: tiles of 128 x 128.

# %% [markdown]
# ## Puzzle 11: Choose
#
# **Goal.** Write down what a configuration costs. Then let this model choose one for each shape.
#
# ### Theory
#
# JAX's own kernel tries out which configuration is fastest. You can predict it. While the tensor cores compute one
# step of 64, the copy engine brings another one, and the slower of the two decides. These are the figures of one SM of
# an H200. 62 and 20 were fitted to the times at the end of this notebook.
#
# ```text
#     tensor cores         4096 FLOPs a cycle
#     copies into SMEM       62 bytes a cycle
#     end of a tile          20 values a cycle leave the accumulator, while the tensor cores wait
#     SMEM of a CTA     232,448 bytes: the slots, 32,768 for the epilogue, 8 for each barrier
# ```
#
# A tile is all of its steps and its end. A CTA computes one tile in each round. `rounds` is counted as in the worked
# example.
#
# A cluster does not change these times: each SMEM is filled with all it needs. But what a pair shares leaves GMEM or
# the L2 once. So among plans that take as many cycles, choose the one that reads the fewest bytes.


# %%
SMS, SMEM_BYTES, EPILOGUE_BYTES = 132, 232_448, 32_768
TENSOR_FLOPS, COPIED_BYTES, STORED_VALUES = 4096, 62, 20  # of an SM, a cycle


def plans(M, N):
    # given: every (bm, bn, along) that divides the result
    tiles = [(128, 256), (256, 128), (128, 128)]
    pairs = [(along, 2 if along == "m" else 1, 2 if along == "n" else 1) for along in (None, "m", "n")]
    return [(bm, bn, along) for bm, bn in tiles for along, m, n in pairs if M % (bm * m) == N % (bn * n) == 0]


# %%
def slots_that_fit(bm, bn):
    # Return the largest number of slots for bfloat16 tiles of bm x 64 and 64 x bn. Each slot has two barriers.
    pass  # YOUR CODE HERE


def step_bytes(bm, bn, along):
    # Return how many bytes a CTA reads from GMEM for one step of 64, in bfloat16; of what a pair shares, half.
    pass  # YOUR CODE HERE


def cycles(M, N, K, bm, bn):
    # Return how many cycles the product takes: the tiles of a CTA, each with its steps and its end.
    pass  # YOUR CODE HERE


def choose(M, N, K):
    # Return the one of plans(M, N) that takes the fewest cycles; of several such plans, the one with the fewest bytes.
    pass  # YOUR CODE HERE


# %%
def best(a: Float[Array, "M K"], b: Float[Array, "K N"], bias: Float[Array, "N"] | None = None) -> Float[Array, "M N"]:
    (M, K), N = a.shape, b.shape[1]
    bm, bn, along = choose(M, N, K)
    columns = N // bn // (2 if along == "n" else 1)
    width = max(w for w in (1, 2, 4, 8) if columns % w == 0)
    ctas = min(SMS, (M // bm) * (N // bn))
    return clustered(a, b, bias, bm=bm, bn=bn, slots=slots_that_fit(bm, bn), along=along, width=width, ctas=ctas)


def best_spec(
    a: Float[Array, "M K"], b: Float[Array, "K N"], bias: Float[Array, "N"] | None = None
) -> Float[Array, "M N"]:
    product = a.astype(jnp.float32) @ b.astype(jnp.float32)
    return (product if bias is None else jax.nn.gelu(product + bias)).astype(a.dtype)


# %%
# Budget for a (512, 192), b (192, 512): gmem_bytes=1_703_936, smem_bytes=229_472. The check also compares your figures
# with the kernel's, and your choice with every other one.
check("gpu_matmul/11", best)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many bytes does one slot take, with its two barriers? The epilogue's room comes off first. For `step_bytes`:
# which operand does a pair along "m" share? For `cycles`: how many FLOPs is a step, if a multiplication and an addition
# are two? Both tiles have to come in, shared or not. How many tiles has the CTA that has the most? Python compares
# tuples by their first elements first.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def slots_that_fit(bm, bn):
#     return (SMEM_BYTES - ____) // ____
#
#
# def step_bytes(bm, bn, along):
#     a_bytes = bm * 64 * 2 // (2 if ____ else 1)
#     b_bytes = ____
#     return a_bytes + b_bytes
#
#
# def cycles(M, N, K, bm, bn):
#     tensor = ____ / TENSOR_FLOPS
#     copies = ____ / COPIED_BYTES
#     end = ____
#     rounds = ____
#     return ____
#
#
# def choose(M, N, K):
#     return min(____, key=lambda plan: (____, ____))
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def slots_that_fit(bm, bn):
#     return (SMEM_BYTES - EPILOGUE_BYTES) // ((bm + bn) * 64 * 2 + 2 * 8)
#
#
# def step_bytes(bm, bn, along):
#     a_bytes = bm * 64 * 2 // (2 if along == "n" else 1)
#     b_bytes = bn * 64 * 2 // (2 if along == "m" else 1)
#     return a_bytes + b_bytes
#
#
# def cycles(M, N, K, bm, bn):
#     tensor = 2 * bm * bn * 64 / TENSOR_FLOPS
#     copies = (bm + bn) * 64 * 2 / COPIED_BYTES
#     end = bm * bn / STORED_VALUES
#     rounds = pl.cdiv((M // bm) * (N // bn), SMS)
#     return rounds * (K // 64 * max(tensor, copies) + end)
#
#
# def choose(M, N, K):
#     return min(plans(M, N), key=lambda plan: (cycles(M, N, K, *plan[:2]), step_bytes(*plan)))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Four short functions choose among nine configurations, and no kernel had to run. On an H200, their
# choice was within 1% of the fastest of the nine, for each of three shapes.

# %% [markdown]
# ## What you built
#
# A matrix product that is about as fast as cuBLAS, with a layer's epilogue and groups of any size on top of it.
#
# The way there, side by side: all of K at once, the k loop with slots, producer and consumers, and the persistent
# kernel. Look at how the tensor cores' row fills up. (The machine has no L2: all tiles come from GMEM, so copies take
# longer in these pictures than on a chip.)

# %%
a, b = normal((128, 384), "bfloat16"), normal((384, 512), "bfloat16")
show(product, a, b, bn=256)
show(k_loop, a, b, bn=256, slots=3)
show(specialised, a, b, slots=3)
show(persistent, a, b, slots=3, ctas=1)

# %% [markdown]
# Measured on an H200, with 8192 x 8192 x 8192 in bfloat16 (jax 0.11.2, medians of one run, in which all of them took
# turns, L2 flushed before each):
#
# ```text
#     one warpgroup, 64 x 128 (Puzzle 3)             2 slots    419 TFLOP/s
#     producer and consumers, 128 x 256 (Puzzle 5)   2 slots    519
#                                                    4 slots    657
#     the library's pipeline (Puzzle 6)              2 slots    429
#                                                    4 slots    654
#     persistent (Puzzle 8)                          4 slots    680
#     clusters (Puzzle 9)                            4 slots    678
#     cuBLAS                                                    678
# ```
#
# And the kernel of Puzzle 11 beside what you would use otherwise:
#
# ```text
#                                        yours  cuBLAS, XLA  JAX's own kernel
#     1024 x 8192 x 4096                   771          774              775
#     4096 x 4096 x 1024                   655          704              637
#     8192 x 8192 x 8192                   721          720              717
#     1024 x ..., with bias and GELU       616          558
#     4096 x ..., with bias and GELU       578          444
#     8192 x ..., with bias and GELU       753          719
#     ragged dot, 16 groups (Puzzle 10)    644           52              626
# ```
#
# Each table is a comparison of its own. The chip's clock differs between them, so compare within the first table, and
# within a row of the second one. benchmarks/gpu.md has all of them. How good is your model? Each line below divides its
# cycles by a measured time, which gives a clock. An H200 runs at up to 1.98 GHz.

# %%
MEASURED_US = {  # shape -> tile -> microseconds on an H200, from benchmarks/gpu.md
    (1024, 8192, 4096): {(128, 256): 89.5, (256, 128): 89.8, (128, 128): 92.4},
    (4096, 4096, 1024): {(128, 256): 47.8, (256, 128): 48.5, (128, 128): 48.9},
    (8192, 8192, 8192): {(128, 256): 1639.0, (256, 128): 1636.9, (128, 128): 1649.7},
}
if not unwritten(cycles):
    for (M, N, K), times in MEASURED_US.items():
        for (bm, bn), us in times.items():
            predicted = cycles(M, N, K, bm, bn)
            ghz = predicted / us / 1000
            print(f"{M} x {N} x {K} in {bm} x {bn}: {predicted:9,.0f} cycles, {us:6.1f} us measured: {ghz:.2f} GHz")

# %% [markdown]
# This shows ratios only: the clock during these runs was not fixed. For the first two shapes it comes out nearly the
# same in each line, so the model has the ratios of these times right within 3%. At the largest shape the chip has
# lowered its clock. (The slowest that was read during this run was 1.2 GHz.) There the tensor cores hardly ever wait.
# For tiles of 128 x 256, clusters and the order of the tiles changed these times by about 1%. Both save traffic, and
# traffic was not what this chip was short of.
#
# What does NVIDIA's compiler say? `gpu_report` compiles your kernel for a chip that need not be there. Compare its
# SMEM with your `slots_that_fit`. Look at the registers, at the number of HGMMA instructions (wgmma's name in the
# machine code), and at what bounds it.

# %%
big = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
gpu_report(best, big, big, chip="h200")

# %% [markdown]
# **Read next.** JAX's `hopper_matmul_mgpu` and `ragged_dot_mgpu`, in `jax.experimental.pallas.ops.gpu`: you know every
# line of them by now. gpu_attention.py puts a softmax between two such products.

# %%
progress()
