"""What the checks of capstone.py ask: one function a puzzle, called when that puzzle is checked.

nb: what the notebook defines, with the reader's answers in its holes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles.course.claims import Claim, Count, answered, helper_claim, line_of
from pallas_puzzles.course.inputs import GRADIENTS, Budget, Case, Question, case, integers, normal, question, uniform
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.lens.machine import listed

# What may work outside of the kernels: moves, the pieces between the parts, and all that is on integers
GELU = "mul add integer_pow tanh sub div neg exp logistic".split()
MOVES = "int32 bool transpose slice concatenate broadcast_in_dim gather scatter select_n dynamic_slice".split()
ROUTING = (
    "dot_general top_k sort exp log sign abs is_finite div max reduce_max reduce_sum logistic sub scatter-add mul add "
    "neg"
).split()

DOES_THE_WORK = "{name} does the work for you, and you have written your own."
BARRED = {
    "softmax": DOES_THE_WORK,
    "ragged_dot": DOES_THE_WORK,
    "repeat": "repeat copies keys and values in HBM, once for each query head that shares them. The course's attention "
    "takes Hkv heads of them as they are: give it those.",
}


def puzzle_1(nb: Any) -> Question:
    def parts(M: int, K: int, N: int, **more: Any) -> Case:
        x, gamma, beta = normal((M, K), scale=2.0, shift=1.0), normal((1, K), shift=1.0), normal((1, K))
        return case(x, gamma, beta, normal((K, N), scale=K**-0.5), normal((M, N)), **more)

    return question(
        nb.parts_spec,
        *parts(312, 384, 256).inputs,
        variants=[
            parts(104, 128, 17, budget=Budget(calls=5, grid_steps=5), about="17 columns"),
            parts(384, 768, 384, most=384, budget=Budget(calls=5, grid_steps=8), about="blocks of 384"),
            parts(20, 512, 512, most=511, budget=Budget(calls=5, vmem_bytes=868_352), about="20 rows, and most=511"),
        ],
        budget=Budget(hbm_bytes=8_196_480, vmem_bytes=964_736, grid_steps=33, calls=5),
        forbid=GRADIENTS,
        claims=[
            Claim(
                nb.tile,
                [
                    (512, 512, 128),
                    (640, 512, 128),
                    (300, 256, 8),
                    (400, 256, 8),
                    (17, 512, 128),
                    (120, 100, 8),
                    (512, 511, 128),
                ],
                largest,
            )
        ],
        tol=1e-4,
    )


def largest(size: int, most: int, unit: int) -> Count:
    """The largest block that fits, and what it would be with a slip."""
    fitting = [n for n in range(unit, most + 1, unit) if size % n == 0]
    found = max(fitting, default=size)
    slips = [
        ("if it were the smallest", min(fitting, default=size)),
        ("if most itself were too large", max([n for n in fitting if n < most], default=size)),
        (f"if it were no multiple of {unit}", max(n for n in range(1, most + 1) if size % n == 0)),
        ("if it did not have to divide", most // unit * unit),
        ("if it were always the whole dimension", size),
    ]
    multiple = f"multiple of {unit} up to {most}"
    return Count(
        f"the largest {multiple} that divides {size} is" if fitting else f"no {multiple} divides {size}, so it is",
        float(found),
        [f"multiples of {unit} up to {most} that divide {size}: {listed([*map(str, fitting)])}"] if fitting else [],
        [(words, float(n)) for words, n in slips if n != found],
    )


def puzzle_2(nb: Any) -> Question:
    def rows(M: int, V: int, weights: Any = None, **more: Any) -> Case:
        logits = more.pop("logits", None)
        logits = normal((M, V), scale=3.0) if logits is None else logits
        weights = normal((M, 1), shift=1.0) if weights is None else weights
        return case(logits, integers((M, 1), 0, V), weights, normal((M, 1), shift=0.5), **more)

    high = np.random.default_rng(0).normal(0, 5, (24, 256)).astype(np.float32)
    high += np.where(np.arange(24) % 2 == 0, 10_000, -10_000).astype(np.float32)[:, None]
    answers = (np.arange(32) % 16 >= 8).astype(np.float32)[:, None]
    return question(
        nb.loss_grads_spec,
        *rows(48, 384).inputs,
        variants=[
            rows(32, 17, answers, bm=8, about="17 letters; half of the rows have weight 0"),
            rows(24, 256, logits=high, bm=8, about="scores near 10,000 in some rows, near -10,000 in others"),
            rows(16, 128, logits=normal((16, 128), scale=30.0, shift=-300.0), bm=8, about="scores near -300"),
            rows(48, 200, bm=24, about="blocks of 24 rows"),
        ],
        budget=Budget(hbm_bytes=148_032, vmem_bytes=98_688, calls=1),
        allow=["mul", "broadcast_in_dim"],
        forbid=["softmax", "log_softmax", "logsumexp", "take_along_axis", *GRADIENTS],
    )


def weights_of_block(C: int, columns: int, width: int) -> list[Any]:
    """What a Block and a MoEBlock begin with: gamma1, beta1, wqkv, wo, gamma2 and beta2."""
    ends = [normal((1, C), shift=1.0, scale=0.3), normal((1, C), scale=0.3)]
    return [*ends, normal((C, columns), scale=C**-0.5), normal((width, C), scale=width**-0.5), *ends]


def puzzle_3(nb: Any) -> Question:
    def heads(B: int, T: int, C: int, d: int, H: int, Hkv: int, **more: Any) -> Case:
        wqkv, wo = normal((C, (H + 2 * Hkv) * d), scale=C**-0.5), normal((H * d, C), scale=(H * d) ** -0.5)
        return case(normal((B * T, C)), wqkv, wo, B=B, H=H, Hkv=Hkv, **more)

    return question(
        nb.heads_spec,
        *heads(2, 24, 128, 64, 4, 2).inputs,
        variants=[
            heads(3, 16, 256, 64, 6, 2, budget=Budget(calls=3, flops=26_700_000), about="a group of 3"),
            heads(1, 256, 128, 128, 2, 1, budget=Budget(calls=3, grid_steps=10, flops=102_100_000), about="256 tokens"),
            heads(1, 24, 384, 96, 3, 1, about="heads of 96"),
        ],
        budget=Budget(hbm_bytes=738_048, calls=3, flops=10_900_000),
        allow=MOVES,
        forbid=BARRED,
        tol=1e-4,
    )


class Ends(NamedTuple):
    """Another tuple with what a block needs of its weights."""

    beta2: Any
    gamma2: Any
    beta1: Any
    gamma1: Any


def puzzle_4(nb: Any) -> Question:
    def stream(B: int, T: int, C: int, F: int, H: int, Hkv: int, d: int = 64, **more: Any) -> Case:
        first = weights_of_block(C, (H + 2 * Hkv) * d, H * d)
        mlp = [normal((C, F), scale=C**-0.5), normal((F, C), scale=F**-0.5)]
        return case(normal((B * T, C), scale=2.0), *first, *mlp, B=B, H=H, Hkv=Hkv, **more)

    def through(block: Any, norm: Any, x: Any, gamma1: Any, beta1: Any, gamma2: Any, beta2: Any) -> Any:
        w = Ends(beta2, gamma2, beta1, gamma1)
        return block(norm, x, w, lambda h: (3 * h, h[:8] + 1), lambda h: (h * h, h[8:] - 1))

    def added(norm: Any, x: Any, w: Any, attend: Any, feed: Any) -> Any:
        y, kept = attend(norm(x, w.gamma1, w.beta1))
        z, extra = feed(norm(x + y, w.gamma2, w.beta2))
        return x + y + z, kept, extra

    around_spec = functools.partial(through, added, nb.norm_spec)
    around = functools.partial(through, lambda norm, *args: nb.block(*args), None)
    ends = [normal((1, 128), shift=1.0), normal((1, 128)), normal((1, 128), shift=0.5), normal((1, 128))]
    return question(
        nb.block_spec,
        *stream(2, 24, 128, 384, 4, 2).inputs,
        variants=[
            stream(3, 16, 256, 384, 2, 1, about="3 rows of 16 tokens"),
            stream(1, 40, 384, 256, 3, 1, d=96, about="40 tokens, heads of 96"),
        ],
        budget=Budget(hbm_bytes=1_428_992, calls=7),
        allow=[*MOVES, *GELU],
        forbid=BARRED,
        tol=1e-4,
        claims=[helper_claim(nb.block, around_spec, normal((24, 128), scale=2.0), *ends, call=around)],
    )


def puzzle_5(nb: Any) -> Question:
    def state(R: int, N: int, t: int, scale: float = 1.0, **more: Any) -> Case:
        v = uniform((R, N), 0.0, scale**2)
        p, m, g = normal((R, N)), normal((R, N), scale=scale), normal((R, N), scale=scale)
        return case(p, m, v, g, np.int32(t), **more)

    return question(
        nb.adam_spec,
        *state(768, 128, 3).inputs,
        variants=[
            state(64, 256, 1, bm=16, budget=Budget(calls=1, new_bytes=0), about="the first step"),
            state(40, 128, 200, scale=1e-6, bm=8, lr=0.1, about="gradients near 1e-6, and another lr"),
            state(72, 384, 2, bm=24, about="blocks of 24 rows"),
        ],
        budget=Budget(hbm_bytes=2_752_512, calls=1, new_bytes=0),
        allow=["stack", "concatenate", "broadcast_in_dim"],
        tol=1e-5,  # a step moves p by 0.001
        claims=[InPlace(nb.adam_aliases, {"p": (1, 0), "m": (2, 1), "v": (3, 2)})],
    )


@dataclasses.dataclass(frozen=True)
class InPlace:
    """`fn()` writes each result over the input that it replaces. own: by name, the numbers of the two."""

    fn: Any
    own: dict[str, tuple[int, int]]
    last = True

    def finding(self) -> Finding | None:
        """The first result that is written over another input, if there is one."""
        said = answered(self.fn)
        for name, (before, after) in self.own.items():
            over = next((n for n, m in said.items() if m == after), before)
            if over != before:
                cause = (
                    f"Right answer, but {self.fn.__name__}() writes the new {name}, output {after}, over input {over}. "
                    f"Its own input is {before}: that one nobody needs any more."
                )
                return Finding("model", cause, [], line_of(self.fn))
        return None


def puzzle_6(nb: Any) -> Question:
    def stream(B: int, T: int, C: int, F: int, E: int, H: int, Hkv: int, d: int = 64, **more: Any) -> Case:
        first = weights_of_block(C, (H + 2 * Hkv) * d, H * d)
        router = np.random.default_rng(E).normal(0, C**-0.5, (C, E)).astype(np.float32)
        experts = [normal((E, C, F), scale=C**-0.5), normal((E, F, C), scale=F**-0.5)]
        return case(normal((B * T, C), scale=2.0), *first, router, *experts, B=B, H=H, Hkv=Hkv, **more)

    return question(
        nb.moe_grad_spec,
        *stream(2, 24, 128, 256, 5, 4, 2).inputs,
        variants=[
            stream(3, 16, 256, 128, 3, 2, 1, k=1, about="one expert a token"),
            stream(1, 40, 384, 384, 3, 3, 1, d=96, about="40 tokens, heads of 96"),
        ],
        budget=Budget(grid_steps=26, calls=7, outside_flops=245_760),
        allow=[*MOVES, *ROUTING, "integer_pow", "add_any"],
        forbid={name: BARRED[name] for name in ("repeat", "ragged_dot")},
        tol=1e-4,
        claims=[  # what comes before the router is trained, too
            helper_claim(
                nb.balance_loss,
                jax.grad(lambda x, router, w1, w2: nb.experts_spec(x, router, w1, w2, k=2)[1]),
                normal((24, 128)),
                normal((128, 5), scale=0.1),
                *[np.zeros((5, 128, 128), np.float32)] * 2,
                call=lambda x, router, *_: jax.grad(functools.partial(nb.balance_loss, k=2))(x, router),
            )
        ],
    )


def puzzle_7(nb: Any) -> Question:
    def users(
        lengths: list[int], max_pages: int, C: int, H: int, Hkv: int, page: int, d: int = 64, **more: Any
    ) -> Case:
        rng = np.random.default_rng(len(lengths))
        B = len(lengths)
        num_pages = B * max_pages + 1
        table = rng.permutation(num_pages)[: B * max_pages].astype(np.int32).reshape(B, max_pages)
        weights = [normal((C, (H + 2 * Hkv) * d), scale=C**-0.5), normal((H * d, C), scale=(H * d) ** -0.5)]
        pages = [normal((Hkv, num_pages, page, d)), normal((Hkv, num_pages, page, d))]
        return case(normal((B, C)), *weights, *pages, table, np.array(lengths, np.int32), **more)

    def pages_spec(x: Any, wqkv: Any, wo: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any) -> Any:
        heads = jnp.dot(x, wqkv, precision="highest").reshape(len(x), -1, k_pages.shape[-1])
        _, k, v = jnp.split(heads, [-2 * len(k_pages), -len(k_pages)], axis=1)
        return nb.append_spec(k_pages, k, table, lengths), nb.append_spec(v_pages, v, table, lengths)

    rows = normal((3, 2, 128))
    table = np.array([[4, 2, 5], [1, 3, 0], [6, 8, 7]], np.int32)
    return question(
        nb.decode_spec,
        *users([40, 16, 0, 31], 3, 128, 4, 2, 16).inputs,
        variants=[
            users([7, 8, 15], 4, 256, 3, 1, 8, d=128, about="pages of 8 tokens, three heads"),
            users([30, 50], 3, 384, 6, 3, 24, d=96, about="heads of 96, pages of 24"),
        ],
        budget=Budget(hbm_bytes=548_864, grid_steps=26, calls=3),
        allow=MOVES,
        forbid=BARRED,
        tol=1e-4,
        claims=[
            helper_claim(
                nb.append, nb.append_spec, normal((2, 9, 16, 128)), rows, table, np.array([40, 16, 0], np.int32)
            ),
            helper_claim(
                nb.decode_attention,
                pages_spec,
                *users([20, 7], 2, 128, 4, 2, 16).inputs,
                call=lambda *args: nb.decode_attention(*args)[1:],
            ),
        ],
    )
