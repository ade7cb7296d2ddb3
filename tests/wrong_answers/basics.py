"""Wrong answers to puzzles/basics.py, and what a verdict has to say about each."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% basics/1: the name o_ref is bound to something else
# first: o_ref
# first: never stores
# says: o_ref[...] = value
def add_ten_kernel(x_ref, o_ref):
    o_ref = x_ref[...] + 10


# %% basics/1: a Ref is used as an array
# first: Ref
# says: x_ref[...]
def add_ten_kernel(x_ref, o_ref):
    o_ref[...] = x_ref + 10


# %% basics/1: the result is returned
# first: returns nothing
# says: o_ref[...] = value
def add_ten_kernel(x_ref, o_ref):
    return x_ref[...] + 10


# %% basics/1: half of the result is written
# first: only part of o_ref
# says: elements 320-639
def add_ten_kernel(x_ref, o_ref):
    o_ref[:320] = x_ref[:320] + 10


# %% basics/1: the input is overwritten
# first: o_ref
# says: x_ref
def add_ten_kernel(x_ref, o_ref):
    x_ref[...] = x_ref[...] + 10


# %% basics/1: added to what the output holds
# first: garbage
# says: o_ref
def add_ten_kernel(x_ref, o_ref):
    o_ref[...] += x_ref[...] + 10


# %% basics/1: adds one
# first: off by the constant -9
def add_ten_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


# %% basics/2: one step only
# first: never visited
# says: (1,)
# says: 5
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (1,)


# %% basics/2: a step per element
# first: out of bounds
# first: step 5
# says: grid
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (n,)


# %% basics/2: one step too many
# first: out of bounds
# first: step 5
# says: grid
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (n // b + 1,)


# %% basics/2: one step too few
# first: block (4,)
# first: never visited
# says: 5
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (n // b - 1,)


# %% basics/2: true for the notebook's example alone
# first: never visited
# says: variant 1
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (5,)


# %% basics/2: a float in the grid
# first: integers
# says: //
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def vector_add_grid(n, b):
    return (n / b,)


# %% basics/2: the kernel reaches for the whole vector
# first: past its end
# first: one block
def vector_add_kernel(x_ref, y_ref, o_ref):
    for start in range(0, 1280, 256):
        o_ref[start : start + 256] = x_ref[start : start + 256] + y_ref[start : start + 256]


def vector_add_grid(n, b):
    return (n // b,)


# %% basics/2: y is forgotten
# first: never reads y_ref
def vector_add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...]


def vector_add_grid(n, b):
    return (n // b,)


# %% basics/3: off by one block
# first: out of bounds
# first: step 0
# says: block (5,)
def reverse_map(i, num_pages):
    return (num_pages - i,)


# %% basics/3: an element offset
# first: element offsets
# says: 256
def reverse_map(i, num_pages):
    return ((num_pages - 1 - i) * 256,)


# %% basics/3: not reversed at all
# first: reverse order
# says: block (0,)
def reverse_map(i, num_pages):
    return (i,)


# %% basics/3: a negative index, as in Python
# first: out of bounds
# first: block (-1,)
def reverse_map(i, num_pages):
    return (-1 - i,)


# %% basics/3: true for five pages alone
# says: variant 1
# first: block
def reverse_map(i, num_pages):
    return (4 - i,)


# %% basics/3: wrapped around instead of reversed
# first: block
# says: dimension 0
def reverse_map(i, num_pages):
    return ((i + num_pages - 1) % num_pages,)


# %% basics/3: a number instead of a tuple is fine, but a float is not
# first: integer
def reverse_map(i, num_pages):
    return ((num_pages - 1 - i) / 1,)


# %% basics/4: the tile is moved but not turned
# first: shape
# says: o_ref
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def transpose_out_map(i, j):
    return (j, i)


# %% basics/4: the tile is turned but not moved
# first: out of bounds
# first: block (2, 0)
# not: The grid is longer
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].T


def transpose_out_map(i, j):
    return (i, j)


# %% basics/4: reshaped instead of transposed
# first: wrong
# says: o_ref
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(o_ref.shape)


def transpose_out_map(i, j):
    return (j, i)


# %% basics/4: element offsets
# first: element offsets
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].T


def transpose_out_map(i, j):
    return (j * 256, i * 128)


# %% basics/4: everything lands in the first row of tiles
# first: block
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].T


def transpose_out_map(i, j):
    return (0, i)


# %% basics/4: the Ref itself is transposed
# first: x_ref[...]
def transpose_kernel(x_ref, o_ref):
    o_ref[...] = x_ref.T


def transpose_out_map(i, j):
    return (j, i)


# %% basics/5: the roles are swapped
# first: out of bounds
# first: scale_ref
# not: The grid is longer
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]


def scale_map(i, j):
    return (0, j)


def shift_map(i, j):
    return (i, 0)


# %% basics/5: the same map for everybody
# first: out of bounds
# first: scale_ref
# says: dimension 1
# not: The grid is longer
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]


def scale_map(i, j):
    return (i, j)


def shift_map(i, j):
    return (i, j)


# %% basics/5: always the first block
# first: never read
# first: scale_ref
# says: shift_ref
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]


def scale_map(i, j):
    return (0, 0)


def shift_map(i, j):
    return (0, 0)


# %% basics/5: the shift is forgotten
# first: never reads shift_ref
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...]


def scale_map(i, j):
    return (i, 0)


def shift_map(i, j):
    return (0, j)


# %% basics/5: the index of the shift runs along the rows
# first: out of bounds
# first: shift_ref
# not: The grid is longer
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]


def scale_map(i, j):
    return (i, 0)


def shift_map(i, j):
    return (j, 0)


# %% basics/6: the second buffer is forgotten
# first: Right answer, but
# first: VMEM
# says: 2 x
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: blocks of eight rows
# first: Right answer, but
# first: 10 grid steps
# says: 5
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    block = pl.BlockSpec((8, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // 8,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: no grid at all
# first: Right answer, but
# first: VMEM
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    return pl.pallas_call(gated_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16))(x, g)


# %% basics/6: the sigmoid is taken outside
# first: logistic
# first: outside of the kernel
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * g_ref[...]).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, jax.nn.sigmoid(g))


# %% basics/6: plain jnp, and no kernel
# first: no pallas_call
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    return (x * jax.nn.sigmoid(g)).astype(jnp.bfloat16)


# %% basics/6: the result stays float32
# first: float32
# first: bfloat16
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = x_ref[...] * jax.nn.sigmoid(g_ref[...])


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x, g)


# %% basics/6: the cast is forgotten
# first: dtype
# says: astype
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = x_ref[...] * jax.nn.sigmoid(g_ref[...])


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: the grid of another block
# first: never visited
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    block = pl.BlockSpec((16, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // 40,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: a block that does not divide the rows
# first: never visited
# says: 80
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = vmem_bytes // (2 * N * 10) // 8 * 8
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: a block that is not a multiple of 8
# first: multiple
# says: 20
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(1, M + 1) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: the result is forgotten in the sum
# first: Right answer, but
# first: VMEM
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 8 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: a block that was right twice
# first: Right answer, but
# first: 15 grid steps
# says: variant 2
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = 16
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: the index map turned around
# first: out of bounds
# not: longer
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (0, i))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: pallas_call is not called with the arrays
# first: call
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )


# %% basics/6: the result is not returned
# first: return
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 10 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/7: positions inside the tile
# first: start of the block
# says: pl.program_id
# not: wrong axis
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = jnp.arange(bq)
    k = jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: the queries are counted inside the tile
# first: start of the block
# says: pl.program_id
# says: 32
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = jnp.arange(bq)
    k = pl.program_id(1) * bk + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: the axes are swapped
# first: off by the constant
# first: right program id
# says: pl.program_id
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = pl.program_id(1) * bq + jnp.arange(bq)
    k = pl.program_id(0) * bk + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: steps counted as if they were elements
# first: off by the constant
# says: pl.program_id
# not: wrong axis
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = pl.program_id(0) + jnp.arange(bq)
    k = pl.program_id(1) + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: the block sizes of the example
# says: variant 1
# first: incompatible shapes
def distance_bias_kernel(x_ref, o_ref):
    q = pl.program_id(0) * 32 + jnp.arange(32)
    k = pl.program_id(1) * 128 + jnp.arange(128)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: a Python if on the step
# first: pl.when
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    if pl.program_id(0) == 0:
        q = jnp.arange(bq)
    else:
        q = pl.program_id(0) * bq + jnp.arange(bq)
    k = pl.program_id(1) * bk + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/7: off by one everywhere
# first: off by the constant -0.125
# not: rounding
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = pl.program_id(0) * bq + jnp.arange(bq)
    k = pl.program_id(1) * bk + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None] - 1)


# %% basics/7: the block sizes change places
# first: off by the constant
# not: wrong axis
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    q = pl.program_id(0) * bk + jnp.arange(bq)
    k = pl.program_id(1) * bq + jnp.arange(bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/8: the padding goes into the mean
# first: step 18
# first: beyond the edge
# says: jnp.where
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    o_ref[...] = x - x.mean(axis=0, keepdims=True)


# %% basics/8: masked, but divided by 16
# first: wrong
# says: (6, 0)
# not: Mask it
def centre_kernel(x_ref, o_ref, *, num_rows):
    start = pl.program_id(0) * 16
    real = (start + jnp.arange(16))[:, None] < num_rows
    x = x_ref[...]
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / 16


# %% basics/8: NaN times zero
# first: step 18
# first: beyond the edge
# says: jnp.where
# says: multipl
def centre_kernel(x_ref, o_ref, *, num_rows):
    start = pl.program_id(0) * 16
    real = ((start + jnp.arange(16))[:, None] < num_rows).astype(jnp.float32)
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - start)
    o_ref[...] = x - (x * real).sum(axis=0, keepdims=True) / count


# %% basics/8: the mask counts inside the chunk
# first: step 18
# first: beyond the edge
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = jnp.arange(16)[:, None] < num_rows
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / count


# %% basics/8: one row of padding too many
# first: step 18
# first: beyond the edge
def centre_kernel(x_ref, o_ref, *, num_rows):
    start = pl.program_id(0) * 16
    real = (start + jnp.arange(16))[:, None] <= num_rows
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - start)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / count


# %% basics/8: only the real rows are written, and the mean is that of everything
# first: step 18
# first: beyond the edge
def centre_kernel(x_ref, o_ref, *, num_rows):
    start = pl.program_id(0) * 16
    real = (start + jnp.arange(16))[:, None] < num_rows
    x = x_ref[...]
    o_ref[...] = jnp.where(real, x - x.mean(axis=0, keepdims=True), 0)


# %% basics/8: NaN is left out of the mean
# first: garbage
# says: position
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    o_ref[...] = x - jnp.nanmean(x, axis=0, keepdims=True)


# %% basics/8: NaN is taken for zero
# first: garbage
# says: position
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.nan_to_num(x).sum(axis=0, keepdims=True) / count


# %% basics/8: finite is taken for real
# first: garbage
# says: position
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    real = jnp.isfinite(x)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / real.sum(axis=0, keepdims=True)


# %% basics/9: the output is never zeroed
# first: step 0
# first: garbage
# first: o_ref
# says: pl.program_id(1) == 0
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed at every step
# first: every step
# says: o_ref
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed in the first row of blocks only
# first: step 4
# first: not only once
# says: pl.program_id(1) == 0
def row_sum_kernel(x_ref, o_ref):
    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed along the other axis
# first: step 4
# says: pl.program_id(1) == 0
def row_sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: the last block wins
# first: overwritten
# says: +=
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: the output moves along
# first: out of bounds
# first: o_ref
def row_sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, j)


# %% basics/9: the dimension is not kept
# first: keepdims
def row_sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: a Python if
# first: pl.when
def row_sum_kernel(x_ref, o_ref):
    if pl.program_id(1) == 0:
        o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed after the addition
# first: step 0
# first: o_ref
# first: garbage
def row_sum_kernel(x_ref, o_ref):
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: zeroed at the last step
# first: garbage
# says: pl.program_id(1) == 0
def row_sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/9: nothing is added on the first visit
# first: Step 0
# first: nothing
def row_sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(pl.program_id(1) > 0)
    def _():
        o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/10: the scratch is never zeroed
# first: step 0
# first: acc_ref
# says: pl.program_id(2) == 0
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: the scratch is zeroed once, for all tiles
# first: acc_ref
# first: step 16
# says: pl.program_id(2) == 0
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    i, j, k = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when((i == 0) & (j == 0) & (k == 0))
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: summed up in bfloat16
# first: 16-bit
# says: float32
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% basics/10: the running sum is rounded to bfloat16 at every step
# first: 16-bit
# says: float32
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
# first: Right answer, but
# first: o_ref
# says: last step
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: the last product alone
# first: overwritten
# says: +=
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% basics/10: the last product alone, by way of the scratch
# first: acc_ref
# first: overwritten
# says: +=
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    acc_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: stored at step num_k, which never comes
# first: o_ref
# first: condition
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: stored before the last product is added
# first: wrong
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% basics/10: the cast is forgotten
# first: dtype
# says: astype
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...]


# %% basics/10: the number of steps of the example
# first: o_ref
# first: condition
# says: variant 1
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == 15)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/10: products in bfloat16
# first: preferred_element_type
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...])

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% basics/11: the batch index is lost on the way in
# first: y_ref
# first: never read
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (0, k, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: the batch index is lost on the way out
# first: o_ref
# says: never visited
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (0, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: the right-hand side is transposed
# first: out of bounds
# first: y_ref
# not: The grid is longer
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, 0, k))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: a size of 1 instead of None
# first: None
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((1, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((1, bk, N), lambda b, i, k: (b, k, 0))
    out_spec = pl.BlockSpec((1, bm, N), lambda b, i, k: (b, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: nothing returned for the squeezed dimension
# first: one block index per dimension of the array
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (k, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: the block has no place for the batch
# first: dimension
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((bm, bk), lambda b, i, k: (i, k))
    y_spec = pl.BlockSpec((bk, N), lambda b, i, k: (k, 0))
    out_spec = pl.BlockSpec((bm, N), lambda b, i, k: (i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: Puzzle 10's arguments with the batch at the end
# first: out of bounds
# not: The grid is longer
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda i, k, b: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda i, k, b: (b, k, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda i, k, b: (b, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: batch and sum change places
# first: out of bounds
# first: y_ref
# not: longer
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (k, b, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, 0))
    return [x_spec, y_spec], out_spec


# %% basics/11: the output moves along with k
# first: out of bounds
# first: o_ref
# not: longer
def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec((None, bm, bk), lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec((None, bk, N), lambda b, i, k: (b, k, 0))
    out_spec = pl.BlockSpec((None, bm, N), lambda b, i, k: (b, i, k))
    return [x_spec, y_spec], out_spec


# %% basics/12: the activation at every step
# first: wrong
# says: every step
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
# first: Right answer, but
# first: o_ref
# says: last step
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: the bias at every step
# first: wrong
# says: every step
# says: bias_ref
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
# first: wrong
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
# first: wrong
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
# first: bias_ref
# first: never read
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
# first: out of bounds
# first: bias_ref
# not: The grid is longer
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
# first: acc_ref
# first: step 0
# says: pl.program_id(2) == 0
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        o_ref[...] = jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/12: rounded before the activation
# first: 16-bit
# says: variant 2
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
# first: 16-bit
# says: variant 2
def fused_linear_kernel(x_ref, w_ref, bias_ref, o_ref, acc_ref, *, num_k):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == num_k - 1)
    def _():
        total = acc_ref[...].astype(jnp.bfloat16).astype(jnp.float32)
        o_ref[...] = jax.nn.gelu(total + bias_ref[...]).astype(o_ref.dtype)


def bias_map(i, j, k):
    return (0, j)


# %% basics/13: rows outside, always
# first: Right answer, but
# says: y_ref
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
# first: Right answer, but
# says: x_ref
# says: variant 1
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
# first: Right answer, but
# says: y_ref
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
# first: Right answer, but
# first: HBM
# says: variant 3
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
# first: Right answer, but
# first: HBM
# says: variant 2
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
# first: Right answer, but
# first: HBM
# says: variant 3
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
# first: Right answer, but
# first: HBM
# says: variant 3
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
# first: Right answer, but
# first: VMEM
# says: y_ref
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
# first: out of bounds
# first: y_ref
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
# first: out of bounds
# first: o_ref
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
# first: no pallas_call
# says: dot_general
def lean_matmul(x, y, *, bm=64, bn=512):
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


# %% basics/8: a mask by size of the values
# first: garbage
# says: position
def centre_kernel(x_ref, o_ref, *, num_rows):
    x = x_ref[...]
    small = jnp.abs(x) < 1e3
    o_ref[...] = x - jnp.where(small, x, 0).sum(axis=0, keepdims=True) / small.sum(axis=0, keepdims=True)


# %% basics/13: a snake in an order chosen by one size
# first: Right answer, but
# says: variant
def lean_matmul(x, y, *, bm=64, bn=512):
    (M, K), (_, N) = x.shape, y.shape
    rows, cols = M // bm, N // bn

    def turn(outer, inner, count):
        return jnp.where(outer % 2 == 0, inner, count - 1 - inner)

    if M > N:
        grid = (rows, cols)
        x_map, y_map = lambda i, j: (i, 0), lambda i, j: (0, turn(i, j, cols))
        out_map = lambda i, j: (i, turn(i, j, cols))
    else:
        grid = (cols, rows)
        x_map, y_map = lambda j, i: (turn(j, i, rows), 0), lambda j, i: (0, j)
        out_map = lambda j, i: (turn(j, i, rows), j)
    return pl.pallas_call(
        dot_kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((bm, K), x_map), pl.BlockSpec((K, bn), y_map)],
        out_specs=pl.BlockSpec((bm, bn), out_map),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
    )(x, y)


# %% basics/7: the range starts at a program id
# first: arange
# says: known before
def distance_bias_kernel(x_ref, o_ref):
    bq, bk = x_ref.shape
    i, j = pl.program_id(0), pl.program_id(1)
    q, k = jnp.arange(i * bq, (i + 1) * bq), jnp.arange(j * bk, (j + 1) * bk)
    o_ref[...] = x_ref[...] + 0.125 * (k[None, :] - q[:, None])


# %% basics/9: pl.when called like a function
# first: decorator
def row_sum_kernel(x_ref, o_ref):
    def zero():
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    pl.when(pl.program_id(1) == 0, zero)
    o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)


def row_sum_out_map(i, j):
    return (i, 0)


# %% basics/3: a list of pages
# first: arithmetic
def reverse_map(i, num_pages):
    return (list(range(num_pages))[::-1][i],)


# %% basics/8: the mask forgets where the chunk starts
# first: mask
# says: Step 18
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = jnp.arange(16)[:, None] < num_rows
    x = x_ref[...]
    count = jnp.minimum(16, num_rows - pl.program_id(0) * 16)
    o_ref[...] = x - jnp.where(real, x, 0).sum(axis=0, keepdims=True) / count


# %% basics/10: stored before the last addition
# first: acc_ref
# says: afterwards
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(k == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% basics/8: masked, then a mean over all sixteen
# first: hang over the edge
# says: real ones
def centre_kernel(x_ref, o_ref, *, num_rows):
    real = (pl.program_id(0) * 16 + jnp.arange(16))[:, None] < num_rows
    x = jnp.where(real, x_ref[...], 0)
    o_ref[...] = x - x.mean(axis=0, keepdims=True)


# %% basics/6: the result is counted as float32
# first: grid steps
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = (x_ref[...] * jax.nn.sigmoid(g_ref[...])).astype(o_ref.dtype)


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    )(x, g)


# %% basics/6: float32 out, and a cast outside
# first: HBM
def gated_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = x_ref[...] * jax.nn.sigmoid(g_ref[...])


def gated(x, g, *, vmem_bytes=262_144):
    M, N = x.shape
    bm = max(b for b in range(8, M + 1, 8) if M % b == 0 and 2 * b * N * 12 <= vmem_bytes)
    block = pl.BlockSpec((bm, N), lambda i: (i, 0))
    return pl.pallas_call(
        gated_kernel,
        grid=(M // bm,),
        in_specs=[block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x, g).astype(jnp.bfloat16)
