"""What the checks of gpu_matmul.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from pallas_puzzles.course.claims import Cheapest, Claim, Count, answered, line_of
from pallas_puzzles.course.inputs import Budget, Question, case, normal, question
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.lens import gpu
from pallas_puzzles.lens.gpu.banks import wavefronts
from pallas_puzzles.speed.work import Size, Sizes, size, sweep
from pallas_puzzles.text import plural

BF16 = "bfloat16"


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.product_spec,
        normal((192, 128), BF16),
        normal((128, 256), BF16),
        variants=[
            case(normal((64, 64), BF16), normal((64, 576), BF16), bn=192, about="three tiles of 64 x 192 side by side"),
            case(normal((128, 192), BF16), normal((192, 512), BF16), bn=256, about="tiles of 64 x 256"),
            case(normal((64, 64), "float16"), normal((64, 192), "float16"), bn=192, about="float16"),
        ],
        budget=Budget(gmem_bytes=491_520, ctas=6),
    )


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.swizzled_spec,
        normal((128, 64), BF16),
        normal((64, 256), BF16),
        variants=[
            case(normal((64, 32), BF16), normal((32, 128), BF16), bn=64, about="rows of 64 bytes"),
            case(normal((64, 48), BF16), normal((48, 128), BF16), about="rows of 96 bytes"),
            case(normal((64, 128), BF16), normal((128, 128), BF16), about="rows of 256 bytes"),
            case(normal((64, 96), BF16), normal((96, 128), BF16), about="rows of 192 bytes"),
            case(
                normal((192, 64), "float16"), normal((64, 576), "float16"), bn=192, about="float16, tiles of 64 x 192"
            ),
        ],
        budget=Budget(bank_conflicts=0),
        claims=[
            Claim(nb.turns, [(n,) for n in (128, 64, 32, 16, 256, 512)], in_turns),
            Claim(nb.swizzle_for, [(n,) for n in (128, 64, 32, 96, 192, 256, 160, 320, 384)], widest),
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
            case(normal((64, 640), BF16), normal((640, 128), BF16), slots=3, budget=Budget(waited=20_000, copies=20)),
            case(normal((64, 64), BF16), normal((64, 128), BF16), bn=64, slots=4, about="a single step"),
            case(
                normal((192, 320), "float16"),
                normal((320, 384), "float16"),
                bn=192,
                slots=3,
                about="float16, tiles of 64 x 192",
            ),
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
            case(normal((512, 64), BF16), normal((64, 256), BF16), bm=256, bn=128, about="tiles of 256 x 128"),
            case(
                normal((384, 192), "float16"),
                normal((192, 192), "float16"),
                bn=192,
                about="float16, tiles of 128 x 192",
            ),
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
            case(
                normal((384, 320), "float16"),
                normal((320, 384), "float16"),
                bn=192,
                slots=3,
                about="float16, tiles of 128 x 192",
            ),
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
            case(
                normal((384, 320), "float16"),
                normal((320, 384), "float16"),
                bn=192,
                slots=3,
                about="float16, tiles of 128 x 192",
            ),
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
                slots=3,
                about="float16",
            ),
            case(
                normal((384, 192), "float16"),
                normal((192, 384), "float16", scale=0.1),
                normal((384,)),
                bn=192,
                about="float16, tiles of 128 x 192",
            ),
        ],
        budget=Budget(gmem_bytes=1_253_376, thread_bytes=8_192, waited=280_000),
    )


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.persistent_spec,
        normal((256, 320), BF16),
        normal((320, 1024), BF16),
        variants=[
            case(
                normal((384, 192), BF16),
                normal((192, 512), BF16),
                bn=128,
                slots=2,
                width=2,
                ctas=3,
                budget=Budget(copy_idle=15_000),
            ),
            case(normal((512, 64), BF16), normal((64, 512), BF16), bm=256, bn=64, width=4, about="a single step"),
            case(
                normal((384, 192), "float16"),
                normal((192, 1152), "float16"),
                bn=128,
                slots=3,
                width=3,
                ctas=5,
                about="float16, strips of three tiles",
            ),
        ],
        budget=Budget(copies=80, ctas=2, copy_idle=5_000),
        claims=[SharedTiles(nb.tile_order, [(64, 8), (8, 16), (3, 32)])],
    )


@dataclasses.dataclass(frozen=True)
class SharedTiles:
    """`fn(t, m_tiles, width)`, the row and column of tile t, lets CTAs that run at the same time share what they read:
    the machine has no L2. cases: (m_tiles, width). It is compared with the tiles of strips of `width` columns, row by
    row; whether each tile has its turn, the kernel's result shows."""

    fn: Any
    cases: list[tuple[int, int]]
    last = True
    ctas = 132  # that run

    def finding(self) -> Finding | None:
        """What is wrong with the order, in the first case where something is, or None."""
        n = np.arange(self.ctas)
        for m_tiles, width in self.cases:
            rows, columns = answered(jax.vmap(lambda t, *case: self.fn(t, *case), (0, None, None)), n, m_tiles, width)
            strip, within = n // (m_tiles * width), n % (m_tiles * width)
            want = len({*(within // width)}), len({*(strip * width + within % width)})
            found = len({*np.asarray(rows).tolist()}), len({*np.asarray(columns).tolist()})
            if sum(found) > sum(want):
                cause = (
                    f"Right answer, but {self.ctas} CTAs that work on the first {self.ctas} tiles by "
                    f"{self.fn.__name__}(t, {m_tiles}, {width}) read {found[0]} different rows of tiles and {found[1]} "
                    f"columns. In strips of {width} columns, they read {want[0]} and {want[1]}: what several of them "
                    "read comes from the L2."
                )
                return Finding("choice", cause, [], line_of(self.fn))
        return None


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.clustered_spec,
        normal((512, 320), BF16),
        normal((320, 512), BF16),
        variants=[
            case(
                normal((384, 192), BF16),
                normal((192, 1024), BF16),
                along="n",
                bn=128,
                width=2,
                ctas=4,
                about="pairs side by side",
                budget=Budget(gmem_bytes=2_555_904),
            ),
            case(normal((256, 192), BF16), normal((192, 512), BF16), slots=2, about="one row of pairs, two slots"),
            case(
                normal((256, 128), BF16),
                normal((128, 512), BF16, scale=0.1),
                normal((512,)),
                along=None,
                about="no pairs; bias and GELU",
            ),
            case(
                normal((768, 192), "float16"),
                normal((192, 1152), "float16", scale=0.1),
                normal((1152,)),
                bn=128,
                width=3,
                ctas=6,
                about="float16, strips of three pairs, bias and GELU",
            ),
        ],
        budget=Budget(copies=80, gmem_bytes=1_835_008),
        claims=[Pairs(nb.partner_tile, nb.tile_order, [(8, 1, "m"), (4, 2, "m"), (2, 2, "n"), (3, 1, "n")])],
    )


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The two CTAs of pair t work on tiles beside each other, and `order`, tile_order, gives the pairs their order.

    cases: (m_tiles, width, along). Which tile a CTA of the pair takes is its own affair.
    """

    fn: Any
    order: Any
    cases: list[tuple[int, int, str]]
    last = True

    def finding(self) -> Finding | None:
        """What is wrong with the tiles of a pair, at the first where something is, or None."""
        t = np.arange(16)
        for m_tiles, width, along in self.cases:
            m, n = (2, 1) if along == "m" else (1, 2)
            tile = functools.partial(self.fn, m_tiles=m_tiles, width=width, along=along)
            both = jax.vmap(jax.vmap(tile), axis_name="cluster", axis_size=2)
            found = np.stack(answered(both, np.stack([t, t])), axis=-1)  # [rank, t]: row and column
            i, j = answered(jax.vmap(self.order, (0, None, None)), t, m_tiles // m, width)
            want = np.stack([np.stack([m * i + r * (m - 1), n * j + r * (n - 1)], axis=-1) for r in range(2)])
            for pair in t:
                tiles, right = sorted(found[:, pair].tolist()), want[:, pair].tolist()
                if tiles != right:
                    told = [" and ".join(f"({row}, {column})" for row, column in each) for each in (tiles, right)]
                    cause = (
                        f"Right answer, but by {self.fn.__name__}({pair}, {m_tiles}, {width}, {along!r}), the tiles of "
                        f"pair {pair} are {told[0]}, not {told[1]}: the two of a pair lie beside each other along "
                        f'"{along}", and pairs follow one another in the order of {self.order.__name__}.'
                    )
                    return Finding("choice", cause, [], line_of(self.fn))
        return None


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.ragged_spec,
        normal((256, 192), BF16),
        normal((4, 192, 512), BF16),
        np.array([100, 7, 0, 149], np.int32),
        variants=[
            case(
                normal((384, 64), BF16),
                normal((3, 64, 128), BF16),
                np.array([1, 190, 193], np.int32),
                bn=128,
                about="a group of one row, one that ends within 64 rows, and 128 rows of a single group",
            ),
            case(
                normal((256, 64), BF16),
                normal((3, 64, 512), BF16),
                np.array([128, 8, 120], np.int32),
                slots=2,
                width=2,
                ctas=3,
                about="64 rows of a tile that are nobody's, behind a whole tile",
            ),
            case(
                normal((192, 192), "float16"),
                normal((3, 192, 384), "float16"),
                np.array([50, 42, 100], np.int32),
                bn=128,
                slots=3,
                width=3,
                ctas=3,
                about="float16, three tiles to a row",
            ),
        ],
        budget=Budget(gmem_bytes=1_362_016, thread_bytes=96, stores=112),
    )


def puzzle_11(nb: Any) -> Question:
    tiles = [(128, 256), (256, 128), (128, 128)]
    sizes = [(8192, 8192, 8192), (4096, 4096, 1024), (1024, 8192, 4096), (2048, 2048, 2048), (128, 4352, 512)]
    sizes += [(1536, 3072, 1024), (512, 512, 192), (384, 256, 640), (4224, 2816, 4096), (3584, 5120, 4096)]
    sizes += [(5120, 16384, 4096), (7680, 9216, 64)]  # another tile than with a small K, and with a large one
    whole = (1536, 2816, 640)  # whole rounds, by each tile of 128 x 256 or half of it
    timed = [
        (*size, *tile)
        for size in [*sizes[:5], whole]
        for tile in [*tiles, (64, 128), (128, 64)]
        if size[0] % tile[0] == 0
    ]
    return question(
        nb.best_spec,
        normal((512, 192), BF16),
        normal((192, 512), BF16),
        variants=[
            case(normal((384, 128), BF16), normal((128, 256), BF16), about="no pairs one below the other"),
            case(normal((384, 192), "float16"), normal((192, 768), "float16"), about="float16"),
        ],
        budget=Budget(gmem_bytes=1_703_936, smem_bytes=229_472),
        claims=[
            Claim(nb.slots_that_fit, [*tiles, (64, 256), (64, 248), (8, 8)], in_slots),
            Claim(
                nb.step_bytes,
                [(*tile, along) for tile in tiles for along in (None, "m", "n")],
                functools.partial(of_a_step, nb),
            ),
            Claim(nb.cycles, timed, in_cycles),
            Cheapest(nb.choose, lambda M, N, K: nb.plans(M, N), modelled, sizes, in_words),
        ],
    )


def in_slots(bm: int, bn: int) -> Count:
    """How many slots fit, and how many would with a slip."""
    room, slot = 232_448 - 32_768, (bm + bn) * 64 * 2
    found = room // (slot + 16)
    slips = [
        ("without the epilogue's SMEM", 232_448 // (slot + 16)),
        ("without barriers", room // slot),
        ("with one barrier a slot", room // (slot + 8)),
        ("with elements of one byte", room // (slot // 2 + 16)),
        ("with elements of four bytes", room // (slot * 2 + 16)),
        ("if only the tile of a were in a slot", room // (bm * 128 + 16)),
    ]
    parts = [f"{room:,} bytes for slots", f"a slot: {slot:,} bytes of tiles, 16 of barriers"]
    return Count("SMEM has room for", float(found), parts, [(words, float(n)) for words, n in slips if n != found])


def of_a_step(nb: Any, bm: int, bn: int, along: str | None) -> Count:
    """The bytes that the kernel of Puzzle 9 reads for a step of a CTA: of two tiles, two steps each."""
    m, n = (2, 1) if along != "n" else (1, 2)
    a, b = (draw_one(shape) for shape in ((bm * m, 128), (128, bn * n)))
    run = gpu.run(nb.clustered, a, b, bm=bm, bn=bn, slots=2, along=along, ctas=2)
    found = run.counts.gmem_read_bytes / 4
    a_bytes, b_bytes = bm * 128, bn * 128
    slips = [
        ("if nothing were shared", a_bytes + b_bytes),
        ("if both operands were shared", (a_bytes + b_bytes) / 2),
        ("if the other operand were shared", a_bytes + b_bytes + a_bytes / 2 + b_bytes / 2 - found),
        ("for both CTAs of a pair", 2 * found),
    ]
    shared = {"m": "b is shared", "n": "a is shared", None: "nothing is shared"}[along]
    parts = [f"a: {a_bytes:,} bytes, b: {b_bytes:,} bytes; {shared}"]
    return Count("a CTA of your kernel reads", found, parts, [(w, float(n)) for w, n in slips if n != found])


def draw_one(shape: tuple[int, ...]) -> Any:
    return normal(shape, BF16).draw(np.random.default_rng(0))


def modelled(M: int, N: int, K: int, bm: int, bn: int, along: str | None) -> tuple[float, float]:
    """The model of Puzzle 11: cycles, and bytes that a CTA reads for a step."""
    return in_cycles(M, N, K, bm, bn).value, (bm + bn - {"m": bn, "n": bm, None: 0}[along] / 2) * 128


def in_words(cost: tuple[float, float]) -> str:
    return f"{cost[0]:,.0f} cycles and reads {cost[1]:,.0f} bytes for a step"


def in_cycles(M: int, N: int, K: int, bm: int, bn: int) -> Count:
    """The cycles of a product by the model, and what they would be with a slip."""
    tensor, copies, end = 2 * bm * bn * 64 / 4096, (bm + bn) * 128 / 62, bm * bn / 20
    tiles, steps = (M // bm) * (N // bn), K // 64
    rounds = -(-tiles // 132)
    found = rounds * (steps * max(tensor, copies) + end)
    slips = [
        ("if the last round were as short as it is full", tiles / 132 * (steps * max(tensor, copies) + end)),
        ("if the last round were left out", tiles // 132 * (steps * max(tensor, copies) + end)),
        ("if a multiplication and an addition were one FLOP", rounds * (steps * max(tensor / 2, copies) + end)),
        ("if the copies took no time", rounds * (steps * tensor + end)),
        ("if the tensor cores took no time", rounds * (steps * copies + end)),
        ("if the tensor cores waited for each copy", rounds * (steps * (tensor + copies) + end)),
        ("if the faster engine decided", rounds * (steps * min(tensor, copies) + end)),
        ("if a tile ended in no time", rounds * steps * max(tensor, copies)),
        ("if every step had an end", rounds * steps * (max(tensor, copies) + end)),
        ("if only the last tile had an end", rounds * steps * max(tensor, copies) + end),
        ("for a single step of a tile", rounds * (max(tensor, copies) + end)),
        ("for a single tile", steps * max(tensor, copies) + end),
    ]
    terms = [
        (f"{tiles} tiles for 132 CTAs: {plural(rounds, 'round')} of {steps} steps", rounds),
        (f"a step: {tensor:,.0f} cycles of the tensor cores", tensor),
        (f"a step: {copies:,.0f} cycles of the copies", copies),
        (f"the end of a tile: {end:,.0f} cycles", end),
    ]
    return Count("the model says", found, (), [(words, n) for words, n in slips if n != found], terms=terms)


# --- what `puzzles bench` measures -----------------------------------------------------------------------------------


def square(nb: Any, **blocks: Any) -> Sizes:
    """A product of 8192 x 8192 x 8192, by these blocks."""
    return sweep(product(8192, 8192, 8192, **blocks), xla=cublas)


def cublas(a: Any, b: Any) -> Any:
    """XLA's program of a product is a call of cuBLAS; that of a spec would be one in float32."""
    return a @ b


def product(M: int, N: int, K: int, **blocks: Any) -> Size:
    name = f"{M} x {N} x {K}"
    return size(normal((M, K), BF16), normal((K, N), BF16), flops=2 * M * N * K, name=name, **blocks)


def bench_3(nb: Any) -> Sizes:
    return square(nb)


def bench_5(nb: Any) -> Sizes:
    return square(nb, slots=4)


def bench_6(nb: Any) -> Sizes:
    return square(nb, slots=4)


def bench_8(nb: Any) -> Sizes:
    return square(nb, slots=4, width=8, ctas=132)


def bench_9(nb: Any) -> Sizes:
    return square(nb, slots=4, width=8, ctas=132)


def bench_10(nb: Any) -> Sizes:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as mgpu

    M, K, N, groups = 16384, 4096, 4096, 16
    sizes = np.random.default_rng(0).multinomial(M, [1 / groups] * groups).astype(np.int32)
    blocks: dict[str, Any] = {
        "block_m": 128,
        "block_n": 128,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 8,
    }

    def library(x: Any, w: Any, sizes: Any) -> Any:
        return mgpu.ragged_dot(x, w, group_sizes=sizes, **blocks)

    args = normal((M, K), BF16), normal((groups, K, N), BF16), sizes
    return sweep(
        size(*args, flops=2 * M * N * K, name=f"{M} x {K} x {N}, {groups} groups", slots=4, width=4, ctas=132),
        peers={"JAX's Mosaic GPU kernel": library},
        xla=jax.lax.ragged_dot,
    )


def bench_11(nb: Any) -> Sizes:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

    along = hopper.MatmulDimension
    tiles: dict[str, Any] = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}
    snake: dict[str, Any] = {"grid_tile_width": 8, "grid_minor_dim": along.M}

    def library(a: Any, b: Any, **more: Any) -> Any:
        return hopper.matmul(a, b, None, hopper.TuningConfig(**tiles, **snake, **more))

    peers: dict[str, Any] = {"JAX's": library, "JAX's, clusters": functools.partial(library, cluster_dimension=along.M)}
    shapes = (1024, 8192, 4096), (4096, 4096, 1024), (8192, 8192, 8192)
    return sweep(*[product(*shape) for shape in shapes], peers=peers, xla=cublas)
