# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 5}
# ---

# %% [markdown]
# # Ragged dot: a mixture of experts
#
# A mixture of experts has many weight matrices, and sends each token to one or two of them. The tokens decide which. So
# each expert gets a different number of rows: 100, 100 and 824, say, or none at all. In fourteen puzzles you write the
# matrix product for that: for groups of any size, without padding, forward and backward. Around it you build a whole
# MoE layer, with gradients for everything in it.
#
# You need `basics.py`, and Puzzles 1 to 5 of `matmul.py` (the k loop, counting bytes, transposed operands). Puzzles 7b
# and 8c use `jax.custom_vjp`, which `softmax.py` Puzzle 6 teaches; it is given here.

# %%
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_puzzles import check, hint, normal, progress, setup, show, tpu_report, unwritten

setup()

# %% [markdown]
# ## Puzzle 1: The expert that a tile asks for
#
# **Goal.** Multiply each tile of tokens by the weights of its own expert. The data say which expert that is.
#
# ### Theory
#
# Suppose that all rows of tile i go to one expert, `experts[i]`. In jnp you would multiply by `w[experts]`, which is a
# new array. For eight tiles and weights of 4096 x 14336 in bfloat16, 0.9 GiB are read and 0.9 GiB written: 2.3 ms on a
# v5e.
#
# An index map copies no weights. It says which block to fetch, and it may look that up in a list.
# **`num_scalar_prefetch=1`** copies the first operand into SMEM before the first step. SMEM is a small memory for
# single numbers. Index maps get this operand as a Ref, after the grid indices. The kernel gets it as its first Ref.
#
# `pltpu.PrefetchScalarGridSpec` takes this number, and also grid, in_specs, out_specs and scratch_shapes. You give it
# to `pallas_call` as `grid_spec`, in place of these four.
#
# ```text
#     experts   [ 2  2  0  3  3  3 ]          in SMEM
#                 |  |  |  |  |  |
#     i           0  1  2  3  4  5
#     block of w  2  .  0  3  .  .            . : the same as at the step before
# ```
#
# At a dot no weights are fetched: the block number of w has not changed. So if tokens are sorted by expert, the weights
# of each expert come in once.


# %%
def by_tile_spec(
    experts: Int[Array, "T"], x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"]
) -> BFloat16[Array, "M N"]:
    tiles = x.reshape(experts.shape[0], -1, x.shape[1])
    result = jnp.einsum("tmk,tkn->tmn", tiles, w[experts], preferred_element_type=jnp.float32)
    return result.reshape(x.shape[0], -1).astype(jnp.bfloat16)


# %%
def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    # experts_ref: int32, in SMEM: experts_ref[3] is a number
    # x_ref: (bm, K), tile i      w_ref: (K, bn), of the expert of tile i      o_ref: (bm, bn), bfloat16
    pass  # YOUR CODE HERE


def by_tile_w_map(j, i, experts_ref):
    # Return the three block indices of w, in blocks of (None, K, bn), for tile i and column block j.
    pass  # YOUR CODE HERE


