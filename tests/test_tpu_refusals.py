"""Everything that a TPU refuses, each provoked by a kernel: one sentence that says what to do, and the reader's line.

The line that a kernel is refused for ends in `# refused`.
"""

import dataclasses
import importlib.metadata
import linecache
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.chips import CHIPS, chip
from pallas_puzzles.targets.tpu.explain import explain
from pallas_puzzles.text import human_bytes
from pallas_puzzles.view import tpu_report as report
from pallas_puzzles.view.tpu_report import tpu_report
from tpu_kernels import double, needs_compiler, remembered, shape

F32, BF16, F8, I8, I16, I32, U8, U32 = (
    jnp.dtype(name) for name in "float32 bfloat16 float8_e4m3fn int8 int16 int32 uint8 uint32".split()
)
V5E, V6E, EVERY = ("v5e",), ("v5e", "v6e"), tuple(CHIPS)
X, TILE, ONE = shape(32, 256), shape(8, 128), shape(1, dtype=I32)
ANY, SMEM, VMEM = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.SMEM, pltpu.VMEM))
pytestmark = remembered
LIBTPU = () if compiler.missing() else tuple(map(int, re.findall(r"\d+", importlib.metadata.version("libtpu"))))
CONSTANT = jnp.arange(128, dtype=F32)
# What nobody can read who does not build compilers
NOISE = (
    r"(?i)mlir|vector<|memref|mosaic|\bhlo|_exhausted|runtimeerror|/site-packages/|https?:|\bE\d{4}|%\w+|#tpu|arith\.|"
    r"legaliz|layout|\bvreg|\bi(1|4|8|16|32|64)\b|\bop\b|pytree|tracer"
)


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    says: tuple[str, ...]
    tpus: tuple[str, ...]
    front: bool
    until: tuple[int, ...]  # the first libtpu that takes it


CASES: dict[str, Case] = {}


def run(kernel, *, out=None, **options):
    """A function that calls a kernel. out: its results, else like the first argument."""

    def fn(*args):
        result = out or shape(*args[0].shape, dtype=args[0].dtype)
        return pl.pallas_call(kernel, out_shape=result, **options)(*args)  # refused

    return fn


def refuses(kernel, *says, args=(X,), tpus=V5E, front=False, until=(9,), name="", **options):
    """A case: these words are in the sentence, {tpu} being the chip. front: JAX refuses, and nobody asks libtpu."""
    name = name or kernel.__name__
    assert name not in CASES
    CASES[name] = Case(run(kernel, **options), tuple(args), says, tpus, front, until)


def blocks(block, index_map=lambda i: (i, 0), **options):
    """A copy by blocks in a grid of 4 steps."""
    spec = pl.BlockSpec(block, index_map)
    return {"grid": (4,), "in_specs": [spec], "out_specs": spec, **options}


def copies(rows, columns, dtype=F32):
    """From an array in HBM to a buffer of this shape, and from there to the output."""
    scratch = [pltpu.VMEM((rows, columns), dtype), pltpu.SemaphoreType.DMA(())]
    return {"grid": (2,), "in_specs": [ANY], "out": shape(rows, columns, dtype=dtype), "scratch_shapes": scratch}


def prefetched(index_map):
    """Blocks of 8 rows, chosen by a prefetched operand."""
    ins, outs = pl.BlockSpec((8, 256), index_map), pl.BlockSpec((8, 256), lambda i, s_ref: (i, 0))
    return pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[ins], out_specs=outs)


def pair(dtype, *sizes):
    return [shape(*sizes or (32, 256), dtype=dtype)] * 2


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]  # refused


# --- memory ----------------------------------------------------------------------------------------------------------


def values_over_the_limit(x_ref, o_ref):
    s = jnp.dot(x_ref[...], x_ref[...].T, preferred_element_type=F32)  # refused
    p = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    o_ref[...] = jnp.dot(p, x_ref[...], preferred_element_type=F32)


refuses(
    values_over_the_limit,
    "values_over_the_limit needs 5.",
    "MiB of VMEM and may use 4 MiB, its vmem_limit_bytes",
    "the float32 of shape (1024, 1024) that `dot_general` makes (4 MiB)",
    "compute it in pieces, use smaller blocks, or ask for more",
    "CompilerParams(vmem_limit_bytes=6 << 20)",
    args=[shape(1024, 128)],
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 << 20),
)


def rows_that_are_filled_up(x_ref, o_ref, acc_ref):  # refused
    acc_ref[0:8] = x_ref[...]
    o_ref[...] = acc_ref[0:8]


refuses(
    rows_that_are_filled_up,
    "may use 20 MiB, its vmem_limit_bytes",
    "CompilerParams(vmem_limit_bytes=33 << 20)",
    args=[shape(8, 1)],
    name="over_its_own_limit",
    grid=(2,),
    scratch_shapes=[pltpu.VMEM((1 << 16, 1), F32)],
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=20 << 20),
)
refuses(
    rows_that_are_filled_up,
    "needs more VMEM than the 128 MiB of a v5e",
    "acc_ref (128 MiB",
    args=[shape(8, 1)],
    name="all_buffers_over_the_chip",
    grid=(2,),
    scratch_shapes=[pltpu.VMEM((1 << 18, 1), F32)],
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=128 << 20),
)
refuses(
    rows_that_are_filled_up,
    "needs more VMEM than the 64 MiB of a {tpu}",
    "acc_ref (128 MiB",
    args=[shape(8, 1)],
    tpus=("tpu7x",),
    name="one_buffer_over_half_a_chip",
    grid=(2,),
    scratch_shapes=[pltpu.VMEM((1 << 18, 1), F32)],
)
refuses(
    rows_that_are_filled_up,
    "needs more VMEM than the 128 MiB of a {tpu}",
    "acc_ref (192 MiB",
    args=[shape(8, 1)],
    tpus=V6E,
    name="one_buffer_over_the_chip",
    grid=(2,),
    scratch_shapes=[pltpu.VMEM((3 << 17, 1), F32)],
)
refuses(
    rows_that_are_filled_up,
    "rows_that_are_filled_up needs",
    "the default of a {tpu}",
    "acc_ref (64 MiB, where a row of 1 takes the place of 128)",
    "put a long dimension of acc_ref last",
    args=[shape(8, 1)],
    tpus=V6E,
    grid=(2,),
    scratch_shapes=[pltpu.VMEM((1 << 17, 1), F32)],
)


