"""A course of one small notebook with kernels for a GPU, to test what a reader of such a notebook is told."""

from pathlib import Path

HEAD = '''\
# ---
# jupyter:
#   pallas_puzzles: {order: 1}
# ---

# %% [markdown]
# # A small demonstration for GPUs

# %%
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_puzzles import check, normal, setup

setup("gpu")

# %% [markdown]
# ## Puzzle 1: Softmax of rows
#
# **Goal.** Each CTA takes some rows of `x`, and stores their softmax.


# %%
def softmax_spec(x):
    p = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    return p / jnp.sum(p, axis=1, keepdims=True)


def softmax_kernel(x_gmem, o_gmem):
    pass  # YOUR CODE HERE


def softmax(x):
    return plgpu.kernel(softmax_kernel, out_type=x, grid=(x.shape[0] // 64,), grid_names=("i",))(x)


# %%
check("gpudemo/1", softmax)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# ```python
@softmax_kernel
# ```
#
# </details>

# %% [markdown]
# ## Puzzle 2: The copy engine
#
# **Goal.** Copy the rows of each CTA to SMEM, double them, and copy them out.


# %%
def double_spec(x):
    return 2 * x


def double_kernel(x_gmem, o_gmem, x_smem, o_smem, barrier):
    pass  # YOUR CODE HERE


def double(x, *, bm=64):
    tile = plgpu.SMEM((bm, x.shape[1]), x.dtype)
    kernel = plgpu.kernel(
        double_kernel, out_type=x, grid=(x.shape[0] // bm,), grid_names=("i",),
        scratch_types=[tile, tile, plgpu.Barrier()],
    )
    return kernel(x)


# %%
check("gpudemo/2", double)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# ```python
@double_kernel
# ```
#
# </details>

# %% [markdown]
# ## Puzzle 3: Two slots
#
# **Goal.** One CTA takes all tiles in turn: the next one is on its way while it works on this one.


# %%
def bytes_moved(m, n):
    """How many bytes the kernel moves to and from GMEM."""
    pass  # YOUR CODE HERE


def slots_kernel(x_gmem, o_gmem, x_smem, o_smem, barriers):
    pass  # YOUR CODE HERE


def slots(x, *, bm=64):
    tiles = plgpu.SMEM((2, bm, x.shape[1]), x.dtype)
    return plgpu.kernel(slots_kernel, out_type=x, scratch_types=[tiles, tiles, plgpu.Barrier(num_barriers=2)])(x)


# %%
check("gpudemo/3", slots)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# ```python
@bytes_moved
#
#
@slots_kernel
# ```
#
# </details>

# %% [markdown]
# ## Puzzle 4: Column sums, in a pipeline
#
# **Goal.** `emit_pipeline` brings the tiles; you say which.


# %%
def centred_spec(x):
    return x - jnp.mean(x, axis=1, keepdims=True)


def tile_map(i):
    pass  # YOUR CODE HERE


def centred_kernel(_, x_smem, o_smem):
    pass  # YOUR CODE HERE


def centred(x, *, bm=64, depth=2):
    def body(x_gmem, o_gmem):
        spec = plgpu.BlockSpec((bm, x.shape[1]), tile_map)
        pipeline = plgpu.emit_pipeline(
            centred_kernel, grid=(x.shape[0] // bm,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=depth
        )
        pipeline(x_gmem, o_gmem)

    return plgpu.kernel(body, out_type=x)(x)


# %%
check("gpudemo/4", centred)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# ```python
@tile_map
#
#
@centred_kernel
# ```
#
# </details>
'''

SOLUTIONS = {
    "softmax_kernel": """\
def softmax_kernel(x_gmem, o_gmem):
    rows = pl.ds(lax.axis_index("i") * 64, 64)
    x = plgpu.load(x_gmem.at[rows], layout=plgpu.Layout.WGMMA)
    p = jnp.exp(x - jnp.max(x, axis=1)[:, None])
    o_gmem[rows] = p / jnp.sum(p, axis=1)[:, None]
""",
    "double_kernel": """\
def double_kernel(x_gmem, o_gmem, x_smem, o_smem, barrier):
    bm = x_smem.shape[0]
    rows = pl.ds(lax.axis_index("i") * bm, bm)
    plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, barrier)
    plgpu.barrier_wait(barrier)
    o_smem[...] = x_smem[...] * 2
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows])
    plgpu.wait_smem_to_gmem(0)
""",
    "bytes_moved": """\
def bytes_moved(m, n):
    return 2 * 4 * m * n
""",
    "slots_kernel": """\
def slots_kernel(x_gmem, o_gmem, x_smem, o_smem, barriers):
    bm = x_smem.shape[1]
    steps = x_gmem.shape[0] // bm

    def fetch(step):
        slot = lax.rem(step, 2)
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(step * bm, bm)], x_smem.at[slot], barriers.at[slot])

    fetch(0)

    @pl.loop(0, steps)
    def _(step):
        slot = lax.rem(step, 2)

        @pl.when(step + 1 < steps)
        def _():
            fetch(step + 1)

        plgpu.barrier_wait(barriers.at[slot])
        plgpu.wait_smem_to_gmem(1)
        o_smem[slot] = x_smem[slot] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[slot], o_gmem.at[pl.ds(step * bm, bm)])

    plgpu.wait_smem_to_gmem(0)
""",
    "tile_map": """\
def tile_map(i):
    return i, 0
""",
    "centred_kernel": """\
def centred_kernel(_, x_smem, o_smem):
    x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA)
    mean = jnp.sum(x, axis=1) / x.shape[1]
    o_smem[...] = x - mean[:, None]
""",
}

CASES = """\
from pallas_puzzles import Budget, case, normal
from pallas_puzzles.course.claims import gmem_claim
from pallas_puzzles.course.inputs import question


def puzzle_1(nb):
    return question(nb.softmax_spec, normal((192, 128)), variants=[case(normal((128, 64)))])


def puzzle_2(nb):
    return question(nb.double_spec, normal((192, 128)), variants=[case(normal((64, 64)), bm=32)])


def puzzle_3(nb):
    claims = [gmem_claim(nb.bytes_moved, lambda m, n: (nb.slots, (zeros(m, n),)), (256, 128), (192, 64))]
    inputs = normal((256, 128))
    return question(nb.double_spec, inputs, variants=[case(normal((192, 64)), bm=64)], claims=claims)


def puzzle_4(nb):
    return question(nb.centred_spec, normal((256, 64)), variants=[case(normal((320, 32)), depth=3)])


def zeros(*shape):
    import numpy as np

    return np.zeros(shape, np.float32)
"""


def _filled(text: str) -> str:
    for name, code in SOLUTIONS.items():
        text = text.replace(f"@{name}\n", "".join(f"# {line}".rstrip() + "\n" for line in code.splitlines()))
    return text


NOTEBOOK = _filled(HEAD)


def make(folder: Path) -> Path:
    """Writes the course to `folder` and returns it."""
    for place, text in [
        ("puzzles", NOTEBOOK),
        ("solutions", "\n\n".join(SOLUTIONS.values())),
        ("cases", CASES),
    ]:
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "gpudemo.py").write_text(text, "utf-8")
    return folder
