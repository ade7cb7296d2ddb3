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
# A mixture of experts has many weight matrices and sends each token to one or two of them. Which ones is up to the
# token, so every expert gets a different number of rows: 100, 100 and 824, or none. Sixteen puzzles from here you will
# have written the grouped matrix product that does this without padding, for groups of any size, forward and backward;
# and around it a whole MoE layer that trains.
#
# You need `basics.py`, and of `matmul.py` Puzzles 1 to 5 (the k loop, transposed operands). What prefetched scalars are
# (Puzzle 11 there) is said again in Puzzle 1.

# %%
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_puzzles import check, hint, normal, progress, setup, show

setup()

# %% [markdown]
# ## Puzzle 1: The expert that a tile asks for
#
# **Goal.** Multiply every tile of tokens by the weights of its own expert. Which expert that is, is data.
#
# ### Theory
#
# Suppose that all rows of a tile go to one expert, and `experts[i]` says to which. In jnp that is `w[experts]`, one
# matrix for each tile, and a batched product. But `w[experts]` is an array: for eight tiles and weights of 4096 x 14336
# in bfloat16, 0.9 GiB are read and 0.9 GiB written before anything is multiplied, 2.3 ms on a v5e.
#
# An index map does not copy weights, it points at them. And it may read numbers that come with the call: operands
# announced by **`num_scalar_prefetch`** are in SMEM, a small memory for single numbers, before the first step, every
# index map gets them as Refs behind the grid indices, and the kernel gets them first.
#
# ```text
#     experts   [ 2  2  0  3  3  3 ]          in SMEM
#                 |  |  |  |  |  |
#     i           0  1  2  3  4  5
#     block of w  2  .  0  3  .  .            . : the same as at the step before
# ```
#
# At a dot nothing is fetched: an index that came out of data is compared with the one before like any other. So tokens
# that are sorted by expert fetch each expert once.


# %%
def by_tile_spec(
    experts: Int[Array, "T"], x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"]
) -> BFloat16[Array, "M N"]:
    tiles = x.reshape(experts.shape[0], -1, x.shape[1])
    result = jnp.einsum("tmk,tkn->tmn", tiles, w[experts], preferred_element_type=jnp.float32)
    return result.reshape(x.shape[0], -1).astype(jnp.bfloat16)


def by_tile_kernel(experts_ref, x_ref, w_ref, o_ref):
    # experts_ref: int32, in SMEM: experts_ref[3] is a number
    # x_ref: (bm, K), tile i      w_ref: (K, bn), of the expert of tile i      o_ref: (bm, bn), bfloat16
    pass  # YOUR CODE HERE


