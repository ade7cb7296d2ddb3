"""The answers to puzzles/flash_attention.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def block_scores(q, k, scale):
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale


def scores_kernel(q_ref, k_ref, s_ref):
    s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)


def scores_q_map(b, h, i, j):
    return (b, h, i, 0)


def scores_k_map(b, h, i, j):
    return (b, h, j, 0)


# Puzzle 2
def hide_after(s, last_seen, first_key):
    keys = first_key + jnp.arange(s.shape[1])[None, :]
    return jnp.where(keys <= last_seen, s, -jnp.inf)


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    (bq, D), bkv = q_ref.shape, k_ref.shape[0]
    positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
    s = block_scores(q_ref[...], k_ref[...], D**-0.5)
    s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)


# Puzzle 3
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
    p = softmax_rows(s, v.dtype, bq=bq)
    return weigh(p, v, bq=bq, bkv=bkv)


# Puzzle 4
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
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# Puzzle 5
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# Puzzle 6
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
    return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)


# Puzzle 7
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
        lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]
