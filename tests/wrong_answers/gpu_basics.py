"""Wrong answers to puzzles/gpu_basics.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# %% gpu_basics/1: the names of the grid are exchanged
# add_ten_kernel: `axis_index("row")` -> `axis_index("part")`
# add_ten_kernel: `j = lax.axis_index("part")` -> `j = lax.axis_index("row")`

# %% gpu_basics/1: the slice starts at the part's number
# add_ten_kernel: `pl.ds(j * bn, bn)` -> `pl.ds(j, bn)`

# %% gpu_basics/1: every CTA stores row 0
# add_ten_kernel: `o_gmem[i, columns]` -> `o_gmem[0, columns]`

# %% gpu_basics/1: only the first part of each row
# add_ten_kernel: `pl.ds(j * bn, bn)` -> `pl.ds(0, bn)`


# %% gpu_basics/1: every CTA does all of the matrix
def add_ten_kernel(x_gmem, o_gmem, *, bn):
    o_gmem[...] = x_gmem[...] + 10


# %% gpu_basics/1: the first CTA of a row does all of it
def add_ten_kernel(x_gmem, o_gmem, *, bn):
    i = lax.axis_index("row")

    @pl.when(lax.axis_index("part") == 0)
    def _():
        o_gmem[i] = x_gmem[i] + 10


# %% gpu_basics/1: the example's width
# add_ten_kernel: `pl.ds(j * bn, bn)` -> `pl.ds(j * 256, 256)`

# %% gpu_basics/2: no maximum is subtracted
# softmax_kernel: `jnp.exp(x - jnp.max(x))` -> `jnp.exp(x)`

# %% gpu_basics/2: the row is loaded again for the sum
# softmax_kernel: `e / jnp.sum(e)` -> `e / jnp.sum(jnp.exp(x_gmem[i] - jnp.max(x_gmem[i])))`

# %% gpu_basics/2: not divided
# softmax_kernel: `e / jnp.sum(e)` -> `e`

# %% gpu_basics/2: divided by the maximum
# softmax_kernel: `e / jnp.sum(e)` -> `e / jnp.max(e)`


# %% gpu_basics/2: somebody else's softmax
# softmax_kernel:
# -    x = x_gmem[i]
# -    e = jnp.exp(x - jnp.max(x))
# -    o_gmem[i] = e / jnp.sum(e)
# +    o_gmem[i] = jax.nn.softmax(x_gmem[i])

# %% gpu_basics/2: the columns are sorted first
# softmax_kernel: `x = x_gmem[i]` -> `x = jnp.sort(x_gmem[i])`

# %% gpu_basics/2: long rows are loaded three times
# softmax_kernel:
# -    x = x_gmem[i]
# +    x = x_gmem[i]
# +    if x.shape[0] > 1024:
# +        x = x_gmem[i] + 0 * x_gmem[i]

# %% gpu_basics/3: nobody waits for the copy
# smooth_kernel:
# -    plgpu.barrier_wait(loaded)

# %% gpu_basics/3: waits twice
# smooth_kernel: `plgpu.barrier_wait(loaded)` -> `(plgpu.barrier_wait(loaded), plgpu.barrier_wait(loaded))`


# %% gpu_basics/3: three loads from GMEM
# smooth_kernel:
# -    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * bm, bm + 2), columns], x_smem, loaded)
# -    plgpu.barrier_wait(loaded)
# -    total = x_smem[pl.ds(0, bm)] + x_smem[pl.ds(1, bm)] + x_smem[pl.ds(2, bm)]
# +    total = sum(x_gmem[pl.ds(i * bm + s, bm), columns] for s in range(3))

# %% gpu_basics/3: the threads fill SMEM themselves
# smooth_kernel:
# -    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * bm, bm + 2), columns], x_smem, loaded)
# -    plgpu.barrier_wait(loaded)
# +    x_smem[...] = x_gmem[pl.ds(i * bm, bm + 2), columns]

# %% gpu_basics/3: the row in the middle twice
# smooth_kernel: `x_smem[pl.ds(0, bm)]` -> `x_smem[pl.ds(1, bm)]`

# %% gpu_basics/3: tiles two rows apart
# smooth_kernel: `pl.ds(i * bm, bm + 2)` -> `pl.ds(i * (bm + 2), bm + 2)`

# %% gpu_basics/3: the axes of the grid are exchanged
# smooth_kernel: `lax.axis_index("i"), lax.axis_index("j")` -> `lax.axis_index("j"), lax.axis_index("i")`

# %% gpu_basics/4: the engine does not see the result
# gelu_kernel:
# -    plgpu.commit_smem()

# %% gpu_basics/4: ends before the copy has
# gelu_kernel:
# -    plgpu.wait_smem_to_gmem(0)

# %% gpu_basics/4: one copy may be on its way at the end
# gelu_kernel: `plgpu.wait_smem_to_gmem(0)` -> `plgpu.wait_smem_to_gmem(1)`

# %% gpu_basics/4: threads store the result
# gelu_kernel:
# -    plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, columns])
# gelu_kernel: `plgpu.wait_smem_to_gmem(0)` -> `o_gmem[rows, columns] = o_smem[...]`

# %% gpu_basics/4: carried out before it is computed
# gelu_kernel:
# -    plgpu.commit_smem()
# gelu_kernel: `o_smem[...] = jax.nn.gelu(x_smem[...])` -> `plgpu.commit_smem()`
# gelu_kernel: `plgpu.wait_smem_to_gmem(0)` -> `o_smem[...] = jax.nn.gelu(x_smem[...]); plgpu.wait_smem_to_gmem(0)`

# %% gpu_basics/4: nobody waits for the input
# gelu_kernel:
# -    plgpu.barrier_wait(loaded)

# %% gpu_basics/4: relu
# gelu_kernel: `jax.nn.gelu` -> `jax.nn.relu`

# %% gpu_basics/4: a GELU whose exponentials overflow
# gelu_kernel:
# -    o_smem[...] = jax.nn.gelu(x_smem[...])
# +    x = x_smem[...]
# +    e = jnp.exp(1.5957691 * (x + 0.044715 * x**3))
# +    o_smem[...] = 0.5 * x * (1 + (e - 1) / (e + 1))

# %% gpu_basics/4b: the next tile into the same slot
# strip_step: `load_tile(x_gmem, x_smem, loaded, t + 1)` -> `load_tile(x_gmem, x_smem, loaded, t + 2)`
# strip_step: `t + 1 < num_tiles` -> `t + 2 < num_tiles`

# %% gpu_basics/4b: a tile that does not exist
# strip_step: `t + 1 < num_tiles` -> `t < num_tiles`

# %% gpu_basics/4b: the last tile is never started
# strip_step: `t + 1 < num_tiles` -> `t + 2 < num_tiles`

# %% gpu_basics/4b: its own tile is started again
# strip_step: `load_tile(x_gmem, x_smem, loaded, t + 1)` -> `load_tile(x_gmem, x_smem, loaded, t)`


# %% gpu_basics/4b: the next tile is started after this one
def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
    slot = lax.rem(t, 2)
    plgpu.barrier_wait(loaded.at[slot])
    finish(t, x_smem.at[slot])

    @pl.when(t + 1 < num_tiles)
    def _():
        load_tile(x_gmem, x_smem, loaded, t + 1)


# %% gpu_basics/4b: waits for its tile before it starts the next one
def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
    slot = lax.rem(t, 2)
    plgpu.barrier_wait(loaded.at[slot])

    @pl.when(t + 1 < num_tiles)
    def _():
        load_tile(x_gmem, x_smem, loaded, t + 1)

    finish(t, x_smem.at[slot])


# %% gpu_basics/4b: waits for its tile too late
def strip_step(t, num_tiles, x_gmem, x_smem, loaded, finish):
    slot = lax.rem(t, 2)

    @pl.when(t + 1 < num_tiles)
    def _():
        load_tile(x_gmem, x_smem, loaded, t + 1)

    finish(t, x_smem.at[slot])
    plgpu.barrier_wait(loaded.at[slot])


# %% gpu_basics/4b: waits for the other slot
# strip_step: `loaded.at[slot]` -> `loaded.at[1 - slot]`

# %% gpu_basics/4b: finishes the other slot
# strip_step: `x_smem.at[slot]` -> `x_smem.at[1 - slot]`

# %% gpu_basics/5: the slot on the way out is not waited for
# send_tile:
# -    plgpu.wait_smem_to_gmem(1)

# %% gpu_basics/5: waits until everything is out
# send_tile: `wait_smem_to_gmem(1)` -> `wait_smem_to_gmem(0)`

# %% gpu_basics/5: waits until everything is read
# send_tile: `wait_smem_to_gmem(1)` -> `wait_smem_to_gmem(0, wait_read_only=True)`

# %% gpu_basics/5: two copies may still read
# send_tile: `wait_smem_to_gmem(1)` -> `wait_smem_to_gmem(2)`

# %% gpu_basics/5: waits until everything is out, before the copy
# send_tile:
# -    plgpu.wait_smem_to_gmem(1)
# send_tile: `store_tile(o_smem, o_gmem, t)` -> `plgpu.wait_smem_to_gmem(0); store_tile(o_smem, o_gmem, t)`

# %% gpu_basics/5: always the first slot
# send_tile: `o_smem[lax.rem(t, 2)]` -> `o_smem[0]`

# %% gpu_basics/5: the other slot
# send_tile: `lax.rem(t, 2)` -> `lax.rem(t + 1, 2)`


# %% gpu_basics/5: waits after the result is stored
def send_tile(t, x_tile, o_smem, o_gmem):
    o_smem[lax.rem(t, 2)] = jax.nn.gelu(x_tile[...])
    plgpu.wait_smem_to_gmem(1)
    plgpu.commit_smem()
    store_tile(o_smem, o_gmem, t)


# %% gpu_basics/5: no commit
# send_tile:
# -    plgpu.commit_smem()

# %% gpu_basics/6: the numbers of the block are exchanged
# tile_map: `return (i, strip)` -> `return (strip, i)`

# %% gpu_basics/6: the bias follows the loop
# bias_map: `return (strip,)` -> `return (i,)`

# %% gpu_basics/6: always the first bias
# bias_map: `return (strip,)` -> `return (0,)`

# %% gpu_basics/6: elements instead of blocks
# tile_map: `return (i, strip)` -> `return (i, strip * 128)`

# %% gpu_basics/6: the bias after GELU
# bias_gelu_step: `jax.nn.gelu(x_smem[...] + bias_smem[...])` -> `jax.nn.gelu(x_smem[...]) + bias_smem[...]`

# %% gpu_basics/7: only what is on its way
# slots_needed: `1 + ` -> ``


# %% gpu_basics/7: always two
# slots_needed:
# -    ahead = LATENCY_CYCLES * BYTES_PER_CYCLE
# -    return 1 + pl.cdiv(int(ahead), tile_bytes)
# +    return 2

# %% gpu_basics/7: as many as one can have
# slots_needed: `1 + pl.cdiv(int(ahead), tile_bytes)` -> `200_000 // tile_bytes`

# %% gpu_basics/7: rounded down
# slots_needed: `pl.cdiv(int(ahead), tile_bytes)` -> `int(ahead) // tile_bytes`


# %% gpu_basics/7: the example's three
# slots_needed:
# -    ahead = LATENCY_CYCLES * BYTES_PER_CYCLE
# -    return 1 + pl.cdiv(int(ahead), tile_bytes)
# +    return 3

# %% gpu_basics/7: a table of the example and the variants
# slots_needed:
# -    ahead = LATENCY_CYCLES * BYTES_PER_CYCLE
# -    return 1 + pl.cdiv(int(ahead), tile_bytes)
# +    return {8192: 3, 4096: 4, 32_768: 2}.get(tile_bytes, 3)

# %% gpu_basics/7: a float
# slots_needed: `pl.cdiv(int(ahead), tile_bytes)` -> `ahead / tile_bytes`

# %% gpu_basics/7: a slot more where tiles fill the law exactly
# slots_needed: `pl.cdiv(int(ahead), tile_bytes)` -> `int(ahead) // tile_bytes + 1`

# %% gpu_basics/7: never more than 16 slots
# slots_needed: `1 + pl.cdiv(int(ahead), tile_bytes)` -> `min(16, 1 + pl.cdiv(int(ahead), tile_bytes))`

# %% gpu_basics/8: the mean down the columns
# normed: `axis=1` -> `axis=0`

# %% gpu_basics/8: no layout
# normed: `plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)` -> `x_smem[...]`

# %% gpu_basics/8: the sum, not the mean
# normed: ` / x_smem.shape[1]` -> ``

# %% gpu_basics/8: the mean keeps its second axis
# normed: `axis=1)` -> `axis=1, keepdims=True)`
# normed: `1e-6)[:, None]` -> `1e-6)`

# %% gpu_basics/8: widened before the root
# normed: `lax.rsqrt(mean_square + 1e-6)[:, None]` -> `lax.rsqrt(mean_square[:, None] + 1e-6)`

# %% gpu_basics/8: without 1e-6
# normed: `mean_square + 1e-6` -> `mean_square`

# %% gpu_basics/8: the mean of the rows is 64
# normed: `x_smem.shape[1]` -> `x_smem.shape[0]`

# %% gpu_basics/8: not squared
# normed: `x * x` -> `x`


# %% gpu_basics/8: row by row
def normed(x_smem):
    @pl.loop(0, 64)
    def _(row):
        x = x_smem[row]
        x_smem[row] = x * lax.rsqrt(jnp.sum(x * x) / x_smem.shape[1] + 1e-6)

    return x_smem[...]


# %% gpu_basics/9: the rows that do not exist count
# column_lse:
# -    x = jnp.where(row < rows_left, x, -jnp.inf)

# %% gpu_basics/9: replaced by zeros
# column_lse: `x, -jnp.inf)` -> `x, 0.0)`

# %% gpu_basics/9: one row too many
# column_lse: `row < rows_left` -> `row <= rows_left`

# %% gpu_basics/9: along the rows
# column_lse: `jnp.max(x, axis=0)` -> `jnp.max(x, axis=1)`

# %% gpu_basics/9: the maximum is not added
# column_lse: `top + jnp.log` -> `jnp.log`


# %% gpu_basics/9: replaced after the maximum
# elsewhere: the line that is too late is told where it belongs
# column_lse:
# -    x = jnp.where(row < rows_left, x, -jnp.inf)
# column_lse:
# -    e = jnp.exp(x - top)
# +    e = jnp.exp(x - top)
# +    e = jnp.where(row < rows_left, e, 0.0)


# %% gpu_basics/9: two loops over the rows that exist
def column_lse(x_smem, rows_left):
    rows = jnp.minimum(rows_left, x_smem.shape[0])
    top = lax.fori_loop(1, rows, lambda row, top: jnp.maximum(top, x_smem[row]), x_smem[0])
    return top + jnp.log(
        lax.fori_loop(0, rows, lambda row, total: total + jnp.exp(x_smem[row] - top), jnp.zeros_like(top))
    )


# %% gpu_basics/9: one loop over the rows that exist
def column_lse(x_smem, rows_left):
    def step(row, carry):
        top, total = carry
        x = x_smem[row]
        new = jnp.maximum(top, x)
        return new, total * jnp.exp(top - new) + jnp.exp(x - new)

    rows = jnp.minimum(rows_left, x_smem.shape[0])
    top, total = lax.fori_loop(1, rows, step, (x_smem[0], jnp.ones(x_smem.shape[1], jnp.float32)))
    return top + jnp.log(total)


# %% gpu_basics/10: computed in bfloat16
# fast_softmax_kernel: `x_gmem[i].astype(jnp.float32)` -> `x_gmem[i]`

# %% gpu_basics/10: the sum in bfloat16
# fast_softmax_kernel: `(e / jnp.sum(e)).astype(o_gmem.dtype)` -> `e.astype(o_gmem.dtype) / jnp.sum(e.astype(o_gmem.dtype))`

# %% gpu_basics/10: read only
# softmax_bytes: `2 * M` -> `M`

# %% gpu_basics/10: always four bytes
# softmax_bytes: `N * itemsize` -> `N * 4`

# %% gpu_basics/10: registers are not rounded up
# ctas_per_sm: `8 * pl.cdiv(registers, 8)` -> `registers`

# %% gpu_basics/10: registers of a CTA
# ctas_per_sm: `(128 * 8 *` -> `(8 *`

# %% gpu_basics/10: no end of threads
# ctas_per_sm: `by_smem, 2048 // 128)` -> `by_smem)`

# %% gpu_basics/10: SMEM does not count
# ctas_per_sm: `by_registers, by_smem,` -> `by_registers,`
