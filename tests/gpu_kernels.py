"""Small kernels for a GPU, right and with one mistake each: for the tests of the machine, and for benchmarks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import inline_ptx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

S = jax.ShapeDtypeStruct
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
Case = tuple[Callable[..., Any], tuple[np.ndarray, ...], Any]  # a function, its arguments, what is right


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def double(
    steps: int = 4,
    wait: bool = True,
    commit: bool = True,
    wait_out: bool = True,
    last: bool = True,
    arrivals: int = 1,
    copies: int = 1,
    waits: int = 1,
    store: bool = True,
) -> Case:
    """o = 2 x in tiles of 64 rows: copied in, computed, copied out, with two slots."""

    def body(x_gmem, o_gmem, x_smem, o_smem, bar):
        for i in range(steps):
            rows = pl.ds(i * 64, 64)
            for _ in range(copies):
                plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem.at[i % 2], bar.at[i % 2])
            for _ in range(waits if wait else 0):
                plgpu.barrier_wait(bar.at[i % 2])
            if wait_out:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            o_smem[i % 2] = x_smem[i % 2] * 2
            if commit:
                plgpu.commit_smem()
            if store:
                plgpu.copy_smem_to_gmem(o_smem.at[i % 2], o_gmem.at[rows])
        if last:
            plgpu.wait_smem_to_gmem(0)

    x = normal(64 * steps, 128)
    slots = [plgpu.SMEM((2, 64, 128), jnp.float32)] * 2
    bars = plgpu.Barrier(num_barriers=2, num_arrivals=arrivals)
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), scratch_types=[*slots, bars]), (x,), 2 * x


def matmul(wait: bool = True, steps: int = 4, in_registers: bool = False, tiles: Any = TILES) -> Case:
    """a @ b, 64 x 64, by wgmma over k with two slots. tiles: how the operands lie in SMEM."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, bars):
        def copy(k, slot):
            part = pl.ds(k * 64, 64)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, part], a_smem.at[slot], bars.at[slot])
            plgpu.copy_gmem_to_smem(b_gmem.at[part], b_smem.at[slot], bars.at[slot])

        def scope(acc):
            for k in range(steps):
                slot = k % 2
                plgpu.barrier_wait(bars.at[slot])
                a = a_smem[slot] if in_registers else a_smem.at[slot]
                plgpu.wgmma(acc, a, b_smem.at[slot])
                if wait:
                    plgpu.wgmma_wait(0)
                if in_registers:
                    plgpu.commit_smem()
                if k + 2 < steps:
                    copy(k + 2, slot)
            return acc[...]

        for k in range(2):
            copy(k, k)
        o_gmem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))

    a, b = normal(64, 64 * steps, dtype=jnp.bfloat16), normal(64 * steps, 64, dtype=jnp.bfloat16, seed=1)
    slots = [plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiles)] * 2
    bars = plgpu.Barrier(num_barriers=2, num_arrivals=2)
    kernel = plgpu.kernel(body, out_type=S((64, 64), jnp.float32), scratch_types=[*slots, bars])
    return kernel, (a, b), a.astype(np.float32) @ b.astype(np.float32)


