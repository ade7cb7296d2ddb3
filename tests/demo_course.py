"""A course of two small notebooks, to test what reads, runs and lists a course without depending on the real one."""

from pathlib import Path

DEMO = '''\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 1}
# ---

# %% [markdown]
# # A small demonstration
#
# It has two puzzles.

# %%
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_puzzles import check, normal, setup

setup()

# %% [markdown]
# ## Puzzle 1: Add one
#
# **Goal.** Add one to every element
# of `x`.
#
# ### Theory
#
# A kernel reads and writes refs.


# %%
def add_one_spec(x):
    return x + 1.0


def add_one_kernel(x_ref, o_ref):
    # x_ref: (8, 128)      o_ref: (8, 128)
    pass  # YOUR CODE HERE


def add_one(x):
    return pl.pallas_call(add_one_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


# %%
check("demo/1", add_one, add_one_spec, normal((8, 128)))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What does `x_ref[...]` give?
#
# </details>
#
# <details><summary>Hint 2</summary>
#
# `o_ref[...] = ...`
#
# </details>
#
# <details><summary>Hint 3: the solution</summary>
#
# ```python
# # comments at the start of a line are not headings
# def add_one_kernel(x_ref, o_ref):
#     o_ref[...] = x_ref[...] + 1.0
# ```
#
# </details>

# %% [markdown]
# ## Puzzle 2a: Add two, block by block
#
# **Goal.** Add two to every element.


# %%
def add_two_spec(x):
    return add_one_spec(x) + 1.0


def x_map(i):
    """The block that step i reads and writes."""
    # YOUR CODE HERE


def add_two_kernel(x_ref, o_ref):
    pass
    # YOUR CODE HERE


def add_two(x, *, bm=8):
    spec = pl.BlockSpec((bm, 128), x_map)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(add_two_kernel, grid=(x.shape[0] // bm,), in_specs=[spec], out_specs=spec, out_shape=out)(x)


# %%
check("demo/2a", add_two, add_two_spec, normal((24, 128)))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# ```python
# def x_map(i):
#     return i, 0
#
#
# def add_two_kernel(x_ref, o_ref):
#     o_ref[...] = x_ref[...] + 2.0
# ```
#
# </details>

# %% [markdown]
# ## What you have built
#
# Two additions.
'''

OTHER = """\
# ---
# jupyter:
#   pallas_puzzles:
#     order: 2
# ---

# %% [markdown]
# # Another one

# %%
from pallas_puzzles import check

# %% [markdown]
# ## Puzzle 1: Nothing much
#
# **Goal.** None.

# %%
check("other/1", None, None)
"""


def make(folder: Path) -> Path:
    """Writes the course to `folder` and returns it."""
    (folder / "puzzles").mkdir(parents=True)
    (folder / "puzzles" / "demo.py").write_text(DEMO, "utf-8")
    (folder / "puzzles" / "a_second.py").write_text(OTHER.replace("other/1", "a_second/1"), "utf-8")
    return folder


ADD_ONE = "def add_one_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 1.0\n"
ADD_TWO = "def x_map(i):\n    return i, 0\n\n\ndef add_two_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 2.0\n"

HOLES_OF_TWO = DEMO[DEMO.index("def x_map") : DEMO.index("def add_two(x, ")]


def solved(text: str = DEMO) -> str:
    """The notebook as a reader would leave it, with the first puzzle solved."""
    hole = "    # x_ref: (8, 128)      o_ref: (8, 128)\n    pass  # YOUR CODE HERE\n"
    assert hole in text
    return text.replace(hole, "    o_ref[...] = x_ref[...] + 1.0\n")