def scoped_buffer(x_ref, o_ref):  # refused
    def body(acc_ref):
        acc_ref[0:8] = x_ref[...]
        o_ref[...] = acc_ref[pl.ds(pl.program_id(0) * 8, 8)]

    pl.run_scoped(body, pltpu.VMEM((60 * 256, 1024), F32))


refuses(scoped_buffer, "scoped_buffer needs 60", "acc_ref (60 MiB)", args=[shape(8, 1024)], grid=(2,))


def array_in_smem(s_ref, o_ref):  # refused
    o_ref[...] = jnp.full(o_ref.shape, s_ref[0, 0])


refuses(array_in_smem, "s_ref (1 MiB)", args=[shape(2048, 128)], name="smem_to_the_brim", out=TILE, in_specs=[SMEM])
refuses(
    array_in_smem,
    "array_in_smem keeps more than the 1 MiB of a {tpu} in SMEM, s_ref (2 MiB): keep there only the numbers",
    args=[shape(4096, 128)],
    out=TILE,
    in_specs=[SMEM],
)


def prefetched_pairs(s_ref, x_ref, o_ref):  # refused
    o_ref[...] = x_ref[...]


refuses(
    prefetched_pairs,
    "prefetched_pairs keeps more than the 1 MiB of a v5e in SMEM",
    "s_ref (2 MiB, where a row of 2 takes the place of 128): flatten s_ref to one dimension",
    args=[shape(4096, 2, dtype=I32), X],
    out=X,
    grid_spec=prefetched(lambda i, s_ref: (s_ref[i, 0], 0)),
)


# --- slices and copies -----------------------------------------------------------------------------------------------


def unaligned_rows(x_ref, o_ref):
    def step(i, carry):
        o_ref[pl.ds(i * 8, 8)] = x_ref[pl.ds(i * 3, 8)]  # refused
        return carry

    lax.fori_loop(0, 4, step, 0)


refuses(unaligned_rows, "x_ref", "a multiple of 32", args=[shape(32, 256, dtype=I8)], name="unaligned_rows_of_int8")
refuses(
    unaligned_rows,
    "x_ref is sliced along dimension 0 from a start that is not known to be a multiple of 8",
    "pl.multiple_of(start, 8)",
    "pltpu.roll(x_ref[...], 32 - start, 0)",
    tpus=EVERY,
)


def unaligned_columns(s_ref, y_ref, o_ref):
    o_ref[...] = y_ref[:, pl.ds(s_ref[0], 128)]  # refused


refuses(
    unaligned_columns,
    "y_ref is sliced along dimension 1",
    "pl.multiple_of(start, 128)",
    "pltpu.roll(y_ref[...], 256 - start, 1)",
    args=[ONE, X],
    out=shape(32, 128),
    in_specs=[SMEM, VMEM],
)


def unaligned_start(s_ref, x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(s_ref[0], 128)]  # refused


refuses(
    unaligned_start,
    "x_ref is sliced along dimension 0",
    "pltpu.roll(x_ref[...].reshape(1, 1024), 1024 - start, 1)[0]",
    args=[ONE, shape(1024)],
    out=shape(128),
    in_specs=[SMEM, VMEM],
)


def unaligned_store(x_ref, o_ref):
    column = jnp.sum(x_ref[...], axis=1, keepdims=True)
    o_ref[:, pl.ds(pl.program_id(0), 1)] = column  # refused


refuses(
    unaligned_store,
    "o_ref is sliced along dimension 1",
    "o_ref[...] = jnp.where(lax.broadcasted_iota(jnp.int32, o_ref.shape, 1) == start, value, o_ref[...])",
    grid=(2,),
)


def one_row_of_bfloat16(x_ref, s_ref, o_ref):
    o_ref[...] = jnp.broadcast_to(x_ref[s_ref[0]], o_ref.shape)  # refused


refuses(
    one_row_of_bfloat16,
    "x_ref is sliced along dimension 0",
    "multiple of 8",
    args=[shape(32, 256, dtype=BF16), ONE],
    in_specs=[VMEM, SMEM],
)


def unaligned_copy(x_hbm, o_ref, buf_ref, sem):
    copy = pltpu.make_async_copy(x_hbm.at[pl.ds(pl.program_id(0) * 3, 8)], buf_ref, sem)
    copy.start()  # refused
    copy.wait()
    o_ref[...] = buf_ref[...]


refuses(
    unaligned_copy,
    "A copy takes whole tiles of x_hbm",
    "start at a multiple of 8 along dimension 0",
    "pl.multiple_of(start, 8)",
    "an array of (32, 1, 256)",
    **copies(8, 256),
)


def copy_of_three_rows(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm.at[0:3], buf_ref, sem).wait()  # refused
    o_ref[...] = buf_ref[...]


