"""Wrong answers to puzzles/ladder.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

# %% ladder/1: the arguments and the result alone
# eager_bytes:
# -    table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
# -    return 12 * table + 2 * (table // 2) + 4 * column + 4 * x
# +    return 4 * 2 * H * T * D

# %% ladder/1: only what is written
# eager_bytes: `12 * table + 2 * (table // 2) + 4 * column + 4 *` -> `5 * table + table // 2 + 2 * column +`

# %% ladder/1: all tables in bfloat16
# eager_bytes:
# -    table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
# -    return 12 * table + 2 * (table // 2) + 4 * column + 4 * x
# +    table, column, x = 2 * H * T * T, 4 * H * T, 2 * H * T * D
# +    return 14 * table + 4 * column + 4 * x

# %% ladder/1: for one head
# eager_bytes: `H * T * T, 4 * H * T, 2 * H` -> `T * T, 4 * T, 2`

# %% ladder/2: the table is read and never written
# fused_bytes: `2 * table + 2 *` -> `table +`

# %% ladder/2: nothing lies between the programs
# fused_bytes:
# -    table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
# -    return 2 * table + 2 * column + 4 * x
# +    return 4 * 2 * H * T * D

# %% ladder/2: the table is bfloat16
# fused_bytes: `= 4 *` -> `= 2 *`

# %% ladder/2: as many bytes as op by op
# fused_bytes:
# -    table, column, x = 4 * H * T * T, 4 * H * T, 2 * H * T * D
# -    return 2 * table + 2 * column + 4 * x
# +    return eager_bytes(H, T, D)


# %% ladder/3: all of the table
def chunked_attention(q, k, v, *, c=64):
    return attention(q, k, v)


# %% ladder/3: all chunks at once
# chunked_attention: `jax.lax.map(lambda chunk: attention(chunk, k, v), chunks` -> `jax.vmap(lambda chunk: attention(chunk, k, v))(chunks`


# %% ladder/3: a Python loop
def chunked_attention(q, k, v, *, c=64):
    chunks = [attention(q[:, i : i + c], k, v) for i in range(0, q.shape[1], c)]
    return jnp.concatenate(chunks, axis=1)


# %% ladder/3: the chunks are not moved to the front
# chunked_attention:
# -    chunks = q.reshape(H, T // c, c, D).swapaxes(0, 1)
# +    chunks = q.reshape(T // c, H, c, D)

# %% ladder/3: the results stay as they are stacked
# chunked_attention: `out.swapaxes(0, 1).reshape(q.shape)` -> `out.reshape(q.shape)`


# %% ladder/3: keys in chunks, too, each with a softmax of its own
# chunked_attention:
# -    chunks = q.reshape(H, T // c, c, D).swapaxes(0, 1)
# -    out = jax.lax.map(lambda chunk: attention(chunk, k, v), chunks)
# -    return out.swapaxes(0, 1).reshape(q.shape)
# +    q, k, v = (x.reshape(H, T // c, c, D).swapaxes(0, 1) for x in (q, k, v))
# +    out = jax.lax.map(lambda chunks: attention(*chunks), (q, k, v))
# +    return out.swapaxes(0, 1).reshape(H, T, D)

# %% ladder/3: no maximum is subtracted
# chunked_attention:
# -    out = jax.lax.map(lambda chunk: attention(chunk, k, v), chunks)
# +    def rows(q):
# +        e = jnp.exp(jnp.einsum("hcd,hkd->hck", q, k, preferred_element_type=jnp.float32) * D**-0.5)
# +        return jnp.einsum("hck,hkd->hcd", (e / e.sum(axis=2, keepdims=True)).astype(v.dtype), v)
# +    out = jax.lax.map(rows, chunks)

# %% ladder/4: all of the difference belongs to the steps
# elsewhere: it shows where the two figures are compared
# step_cost: `seconds - flash_floor(H, T, D, bq, bkv, chip)` -> `seconds`


# %% ladder/4: all of the slow time is steps
def step_cost(H, T, D, slow, quick, chip):
    bq, bkv, seconds = slow
    return seconds / flash_steps(H, T, bq, bkv)


# %% ladder/4: what the floor leaves of the slow time
def step_cost(H, T, D, slow, quick, chip):
    bq, bkv, seconds = slow
    return (seconds - flash_floor(H, T, D, bq, bkv, chip)) / flash_steps(H, T, bq, bkv)


# %% ladder/4: the floor counts bytes alone
# step_cost: `flash_floor(H, T, D, bq, bkv, chip)` -> `flash_bytes(H, T, D, bq, bkv) / chip.hbm_bytes_per_s`


# %% ladder/5: the softmax waits for the MXU
# flash_time: `max(mxu, hbm - fill, scores)` -> `max(mxu + scores, hbm - fill)`

# %% ladder/5: the model of matmul.py
# flash_time: `max(mxu, hbm - fill, scores)` -> `max(mxu, hbm - fill)`

# %% ladder/5: steps cost nothing
# flash_time: ` + flash_steps(H, T, bq, bkv) * chip.step_s` -> ``

# %% ladder/5: one product
# elsewhere: it shows at another line of the function
# flash_time: `4 * H * T * T * D / chip.flops_per_s` -> `2 * H * T * T * D / chip.flops_per_s`

# %% ladder/5: the scores of one head
# score_cost: `/ (H * T * T)` -> `/ (T * T)`

# %% ladder/5: all of the time is softmax
# score_cost: `(seconds - fill - flash_steps(H, T, bq, bkv) * chip.step_s) / (H * T * T)` -> `seconds / (H * T * T)`

# %% ladder/5: the products are taken off, too
# score_cost: `(seconds - fill` -> `(seconds - 4 * H * T * T * D / chip.flops_per_s - fill`


# %% ladder/6: the norm of mlp_spec, and then the product
# folded_mlp:
# -    folded = (g.T * w1).astype(w1.dtype)
# -    h = jax.nn.gelu(r * jnp.dot(x, folded, preferred_element_type=jnp.float32)).astype(x.dtype)
# +    normed = (y * r * g).astype(x.dtype)
# +    h = jax.nn.gelu(jnp.dot(normed, w1, preferred_element_type=jnp.float32)).astype(x.dtype)

# %% ladder/6: the factor of the rows comes after GELU
# folded_mlp: `jax.nn.gelu(r * jnp.dot(x, folded, preferred_element_type=jnp.float32))` -> `r * jax.nn.gelu(jnp.dot(x, folded, preferred_element_type=jnp.float32))`

# %% ladder/6: g is left out
# folded_mlp: `(g.T * w1)` -> `w1`

# %% ladder/6: the product is made twice
# elsewhere: the cost is that of both lines
# folded_mlp:
# -    h = jax.nn.gelu(r * jnp.dot(x, folded, preferred_element_type=jnp.float32)).astype(x.dtype)
# +    h = jnp.dot(x, folded, preferred_element_type=jnp.float32) + jnp.dot(x, folded, preferred_element_type=jnp.float32)
# +    h = jax.nn.gelu(0.5 * r * h).astype(x.dtype)

# %% ladder/6: no residual
# folded_mlp: `x + jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)` -> `jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)`


# %% ladder/6: the spec in one jitted function
def folded_mlp(x, g, w1, w2):
    @jax.jit
    def everything(x, g, w1, w2):
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
        y = (y * g).astype(x.dtype)
        h = jax.nn.gelu(jnp.dot(y, w1, preferred_element_type=jnp.float32)).astype(x.dtype)
        return x + jnp.dot(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)

    return everything(x, g, w1, w2)


# %% ladder/6: g is rounded before the product
# folded_mlp: `(g.T * w1).astype(w1.dtype)` -> `g.T.astype(w1.dtype) * w1`

# %% ladder/7: the accumulator is never zeroed
# mlp_kernel:
# -        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% ladder/7: normed again in every step
# elsewhere: the line with the most arithmetic is that of GELU
# mlp_kernel:
# -    @pl.when(j == 0)
# -    def _():
# -        y = x_ref[...].astype(jnp.float32)
# -        y = y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
# -        y_ref[...] = (y * g_ref[...]).astype(y_ref.dtype)
# -        acc_ref[...] = jnp.zeros(acc_ref.shape)
# +    y = x_ref[...].astype(jnp.float32)
# +    y = y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6)
# +    y_ref[...] = (y * g_ref[...]).astype(y_ref.dtype)
# +
# +    @pl.when(j == 0)
# +    def _():
# +        acc_ref[...] = jnp.zeros(acc_ref.shape)

# %% ladder/7: no GELU
# mlp_kernel: `jax.nn.gelu(h).astype(w2_ref.dtype)` -> `h.astype(w2_ref.dtype)`

# %% ladder/7: the residual is the normalised x
# mlp_kernel: `x_ref[...] + acc_ref[...].astype(o_ref.dtype)` -> `y_ref[...] + acc_ref[...].astype(o_ref.dtype)`

# %% ladder/7: the last block of the hidden layer alone
# mlp_kernel: `+=` -> `=`

# %% ladder/8: no transpose
# cut_patches:
# -    x = x.transpose(0, 1, 3, 2, 4, 5)

# %% ladder/8: the columns of a patch before its rows
# cut_patches: `transpose(0, 1, 3, 2, 4, 5)` -> `transpose(0, 1, 3, 4, 2, 5)`

# %% ladder/8: patches column by column
# cut_patches: `transpose(0, 1, 3, 2, 4, 5)` -> `transpose(0, 3, 1, 2, 4, 5)`


# %% ladder/8: a loop over the patches
def cut_patches(images, P):
    B, H, W, _ = images.shape
    places = [(y, x) for y in range(0, H, P) for x in range(0, W, P)]
    return jnp.stack([images[:, y : y + P, x : x + P].reshape(B, -1) for y, x in places], axis=1)


# %% ladder/9: pieces of the images as they lie
# host_patches: `cut_patches(images, P).reshape(` -> `images.reshape(`

# %% ladder/9: the images are cut on the device
# host_patches: `cut_patches(images, P)` -> `cut_patches(jnp.asarray(images), P)`

# %% ladder/9: cut on the device, and brought back
# host_patches: `cut_patches(images, P)` -> `np.array(jax.jit(cut_patches, static_argnums=1)(images, P))`

# %% ladder/9: each image apart
# host_patches: `.reshape(-1, P * P * images.shape[3])` -> ``

# %% ladder/9: the weights walk along
# embed_patches: `pl.BlockSpec((K, D), lambda i: (0, 0))` -> `pl.BlockSpec((K, D), lambda i: (i, 0))`

# %% ladder/9: the last rows are left out
# embed_patches: `pl.cdiv(R, bm)` -> `R // bm`

# %% ladder/9: the bias is rounded before it is added
# embed_kernel: `(y + bias_ref[...]).astype(o_ref.dtype)` -> `y.astype(o_ref.dtype) + bias_ref[...].astype(o_ref.dtype)`


# %% ladder/9: a column of weights at a time
def host_patches(images, P):
    return cut_patches(images, P).reshape(-1, P * P * images.shape[3])


def embed_kernel(x_ref, w_ref, bias_ref, o_ref):
    y = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = (y + bias_ref[...]).astype(o_ref.dtype)


def embed_patches(patches, w, bias, *, bm=64):
    (R, K), D = patches.shape, w.shape[1]
    return pl.pallas_call(
        embed_kernel,
        grid=(pl.cdiv(R, bm), D // 128),
        in_specs=[
            pl.BlockSpec((bm, K), lambda i, j: (i, 0)),
            pl.BlockSpec((K, 128), lambda i, j: (0, j)),
            pl.BlockSpec((1, 128), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((bm, 128), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((R, D), patches.dtype),
    )(patches, w, bias)


# %% ladder/10: rows and columns swapped
# messages_x_map: `cols_ref[t]` -> `rows_ref[t]`

# %% ladder/10: the step as the index
# messages_x_map: `cols_ref[t]` -> `t`

# %% ladder/10: the sum goes on from row to row
# messages_kernel: `jnp.where(starts, 0, acc_ref[...])` -> `jnp.where(t == 0, 0, acc_ref[...])`

# %% ladder/10: only the last block of a row
# messages_kernel: `before + jnp.dot` -> `jnp.dot`

# %% ladder/10: stored at the last step alone
# messages_kernel: `(t == last) | (rows_ref[t] != rows_ref[jnp.minimum(t + 1, last)])` -> `t == last`

# %% ladder/10: a row begins where the column does not grow
# messages_kernel: `rows_ref[t] != rows_ref[jnp.maximum(t - 1, 0)]` -> `cols_ref[t] <= cols_ref[jnp.maximum(t - 1, 0)]`
