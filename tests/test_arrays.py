"""`check(..., kernel=False)`: plain array code is run under jit, and must be right in value, shape and dtype."""

import gc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_puzzles import Budget, case, check, normal
from pallas_puzzles.course import arrays
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.course.inputs import groups
from pallas_puzzles.view.verdict import Verdict

SIZES = np.array([3, 0, 5], np.int32)


def judged(fn: Any, spec: Any, *inputs: Any, **options: Any) -> Verdict:
    with collecting() as verdicts:
        check("mine/1", fn, spec, *inputs, kernel=False, **options)
    (verdict,) = verdicts
    return verdict


def tiles_spec(sizes: Any, *, bm: int = 2) -> Any:
    return jnp.cumsum(sizes, dtype=jnp.int32) // bm


# --- what passes ------------------------------------------------------------------------------------------------------


def test_what_is_right_passes_and_says_what_it_takes() -> None:
    verdict = judged(tiles_spec, tiles_spec, SIZES, variants=[case(np.array([1, 2], np.int32), bm=4)])
    assert verdict
    assert "under jit" in verdict.gained
    assert "array operation" in verdict.gained


def test_the_spec_gets_the_keywords_of_a_case() -> None:
    def for_two(sizes: Any, *, bm: int = 2) -> Any:
        return jnp.cumsum(sizes, dtype=jnp.int32) // 2

    assert judged(for_two, tiles_spec, SIZES)
    verdict = judged(for_two, tiles_spec, SIZES, variants=[case(SIZES, bm=4)])
    assert verdict.findings[0].kind == "values"
    assert "variant 1" in verdict.notes[-1]
    assert "bm=4" in verdict.notes[-1]


def test_garbage_is_looked_for_less_often_in_a_check_and_as_often_as_before_after_it() -> None:
    before, during = gc.get_threshold(), []

    def doubled(x: Any) -> Any:
        during.append(gc.get_threshold()[0])
        return x + x

    gc.set_threshold(700, 10, 10)
    try:
        assert judged(doubled, lambda x: 2 * x, SIZES)
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
    assert min(during) > 700


def test_inputs_are_drawn_more_than_once() -> None:
    fixed = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    verdict = judged(lambda x: jnp.asarray(fixed), lambda x: x, normal((4, 3)))
    assert verdict.status == "failed"
    assert "other random values" in verdict.notes[-1]


def test_several_results_are_compared_one_by_one() -> None:
    verdict = judged(lambda s: (s, s + 1), lambda s: (s, s), SIZES)
    assert verdict.findings[0].cause.startswith("result 1 of 2")


def test_results_have_the_names_of_the_specs_fields() -> None:
    class Ends(NamedTuple):
        first: Any
        last: Any

    verdict = judged(lambda s: (s, s + 1), lambda s: Ends(s, s), SIZES)
    assert verdict.findings[0].cause.startswith("result.last is wrong at 3 of 3 places")
    assert judged(lambda s: (s, s), lambda s: Ends(s, s), SIZES)


def test_groups_fill_some_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    drawn = [groups(6, 1000).draw(rng) for _ in range(200)]
    assert all(sizes.dtype == np.int32 and sizes.shape == (6,) for sizes in drawn)
    sums = [int(sizes.sum()) for sizes in drawn]
    assert all(sizes.min() >= 0 for sizes in drawn)
    assert max(sums) <= 1000
    assert len(set(sums)) > 100, "they do not all fill the rows"
    assert 0.15 < np.mean([(sizes == 0).mean() for sizes in drawn]) < 0.35


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_wrong_values_are_named_one_by_one() -> None:
    verdict = judged(lambda s: jnp.cumsum(s) - (s > 4), lambda s: jnp.cumsum(s), SIZES)
    first = verdict.findings[0]
    assert first.kind == "values"
    assert "wrong at 1 of 3 places: [2] is 7, not 8" in first.cause
    assert first.evidence == ["yours: [3 3 7]", "right: [3 3 8]"]


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda s: s / 1, "dtype", "// (rounds down)"),
        (lambda s: s > 0, "dtype", "comparison"),
        (lambda s: s.astype(jnp.int8), "dtype", "dtype=int32"),
        (lambda s: s[:2], "shape", "(2,)"),
        (lambda s: (s, s), "structure", "2 arrays"),
        (lambda s: None, "structure", "returns nothing"),
    ],
)
def test_the_result_is_what_the_spec_says(wrong: Any, kind: str, says: str) -> None:
    finding = judged(wrong, lambda s: s, SIZES).findings[0]
    assert finding.kind == kind
    assert says in finding.cause


