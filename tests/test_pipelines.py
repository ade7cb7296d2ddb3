"""emit_pipeline inside of a kernel: a grid of its own, in the lens, in pictures, in verdicts and in counts."""

import contextlib
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import check
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.course.inputs import normal
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens.tally import tally
from pallas_puzzles.targets.simulate import SimulatorError, simulate
from pallas_puzzles.view.show import show
from zoo import like

HBM = pl.BlockSpec(memory_space=pl.ANY)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def rows(block, index):
    return pl.BlockSpec(block, index)


def row_sums(x, *, zeroed=True):
    """(24, 256) -> (24, 1), over a grid of (3, 2)."""

    def body(x_ref, o_ref):
        if zeroed:

            @pl.when(pl.program_id(1) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(1, keepdims=True)

    def kernel(x_hbm, o_hbm):
        in_specs, out_specs = [rows((8, 128), lambda i, j: (i, j))], [rows((8, 1), lambda i, j: (i, 0))]
        pltpu.emit_pipeline(body, grid=(3, 2), in_specs=in_specs, out_specs=out_specs)(x_hbm, o_hbm)

    return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=like(x, (24, 1)))(x)


def gathered(ids, x):
    """An index map that reads a Ref of the kernel around it."""

    def kernel(ids_ref, x_hbm, o_hbm):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        in_specs, out_specs = [rows((8, 128), lambda i: (ids_ref[i], 0))], [rows((8, 128), lambda i: (i, 0))]
        pltpu.emit_pipeline(body, grid=(4,), in_specs=in_specs, out_specs=out_specs)(x_hbm, o_hbm)

    return pl.pallas_call(kernel, in_specs=[SMEM, HBM], out_specs=HBM, out_shape=like(x))(ids, x)


def by_expert(x):
    """A pipeline for each step of the outer grid, over a part of an array, that adds up in the kernel's own scratch."""

    def kernel(x_hbm, o_ref, acc_ref):
        e = pl.program_id(0)
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def body(x_ref):
            acc_ref[...] += x_ref[...] * (e + 1).astype(jnp.float32)

        pltpu.emit_pipeline(body, grid=(3,), in_specs=[rows((8, 128), lambda i: (i, 0))])(x_hbm.at[e])
        o_ref[...] = acc_ref[...]

    out = pl.BlockSpec((None, 8, 128), lambda e: (e, 0, 0))
    scratch = [pltpu.VMEM((8, 128), x.dtype)]
    shape = like(x, (x.shape[0], 8, 128))
    return pl.pallas_call(
        kernel, grid=x.shape[:1], in_specs=[HBM], out_specs=out, out_shape=shape, scratch_shapes=scratch
    )(x)


def ragged(x):
    """Blocks of 8 rows that hang over the edge of 20."""

    def kernel(x_hbm, o_hbm):
        def body(x_ref, o_ref):
            o_ref[...] = -x_ref[...]

        block = rows((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(3,), in_specs=[block], out_specs=[block])(x_hbm, o_hbm)

    return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=like(x))(x)


def with_scratches(x):
    """What is given to a pipeline when it is run is no part of the equation: it is followed step by step."""

    def kernel(x_hbm, o_hbm, acc_ref):
        def body(x_ref, o_ref, acc_ref):
            acc_ref[...] = x_ref[...] + 1
            o_ref[...] = acc_ref[...]

        block = rows((8, 128), lambda i: (i, 0))
        pipeline = pltpu.emit_pipeline(body, grid=(3,), in_specs=[block], out_specs=[block])
        pipeline(x_hbm, o_hbm, scratches=(acc_ref,))

    scratch = [pltpu.VMEM((8, 128), x.dtype)]
    return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=like(x), scratch_shapes=scratch)(x)


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


IDS = np.array([3, 1, 0, 2], np.int32)
CASES = {
    "row_sums": (row_sums, (numbers(24, 256),), lambda x: x.sum(1, keepdims=True)),
    "gathered": (gathered, (IDS, numbers(32, 128)), lambda i, x: 2 * x.reshape(4, 8, 128)[i].reshape(x.shape)),
    "by_expert": (
        by_expert,
        (numbers(4, 24, 128),),
        lambda x: x.reshape(4, 3, 8, 128).sum(1) * np.arange(1, 5)[:, None, None],
    ),
    "ragged": (ragged, (numbers(20, 128),), np.negative),
    "with_scratches": (with_scratches, (numbers(24, 128),), lambda x: x + 1),
}
PLAIN = [name for name in CASES if name != "with_scratches"]


