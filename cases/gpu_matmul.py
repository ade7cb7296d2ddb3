"""What the checks of gpu_matmul.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

import numpy as np

from pallas_puzzles.course.claims import Claim, Count
from pallas_puzzles.course.inputs import Budget, Question, case, normal, question
from pallas_puzzles.lens.gpu.banks import wavefronts

BF16 = "bfloat16"


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.product_spec,
        normal((192, 128), BF16),
        normal((128, 256), BF16),
        variants=[
            case(normal((64, 64), BF16), normal((64, 384), BF16), about="three tiles side by side"),
            case(normal((128, 192), BF16), normal((192, 512), BF16), bn=256, about="tiles of 64 x 256"),
        ],
        budget=Budget(gmem_bytes=491_520, ctas=6),
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.swizzled_spec,
        normal((128, 64), BF16),
        normal((64, 256), BF16),
        variants=[
            case(normal((64, 32), BF16), normal((32, 128), BF16), about="rows of 64 bytes"),
            case(normal((64, 48), BF16), normal((48, 128), BF16), about="rows of 96 bytes"),
            case(normal((64, 128), BF16), normal((128, 128), BF16), about="rows of 256 bytes"),
            case(normal((64, 96), BF16), normal((96, 128), BF16), about="rows of 192 bytes"),
        ],
        budget=Budget(bank_conflicts=0),
        claims=[
            Claim(nb.turns, [(n,) for n in (128, 64, 32, 16, 256, 512)], in_turns),
            Claim(nb.swizzle_for, [(n,) for n in (128, 64, 32, 96, 192, 256, 160)], widest),
        ],
    )


def in_turns(row_bytes: int) -> Count:
    """How often SMEM is asked for the first 16 bytes of eight rows, and what that would be with a slip."""
    found = wavefronts(np.arange(8)[None, :] * row_bytes, 16)
    slips = [("if every row were a turn of its own", 8.0), ("if all rows came in one turn", 1.0)]
    slips += [("if you counted the rows of a turn", 8.0 / found)]
    return Count("SMEM takes", float(found), [f"8 rows, {row_bytes} bytes apart"], [s for s in slips if s[1] != found])


def widest(row_bytes: int) -> Count:
    """The widest swizzle that divides a row."""
    found = max(s for s in (32, 64, 128) if row_bytes % s == 0)
    slips = [("if it were always 128", 128.0), ("if it were the narrowest", 32.0)]
    slips += [("if it only had to fit into the row", float(max(s for s in (32, 64, 128) if s <= row_bytes)))]
    parts = [f"{row_bytes} / {s} = {row_bytes / s:g}" for s in (128, 64, 32)]
    return Count("the widest one that divides the row is", float(found), parts, [s for s in slips if s[1] != found])


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.k_loop_spec,
        normal((128, 768), BF16),
        normal((768, 256), BF16),
        variants=[
            case(normal((64, 640), BF16), normal((640, 128), BF16), slots=3, budget=Budget(waited=20_000)),
            case(normal((64, 64), BF16), normal((64, 128), BF16), slots=4, about="a single step"),
        ],
        budget=Budget(waited=125_000, copies=96),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.shared_spec,
        normal((256, 128), BF16),
        normal((128, 768), BF16),
        variants=[
            case(normal((128, 64), BF16), normal((64, 256), BF16), about="a single tile"),
            case(normal((256, 64), BF16), normal((64, 128), BF16), bm=256, bn=128, about="tiles of 256 x 128"),
        ],
        budget=Budget(gmem_bytes=1_376_256, ctas=6, copies=12),
        claims=[
            Claim(nb.accumulator_registers, [(128, 256, 2), (64, 256, 1), (128, 256, 1), (192, 128, 3)], of_a_thread)
        ],
    )


def of_a_thread(bm: int, bn: int, warpgroups: int) -> Count:
    """Registers of a thread that hold float32 accumulators, and what it would be with a slip."""
    slips = [
        ("for one warpgroup", bm * bn / 128),
        ("for all threads of the CTA together", float(bm * bn)),
        ("for a warpgroup", bm * bn / warpgroups),
        ("for a warp of 32 threads", bm * bn / 32 / warpgroups),
        ("with two values in a register", bm * bn / 256 / warpgroups),
        ("in bytes", bm * bn / 32 / warpgroups),
    ]
    found = bm * bn / (128 * warpgroups)
    parts = [f"{bm} x {bn} float32 of 4 bytes, a register each", f"{128 * warpgroups} threads"]
    return Count("a thread holds", found, parts, [s for s in slips if s[1] != found])


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.specialised_spec,
        normal((128, 640), BF16),
        normal((640, 512), BF16),
        variants=[
            case(normal((256, 448), BF16), normal((448, 128), BF16), bn=128, slots=3, about="three slots"),
            case(normal((128, 64), BF16), normal((64, 256), BF16), about="a single step"),
        ],
        budget=Budget(copies=40, copy_idle=4_000),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.pipelined_spec,
        normal((256, 640), BF16),
        normal((640, 768), BF16),
        variants=[
            case(normal((128, 256), BF16), normal((256, 512), BF16), bn=128, slots=3, about="three slots"),
            case(normal((384, 192), BF16), normal((192, 256), BF16), about="more rows than columns"),
        ],
        budget=Budget(copies=120, tensor_idle=260_000),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.fused_spec,
        normal((256, 320), BF16),
        normal((320, 512), BF16, scale=0.05),
        normal((512,)),
        variants=[
            case(normal((128, 192), BF16), normal((192, 384), BF16, scale=0.1), normal((384,)), bn=128),
            case(
                normal((128, 128), "float16"),
                normal((128, 64), "float16", scale=0.1),
                normal((64,)),
                bn=64,
                about="float16",
            ),
        ],
        budget=Budget(gmem_bytes=1_253_376, thread_bytes=8_192),
    )