def by_tile_matmul(
    experts: Int[Array, "T"], x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"], *, bn: int = 128
) -> BFloat16[Array, "M N"]:
    (M, K), (_, _, N), num_tiles = x.shape, w.shape, experts.shape[0]
    bm = M // num_tiles
    return pl.pallas_call(
        by_tile_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N // bn, num_tiles),
            in_specs=[
                pl.BlockSpec((bm, K), lambda j, i, experts_ref: (i, 0)),
                pl.BlockSpec((None, K, bn), by_tile_w_map),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda j, i, experts_ref: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(experts, x, w)


# %%
# Budget for experts [2, 2, 0, 3, 3, 3], x (384, 256), w (5, 256, 384): hbm_bytes=1_474_560, vmem_bytes=229_376,
# calls=1, mxu_bits=16. hbm_bytes: of the five experts in w, three come in, each once, one column block at a time.
check("ragged_dot/1", by_tile_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The kernel does not need to know the expert. What is in `w_ref` is already the right matrix, and its first dimension
# is squeezed away. The map returns three numbers: along experts, along rows of w, along columns of w. Which of the
# three do you look up? (A prefetched Ref is read with an index, in an index map as in a kernel. The index may be
# traced.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
#     product = jnp.dot(____, ____, preferred_element_type=____)
#     o_ref[...] = ____
#
#
# def by_tile_w_map(j, i, experts_ref):
#     return (____, 0, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
#     product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
#     o_ref[...] = product.astype(o_ref.dtype)
#
#
# def by_tile_w_map(j, i, experts_ref):
#     return (experts_ref[i], 0, j)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The data decide what is copied. Nobody asked for experts 1 and 4, so their weights cost nothing: watch
# `w_ref` in the picture. But tokens do not arrive in whole tiles. They arrive as 100, 100 and 824. Puzzles 2a to 2c
# turn sizes like these into a list like `experts`.

# %%
show(
    by_tile_matmul,
    np.array([2, 2, 0, 3, 3, 3], np.int32),
    normal((384, 256), "bfloat16"),
    normal((5, 256, 384), "bfloat16"),
)

# %% [markdown]
# ## Puzzle 2a: One visit for each group in a tile
#
# **Goal.** Work out from the sizes of the groups where each group begins, and how many tiles it touches. Plain jnp this
# time; the kernel comes after the check.
#
# ### Theory
#
# Sort 1024 tokens by expert. The rows of one expert are a **group**. The kernel cuts rows into tiles of 128, and tiles
# do not care where groups begin:
#
# ```text
#     rows     0           100 128      200    256             384     896          1024
#     group    |-----0-----|-----1------|----------------- ... 2 ... ------------------|
#     tile     |-------0-------|-------1-------|-------2-------|- ... -|-------7-------|
#
#     visit          0       1     2       3           4          ...          9
#     tile           0       0     1       1           2          ...          7
#     group          0       1     1       2           2          ...          2
# ```
#
# Two groups have rows in tile 0, so the kernel **visits** it twice: once with the weights of expert 0, once with those
# of expert 1. Every visit multiplies the whole tile, even for 28 rows.
#
# Compute two int32 arrays, under `jit`:
#
# - **offsets**, [0, 100, 200, 1024]: group g has the rows `offsets[g]` to `offsets[g + 1] - 1`.
# - **tiles per group**, [1, 2, 7]: in how many tiles each group has rows.
#
# The size of a group does not tell you the second number: group 1 has only 100 rows, and is in two tiles. You need to
# know where a group begins and ends. Which groups are in no tile at all?


# %%
def visits_by_hand(group_sizes, num_rows, bm):
    """Every visit as (tile, group): one for each group in a tile. A tile in which no group has rows: (tile, None)."""
    owners = np.repeat(np.arange(len(group_sizes)), group_sizes).tolist()
    owners += [None] * (num_rows - len(owners))
    visits = []
    for tile in range(pl.cdiv(num_rows, bm)):
        inside = dict.fromkeys(owners[tile * bm : (tile + 1) * bm])  # in order, each once
        visits += [(tile, group) for group in inside if group is not None] or [(tile, None)]
    return visits


class Layout(NamedTuple):
    offsets: Int[Array, "G+1"]
    tiles_per_group: Int[Array, "G"]


def offsets_spec(group_sizes: Int[Array, "G"]) -> Int[Array, "G+1"]:
    return jnp.asarray([np.sum(group_sizes[:g]) for g in range(len(group_sizes) + 1)], jnp.int32)


def layout_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Layout:
    owners = [group for _, group in visits_by_hand(group_sizes, num_rows, bm)]
    tiles = jnp.asarray([owners.count(g) for g in range(len(group_sizes))], jnp.int32)
    return Layout(offsets_spec(group_sizes), tiles)


# %%
def group_offsets(group_sizes):
    # group_sizes: (G,), int32      Return (G + 1,), int32.
    pass  # YOUR CODE HERE


def tiles_per_group(group_sizes, *, bm=128):
    # Return (G,), int32. Use group_offsets. pl.cdiv(a, b) is a / b, rounded up.
    pass  # YOUR CODE HERE


def layout(group_sizes, *, num_rows=1024, bm=128):
    return Layout(group_offsets(group_sizes), tiles_per_group(group_sizes, bm=bm))


# %%
# No kernel: your functions run under jit, and value, shape and dtype count. One variant has 40 groups and two limits.
# One is on the number of operations: under jit, a Python loop is written out, 40 times. The other is on the elements of
# the largest array: a table of tiles against groups has too many.
check("ragged_dot/2a", layout)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A group ends where the sizes up to it end. NumPy has a function for sums that grow from left to right, and so has jnp.
# What do you put in front of the ends? Mind its dtype: `jnp.zeros(1)` is float32, and makes everything float32. For the
# tiles, look at group 2: it begins at row 200, in tile 1. It ends at row 1024, where tile 8 would begin. Which two
# numbers differ by 7? Then try an empty group at row 100.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def group_offsets(group_sizes):
#     ends = ____
#     return jnp.concatenate([____, ends])
#
#
# def tiles_per_group(group_sizes, *, bm=128):
#     offsets = group_offsets(group_sizes)
#     starts, ends = offsets[____], offsets[____]
#     return jnp.where(____, pl.cdiv(____, bm) - ____, 0)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def group_offsets(group_sizes):
#     ends = jnp.cumsum(group_sizes)
#     return jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
#
#
# def tiles_per_group(group_sizes, *, bm=128):
#     offsets = group_offsets(group_sizes)
#     starts, ends = offsets[:-1], offsets[1:]
#     return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** ceil(size / bm) says [1, 1, 7]. The truth is [1, 2, 7]. The two agree whenever every group begins at a
# tile, and that is what everybody tests with.
#
# Here is the kernel that needs all this: your Puzzle 1, with one product for each visit. Its two lists are written by
# hand. You will compute them in the next two puzzles.


# %%
def by_visit_kernel(tiles_ref, groups_ref, x_ref, w_ref, o_ref):
    by_tile_kernel(groups_ref, x_ref, w_ref, o_ref)  # yours, from Puzzle 1


def by_visit(tiles, groups, x, w, *, bm=128):
    """At visit v, tile tiles[v] of x times w[groups[v]]. The result has a tile for each visit."""
    (num_visits,), (_, K, N) = groups.shape, w.shape
    return pl.pallas_call(
        by_visit_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_visits,),
            in_specs=[
                pl.BlockSpec((bm, K), lambda v, tiles_ref, groups_ref: (tiles_ref[v], 0)),
                pl.BlockSpec((None, K, N), lambda v, tiles_ref, groups_ref: (groups_ref[v], 0, 0)),
            ],
            out_specs=pl.BlockSpec((bm, N), lambda v, tiles_ref, groups_ref: (v, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_visits * bm, N), x.dtype),
    )(tiles, groups, x, w)


TILES_BY_HAND = np.array([0, 0, 1, 1, 2, 3, 4, 5, 6, 7], np.int32)
GROUPS_BY_HAND = np.array([0, 1, 1, 2, 2, 2, 2, 2, 2, 2], np.int32)
show(by_visit, TILES_BY_HAND, GROUPS_BY_HAND, normal((1024, 128), "bfloat16"), normal((3, 128, 128), "bfloat16"))

# %% [markdown]
# ## Puzzle 2b: The group of every visit
#
# **Goal.** List the group of each visit, in the order in which the kernel makes the visits.
#
# ### Theory
#
# With [1, 2, 7] tiles there are ten visits. Each group is listed once for each of its tiles:
#
# ```text
#     visit       0  1  2  3  4  5  6  7  8  9
#     group_ids   0  1  1  2  2  2  2  2  2  2
# ```
#
# NumPy has `np.repeat` for this. Under `jit` there is a catch. JAX must know the length of an array before it knows any
# values, and the number of visits depends on values. So `jnp.repeat` takes **`total_repeat_length=`**. If the list is
# longer, the rest is cut off. If it is shorter, it goes on with the last number of the array that you repeat.
#
# Which length is enough, whatever the sizes are? Each tile is visited at least once. A group that begins in the
# *middle* of a tile adds one visit. The first group begins at row 0. At worst, all the others begin in the middle of a
# tile. So 128 tiles and 64 experts may take 191 visits. A list of 128 places loses 63 of them, without an error.


# %%
def group_ids_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Int[Array, "V"]:
    G, visits = len(group_sizes), visits_by_hand(group_sizes, num_rows, bm)
    ids = [group for _, group in visits if group is not None]
    return jnp.asarray(ids + [G - 1] * (pl.cdiv(num_rows, bm) + G - 1 - len(ids)), jnp.int32)


def group_ids(group_sizes, *, num_rows=1024, bm=128):
    # Return (V,), int32. V: the most visits that G groups in num_rows rows can need, whatever
    # their sizes.
    pass  # YOUR CODE HERE


# %%
# One variant has the two limits of Puzzle 2a. A table of visits against groups has too many elements.
check("ragged_dot/2b", group_ids)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You repeat the numbers 0 to G - 1. Puzzle 2a says how often. For the length, add up the worst case of the theory: all
# tiles (the last one may not be whole), and one more visit for which groups? With [100, 100, 824] the worst case
# happens, so check that you get ten. (`jnp.arange` has a dtype argument.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def group_ids(group_sizes, *, num_rows=1024, bm=128):
#     G = group_sizes.shape[0]
#     repeats = ____
#     most = ____
#     return jnp.repeat(____, repeats, total_repeat_length=most)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def group_ids(group_sizes, *, num_rows=1024, bm=128):
#     G = group_sizes.shape[0]
#     repeats = tiles_per_group(group_sizes, bm=bm)
#     most = pl.cdiv(num_rows, bm) + G - 1
#     return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** There are at most tiles + G - 1 visits. So groups of any size cost at most one more visit for each group
# after the first. Padding every group to whole tiles has the same bound, but it also copies all rows there and back.
# Below, the kernel fetches weights by your list. Its tiles are still listed by hand.


# %%
def with_your_groups(group_sizes, x, w):
    return by_visit(TILES_BY_HAND, group_ids(group_sizes), x, w)


show(
    with_your_groups,
    np.array([100, 100, 824], np.int32),
    normal((1024, 128), "bfloat16"),
    normal((3, 128, 128), "bfloat16"),
)

# %% [markdown]
# ## Puzzle 2c: The tile of every visit
#
# **Goal.** List the tile of each visit, and pack all that a kernel needs into one `Metadata`.
#
# ### Theory
#
# Now count the same visits by tile:
#
# ```text
#     tile         0     1     2  3  4  5  6  7
#     visits       2     2     1  1  1  1  1  1
#
#     m_tile_ids   0  0  1  1  2  3  4  5  6  7
#     group_ids    0  1  1  2  2  2  2  2  2  2
# ```
#
# If tile 1 is listed once, rows 128 to 199 or rows 200 to 255 are lost.
#
# Each tile has one visit, and one more for every group that begins **inside** it, after its first row. So every group
# that begins inside a tile adds 1 to it. **`x.at[i].add(v)`** returns a copy of x in which v[g] is added at index i[g],
# for every g. If an index occurs twice, both values are added. Indices beyond the end are ignored. The rest is
# `jnp.repeat` again.
#
# Rows after the last group are **unowned**. Their result is 0, and only a visit can write the zeros. So a tile with
# nothing but unowned rows needs one visit, too. `group_ids` needs no change: `jnp.repeat` has already put G - 1 at
# these visits.
#
# The lists have room for the worst case. `num_tiles` says how many visits are real: an int32 of shape (). Is it the sum
# of `tiles_per_group` or of `tile_visits`? Try [200, 28, 100] of 1024 rows.


# %%
class Metadata(NamedTuple):
    offsets: Int[Array, "G+1"]
    group_ids: Int[Array, "V"]
    m_tile_ids: Int[Array, "V"]
    num_tiles: Int[Array, ""]  # visits, also those to tiles of unowned rows


class Counted(NamedTuple):
    tile_visits: Int[Array, "T"]
    metadata: Metadata


def counted_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Counted:
    visits = visits_by_hand(group_sizes, num_rows, bm)
    offsets, group_ids = offsets_spec(group_sizes), group_ids_spec(group_sizes, num_rows=num_rows, bm=bm)
    tiles = [tile for tile, _ in visits]
    counts = jnp.asarray([tiles.count(tile) for tile in range(pl.cdiv(num_rows, bm))], jnp.int32)
    tiles += tiles[-1:] * (len(group_ids) - len(tiles))  # after the last visit, the last tile again
    num_tiles = jnp.asarray(len(visits), jnp.int32)
    return Counted(counts, Metadata(offsets, group_ids, jnp.asarray(tiles, jnp.int32), num_tiles))


# %%
def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    # Return (T,), int32: how often each tile is visited. T tiles of bm rows; the last one may not be whole.
    pass  # YOUR CODE HERE


def metadata(group_sizes, *, num_rows=1024, bm=128):
    # Return a Metadata. m_tile_ids is as long as group_ids; after the last visit it repeats the last tile.
    pass  # YOUR CODE HERE


def counted(group_sizes, *, num_rows=1024, bm=128):
    visits = tile_visits(group_sizes, num_rows=num_rows, bm=bm)
    return Counted(visits, metadata(group_sizes, num_rows=num_rows, bm=bm))


# %%
# One variant has the two limits of Puzzle 2a. A table of tiles against groups has too many elements.
check("ragged_dot/2c", counted)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Do [300, 0, 0, 724] by hand: eight tiles of 128, four groups. How often is each tile visited before any group says
# where it begins? Which groups say so, and in which tile? Two kinds of groups add nothing. (`&` joins two conditions on
# arrays, each in brackets. A condition is a bool: make it a number before you add it.) For `num_tiles`, count the
# visits of [200, 28, 100] once by group and once by tile. One sum is 5. Who writes the zeros of tile 7 then?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tile_visits(group_sizes, *, num_rows=1024, bm=128):
#     starts = ____
#     inside = (____) & (____)
#     once = ____
#     return once.at[____].add(inside.astype(jnp.int32))
#
#
# def metadata(group_sizes, *, num_rows=1024, bm=128):
#     tiling = {"num_rows": num_rows, "bm": bm}     # f(group_sizes, **tiling) passes both on
#     ids, visits = ____, ____
#     tiles = jnp.repeat(____, ____, total_repeat_length=____)
#     return Metadata(offsets=____, group_ids=ids, m_tile_ids=tiles, num_tiles=____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tile_visits(group_sizes, *, num_rows=1024, bm=128):
#     starts = group_offsets(group_sizes)[:-1]
#     inside = (group_sizes > 0) & (starts % bm != 0)
#     once = jnp.ones(pl.cdiv(num_rows, bm), jnp.int32)
#     return once.at[starts // bm].add(inside.astype(jnp.int32))
#
#
# def metadata(group_sizes, *, num_rows=1024, bm=128):
#     tiling = {"num_rows": num_rows, "bm": bm}
#     ids, visits = group_ids(group_sizes, **tiling), tile_visits(group_sizes, **tiling)
#     tiles = jnp.repeat(jnp.arange(visits.shape[0], dtype=jnp.int32), visits, total_repeat_length=ids.shape[0])
#     return Metadata(offsets=group_offsets(group_sizes), group_ids=ids, m_tile_ids=tiles, num_tiles=visits.sum())
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** For 1024 rows and 64 groups these lists are less than a kilobyte of integers. You compute them once for
# all products that share their groups, and no kernel will ever loop over groups. Below, both lists are yours, and the
# last visits go to tiles of unowned rows. In the result, each visit still has a tile of its own. The next puzzle puts
# two visits into one tile.


# %%
def with_your_visits(group_sizes, x, w):
    _, groups, tiles, _ = metadata(group_sizes)
    return by_visit(tiles, groups, x, w)


show(
    with_your_visits,
    np.array([200, 28, 100], np.int32),
    normal((1024, 128), "bfloat16"),
    normal((3, 128, 128), "bfloat16"),
)

# %% [markdown]
# ## Puzzle 3: The masked store
#
# **Goal.** Add to each row the bias of its expert, in tiles that several groups share.
#
# ### Theory
#
# Take groups of 100, 28 and 128 rows, in tiles of 64. Tile 1 has 36 rows of group 0 and 28 of group 1, so it is visited
# twice. If every visit stores `x + bias[g]` for its whole tile, the last one wins, and 36 rows get the bias of group 1:
#
# ```text
#     rows        64                   100           128
#     group       |---------0----------|------1------|--2---
#
#     visit 1     [ 0 0 0 0 0 0 0 0 0 0 . . . . . . . ]          tile 1, group 0
#     visit 2     [ k k k k k k k k k k 1 1 1 1 1 1 1 ]          tile 1, group 1:  k must be kept
#     visit 3                                         [ 2 2 2    tile 2, group 2
# ```
#
# At visit 2 the tile is still in VMEM, with what visit 1 stored there. So **mask** the store: read the tile, replace
# the rows of the visit's own group, and store it again. The offsets say which rows these are.
#
# Unowned rows should be 0. At the first visit to a tile, `o_ref` holds garbage, so write 0 to all rows that are not
# your own. At a later visit, keep them: they belong to another group, or they are 0 already. A tile of unowned rows is
# visited for group G - 1, with an empty mask.


# %%
def expert_bias_spec(
    x: Float32[Array, "M N"], bias: Float32[Array, "G 1 N"], group_sizes: Int[Array, "G"]
) -> Float32[Array, "M N"]:
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    result = np.zeros(x.shape, np.float32)
    result[: len(group)] = np.asarray(x)[: len(group)] + np.asarray(bias)[group, 0]
    return jnp.asarray(result)


# %%
def first_visit(v, ids_ref):
    """Whether ids_ref[v] differs from ids_ref[v - 1]. With m_tile_ids_ref: whether v is the first visit to its tile."""
    return (v == 0) | (ids_ref[v] != ids_ref[jnp.maximum(v - 1, 0)])


def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    # Return (bm, 1), bool: which rows of the tile of visit v belong to its group. The Refs hold the lists of Puzzle 2c.
    pass  # YOUR CODE HERE


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    # Grid (j, v): column block j, visit v.
    # x_ref, o_ref: (bm, bn), of the tile of v      bias_ref: (1, bn), of its group
    pass  # YOUR CODE HERE


# %%
def expert_bias(
    x: Float32[Array, "M N"],
    bias: Float32[Array, "G 1 N"],
    group_sizes: Int[Array, "G"],
    *,
    bm: int = 64,
    bn: int = 128,
) -> Float32[Array, "M N"]:
    M, N = x.shape
    offsets, group_ids, m_tile_ids, _ = metadata(group_sizes, num_rows=M, bm=bm)
    tile = pl.BlockSpec((bm, bn), lambda j, v, offsets_ref, group_ids_ref, m_tile_ids_ref: (m_tile_ids_ref[v], j))
    return pl.pallas_call(
        expert_bias_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(N, bn), group_ids.shape[0]),  # as long as the list: more than there are visits
            in_specs=[
                tile,
                pl.BlockSpec((None, 1, bn), lambda j, v, offsets_ref, group_ids_ref, _: (group_ids_ref[v], 0, j)),
            ],
            out_specs=tile,
        ),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )(offsets, group_ids, m_tile_ids, x, bias)