refuses(
    copy_of_three_rows,
    "A copy takes whole tiles of x_hbm, and this one takes 3 along dimension 0: copy 8",
    args=[shape(32, 256, dtype=BF16)],
    **copies(3, 256, BF16),
)


def copy_of_some_columns(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm.at[:, 0:100], buf_ref, sem).wait()  # refused
    o_ref[...] = buf_ref[...]


refuses(
    copy_of_some_columns, "this one takes 100 along dimension 1: copy 128", args=[shape(32, 300)], **copies(32, 100)
)


def copy_of_half_a_tile(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm.at[0:8, 64:128], buf_ref, sem).wait()  # refused
    o_ref[...] = buf_ref[...]


refuses(
    copy_of_half_a_tile,
    "at multiples of 128 along the last dimension, and this one moves (8, 64)",
    tpus=EVERY,
    **copies(8, 64),
)


def pipeline_of_half_tiles(x_hbm, o_hbm):
    spec = pl.BlockSpec((8, 64), lambda i: (i, 0))
    pltpu.emit_pipeline(copy_kernel, grid=(4,), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)  # refused


refuses(pipeline_of_half_tiles, "and this one moves (8, 64)", in_specs=[ANY], out_specs=ANY)


def every_second_row(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(0, 16, stride=2)]  # refused


refuses(
    every_second_row,
    "x_ref is read with a step",
    "x_ref[...].reshape(16, 2, 256)[:, 0]",
    out=shape(16, 256),
)


def every_second_column(x_ref, o_ref):
    o_ref[...] = x_ref[:, ::2]  # refused


refuses(
    every_second_column,
    "x_ref[...].reshape(32, 128, 2)[:, :, 0]",
    args=[shape(32, 256, dtype=I8)],
    out=shape(32, 128, dtype=I8),
)


def store_every_second_row(x_ref, o_ref):
    o_ref[pl.ds(0, 16, stride=2)] = x_ref[...]  # refused


refuses(
    store_every_second_row,
    "takes 32-bit values",
    args=[shape(16, 256, dtype=BF16)],
    out=shape(32, 256, dtype=BF16),
    name="narrow_stride",
)
refuses(
    store_every_second_row, "o_ref is stored to with a step", "o_ref[2 * i] = value[i]", args=[shape(16, 256)], out=X
)


def reshape(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(256, 32)  # refused


refuses(reshape, "shape (32, 256) and type float32 cannot be reshaped to (256, 32)", out=shape(256, 32))


def repeat(x_ref, o_ref):
    o_ref[...] = jnp.repeat(x_ref[...], 2, axis=1)  # refused


refuses(repeat, "cast it to float32 first", args=[shape(64, 256, dtype=I8)], out=shape(64, 512, dtype=I8))


def take_columns(x_ref, i_ref, o_ref):
    o_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis=1)  # refused


refuses(take_columns, "jnp.take_along_axis picks from one register", "128 columns", args=[X, shape(32, 256, dtype=I32)])


def take_rows(x_ref, i_ref, o_ref):
    o_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis=0)  # refused


refuses(
    take_rows, "jnp.take_along_axis picks from one register", "8 rows", args=[shape(16, 128), shape(16, 128, dtype=I32)]
)


# --- types -----------------------------------------------------------------------------------------------------------


def add(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]  # refused


refuses(
    add,
    "`add` does not exist for float8_e4m3fn on a {tpu}",
    "jnp.float32",
    args=pair(F8),
    name="add_float8",
)
refuses(add, "`add` does not exist for uint8", args=pair(U8), name="add_uint8")
refuses(add, "`add` does not exist for int8 on a {tpu}: cast first, .astype(jnp.int32)", args=pair(I8), tpus=EVERY)


def maximum(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.maximum(x_ref[...], y_ref[...])  # refused


refuses(
    maximum,
    "`max` does not exist for uint32 on a {tpu}",
    "jnp.int32",
    "2**31",
    args=pair(U32),
    until=(0, 0, 51),
    name="max_uint32",
)
refuses(maximum, "`max` does not exist for int16 on a {tpu}", args=pair(I16), name="max_int16")
refuses(maximum, "`max` does not exist for int8", ".astype(jnp.float32)", args=pair(I8))


def maximum_through_int32(x_ref, y_ref, o_ref):
    widest = jnp.maximum(x_ref[...].astype(I32), y_ref[...].astype(I32))
    o_ref[...] = widest.astype(I8)  # refused


refuses(maximum_through_int32, "The compiler makes a `max` of int8 of this", "go through float32", args=pair(I8))


def choose_the_larger(x_ref, y_ref, o_ref):
    x, y = x_ref[...], y_ref[...]
    o_ref[...] = jnp.where(x > y, x, y)  # refused


refuses(
    choose_the_larger,
    "The compiler makes a `max` of uint32 of this",
    "go through int32",
    until=(0, 0, 51),
    args=pair(U32),
)


def divide_int8(x_ref, o_ref):
    o_ref[...] = x_ref[...] // 7  # refused


refuses(divide_int8, "does not exist for int8 on a v5e", ".astype(jnp.int32)", args=[shape(32, 256, dtype=I8)])


def sum_float8(x_ref, o_ref):
    o_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)  # refused


refuses(
    sum_float8,
    "`reduce_sum` does not exist for float8_e4m3fn",
    args=[shape(32, 256, dtype=F8)],
    out=shape(32, 1, dtype=F8),
)


def argmax(x_ref, o_ref):
    o_ref[...] = jnp.argmax(x_ref[...], axis=1)  # refused


refuses(
    argmax,
    "`argmax` does not exist for bfloat16 on a v5e",
    "float32",
    args=[shape(32, 256, dtype=BF16)],
    out=shape(32, dtype=I32),
)


