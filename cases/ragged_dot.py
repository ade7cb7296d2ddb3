"""What the checks of ragged_dot.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_puzzles.course.claims import hbm_choice, hbm_claim, helper_claim
from pallas_puzzles.course.inputs import (
    GRADIENTS,
    Budget,
    Case,
    Question,
    case,
    groups,
    integers,
    normal,
    question,
    uniform,
)
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.ir.capture import source_line
from pallas_puzzles.ir.readers import for_the_reader
from pallas_puzzles.lens.machine import listed, trace
from pallas_puzzles.text import plural


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.by_tile_spec,
        np.array([2, 2, 0, 3, 3, 3], np.int32),
        normal((384, 256), "bfloat16"),
        normal((5, 256, 384), "bfloat16"),
        variants=[
            case(integers((8,), 0, 3), normal((256, 128), "bfloat16"), normal((3, 128, 512), "bfloat16"), bn=256),
            case(
                np.array([6, 6, 6, 1], np.int32),
                normal((64, 384), "bfloat16"),
                normal((7, 384, 256), "bfloat16"),
                budget=Budget(hbm_bytes=524_288, calls=1),
            ),
            case(
                np.array([1], np.int32),
                normal((64, 192), "bfloat16"),
                normal((2, 192, 128), "bfloat16"),
                about="a single block, of 192 columns of x",
            ),
            case(
                np.array([0, 2, 2], np.int32),
                normal((144, 256), "bfloat16"),
                normal((3, 256, 768), "bfloat16"),
                bn=384,
                about="tiles of 48 rows, blocks of 384 columns",
            ),
        ],
        budget=Budget(hbm_bytes=1_474_560, vmem_bytes=229_376, calls=1, mxu_bits=16),
        explain=explain_tiles,
    )


def sizes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


GROUPINGS = [  # 1024 rows, where nothing else is said
    case(sizes(30, 10, 88), num_rows=150, bm=64, about="three tiles, the last one not whole, and 22 unowned rows"),
    case(sizes(256, 256, 256, 256), about="equal groups"),
    case(groups(6, 1024), about="random groups"),
    case(sizes(0, 50, 50, 924), about="the first group is empty"),
    case(sizes(300, 0, 0, 724), about="empty groups in the middle"),
    case(sizes(512, 511, 1, 0), about="a group of one row, and an empty one after it"),
    case(sizes(0, 1024, 0), about="one group has all rows"),
    case(sizes(260, 30, 40, 50, 644), about="five groups in one tile"),
    case(sizes(64, 128, 256, 576), about="groups of whole tiles that begin in the middle of one"),
    case(sizes(200, 28, 100), about="696 unowned rows"),
    case(sizes(128, 0, 0, 896), about="empty groups where a tile begins"),
    case(sizes(96, 96, 768), num_rows=960, bm=96, about="tiles of 96 rows"),
    case(sizes(336, 336, 352), bm=112, about="tiles of 112 rows"),
    case(sizes(*[8] * 160), num_rows=1280, about="160 groups"),
    case(sizes(0, 0, 0, 0), about="all groups are empty"),
    case(sizes(*[0] * 199, 1024), about="199 empty groups before the first row"),
    case(groups(40, 999), num_rows=1000, bm=64, about="40 groups, and the last tile is not whole"),
]


MANY_GROUPS = (groups(40, 999),)  # of 1000 rows in tiles of 32: a table of groups against tiles has 1280 elements


def puzzle_2a(nb: Any) -> Question:
    return question(
        nb.layout_spec,
        sizes(100, 100, 824),
        variants=[
            *GROUPINGS,
            case(sizes(30_000, 20_000, 7), num_rows=50_048, about="offsets beyond 16 bits"),
            case(*MANY_GROUPS, num_rows=1000, bm=32, budget=Budget(operations=100, elements=1024)),
        ],
        kernel=False,
        explain=wrong_lists(nb, an_offset, tiles_of_a_group),
    )


def puzzle_2b(nb: Any) -> Question:
    return question(
        nb.group_ids_spec,
        sizes(100, 100, 824),
        variants=[*GROUPINGS, case(*MANY_GROUPS, num_rows=1000, bm=32, budget=Budget(operations=120, elements=1024))],
        kernel=False,
        explain=wrong_lists(nb, group_of_a_visit),
    )


def puzzle_2c(nb: Any) -> Question:
    return question(
        nb.counted_spec,
        sizes(200, 28, 100),
        variants=[
            case(sizes(100, 100, 824)),
            *GROUPINGS,
            case(*MANY_GROUPS, num_rows=1000, bm=32, budget=Budget(operations=300, elements=1024)),
        ],
        kernel=False,
        explain=wrong_lists(nb, visits_of_a_tile, *METADATA),
    )


def puzzle_3(nb: Any) -> Question:
    def own_spec(v: Any, offsets: Any, group_ids: Any, tile_ids: Any) -> Any:
        rows, g = tile_ids[v] * 64 + jnp.arange(64)[:, None], group_ids[v]
        return (offsets[g] <= rows) & (rows < offsets[g + 1])

    visits = np.int32(1), sizes(0, 100, 128, 256), sizes(0, 0, 1, 2, 2), sizes(0, 1, 1, 2, 3)
    return question(
        nb.expert_bias_spec,
        normal((256, 384), scale=100.0),
        normal((3, 1, 384)),
        sizes(100, 28, 128),
        variants=[
            case(normal((512, 256)), normal((5, 1, 256), shift=2.0), groups(5, 512), bm=128, bn=256),
            case(
                normal((320, 128)),
                normal((6, 1, 128)),
                sizes(0, 10, 20, 30, 0, 260),
                bm=80,
                about="four groups in one tile",
            ),
            case(
                normal((384, 128), shift=1.0),
                normal((4, 1, 128)),
                sizes(40, 0, 60, 0),
                bm=32,
                about="whole tiles of unowned rows",
            ),
            case(normal((200, 256)), normal((2, 1, 256)), sizes(90, 50), bm=40),
            case(normal((96, 128)), normal((3, 1, 128)), sizes(0, 0, 0), bm=16, about="all groups are empty"),
            case(
                np.where(np.arange(128)[:, None] % 90 == 20, np.inf, np.ones((128, 128))).astype(np.float32),
                normal((2, 1, 128)),
                sizes(64, 30),
                about="a group begins with its tile; rows 20 and 110 of x are infinite",
            ),
            case(
                np.where(np.arange(128)[:, None] == 70, np.inf, np.ones((128, 128))).astype(np.float32),
                normal((2, 1, 128)),
                sizes(80, 40),
                about="row 70 of x is infinite",
            ),
            case(
                normal((96, 768)),
                normal((3, 1, 768)),
                sizes(20, 40, 36),
                bm=24,
                bn=384,
                about="tiles of 24 rows, blocks of 384 columns",
            ),
        ],
        budget=Budget(hbm_bytes=791_040, vmem_bytes=132_096, calls=1),
        allow=["int32", "bool"],
        explain=explain_bias,
        claims=[  # Puzzle 7b sums over them
            helper_claim(nb.own_rows, own_spec, *visits, call=lambda *visit: nb.own_rows(*visit, 64))
        ],
    )


def sum_over_k_kernel(
    offsets_ref: Any, group_ids_ref: Any, m_tile_ids_ref: Any, x_ref: Any, w_ref: Any, o_ref: Any, acc_ref: Any
) -> None:
    v = pl.program_id(1)
    group, row = group_ids_ref[v], m_tile_ids_ref[v] * x_ref.shape[0]
    own = (offsets_ref[group] <= row) & (row < offsets_ref[group + 1])  # so the lists come in their order
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(jnp.where(own, x_ref[...], 0), w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def puzzle_4(nb: Any) -> Question:
    def twice_in_two_steps(x: Any, w: Any, group_sizes: Any) -> Any:
        """The wiring with more visits than tiles, and K in two blocks: whole_k_kernel has neither."""
        meta = nb.metadata(group_sizes, num_rows=x.shape[0], bm=32)
        group_ids, m_tile_ids = jnp.repeat(meta.group_ids, 2), jnp.repeat(meta.m_tile_ids, 2)
        meta = meta._replace(group_ids=group_ids, m_tile_ids=m_tile_ids, num_tiles=2 * meta.num_tiles)
        return nb.grouped(sum_over_k_kernel, meta, x, w, bm=32, bn=256, bk=128)

    return question(
        nb.grouped_spec,
        normal((384, 256), "bfloat16"),
        normal((4, 256, 384), "bfloat16"),
        sizes(192, 0, 128, 64),
        variants=[
            case(
                normal((256, 384), "bfloat16"),
                normal((9, 384, 320), "bfloat16"),
                sizes(0, 0, 32, 0, 128, 0, 64, 32, 0),
                bm=32,
                budget=Budget(grid_steps=24, hbm_bytes=1_736_704, calls=1),
            ),
            case(
                normal((640, 128), "bfloat16"),
                normal((2, 128, 256), "bfloat16"),
                sizes(512, 128),
                bm=128,
                budget=Budget(grid_steps=10, hbm_bytes=786_432, calls=1),
            ),
            case(
                normal((320, 256), "bfloat16"),
                normal((3, 256, 256), "bfloat16"),
                sizes(128, 64, 128),
                backwards=True,
                bn=256,
                budget=Budget(grid_steps=5, calls=1),
                about="the last visit first",
            ),
            case(
                normal((144, 384), "bfloat16"),
                normal((2, 384, 768), "bfloat16"),
                sizes(48, 96),
                bm=48,
                bn=384,
                about="tiles of 48 rows, blocks of 384",
            ),
        ],
        budget=Budget(grid_steps=18, hbm_bytes=1_474_560, vmem_bytes=262_144, serial_steps=6, calls=1),
        allow=["int32", "bool"],
        forbid=("ragged_dot", "ragged_dot_general", "gmm"),
        explain=explain_product,
        tol=8e-3,  # about one unit in the last place of a bfloat16
        claims=[
            helper_claim(
                nb.grouped,
                nb.grouped_spec,
                normal((96, 256), "bfloat16"),
                normal((2, 256, 256), "bfloat16"),
                sizes(32, 64),
                call=twice_in_two_steps,
            )
        ],
    )


def equal_product(nb: Any) -> Callable[..., tuple[Any, Any]]:
    """(experts, rows, K, N, bm, bn, bk) -> the reader's wiring around Puzzle 5's kernel: (function, arguments)."""

    @functools.cache
    def meta(experts: int, rows: int, bm: int) -> Any:
        return trace(nb.metadata, sizes(*[rows] * experts), num_rows=experts * rows, bm=bm).outputs

    def product(experts: int, rows: int, K: int, N: int, bm: int, bn: int, bk: int) -> tuple[Any, Any]:
        x, w = jnp.zeros((experts * rows, K), jnp.bfloat16), jnp.zeros((experts, K, N), jnp.bfloat16)
        return functools.partial(nb.grouped, nb.sum_kernel, bm=bm, bn=bn, bk=bk), (meta(experts, rows, bm), x, w)

    return product


def equal_plans(nb: Any, experts: int, rows: int, K: int, N: int) -> list[tuple[int, int, int]]:
    return [(bm, bn, bk) for bm in nb.block_sizes(rows, 64) for bn in nb.block_sizes(N) for bk in nb.block_sizes(K)]


def any_experts(rng: np.random.Generator) -> tuple[int, ...]:
    """experts, rows, K, N, and bytes of VMEM, drawn."""
    rows, (K, N) = rng.choice([64, 128, 192, 256, 384]), rng.permutation([256, 384, 512])[:2]
    return (int(rng.integers(2, 4)), int(rows), int(K), int(N), int(rng.integers(250_000, 900_000)))


def puzzle_5(nb: Any) -> Question:
    product = equal_product(nb)
    return question(  # the budgets are those of the best plan
        nb.equal_spec,
        normal((768, 512), "bfloat16"),
        normal((3, 512, 384), "bfloat16"),
        variants=[
            case(
                normal((1024, 512), "bfloat16"),
                normal((2, 512, 256), "bfloat16"),
                vmem_bytes=700_000,
                budget=Budget(hbm_bytes=3_145_728, vmem_bytes=700_000, calls=1),
                about="512 rows an expert",
            ),
            case(
                normal((384, 512), "bfloat16"),
                normal((3, 512, 256), "bfloat16"),
                vmem_bytes=458_752,
                budget=Budget(hbm_bytes=1_376_256, vmem_bytes=458_752, calls=1),
                about="128 rows an expert, and VMEM that just fits",
            ),
            case(
                normal((128, 256), "bfloat16"),
                normal((2, 256, 768), "bfloat16"),
                vmem_bytes=450_000,
                budget=Budget(hbm_bytes=1_114_112, vmem_bytes=450_000, calls=1),
                about="one tile an expert",
            ),
        ],
        budget=Budget(hbm_bytes=3_735_552, vmem_bytes=800_000, calls=1, mxu_bits=16),
        allow=["int32", "bool"],
        tol=8e-3,
        claims=[
            hbm_claim(
                nb.grouped_bytes,
                product,
                (3, 128, 512, 256, 64, 128, 128),
                (3, 128, 512, 256, 64, 128, 512),
                (2, 192, 384, 256, 64, 256, 128),
                (2, 128, 256, 384, 128, 128, 128),
            ),
            hbm_choice(
                nb.thrifty_blocks,
                product,
                functools.partial(equal_plans, nb),
                any_experts,
                [
                    (3, 256, 512, 384, 800_000),
                    (2, 512, 512, 256, 700_000),
                    (3, 128, 512, 256, 458_752),
                    (2, 1024, 4096, 128, 1_700_000),
                    (2, 512, 768, 128, 700_000),
                ],
            ),
        ],
    )


def ragged_case(num_rows: int, K: int, N: int, group_sizes: Any, *, overflown: int | None = None, **more: Any) -> Case:
    """x, w and sizes for num_rows rows; the values of x are far from 0, so that a row of another group is far from
    right. The weights of the expert `overflown` have become infinite, which must not touch the rows of others."""
    G = group_sizes.shape[0]
    x, weights = normal((num_rows, K), "bfloat16", shift=0.5), normal((G, K, N), "bfloat16")
    w: Any = weights
    if overflown is not None:
        w = np.asarray(weights.draw(np.random.default_rng(G)))
        w[overflown, 0] = np.inf
    return case(x, w, group_sizes, **more)


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.grouped_spec,
        normal((1024, 256), "bfloat16"),
        normal((3, 256, 384), "bfloat16"),
        sizes(100, 100, 824),
        variants=[
            ragged_case(1024, 128, 256, sizes(0, 50, 50, 924), bn=256, budget=Budget(grid_steps=10, calls=1)),
            ragged_case(
                512,
                256,
                128,
                sizes(260, 10, 20, 15, 207),
                bm=64,
                bk=256,
                about="five groups in one tile",
            ),
            ragged_case(
                64, 128, 256, sizes(20, 24, 20), bm=32, bn=256, overflown=1, about="the weights of group 1 are infinite"
            ),
            ragged_case(96, 128, 128, sizes(40, 30), bm=48, turned=True),
            ragged_case(256, 384, 256, sizes(0, 256, 0), bm=32, bk=384, about="one group has all rows"),
            ragged_case(384, 256, 320, sizes(70, 0, 58, 29), bm=48, about="227 unowned rows"),
            ragged_case(300, 512, 128, groups(7, 300), bm=112, bk=256, about="the last tile hangs over the edge"),
            ragged_case(96, 256, 256, sizes(0, 0), bm=16, bn=256, about="all groups are empty"),
            ragged_case(160, 128, 512, sizes(40, 40, 40, 40), bm=80, bn=512, budget=Budget(grid_steps=4, calls=1)),
            ragged_case(64, 1024, 128, sizes(40, 24), bm=32, about="K in eight blocks"),
            ragged_case(144, 384, 768, sizes(30, 100), bm=48, bn=384, bk=384, about="tiles of 48 rows, blocks of 384"),
        ],
        budget=Budget(grid_steps=60, hbm_bytes=4_718_592, vmem_bytes=262_144, calls=1, mxu_bits=16),
        allow=["int32", "bool"],
        forbid=("ragged_dot", "ragged_dot_general", "gmm"),
        explain=explain_product,
        tol=8e-3,
    )


def puzzle_7a(nb: Any) -> Question:
    return question(
        nb.every_group_spec,
        sizes(0, 1024, 0),
        variants=[
            case(sizes(100, 100, 824)),
            *GROUPINGS,
            case(*MANY_GROUPS, num_rows=1000, bm=32, budget=Budget(operations=200, elements=1024)),
        ],
        kernel=False,
        explain=wrong_lists(nb, number_of_visits, *METADATA[:-1], every_group=True),
    )


def grads_case(num_rows: int, K: int, N: int, group_sizes: Any, **more: Any) -> Case:
    """x, w, sizes and g; x and g have a mean, so that rows of other groups do not average out."""
    x, w, group_sizes = ragged_case(num_rows, K, N, group_sizes).inputs
    return case(x, w, group_sizes, normal((num_rows, N), "bfloat16", shift=0.5), **more)


def overflown_grads() -> Case:
    """One number of x is infinite, in group 0, and one of g, in group 1: so are dw[0] and dw[1], and dw[2] is not."""
    rng = np.random.default_rng(7)
    x, w, group_sizes, g = grads_case(96, 128, 256, sizes(40, 24, 32)).inputs
    x, g = (np.asarray(a.draw(rng)) for a in (x, g))
    x[10, 3] = g[50, 7] = np.inf
    return case(x, w, group_sizes, g, bm=32, bn=256, about="row 10 of x and row 50 of g have an infinite number")


def puzzle_7b(nb: Any) -> Question:
    return question(
        nb.ragged_grads_spec,
        *grads_case(256, 256, 384, sizes(100, 28, 128)).inputs,
        variants=[
            grads_case(1024, 128, 256, sizes(0, 50, 50, 924), bm=128, bn=256),
            grads_case(
                192,
                384,
                128,
                sizes(60, 0, 0, 100),
                bm=48,
                bk=384,
                about="empty groups in the middle, and unowned rows",
            ),
            grads_case(160, 256, 256, sizes(40, 120, 0), bm=32, bn=256, bk=256, about="the last group is empty"),
            grads_case(200, 128, 128, groups(6, 200), bm=112, about="the last tile hangs over the edge"),
            grads_case(128, 256, 128, sizes(0, 128, 0), bm=80, bk=256, about="one group has all rows"),
            grads_case(96, 128, 384, sizes(0, 0), bm=16, bn=384, about="all groups are empty"),
            overflown_grads(),
        ],
        budget=Budget(hbm_bytes=4_653_056, vmem_bytes=196_608, calls=3, mxu_bits=16),
        allow=["int32", "bool"],
        explain=explain_grads,
        tol=8e-3,
    )


def puzzle_8a(nb: Any) -> Question:
    return question(
        nb.gate_spec,
        normal((12, 5), scale=2.0),
        variants=[
            case(normal((40, 8)), k=1),
            case(normal((33, 6), scale=60.0), k=3, about="scores so large that exp overflows"),
            case(normal((16, 4)), k=4),
            case(np.tile(np.array([[3, -1, 2, 0, 9]], np.float32), (24, 1)), k=2, about="two experts get all tokens"),
            case(np.tile(np.array([[0, -20_000, -30_000]], np.float32), (8, 1)), k=2, about="scores of -20,000"),
            case(np.tile(np.array([[2, 1, 2, 0, 2]], np.float32), (8, 1)), k=2, about="equal scores"),
        ],
        kernel=False,
        explain=explain_gate,
    )


def one_infinite(rows: int, columns: int) -> np.ndarray:
    """float32: numbers near 1, and a first row that is infinite."""
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    x[0] = np.inf
    return x


def puzzle_8b(nb: Any) -> Question:
    return question(
        nb.permuted_spec,
        normal((12, 128)),
        integers((12, 2), 0, 5),
        uniform((12, 2)),
        variants=[
            case(normal((6, 16)), np.array([[2, 0], [1, 2], [2, 1]] * 2, np.int32), uniform((6, 2)), num_experts=4),
            case(normal((40, 64)), integers((40, 1), 0, 8), uniform((40, 1)), num_experts=8),
            case(normal((33, 32)), integers((33, 3), 0, 6), uniform((33, 3)), num_experts=7),
            case(
                normal((24, 16)),
                np.tile(sizes(4, 0), (24, 1)),
                uniform((24, 2)),
                about="two experts get all tokens",
            ),
            case(normal((8, 16)), integers((8, 2), 100, 160), uniform((8, 2)), num_experts=160, about="160 experts"),
            case(  # a table of slots against tokens would have 18,432 elements
                normal((96, 4)), integers((96, 2), 0, 5), uniform((96, 2)), budget=Budget(elements=1024)
            ),
            case(
                one_infinite(10, 96),
                integers((10, 3), 0, 5),
                uniform((10, 3)),
                about="rows of 96 columns, the first of them infinite",
            ),
        ],
        kernel=False,
        forbid={
            "at": "at[...] scatters rows. Fetch them instead, with the inverse permutation.",
            "segment_sum": "segment_sum scatters rows. Fetch them instead, with the inverse permutation.",
            **{
                name: f"{name} of a gather scatters rows. Fetch them instead, with the inverse permutation."
                for name in GRADIENTS
            },
        },
        explain=explain_permuted,
    )


def shuffled(num_slots: int) -> np.ndarray:
    """A permutation of the slots that is not its own inverse."""
    return np.random.default_rng(num_slots).permutation(num_slots).astype(np.int32)


NO_SCATTER = (
    " adds rows one after the other: a scatter-add. Fetch the rows of g with the inverse of order, and sum them."
)


def puzzle_8c(nb: Any) -> Question:
    return question(
        nb.expand_grad_spec,
        normal((12, 128)),
        np.array([1, 2, 5, 3, 0, 4, 11, 8, 6, 10, 7, 9], np.int32),
        variants=[
            case(normal((40, 64), "bfloat16", shift=2.0), shuffled(40), k=4, about="g in bfloat16"),
            case(normal((8, 16)), shuffled(8), k=1),
            case(normal((33, 24)), shuffled(33), k=3),
            case(
                np.where(np.arange(24)[:, None] == 5, np.inf, np.ones((24, 8))).astype(np.float32),
                shuffled(24),
                about="row 5 of g has overflowed",
            ),
            case(  # a table of slots against tokens would have 18,432 elements
                normal((192, 4)), shuffled(192), budget=Budget(operations=60, elements=1024)
            ),
        ],
        kernel=False,
        forbid={
            **{name: f"{name}{NO_SCATTER}" for name in ("at", "segment_sum", "bincount")},
            **{name: f"{name} of a gather{NO_SCATTER}" for name in GRADIENTS},
        },
        explain=explain_expand,
    )


def moe_case(T: int, D: int, F: int, E: int, *, unloved: int | None = None, **keywords: Any) -> Case:
    """x, router, w1, w2 and g. Nobody chooses the expert `unloved`."""
    router = np.random.default_rng(E).normal(0, D**-0.5, (D, E)).astype(np.float32)
    if unloved is not None:
        router[:, unloved] = -1.0  # and x has a mean of 0.5
    x, g = normal((T, D), "bfloat16", shift=0.5), normal((T, D), "bfloat16")
    w1, w2 = normal((E, D, F), "bfloat16", scale=D**-0.5), normal((E, F, D), "bfloat16", scale=F**-0.5)
    return case(x, router, w1, w2, g, **keywords)


# What may work outside of the kernels: the router's little product, softmax, silu, moves, and all that is on integers.
# outside_flops: of that product and its two gradients.
MOE_OUTSIDE = (
    "int32 bool dot_general top_k sort gather scatter-add transpose select_n broadcast_in_dim concatenate slice add "
    "add_any sub mul div neg max min exp log sign abs is_finite integer_pow square logistic tanh reduce_max reduce_sum"
).split()


def moe_budget(T: int, D: int, F: int, E: int, *, k: int = 2, bn: int = 128, bk: int = 128, **more: int) -> Budget:
    """What tile_rows may cost: six products, each of at most 2 S + 16 E rows, in 2 E visits."""
    rows, blocks = 2 * k * T + 16 * E, (D // bk) * (F // bn)
    flops = 6 * (2 * rows * D * F) * 1.05  # a twentieth is for masks and sums
    return Budget(calls=6, grid_steps=6 * blocks * 2 * E, flops=int(flops // 1e5 * 1e5), **more)


def puzzle_9(nb: Any) -> Question:
    def layer(T: int, D: int, F: int, E: int, *, unloved: int | None = None, about: str = "", **keywords: int) -> Case:
        budget = moe_budget(T, D, F, E, **keywords)
        return moe_case(T, D, F, E, unloved=unloved, budget=budget, about=about, **keywords)

    return question(
        nb.moe_spec,
        *moe_case(48, 128, 256, 5, unloved=3).inputs,
        variants=[
            layer(64, 128, 256, 6, unloved=0, k=1, bn=256, about="no token chooses expert 0"),
            layer(40, 256, 128, 3, bk=256),
            layer(160, 128, 256, 2, bn=256, about="many tokens, two experts"),
            layer(8, 128, 256, 8, bn=256, about="8 tokens, 8 experts"),
            layer(40, 384, 384, 3, bn=384, bk=384, about="blocks of 384"),
        ],
        budget=moe_budget(48, 128, 256, 5, mxu_bits=16, outside_flops=184_320),
        allow=MOE_OUTSIDE,
        forbid={
            "scatter-add": "JAX has made a scatter-add, into shape {shape}: the gradient of a gather, such as "
            "`x[order // k]`. Take the rows of tokens from expand, whose gradient is your expand_grad.",
            "ragged_dot": "ragged_dot does the work for you, and you have written your own.",
        },
        explain=explain_moe(nb),
        tol=0.15,  # of a few hundred thousand gradients the worst is off by 0.06 in bfloat16
        claims=[tile_rows_claim(nb.tile_rows)],
    )


@dataclasses.dataclass(frozen=True)
class TileRows:
    """fn(num_slots, num_experts) keeps both bounds of Puzzle 9, whatever the tokens choose."""

    fn: Callable[..., Any]
    last = True  # judged when the layer is right, or costs too much

    def finding(self) -> Finding | None:
        code = self.fn.__code__
        for slots, experts in ((96, 5), (64, 6), (80, 3), (320, 2), (16, 8), (16_384, 64), (65_536, 64), (2, 64)):
            bm = for_the_reader(self.fn, slots, experts)
            wrong = over_the_bounds(slots, experts, bm)
            if wrong:
                cause = f"tile_rows({slots}, {experts}) is {bm}{wrong}"
                return Finding("model", cause, [], source_line(code.co_filename, code.co_firstlineno))
        return None


def over_the_bounds(slots: int, experts: int, bm: Any) -> str:
    """Which bound tiles of bm rows break, in words; "" if they keep both."""
    if not isinstance(bm, int | np.integer) or bm <= 0 or bm % 16:
        return ": return a multiple of 16, an int."
    bm = int(bm)
    visits, rows = pl.cdiv(slots, bm) + experts - 1, 2 * slots + 16 * experts
    most = f": up to {pl.cdiv(slots, bm)} + {experts} - 1 = {visits:,} visits"
    if visits > 2 * experts:
        return f"{most}, and the limit is 2 * {experts} = {2 * experts}. These tiles are too low."
    if visits * bm > rows:
        return (
            f"{most} of {bm} rows. That is {visits * bm:,} rows, and the limit is 2 * {slots} + 16 * {experts} = "
            f"{rows:,}. These tiles are too tall."
        )
    return ""


def tile_rows_claim(fn: Callable[..., Any]) -> Any:
    return TileRows(fn)


# --- what wrong results mean: explain(*args, got=, want=, **keywords) -> in words; a picture --------------------------

Explained = tuple[str, str]
Visit = tuple[int, int | None]  # a tile, and a group in it; None where all of its rows are unowned
_RULER = 72  # characters for all rows


def draw_groups(group_sizes: Any, *, num_rows: int | None = None, bm: int | None = None) -> str:
    """The groups, the unowned rows behind them, and the tiles, to scale."""
    ends = np.cumsum(group_sizes).tolist()
    size = int(num_rows or ends[-1])
    lanes = {"group": [(end - int(n), end, str(g)) for g, (n, end) in enumerate(zip(group_sizes, ends, strict=True))]}
    if ends[-1] < size:
        lanes["unowned"] = [(ends[-1], size, "zeros")]
    if bm:
        lanes["tile"] = [(row, min(row + bm, size), str(row // bm)) for row in range(0, size, bm)]
    margin = max(map(len, lanes)) + 2
    lines = [f"{'rows':<{margin}}{_numbers(size, sorted({0, *ends, size}))}"]
    for name, intervals in lanes.items():
        empty = [label for start, end, label in intervals if end <= start]
        tail = f"   empty: {', '.join(empty)}" if empty else ""
        lines.append(f"{name:<{margin}}{_lane(size, intervals)}{tail}".rstrip())
    return "\n".join(lines)


def _column(row: int, size: int) -> int:
    return round(row * (_RULER - 1) / max(size, 1))


def _numbers(size: int, ticks: list[int]) -> str:
    """The ticks' numbers, each from its own column on; one that has no room is left out."""
    line = ""
    for tick in ticks:
        column = _column(tick, size)
        if column > len(line) or not line:
            line = line.ljust(column) + str(tick)
    return line


