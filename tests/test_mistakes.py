"""Every mistake is explained: the likely cause first, with the step, the block, the name, what to try, and the line."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mistakes
import zoo
from mistakes import MISTAKES
from pallas_puzzles.course.check import check_call
from production_kernels import PRODUCTION
from zoo import ZOO, Exhibit


@dataclasses.dataclass(frozen=True)
class First:
    """What the first finding must be. `says`: words of its cause. `evidence`: words of what comes after it."""

    kind: str
    says: tuple[str, ...]
    operand: str | None = None
    step: int | None = None
    at: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    evidence: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


FINE = {"ragged_last_block_is_fine"}

EXPECTED: dict[str, First] = {
    # sums that start by a choice of values, and scalar prefetch
    "read_in_vain_and_wrong_for_another_reason": First(
        "values", ("block (0, 0) of o_ref is 2 times what is expected",), "o_ref"
    ),
    "added_in_vain_and_wrong_for_another_reason": First(
        "values", ("block (0, 0) of o_ref is 2 times what is expected",), "o_ref"
    ),
    "zeroed_by_value_for_the_first_tile_only": First(
        "carry", ("acc_ref as step 2 left it", "not only once"), "acc_ref", 3
    ),
    "scratch_replaced_and_stored_at_once": First(
        "overwritten", ("step 1 stores into all of it", "what step 0 stored"), "o_ref"
    ),
    "reduction_axis_first": First("revisit", ("visited again", "left at step 0", "the last one of the grid"), "o_ref"),
    "grid_cut_short_under_a_sum": First("unvisited", ("pl.cdiv(64, 16) = 4 blocks", "3 of them are visited"), "o_ref"),
    "the_last_block_added_again": First(
        "values", ("block (0, 0) of o_ref holds wrong values", "Steps 0-2 make it"), "o_ref"
    ),
    "product_of_int8_in_int8": First("values", ("block (0, 0) of o_ref holds wrong values",), "o_ref"),
    "one_factor_in_16_bits": First("values", ("times what is expected", "a_ref (0, 0)"), "o_ref"),
    # maxima, exponentials, rows
    "running_maximum_from_zero": First("values", ("Steps 0-2 make it from x_ref (0, 0), (0, 1) and (0, 2)",), "o_ref"),
    "sum_not_rescaled": First("values", ("in rows ", "Steps 0-2 make it"), "o_ref", never=("overwritten",)),
    "old_maximum_read_when_it_is_gone": First("values", ("in rows ", "Steps 0-2 make it"), "o_ref"),
    "maximum_of_the_last_block": First("values", ("in rows ",), "o_ref"),
    "upside_down": First("values", ("holds wrong values",), "o_ref", never=("m_ref",)),
    "starting_value_set_again": First(
        "overwritten", ("acc_ref is overwritten", "step 2", "what step 1 stored", "pl.program_id(1) == 0"), "acc_ref", 2
    ),
    "maximum_of_all_rows_at_once": First("born", ("step 0", "0 / 0 is NaN")),
    "mask_fills_with_zero": First("values", ("block (0, 0) of o_ref is 0",)),
    "never_divided_by_the_sum": First("values", ("holds wrong values", "as 3 other blocks"), "o_ref", block=(0, 0)),
    "maximum_subtracted_instead_of_mean": First("values", ("holds wrong values",), "o_ref"),
    "row_term_with_the_wrong_sign": First("values", ("holds wrong values",), "o_ref", never=("constant",)),
    "softmax_down_the_columns": First("values", ("holds wrong values",), "o_ref"),
    "mean_down_the_columns": First("values", ("holds wrong values",), "o_ref"),
    "divided_by_one_less": First("values", ("1.0013 times what is expected",), "o_ref"),
    "variance_by_cancellation": First("values", ("holds wrong values",), "o_ref"),
    "constant_outside_of_the_root": First("values", ("holds wrong values",), "o_ref"),
    "columns_counted_from_the_start_of_the_block": First(
        "values", ("holds wrong values", "Steps 0-2"), "o_ref", never=("added 3 times",)
    ),
    "output_leaves_before_anything_is_stored": First("revisit", ("block (0, 0) of o_ref", "left at step 0"), "o_ref"),
    "half_a_gradient": First("partly-stored", ("only part of o_ref", "rows 4-7"), "o_ref"),
    "reduction_that_loses_its_dimension": First("broadcast", ("keepdims=True",)),
    "forward_without_residuals": First("vjp-forward", ("two things", "residuals")),
    "backward_without_a_tuple": First("vjp-backward", ("tuple", "return (dx,)")),
    # refused while the kernel is traced
    "when_on_an_array": First("when-array", ("one yes or no", "jnp.where")),
    "index_map_that_captures_an_array": First("map-constants", ("PrefetchScalarGridSpec", "behind the grid indices")),
    "gradient_without_custom_vjp": First("no-gradient", ("jax.custom_vjp", "backward function")),
    "one_block_spec_too_many": First("specs-count", ("one entry in in_specs",)),
    "factors_that_do_not_fit": First("product-shape", ("differ in length",)),
    # not stored, or not everywhere
    "nothing_stored": First(
        "never-stored",
        ("no step stores anything into o_ref", "o_ref[...] ="),
        "o_ref",
        evidence=("12 of 12 blocks wrong",),
    ),
    "upper_half_stored": First(
        "partly-stored", ("only part of o_ref", "rows 4-7", "o_ref[...] ="), "o_ref", 0, (0, 0), (0, 0)
    ),
    "even_rows_of_blocks_stored": First(
        "never-stored",
        ("(1, 0)", "step 3", "nothing", "condition"),
        "o_ref",
        3,
        (1, 0),
        (1, 0),
        evidence=("6 of 12 blocks wrong",),
    ),
    "ref_rebound_instead_of_stored": First("never-stored", ("no step stores anything", "o_ref[...] ="), "o_ref"),
    "grid_by_floor_division": First(
        "unvisited",
        ("block (2, 0) of o_ref is never visited", "2 step", "3 blocks", "pl.cdiv(20, 8)"),
        "o_ref",
        block=(2, 0),
        evidence=("1 of 3 blocks wrong",),
    ),
    # accumulators
    "accumulator_never_zeroed": First(
        "unwritten",
        ("step 0", "acc_ref", "nobody has written", "0 for a sum", "pl.program_id(2) == 0"),
        "acc_ref",
        0,
        (0, 0, 0),
    ),
    "accumulator_zeroed_once_for_all": First(
        "carry", ("step 3", "(0, 1, 0)", "acc_ref", "step 2", "pl.program_id(2) == 0"), "acc_ref", 3, (0, 1, 0)
    ),
    "output_never_zeroed": First(
        "unwritten", ("step 0", "o_ref", "nobody has written", "pl.program_id(1) == 0"), "o_ref", 0, (0, 0)
    ),
    "overwritten_instead_of_accumulated": First(
        "overwritten",
        ("o_ref", "step 1", "what step 0 stored", "+=", "pl.program_id(1) == 0"),
        "o_ref",
        1,
        (0, 1),
        (0, 0),
    ),
    "padding_summed": First(
        "padding", ("step 3", "28 of the 32 elements", "x_ref", "edge", "(100,)", "jnp.where"), "x_ref", 3, (3,)
    ),
    "scratch_read_before_written": First(
        "unwritten", ("step 0", "1024 elements of offset_ref", "nobody has written", "scratch"), "offset_ref", 0, (0, 0)
    ),
    "integer_scratch_read_before_written": First(
        "unwritten", ("step 0", "1024 elements of offset_ref", "nobody has written", "scratch"), "offset_ref", 0, (0, 0)
    ),
    # index maps
    "input_block_past_the_end": First(
        "map-bounds",
        ("step 9", "index map of x_ref", "block (4, 0)", "out of bounds", "0 to 3"),
        "x_ref",
        9,
        (3, 0),
        (4, 0),
        never=("offset",),
    ),
    "input_block_before_the_start": First(
        "map-bounds",
        ("step 0", "index map of x_ref", "block (-1, 0)", "out of bounds", "0 to 3"),
        "x_ref",
        0,
        (0, 0),
        (-1, 0),
        never=("offset",),
    ),
    "output_block_past_the_end": First(
        "map-bounds", ("step 9", "index map of o_ref", "block (4, 0)", "out of bounds"), "o_ref", 9, (3, 0), (4, 0)
    ),
    "offsets_instead_of_block_indices": First(
        "map-bounds",
        ("step 1", "block (0, 128)", "block indices, not element offsets", "128"),
        "x_ref",
        1,
        (0, 1),
        (0, 128),
    ),
    "rows_and_columns_swapped": First(
        "moved",
        ("block (0, 1) of o_ref holds what belongs in block (1, 0)",),
        "o_ref",
        block=(0, 1),
        evidence=("6 of 9 blocks wrong",),
    ),
    "every_column_lands_in_the_first": First(
        "unvisited", ("(0, 1)", "never visited", "1 of them is visited"), "o_ref", block=(0, 1)
    ),
    "wrong_program_id": First(
        "values",
        ("block (0, 1) of o_ref", "off by the constant +1"),
        "o_ref",
        block=(0, 1),
        evidence=("9 of 12 blocks wrong",),
    ),
    "slice_past_the_ref": First(
        "ref-bounds", ("step 3", "x_ref", "8 to 15", "out of bounds", "8 elements", "one block"), "x_ref", 3, (1, 0)
    ),
    "negative_index_into_a_ref": First(
        "ref-bounds",
        ("step 0", "writes o_ref at index -1", "out of bounds", "8 elements"),
        "o_ref",
        0,
        (0, 0),
        never=("offset",),
    ),
    # the order of steps
    "reduction_axis_marked_parallel": First(
        "race",
        ("grid axis 1", "parallel", "3 of its steps", "block (0, 0) of o_ref", "'arbitrary'"),
        "o_ref",
        block=(0, 0),
    ),
    "parallel_and_never_zeroed": First(
        "race",
        ("grid axis 1", "parallel", "4 of its steps", "block (0, 0) of o_ref", "'arbitrary'"),
        "o_ref",
        block=(0, 0),
    ),
    "reduction_axis_outermost": First(
        "revisit", ("step 4", "block (0, 0) of o_ref", "again", "step 0", "last"), "o_ref", 4, (1, 0), (0, 0)
    ),
    # what JAX refuses while it traces
    "float_into_an_integer_ref": First("store-dtype", ("dtype", ".astype(o_ref.dtype)"), evidence=("int32", "float32")),
    "float32_into_a_bfloat16_ref": First(
        "store-dtype", ("dtype", ".astype(o_ref.dtype)"), evidence=("bfloat16", "float32")
    ),
    "row_stored_into_a_block": First("store-shape", ("shape", "keepdims"), evidence=("(8, 128)", "(128,)")),
    "transposed_value_into_a_block": First("store-shape", ("shape",), evidence=("(8, 128)", "(128, 8)")),
    "exception_of_their_own": First("error", ("RuntimeError", "to be written tomorrow")),
    "misspelt_name": First("name", ("name", "misspelling"), evidence=("xref",)),
    "arithmetic_on_a_ref": First("ref-arithmetic", ("Ref", "read it first", "x_ref[...]")),
    "python_if_on_a_program_id": First("python-if", ("@pl.when", "jnp.where", "program id")),
    "value_returned": First("returns", ("returns nothing", "o_ref[...] = value")),
    "kernel_with_too_few_refs": First("kernel-arity", ("one Ref per operand", "inputs, outputs, scratch")),
    "index_map_with_too_few_arguments": First("map-arity", ("one argument per axis of the grid",)),
    "index_map_with_too_few_results": First("map-length", ("one block index per dimension",)),
    "index_map_with_true_division": First("map-float", ("integer", "//")),
    "array_captured_by_the_kernel": First("constants", ("pass it as an input", "iota"), evidence=("f32[128]",)),
    "update_of_a_value_in_the_kernel": First("constants", ("x.at[:].set", "store into a Ref"), evidence=("i32[0]",)),
    # copies and semaphores
    "copy_never_waited_for": First("unwaited", ("buffer", "never waited for", ".wait()"), "buffer", 0),
    "wait_for_a_copy_never_started": First("hang", ("sem", "never returns", ".start()"), "sem", 0),
    "copy_past_the_end": First(
        "ref-bounds",
        ("step 1", "x_hbm", "28 to 35", "out of bounds", "32 elements"),
        "x_hbm",
        1,
        (1,),
        never=("blocked",),
    ),
    "constant_slice_past_the_end": First("ref-bounds", ("past its end",), evidence=("start=28", "size=8", "dim=32")),
    "read_straight_from_hbm": First("hbm-load", ("reads x_hbm directly", "HBM", "pl.ANY", "sync_copy"), "x_hbm", 0),
    "wait_for_a_signal_that_never_comes": First(
        "hang", ("step 0", "semaphore ready", "never returns", "pl.semaphore_signal"), "ready", 0, (0, 0)
    ),
    # right everywhere but on the real chip
    "block_too_small_for_the_chip": First("lowering", ("(4, 32)", "8", "128")),
}

assert set(EXPECTED) | FINE == set(MISTAKES), set(EXPECTED) ^ set(MISTAKES)


def in_the_dtypes_of(fn: Any, args: Any, expected: Any) -> Any:
    """What NumPy computed in float64, in the dtypes that `fn` promises."""
    from pallas_puzzles.ir.capture import tracing

    with tracing():
        promised = jax.eval_shape(fn, *args)
    return jax.tree.map(lambda w, p: np.asarray(w).astype(p.dtype), expected, promised)


@functools.cache
def judged(name: str) -> Any:
    """The verdict; the dtype of the answer is that of the first argument."""
    mistake = MISTAKES[name]
    want = jax.tree.map(lambda w: jnp.asarray(w).astype(mistake.args[0].dtype), mistake.expected)
    return check_call(mistake.fn, mistake.args, want)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_finding_names_the_cause(name: str) -> None:
    expected, verdict = EXPECTED[name], judged(name)
    assert not verdict, "a wrong kernel passed"
    first = verdict.findings[0]
    assert first.kind == expected.kind, first
    for words in expected.says:
        assert words in first.cause, f"{words!r} is not said: {first.cause}"
    for words in expected.never:
        assert words not in first.cause, f"{words!r} is out of place: {first.cause}"
    after = "\n".join([*first.evidence, *verdict.notes])
    for words in expected.evidence:
        assert words in after, f"{words!r} is not in the evidence: {after}"
    for field in ("operand", "step", "at", "block"):
        wanted = getattr(expected, field)
        if wanted is not None:
            assert getattr(first, field) == wanted, f"{field}: {first}"


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if MISTAKES[n].line and e.kind != "values"])
def test_the_first_finding_points_to_the_line(name: str) -> None:
    line = judged(name).findings[0].line
    assert line is not None
    assert line.file == mistakes.__file__
    assert line.line == MISTAKES[name].line, line
    assert mistakes.MARK not in line.text or line.text.endswith(mistakes.MARK)
    assert str(line) == f"mistakes.py:{line.line}"


@pytest.mark.parametrize("name", sorted(FINE))
def test_what_only_looks_wrong_passes(name: str) -> None:
    verdict = judged(name)
    assert verdict.findings == []
    assert verdict


@pytest.mark.parametrize("name", EXPECTED)
def test_causes_are_short_sentences_in_plain_english(name: str) -> None:
    for finding in judged(name).findings:
        assert len(finding.cause) < 420, finding.cause
        assert finding.kind == "error" or finding.cause.endswith("."), finding.cause
        for noise in ("Traceback", "NDIndexer", "MemRef", "jaxpr", "eqn", "!", "None of", "<lambda>", "  ", "np.int"):
            assert noise not in finding.cause, finding.cause
        assert len(finding.evidence) <= 6


def test_the_never_zeroed_accumulator_is_found_behind_the_race() -> None:
    kinds = [f.kind for f in judged("parallel_and_never_zeroed").findings]
    assert kinds[:2] == ["race", "unwritten"]


def test_a_cause_comes_before_its_effects() -> None:
    kinds = [f.kind for f in judged("accumulator_never_zeroed").findings]
    assert "nan" not in kinds[:1]
    assert kinds.index("unwritten") < kinds.index("carry") if "carry" in kinds else True


# --- correct kernels -------------------------------------------------------------------------------------------------

EVERYTHING = {**ZOO, **PRODUCTION}
COARSE = {"paged_attention_uneven_lengths": 1e-2}


def is_scratch_of_splash_attention(finding: Any) -> bool:
    """Up to jax 0.11 splash attention keeps its scratch in outputs that nobody reads, shared by parallel heads."""
    return finding.kind == "race" and finding.operand.endswith("_scratch_ref")


@pytest.mark.parametrize("exhibit", EVERYTHING.values(), ids=EVERYTHING)
def test_correct_kernels_pass_without_findings(exhibit: Exhibit) -> None:
    want = in_the_dtypes_of(exhibit.fn, exhibit.args, exhibit.expected)
    verdict = check_call(exhibit.fn, exhibit.args, want, confirm=False, tol=COARSE.get(exhibit.name))
    assert [f for f in verdict.findings if not is_scratch_of_splash_attention(f)] == []
    assert verdict.notes == []
    assert bool(verdict) == (not verdict.findings)


@pytest.mark.parametrize(
    "name", ["grouped_matmul", "softmax_with_ragged_rows", "sum_with_double_buffering", "forward_and_backward"]
)
def test_correct_kernels_are_confirmed_by_the_front_end_and_the_simulator(name: str) -> None:
    exhibit = ZOO[name]
    want = in_the_dtypes_of(exhibit.fn, exhibit.args, exhibit.expected)
    assert check_call(exhibit.fn, exhibit.args, want).findings == []


@pytest.mark.parametrize("name", ["matmul_f32", "row_sum", "extremes_of_each_row", "forward_and_backward"])
def test_a_correct_kernel_fails_against_another_expectation(name: str) -> None:
    exhibit = ZOO[name]
    want = in_the_dtypes_of(exhibit.fn, exhibit.args, exhibit.expected)
    leaves, tree = jax.tree.flatten(want)
    leaves[-1] = leaves[-1].copy()
    leaves[-1].flat[-1] += 1
    verdict = check_call(exhibit.fn, exhibit.args, jax.tree.unflatten(tree, leaves), confirm=False)
    assert not verdict
    assert verdict.findings


def test_nan_never_passes() -> None:
    x = np.full((16, 128), np.nan, np.float32)
    verdict = check_call(zoo.double_and_add, (x, x), x, confirm=False)
    assert not verdict
