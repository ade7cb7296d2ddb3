"""The answers to puzzles/distributed.py: the functions that fill its holes."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


# Puzzle 1
def mlp_local(x, w1, w2):
    h = jax.nn.relu(x @ w1)
    return lax.psum(h @ w2, "x")


# Puzzle 2
def mlp_rows_local(x, w1, w2):
    x = lax.all_gather(x, "x", tiled=True)
    part = jax.nn.relu(x @ w1) @ w2
    return lax.psum_scatter(part, "x", scatter_dimension=0, tiled=True)


# Puzzle 3
def rotate_kernel(x_ref, o_ref, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_neighbours()
    copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, came, device_id={"x": lax.rem(me + 1, n)})
    copy.start()
    copy.wait_send()
    copy.wait_recv()


# Puzzle 4
def meet_everybody():
    n, me = lax.axis_size("x"), lax.axis_index("x")
    barrier = pltpu.get_barrier_semaphore()
    for step in range(1, n):
        pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + step, n)})
    pl.semaphore_wait(barrier, n - 1)


# Puzzle 5
def gather_kernel(x_ref, o_ref, own, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_neighbours()
    mine = pltpu.make_async_copy(x_ref, o_ref.at[me], own)
    mine.start()
    mine.wait()
    for hop in range(n - 1):
        part = o_ref.at[lax.rem(me - hop + n, n)]
        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id={"x": lax.rem(me + 1, n)})
        copy.start()
        copy.wait()


# Puzzle 6
def total_kernel(x_ref, o_ref, buf, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    meet_neighbours()
    o_ref[...] = x_ref[...]
    buf[0] = x_ref[...]
    for hop in range(n - 1):
        here, there = hop % 2, 1 - hop % 2
        if hop > 0:
            pl.semaphore_wait(credit, 1)
        copy = pltpu.make_async_remote_copy(buf.at[here], buf.at[there], sent, came.at[there], device_id={"x": right})
        copy.start()
        if hop > 0:
            o_ref[...] += buf[here]
        copy.wait()
        if hop < n - 2:
            pl.semaphore_signal(credit, 1, device_id={"x": left})
    o_ref[...] += buf[(n - 1) % 2]


# Puzzle 7
def reduce_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    meet_neighbours()
    for hop in range(n - 1):
        block = x_ref.at[lax.rem(me - 1 - hop + n, n)]
        if hop > 0:
            add(block, inbox, acc)
            pl.semaphore_signal(credit, 1, device_id={"x": left})
            pl.semaphore_wait(credit, 1)
        source = block if hop == 0 else acc
        copy = pltpu.make_async_remote_copy(source, inbox, sent, came, device_id={"x": right})
        copy.start()
        copy.wait()
    add(x_ref.at[me], inbox, o_ref)


# Puzzle 8
def halves_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    after, before = (right, left), (left, right)  # by way: whom you send to, who sends to you

    def block(way, hop):
        step = n - 1 - hop if way == 0 else 1 + hop
        return x_ref.at[lax.rem(me + step, n), way]

    def copy(way, hop):
        source = block(way, 0) if hop == 0 else acc.at[way]
        return pltpu.make_async_remote_copy(
            source, inbox.at[way], sent.at[way], came.at[way], device_id={"x": after[way]}
        )

    meet_neighbours()
    for way in range(2):
        copy(way, 0).start()
    for hop in range(1, n - 1):
        for way in range(2):
            copy(way, hop - 1).wait()
            add(block(way, hop), inbox.at[way], acc.at[way])
            pl.semaphore_signal(credit.at[way], 1, device_id={"x": before[way]})
            pl.semaphore_wait(credit.at[way], 1)
            copy(way, hop).start()
    for way in range(2):
        copy(way, n - 2).wait()
        add(x_ref.at[me, way], inbox.at[way], o_ref.at[way])


# Puzzle 9
def grid_gather_kernel(x_ref, o_ref, own, sent, came):
    rows, columns = lax.axis_size("y"), lax.axis_size("x")
    j, i = lax.axis_index("y"), lax.axis_index("x")
    meet_neighbours_on("y", "x")
    mine = pltpu.make_async_copy(x_ref, o_ref.at[j, i], own)
    mine.start()
    mine.wait()
    for hop in range(columns - 1):
        part = o_ref.at[j, lax.rem(i - hop + columns, columns)]
        right = {"x": lax.rem(i + 1, columns)}
        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id=right)
        copy.start()
        copy.wait()
    for hop in range(rows - 1):
        row = o_ref.at[lax.rem(j - hop + rows, rows)]
        below = {"y": lax.rem(j + 1, rows)}
        copy = pltpu.make_async_remote_copy(row, row, sent, came.at[columns - 1 + hop], device_id=below)
        copy.start()
        copy.wait()
