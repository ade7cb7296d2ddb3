"""The answers to puzzles/gpu_attention.py: the functions that fill its holes."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


# Puzzle 1
def block_scores(q_smem, k_smem):
    def multiply(acc):
        plgpu.wgmma(acc, q_smem, k_smem.T)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((q_smem.shape[0], k_smem.shape[0])))


def scores_kernel(q_gmem, k_gmem, s_gmem, q_smem, k_smem, loaded, *, bkv):
    h, rows, keys = lax.axis_index("h"), pl.ds(lax.axis_index("i") * 64, 64), pl.ds(lax.axis_index("j") * bkv, bkv)
    plgpu.copy_gmem_to_smem(q_gmem.at[h, rows], q_smem, loaded)
    plgpu.copy_gmem_to_smem(k_gmem.at[h, keys], k_smem, loaded)
    plgpu.barrier_wait(loaded)
    s_gmem[h, rows, keys] = block_scores(q_smem, k_smem) * q_gmem.shape[2] ** -0.5


# Puzzle 2
def online(s, c, m, l):
    new = jnp.maximum(m, s.max(axis=1) * c)
    p = jnp.exp2(s * c - lax.broadcast_in_dim(new, s.shape, (0,)))
    alpha = jnp.exp2(m - new)
    return p, alpha, new, l * alpha + p.sum(axis=1)


# Puzzle 3
def weigh(acc, p, alpha, v_smem):
    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
    plgpu.wgmma(acc, p.astype(v_smem.dtype), v_smem)
    plgpu.wgmma_wait(0)


def finish(acc, l):
    return acc[...] * lax.broadcast_in_dim(1 / l, acc.shape, (0,))


# Puzzle 4
def slots_step(j, steps, c, m, l, acc, q_smem, k_part, v_part, k, v):
    slots = k.smem.shape[0]
    slot = lax.rem(j, slots)
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])

    @pl.when(j + slots < steps)
    def _():
        load_block(j + slots, k_part, k)

    p, alpha, m, l = online(s, c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])

    @pl.when(j + slots < steps)
    def _():
        load_block(j + slots, v_part, v)

    return m, l


# Puzzle 5
def produce(j, part, stream):
    slots = stream.smem.shape[0]

    @pl.when(j >= slots)
    def _():
        plgpu.barrier_wait(stream.empty.at[lax.rem(j, slots)])

    load_block(j, part, stream)


def consume(j, c, m, l, acc, q_smem, k, v):
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])
    plgpu.barrier_arrive(k.empty.at[slot])
    p, alpha, m, l = online(s, c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


# Puzzle 6
def first_turn(wg, turns):
    @pl.when(wg == 1)
    def _():
        plgpu.barrier_wait(turns.at[1])


def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
        plgpu.barrier_arrive(turns.at[1 - wg])
        return s_acc[...]

    s = pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))
    plgpu.barrier_arrive(k.empty.at[slot])
    p, alpha, m, l = online(s, c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    plgpu.barrier_wait(turns.at[wg])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


def last_turn(wg, turns):
    @pl.when(wg == 0)
    def _():
        plgpu.barrier_arrive(turns.at[1])


# Puzzle 6b
def ahead(j, c, p, m, l, acc, q_smem, k, v):
    slots = k.smem.shape[0]
    slot, before = lax.rem(j, slots), lax.rem(j - 1, slots)
    plgpu.barrier_wait(k.full.at[slot])
    plgpu.barrier_wait(v.full.at[before])

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q_smem, k.smem.at[slot].T)
        plgpu.wgmma(acc, p, v.smem.at[before])
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        plgpu.barrier_arrive(k.empty.at[slot])
        new, alpha, new_m, new_l = online(s, c, m, l)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(v.empty.at[before])
        acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
        return new.astype(p.dtype), new_m, new_l

    return pl.run_scoped(multiply, plgpu.ACC((64, k.smem.shape[1])))


# Puzzle 7
def clear_blocks(first, offset, bkv):
    return lax.div(first + offset + 1, bkv)


def seen_blocks(first, rows, offset, bkv):
    return lax.div(first + rows + offset + bkv - 1, bkv)


def hide(s, first, first_key, offset):
    count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
    return jnp.where(first_key + count(1) <= first + count(0) + offset, s, -jnp.inf)


# Puzzle 7b
def pass_on(wg, turns):
    plgpu.barrier_arrive(turns.at[1 - wg])
    plgpu.barrier_wait(turns.at[wg])


# Puzzle 8
def packed_grid(H, Hkv, Sq):
    pack = H // Hkv
    return Hkv, pl.cdiv(Sq, 128 // pack)


def load_packed(h, first, q_gmem, q_smem, loaded, pack):
    tokens = 64 // pack
    for g in range(pack):
        rows = pl.ds(g * tokens, tokens)
        plgpu.copy_gmem_to_smem(q_gmem.at[h + g, pl.ds(first, tokens)], q_smem.at[rows], loaded)


def hide_packed(s, first, first_key, offset, pack):
    count = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
    token = first + lax.rem(count(0), 64 // pack)
    return jnp.where(first_key + count(1) <= token + offset, s, -jnp.inf)


def store_packed(o, h, first, o_gmem, smem, pack):
    tokens = 64 // pack
    smem[...] = o.astype(smem.dtype)
    plgpu.commit_smem()
    for g in range(pack):
        rows = pl.ds(g * tokens, tokens)
        plgpu.copy_smem_to_gmem(smem.at[rows], o_gmem.at[h + g, pl.ds(first, tokens)])
    plgpu.wait_smem_to_gmem(0)


# Puzzle 9
def part_of(p, parts, length, bkv):
    blocks = pl.cdiv(length, bkv)
    return lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)


def finish_part(acc, m, l):
    return finish(acc, jnp.where(l > 0, l, 1)), m + jnp.log2(l)


def merged(o_parts, lse_parts):
    lse = [lse_parts[p] for p in range(lse_parts.shape[0])]
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp2(each - top) for each in lse]
    return sum(o_parts[p] * weight for p, weight in enumerate(weights)) / sum(weights)


# Puzzle 9b
def load_pages(j, pages, table_row, stream):
    (slots, bkv, _), page = stream.smem.shape, pages.shape[1]
    slot, each = lax.rem(j, slots), bkv // page
    for r in range(each):
        rows = pl.ds(r * page, page)
        plgpu.copy_gmem_to_smem(pages.at[table_row[j * each + r]], stream.smem.at[slot, rows], stream.full.at[slot])


# Puzzle 10
def probabilities(s, c, lse):
    return jnp.exp2(s * c - lax.broadcast_in_dim(lse, s.shape, (1,)))


def score_gradients(p, dp, delta):
    return p * (dp - lax.broadcast_in_dim(delta, p.shape, (1,)))


def add_dkv(slot, mine, queries, mask):
    q, do = queries.q.at[slot], queries.do.at[slot]
    s, dp = block_scores(mine.k, q), block_scores(mine.v, do)
    p = probabilities(mask(s), q.shape[1] ** -0.5 * LOG2E, numbers(queries.lse.at[slot]))
    ds = score_gradients(p, dp, numbers(queries.delta.at[slot])).astype(q.dtype)
    plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)
    plgpu.wgmma(mine.dk_acc, ds, q)
    plgpu.wgmma_wait(0)
    return ds


# Puzzle 10b
def share(i, wg, ds, both):
    both.ds[lax.rem(i, 2), pl.ds(wg * 64, 64)] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(both.written)


def add_dq(i, wg, both, dq_part):
    plgpu.barrier_wait(both.written)

    def multiply(acc):
        plgpu.wgmma(acc, both.ds.at[lax.rem(i, 2)].T, both.k)
        return acc[...]

    dq = pl.run_scoped(multiply, plgpu.ACC((64, 64)))
    plgpu.wait_smem_to_gmem(0)
    both.dq[wg] = dq
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(both.dq.at[wg], dq_part.at[:, pl.ds(wg * 64, 64)], reduction_op="add")


# Puzzle 10c
def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
    q, do = queries.q.at[slot], queries.do.at[slot]
    s = block_scores(mine.k, q)

    def weights(dp_acc):
        plgpu.wgmma(dp_acc, mine.v, do.T)
        p = probabilities(mask(s), q.shape[1] ** -0.5 * LOG2E, numbers(queries.lse.at[slot]))
        dp = dp_acc[...]
        plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)
        return score_gradients(p, dp, numbers(queries.delta.at[slot])).astype(q.dtype)

    ds = pl.run_scoped(weights, plgpu.ACC((64, 64)))
    share(i, wg, ds, both)
    plgpu.wgmma(mine.dk_acc, ds, q)
    add_dq(i, wg, both, dq_part)


# Puzzle 11
def registers(D, bkv):
    return (64 * D + 64 * bkv + 64 * bkv // 2) // 128


def smem_bytes(D, readers, bkv, slots):
    return readers * 64 * D * 2 + 2 * slots * bkv * D * 2 + (readers + 4 * slots) * 8


def cycles(H, Sq, Skv, D, readers, bkv, slots):
    tensor = readers * 2 * (2 * 64 * bkv * D) / TENSOR_FLOPS
    softmax = readers * WARPGROUP_CYCLES + bkv * KEY_CYCLES
    copy = bkv * D * 2 / COPIED_BYTES if slots == 1 else 0
    rounds = pl.cdiv(H * pl.cdiv(Sq, 64 * readers), SMS)
    return rounds * pl.cdiv(Skv, bkv) * (tensor + softmax + copy)


def choose(H, Sq, Skv, D):
    def fits(readers, bkv, slots):
        return registers(D, bkv) <= FREE[readers] and smem_bytes(D, readers, bkv, slots) <= SMEM_BYTES

    return min(
        (plan for plan in PLANS if fits(*plan)),
        key=lambda plan: (cycles(H, Sq, Skv, D, *plan), smem_bytes(D, *plan)),
    )
