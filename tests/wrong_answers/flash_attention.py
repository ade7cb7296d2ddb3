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
# first: what is expected
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
# first: k_ref
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
# first: round
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
# first: off by 128 positions
# first: start from the wrong number
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
# says: MiB
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
# first: o_ref
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
# first: o_ref
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
# first: o_ref
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


# %% flash_attention/5: normalised at every step
# first: acc_ref is divided at every step
# first: once, on the last
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    acc_ref[...] = acc_ref[...] / lanes(l_ref[...], v.shape[1])
    m_ref[...] = m_new


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
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


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


# %% flash_attention/5: acc is not rescaled
# first: acc_ref adds up exponentials
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] + pv
    m_ref[...] = m_new


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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: no axis is parallel
# first: Right answer, but
# says: have to follow one another
# says: parallel
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
# first: o_ref
# first: exp2(x * log2(e))
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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


# %% flash_attention/5: exp of scores in base 2
# first: o_ref
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %% flash_attention/5: the statistics start at the first block of queries alone
# first: m_ref
# first: step 3
# first: not only once
# says: l_ref
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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
def online_step(s, v, m_ref, l_ref, acc_ref):
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    mend = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
    m_ref[...] = m_new


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

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)


def causal_kv_map(i, j, bq, bkv, offset):
    return jnp.minimum(j, (i * bq + offset) // bkv)


# %% flash_attention/6: the diagonal is not masked
# first: o_ref
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
# first: o_ref
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
# first: o_ref
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
# first: lse_ref
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
# first: lse_ref
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
# first: lse_ref
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


# %% flash_attention/8: one sum for the whole block
# first: delta_ref are wrong
# says: product.sum()
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = jnp.broadcast_to(product.sum(), delta_ref.shape)


# %% flash_attention/8: down the columns instead of along the rows
# first: shape (1, 64) is stored in a Ref of shape (64, 1)
# says: axis=0
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=0, keepdims=True)


# %% flash_attention/8: the mean instead of the sum
# first: 0.015625 times what is expected
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.mean(axis=1, keepdims=True)


# %% flash_attention/8: the product in bfloat16
# first: rounding, not logic
# first: float32
# says: variant 2
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
# first: dq_ref are wrong
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
# first: never reads delta_ref
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
# first: dq_ref are wrong
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
# first: never reads lse_ref
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
# first: dq_ref are wrong
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
# first: never reads
# says: v_ref
# says: delta_ref
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
# first: never reads q_ref
# says: lse_ref
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
# first: dv_ref are wrong
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
# first: dk_ref is wrong
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
# says: dk_ref
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
# first: the two have changed places
# says: dk_ref
# says: dv_ref
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


# %% flash_attention/10: forward once more on the way back
# first: Right answer, but it moves
# says: FLOPs
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
# first: dv_ref are wrong
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
# first: dq_ref are wrong
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
# first: dq_ref are wrong
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
# first: k
# says: def grouped_kv_map
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
# first: Right answer, but it takes
# first: grid steps
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
# first: Right answer, but it moves
# says: k_ref:
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


# %% flash_attention/12: the map does not look into the list
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
        rows = jnp.arange(bq)[:, None]
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        l = l_ref[...]
        o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)


# %% flash_attention/12: the list of row 0 is as wide as all
# first: o_ref are wrong
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
# first: o_ref are zero
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
# first: pl.when
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
# first: o_ref are wrong
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
# first: o_ref are wrong
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
# first: Right answer, but it moves
# says: k_ref: 22 moves
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
# first: o_ref are wrong
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
# first: must not be longer than
# says: table_ref[b
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
