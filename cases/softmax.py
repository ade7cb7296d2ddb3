"""What the checks of softmax.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

import numpy as np

from pallas_puzzles.course.inputs import GRADIENTS, Budget, Question, case, integers, normal, question


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.row_softmax_spec,
        normal((48, 384), scale=3.0, shift=100.0),
        variants=[
            case(normal((24, 640), scale=2.0, shift=-10_000.0), bm=8),
            case(normal((32, 256), scale=10_000.0)),
            case(normal((32, 128), scale=2.0, shift=10_000.0)),
            case(normal((16, 200)), about="a single block, of 200 columns"),
            case(normal((48, 384)), bm=24, about="blocks of 24 rows"),
        ],
        budget=Budget(hbm_bytes=147_456, vmem_bytes=98_304),
        forbid=("softmax", "log_softmax", "logsumexp"),
    )


def one_high() -> np.ndarray:
    """(24, 640), float32: 11 in the first column, 0 elsewhere. What lies far below the largest still counts."""
    return np.where(np.arange(640) == 0, 11.0, np.zeros((24, 640))).astype(np.float32)


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.confidence_spec,
        normal((24, 640), scale=2.0),
        variants=[
            case(normal((32, 768), scale=3.0, shift=-200.0), bm=16, bn=256),
            case(normal((16, 2048), scale=1e37, shift=-2e38), bn=512, about="rows whose scores all lie below -1e38"),
            case(normal((8, 65_536), scale=2.0, shift=10_000.0), bn=8192, budget=Budget(vmem_bytes=524_416)),
            case(normal((8, 128), scale=2.0), about="a single block"),
            case(normal((48, 1152), scale=2.0), bm=24, bn=384, about="blocks of 24 x 384"),
            case(one_high(), about="one score is 11, all others are 0"),
        ],
        budget=Budget(hbm_bytes=122_976, vmem_bytes=8_320, output_stores=1),
        forbid=("softmax", "log_softmax", "logsumexp"),
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.confidence_spec,
        normal((24, 640), scale=2.0),
        variants=[
            case(normal((32, 768), scale=3.0, shift=-80.0), bm=16, bn=256),
            case(normal((16, 2048), scale=1e37, shift=-2e38), bn=512, about="rows whose scores all lie below -1e38"),
            case(normal((8, 65_536), scale=2.0, shift=-10_000.0), bn=8192, budget=Budget(vmem_bytes=524_416)),
            case(normal((8, 128), scale=2.0), about="a single block"),
            case(normal((48, 1152), scale=2.0), bm=24, bn=384, about="blocks of 24 x 384"),
            case(one_high(), about="one score is 11, all others are 0"),
        ],
        budget=Budget(hbm_bytes=61_536, vmem_bytes=8_320, output_stores=1),
        forbid=("softmax", "log_softmax", "logsumexp"),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.row_softmax_spec,
        normal((24, 640), scale=2.0),
        variants=[
            case(
                normal((32, 768), scale=3.0, shift=-80.0),
                bm=16,
                bn=256,
                budget=Budget(hbm_bytes=294_912, vmem_bytes=65_664, calls=1),
            ),
            case(
                normal((16, 2048), scale=1e37, shift=-2e38),
                bn=512,
                budget=Budget(hbm_bytes=393_216, vmem_bytes=65_600, calls=1),
                about="rows whose scores all lie below -1e38",
            ),
            case(normal((16, 1024), scale=2.0), about="eight blocks to a row"),
            case(normal((8, 128), scale=2.0), about="a single block"),
            case(
                normal((48, 1152), scale=2.0, shift=10_000.0),
                bm=24,
                bn=384,
                about="blocks of 24 x 384, scores near 10,000",
            ),
        ],
        budget=Budget(hbm_bytes=184_320, vmem_bytes=16_448, calls=1),
        forbid=("softmax", "log_softmax", "logsumexp"),
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.cross_entropy_spec,
        normal((24, 640), scale=2.0),
        integers((24, 1), 0, 640),
        variants=[
            case(
                normal((32, 768), scale=5.0, shift=-10_000.0),
                integers((32, 1), 0, 768),
                bm=16,
                bn=256,
                budget=Budget(hbm_bytes=98_560, vmem_bytes=33_344, calls=1, output_stores=1),
                about="scores near -10,000",
            ),
            case(
                normal((16, 2048), scale=1e37, shift=-2e38),
                integers((16, 1), 0, 2048),
                bn=512,
                budget=Budget(hbm_bytes=131_200, vmem_bytes=32_992, calls=1, output_stores=1),
                about="rows whose scores all lie below -1e38",
            ),
            case(normal((8, 128), scale=2.0), integers((8, 1), 0, 128), about="a single block"),
            case(normal((48, 1152), scale=2.0), integers((48, 1), 0, 1152), bm=24, bn=384, about="blocks of 24 x 384"),
        ],
        budget=Budget(hbm_bytes=61_632, vmem_bytes=8_416, calls=1, output_stores=1),
        forbid=("softmax", "log_softmax", "logsumexp", "take_along_axis"),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.softmax_vjp_spec,
        normal((48, 384), scale=2.0),
        normal((48, 384)),
        variants=[
            case(
                normal((24, 640), shift=-10_000.0),
                normal((24, 640), scale=10.0, shift=3.0),
                bm=8,
                budget=Budget(hbm_bytes=307_200, calls=2),
            ),
            case(normal((32, 128), scale=30.0), normal((32, 128))),
            case(normal((16, 200)), normal((16, 200)), about="a single block, of 200 columns"),
            case(normal((48, 384)), normal((48, 384)), bm=24, about="blocks of 24 rows"),
        ],
        budget=Budget(hbm_bytes=368_640, calls=2),
        forbid=("softmax", *GRADIENTS),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.layer_norm_spec,
        normal((48, 384), scale=2.0, shift=1.0),
        normal((1, 384), shift=1.0),
        normal((1, 384)),
        variants=[
            case(
                normal((24, 640), scale=0.003),
                normal((1, 640)),
                normal((1, 640)),
                bm=8,
                budget=Budget(hbm_bytes=128_192, vmem_bytes=87_296, calls=1),
                about="variances near 1e-5",
            ),
            case(normal((32, 256), shift=100.0), normal((1, 256)), normal((1, 256), scale=5.0)),
            case(
                normal((32, 256), shift=10_000.0),
                normal((1, 256)),
                normal((1, 256)),
                about="rows with a mean of 10,000",
            ),
            case(normal((16, 200), scale=10_000.0), normal((1, 200)), normal((1, 200))),
            case(normal((48, 384)), normal((1, 384)), normal((1, 384)), bm=24, about="blocks of 24 rows"),
        ],
        budget=Budget(hbm_bytes=150_912, vmem_bytes=101_632, calls=1),
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.layer_norm_vjp_spec,
        normal((48, 384), scale=2.0, shift=1.0),
        normal((1, 384), shift=1.0),
        normal((1, 384)),
        normal((48, 384), shift=0.5),
        variants=[
            case(
                normal((40, 640), scale=5.0),
                normal((1, 640)),
                normal((1, 640)),
                normal((40, 640), scale=3.0),
                bm=8,
                budget=Budget(hbm_bytes=525_760, calls=2),
            ),
            case(normal((64, 256), scale=10_000.0), normal((1, 256)), normal((1, 256)), normal((64, 256), shift=1.0)),
            case(normal((16, 200)), normal((1, 200)), normal((1, 200)), normal((16, 200)), about="a single block"),
            case(
                normal((32, 256), shift=1000.0),
                normal((1, 256)),
                normal((1, 256)),
                normal((32, 256)),
                about="rows with a mean of 1000",
            ),
            case(
                normal((20, 384)),
                normal((1, 384), scale=0.0),
                normal((1, 384)),
                normal((20, 384)),
                bm=20,
                about="a single block of 20 rows, and every gamma is 0",
            ),
        ],
        budget=Budget(hbm_bytes=377_088, calls=2),
        forbid=GRADIENTS,
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.add_rms_norm_spec,
        normal((64, 384), "bfloat16"),
        normal((64, 384), "bfloat16", scale=2.0),
        normal((1, 384), shift=1.0),
        variants=[
            case(
                normal((96, 256), "bfloat16", scale=10_000.0),
                normal((96, 256), "bfloat16", scale=3000.0),
                normal((1, 256)),
                bm=32,
                budget=Budget(hbm_bytes=197_632, vmem_bytes=132_096, calls=1),
            ),
            case(
                normal((32, 640), "bfloat16", scale=0.001),
                normal((32, 640), "bfloat16", scale=0.001),
                normal((1, 640)),
                budget=Budget(hbm_bytes=166_400, vmem_bytes=166_400, calls=1),
                about="mean squares near 1e-6",
            ),
            case(
                normal((16, 128), "bfloat16"), normal((16, 128), "bfloat16"), normal((1, 128)), about="a single block"
            ),
            case(
                normal((96, 384), "bfloat16"),
                normal((96, 384), "bfloat16"),
                normal((1, 384)),
                bm=48,
                about="blocks of 48 rows",
            ),
        ],
        budget=Budget(hbm_bytes=198_144, vmem_bytes=99_840, calls=1),
        tol=8e-3,  # about one unit in the last place of a bfloat16
    )


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.cross_entropy_spec,
        normal((32, 1000), "bfloat16", scale=2.0, shift=-20.0),
        integers((32, 1), 0, 1000),
        variants=[
            case(
                normal((32, 300), "bfloat16", scale=5.0, shift=-300.0),
                integers((32, 1), 0, 300),
                bn=128,
                about="scores near -300",
            ),
            case(
                normal((16, 1100), "bfloat16", scale=1e37, shift=-2e38),
                integers((16, 1), 0, 1100),
                bn=512,
                about="rows whose scores all lie below -1e38",
            ),
            case(normal((32, 768), "bfloat16"), integers((32, 1), 700, 768), bm=32, bn=256),
            case(normal((16, 200), "bfloat16"), integers((16, 1), 0, 200), about="a single block"),
            case(normal((96, 700), "bfloat16"), integers((96, 1), 0, 700), bm=48, bn=384, about="blocks of 48 x 384"),
        ],
        budget=Budget(hbm_bytes=64_256, vmem_bytes=16_832, output_stores=1),
        forbid=("softmax", "log_softmax", "logsumexp", "take_along_axis"),
    )
