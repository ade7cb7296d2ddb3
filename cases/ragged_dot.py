"""What the checks of ragged_dot.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_puzzles.course import explain
from pallas_puzzles.course.claims import helper_claim
from pallas_puzzles.course.inputs import Budget, Case, Question, case, groups, integers, normal, question, uniform


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
        ],
        budget=Budget(hbm_bytes=1_474_560, vmem_bytes=229_376, calls=1, mxu_bits=16),
        explain=explain.by_tile,
    )


def sizes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


GROUPINGS = [  # 1024 rows, where nothing else is said
    case(sizes(30, 10, 88), num_rows=150, bm=64, about="three tiles, the last not whole, and 22 rows in no group"),
    case(sizes(256, 256, 256, 256), about="equal groups"),
    case(groups(6, 1024), about="random groups"),
    case(sizes(0, 50, 50, 924), about="the first group is empty"),
    case(sizes(300, 0, 0, 724), about="empty groups in the middle"),
    case(sizes(512, 511, 1, 0), about="a group of one row, and an empty one after it"),
    case(sizes(0, 1024, 0), about="one group has all rows"),
    case(sizes(260, 30, 40, 50, 644), about="three and two halves of groups in one tile"),
    case(sizes(200, 28, 100), about="696 rows in no group"),
    case(sizes(0, 0, 0, 0), about="all groups are empty"),
    case(groups(40, 999), num_rows=1000, bm=64, about="40 groups, and the last tile is not whole"),
]


def puzzle_2a(nb: Any) -> Question:
    return question(
        nb.offsets_spec,
        sizes(100, 100, 824),
        variants=[
            *[case(*each.inputs, about=each.about) for each in GROUPINGS],
            case(sizes(30_000, 20_000, 7), about="offsets beyond 16 bits"),
            case(groups(40, 999), budget=Budget(operations=40)),
        ],
        kernel=False,
        explain=explain.offsets,
    )


def puzzle_2b(nb: Any) -> Question:
    return question(
        nb.tiles_per_group_spec,
        sizes(100, 100, 824),
        variants=[*GROUPINGS, case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=60, elements=128))],
        kernel=False,
        explain=explain.tiles,
    )


def puzzle_2c(nb: Any) -> Question:
    return question(
        nb.group_ids_spec,
        sizes(100, 100, 824),
        variants=[*GROUPINGS, case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=120))],
        kernel=False,
        explain=explain.group_ids,
    )


def puzzle_2d(nb: Any) -> Question:
    return question(
        nb.tile_visits_spec,
        sizes(100, 100, 824),
        variants=[*GROUPINGS, case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=80, elements=128))],
        kernel=False,
        explain=explain.tile_visits,
    )


def puzzle_2e(nb: Any) -> Question:
    return question(
        nb.m_tile_ids_spec,
        sizes(100, 100, 824),
        variants=[*GROUPINGS, case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=120))],
        kernel=False,
        explain=explain.tile_ids,
    )


def puzzle_2f(nb: Any) -> Question:
    return question(
        nb.metadata_spec,
        sizes(200, 28, 100),
        variants=[
            case(sizes(100, 100, 824)),
            *GROUPINGS,
            case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=250)),
        ],
        kernel=False,
        explain=explain.metadata,
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.expert_bias_spec,
        normal((256, 384), scale=100.0),
        normal((3, 1, 384)),
        sizes(100, 28, 128),
        variants=[
            case(normal((512, 256)), normal((5, 1, 256), shift=2.0), groups(5, 512), bm=128),
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
                about="whole tiles in no group",
            ),
            case(normal((200, 256)), normal((2, 1, 256)), sizes(90, 50), bm=40),
            case(normal((96, 128)), normal((3, 1, 128)), sizes(0, 0, 0), bm=16, about="all groups are empty"),
        ],
        budget=Budget(hbm_bytes=791_040, vmem_bytes=132_096, calls=1),
        allow=["int32", "bool"],
        explain=explain.bias,
    )


def sum_over_k_kernel(
    offsets_ref: Any, group_ids_ref: Any, m_tile_ids_ref: Any, x_ref: Any, w_ref: Any, o_ref: Any, acc_ref: Any
) -> None:
    before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])
    acc_ref[...] = before + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def puzzle_4(nb: Any) -> Question:
    def in_two_steps(x: Any, w: Any, group_sizes: Any) -> Any:
        """The wiring with a kernel that sums over blocks of K: whole_k_kernel has one block, and needs no scratch."""
        meta = nb.metadata(group_sizes, num_rows=x.shape[0], bm=32)
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
            ),
        ],
        budget=Budget(grid_steps=18, hbm_bytes=1_474_560, vmem_bytes=262_144, serial_steps=6, calls=1),
        allow=["int32", "bool"],
        forbid=("ragged_dot", "ragged_dot_general", "gmm"),
        explain=explain.product,
        explain_cost=explain.wiring,
        tol=8e-3,  # about one unit in the last place of a bfloat16
        claims=[
            helper_claim(
                nb.grouped,
                nb.grouped_spec,
                normal((96, 256), "bfloat16"),
                normal((2, 256, 256), "bfloat16"),
                np.array([32, 64], np.int32),
                call=in_two_steps,
            )
        ],
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.grouped_spec,
        normal((384, 512), "bfloat16"),
        normal((3, 512, 256), "bfloat16"),
        sizes(128, 128, 128),
        variants=[
            case(
                normal((192, 768), "bfloat16", shift=0.5),
                normal((4, 768, 320), "bfloat16"),
                sizes(96, 0, 32, 64),
                bm=32,
                bk=256,
                budget=Budget(output_stores=1, calls=1, mxu_bits=16),
            ),
            case(
                normal((512, 384), "bfloat16"),
                normal((2, 384, 512), "bfloat16"),
                sizes(384, 128),
                bm=128,
                bn=256,
                bk=384,
                budget=Budget(hbm_bytes=2_097_152, output_stores=1, calls=1),
                about="K in one block: the weights of each expert once",
            ),
        ],
        budget=Budget(hbm_bytes=2_555_904, vmem_bytes=163_840, output_stores=1, calls=1, mxu_bits=16),
        allow=["int32", "bool"],
        explain=explain.product,
        tol=8e-3,
    )


def ragged_case(num_rows: int, K: int, N: int, group_sizes: Any, *, overflown: int | None = None, **more: Any) -> Case:
    """x, w and sizes for num_rows rows; the values of x are far from 0, so that a stranger's row is far from right. The
    weights of the expert `overflown` have become infinite: that is its own affair, and nobody else's."""
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
                about="three and two halves of groups in one tile",
            ),
            ragged_case(
                64, 128, 256, sizes(20, 24, 20), bm=32, bn=256, overflown=1, about="the weights of group 1 are infinite"
            ),
            ragged_case(96, 128, 128, sizes(40, 30), bm=48, turned=True),
            ragged_case(256, 384, 256, sizes(0, 256, 0), bm=32, bk=384, about="one group has all rows"),
            ragged_case(384, 256, 320, sizes(70, 0, 58, 29), bm=48, about="227 rows in no group"),
            ragged_case(300, 512, 128, groups(7, 300), bm=112, bk=256, about="the last tile hangs over the edge"),
            ragged_case(96, 256, 256, sizes(0, 0), bm=16, bn=256, about="all groups are empty"),
            ragged_case(160, 128, 512, sizes(40, 40, 40, 40), bm=80, bn=512, budget=Budget(grid_steps=4, calls=1)),
        ],
        budget=Budget(grid_steps=60, hbm_bytes=4_718_592, vmem_bytes=262_144, calls=1, mxu_bits=16, output_stores=2),
        allow=["int32", "bool"],
        forbid=("ragged_dot", "ragged_dot_general", "gmm"),
        explain=explain.product,
        tol=8e-3,
    )