def _lane(size: int, intervals: list[tuple[int, int, str]]) -> str:
    """Intervals (start, end, label) between bars; a label that has no room is left out."""
    cells = [" "] * _RULER
    for start, end, label in intervals:
        if end <= start:
            continue
        first, last = (_column(min(max(row, 0), size), size) for row in (start, end))
        for column in range(first, last + 1):
            cells[column] = "|" if column in (first, last) else "-" if cells[column] == " " else cells[column]
        room = last - first - 1
        if room >= len(label):
            begin = first + 1 + (room - len(label)) // 2
            cells[begin : begin + len(label)] = label
    return "".join(cells)


def span(word: str, first: int, end: int) -> str:
    """'row 3', 'rows 3 and 4', 'rows 3 to 7'."""
    return f"{word} {first}" if end == first + 1 else f"{word}s {first} {'to' if end > first + 2 else 'and'} {end - 1}"


def close(got: np.ndarray, want: np.ndarray, tol: float) -> np.ndarray:
    """Element by element; what is small is measured against the root mean square of what is wanted."""
    finite = want[np.isfinite(want)].astype(np.float32)
    size = float(np.sqrt(np.mean(np.square(finite)))) if finite.any() else 1.0
    return np.isclose(got, want, rtol=tol, atol=tol * size, equal_nan=True)


