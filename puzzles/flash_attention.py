# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 4}
# ---

# %% [markdown]
# # Flash attention: from scores to the backward pass and paged decoding
#
# Attention is two matrix products with a softmax between them. You can already write three kernels that compute it. For
# one head over 131,072 tokens they also write 96 GiB of scores and probabilities. In thirteen puzzles you build the
# kernels that write none of it. What it keeps is the result, 32 MiB, and 0.5 MiB more. Your kernels are causal,
# take any length, have a backward pass, share keys among heads, follow block masks, and read a cache in pages. After
# that you can read splash attention, ragged paged attention and tokamax.
#
# You need `softmax.py` (above all Puzzle 3, the online softmax), and Puzzles 1 to 5 and 11 of `matmul.py` (the MXU,
# dimension semantics, `dot_general`, scalar prefetch). All arrays are (batch, head, token, D), and D is 64 or 128.

# %%
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_puzzles import Budget, check, hint, normal, progress, setup, show, solved_function, tpu_report, unwritten

setup()

# %% [markdown]
# ## Puzzle 1: Attention scores
#
# **Goal.** For every head of every sequence, compute the score of each query with each key: their dot product, scaled.
# Write the kernel and the two index maps.
#
# ### Theory
#
# A token asks something: its **query**, a row of `q`. It also offers something: its **key**, a row of `k`. Their dot
# product, the **score**, says how well the two match.
#
# Take a query and a key of 128 elements, each about 1 in size. Their dot product is about sqrt(128) = 11.3 in size. Two
# scores that are 11.3 apart become probabilities that differ by a factor of 81,000: one key takes all, and the others
# get next to no gradient. Divide by sqrt(D), and scores are about 1 again, whatever D is.
#
# ```text
#     q (B, H, Sq, D)        k (B, H, Skv, D)         scores (B, H, Sq, Skv)
#
#     for one b and one h:     i ->  queries in blocks of bq rows
#                              j ->  keys in blocks of bkv rows
#
#                     k rows  0    1    2
#                           +----+----+----+
#     q rows            0   |    |    |    |        each square: (bq, bkv),
#                           +----+----+----+        all of D summed in one product
#                       1   |    |    |    |
#                           +----+----+----+
# ```
#
# *Where* you scale matters too. 128**-0.5 is 0.08838..., which is no power of two. If you multiply a bfloat16 query by
# it, each of its 128 elements is rounded once more. The scores are float32: scale those, and you lose next to nothing.


# %%
def scores_spec(q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"]) -> Float[Array, "B H Sq Skv"]:
    scale = q.shape[-1] ** -0.5
    return jnp.einsum("bhqd,bhkd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) * scale


# %%
def block_scores(q, k, scale):
    # q: (bq, D)      k: (bkv, D), same dtype      Return scale times the scores: (bq, bkv), float32.
    # This function goes into every kernel of this notebook. matmul.py Puzzle 5: jax.lax.dot_general(a, b, dims, ...)
    pass  # YOUR CODE HERE


def scores_kernel(q_ref, k_ref, s_ref):
    # q_ref: (bq, D)      k_ref: (bkv, D)      s_ref: (bq, bkv), float32
    pass  # YOUR CODE HERE


def scores_q_map(b, h, i, j):
    # Return the number of the block of q, (1, 1, bq, D), that this step needs: four numbers.
    pass  # YOUR CODE HERE


def scores_k_map(b, h, i, j):
    # Return the number of the block of k, (1, 1, bkv, D), that this step needs.
    pass  # YOUR CODE HERE


# %%
def scores(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], *, bq: int = 64, bkv: int = 128
) -> Float[Array, "B H Sq Skv"]:
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    return pl.pallas_call(
        scores_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)),  # b, h, i, j
        in_specs=[  # None: a dimension of 1 that the kernel does not see (basics.py Puzzle 11)
            pl.BlockSpec((None, None, bq, D), scores_q_map),
            pl.BlockSpec((None, None, bkv, D), scores_k_map),
        ],
        out_specs=pl.BlockSpec((None, None, bq, bkv), lambda b, h, i, j: (b, h, i, j)),
        out_shape=jax.ShapeDtypeStruct((B, H, Sq, Skv), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
    )(q, k)


# %%
# Budget for q (2, 3, 192, 128), k (2, 3, 320, 128): hbm_bytes=3_244_032, vmem_bytes=163_840, calls=1, mxu_bits=16. 320
# keys in blocks of 128: the last block hangs over the edge, and that part of it is not written back.
check("flash_attention/1", scores)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the product: which dimension of each block has size D? (`dot_general` returns what is left of `q`, then what is
# left of `k`, so you need not transpose anything.) How many bits do the operands have, and how many the result? For the
# maps, walk over the drawing. Which of b, h, i, j say which matrix it is? Which one says how far down, and which one
# how far across?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def block_scores(q, k, scale):
#     dims = ((____, ____), ((), ()))
#     return jax.lax.dot_general(q, k, dims, preferred_element_type=____) * ____
#
#
# def scores_kernel(q_ref, k_ref, s_ref):
#     s_ref[...] = block_scores(____, ____, q_ref.shape[1] ** ____)
#
#
# def scores_q_map(b, h, i, j):
#     return (____, ____, ____, 0)
#
#
# def scores_k_map(b, h, i, j):
#     return (____, ____, ____, 0)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def block_scores(q, k, scale):
#     dims = (((1,), (1,)), ((), ()))
#     return jax.lax.dot_general(q, k, dims, preferred_element_type=jnp.float32) * scale
#
#
# def scores_kernel(q_ref, k_ref, s_ref):
#     s_ref[...] = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
#
#
# def scores_q_map(b, h, i, j):
#     return (b, h, i, 0)
#
#
# def scores_k_map(b, h, i, j):
#     return (b, h, j, 0)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** One call makes six matrices of scores: batch and head are grid axes like any other. The scores are the
# largest thing here, 1.4 MiB beside 0.8 MiB of `q` and `k`, and they grow with the square of the length. Hold that
# thought until Puzzle 3.

# %% [markdown]
# ## Puzzle 2: The causal mask
#
# **Goal.** Compute the same scores, but -inf wherever a query would look into its future.
#
# ### Theory
#
# A language model guesses the next token, so no query may see a later key. (It may see its own.) For 131,072 tokens, a
# mask of booleans has 17,179,869,184 entries, 16 GiB at a byte each: more than a v5e has. You need not store it. Two
# **positions** say whether a key is later than a query, and a kernel knows from the number of its block which rows it
# holds. A hidden score becomes -inf: under a softmax, that is probability 0.
#
# One complication: when a model writes text, the queries are often only the end of the sequence, and the keys of
# everything before are in a cache. So the last query has the position of the last key:
#
# ```text
#                   key       0    1    2    3    4    5        Skv = 6
#     query 0, position 2     s    s    s   -inf -inf -inf      Sq = 4
#     query 1, position 3     s    s    s    s   -inf -inf
#     query 2, position 4     s    s    s    s    s   -inf
#     query 3, position 5     s    s    s    s    s    s
# ```
#
# With more queries than keys, the first queries have positions below 0. They see nothing at all.


# %%
def causal_scores_spec(q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"]) -> Float[Array, "B H Sq Skv"]:
    Sq, Skv = q.shape[2], k.shape[2]
    position = jnp.arange(Sq)[:, None] + Skv - Sq
    return jnp.where(jnp.arange(Skv)[None, :] <= position, scores_spec(q, k), -jnp.inf)


# %%
def column(n):
    """Given. (n, 1), int32: 0, 1, 2, ... down the rows. jnp.arange(n)[:, None] is the same, and slower: Puzzle 6."""
    return jax.lax.broadcasted_iota(jnp.int32, (n, 1), 0)


def hide_after(s, last_seen, first_key):
    # s: (bq, bkv), scores      first_key: the position of the key in column 0
    # last_seen: (bq, 1), int32, the position of the last key that the query in each row may see; or one number for all
    # Return s, with -inf for every key after that one.
    pass  # YOUR CODE HERE


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    # Grid (b, h, i, j), Refs as in Puzzle 1. offset: Skv - Sq, the position of query 0. Use block_scores and column.
    pass  # YOUR CODE HERE


def causal_scores(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], *, bq: int = 64, bkv: int = 128
) -> Float[Array, "B H Sq Skv"]:
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    return pl.pallas_call(
        functools.partial(causal_scores_kernel, offset=Skv - Sq),
        grid=(B, H, pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)),
        in_specs=[
            pl.BlockSpec((None, None, bq, D), scores_q_map),
            pl.BlockSpec((None, None, bkv, D), scores_k_map),
        ],
        out_specs=pl.BlockSpec((None, None, bq, bkv), lambda b, h, i, j: (b, h, i, j)),
        out_shape=jax.ShapeDtypeStruct((B, H, Sq, Skv), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
    )(q, k)


# %%
# Budget for q (1, 2, 192, 128), k (1, 2, 320, 128): hbm_bytes=1_081_344, vmem_bytes=163_840, calls=1, mxu_bits=16.
check("flash_attention/2", causal_scores)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which query of the whole sequence is row r of block i, and what is its position? Which key is column c of block j?
# (Grid axes are counted from 0, so i is axis 2. A column beside a row becomes the table, as in softmax.py Puzzle 5.)
# Then look at the drawing's diagonal: does a query see the key at its own position?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def hide_after(s, last_seen, first_key):
#     keys = first_key + jnp.arange(____)[None, :]                     # (1, bkv)
#     return jnp.where(____, s, ____)
#
#
# def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     positions = ____ + column(____)                           # (bq, 1)
#     s = ____
#     s_ref[...] = hide_after(s, ____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def hide_after(s, last_seen, first_key):
#     keys = first_key + jnp.arange(s.shape[1])[None, :]
#     return jnp.where(keys <= last_seen, s, -jnp.inf)
#
#
# def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     positions = pl.program_id(2) * bq + offset + column(bq)
#     s = block_scores(q_ref[...], k_ref[...], D**-0.5)
#     s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A mask is a question about positions, and costs no byte. But 30% of this table is -inf. With as many
# queries as keys, it is half. You computed all of that anyway, and wrote it. Puzzle 6 saves you the trouble.

# %% [markdown]
# ## Puzzle 3: Naive attention
#
# **Goal.** Build causal attention from three kernels: your scores, a softmax, and the mean of the values, weighted by
# the softmax. Write the third kernel, and put them together.
#
# ### Theory
#
# You have nearly all the pieces. What is new: a rule about a dtype, and what it all costs.
#
# ```text
#     q, k --> [ scores ] --> S --> [ softmax ] --> P --> [ P @ v ] --> o
#                              |    |            |    |
#                              v    ^            v    ^
#     HBM ------------------- 4 -- 4 ---------- 2 -- 2 ------------  bytes per score, bfloat16 inputs
# ```
#
# Every score goes to HBM as a float32 and comes back. Its probability goes out as a bfloat16 and comes back: 12 bytes
# in all. For each score you do 2 D FLOPs in each of the two products, 512 in all with D = 128. That makes 43 FLOPs per
# byte, and a v5e needs 240 to keep its MXU busy (matmul.py Puzzle 4). The MXU idles four fifths of the time.
#
# **Store the probabilities in the dtype of `v`.** The second product wants narrow operands on both sides, and rounding
# moves a p by 1 part in 256 at most, some up and some down. The sum over the keys needs more bits, so `acc_ref` is
# float32. (The blocks of keys are grid axis 3, and `bkv` divides Skv here.)


# %%
def attention_spec(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], v: Float[Array, "B H Skv D"], *, causal: bool = False
) -> Float[Array, "B H Sq D"]:
    return weigh_spec(causal_scores_spec(q, k) if causal else scores_spec(q, k), v)