def puzzle_7a(nb: Any) -> Question:
    return question(
        nb.every_group_spec,
        sizes(0, 1024, 0),
        variants=[
            case(sizes(100, 100, 824)),
            *GROUPINGS,
            case(groups(40, 999), num_rows=1000, bm=32, budget=Budget(operations=200)),
        ],
        kernel=False,
        explain=explain.every_group,
    )


def grads_case(num_rows: int, K: int, N: int, group_sizes: Any, **more: Any) -> Case:
    """x, w, sizes and g; x and g have a mean, so that a stranger's rows do not average out."""
    x, w, group_sizes = ragged_case(num_rows, K, N, group_sizes).inputs
    return case(x, w, group_sizes, normal((num_rows, N), "bfloat16", shift=0.5), **more)


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
                about="empty groups in the middle, and rows in no group",
            ),
            grads_case(160, 256, 256, sizes(40, 120, 0), bm=32, bn=256, bk=256, about="the last group is empty"),
            grads_case(200, 128, 128, groups(6, 200), bm=112, about="the last tile hangs over the edge"),
            grads_case(128, 256, 128, sizes(0, 128, 0), bm=80, bk=256, about="one group has all rows"),
            grads_case(96, 128, 384, sizes(0, 0), bm=16, bn=384, about="all groups are empty"),
        ],
        budget=Budget(hbm_bytes=4_653_056, vmem_bytes=196_608, calls=3, mxu_bits=16),
        allow=["int32", "bool"],
        explain=explain.grads,
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
        ],
        kernel=False,
        explain=explain.gate,
    )


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
            case(  # a table of slots against tokens would have 18,432 elements
                normal((96, 4)), integers((96, 2), 0, 5), uniform((96, 2)), budget=Budget(elements=1024)
            ),
        ],
        kernel=False,
        forbid={
            "at": "at[...] scatters rows: the inverse permutation fetches them.",
            "segment_sum": "segment_sum scatters rows: the inverse permutation fetches them.",
        },
        explain=explain.permuted,
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
    "add_any sub mul div neg max min exp log integer_pow square logistic tanh reduce_max reduce_sum"
).split()


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.moe_spec,
        *moe_case(48, 128, 256, 5, unloved=3).inputs,
        variants=[
            moe_case(
                64,
                128,
                256,
                6,
                unloved=0,
                k=1,
                bm=48,
                bn=256,
                budget=Budget(grid_steps=40),
                about="no token chooses expert 0",
            ),
            moe_case(40, 256, 128, 3, bm=80, bk=256, budget=Budget(grid_steps=20)),  # the blocks of the call are used
        ],
        budget=Budget(calls=6, mxu_bits=16, outside_flops=184_320),
        allow=MOE_OUTSIDE,
        forbid={
            "at": "at[...].add is the scatter that this puzzle does without.",
            "segment_sum": "segment_sum is a scatter-add, and this puzzle does without.",
            "vjp": "the gradient of a gather is a scatter-add, and this puzzle does without.",
            "linear_transpose": "the transpose of a gather is a scatter-add, and this puzzle does without.",
            "scatter-add": "JAX has made a scatter-add, into shape {shape}, of the gradient of a gather, as of "
            "`x[order // k]`. In moe_layer, rows of tokens come from expand, which has your expand_grad for a "
            "gradient; in there, the inverse of order fetches them.",
            "ragged_dot": "ragged_dot does the work for you, and you have written your own.",
        },
        explain=explain.moe,
        tol=0.15,  # of a few hundred thousand gradients the worst is off by 0.06 in bfloat16
    )
