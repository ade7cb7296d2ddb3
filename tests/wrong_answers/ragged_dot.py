"""Wrong answers to puzzles/ragged_dot.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% ragged_dot/1: the number of the tile instead of its expert
# first: index map of w_ref
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (i, 0, j)


# %% ragged_dot/1: looked up by the column block
# first: w_ref
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[j], 0, i)


# %% ragged_dot/1: one expert for all
# first: 12 of them
# says: 12 of 18 blocks wrong
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[0], 0, j)


# %% ragged_dot/1: the whole Ref as an index
# first: ids_ref[i]
# says: def by_tile_w_map
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref, 0, j)


# %% ragged_dot/1: the expert is picked once more in the kernel
# first: The two factors of a product do not fit
# says: (256,) and
# says: o_ref[...] = jnp.dot(x_ref[...], w
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    w = w_ref[experts_ref[pl.program_id(1)]]
    o_ref[...] = jnp.dot(x_ref[...], w, preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], 0, j)


# %% ragged_dot/1: written for the notebook's experts
# first: index map of w_ref
# says: variant
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (jnp.where(i < 2, 2, jnp.where(i == 2, 0, 3)), 0, j)


# %% ragged_dot/2a: ends only
# first: shape (3,)
# first: (4,)
def group_offsets(group_sizes):
    return jnp.cumsum(group_sizes)


# %% ragged_dot/2a: float offsets
# first: float32
# first: int32
def group_offsets(group_sizes):
    return jnp.concatenate([jnp.zeros(1), jnp.cumsum(group_sizes)])


# %% ragged_dot/2a: the sizes themselves
# first: [2] is 100, not 200
# says: group  |--0---|
# says: rows   0      100    200
def group_offsets(group_sizes):
    return jnp.concatenate([jnp.zeros(1, jnp.int32), group_sizes])


# %% ragged_dot/2a: NumPy
# first: use jnp
# not: Traceback
def group_offsets(group_sizes):
    return np.concatenate([[0], np.asarray(group_sizes).cumsum()])


# %% ragged_dot/2a: a loop over the groups
# first: array operations; the budget is 40
# says: turn by turn
def group_offsets(group_sizes):
    offsets = [jnp.int32(0)]
    for g in range(group_sizes.shape[0]):
        offsets.append(offsets[-1] + group_sizes[g])
    return jnp.stack(offsets)


# %% ragged_dot/2a: it ends at the last row, whatever the sizes
# first: [6] is 1024, not
# says: variant 2
def group_offsets(group_sizes):
    ends = jnp.cumsum(group_sizes)
    full = jnp.where(jnp.arange(ends.shape[0]) == ends.shape[0] - 1, 1024, ends)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), full])


# %% ragged_dot/2b: from the size alone
# first: [1] is 1, not 2
# says: tile   |---0----|---1----|
# says: group  |--0---|--1---|
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    return pl.cdiv(group_sizes, bm)


# %% ragged_dot/2b: empty groups have a tile
# first: [0] is 1, not 0
# says: variant
# says: nobody in 0
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return jnp.maximum(pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm, 1)


# %% ragged_dot/2b: an empty group inside a tile
# first: not 0
# says: variant
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm


# %% ragged_dot/2b: a tile too many at a whole end
# first: [2] is 8, not 7
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    starts, ends = offsets[:-1], offsets[1:]
    return jnp.where(group_sizes > 0, ends // bm - starts // bm + 1, 0)


# %% ragged_dot/2b: floats
# first: float32
# first: // (rounds down)
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return jnp.where(group_sizes > 0, jnp.ceil(offsets[1:] / bm) - jnp.floor(offsets[:-1] / bm), 0)


# %% ragged_dot/2b: a Python if
# first: Python's range, if
# says: if group_sizes[g] > 0:
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    tiles = []
    for g in range(group_sizes.shape[0]):
        if group_sizes[g] > 0:
            tiles.append(pl.cdiv(offsets[g + 1], bm) - offsets[g] // bm)
        else:
            tiles.append(0)
    return jnp.stack(tiles)


# %% ragged_dot/2b: blocks of 128 are written in
# first: places
# says: bm=64
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    starts, ends = offsets[:-1], offsets[1:]
    return jnp.where(group_sizes > 0, pl.cdiv(ends, 128) - starts // 128, 0)


# %% ragged_dot/2c: no length
# first: total_repeat_length=
# says: jnp.repeat
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    return jnp.repeat(jnp.arange(group_sizes.shape[0]), tiles_per_group(group_sizes, num_rows=num_rows, bm=bm))


# %% ragged_dot/2c: only as long as there are tiles
# first: shape (8,)
# first: (10,)
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    ids = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    return jnp.repeat(ids, repeats, total_repeat_length=num_rows // bm)


# %% ragged_dot/2c: the last tile that is not whole is forgotten
# first: shape (54,)
# says: num_rows=1000
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=num_rows // bm + G - 1)


# %% ragged_dot/2c: repeated by the sizes
# first: places
# says: yours: [0 0 0 0 0 0 0 0 0 0]
# says: right: [0 1 1 2 2 2 2 2 2 2]
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    most = pl.cdiv(num_rows, bm) + G - 1
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), group_sizes, total_repeat_length=most)


# %% ragged_dot/2c: a group of each row, every bm rows
# first: places
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    rows = jnp.arange(pl.cdiv(num_rows, bm) + G - 1, dtype=jnp.int32) * bm
    ids = jnp.searchsorted(group_offsets(group_sizes), rows, side="right").astype(jnp.int32) - 1
    return jnp.minimum(ids, G - 1)


# %% ragged_dot/2c: float numbers
# first: float32
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(0.0, G), repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G - 1)


# %% ragged_dot/2d: every beginning counts, also at a tile's first row
# first: [2] is 2, not 1; [4] is 2, not 1
# says: variant 1
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[1:-1]
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(1)


# %% ragged_dot/2d: empty groups begin, too
# first: not
# says: variant
# says: nobody in
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = starts % bm != 0
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: nobody's tiles are not visited
# first: is 0, not 1
# says: variant
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    tiles = jnp.arange(pl.cdiv(num_rows, bm), dtype=jnp.int32)
    once = (tiles * bm < group_sizes.sum()).astype(jnp.int32)
    return once.at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: set instead of added
# first: [0] is 2, not 3
# says: variant 3
# says: group  |1-|-2-|
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    place = jnp.where(inside, starts // bm, num_rows)
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[place].set(2)


# %% ragged_dot/2d: an index that is added to in place
# first: JAX arrays do not change
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    visits = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
    visits[starts // bm] += (group_sizes > 0) & (starts % bm != 0)
    return visits


# %% ragged_dot/2d: conditions joined with and
# first: Python's range, if
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) and (starts % bm != 0)
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2e: the groups once more
# first: places
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    return group_ids(group_sizes, num_rows=num_rows, bm=bm)


# %% ragged_dot/2e: every tile once
# first: is 1, not 0
# says: yours: [0 1 2 3 4 5 6 7 7 7]
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    T = pl.cdiv(num_rows, bm)
    return jnp.minimum(jnp.arange(T + group_sizes.shape[0] - 1, dtype=jnp.int32), T - 1)


# %% ragged_dot/2e: only where somebody is
# first: not
# says: variant
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    ids = group_ids(group_sizes, num_rows=num_rows, bm=bm)
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    first = jnp.cumsum(repeats) - repeats
    tiles = (group_offsets(group_sizes)[:-1] // bm)[ids] + jnp.arange(ids.shape[0], dtype=jnp.int32) - first[ids]
    last = pl.cdiv(group_sizes.sum(), bm) - 1
    return jnp.minimum(tiles, last)


# %% ragged_dot/2e: no more than the groups have
# first: shape
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    T = pl.cdiv(num_rows, bm)
    visits = tile_visits(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(T, dtype=jnp.int32), visits, total_repeat_length=T)


# %% ragged_dot/2e: a length out of the values
# first: known before
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    T = pl.cdiv(num_rows, bm)
    visits = tile_visits(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(T, dtype=jnp.int32), visits)


# %% ragged_dot/2f: nobody's tiles are not counted
# first: num_tiles is 11, not 12
# says: variant
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    num_tiles = tiles_per_group(group_sizes, **tiling).sum()
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, num_tiles)


# %% ragged_dot/2f: the length of the list
# first: result.num_tiles is 11, not 8
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, jnp.int32(ids.shape[0]))


# %% ragged_dot/2f: as many as there are tiles
# first: num_tiles is 8, not 10
# says: variant 1
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, jnp.int32(pl.cdiv(num_rows, bm)))


# %% ragged_dot/2f: a Python int
# first: Python's range, if and int()
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, int(tile_visits(group_sizes, **tiling).sum()))


# %% ragged_dot/2f: the two lists have changed places
# first: result.group_ids is wrong
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), tiles, ids, tile_visits(group_sizes, **tiling).sum())


# %% ragged_dot/2f: the notebook's block size is used, whatever was asked for
# first: result.group_ids has shape
# says: bm=64
def metadata(group_sizes, *, num_rows=1024, bm=128):
    visits = tile_visits(group_sizes)
    return Metadata(group_offsets(group_sizes), group_ids(group_sizes), m_tile_ids(group_sizes), visits.sum())


# %% ragged_dot/3: no mask
# first: stored over
# first: Rows 0-35 of block (1, 0)
# first: jnp.where(own
# says: step 1
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    o_ref[...] = x_ref[...] + bias_ref[...]


# %% ragged_dot/3: the rest is zeroed
# first: stored over
# first: keeps the others
# says: step 1
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], 0)


# %% ragged_dot/3: nothing is ever zeroed
# first: o_ref
# first: nobody has written
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], o_ref[...])


# %% ragged_dot/3: the rest keeps what came in
# first: o_ref
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), x_ref[...], o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: rows counted inside the tile
# first: o_ref
# first: zero
# not: count twice
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: rows counted by visits instead of tiles
# first: o_ref
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = v * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: the group's last row is left out
# first: o_ref
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1] - 1)


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: the next group's first row as well
# first: o_ref
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows <= offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: half a mask
# first: stored over
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return rows < offsets_ref[group + 1]


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: the visit is on the other axis
# first: step 12
# first: o_ref
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(0)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/4: as long as the list
# first: grid steps; the budget is 18
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.group_ids.shape[0], K // bk),
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


# %% ragged_dot/4: as many visits as tiles
# first: o_ref
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), 4, K // bk),
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


# %% ragged_dot/4: visits outside, column blocks inside
# first: between HBM and VMEM; the budget is
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(meta.num_tiles, pl.cdiv(N, bn), K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda v, j, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda v, j, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda v, j, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "parallel", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: one prefetched operand short
# first: num_scalar_prefetch
# says: pl.pallas_call(
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
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


# %% ragged_dot/4: the lists have changed places
# first: out of bounds
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
    )(meta.offsets, meta.m_tile_ids, meta.group_ids, x, w)


# %% ragged_dot/4: the weights of the tile's number
# first: index map of w_ref
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: nothing is parallel
# first: have to follow one another
# says: 'parallel'
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: somebody else's
# first: ragged_dot does the work for you
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    group_sizes = meta.offsets[1:] - meta.offsets[:-1]
    return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


# %% ragged_dot/4: one copy of the weights for every visit
# first: outside of the kernel
# says: w = w[meta.group_ids]
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    w = w[meta.group_ids]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (v, k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/5: stored at every step
# first: stored at 4 steps
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: no zero
# first: acc_ref
# first: nobody has written
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = acc_ref[...]
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: zeroed at a group's first tile only
# first: acc_ref
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    v, k = pl.program_id(1), pl.program_id(2)
    start = first_visit(v, group_ids_ref) & (k == 0)
    before = jnp.where(start, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: the last block of K only
# first: overwritten
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    acc_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: visits taken for blocks of K
# first: nothing is stored there
# says: condition around the store
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(1)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: stored at the first block of K
# first: o_ref
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == 0)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/6: no mask
# first: stored over
# first: Rows 0-99 of block (0, 0)
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/6: the rest is zeroed
# first: stored over
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), 0)


# %% ragged_dot/6: half a mask: from the group's first row on
# first: o_ref
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        rows = m_tile_ids_ref[v] * o_ref.shape[0] + jnp.arange(o_ref.shape[0])[:, None]
        own = offsets_ref[group_ids_ref[v]] <= rows
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: half a mask: up to the group's last row
# first: stored over
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        rows = m_tile_ids_ref[v] * o_ref.shape[0] + jnp.arange(o_ref.shape[0])[:, None]
        own = rows < offsets_ref[group_ids_ref[v] + 1]
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: nothing is kept from a tile's second group on: two groups are enough
# first: o_ref
# says: variant
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        before_v = jnp.maximum(v - 1, 0)
        other = own_rows(before_v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        keep = other & ~first_visit(v, m_tile_ids_ref)
        rest = jnp.where(keep, o_ref[...], 0)
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: the sum goes on while the tile stays
# first: wrong in rows 100-127
# first: step 3
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where((k == 0) & first_visit(v, m_tile_ids_ref), 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: zeroed where a group begins instead of a tile
# first: o_ref
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, group_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: added instead of stored
# first: stored over
# first: keeps the others
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = rest + acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/7: rows of neighbours leak into dw
# first: dw_ref
# not: sounds like
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = x_ref[...], g_ref[...]
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: only one operand is masked
# first: g_ref lie beyond the edge
# says: variant
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), g_ref[...]
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: masked by multiplication
# first: beyond the edge
# says: jnp.where
# says: variant
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = x_ref[...] * own.astype(x_ref.dtype), g_ref[...] * own.astype(g_ref.dtype)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: empty groups are not visited
# first: dw_ref
# first: never visited
# says: variant
def every_group_metadata(group_sizes, *, num_rows, bm):
    meta = metadata(group_sizes, num_rows=num_rows, bm=bm)
    return meta._replace(num_tiles=tiles_per_group(group_sizes, num_rows=num_rows, bm=bm).sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: a tile that does not exist
# first: out of bounds
# says: variant
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, tiles, visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: started anew at every visit
# first: acc_ref
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = 0
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: never started anew
# first: acc_ref
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(v == 0, 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7: started anew with the tile
# first: acc_ref
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, m_tile_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/8: weights not renormalised
# first: result.weights is wrong
# not: def route
def route(logits, *, k):
    return jax.lax.top_k(jax.nn.softmax(logits, axis=1), k)


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: softmax over the tokens
# first: result.weights is wrong
# not: def route
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=0), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: an unstable order
# first: result.order is wrong
# not: def route
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(-slots)[::-1], jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: tokens counted once, whatever k is
# first: result.group_sizes is wrong
# not: def route
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(experts[:, 0], length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: no length for the counts
# first: known first
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: the order instead of its inverse
# first: result.result is wrong
# not: def route
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = order
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: weights of the sorted rows
# first: result.result is wrong
# not: def route
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    by_slot = rows.reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: experts in ascending order
# first: result.weights is wrong
# not: def route
def route(logits, *, k):
    experts = jnp.argsort(logits, axis=1)[:, -k:]
    best = jnp.take_along_axis(logits, experts, axis=1)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8: float weights for integer experts
# first: experts is float32
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts.astype(jnp.float32)


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1).astype(jnp.int32)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/9: the gradient of a slot, by the order instead of its inverse
# first: result.dx is wrong
def expand_grad(g, order, *, k):
    by_slot = g[order].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: only the best expert's gradient comes back
# first: result.dx is wrong
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32)[:, 0]


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: a scatter
# first: at[...].add is the scatter
def expand_grad(g, order, *, k):
    return jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32).at[order // k].add(g.astype(jnp.float32))


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: no activation
# first: result.y is wrong
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = h
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: the rows are not sorted
# first: result.y is wrong
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, jnp.arange(order.shape[0]), k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: weights are not used
# first: part of the result does not come out of a pallas_call
# says: result.y is wrong
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, jnp.ones_like(weights)).astype(x.dtype)


# %% ragged_dot/9: experts in jnp, one after the other
# first: pallas_call
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    T = x.shape[0]
    everybody = [jnp.dot(jax.nn.silu(jnp.dot(x, w1[e])), w2[e]) for e in range(w1.shape[0])]
    chosen = jnp.stack(everybody)[experts, jnp.arange(T)[:, None]]
    return (weights[:, :, None] * chosen).sum(axis=1).astype(x.dtype)


# %% ragged_dot/9: blocks that are not swapped
# first: never visited
# says: variant
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bn, bk)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/4: a visit's number taken for its tile
# first: o_ref
# says: variant 3
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (v, k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (v, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: int() of the number of visits
# first: Leave it out: a grid takes the value as it is
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), int(meta.num_tiles), K // bk),
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


# %% ragged_dot/6: a masked store at every block of K
# first: is stored at
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/8: rows scattered to their slots
# first: the inverse permutation fetches them
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts


def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots, stable=True), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    by_slot = jnp.zeros_like(rows).at[order].set(rows).reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/9: expand_grad never written
# first: result.spread
def expand_grad(g, order, *, k):
    return g[: g.shape[0] // k].astype(jnp.float32)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = x[order // k]
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
