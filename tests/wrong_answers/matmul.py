"""Wrong answers to puzzles/matmul.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% matmul/1: the product in bfloat16, cast afterwards
# one_tile_kernel: `(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)` -> `(x_ref[...], y_ref[...]).astype(jnp.float32)`


# %% matmul/1: the operands cast to float32
# one_tile_kernel: `, y_ref[...], preferred_element_type=jnp.float32` -> `.astype(jnp.float32), y_ref[...].astype(jnp.float32)`

# %% matmul/1: a bfloat16 product into a float32 buffer
# one_tile_kernel: `(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)` -> `(x_ref[...], y_ref[...])`

# %% matmul/1: element by element
# one_tile_kernel: `jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)` -> `x_ref[...] * y_ref[...]`


# %% matmul/1: two halves of k, added in bfloat16
# one_tile_kernel:
# -    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    half = x_ref.shape[1] // 2
# +    low = x_ref[:, :half] @ y_ref[:half]
# +    o_ref[...] = (low + x_ref[:, half:] @ y_ref[half:]).astype(o_ref.dtype)

# %% matmul/2: nothing is said about the axes
# tiled:
# -        compiler_params=pltpu.CompilerParams(
# -            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
# -        ),
# +        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),

# %% matmul/2: everything is parallel
# tiled: `arbitrary` -> `parallel`

# %% matmul/2: one axis of two is parallel
# tiled: `", "parallel", "` -> `", "arbitrary", "`

# %% matmul/2: k first
# tiled: `pl.cdiv(M, bm), pl.cdiv(N, bn), K // bk` -> `K // bk, pl.cdiv(M, bm), pl.cdiv(N, bn)`
# tiled: `((bm, bk), lambda i, j, k: (i, k)),` -> `((bm, bk), lambda k, i, j: (i, k)),`
# tiled: `((bk, bn), lambda i, j, k: (k, j)),` -> `((bk, bn), lambda k, i, j: (k, j)),`
# tiled: `((bm, bn), lambda i, j, k: (i, j)),` -> `((bm, bn), lambda k, i, j: (i, j)),`
# tiled: `parallel", "parallel", "arbitrary` -> `arbitrary", "parallel", "parallel`

# %% matmul/2: rows that do not fill a block are left out
# tiled: `pl.cdiv(M, bm), pl.cdiv(N, bn)` -> `M // bm, N // bn`

# %% matmul/2: the scratch in bfloat16
# tiled: `float32` -> `bfloat16`

# %% matmul/2: rows and columns exchanged in the map of y
# tiled: `k, j` -> `j, k`


# %% matmul/3: still with a branch
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

    acc = acc_ref[...] + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = acc
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/3: garbage times zero
# straight_kernel: `= jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])` -> `= acc_ref[...] * (pl.program_id(2) > 0)`

# %% matmul/3: never starts from zero
# straight_kernel: `jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])` -> `acc_ref[...]`


# %% matmul/3: only the product of this step
# straight_kernel:
# -    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
# -    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    acc = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

# %% matmul/3: starts over at every step but the first
# straight_kernel: `==` -> `>`


# %% matmul/3: the draft is the sum so far
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    o_ref[...] = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% matmul/3: stored before the last addition
# straight_kernel:
# -    acc = before + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# -    acc_ref[...] = acc
# -    o_ref[...] = acc.astype(o_ref.dtype)
# +    acc_ref[...] = before
# +    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# +    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

# %% matmul/4: one buffer for each block
# plan_vmem:
# -    return 2 * 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn
# +    return 2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn

# %% matmul/4: the scratch is forgotten
# plan_vmem: `(bm * bk + bk * bn + bm * bn) + 4 * bm * bn` -> `(bm * bk + bk * bn + bm * bn)`

# %% matmul/4: the longest k
# frugal_blocks: `plan_bytes(M, N, K, *plan)` -> `-plan[2]`

# %% matmul/4: the widest block of columns
# frugal_blocks: `plan_bytes(M, N, K, *plan)` -> `-plan[1]`

# %% matmul/4: true for the notebook's example alone
# frugal_blocks:
# -    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))
# +    return (256, 128, 512)

# %% matmul/4: x comes in once for each block of rows
# plan_bytes:
# -    x_times = 1 if bk == K else N // bn
# -    y_times = 1 if bk == K and bn == N else M // bm
# -    return 2 * (M * K * x_times + K * N * y_times + M * N)
# +    return 2 * (M * K * (M // bm) + K * N * (N // bn) + M * N)

# %% matmul/4: nothing ever stays
# plan_bytes:
# -    x_times = 1 if bk == K else N // bn
# -    y_times = 1 if bk == K and bn == N else M // bm
# -    return 2 * (M * K * x_times + K * N * y_times + M * N)
# +    return 2 * (M * K * (N // bn) + K * N * (M // bm) + M * N)

# %% matmul/4: always all of K in one step
# frugal_blocks: `tile_sizes(K)` -> `[K]`

# %% matmul/4: y stays as well
# plan_bytes:
# -    x_times = 1 if bk == K else N // bn
# -    y_times = 1 if bk == K and bn == N else M // bm
# -    return 2 * (M * K * x_times + K * N * y_times + M * N)
# +    if bk == K:
# +        return 2 * (M * K + K * N + M * N)
# +    return 2 * (M * K * (N // bn) + K * N * (M // bm) + M * N)

# %% matmul/5: contracted like x @ w
# linear_kernel:
# -    dims = (((1,), (1,)), ((), ()))
# +    dims = (((1,), (0,)), ((), ()))

# %% matmul/5: the block of w counted the other way round
# linear: `(j, k)` -> `(k, j)`

# %% matmul/5: the same rows of w for every column
# linear: `k: (j, k)` -> `k: (0, k)`

# %% matmul/5: a transposed copy is made outside
# linear_kernel:
# -    dims = (((1,), (1,)), ((), ()))
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
# +    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# linear: `bn, bk), lambda i, j, k: (j, k` -> `bk, bn), lambda i, j, k: (k, j`
# linear: `(x, w)` -> `(x, w.T)`

# %% matmul/5: turned on its side twice
# linear_kernel: `w_ref[...], dims, preferred_element_type` -> `w_ref[...].T, dims, preferred_element_type`

# %% matmul/5: the sum never starts over
# linear_kernel: `jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])` -> `acc_ref[...]`

# %% matmul/6: a dense diagonal matrix
# scale_rows_kernel:
# -    o_ref[...] = a_ref[...] * b_ref[...]
# +    rows = b_ref.shape[0]
# +    square = jnp.arange(rows)[:, None] == jnp.arange(rows)[None, :]
# +    o_ref[...] = jnp.dot(jnp.where(square, a_ref[...], 0), b_ref[...], precision="highest")

# %% matmul/6: da of the last block of columns only
# scale_rows_grad_kernel:
# -    before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])
# -    da_ref[...] = before + (g * b_ref[...]).sum(axis=1, keepdims=True)
# +    da_ref[...] = (g * b_ref[...]).sum(axis=1, keepdims=True)

# %% matmul/6: da is never set to zero
# scale_rows_grad_kernel: `jnp.where(pl.program_id(1) == 0, 0, da_ref[...])` -> `da_ref[...]`

# %% matmul/6: db without a
# scale_rows_grad_kernel: `= a_ref[...] * g` -> `= g`

# %% matmul/6: da from the result's gradient alone
# scale_rows_grad_kernel: `(g * b_ref[...])` -> `g`

# %% matmul/6: summed down the columns
# scale_rows_grad_kernel: `=1,` -> `=0,`

# %% matmul/6: zeroed for the first row of blocks only
# scale_rows_grad_kernel: `pl.program_id(1) == 0` -> `(pl.program_id(0) == 0) & (pl.program_id(1) == 0)`

# %% matmul/7: the epilogue at every step
# gelu_residual_kernel:
# -    @pl.when(k == pl.num_programs(2) - 1)
# -    def _():
# -        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# -        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)
# +    y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# +    o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)


# %% matmul/7: GELU on every partial sum
# gelu_residual_kernel: `jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32` -> `jax.nn.gelu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)`
# gelu_residual_kernel: `jax.nn.gelu(acc_ref[...] + bias_ref[...])` -> `acc_ref[...] + bias_ref[...]`

# %% matmul/7: the residual comes again with every k
# residual_map: `(i, j)` -> `(i, k)`

# %% matmul/7: the residual of the first rows for all
# residual_map:
# -    return (i, j)
# +    return (0, j)

# %% matmul/7: rounded to bfloat16 before the bias
# gelu_residual_kernel: `nn.gelu(acc_ref[...] + bias_ref[...])` -> `nn.gelu(acc_ref[...].astype(o_ref.dtype) + bias_ref[...])`

# %% matmul/7: the residual is added at every step
# gelu_residual_kernel:
# -    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# +    acc_ref[...] = (
# +        before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32) + r_ref[...].astype(jnp.float32)
# +    )
# gelu_residual_kernel: `(r_ref[...].astype(jnp.float32) + y)` -> `y`


# %% matmul/8: the product is written, and summed by a second kernel
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
# row_energy_kernel: `+` -> ``

# %% matmul/8: e is never set to zero
# row_energy_kernel:
# -    @pl.when(pl.program_id(1) == 0)
# -    def _():
# -        e_ref[...] = jnp.zeros(e_ref.shape, e_ref.dtype)
# -

# %% matmul/8: rows inside, columns outside
# row_energy_call: `M // bm, N // bn` -> `N // bn, M // bm`
# row_energy_call: `i, j: (i, 0)), pl.BlockSpec((K, bn), lambda i, j` -> `j, i: (i, 0)), pl.BlockSpec((K, bn), lambda j, i`
# row_energy_call: `((bm, 1), lambda i, j: (i, 0)),` -> `((bm, 1), lambda j, i: (i, 0)),`

# %% matmul/8: the 2 of the square is lost
# row_energy_grad_tile:
# -    return (2 * g * h).astype(x.dtype)
# +    return (g * h).astype(x.dtype)

# %% matmul/8: without g
# row_energy_grad_tile:
# -    return (2 * g * h).astype(x.dtype)
# +    return (2 * h).astype(x.dtype)

# %% matmul/9: dw of the last tokens only
# contract_kernel: `= so_far(acc_ref) + product` -> `= product`

# %% matmul/9: dx summed over the wrong dimension of w
# dx_plan:
# -    return ((1,), (1,)), [g_spec, w_spec], out_spec
# +    return ((1,), (0,)), [g_spec, w_spec], out_spec

# %% matmul/9: the map of g does not follow the rows
# dw_plan: `i: (i, j)` -> `i: (0, j)`

# %% matmul/9: dw summed in bfloat16
# contract_kernel:
# -    acc_ref[...] = so_far(acc_ref) + product
# -    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
# +    o_ref[...] = so_far(o_ref) + product.astype(o_ref.dtype)

# %% matmul/9: grid indices read in the wrong order
# dw_plan: `((bk, bn), lambda k, j, i: (k, j))` -> `((bk, bn), lambda i, j, k: (k, j))`

# %% matmul/9: the gradient cast to float32 for the product
# contract_kernel:
# -    product = jax.lax.dot_general(a_ref[...], b_ref[...], (dims, ((), ())), preferred_element_type=jnp.float32)
# +    product = jax.lax.dot_general(
# +        a_ref[...].astype(jnp.float32),
# +        b_ref[...].astype(jnp.float32),
# +        (dims, ((), ())),
# +        preferred_element_type=jnp.float32,
# +    )

# %% matmul/9: never starts from zero
# contract_kernel: `so_far(acc_ref)` -> `acc_ref[...]`


# %% matmul/10: scaled inside the loop, in bfloat16
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
    x = (x_ref[...].astype(jnp.float32) * sx_ref[...]).astype(jnp.bfloat16)
    w = (w_ref[...].astype(jnp.float32) * sw_ref[...]).astype(jnp.bfloat16)
    o_ref[...] = before + jnp.dot(x, w, preferred_element_type=jnp.float32)


# %% matmul/10: int8 products of int8
# int8_kernel: `(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)` -> `(x_ref[...], w_ref[...]).astype(jnp.int32)`

# %% matmul/10: cast to bfloat16 for the product
# int8_kernel:
# -    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# +    acc = so_far(acc_ref) + jnp.dot(
# +        x_ref[...].astype(jnp.bfloat16), w_ref[...].astype(jnp.bfloat16), preferred_element_type=jnp.float32
# +    ).astype(jnp.int32)

# %% matmul/10: the scale of the columns is forgotten
# int8_kernel: `[...] * sw_ref[...]` -> `[...]`

# %% matmul/10: the scale of the rows is forgotten
# int8_kernel: `(jnp.float32) * sx_ref[...] * sw_ref[...]` -> `(jnp.float32) * sw_ref[...]`

# %% matmul/11: rows without blocks store nothing
# sparse_kernel: `pl.num_programs(2)` -> `starts_ref[i + 1] - starts_ref[i]`

# %% matmul/11: every step adds
# sparse_kernel:
# -    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
# -    def _():
# -        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/11: past the end of the row the next block comes in for nothing
# live_slot: `jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0` -> `jnp.minimum(starts_ref[i] + s, starts_ref[starts_ref.shape[0] - 1] - 1`

# %% matmul/11: no end at all
# live_slot: `jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)` -> `starts_ref[i] + s`

# %% matmul/11: a first row without blocks is not thought of
# live_slot: `jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1), 0)` -> `jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1)`

# %% matmul/11: the number of the slot instead of its column
# sparse_y_map: `cols_ref[live_slot(i, s, starts_ref)]` -> `live_slot(i, s, starts_ref)`

# %% matmul/12: the fill is forgotten
# plan_time: `max(mxu, hbm - fill) + fill + steps *` -> `max(mxu, hbm) + steps *`

# %% matmul/12: steps cost nothing
# plan_time: `fill + steps * chip.step_s` -> `fill`

# %% matmul/12: arithmetic and copies one after the other
# plan_time: `max(mxu, hbm - fill) + fill` -> `mxu + hbm`

# %% matmul/12: only the MXU
# elsewhere: it shows at another line of the function
# plan_time: `max(mxu, hbm - fill)` -> `mxu`

# %% matmul/12: the fewest bytes, whatever they cost
# pick_blocks:
# -    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))
# +    return frugal_blocks(M, N, K, chip.vmem_bytes)

# %% matmul/12: VMEM is not asked
# pick_blocks:
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))
# +    return min(plans, key=lambda plan: plan_time(M, N, K, *plan, chip))

# %% matmul/12: the fill is not taken off the copies
# elsewhere: it shows at another line of the function
# plan_time: `(mxu, hbm - fill) + fill` -> `(mxu, hbm) + fill`

# %% matmul/7: all of the epilogue at every step, but for the store
# gelu_residual_kernel:
# -    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# +    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# +    y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# +    result = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)
# gelu_residual_kernel:
# -        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# -        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)
# +        o_ref[...] = result


# %% matmul/10: scaled inside the loop, in float32
# int8_kernel:
# -    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# -    acc_ref[...] = acc
# -    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]
# +    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
# +    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# +    o_ref[...] = before + product.astype(jnp.float32) * sx_ref[...] * sw_ref[...]

# %% matmul/11: zeroed by rows that have blocks alone
# elsewhere: it shows at another line of the function
# sparse_kernel:
# -    @pl.when(s == 0)
# -    def _():
# -        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
# -
# sparse_kernel:
# -        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +        before = jnp.where(s == 0, 0, acc_ref[...])
# +        acc_ref[...] = before + jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)


# %% matmul/1: no product at all
# one_tile_kernel: `jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32` -> `(x_ref[...][:, :, None].astype(jnp.float32) * y_ref[...][None].astype(jnp.float32)).sum(axis=1`


# %% matmul/3: the kernel of Puzzle 2, called
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_kernel(x_ref, y_ref, o_ref, acc_ref)


# %% matmul/3: the garbage multiplied by 0
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc = acc_ref[...] * (pl.program_id(2) > 0)
    acc_ref[...] = acc + jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/7: GELU rounded before the residual
# gelu_residual_kernel:
# -        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# -        o_ref[...] = (r_ref[...].astype(jnp.float32) + y).astype(o_ref.dtype)
# +        o_ref[...] = r_ref[...] + jax.nn.gelu(acc_ref[...] + bias_ref[...]).astype(o_ref.dtype)

# %% matmul/9: dimension numbers without the batch
# contract_kernel: `(dims, ((), ()))` -> `dims`

# %% matmul/10: summed in floating point, and cast
# int8_kernel:
# -    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# +    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
# +    acc = so_far(acc_ref) + product.astype(jnp.int32)


# %% matmul/1: the Ref is given another value
# one_tile_kernel: `o_ref[...]` -> `o_ref`

# %% matmul/1: added to what nobody has written
# one_tile_kernel:
# -    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

# %% matmul/1: multiplied and added element by element
# one_tile_kernel: `jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32` -> `jnp.sum(x_ref[...].astype(jnp.float32)[:, :, None] * y_ref[...].astype(jnp.float32)[None], axis=1`

# %% matmul/1: x on its side
# one_tile_kernel: `.], y` -> `.].T, y`

# %% matmul/2: the limit is not passed on
# tiled:
# -        compiler_params=pltpu.CompilerParams(
# -            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
# -        ),
# +        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),

# %% matmul/2: columns outside, rows inside
# elsewhere: it shows at another line of the function
# tiled: `M, bm), pl.cdiv(N, bn` -> `N, bn), pl.cdiv(M, bm`
# tiled: `bk), lambda i, j, k: (` -> `bk), lambda j, i, k: (`
# tiled: `BlockSpec((bk, bn), lambda i, j, k: (k, j))` -> `BlockSpec((bk, bn), lambda j, i, k: (k, j))`
# tiled: `BlockSpec((bm, bn), lambda i, j, k: (i, j))` -> `BlockSpec((bm, bn), lambda j, i, k: (i, j))`

# %% matmul/2: the map of the result returns (j, i)
# tiled: `(i, j)` -> `(j, i)`

# %% matmul/2: the result in float32
# tiled: `x.dtype` -> `jnp.float32`

# %% matmul/2: all of K in one step
# tiled: `K // bk` -> `1`
# tiled: `bk), lambda i, j, k: (i, k` -> `K), lambda i, j, k: (i, 0`
# tiled: `bk, bn), lambda i, j, k: (k` -> `K, bn), lambda i, j, k: (0`

# %% matmul/3: the sum is never kept
# elsewhere: it shows at another line of the function
# straight_kernel:
# -    acc_ref[...] = acc


# %% matmul/3: zero at every step
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/3: the first rows instead of the first step
# straight_kernel: `(2)` -> `(0)`

# %% matmul/3: the two sides of where are exchanged
# straight_kernel: `0, acc_ref[...]` -> `acc_ref[...], 0`


# %% matmul/3: a Python if
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    if pl.program_id(2) == 0:
        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/4: elements instead of bytes
# plan_bytes: `2 * (M * K * x_times + K * N * y_times + M * N)` -> `M * K * x_times + K * N * y_times + M * N`

# %% matmul/4: the result is not counted
# plan_bytes: `(M * K * x_times + K * N * y_times + M * N)` -> `(M * K * x_times + K * N * y_times)`

# %% matmul/4: every array comes in once
# plan_bytes:
# -    x_times = 1 if bk == K else N // bn
# -    y_times = 1 if bk == K and bn == N else M // bm
# -    return 2 * (M * K * x_times + K * N * y_times + M * N)
# +    return 2 * (M * K + K * N + M * N)

# %% matmul/4: the case of one block of y is forgotten
# plan_bytes:
# -    y_times = 1 if bk == K and bn == N else M // bm
# -    return 2 * (M * K * x_times + K * N * y_times + M * N)
# +    return 2 * (M * K * x_times + K * N * (M // bm) + M * N)

# %% matmul/4: the result goes out at every step
# plan_bytes: `(M * K * x_times + K * N * y_times + M * N)` -> `(M * K * x_times + K * N * y_times + M * N * (K // bk))`

# %% matmul/4: the block of the result in float32
# plan_vmem: `(bm * bk + bk * bn + bm * bn) + 4 * bm * bn` -> `(bm * bk + bk * bn) + 2 * 4 * bm * bn + 4 * bm * bn`

# %% matmul/4: two buffers of scratch
# plan_vmem: `2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn` -> `(2 * (bm * bk + bk * bn + bm * bn) + 4 * bm * bn)`

# %% matmul/4: the largest tile of the result
# frugal_blocks: `return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))` -> `return max(fitting, key=lambda plan: plan[0] * plan[1])`

# %% matmul/4: VMEM is not asked
# frugal_blocks:
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))
# +    return min(plans, key=lambda plan: plan_bytes(M, N, K, *plan))

# %% matmul/5: no word about the axes
# elsewhere: it shows at another line of the function
# linear:
# -        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),

# %% matmul/5: the factors exchanged
# linear_kernel:
# -    dims = (((1,), (1,)), ((), ()))
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
# +    product = jax.lax.dot_general(w_ref[...], x_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

# %% matmul/5: rows and columns that do not fill a block are left out
# linear: `pl.cdiv(M, bm), pl.cdiv(N, bn)` -> `M // bm, N // bn`


# %% matmul/6: da of the first block of columns only
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    g = g_ref[...]
    db_ref[...] = a_ref[...] * g

    @pl.when(pl.program_id(1) == 0)
    def _():
        da_ref[...] = (g * b_ref[...]).sum(axis=1, keepdims=True)


# %% matmul/6: da times a
# scale_rows_grad_kernel: `[...] = before + (g * b_ref[...]).sum` -> `[...] = before + (a_ref[...] * g * b_ref[...]).sum`

# %% matmul/6: da without g
# scale_rows_grad_kernel: `(g * b_ref[...])` -> `b_ref[...]`

# %% matmul/6: a sum instead of a product
# scale_rows_kernel: `*` -> `+`

# %% matmul/6: db is summed, too
# scale_rows_grad_kernel: `before = jnp.where(pl.program_id(1) == 0, 0, da_ref[...])` -> `first = pl.program_id(1) == 0`
# scale_rows_grad_kernel: `= before +` -> `= jnp.where(first, 0, da_ref[...]) +`
# scale_rows_grad_kernel: `[...] = a_ref[...] *` -> `[...] = jnp.where(first, 0, db_ref[...]) + a_ref[...] *`

# %% matmul/6: the mean instead of the sum
# scale_rows_grad_kernel: `sum` -> `mean`

# %% matmul/7: the residual inside of GELU
# gelu_residual_kernel: `(acc_ref[...] + bias_ref[...])` -> `(acc_ref[...] + bias_ref[...] + r_ref[...].astype(jnp.float32))`
# gelu_residual_kernel: `(r_ref[...].astype(jnp.float32) + y)` -> `y`

# %% matmul/7: the bias outside of GELU
# gelu_residual_kernel: `(acc_ref[...] + bias_ref[...])` -> `(acc_ref[...]) + bias_ref[...]`

# %% matmul/7: ReLU instead of GELU
# gelu_residual_kernel:
# -        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# +        y = jax.nn.relu(acc_ref[...] + bias_ref[...])


# %% matmul/7: the bias is added at every step
# gelu_residual_kernel: `=jnp.float32)` -> `=jnp.float32) + bias_ref[...]`
# gelu_residual_kernel:
# -        y = jax.nn.gelu(acc_ref[...] + bias_ref[...])
# +        y = jax.nn.gelu(acc_ref[...])

# %% matmul/7: the residual is added in bfloat16
# gelu_residual_kernel: `(r_ref[...].astype(jnp.float32) + y)` -> `r_ref[...] + y`

# %% matmul/7: the epilogue at the first step
# gelu_residual_kernel: `pl.num_programs(2) - 1` -> `0`

# %% matmul/7: a last step that there is not
# gelu_residual_kernel: `(k == pl.num_programs(2) - 1)` -> `(k == pl.num_programs(2))`

# %% matmul/8: relu's mask is forgotten in the tile
# row_energy_grad_tile: `= jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))` -> `= jnp.dot(x, w, preferred_element_type=jnp.float32)`

# %% matmul/8: the derivative of relu alone
# row_energy_grad_tile: `= jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))` -> `= jnp.dot(x, w, preferred_element_type=jnp.float32)`
# row_energy_grad_tile: `g * h).astype(` -> `g * (h > 0)).astype(`

# %% matmul/8: the square instead of its derivative
# row_energy_grad_tile: `2 * g` -> `g * h`

# %% matmul/8: the tile in float32
# row_energy_grad_tile: `(2 * g * h).astype(x.dtype)` -> `2 * g * h`


# %% matmul/8: no relu in the energy
# row_energy_kernel: `jax.nn.relu(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)` -> `jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32`

# %% matmul/8: nothing is squared
# row_energy_kernel: `(h * h)` -> `h`

# %% matmul/8: the square of the sum
# row_energy_kernel: `(h * h).sum(axis=1, keepdims=True)` -> `h.sum(axis=1, keepdims=True) ** 2`

# %% matmul/8: a block of e for every block of columns
# row_energy_call: `((bm, 1), lambda i, j: (i, 0)),` -> `((bm, 1), lambda i, j: (i, j)),`

# %% matmul/9: the two BlockSpecs exchanged
# elsewhere: it shows at another line of the function
# dx_plan: `g_spec, w_spec` -> `w_spec, g_spec`

# %% matmul/9: the letters of another grid
# dx_plan: `((bm, bn), lambda i, k, j: (i, j))` -> `((bm, bn), lambda i, j, k: (i, j))`
# dx_plan: `((bk, bn), lambda i, k, j: (k, j))` -> `((bk, bn), lambda i, j, k: (k, j))`
# dx_plan: `((bm, bk), lambda i, k, j: (i, k))` -> `((bm, bk), lambda i, j, k: (i, k))`


# %% matmul/9: the dimensions written into the kernel
# contract_kernel: `dims,` -> `((1,), (1,)),`

# %% matmul/9: the pair of dimensions handed on alone
# contract_kernel: `(dims, ((), ()))` -> `dims`

# %% matmul/9: the first rows instead of the first step
# contract_kernel: `so_far(acc_ref)` -> `jnp.where(pl.program_id(0) == 0, 0, acc_ref[...])`


# %% matmul/10: scaled and cut to integers at every step
# int8_kernel:
# -    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# +    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# +    acc = so_far(acc_ref) + (product.astype(jnp.float32) * sx_ref[...] * sw_ref[...]).astype(jnp.int32)
# int8_kernel:
# -    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]
# +    o_ref[...] = acc.astype(jnp.float32)

# %% matmul/10: the scaled sum is carried on
# int8_kernel:
# -    acc = so_far(acc_ref) + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
# -    acc_ref[...] = acc
# -    o_ref[...] = acc.astype(jnp.float32) * sx_ref[...] * sw_ref[...]
# +    before = jnp.where(pl.program_id(2) == 0, 0, o_ref[...])
# +    acc = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32).astype(jnp.float32)
# +    o_ref[...] = acc * sx_ref[...] * sw_ref[...]

# %% matmul/10: the scales are added
# int8_kernel: `sx_ref[...] * sw_ref[...]` -> `(sx_ref[...] + sw_ref[...])`

# %% matmul/10: divided by the scales
# int8_kernel: `* sx_ref[...] *` -> `/ sx_ref[...] /`

# %% matmul/10: a product of integers into floats
# int8_kernel: `int32` -> `float32`
# int8_kernel: `[...] = acc.astype(jnp.float32) * sx_ref[...]` -> `[...] = acc * sx_ref[...]`

# %% matmul/11: the wrong program id for i
# sparse_kernel: `(1)` -> `(0)`

# %% matmul/11: one step too many
# sparse_kernel:
# -    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
# +    @pl.when(s <= starts_ref[i + 1] - starts_ref[i])

# %% matmul/11: the block of y by the row's number
# sparse_y_map: `live_slot(i, s, starts_ref)` -> `i`

# %% matmul/11: an element offset instead of a block index
# sparse_y_map: `(cols_ref[live_slot(i, s, starts_ref)], j)` -> `(cols_ref[live_slot(i, s, starts_ref)] * 128, j)`


# %% matmul/11: past the end of the row block 0 comes in
# live_slot: `jnp.maximum(jnp.minimum(starts_ref[i] + s, starts_ref[i + 1] - 1)` -> `jnp.where(starts_ref[i] + s < starts_ref[i + 1], starts_ref[i] + s`

# %% matmul/11: the map of y goes past the end of the row
# sparse_y_map: `live_slot(i, s, starts_ref)` -> `starts_ref[i] + s`

# %% matmul/11: zero only where there is a block
# elsewhere: it shows at another line of the function
# sparse_kernel:
# -    @pl.when(s == 0)
# -    def _():
# -        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
# -
# sparse_kernel:
# -        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +        before = jnp.where(s == 0, 0, acc_ref[...])
# +        acc_ref[...] = before + jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)

# %% matmul/11: compared with the end instead of the length
# sparse_kernel: `(s < starts_ref[i + 1] - starts_ref[i])` -> `(s < starts_ref[i + 1])`

# %% matmul/11: every product is made, and most are thrown away
# elsewhere: it shows at another line of the function
# sparse_kernel:
# -
# -    @pl.when(s == 0)
# -    def _():
# -        acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)
# -
# -    @pl.when(s < starts_ref[i + 1] - starts_ref[i])
# -    def _():
# -        acc_ref[...] += jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    before = jnp.where(s == 0, 0, acc_ref[...])
# +    product = jnp.dot(blocks_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    acc_ref[...] = before + jnp.where(s < starts_ref[i + 1] - starts_ref[i], product, 0)

# %% matmul/12: MXU and HBM are added
# elsewhere: it shows at another line of the function
# plan_time:
# -    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
# plan_time: `max(mxu, hbm - fill) + fill` -> `mxu + hbm`

# %% matmul/12: the result has no part in the fill
# plan_time: `(bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s` -> `(bm * bk + bk * bn) / chip.hbm_bytes_per_s`

# %% matmul/12: half of the FLOPs
# plan_time:
# -    mxu = 2 * M * N * K / chip.flops_per_s
# +    mxu = M * N * K / chip.flops_per_s

# %% matmul/12: the fill is all of VMEM
# plan_time:
# -    fill = 2 * (bm * bk + bk * bn + bm * bn) / chip.hbm_bytes_per_s
# +    fill = plan_vmem(bm, bn, bk) / chip.hbm_bytes_per_s

# %% matmul/12: in microseconds
# plan_time: `max(mxu, hbm - fill) + fill + steps * chip.step_s` -> `1e6 * (max(mxu, hbm - fill) + fill + steps * chip.step_s)`


# %% matmul/12: the fewest steps
# pick_blocks: `plan: plan_time(M, N, K, *plan, chip` -> `p: ((M // p[0]) * (N // p[1]) * (K // p[2]), plan_bytes(M, N, K, *p)`

# %% matmul/12: the slowest plan
# pick_blocks: `min` -> `max`

# %% matmul/12: square tiles only
# pick_blocks:
# -    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
# +    plans = [(b, b, bk) for b in tile_sizes(M) if b in tile_sizes(N) for bk in tile_sizes(K)]

# %% matmul/9: w in blocks of (bn, bk)
# dx_plan: `bk, bn` -> `bn, bk`
# dx_plan:
# -    return ((1,), (1,)), [g_spec, w_spec], out_spec
# +    return ((1,), (0,)), [g_spec, w_spec], out_spec

# %% matmul/9: x in blocks of (bk, bm)
# dw_plan: `bm, bk), lambda k, j, i: (i, k` -> `bk, bm), lambda k, j, i: (k, i`
# dw_plan:
# -    return ((0,), (0,)), [x_spec, g_spec], out_spec
# +    return ((1,), (0,)), [x_spec, g_spec], out_spec


# %% matmul/10: summed in float32, scaled at the last step
def int8_kernel(x_ref, w_ref, sx_ref, sw_ref, o_ref, acc_ref):
    k = pl.program_id(2)
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.int32)
    total = jnp.where(k == 0, 0, o_ref[...]) + product
    o_ref[...] = jnp.where(k == pl.num_programs(2) - 1, total * sx_ref[...] * sw_ref[...], total)


# %% matmul/4: a table of the check's own cases
# frugal_blocks:
# -    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_bytes(M, N, K, *plan))
# +    table = {
# +        (768, 640, 512): (256, 128, 512),
# +        (1024, 384, 256): (128, 384, 256),
# +        (512, 384, 1024): (256, 384, 128),
# +        (1152, 768, 384): (384, 128, 384),
# +    }
# +    return table.get((M, N, K), (128, 128, 128))

# %% matmul/12: a table of the check's own chips
# pick_blocks:
# -    plans = [(bm, bn, bk) for bm in tile_sizes(M) for bn in tile_sizes(N) for bk in tile_sizes(K)]
# -    fitting = [plan for plan in plans if plan_vmem(*plan) <= chip.vmem_bytes]
# -    return min(fitting, key=lambda plan: plan_time(M, N, K, *plan, chip))
# +    best = {(6 << 20, 10e-6): (512, 256, 512), (3 << 20, 5e-6): (512, 384, 128), (2 << 20, 20e-6): (256, 384, 512)}
# +    return best.get((chip.vmem_bytes, chip.step_s), (512, 384, 256) if M == 1024 else (128, 128, 128))


# %% matmul/1: the product in bfloat16, cast in the store
# one_tile_kernel:
# -    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
# +    product = jnp.dot(x_ref[...], y_ref[...])
# +    o_ref[...] = product.astype(o_ref.dtype)

# %% matmul/5: nothing is said about the sum, and the product is cast
# linear_kernel:
# -    dims = (((1,), (1,)), ((), ()))
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
# -    acc_ref[...] = before + product
# +    product = jax.lax.dot_general(x_ref[...], w_ref[...], (((1,), (1,)), ((), ())))
# +    acc_ref[...] = before + product.astype(jnp.float32)

# %% matmul/5: nothing is said about the sum
# linear_kernel:
# -    dims = (((1,), (1,)), ((), ()))
# -    product = jax.lax.dot_general(x_ref[...], w_ref[...], dims, preferred_element_type=jnp.float32)
# -    acc_ref[...] = before + product
# +    acc_ref[...] = before + jax.lax.dot_general(x_ref[...], w_ref[...], (((1,), (1,)), ((), ())))

# %% matmul/8: relu is forgotten in the tile
# row_energy_grad_tile: `= jax.nn.relu(jnp.dot(x, w, preferred_element_type=jnp.float32))` -> `= jnp.dot(x, w, preferred_element_type=jnp.float32)`

# %% matmul/8: h times g without the 2
# row_energy_grad_tile: `2 * g * h` -> `h * g`

# %% matmul/9: dims of a plain product in dx_plan
# dx_plan:
# -    return ((1,), (1,)), [g_spec, w_spec], out_spec
# +    return ((1,), (0,)), [g_spec, w_spec], out_spec

# %% matmul/9: the block of x turned in dw_plan
# dw_plan: `bm, bk), lambda k, j, i: (i, k` -> `bk, bm), lambda k, j, i: (k, i`

# %% matmul/9: the grid indices of dw_plan in the order of the matmul
# dw_plan: `((bm, bk), lambda k, j, i: (i, k))` -> `((bm, bk), lambda i, j, k: (i, k))`
# dw_plan: `((bm, bn), lambda k, j, i: (i, j))` -> `((bm, bn), lambda i, j, k: (i, j))`
# dw_plan: `((bk, bn), lambda k, j, i: (k, j))` -> `((bk, bn), lambda i, j, k: (k, j))`

# %% matmul/11: the map of y returns the slot
# sparse_y_map: `cols_ref[live_slot(i, s, starts_ref)]` -> `live_slot(i, s, starts_ref)`


# %% matmul/3: the sum starts with what the scratch holds
def straight_kernel(x_ref, y_ref, o_ref, acc_ref):
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


# %% matmul/10: the sum never starts from zero
# int8_kernel: `so_far(acc_ref)` -> `acc_ref[...]`


# %% matmul/7b: all of a at once
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    o_ref[...] = jnp.dot(a_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% matmul/7b: a loop over all tiles
# triangle_kernel: `pl.cdiv((pl.program_id(1) + 1) * bm, bk)` -> `a_ref.shape[1] // bk`

# %% matmul/7b: the tile on the diagonal is left out
# triangle_kernel: `pl.cdiv((pl.program_id(1) + 1) * bm, bk)` -> `pl.cdiv(pl.program_id(1) * bm, bk)`

# %% matmul/7b: rounded down
# triangle_kernel: `pl.cdiv((pl.program_id(1) + 1) * bm, bk)` -> `(pl.program_id(1) + 1) * bm // bk`

# %% matmul/7b: as if tiles were as wide as blocks are high
# triangle_kernel: `pl.cdiv((pl.program_id(1) + 1) * bm, bk)` -> `pl.program_id(1) + 1`

# %% matmul/7b: the column's number for the row's
# triangle_kernel: `pl.program_id(1)` -> `pl.program_id(0)`

# %% matmul/7b: a slice that starts at a block number
# triangle_kernel: `k * bk, bk` -> `k, bk`

# %% matmul/7b: y stays where it is
# triangle_kernel: `y_ref[part, :]` -> `y_ref[pl.ds(0, bk), :]`

# %% matmul/7b: a stays where it is
# triangle_kernel: `a_ref[:, part]` -> `a_ref[:, pl.ds(0, bk)]`

# %% matmul/7b: only the last product is kept
# triangle_kernel: `return acc + jnp` -> `return jnp`

# %% matmul/7b: the first tile is left out
# triangle_kernel: `fori_loop(0, ` -> `fori_loop(1, `

# %% matmul/7b: the sum in bfloat16
# triangle_kernel:
# -        return acc + jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32)
# +        product = jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32)
# +        return acc + product.astype(o_ref.dtype)
# triangle_kernel: `(bm, bn), jnp.float32` -> `(bm, bn), o_ref.dtype`


# %% matmul/7b: a Python loop with a branch for each tile
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    last_row = (pl.program_id(1) + 1) * o_ref.shape[0] - 1
    acc = jnp.zeros(o_ref.shape, jnp.float32)
    for start in range(0, a_ref.shape[1], bk):
        a, y = a_ref[:, start : start + bk], y_ref[start : start + bk, :]
        acc = jax.lax.cond(
            start <= last_row,
            lambda acc, a, y: acc + jnp.dot(a, y, preferred_element_type=jnp.float32),
            lambda acc, a, y: acc,
            acc,
            a,
            y,
        )
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/7b: a Python loop whose length depends on the step
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    acc = jnp.zeros(o_ref.shape, jnp.float32)
    for k in range(pl.cdiv((pl.program_id(1) + 1) * o_ref.shape[0], bk)):
        part = pl.ds(k * bk, bk)
        acc += jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32)
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/7b: one slice of a length that depends on the step
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    part = pl.ds(0, (pl.program_id(1) + 1) * o_ref.shape[0])
    o_ref[...] = jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32).astype(o_ref.dtype)


# %% matmul/7b: the tiles of a loaded value are cut out
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    bm, bn = o_ref.shape
    a, y = a_ref[...], y_ref[...]

    def add_tile(k, acc):
        columns = jax.lax.dynamic_slice(a, (0, k * bk), (bm, bk))
        rows = jax.lax.dynamic_slice(y, (k * bk, 0), (bk, bn))
        return acc + jnp.dot(columns, rows, preferred_element_type=jnp.float32)

    num_tiles = pl.cdiv((pl.program_id(1) + 1) * bm, bk)
    acc = jax.lax.fori_loop(0, num_tiles, add_tile, jnp.zeros((bm, bn), jnp.float32))
    o_ref[...] = acc.astype(o_ref.dtype)


# %% matmul/7b: every product goes straight into the result
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    def add_tile(k, _):
        part = pl.ds(k * bk, bk)
        o_ref[...] += jnp.dot(a_ref[:, part], y_ref[part, :], preferred_element_type=jnp.float32).astype(o_ref.dtype)

    jax.lax.fori_loop(0, pl.cdiv((pl.program_id(1) + 1) * o_ref.shape[0], bk), add_tile, None)


# %% matmul/7b: a branch of its own for each length
def triangle_kernel(a_ref, y_ref, o_ref, *, bk):
    def first(num_tiles):
        return lambda: jnp.dot(
            a_ref[:, : num_tiles * bk], y_ref[: num_tiles * bk, :], preferred_element_type=jnp.float32
        )

    num_tiles = pl.cdiv((pl.program_id(1) + 1) * o_ref.shape[0], bk)
    lengths = range(1, a_ref.shape[1] // bk + 1)
    o_ref[...] = jax.lax.switch(num_tiles - 1, [first(n) for n in lengths]).astype(o_ref.dtype)
