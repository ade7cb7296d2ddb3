"""Wrong answers to puzzles/flash_attention.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
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
