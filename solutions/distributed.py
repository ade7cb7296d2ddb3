"""The answers to puzzles/distributed.py: the functions that fill its holes."""

import jax
import jax.numpy as jnp
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


# Puzzle 10
def recut_kernel(x_ref, o_ref, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_everybody()
    r, c = x_ref.shape[0], o_ref.shape[1]
    mine = o_ref.at[pl.ds(me * r, r)]
    own = pltpu.make_async_copy(x_ref.at[:, pl.ds(me * c, c)], mine, sent)
    own.start()
    copies = []
    for step in range(1, n):
        to = lax.rem(me + step, n)
        part = x_ref.at[:, pl.ds(to * c, c)]
        copies.append(pltpu.make_async_remote_copy(part, mine, sent, came, device_id={"x": to}))
        copies[-1].start()
    own.wait()
    for copy in copies:
        copy.wait()


# Puzzle 11a
def plan(counts):
    n, E = counts.shape
    starts = jnp.cumsum(counts, axis=1) - counts
    there = counts.T.reshape(n, -1)
    places = (jnp.cumsum(there, axis=1) - there).reshape(E, n).T
    return starts, places


# Puzzle 11b
def send_rows_kernel(sizes, starts, places, due, x_ref, o_ref, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_everybody()
    pieces = sizes.shape[0] // n
    to_others = 0
    for step in range(n):
        to = lax.rem(me + step, n)
        for j in range(pieces):
            p = to * pieces + j
            source, target = x_ref.at[pl.ds(starts[p], sizes[p])], o_ref.at[pl.ds(places[p], sizes[p])]
            if step == 0:
                copy = pltpu.make_async_copy(source, target, came)
            else:
                copy = pltpu.make_async_remote_copy(source, target, sent, came, device_id={"x": to})
                to_others += sizes[p]
            pl.when(sizes[p] > 0)(copy.start)
    wait_for_rows(x_ref, to_others, sent)
    wait_for_rows(o_ref, due[0], came)


# Puzzle 11c
def moe_local(x, experts, w1, w2):
    n, me, e = lax.axis_size("x"), lax.axis_index("x"), w1.shape[0]
    order = jnp.argsort(experts)
    counts = counts_of(experts, n * e)
    starts, places = plan(counts)
    mine = me * e + jnp.arange(e)
    sizes = counts[:, mine]
    rows = send_rows(x[order], counts[me], starts[me], places[me], sizes.sum(), num_rows=n * x.shape[0])
    y = expert_mlp(rows, w1, w2, sizes.sum(axis=0))
    back = send_rows(y, sizes, places[:, mine], starts[:, mine], x.shape[0], num_rows=x.shape[0], number=1)
    return back[jnp.argsort(order)]


# Puzzle 12a
def ring_attention_kernel(q_ref, k_ref, v_ref, o_ref, kv, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    meet_neighbours()
    s, d = q_ref.shape
    kv[0, 0] = k_ref[...]
    kv[0, 1] = v_ref[...]
    m, l, acc = jnp.full((s, 1), -jnp.inf), jnp.zeros((s, 1)), jnp.zeros((s, d))
    for hop in range(n):
        here, there = hop % 2, 1 - hop % 2
        if hop < n - 1:
            if hop > 0:
                pl.semaphore_wait(credit, 1)
            to = {"x": right}
            copy = pltpu.make_async_remote_copy(kv.at[here], kv.at[there], sent, came.at[there], device_id=to)
            copy.start()
        scores = jnp.dot(q_ref[...], kv[here, 0].T) * d**-0.5
        new = jnp.maximum(m, scores.max(axis=1, keepdims=True))
        p, shrink = jnp.exp(scores - new), jnp.exp(m - new)
        l = l * shrink + p.sum(axis=1, keepdims=True)
        acc = acc * shrink + jnp.dot(p, kv[here, 1])
        m = new
        if hop < n - 1:
            copy.wait()
            if hop < n - 2:
                pl.semaphore_signal(credit, 1, device_id={"x": left})
    o_ref[...] = acc / l


# Puzzle 12b
def gather_matmul_kernel(x_ref, w_ref, o_ref, buf, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_neighbours()
    b = x_ref.shape[0]
    buf[0] = x_ref[...]
    for hop in range(n):
        if hop < n - 1:
            to = {"x": lax.rem(me + 1, n)}
            copy = pltpu.make_async_remote_copy(buf.at[hop], buf.at[hop + 1], sent, came.at[hop], device_id=to)
            copy.start()
        rows = pl.ds(lax.rem(me - hop + n, n) * b, b)
        o_ref[rows] = jnp.dot(buf[hop], w_ref[...])
        if hop < n - 1:
            copy.wait()


# Puzzle 12c
def matmul_scatter_kernel(h_ref, w_ref, o_ref, buf, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    meet_neighbours()
    b = o_ref.shape[0]
    for hop in range(n):
        here, there = hop % 2, 1 - hop % 2
        rows = pl.ds(lax.rem(me - hop - 1 + n, n) * b, b)
        part = jnp.dot(h_ref[rows], w_ref[...])
        if hop > 0:
            copy.wait()
            part += buf[here]
            if hop < n - 1:
                pl.semaphore_signal(credit, 1, device_id={"x": left})
                pl.semaphore_wait(credit, 1)
        if hop < n - 1:
            buf[here] = part
            to = {"x": right}
            copy = pltpu.make_async_remote_copy(buf.at[here], buf.at[there], sent, came.at[there], device_id=to)
            copy.start()
    o_ref[...] = part
