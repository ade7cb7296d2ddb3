"""Wrong answers to puzzles/gpu_attention.py, and what a verdict has to say about each."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# %% gpu_attention/1: the keys are not transposed
# block_scores: `k_smem.T` -> `k_smem`

# %% gpu_attention/1: not scaled
# scores_kernel: ` * q_gmem.shape[2] ** -0.5` -> ``

# %% gpu_attention/1: scaled in the wrong one of the two
# block_scores: `return acc[...]` -> `return acc[...] * q_smem.shape[1] ** -0.5`
# scores_kernel: ` * q_gmem.shape[2] ** -0.5` -> ``

# %% gpu_attention/1: divided by D
# scores_kernel: `** -0.5` -> `** -1`

# %% gpu_attention/1: the scale of 128
# scores_kernel: `q_gmem.shape[2] ** -0.5` -> `128**-0.5`

# %% gpu_attention/1: always the first head
# scores_kernel: `k_gmem.at[h, keys]` -> `k_gmem.at[0, keys]`

# %% gpu_attention/1: the example's 128 keys
# scores_kernel: `pl.ds(lax.axis_index("j") * bkv, bkv)` -> `pl.ds(lax.axis_index("j") * 128, 128)`

# %% gpu_attention/1: queries and keys are exchanged
# scores_kernel: `lax.axis_index("i") * 64` -> `lax.axis_index("j") * 64`

# %% gpu_attention/1: nobody waits for the copies
# scores_kernel:
# -    plgpu.barrier_wait(loaded)

# %% gpu_attention/2: the maximum of scores that are not scaled
# online: `s.max(axis=1) * c` -> `s.max(axis=1)`

# %% gpu_attention/2: the maximum of this block alone
# online: `jnp.maximum(m, s.max(axis=1) * c)` -> `s.max(axis=1) * c`

# %% gpu_attention/2: the old sum is not rescaled
# online: `l * alpha + p.sum(axis=1)` -> `l + p.sum(axis=1)`

# %% gpu_attention/2: rescaled the other way round
# online: `jnp.exp2(m - new)` -> `jnp.exp2(new - m)`

# %% gpu_attention/2: the old maximum comes back
# online: `return p, alpha, new, ` -> `return p, alpha, m, `

# %% gpu_attention/2: e instead of 2
# online: `p = jnp.exp2(` -> `p = jnp.exp(`

# %% gpu_attention/2: the old maximum is subtracted
# online: `lax.broadcast_in_dim(new,` -> `lax.broadcast_in_dim(m,`

# %% gpu_attention/2: the numbers run along the columns
# online: `(0,)` -> `(1,)`

# %% gpu_attention/2: the sum of this block alone
# online: `l * alpha + p.sum(axis=1)` -> `p.sum(axis=1)`


# %% gpu_attention/2: no maximum
def online(s, c, m, l):
    p = jnp.exp2(s * c)
    return p, jnp.exp2(m - m), m * 0, l + p.sum(axis=1)


# %% gpu_attention/2: the scores for the probabilities
# online: `return p, ` -> `return s, `

# %% gpu_attention/2: alpha is not returned
# online: `return p, alpha, ` -> `return p, m, `

# %% gpu_attention/2: e^x by way of a logarithm
# online: `jnp.exp2(s * c - lax.broadcast_in_dim(new, s.shape, (0,)))` -> `jnp.exp((s * c - lax.broadcast_in_dim(new, s.shape, (0,))) * 0.6931471805599453)`

# %% gpu_attention/2: the maximum is 0 at least
# online: `jnp.maximum(m, s.max(axis=1) * c)` -> `jnp.maximum(jnp.maximum(m, 0), s.max(axis=1) * c)`


# %% gpu_attention/3: P by way of SMEM
def weigh(acc, p, alpha, v_smem):
    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))

    def multiply(p_smem):
        p_smem[...] = p.astype(v_smem.dtype)
        plgpu.commit_smem()
        plgpu.wgmma(acc, p_smem, v_smem)
        plgpu.wgmma_wait(0)

    pl.run_scoped(multiply, plgpu.SMEM(p.shape, v_smem.dtype, transforms=SWIZZLED))


def finish(acc, l):
    return acc[...] * lax.broadcast_in_dim(1 / l, acc.shape, (0,))


# %% gpu_attention/3: the accumulator is not rescaled
# weigh:
# -    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))

# %% gpu_attention/3: rescaled after the product
# weigh:
# -    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
# weigh: `    plgpu.wgmma_wait(0)` -> `    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))`

# %% gpu_attention/3: nobody waits for the product
# weigh:
# -    plgpu.wgmma_wait(0)

# %% gpu_attention/3: p is float32
# weigh: `p.astype(v_smem.dtype)` -> `p`

# %% gpu_attention/3: the values are transposed
# weigh: `v_smem.dtype), v_smem)` -> `v_smem.dtype), v_smem.T)`

# %% gpu_attention/3: not divided by the sum
# finish: `return acc[...] * lax.broadcast_in_dim(1 / l, acc.shape, (0,))` -> `return acc[...]`

# %% gpu_attention/3: multiplied by the sum
# finish: `1 / l` -> `l`

# %% gpu_attention/3: alpha in the shape of p
# weigh: `lax.broadcast_in_dim(alpha, acc.shape, (0,))` -> `lax.broadcast_in_dim(alpha, p.shape, (0,))`

# %% gpu_attention/4: V is waited for with K
# slots_step:
# -    plgpu.barrier_wait(v.full.at[slot])
# slots_step: `    s = block_scores(q_smem, k.smem.at[slot])` -> `    plgpu.barrier_wait(v.full.at[slot]); s = block_scores(q_smem, k.smem.at[slot])`

# %% gpu_attention/4: V is not waited for
# slots_step:
# -    plgpu.barrier_wait(v.full.at[slot])

# %% gpu_attention/4: the barrier of K for V
# slots_step: `plgpu.barrier_wait(v.full.at[slot])` -> `plgpu.barrier_wait(k.full.at[slot])`

# %% gpu_attention/4: K is refilled after the values
# slots_step: `        load_block(j + slots, k_part, k)` -> `        pass`
# slots_step: `        load_block(j + slots, v_part, v)` -> `        load_block(j + slots, k_part, k); load_block(j + slots, v_part, v)`

# %% gpu_attention/4: K is refilled after the softmax
# slots_step:
# -    @pl.when(j + slots < steps)
# -    def _():
# -        load_block(j + slots, k_part, k)
# -
# -    p, alpha, m, l = online(s, c, m, l)
# +    p, alpha, m, l = online(s, c, m, l)
# +
# +    @pl.when(j + slots < steps)
# +    def _():
# +        load_block(j + slots, k_part, k)
# +

# %% gpu_attention/4: V is refilled before it is read
# slots_step: `        load_block(j + slots, k_part, k)` -> `        load_block(j + slots, k_part, k); load_block(j + slots, v_part, v)`
# slots_step: `        load_block(j + slots, v_part, v)` -> `        pass`

# %% gpu_attention/4: the next block instead of the one in the same slot
# slots_step: `load_block(j + slots, k_part, k)` -> `load_block(j + 1, k_part, k)`

# %% gpu_attention/4: the slot of the next block
# slots_step: `lax.rem(j, slots)` -> `lax.rem(j + 1, slots)`

# %% gpu_attention/4: the example's two slots
# slots_step: `lax.rem(j, slots)` -> `lax.rem(j, 2)`

# %% gpu_attention/5: waits for slots that nobody has used
# produce: `j >= slots` -> `j >= 0`

# %% gpu_attention/5: nobody waits for a free slot
# produce: `plgpu.barrier_wait(stream.empty.at[lax.rem(j, slots)])` -> `pass`

# %% gpu_attention/5: the example's two slots
# produce: `slots = stream.smem.shape[0]` -> `slots = 2`

# %% gpu_attention/5: the slot of V is never given back
# consume:
# -    plgpu.barrier_arrive(v.empty.at[slot])

# %% gpu_attention/5: K is given back before the scores
# consume:
# -    plgpu.barrier_arrive(k.empty.at[slot])
# consume: `    s = block_scores(q_smem, k.smem.at[slot])` -> `    plgpu.barrier_arrive(k.empty.at[slot]); s = block_scores(q_smem, k.smem.at[slot])`

# %% gpu_attention/5: K is given back after the softmax
# consume:
# -    plgpu.barrier_arrive(k.empty.at[slot])
# consume: `    p, alpha, m, l = online(s, c, m, l)` -> `    p, alpha, m, l = online(s, c, m, l); plgpu.barrier_arrive(k.empty.at[slot])`

# %% gpu_attention/5: K is given back after PV
# consume:
# -    plgpu.barrier_arrive(k.empty.at[slot])
# consume: `    weigh(acc, p, alpha, v.smem.at[slot])` -> `    weigh(acc, p, alpha, v.smem.at[slot]); plgpu.barrier_arrive(k.empty.at[slot])`

# %% gpu_attention/5: V is given back with K
# consume:
# -    plgpu.barrier_arrive(v.empty.at[slot])
# consume: `plgpu.barrier_arrive(k.empty.at[slot])` -> `(plgpu.barrier_arrive(k.empty.at[slot]), plgpu.barrier_arrive(v.empty.at[slot]))`

# %% gpu_attention/5: arrives where it should wait
# consume: `plgpu.barrier_wait(k.full.at[slot])` -> `plgpu.barrier_arrive(k.full.at[slot])`

# %% gpu_attention/5: V is not waited for
# consume:
# -    plgpu.barrier_wait(v.full.at[slot])

# %% gpu_attention/6: nobody gives the last turn
# last_turn: `        plgpu.barrier_arrive(turns.at[1])` -> `        pass`

# %% gpu_attention/6: both wait at first
# first_turn: `wg == 1` -> `wg >= 0`

# %% gpu_attention/6: the turn is one's own
# ping_pong: `turns.at[1 - wg]` -> `turns.at[wg]`

# %% gpu_attention/6: nobody waits for a turn
# ping_pong:
# -    plgpu.barrier_wait(turns.at[wg])

# %% gpu_attention/6: the turn is kept until the softmax is done
# ping_pong:
# -        plgpu.barrier_arrive(turns.at[1 - wg])
# ping_pong: `    p, alpha, m, l = online(s, c, m, l)` -> `    p, alpha, m, l = online(s, c, m, l); plgpu.barrier_arrive(turns.at[1 - wg])`


# %% gpu_attention/6: no turns
def first_turn(wg, turns):
    del wg, turns


def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
    return consume(j, c, m, l, acc, q_smem, k, v)


def last_turn(wg, turns):
    del wg, turns


# %% gpu_attention/6: a head start, and no turns after it
def first_turn(wg, turns):
    @pl.when(wg == 1)
    def _():
        plgpu.barrier_wait(turns.at[1])


def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])
    plgpu.barrier_arrive(k.empty.at[slot])
    p, alpha, m, l = online(s, c, m, l)

    @pl.when((wg == 0) & (j == 0))
    def _():
        plgpu.barrier_arrive(turns.at[1])

    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


def last_turn(wg, turns):
    del wg, turns


# %% gpu_attention/6: a head start of a product, and no turns after it
def first_turn(wg, turns):
    @pl.when(wg == 1)
    def _():
        plgpu.barrier_wait(turns.at[1])


def ping_pong(j, c, m, l, acc, q_smem, k, v, wg, turns):
    slot = lax.rem(j, k.smem.shape[0])
    plgpu.barrier_wait(k.full.at[slot])
    s = block_scores(q_smem, k.smem.at[slot])
    plgpu.barrier_arrive(k.empty.at[slot])

    @pl.when((wg == 0) & (j == 0))
    def _():
        plgpu.barrier_arrive(turns.at[1])

    p, alpha, m, l = online(s, c, m, l)
    plgpu.barrier_wait(v.full.at[slot])
    weigh(acc, p, alpha, v.smem.at[slot])
    plgpu.barrier_arrive(v.empty.at[slot])
    return m, l


def last_turn(wg, turns):
    del wg, turns


# %% gpu_attention/6b: waits for the scores before PV is started
# ahead:
# -        plgpu.wgmma(acc, p, v.smem.at[before])
# ahead: `plgpu.wgmma_accumulator_load(s_acc, wait_n=1)` -> `s_acc[...]; plgpu.wgmma(acc, p, v.smem.at[before])`

# %% gpu_attention/6b: nobody knows that PV is over
# ahead:
# -        plgpu.wgmma_wait(0)

# %% gpu_attention/6b: waits for both products before the softmax
# ahead: `wait_n=1` -> `wait_n=0`

# %% gpu_attention/6b: waits for none
# ahead: `wait_n=1` -> `wait_n=2`

# %% gpu_attention/6b: the values of this block
# ahead: `v.smem.at[before]` -> `v.smem.at[slot]`

# %% gpu_attention/6b: the barrier of this block's values
# ahead: `plgpu.barrier_wait(v.full.at[before])` -> `plgpu.barrier_wait(v.full.at[slot])`

# %% gpu_attention/6b: the slot of this block's values is given back
# ahead: `plgpu.barrier_arrive(v.empty.at[before])` -> `plgpu.barrier_arrive(v.empty.at[slot])`

# %% gpu_attention/6b: the accumulator is not rescaled
# ahead:
# -        acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))

# %% gpu_attention/6b: the old maximum comes back
# ahead: `return new.astype(p.dtype), new_m, new_l` -> `return new.astype(p.dtype), m, l`

# %% gpu_attention/6b: the new probabilities with the old values
# ahead: `plgpu.wgmma(acc, p, v.smem.at[before])` -> `pass`
# ahead: `        plgpu.wgmma_wait(0)` -> `        plgpu.wgmma(acc, new.astype(p.dtype), v.smem.at[before]); plgpu.wgmma_wait(0)`

# %% gpu_attention/6b: the example's two slots
# ahead: `slots = k.smem.shape[0]` -> `slots = 2`


# %% gpu_attention/6b: Puzzle 5's step
def ahead(j, c, p, m, l, acc, q_smem, k, v):
    slots = k.smem.shape[0]
    slot, before = lax.rem(j, slots), lax.rem(j - 1, slots)
    plgpu.barrier_wait(v.full.at[before])
    plgpu.wgmma(acc, p, v.smem.at[before])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(v.empty.at[before])
    plgpu.barrier_wait(k.full.at[slot])
    new, alpha, m, l = online(block_scores(q_smem, k.smem.at[slot]), c, m, l)
    plgpu.barrier_arrive(k.empty.at[slot])
    acc[...] = acc[...] * lax.broadcast_in_dim(alpha, acc.shape, (0,))
    return new.astype(p.dtype), m, l


# %% gpu_attention/7: a block that is seen in part is called clear
# clear_blocks: `first + offset + 1` -> `first + offset + bkv`

# %% gpu_attention/7: the block that ends with the first query's own key is masked
# clear_blocks: `first + offset + 1` -> `first + offset`

# %% gpu_attention/7: no block is clear
# clear_blocks: `lax.div(first + offset + 1, bkv)` -> `0`

# %% gpu_attention/7: the offset is forgotten
# clear_blocks: `first + offset + 1` -> `first + 1`

# %% gpu_attention/7: the last block is skipped
# seen_blocks: `first + rows + offset + bkv - 1` -> `first + rows + offset`

# %% gpu_attention/7: nothing is skipped
# seen_blocks: `lax.div(first + rows + offset + bkv - 1, bkv)` -> `1000`

# %% gpu_attention/7: no query sees its own key
# hide: `<=` -> `<`

# %% gpu_attention/7: the mask has no offset
# hide: ` + offset` -> ``

# %% gpu_attention/7: rows and columns are exchanged
# hide: `first_key + count(1)` -> `first_key + count(0)`
# hide: `first + count(0) + offset` -> `first + count(1) + offset`

# %% gpu_attention/7: later keys are kept
# hide: `s, -jnp.inf` -> `-jnp.inf, s`

# %% gpu_attention/7: divides by shifting
# clear_blocks: `lax.div(first + offset + 1, bkv)` -> `first + offset + 1 >> bkv.bit_length() - 1`

# %% gpu_attention/7: hidden scores are large negative numbers
# hide: `-jnp.inf` -> `-1e4`

# %% gpu_attention/7b: no turn is given
# pass_on:
# -    plgpu.barrier_arrive(turns.at[1 - wg])

# %% gpu_attention/7b: no turn is waited for
# pass_on:
# -    plgpu.barrier_wait(turns.at[wg])

# %% gpu_attention/7b: the turn is one's own
# pass_on: `turns.at[1 - wg]` -> `turns.at[wg]`


# %% gpu_attention/7b: waits for a turn before it gives one
def pass_on(wg, turns):
    plgpu.barrier_wait(turns.at[wg])
    plgpu.barrier_arrive(turns.at[1 - wg])


# %% gpu_attention/7b: whoever is done goes home
# pass_on:
# -    plgpu.barrier_arrive(turns.at[1 - wg])
# -    plgpu.barrier_wait(turns.at[wg])
# +    del wg, turns

# %% gpu_attention/8: K is read once a head
# packed_grid: `return Hkv, pl.cdiv(Sq, 128 // pack)` -> `return H, pl.cdiv(Sq, 128)`

# %% gpu_attention/8: as many tiles as without packing
# packed_grid: `pl.cdiv(Sq, 128 // pack)` -> `pl.cdiv(Sq, 128)`

# %% gpu_attention/8: a CTA for each tile
# packed_grid: `128 // pack` -> `64 // pack`

# %% gpu_attention/8: the queries of one head in all rows
# load_packed: `h + g` -> `h`

# %% gpu_attention/8: the heads of the first group
# load_packed: `h + g` -> `g`

# %% gpu_attention/8: all heads in the same rows
# load_packed: `pl.ds(g * tokens, tokens)` -> `pl.ds(0, tokens)`

# %% gpu_attention/8: the tile's first token is forgotten
# load_packed: `pl.ds(first, tokens)` -> `pl.ds(0, tokens)`

# %% gpu_attention/8: a row is a token
# hide_packed: `lax.rem(count(0), 64 // pack)` -> `count(0)`

# %% gpu_attention/8: the number of the head for that of the token
# hide_packed: `lax.rem(count(0), 64 // pack)` -> `lax.div(count(0), 64 // pack)`

# %% gpu_attention/8: the example's 16 tokens
# hide_packed: `64 // pack` -> `16`

# %% gpu_attention/8: the mask has no offset
# hide_packed: `token + offset` -> `token`

# %% gpu_attention/8: only one head is stored
# store_packed: `range(pack)` -> `range(1)`

# %% gpu_attention/8: every head's result where the first one's belongs
# store_packed: `h + g` -> `h`

# %% gpu_attention/8: the rows are not committed
# store_packed:
# -    plgpu.commit_smem()

# %% gpu_attention/8: nobody waits for the stores
# store_packed:
# -    plgpu.wait_smem_to_gmem(0)

# %% gpu_attention/8: four heads in a tile at most
# packed_grid:
# -    pack = H // Hkv
# -    return Hkv, pl.cdiv(Sq, 128 // pack)
# +    pack = min(4, H // Hkv)
# +    return H // pack, pl.cdiv(Sq, 128 // pack)

# %% gpu_attention/9: the last block of keys is dropped
# part_of: `pl.cdiv(length, bkv)` -> `lax.div(length, bkv)`

# %% gpu_attention/9: the first part takes what is left over
# part_of: `lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)` -> `jnp.where(p == 0, 0, blocks - (parts - p) * lax.div(blocks, parts)), blocks - (parts - p - 1) * lax.div(blocks, parts)`

# %% gpu_attention/9: a block beyond the last key
# part_of: `pl.cdiv(length, bkv)` -> `lax.div(length, bkv) + 1`

# %% gpu_attention/9: blocks that no part takes
# part_of: `lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)` -> `p * lax.div(blocks, parts), (p + 1) * lax.div(blocks, parts)`

# %% gpu_attention/9: keys are counted, not blocks
# part_of: `blocks = pl.cdiv(length, bkv)` -> `blocks = length`

# %% gpu_attention/9: every part takes all blocks
# part_of: `lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)` -> `0, blocks`

# %% gpu_attention/9: the first part does it all
# part_of: `lax.div(p * blocks, parts), lax.div((p + 1) * blocks, parts)` -> `0, jnp.where(p == 0, blocks, 0)`

# %% gpu_attention/9: a part without keys divides by 0
# finish_part: `jnp.where(l > 0, l, 1)` -> `l`

# %% gpu_attention/9: the maximum for the log-sum-exp
# finish_part: `m + jnp.log2(l)` -> `m`

# %% gpu_attention/9: the sum without its maximum
# finish_part: `m + jnp.log2(l)` -> `jnp.log2(l)`

# %% gpu_attention/9: the natural logarithm
# finish_part: `jnp.log2(l)` -> `jnp.log(l)`

# %% gpu_attention/9: merged without the maxima
# merged: `jnp.exp2(each - top)` -> `jnp.exp2(each)`

# %% gpu_attention/9: the first part's number for the maximum
# merged: `functools.reduce(jnp.maximum, lse)` -> `lse[0]`

# %% gpu_attention/9: e instead of 2
# merged: `jnp.exp2(each - top)` -> `jnp.exp(each - top)`

# %% gpu_attention/9: every part weighs as much
# merged: `jnp.exp2(each - top)` -> `jnp.exp2(each - each)`

# %% gpu_attention/9: not divided by the weights
# merged: ` / sum(weights)` -> ``

# %% gpu_attention/9: the example's two parts
# merged: `range(lse_parts.shape[0])` -> `range(2)`

# %% gpu_attention/9: the largest lse is 0 at least
# merged: `functools.reduce(jnp.maximum, lse)` -> `functools.reduce(jnp.maximum, lse, 0.0)`

# %% gpu_attention/9b: the page table is ignored
# load_pages: `table_row[j * each + r]` -> `j * each + r`

# %% gpu_attention/9b: the first page of a block, again and again
# load_pages: `table_row[j * each + r]` -> `table_row[j * each]`

# %% gpu_attention/9b: as if every block were one page
# load_pages: `table_row[j * each + r]` -> `table_row[j + r]`

# %% gpu_attention/9b: the entry of the slot
# load_pages: `table_row[j * each + r]` -> `table_row[slot * each + r]`

# %% gpu_attention/9b: all pages in the same rows
# load_pages: `pl.ds(r * page, page)` -> `pl.ds(0, page)`

# %% gpu_attention/9b: pages in reverse order
# load_pages: `pl.ds(r * page, page)` -> `pl.ds((each - 1 - r) * page, page)`

# %% gpu_attention/9b: only the first page of a block
# load_pages: `range(each)` -> `range(1)`

# %% gpu_attention/9b: the example's two pages
# load_pages: `bkv // page` -> `2`

# %% gpu_attention/9b: the example's two slots
# load_pages: `lax.rem(j, slots)` -> `lax.rem(j, 2)`

# %% gpu_attention/9b: the barrier of the first slot
# load_pages: `stream.full.at[slot]` -> `stream.full.at[0]`


# %% gpu_attention/10: the keys are columns
# add_dkv: `block_scores(mine.k, q), block_scores(mine.v, do)` -> `block_scores(q, mine.k), block_scores(do, mine.v)`

# %% gpu_attention/10: lse for each row
# probabilities: `(1,)` -> `(0,)`

# %% gpu_attention/10: lse is added
# probabilities: `s * c - ` -> `s * c + `

# %% gpu_attention/10: e instead of 2
# probabilities: `jnp.exp2(` -> `jnp.exp(`

# %% gpu_attention/10: delta is forgotten
# score_gradients: `p * (dp - lax.broadcast_in_dim(delta, p.shape, (1,)))` -> `p * dp`

# %% gpu_attention/10: the probabilities are forgotten
# score_gradients: `return p * ` -> `return `

# %% gpu_attention/10: no mask
# add_dkv: `mask(s)` -> `s`

# %% gpu_attention/10: the scores are not scaled
# add_dkv: `q.shape[1] ** -0.5 * LOG2E` -> `LOG2E`

# %% gpu_attention/10: dv from the gradients of the scores
# add_dkv: `p.astype(do.dtype), do` -> `ds, do`

# %% gpu_attention/10: dk from the probabilities
# add_dkv: `mine.dk_acc, ds, q` -> `mine.dk_acc, p.astype(q.dtype), q`

# %% gpu_attention/10: dk sums do
# add_dkv: `mine.dk_acc, ds, q` -> `mine.dk_acc, ds, do`

# %% gpu_attention/10: dp from the keys
# add_dkv: `block_scores(mine.v, do)` -> `block_scores(mine.k, do)`

# %% gpu_attention/10: nobody waits for the products
# add_dkv:
# -    plgpu.wgmma_wait(0)

# %% gpu_attention/10: the power of a difference as a product of powers
# probabilities:
# -    return jnp.exp2(s * c - lax.broadcast_in_dim(lse, s.shape, (1,)))
# +    return jnp.exp2(s * c) * lax.broadcast_in_dim(jnp.exp2(-lse), s.shape, (1,))

# %% gpu_attention/10b: nothing is committed before the other one reads
# share:
# -    plgpu.commit_smem()

# %% gpu_attention/10b: the other one is not told
# share:
# -    plgpu.barrier_arrive(both.written)

# %% gpu_attention/10b: both write the first half
# share: `pl.ds(wg * 64, 64)` -> `pl.ds(0, 64)`

# %% gpu_attention/10b: a single slot
# share: `lax.rem(i, 2)` -> `0`
# add_dq: `lax.rem(i, 2)` -> `0`

# %% gpu_attention/10b: waits in both places
# share: `plgpu.barrier_arrive(both.written)` -> `(plgpu.barrier_arrive(both.written), plgpu.barrier_wait(both.written))`

# %% gpu_attention/10b: nobody waits for the other half
# add_dq:
# -    plgpu.barrier_wait(both.written)

# %% gpu_attention/10b: ds is not turned round
# add_dq: `both.ds.at[lax.rem(i, 2)].T` -> `both.ds.at[lax.rem(i, 2)]`

# %% gpu_attention/10b: both add to the same columns
# add_dq: `dq_part.at[:, pl.ds(wg * 64, 64)]` -> `dq_part.at[:, pl.ds(0, 64)]`

# %% gpu_attention/10b: stored, not added
# add_dq: `, reduction_op="add"` -> ``

# %% gpu_attention/10b: overwritten while the last copy reads it
# add_dq:
# -    plgpu.wait_smem_to_gmem(0)

# %% gpu_attention/10b: nothing is committed before the copy
# add_dq:
# -    plgpu.commit_smem()


# %% gpu_attention/10c: one product after the other
def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
    share(i, wg, add_dkv(slot, mine, queries, mask), both)
    add_dq(i, wg, both, dq_part)


# %% gpu_attention/10c: dp is started together with s, and s is read first
def queued_step(i, slot, wg, mine, queries, mask, both, dq_part):
    q, do = queries.q.at[slot], queries.do.at[slot]

    def products(s_acc, dp_acc):
        plgpu.wgmma(s_acc, mine.k, q.T)
        plgpu.wgmma(dp_acc, mine.v, do.T)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        p = probabilities(mask(s), q.shape[1] ** -0.5 * LOG2E, numbers(queries.lse.at[slot]))
        plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        return score_gradients(p, dp, numbers(queries.delta.at[slot])).astype(q.dtype)

    ds = pl.run_scoped(products, plgpu.ACC((64, 64)), plgpu.ACC((64, 64)))
    share(i, wg, ds, both)
    plgpu.wgmma(mine.dk_acc, ds, q)
    add_dq(i, wg, both, dq_part)


# %% gpu_attention/10c: waits for dp before p
# queued_step: `        plgpu.wgmma(dp_acc, mine.v, do.T)` -> `        plgpu.wgmma(dp_acc, mine.v, do.T); plgpu.wgmma_wait(0)`

# %% gpu_attention/10c: waits for dv before ds
# queued_step:
# -        dp = dp_acc[...]
# queued_step: `        plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do)` -> `        plgpu.wgmma(mine.dv_acc, p.astype(do.dtype), do); dp = dp_acc[...]`

# %% gpu_attention/10c: dp is read before its product is over
# queued_step: `dp_acc[...]` -> `plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)`

# %% gpu_attention/10c: dv sums the queries
# queued_step: `p.astype(do.dtype), do)` -> `p.astype(q.dtype), q)`

# %% gpu_attention/10c: dk is forgotten
# queued_step:
# -    plgpu.wgmma(mine.dk_acc, ds, q)

# %% gpu_attention/10c: dk is started last, and nobody waits for it
# queued_step:
# -    plgpu.wgmma(mine.dk_acc, ds, q)
# queued_step: `    add_dq(i, wg, both, dq_part)` -> `    add_dq(i, wg, both, dq_part); plgpu.wgmma(mine.dk_acc, ds, q)`

# %% gpu_attention/10c: ds is shared after it is read
# queued_step:
# -    share(i, wg, ds, both)
# queued_step: `    add_dq(i, wg, both, dq_part)` -> `    add_dq(i, wg, both, dq_part); share(i, wg, ds, both)`

# %% gpu_attention/10c: no mask
# queued_step: `mask(s)` -> `s`

# %% gpu_attention/10c: do is not transposed
# queued_step: `mine.v, do.T` -> `mine.v, do`

# %% gpu_attention/11: probabilities of 32 bits
# registers: `64 * bkv // 2) // 128` -> `64 * bkv) // 128`

# %% gpu_attention/11: the accumulator needs no registers
# registers: `64 * D + 64 * bkv + ` -> `64 * bkv + `

# %% gpu_attention/11: registers of a whole warpgroup
# registers: `(64 * D + 64 * bkv + 64 * bkv // 2) // 128` -> `64 * D + 64 * bkv + 64 * bkv // 2`

# %% gpu_attention/11: the slots of K alone
# smem_bytes: `2 * slots * bkv * D * 2` -> `slots * bkv * D * 2`

# %% gpu_attention/11: SMEM without barriers
# smem_bytes: ` + (readers + 4 * slots) * 8` -> ``

# %% gpu_attention/11: the queries of two readers
# smem_bytes: `readers * 64 * D * 2 + 2 *` -> `2 * 64 * D * 2 + 2 *`

# %% gpu_attention/11: one product
# cycles: `readers * 2 * (2 * 64 * bkv * D)` -> `readers * (2 * 64 * bkv * D)`

# %% gpu_attention/11: the softmax lies under the products
# cycles: `(tensor + softmax + copy)` -> `(max(tensor, softmax) + copy)`

# %% gpu_attention/11: everybody waits for every copy
# cycles: ` if slots == 1 else 0` -> ``

# %% gpu_attention/11: part of a round
# cycles: `rounds = pl.cdiv(H * pl.cdiv(Sq, 64 * readers), SMS)` -> `rounds = H * pl.cdiv(Sq, 64 * readers) / SMS`

# %% gpu_attention/11: the last block is left out
# cycles: `pl.cdiv(Skv, bkv)` -> `(Skv // bkv)`

# %% gpu_attention/11: registers do not matter
# choose: `registers(D, bkv) <= FREE[readers] and ` -> ``

# %% gpu_attention/11: SMEM does not matter
# choose: ` and smem_bytes(D, readers, bkv, slots) <= SMEM_BYTES` -> ``

# %% gpu_attention/11: as many slots as there is room for
# choose: `smem_bytes(D, *plan)),` -> `-smem_bytes(D, *plan)),`

# %% gpu_attention/11: the slowest plan
# choose: `return min(` -> `return max(`

# %% gpu_attention/11: always two readers and 128 keys
# choose: `(plan for plan in PLANS if fits(*plan))` -> `[(2, 128, 2)]`