def cast(x_ref, o_ref):
    o_ref[...] = x_ref[...].astype(F32)  # refused


refuses(cast, "A {tpu} cannot cast float4_e2m1fn", args=[shape(32, 256, dtype=jnp.float4_e2m1fn)], out=X, tpus=V6E)


def concatenate_bools(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.concatenate([x_ref[...], y_ref[...]])  # refused


refuses(
    concatenate_bools,
    "`concatenate` does not exist for bool",
    ".astype(jnp.int32), and compare with 0 in the end",
    args=[shape(3, 128, dtype=bool), shape(5, 128, dtype=bool)],
    out=shape(8, 128, dtype=bool),
)


def transpose_bools(x_ref, o_ref):
    o_ref[...] = jnp.transpose(x_ref[...], (1, 0, 2))  # refused


refuses(
    transpose_bools,
    "`transpose` does not exist for bool",
    args=[shape(8, 64, 256, dtype=bool)],
    out=shape(64, 8, 256, dtype=bool),
)


def select_bools(x_ref, m_ref, o_ref):
    o_ref[...] = jnp.where(x_ref[...] > 0, m_ref[...], ~m_ref[...])  # refused


refuses(
    select_bools,
    "`select_n` does not exist for bool",
    args=[X, shape(32, 256, dtype=bool)],
    out=shape(32, 256, dtype=bool),
)


def carry_bools(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = lax.fori_loop(0, 4, lambda i, c: c & (x > i), x > 0).astype(F32)  # refused


refuses(carry_bools, "does not exist for bool on a {tpu}: cast first, .astype(jnp.int32)")


def take_bfloat16(x_ref, i_ref, o_ref):
    o_ref[...] = jnp.take_along_axis(x_ref[...], i_ref[...], axis=1)  # refused


refuses(
    take_bfloat16, "`gather` does not exist for bfloat16", args=[shape(16, 128, dtype=BF16), shape(16, 128, dtype=I32)]
)


def one_number(x_ref, o_ref):
    o_ref[...] = jnp.full(o_ref.shape, x_ref[0, 3].astype(F32))  # refused


refuses(
    one_number,
    "A single bfloat16 is read from x_ref",
    "x_ref[...].astype(jnp.float32)[i, j]",
    args=[shape(32, 256, dtype=BF16)],
    out=X,
)


def power_of_a_scalar(s_ref, o_ref):
    o_ref[...] = jnp.full(o_ref.shape, s_ref[0] ** 2.5)  # refused


refuses(
    power_of_a_scalar,
    "`pow` of a single number does not exist on a {tpu}",
    args=[shape(4)],
    out=X,
    in_specs=[SMEM],
)


def dot(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=I32)  # refused


refuses(
    dot,
    "The MXU of a {tpu} does not multiply int16",
    args=pair(I16, 128, 128),
    out=shape(128, 128, dtype=I32),
    tpus=EVERY,
    name="dot_int16",
)
refuses(dot, "The MXU of a {tpu} does not multiply int32", args=pair(I32, 128, 128), tpus=EVERY)


def dot_int8(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)  # refused


refuses(
    dot_int8,
    "A product of int8 is asked for in floating point",
    "preferred_element_type=jnp.int32",
    args=pair(I8, 128, 128),
    out=shape(128, 128),
    tpus=V6E,
)


def dot_highest(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], precision="highest", preferred_element_type=F32)  # refused


refuses(
    dot_highest,
    "A product of bfloat16",
    "leave precision out",
    args=pair(BF16, 128, 128),
    out=shape(128, 128),
)


# --- JAX's front end, and tracing ------------------------------------------------------------------------------------


def copied(name, *says, args=(X,), tpus=V5E, **options):
    refuses(copy_kernel, *says, args=args, tpus=tpus, front=True, name=name, **options)


sequential = pltpu.CompilerParams(dimension_semantics=("sequential",))
fits = "x_ref has blocks of (4, 64) in an array of (32, 256)", "multiples of 8 and 128", "(8, 128) would do"
copied("block", *fits, tpus=EVERY, **blocks((4, 64)))
copied("block_of_one", "(1, 1) in an array of (4, 4)", args=[shape(4, 4)], **blocks((1, 1)))
copied("flat_block", "x_ref has blocks of (100,)", "(128,)", args=[shape(1000)], **blocks((100,), lambda i: (i,)))
copied("no_dimension", "x_ref has no dimension", args=[shape()])
copied("semantics", '"parallel" or "arbitrary"', grid=(2,), compiler_params=sequential)
copied("half", "x_ref is float16, which no TPU has: use bfloat16", args=[shape(8, 128, dtype=jnp.float16)], tpus=EVERY)
copied("nothing", "x_ref has no elements, its shape is (0, 128)", args=[shape(0, 128)])


def storing(*says, args=(X,), out=None):
    """A case: a kernel that stores what a function makes of its blocks, refused for a line of that function."""

    def register(compute):
        def kernel(*refs):
            *ins, o_ref = refs
            o_ref[...] = compute(*(ref[...] for ref in ins))

        refuses(kernel, *says, args=args, front=True, name=compute.__name__, out=out)

    return register


@storing("`sort` does not exist in a TPU kernel: sort outside")
def sort(x):
    return jnp.sort(x)  # refused


@storing("`cumsum` does not exist in a TPU kernel: multiply by a triangular matrix")
def cumsum(x):
    return jnp.cumsum(x, axis=1)  # refused


@storing("`scatter` does not exist in a TPU kernel: store into a slice")
def scatter(x):
    return x.at[0].set(0.0)  # refused


@storing("`rev` does not exist in a TPU kernel: reverse outside")
def flip(x):
    return jnp.flip(x, 0)  # refused


@storing("`dynamic_slice` does not exist in a TPU kernel: slice the ref")
def row_of_a_value(x):
    return lax.fori_loop(0, 32, lambda i, c: c + x[i], x)  # refused


@storing("a TPU kernel cannot gather")
def searchsorted(x):
    found = jnp.searchsorted(x[0], x[1])  # refused
    return jnp.broadcast_to(found[None], (32, 256)).astype(F32)


@storing("split the dimension, `x.reshape(rows // 2, 2, columns)[:, 0]`")
def value_with_a_step(x):
    return jnp.repeat(x[::2], 2, 0)  # refused


@storing("use lax.fori_loop, and load and store each step")
def scan(x):
    return lax.map(lambda row: row * 2, x)  # refused


@storing("A TPU counts in integers")
def linspace(x):
    return x + jnp.linspace(0, 1, 256)  # refused


@storing("complex64 here, which no TPU has")
def imaginary(x):
    return (x * 1j).real  # refused


@storing("A value of shape (0, 256) is made here", "no values without elements")
def associative_scan(x):
    return lax.associative_scan(jnp.add, x, axis=0)  # refused


@storing("A TPU kernel cannot do `max` on bool", args=pair(bool))
def larger_bool(x, y):
    return jnp.maximum(x, y)  # refused


@storing("A single bfloat16 is taken out of an array", ".astype(jnp.float32)", args=[shape(32, 256, dtype=BF16)])
def largest_bfloat16(x):
    return jnp.full((32, 256), jnp.max(x))  # refused


@storing("these are two vectors: write jnp.sum(x * y)", args=pair(F32, 128), out=shape(1))
def dot_of_vectors(x, y):
    return jnp.dot(x, y)[None]  # refused


@storing("preferred_element_type=jnp.float32", args=pair(BF16, 128, 128))
def narrow_dot(x, y):
    return jnp.dot(x, y)  # refused


def gather(x_ref, i_ref, o_ref):
    o_ref[...] = x_ref[i_ref[...]]  # refused


def captures(x_ref, o_ref):  # refused
    o_ref[...] = x_ref[...] + CONSTANT


def scalar_store(x_ref, o_ref):
    o_ref[0, 0] = jnp.sum(x_ref[...])  # refused


def load_from_hbm(x_hbm, o_ref):
    o_ref[...] = x_hbm[...]  # refused


def load_a_row_of_smem(x_ref, o_ref):
    o_ref[0] = x_ref[0]  # refused


def ref_as_array(x_ref, o_ref):
    o_ref[...] = x_ref + 1  # refused


def ref_as_operand(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref, y_ref)  # refused


def python_if(x_ref, o_ref):
    if pl.program_id(0) == 0:  # refused
        o_ref[...] = x_ref[...]


def copy_of_another_shape(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm.at[0:16], buf_ref, sem).wait()  # refused
    o_ref[...] = buf_ref[...]


def copy_of_another_type(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm, buf_ref, sem).wait()  # refused
    o_ref[...] = buf_ref[...]


def barrier(x_ref, o_ref):
    arrived = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(arrived, 1)
    pl.semaphore_wait(arrived, 1)
    o_ref[...] = x_ref[...]


def kernel_in_a_kernel(x_ref, o_ref):
    o_ref[...] = pl.pallas_call(copy_kernel, out_shape=X)(x_ref[...])  # refused


def table_in_an_index_map(i):
    return jnp.arange(4)[i], 0  # refused


shapes = "the same shape on both sides, and these are (16, 256) and (8, 256)"
one_row = "a TPU kernel cannot gather: take one row at a time"
refuses(gather, one_row, args=[X, shape(32, dtype=I32)], front=True, tpus=EVERY)
refuses(captures, "array from outside: pass it as an input", args=[TILE], front=True)
refuses(scalar_store, "A single number is stored to VMEM", "compute the whole block at once", front=True)
refuses(load_from_hbm, "x_hbm stays in HBM", "pltpu.make_async_copy", front=True, in_specs=[ANY])
refuses(load_a_row_of_smem, "SMEM holds single numbers", front=True, in_specs=[SMEM])
refuses(ref_as_array, "read it first, x_ref[...]", front=True)
refuses(ref_as_operand, "read it first, x_ref[...]", args=[X, X], front=True)
refuses(python_if, "@pl.when(condition) for a block of code", front=True, grid=(2,))
refuses(copy_of_another_shape, shapes, front=True, **copies(8, 256))
refuses(copy_of_another_type, "the same type on both sides", "cast in VMEM", front=True, **copies(32, 256, BF16))
refuses(barrier, "CompilerParams(collective_id=0)", front=True)
refuses(kernel_in_a_kernel, "call its body with refs, or run pltpu.emit_pipeline", front=True)
of_a_map = "`dynamic_slice` does not exist in an index map", "table_ref[i]"
copied("table_in_an_index_map", *of_a_map, **blocks((8, 256), table_in_an_index_map))


# --- the tests -------------------------------------------------------------------------------------------------------

ON = [(name, tpu) for name, case in CASES.items() for tpu in case.tpus]


def refusal_of(fn, *args, tpu="v5e"):
    found = tpu_report(fn, *args, tpu=tpu, simulate=False)
    assert not found
    assert found.refusal is not None, found.unavailable
    return found.refusal


def readable(refusal):
    assert re.fullmatch(r"[^\n!]{20,420}\.", refusal.sentence)
    assert not re.search(NOISE, refusal.sentence), refusal.sentence
    assert not re.search(r"Mosaic failed|_EXHAUSTED|/site-packages/|https?:|\n", refusal.detail)


@pytest.mark.parametrize(
    ("name", "tpu"), [pytest.param(n, t, marks=() if CASES[n].front else (needs_compiler,)) for n, t in ON]
)
def test_refused(name, tpu, monkeypatch):
    case, texts = CASES[name], []
    if case.until <= LIBTPU:
        pytest.skip(f"libtpu {LIBTPU} takes it")
    monkeypatch.setattr(report, "explain", lambda text, *rest: texts.append(text) or explain(text, *rest))
    refusal = refusal_of(case.fn, *case.args, tpu=tpu)
    assert bool(texts) != case.front
    for words in case.says:
        assert words.replace("{tpu}", chip(tpu).title) in refusal.sentence
    readable(refusal)
    assert refusal.line.file == __file__
    assert refusal.line.text.endswith("# refused")


@needs_compiler
@pytest.mark.parametrize(
    ("name", "tpu"), [("argmax", "v6e"), ("argmax", "tpu7x"), ("cast", "tpu7x"), ("dot_int8", "tpu7x")]
)
def test_what_another_chip_takes(name, tpu):
    case = CASES[name]
    assert tpu not in case.tpus
    assert tpu_report(case.fn, *case.args, tpu=tpu, simulate=False)


def test_64_bit_types():
    with jax.enable_x64(True):
        refusal = refusal_of(double, shape(32, 256))
    assert "64-bit types are switched on (jax_enable_x64)" in refusal.sentence


# --- what the sentences advise compiles ------------------------------------------------------------------------------

ADVICE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def advised(*args, out=None, **options):
    """A kernel that does what a sentence says."""

    def register(kernel):
        ADVICE[kernel.__name__] = run(kernel, out=out, **options), args or (X,)

    return register


def instead(name, compute, *args):
    """A kernel that stores what a function makes of its blocks."""
    args = args or (X,)

    def kernel(*refs):
        *ins, o_ref = refs
        o_ref[...] = compute(*(ref[...] for ref in ins))

    advised(*args, out=jax.eval_shape(compute, *args))(kernel)
    ADVICE[name] = ADVICE.pop("kernel")


def wider(name, compute, wide, *args):
    """Cast first, compute, and cast back."""
    instead(name, lambda *xs: compute(*(x.astype(wide) for x in xs)).astype(args[0].dtype), *args)


B, BF, I = (shape(32, 256, dtype=dtype) for dtype in (I8, BF16, I32))
wider("int8 + int8", jnp.add, I32, B, B)
wider("int8 // int8", jnp.floor_divide, I32, B, B)
wider("max of int8", jnp.maximum, F32, B, B)
wider("max of int16", jnp.maximum, F32, *pair(I16))
wider("max of uint32", jnp.maximum, I32, *pair(U32))
wider("float8 + float8", jnp.add, F32, *pair(F8))
wider("sum of float8", lambda x: jnp.sum(x, axis=1, keepdims=True), F32, shape(32, 256, dtype=F8))
wider("repeat int8", lambda x: jnp.repeat(x, 2, axis=1), F32, shape(8, 128, dtype=I8))
instead("argmax of bfloat16", lambda x: jnp.argmax(x.astype(F32), axis=1), BF)
instead(
    "take bfloat16",
    lambda x, i: jnp.take_along_axis(x.astype(F32), i, axis=1),
    shape(8, 128, dtype=BF16),
    shape(8, 128, dtype=I32),
)
instead("concatenate bools", lambda x, y: jnp.concatenate([x.astype(I32), y.astype(I32)]) > 0, *pair(bool, 3, 128))
instead("transpose bools", lambda x: jnp.transpose(x.astype(I32), (1, 0, 2)) > 0, shape(8, 16, 128, dtype=bool))
instead(
    "select bools", lambda x, m: jnp.where(x > 0, m.astype(I32), 1 - m.astype(I32)) > 0, X, shape(32, 256, dtype=bool)
)
instead("dot of int32", lambda x, y: jnp.dot(x.astype(F32), y.astype(F32)), *pair(I32, 128, 128))
instead("dot of int8", lambda x, y: jnp.dot(x, y, preferred_element_type=I32).astype(F32), *pair(I8, 128, 128))
instead("dot, highest", lambda x, y: jnp.dot(x.astype(F32), y.astype(F32), precision="highest"), *pair(BF16, 128, 128))
instead("product of vectors", lambda x, y: jnp.sum(x * y, keepdims=True), *pair(F32, 128))
instead("rows with a step", lambda x: x.reshape(16, 2, 256)[:, 0])
instead("columns of int8 with a step", lambda x: x.reshape(32, 128, 2)[:, :, 0], B)
instead("slices of 128 columns", lambda x, i: jnp.take_along_axis(x[:, :128], i[:, :128], axis=1), X, I)
instead("largest bfloat16", lambda x: jnp.full((32, 256), jnp.max(x.astype(F32))), BF)


@advised(shape(32, 128), out=shape(16, 128))
def ref_of_128_with_a_step(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(0, 16, stride=2)]


@advised(shape(16, 256, dtype=BF16), out=BF)
def store_row_by_row(x_ref, o_ref):
    value = x_ref[...]
    for i in range(16):
        o_ref[2 * i] = value[i]


@advised(ONE, X, B, out=shape(8, 256), in_specs=[SMEM, VMEM, VMEM])
def aligned(s_ref, x_ref, y_ref, o_ref):
    rows, more = pl.multiple_of(s_ref[0], 8), pl.multiple_of(s_ref[0], 32)
    o_ref[...] = x_ref[pl.ds(rows, 8)] + y_ref[pl.ds(more, 8)].astype(F32)


@advised(ONE, X, BF, B, shape(1024), out=[shape(8, 256), shape(32, 128), shape(128)], in_specs=[SMEM, *[VMEM] * 4])
def turned(s_ref, x_ref, y_ref, z_ref, flat_ref, rows_ref, columns_ref, o_ref):
    start = s_ref[0]
    rows = [pltpu.roll(ref[...], 32 - start, 0)[:8].astype(F32) for ref in (x_ref, y_ref, z_ref)]
    rows_ref[...] = sum(rows)
    columns_ref[...] = pltpu.roll(x_ref[...], 256 - start, 1)[:, :128]
    o_ref[...] = pltpu.roll(flat_ref[...].reshape(1, 1024), 1024 - start, 1)[0, :128]


@advised(X, BF, B, out=[X, BF, B], grid=(2,))
def chosen(x_ref, y_ref, z_ref, *outs):
    for ref, o_ref in zip((x_ref, y_ref, z_ref), outs, strict=True):
        here = lax.broadcasted_iota(I32, o_ref.shape, 1) == pl.program_id(0)
        o_ref[...] = jnp.where(here, ref[...], o_ref[...])


@advised(X, **copies(8, 256))
def aligned_copy(x_hbm, o_ref, buf_ref, sem):
    start = pl.multiple_of(pl.program_id(0) * 8, 8)
    pltpu.async_copy(x_hbm.at[pl.ds(start, 8)], buf_ref, sem).wait()
    o_ref[...] = buf_ref[...]


@advised(shape(32, 1, 256, dtype=BF16), **copies(1, 256, BF16))
def row_in_its_own_tile(x_hbm, o_ref, buf_ref, sem):
    pltpu.async_copy(x_hbm.at[pl.program_id(0) * 3], buf_ref, sem).wait()
    o_ref[...] = buf_ref[...]


@advised(X, grid=(2,), compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)))
def parallel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


