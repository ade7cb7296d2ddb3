"""What the rounding model refuses and accepts, over many draws of every case: printed as a table.

    uv run python benchmarks/rounding.py [--draws 100] [regex on puzzle or change]

Each row is the course's solution with a change in it. A draw is refused when one of the puzzle's cases is. What ought
to be refused has to be refused on every draw, what ought to be accepted on none; the exit status says so.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PALLAS_PUZZLES_HOME"] = tempfile.mkdtemp()

import jax
import numpy as np

from pallas_puzzles.course import cases, curriculum, session
from pallas_puzzles.course.arrays import compare, keyword_only, keywords_of, quickly_expected
from pallas_puzzles.course.inputs import Case, Draw, Subject, draw
from pallas_puzzles.course.reference import course_of
from pallas_puzzles.diagnose.diagnose import rounded
from pallas_puzzles.diagnose.findings import Tolerance
from pallas_puzzles.lens.machine import trace

Edits = tuple[tuple[str, str], ...]


def to_16(text: str) -> str:
    """An expression, rounded to bfloat16."""
    return f"({text}).astype(jnp.bfloat16).astype(jnp.float32)"


def product(y: str) -> str:
    return f"jnp.dot(x_ref[...], {y}_ref[...], preferred_element_type=jnp.float32)"


def halves(y: str) -> str:
    """The same product, the odd columns after the even ones."""
    part = f"jnp.dot(x_ref[...][:, n::2], {y}_ref[...][n::2], preferred_element_type=jnp.float32)"
    return f"sum({part} for n in range(2))"


EIGHTHS = """jax.lax.fori_loop(0, 8, lambda n, a: a + jnp.dot(
    x_ref[:, pl.ds(n * (x_ref.shape[1] // 8), x_ref.shape[1] // 8)],
    y_ref[pl.ds(n * (x_ref.shape[1] // 8), x_ref.shape[1] // 8)],
    preferred_element_type=jnp.float32), jnp.zeros(acc_ref.shape))"""
MEAN = """jax.lax.fori_loop(0, h.shape[1] // 8, lambda n, a: a + jax.lax.dynamic_slice_in_dim(h * h, 8 * n, 8, 1).sum(
    axis=1, keepdims=True), jnp.zeros((h.shape[0], 1))) / h.shape[1]"""
SUM = "p.sum(axis=1, keepdims=True)"
BEFORE = (("acc_ref[...] +=", f"acc_ref[...] = {to_16('acc_ref[...]')} +"),)


def accumulated(product: str, before: str = "before") -> Edits:
    """The call of `accumulate`, which basics/12 gives, with what it does in its place."""
    first = "before = jnp.where(pl.program_id(2) == 0, 0, acc_ref[...])"
    return (("accumulate(x_ref, w_ref, acc_ref)", f"{first}\n    acc_ref[...] = {before} + {product}"),)


Y = "(acc_ref[...] + bias_ref[...])"

WRONG: list[tuple[str, str, Edits]] = [
    ("basics/6", "0.5% too large", (("jax.nn.sigmoid", "1.005 * jax.nn.sigmoid"),)),
    ("basics/10", "0.5% too large", (("= acc_ref[...].astype", "= (1.005 * acc_ref[...]).astype"),)),
    ("basics/12", "0.5% too large", (("jax.nn.gelu(y)", "(1.005 * jax.nn.gelu(y))"),)),
    ("matmul/7", "0.5% too large", ((" + y).astype", " + 1.005 * y).astype"),)),
    ("softmax/9", "0.5% too large", (("h * rstd", "1.005 * h * rstd"),)),
    ("flash_attention/4", "0.5% too large", (("(acc_ref[...] / l_ref", "(1.005 * acc_ref[...] / l_ref"),)),
    ("basics/10", "product in 16 bits", ((product("y"), to_16(product("y"))),)),
    ("basics/12", "product in 16 bits", accumulated(to_16(product("w")))),
    ("basics/10", "accumulator in 16 bits", BEFORE),
    ("basics/12", "accumulator in 16 bits", accumulated(product("w"), to_16("before"))),
    (
        "flash_attention/4",
        "accumulator in 16 bits",
        (("acc_ref[...] * rescale", f"{to_16('acc_ref[...]')} * rescale"),),
    ),
    ("flash_attention/9", "accumulator in 16 bits", BEFORE),
    ("flash_attention/4", "normaliser in 16 bits", (("l_ref[...] * rescale", f"{to_16('l_ref[...]')} * rescale"),)),
    ("softmax/9", "scale of a row in 16 bits", (("* rstd", f"* {to_16('rstd')}"),)),
    ("basics/12", "GELU with erf", (("gelu(y)", "gelu(y, approximate=False)"),)),
    ("matmul/7", "GELU with erf", (("bias_ref[...])", "bias_ref[...], approximate=False)"),)),
    ("matmul/7", "x * sigmoid(1.702 x)", ((f"jax.nn.gelu{Y}", f"{Y} * jax.nn.sigmoid(1.702 * {Y})"),)),
]

EXP2 = (("jnp.exp(", "(lambda t: jnp.exp2(1.4426950408889634 * t))("),)
RIGHT: list[tuple[str, str, Edits]] = [
    ("basics/6", "x / (1 + exp(-g))", (("jax.nn.sigmoid(g_ref[...])", "1 / (1 + jnp.exp(-g_ref[...]))"),)),
    ("basics/10", "odd columns after even ones", ((product("y"), halves("y")),)),
    ("basics/10", "a loop over eighths", ((product("y"), EIGHTHS),)),
    ("basics/12", "odd columns after even ones", accumulated(halves("w"))),
    ("matmul/7", "odd columns after even ones", ((product("w"), halves("w")),)),
    ("softmax/1", "exp2 for exp", EXP2),
    ("softmax/9", "1 / sqrt", (("jax.lax.rsqrt(", "1 / jnp.sqrt("),)),
    ("softmax/9", "a loop over columns", (("(h * h).mean(axis=1, keepdims=True)", MEAN),)),
    ("flash_attention/4", "exp2 for exp", EXP2),
    ("flash_attention/4", "times 1 / l", (("(acc_ref[...] / l_ref[...])", "(acc_ref[...] * (1 / l_ref[...]))"),)),
]


WIDE = Tolerance(0.15)  # what the model says alone; the ordinary tolerance is another matter


def solution(puzzle: str, edits: Edits) -> str:
    """The course's solution of a puzzle with every one of these edits made."""
    code = curriculum.puzzle(puzzle).solution
    for old, new in edits:
        if old not in code:
            raise SystemExit(f"the solution of {puzzle} has no {old!r}: change the row")
        code = code.replace(old, new)
    return code


def other_blocks(subject: Subject) -> Iterator[Case]:
    """The first case with one block at a time half or twice as large, if that is a size with which all is right."""
    first = subject.cases[0]
    for name, size in keyword_only(subject.fn).items():
        if re.fullmatch(r"b[a-z]+", name) and isinstance(size, int):
            sizes = [b for b in (size // 2, size * 2) if b >= 8]
            others = [Case(first.inputs, {name: b}, None) for b in sizes]
            yield from (each for each in others if fits(subject, each))


def fits(subject: Subject, case: Case) -> bool:
    """Whether the course's own result is right with these blocks: some have to divide what they cut."""
    for seed in range(5):  # a label in a block that is left out may be rare
        args = draw(case.inputs, np.random.default_rng(seed))
        want = quickly_expected(subject.spec, args, keywords_of(subject.spec, case.blocks))
        try:
            run = trace(subject.fn, *args, **case.blocks)
        except Exception:  # the call itself says that they do not fit
            return False
        if compare(*(jax.tree.map(np.asarray, jax.tree.leaves(x)) for x in (run.outputs, want)), WIDE):
            return False
    return True


def refused(puzzle: str, subject: Subject, case: Case, seed: int) -> str:
    """What is said of one draw of a case: "" when it is accepted."""
    drawn = Draw(case, seed=seed)
    want = drawn.want = quickly_expected(subject.spec, drawn.args, keywords_of(subject.spec, case.blocks))
    run = trace(subject.fn, *drawn.args, **case.blocks)
    if compare(*(jax.tree.map(np.asarray, jax.tree.leaves(x)) for x in (run.outputs, want)), WIDE):
        return "beyond any tolerance"
    course = course_of(puzzle, subject.spec, WIDE, drawn, run.outputs)
    found = rounded(run, want, course) if course else None
    return found.findings[0].cause if found else ""


def row(puzzle: str, subject: Subject, cases: list[Case], draws: int) -> tuple[int, list[int], str]:
    """How many draws are refused, how many by each case (the first that does), and what is said first."""
    some, said, each = 0, "", [0] * len(cases)
    for seed in range(draws):
        texts = []
        for n, case in enumerate(cases):
            texts.append(refused(puzzle, subject, case, seed))
            each[n] += bool(texts[-1])
            if texts[-1]:
                break
        some += any(texts)
        said = next(filter(None, texts), said)
    return some, each, said


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--draws", type=int, default=100)
    options.add_argument("only", nargs="?", default="")
    given = options.parse_args()
    bad = 0
    for heading, rows in (("refused on every draw", WRONG), ("accepted on every draw", RIGHT)):
        print(f"\n{heading}\n")
        for puzzle, what, edits in rows:
            if not re.search(given.only, f"{puzzle} {what}"):
                continue
            subject = session.run(puzzle, overlay=solution(puzzle, edits), judge=False).subject
            assert subject is not None
            some, each, said = row(puzzle, subject, list(subject.cases), given.draws)
            wrong = some != (given.draws if rows is WRONG else 0)
            bad += wrong
            mark = "! " if wrong else "  "
            print(f"{mark}{puzzle:18} {what:28} {some:3} of {given.draws}, by case {each}  {said[:230]}", flush=True)
    print("\nother blocks, accepted on every draw\n")
    for each_puzzle in curriculum.all_puzzles():
        subject = cases.official(each_puzzle.id)
        others = list(other_blocks(subject)) if subject.kernel else []
        if others and re.search(given.only, f"{each_puzzle.id} other blocks"):
            some, each, said = row(each_puzzle.id, subject, others, max(1, given.draws // 20))
            bad += bool(some)
            print(
                f"{'! ' if some else '  '}{each_puzzle.id:18} {len(others)} others, {some} refused {said[:200]}",
                flush=True,
            )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
