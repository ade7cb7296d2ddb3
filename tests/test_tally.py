"""Counting a kernel without its arithmetic gives what running it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens.tally import tally
from production_kernels import PRODUCTION
from zoo import ZOO

EVERYTHING = {**ZOO, **PRODUCTION}


@pytest.mark.parametrize("name", EVERYTHING)
def test_counts_what_the_machine_counts(name):
    exhibit = EVERYTHING[name]
    traces = lens.trace(exhibit.fn, *exhibit.args).traces
    assert traces
    for trace in traces:
        counted, run = tally(trace.call), lens.figures(trace)
        if counted.exact:
            assert counted.flops == run.flops
            assert counted.transcendentals == run.transcendentals
        else:  # what is unknown is counted as happening, a loop of unknown length once
            assert counted.branches or counted.trips
        assert bool(counted.copies or counted.pipelines) == bool(run.dma_bytes)
        if counted.pipelines and not counted.copies:
            assert sum(p.costs.hbm_bytes * p.runs for p in counted.pipelines) == run.dma_bytes


def test_most_of_them_are_counted_exactly():
    exact = [
        tally(trace.call).exact
        for exhibit in EVERYTHING.values()
        for trace in lens.trace(exhibit.fn, *exhibit.args).traces
    ]
    assert np.mean(exact) > 0.9


def test_a_branch_on_a_prefetched_scalar_is_followed_into_run_scoped():
    def kernel(ids_ref, x_ref, o_ref):
        @lambda body: pl.run_scoped(body, pltpu.VMEM((8, 128), np.float32))
        def _(tmp_ref):
            @pl.when(ids_ref[pl.program_id(0)] == 1)
            def _():
                tmp_ref[...] = x_ref[...] + 1
                o_ref[...] = tmp_ref[...]

    def fn(ids, x):
        rows = pl.BlockSpec((8, 128), lambda i, ids: (i, 0))
        grid_spec = pltpu.PrefetchScalarGridSpec(1, (4,), [rows], rows)
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid_spec=grid_spec)(ids, x)

    ids, x = np.array([1, 0, 0, 1], np.int32), np.zeros((32, 128), np.float32)
    (trace,) = lens.trace(fn, ids, x).traces
    counted = tally(trace.call)
    assert [branch.taken.tolist() for branch in counted.branches] == [[1, 0, 0, 1]]
    assert counted.exact
    assert counted.flops == lens.figures(trace).flops == 2 * 8 * 128


def test_what_a_compiler_folds_is_not_counted():
    size = 128 * 128

    def counted(body):
        def kernel(x_ref, o_ref):
            o_ref[...] = body(x_ref[...])

        x = np.ones((128, 128), np.float32)
        (trace,) = lens.trace(lambda x: pl.pallas_call(kernel, out_shape=x)(x), x).traces
        found = tally(trace.call)
        assert (found.flops, found.transcendentals) == (lens.figures(trace).flops, lens.figures(trace).transcendentals)
        return found.flops / size, found.transcendentals / size, found.mxu_flops.get("float32", 0) / size

    assert counted(lambda x: jnp.exp(x) + 1) == (1, 1, 0)
    assert counted(lambda x: x * 1.0) == counted(lambda x: x / 1.0) == (0, 0, 0)
    assert counted(lambda x: x * 2.0) == counted(lambda x: 1.0 / x) == (1, 0, 0)
    assert counted(lambda x: x + jnp.exp(jnp.full_like(x, 2) * 3)) == (1, 0, 0)  # a constant
    assert counted(lambda x: x @ x + x @ x) == (257, 0, 256)  # once is enough
    assert counted(lambda x: x @ x + x @ x.T) == (513, 0, 512)
    assert counted(lambda x: jax.nn.silu(x) + jax.nn.silu(2 * x))[1] == 2
    assert counted(lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y * 1.5, x)) == (4, 0, 0)
