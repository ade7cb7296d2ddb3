"""Wrong answers to puzzles/gpu_matmul.py, and what a verdict has to say about each."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# %% gpu_matmul/1: nobody waits for the copies
# product_kernel:
# -    plgpu.barrier_wait(loaded)

# %% gpu_matmul/1: waits for each copy
# product_kernel: `plgpu.barrier_wait(loaded)` -> `(plgpu.barrier_wait(loaded), plgpu.barrier_wait(loaded))`

# %% gpu_matmul/1: the names of the grid are exchanged
# product_kernel: `lax.axis_index("i") * 64` -> `lax.axis_index("j") * 64`
# product_kernel: `lax.axis_index("j") * bn` -> `lax.axis_index("i") * bn`

# %% gpu_matmul/1: always the first columns of b
# product_kernel: `b_gmem.at[:, columns]` -> `b_gmem.at[:, pl.ds(0, bn)]`

# %% gpu_matmul/1: the example's 128 columns
# product_kernel: `plgpu.ACC((64, bn))` -> `plgpu.ACC((64, 128))`

# %% gpu_matmul/1: an accumulator of 32 rows
# product_kernel: `plgpu.ACC((64, bn))` -> `plgpu.ACC((32, bn))`


# %% gpu_matmul/1: ordinary instructions
def product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    columns = pl.ds(lax.axis_index("j") * bn, bn)
    plgpu.copy_gmem_to_smem(a_gmem.at[rows], a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)
    plgpu.barrier_wait(loaded)
    o_gmem[rows, columns] = (a_smem[...] @ b_smem[...]).astype("float32")


# %% gpu_matmul/2: every row is a turn of its own
# turns: `return 8 // rows_in_a_turn` -> `return 8`

# %% gpu_matmul/2: the rows of a turn
# turns: `return 8 // rows_in_a_turn` -> `return rows_in_a_turn`

# %% gpu_matmul/2: banks of 8 bytes
# turns: `% 128` -> `% 256`

# %% gpu_matmul/2: always 128
# swizzle_for: `row_bytes % swizzle == 0` -> `swizzle == 128`

# %% gpu_matmul/2: the widest that fits into a row
# swizzle_for: `row_bytes % swizzle == 0` -> `swizzle <= row_bytes`

# %% gpu_matmul/2: always the narrowest
# swizzle_for: `(128, 64, 32)` -> `(32,)`

# %% gpu_matmul/3: copies into a slot that is still read
# multiply_step:
# -    plgpu.wgmma_wait(1)

# %% gpu_matmul/3: two products may be going on
# multiply_step: `plgpu.wgmma_wait(1)` -> `plgpu.wgmma_wait(2)`

# %% gpu_matmul/3: waits for its own product
# multiply_step: `plgpu.wgmma_wait(1)` -> `plgpu.wgmma_wait(0)`

# %% gpu_matmul/3: the slot of its own product
# multiply_step: `load_step(k + slots - 1,` -> `load_step(k + slots,`
# multiply_step: `k + slots - 1 < steps` -> `k + slots < steps`

# %% gpu_matmul/3: tiles beyond the end
# multiply_step: `k + slots - 1 < steps` -> `k < steps`

# %% gpu_matmul/3: the last step is never copied
# multiply_step: `k + slots - 1 < steps` -> `k + slots < steps`

# %% gpu_matmul/3: nobody waits for the tiles
# multiply_step:
# -    plgpu.barrier_wait(loaded.at[slot])

# %% gpu_matmul/3: the example's two slots
# multiply_step: `lax.rem(k, slots)` -> `lax.rem(k, 2)`


# %% gpu_matmul/3: one tile after the other
def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
    @pl.when(k >= slots - 1)
    def _():
        load_step(k, slots, a_part, b_part, a_smem, b_smem, loaded)

    slot = lax.rem(k, slots)
    plgpu.barrier_wait(loaded.at[slot])
    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
    plgpu.wgmma_wait(0)


# %% gpu_matmul/4: registers of one warpgroup
# accumulator_registers: `(128 * warpgroups)` -> `128`

# %% gpu_matmul/4: registers of a warp
# accumulator_registers: `(128 * warpgroups)` -> `(32 * warpgroups)`

# %% gpu_matmul/4: both start the copies
# shared_kernel: `wg == 0` -> `wg >= 0`

# %% gpu_matmul/4: only one waits
# shared_kernel: `    plgpu.barrier_wait(loaded)` -> `    pl.when(wg == 0)(lambda: plgpu.barrier_wait(loaded))`

# %% gpu_matmul/4: both compute the upper half
# shared_kernel: `a_smem.at[pl.ds(wg * half, half)]` -> `a_smem.at[pl.ds(0, half)]`

# %% gpu_matmul/4: both store the upper half
# shared_kernel: `o_gmem[pl.ds(row + wg * half, half), columns]` -> `o_gmem[pl.ds(row, half), columns]`

# %% gpu_matmul/4: the halves of the example
# shared_kernel: `half = bm // 2` -> `half = 64`

# %% gpu_matmul/5: a slot is never given back
# consume:
# -    plgpu.barrier_arrive(empty.at[slot])

# %% gpu_matmul/5: given back while the tensor cores read
# consume:
# -    plgpu.wgmma_wait(0)

# %% gpu_matmul/5: given back before the product is over
# consume:
# -    plgpu.barrier_arrive(empty.at[slot])
# consume: `    plgpu.wgmma_wait(0)` -> `    plgpu.barrier_arrive(empty.at[slot]); plgpu.wgmma_wait(0)`

# %% gpu_matmul/5: nobody waits for the tiles
# consume:
# -    plgpu.barrier_wait(full.at[slot])

# %% gpu_matmul/5: nobody waits for a free slot
# produce: `plgpu.barrier_wait(empty.at[slot])` -> `pass`

# %% gpu_matmul/5: waits for slots that nobody has used
# produce: `k >= slots` -> `k >= 0`

# %% gpu_matmul/5: one copy at the wrong barrier
# produce: `plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])` -> `plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], empty.at[slot])`

# %% gpu_matmul/5: both take the upper half
# consume: `a_smem.at[slot, half]` -> `a_smem.at[slot, pl.ds(0, 64)]`

# %% gpu_matmul/5: the example's two slots
# produce: `k >= slots` -> `k >= 2`

# %% gpu_matmul/6: the numbers of a's blocks are exchanged
# a_map: `return (i, k)` -> `return (k, i)`

# %% gpu_matmul/6: elements instead of blocks
# b_map: `return (k, j)` -> `return (k * 64, j)`

# %% gpu_matmul/6: the first columns of b
# b_map: `return (k, j)` -> `return (k, 0)`

# %% gpu_matmul/6: nobody waits for the product
# pipeline_step:
# -    plgpu.wgmma_wait(1)

# %% gpu_matmul/6: waits for its own product
# pipeline_step: `plgpu.wgmma_wait(1)` -> `plgpu.wgmma_wait(0)`

# %% gpu_matmul/6: two products may be going on
# pipeline_step: `plgpu.wgmma_wait(1)` -> `plgpu.wgmma_wait(2)`

# %% gpu_matmul/6: both take the upper half
# pipeline_step: `a_smem.at[half]` -> `a_smem.at[pl.ds(0, 64)]`

# %% gpu_matmul/7: the slots are not waited for
# epilogue:
# -        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

# %% gpu_matmul/7: two copies may still read
# epilogue: `wait_smem_to_gmem(1,` -> `wait_smem_to_gmem(2,`

# %% gpu_matmul/7: the engine does not see the part
# epilogue:
# -        plgpu.commit_smem()

# %% gpu_matmul/7: ends before the copies have
# epilogue:
# -    plgpu.wait_smem_to_gmem(0)

# %% gpu_matmul/7: the bias after GELU
# epilogue: `jax.nn.gelu(x + biases(bias_part, part))` -> `jax.nn.gelu(x) + biases(bias_part, part)`

# %% gpu_matmul/7: always the first biases
# epilogue: `biases(bias_part, part)` -> `biases(bias_part, 0)`

# %% gpu_matmul/7: rounded before the bias
# epilogue: `x = result[:, columns]` -> `x = result[:, columns].astype(o_smem.dtype)`

# %% gpu_matmul/7: four parts
# epilogue: `range(result.shape[1] // 64)` -> `range(4)`


# %% gpu_matmul/7: threads store the result
def epilogue(result, bias_part, o_part, o_smem):
    for part in range(result.shape[1] // 64):
        columns = slice(part * 64, part * 64 + 64)
        x = result[:, columns]
        x = jax.nn.gelu(x + biases(bias_part, part))
        o_part[:, columns] = x.astype(o_smem.dtype)


# %% gpu_matmul/7: one slot
def epilogue(result, bias_part, o_part, o_smem):
    for part in range(result.shape[1] // 64):
        columns = slice(part * 64, part * 64 + 64)
        x = jax.nn.gelu(result[:, columns] + biases(bias_part, part))
        o_smem[0] = x.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[0], o_part.at[:, columns])
        plgpu.wait_smem_to_gmem(0)


# %% gpu_matmul/8: the slots begin anew with each tile
# produce_tile: `step = n * steps + k` -> `step = k`
# consume_tile: `n * steps + k` -> `k`

# %% gpu_matmul/8: the producer begins anew with each tile
# produce_tile: `step = n * steps + k` -> `step = k`

# %% gpu_matmul/8: the first slots of each tile are not waited for
# produce_tile: `step >= slots` -> `k >= slots`

# %% gpu_matmul/8: copies the steps of all tiles before
# produce_tile: `pl.ds(k * 64, 64)` -> `pl.ds(step * 64, 64)`

# %% gpu_matmul/8: the consumers begin anew with each tile
# consume_tile: `n * steps + k` -> `k`

# %% gpu_matmul/8: the steps of the tiles before are counted twice
# consume_tile: `@pl.loop(0, steps)` -> `@pl.loop(n * steps, n * steps + steps)`

# %% gpu_matmul/8: a strip of one row
# tile_order: `strip, within = lax.div(t, m_tiles * width), lax.rem(t, m_tiles * width)` -> `strip, within = lax.div(t, width), lax.rem(t, width)`

# %% gpu_matmul/8: rows and columns are exchanged
# tile_order: `return lax.div(within, width), strip * width + lax.rem(within, width)` -> `return strip * width + lax.rem(within, width), lax.div(within, width)`

# %% gpu_matmul/8: column after column
# tile_order: `return lax.div(within, width), strip * width + lax.rem(within, width)` -> `return lax.rem(t, m_tiles), lax.div(t, m_tiles)`


# %% gpu_matmul/8: the producer waits until a tile is computed
def tile_order(t, m_tiles, width):
    strip, within = lax.div(t, m_tiles * width), lax.rem(t, m_tiles * width)
    return lax.div(within, width), strip * width + lax.rem(within, width)


def produce_tile(n, steps, slots, a_part, b_part, a_smem, b_smem, full, empty):
    @pl.loop(0, steps)
    def _(k):
        step = n * steps + k
        slot, part = lax.rem(step, slots), pl.ds(k * 64, 64)

        @pl.when(k >= slots)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])

    @pl.loop(max(0, steps - slots), steps)
    def _(k):
        plgpu.barrier_wait(empty.at[lax.rem(n * steps + k, slots)])


def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
    @pl.loop(0, steps)
    def _(k):
        consume(n * steps + k, slots, acc, rows, a_smem, b_smem, full, empty)


# %% gpu_matmul/8: a slot is given back one step later, and the last one never
def tile_order(t, m_tiles, width):
    strip, within = lax.div(t, m_tiles * width), lax.rem(t, m_tiles * width)
    return lax.div(within, width), strip * width + lax.rem(within, width)


def produce_tile(n, steps, slots, a_part, b_part, a_smem, b_smem, full, empty):
    @pl.loop(0, steps)
    def _(k):
        step = n * steps + k
        slot, part = lax.rem(step, slots), pl.ds(k * 64, 64)

        @pl.when(step >= slots)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])


def consume_tile(n, steps, slots, acc, rows, a_smem, b_smem, full, empty):
    @pl.loop(0, steps)
    def _(k):
        step = n * steps + k
        slot = lax.rem(step, slots)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(acc, a_smem.at[slot, rows], b_smem.at[slot])
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(empty.at[lax.rem(step - 1, slots)])

    plgpu.wgmma_wait(0)


# %% gpu_matmul/9: nothing is shared
# produce_shared: `b_axes = "cluster" if along == "m" else None` -> `b_axes = None`

# %% gpu_matmul/9: the wrong operand is shared
# produce_shared: `a_axes = "cluster" if along == "n" else None` -> `a_axes = "cluster" if along == "m" else None`
# produce_shared: `b_axes = "cluster" if along == "m" else None` -> `b_axes = "cluster" if along == "n" else None`

# %% gpu_matmul/9: both operands are shared
# produce_shared: `a_axes = "cluster" if along == "n" else None` -> `a_axes = "cluster" if along else None`
# produce_shared: `b_axes = "cluster" if along == "m" else None` -> `b_axes = "cluster" if along else None`

# %% gpu_matmul/9: only one CTA of a pair copies
# produce_shared: `        plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot], collective_axes=b_axes)` -> `        pl.when(lax.axis_index("cluster") == 0)(lambda: plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot], collective_axes=b_axes))`

# %% gpu_matmul/9: the slots begin anew with each tile
# produce_shared: `step = n * steps + k` -> `step = k`

# %% gpu_matmul/9: nobody waits for a free slot
# produce_shared: `plgpu.barrier_wait(empty.at[slot])` -> `pass`

# %% gpu_matmul/9: both compute the same tile
# partner_tile: `return 2 * i + rank, j` -> `return 2 * i, j`

# %% gpu_matmul/9: as many rows of pairs as of tiles
# partner_tile: `tile_order(t, m_tiles // 2, width)` -> `tile_order(t, m_tiles, width)`

# %% gpu_matmul/9: the rank counts columns of pairs
# partner_tile: `return i, 2 * j + rank` -> `return i, j + rank`

# %% gpu_matmul/9: the pair's other tile half of the matrix below
# partner_tile: `2 * i + rank, j` -> `i + rank * (m_tiles // 2), j`

# %% gpu_matmul/10: the neighbour's rows before the group
# store_rows: `first = lax.max(start - row, 0)` -> `first = 0`

# %% gpu_matmul/10: no group of copies behind the last row
# store_rows: `    plgpu.commit_smem_to_gmem_group()` -> `    pl.when(end > row)(plgpu.commit_smem_to_gmem_group)`

# %% gpu_matmul/10: the neighbour's rows behind the group
# store_rows: `lax.min(end - row, 64)` -> `64`

# %% gpu_matmul/10: the group's end is not a row of this part
# store_rows: `lax.min(end - row, 64)` -> `(end - row)`

# %% gpu_matmul/10: as if every group began in this part
# store_rows: `first = lax.max(start - row, 0)` -> `first = start - row`

# %% gpu_matmul/10: parts without a row of the group
# store_rows: `left = lax.max(lax.min(end - row, 64) - first, 0)` -> `left = lax.min(end - row, 64) - first`

# %% gpu_matmul/10: all copies begin at the first row
# store_rows: `first = first + (left & size)` -> `first = first`

# %% gpu_matmul/10: goes on whether or not a copy was needed
# store_rows: `first = first + (left & size)` -> `first = first + size`

# %% gpu_matmul/10: never a single row
# store_rows: `(64, 32, 16, 8, 4, 2, 1)` -> `(64, 32, 16, 8, 4, 2)`

# %% gpu_matmul/10: the copies are in no group
# store_rows:
# -    plgpu.commit_smem_to_gmem_group()


# %% gpu_matmul/10: all rows of the tile
def store_rows(o_slot, o_part, row, start, end):
    plgpu.copy_smem_to_gmem(o_slot, o_part)


# %% gpu_matmul/10: one row a copy
def store_rows(o_slot, o_part, row, start, end):
    for r in range(64):

        @pl.when((row + r >= start) & (row + r < end))
        def _(r=r):
            plgpu.copy_smem_to_gmem(o_slot.at[pl.ds(r, 1)], o_part.at[pl.ds(r, 1)], commit_group=False)

    plgpu.commit_smem_to_gmem_group()


# %% gpu_matmul/11: the epilogue's SMEM is left out
# slots_that_fit: `(SMEM_BYTES - EPILOGUE_BYTES)` -> `SMEM_BYTES`

# %% gpu_matmul/11: slots without barriers
# slots_that_fit: `((bm + bn) * 64 * 2 + 2 * 8)` -> `((bm + bn) * 64 * 2)`

# %% gpu_matmul/11: pairs along m share a
# step_bytes: `(2 if along == "n" else 1)` -> `(2 if along == "m" else 1)`
# step_bytes: `bn * 64 * 2 // (2 if along == "m" else 1)` -> `bn * 64 * 2 // (2 if along == "n" else 1)`

# %% gpu_matmul/11: nothing is shared
# step_bytes: `bn * 64 * 2 // (2 if along == "m" else 1)` -> `bn * 64 * 2`

# %% gpu_matmul/11: the engines wait for each other
# cycles: `max(tensor, copies)` -> `(tensor + copies)`

# %% gpu_matmul/11: part of a round
# cycles: `pl.cdiv((M // bm) * (N // bn), SMS)` -> `(M // bm) * (N // bn) / SMS`

# %% gpu_matmul/11: half of the FLOPs
# cycles: `tensor = 2 * bm * bn * 64 / TENSOR_FLOPS` -> `tensor = bm * bn * 64 / TENSOR_FLOPS`

# %% gpu_matmul/11: a tile ends in no time
# cycles: `rounds * (K // 64 * max(tensor, copies) + end)` -> `rounds * (K // 64 * max(tensor, copies))`

# %% gpu_matmul/11: every step has an end
# cycles: `K // 64 * max(tensor, copies) + end` -> `K // 64 * (max(tensor, copies) + end)`

# %% gpu_matmul/11: the slowest plan
# choose: `min(` -> `max(`

# %% gpu_matmul/11: always the first plan
# choose: `return min(plans(M, N), key=lambda plan: (cycles(M, N, K, *plan[:2]), step_bytes(*plan)))` -> `return plans(M, N)[0]`

# %% gpu_matmul/11: only the fewest bytes
# choose: `(cycles(M, N, K, *plan[:2]), step_bytes(*plan))` -> `step_bytes(*plan)`

# %% gpu_matmul/11: only the fewest cycles
# choose: `(cycles(M, N, K, *plan[:2]), step_bytes(*plan))` -> `cycles(M, N, K, *plan[:2])`

# %% gpu_matmul/11: a round more where the last one is full
# cycles: `pl.cdiv((M // bm) * (N // bn), SMS)` -> `(M // bm) * (N // bn) // SMS + 1`
