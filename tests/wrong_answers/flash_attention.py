"""Wrong answers to puzzles/flash_attention.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% flash_attention/1: no scale
# block_scores: `(q, k, dims, preferred_element_type=jnp.float32) * scale` -> `(q, k, dims, preferred_element_type=jnp.float32)`

# %% flash_attention/1: scaled by D instead of its root
# scores_kernel: `0.5` -> `1`

# %% flash_attention/1: scaled by the number of keys in the block
# scores_kernel: `[...], q_ref.shape[1] ** -0` -> `[...], k_ref.shape[0] ** -0`

# %% flash_attention/1: head mixed with batch
# scores_q_map:
# -    return (b, h, i, 0)
# +    return (h, b, i, 0)
# scores_k_map:
# -    return (b, h, j, 0)
# +    return (h, b, j, 0)

# %% flash_attention/1: every batch reads the keys of the first
# scores_k_map:
# -    return (b, h, j, 0)
# +    return (0, h, j, 0)

# %% flash_attention/1: the keys follow the queries
# scores_k_map: `h, j, 0` -> `h, i, 0`

# %% flash_attention/1: a bfloat16 product
# block_scores: `=jnp` -> `=q.dtype).astype(jnp`


# %% flash_attention/1: the query is scaled in bfloat16
# block_scores: `q, k, dims, preferred_element_type=jnp.float32) * scale` -> `(q * scale).astype(q.dtype), k, dims, preferred_element_type=jnp.float32)`

# %% flash_attention/1: a product of float32 copies
# block_scores:
# -    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale
# +    return (
# +        jax.lax.dot_general(q.astype(jnp.float32), k.astype(jnp.float32), dims, preferred_element_type=jnp.float32)
# +        * scale
# +    )

# %% flash_attention/2: a query does not see its own key
# hide_after: `keys <= last_seen,` -> `keys < last_seen,`
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: positions within the block
# causal_scores_kernel: `= pl.program_id(2) * bq + offset + column(bq)` -> `= offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`
# causal_scores_kernel: `pl.program_id(3) * bkv` -> `0`

# %% flash_attention/2: positions of keys within the block
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`
# causal_scores_kernel: `pl.program_id(3) * bkv` -> `0`

# %% flash_attention/2: the first query stands at position 0
# causal_scores_kernel: `+ offset + column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: hidden by 0
# hide_after: `-jnp.inf` -> `0`
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: hidden by a large negative number
# hide_after: `jnp.inf` -> `1e30`
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: the past is hidden
# hide_after: `<` -> `>`
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: no mask
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`
# causal_scores_kernel: `hide_after(s, positions, pl.program_id(3) * bkv)` -> `s`

# %% flash_attention/3: the sum is never zeroed
# weigh_kernel:
# -
# -    @pl.when(j == 0)
# -    def _():
# -        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

# %% flash_attention/3: the last block of values alone
# weigh_kernel: `+` -> ``


# %% flash_attention/3: probabilities in float32
# weigh_kernel: `.], v` -> `.].astype(v_ref.dtype), v`
# naive_attention: `v.dtype` -> `jnp.float32`

# %% flash_attention/3: probabilities in float32, a mixed product
# naive_attention: `v.dtype` -> `jnp.float32`

# %% flash_attention/3: no mask
# naive_attention: `causal_scores` -> `scores`

# %% flash_attention/3: no softmax
# naive_attention:
# -    p = softmax_rows(s, v.dtype, bq=bq)
# -    return weigh(p, v, bq=bq, bkv=bkv)
# +    return weigh(s.astype(v.dtype), v, bq=bq, bkv=bkv)

# %% flash_attention/3: a softmax in jnp between the kernels
# naive_attention:
# -    p = softmax_rows(s, v.dtype, bq=bq)
# +    p = (jnp.exp(s - s.max(-1, keepdims=True)) / jnp.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)).astype(
# +        v.dtype
# +    )

# %% flash_attention/4: acc is not rescaled
# one_block_kernel: `[...] * rescale + pv` -> `[...] + pv`

# %% flash_attention/4: neither sum is rescaled
# one_block_kernel: `[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)` -> `[...] = l_ref[...] + p.sum(axis=1, keepdims=True)`
# one_block_kernel: `[...] * rescale + pv` -> `[...] + pv`

# %% flash_attention/4: l is not rescaled
# one_block_kernel: `[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)` -> `[...] = l_ref[...] + p.sum(axis=1, keepdims=True)`


# %% flash_attention/4: no maximum
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    p = jnp.exp(s)
    l_ref[...] = l_ref[...] + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the running maximum starts from zero
# one_block_kernel: `jnp.full(m_ref.shape, -jnp.inf)` -> `jnp.zeros(m_ref.shape)`

# %% flash_attention/4: each block's own maximum
# one_block_kernel: `= jnp.maximum(m_old, s.max(axis=1, keepdims=True))` -> `= s.max(axis=1, keepdims=True)`

# %% flash_attention/4: normalised at every step
# one_block_kernel:
# -    acc_ref[...] = acc_ref[...] * rescale + pv
# +    acc_ref[...] = acc_ref[...] * rescale + pv
# +    acc_ref[...] = acc_ref[...] / l_ref[...]
# one_block_kernel: `(acc_ref[...] / l_ref[...])` -> `acc_ref[...]`

# %% flash_attention/4: not divided by the sum
# one_block_kernel: `(acc_ref[...] / l_ref[...])` -> `acc_ref[...]`

# %% flash_attention/4: p stays float32
# one_block_kernel: `p.astype(v_ref.dtype), v_ref[...],` -> `p, v_ref[...].astype(jnp.float32),`

# %% flash_attention/4: a draft of the result at every step
# one_block_kernel:
# -    @pl.when(j == pl.num_programs(0) - 1)
# -    def _():
# -        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)
# +    o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the old maximum is read when it is gone
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    m_new = jnp.maximum(m_ref[...], s.max(axis=1, keepdims=True))
    m_ref[...] = m_new
    m_old = m_ref[...]
    p = jnp.exp(s - m_new)
    rescale = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * rescale + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: no scale
# one_block_kernel: `q_ref.shape[1] ** -0.5` -> `1.0`

# %% flash_attention/5: no axis is parallel
# elsewhere: it shows at another line of the function
# flash_forward:
# -        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),

# %% flash_attention/5: every axis is parallel
# flash_forward: `arbitrary` -> `parallel`

# %% flash_attention/5: exp2 of scores that are not in base 2
# flash_kernel: `(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)` -> `(q_ref[...], k_ref[...], D**-0.5)`

# %% flash_attention/5: the statistics start at the first block of queries alone
# flash_kernel: `j == 0` -> `(pl.program_id(2) == 0) & (j == 0)`

# %% flash_attention/5: all keys in one block
# flash_forward:
# -    (B, H, Sq, D), Skv = q.shape, k.shape[2]
# +    (B, H, Sq, D), Skv = q.shape, k.shape[2]
# +    bkv = Skv

# %% flash_attention/5: the keys of the first head
# flash_forward: `b, h, j` -> `b, 0, j`

# %% flash_attention/5: queries in whole blocks only
# flash_forward: `pl.cdiv(Sq, bq)` -> `Sq // bq`

# %% flash_attention/6: masked but not skipped
# elsewhere: a branch is missing, and the whole function is named
# causal_kernel:
# -    sees_all = first_key + bkv - 1 <= first_query
# -    sees_some = first_key <= first_query + bq - 1
# causal_kernel:
# -    @pl.when(sees_all)
# -    def _():
# -        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
# -
# -    @pl.when(sees_some & jnp.logical_not(sees_all))
# +    @pl.when(j >= 0)
# causal_kv_map: `jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)` -> `j`

# %% flash_attention/6: the body is skipped, the copies are not
# causal_kv_map: `jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)` -> `j`

# %% flash_attention/6: the copies are skipped, the body is not
# elsewhere: a branch is missing, and the whole function is named
# causal_kernel:
# -    sees_all = first_key + bkv - 1 <= first_query
# -    sees_some = first_key <= first_query + bq - 1
# causal_kernel:
# -    @pl.when(sees_all)
# -    def _():
# -        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
# -
# -    @pl.when(sees_some & jnp.logical_not(sees_all))
# +    @pl.when(j >= 0)

# %% flash_attention/6: blocks are live by number, not by position
# causal_kernel: `first_key <= first_query + bq - 1` -> `j <= i`
# causal_kv_map: `(i * bq + offset + bq - 1) // bkv` -> `i`

# %% flash_attention/6: the map stops one block early
# causal_kv_map: `(j, (i * bq + offset + bq - 1) // bkv)` -> `(j, (i * bq + offset) // bkv)`

# %% flash_attention/6: the diagonal is not masked
# causal_kernel:
# -    sees_all = first_key + bkv - 1 <= first_query
# causal_kernel:
# -    @pl.when(sees_all)
# -    def _():
# -        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
# -
# -    @pl.when(sees_some & jnp.logical_not(sees_all))
# +    @pl.when(sees_some)
# causal_kernel:
# -        positions = first_query + column(bq)
# -        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)
# +        online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

# %% flash_attention/6: a block without a mask as soon as its last query sees it
# elsewhere: it shows at another line of the function
# causal_kernel: `1 <= first_query` -> `1 <= first_query + bq - 1`

# %% flash_attention/6: the offset is forgotten
# causal_kernel: `bq + offset,` -> `bq,`
# causal_kv_map: `(i * bq + offset + bq - 1) //` -> `(i * bq + bq - 1) //`

# %% flash_attention/6: stored only by the last live step
# causal_kernel: `j == pl.num_programs(3) - 1` -> `sees_some & jnp.logical_not(sees_all) & (j == pl.num_programs(3) - 1)`

# %% flash_attention/7: the maximum instead of the log-sum-exp
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] / LOG2_E)[:, :1]`

# %% flash_attention/7: the log of the sum without the maximum
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `jnp.log(l_ref[...])[:, :1]`

# %% flash_attention/7: lse in base 2
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] + jnp.log2(l_ref[...]))[:, :1]`

# %% flash_attention/7: the maximum in base 2, the sum in base e
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] + jnp.log(l_ref[...]))[:, :1]`

# %% flash_attention/7: the maximum starts from -inf
# flash_fwd_kernel:
# -        start(m_ref, l_ref, acc_ref)
# +        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
# +        l_ref[...] = jnp.zeros(l_ref.shape)
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% flash_attention/7: 0 / 0 where nothing is seen
# flash_fwd_kernel: `normalized(acc_ref, l_ref)` -> `(acc_ref[...] / lanes(l_ref[...], D))`

# %% flash_attention/7: garbage in v
# flash_fwd_kernel: `rows_inside(v_ref[...], j, Skv)` -> `v_ref[...]`

# %% flash_attention/7: no mask beyond the last key
# flash_fwd_kernel:
# -        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)
# +        s = hide_after(s, last_seen, first_key) if causal else s
# +        online_step(s, v, m_ref, l_ref, acc_ref)

# %% flash_attention/7: always causal
# flash_fwd_kernel: `(i, bq, Sq, Skv, causal)` -> `(i, bq, Sq, Skv, True)`
# flash_fwd_kernel:
# -        last_seen = first_sees + column(bq) if causal else Skv - 1
# +        last_seen = first_sees + column(bq)


# %% flash_attention/7: masked but not skipped
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, _ = last_key_seen(i, bq, Sq, Skv, causal)
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        start(m_ref, l_ref, acc_ref)

    @pl.when(j >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/1: the product without a transpose
# block_scores:
# -    dims = (((1,), (1,)), ((), ()))
# -    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale
# +    return jnp.dot(q, k, preferred_element_type=jnp.float32) * scale

# %% flash_attention/1: the keys move along D
# scores_k_map: `j, 0` -> `0, j`

# %% flash_attention/1: queries and keys have each other's index
# scores_q_map: `h, i, 0` -> `h, j, 0`
# scores_k_map: `h, j, 0` -> `h, i, 0`

# %% flash_attention/1: scaled by the number of queries in the block
# scores_kernel: `1` -> `0`

# %% flash_attention/1: scaled twice
# scores_kernel: `(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)` -> `(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5) * q_ref.shape[1] ** -0.5`

# %% flash_attention/1: the scaled query is rounded from float32
# elsewhere: it shows at another line of the function
# block_scores:
# -    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale
# +    return jax.lax.dot_general(
# +        (q.astype(jnp.float32) * scale).astype(q.dtype), k, dims, preferred_element_type=jnp.float32
# +    )

# %% flash_attention/2: positions of queries within the block
# causal_scores_kernel: `= pl.program_id(2) * bq + offset + column(bq)` -> `= offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: the offset is subtracted
# causal_scores_kernel: `bq + offset + column(bq)` -> `bq - offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: the column counts along its one column
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 1)`

# %% flash_attention/2: blocks of queries counted in keys
# causal_scores_kernel: `* bq + offset + column(bq)` -> `* bkv + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`

# %% flash_attention/2: the number of the block taken for its first key
# causal_scores_kernel: `+ column(bq)` -> `+ jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)`
# causal_scores_kernel: `(s, positions, pl.program_id(3) * bkv)` -> `(s, positions, pl.program_id(3))`

# %% flash_attention/3: stored at every step
# weigh_kernel:
# -    @pl.when(j == pl.num_programs(3) - 1)
# -    def _():
# -        o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# +    o_ref[...] = acc_ref[...].astype(o_ref.dtype)

# %% flash_attention/3: zeroed for the first block of queries
# weigh_kernel:
# -    @pl.when(j == 0)
# +    @pl.when(pl.program_id(2) == 0)

# %% flash_attention/3: a bfloat16 product
# weigh_kernel: `(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)` -> `(p_ref[...], v_ref[...])`

# %% flash_attention/3: the scores in the blocks of the example
# naive_attention: `(q, k, bq=bq, bkv=bkv)` -> `(q, k)`

# %% flash_attention/4: p stays float32, and meets a narrow v
# one_block_kernel: `p.astype(v_ref.dtype),` -> `p,`

# %% flash_attention/4: rescaled by the inverse
# one_block_kernel: `m_old - m_new` -> `m_new - m_old`


# %% flash_attention/4: the new maximum is stored before the factor is made
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - m_new)
    m_ref[...] = m_new
    rescale = jnp.exp(m_ref[...] - m_new)
    l_ref[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * rescale + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the maximum of every column
# one_block_kernel: `s.max(axis=1, keepdims=True)` -> `s.max(axis=0, keepdims=True)`

# %% flash_attention/4: the sum of p is not kept
# one_block_kernel: `= l_ref[...] * rescale + p.` -> `= p.`

# %% flash_attention/4: p measured against the old maximum
# one_block_kernel: `(s - m_new)` -> `(s - m_old)`

# %% flash_attention/4: the new maximum is not kept
# one_block_kernel:
# -    m_ref[...] = m_new

# %% flash_attention/5: keys follow the queries
# flash_forward: `h, j, 0` -> `h, i, 0`

# %% flash_attention/5: j outside of i
# flash_kernel: `program_id(3),` -> `program_id(2),`
# flash_kernel: `(j == pl.num_programs(3) - 1)` -> `(j == pl.num_programs(2) - 1)`
# flash_forward: `((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))` -> `((None, None, bq, D), lambda b, h, j, i: (b, h, i, 0))`
# flash_forward: `((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))` -> `((None, None, bkv, D), lambda b, h, j, i: (b, h, j, 0))`
# flash_forward: `pl.cdiv(Sq, bq), Skv // bkv` -> `Skv // bkv, pl.cdiv(Sq, bq)`

# %% flash_attention/5: a result in float32
# flash_forward: `q.dtype` -> `jnp.float32`

# %% flash_attention/5: the sum is not made as wide as D
# flash_kernel: `normalized(acc_ref, l_ref)` -> `(acc_ref[...] / l_ref[...])`

# %% flash_attention/5: only the maximum starts
# flash_kernel: `start(m_ref, l_ref, acc_ref)` -> `m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)`

# %% flash_attention/5: scores in base 2 without D
# flash_kernel: `(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)` -> `(q_ref[...], k_ref[...], LOG2_E)`

# %% flash_attention/6: the map asks for the last block at once
# causal_kv_map: `jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)` -> `(i * bq + offset + bq - 1) // bkv`

# %% flash_attention/6: the last query's own key is not enough
# causal_kernel:
# -    sees_some = first_key <= first_query + bq - 1
# +    sees_some = first_key < first_query + bq - 1

# %% flash_attention/6: a block is dead unless its first query sees it
# causal_kernel: `first_query + bq - 1` -> `first_query`

# %% flash_attention/6: blocks without a mask are worked on twice
# causal_kernel: `(sees_some & jnp.logical_not(sees_all))` -> `(sees_some)`

# %% flash_attention/7: lse of a row that sees nothing is finite
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] / LOG2_E + jnp.log(jnp.where(l_ref[...] == 0, 1, l_ref[...])))[:, :1]`

# %% flash_attention/7: m multiplied by LOG2_E
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] * LOG2_E + jnp.log(l_ref[...]))[:, :1]`

# %% flash_attention/7: natural m, sum in base 2
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `(m_ref[...] / LOG2_E + jnp.log2(l_ref[...]))[:, :1]`

# %% flash_attention/7: the mask of ragged keys alone
# flash_fwd_kernel:
# -        last_seen = first_sees + column(bq) if causal else Skv - 1
# +        last_seen = Skv - 1

# %% flash_attention/7: the whole log-sum-exp is divided
# flash_fwd_kernel: `(m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]` -> `((m_ref[...] + jnp.log(l_ref[...])) / LOG2_E)[:, :1]`

# %% flash_attention/7: live as soon as the first query sees it
# flash_fwd_kernel:
# -    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
# +    first_sees, _ = last_key_seen(i, bq, Sq, Skv, causal)
# flash_fwd_kernel: `= last_sees` -> `= first_sees`

# %% flash_attention/8: one sum for the whole block
# delta_kernel: `= product.sum(axis=1, keepdims=True)` -> `= jnp.broadcast_to(product.sum(), delta_ref.shape)`

# %% flash_attention/8: down the columns instead of along the rows
# delta_kernel: `1` -> `0`

# %% flash_attention/8: the mean instead of the sum
# delta_kernel: `sum` -> `mean`

# %% flash_attention/8: the product in bfloat16
# delta_kernel: `o_ref[...].astype(jnp.float32) * do_ref[...]` -> `(o_ref[...] * do_ref[...])`

# %% flash_attention/8: the result with itself
# delta_kernel: `[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)` -> `[...].astype(jnp.float32) * o_ref[...].astype(jnp.float32)`


# %% flash_attention/8: the gradient with itself
# delta_kernel:
# -    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
# +    product = do_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)

# %% flash_attention/8: a reduction that loses its dimension
# delta_kernel: `(axis=1, keepdims=True)` -> `(axis=1)`

# %% flash_attention/8: scaled like a score
# delta_kernel: `(axis=1, keepdims=True)` -> `(axis=1, keepdims=True) * o_ref.shape[1] ** -0.5`


# %% flash_attention/8: nothing but the gradient
# delta_kernel: `o_ref[...].astype(jnp.float32) * do_ref` -> `do_ref`

# %% flash_attention/9: the scale is missing in dq
# dq_kernel: `(acc_ref[...] * D**-0.5)` -> `acc_ref[...]`

# %% flash_attention/9: the scale is missing in the scores
# dq_kernel: `(q_ref[...], k, D**-0.5)` -> `(q_ref[...], k, 1.0)`

# %% flash_attention/9: a softmax of the block instead of lse
# p_and_ds:
# -    p = jnp.where(seen, jnp.exp(s - lse), 0)
# +    e = jnp.where(seen, jnp.exp(s - s.max(axis=1, keepdims=True)), 0)
# +    p = e / e.sum(axis=1, keepdims=True)

# %% flash_attention/9: no row term
# p_and_ds: `(dp - delta)` -> `dp`

# %% flash_attention/9: the row term is added
# p_and_ds: `dp - delta` -> `dp + delta`

# %% flash_attention/9: exp of s alone
# p_and_ds: `(s - lse),` -> `(s),`

# %% flash_attention/9: nothing is masked
# p_and_ds: `jnp.where(seen, jnp.exp(s - lse), 0)` -> `jnp.exp(s - lse)`
# p_and_ds: `p, jnp.where(seen, p * (dp - delta), 0)` -> `p, p * (dp - delta)`

# %% flash_attention/9: masked by multiplying with 0
# p_and_ds: `= jnp.where(seen, jnp.exp(s - lse), 0)` -> `= seen * jnp.exp(s - lse)`
# p_and_ds: `p, jnp.where(seen, p * (dp - delta), 0)` -> `p, seen * p * (dp - delta)`

# %% flash_attention/9: p alone is masked by multiplying with 0
# p_and_ds: `= jnp.where(seen, jnp.exp(s - lse), 0)` -> `= seen * jnp.exp(s - lse)`

# %% flash_attention/9: keys beyond the edge meet a 0
# dq_kernel: `rows_inside(k_ref[...], j, Skv)` -> `k_ref[...]`

# %% flash_attention/9: the sum is never zeroed
# dq_kernel:
# -
# -    @pl.when(j == 0)
# -    def _():
# -        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% flash_attention/9: the last block of keys alone
# dq_kernel: `+` -> ``

# %% flash_attention/9: masked, but not skipped
# dq_kernel: `* bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1]` -> `<= pl.num_programs(3)`

# %% flash_attention/9: from p instead of ds
# dq_kernel: `_, ds` -> `ds, _`

# %% flash_attention/9: do and v in each other's place
# dq_kernel:
# -        dp = block_scores(do_ref[...], v_ref[...], 1.0)
# +        dp = block_scores(q_ref[...], v_ref[...], 1.0)

# %% flash_attention/9: the loop stops a block early
# dq_kernel:
# -    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
# +    @pl.when((j + 1) * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])

# %% flash_attention/9: ds without p
# p_and_ds: `p * (dp - delta)` -> `dp - delta`

# %% flash_attention/10: dv from unmasked p
# add_dkv:
# -        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
# +        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
# +        p = jnp.exp(s - lse_ref[...])

# %% flash_attention/10: no block is skipped
# first_q: `return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0` -> `return 0`

# %% flash_attention/10: first_q rounds up
# first_q: `jnp.maximum(j * bkv - (Skv - Sq), 0) // bq` -> `pl.cdiv(jnp.maximum(j * bkv - (Skv - Sq), 0), bq)`

# %% flash_attention/10: first_q forgets where query 0 stands
# first_q:
# -    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0
# +    return (j * bkv) // bq if causal else 0

# %% flash_attention/10: copies are saved, products are not
# add_dkv: `first_q(j, bq, bkv, Sq, Skv, causal)` -> `0`

# %% flash_attention/10: queries beyond the edge meet a 0
# add_dkv: `rows_inside(q_ref[...], i, Sq)` -> `q_ref[...]`

# %% flash_attention/10: gradients beyond the edge meet a 0
# add_dkv: `rows_inside(do_ref[...], i, Sq)` -> `do_ref[...]`

# %% flash_attention/10: the scale is missing in dk
# add_dkv: `(ds.astype(q.dtype), q) * D**-0.5` -> `(ds.astype(q.dtype), q)`

# %% flash_attention/10: p is not transposed
# add_dkv: `= transposed_times(p.astype(do.dtype), do)` -> `= jnp.dot(p.astype(do.dtype), do, preferred_element_type=jnp.float32)`

# %% flash_attention/10: dk and dv in each other's place
# smooth_attention_bwd: `dq, dk, dv` -> `dq, dv, dk`

# %% flash_attention/10: dk gathered in the scratch of dv
# add_dkv:
# -        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
# -        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5
# +        dk_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
# +        dv_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5

# %% flash_attention/10: forward once more on the way back
# smooth_attention_fwd:
# -    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
# -    return o, (q, k, v, o, lse)
# +    o, _ = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
# +    return o, (q, k, v)
# smooth_attention_bwd:
# -    q, k, v, o, lse = residuals
# +    q, k, v = residuals
# +    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)

# %% flash_attention/10: dv from ds
# add_dkv:
# -        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
# -        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
# +        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
# +        dv_acc_ref[...] += transposed_times(ds.astype(do.dtype), do)

# %% flash_attention/10: the last block of queries alone
# add_dkv:
# -        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
# -        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5
# +        dv_acc_ref[...] = transposed_times(p.astype(do.dtype), do)
# +        dk_acc_ref[...] = transposed_times(ds.astype(q.dtype), q) * D**-0.5

# %% flash_attention/10: delta from the wrong array
# smooth_attention_bwd:
# -    q, k, v, o, lse = residuals
# -    delta = attention_delta(o, do, bq=bq)
# +    q, k, v, _, lse = residuals
# +    delta = attention_delta(q, do, bq=bq)


# %% flash_attention/10: the way back is always causal
# smooth_attention_bwd:
# -    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
# -    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
# +    dq = attention_dq(q, k, v, do, lse, delta, bq=bq, bkv=bkv)
# +    dk, dv = attention_dkv(q, k, v, do, lse, delta, bq=bq, bkv=bkv)

# %% flash_attention/11: a head of keys for every head of queries
# grouped_kv_map: `h // group,` -> `h,`

# %% flash_attention/11: the remainder instead of the quotient
# grouped_kv_map: `//` -> `%`

# %% flash_attention/11: keys and values are repeated
# grouped_attention_fwd:
# -def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
# +def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
# +    group = q.shape[1] // k.shape[1]
# +    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)

# %% flash_attention/11: the sum starts again for every head
# grouped_dkv_kernel: `(g == 0) & (i == 0)` -> `i == 0`

# %% flash_attention/11: the sum starts once and for all
# grouped_dkv_kernel:
# -    @pl.when((g == 0) & (i == 0))
# +    @pl.when((j == 0) & (g == 0) & (i == 0))

# %% flash_attention/11: stored for every head
# grouped_dkv_kernel: `(g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1)` -> `i == pl.num_programs(4) - 1`

# %% flash_attention/11: stored after the first head
# grouped_dkv_kernel: `pl.num_programs(3) - 1` -> `0`

# %% flash_attention/11: members of a group are strangers
# grouped_q_map:
# -    return (b, hkv * group + g, block(j, i), 0)
# +    return (b, hkv + g, block(j, i), 0)

# %% flash_attention/11: one head stands for its group
# grouped_q_map: `group + g,` -> `group,`

# %% flash_attention/12: every block is in the list
# splash_lists: `max(1, (kinds > 0).sum(axis=1).max())` -> `kinds.shape[1]`

# %% flash_attention/12: the end of a list points at block 0
# splash_lists: `= here` -> `= here if t < len(live) else 0`

# %% flash_attention/12: the step taken for the place
# splash_kernel: `= j *` -> `= t *`

# %% flash_attention/12: j is the step's number
# elsewhere: the verdict names t, where it is defined
# splash_kernel: `data_next_ref[i, t]` -> `t`

# %% flash_attention/12: the map does not look into the list
# splash_kv_map: `data_next_ref[i, t]` -> `t`

# %% flash_attention/12: partial blocks are taken whole
# splash_kernel: `mask(rows, cols) & (cols < Skv)` -> `cols < Skv`

# %% flash_attention/12: a row that sees nothing is divided by 0
# splash_kernel: `normalized(acc_ref, l_ref)` -> `(acc_ref[...] / lanes(l_ref[...], D))`

# %% flash_attention/12: the end of the list is worked on again
# splash_kernel: `== 2` -> `!= 1`

# %% flash_attention/12: rows counted from the top of the block
# splash_kernel: `= i * bq + column` -> `= column`

# %% flash_attention/12: the list of row 0 is as wide as all
# splash_lists: `kinds > 0).sum(axis=1).max(` -> `kinds[-1] > 0).sum(`

# %% flash_attention/12: full blocks only
# splash_kernel: `(kind == 1)` -> `(kind == 3)`

# %% flash_attention/13: the page's number taken for its position
# paged_kernel:
# -        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
# +        s = jnp.where(table_ref[b, t] * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)

# %% flash_attention/13: the length is ignored
# paged_kernel: `page, D = k_ref.shape` -> `D = k_ref.shape[1]`
# paged_kernel: `* page < lengths_ref[b]` -> `>= 0`
# paged_kernel: `jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)` -> `s * 1.0`

# %% flash_attention/13: the length ends with its page
# paged_kernel:
# -        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)

# %% flash_attention/13: pages beyond the length are fetched
# paged_attention:
# -        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
# -        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)
# +        return (h, table_ref[b, t], 0, 0)

# %% flash_attention/13: the position taken for the place
# paged_attention: `table_ref[b, jnp.minimum(t, last)]` -> `jnp.minimum(t, last)`

# %% flash_attention/13: values beyond the length meet a 0
# paged_kernel: `rows_inside(v_ref[...], t, lengths_ref[b])` -> `v_ref[...]`

# %% flash_attention/13: a page too many
# paged_attention: `pl.cdiv(lengths_ref[b], page) - 1` -> `lengths_ref[b] // page`

# %% flash_attention/13: pages gathered outside of the kernel
# paged_attention: `table_ref[b, jnp.minimum(t, last)]` -> `b * page_table.shape[1] + jnp.minimum(t, last)`
# paged_attention:
# -    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
# +    )(
# +        lengths,
# +        page_table,
# +        q.reshape(B, Hkv, group, D),
# +        k_pages[:, page_table].reshape(Hkv, -1, page, D),
# +        v_pages[:, page_table].reshape(Hkv, -1, page, D),
# +    )

# %% flash_attention/13: nobody is divided by 0
# paged_kernel: `normalized(acc_ref, l_ref)` -> `(acc_ref[...] / lanes(l_ref[...], D))`

# %% flash_attention/13: the table of the first user for all
# paged_attention:
# -        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)
# +        return (h, table_ref[0, jnp.minimum(t, last)], 0, 0)

# %% flash_attention/13: every page starts afresh
# paged_kernel: `when(t == 0)` -> `when(t >= 0)`

# %% flash_attention/13: lengths and table in each other's place
# paged_attention: `lengths, page_table` -> `page_table, lengths`

# %% flash_attention/11: which member of the group comes first
# grouped_q_map: `hkv * group + g` -> `g * group + hkv`

# %% flash_attention/12: rows that see nothing start from -inf
# splash_kernel:
# -        start(m_ref, l_ref, acc_ref)
# +        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
# +        l_ref[...] = jnp.zeros(l_ref.shape)
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% flash_attention/12: scores in the wrong base
# splash_kernel: `(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)` -> `(q_ref[...], k_ref[...], D**-0.5)`

# %% flash_attention/13: the first page of every user
# paged_attention: `jnp.minimum(t, last)` -> `0`


# %% flash_attention/3: all keys in one block, no accumulation
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    o_ref[...] = jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=k.shape[2])


# %% flash_attention/4: the maximum of the first block for all
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(0), q_ref.shape[1]
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)

    @pl.when(j == 0)
    def _():
        m_ref[...] = s.max(axis=1, keepdims=True)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    p = jnp.exp(s - m_ref[...])
    l_ref[...] += p.sum(axis=1, keepdims=True)
    acc_ref[...] += jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/8: added to what is there
# delta_kernel:
# -    delta_ref[...] = product.sum(axis=1, keepdims=True)
# +    delta_ref[...] += product.sum(axis=1, keepdims=True)

# %% flash_attention/8: a matrix product instead of a row's own product
# delta_kernel: `product = o_ref[...].astype(jnp.float32) *` -> `o, do = o_ref[...].astype(jnp.float32),`
# delta_kernel: `= product.sum` -> `= jnp.dot(o, do.T).sum`

# %% flash_attention/8: a product of sums
# delta_kernel: `product = o_ref[...].astype(jnp.float32) *` -> `o, do = o_ref[...].astype(jnp.float32),`
# delta_kernel: `= product.sum` -> `= o.sum(axis=1, keepdims=True) * do.sum`

# %% flash_attention/8: the wrong sign
# delta_kernel: `= product.` -> `= -product.`

# %% flash_attention/9: ds is not chosen
# p_and_ds: `p, jnp.where(seen, p * (dp - delta), 0)` -> `p, p * (dp - delta)`

# %% flash_attention/9: chosen first, multiplied after
# p_and_ds: `jnp.where(seen, jnp.exp(s - lse), 0)` -> `jnp.exp(s - lse)`
# p_and_ds: `return p, jnp.where(seen, p * (dp - delta), 0)` -> `return p, p * jnp.where(seen, dp - delta, 0)`

# %% flash_attention/9: exp2 instead of exp
# p_and_ds: `exp` -> `exp2`

# %% flash_attention/9: the block's number compared with the last key
# dq_kernel: `j * bkv <=` -> `j <=`


# %% flash_attention/9: visible gets j before i
# dq_kernel: `i, j,` -> `j, i,`

# %% flash_attention/9: stored at every step
# dq_kernel:
# -    @pl.when(j == pl.num_programs(3) - 1)
# -    def _():
# -        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)
# +    dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)

# %% flash_attention/9: dp with the scale of the scores
# dq_kernel: `1.0` -> `D**-0.5`

# %% flash_attention/10: first_q is a query, not a block
# first_q: `(j * bkv - (Skv - Sq), 0) // bq if causal else 0` -> `(j * bkv - (Skv - Sq), 0) if causal else 0`

# %% flash_attention/10: lse and o swapped among the residuals
# smooth_attention_fwd: `(q, k, v, o, lse)` -> `(q, k, v, lse, o)`

# %% flash_attention/10: a block of queries too late
# add_dkv:
# -    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
# +    @pl.when(i > first_q(j, bq, bkv, Sq, Skv, causal))

# %% flash_attention/10: dq, dk, dv in another order
# smooth_attention_bwd: `dq, dk, dv` -> `dk, dv, dq`


# %% flash_attention/10: visible gets j before i
# add_dkv:
# -        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
# +        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(j, i, bq, bkv, Sq, Skv, causal))

# %% flash_attention/10: o given for do
# smooth_attention_bwd:
# -    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
# +    dq = attention_dq(q, k, v, o, lse, delta, causal=causal, bq=bq, bkv=bkv)

# %% flash_attention/11: block(i, j) on the way back
# grouped_q_map: `j, i` -> `i, j`

# %% flash_attention/11: zeroed where either is at its start
# grouped_dkv_kernel: `0) & (i` -> `0) | (i`

# %% flash_attention/11: h times group
# grouped_kv_map: `//` -> `*`

# %% flash_attention/12: full blocks are masked, too
# splash_kernel:
# -    @pl.when(kind == 2)
# -    def _():
# -        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)
# -
# -    @pl.when(kind == 1)
# +    @pl.when(kind > 0)

# %% flash_attention/12: edge of v from the place in the list
# splash_kernel: `rows_inside(v_ref[...], j, Skv), m_ref, l_ref` -> `rows_inside(v_ref[...], t, Skv), m_ref, l_ref`

# %% flash_attention/12: the edge is not in the mask
# elsewhere: it shows at another line of the function
# splash_kernel: `(rows, cols) & (cols < Skv), scores(),` -> `(rows, cols), scores(),`


# %% flash_attention/12: kinds partial and full in each other's place
def splash_lists(kinds):
    num_rows, width = kinds.shape[0], max(1, (kinds > 0).sum(axis=1).max())
    data_next, block_mask = np.zeros((2, num_rows, width), np.int32)
    here = 0
    for i, row in enumerate(kinds):
        live = np.flatnonzero(row)
        for t in range(width):
            if t < len(live):
                here = live[t]
                block_mask[i, t] = row[here]
            data_next[i, t] = here
    return data_next, block_mask


def splash_kv_map(b, h, i, t, data_next_ref, block_mask_ref):
    return (b, h, data_next_ref[i, t], 0)


def splash_kernel(data_next_ref, block_mask_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, mask, Skv):
    i, t = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    j, kind = data_next_ref[i, t], block_mask_ref[i, t]

    def scores():
        return block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)

    @pl.when(t == 0)
    def _():
        start(m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 2)
    def _():
        rows = i * bq + column(bq)
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


# %% flash_attention/12: row and step in each other's place
# splash_kernel: `i, t], block_mask_ref[i, t` -> `t, i], block_mask_ref[t, i`

# %% flash_attention/12: an empty row asks for block 0
# splash_lists: `= here` -> `= here if len(live) else 0`

# %% flash_attention/12: the kinds are lost
# splash_lists: `row[here]` -> `1`

# %% flash_attention/12: all live blocks taken as full
# splash_lists: `row[here]` -> `2`

# %% flash_attention/13: page number in the test
# paged_kernel:
# -    @pl.when(t * page < lengths_ref[b])
# +    @pl.when(table_ref[b, t] * page < lengths_ref[b])

# %% flash_attention/13: last without maximum
# paged_attention: `jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)` -> `pl.cdiv(lengths_ref[b], page) - 1`

# %% flash_attention/13: one token too many
# paged_kernel: `:] < lengths_ref[b` -> `:] <= lengths_ref[b`

# %% flash_attention/13: page 0 after the last page
# paged_attention: `table_ref[b, jnp.minimum(t, last)]` -> `jnp.where(t <= last, table_ref[b, t], 0)`

# %% flash_attention/13: the table by head
# paged_attention:
# -        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)
# +        return (h, table_ref[h, jnp.minimum(t, last)], 0, 0)

# %% flash_attention/13: no page is skipped: masked only
# paged_kernel: `* page < lengths_ref[b]` -> `>= 0`

# %% flash_attention/13: position within the page
# paged_kernel:
# -        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
# +        s = jnp.where(jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)

# %% flash_attention/3: the second product in float32
# weigh_kernel: `(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)` -> `(p_ref[...].astype(jnp.float32), v_ref[...].astype(jnp.float32))`
# naive_attention:
# -    s = causal_scores(q, k, bq=bq, bkv=bkv)
# -    p = softmax_rows(s, v.dtype, bq=bq)
# +    p = softmax_rows(causal_scores(q, k, bq=bq, bkv=bkv), v.dtype, bq=bq)


# %% flash_attention/3: the sum in bfloat16, in the result's own block
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(3) == 0)
    def _():
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    o_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    p = softmax_rows(causal_scores(q, k, bq=bq, bkv=bkv), v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: stored after as many steps as there are blocks of queries
# weigh_kernel: `(j == pl.num_programs(3) - 1)` -> `(j == pl.num_programs(2) - 1)`

# %% flash_attention/7: the last block is dead for the one query that sees it
# flash_fwd_kernel: `first_key <= last_sees` -> `first_key < last_sees`

# %% flash_attention/7: blocks are skipped causally, always
# flash_fwd_kernel: `(i, bq, Sq, Skv, causal)` -> `(i, bq, Sq, Skv, True)`

# %% flash_attention/7: the maximum starts from 0
# flash_fwd_kernel:
# -        start(m_ref, l_ref, acc_ref)
# +        m_ref[...] = jnp.zeros(m_ref.shape)
# +        l_ref[...] = jnp.zeros(l_ref.shape)
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% flash_attention/7: the keys end where the queries do
# flash_fwd_kernel: `else Skv -` -> `else Sq -`

# %% flash_attention/7: the values end where the queries do
# flash_fwd_kernel: `(v_ref[...], j, Skv)` -> `(v_ref[...], j, Sq)`

# %% flash_attention/7: keys beyond the number of queries are dead
# flash_fwd_kernel: `first_key <= last_sees` -> `(first_key <= last_sees) & (first_key < Sq)`

# %% flash_attention/6: keys are counted from the start of their block
# causal_kernel:
# -        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)
# +        online_step(hide_after(s, positions, 0), v_ref[...], m_ref, l_ref, acc_ref)

# %% flash_attention/2: batch and head stand for the blocks
# causal_scores_kernel: `2` -> `0`
# causal_scores_kernel: `3` -> `1`

# %% flash_attention/9: the last key's block is dead
# dq_kernel:
# -    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
# +    @pl.when(j * bkv < last_key_seen(i, bq, Sq, Skv, causal)[1])

# %% flash_attention/9: live as soon as the first query sees it
# dq_kernel: `[1]` -> `[0]`

# %% flash_attention/9: exp(s) over lse
# p_and_ds: `exp(s - lse), 0` -> `exp(s) / lse, 0`

# %% flash_attention/12: the maximum starts from 0
# splash_kernel:
# -        start(m_ref, l_ref, acc_ref)
# +        m_ref[...] = jnp.zeros(m_ref.shape)
# +        l_ref[...] = jnp.zeros(l_ref.shape)
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% flash_attention/12: the mask gets columns and rows
# splash_kernel: `rows, cols` -> `cols, rows`

# %% flash_attention/13: the maximum starts from 0
# paged_kernel:
# -        start(m_ref, l_ref, acc_ref)
# +        m_ref[...] = jnp.zeros(m_ref.shape)
# +        l_ref[...] = jnp.zeros(l_ref.shape)
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)


# %% flash_attention/13: the values end with the first page
# paged_kernel:
# -        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)
# +        online_step(s, rows_inside(v_ref[...], t, page), m_ref, l_ref, acc_ref)

# %% flash_attention/10: the forward function returns all of its results
# smooth_attention_fwd:
# -    return o, (q, k, v, o, lse)
# +    return (o, lse), (q, k, v, o, lse)

# %% flash_attention/9: p is not masked, and dq does not need it
# p_and_ds: `jnp.where(seen, jnp.exp(s - lse), 0)` -> `jnp.exp(s - lse)`

# %% flash_attention/1: the scale of this puzzle, whatever is asked for
# block_scores: `* scale` -> `* q.shape[1] ** -0.5`

# %% flash_attention/2: the mask is added
# hide_after: `jnp.where(keys <= last_seen, s, -jnp.inf)` -> `s + jnp.where(keys <= last_seen, 0.0, -jnp.inf)`

# %% flash_attention/3: probabilities in the dtype of q
# naive_attention: `softmax_rows(s, v.dtype, bq=bq)` -> `softmax_rows(s, q.dtype, bq=bq)`

# %% flash_attention/4: the sum of what is rounded
# one_block_kernel: `p = jnp.exp(s - m_new)` -> `p = jnp.exp(s - m_new).astype(v_ref.dtype)`

# %% flash_attention/8: do in the dtype of o
# delta_kernel: `do_ref[...].astype(jnp.float32)` -> `do_ref[...].astype(o_ref.dtype).astype(jnp.float32)`
