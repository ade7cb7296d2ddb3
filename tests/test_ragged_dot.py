"""ragged_dot.py: what its checks do not say by themselves: visits, weights that stay, and megablox beside it."""

import dataclasses
import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_puzzles.course import curriculum, session
from pallas_puzzles.course.arrays import keywords_of
from pallas_puzzles.course.inputs import draw
from pallas_puzzles.lens.machine import trace
from pallas_puzzles.view.tpu_report import tpu_report
from tpu_kernels import needs_compiler

FIXED = [[100, 100, 824], [0, 50, 50, 924], [256, 256, 256, 256], [0, 1024, 0], [300, 0, 724], [200, 28, 100], [0, 0]]


@functools.cache
def solution(puzzle_id):
    file = curriculum.course_folder() / "solutions" / "ragged_dot.py"
    return session.run(puzzle_id, overlay=file, judge=False).subject


def test_groups_and_tiles_are_drawn_to_scale():
    cases = runpy.run_path(str(curriculum.course_folder() / "cases" / "ragged_dot.py"))
    rows, group, tile = cases["draw_groups"](np.array([100, 100, 0, 824]), bm=128).splitlines()
    assert rows.split() == ["rows", "0", "100", "200", "1024"]
    assert group.endswith("empty: 2")
    drawn = group.partition("   empty")[0]
    assert [part.strip("-") for part in drawn.partition("|")[2].rstrip("|").split("|")] == ["0", "1", "3"]
    assert tile.count("|") == 9
    assert rows.index("100") == [i for i, c in enumerate(group) if c == "|"][1], "a number stands over its boundary"
    crowded = cases["draw_groups"](np.array([1, 999]))
    assert crowded.splitlines()[0].split() == ["rows", "0", "1000"], "what has no room is left out"


def traced(puzzle_id, number=0):
    case = solution(puzzle_id).cases[number]
    (only,) = trace(solution(puzzle_id).fn, *draw(case.inputs, np.random.default_rng(0)), **case.blocks).traces
    return only


def metadata(sizes, bm=128):
    fn = functools.partial(solution("ragged_dot/2c").fn, num_rows=1024, bm=bm)
    return jax.tree.map(np.asarray, jax.jit(fn)(np.array(sizes, np.int32)).metadata)