def first_wrong(got: np.ndarray, want: np.ndarray, tol: float = 0.0) -> list[int]:
    """The first place along axis 0 where two arrays differ, as a list; [] where they do not, or have other shapes."""
    if got.shape != want.shape:
        return []
    wrong = ~close(np.atleast_1d(got), np.atleast_1d(want), tol)
    return np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[:1].tolist()


class Groups(NamedTuple):
    """Groups of rows, one behind the other, in tiles of bm rows."""

    sizes: list[int]
    num_rows: int
    bm: int
    visits: list[Visit]

    def rows(self, group: int) -> tuple[int, int]:
        first = sum(self.sizes[:group])
        return first, first + self.sizes[group]

    def shown(self, tile: int, group: int | None) -> str:
        if group is None:
            return f"for tile {tile}, where all rows are unowned"
        if not self.sizes[group]:
            return f"for tile {tile} and group {group}, which has no rows"
        (first, end), start = self.rows(group), tile * self.bm
        return f"for tile {tile} and group {group}, {span('row', max(first, start), min(end, start + self.bm))}"

    def in_vain(self, count: int) -> str:
        return f"{count * self.bm} more rows would be multiplied for nothing"


Entry = Callable[[Groups, int, int, int], str]  # (groups, place, what stands there, what should) -> what that means