@advised(X, compiler_params=pltpu.CompilerParams(collective_id=0))
def numbered_barrier(x_ref, o_ref):
    barrier(x_ref, o_ref)


@advised(shape(4), BF, out=X, in_specs=[SMEM, VMEM])
def numbers(s_ref, x_ref, o_ref):
    o_ref[...] = jnp.full(o_ref.shape, s_ref[0]) ** 2.5 + x_ref[...].astype(F32)[0, 3]


@advised(shape(8192, dtype=I32), X, out=X, grid_spec=prefetched(lambda i, s_ref: (s_ref[2 * i], 0)))
def flat_pairs(s_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...]


@needs_compiler
@pytest.mark.parametrize("tpu", ["v5e", "tpu7x"])  # v6e took two seconds more, and all of it, too
def test_the_advice_compiles(tpu):
    """All in one program, which is one request to the compiler."""

    def program():
        return [fn(*(jnp.zeros(arg.shape, arg.dtype) for arg in args)) for fn, args in ADVICE.values()]

    found = tpu_report(program, tpu=tpu, simulate=False)
    assert found, f"{found.refusal or found.unavailable}"


@needs_compiler
@pytest.mark.parametrize("name", ["values_over_the_limit", "over_its_own_limit", "scoped_buffer"])
def test_the_limit_that_is_advised_suffices(name, monkeypatch):
    case = CASES[name]
    advice = re.search(r"vmem_limit_bytes=(\d+) << 20", refusal_of(case.fn, *case.args).sentence)
    real = pl.pallas_call
    params = pltpu.CompilerParams(vmem_limit_bytes=int(advice[1]) << 20)
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **kw: real(*a, **kw | {"compiler_params": params}))
    assert tpu_report(case.fn, *case.args, simulate=False)


