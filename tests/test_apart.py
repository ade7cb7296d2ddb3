"""Where the values of an answer part from those of a right one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.diagnose.apart import first_apart
from pallas_puzzles.lens.machine import trace


def right_kernel(x_ref, w_ref, o_ref, acc_ref):
    k = pl.program_id(0)

    @pl.when(k == 0)
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    acc_ref[...] += jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == pl.num_programs(0) - 1)
    def _():
        s = acc_ref[...]
        p = jnp.exp(s - s.max(axis=1, keepdims=True))
        o_ref[...] = p / p.sum(axis=1, keepdims=True)


def another_way(x_ref, w_ref, o_ref, acc_ref):
    step = pl.program_id(0)
    before = jnp.where(step == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    in_base_two = acc_ref[...] * 1.4426950408889634
    powers = jnp.exp2(in_base_two - in_base_two.max(axis=1, keepdims=True))
    o_ref[...] = powers / powers.sum(axis=1, keepdims=True)


def wrong_axis(x_ref, w_ref, o_ref, acc_ref):
    step = pl.program_id(0)
    before = jnp.where(step == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    in_base_two = acc_ref[...] * 1.4426950408889634
    powers = jnp.exp2(in_base_two - in_base_two.max(axis=1, keepdims=True))
    total = powers.sum(axis=0, keepdims=True)  # here
    o_ref[...] = powers / total


def twice_the_last(x_ref, w_ref, o_ref, acc_ref):
    step = pl.program_id(0)
    before = jnp.where(step == 0, 0, acc_ref[...])
    product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] = before + product * jnp.where(step == 2, 2, 1)  # here
    s = acc_ref[...]
    p = jnp.exp(s - s.max(axis=1, keepdims=True))
    o_ref[...] = p / p.sum(axis=1, keepdims=True)


def run(kernel):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 384), np.float32), rng.standard_normal((384, 128), np.float32)
    call = pl.pallas_call(
        kernel,
        grid=(3,),
        in_specs=[pl.BlockSpec((8, 128), lambda k: (0, k)), pl.BlockSpec((128, 128), lambda k: (k, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda k: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    )
    return functools.partial(trace, lambda x, w: call(x, w), x, w)


def test_the_same_values_under_other_names_do_not_part():
    assert first_apart(run(right_kernel), run(right_kernel)) == []


def test_another_way_to_the_same_values_is_none_to_blame():
    """With base 2 the scores are no values of the right kernel, but the powers of them are."""
    assert first_apart(run(right_kernel), run(another_way)) == []


@pytest.mark.parametrize("kernel", [wrong_axis, twice_the_last])
def test_the_line_is_found_in_another_way_of_writing(kernel):
    line = first_apart(run(right_kernel), run(kernel))[0]
    assert line.text.endswith("# here")
