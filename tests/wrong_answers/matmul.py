"""Wrong answers to puzzles/matmul.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# %% matmul/1: the product in bfloat16, cast afterwards
# first: rounding
# says: preferred_element_type
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...]).astype(jnp.float32)


# %% matmul/1: the operands cast to float32
# first: multiplies float32
# first: 16 are enough
# says: preferred_element_type
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...].astype(jnp.float32), y_ref[...].astype(jnp.float32))


# %% matmul/1: a bfloat16 product into a float32 buffer
# first: A product of 16-bit tiles is asked for in 16 bits
# first: preferred_element_type
# not: add .astype
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...])


# %% matmul/1: element by element
# first: incompatible shapes
# first: 64 and 640
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * y_ref[...]


# %% matmul/1: two halves of k, added in bfloat16
# first: rounding
def one_tile_kernel(x_ref, y_ref, o_ref):
    half = x_ref.shape[1] // 2
    low = x_ref[:, :half] @ y_ref[:half]
    o_ref[...] = (low + x_ref[:, half:] @ y_ref[half:]).astype(o_ref.dtype)


# %% matmul/2: nothing is said about the axes
# first: 60 of its 60 steps have to follow one another
# first: Grid axes 0 and 1 may be shared
# first: dimension_semantics
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),
    )(x, y)


# %% matmul/2: everything is parallel
# first: data race
# first: axis 2
# first: arbitrary
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: one axis of two is parallel
# first: 15 of its 60 steps
# first: axis 1
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: k first
# first: comes a second time
# first: Make grid axis 0
# first: the last one of the grid
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(K // bk, pl.cdiv(M, bm), pl.cdiv(N, bn)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda k, i, j: (i, k)),
            pl.BlockSpec((bk, bn), lambda k, i, j: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda k, i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "parallel", "parallel"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: rows that do not fill a block are left out
# first: never visited
# says: pl.cdiv(200, 64)
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(M // bm, N // bn, K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: the scratch in bfloat16
# first: another dtype
# first: scratch for a sum
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.bfloat16)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: rows and columns exchanged in the map of y
# first: the index map of y_ref returns block (0, 3), out of bounds
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/3: still with a branch
# first: branch
# says: pl.when
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc = acc_ref[...] + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: garbage times zero
# first: acc_ref
# first: that nobody has written
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = acc_ref[...] * (pl.program_id(2) > 0)
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: never starts from zero
# first: acc_ref that nobody has written
# first: step 0
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = acc_ref[...]
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: only the product of this step
# first: overwritten
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: starts over at every step but the first
# first: acc_ref that nobody has written
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) > 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: the draft is the sum so far
# first: grows in o_ref
# first: float32 scratch
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    o_ref[...] = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% matmul/3: stored before the last addition
# first: o_ref is stored from acc_ref
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc_ref[...] = before
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/4: one buffer for each block
# first: plan_vmem(256, 128, 512) is 589,824; your kernel holds 1,048,576
# first: if each block had one buffer
# says: x_ref: 2 buffers
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the scratch is forgotten
# first: without the scratch
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn)


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the longest k
# first: another plan that fits moves less
# says: between HBM and VMEM; the budget is
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: -plan[2])


# %% matmul/4: the widest block of columns
# first: another plan that fits moves less
# says: between HBM and VMEM; the budget is
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: -plan[1])


# %% matmul/4: true for the notebook's example alone
# first: Grid axis 2 has no steps at all
# says: variant 1
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    return (256, 128, 512)


# %% matmul/4: x comes in once for each block of rows
# first: if all of x_ref came in 3 times and if all of y_ref came in 5 times
# says: x_ref, 786,432 bytes in blocks of (256, 256): comes in 5 times
def plan_bytes(M, N, K, bm, bn, bk):
    return 2 * (M * K * (M // bm) + K * N * (N // bn) + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: nothing ever stays
# first: plan_bytes(768, 640, 512, 256, 128, 512) is 6,881,280; your kernel moves 3,735,552
# first: if all of x_ref came in 5 times
def plan_bytes(M, N, K, bm, bn, bk):
    return 2 * (M * K * (N // bn) + K * N * (M // bm) + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: always all of K in one step
# first: another plan that fits moves less
# says: variant 2
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in [K]]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: y stays as well
# first: if all of y_ref came in once
def plan_bytes(M, N, K, bm, bn, bk):
    if bk == K:
        return 2 * (M * K + K * N + M * N)
    return 2 * (M * K * (N // bn) + K * N * (M // bm) + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/5: contracted like x @ w
# first: The two factors of a product do not fit
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (0,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: the block of w counted the other way round
# first: the index map of w_ref returns block (0, 3), out of bounds
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: the same rows of w for every column
# first: does not move along dimension 1
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (0, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: a transposed copy is made outside
# first: transpose is done outside of the kernel
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w.T)


# %% matmul/5: turned on its side twice
# first: The two factors of a product do not fit
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...].T, dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: the sum never starts over
# first: acc_ref
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = acc_ref[...]
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/6: a dense diagonal matrix
# first: FLOPs; the budget is
def scale_rows_kernel(a_ref, b_ref, o_ref):
    rows = b_ref.shape[0]
    square = jnp.arange(rows)[:, None] == jnp.arange(rows)[None, :]
    o_ref[...] = jnp.dot(jnp.where(square, a_ref[...], 0), b_ref[...], precision="highest")


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: da of the last block of columns only
# first: overwritten
# first: da_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    da_ref[...] = (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: da is never set to zero
# first: da_ref that nobody has written
# says: pl.program_id(1) == 0
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = da_ref[...]
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: db without a
# first: never reads a_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = g


# %% matmul/6: da from the result's gradient alone
# first: never reads b_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + g.sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: summed down the columns
# first: Ref of shape (32, 1)
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=0, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: zeroed for the first row of blocks only
# first: da_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where((pl.program_id(0) == 0) & (pl.program_id(1) == 0), 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/7: the epilogue at every step
# first: stored at 4 steps
# first: on the last step
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
    o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: GELU on every partial sum
# first: Exp, tanh
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jax.nn.gelu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = acc_ref[...] + bias_ref[...]
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the residual comes again with every k
# first: out of bounds
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, k)


# %% matmul/7: the residual of the first rows for all
# first: r_ref
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (0, j)


# %% matmul/7: rounded to bfloat16 before the bias
# first: cast to 16-bit
# says: variant 3
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...].astype(o_ref.dtype) + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the residual is added at every step
# first: r_ref is read at every step
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = (
        before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32) + r_ref[...].astype(jnp.float32)
    )

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = y.astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/8: the product is written, and summed by a second kernel
# first: it uses 4 pallas_call(s); this puzzle asks for 3
# first: the budget is
def row_energy_kernel(x_ref, w_ref, e_ref):
    e_ref[...] = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))


def row_sum_kernel(h_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    e_ref[...] += (h_ref[...] * h_ref[...]).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    tile = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
    h = pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
    )(x, w)
    return pl.pallas_call(
        row_sum_kernel,
        grid=(M // bm, N // bn),
        in_specs=[tile],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(h)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: the energy of the last columns only
# first: overwritten
# first: e_ref
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] = (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: e is never set to zero
# first: e_ref that nobody has written
def row_energy_kernel(x_ref, w_ref, e_ref):
    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: rows inside, columns outside
# first: visited again
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(N // bn, M // bm),
        in_specs=[pl.BlockSpec((bm, K), lambda j, i: (i, 0)), pl.BlockSpec((K, bn), lambda j, i: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda j, i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: the 2 of the square is lost
# first: 0.5 times
# says: dx_ref
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (g * h).astype(x.dtype)


# %% matmul/8: without g
# first: never reads g_ref
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * h).astype(x.dtype)


# %% matmul/9: dw of the last tokens only
# first: overwritten
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: dx summed over the wrong dimension of w
# first: The two factors of a product do not fit
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (0,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the map of g does not follow the rows
# first: b_ref are never read
# first: grid axis 2
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (0, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: dw summed in bfloat16
# first: round
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    o_ref[...] = before + product.astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: grid indices read in the wrong order
# first: out of bounds
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the gradient cast to float32 for the product
# first: multiplies float32
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(
        a_ref[...].astype(jnp.float32),
        b_ref[...].astype(jnp.float32),
        (dims, ((), ())),
        preferred_element_type=jnp.float32,
    )
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: never starts from zero
# first: acc_ref
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = acc_ref[...]
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/10: scaled inside the loop, in bfloat16
# first: rounding
# first: float32
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    x = (x_ref[...].astype(jnp.float32) * sx_ref[...]).astype(jnp.bfloat16)
    w = (w_ref[...].astype(jnp.float32) * sw_ref[...]).astype(jnp.bfloat16)
    o_ref[...] = before + jnp.dot(x, w, preferred_element_type=jnp.float32)


# %% matmul/10: int8 products of int8
# first: type int8
# first: wrap around
# first: preferred_element_type
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...]).astype(jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]


# %% matmul/10: cast to bfloat16 for the product
# first: multiplies bfloat16
# first: 8 are enough
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(
        x_ref[...].astype(jnp.bfloat16), w_ref[...].astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]


# %% matmul/10: the scale of the columns is forgotten
# first: never reads sw_ref
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...]


# %% matmul/10: the scale of the rows is forgotten
# first: never reads sx_ref
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sw_ref[...]


# %% matmul/11: rows without blocks store nothing
# first: nothing is stored there
# first: step 3
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == starts_ref[i + 1] - starts_ref[i] - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: every step adds
# first: count twice
# first: pl.when
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: past the end of the row the next block comes in for nothing
# first: between HBM and VMEM; the budget is
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.minimum(starts_ref[i] + s, starts_ref[starts_ref.shape[0] - 1] - 1)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: no end at all
# first: out of bounds
# first: The kernel computes nothing at such a step, but the map is asked at every step
# not: the right one
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return starts_ref[i] + s


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: a first row without blocks is not thought of
# first: out of bounds
# says: variant
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: the number of the slot instead of its column
# first: index map of y_ref
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (live_slot(i, s, starts_ref), j)


# %% matmul/12: the fill is forgotten
# first: plan_time(768, 640, 512, 768, 640, 128, SMALL) is 5.4332e-04; the model says 8.1201e-04
# first: if there were no fill
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm) + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: steps cost nothing
# first: if steps cost nothing
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: arithmetic and copies one after the other
# first: the MXU waited for HBM
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return mxu + hbm + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: only the MXU
# first: if HBM took no time
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return mxu + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: the fewest bytes, whatever they cost
# first: pick_blocks(1024, 768, 512, chip) is
# first: The best plan that fits takes 1.0750e-03 s
# says: grid steps; the budget is
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    return frugal_blocks(M, N, K, chip.vmem_bytes)


# %% matmul/12: VMEM is not asked
# first: The best plan that fits takes
# says: of VMEM; the budget is
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    return min(plans, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: the fill is not taken off the copies
# first: if the fill counted twice
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/7: all of the epilogue at every step, but for the store
# first: FLOPs; the budget is
# first: Products aside, most of it is at
# first: at all 24 steps
# says: y = jax.nn.gelu(
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
    result = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = result


def residual_map(i, j, k):
    return (i, j)


# %% matmul/10: scaled inside the loop, in float32
# first: their sum grows in o_ref, in float32, each scaled before it is added
# first: acc_ref, which is int32
# says: variant 3
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    o_ref[...] = before + product.astype(jnp.float32) * sx_ref[...] * sw_ref[...]


# %% matmul/11: zeroed by rows that have blocks alone
# first: is stored from acc_ref as step 1 left it, with the result of block (0, 0)
# says: Also where nothing is
# not: index map is off
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        before = jnp.where(s == 0, 0, acc_ref[...])
        acc_ref[...] = before + jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/1: no product at all
# first: there is no matrix product in it
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = (x_ref[...][:, :, None].astype(jnp.float32) * y_ref[...][None].astype(jnp.float32)).sum(axis=1)


# %% matmul/3: the kernel of Puzzle 2, called
# first: 2 branches
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_kernel(x_ref, y_ref, o_ref, acc_ref)


# %% matmul/3: the garbage multiplied by 0
# first: NaN is NaN: jnp.where chooses
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc = acc_ref[...] * (pl.program_id(2) > 0)
    acc_ref[...] = acc + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/7: GELU rounded before the residual
# first: o_ref
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = r_ref[...] + jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/9: dimension numbers without the batch
# first: The dimension numbers of jax.lax.dot_general are two pairs
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/10: summed in floating point, and cast
# first: summed in floating point, which the TPU
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    acc = before + product.astype(jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]


# %% matmul/1: the Ref is given another value
# first: o_ref = value only gives the name to something else
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/1: added to what nobody has written
# first: o_ref that nobody has written
# says: Step 0
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/1: multiplied and added element by element
# first: there is no matrix product in it
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.sum(x_ref[...].astype(jnp.float32)[:, :, None] * y_ref[...].astype(jnp.float32)[None], axis=1)


# %% matmul/1: x on its side
# first: The two factors of a product do not fit
def one_tile_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...].T, y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/2: the limit is not passed on
# first: vmem_limit_bytes=67,108,864
# first: Pass it on
# says: variant 2
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)


# %% matmul/2: columns outside, rows inside
# first: between HBM and VMEM; the budget is
# says: x_ref: 6 moves of (256, 128)
# says: 3 times the array
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(N, bn), pl.cdiv(M, bm), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda j, i, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda j, i, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda j, i, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: the map of the result returns (j, i)
# first: the index map of o_ref returns block (0, 3), out of bounds
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (j, i)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: the result in float32
# first: the result is float32, the spec says bfloat16
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/2: all of K in one step
# first: of VMEM; the budget is
# says: y_ref: 2 x 320 KiB, blocks of (1280, 128)
def tiled(kernel, x, y, *, bm, bn, bk, vmem_limit_bytes=None):
    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), 1),
        in_specs=[
            pl.BlockSpec((bm, K), lambda i, j, k: (i, 0)),
            pl.BlockSpec((K, bn), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
    )(x, y)


# %% matmul/3: the sum is never kept
# first: acc_ref that nobody has written
# first: step 1
# first: nothing is ever stored into acc_ref
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: zero at every step
# first: acc_ref is reset at every step
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/3: the first rows instead of the first step
# first: as step 14 left it
# first: pl.program_id(2) == 0
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(0) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: the two sides of where are exchanged
# first: acc_ref that nobody has written
# first: step 0
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, acc_ref[...], 0)
    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: a Python if
# first: jnp.where for a value
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    if pl.program_id(2) == 0:
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/4: elements instead of bytes
# first: plan_bytes(768, 640, 512, 256, 128, 256) is 3,440,640; your kernel moves 6,881,280
# first: if an element had one byte
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return M * K * x_times + K * N * y_times + M * N


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the result is not counted
# first: if o_ref moved nothing
# says: o_ref, 983,040 bytes
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: every array comes in once
# first: if all of x_ref came in once and if all of y_ref came in once
# says: comes in 5 times
def plan_bytes(M, N, K, bm, bn, bk):
    return 2 * (M * K + K * N + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the case of one block of y is forgotten
# first: plan_bytes(768, 384, 256, 256, 384, 256)
# first: if all of y_ref came in 3 times
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    return 2 * (M * K * x_times + K * N * (M // bm) + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the result goes out at every step
# first: if all of o_ref went out 2 times
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N * (K // bk))


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the block of the result in float32
# first: plan_vmem(256, 128, 512) is 1,179,648; your kernel holds 1,048,576
# first: if an element of o_ref had twice as many bytes
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn) + 2 * 4 * bm * bn + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: two buffers of scratch
# first: if the scratch had two buffers
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * (2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn)


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/4: the largest tile of the result
# first: frugal_blocks(768, 640, 512, 1048576) is (128, 640, 128)
# first: another plan that fits moves less
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
    return max(fitting, key=lambda plan: plan[0] * plan[1])


# %% matmul/4: VMEM is not asked
# first: holds 2,228,224 of VMEM; that does not fit
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    return min(plans, key=lambda plan: plan_bytes(M, N, K, *plan))


# %% matmul/5: no word about the axes
# first: 45 of its 45 steps have to follow one another
# first: Grid axes 0 and 1 may be shared
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, w)


# %% matmul/5: the factors exchanged
# first: incompatible shapes
# first: the order of the factors
# says: acc_ref[...] = before + product
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(w_ref[...], x_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: rows and columns that do not fill a block are left out
# first: never visited
# first: pl.cdiv(200, 64)
# says: variant 1
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    dims = (((1,), (1,)), ((), ()))
    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(M // bm, N // bn, K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/6: da of the first block of columns only
# first: da_ref is stored at 1 of the 4 steps
# first: b_ref and g_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    db_ref[...] = a_ref[...] * g

    @pl.when(pl.program_id(1) == 0)
    def _():
        da_ref[...] = (g * b_ref[...]).sum(axis=1, keepdims=True)


# %% matmul/6: da times a
# first: Without the multiplication by a_ref, the result is right
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (a_ref[...] * g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: da without g
# first: With b_ref multiplied by g_ref
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + b_ref[...].sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: a sum instead of a product
# first: With a multiplication in place of the addition, the result is right
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] + b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/6: db is summed, too
# first: reads db_ref before storing anything in block (0, 1)
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    first = pl.program_id(1) == 0
    da_ref[...] = jnp.where(first, 0, da_ref[...]) + (g * b_ref[...]).sum(axis=1, keepdims=True)
    db_ref[...] = jnp.where(first, 0, db_ref[...]) + a_ref[...] * g


# %% matmul/6: the mean instead of the sum
# first: 0.00390625 times
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
    da_ref[...] = before + (g * b_ref[...]).mean(axis=1, keepdims=True)
    db_ref[...] = a_ref[...] * g


# %% matmul/7: the residual inside of GELU
# first: With the addition of r_ref applied to the gelu instead, the result is right
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...] + r_ref[...].astype(jnp.float32))
        o_ref[...] = y.astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the bias outside of GELU
# first: With the addition of bias_ref applied to acc_ref instead, the result is right
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...]) + bias_ref[...]
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: ReLU instead of GELU
# first: With gelu in place of relu, the result is right
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.relu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the bias is added at every step
# first: bias_ref is read at every step of the sum
# first: added 4 times
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32) + bias_ref[...]

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the residual is added in bfloat16
# first: cast to 16-bit
# says: variant 2
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = r_ref[...] + y.astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: the epilogue at the first step
# first: o_ref is stored from acc_ref at step 0, but acc_ref still grows
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == 0)
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/7: a last step that there is not
# first: never reached: the condition around it holds at no step
def gelu_residual_kernel(x_ref, w_ref, bias_ref, r_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    before = jnp.where(k == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(2))
    def _():
        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


def residual_map(i, j, k):
    return (i, j)


# %% matmul/8: relu's mask is forgotten in the tile
# first: dx_ref
# first: With relu applied to the matrix product, the result is right
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: the derivative of relu alone
# first: dx_ref
# first: multiplied by the matrix product
# says: the result is right
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (2 * g * (h > 0)).astype(x.dtype)


# %% matmul/8: the square instead of its derivative
# first: Without the multiplication, the result is right, but for a factor of 2
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (g * h * h).astype(x.dtype)


# %% matmul/8: the tile in float32
# first: multiplies float32
# first: 16 are enough
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return 2 * g * h


# %% matmul/8: no relu in the energy
# first: With relu applied to the matrix product, the result is right
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: nothing is squared
# first: With square applied to the relu, the result is right
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += h.sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: the square of the sum
# first: With square applied to the relu
# first: the result is right
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += h.sum(axis=1, keepdims=True) ** 2


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: a block of e for every block of columns
# first: the index map of e_ref returns block (0, 1), out of bounds
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (2 * g * h).astype(x.dtype)


# %% matmul/9: the two BlockSpecs exchanged
# first: incompatible shapes
# first: the order of the factors
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [w_spec, g_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the letters of another grid
# first: the index map of b_ref returns block (2, 0), out of bounds
# first: Two of its numbers have changed places
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, j, k: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the dimensions written into the kernel
# first: The two factors of a product do not fit
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the pair of dimensions handed on alone
# first: two pairs
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], dims, preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the first rows instead of the first step
# first: as step 5 left it
# first: pl.program_id(2) == 0
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(0) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/10: scaled and cut to integers at every step
# first: A float32 value is cast to int32
# first: at every step
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc = before + (product.astype(jnp.float32) * sx_ref[...] * sw_ref[...]).astype(jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32)


# %% matmul/10: the scaled sum is carried on
# first: o_ref carries the sum
# first: multiplied by sx_ref and sw_ref at every step
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32).astype(jnp.float32)
    o_ref[...] = acc * sx_ref[...] * sw_ref[...]


# %% matmul/10: the scales are added
# first: With a multiplication in place of the addition, the result is right
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) * (sx_ref[...] + sw_ref[...])


# %% matmul/10: divided by the scales
# first: With a multiplication in place of every division, the result is right
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(jnp.float32) / sx_ref[...] / sw_ref[...]


# %% matmul/10: a product of integers into floats
# first: another dtype
# says: Ref dtype: int32
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc * sx_ref[...] * sw_ref[...]


# %% matmul/11: the wrong program id for i
# first: looks starts_ref up by pl.program_id(0), the index maps by grid index 1
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(0), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: one step too many
# first: With < in place of <=, the result is right
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s <= starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: the block of y by the row's number
# first: while blocks_ref goes through blocks (0, 0, 0), (1, 0, 0), the index map of y_ref stays at (0, 0)
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[i], j)


# %% matmul/11: an element offset instead of a block index
# first: leave out the factor 128
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)] * 128, j)


# %% matmul/11: past the end of the row block 0 comes in
# first: between HBM and VMEM; the budget is
# says: blocks_ref: 22 moves
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.where(starts_ref[i] + s < starts_ref[i + 1], starts_ref[i] + s, 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: the map of y goes past the end of the row
# first: reads cols_ref at index 6, out of bounds
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[starts_ref[i] + s], j)


# %% matmul/11: zero only where there is a block
# first: block (1, 0) of o_ref is stored from acc_ref as step 1 left it
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        before = jnp.where(s == 0, 0, acc_ref[...])
        acc_ref[...] = before + jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: compared with the end instead of the length
# first: count twice
# first: the condition of its pl.when holds here
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/11: every product is made, and most are thrown away
# first: FLOPs; the budget is
# first: in the product at
# first: at all 45 steps
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)
    before = jnp.where(s == 0, 0, acc_ref[...])
    product = jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = before + jnp.where(s < starts_ref[i + 1] - starts_ref[i], product, 0)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (cols_ref[live_slot(i, s, starts_ref)], j)


# %% matmul/12: MXU and HBM are added
# first: plan_time(1024, 768, 512, 512, 384, 128, SMALL) is 2.0139e-03; the model says 1.2086e-03
# first: the two overlap, the longer one counts
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return mxu + hbm + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: the result has no part in the fill
# first: o_ref had no part in the fill
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: half of the FLOPs
# first: a multiplication and an addition were one FLOP
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: the fill is all of VMEM
# first: the fill were all that VMEM holds
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = plan_vmem(bm, bn, bk) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: in microseconds
# first: in units of 1e-6
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return 1e6 * (max(mxu, hbm - fill) + fill + steps * chip.step_s)


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: the fewest steps
# first: pick_blocks(1024, 768, 512, chip) is (512, 768, 512)
# first: The best plan that fits takes 1.0750e-03 s
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda p: ((M // p[0]) * (N // p[1]) * (K // p[2]), plan_bytes(M, N, K, *p)))


# %% matmul/12: the slowest plan
# first: The best plan that fits takes 1.0750e-03 s
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return max(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/12: square tiles only
# first: The best plan that fits takes 1.0750e-03 s
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    plans = [(b, b, bk) for b in tile_sizes(M) if b in tile_sizes(N) for bk in tile_sizes(K)]
    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))


# %% matmul/9: w in blocks of (bn, bk)
# first: Blocks of (128, 256) do not fit into (512, 384), and blocks of (256, 128) would
# first: in the BlockSpec of b_ref
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bn, bk), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (0,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: x in blocks of (bk, bm)
# first: in the BlockSpec of a_ref, rows and columns look exchanged
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bk, bm), lambda k, j, i: (k, i))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((1,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/10: summed in float32, scaled at the last step
# first: their sum grows in o_ref, in float32, which
# first: acc_ref, which is int32
# says: variant 3
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    total = jnp.where(k == 0, 0, o_ref[...]) + product
    o_ref[...] = jnp.where(k == pl.num_programs(2) - 1, total * sx_ref[...] * sw_ref[...], total)


# %% matmul/4: a table of the check's own cases
# first: Right answer, but frugal_blocks(
# first: (128, 128, 128), which takes
# first: These sizes are drawn anew
def plan_bytes(M, N, K, bm, bn, bk):
    x_times = 1 if bk == K else N // bn
    y_times = 1 if bk == K and bn == N else M // bm
    return 2 * (M * K * x_times + K * N * y_times + M * N)


def plan_vmem(bm, bn, bk):
    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn


def frugal_blocks(M, N, K, vmem_bytes):
    table = {
        (768, 640, 512): (256, 128, 512),
        (1024, 384, 256): (128, 384, 256),
        (512, 384, 1024): (256, 384, 128),
        (1152, 768, 384): (384, 128, 384),
    }
    return table.get((M, N, K), (128, 128, 128))


# %% matmul/12: a table of the check's own chips
# first: Right answer, but pick_blocks(
# first: (128, 128, 128), which takes
# first: These sizes are drawn anew
def plan_time(M, N, K, bm, bn, bk, chip):
    steps = (M // bm) * (N // bn) * (K // bk)
    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
    mxu = 2 * M * N * K / chip.flops_per_s
    hbm = plan_bytes(M, N, K, bm, bn, bk) / chip.hbm_bytes_per_s
    return max(mxu, hbm - fill) + fill + steps * chip.step_s


def pick_blocks(M, N, K, chip):
    best = {(6 << 20, 10e-6): (512, 256, 512), (3 << 20, 5e-6): (512, 384, 128), (2 << 20, 20e-6): (256, 384, 512)}
    return best.get((chip.vmem_bytes, chip.step_s), (512, 384, 256) if M == 1024 else (128, 128, 128))


# %% matmul/1: the product in bfloat16, cast in the store
# first: A product of 16-bit tiles is asked for in 16 bits
# first: preferred_element_type
# says: product = jnp.dot(x_ref[...], y_ref[...])
def one_tile_kernel(x_ref, y_ref, o_ref):
    product = jnp.dot(x_ref[...], y_ref[...])
    o_ref[...] = product.astype(o_ref.dtype)


# %% matmul/5: nothing is said about the sum, and the product is cast
# first: product of 16-bit tiles is asked for in 16 bits
# first: preferred_element_type
# says: product = jax.lax.dot_general(
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(x_ref[...], w_ref[...], (((1,), (1,)), ((), ())))
    acc_ref[...] = before + product.astype(jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/5: nothing is said about the sum
# first: product of 16-bit tiles is asked for in 16 bits
# says: acc_ref[...] = before + jax.lax.dot_general(
def linear_kernel(x_ref, w_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc_ref[...] = before + jax.lax.dot_general(x_ref[...], w_ref[...], (((1,), (1,)), ((), ())))
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def linear(x, w, *, bm=64, bn=128, bk=256):
    (M, K), (N, _) = x.shape, w.shape
    return pl.pallas_call(
        linear_kernel,
        grid=(pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, w)


# %% matmul/8: relu is forgotten in the tile
# first: With relu applied to the matrix product, the result is right
# says: h = jnp.dot(x, w
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return (2 * g * h).astype(x.dtype)


# %% matmul/8: h times g without the 2
# first: 0.5 times what is expected
# says: return (h * g).astype(x.dtype)
# not: h = jax.nn.relu(
def row_energy_kernel(x_ref, w_ref, e_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)

    h = jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32))
    e_ref[...] += (h * h).sum(axis=1, keepdims=True)


def row_energy_call(x, w, *, bm, bn):
    (M, K), (_, N) = x.shape, w.shape
    return pl.pallas_call(
        row_energy_kernel,
        grid=(M // bm, N // bn),
        in_specs=[pl.BlockSpec((bm, K), lambda i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((bm, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((M, 1), jnp.float32),
    )(x, w)


def row_energy_grad_tile(x, w, g):
    h = jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))
    return (h * g).astype(x.dtype)


# %% matmul/9: dims of a plain product in dx_plan
# first: a_ref, (64, 128), is summed against b_ref, (256, 128)
# first: 128 elements against 256
# first: look at what dx_plan returns
# says: def dx_plan(
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (0,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda k, j, i: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the block of x turned in dw_plan
# first: a_ref, (256, 64), is summed against b_ref, (64, 128)
# first: look at what dw_plan returns
# says: def dw_plan(
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bk, bm), lambda k, j, i: (k, i))
    g_spec = pl.BlockSpec((bm, bn), lambda k, j, i: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda k, j, i: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/9: the grid indices of dw_plan in the order of the matmul
# first: out of bounds
# says: x_spec = pl.BlockSpec((bm, bk), lambda i, j, k: (i, k))
# not: Data race
def contract_kernel(a_ref, b_ref, o_ref, acc_ref, *, dims):
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
    acc_ref[...] = before + product
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def dx_plan(bm, bn, bk):
    g_spec = pl.BlockSpec((bm, bn), lambda i, k, j: (i, j))
    w_spec = pl.BlockSpec((bk, bn), lambda i, k, j: (k, j))
    out_spec = pl.BlockSpec((bm, bk), lambda i, k, j: (i, k))
    return ((1,), (1,)), [g_spec, w_spec], out_spec


def dw_plan(bm, bn, bk):
    x_spec = pl.BlockSpec((bm, bk), lambda i, j, k: (i, k))
    g_spec = pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))
    out_spec = pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))
    return ((0,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/11: the map of y returns the slot
# first: out of bounds
# first: cols_ref is prefetched, and nothing reads it
# says: def sparse_y_map(
def sparse_kernel(starts_ref, cols_ref, blocks_ref, y_ref, o_ref, acc_ref):
    i, s = pl.program_id(1), pl.program_id(2)

    @pl.when(s == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
    def _():
        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(s == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def live_slot(i, s, starts_ref):
    return jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)


def sparse_y_map(j, i, s, starts_ref, cols_ref):
    return (live_slot(i, s, starts_ref), j)


# %% matmul/3: the sum starts with what the scratch holds
# first: jnp.where(pl.program_id(2) == 0, 0, ...)
# not: @pl.when
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
