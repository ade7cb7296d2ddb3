"""Wrong answers to puzzles/flash_attention.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% flash_attention/1: no scale
# first: times what is expected
# first: square root of 128
# first: scale
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32)


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: scaled by D instead of its root
# first: times what is expected
# first: one over the square root of 128
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -1)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: scaled by the number of keys in the block
# first: made of bkv
# says: k_ref.shape[0] ** -0.5
# says: variant
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], k_ref.shape[0] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: head mixed with batch
# first: index
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (h, b, i, 0)


def scores_k_map(b, h, i, j):
    return (h, b, j, 0)


# %% flash_attention/1: every batch reads the keys of the first
# first: k_ref
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (0, h, j, 0)


# %% flash_attention/1: the keys follow the queries
# first: No index map of an input moves along grid axis 3
# first: k_ref is cut
# says: def scores_k_map
# not: padding
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, i, 0)


# %% flash_attention/1: a bfloat16 product
# first: float32
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=q.dtype).astype(jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: the query is scaled in bfloat16
# first: rounded before it is summed
# first: Multiply the result of the product instead
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general((q * scale).astype(q.dtype), k, dims, preferred_element_type=jnp.float32)


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: a product of float32 copies
# first: Right answer, but
# first: multiplies float32
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return (
        jax.lax.dot_general(q.astype(jnp.float32), k.astype(jnp.float32), dims, preferred_element_type=jnp.float32)
        * scale
    )


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/2: a query does not see its own key
# first: off by one position
# first: < or <=
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys < last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: positions within the block
# first: the start of the array, or of the block
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, 0)


# %% flash_attention/2: positions of keys within the block
# first: the start of the array, or of the block
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, 0)


# %% flash_attention/2: the first query stands at position 0
# first: if query 0 stands at position 0: it stands at `offset`
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: hidden by 0
# first: -inf
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, 0)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: hidden by a large negative number
# first: -inf
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -1e30)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: the past is hidden
# first: wrong way round
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys >= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: no mask
# first: nothing in s_ref is masked
# first: should be -inf
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = s


# %% flash_attention/3: the sum is never zeroed
# first: acc_ref
# first: step 0
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: the last block of values alone
# first: overwritten
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] = jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: probabilities in float32
# first: Right answer, but
# first: p_ref of weigh_kernel is float32, beside v_ref
# says: MiB
# says: p = softmax_rows(s, jnp.float32
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...].astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, jnp.float32, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: probabilities in float32, a mixed product
# first: Right answer, but
# first: p_ref of weigh_kernel is float32, beside v_ref
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, jnp.float32, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: no mask
# first: every query sees every key
# first: causal_scores
# says: grid index
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: no softmax
# first: softmax_rows
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    return weigh(s.astype(v.dtype), v, bq=bq, bkv=bkv)


# %% flash_attention/3: a softmax in jnp between the kernels
# first: outside
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = (jnp.exp(s - s.max(-1, keepdims=True)) / jnp.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)).astype(
        v.dtype
    )
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/4: acc is not rescaled
# first: acc_ref adds up exponentials
# says: exp(old maximum - new maximum)
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: neither sum is rescaled
# first: adds up exponentials
# says: exp(old maximum - new maximum)
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: l is not rescaled
# first: l_ref adds up exponentials
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: no maximum
# first: maximum
# says: variant
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
# first: starts from 0
# says: m_ref
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - m_new)
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: each block's own maximum
# first: above 0
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    m_old = m_ref[...]
    m_new = s.max(axis=1, keepdims=True)
    p = jnp.exp(s - m_new)
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: normalised at every step
# first: acc_ref is divided at every step
# first: once, on the last
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    acc_ref[...] = acc_ref[...] / l_ref[...]
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% flash_attention/4: not divided by the sum
# first: factor of its own
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% flash_attention/4: p stays float32
# first: Right answer, but
# says: float32
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p, v_ref[...].astype(jnp.float32), preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: a draft of the result at every step
# first: o_ref is stored at 5 steps
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the old maximum is read when it is gone
# first: read after m_ref was overwritten
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: no scale
# first: the scores are the plain products
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], 1.0)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - m_new)
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/5: no axis is parallel
# first: Right answer, but
# says: have to follow one another
# says: parallel
# says: pl.pallas_call(
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
    )(q, k, v)


# %% flash_attention/5: every axis is parallel
# first: parallel
# says: axis 3
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "parallel")),
    )(q, k, v)


# %% flash_attention/5: exp2 of scores that are not in base 2
# says: o_ref
# first: exp(x) is exp2(x * LOG2_E)
# first: block_scores
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: the statistics start at the first block of queries alone
# first: m_ref
# first: step 3
# first: not only once
# says: l_ref
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when((pl.program_id(2) == 0) & (j == 0))
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: all keys in one block
# first: Right answer, but
# says: VMEM
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    bkv = Skv
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: the keys of the first head
# first: k_ref
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, 0, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: queries in whole blocks only
# first: o_ref
# says: variant 1
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, Sq // bq, Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/6: masked but not skipped
# first: Right answer, but
# first: k_ref moves 30 times
# says: MiB
# says: FLOPs
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return j


# %% flash_attention/6: the body is skipped, the copies are not
# first: Right answer, but
# says: k_ref
# says: MiB
# not: FLOPs,
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return j


# %% flash_attention/6: the copies are skipped, the body is not
# first: Right answer, but
# first: 8 of its 30 steps
# says: FLOPs
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/6: blocks are live by number, not by position
# first: Right answer, but
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = j <= i
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, i)


# %% flash_attention/6: the map stops one block early
# first: Steps 4 and 5 add to the same block of o_ref
# first: index map of k_ref
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset) // bkv)


# %% flash_attention/6: the diagonal is not masked
# first: if no block is masked
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_some)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/6: a block without a mask as soon as its last query sees it
# first: its first query has to
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query + bq - 1
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/6: the offset is forgotten
# first: if query 0 stands at position 0
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + bq - 1) // bkv)


# %% flash_attention/6: stored only by the last live step
# first: o_ref
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all) & (j == pl.num_programs(3) - 1))
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/7: the maximum instead of the log-sum-exp
# first: if lse is the maximum alone
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E)[:, :1]


# %% flash_attention/7: the log of the sum without the maximum
# first: lse_ref
# first: m_ref holds in the end is never read
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = jnp.log(l)[:, :1]


# %% flash_attention/7: lse in base 2
# first: lse_ref
# first: log2(e)
# first: base 2
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] + jnp.log2(l))[:, :1]


# %% flash_attention/7: the maximum in base 2, the sum in base e
# first: divide m by LOG2_E
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] + jnp.log(l))[:, :1]


# %% flash_attention/7: the maximum starts from -inf
# first: inf - inf is NaN
# first: all is masked so far
# says: variant 2
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: 0 / 0 where nothing is seen
# first: 0 / 0 is NaN
# first: jnp.where(sum == 0, 1, sum)
# says: variant 2
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(l, D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: garbage in v
# first: v_ref
# first: 0 times NaN is NaN
# first: x, 0)
# not: x, -inf)
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = v_ref[...]
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: no mask beyond the last key
# first: k_ref
# first: product, -inf)
# says: variant 1
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        s = hide_after(s, last_seen, first_key) if causal else s
        online_step(s, v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: always causal
# first: causal whatever `causal` says
# says: variant 1
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, True)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: masked but not skipped
# first: Right answer, but
# says: FLOPs
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, _ = last_key_seen(i, bq, Sq, Skv, causal)
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
        v = jnp.where(real, v_ref[...], 0)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/1: the product without a transpose
# first: dimension 1 of q_ref and dimension 0 of k_ref
# first: 128 and 320
# says: return jnp.dot(q, k
# not: padding
def block_scores(q, k, scale):
    return jnp.dot(q, k, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: the keys move along D
# first: index map of k_ref returns block (0, 0, 0, 1), out of bounds
# says: def scores_k_map
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, 0, j)


# %% flash_attention/1: queries and keys have each other's index
# first: Dimensions 2 and 3 are swapped
# not: padding
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, j, 0)


def scores_k_map(b, h, i, j):
    return (b, h, i, 0)


# %% flash_attention/1: scaled by the number of queries in the block
# first: made of bq
# says: q_ref.shape[0] ** -0.5
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[0] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: scaled twice
# first: one over the square root of 128
# first: look at the scale
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5) * q_ref.shape[1] ** -0.5


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/1: the scaled query is rounded from float32
# first: rounded before it is summed
# first: Multiply the result of the product instead
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        (q.astype(jnp.float32) * scale).astype(q.dtype), k, dims, preferred_element_type=jnp.float32
    )


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# %% flash_attention/2: positions of queries within the block
# first: the same in every block of s_ref along dimension 2
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: the offset is subtracted
# first: if `offset` is subtracted
# says: * bq - offset
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq - offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: the column counts along its one column
# first: where its first does: a column counts along dimension 0
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 1)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: blocks of queries counted in keys
# first: starts at row i * bkv
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bkv + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# %% flash_attention/2: the number of the block taken for its first key
# first: do they count from the start of the array, or of the block
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3))


# %% flash_attention/3: stored at every step
# first: Right answer, but o_ref is stored at 3 steps
# says: o_ref[...] = acc_ref[...].astype
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: zeroed for the first block of queries
# first: acc_ref is reset at every step
# first: pl.program_id(3) == 0
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: a bfloat16 product
# first: preferred_element_type=jnp.float32
# says: += jnp.dot(p_ref[...], v_ref[...])
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...])

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: the scores in the blocks of the example
# first: Right answer, but
# first: k_ref moves 24 times
# says: s = causal_scores(q, k)
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/4: p stays float32, and meets a narrow v
# first: Right answer, but its matrix product multiplies float32
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p, v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: mended by the inverse
# first: old maximum - new maximum
# says: mend = jnp.exp(m_new - m_old)
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
    mend = jnp.exp(m_new - m_old)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the new maximum is stored before the factor is made
# first: read after m_ref was overwritten
# first: Read the old maximum before you store the new one
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
    mend = jnp.exp(m_ref[...] - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the maximum of every column
# first: reduced along the wrong axis
def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j = pl.program_id(0)

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=0, keepdims=True))
    p = jnp.exp(s - m_new)
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the sum of p is not kept
# first: l_ref is overwritten
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: p measured against the old maximum
# first: exp gets values up to inf
# says: p = jnp.exp(s - m_old)
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
    p = jnp.exp(s - m_old)
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/4: the new maximum is not kept
# first: m_ref keeps its starting value
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
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * mend + pv

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# %% flash_attention/5: keys follow the queries
# first: Steps 0 and 1 add to the same block of o_ref
# first: index map of k_ref
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, i, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: j outside of i
# first: grid axis 2 is marked 'parallel'
# says: Make grid axis 2
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(2), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, j, i: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, j, i: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, Skv // bkv, pl.cdiv(Sq, bq)),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: a result in float32
# first: result is float32
# first: out_shape
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: the sum is not made as wide as D
# first: (32, 64) and (32, 128)
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: only the maximum starts
# first: l_ref that nobody has written
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: scores in base 2 without D
# first: multiplied by LOG2_E and not by D**-0.5
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    s = block_scores(q_ref[...], k_ref[...], LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def flash_forward(q, k, v, *, bq=64, bkv=128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
    return pl.pallas_call(
        flash_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/6: the map asks for the last block at once
# first: Steps 3 and 4 add to the same block of o_ref
# first: index map of k_ref
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return (i * bq + offset + bq - 1) // bkv


# %% flash_attention/6: the last query's own key is not enough
# first: one key is enough
# says: variant 3
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key < first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/6: a block is dead unless its first query sees it
# first: the last query sees more
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/6: blocks without a mask are worked on twice
# first: worked on twice
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some)
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/7: lse of a row that sees nothing is finite
# first: where -inf is expected
# says: variant 2
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(jnp.where(l == 0, 1, l)))[:, :1]


# %% flash_attention/7: m multiplied by LOG2_E
# first: divide it by LOG2_E
# says: m_ref[...] * LOG2_E
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] * LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: natural m, sum in base 2
# first: take jnp.log of l
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log2(l))[:, :1]


# %% flash_attention/7: the mask of ragged keys alone
# first: if no block is masked
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/7: the whole log-sum-exp is divided
# first: only m is in base 2
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = ((m_ref[...] + jnp.log(l)) / LOG2_E)[:, :1]


# %% flash_attention/7: live as soon as the first query sees it
# first: the last query sees more
# not: rounding
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, _ = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= first_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]


# %% flash_attention/8: one sum for the whole block
# first: share one number, the sum over the whole block
# says: product.sum()
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = jnp.broadcast_to(product.sum(), delta_ref.shape)


# %% flash_attention/8: down the columns instead of along the rows
# first: axis=0 leaves one number for each column; the Ref holds one for each row: axis=1
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=0, keepdims=True)


# %% flash_attention/8: the mean instead of the sum
# first: 0.015625 times what is expected
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.mean(axis=1, keepdims=True)


# %% flash_attention/8: the product in bfloat16
# first: A multiplication is done in 16-bit bfloat16
# says: product = (o_ref
def delta_kernel(o_ref, do_ref, delta_ref):
    product = (o_ref[...] * do_ref[...]).astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True)


# %% flash_attention/8: the result with itself
# first: never reads do_ref
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * o_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True)


# %% flash_attention/8: the gradient with itself
# first: never reads o_ref
def delta_kernel(o_ref, do_ref, delta_ref):
    product = do_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True)


# %% flash_attention/8: a reduction that loses its dimension
# first: keepdims=True
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1)


# %% flash_attention/8: scaled like a score
# first: 0.125 times what
# says: ** -0.5
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True) * o_ref.shape[1] ** -0.5


# %% flash_attention/8: nothing but the gradient
# first: never reads o_ref
def delta_kernel(o_ref, do_ref, delta_ref):
    product = do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True)


# %% flash_attention/9: the scale is missing in dq
# first: (8 of them) of dq_ref are 8 times
# not: by hand
# first: 8 times what is expected
# first: look at the scale
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = acc_ref[...].astype(dq_ref.dtype)


# %% flash_attention/9: the scale is missing in the scores
# first: `block_scores` wants the scale
# says: s = block_scores(
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, 1.0)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: a softmax of the block instead of lse
# first: never reads lse_ref
def p_and_ds(s, dp, lse, delta, seen):
    e = jnp.where(seen, jnp.exp(s - s.max(axis=1, keepdims=True)), 0)
    p = e / e.sum(axis=1, keepdims=True)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: no row term
# first: delta is left out
# says: p * dp
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * dp, 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: the row term is added
# first: delta is added
# says: dp + delta
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp + delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: exp of s alone
# first: softmax of s is jnp.exp(s - lse)
# says: jnp.exp(s)
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: nothing is masked
# first: v_ref lie beyond the edge
# first: passes the mask
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.exp(s - lse)
    return p, p * (dp - delta)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: masked by multiplying with 0
# first: v_ref lie beyond the edge
# says: nan
def p_and_ds(s, dp, lse, delta, seen):
    p = seen * jnp.exp(s - lse)
    return p, seen * p * (dp - delta)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: keys beyond the edge meet a 0
# first: k_ref lie beyond the edge
# first: 0 times NaN is NaN
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = k_ref[...]
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: the sum is never zeroed
# first: acc_ref that nobody has written
# first: pl.program_id(3) == 0
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: the last block of keys alone
# first: acc_ref is overwritten: steps 9-11
# says: acc_ref[...] = jnp.dot(
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] = jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: masked, but not skipped
# first: Right answer, but it takes
# first: FLOPs
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j <= pl.num_programs(3))
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: from p instead of ds
# first: p stands where ds belongs
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        ds, _ = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: do and v in each other's place
# first: never reads do_ref
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(q_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: the loop stops a block early
# first: are zero
# first: the result is never added
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when((j + 1) * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: ds without p
# first: ds has lost its factor p
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, dp - delta, 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/10: dv from unmasked p
# first: the p that goes into dv is not masked
# first: in add_dkv
# not: not linear
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        p = jnp.exp(s - lse_ref[...])
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: no block is skipped
# first: Right answer, but it moves
# says: FLOPs
def first_q(j, bq, bkv, Sq, Skv, causal):
    return 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: first_q rounds up
# first: the last query sees more
# first: the division rounds up here, and has to round down
# says: variant 3
# says: if causal else 0
def first_q(j, bq, bkv, Sq, Skv, causal):
    return pl.cdiv(jnp.maximum(j * bkv - (Skv - Sq), 0), bq) if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: first_q forgets where query 0 stands
# first: the index map of q_ref returns
# first: out of bounds
# says: if causal else 0
def first_q(j, bq, bkv, Sq, Skv, causal):
    return (j * bkv) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: copies are saved, products are not
# first: Right answer, but it takes
# first: FLOPs
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= 0)
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: queries beyond the edge meet a 0
# not: never read
# first: q_ref lie beyond the edge
# first: 0 times NaN is NaN
# says: variant 1
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = q_ref[...], rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: gradients beyond the edge meet a 0
# not: never read
# first: do_ref lie beyond the edge
# first: 0 times NaN is NaN
# says: variant 1
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), do_ref[...]
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: the scale is missing in dk
# first: 8 times what is expected
# first: look at the scale
# says: dk_acc_ref[...] += transposed_times(ds
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q)


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: p is not transposed
# first: The two factors of a product do not fit
# says: jnp.dot(p
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += jnp.dot(p.astype(do.dtype), do, preferred_element_type=jnp.float32)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: dk and dv in each other's place
# first: the results have changed places on the way out
# first: what dv_ref holds is returned as result 1
# says: return dq, dv, dk
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dv, dk


# %% flash_attention/10: dk gathered in the scratch of dv
# first: dk_ref holds what belongs in dv_ref
# not: on the way out
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dk_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dv_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: forward once more on the way back
# first: it uses 5 pallas_call(s); this puzzle asks for 4
# first: Together they move 4.642 MiB; the budget is 3.577 MiB
# says: flash_attention_fwd(q, k, v, causal=causal
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, _ = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v = residuals
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: dv from ds
# first: `dv_acc_ref` gathers ds.T @ do
# says: dv_acc_ref[...] += transposed_times(ds
# not: not linear
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(ds.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: the last block of queries alone
# first: is overwritten
# first: +=
# says: dk_acc_ref
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] = transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] = transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: delta from the wrong array
# first: delta is made of q and do
# says: delta = attention_delta(q, do
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, _, lse = residuals
    delta = attention_delta(q, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: the way back is always causal
# first: `attention_dq` and attention_dkv work causally whatever causal says
# says: dq = attention_dq(
# says: causal=False
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/11: a head of keys for every head of queries
# first: the index map of k_ref returns
# first: out of bounds
# says: def grouped_kv_map
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: the remainder instead of the quotient
# first: of o_ref are wrong
# first: the remainder (%) of the step's index along grid axis 1 is taken here where the quotient (//) is meant
# says: return (b, h % group, block(i, j), 0)
# not: dk_ref are wrong
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h % group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: keys and values are repeated
# first: outside of the kernel
# says: jnp.repeat(k
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: the sum starts again for every head
# first: set to its starting value again
# first: (pl.program_id(3) == 0) & (pl.program_id(4) == 0)
# says: acc_ref
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when(i == 0)
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: the sum starts once and for all
# first: as step
# first: left it
# first: not only once
# says: acc_ref
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((j == 0) & (g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: stored for every head
# first: Right answer, but
# first: stored at
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when(i == pl.num_programs(4) - 1)
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: stored after the first head
# first: dk_ref
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == 0) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: members of a group are strangers
# first: q_ref
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: one head stands for its group
# first: q_ref
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/12: every block is in the list
# first: `splash_lists` returns lists of 4 steps for each row of blocks, where the longest has 2
# says: 28 grid steps
def splash_lists(kinds):
    num_rows, width = kinds.shape[0], kinds.shape[1]
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the end of a list points at block 0
# first: data_next[3, 2] is 0, where block_mask is 0
# says: def splash_lists
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
            data_next[i, t] = here if t < len(live) else 0
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the step taken for the place
# first: o_ref are wrong
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = t * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: j is the step's number
# first: what data_next_ref holds belongs in its place
# says: grid axis 3 is the wrong number here
# says: cols = j * bkv
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
    j, kind = t, block_mask_ref[i, t]

    def scores():
        return block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the map does not look into the list
# first: the index map of k_ref and v_ref returns the step's index along grid axis 3 along dimension 2
# first: what data_next_ref holds belongs there
# says: def splash_kv_map(
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
    return (b, h, t, 0)


def splash_kernel(data_next_ref, block_mask_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, mask, Skv):
    i, t = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    j, kind = data_next_ref[i, t], block_mask_ref[i, t]

    def scores():
        return block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: partial blocks are taken whole
# first: partial blocks go without the `mask`
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(cols < Skv, scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: a row that sees nothing is divided by 0
# first: 0 / 0 is NaN
# says: variant 2
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(l, D)).astype(o_ref.dtype)


# %% flash_attention/12: the end of the list is worked on again
# first: they count twice
# first: pl.when
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind != 1)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: rows counted from the top of the block
# first: rows are counted from the top of their block
# says: s = jnp.where(mask(rows
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the list of row 0 is as wide as all
# first: Row 2 of the lists says
def splash_lists(kinds):
    num_rows, width = kinds.shape[0], max(1, (kinds[-1] > 0).sum())
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: full blocks only
# first: partial blocks are left out
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
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 3)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/13: the page's number taken for its position
# first: o_ref
# not: index maps: some block
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(table_ref[b, t] * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the length is ignored
# first: they count twice
# says: online_step(
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    D = k_ref.shape[1]

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = s * 1.0
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the length ends with its page
# first: every key of a user's last page counts
# says: lengths_ref[b]
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: pages beyond the length are fetched
# first: Right answer, but it moves
# says: k_ref: 48 moves
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        return (h, table_ref[b, t], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the position taken for the place
# first: page t of the pool is read for page t of a user
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, jnp.minimum(t, last), 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: values beyond the length meet a 0
# first: NaN
# says: variant 1
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: a page too many
# first: 4 of 22 blocks of k_ref come in and go unused
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(lengths_ref[b] // page, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: pages gathered outside of the kernel
# first: outside of the kernel
# says: gather
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, b * page_table.shape[1] + jnp.minimum(t, last), 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(
        lengths,
        page_table,
        q.reshape(B, Hkv, group, D),
        k_pages[:, page_table].reshape(Hkv, -1, page, D),
        v_pages[:, page_table].reshape(Hkv, -1, page, D),
    )
    return o.reshape(q.shape)


# %% flash_attention/13: nobody is divided by 0
# first: 0 / 0 is NaN
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(l, D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the table of the first user for all
# first: the pages of user 0 are read for all
# says: table_ref[0,
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[0, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: every page starts afresh
# first: they count twice
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t >= 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: lengths and table in each other's place
# first: A Ref of shape (4,) is indexed by 2 numbers
# says: table_ref[b,
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(page_table, lengths, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/11: which member of the group comes first
# first: dk_ref are wrong
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, g * group + hkv, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/12: rows that see nothing start from -inf
# first: inf - inf is NaN
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
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: scores in the wrong base
# first: online_step, which counts in base 2, gets scores times D**-0.5 alone
# says: return block_scores(
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
        return block_scores(q_ref[...], k_ref[...], D**-0.5)

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/13: the first page of every user
# first: they count twice
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, 0], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/3: all keys in one block, no accumulation
# first: of VMEM; the budget is
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    o_ref[...] = jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=k.shape[2])


# %% flash_attention/4: the maximum of the first block for all
# first: overflows to infinity
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
# first: delta_ref that nobody has written
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] += product.sum(axis=1, keepdims=True)


# %% flash_attention/8: a matrix product instead of a row's own product
# first: pairs each row with all 64 rows
# first: multiply element by element
def delta_kernel(o_ref, do_ref, delta_ref):
    o, do = o_ref[...].astype(jnp.float32), do_ref[...].astype(jnp.float32)
    delta_ref[...] = jnp.dot(o, do.T).sum(axis=1, keepdims=True)


# %% flash_attention/8: a product of sums
# first: a product of sums is not the sum of products
def delta_kernel(o_ref, do_ref, delta_ref):
    o, do = o_ref[...].astype(jnp.float32), do_ref[...].astype(jnp.float32)
    delta_ref[...] = o.sum(axis=1, keepdims=True) * do.sum(axis=1, keepdims=True)


# %% flash_attention/8: the wrong sign
# first: A sign is wrong
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = -product.sum(axis=1, keepdims=True)


# %% flash_attention/9: ds is not chosen
# first: by numbers that a mask has set to 0: 0 times NaN is NaN
# first: Choose once more, last
# not: passes the mask
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, p * (dp - delta)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: chosen first, multiplied after
# first: choose with jnp.where, behind the product
# says: return p, p * jnp.where
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.exp(s - lse)
    return p, p * jnp.where(seen, dp - delta, 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: exp2 instead of exp
# first: p is made with jnp.exp2
# first: exp2 is taken where exp is meant
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp2(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: the block's number compared with the last key
# first: Right answer, but it takes
# says: compute and change nothing
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: visible gets j before i
# first: stand in each other's place here
# says: visible(j, i
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(j, i, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: stored at every step
# first: dq_ref is stored at
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: dp with the scale of the scores
# first: the factor 0.125 is too much here
# says: dp = block_scores
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], D**-0.5)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/10: first_q is 0
# first: Right answer, but it moves
# says: blocks of q_ref come in and go unused
def first_q(j, bq, bkv, Sq, Skv, causal):
    return 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: first_q rounds up to the next block
# first: the division rounds up here, and has to round down
# not: Divide by
# says: pl.cdiv
def first_q(j, bq, bkv, Sq, Skv, causal):
    return pl.cdiv(jnp.maximum(j * bkv - (Skv - Sq), 0), bq) if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: first_q is a query, not a block
# first: block indices, not element offsets
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: lse and o swapped among the residuals
# first: o_ref of delta_kernel holds what flash_fwd_kernel stored in lse_ref
# first: residuals
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, lse, o)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: a block of queries too late
# first: the comparison > has to hold where both sides are equal
# says: @pl.when(i > first_q
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i > first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: dq, dk, dv in another order
# first: in the order of the inputs
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dk, dv, dq


# %% flash_attention/10: visible gets j before i
# first: stand in each other's place here
# says: visible(j, i
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(j, i, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/10: o given for do
# first: do_ref of dq_kernel holds what flash_fwd_kernel stored in o_ref
# first: order of the arguments
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, o, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv


# %% flash_attention/11: group and member in each other's place
# first: grid axis 1 and the step's index along grid axis 3 stand in each other's place
# says: g * group + hkv
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, g * group + hkv, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: block(i, j) on the way back
# first: along grid axis 2
# first: along grid axis 4
# says: block(i, j)
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(i, j), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: zeroed where either is at its start
# first: is set to its starting value again
# first: (pl.program_id(3) == 0) & (pl.program_id(4) == 0)
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h // group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) | (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/11: h times group
# first: the index map of k_ref returns block
def grouped_kv_map(b, h, i, j, *, group, block):
    return (b, h * group, block(i, j), 0)


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    return (b, hkv * group + g, block(j, i), 0)


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# %% flash_attention/12: full blocks are masked, too
# first: Right answer, but jnp.where chooses
# says: s = jnp.where(mask(rows
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind > 0)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: columns from the place in the list
# first: what data_next_ref holds belongs in its place
# says: cols = t * bkv
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = t * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: edge of v from the place in the list
# first: v_ref lie beyond the edge
# says: rows_inside(v_ref[...], t, Skv)
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the edge is not in the mask
# first: k_ref lie beyond the edge
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: kinds partial and full in each other's place
# first: where it is 1 and what is done where it is 2 have changed places
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 1)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 2)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: row and step in each other's place
# first: in the order of its dimensions
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
    j, kind = data_next_ref[t, i], block_mask_ref[t, i]

    def scores():
        return block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: an empty row asks for block 0
# first: data_next[4, 0] is 0, where block_mask is 0
# says: def splash_lists
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
            data_next[i, t] = here if len(live) else 0
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the kinds are lost
# first: Right answer, but jnp.where chooses
def splash_lists(kinds):
    num_rows, width = kinds.shape[0], max(1, (kinds > 0).sum(axis=1).max())
    data_next, block_mask = np.zeros((2, num_rows, width), np.int32)
    here = 0
    for i, row in enumerate(kinds):
        live = np.flatnonzero(row)
        for t in range(width):
            if t < len(live):
                here = live[t]
                block_mask[i, t] = 1
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: all live blocks taken as full
# first: of the lists says (block, kind)
def splash_lists(kinds):
    num_rows, width = kinds.shape[0], max(1, (kinds > 0).sum(axis=1).max())
    data_next, block_mask = np.zeros((2, num_rows, width), np.int32)
    here = 0
    for i, row in enumerate(kinds):
        live = np.flatnonzero(row)
        for t in range(width):
            if t < len(live):
                here = live[t]
                block_mask[i, t] = 2
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/13: page number in the mask
# first: what table_ref holds is the wrong number here
# says: s = jnp.where(table_ref[b, t] * page
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(table_ref[b, t] * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: page number in the test
# first: what table_ref holds is the wrong number here
# says: @pl.when(table_ref[b, t] * page
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(table_ref[b, t] * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: v is not masked
# first: of v_ref are NaN, and they get into o_ref
# first: 0 times NaN is NaN
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: last without maximum
# first: comes out below 0 at this step
# not: does not count from the end
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = pl.cdiv(lengths_ref[b], page) - 1
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: one token too many
# first: key `lengths_ref[b]` is seen, too: keys are counted from 0
# first: the comparison <= must not hold where both sides are equal
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] <= lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: page 0 after the last page
# first: Right answer, but it moves
# says: come in and go unused
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, jnp.where(t <= last, table_ref[b, t], 0), 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the table by head
# first: grid axis 1
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[h, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: no page is skipped: masked only
# first: Right answer, but it takes
# says: compute and change nothing
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t >= 0)
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: position within the page
# first: every key of a user's last page counts
# first: positions are counted from 0 in every block here
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/3: the second product in float32
# first: its matrix product multiplies float32
# first: 16 are enough
# says: p_ref[...].astype(jnp.float32)
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...].astype(jnp.float32), v_ref[...].astype(jnp.float32))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    p = softmax_rows(causal_scores(q, k, bq=bq, bkv=bkv), v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: the sum in bfloat16, in the result's own block
# first: o_ref is stored at 3 steps of each block, read back and stored again
# first: it holds the sum, in bfloat16
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(3) == 0)
    def _():
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    o_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    p = softmax_rows(causal_scores(q, k, bq=bq, bkv=bkv), v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/3: stored after as many steps as there are blocks of queries
# first: but acc_ref still grows afterwards
# says: variant 1
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def naive_attention(q, k, v, *, bq=64, bkv=128):
    s = causal_scores(q, k, bq=bq, bkv=bkv)
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# %% flash_attention/7: the last block is dead for the one query that sees it
# first: if a block is skipped unless its last query sees all of it
# says: variant 4
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key < last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/7: blocks are skipped causally, always
# first: blocks are skipped as if `causal` were True
# says: variant 5
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, True)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/7: the maximum starts from 0
# first: the maximum in m_ref starts from 0
# says: variant 3
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/7: the keys end where the queries do
# first: the mask ends at key Sq
# says: hide_after(s, last_seen, first_key)
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Sq - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/7: the values end where the queries do
# first: values from Sq on are taken for 0
# says: rows_inside(v_ref[...], j, Sq)
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = first_key <= last_sees
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Sq)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/7: keys beyond the number of queries are dead
# first: o_ref are wrong
# not: rounding
def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_key = j * bkv
    first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
    sees_all = first_key + bkv - 1 <= first_sees
    sees_some = (first_key <= last_sees) & (first_key < Sq)
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        last_seen = first_sees + column(bq) if causal else Skv - 1
        v = rows_inside(v_ref[...], j, Skv)
        online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]


# %% flash_attention/6: keys are counted from the start of their block
# first: keys are counted from the start of their block
# says: hide_after(s, positions, 0)
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    first_query, first_key = i * bq + offset, j * bkv
    sees_all = first_key + bkv - 1 <= first_query
    sees_some = first_key <= first_query + bq - 1
    scale = D**-0.5 * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + column(bq)
        online_step(hide_after(s, positions, 0), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# %% flash_attention/2: batch and head stand for the blocks
# first: grid indices 0 and 1, b and h, count the blocks
# says: pl.program_id(1) * bkv
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(0) * bq + offset + column(bq)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(1) * bkv)


# %% flash_attention/9: the last key's block is dead
# first: the comparison < has to hold where both sides are equal
# says: variant 4
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv < last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: live as soon as the first query sees it
# first: blocks are skipped unless their first query sees a key of them
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[0])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/9: exp(s) over lse
# first: lse is the logarithm of the sum
# says: jnp.exp(s) / lse
def p_and_ds(s, dp, lse, delta, seen):
    p = jnp.where(seen, jnp.exp(s) / lse, 0)
    return p, jnp.where(seen, p * (dp - delta), 0)


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    i, j = pl.program_id(2), pl.program_id(3)
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
    def _():
        k = rows_inside(k_ref[...], j, Skv)
        s = block_scores(q_ref[...], k, D**-0.5)
        dp = block_scores(do_ref[...], v_ref[...], 1.0)
        _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# %% flash_attention/12: the maximum starts from 0
# first: the maximum in m_ref starts from 0
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
        m_ref[...] = jnp.zeros(m_ref.shape)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


# %% flash_attention/12: the mask gets columns and rows
# first: `mask` is asked for columns and rows
# says: mask(cols, rows)
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
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(cols, rows) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


# %% flash_attention/13: the maximum starts from 0
# first: the maximum in m_ref starts from 0
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.zeros(m_ref.shape)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/13: the values end with the first page
# first: values are 0 from the second page on
# says: rows_inside(v_ref[...], t, page)
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, FLOOR)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(t * page < lengths_ref[b])
    def _():
        s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
        s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
        online_step(s, rows_inside(v_ref[...], t, page), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


def paged_attention(q, k_pages, v_pages, page_table, lengths):
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    group = H // Hkv

    def q_map(b, h, t, lengths_ref, table_ref):
        return (b, h, 0, 0)

    def page_map(b, h, t, lengths_ref, table_ref):
        last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
        return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)

    q_spec = pl.BlockSpec((None, None, group, D), q_map)
    page_spec = pl.BlockSpec((None, None, page, D), page_map)
    o = pl.pallas_call(
        paged_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, Hkv, page_table.shape[1]),
            in_specs=[q_spec, page_spec, page_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
    )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
    return o.reshape(q.shape)


# %% flash_attention/10: the forward function returns all of its results
# first: returns a pair, (result, residuals)
def first_q(j, bq, bkv, Sq, Skv, causal):
    return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]

    @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
    def _():
        q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
        s = block_scores(q, k_ref[...], D**-0.5)
        dp = block_scores(do, v_ref[...], 1.0)
        p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
        dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
        dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return (o, lse), (q, k, v, o, lse)


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, dk, dv
