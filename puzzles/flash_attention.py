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
# Two matrix products with a softmax between them: that is attention, and three kernels that you can already write do
# it. They also write 64 GiB for one head over 131,072 tokens. Thirteen puzzles from here you will have written the one
# kernel that writes 32 MiB, for any length, causal, with its backward pass, for grouped heads, for block masks, and
# for a cache in pages. After that, splash attention, ragged paged attention and tokamax are reading matter.
#
# You need `softmax.py` (above all Puzzle 3, the online softmax) and of `matmul.py` Puzzles 2 and 5 (dimension
# semantics, `dot_general`). All arrays are (batch, head, token, D), and D is 64 or 128.

# %%
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_puzzles import Budget, case, check, integers, normal, setup, show, tpu_report

setup()

# %% [markdown]
# ## Puzzle 1: Attention scores
#
# **Goal.** For every head of every sequence, the score of each query with each key: their dot product, scaled. Write
# the kernel and the two index maps.
#
# ### Theory
#
# Each token asks something (its query, a row of `q`) and offers something (its key, a row of `k`). How well the two
# match is their dot product. If the elements are about 1 in size, the dot product of D = 128 of them is about
# sqrt(128) = 11.3 in size. Under a softmax, scores that lie 11.3 apart differ by a factor of 81,000: one key takes all,
# and the gradient of the others is next to nothing. Divided by sqrt(D), scores are about 1 again, whatever D is.
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
# *Where* to scale matters too. 128**-0.5 is 0.08838..., no power of two: a bfloat16 query multiplied by it is rounded
# once more, all 128 elements of it. The scores are float32. They are what can be scaled without loss.