def an_offset(at: Groups, n: int, mine: int, right: int) -> str:
    if n == 0:
        return f"Group 0 begins at row 0. With {mine}, the rows before it would be left out."
    before = listed(list(map(str, at.sizes[:n]))) if n < 8 else f"the first {n} sizes"
    has = plural(at.sizes[n - 1] + mine - right, "row")
    return f"Group {n - 1} ends at row {right}, the sum of {before}. With {mine} it would have {has}."


def tiles_of_a_group(at: Groups, g: int, mine: int, right: int) -> str:
    (first, end), bm = at.rows(g), at.bm
    has = f"{span('row', first, end)}, in {span('tile', first // bm, first // bm + right)}" if right else "no rows"
    lost = f"{span('row', max(first, (first // bm + mine) * bm), end)} would be left out"
    return f"Group {g} has {has}. With {mine}, {lost if mine < right else at.in_vain(mine - right)}."


def group_of_a_visit(at: Groups, n: int, mine: int, right: int) -> str:
    return of_a_visit("group", [v for v in at.visits if v[1] is not None], len(at.sizes), at, n, mine, right)


def tile_of_a_visit(at: Groups, n: int, mine: int, right: int) -> str:
    return of_a_visit("tile", at.visits, pl.cdiv(at.num_rows, at.bm), at, n, mine, right)


