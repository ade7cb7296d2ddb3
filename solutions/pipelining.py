"""The answers to puzzles/pipelining.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
    a_in = pltpu.make_async_copy(a_hbm, a_buf, a_sem)
    b_in = pltpu.make_async_copy(b_hbm, b_buf, b_sem)
    a_in.start()
    b_in.start()
    a_in.wait()
    o_buf[...] = jax.nn.silu(a_buf[...])
    b_in.wait()
    o_buf[...] = o_buf[...] * b_buf[...]
    out = pltpu.make_async_copy(o_buf, o_hbm, o_sem)
    out.start()
    out.wait()


# Puzzle 2
def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        rows = pl.ds(t * bm, bm)
        copy_in = pltpu.make_async_copy(x_hbm.at[rows], x_buf, sem)
        copy_in.start()
        copy_in.wait()
        o_buf[...] = jax.nn.silu(x_buf[...])
        copy_out = pltpu.make_async_copy(o_buf, o_hbm.at[rows], sem)
        copy_out.start()
        copy_out.wait()


# Puzzle 3
def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def copy(t):
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[lax.rem(t, 2)], sem)

    copy(0).start()
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, num_tiles)
    def _(t):
        copy(t).wait()

        @pl.when(t + 1 < num_tiles)
        def _():
            copy(t + 1).start()

        x = x_buf[lax.rem(t, 2)]
        o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)


# Puzzle 4
def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def copy(t):
        slot = lax.rem(t, 3)
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[slot], sems.at[slot])

    copy(0).start()
    copy(1).start()
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, num_tiles)
    def _(t):
        copy(t).wait()

        @pl.when(t + 2 < num_tiles)
        def _():
            copy(t + 2).start()

        x = x_buf[lax.rem(t, 3)]
        o_ref[...] = jnp.maximum(o_ref[...], jnp.max(jnp.abs(x), axis=0, keepdims=True))


# Puzzle 5
def outer_step(t, a_ref, b_ref, o_hbm, o_buf, sems, *, bm):
    slot = lax.rem(t, 2)

    @pl.when(t >= 2)
    def _():
        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()

    o_buf[slot] = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
    store_tile(o_hbm, o_buf, sems, t, bm).start()


# Puzzle 6
def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def load(t):
        slot = lax.rem(t, 2)
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[slot], in_sems.at[slot])

    def store(t):
        slot = lax.rem(t, 2)
        return pltpu.make_async_copy(o_buf.at[slot], o_hbm.at[pl.ds(t * bm, bm)], out_sems.at[slot])

    load(0).start()

    @pl.loop(0, num_tiles)
    def _(t):
        @pl.when(t + 1 < num_tiles)
        def _():
            load(t + 1).start()

        load(t).wait()

        @pl.when(t >= 2)
        def _():
            store(t - 2).wait()

        slot = lax.rem(t, 2)
        o_buf[slot] = jax.nn.silu(x_buf[slot])
        store(t).start()

    for t in range(max(0, num_tiles - 2), num_tiles):
        store(t).wait()


# Puzzle 7
def gate_tile(a_ref, b_ref, o_ref):
    o_ref[...] = jax.nn.silu(a_ref[...]) * b_ref[...]


def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
    M, N = a_hbm.shape
    tile = pl.BlockSpec((bm, bn), lambda i, j: (i, j))
    pipeline = pltpu.emit_pipeline(gate_tile, grid=(M // bm, N // bn), in_specs=[tile, tile], out_specs=[tile])
    pipeline(a_hbm, b_hbm, o_hbm)


# Puzzle 8
def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
    num_tiles = w_hbm.shape[0] // bk

    def copy(t):
        slot = lax.rem(t, slots)
        return pltpu.make_async_copy(w_hbm.at[pl.ds(t * bk, bk)], w_buf.at[slot], sems.at[slot])

    for t in range(min(slots - 1, num_tiles)):
        copy(t).start()
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, num_tiles)
    def _(t):
        copy(t).wait()

        @pl.when(t + slots - 1 < num_tiles)
        def _():
            copy(t + slots - 1).start()

        x = x_ref[:, pl.ds(t * bk, bk)]
        o_ref[...] += jnp.dot(x, w_buf[lax.rem(t, slots)], preferred_element_type=jnp.float32)