def by_tile_w_map(j, i, experts_ref):
    # Return the number of the block of w, (None, K, bn), for column block j of tile i: three indices.
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
# calls=1, mxu_bits=16. hbm_bytes: of w, three experts of five, each once for every column block.
check("ragged_dot/1", by_tile_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The kernel need not know the expert at all: what has arrived in `w_ref` is already the right matrix, with its first
# dimension squeezed away. The map needs three indices: along experts, rows of w, columns of w. Which of them is looked
# up? (`experts_ref[i]` reads one number from SMEM. A Ref is indexed, also in an index map.)
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
# **Takeaway.** The data steer the copies, and the experts that nobody asked for (1 and 4) cost nothing. What is missing
# is raggedness: tokens do not come in whole tiles. Puzzles 2a to 2f turn group sizes of any kind into a list like
# `experts`, in plain jnp and without a kernel.

# %% [markdown]
# ## Puzzle 2a: Where groups begin
#
# **Goal.** From the sizes of the groups to the rows at which they begin and end.
#
# ### Theory
#
# Sort 1024 tokens by expert, and the router says [100, 100, 824]. Whose is row 150? The rows of an expert form one
# **group**, one behind the other, and group 0 has rows 0 to 99. So it is group 1's; and row 200 is group 2's. A kernel
# asks this for every tile, and it cannot add up sizes each time. Where does a group begin? Where all before it end:
#
# ```text
#     group_sizes      100       100                 824
#
#     rows         0        100       200                     1024
#     group        |---0-----|---1-----|-----------2------------|
#
#     offsets      0        100       200                     1024      one more than there are groups
# ```
#
# Group g has the rows from `offsets[g]` up to, and without, `offsets[g + 1]`: two numbers to compare 150 with. No case
# is special: an empty group begins where it ends.
#
# These numbers will go to SMEM and into index maps: **int32**, from the first step on. And all six steps, 2a to
# 2f, run under `jit`: shapes are known, values are not.


# %%
def offsets_spec(group_sizes: Int[Array, "G"]) -> Int[Array, "G+1"]:
    return jnp.asarray([np.sum(group_sizes[:g]) for g in range(len(group_sizes) + 1)], jnp.int32)


def group_offsets(group_sizes):
    # group_sizes: (G,), int32      Return (G + 1,), int32.
    pass  # YOUR CODE HERE


# %%
# Plain array code, run under jit: value, shape and dtype count. A Python loop over the groups would be written out
# under jit, forty times, and there is a limit on operations.
check("ragged_dot/2a", group_offsets)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A sum that grows from left to right has a name in NumPy, and jnp has it, too. It gives the ends. What has to be put in
# front of the ends, so that the beginnings are there as well? Mind the dtype of what you put there: `jnp.zeros(1)` is
# float32, and drags everything along.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def group_offsets(group_sizes):
#     ends = ____
#     return jnp.concatenate([____, ends])
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
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** G sizes, G + 1 offsets. Sizes that add up to less than there are rows are fine: what lies behind the
# last offset belongs to nobody, and we settle now that the result is zero there.

# %% [markdown]
# ## Puzzle 2b: Tiles per group
#
# **Goal.** How many tiles does each group have rows in?
#
# ### Theory
#
# The kernel works on tiles of `bm` rows, and tiles lie where they lie: tile t has the rows from t bm to (t + 1) bm.
# Groups begin and end anywhere:
#
# ```text
#     rows     0    100  128  200     256              ...            1024
#     group    |--0--|-----1--|----------------2-----------------------|
#     tile     |----0----|------1-----|-----2-----|  ...   |-----7-----|
# ```
#
# Group 0 has rows in 1 tile. Group 1 has 100 rows, fewer than a tile, and has rows in 2: it takes the end of tile 0
# and the beginning of tile 1. Group 2 has 824 rows, 6.4 tiles, and touches 7. A group costs a **visit** for every tile
# that it touches, however few rows of it are there: the MXU multiplies whole tiles.
#
# Which tile is a group's first? Round its beginning **down** to a whole tile. The first tile that it does not touch?
# Round its end **up**. The size alone does not tell.
#
# One kind of group has no first row, and no last.


# %%
def visits_by_hand(group_sizes, num_rows, bm):
    """Every visit as (tile, group): a tile is visited once for each group in it. In a tile of nobody's: group None."""
    owners = np.repeat(np.arange(len(group_sizes)), group_sizes).tolist()
    owners += [None] * (num_rows - len(owners))
    visits = []
    for tile in range(pl.cdiv(num_rows, bm)):
        inside = dict.fromkeys(owners[tile * bm : (tile + 1) * bm])  # in order, each once
        visits += [(tile, group) for group in inside if group is not None] or [(tile, None)]
    return visits


def tiles_per_group_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Int[Array, "G"]:
    owners = [group for _, group in visits_by_hand(group_sizes, num_rows, bm)]
    return jnp.asarray([owners.count(g) for g in range(len(group_sizes))], jnp.int32)


def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
    # Return (G,), int32. group_offsets, of Puzzle 2a, is yours to use. So is pl.cdiv(a, b): a / b, rounded up.
    pass  # YOUR CODE HERE


# %%
check("ragged_dot/2b", tiles_per_group)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take the drawing: group 2 begins at row 200, in tile 1, and ends at row 1024, where tile 8 would begin. So it is in
# tiles 1 to 7. Which two numbers give 7 tiles by subtraction? Try the same on an empty group at row 100: its end rounds
# up to more than its beginning rounds down to. Whose answer has to be chosen by its size?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
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
# def tiles_per_group(group_sizes, *, num_rows=1024, bm=128):
#     offsets = group_offsets(group_sizes)
#     starts, ends = offsets[:-1], offsets[1:]
#     return jnp.where(group_sizes > 0, pl.cdiv(ends, bm) - starts // bm, 0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** ceil(size / bm) says [1, 1, 7] here; it is [1, 2, 7]. The two agree as long as every group begins at a
# tile, which is what one tests with.

# %% [markdown]
# ## Puzzle 2c: Which group, visit by visit
#
# **Goal.** List the group of every visit, in the order in which the kernel will make them.
#
# ### Theory
#
# 16,384 rows are 128 tiles of 128. With 64 experts they may take 191 visits: a list of 128 places would lose 63 of
# them, and their rows. With [1, 2, 7] tiles, the kernel makes ten visits. Their groups, in order:
#
# ```text
#     visit       0  1  2  3  4  5  6  7  8  9
#     group_ids   0  1  1  2  2  2  2  2  2  2
# ```
#
# Each group's number, as often as it has tiles: `jnp.repeat`. But under `jit` an array's length has to be known before
# the values are, and the number of visits depends on the values. **`total_repeat_length=`** gives the result a length:
# what is too much is cut off, and what is missing is filled with the last number that there is to repeat.
#
# So which length is enough, whatever the sizes? Every tile is visited at least once: if it is nobody's, somebody still
# has to write the zeros. It is visited once more for every group that begins in the middle of it. The first group
# begins at row 0, the others, at worst, all in the middle of a tile.
#
# Visits to tiles of nobody's come last. They carry the number of the last group, G - 1, like everything behind them:
# it owns no row there, so no harm is done.


# %%
def group_ids_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Int[Array, "V"]:
    G, visits = len(group_sizes), visits_by_hand(group_sizes, num_rows, bm)
    ids = [group for _, group in visits if group is not None]
    return jnp.asarray(ids + [G - 1] * (pl.cdiv(num_rows, bm) + G - 1 - len(ids)), jnp.int32)


def group_ids(group_sizes, *, num_rows=1024, bm=128):
    # Return (V,), int32. V is as many visits as there can be, for any group_sizes of this length and so many rows.
    pass  # YOUR CODE HERE


# %%
check("ragged_dot/2c", group_ids)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What is repeated are the numbers 0 to G - 1; how often, is Puzzle 2b. For the length, add up what the theory says of
# the worst case: all tiles, of which the last may not be whole, and one more for which groups? (With [100, 100, 824]
# the worst case happens, and ten is right.) `jnp.arange` has a dtype argument.
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
#     repeats = tiles_per_group(group_sizes, num_rows=num_rows, bm=bm)
#     most = pl.cdiv(num_rows, bm) + G - 1
#     return jnp.repeat(jnp.arange(G, dtype=jnp.int32), repeats, total_repeat_length=most)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** tiles + G - 1: raggedness costs at most one visit for each group but the first. With padding, every
# group rounded up to whole tiles, the bound is the same; but the rows would have to be copied, and room kept for the
# worst case.

# %% [markdown]
# ## Puzzle 2d: Visits per tile
#
# **Goal.** The same visits, counted the other way: how often is each tile visited?
#
# ### Theory
#
# Give 1024 rows the sizes [200, 28, 100]. By Puzzle 2b the groups have 2 + 1 + 2 visits, and all of them are in tiles 0
# to 2. Then nobody visits tiles 3 to 7: 640 rows that no step writes, and that come back as garbage. So count
# by tile; for [100, 100, 824]:
#
# ```text
#     rows     0    100  128  200     256              ...            1024
#     group    |--0--|-----1--|----------------2-----------------------|
#     tile     |----0----|------1-----|-----2-----|  ...   |-----7-----|
#
#     visits        2           2           1       ...          1
# ```
#
# Every tile is visited once, even if it is nobody's. And once more for every group that begins **inside** it, behind
# its first row.
#
# So walk over the groups, and have each say in which tile it begins: add 1 there. Many groups may begin in one tile.
# An array indexed by an array does this in one operation, **`x.at[i].add(v)`**: a new array, in which v[g] has been
# added at i[g] for every g. Where an index occurs twice, both are added. Indices beyond the end are left out.


# %%
def tile_visits_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Int[Array, "T"]:
    tiles = [tile for tile, _ in visits_by_hand(group_sizes, num_rows, bm)]
    return jnp.asarray([tiles.count(t) for t in range(pl.cdiv(num_rows, bm))], jnp.int32)


def tile_visits(group_sizes, *, num_rows=1024, bm=128):
    # Return (T,), int32: one number for each tile of bm rows, the last of which may not be whole.
    pass  # YOUR CODE HERE


# %%
check("ragged_dot/2d", tile_visits)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Do [300, 0, 0, 724] by hand: eight tiles of 128, and four groups. How often is each tile visited before anybody has
# said that it begins somewhere? Which of the four say so, and in which tile? Two kinds of groups add nothing. (`&`
# joins two conditions on arrays, each in brackets; a condition is a bool, and to be added it has to become a number.)
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
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Two counts of the same visits, by group and by tile. The sum of this one is how many there are.

# %% [markdown]
# ## Puzzle 2e: Which tile, visit by visit
#
# **Goal.** List the tile of every visit, beside its group. Practice: nothing new.
#
# ### Theory
#
# A visit that pairs a tile with the wrong group multiplies up to 128 rows by another expert's weights, and no error is
# raised. So the other half of the pairs has to fit `group_ids`, place by place:
#
# ```text
#     visit        0  1  2  3  4  5  6  7  8  9
#     group_ids    0  1  1  2  2  2  2  2  2  2      sizes [100, 100, 824]
#     m_tile_ids   0  0  1  1  2  3  4  5  6  7
# ```
#
# Visits 0 and 1 share tile 0: group 0 has its first 100 rows, group 1 its last 28. Visits 1 and 2 share group 1. From
# one visit to the next either the group moves on or the tile does, or both; neither ever goes back. That is what makes
# the two lists fit, although each was counted by itself. And it is what an output block needs (basics.py Puzzle 9):
# visits to one tile follow one another.
#
# Behind the last visit, the last tile goes on to the end of the list.


# %%
def m_tile_ids_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Int[Array, "V"]:
    G, T = len(group_sizes), pl.cdiv(num_rows, bm)
    ids = [tile for tile, _ in visits_by_hand(group_sizes, num_rows, bm)]
    return jnp.asarray(ids + [T - 1] * (T + G - 1 - len(ids)), jnp.int32)


def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
    # Return (V,), int32, with the V of Puzzle 2c.
    pass  # YOUR CODE HERE


# %%
check("ragged_dot/2e", m_tile_ids)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Compare with Puzzle 2c: what was counted there for each group is counted in Puzzle 2d for each tile. What takes the
# place of the numbers 0 to G - 1? By hand, for [200, 28, 100] of 1024 rows: the list has ten places, and nobody's
# tiles are in it. Where do they come from?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
#     T = ____
#     repeats = ____
#     return jnp.repeat(____, ____, total_repeat_length=____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def m_tile_ids(group_sizes, *, num_rows=1024, bm=128):
#     T = pl.cdiv(num_rows, bm)
#     repeats = tile_visits(group_sizes, num_rows=num_rows, bm=bm)
#     most = T + group_sizes.shape[0] - 1
#     return jnp.repeat(jnp.arange(T, dtype=jnp.int32), repeats, total_repeat_length=most)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Two lists of small integers say everything about the raggedness; the kernel will not contain a single
# loop over groups.

# %% [markdown]
# ## Puzzle 2f: All together
#
# **Goal.** One function from group sizes to everything that the kernels need, with the number of visits.
#
# ### Theory
#
# The lists are as long as the worst case needs. With four groups of 256 rows it does not happen: three places of eleven
# are not visits.
#
# ```text
#     group_ids    0  0  1  1  2  2  3  3 | 3  3  3
#     m_tile_ids   0  1  2  3  4  5  6  7 | 7  7  7
#                                         ^
#                                         num_tiles = 8
# ```
#
# A kernel that walks to the end spends 27% of its steps on nothing. Where the true list ends is data, **a number that
# nobody knows before the call**. It cannot be the length of an array. It can be a value, an array of shape () that
# travels beside the lists, and Puzzle 4 will make it the length of a grid.
#
# Which of your counts adds up to it? Ask [200, 28, 100] of 1024 rows.


# %%
class Metadata(NamedTuple):
    offsets: Int[Array, "G+1"]
    group_ids: Int[Array, "V"]
    m_tile_ids: Int[Array, "V"]
    num_tiles: Int[Array, ""]  # visits, those of nobody's tiles included


def metadata_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Metadata:
    tiling = {"num_rows": num_rows, "bm": bm}
    num_tiles = jnp.asarray(len(visits_by_hand(group_sizes, **tiling)), jnp.int32)
    offsets, ids = offsets_spec(group_sizes), group_ids_spec(group_sizes, **tiling)
    return Metadata(offsets, ids, m_tile_ids_spec(group_sizes, **tiling), num_tiles)


def metadata(group_sizes, *, num_rows=1024, bm=128):
    # Return a Metadata, made by your Puzzles 2a to 2e.
    pass  # YOUR CODE HERE


# %%
check("ragged_dot/2f", metadata)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Count the visits of [200, 28, 100] by hand, in tiles of 128, once by group and once by tile: one of the two sums is 5.
# Is that enough? (A sum over an int32 array is an int32 of shape ().)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def metadata(group_sizes, *, num_rows=1024, bm=128):
#     tiling = {"num_rows": num_rows, "bm": bm}     # f(group_sizes, **tiling) passes both on
#     return Metadata(
#         offsets=____,
#         group_ids=____,
#         m_tile_ids=____,
#         num_tiles=____,
#     )
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def metadata(group_sizes, *, num_rows=1024, bm=128):
#     tiling = {"num_rows": num_rows, "bm": bm}
#     return Metadata(
#         offsets=group_offsets(group_sizes),
#         group_ids=group_ids(group_sizes, **tiling),
#         m_tile_ids=m_tile_ids(group_sizes, **tiling),
#         num_tiles=tile_visits(group_sizes, **tiling).sum(),
#     )
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** For 1024 rows and 64 groups that is less than a kilobyte of integers, made once for all products that
# share their groups. Now for the kernels.

# %% [markdown]
# ## Puzzle 3: The masked store
#
# **Goal.** Add to each row the bias of its expert, in tiles that several groups share.
#
# ### Theory
#
# Groups of 100, 28 and 128 rows, in tiles of 64. Tile 1 has rows 64 to 127, of which 36 are group 0's and 28 group 1's,
# and is visited once for each. The simplest thing to do there is `x + bias[g]`. If every visit stores its whole tile,
# the last one wins, and 36 rows come back with group 1's bias:
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
# At visit 2 the tile is still in VMEM, with what visit 1 has left in it. So the store has to be **masked**: read the
# tile, replace the rows that are the group's own, and store it again. Which rows these are, each visit finds out from
# the offsets.
#
# And the rows that are nobody's? Zero, we said. At a tile's first visit `o_ref` holds garbage, and nothing is worth
# keeping: let the rest be 0 there. After that it is either somebody's or 0 already.


# %%
def expert_bias_spec(
    x: Float[Array, "M N"], bias: Float[Array, "G 1 N"], group_sizes: Int[Array, "G"]
) -> Float[Array, "M N"]:
    group = np.repeat(np.arange(len(group_sizes)), group_sizes)
    result = np.zeros(x.shape, np.float32)
    result[: len(group)] = np.asarray(x)[: len(group)] + np.asarray(bias)[group, 0]
    return jnp.asarray(result)


def first_visit(v, ids_ref):
    """Whether visit v is the first in a row with its number: of its tile in m_tile_ids_ref, for example."""
    return (v == 0) | (ids_ref[v] != ids_ref[jnp.maximum(v - 1, 0)])


def own_rows(v, offsets_ref, group_ids_ref, m_tile_ids_ref, bm):
    # Return (bm, 1), bool: which rows of the tile of visit v belong to its group. The Refs are those of Puzzle 2.
    pass  # YOUR CODE HERE


def expert_bias_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, bias_ref, o_ref):
    # Grid (j, v): column block j, visit v.
    # x_ref, o_ref: (bm, bn), of the tile of v      bias_ref: (1, bn), of its group
    pass  # YOUR CODE HERE