def epilogue(dtype: Any, tiles: Any, optimized: bool = True) -> Case:
    """a @ b, 64 x 64, stored by way of SMEM. tiles: how the result lies there."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, bar):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, bar)
        plgpu.barrier_wait(bar)

        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        value = pl.run_scoped(scope, plgpu.ACC((64, 64))).astype(dtype)
        if optimized:
            o_smem[...] = value
        else:
            plgpu.store(o_smem, value, optimized=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    a, b = (np.eye(64, dtype=jnp.bfloat16) * n for n in (2, 3))
    slots = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILES)] * 2
    scratch = [*slots, plgpu.SMEM((64, 64), dtype, transforms=tiles), plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(body, out_type=S((64, 64), dtype), scratch_types=scratch)
    return kernel, (a, b), a.astype(np.float32) @ b.astype(np.float32)


def specialised(release: bool = True, wait_full: bool = True, wait_empty: bool = True) -> Case:
    """Warpgroup 1 copies, warpgroup 0 computes."""

    def body(x_gmem, o_gmem, x_smem, full, empty):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _():
            @pl.loop(0, 8)
            def _(i):
                if wait_empty:

                    @pl.when(i >= 2)
                    def _():
                        plgpu.barrier_wait(empty.at[i % 2])

                plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[i % 2], full.at[i % 2])

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, 8)
            def _(i):
                if wait_full:
                    plgpu.barrier_wait(full.at[i % 2])
                o_gmem[i] = x_smem[i % 2] * 2
                plgpu.commit_smem()
                if release:
                    plgpu.barrier_arrive(empty.at[i % 2])

    x = normal(8, 64, 128)
    scratch = [plgpu.SMEM((2, 64, 128), jnp.float32), plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)]
    kernel = plgpu.kernel(body, out_type=S(x.shape, x.dtype), num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (x,), 2 * x


def handed_over(sync: bool = True) -> Case:
    """Warpgroup 0 stores into SMEM, warpgroup 1 reads it."""

    def body(o_gmem, s_smem, bar):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            s_smem[...] = jnp.full((64, 128), 3.0)
            plgpu.barrier_arrive(bar)

        @pl.when(wg == 1)
        def _():
            if sync:
                plgpu.barrier_wait(bar)
            o_gmem[...] = s_smem[...]

    scratch = [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
    out = S((64, 128), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out, num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (), np.full((64, 128), 3.0, np.float32)


def rows(where: Callable[[Any], Any] = lambda i: i, source: Callable[[Any], Any] = lambda i: i) -> Case:
    """Each of four CTAs copies one row."""

    def body(x_gmem, o_gmem):
        i = lax.axis_index("i")
        o_gmem[where(i)] = x_gmem[source(i)]

    x = normal(4, 128)
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), grid=(4,), grid_names=("i",)), (x,), x


def stored_by_copies(rows: int = 64, reduction: Any = None) -> Case:
    """Each of four CTAs copies 64 rows into SMEM, and out again, so many rows apart."""

    def body(x_gmem, o_gmem, x_smem, bar):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 64, 64)], x_smem, bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[pl.ds(i * rows, 64)], reduction_op=reduction)
        plgpu.wait_smem_to_gmem(0)

    x, scratch = normal(256, 128), [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
    out = S((192 // 64 * rows + 64, 128), jnp.float32)
    return plgpu.kernel(body, out_type=out, grid=(4,), grid_names=("i",), scratch_types=scratch), (x,), x


def added_to_a_ref() -> Case:
    """Each of four CTAs adds its 64 rows to the same rows of a Ref that is handed to the kernel."""

    def body(x_gmem, total_gmem, x_smem, bar):
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(lax.axis_index("i") * 64, 64)], x_smem, bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(x_smem, total_gmem, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    def added(x):
        total, scratch = jax.new_ref(jnp.ones((64, 128))), [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
        plgpu.kernel(body, grid=(4,), grid_names=("i",), scratch_types=scratch)(x, total)
        return total[...]

    x = normal(256, 128)
    return added, (x,), 1 + np.asarray(x).reshape(4, 64, 128).sum(axis=0)


def passed_on() -> Case:
    """Each of four CTAs stores a row, and reads the next one's, without waiting."""

    def body(x_gmem, part_gmem, o_gmem):
        i = lax.axis_index("i")
        part_gmem[i] = x_gmem[i]
        o_gmem[i] = part_gmem[(i + 1) % 4]

    x = normal(4, 128)
    kernel = plgpu.kernel(body, out_type=(S(x.shape, x.dtype),) * 2, grid=(4,), grid_names=("i",))
    return lambda x: kernel(x)[1], (x,), np.roll(x, -1, 0)


