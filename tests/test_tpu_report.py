"""The report on a kernel: its figures against calculations by hand, against the lens, and against published times."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import device_kernels
from pallas_puzzles import normal
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.chips import CHIPS
from pallas_puzzles.view import tpu_report as report_module
from pallas_puzzles.view.tpu_report import STEP_OVERHEAD_S, tpu_report
from production_kernels import PRODUCTION
from tpu_kernels import double, matmul, needs_compiler, remembered, shape
from zoo import ZOO

pytestmark = [needs_compiler, remembered]
BF16 = jnp.bfloat16
EVERYTHING = {**ZOO, **PRODUCTION}


SQUARE = {n: [shape(n, n, dtype=BF16)] * 2 for n in (1024, 4096, 8192)}


def only_kernel(report):
    assert report, report.refusal or report.unavailable
    (kernel,) = report.kernels
    return kernel


# --- a kernel whose figures are known --------------------------------------------------------------------------------


@pytest.mark.parametrize("tpu", CHIPS)
def test_a_matmul_by_hand(tpu):
    m, k, n, bm, bk, bn = 1024, 2048, 512, 256, 512, 128
    args = shape(m, k, dtype=BF16), shape(k, n, dtype=BF16)
    kernel = only_kernel(tpu_report(matmul, *args, tpu=tpu, bm=bm, bk=bk, bn=bn))
    chip = CHIPS[tpu]
    assert kernel.name == "matmul_kernel"
    assert kernel.where.text.startswith("def matmul_kernel")
    assert kernel.grid == (4, 4, 4)
    assert kernel.steps == 64
    assert kernel.hbm_bytes == 2 * (m * k * (n // bn) + k * n * (m // bm) + m * n)
    assert kernel.hbm_exact
    assert kernel.flops == 2 * m * k * n + m * n * (k // bk)  # and the additions to the accumulator
    assert kernel.intensity == kernel.flops / kernel.hbm_bytes
    held = {"x_ref": 2 * bm * bk * 2, "y_ref": 2 * bk * bn * 2, "o_ref": 2 * bm * bn * 2, "acc_ref": bm * bn * 4}
    assert {name: kernel.buffers[name] for name in held} == held
    assert kernel.vmem_limit_bytes == chip.scoped_vmem_bytes
    assert kernel.times["MXU"] == pytest.approx(2 * m * k * n / chip.info.bf16_ops_per_second)
    assert kernel.times["HBM"] == pytest.approx(kernel.hbm_bytes / chip.info.mem_bw_bytes_per_second)
    assert kernel.times["bundles"] == pytest.approx(64 * kernel.mean_step / chip.clock_hz)
    assert kernel.times["steps"] == 64 * STEP_OVERHEAD_S
    fill = (bm * bk + bk * bn + bm * bn) * 2 / chip.info.mem_bw_bytes_per_second
    longest = max(kernel.times["MXU"], kernel.times["bundles"], kernel.times["HBM"] - fill)
    assert kernel.time_s == pytest.approx(longest + fill + kernel.times["steps"])
    assert kernel.bound == max(kernel.times, key=kernel.times.get)
    assert kernel.mxu_cycles == pytest.approx(2 * bm * bk * bn / (chip.info.bf16_ops_per_second / chip.clock_hz))
    assert kernel.cycles > 64 * kernel.least_step * 0.9


def test_pl_when_makes_the_steps_vary():
    """Zeroing runs in one step of four, the store in another; the longest step has the longer of the two."""
    args = shape(1024, 2048, dtype=BF16), shape(2048, 512, dtype=BF16)
    kernel = only_kernel(tpu_report(matmul, *args, simulate=False, bm=256, bk=512, bn=128))
    assert kernel.least_step < kernel.mean_step < kernel.most_step
    longer, both = kernel.most_step - kernel.least_step, 4 * (kernel.mean_step - kernel.least_step)
    assert longer < both <= 2 * longer


QKV = [shape(1, 4, 2048, 128, dtype=BF16)] * 3


def causal_attention():
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    blocks = flash.BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)
    return functools.partial(flash.flash_attention, causal=True, block_sizes=blocks)


def test_skipped_steps_are_counted_for_what_they_are():
    """Causal attention skips what lies above the diagonal: its mean step is far below its longest."""
    kernel = only_kernel(tpu_report(causal_attention(), *QKV, simulate=False))
    live = 10 / 16
    assert kernel.mxu_cycles == pytest.approx(live * 4 * 512 * 512 * 128 / (2 * 4 * 128 * 128), rel=0.01)
    assert kernel.least_step < 0.15 * kernel.most_step
    assert kernel.mean_step < 0.75 * kernel.most_step


# --- every kind of kernel --------------------------------------------------------------------------------------------


def copies_by_hand(x):
    def kernel(x_hbm, o_hbm, buffer, semaphore):
        def body(i, _):
            rows = pl.ds(i * 8, 8)
            fetch = pltpu.make_async_copy(x_hbm.at[rows], buffer, semaphore)
            fetch.start()
            fetch.wait()
            buffer[...] = buffer[...] * 2
            store = pltpu.make_async_copy(buffer, o_hbm.at[rows], semaphore)
            store.start()
            store.wait()

        lax.fori_loop(0, x.shape[0] // 8, body, None)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    scratch = [pltpu.VMEM((8, x.shape[1]), x.dtype), pltpu.SemaphoreType.DMA]
    return pl.pallas_call(kernel, out_shape=x, in_specs=[hbm], out_specs=hbm, scratch_shapes=scratch)(x)


def pipelined_inside(x):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def kernel(x_hbm, o_hbm):
        spec = pl.BlockSpec((8, 256), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(8,), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(kernel, out_shape=x, in_specs=[hbm], out_specs=hbm)(x)


def dynamic_grid(x, n):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((8, 256), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(n[0],), in_specs=[spec], out_specs=spec, out_shape=x)(x)


def gathered(x, rows):
    def kernel(rows_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8,),
        in_specs=[pl.BlockSpec((8, 256), lambda i, rows_ref: (rows_ref[i], 0))],
        out_specs=pl.BlockSpec((8, 256), lambda i, rows_ref: (i, 0)),
    )
    return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=x)(rows, x)


X = np.ones((64, 256), np.float32)
TWICE = np.array([0, 0, 1, 1, 2, 2, 3, 3], np.int32)


@pytest.mark.parametrize("tpu", CHIPS)
def test_a_pipeline_inside_is_timed(tpu):
    kernel = only_kernel(tpu_report(pipelined_inside, X, tpu=tpu))
    assert (kernel.hbm_bytes, kernel.hbm_exact) == (2 * X.nbytes, True)
    assert kernel.times["HBM"] == kernel.hbm_bytes / CHIPS[tpu].hbm_bytes_per_s
    assert kernel.times["steps"] == 9 * STEP_OVERHEAD_S  # the kernel's one, and the pipeline's eight
    assert kernel.time_s > max(kernel.times.values())
    assert kernel.bound == "steps"
    assert not any("copies" in note for note in kernel.notes)
    assert kernel.cycles


def pipelined_by_numbers(n, x):
    def kernel(n_ref, x_hbm, o_hbm):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        spec = pl.BlockSpec((8, 256), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(n_ref[0],), in_specs=[spec], out_specs=[spec])(x_hbm, o_hbm)

    hbm, smem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(kernel, out_shape=x, in_specs=[smem, hbm], out_specs=hbm)(n, x)


def test_a_pipeline_as_long_as_a_value_says():
    kernel = only_kernel(tpu_report(pipelined_by_numbers, np.array([8], np.int32), X, simulate=False))
    assert (kernel.hbm_bytes, kernel.hbm_exact) == (2 * X.nbytes + 4, True)
    unknown = only_kernel(tpu_report(pipelined_by_numbers, shape(1, dtype=jnp.int32), X, simulate=False))
    assert (unknown.hbm_bytes, unknown.time_s) == (None, None)


def for_its_chip(x):
    assert pltpu.get_tpu_info().generation == 7, "this kernel is for a TPU7x"
    return pipelined_inside(x)


def test_every_chip_traces_as_itself():
    assert only_kernel(tpu_report(for_its_chip, X, tpu="tpu7x", simulate=False)).hbm_bytes == 2 * X.nbytes
    refused = tpu_report(for_its_chip, X, tpu="v5e")
    assert refused.refusal is not None
    assert "this kernel is for a TPU7x" in str(refused)


@pytest.mark.parametrize("broken", ["tally", "figures", "survey"])
def test_what_cannot_be_counted_is_said_and_does_not_raise(broken, monkeypatch):
    def fails(*_, **__):
        raise AssertionError("nobody has seen this before")

    monkeypatch.setattr(report_module, broken, fails)
    report = tpu_report(pipelined_inside, X, simulate=False)
    assert report
    assert "kernel could not be followed" in " ".join(report.notes)
    assert "reaches no pallas_call" not in str(report)


def test_a_key_is_an_argument_like_any_other():
    def kernel(key_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * jax.random.key_data(key_ref[...])[0].astype(jnp.float32)

    def scaled(key, x):
        specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()]
        return pl.pallas_call(kernel, in_specs=specs, out_shape=x)(key, x)

    key = jax.random.key(3)
    for given in (key, jax.ShapeDtypeStruct((), key.dtype)):
        report = tpu_report(scaled, given, X, simulate=False)
        assert report.refusal is not None  # the front end knows no keys
        assert "key_data" in str(report)


@pytest.mark.parametrize("n", [2**20, 2**30])
def test_a_long_grid_has_its_figures(n):
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            o_ref[...] = jnp.exp(x_ref[...])

    def often(x):
        block = pl.BlockSpec((8, 128), lambda i: (i % (X.shape[0] // 8), 0))
        return pl.pallas_call(kernel, grid=(n,), in_specs=[block], out_specs=block, out_shape=x)(x)

    report = tpu_report(often, X, simulate=False)
    found = only_kernel(report)
    assert (found.steps, found.hbm_bytes) == (n, 2 * n * 8 * 128 * 4)
    assert found.least_step < found.mean_step <= found.most_step
    assert ("are estimated" in str(report)) == (n > 2**21)


@pytest.mark.parametrize("tpu", CHIPS)
def test_copies_of_its_own(tpu):
    kernel = only_kernel(tpu_report(copies_by_hand, X, tpu=tpu))
    assert kernel.hbm_bytes == 2 * X.nbytes
    assert kernel.time_s is None
    assert kernel.bound is None
    assert any("copies of its own" in note for note in kernel.notes)
    assert kernel.cycles


@pytest.mark.parametrize("tpu", CHIPS)
def test_prefetched_scalars_choose_the_blocks(tpu):
    kernel = only_kernel(tpu_report(gathered, X, TWICE, tpu=tpu, simulate=False))
    assert (kernel.hbm_bytes, kernel.hbm_exact) == (X.nbytes + X.nbytes // 2, True)
    unknown = only_kernel(tpu_report(gathered, X, shape(8, dtype=jnp.int32), tpu=tpu, simulate=False))
    assert (unknown.hbm_bytes, unknown.hbm_exact) == (2 * X.nbytes, False)
    assert any("give arrays instead of shapes" in note for note in unknown.notes)


def test_scalars_that_do_not_depend_on_the_arguments_are_known():
    fn = functools.partial(gathered, rows=jnp.asarray(TWICE))
    kernel = only_kernel(tpu_report(fn, shape(64, 256), simulate=False))
    assert (kernel.hbm_bytes, kernel.hbm_exact) == (X.nbytes + X.nbytes // 2, True)


@pytest.mark.parametrize("tpu", CHIPS)
def test_a_grid_known_at_run_time(tpu):
    known = only_kernel(tpu_report(dynamic_grid, X, np.array([5], np.int32), tpu=tpu, simulate=False))
    assert (known.steps, known.hbm_bytes) == (5, 2 * X.nbytes * 5 // 8)
    unknown = only_kernel(tpu_report(dynamic_grid, shape(64, 256), shape(1, dtype=jnp.int32), tpu=tpu))
    assert (unknown.steps, unknown.hbm_bytes, unknown.time_s) == (None, None, None)
    assert unknown.most_step > 0
    assert any("grid is known only at run time" in note for note in unknown.notes)
    known = tpu_report(dynamic_grid, X, np.array([5], np.int32), tpu=tpu)
    assert only_kernel(known).cycles is None, "the simulator cannot know the length of the grid"
    assert "set at run time" in known.simulator


def right_neighbour(axis, n):
    def kernel(x_ref, o_ref, sent, received):
        right = lax.rem(lax.axis_index(axis) + 1, n)
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, received, device_id=(right,))
        copy.start()
        copy.wait()

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    scratch = [pltpu.SemaphoreType.DMA] * 2

    def local(x):
        return pl.pallas_call(kernel, out_shape=x, in_specs=[hbm], out_specs=hbm, scratch_shapes=scratch)(x)

    mesh = jax.sharding.AbstractMesh((n,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    return lambda x: jax.shard_map(local, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False)(x)


@pytest.mark.parametrize("tpu", CHIPS)
@pytest.mark.parametrize("devices", [4, 8])
def test_remote_copies_between_devices(devices, tpu):
    report = tpu_report(right_neighbour("x", devices), shape(8 * devices, 128), tpu=tpu)
    kernel = only_kernel(report)
    assert kernel.bundles > 0
    assert "one device" in report.simulator


def test_a_mesh_of_its_own_is_made_of_the_chips():
    fn, args, _ = device_kernels.all_gather(4)
    assert only_kernel(tpu_report(fn, *args)).bundles > 0


def test_two_kernels_of_one_function_are_told_apart():
    def both(x):
        return matmul(double(x, bm=32).astype(BF16), x.astype(BF16).T, bm=32, bk=128, bn=64)

    report = tpu_report(both, normal((64, 256)))
    first, second = sorted(report.kernels, key=lambda kernel: kernel.name)
    assert (first.name, first.grid) == ("double_kernel", (2,))
    assert (second.name, second.grid) == ("matmul_kernel", (2, 1, 2))
    assert second.times["MXU"] > first.times["MXU"] == 0
    assert first.cycles != second.cycles


def test_a_loop_around_a_kernel_is_counted():
    def many(x):
        return lax.fori_loop(0, 5, lambda i, y: double(y), x)

    assert only_kernel(tpu_report(many, shape(32, 256), simulate=False)).runs == 5


def test_inner_loops_count_as_often_as_they_run():
    def rows(n):
        def kernel(x_ref, o_ref):
            def body(i, _):
                o_ref[pl.ds(i, 1)] = x_ref[pl.ds(i, 1)] * 2

            lax.fori_loop(0, n, body, None)

        return lambda x: pl.pallas_call(kernel, out_shape=x)(x)

    few, many = (only_kernel(tpu_report(rows(n), shape(512, 256), simulate=False)) for n in (64, 512))
    assert many.mean_step > 6 * few.mean_step


def test_register_pressure_shows_as_spills():
    def kernel(x_ref, o_ref):
        tiles = [x_ref[8 * i : 8 * i + 8] for i in range(160)]
        total = sum(tiles[1:], tiles[0])
        o_ref[...] = jnp.concatenate([jnp.exp(tile - total) for tile in reversed(tiles)])

    held = only_kernel(tpu_report(lambda x: pl.pallas_call(kernel, out_shape=x)(x), shape(1280, 128), simulate=False))
    easy = only_kernel(tpu_report(double, shape(32, 256), simulate=False))
    assert held.spills > 0
    assert held.fills > 0
    assert easy.spills == easy.fills == 0


def test_slots_tell_what_a_kernel_is_made_of():
    product = only_kernel(tpu_report(matmul, *SQUARE[1024], simulate=False, bm=512, bk=512, bn=512))

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + jnp.exp2(x_ref[...])

    exponentials = only_kernel(
        tpu_report(lambda x: pl.pallas_call(kernel, out_shape=x)(x), shape(512, 512), simulate=False)
    )
    assert set(product.slots) >= {"MXU", "VALU", "XLU", "EUP", "load", "store"}
    assert product.slots["MXU"] > 0.5
    assert product.slots["EUP"] == 0
    assert exponentials.slots["EUP"] > 0.3
    assert exponentials.slots["MXU"] == 0
    assert all(0 <= share <= 1 for share in [*product.slots.values(), *exponentials.slots.values()])


# --- everything that there is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if i % 4 else ()) for i, name in enumerate(EVERYTHING)]
)
def test_no_kernel_is_too_strange(name):
    """A report never raises; what compiles has a report on every kernel, and its bytes are those of the lens."""
    exhibit = EVERYTHING[name]
    report = tpu_report(exhibit.fn, *exhibit.args, simulate=False)
    if report.refusal:
        assert not report
        return
    assert report.kernels, report.unavailable
    traces = lens.trace(exhibit.fn, *exhibit.args).traces
    if len(report.kernels) == len(traces):
        assert sorted(k.hbm_bytes for k in report.kernels) == sorted(lens.figures(t).hbm_bytes for t in traces)
    for kernel in report.kernels:
        assert kernel.most_step >= kernel.mean_step >= kernel.least_step >= 0
        assert all(math.isfinite(t) and t >= 0 for t in kernel.times.values())


@pytest.mark.thorough
@pytest.mark.parametrize("tpu", ["v6e", "tpu7x"])
@pytest.mark.parametrize("name", PRODUCTION)
def test_the_kernels_of_jax_itself_on_other_chips(name, tpu):
    exhibit = PRODUCTION[name]
    report = tpu_report(exhibit.fn, *exhibit.args, tpu=tpu, simulate=False)
    assert report, report.refusal
    assert report.kernels
    assert not report.notes


# --- the simulator ---------------------------------------------------------------------------------------------------


def test_a_long_program_is_not_simulated():
    report = tpu_report(matmul, *SQUARE[4096], bm=128, bk=128, bn=128)
    assert only_kernel(report).cycles is None
    assert "left out" in report.simulator


def test_a_simulator_that_gives_up_is_a_word_and_the_report_stands(monkeypatch):
    def dies(*args, **options):
        raise compiler.CompilerDied("the TPU compiler was ended by signal 6")

    monkeypatch.setattr(compiler, "simulate_cycles", dies)
    report = tpu_report(double, shape(32, 256))
    assert only_kernel(report).cycles is None
    assert report.simulator == "libtpu's simulator gave up on this program"


def test_a_simulator_that_aborts_its_process_leaves_the_next_report_alone():
    report = tpu_report(causal_attention(), *QKV, tpu="tpu7x")
    assert only_kernel(report).cycles is None
    assert report.simulator == "libtpu's simulator gave up on this program"
    assert only_kernel(tpu_report(double, shape(32, 256), tpu="tpu7x")).cycles > 0


# --- the estimate ----------------------------------------------------------------------------------------------------

# Microseconds on a TPU v5e, bf16, from Python, as printed in "Matrix Multiplication" of JAX's Pallas guide
# (docs.jax.dev/en/latest/pallas/tpu/matmul.html): (bm, bk, bn) -> {m = k = n: time}.
PUBLISHED_US = {
    (128, 128, 128): {1024: 297.666, 4096: 11771.515, 8192: 91835.771},
    (512, 1024, 1024): {1024: 127.087, 4096: 889.088, 8192: 6099.434},
}
XLA_1024_US = 119.430  # the same guide, jnp.matmul of 1024^3: 11 us of arithmetic, the rest is calling it from Python


@pytest.mark.parametrize(("tile", "n"), [(tile, n) for tile, times in PUBLISHED_US.items() for n in times])
def test_the_estimate_is_within_a_tenth_of_published_times(tile, n):
    bm, bk, bn = tile
    kernel = only_kernel(tpu_report(matmul, *SQUARE[n], simulate=False, bm=bm, bk=bk, bn=bn))
    launch_us = XLA_1024_US - 2 * 1024**3 / CHIPS["v5e"].flops_per_s() * 1e6
    assert kernel.time_s * 1e6 + launch_us == pytest.approx(PUBLISHED_US[tile][n], rel=0.10)


def test_large_tiles_are_within_a_tenth_without_any_allowance():
    kernel = only_kernel(tpu_report(matmul, *SQUARE[8192], simulate=False, bm=512, bk=1024, bn=1024))
    assert kernel.time_s * 1e6 == pytest.approx(PUBLISHED_US[512, 1024, 1024][8192], rel=0.10)
    assert kernel.bound == "MXU"


def test_small_tiles_are_bound_by_their_steps():
    kernel = only_kernel(tpu_report(matmul, *SQUARE[4096], simulate=False, bm=128, bk=128, bn=128))
    assert kernel.bound == "steps"


# --- asking wrongly --------------------------------------------------------------------------------------------------


def test_an_argument_that_is_no_array_is_said():
    report = tpu_report(lambda x: x, "abc")
    assert not report
    assert "Value 'abc'" in report.refusal.sentence
    assert "by keyword" in report.refusal.sentence


def test_an_unknown_tpu_is_refused():
    with pytest.raises(ValueError, match="v5e, v6e, tpu7x"):
        tpu_report(double, shape(32, 256), tpu="v2")


def test_a_compiler_that_writes_another_format_costs_the_figures_and_nothing_else(monkeypatch):
    of = compiler.Compiled.of
    monkeypatch.setattr(compiler.Compiled, "of", lambda *args: (of(*args) or "").replace("{", "["))
    report = tpu_report(double, shape(32, 256), simulate=False)
    assert report
    assert not report.kernels
    assert any("format has changed" in note for note in report.notes)


def test_a_function_without_a_kernel_says_so():
    report = tpu_report(lambda x: x + 1, shape(32, 256))
    assert not report.kernels
    assert any("no pallas_call" in note for note in report.notes)


# --- kernels built beforehand, and on other cores --------------------------------------------------------------------


def doubled(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@pytest.mark.parametrize("chip", CHIPS)
def test_a_kernel_built_for_a_simulator_is_reported(chip: str) -> None:
    x = shape(64, 128)
    with pltpu.force_tpu_interpret_mode():
        simulated = pl.pallas_call(doubled, out_shape=x)
    for kernel in (simulated, pl.pallas_call(doubled, out_shape=x, interpret=True)):
        for fn in (kernel, jax.jit(lambda x, kernel=kernel: kernel(x))):
            assert only_kernel(tpu_report(fn, x, tpu=chip, simulate=False)).buffers == {"x_ref": 32768, "o_ref": 32768}


def rows_by_subcores(x, ids):
    """Rows of x, gathered by the subcores of a SparseCore, eight each."""
    from jax.experimental.pallas import tpu_sc as plsc

    mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1)

    def body(x_hbm, ids_hbm, o_hbm, ids_ref, rows_ref):
        first = 8 * lax.axis_index("s")
        pltpu.sync_copy(ids_hbm.at[pl.ds(first, 8)], ids_ref)
        pltpu.sync_copy(x_hbm.at[ids_ref], rows_ref)
        pltpu.sync_copy(rows_ref, o_hbm.at[pl.ds(first, 8)])

    scratch = [pltpu.VMEM((8,), jnp.int32), pltpu.VMEM((8, 128), jnp.float32)]
    return pl.kernel(body, out_type=jax.ShapeDtypeStruct((128, 128), x.dtype), mesh=mesh, scratch_types=scratch)(x, ids)


def test_a_kernel_of_sparse_cores_is_reported_on_chips_that_have_them() -> None:
    args = shape(256, 128), shape(128, dtype=jnp.int32)
    refused = tpu_report(rows_by_subcores, *args, simulate=False)
    assert refused.refusal is not None
    assert "has no SparseCores" in refused.refusal.sentence
    assert 'tpu="tpu7x"' in refused.refusal.sentence
    report = tpu_report(rows_by_subcores, *args, tpu="tpu7x", simulate=False)
    assert report, report.refusal
    assert report.notes == ["body runs on SparseCores, of which the compiler shows no schedule"]
