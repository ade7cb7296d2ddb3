"""Small changes of a reader's own program, tried where it goes another way than the course's."""

import ast

import pytest

from pallas_puzzles.course import session
from pallas_puzzles.diagnose.differences import applied
from pallas_puzzles.diagnose.slips import slips


def changed(text: str) -> list[str]:
    """The programs that one slip makes of a function's last line."""
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    made = [applied({"f": function}, [slip])["f"] for slip in slips({"f": function})]
    return [ast.unparse(each).splitlines()[-1].strip() for each in made]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("def f(r, end):\n    return r <= end", "return r < end"),
        ("def f(i, j):\n    return (i, j)", "return (j, i)"),
        ("def f(x):\n    a, b = x", "b, a = x"),
        ("def f(a, b):\n    return a - b", "return b - a"),
        ("def f(a, b):\n    return a // b", "return pl.cdiv(a, b)"),
        ("def f(a):\n    return a // 2", "return a"),
        ("def f(a, b):\n    return a & b", "return b"),
        ("def f(x, k, v):\n    return call(x)(v, k)", "return call(x)(k, v)"),
        ("def f(h, g):\n    return h.sum()", "return g.sum()"),
        ("def f(i):\n    return BlockSpec(b, lambda i, j: (i, j))", "return BlockSpec(b, lambda j, i: (i, j))"),
    ],
)
def test_a_slip_is_undone(text: str, other: str) -> None:
    assert other in changed(text)


def test_names_that_share_a_word_come_first() -> None:
    made = changed("def f(first_key, last_key, n_ref, m_ref):\n    return last_key - n_ref[0]")
    assert made.index("return first_key - n_ref[0]") < made.index("return n_ref[0] - last_key")
    assert made.index("return last_key + n_ref[0]") < made.index("return last_key - m_ref[0]")
    assert "return last_key - first_key[0]" not in made, "a Ref is no value"


def test_a_function_stays_what_it_was() -> None:
    function = ast.parse("def f(a, b):\n    return (a + b, b < 1)").body[0]
    before = ast.dump(function)
    assert isinstance(function, ast.FunctionDef)
    assert len(list(slips({"f": function}))) > 5
    assert ast.dump(function) == before


def test_a_loop_that_may_never_end_is_left_alone() -> None:
    text = "def f(n):\n    while n % 8:\n        n -= 1"
    assert changed(text) == []


# Other ways than the course's, which zeroes, adds at every step, and makes no values before it needs them
STORED_FIRST = """
def row_sum_kernel(x_ref, o_ref):
    part = x_ref[...].sum(axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = part

    @pl.when(pl.program_id(1) >= 1)
    def _():
        o_ref[...] += part


def row_sum_out_map(i, j):
    return (i, 0)
"""
UNPACKED = """
def scale_rows_kernel(a_ref, b_ref, o_ref):
    o_ref[...] = jnp.multiply(b_ref[...], a_ref[...])


def scale_rows_grad_kernel(a_ref, b_ref, g_ref, da_ref, db_ref):
    b, a, g = b_ref[...], a_ref[...], g_ref[...]

    @pl.when(pl.program_id(1) == 0)
    def _():
        da_ref[...] = jnp.zeros(da_ref.shape, da_ref.dtype)

    da_ref[...] += (b * g).sum(axis=1, keepdims=True)
    db_ref[...] = a * g
"""


@pytest.mark.parametrize(
    ("puzzle", "right", "slip", "told"),
    [
        ("basics/9", STORED_FIRST, ("(1) >= 1", "(1) > 1"), "(1) > 1)` should be `pl.when(pl.program_id(1) >= 1)`"),
        ("matmul/6", UNPACKED, ("b, a, g = b", "a, b, g = b"), "`(a, b, g)` should be `(b, a, g)`"),
    ],
)
def test_a_slip_in_what_is_written_another_way_is_told(
    puzzle: str, right: str, slip: tuple[str, str], told: str
) -> None:
    assert session.run(puzzle, overlay=right)
    verdict = session.run(puzzle, overlay=right.replace(*slip))
    assert not verdict
    assert f"{told}: then everything is right." in verdict.findings[0].cause


PLACES = """import jax.numpy as jnp


def plan(counts):
    n, E = counts.shape
    e, i = jnp.arange(E), jnp.arange(n)
    before = e[:, None] < e
    together = e[:, None] // (E // n) == e // (E // n)
    earlier = i[:, None] > i
    as_ints = lambda mask: mask.astype(counts.dtype)
    starts = counts @ as_ints(before)
    bases = counts.sum(axis=0) @ as_ints(before & together)
    places = bases + as_ints(earlier) @ counts
    return starts, places
"""


WRONG = PLACES.replace("// (E // n)", "// n")


def test_a_mistake_on_a_way_that_the_solution_does_not_take_is_told() -> None:
    assert session.run("distributed/11a", overlay=PLACES)
    said = " ".join(str(session.run("distributed/11a", overlay=WRONG)).split())
    assert "`e[:, None] // n == e // n` should be `e[:, None] // (E // n) == e // (E // n)`: then everything is" in said