def turns(both: bool = True) -> Case:
    """Two warpgroups meet at a barrier of two arrivals."""

    def body(o_gmem, turn):
        wg = lax.axis_index("wg")
        pl.when((wg == 0) | both)(lambda: plgpu.barrier_arrive(turn))
        plgpu.barrier_wait(turn)
        o_gmem[wg] = jnp.zeros((128,))

    out, scratch = S((2, 128), jnp.float32), [plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(body, out_type=out, num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (), np.zeros((2, 128), np.float32)


def multicast(all_copy: bool = True) -> Case:
    """The two CTAs of a cluster share one copy."""

    def body(x_gmem, o_gmem, x_smem, bar):
        c = lax.axis_index("c")

        def copy():
            plgpu.copy_gmem_to_smem(x_gmem, x_smem, bar, collective_axes="c")

        pl.when((c == 0) | all_copy)(copy)
        plgpu.barrier_wait(bar)
        o_gmem[c] = x_smem[...]

    x, scratch = normal(64, 128), [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
    out = S((2, 64, 128), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, cluster=(2,), cluster_names=("c",))
    return kernel, (x,), np.stack([x, x])


def ragged(n: int = 200) -> Case:
    """A copy in tiles of 64 rows, the last of which reaches beyond the end."""

    def body(x_gmem, o_gmem, x_smem, bar):
        part = pl.ds(lax.axis_index("i") * 64, 64)
        plgpu.copy_gmem_to_smem(x_gmem.at[part], x_smem, bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[part])
        plgpu.wait_smem_to_gmem(0)

    x, scratch = normal(n, 128), [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
    kernel = plgpu.kernel(
        body, out_type=S(x.shape, x.dtype), grid=(-(-n // 64),), grid_names=("i",), scratch_types=scratch
    )
    return kernel, (x,), x


def pipeline(steps: int = 16, depth: int = 2) -> Case:
    """o = 2 x by emit_pipeline, with an output."""

    def body(x_gmem, o_gmem):
        def step(_, x_smem, o_smem):
            o_smem[...] = x_smem[...] * 2

        spec = plgpu.BlockSpec((64, 128), lambda i: (i, 0))
        plgpu.emit_pipeline(step, grid=(steps,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=depth)(
            x_gmem, o_gmem
        )

    x = normal(64 * steps, 128)
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype)), (x,), 2 * x


def specialised_pipeline() -> Case:
    """o = 2 x by emit_pipeline_warp_specialized, with an output."""

    def body(x_gmem, o_gmem):
        def step(_, x_smem, o_smem):
            o_smem[...] = x_smem[...] * 2

        spec = plgpu.BlockSpec((64, 128), lambda i, j: (i, j))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(4, 4),
            memory_registers=40,
            num_compute_wgs=1,
            wg_axis="wg",
            in_specs=[spec],
            out_specs=[spec],
            max_concurrent_steps=2,
        )(x_gmem, o_gmem)

    x = normal(256, 512)
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), num_threads=2, thread_name="wg"), (x,), 2 * x


def counted(signals: bool = True) -> Case:
    """The last CTA waits at a semaphore in GMEM for all others, and sums what they stored."""

    def body(x_gmem, part_gmem, o_gmem, done):
        i = lax.axis_index("i")
        part_gmem[i] = x_gmem[i]
        pl.when((i > 0) | signals)(lambda: pl.semaphore_signal(done))

        @pl.when(i == 0)
        def _():
            pl.semaphore_wait(done, 4)
            o_gmem[...] = part_gmem[0] + part_gmem[1] + part_gmem[2] + part_gmem[3]

    x = normal(4, 128)
    out = (S(x.shape, x.dtype), S((128,), x.dtype))
    kernel = plgpu.kernel(body, out_type=out, grid=(4,), grid_names=("i",), scratch_types=[plgpu.SemaphoreType.REGULAR])
    return lambda x: kernel(x)[1], (x,), x.sum(0)


def scheduled() -> Case:
    """Rows that CTAs take over from those that have not started."""

    def body(x_gmem, o_gmem):
        @plgpu.dynamic_scheduling_loop(("i",))
        def _(info):
            o_gmem[info.index[0]] = x_gmem[info.index[0]] * 2

    x = normal(8, 128)
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), grid=(8,), grid_names=("i",)), (x,), 2 * x


