"""What `check` promises whatever the puzzle: it comes back, it is fair, and a pass is never the lens's word alone."""

import functools
import re
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import bank
from course import functions
from pallas_puzzles import Budget, case, check, check_call, integers, normal, uniform
from pallas_puzzles.course import curriculum, inputs, session
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.course.inputs import Case, Draw
from pallas_puzzles.course.progress import load
from pallas_puzzles.diagnose.findings import Tolerance
from pallas_puzzles.lens import machine
from pallas_puzzles.targets import simulate as simulate_module
from pallas_puzzles.view.verdict import Verdict

holes_module = __import__("sys").modules["pallas_puzzles.course.holes"]
judge_module = __import__("sys").modules["pallas_puzzles.course.judge"]
TILE = pl.BlockSpec((8, 128), lambda i: (i, 0))


def judged(fn: Any, spec: Any, *inputs: Any, **options: Any) -> Verdict:
    with collecting() as verdicts:
        check("mine/1", fn, spec, *inputs, **options)
    (verdict,) = verdicts
    return verdict


def by_rows(kernel: Any, x: Any, **options: Any) -> Any:
    return pl.pallas_call(kernel, grid=(x.shape[0] // 8,), in_specs=[TILE], out_specs=TILE, out_shape=x, **options)(x)


def twice(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    return by_rows(kernel, x)


def spec(x: Any) -> Any:
    return 2 * x


X = normal((24, 128))


# --- it always comes back ---------------------------------------------------------------------------------------------


def test_an_exception_in_a_kernel_does_not_poison_the_next_check() -> None:
    def broken(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            raise RuntimeError("half an idea")

        return by_rows(kernel, x)

    verdict = judged(broken, spec, X)
    assert verdict.status == "error"
    assert "half an idea" in verdict.findings[0].cause
    assert verdict.findings[0].line is not None
    assert "raise RuntimeError" in verdict.findings[0].line.text
    assert "RuntimeError" in verdict.traceback
    assert judged(twice, spec, X)


def waiting(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any, ready: Any) -> None:
        pl.semaphore_wait(ready, 1)
        o_ref[...] = 2 * x_ref[...]

    return by_rows(kernel, x, scratch_shapes=[pltpu.SemaphoreType.REGULAR])


def test_a_kernel_that_waits_for_ever_is_reported() -> None:
    start = time.monotonic()
    verdict = judged(waiting, spec, X)
    assert verdict.findings[0].kind == "hang"
    assert "semaphore ready" in verdict.findings[0].cause
    assert time.monotonic() - start < judge_module.TIME_LIMIT_S


def test_a_wait_beyond_the_lens_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*args: Any, **kwargs: Any) -> Any:
        raise machine.Beyond("a kernel in the dark")

    monkeypatch.setattr(judge_module, "TIME_LIMIT_S", 3.0)
    monkeypatch.setattr(machine, "trace", blind)
    verdict = judged(waiting, spec, X)
    assert verdict.status == "error"
    assert "in the dark" in verdict.notes[0], "it is said that the simulator judges instead"
    assert "3 s" in str(verdict)
    monkeypatch.undo()
    assert judged(twice, spec, X)


def test_a_keyword_of_the_readers_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Any, *, chip: float, timeout_s: float) -> Any:
        return twice(x) * (chip * timeout_s)

    x = np.ones((8, 128), np.float32)
    assert check_call(scaled, (x,), 6 * x, chip=3.0, timeout_s=1.0), "also of those of the simulator and the compiler"

    def blind(*args: Any, **kwargs: Any) -> Any:
        raise machine.Beyond("a kernel in the dark")

    monkeypatch.setattr(machine, "trace", blind)
    assert check_call(scaled, (x,), 6 * x, chip=3.0, timeout_s=1.0), "also where the simulator judges"


@pytest.mark.parametrize("where", ["kernel", "wrapper", "loop in the kernel"])
def test_an_endless_loop_is_stopped(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "TIME_LIMIT_S", 1.0)

    def endless(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            while where == "kernel":
                pass
            if where == "loop in the kernel":
                o_ref[...] = jax.lax.while_loop(lambda v: jnp.all(v < 1), lambda v: v * 0, x_ref[...] * 0)

        while where == "wrapper":
            pass
        return by_rows(kernel, x)

    verdict = judged(endless, spec, X)
    assert verdict.status == "error"
    assert "1 s" in verdict.findings[0].cause
    monkeypatch.undo()
    assert judged(twice, spec, X)


# --- it is fair -------------------------------------------------------------------------------------------------------


def test_an_answer_that_fits_one_draw_only_is_refused() -> None:
    remembered: list[np.ndarray] = []

    def learnt_by_heart(x: Any) -> Any:
        return twice(remembered[0] if remembered else x)

    remembered.append(np.random.default_rng(0).standard_normal((24, 128), np.float32))
    verdict = judged(learnt_by_heart, spec, X)
    assert verdict.status == "failed"
    assert "other random values" in verdict.notes[-1]
    assert "seed=" in verdict.notes[-1], "how to have these values again"


def draws_of(puzzle: str) -> list[np.ndarray]:
    seen: list[np.ndarray] = []

    def spy(x: Any) -> Any:
        seen.append(np.array(x))
        return x

    with collecting():
        check(puzzle, lambda x: x, lambda x: jax.pure_callback(spy, x, x), X, kernel=False)
    return seen


def test_the_draws_of_a_puzzle_are_the_same_at_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = draws_of("mine/1"), draws_of("mine/1"), draws_of("mine/2")
    assert len(first) == judge_module.DRAWS + 1, "what passes runs on the first draw once more, compiled"
    assert not np.array_equal(first[1], first[2])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first[1], other[1]), "another puzzle draws other values"
    for module in (inputs, judge_module):  # as with PALLAS_PUZZLES_RANDOM in the environment
        monkeypatch.setattr(module, "SALT", "another one")
    third = draws_of("mine/1")
    np.testing.assert_array_equal(first[0], third[0], "the notebook's own example stays")
    assert not np.array_equal(first[1], third[1])


@pytest.mark.parametrize("puzzle", ["basics/8", "softmax/2"])
def test_the_same_answer_gets_the_same_verdict(puzzle: str) -> None:
    answers = [answer for answer in bank.read_all() if answer.puzzle == puzzle][:2]
    assert answers
    for answer in answers:
        first, second = (str(session.run(puzzle, overlay=answer.code)) for _ in range(2))
        assert first == second


def test_a_grid_without_end_is_refused_at_once_with_its_line() -> None:
    def far_too_long(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, grid=(10**9,), in_specs=[TILE], out_specs=TILE, out_shape=x)(x)

    verdict = judged(far_too_long, spec, X)
    (finding,) = verdict.findings
    assert "The grid (1000000000,) has 1,000,000,000 steps" in finding.cause
    assert "o_ref has 3" in finding.cause
    assert finding.line is not None
    assert "grid=(10**9,)" in finding.line.text
    assert "simulator" not in str(verdict)


def test_a_grid_without_end_in_a_hole_is_pointed_at_where_it_is_returned() -> None:
    solution = (Path(__file__).parents[1] / "solutions" / "basics.py").read_text("utf-8")
    kernel = re.search(r"(?ms)^def vector_add_kernel.*?(?=^(def|# %%) )", solution)
    assert kernel is not None
    overlay = f"{kernel[0]}\n\ndef vector_add_grid(n, b):\n    return (10**9,)\n"
    (finding,) = session.run("basics/2", overlay=overlay).findings
    assert finding.line is not None
    assert finding.line.text == "return (10**9,)"
    assert "1,000,000,000 steps" in str(finding.evidence)


def test_a_seed_repeats_a_draw() -> None:
    seen: list[np.ndarray] = []

    def remember(x: Any) -> Any:
        return 2 * x

    def spy(x: np.ndarray) -> np.ndarray:
        seen.append(np.asarray(x))
        return remember(x)

    for _ in range(2):
        judged(lambda x: x, lambda x: jax.pure_callback(spy, x, x), X, seed=7)
    firsts = [seen[0], seen[len(seen) // 2]]
    np.testing.assert_array_equal(*firsts)
    np.testing.assert_array_equal(seen[0], np.random.default_rng(7).standard_normal((24, 128), np.float32))


def test_variants_are_judged_with_their_blocks() -> None:
    def fixed(x: Any, *, bm: int = 8) -> Any:
        return twice(x) if bm == 8 else x

    assert judged(fixed, spec, X, variants=[case(normal((48, 128)))])
    verdict = judged(fixed, spec, X, variants=[case(normal((48, 128)), bm=16)])
    assert not verdict
    assert "variant 1" in verdict.notes[-1]
    assert "bm=16" in verdict.notes[-1]


def test_inputs_are_what_they_say() -> None:
    rng = np.random.default_rng(1)
    assert normal((3, 4), "bfloat16").draw(rng).dtype == jnp.bfloat16
    assert 90 < normal((4096,), scale=2.0, shift=100.0).draw(rng).mean() < 110
    drawn = integers((1000,), -2, 3).draw(rng)
    assert set(drawn) == {-2, -1, 0, 1, 2}
    assert drawn.dtype == np.int32
    flat = uniform((1000,), 5, 6).draw(rng)
    assert 5 <= flat.min() < flat.max() < 6


def test_nan_passes_only_where_it_is_expected() -> None:
    some = np.where(np.arange(24)[:, None] == 3, np.nan, 1).astype(np.float32) * np.ones((1, 128), np.float32)
    assert judged(twice, spec, some)
    assert not judged(twice, lambda x: 2 * jnp.nan_to_num(x), some)
    assert not judged(lambda x: twice(jnp.nan_to_num(x)), spec, some, allow=["select_n", "ne"])


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda x: twice(x)[:8], "shape"),
        (lambda x: twice(x).astype(jnp.bfloat16), "dtype"),
        (lambda x: (twice(x), twice(x)), "structure"),
        (lambda x: None, "structure"),
    ],
)
def test_the_result_has_the_shape_of_the_spec(wrong: Any, kind: str) -> None:
    verdict = judged(wrong, spec, X, allow=["slice"])
    assert kind in [f.kind for f in verdict.findings]


# --- the work is done in the kernel -----------------------------------------------------------------------------------


def test_work_outside_of_the_kernel_is_named() -> None:
    def outside(x: Any) -> Any:
        return twice(x) * 3  # <- here

    verdict = judged(outside, lambda x: 6 * x, X)
    first = verdict.findings[0]
    assert first.kind == "outside"
    assert "mul" in first.cause
    assert "Only reshapes and casts may happen outside." in first.cause
    assert first.line is not None
    assert "# <- here" in first.line.text
    others = judged(outside, lambda x: 6 * x, X, allow=["sort", "int32"]).findings[0]
    assert "Only reshapes, casts, sort and work that makes arrays of int32 may happen outside." in others.cause
    assert judged(outside, lambda x: 6 * x, X, allow=["mul"])


@pytest.mark.parametrize("joined", [jnp.concatenate, lambda parts: jnp.stack(parts).reshape(X.shape)])
def test_several_slices_at_once_are_allowed_where_slices_are(joined: Any) -> None:
    def parted(x: Any) -> Any:
        return twice(joined(jnp.split(x, 2)[::-1]))

    want = lambda x: 2 * jnp.concatenate([x[12:], x[:12]])  # noqa: E731
    assert judged(parted, want, X, allow=["slice", "concatenate"])
    assert not judged(parted, want, X, allow=["concatenate"])
    assert not judged(parted, want, X, allow=["slice"])


def test_work_on_integers_may_be_allowed_as_such() -> None:
    def shifted(x: Any, n: Any) -> Any:
        return twice(x) + 0 * jnp.cumsum(n)[0]

    numbers = integers((24, 128), 0, 5)
    verdict = judged(shifted, lambda x, n: 2 * x, X, numbers, allow=["int32"])
    assert "add is done outside" in verdict.findings[0].cause, "float32 work is not allowed by it"

    def kernel(n_ref: Any, x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2.0 + n_ref[...].astype(jnp.float32)

    def steered(x: Any, n: Any) -> Any:
        return pl.pallas_call(kernel, grid=(3,), in_specs=[TILE, TILE], out_specs=TILE, out_shape=x)(n + 1, x)

    assert judged(steered, lambda x, n: 2 * x + n + 1, X, numbers, allow=["int32"])
    verdict = judged(steered, lambda x, n: 2 * x + n + 1, X, numbers)
    assert "add is done outside" in verdict.findings[0].cause


def test_reshapes_and_casts_are_fine_outside() -> None:
    def reshaped(x: Any) -> Any:
        return twice(x.reshape(24, 128)).reshape(-1)

    assert judged(reshaped, spec, normal((3072,)))


def test_a_forbidden_name_is_refused_on_its_line() -> None:
    def softmax(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = jax.nn.softmax(x_ref[...], axis=1)

        return by_rows(kernel, x)

    def expected(x: Any) -> Any:
        return jax.nn.softmax(x, axis=1)

    assert judged(softmax, expected, X, forbid=("logsumexp",))
    verdict = judged(softmax, expected, X, forbid=("logsumexp", "softmax"))
    assert verdict.status == "failed"
    (finding,) = verdict.findings
    assert finding.cause.startswith("softmax does the work for you")
    assert "jax.nn.softmax(x_ref[...], axis=1)" in finding.line.text


def test_a_forbidden_name_may_have_a_reason() -> None:
    def branching(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            @pl.when(pl.program_id(0) >= 0)
            def _() -> None:
                o_ref[...] = 2 * x_ref[...]

        return by_rows(kernel, x)

    verdict = judged(branching, spec, X, forbid={"when": "no branches here"})
    assert [finding.cause for finding in verdict.findings] == ["no branches here"]
    assert judged(branching, spec, X, forbid={"cond": "no branches here"})


def test_a_scatter_to_one_place_may_be_forbidden_whatever_makes_it() -> None:
    def folded(x: Any) -> Any:
        return jax.grad(lambda rows: (rows[jnp.arange(24) // 8] * twice(x)).sum())(jnp.zeros((3, 128)))

    def turned(x: Any) -> Any:
        return jnp.zeros((24, 128)).at[23 - jnp.arange(24)].add(twice(x))

    allow = ["scatter-add", "broadcast_in_dim", "gather", "mul", "reduce_sum", "int32", "bool"]
    forbid = {"scatter-add": "nothing is scattered into {shape}"}
    assert judged(folded, lambda x: 2 * x.reshape(3, 8, 128).sum(axis=1), X, allow=allow)
    verdict = judged(folded, lambda x: 2 * x.reshape(3, 8, 128).sum(axis=1), X, allow=allow, forbid=forbid)
    assert [finding.cause for finding in verdict.findings] == ["nothing is scattered into (3, 128)"]
    assert judged(turned, lambda x: 2 * x[::-1], X, allow=allow, forbid=forbid), "each row has a place of its own"


def test_products_outside_of_the_kernel_have_a_budget() -> None:
    def mixed(x: Any) -> Any:
        return jnp.dot(jnp.ones((4, 24)), twice(x))  # <- here

    def expected(x: Any) -> Any:
        return jnp.dot(jnp.ones((4, 24)), 2 * x, precision="highest")

    flops, allow = 2 * 4 * 24 * 128, ["dot_general", "broadcast_in_dim"]
    assert judged(mixed, expected, X, allow=allow, budget=Budget(outside_flops=flops))
    finding = judged(mixed, expected, X, allow=allow, budget=Budget(outside_flops=flops - 1)).findings[0]
    assert f"do {flops:,} FLOPs; the budget is {flops - 1:,}" in finding.cause
    assert finding.line is not None
    assert "# <- here" in finding.line.text


def test_results_may_have_to_be_written_over_inputs() -> None:
    def doubled(x: Any, aliases: dict[int, int]) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = 2 * x_ref[...]

        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel, grid=(3,), in_specs=[rows], out_specs=rows, out_shape=x, input_output_aliases=aliases
        )
        return call(x)

    budget = Budget(new_bytes=0)
    assert judged(lambda x: doubled(x, {0: 0}), spec, X, budget=budget)
    finding = judged(lambda x: doubled(x, {}), spec, X, budget=budget).findings[0]
    assert "12 KiB of new memory; the budget is 0 B" in finding.cause
    assert "input_output_aliases" in finding.cause
    assert "output 0, float32 of shape (24, 128)" in finding.evidence[0]


def test_operands_of_a_product_may_be_too_wide() -> None:
    def product(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = jnp.dot(x_ref[...].astype(jnp.float32), x_ref[...].T.astype(jnp.float32))

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32))(x)

    def expected(x: Any) -> Any:
        return jnp.dot(x, x.T, preferred_element_type=jnp.float32)

    wide = normal((16, 128), "bfloat16")
    assert judged(product, expected, wide, budget=Budget(mxu_bits=32))
    verdict = judged(product, expected, wide, budget=Budget(mxu_bits=16))
    assert "multiplies float32" in verdict.findings[0].cause
    assert "preferred_element_type" in verdict.findings[0].cause


def test_without_a_kernel_nothing_passes() -> None:
    verdict = judged(lambda x: x + x, spec, X)
    assert "no kernel is reached" in verdict.findings[0].cause
    verdict = judged(lambda x: (twice(x), x), lambda x: (2 * x, x), X)
    assert "does not come out of a kernel" in verdict.findings[0].cause
    verdict = judged(lambda x: (twice(x), jnp.zeros_like(x)), lambda x: (2 * x, x), X)  # as of a gradient that is lost
    assert "result 1 of 2, counted from 0, is wrong" in verdict.findings[0].cause


# --- budgets ----------------------------------------------------------------------------------------------------------

EXACT = Budget(hbm_bytes=2 * 24 * 128 * 4, vmem_bytes=4 * 8 * 128 * 4, grid_steps=3, calls=1, output_stores=1)


def test_an_answer_within_its_budget_passes() -> None:
    assert judged(twice, spec, X, budget=EXACT)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (Budget(hbm_bytes=24_575), ["24 KiB", "x_ref: 3 moves"]),
        (Budget(vmem_bytes=16_383), ["16 KiB of VMEM", "2 x 4 KiB"]),
        (Budget(grid_steps=2), ["3 grid steps", "budget is 2"]),
        (Budget(calls=2), ["1 pallas_call", "asks for 2"]),
        (Budget(flops=3071), ["3,072 FLOPs", "budget is 3,071"]),
        (Budget(serial_steps=1), ["3 of its 3 steps", "Grid axis 0", "'parallel' in dimension_semantics"]),
    ],
)
def test_one_more_than_the_budget_is_refused(budget: Budget, says: list[str]) -> None:
    verdict = judged(twice, spec, X, budget=budget)
    assert verdict.status == "failed"
    assert verdict.findings[0].kind == "budget"
    assert verdict.findings[0].cause.startswith("Right answer, but")
    text = "\n".join([verdict.findings[0].cause, *verdict.findings[0].evidence])
    for words in says:
        assert words in text.replace("×", "x"), text


# --- a pass is never our word alone -----------------------------------------------------------------------------------


def test_what_the_simulator_refuses_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = simulate_module.simulate
    monkeypatch.setattr(simulate_module, "simulate", lambda *args, **options: right(*args, **options) + 1)
    verdict = judged(twice, spec, X)
    assert not verdict
    assert "simulator did not" in verdict.notes[-1]


def test_the_first_draw_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []
    right = simulate_module.simulate

    def counting(fn: Any, *args: Any, **options: Any) -> Any:
        simulated.append(np.shape(args[0]))
        return right(fn, *args, **options)

    monkeypatch.setattr(simulate_module, "simulate", counting)
    variants = [case(normal((48, 128)))]
    assert judged(twice, spec, X, variants=variants)
    assert simulated == [(24, 128)]


def test_what_a_tpu_refuses_does_not_pass() -> None:
    def small_blocks(x: Any) -> Any:
        tile = pl.BlockSpec((4, 64), lambda i, j: (i, j))

        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, grid=(6, 2), in_specs=[tile], out_specs=tile, out_shape=x)(x)

    verdict = judged(small_blocks, spec, X)
    assert verdict.findings[0].kind == "lowering"
    assert "(4, 64)" in verdict.findings[0].cause


def test_garbage_that_happens_to_be_nan_is_no_excuse() -> None:
    def mean_of_chunks(x: Any, *, honest: bool) -> Any:
        size = x.shape[0]

        def kernel(x_ref: Any, o_ref: Any) -> None:
            position = pl.program_id(0) * 8 + jax.lax.broadcasted_iota(jnp.int32, (8, 128), 0)
            real = position < size if honest else ~jnp.isnan(x_ref[...])
            o_ref[...] = jnp.broadcast_to(jnp.where(real, x_ref[...], 0).sum(axis=0, keepdims=True), (8, 128))

        return pl.pallas_call(kernel, grid=(3,), in_specs=[TILE], out_specs=TILE, out_shape=x)(x)

    def chunk_sums(x: Any) -> Any:
        chunks = [x[i : i + 8] for i in range(0, x.shape[0], 8)]
        return jnp.concatenate([jnp.broadcast_to(c.sum(axis=0, keepdims=True), c.shape) for c in chunks])

    ragged = normal((20, 128))
    assert judged(functools.partial(mean_of_chunks, honest=True), chunk_sums, ragged)
    verdict = judged(functools.partial(mean_of_chunks, honest=False), chunk_sums, ragged)
    assert verdict.findings[0].kind == "garbage"
    assert "position" in verdict.findings[0].cause


def halves(x: Any, *, keep: bool) -> Any:
    """Two steps share each block of 16 rows: the first stores the upper half, the second one the lower."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, (16, 128), 0)
        own = row // 8 == pl.program_id(1)
        rest = jnp.where(pl.program_id(1) == 0, 0, o_ref[...]) if keep else 0
        o_ref[...] = jnp.where(own, 2 * x_ref[...], rest)

    tile = pl.BlockSpec((16, 128), lambda i, h: (i, 0))
    return pl.pallas_call(kernel, grid=(3, 2), in_specs=[tile], out_specs=tile, out_shape=x)(x)


def test_the_keywords_that_a_spec_has_are_given_to_it() -> None:
    def times(x: Any, *, factor: int = 2, bm: int = 8) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = factor * x_ref[...]

        return by_rows(kernel, x)

    def factor_spec(x: Any, *, factor: int = 2) -> Any:
        return factor * x

    variants = [case(X, factor=3), case(X, factor=5, bm=16)]
    assert judged(times, factor_spec, X, variants=variants)
    verdict = judged(lambda x, factor=2, bm=8: times(x), factor_spec, X, variants=variants)
    assert "factor=3" in verdict.notes[-1]


def test_a_wrong_result_has_the_name_of_the_specs_field() -> None:
    class Both(NamedTuple):
        y: Any
        dy: Any

    verdict = judged(lambda x: (twice(x), twice(x) + 1), lambda x: Both(2 * x, 2 * x), X, allow=["add"])
    assert verdict.findings[0].cause.startswith("result.dy is wrong in 3072 of 3072 elements")


# --- in a notebook of the course --------------------------------------------------------------------------------------


def test_a_spec_that_was_changed_is_mentioned(tmp_path: Path) -> None:
    puzzle = curriculum.puzzle("basics/1")
    notebook = puzzle.path.read_text("utf-8")
    assert notebook.count("    return x + 10\n") == 1
    overlay = "def add_ten_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 1\n"
    changed = tmp_path / "basics.py"
    changed.write_text(notebook.replace("    return x + 10\n", "    return x + 1\n"), "utf-8")
    assert not session.run(puzzle.id, overlay=overlay)
    verdict = session.run(puzzle.id, source=changed, overlay=overlay)
    assert "add_ten_spec was given and has been changed. The check has used the course's own." in str(verdict)
    assert verdict.status == "failed", "it is right for the spec that was changed, and wrong for the course's"


def test_the_commonest_first_mistake_is_said_as_it_is() -> None:
    """One block is there: nothing is said of others."""
    verdict = session.run("basics/1", overlay="def add_ten_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 1\n")
    assert verdict.findings[0].cause.startswith("In `add_ten_kernel`, `x_ref[...] + 1` should be `x_ref[...] + 10`")
    assert "off by the constant -9" in str(verdict)
    assert "other block" not in str(verdict)


def test_a_finding_names_a_line_of_the_readers(tmp_path: Path) -> None:
    answer = tmp_path / "answer.py"
    answer.write_text("def reverse_map(i, num_pages):\n    return (num_pages - i,)\n", "utf-8")
    finding = session.run("basics/3", overlay=answer).findings[0]
    assert finding.kind == "correction"
    assert finding.line is not None
    assert finding.line.file == str(answer)


def test_given_functions_are_the_same_in_a_notebook_that_is_run_as_one_file() -> None:
    known = curriculum.puzzle("basics/2")
    whole = compile(known.path.read_text("utf-8"), "whole.py", "exec", dont_inherit=True)
    (code,) = [c for c in whole.co_consts if getattr(c, "co_name", "") == "vector_add"]
    given = types.FunctionType(code, {})
    assert holes_module._changed(known, ["vector_add"], {"vector_add": given}) == []
    changed: dict[str, Any] = {}
    exec("def vector_add(x, y, *, b=256):\n    return x", changed)
    assert holes_module._changed(known, ["vector_add"], changed) == ["vector_add"]


ADD_TEN = "def add_ten_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 10\n"


@pytest.fixture
def basics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What basics.py defines, in a kernel of its own, with Puzzle 1 solved; progress is a fresh folder's."""
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path))
    names: dict[str, Any] = {}
    for _, code in curriculum.notebook(curriculum.puzzle("basics/1").path).definitions:
        exec(code, names)
    exec(ADD_TEN, names)
    return names


