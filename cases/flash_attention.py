"""What the checks of flash_attention.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from pallas_puzzles.course.claims import Helper, helper_claim
from pallas_puzzles.course.inputs import GRADIENTS, Budget, Question, case, draw, integers, normal, question
from pallas_puzzles.speed.work import Size, Sizes, size, sweep
from pallas_puzzles.text import plural

if TYPE_CHECKING:
    from pallas_puzzles.diagnose.findings import Finding


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.scores_spec,
        normal((2, 3, 192, 128), "bfloat16"),
        normal((2, 3, 320, 128), "bfloat16"),
        variants=[
            case(normal((3, 2, 80, 64)), normal((3, 2, 256, 64), scale=30.0), bq=32, bkv=256),
            case(normal((1, 4, 64, 64), "bfloat16", shift=2.0), normal((1, 4, 384, 64), "bfloat16"), bq=32, bkv=384),
            case(normal((1, 1, 64, 64)), normal((1, 1, 128, 64)), about="a single block"),
            case(
                normal((3, 1, 48, 64)),
                normal((3, 1, 384, 64)),
                bq=24,
                bkv=384,
                about="three heads, blocks of 24 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=3_244_032, vmem_bytes=163_840, calls=1, mxu_bits=16),
        claims=[  # later puzzles have other scales
            helper_claim(
                nb.block_scores,
                lambda q, k, scale: scale * jnp.dot(q, k.T),
                normal((8, 64)),
                normal((16, 64)),
                np.float32(1.5),
            )
        ],
    )


def garbage_behind(column: int) -> np.ndarray:
    """(8, 128), float32: 1, and NaN behind a column."""
    return np.where(np.arange(128) > column, np.nan, np.ones((8, 128))).astype(np.float32)


def puzzle_2(nb: Any) -> Question:
    def hide_after_spec(s: Any, last_seen: Any, first_key: Any) -> Any:
        return jnp.where(first_key + jnp.arange(s.shape[1]) <= last_seen, s, -jnp.inf)

    return question(
        nb.causal_scores_spec,
        normal((1, 2, 192, 128), "bfloat16"),
        normal((1, 2, 320, 128), "bfloat16"),
        variants=[
            case(normal((2, 1, 192, 64)), normal((2, 1, 400, 64)), bq=96, bkv=256),
            case(normal((1, 2, 256, 64)), normal((1, 2, 128, 64)), bq=32, about="128 queries see nothing"),
            case(normal((1, 1, 64, 64)), normal((1, 1, 128, 64)), about="a single block"),
            case(
                normal((3, 3, 48, 64)),
                normal((3, 3, 384, 64)),
                bq=24,
                bkv=384,
                about="three heads, blocks of 24 and 384",
            ),
        ],
        budget=Budget(hbm_bytes=1_081_344, vmem_bytes=163_840, calls=1, mxu_bits=16),
        claims=[  # decoding has one number for all rows, keys that begin anywhere, and garbage behind the last one
            helper_claim(nb.hide_after, hide_after_spec, normal((8, 128)), np.int32(270), np.int32(200)),
            helper_claim(nb.hide_after, hide_after_spec, garbage_behind(70), np.int32(270), np.int32(200)),
        ],
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.causal_attention_spec,
        normal((1, 2, 192, 128), "bfloat16"),
        normal((1, 2, 384, 128), "bfloat16"),
        normal((1, 2, 384, 128), "bfloat16", shift=0.5),
        variants=[
            case(
                normal((1, 3, 256, 64), "bfloat16"),
                normal((1, 3, 256, 64), "bfloat16"),
                normal((1, 3, 256, 64), "bfloat16", shift=-2.0),
                bq=128,
                budget=nb.naive_budget(1, 3, 256, 256, 64, 128),
            ),
            case(
                integers((2, 1, 80, 64), -12, 13, "float32"),
                integers((2, 1, 768, 64), -12, 13, "float32"),
                normal((2, 1, 768, 64)),
                bq=40,
                bkv=256,
                budget=dataclasses.replace(nb.naive_budget(2, 1, 80, 768, 64, 40, itemsize=4), grid_steps=28),
                about="scores beyond 200: exp overflows at 89",
            ),
            case(normal((1, 1, 64, 64)), normal((1, 1, 128, 64)), normal((1, 1, 128, 64)), about="a single block"),
            case(
                *[normal((1, 1, n, 64), dtype) for n, dtype in ((64, "bfloat16"), (128, "bfloat16"), (128, "float32"))],
                about="v in float32, q and k in bfloat16",
            ),
            case(
                *[normal((3, 3, n, 64)) for n in (48, 384, 384)],
                bq=24,
                bkv=384,
                about="three heads, blocks of 24 and 384",
            ),
        ],
        budget=nb.naive_budget(1, 2, 192, 384, 128, 64),
    )


def alone(shape: tuple[int, int], row: int, value: float) -> np.ndarray:
    """float32: a row of this value among rows of 0."""
    return np.where(np.arange(shape[0])[:, None] == row, value, np.zeros(shape)).astype(np.float32)


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.one_block_spec,
        normal((64, 128), "bfloat16", scale=2.0),
        normal((640, 128), "bfloat16"),
        normal((640, 128), "bfloat16", shift=0.5),
        variants=[
            case(
                integers((32, 64), 4, 13, "float32"),
                integers((768, 64), -12, -3, "float32"),
                normal((768, 64)),
                bkv=256,
                about="scores around -500",
            ),
            case(
                integers((48, 64), -40, 41, "float32"),
                integers((384, 64), -40, 41, "float32"),
                normal((384, 64), shift=2.0),
                bkv=64,
                about="scores beyond 2000",
            ),
            case(normal((64, 64)), normal((128, 64)), normal((128, 64)), about="a single block"),
            case(
                *[normal((n, 128), "bfloat16", scale=scale) for n, scale in ((256, 1.0), (128, 0.3), (128, 1.0))],
                about="a single block, in bfloat16",
            ),
            case(
                integers((24, 128), 36, 45, "float32"),
                integers((384, 128), -44, -35, "float32"),
                normal((384, 128)),
                bkv=192,
                about="scores around -18,000",
            ),
            case(
                alone((64, 64), 0, 10.0),
                alone((256, 64), 200, 2.0),
                normal((256, 64)),
                about="one score is 160, all others are 0",
            ),
        ],
        budget=Budget(hbm_bytes=360_448, vmem_bytes=197_120, calls=1, output_stores=1, mxu_bits=16),
        forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((2, 3, 192, 128), "bfloat16", scale=2.0),
        normal((2, 3, 384, 128), "bfloat16"),
        normal((2, 3, 384, 128), "bfloat16", shift=0.5),
        variants=[
            case(
                integers((1, 2, 80, 64), -25, 26, "float32"),
                integers((1, 2, 768, 64), -25, 26, "float32"),
                normal((1, 2, 768, 64), shift=2.0),
                bq=32,
                bkv=256,
                budget=nb.flash_budget(1, 2, 80, 768, 64, 32, 256, itemsize=4),
                about="scores of about 1000, and a ragged length",
            ),
            case(
                integers((2, 1, 100, 64), 4, 13, "bfloat16"),
                integers((2, 1, 256, 64), -12, -3, "bfloat16"),
                normal((2, 1, 256, 64), "bfloat16"),
                bq=48,
                bkv=64,
                budget=nb.flash_budget(2, 1, 100, 256, 64, 48, 64),
                about="scores around -500",
            ),
            case(normal((1, 1, 64, 64)), normal((1, 1, 128, 64)), normal((1, 1, 128, 64)), about="a single block"),
            case(
                *[normal((3, 3, n, 64)) for n in (48, 384, 384)],
                bq=24,
                bkv=192,
                about="three heads, blocks of 24 and 192",
            ),
        ],
        budget=nb.flash_budget(2, 3, 192, 384, 128, 64, 128),
        forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.causal_attention_spec,
        normal((1, 2, 320, 128), "bfloat16", scale=2.0),
        normal((1, 2, 384, 128), "bfloat16"),
        normal((1, 2, 384, 128), "bfloat16", shift=0.5),
        variants=[
            case(
                integers((2, 1, 500, 64), -12, 13, "float32"),
                integers((2, 1, 512, 64), -12, 13, "float32"),
                normal((2, 1, 512, 64), shift=2.0),
                bq=96,
                bkv=256,
                budget=Budget(hbm_bytes=2_609_152, flops=135_000_000, calls=1, output_stores=1, serial_steps=2),
            ),
            case(
                integers((1, 2, 256, 64), 4, 13, "bfloat16"),
                integers((1, 2, 256, 64), -12, -3, "bfloat16"),
                normal((1, 2, 256, 64), "bfloat16"),
                bq=128,
                bkv=64,
                budget=Budget(hbm_bytes=327_680, flops=28_000_000, calls=1, output_stores=1, serial_steps=4),
                about="scores around -500",
            ),
            *(
                case(normal((1, 1, Sq, 64)), normal((1, 1, 64, 64)), normal((1, 1, 64, 64), shift=2.0), bq=32, bkv=16)
                for Sq in (63, 50)  # the diagonal leaves out the last key of a block, and reaches the first of one
            ),
            case(
                normal((1, 1, 64, 64)), normal((1, 1, 64, 64)), normal((1, 1, 64, 64)), bkv=64, about="a single block"
            ),
            case(
                *[normal((3, 3, n, 64)) for n in (48, 384, 384)],
                bq=24,
                bkv=192,
                about="three heads, blocks of 24 and 192",
            ),
        ],
        budget=Budget(
            hbm_bytes=1_638_400, flops=99_000_000, vmem_bytes=294_912, calls=1, output_stores=1, serial_steps=3
        ),
        forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.attention_lse_spec,
        normal((1, 2, 200, 128), "bfloat16", scale=2.0),
        normal((1, 2, 360, 128), "bfloat16"),
        normal((1, 2, 360, 128), "bfloat16", shift=0.5),
        variants=[
            case(
                integers((2, 1, 80, 64), -12, 13, "float32"),
                integers((2, 1, 600, 64), -12, 13, "float32"),
                normal((2, 1, 600, 64), shift=2.0),
                causal=False,
                bq=32,
                bkv=256,
                about="not causal",
                budget=Budget(hbm_bytes=1_925_760, flops=41_000_000, calls=1, output_stores=1),
            ),
            case(
                normal((1, 2, 300, 64), "bfloat16"),
                normal((1, 2, 130, 64), "bfloat16"),
                normal((1, 2, 130, 64), "bfloat16"),
                bq=96,
                bkv=64,
                about="170 queries see nothing",
                budget=Budget(hbm_bytes=288_096, flops=21_500_000, calls=1, output_stores=1),
            ),
            case(
                integers((1, 1, 256, 64), 4, 13, "bfloat16"),
                integers((1, 1, 512, 64), -12, -3, "bfloat16"),
                normal((1, 1, 512, 64), "bfloat16"),
                bq=128,
                bkv=256,
                about="scores around -500",
                budget=Budget(hbm_bytes=328_704, flops=36_200_000, calls=1, output_stores=1),
            ),
            case(
                *[normal((1, 1, n, 64), scale=2.0) for n in (64, 65, 65)],
                bq=32,
                bkv=16,
                about="only the last query sees the last block of keys",
            ),
            case(
                *[normal((1, 1, 287, 64), scale=2.0) for _ in range(3)],
                causal=False,
                bq=80,
                bkv=96,
                about="not causal, and the last block of keys has one row too many",
            ),
            case(normal((1, 1, 64, 64)), normal((1, 1, 128, 64)), normal((1, 1, 128, 64)), about="a single block"),
            case(
                *[normal((3, 3, n, 64)) for n in (100, 72, 72)],
                causal=False,
                bq=24,
                bkv=24,
                about="three heads, not causal, and more queries than keys",
            ),
        ],
        budget=Budget(hbm_bytes=1_574_464, flops=99_000_000, vmem_bytes=295_424, calls=1, output_stores=1),
        forbid=("softmax", "log_softmax", "logsumexp", "dot_product_attention"),
    )


def coded(numbers: Any) -> Any:
    """(1, 1, n, 64): the 8 bits of each number as 1 and -1, 8 times over. Row . itself is 64, . another at most 48."""
    bits = np.asarray(numbers)[:, None] >> np.arange(8) & 1
    return (2 * np.repeat(bits, 8, axis=1) - 1)[None, None].astype(jnp.bfloat16)


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.delta_spec,
        normal((1, 2, 192, 64)),
        normal((1, 2, 384, 64)),
        normal((1, 2, 384, 64), shift=0.5),
        normal((1, 2, 192, 64)),
        variants=[
            case(
                normal((2, 1, 200, 128), scale=3.0),
                normal((2, 1, 136, 128), scale=3.0),
                normal((2, 1, 136, 128)),
                normal((2, 1, 200, 128), shift=1.0),
                bq=32,
                budget=Budget(hbm_bytes=2_772_096, calls=2),
            ),
            case(
                # each query finds its own key alone, so that o is one row of v, exactly
                1000 * coded(np.arange(96) * 37 % 256),
                coded(np.arange(256)),
                normal((1, 1, 256, 64), "bfloat16", shift=1.0),
                normal((1, 1, 96, 64), "bfloat16", shift=1.0),
                bq=48,
                bkv=64,
                about="each query sees one key alone",
                budget=Budget(calls=2),
            ),
            case(
                normal((1, 1, 64, 64)),
                normal((1, 1, 128, 64)),
                normal((1, 1, 128, 64)),
                normal((1, 1, 64, 64)),
                about="a single block",
            ),
            case(
                1000 * coded(np.arange(96) * 41 % 256),
                coded(np.arange(256)),
                normal((1, 1, 256, 64), "bfloat16"),
                normal((1, 1, 96, 64)),
                bq=48,
                bkv=64,
                about="do in float32, and o in bfloat16",
            ),
            case(
                *[normal((3, 3, n, 128)) for n in (72, 192, 192, 72)],
                bq=24,
                bkv=192,
                about="blocks of 24 and 192",
            ),
        ],
        budget=Budget(hbm_bytes=1_575_936, calls=2),
        forbid=("softmax", *GRADIENTS),
    )


def grads_case(
    B: int, H: int, Sq: int, Skv: int, D: int, dtype: str = "float32", scale: float = 1.0
) -> tuple[Any, ...]:
    """q, k, v and do, to be drawn. Scores have a standard deviation of scale**2."""
    q, do = (normal((B, H, Sq, D), dtype, scale=s, shift=0.1) for s in (scale, 1.0))
    k, v = (normal((B, H, Skv, D), dtype, scale=s, shift=0.1) for s in (scale, 1.0))
    return q, k, v, do


def puzzle_9(nb: Any) -> Question:
    def p_and_ds_spec(s: Any, dp: Any, lse: Any, delta: Any, seen: Any) -> tuple[Any, Any]:
        p = jnp.where(seen, jnp.exp(s - lse), 0)
        return p, jnp.where(seen, p * (dp - delta), 0)

    tile, column = normal((16, 128)), normal((16, 1))
    seen = np.arange(16)[:, None] % 5 * 32 > np.arange(128)  # some rows see nothing
    overflow = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    overflow[4, :8] = np.inf  # where it is seen: it must not be made finite
    blind = np.where(seen.any(axis=1, keepdims=True), 0.5, -np.inf).astype(np.float32)
    beyond = np.where(seen, overflow[::-1], np.nan).astype(np.float32)
    return question(
        nb.dq_spec,
        *grads_case(1, 2, 256, 320, 64),
        variants=[
            case(
                *grads_case(1, 1, 200, 136, 128),
                bq=40,
                budget=Budget(hbm_bytes=998_528, flops=35_000_000, calls=3),
                about="64 queries see nothing",
            ),
            case(
                *grads_case(2, 1, 72, 300, 64, scale=4.0),
                causal=False,
                bq=24,
                budget=Budget(hbm_bytes=2_103_552, flops=39_000_000, calls=3),
            ),
            case(
                *grads_case(1, 1, 96, 288, 128, "bfloat16"),
                bq=48,
                budget=Budget(hbm_bytes=730_624, flops=43_000_000, mxu_bits=16, calls=3),
            ),
            case(*grads_case(1, 1, 64, 129, 64), causal=False, bq=32, bkv=64, about="one key in the last block"),
            case(*grads_case(1, 1, 64, 128, 64), about="a single block"),
            case(
                *grads_case(3, 3, 100, 192, 64),
                causal=False,
                bq=24,
                bkv=192,
                about="three heads, not causal, and no key beyond the edge",
            ),
        ],
        budget=Budget(hbm_bytes=2_629_632, flops=93_000_000, calls=3, output_stores=1),
        forbid=("softmax", *GRADIENTS),
        claims=[  # p is for Puzzle 10
            helper_claim(nb.p_and_ds, p_and_ds_spec, tile, tile, column, column, seen),
            helper_claim(nb.p_and_ds, p_and_ds_spec, normal((16, 128), shift=-9.0), overflow, column, column, seen),
            helper_claim(nb.p_and_ds, p_and_ds_spec, tile, beyond, blind, column, seen),
        ],
    )


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.attention_grads_spec,
        *grads_case(1, 2, 256, 320, 64),
        variants=[
            case(
                *grads_case(1, 1, 200, 136, 128),
                bq=32,
                bkv=64,
                budget=Budget(hbm_bytes=2_016_000, flops=46_500_000, calls=4),
                about="64 queries see nothing",
            ),
            case(
                *grads_case(2, 1, 72, 300, 64, scale=4.0),
                causal=False,
                bq=24,
                budget=Budget(hbm_bytes=2_942_592, flops=71_000_000, calls=4),
            ),
            case(
                *grads_case(1, 1, 160, 288, 128, "bfloat16"),
                bq=48,
                budget=Budget(hbm_bytes=1_897_984, flops=150_000_000, mxu_bits=16, calls=4),
            ),
            case(
                *grads_case(1, 1, 160, 288, 64),
                bq=128,
                bkv=256,
                budget=Budget(grid_steps=14, calls=4),
                about="large blocks",
            ),
            case(*grads_case(1, 1, 64, 128, 64), about="a single block"),
            case(
                *grads_case(3, 3, 100, 192, 64),
                causal=False,
                bq=24,
                bkv=192,
                about="three heads, not causal, and no key beyond the edge",
            ),
        ],
        budget=Budget(hbm_bytes=3_750_912, flops=170_000_000, calls=4, output_stores=1),
        forbid=("softmax", *GRADIENTS),
    )


def grouped_case(B: int, H: int, Hkv: int, Sq: int, Skv: int, D: int, dtype: str = "float32") -> tuple[Any, ...]:
    """q, k, v and do, to be drawn: H heads of q and do, Hkv heads of k and v."""
    q, do = normal((B, H, Sq, D), dtype, shift=0.1), normal((B, H, Sq, D), dtype, shift=0.1)
    return q, normal((B, Hkv, Skv, D), dtype, shift=0.1), normal((B, Hkv, Skv, D), dtype, shift=0.1), do


def puzzle_11(nb: Any) -> Question:
    return question(
        nb.grouped_grads_spec,
        *grouped_case(1, 4, 2, 192, 320, 64),
        variants=[
            case(
                *grouped_case(1, 3, 1, 200, 136, 128),
                bq=40,
                bkv=64,
                budget=Budget(hbm_bytes=4_927_424, flops=134_000_000, calls=4),
                about="one head of keys and values for three of queries",
            ),
            case(
                *grouped_case(2, 6, 2, 40, 140, 64),
                causal=False,
                bq=24,
                bkv=64,
                budget=Budget(hbm_bytes=5_630_720, flops=139_000_000, calls=4),
            ),
            case(
                *grouped_case(1, 4, 2, 96, 160, 128, "bfloat16"),
                bq=32,
                budget=Budget(hbm_bytes=1_943_552, flops=170_000_000, mxu_bits=16, calls=4),
            ),
            case(*grouped_case(1, 1, 1, 64, 128, 64), about="a single head and block"),
            case(
                *grouped_case(3, 3, 3, 48, 192, 64),
                bq=24,
                bkv=192,
                budget=Budget(output_stores=1),
                about="three heads, each a group of its own",
            ),
            case(*grouped_case(1, 4, 2, 64, 128, 64), budget=Budget(output_stores=1), about="one block of queries"),
        ],
        budget=Budget(hbm_bytes=6_383_616, flops=290_000_000, calls=4, output_stores=1),
        forbid=("softmax", *GRADIENTS),
    )


@dataclasses.dataclass(frozen=True)
class Idle(Helper):
    """A step without work fetches nothing: its block is in VMEM already, or is the one that the next live step needs.

    live(step) says whether a step has work; word(step, asked, held) what to say of the first that fetches in vain.
    """

    live: Callable[[tuple[int, ...]], bool] = lambda step: True
    word: Callable[[tuple[int, ...], Any, Any], str] = lambda step, asked, held: ""
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def finding(self) -> "Finding | None":
        from pallas_puzzles.diagnose.findings import Finding
        from pallas_puzzles.ir.capture import source_line
        from pallas_puzzles.ir.program import lines_of
        from pallas_puzzles.lens.machine import trace

        args = draw(self.inputs, np.random.default_rng(0))
        (one,) = trace(self.call, *args, **self.keywords).traces
        k = next(k for k, o in enumerate(one.call.operands) if o.name == "k_ref")
        code, blocks = self.fn.__code__, one.blocks[k]
        lines = [line for *_, line in code.co_lines() if line is not None]
        for s in range(1, one.n):
            needed = next((blocks[n] for n in range(s, one.n) if self.live(one.steps[n])), None)
            if blocks[s] != blocks[s - 1] and blocks[s] != needed:
                cause = f"Right answer, but {self.word(one.steps[s], blocks[s], blocks[s - 1])}"
                mapped = lines_of(one.call.operands[k].index_map)
                own = next((x for x in mapped if min(lines) <= x.line <= max(lines)), None)
                at = own or source_line(code.co_filename, code.co_firstlineno)
                return Finding("budget", cause, [], at, operand="hbm_bytes")
        return None


def splash_case(
    B: int, H: int, Sq: int, Skv: int, D: int, dtype: str = "float32", scale: float = 1.0
) -> tuple[Any, ...]:
    """q, k and v, to be drawn."""
    q, k = (normal((B, H, n, D), dtype, scale=scale) for n in (Sq, Skv))
    return q, k, normal((B, H, Skv, D), dtype, shift=0.5)


def two_of_three(rows: Any, columns: Any) -> Any:
    return columns % 3 != 0


def puzzle_12(nb: Any) -> Question:
    def explain_lists(q: Any, k: Any, v: Any, *, got: Any, want: Any, mask: Any, bq: int, bkv: int) -> tuple[str, str]:
        """What is wrong with the lists, or else with what is made of them: asked for when the result is wrong."""
        kinds = nb.block_kinds(mask, q.shape[2], k.shape[2], bq, bkv)
        for i, (blocks, marks) in enumerate(zip(*nb.splash_lists(kinds), strict=True)):
            listed = [(int(j), int(mark)) for j, mark in zip(blocks, marks, strict=True) if mark]
            live = [(j, int(kind)) for j, kind in enumerate(kinds[i]) if kind]
            if listed != live:
                return f"Row {i} of the lists says (block, kind) {listed}; the live blocks of row {i} are {live}.", ""
        return "", ""

    def idle(mask: Any, Sq: int, Skv: int, bq: int, bkv: int) -> Idle:
        """Nothing is fetched past the end of a list, on one head."""
        kinds = nb.block_kinds(mask, Sq, Skv, bq, bkv)

        def live(step: tuple[int, ...]) -> bool:
            return step[3] < int(np.count_nonzero(kinds[step[2]]))

        def word(step: tuple[int, ...], asked: Any, held: Any) -> str:
            _, _, i, t = step
            count = int(np.count_nonzero(kinds[i]))
            end = f"has ended after {plural(count, 'block')}" if count else "is empty"
            return (
                f"at step t = {t} of row i = {i}, where the list {end}, data_next of splash_lists asks for block "
                f"{asked[2]} while block {held[2]} is in VMEM: block {asked[2]} is fetched, and nobody uses it. "
                f"Ask for {held[2]} once more."
            )

        sizes = splash_case(1, 1, Sq, Skv, 64)
        return Idle(
            nb.splash_lists,
            nb.splash_attention,
            nb.splash_spec,
            sizes,
            live,
            word,
            {"mask": mask, "bq": bq, "bkv": bkv},
        )

    return question(
        nb.splash_spec,
        *splash_case(1, 2, 256, 384, 64),
        variants=[
            case(
                *splash_case(1, 2, 160, 300, 64, scale=4.0),
                mask=functools.partial(nb.window_mask, window=200, start=150),
                bq=32,
                bkv=64,
                budget=Budget(hbm_bytes=1_433_600, grid_steps=50, selected=200_000),
                about="the last rows could see beyond the edge",
            ),
            case(
                *splash_case(1, 1, 224, 512, 128, "bfloat16"),
                mask=functools.partial(nb.documents_mask, q_len=32, kv_len=128, skip=3),
                bq=32,
                budget=Budget(hbm_bytes=770_048, grid_steps=14, mxu_bits=16, selected=30_000),
                about="a block mask, with rows of blocks that see nothing",
            ),
            case(
                integers((1, 1, 64, 64), 4, 13, "float32"),
                integers((1, 1, 256, 64), -12, -3, "float32"),
                normal((1, 1, 256, 64)),
                mask=functools.partial(nb.window_mask, window=100, start=190),
                bq=16,
                bkv=64,
                about="scores around -500",
            ),
            case(
                *splash_case(2, 1, 96, 256, 64),
                mask=functools.partial(nb.window_mask, window=64, start=-40),
                bq=24,
                bkv=32,
                budget=Budget(hbm_bytes=163_840, grid_steps=16),
                about="the first 40 queries see nothing",
            ),
            case(
                *splash_case(1, 1, 32, 64, 64),
                mask=functools.partial(nb.window_mask, window=8, start=-100),
                bq=16,
                bkv=32,
                budget=Budget(grid_steps=2),
                about="no query sees anything",
            ),
            case(
                *splash_case(1, 1, 64, 128, 64),
                mask=functools.partial(nb.window_mask, window=50, start=60),
                about="a single block",
            ),
            case(
                *splash_case(3, 3, 48, 384, 64),
                mask=two_of_three,
                bq=24,
                bkv=192,
                about="three heads, and a mask of columns alone",
            ),
        ],
        budget=Budget(hbm_bytes=1_441_792, grid_steps=24, calls=1, output_stores=1),
        forbid=("softmax",),
        explain=explain_lists,
        claims=[
            idle(nb.recent_mask, 256, 384, 64, 128),
            idle(functools.partial(nb.documents_mask, q_len=32, kv_len=128, skip=3), 224, 512, 32, 128),
            idle(functools.partial(nb.window_mask, window=64, start=-40), 96, 256, 24, 32),
        ],
    )


def paged_case(
    lengths: list[int],
    max_pages: int,
    H: int,
    Hkv: int,
    page: int,
    D: int,
    dtype: str = "float32",
    poison: bool = False,
    low: bool = False,
) -> tuple[Any, ...]:
    """q, pages, page table, lengths. Pages are handed out in no order; the rest of a row points anywhere.

    poison: arrays in which all that belongs to nobody is NaN, drawn once and for all. low: all scores far below 0.
    """
    rng = np.random.default_rng(sum(lengths))
    needed = [-(-n // page) for n in lengths]
    num_pages = sum(needed) + 3
    table = rng.integers(0, num_pages, (len(lengths), max_pages)).astype(np.int32)
    free = list(1 + rng.permutation(num_pages - 1))  # page 0 belongs to nobody
    owned = np.zeros((num_pages, page), bool)
    for b, (n, count) in enumerate(zip(lengths, needed, strict=True)):
        for t in range(count):
            table[b, t] = free.pop()
            owned[table[b, t]] = t * page + np.arange(page) < n
    q, pages = normal((len(lengths), H, D), dtype), normal((Hkv, num_pages, page, D), dtype, scale=2.0)
    k_pages: Any = pages
    v_pages: Any = pages
    if poison:
        k_pages, v_pages = (np.where(owned[None, :, :, None], pages.draw(rng), np.nan) for _ in range(2))
    if low:
        q, k_pages = integers((len(lengths), H, D), 4, 13, dtype), integers((Hkv, num_pages, page, D), -12, -3, dtype)
    return q, k_pages, v_pages, table, np.array(lengths, np.int32)


def puzzle_13(nb: Any) -> Question:
    inputs = paged_case([40, 16, 0, 71], 6, H=16, Hkv=2, page=16, D=64)
    table, lengths = inputs[3:]

    def live(step: tuple[int, ...]) -> bool:
        return bool(step[2] * 16 < lengths[step[0]])

    def word(step: tuple[int, ...], asked: Any, held: Any) -> str:
        b, _, t = step
        last = max(-(-lengths[b] // 16) - 1, 0)
        return (
            f"at step t = {t} of user {b}, of length {lengths[b]}, the index map of the pages asks for page number "
            f"{asked[1]} while {held[1]} is in VMEM. It is fetched, and nobody uses it. In page_map, stay at the last "
            f"page: table_ref[{b}, {last}], which is {table[b, last]}."
        )

    def idle_or_empty(step: tuple[int, ...]) -> bool:
        return live(step) or (lengths[step[0]] == 0 and step[2] == 0)  # an empty one may cost a page

    return question(
        nb.paged_spec,
        *inputs,
        variants=[
            case(
                *paged_case([1, 100, 63], 4, H=8, Hkv=1, page=32, D=128, poison=True),
                budget=Budget(hbm_bytes=253_952, flops=1_040_000, grid_steps=12),
            ),
            case(
                *paged_case([130, 8, 64, 33], 9, H=24, Hkv=3, page=16, D=128, dtype="bfloat16"),
                budget=Budget(hbm_bytes=466_944, flops=3_950_000, grid_steps=108, mxu_bits=16),
            ),
            case(*paged_case([50, 9], 3, H=4, Hkv=1, page=24, D=64, low=True), about="scores around -500"),
            case(*paged_case([5], 1, H=4, Hkv=1, page=16, D=64), about="a single page"),
            case(*paged_case([200, 300], 3, H=6, Hkv=3, page=144, D=64), about="pages of 144"),
        ],
        budget=Budget(hbm_bytes=196_608, flops=740_000, grid_steps=48, calls=1, output_stores=1),
        allow=["int32", "bool"],
        forbid=("softmax",),
        claims=[Idle(nb.paged_attention, nb.paged_attention, nb.paged_spec, inputs, idle_or_empty, word)],
    )


# --- what `puzzles bench` measures -----------------------------------------------------------------------------------


def attentions(arrays: int, products: int) -> list[Size]:
    """4 heads and D = 128. arrays: q, k, v, and do for the gradients. products: matrix products of S x S x D."""
    B, H, D = 1, 4, 128
    return [
        size(
            *[normal((B, H, S, D), dtype)] * arrays,
            flops=2 * products * B * H * S * S * D,
            bq=256,
            bkv=512,
        )
        for dtype in ("float32", "bfloat16")
        for S in (512, 1024, 2048)
    ]


def jax_attention(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """The one that JAX ships, for TPUs, with the same blocks."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    blocks = flash.BlockSizes(block_q=256, block_k_major=512, block_k=512, block_b=1)
    return flash.flash_attention(q, k, v, causal=causal, sm_scale=q.shape[-1] ** -0.5, block_sizes=blocks)


def bench_5(nb: Any) -> Sizes:
    return sweep(*attentions(3, 2), peers={"JAX's": functools.partial(jax_attention, causal=False)})


def bench_6(nb: Any) -> Sizes:
    halves = [dataclasses.replace(each, flops=each.flops / 2) for each in attentions(3, 2)]
    return sweep(*halves, peers={"JAX's": functools.partial(jax_attention, causal=True)})


def bench_10(nb: Any) -> Sizes:
    # forward 2, and backward 7: both of its kernels compute the scores and their gradient again
    return sweep(*[dataclasses.replace(each, flops=each.flops / 2) for each in attentions(4, 7)])