def of_a_visit(what: str, visits: list[Visit], count: int, at: Groups, n: int, mine: int, right: int) -> str:
    """visits: those that are for a group, or for a tile. count: how many groups, or tiles, there are."""
    if n >= len(visits) and right < 0:
        return (
            f"Place {n} comes after the last visit: any {what} from 0 to {count - 1} will do there (-1: any of them)."
        )
    if n >= len(visits):
        return f"Place {n} comes after the last visit for a {what}: repeat {what} {right} there."
    tile, group = visits[n]
    lost = "these rows" if group is not None and at.sizes[group] else "these zeros"
    effect = f"{lost} would be missing from the result"
    if what == "tile" and group is not None and not at.sizes[group]:
        effect = f"it would not be at tile {right}, where the group begins (the last tile, behind the last row)"
    if not 0 <= mine < count:
        effect = f"the index map would leave the array: there are {plural(count, what)}"
    return f"Visit {n} is {at.shown(tile, group)}. With {what} {mine}, {effect}."


def visits_of_a_tile(at: Groups, tile: int, mine: int, right: int) -> str:
    has = listed([f"group {g}" for t, g in at.visits if t == tile and g is not None])
    rows = f"Tile {tile} has rows of {has}" if has else f"All rows of tile {tile} are unowned"
    lost = "some of its rows would be missing from the result" if has else "its zeros would be missing"
    return f"{rows}: {plural(right, 'visit')}. With {mine}, {lost if mine < right else at.in_vain(mine - right)}."


