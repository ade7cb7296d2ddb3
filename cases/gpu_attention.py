"""What the checks of gpu_attention.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_puzzles.course.claims import Cheapest, Claim, Count, helper_claim
from pallas_puzzles.course.inputs import Budget, Input, Question, case, normal, question
from pallas_puzzles.lens import gpu
from pallas_puzzles.text import plural

BF16 = "bfloat16"
OF_THE_WRAPPER = ("mul", "reduce_sum", "broadcast_in_dim")
Inputs = tuple[Input | np.ndarray, ...]


def qk(heads: int, queries: int, keys: int, D: int = 128, dtype: str = BF16, scale: float = 1.0) -> tuple[Input, Input]:
    return normal((heads, queries, D), dtype, scale=scale), normal((heads, keys, D), dtype)


def qkv(
    heads: int, queries: int, keys: int, D: int = 128, dtype: str = BF16, scale: float = 1.0
) -> tuple[Input, Input, Input]:
    return *qk(heads, queries, keys, D, dtype, scale), normal((heads, keys, D), dtype)


def shifted(inputs: Inputs, shift: float) -> Inputs:
    """Queries around `shift` and keys around -shift: all scores are far below 0."""
    q, k, *rest = inputs
    assert isinstance(q, Input)
    assert isinstance(k, Input)
    return dataclasses.replace(q, params=(1.0, shift)), dataclasses.replace(k, params=(1.0, -shift)), *rest


def apart(heads: int, queries: int, keys: int, shift: float = 4.0) -> Inputs:
    return shifted(qkv(heads, queries, keys), shift)


def puzzle_1(nb: Any) -> Question:
    return question(
        nb.scores_spec,
        normal((2, 128, 128), BF16),
        normal((2, 384, 128), BF16),
        variants=[
            case(*qk(3, 64, 256, D=64), about="D = 64"),
            case(*qk(1, 192, 512, dtype="float16"), bkv=256, about="256 keys in a block"),
            case(*qk(3, 192, 576), bkv=192, about="192 keys in a block"),
        ],
        budget=Budget(gmem_bytes=983_040, ctas=12),
        claims=[  # Puzzle 2 scales what it returns
            helper_claim(
                nb.block_scores,
                lambda q, k: jnp.dot(q, k.T, preferred_element_type=jnp.float32),
                normal((64, 128), BF16),
                normal((128, 128), BF16),
                call=functools.partial(one_block, nb),
            )
        ],
    )


def one_block(nb: Any, q: Any, k: Any) -> Any:
    """block_scores of one block, in a kernel around it."""

    def kernel(q_gmem: Any, k_gmem: Any, s_gmem: Any, q_smem: Any, k_smem: Any, loaded: Any) -> None:
        plgpu.copy_gmem_to_smem(q_gmem, q_smem, loaded)
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.barrier_wait(loaded)
        s_gmem[...] = nb.block_scores(q_smem, k_smem)

    tiles = [plgpu.SMEM(x.shape, x.dtype, transforms=nb.SWIZZLED) for x in (q, k)]
    result = jax.ShapeDtypeStruct((len(q), len(k)), jnp.float32)
    return plgpu.kernel(kernel, out_type=result, scratch_types=[*tiles, plgpu.Barrier(num_arrivals=2)])(q, k)


def puzzle_2(nb: Any) -> Question:
    return question(
        nb.sums_spec,
        normal((2, 128, 128), BF16),
        normal((2, 384, 128), BF16),
        variants=[
            case(*qk(1, 64, 512, D=64, scale=200.0), about="scores of up to 700"),
            case(*qk(3, 64, 192, D=64), bkv=64, about="D = 64, 64 keys in a block"),
            case(*apart(1, 64, 256)[:2], about="scores of about -180"),
            case(*qk(3, 192, 384, dtype="float16"), bkv=192, about="float16, 192 keys in a block"),
        ],
        forbid={"exp": "Use jnp.exp2: the chip has an instruction for 2^x and none for e^x, so {name} costs one more."},
    )


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((2, 128, 128), BF16),
        normal((2, 384, 128), BF16),
        normal((2, 384, 128), BF16),
        variants=[
            case(*qkv(1, 64, 512, scale=60.0), about="scores of up to 300"),
            case(*qkv(3, 64, 384, D=64, dtype="float16"), bkv=192, about="D = 64, 192 keys in a block, float16"),
            case(*qkv(3, 192, 384, dtype="float16"), bkv=192, about="float16, 192 keys in a block"),
        ],
        budget=Budget(gmem_bytes=917_504, copies=28, smem_bytes=82_000),
    )


def puzzle_4(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((1, 128, 128), BF16),
        normal((1, 640, 128), BF16),
        normal((1, 640, 128), BF16),
        variants=[
            case(*qkv(2, 64, 320, D=64), slots=3, budget=Budget(copies=22), about="three slots"),
            case(*qkv(1, 64, 128), slots=4, budget=Budget(copies=5), about="fewer blocks than slots"),
            case(*qkv(1, 64, 384), bkv=128, about="128 keys in a block"),
            case(*qkv(1, 128, 640), slots=1, budget=Budget(waited=27_000), l2=True, about="a single slot"),
            case(*qkv(3, 192, 576, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(copies=42, waited=16_200),
        l2=True,
    )


def puzzle_5(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((2, 128, 128), BF16),
        normal((2, 640, 128), BF16),
        normal((2, 640, 128), BF16),
        variants=[
            case(
                *qkv(1, 256, 640, D=64),
                slots=3,
                budget=Budget(tensor_idle=12_000),
                l2=True,
                about="D = 64, three slots",
            ),
            case(*qkv(1, 128, 128), about="a single block"),
            case(*qkv(2, 128, 640), slots=1, budget=Budget(tensor_idle=18_000), l2=True, about="a single slot"),
            case(*qkv(3, 384, 576, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(gmem_bytes=786_432, copies=24),
        l2=True,
    )


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((1, 128, 128), BF16),
        normal((1, 1280, 128), BF16),
        normal((1, 1280, 128), BF16),
        variants=[
            case(*qkv(2, 128, 448, D=64), bkv=64, slots=3, about="three slots of 64 keys"),
            case(*qkv(1, 256, 128), about="a single block"),
            case(*qkv(1, 128, 1280), bkv=64, budget=Budget(tensor_idle=9_200), l2=True, about="20 blocks of 64 keys"),
            case(*qkv(3, 384, 576, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(tensor_idle=8_000),
        l2=True,
    )


def puzzle_6b(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        normal((1, 128, 128), BF16),
        normal((1, 1280, 128), BF16),
        normal((1, 1280, 128), BF16),
        variants=[
            case(*qkv(2, 128, 448, D=64), bkv=64, slots=3, about="three slots of 64 keys"),
            case(*qkv(1, 256, 512, scale=60.0), about="scores of up to 300"),
            case(*qkv(1, 128, 128, dtype="float16"), about="a single block, float16"),
            case(*qkv(2, 128, 640), slots=1, about="a single slot"),
            case(*qkv(3, 384, 576, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(tensor_idle=6_400),
        l2=True,
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.causal_spec,
        normal((1, 384, 128), BF16),
        normal((1, 640, 128), BF16),
        normal((1, 640, 128), BF16),
        variants=[
            case(*qkv(2, 256, 256, D=64), bkv=64, slots=3, about="64 keys in a block, as many queries as keys"),
            case(*qkv(1, 200, 304, D=64), bkv=64, about="200 queries, 304 keys"),
            case(*qkv(1, 320, 320), about="320 queries: a warpgroup has none"),
            case(*apart(1, 384, 384, 16.0), bkv=192, about="192 keys in a block, scores of about -2,900"),
            case(*qkv(3, 200, 304, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(flops=102_000_000, copies=30),
        l2=True,
        claims=[
            Claim(
                nb.clear_blocks,
                [(0, 0, 128), (0, 127, 128), (0, 126, 128), (64, 256, 128), (192, 100, 64), (64, 0, 64), (128, 0, 192)],
                clear,
            ),
            Claim(
                nb.seen_blocks,
                [(0, 64, 0, 128), (64, 64, 0, 128), (64, 64, 1, 128), (192, 64, 100, 64), (0, 128, 256, 192)],
                seen,
            ),
        ],
    )


def puzzle_7b(nb: Any) -> Question:
    return question(
        nb.causal_spec,
        normal((1, 384, 128), BF16),
        normal((1, 1088, 128), BF16),
        normal((1, 1088, 128), BF16),
        variants=[
            case(*qkv(2, 256, 256, D=64), bkv=64, slots=3, about="64 keys in a block, as many queries as keys"),
            case(*qkv(1, 320, 320), about="320 queries: a warpgroup has none"),
            case(*qkv(1, 128, 128), about="a single block"),
            case(*qkv(3, 200, 304, D=64, dtype="float16"), bkv=192, about="three heads, float16, 192 keys in a block"),
        ],
        budget=Budget(tensor_idle=23_000),
        l2=True,
    )


def clear(first: int, offset: int, bkv: int) -> Count:
    """How many blocks of keys the first query of a tile, and so all of them, see in full."""
    found = sum(j * bkv + bkv - 1 <= first + offset for j in range(first + offset + bkv))
    slips = [
        ("with a block that it sees in part", found + 1.0),
        ("without a block that ends with its own key", found - 1.0),
    ]
    parts = [f"query {first} sees keys 0 to {first + offset}", f"block j ends with key j * {bkv} + {bkv - 1}"]
    return Count("clear blocks:", float(found), parts, slips)


def seen(first: int, rows: int, offset: int, bkv: int) -> Count:
    """How many blocks of keys the last query of a tile, and so one of them at least, sees."""
    last = first + rows - 1 + offset
    found = sum(j * bkv <= last for j in range(last + 1))
    slips = [("without the block that it sees in part", found - 1.0), ("with a block that nobody sees", found + 1.0)]
    parts = [f"query {first + rows - 1} sees keys 0 to {last}", f"block j begins with key j * {bkv}"]
    return Count("blocks that are seen:", float(found), parts, slips)


def puzzle_8(nb: Any) -> Question:
    return question(
        nb.grouped_spec,
        *grouped_qkv(8, 2, 32, 640),
        variants=[
            case(
                *grouped_qkv(8, 1, 40, 304, D=64),
                bkv=64,
                slots=3,
                budget=Budget(gmem_bytes=315_392),
                about="8 heads a group, 40 queries",
            ),
            case(*shifted(grouped_qkv(2, 1, 64, 320), 16.0), about="scores of about -2,900"),
            case(*grouped_qkv(1, 1, 1032, 1032, D=64), bkv=256, about="groups of one head, 1,032 queries"),
            case(*grouped_qkv(4, 2, 72, 200, D=64, dtype="float16"), bkv=64, about="groups of two heads, float16"),
            case(*grouped_qkv(12, 3, 40, 304, D=64), bkv=192, about="three groups of four heads, 192 keys in a block"),
        ],
        budget=Budget(gmem_bytes=786_432, copies=36),
        l2=True,
    )


def grouped_qkv(
    heads: int, kv_heads: int, queries: int, keys: int, D: int = 128, dtype: str = BF16
) -> tuple[Input, Input, Input]:
    kv = normal((kv_heads, keys, D), dtype)
    return normal((heads, queries, D), dtype), kv, kv


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.decoding_spec,
        *decoding(3, 8, 2, 512, [512, 300, 70]),
        variants=[
            case(
                *decoding(2, 8, 1, 448, [1, 448]),
                parts=4,
                budget=Budget(cta_bytes=72_000),
                about="8 heads a group; a sequence of one key, and one of 7 blocks in 4 parts",
            ),
            case(
                *decoding(4, 2, 2, 256, [129, 256, 64, 1]),
                bkv=128,
                parts=3,
                about="groups of one head, three parts",
                budget=Budget(copies=48),
            ),
            case(*decoding(2, 4, 2, 512, [450, 30], scale=60.0), parts=3, slots=3, about="scores of up to 300"),
            case(*shifted(decoding(1, 4, 1, 256, [200]), 4.0), about="scores of about -180"),
            case(*decoding(2, 8, 2, 384, [300, 10]), bkv=192, parts=2, about="192 keys in a block"),
        ],
        budget=Budget(gmem_bytes=1_060_000, cta_bytes=136_000, copies=72),
    )


def puzzle_9b(nb: Any) -> Question:
    return question(
        nb.paged_spec,
        *in_pages(3, 8, 2, 32, 12, [300, 64, 129]),
        variants=[
            case(*in_pages(2, 4, 1, 64, 5, [320, 17]), slots=3, parts=1, about="pages of a whole block, three slots"),
            case(*in_pages(2, 4, 4, 16, 24, [380, 1]), bkv=128, parts=3, about="eight pages in a block"),
            case(
                *in_pages(2, 8, 2, 32, 12, [300, 10]),
                bkv=192,
                parts=2,
                about="192 keys in a block",
            ),
        ],
        budget=Budget(gmem_bytes=665_000, copies=84),
    )


def decoding(sequences: int, heads: int, kv_heads: int, keys: int, lengths: list[int], scale: float = 1.0) -> Inputs:
    kv = normal((sequences, kv_heads, keys, 128), BF16)
    return normal((sequences, heads, 128), BF16, scale=scale), kv, kv, np.array(lengths, np.int32)


def in_pages(sequences: int, heads: int, kv_heads: int, page: int, each: int, lengths: list[int]) -> Inputs:
    """each: how many pages a sequence has in the table. They are spread over all pages."""
    pages = normal((kv_heads, sequences * each, page, 128), BF16)
    table = np.random.default_rng(0).permutation(sequences * each).reshape(sequences, each).astype(np.int32)
    return normal((sequences, heads, 128), BF16), pages, pages, table, np.array(lengths, np.int32)


def qkv_do(heads: int, queries: int, keys: int, dtype: str = BF16, scale: float = 1.0) -> tuple[Input, ...]:
    return *qkv(heads, queries, keys, dtype=dtype, scale=scale), normal((heads, queries, 128), dtype)


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.dkv_spec,
        *qkv_do(1, 256, 384),
        variants=[
            case(*qkv_do(2, 200, 240), slots=3, about="200 queries, 240 keys, three slots"),
            case(
                *qkv_do(1, 128, 128, dtype="float16", scale=4.0),
                causal=False,
                about="no mask, float16, scores of up to 20",
            ),
            case(*shifted(qkv_do(1, 128, 192), 4.0), about="scores of about -180"),
            case(*qkv_do(3, 128, 192), about="three heads"),
        ],
        allow=OF_THE_WRAPPER,
    )


def puzzle_10b(nb: Any) -> Question:
    return question(
        nb.attention_grads_spec,
        *qkv_do(1, 256, 384),
        variants=[
            case(*qkv_do(2, 200, 240), slots=3, about="200 queries, 240 keys, three slots"),
            case(*qkv_do(1, 192, 256, dtype="float16"), causal=False, about="no mask, float16"),
            case(*qkv_do(3, 128, 192), about="three heads"),
        ],
        allow=OF_THE_WRAPPER,
        budget=Budget(gmem_bytes=1_600_000, flops=148_000_000),
    )


def puzzle_10c(nb: Any) -> Question:
    return question(
        nb.attention_grads_spec,
        *qkv_do(1, 256, 384),
        variants=[
            case(*qkv_do(2, 200, 240), about="200 queries, 240 keys: the second tile begins with block 1"),
            case(*qkv_do(1, 192, 256, dtype="float16"), causal=False, about="no mask, float16"),
            case(*qkv_do(3, 128, 192), about="three heads"),
        ],
        allow=OF_THE_WRAPPER,
        budget=Budget(tensor_idle=31_300),
        l2=True,
    )


def puzzle_11(nb: Any) -> Question:
    # heads, queries, keys, D
    sizes = [
        (64, 8192, 8192, 128),
        (64, 8192, 8192, 64),
        (16, 1032, 1024, 128),
        (32, 2048, 200, 64),
        (7, 4096, 640, 128),
    ]
    sizes += [(132, 192, 4096, 64), (40, 640, 1144, 64), (48, 1000, 3000, 128), (64, 4096, 4096, 192)]
    sizes += [(16, 2048, 2048, 128)]  # another plan takes nearly as few cycles
    plans = [(2, 192, 2), (3, 128, 1), (2, 64, 4), (3, 64, 3)]
    return question(
        nb.configured_spec,
        *qkv(2, 384, 640),
        variants=[
            case(*qkv(1, 128, 1144), about="1,144 keys"),
            case(*qkv(1, 200, 200, D=64), about="200 queries and keys"),
            case(*qkv(1, 320, 704), causal=True, about="causal"),
            case(*qkv(3, 192, 320, dtype="float16"), about="three heads, float16"),
        ],
        budget=Budget(smem_bytes=163_920),
        l2=True,
        claims=[
            Claim(nb.registers, [(128, 128), (64, 256), (128, 64), (64, 192)], in_registers),
            Claim(nb.smem_bytes, [(128, 2, 128, 2), (64, 3, 64, 1), (64, 2, 64, 4)], functools.partial(held, nb)),
            Claim(nb.cycles, [(*size, *plan) for size in sizes[:5] for plan in plans], in_cycles),
            Cheapest(nb.choose, fitting, modelled, sizes, in_words),
        ],
    )


def in_registers(D: int, bkv: int) -> Count:
    """How many registers a thread of 128 needs for the tiles of a warpgroup, and with a slip."""
    acc, scores = 64 * D // 128, 64 * bkv // 128
    found = acc + scores + scores // 2
    slips = [
        ("if probabilities had 32 bits", acc + 2 * scores),
        ("without the probabilities", acc + scores),
        ("without the scores", acc + scores // 2),
        ("without the accumulator", scores + scores // 2),
        ("for all threads of a warpgroup", 128 * found),
    ]
    parts = [f"acc: {acc}, scores: {scores}, probabilities: {scores // 2}"]
    return Count("a thread needs", float(found), parts, [(words, float(n)) for words, n in slips if n != found])


def held(nb: Any, D: int, readers: int, bkv: int, slots: int) -> Count:
    """The SMEM that `configured` takes in a run."""
    q, k, v = (x.draw(np.random.default_rng(0)) for x in qkv(1, 64 * readers, bkv, D))
    run = gpu.run(nb.configured, q, k, v, readers=readers, bkv=bkv, slots=slots)
    found = run.counts.smem_bytes
    queries, block, barriers = readers * 64 * D * 2, bkv * D * 2, readers + 4 * slots
    slips = [
        ("without barriers", queries + 2 * slots * block),
        ("with the slots of K alone", queries + slots * block + barriers * 8),
        ("with one slot of each", queries + 2 * block + barriers * 8),
        ("with the queries of one reader", queries // readers + 2 * slots * block + barriers * 8),
        ("without the queries", 2 * slots * block + barriers * 8),
        ("with elements of one byte", queries // 2 + slots * block + barriers * 8),
        ("with one barrier for all queries", queries + 2 * slots * block + (1 + 4 * slots) * 8),
        ("with one barrier for each slot of a stream", queries + 2 * slots * block + (readers + 2 * slots) * 8),
        ("with barriers for one stream", queries + 2 * slots * block + (readers + 2 * slots) * 8),
    ]
    parts = [f"queries: {queries:,} bytes; a block of K or V: {block:,} bytes; {barriers} barriers"]
    return Count("your kernel holds", float(found), parts, [(words, float(n)) for words, n in slips if n != found])


def in_cycles(H: int, Sq: int, Skv: int, D: int, readers: int, bkv: int, slots: int) -> Count:
    """The cycles of a configuration by the model, and what they would be with a slip."""
    tensor, softmax, copy = readers * 4 * 64 * bkv * D / 4096, readers * 200 + bkv * 8.7, bkv * D * 2 / 56
    tiles, blocks = -(-Sq // (64 * readers)), -(-Skv // bkv)
    ctas = H * tiles
    rounds, waited = -(-ctas // 132), copy if slots == 1 else 0.0
    block = tensor + softmax + waited
    slips = [
        ("if one reader multiplied", rounds * blocks * (tensor / readers + softmax + waited)),
        ("if a multiplication and an addition were one FLOP", rounds * blocks * (tensor / 2 + softmax + waited)),
        ("if there were one product", rounds * blocks * (tensor / 2 + softmax + waited)),
        ("if the softmax took no time", rounds * blocks * (tensor + waited)),
        ("if the softmax of one reader took time", rounds * blocks * (tensor + 200 + bkv * 8.7 + waited)),
        ("if the softmax took no time for each key", rounds * blocks * (tensor + readers * 200 + waited)),
        (
            "if every key took that time in each reader",
            rounds * blocks * (tensor + readers * (200 + bkv * 8.7) + waited),
        ),
        ("if nobody waited for a copy", rounds * blocks * (tensor + softmax)),
        ("if everybody waited for each copy", rounds * blocks * (tensor + softmax + copy)),
        ("if the tensor cores worked under the softmax", rounds * blocks * (max(tensor, softmax) + waited)),
        ("for a single round", blocks * block),
        ("for a single block", rounds * block),
        ("if the last round were as short as it is full", ctas / 132 * blocks * block),
        ("if each head began a round of its own", H * -(-tiles // 132) * blocks * block),
        ("if the last block were left out", rounds * (Skv // bkv) * block),
    ]
    terms = [
        (f"{ctas} tiles for 132 SMs: {plural(rounds, 'round')} of {blocks} blocks", rounds),
        (f"a block: {tensor:,.0f} cycles of the tensor cores", tensor),
        (f"a block: {softmax:,.1f} cycles of softmax", softmax),
        (f"a block: {waited:,.0f} cycles of copies", waited),
    ]
    found = rounds * blocks * block
    return Count("the model says", found, (), [(words, n) for words, n in slips if n != found], terms=terms)


def fitting(H: int, Sq: int, Skv: int, D: int) -> list[tuple[int, int, int]]:
    """The plans whose registers and SMEM are there."""
    free = {2: 216, 3: 136}
    plans = [(readers, bkv, slots) for readers in (2, 3) for bkv in (64, 128, 192, 256) for slots in (1, 2, 3, 4)]
    return [
        (r, bkv, n) for r, bkv, n in plans if in_registers(D, bkv).value <= free[r] and smem(D, r, bkv, n) <= 232_448
    ]


def smem(D: int, readers: int, bkv: int, slots: int) -> int:
    return (readers * 64 + 2 * slots * bkv) * D * 2 + (readers + 4 * slots) * 8


def modelled(H: int, Sq: int, Skv: int, D: int, *plan: int) -> tuple[float, int]:
    """The model of Puzzle 11: cycles, and bytes of SMEM."""
    return in_cycles(H, Sq, Skv, D, *plan).value, smem(D, *plan)


def in_words(cost: tuple[float, int]) -> str:
    return f"{cost[0]:,.0f} cycles and {cost[1]:,.0f} bytes of SMEM"
