"""The answers to puzzles/gpu_matmul.py: the functions that fill its holes."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


# Puzzle 1
def product_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bn):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    columns = pl.ds(lax.axis_index("j") * bn, bn)
    plgpu.copy_gmem_to_smem(a_gmem.at[rows], a_smem, loaded)
    plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)
    plgpu.barrier_wait(loaded)

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    o_gmem[rows, columns] = pl.run_scoped(multiply, plgpu.ACC((64, bn)))


# Puzzle 2
def turns(row_bytes):
    rows_in_a_turn = 1
    while rows_in_a_turn * row_bytes % 128:
        rows_in_a_turn *= 2
    return 8 // rows_in_a_turn


def swizzle_for(row_bytes):
    for swizzle in (128, 64, 32):
        if row_bytes % swizzle == 0:
            return swizzle


# Puzzle 3
def multiply_step(k, steps, slots, acc, a_part, b_part, a_smem, b_smem, loaded):
    slot = lax.rem(k, slots)
    plgpu.barrier_wait(loaded.at[slot])
    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
    plgpu.wgmma_wait(1)

    @pl.when(k + slots - 1 < steps)
    def _():
        load_step(k + slots - 1, slots, a_part, b_part, a_smem, b_smem, loaded)


# Puzzle 4
def accumulator_registers(bm, bn, warpgroups):
    return bm * bn // (128 * warpgroups)


def shared_kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded, *, bm, bn):
    wg = lax.axis_index("wg")
    row, columns = lax.axis_index("i") * bm, pl.ds(lax.axis_index("j") * bn, bn)

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(row, bm)], a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem.at[:, columns], b_smem, loaded)

    plgpu.barrier_wait(loaded)
    half = bm // 2

    def multiply(acc):
        plgpu.wgmma(acc, a_smem.at[pl.ds(wg * half, half)], b_smem)
        return acc[...]

    o_gmem[pl.ds(row + wg * half, half), columns] = pl.run_scoped(multiply, plgpu.ACC((half, bn)))


# Puzzle 5
def produce(k, slots, a_part, b_part, a_smem, b_smem, full, empty):
    slot, part = lax.rem(k, slots), pl.ds(k * 64, 64)

    @pl.when(k >= slots)
    def _():
        plgpu.barrier_wait(empty.at[slot])

    plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot])
    plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot])


def consume(k, slots, acc, half, a_smem, b_smem, full, empty):
    slot = lax.rem(k, slots)
    plgpu.barrier_wait(full.at[slot])
    plgpu.wgmma(acc, a_smem.at[slot, half], b_smem.at[slot])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(empty.at[slot])


# Puzzle 6
def a_map(k, i):
    return (i, k)


def b_map(k, j):
    return (k, j)


def pipeline_step(indices, a_smem, b_smem, acc, *, half):
    plgpu.wgmma(acc, a_smem.at[half], b_smem)
    plgpu.wgmma_wait(1)
    return acc


# Puzzle 7
def epilogue(result, bias_part, o_part, o_smem):
    for part in range(result.shape[1] // 64):
        slot, columns = part % 2, slice(part * 64, part * 64 + 64)
        x = result[:, columns]
        x = jax.nn.gelu(x + biases(bias_part, part))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        o_smem[slot] = x.astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[slot], o_part.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


# Puzzle 8
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
        consume(n * steps + k, slots, acc, rows, a_smem, b_smem, full, empty)


# Puzzle 9
def partner_tile(t, m_tiles, width, along):
    if along is None:
        return tile_order(t, m_tiles, width)
    rank = lax.axis_index("cluster")
    if along == "m":
        i, j = tile_order(t, m_tiles // 2, width)
        return 2 * i + rank, j
    i, j = tile_order(t, m_tiles, width)
    return i, 2 * j + rank


def produce_shared(n, steps, slots, along, a_part, b_part, a_smem, b_smem, full, empty):
    a_axes = "cluster" if along == "n" else None
    b_axes = "cluster" if along == "m" else None

    @pl.loop(0, steps)
    def _(k):
        step = n * steps + k
        slot, part = lax.rem(step, slots), pl.ds(k * 64, 64)

        @pl.when(step >= slots)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        plgpu.copy_gmem_to_smem(a_part.at[:, part], a_smem.at[slot], full.at[slot], collective_axes=a_axes)
        plgpu.copy_gmem_to_smem(b_part.at[part], b_smem.at[slot], full.at[slot], collective_axes=b_axes)


# Puzzle 10
def store_rows(o_slot, o_part, row, start, end):
    first = lax.max(start - row, 0)
    left = lax.max(lax.min(end - row, 64) - first, 0)
    for size in (64, 32, 16, 8, 4, 2, 1):

        @pl.when(left & size > 0)
        def _(size=size, first=first):
            plgpu.copy_smem_to_gmem(o_slot.at[pl.ds(first, size)], o_part.at[pl.ds(first, size)], commit_group=False)

        first = first + (left & size)
    plgpu.commit_smem_to_gmem_group()


# Puzzle 11
def slots_that_fit(bm, bn):
    return (SMEM_BYTES - EPILOGUE_BYTES) // ((bm + bn) * 64 * 2 + 2 * 8)


def step_bytes(bm, bn, along):
    a_bytes = bm * 64 * 2 // (2 if along == "n" else 1)
    b_bytes = bn * 64 * 2 // (2 if along == "m" else 1)
    return a_bytes + b_bytes


def cycles(M, N, K, bm, bn):
    tensor = 2 * bm * bn * 64 / TENSOR_FLOPS
    copies = (bm + bn) * 64 * 2 / COPIED_BYTES
    end = bm * bn / STORED_VALUES
    rounds = pl.cdiv((M // bm) * (N // bn), SMS)
    return rounds * (K // 64 * max(tensor, copies) + end)


def choose(M, N, K):
    return min(plans(M, N), key=lambda plan: (cycles(M, N, K, *plan[:2]), step_bytes(*plan)))