# %%
# Budget for x (256, 384), bias (3, 1, 384), group_sizes [100, 28, 128]: hbm_bytes=791_040, vmem_bytes=132_096, calls=1.
# Work on integers outside of the kernel makes the metadata, and is allowed.
check("ragged_dot/3", expert_bias)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take visit 2 of the drawing. A row of the tile has a number in the tile, 0 to 63, and a number in the array. Which of
# them do the offsets speak of, and how do you get it from the other? (`[:, None]` turns a row of numbers into a column.
# Compared with a number, a column stays a column.) In the kernel, each row of `o_ref` gets the new value, the old
# value, or 0. What decides: the row, or the visit?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
#     group = ____
#     rows = ____ + jnp.arange(bm)[:, None]
#     return (____) & (____)
#
#
# def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
#     v = pl.program_id(____)
#     own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
#     rest = jnp.where(____, ____, ____)
#     o_ref[...] = jnp.where(own, ____, rest)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
#     group = group_ids_ref[v]
#     rows = m_tile_ids_ref[v] * bm + jnp.arange(bm)[:, None]
#     return (offsets_ref[group] <= rows) & (rows < offsets_ref[group + 1])
#
#
# def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
#     v = pl.program_id(1)
#     own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
#     rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
#     o_ref[...] = jnp.where(own, x_ref[...] + bias_ref[...], rest)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A tile with two owners is written twice in VMEM and goes to HBM once: in the picture, `o_ref` stays put
# while `bias_ref` changes. The grid is as long as the list, so some steps come after the last visit. They do no harm.
# They visit the last tile for the last group again, and its rows get the same values again.

# %%
show(expert_bias, normal((256, 384)), normal((3, 1, 384)), np.array([100, 28, 128], np.int32))

# %% [markdown]
# ## Puzzle 4: Wire it yourself
#
# **Goal.** Write the `pallas_call` of a grouped matrix product, with a grid that is as long as there are visits.
#
# ### Theory
#
# Puzzle 3 always takes `tiles + G - 1` steps. For 64 experts and 1024 rows in tiles of 128 that is 71. If all tokens
# choose one expert, 8 visits are enough.
#
# A grid entry may also be a traced number: an int32 array of shape (), such as num_tiles. Then **the data decide how
# long the grid is**. (Mark such an axis "arbitrary": JAX's simulator cannot run it in parallel.)
#
# ```text
#     grid=(4, num_tiles, 2)        num_tiles: known when the call starts
# ```
#
# Your grid has three axes: column blocks j of the result, visits v, and blocks k of K. The sum runs along k, so k comes
# last. Which comes first, j or v? Follow the weights of an expert with three tiles, two column blocks and one block of
# K:
#
# ```text
#     grid (v, j, k)      w(0)  w(1)    w(0)  w(1)    w(0)  w(1)
#     grid (j, v, k)      w(0)  w(0)  w(0)      w(1)  w(1)  w(1)
# ```
#
# The given kernel needs groups of whole tiles, and K in one block. If all groups are whole tiles, visit v goes to tile
# v. From Puzzle 6 on it does not: groups of 40 and 56 rows make four visits to three tiles of 32. So look up every tile
# and every group. `by_visit`, below Puzzle 2a, is a good start.


# %%
def grouped_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"], group_sizes: Int[Array, "G"], *, turned: bool = False
) -> BFloat16[Array, "M N"]:
    result = np.zeros((x.shape[0], w.shape[2]), np.float32)
    end = 0
    for g, size in enumerate(np.asarray(group_sizes)):
        start, end = end, end + int(size)
        weights = np.asarray(w[g], np.float32)
        result[start:end] = np.asarray(x[start:end], np.float32) @ (weights.T if turned else weights)
    return jnp.asarray(result).astype(jnp.bfloat16)