# --- blocks that cannot fit: the compiler would take a minute to say so ----------------------------------------------


def copy_by(rows, columns, **options):
    spec = pl.BlockSpec((rows, columns), lambda i: (i, 0))
    return run(copy_kernel, grid=(2,), in_specs=[spec], out_specs=spec, **options), shape(2 * rows, columns)


@pytest.mark.parametrize("tpu", EVERY)
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (None, "needs 512 MiB of VMEM and may use {default}, the default of a {tpu}"),
        (8 << 20, "needs 512 MiB of VMEM and may use 8 MiB, its vmem_limit_bytes"),
        (512 << 20, "needs more VMEM than the {all} of a {tpu}"),
    ],
)
def test_by_arithmetic(asked, says, tpu, monkeypatch):
    def compile_program(*args, **options):
        raise AssertionError("the compiler was asked")

    monkeypatch.setattr(compiler, "compile_program", compile_program)
    monkeypatch.setattr(compiler, "missing", lambda: None)
    monkeypatch.setattr(compiler, "warm", lambda **options: None)
    params = pltpu.CompilerParams(vmem_limit_bytes=asked)
    refusal = refusal_of(*copy_by(16384, 2048, compiler_params=params), tpu=tpu)
    target = chip(tpu)
    default, most = human_bytes(target.scoped_vmem_bytes), human_bytes(target.vmem_bytes)
    told = says.format(tpu=target.title, default=default, all=most)
    assert refusal.sentence.startswith(f"copy_kernel {told}; the largest in it are x_ref (2 x 128 MiB), o_ref (2 x ")
    assert refusal.sentence.endswith(": use smaller blocks.")
    readable(refusal)
    assert refusal.line.text == "def copy_kernel(x_ref, o_ref):"


