"""The answers to puzzles/ragged_dot.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = product.astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], 0, j)


# Puzzle 2a
def group_offsets(group_sizes):
    ends = jnp.cumsum(group_sizes)
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])


def tiles_per_group(group_sizes, *, bm=128):
    offsets = group_offsets(group_sizes)
    starts, ends = offsets[:-1], offsets[1:]
    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)


# Puzzle 2b
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, bm=bm)
    most = pl.cdiv(num_rows, bm) + G - 1
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)


# Puzzle 2c
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
    return once.at[starts // bm].add(inside.astype(jnp.int32))


def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)
    tiles = jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0])
    return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())


# Puzzle 3
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# Puzzle 4
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# Puzzle 5
def grouped_bytes(experts, rows, K, N, bm, bn, bk):
    x_times = N // bn
    w_times = 1 if bk == K else rows // bm
    return 2 * experts * (rows * K * x_times + K * N * w_times + rows * N)


def thrifty_blocks(experts, rows, K, N, vmem_bytes):
    plans = [(bm, bn, bk) for bm in block_sizes(rows, 64) for bn in block_sizes(N) for bk in block_sizes(K)]
    fitting = [plan for plan in plans if grouped_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: grouped_bytes(experts, rows, K, N, *plan))


# Puzzle 6
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# Puzzle 7a
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


# Puzzle 7b
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# Puzzle 8a
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


# Puzzle 8b
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# Puzzle 8c
def expand_grad(g, order, *, k=2):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


# Puzzle 9
def tile_rows(num_slots, num_experts):
    return 16 * pl.cdiv(num_slots, 16 * num_experts)


def moe_layer(x, router, w1, w2, *, k=2, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    bm = tile_rows(order.shape[0], router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
