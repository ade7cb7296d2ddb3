"""What the checks of ladder.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles.course.claims import Claim, Count
from pallas_puzzles.course.inputs import Budget, Question, case, normal, question
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.ir.capture import source_line
from pallas_puzzles.ir.eager import operations
from pallas_puzzles.ir.readers import for_the_reader
from pallas_puzzles.lens.machine import listed
from pallas_puzzles.text import plural

HEADS = [normal((2, 64, 32), "bfloat16") for _ in range(3)]
SOFTMAX = ("softmax", "log_softmax", "logsumexp", "dot_product_attention")


SIZES = ((8, 4096, 128), (2, 1024, 64), (3, 40, 8), (2, 64, 64))


def puzzle_1(nb: Any) -> Question:
    claim = Claim(nb.eager_bytes, SIZES, functools.partial(by_programs, nb.attention))
    return question(nb.attention_spec, *HEADS, kernel=False, claims=[claim])


def puzzle_2(nb: Any) -> Question:
    claim = Claim(nb.fused_bytes, SIZES, functools.partial(by_programs, nb.fused_attention))
    return question(nb.attention_spec, *HEADS, kernel=False, claims=[claim])


def by_programs(fn: Any, H: int, T: int, D: int) -> Count:
    """How many bytes the programs of fn move, one by one.

    Each operation is a program that takes its arrays from HBM and puts its results there; a jitted function is one.
    """
    programs = operations(fn, [jax.ShapeDtypeStruct((H, T, D), jnp.bfloat16)] * 3)
    total = sum(each.moved_bytes for each in programs)
    written = sum(out.nbytes for each in programs for out in each.outs)
    slips = [("if no program read anything", written), ("if no program wrote anything", total - written)]
    slips += [(f"without {each.name}", total - each.moved_bytes) for each in programs]

    def named(arrays: Any) -> str:
        return listed([f"{x.dtype}{list(x.shape)}" for x in arrays])

    terms = [
        (f"{p.name}: {p.moved_bytes:,.0f} bytes, {named(p.arrays)} in, {named(p.outs)} out", p.moved_bytes)
        for p in programs
    ]
    return Count(f"the {plural(len(programs), 'program')} move", total, (), slips, terms=terms)


def puzzle_3(nb: Any) -> Question:
    return question(
        nb.attention_spec,
        *[normal((2, 512, 16), "bfloat16") for _ in range(3)],
        variants=[
            case(
                *[normal((3, 320, 32), "bfloat16", shift=0.5) for _ in range(3)],
                c=32,
                budget=Budget(operations=30, elements=30_720),
            ),
            case(
                *[normal((1, 96, 16), "bfloat16", scale=8.0) for _ in range(3)],
                c=96,
                about="one chunk, scores of up to 250",
            ),
            case(
                *[normal((1, 512, 16), "bfloat16") for _ in range(3)],
                c=16,
                budget=Budget(operations=30, elements=8192),
                about="more chunks than queries in one",
            ),
            case(*[normal((3, 120, 48), "bfloat16") for _ in range(3)], c=24, about="chunks of 24"),
        ],
        budget=Budget(operations=30, elements=65_536),
        kernel=False,
    )


def plainly(nb: Any, H: int, T: int, D: int, bq: int, bkv: int, chip: Any) -> dict[str, float]:
    """The terms of the model of Puzzle 5, in seconds."""
    return {
        "MXU": 4 * H * T * T * D / chip.flops_per_s,
        "HBM": nb.flash_bytes(H, T, D, bq, bkv) / chip.hbm_bytes_per_s,
        "SCORES": H * T * T * chip.score_s,
        "fill": 4 * (bq + bkv) * D / chip.hbm_bytes_per_s,
        "steps": H * (T // bq) * (T // bkv) * chip.step_s,
    }


def in_us(terms: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e6:,.4g} us" for name, seconds in terms.items())


def puzzle_4(nb: Any) -> Question:
    def cost(H: int, T: int, D: int, slow: Any, quick: Any, chip: Any) -> Count:
        (s, q), floors = (slow[2], quick[2]), [nb.flash_floor(H, T, D, *each[:2], chip) for each in (slow, quick)]
        steps = [nb.flash_steps(H, T, *each[:2]) for each in (slow, quick)]
        more, both = steps[0] - steps[1], s - q - floors[0] + floors[1]
        told = [
            *(
                (f"the floor of {n}: {floor * 1e6:,.4g} us", floor)
                for n, floor in zip(("slow", "quick"), floors, strict=True)
            ),
            (f"steps: {steps[0]:,} and {steps[1]:,}, {more:,} more", more),
            (f"without the floors, slow takes {both * 1e6:,.4g} us more", both),
        ]
        slips = [
            ("if the floors were equal", (s - q) / more),
            ("if all of the slow time were its steps", s / steps[0]),
            ("if the slow time were its floor and its steps", (s - floors[0]) / steps[0]),
            ("if the floors were added, not taken off", (s - q + floors[0] - floors[1]) / more),
            ("for one head", both / more * H),
        ]
        return Count("a step costs", both / more, (), slips, terms=told)

    shop = nb.Chip(2e12, 8e9, 1 << 20)
    figures = [
        (8, 4096, 128, (128, 128, 4.021e-3), (1024, 1024, 0.3386e-3), nb.V6E),
        (3, 768, 64, (128, 384, 4.5e-3), (384, 256, 2.5e-3), shop),
        (2, 1024, 32, (128, 256, 7.5e-3), (512, 512, 5.25e-3), shop._replace(flops_per_s=0.1e12)),
    ]
    return question(
        nb.attention_spec,
        *[normal((2, 256, 64), "bfloat16") for _ in range(3)],
        claims=[Claim(nb.step_cost, figures, cost)],
        forbid=SOFTMAX,
    )


def puzzle_5(nb: Any) -> Question:
    def time(*plan: Any) -> Count:
        terms = plainly(nb, *plan)
        mxu, hbm, scores, fill, steps = terms.values()
        value = max(mxu, hbm - fill, scores) + fill + steps
        slips = [
            ("if the softmax took no time", max(mxu, hbm - fill) + fill + steps),
            ("if the softmax waited for the MXU: the two overlap", max(mxu + scores, hbm - fill) + fill + steps),
            ("if the softmax waited for all else", max(mxu, hbm - fill) + scores + fill + steps),
            ("if steps cost nothing", value - steps),
            ("if there were no fill", max(mxu, hbm, scores) + steps),
            (
                "if the fill counted twice: it is put in by itself, and still in HBM",
                max(mxu, hbm, scores) + fill + steps,
            ),
            ("if a multiply-add were one FLOP", max(mxu / 2, hbm - fill, scores) + fill + steps),
        ]
        return Count("the model says", value, (), slips, terms=[(in_us({n: s}), s) for n, s in terms.items()])

    def cost(H: int, T: int, D: int, bq: int, bkv: int, seconds: float, chip: Any) -> Count:
        terms = plainly(nb, H, T, D, bq, bkv, chip)
        scores, fill, steps = H * T * T, terms["fill"], terms["steps"]
        slips = [
            ("if steps cost nothing", (seconds - fill) / scores),
            ("if there were no fill", (seconds - steps) / scores),
            ("if all of the time were the scores", seconds / scores),
            ("for one head", (seconds - fill - steps) / scores * H),
            ("if the products took off time, too", (seconds - fill - steps - terms["MXU"]) / scores),
        ]
        rest = seconds - fill - steps
        told = [
            *((in_us({name: each}), each) for name, each in (("fill", fill), ("steps", steps))),
            (f"{scores:,} scores", scores),
            (f"{in_us({'without fill and steps:': rest})} are left", rest),
        ]
        return Count("solved for it, score_s is", rest / scores, (), slips, terms=told)

    quick = nb.Chip(1e11, 50e9, 1 << 20, 1e-6, 1e-12)  # bound by its products
    narrow = nb.Chip(3e12, 2e9, 1 << 20, 1e-6, 1e-11)  # by its bytes
    tiles = ((3, 512, 32, 128, 256), (3, 768, 96, 256, 384), (2, 512, 64, 512, 128), (3, 768, 48, 256, 128))
    times = [(*each, chip) for each, chip in zip(tiles, (quick, narrow, narrow, nb.SMALL), strict=True)]
    v6e = nb.V6E._replace(step_s=0.42e-6)
    figures = [(8, 4096, 128, 1024, 1024, 0.3386e-3, v6e), (3, 768, 64, 256, 384, 1.5e-3, nb.SMALL)]
    return question(
        nb.attention_spec,
        *[normal((2, 1024, 64), "bfloat16") for _ in range(3)],
        variants=[
            case(*[normal((1, 768, 32), "bfloat16") for _ in range(3)], chip=quick),
            case(*[normal((3, 768, 48), "bfloat16") for _ in range(3)], chip=narrow, about="three heads of 48"),
        ],
        budget=Budget(hbm_bytes=2_621_440, vmem_bytes=460_800, grid_steps=16),
        claims=[Claim(nb.flash_time, times, time), Claim(nb.score_cost, figures, cost)],
        forbid=SOFTMAX,
    )


def mlp_inputs(M: int, D: int, F: int, shift: float = 0.0) -> list[Any]:
    return [
        normal((M, D), "bfloat16", shift=shift),
        normal((1, D), shift=1.0),
        normal((D, F), "bfloat16", scale=D**-0.5),
        normal((F, D), "bfloat16", scale=F**-0.5),
    ]


def near_zero(M: int, D: int) -> Any:
    """Rows whose mean square is as small as what the norm adds to it."""
    return normal((M, D), "bfloat16", scale=1e-3)


def between(M: int, D: int, F: int) -> list[Any]:
    """Rows that are small beside what is added to them, and a g that bfloat16 would round down."""
    _, _, w1, w2 = mlp_inputs(M, D, F)
    return [normal((M, D), "bfloat16", scale=0.03), np.full((1, D), 1 + 2**-8 - 2**-16, np.float32), w1, w2]


def cancelling(M: int, D: int, bf: int) -> list[Any]:
    """Two equal blocks of the hidden layer, and weights behind them that are far larger than their sum."""
    x, g, *_ = mlp_inputs(M, D, 2 * bf)
    rng = np.random.default_rng(7)
    w1, large, small = (rng.standard_normal(shape) * D**-0.5 for shape in ((D, bf), (bf, D), (bf, D)))
    first, second = (jnp.asarray(w, jnp.bfloat16) for w in (64 * large, small))
    w1 = np.asarray(jnp.asarray(np.concatenate([w1, w1], axis=1), jnp.bfloat16))
    return [x, g, w1, np.asarray(jnp.concatenate([first, second - first]))]


def puzzle_6(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *mlp_inputs(256, 128, 64),
        variants=[
            case(*mlp_inputs(64, 256, 128, shift=3.0), about="rows far from zero"),
            case(near_zero(32, 128), *mlp_inputs(32, 128, 64)[1:], about="rows near zero"),
            case(*between(64, 128, 64), about="numbers of g that bfloat16 does not hold"),
            case(*mlp_inputs(48, 384, 192), about="48 rows of 384"),
        ],
        budget=Budget(flops=8_388_608, hbm_bytes=3_024_384, mxu_bits=16),
        tol=3e-2,  # rounded at another place than in the spec
        kernel=False,
    )


def puzzle_7(nb: Any) -> Question:
    return question(
        nb.mlp_spec,
        *mlp_inputs(192, 256, 384),
        variants=[
            case(*mlp_inputs(96, 128, 640, shift=3.0), bm=32, about="rows far from zero"),
            case(*mlp_inputs(128, 384, 256), bm=128, bf=256, about="one step of j"),
            case(near_zero(32, 128), *mlp_inputs(32, 128, 256)[1:], bm=32, about="rows near zero"),
            case(*cancelling(32, 128, 128), bm=32, about="two blocks of the hidden layer that nearly cancel"),
            case(*mlp_inputs(96, 384, 768), bm=48, bf=384, about="blocks of 48 and 384"),
        ],
        budget=Budget(flops=76_500_000, calls=1, output_stores=1, mxu_bits=16),
        tol=1.6e-2,
    )


def misplaced(cut: Any, images: np.ndarray, P: int) -> str:
    """In words, the first number of `images` that patches (B, N, P P C) do not have in its place; "" if all are right.

    images: (B, H, W, C), in which every number is another one.
    """
    (B, H, W, C), shape = images.shape, np.shape(cut)
    if shape != (B, (H // P) * (W // P), P * P * C):
        return ""  # to be said of the shape
    b, n, i = np.indices(shape)
    (row, column), (py, rest) = divmod(n, W // P), divmod(i, P * C)
    right = images[b, row * P + py, column * P + rest // C, rest % C]
    wrong = np.argwhere(np.asarray(cut) != right)
    if not wrong.size:
        return ""
    place = tuple(wrong[0])
    held, wanted = (np.argwhere(images == value)[0].tolist() for value in (np.asarray(cut)[place], right[place]))
    other = "" if held[0] == wanted[0] else f" of image {held[0]}"
    where = f"Patch {place[1]} of image {place[0]}, place {place[2]}"
    return f"{where}: (y, x, channel) is {tuple(held[1:])}{other}, not {tuple(wanted[1:])}."


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def puzzle_8(nb: Any) -> Question:
    def explain_place(images: Any, w: Any, **_: Any) -> tuple[str, str]:
        numbers = numbered(*images.shape)
        return misplaced(nb.cut_patches(numbers, w.shape[0]), numbers, w.shape[0]), ""

    return question(
        nb.patches_spec,
        normal((3, 32, 40, 3), "bfloat16"),
        normal((8, 8, 3, 128), "bfloat16", scale=0.1),
        variants=[
            case(
                normal((2, 16, 48, 4), "bfloat16"),
                normal((16, 16, 4, 64), "bfloat16", scale=0.1),
                budget=Budget(operations=6),
                about="three patches in a row",
            ),
            case(normal((1, 12, 8, 1), "bfloat16"), normal((4, 4, 1, 32), "bfloat16"), about="one channel"),
            case(
                normal((3, 24, 36, 5), "bfloat16"),
                normal((12, 12, 5, 96), "bfloat16", scale=0.1),
                about="patches of 12 x 12",
            ),
        ],
        budget=Budget(operations=6, flops=2_949_120),
        kernel=False,
        explain=explain_place,
    )


def uses_device(call: Callable[[], Any]) -> bool:
    """Whether a call of no arguments makes a JAX array on its way: where JAX traces, that array has no values."""
    try:
        return bool(jax.make_jaxpr(lambda: jax.tree.map(lambda _: 0, call()))().eqns)
    except jax.errors.TracerArrayConversionError:
        return True


@dataclasses.dataclass(frozen=True)
class OnHost:
    """fn(images, P) is a NumPy array, all patches of all images, (B N, P P C): no program of the device's made it."""

    fn: Callable[..., Any]
    last = False

    def finding(self) -> Finding | None:
        for shape, P in (((3, 16, 24, 3), 8), ((2, 12, 8, 1), 4)):
            images, (B, H, W, C) = numbered(*shape), shape
            out = for_the_reader(self.fn, images, P)
            said = self._wrong(out, images, P, (B * (H // P) * (W // P), P * P * C))
            if not said and uses_device(functools.partial(self.fn, images, P)):
                said = "calls a function of jnp, which works on the device. Arrays of NumPy have methods of their own."
            if said:
                code = self.fn.__code__
                call = f"{self.fn.__name__}(images, {P}), with images of shape {shape},"
                return Finding("model", f"{call} {said}", [], source_line(code.co_filename, code.co_firstlineno))
        return None

    def _wrong(self, out: Any, images: np.ndarray, P: int, shape: tuple[int, int]) -> str:
        if isinstance(out, jax.Array):
            return "returns a jax.Array, which a function of jnp makes, on the device. NumPy makes it on the host."
        if not isinstance(out, np.ndarray):
            return f"returns {'None' if out is None else f'a {type(out).__name__}'}: return a NumPy array."
        if out.shape != shape:
            return f"has shape {out.shape}, not {shape}."
        where = misplaced(out.reshape(len(images), -1, shape[1]), images, P)
        return f"has patches in another order. {where}" if where else ""


def puzzle_9(nb: Any) -> Question:
    return question(
        nb.embed_spec,
        normal((360, 192), "bfloat16"),
        normal((192, 256), "bfloat16", scale=0.1),
        normal((1, 256)),
        variants=[
            case(
                normal((96, 384), "bfloat16"),
                normal((384, 128), "bfloat16", scale=0.1),
                normal((1, 128), shift=100.0),
                bm=32,
                budget=Budget(hbm_bytes=197_120, calls=1),
                about="a bias near 100",
            ),
            case(
                normal((96, 192), "bfloat16"),
                normal((192, 384), "bfloat16", scale=0.1),
                normal((1, 384)),
                bm=48,
                about="blocks of 48 rows",
            ),
        ],
        budget=Budget(hbm_bytes=421_888, vmem_bytes=214_016, grid_steps=6, calls=1, mxu_bits=16),
        claims=[OnHost(nb.host_patches)],
        tol=8e-3,
    )


def lists(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = np.array(pairs, np.int32).T
    return rows, cols


def puzzle_10(nb: Any) -> Question:
    return question(
        nb.messages_spec,
        *lists((0, 0), (0, 2), (1, 1), (2, 0), (2, 1), (2, 2)),
        normal((6, 128, 128), "bfloat16"),
        normal((384, 256), "bfloat16"),
        variants=[
            case(
                *lists((0, 1), (1, 3), (2, 3), (2, 0), (2, 1), (3, 2)),
                normal((6, 128, 128), "bfloat16", shift=0.5),
                normal((512, 128), "bfloat16"),
                budget=Budget(hbm_bytes=524_288, grid_steps=6, calls=1),
                about="the same block of x in two steps in a row",
            ),
            case(*lists((0, 0)), normal((1, 256, 256), "bfloat16"), normal((256, 128), "bfloat16"), about="one block"),
            case(
                *lists((0, 1), (1, 0), (2, 2)),
                normal((3, 384, 384), "bfloat16"),
                normal((1152, 384), "bfloat16"),
                about="a block of 384 in each row, 384 columns",
            ),
        ],
        budget=Budget(hbm_bytes=786_432, grid_steps=6, calls=1, output_stores=1, mxu_bits=16),
        tol=8e-3,
    )
