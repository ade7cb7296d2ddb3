"""What the checks of basics.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

import numpy as np

from pallas_puzzles.course.inputs import Budget, Question, case, normal, question


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.add_ten_spec,
        normal((640,)),
        variants=[
            case(normal((1000,))),
            case(normal((384,), "bfloat16"), about="bfloat16"),
        ],
        budget=Budget(calls=1),
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.vector_add_spec,
        normal((1280,)),
        normal((1280,)),
        variants=[
            case(normal((3072,)), normal((3072,)), b=512, budget=Budget(vmem_bytes=12_288)),
            case(normal((16512,)), normal((16512,)), b=128, about="129 blocks"),
            case(normal((1000,)), normal((1000,)), b=1000, about="a single block, of 1000 elements"),
            case(normal((9216,)), normal((9216,)), b=3072, about="three blocks of 3072"),
        ],
        budget=Budget(vmem_bytes=6_144),
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.reverse_pages_spec,
        normal((1280,)),
        variants=[
            case(normal((2560,)), budget=Budget(vmem_bytes=4_096, hbm_bytes=20_480)),
            case(normal((256,)), about="a single page"),
        ],
        budget=Budget(vmem_bytes=4_096, hbm_bytes=10_240),
    )


def infinite(rows: int, columns: int) -> np.ndarray:
    """float32, with one infinite number."""
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    x[3, 5] = -np.inf
    return x


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.transpose_spec,
        normal((384, 512)),
        variants=[
            case(normal((768, 640)), bm=256, bn=128, budget=Budget(vmem_bytes=524_288)),
            case(normal((96, 320)), bm=96, bn=320, about="a single block, of 96 rows and 320 columns"),
            case(infinite(768, 384), bm=384, bn=384, about="two blocks of 384 x 384, and an infinite number"),
        ],
        budget=Budget(vmem_bytes=524_288),
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.scale_shift_spec,
        normal((32, 768)),
        normal((32, 1)),
        normal((1, 768)),
        variants=[
            case(
                normal((48, 1280)),
                normal((48, 1)),
                normal((1, 1280)),
                bm=16,
                bn=128,
                budget=Budget(hbm_bytes=507_072, vmem_bytes=33_920),
            ),
            case(
                normal((8, 256)),
                normal((8, 1), scale=0.0),
                normal((1, 256)),
                about="a single block, and all scales are 0",
            ),
            case(normal((48, 768)), normal((48, 1)), normal((1, 768)), bm=24, bn=384, about="blocks of 24 x 384"),
        ],
        budget=Budget(hbm_bytes=209_024, vmem_bytes=34_880),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.gated_spec,
        normal((80, 384)),
        normal((80, 384)),
        variants=[
            case(
                normal((160, 256), scale=4.0),
                normal((160, 256), scale=4.0),
                vmem_bytes=200_000,
                budget=Budget(vmem_bytes=200_000, grid_steps=5, calls=1),
                about="40 rows would need 204,800 bytes",
            ),
            case(
                normal((240, 256)),
                normal((240, 256)),
                vmem_bytes=204_800,
                budget=Budget(vmem_bytes=204_800, grid_steps=6, calls=1),
                about="40 rows need all of it",
            ),
            case(
                normal((144, 256)),
                normal((144, 256)),
                vmem_bytes=170_000,
                budget=Budget(vmem_bytes=170_000, grid_steps=6, calls=1),
                about="33 rows would fit, 24 divide 144",
            ),
            case(
                normal((96, 128)),
                normal((96, 128), scale=100.0),
                budget=Budget(vmem_bytes=262_144, grid_steps=1, calls=1),
                about="all rows fit at once; g goes beyond 100",
            ),
            case(
                normal((64, 384)),
                normal((64, 384)),
                budget=Budget(vmem_bytes=262_144, grid_steps=2, calls=1),
                about="all rows would fit once, but not twice",
            ),
        ],
        budget=Budget(vmem_bytes=262_144, hbm_bytes=307_200, grid_steps=5, calls=1),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.distance_bias_spec,
        normal((96, 512)),
        variants=[
            case(normal((320, 768)), bq=64, bk=256, budget=Budget(hbm_bytes=1_966_080, vmem_bytes=262_144)),
            case(normal((32, 128)), about="a single block"),
            case(normal((144, 768)), bq=48, bk=384, about="blocks of 48 x 384"),
        ],
        budget=Budget(hbm_bytes=393_216, vmem_bytes=65_536),
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.centre_chunks_spec,
        normal((100, 320), shift=3.0),
        variants=[
            case(normal((41, 640), scale=5.0, shift=-20.0), bn=256, budget=Budget(vmem_bytes=65_536)),
            case(normal((64, 384), shift=3.0), budget=Budget(vmem_bytes=32_768)),
            case(normal((16, 128), shift=3.0), about="a single block"),
            case(normal((24, 700), shift=3.0), bn=384, about="blocks of 384 columns"),
        ],
        budget=Budget(vmem_bytes=32_768),
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.row_sum_spec,
        normal((24, 512), shift=1.0),
        variants=[
            case(normal((64, 768)), bm=16, bn=256, budget=Budget(hbm_bytes=196_864, vmem_bytes=32_896)),
            case(normal((8, 200)), bn=200, about="a single block, of 200 columns"),
            case(normal((48, 1152), shift=1.0), bm=24, bn=384, about="blocks of 24 x 384"),
        ],
        budget=Budget(hbm_bytes=49_248, vmem_bytes=8_256),
    )


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.matmul_spec,
        normal((96, 2048), "bfloat16"),
        normal((2048, 512), "bfloat16"),
        variants=[
            case(
                normal((128, 768), "bfloat16", shift=1.0),
                normal((768, 384), "bfloat16"),
                bm=64,
                bn=128,
                bk=256,
                budget=Budget(vmem_bytes=262_144, output_stores=1),
            ),
            case(normal((32, 128), "bfloat16"), normal((128, 256), "bfloat16"), about="a single block"),
            case(
                normal((96, 768), "bfloat16"),
                normal((768, 768), "bfloat16"),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(vmem_bytes=212_992, output_stores=1),  # output_stores: how often each result may be stored
        tol=8e-3,  # about one unit in the last place of a bfloat16
    )


def puzzle_11(nb: Any) -> Question:
    return question(
        nb.batched_matmul_spec,
        normal((4, 64, 768), "bfloat16"),
        normal((4, 768, 384), "bfloat16"),
        variants=[
            case(
                normal((2, 48, 512), "bfloat16"),
                normal((2, 512, 128), "bfloat16"),
                bm=16,
                bk=128,
                budget=Budget(vmem_bytes=90_112, calls=1),
            ),
            case(normal((2, 48, 768), "bfloat16"), normal((2, 768, 128), "bfloat16"), bm=24, bk=384),
            case(normal((1, 32, 256), "bfloat16"), normal((1, 256, 128), "bfloat16"), about="a single block"),
            case(
                normal((3, 48, 768), "bfloat16"),
                normal((3, 768, 200), "bfloat16"),
                bm=8,
                bk=384,
                about="blocks of 8 and 384, and 200 columns",
            ),
        ],
        budget=Budget(vmem_bytes=524_288, calls=1),
    )


def puzzle_12(nb: Any) -> Question:
    return question(
        nb.fused_linear_spec,
        normal((96, 768), "bfloat16"),
        normal((768, 256), "bfloat16", scale=0.05),
        normal((1, 256)),
        variants=[
            case(
                normal((192, 512), "bfloat16"),
                normal((512, 768), "bfloat16", scale=0.05),
                normal((1, 768), shift=-1.0),
                bm=64,
                bn=256,
                bk=128,
                budget=Budget(hbm_bytes=3_253_248, vmem_bytes=296_960, calls=1, output_stores=1),
            ),
            case(
                normal((64, 512), "bfloat16", scale=0.02, shift=1.0),
                normal((512, 256), "bfloat16", scale=0.02, shift=0.2),
                normal((1, 256), shift=-102.4),
                budget=Budget(hbm_bytes=690_176, vmem_bytes=197_632, calls=1, output_stores=1),
                about="sums near 102, biases near -102: what is rounded too early is lost",
            ),
            case(
                normal((32, 256), "bfloat16"),
                normal((256, 128), "bfloat16", scale=0.05),
                normal((1, 128), shift=20.0),
                about="a single block, with biases near 20",
            ),
            case(
                normal((96, 768), "bfloat16"),
                normal((768, 384), "bfloat16", scale=0.05),
                normal((1, 384)),
                bm=48,
                bn=384,
                bk=384,
                about="blocks of 48, 384 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=1_526_784, vmem_bytes=197_632, calls=1, output_stores=1),
    )


def puzzle_13(nb: Any) -> Question:
    return question(
        nb.lean_matmul_spec,
        normal((256, 128), "bfloat16"),
        normal((128, 1536), "bfloat16"),
        variants=[
            case(
                normal((1536, 256), "bfloat16"),
                normal((256, 384), "bfloat16"),
                bm=512,
                bn=128,
                budget=Budget(hbm_bytes=2_555_904, vmem_bytes=917_504, calls=1),
            ),
            case(
                normal((256, 128), "bfloat16"),
                normal((128, 1024), "bfloat16"),
                bm=128,
                bn=256,
                budget=Budget(hbm_bytes=1_048_576, vmem_bytes=327_680, calls=1),
            ),
            case(
                normal((960, 256), "bfloat16"),
                normal((256, 256), "bfloat16"),
                bm=192,
                bn=128,
                budget=Budget(hbm_bytes=1_605_632, vmem_bytes=425_984, calls=1),
            ),
            case(
                normal((256, 128), "bfloat16"),
                normal((128, 512), "bfloat16"),
                bm=128,
                bn=128,
                budget=Budget(hbm_bytes=589_824, vmem_bytes=196_608, calls=1),
            ),
            case(
                normal((512, 128), "bfloat16"),
                normal((128, 256), "bfloat16"),
                bm=64,
                bn=128,
                budget=Budget(hbm_bytes=589_824, vmem_bytes=131_072, calls=1),
            ),
            case(normal((64, 128), "bfloat16"), normal((128, 512), "bfloat16"), about="a single block"),
            case(
                normal((192, 384), "bfloat16"),
                normal((384, 768), "bfloat16"),
                bm=96,
                bn=384,
                about="blocks of 96 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=1_376_256, vmem_bytes=425_984, calls=1),
    )
