"""What the checks of matmul.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_puzzles.course.claims import (
    Claim,
    Count,
    cheapest_that_fits,
    hbm_choice,
    hbm_claim,
    measured,
    vmem_claim,
)
from pallas_puzzles.course.inputs import GRADIENTS, Budget, Case, Question, case, integers, normal, question, uniform
from pallas_puzzles.speed.work import Sizes, size, sweep


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.one_tile_spec,
        normal((192, 640), "bfloat16"),
        normal((640, 256), "bfloat16"),
        variants=[
            case(normal((64, 2048), "bfloat16", shift=1.0), normal((2048, 128), "bfloat16"), bm=32),
            case(normal((200, 384), "bfloat16"), normal((384, 128), "bfloat16"), about="200 rows in blocks of 64"),
            case(normal((64, 128), "bfloat16"), normal((128, 128), "bfloat16"), about="a single block"),
            case(normal((48, 200), "bfloat16"), normal((200, 320), "bfloat16"), bm=16, about="no size divides by 128"),
            case(
                normal((96, 201), "bfloat16"),
                normal((201, 384), "bfloat16"),
                bm=48,
                about="blocks of 48 rows, 201 columns",
            ),
        ],
        budget=Budget(hbm_bytes=770_048, vmem_bytes=622_592, mxu_bits=16),
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.product_spec,
        normal((256, 1280), "bfloat16"),
        normal((1280, 384), "bfloat16"),
        variants=[
            case(
                normal((200, 512), "bfloat16"),
                normal((512, 320), "bfloat16"),
                bk=128,
                budget=Budget(serial_steps=4, calls=1),
            ),
            case(
                normal((96, 768), "bfloat16"),
                normal((768, 512), "bfloat16"),
                bm=32,
                bn=256,
                bk=384,
                vmem_limit_bytes=48 << 20,
                budget=Budget(serial_steps=2, calls=1),
            ),
            case(
                normal((512, 128), "bfloat16"),
                normal((128, 512), "bfloat16"),
                bm=256,
                bk=128,
                budget=Budget(hbm_bytes=917_504, serial_steps=1, calls=1),
                about="all of K in one step: rows of x stay while the columns of y go by",
            ),
            case(normal((64, 256), "bfloat16"), normal((256, 128), "bfloat16"), about="a single block"),
            case(
                normal((192, 768), "bfloat16"),
                normal((768, 768), "bfloat16"),
                bm=96,
                bn=384,
                bk=384,
                vmem_limit_bytes=8 << 20,
                about="blocks of 96, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=6_094_848, vmem_bytes=262_144, serial_steps=5, calls=1),
        tol=8e-3,  # about one unit in the last place of a bfloat16
    )


def overflowing(shape: tuple[int, int]) -> np.ndarray:
    """bfloat16: 1e30 at the first place, 0 elsewhere."""
    x = np.zeros(shape, jnp.bfloat16)
    x[0, 0] = 1e30
    return x


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.product_spec,
        normal((192, 1280), "bfloat16"),
        normal((1280, 384), "bfloat16"),
        variants=[
            case(normal((128, 256), "bfloat16", shift=1.0), normal((256, 384), "bfloat16"), about="one step of k"),
            case(normal((72, 2048), "bfloat16", shift=1.0), normal((2048, 320), "bfloat16"), bm=32, bn=256, bk=128),
            case(normal((64, 256), "bfloat16"), normal((256, 128), "bfloat16"), about="a single block"),
            case(
                normal((192, 768), "bfloat16"),
                normal((768, 768), "bfloat16"),
                bm=96,
                bn=384,
                bk=384,
                budget=Budget(branches=0),
                about="blocks of 96, 384 and 384",
            ),
            case(
                overflowing((64, 512)), overflowing((512, 128)), about="a sum that is infinite from the first step on"
            ),
        ],
        budget=Budget(hbm_bytes=4_571_136, vmem_bytes=262_144, calls=1, mxu_bits=16, branches=0),
        tol=8e-3,
    )


def in_blocks(nb: Any, M: int, N: int, K: int, bm: int, bn: int, bk: int) -> tuple[Any, tuple[Any, Any]]:
    """The reader's Puzzles 2 and 3 in these blocks: (function, arguments). Claims are compared with a run of it."""
    x, y = jnp.zeros((M, K), jnp.bfloat16), jnp.zeros((K, N), jnp.bfloat16)
    return functools.partial(nb.tiled, nb.straight_kernel, bm=bm, bn=bn, bk=bk), (x, y)


