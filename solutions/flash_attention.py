"""The answers to puzzles/flash_attention.py: the functions that fill its holes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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
    positions = pl.program_id(2) * bq + offset + column(bq)
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
    rescale = jnp.exp(m_old - m_new)
    l_ref[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * rescale + pv
    m_ref[...] = m_new

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)


# Puzzle 5
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    j, D = pl.program_id(3), q_ref.shape[1]

    @pl.when(j == 0)
    def _():
        start(m_ref, l_ref, acc_ref)

    s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
    online_step(s, v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


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
        scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (128, 128, D)],
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
        start(m_ref, l_ref, acc_ref)

    @pl.when(sees_all)
    def _():
        online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(sees_some & jnp.logical_not(sees_all))
    def _():
        s = block_scores(q_ref[...], k_ref[...], scale)
        positions = first_query + column(bq)
        online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


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
        start(m_ref, l_ref, acc_ref)

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


# Puzzle 8
def delta_kernel(o_ref, do_ref, delta_ref):
    product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
    delta_ref[...] = product.sum(axis=1, keepdims=True)


# Puzzle 9
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
        dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)


# Puzzle 10
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
    return dq, dk, dv


# Puzzle 11
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

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


# Puzzle 12
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

    @pl.when(kind == 2)
    def _():
        online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)

    @pl.when(kind == 1)
    def _():
        rows = i * bq + column(bq)
        cols = j * bkv + jnp.arange(bkv)[None, :]
        s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
        online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)


# Puzzle 13
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    b, t = pl.program_id(0), pl.program_id(2)
    page, D = k_ref.shape

    @pl.when(t == 0)
    def _():
        start(m_ref, l_ref, acc_ref)

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
