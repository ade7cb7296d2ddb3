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


# Another way than the course's, which makes a list of all plans and takes the smallest
PICKED = """
def plan_time(M, N, K, bm, bn, bk, chip):
    seconds = lambda count: count / chip.hbm_bytes_per_s
    fill = seconds(2 * (bm * bk + bk * bn + bm * bn))
    hidden = max(2 * M * N * K / chip.flops_per_s, seconds(plan_bytes(M, N, K, bm, bn, bk)) - fill)
    return hidden + fill + M // bm * (N // bn) * (K // bk) * chip.step_s


def pick_blocks(M, N, K, chip):
    best, least = None, float("inf")
    for bm in tile_sizes(M):
        for bn in tile_sizes(N):
            for bk in tile_sizes(K):
                time = plan_time(M, N, K, bm, bn, bk, chip)
                if plan_vmem(bm, bn, bk) <= chip.vmem_bytes and time < least:
                    best, least = (bm, bn, bk), time
    return best
"""


def test_what_is_written_another_way_is_right() -> None:
    assert session.run("matmul/12", overlay=PICKED)


@pytest.mark.parametrize(
    ("old", "new"),
    [("time < least", "time > least"), ("<= chip.vmem_bytes and", "<= chip.vmem_bytes // 2 and")],
)
def test_the_slip_in_it_is_told_and_not_the_whole_function(old: str, new: str) -> None:
    verdict = session.run("matmul/12", overlay=PICKED.replace(old, new))
    said = verdict.findings[0].cause
    assert not verdict
    assert "In `pick_blocks`" in said
    assert said.endswith("then everything is right.")
    assert old.split(" and")[0].split("<= ")[-1] in said.partition("should be")[2]