def attempts() -> tuple[int, int]:
    """How often Puzzles 1 and 2 have been tried, as it is recorded."""
    one, two = (load().entry(f"basics/{number}") for number in (1, 2))
    return one["attempts"], two["attempts"]


def in_notebook(names: dict[str, Any], call: str) -> Verdict:
    """The verdict of a check call, as a cell of that notebook."""
    return eval(call, names)


def test_a_check_needs_no_more_than_a_puzzle_and_a_function(basics: dict[str, Any]) -> None:
    verdict = in_notebook(basics, 'check("basics/1", add_ten)')
    assert verdict.status == "passed"
    assert not verdict.notes
    assert load().solved("basics/1")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('check("basics/1", add_ten, add_ten_spec, normal((640,)))', "This call says itself what to check"),
        ('check("basics/1", add_ten, lambda x: x + 10, normal((128,)))', "This call says itself what to check"),
        ('check("basics/1", lambda x: add_ten(x))', "The course checks add_ten here; you have checked <lambda>."),
        ('check("basics/1", jax.jit(add_ten))', "The course checks add_ten here; you have checked add_ten."),
    ],
)
def test_an_experiment_is_judged_and_not_recorded(basics: dict[str, Any], call: str, says: str) -> None:
    verdict = in_notebook(basics, call)
    assert verdict.headline.startswith("basics/1 ")
    assert says in verdict.notes[0]
    assert "not recorded" in verdict.notes[0]
    assert len(verdict.notes) == 1
    assert not verdict
    assert verdict.status == "unrecorded"
    assert says.replace("<", "&lt;").replace(">", "&gt;") in verdict._repr_html_()
    assert attempts() == (0, 0)