@pytest.mark.parametrize("wanted", [0.0, np.nan])
def test_nan_never_passes_without_a_kernel(wanted: float) -> None:
    verdict = judged(lambda x: x * jnp.nan, lambda x: x * 0 + wanted, normal((4,)))
    assert not verdict
    assert "nan" in verdict.findings[0].cause


def test_a_kernel_in_array_code_is_run() -> None:
    def with_kernel(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...] + 1

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    assert judged(with_kernel, lambda x: x + 1, normal((8, 128)))
    assert not judged(with_kernel, lambda x: x + 2, normal((8, 128)))


# --- under jit --------------------------------------------------------------------------------------------------------


def _assigned(s: Any) -> Any:
    s[0] = 1
    return s


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda s: jnp.array(list(range(s[0]))), "python-loop", "range"),
        (lambda s: s if s[0] > 2 else -s, "python-loop", "jnp.where"),
        (lambda s: jnp.zeros(s.sum()), "python-loop", "lengths"),
        (lambda s: s[: s[0]], "static-shape", "lengths are known first"),
        (lambda s: jnp.repeat(s, s), "static-shape", "total_repeat_length"),
        (lambda s: s[s > 0], "static-shape", "jnp.where"),
        (lambda s: jnp.nonzero(s)[0], "static-shape", "size="),
        (lambda s: np.add(np.asarray(s), 1), "numpy", "use jnp"),
        (_assigned, "item-assignment", ".at[i]"),
        (lambda s: s + missing, "name", "does not exist"),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_what_jit_cannot_do_is_said_in_one_line_with_the_readers_own(wrong: Any, kind: str, says: str) -> None:
    verdict = judged(wrong, lambda s: s, SIZES)
    assert verdict.status == "error"
    (finding,) = verdict.findings
    assert finding.kind == kind
    assert says in finding.cause
    assert "kernel" not in finding.cause
    assert finding.line is not None
    assert finding.line.file == __file__
    assert "Traceback" not in str(verdict)
    assert "Traceback" in verdict.traceback


def test_an_exception_of_the_readers_does_not_poison_the_next_check() -> None:
    def broken(s: Any) -> Any:
        raise RuntimeError("half an idea")

    verdict = judged(broken, lambda s: s, SIZES)
    assert "half an idea" in verdict.findings[0].cause
    assert judged(lambda s: s + 0, lambda s: s, SIZES)


def test_a_python_loop_that_is_written_out_is_over_the_budget() -> None:
    def looped(s: Any) -> Any:
        total, ends = jnp.int32(0), []
        for i in range(s.shape[0]):
            total = total + s[i]
            ends.append(total)
        return jnp.stack(ends)

    budget = Budget(operations=6)
    assert judged(lambda s: jnp.cumsum(s), lambda s: jnp.cumsum(s), SIZES, budget=budget)
    assert judged(looped, lambda s: jnp.cumsum(s), SIZES)
    verdict = judged(looped, lambda s: jnp.cumsum(s), SIZES, budget=budget)
    assert verdict.findings[0].kind == "budget"
    assert "the budget is 6" in verdict.findings[0].cause
    assert "turn by turn" in verdict.findings[0].cause
    chained = judged(lambda s: s + 1 + 1 + 1 + 1 - 1 - 1 - 1 - 1, lambda s: s, SIZES, budget=budget)
    assert "the budget is 6" in chained.findings[0].cause
    assert "loop" not in chained.findings[0].cause