def whole_k_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %%
def grouped(kernel, meta, x, w, *, bm, bn, bk):
    # meta: a Metadata, of Puzzle 2c      x: (M, K)      w: (G, K, N)      K is a multiple of bk. M and N may be ragged.
    # Return the result, (M, N), of x's dtype, of one pallas_call with three prefetched operands: meta's three lists in
    # their order. x_ref: (bm, bk)      w_ref: (bk, bn)      o_ref: (bm, bn)      acc_ref: (bm, bn), float32, scratch
    # scratch_shapes goes into the grid_spec. Say which axis is parallel.
    pass  # YOUR CODE HERE


# %%
def whole_k_product(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "G K N"],
    group_sizes: Int[Array, "G"],
    *,
    bm: int = 64,
    bn: int = 128,
    backwards: bool = False,
) -> BFloat16[Array, "M N"]:
    meta = metadata(group_sizes, num_rows=x.shape[0], bm=bm)
    if backwards:  # the last visit first
        order = jnp.maximum(meta.num_tiles - 1 - jnp.arange(meta.group_ids.shape[0], dtype=jnp.int32), 0)
        meta = meta._replace(group_ids=meta.group_ids[order], m_tile_ids=meta.m_tile_ids[order])
    return grouped(whole_k_kernel, meta, x, w, bm=bm, bn=bn, bk=x.shape[1])


