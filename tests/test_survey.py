"""A part of a grid, and the costs of all of it, without running it: what running it gives."""

import math
import re

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import zoo
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens import survey as surveying
from pallas_puzzles.lens.survey import clip, survey
from pallas_puzzles.lens.tally import tally
from pallas_puzzles.text import human_bytes
from pallas_puzzles.view.show import show
from production_kernels import PRODUCTION
from zoo import ZOO

EVERYTHING = {**ZOO, **PRODUCTION}


def rows(figures):
    return [(r.operand.name, r.buffers, r.vmem_bytes, r.moves, r.hbm_bytes, r.once_bytes) for r in figures.operands]


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_grid_costs_what_running_it_costs(name):
    exhibit = EVERYTHING[name]
    for trace in lens.trace(exhibit.fn, *exhibit.args).traces:
        if not trace.n:
            continue
        counted = tally(trace.call)
        seen = survey(trace.call, counted, trace.n // 3, 5)
        run = lens.figures(trace)
        assert rows(seen.total) == rows(run)
        assert seen.total.steps == run.steps
        assert seen.total.vmem_bytes == run.vmem_bytes
        if not counted.copies:
            assert seen.total.hbm_bytes == run.hbm_bytes
        if seen.total.computed:
            assert (seen.total.flops, seen.total.transcendentals) == (run.flops, run.transcendentals)
        part = clip(trace, seen.first, seen.n)
        for column in ("first", "steps", "blocks", "changed", "moved"):
            assert getattr(seen, column) == getattr(part, column), column


def blank(*shape):
    """An array of any size in no memory."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


def test_the_work_does_not_grow_with_the_grid(monkeypatch):
    looked_at = []
    block_rows = surveying.block_rows

    def counting(machine, operand, columns, scalars):
        looked_at.append(columns.shape[1])
        return block_rows(machine, operand, columns, scalars)

    monkeypatch.setattr(surveying, "block_rows", counting)
    monkeypatch.setattr(lens.Execution, "run", None)  # no step is run
    picture = show(zoo.matmul, blank(32768, 32768), blank(32768, 32768), bm=128, bn=128, bk=128, first_step=10_000_000)
    (trace,) = picture.traces
    n, blocks, array = 256**3, 256**2, 4 * 32768**2
    assert (trace.first, trace.n) == (10_000_000, 512)
    assert [r.moves for r in trace.total.operands] == [n, n, blocks]
    assert trace.total.hbm_bytes == 2 * 256 * array + array
    assert trace.total.flops == 2 * 32768**3 + n * 128**2
    assert sum(looked_at) < n // 32
    assert "steps 10,000,000 to 10,000,511 of 16,777,216" in picture._repr_html_()
    assert "step 10,000,256, grid index (152, 151, 128)" in picture.text()


def reversed_rows(n):
    """n steps over 8 rows of blocks: every fourth step, the next one takes the same block again."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def call(x):
        block = pl.BlockSpec((8, 128), lambda i: (7 - i // 4 * 3 % 8, 0))
        return pl.pallas_call(kernel, grid=(n,), in_specs=[block], out_specs=block, out_shape=x)(x)

    return call


def test_a_grid_without_end_is_drawn_and_its_traffic_estimated(monkeypatch):
    looked_at = []
    block_rows = surveying.block_rows

    def counting(machine, operand, columns, scalars):
        looked_at.append(columns.shape[1])
        return block_rows(machine, operand, columns, scalars)

    monkeypatch.setattr(surveying, "block_rows", counting)
    n = 2**31 - 4
    picture = show(reversed_rows(n), blank(64, 128), first_step=n // 2)
    (trace,) = picture.traces
    assert (trace.n, trace.total.steps) == (512, n)
    assert sum(looked_at) < 3 * surveying._MOST
    for row in trace.total.operands:
        assert row.moves == pytest.approx(n / 4, rel=0.01)
        assert row.hbm_bytes == pytest.approx(row.moves * 4 * 8 * 128)
        assert not row.exact
    assert f"HBM traffic about {human_bytes(trace.total.hbm_bytes)}" in picture.text()
    page = picture._repr_html_()
    assert ">about 537,000,000<" in page
    assert "fetched about 537,000,000 times" in page
    few = show(reversed_rows(4096), blank(64, 128))
    assert [row.moves for row in lens.figures(few.traces[0]).operands] == [1024, 1024]
    assert "about" not in few.text().split("VMEM")[-1]


def test_an_index_map_that_is_run_step_by_step_is_looked_at_less(monkeypatch):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def call(x, n=3000):
        either = pl.BlockSpec((8, 128), lambda i, j: (jax.lax.cond(i > j, lambda: i % 8, lambda: 0), 0))
        block = pl.BlockSpec((8, 128), lambda i, j: (i % 8, 0))
        return pl.pallas_call(kernel, grid=(n, n), in_specs=[either], out_specs=block, out_shape=x)(x)

    monkeypatch.setattr(surveying, "_MOST", surveying._ALONE * 4 * 1000)
    x, o = show(call, blank(64, 128)).traces[0].total.operands
    assert (x.exact, o.exact, o.moves) == (False, True, 3000)
    assert x.moves == pytest.approx(2 * 7 / 8 * 3000, rel=0.5)


def test_the_window_can_be_moved_and_ends_with_the_grid():
    def first(step):
        picture = show(zoo.matmul, blank(256, 256), blank(256, 1024), bm=16, bn=128, bk=32, first_step=step)
        return int(re.search(r"steps ([\d,]+) to [\d,]+ of 1,024", picture.svg())[1].replace(",", ""))

    assert [first(0), first(300), first(10**9), first(-5)] == [0, 300, 512, 0]


def test_a_picture_of_a_part_has_the_table_of_the_whole():
    whole = show(zoo.matmul, blank(256, 256), blank(256, 1024), bm=16, bn=128, bk=32)
    (trace,) = whole.traces
    assert trace.n == 1024  # it was run
    part = clip(trace, 512, 512)
    assert lens.figures(part) == lens.figures(trace)
    assert part.steps == trace.steps[512:]
    assert part.blocks == [blocks[512:] for blocks in trace.blocks]


def test_one_step_stands_for_all_only_where_no_branch_depends_on_it(monkeypatch):
    monkeypatch.setattr("pallas_puzzles.lens.tally._FOLLOWED", 3)
    exact = 0
    for exhibit in ZOO.values():
        for trace in lens.trace(exhibit.fn, *exhibit.args).traces:
            counted = tally(trace.call)
            if counted.exact and math.prod(trace.call.grid) > 3:
                exact += 1
                assert counted.flops == sum(trace.flops)
                assert counted.transcendentals == sum(trace.transcendentals)
    assert exact > 10
