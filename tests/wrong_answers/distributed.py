"""Wrong answers to puzzles/distributed.py, and what a verdict has to say about each."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# %% distributed/1: the sum is forgotten
# mlp_local: `lax.psum(h @ w2, "x")` -> `h @ w2`

# %% distributed/1: the hidden layer is summed instead
# mlp_local: `lax.psum(h @ w2, "x")` -> `lax.psum(h, "x") @ w2`

# %% distributed/1: the mean of the devices
# mlp_local: `lax.psum(` -> `lax.pmean(`

# %% distributed/1: the relu comes after the sum
# mlp_local: `jax.nn.relu(x @ w1)` -> `x @ w1`
# mlp_local: `lax.psum(h @ w2, "x")` -> `jax.nn.relu(lax.psum(h @ w2, "x"))`


# %% distributed/1: every device gathers all weights
# mlp_local:
# -    h = jax.nn.relu(x @ w1)
# -    return lax.psum(h @ w2, "x")
# +    w1 = lax.all_gather(w1, "x", axis=1, tiled=True)
# +    w2 = lax.all_gather(w2, "x", axis=0, tiled=True)
# +    return jax.nn.relu(x @ w1) @ w2

# %% distributed/2: a whole sum, of which the own rows are kept
# mlp_rows_local:
# -    return lax.psum_scatter(part, "x", scatter_dimension=0, tiled=True)
# +    total = lax.psum(part, "x")
# +    b = total.shape[0] // lax.axis_size("x")
# +    return lax.dynamic_slice_in_dim(total, lax.axis_index("x") * b, b)

# %% distributed/2: the parts become a new dimension
# mlp_rows_local: `lax.all_gather(x, "x", tiled=True)` -> `lax.all_gather(x, "x")`

# %% distributed/2: the sum is cut by columns
# mlp_rows_local: `scatter_dimension=0` -> `scatter_dimension=1`


# %% distributed/2: the weights are gathered, and not the rows
# mlp_rows_local:
# -    x = lax.all_gather(x, "x", tiled=True)
# -    part = jax.nn.relu(x @ w1) @ w2
# -    return lax.psum_scatter(part, "x", scatter_dimension=0, tiled=True)
# +    w1 = lax.all_gather(w1, "x", axis=1, tiled=True)
# +    w2 = lax.all_gather(w2, "x", axis=0, tiled=True)
# +    return jax.nn.relu(x @ w1) @ w2

# %% distributed/2: scattered in float32
# mlp_rows_local: `jax.nn.relu(x @ w1) @ w2` -> `jnp.dot(jax.nn.relu(x @ w1), w2, preferred_element_type=jnp.float32)`

# %% distributed/3: nobody waits for what comes
# rotate_kernel:
# -    copy.wait_recv()

# %% distributed/3: nobody waits until the part has left
# rotate_kernel:
# -    copy.wait_send()

# %% distributed/3: no barrier
# rotate_kernel:
# -    meet_neighbours()

# %% distributed/3: to the left
# rotate_kernel: `lax.rem(me + 1, n)` -> `lax.rem(me + n - 1, n)`

# %% distributed/3: the last device has no right neighbour
# rotate_kernel: `lax.rem(me + 1, n)` -> `me + 1`

# %% distributed/3: the example's number of devices
# rotate_kernel: `lax.rem(me + 1, n)` -> `lax.rem(me + 1, 8)`

# %% distributed/3: waits twice for what comes
# rotate_kernel: `copy.wait_send()` -> `copy.wait_recv()`

# %% distributed/4: only the neighbours meet
# meet_everybody: `range(1, n)` -> `(1, n - 1)`
# meet_everybody: `semaphore_wait(barrier, n - 1)` -> `semaphore_wait(barrier, 2)`

# %% distributed/4: waits for a signal of its own that nobody sends
# meet_everybody: `semaphore_wait(barrier, n - 1)` -> `semaphore_wait(barrier, n)`

# %% distributed/4: one signal too few is waited for
# meet_everybody: `semaphore_wait(barrier, n - 1)` -> `semaphore_wait(barrier, n - 2)`

# %% distributed/4: every signal goes to the right neighbour
# meet_everybody: `lax.rem(me + step, n)` -> `lax.rem(me + 1, n)`

# %% distributed/4: signals, and does not wait
# meet_everybody:
# -    pl.semaphore_wait(barrier, n - 1)

# %% distributed/5: one semaphore for all hops
# gather_kernel: `came.at[hop]` -> `came.at[0]`

# %% distributed/5: the own part is sent in every hop
# gather_kernel: `lax.rem(me - hop + n, n)` -> `me`

# %% distributed/5: the other way around the ring
# gather_kernel: `lax.rem(me - hop + n, n)` -> `lax.rem(me + hop, n)`

# %% distributed/5: what comes is waited for at the end
# gather_kernel:
# -        copy.wait()
# +        copy.wait_send()
# +    for hop in range(n - 1):
# +        pltpu.make_async_remote_copy(x_ref, x_ref, sent, came.at[hop], device_id={"x": me}).wait_recv()


# %% distributed/5: the own part is waited for after it has been sent
# gather_kernel:
# -    mine.wait()
# gather_kernel:
# -        copy.wait()
# +        copy.wait()
# +    mine.wait()

# %% distributed/5: a hop is missing
# gather_kernel: `range(n - 1)` -> `range(n - 2)`


# %% distributed/5: straight to everybody
def gather_kernel(x_ref, o_ref, own, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    barrier = pltpu.get_barrier_semaphore()
    for step in range(1, n):
        pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + step, n)})
    pl.semaphore_wait(barrier, n - 1)
    mine = pltpu.make_async_copy(x_ref, o_ref.at[me], own)
    mine.start()
    mine.wait()
    copies = [
        pltpu.make_async_remote_copy(
            x_ref, o_ref.at[me], sent, came.at[step - 1], device_id={"x": lax.rem(me + step, n)}
        )
        for step in range(1, n)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


# %% distributed/6: no credits
# total_kernel:
# -        if hop > 0:
# -            pl.semaphore_wait(credit, 1)
# total_kernel:
# -        if hop < n - 2:
# -            pl.semaphore_signal(credit, 1, device_id={"x": left})

# %% distributed/6: the credit goes to the right
# total_kernel: `device_id={"x": left}` -> `device_id={"x": right}`

# %% distributed/6: a credit that nobody waits for
# total_kernel: `if hop < n - 2:` -> `if hop < n - 1:`

# %% distributed/6: the credit comes before the slot is free
# total_kernel:
# -        copy.wait()
# -        if hop < n - 2:
# -            pl.semaphore_signal(credit, 1, device_id={"x": left})
# +        if hop < n - 2:
# +            pl.semaphore_signal(credit, 1, device_id={"x": left})
# +        copy.wait()

# %% distributed/6: adds when the copy is over
# total_kernel:
# -        if hop > 0:
# -            o_ref[...] += buf[here]
# -        copy.wait()
# +        copy.wait()
# +        if hop > 0:
# +            o_ref[...] += buf[here]

# %% distributed/6: adds the slot that is being filled
# total_kernel: `o_ref[...] += buf[here]` -> `o_ref[...] += buf[there]`

# %% distributed/6: the last part is forgotten
# total_kernel:
# -    o_ref[...] += buf[(n - 1) % 2]

# %% distributed/6: waits for a credit before the first copy
# total_kernel:
# -        if hop > 0:
# -            pl.semaphore_wait(credit, 1)
# +        pl.semaphore_wait(credit, 1)

# %% distributed/7: no credits
# reduce_kernel:
# -            pl.semaphore_signal(credit, 1, device_id={"x": left})
# -            pl.semaphore_wait(credit, 1)

# %% distributed/7: the credit goes to the right
# reduce_kernel: `device_id={"x": left}` -> `device_id={"x": right}`

# %% distributed/7: the credit comes before the sum has been added to
# reduce_kernel:
# -            add(block, inbox, acc)
# -            pl.semaphore_signal(credit, 1, device_id={"x": left})
# +            pl.semaphore_signal(credit, 1, device_id={"x": left})
# +            add(block, inbox, acc)

# %% distributed/7: waits for a credit also before the first copy
# reduce_kernel:
# -            pl.semaphore_wait(credit, 1)
# +        pl.semaphore_wait(credit, 1)

# %% distributed/7: a credit after the last copy, for which nobody waits
# reduce_kernel:
# -    add(x_ref.at[me], inbox, o_ref)
# +    add(x_ref.at[me], inbox, o_ref)
# +    pl.semaphore_signal(credit, 1, device_id={"x": left})

# %% distributed/7: no barrier
# reduce_kernel:
# -    meet_neighbours()

# %% distributed/7: every sum ends at the device before its own
# reduce_kernel: `me - 1 - hop + n` -> `me - hop + n`

# %% distributed/7: the blocks are counted the other way around
# reduce_kernel: `me - 1 - hop + n` -> `me + 1 + hop`

# %% distributed/7: the own block is sent on in every hop
# reduce_kernel:
# -        source = block if hop == 0 else acc
# +        source = block

# %% distributed/7: the last block is forgotten
# reduce_kernel: `add(x_ref.at[me], inbox, o_ref)` -> `pltpu.sync_copy(inbox, o_ref)`

# %% distributed/7: nobody waits until the sum has left
# reduce_kernel: `copy.wait()` -> `copy.wait_recv()`

# %% distributed/7: nobody waits for the sum that comes
# reduce_kernel: `copy.wait()` -> `copy.wait_send()`


# %% distributed/7: every device sends all that it has around the ring
def reduce_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
    meet_neighbours()
    pltpu.sync_copy(x_ref.at[me], o_ref)
    for step in range(1, n):
        to = lax.rem(me + step, n)
        for hop in range(step):
            source = x_ref.at[lax.rem(to, n)] if hop == 0 else acc
            copy = pltpu.make_async_remote_copy(source, inbox, sent, came, device_id={"x": right})
            copy.start()
            copy.wait()
            pltpu.sync_copy(inbox, acc)
            pl.semaphore_signal(credit, 1, device_id={"x": left})
            pl.semaphore_wait(credit, 1)
        add(o_ref, acc, o_ref)


# %% distributed/7: straight to whom the block belongs
def reduce_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_everybody()
    pltpu.sync_copy(x_ref.at[me], o_ref)
    for step in range(1, n):
        to, other = lax.rem(me + step, n), lax.rem(me - step + n, n)
        copy = pltpu.make_async_remote_copy(x_ref.at[to], inbox, sent, came, device_id={"x": to})
        copy.start()
        copy.wait()
        add(o_ref, inbox, acc)
        pltpu.sync_copy(acc, o_ref)
        if step < n - 1:
            pl.semaphore_signal(credit, 1, device_id={"x": lax.rem(other + n - 1, n)})
            pl.semaphore_wait(credit, 1)


# %% distributed/8: one semaphore for what comes from both sides
# halves_kernel: `came.at[way]` -> `came.at[0]`

# %% distributed/8: one semaphore for what leaves in both directions
# halves_kernel: `sent.at[way]` -> `sent.at[0]`

# %% distributed/8: one credit for both neighbours
# halves_kernel: `pl.semaphore_signal(credit.at[way]` -> `pl.semaphore_signal(credit.at[0]`
# halves_kernel: `pl.semaphore_wait(credit.at[way]` -> `pl.semaphore_wait(credit.at[0]`

# %% distributed/8: both ways add into one buffer
# halves_kernel: `else acc.at[way]` -> `else acc.at[0]`
# halves_kernel: `inbox.at[way], acc.at[way])` -> `inbox.at[way], acc.at[0])`

# %% distributed/8: the credit goes to whom you send
# halves_kernel: `before[way]` -> `after[way]`

# %% distributed/8: no credits
# halves_kernel:
# -            pl.semaphore_signal(credit.at[way], 1, device_id={"x": before[way]})
# -            pl.semaphore_wait(credit.at[way], 1)

# %% distributed/8: the next copy starts before the credit has come
# halves_kernel:
# -            pl.semaphore_wait(credit.at[way], 1)
# -            copy(way, hop).start()
# +            copy(way, hop).start()
# +            pl.semaphore_wait(credit.at[way], 1)

# %% distributed/8: both halves go to the right
# halves_kernel: `1 + hop` -> `n - 1 - hop`
# halves_kernel: `after, before = (right, left), (left, right)` -> `after, before = (right, right), (left, left)`

# %% distributed/8: the blocks that go to the left are counted as those to the right
# halves_kernel: `1 + hop` -> `n - 1 - hop`

# %% distributed/8: half 0 is added in both ways
# halves_kernel: `lax.rem(me + step, n), way]` -> `lax.rem(me + step, n), 0]`

# %% distributed/8: waits for both ways before it adds
# halves_kernel:
# -        for way in range(2):
# -            copy(way, hop - 1).wait()
# -            add(block(way, hop), inbox.at[way], acc.at[way])
# +        for way in range(2):
# +            copy(way, hop - 1).wait()
# +        for way in range(2):
# +            add(block(way, hop), inbox.at[way], acc.at[way])

# %% distributed/8: the copies are started when both halves have been added to
# halves_kernel:
# -            copy(way, hop).start()
# +        for way in range(2):
# +            copy(way, hop).start()

# %% distributed/8: the last half that goes to the left is forgotten
# halves_kernel:
# -        add(x_ref.at[me, way], inbox.at[way], o_ref.at[way])
# +        add(x_ref.at[me, way], inbox.at[way], o_ref.at[0])

# %% distributed/8: adds before it waits
# halves_kernel:
# -            copy(way, hop - 1).wait()
# -            add(block(way, hop), inbox.at[way], acc.at[way])
# +            add(block(way, hop), inbox.at[way], acc.at[way])
# +            copy(way, hop - 1).wait()

# %% distributed/9: the rows are not passed on
# grid_gather_kernel: `range(rows - 1)` -> `range(0)`

# %% distributed/9: only the own part is passed on along the columns
# grid_gather_kernel: `o_ref.at[lax.rem(j - hop + rows, rows)]` -> `o_ref.at[lax.rem(j - hop + rows, rows), i]`

# %% distributed/9: the second half uses the semaphores of the first
# grid_gather_kernel: `came.at[columns - 1 + hop]` -> `came.at[hop]`

# %% distributed/9: the axes are exchanged in the result
# grid_gather_kernel: `o_ref.at[j, i]` -> `o_ref.at[i, j]`

# %% distributed/9: both halves go along x
# grid_gather_kernel: `below = {"y": lax.rem(j + 1, rows)}` -> `below = {"x": lax.rem(i + 1, columns)}`

# %% distributed/9: a copy along the row goes to the first row
# grid_gather_kernel: `right = {"x": lax.rem(i + 1, columns)}` -> `right = {"y": 0, "x": lax.rem(i + 1, columns)}`

# %% distributed/9: only the neighbours along x meet
# grid_gather_kernel: `meet_neighbours_on("y", "x")` -> `meet_neighbours_on("x")`

# %% distributed/9: the last device of a row has no right neighbour
# grid_gather_kernel: `lax.rem(i + 1, columns)` -> `i + 1`

# %% distributed/9: the sizes of the axes are exchanged
# elsewhere: the copies to devices that are not there are named
# grid_gather_kernel: `rows, columns = lax.axis_size("y"), lax.axis_size("x")` -> `rows, columns = lax.axis_size("x"), lax.axis_size("y")`

# %% distributed/9: a row is sent on before it has come
# grid_gather_kernel: `row = o_ref.at[lax.rem(j - hop + rows, rows)]` -> `row = o_ref.at[lax.rem(j + 1, rows)]`

# %% distributed/9: the parts that come along x are waited for at the end
# grid_gather_kernel:
# -        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id=right)
# -        copy.start()
# -        copy.wait()
# +        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id=right)
# +        copy.start()
# +        copy.wait_send()
# +    for hop in range(columns - 1):
# +        pltpu.make_async_remote_copy(x_ref, x_ref, sent, came.at[hop], device_id=right).wait_recv()


# %% distributed/9: columns first
def grid_gather_kernel(x_ref, o_ref, own, sent, came):
    rows, columns = lax.axis_size("y"), lax.axis_size("x")
    j, i = lax.axis_index("y"), lax.axis_index("x")
    meet_neighbours_on("y", "x")
    mine = pltpu.make_async_copy(x_ref, o_ref.at[j, i], own)
    mine.start()
    mine.wait()
    for hop in range(rows - 1):
        part = o_ref.at[lax.rem(j - hop + rows, rows), i]
        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id={"y": lax.rem(j + 1, rows)})
        copy.start()
        copy.wait()
    for hop in range(columns - 1):
        column = o_ref.at[:, lax.rem(i - hop + columns, columns)]
        copy = pltpu.make_async_remote_copy(
            column, column, sent, came.at[rows - 1 + hop], device_id={"x": lax.rem(i + 1, columns)}
        )
        copy.start()
        copy.wait()


# %% distributed/9: straight to everybody
def grid_gather_kernel(x_ref, o_ref, own, sent, came):
    rows, columns = lax.axis_size("y"), lax.axis_size("x")
    j, i = lax.axis_index("y"), lax.axis_index("x")
    others = [(a, b) for a in range(rows) for b in range(columns) if a or b]
    places = [{"y": lax.rem(j + a, rows), "x": lax.rem(i + b, columns)} for a, b in others]
    barrier = pltpu.get_barrier_semaphore()
    for place in places:
        pl.semaphore_signal(barrier, 1, device_id=place)
    pl.semaphore_wait(barrier, len(places))
    pltpu.sync_copy(x_ref, o_ref.at[j, i])
    copies = [pltpu.make_async_remote_copy(x_ref, o_ref.at[j, i], sent, own, device_id=place) for place in places]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


# %% distributed/10: only the neighbours meet
# recut_kernel: `meet_everybody()` -> `meet_neighbours()`

# %% distributed/10: no barrier
# elsewhere: it is missing in front of the first line that does more than give names to values
# recut_kernel:
# -    meet_everybody()

# %% distributed/10: the target is where the receiver's own rows go
# recut_kernel: `make_async_remote_copy(part, mine,` -> `make_async_remote_copy(part, o_ref.at[pl.ds(to * r, r)],`

# %% distributed/10: everybody gets the sender's own columns
# recut_kernel: `pl.ds(to * c, c)` -> `pl.ds(me * c, c)`

# %% distributed/10: nobody waits for what comes
# recut_kernel: `copy.wait()` -> `copy.wait_send()`

# %% distributed/10: nobody waits until the blocks have left
# recut_kernel: `copy.wait()` -> `copy.wait_recv()`

# %% distributed/10: only the last copy is waited for
# recut_kernel:
# -    for copy in copies:
# -        copy.wait()
# +    copies[-1].wait()

# %% distributed/10: the own block is forgotten
# recut_kernel:
# -    own.start()
# recut_kernel:
# -    own.wait()

# %% distributed/10: a device is left out
# recut_kernel: `range(1, n)` -> `range(1, n - 1)`

# %% distributed/10: the example's eight devices
# recut_kernel: `range(1, n)` -> `range(1, 8)`

# %% distributed/10: both ways at once, to half of the ring
# recut_kernel: `range(1, n)` -> `[*range(1, n // 2 + 1), *range(n - n // 2 + 1, n)]`

# %% distributed/11a: where they end
# plan: `jnp.cumsum(counts, axis=1) - counts` -> `jnp.cumsum(counts, axis=1)`

# %% distributed/11a: the sum runs over the senders
# plan: `jnp.cumsum(counts, axis=1) - counts` -> `jnp.cumsum(counts, axis=0) - counts`

# %% distributed/11a: sorted by sender, then by expert
# plan: `counts.T.reshape(n, -1)` -> `counts.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)`
# plan: `.reshape(E, n).T` -> `.reshape(n, n, -1).swapaxes(0, 1).reshape(n, E)`

# %% distributed/11a: the places of all devices in one row
# plan: `counts.T.reshape(n, -1)` -> `counts.T.reshape(1, -1)`

# %% distributed/11a: each expert begins at 0
# plan: `counts.T.reshape(n, -1)` -> `counts.T`


# %% distributed/11a: the places of the sender
def plan(counts):
    starts = jnp.cumsum(counts, axis=1) - counts
    return starts, starts


# %% distributed/11a: the spec's loops
def plan(counts):
    (n, E), rows = counts.shape, counts.tolist()
    starts, places = ([[0] * E for _ in range(n)] for _ in range(2))
    for i in range(n):
        for e in range(E):
            first = e - e % (E // n)
            starts[i][e] = sum(rows[i][:e])
            places[i][e] = sum(sum(row[first:e]) for row in rows) + sum(row[e] for row in rows[:i])
    return jnp.asarray(starts), jnp.asarray(places)


# %% distributed/11a: a loop over the numbers, written out under jit
def plan(counts):
    n, E = counts.shape
    e = E // n
    starts = jnp.stack([counts[:, :f].sum(1) for f in range(E)], 1)
    places = [counts[:, f - f % e : f].sum() + counts[:i, f].sum() for i in range(n) for f in range(E)]
    return starts, jnp.stack(places).reshape(n, E)


# %% distributed/11a: the order of the numbers is not turned back
# plan: `.reshape(E, n).T` -> `.reshape(n, E)`

# %% distributed/11a: sums of products in bfloat16
# plan: `jnp.cumsum(counts, axis=1) - counts` -> `(counts.astype(jnp.bfloat16) @ jnp.triu(jnp.ones((E, E), jnp.bfloat16), 1)).astype(jnp.int32)`

# %% distributed/11b: only the neighbours meet
# send_rows_kernel: `meet_everybody()` -> `meet_neighbours()`

# %% distributed/11b: the rows lie where they lay at the sender
# send_rows_kernel: `o_ref.at[pl.ds(places[p], sizes[p])]` -> `o_ref.at[pl.ds(starts[p], sizes[p])]`

# %% distributed/11b: nobody waits for what comes
# send_rows_kernel:
# -    wait_for_rows(o_ref, due[0], came)

# %% distributed/11b: nobody waits until the rows have left
# send_rows_kernel:
# -    wait_for_rows(x_ref, to_others, sent)

# %% distributed/11b: waits for as many rows as are sent
# send_rows_kernel: `wait_for_rows(o_ref, due[0], came)` -> `wait_for_rows(o_ref, to_others, came)`

# %% distributed/11b: the own rows are waited for as if they were sent
# send_rows_kernel: `wait_for_rows(x_ref, to_others, sent)` -> `wait_for_rows(x_ref, x_ref.shape[0], sent)`

# %% distributed/11b: pieces without rows are sent, too
# send_rows_kernel: `pl.when(sizes[p] > 0)(copy.start)` -> `copy.start()`

# %% distributed/11b: the own rows go to the other semaphore
# send_rows_kernel: `make_async_copy(source, target, came)` -> `make_async_copy(source, target, sent)`

# %% distributed/11b: the pieces are counted from the device itself
# send_rows_kernel: `to * pieces + j` -> `step * pieces + j`

# %% distributed/11b: one piece for each device
# send_rows_kernel: `range(pieces)` -> `range(1)`

# %% distributed/11b: the example's two experts
# elsewhere: the loop that uses it is named
# send_rows_kernel: `pieces = sizes.shape[0] // n` -> `pieces = 2`


# %% distributed/11b: a copy for each row
def send_rows_kernel(sizes, starts, places, due, x_ref, o_ref, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_everybody()
    pieces = sizes.shape[0] // n

    def send(p, row):
        to = p // pieces
        source, target = x_ref.at[pl.ds(starts[p] + row, 1)], o_ref.at[pl.ds(places[p] + row, 1)]
        pl.when(to == me)(pltpu.make_async_copy(source, target, came).start)
        pl.when(to != me)(pltpu.make_async_remote_copy(source, target, sent, came, device_id={"x": to}).start)

    to_others = 0
    for p in range(n * pieces):
        lax.fori_loop(0, sizes[p], lambda row, _, p=p: send(p, row), None)
        to_others += jnp.where(p // pieces == me, 0, sizes[p])
    wait_for_rows(x_ref, to_others, sent)
    wait_for_rows(o_ref, due[0], came)


# %% distributed/11b: the own rows stay where they are
# send_rows_kernel: `range(n)` -> `range(1, n)`

# %% distributed/11b: waits until all of x has left
# send_rows_kernel: `wait_for_rows(x_ref, to_others, sent)` -> `wait_for_rows(x_ref, x_ref.shape[0] - sum(sizes[me * pieces + j] for j in range(pieces)), sent)`

# %% distributed/11c: the result is not sorted back
# moe_local: `back[jnp.argsort(order)]` -> `back`

# %% distributed/11c: the result is sorted once more
# moe_local: `back[jnp.argsort(order)]` -> `back[order]`

# %% distributed/11c: the tokens are not sorted
# moe_local: `send_rows(x[order], ` -> `send_rows(x, `

# %% distributed/11c: the experts get this device's own sizes
# moe_local: `sizes.sum(axis=0)` -> `counts[me, mine]`

# %% distributed/11c: waits for as many rows as are sent
# moe_local: `places[me], sizes.sum(), ` -> `places[me], counts[me].sum(), `

# %% distributed/11c: on the way back, starts and places are those of the way there
# moe_local: `places[:, mine], starts[:, mine]` -> `starts[:, mine], places[:, mine]`

# %% distributed/11c: what goes back is what was sent
# moe_local: `send_rows(y, sizes, places[:, mine], starts[:, mine]` -> `send_rows(y, counts[me], places[me], starts[me]`

# %% distributed/11c: every eighth expert
# moe_local: `me * e + jnp.arange(e)` -> `me + n * jnp.arange(e)`


# %% distributed/11c: every device gathers all tokens, and sums what the experts return
def moe_local(x, experts, w1, w2):
    n, me, e = lax.axis_size("x"), lax.axis_index("x"), w1.shape[0]
    x, experts = lax.all_gather(x, "x", tiled=True), lax.all_gather(experts, "x", tiled=True)
    here = experts // e == me
    order = jnp.argsort(jnp.where(here, experts, n * e))
    sizes = jnp.bincount(jnp.where(here, experts - me * e, e), length=e + 1)[:e]
    y = expert_mlp(x[order], w1, w2, sizes)[jnp.argsort(order)]
    return lax.psum_scatter(jnp.where(here[:, None], y, 0), "x", tiled=True)


# %% distributed/12a: waits for each copy before it attends
# ring_attention_kernel:
# -            copy.start()
# +            copy.start()
# +            copy.wait()
# ring_attention_kernel:
# -            copy.wait()
# -            if hop < n - 2:
# +            if hop < n - 2:

# %% distributed/12a: the sum is not rescaled
# ring_attention_kernel: `l * shrink + ` -> `l + `

# %% distributed/12a: the values are not rescaled
# ring_attention_kernel: `acc * shrink + ` -> `acc + `

# %% distributed/12a: rescaled the wrong way
# ring_attention_kernel: `jnp.exp(m - new)` -> `jnp.exp(new - m)`

# %% distributed/12a: no maximum
# ring_attention_kernel: `new = jnp.maximum(m, scores.max(axis=1, keepdims=True))` -> `new = jnp.zeros((s, 1))`
# ring_attention_kernel: `m, l, acc = jnp.full((s, 1), -jnp.inf), ` -> `m, l, acc = jnp.zeros((s, 1)), `

# %% distributed/12a: the largest score of each part alone
# ring_attention_kernel: `jnp.maximum(m, scores.max(axis=1, keepdims=True))` -> `scores.max(axis=1, keepdims=True)`
# ring_attention_kernel: `jnp.exp(m - new)` -> `1.0`

# %% distributed/12a: attends to its own part only
# ring_attention_kernel: `jnp.dot(q_ref[...], kv[here, 0].T)` -> `jnp.dot(q_ref[...], k_ref[...].T)`
# ring_attention_kernel: `jnp.dot(p, kv[here, 1])` -> `jnp.dot(p, v_ref[...])`

# %% distributed/12a: reads the slot that is being filled
# ring_attention_kernel: `kv[here, 0].T` -> `kv[there, 0].T`
# ring_attention_kernel: `kv[here, 1])` -> `kv[there, 1])`

# %% distributed/12a: the last part is forgotten
# ring_attention_kernel: `range(n)` -> `range(n - 1)`

# %% distributed/12a: no credits
# ring_attention_kernel:
# -            if hop > 0:
# -                pl.semaphore_wait(credit, 1)
# ring_attention_kernel:
# -            if hop < n - 2:
# -                pl.semaphore_signal(credit, 1, device_id={"x": left})

# %% distributed/12a: the credit comes before the slot has left
# ring_attention_kernel:
# -            copy.wait()
# -            if hop < n - 2:
# -                pl.semaphore_signal(credit, 1, device_id={"x": left})
# +            if hop < n - 2:
# +                pl.semaphore_signal(credit, 1, device_id={"x": left})
# +            copy.wait()

# %% distributed/12a: the scores are not scaled
# ring_attention_kernel: ` * d**-0.5` -> ``

# %% distributed/12b: waits before it multiplies
# gather_matmul_kernel:
# -            copy.start()
# +            copy.start()
# +            copy.wait()
# gather_matmul_kernel:
# -        if hop < n - 1:
# -            copy.wait()


# %% distributed/12b: gathers all, then multiplies once
def gather_matmul_kernel(x_ref, w_ref, o_ref, buf, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_neighbours()
    b = x_ref.shape[0]
    buf[0] = x_ref[...]
    for hop in range(n - 1):
        to = {"x": lax.rem(me + 1, n)}
        copy = pltpu.make_async_remote_copy(buf.at[hop], buf.at[hop + 1], sent, came.at[hop], device_id=to)
        copy.start()
        copy.wait()
    for hop in range(n):
        o_ref[pl.ds(lax.rem(me - hop + n, n) * b, b)] = jnp.dot(buf[hop], w_ref[...])


# %% distributed/12b: straight to everybody
def gather_matmul_kernel(x_ref, w_ref, o_ref, buf, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    b = x_ref.shape[0]
    meet_everybody()
    buf[0] = x_ref[...]
    copies = [
        pltpu.make_async_remote_copy(x_ref, buf.at[hop], sent, came.at[hop - 1], device_id={"x": lax.rem(me + hop, n)})
        for hop in range(1, n)
    ]
    for copy in copies:
        copy.start()
    for hop in range(n):
        if hop > 0:
            copies[hop - 1].wait()
        o_ref[pl.ds(lax.rem(me - hop + n, n) * b, b)] = jnp.dot(buf[hop], w_ref[...])


# %% distributed/12b: the rows of the other way around
# gather_matmul_kernel: `lax.rem(me - hop + n, n)` -> `lax.rem(me + hop, n)`

# %% distributed/12b: the own part in every hop
# gather_matmul_kernel: `jnp.dot(buf[hop], w_ref[...])` -> `jnp.dot(x_ref[...], w_ref[...])`

# %% distributed/12b: one semaphore for all hops
# gather_matmul_kernel: `came.at[hop]` -> `came.at[0]`

# %% distributed/12b: multiplies the part that is on its way
# gather_matmul_kernel: `jnp.dot(buf[hop], w_ref[...])` -> `jnp.dot(buf[min(hop + 1, n - 1)], w_ref[...])`

# %% distributed/12b: the last part is not multiplied
# gather_matmul_kernel: `range(n)` -> `range(n - 1)`

# %% distributed/12b: nobody waits until the parts have left
# gather_matmul_kernel: `copy.wait()` -> `copy.wait_recv()`

# %% distributed/12b: the rows begin at the device's number
# gather_matmul_kernel: `lax.rem(me - hop + n, n) * b` -> `lax.rem(me - hop + n, n)`

# %% distributed/12c: waits before it multiplies
# matmul_scatter_kernel:
# -        part = jnp.dot(h_ref[rows], w_ref[...])
# -        if hop > 0:
# -            copy.wait()
# +        if hop > 0:
# +            copy.wait()
# +        part = jnp.dot(h_ref[rows], w_ref[...])
# +        if hop > 0:

# %% distributed/12c: the sum that came is not added
# matmul_scatter_kernel:
# -            part += buf[here]

# %% distributed/12c: adds the slot that it has sent
# matmul_scatter_kernel: `part += buf[here]` -> `part += buf[there]`

# %% distributed/12c: the sums end at the left neighbour
# matmul_scatter_kernel: `lax.rem(me - hop - 1 + n, n)` -> `lax.rem(me - hop + n, n)`

# %% distributed/12c: the rows of the other way around
# matmul_scatter_kernel: `lax.rem(me - hop - 1 + n, n)` -> `lax.rem(me + hop + 1, n)`

# %% distributed/12c: no credits
# matmul_scatter_kernel:
# -            if hop < n - 1:
# -                pl.semaphore_signal(credit, 1, device_id={"x": left})
# -                pl.semaphore_wait(credit, 1)

# %% distributed/12c: the credit goes to the right
# matmul_scatter_kernel: `device_id={"x": left}` -> `device_id={"x": right}`

# %% distributed/12c: the credit comes before the slot has left
# matmul_scatter_kernel:
# -            copy.wait()
# -            part += buf[here]
# -            if hop < n - 1:
# -                pl.semaphore_signal(credit, 1, device_id={"x": left})
# -                pl.semaphore_wait(credit, 1)
# +            if hop < n - 1:
# +                pl.semaphore_signal(credit, 1, device_id={"x": left})
# +            copy.wait()
# +            part += buf[here]
# +            if hop < n - 1:
# +                pl.semaphore_wait(credit, 1)

# %% distributed/12c: sends without a credit, and waits for it at the end
# matmul_scatter_kernel:
# -                pl.semaphore_wait(credit, 1)
# matmul_scatter_kernel:
# -    o_ref[...] = part
# +    o_ref[...] = part
# +    pl.semaphore_wait(credit, n - 2)

# %% distributed/12c: what has come is not waited for
# matmul_scatter_kernel: `copy.wait()` -> `copy.wait_send()`


# %% distributed/12c: all products first
# matmul_scatter_kernel:
# -    b = o_ref.shape[0]
# +    b = o_ref.shape[0]
# +    parts = [jnp.dot(h_ref[pl.ds(lax.rem(me - hop - 1 + n, n) * b, b)], w_ref[...]) for hop in range(n)]
# matmul_scatter_kernel:
# -        rows = pl.ds(lax.rem(me - hop - 1 + n, n) * b, b)
# -        part = jnp.dot(h_ref[rows], w_ref[...])
# +        part = parts[hop]
