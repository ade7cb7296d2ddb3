"""flash_attention.py as a whole: values and gradients beside jax.grad of the spec, in the simulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_puzzles.course import curriculum, session
from pallas_puzzles.targets.simulate import tpu_simulation

SHAPES = {  # H, Hkv, Sq, Skv, D, bq, bkv
    "equal heads": (2, 2, 128, 128, 64, 32, 64),
    "groups": (4, 2, 96, 160, 64, 48, 64),
    "one head of keys": (3, 1, 64, 192, 128, 32, 128),
    "ragged, more keys": (2, 1, 72, 136, 64, 32, 64),
    "ragged, rows that see nothing": (2, 1, 104, 56, 64, 40, 32),
}


@functools.cache
def notebook(puzzle_id):
    """The names of the notebook, with the solutions in place up to a puzzle."""
    solutions = curriculum.course_folder() / "solutions" / "flash_attention.py"
    return session.run(puzzle_id, overlay=solutions, judge=False).subject.fn.__globals__


def arrays(shape, seed=0, lead=()):
    H, Hkv, Sq, Skv, D, *_ = shape
    rng = np.random.default_rng(seed)
    sizes = [(1, H, Sq, D), (1, Hkv, Skv, D), (1, Hkv, Skv, D), (1, H, Sq, D)]
    return [jnp.asarray(rng.standard_normal((*lead, *size), np.float32)) for size in sizes]


def value_and_grads(attend, q, k, v, weights):
    """A loss in which every element of the result has a weight of its own, and its gradients."""
    return jax.value_and_grad(lambda q, k, v: (attend(q, k, v) * weights).sum(), argnums=(0, 1, 2))(q, k, v)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(b).max())))


def both(names, shape, causal):
    *_, bq, bkv = shape
    name = "grouped_attention" if "grouped_attention" in names else "flash_attention"
    spec = names["grouped_spec"] if name == "grouped_attention" else names["attention_spec"]
    yours = functools.partial(names[name], causal=causal, bq=bq, bkv=bkv)
    return yours, functools.partial(spec, causal=causal)


IN_EVERY_RUN = [("groups", False), ("ragged, rows that see nothing", True)]
FORMS = [
    pytest.param(shape, causal, marks=() if (shape, causal) in IN_EVERY_RUN else pytest.mark.thorough)
    for shape in SHAPES
    for causal in (True, False)
]


@pytest.mark.parametrize(("shape", "causal"), FORMS)
def test_value_and_gradients_under_jit(shape, causal):
    shape = SHAPES[shape]
    yours, spec = both(notebook("flash_attention/11"), shape, causal)
    with tpu_simulation(), jax.default_matmul_precision("highest"):
        got = jax.jit(functools.partial(value_and_grads, yours))(*arrays(shape))
        want = value_and_grads(spec, *arrays(shape))
        assert_close(got, want)


@pytest.mark.parametrize(
    "puzzle_id", [pytest.param("flash_attention/10", marks=pytest.mark.thorough), "flash_attention/11"]
)
def test_value_and_gradients_under_vmap(puzzle_id):
    shape = SHAPES["equal heads"] if puzzle_id.endswith("10") else SHAPES["groups"]
    yours, spec = both(notebook(puzzle_id), shape, True)
    inputs = arrays(shape, lead=(2,))
    with tpu_simulation(), jax.default_matmul_precision("highest"):
        got = jax.jit(jax.vmap(functools.partial(value_and_grads, yours)))(*inputs)
        want = jax.vmap(functools.partial(value_and_grads, spec))(*inputs)
        assert_close(got, want)


def test_rows_that_see_nothing():
    """Their result is 0, their lse -inf, and nothing flows back through them."""
    names, shape = notebook("flash_attention/11"), SHAPES["ragged, rows that see nothing"]
    q, k, v, do = arrays(shape)
    blind = shape[2] - shape[3]
    with tpu_simulation():
        o, lse = names["grouped_attention_fwd"](q, k, v, causal=True, bq=40, bkv=32)
        _, vjp = jax.vjp(lambda q: names["grouped_attention"](q, k, v, bq=40, bkv=32), q)
        (dq,) = vjp(do)
    for zero in (o, dq):
        assert not np.asarray(zero)[:, :, :blind].any()
        assert np.asarray(zero)[:, :, blind:].any()
    assert np.isneginf(np.asarray(lse)[:, :, :blind]).all()
    assert np.isfinite(np.asarray(lse)[:, :, blind:]).all()


def test_huge_scores_neither_overflow_nor_vanish():
    names, shape = notebook("flash_attention/11"), SHAPES["groups"]
    q, k, v, do = arrays(shape)
    yours, spec = both(names, shape, True)
    with tpu_simulation(), jax.default_matmul_precision("highest"):
        got = value_and_grads(yours, 30 * q, 30 * k, v, do)
        want = value_and_grads(spec, 30 * q, 30 * k, v, do)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))
    np.testing.assert_allclose(np.asarray(got[0]), np.asarray(want[0]), rtol=1e-3)


def test_statistics_in_one_lane_are_right_as_well() -> None:
    """What the takeaway of Puzzle 5 suggests to try."""
    wide = "for n in (128, 128, D)"
    answer = curriculum.puzzle("flash_attention/5").solution
    assert answer.count(wide) == 1
    assert session.run("flash_attention/5", overlay=answer.replace(wide, "for n in (1, 1, D)"))
