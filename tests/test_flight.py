"""Copies on their way: what may be used meanwhile, and what is computed."""

import base64
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.course import session
from pallas_puzzles.course.check import check_call
from pallas_puzzles.course.inputs import Budget
from pallas_puzzles.lens import machine
from pallas_puzzles.lens.machine import figures
from pallas_puzzles.lens.regions import region_of
from pallas_puzzles.view.show import show
from zoo import HBM, like, normal

TILE, TILES = 64, 4
BYTES = TILE * 128 * 4


def doubled(x: Any, *, mistake: str = "") -> Any:
    """exp of tiles, with two slots each way; or with a mistake."""

    def kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems):
        def load(t, slot=None):
            sem = in_sems.at[0 if mistake == "one semaphore" else t % 2]
            return pltpu.make_async_copy(
                x_hbm.at[pl.ds(t * TILE, TILE)], x_buf.at[t % 2 if slot is None else slot], sem
            )

        def store(t):
            return pltpu.make_async_copy(o_buf.at[t % 2], o_hbm.at[pl.ds(t * TILE, TILE)], out_sems.at[t % 2])

        load(0).start()
        for t in range(TILES):
            if t + 1 < TILES and mistake != "late":
                load(t + 1, 0 if mistake == "one slot" else None).start()
            load(t).wait()
            if t >= 2 and mistake != "slot reused":
                store(t - 2).wait()
            o_buf[t % 2] = jnp.exp(x_buf[t % 2])
            if t + 1 < TILES and mistake == "late":
                load(t + 1).start()
            store(t).start()
        for t in range(0 if mistake == "slot reused" else TILES - 2, TILES):
            store(t).wait()

    slots, sems = pltpu.VMEM((2, TILE, 128), x.dtype), pltpu.SemaphoreType.DMA((2,))
    return pl.pallas_call(
        kernel, out_shape=like(x), in_specs=[HBM], out_specs=HBM, scratch_shapes=[slots, slots, sems, sems]
    )(x)


X = normal(TILE * TILES, 128)


def test_bytes_exposed_and_in_flight_are_counted() -> None:
    (trace,) = machine.trace(doubled, X).traces
    costs = figures(trace)
    assert not trace.incidents
    assert costs.exposed_bytes == 2 * BYTES  # the first tile in, the last one out
    assert costs.in_flight_bytes == (3 * BYTES + 3 * BYTES) / TILES  # 3 tiles in and 3 out are on their way meanwhile


