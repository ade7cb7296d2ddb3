"""Wrong values that one change of a position puts right, and steps of a right answer that change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import lens
from pallas_puzzles.lens.changes import tell_change
from pallas_puzzles.lens.changes.trial import Example
from pallas_puzzles.lens.diagnose import diagnose
from pallas_puzzles.lens.findings import Finding
from pallas_puzzles.lens.waste import idle_copies, idle_products

X = np.random.default_rng(0).normal(size=(24, 384)).astype(np.float32)
ORDER = np.asarray([2, 0, 1], np.int32)
OTHER = np.asarray([1, 2, 0], np.int32)


def told(fn, want, *args, examples=()):
    """The first finding after the changes have been tried, given one that says nothing but that values are wrong."""
    run = lens.trace(fn, *args)
    runs = [Example(f"variant {n}", lens.trace(fn, *more), expected) for n, (more, expected) in enumerate(examples, 1)]
    (finding,) = tell_change(
        [Finding("values", "o_ref is wrong.", ["evidence"])], run, want, None, examples=lambda: runs
    )
    return finding


def shifted(compare, start, x):
    """Elements of x right of column 200, 0 elsewhere, if `compare` and `start` say so."""

    def kernel(x_ref, o_ref):
        cols = start(jnp.arange(128)[None, :], pl.program_id(0), pl.program_id(1))
        o_ref[...] = jnp.where(compare(cols, 200), x_ref[...], 0)

    block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return pl.pallas_call(kernel, grid=(3, 3), in_specs=[block], out_specs=block, out_shape=shape)(x)


RIGHT_OF_200 = np.where(np.arange(384)[None, :] > 200, X, 0)
POSITIONS = {
    "equality": (
        jnp.greater_equal,
        lambda c, i, j: c + j * 128,
        "the comparison >= must not hold where both sides are equal",
    ),
    "axis": (
        jnp.greater,
        lambda c, i, j: c + i * 128,
        "grid axis 0 is the wrong number here, and the step's index along grid",
    ),
    "local": (jnp.greater, lambda c, i, j: c, "the block starts at 128 times the step's index along grid axis 1"),
    "addend": (jnp.greater, lambda c, i, j: c + (j * 128 + 3), "3 is added here, and should not be"),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_the_change_of_a_position_is_named_with_its_line(name):
    compare, start, words = POSITIONS[name]
    finding = told(functools.partial(shifted, compare, start), RIGHT_OF_200, X)
    assert words in finding.cause
    assert finding.line is not None
    assert finding.line.file == __file__


def test_a_lookup_of_the_wrong_list_is_named():
    def kernel(order_ref, other_ref, x_ref, o_ref):
        n, other = order_ref[pl.program_id(0)], other_ref[pl.program_id(0)]
        total = x_ref[...] + n.astype(jnp.float32)
        o_ref[...] = total * other.astype(jnp.float32)

    def fn(order, other, x):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(3,),
                in_specs=[pl.BlockSpec((8, 384), lambda i, order_ref, other_ref: (other_ref[i], 0))],
                out_specs=pl.BlockSpec((8, 384), lambda i, order_ref, other_ref: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        )(order, other, x)

    want = np.concatenate([(X[8 * n : 8 * n + 8] + ORDER[i]) * ORDER[i] for i, n in enumerate(OTHER)]).astype(X.dtype)
    finding = told(fn, want, ORDER, OTHER, X)
    assert (
        "what other_ref holds is the wrong number here, and what order_ref holds belongs in its place" in finding.cause
    )
    assert "o_ref[...] = total * other" in finding.line.text


def test_nothing_is_said_where_no_change_helps():
    fn = functools.partial(shifted, jnp.greater, lambda c, i, j: c + j * 128)
    finding = told(fn, np.random.default_rng(1).normal(size=X.shape).astype(np.float32), X)
    assert finding.cause == "o_ref is wrong."


def row_sums(x, *, last):
    """Sums of the columns of x before `last`; blocks behind it come in all the same, and count 0."""

    def kernel(x_ref, o_ref, acc_ref):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            acc_ref[...] = jnp.zeros(acc_ref.shape)

        acc_ref[...] += jnp.where(j < last, x_ref[...], 0).sum(axis=1, keepdims=True)

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...]

    return pl.pallas_call(
        kernel,
        grid=(3, 3),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 1), lambda i, j: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((24, 1), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)],
    )(x)


def test_blocks_and_steps_that_change_nothing_are_named():
    run = lens.trace(functools.partial(row_sums, last=2), X)
    ((copies, lines, unread),) = idle_copies(run)
    assert not unread, "they are read, and count 0"
    assert (
        "3 of 9 blocks of x_ref come in and go unused, the first at step 2, grid index (0, 2): block (0, 2)" in copies
    )
    assert [line.file for line in lines] in ([], [__file__])
    (products,) = idle_products(run)
    assert "3 of its 9 steps compute and change nothing (2, 5, 8): what is in acc_ref stays as it is" in products


def test_nothing_is_idle_where_every_step_counts():
    run = lens.trace(functools.partial(row_sums, last=3), X)
    assert [*idle_copies(run)] == []
    assert [*idle_products(run)] == []


@pytest.mark.parametrize(
    ("meant", "taken", "words"),
    [
        (lambda i: i // 2, lambda i: i % 2, "the remainder (%) of the step's index along grid axis 0 is taken here"),
        (lambda i: i % 2, lambda i: i // 2, "the quotient (//) of the step's index along grid axis 0 is taken here"),
    ],
)
def test_a_quotient_and_a_remainder_in_each_others_place_are_named(meant, taken, words):
    x = X[:16].reshape(4, 4, 384)[:2]

    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def fn(x):
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec((None, 4, 384), lambda i: (taken(i), 0, 0))],
            out_specs=pl.BlockSpec((None, 4, 384), lambda i: (i, 0, 0)),
            out_shape=jax.ShapeDtypeStruct((4, 4, 384), jnp.float32),
        )(x)

    found = told(fn, 2 * x[[meant(i) for i in range(4)]], x)
    assert words in found.cause
    assert "lambda i: i //" in str(found.line.text)


def test_an_entry_that_only_index_maps_look_up_is_tried_in_the_kernel():
    def kernel(order_ref, x_ref, o_ref):
        position = pl.program_id(0) * 8 + jnp.arange(8)[:, None]
        o_ref[...] = x_ref[...] + position

    def fn(order, x):
        block = pl.BlockSpec((8, 384), lambda i, order_ref: (order_ref[i], 0))
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(3,),
                in_specs=[block],
                out_specs=pl.BlockSpec((8, 384), lambda i, order_ref: (i, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct(X.shape, jnp.float32),
        )(order, x)

    rows = (X + np.arange(24, dtype=np.float32)[:, None]).reshape(3, 8, 384)
    found = told(fn, rows[ORDER].reshape(24, 384), ORDER, X)
    assert "what order_ref holds belongs in its place" in found.cause


def _scaled(x, scale):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * scale

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32))(x)


def test_what_follows_from_an_earlier_wrong_call_is_not_said():
    def fn(x):
        first = _scaled(x, 3.0)
        return _scaled(first, 5.0), first  # the later call's result comes first

    run = lens.trace(fn, X)
    findings = diagnose(run, (10 * X, 2 * X)).findings
    assert len(findings) == 1
    assert "1.5 times" in findings[0].cause
    assert findings[0].size == X.size


def test_two_wrong_calls_that_do_not_feed_each_other_are_both_named():
    run = lens.trace(lambda x, y: (_scaled(x, 3.0), _scaled(y, 5.0)), X, X[::-1] + 1)
    causes = [f.cause for f in diagnose(run, (2 * X, 2 * (X[::-1] + 1))).findings]
    assert len(causes) == 2
    assert "1.5 times" in causes[0]
    assert "2.5 times" in causes[1]


def test_what_an_index_map_hands_through_is_tried_as_well():
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def fn(x):
        block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return pl.pallas_call(kernel, grid=(3, 3), in_specs=[block], out_specs=block, out_shape=shape)(x)

    diagonal = np.concatenate([X[8 * i : 8 * i + 8, 128 * i : 128 * i + 128] for i in range(3)])
    found = told(fn, 2 * np.tile(diagonal, (1, 3)), X)
    assert (
        "the index map of x_ref returns the step's index along grid axis 1 along dimension 1, and the step's index "
        "along grid axis 0 belongs there." in found.cause
    )
    assert found.line.file == __file__


def raised(order, other, x):
    """Every block of x, raised by the entry of `other`, where that of `order` is meant."""

    def kernel(order_ref, other_ref, x_ref, o_ref):
        n = other_ref[pl.program_id(0)] + 0 * order_ref[pl.program_id(0)]
        o_ref[...] = x_ref[...] + n.astype(jnp.float32)

    block = pl.BlockSpec((8, 384), lambda i, order_ref, other_ref: (i, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, grid=(3,), in_specs=[block], out_specs=block)
    return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32))(
        order, other, x
    )


def test_what_helps_everywhere_is_preferred_to_what_helps_by_chance():
    in_order = np.arange(3, dtype=np.int32)
    first = X + np.repeat(in_order, 8)[:, None].astype(np.float32)
    second = X + np.repeat(ORDER, 8)[:, None].astype(np.float32)
    by_chance = "the step's index along grid axis 0 belongs in its place."
    alone = told(raised, first, in_order, OTHER, X)
    assert alone.cause.endswith(by_chance)
    both = told(raised, first, in_order, OTHER, X, examples=[((ORDER, OTHER, X), second)])
    assert both.cause.endswith("what order_ref holds belongs in its place.")
    neither = told(raised, first, in_order, OTHER, X, examples=[((ORDER, OTHER, X), second + X)])
    assert neither.cause.endswith(f"{by_chance} It does so here, and not for variant 1: what is wrong is near.")