def expert_bias(
    x: Float[Array, "M N"], bias: Float[Array, "G 1 N"], group_sizes: Int[Array, "G"], *, bm: int = 64, bn: int = 128
) -> Float[Array, "M N"]:
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
# What is done on integers outside of the kernel is the metadata's business, and allowed.
check("ragged_dot/3", expert_bias)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take visit 2 of the drawing. The tile's rows have numbers in the tile, 0 to 63, and numbers in the array: which of
# the two are the offsets about, and what has to be known to get from one to the other? (`jnp.arange(bm)[:, None]` is a
# column, and compared with a number it stays one.) In the kernel, a row of o_ref gets what is new, what is there, or 0.
# Who decides: the row, or the visit?
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
# **Takeaway.** A tile with two owners is written twice in VMEM and once to HBM. The steps behind the last visit did no
# harm: they repeat the last tile with the last group, and whatever that group owns there gets the same values again.

# %% [markdown]
# ## Puzzle 4: Wire it yourself
#
# **Goal.** The `pallas_call` of a grouped matrix product, with a grid that is as long as there are visits.
#
# ### Theory
#
# Puzzle 3 made `tiles + G - 1` steps, whatever the sizes. With 64 experts and 1024 rows in tiles of 128 that is 71, and
# in a matrix product each of them multiplies. If all tokens choose one expert, 8 visits would do.
#
# A grid is made of Python integers, so far. But any number of it may be a value, an int32 of shape (): then **the grid
# is as long as the data say**. (Such an axis stays "arbitrary": JAX's simulator cannot run it in parallel.)
#
# ```text
#     grid=(4, num_tiles, 2)        num_tiles: known when the call starts
# ```
#
# There are three axes: column blocks j of the result, visits v, and blocks k of K, the last
# one, since sums run along it. Which goes first, j or v? Say that K is a single block, and follow the weights. Here
# they are at each step, for two column blocks and an expert with three tiles:
#
# ```text
#     grid (v, j, k)      w(0)  w(1)    w(0)  w(1)    w(0)  w(1)
#     grid (j, v, k)      w(0)  w(0)  w(0)      w(1)  w(1)  w(1)
# ```
#
# The kernel is given, with the arguments (offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref). It
# is for groups that fill whole tiles, and a K of one block. And the visits need not come in order: one variant makes
# them backwards.


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


