# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 50}
# ---

# %% [markdown]
# # Distributed: one model on eight devices
#
# A large model does not fit on one chip. Llama 3 70B has 113 GB of MLP weights in bfloat16, and a TPU v5e has 16 GB. So
# you cut the arrays, and the devices talk to each other. Here you first let JAX do the talking. Then you write the
# copies between devices yourself, inside a Pallas kernel: you send, wait, and make sure that nobody overwrites what
# somebody still reads. You build the heart of every library of collectives: all-gather, all-reduce and reduce-scatter,
# around a ring, in both directions, and on a grid of devices. You end with a layer of experts, attention around a ring,
# and the first MLP again, now with its copies under its products.
#
# You need basics.py and pipelining.py (Puzzles 1 to 4). Puzzle 7 here uses the `emit_pipeline` of pipelining.py Puzzle
# 7, Puzzles 11a and 11c use ragged_dot.py Puzzle 6, and Puzzle 12a the online softmax of softmax.py Puzzle 3. You need
# no TPU: the CPU counts as eight devices. This package simulates all eight devices: each runs the kernel on its own. It
# finds races between devices and waits that never end, and it counts the bytes on every link. JAX's own simulator has
# the last word.
#
# A puzzle is a function whose body says `YOUR CODE HERE`. Fill it in and run the `check` below it.

# %%
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int

from pallas_puzzles import check, hint, integers, normal, own_kernels, progress, setup, show, unwritten
from pallas_puzzles.lens import devices as machine

setup(devices=8)  # before anything else uses JAX: it makes eight devices of the CPU

# %% [markdown]
# ## A mesh, and arrays that are cut
#
# A **mesh** is an array of devices with named axes. A `PartitionSpec`, written `P`, says how an array is cut: for each
# dimension, along which mesh axis. `P("x", None)` cuts the rows into eight parts, `P(None, "x")` the columns, and `P()`
# cuts nothing: every device holds all of it. Here are 16 rows, cut along `"x"`. Our eight devices stand in a ring: a
# link joins each to its two neighbours, and what is sent further goes from link to link.
#
# A function that runs on each device gets that device's part. In it, `lax.axis_index("x")` is the device's number, and
# `lax.axis_size("x")` says how many there are. `lax.all_gather(part, "x", tiled=True)` joins the parts of all devices
# along dimension 0, so that each of them has the whole:


