"""Kernels of today: run-time sizes, bitcasts, Refs from outside, small types, copies counted as the hardware does."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.course.check import check_call
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.targets.simulate import SimulatorUnable, simulate
from zoo import BF16, F32, HBM, I8, I32, SMEM, integers, like, normal, tiles

DMA, ROWS = pltpu.SemaphoreType.DMA, jax.ShapeDtypeStruct((16, 128), F32)


def kinds(run: Any) -> set[str]:
    return {i.kind for t in run.traces for i in t.incidents}


def assert_runs(fn: Any, args: tuple[Any, ...], want: Any, *, simulator: bool = True) -> Any:
    """The lens gives what is wanted and sees nothing wrong, and JAX's simulator gives the same."""
    run = lens.trace(fn, *args)
    assert run.traces, "no kernel was followed"
    assert kinds(run) == set()
    np.testing.assert_array_equal(np.asarray(run.outputs), want)
    if simulator:
        np.testing.assert_array_equal(np.asarray(simulate(fn, *args)), want)
    return run


# --- slices whose size is known at run time --------------------------------------------------------------------------


def first_rows(n: Any, x: Any, *, start: int = 0) -> Any:
    """Zeros, with n rows of x."""

    def kernel(n_ref, x_ref, o_ref, sem):
        o_ref[...] = jnp.zeros_like(o_ref)
        some = pl.ds(start, n_ref[0])
        pltpu.async_copy(x_ref.at[some], o_ref.at[some], sem).wait()

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[SMEM, HBM], scratch_shapes=[DMA])(n, x)


@pytest.mark.parametrize("n", [16, 8, 0])
def test_a_copy_has_a_size_that_a_value_says(n: int) -> None:
    x = normal(16, 128)
    run = assert_runs(first_rows, (np.array([n], np.int32), x), np.where(np.arange(16)[:, None] < n, x, 0))
    assert lens.figures(run.traces[0]).dma_bytes == n * 128 * 4


def test_a_copy_of_a_run_time_size_out_of_bounds_is_seen() -> None:
    run = lens.trace(partial(first_rows, start=8), np.array([16], np.int32), normal(16, 128))
    assert "ref-bounds" in kinds(run)


def group_sums(starts: Any, sizes: Any, x: Any) -> Any:
    """The sum of the rows of each group: a pipeline whose blocks begin anywhere, and are as long as a value says."""

    def kernel(starts_ref, sizes_ref, x_hbm, o_hbm):
        def body(x_ref, o_ref):
            here = lax.broadcasted_iota(I32, x_ref.shape, 0) < sizes_ref[pl.program_id(0)]
            o_ref[...] = jnp.broadcast_to(jnp.where(here, x_ref[...], 0).sum(0), o_ref.shape)

        def window(g):
            return pl.ds(pl.multiple_of(starts_ref[g], 8), sizes_ref[g]), 0

        pltpu.emit_pipeline(
            body,
            grid=(sizes.size,),
            in_specs=[pl.BlockSpec((pl.BoundedSlice(16), 128), window)],
            out_specs=[pl.BlockSpec((8, 128), lambda g: (g, 0))],
        )(x_hbm, o_hbm)

    shape = jax.ShapeDtypeStruct((8 * sizes.size, 128), F32)
    return pl.pallas_call(kernel, out_shape=shape, in_specs=[SMEM, SMEM, HBM], out_specs=HBM)(starts, sizes, x)


def test_bounded_slices_are_as_long_as_their_values_say() -> None:
    x = integers(-9, 9, 48, 128).astype(np.float32)
    starts, sizes = np.array([0, 16, 40], np.int32), np.array([16, 3, 8], np.int32)
    sums = [x[a : a + n].sum(0) for a, n in zip(starts, sizes, strict=True)]
    run = lens.trace(group_sums, starts, sizes, x)
    assert kinds(run) <= {"padding", "unwritten", "carry"}  # what lies behind a block is read, and left out
    np.testing.assert_array_equal(run.outputs, np.repeat(sums, 8, 0))
    assert check_call(group_sums, (starts, sizes, x), np.repeat(sums, 8, 0), confirm=False)