def grouped(kernel, meta, x, w, *, bm, bn, bk):
    # meta: a Metadata, of Puzzle 2f      x: (M, K)      w: (G, K, N)      K is a multiple of bk. M and N may be ragged.
    # Return the result, (M, N), of x's dtype, of one pallas_call with three prefetched operands: meta's arrays in
    # their order. x_ref: (bm, bk)      w_ref: (bk, bn)      o_ref: (bm, bn)      acc_ref: (bm, bn), float32, scratch
    # scratch_shapes goes into the grid_spec. Say which axis is parallel.
    pass  # YOUR CODE HERE


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
# expert with rows once.
check("ragged_dot/4", whole_k_product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What moves with a visit? The tile of x, the group of w, the tile of the result: each map looks up the number it needs,
# by v, in one of the three Refs that it gets behind the grid indices. What moves with j and with k is as in any matrix
# product. Column blocks share nothing with each other; visits may share a tile, and blocks of K share a sum.
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
# **Takeaway.** An expert's weights came in once for each column block and stayed for all of its tiles; the expert
# without rows was not visited. Below, watch `w_ref`.

# %%
show(
    whole_k_product,
    normal((384, 256), "bfloat16"),
    normal((4, 256, 384), "bfloat16"),
    np.array([192, 0, 128, 64], np.int32),
)

# %% [markdown]
# ## Puzzle 5: Equal groups
#
# **Goal.** The kernel for groups that fill whole tiles, with as many blocks of K as you like. Practice: the kernel is
# known, only its price is new.
#
# ### Theory
#
# Real weights do not fit. 4096 x 14336 in bfloat16 are 112 MiB, and a block of all of K and 512 columns would be 4 MiB,
# held twice. So K comes in blocks, the sum waits in `acc_ref`, and the kernel is that of matmul.py, with a visit where
# a block of rows was.
#
# With K in one block, the weights of an expert stay from tile to tile. With two blocks or
# more, **the last block of one tile is not the first of the next**, and all of them come again for every tile:
#
# ```text
#     visit                0            1            2           one expert, three tiles
#     K in one block       w            .            .           w once
#     K in two blocks      w0  w1       w0  w1       w0  w1      w three times
# ```
#
# For x it makes no difference: each tile of it comes once for every column block. So larger tiles of rows are what
# pays for cutting K: with bm = 512, weights are read for every 512 tokens, and each byte of them is worth 512 FLOPs.
#
# The result is stored once for a tile, in bfloat16, when the sum is complete. Groups have whole tiles, and no tile is
# nobody's, so nothing has to be masked yet.


# %%
def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
    # Grid (j, v, k).      x_ref: (bm, bk)      w_ref: (bk, bn)      o_ref: (bm, bn), bfloat16
    # acc_ref: (bm, bn), float32
    pass  # YOUR CODE HERE


def equal_groups(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "G K N"],
    group_sizes: Int[Array, "G"],
    *,
    bm: int = 64,
    bn: int = 128,
    bk: int = 128,
) -> BFloat16[Array, "M N"]:
    meta = metadata(group_sizes, num_rows=x.shape[0], bm=bm)
    return grouped(equal_kernel, meta, x, w, bm=bm, bn=bn, bk=bk)  # your wiring, from Puzzle 4