@needs_compiler
@pytest.mark.parametrize("tpu", EVERY)
def test_the_single_buffers_of_a_single_step_are_not_counted_twice(tpu):
    fits = chip(tpu).scoped_vmem_bytes // 2 // (1024 * 4) - 64  # rows of two arrays that fit once, and not twice
    spec = pl.BlockSpec((fits, 1024), lambda i: (i, 0))
    single = run(copy_kernel, grid=(1,), in_specs=[spec], out_specs=spec)
    assert tpu_report(single, shape(fits, 1024), tpu=tpu, simulate=False)


@needs_compiler
def test_nothing_in_vmem_is_no_buffer():
    def count_kernel(n_ref, o_ref):
        o_ref[0] = n_ref[0] + 1

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    counting = pl.pallas_call(count_kernel, out_shape=jax.ShapeDtypeStruct((4,), I32), in_specs=[smem], out_specs=smem)
    (kernel,) = tpu_report(counting, shape(4, dtype=I32), simulate=False).kernels
    assert kernel.buffers == {}


@needs_compiler
def test_an_abort_that_is_the_kernels_doing_is_a_refusal():
    def mask_kernel(x_ref, o_ref):
        mask = (x_ref[...] > 0).reshape(64, 2, 128)
        o_ref[...] = mask.astype(F32).sum(axis=1)

    masked = pl.pallas_call(mask_kernel, out_shape=jax.ShapeDtypeStruct((64, 128), F32))
    refusal = refusal_of(masked, shape(64, 256))
    assert "Booleans change their shape in mask_kernel" in refusal.sentence
    assert ".astype(jnp.int32)" in refusal.sentence
    assert tpu_report(*copy_by(8, 128), simulate=False), "the next report works"


