"""Rounding as a model: its statistics, its words, and the course's result that it compares with."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_puzzles.course import cases, curriculum, session
from pallas_puzzles.course.inputs import Case, Draw
from pallas_puzzles.course.reference import course_of
from pallas_puzzles.diagnose.rounding import excess
from pallas_puzzles.ir.exact import in_float64

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def exact() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(64, 256))


def narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16)


def twice(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, with a sum of two parts each of which was rounded before."""
    part = np.random.default_rng(8).normal(size=x.shape)
    return narrow(narrow(x - part).astype(np.float64) + narrow(part).astype(np.float64))


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_one_rounding_is_accepted(exact: np.ndarray) -> None:
    other_order = exact * (1 + 1e-6 * np.random.default_rng(1).normal(size=exact.shape))
    assert excess(narrow(other_order), narrow(exact), exact) is None
    assert excess(narrow(exact), narrow(exact), exact) is None


def test_a_result_that_is_better_than_the_courses_is_accepted(exact: np.ndarray) -> None:
    assert excess(narrow(exact), twice(exact), exact) is None


def test_float32_may_be_off_by_a_few_digits(exact: np.ndarray) -> None:
    course = exact.astype(np.float32)
    noise = 1 + 2.0**-23 * np.random.default_rng(1).normal(size=exact.shape)
    assert excess((exact * noise).astype(np.float32), course, exact) is None
    assert excess((exact * (1 + 2.0**-22)).astype(np.float32), course, exact) is None


def test_what_is_nowhere_finite_or_zero_says_nothing() -> None:
    zeros, nothing = np.zeros((16, 64)), np.full((16, 64), np.nan)
    assert excess(narrow(zeros + 1e-3), narrow(zeros), zeros) is None
    assert excess(narrow(zeros), narrow(nothing), nothing) is None


def test_one_bad_element_among_few_is_no_statistic() -> None:
    exact = np.linspace(1, 2, 8)
    got = narrow(exact).copy()
    got[3] *= 1.01
    assert excess(got, narrow(exact), exact) is None


# --- what is refused, and in which words ------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "words"), [(1.005, "0.5% too large"), (0.99, "1% too small")])
def test_a_factor_is_told_as_one(exact: np.ndarray, factor: float, words: str) -> None:
    found = excess(narrow(factor * exact), narrow(exact), exact)
    assert found is not None
    assert found.kind == "factor"
    assert words in found.words
    assert f"a factor of {factor}" in found.words
    assert "this is no rounding" in found.advice
    assert "once too often" not in found.words + found.advice


def test_one_rounding_too_many_is_told_with_its_size(exact: np.ndarray) -> None:
    found = excess(twice(exact), narrow(exact), exact)
    assert found is not None
    assert found.kind == "scatter"
    assert 1.3 < found.ratio < 2.2
    assert f"the error is {found.ratio:.3g} times that of one rounding to bfloat16" in found.words
    assert "too large" not in found.words
    assert "once too often" in found.advice


def test_another_formula_is_told_by_the_values_that_it_is_wrong_for() -> None:
    from scipy.special import erf

    x = np.random.default_rng(3).normal(size=(128, 256))
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    found = excess(narrow(0.5 * x * (1 + erf(x / np.sqrt(2)))), narrow(tanh), tanh)
    assert found is not None
    assert found.kind == "formula"
    assert "values from" in found.words
    assert "once too often" not in found.words + found.advice


def test_a_rounded_statistic_is_refused(exact: np.ndarray) -> None:
    sums = np.random.default_rng(4).uniform(1, 2, size=(64, 1))
    result = exact / sums
    assert excess(narrow(exact / narrow(sums).astype(np.float64)), narrow(result), result) is not None
    assert excess(narrow(exact + 0.02), narrow(exact), exact) is not None, "and so is a constant that is added"


def test_lost_digits_of_float32_are_no_16_bits(exact: np.ndarray) -> None:
    far = np.float32(1000) + exact.astype(np.float32)
    found = excess(far - np.float32(1000), exact.astype(np.float32), exact)
    assert found is not None
    assert "seven digits" in found.advice
    assert "bfloat16" not in found.words + found.advice


# --- the exact result -------------------------------------------------------------------------------------------------


def test_a_spec_in_float64_rounds_nowhere() -> None:
    x = narrow(np.random.default_rng(0).normal(size=(8, 16)))

    def spec(x: Any) -> Any:
        y = (x.astype(jnp.float32) * 1.5).astype(jnp.bfloat16)
        return jnp.dot(y, y.T, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    (found,) = in_float64(spec, (x,), {})
    wide = 1.5 * x.astype(np.float64)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wide @ wide.T, rtol=1e-14)


