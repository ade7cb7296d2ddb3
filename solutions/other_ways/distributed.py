"""Right answers to puzzles/distributed.py in another way than the solutions: a wrong one is compared with the
nearest."""

import jax.numpy as jnp


# Puzzle 11a: where the expert begins on its device, and the rows of earlier senders
def plan(counts):
    n, E = counts.shape
    starts = jnp.cumsum(counts, axis=1) - counts
    total = counts.sum(axis=0).reshape(n, E // n)
    begins = (jnp.cumsum(total, axis=1) - total).reshape(E)
    earlier = jnp.cumsum(counts, axis=0) - counts
    return starts, begins + earlier


# Puzzle 11a: sums as products with zeros and ones
def plan(counts):  # noqa: F811
    n, E = counts.shape
    e, i = jnp.arange(E), jnp.arange(n)
    before = e[:, None] < e
    together = e[:, None] // (E // n) == e // (E // n)
    earlier = i[:, None] > i
    starts = counts @ before.astype(jnp.int32)
    begins = counts.sum(axis=0) @ (before & together).astype(jnp.int32)
    return starts, begins + earlier.astype(jnp.int32) @ counts
