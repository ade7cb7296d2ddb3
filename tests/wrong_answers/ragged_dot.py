"""Wrong answers to puzzles/ragged_dot.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% ragged_dot/1: the number of the tile instead of its expert
# first: index map of w_ref
# first: looks nothing up
# first: experts_ref
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
# first: Tile 2, rows 128 to 191, asks for expert 0
# first: the map does not ask for data
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
# first: looks nothing up
# says: variant
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (jnp.where(i < 2, 2, jnp.where(i == 2, 0, 3)), 0, j)


# %% ragged_dot/2a: ends only
# first: shape (3,)
# first: These are the ends
# first: group 2 none
def group_offsets(group_sizes):
    return jnp.cumsum(group_sizes)


# %% ragged_dot/2a: float offsets
# first: float32
# first: int32
def group_offsets(group_sizes):
    return jnp.concatenate([jnp.zeros(1), jnp.cumsum(group_sizes)])


# %% ragged_dot/2a: the sizes themselves
# first: [2] is 100, not 200
# first: Group 1 ends at row 200
# first: it would have 0 rows instead of 100
# says: group  |--0---|
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
# first: [3] is 1024, not 128
# first: 896 rows that are nobody's
# says: variant 1
def group_offsets(group_sizes):
    ends = jnp.cumsum(group_sizes)
    full = jnp.where(jnp.arange(ends.shape[0]) == ends.shape[0] - 1, 1024, ends)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), full])


# %% ragged_dot/2b: from the size alone
# first: [1] is 1, not 2
# first: from its size alone
# first: rows from 128 on would never be computed
# says: tile   |---0----|---1----|
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    return pl.cdiv(group_sizes, bm)


# %% ragged_dot/2b: empty groups have a tile
# first: [0] is 1, not 0
# first: multiplies 128 rows of others
# says: variant
# says: nobody in 0
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return jnp.maximum(pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm, 1)


# %% ragged_dot/2b: an empty group inside a tile
# first: not 0
# first: Row 300, where it would begin, lies inside a tile
# says: variant
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return pl.cdiv(offsets[1:], bm) - offsets[:-1] // bm


# %% ragged_dot/2b: a tile too many at a whole end
# first: [2] is 8, not 7
# first: is the first row of tile 8
# first: 128 rows, none of which is its own
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
# first: rows 64 to 127 would never be computed
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
# first: 10 visits at most
# first: up to 2 visits are cut off
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    ids = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    return jnp.repeat(ids, repeats, total_repeat_length=num_rows // bm)


# %% ragged_dot/2c: the last tile that is not whole is forgotten
# first: shape (4,)
# first: the last of 22 rows
# first: pl.cdiv
# says: num_rows=150
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=num_rows // bm + G - 1)


# %% ragged_dot/2c: repeated by the sizes
# first: Visit 1 is tile 0, for rows 100 to 127
# first: never meet w[1]
# says: yours: [0 0 0 0 0 0 0 0 0 0]
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    most = pl.cdiv(num_rows, bm) + G - 1
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), group_sizes, total_repeat_length=most)


# %% ragged_dot/2c: a group of each row, every bm rows
# first: Visit 2 is tile 1, for rows 128 to 199
# first: goes on here
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
# first: [2] is 2, not 1
# first: shares it with nobody
# first: 128 rows for nothing
# says: variant 2
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[1:-1]
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(1)


# %% ragged_dot/2d: empty groups begin, too
# first: Groups 1 and 2 would begin here
# first: nothing to add
# first: 256 rows for nothing
# says: variant
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = starts % bm != 0
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: nobody's tiles are not visited
# first: is 0, not 1
# first: Tile 2 is nobody's
# first: its 22 rows come back as garbage
# says: variant
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    tiles = jnp.arange(pl.cdiv(num_rows, bm), dtype=jnp.int32)
    once = (tiles * bm < group_sizes.sum()).astype(jnp.int32)
    return once.at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: set instead of added
# first: [0] is 2, not 3
# first: Groups 1 and 2 all begin inside it
# first: rows of group 2 here are not computed
# says: variant 1
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
# first: `and`
# first: join them with `&`
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) and (starts % bm != 0)
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2e: the groups once more
# first: These are the groups once more
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    return group_ids(group_sizes, num_rows=num_rows, bm=bm)


# %% ragged_dot/2e: every tile once
# first: Visit 1 is tile 0 for group 1
# first: a tile with two groups stays for two
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    T = pl.cdiv(num_rows, bm)
    return jnp.minimum(jnp.arange(T + group_sizes.shape[0] - 1, dtype=jnp.int32), T - 1)


# %% ragged_dot/2e: only where somebody is
# first: Visit 4 is tile 2, which is nobody's
# first: the 22 rows of tile 2 come back as garbage
def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    ids = group_ids(group_sizes, num_rows=num_rows, bm=bm)
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    first = jnp.cumsum(repeats) - repeats
    tiles = (group_offsets(group_sizes)[:-1] // bm)[ids] + jnp.arange(ids.shape[0], dtype=jnp.int32) - first[ids]
    last = pl.cdiv(group_sizes.sum(), bm) - 1
    return jnp.minimum(tiles, last)


# %% ragged_dot/2e: no more than the groups have
# first: the result has shape (8,)
# first: up to 2 visits are cut off
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
# first: num_tiles is 5, not 10
# first: tiles 3-7 are nobody's
# first: 640 rows come back as garbage
# says: zeros
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    num_tiles = tiles_per_group(group_sizes, **tiling).sum()
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, num_tiles)


# %% ragged_dot/2f: the length of the list
# first: result.num_tiles is 11, not 8
# first: the length of the lists
# first: 3 steps more
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), ids, tiles, jnp.int32(ids.shape[0]))


# %% ragged_dot/2f: as many as there are tiles
# first: num_tiles is 8, not 10
# first: a tile with two groups is visited twice
# first: the last 2 would not be made
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
# first: have changed places
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    ids, tiles = group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling)
    return Metadata(group_offsets(group_sizes), tiles, ids, tile_visits(group_sizes, **tiling).sum())


# %% ragged_dot/2f: the notebook's block size is used, whatever was asked for
# first: result.group_ids has shape
# first: use num_rows=150 and bm=64
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
# first: Rows 100 to 127, in tile 1, are group 1's and hold x + bias[0]
# first: from the start of the tile
# says: last stored at step
# not: count twice
# not: added at every step
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
# first: Rows 100 to 127, in tile 1, are group 1's and hold 0
# first: the number of the visit, v, for the number of the tile
# not: added at every step
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
# first: Row 99, in tile 1, is group 0's and holds 0
# first: The last row of each group is left out
# not: added at every step
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
# first: Row 447, in tile 3, is nobody's
# first: One row too many
# not: counts twice
# not: added at every step
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
# says: half a mask
# says: Rows 64 to 99, in tile 1, are group 0's and hold x + bias[1]
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
# first: looks group_ids_ref up by pl.program_id(0)
# first: grid index 1
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
# first: 27 grid steps; the budget is 18
# first: axis 1 has 9 steps, the list's length; 6 are visits
# says: grid=(
# not: Also
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
# first: axis 0, j, may be spread over cores
# not: Give each output block
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
# first: product of the first block of K alone, columns 0 to 127 of x
# says: still grows afterwards
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == 0)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/6: no mask
# first: stored over
# says: there is no mask, and the whole tile is stored
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
# first: Half a mask
# first: not against where it ends
# says: zeros
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
# says: half a mask
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
# first: Rows 100 to 127, in tile 0, are group 1's
# first: sum of the products with w[0] and w[1]
# first: starts anew at its first block of K
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


# %% ragged_dot/7b: rows of neighbours leak into dw
# first: Group 0's dw should be the sum over rows 0 to 99
# first: 28 rows of neighbours leak into it
# not: sounds like
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = x_ref[...], g_ref[...]
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: only one operand is masked
# first: g_ref lie beyond the edge
# says: variant
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), g_ref[...]
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: masked by multiplication
# first: beyond the edge
# says: jnp.where
# says: variant
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = x_ref[...] * own.astype(x_ref.dtype), g_ref[...] * own.astype(g_ref.dtype)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7a: empty groups are not visited
# first: No visit is for groups 0 and 2
# first: no step writes dw[0]
# first: garbage
def every_group_metadata(group_sizes, *, num_rows, bm):
    meta = metadata(group_sizes, num_rows=num_rows, bm=bm)
    return meta._replace(num_tiles=tiles_per_group(group_sizes, num_rows=num_rows, bm=bm).sum())


# %% ragged_dot/7a: a tile that does not exist
# first: its tile, 8, does not exist
# first: begins at row 1024
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, tiles, visits.sum())


# %% ragged_dot/7b: started anew at every visit
# first: acc_ref
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = 0
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: never started anew
# first: acc_ref
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(v == 0, 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: started anew with the tile
# first: acc_ref
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, m_tile_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/8a: weights not renormalised
# first: result.weights is wrong
# first: shares among all 5 experts
# first: 5.2% of its result is lost
# says: def route
def route(logits, *, k):
    return jax.lax.top_k(jax.nn.softmax(logits, axis=1), k)


# %% ragged_dot/8a: softmax over the tokens
# first: result.weights is wrong
# first: the softmax runs down the tokens
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=0), experts


# %% ragged_dot/8b: an unstable order
# first: result.order is wrong
# first: both go to expert 0
# first: keep their order in a stable sort
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(-slots)[::-1], jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: tokens counted once, whatever k is
# first: result.group_sizes is wrong
# first: how often it is a token's best
# first: would meet the wrong weights
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(experts[:, 0], length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: no length for the counts
# first: known first
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: the order instead of its inverse
# first: result.result is wrong
# first: Token 0's rows stand at positions
# first: its inverse
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = order
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: weights of the sorted rows
# first: result.result is wrong
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    by_slot = rows.reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8a: experts in ascending order
# first: the right experts in another order
def route(logits, *, k):
    experts = jnp.argsort(logits, axis=1)[:, -k:]
    best = jnp.take_along_axis(logits, experts, axis=1)
    return jax.nn.softmax(best, axis=1), experts


# %% ragged_dot/8a: float weights for integer experts
# first: experts is float32
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best, axis=1), experts.astype(jnp.float32)


# %% ragged_dot/9: the gradient of a slot, by the order instead of its inverse
# first: expand_grad: token 0's 2 rows
# first: order says which slot stands at a position
# says: def expand_grad
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
# first: expand_grad
# first: the first of them alone
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
# first: moe_layer: result.y
# first: no silu between the two products
# says: def moe_layer
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
# first: moe_layer: result.y
# first: not sorted by expert
# says: def moe_layer
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
# first: moe_layer: result.y is the sum of the experts' results without their weights
# says: def moe_layer
# not: pallas_call: the work
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
# first: blocks of bk=128, bn=256 do not fit K=256, N=128
# first: if bn and bk changed places
# says: variant
# says: rows = ragged(h, w2, group_sizes, bm, bn, bk)
# not: reset
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
# first: tile and weights do not belong together
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


# %% ragged_dot/8b: rows scattered to their slots
# first: the inverse permutation fetches them
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    by_slot = jnp.zeros_like(rows).at[order].set(rows).reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/9: expand_grad never written
# first: expand_grad
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


# %% ragged_dot/2a: the beginnings only
# first: These are the beginnings
# first: offsets[g + 1] of every group
def group_offsets(group_sizes):
    return jnp.cumsum(group_sizes) - group_sizes


# %% ragged_dot/2a: a zero behind instead of in front
# first: its first 100 rows would be skipped
def group_offsets(group_sizes):
    return jnp.append(jnp.cumsum(group_sizes), 0)


# %% ragged_dot/2b: one more than from the size alone
# first: Group 1 has rows 100 to 199: tiles 0 and 1
# first: rows from 128 on would never be computed
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    return jnp.where(group_sizes > 0, group_sizes // bm + 1, 0)


# %% ragged_dot/2b: both rounded down
# first: Its end is rounded down
# first: rows 0 to 99 would never be computed
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return jnp.where(group_sizes > 0, offsets[1:] // bm - offsets[:-1] // bm, 0)


# %% ragged_dot/2b: the last tile minus the first
# first: both included, there are b - a + 1
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    return jnp.where(group_sizes > 0, (offsets[1:] - 1) // bm - offsets[:-1] // bm, 0)


# %% ragged_dot/2c: one place too many
# first: Group 0 begins at row 0
# first: a step too many
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G)


# %% ragged_dot/2c: numbers from 1
# first: Visit 0 is tile 0, for rows 0 to 99
# first: never meet w[0]
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    most = pl.cdiv(num_rows, bm) + G - 1
    return jnp.repeat(jnp.arange(1, G + 1, dtype=jnp.int32), repeats, total_repeat_length=most)


# %% ragged_dot/2c: tiles of 128, whatever bm is
# first: 150 rows in tiles of 64 are 3 tiles
# says: variant 1
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes)
    return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=num_rows // 128 + G - 1)


# %% ragged_dot/2c: sizes are repeated
# first: group 100, and there are groups 0 to 2
def group_ids(group_sizes, *, num_rows=1024, bm=128):
    G = group_sizes.shape[0]
    repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
    return jnp.repeat(group_sizes, repeats, total_repeat_length=pl.cdiv(num_rows, bm) + G - 1)


# %% ragged_dot/2d: ends instead of beginnings
# first: With 2, it is multiplied once more, 128 rows for nothing
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    ends = group_offsets(group_sizes)[1:]
    inside = (group_sizes > 0) & (ends % bm != 0)
    return jnp.ones(pl.cdiv(num_rows, bm), jnp.int32).at[ends // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: started from zeros
# first: the count starts from 1
# first: Tiles 2-7, where no group begins, get 0 visits
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    return jnp.zeros(pl.cdiv(num_rows, bm), jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2d: the last tile is left out
# first: 3 tiles, the last with 22 of them
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    inside = (group_sizes > 0) & (starts % bm != 0)
    return jnp.ones(num_rows // bm, jnp.int32).at[starts // bm].add(inside.astype(jnp.int32))


# %% ragged_dot/2f: the shape instead of the sum
# first: result.num_tiles has shape (8,)
# first: one number
def metadata(group_sizes, *, num_rows=1024, bm=128):
    tiling = {"num_rows": num_rows, "bm": bm}
    visits = tile_visits(group_sizes, **tiling)
    return Metadata(
        group_offsets(group_sizes), group_ids(group_sizes, **tiling), m_tile_ids(group_sizes, **tiling), visits
    )


# %% ragged_dot/7a: the metadata of the way forward
# first: No visit is for groups 0 and 2
def every_group_metadata(group_sizes, *, num_rows, bm):
    return metadata(group_sizes, num_rows=num_rows, bm=bm)


# %% ragged_dot/7a: empty groups are counted, and tiles repeated as before
# first: Visit 1 is number 0, counted from 0, of group 1
# first: missing from dw[1]
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    return Metadata(group_offsets(group_sizes), ids, m_tile_ids(group_sizes, num_rows=num_rows, bm=bm), visits.sum())


# %% ragged_dot/7a: the first visit is not taken away
# first: Visit 1 is number 0, counted from 0, of group 1, whose first tile is 0
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    tiles = (offsets[:-1] // bm)[ids] + jnp.arange(T + G - 1, dtype=jnp.int32)
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())


# %% ragged_dot/7a: the visits of the tiles are summed
# first: No visit is for group 2
def every_group_metadata(group_sizes, *, num_rows, bm):
    G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
    offsets = group_offsets(group_sizes)
    visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
    ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
    first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
    tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
    return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), tile_visits(group_sizes, num_rows=num_rows, bm=bm).sum())


# %% ragged_dot/8a: divided by k
# first: softmax of these, and of no others
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    return jnp.ones_like(best) / k, experts


# %% ragged_dot/8a: exp without the maximum
# first: its exp overflows
# says: variant
def route(logits, *, k):
    best, experts = jax.lax.top_k(logits, k)
    p = jnp.exp(best)
    return p / p.sum(axis=1, keepdims=True), experts


# %% ragged_dot/8a: the best logits as they are
# first: add up to 3.438, not to 1
def route(logits, *, k):
    return jax.lax.top_k(logits, k)


# %% ragged_dot/8b: sorted by token
# first: These are tokens, slot // k
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots) // experts.shape[1], jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: transposed before it is flattened
# first: all first choices before all second ones
def sort_by_expert(experts, *, num_experts):
    slots = experts.T.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    position = jnp.argsort(order)
    by_slot = rows[position].reshape(T, k, -1)
    return (weights[:, :, None] * by_slot).sum(axis=1)


# %% ragged_dot/8b: no weights
# first: added without their weights
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    return rows[jnp.argsort(order)].reshape(T, k, -1).sum(axis=1)


# %% ragged_dot/8b: still sorted
# first: still sorted by expert
# first: 24 rows of 512 bytes, 12,288 bytes
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    return (weights.reshape(-1)[order][:, None] * rows).reshape(T, k, -1).sum(axis=1)


# %% ragged_dot/3: the two choices have changed places
# first: stored over
# says: hold 0
# says: nobody has written
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), o_ref[...], 0)
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: zeroed with pl.when at step 0 only
# first: m_tile_ids_ref[...] differs from that of the step before
# says: are nobody's, and should be 0, and hold garbage
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
# first: offsets_ref at index 4, out of bounds
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[v] <= rows) & (rows < offsets_ref[v + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/3: either bound is enough
# first: stored over
# says: Rows 64 to 99, in tile 1, are group 0's
def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    group = group_ids_ref[v]
    rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
    return (offsets_ref[group] <= rows) | (rows < offsets_ref[group + 1])


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
    rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
    o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)


# %% ragged_dot/6: no test for the first visit
# first: o_ref that nobody has written
# first: m_tile_ids_ref[...] differs
# says: Rows 70 to 95, in tile 1, are nobody's
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), o_ref[...])


# %% ragged_dot/6: the sum starts anew at a tile's first visit only
# first: the product of the last block of K alone
# first: sum over all blocks of K
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(first_visit(v, m_tile_ids_ref), 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: the visit is on axis 0
# first: by pl.program_id(0), the index maps by grid index 1
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(0), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: rows of others masked out of x, and no masked store
# first: stored over
# says: variant 3
# says: 0 times infinity is NaN
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
# first: the product ignores dims
# says: variant 4
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/6: the last block is stored before it is added
# first: overwritten
# says: product of the last block of K alone
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
# first: 28 rows of neighbours leak into it
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x_ref[...], g_ref[...], over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = jnp.where(own.any(), acc_ref[...], 0).astype(dw_ref.dtype)


# %% ragged_dot/7b: summed over columns
# first: summed over differ in length
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x, g, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: the visit is on axis 1
# first: by pl.program_id(1), the index maps by grid index 2
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(1)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: rows are counted by the block of dw
# first: incompatible shapes meet, (128, 1) and (64, 128)
# first: only a dimension of 1 is widened
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, dw_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: stored at the last visit of all
# first: nothing is stored there
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    over_rows = (((0,), (0,)), ((), ()))
    acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)

    @pl.when(v == pl.num_programs(2) - 1)
    def _():
        dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/7b: the gradient of the other factor
# first: transposed inside the block
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    v = pl.program_id(2)
    own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
    x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
    before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
    acc_ref[...] = before + jax.lax.dot_general(g, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)


# %% ragged_dot/1: element offsets
# first: leave out the factor 128
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = product.astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], 0, j * 128)


# %% ragged_dot/1: no cast
# first: astype(o_ref.dtype)
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], 0, j)


# %% ragged_dot/1: a product of float32
# first: 32 bits an operand, where 16 are enough
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...].astype(jnp.float32), w_ref[...].astype(jnp.float32)).astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], 0, j)


# %% ragged_dot/1: two indices
# first: one block index per dimension
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = product.astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], j)


# %% ragged_dot/4: the prefetched Refs come before the grid indices
# first: the indices of the grid first
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda offsets, group_ids, m_tile_ids, j, v, k: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda offsets, group_ids, m_tile_ids, j, v, k: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda offsets, group_ids, m_tile_ids, j, v, k: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: the visit axis is marked parallel
# first: as long as a value says
# first: 'arbitrary'
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: the last columns are forgotten
# first: never visited
# first: pl.cdiv(320, 128) = 3
# says: variant 1
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(N // bn, meta.num_tiles, K // bk),
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


# %% ragged_dot/4: w is not squeezed
# first: None in the block shape squeezes it away
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((1, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: maps without the prefetched Refs
# first: one per prefetched operand
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k: (meta.m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k: (meta.group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k: (meta.m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: prefetched out of order
# first: The map looks up offsets_ref
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, group_ids, m_tile_ids, offsets: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, group_ids, m_tile_ids, offsets: (group_ids[v], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, group_ids, m_tile_ids, offsets: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/4: j and v have changed places in the map of w
# first: Rows 192 to 255, in tile 3, are group 2's and hold the product with w[0]
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[j], k, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/5: the condition looks at the first visit
# first: acc_ref as step 3 left it
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    v, k = pl.program_id(1), pl.program_id(2)
    before = jnp.where((v == 0) & (k == 0), 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: the sum is kept in the output
# first: every addition to it rounds
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, o_ref[...])
    o_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% ragged_dot/5: the last k by number of visits
# first: the condition around it holds at no step
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% ragged_dot/5: the last block is not added
# first: still grows afterwards, in the same step
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


# %% ragged_dot/9: silu behind the second product
# first: moe_layer: result.y
# first: silu came behind w2
# says: def moe_layer
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    rows = jax.nn.silu(ragged(h, w2, group_sizes, bm, bk, bn).astype(jnp.float32))
    return combine(rows, order, weights).astype(x.dtype)


# %% ragged_dot/9: the mean of what comes back
# first: expand_grad
# first: a gradient is the sum of what comes back
# says: def expand_grad
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).mean(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: no gradient for the router
# first: result.drouter is 0
# first: stop_gradient
# says: def moe_layer
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(jax.lax.stop_gradient(logits), k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: a token of the wrong slot
# first: moe_layer: result.y
# first: slot s belongs to token s // k
# says: def moe_layer
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = x[order % x.shape[0]]
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: the gradient by jax.grad
# first: JAX has made a scatter-add
# first: the inverse of order fetches them
# says: jax.grad
def expand_grad(g, order, *, k):
    x = jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32)
    return jax.grad(lambda x: jnp.sum(x[order // k] * g.astype(jnp.float32)))(x)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: the gradient by jax.jacrev
# first: JAX has made a scatter-add
# says: jax.jacrev
def expand_grad(g, order, *, k):
    x = jnp.zeros((g.shape[0] // k, g.shape[1]), jnp.float32)
    return jax.jacrev(lambda x: jnp.sum(x[order // k] * g.astype(jnp.float32)))(x)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: the gradient by a product with a table of zeros and ones
# first: products outside of the kernels do
# first: the budget is 184,320
# says: jnp.dot(mine
def expand_grad(g, order, *, k):
    tokens = jnp.arange(g.shape[0] // k)
    mine = (tokens[:, None] == order[None, :] // k).astype(jnp.float32)
    return jnp.dot(mine, g.astype(jnp.float32))


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: rows of tokens without expand
# first: JAX has made a scatter-add, into shape (48, 128), of the gradient of a gather, as of `x[order // k]`
# says: rows = x[order // k]
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = x[order // k]
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/9: rows of tokens by a product
# first: products outside of the kernels do
# says: mine
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    mine = (order[:, None] // k == jnp.arange(x.shape[0])[None, :]).astype(x.dtype)
    rows = mine @ x
    h = ragged(rows, w1, group_sizes, bm, bn, bk)
    h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/8b: rows summed by segment
# first: segment_sum scatters rows
# says: jax.ops.segment_sum
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    shares = weights.reshape(-1)[order]
    return jax.ops.segment_sum(rows * shares[:, None], order // k, num_segments=T)


# %% ragged_dot/8b: a product with a table of zeros and ones
# first: makes an array of shape (96, 192), 18,432 numbers
# first: fetch it by its index
def sort_by_expert(experts, *, num_experts):
    slots = experts.reshape(-1)
    return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)


def combine(rows, order, weights):
    T, k = weights.shape
    mine = (jnp.arange(T)[:, None] == order[None, :] // k) * weights.reshape(-1)[order]
    return jnp.dot(mine, rows)


# %% ragged_dot/2b: every group against every tile
# first: makes an array of shape (40, 32), 1,280 numbers
# says: touched
def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    offsets = group_offsets(group_sizes)
    tiles = jnp.arange(pl.cdiv(num_rows, bm)) * bm
    touched = (offsets[:-1, None] < tiles + bm) & (tiles < offsets[1:, None]) & (group_sizes > 0)[:, None]
    return touched.sum(axis=1, dtype=jnp.int32)


# %% ragged_dot/2d: every tile against every group
# first: makes an array of shape (32, 40), 1,280 numbers
# says: inside
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    starts = group_offsets(group_sizes)[:-1]
    tiles = jnp.arange(pl.cdiv(num_rows, bm))[:, None]
    inside = (tiles == starts // bm) & (starts % bm != 0) & (group_sizes > 0)
    return 1 + inside.sum(axis=1, dtype=jnp.int32)


# %% ragged_dot/9: the first product in jnp, with weights looked up
# first: scatter-add, into shape (5, 128, 256)
# says: def moe_layer
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    h = jnp.einsum("td,tdf->tf", rows, w1[experts.reshape(-1)[order]], preferred_element_type=jnp.float32)
    h = jax.nn.silu(h).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)


# %% ragged_dot/4: j and k have changed places in the map of w
# first: along dimension 1
# first: returns grid index 0, j, of 3 steps
# not: Is it the right one
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    (M, K), (_, _, N) = x.shape, w.shape
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
                pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], j, k)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)


# %% ragged_dot/1: column blocks in the place of rows
# first: along dimension 1
# first: returns grid index 0, j, of 3 steps
# not: Is it the right one
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = product.astype(o_ref.dtype)


def by_tile_w_map(j, i, experts_ref):
    return (experts_ref[i], j, 0)


# %% ragged_dot/8a: chosen by the softmax, and divided by the sum
# first: softmax
# first: underflows to 0
# first: tie
def route(logits, *, k):
    best, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=1), k)
    return best / best.sum(axis=1, keepdims=True), experts


# %% ragged_dot/6: dims are ignored, zeroed under pl.when
# first: the product ignores dims
# says: variant 4
# not: reset
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    v, k = pl.program_id(1), pl.program_id(2)

    @pl.when(k == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
        rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
        o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)


# %% ragged_dot/9: the first product in jnp, every expert for every row
# first: products outside of the kernels do
# first: a kernel multiplies them
# says: 3 pallas_call(s); this puzzle asks for 6
# says: by_expert = jnp.einsum(
# not: def expand_grad
def expand_grad(g, order, *, k):
    by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
    return by_slot.astype(jnp.float32).sum(axis=1)


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    logits = jnp.dot(x.astype(jnp.float32), router)
    weights, experts = route(logits, k=k)
    order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
    rows = expand(x, order, k)
    expert = experts.reshape(-1)[order]
    by_expert = jnp.einsum("td,edf->tef", rows, w1, preferred_element_type=jnp.float32)
    own = expert[:, None] == jnp.arange(w1.shape[0])
    h = jnp.where(own[:, :, None], by_expert, 0).sum(axis=1)
    h = jax.nn.silu(h).astype(x.dtype)
    rows = ragged(h, w2, group_sizes, bm, bk, bn)
    return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
