"""What the checks of pipelining.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

from typing import Any

from pallas_puzzles.course.inputs import Budget, Question, case, normal, question

BY_HAND = {"emit_pipeline": "{name} starts the copies for you, and this puzzle is about starting them yourself."}
BY_PIPELINE = dict.fromkeys(
    ("make_async_copy", "async_copy", "sync_copy"),
    "{name} makes a copy of your own, and this puzzle is about pltpu.emit_pipeline, which makes them all.",
)


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.gate_spec,
        normal((64, 256), scale=2.0),
        normal((64, 256)),
        variants=[
            case(
                normal((24, 640), scale=60.0),
                normal((24, 640)),
                budget=Budget(exposed_bytes=122_880, in_flight_bytes=40_960, flops=80_000, transcendentals=15_360),
                about="other sizes, and values beyond 100",
            ),
            case(normal((128, 256)), normal((128, 256)), budget=Budget(in_flight_bytes=87_000), about="128 rows"),
        ],
        budget=Budget(hbm_bytes=196_608, exposed_bytes=131_072),
        forbid=BY_HAND,
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.silu_spec,
        normal((320, 256), scale=2.0),
        variants=[
            case(normal((328, 128)), bm=8, budget=Budget(operations=60), about="41 tiles of 8 rows"),
            case(normal((64, 384)), about="a single tile"),
            case(normal((200, 256)), bm=40, about="five tiles of 40 rows"),
        ],
        budget=Budget(hbm_bytes=655_360, vmem_bytes=131_072),
        forbid=BY_HAND,
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.energy_spec,
        normal((320, 256)),
        variants=[
            case(
                normal((192, 128), shift=1.0),
                bm=32,
                budget=Budget(exposed_bytes=16_384, in_flight_bytes=13_653, flops=75_000, transcendentals=0),
                about="six tiles",
            ),
            case(normal((64, 384)), about="a single tile"),
            case(normal((512, 640)), bm=128, budget=Budget(vmem_bytes=657_920), about="tiles of 320 KiB"),
            case(normal((200, 256)), bm=40, about="five tiles of 40 rows"),
        ],
        budget=Budget(hbm_bytes=328_704, exposed_bytes=65_536),
        forbid=BY_HAND,
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.absmax_spec,
        normal((384, 256)),
        variants=[
            case(
                normal((224, 128), shift=-9.0),
                bm=32,
                budget=Budget(in_flight_bytes=25_746, flops=90_000, transcendentals=0),
                about="seven tiles of negative numbers",
            ),
            case(normal((128, 384)), about="two tiles"),
            case(normal((512, 640)), bm=128, budget=Budget(vmem_bytes=985_600), about="tiles of 320 KiB"),
            case(normal((200, 256)), bm=40, about="five tiles of 40 rows"),
        ],
        budget=Budget(hbm_bytes=394_240, exposed_bytes=65_536, in_flight_bytes=98_304),
        forbid=BY_HAND,
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.outer_spec,
        normal((320, 1)),
        normal((1, 256)),
        variants=[
            case(
                normal((192, 1)),
                normal((1, 384)),
                bm=32,
                budget=Budget(exposed_bytes=49_152, in_flight_bytes=40_960, flops=80_000, transcendentals=0),
                about="six tiles",
            ),
            case(normal((128, 1)), normal((1, 128)), about="two tiles"),
            case(
                normal((512, 1)),
                normal((1, 640)),
                bm=128,
                budget=Budget(vmem_bytes=659_968),
                about="tiles of 320 KiB",
            ),
            case(normal((200, 1)), normal((1, 256)), bm=40, about="five tiles of 40 rows"),
        ],
        budget=Budget(hbm_bytes=329_984, exposed_bytes=65_536),
        forbid=BY_HAND,
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.silu_spec,
        normal((320, 256), scale=2.0),
        variants=[
            case(
                normal((192, 128)),
                bm=32,
                budget=Budget(exposed_bytes=32_768, in_flight_bytes=27_306, flops=100_000, transcendentals=24_576),
                about="six tiles",
            ),
            case(normal((64, 384)), about="a single tile"),
            case(normal((128, 128)), budget=Budget(exposed_bytes=65_536), about="two tiles"),
            case(normal((384, 640)), bm=128, budget=Budget(vmem_bytes=1_310_720), about="tiles of 320 KiB"),
            case(normal((200, 256)), bm=40, about="five tiles of 40 rows"),
        ],
        budget=Budget(hbm_bytes=655_360, exposed_bytes=131_072),
        forbid=BY_HAND,
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.gate_spec,
        normal((192, 384), scale=2.0),
        normal((192, 384)),
        variants=[
            case(normal((64, 512)), normal((64, 512)), bm=32, bn=256, about="tiles of 32 x 256"),
            case(normal((128, 128)), normal((128, 128)), about="one tile across"),
            case(normal((144, 768)), normal((144, 768)), bm=48, bn=384, about="tiles of 48 x 384"),
        ],
        budget=Budget(hbm_bytes=884_736, vmem_bytes=196_608, branches=0),
        forbid=BY_PIPELINE,
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.stream_spec,
        normal((16, 1024), "bfloat16"),
        normal((1024, 256), "bfloat16"),
        variants=[
            case(
                normal((32, 1280), "bfloat16"),
                normal((1280, 128), "bfloat16"),
                slots=2,
                budget=Budget(in_flight_bytes=29_491, flops=11_000_000, transcendentals=0),
                about="two slots, ten tiles",
            ),
            case(
                normal((16, 1536), "bfloat16"),
                normal((1536, 128), "bfloat16"),
                bk=256,
                slots=5,
                budget=Budget(in_flight_bytes=152_917),
                about="five slots, six tiles of 256 rows",
            ),
            case(normal((16, 256), "bfloat16"), normal((256, 384), "bfloat16"), slots=6, about="more slots than tiles"),
            case(
                normal((48, 1152), "bfloat16"),
                normal((1152, 384), "bfloat16"),
                bk=384,
                slots=3,
                about="48 rows, tiles of 384 rows",
            ),
        ],
        budget=Budget(hbm_bytes=573_440, exposed_bytes=65_536, in_flight_bytes=147_456),
        forbid=BY_HAND,
    )