MISTAKES = {
    "one semaphore": ("shared-semaphore", "reads x_buf[0] after a wait on in_sems[0]", "o_buf[t % 2] = jnp.exp"),
    "one slot": ("no-wait", "copies into x_buf[0]", "load(t + 1, 0"),
    "slot reused": ("reused", "stores into o_buf[0]", "o_buf[t % 2] = jnp.exp"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_memory_of_a_copy_on_its_way_is_left_alone(mistake: str) -> None:
    kind, words, line = MISTAKES[mistake]
    verdict = check_call(lambda x: doubled(x, mistake=mistake), (X,), np.exp(X))
    first = verdict.findings[0]
    assert (first.kind, first.line is not None and line in first.line.text) == (kind, True)
    assert words in first.cause


def test_copies_that_nothing_overlaps_exceed_a_budget() -> None:
    def late(x: Any) -> Any:
        return doubled(x, mistake="late")

    asked = Budget(exposed_bytes=2 * BYTES), Budget(in_flight_bytes=3 * BYTES // 2)
    for budget, words in zip(asked, ("waited for before anything is computed", "only 24 KiB"), strict=True):
        assert check_call(doubled, (X,), np.exp(X), budget=budget, confirm=False)
        verdict = check_call(late, (X,), np.exp(X), budget=budget, confirm=False)
        assert not verdict
        assert words in verdict.findings[0].cause


@pytest.mark.parametrize(("slots", "kept"), [(1, 512 << 10), (2, 0)])
def test_a_value_is_kept_over_a_copy_into_its_own_slot(slots: int, kept: int) -> None:
    def kernel(x_hbm, o_ref, x_buf, sem):
        def load(t):
            return pltpu.make_async_copy(x_hbm.at[pl.ds(t * 512, 512)], x_buf.at[t % slots], sem)

        load(0).start()
        for t in range(2):
            load(t).wait()
            x = x_buf[t % slots] * 2.0
            if t == 0:
                load(1).start()
            o_ref[t] = jnp.sum(x, axis=0)

    def sums(x: Any) -> Any:
        scratch = [pltpu.VMEM((slots, 512, 256), x.dtype), pltpu.SemaphoreType.DMA]
        return pl.pallas_call(kernel, out_shape=like(x[:2]), in_specs=[HBM], scratch_shapes=scratch)(x)

    (trace,) = machine.trace(sums, normal(1024, 256)).traces
    assert trace.flight.kept_bytes == kept


@pytest.mark.parametrize(("wait_first", "kept"), [(False, 512 << 10), (True, 0)])
def test_a_value_is_kept_over_a_wait(wait_first: bool, kept: int) -> None:
    def kernel(x_ref, o_hbm, o_buf, sem):
        def store(t):
            return pltpu.make_async_copy(o_buf, o_hbm.at[t], sem)

        for t in range(2):
            if t and wait_first:
                store(t - 1).wait()
            tile = x_ref[...] * (t + 2.0)
            if t and not wait_first:
                store(t - 1).wait()
            o_buf[...] = tile
            store(t).start()
        store(1).wait()

    def multiples(x: Any) -> Any:
        scratch = [pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA]
        return pl.pallas_call(kernel, out_shape=like(x, (2, *x.shape)), out_specs=HBM, scratch_shapes=scratch)(x)

    x = normal(512, 256)
    (trace,) = machine.trace(multiples, x).traces
    assert trace.flight.kept_bytes == kept
    verdict = check_call(multiples, (x,), np.stack([x * 2, x * 3]), budget=Budget(vmem_bytes=1 << 20), confirm=False)
    assert bool(verdict) == wait_first
    assert wait_first or "over the wait for the copy from o_buf to o_hbm[0]" in verdict.findings[0].cause


def test_the_copy_that_no_wait_names_is_the_one_that_nobody_waits_for() -> None:
    def kernel(x_hbm, o_hbm, buf, sem):
        pltpu.make_async_copy(x_hbm, buf, sem).start()
        pltpu.make_async_copy(buf, o_hbm, sem).start()
        pltpu.make_async_copy(buf, o_hbm, sem).wait()  # it takes the bytes of the first copy

    def copied(x: Any) -> Any:
        scratch = [pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA]
        return pl.pallas_call(kernel, out_shape=like(x), in_specs=[HBM], out_specs=HBM, scratch_shapes=scratch)(x)

    (trace,) = machine.trace(copied, X).traces
    assert [(i.ref, i.detail["out"]) for i in trace.incidents if i.kind == "unwaited"] == [("buf", False)]


def test_parts_of_a_buffer_meet_where_they_share_an_element() -> None:
    def part(*keys: Any) -> Any:
        place = machine.Place((4, 16), np.dtype(np.float32))
        place.steps = list(keys)
        return region_of(place, (4, 16))

    rows = part((slice(1, 3), ...))
    gathered = part((np.array([0, 3]), ...))
    assert rows.meets(part((2, ...)))
    assert not rows.meets(part((3, ...)))
    assert not part((slice(0, 4, 2), ...)).meets(part((slice(1, 4, 2), ...)))
    assert not part((2, ...), (slice(0, 8),)).meets(part((2, ...), (slice(8, 16),)))
    assert not rows.meets(gathered)
    assert gathered.meets(part((3, slice(2, 4))))


def test_show_draws_copies_over_what_is_computed() -> None:
    picture = show(doubled, X)
    bars = [line.split() for line in str(picture).splitlines()]
    lanes = {words[0]: words[1] for words in bars if words and words[0] in ("core", "o_buf[0]", "o_buf[1]")}
    assert lanes["core"].strip("·") == "C" * len(lanes["core"].strip("·"))  # it waits at both ends alone
    assert lanes["core"][:1] == lanes["core"][-1:] == "·"
    assert lanes["o_buf[0]"].count("CS") == lanes["o_buf[1]"].count("CS") == TILES // 2
    (drawn,) = [svg for svg in decoded(picture._repr_html_()) if "copy from HBM" in svg]
    assert drawn.count("copy from HBM on its way: x_buf[1]") == TILES // 2
    assert "Timeline of what kernel copies itself, 8 times: nothing is computed during 2" in picture._repr_html_()


def decoded(page: str) -> list[str]:
    """The pictures of a page."""
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)]


READ_TOO_EARLY = """
def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    for t in range(x_hbm.shape[0] // bm):
        rows = pl.ds(t * bm, bm)
        pltpu.make_async_copy(x_hbm.at[rows], x_buf, sem).start()
        o_buf[...] = jax.nn.silu(x_buf[...])
        pltpu.make_async_copy(x_hbm.at[rows], x_buf, sem).wait()
        pltpu.sync_copy(o_buf, o_hbm.at[rows])
"""


def test_what_jax_logs_of_programs_that_are_only_tried_is_not_the_readers(caplog: pytest.LogCaptureFixture) -> None:
    verdict = session.run("pipelining/2", overlay=READ_TOO_EARLY)
    assert "nobody has waited for it" in verdict.findings[0].cause
    assert not caplog.records
