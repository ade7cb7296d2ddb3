"""Where an answer parts from the course's solution: by the values of both runs, however they are written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.course import session
from pallas_puzzles.diagnose.origin import Origin, Values, origin
from pallas_puzzles.ir.ops import witnessed
from pallas_puzzles.lens import gpu
from pallas_puzzles.lens.machine import trace

X, Y = (np.random.default_rng(n).normal(size=(32, 256)).astype(np.float32) for n in range(2))


def parted(answer: Callable[..., Any], course: Callable[..., Any]) -> str:
    """The expression of the first value of an answer that is not the course's."""
    found = origin_of(answer, course)
    return found.expression if found else ""


def origin_of(answer: Callable[..., Any], course: Callable[..., Any]) -> Origin | None:
    runs = []
    for kernel in (answer, course):

        def call(x, y, kernel=kernel):
            block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
            total = pl.BlockSpec((8, 1), lambda i, j: (i, 0))
            return pl.pallas_call(
                kernel,
                out_shape=jax.ShapeDtypeStruct((32, 1), jnp.float32),
                grid=(4, 2),
                in_specs=[block, block],
                out_specs=total,
                scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)],
            )(x, y)

        runs.append(Values())
        with witnessed(runs[-1]):
            trace(call, X, Y)
    return origin(*runs)


def course(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.sum(jnp.exp(x_ref[...]) * y_ref[...], axis=1, keepdims=True)
    o_ref[...] = acc_ref[...]


def test_what_is_right_in_another_order_and_shape_parts_nowhere():
    def turned(x_ref, y_ref, o_ref, acc_ref):
        first = pl.program_id(1) == 0
        z = (y_ref[...] * jnp.exp(x_ref[...])).T
        total = z.sum(axis=0).reshape(8, 1) + jnp.where(first, 0.0, acc_ref[...])
        acc_ref[...] = total
        o_ref[...] = total

    assert parted(turned, course) == ""


def test_the_first_wrong_value_is_found_behind_another_form():
    def wrong(x_ref, y_ref, o_ref, acc_ref):
        powers = jnp.exp(x_ref[...])
        weighed = powers * powers * y_ref[...]
        total = weighed.sum(axis=1)[:, None]
        o_ref[...] = jnp.where(pl.program_id(1) == 0, total, acc_ref[...] + total)
        acc_ref[...] = o_ref[...]

    assert parted(wrong, course) == "powers * powers"


def test_what_goes_into_it_is_right():
    def twice(x_ref, y_ref, o_ref, acc_ref):
        total = jnp.sum(jnp.exp(x_ref[...]) * y_ref[...], axis=1, keepdims=True)
        before = jnp.where(pl.program_id(1) == 0, 0.0, acc_ref[...])
        acc_ref[...] = before + total
        o_ref[...] = acc_ref[...] + total

    found = origin_of(twice, course)
    assert found is not None
    assert (found.expression, {*found.right}) == ("acc_ref[...] + total", {"acc_ref[...]", TOTAL})


TOTAL = "jnp.sum(jnp.exp(x_ref[...]) * y_ref[...], axis=1, keepdims=True)"


def test_what_goes_into_it_is_right_in_another_use():
    """Both use powers that are too small; one of them corrects that."""

    def uncorrected(x_ref, y_ref, o_ref, acc_ref):
        powers = jnp.exp(x_ref[...] - 1)
        total = jnp.sum(powers * 2.718281828 * y_ref[...], axis=1, keepdims=True)
        before = jnp.where(pl.program_id(1) == 0, 0.0, acc_ref[...])
        acc_ref[...] = before + total
        o_ref[...] = acc_ref[...] + jnp.max(powers * powers, axis=1, keepdims=True)

    found = origin_of(uncorrected, course)
    assert found is not None
    assert found.used is not None
    assert found.expression == "powers * powers"
    assert found.used[:2] == ("jnp.exp(x_ref[...] - 1)", "powers * 2.718281828")


def test_what_a_ref_holds_was_stored_somewhere():
    def half(x_ref, y_ref, o_ref, acc_ref):
        course(x_ref, y_ref, o_ref, acc_ref)
        acc_ref[0:4] = jnp.full((4, 1), 3.0)
        o_ref[...] = acc_ref[...]

    found = origin_of(half, course)
    assert found is not None
    assert found.stored is not None
    assert (found.expression, found.stored.text) == ("acc_ref[...]", "acc_ref[0:4] = jnp.full((4, 1), 3.0)")


def test_a_value_that_leads_to_a_right_one_is_another_way():
    def halves(x_ref, y_ref, o_ref, acc_ref):
        half = jnp.exp(x_ref[...] / 2)
        z = half * half * y_ref[...]
        total = z.sum(axis=1, keepdims=True)
        acc_ref[...] = total + jnp.where(pl.program_id(1) == 0, 0.0, acc_ref[...])
        o_ref[...] = acc_ref[...] * 3

    assert parted(halves, course) == "acc_ref[...] * 3"


def test_a_sum_that_is_not_begun_anew_parts_where_it_goes_on():
    def carried(x_ref, y_ref, o_ref, acc_ref):
        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        part = jnp.sum(jnp.exp(x_ref[...]) * y_ref[...], axis=1, keepdims=True)
        acc_ref[...] += part
        o_ref[...] = acc_ref[...]

    assert parted(carried, course) == "acc_ref[...] += part"


def test_inside_of_a_library_the_readers_call_counts():
    def wrong(x_ref, y_ref, o_ref, acc_ref):
        z = jnp.exp(jax.nn.softmax(x_ref[...], axis=1)) * y_ref[...]
        o_ref[...] = z.sum(axis=1, keepdims=True)

    assert parted(wrong, course) == "jax.nn.softmax(x_ref[...], axis=1)"


def test_a_kernel_for_a_gpu():
    def soft(exponent):
        def body(x_gmem, o_gmem, smem, copied):
            plgpu.copy_gmem_to_smem(x_gmem, smem, copied)
            plgpu.barrier_wait(copied)
            powers = exponent(smem[...])
            o_gmem[...] = powers / jnp.sum(powers)

        scratch = [plgpu.SMEM((256,), jnp.float32), plgpu.Barrier()]
        made = Values()
        with witnessed(made):
            gpu.run(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((256,), jnp.float32), scratch_types=scratch), X[0])
        return made

    course = soft(lambda x: jnp.exp(x))
    assert origin(soft(lambda x: jnp.exp2(x * np.log2(np.e))), course) is None
    found = origin(soft(lambda x: jnp.exp2(x)), course)
    assert found is not None
    assert found.expression == "jnp.exp2(x)"


def test_a_verdict_points_there(capsys):
    """The solution of matmul/6 makes both gradients otherwise: no change of these lines leads to it."""
    verdict = session.run(
        "matmul/6",
        overlay="""
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] * b_ref[...]

def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    print("traced")
    db = a_ref[...] * g_ref[...]
    db_ref[...] = db
    part = (b_ref[...] * db).sum(axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 0)
    def _():
        da_ref[...] = part

    @pl.when(pl.program_id(1) > 0)
    def _():
        da_ref[...] += part
""",
    )
    first = verdict.findings[0]
    assert first.line is not None
    assert first.line.line == 9
    assert first.cause.startswith("Look at what `b_ref[...] * db` makes: neither this value")
    assert "da_ref holds wrong values" in first.evidence[0]
    assert capsys.readouterr().out == "traced\n", "what is only tried prints nothing"