def test_the_call_that_the_course_asks_for_is_named(basics: dict[str, Any]) -> None:
    note = in_notebook(basics, 'check("basics/1", add_ten, add_ten_spec, normal((640,)))').notes[0]
    assert note.endswith('The course\'s check is check("basics/1", add_ten).')


def test_a_spec_that_was_changed_does_not_count(basics: dict[str, Any]) -> None:
    exec("def add_ten_spec(x):\n    return x + 1", basics)
    exec(ADD_TEN.replace("10", "1"), basics)
    verdict = in_notebook(basics, 'check("basics/1", add_ten)')
    assert verdict.status == "failed"
    assert "add_ten_spec was given and has been changed. The check has used the course's own." in verdict.notes
    exec(ADD_TEN, basics)
    assert in_notebook(basics, 'check("basics/1", add_ten)')


@pytest.mark.parametrize(
    "changed",
    [
        "def add_ten(x):\n    return x + 10",
        "def vector_add(x, y, *, b=512):\n    return pl.pallas_call(vector_add_kernel, out_shape=x)(x, y)",
    ],
)
def test_a_given_function_that_was_changed_is_not_recorded(basics: dict[str, Any], changed: str) -> None:
    exec(changed, basics)
    exec("def vector_add_kernel(x_ref, y_ref, o_ref):\n    o_ref[...] = x_ref[...] + y_ref[...]", basics)
    exec("def vector_add_grid(n, b):\n    return (n // b,)", basics)
    name, number = ("add_ten", 1) if "add_ten" in changed else ("vector_add", 2)
    verdict = in_notebook(basics, f'check("basics/{number}", {name})')
    assert not verdict
    assert f"{name} was given and has been changed. This is about your version" in verdict.notes[0]
    assert attempts() == (0, 0)


