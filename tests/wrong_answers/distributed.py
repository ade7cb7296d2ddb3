"""Wrong answers to puzzles/distributed.py, and what a verdict has to say about each."""

import jax
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
def mlp_local(x, w1, w2):
    w1 = lax.all_gather(w1, "x", axis=1, tiled=True)
    w2 = lax.all_gather(w2, "x", axis=0, tiled=True)
    return jax.nn.relu(x @ w1) @ w2


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
def mlp_rows_local(x, w1, w2):
    w1 = lax.all_gather(w1, "x", axis=1, tiled=True)
    w2 = lax.all_gather(w2, "x", axis=0, tiled=True)
    return jax.nn.relu(x @ w1) @ w2


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
def gather_kernel(x_ref, o_ref, own, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_neighbours()
    mine = pltpu.make_async_copy(x_ref, o_ref.at[me], own)
    mine.start()
    for hop in range(n - 1):
        part = o_ref.at[lax.rem(me - hop + n, n)]
        copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id={"x": lax.rem(me + 1, n)})
        copy.start()
        copy.wait()
    mine.wait()


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