@pytest.mark.parametrize("name", CASES)
def test_it_runs(name):
    fn, args, want = CASES[name]
    run = lens.trace(fn, *args)
    np.testing.assert_allclose(run.outputs, want(*args), rtol=1e-5, atol=1e-5)
    kinds = {i.kind for t in run.traces for each in t.with_pipelines() for i in each.incidents}
    assert kinds == ({"padding"} if name == "ragged" else set())
    assert bool(run.traces[0].pipelines) == (name in PLAIN)


def test_it_is_a_grid_of_its_own():
    (trace,) = lens.trace(row_sums, *CASES["row_sums"][1]).traces
    (pipeline,) = trace.pipelines
    (inner,) = pipeline.traces
    assert (trace.n, inner.n, pipeline.runs) == (1, 6, 1)
    assert [o.name for o in inner.call.operands] == ["x_ref", "o_ref"]
    assert inner.blocks[1] == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    costs, outer = lens.figures(inner), lens.figures(trace)
    assert [r.moves for r in costs.operands] == [6, 3]
    assert pipeline.hbm_bytes == costs.hbm_bytes == outer.hbm_bytes == 24 * 256 * 4 + 24 * 4
    assert outer.vmem_bytes == costs.vmem_bytes == 2 * (8 * 128 + 8) * 4
    assert outer.flops == sum(inner.flops) == tally(trace.call).flops


def test_its_steps_are_not_those_of_the_kernel_around_it():
    (trace,) = lens.trace(by_expert, *CASES["by_expert"][1]).traces
    (pipeline,) = trace.pipelines
    assert (trace.n, pipeline.runs, pipeline.traces[0].n) == (4, 4, 3)
    assert len(set(trace.dma_bytes)) == 1
    assert pipeline.hbm_bytes == sum(trace.dma_bytes) == 4 * 24 * 128 * 4
    stores = [e.step for e in trace.events if e.ref == "acc_ref" and e.op == "store"]
    assert stores == [step for step in range(4) for _ in range(4)]  # one zeroing and three sums


def test_blocks_of_an_operand_in_hbm_that_hang_over_its_edge():
    (trace,) = lens.trace(ragged, numbers(20, 128)).traces
    assert lens.figures(trace).hbm_bytes == 2 * 20 * 128 * 4


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_counted_without_being_run(name):
    fn, args, _ = CASES[name]
    (trace,) = lens.trace(fn, *args).traces
    counted = tally(trace.call)
    (pipeline,) = counted.pipelines
    assert not counted.copies
    assert pipeline.steps == trace.pipelines[0].runs * trace.pipelines[0].traces[0].n
    if name == "gathered":
        assert pipeline.costs is None  # its index map reads memory
    else:
        assert pipeline.costs.hbm_bytes * pipeline.runs == trace.pipelines[0].hbm_bytes
        assert counted.flops == sum(trace.flops)


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_drawn(name):
    fn, args, _ = CASES[name]
    picture = show(fn, *args)
    (trace,) = picture.traces
    inner = trace.pipelines[0].traces[0]
    text, page = picture.text(), picture._repr_html_()
    assert picture.note == ""
    assert page.count("<img") == 2
    assert f"pipeline in kernel, grid {inner.call.grid} = {inner.n} steps" in page.replace("&#x27;", "'")
    assert f"pipeline in kernel, grid {inner.call.grid}" in text
    assert any("█" in line for line in text.splitlines() if line.strip().startswith(inner.call.operands[0].name))
    assert "pipeline in kernel" in picture.svg(step=1, call=1)


def test_a_mistake_in_it_is_told_with_its_step():
    with collecting() as verdicts:
        check("mine", functools.partial(row_sums, zeroed=False), lambda x: x.sum(1, keepdims=True), normal((24, 256)))
    (verdict,) = verdicts
    assert verdict.status == "failed"
    told = " ".join(str(verdict).split())
    assert "of the pipeline in kernel, grid index (0, 0): the kernel reads 8 elements of o_ref" in told
    assert "where pl.program_id(1) == 0" in told