def test_other_defaults_of_a_given_function_are_a_change(basics: dict[str, Any]) -> None:
    basics["row_sum"].__kwdefaults__["bm"] = 4  # in basics.py: 8
    exec((curriculum.course_folder() / "solutions" / "basics.py").read_text("utf-8"), basics)
    verdict = in_notebook(basics, 'check("basics/9", row_sum)')
    assert not verdict
    assert "row_sum was given and has been changed" in verdict.notes[0]
    assert not load().solved("basics/9")


def test_options_without_a_spec_are_refused(basics: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r'options need a spec and inputs, too: check\("basics/1", fn, spec, \*inputs'):
        in_notebook(basics, 'check("basics/1", add_ten, kernel=False)')


def test_a_puzzle_that_is_nowhere(basics: dict[str, Any]) -> None:
    with pytest.raises(curriculum.CurriculumError, match="there is no puzzle 'basics/99'"):
        in_notebook(basics, 'check("basics/99", add_ten)')


def test_a_variant_says_what_it_is_about() -> None:
    def by_eights(x: Any) -> Any:
        return twice(x) if x.shape[0] < 40 else x

    verdict = judged(by_eights, spec, X, variants=[case(normal((40, 128)), about="five blocks")], allow=["int32"])
    assert "This is variant 1 (five blocks): float32[40, 128] (seed=0)." in verdict.notes[-1]
    verdict = judged(by_eights, spec, X, variants=[case(normal((40, 128)))])
    assert "This is variant 1: float32[40, 128] (seed=0)." in verdict.notes[-1]


