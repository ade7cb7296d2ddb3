"""What the checks of ladder.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles.course.claims import Claim, Count, hbm_claim, programs_claim, time_choice, time_claim
from pallas_puzzles.course.inputs import Budget, Question, case, normal, question

HEADS = [normal((2, 64, 32), "bfloat16") for _ in range(3)]
SOFTMAX = ("softmax", "log_softmax", "logsumexp", "dot_product_attention")


def shapes_of(fn: Any, H: int, T: int, D: int) -> tuple[Any, list[Any]]:
    return fn, [jax.ShapeDtypeStruct((H, T, D), jnp.bfloat16)] * 3


SIZES = ((8, 4096, 128), (2, 1024, 64), (3, 512, 128))


def puzzle_1(nb: Any) -> Question:
    run = functools.partial(shapes_of, nb.attention)
    return question(nb.attention_spec, *HEADS, kernel=False, claims=[programs_claim(nb.eager_bytes, run, *SIZES)])


def puzzle_2(nb: Any) -> Question:
    run = functools.partial(shapes_of, nb.fused_attention)
    return question(nb.attention_spec, *HEADS, kernel=False, claims=[programs_claim(nb.fused_bytes, run, *SIZES)])


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        *[normal((2, 512, 16), "bfloat16") for _ in range(3)],
        variants=[
            case(
                *[normal((3, 320, 32), "bfloat16", shift=0.5) for _ in range(3)],
                c=32,
                budget=Budget(operations=30, elements=30_720),
            ),
            case(*[normal((1, 96, 16), "bfloat16") for _ in range(3)], c=96, about="one chunk"),
            case(
                *[normal((1, 512, 16), "bfloat16") for _ in range(3)],
                c=16,
                budget=Budget(operations=30, elements=8192),
                about="more chunks than queries in one",
            ),
        ],
        budget=Budget(operations=30, elements=65_536),
        kernel=False,
    )


def heads_of(nb: Any, H: int, T: int, D: int, bq: int, bkv: int) -> tuple[Any, tuple[Any, ...]]:
    """flash in these tiles: (function, arguments). Claims are compared with a run of it."""
    x = jnp.zeros((H, T, D), jnp.bfloat16)
    return functools.partial(nb.flash, bq=bq, bkv=bkv), (x, x, x)


TILES = ((2, 512, 64, 128, 256), (3, 384, 32, 128, 128), (1, 768, 64, 256, 128))


def puzzle_4(nb: Any) -> Question:
    def steps(H: int, T: int, bq: int, bkv: int) -> Count:
        blocks = T // bq, T // bkv
        told = [f"grid ({H}, {blocks[0]}, {blocks[1]}): a step for each"]
        mistakes = [("for one head", blocks[0] * blocks[1]), ("if there were no axis j", H * blocks[0])]
        return Count("the grid has", H * blocks[0] * blocks[1], told, mistakes)

    return question(
        nb.attention_spec,
        *[normal((2, 256, 64), "bfloat16") for _ in range(3)],
        claims=[
            hbm_claim(nb.flash_bytes, functools.partial(heads_of, nb), *TILES),
            Claim(nb.flash_steps, [(8, 4096, 128, 128), *((H, T, bq, bkv) for H, T, _, bq, bkv in TILES)], steps),
        ],
        forbid=SOFTMAX,
    )


def puzzle_5(nb: Any) -> Question:
    def any_chip(rng: np.random.Generator) -> tuple[Any, ...]:
        """H, T, D and a chip, drawn."""
        speed, room = float(rng.uniform(0.3e12, 3e12)), int(rng.integers(300_000, 1_200_000))
        chip = nb.Chip(speed, float(rng.uniform(2e9, 20e9)), room, float(rng.uniform(0.5e-6, 5e-6)))
        return int(rng.integers(1, 4)), int(rng.choice([512, 768, 1024])), int(rng.choice([32, 64])), chip

    def plans(H: int, T: int, D: int) -> list[tuple[int, int]]:
        return [(bq, bkv) for bq in nb.tiles_of(T) for bkv in nb.tiles_of(T)]

    run = functools.partial(heads_of, nb)
    timed = [(*tiles, nb.SMALL) for tiles in TILES]
    quick = nb.Chip(1e11, 50e9, 1 << 20, 1e-6)  # bound by its products
    return question(
        nb.attention_spec,
        *[normal((2, 1024, 64), "bfloat16") for _ in range(3)],
        variants=[case(*[normal((1, 768, 32), "bfloat16") for _ in range(3)], chip=quick)],
        budget=Budget(hbm_bytes=1_572_864, vmem_bytes=700_000, grid_steps=8),
        claims=[
            time_claim(nb.flash_time, lambda *plan: run(*plan[:-1]), *timed, (*TILES[0], quick)),
            time_choice(nb.pick_tiles, run, plans, any_chip),
        ],
        forbid=SOFTMAX,
    )


def mlp_inputs(M: int, D: int, F: int, shift: float = 0.0) -> list[Any]:
    return [
        normal((M, D), "bfloat16", shift=shift),
        normal((1, D), shift=1.0),
        normal((D, F), "bfloat16", scale=D**-0.5),
        normal((F, D), "bfloat16", scale=F**-0.5),
    ]


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *mlp_inputs(256, 128, 64),
        variants=[case(*mlp_inputs(64, 256, 128, shift=3.0), about="rows far from zero")],
        budget=Budget(flops=8_388_608, hbm_bytes=3_024_384),
        tol=3e-2,  # rounded at another place than in the spec
        kernel=False,
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *mlp_inputs(192, 256, 384),
        variants=[
            case(*mlp_inputs(96, 128, 640, shift=3.0), bm=32, about="rows far from zero"),
            case(*mlp_inputs(128, 384, 256), bm=128, bf=256, about="one step of j"),
        ],
        budget=Budget(flops=76_500_000, calls=1, output_stores=1, mxu_bits=16),
        tol=1.6e-2,
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.patches_spec,
        normal((3, 32, 40, 3), "bfloat16"),
        normal((8, 8, 3, 128), "bfloat16", scale=0.1),
        variants=[
            case(
                normal((2, 16, 48, 4), "bfloat16"),
                normal((16, 16, 4, 64), "bfloat16", scale=0.1),
                budget=Budget(operations=6),
                about="three patches in a row",
            ),
            case(normal((1, 12, 8, 1), "bfloat16"), normal((4, 4, 1, 32), "bfloat16"), about="one channel"),
        ],
        budget=Budget(operations=6, flops=2_949_120),
        kernel=False,
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.embed_spec,
        normal((360, 192), "bfloat16"),
        normal((192, 256), "bfloat16", scale=0.1),
        normal((1, 256)),
        variants=[
            case(
                normal((96, 384), "bfloat16"),
                normal((384, 128), "bfloat16", scale=0.1),
                normal((1, 128), shift=100.0),
                bm=32,
                budget=Budget(hbm_bytes=197_120, calls=1),
                about="a bias near 100",
            )
        ],
        budget=Budget(hbm_bytes=421_888, calls=1, mxu_bits=16),
        tol=8e-3,
    )


def lists(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = np.array(pairs, np.int32).T
    return rows, cols


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.messages_spec,
        *lists((0, 0), (0, 2), (1, 1), (2, 0), (2, 1), (2, 2)),
        normal((6, 128, 128), "bfloat16"),
        normal((384, 256), "bfloat16"),
        variants=[
            case(
                *lists((0, 3), (1, 3), (2, 0), (2, 1), (2, 2), (3, 0)),
                normal((6, 128, 128), "bfloat16", shift=0.5),
                normal((512, 128), "bfloat16"),
                budget=Budget(hbm_bytes=524_288, grid_steps=6, calls=1),
                about="the same block of x in two steps in a row",
            ),
            case(*lists((0, 0)), normal((1, 256, 256), "bfloat16"), normal((256, 128), "bfloat16"), about="one block"),
        ],
        budget=Budget(hbm_bytes=786_432, grid_steps=6, calls=1, output_stores=1, mxu_bits=16),
        tol=8e-3,
    )