# %%
# Budget for x (384, 256), w (4, 256, 384), group_sizes [192, 0, 128, 64]: hbm_bytes=1_474_560, vmem_bytes=262_144,
# grid_steps=18, calls=1, serial_steps=6. grid_steps: three column blocks of six visits. hbm_bytes: the weights of each
# expert with rows come in once.
check("ragged_dot/4", whole_k_product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which axes are parallel? For each axis: can two of its indices store into the same block of the result, or add to the
# same sum? For the index maps, ask of each array: which of its blocks changes with j, which with k, and which with the
# visit? A visit has two numbers, a tile and a group. A map gets three Refs after the grid indices: the offsets, the
# groups, the tiles.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def grouped(kernel, meta, x, w, *, bm, bn, bk):
#     (M, K), (_, _, N) = x.shape, w.shape
#     return pl.pallas_call(
#         kernel,
#         grid_spec=pltpu.PrefetchScalarGridSpec(
#             num_scalar_prefetch=____,
#             grid=(____, ____, ____),
#             in_specs=[
#                 pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (____, ____)),
#                 pl.BlockSpec(____, lambda j, v, k, offsets, group_ids, m_tile_ids: (____, ____, ____)),
#             ],
#             out_specs=____,
#             scratch_shapes=____,
#         ),
#         out_shape=____,
#         compiler_params=pltpu.CompilerParams(dimension_semantics=(____, ____, ____)),
#     )(____, ____, ____, x, w)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def grouped(kernel, meta, x, w, *, bm, bn, bk):
#     (M, K), (_, _, N) = x.shape, w.shape
#     return pl.pallas_call(
#         kernel,
#         grid_spec=pltpu.PrefetchScalarGridSpec(
#             num_scalar_prefetch=3,
#             grid=(pl.cdiv(N, bn), meta.num_tiles, K // bk),
#             in_specs=[
#                 pl.BlockSpec((bm, bk), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], k)),
#                 pl.BlockSpec((None, bk, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (group_ids[v], k, j)),
#             ],
#             out_specs=pl.BlockSpec((bm, bn), lambda j, v, k, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
#             scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
#         ),
#         out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
#         compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
#     )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, w)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A column block of an expert's weights comes in once, and stays for all tiles of this expert. The expert
# without rows is not visited. Watch `w_ref`.

# %%
show(
    whole_k_product,
    normal((384, 256), "bfloat16"),
    normal((4, 256, 384), "bfloat16"),
    np.array([192, 0, 128, 64], np.int32),
)

# %% [markdown]
# ## Puzzle 5: What it costs to cut K
#
# **Goal.** Predict how many bytes the product moves when all groups are equal, and choose the blocks that move the
# fewest.
#
# ### Theory
#
# Real weights do not fit into VMEM. One expert of 14336 x 4096 in bfloat16 has 112 MiB. A block of all of K and 512
# columns is 14 MiB. With two buffers it takes 28 MiB of VMEM, and you have 16. So you cut K, and keep the sum in
# `acc_ref`. The kernel is given (basics.py Puzzle 10). But the cut has a price:
#
# ```text
#     visit                0            1            2           one expert, three tiles, one j
#     K in one block       w            .            .           w comes in once
#     K in two blocks      w0  w1       w0  w1       w0  w1      w comes in three times
# ```
#
# With K in one block, an expert's weights stay from tile to tile. With several blocks, **each visit ends with block w1
# and the next one begins with w0, so w0 is fetched again**. So every visit fetches all the weights of its expert again.
#
# There are two ways out, and they compete for VMEM. Keep K whole, and make the blocks narrow. Or cut K, and make tiles
# tall. Which is cheaper depends on how many rows an expert has.


# %%
def equal_spec(x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"]) -> BFloat16[Array, "M N"]:
    groups = x.reshape(w.shape[0], -1, x.shape[1])
    result = jnp.einsum("grk,gkn->grn", groups, w, preferred_element_type=jnp.float32)
    return result.reshape(x.shape[0], -1).astype(jnp.bfloat16)


def sum_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def block_sizes(size, unit=128):
    """Multiples of unit that divide size."""
    return [b for b in range(unit, size + 1, unit) if size % b == 0]


def grouped_vmem(bm, bn, bk):
    """Bytes of VMEM that grouped holds: two buffers for each block in bfloat16, and the scratch in float32."""
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


# %%
def grouped_bytes(experts, rows, K, N, bm, bn, bk):
    # Return how many bytes `grouped` moves for x (experts * rows, K) and w (experts, K, N), if every expert has `rows`
    # rows: x, w and the result, in bfloat16. bm divides rows, bn divides N, bk divides K. There are several experts.
    # grouped_bytes(3, 128, 512, 256, 64, 128, 128) is 2_555_904, and with bk = 512 it is 1_769_472.
    pass  # YOUR CODE HERE


def thrifty_blocks(experts, rows, K, N, vmem_bytes):
    # Return (bm, bn, bk): bm from block_sizes(rows, 64), bn and bk from block_sizes. Of all plans that fit into
    # vmem_bytes, take the one with the fewest grouped_bytes.
    pass  # YOUR CODE HERE


def equal_groups(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"], *, vmem_bytes: int = 800_000
) -> BFloat16[Array, "M N"]:
    (G, K, N), rows = w.shape, x.shape[0] // w.shape[0]
    bm, bn, bk = thrifty_blocks(G, rows, K, N, vmem_bytes)
    meta = metadata(jnp.full(G, rows, jnp.int32), num_rows=x.shape[0], bm=bm)
    return grouped(sum_kernel, meta, x, w, bm=bm, bn=bn, bk=bk)  # your wiring, from Puzzle 4


# %%
# Budget for x (768, 512), w (3, 512, 384): hbm_bytes=3_735_552, vmem_bytes=800_000, calls=1, mxu_bits=16. That is the
# best plan. The check compares grouped_bytes with what your Puzzle 4 moves, and thrifty_blocks with every other plan,
# for random sizes.
check("ragged_dot/5", equal_groups)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Your grid is (j, v, k). Take x, w and the result one by one. Each tile of x is needed for every column block j. Does
# it ever stay? Each tile of the result goes out once. For w, list its blocks at a few visits, with K in one block and
# with K in two. Mind one case where a cut costs nothing: how many visits has an expert whose rows are one tile? There
# are few plans, so try them all.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def grouped_bytes(experts, rows, K, N, bm, bn, bk):
#     x_times = ____                        # how often all of x comes in
#     w_times = 1 if ____ else ____         # how often all of w comes in
#     return 2 * experts * (rows * K * x_times + K * N * w_times + ____)
#
#
# def thrifty_blocks(experts, rows, K, N, vmem_bytes):
#     plans = [(bm, bn, bk) for bm in block_sizes(rows, 64) for bn in ____ for bk in ____]
#     fitting = [plan for plan in plans if ____]
#     return min(fitting, key=lambda plan: ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def grouped_bytes(experts, rows, K, N, bm, bn, bk):
#     x_times = N // bn
#     w_times = 1 if bk == K else rows // bm
#     return 2 * experts * (rows * K * x_times + K * N * w_times + rows * N)
#
#
# def thrifty_blocks(experts, rows, K, N, vmem_bytes):
#     plans = [(bm, bn, bk) for bm in block_sizes(rows, 64) for bn in block_sizes(N) for bk in block_sizes(K)]
#     fitting = [plan for plan in plans if grouped_vmem(*plan) <= vmem_bytes]
#     return min(fitting, key=lambda plan: grouped_bytes(experts, rows, K, N, *plan))
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With K in one block, the weights come in once for every expert. With a cut, they come in once for every
# visit. In the example, the best plan cuts K all the same: blocks of (128, 384, 128) move 3.6 MiB, and the best plan
# with K whole moves 3.9. Now take two experts of 512 rows, K = 512, N = 256 and 700,000 bytes of VMEM. There K stays
# whole: 3.0 MiB, and 3.5 with a cut. So count first. In the picture, `w_ref` is fetched at every step.

# %%
show(equal_groups, normal((768, 512), "bfloat16"), normal((3, 512, 384), "bfloat16"))

# %% [markdown]
# ## Puzzle 6: Ragged dot
#
# **Goal.** Multiply groups of any size: many in one tile, empty ones, and unowned rows.
#
# ### Theory
#
# Take groups of 100, 100 and 824 rows, in tiles of 128. To pad them, you copy 1024 rows into 1152, and back. Your ten
# visits multiply 1280 rows, but no row is moved. Each visit multiplies a whole tile by the weights of one group, and
# keeps that group's rows. A tile may also have five groups:
#
# ```text
#     tile 2, rows 256 to 383                visit         product           stored
#     |-0-|--1---|--2---|---3---|---4---|    2             tile @ w[0]       |-0-|
#                                            3             tile @ w[1]           |--1---|
#                                            4             tile @ w[2]                  |--2---|
#                                            5             tile @ w[3]                         |---3---|
#                                            6             tile @ w[4]                                 |---4---|
# ```
#
# After the last block of K, a visit stores its sum with a **masked store**. (It may also store a draft at every k,
# without a branch, as in matmul.py Puzzle 3.) `acc_ref` and `o_ref` have the same shape and different lifetimes.
# `acc_ref` starts anew at each visit, and `o_ref` at each tile.
#
# Below the edge of x there is garbage. And if the weights of one expert are infinite, its visits have infinite products
# in all rows of a tile. Neither reaches the result if `jnp.where` picks the group's rows after the product.


# %%
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    # Grid (j, v, k).      x_ref: (bm, bk)      w_ref: (bk, bn)      o_ref: (bm, bn), bfloat16
    # acc_ref: (bm, bn), float32
    # dims: dimension d of x_ref is summed against e of w_ref, ((d,), (e,)), the pair of matmul.py Puzzle 5
    # Use own_rows and first_visit of Puzzle 3.
    pass  # YOUR CODE HERE


# %%
def ragged_forward(x, w, group_sizes, *, bm, bn, bk, dims=((1,), (0,))):
    meta = metadata(group_sizes, num_rows=x.shape[0], bm=bm)
    return grouped(functools.partial(ragged_kernel, dims=dims), meta, x, w, bm=bm, bn=bn, bk=bk)


def ragged_product(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "G K N"],
    group_sizes: Int[Array, "G"],
    *,
    bm: int = 128,
    bn: int = 128,
    bk: int = 128,
    turned: bool = False,  # x @ w[g].T, where w[g] is one square block
) -> BFloat16[Array, "M N"]:
    dims = ((1,), (1,)) if turned else ((1,), (0,))
    return ragged_forward(x, w, group_sizes, bm=bm, bn=bn, bk=bk, dims=dims)


# %%
# Budget for x (1024, 256), w (3, 256, 384), group_sizes [100, 100, 824]: hbm_bytes=4_718_592, vmem_bytes=262_144,
# grid_steps=60, calls=1, mxu_bits=16. grid_steps: three column blocks, ten visits, two blocks of K.
check("ragged_dot/6", ragged_product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two things are remembered between steps: a sum, and the rows that earlier visits stored. When does each of them start
# anew: with a new k, a new visit, or a new tile? `sum_kernel` of Puzzle 5 has the first, your Puzzle 3 the second. A
# fact about infinite weights: 0 times infinity is NaN. So a mask that multiplies does not remove a row, and a choice
# does.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
#     v, k = ____, ____
#     before = ____
#     product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
#     acc_ref[...] = before + product
#
#     @pl.when(____)
#     def _():
#         own = ____
#         rest = ____
#         o_ref[...] = jnp.where(own, ____, rest)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
#     v, k = pl.program_id(1), pl.program_id(2)
#     before = jnp.where(k == 0, 0, acc_ref[...])
#     product = jax.lax.dot_general(x_ref[...], w_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
#     acc_ref[...] = before + product
#
#     @pl.when(k == pl.num_programs(2) - 1)
#     def _():
#         own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, o_ref.shape[0])
#         rest = jnp.where(first_visit(v, m_tile_ids_ref), 0, o_ref[...])
#         o_ref[...] = jnp.where(own, acc_ref[...].astype(o_ref.dtype), rest)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You have written `jax.lax.ragged_dot`. Groups of any size cost you one thing: a tile that two groups
# share is visited twice. In the picture, `w_ref` changes where a group does, and `o_ref` where a tile does.

# %%
show(
    ragged_product,
    normal((1024, 256), "bfloat16"),
    normal((3, 256, 256), "bfloat16"),
    np.array([100, 100, 824], np.int32),
    bn=256,
    bk=256,
)

# %% [markdown]
# What would a TPU make of it? Here is the TPU compiler's report of your kernel: 1024 rows in four groups, with weights
# of 1024 x 1024 in blocks of 256. The course's solution takes 66.4 us on a v5e, and waits for HBM.

# %%
sizes = np.array([100, 200, 500, 224], np.int32)
FOUR_GROUPS = normal((1024, 1024), "bfloat16"), normal((4, 1024, 1024), "bfloat16"), sizes
tpu_report(ragged_product, *FOUR_GROUPS, bm=256, bn=256, bk=256, simulate=False)

# %% [markdown]
# And how good is it? JAX ships a grouped matrix product for TPUs: `gmm`, in its module `megablox`. The next cell has
# the compiler schedule both, and prints the bundles of a step. On a v5e the course's solution takes 500 and `gmm` 522.
# On a v6e it is 334 against 339. Yours may differ. With a draft at every k, the same kernel takes 478 bundles on a v5e.
# That saves no time: both take 66.4 us, because they wait for HBM. On a v6e the draft takes 374 bundles, and is slower:
# 52.1 us against 49.6.


# %%
def beside_gmm(tpu):
    """Your kernel and JAX's, in blocks of 256."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    from pallas_puzzles.view.tpu_report import tpu_report as read_report  # the same report, not shown

    theirs = functools.partial(gmm, preferred_element_type=jnp.bfloat16, tiling=(256, 256, 256))
    yours = functools.partial(ragged_product, bm=256, bn=256, bk=256)
    for name, fn in (("yours", yours), ("gmm", theirs)):
        report = read_report(fn, *FOUR_GROUPS, tpu=tpu, simulate=False)
        if not report:
            print(f"{tpu}, {name}: {report.unavailable or report.refusal.sentence}")
        for kernel in report.kernels:
            figures = f"{kernel.steps} steps of {kernel.mean_step:.0f} bundles, {kernel.time_s * 1e6:.1f} us"
            print(f"{tpu}, {name:5}: {figures}")


if unwritten(ragged_product):
    print(f"Nothing to compile yet. Still to be written: {', '.join(unwritten(ragged_product))}.")
else:
    beside_gmm("v5e")
    beside_gmm("v6e")

# %% [markdown]
# ## Puzzle 7a: A visit for every group
#
# **Goal.** List the visits for the gradient of the weights: every group gets at least one, even a group without rows.
#
# ### Theory
#
# `y = ragged(x, w)` has two gradients. dx has tiles of rows, like y, so it uses the visits of Puzzle 2c. dw has one
# block for each expert. Suppose all 1024 tokens choose expert 1 of three:
#
# ```text
#     sizes [0, 1024, 0]         dw[0]      dw[1]      dw[2]
#     visits of Puzzle 2c          0          8          0
#     what you would get        garbage    x.T @ g    garbage
#     what you want                0       x.T @ g       0
# ```
#
# **A block that no step visits is never written.** For weights of 4096 x 14336 in bfloat16, dw[0] and dw[2] are 112 MiB
# of garbage each, and the optimizer adds it without blinking. So visit an empty group once, too. Use tile `offsets[g]
# // bm`. If there is no such tile, use the last one. Leave out tiles of unowned rows: no dw needs them.
#
# `jnp.repeat` gives you the groups. For the tiles: within a group, visits are numbered one after the other, and so are
# tiles. If group 2 begins in tile 1, and its first visit is number 3, which tile does it have at visit 5?


# %%
class GroupVisits(NamedTuple):
    num_tiles: Int[Array, ""]
    offsets: Int[Array, "G+1"]
    group_ids: Int[Array, "V"]
    m_tile_ids: Int[Array, "V"]


def every_group_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> GroupVisits:
    G, T, offsets = len(group_sizes), pl.cdiv(num_rows, bm), np.asarray(offsets_spec(group_sizes))
    tiles = [[tile for tile, group in visits_by_hand(group_sizes, num_rows, bm) if group == g] for g in range(G)]
    tiles = [mine or [min(offsets[g] // bm, T - 1)] for g, mine in enumerate(tiles)]
    visits = [(g, tile) for g, mine in enumerate(tiles) for tile in mine]
    lists = np.full((2, T + G - 1), -1, np.int32)
    lists[:, : len(visits)] = np.transpose(visits)
    return GroupVisits(jnp.asarray(len(visits), jnp.int32), jnp.asarray(offsets), *jnp.asarray(lists))


# %%
def every_group_metadata(group_sizes, *, num_rows, bm):
    # Return a Metadata. The lists have the length of Puzzle 2b. That is enough here, too: count one visit for each
    # tile. Each group adds at most one more. The first group with rows adds none.
    # Behind the last visit, any group and any tile that exist will do.
    pass  # YOUR CODE HERE


# %%
def every_group_visits(group_sizes, *, num_rows=1024, bm=128):
    """What is in your Metadata. Behind the last visit, -1 stands for any group, or tile, that exists."""
    meta = every_group_metadata(group_sizes, num_rows=num_rows, bm=bm)

    def up_to_the_last(ids, exist):
        behind = jnp.arange(ids.shape[0]) >= meta.num_tiles
        return jnp.where(behind & (ids >= 0) & (ids < exist), -1, ids)

    group_ids = up_to_the_last(meta.group_ids, group_sizes.shape[0])
    m_tile_ids = up_to_the_last(meta.m_tile_ids, pl.cdiv(num_rows, bm))
    return GroupVisits(meta.num_tiles, meta.offsets, group_ids, m_tile_ids)


# %%
# One variant has the two limits of Puzzle 2a.
check("ragged_dot/7a", every_group_visits)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many visits does each group have now, and which function of yours is nearly right? From these counts, where does
# the first visit of each group stand in the list? (Puzzle 2a did that with rows.) A fact that helps: an array indexed
# by `group_ids` looks up one number for every visit at once. And an empty group at row `num_rows` begins in a tile that
# does not exist.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def every_group_metadata(group_sizes, *, num_rows, bm):
#     G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
#     offsets = ____
#     visits = ____
#     ids = jnp.repeat(____, visits, total_repeat_length=____)
#     first_tile, first = ____, ____
#     tiles = first_tile[ids] + ____ - ____
#     return Metadata(offsets, ids, jnp.minimum(tiles, ____), ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def every_group_metadata(group_sizes, *, num_rows, bm):
#     G, T = group_sizes.shape[0], pl.cdiv(num_rows, bm)
#     offsets = group_offsets(group_sizes)
#     visits = jnp.maximum(tiles_per_group(group_sizes, bm=bm), 1)
#     ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
#     first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
#     tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
#     return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The output decides what a kernel visits: tiles for `y` and `dx`, groups for `dw`. An expert that nobody
# chose costs one visit, and gets its zeros.

# %% [markdown]
# ## Puzzle 7b: Backward
#
# **Goal.** Compute the gradient of the weights: for each group one product, summed over the rows of that group.
#
# ### Theory
#
# Take groups of 100, 28 and 128 rows again, in tiles of 64. In tile 1, 36 rows belong to group 0 and 28 to group 1.
# Going forward, a visit for group 1 computed 36 rows too many, and did not store them. For the weights, you sum over
# rows:
#
# ```text
#     dw[1] = x[100:128].T @ g[100:128]            (K, 28) (28, N) -> (K, N)
#
#     tile 1      | 36 rows of group 0 | 28 of group 1 |
#     tile.T @ g  = 36 rows' share     +  28 rows' share      in every element
# ```
#
# Now a masked store comes too late. The neighbour's rows are **a part of every element**, like salt in a soup. Mask
# them before you multiply.
#
# The output block now belongs to the group, and the visits, those of Puzzle 7a, run innermost:
#
# ```text
#     grid (i, j, v)      visit           0      1  2      3  4
#                         group           0      0  1      2  2
#                         tile            0      1  1      2  3
# ```
#
# The sum starts at the first visit for a group. You may store a draft of it at every visit: the block leaves VMEM only
# when the group changes.
#
# Below the edge of x and g there is garbage, which may be NaN. Keep it out. But an infinity in one of the group's own
# rows has to show in dw.


# %%
def dense_loop(x, w, group_sizes):
    """What `ragged_product` computes, in float32, without a kernel: all rows times all weights, and then a choice."""
    rows, end = jnp.arange(x.shape[0])[:, None], 0
    result = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
    for e in range(w.shape[0]):
        start, end = end, end + group_sizes[e]
        own = (start <= rows) & (rows < end)
        result = jnp.where(own, jnp.dot(jnp.where(own, x, 0), w[e], precision="highest"), result)
    return result


def ragged_grads_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"], group_sizes: Int[Array, "G"], g: BFloat16[Array, "M N"]
) -> tuple[BFloat16[Array, "M N"], BFloat16[Array, "M K"], BFloat16[Array, "G K N"]]:
    x, w, g = (a.astype(jnp.float32) for a in (x, w, g))
    y, vjp = jax.vjp(lambda x, w: dense_loop(x, w, group_sizes), x, w)
    return tuple(a.astype(jnp.bfloat16) for a in (y, *vjp(g)))


# %%
def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    # Grid (i, j, v).      x_ref: (bm, bk), g_ref: (bm, bn), bfloat16, of the tile      dw_ref: (bk, bn), of the group
    # acc_ref: (bk, bn), float32
    pass  # YOUR CODE HERE


# %%
# Given: the wiring of your kernel. The lists are those of Puzzle 7a.
def weight_grads(x, g, group_sizes, *, bm, bn, bk):
    (M, K), (_, N), G = x.shape, g.shape, group_sizes.shape[0]
    meta = every_group_metadata(group_sizes, num_rows=M, bm=bm)
    return pl.pallas_call(
        tgmm_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K // bk, N // bn, meta.num_tiles),
            in_specs=[
                pl.BlockSpec((bm, bk), lambda i, j, v, offsets, group_ids, m_tile_ids: (m_tile_ids[v], i)),
                pl.BlockSpec((bm, bn), lambda i, j, v, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
            ],
            out_specs=pl.BlockSpec(
                (None, bk, bn), lambda i, j, v, offsets, group_ids, m_tile_ids: (group_ids[v], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((bk, bn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((G, K, N), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, x, g)


# %%
# Given: the gradient of x, which is g @ w[e].T for the rows of expert e. It is your Puzzle 4 with other index maps,
# around your kernel of Puzzle 6.
def row_grads(g, w, group_sizes, *, bm, bn, bk):
    (M, N), (_, K, _) = g.shape, w.shape
    meta = metadata(group_sizes, num_rows=M, bm=bm)
    return pl.pallas_call(
        functools.partial(ragged_kernel, dims=((1,), (1,))),  # summed over N
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(K // bk, meta.num_tiles, N // bn),
            in_specs=[
                pl.BlockSpec((bm, bn), lambda i, v, j, offsets, group_ids, m_tile_ids: (m_tile_ids[v], j)),
                pl.BlockSpec((None, bk, bn), lambda i, v, j, offsets, group_ids, m_tile_ids: (group_ids[v], i, j)),
            ],
            out_specs=pl.BlockSpec((bm, bk), lambda i, v, j, offsets, group_ids, m_tile_ids: (m_tile_ids[v], i)),
            scratch_shapes=[pltpu.VMEM((bm, bk), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((M, K), g.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
    )(meta.offsets, meta.group_ids, meta.m_tile_ids, g, w)


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def ragged(x, w, group_sizes, bm, bn, bk):
    _, K, N = w.shape
    if K % bk or N % bn:
        exchanged = "" if K % bn or N % bk else ": they would, if bn and bk changed places"
        raise ValueError(f"blocks of bk={bk}, bn={bn} do not fit K={K}, N={N} of w {w.shape}{exchanged}")
    return ragged_forward(x, w, group_sizes, bm=bm, bn=bn, bk=bk)


def ragged_fwd(x, w, group_sizes, bm, bn, bk):
    return ragged(x, w, group_sizes, bm, bn, bk), (x, w, group_sizes)


def ragged_bwd(bm, bn, bk, residuals, g):
    x, w, group_sizes = residuals
    dx = row_grads(g, w, group_sizes, bm=bm, bn=bn, bk=bk)
    return dx, weight_grads(x, g, group_sizes, bm=bm, bn=bn, bk=bk), None  # sizes have no gradient


ragged.defvjp(ragged_fwd, ragged_bwd)


def ragged_and_grads(x, w, group_sizes, g, *, bm: int = 64, bn: int = 128, bk: int = 128):
    y, vjp = jax.vjp(lambda x, w: ragged(x, w, group_sizes, bm, bn, bk), x, w)
    return y, *vjp(g)


# %%
# Budget for x (256, 256), w (3, 256, 384), group_sizes [100, 28, 128], g (256, 384): hbm_bytes=4_653_056,
# vmem_bytes=196_608, calls=3, mxu_bits=16.
check("ragged_dot/7b", ragged_and_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two functions of Puzzle 3 tell you about visit v. Which list do you give `first_visit`, if the sum belongs to a group?
# Both x and g hold rows of the neighbour. In a sum over rows, a factor of 0 on one side removes a neighbour. Does it
# also remove garbage? (0 times NaN is NaN.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
#     v = ____
#     own = ____
#     x, g = ____, ____
#     before = jnp.where(____, 0, acc_ref[...])
#     over_rows = ____
#     acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
#     dw_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
#     v = pl.program_id(2)
#     own = own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref.shape[0])
#     x, g = jnp.where(own, x_ref[...], 0), jnp.where(own, g_ref[...], 0)
#     before = jnp.where(first_visit(v, group_ids_ref), 0, acc_ref[...])
#     over_rows = (((0,), (0,)), ((), ()))
#     acc_ref[...] = before + jax.lax.dot_general(x, g, over_rows, preferred_element_type=jnp.float32)
#     dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** JAX can differentiate `ragged`. In the picture, group 1 has no rows, and still `dw_ref` stops at its
# block to write zeros. What remains is to decide who goes where.

# %%
show(
    weight_grads,
    normal((256, 256), "bfloat16"),
    normal((256, 384), "bfloat16"),
    np.array([100, 0, 28, 128], np.int32),
    bm=64,
    bn=384,
    bk=256,
)

# %% [markdown]
# ## Puzzle 8a: Routing
#
# **Goal.** Choose k experts for each token, and weights that add up to 1.
#
# ### Theory
#
# A small matrix, the **router**, gives each token a score for every expert: its logits. The k largest win. How much
# should each winner count?
#
# ```text
#     logits               2.0    1.0    0.0   -1.0        k = 2
#     softmax over all     0.64   0.24   0.09   0.03
#     the k best           0.64   0.24                      sum 0.88
# ```
#
# With these weights, 12% of the token's result is lost, and every token loses a different share. So you
# **renormalise**: each weight is a share among the chosen experts.
#
# You could divide the k best by their sum. But write out p_e / (p_1 + ... + p_k): each p has the same denominator, over
# all experts. What happens to it? There is a shorter way to the same numbers.
#
# Choose by the logits, not by the softmax. In float32, an expert whose logit is 200 below the best has a share of 0,
# and so has one that is 300 below. Two zeros do not tell you which of them is second.


# %%
class Gate(NamedTuple):
    weights: Float[Array, "T k"]
    experts: Int[Array, "T k"]


def gate_spec(logits: Float[Array, "T E"], *, k: int = 2) -> Gate:
    logits = np.asarray(logits)
    experts = np.stack([sorted(range(len(row)), key=lambda e: -row[e])[:k] for row in logits]).astype(np.int32)
    p = np.exp(np.take_along_axis(logits, experts, axis=1) - logits.max(axis=1, keepdims=True))
    return Gate(jnp.asarray((p / p.sum(axis=1, keepdims=True)).astype(np.float32)), jnp.asarray(experts))


def route(logits, *, k):
    # Return weights, (T, k), float32, and experts, (T, k), int32: the k best of each row, the best one first. Of equal
    # ones, the one on the left comes first.
    # jax.lax.top_k(x, k) gives two arrays: the k largest of each row, in this order, and their columns.
    pass  # YOUR CODE HERE


def gate(logits, *, k=2):
    return Gate(*route(logits, k=k))


# %%
check("ragged_dot/8a", gate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take the table: 0.64 / 0.88 is 0.73, and 0.24 / 0.88 is 0.27. The two logits differ by 1. What does softmax make of
# two numbers that differ by 1, if there are no others? (`jax.nn.softmax(x, axis=)` subtracts the maximum for you.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def route(logits, *, k):
#     best, experts = jax.lax.top_k(____, k)
#     return ____, experts
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def route(logits, *, k):
#     best, experts = jax.lax.top_k(logits, k)
#     return jax.nn.softmax(best, axis=1), experts
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Choose first, then compare the chosen. With k = 1 the weight is always 1, and no gradient tells the
# router how it did. So with one expert for each token, keep the softmax over all.

# %% [markdown]
# ## Puzzle 8b: There and back
#
# **Goal.** Sort the rows by expert, and bring their results back to the tokens.
#
# ### Theory
#
# Each token has k **slots**, numbered token by token: slot s belongs to token s // k. If you went through the slots in
# the order below, you would fetch weights five times. Sorted by expert, they come in three times, once each. At 112 MiB
# an expert, it pays to move some rows first:
#
# ```text
#     token             0      1      2                    k = 2
#     experts         [2 0]  [1 2]  [2 1]
#     slot             0 1    2 3    4 5
#
#     order            1      2 5      0 3 4       slots, sorted by expert
#     their experts    0      1 1      2 2 2
#     group_sizes      1      2        3
#
#     position         0      1 2      3 4 5
# ```
#
# The rows `x[order // k]` are what Puzzle 6 wants. On the way back, each slot has to find its row. `order[p]` is the
# slot at position p. You want the position of slot s, the **inverse permutation**: in the example, slot 0 is at
# position 3, and slot 1 at position 0.
#
# With the inverse you *fetch* rows. Without it you would scatter them, with `at[...].set`. By default, a scatter has to
# expect that two rows go to one place. So it may run one row at a time; a fetch need not. There is a short way to the
# inverse: what happens to the positions if you sort `order` itself?


# %%
class Permuted(NamedTuple):
    order: Int[Array, "T*k"]
    group_sizes: Int[Array, "E"]
    result: Float[Array, "T N"]


def permuted_spec(
    x: Float[Array, "T N"], experts: Int[Array, "T k"], weights: Float[Array, "T k"], *, num_experts: int = 5
) -> Permuted:
    x, experts, weights = np.asarray(x), np.asarray(experts), np.asarray(weights)
    order = np.array(sorted(range(experts.size), key=lambda slot: experts.flat[slot]), np.int32)
    group_sizes = np.array([np.sum(experts == e) for e in range(num_experts)], np.int32)
    result = (weights * (1 + experts)).sum(axis=1, keepdims=True) * x
    return Permuted(jnp.asarray(order), jnp.asarray(group_sizes), jnp.asarray(result.astype(np.float32)))


# %%
def sort_by_expert(experts, *, num_experts):
    # Return order, (T * k,), and group_sizes, (num_experts,), int32. jnp.argsort keeps slots of one expert in their
    # order. jnp.bincount(numbers, length=n) counts how often each of 0 to n - 1 occurs.
    pass  # YOUR CODE HERE


def combine(rows, order, weights):
    # rows: (T * k, N), sorted by expert. Return (T, N): for each token the weighted sum of the rows of its slots.
    pass  # YOUR CODE HERE


def permuted(x, experts, weights, *, num_experts=5):
    order, group_sizes = sort_by_expert(experts, num_experts=num_experts)
    expert = jnp.repeat(jnp.arange(num_experts), group_sizes, total_repeat_length=order.shape[0])
    rows = (1 + expert)[:, None] * x[order // experts.shape[1]]  # expert e multiplies by 1 + e, to tell them apart
    return Permuted(order, group_sizes, combine(rows, order, weights))


# %%
# One variant bounds the elements of the largest array on the way. A table of slots against tokens has too many.
# `combine` may not scatter rows (at[...], segment_sum, the gradient of a gather).
check("ragged_dot/8b", permuted)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# You sort all slots, in one row. An expert that nobody chose has a size, too. For the way back, take the order of the
# example, 1 2 5 0 3 4, and the positions 0 to 5 below it. Sort the upper row, and let each number take its position
# along. What is below now? Which jnp function returns just that?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def sort_by_expert(experts, *, num_experts):
#     slots = ____
#     return jnp.argsort(____), jnp.bincount(____, length=____)
#
#
# def combine(rows, order, weights):
#     T, k = weights.shape
#     position = ____
#     by_slot = rows[____].reshape(____)
#     return (____ * ____).sum(axis=____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def sort_by_expert(experts, *, num_experts):
#     slots = experts.reshape(-1)
#     return jnp.argsort(slots), jnp.bincount(slots, length=num_experts)
#
#
# def combine(rows, order, weights):
#     T, k = weights.shape
#     position = jnp.argsort(order)
#     by_slot = rows[position].reshape(T, k, -1)
#     return (weights[:, :, None] * by_slot).sum(axis=1)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** With two argsorts, a mixture of experts is a permutation around a grouped product. An expert that nobody
# chose is a group of size 0.

# %% [markdown]
# ## Puzzle 8c: The gradient of a copy
#
# **Goal.** Give `x[order // k]` a gradient that fetches rows instead of scattering them.
#
# ### Theory
#
# The layer begins with `x[order // k]`, which copies each token k times. Going backward, the gradients of its k copies
# are added up. JAX does this with a **scatter-add**: it starts with zeros, and adds each row of g to the row of its
# token.
#
# ```text
#     order         1  2  5  3  0  4        slots, k = 2
#     order // k    0  1  2  1  0  2        the token of each row of g
#
#     dx[0] = g[0] + g[4]       dx[1] = g[1] + g[3]       dx[2] = g[2] + g[5]
# ```
#
# JAX knows only where each row of g goes. It adds in the dtype of g: in bfloat16, 256 and seven times 1 add up to 256,
# because 257 is rounded to 256.
#
# You know more. Each token has exactly k rows, and the inverse of `order` says where they are. So **fetch** those k
# rows and sum them, in float32.
#
# The wiring is `jax.custom_vjp`, as around `ragged` in Puzzle 7b. It is given, below your function.


# %%
def expand_grad_spec(g: Float[Array, "T*k D"], order: Int[Array, "T*k"], *, k: int = 2) -> Float[Array, "T D"]:
    _, vjp = jax.vjp(lambda x: x[order // k], jnp.zeros((g.shape[0] // k, g.shape[1])))
    return vjp(g.astype(jnp.float32))[0]


# %%
def expand_grad(g, order, *, k=2):
    # g: (T * k, D), the gradient of x[order // k]      Return the gradient of x, (T, D), float32.
    pass  # YOUR CODE HERE


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def expand(x, order, k):
    return x[order // k]


def expand_fwd(x, order, k):
    return expand(x, order, k), order


def expand_bwd(k, order, g):
    return expand_grad(g, order, k=k).astype(g.dtype), None


expand.defvjp(expand_fwd, expand_bwd)

# %%
# One variant limits the number of operations and the elements of the largest array: a table of slots against tokens has
# too many.
check("ragged_dot/8c", expand_grad)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In the example, token 0 has slots 0 and 1. At which positions of `order` are they? These are the rows of g that you
# need. Your `combine` fetches rows in the same way, for all slots at once. What does it do with them that you leave out
# here? A fact about dtypes: a sum of bfloat16 numbers is rounded to bfloat16 when it is done. When do you have to cast?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def expand_grad(g, order, *, k=2):
#     by_slot = g[____].reshape(____)
#     return by_slot.astype(____).sum(axis=____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def expand_grad(g, order, *, k=2):
#     by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
#     return by_slot.astype(jnp.float32).sum(axis=1)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** JAX differentiates whatever you write, but it does not know what you know. What you know about a
# permutation turns a scatter into a fetch, forward in `combine` and backward here.

# %% [markdown]
# ## Puzzle 9: The MoE layer
#
# **Goal.** Decide how tall the tiles are, and build the whole layer, with gradients for everything in it.
#
# ### Theory
#
# ```text
#     x @ router ---> route ---> sort_by_expert
#                       |              | order, group_sizes
#          x ---------- | ---> expand(x, order) ---> @ w1 ---> silu ---> @ w2 ---> combine ---> y
#                       |                            ragged             ragged       ^
#                       +--- weights ------------------------------------------------+
# ```
#
# Each token is multiplied by k experts, not by all E: for 8 experts and k = 2, that is a quarter of the FLOPs. You have
# all the parts, and one decision is left.
#
# **How tall is a tile?** E experts share S = T k rows. There are at most S / bm + E - 1 visits, with S / bm rounded up.
# Each multiplies bm rows. Tall tiles multiply rows for nothing. With bm = 128, 96 slots and 5 experts make up to 5
# visits: 640 rows, for 96. Short tiles take more steps: with bm = 16, up to 10 visits.
#
# At best you multiply S rows, in E visits. Which bm keeps both below about twice that, whatever the sizes are?


# %%
def moe_dense(x, router, w1, w2, k):
    """Every expert for every token, in float32, without a kernel."""
    logits = jnp.dot(x, router, precision="highest")
    least = jnp.sort(logits, axis=1)[:, -k][:, None]
    p = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=1)
    y = 0.0
    for e in range(w1.shape[0]):
        h = jax.nn.silu(jnp.dot(x, w1[e], precision="highest"))
        y += p[:, e][:, None] * jnp.dot(h, w2[e], precision="highest")
    return y


# %%
class MoEGrads(NamedTuple):
    y: BFloat16[Array, "T D"]
    dx: BFloat16[Array, "T D"]
    drouter: Float[Array, "D E"]
    dw1: BFloat16[Array, "E D F"]
    dw2: BFloat16[Array, "E F D"]


def moe_spec(
    x: BFloat16[Array, "T D"],
    router: Float[Array, "D E"],
    w1: BFloat16[Array, "E D F"],
    w2: BFloat16[Array, "E F D"],
    g: BFloat16[Array, "T D"],
    *,
    k: int = 2,
) -> MoEGrads:
    arrays = [a.astype(jnp.float32) for a in (x, router, w1, w2)]
    y, vjp = jax.vjp(lambda *arrays: moe_dense(*arrays, k), *arrays)
    results = zip((y, *vjp(g.astype(jnp.float32))), (x, x, router, w1, w2), strict=True)
    return MoEGrads(*[result.astype(like.dtype) for result, like in results])


# %%
def tile_rows(num_slots, num_experts):
    # Return bm, a multiple of 16, from two Python integers. Whatever the tokens choose, a call of `ragged` may multiply
    # 2 num_slots + 16 num_experts rows (for each block of its weights), and make 2 num_experts visits.
    pass  # YOUR CODE HERE


def moe_layer(x, router, w1, w2, *, k=2, bn=128, bk=128):
    # Return y, (T, D), of x's dtype. Use tile_rows, route, sort_by_expert, expand, ragged (Puzzle 7b) and combine.
    # The logits are float32. ragged takes and returns bfloat16. Compute silu (jax.nn.silu) and combine in float32: cast
    # before them, and cast their results to bfloat16.
    # Cut D into blocks of bk and F into blocks of bn, in both products. So in h @ w2, ragged's bn and bk change places.
    pass  # YOUR CODE HERE


# %%
def moe_and_grads(x, router, w1, w2, g, *, k: int = 2, bn: int = 128, bk: int = 128):
    y, vjp = jax.vjp(lambda *arrays: moe_layer(*arrays, k=k, bn=bn, bk=bk), x, router, w1, w2)
    return y, *vjp(g)


# %%
# Budget for x (48, 128), router (128, 5), w1 (5, 128, 256), w2 (5, 256, 128), g (48, 128): grid_steps=120,
# calls=6, flops=112_300_000, mxu_bits=16, outside_flops=184_320. grid_steps and flops: what tile_rows may cost.
# outside_flops: the router's product and its two gradients. Moves, softmax, silu, and work on integers may be outside.
# The check also calls tile_rows with other sizes.
check("ragged_dot/9", moe_and_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Suppose every expert had the same number of rows. How tall would a tile be that holds just one expert? Try that height
# in both formulas. For the layer, read the drawing from left to right, one line of code for each name. `ragged` takes
# its arguments by position: (x, w, group_sizes, bm, bn, bk). A fact that helps with the blocks: bk cuts the dimension
# that is summed over, and bn the columns of the result. Which are they in x @ w1, and which in h @ w2?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tile_rows(num_slots, num_experts):
#     return 16 * pl.cdiv(____, ____)
#
#
# def moe_layer(x, router, w1, w2, *, k=2, bn=128, bk=128):
#     weights, experts = route(____, k=k)
#     order, group_sizes = ____
#     bm = tile_rows(____, ____)
#     rows = expand(____)
#     h = ragged(rows, w1, group_sizes, bm, ____, ____)
#     h = jax.nn.silu(____).astype(____)
#     rows = ragged(h, w2, group_sizes, bm, ____, ____)
#     return ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def tile_rows(num_slots, num_experts):
#     return 16 * pl.cdiv(num_slots, 16 * num_experts)
#
#
# def moe_layer(x, router, w1, w2, *, k=2, bn=128, bk=128):
#     logits = jnp.dot(x.astype(jnp.float32), router)
#     weights, experts = route(logits, k=k)
#     order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
#     bm = tile_rows(order.shape[0], router.shape[1])
#     rows = expand(x, order, k)
#     h = ragged(rows, w1, group_sizes, bm, bn, bk)
#     h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
#     rows = ragged(h, w2, group_sizes, bm, bk, bn)
#     return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You have a layer with E times the weights, k times the FLOPs, and all its gradients. Six `pallas_call`s
# do its large products. The rest is a softmax and bookkeeping. The best tile holds about one expert's share of rows:
# for a prompt of 8192 tokens, k = 2 and 64 experts that is 256 rows. For a single token it is the smallest tile there
# is.

# %%
show(
    moe_layer,
    normal((48, 128), "bfloat16"),
    normal((128, 5), scale=0.1),
    normal((5, 128, 256), "bfloat16", scale=0.1),
    normal((5, 256, 128), "bfloat16", scale=0.1),
)

# %% [markdown]
# ## What you built
#
# You built a grouped matrix product for groups of any size. It pads nothing and loops over no groups. Two lists of
# integers say which blocks are copied and which rows are stored. You built its gradients. And you built a mixture of
# experts that agrees with the dense one, in values and in gradients, even when an expert is left out.
#
# A real one adds more, and you have the parts already:
#
# - **Expert parallelism.** Experts are spread over devices, and tokens travel: an all-to-all before Puzzle 6 and one
#   after it. Then each device holds some of the groups, and some of its rows belong to none of them. Your unowned rows
#   are for that.
# - **Capacity.** A fixed number of rows for each expert keeps shapes static. It drops tokens, or pads: the equal groups
#   of Puzzle 5. Your groups of any size need neither. The literature calls that "dropless".
# - **Load balancing.** Nothing stops all tokens from choosing one expert. An auxiliary loss helps, or a bias on the
#   logits that follows the load. Both work on `group_sizes` and on the router of Puzzle 8a. No kernel changes.
# - **Quantised weights.** A small batch waits for weights. In int8, with a scale for each expert and column, they take
#   half the bytes. Combine Puzzle 10 of `matmul.py` with an index map like that of Puzzle 3, which picks the scales of
#   the visit's group.

# %% [markdown]
# **Read next.** `gmm` and `tgmm` in `jax.experimental.pallas.ops.tpu.megablox`: your Puzzles 6 and 7b. One metadata
# function serves both, and visits to empty groups are an option of it. `jax.lax.ragged_dot` is the same product as one
# primitive of JAX, for any device.

# %%
progress()
