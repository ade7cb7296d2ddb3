"""Where an answer differs from a right one, which differences matter, and what is said of them."""

import ast
import random
from pathlib import Path

import pytest

from pallas_puzzles.diagnose.corrections import corrections
from pallas_puzzles.diagnose.differences import applied, differences, straightened, that_matter

RIGHT = """
def kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def x_map(i, j, k):
    return i, k
"""
OTHERWISE = '''
def kernel(a_ref, b_ref, out_ref, acc_ref):
    """The same, in other words."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def start():
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    part = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] += part

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)


def x_map(i, j, k):
    return i, k
'''


def parsed(text):
    return {node.name: straightened(node) for node in ast.parse(text).body}


def text_of(functions):
    return "\n".join(ast.unparse(functions[name]) for name in sorted(functions))


def isolated(text, is_right=None, most=40):
    """The differences that matter, where an answer is right if it has what RIGHT has, or what `is_right` asks for."""
    answer, right = parsed(text), parsed(RIGHT)
    whole = text_of(parsed(RIGHT))
    judge = is_right or (lambda functions: text_of(functions) == whole)
    return answer, that_matter(answer, differences(answer, right), judge, most)


def said(text, is_right=None):
    answer, chosen = isolated(text, is_right)
    return [(c.function, c.line, c.words) for c in corrections(answer, chosen, {}, {})]


def test_the_same_program_has_no_differences():
    again = RIGHT.replace("acc_ref[...] +=", "acc_ref[...]  +=  # the sum\n       ").replace("# the sum\n       ", "")
    assert differences(parsed(again), parsed(RIGHT)) == []


def test_other_names_and_values_with_names_are_no_differences():
    found = differences(parsed(OTHERWISE), parsed(RIGHT))
    assert [ast.unparse(d.was) for d in found] == ["jnp.zeros(acc_ref.shape, jnp.float32)"]


def test_all_differences_undone_make_the_right_program():
    answer = parsed(OTHERWISE.replace("return i, k", "return k, i").replace("== 0", "== 1"))
    again = applied(answer, differences(answer, parsed(RIGHT)))
    assert differences(again, parsed(RIGHT)) == []


def test_a_difference_that_does_not_matter_is_left():
    def judge(functions):
        return "program_id(2) == 0" in text_of(functions) and "(i, k)" in text_of(functions)

    assert said(OTHERWISE.replace("step == 0", "step == 1"), judge) == [
        ("kernel", 6, "in `kernel`, `pl.when(pl.program_id(2) == 1)` should be `pl.when(pl.program_id(2) == 0)`")
    ]


def test_two_places_in_one_expression_are_said_as_one():
    assert said(RIGHT.replace("return i, k", "return k, i")) == [
        ("x_map", 15, "in `x_map`, `(k, i)` should be `(i, k)`")
    ]


def test_two_mistakes_are_both_named():
    found = said(RIGHT.replace("return i, k", "return k, i").replace("acc_ref[...] +=", "acc_ref[...] ="))
    assert [line for _, line, _ in found] == [7, 15]


def test_what_is_missing_and_what_is_too_much():
    assert said(RIGHT.replace(", preferred_element_type=jnp.float32", "")) == [
        ("kernel", 7, "in `kernel`, `preferred_element_type=jnp.float32` is missing here")
    ]
    twice = "    acc_ref[...] = jnp.zeros_like(acc_ref)\n    acc_ref[...] += jnp.dot"
    assert said(RIGHT.replace("    acc_ref[...] += jnp.dot", twice)) == [
        (
            "kernel",
            7,
            "in `kernel`, `acc_ref[...] = jnp.zeros_like(acc_ref)` does not belong here",
        )
    ]


def test_an_operator_is_shown_with_what_it_compares():
    assert said(RIGHT.replace("(2) == 0", "(2) >= 0")) == [
        ("kernel", 3, "in `kernel`, `pl.when(pl.program_id(2) >= 0)` should be `pl.when(pl.program_id(2) == 0)`")
    ]


def test_a_function_that_is_written_quite_differently_is_named_as_a_whole():
    other = (
        RIGHT[: RIGHT.index("    @pl.when")] + "    o_ref[...] = x_ref[...]\n\n\n" + RIGHT[RIGHT.index("def x_map") :]
    )
    ((function, line, words),) = said(other)
    assert (function, line) == ("kernel", 2)
    assert words == "the mistake is in `kernel`: with the course's in its place, everything is right"


def test_what_is_long_is_not_told():
    short = RIGHT.replace("jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)", "x_ref[...]")
    ((_, line, words),) = said(short)
    assert line == 7
    assert "jnp.dot" not in words
    assert "`x_ref[...]` is what is wrong" in words


def test_nothing_is_said_when_trials_run_out():
    wrong = (
        RIGHT.replace("return i, k", "return k, i").replace("acc_ref[...] +=", "acc_ref[...] =").replace("== 0", "== 3")
    )
    assert isolated(wrong, most=2)[1] == []


def test_nothing_is_said_of_an_answer_that_all_changes_leave_wrong():
    assert isolated(RIGHT.replace("return i, k", "return k, i"), lambda functions: False)[1] == []


@pytest.mark.parametrize("changed", ["(2) == 1", "(1) == 0", "(2) != 0"])
def test_lines_are_those_of_the_answer(changed):
    ((function, line, _),) = said("\n" * 100 + RIGHT.replace("(2) == 0", changed))
    assert (function, line) == ("kernel", 103)


def test_any_two_functions_can_be_compared():
    """Of whatever a reader writes, the differences can be found, undone and put into words."""
    sources = Path(__file__).resolve().parents[1] / "solutions"
    functions = [
        node
        for file in sorted(sources.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    rng = random.Random(0)
    for _ in range(400):
        one, other = rng.sample(functions, 2)
        answer, right = {one.name: straightened(one)}, {one.name: straightened(other)}
        found = differences(answer, right)
        undone = applied(answer, found)[one.name]
        ast.unparse(undone)
        compile(ast.Module([undone], type_ignores=[]), "undone", "exec", dont_inherit=True)
        corrections(answer, found, {}, {})


def test_an_expression_of_several_lines_is_replaced_by_one_that_compiles():
    answer = parsed("def f(x):\n    return x * g(x) + jnp.where(\n        x > 0, h(x), 0\n    ).sum(axis=1)\n")
    right = parsed("def f(x):\n    return x * g(x) + h(x).sum(axis=1)\n")
    undone = applied(answer, differences(answer, right))["f"]
    compile(ast.Module([undone], type_ignores=[]), "undone", "exec", dont_inherit=True)
    assert ast.unparse(undone) == ast.unparse(right["f"])
