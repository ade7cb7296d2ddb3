"""The machine for several devices: right kernels are right, each mistake is found and named, costs are counted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from device_kernels import (
    CASES,
    COLLECTIVE,
    DMA,
    HARMLESS,
    HBM,
    MISTAKES,
    SLOW,
    S,
    meet,
    mesh,
    normal,
    on,
    remote,
    ring,
)
from pallas_puzzles import check_call
from pallas_puzzles.diagnose.devices import diagnose_devices
from pallas_puzzles.ir.meshes import Mesh
from pallas_puzzles.ir.modes import on_mesh
from pallas_puzzles.lens import devices
from pallas_puzzles.lens.watchdog import TimeLimit, time_limit
from pallas_puzzles.targets.simulate import SimulatorError, simulate
from pallas_puzzles.targets.tpu.chips import chips
from pallas_puzzles.targets.tpu.lowering import for_tpu
from pallas_puzzles.view.devices import on_devices

N = 4
EXPECTED = {
    "no-barrier": "not-entered",
    "barrier-with-neighbours": "not-entered",
    "no-wait-recv": "unwaited",
    "waits-twice": "deadlock",
    "credit-too-few": "deadlock",
    "credit-too-many": "left-over",
    ("permute", "no-wait-send"): "unwaited",
    ("reduce_scatter", "no-wait-send"): "unwaited",  # on four devices, no slot is filled twice
    ("all_to_all", "skips-a-wait"): "unwaited",
    ("dispatch", "skips-a-wait"): "unwaited",
}


@pytest.mark.parametrize("name", CASES)
def test_a_right_kernel_is_right(name: str) -> None:
    fn, args, want = CASES[name](N)
    run = devices.run(fn, *args)
    assert run.findings == run.notes == []
    assert np.allclose(run.outputs, want, atol=1e-3, equal_nan=True)
    assert diagnose_devices(run, np.nan_to_num(want) + 1).findings != []


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, bugs in MISTAKES.items() for bug in bugs])
def test_a_mistake_is_found(name: str, bug: str) -> None:
    fn, args, _ = CASES[name](N, bug)
    run = devices.run(fn, *args)
    assert EXPECTED.get((name, bug), EXPECTED.get(bug, "race")) in [f.kind for f in run.findings]
    assert len(run.calls) == 1, "a kernel that hangs has been reached"


@pytest.mark.parametrize(("name", "bug"), HARMLESS)
def test_what_is_no_mistake_is_not_called_one(name: str, bug: str) -> None:
    fn, args, _ = CASES[name](N, bug)
    assert devices.run(fn, *args).findings == []


def said(name: str, bug: str) -> str:
    fn, args, want = CASES[name](N, bug)
    return " ".join(str(check_call(fn, args, want)).split())


def test_a_race_names_both_lines_and_devices_and_the_order_of_arrival() -> None:
    text = said("all_gather", "one-semaphore")
    assert "the copy from device 3 to device 0 writes it (device_kernels.py:" in text
    assert "the copy from device 0 to device 1 reads it (device_kernels.py:" in text
    assert "a wait cannot tell which of them has come" in text


def test_a_race_of_two_turns_of_a_loop_says_which_copy_is_the_earlier_one() -> None:
    text = said("all_reduce", "no-credit")
    assert "an earlier copy from device 0 to device 1 writes it" in text
    assert "and the copy from device 0 to device 1 writes it" in text


def test_a_deadlock_says_who_waits_where_and_who_has_signalled() -> None:
    text = said("permute", "waits-twice")
    assert "Device 0 waits for ever (device_kernels.py:" in text
    assert "came holds 0 bytes, and 4,096 are needed" in text
    assert "signalled by the copy from device 3 to device 0" in text
    assert "device 2 waits, too" in text


def test_what_goes_beyond_an_array_is_told_before_what_it_meets_there() -> None:
    def kernel(x_ref, o_ref, sent, came):
        n, _, left, right = ring()
        meet(left, right)
        behind = 3 * jnp.int32(n)  # JAX itself looks at what is known before
        copies = [remote(x_ref, o_ref.at[pl.ds(8, 8)], sent, came, left)]
        copies += [remote(x_ref, o_ref.at[pl.ds(behind, 8)], sent, came, right)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    def local(x):
        out = jax.ShapeDtypeStruct((16, 128), x.dtype)
        scratch = {"scratch_shapes": [DMA, DMA], "compiler_params": COLLECTIVE}
        return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=out, **scratch)(x)

    x = normal(N * 8, 128)
    verdict = check_call(on(N, local), (x,), np.zeros((N * 16, 128), np.float32))
    kinds = [finding.kind for finding in verdict.findings]
    assert kinds[:2] == ["ref-bounds", "race"]


def test_what_is_brought_and_never_read_is_told() -> None:
    text = said("ring_attention", "ends-early")
    assert "Nobody reads what the copy from device 3 to device 0 brings into kv[1]" in text
    assert "is wrong: rows" not in text, "that follows from it"


def test_copies_that_overlap_with_compute_are_told_from_those_that_do_not() -> None:
    (name, bug), costs = SLOW[0], []
    for each in ("", bug):
        fn, args, _ = CASES[name](N, each)
        costs.append(devices.run(fn, *args).counts)
    assert costs[0].exposed_ici_bytes == 0
    assert costs[1].exposed_ici_bytes == costs[1].ici_bytes == costs[0].ici_bytes > 0


@pytest.mark.parametrize(("name", "hops", "busiest"), [("all_gather", 1, 3 * 4096), ("all_to_all", 4 / 3, 3 * 4096)])
def test_bytes_are_counted_on_every_link_of_their_way(name: str, hops: float, busiest: int) -> None:
    fn, args, _ = CASES[name](N)
    counts = devices.run(fn, *args).counts
    assert counts.ici_bytes == N * (N - 1) * 4096
    assert counts.bytes_hops == hops * counts.ici_bytes
    assert counts.link_bytes == busiest


def test_a_way_on_a_torus_goes_around_the_shorter_side() -> None:
    torus = Mesh({"x": 4, "y": 2})
    assert torus.route(torus.device({"x": 0, "y": 0}), torus.device({"x": 3, "y": 1})) == [(0, "x", -1), (6, "y", 1)]


def test_a_kernel_on_a_mesh_of_two_axes_sends_along_one_of_them() -> None:
    def kernel(x_ref, o_ref, sent, came):
        other = 1 - lax.axis_index("y")
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1, device_id={"y": other})
        pl.semaphore_wait(barrier, 1)
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, came, device_id=(lax.axis_index("x"), other))
        copy.start()
        copy.wait()

    def local(x):
        exchanged = pl.pallas_call(
            kernel, out_shape=S(x.shape, x.dtype), in_specs=[HBM], out_specs=HBM, scratch_shapes=[DMA, DMA],
            compiler_params=COLLECTIVE,
        )(x)  # fmt: skip
        return lax.psum(exchanged, "x")

    x = normal(16, 512)
    fn = jax.shard_map(local, mesh=mesh(x=2, y=2), in_specs=P("x", "y"), out_specs=P(None, "y"), check_vma=False)
    run = devices.run(fn, x)
    assert run.findings == []
    assert np.allclose(run.outputs, np.roll(x.reshape(2, 8, 2, 256).sum(0), 1, 1).reshape(8, 512))
    assert [o.primitive for o in run.outside] == ["psum"]


def test_collectives_are_what_jax_says() -> None:
    def local(x):
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return (
            lax.psum(x, ("x", "y")),
            lax.all_gather(x, "x", tiled=True),
            lax.all_gather(x, ("x", "y")),
            lax.psum_scatter(x, "y", scatter_dimension=1, tiled=True),
            lax.all_to_all(x, "x", 0, 1, tiled=True),
            lax.ppermute(x, "x", ring),
            lax.pmax(x, "y") + lax.axis_index(("x", "y")),
        )

    specs = (P(), P("y"), P(("x", "y")), P(("x", "y")), P(("x", "y")), P(("x", "y")), P(("x", "y")))
    fn = jax.shard_map(local, mesh=mesh(x=4, y=2), in_specs=P(("x", "y")), out_specs=specs, check_vma=False)
    x = normal(32, 8)
    for got, want in zip(devices.run(fn, x).outputs, jax.jit(fn)(x), strict=True):
        assert np.allclose(got, want, atol=1e-5)


def test_a_result_that_differs_from_device_to_device_is_found() -> None:
    fn = jax.shard_map(
        lambda x: x.sum(0, keepdims=True), mesh=mesh(x=4), in_specs=P("x"), out_specs=P(), check_vma=False
    )
    run = devices.run(fn, normal(8, 128))
    assert [f.kind for f in run.findings] == ["unequal"]


def test_what_lies_on_another_device_is_told() -> None:
    def moved(step: int) -> Any:
        def fn(x):
            to = [(i, (i + step) % N) for i in range(N)]
            return lax.ppermute(x * 2, "x", to) + 1

        return functools.partial(devices.run, on(N, fn), normal(N * 8, 128))

    right, wrong = moved(1), moved(2)
    (finding,) = diagnose_devices(wrong(), right().outputs).findings
    assert finding.kind == "moved"
    assert "the result[0:8, :], which device 0 makes, holds what belongs in the part of device 3" in finding.cause


def test_rows_in_the_wrong_place_are_told_with_the_store() -> None:
    def kernel(sign, x_ref, o_ref):
        me = lax.axis_index("x")
        for i in range(N):
            o_ref[pl.ds(lax.rem(me + sign * i + N, N) * 8, 8)] = x_ref[pl.ds(i * 8, 8)]

    def fn(sign: int) -> Any:
        call = pl.pallas_call(functools.partial(kernel, sign), out_shape=S((N * 8, 128), jnp.float32))
        return devices.run(on(N, call), normal(N * N * 8, 128))

    finding = diagnose_devices(fn(-1), fn(1).outputs).findings[0]
    assert (finding.kind, "which device 0 makes" in finding.cause) == ("moved", True)
    assert finding.line is not None
    assert finding.line.text.startswith("o_ref[pl.ds(")


def test_a_device_that_is_not_there_is_named() -> None:
    def kernel(x_ref, o_ref, sent, came):
        o_ref[...] = x_ref[...]
        pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id={"x": lax.axis_index("x") + 1})
        pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)

    def local(x):
        return pl.pallas_call(
            kernel, out_shape=S(x.shape, x.dtype), scratch_shapes=[DMA, DMA], compiler_params=COLLECTIVE
        )(x)

    run = devices.run(
        jax.shard_map(local, mesh=mesh(x=2), in_specs=P("x"), out_specs=P("x"), check_vma=False), normal(16, 128)
    )
    assert [(f.kind, f.ref) for f in run.findings] == [("no-device", "device 2")]


def test_a_loop_that_never_ends_is_stopped_on_every_device() -> None:
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.while_loop(lambda x: jnp.bool_(True), lambda x: x + 1, x_ref[...])

    def local(x):
        return pl.pallas_call(kernel, out_shape=S(x.shape, x.dtype))(x)

    fn = jax.shard_map(local, mesh=mesh(x=2), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with pytest.raises(TimeLimit), time_limit(0.5):
        devices.run(fn, normal(16, 128))


def test_a_loop_on_each_device_is_traced_for_tpus() -> None:
    def local(x):
        grown = lax.fori_loop(0, lax.axis_index("x"), lambda i, v: v + jnp.arange(8.0), x)
        return jnp.where(x > 0, grown, 0)

    fn = jax.shard_map(local, mesh=mesh(x=4), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x, tpus = S((8, 8), jnp.float32), chips("v5e")[0].mesh({"x": 4})
    with for_tpu(tpus):
        assert jax.eval_shape(on_mesh(fn, [x], tpus), x).shape == (8, 8)


def test_the_picture_has_a_row_for_each_device_and_an_arrow_for_each_copy() -> None:
    fn, args, _ = CASES["all_gather"](N)
    picture = on_devices(fn, args, {})
    assert picture.svg().count("over 1 link,") == N * (N - 1)
    assert all(f">device {i}<" in picture.svg() for i in range(N))
    assert "device_kernels.py:" in picture.text()
    fn, args, _ = CASES["permute"](N, "waits-twice")
    assert "waits for ever" in on_devices(fn, args, {}).note


def test_the_simulator_keeps_the_text_of_a_race() -> None:
    fn, args, _ = CASES["all_gather"](N, "one-semaphore")
    with pytest.raises(SimulatorError, match=r"data race: nothing orders the write at device_kernels.py:\d+ and the"):
        simulate(fn, *args, detect_races=True)
    fn, args, _ = CASES["all_gather"](N, "skips-a-wait")
    with pytest.raises(SimulatorError, match="data race"):
        simulate(fn, *args, detect_races=True, modes=("on_wait", "eager"))
