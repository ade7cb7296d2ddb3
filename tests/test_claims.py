"""What a reader's function says of a kernel is held against the kernel, and a wrong figure is taken apart."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import Budget, check
from pallas_puzzles.course import claims
from pallas_puzzles.course.claims import hbm_choice, hbm_claim, vmem_claim
from pallas_puzzles.lens.watchdog import TimeLimit


def product(x, y, *, bm, bn, bk):
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        acc_ref[...] = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...]) + jnp.dot(x_ref[...], y_ref[...])
        o_ref[...] = acc_ref[...]

    (M, K), (_, N) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(M // bm, N // bn, K // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, y)


def run(bm, bn, bk, *_):
    return functools.partial(product, bm=bm, bn=bn, bk=bk), (jnp.zeros((64, 256)), jnp.zeros((256, 384)))


def moved(bm, bn, bk):
    return 4 * (64 * 256 * (384 // bn) + 256 * 384 * (64 // bm) + 64 * 384)


def held(bm, bn, bk):
    return 4 * (2 * (bm * bk + bk * bn + bm * bn) + bm * bn)


def test_what_is_true_is_not_found():
    assert hbm_claim(moved, run, (16, 128, 128)).finding() is None
    assert vmem_claim(held, run, (16, 128, 128)).finding() is None


def test_a_formula_that_never_ends_is_stopped_soon(monkeypatch):
    def endless(*blocks):
        while blocks:
            pass

    monkeypatch.setattr(claims, "FORMULA_LIMIT_S", 0.1)
    with pytest.raises(TimeLimit, match="your function ran for more than"):
        hbm_claim(endless, run, (16, 128, 128)).finding()


WRONG = {
    "the result": (hbm_claim, lambda *b: moved(*b) - 4 * 64 * 384, (16, 128, 128), "if o_ref moved nothing"),
    "half": (hbm_claim, lambda *b: moved(*b) / 2, (16, 128, 128), "if an element had one byte"),
    "once": (hbm_claim, lambda *b: moved(*b) - 8 * 64 * 256, (16, 128, 128), "if all of x_ref came in once"),
    "scratch": (vmem_claim, lambda bm, bn, bk: held(bm, bn, bk) - 4 * bm * bn, (16, 128, 128), "without the scratch"),
    "unit": (hbm_claim, lambda *b: 1e6 * moved(*b), (16, 128, 128), "in units of 1e-6"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_taken_apart(name):
    claim, model, case, words = WRONG[name]
    finding = claim(model, run, case).finding()
    assert finding is not None
    assert words in finding.cause
    assert any("x_ref" in part for part in finding.evidence)
    assert finding.line is not None


def test_a_slip_has_to_fit_every_case():
    def half(bm, bn, bk):  # wrong where bk is 128 alone
        return moved(bm, bn, bk) / (2 if bk == 128 else 1)

    finding = hbm_claim(half, run, (16, 128, 128), (16, 128, 64)).finding()
    assert finding is not None
    assert "16, 128, 128" in finding.cause


def test_a_claim_is_judged_before_the_kernel_and_nothing_is_swallowed():
    def none(*_):
        return None

    x = jnp.ones((64, 256))
    y = jnp.ones((256, 384))
    blocks = functools.partial(product, bm=16, bn=128, bk=128)
    for model, words in ((none, "returns None"), (lambda *_: 1 // 0, "ZeroDivisionError")):
        verdict = check("own/1", blocks, jnp.dot, x, y, claims=[hbm_claim(model, run, (16, 128, 128))])
        assert not verdict
        assert words in str(verdict)
    assert check("own/1", blocks, jnp.dot, x, y, claims=[hbm_claim(moved, run, (16, 128, 128))])


def test_a_choice_that_breaks_a_budget_is_compared_with_the_others():
    def plans(m, n, k):
        return [(bm, 128, 128) for bm in (16, 32, 64)]

    def smallest(m, n, k, room):
        return 16, 128, 128

    def sized(m, n, k, *plan):
        return functools.partial(product, **dict(zip(("bm", "bn", "bk"), plan, strict=True))), (x, y)

    x, y = jnp.ones((64, 256)), jnp.ones((256, 384))
    choice = hbm_choice(smallest, sized, plans, lambda rng: (64, 384, 256, 1 << 20))
    fn = functools.partial(product, bm=16, bn=128, bk=128)
    verdict = check("own/1", fn, jnp.dot, x, y, budget=Budget(hbm_bytes=1 << 20), claims=[choice])
    assert verdict.findings[0].cause.startswith("Right answer, but smallest(64, 384, 256, 1048576) is (16, 128, 128)")


def test_a_choice_is_compared_with_every_other_plan_whatever_the_sizes():
    def plans(m, n, k):
        return [(bm, 128, bk) for bm in (16, 32, 64) for bk in (64, 128)]

    def large(rng):
        return 64, 384, 256, int(rng.integers(200_000, 10_000_000))

    def sized(m, n, k, bm, bn, bk):
        x, y = jnp.ones((m, k)), jnp.ones((k, n))
        return functools.partial(product, bm=bm, bn=bn, bk=bk), (x, y)

    def best(m, n, k, room):
        return min((p for p in plans(m, n, k) if held(*p) <= room), key=lambda p: moved(*p))

    def smallest(m, n, k, room):
        return 16, 128, 64

    def unheard_of(m, n, k, room):
        return [16, 128, 64]

    assert hbm_choice(best, sized, plans, large).finding() is None
    for pick, words in ((smallest, "which takes"), (unheard_of, "none of the 6 plans")):
        finding = hbm_choice(pick, sized, plans, large).finding()
        assert words in finding.cause
        assert finding.line is not None

    def greedy(m, n, k, room):
        return 64, 128, 128

    finding = hbm_choice(greedy, sized, plans, lambda rng: (64, 384, 256, 200_000)).finding()
    assert "bytes of VMEM; there are 200,000" in finding.cause


def in_terms(fn):
    """What is said of a model of 12 + 5 * n + n**2, at n = 10."""

    def measured(n):
        return claims.Count("it is", 12 + 5 * n + n**2, (), (), ",.0f", [("start", 12), ("row", 5 * n), ("all", n**2)])

    found = claims.Claim(fn, [(10,)], measured).finding()
    assert found is not None
    return found.cause, [*found.evidence]


def without_the_square(n):
    start, row = 12, 5 * n
    print("once")
    return start + row + 2 * n


def test_a_term_that_a_model_never_makes_is_told_first(capsys):
    cause, evidence = in_terms(without_the_square)
    assert cause == "without_the_square(10) is 82; it is 162."
    assert evidence == ["no value in without_the_square is this: all", "start", "row"]
    assert capsys.readouterr().out == "once\n", "it ran again, to see its values"


def all_of_them_in_another_way(n):
    parts = [12 * 1, *(each * n for each in (5, n))]
    return max(parts) + parts[1]


def test_a_model_that_makes_all_terms_puts_them_together_in_another_way():
    cause, evidence = in_terms(all_of_them_in_another_way)
    assert cause.endswith(
        "All numbers below are values in all_of_them_in_another_way: look at how they are put together."
    )
    assert evidence == ["start", "row", "all"]


def test_nothing_is_said_of_terms_that_a_model_does_not_have():
    cause, evidence = in_terms(lambda n: (n + 2) * (n + 3) + 7)
    assert "below" not in cause
    assert evidence == ["start", "row", "all"]