# %%
def scores_spec(q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"]) -> Float[Array, "B H Sq Skv"]:
    scale = q.shape[-1] ** -0.5
    return jnp.einsum("bhqd,bhkd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) * scale


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
# 320 keys in blocks of 128, 80 queries in blocks of 32: lengths need not divide. What hangs over is not written back.
check(
    "flash_attention/1",
    scores,
    scores_spec,
    normal((2, 3, 192, 128), "bfloat16"),
    normal((2, 3, 320, 128), "bfloat16"),
    variants=[
        case(normal((3, 2, 80, 64)), normal((3, 2, 256, 64), scale=30.0), bq=32, bkv=256),
        case(normal((1, 4, 64, 64), "bfloat16", shift=2.0), normal((1, 4, 384, 64), "bfloat16"), bq=32, bkv=384),
    ],
    budget=Budget(hbm_bytes=3_244_032, vmem_bytes=163_840, calls=1, mxu_bits=16),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For the product: both blocks have D along their second dimension, and that is the one to sum over. How many bits do
# the operands have, and how many the result? For the maps, walk over the drawing: which of b, h, i, j say whose matrix
# this is, which one says how far down, and which one how far across? A row of the drawing needs one block of `q`.
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
# **Takeaway.** Six matrices of scores, out of one call: batch and head are grid axes like any other. The scores are
# the largest thing here, 1.4 MiB beside 0.8 MiB of `q` and `k`, and they grow with the square of the length. Hold that
# thought until Puzzle 3.

# %% [markdown]
# ## Puzzle 2: The causal mask
#
# **Goal.** The same scores, but -inf wherever a query would look into its future.
#
# ### Theory
#
# A language model guesses the next token, so no query may see a later key. (Its own it may.) Under a softmax, -inf
# becomes probability 0: exp(-inf) = 0.
#
# Which entries? For 131,072 tokens a mask of booleans has 17,179,869,184 of them, 16 GiB at a byte each: more
# than a v5e has. Nobody stores that. Whether a key is later than a query follows from their two **positions**, and a
# kernel knows which rows it holds, by their block's number.
#
# One complication. Often the queries are only the end of the sequence: the keys of what came before lie in a cache. So
# the last query stands where the last key stands:
#
# ```text
#                   key       0    1    2    3    4    5        Skv = 6
#     query 0, position 2     s    s    s   -inf -inf -inf      Sq = 4
#     query 1, position 3     s    s    s    s   -inf -inf
#     query 2, position 4     s    s    s    s    s   -inf
#     query 3, position 5     s    s    s    s    s    s
# ```
#
# With more queries than keys the first ones stand before position 0, and see nothing at all.


# %%
def causal_scores_spec(q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"]) -> Float[Array, "B H Sq Skv"]:
    Sq, Skv = q.shape[2], k.shape[2]
    position = jnp.arange(Sq)[:, None] + Skv - Sq
    return jnp.where(jnp.arange(Skv)[None, :] <= position, scores_spec(q, k), -jnp.inf)


def hide_after(s, last_seen, first_key):
    # s: (bq, bkv), scores      first_key: the position of the key in column 0
    # last_seen: (bq, 1), int32, the position of the last key that the query in each row may see
    # Return s, with -inf for every key that lies after that.
    pass  # YOUR CODE HERE


def causal_scores_kernel(q_ref, k_ref, s_ref, *, offset):
    # Grid (b, h, i, j), Refs as in Puzzle 1. offset: Skv - Sq, the position of query 0. Use your block_scores.
    # jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0): a column, (bq, 1), that counts 0, 1, 2, ... along dimension 0
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
check(
    "flash_attention/2",
    causal_scores,
    causal_scores_spec,
    normal((1, 2, 192, 128), "bfloat16"),
    normal((1, 2, 320, 128), "bfloat16"),
    variants=[
        case(normal((2, 1, 192, 64)), normal((2, 1, 400, 64)), bq=96, bkv=256),
        case(normal((1, 2, 256, 64)), normal((1, 2, 128, 64)), bq=32),  # 128 queries that see nothing
    ],
    budget=Budget(hbm_bytes=1_081_344, vmem_bytes=163_840, calls=1, mxu_bits=16),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Row r of block i is which query of the whole sequence, and at which position does that query stand? Column c of block
# j is which key? Compare a column of row positions with a row of key positions, and broadcasting makes the table
# (softmax.py Puzzle 5). Then look at the drawing's diagonal: does a query see the key at its own position?
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
#     positions = ____ + jax.lax.broadcasted_iota(____)         # (bq, 1)
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
#     positions = pl.program_id(2) * bq + offset + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
#     s = block_scores(q_ref[...], k_ref[...], D**-0.5)
#     s_ref[...] = hide_after(s, positions, pl.program_id(3) * bkv)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A mask is a question about positions, and costs no byte. But about half of the table is -inf, and you
# have computed it all the same, and written it. Puzzle 6 will not.

# %% [markdown]
# ## Puzzle 3: Naive attention
#
# **Goal.** Causal attention out of three kernels: your scores, a softmax, and the mean of the values that it weighs.
# Write the third kernel, and put them together.
#
# ### Theory
#
# This puzzle has no new trick: you have all the pieces. It is here for the bill.
#
# ```text
#     q, k --> [ scores ] --> S --> [ softmax ] --> P --> [ P @ v ] --> o
#                              |    |            |    |
#                              v    ^            v    ^
#     HBM ------------------- 4 -- 4 ---------- 2 -- 2 ------------  bytes per score, bfloat16 inputs
# ```
#
# Every score goes out as a float32 and comes back in. Its probability goes out as a bfloat16 and comes back: 12 bytes.
# And what is done with it? 2 D FLOPs in either product, 512 with D = 128. That makes 43 FLOPs per byte, where a v5e
# needs 240 (matmul.py Puzzle 4). The MXU idles four fifths of the time.
#
# The probabilities have the dtype of `v`, since the second product wants narrow operands on both sides. Its sum goes
# over the keys, in blocks: `acc_ref` is float32, and grid axis 3 runs over the blocks. Here `bkv` divides Skv.


# %%
def attention_spec(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], v: Float[Array, "B H Skv D"], *, causal: bool = False
) -> Float[Array, "B H Sq D"]:
    s = causal_scores_spec(q, k) if causal else scores_spec(q, k)
    e = jnp.exp(s - jnp.maximum(s.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min))
    total = e.sum(axis=-1, keepdims=True)
    o = jnp.einsum("bhqk,bhkd->bhqd", e / jnp.where(total == 0, 1, total), v.astype(jnp.float32))
    return o.astype(q.dtype)  # 0 for a query that sees no key


causal_attention_spec = functools.partial(attention_spec, causal=True)


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


def weigh_kernel(p_ref, v_ref, o_ref, acc_ref):
    # p_ref: (bq, bkv), block (i, j) of the probabilities, in the dtype of v      v_ref: (bkv, D), block j of v
    # o_ref: (bq, D), block i of the result, the same one for every j      acc_ref: (bq, D), float32. j is grid axis 3.
    pass  # YOUR CODE HERE


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


def naive_attention(q, k, v, *, bq=64, bkv=128):
    # Return causal attention, (B, H, Sq, D), by way of causal_scores, softmax_rows and weigh.
    pass  # YOUR CODE HERE


# %%
def naive_budget(B, H, Sq, Skv, D, bq, itemsize=2):
    """What the three kernels may move."""
    once = 2 * B * H * Sq * D * itemsize  # q in, the result out
    again = 2 * B * H * pl.cdiv(Sq, bq) * Skv * D * itemsize  # k and v, for every block of queries anew
    return Budget(hbm_bytes=once + again + B * H * Sq * Skv * (4 + 4 + 2 * itemsize), calls=3)


check(
    "flash_attention/3",
    naive_attention,
    causal_attention_spec,
    normal((1, 2, 192, 128), "bfloat16"),
    normal((1, 2, 384, 128), "bfloat16"),
    normal((1, 2, 384, 128), "bfloat16", shift=0.5),
    variants=[
        case(
            integers((2, 1, 80, 64), -12, 13, "float32"),  # scores up to about 200: exp overflows at 89
            integers((2, 1, 512, 64), -12, 13, "float32"),
            normal((2, 1, 512, 64)),
            bq=40,
            bkv=256,
            budget=naive_budget(2, 1, 80, 512, 64, 40, itemsize=4),
        ),
        case(
            normal((1, 3, 256, 64), "bfloat16"),
            normal((1, 3, 256, 64), "bfloat16"),
            normal((1, 3, 256, 64), "bfloat16", shift=-2.0),
            bq=128,
            budget=naive_budget(1, 3, 256, 256, 64, 128),
        ),
    ],
    budget=naive_budget(1, 2, 192, 384, 128, 64),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `weigh_kernel` is a matmul with a loop over `j`: zero at the first step, add a product at each, store at the last
# (basics.py Puzzle 10). The result leaves in the dtype of its Ref. For the composition, follow the drawing from left
# to right. In which dtype should the probabilities go out, when what is on the other side of the product is `v`?
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
# **Takeaway.** It is right, and here is what it would cost: one head, one sequence of 131,072 tokens, D = 128,
# bfloat16. No array is allocated; `jax.eval_shape` says what shapes would come out.

# %%
long = jax.ShapeDtypeStruct((1, 1, 131_072, 128), jnp.bfloat16)
for name, array in [("q, k, v and o, each", long), ("S", jax.eval_shape(causal_scores_spec, long, long))]:
    print(f"{name:>20}: {array.size * array.dtype.itemsize / 2**30:8.3f} GiB")
naive_bytes = naive_budget(1, 1, 131_072, 131_072, 128, 512).hbm_bytes
print(f"{'moved, in 512s':>20}: {naive_bytes / 2**30:8.3f} GiB, {naive_bytes / 819e9 * 1e3:.0f} ms at 819 GB/s (v5e)")

# %% [markdown]
# A v5e has 16 GB of HBM. `S` alone is four times that, for a single head, and `P` is half as much again. Each of
# the arrays that one asked for is 1/2048 of `S`.

# %% [markdown]
# ## Puzzle 4: One block of queries
#
# **Goal.** Attention for one block of queries in one kernel. The scores live and die in VMEM.
#
# ### Theory
#
# Who ever needs a whole row of probabilities? Nobody: only the mean of the values that it weighs,
#
# ```text
#              exp(s0 - m) v0 + exp(s1 - m) v1 + exp(s2 - m) v2 + ...         acc
#         o = --------------------------------------------------------   =   -----
#                   exp(s0 - m) + exp(s1 - m) + exp(s2 - m) + ...              l
# ```
#
# Below the bar stands the `l` of softmax.py Puzzle 3. It grew block by block, and when a larger maximum turned up, what
# it held was mended by one factor. Above the bar stands the same sum, but for the vectors in it.
#
# ```text
#     step j:   q . k_j --> s (bq, bkv) --> p (bq, bkv) --> p @ v_j
#                               |              |               |
#               m (bq, 1) <-----+    l (bq, 1) +    acc (bq, D)+         scratch: carried from step to step
#
#     last step:                                o = acc / l
# ```
#
# So what has to happen to `acc` when the maximum grows? Once you have that, no score outlives its step. For a row of
# 131,072 keys, 512 KiB of scores become D + 2 numbers.
#
# Narrow operands for the second product, too: cast `p` to the dtype of `v`. The sums `l` and `acc` stay float32.


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
# hbm_bytes: q, k, v and the result, each once. The variants have scores around -500 and up to 200.
check(
    "flash_attention/4",
    one_block,
    one_block_spec,
    normal((64, 128), "bfloat16", scale=2.0),
    normal((640, 128), "bfloat16"),
    normal((640, 128), "bfloat16", shift=0.5),
    variants=[
        case(
            integers((32, 64), 4, 13, "float32"),
            integers((768, 64), -12, -3, "float32"),
            normal((768, 64)),
            bkv=256,
        ),
        case(
            integers((48, 64), -12, 13, "float32"),
            integers((384, 64), -12, 13, "float32"),
            normal((384, 64), shift=2.0),
            bkv=64,
        ),
    ],
    budget=Budget(hbm_bytes=360_448, vmem_bytes=197_120, calls=1, output_stores=1, mxu_bits=16),
    forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from your online kernel, softmax.py Puzzle 3, with your `block_scores` in the place of `x`. It knows when the
# buffers start, and from what. Then look at the fraction above: each term of `acc` carries the same factor exp(-m) as
# its companion in `l`. If `l` is multiplied by exp(old maximum - new maximum), what about `acc`? And the division:
# at every step, or once?
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
#     mend = ____                                      # (bq, 1)
#     l_ref[...] = l_ref[...] * mend + ____
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
#     mend = jnp.exp(m_old - m_new)
#     l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
#     pv = jnp.dot(p.astype(v_ref.dtype), v_ref[...], preferred_element_type=jnp.float32)
#     acc_ref[...] = acc_ref[...] * mend + pv
#     m_ref[...] = m_new
#
#     @pl.when(j == pl.num_programs(0) - 1)
#     def _():
#         o_ref[...] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** That is flash attention: a softmax that never sees its row, between two products that never leave the
# chip. The rest of this notebook makes it wide, fast, sparse and differentiable. Watch `k` and `v` stream by while
# everything else stays:

# %%
show(one_block, normal((64, 128), "bfloat16"), normal((640, 128), "bfloat16"), normal((640, 128), "bfloat16"))

# %% [markdown]
# ## Puzzle 5: Flash attention, forward
#
# **Goal.** All batches, heads and blocks of queries; and a step that costs a third less. Write the step, the kernel,
# and the call.
#
# ### Theory
#
# The grid is no news: (b, h, i, j) as in Puzzle 1, `j` innermost, three of its axes parallel. Your Puzzle 4 on it
# takes 2014 bundles a step on a v5e, in blocks of 512. Its products need 1024. Where do the others go?
#
# A vector register holds 8 x 128 numbers, 8 sublanes and 128 **lanes**. A column of 512 numbers fills 64 registers in
# one lane each. To subtract it from scores, each number has to be copied into all 128 lanes first, at every step. So
# keep each of them 128 times:
#
# ```text
#     m (bq, 1)        | 7 . . . . . . . |      7 -> 7777...  at every use
#     m (bq, 128)      | 7 7 7 7 7 7 7 7 |      ready; jnp.tile makes it wider, register by register
# ```
#
# And exp(x) is computed as exp2(x log2 e): a multiplication per score. The scale is one, too. Make them one: scale by
# `D**-0.5 * LOG2_E`, and take `jnp.exp2`. All else stays, in base 2.
#
# ```text
#     bundles a step, 4 heads x 2048 x 128, bfloat16      v5e     v6e
#     Puzzle 4's step on the full grid                   2014    1989
#     statistics 128 lanes wide                          1310    1102
#     and exp2                                           1284    1046
# ```


# %%
LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E)


def lanes(x, n):
    """x: (rows, 128), a column 128 times over. The same column n times over: (rows, n)."""
    return jnp.tile(x, (1, pl.cdiv(n, 128)))[:, :n]


def online_step(s, v, m_ref, l_ref, acc_ref):
    # Take one block of scores and values into the statistics, as in Puzzle 4, in base 2.
    # s: (bq, bkv), float32, times LOG2_E      v: (bkv, D)      m_ref, l_ref: (bq, 128)      acc_ref: (bq, D)
    # Puzzles 6 and 7 use it, too.
    pass  # YOUR CODE HERE


def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
    # Grid (b, h, i, j). q_ref, o_ref: (bq, D)      k_ref, v_ref: (bkv, D)      scratch as in online_step, float32
    pass  # YOUR CODE HERE


def flash_forward(q, k, v, *, bq=64, bkv=128):
    # Return the result of one pallas_call of flash_kernel, like q in shape and dtype. bkv divides Skv, bq need not
    # divide Sq. Say which axes are parallel.
    pass  # YOUR CODE HERE


# %%
def flash_budget(B, H, Sq, Skv, D, bq, bkv, itemsize=2):
    """q and the result once, k and v once for every block of queries; VMEM for blocks twice, and for scratch."""
    hbm_bytes = 2 * B * H * (Sq + pl.cdiv(Sq, bq) * Skv) * D * itemsize
    vmem_bytes = 2 * 2 * (bq + bkv) * D * itemsize + 4 * bq * (128 + 128 + D)
    return Budget(hbm_bytes, vmem_bytes, calls=1, output_stores=1, serial_steps=Skv // bkv)


check(
    "flash_attention/5",
    flash_forward,
    attention_spec,
    normal((2, 3, 192, 128), "bfloat16", scale=2.0),
    normal((2, 3, 384, 128), "bfloat16"),
    normal((2, 3, 384, 128), "bfloat16", shift=0.5),
    variants=[
        case(
            integers((1, 2, 80, 64), -12, 13, "float32"),  # scores up to about 200, and a ragged length
            integers((1, 2, 768, 64), -12, 13, "float32"),
            normal((1, 2, 768, 64), shift=2.0),
            bq=32,
            bkv=256,
            budget=flash_budget(1, 2, 80, 768, 64, 32, 256, itemsize=4),
        ),
        case(
            integers((2, 1, 100, 64), 4, 13, "bfloat16"),  # scores around -500
            integers((2, 1, 256, 64), -12, -3, "bfloat16"),
            normal((2, 1, 256, 64), "bfloat16"),
            bq=48,
            bkv=64,
            budget=flash_budget(2, 1, 100, 256, 64, 48, 64),
        ),
    ],
    budget=flash_budget(2, 3, 192, 384, 128, 64, 128),
    forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write `online_step` from your Puzzle 4: which of its lines make a (bq, 128) meet something of another width? A maximum
# over a row, or a sum, is (bq, 1), and with a (bq, 128) it broadcasts by itself. For the call: `k` and `v` follow which
# indices, the result which? Two steps that share a block of the result must stay in order; along which axis do such
# steps lie?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def online_step(s, v, m_ref, l_ref, acc_ref):
#     m_old = m_ref[...]                                        # (bq, 128)
#     m_new = ____
#     p = jnp.exp2(s - lanes(m_new, ____))
#     mend = ____
#     l_ref[...] = ____
#     acc_ref[...] = acc_ref[...] * lanes(____, ____) + ____
#     m_ref[...] = m_new
#
#
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
# def online_step(s, v, m_ref, l_ref, acc_ref):
#     m_old = m_ref[...]
#     m_new = jnp.maximum(m_old, s.max(axis=1, keepdims=True))
#     p = jnp.exp2(s - lanes(m_new, s.shape[1]))
#     mend = jnp.exp2(m_old - m_new)
#     l_ref[...] = l_ref[...] * mend + p.sum(axis=1, keepdims=True)
#     pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
#     acc_ref[...] = acc_ref[...] * lanes(mend, v.shape[1]) + pv
#     m_ref[...] = m_new
#
#
# def flash_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref):
#     j, D = pl.program_id(3), q_ref.shape[1]
#
#     @pl.when(j == 0)
#     def _():
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     s = block_scores(q_ref[...], k_ref[...], D**-0.5 * LOG2_E)
#     online_step(s, v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)
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
#         scratch_shapes=[
#             pltpu.VMEM((bq, 128), jnp.float32),
#             pltpu.VMEM((bq, 128), jnp.float32),
#             pltpu.VMEM((bq, D), jnp.float32),
#         ],
#         compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
#     )(q, k, v)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The flash attention that ships with JAX takes 1416 and 1072 bundles a step on the same blocks (v5e and
# v6e, without a scale); yours takes 1284 and 1046. The MXU needs 1024 and 256. So on a v5e it is busy four fifths of
# the time, on a v6e a quarter. What stands between? Arithmetic on single scores: scale, maximum, subtract, exp2, sum,
# cast. On the v6e that fills 41% of the slots of the vector units (VALU): 430 bundles, however well they are packed.
# And they are hard to pack: no exponential of a row before its maximum, which takes all of its scores, and no second
# product before the exponentials.

# %%
tokens = jax.ShapeDtypeStruct((1, 4, 2048, 128), jnp.bfloat16)
tpu_report(flash_forward, tokens, tokens, tokens, bq=512, bkv=512, tpu="v6e", simulate=False)

# %% [markdown]
# And the bill of Puzzle 3, again for one head over 131,072 tokens:

# %%
flash_bytes = flash_budget(1, 1, 131_072, 131_072, 128, 512, 512).hbm_bytes
print(f"three kernels: {naive_bytes / 2**30:6.1f} GiB moved, and 96 GiB of S and P to keep")
print(f"flash forward: {flash_bytes / 2**30:6.1f} GiB moved, and nothing to keep but the result, 0.03 GiB")

# %% [markdown]
# ## Puzzle 6: Causal flash attention
#
# **Goal.** Causal attention that neither computes nor fetches what nobody may see. Write the kernel and the index map
# of keys and values.
#
# ### Theory
#
# With 256 blocks of queries and as many of keys, of 65,536 pairs 32,640 lie wholly in the future: masked, every one of
# their scores is -inf, and every probability 0. Half the work, for nothing.
#
# ```text
#     j ->   0    1    2    3           #  every query of the block sees every key: no mask
#     i  0   \    .    .    .           \  some do, some do not: mask
#        1   #    \    .    .           .  nobody sees anything: skip
#        2   #    #    \    .
#        3   #    #    #    \           (bq = bkv, Sq = Skv; in general the \ may be several, or none)
# ```
#
# A `pl.when` skips the body of a step. It does not skip the copy: the block of a dead step still comes in, because the
# index map asks for it. **Only the index map can save the bytes.** For a dead step let it ask for what is in VMEM
# already; then nothing is copied (matmul.py Puzzle 11 did that at the end of a row).
#
# A step that skips both is not free: some 0.25 us remain. A body of 1284 bundles takes another 0.86 us on a v5e.
#
# Which of the three a block is, two comparisons decide: of the first or last query's position with that of the first
# or last key. The mask takes instructions, too: use it on the \ alone.


# %%
def causal_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, offset):
    # Refs and grid as in Puzzle 5. offset: Skv - Sq, not negative. Use your hide_after and online_step.
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
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)


# %%
# hbm_bytes and flops: what the live blocks take. Offsets of 64, 12 and 0, so that the diagonal cuts blocks anywhere.
check(
    "flash_attention/6",
    flash_causal,
    causal_attention_spec,
    normal((1, 2, 320, 128), "bfloat16", scale=2.0),
    normal((1, 2, 384, 128), "bfloat16"),
    normal((1, 2, 384, 128), "bfloat16", shift=0.5),
    variants=[
        case(
            integers((2, 1, 500, 64), -12, 13, "float32"),
            integers((2, 1, 512, 64), -12, 13, "float32"),
            normal((2, 1, 512, 64), shift=2.0),
            bq=96,
            budget=Budget(hbm_bytes=2_740_224, flops=123_000_000, calls=1, output_stores=1, serial_steps=4),
        ),
        case(
            integers((1, 2, 256, 64), 4, 13, "bfloat16"),  # scores around -500
            integers((1, 2, 256, 64), -12, -3, "bfloat16"),
            normal((1, 2, 256, 64), "bfloat16"),
            bq=128,
            bkv=64,
            budget=Budget(hbm_bytes=327_680, flops=28_000_000, calls=1, output_stores=1, serial_steps=4),
        ),
    ],
    budget=Budget(hbm_bytes=1_638_400, flops=99_000_000, vmem_bytes=294_912, calls=1, output_stores=1, serial_steps=3),
    forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A block is dead when its *first* key lies after its *last* query. It needs no mask when its *last* key does not lie
# after its *first* query. Write the four positions down, in terms of i, j, bq, bkv and offset. For the map: which is
# the last block of keys that block i of queries needs? All later steps of the same i may ask for that one again; it
# is what the step before has left in VMEM. The first and last thing that a kernel does must happen in dead steps, too.
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
#         m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     @pl.when(sees_all)
#     def _():
#         online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = block_scores(q_ref[...], k_ref[...], scale)
#         positions = first_query + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
#         online_step(hide_after(s, positions, first_key), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         o_ref[...] = (acc_ref[...] / lanes(l_ref[...], D)).astype(o_ref.dtype)
#
#
# def causal_kv_map(i, j, bq, bkv, offset):
#     return jnp.minimum(j, (i * bq + offset + bq - 1) // bkv)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** In blocks of 512, over 4 heads x 2048 tokens, the mean step takes 949 bundles on a v5e and 778 on a
# v6e. Masked but not skipped, it would be 1395 and 1136; with the mask on every live block, 967 and 793. JAX's own
# takes 969 and 798. And the column of positions? Made by `jnp.arange(bq)[:, None]`, it starts out as a row, which has
# to be turned: the costliest step then takes 1766 bundles on a v5e instead of 1532. `broadcasted_iota` makes a column
# at once.
#
# Look at the strips of `k` and `v` below: in dead steps nothing moves.

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
# **Goal.** The forward pass that the rest of this notebook stands on: causal or not, any lengths, and with a second
# output, the log-sum-exp of every row of scores.
#
# ### Theory
#
# The backward pass will want the probabilities again. Storing them is what we got rid of. But any of them can be
# recomputed from its score, and *one* number per row, the logarithm of the row's sum:
#
# ```text
#     lse = log(sum of exp(s))          p = exp(s - lse)
# ```
#
# For 131,072 rows that is 512 KiB instead of 32 GiB. At the last step `m` and `l` hold all of it. Mind their base:
# `lse` is a natural logarithm.
#
# Two corners are left. **A row that sees nothing** (Sq > Skv) shall have o = 0 and lse = -inf. In a block where
# everything in its row is masked, though, its maximum is still -inf, and -inf - (-inf) is NaN. Nothing but the
# starting value of `m` has to change: which float32 is no larger than any score, and still finite? (0 / 0 waits at the
# end.)
#
# **Keys that do not divide.** Beyond Skv there is garbage. In `k`, it becomes scores, and those you can mask. In `v`,
# it meets p = 0. Is that enough? Recall what 0 times NaN is.


# %%
def attention_lse_spec(
    q: Float[Array, "B H Sq D"], k: Float[Array, "B H Skv D"], v: Float[Array, "B H Skv D"], *, causal: bool = True
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Sq 1"]]:
    s = causal_scores_spec(q, k) if causal else scores_spec(q, k)
    return attention_spec(q, k, v, causal=causal), jax.nn.logsumexp(s, axis=-1, keepdims=True)


def last_key_seen(i, bq, Sq, Skv, causal):
    """The position of the last key that the first query of block i sees, and that its last query sees."""
    if not causal:
        return Skv - 1, Skv - 1
    return i * bq + Skv - Sq, i * bq + bq - 1 + Skv - Sq


def flash_fwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref, *, causal, Sq, Skv):
    # Grid and Refs as in Puzzle 6, and lse_ref: (bq, 1), float32. causal: True or False, of Python.
    # jnp.finfo(jnp.float32).min is the most negative float32.
    pass  # YOUR CODE HERE


def flash_attention_fwd(
    q: Float[Array, "B H Sq D"],
    k: Float[Array, "B H Skv D"],
    v: Float[Array, "B H Skv D"],
    *,
    causal: bool = True,
    bq: int = 64,
    bkv: int = 128,
) -> tuple[Float[Array, "B H Sq D"], Float[Array, "B H Sq 1"]]:
    (B, H, Sq, D), Skv = q.shape, k.shape[2]

    def kv_map(b, h, i, j):
        return (b, h, jnp.maximum(causal_kv_map(i, j, bq, bkv, Skv - Sq), 0) if causal else j, 0)

    q_block = pl.BlockSpec((None, None, bq, D), lambda b, h, i, j: (b, h, i, 0))
    kv_block = pl.BlockSpec((None, None, bkv, D), kv_map)
    column = pl.BlockSpec((None, None, bq, 1), lambda b, h, i, j: (b, h, i, 0))
    o, lse = pl.pallas_call(
        functools.partial(flash_fwd_kernel, causal=causal, Sq=Sq, Skv=Skv),
        grid=(B, H, pl.cdiv(Sq, bq), pl.cdiv(Skv, bkv)),
        in_specs=[q_block, kv_block, kv_block],
        out_specs=[q_block, column],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, Sq, 1), jnp.float32)],
        scratch_shapes=[
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, 128), jnp.float32),
            pltpu.VMEM((bq, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )(q, k, v)
    return o, lse


# %%
# 200 queries and 360 keys: neither length divides. Then: not causal; 170 rows that see nothing; scores around -500.
check(
    "flash_attention/7",
    flash_attention_fwd,
    attention_lse_spec,
    normal((1, 2, 200, 128), "bfloat16", scale=2.0),
    normal((1, 2, 360, 128), "bfloat16"),
    normal((1, 2, 360, 128), "bfloat16", shift=0.5),
    variants=[
        case(
            integers((2, 1, 80, 64), -12, 13, "float32"),
            integers((2, 1, 600, 64), -12, 13, "float32"),
            normal((2, 1, 600, 64), shift=2.0),
            causal=False,
            bq=32,
            bkv=256,
            budget=Budget(hbm_bytes=1_925_760, flops=41_000_000, calls=1, output_stores=1, serial_steps=3),
        ),
        case(
            normal((1, 2, 300, 64), "bfloat16"),
            normal((1, 2, 130, 64), "bfloat16"),
            normal((1, 2, 130, 64), "bfloat16"),
            bq=96,
            bkv=64,
            budget=Budget(hbm_bytes=288_096, flops=21_500_000, calls=1, output_stores=1, serial_steps=3),
        ),
        case(
            integers((1, 1, 256, 64), 4, 13, "bfloat16"),
            integers((1, 1, 512, 64), -12, -3, "bfloat16"),
            normal((1, 1, 512, 64), "bfloat16"),
            bq=128,
            budget=Budget(hbm_bytes=295_936, flops=32_000_000, calls=1, output_stores=1, serial_steps=4),
        ),
    ],
    budget=Budget(hbm_bytes=1_574_464, flops=99_000_000, vmem_bytes=295_424, calls=1, output_stores=1, serial_steps=3),
    forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Start from your Puzzle 6. What `last_key_seen` returns decides about a block now, causal or not: when every query
# sees every key of the block, when some sees one. Without a mask by position, the last key that anybody sees is
# Skv - 1; `hide_after` takes a number as well as a column. For lse: 2**m times l is the sum of exp(s). Take the
# natural logarithm of that, on paper. For a row that saw nothing, what do your formulas make of l = 0?
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
#     ____                                                          # starting values: m_ref from another number
#
#     ____                                                          # blocks without a mask, as in Puzzle 6
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = ____
#         last_seen = ____ if causal else ____                      # (bq, 1), or a number
#         real = ____                                               # (bkv, 1): which rows of v are real
#         v = jnp.where(real, ____, ____)
#         online_step(____, v, m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         l = l_ref[...]
#         o_ref[...] = (acc_ref[...] / lanes(jnp.where(____, 1, l), D)).astype(o_ref.dtype)
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
#         m_ref[...] = jnp.full(m_ref.shape, jnp.finfo(jnp.float32).min)
#         l_ref[...] = jnp.zeros(l_ref.shape)
#         acc_ref[...] = jnp.zeros(acc_ref.shape)
#
#     @pl.when(sees_all)
#     def _():
#         online_step(block_scores(q_ref[...], k_ref[...], scale), v_ref[...], m_ref, l_ref, acc_ref)
#
#     @pl.when(sees_some & jnp.logical_not(sees_all))
#     def _():
#         s = block_scores(q_ref[...], k_ref[...], scale)
#         last_seen = first_sees + jax.lax.broadcasted_iota(jnp.int32, (bq, 1), 0) if causal else Skv - 1
#         real = first_key + jax.lax.broadcasted_iota(jnp.int32, (bkv, 1), 0) < Skv
#         v = jnp.where(real, v_ref[...], 0)
#         online_step(hide_after(s, last_seen, first_key), v, m_ref, l_ref, acc_ref)
#
#     @pl.when(j == pl.num_programs(3) - 1)
#     def _():
#         l = l_ref[...]
#         o_ref[...] = (acc_ref[...] / lanes(jnp.where(l == 0, 1, l), D)).astype(o_ref.dtype)
#         lse_ref[...] = (m_ref[...] / LOG2_E + jnp.log(l))[:, :1]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A forward pass for any lengths, masked rows and ragged edges included, and it leaves 4 bytes per row
# behind from which all probabilities can be had again. The starting value costs nothing at all.
# The way back starts here.