def ragged_double(x: Any) -> Any:
    """An inner pipeline over blocks of which the last one hangs over the edge of the array."""

    def kernel(x_hbm, o_hbm):
        def body(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        spec = pl.BlockSpec((16, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(pl.cdiv(x.shape[0], 16),), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], out_specs=HBM)(x)


@pytest.mark.parametrize("m", [40, 44])
def test_the_last_block_of_an_inner_pipeline_may_end_in_the_padding_of_a_tile(m: int) -> None:
    x = normal(m, 128)
    run = lens.trace(ragged_double, x)
    assert "ref-bounds" not in kinds(run)
    np.testing.assert_array_equal(run.outputs, 2 * x)
    assert check_call(ragged_double, (x,), 2 * x, confirm=False)


# --- Refs seen as another type ---------------------------------------------------------------------------------------


def upper_halves(x: Any) -> Any:
    """The odd rows of what 32-bit words hold as bfloat16: their upper halves."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.bitcast(jnp.bfloat16)[pl.ds(1, 8, 2), :].astype(F32)

    return pl.pallas_call(kernel, out_shape=like(x, None, F32))(x)


def test_a_ref_is_read_as_a_narrower_type() -> None:
    x = normal(8, 128)
    words = x.view(np.int32)
    want = (words & -65536).view(np.float32)
    run = lens.trace(upper_halves, words)
    np.testing.assert_array_equal(run.outputs, want)
    assert kinds(run) == set()


def interleave(a: Any, b: Any) -> Any:
    """Rows of a and of b in turn, stored as pairs in 32-bit words."""

    def kernel(a_ref, b_ref, o_ref):
        bits = [ref.bitcast(jnp.uint16)[...].astype(jnp.uint32) for ref in (a_ref, b_ref)]
        o_ref.bitcast(jnp.uint32)[...] = bits[0] | (bits[1] << 16)

    return pl.pallas_call(kernel, out_shape=like(a, (16, 128)))(a, b)


def test_a_ref_is_stored_into_as_a_wider_type() -> None:
    a, b = normal(8, 128, dtype=BF16), normal(8, 128, dtype=BF16)
    assert_runs(interleave, (a, b), np.stack([a, b], 1).reshape(16, 128), simulator=False)


def packed_scratch(x: Any) -> Any:
    """A copy into one half of a buffer that is allocated as 32-bit words."""

    def kernel(x_hbm, o_ref, buf, sem):
        as_bytes = buf.at[1].bitcast(jnp.int8)
        pltpu.async_copy(x_hbm, as_bytes.at[pl.ds(32, 32)], sem).wait()
        o_ref[...] = as_bytes[32:64]

    scratch = [pltpu.VMEM((2, 16, 128), jnp.int32), DMA]
    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], scratch_shapes=scratch)(x)


def test_a_copy_goes_into_a_slice_of_a_cast_of_a_slice() -> None:
    x = integers(-128, 128, 32, 128, dtype=I8)
    assert_runs(packed_scratch, (x,), x, simulator=False)


@pytest.mark.parametrize("before", [np.int32, BF16, np.int8, jnp.int4, jnp.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("after", [np.uint32, np.int16, np.uint8, jnp.uint4, jnp.float8_e5m2], ids=str)
def test_bits_are_those_of_jax(before: Any, after: Any) -> None:
    from pallas_puzzles.ir.ops import bitcast

    x = np.random.default_rng(0).integers(-8, 8, (16, 128)).astype(before)
    want = jax.jit(lambda x: _bits_by_jax(x, after))(x)
    got = bitcast(x, after)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want).astype(np.float64))


def _bits_by_jax(x: Any, after: Any) -> Any:
    """What pltpu.bitcast means: neighbours along the second minor dimension share a word."""
    there, back = (jnp.iinfo(t).bits if jnp.issubdtype(t, jnp.integer) else jnp.finfo(t).bits for t in (x.dtype, after))
    x = x.swapaxes(-1, -2)
    if there < back:
        x = x.reshape(*x.shape[:-1], -1, back // there)
    x = lax.bitcast_convert_type(x, after)
    return (x.reshape(*x.shape[:-2], -1) if there > back else x).swapaxes(-1, -2)


# --- Refs from outside, kernels over a mesh --------------------------------------------------------------------------


def mesh_of_one() -> Any:
    return pltpu.TensorCoreMesh(axis_name="core", num_cores=1)


def add_one_in_place(x: Any) -> Any:
    """jax.new_ref outside, pl.core_map over the cores of a TPU."""
    x_ref, y_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

    @pl.core_map(mesh_of_one())
    def _():
        @lambda body: pl.run_scoped(body, pltpu.VMEM(x.shape, x.dtype), DMA)
        def _(buf, sem):
            pltpu.async_copy(x_ref, buf, sem).wait()
            buf[...] += 1
            pltpu.async_copy(buf, y_ref, sem).wait()

    return y_ref[...]


@pytest.mark.filterwarnings("ignore:.*core_map.*:DeprecationWarning")
def test_refs_from_outside_reach_a_core_map() -> None:
    x = normal(16, 128)
    run = lens.trace(add_one_in_place, x)
    assert len(run.traces) == 1
    assert kinds(run) == set()
    np.testing.assert_array_equal(run.outputs, x + 1)
    assert run.from_kernel == [True]


def scaled(factor: Any, x: Any) -> Any:
    """pl.kernel, with an operand in SMEM."""

    def body(factor_ref, x_ref, o_ref, buf, sem):
        pltpu.async_copy(x_ref, buf, sem).wait()
        buf[...] *= factor_ref[0]
        pltpu.async_copy(buf, o_ref, sem).wait()

    scratch = [pltpu.VMEM(x.shape, x.dtype), DMA]
    factor = pltpu.with_memory_space_constraint(factor, pltpu.SMEM)
    return pl.kernel(body, out_type=like(x), mesh=mesh_of_one(), scratch_types=scratch)(factor, x)


def test_a_scalar_operand_of_a_kernel_on_a_mesh_is_not_in_hbm() -> None:
    x = normal(16, 128)
    assert_runs(scaled, (np.array([3], np.float32), x), 3 * x, simulator=False)


# --- types of few bits -----------------------------------------------------------------------------------------------

FP8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


def product(x: Any, y: Any, *, dtype: Any = None) -> Any:
    def kernel(x_ref, y_ref, o_ref):
        acc = I32 if x.dtype == jnp.int4 else F32
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=acc).astype(o_ref.dtype)

    row, column = pl.BlockSpec((32, 256), lambda i, j: (i, 0)), pl.BlockSpec((256, 128), lambda i, j: (0, j))
    shape = like(x, (x.shape[0], y.shape[1]), dtype or F32)
    specs = {"in_specs": [row, column], "out_specs": tiles(32, 128)}
    return pl.pallas_call(kernel, grid=(2, 2), out_shape=shape, **specs)(x, y)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_products_of_8_bit_floats(dtype: Any) -> None:
    x, y = (integers(-4, 5, *shape).astype(dtype) for shape in ((64, 256), (256, 256)))
    want = x.astype(np.float32) @ y.astype(np.float32)
    run = assert_runs(product, (x, y), want)
    assert run.traces[0].call.operands[0].block_bytes == 32 * 256


def test_products_of_4_bit_integers() -> None:
    x, y = (integers(-8, 8, *shape).astype(jnp.int4) for shape in ((64, 256), (256, 256)))
    want = x.astype(np.int32) @ y.astype(np.int32)
    run = assert_runs(partial(product, dtype=I32), (x, y), want, simulator=False)
    assert run.traces[0].call.operands[0].block_bytes == 32 * 256 // 2


def test_what_only_the_lens_can_run_is_not_confirmed() -> None:
    x, y = (integers(-8, 8, *shape).astype(jnp.int4) for shape in ((64, 256), (256, 256)))
    want = x.astype(np.int32) @ y.astype(np.int32)
    with pytest.raises(SimulatorUnable):
        simulate(partial(product, dtype=I32), x, y)
    verdict = check_call(partial(product, dtype=I32), (x, y), want)
    assert (verdict.status, verdict.headline) == ("unjudged", "Right, but not confirmed.")
    assert "confirm=False" in str(verdict)
    assert check_call(partial(product, dtype=I32), (x, y), want, confirm=False)
    assert check_call(partial(product, dtype=I32), (x, y), 2 * want).status == "failed"


NARROW = [*FP8, jnp.int4, jnp.uint4]
NARROW_FUNCTIONS = {
    "add": lambda x: x + x,
    "product": lambda x: x * x,
    "larger": lambda x: jnp.maximum(x, x[::-1]),
    "to_float32": lambda x: x.astype(F32),
    "to_int8": lambda x: x.astype(I8),
    "where": lambda x: jnp.where(x > 0, x, x[::-1]),
    "sum": lambda x: jnp.sum(x, dtype=F32),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_arithmetic_of_few_bits_is_that_of_jax(dtype: Any) -> None:
    x = np.arange(-8, 8).astype(np.int8).astype(dtype)
    by_jax = jax.jit(lambda x: {name: fn(x) for name, fn in NARROW_FUNCTIONS.items()})(x)
    for name, fn in NARROW_FUNCTIONS.items():
        got, want = np.asarray(lens.trace(fn, x).outputs), np.asarray(by_jax[name])
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=name)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_to_few_bits_are_those_of_jax(dtype: Any) -> None:
    x = np.array([0, -0.4, 0.5, 1.5, 7, 8, 15, 16, -8, -9, 100, 300, 1e6, -1e6], np.float32)
    got, want = np.asarray(lens.trace(lambda x: x.astype(dtype), x).outputs), jax.jit(lambda x: x.astype(dtype))(x)
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want).astype(np.float64))


def rounded(x: Any, *, dtype: Any, factor: float = 1.0) -> Any:
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...] * factor).astype(o_ref.dtype)

    return pl.pallas_call(kernel, out_shape=like(x, None, dtype))(x)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_an_8_bit_result_may_be_one_unit_off_and_not_two(dtype: Any) -> None:
    x = np.random.default_rng(1).uniform(1, 400, (32, 128)).astype(np.float32)
    want = x.astype(dtype)
    eps = float(jnp.finfo(dtype).eps)
    assert check_call(partial(rounded, dtype=dtype), (x,), want, confirm=False)
    assert check_call(partial(rounded, dtype=dtype, factor=1 + eps / 2), (x,), want, confirm=False)
    verdict = check_call(partial(rounded, dtype=dtype, factor=1 + 3 * eps), (x,), want, confirm=False)
    assert verdict.status == "failed"
    assert "16-bit" not in str(verdict)


# --- copies and semaphores, as the hardware counts -------------------------------------------------------------------


def two_sizes(x: Any, y: Any) -> Any:
    """Two copies of different sizes on one semaphore, waited for in the other order."""

    def kernel(x_hbm, y_hbm, o_ref, buf, sem):
        small = pltpu.make_async_copy(x_hbm, buf.at[pl.ds(0, 8)], sem)
        large = pltpu.make_async_copy(y_hbm, buf.at[pl.ds(8, 24)], sem)
        small.start()
        large.start()
        large.wait()
        small.wait()
        o_ref[...] = buf[...]

    shape, scratch = like(x, (32, 128)), [pltpu.VMEM((32, 128), F32), DMA]
    return pl.pallas_call(kernel, out_shape=shape, in_specs=[HBM, HBM], scratch_shapes=scratch)(x, y)


def test_bytes_that_arrive_early_stay_in_the_semaphore() -> None:
    x, y = normal(8, 128), normal(24, 128)
    assert_runs(two_sizes, (x, y), np.concatenate([x, y]))
    assert check_call(two_sizes, (x, y), np.concatenate([x, y]))


def waits_by_number(x: Any, *, copies: int) -> Any:
    """Copies on a regular semaphore, which each of them signals once, and a wait that says for how many."""

    def kernel(x_hbm, o_ref, buf, sem):
        pltpu.make_async_copy(x_hbm.at[pl.ds(0, 8)], buf.at[pl.ds(0, 8)], sem).start()
        pltpu.make_async_copy(x_hbm.at[pl.ds(8, 8)], buf.at[pl.ds(8, 8)], sem).start()
        pl.semaphore_wait(sem, copies)
        o_ref[...] = buf[...]

    scratch = [pltpu.VMEM((16, 128), F32), pltpu.SemaphoreType.REGULAR]
    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], scratch_shapes=scratch)(x)


def test_a_wait_for_a_number_of_copies_lets_them_arrive() -> None:
    x = normal(16, 128)
    assert_runs(partial(waits_by_number, copies=2), (x,), x, simulator=False)


def test_a_wait_for_too_few_copies_leaves_one_behind() -> None:
    run = lens.trace(partial(waits_by_number, copies=1), normal(16, 128))
    assert {"unwaited", "unwritten"} <= kinds(run)


def test_a_wait_for_too_many_copies_never_ends() -> None:
    run = lens.trace(partial(waits_by_number, copies=3), normal(16, 128))
    assert "hang" in kinds(run)


def never_waited(n: Any, x: Any) -> Any:
    """A copy of n rows that nobody waits for, as long as n is 0."""

    def kernel(n_ref, x_hbm, o_ref, sem):
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(0, n_ref[0])], o_ref.at[pl.ds(0, n_ref[0])], sem)
        copy.start()
        o_ref[...] = jnp.zeros_like(o_ref)

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[SMEM, HBM], scratch_shapes=[DMA])(n, x)


def test_an_empty_copy_need_not_be_waited_for() -> None:
    x = normal(16, 128)
    assert kinds(lens.trace(never_waited, np.array([0], np.int32), x)) == set()
    assert kinds(lens.trace(never_waited, np.array([8], np.int32), x)) == {"unwaited", "no-wait"}


def polls(x: Any) -> Any:
    """Looks at a semaphore of copies until they have arrived."""

    def kernel(x_hbm, o_ref, sem):
        copy = pltpu.make_async_copy(x_hbm, o_ref, sem)
        copy.start()
        lax.while_loop(lambda seen: seen < x.nbytes, lambda _: pl.semaphore_read(sem), jnp.int32(0))
        copy.wait()

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], scratch_shapes=[DMA])(x)


def test_a_loop_that_looks_at_a_semaphore_ends() -> None:
    x = normal(16, 128)
    assert_runs(polls, (x,), x, simulator=False)


# --- random numbers --------------------------------------------------------------------------------------------------


def noise_from_a_key(key: Any, x: Any) -> Any:
    def kernel(key_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.random.uniform(key_ref[...], x_ref.shape)

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[SMEM, pl.BlockSpec()])(key, x)


def test_a_key_is_an_operand() -> None:
    key, x = jax.random.key(3), normal(8, 128)
    run = lens.trace(noise_from_a_key, key, x)
    np.testing.assert_array_equal(run.outputs, x + np.asarray(jax.random.uniform(key, x.shape)))


def drawn(seed: Any, x: Any, *, drop: bool) -> Any:
    def kernel(seed_ref, x_ref, o_ref):
        pltpu.prng_seed(seed_ref[0])
        bits = pltpu.prng_random_bits(x_ref.shape)
        o_ref[...] = jnp.where(bits > 0, 0, x_ref[...]) if drop else x_ref[...]

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[SMEM, pl.BlockSpec()])(seed, x)


def test_what_a_tpus_own_generator_decides_cannot_be_judged() -> None:
    seed, x = np.array([3], np.int32), normal(8, 128)
    some = np.where(np.arange(128) % 2, x, 0)
    verdict = check_call(partial(drawn, drop=True), (seed, x), some)
    assert (verdict.status, verdict.headline) == ("unjudged", "Cannot judge.")
    assert "random numbers" in str(verdict)
    assert "Not yet" not in str(verdict)
    assert check_call(partial(drawn, drop=False), (seed, x), x)


def drawn_by_state() -> Any:
    def kernel(o_ref):
        pltpu.prng_seed(0)
        o_ref[...] = pltpu.stateful_uniform(shape=o_ref.shape, minval=0.0, maxval=1.0)

    return pl.pallas_call(kernel, out_shape=ROWS)()


def drawn_by_a_key_of_a_tpu() -> Any:
    def kernel(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(jax.random.fold_in(key_ref[...], 1), o_ref.shape)

    key = pltpu.to_pallas_key(jax.random.key(0))
    return pl.pallas_call(kernel, out_shape=ROWS, in_specs=[SMEM])(key)


@pytest.mark.parametrize("fn", [drawn_by_state, drawn_by_a_key_of_a_tpu])
def test_every_way_to_ask_a_tpu_for_random_numbers_gives_zeros(fn: Any) -> None:
    run = lens.trace(fn)
    assert kinds(run) == {"hardware-random"}
    assert not np.asarray(run.outputs).any()


# --- kernels that are built before they are judged -------------------------------------------------------------------


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


at_module_level = pl.pallas_call(double_kernel, out_shape=ROWS)


def test_a_kernel_built_at_module_level_is_judged() -> None:
    x = normal(16, 128)
    assert check_call(at_module_level, (x,), 2 * x)
    assert check_call(jax.jit(at_module_level), (x,), 2 * x)
    assert check_call(lambda x: lax.fori_loop(0, 2, lambda _, x: at_module_level(x), x), (x,), 4 * x)
    assert check_call(at_module_level, (x,), 3 * x).status == "failed"


def test_a_kernel_built_for_the_simulator_is_judged() -> None:
    x = normal(16, 128)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        kernel = pl.pallas_call(double_kernel, out_shape=ROWS)
    assert check_call(kernel, (x,), 2 * x)


# --- what nobody here can run ----------------------------------------------------------------------------------------


def stochastic(x: Any) -> Any:
    def kernel(x_ref, o_ref):
        bits = pltpu.bitcast(x_ref[...], jnp.uint32)
        o_ref[...] = pltpu.stochastic_round(x_ref[...], bits, target_dtype=jnp.bfloat16)

    return pl.pallas_call(kernel, out_shape=like(x, None, BF16))(x)


def test_what_neither_can_run_cannot_be_judged() -> None:
    x = normal(16, 128)
    verdict = check_call(stochastic, (x,), x.astype(BF16))
    assert (verdict.status, verdict.headline, bool(verdict)) == ("unjudged", "Cannot judge.", False)
    assert "Neither the lens can run this" in str(verdict)
    assert "simulator" in str(verdict)
    assert verdict._repr_html_()


# --- memory ----------------------------------------------------------------------------------------------------------


def too_large(x: Any) -> Any:
    def kernel(x_ref, o_ref):
        table = jnp.full((60000, 60000), x_ref[0, 0])
        o_ref[...] = x_ref[...] + (table * table).sum()

    return pl.pallas_call(kernel, out_shape=like(x))(x)


def too_large_a_scratch(x: Any) -> Any:
    def kernel(x_ref, o_ref, acc_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=like(x), scratch_shapes=[pltpu.VMEM((60000, 60000), F32)])(x)


@pytest.mark.parametrize("fn", [too_large, too_large_a_scratch])
def test_what_no_tpu_has_the_memory_for_is_refused_before_it_is_made(fn: Any) -> None:
    x = normal(16, 128)
    with pytest.raises(lens.Refused):
        lens.trace(fn, x)
    verdict = check_call(fn, (x,), x)
    assert (verdict.status, verdict.findings[0].kind) == ("failed", "vmem")
    assert "13.41 GiB" in str(verdict)
    if fn is too_large:
        assert "jnp.full((60000, 60000)" in verdict.findings[0].line.text


# --- several devices -------------------------------------------------------------------------------------------------


def sharded(x: Any) -> Any:
    from jax.sharding import AbstractMesh, AxisType, PartitionSpec

    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("x")

    def double(x):
        return pl.pallas_call(double_kernel, out_shape=like(x))(x)

    return jax.shard_map(double, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)


def test_a_shard_map_over_several_devices_is_told_as_what_it_is() -> None:
    x = normal(64, 128)
    with pytest.raises(lens.Beyond, match="a shard_map over 4 devices"):
        lens.trace(sharded, x)
    verdict = check_call(sharded, (x,), 2 * x)
    assert verdict.headline == "Right, but not confirmed."  # JAX's simulator wants devices that are there


# --- kernels on several cores ----------------------------------------------------------------------------------------


def halves(x: Any, *, by_pipeline: bool) -> Any:
    """Each of two cores doubles half of the rows."""

    def body(x_hbm, o_hbm, buf, sem):
        def inner(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        if by_pipeline:
            spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
            parallel = (pltpu.PARALLEL, pltpu.ARBITRARY)
            blocks = {"grid": (x.shape[0] // 8, 2), "in_specs": [spec], "out_specs": [spec]}
            pltpu.emit_pipeline(inner, **blocks, core_axis_name="core", dimension_semantics=parallel)(x_hbm, o_hbm)
        else:
            mine = pl.ds(lax.axis_index("core") * x.shape[0] // 2, x.shape[0] // 2)
            pltpu.async_copy(x_hbm.at[mine], buf, sem).wait()
            buf[...] *= 2
            pltpu.async_copy(buf, o_hbm.at[mine], sem).wait()

    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
    scratch = [pltpu.VMEM((x.shape[0] // 2, x.shape[1]), F32), DMA]
    return pl.kernel(body, out_type=like(x), mesh=mesh, scratch_types=scratch)(x)


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_each_core_does_its_share(by_pipeline: bool) -> None:
    x = normal(32, 256)
    run = assert_runs(partial(halves, by_pipeline=by_pipeline), (x,), 2 * x, simulator=False)
    assert run.traces[0].call.grid == (2,)


def read_before_written(x: Any) -> Any:
    """What the first core leaves in its scratch memory, the second does not have."""

    def body(x_hbm, o_hbm, buf):
        @pl.when(lax.axis_index("core") == 0)
        def _():
            pltpu.sync_copy(x_hbm.at[pl.ds(0, 8)], buf)

        pltpu.sync_copy(buf, o_hbm.at[pl.ds(8 * lax.axis_index("core"), 8)])

    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
    return pl.kernel(body, out_type=like(x), mesh=mesh, scratch_types=[pltpu.VMEM((8, 128), F32)])(x)


def test_each_core_has_scratch_memory_of_its_own() -> None:
    x = normal(16, 128)
    out = np.asarray(lens.trace(read_before_written, x).outputs)
    np.testing.assert_array_equal(out[:8], x[:8])
    assert np.isnan(out[8:]).all()


def across_kernels(x: Any) -> Any:
    """A copy that one kernel starts and another waits for."""
    semaphore = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)

    def start(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    def done(x_ref, _, sem, o_ref):
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    shapes, specs = (like(x), DMA(())), (HBM, semaphore)
    out, sem = pl.pallas_call(start, in_specs=[HBM], out_specs=specs, out_shape=shapes)(x)
    specs = {"in_specs": [HBM, HBM, semaphore], "out_specs": HBM, "input_output_aliases": {1: 0}}
    return pl.pallas_call(done, out_shape=like(x), **specs)(x, out, sem)


def test_a_semaphore_that_goes_from_kernel_to_kernel_is_not_called_a_hang() -> None:
    x = normal(16, 128)
    with pytest.raises(lens.Beyond, match="one kernel hands to another"):
        lens.trace(across_kernels, x)


def chosen(number: Any, x: Any, y: Any) -> Any:
    def kernel(number_ref, x_ref, y_ref, o_ref, sem):
        pltpu.async_copy(pl.select_ref(number_ref[0], x_ref, y_ref), o_ref, sem).wait()

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[SMEM, HBM, HBM], scratch_shapes=[DMA])(number, x, y)


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_several_refs_is_chosen_by_a_value(number: int) -> None:
    x, y = normal(16, 128), normal(16, 128)
    assert_runs(chosen, (np.array([number], np.int32), x, y), [x, y][number], simulator=False)


# --- SparseCores -----------------------------------------------------------------------------------------------------


def histogram(x: Any) -> Any:
    """How often each of 64 numbers comes, counted by the 16 subcores of one SparseCore, 128 elements each."""
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1)
    lanes = plsc.get_sparse_core_info().num_lanes

    def body(x_hbm, o_hbm, x_ref, counts_ref):
        number = lax.axis_index("s")
        pltpu.sync_copy(x_hbm.at[pl.ds(128 * number, 128)], x_ref)
        for start in range(0, 64, lanes):
            counts_ref[pl.ds(start, lanes)] = jnp.zeros(lanes, I32)

        @plsc.parallel_loop(0, 128, lanes)
        def _(start):
            found = x_ref[pl.ds(start, lanes)]
            times, last = plsc.scan_count(found)
            plsc.addupdate_scatter(counts_ref, [found], times, mask=last)

        pltpu.sync_copy(counts_ref, o_hbm.at[number])

    scratch = [pltpu.VMEM((128,), I32), pltpu.VMEM((64,), I32)]
    shape = jax.ShapeDtypeStruct((16, 64), I32)
    params = pltpu.CompilerParams(needs_layout_passes=False)
    return pl.kernel(body, out_type=shape, mesh=mesh, scratch_types=scratch, compiler_params=params)(x)


def test_a_sparse_core_is_traced_on_a_chip_that_has_one() -> None:
    x = integers(0, 64, 16 * 128)
    want = np.stack([np.bincount(part, minlength=64) for part in x.reshape(16, 128)]).astype(np.int32)
    run = assert_runs(histogram, (x,), want, simulator=False)
    assert (run.chip, run.traces[0].call.grid) == ("TPU7x", (1, 16))
    assert check_call(histogram, (x,), want).status in ("passed", "unjudged")
    assert check_call(histogram, (x,), want + 1).status == "failed"


def compact(x: Any, *, expand: bool) -> Any:
    """Positive elements one behind the other; or what was so put together, in its places again."""
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1, num_subcores=1)
    lanes = plsc.get_sparse_core_info().num_lanes

    def body(x_hbm, o_hbm, x_ref, o_ref):
        pltpu.sync_copy(x_hbm, x_ref)
        o_ref[...] = jnp.zeros(lanes, I32)
        positive = x_ref[...] > 0
        plsc.store_compressed(o_ref.at[...], x_ref[...], mask=positive)
        if expand:
            again = plsc.load_expanded(o_ref.at[...], mask=positive)
            order = lanes - 1 - lax.broadcasted_iota(I32, (lanes,), 0)
            count = plsc.all_reduce_population_count(positive)
            plsc.store_scatter(o_ref, [order], jnp.where(positive, again, 0) * count)
        pltpu.sync_copy(o_ref, o_hbm)

    scratch = [pltpu.VMEM((lanes,), I32), pltpu.VMEM((lanes,), I32)]
    params = pltpu.CompilerParams(needs_layout_passes=False)
    return pl.kernel(body, out_type=like(x), mesh=mesh, scratch_types=scratch, compiler_params=params)(x)


def test_vectors_are_compressed_expanded_and_scattered() -> None:
    x = integers(-9, 9, 16)
    positive = x[x > 0]
    assert_runs(partial(compact, expand=False), (x,), np.pad(positive, (0, 16 - positive.size)), simulator=False)
    again = np.where(x > 0, x, 0)[::-1] * positive.size
    assert_runs(partial(compact, expand=True), (x,), again, simulator=False)


def gathered(x: Any, ids: Any) -> Any:
    """Rows of x, eight for each of the 16 subcores of one SparseCore."""
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1)

    def body(x_hbm, ids_hbm, o_hbm, ids_ref, rows_ref):
        first = 8 * lax.axis_index("s")
        pltpu.sync_copy(ids_hbm.at[pl.ds(first, 8)], ids_ref)
        pltpu.sync_copy(x_hbm.at[ids_ref], rows_ref)
        pltpu.sync_copy(rows_ref, o_hbm.at[pl.ds(first, 8)])

    scratch = [pltpu.VMEM((8,), I32), pltpu.VMEM((8, 128), F32)]
    return pl.kernel(body, out_type=jax.ShapeDtypeStruct((128, 128), F32), mesh=mesh, scratch_types=scratch)(x, ids)


@pytest.mark.filterwarnings("ignore:.*push streams")
def test_the_simulator_has_no_word_on_what_only_a_sparse_core_does() -> None:
    x, ids = normal(256, 128), integers(0, 256, 128)
    assert check_call(gathered, (x, ids), x[ids]).status in ("passed", "unjudged")
    assert check_call(gathered, (x, ids), x[ids] + 1).status == "failed"


def test_cores_that_wait_for_one_another_are_not_followed() -> None:
    from jax.experimental.pallas import tpu_sc as plsc

    def waits(x):
        mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1)

        def body(x_hbm, o_hbm):
            plsc.subcore_barrier()
            pltpu.sync_copy(x_hbm, o_hbm)

        return pl.kernel(body, out_type=like(x), mesh=mesh)(x)

    with pytest.raises(lens.Beyond, match="barrier"):
        lens.trace(waits, integers(0, 9, 128))


# --- slices of stride 0 ----------------------------------------------------------------------------------------------


def test_a_slice_of_stride_0_takes_one_row_many_times() -> None:
    def spread(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[pl.ds(2, 16, 0), :] + x_ref[pl.ds(pl.program_id(0), 16, 0), :]

        return pl.pallas_call(kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct((16, 128), F32))(x)

    x = normal(3, 128)
    assert_runs(spread, (x,), np.tile(x[2] + x[0], (16, 1)), simulator=False)


def test_a_slice_of_stride_0_has_bounds() -> None:
    def beyond(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[pl.ds(pl.program_id(0) + 3, 16, 0), :]

        return pl.pallas_call(kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct((16, 128), F32))(x)

    x = normal(3, 128)
    verdict = check_call(beyond, (x,), np.tile(x[2], (16, 1)))
    assert verdict.findings[0].kind == "ref-bounds"


# --- NaN -------------------------------------------------------------------------------------------------------------


def test_a_nan_that_is_expected_is_right_and_any_other_is_wrong() -> None:
    def double(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    whole = np.ones((8, 128), np.float32)
    holed = whole.copy()
    holed[3] = np.nan
    assert check_call(double, (holed,), holed * 2).status == "passed"
    assert check_call(double, (holed,), whole * 2).status == "failed"
    assert check_call(double, (whole,), holed * 2).status == "failed"