def test_a_function_among_the_keywords_is_told_by_its_name() -> None:
    def window(rows: int, *, size: int) -> int:
        return rows + size

    mask = functools.partial(window, size=200)
    told = judge_module._which(Draw(Case((), {"mask": mask, "bq": 32}), (1, 0)))
    assert "mask=window(size=200, ...), bq=32 (seed=0)" in told


def test_what_is_still_to_be_written_is_found_behind_a_custom_vjp() -> None:
    names: dict[str, Any] = {"jax": jax}
    for source in curriculum.puzzle("softmax/8").skeletons.values():
        exec(source, names)
    exec(
        "@jax.custom_vjp\ndef f(x):\n    return x\n\n\ndef fwd(x):\n    return f(x), None\n\n\n"
        "def bwd(_, g):\n    return (layer_norm_grad_kernel(g),)\n\n\nf.defvjp(fwd, bwd)\n\n\n"
        "def gradient(x):\n    return jax.vjp(lambda x: f(x), x)[1](x)\n",
        names,
    )
    assert holes_module.unwritten(names["gradient"]) == ["layer_norm_grad_kernel"]
    assert holes_module.unwritten(names["fwd"]) == ["layer_norm_grad_kernel"], "it calls f, which has a way back"
    assert holes_module.unwritten(names["bwd"]) == ["layer_norm_grad_kernel"]