# %%
def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A ring of devices, along an axis that is called x."""
    return jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))


def on_mesh(local, devices, in_specs, out_specs):
    """A function of whole arrays. It cuts them, runs `local` on each device with its parts, and joins the results."""
    # check_vma=False: JAX does not check that results which out_specs call the same on every device are the same.
    return jax.shard_map(local, mesh=mesh_of(devices), in_specs=in_specs, out_specs=out_specs, check_vma=False)


if len(jax.devices()) >= 8:
    rows = NamedSharding(mesh_of(8), P("x", None))
    jax.debug.visualize_array_sharding(jax.device_put(jnp.zeros((16, 64)), rows))


def joined(part):
    whole = lax.all_gather(part, "x", tiled=True)
    print(part.shape, "->", whole.shape, "on each of", lax.axis_size("x"), "devices")
    return whole


if len(jax.devices()) >= 8:
    on_mesh(joined, 8, P("x", None), P())(jnp.zeros((16, 64)))

# %% [markdown]
# ## Four ways to cut a layer
#
# Here are the four schemes that large models combine. You solve nothing yet: run the cells, and compare the numbers.
# Each cell says how many bytes of each array a device holds, and how many bytes it sends. `show_cost`, which is
# given, counts them. The layer has 128 KiB of weights, and there are eight devices.
#
# **Data parallel.** The rows are cut, and each device holds all weights. It computes the gradient for its own rows. The
# gradients of all devices have to be added. `lax.psum(v, "x")` does that: each device gets the sum. In the drawing, a
# box with eight numbers is what all eight devices hold.


# %%
def show_cost(local, in_specs, out_specs, **arrays):
    # given: prints what each of eight devices holds of the arrays, and what it sends
    for (name, x), spec in zip(arrays.items(), in_specs, strict=True):
        part = jax.device_put(x, NamedSharding(mesh_of(8), spec)).addressable_shards[0].data
        print(f"{name} {x.shape}: a device holds {part.nbytes / 1024:g} KiB of {x.nbytes / 1024:g}")
    counts = machine.run(on_mesh(local, 8, in_specs, out_specs), *arrays.values()).counts
    print(f"a device sends {counts.ici_bytes / 8 / 1024:g} KiB")


def loss(w, x, y):
    return 0.5 * jnp.sum((x @ w - y) ** 2)


def data_parallel(x, y, w):
    return lax.psum(jax.grad(loss)(w, x, y), "x")


tokens, y, w = jnp.ones((64, 128)), jnp.ones((64, 256)), jnp.ones((128, 256))
if len(jax.devices()) >= 8:
    jax.debug.visualize_array_sharding(jax.device_put(w, NamedSharding(mesh_of(8), P())))
    show_cost(data_parallel, (P("x", None), P("x", None), P()), P(), tokens=tokens, y=y, w=w)

# %% [markdown]
# **FSDP** (fully sharded data parallel). The weights are cut, too. Just before a layer needs them, they are gathered,
# and thrown away after it. A device holds an eighth. `jax.grad` finds the way back through `all_gather` by itself.
#
# Look at the bytes sent. They are the same as before. Puzzle 2 says why.


# %%
def fsdp(x, y, part):
    return jax.grad(lambda part: loss(lax.all_gather(part, "x", tiled=True), x, y))(part)


if len(jax.devices()) >= 8:
    jax.debug.visualize_array_sharding(jax.device_put(w, NamedSharding(mesh_of(8), P("x", None))))
    show_cost(fsdp, (P("x", None), P("x", None), P("x", None)), P("x", None), tokens=tokens, y=y, w=w)

# %% [markdown]
# **Tensor parallel.** The columns of the weights are cut, and the weights stay where they are. Each device takes all
# rows and makes its own columns of the result. So far it sends nothing at all. But a model goes on with this result,
# and now it is in eight parts: Puzzle 1.


# %%
def tensor_parallel(x, columns):
    return x @ columns


if len(jax.devices()) >= 8:
    jax.debug.visualize_array_sharding(jax.device_put(w, NamedSharding(mesh_of(8), P(None, "x"))))
    show_cost(tensor_parallel, (P(), P(None, "x")), P(None, "x"), tokens=tokens, w=w)

# %% [markdown]
# **Expert parallel.** There are eight matrices, the experts, and each device holds one. Now the rows travel: each goes
# to the device of its expert, and its result comes back. `lax.all_to_all(v, "x", 0, 0)` sends `v[j]` to device j, and
# returns what came, `came[i]` from device i. Here each device has 8 rows for each expert.
#
# Eight times as many weights cost no more memory on a device than one layer did, and the rows are all that is sent.


# %%
def expert_parallel(x, expert):
    came = lax.all_to_all(x, "x", 0, 0)
    return lax.all_to_all(came @ expert, "x", 0, 0)


experts, routed = jnp.ones((8 * 128, 256)), jnp.ones((8 * 8, 8, 128))
if len(jax.devices()) >= 8:
    jax.debug.visualize_array_sharding(jax.device_put(experts, NamedSharding(mesh_of(8), P("x", None))))
    show_cost(expert_parallel, (P("x"), P("x", None)), P("x"), routed=routed, experts=experts)

# %% [markdown]
# You can also leave all of that to XLA. `jax.jit` of arrays that are cut makes a program for all devices, and XLA puts
# the collectives in by itself. This is the gradient of data parallel again, without a `psum` of yours:


# %%
def show_collectives():
    cut = [jax.device_put(a, NamedSharding(mesh_of(8), s)) for a, s in ((w, P()), (tokens, P("x")), (y, P("x")))]
    program = jax.jit(jax.grad(loss)).lower(*cut).compile().as_text()
    print("XLA has put in:", [name for name in ("all-gather", "all-reduce", "all-to-all") if f" {name}(" in program])


if len(jax.devices()) >= 8:
    show_collectives()

# %% [markdown]
# All four run on real GPUs, too. Two H200s, joined by NVLink, finish the same work faster than one: 1.83 times with
# data parallel, 1.75 times with tensor parallel, 1.74 times with FSDP, and 1.66 times with experts.
# benchmarks/scaling.md has the sizes, and benchmarks/scaling.py the programs.
#
# In the puzzles you write the collectives yourself. From Puzzle 3 on you write them copy by copy.

# %% [markdown]
# ## Puzzle 1: Weights on eight devices
#
# **Goal.** `relu(x @ w1) @ w2`, with an eighth of both weight matrices on each device.
#
# ### Theory
#
# On eight devices, the 113 GB of Llama 3 70B's MLPs are 14 GB each, and a v5e has 16.
#
# `jax.shard_map(local, ...)` calls your function `local` once on each device. Its arguments are that device's parts.
# Here every device gets all of `x`, some columns of `w1`, and the rows of `w2` with the same numbers:
#
# ```text
#              x          w1  (D, F)         h             w2  (F, D)
#                        0 1 2 ... 7      0 1 2 ... 7        0 -----
#     all   [B x D]  @   | | |     |  =   | | |     |   @    1 -----   =  a sum of eight
#                        | | |     |      | | |     |        7 -----      matrices (B, D)
# ```
#
# A column of `h` needs one column of `w1`. So the first product and the relu need no communication. The second product
# sums over F, and each device has an eighth of F. What a device computes has the right shape, but it is one of eight
# summands.
#
# `lax.psum(v, "x")` adds them up, as it added gradients above. In tensor parallelism the weights never move, and there
# is one sum for each MLP.


# %%
def mlp_spec(x: Float32[Array, "B D"], w1: Float32[Array, "D F"], w2: Float32[Array, "F D"]) -> Float32[Array, "B D"]:
    return jax.nn.relu(x @ w1) @ w2


def mlp_local(x: Float32[Array, "B D"], w1: Float32[Array, "D f"], w2: Float32[Array, "f D"]) -> Float32[Array, "B D"]:
    # This device's parts: all of x, f = F / devices columns of w1, and the same f rows of w2.
    pass  # YOUR CODE HERE


def mlp(
    x: Float32[Array, "B D"], w1: Float32[Array, "D F"], w2: Float32[Array, "F D"], *, devices: int = 8
) -> Float32[Array, "B D"]:
    return on_mesh(mlp_local, devices, (P(), P(None, "x"), P("x", None)), P())(x, w1, w2)


# %%
# Budget for x (16, 128), w1 (128, 256), w2 (256, 128): bytes_hops=114_688. Each byte that goes from device to device
# counts on every link of its way. A sum of 8 KiB takes 14 KiB over each link of the ring (Puzzle 2 says why).
check("distributed/1", mlp)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the MLP as if your parts were the whole arrays. What is the shape of the result? Which of the two products sums
# over a dimension that is cut? Only the result of that one is incomplete. The budget is enough for one sum of a (B, D)
# matrix, and too small to gather the weights.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def mlp_local(x, w1, w2):
#     h = jax.nn.relu(____)          # (B, f): this device's columns
#     return lax.psum(____, "x")
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def mlp_local(x, w1, w2):
#     h = jax.nn.relu(x @ w1)
#     return lax.psum(h @ w2, "x")
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Cut the first matrix by columns and the second by rows, and a whole MLP costs one sum. If you forget the
# sum, each device returns another matrix, and JAX with `check_vma=False` takes the first one without a word. The check
# here compares them.

# %% [markdown]
# ## Puzzle 2: Half a sum
#
# **Goal.** The same MLP, with the rows of `x` and of the result cut, too. It may send no more than Puzzle 1 did.
#
# ### Theory
#
# After `psum`, eight devices hold the same matrix. For the norms and residuals between two MLPs that is eight times the
# memory and eight times the work. Better: each device keeps an eighth of the rows.
#
# A sum around a ring has two halves anyway. First each device gets the finished sum of *its* rows. Then everybody
# sends their rows around:
#
# ```text
#     psum          =  psum_scatter           +  all_gather
#     14 KiB a link    7 KiB a link              7 KiB a link
#                      device i: sum of rows i   device i: all rows
# ```
#
# `lax.psum_scatter(v, "x", scatter_dimension=0, tiled=True)` is the first half: it sums, and cuts the sum along
# dimension 0. `lax.all_gather(v, "x", tiled=True)` is the second. With `tiled=True` no new dimension is made.


# %%
def mlp_rows_local(x: Float[Array, "b D"], w1: Float[Array, "D f"], w2: Float[Array, "f D"]) -> Float[Array, "b D"]:
    # This device's parts: b = B / devices rows of x, f columns of w1, f rows of w2. The result: its b rows.
    pass  # YOUR CODE HERE


def mlp_rows(
    x: Float[Array, "B D"], w1: Float[Array, "D F"], w2: Float[Array, "F D"], *, devices: int = 8
) -> Float[Array, "B D"]:
    return on_mesh(mlp_rows_local, devices, (P("x", None), P(None, "x"), P("x", None)), P("x", None))(x, w1, w2)


# %%
# Budget for x (16, 128), w1 (128, 256), w2 (256, 128): bytes_hops=114_688. That is what Puzzle 1 sent.
check("distributed/2", mlp_rows)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where does each half belong? Which of the two products needs all rows of `x`? Which one makes a summand, of whose sum
# you keep only your rows? Both halves work along rows, which are dimension 0. An `all_gather` and then a `psum` gives
# the right numbers, but it sends half as much again.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def mlp_rows_local(x, w1, w2):
#     x = lax.____(x, "x", tiled=True)                              # (B, D)
#     part = ____                                                   # (B, D), one of the summands
#     return lax.____(part, "x", scatter_dimension=0, tiled=True)   # (b, D)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def mlp_rows_local(x, w1, w2):
#     x = lax.all_gather(x, "x", tiled=True)
#     part = jax.nn.relu(x @ w1) @ w2
#     return lax.psum_scatter(part, "x", scatter_dimension=0, tiled=True)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The same bytes as one `psum`, and an eighth of the activations on each device. This is how Megatron-LM
# trains, under the name sequence parallelism. FSDP sends both halves, too: it gathers the weights, and on the way back
# JAX turns `all_gather` into `psum_scatter`. But all devices wait while they gather. To compute during that time you
# need the copies in your own hands.
#
# The picture counts in **ticks**. In one tick a link moves 4 KiB, and a kernel makes 1,024 elements, or 1,024 dot
# products of depth 128. The dot products are 64 FLOPs for each byte that a link moves in this time. A v5e does 4,400
# (Puzzle 12a), so the pictures say what overlaps, and not how fast a chip is. A copy also takes a quarter of a tick for
# each link on its way. A copy within a device moves 64 KiB in a tick. The tiles of a pipeline, and arithmetic outside
# of kernels, take no time.

# %%
show(mlp_rows, normal((16, 128)), normal((128, 256)), normal((256, 128)))

# %% [markdown]
# ## Worked example: a signal and a copy
#
# A semaphore is a counter. From here on, your kernels also use those of other devices:
#
# - `pl.semaphore_signal(sem, k, device_id={"x": 3})` adds k to the semaphore of device 3, and does not wait.
# - `pl.semaphore_wait(sem, k)` waits until this device's own holds k, and takes k away.
#
# `device_id` maps a mesh axis to a device's number. A semaphore has to be 0 when the kernel ends. So signal exactly as
# often as somebody waits: here the last device signals nobody.
#
# Device 0 computes before it signals. So device 1 waits for it, device 2 for device 1, and so on: the picture has
# stairs. `pltpu.get_barrier_semaphore()` is a semaphore that is there before the kernel starts. Puzzle 4 says what for.


# %%
def relay_kernel(x_ref, o_ref):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    sem = pltpu.get_barrier_semaphore()

    @pl.when(me > 0)
    def _():
        pl.semaphore_wait(sem, 1)  # my left neighbour is done

    o_ref[...] = 2 * x_ref[...]

    @pl.when(me < n - 1)
    def _():
        pl.semaphore_signal(sem, 1, device_id={"x": me + 1})


def relay(x):
    def local(x):
        parameters = pltpu.CompilerParams(collective_id=0)  # which barrier semaphore
        return pl.pallas_call(relay_kernel, out_shape=x, compiler_params=parameters)(x)

    return on_mesh(local, 8, P("x", None), P("x", None))(x)


if len(jax.devices()) >= 8:
    show(relay, normal((64, 128)))

# %% [markdown]
# A TPU's DMA engine can also write into the memory of another chip. Here device 0 copies to device 1:
#
# ```text
#     device 0              device 1
#     x_ref --- copy ---->  o_ref
#      sent += bytes        came += bytes
# ```
#
# Both devices build the copy, and device 0 alone starts it. `x_ref` and `sent` belong to the device that starts it.
# `o_ref` and `came` are *device 1's*: the same buffer and the same semaphore of the same kernel, over there. Both
# semaphores count bytes:
#
# - `copy.wait_send()` waits until `x_ref` has been read. Device 0 calls it.
# - `copy.wait_recv()` waits until that many bytes have come *to this device*, from whomever. Device 1 calls it.
# - `copy.wait()` is both waits in one.
#
# `meet_neighbours()`, which is given, comes before the first copy. Puzzle 4 says why.


# %%
HBM = pl.BlockSpec(memory_space=pltpu.HBM)


def meet_neighbours():
    # given: returns when both neighbours are in the kernel
    n, me = lax.axis_size("x"), lax.axis_index("x")
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + n - 1, n)})
    pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + 1, n)})
    pl.semaphore_wait(barrier, 2)


def hand_over_kernel(x_ref, o_ref, sent, came):
    me = lax.axis_index("x")
    meet_neighbours()
    copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, came, device_id={"x": 1})

    @pl.when(me == 0)
    def _():
        copy.start()
        copy.wait_send()

    @pl.when(me == 1)
    def _():
        copy.wait_recv()


def hand_over(x):
    def local(x):
        return pl.pallas_call(
            hand_over_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=x,
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return on_mesh(local, 2, P("x", None), P("x", None))(x)  # on device 0, the result holds nothing


if len(jax.devices()) >= 8:
    show(hand_over, normal((16, 128)))

# %% [markdown]
# ## Puzzle 3: A copy to another device
#
# **Goal.** Each device sends its part to its right neighbour. The last one sends to the first.
#
# ### Theory
#
# Every ring below is made of this one copy. A model whose layers lie on several devices passes its activations on like
# this, too: 16 KiB a token for Llama 3 70B, which is 0.36 us on a link of 45 GB/s.
#
# In the worked example one device sent to one other. Now everybody sends at once. All devices run the same kernel:
# while you write into your right neighbour's `o_ref`, your left neighbour writes into yours:
#
# ```text
#     device 2              device 3              device 4
#     x_ref --- copy ---->  o_ref
#      sent += bytes        came += bytes
#                           x_ref --- copy ---->  o_ref
#                            sent += bytes        came += bytes
# ```
#
# Look at the copy that device 2 starts. The `came` that grows is device 3's. Your own `came` counts what your left
# neighbour sends to you. So you wait for a copy that you have not started.
#
# You call `wait_recv()` on your own copy. It only tells the wait how many bytes to expect, and what comes is as large
# as what you sent.


# %%
def rotate_spec(x: Float32[Array, "R C"], *, devices: int = 8) -> Float32[Array, "R C"]:
    return jnp.roll(x, x.shape[0] // devices, axis=0)


def rotate_kernel(x_ref, o_ref, sent, came):
    # x_ref: (r, C), this device's part, in HBM    o_ref: (r, C), in HBM    sent, came: DMA semaphores
    # First call meet_neighbours().
    pass  # YOUR CODE HERE


def rotate(x: Float32[Array, "R C"], *, devices: int = 8) -> Float32[Array, "R C"]:
    def local(x: Float32[Array, "r C"]) -> Float32[Array, "r C"]:
        return pl.pallas_call(
            rotate_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),  # which barrier semaphore
        )(x)

    return on_mesh(local, devices, P("x", None), P("x", None))(x)


# %%
# Budget for x (64, 128): bytes_hops=32_768. Eight parts of 4 KiB, each over one link.
check("distributed/3", rotate)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The neighbour of the last device is device 0: `lax.rem(a, b)` is the remainder of a division. A kernel that ends frees
# its memory, even if a copy still reads or writes it. Two copies touch yours. What has to be over, for each of them,
# before you may end?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def rotate_kernel(x_ref, o_ref, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_neighbours()
#     copy = pltpu.make_async_remote_copy(____, ____, sent, came, device_id={"x": ____})
#     copy.start()
#     ____
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def rotate_kernel(x_ref, o_ref, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_neighbours()
#     copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, came, device_id={"x": lax.rem(me + 1, n)})
#     copy.start()
#     copy.wait_send()
#     copy.wait_recv()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** You wait for a copy that somebody else has started. That works because all devices run the same program.
# Leave out one of the two waits and check again: the verdict names the copy, its two devices and the semaphore.

# %%
show(rotate, normal((64, 128)))

# %% [markdown]
# ## Puzzle 4: Is anybody there?
#
# **Goal.** Write the barrier for an all-to-all, in which each device sends straight to each other one.
#
# ### Theory
#
# Devices do not start a kernel at the same time. If you are early, your neighbour still runs the program before it. The
# memory that will be its `o_ref` then holds something else, and your copy destroys it. Nothing crashes, and if you run
# it in JAX's simulator, the values are right.
#
# Those who copy into you have to know that you are there: signal each of them. Those into whom you copy have to be
# there: wait for a signal from each. A **barrier semaphore** does that: it exists before the kernel starts, once for
# each `collective_id`. (A semaphore in scratch only exists once its device is in the kernel.)
#
# In the relay before Puzzle 3, a device waited for one signal. `meet_neighbours()` waits for two:
#
# ```text
#     device 2 -- +1 -->  device 3  <-- +1 -- device 4
#                         wait(2): both are there
# ```
#
# A signal does not say who sent it. Only their number counts.


# %%
def exchange_spec(x: Float32[Array, "n*n r C"], *, devices: int = 8) -> Float32[Array, "n*n r C"]:
    """x[i * n + j] is what device i has for device j."""
    n = devices
    return x.reshape(n, n, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def meet_everybody():
    # Returns when every device on the axis "x" is in the kernel.
    pass  # YOUR CODE HERE


def exchange_kernel(x_ref, o_ref, sent, came):
    n, me = lax.axis_size("x"), lax.axis_index("x")
    meet_everybody()
    own = pltpu.make_async_copy(x_ref.at[me], o_ref.at[me], sent)
    own.start()
    copies = []
    for step in range(1, n):
        to = lax.rem(me + step, n)
        copies.append(pltpu.make_async_remote_copy(x_ref.at[to], o_ref.at[me], sent, came, device_id={"x": to}))
        copies[-1].start()
    own.wait()
    for copy in copies:
        copy.wait()


def exchange(x: Float32[Array, "n*n r C"], *, devices: int = 8) -> Float32[Array, "n*n r C"]:
    def local(x: Float32[Array, "n r C"]) -> Float32[Array, "n r C"]:
        return pl.pallas_call(
            exchange_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return on_mesh(local, devices, P("x"), P("x"))(x)


# %%
# No budget. The check follows the signals: it knows which device has heard from which.
check("distributed/4", exchange)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two neighbours were enough in Puzzle 3, because only they copied to you. Who copies to you here? Signal each of them.
# Then count: how many signals come to you, when everybody does the same? Do not wait for one that you would have to
# send to yourself.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def meet_everybody():
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     barrier = ____
#     for step in range(____, n):
#         pl.semaphore_signal(barrier, 1, device_id={"x": ____})
#     pl.semaphore_wait(barrier, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def meet_everybody():
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     barrier = pltpu.get_barrier_semaphore()
#     for step in range(1, n):
#         pl.semaphore_signal(barrier, 1, device_id={"x": lax.rem(me + step, n)})
#     pl.semaphore_wait(barrier, n - 1)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A barrier has to cover everybody who copies into you. With the two neighbours of Puzzle 3 in this
# kernel, the TPU's compiler takes it, and if you run it in JAX's simulator, the values are right. Here the verdict says
# which device copies into which one too early.

# %% [markdown]
# ## Puzzle 5: Around the ring
#
# **Goal.** All-gather: at the end every device has the parts of all. Copy to your right neighbour only.
#
# ### Theory
#
# The links of a TPU (ICI: the inter-chip interconnect) join neighbours. A copy to a device four steps away uses four
# links, and other copies have to wait for these. If each of eight devices sends its 4 KiB part straight to all others,
# the links carry 512 KiB together. Passed on from neighbour to neighbour it is 224 KiB:
#
# ```text
#                   device 0    device 1    device 2    device 3
#     hop 0  sends     0 -->       1 -->       2 -->       3 --> (to 0)
#     hop 1  sends     3 -->       0 -->       1 -->       2 -->
#     hop 2  sends     2 -->       3 -->       0 -->       1 -->
# ```
#
# In each hop you send on what came in the last one. After n - 1 hops you have everything. (`lax.rem` of a negative
# number is negative: before you take a remainder, add n.)
#
# Your left neighbour may be faster than you. Then its copies of hop 1 and hop 2 are on their way to you at the same
# time. They may arrive in any order. A wait on a semaphore for both cannot tell which one has come. So each hop gets a
# semaphore of its own: `came.at[hop]`.


# %%
def gather_spec(x: Float32[Array, "n*r C"], *, devices: int = 8) -> Float32[Array, "n*n r C"]:
    """Each of the n devices returns all n parts."""
    parts = x.reshape(devices, x.shape[0] // devices, x.shape[1])
    return jnp.concatenate([parts] * devices)


def gather_kernel(x_ref, o_ref, own, sent, came):
    # x_ref: (r, C), this device's part    o_ref: (n, r, C); part i of it is device i's    both in HBM
    # own, sent: DMA semaphores            came: n - 1 of them, came.at[hop]
    pass  # YOUR CODE HERE


def gather(x: Float32[Array, "n*r C"], *, devices: int = 8) -> Float32[Array, "n*n r C"]:
    def local(x: Float32[Array, "r C"]) -> Float32[Array, "n r C"]:
        return pl.pallas_call(
            gather_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=jax.ShapeDtypeStruct((devices, *x.shape), x.dtype),
            scratch_shapes=[
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((devices - 1,)),
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return on_mesh(local, devices, P("x", None), P("x"))(x)


# %%
# Budget for x (64, 128): bytes_hops=229_376. Each device passes on seven parts of 4 KiB.
check("distributed/5", gather)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First copy your own part to its place in your own `o_ref`, with `pltpu.make_async_copy(source, target, own)`, and wait
# for it: hop 0 sends it. In hop 1 you send the part of your left neighbour, in hop 2 the part of the one before. Which
# number has the part of hop `hop`? It goes to the same place on the right.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def gather_kernel(x_ref, o_ref, own, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_neighbours()
#     mine = pltpu.make_async_copy(x_ref, ____, own)
#     mine.start()
#     mine.wait()
#     for hop in range(____):
#         part = o_ref.at[____]
#         copy = pltpu.make_async_remote_copy(part, part, sent, ____, device_id={"x": ____})
#         copy.start()
#         copy.wait()
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gather_kernel(x_ref, o_ref, own, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_neighbours()
#     mine = pltpu.make_async_copy(x_ref, o_ref.at[me], own)
#     mine.start()
#     mine.wait()
#     for hop in range(n - 1):
#         part = o_ref.at[lax.rem(me - hop + n, n)]
#         copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id={"x": lax.rem(me + 1, n)})
#         copy.start()
#         copy.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** 224 KiB instead of 512 KiB, and every link is busy for four fifths of the time, in one direction. JAX's
# sample kernel sends half of each part each way around, so that both directions of the links work. In your own kernel
# the devices could compute between two hops. Look at the picture: a row for each device, an arrow for each copy. There
# is nothing between the arrows yet.

# %%
show(gather, normal((64, 128)))

# %% [markdown]
# ## Puzzle 6: Two slots and a credit
#
# **Goal.** All-reduce: every device gets the sum of all parts. The parts go around the ring through two slots, and you
# add one while the next is on its way.
#
# ### Theory
#
# Puzzle 5 keeps all eight parts. With 256 devices it would keep 256. For a sum two slots are enough:
#
# ```text
#                 you                          your right neighbour
#     hop 0       buf[0], your own  ------>    buf[1]
#     hop 1       buf[1]            ------>    buf[0]        you add buf[1]
#     hop 2       buf[0]            ------>    buf[1]        you add buf[0]
# ```
#
# Look at hop 1. You overwrite your neighbour's slot 0. Has it sent that slot on, and added it? It may be slow, and
# nothing tells you. Your `wait()` says that *your* part has left and that *your* slot was filled, no more.
#
# So it has to tell you: this is a **credit**. `credit` is a semaphore in scratch that counts signals. When a slot of
# yours is free, signal your *left* neighbour, who will fill it. Before every copy but the first, wait for one signal.
# (The first copy needs none: after the barrier your neighbour's other slot is empty.)
#
# Signal exactly as often as somebody waits.


# %%
def total_spec(x: Float32[Array, "n*r C"], *, devices: int = 8) -> Float32[Array, "n*r C"]:
    """Each of the n devices returns the sum of all parts."""
    return jnp.tile(x.reshape(devices, x.shape[0] // devices, x.shape[1]).sum(0), (devices, 1))


def total_kernel(x_ref, o_ref, buf, sent, came, credit):
    # x_ref, o_ref: (r, C), in VMEM    buf: (2, r, C), in VMEM
    # sent: a DMA semaphore            came: two of them, came.at[slot]        credit: a semaphore for signals
    pass  # YOUR CODE HERE


def total(x: Float32[Array, "n*r C"], *, devices: int = 8) -> Float32[Array, "n*r C"]:
    def local(x: Float32[Array, "r C"]) -> Float32[Array, "r C"]:
        return pl.pallas_call(
            total_kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[
                pltpu.VMEM((2, *x.shape), x.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.REGULAR,
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return on_mesh(local, devices, P("x", None), P("x", None))(x)


# %%
# Budget for x (64, 128): exposed_ici_bytes=80_000. That is what may be on its way while neither the sender nor the
# receiver computes. All copies send 229_376 bytes. The first one, 32_768 of them, has nothing to hide behind. Of each
# later one a fifth stays exposed: it takes 1.25 ticks, and an addition takes 1.
check("distributed/6", total)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A copy has a start and a wait. What can you do between the two? Two slots are in use meanwhile: one is read and one is
# filled. Which one may you read, too? (In hop 0 there is nothing to add: it is your own part.) When may your left
# neighbour fill that slot? In which hop does nobody need your signal any more? What came in the last hop is still to be
# added.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     for hop in range(n - 1):
#         here, there = hop % 2, 1 - hop % 2
#         if hop > 0:
#             pl.semaphore_wait(____, 1)
#         copy = pltpu.make_async_remote_copy(buf.at[here], buf.at[____], sent, came.at[____], device_id={"x": right})
#         copy.start()
#         if hop > 0:
#             o_ref[...] += ____
#         copy.wait()
#         if hop < ____:
#             pl.semaphore_signal(credit, 1, device_id={"x": ____})
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def total_kernel(x_ref, o_ref, buf, sent, came, credit):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
#     meet_neighbours()
#     o_ref[...] = x_ref[...]
#     buf[0] = x_ref[...]
#     for hop in range(n - 1):
#         here, there = hop % 2, 1 - hop % 2
#         if hop > 0:
#             pl.semaphore_wait(credit, 1)
#         copy = pltpu.make_async_remote_copy(buf.at[here], buf.at[there], sent, came.at[there], device_id={"x": right})
#         copy.start()
#         if hop > 0:
#             o_ref[...] += buf[here]
#         copy.wait()
#         if hop < n - 2:
#             pl.semaphore_signal(credit, 1, device_id={"x": left})
#     o_ref[...] += buf[(n - 1) % 2]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Barrier, copies, credits: that is all of the synchronisation in a ring. And the devices add while they
# send. In the picture the additions lie under the arrows. (A large array is cut into n pieces first, so that each link
# carries less: psum_scatter and all_gather, as in Puzzle 2.)

# %%
show(total, normal((64, 128)))

# %% [markdown]
# ## Puzzle 7: A sum that travels
#
# **Goal.** Reduce-scatter: each of n devices has n blocks in HBM. Device i ends with the sum of all blocks i.
#
# ### Theory
#
# In Puzzle 6 every part went all the way around. Often a device needs only its share of the sum: that was
# `psum_scatter` in Puzzle 2. Then do not send what you have. Send the sum so far, and let each device add its block:
#
# ```text
#                        device 0      device 1      device 2      device 3
#     sum of blocks 3    x[3]   --->   + x[3]  --->  + x[3]  --->  + x[3], done
#     sum of blocks 0    + x[0], done  x[0]    --->  + x[0]  --->  + x[0]  ---> (to 0)
# ```
#
# There are n such sums. At any time, each device works on a different sum. In hop 0, device i sends its block i - 1:
# that sum ends at its left neighbour. In each later hop you add to what has come, and send that on. Each link carries
# 56 KiB. If whole arrays went around, it would be 448.
#
# The blocks may be too large for VMEM, so they stay in HBM. `add(a, b, o)`, which is given, streams tiles through VMEM
# with the `emit_pipeline` of pipelining.py Puzzle 7. You add into `acc`, and send that. Your left neighbour copies into
# `inbox`. It has one slot, so credits are needed again.


# %%
def reduce_spec(x: Float32[Array, "n*n r C"], *, devices: int = 8) -> Float32[Array, "n*r C"]:
    """x[i * n + j] is block j of device i. Device j returns the sum of all blocks j."""
    n = devices
    return x.reshape(n, n, *x.shape[1:]).sum(0).reshape(n * x.shape[1], x.shape[2])


def add(a_ref, b_ref, o_ref, *, bm=8):
    # given: o = a + b, all three (r, C) in HBM, tile by tile
    def add_tile(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...] + b_ref[...]

    tile = pl.BlockSpec((bm, o_ref.shape[1]), lambda t: (t, 0))
    pipeline = pltpu.emit_pipeline(add_tile, grid=(o_ref.shape[0] // bm,), in_specs=[tile, tile], out_specs=[tile])
    pipeline(a_ref, b_ref, o_ref)


def reduce_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    # x_ref: (n, r, C), this device's blocks    o_ref, acc, inbox: (r, C)    all in HBM
    # sent, came: DMA semaphores                credit: a semaphore for signals
    pass  # YOUR CODE HERE


def reduce_scatter(x: Float32[Array, "n*n r C"], *, devices: int = 8) -> Float32[Array, "n*r C"]:
    def local(x: Float32[Array, "n r C"]) -> Float32[Array, "r C"]:
        block = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        # acc and inbox are results that nobody looks at: so the kernel has buffers in HBM.
        return pl.pallas_call(
            reduce_kernel,
            in_specs=[HBM],
            out_specs=[HBM, HBM, HBM],
            out_shape=[block, block, block],
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)[0]

    return on_mesh(local, devices, P("x"), P("x"))(x)


# %%
# Budget for x (64, 16, 128): hbm_bytes=172_032, link_bytes=57_344. A block has 8 KiB. Over each link go seven sums of
# this size. On each device seven additions move three such blocks each, between HBM and VMEM.
check("distributed/7", reduce_scatter)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow one sum in the drawing. The sum that ends at device 3 starts at device 0. Where does your own sum start? Which
# one do you send in hop 0, and which one comes to you then? Your block of that one is what you add. When have you read
# `inbox`, so that your left neighbour may fill it again? Before which copies does it have to know?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     for hop in range(n - 1):
#         block = x_ref.at[lax.rem(____ + n, n)]
#         if hop > 0:
#             add(block, ____, acc)
#             pl.semaphore_signal(credit, 1, device_id={"x": ____})
#             pl.semaphore_wait(credit, 1)
#         source = block if ____ else acc
#         copy = pltpu.make_async_remote_copy(source, ____, sent, came, device_id={"x": right})
#         copy.start()
#         copy.wait()
#     add(____, ____, o_ref)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def reduce_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
#     meet_neighbours()
#     for hop in range(n - 1):
#         block = x_ref.at[lax.rem(me - 1 - hop + n, n)]
#         if hop > 0:
#             add(block, inbox, acc)
#             pl.semaphore_signal(credit, 1, device_id={"x": left})
#             pl.semaphore_wait(credit, 1)
#         source = block if hop == 0 else acc
#         copy = pltpu.make_async_remote_copy(source, inbox, sent, came, device_id={"x": right})
#         copy.start()
#         copy.wait()
#     add(x_ref.at[me], inbox, o_ref)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A ring with one buffer to send from and one to receive into, for arrays of any size. A reduce-scatter
# and then the all-gather of Puzzle 5 make an all-reduce that sends 2 (n - 1) / n of the array over each link, and no
# ring in one direction can send less. But look at the picture: the devices add, then they send, and never both at a
# time.

# %%
show(reduce_scatter, normal((64, 16, 128)))

# %% [markdown]
# ## Puzzle 8: Both directions at once
#
# **Goal.** The same reduce-scatter with two rings, one in each direction. You add in one while the other one sends.
#
# ### Theory
#
# A link works in both directions at the same time, and Puzzle 7 used one of them. So cut each block into two halves.
# Half 0 of each sum goes to the right, as before. Half 1 goes to the left. In hop 0, device i sends its half of block
# i + 1. Now a link carries 28 KiB in each direction, where it carried 56 in one.
#
# Two rings also give you something to do. In Puzzle 7 nothing was on its way while you added. Here the rings take
# turns:
#
# ```text
#     to the right   [hop 0]       [ hop 1 ]     [ hop 2 ]
#     to the left    [hop 0]             [ hop 1 ]     [ hop 2 ]
#     you                   [add 0][add 1][add 0][add 1]
# ```
#
# In each hop, and for each way: wait for the copy of the hop before, add, start the next one. Then the copy that you
# have just started is on its way while you add the other half. If you wait for both copies before you add, only one way
# is hidden.
#
# Two copies are on their way to you at the same time, so each way has its own buffers, semaphores and credits:
# `inbox.at[way]`, `came.at[way]`, and so on. As in pipelining.py, you may build a copy again to wait for it.


# %%
def halves_spec(x: Float32[Array, "n*n 2 r C"], *, devices: int = 8) -> Float32[Array, "n*2 r C"]:
    """x[i * n + j] has both halves of block j of device i. Device j returns the sum of all blocks j."""
    n = devices
    return x.reshape(n, n, *x.shape[1:]).sum(0).reshape(n * 2, *x.shape[2:])


def halves_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
    # x_ref: (n, 2, r, C), this device's blocks    o_ref, acc, inbox: (2, r, C)    all in HBM
    # sent, came: two DMA semaphores each          credit: two semaphores for signals
    pass  # YOUR CODE HERE


def reduce_halves(x: Float32[Array, "n*n 2 r C"], *, devices: int = 8) -> Float32[Array, "n*2 r C"]:
    def local(x: Float32[Array, "n 2 r C"]) -> Float32[Array, "2 r C"]:
        block = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return pl.pallas_call(
            halves_kernel,
            in_specs=[HBM],
            out_specs=[HBM, HBM, HBM],
            out_shape=[block, block, block],
            scratch_shapes=[
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.REGULAR((2,)),
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)[0]

    return on_mesh(local, devices, P("x"), P("x"))(x)


# %%
# Budget for x (64, 2, 8, 128): hbm_bytes=172_032, link_bytes=28_672, exposed_ici_bytes=150_000. All copies send 458_752
# bytes. The first one of each way has nothing to hide behind.
check("distributed/8", reduce_halves)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write two small functions first: the half of a block that belongs to (way, hop), and the copy of (way, hop). What
# differs between the two ways? Then write down the calls of one hop, for way 0 and then for way 1. At each addition,
# mark which copies are on their way. If there is none, what did you wait for too early? A credit goes to the device
# that fills the inbox. That is another device for each way.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     after, before = (right, left), (left, right)  # by way: whom you send to, who sends to you
#
#     def block(way, hop):
#         step = n - 1 - hop if way == 0 else ____
#         return x_ref.at[lax.rem(me + step, n), way]
#
#     def copy(way, hop):
#         source = ____ if hop == 0 else acc.at[way]
#         return pltpu.make_async_remote_copy(source, ____, ____, ____, device_id={"x": after[way]})
#
#     meet_neighbours()
#     for way in range(2):
#         ____
#     for hop in range(1, n - 1):
#         for way in range(2):
#             copy(way, ____).wait()
#             add(____, ____, acc.at[way])
#             pl.semaphore_signal(credit.at[way], 1, device_id={"x": ____})
#             pl.semaphore_wait(credit.at[way], 1)
#             copy(way, ____).start()
#     for way in range(2):
#         ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def halves_kernel(x_ref, o_ref, acc, inbox, sent, came, credit):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
#     after, before = (right, left), (left, right)  # by way: whom you send to, who sends to you
#
#     def block(way, hop):
#         step = n - 1 - hop if way == 0 else 1 + hop
#         return x_ref.at[lax.rem(me + step, n), way]
#
#     def copy(way, hop):
#         source = block(way, 0) if hop == 0 else acc.at[way]
#         return pltpu.make_async_remote_copy(
#             source, inbox.at[way], sent.at[way], came.at[way], device_id={"x": after[way]}
#         )
#
#     meet_neighbours()
#     for way in range(2):
#         copy(way, 0).start()
#     for hop in range(1, n - 1):
#         for way in range(2):
#             copy(way, hop - 1).wait()
#             add(block(way, hop), inbox.at[way], acc.at[way])
#             pl.semaphore_signal(credit.at[way], 1, device_id={"x": before[way]})
#             pl.semaphore_wait(credit.at[way], 1)
#             copy(way, hop).start()
#     for way in range(2):
#         copy(way, n - 2).wait()
#         add(x_ref.at[me, way], inbox.at[way], o_ref.at[way])
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Half the bytes on each link, and two thirds of them are hidden behind additions. In the picture it takes
# 16.75 ticks (see Puzzle 2), where Puzzle 7 took 29.75. JAX's guide to distributed Pallas kernels ends with this
# pattern: a reduce-scatter in both directions, with an `emit_pipeline` for the additions.

# %%
show(reduce_halves, normal((64, 2, 8, 128)))

# %% [markdown]
# ## Puzzle 9: Rows, then columns
#
# **Goal.** All-gather on a mesh with two axes: around the rows first, then around the columns.
#
# ### Theory
#
# The chips of a TPU v5e lie in a grid, and each has links along two axes. A full pod is 16 x 16. One ring through all
# of it takes 255 hops. If you first go around the rows and then around the columns, it takes 15 + 15.
#
# A mesh can have two axes, too. Here `"y"` has size 2 and `"x"` has size 4:
#
# ```text
#              x = 0   x = 1   x = 2   x = 3            3 hops along x: every device has its row
#     y = 0      0 ----> 1 ----> 2 ----> 3 --> (to 0)   1 hop along y:  it passes on a whole row
#     y = 1      4 ----> 5 ----> 6 ----> 7 --> (to 4)
# ```
#
# `lax.axis_index("y")` and `lax.axis_size("y")` are those of one axis. In `device_id` you name the axes along which the
# other device differs from you. On all other axes it has your numbers: `{"y": 0}` is the device of your column in row
# 0.
#
# The work is that of Puzzle 5, twice. The first time a part goes around, the second time a row of parts. This is also
# how a collective runs on one axis of a mesh, when a model is cut in two ways at once.


# %%
def grid_gather_spec(
    x: Float32[Array, "n*r C"], *, rows: int = 2, columns: int = 4
) -> Float32[Array, "n*rows columns r C"]:
    """Each of the n = rows * columns devices returns all n parts."""
    parts = x.reshape(rows, columns, -1, x.shape[1])
    return jnp.concatenate([parts] * (rows * columns))


def grid_gather_kernel(x_ref, o_ref, own, sent, came):
    # x_ref: (r, C), this device's part    o_ref: (rows, columns, r, C); o_ref[j, i] is the part of device y=j, x=i
    # own, sent: DMA semaphores            came: columns - 1 + rows - 1 of them, one for each hop
    # First call meet_neighbours_on("y", "x").
    pass  # YOUR CODE HERE


def meet_neighbours_on(*axes):
    # given: returns when both neighbours along each of these axes are in the kernel
    barrier = pltpu.get_barrier_semaphore()
    for axis in axes:
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        pl.semaphore_signal(barrier, 1, device_id={axis: lax.rem(me + n - 1, n)})
        pl.semaphore_signal(barrier, 1, device_id={axis: lax.rem(me + 1, n)})
    pl.semaphore_wait(barrier, 2 * len(axes))


def grid_gather(x: Float32[Array, "n*r C"], *, rows: int = 2, columns: int = 4) -> Float32[Array, "n*rows columns r C"]:
    def local(x: Float32[Array, "r C"]) -> Float32[Array, "rows columns r C"]:
        return pl.pallas_call(
            grid_gather_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=jax.ShapeDtypeStruct((rows, columns, *x.shape), x.dtype),
            scratch_shapes=[
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((columns - 1 + rows - 1,)),
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    mesh = jax.make_mesh((rows, columns), ("y", "x"), axis_types=(AxisType.Auto, AxisType.Auto))
    parts = P(("y", "x"))  # dimension 0 is cut along both axes: row by row
    return jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)(x)


# %%
# Budget for x (64, 128): bytes_hops=229_376, link_bytes=16_384. Each device gets seven parts of 4 KiB, as in Puzzle 5,
# where one link carried all seven. Columns first would put six parts on a link, rows first four. A single ring has
# seven.
check("distributed/9", grid_gather)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take the solution of Puzzle 5 for the first half. Which index of `o_ref` changes from hop to hop, and which one stays?
# In the second half you send what the first half has collected: how many indices does that Ref have? Each hop of both
# halves needs a semaphore that no other hop uses.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     for hop in range(____):
#         part = o_ref.at[j, lax.rem(____, columns)]
#         copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id={"x": ____})
#         copy.start()
#         copy.wait()
#     for hop in range(____):
#         row = o_ref.at[____]
#         copy = pltpu.make_async_remote_copy(row, row, sent, came.at[____], device_id={____})
#         copy.start()
#         copy.wait()
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def grid_gather_kernel(x_ref, o_ref, own, sent, came):
#     rows, columns = lax.axis_size("y"), lax.axis_size("x")
#     j, i = lax.axis_index("y"), lax.axis_index("x")
#     meet_neighbours_on("y", "x")
#     mine = pltpu.make_async_copy(x_ref, o_ref.at[j, i], own)
#     mine.start()
#     mine.wait()
#     for hop in range(columns - 1):
#         part = o_ref.at[j, lax.rem(i - hop + columns, columns)]
#         right = {"x": lax.rem(i + 1, columns)}
#         copy = pltpu.make_async_remote_copy(part, part, sent, came.at[hop], device_id=right)
#         copy.start()
#         copy.wait()
#     for hop in range(rows - 1):
#         row = o_ref.at[lax.rem(j - hop + rows, rows)]
#         below = {"y": lax.rem(j + 1, rows)}
#         copy = pltpu.make_async_remote_copy(row, row, sent, came.at[columns - 1 + hop], device_id=below)
#         copy.start()
#         copy.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Four hops instead of seven, for the same bytes. Along x each link carries three parts, along y four. In
# the picture the copies along y are the long ones. A model on a mesh of `"data"` and `"model"` uses its axes in the
# same way: tensor parallelism inside of a row, and the sum of the gradients along the columns.

# %%
show(grid_gather, normal((64, 128)))

# %% [markdown]
# ## Puzzle 10: Cut the other way
#
# **Goal.** All-to-all: the rows of a matrix are spread over the devices. Send it so that its columns are.
#
# ### Theory
#
# Attention on long texts needs all tokens, but only some of the heads. The MLP behind it needs whole tokens, but only
# some of them. So between the two, a model cuts its activations the other way: `P("x", None)` becomes `P(None, "x")`.
# (DeepSpeed-Ulysses trains like this.)
#
# An all-gather would bring everything to everybody: 1,792 KiB over the links for the example below. But of each part,
# device 2 needs only its own columns:
#
# ```text
#     before                              after
#     device 0    a0  a1 [a2] a3          device 2    a2
#     device 1    b0  b1 [b2] b3                      b2
#     device 2    c0  c1 [c2] c3                      c2
#     device 3    d0  d1 [d2] d3                      d2
# ```
#
# Straight copies take 512 KiB. There is nothing to pass on, because no two devices need the same block.
#
# `x_ref.at[:, pl.ds(256, 128)]` is a Ref of 128 columns.


# %%
def recut_spec(x: Float32[Array, "R C"], *, devices: int = 8) -> Float32[Array, "R C"]:
    return x  # the same matrix: only the devices hold other parts of it


def recut_kernel(x_ref, o_ref, sent, came):
    # x_ref: (r, C), this device's rows, in HBM    o_ref: (R, c), its columns, in HBM    sent, came: DMA semaphores
    pass  # YOUR CODE HERE


def recut(x: Float32[Array, "R C"], *, devices: int = 8) -> Float32[Array, "R C"]:
    def local(x: Float32[Array, "r C"]) -> Float32[Array, "R c"]:
        r, C = x.shape
        return pl.pallas_call(
            recut_kernel,
            in_specs=[HBM],
            out_specs=HBM,
            out_shape=jax.ShapeDtypeStruct((r * devices, C // devices), x.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return on_mesh(local, devices, P("x", None), P(None, "x"))(x)


# %%
# Budget for x (64, 1024): bytes_hops=524_288. Each device sends seven blocks of 4 KiB, each the shorter way around.
check("distributed/10", recut)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take one block: device 1's rows, device 2's columns. Which of its two numbers says where it lies on device 1, and
# which one says where it goes on device 2? Your rows keep their numbers. Who has to be in the kernel before you send?
# The copies are of one size and share a semaphore. In Puzzle 5 that was wrong, because you used a part as soon as it
# had come. When do you use something here?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def recut_kernel(x_ref, o_ref, sent, came):
#     ____
#     r, c = x_ref.shape[0], o_ref.shape[1]
#     mine = o_ref.at[____]                                    # where my rows go
#     own = ____                                               # the block that stays here
#     own.start()
#     copies = []
#     for step in range(____):
#         part = x_ref.at[____]
#         copies.append(pltpu.make_async_remote_copy(____))
#         copies[-1].start()
#     ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def recut_kernel(x_ref, o_ref, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_everybody()
#     r, c = x_ref.shape[0], o_ref.shape[1]
#     mine = o_ref.at[pl.ds(me * r, r)]
#     own = pltpu.make_async_copy(x_ref.at[:, pl.ds(me * c, c)], mine, sent)
#     own.start()
#     copies = []
#     for step in range(1, n):
#         to = lax.rem(me + step, n)
#         part = x_ref.at[:, pl.ds(to * c, c)]
#         copies.append(pltpu.make_async_remote_copy(part, mine, sent, came, device_id={"x": to}))
#         copies[-1].start()
#     own.wait()
#     for copy in copies:
#         copy.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The cut went from rows to columns, and no array was transposed: the copies read columns and write rows.
# All of them start before you wait for the first one, so each link has work. `lax.all_to_all` does the same, between
# kernels.

# %% [markdown]
# ## Puzzle 11a: Where your rows land
#
# **Goal.** Each device has rows for experts on other devices. Work out where each row goes, before any row is sent.
#
# ### Theory
#
# In a mixture of experts each token chooses its expert, and the experts are spread over the devices. So every device
# sends every other one a few rows, many, or none. The copies of two devices must not overlap on a third one.
#
# Only small numbers travel first: `counts[i, e]`, the rows that device i has for expert e. After one all-gather all
# devices know all of `counts`. Each row's place follows from it.
#
# On the sender, rows are sorted by expert. On the receiver they have to be, too, for `ragged_dot` (ragged_dot.py Puzzle
# 6), which multiplies each group of rows by its own matrix. Rows for the same expert lie in the order of their senders.
# Four devices, eight experts; device 1 has experts 2 and 3:
#
# ```text
#     rows on device 1    |  expert 2 from 0, 1, 2, 3  |  expert 3 from 0, 1, 2, 3  |  free
#     counts                     3  0  2  1                   0  4  1  0
#     places[:, 2], [:, 3]       0  3  3  5                   6  6 10 11
# ```
#
# You return `starts` and `places`: where the rows of device i for expert e begin on device i, and where they begin on
# the expert's device.


# %%
def plan_spec(counts: Int[Array, "n E"]) -> tuple[Int[Array, "n E"], Int[Array, "n E"]]:
    (n, E), rows = counts.shape, counts.tolist()
    starts, places = ([[0] * E for _ in range(n)] for _ in range(2))
    for i in range(n):
        for e in range(E):
            first = e - e % (E // n)  # of the experts on the device of e
            starts[i][e] = sum(rows[i][:e])
            places[i][e] = sum(sum(row[first:e]) for row in rows) + sum(row[e] for row in rows[:i])
    return jnp.asarray(starts), jnp.asarray(places)


def plan(counts: Int[Array, "n E"]) -> tuple[Int[Array, "n E"], Int[Array, "n E"]]:
    # Expert e is on device e // (E // n). Return (starts, places).
    pass  # YOUR CODE HERE


# %%
# Budget for counts (4, 8): operations=48. No loop over the numbers: a sum for each of them takes more.
check("distributed/11a", plan)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A piece begins where those before it end. For `starts`, which numbers of `counts` are before a piece, and along which
# axis do you sum them? On the receiver the sum runs over senders *and* experts, and it begins anew at each device. In
# what order do the numbers of `counts` have to stand, so that one running sum along rows does it?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def plan(counts):
#     n, E = counts.shape
#     starts = ____                        # jnp.cumsum(v) - v: where pieces of sizes v begin
#     there = counts.T.reshape(n, -1)      # row d: what comes to device d, in the order in which it lies there
#     begins = ____                        # (n, E // n * n)
#     places = begins.reshape(____).T
#     return starts, places
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def plan(counts):
#     n, E = counts.shape
#     starts = jnp.cumsum(counts, axis=1) - counts
#     there = counts.T.reshape(n, -1)
#     places = (jnp.cumsum(there, axis=1) - there).reshape(E, n).T
#     return starts, places
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** A few hundred bytes first, so that thousands of rows can be sent without asking again. And the receiver
# never sorts: the senders put each row where it belongs.

# %% [markdown]
# ## Worked example: sizes that are data
#
# **SMEM** is a small memory for single numbers. A kernel may use what it reads there in `pl.ds(start, size)`: so the
# size of a copy is known only when the kernel runs. It must be at least 1, though.
#
# A semaphore counts bytes, and does not know in which copies they came. Here two copies share one. `wait_for_rows`
# waits once, for the bytes of all rows.


# %%
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def wait_for_rows(ref, count, sem):
    # given: waits until `sem` has the bytes of `count` rows of ref. The copy in it is never started.
    @pl.when(count > 0)
    def _():
        rows = ref.at[pl.ds(0, count)]
        pltpu.make_async_copy(rows, rows, sem).wait()


def swap_kernel(sizes, x_ref, o_ref, sem):
    a, b = sizes[0], sizes[1]
    pltpu.make_async_copy(x_ref.at[pl.ds(0, a)], o_ref.at[pl.ds(b, a)], sem).start()
    pltpu.make_async_copy(x_ref.at[pl.ds(a, b)], o_ref.at[pl.ds(0, b)], sem).start()
    wait_for_rows(o_ref, a + b, sem)


def swap(sizes, x):
    return pl.pallas_call(
        swap_kernel,
        in_specs=[SMEM, HBM],
        out_specs=HBM,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )(sizes, x)


swap(jnp.array([5, 3]), jnp.tile(jnp.arange(8)[:, None], (1, 128)))[:, 0]

# %% [markdown]
# ## Puzzle 11b: Rows of unknown number
#
# **Goal.** Send each piece of rows to its device, with sizes that are known only when the kernel runs.
#
# ### Theory
#
# Without sizes you would cut the buffer into equal parts, one for each pair of devices, with room for the worst case.
# Here each device has 12 rows. Four parts with room for 12 are 48 rows, and 36 of them are padding.
#
# A copy may have any number of rows from 1 on, as in the worked example. So start none for an empty piece.
#
# Each device gets `pieces` pieces from you: n * pieces in all, in the order of the devices. Three lists in SMEM say
# what piece p is:
#
# ```text
#     x_ref here                                    o_ref of device p // pieces
#     starts[p] ->  | sizes[p] rows |  ---------->  places[p] ->  | sizes[p] rows |
# ```
#
# The waits change, too. What comes to you is of other sizes, from devices whose lists you do not have. You only know
# that it is `due[0]` rows in all. That is enough for `wait_for_rows`: it waits for a number of rows, in however many
# copies they come. Call it with `sent`, and it waits until that many of your rows have left.


# %%
def send_rows_kernel(sizes, starts, places, due, x_ref, o_ref, sent, came):
    # sizes, starts, places: (n * pieces,), in SMEM    due: (1,), in SMEM: the rows that come here. They include your
    # own pieces: copy those locally, on `came`.
    # x_ref: (r, D), o_ref: (num_rows, D), in HBM    sent, came: DMA semaphores
    pass  # YOUR CODE HERE


# %%
def send_rows(x, sizes, starts, places, due, *, num_rows, number=0):
    """send_rows_kernel, on lists of any shape. number: its collective_id; two calls in one function need two."""
    return pl.pallas_call(
        send_rows_kernel,
        in_specs=[SMEM, SMEM, SMEM, SMEM, HBM],
        out_specs=HBM,
        out_shape=jax.ShapeDtypeStruct((num_rows, x.shape[1]), x.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(collective_id=number),
    )(*(jnp.ravel(v).astype(jnp.int32) for v in (sizes, starts, places, due)), x)


def counts_of(experts, num_experts):
    """(devices, num_experts): how many rows each device has for each expert. Every device gets all of it."""
    return lax.all_gather(jnp.bincount(experts, length=num_experts), "x")


def dispatch_spec(x: Float32[Array, "R D"], experts: Int[Array, "R"], *, num_experts=8, devices=4):
    """Device d's rows, sorted by expert, and by sender where the expert is the same; zeros after them."""
    R, device = x.shape[0], experts // (num_experts // devices)
    order = jnp.argsort(experts)
    rows = jnp.arange(R) - jnp.searchsorted(device[order], device[order])
    return jnp.zeros((devices, R, x.shape[1])).at[device[order], rows].set(x[order]).reshape(devices * R, -1)


