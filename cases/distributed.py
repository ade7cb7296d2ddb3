"""What the checks of distributed.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_puzzles.course.claims import helper_claim
from pallas_puzzles.course.inputs import Budget, Question, case, integers, normal, question

BF16 = "bfloat16"


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *(normal((16, 128)), normal((128, 256), scale=0.1), normal((256, 128), scale=0.1)),
        variants=[
            case(
                *(normal((6, 24)), normal((24, 40)), normal((40, 24))),
                devices=4,
                budget=Budget(bytes_hops=3_456),
                about="four devices",
            ),
            case(*(normal((9, 24)), normal((24, 36)), normal((36, 24))), devices=3, about="three devices"),
        ],
        budget=Budget(bytes_hops=114_688),
        kernel=False,
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *(normal((16, 128)), normal((128, 256), scale=0.1), normal((256, 128), scale=0.1)),
        variants=[
            case(
                *(normal((12, 24), BF16), normal((24, 40), BF16), normal((40, 24), BF16)),
                devices=4,
                budget=Budget(bytes_hops=3_456),
                about="four devices, bfloat16, three rows a device",
            ),
            case(
                *(normal((64, 32)), normal((32, 16)), normal((16, 32))),
                budget=Budget(bytes_hops=114_688),
                about="more rows than weights",
            ),
            case(*(normal((9, 24)), normal((24, 36)), normal((36, 24))), devices=3, about="three devices"),
        ],
        budget=Budget(bytes_hops=114_688),
        kernel=False,
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.rotate_spec,
        normal((64, 128)),
        variants=[
            case(normal((60, 256)), devices=5, budget=Budget(bytes_hops=61_440), about="five devices, 12 rows each"),
            case(normal((24, 384)), devices=3, about="three devices, 384 columns"),
        ],
        budget=Budget(bytes_hops=32_768),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.exchange_spec,
        normal((64, 8, 128)),
        variants=[case(normal((25, 24, 384)), devices=5, about="five devices")],
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.gather_spec,
        normal((64, 128)),
        variants=[
            case(normal((40, 256)), devices=5, budget=Budget(bytes_hops=163_840), about="five devices"),
            case(normal((36, 384)), devices=3, about="three devices, 384 columns"),
        ],
        budget=Budget(bytes_hops=229_376),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.total_spec,
        normal((64, 128)),
        variants=[
            case(normal((40, 256)), devices=5, about="five devices"),
            case(normal((36, 384)), devices=3, about="three devices, 384 columns"),
        ],
        budget=Budget(exposed_ici_bytes=80_000),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.reduce_spec,
        normal((64, 16, 128)),
        variants=[
            case(
                normal((25, 24, 256)),
                devices=5,
                budget=Budget(link_bytes=98_304, hbm_bytes=294_912, vmem_bytes=49_152),
                about="five devices",
            ),
            case(normal((9, 24, 384)), devices=3, about="three devices, 384 columns"),
        ],
        budget=Budget(link_bytes=57_344, hbm_bytes=172_032),
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.halves_spec,
        normal((64, 2, 8, 128)),
        variants=[
            case(
                normal((25, 2, 16, 256)),
                devices=5,
                budget=Budget(link_bytes=65_536, vmem_bytes=49_152),
                about="five devices",
            ),
            case(normal((9, 2, 24, 384)), devices=3, about="three devices, 384 columns"),
        ],
        budget=Budget(link_bytes=28_672, exposed_ici_bytes=150_000, hbm_bytes=172_032),
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.grid_gather_spec,
        normal((64, 128)),
        variants=[
            case(
                normal((48, 256)),
                rows=3,
                columns=2,
                budget=Budget(bytes_hops=245_760, link_bytes=32_768),
                about="three rows of two devices",
            ),
            case(normal((48, 384)), rows=2, columns=3, about="two rows of three devices"),
        ],
        budget=Budget(bytes_hops=229_376, link_bytes=16_384),
    )


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.recut_spec,
        normal((64, 1024)),
        variants=[case(normal((80, 1280)), devices=5, budget=Budget(bytes_hops=491_520), about="five devices")],
        budget=Budget(bytes_hops=524_288),
    )


def puzzle_11a(nb: Any) -> Question:
    uneven = np.array([[0, 0, 9, 0, 0, 2], [5, 0, 0, 0, 0, 0], [1, 0, 3, 0, 7, 4]], np.int32)
    return question(
        nb.plan_spec,
        integers((4, 8), 0, 5),
        variants=[
            case(uneven, about="three devices, an expert without rows"),
            case(integers((5, 5), 0, 900), about="hundreds of rows"),
        ],
        budget=Budget(operations=48),
        kernel=False,
    )


# What works outside of the kernels: integers, sorting, and the rows that are put in order
_ORDER = "int32 bool sort gather scatter select_n max broadcast_in_dim".split()


def _experts(rows: int, chosen: list[int], seed: int = 0) -> np.ndarray:
    """The expert of each row: one of those chosen."""
    return np.random.default_rng(seed).choice(np.array(chosen, np.int32), rows).astype(np.int32)


# Eight experts on four devices: many rows for expert 3, few for others, none for device 2 (experts 4 and 5)
_UNEVEN = [0, 1, 2, 3, 3, 3, 3, 6, 7]


def _send_one(nb: Any, x: Any) -> Any:
    """One row of the three that each of four devices has, to each device: two stay behind."""

    def local(x: Any) -> Any:
        me, four = lax.axis_index("x"), jnp.ones(4, jnp.int32)
        return nb.send_rows(x, four, four, me * four, 4, num_rows=4)

    return nb.on_mesh(local, 4, P("x", None), P("x", None))(x)


def _sent_one(x: Any) -> Any:
    return jnp.tile(x[1::3], (4, 1))


def puzzle_11b(nb: Any) -> Question:
    return question(
        nb.dispatch_spec,
        normal((48, 128)),
        _experts(48, _UNEVEN),
        variants=[
            case(
                *(normal((40, 128)), _experts(40, [9, 10])),
                devices=5,
                num_experts=20,
                about="five devices with four experts each, all rows for one device",
            ),
            case(
                *(normal((36, 384)), _experts(36, [0, 1, 2, 4, 8])),
                devices=3,
                num_experts=9,
                about="three devices with three experts each",
            ),
        ],
        budget=Budget(bytes_hops=25_984, copies=19),
        allow=_ORDER,
        claims=[  # so Puzzle 11c sends rows back
            helper_claim(nb.send_rows, _sent_one, normal((12, 128)), call=functools.partial(_send_one, nb))
        ],
    )


def puzzle_11c(nb: Any) -> Question:
    def weights(E: int, D: int, F: int) -> list[Any]:
        return [normal((E, D, F), scale=D**-0.5), normal((E, F, D), scale=F**-0.5)]

    return question(
        nb.moe_spec,
        *(normal((48, 128)), _experts(48, _UNEVEN), *weights(8, 128, 256)),
        variants=[
            case(
                *(normal((80, 256)), _experts(80, [7, 8]), *weights(15, 256, 128)),
                devices=5,
                about="five devices with three experts each, all rows for one device",
            ),
            case(
                *(normal((36, 384)), _experts(36, [0, 1, 2, 4, 8]), *weights(9, 384, 384)),
                devices=3,
                about="three devices with three experts each",
            ),
        ],
        budget=Budget(grid_steps=8, bytes_hops=51_584),
        allow=_ORDER,
        tol=1e-4,
    )


def puzzle_12a(nb: Any) -> Question:
    low = [normal((40, 256), shift=3.0), normal((40, 256), shift=-3.0), normal((40, 256))]
    wide = [normal((120, 256), scale=9.0), normal((120, 256), scale=9.0), normal((120, 256))]

    return question(
        nb.attention_spec,
        *(normal((128, 128), scale=2.0), normal((128, 128), scale=2.0), normal((128, 128))),
        variants=[
            case(*low, devices=5, about="five devices, scores of about -144"),
            case(*wide, devices=5, about="five devices, scores from -300 to 300"),
            case(*(normal((72, 384)), normal((72, 384)), normal((72, 384))), devices=3, about="three devices"),
        ],
        budget=Budget(bytes_hops=917_504, exposed_ici_bytes=100_000),
        tol=1e-3,
    )


def puzzle_12b(nb: Any) -> Question:
    return question(
        nb.gather_matmul_spec,
        *(normal((64, 128)), normal((128, 2048), scale=0.1)),
        variants=[
            case(normal((80, 256)), normal((256, 1920), scale=0.1), devices=5, about="five devices"),
            case(normal((72, 384)), normal((384, 576), scale=0.1), devices=3, about="three devices"),
        ],
        budget=Budget(bytes_hops=229_376, exposed_ici_bytes=10_000),
    )


def puzzle_12c(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *(normal((64, 128)), normal((128, 2048), scale=0.1), normal((2048, 128), scale=0.05)),
        variants=[
            case(
                *(normal((80, 256)), normal((256, 640), scale=0.1), normal((640, 256), scale=0.05)),
                devices=5,
                about="five devices",
            ),
            case(
                *(normal((72, 384)), normal((384, 576), scale=0.1), normal((576, 384), scale=0.05)),
                devices=3,
                about="three devices",
            ),
        ],
        budget=Budget(bytes_hops=458_752, exposed_ici_bytes=20_000),
        allow=["max"],
    )
