"""What the checks of distributed.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

from pallas_puzzles.course.inputs import Budget, Question, case, normal, question


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
            )
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
                *(normal((8, 24)), normal((24, 40)), normal((40, 24))),
                devices=4,
                budget=Budget(bytes_hops=4_608),
                about="four devices",
            )
        ],
        budget=Budget(bytes_hops=114_688),
        kernel=False,
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.rotate_spec,
        normal((64, 128)),
        variants=[case(normal((40, 256)), devices=5, budget=Budget(bytes_hops=40_960), about="five devices")],
        budget=Budget(bytes_hops=32_768),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.exchange_spec,
        normal((64, 8, 128)),
        variants=[case(normal((25, 8, 128)), devices=5, about="five devices")],
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.gather_spec,
        normal((64, 128)),
        variants=[case(normal((40, 256)), devices=5, budget=Budget(bytes_hops=163_840), about="five devices")],
        budget=Budget(bytes_hops=229_376),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.total_spec,
        normal((64, 128)),
        variants=[case(normal((40, 256)), devices=5, about="five devices")],
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
                budget=Budget(link_bytes=98_304, hbm_bytes=294_912),
                about="five devices",
            )
        ],
        budget=Budget(link_bytes=57_344, hbm_bytes=172_032),
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.halves_spec,
        normal((64, 2, 8, 128)),
        variants=[case(normal((25, 2, 16, 256)), devices=5, budget=Budget(link_bytes=65_536), about="five devices")],
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
            case(normal((48, 128)), rows=2, columns=3, about="two rows of three devices"),
        ],
        budget=Budget(bytes_hops=229_376, link_bytes=24_576),
    )