def test_a_table_of_everything_against_everything_is_over_the_budget() -> None:
    def by_table(s: Any) -> Any:
        before = jnp.arange(3)[:, None] >= jnp.arange(3)  # <- here
        return jnp.where(before, s, 0).sum(axis=1)

    budget = Budget(elements=8)
    assert judged(lambda s: jnp.cumsum(s), lambda s: jnp.cumsum(s), SIZES, budget=budget)
    assert judged(by_table, lambda s: jnp.cumsum(s), SIZES, budget=Budget(elements=9))
    finding = judged(by_table, lambda s: jnp.cumsum(s), SIZES, budget=budget).findings[0]
    assert finding.kind == "budget"
    assert "an array of shape (3, 3), 9 numbers; the largest may have 8" in finding.cause
    assert finding.line is not None
    assert "# <- here" in finding.line.text


def test_a_forbidden_name_is_refused_without_a_kernel_too() -> None:
    verdict = judged(lambda s: jnp.cumsum(s), lambda s: s, SIZES, forbid=("cumsum",))
    assert verdict.findings[0].kind == "forbidden"


def test_an_answer_may_not_call_its_spec_without_a_kernel_either() -> None:
    def fn(s: Any) -> Any:
        return tiles_spec(s)

    assert judged(fn, tiles_spec, SIZES).findings[0].kind == "forbidden"


# --- the picture ------------------------------------------------------------------------------------------------------


def drawn(sizes: Any, *, got: Any, want: Any, bm: int) -> tuple[str, str]:
    return "One too many.", f"got {got.tolist()} want {want.tolist()} <bm {bm}>\n   of {sizes.tolist()}"


def test_wrong_values_are_drawn_and_nothing_else_is() -> None:
    def one_more(sizes: Any, *, bm: int = 2) -> Any:
        return jnp.cumsum(sizes, dtype=jnp.int32) // bm + 1

    verdict = judged(one_more, tiles_spec, SIZES, explain=drawn)
    assert verdict.findings[0].cause.endswith(". One too many.")
    assert verdict.picture == "got [2, 2, 5] want [1, 1, 4] <bm 2>\n   of [3, 0, 5]"
    lines = str(verdict).splitlines()
    assert "    got [2, 2, 5] want [1, 1, 4] <bm 2>" in lines
    assert "       of [3, 0, 5]" in lines
    assert "&lt;bm 2&gt;" in verdict._repr_html_()
    assert verdict.to_json()["picture"] == verdict.picture
    verdict = judged(one_more, tiles_spec, SIZES, variants=[case(SIZES, bm=4)], explain=drawn)
    assert not judged(lambda s, bm=2: s / 1, tiles_spec, SIZES, explain=drawn).picture
    assert not judged(tiles_spec, tiles_spec, SIZES, explain=drawn).picture


def test_an_explanation_that_fails_is_none() -> None:
    def fails(*_: Any, **__: Any) -> tuple[str, str]:
        raise IndexError

    verdict = judged(lambda s, bm=2: jnp.cumsum(s, dtype=jnp.int32), tiles_spec, SIZES, explain=fails)
    assert "wrong at" in verdict.findings[0].cause
    assert not verdict.picture


def test_a_spec_that_looks_at_integers_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(x: Any, lengths: Any, *, times: int) -> Any:
        return jnp.stack([times * x[b, : int(n)].sum() for b, n in enumerate(lengths)])

    x, lengths = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([1, 0, 4], np.int32)
    by_jax = arrays.expected(spec, (x, lengths), {"times": 3})
    monkeypatch.setattr(arrays, "expected", None)
    np.testing.assert_array_equal(arrays.quickly_expected(spec, (x, lengths), {"times": 3}), by_jax)
    assert by_jax.tolist() == [0.0, 0.0, 114.0]
