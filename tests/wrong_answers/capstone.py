"""Wrong answers to puzzles/capstone.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% capstone/1: a block that need not divide
# tile:
# -    fitting = [n for n in range(unit, most + 1, unit) if size % n == 0]
# -    return max(fitting, default=size)
# +    return min(size, most)

# %% capstone/1: the smallest block that fits
# tile: `max(fitting` -> `min(fitting`

# %% capstone/1: counts down from most, whatever the unit
# tile:
# -    fitting = [n for n in range(unit, most + 1, unit) if size % n == 0]
# +    fitting = [n for n in range(most, 0, -unit) if size % n == 0]

# %% capstone/1: the longest block is left out
# tile: `most + 1` -> `most`

# %% capstone/1: lanes in units of 8
# linear: `tile(K, most, 128)` -> `tile(K, most, 8)`

# %% capstone/1: rows in units of 128
# linear: `tile(M, most, 8)` -> `tile(M, most, 128)`

# %% capstone/1: rows in units of 1
# linear: `tile(M, most, 8)` -> `tile(M, most, 1)`

# %% capstone/1: bn and bk change places
# linear: `tile(N, most, 128), tile(K, most, 128)` -> `tile(K, most, 128), tile(N, most, 128)`

# %% capstone/1: whole arrays
# linear: `tile(M, most, 8), tile(N, most, 128), tile(K, most, 128)` -> `M, N, K`

# %% capstone/1: the norm by hand
# norm: `own.smooth_layer_norm(x, gamma, beta, tile(x.shape[0], most, 8))` -> `(x - x.mean(axis=1, keepdims=True)) / jnp.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * gamma + beta`

# %% capstone/2: no maximum is subtracted
# loss_kernel:
# -    x = x - x.max(axis=1, keepdims=True)

# %% capstone/2: the score at the label before the shift
# loss_kernel: `jnp.where(hit, x, 0)` -> `jnp.where(hit, logits_ref[...], 0)`

# %% capstone/2: no 1 at the label
# loss_kernel: `(e / total - hit)` -> `(e / total)`

# %% capstone/2: the gradient without its weight
# loss_kernel: `dlogits_ref[...] = weights_ref[...] * (e / total - hit)` -> `dlogits_ref[...] = e / total - hit`

# %% capstone/2: the loss without its weight
# loss_kernel: `losses_ref[...] = weights_ref[...] * (jnp.log(total) - at_label)` -> `losses_ref[...] = jnp.log(total) - at_label`

# %% capstone/2: what comes after the loss is forgotten
# loss_bwd: `residuals * g` -> `residuals`

# %% capstone/2: the kernel once more, in the backward pass
# loss_fwd: `return losses, dlogits` -> `return losses, (logits, labels, weights)`
# loss_bwd: `residuals * g` -> `loss_call(*residuals, bm)[1] * g`

# %% capstone/3: the final shape at once
# split_heads: `y.reshape(B, y.shape[0] // B, H + 2 * Hkv, -1).transpose(0, 2, 1, 3)` -> `y.reshape(B, H + 2 * Hkv, y.shape[0] // B, -1)`

# %% capstone/3: keys and values change places
# split_heads: `heads[:, H : H + Hkv], heads[:, H + Hkv :]` -> `heads[:, H + Hkv :], heads[:, H : H + Hkv]`

# %% capstone/3: the heads after the columns
# split_heads: `reshape(B, y.shape[0] // B, H + 2 * Hkv, -1).transpose(0, 2, 1, 3)` -> `reshape(B, y.shape[0] // B, -1, H + 2 * Hkv).transpose(0, 3, 1, 2)`

# %% capstone/3: back without the exchange
# attention: `o.transpose(0, 2, 1, 3).reshape` -> `o.reshape`
# %% capstone/3: three products
# attention: `split_heads(linear(x, wqkv), B, H, Hkv)` -> `split_heads(jnp.concatenate([linear(x, w) for w in jnp.split(wqkv, [H * 64, (H + Hkv) * 64], axis=1)], axis=1), B, H, Hkv)`

# %% capstone/3: blocks as long as the sequence
# attention: `block = min(q.shape[2], 128)` -> `block = q.shape[2]`

# %% capstone/3: queries beside each other see the future
# attention: `bq=block, bkv=block` -> `causal=False, bq=block, bkv=block`


# %% capstone/4: the norm in the stream
def mlp(h, w):
    return linear(jax.nn.gelu(linear(h, w.up)), w.down)


def block(x, w, attend, feed):
    y, kept = attend(x)
    x = norm(x + y, w.gamma1, w.beta1)
    y, extra = feed(x)
    return norm(x + y, w.gamma2, w.beta2), kept, extra


# %% capstone/4: the second norm reads the first stream
# block:
# -    x = x + y
# -    y, extra = feed(norm(x, w.gamma2, w.beta2))
# -    return x + y, kept, extra
# +    z, extra = feed(norm(x, w.gamma2, w.beta2))
# +    return x + y + z, kept, extra

# %% capstone/4: attention is not added
# block: `x = x + y` -> `x = y`

# %% capstone/4: attention reads the stream
# block: `attend(norm(x, w.gamma1, w.beta1))` -> `attend(x)`

# %% capstone/4: no nonlinearity
# mlp: `jax.nn.gelu(linear(h, w.up))` -> `linear(h, w.up)`

# %% capstone/4: relu
# mlp: `gelu` -> `relu`

# %% capstone/4: the MLP is not added
# block: `return x + y, kept, extra` -> `return y, kept, extra`

# %% capstone/4: the extras change places
# block: `return x + y, kept, extra` -> `return x + y, extra, kept`

# %% capstone/4: no extras
# block: `return x + y, kept, extra` -> `return x + y, None, None`

# %% capstone/4: the extras come back in tuples of one
# block: `y, kept = attend` -> `y, *kept = attend`

# %% capstone/5: the scalars are not counted
# adam_aliases: `{1: 0, 2: 1, 3: 2}` -> `{0: 0, 1: 1, 2: 2}`

# %% capstone/5: nothing is aliased
# adam_aliases: `{1: 0, 2: 1, 3: 2}` -> `{}`

# %% capstone/5: only the parameters are written in place
# adam_aliases: `{1: 0, 2: 1, 3: 2}` -> `{1: 0}`

# %% capstone/5: the other way round
# adam_aliases: `{1: 0, 2: 1, 3: 2}` -> `{0: 1, 1: 2, 2: 3}`

# %% capstone/5: p is moved by the old mean
# adam_kernel: `(m / scale_ref[0])` -> `(m_ref[...] / scale_ref[0])`

# %% capstone/5: the two scales change places
# adam_kernel: `scale_ref[0]` -> `scale_ref[1]`
# adam_kernel: `v / scale_ref[1]` -> `v / scale_ref[0]`

# %% capstone/5: no correction for the start
# adam_kernel: `m / scale_ref[0]` -> `m`

# %% capstone/5: epsilon under the root
# adam_kernel: `(jnp.sqrt(v / scale_ref[1]) + 1e-8)` -> `jnp.sqrt(v / scale_ref[1] + 1e-8)`

# %% capstone/5: uphill
# adam_kernel: `p_ref[...] - lr` -> `p_ref[...] + lr`

# %% capstone/5: the new v over the gradient
# adam_aliases: `3: 2}` -> `4: 2}`

# %% capstone/6: the softmax over the chosen experts alone
# balance_loss: `_, experts = own.route(logits, k=k)` -> `best, experts = own.route(logits, k=k)`
# balance_loss: `jax.nn.softmax(logits, axis=1).mean(axis=0)` -> `jnp.zeros(E).at[experts.reshape(-1)].add(best.reshape(-1)) / x.shape[0]`

# %% capstone/6: counts instead of shares
# balance_loss: `jnp.bincount(experts.reshape(-1), length=E) / experts.size` -> `jnp.bincount(experts.reshape(-1), length=E)`

# %% capstone/6: shares of the tokens, not of the slots
# balance_loss: `experts.size` -> `x.shape[0]`

# %% capstone/6: not times the number of experts
# balance_loss: `return E * (load * prob).sum()` -> `return (load * prob).sum()`

# %% capstone/6: the router of the balance reads the stream
# moe_block: `balance_loss(h,` -> `balance_loss(x,`

# %% capstone/6: no gradient
# balance_loss: `return E * (load * prob).sum()` -> `return E * (load * jax.lax.stop_gradient(prob)).sum()`

# %% capstone/6: attention in the place of the experts
# moe_block: `block(x, w, attend, experts)` -> `block(x, w, experts, attend)`

# %% capstone/6: the number of experts is not passed on
# moe_block: `w.w2, k=k)` -> `w.w2, k=2)`

# %% capstone/6: every expert for every token
# moe_block: `expert_layer(h, w.router, w.w1, w.w2, k=k)` -> `experts_spec(h, w.router, w.w1, w.w2, k=k)[0]`

# %% capstone/7: the new token does not see itself
# decode_attention: `lengths + 1)` -> `lengths)`

# %% capstone/7: one place too far
# append: `lengths // page]` -> `(lengths + 1) // page]`
# append: `lengths % page]` -> `(lengths + 1) % page]`

# %% capstone/7: the position in place of the place in the page
# append: `lengths % page]` -> `lengths]`

# %% capstone/7: a page number that is not looked up
# append: `table[jnp.arange(lengths.shape[0]), lengths // page]` -> `lengths // page`

# %% capstone/7: every user looks up the first row
# append: `table[jnp.arange(lengths.shape[0]), lengths // page]` -> `table[0, lengths // page]`

# %% capstone/7: the new rows in the axes of the product
# append: `new.transpose(1, 0, 2)` -> `new`

# %% capstone/7: keys and values change places
# decode_attention: `own.paged_attention(y[:, :H], k_pages, v_pages` -> `own.paged_attention(y[:, :H], v_pages, k_pages`

# %% capstone/7: the values are written over the keys
# decode_attention: `append(v_pages, y[:, H + Hkv :]` -> `append(v_pages, y[:, H : H + Hkv]`

# %% capstone/7: the query of the next head
# decode_attention: `own.paged_attention(y[:, :H]` -> `own.paged_attention(y[:, 1 : H + 1]`
