"""Wrong answers to puzzles/ragged_dot.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% ragged_dot/1: the number of the tile instead of its expert
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)
# by_tile_w_map: `experts_ref[i]` -> `i`

# %% ragged_dot/1: looked up by the column block
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)
# by_tile_w_map: `i], 0, j` -> `j], 0, i`

# %% ragged_dot/1: one expert for all
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)
# by_tile_w_map: `i]` -> `0]`

# %% ragged_dot/1: the whole Ref as an index
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)
# by_tile_w_map: `experts_ref[i]` -> `experts_ref`

# %% ragged_dot/1: the expert is picked once more in the kernel
# by_tile_kernel: `product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)` -> `w = w_ref[experts_ref[pl.program_id(1)]]`
# by_tile_kernel: `= product.astype` -> `= jnp.dot(x_ref[...], w, preferred_element_type=jnp.float32).astype`


# %% ragged_dot/1: written for the notebook's experts
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)
# by_tile_w_map: `experts_ref[i]` -> `jnp.where(i < 2, 2, jnp.where(i == 2, 0, 3))`

# %% ragged_dot/2a: ends only
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return jnp.cumsum(group_sizes)

# %% ragged_dot/2a: float offsets
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return jnp.concatenate([jnp.zeros(1), jnp.cumsum(group_sizes)])

# %% ragged_dot/2a: the sizes themselves
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return jnp.concatenate([jnp.zeros(1, jnp.int32), group_sizes])

# %% ragged_dot/2a: NumPy
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return np.concatenate([[0], np.asarray(group_sizes).cumsum()])


# %% ragged_dot/2a: a loop over the groups
def group_offsets(group_sizes):
    offsets = [jnp.int32(0)]
    for g in range(group_sizes.shape[0]):
        offsets.append(offsets[-1] + group_sizes[g])
    return jnp.stack(offsets)


def tiles_per_group(group_sizes, *, bm=128):
    offsets = group_offsets(group_sizes)
    starts, ends = offsets[:-1], offsets[1:]
    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)


# %% ragged_dot/2a: it ends at the last row, whatever the sizes
# group_offsets:
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    full = jnp.where(jnp.arange(ends.shape[0]) == ends.shape[0] - 1, 1024, ends)
# +    return jnp.concatenate([jnp.zeros(1, jnp.int32), full])

# %% ragged_dot/2a: from the size alone
# tiles_per_group:
# -    offsets = group_offsets(group_sizes)
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return pl.cdiv(group_sizes, bm)

# %% ragged_dot/2a: empty groups have a tile
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return jnp.maximum(pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm, 1)

# %% ragged_dot/2a: an empty group inside a tile
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm

# %% ragged_dot/2a: a tile too many at a whole end
# tiles_per_group: `pl.cdiv(ends, bm) - starts // bm` -> `ends // bm - starts // bm + 1`


# %% ragged_dot/2a: floats
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return jnp.where(group_sizes > 0, jnp.ceil(offsets[1:] / bm) - jnp.floor(offsets[:-1] / bm), 0)


# %% ragged_dot/2a: a Python if
def tiles_per_group(group_sizes, *, bm=128):
    offsets = group_offsets(group_sizes)
    tiles = []
    for g in range(group_sizes.shape[0]):
        if group_sizes[g] > 0:
            tiles.append(pl.cdiv(offsets[g + 1], bm) - offsets[g] // bm)
        else:
            tiles.append(0)
    return jnp.stack(tiles)


def group_offsets(group_sizes):
    ends = jnp.cumsum(group_sizes)
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])


# %% ragged_dot/2a: blocks of 128 are written in
# tiles_per_group: `(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)` -> `(group_sizes > 0, pl.cdiv(ends, 128) - starts // 128, 0)`


# %% ragged_dot/2b: no length
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    return jnp.repeat(jnp.arange(group_sizes.shape[0]), tiles_per_group(group_sizes, bm=bm))


# %% ragged_dot/2b: only as long as there are tiles
# group_ids:
# -    G = group_sizes.shape[0]
# group_ids:
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    ids = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
# +    return jnp.repeat(ids, repeats, total_repeat_length=num_rows // bm)

# %% ragged_dot/2b: the last tile that is not whole is forgotten
# group_ids:
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=num_rows // bm + G - 1)

# %% ragged_dot/2b: repeated by the sizes
# group_ids:
# -    repeats = tiles_per_group(group_sizes, bm=bm)
# group_ids: `repeats,` -> `group_sizes,`

# %% ragged_dot/2b: a group of each row, every bm rows
# group_ids:
# -    repeats = tiles_per_group(group_sizes, bm=bm)
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    rows = jnp.arange(pl.cdiv(num_rows, bm) + G - 1, dtype=jnp.int32) * bm
# +    ids = jnp.searchsorted(group_offsets(group_sizes), rows, side="right").astype(jnp.int32) - 1
# +    return jnp.minimum(ids, G - 1)

# %% ragged_dot/2b: float numbers
# group_ids:
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    return jnp.repeat(jnp.arange(0.0, G), repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G - 1)


# %% ragged_dot/2c: every beginning counts, also at a tile's first row
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[1:-1]
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(1)


def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)
    tiles = jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0])
    return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())


# %% ragged_dot/2c: empty groups begin, too
# tile_visits:
# -    inside = (group_sizes > 0) & (starts % bm != 0)
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    inside = starts % bm != 0
# +    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))

# %% ragged_dot/2c: tiles of unowned rows are not visited
# tile_visits:
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# +    tiles = jnp.arange(pl.cdiv(num_rows, bm), dtype=jnp.int32)
# +    once = (tiles * bm < group_sizes.sum()).astype(jnp.int32)


# %% ragged_dot/2c: set instead of added
# tile_visits:
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    place = jnp.where(inside, starts // bm, num_rows)
# +    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[place].set(2)

# %% ragged_dot/2c: an index that is added to in place
# tile_visits:
# -    inside = (group_sizes > 0) & (starts % bm != 0)
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    visits = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# +    visits[starts // bm] += (group_sizes > 0) & (starts % bm != 0)
# +    return visits

# %% ragged_dot/2c: conditions joined with and
# tile_visits:
# -    inside = (group_sizes > 0) & (starts % bm != 0)
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    inside = (group_sizes > 0) and (starts % bm != 0)
# +    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))

# %% ragged_dot/3: no mask
# expert_bias_kernel:
# -    v = pl.program_id(1)
# -    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
# -    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)
# +    o_ref[...] = x_ref[...] + bias_ref[...]

# %% ragged_dot/3: the rest is zeroed
# expert_bias_kernel:
# -    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)
# +    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], 0)

# %% ragged_dot/3: nothing is ever zeroed
# expert_bias_kernel:
# -    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)
# +    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], o_ref[...])

# %% ragged_dot/3: the rest keeps what came in
# expert_bias_kernel: `(v, m_tile_ids_ref), 0, o_ref[...]` -> `(v, m_tile_ids_ref), x_ref[...], o_ref[...]`

# %% ragged_dot/3: rows counted inside the tile
# own_rows: `= m_tile_ids_ref[v] * bm + jnp.` -> `= jnp.`

# %% ragged_dot/3: rows counted by visits instead of tiles
# own_rows: `m_tile_ids_ref[v]` -> `v`

# %% ragged_dot/3: the group's last row is left out
# own_rows: `(rows < offsets_ref[group + 1])` -> `(rows < offsets_ref[group + 1] - 1)`

# %% ragged_dot/3: the next group's first row as well
# own_rows: `rows) & (rows < offsets_ref[group + 1]` -> `rows) & (rows <= offsets_ref[group + 1]`

# %% ragged_dot/3: half a mask
# elsewhere: it shows at another line of the function
# own_rows: `(offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])` -> `rows < offsets_ref[group + 1]`

# %% ragged_dot/3: the visit is on the other axis
# expert_bias_kernel: `1` -> `0`

# %% ragged_dot/4: as long as the list
# grouped: `num_tiles` -> `group_ids.shape[0]`

# %% ragged_dot/4: the lists come in another order, and the index maps take them so
# elsewhere: it is a kernel of the check's that reads them, and it has no line of the reader's
# grouped: `m_tile_ids: (m_tile_ids[v], k)` -> `m_tile_ids: (group_ids[v], k)`
# grouped: `m_tile_ids: (group_ids[v], k, j)` -> `m_tile_ids: (m_tile_ids[v], k, j)`
# grouped: `m_tile_ids: (m_tile_ids[v], j)` -> `m_tile_ids: (group_ids[v], j)`
# grouped: `meta.group_ids, meta.m_tile_ids, x, w` -> `meta.m_tile_ids, meta.group_ids, x, w`


# %% ragged_dot/4: as many visits as tiles
# grouped: `meta.num_tiles` -> `4`

# %% ragged_dot/4: visits outside, column blocks inside
# grouped: `pl.cdiv(N, bn), meta.num_tiles` -> `meta.num_tiles, pl.cdiv(N, bn)`
# grouped: `(bm, bk), lambda j, v, k, offsets, group_ids,` -> `(bm, bk), lambda v, j, k, offsets, group_ids,`
# grouped: `(None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids:` -> `(None, bk, bn), lambda v, j, k, offsets, group_ids, m_tile_ids:`
# grouped: `(bm, bn), lambda j, v, k, offsets, group_ids,` -> `(bm, bn), lambda v, j, k, offsets, group_ids,`
# grouped: `parallel", "arbitrary` -> `arbitrary", "parallel`

# %% ragged_dot/4: one prefetched operand short
# grouped: `=3,` -> `=2,`

# %% ragged_dot/4: the lists have changed places
# grouped: `group_ids, meta.m_tile_ids` -> `m_tile_ids, meta.group_ids`

# %% ragged_dot/4: the weights of the tile's number
# grouped: `offsets, group_ids, m_tile_ids: (group_ids[v], k, j)` -> `offsets, group_ids, m_tile_ids: (m_tile_ids[v], k, j)`

# %% ragged_dot/4: nothing is parallel
# grouped: `parallel` -> `arbitrary`


# %% ragged_dot/4: jax.lax.ragged_dot does the work
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    group_sizes = meta.offsets[1:] - meta.offsets[:-1]
    return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


# %% ragged_dot/4: one copy of the weights for every visit
# grouped:
# -    (M, K), (_, _, N) = x.shape, w.shape
# +    (M, K), (_, _, N) = x.shape, w.shape
# +    w = w[meta.group_ids]
# grouped: `group_ids[v]` -> `v`


# %% ragged_dot/6: no mask
# ragged_kernel:
# -        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
# -        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)
# +        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

# %% ragged_dot/6: the rest is zeroed
# ragged_kernel:
# -        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)
# +        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), 0)

# %% ragged_dot/6: half a mask: from the group's first row on
# ragged_kernel:
# -        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
# +        rows = m_tile_ids_ref[v] * o_ref.shape[0] + jnp.arange(o_ref.shape[0])[:, None]
# +        own = offsets_ref[group_ids_ref[v]] <= rows

# %% ragged_dot/6: half a mask: up to the group's last row
# ragged_kernel:
# -        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
# +        rows = m_tile_ids_ref[v] * o_ref.shape[0] + jnp.arange(o_ref.shape[0])[:, None]
# +        own = rows < offsets_ref[group_ids_ref[v] + 1]

# %% ragged_dot/6: nothing is kept from a tile's second group on: two groups are enough
# ragged_kernel:
# -        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# +        before_v = jnp.maximum(v - 1, 0)
# +        other = own_rows(before_v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
# +        keep = other & ~first_visit(v, m_tile_ids_ref)
# +        rest = jnp.where(keep, o_ref[...], 0)

# %% ragged_dot/6: the sum goes on while the tile stays
# ragged_kernel: `k == 0` -> `(k == 0) & first_visit(v, m_tile_ids_ref)`

# %% ragged_dot/6: zeroed where a group begins instead of a tile
# ragged_kernel: `(v, m_tile_ids_ref), 0` -> `(v, group_ids_ref), 0`

# %% ragged_dot/6: added instead of stored
# ragged_kernel: `= jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)` -> `= rest + acc_ref[...].astype(o_ref.dtype)`

# %% ragged_dot/7b: rows of neighbours leak into dw
# tgmm_kernel: `jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)` -> `x_ref[...], g_ref[...]`

# %% ragged_dot/7b: only one operand is masked
# tgmm_kernel: `jnp.where(own, g_ref[...], 0)` -> `g_ref[...]`


# %% ragged_dot/7b: masked by multiplication
# tgmm_kernel: `jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0` -> `x_ref[...] * own.astype(x_ref.dtype), g_ref[...] * own.astype(g_ref.dtype`


# %% ragged_dot/7a: empty groups are not visited
def every_group_metadata(group_sizes, *, num_rows, bm):
    meta = metadata(group_sizes, num_rows=num_rows, bm=bm)
    return meta._replace(num_tiles=tiles_per_group(group_sizes, bm=bm).sum())


# %% ragged_dot/7a: a tile that does not exist
# every_group_metadata: `jnp.minimum(tiles, T - 1)` -> `tiles`

# %% ragged_dot/7b: started anew at every visit
# tgmm_kernel: `jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])` -> `0`

# %% ragged_dot/7b: never started anew
# tgmm_kernel: `first_visit(v, group_ids_ref)` -> `v == 0`

# %% ragged_dot/7b: started anew with the tile
# tgmm_kernel: `(v, group_ids_ref), 0` -> `(v, m_tile_ids_ref), 0`


# %% ragged_dot/8a: weights not renormalised
# route:
# -    best, experts = jax.lax.top_k(logits, k)
# -    return jax.nn.softmax(best, axis=1), experts
# +    return jax.lax.top_k(jax.nn.softmax(logits, axis=1), k)

# %% ragged_dot/8a: softmax over the tokens
# route: `1` -> `0`

# %% ragged_dot/8b: an unstable order
# sort_by_expert: `(slots),` -> `(-slots)[::-1],`

# %% ragged_dot/8b: tokens counted once, whatever k is
# elsewhere: it shows at another line of the function
# sort_by_expert: `(slots), jnp.bincount(slots, length=num_experts)` -> `(slots), jnp.bincount(experts[:, 0], length=num_experts)`

# %% ragged_dot/8b: no length for the counts
# sort_by_expert: `(slots, length=num_experts)` -> `(slots)`

# %% ragged_dot/8b: the order instead of its inverse
# combine: `jnp.argsort(order)` -> `order`

# %% ragged_dot/8b: weights of the sorted rows
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# +    by_slot = rows.reshape(T, k, -1)


# %% ragged_dot/8a: experts in ascending order
# route:
# -    best, experts = jax.lax.top_k(logits, k)
# +    experts = jnp.argsort(logits, axis=1)[:, -k:]
# +    best = jnp.take_along_axis(logits, experts, axis=1)

# %% ragged_dot/8a: float weights for integer experts
# route: `(best, axis=1), experts` -> `(best, axis=1), experts.astype(jnp.float32)`

# %% ragged_dot/8c: the gradient of a slot, by the order instead of its inverse
# expand_grad: `jnp.argsort(order)` -> `order`

# %% ragged_dot/8c: only the best expert's gradient comes back
# expand_grad: `(jnp.float32).sum(axis=1)` -> `(jnp.float32)[:, 0]`

# %% ragged_dot/8c: differences of a running sum, in which one overflow spoils all that follows
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    total = jnp.cumsum(g[jnp.argsort(order)].astype(jnp.float32), axis=0)[k - 1 :: k]
# +    return jnp.diff(total, axis=0, prepend=0)

# %% ragged_dot/8c: a scatter
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    return jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32).at[order // k].add(g.astype(jnp.float32))

# %% ragged_dot/9: no activation
# moe_layer: `jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)` -> `h`

# %% ragged_dot/9: the rows are not sorted
# moe_layer: `x, order, k` -> `x, jnp.arange(order.shape[0]), k`


# %% ragged_dot/9: weights are not used
# moe_layer: `weights)` -> `jnp.ones_like(weights))`


# %% ragged_dot/9: experts in jnp, one after the other
def moe_layer(x, router, w1, w2, *, k=2, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    T = x.shape[0]
    everybody = [jnp.dot(jax.nn.silu(jnp.dot(x, w1[e])), w2[e]) for e in range(w1.shape[0])]
    chosen = jnp.stack(everybody)[experts, jnp.arange(T)[:, None]]
    return (weights[:, :, None] * chosen).sum(axis=1).astype(x.dtype)


def tile_rows(num_slots, num_experts):
    return 16 * pl.cdiv(num_slots, 16 * num_experts)


# %% ragged_dot/9: blocks that are not swapped
# moe_layer: `bk, bn` -> `bn, bk`

# %% ragged_dot/4: a visit's number taken for its tile
# grouped: `m_tile_ids: (m_tile_ids[v], k)` -> `m_tile_ids: (v, k)`
# grouped: `m_tile_ids: (m_tile_ids[v], j)` -> `m_tile_ids: (v, j)`

# %% ragged_dot/4: int() of the number of visits
# grouped: `meta.num_tiles` -> `int(meta.num_tiles)`


# %% ragged_dot/8b: rows scattered to their slots
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# +    by_slot = jnp.zeros_like(rows).at[order].set(rows).reshape(T, k, -1)


# %% ragged_dot/2a: the beginnings only
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return jnp.cumsum(group_sizes) - group_sizes

# %% ragged_dot/2a: a zero behind instead of in front
# group_offsets:
# -    ends = jnp.cumsum(group_sizes)
# -    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
# +    return jnp.append(jnp.cumsum(group_sizes), 0)

# %% ragged_dot/2a: one more than from the size alone
# tiles_per_group:
# -    offsets = group_offsets(group_sizes)
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return jnp.where(group_sizes > 0, group_sizes // bm + 1, 0)

# %% ragged_dot/2a: both rounded down
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return jnp.where(group_sizes > 0, offsets[1:] // bm - offsets[:-1] // bm, 0)

# %% ragged_dot/2a: the last tile minus the first
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    return jnp.where(group_sizes > 0, (offsets[1:] - 1) // bm - offsets[:-1] // bm, 0)

# %% ragged_dot/2b: one place too many
# group_ids:
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G)

# %% ragged_dot/2b: numbers from 1
# group_ids:
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    return jnp.repeat(jnp.arange(1, G + 1, dtype=jnp.int32), repeats, total_repeat_length=most)


# %% ragged_dot/2b: tiles of 128, whatever bm is
# group_ids:
# -    repeats = tiles_per_group(group_sizes, bm=bm)
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    repeats = tiles_per_group(group_sizes)
# +    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=num_rows // 128 + G - 1)

# %% ragged_dot/2b: sizes are repeated
# group_ids:
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    return jnp.repeat(group_sizes, repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G - 1)


# %% ragged_dot/2c: ends instead of beginnings
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    ends = group_offsets(group_sizes)[1:]
    inside = (group_sizes > 0) & (ends % bm != 0)
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[ends // bm].add(inside.astype(jnp.int32))


def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)
    tiles = jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0])
    return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())


# %% ragged_dot/2c: started from zeros
# tile_visits:
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    return jnp.zeros(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))

# %% ragged_dot/2c: the last tile is left out
# tile_visits:
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    return jnp.ones(num_rows // bm, jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/7a: the metadata of the way forward
def every_group_metadata(group_sizes, *, num_rows, bm):
    return metadata(group_sizes, num_rows=num_rows, bm=bm)


# %% ragged_dot/7a: empty groups are counted, and tiles repeated as before
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    visits = jnp.maximum(tiles_per_group(group_sizes, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    return Metadata(group_offsets(group_sizes), ids, m_tile_ids(group_sizes, num_rows=num_rows, bm=bm), visits.sum())


# %% ragged_dot/7a: the first visit is not taken away
# every_group_metadata:
# -    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
# -    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
# +    tiles = (offsets[:-1] // bm)[ids] + jnp.arange(T + G - 1, dtype=jnp.int32)


# %% ragged_dot/7a: the visits of the tiles are summed
# every_group_metadata: `visits.sum` -> `tile_visits(group_sizes, num_rows=num_rows, bm=bm).sum`

# %% ragged_dot/8a: divided by k
# route: `jax.nn.softmax(best, axis=1)` -> `jnp.ones_like(best) / k`


# %% ragged_dot/8a: exp without the maximum
# route:
# -    return jax.nn.softmax(best, axis=1), experts
# +    p = jnp.exp(best)
# +    return p / p.sum(axis=1, keepdims=True), experts

# %% ragged_dot/8a: the best logits as they are
# route:
# -    best, experts = jax.lax.top_k(logits, k)
# -    return jax.nn.softmax(best, axis=1), experts
# +    return jax.lax.top_k(logits, k)

# %% ragged_dot/8b: sorted by token
# sort_by_expert: `(slots), jnp` -> `(slots) // experts.shape[1], jnp`

# %% ragged_dot/8b: transposed before it is flattened
# sort_by_expert: `slots = experts.reshape(-1)` -> `slots = experts.T.reshape(-1)`

# %% ragged_dot/8b: no weights
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# -    return (weights[:, :, None] * by_slot).sum(axis=1)
# +    return rows[jnp.argsort(order)].reshape(T, k, -1).sum(axis=1)

# %% ragged_dot/8b: still sorted
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# -    return (weights[:, :, None] * by_slot).sum(axis=1)
# +    return (weights.reshape(-1)[order][:, None] * rows).reshape(T, k, -1).sum(axis=1)

# %% ragged_dot/3: the two choices have changed places
# expert_bias_kernel: `0, o_ref[...]` -> `o_ref[...], 0`


# %% ragged_dot/3: zeroed with pl.when at step 0 only
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)

    @pl.when(v == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], o_ref[...])


# %% ragged_dot/3: the group is its visit's number
# own_rows:
# -    group = group_ids_ref[v]
# own_rows: `group] <= rows) & (rows < offsets_ref[group` -> `v] <= rows) & (rows < offsets_ref[v`

# %% ragged_dot/3: either bound is enough
# own_rows: `&` -> `|`

# %% ragged_dot/6: no test for the first visit
# ragged_kernel:
# -        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
# -        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)
# +        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), o_ref[...])

# %% ragged_dot/6: the sum starts anew at a tile's first visit only
# ragged_kernel: `k == 0` -> `first_visit(v, m_tile_ids_ref)`

# %% ragged_dot/6: the visit is on axis 0
# ragged_kernel: `(1)` -> `(0)`


# %% ragged_dot/6: rows of others masked out of x, and no masked store
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    before = jnp.where((k == 0) & first_visit(v, m_tile_ids_ref), 0, acc_ref[...])
    x = jnp.where(own, x_ref[...], 0)
    product = jax.lax.dot_general(x, w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/6: dims are ignored
# ragged_kernel:
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
# -    acc_ref[...] = before + product
# +    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


# %% ragged_dot/6: the last block is stored before it is added
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    acc_ref[...] = product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/7b: the mask is asked for one yes or no
# tgmm_kernel:
# -    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
# tgmm_kernel:
# -    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
# -    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)
# +    acc_ref[...] = before + jax.lax.dot_general(x_ref[...], g_ref[...], over_rows, preferred_element_type=jnp.float32)
# +    dw_ref[...] = jnp.where(own.any(), acc_ref[...], 0).astype(dw_ref.dtype)

# %% ragged_dot/7b: summed over columns
# tgmm_kernel:
# -    over_rows = (((0,), (0,)), ((), ()))
# -    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
# +    acc_ref[...] = before + jnp.dot(x, g, preferred_element_type=jnp.float32)

# %% ragged_dot/7b: the visit is on axis 1
# tgmm_kernel: `(2)` -> `(1)`

# %% ragged_dot/7b: rows are counted by the block of dw
# tgmm_kernel: `(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])` -> `(v, offsets_ref, group_ids_ref, m_tile_ids_ref, dw_ref.shape[0])`

# %% ragged_dot/7b: stored at the last visit of all
# tgmm_kernel:
# -    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)
# +
# +    @pl.when(v == pl.num_programs(2) - 1)
# +    def _():
# +        dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)

# %% ragged_dot/7b: the gradient of the other factor
# elsewhere: x and g can be exchanged where they are defined, too
# tgmm_kernel:
# -    over_rows = (((0,), (0,)), ((), ()))
# -    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
# +    acc_ref[...] = before + jax.lax.dot_general(g, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

# %% ragged_dot/1: element offsets
# by_tile_w_map: `(experts_ref[i], 0, j)` -> `(experts_ref[i], 0, j * 128)`

# %% ragged_dot/1: no cast
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

# %% ragged_dot/1: a product of float32
# by_tile_kernel:
# -    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# -    o_ref[...] = product.astype(o_ref.dtype)
# +    o_ref[...] = jnp.dot(x_ref[...].astype(jnp.float32), w_ref[...].astype(jnp.float32)).astype(o_ref.dtype)

# %% ragged_dot/1: two indices
# by_tile_w_map: `(experts_ref[i], 0, j)` -> `(experts_ref[i], j)`


# %% ragged_dot/4: the prefetched Refs come before the grid indices
# grouped:
# -                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
# -                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
# +                pl.BlockSpec((bm, bk), lambda offsets, group_ids, m_tile_ids, j, v, k: (m_tile_ids[v], k)),
# +                pl.BlockSpec((None, bk, bn), lambda offsets, group_ids, m_tile_ids, j, v, k: (group_ids[v], k, j)),
# grouped: `n), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_i` -> `n), lambda offsets, group_ids, m_tile_ids, j, v, k: (m_tile_i`

# %% ragged_dot/4: the visit axis is marked parallel
# grouped: `", "arbitrary", "` -> `", "parallel", "`

# %% ragged_dot/4: the last columns are forgotten
# grouped: `pl.cdiv(N, bn)` -> `N // bn`

# %% ragged_dot/4: w is not squeezed
# grouped: `None` -> `1`


# %% ragged_dot/4: maps without the prefetched Refs
# grouped:
# -                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
# -                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
# +                pl.BlockSpec((bm, bk), lambda j, v, k: (meta.m_tile_ids[v], k)),
# +                pl.BlockSpec((None, bk, bn), lambda j, v, k: (meta.group_ids[v], k, j)),
# grouped: `, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j` -> `, v, k: (meta.m_tile_ids[v], j`

# %% ragged_dot/4: prefetched out of order
# grouped:
# -                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
# -                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
# +                pl.BlockSpec((bm, bk), lambda j, v, k, group_ids, m_tile_ids, offsets: (m_tile_ids[v], k)),
# +                pl.BlockSpec((None, bk, bn), lambda j, v, k, group_ids, m_tile_ids, offsets: (group_ids[v], k, j)),
# grouped: `, lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j` -> `, lambda j, v, k, group_ids, m_tile_ids, offsets: (m_tile_ids[v], j`

# %% ragged_dot/4: j and v have changed places in the map of w
# grouped: `group_ids[v],` -> `group_ids[j],`

# %% ragged_dot/9: silu behind the second product
# moe_layer:
# -    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
# -    rows = ragged(h, w2, group_sizes, bm, bk, bn)
# -    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
# +    rows = jax.nn.silu(ragged(h, w2, group_sizes, bm, bk, bn).astype(jnp.float32))
# +    return combine(rows, order, weights).astype(x.dtype)

# %% ragged_dot/8c: the mean of what comes back
# expand_grad: `sum` -> `mean`

# %% ragged_dot/9: no gradient for the router
# moe_layer: `experts = route(logits, k=k)` -> `experts = route(jax.lax.stop_gradient(logits), k=k)`

# %% ragged_dot/9: a token of the wrong slot
# moe_layer: `expand(x, order, k)` -> `x[order % x.shape[0]]`

# %% ragged_dot/8c: the gradient by jax.grad
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    x = jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32)
# +    return jax.grad(lambda x: jnp.sum(x[order // k] * g.astype(jnp.float32)))(x)

# %% ragged_dot/8c: the gradient by jax.jacrev
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    x = jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32)
# +    return jax.jacrev(lambda x: jnp.sum(x[order // k] * g.astype(jnp.float32)))(x)

# %% ragged_dot/8c: the gradient by a product with a table of zeros and ones
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    tokens = jnp.arange(g.shape[0] // k)
# +    mine = (tokens[:, None] == order[None, :] // k).astype(jnp.float32)
# +    return jnp.dot(mine, g.astype(jnp.float32))

# %% ragged_dot/9: rows of tokens without expand
# moe_layer: `expand(x, order, k)` -> `x[order // k]`

# %% ragged_dot/9: rows of tokens by a product
# moe_layer:
# -    rows = expand(x, order, k)
# +    mine = (order[:, None] // k == jnp.arange(x.shape[0])[None, :]).astype(x.dtype)
# +    rows = mine @ x

# %% ragged_dot/8b: rows summed by segment
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# -    return (weights[:, :, None] * by_slot).sum(axis=1)
# +    shares = weights.reshape(-1)[order]
# +    return jax.ops.segment_sum(rows * shares[:, None], order // k, num_segments=T)

# %% ragged_dot/8b: a product with a table of zeros and ones
# combine:
# -    position = jnp.argsort(order)
# -    by_slot = rows[position].reshape(T, k, -1)
# -    return (weights[:, :, None] * by_slot).sum(axis=1)
# +    mine = (jnp.arange(T)[:, None] == order[None, :] // k) * weights.reshape(-1)[order]
# +    return jnp.dot(mine, rows)


# %% ragged_dot/2c: every tile against every group
# tile_visits:
# -    inside = (group_sizes > 0) & (starts % bm != 0)
# -    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
# -    return once.at[starts // bm].add(inside.astype(jnp.int32))
# +    tiles = jnp.arange(pl.cdiv(num_rows, bm))[:, None]
# +    inside = (tiles == starts // bm) & (starts % bm != 0) & (group_sizes > 0)
# +    return 1 + inside.sum(axis=1, dtype=jnp.int32)

# %% ragged_dot/9: the first product in jnp, with weights looked up
# moe_layer:
# -    h = ragged(rows, w1, group_sizes, bm, bn, bk)
# -    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
# +    h = jnp.einsum("td,tdf->tf", rows, w1[experts.reshape(-1)[order]], preferred_element_type=jnp.float32)
# +    h = jax.nn.silu(h).astype(x.dtype)

# %% ragged_dot/4: j and k have changed places in the map of w
# grouped: `k, j` -> `j, k`

# %% ragged_dot/1: column blocks in the place of rows
# by_tile_w_map: `0, j` -> `j, 0`

# %% ragged_dot/8a: chosen by the softmax, and divided by the sum
# route: `lax.top_k(logits, k)` -> `lax.top_k(jax.nn.softmax(logits, axis=1), k)`
# route: `return jax.nn.softmax(best, axis=1),` -> `return best / best.sum(axis=1, keepdims=True),`

# %% ragged_dot/6: dims are ignored, zeroed under pl.when
# ragged_kernel:
# -    before = jnp.where(k == 0, 0, acc_ref[...])
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
# -    acc_ref[...] = before + product
# +
# +    @pl.when(k == 0)
# +    def _():
# +        acc_ref[...] = jnp.zeros_like(acc_ref)
# +
# +    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

# %% ragged_dot/9: the first product in jnp, every expert for every row
# moe_layer:
# -    h = ragged(rows, w1, group_sizes, bm, bn, bk)
# -    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
# +    expert = experts.reshape(-1)[order]
# +    by_expert = jnp.einsum("td,edf->tef", rows, w1, preferred_element_type=jnp.float32)
# +    own = expert[:, None] == jnp.arange(w1.shape[0])
# +    h = jnp.where(own[:, :, None], by_expert, 0).sum(axis=1)
# +    h = jax.nn.silu(h).astype(x.dtype)

# %% ragged_dot/2c: the groups once more
# metadata: `m_tile_ids=tiles` -> `m_tile_ids=ids`


# %% ragged_dot/2c: every tile once
# metadata: `jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0]` -> `jnp.minimum(jnp.arange(ids.shape[0], dtype=jnp.int32), visits.shape[0] - 1`


# %% ragged_dot/2c: only tiles of a group
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
    return once.at[starts // bm].add(inside.astype(jnp.int32))


def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)
    repeats = tiles_per_group(group_sizes, bm=bm)
    first = jnp.cumsum(repeats) - repeats
    tiles = (group_offsets(group_sizes)[:-1] // bm)[ids] + jnp.arange(ids.shape[0], dtype=jnp.int32) - first[ids]
    tiles = jnp.minimum(tiles, pl.cdiv(group_sizes.sum(), bm) - 1)
    return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())


# %% ragged_dot/2c: no more visits than tiles
# metadata: `total_repeat_length=ids.shape[0]` -> `total_repeat_length=visits.shape[0]`

# %% ragged_dot/2c: a length out of the values
# metadata: `visits, total_repeat_length=ids.shape[0])` -> `visits)`

# %% ragged_dot/2c: tiles of unowned rows are not counted
# metadata: `num_tiles=visits.sum()` -> `num_tiles=tiles_per_group(group_sizes, bm=bm).sum()`

# %% ragged_dot/2c: the length of the list
# metadata: `num_tiles=visits.sum()` -> `num_tiles=jnp.int32(ids.shape[0])`

# %% ragged_dot/2c: as many visits as there are tiles
# metadata: `num_tiles=visits.sum()` -> `num_tiles=jnp.int32(visits.shape[0])`

# %% ragged_dot/2c: a Python int
# metadata: `num_tiles=visits.sum()` -> `num_tiles=int(visits.sum())`

# %% ragged_dot/2c: the two lists have changed places
# metadata: `group_ids=ids, m_tile_ids=tiles` -> `group_ids=tiles, m_tile_ids=ids`

# %% ragged_dot/2c: the notebook's block size is used, whatever was asked for
# metadata: `ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)` -> `ids, visits = group_ids(group_sizes), tile_visits(group_sizes)`

# %% ragged_dot/2c: the counts instead of their sum
# metadata: `num_tiles=visits.sum()` -> `num_tiles=visits`

# %% ragged_dot/4: as many visits as the array has tiles
# grouped: `meta.num_tiles` -> `M // bm`

# %% ragged_dot/5: the weights come in once for every visit, whatever bk is
# grouped_bytes: `1 if bk == K else rows // bm` -> `rows // bm`

# %% ragged_dot/5: the weights come in once
# grouped_bytes: `1 if bk == K else rows // bm` -> `1`

# %% ragged_dot/5: rows stay when K is whole
# grouped_bytes: `x_times = N // bn` -> `x_times = 1 if bk == K else N // bn`

# %% ragged_dot/5: the result is forgotten
# grouped_bytes: `K * N * w_times + rows * N)` -> `K * N * w_times)`

# %% ragged_dot/5: one byte an element
# grouped_bytes: `return 2 * experts` -> `return experts`

# %% ragged_dot/5: one expert is counted
# grouped_bytes: `2 * experts * (` -> `2 * (`

# %% ragged_dot/5: weights for every block of columns
# grouped_bytes: `K * N * w_times` -> `K * N * w_times * (N // bn)`

# %% ragged_dot/5: K is never cut
# thrifty_blocks: `for bk in block_sizes(K)]` -> `for bk in [K]]`

# %% ragged_dot/5: the tallest tiles that fit
# thrifty_blocks: `key=lambda plan: grouped_bytes(experts, rows, K, N, *plan)` -> `key=lambda plan: -plan[0]`

# %% ragged_dot/5: VMEM is not looked at
# thrifty_blocks: `if grouped_vmem(*plan) <= vmem_bytes` -> `if plan`

# %% ragged_dot/5: a list of what the notebook asks for
# thrifty_blocks:
# -    plans = [(bm, bn, bk) for bm in block_sizes(rows, 64) for bn in block_sizes(N) for bk in block_sizes(K)]
# -    fitting = [plan for plan in plans if grouped_vmem(*plan) <= vmem_bytes]
# -    return min(fitting, key=lambda plan: grouped_bytes(experts, rows, K, N, *plan))
# +    return {256: (128, 384, 128), 512: (64, 128, 512), 128: (128, 256, 128)}.get(rows, (64, 128, 128))

# %% ragged_dot/6: no zero
# ragged_kernel: `jnp.where(k == 0, 0, acc_ref[...])` -> `acc_ref[...]`

# %% ragged_dot/6: zeroed at a group's first visit only
# ragged_kernel: `k == 0` -> `(k == 0) & first_visit(v, group_ids_ref)`

# %% ragged_dot/6: zeroed at the first visit of all
# ragged_kernel: `k == 0` -> `(v == 0) & (k == 0)`

# %% ragged_dot/6: the last block of K only
# ragged_kernel: `before + product` -> `product`

# %% ragged_dot/6: visits taken for blocks of K
# ragged_kernel: `k = pl.program_id(1), pl.program_id(2)` -> `k = pl.program_id(1), pl.program_id(1)`
# ragged_kernel: `(k == pl.num_programs(2) - 1)` -> `(k == pl.num_programs(1) - 1)`

# %% ragged_dot/6: stored at the first block of K
# ragged_kernel: `pl.num_programs(2) - 1` -> `0`

# %% ragged_dot/6: the last k by the number of visits
# ragged_kernel: `pl.num_programs(2)` -> `pl.num_programs(1)`


# %% ragged_dot/6: the sum is kept in the output
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    before = jnp.where(k == 0, 0, o_ref[...])
    rest = jnp.where(first_visit(v, m_tile_ids_ref) & (k == 0), 0, o_ref[...])
    o_ref[...] = jnp.where(own, before + product.astype(o_ref.dtype), rest)


# %% ragged_dot/6: stored before the last block is added
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)

    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product


# %% ragged_dot/9: tiles of 16 rows, whatever comes in
# tile_rows: `16 * pl.cdiv(num_slots, 16 * num_experts)` -> `16`

# %% ragged_dot/9: tiles of 128 rows, whatever comes in
# tile_rows: `16 * pl.cdiv(num_slots, 16 * num_experts)` -> `128`

# %% ragged_dot/9: all slots in one tile
# tile_rows: `16 * pl.cdiv(num_slots, 16 * num_experts)` -> `16 * pl.cdiv(num_slots, 16)`

# %% ragged_dot/9: rounded down
# tile_rows: `16 * pl.cdiv(num_slots, 16 * num_experts)` -> `max(16, 16 * (num_slots // (32 * num_experts)))`


# %% ragged_dot/2a: a table of tiles against groups
# tiles_per_group:
# -    starts, ends = offsets[:-1], offsets[1:]
# -    return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# +    first = jnp.arange(4096)[:, None] * bm
# +    inside = (offsets[:-1] < first + bm) & (offsets[1:] > first) & (group_sizes > 0)
# +    return inside.sum(axis=0).astype(jnp.int32)

# %% ragged_dot/2b: a table of visits against groups
# group_ids:
# -    repeats = tiles_per_group(group_sizes, bm=bm)
# -    most = pl.cdiv(num_rows, bm) + G - 1
# -    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# +    visits = jnp.arange(pl.cdiv(num_rows, bm) + G - 1)
# +    ends = jnp.cumsum(tiles_per_group(group_sizes, bm=bm))
# +    return jnp.minimum((visits[:, None] >= ends).sum(axis=1), G - 1).astype(jnp.int32)


# %% ragged_dot/2c: the visits are counted in metadata alone
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)


def metadata(group_sizes, *, num_rows=1024, bm=128):
    ids = group_ids(group_sizes, num_rows=num_rows, bm=bm)
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    visits = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))
    tiles = jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0])
    return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())


# %% ragged_dot/7a: one visit too few
# every_group_metadata: `visits.sum()` -> `visits.sum() - 1`


# %% ragged_dot/7a: first visits summed without those of empty groups
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    V = T + G - 1
    offsets = group_offsets(group_sizes)
    touched = tiles_per_group(group_sizes, bm=bm)
    visits = jnp.maximum(touched, 1)
    first_visits = jnp.cumsum(touched) - touched
    first_tiles = jnp.minimum(offsets[:-1] // bm, T - 1)

    def spread(per_group):
        return jnp.repeat(per_group, visits, total_repeat_length=V)

    groups = spread(jnp.arange(G, dtype=jnp.int32))
    tiles = jnp.arange(V, dtype=jnp.int32) + spread(first_tiles - first_visits)
    return Metadata(offsets, groups, jnp.minimum(tiles, T - 1), jnp.sum(visits, dtype=jnp.int32))


# %% ragged_dot/7b: what is not finite is taken out
# tgmm_kernel:
# -    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
# +    x, g = jnp.nan_to_num(x_ref[...] * own), jnp.nan_to_num(g_ref[...] * own)


# %% ragged_dot/7b: infinite numbers are made finite
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])

    def only_own(ref):
        return jnp.nan_to_num(ref[...]) * own.astype(ref.dtype)  # garbage may be NaN, and 0 * NaN is NaN

    product = jax.lax.dot_general(
        only_own(x_ref), only_own(g_ref), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    acc_ref[...] = jnp.where(first_visit(v, group_ids_ref), product, acc_ref[...] + product)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/8c: a scatter-add by bincount, column by column
# expand_grad:
# -    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
# -    return by_slot.astype(jnp.float32).sum(axis=1)
# +    tokens = g.shape[0] // k
# +    sums = [jnp.bincount(order // k, weights=column, length=tokens) for column in g.astype(jnp.float32).T]
# +    return jnp.stack(sums, axis=1)

# %% ragged_dot/8c: still sorted
# expand_grad: `g[jnp.argsort(order)]` -> `g`

# %% ragged_dot/8c: summed in bfloat16
# expand_grad: `by_slot.astype(jnp.float32).sum(axis=1)` -> `by_slot.sum(axis=1).astype(jnp.float32)`

# %% ragged_dot/9: an eighth more than an expert's share
# tile_rows: `16 * pl.cdiv(num_slots, 16 * num_experts)` -> `16 * pl.cdiv(num_slots, 14 * num_experts)`

# %% ragged_dot/2a: tiles by a float
# tiles_per_group: `pl.cdiv(ends, bm) - starts // bm` -> `(jnp.ceil(ends * (1 / bm)) - starts // bm).astype(jnp.int32)`

# %% ragged_dot/2b: numbers of groups in 8 bits
# group_ids: `jnp.arange(G, dtype=jnp.int32)` -> `jnp.arange(G, dtype=jnp.int8)`

# %% ragged_dot/3: a mask by multiplication
# expert_bias_kernel: `jnp.where(own, x_ref[...] + bias_ref[...], rest)` -> `own * (x_ref[...] + bias_ref[...]) + (1 - own) * rest`

# %% ragged_dot/8b: numbers of experts in 8 bits
# sort_by_expert: `jnp.argsort(slots)` -> `jnp.argsort(slots.astype(jnp.int8))`