def refilled(commit: bool = False) -> Case:
    """Reads a slot, and copies into it again."""

    def body(x_gmem, o_gmem, x_smem, bar):
        for i in range(3):
            part = pl.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(x_gmem.at[part], x_smem, bar)
            plgpu.barrier_wait(bar)
            o_gmem[part] = x_smem[...] * 2
            if commit:
                plgpu.commit_smem()

    x, scratch = normal(192, 128), [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), scratch_types=scratch), (x,), 2 * x


def held(slots: int) -> Case:
    """Holds so many times 128 KB of SMEM."""

    def body(x_gmem, o_gmem, x_smem, bar):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem.at[0], bar)
        plgpu.barrier_wait(bar)
        o_gmem[...] = x_smem[0]

    x, scratch = normal(256, 128), [plgpu.SMEM((slots, 256, 128), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=S(x.shape, x.dtype), scratch_types=scratch), (x,), x


def bar(operation: str, number: Any, threads: int = 256) -> None:
    """A named barrier of PTX, which Pallas has no name for."""
    if isinstance(number, int):
        plgpu.inline_mgpu()(lambda _: inline_ptx(f"bar.{operation} {number}, {threads};"))()
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def of_a_number(_, which):
        inline_ptx(f"bar.{operation} $0, {threads};", which.registers[()])

    of_a_number(number)


def by_name(sync: bool = True, arrives: bool = True, computed: bool = False, numbers: int = 2) -> Case:
    """Warpgroup 0 stores two halves into SMEM, warpgroup 1 reads each; a named barrier for each orders them."""

    def body(o_gmem, s_smem):
        wg = lax.axis_index("wg")

        def half(i):
            number = 4 + i % numbers

            @pl.when(wg == 0)
            def _():
                s_smem[i] = jnp.full((64, 128), 3.0)
                if arrives:
                    bar("arrive", number)

            @pl.when(wg == 1)
            def _():
                if sync:
                    bar("sync", number)
                o_gmem[i] = s_smem[i]

        if computed:
            pl.loop(0, 2)(half)
        else:
            half(0)
            half(1)

    out, scratch = S((2, 64, 128), jnp.float32), [plgpu.SMEM((2, 64, 128), jnp.float32)]
    kernel = plgpu.kernel(body, out_type=out, num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (), np.full((2, 64, 128), 3.0, np.float32)


def shared(rows: int = 64) -> Case:
    """Two warpgroups copy a half of x each, into one Ref, and store it from another one that lies in the same memory.
    rows: how far apart they lie there."""

    def body(x_gmem, o_gmem, refs, bars):
        (x_smem,), (o_smem,) = refs
        wg = lax.axis_index("wg")
        half, part = pl.ds(wg * 64, 64), pl.ds(wg * rows, 64)
        plgpu.copy_gmem_to_smem(x_gmem.at[half], x_smem.at[half], bars.at[wg])
        plgpu.barrier_wait(bars.at[wg])
        x = x_smem[half]
        o_smem[part] = x * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[part], o_gmem.at[half])
        plgpu.wait_smem_to_gmem(0)

    x, tile = normal(128, 128), plgpu.SMEM((128, 128), jnp.float32)
    scratch = [plgpu.RefUnion([tile], [tile]), plgpu.Barrier(num_barriers=2)]
    kernel = plgpu.kernel(body, out_type=S(x.shape, x.dtype), num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (x,), 2 * x


@plgpu.inline_mgpu()
def wait_load(_: Any) -> None:
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)


@plgpu.inline_mgpu()
def fence_tensor(_: Any) -> None:
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def in_tmem(wait: bool = True, ordered: bool = True, by_hand: bool = False) -> Case:
    """Two products, one after the other in the same accumulator in TMEM: warpgroup 0 multiplies, warpgroup 1 stores.
    by_hand: it waits and fences by instructions of a level below Pallas."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, acc_tmem, loaded, done, free):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
            plgpu.barrier_wait(loaded)
            for i in range(2):
                if i:
                    plgpu.barrier_wait(free)
                plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(i * 128, 128)], a_smem.at[i], loaded)
                plgpu.barrier_wait(loaded)
                plgpu.tcgen05_mma(acc_tmem, a_smem.at[i], b_smem, done, accumulate=False)

        @pl.when(wg == 1)
        def _():
            for i in range(2):
                plgpu.barrier_wait(done)
                o_gmem[pl.ds(i * 128, 128)] = plgpu.async_load_tmem(acc_tmem)
                if by_hand:
                    wait_load()
                    fence_tensor()
                elif wait:
                    plgpu.wait_load_tmem()
                plgpu.barrier_arrive(free)

    a, b = normal(256, 64, dtype=jnp.bfloat16), normal(64, 128, dtype=jnp.bfloat16, seed=1)
    scratch = [
        plgpu.SMEM((2, 128, 64), jnp.bfloat16, transforms=TILES),
        plgpu.SMEM((64, 128), jnp.bfloat16, transforms=TILES),
        plgpu.TMEM((128, 128), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(orders_tensor_core=True),
        plgpu.Barrier(orders_tensor_core=ordered),
    ]
    out = S((256, 128), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out, num_threads=2, thread_name="wg", scratch_types=scratch)
    return kernel, (a, b), a.astype(np.float32) @ b.astype(np.float32)


def through_tmem(commit: bool = True) -> Case:
    """Stores into TMEM, and loads it again."""

    def body(x_gmem, o_gmem, s_tmem):
        x = plgpu.load(x_gmem, layout=plgpu.Layout.TCGEN05, optimized=False)
        plgpu.async_store_tmem(s_tmem, x)
        if commit:
            plgpu.commit_tmem()
        o_gmem[...] = plgpu.async_load_tmem(s_tmem)

    x = normal(128, 128)
    kernel = plgpu.kernel(body, out_type=S(x.shape, x.dtype), scratch_types=[plgpu.TMEM(x.shape, jnp.float32)])
    return kernel, (x,), x


def partly_loaded(stored: int = 40) -> Case:
    """Copies 40 of 64 rows into SMEM, multiplies all of them, and stores so many."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, bar):
        plgpu.copy_gmem_to_smem(a_gmem.at[pl.ds(0, 40)], a_smem.at[pl.ds(0, 40)], bar)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, bar)
        plgpu.barrier_wait(bar)

        def scope(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_smem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, stored)], o_gmem)
        plgpu.wait_smem_to_gmem(0)

    a, b = normal(64, 64, dtype=jnp.bfloat16), normal(64, 64, dtype=jnp.bfloat16, seed=1)
    slots = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILES)] * 2
    scratch = [*slots, plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(body, out_type=S((stored, 64), jnp.float32), scratch_types=scratch)
    return kernel, (a, b), (a.astype(np.float32) @ b.astype(np.float32))[:stored]


RIGHT: dict[str, Callable[[], Case]] = {
    "copies": double,
    "matmul": matmul,
    "A from registers": lambda: matmul(in_registers=True),
    "producer and consumer": specialised,
    "handed over": handed_over,
    "rows": rows,
    "turns": turns,
    "multicast": multicast,
    "ragged": ragged,
    "emit_pipeline": pipeline,
    "emit_pipeline_warp_specialized": specialised_pipeline,
    "semaphore": counted,
    "dynamic_scheduling_loop": scheduled,
    "refilled": lambda: refilled(commit=True),
    "stored by copies": stored_by_copies,
    "added to a Ref by copies": added_to_a_ref,
    "accumulators in TMEM": in_tmem,
    "fenced by hand": lambda: in_tmem(ordered=False, by_hand=True),
    "through TMEM": through_tmem,
    "named barrier": by_name,
    "named barriers, by numbers that are computed": lambda: by_name(computed=True),
    "memory shared by two Refs": shared,
    "rows that nobody stores": partly_loaded,
}

# name -> (kernel, kind of the finding, text of the reader's line, part of what is said)
MISTAKES: dict[str, tuple[Callable[[], Case], str, str, str]] = {
    "no barrier_wait": (lambda: double(wait=False), "no-wait", "o_smem[i % 2] = ", "plgpu.barrier_wait"),
    "no commit_smem": (lambda: double(commit=False), "no-commit", "copy_smem_to_gmem(o_smem", "plgpu.commit_smem()"),
    "output slot reused": (lambda: double(wait_out=False), "reused", "o_smem[i % 2] = ", "wait_smem_to_gmem"),
    "no last wait": (lambda: double(last=False), "store-in-flight", "copy_smem_to_gmem(o_smem", "wait_smem_to_gmem(0)"),
    "two copies, one arrival": (lambda: double(copies=2), "no-wait", "o_smem[i % 2] = ", "plgpu.barrier_wait"),
    "num_arrivals=2, one copy": (lambda: double(arrivals=2), "deadlock", "barrier_wait(bar", "[0] has 1 of 2 arrivals"),
    "waits twice": (lambda: double(waits=2), "deadlock", "barrier_wait(bar", "0 of 1 arrival in its round 1"),
    "never stored": (lambda: double(store=False), "output-unwritten", "def body(x_gmem, o_gmem, x_smem", "o_gmem"),
    "no wgmma_wait": (lambda: matmul(wait=False), "reused", "copy_gmem_to_smem(a_gmem", "plgpu.wgmma_wait(0)"),
    "no wait for full": (lambda: specialised(wait_full=False), "unwritten", "o_gmem[i] = ", "nobody has written"),
    "no wait for empty": (lambda: specialised(wait_empty=False), "no-wait", "o_gmem[i] = ", "let it wait until"),
    "slot never released": (lambda: specialised(release=False), "deadlock", "barrier_wait(", "waits for ever"),
    "warpgroups not in step": (lambda: handed_over(sync=False), "race", "o_gmem[...] = s_smem", "warpgroup 0"),
    "CTAs store one row": (lambda: rows(where=lambda i: 0), "race", "o_gmem[where(i)]", "CTA 0"),
    "CTAs copy into the same rows": (lambda: stored_by_copies(32), "race", "copy_smem_to_gmem(x_smem", "by CTA 0"),
    "CTAs add to garbage": (lambda: stored_by_copies(0, "add"), "unwritten", "copy_smem_to_gmem(x_smem", "8,192"),
    "a row of another CTA": (passed_on, "race", "part_gmem[i] = x_gmem[i]", "nothing orders that and the read of it"),
    "a row that is not there yet": (passed_on, "unwritten", "o_gmem[i] = part_gmem", "nobody has written"),
    "GMEM out of bounds": (lambda: rows(source=lambda i: i + 1), "bounds", "o_gmem[where(i)]", "index 4"),
    "half arrives": (lambda: turns(both=False), "deadlock", "barrier_wait(turn", "1 of 2 arrivals"),
    "multicast by one CTA": (lambda: multicast(all_copy=False), "deadlock", "barrier_wait(bar", "multicast"),
    "512 KB of SMEM": (lambda: held(4), "smem", "def body(x_gmem, o_gmem, x_smem", "512"),
    "no wait_load_tmem": (lambda: in_tmem(wait=False), "unwaited-load", "plgpu.tcgen05_mma(", "plgpu.wait_load_tmem()"),
    "barrier does not order": (lambda: in_tmem(ordered=False), "reused", "plgpu.tcgen05_mma(", "orders_tensor_core"),
    "no commit_tmem": (lambda: through_tmem(commit=False), "no-wait", "async_load_tmem(", "plgpu.commit_tmem()"),
    "named barrier without an arrival": (lambda: by_name(arrives=False), "deadlock", 'inline_ptx(f"bar', "128 of 256"),
    "one named barrier for two": (lambda: by_name(numbers=1), "deadlock", 'inline_ptx(f"bar', "128 of 256"),
    "no named barrier": (lambda: by_name(sync=False), "race", "o_gmem[i] = s_smem[i]", "warpgroup 0"),
    "shared memory reused early": (lambda: shared(rows=32), "race", "o_smem[part] = ", "nothing orders that"),
    "garbage stored": (lambda: partly_loaded(stored=48), "unwritten", "plgpu.wgmma(acc, a_smem", "1,536 elements"),
    "semaphore one short": (lambda: counted(signals=False), "deadlock", "semaphore_wait(done", "3 of 4"),
}  # fmt: skip