def all_plans(nb: Any, M: int, N: int, K: int) -> list[tuple[int, int, int]]:
    return [(bm, bn, bk) for bm in nb.tile_sizes(M) for bn in nb.tile_sizes(N) for bk in nb.tile_sizes(K)]


def any_sizes(rng: np.random.Generator) -> tuple[int, ...]:
    """M, N, K, and bytes of VMEM, drawn."""
    return (*rng.permutation([256, 384, 512, 640, 896]).tolist()[:3], int(rng.integers(500_000, 2_000_000)))


def puzzle_4(nb: Any) -> Question:
    blocks = functools.partial(in_blocks, nb)

    # The budgets are those of the best plan.
    return question(
        nb.product_spec,
        normal((768, 512), "bfloat16"),
        normal((512, 640), "bfloat16"),
        variants=[
            case(
                normal((1024, 256), "bfloat16"),
                normal((256, 384), "bfloat16"),
                vmem_bytes=2_097_152,
                budget=Budget(hbm_bytes=1_507_328, vmem_bytes=2_097_152),
            ),
            case(
                normal((512, 1024), "bfloat16"),
                normal((1024, 384), "bfloat16"),
                vmem_bytes=1_400_000,
                budget=Budget(hbm_bytes=3_014_656, vmem_bytes=1_400_000),
            ),
            case(
                normal((1152, 384), "bfloat16"),
                normal((384, 768), "bfloat16"),
                vmem_bytes=1_400_000,
                budget=Budget(hbm_bytes=4_423_680, vmem_bytes=1_400_000),
            ),
        ],
        budget=Budget(hbm_bytes=3_735_552, vmem_bytes=1_048_576),
        claims=[
            hbm_claim(
                nb.plan_bytes,
                blocks,
                (768, 640, 512, 256, 128, 256),
                (768, 640, 512, 256, 128, 512),
                (768, 384, 256, 256, 384, 256),
                (512, 768, 512, 256, 384, 256),
            ),
            vmem_claim(
                nb.plan_vmem, lambda *plan: blocks(*(2 * b for b in plan), *plan), (256, 128, 512), (128, 384, 256)
            ),
            hbm_choice(
                nb.frugal_blocks,
                blocks,
                functools.partial(all_plans, nb),
                any_sizes,
                [(768, 640, 512, 1_048_576), (512, 640, 512, 900_000), (1152, 768, 384, 1_400_000)],
            ),
        ],
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.linear_spec,
        normal((192, 768), "bfloat16"),
        normal((640, 768), "bfloat16"),
        variants=[
            case(normal((200, 384), "bfloat16", shift=1.0), normal((320, 384), "bfloat16"), bk=128),
            case(normal((64, 1024), "bfloat16"), normal((512, 1024), "bfloat16"), bm=32, bn=256, bk=512),
            case(normal((64, 256), "bfloat16"), normal((128, 256), "bfloat16"), about="a single block"),
            case(
                normal((96, 768), "bfloat16"),
                normal((768, 768), "bfloat16"),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=4_669_440, vmem_bytes=262_144, serial_steps=3, calls=1, mxu_bits=16),
        tol=8e-3,
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.diagonal_spec,
        normal((96, 1)),
        normal((96, 1024)),
        normal((96, 1024), shift=0.5),
        variants=[
            case(
                normal((80, 1), scale=100.0),
                normal((80, 256), shift=-1.0),
                normal((80, 256)),
                budget=Budget(hbm_bytes=410_560, flops=98_400, calls=2),
            ),
            case(normal((48, 1)), normal((48, 384)), normal((48, 384)), bm=16, bn=128),
            case(normal((32, 1)), normal((32, 256)), normal((32, 256)), about="a single block"),
            case(normal((48, 1)), normal((48, 768)), normal((48, 768)), bm=24, bn=384, about="blocks of 24 x 384"),
        ],
        budget=Budget(hbm_bytes=1_967_232, vmem_bytes=197_120, flops=393_600, calls=2),
        forbid=GRADIENTS,
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.gelu_residual_spec,
        normal((192, 1024), "bfloat16"),
        normal((1024, 256), "bfloat16", scale=0.05),
        normal((1, 256)),
        normal((192, 256), "bfloat16"),
        variants=[
            case(
                normal((80, 384), "bfloat16"),
                normal((384, 512), "bfloat16", scale=0.05),
                normal((1, 512), shift=-1.0),
                normal((80, 512), "bfloat16", scale=0.01),
                bk=128,
                budget=Budget(hbm_bytes=1_200_128, output_stores=1, calls=1),
                about="a small residual: next to it, another GELU shows",
            ),
            case(
                normal((48, 256), "bfloat16"),
                normal((256, 256), "bfloat16", scale=0.05),
                normal((1, 256), shift=100.0),
                normal((48, 256), "bfloat16", shift=-100.0),
                bm=16,
                bk=128,
                budget=Budget(output_stores=1, calls=1),
                about="y near 100, r near -100: what is rounded before they meet is lost",
            ),
            case(
                normal((64, 512), "bfloat16", scale=0.02, shift=1.0),
                normal((512, 256), "bfloat16", scale=0.02, shift=0.2),
                normal((1, 256), shift=-102.4),
                normal((64, 256), "bfloat16"),
                bm=32,
                bn=256,
                bk=128,
                budget=Budget(output_stores=1, calls=1),
                about="sums near 102, biases near -102: what is rounded too early is lost",
            ),
            case(
                normal((64, 256), "bfloat16"),
                normal((256, 128), "bfloat16", scale=0.05),
                normal((1, 128)),
                normal((64, 128), "bfloat16"),
                about="a single block",
            ),
            case(
                normal((96, 768), "bfloat16"),
                normal((768, 384), "bfloat16", scale=0.05),
                normal((1, 384)),
                normal((96, 384), "bfloat16"),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(
            hbm_bytes=2_558_976, vmem_bytes=295_936, flops=101_700_000, output_stores=1, calls=1, mxu_bits=16
        ),
    )


def lower(M: int) -> np.ndarray:
    """A lower triangular matrix in bfloat16, with nothing near zero below its diagonal."""
    rng = np.random.default_rng(M)
    return np.tril(rng.uniform(0.5, 2.0, (M, M)) * rng.choice([-1, 1], (M, M))).astype(jnp.bfloat16)


def puzzle_7b(nb: Any) -> Question:
    return question(
        nb.triangle_spec,
        lower(640),
        normal((640, 384), "bfloat16", shift=0.5),
        variants=[
            case(
                np.where(np.arange(384)[:, None] % 128 < 120, lower(384), 0).astype(jnp.bfloat16),
                normal((384, 256), "bfloat16"),
                bm=128,
                budget=Budget(flops=51_000_000, branches=1, calls=1),
                about="as many rows in a block as columns in a tile; the last rows of each are zeros",
            ),
            case(
                lower(768),
                normal((768, 256), "bfloat16"),
                bm=256,
                bn=256,
                budget=Budget(flops=203_000_000, branches=1, calls=1),
                about="blocks of 256 rows, tiles of 128 columns",
            ),
            case(
                lower(1024),
                normal((1024, 128), "bfloat16"),
                bm=32,
                bk=256,
                budget=Budget(flops=169_000_000, branches=1, calls=1),
                about="blocks of 32 rows, tiles of 256 columns",
            ),
            case(lower(128), normal((128, 128), "bfloat16"), bm=128, about="a single block"),
            case(
                lower(768), normal((768, 768), "bfloat16"), bm=192, bn=384, bk=384, about="blocks of 192, 384 and 384"
            ),
            case(lower(384), normal((384, 128), "bfloat16"), bm=192, about="blocks of 192 rows, tiles of 128 columns"),
        ],
        budget=Budget(
            hbm_bytes=3_440_640,
            vmem_bytes=524_288,
            grid_steps=30,
            flops=190_000_000,
            calls=1,
            mxu_bits=16,
            branches=1,
        ),
        forbid={"switch": "{name} needs a branch for each length, written out. Use a loop, which has one body."},
        tol=8e-3,
    )


def silent(K: int, N: int) -> np.ndarray:
    """bfloat16: -1 in the first half of the columns, 1 in the second."""
    return np.where(np.arange(N) < N // 2, -1, np.ones((K, N))).astype(jnp.bfloat16)


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.energy_spec,
        normal((160, 256), "bfloat16"),
        normal((256, 1024), "bfloat16", scale=0.1),
        normal((160, 1), shift=0.5),
        variants=[
            case(
                normal((96, 384), "bfloat16", shift=0.5),
                normal((384, 512), "bfloat16", scale=0.1),
                normal((96, 1)),
                bm=48,
                bn=256,
                budget=Budget(hbm_bytes=2_729_472, calls=3),
            ),
            case(
                normal((32, 128), "bfloat16"),
                normal((128, 128), "bfloat16", scale=0.1),
                normal((32, 1)),
                about="a single block",
            ),
            case(
                normal((96, 256), "bfloat16"),
                normal((256, 1152), "bfloat16", scale=0.1),
                normal((96, 1)),
                bm=48,
                bn=384,
                about="blocks of 48 and 384",
            ),
            case(
                normal((192, 128), "bfloat16", shift=1.0, scale=0.1),
                silent(128, 256),
                normal((192, 1)),
                bm=24,
                about="more blocks of rows than of columns, and nothing fires in the first",
            ),
        ],
        budget=Budget(hbm_bytes=7_198_976, vmem_bytes=426_240, calls=3, mxu_bits=16),
        forbid=GRADIENTS,
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.linear_grads_spec,
        normal((320, 512), "bfloat16"),
        normal((512, 384), "bfloat16"),
        normal((320, 384), "bfloat16", shift=0.5),
        variants=[
            case(
                normal((1536, 128), "bfloat16", shift=1.0),
                normal((128, 256), "bfloat16"),
                normal((1536, 256), "bfloat16", shift=1.0),
                bm=128,
                bn=128,
                bk=128,
                budget=Budget(hbm_bytes=3_604_480, calls=2, serial_steps=12),
            ),
            case(
                normal((96, 320), "bfloat16", shift=0.5),
                normal((320, 512), "bfloat16"),
                normal((96, 512), "bfloat16"),
                bm=32,
                bn=256,
                budget=Budget(calls=2, serial_steps=3),
                about="a ragged K, which neither product sums over",
            ),
            case(
                normal((64, 256), "bfloat16"),
                normal((256, 128), "bfloat16"),
                normal((64, 128), "bfloat16"),
                about="a single block",
            ),
            case(
                normal((96, 768), "bfloat16", shift=0.5),
                normal((768, 768), "bfloat16"),
                normal((96, 768), "bfloat16"),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=4_653_056, vmem_bytes=360_448, calls=2, serial_steps=5, mxu_bits=16),
        tol=8e-3,  # about one unit in the last place of a bfloat16
    )


def cancelling(M: int, half: int, N: int) -> tuple[np.ndarray, np.ndarray]:
    """x and w in int8 whose products of the first half of K nearly cancel with those of the second."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(64, 128, (M, half)), rng.integers(64, 128, (half, N))
    return np.hstack([x, x]).astype(np.int8), np.vstack([w, (rng.random(w.shape) < 0.02) - w]).astype(np.int8)


def explain_wrapped(
    x: Any, w: Any, sx: Any, sw: Any, *, got: Any, want: Any, bk: int = 256, **_: Any
) -> tuple[str, str]:
    """Says so if the products of the tiles were int8: then their sums have wrapped."""
    x, w = np.asarray(x, np.int64), np.asarray(w, np.int64)
    tiles = (x[:, k : k + bk] @ w[k : k + bk] for k in range(0, len(w), bk))
    wrapped = sum(tile.astype(np.int8).astype(np.float64) for tile in tiles) * np.asarray(sx) * np.asarray(sw)
    if not np.allclose(np.asarray(got), wrapped, rtol=1e-3, atol=1e-3):
        return "", ""
    return "The product of two int8 tiles is int8 here, and its sums wrap (100 + 100 is -56). Ask for int32.", ""


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.int8_spec,
        integers((192, 1280), -127, 128, "int8"),
        integers((1280, 384), -127, 128, "int8"),
        uniform((192, 1), 0.001, 1.0),
        uniform((1, 384), 0.01, 0.1),
        variants=[
            case(
                integers((64, 2048), 80, 128, "int8"),
                integers((2048, 256), 80, 128, "int8"),
                uniform((64, 1), 0.5, 1.0),
                uniform((1, 256), 0.5, 1.0),
                bm=32,
                bk=512,
                budget=Budget(mxu_bits=8, calls=1),
                about="sums beyond 16 million",
            ),
            case(
                integers((200, 256), -127, 128, "int8"),
                integers((256, 320), -127, 128, "int8"),
                uniform((200, 1), 0.001, 1.0),
                uniform((1, 320), 0.01, 0.1),
                bn=256,
                bk=128,
                budget=Budget(mxu_bits=8, calls=1),
            ),
            case(
                *cancelling(32, 4096, 128),
                uniform((32, 1), 0.5, 1.0),
                uniform((1, 128), 0.5, 1.0),
                bm=16,
                budget=Budget(mxu_bits=8, calls=1),
                about="sums of 37 million on the way, of thousands at the end",
            ),
            case(
                integers((64, 256), -127, 128, "int8"),
                integers((256, 128), -127, 128, "int8"),
                uniform((64, 1), 0.001, 1.0),
                uniform((1, 128), 0.01, 0.1),
                about="a single block",
            ),
            case(
                integers((96, 768), -127, 128, "int8"),
                integers((768, 384), -127, 128, "int8"),
                uniform((96, 1), 0.001, 1.0),
                uniform((1, 384), 0.01, 0.1),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=2_512_128, vmem_bytes=198_144, calls=1, mxu_bits=8),
        explain=explain_wrapped,
    )


def puzzle_11(nb: Any) -> Question:
    return question(
        nb.sparse_spec,
        *nb.sparse_case(5, [[0, 2], [], [1, 3, 4], [2], []], bm=32, bk=128, N=384),
        variants=[
            case(
                *nb.sparse_case(4, [[], [3], [0, 1, 2, 3], [1, 2]], bm=16, bk=256, N=512),
                most=4,
                bn=256,
                budget=Budget(hbm_bytes=2_015_232, flops=29_417_472, calls=1),
            ),
            case(
                *nb.sparse_case(6, [[5], [0], [], [], [2], [1, 4]], bm=64, bk=128, N=256),
                most=2,
                budget=Budget(hbm_bytes=688_128, flops=21_053_440, calls=1),
            ),
            case(*nb.sparse_case(3, [[1], [], [0, 2]], bm=48, bk=128, N=320), most=2, bn=256, budget=Budget(calls=1)),
            case(*nb.sparse_case(1, [[0]], bm=32, bk=128, N=128), most=1, about="a single block"),
            case(
                *nb.sparse_case(3, [[], [], [0, 2]], bm=48, bk=384, N=768),
                most=2,
                bn=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=860_160, flops=18_948_096, calls=1, output_stores=1),
    )


def puzzle_12(nb: Any) -> Question:
    # Four small chips, each short of something else. The budgets are what the best plan by this model really takes.
    slow_steps = nb.Chip(5e11, 3e9, 4 << 20, 20e-6)
    fast_steps = slow_steps._replace(vmem_bytes=3 << 20, step_s=5e-6)
    little_vmem = slow_steps._replace(vmem_bytes=2 << 20)
    x, y = normal((1024, 512), "bfloat16"), normal((512, 768), "bfloat16")
    blocks = functools.partial(in_blocks, nb)

    def on(chip: Any, about: str, **budget: int) -> Case:
        return case(x, y, chip=chip, budget=Budget(**budget), about=about)

    def any_chip(rng: np.random.Generator) -> tuple[Any, ...]:
        """M, N, K, and a chip that nobody sells, drawn."""
        *sizes, vmem_bytes = any_sizes(rng)
        flops_per_s, step_us = float(rng.integers(2, 20)) * 1e11, int(rng.integers(2, 20))
        return (*sizes, nb.Chip(flops_per_s, float(rng.integers(2, 6)) * 1e9, vmem_bytes, step_us / 1e6))

    return question(
        nb.product_spec,
        x,
        y,
        variants=[
            on(fast_steps, "a chip with short steps", hbm_bytes=5_242_880, grid_steps=16, vmem_bytes=2_031_616),
            on(slow_steps, "a chip with long steps", hbm_bytes=5_242_880, grid_steps=8, vmem_bytes=2_490_368),
            on(little_vmem, "a chip with little VMEM", hbm_bytes=5_767_168, grid_steps=8, vmem_bytes=2_097_152),
        ],
        budget=Budget(hbm_bytes=4_194_304, grid_steps=6, vmem_bytes=2_621_440),
        claims=[
            Claim(
                nb.plan_time,
                [
                    (1024, 768, 512, 512, 384, 128, nb.SMALL),
                    (1024, 768, 512, 512, 384, 512, nb.SMALL),
                    (768, 640, 512, 768, 640, 128, nb.SMALL),
                    (512, 384, 256, 256, 128, 256, nb.SMALL),
                ],
                lambda *plan: in_seconds(*measured(*blocks(*plan[:-1])), plan[-1]),
            ),
            cheapest_that_fits(
                nb.pick_blocks,
                blocks,
                functools.partial(all_plans, nb),
                any_chip,
                lambda *counted: round(seconds(*terms(*counted)), 12),
                lambda seconds: f"{seconds:.4e} s",
                lambda chip: chip.vmem_bytes,
                [
                    *((1024, 768, 512, chip) for chip in (nb.SMALL, fast_steps, slow_steps, little_vmem)),
                    (1280, 128, 256, slow_steps._replace(step_s=1e-3)),
                ],
            ),
        ],
    )


def terms(costs: Any, mxu_flops: float, chip: Any) -> tuple[float, float, float, dict[str, float]]:
    """Seconds of the MXU, of HBM, of all steps, and of the fill: the first block of each array."""
    sizes = {r.operand.name: min(r.operand.block_bytes, r.hbm_bytes) for r in costs.operands}
    fills = {name: size / chip.hbm_bytes_per_s for name, size in sizes.items()}
    return mxu_flops / chip.flops_per_s, costs.hbm_bytes / chip.hbm_bytes_per_s, costs.steps * chip.step_s, fills


def seconds(mxu: float, hbm: float, steps: float, fills: dict[str, float]) -> float:
    fill = sum(fills.values())
    return max(mxu, hbm - fill) + fill + steps


def in_seconds(costs: Any, mxu_flops: float, chip: Any) -> Count:
    """The time of a call by the model of Puzzle 12, and what it would be with up to three mistakes."""
    mxu, hbm, steps, fills = terms(costs, mxu_flops, chip)
    fill, scratch = sum(fills.values()), costs.scratch_bytes / chip.hbm_bytes_per_s
    products = [(mxu, ""), (mxu / 2, "a multiplication and an addition were one FLOP")]
    blocks_of = [
        (fill, ""),
        (fill / 2, "an element of the fill had one byte"),
        (fill * 2, "the fill were both buffers of each block"),
        (fill * 2 + scratch, "the fill were all that VMEM holds, and not one block of each array"),
        *((fill - own, f"{name} had no part in the fill") for name, own in fills.items()),
    ]
    places = [  # how often the fill is taken off HBM, and put in
        ((1, 1), ""),
        ((0, 0), "there were no fill: beside a longer MXU, it has nothing to hide behind"),
        ((0, 1), "the fill counted twice: it is put in by itself, and still in HBM"),
        ((1, 0), "the fill were taken off HBM and never put in"),
    ]
    overlaps: list[tuple[Callable[[float, float], float], str]] = [
        (max, ""),
        (lambda m, h: m + h, "the MXU waited for HBM: the two overlap, the longer one counts"),
        (lambda m, h: m, "HBM took no time"),
        (lambda m, h: h, "the MXU took no time"),
        (min, "the shorter of MXU and HBM counted"),
    ]
    ends: list[tuple[Callable[[float], float], str]] = [
        (lambda t: t + steps, ""),
        (lambda t: t, "steps cost nothing"),
        (lambda t: max(t, steps), "the cost of a step overlapped with the rest"),
    ]
    slips: list[tuple[list[str], float]] = []
    every = itertools.product(products, blocks_of, places, overlaps, ends)
    for (m, a), (f, b), ((off, put), c), (way, d), (end, e) in every:
        slips.append(([words for words in (a, b, c, d, e) if words], end(way(m, hbm - off * f)) + put * f))
    slips.sort(key=lambda slip: len(slip[0]))
    parts = [(f"MXU {us(mxu)}", mxu), (f"HBM {us(hbm)}", hbm), (f"{costs.steps} steps: {us(steps)}", steps)]
    parts.insert(2, (f"fill {us(fill)}: {', '.join(f'{name} {us(own)}' for name, own in fills.items())}", fill))
    mistakes = [(f"if {' and '.join(words)}", value) for words, value in slips if 0 < len(words) <= 3]
    return Count("the model says", seconds(mxu, hbm, steps, fills), (), mistakes, ".4e", parts)


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


# --- what `puzzles bench` measures -----------------------------------------------------------------------------------


def bench_3(nb: Any) -> Sizes:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    sizes = [size(*[normal((n, n), "bfloat16")] * 2, flops=2 * n**3, bm=512, bn=512, bk=512) for n in (512, 1024, 2048)]
    return sweep(*sizes, peers={"JAX's": functools.partial(matmul, block_shape=(512, 512), block_k=512)})


def bench_10(nb: Any) -> Sizes:
    def inputs(n: int) -> tuple[Any, ...]:
        whole = integers((n, n), -127, 128, "int8")
        return whole, whole, uniform((n, 1), 0.001, 1.0), uniform((1, n), 0.01, 0.1)

    def xla(x: Any, w: Any, sx: Any, sw: Any) -> Any:
        return jnp.dot(x, w, preferred_element_type=jnp.int32) * sx * sw  # the spec computes with NumPy

    return sweep(*[size(*inputs(n), flops=2 * n**3, bm=512, bn=512, bk=512) for n in (512, 1024, 2048)], xla=xla)
