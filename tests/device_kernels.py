"""Eight kernels on several devices, right and with one mistake each: for the tests of the machine, and for benchmarks.

CASES[name](n, bug) -> (a function, its arguments, what is right); MISTAKES: name -> bugs. A bug of "" is none. SLOW and
HARMLESS: those that cost too much, and those that are no bug.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Case = tuple[Callable[..., Any], tuple[np.ndarray, ...], np.ndarray]
S = jax.ShapeDtypeStruct
HBM, VMEM = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
DMA, REGULAR = pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR
COLLECTIVE = pltpu.CompilerParams(collective_id=0)
TILE = (8, 128)


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


ROWS = P("x")


def on(n: int, fn: Callable[..., Any], in_specs: Any = ROWS) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(fn, mesh=mesh(x=n), in_specs=in_specs, out_specs=ROWS, check_vma=False))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ring() -> tuple[Any, Any, Any, Any]:
    """(devices, this one, its left neighbour, its right one)."""
    n, me = lax.axis_size("x"), lax.axis_index("x")
    return n, me, lax.rem(me + n - 1, n), lax.rem(me + 1, n)


def meet(*others: Any) -> None:
    barrier = pltpu.get_barrier_semaphore()
    for other in others:
        pl.semaphore_signal(barrier, 1, device_id={"x": other})
    pl.semaphore_wait(barrier, len(others))


def remote(src: Any, dst: Any, sent: Any, came: Any, to: Any) -> Any:
    return pltpu.make_async_remote_copy(src, dst, sent, came, device_id={"x": to})


def collective(kernel: Callable[..., None], out: Any, scratch: list[Any], *args: Any, spec: Any = HBM) -> Any:
    """The kernel on these arrays; they and the results are all in one kind of memory."""
    specs = [spec] * len(args), jax.tree.map(lambda _: spec, out)
    return pl.pallas_call(
        kernel, out_shape=out, in_specs=specs[0], out_specs=specs[1], scratch_shapes=scratch, compiler_params=COLLECTIVE
    )(*args)


def permute(n: int, bug: str = "") -> Case:
    """Each device gets what its left neighbour has."""

    def kernel(x_ref, o_ref, sent, came):
        _, _, left, right = ring()
        if bug != "no-barrier":
            meet(left, right)
        copy = remote(x_ref, o_ref, sent, came, right)
        copy.start()
        if bug != "no-wait-send":
            copy.wait_send()
        if bug != "no-wait-recv":
            copy.wait_recv()
        if bug == "waits-twice":
            copy.wait_recv()

    def call(x):
        return collective(kernel, S(x.shape, x.dtype), [DMA, DMA], x)

    x = normal(n * 8, 128)
    return on(n, call), (x,), np.roll(x.reshape(n, 8, 128), 1, 0).reshape(x.shape)


def all_gather(n: int, bug: str = "") -> Case:
    """Around the ring: in each hop a device sends on what it has got in the last one."""

    def kernel(x_ref, o_ref, own, sent, came):
        _, me, left, right = ring()
        if bug != "no-barrier":
            meet(left, right)
        mine = pltpu.make_async_copy(x_ref, o_ref.at[me], own)
        mine.start()
        if bug != "own-copy-late":
            mine.wait()
        later = []
        for hop in range(n - 1):
            slot = lax.rem(me - hop + n, n)
            arrived = came if bug == "one-semaphore" else came.at[hop]
            copy = remote(o_ref.at[slot], o_ref.at[slot], sent, arrived, right)
            copy.start()
            copy.wait_send()
            if bug == "waits-at-the-end":
                later.append(copy)
            elif not (bug == "skips-a-wait" and hop == 1):
                copy.wait_recv()
        for copy in later:
            copy.wait_recv()
        if bug == "own-copy-late":
            mine.wait()

    def call(x):
        out, arrivals = S((n, *x.shape), x.dtype), DMA if bug == "one-semaphore" else DMA((n - 1,))
        return collective(kernel, out, [DMA, DMA, arrivals], x)

    x = normal(n * 8, 128)
    return on(n, call), (x,), np.concatenate([x.reshape(n, 8, 128)] * n)


def all_reduce(n: int, bug: str = "") -> Case:
    """The sum of all, around the ring through two slots. A credit says that the right neighbour has read its slot."""

    def kernel(x_ref, o_ref, buf, sent, came, credit):
        _, _, left, right = ring()
        if bug != "no-barrier":
            meet(left, right)
        o_ref[...] = x_ref[...]
        buf[0] = x_ref[...]
        for hop in range(n - 1):
            now, then = hop % 2, 1 - hop % 2
            if bug != "no-credit" and hop > 0:
                pl.semaphore_wait(credit, 1)
            arrived = came if bug == "one-semaphore" else came.at[then]
            copy = remote(buf.at[now], buf.at[then], sent.at[now], arrived, right)
            copy.start()
            if hop > 0:
                o_ref[...] += buf[now]
            if bug == "adds-early":
                o_ref[...] += buf[then]
            copy.wait()
            if bug != "no-credit" and (hop < n - 2 or bug == "credit-too-many"):
                past = lax.rem(left + n - 1, n)
                to = {"credit-to-the-right": right, "credit-past-the-left": past}.get(bug, left)
                pl.semaphore_signal(credit, 1, device_id={"x": to})
        if bug == "credit-too-few":
            pl.semaphore_wait(credit, 1)
        o_ref[...] += 0 if bug == "adds-early" else buf[(n - 1) % 2]

    def call(x):
        buf, arrivals = pltpu.VMEM((2, *x.shape), x.dtype), DMA if bug == "one-semaphore" else DMA((2,))
        return collective(kernel, S(x.shape, x.dtype), [buf, DMA((2,)), arrivals, REGULAR], x, spec=VMEM)

    x = normal(n * 8, 128)
    return on(n, call), (x,), np.tile(x.reshape(n, 8, 128).sum(0), (n, 1))


def reduce_scatter(n: int, bug: str = "") -> Case:
    """Sums that travel: each stays in HBM, and a pipeline adds what the next device has."""

    def add(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] + b_ref[...]

    tiles = pl.BlockSpec(TILE, lambda i, j: (i, j))

    def kernel(x_ref, o_ref, send, recv, sent, came, credit):
        _, me, left, right = ring()
        added = pltpu.emit_pipeline(
            add, grid=(recv.shape[1] // TILE[0], recv.shape[2] // TILE[1]), in_specs=[tiles] * 2, out_specs=[tiles]
        )
        if bug != "no-barrier":
            meet(left, right)
        for hop in range(n - 1):
            now = hop % 2
            block = lax.rem(me - hop - 1 + 2 * n, n)  # after the last hop it is with its owner
            if hop > 0:
                added(x_ref.at[block], recv.at[1 - now], send.at[now])
            if 0 < hop < n - 1 and bug != "no-credit":
                pl.semaphore_signal(credit, 1, device_id={"x": left})
            if hop > 1 and bug != "no-credit":
                pl.semaphore_wait(credit, 1)
            copy = remote(x_ref.at[block] if hop == 0 else send.at[now], recv.at[now], sent, came.at[now], right)
            copy.start()
            if bug != "no-wait-send":
                copy.wait_send()
            if not (bug == "skips-a-wait" and hop == 1):
                copy.wait_recv()
        added(x_ref.at[me], recv.at[(n - 2) % 2], o_ref)
        if n > 2 and bug != "no-credit":
            pl.semaphore_wait(credit, 1)

    def call(x):
        out, slots = S(x.shape[1:], x.dtype), S((2, *x.shape[1:]), x.dtype)
        return collective(kernel, [out, slots, slots], [DMA, DMA((2,)), REGULAR], x)[0]

    x = normal(n * n, 16, 256)
    return on(n, call), (x,), x.reshape(n, n, 16, 256).sum(0).reshape(n * 16, 256)


def all_to_all(n: int, bug: str = "") -> Case:
    """Each device sends straight to each other one."""

    def kernel(x_ref, o_ref, sent, came):
        _, me, left, right = ring()
        others = [lax.rem(me + k, n) for k in range(1, n)]
        if bug != "no-barrier":
            meet(*([left, right] if bug == "barrier-with-neighbours" else others))
        own = pltpu.make_async_copy(x_ref.at[me], o_ref.at[me], sent)
        own.start()
        copies = [remote(x_ref.at[t], o_ref.at[t if bug == "wrong-place" else me], sent, came, t) for t in others]
        for copy in copies:
            copy.start()
        own.wait()
        for copy in copies:
            copy.wait_send()
        for copy in copies[1:] if bug == "skips-a-wait" else copies:
            copy.wait_recv()

    def call(x):
        return collective(kernel, S(x.shape, x.dtype), [DMA, DMA], x)

    x = normal(n * n, 8, 128)
    return on(n, call), (x,), x.reshape(n, n, 8, 128).swapaxes(0, 1).reshape(x.shape)


def dispatch(n: int, bug: str = "", rows: int = 16) -> Case:
    """Row by row to the device that a table says, as tokens go to experts."""
    x = normal(n * rows, 128)
    to = np.sort(np.random.default_rng(0).integers(0, n, (n, rows)), 1)
    counts = np.stack([np.bincount(t, minlength=n) for t in to]).astype(np.int32)
    starts = (np.cumsum(counts, 1) - counts).astype(np.int32)
    places = (np.cumsum(counts, 0) - counts).astype(np.int32)
    total = counts.sum(0).astype(np.int32)
    want = np.full((n, total.max(), 128), np.nan, np.float32)
    for d in range(n):
        want[d, : total[d]] = x.reshape(n, rows, 128)[to == d]

    def kernel(starts_ref, counts_ref, places_ref, total_ref, x_ref, o_ref, sent, came):
        _, me, _, _ = ring()
        others = [lax.rem(me + k, n) for k in range(1, n)]
        if bug != "no-barrier":
            meet(*others)
        for t in [me, *others]:

            @pl.loop(0, counts_ref[t])
            def _(k, t=t):
                source, target = pl.ds(starts_ref[t] + k, 1), pl.ds(places_ref[t] + k, 1)
                remote(x_ref.at[source], o_ref.at[target], sent, came, t).start()

        one = remote(x_ref.at[pl.ds(0, 1)], o_ref.at[pl.ds(0, 1)], sent, came, me)

        @pl.loop(0, rows)
        def _(k):
            one.wait_send()

        @pl.loop(0, total_ref[0] - (bug == "skips-a-wait"))
        def _(k):
            one.wait_recv()

    def call(*args):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4, grid=(1,), in_specs=[HBM], out_specs=HBM, scratch_shapes=[DMA, DMA]
        )
        out = S(want.shape[1:], x.dtype)
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=out, compiler_params=COLLECTIVE)(*args)

    args = [a.reshape(-1) for a in (starts, counts, places)]
    return on(n, call), (*args, total, x), want.reshape(-1, 128)


def ring_attention(n: int, bug: str = "", rows: int = 16, d: int = 128) -> Case:
    """K and V go around the ring through two slots, while the device works on those that it has."""

    def kernel(q_ref, k_ref, v_ref, o_ref, kv, m, l, acc, sent, came, credit):
        _, _, left, right = ring()
        if bug != "no-barrier":
            meet(left, right)
        kv[0, 0] = k_ref[...]
        kv[0, 1] = v_ref[...]
        m[...] = jnp.full_like(m, -jnp.inf)
        l[...] = jnp.zeros_like(l)
        acc[...] = jnp.zeros_like(acc)
        for hop in range(n):
            now, then = hop % 2, 1 - hop % 2
            if hop < n - 1:
                if hop > 0 and bug != "no-credit":
                    pl.semaphore_wait(credit, 1)
                copy = remote(kv.at[now], kv.at[then], sent.at[now], came.at[then], right)
                copy.start()
            elif bug == "ends-early":
                break
            s = jnp.dot(q_ref[...], kv[now, 0].T, preferred_element_type=jnp.float32)
            new = jnp.maximum(m[...], s.max(1, keepdims=True))
            old, p = jnp.exp(m[...] - new), jnp.exp(s - new[:, :1])
            l[...] = l[...] * old + p.sum(1, keepdims=True)
            acc[...] = acc[...] * old[:, :1] + jnp.dot(p, kv[now, 1], preferred_element_type=jnp.float32)
            m[...] = new
            if hop < n - 1:
                if bug != "no-wait-send":
                    copy.wait_send()
                copy.wait_recv()
                if hop < n - 2 and bug != "no-credit":
                    pl.semaphore_signal(credit, 1, device_id={"x": left})
        o_ref[...] = acc[...] / l[:, :1]

    def call(q, k, v):
        f32 = functools.partial(pltpu.VMEM, dtype=jnp.float32)
        scratch = [f32((2, 2, rows, d)), f32((rows, 128)), f32((rows, 128)), f32((rows, d)), DMA((2,)), DMA((2,))]
        return collective(kernel, S(q.shape, q.dtype), [*scratch, REGULAR], q, k, v, spec=VMEM)

    q, k, v = normal(3, n * rows, d)
    q /= 8
    s = q @ k.T
    p = np.exp(s - s.max(1, keepdims=True))
    return on(n, call, (ROWS,) * 3), (q, k, v), p / p.sum(1, keepdims=True) @ v


def collective_matmul(n: int, bug: str = "", rows: int = 16) -> Case:
    """all_gather(x) @ w: the rows of x go around the ring, while a pipeline multiplies those that are there."""

    def multiply(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    def kernel(x_ref, w_ref, o_ref, buf, sent, came):
        _, me, left, right = ring()
        k, columns = w_ref.shape
        product = pltpu.emit_pipeline(
            multiply,
            grid=(rows // TILE[0], columns // TILE[1]),
            in_specs=[pl.BlockSpec((TILE[0], k), lambda i, j: (i, 0)), pl.BlockSpec((k, TILE[1]), lambda i, j: (0, j))],
            out_specs=[pl.BlockSpec(TILE, lambda i, j: (i, j))],
        )
        if bug != "no-barrier":
            meet(left, right)
        for hop in range(n):
            source = x_ref if hop == 0 else buf.at[hop - 1]
            copy = remote(source, buf.at[hop], sent.at[hop], came.at[hop], right) if hop < n - 1 else None
            if copy is not None:
                copy.start()
                if bug == "serial":
                    copy.wait()
            product(source, w_ref, o_ref.at[lax.rem(me - hop + n, n)])
            if copy is not None and bug != "serial":
                copy.wait_send()
                if not (bug == "skips-a-wait" and hop == 1):
                    copy.wait_recv()

    def call(x, w):
        out, buf = S((n, rows, w.shape[1]), jnp.float32), S((n - 1, *x.shape), x.dtype)
        return collective(kernel, [out, buf], [DMA((n - 1,)), DMA((n - 1,))], x, w)[0]

    x, w = normal(n * rows, 128), normal(128, n * 256)
    want = (x @ w).reshape(n, rows, n, 256).transpose(2, 0, 1, 3).reshape(n * n, rows, 256)
    return on(n, call, (ROWS, P(None, "x"))), (x, w), want


CASES: dict[str, Callable[..., Case]] = {
    f.__name__: f
    for f in (
        permute, all_gather, all_reduce, reduce_scatter, all_to_all, dispatch, ring_attention, collective_matmul,
    )
}  # fmt: skip
MISTAKES = {
    "permute": "no-barrier no-wait-send no-wait-recv waits-twice".split(),
    "all_gather": "no-barrier own-copy-late one-semaphore waits-at-the-end skips-a-wait".split(),
    "all_reduce": (
        "no-barrier no-credit adds-early credit-too-many credit-too-few credit-to-the-right credit-past-the-left"
    ).split(),
    "reduce_scatter": "no-barrier no-credit no-wait-send skips-a-wait".split(),
    "all_to_all": "no-barrier barrier-with-neighbours wrong-place skips-a-wait".split(),
    "dispatch": "no-barrier skips-a-wait".split(),
    "ring_attention": "no-barrier no-credit no-wait-send".split(),
    "collective_matmul": "no-barrier skips-a-wait".split(),
}
SLOW = [("collective_matmul", "serial")]
HARMLESS = [("all_reduce", "one-semaphore")]  # with credits, one copy at a time is on its way to a device