def number_of_visits(at: Groups, _: int, mine: int, right: int) -> str:
    last = f"the kernel would stop before visit {mine}, {at.shown(*at.visits[min(mine, right - 1)])}"
    return f"There are {right} visits. With {mine}, {last if mine < right else at.in_vain(mine - right)}."


METADATA: tuple[Entry, ...] = (an_offset, group_of_a_visit, tile_of_a_visit, number_of_visits)

PLACES = "There are {G} groups in {T} tiles: at most {T} + {G} - 1 = {V} visits, one more for each group but the first."
LENGTHS: dict[Entry, str] = {
    an_offset: "There are {G} groups, so there are {G} + 1 offsets: where each begins, and where the last one ends.",
    tiles_of_a_group: "There are {G} groups: return one number for each.",
    visits_of_a_tile: "{T} tiles hold all rows: return one number for each.",
    group_of_a_visit: PLACES,
    tile_of_a_visit: PLACES,
    number_of_visits: "The number of visits is one number, of shape ().",
}


def wrong_lists(nb: Any, *entries: Entry, every_group: bool = False) -> Callable[..., Explained]:
    """What the first wrong entry of the first wrong list means. entries: what tells of each list in the result.

    every_group: the visits are those of Puzzle 7a. Empty groups have one, and tiles of unowned rows have none.
    """

    def explain(group_sizes: Any, *, got: Any, want: Any, num_rows: int, bm: int) -> Explained:
        sizes, picture = group_sizes.tolist(), draw_groups(group_sizes, num_rows=num_rows, bm=bm)
        visits = nb.visits_by_hand(group_sizes, num_rows, bm)
        if every_group:
            visits = [*zip(want.m_tile_ids.tolist(), want.group_ids.tolist(), strict=True)][: int(want.num_tiles)]
        at = Groups(sizes, num_rows, bm, visits)
        for entry, mine, right in zip(entries, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if mine.shape != right.shape:
                return LENGTHS[entry].format(G=len(sizes), T=pl.cdiv(num_rows, bm), V=right.size), picture
            for n in first_wrong(mine, right):
                return entry(at, n, int(mine.flat[n]), int(right.flat[n])), picture
        return "", picture

    return explain


def floats(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float32) for a in arrays]


