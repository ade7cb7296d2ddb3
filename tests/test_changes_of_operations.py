"""A wrong kernel is told which one change makes its result right, and nothing where no change does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_puzzles import lens
from pallas_puzzles.lens.changes import tell_change
from pallas_puzzles.lens.findings import Finding, WrongOutput, default_tolerance

X = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)
A = np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)


def call(kernel, a, x):
    return pl.pallas_call(
        kernel,
        grid=(2, 2),
        in_specs=[pl.BlockSpec((8, 1), lambda i, j: (i, 0)), pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 1), jnp.float32),
    )(a, x)


def change(kernel, want, examples=list):
    """What is said of the kernel's result, and the line, given a finding that says nothing but that it is wrong."""
    run = lens.trace(functools.partial(call, kernel), A, X)
    output = WrongOutput(run.traces[0], 0, np.asarray(want, np.float32), default_tolerance(np.dtype(np.float32)))
    (found,) = tell_change([Finding("row-term", "", output=output)], run, want, None, [output], examples)
    return found.cause.strip(), found.line


def summed(value):
    def kernel(a_ref, x_ref, o_ref):
        before = jnp.where(pl.program_id(1) == 0, 0, o_ref[...])
        o_ref[...] = before + value(a_ref[...], x_ref[...]).sum(axis=1, keepdims=True)

    return kernel


WRONG = {
    "without": (summed(lambda a, x: a * x), X, "Without the multiplication by a_ref, the result is right."),
    "other": (summed(lambda a, x: a + x), A * X, "With a multiplication in place of the addition"),
    "function": (summed(lambda a, x: x), np.maximum(X, 0), "With relu applied to x_ref"),
    "moved": (
        summed(lambda a, x: jnp.maximum(x, 0) * a),
        np.maximum(A * X, 0),
        "With the maximum with 0 applied to the product instead",
    ),
    "combined": (summed(lambda a, x: jnp.exp(x)), np.exp(X) * X, "multiplied by x_ref"),
    "factor": (summed(lambda a, x: a * x), 2 * X, "Without the multiplication by a_ref"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_change_is_named_with_its_line(name):
    kernel, terms, words = WRONG[name]
    said, line = change(kernel, terms.sum(axis=1, keepdims=True))
    assert words in said
    assert line is not None
    assert line.file == __file__
    assert ("a factor of 2" in said) == (name == "factor")


def test_a_program_id_of_another_axis_is_named():
    def kernel(a_ref, x_ref, o_ref):
        before = jnp.where(pl.program_id(0) == 0, 0, o_ref[...])
        o_ref[...] = before + x_ref[...].sum(axis=1, keepdims=True)

    said, _ = change(kernel, X.sum(axis=1, keepdims=True))
    assert said == "With pl.program_id(1) in place of pl.program_id(0), the result is right."


def test_nothing_is_said_where_no_change_helps():
    want = np.random.default_rng(2).normal(size=(16, 1))
    assert change(summed(lambda a, x: a * x), want) == ("", None)


def test_a_change_has_to_help_everywhere():
    want = X.sum(axis=1, keepdims=True)
    want[8:] += 1.0  # right in the first block, wrong in the second
    assert change(summed(lambda a, x: a * x), want) == ("", None)
