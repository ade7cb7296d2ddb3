"""Wrong answers to puzzles/pipelining.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% pipelining/1: nobody waits for the first copy in
# whole_gate_kernel:
# -    a_in.wait()

# %% pipelining/1: nobody waits for the second copy in
# whole_gate_kernel:
# -    b_in.wait()

# %% pipelining/1: nobody waits for the copy out
# whole_gate_kernel:
# -    out.wait()

# %% pipelining/1: the second copy in is never started
# whole_gate_kernel:
# -    b_in.start()

# %% pipelining/1: one copy after the other
# whole_gate_kernel:
# -    b_in.start()
# -    a_in.wait()
# -    o_buf[...] = jax.nn.silu(a_buf[...])
# +    a_in.wait()
# +    o_buf[...] = jax.nn.silu(a_buf[...])
# +    b_in.start()

# %% pipelining/1: both are waited for before anything is computed
# whole_gate_kernel:
# -    o_buf[...] = jax.nn.silu(a_buf[...])
# -    b_in.wait()
# +    b_in.wait()
# +    o_buf[...] = jax.nn.silu(a_buf[...])

# %% pipelining/1: arithmetic of no use while the second copy is on its way
# whole_gate_kernel:
# -    a_in.wait()
# -    o_buf[...] = jax.nn.silu(a_buf[...])
# -    b_in.wait()
# +    a_in.wait()
# +    o_buf[...] = a_buf[...] * 2.0
# +    b_in.wait()
# +    o_buf[...] = jax.nn.silu(a_buf[...])

# %% pipelining/1: the copies in are waited for in the other order
# whole_gate_kernel:
# -    a_in.wait()
# -    o_buf[...] = jax.nn.silu(a_buf[...])
# -    b_in.wait()
# +    b_in.wait()
# +    o_buf[...] = jax.nn.silu(a_buf[...])
# +    a_in.wait()

# %% pipelining/1: both copies in share a semaphore
# whole_gate_kernel: `make_async_copy(b_hbm, b_buf, b_sem)` -> `make_async_copy(b_hbm, b_buf, a_sem)`

# %% pipelining/1: the copy out starts before the result is there
# whole_gate_kernel:
# -    o_buf[...] = o_buf[...] * b_buf[...]
# -    out = pltpu.make_async_copy(o_buf, o_hbm, o_sem)
# -    out.start()
# +    out = pltpu.make_async_copy(o_buf, o_hbm, o_sem)
# +    out.start()
# +    o_buf[...] = o_buf[...] * b_buf[...]

# %% pipelining/1: an input is copied out
# whole_gate_kernel: `make_async_copy(o_buf, o_hbm, o_sem)` -> `make_async_copy(b_buf, o_hbm, o_sem)`

# %% pipelining/1: source and target are exchanged
# whole_gate_kernel: `make_async_copy(o_buf, o_hbm, o_sem)` -> `make_async_copy(o_hbm, o_buf, o_sem)`

# %% pipelining/1: the gate is the other input
# whole_gate_kernel: `jax.nn.silu(a_buf[...])` -> `a_buf[...]`
# whole_gate_kernel: `* b_buf[...]` -> `* jax.nn.silu(b_buf[...])`


# %% pipelining/1: the kernel computes on HBM
def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
    o_hbm[...] = jax.nn.silu(a_hbm[...]) * b_hbm[...]


# %% pipelining/1: start and wait at once
def whole_gate_kernel(a_hbm, b_hbm, o_hbm, a_buf, b_buf, o_buf, a_sem, b_sem, o_sem):
    pltpu.sync_copy(a_hbm, a_buf)
    pltpu.sync_copy(b_hbm, b_buf)
    o_buf[...] = jax.nn.silu(a_buf[...]) * b_buf[...]
    pltpu.sync_copy(o_buf, o_hbm)


# %% pipelining/2: nobody waits for the copy out
# tiled_silu_kernel:
# -        copy_out.wait()

# %% pipelining/2: nobody waits for the copy in
# tiled_silu_kernel:
# -        copy_in.wait()

# %% pipelining/2: a tile begins at its own number
# tiled_silu_kernel: `pl.ds(t * bm, bm)` -> `pl.ds(t, bm)`

# %% pipelining/2: the last tile is left out
# tiled_silu_kernel: `x_hbm.shape[0] // bm)` -> `x_hbm.shape[0] // bm - 1)`

# %% pipelining/2: the example's five tiles
# tiled_silu_kernel: `x_hbm.shape[0] // bm)` -> `5)`

# %% pipelining/2: all results go to the first tile
# tiled_silu_kernel: `make_async_copy(o_buf, o_hbm.at[rows], sem)` -> `make_async_copy(o_buf, o_hbm.at[pl.ds(0, bm)], sem)`

# %% pipelining/2: the columns are cut
# tiled_silu_kernel: `x_hbm.at[rows]` -> `x_hbm.at[:, rows]`


# %% pipelining/2: the copies out are waited for after the loop
def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        rows = pl.ds(t * bm, bm)
        pltpu.sync_copy(x_hbm.at[rows], x_buf)
        o_buf[...] = jax.nn.silu(x_buf[...])
        pltpu.make_async_copy(o_buf, o_hbm.at[rows], sem).start()

    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        pltpu.make_async_copy(o_buf, o_hbm.at[pl.ds(t * bm, bm)], sem).wait()


# %% pipelining/2: a Python loop, whose body is written out for each tile
# tiled_silu_kernel:
# -    @pl.loop(0, x_hbm.shape[0] // bm)
# -    def _(t):
# +    for t in range(x_hbm.shape[0] // bm):


# %% pipelining/2: the kernel takes more room than its buffers
def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    def body(whole_ref):
        pltpu.sync_copy(x_hbm, whole_ref)
        whole_ref[...] = jax.nn.silu(whole_ref[...])
        pltpu.sync_copy(whole_ref, o_hbm)

    pl.run_scoped(body, pltpu.VMEM(x_hbm.shape, x_hbm.dtype))


# %% pipelining/2: the last tile comes in twice
def tiled_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, sem, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def move(source, target):
        copy = pltpu.make_async_copy(source, target, sem)
        copy.start()
        copy.wait()

    def rows(ref, t):
        return ref.at[pl.ds(t * bm, bm)]

    move(rows(x_hbm, 0), x_buf)

    @pl.loop(0, num_tiles)
    def _(t):
        o_buf[...] = jax.nn.silu(x_buf[...])
        move(o_buf, rows(o_hbm, t))
        move(rows(x_hbm, jnp.minimum(t + 1, num_tiles - 1)), x_buf)  # never beyond the end


# %% pipelining/3: one tile after the other
# energy_kernel:
# -        copy(t).wait()
# -
# -        @pl.when(t + 1 < num_tiles)
# -        def _():
# -            copy(t + 1).start()
# -
# +        @pl.when(t > 0)
# +        def _():
# +            copy(t).start()
# +
# +        copy(t).wait()

# %% pipelining/3: the next tile is started after the sum
# energy_kernel:
# -        @pl.when(t + 1 < num_tiles)
# -        def _():
# -            copy(t + 1).start()
# -
# -        x = x_buf[lax.rem(t, 2)]
# -        o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)
# +        x = x_buf[lax.rem(t, 2)]
# +        o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)
# +
# +        @pl.when(t + 1 < num_tiles)
# +        def _():
# +            copy(t + 1).start()

# %% pipelining/3: two copies share the semaphore
# energy_kernel:
# -        copy(t).wait()
# -
# -        @pl.when(t + 1 < num_tiles)
# -        def _():
# -            copy(t + 1).start()
# +        @pl.when(t + 1 < num_tiles)
# +        def _():
# +            copy(t + 1).start()
# +
# +        copy(t).wait()

# %% pipelining/3: a tile that does not exist is started
# energy_kernel: `t + 1 < num_tiles` -> `t < num_tiles`

# %% pipelining/3: the last tile is never started
# energy_kernel: `t + 1 < num_tiles` -> `t + 2 < num_tiles`

# %% pipelining/3: the other slot is read
# energy_kernel: `x = x_buf[lax.rem(t, 2)]` -> `x = x_buf[lax.rem(t + 1, 2)]`

# %% pipelining/3: every tile goes into slot 0
# energy_kernel: `x_buf.at[lax.rem(t, 2)]` -> `x_buf.at[0]`
# energy_kernel: `x = x_buf[lax.rem(t, 2)]` -> `x = x_buf[0]`

# %% pipelining/3: slot 0 is read at every step
# energy_kernel: `x = x_buf[lax.rem(t, 2)]` -> `x = x_buf[0]`

# %% pipelining/3: nobody starts the first tile
# energy_kernel:
# -    copy(0).start()
# -    o_ref[...] = jnp.zeros_like(o_ref)
# +    o_ref[...] = jnp.zeros_like(o_ref)

# %% pipelining/3: nobody waits
# energy_kernel:
# -        copy(t).wait()

# %% pipelining/3: the sum is never set to zero
# energy_kernel:
# -    o_ref[...] = jnp.zeros_like(o_ref)

# %% pipelining/3: only the last tile counts
# energy_kernel: `o_ref[...] += jnp.sum` -> `o_ref[...] = jnp.sum`

# %% pipelining/3: the values are not squared
# energy_kernel: `jnp.sum(x * x, ` -> `jnp.sum(x, `


# %% pipelining/3: one slot, whose tile is loaded before the next one is started
# energy_kernel: `[lax.rem(t, 2)],` -> `[0],`
# energy_kernel:
# -        copy(t).wait()
# +        copy(t).wait()
# +        x = x_buf[0]
# energy_kernel:
# -        x = x_buf[lax.rem(t, 2)]


# %% pipelining/3: arithmetic of no use while a tile is on its way
def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[0], sem)
        copy.start()
        o_ref[...] += jnp.zeros_like(o_ref)
        copy.wait()
        x = x_buf[0]
        o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)


# %% pipelining/3: one slot, and much arithmetic that changes nothing while its tile is on its way
def energy_kernel(x_hbm, o_ref, x_buf, sem, *, bm):
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[0], sem)
        copy.start()
        idle = jnp.broadcast_to(o_ref[...], (bm, o_ref.shape[1]))
        for _ in range(13):
            idle = jnp.abs(-idle)
        o_ref[...] = idle[:1]
        copy.wait()
        x = x_buf[0]
        o_ref[...] += jnp.sum(x * x, axis=0, keepdims=True)


# %% pipelining/4: one semaphore for all slots
# absmax_kernel: `sems.at[slot]` -> `sems.at[0]`

# %% pipelining/4: one tile ahead
# absmax_kernel: `t + 2 < num_tiles` -> `t + 1 < num_tiles`
# absmax_kernel: `copy(t + 2).start()` -> `copy(t + 1).start()`
# absmax_kernel:
# -    copy(1).start()

# %% pipelining/4: two slots are used
# absmax_kernel: `slot = lax.rem(t, 3)` -> `slot = lax.rem(t, 2)`
# absmax_kernel: `x = x_buf[lax.rem(t, 3)]` -> `x = x_buf[lax.rem(t, 2)]`

# %% pipelining/4: the slot of the tile after next is read
# absmax_kernel: `x = x_buf[lax.rem(t, 3)]` -> `x = x_buf[lax.rem(t + 2, 3)]`

# %% pipelining/4: the second tile is never started
# absmax_kernel:
# -    copy(1).start()

# %% pipelining/4: started up to a tile beyond the end
# absmax_kernel: `t + 2 < num_tiles` -> `t + 1 < num_tiles`

# %% pipelining/4: the sign is forgotten
# absmax_kernel: `jnp.max(jnp.abs(x), ` -> `jnp.max(x, `

# %% pipelining/4: the largest of the last tile
# absmax_kernel: `jnp.maximum(o_ref[...], jnp.max(jnp.abs(x), axis=0, keepdims=True))` -> `jnp.max(jnp.abs(x), axis=0, keepdims=True)`


# %% pipelining/4: one tile after the other
def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        pltpu.sync_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[0])
        o_ref[...] = jnp.maximum(o_ref[...], jnp.max(jnp.abs(x_buf[0]), axis=0, keepdims=True))


# %% pipelining/4: two slots, whose tile is loaded before the next one is started
# absmax_kernel:
# -        slot = lax.rem(t, 3)
# +        slot = lax.rem(t, 2)
# absmax_kernel:
# -        copy(t).wait()
# +        copy(t).wait()
# +        x = x_buf[lax.rem(t, 2)]
# absmax_kernel:
# -        x = x_buf[lax.rem(t, 3)]


# %% pipelining/4: three tiles at a time, on one semaphore
def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def copy(t):
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[t % 3], sems.at[0])

    o_ref[...] = jnp.zeros_like(o_ref)
    for t in range(min(3, num_tiles)):
        copy(t).start()
    for first in range(0, num_tiles, 3):
        tiles = range(first, min(first + 3, num_tiles))
        for t in tiles:
            copy(t).wait()
        values = [x_buf[t % 3] for t in tiles]
        for t in range(first + 3, min(first + 6, num_tiles)):
            copy(t).start()
        for x in values:
            o_ref[...] = jnp.maximum(o_ref[...], jnp.max(jnp.abs(x), axis=0, keepdims=True))


# %% pipelining/4: two tiles at a time, and roots and squares that change nothing while they are on their way
def absmax_kernel(x_hbm, o_ref, x_buf, sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm
    o_ref[...] = jnp.zeros_like(o_ref)
    for first in range(0, num_tiles, 2):
        tiles = [t for t in (first, first + 1) if t < num_tiles]
        copies = [pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[t - first], sems.at[0]) for t in tiles]
        for copy in copies:
            copy.start()
        idle = jnp.broadcast_to(o_ref[...], (bm, o_ref.shape[1]))
        for _ in range(30):
            idle = jnp.sqrt(idle * idle)
        o_ref[...] = idle[:1]
        for copy in copies:
            copy.wait()
        for t in tiles:
            o_ref[...] = jnp.maximum(o_ref[...], jnp.max(jnp.abs(x_buf[t - first]), axis=0, keepdims=True))


# %% pipelining/5: the slot is filled while its copy is on its way
# outer_step:
# -    slot = lax.rem(t, 2)
# -
# -    @pl.when(t >= 2)
# -    def _():
# -        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
# +    slot = lax.rem(t, 2)

# %% pipelining/5: the slot is filled before the wait
# outer_step:
# -    @pl.when(t >= 2)
# -    def _():
# -        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
# -
# -    o_buf[slot] = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
# +    o_buf[slot] = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
# +
# +    @pl.when(t >= 2)
# +    def _():
# +        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
# +

# %% pipelining/5: waits one step too early
# outer_step: `t >= 2` -> `t >= 1`

# %% pipelining/5: waits from the third step on
# outer_step: `t >= 2` -> `t > 2`

# %% pipelining/5: waits for the newest copy
# outer_step: `t >= 2` -> `t >= 1`
# outer_step: `sems, t - 2, bm).wait()` -> `sems, t - 1, bm).wait()`

# %% pipelining/5: one slot
# elsewhere: the store into the slot that is not free is named
# outer_step: `slot = lax.rem(t, 2)` -> `slot = 0`

# %% pipelining/5: the slots are exchanged
# outer_step: `slot = lax.rem(t, 2)` -> `slot = lax.rem(t + 1, 2)`

# %% pipelining/5: no tile is sent
# outer_step:
# -    store_tile(o_hbm, o_buf, sems, t, bm).start()

# %% pipelining/5: every copy is waited for at once
# outer_step:
# -    store_tile(o_hbm, o_buf, sems, t, bm).start()
# +    store_tile(o_hbm, o_buf, sems, t, bm).start()
# +    store_tile(o_hbm, o_buf, sems, t, bm).wait()

# %% pipelining/5: the rows of a begin at the tile's number
# outer_step: `pl.ds(t * bm, bm)` -> `pl.ds(t, bm)`

# %% pipelining/5: one copy out at a time, while the next tile is in registers
# outer_step:
# -    @pl.when(t >= 2)
# -    def _():
# -        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
# -
# -    o_buf[slot] = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
# +    tile = a_ref[pl.ds(t * bm, bm)] * b_ref[...]
# +
# +    @pl.when((t >= 1) & (t < o_hbm.shape[0] // bm - 1))
# +    def _():
# +        store_tile(o_hbm, o_buf, sems, t - 1, bm).wait()
# +
# +    o_buf[slot] = tile

# %% pipelining/5: one copy out at a time, and a product that nobody uses
# outer_step:
# -    @pl.when(t >= 2)
# -    def _():
# -        store_tile(o_hbm, o_buf, sems, t - 2, bm).wait()
# +    o_buf[slot, :8, :128] = jnp.broadcast_to(b_ref[:, :128] * 0.0, (8, 128))
# +
# +    @pl.when((t >= 1) & (t < o_hbm.shape[0] // bm - 1))
# +    def _():
# +        store_tile(o_hbm, o_buf, sems, t - 1, bm).wait()

# %% pipelining/6: no drain
# elsewhere: the copy that nobody waits for is named
# streamed_silu_kernel:
# -    for t in range(max(0, num_tiles - 2), num_tiles):
# -        store(t).wait()

# %% pipelining/6: only the last copy is drained
# streamed_silu_kernel: `max(0, num_tiles - 2)` -> `num_tiles - 1`

# %% pipelining/6: two copies are drained, also of one
# streamed_silu_kernel: `max(0, num_tiles - 2)` -> `num_tiles - 2`

# %% pipelining/6: all copies are drained again
# streamed_silu_kernel: `max(0, num_tiles - 2)` -> `0`

# %% pipelining/6: one semaphore for both slots on the way in
# streamed_silu_kernel: `in_sems.at[slot]` -> `in_sems.at[0]`

# %% pipelining/6: one semaphore for both slots on the way out
# streamed_silu_kernel: `out_sems.at[slot]` -> `out_sems.at[0]`

# %% pipelining/6: the way out has one slot
# streamed_silu_kernel: `o_buf.at[slot]` -> `o_buf.at[0]`
# streamed_silu_kernel: `o_buf[slot] = ` -> `o_buf[0] = `

# %% pipelining/6: nobody waits for room
# streamed_silu_kernel:
# -        @pl.when(t >= 2)
# -        def _():
# -            store(t - 2).wait()
# -

# %% pipelining/6: the other slot is read
# streamed_silu_kernel: `jax.nn.silu(x_buf[slot])` -> `jax.nn.silu(x_buf[1 - slot])`

# %% pipelining/6: the next tile is loaded after the arithmetic
# streamed_silu_kernel:
# -        @pl.when(t + 1 < num_tiles)
# -        def _():
# -            load(t + 1).start()
# -
# -        load(t).wait()
# +        load(t).wait()
# streamed_silu_kernel:
# -        store(t).start()
# +        store(t).start()
# +
# +        @pl.when(t + 1 < num_tiles)
# +        def _():
# +            load(t + 1).start()


# %% pipelining/6: Puzzle 2 again
def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
    @pl.loop(0, x_hbm.shape[0] // bm)
    def _(t):
        rows = pl.ds(t * bm, bm)
        pltpu.sync_copy(x_hbm.at[rows], x_buf.at[0])
        o_buf[0] = jax.nn.silu(x_buf[0])
        pltpu.sync_copy(o_buf.at[0], o_hbm.at[rows])


# %% pipelining/6: one slot each way, whose tile is loaded before the next one is started
def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm

    def load(t):
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[0], in_sems.at[0])

    def store(t):
        return pltpu.make_async_copy(o_buf.at[0], o_hbm.at[pl.ds(t * bm, bm)], out_sems.at[0])

    load(0).start()

    @pl.loop(0, num_tiles)
    def _(t):
        load(t).wait()
        x = x_buf[0]

        @pl.when(t + 1 < num_tiles)
        def _():
            load(t + 1).start()

        y = jax.nn.silu(x)

        @pl.when(t >= 1)
        def _():
            store(t - 1).wait()

        o_buf[0] = y
        store(t).start()

    store(num_tiles - 1).wait()


# %% pipelining/6: one slot on the way out, while the next tile is in registers
# streamed_silu_kernel: `o_buf.at[slot]` -> `o_buf.at[0]`
# streamed_silu_kernel: `out_sems.at[slot]` -> `out_sems.at[0]`
# streamed_silu_kernel:
# -        @pl.when(t >= 2)
# -        def _():
# -            store(t - 2).wait()
# -
# -        slot = lax.rem(t, 2)
# -        o_buf[slot] = jax.nn.silu(x_buf[slot])
# +        tile = jax.nn.silu(x_buf[lax.rem(t, 2)])
# +
# +        @pl.when(t >= 1)
# +        def _():
# +            store(t - 1).wait()
# +
# +        o_buf[0] = tile
# streamed_silu_kernel: `max(0, num_tiles - 2)` -> `num_tiles - 1`


# %% pipelining/6: one slot each way, and roots that nobody uses while both copies are on their way
def streamed_silu_kernel(x_hbm, o_hbm, x_buf, o_buf, in_sems, out_sems, *, bm):
    num_tiles = x_hbm.shape[0] // bm
    x_buf[1] = jnp.zeros(x_buf.shape[1:], x_buf.dtype)

    def load(t):
        return pltpu.make_async_copy(x_hbm.at[pl.ds(t * bm, bm)], x_buf.at[0], in_sems.at[0])

    def store(t):
        return pltpu.make_async_copy(o_buf.at[0], o_hbm.at[pl.ds(t * bm, bm)], out_sems.at[0])

    @pl.loop(0, num_tiles)
    def _(t):
        load(t).start()
        for _ in range(24):
            x_buf[1] = jnp.sqrt(x_buf[1])
        load(t).wait()

        @pl.when(t >= 1)
        def _():
            store(t - 1).wait()

        o_buf[0] = jax.nn.silu(x_buf[0])
        store(t).start()

    store(num_tiles - 1).wait()


# %% pipelining/7: the index map is transposed
# gate_kernel: `lambda i, j: (i, j)` -> `lambda i, j: (j, i)`

# %% pipelining/7: the index map returns elements
# gate_kernel: `lambda i, j: (i, j)` -> `lambda i, j: (i * bm, j * bn)`

# %% pipelining/7: the grid is transposed
# gate_kernel: `(M // bm, N // bn)` -> `(N // bn, M // bm)`

# %% pipelining/7: only the first column of tiles
# gate_kernel: `lambda i, j: (i, j)` -> `lambda i, j: (i, 0)`

# %% pipelining/7: the operands are exchanged
# gate_kernel: `pipeline(a_hbm, b_hbm, o_hbm)` -> `pipeline(b_hbm, a_hbm, o_hbm)`

# %% pipelining/7: the gate is forgotten
# gate_tile: `jax.nn.silu(a_ref[...])` -> `a_ref[...]`

# %% pipelining/7: the pipeline is never run
# gate_kernel:
# -    pipeline(a_hbm, b_hbm, o_hbm)

# %% pipelining/7: one block for everything
# gate_kernel: `(bm, bn)` -> `(M, N)`
# gate_kernel: `(M // bm, N // bn)` -> `(1, 1)`


# %% pipelining/7: copied by hand
def gate_tile(a_ref, b_ref, o_ref):
    o_ref[...] = jax.nn.silu(a_ref[...]) * b_ref[...]


def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
    M, N = a_hbm.shape

    def body(a_buf, b_buf, o_buf):
        @pl.loop(0, M // bm)
        def _(i):
            @pl.loop(0, N // bn)
            def _(j):
                tile = pl.ds(i * bm, bm), pl.ds(j * bn, bn)
                pltpu.sync_copy(a_hbm.at[tile], a_buf)
                pltpu.sync_copy(b_hbm.at[tile], b_buf)
                gate_tile(a_buf, b_buf, o_buf)
                pltpu.sync_copy(o_buf, o_hbm.at[tile])

    pl.run_scoped(body, *[pltpu.VMEM((bm, bn), a_hbm.dtype)] * 3)


# %% pipelining/7: copied by hand, without a branch, and with roots that nobody uses
def gate_tile(a_ref, b_ref, o_ref):
    o_ref[...] = jax.nn.silu(a_ref[...]) * b_ref[...]


def gate_kernel(a_hbm, b_hbm, o_hbm, *, bm, bn):
    M, N = a_hbm.shape

    def body(a_buf, b_buf, o_buf, idle, a_sem, b_sem, o_sem):
        idle[...] = jnp.zeros_like(idle)
        for i in range(M // bm):
            for j in range(N // bn):
                tile = pl.ds(i * bm, bm), pl.ds(j * bn, bn)
                a_in = pltpu.make_async_copy(a_hbm.at[tile], a_buf, a_sem)
                b_in = pltpu.make_async_copy(b_hbm.at[tile], b_buf, b_sem)
                a_in.start()
                b_in.start()
                idle[...] = jnp.sqrt(idle[...])
                a_in.wait()
                b_in.wait()
                gate_tile(a_buf, b_buf, o_buf)
                out = pltpu.make_async_copy(o_buf, o_hbm.at[tile], o_sem)
                out.start()
                idle[...] = jnp.sqrt(idle[...])
                out.wait()

    pl.run_scoped(body, *[pltpu.VMEM((bm, bn), a_hbm.dtype)] * 4, *[pltpu.SemaphoreType.DMA] * 3)


# %% pipelining/8: one tile ahead, however many slots
# stream_kernel: `range(min(slots - 1, num_tiles))` -> `range(1)`
# stream_kernel: `t + slots - 1 < num_tiles` -> `t + 1 < num_tiles`
# stream_kernel: `copy(t + slots - 1).start()` -> `copy(t + 1).start()`

# %% pipelining/8: the slot that is read is refilled
# stream_kernel: `range(min(slots - 1, num_tiles))` -> `range(min(slots, num_tiles))`
# stream_kernel: `t + slots - 1 < num_tiles` -> `t + slots < num_tiles`
# stream_kernel: `copy(t + slots - 1).start()` -> `copy(t + slots).start()`

# %% pipelining/8: fewer tiles than slots are forgotten
# stream_kernel: `range(min(slots - 1, num_tiles))` -> `range(slots - 1)`

# %% pipelining/8: one semaphore for all slots
# stream_kernel: `sems.at[slot]` -> `sems.at[0]`

# %% pipelining/8: the example's four slots
# stream_kernel: `slot = lax.rem(t, slots)` -> `slot = lax.rem(t, 4)`
# stream_kernel: `w_buf[lax.rem(t, slots)]` -> `w_buf[lax.rem(t, 4)]`

# %% pipelining/8: the last tiles are never started
# stream_kernel: `t + slots - 1 < num_tiles` -> `t + slots < num_tiles`

# %% pipelining/8: the prologue starts one tile less
# stream_kernel: `range(min(slots - 1, num_tiles))` -> `range(min(slots - 2, num_tiles))`

# %% pipelining/8: the first columns of x at every step
# stream_kernel: `x_ref[:, pl.ds(t * bk, bk)]` -> `x_ref[:, pl.ds(0, bk)]`

# %% pipelining/8: the sum is never set to zero
# stream_kernel:
# -    o_ref[...] = jnp.zeros_like(o_ref)

# %% pipelining/8: summed in bfloat16
# stream_kernel: `preferred_element_type=jnp.float32` -> `preferred_element_type=jnp.bfloat16`


# %% pipelining/8: all of w at once
def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
    def body(w_ref):
        pltpu.sync_copy(w_hbm, w_ref)
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    pl.run_scoped(body, pltpu.VMEM(w_hbm.shape, w_hbm.dtype))


# %% pipelining/8: groups of tiles on one semaphore, and products of zeros while they are on their way
def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
    num_tiles = w_hbm.shape[0] // bk
    o_ref[...] = jnp.zeros_like(o_ref)
    for first in range(0, num_tiles, slots - 1):
        tiles = range(first, min(first + slots - 1, num_tiles))
        copies = [pltpu.make_async_copy(w_hbm.at[pl.ds(t * bk, bk)], w_buf.at[t - first], sems.at[0]) for t in tiles]
        for copy in copies:
            copy.start()
        idle = jnp.zeros((o_ref.shape[0], 1024), jnp.float32)
        for _ in range(2 + slots):
            idle = jnp.dot(idle, jnp.zeros((1024, 1024), jnp.float32), preferred_element_type=jnp.float32)
        o_ref[...] = o_ref[...] + idle[:, :1]
        for copy in copies:
            copy.wait()
        for t in tiles:
            x = x_ref[:, pl.ds(t * bk, bk)]
            o_ref[...] += jnp.dot(x, w_buf[t - first], preferred_element_type=jnp.float32)


# %% pipelining/8: the library's pipeline
def stream_kernel(x_ref, w_hbm, o_ref, w_buf, sems, *, bk, slots):
    o_ref[...] = jnp.zeros_like(o_ref)

    def body(w_ref):
        x = x_ref[:, pl.ds(pl.program_id(0) * bk, bk)]
        o_ref[...] += jnp.dot(x, w_ref[...], preferred_element_type=jnp.float32)

    tile = pl.BlockSpec((bk, w_hbm.shape[1]), lambda t: (t, 0), pipeline_mode=pl.Buffered(slots))
    pltpu.emit_pipeline(body, grid=(w_hbm.shape[0] // bk,), in_specs=[tile])(w_hbm)