def test_a_grid_that_is_too_short_is_told_by_what_no_copy_reaches():
    def kernel(x_hbm, o_hbm):
        block = rows((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(2,), in_specs=[block], out_specs=[block])(x_hbm, o_hbm)

    def body(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    with collecting() as verdicts:
        twice = pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=numbers(24, 128))
        check("mine/1", twice, lambda x: 2 * x, normal((24, 128)))
    assert "No copy reaches rows 16-23 of o_hbm." in str(verdicts[0])


def test_one_that_the_lens_does_not_know_is_followed_as_jax_spells_it_out():
    (trace,) = lens.trace(with_scratches, numbers(24, 128)).traces
    assert trace.pipelines == []
    assert lens.figures(trace).dma_bytes == 2 * 24 * 128 * 4
    assert tally(trace.call).copies


def test_a_mistake_of_the_readers_is_raised_once_as_it_is():
    calls = []

    def broken(x):
        def kernel(x_ref, o_ref):
            calls.append(1)
            raise RuntimeError("mine")

        return pl.pallas_call(kernel, out_shape=like(x))(x)

    with pytest.raises(RuntimeError, match="mine"):
        lens.trace(broken, numbers(8, 128))
    assert calls == [1]


def test_spelt_out_it_is_counted_as_loops_and_copies():
    """Its body and its index maps refer to values of the kernel around it."""
    (trace,) = lens.trace(_spelt_out, IDS, numbers(32, 128)).traces
    counted = tally(trace.call)
    assert not counted.pipelines
    assert counted.copies
    assert counted.flops >= sum(trace.flops)


def _spelt_out(ids, x):
    def kernel(ids_ref, x_hbm, o_hbm, acc_ref):
        first = ids_ref[0]

        def body(x_ref, o_ref, acc_ref):
            acc_ref[...] = x_ref[...] * 2

            @pl.when(first + pl.program_id(0) >= 0)
            def _():
                o_ref[...] = acc_ref[...]

        in_specs, out_specs = [rows((8, 128), lambda i: (ids_ref[i], 0))], [rows((8, 128), lambda i: (i, 0))]
        pipeline = pltpu.emit_pipeline(body, grid=(4,), in_specs=in_specs, out_specs=out_specs)
        pipeline(x_hbm, o_hbm, scratches=(acc_ref,))

    scratch = [pltpu.VMEM((8, 128), x.dtype)]
    shape = like(x)
    return pl.pallas_call(kernel, in_specs=[SMEM, HBM], out_specs=HBM, out_shape=shape, scratch_shapes=scratch)(ids, x)


def counted_up(x, *, buffers):
    """x + 3: a grid of (3, 2) adds 1 to each of two blocks in HBM, and comes back to a block after 2 steps."""

    def kernel(x_hbm, o_hbm):
        def body(o_ref):
            o_ref[...] += 1

        spec = rows((8, 128), lambda turn, i: (i, 0))

        def run(block):
            pltpu.emit_pipeline(body, grid=(3, 2), out_specs=[spec])(o_hbm, allocations=[block])

        pl.run_scoped(run, pltpu.BufferedRef.input_output(spec, jnp.float32, buffer_count=buffers))

    return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], out_specs=HBM, input_output_aliases={0: 0})(x)


@pytest.mark.skipif(not hasattr(pltpu.BufferedRef, "in_buffer_count"), reason="this JAX counts them together")
@pytest.mark.parametrize(("buffers", "seen"), [((2, 2), {"no-wait"}), ((2, 1), set()), ((1, 2), set())])
def test_a_block_is_fetched_again_while_it_is_written_back(buffers, seen):
    """JAX asks for visits that are as many steps apart as there are buffers in and out, less 1."""
    x = np.ones((16, 128), np.float32)
    fn = functools.partial(counted_up, buffers=buffers)
    run = lens.trace(fn, x)
    assert {i.kind for t in run.traces for i in t.incidents} == seen
    np.testing.assert_array_equal(run.outputs, x + 3)
    with pytest.raises(SimulatorError, match="data race") if seen else contextlib.nullcontext():
        simulate(fn, x, detect_races=True)