@needs_compiler
def test_what_just_fits_is_compiled():
    fn, x = copy_by(1000, 1024)
    assert tpu_report(fn, x, simulate=False)
    assert "the default of a v5e" in refusal_of(*copy_by(1032, 1024)).sentence


# --- whose fault, and where ------------------------------------------------------------------------------------------


def narrow_kernel(x_ref, o_ref, acc_ref):
    acc_ref[0:8] = x_ref[0:8, 0:1]
    o_ref[...] = x_ref[...] + acc_ref[0:1]


def fold_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(256, 32)


def chain(rows, *, fold):
    """Four kernels, one after the other. rows: of the third's scratch."""

    def fn(x):
        x = pl.pallas_call(copy_kernel, out_shape=X)(x)
        for held in (16, rows):
            x = pl.pallas_call(narrow_kernel, grid=(2,), out_shape=X, scratch_shapes=[pltpu.VMEM((held, 1), F32)])(x)
        return pl.pallas_call(fold_kernel, out_shape=shape(256, 32), name="the last one")(x) if fold else x

    return fn


@needs_compiler
def test_the_kernel_at_fault_among_several():
    memory = refusal_of(chain(1 << 17, fold=False), X)
    assert memory.sentence.startswith("narrow_kernel needs")
    assert "acc_ref (64 MiB" in memory.sentence
    assert memory.line.text == "def narrow_kernel(x_ref, o_ref, acc_ref):"
    assert refusal_of(chain(16, fold=True), X).line.text == "o_ref[...] = x_ref[...].reshape(256, 32)"


CELL = """
def twice(block):
    äé = "ä"; return block.astype("int8") + block.astype("int8")

def cell_kernel(x_ref, o_ref):
    o_ref[...] = twice(x_ref[...]).astype("float32")
"""


@needs_compiler
@pytest.mark.parametrize("file", ["/tmp/ipykernel_77/1.py", "<ipython-input-3-0a1b>", "/home/me/my (new) kernels/k.py"])
def test_the_line_in_a_cell_or_in_any_folder(file):
    """The reader's innermost line: where a helper of theirs goes wrong, the helper's."""
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    names = {}
    exec(compile(CELL, file, "exec"), names)
    refusal = refusal_of(run(names["cell_kernel"]), X)
    assert (refusal.line.file, refusal.line.line) == (file, 3)
    assert refusal.line.text == 'äé = "ä"; return block.astype("int8") + block.astype("int8")'
    assert refusal.sentence.startswith("`add` does not exist for int8")


@needs_compiler
def test_columns_count_bytes():
    """The name of the Ref is taken from the expression at fault, which may stand behind letters of two bytes."""

    def kernel(s_ref, x_ref, o_ref):
        größe = s_ref[0]; o_ref[...] = x_ref[pl.ds(größe, 8)]  # fmt: skip # noqa: E702

    fn = run(kernel, out=shape(8, 256), in_specs=[SMEM, VMEM])
    assert refusal_of(fn, ONE, X).sentence.startswith("x_ref is sliced along dimension 0")


# --- texts that no kernel here provokes ------------------------------------------------------------------------------

UNKNOWN = """JaxRuntimeError: INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `kernel` HLO name \
`fn.1`: Not implemented: Rotation of vector<8x128xbf16> by 'tpu.something'

at location: loc("roll:"("roll/roll"(callsite("k"("/usr/lib/python3.12/nothing.py":3:4 to :9) at "k"("x.py":9:1)))))

The MLIR operation involved:
  %7 = "tpu.rotate"(%1) : (vector<8x128xf32>) -> vector<8x128xf32>

Please report a bug at: https://github.com/jax-ml/jax/issues/new/choose
"""


def test_a_message_that_nobody_foresaw():
    refusal = explain(UNKNOWN, [], chip("v5e"))
    assert refusal.sentence.startswith("The TPU compiler cannot do `roll` like this (Rotation of (8, 128) bfloat16 by")
    readable(refusal)


@pytest.mark.parametrize(
    "text", ["", "\n", "ValueError: no", "Used 1G of 1M vmem", "Scoped allocation with size 1M and limit 1M"]
)
def test_any_text_is_explained(text):
    assert explain(text, [], chip("v5e")).sentence.endswith(".")