def owners(group_sizes: Any, num_rows: int) -> np.ndarray:
    """The group of each row; -1 for unowned rows."""
    owned = np.repeat(np.arange(len(group_sizes)), group_sizes)
    return np.concatenate([owned, np.full(num_rows - len(owned), -1)])


def wrong_rows(whose: list[str], bm: int, got: Any, want: Any, values: dict[str, np.ndarray], tol: float) -> str:
    """The first run of wrong rows that hold something known. whose: the owner of each row, "" where there is none.

    values: what a row may hold, by its name.
    """
    got, want = floats(got, want)
    wrong = ~close(got, want, tol)
    known = {"0": np.zeros_like(want), "NaN": np.full_like(want, np.nan), **values}

    def held(r: int) -> str:
        near = (name for name, value in known.items() if close(got[r], value[r], tol)[wrong[r]].all())
        return next(near, "") if wrong[r].any() else ""

    labels = [(held(r), owner, r // bm) for r, owner in enumerate(whose)]
    for (name, owner, tile), run in itertools.groupby(range(len(labels)), labels.__getitem__):
        rows = [*run]
        if name:
            are, belong, hold = ("is", "belongs", "holds") if len(rows) == 1 else ("are", "belong", "hold")
            owned = f"{belong} to {owner}" if owner else f"{are} unowned"
            return f"{span('Row', rows[0], rows[-1] + 1)}, in tile {tile}, {owned} and {hold} {name}."
    return ""


def rows_of_groups(
    got: Any, want: Any, group_sizes: Any, bm: int, values: dict[str, np.ndarray], tol: float
) -> Explained:
    whose = [f"group {group}" if group >= 0 else "" for group in owners(group_sizes, len(want))]
    return wrong_rows(whose, bm, got, want, values, tol), draw_groups(group_sizes, num_rows=len(want), bm=bm)


def products(x: Any, w: Any) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return {f"the product with w[{g}]": np.dot(*floats(x, weights)) for g, weights in enumerate(w)}


def explain_tiles(experts: Any, x: Any, w: Any, *, got: Any, want: Any, **_: Any) -> Explained:
    bm = len(x) // len(experts)
    whose = [f"expert {expert}" for expert in np.repeat(experts, bm)]
    return wrong_rows(whose, bm, got, want, products(x, w), tol=2e-2), ""


def explain_bias(x: Any, bias: Any, group_sizes: Any, *, got: Any, want: Any, bm: int, **_: Any) -> Explained:
    values = {"x itself": x, **{f"x + bias[{g}]": x + row for g, row in enumerate(bias)}}
    return rows_of_groups(got, want, group_sizes, bm, values, tol=1e-4)


def explain_product(
    x: Any, w: Any, group_sizes: Any, *, got: Any, want: Any, bm: int, turned: bool = False, **_: Any
) -> Explained:
    values = products(x, np.swapaxes(w, 1, 2) if turned else w)
    return rows_of_groups(got, want, group_sizes, bm, values, tol=2e-2)


def explain_grads(x: Any, w: Any, group_sizes: Any, g: Any, *, got: Any, want: Any, bm: int, **_: Any) -> Explained:
    picture = draw_groups(group_sizes, num_rows=len(x), bm=bm)
    x, g, *got = floats(x, g, *got)
    want = floats(*want)
    for name, mine, right in zip(("y", "dx"), got, want, strict=False):
        if first_wrong(mine, right, 2e-2):
            return f"{name} comes from your kernel of Puzzle 6, and is wrong.", picture
    for e in first_wrong(got[2], want[2], 2e-2):
        owner = owners(group_sizes, len(x))
        right = over(owner == e) or f"0, because group {e} has no rows"
        return f"dw[{e}] should be {right}.{summed(got[2][e], x, g, owner, bm)}", picture
    return "", picture


def over(inside: np.ndarray) -> str:
    """'the sum over rows 64 to 127', for a mask of rows."""
    edges = np.flatnonzero(np.diff(inside.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
    return f"the sum over {listed([span('row', *edge) for edge in edges])}" if edges else ""


def summed(dw: np.ndarray, x: np.ndarray, g: np.ndarray, owner: np.ndarray, bm: int) -> str:
    """Over which rows a sum of x.T @ g is, found by least squares; "" if they are not whole parts of tiles."""
    parts = [[*run] for _, run in itertools.groupby(range(len(x)), lambda r: (owner[r], r // bm))]
    sums = np.stack([(x[rows].T @ g[rows]).ravel() for rows in parts], axis=1)
    if not (np.isfinite(dw).all() and np.isfinite(sums).all()):
        return ""
    shares = np.linalg.lstsq(sums, dw.ravel())[0].round(1)
    if not np.isin(shares, (0, 1)).all() or not close(sums @ shares, dw.ravel(), 2e-2).all():
        return ""
    return f" Yours is {over(np.repeat(shares, [len(rows) for rows in parts])) or 0}."


def shown(numbers: Any) -> list[float]:
    return [round(float(number), 3) for number in numbers]


def table(*rows: tuple[str, Any]) -> str:
    """Rows of (a name, its numbers), one column below the other."""
    texts = [(name, [f"{n:.3f}" if isinstance(n, float) else str(n) for n in numbers]) for name, numbers in rows]
    first = max(len(name) for name, _ in texts)
    wide = max(len(cell) for _, cells in texts for cell in cells)
    return "\n".join(f"{name:{first}}" + "".join(f"  {cell:>{wide}}" for cell in cells) for name, cells in texts)


def with_sum(numbers: Any) -> list[Any]:
    return [*map(float, numbers), "sum", float(np.sum(numbers))]


def explain_gate(logits: Any, *, got: Any, want: Any, **_: Any) -> Explained:
    for t in first_wrong(got.experts, want.experts):
        right, mine = want.experts[t].tolist(), got.experts[t].tolist()
        both = [(f"token {t}: right", right), ("yours", [e for e in mine if 0 <= e < logits.shape[1]])]
        rows = [row for name, of in both for row in ((name, of), ("  logits", [float(logits[t, e]) for e in of]))]
        words = "The best expert comes first." if sorted(mine) == sorted(right) else "Choose the largest logits."
        return words, table(*rows)
    for t in first_wrong(got.weights, want.weights, 1e-4):
        mine, total = got.weights[t], float(np.sum(got.weights[t]))
        picture = table(
            (f"token {t}: expert", want.experts[t].tolist()),
            ("logits", [float(n) for n in logits[t, want.experts[t]]]),
            ("yours", with_sum(mine)),
            ("right", with_sum(want.weights[t])),
        )
        if not np.isclose(total, 1, atol=1e-3):
            return f"The weights of token {t} sum to {total:.3g}, not 1.", picture
        return f"See the weights of token {t}.", picture
    return "", ""


def explain_permuted(x: Any, experts: Any, weights: Any, *, got: Any, want: Any, **_: Any) -> Explained:
    slots, k = experts.ravel(), experts.shape[1]
    for p in first_wrong(got.order, want.order):
        mine, right = int(got.order[p]), int(want.order[p])
        whose = f"of expert {slots[mine]}" if 0 <= mine < len(slots) else "which does not exist"
        return f"Position {p} should hold slot {right}, of expert {slots[right]}. Yours holds slot {mine}, {whose}.", ""
    for e in first_wrong(got.group_sizes, want.group_sizes):
        size = plural(int(want.group_sizes[e]), "slot")
        effect = "rows of later experts would get the wrong weights"
        return f"Expert {e} has {size}. With {got.group_sizes[e]}, {effect}.", ""
    for t in first_wrong(got.result, want.result, 1e-4):
        picture = table(
            (f"token {t}: slot", [*range(t * k, (t + 1) * k)]),
            ("row, sorted", np.argsort(want.order)[t * k : (t + 1) * k].tolist()),
            ("weight", [float(n) for n in weights[t]]),
        )
        return f"Add up the rows of token {t}, each times its weight.", picture
    return "", ""


def explain_expand(g: Any, order: Any, *, got: Any, want: Any, k: int, **_: Any) -> Explained:
    for t in first_wrong(got, want, 1e-4):
        slots = [*range(t * k, (t + 1) * k)]
        rows = np.argsort(order)[slots].tolist()
        picture = table((f"token {t}: slot", slots), ("row of g", rows))
        for taken, why in ((order[slots].tolist(), "these are numbers of order"), (rows[:1], "one is not enough")):
            if close(got[t], floats(g)[0][taken].sum(axis=0), 1e-4).all():
                return f"For token {t} you add {span_of(taken)}: {why}.", picture
        return f"For token {t}, add {span_of(rows)} of g.", picture
    return "", ""


def span_of(rows: list[int]) -> str:
    return f"row{'s' * (len(rows) > 1)} {listed(list(map(str, rows)))}"


def explain_moe(nb: Any) -> Callable[..., Explained]:
    """What a wrong result of the layer means: the token that is furthest off, or the first wrong gradient."""

    def explain(x: Any, router: Any, *_: Any, got: Any, want: Any, k: int, **__: Any) -> Explained:
        results = {name: floats(*both) for name, *both in zip(want._fields, got, want, strict=True)}
        wrong = [name for name, (mine, right) in results.items() if first_wrong(mine, right, 0.15)]
        if "y" in wrong:
            t = int(np.argmax(np.abs(np.subtract(*results["y"])).max(axis=1)))
            weights, experts = nb.gate_spec(np.dot(*floats(x[t : t + 1], router)), k=k)
            goes = f"experts {experts[0].tolist()}, with weights {shown(weights[0])}"
            return f"In moe_layer, the result of token {t} is furthest off. The token should go to {goes}.", ""
        if not wrong:
            return "", ""
        lost = [name for name in wrong if not results[name][0].any()]
        head = f"y is right, but {listed(wrong)} {'is' if len(wrong) == 1 else 'are'} not"
        if lost:
            return f"{head}: {listed(lost)} is 0 everywhere. Something in moe_layer keeps a gradient back.", ""
        return f"{head}. Something in moe_layer changes a gradient.", ""

    return explain