def test_a_spec_with_control_flow_in_float64() -> None:
    def spec(x: Any, n: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry + row / 3, carry

        total, _ = jax.lax.scan(step, jnp.zeros(4), x)
        total = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 3), (0, total))[1]
        return jax.lax.cond(n > 2, lambda t: t / 7, lambda t: t, total)

    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    (found,) = in_float64(spec, (x, np.int32(3)), {})
    np.testing.assert_allclose(found, x.astype(np.float64).sum(axis=0) / 3**4 / 7, rtol=1e-6)
    assert np.abs(found - found.astype(np.float32)).max() > 0, "no float32 on the way"


def test_a_spec_that_looks_at_integers_or_is_written_in_numpy() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    sizes = np.array([2, 4], np.int32)

    def lengths(x: Any, sizes: Any) -> Any:
        return jnp.stack([part.sum(axis=0) / 3 for part in jnp.split(x, np.cumsum(sizes)[:-1])])

    def plain(x: Any, sizes: Any) -> Any:
        return jnp.asarray(np.add.reduceat(np.asarray(x, np.float32) / np.float32(3), [0, int(sizes[0])], axis=0))

    want = np.stack([x[:2].astype(np.float64).sum(axis=0), x[2:].astype(np.float64).sum(axis=0)]) / 3
    for spec in (lengths, plain):
        (found,) = in_float64(spec, (x, sizes), {})
        np.testing.assert_allclose(found, want, rtol=1e-7)
        assert found.dtype == np.float64


# --- the check --------------------------------------------------------------------------------------------------------


def judged(puzzle: str, *edits: tuple[str, str]) -> str:
    """The verdict on the course's solution with these edits in it."""
    code = curriculum.puzzle(puzzle).solution
    for old, new in edits:
        assert old in code
        code = code.replace(old, new)
    return str(session.run(puzzle, overlay=code))


def test_a_check_refuses_half_a_percent() -> None:
    verdict = judged("basics/6", ("jax.nn.sigmoid", "1.005 * jax.nn.sigmoid"))
    assert "solved." not in verdict
    assert "0.5% too large" in verdict
    assert "a factor of 1.005" in verdict
    assert "rounding, not logic" not in verdict
    assert "16-bit" not in verdict


def test_a_check_names_the_line_that_rounds_once_too_often() -> None:
    dot = "preferred_element_type=jnp.float32)"
    verdict = judged("basics/10", (dot, dot + ".astype(jnp.bfloat16)"))
    assert "solved." not in verdict
    assert "1.4" in verdict
    assert "times that of one rounding to bfloat16" in verdict
    assert f"{dot}.astype(jnp.bfloat16)` should be `jnp.dot(" in " ".join(verdict.split())
    assert "too large on average" not in verdict


def test_what_the_course_rounds_too_is_not_blamed() -> None:
    verdict = judged("flash_attention/4", ("(acc_ref[...] / l_ref", "(1.005 * acc_ref[...] / l_ref"))
    assert "too large on average" in verdict
    assert "goes into the matrix product" not in verdict


def test_another_function_than_the_courses_has_no_course_to_compare_with() -> None:
    x = np.ones((8, 128), np.float32)

    def spec(x: Any) -> Any:
        return 3 * x

    assert course_of("basics/1", spec, None, Draw(Case((x, x), {}), want=3 * x), 3 * x) is None, (
        "it takes other arguments"
    )
    assert course_of("basics/1", spec, None, Draw(Case((x[0],), {}), want=3 * x[0]), 2.9 * x[0]) is None, (
        "it is not right there"
    )
    assert course_of("nowhere/1", spec, None, Draw(Case((x,), {}), want=3 * x), 2.9 * x) is None
    ten = x[0] + 10
    assert course_of("basics/1", lambda x: x + 10, None, Draw(Case((x[0],), {}), want=ten), ten) is None, (
        "it is the course's, bit by bit"
    )
    found = course_of("basics/1", lambda x: x + 10, None, Draw(Case((x[0],), {}), want=ten), ten * np.float32(1 + 1e-6))
    assert found is not None
    np.testing.assert_array_equal(found.results[0], ten)


def test_the_courses_solution_is_run_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    cases.official.cache_clear()
    x = np.ones(640, np.float32)
    assert (
        course_of(
            "basics/1", lambda x: x + 10, None, Draw(Case((x,), {}), want=x + 10), (x + 10) * np.float32(1 + 1e-6)
        )
        is not None
    )
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("puzzle", "ours", "theirs"),
    [
        ("softmax/1", "keepdims=True", "keepdims=bool(1)"),
        (
            "softmax/1",
            "def row_softmax_kernel",
            "import functools\n\n@functools.wraps(jnp.exp)\ndef row_softmax_kernel",
        ),
        ("softmax/3", "keepdims=True", "keepdims=bool(1)"),
    ],
)
def test_the_courses_own_solution_alone_is_not_compared_with_itself(monkeypatch, puzzle, ours, theirs):
    compared = []
    monkeypatch.setattr("pallas_puzzles.course.check.course_of", lambda *asked: compared.append(asked))
    solution = curriculum.puzzle(puzzle).solution
    assert session.run(puzzle, overlay=solution)
    assert not compared
    session.run(puzzle, overlay=solution.replace(ours, theirs))
    assert compared
