"""Kernels of the kinds that JAX's guides teach (docs.jax.dev/en/latest/pallas), written for this table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foreign_jobs import BF16, Job, integers, job, normal
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ANY = pl.ANY


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@job("guides", "quickstart: vectors added")
def vectors() -> Job:
    def kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + y_ref[...]

    return lambda x, y: pl.pallas_call(kernel, out_shape=like(x))(x, y), (normal(128), normal(128, seed=1))


@job("guides", "quickstart: iota by program_id")
def iota() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.full((8, 128), pl.program_id(0), jnp.int32) + x_ref[0, 0]

    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    zeros = pl.BlockSpec((8, 128), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct((64, 128), jnp.int32)
    call = pl.pallas_call(kernel, grid=8, in_specs=[zeros], out_specs=spec, out_shape=out)
    return lambda x: call(x), (np.zeros((8, 128), np.int32),)


def matmul(
    x: Any, y: Any, *, bm: int = 128, bk: int = 128, bn: int = 128, transposed: bool = False, act: Any = None
) -> Any:
    def kernel(x_ref: Any, y_ref: Any, o_ref: Any, acc_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def zero() -> None:
            acc_ref[...] = jnp.zeros_like(acc_ref)

        dims = ((1,), (1 if transposed else 0,)), ((), ())
        acc_ref[...] += jax.lax.dot_general(x_ref[...], y_ref[...], dims, preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def write() -> None:
            o_ref[...] = (act(acc_ref[...]) if act else acc_ref[...]).astype(o_ref.dtype)

    m, k = x.shape
    n = y.shape[0 if transposed else 1]
    y_spec = (
        pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)) if transposed else pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))
    )
    return pl.pallas_call(
        kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), y_spec],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)


def matmul_job(dtype: Any = np.float32, **options: Any) -> Job:
    return functools.partial(matmul, **options), (normal(256, 256, dtype=dtype), normal(256, 256, dtype=dtype, seed=1))


job("guides", "matmul: f32")(matmul_job)
job("guides", "matmul: bf16")(functools.partial(matmul_job, BF16))
job("guides", "matmul: right side transposed")(functools.partial(matmul_job, BF16, transposed=True))
job("guides", "matmul: with an activation")(functools.partial(matmul_job, BF16, act=jax.nn.relu))
job("guides", "matmul: tall blocks")(functools.partial(matmul_job, bm=256, bk=128, bn=128))


@job("guides", "matmul: a batch of them, by vmap", reference=np.matmul)
def matmul_batch() -> Job:
    return jax.vmap(matmul), (normal(2, 128, 256), normal(2, 256, 128, seed=1))


@job("guides", "pipelining: a sum, revisited")
def reduction() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def zero() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    def total(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(2, 2, x.shape[0]),
            in_specs=[pl.BlockSpec((None, 64, 128), lambda i, j, k: (k, i, j))],
            out_specs=pl.BlockSpec((64, 128), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        )(x)

    return total, (normal(8, 128, 256),)


@job("guides", "pipelining: emit_pipeline")
def pipeline() -> Job:
    def kernel(x_hbm: Any, y_hbm: Any, o_hbm: Any) -> None:
        def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...] + y_ref[...]

        spec = pl.BlockSpec((64, 128), lambda i, j: (i, j))
        pltpu.emit_pipeline(body, grid=(4, 2), in_specs=[spec, spec], out_specs=[spec])(x_hbm, y_hbm, o_hbm)

    specs = [pl.BlockSpec(memory_space=ANY)] * 2
    call = lambda x, y: pl.pallas_call(kernel, in_specs=specs, out_specs=specs[0], out_shape=like(x))(x, y)  # noqa: E731
    return call, (normal(256, 256), normal(256, 256, seed=1))


@job("guides", "pipelining: three buffers")
def buffered() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def call(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(8,),
            in_specs=[pl.BlockSpec((32, 128), lambda i: (i, 0), pipeline_mode=pl.Buffered(3))],
            out_specs=pl.BlockSpec((32, 128), lambda i: (i, 0)),
            out_shape=like(x),
        )(x)

    return call, (normal(256, 128),)


@job("guides", "pipelining: double buffering by hand")
def by_hand() -> Job:
    def kernel(x_hbm: Any, o_ref: Any, buffers: Any, sems: Any) -> None:
        def copy(i: Any, slot: Any) -> Any:
            return pltpu.make_async_copy(x_hbm.at[pl.ds(i * 32, 32)], buffers.at[slot], sems.at[slot])

        copy(0, 0).start()
        o_ref[...] = jnp.zeros_like(o_ref)

        def body(i: Any, _: Any) -> None:
            slot = jax.lax.rem(i, 2)

            @pl.when(i + 1 < 8)
            def ahead() -> None:
                copy(i + 1, 1 - slot).start()

            copy(i, slot).wait()
            o_ref[...] += buffers[slot]

        jax.lax.fori_loop(0, 8, body, None)

    def call(x: Any) -> Any:
        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=ANY)],
            out_shape=jax.ShapeDtypeStruct((32, 128), x.dtype),
            scratch_shapes=[pltpu.VMEM((2, 32, 128), x.dtype), pltpu.SemaphoreType.DMA((2,))],
        )(x)

    return call, (normal(256, 128),)


@job("guides", "sparse: a dynamic slice by prefetch")
def dynamic_slice() -> Job:
    def kernel(where_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    def call(where: Any, x: Any) -> Any:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec((64, 128), lambda i, where: (where[0], where[1]))],
            out_specs=pl.BlockSpec((64, 128), lambda i, where: (0, 0)),
        )
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((64, 128), x.dtype))(where, x)

    return call, (np.array([2, 1], np.int32), normal(256, 256))


@job("guides", "sparse: blocks times dense")
def block_sparse() -> Job:
    def kernel(rows_ref: Any, cols_ref: Any, x_ref: Any, y_ref: Any, o_ref: Any, acc_ref: Any) -> None:
        del cols_ref
        step = pl.program_id(1)
        fresh = (step == 0) | (rows_ref[step] != rows_ref[jnp.maximum(step - 1, 0)])

        @pl.when(fresh)
        def zero() -> None:
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
        last = pl.num_programs(1) - 1

        @pl.when((step == last) | (rows_ref[step] != rows_ref[jnp.minimum(step + 1, last)]))
        def write() -> None:
            o_ref[...] = acc_ref[...]

    def call(rows: Any, cols: Any, x: Any, y: Any) -> Any:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(2, 6),
            in_specs=[
                pl.BlockSpec((None, 128, 128), lambda j, b, rows, cols: (b, 0, 0)),
                pl.BlockSpec((128, 128), lambda j, b, rows, cols: (cols[b], j)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda j, b, rows, cols: (rows[b], j)),
            scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)],
        )
        out = jax.ShapeDtypeStruct((512, 256), jnp.float32)
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=out)(rows, cols, x, y)

    rows, cols = np.array([0, 0, 1, 2, 2, 3], np.int32), np.array([0, 2, 1, 0, 3, 2], np.int32)
    return call, (rows, cols, normal(6, 128, 128), normal(512, 256, seed=1))


@job("guides", "sparse: rows gathered one by one")
def gather_rows() -> Job:
    def kernel(ids_ref: Any, x_hbm: Any, o_ref: Any, sem: Any) -> None:
        first = pl.program_id(0) * 8
        copies = [pltpu.make_async_copy(x_hbm.at[ids_ref[first + n]], o_ref.at[n], sem) for n in range(8)]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    def call(ids: Any, x: Any) -> Any:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4,),
            in_specs=[pl.BlockSpec(memory_space=ANY)],
            out_specs=pl.BlockSpec((8, 128), lambda i, ids: (i, 0)),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        )
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((32, 128), x.dtype))(ids, x)

    return call, (integers(0, 256, 32), normal(256, 128))


@job("guides", "core_map: pl.kernel on a mesh of cores")
def cores() -> Job:
    def call(x: Any) -> Any:
        mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

        @functools.partial(pl.kernel, out_type=like(x), mesh=mesh, scratch_types=[pltpu.VMEM((256, 128), x.dtype)])
        def kernel(x_hbm: Any, o_hbm: Any, block: Any) -> None:
            pltpu.sync_copy(x_hbm, block)
            block[...] = block[...] + 1
            pltpu.sync_copy(block, o_hbm)

        return kernel(x)

    return call, (normal(256, 128),)


@job("guides", "quantised matmul, int8")
def int8_matmul() -> Job:
    def kernel(x_ref: Any, y_ref: Any, s_ref: Any, o_ref: Any) -> None:
        product = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.int32)
        o_ref[...] = product.astype(jnp.float32) * s_ref[...]

    def call(x: Any, y: Any, s: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(2, 2),
            in_specs=[
                pl.BlockSpec((128, 256), lambda i, j: (i, 0)),
                pl.BlockSpec((256, 128), lambda i, j: (0, j)),
                pl.BlockSpec((1, 128), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((256, 256), jnp.float32),
        )(x, y, s)

    return call, (
        integers(-128, 128, 256, 256).astype(np.int8),
        integers(-128, 128, 256, 256, seed=1).astype(np.int8),
        normal(1, 256),
    )


@job("guides", "softmax of rows")
def softmax() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        x = x_ref[...]
        e = jnp.exp(x - x.max(axis=-1, keepdims=True))
        o_ref[...] = e / e.sum(axis=-1, keepdims=True)

    spec = pl.BlockSpec((32, 256), lambda i: (i, 0))
    return lambda x: pl.pallas_call(kernel, grid=(4,), in_specs=[spec], out_specs=spec, out_shape=like(x))(x), (
        normal(128, 256),
    )


@job("guides", "in place, by an alias")
def in_place() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = -x_ref[...]

    def call(x: Any) -> Any:
        spec = pl.BlockSpec((32, 128), lambda i: (i + 1, 0))
        return pl.pallas_call(
            kernel, grid=(2,), in_specs=[spec], out_specs=spec, out_shape=like(x), input_output_aliases={0: 0}
        )(x)

    return call, (normal(128, 128),)


@job("guides", "run_scoped: scratch inside of a kernel")
def scoped() -> Job:
    def kernel(x_hbm: Any, o_hbm: Any) -> None:
        def body(block: Any, sem: Any) -> None:
            pltpu.make_async_copy(x_hbm, block, sem).start()
            pltpu.make_async_copy(x_hbm, block, sem).wait()
            block[...] = jnp.exp(block[...])
            pltpu.sync_copy(block, o_hbm)

        pl.run_scoped(body, pltpu.VMEM((64, 128), jnp.float32), pltpu.SemaphoreType.DMA)

    specs = pl.BlockSpec(memory_space=ANY)
    call = lambda x: pl.pallas_call(kernel, in_specs=[specs], out_specs=specs, out_shape=like(x))(x)  # noqa: E731
    return call, (normal(64, 128),)


@job("guides", "block specs: windows that overlap")
def windows() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[:8] + x_ref[1:9] + x_ref[8:]

    def call(x: Any) -> Any:
        window = pl.BlockSpec((pl.Element(16), pl.Element(128)), lambda i: (8 * i, 0))
        out = jax.ShapeDtypeStruct((56, 128), x.dtype)
        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(7,), in_specs=[window], out_specs=rows, out_shape=out)(x)

    return call, (normal(64, 128),)


@job("guides", "block specs: a grid whose size is a value")
def dynamic_grid() -> Job:
    def kernel(x_ref: Any, _: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def call(n: Any, x: Any) -> Any:
        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            kernel, grid=(n[0],), in_specs=[rows, rows], out_specs=rows, out_shape=like(x), input_output_aliases={1: 0}
        )(x, jnp.zeros_like(x))

    return call, (np.array([3], np.int32), normal(64, 128))


def dropped(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


@job("guides", "random numbers: a key is an operand", reference=dropped)
def keyed() -> Job:
    def kernel(key_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = dropped(key_ref[...], x_ref[...])

    def call(key: Any, x: Any) -> Any:
        specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()]
        return pl.pallas_call(kernel, in_specs=specs, out_shape=like(x))(key, x)

    return call, (jax.random.key(7), normal(64, 128))


@job("guides", "core_map: Refs that are made outside")
def refs_outside() -> Job:
    def call(x: Any) -> Any:
        x_ref, o_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

        @pl.core_map(pltpu.create_tensorcore_mesh("core", num_cores=1))
        def _() -> None:
            def body(block: Any) -> None:
                pltpu.sync_copy(x_ref, block)
                block[...] = jnp.tanh(block[...])
                pltpu.sync_copy(block, o_ref)

            pl.run_scoped(body, pltpu.VMEM(x.shape, x.dtype))

        return o_ref[...]

    return call, (normal(64, 128),)


@job("guides", "core_map: two cores share the rows")
def two_cores() -> Job:
    def call(x: Any) -> Any:
        half = x.shape[0] // 2

        def body(x_hbm: Any, o_hbm: Any, block: Any) -> None:
            mine = pl.ds(jax.lax.axis_index("core") * half, half)
            pltpu.sync_copy(x_hbm.at[mine], block)
            block[...] = jnp.exp(block[...])
            pltpu.sync_copy(block, o_hbm.at[mine])

        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
        scratch = [pltpu.VMEM((half, x.shape[1]), x.dtype)]
        return pl.kernel(body, out_type=like(x), mesh=mesh, scratch_types=scratch)(x)

    return call, (normal(128, 128),)


@job("guides", "copies whose size is a value")
def ragged_copy() -> Job:
    def kernel(n_ref: Any, x_hbm: Any, o_ref: Any, sem: Any) -> None:
        o_ref[...] = jnp.zeros_like(o_ref)
        some = pl.ds(0, pl.multiple_of(n_ref[0], 8))
        pltpu.async_copy(x_hbm.at[some], o_ref.at[some], sem).wait()

    def call(n: Any, x: Any) -> Any:
        specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=ANY)]
        return pl.pallas_call(kernel, in_specs=specs, out_shape=like(x), scratch_shapes=[pltpu.SemaphoreType.DMA])(n, x)

    return call, (np.array([24], np.int32), normal(64, 128))


def unpacked(x: Any) -> Any:
    """Two rows of bfloat16 out of each row of words: the lower halves, then the upper ones. Doubled."""
    halves = np.stack([x & 0xFFFF, x >> 16], axis=1).astype(np.uint16).view(BF16)
    return 2 * halves.reshape(-1, x.shape[1])


@job("guides", "a Ref of 32-bit words, read as bfloat16", reference=unpacked)
def words() -> Job:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref.bitcast(BF16)[...] * 2

    def call(x: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((2 * x.shape[0], x.shape[1]), BF16))(x)

    halves = normal(2, 64, 128, dtype=BF16).view(np.uint16).astype(np.uint32)
    return call, (halves[0] | halves[1] << 16,)


@job("guides", "pipelining: a matmul by emit_pipeline")
def inner_matmul() -> Job:
    def kernel(x_hbm: Any, y_hbm: Any, o_hbm: Any, acc_ref: Any) -> None:
        def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
            @pl.when(pl.program_id(1) == 0)
            def zero() -> None:
                acc_ref[...] = jnp.zeros_like(acc_ref)

            acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

            @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
            def write() -> None:
                o_ref[...] = acc_ref[...].astype(o_ref.dtype)

        pltpu.emit_pipeline(
            body,
            grid=(2, 4),
            in_specs=[pl.BlockSpec((128, 128), lambda i, k: (i, k)), pl.BlockSpec((128, 256), lambda i, k: (k, 0))],
            out_specs=[pl.BlockSpec((128, 256), lambda i, k: (i, 0))],
        )(x_hbm, y_hbm, o_hbm)

    def call(x: Any, y: Any) -> Any:
        hbm = pl.BlockSpec(memory_space=ANY)
        return pl.pallas_call(
            kernel,
            in_specs=[hbm, hbm],
            out_specs=hbm,
            out_shape=jax.ShapeDtypeStruct((256, 256), x.dtype),
            scratch_shapes=[pltpu.VMEM((128, 256), jnp.float32)],
        )(x, y)

    return call, (normal(256, 512, dtype=BF16), normal(512, 256, dtype=BF16, seed=1))


@job("guides", "a gradient by custom_vjp, each way a kernel")
def gradient() -> Job:
    def both(x_ref: Any, g_ref: Any, o_ref: Any) -> None:
        o_ref[...] = g_ref[...] * jnp.cos(x_ref[...])

    def forward(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.sin(x_ref[...])

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return pl.pallas_call(forward, out_shape=like(x))(x)

    def backward(x: Any, g: Any) -> Any:
        return (pl.pallas_call(both, out_shape=like(x))(x, g),)

    sine.defvjp(lambda x: (sine(x), x), backward)
    return jax.grad(lambda x: sine(x).sum()), (normal(64, 128),)


@job("guides", "loops: a search by while_loop")
def search() -> Job:
    def kernel(table_ref: Any, x_ref: Any, o_ref: Any) -> None:
        def more(state: Any) -> Any:
            low, high = state
            return high - low > 1

        def halve(state: Any) -> Any:
            low, high = state
            middle = (low + high) // 2
            right = table_ref[middle] <= x_ref[0]
            return jnp.where(right, middle, low), jnp.where(right, high, middle)

        o_ref[0] = jax.lax.while_loop(more, halve, (jnp.int32(0), jnp.int32(64)))[0]

    def call(table: Any, x: Any) -> Any:
        smem = pl.BlockSpec(memory_space=pltpu.SMEM)
        out = jax.ShapeDtypeStruct((1,), jnp.int32)
        return pl.pallas_call(kernel, in_specs=[smem, smem], out_specs=smem, out_shape=out)(table, x)

    return call, (np.arange(64, dtype=np.int32) * 3, np.array([100], np.int32))
