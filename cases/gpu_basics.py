"""What the checks of gpu_basics.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_puzzles.course.claims import Claim, Count, gmem_claim
from pallas_puzzles.course.inputs import Budget, Question, case, normal, question
from pallas_puzzles.lens import gpu
from pallas_puzzles.speed.work import Sizes, size, sweep
from pallas_puzzles.targets.gpu.chips import occupancy
from pallas_puzzles.text import plural


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.add_ten_spec,
        normal((6, 768)),
        variants=[
            case(normal((3, 640)), bn=128, budget=Budget(gmem_bytes=15_360, ctas=15), about="more parts than rows"),
            case(normal((9, 256)), about="a part is a whole row"),
            case(normal((2, 1152)), bn=384, about="parts of 384"),
        ],
        budget=Budget(gmem_bytes=36_864, cta_bytes=2_048, ctas=18),
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.softmax_spec,
        normal((6, 1024)),
        variants=[
            case(
                normal((3, 2048), scale=3.0, shift=300.0),
                budget=Budget(gmem_bytes=49_152),
                about="rows of 2048, numbers around 300",
            ),
            case(normal((5, 384), shift=-200.0), about="numbers around -200"),
            case(normal((4, 256), scale=10_000.0), about="numbers that lie far apart"),
        ],
        budget=Budget(gmem_bytes=49_152, ctas=6),
        forbid=["softmax", "log_softmax"],
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.smooth_spec,
        normal((130, 256)),
        variants=[
            case(normal((258, 128)), bm=128, about="one strip, blocks of 128 rows"),
            case(
                normal((66, 512)),
                bm=32,
                bn=256,
                budget=Budget(gmem_bytes=270_336, thread_bytes=131_072),
                about="blocks of 32 x 256",
            ),
            case(normal((194, 384)), bm=96, bn=192, about="blocks of 96 x 192"),
        ],
        budget=Budget(gmem_bytes=266_240, thread_bytes=131_072),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.gelu_spec,
        normal((128, 256)),
        variants=[
            case(normal((256, 128), scale=20.0), bm=128, about="blocks of 128 rows, numbers of up to 70"),
            case(normal((64, 512)), bm=32, bn=256, budget=Budget(gmem_bytes=262_144, thread_bytes=0)),
            case(normal((192, 384)), bm=96, bn=192, about="blocks of 96 x 192"),
        ],
        budget=Budget(gmem_bytes=262_144, thread_bytes=0),
    )


def puzzle_4b(nb: Any) -> Question:
    return question(
        nb.ahead_gelu_spec,
        normal((512, 128)),
        variants=[
            case(normal((448, 256)), budget=Budget(copies=14), about="seven tiles in each of two strips"),
            case(normal((64, 128)), budget=Budget(copies=1), about="a single tile"),
            case(normal((320, 384)), about="three strips of five tiles"),
        ],
        budget=Budget(copy_idle=7_500, thread_bytes=0, copies=8),
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.strip_gelu_spec,
        normal((512, 128)),
        variants=[
            case(normal((448, 256)), budget=Budget(copies=14), about="seven tiles in each of two strips"),
            case(normal((64, 128)), budget=Budget(copies=1), about="a single tile"),
            case(normal((320, 384)), about="three strips of five tiles"),
        ],
        budget=Budget(copy_idle=1_000, thread_bytes=0, copies=8),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.bias_gelu_spec,
        normal((512, 256)),
        normal((256,)),
        variants=[
            case(normal((192, 512)), normal((512,)), bm=32, slots=3, about="more strips than there are elsewhere"),
            case(normal((128, 256)), normal((256,)), bm=32, bn=256, about="a single strip"),
            case(normal((192, 384)), normal((384,)), bm=96, about="tiles of 96 x 128"),
        ],
        budget=Budget(gmem_bytes=1_056_768, thread_bytes=0),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.largest_spec,
        normal((32, 16, 256)),
        variants=[
            case(normal((32, 8, 128)), budget=Budget(copy_idle=900, smem_bytes=16_500), about="tiles of 4096 bytes"),
            case(normal((8, 64, 128)), budget=Budget(copy_idle=1_600, smem_bytes=66_000), about="tiles of 32 KiB"),
            case(normal((10, 24, 384)), about="tiles of 12 KiB"),
        ],
        budget=Budget(copy_idle=2_000, smem_bytes=25_000),
        claims=[
            Claim(nb.slots_needed, [(512 * rows,) for rows in (1, 4, 6, 13, 24, 128)], partial(busy, nb)),
            Claim(nb.slots_needed, [(9_730,), (128,)], by_the_law),
        ],
    )


def by_the_law(tile_bytes: int) -> Count:
    """The same, of tiles that the kernel does not have."""
    ahead = math.ceil(9_730 / tile_bytes)
    slips = [("without a slot for the tile that is arriving", float(ahead)), ("with a slot more", ahead + 2.0)]
    told = [f"9,730 bytes on their way: {plural(ahead, 'tile')}, and one that is arriving"]
    return Count("by Little's law it is", ahead + 1.0, told, slips)


def busy(nb: Any, tile_bytes: int) -> Count:
    """The smallest number of slots with which the copy engine is as busy as with one more, on tiles of 128 columns."""
    tiles = 12 + 20_000 // tile_bytes  # more than slots
    x, idle = jnp.zeros((tiles, tile_bytes // 512, 128)), [math.inf]
    while len(idle) < 3 or idle[-1] < idle[-2]:
        idle.append(gpu.run(partial(nb.largest_with, slots=len(idle)), x).counts.copy_idle)
    fewest = len(idle) - 2
    parts = [f"{plural(slots, 'slot')}: idle for {idle[slots]:,.0f} cycles" for slots in range(1, len(idle))]
    slips = [
        ("without a slot for the tile that is arriving", fewest - 1.0),
        ("if a part of a tile did not count", fewest - 1.0),
        ("with a slot for the tile that the threads work on", fewest + 1.0),
    ]
    return Count("the smallest number that keeps the copy engine busy is", float(fewest), parts[-3:], slips)


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.rms_norm_spec,
        normal((128, 128)),
        variants=[
            case(normal((64, 256), scale=4.0, shift=1.0), about="rows of 256"),
            case(normal((192, 64), scale=1e-3), about="small numbers: 1e-6 matters"),
            case(normal((64, 192)), about="rows of 192"),
        ],
        budget=Budget(gmem_bytes=131_072, thread_bytes=0, copy_idle=4_500),
        tol=1e-5,
    )


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.lse_spec,
        normal((200, 256)),
        variants=[
            case(normal((136, 128), shift=-200.0), about="all numbers are negative"),
            case(normal((128, 128), scale=30.0), budget=Budget(copy_idle=3_600), about="no row is missing"),
            case(normal((72, 256), shift=100.0), about="8 rows in the last tile"),
            case(normal((72, 384)), about="three strips"),
        ],
        budget=Budget(gmem_bytes=208_896, ctas=8, copy_idle=14_000),
    )


def puzzle_10(nb: Any) -> Question:
    def run(M: int, N: int, itemsize: int) -> tuple[Any, tuple[Any, ...]]:
        return nb.fast_softmax, (jnp.zeros((M, N), jnp.float32 if itemsize == 4 else jnp.bfloat16),)

    return question(
        nb.fast_softmax_spec,
        normal((8, 1024), "bfloat16"),
        variants=[
            case(normal((4, 4096), scale=4.0), about="float32, rows of 4096"),
            case(normal((3, 2048), "bfloat16", shift=300.0), about="numbers around 300"),
            case(normal((3, 384), "float16"), about="float16, rows of 384"),
        ],
        budget=Budget(gmem_bytes=32_768, ctas=8),
        forbid=["softmax", "log_softmax"],
        claims=[
            gmem_claim(nb.softmax_bytes, run, (8, 1024, 2), (3, 512, 4), (5, 384, 4)),
            Claim(nb.softmax_bytes, [(65_536, 4096, 4)], in_and_out),
            Claim(
                nb.ctas_per_sm,
                [(80, 2048), (27, 2048), (33, 0), (168, 0), (40, 60_000), (16, 7_000), (24, 57_344), (24, 76_801)],
                fitting,
            ),
        ],
    )


def in_and_out(M: int, N: int, itemsize: int) -> Count:
    """The bytes of a softmax that are too many to run."""
    once = M * N * itemsize
    slips = [("if the result were not stored", float(once)), ("if x were read twice", 3.0 * once)]
    return Count("your kernel moves", 2.0 * once, [f"x and the result, {once:,} bytes each"], slips)


def fitting(registers: int, smem_bytes: int) -> Count:
    """How many CTAs of 128 threads an SM holds, and what it would be with a line of the table misread."""
    by = occupancy(registers, 128, smem_bytes).by
    parts = [f"{name} has room for {room:,}" for name, room in by.items()]
    most = min(by.values())
    others = [
        ("if registers were not rounded up", {**by, "registers": 65_536 // (128 * registers)}),
        ("if registers were those of a CTA", {**by, "registers": 65_536 // registers}),
        ("if the system took no SMEM", {**by, "SMEM": 228 * 1024 // max(1, smem_bytes)}),
        ("if SMEM had no end", {**by, "SMEM": most + 10**6}),
        ("if an SM had room for any number of threads", {**by, "threads": 10**6}),
        ("if registers had no end", {**by, "registers": 10**6}),
        ("if the most plentiful thing decided", {"most": max(by.values())}),
    ]
    slips = [(words, float(min(room.values()))) for words, room in others]
    return Count("an SM holds", float(most), parts, [s for s in slips if s[1] != most])


# --- what `puzzles bench` measures: from what the L2 holds up to a quarter of a GiB and more ------------------------


def matrices(*shapes: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",)) -> Sizes:
    return sweep(*[size(normal(shape, dtype)) for dtype in dtypes for shape in shapes])


def bench_1(nb: Any) -> Sizes:
    return matrices((512, 4096), (2048, 4096), (8192, 4096), (32768, 4096))


def bench_2(nb: Any) -> Sizes:
    return matrices((1024, 4096), (4096, 4096), (16384, 4096), (65536, 4096))


def bench_3(nb: Any) -> Sizes:
    return matrices((514, 4096), (2050, 4096), (8194, 4096), (32770, 4096))


def bench_4(nb: Any) -> Sizes:
    return matrices((512, 4096), (2048, 4096), (8192, 4096), (32768, 4096))


def bench_4b(nb: Any) -> Sizes:
    return matrices((512, 16896), (2048, 16896), (8192, 16896))  # 132 strips: one for each SM of an H100 or H200


def bench_5(nb: Any) -> Sizes:
    return bench_4b(nb)


def bench_6(nb: Any) -> Sizes:
    return sweep(*[size(normal((M, 16896)), normal((16896,))) for M in (512, 2048, 8192)])


def bench_7(nb: Any) -> Sizes:
    return matrices((32, 16, 16896), (128, 16, 16896), (512, 16, 16896))


def bench_8(nb: Any) -> Sizes:
    return matrices((8192, 256), (32768, 256), (131072, 256), (524288, 256))


def bench_9(nb: Any) -> Sizes:
    def xla(x: Any) -> Any:
        return jax.nn.logsumexp(x.reshape(-1, 64, x.shape[1]), axis=1)  # the spec has a program a tile

    return sweep(*[size(normal((M, 4096))) for M in (1024, 4096, 16384, 65536)], xla=xla)


def bench_10(nb: Any) -> Sizes:
    return matrices((1024, 4096), (4096, 4096), (16384, 4096), (65536, 4096), dtypes=("bfloat16", "float32"))
