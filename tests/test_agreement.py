"""The lens gives the answers of JAX's own TPU simulator, and the figures of a calculation by hand."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import zoo
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens.machine import WRITTEN
from production_kernels import PRODUCTION
from zoo import I8, I32, ZOO, Exhibit

EVERYTHING = {**ZOO, **PRODUCTION}
assert len(ZOO) >= 50, "the zoo lost its animals"
assert len(PRODUCTION) >= 10, "JAX's kernels went missing"

# JAX's simulator reads a padded pl.Element window as if it had no padding (jax 0.11.2 and 0.12.0.1).
PADDED = "difference_with_padded_windows"
# Products of bf16 numbers inside JAX's paged attention.
COARSE = {"paged_attention_uneven_lengths": 1e-2}


@pytest.fixture(autouse=True)
def quiet_simulator() -> Iterator[None]:
    logger = logging.getLogger("jax._src.callback")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def simulated(fn: Any, *args: Any) -> Any:
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()), use_abstract_mesh(mesh):
            return jax.tree.map(np.asarray, fn(*args))
    except Exception:
        pltpu.reset_tpu_interpret_mode_state()
        raise


def tolerance(dtype: np.dtype) -> float:
    if dtype == jnp.bfloat16:
        return 2e-2
    return 3e-5 if np.issubdtype(dtype, np.floating) else 0.0


def assert_agrees(got: Any, want: Any, rtol: float | None = None) -> None:
    """Same tree, same shapes, values equal up to rounding; the tolerance is relative to the largest number wanted."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape
        allowed = tolerance(g.dtype) if rtol is None else rtol
        scale = max(1.0, float(np.abs(w.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=allowed, atol=allowed * scale)


def leaves_dtypes(tree: Any) -> list[np.dtype]:
    return [np.asarray(x).dtype for x in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize("exhibit", EVERYTHING.values(), ids=EVERYTHING)
def test_lens_agrees_with_the_simulator_and_with_numpy(exhibit: Exhibit, pytestconfig: pytest.Config) -> None:
    run = lens.trace(exhibit.fn, *exhibit.args)
    assert run.traces, "no pallas_call was found"
    assert len(run.traces) == len(run.calls)
    assert_agrees(run.outputs, exhibit.expected, COARSE.get(exhibit.name))
    if exhibit.name == PADDED or (exhibit.name in PRODUCTION and not pytestconfig.getoption("--thorough")):
        return
    by_jax = simulated(exhibit.fn, *exhibit.args)
    assert leaves_dtypes(run.outputs) == leaves_dtypes(by_jax)
    assert_agrees(run.outputs, by_jax)
    assert_agrees(by_jax, exhibit.expected, COARSE.get(exhibit.name))


def test_simulator_still_ignores_the_padding_of_windows() -> None:
    exhibit = ZOO[PADDED]
    with pytest.raises(AssertionError):
        assert_agrees(simulated(exhibit.fn, *exhibit.args), exhibit.expected)


@pytest.mark.parametrize("exhibit", ZOO.values(), ids=ZOO)
def test_everything_that_a_correct_kernel_returns_was_written(exhibit: Exhibit) -> None:
    for trace in lens.trace(exhibit.fn, *exhibit.args).traces:
        for o, state in zip(trace.call.outs, trace.state, strict=True):
            assert (state.seen() == WRITTEN).all(), f"{o.name}: {np.unique(state.seen())}"


@pytest.mark.parametrize("name", ["matmul_f32", "vmapped_gather", "inner_pipeline_with_scratch"])
def test_arguments_are_left_alone(name: str) -> None:
    exhibit = ZOO[name]
    before = [np.array(x) for x in exhibit.args]
    lens.trace(exhibit.fn, *exhibit.args)
    for x, y in zip(exhibit.args, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_aliased_argument_is_left_alone() -> None:
    exhibit = ZOO["add_into_one_block_in_place"]
    before = exhibit.args[0].copy()
    lens.trace(exhibit.fn, *exhibit.args)
    np.testing.assert_array_equal(exhibit.args[0], before)


# --- figures by hand -------------------------------------------------------------------------------------------------


def trace_of(name: str) -> Any:
    exhibit = ZOO[name]
    (trace,) = lens.trace(exhibit.fn, *exhibit.args).traces
    return trace


def by_operand(figures: Any) -> dict[str, Any]:
    return {f.operand.name: f for f in figures.operands}


def test_figures_of_a_matmul() -> None:
    # x (48, 96) in (16, 32) blocks, y (96, 256) in (32, 128) blocks: grid (3, 2, 3)
    trace = trace_of("matmul_f32")
    figures = lens.figures(trace)
    x, y, o = (by_operand(figures)[n] for n in ("x_ref", "y_ref", "o_ref"))
    assert trace.n == figures.steps == 18
    assert (x.moves, y.moves, o.moves) == (18, 18, 6)
    assert x.hbm_bytes == 2 * 48 * 96 * 4  # once per column of blocks
    assert y.hbm_bytes == 3 * 96 * 256 * 4  # once per row of blocks
    assert o.hbm_bytes == o.once_bytes == 48 * 256 * 4
    assert figures.hbm_bytes == x.hbm_bytes + y.hbm_bytes + o.hbm_bytes
    assert figures.once_bytes == (48 * 96 + 96 * 256 + 48 * 256) * 4
    assert x.vmem_bytes == 2 * 16 * 32 * 4
    assert figures.scratch_bytes == 16 * 128 * 4
    assert figures.vmem_bytes == 2 * 4 * (16 * 32 + 32 * 128 + 16 * 128) + 16 * 128 * 4
    products = 2 * 48 * 96 * 256
    accumulation = 48 * 256 * 3  # += on every k
    assert products <= figures.flops <= products + accumulation
    assert figures.intensity == pytest.approx(figures.flops / figures.hbm_bytes)


def test_figures_of_a_row_sum() -> None:
    # x (24, 512) in (8, 128) blocks: grid (3, 4); the result's block stays for the four steps of a row
    trace = trace_of("row_sum")
    figures = lens.figures(trace)
    x, o = by_operand(figures)["x_ref"], by_operand(figures)["o_ref"]
    assert (x.moves, x.hbm_bytes, x.once_bytes) == (12, 24 * 512 * 4, 24 * 512 * 4)
    assert (o.moves, o.hbm_bytes, o.once_bytes) == (3, 24 * 4, 24 * 4)
    k = [operand.name for operand in trace.call.operands].index("o_ref")
    assert trace.moved[k] == [False, False, False, True] * 3
    assert trace.moved[1 - k] == [True] * 12
    assert trace.visits[0] == {(0,): [[0, 1, 2, 3]], (1,): [[4, 5, 6, 7]], (2,): [[8, 9, 10, 11]]}
    assert trace.writer[0].seen().tolist() == [3] * 8 + [7] * 8 + [11] * 8


def test_figures_of_a_batched_product() -> None:
    # q (2, 3, 16, 32) and k (2, 3, 256, 32): blocks (8, 32) and (128, 32), grid (2, 3, 2, 2)
    trace = trace_of("scores_per_batch_and_head")
    figures = lens.figures(trace)
    q, k, o = (by_operand(figures)[n] for n in ("q_ref", "k_ref", "o_ref"))
    assert trace.n == 24
    assert q.operand.block == (1, 1, 8, 32)
    assert q.operand.ref_shape == (8, 32)
    assert (q.moves, q.hbm_bytes) == (12, q.once_bytes)  # a block of q stays while k goes by
    assert (k.moves, k.hbm_bytes) == (24, 2 * k.once_bytes)
    assert (o.moves, o.hbm_bytes) == (24, 2 * 3 * 16 * 256 * 4)
    assert figures.flops == 2 * 2 * 3 * 16 * 256 * 32
    assert figures.transcendentals == 0


def test_an_input_that_stays_is_fetched_once() -> None:
    # grid (j, i): the bias block changes with j only
    trace = trace_of("add_bias_and_relu")
    k = [operand.name for operand in trace.call.operands].index("bias_ref")
    assert trace.moved[k] == [True, False, False] * 2
    assert by_operand(lens.figures(trace))["bias_ref"].hbm_bytes == 256 * 4


def test_ragged_blocks_move_only_what_is_there() -> None:
    figures = by_operand(lens.figures(trace_of("softmax_with_ragged_rows")))
    assert figures["x_ref"].moves == 3
    assert figures["x_ref"].hbm_bytes == figures["o_ref"].hbm_bytes == 20 * 256 * 4


def test_gathered_blocks_are_fetched_only_when_they_change() -> None:
    # ids 3, 0, 0, 5, 1: the second visit of block 0 needs no copy
    trace = trace_of("gather_blocks")
    k = [operand.name for operand in trace.call.operands].index("table_ref")
    assert trace.blocks[k] == [(3, 0, 0), (0, 0, 0), (0, 0, 0), (5, 0, 0), (1, 0, 0)]
    assert trace.moved[k] == [True, True, False, True, True]


def test_chosen_buffering_is_counted() -> None:
    figures = by_operand(lens.figures(trace_of("matmul_with_chosen_buffering")))
    assert figures["x_ref"].vmem_bytes == 3 * 8 * 64 * 4
    assert figures["w_ref"].vmem_bytes == 64 * 128 * 4


def test_explicit_copies_are_counted() -> None:
    x = ZOO["sum_with_double_buffering"].args[0]
    figures = lens.figures(trace_of("sum_with_double_buffering"))
    assert figures.dma_bytes == x.nbytes
    assert figures.hbm_bytes == x.nbytes + 8 * 128 * 4  # and the result, written back once


def test_overlapping_windows_count_their_overlap() -> None:
    figures = by_operand(lens.figures(trace_of("moving_average_over_windows")))
    assert figures["x_ref"].hbm_bytes == 3 * 10 * 128 * 4


def test_exponentials_are_counted_apart() -> None:
    figures = lens.figures(trace_of("softmax_with_ragged_rows"))
    assert figures.transcendentals == 24 * 256  # three blocks of eight rows, padding included


def test_a_dynamic_grid_has_the_bound_that_was_given() -> None:
    assert trace_of("sum_of_the_first_blocks").call.grid == (3,)
    assert trace_of("no_step_at_all").n == 0


def test_names_in_a_trace_are_those_of_the_kernel() -> None:
    call = trace_of("online_softmax_attention").call
    assert [o.name for o in call.operands] == ["q_ref", "k_ref", "v_ref", "o_ref"]
    assert [s.name for s in call.scratch] == ["max_ref", "sum_ref", "acc_ref"]
    assert [o.role for o in call.operands] == ["in", "in", "in", "out"]
    assert call.where is not None
    assert call.where.file == zoo.__file__
    assert call.where.text.startswith("def kernel(q_ref")


def test_calls_come_in_the_order_in_which_they_ran() -> None:
    exhibit = ZOO["forward_and_backward"]
    run = lens.trace(exhibit.fn, *exhibit.args)
    assert [[o.name for o in t.call.ins] for t in run.traces] == [["x_ref"], ["x_ref", "g_ref"]]


def test_block_sizes_are_keyword_arguments() -> None:
    x, y = ZOO["matmul_f32"].args
    for blocks in ({"bm": 8, "bn": 256, "bk": 96}, {"bm": 48, "bn": 128, "bk": 16}):
        run = lens.trace(zoo.matmul, x, y, **blocks)
        assert run.traces[0].n == math.prod((48 // blocks["bm"], 256 // blocks["bn"], 96 // blocks["bk"]))
        assert_agrees(run.outputs, x.astype(np.float64) @ y.astype(np.float64))


# --- arithmetic, one operation at a time -----------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 88, -88, 300]
FLOAT_1 = {
    f.__name__: f
    for f in (
        jnp.abs, jnp.sign, jnp.floor, jnp.ceil, jnp.round, jnp.trunc, jnp.exp, jnp.log, jnp.log1p, jnp.log2, jnp.expm1,
        jnp.tanh, jax.nn.sigmoid, jnp.sqrt, lax.rsqrt, jnp.sin, lax.erf, jnp.cbrt, jnp.isfinite, jnp.isnan, jnp.square,
        jax.nn.relu, jax.nn.softplus, jnp.cumsum, lax.cummax, jnp.argmax, jnp.argmin, jnp.max, jnp.min, jnp.sum,
        jnp.flip, jnp.sort,
    )
} | {
    "cube": lambda x: x**3,
    "minus_second_power": lambda x: lax.integer_pow(x, -2),
    "to_int32": lambda x: x.astype(I32),
    "to_int8": lambda x: x.astype(I8),
    "to_uint8": lambda x: x.astype(jnp.uint8),
    "to_bool": lambda x: x.astype(bool),
    "to_bfloat16": lambda x: x.astype(jnp.bfloat16),
    "clipped": lambda x: jnp.clip(x, -1, 1),
    "where": lambda x: jnp.where(x > 0, x, 2 * x),
}  # fmt: skip
FLOAT_2 = {
    f.__name__: f
    for f in (jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.power, lax.rem, jnp.mod,
              jnp.floor_divide, jnp.equal, jnp.less, jnp.greater_equal, jnp.logaddexp)
}  # fmt: skip
INT_1 = {
    f.__name__: f
    for f in (jnp.abs, jnp.sign, jnp.invert, jnp.sum, jnp.max, jnp.cumsum, jnp.argmax, lax.population_count)
} | {
    "cube": lambda x: x**3,
    "to_float32": lambda x: x.astype(jnp.float32),
    "to_int8": lambda x: x.astype(I8),
    "to_uint8": lambda x: x.astype(jnp.uint8),
    "halved": lambda x: x // 2,
    "modulo": lambda x: x % 3,
    "doubled": lambda x: x << 1,
}
INT_2 = {
    f.__name__: f
    for f in (jnp.add, jnp.subtract, jnp.multiply, lax.div, lax.rem, jnp.mod, jnp.floor_divide, jnp.maximum,
              jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor, jnp.equal, jnp.less)
}  # fmt: skip


def numbers(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ordinary and extreme values of a dtype, twice, in different orders."""
    rng = np.random.default_rng(7)
    if jnp.issubdtype(dtype, jnp.floating):
        x = np.concatenate([3 * rng.standard_normal(32), SPECIAL]).astype(dtype)
    else:
        info = np.iinfo(dtype)
        x = np.concatenate([rng.integers(max(info.min, -99), 100, 32), [0, 1, 2, 7, info.max, info.min]]).astype(dtype)
    return x, np.roll(x, 11)


ARITHMETIC = [
    pytest.param(table, dtype, arity, id=f"{kind}-{np.dtype(dtype).name}-{arity}")
    for kind, table, arity, dtypes in (
        ("float", FLOAT_1, 1, (np.float32, jnp.bfloat16)),
        ("float", FLOAT_2, 2, (np.float32, jnp.bfloat16)),
        ("int", INT_1, 1, (np.int32, np.int8, np.uint8)),
        ("int", INT_2, 2, (np.int32, np.int8, np.uint8)),
    )
    for dtype in dtypes
]


@pytest.mark.parametrize(("table", "dtype", "arity"), ARITHMETIC)
def test_arithmetic_is_that_of_jax(table: dict[str, Any], dtype: Any, arity: int) -> None:
    args = numbers(dtype)[:arity]
    by_jax = jax.jit(lambda *xs: {name: fn(*xs) for name, fn in table.items()})(*args)
    for name, fn in table.items():
        got, want = np.asarray(lens.trace(fn, *args).outputs), np.asarray(by_jax[name])
        assert got.dtype == want.dtype, name
        rtol = 3e-2 if want.dtype == jnp.bfloat16 else 1e-5 if want.dtype.kind == "f" else 0
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=rtol, atol=rtol / 10, err_msg=name)


@pytest.mark.parametrize("product", ["k,k->", "mk,k->m", "k,kn->n", "mk,kn->mn", "bk,bk->b", "bmk,bnk->bmn", "m,n->mn"])
def test_a_product_of_any_rank_is_that_of_jax(product: str) -> None:
    sizes = {"b": 3, "m": 4, "n": 5, "k": 6}
    rng = np.random.default_rng(0)
    args = [rng.standard_normal([sizes[d] for d in part], np.float32) for part in product.partition("->")[0].split(",")]
    got = np.asarray(lens.trace(lambda *xs: jnp.einsum(product, *xs), *args).outputs)
    np.testing.assert_allclose(got, np.einsum(product, *args), rtol=1e-5, atol=1e-5)


MODES = {"get": ("clip", "fill", "promise_in_bounds"), "set": ("clip", "drop"), "add": ("clip", "drop")}
AT: dict[str, Any] = {
    "get": lambda x, i, mode: x.at[i].get(mode=mode),
    "set": lambda x, i, mode: x.at[i[:, 0]].set(x[0, 0], mode=mode),
    "add": lambda x, i, mode: x.at[:, i].add(x[:, :1, None], mode=mode),
}
PICKED = {f"{what}_{mode}": functools.partial(AT[what], mode=mode) for what in AT for mode in MODES[what]} | {
    "columns": lambda x, i: x[:, i],
    "both": lambda x, i: x[i, i[:, :1]],
    "behind a slice": lambda x, i: x[1:, :, i],
    "along": lambda x, i: jnp.take_along_axis(x, i[:, :1, None] % 5, axis=1),
    "scattered pairs": lambda x, i: x.at[i, 0, i].add(2),
    "each its own": lambda x, i: jax.vmap(lambda row, k: row[k])(x, i[:, 0]),
    "each set": lambda x, i: jax.vmap(lambda row, k: row.at[k].set(row[0]))(x, i[:, 0]),
    "windows": lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, k, 0), (2, 3, 6)))(i[:, 0]),
    "windows put": lambda x, i: jax.vmap(lambda k: lax.dynamic_update_slice(x, x[:2, 1:4], (k, 2, k)))(i[:, 0]),
    "counted": lambda x, i: jnp.bincount(jnp.abs(i).ravel(), length=4),
    "repeated": lambda x, i: jnp.repeat(x, jnp.array([0, 2, 1, 3]), axis=0, total_repeat_length=7),
    "tiles": lambda x, i: jnp.tile(x, (2, 1, 3)),
    "stacked": lambda x, i: jnp.stack([x, x + x], axis=2),
}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8])
def test_gathers_and_scatters_are_those_of_jax(dtype: Any) -> None:
    x = np.arange(4 * 5 * 6).reshape(4, 5, 6).astype(dtype)
    places = np.array([[0, 3], [-2, 1], [5, -9], [2, 7]], np.int32)
    given = {name: places % 4 if "promise" in name else places for name in PICKED}
    by_jax = jax.jit(lambda x, given: {name: fn(x, given[name]) for name, fn in PICKED.items()})(x, given)
    for name, fn in PICKED.items():
        got, want = np.asarray(lens.trace(fn, x, given[name]).outputs), np.asarray(by_jax[name])
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(np.float64(got), np.float64(want), err_msg=name)


# --- what the lens must leave to the simulator -----------------------------------------------------------------------


def rounded_at_random(x: np.ndarray) -> Any:
    def kernel(x_ref, o_ref):
        bits = pltpu.bitcast(x_ref[...], jnp.uint32)
        o_ref[...] = pltpu.stochastic_round(x_ref[...], bits, target_dtype=jnp.bfloat16)

    return pl.pallas_call(kernel, out_shape=zoo.like(x, None, jnp.bfloat16))(x)


def test_what_the_lens_cannot_follow_is_said() -> None:
    with pytest.raises(lens.Beyond, match="stochastic_round"):
        lens.trace(rounded_at_random, np.zeros((8, 128), np.float32))


def a_hundred_thousand_steps(x: np.ndarray) -> Any:
    spec = pl.BlockSpec((8, 128), lambda i: (0, 0))
    return pl.pallas_call(
        lambda x_ref, o_ref: None, grid=(100_000,), in_specs=[spec], out_specs=spec, out_shape=zoo.like(x)
    )(x)


def test_too_many_steps_are_refused_with_their_number() -> None:
    with pytest.raises(lens.Beyond, match="100000 grid steps"):
        lens.trace(a_hundred_thousand_steps, np.zeros((8, 128), np.float32))