# --- visits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", FIXED, ids=str)
@pytest.mark.parametrize("bm", [32, 128])
def test_visits_are_every_pair_of_a_tile_and_a_group_in_it(sizes, bm):
    meta = metadata(sizes, bm)
    assert {x.dtype for x in meta} == {np.dtype(np.int32)}
    pairs = list(zip(meta.m_tile_ids.tolist(), meta.group_ids.tolist(), strict=True))[: int(meta.num_tiles)]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    real = {(row // bm, int(group)) for row, group in enumerate(owner)}
    assert set(pairs) >= real
    assert len([p for p in pairs if p in real]) == len(real), "each once"
    assert {tile for tile, _ in pairs} == set(range(1024 // bm)), "tiles of unowned rows, too"
    assert pairs == sorted(pairs)


def test_the_bound_on_visits_is_reached():
    meta = metadata([100, 100, 824])
    assert meta.num_tiles == len(meta.group_ids) == 10


def test_a_tile_that_two_groups_share_is_visited_twice():
    (o,) = [k for k, operand in enumerate(traced("ragged_dot/6").call.operands) if operand.role == "out"]
    product = traced("ragged_dot/6")
    steps = [tuple(block) for block, at in zip(product.blocks[o], product.steps, strict=True) if at[0] == at[2] == 0]
    assert [steps.count((tile, 0)) for tile in range(8)] == [2, 2, 1, 1, 1, 1, 1, 1]


def test_every_kind_of_grouping_is_in_the_checks():
    for puzzle_id in [f"ragged_dot/2{letter}" for letter in "abc"]:
        fixed = [tuple(c.inputs[0].tolist()) for c in solution(puzzle_id).cases if isinstance(c.inputs[0], np.ndarray)]
        assert {(100, 100, 824), (0, 50, 50, 924), (256,) * 4} <= set(fixed)
        assert any(c.inputs[0].kind == "groups" for c in solution(puzzle_id).cases if hasattr(c.inputs[0], "kind"))
        assert any(s[0] == 0 for s in fixed)
        assert any(s[-1] == 0 for s in fixed)
        assert any(0 in s[1:-1] and s[0] and s[-1] for s in fixed), "empty in the middle"
        assert any(sum(1 for n in s if n) == 1 for s in fixed), "one has it all"
        assert any(sum(s) < 1024 for s in fixed)


# --- what a wrong result means ----------------------------------------------------------------------------------------

SIZES = np.array([100, 100, 824], np.int32)
TILING = {"num_rows": 1024, "bm": 128}


def explained(puzzle_id, *args, change, **keywords):
    """The words and the picture for the right result with a change in it."""
    question = solution(puzzle_id)
    want = jax.tree.map(np.array, question.spec(*args, **keywords_of(question.spec, keywords)))
    got = change(jax.tree.map(np.copy, want))
    return question.explain(*args, got=got, want=want, **keywords)


def put(place, value):
    def change(numbers):
        numbers[place] = value
        return numbers

    return change


@pytest.mark.parametrize(
    ("puzzle_id", "place", "value", "says"),
    [
        ("2b", 3, 1, "Visit 3 is for tile 1 and group 2, rows 200 to 255. With group 1, these rows would be missing"),
        ("2b", 3, 3, "With group 3, the index map would leave the array: there are 3 groups."),
    ],
)
def test_a_wrong_list_is_explained_by_the_rows_of_its_first_wrong_entry(puzzle_id, place, value, says):
    words, picture = explained(f"ragged_dot/{puzzle_id}", SIZES, change=put(place, value), **TILING)
    assert says in words
    assert "group" in picture
    assert "tile" in picture


@pytest.mark.parametrize(
    ("puzzle_id", "sizes", "field", "place", "value", "says"),
    [
        (
            "2a",
            FIXED[0],
            "offsets",
            2,
            210,
            "Group 1 ends at row 200, the sum of 100 and 100. With 210 it would have 110",
        ),
        ("2a", FIXED[0], "offsets", 0, 5, "Group 0 begins at row 0. With 5, the rows before it would be left out."),
        ("2a", FIXED[0], "tiles_per_group", 1, 1, "in tiles 0 and 1. With 1, rows 128 to 199 would be left out."),
        ("2a", FIXED[0], "tiles_per_group", 2, 9, "in tiles 1 to 7. With 9, 256 more rows would be multiplied"),
        (
            "2c",
            FIXED[0],
            "tile_visits",
            1,
            1,
            "Tile 1 has rows of group 1 and group 2: 2 visits. With 1, some of its rows",
        ),
        ("2c", FIXED[5], "tile_visits", 7, 0, "All rows of tile 7 are unowned: 1 visit. With 0, its zeros would be"),
        ("2c", FIXED[0], "m_tile_ids", 3, 2, "Visit 3 is for tile 1 and group 2, rows 200 to 255. With tile 2, these"),
        ("7a", FIXED[3], "num_tiles", (), 9, "There are 10 visits. With 9, the kernel would stop before visit 9, for"),
        ("2c", FIXED[0], "num_tiles", (), 8, "There are 10 visits. With 8, the kernel would stop before visit 8, for"),
        (
            "2c",
            [200, 28, 100],
            "m_tile_ids",
            5,
            4,
            "is for tile 3, where all rows are unowned. With tile 4, these zeros",
        ),
        (
            "2c",
            [200, 28, 100],
            "group_ids",
            7,
            1,
            "Place 7 comes after the last visit for a group: repeat group 2 there.",
        ),
    ],
)
def test_of_several_lists_the_first_wrong_one_is_explained(puzzle_id, sizes, field, place, value, says):
    def change(result):
        if field not in result._fields:
            return result._replace(metadata=change(result.metadata))
        return result._replace(**{field: put(place, value)(getattr(result, field))})

    words, picture = explained(f"ragged_dot/{puzzle_id}", np.array(sizes, np.int32), change=change, **TILING)
    assert says in words
    assert ("unowned" in picture) == (sum(sizes) < 1024)


@pytest.mark.parametrize(
    ("rows", "group", "says"),
    [
        (slice(200, 256), 1, "Rows 200 to 255, in tile 1, belong to group 2 and hold the product with w[1]."),
        (slice(320, 321), 2, "Row 320, in tile 2, is unowned and holds the product with w[2]."),
    ],
)
def test_wrong_rows_of_a_product_are_explained_by_whose_they_are_and_what_they_hold(rows, group, says):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(384, 64)).astype(np.float32), rng.normal(size=(3, 64, 128)).astype(np.float32)
    sizes = np.array([100, 100, 120], np.int32)
    words, picture = explained("ragged_dot/6", x, w, sizes, change=put(rows, x[rows] @ w[group]), bm=128)
    assert words == says
    assert "unowned" in picture


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (slice(64, 128), "dw[1] should be the sum over rows 100 to 127. Yours is the sum over rows 64 to 127."),
        (slice(0, 0), "dw[1] should be the sum over rows 100 to 127. Yours is 0."),
    ],
)
def test_a_wrong_gradient_of_weights_is_explained_by_the_rows_in_it(held, says):
    x, w, sizes, g = draw(solution("ragged_dot/7b").cases[0].inputs, np.random.default_rng(1))
    x, g = x.astype(np.float32), g.astype(np.float32)

    def change(grads):
        grads[2][1] = x[held].T @ g[held]
        return grads

    assert explained("ragged_dot/7b", x, w, sizes, g, change=change, bm=64)[0] == says


def test_a_verdict_shows_what_a_wrong_result_means():
    verdict = session.run("ragged_dot/2a", overlay=ROUNDED)
    assert "Group 1 has rows 100 to 199, in tiles 0 and 1." in " ".join(str(verdict).split())
    assert verdict.picture in "\n".join(line[4:] for line in str(verdict).splitlines())


ROUNDED = """def group_offsets(group_sizes):
    return jnp.append(0, jnp.cumsum(group_sizes))


def tiles_per_group(group_sizes, *, bm=128):
    return pl.cdiv(group_sizes, bm)
"""


@pytest.mark.parametrize(
    ("bm", "says"),
    [
        (16, "tile_rows(80, 3) is 16: up to 5 + 3 - 1 = 7 visits, and the limit is 2 * 3 = 6."),
        (128, "tile_rows(96, 5) is 128: up to 1 + 5 - 1 = 5 visits of 128 rows. That is 640 rows, and the limit is"),
        (100, "tile_rows(96, 5) is 100: return a multiple of 16"),
        (None, "tile_rows(96, 5) is None: return a multiple of 16"),
    ],
)
def test_a_wrong_height_of_tiles_is_explained_by_the_bound_that_it_breaks(bm, says):
    (claim,) = solution("ragged_dot/9").claims
    assert claim.finding() is None
    assert says in dataclasses.replace(claim, fn=lambda num_slots, num_experts: bm).finding().cause


def test_wrong_weights_of_a_token_are_drawn_beside_its_logits():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)

    def change(gate):
        return gate._replace(weights=np.array([[0.64, 0.24]], np.float32))

    words, picture = explained("ragged_dot/8a", logits, change=change, k=2)
    assert words == "The weights of token 0 sum to 0.88, not 1."
    assert [line.split() for line in picture.splitlines()[1:]] == [
        ["logits", "2.000", "1.000"],
        ["yours", "0.640", "0.240", "sum", "0.880"],
        ["right", "0.731", "0.269", "sum", "1.000"],
    ]


