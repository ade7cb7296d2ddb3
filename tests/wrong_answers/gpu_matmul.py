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
# epilogue: `jax.nn.gelu(x + along_columns(biases(bias_part, part), x.shape))` -> `jax.nn.gelu(x) + along_columns(biases(bias_part, part), x.shape)`

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
        x = jax.nn.gelu(x + along_columns(biases(bias_part, part), x.shape))
        o_part[:, columns] = x.astype(o_smem.dtype)