def weigh_spec(s: Float[Array, "B H Sq Skv"], v: Float[Array, "B H Skv D"]) -> Float[Array, "B H Sq D"]:
    e = jnp.exp(s - jnp.maximum(s.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    total = e.sum(axis=-1, keepdims=True)
    o = jnp.einsum("bhqk,bhkd->bhqd", e / jnp.where(total == 0, 1, total), v.astype(jnp.float32))
    return o.astype(v.dtype)  # 0 for a query that sees no key


causal_attention_spec = functools.partial(attention_spec, causal=True)


# %%
def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    # p_ref: (bq, bkv), block (i, j) of the probabilities, in the dtype of v      v_ref: (bkv, D), block j of v
    # o_ref: (bq, D), block i of the result, the same one for every j      acc_ref: (bq, D), float32. j is grid axis 3.
    pass  # YOUR CODE HERE


def naive_attention(q, k, v, *, bq=64, bkv=128):
    # Return causal attention, (B, H, Sq, D), by way of causal_scores, softmax_rows and weigh. The last two are below.
    pass  # YOUR CODE HERE


# %%
def softmax_kernel(s_ref, p_ref):
    # Given: softmax.py Puzzle 1. Whole rows, (bq, Skv); every row has a score that is not -inf.
    e = jnp.exp(s_ref[...] - s_ref[...].max(axis=1, keepdims=True))
    p_ref[...] = (e / e.sum(axis=1, keepdims=True)).astype(p_ref.dtype)


def softmax_rows(s: Float[Array, "B H Sq Skv"], dtype, *, bq: int) -> Float[Array, "B H Sq Skv"]:
    B, H, Sq, Skv = s.shape
    block = pl.BlockSpec((None, None, bq, Skv), lambda b, h, i: (b, h, i, 0))
    return pl.pallas_call(
        softmax_kernel,
        grid=(B, H, pl.cdiv(Sq, bq)),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(s.shape, dtype),
    )(s)


def weigh(
    p: Float[Array, "B H Sq Skv"], v: Float[Array, "B H Skv D"], *, bq: int, bkv: int
) -> Float[Array, "B H Sq D"]:
    (B, H, Sq, Skv), D = p.shape, v.shape[3]
    return pl.pallas_call(
        weigh_kernel,
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[
            pl.BlockSpec((None, None, bq, bkv), lambda b, h, i, j: (b, h, i, j)),
            pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((B, H, Sq, D), v.dtype),
        scratch_shapes=[pltpu.VMEM((bq, D), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
    )(p, v)


# %%
# Budget for q (1, 2, 192, 128), k (1, 2, 384, 128), v (1, 2, 384, 128): hbm_bytes=3_145_728, vmem_bytes=294_912,
# calls=3, output_stores=1, mxu_bits=16. calls: one for each kernel. hbm_bytes: k and v come in again for every block of
# queries.
check("flash_attention/3", naive_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# At step j, which blocks of the arrays in the drawing are in VMEM, and for how many steps does the block of the result
# stay? When is `acc_ref` complete? (A Ref takes only its own dtype, so cast what you store.) For the composition,
# follow the drawing from left to right: how many bytes does a probability have on its way?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
#     j = pl.program_id(3)
#     ____                                            # zero, at the first step
#
#     acc_ref[...] += ____
#
#     ____                                            # store, at the last step
#
#
# def naive_attention(q, k, v, *, bq=64, bkv=128):
#     s = ____
#     p = softmax_rows(s, ____, bq=bq)
#     return ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
#     j = pl.program_id(3)
#
#     @pl.when(j == 0)
#     def _():
#         acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
#
#     acc_ref[...] += jnp.dot(p_ref[...], v_ref[...], preferred_element_type=jnp.float32)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = acc_ref[...].astype(o_ref.dtype)
#
#
# def naive_attention(q, k, v, *, bq=64, bkv=128):
#     s = causal_scores(q, k, bq=bq, bkv=bkv)
#     p = softmax_rows(s, v.dtype, bq=bq)
#     return weigh(p, v, bq=bq, bkv=bkv)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** It is right, and it does not scale. The next cell says what it would cost for one head and one sequence
# of 131,072 tokens, with D = 128 in bfloat16. (No array is allocated: `jax.eval_shape` says which shapes would come
# out.)


# %%
def naive_budget(B, H, Sq, Skv, D, bq, itemsize=2):
    """What the three kernels may move."""
    once = 2 * B * H * Sq * D * itemsize  # q in, the result out
    again = 2 * B * H * pl.cdiv(Sq, bq) * Skv * D * itemsize  # k and v, again for every block of queries
    rows = 2 * bq * Skv * (4 + itemsize)  # the VMEM of softmax_rows; the others take less
    hbm_bytes = once + again + B * H * Sq * Skv * (4 + 4 + 2 * itemsize)
    return Budget(hbm_bytes, vmem_bytes=rows, calls=3, output_stores=1, mxu_bits=8 * itemsize)


long = jax.ShapeDtypeStruct((1, 1, 131_072, 128), jnp.bfloat16)
for name, array in [("q, k, v and o, each", long), ("S", jax.eval_shape(causal_scores_spec, long, long))]:
    print(f"{name:>20}: {array.size * array.dtype.itemsize / 2**30:8.3f} GiB")
naive_bytes = naive_budget(1, 1, 131_072, 131_072, 128, 512).hbm_bytes
time_ms = naive_bytes / 820e9 * 1e3
print(f"{'moved, blocks of 512':>20}: {naive_bytes / 2**30:8.3f} GiB, {time_ms:.0f} ms at 820 GB/s (v5e)")

# %% [markdown]
# A v5e has 16 GB of HBM. `S` alone is four times that, for a single head, and `P` is another 32 GiB. What you asked for
# is small: `q`, `k`, `v` and `o` are each 1/2048 of `S`. (Whole rows in blocks of 512 would take 768 MiB of VMEM, too.)

# %% [markdown]
# ## Puzzle 4: One block of queries
#
# **Goal.** Compute attention for one block of queries in one kernel. The scores live and die in VMEM.
#
# ### Theory
#
# For a row of 131,072 keys, Puzzle 3 keeps 512 KiB of scores, and makes D numbers out of them. Nobody asked for the row
# of probabilities. You only need the mean of the values, weighted by them:
#
# ```text
#              exp(s0 - m) v0 + exp(s1 - m) v1 + exp(s2 - m) v2 + ...         acc
#         o = --------------------------------------------------------   =   -----
#                   exp(s0 - m) + exp(s1 - m) + exp(s2 - m) + ...              l
# ```
#
# Below the bar is the `l` of softmax.py Puzzle 3. It grew block by block. When a larger maximum turned up, you rescaled
# it with one factor. Above the bar is the same sum, but with a vector in each term.
#
# ```text
#     step j:   q . k_j --> s (bq, bkv) --> p (bq, bkv) --> p @ v_j
#                               |              |               |
#               m (bq, 1) <-----+    l (bq, 1) +    acc (bq, D)+         scratch: carried from step to step
#
#     last step:                                o = acc / l
# ```
#
# So what has to happen to `acc` when the maximum grows? Then you need a score in its own step only. You keep D + 2
# numbers per row instead of 512 KiB. (Dtypes as in Puzzle 3: round `p` to the dtype of `v` for the product; `l` and
# `acc` stay float32.)


# %%
def one_block_spec(q: Float[Array, "bq D"], k: Float[Array, "Skv D"], v: Float[Array, "Skv D"]) -> Float[Array, "bq D"]:
    return attention_spec(q[None, None], k[None, None], v[None, None])[0, 0]


def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    # q_ref: (bq, D), the same at every step      k_ref, v_ref: (bkv, D), block j      o_ref: (bq, D)
    # m_ref, l_ref: (bq, 1)      acc_ref: (bq, D)      scratch, all three float32. Use your block_scores. No mask here.
    pass  # YOUR CODE HERE


def one_block(
    q: Float[Array, "bq D"], k: Float[Array, "Skv D"], v: Float[Array, "Skv D"], *, bkv: int = 128
) -> Float[Array, "bq D"]:
    (bq, D), Skv = q.shape, k.shape[0]
    return pl.pallas_call(
        one_block_kernel,
        grid=(Skv // bkv,),
        in_specs=[
            pl.BlockSpec((bq, D), lambda j: (0, 0)),
            pl.BlockSpec((bkv, D), lambda j: (j, 0)),
            pl.BlockSpec((bkv, D), lambda j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((bq, D), lambda j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((bq, D), q.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, 1), jnp.float32),
            pltpu.VMEM((bq, 1), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
    )(q, k, v)


# %%
# Budget for q (64, 128), k (640, 128), v (640, 128): hbm_bytes=360_448, vmem_bytes=197_120, calls=1, output_stores=1,
# mxu_bits=16. hbm_bytes: q, k, v and the result, each once.
check("flash_attention/4", one_block)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from your online kernel, softmax.py Puzzle 3, with your `block_scores` in place of `x`. It shows when the
# buffers get their starting values, which ones, and how `l` follows a maximum that grows. Then look at the fraction
# above. Which factor does each term of `acc` share with its partner in `l`? So what happens to the old `acc` before you
# add to it? (The first step needs no case of its own. There the old maximum is -inf, and exp(-inf) is 0.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     j = pl.program_id(0)
#     ____                                             # starting values, for three buffers
#
#     s = ____
#     m_old = m_ref[...]
#     m_new = ____
#     p = ____                                         # (bq, bkv)
#     rescale = ____                                      # (bq, 1)
#     l_ref[...] = l_ref[...] * rescale + ____
#     pv = jnp.dot(____, v_ref[...], preferred_element_type=jnp.float32)
#     acc_ref[...] = ____ + pv
#     m_ref[...] = m_new
#
#     ____                                             # the last step
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def one_block_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     j = pl.program_id(0)
#
#     @pl.when(j == 0)
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     s = block_scores(q_ref[...], k_ref[...], q_ref.shape[1] ** -0.5)
#     m_old = m_ref[...]
#     m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
#     p = jnp.exp(s - m_new)
#     rescale = jnp.exp(m_old - m_new)
#     l_ref[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)
#     pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
#     acc_ref[...] = acc_ref[...] * rescale + pv
#     m_ref[...] = m_new
#
#     @pl.when(j == pl.num_programs(0) - 1)
#     def _():
#         o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** That is flash attention: a softmax that never sees its whole row, between two products that never leave
# the chip. The rest of this notebook makes it wide, fast, sparse and differentiable. Watch `k` and `v` stream by while
# everything else stays:

# %%
show(one_block, normal((64, 128), "bfloat16"), normal((640, 128), "bfloat16"), normal((640, 128), "bfloat16"))

# %% [markdown]
# ### Between the puzzles: the same step, tuned
#
# From now on you get what you wrote in Puzzle 4 as three functions: `start` for the first step, `online_step` for every
# step, and `normalized`, which is acc / l, for the last one.
#
# One thing changes. exp(x) is exp2(x * LOG2_E), and that multiplication happens for every score. But you multiply every
# score by D**-0.5 anyway. Multiply by `D**-0.5 * LOG2_E` instead: `online_step` wants scores in base 2.


# %%
LOG2_E = 1.4426950408889634
FLOOR = float(jnp.finfo(jnp.float32).min)  # the most negative float32


def start(m_ref, l_ref, acc_ref):
    """The starting values. m starts from FLOOR, not -inf: in a row that sees nothing, s - m would be NaN (Puzzle 7)."""
    m_ref[...] = jnp.full(m_ref.shape, FLOOR)
    l_ref[...] = jnp.zeros(l_ref.shape)
    acc_ref[...] = jnp.zeros(acc_ref.shape)


def lanes(x, n):
    # x: (rows, 128), a column repeated 128 times. Repeats it n times instead: (rows, n). (rows, 1) stays as it is.
    return x if x.shape[1] == 1 else jnp.tile(x, (1, pl.cdiv(n, 128)))[:, :n]


def online_step(s, v, m_ref, l_ref, acc_ref):
    """Adds a block of scores, s: (bq, bkv), float32, times LOG2_E, and its values, v: (bkv, D), to m, l and acc.

    m_ref, l_ref: (bq, 128), each number 128 times in its row (why: end of Puzzle 5)      acc_ref: (bq, D)
    """
    m_old = m_ref[...]
    m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
    p = jnp.exp2(s - lanes(m_new, s.shape[1]))
    rescale = jnp.exp2(m_old - m_new)
    l_ref[...] = l_ref[...] * rescale + p.sum(axis=1, keepdims=True)
    pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    acc_ref[...] = acc_ref[...] * lanes(rescale, v.shape[1]) + pv
    m_ref[...] = m_new


def normalized(acc_ref, l_ref):
    """acc / l: (bq, D), float32. 0 in rows that have seen nothing, where l is 0."""
    l = l_ref[...]
    return acc_ref[...] / lanes(jnp.where(l == 0, 1, l), acc_ref.shape[1])


# %% [markdown]
# ## Puzzle 5: Flash attention, forward
#
# **Goal.** Do Puzzle 4 for every block of queries of every head of every sequence, in one call. Write the kernel and
# the call.
#
# ### Theory
#
# Puzzle 4 serves one block of queries. One head over 131,072 tokens has 256 of them, with 512 queries each; 8 sequences
# of 32 heads have 65,536. No block needs anything from another, so each gets an index of the grid. **The grid becomes
# (b, h, i, j)**: i counts blocks of queries, and j, innermost, blocks of keys.
#
# ```text
#     b h i j       0 0 0 0   0 0 0 1   0 0 0 2  |  0 0 1 0   0 0 1 1   0 0 1 2  |  0 0 2 0 ...
#     q, o          block 0 ------------------>  |  block 1 ------------------>  |  block 2
#     k, v             0         1         2     |     0         1         2     |     0
#     m, l, acc     start --- carried --- store  |  start --- carried --- store  |  start
# ```
#
# All blocks of queries use the same scratch. It carries sums from one step to the next, so the steps between two | have
# to run in order. Steps on different sides of a | need not. Where a chip has two cores, each can take some:
# `dimension_semantics` says along which axes.
#
# And the bytes: `k` and `v`, 64 MiB for that head, are fetched once for each block of queries. In blocks of 512 that
# makes 16 GiB.


# %%
def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    # Grid (b, h, i, j). q_ref, o_ref: (bq, D)      k_ref, v_ref: (bkv, D)      acc_ref: (bq, D), float32
    # m_ref, l_ref: (bq, 128), float32. Use block_scores, start, online_step and normalized.
    pass  # YOUR CODE HERE


def flash_forward(q, k, v, *, bq=64, bkv=128):
    # Return the result of one pallas_call of flash_kernel, like q in shape and dtype. bkv divides Skv, bq need not
    # divide Sq. Copy the call of Puzzle 1, scores. What changes: the blocks, the scratch, and which axes are parallel.
    pass  # YOUR CODE HERE


# %%
# Budget for q (2, 3, 192, 128), k (2, 3, 384, 128), v (2, 3, 384, 128): hbm_bytes=4_128_768, vmem_bytes=294_912,
# calls=1, output_stores=1, serial_steps=3. hbm_bytes: q and the result once, k and v once for every block of queries.
check("flash_attention/5", flash_forward)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the kernel: which of b, h, i, j tells you that a new block of queries has begun, and that it is done? Base 2 costs
# nothing: which argument of `block_scores` takes care of it? For the call: which indices does the block of `k` follow
# in the drawing, and which ones does the result follow? Two steps that share a block of the result must stay in order.
# Along which axis do such steps lie?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     j, D = pl.program_id(3), q_ref.shape[1]
#     ____                                                      # starting values
#     s = block_scores(q_ref[...], k_ref[...], ____)
#     online_step(____, ____, m_ref, l_ref, acc_ref)
#     ____                                                      # the last step
#
#
# def flash_forward(q, k, v, *, bq=64, bkv=128):
#     (B, H, Sq, D), Skv = q.shape, k.shape[2]
#     q_block = pl.BlockSpec((None, None, bq, D), ____)
#     kv_block = pl.BlockSpec((None, None, bkv, D), ____)
#     return pl.pallas_call(
#         flash_kernel,
#         grid=____,
#         in_specs=[q_block, kv_block, kv_block],
#         out_specs=____,
#         out_shape=____,
#         scratch_shapes=____,
#         compiler_params=pltpu.CompilerParams(dimension_semantics=____),
#     )(q, k, v)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     j, D = pl.program_id(3), q_ref.shape[1]
#
#     @pl.when(j == 0)
#     def _():
#         start(m_ref, l_ref, acc_ref)
#
#     s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
#     online_step(s, v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
#
#
# def flash_forward(q, k, v, *, bq=64, bkv=128):
#     (B, H, Sq, D), Skv = q.shape, k.shape[2]
#     q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
#     kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, j, 0))
#     return pl.pallas_call(
#         flash_kernel,
#         grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
#         in_specs=[q_block, kv_block, kv_block],
#         out_specs=q_block,
#         out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
#         scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (128, 128, D)],
#         compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
#     )(q, k, v)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You have one kernel for any number of sequences and heads. It is fast, too. For 4 heads x 2048 tokens x
# 128 in blocks of 512, in bfloat16, these are the bundles per step, as the report below counts them:
#
# ```text
#                                                       v5e     v6e
#     yours: m and l 128 times in each row             1293    1047
#     the same with m and l as (bq, 1)                 2054    1876
#     JAX's own flash attention, without a scale       1416    1072
#     what the MXU needs for the two products          1024     512
# ```
#
# Why does scratch hold `m` and `l` 128 times? A vector register is 8 rows of 128 **lanes**, one for each column. A
# column of 512 numbers sits in one lane of 64 registers. Before you can subtract it from scores, each number has to be
# copied into all 128 lanes, at every step. With 128 copies in store, a row of scores can use them as they are. (Try
# (bq, 1) in your call: the result is the same.)
#
# On a v6e, the MXU would be done after 512 bundles, and you take 1047. (At its peak it would need 256. But its MXU is
# 256 wide, and D = 128 fills half of it.) The rest is arithmetic on single scores. A row's maximum has to wait for all
# of its scores. The exponentials have to wait for the maximum. The second product has to wait for the exponentials.
# Nobody likes queues.

# %%
tokens = jax.ShapeDtypeStruct((1, 4, 2048, 128), jnp.bfloat16)
tpu_report(flash_forward, tokens, tokens, tokens, bq=512, bkv=512, tpu="v6e", simulate=False)

# %% [markdown]
# Here is the bill of Puzzle 3 again, for one head over 131,072 tokens:


# %%
def flash_budget(B, H, Sq, Skv, D, bq, bkv, itemsize=2):
    """q and the result once, k and v once for every block of queries; VMEM for blocks twice, and for scratch."""
    hbm_bytes = 2 * B * H * (Sq + pl.cdiv(Sq, bq) * Skv) * D * itemsize
    vmem_bytes = 2 * 2 * (bq + bkv) * D * itemsize + 4 * bq * (128 + 128 + D)
    return Budget(hbm_bytes, vmem_bytes, calls=1, output_stores=1, serial_steps=Skv // bkv)


flash_bytes = flash_budget(1, 1, 131_072, 131_072, 128, 512, 512).hbm_bytes
print(f"three kernels: {naive_bytes / 2**30:6.1f} GiB moved, and 96 GiB of S and P to keep")
print(f"flash forward: {flash_bytes / 2**30:6.1f} GiB moved, and nothing to keep but the result, 0.03 GiB")

# %% [markdown]
# ## Puzzle 6: Causal flash attention
#
# **Goal.** Write causal attention that neither computes nor fetches a block that no query may see: the kernel, and the
# index map of keys and values.
#
# ### Theory
#
# With 256 blocks of queries and as many of keys there are 65,536 pairs. In 32,640 of them every key is in the future,
# and every probability is 0: half of the work, for nothing.
#
# ```text
#     j ->   0    1    2    3           #  every query of the block sees every key: no mask
#     i  0   \    .    .    .           \  some do, some do not: mask
#        1   #    \    .    .           .  no query sees any key: skip
#        2   #    #    \    .
#        3   #    #    #    \           (bq = bkv, Sq = Skv; in general the \ may be several, or none)
# ```
#
# A `pl.when` skips the body of a step, but not the copy: the block of a dead step still comes in, because the index map
# asks for it. **Only the index map can save the bytes.** In a dead step, let it ask for the block that is already in
# VMEM, and nothing is copied (as at the end of a row in matmul.py Puzzle 11).
#
# A step that skips both still takes some 0.25 us, beside 0.86 us for the body of Puzzle 5 on a v5e.
#
# To recognise a dead block (.), compare the position of one query with the position of one key. Which query and which
# key: the first or the last of the block? (A second comparison finds the # blocks. You may mask them, too: the result
# is the same, and the kernel takes 2% more bundles.)


# %%
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    # Refs and grid as in Puzzle 5. offset: Skv - Sq, the position of query 0, not negative. Use your hide_after.
    pass  # YOUR CODE HERE


def causal_kv_map(i, j, bq, bkv, offset):
    # Return the number of the block of keys and values, counted in blocks of bkv, that is in VMEM at step (i, j).
    pass  # YOUR CODE HERE


def flash_causal(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq D"]:
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    offset = Skv - Sq
    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), lambda b, h, i, j: (b, h, causal_kv_map(i, j, bq, bkv, offset), 0))
    return pl.pallas_call(
        functools.partial(causal_kernel, offset=offset),
        grid=(B, H, pl.cdiv(Sq, bq), Skv // bkv),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=q_block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (128, 128, D)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %%
# Budget for q (1, 2, 320, 128), k (1, 2, 384, 128), v (1, 2, 384, 128): hbm_bytes=1_638_400, vmem_bytes=294_912,
# calls=1, output_stores=1, flops=99_000_000, serial_steps=3. hbm_bytes and flops: what the live blocks take.
check("flash_attention/6", flash_causal)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down four positions in terms of i, j, bq, bkv and offset: those of the first and the last query of block i, and
# of the first and the last key of block j. A block is dead if even the pair with the best chance is hidden: which
# query, and which key? It needs no mask if even the pair with the worst chance is seen. For the map: which is the last
# block of keys that block i of queries needs? Any later step of the same i may ask for that one again, because it is
# still in VMEM. (Dead steps, too, have to do the first and the last thing that a kernel does.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     first_query, first_key = ____, ____
#     sees_all = ____ <= first_query
#     sees_some = first_key <= ____
#     ____                                                     # starting values
#
#     @pl.when(sees_all)
#     def _():
#         ____
#
#     @pl.when(____ & jnp.logical_not(____))
#     def _():
#         s = ____
#         online_step(hide_after(s, ____, ____), ____, m_ref, l_ref, acc_ref)
#
#     ____                                                     # the last step
#
#
# def causal_kv_map(i, j, bq, bkv, offset):
#     return jnp.minimum(j, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     first_query, first_key = i * bq + offset, j * bkv
#     sees_all = first_key + bkv - 1 <= first_query
#     sees_some = first_key <= first_query + bq - 1
#     scale = D**-0.5 * LOG2_E
#
#     @pl.when(j == 0)
#     def _():
#         start(m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_all)
#     def _():
#         online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = block_scores(q_ref[...], k_ref[...], scale)
#         positions = first_query + column(bq)
#         online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
#
#
# def causal_kv_map(i, j, bq, bkv, offset):
#     return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** In blocks of 512, over 4 heads x 2048 tokens, these are the bundles of the mean step:
#
# ```text
#                                                        v5e     v6e
#     yours                                              958     779
#     with the mask on every live block                  976     794
#     dead blocks masked, not skipped                   1404    1138
#     JAX's own                                          969     798
# ```
#
# The column of positions matters, too. `jnp.arange(bq)[:, None]` starts out as a row, and the row has to be turned. The
# most expensive step then takes 1802 bundles on a v5e instead of 1568. `column` makes a column at once, with
# `jax.lax.broadcasted_iota`, which counts along the dimension that you tell it.
#
# Look at the strips of `k` and `v` below: nothing moves in dead steps.

# %%
show(
    flash_causal,
    normal((1, 1, 512, 128), "bfloat16"),
    normal((1, 1, 512, 128), "bfloat16"),
    normal((1, 1, 512, 128), "bfloat16"),
    bq=128,
)

# %% [markdown]
# ## Puzzle 7: What the backward pass will need
#
# **Goal.** Write the forward pass that the rest of this notebook uses: causal or not, for any lengths, and with a
# second output, the log-sum-exp of every row of scores.
#
# ### Theory
#
# The backward pass needs the probabilities again: 32 GiB for one head over 131,072 tokens. But you can compute each of
# them again from its score and *one* number per row: the **log-sum-exp**, the logarithm of the row's sum. That is 512
# KiB in all.
#
# ```text
#     lse = log(sum of exp(s))          p = exp(s - lse)
# ```
#
# At the last step, `m` and `l` hold all that you need. Mind their base: `lse` is a natural logarithm.
#
# The rest is practice. Copy your Puzzle 6. Replace its two tests by `last_key_seen`. Then look at two corner cases:
#
# - **A row that sees nothing** (Sq > Skv) gets o = 0 and lse = -inf. All its scores are -inf, so its maximum keeps its
#   starting value. If that were -inf, too, s - m would be NaN. So `start` takes `FLOOR`, the most negative float32. And
#   `normalized` turns 0 / 0 into 0.
# - **Keys that do not divide.** Beyond Skv there is garbage. In `k` it becomes scores, and you can mask those. In `v`
#   it meets p = 0, and 0 times NaN is NaN (basics.py Puzzle 8). `rows_inside` puts zeros in its place.


# %%
def attention_lse_spec(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], v: Float[Array, "B H Skv D"], *, causal: bool = True
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Sq 1"]]:
    s = causal_scores_spec(q, k) if causal else scores_spec(q, k)
    return attention_spec(q, k, v, causal=causal), jax.nn.logsumexp(s, axis=-1, keepdims=True)


# %%
def rows_inside(x, block, size):
    """x: (n, D), block number `block` of an array with `size` rows. Rows beyond the edge of the array become 0."""
    rows = block * x.shape[0] + column(x.shape[0])
    return jnp.where(rows < size, x, 0)


def last_key_seen(i, bq, Sq, Skv, causal):
    """Two positions: the last key that the first row of block i sees, and the last key that its last row sees.

    In a block of queries that hangs over the edge, the second may lie beyond the last key.
    """
    if not causal:
        return Skv - 1, Skv - 1
    return i * bq + Skv - Sq, i * bq + bq - 1 + Skv - Sq


def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    # Grid and Refs as in Puzzle 6, and lse_ref: (bq, 1), float32. causal: a Python bool.
    # last_key_seen says which blocks are dead, and which need no mask.
    pass  # YOUR CODE HERE


# %%
def kv_blocks(q, k, causal, bq, bkv):
    """A function of (i, j): which block of keys is in VMEM at that step. As in Puzzle 6, the last one seen stays."""
    offset = k.shape[2] - q.shape[2]  # below 0, the first blocks of queries would ask for a block below 0
    return lambda i, j: jnp.maximum(causal_kv_map(i, j, bq, bkv, offset), 0) if causal else j


def fwd_call(q, k, v, kv_map, *, causal, bq, bkv):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_spec = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    row_spec = pl.BlockSpec((None, None, bq, 1), lambda b, h, i, j: (b, h, i, 0))
    kv_spec = pl.BlockSpec((None, None, bkv, D), kv_map)
    # no dimension_semantics: the simulator cannot vmap a call that has them, and from Puzzle 10 on it has to
    return pl.pallas_call(
        functools.partial(flash_fwd_kernel, causal=causal, Sq=Sq, Skv=Skv),
        grid=(B, H, pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)),
        in_specs=[q_spec, kv_spec, kv_spec],
        out_specs=(q_spec, row_spec),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, Sq, 1), jnp.float32)),
        scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (128, 128, D)],
    )(q, k, v)


def flash_attention_fwd(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Sq 1"]]:
    def kv_map(b, h, i, j):
        return (b, h, kv_blocks(q, k, causal, bq, bkv)(i, j), 0)

    return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)


# %%
# Budget for q (1, 2, 200, 128), k (1, 2, 360, 128), v (1, 2, 360, 128): hbm_bytes=1_574_464, vmem_bytes=295_424,
# calls=1, output_stores=1, flops=99_000_000. 200 queries and 360 keys: the blocks divide neither of them.
check("flash_attention/7", flash_attention_fwd)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from a copy of your Puzzle 6. `last_key_seen` decides about a block now, causal or not: when does every query
# see every key of the block, and when does some query see one? Without causality, the last key that any query sees is
# Skv - 1; `hide_after` takes a number as well as a column. For lse: 2**m times l is the sum of exp(s). Take the natural
# logarithm of that, on paper. For a row that saw nothing, l is 0. Does your formula make -inf of it?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     first_key = j * bkv
#     first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
#     sees_all = ____
#     sees_some = ____
#     ____                                                          # starting values
#
#     ____                                                          # blocks without a mask, as in Puzzle 6
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = ____
#         last_seen = ____ if causal else ____                      # (bq, 1), or a number
#         online_step(____, ____, m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
#         lse_ref[...] = (____)[:, :1]                              # (bq, 128) -> (bq, 1)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     first_key = j * bkv
#     first_sees, last_sees = last_key_seen(i, bq, Sq, Skv, causal)
#     sees_all = first_key + bkv - 1 <= first_sees
#     sees_some = first_key <= last_sees
#     scale = D**-0.5 * LOG2_E
#
#     @pl.when(j == 0)
#     def _():
#         start(m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_all)
#     def _():
#         online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = block_scores(q_ref[...], k_ref[...], scale)
#         last_seen = first_sees + column(bq) if causal else Skv - 1
#         v = rows_inside(v_ref[...], j, Skv)
#         online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
#         lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l_ref[...]))[:, :1]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Your forward pass takes any lengths, with masked rows and ragged edges. It leaves 4 bytes per row, and
# from these you can compute all probabilities again. The backward pass starts here. (On a TPU, a (bq, 1) block is
# padded to 128 lanes. So the kernel writes 512 bytes per row, and XLA then packs them into 4.)

# %% [markdown]
# ## Puzzle 8: One number per row
#
# **Goal.** The backward pass begins. For every query, compute the row term of the softmax gradient, without looking at
# a single key.
#
# ### Theory
#
# For 32,768 tokens and D = 128, in bfloat16, `p` would be 2 GiB per head, and `o` is 8 MiB. So your forward pass stores
# `o` and `lse`. But the gradient in softmax.py Puzzle 6 was made of probabilities. Let `do` be the gradient that
# arrives for `o`:
#
# ```text
#     dp[i, j]  =  do[i] . v[j]                            (Sq, Skv), the gradient with respect to p
#     ds[i, j]  =  p[i, j] * (dp[i, j] - delta[i])         (Sq, Skv), with respect to the scores
#     delta[i]  =  sum over j of  p[i, j] * dp[i, j]       (Sq, 1),   the row term
# ```
#
# Every `ds` of a row needs its `delta`, and `delta` needs all keys. Does that take two sweeps over the keys, as in
# softmax.py Puzzle 2? Replace dp[i, j] in the last line by do[i] . v[j], written as a sum over `d`. Then change
# the order of the two sums:
#
# ```text
#     delta[i]  =  sum over j    of  p[i, j] * ( sum over d of  do[i, d] * v[j, d] )
#               =  sum over d    of  ?
# ```


# %%
def delta_spec(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    do: Float[Array, "B H Sq D"],
) -> Float[Array, "B H Sq 1"]:
    q, k, v, do = (a.astype(jnp.float32) for a in (q, k, v, do))
    p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5, axis=-1)
    dp = jnp.einsum("bhqd,bhkd->bhqk", do, v)
    return (p * dp).sum(axis=-1, keepdims=True)


# %%
def delta_kernel(o_ref, do_ref, delta_ref):
    # o_ref, do_ref: (bq, D), the result of these queries and the gradient that arrives for it, in float32 or bfloat16
    # delta_ref: (bq, 1), float32. Work in float32.
    pass  # YOUR CODE HERE


# %%
def attention_delta(
    o: Float[Array, "B H Sq D"], do: Float[Array, "B H Sq D"], *, bq: int = 64
) -> Float[Array, "B H Sq 1"]:
    B, H, Sq, D = o.shape
    rows = pl.BlockSpec((None, None, bq, D), lambda b, h, i: (b, h, i, 0))
    return pl.pallas_call(
        delta_kernel,
        grid=(B, H, pl.cdiv(Sq, bq)),
        in_specs=[rows, rows],
        out_specs=pl.BlockSpec((None, None, bq, 1), lambda b, h, i: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((B, H, Sq, 1), jnp.float32),
    )(o, do)


def delta_after_fwd(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq 1"]:
    o, _ = flash_attention_fwd(q, k, v, causal=False, bq=bq, bkv=bkv)  # your Puzzle 7
    return attention_delta(o, do, bq=bq)


# %%
# Budget for q (1, 2, 192, 64), k (1, 2, 384, 64), v (1, 2, 384, 64), do (1, 2, 192, 64): hbm_bytes=1_575_936, calls=2.
# calls: Puzzle 7 and yours.
check("flash_attention/8", delta_after_fwd)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Move the sum over `d` to the front: which factor has no `j`? You have seen the sum that is left inside, in the forward
# pass: which line of it? (In bfloat16, cast both factors before you multiply.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def delta_kernel(o_ref, do_ref, delta_ref):
#     product = ____ * ____                  # both in float32
#     delta_ref[...] = ____                  # (bq, 1)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def delta_kernel(o_ref, do_ref, delta_ref):
#     product = o_ref[...].astype(jnp.float32) * do_ref[...].astype(jnp.float32)
#     delta_ref[...] = product.sum(axis=1, keepdims=True)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You computed a sum over all keys and read not one of them: `o` had summed over them already. For 32,768
# tokens that saves one sweep over the keys: 16 MiB of `k` and `v` for each block of queries. It holds with any mask,
# too: a key that is not seen has p = 0 in both formulas.

# %% [markdown]
# ## Puzzle 9: dq
#
# **Goal.** Compute the gradient of the queries, with masks. Compute the probabilities again; do not store them.
#
# ### Theory
#
# A v5e takes 5 ns to store 1024 entries of `p` and read them back (2 bytes each, out and in). It takes 1.3 ns to
# compute them once more (128 multiply-adds each, D = 128). So **recompute, do not store**. With `lse` and `delta` at
# hand, no block has to wait for another:
#
# ```text
#     forward                            backward
#     s  = D**-0.5 * q @ k.T             p  = ?                       from s and lse, finished at once
#     p  = softmax of s                  ds = p * (do @ v.T - delta)
#     o  = p @ v                         dq = ?                       summed over blocks of keys
# ```
#
# `lse` knows the whole row. So this time `p` needs no running maximum and no rescaling: what is exp(log of the sum)?
#
# As in Puzzle 5, a block of queries stays while keys and values pass. `do`, `lse` and `delta` stay with it, and
# `acc_ref` collects dq.
#
# Masks bring one trap. In a row that sees nothing, `lse` is -inf and exp(s - lse) is inf. Beyond the edge, `v` may be
# NaN, and so is `dp`. Multiply either by 0, and you have NaN. So **let `jnp.where` choose, last**: it ignores the
# values that it does not select, even NaN. (`nan_to_num` would hide real overflows, too.)


# %%
def attention_grads_spec(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    causal: bool = True,
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Skv D"], Float[Array, "B H Skv D"]]:
    inputs = [a.astype(jnp.float32) for a in (q, k, v)]
    _, vjp = jax.vjp(lambda q, k, v: attention_spec(q, k, v, causal=causal), *inputs)
    dq, dk, dv = vjp(do.astype(jnp.float32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def dq_spec(q, k, v, do, *, causal: bool = True) -> Float[Array, "B H Sq D"]:
    return attention_grads_spec(q, k, v, do, causal=causal)[0]


# %%
def visible(i, j, bq, bkv, Sq, Skv, causal):
    """(bq, bkv), True where query and key exist, and the query may see the key"""
    rows = i * bq + column(bq)
    cols = j * bkv + jnp.arange(bkv)[None, :]
    seen = (rows < Sq) & (cols < Skv)
    return seen & (cols <= rows + (Skv - Sq)) if causal else seen


def p_and_ds(s, dp, lse, delta, seen):
    # s: (bq, bkv), scores, scaled      dp: (bq, bkv), do @ v.T      lse, delta: (bq, 1)      all float32
    # seen: (bq, bkv), True where query and key exist, and the mask lets the query see the key
    # Return p and ds, (bq, bkv) each: 0 where nothing is seen, whatever s, dp, lse and delta hold there.
    # (p is for Puzzle 10.)
    pass  # YOUR CODE HERE


def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
    # Grid (b, h, i, j). q_ref, do_ref, dq_ref: (bq, D), block i      k_ref, v_ref: (bkv, D), block j
    # lse_ref, delta_ref: (bq, 1), float32      acc_ref: (bq, D), float32
    # last_key_seen, of Puzzle 7, says how far block i sees. Skip blocks of keys beyond that.
    # visible, above, makes the `seen` that p_and_ds wants. In a product, ds has the dtype of k. Mind the edge of k.
    pass  # YOUR CODE HERE


# %%
def dq_call(q, k, v, do, lse, delta, kv_map, *, causal, bq, bkv):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    q_spec = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    row_spec = pl.BlockSpec((None, None, bq, 1), lambda b, h, i, j: (b, h, i, 0))
    kv_spec = pl.BlockSpec((None, None, bkv, D), kv_map)
    return pl.pallas_call(
        functools.partial(dq_kernel, causal=causal, Sq=Sq, Skv=Skv),
        grid=(B, H, pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)),
        in_specs=[q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((bq, D), jnp.float32)],
    )(q, k, v, do, lse, delta)


def attention_dq(q, k, v, do, lse, delta, *, causal: bool = True, bq: int = 64, bkv: int = 128):
    def kv_map(b, h, i, j):
        return (b, h, kv_blocks(q, k, causal, bq, bkv)(i, j), 0)

    return dq_call(q, k, v, do, lse, delta, kv_map, causal=causal, bq=bq, bkv=bkv)


# %%
def dq_after_fwd(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq D"]:
    o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)  # your Puzzle 7
    delta = attention_delta(o, do, bq=bq)
    return attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)


# %%
# Budget for q (1, 2, 256, 64), k (1, 2, 320, 64), v (1, 2, 320, 64), do (1, 2, 256, 64): hbm_bytes=2_629_632, calls=3,
# output_stores=1, flops=93_000_000. hbm_bytes and flops: those of three calls. Blocks that no query sees are neither
# fetched nor computed.
check("flash_attention/9", dq_after_fwd)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The softmax of s is exp(s) over the sum of exp(s), and `lse` is the logarithm of that sum. So the division becomes a
# subtraction in the exponent, where nothing overflows. For dq: s[i, j] is D**-0.5 times q[i] . k[j]. What is its
# derivative with respect to q[i]? The sum over `j` of ds[i, j] times that derivative is a matrix product. It has a
# constant factor, which you may apply once, at the end. And mind the edge of `k`: which rows does a 0 of `ds` meet in
# that product?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def p_and_ds(s, dp, lse, delta, seen):
#     p = jnp.where(seen, ____, 0)
#     return p, jnp.where(seen, ____, 0)
#
#
# def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     ____                                       # zero, at the first step
#
#     @pl.when(____)                             # some query of block i sees some key of block j
#     def _():
#         k = rows_inside(k_ref[...], j, Skv)
#         s = block_scores(____, ____, ____)
#         dp = block_scores(____, ____, 1.0)
#         _, ds = p_and_ds(s, dp, ____, ____, visible(____))
#         acc_ref[...] += jnp.dot(ds.astype(k.dtype), ____, preferred_element_type=jnp.float32)
#
#     ____                                       # store, at the last step: what is still missing?
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def p_and_ds(s, dp, lse, delta, seen):
#     p = jnp.where(seen, jnp.exp(s - lse), 0)
#     return p, jnp.where(seen, p * (dp - delta), 0)
#
#
# def dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, causal, Sq, Skv):
#     i, j = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#
#     @pl.when(j == 0)
#     def _():
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     @pl.when(j * bkv <= last_key_seen(i, bq, Sq, Skv, causal)[1])
#     def _():
#         k = rows_inside(k_ref[...], j, Skv)
#         s = block_scores(q_ref[...], k, D**-0.5)
#         dp = block_scores(do_ref[...], v_ref[...], 1.0)
#         _, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
#         acc_ref[...] += jnp.dot(ds.astype(k.dtype), k, preferred_element_type=jnp.float32)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         dq_ref[...] = (acc_ref[...] * D**-0.5).astype(dq_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You never stored anything of size Sq x Skv, forward or backward. One number a row (`lse`) was enough to
# compute every probability again. `jax.checkpoint` makes the same trade for whole layers: it is cheaper to compute
# twice than to remember. (Do not try this at exams.)

# %% [markdown]
# ## Puzzle 10: dk and dv, and the whole as one function
#
# **Goal.** Compute the gradients of keys and values, and make a `flash_attention` that `jax.grad` can walk through.
#
# ### Theory
#
# `dq[i]` was a sum over keys; `dk[j]` and `dv[j]` are sums over **queries**. In Puzzle 9's order, with 64 blocks of
# queries, each block of `dk` would be needed 64 times, with others in between. So **transpose the loop**: the axis that
# you sum over goes last, (b, h, j, i). Keys and values stay. Queries pass by, with their `do`, `lse` and `delta`.
#
# ```text
#                     j: blocks of keys
#                   [ 0 ][ 1 ][ 2 ]              dq: along a row      #  seen
#     i: blocks   0   #    .    .                    ------->         .  not seen
#     of          1   #    #    .
#     queries     2   #    #    .                dk, dv: down a column
#                 3   #    #    #                    |
#                                                    v
# ```
#
# Look at the dots. In each row the dots come last. So the map of Puzzle 6 stayed at the *last* live block. In a column
# they come **first**. So `first_q` returns the first block of queries that sees anything of block `j`, and the index
# map takes the larger of `i` and that. With 64 blocks of queries and 64 of keys, 2016 of the 4096 steps are dots.
#
# The ragged edge changes, too. In Puzzle 9, rows of `q` and `do` beyond Sq did no harm, because no row affects another.
# Now you sum over them.
#
# The last two holes only put your kernels together.


# %%
def transposed_times(a, b):
    """a.T @ b, in float32: (m, n), (m, d) -> (n, d)"""
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def first_q(j, bq, bkv, Sq, Skv, causal):
    # Return the first block of queries in which some query sees block j of the keys. Query i is at i + Skv - Sq.
    pass  # YOUR CODE HERE


def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
    # Adds what block i of the queries contributes to block j of dk and dv: nothing, if it sees nothing of block j.
    # q_ref, do_ref: (bq, D)      k_ref, v_ref: (bkv, D)      lse_ref, delta_ref: (bq, 1), float32
    # dk_acc_ref, dv_acc_ref: (bkv, D), float32
    pass  # YOUR CODE HERE


def smooth_attention_fwd(q, k, v, causal, bq, bkv):
    # Return o, and the residuals: what the backward pass needs besides do.
    pass  # YOUR CODE HERE


def smooth_attention_bwd(causal, bq, bkv, residuals, do):
    # Return dq, dk, dv: three calls, attention_delta, attention_dq and attention_dkv (below; called like attention_dq).
    pass  # YOUR CODE HERE


# %%
def dkv_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options):
    j, i = pl.program_id(2), pl.program_id(3)

    @pl.when(i == 0)
    def _():
        dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
        dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)

    add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


def attention_dkv(q, k, v, do, lse, delta, *, causal: bool = True, bq: int = 64, bkv: int = 128):
    (B, H, Sq, D), Skv = q.shape, k.shape[2]

    def q_map(b, h, j, i):
        return (b, h, jnp.maximum(i, first_q(j, bq, bkv, Sq, Skv, causal)), 0)

    q_spec, row_spec = pl.BlockSpec((None, None, bq, D), q_map), pl.BlockSpec((None, None, bq, 1), q_map)
    kv_spec = pl.BlockSpec((None, None, bkv, D), lambda b, h, j, i: (b, h, j, 0))
    return pl.pallas_call(
        functools.partial(dkv_kernel, causal=causal, Sq=Sq, Skv=Skv),
        grid=(B, H, pl.cdiv(Skv, bkv), pl.cdiv(Sq, bq)),
        in_specs=[q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=[kv_spec, kv_spec],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        scratch_shapes=[pltpu.VMEM((bkv, D), jnp.float32)] * 2,
    )(q, k, v, do, lse, delta)


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def smooth_attention(q, k, v, causal, bq, bkv):
    return flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)[0]


smooth_attention.defvjp(smooth_attention_fwd, smooth_attention_bwd)


def flash_attention(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq D"]:
    return smooth_attention(q, k, v, causal, bq, bkv)


def attention_grads(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Skv D"], Float[Array, "B H Skv D"]]:
    _, vjp = jax.vjp(lambda q, k, v: flash_attention(q, k, v, causal=causal, bq=bq, bkv=bkv), q, k, v)
    return vjp(do)


# %%
# Budget for q (1, 2, 256, 64), k (1, 2, 320, 64), v (1, 2, 320, 64), do (1, 2, 256, 64): hbm_bytes=3_750_912, calls=4,
# output_stores=1, flops=170_000_000. calls: forward, delta, dq, dkv. Forward runs once: its results are residuals.
check("flash_attention/10", attention_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For `first_q`: the first key of block j is j * bkv. Which query is the first to see it, and in which block is that
# query? What if all queries see it? For the products: `o = p @ v`, so dv[j] is the sum over i of p[i, j] * do[i]. You
# sum over the *first* letter of both, which is what `transposed_times` is for. dk is like dq with q and k swapped. And
# which rows does a 0 of `p` or `ds` meet in these products?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def first_q(j, bq, bkv, Sq, Skv, causal):
#     return jnp.maximum(____, 0) // ____ if causal else ____
#
#
# def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#
#     @pl.when(____)
#     def _():
#         q, do = rows_inside(____), rows_inside(____)
#         ____                                       # s, dp, p and ds, as in Puzzle 9
#         dv_acc_ref[...] += transposed_times(____, ____)
#         dk_acc_ref[...] += transposed_times(____, ____) * ____
#
#
# def smooth_attention_fwd(q, k, v, causal, bq, bkv):
#     o, lse = ____
#     return o, ____
#
#
# def smooth_attention_bwd(causal, bq, bkv, residuals, do):
#     ____ = residuals
#     delta = ____
#     dq = ____
#     dk, dv = ____
#     return dq, dk, dv
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def first_q(j, bq, bkv, Sq, Skv, causal):
#     return jnp.maximum(j * bkv - (Skv - Sq), 0) // bq if causal else 0
#
#
# def add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, *, causal, Sq, Skv):
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#
#     @pl.when(i >= first_q(j, bq, bkv, Sq, Skv, causal))
#     def _():
#         q, do = rows_inside(q_ref[...], i, Sq), rows_inside(do_ref[...], i, Sq)
#         s = block_scores(q, k_ref[...], D**-0.5)
#         dp = block_scores(do, v_ref[...], 1.0)
#         p, ds = p_and_ds(s, dp, lse_ref[...], delta_ref[...], visible(i, j, bq, bkv, Sq, Skv, causal))
#         dv_acc_ref[...] += transposed_times(p.astype(do.dtype), do)
#         dk_acc_ref[...] += transposed_times(ds.astype(q.dtype), q) * D**-0.5
#
#
# def smooth_attention_fwd(q, k, v, causal, bq, bkv):
#     o, lse = flash_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
#     return o, (q, k, v, o, lse)
#
#
# def smooth_attention_bwd(causal, bq, bkv, residuals, do):
#     q, k, v, o, lse = residuals
#     delta = attention_delta(o, do, bq=bq)
#     dq = attention_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
#     dk, dv = attention_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
#     return dq, dk, dv
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Forward and backward take four calls, and there is no array of size Sq x Skv anywhere. Count the
# products per pair of blocks: 2 forward, 3 for dq, 4 for dk and dv. Of the seven backward ones, s and dp are computed
# twice. One kernel for all three gradients would compute them once, if it could sum `dq` along with the others. (Why
# can it not, in this grid?) And `jax.grad`, `jax.jit` and `jax.vmap` take it as it is:

# %%
if unwritten(flash_attention):
    print(f"Nothing to differentiate yet. Still to be written: {', '.join(unwritten(flash_attention))}.")
else:
    keys = jax.random.split(jax.random.key(0), 3)
    q0, k0, v0 = (jax.random.normal(key, (3, 1, 2, 64, 64)) for key in keys)  # three problems of their own
    for name, attend in (("yours", flash_attention), ("jnp", attention_spec)):
        loss = jax.vmap(lambda q, k, v, f=attend: (f(q, k, v, causal=True) ** 2).sum())
        dq0 = jax.jit(jax.grad(lambda q, f=loss: f(q, k0, v0).sum()))(q0)
        print(f"{name:5}  losses {np.round(np.asarray(loss(q0, k0, v0)), 3)}   |dq| {np.linalg.norm(dq0):.5f}")

# %% [markdown]
# ## Puzzle 11: Grouped queries
#
# **Goal.** Let several heads of queries share one head of keys and values, forward and backward, without copying
# anything.
#
# ### Theory
#
# Llama 3 70B has 64 heads of queries and 8 of keys and values: **grouped-query attention**, GQA. Eight query heads form
# a group. (With one head of keys for all it is called MQA.) Keys and values take an eighth of the memory.
#
# ```text
#     heads of q        0  1  2  3     4  5  6  7          H = 8, Hkv = 2, group = 4
#                        \  \ /  /      \  \ /  /
#     heads of k, v          0              1              neighbours share
# ```
#
# `jnp.repeat(k, group, axis=1)` would make the shapes fit, and write the eight copies to HBM. But **a head is only a
# block index**, and an index map may send several heads to the same place. Forward and `dq` need nothing else: their
# kernels stay as they are.
#
# `dk` and `dv` need more. All heads of a group use the same keys, so their gradients are sums over the group, too.
# Their grid is (b, hkv, j, g, i), and `g` counts the heads of a group. The block of `dk` stays in VMEM while g and i
# run. `add_dkv` is yours, from Puzzle 10. When does the sum start, and when is it done?


# %%
def grouped_spec(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B Hkv Skv D"], v: Float[Array, "B Hkv Skv D"], *, causal: bool = True
) -> Float[Array, "B H Sq D"]:
    k, v = (jnp.repeat(a, q.shape[1] // k.shape[1], axis=1) for a in (k, v))
    return attention_spec(q, k, v, causal=causal)


def grouped_grads_spec(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B Hkv Skv D"],
    v: Float[Array, "B Hkv Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    causal: bool = True,
) -> tuple[
    Float[Array, "B H Sq D"], Float[Array, "B H Sq D"], Float[Array, "B Hkv Skv D"], Float[Array, "B Hkv Skv D"]
]:
    inputs = [a.astype(jnp.float32) for a in (q, k, v)]
    o, vjp = jax.vjp(lambda q, k, v: grouped_spec(q, k, v, causal=causal), *inputs)
    return tuple(a.astype(q.dtype) for a in (o, *vjp(do.astype(jnp.float32))))


# %%
def grouped_kv_map(b, h, i, j, *, group, block):
    # Return the number of the block of k and v, (bkv, D) of a (B, Hkv, Skv, D), for step (b, h, i, j). h counts the
    # heads of q; `group` of them share one head of k and v. block(i, j): its number along Skv, from kv_blocks.
    pass  # YOUR CODE HERE


def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
    # Return o and lse. Look at flash_attention_fwd of Puzzle 7: fwd_call takes an index map of k and v. Give it yours.
    # kv_blocks(q, k, causal, bq, bkv) returns `block`.
    pass  # YOUR CODE HERE


def grouped_q_map(b, hkv, j, g, i, *, group, block):
    # Return the number of the block of q, (bq, D) of a (B, H, Sq, D). block(j, i): its number along Sq, as in
    # Puzzle 10. The map serves do, lse and delta, too.
    pass  # YOUR CODE HERE


def grouped_dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
):
    # Copy dkv_kernel of Puzzle 10. Now the grid is (b, hkv, j, g, i): g, the heads of one group, one after the other.
    pass  # YOUR CODE HERE


# %%
def grouped_dq(q, k, v, do, lse, delta, *, causal, bq, bkv):
    block = kv_blocks(q, k, causal, bq, bkv)
    kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
    return dq_call(q, k, v, do, lse, delta, kv_map, causal=causal, bq=bq, bkv=bkv)


def grouped_dkv(q, k, v, do, lse, delta, *, causal, bq, bkv):
    (B, H, Sq, D), (_, Hkv, Skv, _) = q.shape, k.shape

    def block(j, i):
        return jnp.maximum(i, first_q(j, bq, bkv, Sq, Skv, causal))

    q_map = functools.partial(grouped_q_map, group=H // Hkv, block=block)
    q_spec, row_spec = pl.BlockSpec((None, None, bq, D), q_map), pl.BlockSpec((None, None, bq, 1), q_map)
    kv_spec = pl.BlockSpec((None, None, bkv, D), lambda b, hkv, j, g, i: (b, hkv, j, 0))
    return pl.pallas_call(
        functools.partial(grouped_dkv_kernel, causal=causal, Sq=Sq, Skv=Skv),
        grid=(B, Hkv, pl.cdiv(Skv, bkv), H // Hkv, pl.cdiv(Sq, bq)),
        in_specs=[q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=[kv_spec, kv_spec],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        scratch_shapes=[pltpu.VMEM((bkv, D), jnp.float32)] * 2,
    )(q, k, v, do, lse, delta)


# %%
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def smooth_grouped(q, k, v, causal, bq, bkv):
    return grouped_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)[0]


def smooth_grouped_fwd(q, k, v, causal, bq, bkv):
    o, lse = grouped_attention_fwd(q, k, v, causal=causal, bq=bq, bkv=bkv)
    return o, (q, k, v, o, lse)


def smooth_grouped_bwd(causal, bq, bkv, residuals, do):
    q, k, v, o, lse = residuals
    delta = attention_delta(o, do, bq=bq)
    dq = grouped_dq(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)
    return dq, *grouped_dkv(q, k, v, do, lse, delta, causal=causal, bq=bq, bkv=bkv)


smooth_grouped.defvjp(smooth_grouped_fwd, smooth_grouped_bwd)


def grouped_attention(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B Hkv Skv D"],
    v: Float[Array, "B Hkv Skv D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq D"]:
    return smooth_grouped(q, k, v, causal, bq, bkv)


# %%
def grouped_grads(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B Hkv Skv D"],
    v: Float[Array, "B Hkv Skv D"],
    do: Float[Array, "B H Sq D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> tuple[
    Float[Array, "B H Sq D"], Float[Array, "B H Sq D"], Float[Array, "B Hkv Skv D"], Float[Array, "B Hkv Skv D"]
]:
    o, vjp = jax.vjp(lambda q, k, v: grouped_attention(q, k, v, causal=causal, bq=bq, bkv=bkv), q, k, v)
    return o, *vjp(do)


# %%
# Budget for q (1, 4, 192, 64), k (1, 2, 320, 64), v (1, 2, 320, 64), do (1, 4, 192, 64): hbm_bytes=6_383_616, calls=4,
# output_stores=1, flops=290_000_000. Forward and dq fetch the keys anew for every block of queries of every query
# head. They save only the copy that `jnp.repeat` would write. dk and dv fetch the keys once for a group.
check("flash_attention/11", grouped_grads)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In the drawing, which head of keys belongs to query head 5, and by which arithmetic? (Not the remainder: neighbours
# share.) The backward pass asks the opposite: which query head is member `g` of the group of key head `hkv`? For the
# sum over two axes: how many times does one block of `dk` leave VMEM? Write h beside hkv and g in the drawing. What
# happens to the heads of a group if the sum starts afresh whenever `i` is 0?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def grouped_kv_map(b, h, i, j, *, group, block):
#     return (b, ____, block(____), 0)
#
#
# def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
#     block = kv_blocks(q, k, causal, bq, bkv)
#     kv_map = functools.partial(grouped_kv_map, group=____, block=block)
#     return fwd_call(____)
#
#
# def grouped_q_map(b, hkv, j, g, i, *, group, block):
#     return (b, ____, block(____), 0)
#
#
# def grouped_dkv_kernel(
#     q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
# ):
#     j, g, i = ____
#     ____                                  # dkv_kernel, with other conditions
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def grouped_kv_map(b, h, i, j, *, group, block):
#     return (b, h // group, block(i, j), 0)
#
#
# def grouped_attention_fwd(q, k, v, *, causal, bq, bkv):
#     block = kv_blocks(q, k, causal, bq, bkv)
#     kv_map = functools.partial(grouped_kv_map, group=q.shape[1] // k.shape[1], block=block)
#     return fwd_call(q, k, v, kv_map, causal=causal, bq=bq, bkv=bkv)
#
#
# def grouped_q_map(b, hkv, j, g, i, *, group, block):
#     return (b, hkv * group + g, block(j, i), 0)
#
#
# def grouped_dkv_kernel(
#     q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, **options
# ):
#     j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
#
#     @pl.when((g == 0) & (i == 0))
#     def _():
#         dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape)
#         dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape)
#
#     add_dkv(i, j, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_acc_ref, dv_acc_ref, **options)
#
#     @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
#     def _():
#         dk_ref[...] = dk_acc_ref[...].astype(dk_ref.dtype)
#         dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** It took two lines in index maps and two in conditions to share the keys. For 8192 tokens of Llama 3 70B
# (D = 128, bfloat16), keys and values of one layer are 32 MiB instead of 256. Where H = Hkv the group is 1, and this is
# Puzzle 10. So from now on, `grouped_attention` is all that you need.
#
# In one case a group can do better. When a model writes text token by token, it has *one* query per head, a block of a
# single row. Then let **the heads of a group be the rows**: q as (B, Hkv, group, D), in blocks of (group, D). The keys
# are fetched once for the whole group instead of once per head. For Llama that is an eighth of the bytes. Puzzle 13
# starts from there.

# %% [markdown]
# ## Puzzle 12: Only the blocks that live
#
# **Goal.** Compute attention under any mask, with a grid no wider than the longest list of blocks that the mask leaves.
#
# ### Theory
#
# Let each token see the last 1024, itself included: a **sliding window**. With 32,768 tokens that is 3% of all pairs.
# Your causal kernel could skip the rest, but a skipped step is still a step: 0.25 us, as in Puzzle 6. In blocks of 512
# x 512 there are 4096 steps per head: a millisecond. Only 189 of them do any work.
#
# So let the grid run over a **list**: for each row of blocks, the live ones from left to right. The grid is as wide as
# the longest list:
#
# ```text
#     kinds                         data_next       block_mask
#      0  1  2  3   j                                               0  dead: nothing is seen
#     [1  .  .  . ]                  0  0  0         1  0  0        1  partial: some of it is seen
#     [2  1  .  . ]                  0  1  1         2  1  0        2  full: all of it is seen
#     [.  .  .  . ]                  ?  ?  ?         0  0  0
#     [1  .  2  1 ]                  0  2  3         1  2  1
# ```
#
# Both lists are prefetched to SMEM (matmul.py Puzzle 11: index maps get scalar-prefetch Refs last, the kernel first).
# **The number of a step no longer says which block it holds**; `data_next` does. Past the end of a row's list, the map
# should ask for nothing new. What is in VMEM at that moment? (If the first rows are empty, nothing is. Then ask for
# block 0.)


# %%
def window_mask(rows, cols, *, window, start):
    # row 0 is at position `start`; each row sees its own position and the window - 1 positions before it
    return (cols <= rows + start) & (cols > rows + start - window)


def recent_mask(rows, cols):
    return window_mask(rows, cols, window=150, start=128)


def causal_mask(rows, cols, *, start):
    return cols <= rows + start


def documents_mask(rows, cols, *, q_len, kv_len, skip):
    # queries come in documents of q_len, keys in documents of kv_len; each document of queries sees two of keys, but
    # every `skip`-th sees none
    document, other = rows // q_len, cols // kv_len
    return (document % skip != 1) & ((other == document % 4) | (other == (document + 2) % 4))


def block_kinds(mask: Callable, Sq: int, Skv: int, bq: int, bkv: int) -> np.ndarray:
    """Which blocks are dead, partial, full: 0, 1, 2. At the ragged edge of the keys none is full."""
    R, C = pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)
    rows, cols = np.arange(R * bq)[:, None], np.arange(C * bkv)[None, :]
    seen = mask(rows, cols) & (rows < Sq) & (cols < Skv)
    full = (mask(rows, cols) | (rows >= Sq)) & (cols < Skv)
    seen, full = (a.reshape(R, bq, C, bkv).transpose(0, 2, 1, 3) for a in (seen, full))
    return np.where(full.all(axis=(2, 3)), 2, seen.any(axis=(2, 3)).astype(np.int32))


# %%
def splash_spec(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    mask: Callable = recent_mask,
) -> Float[Array, "B H Sq D"]:
    seen = mask(np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :])
    q32, k32, v32 = (a.astype(jnp.float32) for a in (q, k, v))
    s = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q32, k32) * q.shape[3] ** -0.5, -1e30)
    p = jnp.where(seen, jnp.exp(s - s.max(axis=-1, keepdims=True)), 0)
    total = p.sum(axis=-1, keepdims=True)
    return (jnp.einsum("bhqk,bhkd->bhqd", p, v32) / jnp.where(total == 0, 1, total)).astype(q.dtype)


# %%
def splash_lists(kinds):
    # kinds: a NumPy array of (R, C), from block_kinds. Return data_next and block_mask, NumPy arrays of int32, (R, W).
    # W is the length of the longest list, at least 1. data_next says which block step (i, t) holds; block_mask its
    # kind, 0 beyond the end of the list. Live blocks come from left to right. Loops are fine here.
    pass  # YOUR CODE HERE


def splash_kv_map(b, h, i, t, data_next_ref, block_mask_ref):
    # Return the number of the block of k and v, (bkv, D) of a (B, H, Skv, D), for step t of row i.
    pass  # YOUR CODE HERE


def splash_kernel(data_next_ref, block_mask_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, mask, Skv):
    # Grid (b, h, i, t). data_next_ref, block_mask_ref: (R, W), in SMEM: data_next_ref[i, t] is a number
    # q_ref, o_ref: (bq, D)      k_ref, v_ref: (bkv, D)      m_ref, l_ref: (bq, 128), acc_ref: (bq, D), float32
    # mask(rows, cols): True where a row sees a column. rows (bq, 1) and cols (1, bkv) are positions in the whole array.
    # Start and end as in Puzzle 7. Only blocks of kind 1 may hang over the edge of the keys.
    pass  # YOUR CODE HERE


# %%
def splash_attention(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    mask: Callable = recent_mask,
    bq: int = 64,
    bkv: int = 128,
) -> Float[Array, "B H Sq D"]:
    (B, H, Sq, D), Skv = q.shape, k.shape[2]
    data_next, block_mask = splash_lists(block_kinds(mask, Sq, Skv, bq, bkv))
    q_spec = pl.BlockSpec((None, None, bq, D), lambda b, h, i, t, data_next_ref, block_mask_ref: (b, h, i, 0))
    kv_spec = pl.BlockSpec((None, None, bkv, D), splash_kv_map)
    return pl.pallas_call(
        functools.partial(splash_kernel, mask=mask, Skv=Skv),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H, *data_next.shape),
            in_specs=[q_spec, kv_spec, kv_spec],
            out_specs=q_spec,
            scratch_shapes=[pltpu.VMEM((bq, n), jnp.float32) for n in (128, 128, D)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # Rows of blocks have to stay in order, so i is not parallel. Why? See the takeaway.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
    )(data_next, block_mask, q, k, v)


# %%
# Budget for q (1, 2, 256, 64), k (1, 2, 384, 64), v (1, 2, 384, 64): hbm_bytes=1_441_792, grid_steps=24, calls=1,
# output_stores=1. grid_steps: the longest list, for each row of blocks. hbm_bytes: the live blocks, once. Some variants
# also have a budget for masks (how many elements jnp.where selects): only partial blocks need them.
check("flash_attention/12", splash_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the lists: walk through the drawing of `kinds`, step by step and row by row. Note beside each step which block was
# fetched last: that one is in VMEM. Which number in `data_next` costs nothing, then? Does it matter that a row ends?
# (Before the first step nothing is in VMEM, so one block is fetched anyway.) For the kernel: two of the three kinds
# have work to do. Which of these may skip the mask *and* the edge? And where is block t of the list, in columns of the
# whole array: at t * bkv?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def splash_lists(kinds):
#     num_rows, width = kinds.shape[0], ____
#     data_next, block_mask = np.zeros((2, num_rows, width), np.int32)
#     here = 0                                    # the block that is in VMEM
#     for i, row in enumerate(kinds):
#         live = np.flatnonzero(row)
#         ____
#     return data_next, block_mask
#
#
# def splash_kv_map(b, h, i, t, data_next_ref, block_mask_ref):
#     return (b, h, ____, 0)
#
#
# def splash_kernel(data_next_ref, block_mask_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, mask, Skv):
#     i, t = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     j, kind = ____, ____
#     ____                                        # starting values, at the first step
#
#     @pl.when(kind == 2)
#     def _():
#         online_step(____)
#
#     @pl.when(kind == 1)
#     def _():
#         rows, cols = ____, ____
#         s = jnp.where(mask(rows, cols) & ____, ____, -jnp.inf)
#         online_step(s, rows_inside(____), m_ref, l_ref, acc_ref)
#
#     ____                                        # divide and store, at the last step
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def splash_lists(kinds):
#     num_rows, width = kinds.shape[0], max(1, (kinds > 0).sum(axis=1).max())
#     data_next, block_mask = np.zeros((2, num_rows, width), np.int32)
#     here = 0
#     for i, row in enumerate(kinds):
#         live = np.flatnonzero(row)
#         for t in range(width):
#             if t < len(live):
#                 here = live[t]
#                 block_mask[i, t] = row[here]
#             data_next[i, t] = here
#     return data_next, block_mask
#
#
# def splash_kv_map(b, h, i, t, data_next_ref, block_mask_ref):
#     return (b, h, data_next_ref[i, t], 0)
#
#
# def splash_kernel(
#     data_next_ref, block_mask_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, mask, Skv
# ):
#     i, t = pl.program_id(2), pl.program_id(3)
#     (bq, D), bkv = q_ref.shape, k_ref.shape[0]
#     j, kind = data_next_ref[i, t], block_mask_ref[i, t]
#
#     def scores():
#         return block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
#
#     @pl.when(t == 0)
#     def _():
#         start(m_ref, l_ref, acc_ref)
#
#     @pl.when(kind == 2)
#     def _():
#         online_step(scores(), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(kind == 1)
#     def _():
#         rows = i * bq + column(bq)
#         cols = j * bkv + jnp.arange(bkv)[None, :]
#         s = jnp.where(mask(rows, cols) & (cols < Skv), scores(), -jnp.inf)
#         online_step(s, rows_inside(v_ref[...], j, Skv), m_ref, l_ref, acc_ref)
#
#     @pl.when(t == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** This is splash attention: **sp**arse f**lash**. The mask became data, and the grid became a list of
# work. One kernel does causal, windows, documents, whatever you can write as a function of row and column. (For an
# empty row, `data_next` repeats the last block of the row before. That saves a fetch only if the rows run in order. So
# the call does not mark them 'parallel'.)
#
# Below is a window: in the strip of `k`, the rows begin at blocks 1, 1, 2, 2 and 3. Of 25 blocks 12 are live, and the
# longest list has 3. So of the 15 steps, 12 work, and the other 3 pad the shorter lists and fetch nothing.

# %%
window = functools.partial(window_mask, window=150, start=320)
show(splash_attention, *[normal((1, 1, n, 64)) for n in (320, 640, 640)], mask=window)

# %% [markdown]
# ## Puzzle 13: Paged decoding (the final boss)
#
# **Goal.** Compute attention for one new token of every user. Each user has a conversation of their own length, kept in
# pages that lie wherever there was room. Kernel, index maps, call: all yours.
#
# ### Theory
#
# If you reserve 4096 tokens for each user, and conversations have 300, you waste 13 of 14 bytes. So keys and values are
# kept in **pages** of, say, 16 tokens, handed out as conversations grow. A **page table** says which pages hold a
# conversation, in order:
#
# ```text
#     pages in HBM         0     1     2     3     4     5
#                        [ ? ] [ B0] [ A1] [ ? ] [ A0] [ A2]          ?: another user's, or free
#
#     page_table   user A    4   2   5           lengths   A   40     two pages, and 8 tokens of the third
#                  user B    1   3   0                     B   16     one page; the 3 and the 0 are left over
# ```
#
# Every entry is the number of some page, also those left over. So an index map may use any of them.
#
# The **position** of a token in its conversation decides whether it exists: `position < length`. The **page number**
# says where in HBM to fetch it. `page_table[b, t]` is the page number of tokens t * 16 to t * 16 + 15 of user b.
#
# The rows of a block are the heads of a group, as at the end of Puzzle 11: `q_ref` is (group, D).
#
# The budget has no page to spare. A user of length 0 gets zeros. An index map has to name some page, so this user may
# cost one page per head of keys.


# %%
def paged_spec(
    q: Float[Array, "B H D"],
    k_pages: Float[Array, "Hkv num_pages page D"],
    v_pages: Float[Array, "Hkv num_pages page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B H D"]:
    (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
    results = []
    for b in range(B):
        n = int(lengths[b])
        mine = page_table[b, : -(-n // page)]
        k, v = (a[:, mine].reshape(Hkv, -1, D)[None, :, :n].astype(jnp.float32) for a in (k_pages, v_pages))
        rows = q[b][None, :, None].astype(jnp.float32)
        results.append(grouped_spec(rows, k, v, causal=False)[0, :, 0] if n else jnp.zeros((H, D)))
    return jnp.stack(results).astype(q.dtype)


# %%
def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    # Grid (b, hkv, t): step t is for page t of user b. lengths_ref: (B,), table_ref: (B, max_pages), int32, in SMEM
    # q_ref, o_ref: (group, D)      k_ref, v_ref: (page, D), the page of this step
    # m_ref, l_ref: (group, 128), acc_ref: (group, D), float32. Keys and values beyond a length may be NaN.
    pass  # YOUR CODE HERE


def paged_attention(
    q: Float[Array, "B H D"],
    k_pages: Float[Array, "Hkv num_pages page D"],
    v_pages: Float[Array, "Hkv num_pages page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B H D"]:
    # Call paged_kernel. Reshape q to (B, Hkv, group, D), and the result back. That costs nothing.
    pass  # YOUR CODE HERE


# %%
# Budget for q (4, 16, 64), k_pages (2, 12, 16, 64), v_pages (2, 12, 16, 64), page_table (4, 6), lengths [40, 16, 0,
# 71]: hbm_bytes=196_608, grid_steps=48, calls=1, output_stores=1, flops=740_000. hbm_bytes: every page of every user
# once, for each head of keys, and one for a user of length 0. flops: those pages, and none for steps without a page.
check("flash_attention/13", paged_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are four places where a `t` can occur: the test whether page t of this user exists, the mask inside of it, the
# edge of `v`, and the page that is fetched. Ask for each: position or page number? Only one of them looks into the
# table. And beyond the last page of a user, which entry makes the map stay where it is? (A user of length 0 has no last
# page. Any entry of the table will do.)
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     b, t = pl.program_id(0), pl.program_id(2)
#     page, D = k_ref.shape
#     ____                                           # starting values, as in Puzzle 12
#
#     @pl.when(____ < lengths_ref[b])                # is any of this page there?
#     def _():
#         s = jnp.where(____, ____, -jnp.inf)
#         online_step(s, rows_inside(____), m_ref, l_ref, acc_ref)
#
#     ____                                           # divide and store, as in Puzzle 12
#
#
# def paged_attention(q, k_pages, v_pages, page_table, lengths):
#     (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
#     group = H // Hkv
#
#     def q_map(b, h, t, lengths_ref, table_ref):
#         return ____
#
#     def page_map(b, h, t, lengths_ref, table_ref):
#         last = jnp.maximum(____, 0)
#         return (h, table_ref[b, ____], 0, 0)
#
#     q_spec = pl.BlockSpec((None, None, group, D), q_map)
#     page_spec = pl.BlockSpec(____, page_map)
#     o = pl.pallas_call(
#         paged_kernel,
#         grid_spec=pltpu.PrefetchScalarGridSpec(
#             num_scalar_prefetch=2,
#             grid=____,
#             in_specs=____,
#             out_specs=____,
#             scratch_shapes=____,
#         ),
#         out_shape=____,
#     )(____)
#     return o.reshape(q.shape)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def paged_kernel(lengths_ref, table_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     b, t = pl.program_id(0), pl.program_id(2)
#     page, D = k_ref.shape
#
#     @pl.when(t == 0)
#     def _():
#         start(m_ref, l_ref, acc_ref)
#
#     @pl.when(t * page < lengths_ref[b])
#     def _():
#         s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
#         s = jnp.where(t * page + jnp.arange(page)[None, :] < lengths_ref[b], s, -jnp.inf)
#         online_step(s, rows_inside(v_ref[...], t, lengths_ref[b]), m_ref, l_ref, acc_ref)
#
#     @pl.when(t == pl.num_programs(2) - 1)
#     def _():
#         o_ref[...] = normalized(acc_ref, l_ref).astype(o_ref.dtype)
#
#
# def paged_attention(q, k_pages, v_pages, page_table, lengths):
#     (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
#     group = H // Hkv
#
#     def q_map(b, h, t, lengths_ref, table_ref):
#         return (b, h, 0, 0)
#
#     def page_map(b, h, t, lengths_ref, table_ref):
#         last = jnp.maximum(pl.cdiv(lengths_ref[b], page) - 1, 0)
#         return (h, table_ref[b, jnp.minimum(t, last)], 0, 0)
#
#     q_spec = pl.BlockSpec((None, None, group, D), q_map)
#     page_spec = pl.BlockSpec((None, None, page, D), page_map)
#     o = pl.pallas_call(
#         paged_kernel,
#         grid_spec=pltpu.PrefetchScalarGridSpec(
#             num_scalar_prefetch=2,
#             grid=(B, Hkv, page_table.shape[1]),
#             in_specs=[q_spec, page_spec, page_spec],
#             out_specs=q_spec,
#             scratch_shapes=[pltpu.VMEM((group, n), jnp.float32) for n in (128, 128, D)],
#         ),
#         out_shape=jax.ShapeDtypeStruct((B, Hkv, group, D), q.dtype),
#     )(lengths, page_table, q.reshape(B, Hkv, group, D), k_pages, v_pages)
#     return o.reshape(q.shape)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The boss is down. Data decides which bytes move. The grid does not even know how long a conversation is,
# and you read a cache in pieces as if it were whole. Each page came in once. Of the 48 steps 18 have a page. The other
# 30 compute nothing, and only two of them fetch, for the user of length 0. But all 48 cost their 0.25 us: 12 us on a
# v5e, beside 0.24 us of copies. The steps set the time, so production kernels take several pages in each.

# %%
table = np.random.default_rng(0).permutation(24).reshape(4, 6).astype(np.int32)  # of 24 pages
pages, lengths = normal((2, 24, 16, 64)), np.array([40, 16, 0, 71], np.int32)
show(paged_attention, normal((4, 16, 64)), pages, pages, table, lengths)

# %% [markdown]
# ## What you built
#
# You built attention forward and backward, for grouped heads, under any mask, and out of pages. In figures: over
# 131,072 tokens you keep 512 KiB of `lse` per head beside `o`, and not the 32 GiB of `p`. The window of Puzzle 12
# fetches 12 of 25 blocks. Puzzle 13 fetches each page of a cache once.
#
# **Read next**, in `jax.experimental.pallas.ops.tpu`: `splash_attention/splash_attention_kernel.py`. It has 2600 lines,
# and you have written most of what is in them:
#
# | there | what it is | yours |
# |---|---|---|
# | `flash_attention_kernel` | `init`, `body`, `end`: m, l, o in scratch | Puzzles 4, 5 |
# | `_next_nonzero` | reads `data_next` and `block_mask`: where to go, is it live, is it full | Puzzle 12 |
# | `_apply_mask_and_soft_cap` | the mask of a partial block, from a function or from a stored block | Puzzles 2, 12 |
# | `k_index_map`, `v_index_map` | the head over the size of the group; the block in `data_next` | Puzzles 11, 12 |
# | `logsumexp_ref` | the residual | Puzzle 7 |
# | `_splash_attention_bwd` | `di` is delta; then two calls: dk and dv, and dq | Puzzles 8, 9, 10 |
# | `_flash_attention_dq_kernel` | `ds = (dp - di) * p`, summed over keys | Puzzle 9 |
# | `_flash_attention_dkv_kernel` | the transposed loop; starts and ends once per group | Puzzles 10, 11 |
# | `splash_attention_mask_info.py` | mask to lists, dead, partial, full as 0, 1, 2 | Puzzle 12 |
#
# New to you there: a block may be copied in one piece (`bkv`) and worked on in smaller ones (`bkv_compute`). **Segment
# ids** keep documents apart in one sequence. A **soft cap** squeezes scores through tanh. With `use_fused_bwd_kernel`
# one kernel makes all three gradients. Even there, the grid cannot sum `dq` (the question at the end of Puzzle 10):
# each block of keys stores a `dq` of its own, and they are summed after the call.
#
# `paged_attention/paged_attention_kernel.py` is your Puzzle 13, down to the shapes of its arguments. It takes several
# pages per step, and fetches them itself, with DMAs and two buffers, because pages that lie apart make no block.
# `ragged_paged_attention/kernel.py` takes whole batches, prompts and decoding in one call. `tokamax` is a library of
# such kernels for TPU and GPU; behind its TPU attention you will meet splash again.
#
# And now the real thing: a transformer block on your own kernels, forward and backward. If matmul.py Puzzle 9 is solved
# in the folder of this notebook, its linear layers are your `product`. If softmax.py Puzzle 8 is, its norm is your
# `smooth_layer_norm`. If not, the short ones in the next cells take their place. The last cell runs it all.


# %%
def product(a, b, dims, tile=128):
    """The product of a and b, summed along dims, ((d,), (e,)): matmul.py Puzzle 9. Sizes are multiples of the tile."""

    def kernel(a_ref, b_ref, o_ref, acc_ref):
        before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
        acc_ref[...] = before + jax.lax.dot_general(
            a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32
        )
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    ((d,), (e,)) = dims
    shape = (a.shape[1 - d], b.shape[1 - e])
    return pl.pallas_call(
        kernel,
        grid=(shape[0] // tile, shape[1] // tile, a.shape[d] // tile),
        in_specs=[
            pl.BlockSpec((tile, tile), lambda i, j, k: (i, k) if d else (k, i)),
            pl.BlockSpec((tile, tile), lambda i, j, k: (j, k) if e else (k, j)),
        ],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, a.dtype),
        scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
    )(a, b)


# %%
@jax.custom_vjp
def linear(x, w):
    return product(x, w, ((1,), (0,)))


def linear_fwd(x, w):
    return linear(x, w), (x, w)


def linear_bwd(residuals, g):
    x, w = residuals
    return product(g, w, ((1,), (1,))), product(x, g, ((0,), (0,)))


linear.defvjp(linear_fwd, linear_bwd)


# %%
def norm_call(kernel, x, gamma, *more, out_shape, bm=64):
    """A kernel over blocks of whole rows: softmax.py Puzzles 8 and 9. Arrays of one row stay where they are."""
    rows, one_row = (pl.BlockSpec((n, x.shape[1]), lambda i, n=n: (i if n > 1 else 0, 0)) for n in (bm, 1))
    shapes = out_shape if isinstance(out_shape, list) else [out_shape]
    specs = [one_row if s.shape[0] == 1 else rows for s in shapes]
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // bm,),
        in_specs=[rows, one_row, *[rows for _ in more]],
        out_specs=specs if isinstance(out_shape, list) else specs[0],
        out_shape=out_shape,
    )(x, gamma, *more)


# %%
def rms_norm_kernel(x_ref, gamma_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * gamma_ref[...]


def rms_norm_grad_kernel(x_ref, gamma_ref, g_ref, dx_ref, dgamma_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        dgamma_ref[...] = jnp.zeros(dgamma_ref.shape)

    x = x_ref[...]
    rstd = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    n, h = x * rstd, g_ref[...] * gamma_ref[...]
    dx_ref[...] = rstd * (h - n * (h * n).mean(axis=1, keepdims=True))
    dgamma_ref[...] += (g_ref[...] * n).sum(axis=0, keepdims=True)


@jax.custom_vjp
def rms_norm(x, gamma):
    return norm_call(rms_norm_kernel, x, gamma, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))


def rms_norm_fwd(x, gamma):
    return rms_norm(x, gamma), (x, gamma)


def rms_norm_bwd(residuals, g):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in residuals]
    return tuple(norm_call(rms_norm_grad_kernel, *residuals, g, out_shape=shapes))


rms_norm.defvjp(rms_norm_fwd, rms_norm_bwd)


# %%
def plain_layer_norm(x, gamma):
    x = x - x.mean(axis=1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * gamma


def plain_norm(x, gamma):
    return x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * gamma


def transformer_block(params, x, *, norm, linear, attend, H=4, Hkv=2):
    """(B, S, C) -> (B, S, C): attention and an MLP, each behind a norm, each added to the stream."""
    B, S, C = x.shape
    stream = x.reshape(B * S, C)

    def heads(y, n):
        return y.reshape(B, S, n, -1).transpose(0, 2, 1, 3)

    h = norm(stream, params["norm 1"])
    q, k, v = (heads(linear(h, params[name]), n) for name, n in (("wq", H), ("wk", Hkv), ("wv", Hkv)))
    o = attend(q, k, v, causal=True).transpose(0, 2, 1, 3).reshape(B * S, C)
    stream = stream + linear(o, params["wo"])
    h = norm(stream, params["norm 2"])
    return (stream + linear(jax.nn.gelu(linear(h, params["up"])), params["down"])).reshape(B, S, C)


# %%
def block_and_grads(**parts):
    """The loss of one transformer block with random weights, and the gradients of all of them."""
    rng = np.random.default_rng(0)
    sizes = {
        "wq": (256, 256),
        "wk": (256, 128),
        "wv": (256, 128),
        "wo": (256, 256),
        "up": (256, 512),
        "down": (512, 256),
    }
    params = {name: rng.standard_normal(size, np.float32) / 16 for name, size in sizes.items()}
    params |= {"norm 1": np.ones((1, 256), np.float32), "norm 2": np.ones((1, 256), np.float32)}
    x, target = (rng.standard_normal((2, 192, 256), np.float32) for _ in range(2))

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return ((transformer_block(params, x, **parts) - target) ** 2).mean()

    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, loss(params))


# %%
to_write = unwritten(grouped_attention)
if to_write:
    print(f"No transformer yet. Still to be written: {', '.join(to_write)}.")
else:
    parts = {"norm": rms_norm, "linear": linear, "attend": grouped_attention}
    jnp_parts = {"norm": plain_norm, "linear": jnp.dot, "attend": grouped_spec}
    own_product = solved_function("matmul/9", "product")
    if own_product:
        parts["linear"] = lambda x, w: own_product(x, w, 128, 128, 128)
    own_norm = solved_function("softmax/8", "smooth_layer_norm")
    if own_norm:
        parts["norm"] = lambda x, gamma: own_norm(x, gamma, jnp.zeros_like(gamma), 64)
        jnp_parts["norm"] = plain_layer_norm
    print(f"linear: {'yours, matmul.py Puzzle 9' if own_product else 'of this notebook'}")
    print(f"norm:   {'yours, softmax.py Puzzle 8' if own_norm else 'of this notebook'}")
    your_loss, yours = block_and_grads(**parts)
    jnp_loss, theirs = block_and_grads(**jnp_parts)
    print(f"loss     {your_loss:.6f} with your kernels, {jnp_loss:.6f} in jnp")
    for name, g in theirs.items():
        print(f"d {name:7}{g.shape!s:11} off by {np.abs(yours[name] - g).max() / np.abs(g).max():.1e} of its largest")

# %% [markdown]
# **Next notebook.** `ragged_dot.py`: the other half of a modern transformer block, a mixture of experts. Its matrix
# product has groups of any size.

# %%
progress()
