"""Wrong answers to puzzles/basics.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% basics/1: the name o_ref is bound to something else
# add_ten_kernel: `o_ref[...]` -> `o_ref`

# %% basics/1: a Ref is used as an array
# add_ten_kernel: `[...] = x_ref[...] + 10` -> `[...] = x_ref + 10`

# %% basics/1: the result is returned
# add_ten_kernel: `o_ref[...] =` -> `return`

# %% basics/1: half of the result is written
# add_ten_kernel: `[...] = x_ref[...]` -> `[:320] = x_ref[:320]`


# %% basics/1: the input is overwritten
# add_ten_kernel: `o_ref[` -> `x_ref[`

# %% basics/1: added to what the output holds
# add_ten_kernel: `=` -> `+=`

# %% basics/1: adds one
# add_ten_kernel: `10` -> `1`

# %% basics/2: one step only
# vector_add_grid: `n // b` -> `1`

# %% basics/2: a step per element
# vector_add_grid: `n // b,` -> `n,`

# %% basics/2: one step too many
# vector_add_grid: `b,` -> `b + 1,`

# %% basics/2: one step too few
# vector_add_grid: `b,` -> `b - 1,`

# %% basics/2: true for the notebook's example alone
# vector_add_grid: `n // b` -> `5`

# %% basics/2: a float in the grid
# vector_add_grid: `n // b,` -> `n / b,`

# %% basics/2: the kernel reaches for the whole vector
# vector_add_kernel:
# -    o_ref[...] = x_ref[...] + y_ref[...]
# +    for start in range(0, 1280, 256):
# +        o_ref[start : start + 256] = x_ref[start : start + 256] + y_ref[start : start + 256]

# %% basics/2: y is forgotten
# vector_add_kernel: `[...] + y_ref[...]` -> `[...] + x_ref[...]`


# %% basics/2: registers of the example's block
def vector_add_kernel(x_ref, y_ref, o_ref):
    for start in (0, 128):  # one row of lanes at a time
        lanes = pl.ds(start, 128)
        o_ref[lanes] = x_ref[lanes] + y_ref[lanes]


def vector_add_grid(n, b):
    return (pl.cdiv(n, b),)


# %% basics/3: off by one block
# reverse_map: `- 1 - i,` -> `- i,`

# %% basics/3: an element offset
# reverse_map: `num_pages - 1 - i` -> `(num_pages - 1 - i) * 256`

# %% basics/3: not reversed at all
# reverse_map: `return (num_pages - 1 - i,)` -> `return (i,)`


# %% basics/3: a negative index, as in Python
# reverse_map: `num_pages - 1` -> `-1`

# %% basics/3: true for five pages alone
# reverse_map: `num_pages - 1` -> `4`

# %% basics/3: wrapped around instead of reversed
# reverse_map: `num_pages - 1 - i` -> `(i + num_pages - 1) % num_pages`

# %% basics/3: a number instead of a tuple is fine, but a float is not
# reverse_map: `num_pages - 1 - i` -> `(num_pages - 1 - i) / 1`

# %% basics/4: the tile is moved but not turned
# transpose_kernel: `[...].T` -> `[...]`

# %% basics/4: the tile is turned but not moved
# transpose_out_map: `j, i` -> `i, j`

# %% basics/4: reshaped instead of transposed
# transpose_kernel: `T` -> `reshape(o_ref.shape)`

# %% basics/4: element offsets
# transpose_out_map: `(j, i)` -> `(j * 256, i * 128)`

# %% basics/4: everything lands in the first row of tiles
# transpose_out_map:
# -    return (j, i)
# +    return (0, i)

# %% basics/4: the Ref itself is transposed
# transpose_kernel: `x_ref[...].` -> `x_ref.`

# %% basics/5: the roles are swapped
# scale_map: `i, 0` -> `0, j`
# shift_map: `0, j` -> `i, 0`

# %% basics/5: the same map for everybody
# scale_map: `0` -> `j`
# shift_map: `0` -> `i`

# %% basics/5: always the first block
# scale_map:
# -    return (i, 0)
# +    return (0, 0)
# shift_map: `(0, j)` -> `(0, 0)`

# %% basics/5: the shift is forgotten
# scale_shift_kernel: `[...] + shift_ref[...]` -> `[...]`

# %% basics/5: the index of the shift runs along the rows
# shift_map: `0, j` -> `j, 0`

# %% basics/6: the second buffer is forgotten
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and b * N * 10 <= vmem_bytes)

# %% basics/6: a block of everything has one buffer, whatever its index map returns
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    buffers = lambda bm: 1 if bm == M else 2
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and buffers(b) * b * N * 10 <= vmem_bytes)

# %% basics/6: blocks of eight rows
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# -    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
# +    block = pl.BlockSpec((8, N), lambda i: (i, 0))
# gated: `(M // bm,),` -> `(M // 8,),`


# %% basics/6: no grid at all
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    return pl.pallas_call(gated_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16))(x, g)


# %% basics/6: the sigmoid is taken outside
# gated_kernel: `jax.nn.sigmoid(g_ref[...])` -> `g_ref[...]`
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
# gated: `(x, g)` -> `(x, jax.nn.sigmoid(g))`


# %% basics/6: plain jnp, and no kernel
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    return (x * jax.nn.sigmoid(g)).astype(jnp.bfloat16)


# %% basics/6: the result stays float32
# gated_kernel: `= (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)` -> `= x_ref[...] * jax.nn.sigmoid(g_ref[...])`
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)
# gated: `bfloat16` -> `float32`

# %% basics/6: the cast is forgotten
# gated_kernel: `= (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)` -> `= x_ref[...] * jax.nn.sigmoid(g_ref[...])`
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)

# %% basics/6: the grid of another block
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# -    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
# +    block = pl.BlockSpec((16, N), lambda i: (i, 0))
# gated: `(M // bm,),` -> `(M // 40,),`

# %% basics/6: a block that does not divide the rows
# elsewhere: with a grid that is rounded up, it is right
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = vmem_bytes // (2 * N * 10) // 8 * 8

# %% basics/6: a block that is not a multiple of 8
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(1, M + 1) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)

# %% basics/6: the result is forgotten in the sum
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 8 <= vmem_bytes)

# %% basics/6: the block of the example
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = 16

# %% basics/6: the index map turned around
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# -    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
# +    block = pl.BlockSpec((bm, N), lambda i: (0, i))

# %% basics/6: pallas_call is not called with the arrays
# elsewhere: it shows at another line of the function
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
# gated: `(x, g)` -> ``

# %% basics/6: the result is not returned
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
# gated:
# -    return pl.pallas_call(
# +    pl.pallas_call(

# %% basics/7: positions inside the tile
# distance_bias_kernel: `= pl.program_id(0) * bq + jnp.` -> `= jnp.`
# distance_bias_kernel: `= pl.program_id(1) * bk + jnp.` -> `= jnp.`

# %% basics/7: the queries are counted inside the tile
# elsewhere: it shows at another line of the function
# distance_bias_kernel: `= pl.program_id(0) * bq + jnp.` -> `= jnp.`


# %% basics/7: the axes are swapped
# distance_bias_kernel:
# -    q = pl.program_id(0) * bq + jnp.arange(bq)
# -    k = pl.program_id(1) * bk + jnp.arange(bk)
# +    q = pl.program_id(1) * bq + jnp.arange(bq)
# +    k = pl.program_id(0) * bk + jnp.arange(bk)

# %% basics/7: steps counted as if they were elements
# distance_bias_kernel: `(0) * bq + jnp.` -> `(0) + jnp.`
# distance_bias_kernel: `(1) * bk + jnp.` -> `(1) + jnp.`


# %% basics/7: the block sizes of the example
# distance_bias_kernel:
# -    bq, bk = x_ref.shape
# -    q = pl.program_id(0) * bq + jnp.arange(bq)
# -    k = pl.program_id(1) * bk + jnp.arange(bk)
# +    q = pl.program_id(0) * 32 + jnp.arange(32)
# +    k = pl.program_id(1) * 128 + jnp.arange(128)

# %% basics/7: a Python if on the step
# distance_bias_kernel:
# -    q = pl.program_id(0) * bq + jnp.arange(bq)
# +    if pl.program_id(0) == 0:
# +        q = jnp.arange(bq)
# +    else:
# +        q = pl.program_id(0) * bq + jnp.arange(bq)

# %% basics/7: off by one everywhere
# distance_bias_kernel: `(k[None, :] - q[:, None])` -> `(k[None, :] - q[:, None] - 1)`


# %% basics/7: the block sizes change places
# distance_bias_kernel:
# -    q = pl.program_id(0) * bq + jnp.arange(bq)
# -    k = pl.program_id(1) * bk + jnp.arange(bk)
# +    q = pl.program_id(0) * bk + jnp.arange(bq)
# +    k = pl.program_id(1) * bq + jnp.arange(bk)


# %% basics/8: the padding goes into the mean
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    o_ref[...] = x - x.mean(axis=0, keepdims=True)


# %% basics/8: masked, but divided by 16
# centre_kernel:
# -    total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
# -    count = jnp.minimum(16, num_rows - start)
# -    o_ref[...] = x - total / count
# +    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / 16

# %% basics/8: NaN times zero
# centre_kernel: `(start + jnp.arange(16))[:, None] < num_rows` -> `((start + jnp.arange(16))[:, None] < num_rows).astype(jnp.float32)`
# centre_kernel:
# -    total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
# centre_kernel: `- total /` -> `- (x * real).sum(axis=0, keepdims=True) /`


# %% basics/8: the mask counts inside the chunk
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = jnp.arange(16)[:, None] < num_rows
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / count


# %% basics/8: one row of padding too many
# centre_kernel: `[:, None] < num_rows` -> `[:, None] <= num_rows`
# centre_kernel:
# -    total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
# centre_kernel: `- total /` -> `- jnp.where(real, x, 0).sum(axis=0, keepdims=True) /`


# %% basics/8: only the real rows are written, and the mean is that of everything
# centre_kernel:
# -    total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
# -    count = jnp.minimum(16, num_rows - start)
# -    o_ref[...] = x - total / count
# +    o_ref[...] = jnp.where(real, x - x.mean(axis=0, keepdims=True), 0)


# %% basics/8: NaN is left out of the mean
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    o_ref[...] = x - jnp.nanmean(x, axis=0, keepdims=True)


# %% basics/8: NaN is taken for zero
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.nan_to_num(x).sum(axis=0, keepdims=True) / count


# %% basics/8: finite is taken for real
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    real = jnp.isfinite(x)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / real.sum(axis=0, keepdims=True)


# %% basics/9: the output is never zeroed
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed at every step
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed in the first row of blocks only
# row_sum_kernel: `pl.program_id(1) == 0` -> `(pl.program_id(0) == 0) & (pl.program_id(1) == 0)`
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`

# %% basics/9: zeroed along the other axis
# row_sum_kernel: `(1)` -> `(0)`
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`


# %% basics/9: the last block wins
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: the output moves along
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`
# row_sum_out_map: `0` -> `j`

# %% basics/9: the dimension is not kept
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`
# row_sum_kernel: `(axis=1, keepdims=True)` -> `(axis=1)`


# %% basics/9: a Python if
def row_sum_kernel(x_ref, o_ref):
    if pl.program_id(1) == 0:
        o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed after the addition
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed at the last step
# row_sum_kernel: `0` -> `pl.num_programs(1) - 1`
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`

# %% basics/9: nothing is added on the first visit
# row_sum_kernel: `jnp.zeros(o_ref.shape, o_ref.dtype)` -> `jnp.zeros_like(o_ref)`
# row_sum_kernel:
# -    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)
# +    @pl.when(pl.program_id(1) > 0)
# +    def _():
# +        o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


# %% basics/10: the scratch is never zeroed
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: the scratch is zeroed once, for all tiles
# matmul_kernel:
# -    k = pl.program_id(2)
# +    i, j, k = pl.program_id(0), pl.program_id(1), pl.program_id(2)
# matmul_kernel: `k == 0` -> `(i == 0) & (j == 0) & (k == 0)`
# matmul_kernel: `jnp.zeros(acc_ref.shape, acc_ref.dtype)` -> `jnp.zeros_like(acc_ref)`


# %% basics/10: summed up in bfloat16
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% basics/10: the running sum is rounded to bfloat16 at every step
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    total = acc_ref[...] + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = total.astype(jnp.bfloat16).astype(jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: stored at every step
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: the last product alone
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% basics/10: the last product alone, by way of the scratch
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    acc_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: stored at step num_k, which never comes
# matmul_kernel:
# -    k = pl.program_id(2)
# -
# -    @pl.when(k == 0)
# +    @pl.when(pl.program_id(2) == 0)
# matmul_kernel: `jnp.zeros(acc_ref.shape, acc_ref.dtype)` -> `jnp.zeros_like(acc_ref)`
# matmul_kernel: `k == num_k - 1` -> `pl.program_id(2) == num_k`


# %% basics/10: stored before the last product is added
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% basics/10: the cast is forgotten
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...]


# %% basics/10: the number of steps of the example
# matmul_kernel:
# -    k = pl.program_id(2)
# -
# -    @pl.when(k == 0)
# +    @pl.when(pl.program_id(2) == 0)
# matmul_kernel: `jnp.zeros(acc_ref.shape, acc_ref.dtype)` -> `jnp.zeros_like(acc_ref)`
# matmul_kernel: `k == num_k - 1` -> `pl.program_id(2) == 15`


# %% basics/10: products in bfloat16
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...])

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/11: the batch index is lost on the way in
# batched_specs: `i, k: (b, k, 0)` -> `i, k: (0, k, 0)`

# %% basics/11: the batch index is lost on the way out
# batched_specs: `i, k: (b, i, 0)` -> `i, k: (0, i, 0)`

# %% basics/11: the right-hand side is transposed
# batched_specs: `k, 0` -> `0, k`


# %% basics/11: a size of 1 instead of None
# batched_specs:
# -    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
# -    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))
# -    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))
# +    x_spec = pl.BlockSpec((1, bm, bk), lambda b, i, k: (b, i, k))
# +    y_spec = pl.BlockSpec((1, bk, N), lambda b, i, k: (b, k, 0))
# +    out_spec = pl.BlockSpec((1, bm, N), lambda b, i, k: (b, i, 0))

# %% basics/11: nothing returned for the squeezed dimension
# batched_specs: `((None, bm, bk), lambda b, i, k: (b, i, k))` -> `((None, bm, bk), lambda b, i, k: (i, k))`
# batched_specs: `((None, bk, N), lambda b, i, k: (b, k, 0))` -> `((None, bk, N), lambda b, i, k: (k, 0))`
# batched_specs: `((None, bm, N), lambda b, i, k: (b, i, 0))` -> `((None, bm, N), lambda b, i, k: (i, 0))`

# %% basics/11: the block has no place for the batch
# batched_specs: `= pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))` -> `= pl.BlockSpec((bm, bk), lambda b, i, k: (i, k))`
# batched_specs: `= pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))` -> `= pl.BlockSpec((bk, N), lambda b, i, k: (k, 0))`
# batched_specs: `= pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))` -> `= pl.BlockSpec((bm, N), lambda b, i, k: (i, 0))`

# %% basics/11: Puzzle 10's arguments with the batch at the end
# batched_specs: `((None, bm, bk), lambda b, i, k: (b, i, k))` -> `((None, bm, bk), lambda i, k, b: (b, i, k))`
# batched_specs: `((None, bk, N), lambda b, i, k: (b, k, 0))` -> `((None, bk, N), lambda i, k, b: (b, k, 0))`
# batched_specs: `((None, bm, N), lambda b, i, k: (b, i, 0))` -> `((None, bm, N), lambda i, k, b: (b, i, 0))`

# %% basics/11: batch and sum change places
# batched_specs: `b, k` -> `k, b`

# %% basics/11: the output moves along with k
# batched_specs: `((None, bm, N), lambda b, i, k: (b, i, 0))` -> `((None, bm, N), lambda b, i, k: (b, i, k))`


# %% basics/12: the activation at every step
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = jax.nn.gelu(acc_ref[...] + product)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = (acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: the epilogue at every step, into the output
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: the bias at every step
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32) + bias_ref[...]

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: no activation
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = (acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: the bias after the activation
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = (jax.nn.gelu(acc_ref[...]) + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: every tile gets the first block of the bias
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, 0)


# %% basics/12: the bias moves with k
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, k)


# %% basics/12: the scratch is never zeroed
# fused_linear_kernel: `accumulate(x_ref, w_ref, acc_ref` -> `acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32`
# fused_linear_kernel:
# -        y = acc_ref[...] + bias_ref[...]
# -        o_ref[...] = jax.nn.gelu(y).astype(o_ref.dtype)
# +        o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


# %% basics/12: rounded before the activation
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...].astype(o_ref.dtype) + bias_ref[...].astype(o_ref.dtype))


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: the sum is rounded, the rest is not
# fused_linear_kernel: `y = acc_ref[...] + bias_ref[...]` -> `total = acc_ref[...].astype(jnp.bfloat16).astype(jnp.float32)`
# fused_linear_kernel: `(y)` -> `(total + bias_ref[...])`


# %% basics/13: rows outside, always
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        dot_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: columns outside, always
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        dot_kernel,
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, K), lambda j, i: (i, 0)), pl.BlockSpec((K, bn), lambda j, i: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the larger operand is read once, whatever the blocks are
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    if x.size < y.size:
        return pl.pallas_call(
            dot_kernel,
            grid=(M // bm, N // bn),
            in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        )(x, y)
    return pl.pallas_call(
        dot_kernel,
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, K), lambda j, i: (i, 0)), pl.BlockSpec((K, bn), lambda j, i: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the longer side goes outside
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    m, n = M // bm, N // bn
    if M >= N:
        grid, x_map, y_map, out_map = (m, n), lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
    else:
        grid, x_map, y_map, out_map = (n, m), lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
    return pl.pallas_call(
        dot_kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
        out_specs=pl.BlockSpec((bm, bn), out_map),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the shorter loop goes outside
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    m, n = M // bm, N // bn
    if m <= n:
        grid, x_map, y_map, out_map = (m, n), lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
    else:
        grid, x_map, y_map, out_map = (n, m), lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
    return pl.pallas_call(
        dot_kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
        out_specs=pl.BlockSpec((bm, bn), out_map),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the larger block goes outside
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    m, n = M // bm, N // bn
    if bm > bn:
        grid, x_map, y_map, out_map = (m, n), lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
    else:
        grid, x_map, y_map, out_map = (n, m), lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
    return pl.pallas_call(
        dot_kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
        out_specs=pl.BlockSpec((bm, bn), out_map),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the operand that is read once is not counted
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    m, n = M // bm, N // bn
    if m * y.size <= n * x.size:
        grid, x_map, y_map, out_map = (m, n), lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
    else:
        grid, x_map, y_map, out_map = (n, m), lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
    return pl.pallas_call(
        dot_kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
        out_specs=pl.BlockSpec((bm, bn), out_map),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: all of y stays in VMEM
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        dot_kernel,
        grid=(M // bm,),
        in_specs=[pl.BlockSpec((bm, K), lambda i: (i, 0)), pl.BlockSpec((K, N), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((bm, N), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the loops change places, the maps do not
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        dot_kernel,
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the output keeps its old map
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        dot_kernel,
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, K), lambda j, i: (i, 0)), pl.BlockSpec((K, bn), lambda j, i: (0, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/13: the product is taken outside
def lean_matmul(x, y, *, bm=64, bn=512):
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


# %% basics/8: a mask by size of the values
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    small = jnp.abs(x) < 1e3
    o_ref[...] = x - jnp.where(small, x, 0).sum(axis=0, keepdims=True) / small.sum(axis=0, keepdims=True)


# %% basics/13: a snake in an order chosen by one size
# lean_matmul:
# -    rows_outside = x.size + rows * y.size
# -    cols_outside = y.size + cols * x.size
# -    if rows_outside <= cols_outside:
# +
# +    def turn(outer, inner, count):
# +        return jnp.where(outer % 2 == 0, inner, count - 1 - inner)
# +
# +    if M > N:
# lean_matmul:
# -        x_map, y_map, out_map = lambda i, j: (i, 0), lambda i, j: (0, j), lambda i, j: (i, j)
# +        x_map, y_map = lambda i, j: (i, 0), lambda i, j: (0, turn(i, j, cols))
# +        out_map = lambda i, j: (i, turn(i, j, cols))
# lean_matmul:
# -        x_map, y_map, out_map = lambda j, i: (i, 0), lambda j, i: (0, j), lambda j, i: (i, j)
# +        x_map, y_map = lambda j, i: (turn(j, i, rows), 0), lambda j, i: (0, j)
# +        out_map = lambda j, i: (turn(j, i, rows), j)


# %% basics/7: the range starts at a program id
# distance_bias_kernel:
# -    q = pl.program_id(0) * bq + jnp.arange(bq)
# -    k = pl.program_id(1) * bk + jnp.arange(bk)
# +    i, j = pl.program_id(0), pl.program_id(1)
# +    q, k = jnp.arange(i * bq, (i + 1) * bq), jnp.arange(j * bk, (j + 1) * bk)

# %% basics/9: pl.when called like a function
# row_sum_kernel:
# -    @pl.when(pl.program_id(1) == 0)
# -    def _():
# +    def zero():
# row_sum_kernel:
# -        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)
# -
# +        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)
# +
# +    pl.when(pl.program_id(1) == 0, zero)

# %% basics/3: a list of pages
# reverse_map: `num_pages - 1 - i` -> `list(range(num_pages))[::-1][i]`


# %% basics/8: the mask forgets where the chunk starts
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = jnp.arange(16)[:, None] < num_rows
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / count


# %% basics/10: stored before the last addition
# matmul_kernel:
# -    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# -
# matmul_kernel:
# -        o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# +        o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# +
# +    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% basics/8: masked, then a mean over all sixteen
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = (pl.program_id(0) * 16 + jnp.arange(16))[:, None] < num_rows
    x = jnp.where(real, x_ref[...], 0)
    o_ref[...] = x - x.mean(axis=0, keepdims=True)


# %% basics/6: the result is counted as float32
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)

# %% basics/6: float32 out, and a cast outside
# gated_kernel: `= (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)` -> `= x_ref[...] * jax.nn.sigmoid(g_ref[...])`
# gated:
# -    bytes_per_row = 2 * N * (4 + 4 + 2)
# -    fitting = [bm for bm in range(8, M + 1, 8) if M % bm == 0 and bm * bytes_per_row <= vmem_bytes]
# -    bm = max(fitting)
# +    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)
# gated: `bfloat16` -> `float32`
# gated: `(x, g)` -> `(x, g).astype(jnp.bfloat16)`

# %% basics/5: one division and one product, for any scale but 0
# scale_shift_kernel: `x_ref[...] * scale_ref[...] + shift_ref[...]` -> `(x_ref[...] + shift_ref[...] / scale_ref[...]) * scale_ref[...]`

# %% basics/6: a sigmoid that is infinite by infinite
# gated_kernel: `jax.nn.sigmoid(g_ref[...])` -> `jnp.exp(g_ref[...]) / (1 + jnp.exp(g_ref[...]))`

# %% basics/11: blocks of at most 256
# batched_specs:
# -    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
# -    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))
# +    x_spec = pl.BlockSpec((None, bm, min(bk, 256)), lambda b, i, k: (b, i, k))
# +    y_spec = pl.BlockSpec((None, min(bk, 256), N), lambda b, i, k: (b, k, 0))


# %% basics/11: one index map for y and the result
def batched_specs(bm, bk, N):
    def full_width(b, i, k):  # all of N, so the last number is 0
        return b, i, 0

    def piece(b, i, k):
        return b, i, k

    in_specs = [pl.BlockSpec((None, bm, bk), piece), pl.BlockSpec((None, bk, N), full_width)]
    return in_specs, pl.BlockSpec((None, bm, N), full_width)


# %% basics/12: a GELU whose tanh is infinite by infinite
# fused_linear_kernel:
# -        o_ref[...] = jax.nn.gelu(y).astype(o_ref.dtype)
# +        e = jnp.exp(2 * 0.7978845608 * (y + 0.044715 * y**3))
# +        o_ref[...] = (0.5 * y * (1 + (e - 1) / (e + 1))).astype(o_ref.dtype)
