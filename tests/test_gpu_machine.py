"""The machine for plgpu.kernel: right results and no finding on right kernels, each mistake with the reader's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import gpu_kernels
from gpu_kernels import MISTAKES, RIGHT
from pallas_puzzles.diagnose.gpu import findings_of
from pallas_puzzles.lens import gpu
from pallas_puzzles.lens.gpu.timeline import Product, TensorCores, in_l2


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels(name: str) -> None:
    kernel, args, want = RIGHT[name]()
    run = gpu.run(kernel, *args)
    np.testing.assert_allclose(np.asarray(run.outputs, np.float32), want, rtol=1e-5, atol=1e-4)
    assert run.findings == []
    # a pipeline of JAX's own does without a fence
    assert {note.kind for note in run.notes} <= {"padding", "unfenced-read", "garbage"}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    made, kind, line, said = MISTAKES[name]
    kernel, args, _ = made()
    run = gpu.run(kernel, *args)
    told = [f for f in findings_of([*run.findings, *run.notes]) if f.kind == kind]
    assert told, "it is not found"
    assert line in told[0].line.text
    assert said in told[0].cause
    assert (run.outputs is None) == (kind == "deadlock")


def test_a_deadlock_says_who_could_have_arrived() -> None:
    kernel, args, _ = gpu_kernels.specialised(release=False)
    (found,) = gpu.run(kernel, *args).findings
    consumer, producer = found.waiters
    assert (consumer.what, producer.what) == ("full[0]", "empty[0]")
    assert "copy_gmem_to_smem" in consumer.candidates[0].text
    assert producer.candidates == ()  # nobody ever releases a slot
    assert consumer.arrived[0][0] == "warpgroup 1"


def test_a_missing_wait_shows_in_the_values() -> None:
    for case in (gpu_kernels.double(wait=False), gpu_kernels.matmul(wait=False)):
        kernel, args, want = case
        assert not np.allclose(gpu.run(kernel, *args).outputs, want)


def test_a_read_and_the_copy_that_overwrites_it() -> None:
    """PTX ISA 8.9.5: accesses through two proxies are ordered by a proxy fence only, in both directions. A missing one
    after stores is a mistake; after reads alone it is noted, as libraries do without it."""
    stored, read = gpu_kernels.double(commit=False), gpu_kernels.refilled()
    assert {f.kind for f in gpu.run(stored[0], *stored[1]).findings} == {"no-commit"}
    run = gpu.run(read[0], *read[1])
    assert (run.findings, [note.kind for note in run.notes]) == ([], ["unfenced-read"])


def test_counts() -> None:
    kernel, args, _ = gpu_kernels.double()
    counts = gpu.run(kernel, *args).counts
    assert counts.gmem_read_bytes == counts.gmem_write_bytes == args[0].nbytes
    assert (counts.copies, counts.stores, counts.arrivals, counts.ctas) == (4, 4, 4, 1)
    assert counts.smem_bytes == 4 * 64 * 128 * 4 + 2 * 8
    kernel, args, _ = gpu_kernels.ragged()
    assert gpu.run(kernel, *args).counts.gmem_read_bytes == args[0].nbytes  # what lies beyond the end costs nothing
    kernel, args, _ = gpu_kernels.multicast()
    assert gpu.run(kernel, *args).counts.gmem_read_bytes == args[0].nbytes  # once for both CTAs
    kernel, args, _ = gpu_kernels.matmul()
    assert gpu.run(kernel, *args).counts.flops == 2 * 64 * 64 * 256


def test_the_clock_sees_what_overlaps() -> None:
    deep, flat = (gpu.run(k, *a) for k, a, _ in (gpu_kernels.pipeline(depth=3), gpu_kernels.pipeline(depth=1)))
    assert deep.counts.copy_busy == flat.counts.copy_busy
    assert deep.counts.copy_idle < flat.counts.copy_idle / 4
    assert deep.counts.cycles < flat.counts.cycles
    lanes = {(e.lane, e.kind) for e in deep.calls[0].events}
    assert {("copy", "load"), ("copy", "store"), ("warpgroup 0", "compute"), ("warpgroup 0", "wait")} <= lanes
    assert all(e.start < e.end <= deep.counts.cycles for e in deep.calls[0].events)


def test_warpgroups_share_the_tensor_cores() -> None:
    """Two products of 4 x 64 cycles, the second one 100 cycles later: together from there on, an instruction each."""
    cores, ended = TensorCores(), []
    first, second = (Product(64, 4, issued, ended.append) for issued in (0.0, 100.0))
    cores.issue("warpgroup 0", first)
    assert cores.expected(first) == 256
    cores.issue("warpgroup 1", second)
    assert (cores.expected(first), cores.expected(second)) == (384, 512)
    cores.advance(512)
    assert ended == [first, second]
    assert first.slices == [(0, 128), (192, 256), (320, 384)]
    assert (cores.busy, first.end, second.end) == (512, 384, 512)


def test_copies_out_of_l2_are_faster() -> None:
    kernel, args, _ = gpu_kernels.double()
    slow = gpu.run(kernel, *args).counts.cycles
    with in_l2():
        assert gpu.run(kernel, *args).counts.cycles < slow


def test_work_is_taken_over() -> None:
    kernel, args, want = gpu_kernels.scheduled()
    run = gpu.run(kernel, *args, sms=2)
    np.testing.assert_array_equal(run.outputs, want)
    assert run.counts.ctas == 2


def test_who_wrote_an_element() -> None:
    kernel, args, _ = gpu_kernels.rows()
    ((numbers, writes),) = gpu.run(kernel, *args).calls[0].written
    write = writes[numbers[2, 5]]
    assert write.who == "CTA 2"
    assert "o_gmem[where(i)] = " in write.instr.line.text


def test_scopes_share_their_memory() -> None:
    """Two warpgroups enter scopes of 32 KB, one after the other."""

    def body(o_gmem):
        def scope(s_smem):
            s_smem[lax.axis_index("wg")] = jnp.ones((32, 128))

        for _ in range(3):
            pl.run_scoped(scope, plgpu.SMEM((2, 32, 128), jnp.float32), collective_axes="wg")
        o_gmem[lax.axis_index("wg")] = jnp.ones((128,))

    out = jax.ShapeDtypeStruct((2, 128), jnp.float32)
    assert gpu.run(plgpu.kernel(body, out_type=out, num_threads=2, thread_name="wg")).counts.smem_bytes == 32 << 10


def test_garbage_that_no_output_depends_on() -> None:
    kernel, args, _ = gpu_kernels.partly_loaded()
    (note,) = gpu.run(kernel, *args).notes
    assert (note.kind, note.count) == ("garbage", 24 * 64)


def test_what_lies_in_the_same_memory_is_overwritten() -> None:
    """Whoever reads a Ref after another one of its RefUnion was stored reads what nobody has written into it."""

    def body(o_gmem, refs):
        (one,), (two,) = refs
        one[...] = jnp.ones((64, 128))
        two[...] = jnp.zeros((64, 128))
        o_gmem[...] = one[...]

    tile = plgpu.SMEM((64, 128), jnp.float32)
    out = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    run = gpu.run(plgpu.kernel(body, out_type=out, scratch_types=[plgpu.RefUnion([tile], [tile])]))
    assert [(f.kind, f.count) for f in run.findings] == [("unwritten", 64 * 128)]
    assert np.isnan(run.outputs).all()


@pytest.mark.parametrize(
    ("ptx", "said"),
    [("mov.u32 %r1, 0;", "mov.u32"), ("bar.sync 1, 256; bar.sync 2, 256;", "bar.sync 1, 256; bar")],
)
def test_what_is_not_followed(ptx: str, said: str) -> None:
    def body(o_gmem):
        plgpu.inline_mgpu()(lambda _: gpu_kernels.inline_ptx(ptx))()
        o_gmem[...] = jnp.ones((128,))

    with pytest.raises(gpu.Beyond, match=said):
        gpu.run(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32)))


def test_an_unknown_chip() -> None:
    kernel, args, _ = gpu_kernels.rows()
    with pytest.raises(ValueError, match="choose one of h100"):
        gpu.run(kernel, *args, chip="v100")