# %%
# Budget for x (384, 512), w (3, 512, 256), group_sizes [128, 128, 128]: hbm_bytes=2_555_904, vmem_bytes=163_840,
# calls=1, output_stores=1, mxu_bits=16. output_stores: in how many steps of a visit the tile may be stored.
check("ragged_dot/5", equal_groups)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three parts, as in basics.py Puzzle 10: at which k does the sum start from 0, what is added at every k, at which k is
# the tile stored? Which axis of your grid is k, and what is its length? (`pl.num_programs(axis)`.) None of the three
# prefetched Refs is needed: the index maps have used them already.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
#     k = ____
#     before = jnp.where(____, 0, acc_ref[...])
#     acc_ref[...] = ____
#
#     @pl.when(____)
#     def _():
#         o_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def equal_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref):
#     k = pl.program_id(2)
#     before = jnp.where(k == 0, 0, acc_ref[...])
#     acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(k == pl.num_programs(2) - 1)
#     def _():
#         o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A batched matrix product in which the batch has any number of rows, as long as they are whole tiles. It
# is what one gets by padding every group, and the padding is what goes away next.

# %% [markdown]
# ## Puzzle 6: Ragged dot
#
# **Goal.** Groups of any size: as many as you like in a tile, empty ones, and rows that are nobody's.
#
# ### Theory
#
# Groups of 100, 100 and 824 rows in tiles of 128: to pad them is to copy 1024 rows into 1152, and back. Ten visits do
# without: they multiply 1280 rows, a quarter more than there are, and copy none. At each of them the MXU multiplies the
# whole tile by the weights of one group; of the product only the group's own rows are kept:
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
# There is **one masked store for each visit**, behind its last block of K. The sum in `acc_ref` is the visit's own: it
# starts anew although the tile stays the same. And `o_ref` is the tile's: it stays from visit to visit. Two buffers of
# one shape, with two lifetimes.
#
# The last tile may hang over the edge of x, where garbage lies; and an expert whose weights have become infinite makes
# the others' rows infinite at its visits, too. Is that a problem? Not if rows are chosen after the product.


# %%
def ragged_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, w_ref, o_ref, acc_ref, *, dims):
    # Grid (j, v, k).      x_ref: (bm, bk)      w_ref: (bk, bn)      o_ref: (bm, bn), bfloat16
    # acc_ref: (bm, bn), float32
    # dims: dimension d of x_ref is summed against e of w_ref, ((d,), (e,)), the pair of matmul.py Puzzle 5
    # own_rows and first_visit are there, from Puzzle 3.
    pass  # YOUR CODE HERE


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
# grid_steps=60, calls=1, output_stores=2, mxu_bits=16. grid_steps: three column blocks, 10 visits, two blocks of K. A
# tile with two groups is visited twice, and not more; it is stored twice, too (output_stores).
check("ragged_dot/6", ragged_product)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take Puzzle 5 and change its last line: where it stores the sum, do what Puzzle 3 did with x + bias. As for the
# garbage below the edge: a row of a product depends on one row of x. Whose rows are those below the edge? And which of
# the three grid axes is the visit now?
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
# **Takeaway.** This is `jax.lax.ragged_dot`, and a tile that two groups share is what raggedness costs: it is visited
# twice. Beside megablox `gmm`, at equal blocks of 256, K = N = 1024 and groups of [100, 200, 500, 224], the TPU
# compiler makes 500 bundles a step of yours and 522 of theirs on a v5e, and 334 against 339 on a v6e. In the picture,
# `w_ref` changes where a group does, and `o_ref` where a tile does.

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
# ## Puzzle 7a: A visit for every group
#
# **Goal.** The visits for the gradient of the weights: every group has one, also a group without rows.
#
# ### Theory
#
# Of `y = ragged(x, w)` there are two gradients. That of x has tiles for blocks, and the visits of Puzzle 2f will do.
# That of w has a block for every expert. Say that all 1024 tokens choose expert 1 of three:
#
# ```text
#     sizes [0, 1024, 0]       dw[0]      dw[1]      dw[2]
#     visits of Puzzle 2f        -          8          -
#     should be                  0        x.T @ g      0
# ```
#
# **A block that no step visits is never written.** dw[0] and dw[2] come back as garbage: with weights of 4096 x 14336
# in bfloat16 that is 112 MiB each, and the optimizer adds it to the weights. So an empty group is visited, too: once,
# in the tile where it would begin; if that tile does not exist, in the last one. Nobody's tiles are left out, as no dw
# needs them.
#
# `jnp.repeat` gives the groups. For the tiles: within a group, visits are numbered one after the other, and so are
# tiles. If group 2 begins in tile 1 and its first visit is number 3, which is its tile at visit 5?