def test_a_gradient_that_follows_the_order_instead_of_its_inverse_is_told_so():
    order = np.array([1, 2, 5, 3, 0, 4], np.int32)
    g = np.arange(12, dtype=np.float32).reshape(6, 2) ** 2

    def change(_):
        return g[order].reshape(3, 2, 2).sum(axis=1)

    words, picture = explained("ragged_dot/8c", g, order, change=change, k=2)
    assert words == "For token 0 you add rows 1 and 2: these are numbers of order."
    assert [line.split() for line in picture.splitlines()] == [
        ["token", "0:", "slot", "0", "1"],
        ["row", "of", "g", "4", "0"],
    ]


# --- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("puzzle_id", ["ragged_dot/1", "ragged_dot/4"])
def test_weights_are_fetched_once_for_each_column_block(puzzle_id):
    product = traced(puzzle_id)
    (w,) = [k for k, operand in enumerate(product.call.operands) if operand.name == "w_ref"]
    visited = {tuple(block) for block in product.blocks[w]}
    assert sum(product.moved[w]) == len(visited) < product.n


def test_the_grid_is_as_long_as_there_are_visits():
    product = traced("ragged_dot/4")
    assert product.call.dynamic_bounds == 1
    assert product.call.grid == (3, 6, 1), "6 visits; the list has room for 9"


# --- against jax ------------------------------------------------------------------------------------------------------


def test_the_gradients_are_those_of_jax_ragged_dot():
    fn = solution("ragged_dot/7b").fn
    x, w, sizes, g = draw(solution("ragged_dot/7b").cases[0].inputs, np.random.default_rng(1))
    names = solution("ragged_dot/7b").fn.__globals__
    y, vjp = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x.astype(np.float32), w.astype(np.float32))
    want = (y, *vjp(g.astype(np.float32)))
    loop = names["dense_loop"](x.astype(np.float32), w.astype(np.float32), sizes)
    np.testing.assert_allclose(loop, y, atol=1e-3)
    for ours, theirs in zip(trace(fn, x, w, sizes, g).outputs, want, strict=True):
        scale = float(jnp.abs(theirs).mean())
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=8e-3, atol=8e-3 * scale)


@needs_compiler
@pytest.mark.parametrize("tpu", ["v5e", "v6e"])
def test_beside_megablox(tpu):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    args = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16)]
    args.append(np.array([100, 200, 500, 224], np.int32))
    theirs = functools.partial(gmm, preferred_element_type=jnp.bfloat16, tiling=(256, 256, 256))
    ours = functools.partial(solution("ragged_dot/6").fn, bm=256, bn=256, bk=256)
    reports = [tpu_report(fn, *args, tpu=tpu, simulate=False) for fn in (ours, theirs)]
    assert all(reports), [r.refusal or r.unavailable for r in reports]
    mine, reference = (r.kernels[0] for r in reports)
    assert mine.steps == reference.steps
    assert mine.hbm_bytes == reference.hbm_bytes
    assert mine.mean_step <= 1.05 * reference.mean_step