def test_zero_everywhere_is_met_by_what_is_left_when_numbers_cancel():
    tolerance, zeros = Tolerance(3e-5), np.zeros(8)
    assert tolerance.close(np.full(8, 1.1e-21), zeros).all()
    assert not tolerance.close(np.full(8, 1e-6), zeros).any()
    assert not tolerance.close(np.full(8, np.nan), zeros).any()
    tiny = np.full(8, 1e-20)
    assert not tolerance.close(2 * tiny, tiny).any(), "what is tiny is measured against its own size"
    assert tolerance.close((1 + 1e-5) * tiny, tiny).all()


def test_a_cause_that_the_lens_has_seen_comes_before_a_known_mistake() -> None:
    def half(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[:4] = 2 * x_ref[:4]

        return by_rows(kernel, x)

    verdict = judged(half, spec, X, explain=lambda *args, **known: ("Rows 4 to 7 are missing.", ""))
    (finding,) = verdict.findings
    assert "Rows 4 to 7" not in finding.cause
    assert "Rows 4 to 7 are missing." in finding.evidence


WIDE = pl.BlockSpec((16, 128), lambda i: (i, 0))


def test_a_hole_may_be_filled_by_a_lambda() -> None:
    assert session.run("basics/3", overlay="reverse_map = lambda i, num_pages: (num_pages - 1 - i,)\n")
    wrong = session.run("basics/3", overlay="reverse_map = lambda i, num_pages: (num_pages - i,)\n")
    assert wrong.findings[0].line is not None
    assert (wrong.findings[0].kind, wrong.findings[0].line.line) == ("map-bounds", 1)


def test_of_garbage_beyond_the_edges_that_is_told_which_does_harm():
    def kernel(x_ref, y_ref, o_ref):
        i = pl.program_id(0)
        inside = i * 8 + jax.lax.broadcasted_iota(jnp.int32, (8, 128), 0) < 20
        products = jnp.dot(x_ref[...], jnp.ones((128, 128)), preferred_element_type=jnp.float32)
        both = jnp.where(inside, products, 0) + y_ref[...]
        o_ref[...] = jnp.where(i == 0, 0, o_ref[...]) + both.sum(axis=0, keepdims=True)

    def sums(x, y):
        block, out = pl.BlockSpec((8, 128), lambda i: (i, 0)), pl.BlockSpec((1, 128), lambda i: (0, 0))
        shape = jax.ShapeDtypeStruct((1, 128), jnp.float32)
        return pl.pallas_call(kernel, grid=(3,), in_specs=[block, block], out_specs=out, out_shape=shape)(x, y)

    x, y = np.ones((2, 20, 128), np.float32)
    verdict = check_call(sums, (x, y), np.full((1, 128), 20 * 129, np.float32))
    padding = [finding.operand for finding in verdict.findings if finding.kind == "padding"]
    assert padding == ["y_ref"], str(verdict)


def test_an_argument_that_is_never_used_is_named():
    answer = """
import numpy as np


def step_cost(H, T, D, slow, quick, chip):
    seconds = [t - flash_floor(H, T, D, bq, bkv, V6E) for bq, bkv, t in (slow, quick)]
    steps = [[flash_steps(H, T, bq, bkv), 1] for bq, bkv, _ in (slow, quick)]
    return float(np.linalg.solve(np.array(steps, float), np.array(seconds))[0])
"""
    (finding,) = session.run("ladder/4", overlay=answer).findings
    assert finding.evidence[0] == "`step_cost` never uses its argument `chip`."


def test_a_mistake_in_a_function_beside_the_hole_is_told_there():
    answer = """
import jax.numpy as jnp
from jax.experimental import pallas as pl


def larger(m, block):
    most = block.max(axis=0, keepdims=True)
    return jnp.maximum(m[...], most)


def online_kernel(x_ref, o_ref, m_ref, l_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    after = larger(m_ref, x_ref[...])
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - after) + jnp.exp(x_ref[...] - after).sum(axis=1, keepdims=True)
    m_ref[...] = after

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = 1 / l_ref[...]
"""
    (finding,) = session.run("softmax/3", overlay=answer).findings
    assert finding.cause == (
        "In `larger`, `block.max(axis=0, keepdims=True)` should be `block.max(axis=1, keepdims=True)`: then "
        "everything is right."
    )
    assert (finding.function, finding.line.line) == ("larger", 7)


def test_what_the_solution_does_too_is_no_finding():
    """Scratch that outlives an output block is right in this puzzle; what is wrong is that the sum goes on growing."""
    answer = """
import jax.numpy as jnp
from jax.experimental import pallas as pl


def wide_softmax_kernel(x_ref, o_ref, m_ref, l_ref):
    sweep, j = pl.program_id(1), pl.program_id(2)
    begin = (sweep == 0) & (j == 0)
    m_old = jnp.where(begin, -jnp.inf, m_ref[...])
    m = jnp.maximum(m_old, x_ref[...].max(axis=1, keepdims=True))
    e = jnp.exp(x_ref[...] - m)
    l = jnp.where(begin, 0, l_ref[...]) * jnp.exp(m_old - m) + e.sum(axis=1, keepdims=True)
    m_ref[...] = m
    l_ref[...] = l

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = e / l


def wide_softmax_grid(M, N, bm, bn):
    return (M // bm, 2, N // bn)


def wide_softmax_out_map(i, sweep, j):
    return (i, sweep * j)
"""
    verdict = session.run("softmax/4", overlay=answer)
    assert verdict.findings
    assert "belonged to another output block" not in str(verdict).replace("\n  ", " ")


MAPS = """
def scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):
    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]


def block({arguments}):
    return {block}


def scale_map(i, j):
    return block({first})


def shift_map(i, j):
    return block({second})
"""


@pytest.mark.parametrize(
    "maps",
    [
        "scale_map = only(0)\nshift_map = only(1)\n",
        "scale_map, shift_map = only(0), only(1)\n",
        "scale_map = functools.partial(lambda n, i, j: (i, n), 0)\nshift_map = only(1)\n",
    ],
)
def test_a_hole_may_be_filled_with_a_function_that_another_one_makes(maps):
    overlay = (
        "import functools\n\n\ndef scale_shift_kernel(x_ref, scale_ref, shift_ref, o_ref):\n"
        "    o_ref[...] = x_ref[...] * scale_ref[...] + shift_ref[...]\n\n\n"
        "def only(axis):\n    return (lambda i, j: (i, 0)) if axis == 0 else (lambda i, j: (0, j))\n\n\n"
    )
    assert session.run("basics/5", overlay=overlay + maps)
    verdict = session.run("basics/5", overlay=overlay.replace("scale_ref[...]", "scale_ref[0]") + maps)
    assert "scale_ref[0]" in verdict.findings[0].cause


@pytest.mark.parametrize(
    ("maps", "told"),
    [
        (
            {"arguments": "n", "block": "(n, 0)", "first": "i", "second": "j"},
            {"shift_map": "`return block(j)` should be `return (0, j)`: then everything is right."},
        ),
        (
            {"arguments": "", "block": "(0, 0)", "first": "", "second": ""},
            {
                "scale_map": "`return block()` should be `return (i, 0)`; the change below is needed, too.",
                "shift_map": "`return block()` should be `return (0, j)`: then everything is right.",
            },
        ),
    ],
)
def test_a_helper_is_not_told_to_change_for_one_of_those_that_call_it(maps, told):
    verdict = session.run("basics/5", overlay=MAPS.format(**maps))
    causes = {finding.function: finding.cause for finding in verdict.findings}
    assert causes == {function: f"In `{function}`, {words}" for function, words in told.items()}


SPECS = """
from jax.experimental import pallas as pl


def batched_specs(bm, bk, N):
    x_spec = pl.BlockSpec(block_shape=(None, bm, bk), index_map=lambda b, i, k: (b, i, k))
    y_spec = pl.BlockSpec(block_shape=(None, bk, N), index_map=lambda b, i, k: (0, k, 0))
    out = pl.BlockSpec(block_shape=(None, bm, N), index_map=lambda b, i, k: (b, i, k))
    return [x_spec, y_spec], out
"""


def test_of_several_changes_each_is_needed():
    """All three specs are written in another way than the course's; two of them are wrong."""
    verdict = session.run("basics/11", overlay=SPECS)
    told = [each.line.text for each in verdict.findings if "should be" in " ".join([each.cause, *each.evidence])]
    assert [text.partition(" ")[0] for text in told] == ["out", "y_spec"]


def test_an_error_in_a_helper_says_which_of_its_calls_it_was():
    def plus(x, n):
        return x + jnp.zeros(n)

    def kernel(x_ref, o_ref):
        x = plus(x_ref[...], 1)
        o_ref[...] = plus(x, 7)

    def call(x):
        return pl.pallas_call(kernel, out_shape=x)(x)

    (finding,) = check_call(call, [np.ones((8, 128), np.float32)], np.ones((8, 128), np.float32)).findings
    assert finding.line.text == "return x + jnp.zeros(n)"
    assert finding.evidence[-1].endswith(": o_ref[...] = plus(x, 7)")
    assert finding.evidence[-1].startswith("called at test_check.py:")


def test_one_cause_in_two_results_is_told_once():
    def kernel(x_ref, a_ref, b_ref):
        @pl.when(pl.program_id(0) == 5)
        def _():
            a_ref[...] = b_ref[...] = x_ref[...]

    def both(x):
        return pl.pallas_call(kernel, grid=(2,), out_shape=[x, x])(x)

    (finding,) = check_call(both, [np.ones((8, 128), np.float32)], [np.ones((8, 128), np.float32)] * 2).findings
    assert (finding.kind, finding.operand) == ("never-stored", "a_ref")
    assert "the same happens with b_ref" in finding.evidence


def test_an_earlier_hole_that_is_not_written_is_what_is_said(tmp_path):
    first, puzzle = (curriculum.puzzle(f"flash_attention/{n}") for n in (1, 4))
    mine = tmp_path / "flash_attention.py"

    def checked(*solved):
        text = puzzle.path.read_text("utf-8")
        for each in solved:
            answers = functions(each.solution)
            for hole, skeleton in each.skeletons.items():
                assert skeleton.strip() in text
                text = text.replace(skeleton.strip(), answers[hole].strip())
        mine.write_text(text, "utf-8")
        return session.run(puzzle.id, source=mine)

    verdict = checked(puzzle)
    assert verdict.status == "unsolved"
    assert "This uses block_scores of flash_attention/1, where it still says YOUR CODE HERE" in str(verdict)
    assert "NoneType" not in str(verdict)
    assert checked(puzzle, first).status == "passed"
    assert "Write one_block_kernel" in str(checked(first))