# %%
def every_group_spec(group_sizes: Int[Array, "G"], *, num_rows: int = 1024, bm: int = 128) -> Metadata:
    G, T, offsets = len(group_sizes), pl.cdiv(num_rows, bm), np.asarray(offsets_spec(group_sizes))
    tiles = [[tile for tile, group in visits_by_hand(group_sizes, num_rows, bm) if group == g] for g in range(G)]
    tiles = [mine or [min(offsets[g] // bm, T - 1)] for g, mine in enumerate(tiles)]
    visits = [(g, tile) for g, mine in enumerate(tiles) for tile in mine]
    lists = np.full((2, T + G - 1), -1, np.int32)
    lists[:, : len(visits)] = np.transpose(visits)
    return Metadata(jnp.asarray(offsets), *jnp.asarray(lists), jnp.asarray(len(visits), jnp.int32))


def every_group_metadata(group_sizes, *, num_rows, bm):
    # Return a Metadata. The lists have the length of Puzzle 2c: it is enough for this, too, since an empty group adds
    # one visit, and a group with rows at most one. What stands behind the last visit does not matter, as long as it is
    # a group and a tile that exist.
    pass  # YOUR CODE HERE


def every_group_visits(group_sizes, *, num_rows=1024, bm=128):
    """Your Metadata. Behind the last visit, -1 stands for whatever exists."""
    meta = every_group_metadata(group_sizes, num_rows=num_rows, bm=bm)

    def up_to_the_last(ids, exist):
        behind = jnp.arange(ids.shape[0]) >= meta.num_tiles
        return jnp.where(behind & (ids >= 0) & (ids < exist), -1, ids)

    group_ids = up_to_the_last(meta.group_ids, group_sizes.shape[0])
    return meta._replace(group_ids=group_ids, m_tile_ids=up_to_the_last(meta.m_tile_ids, pl.cdiv(num_rows, bm)))


# %%
check("ragged_dot/7a", every_group_visits)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many visits has each group now, and which function of yours is nearly right? From these counts, where does each
# group's first visit stand in the list? (Puzzle 2a did that with rows.) And a fact: an array indexed by `group_ids`
# looks a number up for every visit at once. An empty group at row `num_rows` begins in a tile that does not exist.
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
#     visits = jnp.maximum(tiles_per_group(group_sizes, num_rows=num_rows, bm=bm), 1)
#     ids = jnp.repeat(jnp.arange(G, dtype=jnp.int32), visits, total_repeat_length=T + G - 1)
#     first_tile, first = offsets[:-1] // bm, jnp.cumsum(visits) - visits
#     tiles = first_tile[ids] + jnp.arange(T + G - 1, dtype=jnp.int32) - first[ids]
#     return Metadata(offsets, ids, jnp.minimum(tiles, T - 1), visits.sum())
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** What a kernel visits is decided by its output: tiles forward, groups backward. An expert that nobody
# chose costs one step, and gets its zeros.

# %% [markdown]
# ## Puzzle 7b: Backward
#
# **Goal.** The gradient of the weights: one product for each group, summed over the rows of that group.
#
# ### Theory
#
# Groups of 100, 28 and 128 rows again, in tiles of 64. Group 1 is 28 rows of tile 1; the other 36 are group 0's. Going
# forward, that cost 36 rows of a product, which were not stored. For the weights the rows are what is summed over:
#
# ```text
#     dw[1] = x[100:128].T @ g[100:128]            (K, 28) (28, N) -> (K, N)
#
#     tile 1      | 36 rows of group 0 | 28 of group 1 |
#     tile.T @ g  = 36 rows' share     +  28 rows' share      in every element
# ```
#
# A masked store is too late: the neighbour's rows are not rows of the result, they are **a part of every element of
# it**. They have to be masked before they are multiplied.
#
# The group is the output block now, and visits, those of Puzzle 7a, run innermost:
#
# ```text
#     grid (i, j, v)      visit           0      1  2      3  4
#                         group           0      0  1      2  2
#                         tile            0      1  1      2  3
# ```
#
# The sum starts at a group's first visit. And below the edge of x and g lies garbage, which may be NaN.


# %%
def dense_loop(x, w, group_sizes):
    """What `ragged_product` computes, in float32, without a kernel: all rows times all weights, and then a choice."""
    rows, end = jnp.arange(x.shape[0])[:, None], 0
    result = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
    for e in range(w.shape[0]):
        start, end = end, end + group_sizes[e]
        result = jnp.where((start <= rows) & (rows < end), jnp.dot(x, w[e], precision="highest"), result)
    return result


def ragged_grads_spec(
    x: BFloat16[Array, "M K"], w: BFloat16[Array, "G K N"], group_sizes: Int[Array, "G"], g: BFloat16[Array, "M N"]
) -> tuple[BFloat16[Array, "M N"], BFloat16[Array, "M K"], BFloat16[Array, "G K N"]]:
    x, w, g = (a.astype(jnp.float32) for a in (x, w, g))
    y, vjp = jax.vjp(lambda x, w: dense_loop(x, w, group_sizes), x, w)
    return tuple(a.astype(jnp.bfloat16) for a in (y, *vjp(g)))


def tgmm_kernel(offsets_ref, group_ids_ref, m_tile_ids_ref, x_ref, g_ref, dw_ref, acc_ref):
    # Grid (i, j, v).      x_ref: (bm, bk), g_ref: (bm, bn), bfloat16, of the tile      dw_ref: (bk, bn), of the group
    # acc_ref: (bk, bn), float32
    pass  # YOUR CODE HERE


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


def row_grads(g, w, group_sizes, *, bm, bn, bk):
    (M, N), (_, K, _) = g.shape, w.shape
    meta = metadata(group_sizes, num_rows=M, bm=bm)
    return pl.pallas_call(
        functools.partial(ragged_kernel, dims=((1,), (1,))),  # your Puzzle 6, summed over N
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
# What do two of Puzzle 3's functions say of visit v, and which list does the second one have to be asked about, if it
# is groups that a sum is for? Both x and g hold the neighbour's rows. In the sum over rows, one factor of 0 is enough
# to remove a neighbour. Is it enough to remove garbage? (0 times NaN is NaN.)
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
# **Takeaway.** `ragged` is a function that JAX can differentiate, and a tile is looked at once for each group in it and
# each block of columns (for dw, once more for an empty group). What remains is to decide who goes where.

# %% [markdown]
# ## Puzzle 8a: Routing
#
# **Goal.** Choose k experts for each token, and weights that add up to 1.
#
# ### Theory
#
# A small matrix, the **router**, gives each token a score for every expert, its logits. The k largest win. How much
# does each of the winners count?
#
# ```text
#     logits               2.0    1.0    0.0   -1.0        k = 2
#     softmax over all     0.64   0.24   0.09   0.03
#     the k best           0.64   0.24                      sum 0.88
# ```
#
# With these weights 12% of the token's result would be lost, and how much is lost would differ from token to token. So
# they are **renormalised**: shares among the experts that were chosen, not among all.
#
# Once the experts are chosen, by their logits, one way is to divide by the sum. But write the quotient down: softmax
# over all has a denominator, common to all experts of a token, and so has the sum of the k best. There is a shorter way
# to the same numbers, which never looks at the experts that were not chosen. (Choosing by the softmax would not do: of
# logits 200 and 300 apart, both shares are 0.)


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
    # Return weights, (T, k), float32, and experts, (T, k), int32: the k best of each row, the best one first.
    # jax.lax.top_k(x, k) gives two arrays: the k largest of each row, largest first, and where they stood.
    pass  # YOUR CODE HERE


def gate(logits, *, k=2):
    return Gate(*route(logits, k=k))


# %%
check("ragged_dot/8a", gate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take the table above: 0.64 / 0.88 is 0.73, and 0.24 / 0.88 is 0.27. The two logits differ by 1. What does softmax make
# of two numbers that differ by 1, whatever else there is? (`jax.nn.softmax(x, axis=)` subtracts the maximum by itself.)
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
# **Takeaway.** Choose first, then compare those that were chosen. With k = 1 the weight is 1, whatever the logits, and
# no gradient tells the router what it did: with one expert a token, the softmax over all is kept.

# %% [markdown]
# ## Puzzle 8b: There and back
#
# **Goal.** Sort the rows by expert, and bring their results back to the tokens.
#
# ### Theory
#
# Each token has k **slots**, numbered token by token: slot s belongs to token s // k. Taken as they come, the slots
# below would fetch expert weights five times; sorted by expert, three times, once each. At 112 MiB an expert, that pays
# for moving some rows:
#
# ```text
#     token             0      1      2                    k = 2
#     experts         [2 0]  [1 2]  [2 1]
#     slot             0 1    2 3    4 5
#
#     order            1      2 5      0 3 4       slots, sorted by expert
#     their experts    0      1 1      2 2 2
#     group_sizes      1      2        3
# ```
#
# Rows `x[order // k]` are then what Puzzle 6 wants. On the way back, sorted rows have to find their slots. `order[p]`
# is the slot at position p; wanted is the position of slot s: the **inverse permutation**. In the example slot 0 stands
# at position 3, and slot 1 at position 0.
#
# With it, rows are fetched, where a scatter (`at[...].set`) would have to write them. There is a short way to it: what
# does sorting `order` itself do?


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


def sort_by_expert(experts, *, num_experts):
    # Return order, (T * k,), and group_sizes, (num_experts,), int32. jnp.argsort leaves slots of one expert in their
    # order; jnp.bincount(numbers, length=n) counts how often each of 0 to n - 1 occurs.
    pass  # YOUR CODE HERE


def combine(rows, order, weights):
    # rows: (T * k, N), sorted by expert. Return (T, N), for each token the weighted sum of the rows of its slots.
    pass  # YOUR CODE HERE


def permuted(x, experts, weights, *, num_experts=5):
    order, group_sizes = sort_by_expert(experts, num_experts=num_experts)
    expert = jnp.repeat(jnp.arange(num_experts), group_sizes, total_repeat_length=order.shape[0])
    rows = (1 + expert)[:, None] * x[order // experts.shape[1]]  # expert e multiplies by 1 + e: one can tell them apart
    return Permuted(order, group_sizes, combine(rows, order, weights))


# %%
# One variant bounds the elements of the largest array on the way: too few for a table of slots against tokens.
check("ragged_dot/8b", permuted)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What is sorted are all slots in one row, and an expert that nobody chose has a size, too. For the way back take the
# example's order, 1 2 5 0 3 4, and write under it the positions 0 to 5. Sort the upper row, and let each number take
# its position along: what stands below now? Which jnp function returns just that?
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
# **Takeaway.** Two argsorts, and a mixture of experts is a permutation around a grouped product. An expert that nobody
# chose is a group of size 0.

# %% [markdown]
# ## Puzzle 9: The MoE layer
#
# **Goal.** The whole layer, with k of any number of experts for each token, and the gradients of everything in it.
#
# ### Theory
#
# ```text
#     x @ router ---> route ---> sort_by_expert
#                       |              | order, group_sizes
#          x ---------- | ---> x[order // k] ---> @ w1 ---> silu ---> @ w2 ---> combine ---> y
#                       |                          ragged             ragged       ^
#                       +--- weights ----------------------------------------------+
# ```
#
# Each token is multiplied by k experts instead of E. A dense reference, every expert for every token, does E / k times
# as many FLOPs: four times for 8 experts and k = 2.
#
# Going backward, `ragged` knows its gradients, and JAX those of the rest. One is worth a thought: `x[order // k]`.
# Every token has gone to k places, so its gradient is the sum of what comes back from there. JAX makes a
# **scatter-add** of it: rows of g, each added to wherever it belongs, two to the same place.
#
# But you know more than JAX does: `order` is a permutation, and its inverse tells where every slot went. So the same
# sum is **a gather**: fetch each token's k rows, and add them. Nothing is written twice, and the order of the additions
# is fixed.


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


def any_order(num_slots):
    """A permutation of the slots that no router has made, and that is not its own inverse."""
    return np.arange(num_slots, dtype=np.int32) * 13 % num_slots


class MoEGrads(NamedTuple):
    y: BFloat16[Array, "T D"]
    dx: BFloat16[Array, "T D"]
    drouter: Float[Array, "D E"]
    dw1: BFloat16[Array, "E D F"]
    dw2: BFloat16[Array, "E F D"]
    spread: Float[Array, "T D"]


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
    results = [r.astype(a.dtype) for r, a in zip((y, *vjp(g.astype(jnp.float32))), (x, x, router, w1, w2), strict=True)]
    expanded = jax.vjp(lambda x: x[any_order(k * x.shape[0]) // k], jnp.zeros(x.shape))
    return MoEGrads(*results, expanded[1](jnp.concatenate([results[0].astype(jnp.float32)] * k))[0])


def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
    # Return y, (T, D), of x's dtype. Use expand (below), ragged (Puzzle 7b), and Puzzles 8a and 8b. The logits are
    # float32; ragged wants bfloat16, and silu is jax.nn.silu. For x @ w1, D is cut into blocks of bk and F into blocks
    # of bn; for h @ w2 it is the other way round, so swap the two sizes, too.
    pass  # YOUR CODE HERE


def expand_grad(g, order, *, k):
    # g: (T * k, D), the gradient of x[order // k]      Return the gradient of x, (T, D), float32.
    pass  # YOUR CODE HERE


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def expand(x, order, k):
    return x[order // k]


def expand_fwd(x, order, k):
    return expand(x, order, k), order


def expand_bwd(k, order, g):
    return expand_grad(g, order, k=k).astype(g.dtype), None


expand.defvjp(expand_fwd, expand_bwd)


def moe_and_grads(x, router, w1, w2, g, *, k: int = 2, bm: int = 32, bn: int = 128, bk: int = 128):
    y, vjp = jax.vjp(lambda *arrays: moe_layer(*arrays, k=k, bm=bm, bn=bn, bk=bk), x, router, w1, w2)
    # and expand_grad by itself: k copies of y for a gradient, and a permutation that no router has made
    spread = expand_grad(jnp.concatenate([y.astype(jnp.float32)] * k), any_order(k * x.shape[0]), k=k)
    return y, *vjp(g), spread


# %%
# Budget for x (48, 128), router (128, 5), w1 (5, 128, 256), w2 (5, 256, 128), g (48, 128): calls=6, mxu_bits=16,
# outside_flops=184_320. outside_flops: of the router's product and its two gradients. Moves, softmax, silu, and all
# work on integers may be outside.
check("ragged_dot/9", moe_and_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `expand_grad` is `combine` with weights of 1: which position has slot s? Sum in float32, as always when many add up.
# The layer is the drawing, read from left to right, one line each. Mind the casts: a bfloat16 x times a float32 router
# is float32 once x is cast; `ragged` returns bfloat16. Its arguments are positional: (x, w, group_sizes, bm, bn, bk),
# where bk cuts what is summed over.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def expand_grad(g, order, *, k):
#     by_slot = g[____].reshape(____)
#     return by_slot.astype(jnp.float32).sum(axis=____)
#
#
# def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
#     weights, experts = route(____, k=k)
#     order, group_sizes = ____
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
# def expand_grad(g, order, *, k):
#     by_slot = g[jnp.argsort(order)].reshape(-1, k, g.shape[1])
#     return by_slot.astype(jnp.float32).sum(axis=1)
#
#
# def moe_layer(x, router, w1, w2, *, k=2, bm=32, bn=128, bk=128):
#     logits = jnp.dot(x.astype(jnp.float32), router)
#     weights, experts = route(logits, k=k)
#     order, group_sizes = sort_by_expert(experts, num_experts=router.shape[1])
#     rows = expand(x, order, k)
#     h = ragged(rows, w1, group_sizes, bm, bn, bk)
#     h = jax.nn.silu(h.astype(jnp.float32)).astype(x.dtype)
#     rows = ragged(h, w2, group_sizes, bm, bk, bn)
#     return combine(rows.astype(jnp.float32), order, weights).astype(x.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A layer with E times the weights and k times the FLOPs, and its gradients. Six `pallas_call`s do all of
# its large products; the rest is bookkeeping on integers and a softmax.

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
# A grouped matrix product for groups of any size, without padding and without a loop over groups: its raggedness lies
# in two lists of integers, which steer the copies and mask the stores. Its gradients. And a mixture of experts that
# agrees with the dense one in value and gradient, also when an expert is left out.
#
# What a real one adds, and where you have the parts already:
#
# - **Expert parallelism.** Experts are spread over devices, and tokens travel: an all-to-all in front of Puzzle 6 and
#   one behind it. Each device then has a range of groups and a sum that is less than its rows, which your rows of
#   nobody's are for.
# - **Capacity.** Fixed numbers of rows for each expert keep shapes static, drop tokens, or pad. That is Puzzle 5.
#   Ragged groups do without: "dropless".
# - **Load balancing.** Nothing in your layer stops all tokens from choosing one expert. An auxiliary loss, or a bias on
#   the logits that follows the load, works on `group_sizes` and on the router, Puzzle 8a; no kernel changes.
# - **Quantised weights.** Weights are what a small batch waits for. In int8 with a scale for each expert and column
#   they are half as long: `matmul.py` Puzzle 10, with the scales of the visit's group picked by Puzzle 3's kind of map.

# %% [markdown]
# **Read next.** `gmm` and `tgmm` in `jax.experimental.pallas.ops.tpu.megablox`: your Puzzles 6 and 7b, with the visits
# of empty groups as an option of one metadata function. `jax.lax.ragged_dot` is the same product as one primitive of
# JAX, for any device.

# %%
progress()