def dispatch(
    x: Float32[Array, "R D"], experts: Int[Array, "R"], *, num_experts: int = 8, devices: int = 4
) -> Float32[Array, "n*R D"]:
    def local(x: Float32[Array, "r D"], experts: Int[Array, "r"]) -> Float32[Array, "R D"]:
        n, me = lax.axis_size("x"), lax.axis_index("x")
        counts = counts_of(experts, num_experts)
        starts, places = plan(counts)
        due = counts.sum(axis=0).reshape(n, -1)[me].sum()
        rows = send_rows(x[jnp.argsort(experts)], counts[me], starts[me], places[me], due, num_rows=n * x.shape[0])
        return jnp.where(jnp.arange(rows.shape[0])[:, None] < due, rows, 0)

    return on_mesh(local, devices, (P("x", None), P("x")), P("x", None))(x, experts)


# %%
# Budget for x (48, 128), experts (48,): copies=19, bytes_hops=25_984. The rows, over the links of their ways, and the
# counts. 15 pieces that are not empty go to other devices, in one copy each, and the counts in 4.
check("distributed/11b", dispatch)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two loops: over the devices, and over the pieces for one of them. Which number has the first piece for device `to`?
# Your own pieces need no link: send them with `make_async_copy`. How many rows do you send to others? Any device may
# send to any other one: which barrier is that? Which pieces must not be sent at all?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     to_others = 0
#     for step in range(n):
#         to = lax.rem(me + step, n)
#         for j in range(pieces):
#             p = ____
#             source, target = x_ref.at[pl.ds(____, ____)], o_ref.at[pl.ds(____, ____)]
#             if step == 0:
#                 copy = pltpu.make_async_copy(source, target, ____)
#             else:
#                 copy = ____
#                 to_others += ____
#             pl.when(____)(copy.start)
#     wait_for_rows(x_ref, to_others, ____)
#     wait_for_rows(o_ref, ____, ____)
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def send_rows_kernel(sizes, starts, places, due, x_ref, o_ref, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_everybody()
#     pieces = sizes.shape[0] // n
#     to_others = 0
#     for step in range(n):
#         to = lax.rem(me + step, n)
#         for j in range(pieces):
#             p = to * pieces + j
#             source, target = x_ref.at[pl.ds(starts[p], sizes[p])], o_ref.at[pl.ds(places[p], sizes[p])]
#             if step == 0:
#                 copy = pltpu.make_async_copy(source, target, came)
#             else:
#                 copy = pltpu.make_async_remote_copy(source, target, sent, came, device_id={"x": to})
#                 to_others += sizes[p]
#             pl.when(sizes[p] > 0)(copy.start)
#     wait_for_rows(x_ref, to_others, sent)
#     wait_for_rows(o_ref, due[0], came)
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** This is `lax.ragged_all_to_all`, which runs on TPUs and GPUs and not on a CPU. You waited for a number
# of bytes, not for copies: nobody has to know how they were cut.

# %% [markdown]
# ## Puzzle 11c: A layer of experts
#
# **Goal.** The MoE layer on four devices: rows go to their experts, through your `ragged_dot`, and back.
#
# ### Theory
#
# Each device has r tokens and two of eight experts. If you gathered the weights, it would need six more: 1.5 MiB for
# each device, 6 MiB in all. The rows, there and back, are 48 KiB at most. One thing is new: the way back.
#
# ```text
#     sort by expert -> counts, plan -> send_rows -> ragged_dot twice -> send_rows -> sort back
#      x[order]         (all-gather)     there        your experts        back
# ```
#
# For the way back, turn everything around. What was a place becomes a start. The pieces are again sorted by the device
# they go to, and now that is the one they came from. Of `counts`, a device needs the columns of its own experts:
# `counts[:, mine]`, where `mine` holds the numbers of its experts. Its element [i, j] is the size of what came from
# device i for its expert j.
#
# `order = jnp.argsort(experts)` sorts the rows, and `jnp.argsort(order)` is the way back.
#
# A device may get all rows of all devices. So `rows` has room for n * r of them. Rows where none came hold garbage, and
# so do their results: you do not send them back. The cell below fetches your `ragged_product` of ragged_dot.py Puzzle
# 6, or the course's if yours is not solved.


# %%
def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


own = own_kernels(
    ragged_product=("ragged_dot/6", floats(48, 128), floats(2, 128, 256), jax.ShapeDtypeStruct((2,), jnp.int32))
)
print(own)


def expert_mlp(
    rows: Float32[Array, "R D"], w1: Float32[Array, "e D F"], w2: Float32[Array, "e F D"], sizes: Int[Array, "e"]
):
    """Given: the MLPs of this device's experts, for sizes[0] rows, then sizes[1], ..."""
    h = jax.nn.relu(own.ragged_product(rows, w1, sizes, bm=32, bn=w1.shape[2], bk=w1.shape[1]))
    return own.ragged_product(h, w2, sizes, bm=32, bn=w2.shape[2], bk=w2.shape[1])


def moe_spec(
    x: Float32[Array, "R D"], experts: Int[Array, "R"], w1: Float32[Array, "E D F"], w2: Float32[Array, "E F D"]
):
    h = jax.nn.relu(jnp.einsum("rd,edf->erf", x, w1))
    return jnp.take_along_axis(jnp.einsum("erf,efd->erd", h, w2), experts[None, :, None], axis=0)[0]


def moe_local(x, experts, w1, w2):
    # This device's parts: x (r, D) and the expert of each row, experts (r,); w1 (e, D, F) and w2 (e, F, D), the weights
    # of its e = E / devices experts. The result: (r, D), in the order of x. Use counts_of, plan, send_rows (with
    # number=1 for the way back) and expert_mlp.
    pass  # YOUR CODE HERE


def moe(
    x: Float32[Array, "R D"],
    experts: Int[Array, "R"],
    w1: Float32[Array, "E D F"],
    w2: Float32[Array, "E F D"],
    *,
    devices: int = 4,
) -> Float32[Array, "R D"]:
    return on_mesh(moe_local, devices, P("x"), P("x"))(x, experts, w1, w2)


# %%
# Budget for x (48, 128), experts (48,), w1 (8, 128, 256), w2 (8, 256, 128): grid_steps=8, bytes_hops=51_584. The rows
# there and back, and the counts. On each device, one step for each send_rows, and three for each product.
check("distributed/11c", moe)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# On the way there, piece p is for expert p, and your row of `counts`, `starts` and `places` is what you send. Back, you
# send `sizes[i, j]` rows to device i. How many rows come to you there, and how many on the way back? How many does each
# of *your* experts get?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
# def moe_local(x, experts, w1, w2):
#     n, me, e = lax.axis_size("x"), lax.axis_index("x"), w1.shape[0]
#     order = jnp.argsort(experts)
#     counts = counts_of(experts, ____)
#     starts, places = plan(counts)
#     mine = ____                                        # the numbers of this device's experts
#     sizes = counts[:, mine]                            # (n, e)
#     rows = send_rows(x[order], counts[me], ____, ____, ____, num_rows=n * x.shape[0])
#     y = expert_mlp(rows, w1, w2, ____)
#     back = send_rows(y, sizes, ____, ____, ____, num_rows=x.shape[0], number=1)
#     return ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def moe_local(x, experts, w1, w2):
#     n, me, e = lax.axis_size("x"), lax.axis_index("x"), w1.shape[0]
#     order = jnp.argsort(experts)
#     counts = counts_of(experts, n * e)
#     starts, places = plan(counts)
#     mine = me * e + jnp.arange(e)
#     sizes = counts[:, mine]
#     rows = send_rows(x[order], counts[me], starts[me], places[me], sizes.sum(), num_rows=n * x.shape[0])
#     y = expert_mlp(rows, w1, w2, sizes.sum(axis=0))
#     back = send_rows(y, sizes, places[:, mine], starts[:, mine], x.shape[0], num_rows=x.shape[0], number=1)
#     return back[jnp.argsort(order)]
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Eight experts on four devices, and no padding on the links: only the rows travel, each to where its
# expert is and back. In the picture all devices compute for about as long, whoever has the rows: your `ragged_dot`
# visits each tile of `rows`, even if no row is in it. JAX's own (`megablox`) leaves those out. Then the device with the
# most rows sets the pace. That is why a router is trained to keep its experts equally busy (capstone.py Puzzle 6).

# %%
show(
    moe,
    normal((48, 128)),
    integers((48,), 0, 8),
    normal((8, 128, 256), scale=0.1),
    normal((8, 256, 128), scale=0.1),
)

# %% [markdown]
# ## Puzzle 12a: Ring attention
#
# **Goal.** Attention over a text that no device holds: keys and values go around the ring while you compute.
#
# ### Theory
#
# For each token and layer, Llama 3 8B keeps 4 KiB of keys and values. A million tokens and 32 layers take 128 GiB. So
# each device keeps a part of the tokens, and the queries of these tokens need all keys.
#
# Parts of K and V travel as in Puzzle 6: two slots, and a credit when a slot is free. While one part goes on, you
# attend to it. Nobody waits if your arithmetic takes at least as long as the copy. With s tokens a device, a hop sends
# 4 s d bytes in bfloat16 and needs 4 s s d FLOPs: s for each byte. A v5e computes 197 TFLOP/s and sends 45 GB/s over a
# link, so 4,400 tokens a device are enough.
#
# Each part changes the softmax of the ones before. softmax.py Puzzle 3 has the way out. For each query keep the largest
# score so far, m, the sum of the exponentials, l, and the weighted sum of values, acc:
#
# ```text
#     new = max(m, scores of this part)
#     l   = l   * exp(m - new) + sum(exp(scores - new))
#     acc = acc * exp(m - new) + exp(scores - new) @ v
# ```
#
# The result is acc / l. The order of the parts does not matter.


# %%
def attention_spec(
    q: Float32[Array, "S d"], k: Float32[Array, "S d"], v: Float32[Array, "S d"]
) -> Float32[Array, "S d"]:
    return jax.nn.softmax(q @ k.T * q.shape[1] ** -0.5, axis=1) @ v


def ring_attention_kernel(q_ref, k_ref, v_ref, o_ref, kv, sent, came, credit):
    # q_ref, k_ref, v_ref, o_ref: (s, d), in VMEM    kv: (2, 2, s, d), in VMEM; kv[slot] has keys, then values
    # sent: a DMA semaphore            came: two of them, came.at[slot]        credit: a semaphore for signals
    # m and l may be arrays of (s, 1), and acc one of (s, d): the loop over hops is Python's, so they need no Refs.
    pass  # YOUR CODE HERE


def ring_attention(
    q: Float32[Array, "S d"], k: Float32[Array, "S d"], v: Float32[Array, "S d"], *, devices: int = 8
) -> Float32[Array, "S d"]:
    def local(q: Float32[Array, "s d"], k: Float32[Array, "s d"], v: Float32[Array, "s d"]) -> Float32[Array, "s d"]:
        return pl.pallas_call(
            ring_attention_kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            scratch_shapes=[
                pltpu.VMEM((2, 2, *k.shape), k.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.REGULAR,
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(q, k, v)

    return on_mesh(local, devices, P("x", None), P("x", None))(q, k, v)


# %%
# Budget for q (128, 128), k (128, 128), v (128, 128): bytes_hops=917_504, exposed_ici_bytes=100_000. Eight devices pass
# on seven parts of 16 KiB, keys and values. Each copy has a part to hide behind, the first one too.
check("distributed/12a", ring_attention)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are n parts to attend to, and n - 1 copies. Your own part comes first: you attend to it in slot 0 while it is
# sent to the right. Which lines of Puzzle 6 stay as they are, and which one makes room for attention? Before the first
# part, m is minus infinity. What is exp(m - new) then, and is that right for l and acc?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     m, l, acc = jnp.full((s, 1), -jnp.inf), jnp.zeros((s, 1)), jnp.zeros((s, d))
#     for hop in range(____):
#         here, there = hop % 2, 1 - hop % 2
#         if hop < n - 1:
#             ____                                        # a credit, but not before the first copy
#             copy = pltpu.make_async_remote_copy(kv.at[here], kv.at[there], sent, ____, device_id={"x": right})
#             copy.start()
#         scores = ____
#         new = jnp.maximum(m, ____)
#         p, shrink = jnp.exp(scores - new), ____
#         l = ____
#         acc = ____
#         m = new
#         if hop < n - 1:
#             copy.wait()
#             ____
#     o_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def ring_attention_kernel(q_ref, k_ref, v_ref, o_ref, kv, sent, came, credit):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
#     meet_neighbours()
#     s, d = q_ref.shape
#     kv[0, 0] = k_ref[...]
#     kv[0, 1] = v_ref[...]
#     m, l, acc = jnp.full((s, 1), -jnp.inf), jnp.zeros((s, 1)), jnp.zeros((s, d))
#     for hop in range(n):
#         here, there = hop % 2, 1 - hop % 2
#         if hop < n - 1:
#             if hop > 0:
#                 pl.semaphore_wait(credit, 1)
#             to = {"x": right}
#             copy = pltpu.make_async_remote_copy(kv.at[here], kv.at[there], sent, came.at[there], device_id=to)
#             copy.start()
#         scores = jnp.dot(q_ref[...], kv[here, 0].T) * d**-0.5
#         new = jnp.maximum(m, scores.max(axis=1, keepdims=True))
#         p, shrink = jnp.exp(scores - new), jnp.exp(m - new)
#         l = l * shrink + p.sum(axis=1, keepdims=True)
#         acc = acc * shrink + jnp.dot(p, kv[here, 1])
#         m = new
#         if hop < n - 1:
#             copy.wait()
#             if hop < n - 2:
#                 pl.semaphore_signal(credit, 1, device_id={"x": left})
#     o_ref[...] = acc / l
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** Eight times the context. In the picture the rescaling of acc hides the copies. The products alone would
# not: 16 tokens a device are too few, and a v5e needs 4,400. In a language model a token only sees those before it, so
# with these parts device 0 would have little to do. Striped attention therefore gives each device every eighth token.

# %%
show(ring_attention, normal((128, 128)), normal((128, 128)), normal((128, 128)))

# %% [markdown]
# ## Puzzle 12b: Multiply while you gather
#
# **Goal.** The first half of Puzzle 2's MLP: `all_gather(x) @ w1`, with each copy under a product.
#
# ### Theory
#
# In Puzzle 2 all devices stood still until x was gathered. But the product does not need all of x at once: b rows of x
# make b rows of the result. So multiply what is there, while the next part comes:
#
# ```text
#     hop 0     part of me      --- to the right --->     rows of me      = buf[0] @ w1
#     hop 1     part of me - 1  --- to the right --->     rows of me - 1  = buf[1] @ w1
#     hop 2     part of me - 2  --- to the right --->     rows of me - 2  = buf[2] @ w1
# ```
#
# This is a **collective matmul**. Here `buf` has a slot for each hop, so it needs no credits. When does it pay? A hop
# sends b D numbers and multiplies b D f pairs, where f = F / devices. In bfloat16 that is f FLOPs for each byte,
# however many rows there are. A v5e needs 4,400, by the numbers of Puzzle 12a. One matrix of Llama 3 70B's MLP, on
# eight devices, has f = 3,584: not quite enough. But two of its matrices multiply the same x, and both together are.
# Production kernels also send half of the rows each way around. Then each direction of a link moves half the bytes, and
# f = 2,200 is enough.


# %%
def gather_matmul_spec(x: Float32[Array, "B D"], w: Float32[Array, "D F"]) -> Float32[Array, "B F"]:
    return x @ w


def gather_matmul_kernel(x_ref, w_ref, o_ref, buf, sent, came):
    # x_ref: (b, D), this device's rows    w_ref: (D, f), its columns    o_ref: (B, f)    all in VMEM
    # buf: (n, b, D), in VMEM    sent: a DMA semaphore    came: n - 1 of them, came.at[hop]
    # o_ref[pl.ds(start, b)] = ... stores into b rows.
    pass  # YOUR CODE HERE


def gather_matmul_local(x: Float32[Array, "b D"], w: Float32[Array, "D f"]) -> Float32[Array, "B f"]:
    n = lax.axis_size("x")
    return pl.pallas_call(
        gather_matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((n * x.shape[0], w.shape[1]), x.dtype),
        scratch_shapes=[
            pltpu.VMEM((n, *x.shape), x.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((n - 1,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )(x, w)


def gather_matmul(x: Float32[Array, "B D"], w: Float32[Array, "D F"], *, devices: int = 8) -> Float32[Array, "B F"]:
    return on_mesh(gather_matmul_local, devices, (P("x", None), P(None, "x")), P(None, "x"))(x, w)


# %%
# Budget for x (64, 128), w (128, 2048): bytes_hops=229_376, exposed_ici_bytes=10_000. Eight devices pass on seven parts
# of 4 KiB, each under a product.
check("distributed/12b", gather_matmul)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# This is Puzzle 12a with a product in place of attention, and with a slot for each hop. From which slot do you send
# in hop 2, and into which one? The last part is multiplied, but not sent. Whose part is in slot `hop`, and which rows
# of the result does it make?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     buf[0] = x_ref[...]
#     for hop in range(n):
#         if hop < n - 1:
#             to = {"x": lax.rem(me + 1, n)}
#             copy = pltpu.make_async_remote_copy(____, ____, sent, came.at[____], device_id=to)
#             copy.start()
#         rows = pl.ds(____, b)
#         o_ref[rows] = ____
#         ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def gather_matmul_kernel(x_ref, w_ref, o_ref, buf, sent, came):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     meet_neighbours()
#     b = x_ref.shape[0]
#     buf[0] = x_ref[...]
#     for hop in range(n):
#         if hop < n - 1:
#             to = {"x": lax.rem(me + 1, n)}
#             copy = pltpu.make_async_remote_copy(buf.at[hop], buf.at[hop + 1], sent, came.at[hop], device_id=to)
#             copy.start()
#         rows = pl.ds(lax.rem(me - hop + n, n) * b, b)
#         o_ref[rows] = jnp.dot(buf[hop], w_ref[...])
#         if hop < n - 1:
#             copy.wait()
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** The same bytes as in Puzzle 5, and nobody waits for any of them. Here a hop has 128 FLOPs for each byte,
# which is enough for a tick's 64, and not for a v5e. XLA can do this, too: it cuts `all_gather(x) @ w` into a loop of
# copies to the neighbour and small products (Wang et al., Overlap Communication with Dependent Computation via
# Decomposition, 2023).

# %% [markdown]
# ## Puzzle 12c: Multiply while you scatter
#
# **Goal.** The second half: the rows of `h @ w2`, summed over all devices, with the sums on their way while you
# multiply. Then the MLP of Puzzle 2 is whole.
#
# ### Theory
#
# Here sums travel, as in Puzzle 7. A device sends the sum of some rows to the right, where the neighbour adds what it
# has for these rows. After n - 1 hops the sum has been everywhere, and is with its owner. On device `me`:
#
# ```text
#     hop 0      rows of me - 1                            send
#     hop 1      rows of me - 2    + what has come         send
#     ...
#     hop n - 1  rows of me        + what has come         done
# ```
#
# If you wait for the sum and multiply then, the links rest during the product, and you rest during the copy. But your
# product does not depend on what comes. Only the addition does. So multiply first, wait then, add, and send on.
#
# The slots are those of Puzzle 6. The sum comes into one slot. You add, and send from it into the neighbour's other
# slot. When you have waited for that copy, the slot that you sent from is free: signal the left.


# %%
def matmul_scatter_kernel(h_ref, w_ref, o_ref, buf, sent, came, credit):
    # h_ref: (B, f), this device's columns    w_ref: (f, D), its rows    o_ref: (b, D)    buf: (2, b, D)    all in VMEM
    # sent: a DMA semaphore    came: two of them, came.at[slot]    credit: a semaphore for signals
    pass  # YOUR CODE HERE


def matmul_scatter_local(h: Float32[Array, "B f"], w: Float32[Array, "f D"]) -> Float32[Array, "b D"]:
    b, D = h.shape[0] // lax.axis_size("x"), w.shape[1]
    return pl.pallas_call(
        matmul_scatter_kernel,
        out_shape=jax.ShapeDtypeStruct((b, D), h.dtype),
        scratch_shapes=[
            pltpu.VMEM((2, b, D), h.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=1),
    )(h, w)


def mlp_overlapped(
    x: Float32[Array, "B D"], w1: Float32[Array, "D F"], w2: Float32[Array, "F D"], *, devices: int = 8
) -> Float32[Array, "B D"]:
    def local(x: Float32[Array, "b D"], w1: Float32[Array, "D f"], w2: Float32[Array, "f D"]) -> Float32[Array, "b D"]:
        return matmul_scatter_local(jax.nn.relu(gather_matmul_local(x, w1)), w2)

    return on_mesh(local, devices, (P("x", None), P(None, "x"), P("x", None)), P("x", None))(x, w1, w2)


# %%
# Budget for x (64, 128), w1 (128, 2048), w2 (2048, 128): bytes_hops=458_752, exposed_ici_bytes=20_000. Twice what
# Puzzle 12b sends: parts of x, then sums.
check("distributed/12c", mlp_overlapped)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What you send goes to the right. Which rows does the device there add to in its next hop, and are they the ones that
# you sent? You wait for the copy of the last hop, so after the product of this one. That wait says two things: which
# slot has been filled, and which one has been sent? Tell the left neighbour about the second.
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# ```python
#     for hop in range(n):
#         here, there = hop % 2, 1 - hop % 2
#         rows = pl.ds(____, b)
#         part = jnp.dot(h_ref[rows], w_ref[...])
#         if hop > 0:
#             copy.wait()                       # the copy of the last hop
#             part += ____
#             if hop < n - 1:
#                 pl.semaphore_signal(____)
#                 pl.semaphore_wait(____)
#         if hop < n - 1:
#             ____
#             copy = ____
#             copy.start()
#     o_ref[...] = ____
# ```
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# def matmul_scatter_kernel(h_ref, w_ref, o_ref, buf, sent, came, credit):
#     n, me = lax.axis_size("x"), lax.axis_index("x")
#     left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
#     meet_neighbours()
#     b = o_ref.shape[0]
#     for hop in range(n):
#         here, there = hop % 2, 1 - hop % 2
#         rows = pl.ds(lax.rem(me - hop - 1 + n, n) * b, b)
#         part = jnp.dot(h_ref[rows], w_ref[...])
#         if hop > 0:
#             copy.wait()
#             part += buf[here]
#             if hop < n - 1:
#                 pl.semaphore_signal(credit, 1, device_id={"x": left})
#                 pl.semaphore_wait(credit, 1)
#         if hop < n - 1:
#             buf[here] = part
#             to = {"x": right}
#             copy = pltpu.make_async_remote_copy(buf.at[here], buf.at[there], sent, came.at[there], device_id=to)
#             copy.start()
#     o_ref[...] = part
# ```
#
# </details>

# %% [markdown]
# **Takeaway.** For the same arrays, Puzzle 2 sends as many bytes, and nothing can be computed meanwhile. Here, in the
# picture, orange is arithmetic, and in both halves it goes on under every arrow. (Do not compare the ticks of the two:
# the products of Puzzle 2 are outside of kernels, and take none.)

# %%
show(mlp_overlapped, normal((64, 128)), normal((128, 2048)), normal((2048, 128)))

# %% [markdown]
# ## What you built
#
# You began with weights on eight devices, and one call that summed what they made. Now you have rings that gather and
# add, in both directions and on a grid, an all-to-all, a layer of experts, attention over a text that no device holds,
# and an MLP that sends while it multiplies. Where to read on:
#
# - `jax.experimental.pallas.ops.tpu.all_gather` in JAX itself is Puzzle 5, with half of each part each way around. It
#   has one receive semaphore for all hops of a direction: what would the check of Puzzle 5 say?
# - vLLM's TPU backend, [tpu-inference](https://github.com/vllm-project/tpu-inference), has a fused MoE layer: Puzzle 11
#   in one kernel, which multiplies the rows of one expert while those of the next are on their way. It also has an
#   all-gather matmul and a reduce-scatter matmul: Puzzles 12b and 12c in HBM, in blocks, in both directions at once.
#
# Those kernels add four things to yours: bfloat16 on the links and float32 in the sums, blocks that fit into VMEM, both
# directions, and block sizes found by measuring.

# %%
progress()
