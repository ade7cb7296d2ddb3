"""Where an answer differs from a right one, which differences matter, and what is said of them."""

import ast
import random
from pathlib import Path

import pytest

from edits import edits
from pallas_puzzles.diagnose.conditions import as_both, condition_of
from pallas_puzzles.diagnose.corrections import corrections, followed
from pallas_puzzles.diagnose.differences import applied, differences, likeness, that_matter
from pallas_puzzles.diagnose.paired import paired
from pallas_puzzles.diagnose.straight import side_by_side, straightened, values_with_names

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
    step: jax.Array = pl.program_id(2)

    @pl.when(step == 0)
    def start():
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    part = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)
    acc_ref[...] += part
    del part

    @pl.when(step == pl.num_programs(2) - 1)
    def finish():
        "The last step."
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)


def x_map(i, j, k):
    return i, k
'''


def as_one(mine, right, own=None, given=None):
    """An answer and a right program in one form."""
    form = paired(mine, right, own or {}, given or {})
    return form.answer, form.right


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("acc_ref[...] += x", "acc_ref[...] = acc_ref[...] + x"),
        ("acc_ref[...] += x", "acc_ref[...] = x + acc_ref[...]"),
        ("return (a + b) * c", "return c * (b + a)"),
        ("return a < b", "return b > a"),
        ("return max([a for a in x if a < y])", "return max([b for b in x if b < y])"),
        ("return jnp.sum(x * y, axis=1)", "return (y * x).sum(axis=1)"),
        ("n = x.shape[1]\n    return n + pl.cdiv(M, n)", "return x.shape[1] + pl.cdiv(M, x.shape[1])"),
        ("m, n = x.y.shape\n    return g(m, n)", "return g(x.y.shape[0], x.y.shape[1])"),
        ("m, n = x.shape[:2]\n    return g(m, n)", "return g(x.shape[0], x.shape[1])"),
        (
            "return pl.BlockSpec((m, n), lambda i, j: (i, 0))",
            "def the_map(i, j):\n        return (i, 0)\n    return pl.BlockSpec((m, n), the_map)",
        ),
        ("x = x * 2\n    return x + y", "z = x * 2\n    return z + y"),
        ("_, n = f(x)\n    return n * y", "n = f(x)[1]\n    return n * y"),
        ("x[...] = a\n    y[...] = b", "for ref, value in ((x, a), (y, b)):\n        ref[...] = value"),
        ("a, b = x[...], y[...]\n    return a, b", "a, b = (ref[...] for ref in (x, y))\n    return a, b"),
        ("return g(x, y, bm=8)", "f = functools.partial(g, x, bm=8)\n    return f(y)"),
        ("return g(functools.partial(y, bm=8))", "f = lambda i, j: y(i, j, bm=8)\n    return g(f)"),
        ("return (g(x, 0) + x, g(x, 1) + x)", "f = lambda n: g(x, n) + x\n    return f(0), f(1)"),
        (
            "@pl.when(x == 0)\n    def _():\n        y[...] = x",
            "def start():\n        y[...] = x\n\n    pl.when(x == 0)(start)",
        ),
        ("@pl.when(x == 0)\n    def _():\n        y.start()", "pl.when(x == 0)(lambda: y.start())"),
        ("@pl.when(x == 0)\n    def _():\n        y.start()", "pl.when(x == 0)(y.start)"),
        (
            "copy(x, y).start()\n    copy(y, x).start()",
            "def move(a, b):\n        copy(a, b).start()\n\n    move(x, y)\n    move(y, x)",
        ),
    ],
)
def test_two_ways_to_write_one_thing_are_no_difference(one, other):
    one, other = (parsed(f"def f(x, y):\n    {text}\n") for text in (one, other))
    assert differences(one, other) == []
    assert differences(other, one) == []


def test_a_map_in_a_function_of_its_own_is_wrong_where_it_is_written():
    right = "def f():\n    return pl.BlockSpec((m, n), lambda i, j, k: (i, k))\n"
    answer = "def f():\n    def x_map(i, j, k):\n        return k, i\n\n    return pl.BlockSpec((m, n), x_map)\n"
    found = differences(parsed(answer), parsed(right))
    assert [(d.line, ast.unparse(d.was), ast.unparse(d.should)) for d in found] == [(3, "k", "i"), (3, "i", "k")]


def test_an_argument_of_an_inner_function_is_another_name():
    right = (
        "def f(x):\n    def add(k, acc):\n        return acc + x[k]\n"
        "    acc = jax.lax.fori_loop(0, 8, add, 0.0)\n    return acc.sum()\n"
    )
    found = differences(parsed(right.replace("acc + x", "x")), parsed(right))
    assert [(ast.unparse(d.was), ast.unparse(d.should)) for d in found] == [("x[k]", "acc + x[k]")]


def test_arguments_are_paired_by_place_or_by_name():
    right = "def f(sizes, *, bm=128):\n    return sizes // bm + 1\n"
    answer = "def f(n, *, num_rows=1024, bm=128):\n    return n // bm\n"
    found = differences(parsed(answer), parsed(right))
    assert ("n // bm", "n // bm + 1") in [(ast.unparse(d.was), ast.unparse(d.should)) for d in found]


def test_arguments_that_are_corrected_can_be_followed():
    right, answer = (parsed(f"def f(g, *, k{default}):\n    return g[:k]\n") for default in ("=2", ""))
    (only,) = corrections(answer, differences(answer, right), {}, {})
    assert only.words == "in `f`, `g, *, k` should be `g, *, k=2`"
    assert ast.unparse(followed(answer["f"], only.edits)) == ast.unparse(right["f"])


def test_what_two_long_expressions_share_is_told_as_dots():
    product = "jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32, precision='highest')"
    right = f"def f(x_ref, y_ref):\n    return {product}\n"
    answer = parsed(right.replace("return ", "return 1.0005 * "))
    chosen = differences(answer, parsed(right))
    (only,) = corrections(answer, chosen, {}, {})
    assert only.words == "in `f`, `1.0005 * jnp.dot(...)` should be `jnp.dot(...)`"
    assert ast.unparse(followed(answer["f"], only.edits)) == ast.unparse(parsed(right)["f"])


def test_all_differences_undone_make_the_right_program():
    answer = parsed(OTHERWISE.replace("return i, k", "return k, i").replace("== 0", "== 1"))
    again = applied(answer, differences(answer, parsed(RIGHT)))
    assert differences(again, parsed(RIGHT)) == []


def test_a_statement_that_is_another_one_is_replaced():
    answer, right = (
        parsed(f"def f(i, j):\n    {text}\n") for text in ("return j", "first = i // 2\n    g(first)\n    h(i)")
    )
    assert differences(applied(answer, differences(answer, right)), right) == []


def test_a_difference_that_does_not_matter_is_left():
    def judge(functions):
        return "program_id(2) == 0" in text_of(functions) and "(i, k)" in text_of(functions)

    assert said(OTHERWISE.replace("step == 0", "step == 1"), judge) == [
        ("kernel", 6, "in `kernel`, `pl.when(step == 1)` should be `pl.when(step == 0)`")
    ]


MERGED = """
def merged(parts, lse):
    every = [lse[p] for p in range(lse.shape[0])]
    top = functools.reduce(jnp.maximum, every)
    weights = [jnp.exp2(each - top) for each in every]
    return sum(parts[p] * w for p, w in enumerate(weights)) / sum(weights)
"""
ROWS = """
def centre(x_ref, o_ref, *, num_rows):
    start = pl.program_id(0) * 16
    real = (start + jnp.arange(16))[:, None] < num_rows
    x = x_ref[...]
    total = jnp.where(real, x, 0).sum(axis=0, keepdims=True)
    o_ref[...] = x - total / jnp.minimum(16, num_rows - start)
"""


@pytest.mark.parametrize(
    ("right", "answer", "told"),
    [
        (  # the variable of a comprehension is not a value that has this name
            MERGED,
            MERGED.replace("sum(weights)", "sum(jnp.exp2(each) for each in every)"),
            (6, "`sum((jnp.exp2(each) for each in every))` should be `sum(weights)`"),
        ),
        (  # a value that has no name in the answer is no difference of its own
            ROWS,
            """
def centre(x_ref, o_ref, *, num_rows):
    rows = pl.program_id(0) * 16 + jnp.arange(16)
    x = x_ref[...]
    clean = jnp.where(rows[:, None] < num_rows, x, 0)
    o_ref[...] = x - clean.mean(axis=0, keepdims=True)
""",
            (
                6,
                "`x - clean.mean(axis=0, keepdims=True)`, or `clean` in it, differs from a right one, "
                "which is like `x - (...).sum(axis=0, keepdims=True) / "
                "jnp.minimum(16, num_rows - pl.program_id(0) * 16)`",
            ),
        ),
        (  # what gives a new value to an argument gives it a new name
            "def f(x, y):\n    x, _, b = g(x, y)\n    return x, b\n",
            "def f(x, y):\n    z, _, b = g(x, y)\n    return x, b\n",
            (3, "`(x, b)` should be `(z, b)`"),
        ),
        (  # what all of it changes in is one place
            "def grid(n, b):\n    return (n // b,)\n",
            "def grid(n, b):\n    full, _ = divmod(n, b)\n    return (full + 1,)\n",
            (3, "`(full + 1,)` should be `(n // b,)`"),
        ),
    ],
)
def test_where_the_mistake_is(right, answer, told):
    mine, theirs = parsed(answer), parsed(right)
    found = corrections(mine, differences(mine, theirs), {}, {})
    assert told in [(c.line, c.words.partition(", ")[2]) for c in found]
    assert not [c for c in found if "missing" in c.words]


def test_where_a_place_gets_its_values_from():
    right = "def f(x_ref, o_ref, copy):\n    copy.wait()\n    o_ref[...] = x_ref[...] * sigmoid(x_ref[...])\n"
    answer = "def f(x_ref, o_ref, copy):\n    x = x_ref[...]\n    copy.wait()\n    o_ref[...] = x * sigmoid(x)\n"
    mine = parsed(answer)
    stored = next(c for c in corrections(mine, differences(mine, parsed(right)), {}, {}) if c.line == 4)
    assert stored.values == {2}


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


def test_one_statement_that_is_missing_is_told_with_its_condition():
    first = RIGHT.index("    @pl.when")
    missing = RIGHT[:first] + RIGHT[RIGHT.index("    acc_ref[...] +=") :]
    ((_, line, words),) = said(missing)
    assert line == 3
    assert words == (
        "in `kernel`, `acc_ref[...] = jnp.zeros_like(acc_ref)` is missing here, under `@pl.when(pl.program_id(2) == 0)`"
    )


def test_what_is_missing_in_one_place_is_put_there_in_its_order():
    right = ORDERED.replace("        copy(t + 1)", "        follow(t)\n        copy(t + 1)")
    (node,) = ast.parse(wrong := right.replace("        follow(t)\n        copy(t + 1).start()\n", "")).body
    answer = parsed(wrong)
    told = corrections(answer, differences(answer, parsed(right)), {}, {})
    done = followed(node, [edit for each in told for edit in each.edits])
    assert ast.unparse(done) == ast.unparse(ast.parse(right))


ORDERED = """
def kernel(x_ref, o_ref):
    for t in range(8):
        copy(t).wait()
        copy(t + 1).start()
        o_ref[...] += x_ref[...] * x_ref[...]
"""


def test_a_statement_in_the_wrong_place_is_moved():
    late = ORDERED.replace("        copy(t + 1).start()\n", "") + "        copy(2 * t - t + 1).start()\n"
    (node,), answer, right = ast.parse(late).body, parsed(late), parsed(ORDERED)

    def is_right(functions):
        text = text_of(functions)
        return 0 < text.find(".start()") < text.find("+=") and text.count("start") == 1

    found = differences(answer, right)
    (told,) = corrections(answer, that_matter(answer, found, is_right, 20), {}, {}, moved=found)
    assert told.words == "in `kernel`, `copy(2 * t - t + 1).start()` comes too late: it belongs behind `copy(t).wait()`"
    done = followed(node, told.edits)
    assert is_right({"kernel": done})
    assert ast.unparse(done).count("start") == 1


def test_what_differs_in_one_statement_is_tried_together():
    """x ** 2 in place of x * x is as good, and neither half of that change is."""
    written = "def f(x, y):\n    y[0] = {}\n    return g(y, {})\n".format
    answer, right = parsed(written("x ** 2", 1)), parsed(written("x * x", 2))
    found = differences(answer, right)

    def is_right(functions):
        text = text_of(functions)
        return ("x ** 2" in text or "x * x" in text) and "2)" in text

    assert [ast.unparse(d.should) for d in that_matter(answer, found, is_right, 20)] == ["2"]


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
    assert words == "`kernel`"


def test_of_what_is_long_the_form_is_told():
    long = "jnp.where(jnp.arange(x.shape[0])[:, None] < rows, x * scale + shift, jnp.zeros_like(x)).sum(axis=0)"
    answer, right = (parsed(f"def f(x, scale, shift, rows):\n    return {text} / 8\n") for text in ("x", long))
    (only,) = corrections(answer, differences(answer, right), {}, {})
    assert not only.told
    assert only.words == (
        "in `f`, `x / 8` differs from a right one, which is like "
        "`jnp.where(jnp.arange(x.shape[0])[:, None] < rows, ..., jnp.zeros_like(x)).sum(axis=0) / 8`"
    )


@pytest.mark.parametrize(
    ("right", "answer", "matters", "words"),
    [
        (  # one of the parts of a larger difference
            "return h(jnp.where(a, x, -1), k=9).astype(t) + c // d * (e + 1) - i[0]",
            "return h(jnp.where(a, x, 0)).astype(u) + d * (e - c) - i[1] // 3",
            "-1)",
            "`h(jnp.where(a, x, 0)).astype(u)` should be `h(jnp.where(a, x, -1)).astype(u)`",
        ),
        (  # what is alike stands in other surroundings, and these may stay
            "return jnp.where(a, x.astype(t), -jnp.inf) if jnp.max(a * x) > jnp.sum(b[0]) + c[1] else x",
            "return jnp.where(a, x, 0).astype(t)",
            "-jnp.inf",
            "`jnp.where(a, x, 0).astype(t)` should be `jnp.where(a, x, -jnp.inf).astype(t)`",
        ),
        (  # the answer's own way to write what does not matter
            "return gelu(r * (x * x).mean(axis=1, keepdims=True))",
            "return r * gelu(square(x).mean(axis=1, keepdims=True))",
            "gelu(r",
            "`r * gelu(square(x).mean(axis=1, keepdims=True))` should be "
            "`gelu(r * square(x).mean(axis=1, keepdims=True))`",
        ),
    ],
)
def test_a_large_difference_is_told_as_the_part_that_matters(right, answer, matters, words):
    mine, theirs = (parsed(f"def f(x, a, b, c, d, e, i, r, t, u):\n    {text}\n") for text in (answer, right))
    chosen = that_matter(mine, differences(mine, theirs), lambda functions: matters in text_of(functions), 30)
    assert [c.words for c in corrections(mine, chosen, {}, {})] == [f"in `f`, {words}"]


def test_a_statement_that_a_call_puts_under_a_condition_is_moved_as_it_is_written():
    right = "def kernel(x_ref, o_ref):\n    x_ref[...] = 2 * x_ref[...]\n\n    @pl.when(k == 1)\n    def _():\n"
    right += "        o_ref[...] = x_ref[...]\n"
    wrong = "def kernel(x_ref, o_ref):\n    def store():\n        o_ref[...] = x_ref[...]\n\n"
    wrong += "    pl.when(k == 1)(store)\n    x_ref[...] = 2 * x_ref[...]\n"
    (node,), answer, wanted = ast.parse(wrong).body, parsed(wrong), parsed(right)
    found = differences(answer, wanted)
    (told,) = corrections(answer, found, {}, {}, moved=found)
    assert told.words == (
        "in `kernel`, `x_ref[...] = 2 * x_ref[...]` comes too late: it belongs in front of `pl.when(k == 1)(store)`"
    )
    done = ast.unparse(followed(node, told.edits))
    assert done.index("2 * x_ref") < done.index("pl.when(k == 1)(store)")


def test_when_trials_run_out_what_is_left_is_right():
    wrong = (
        RIGHT.replace("return i, k", "return k, i").replace("acc_ref[...] +=", "acc_ref[...] =").replace("== 0", "== 3")
    )
    answer, chosen = isolated(wrong, most=2)
    assert text_of(applied(answer, chosen)) == text_of(parsed(RIGHT))


def test_nothing_is_said_of_an_answer_that_all_changes_leave_wrong():
    assert isolated(RIGHT.replace("return i, k", "return k, i"), lambda functions: False)[1] == []


@pytest.mark.parametrize("changed", ["(2) == 1", "(1) == 0", "(2) != 0"])
def test_lines_are_those_of_the_answer(changed):
    ((function, line, _),) = said("\n" * 100 + RIGHT.replace("(2) == 0", changed))
    assert (function, line) == ("kernel", 103)


def solved():
    sources = Path(__file__).resolve().parents[1] / "solutions"
    trees = [ast.parse(file.read_text()) for file in sorted(sources.glob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_any_two_functions_can_be_compared():
    """Of whatever a reader writes, the differences can be found, undone and put into words."""
    functions = solved()
    rng = random.Random(0)
    for _ in range(200):
        one, other = rng.sample(functions, 2)
        answer, right = {one.name: straightened(one)}, {one.name: straightened(other)}
        found = differences(answer, right)
        undone = applied(answer, found)[one.name]
        ast.unparse(undone)
        compile(ast.Module([undone], type_ignores=[]), "undone", "exec", dont_inherit=True)
        corrections(answer, found, {}, {})


def test_who_does_what_is_said_of_a_slip_has_the_right_program():
    rng, kept = random.Random(0), []
    for right in rng.sample([each for each in solved() if not each.decorator_list], 24):
        slips = list(edits(ast.unparse(right), {}))
        for slip in rng.sample(slips, min(5, len(slips))):
            (written,) = ast.parse(slip.code).body
            answer, wanted = {right.name: straightened(written)}, {right.name: straightened(right)}
            found = differences(answer, wanted)
            said = corrections(answer, found, {}, {})
            if found and not any(c.whole for c in said):
                after = followed(written, [edit for c in said for edit in c.edits])
                kept.append(after is not None and not differences({right.name: straightened(after)}, wanted))
    # the others are right as well, but values that had names stand in several places
    assert sum(kept) > 0.8 * len(kept) > 75


WRITTEN = """
def kernel(x_ref, m_ref, o_ref):
    m_old = m_ref[...]
    m_new = x_ref[...].max(axis=1, keepdims=True)
    m_ref[...] = m_new
    o_ref[...] = (x_ref[...] - m_old) * m_new
"""


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (  # two changes, one around the other, are one
            WRITTEN.replace("(x_ref[...] - m_old) * m_new", "x_ref[...] * m_new - m_old"),
            "`(x_ref[...] - m_old) * m_new` should be `x_ref[...] * m_new - m_old`",
        ),
        (  # two arguments are missing in one call
            WRITTEN.replace(
                ".max(axis=1, keepdims=True)", ".max(axis=1, keepdims=True, initial=0, where=x_ref[...] > 0)"
            ),
            "`x_ref[...].max(axis=1, keepdims=True)` should be "
            "`x_ref[...].max(axis=1, keepdims=True, initial=0, where=x_ref[...] > 0)`",
        ),
        (  # what is too much around a value is told, and not the whole that it is a part of
            WRITTEN.replace("x_ref[...].max(", "jnp.abs(x_ref[...]).max("),
            "`x_ref[...].max(axis=1, keepdims=True)` should be `jnp.abs(x_ref[...]).max(axis=1, keepdims=True)`",
        ),
    ],
)
def test_what_is_said_can_be_done(right, words):
    (node,), answer, wanted = ast.parse(WRITTEN).body, parsed(WRITTEN), parsed(right)
    (told,) = corrections(answer, differences(answer, wanted), {}, {})
    assert told.words == f"in `kernel`, {words}"
    assert not differences({"kernel": straightened(followed(node, told.edits))}, wanted)


def test_which_of_two_equal_parts_it_is_is_told():
    text = "def semantics():\n    return ('parallel', 'arbitrary', 'arbitrary')\n"
    (told,) = corrections(
        parsed(text), differences(parsed(text), parsed(text.replace("'arbitrary'", "'parallel'", 1))), {}, {}
    )
    what = "`('parallel', 'arbitrary', 'arbitrary')` should be `('parallel', 'parallel', 'arbitrary')`"
    assert told.words == f"in `semantics`, {what}"


def test_a_value_that_has_to_change_is_not_told_by_its_own_name():
    """With the reader's name for the value the words would be short, and wrong: it is not bound yet."""
    (node,), answer = ast.parse(WRITTEN).body, parsed(WRITTEN)
    wanted = parsed(
        WRITTEN.replace(
            "x_ref[...].max(axis=1, keepdims=True)", "jnp.maximum(m_old, x_ref[...].max(axis=1, keepdims=True))"
        )
    )
    found = differences(answer, wanted)
    (short,) = corrections(answer, found, {}, {"kernel": {"x_ref[...].max(axis=1, keepdims=True)": "m_new"}})
    (whole,) = corrections(answer, found, {}, {}, statements=True)
    for each in (short, whole):
        assert not differences({"kernel": straightened(followed(node, each.edits))}, wanted)


def test_a_value_with_another_operator_is_not_told_by_its_name():
    right = "def f(x, n):\n    return jnp.where(x <= n, g(x), -jnp.inf)\n"
    (mine,) = ast.parse("def f(x, n):\n    later = x > n\n    return jnp.where(later, low, g(x))\n").body
    answer, theirs = as_one(mine, ast.parse(right).body[0])
    (told,) = corrections({"f": answer}, differences({"f": answer}, {"f": theirs}), {}, {"f": {"x > n": "later"}})
    assert told.said == "`jnp.where(later, low, g(x))` should be `jnp.where(x <= n, g(x), -jnp.inf)`"


def test_a_name_of_the_same_assignment_is_told_by_its_value():
    mine = "def f(m_ref, x):\n    m_old, m_new = m_ref[...], x.max()\n    return g(m_old, m_old, m_new, m_new)"
    answer = parsed(mine)
    wanted = parsed(
        mine.replace("x.max()", "jnp.maximum(m_old, x.max())")
        .replace("m_old, m_new =", "m_old = m_ref[...]; m_new =")
        .replace("= m_ref[...], jnp", "= jnp")
    )
    (told,) = corrections(answer, differences(answer, wanted), {}, {"f": {"m_ref[...]": "m_old"}})
    assert "should be `jnp.maximum(m_ref[...], x.max())`" in told.words


def test_an_expression_of_several_lines_is_replaced_by_one_that_compiles():
    answer = parsed("def f(x):\n    return x * g(x) + jnp.where(\n        x > 0, h(x), 0\n    ).sum(axis=1)\n")
    right = parsed("def f(x):\n    return x * g(x) + h(x).sum(axis=1)\n")
    undone = applied(answer, differences(answer, right))["f"]
    compile(ast.Module([undone], type_ignores=[]), "undone", "exec", dont_inherit=True)
    assert ast.unparse(undone) == ast.unparse(right["f"])


ORDER = """
def kernel(x_ref, m_ref, l_ref, t_ref):
    new = jnp.maximum(m_ref[...], x_ref[...])
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - new) + jnp.exp(x_ref[...] - new)
    m_ref[...] = new
    t_ref[...] += jnp.where(x_ref[...] > 0, x_ref[...], 0)
"""


def test_of_two_statements_that_change_places_the_smaller_one_is_moved():
    lines = ORDER.strip().split("\n")
    answer, wanted = parsed("\n".join([*lines[:2], lines[3], lines[2], lines[4]])), parsed(ORDER)
    found = differences(answer, wanted)
    whole = text_of(wanted)
    chosen = that_matter(answer, found, lambda functions: text_of(functions) == whole, 40)
    (told,) = corrections(answer, chosen, {}, {}, moved=found)
    assert told.words.startswith("in `kernel`, `m_ref[...] = new` comes too early: it belongs behind `l_ref[...] = ")


def test_statements_whose_order_is_free_are_no_mistake():
    """One that is missing and one that is too much only fit each other: both are left alone."""
    lines = ORDER.strip().replace("> 0", "> 1").split("\n")
    answer, wanted = parsed("\n".join([*lines[:2], lines[4], *lines[2:4]])), parsed(ORDER)
    found = differences(answer, wanted)

    def is_right(functions):
        text = text_of(functions)
        return text.count("t_ref[...] +=") == text.count("l_ref[...] =") == 1 and "> 0" in text

    assert [ast.unparse(d.was) for d in that_matter(answer, found, is_right, 40)] == ["1"]


def test_a_list_that_is_filled_keeps_its_name():
    text = "def f(x):\n    found = []\n    for n in range(x):\n        found.append(n)\n    return found\n"
    assert "found.append(n)" in text_of(parsed(text))


def test_a_single_mistake_is_found_beside_places_that_only_fit_each_other():
    mine = "def f(x, y):\n    a = max(x, 1)\n    g(a)\n    b = 2 * a\n    c = y + 3\n    return a, b, c\n"
    theirs = "def f(x, y):\n    a = max(x, 1) - 1\n    g(a)\n    b = 2 * (a + 1)\n    c = y + 4\n    return a, b, c\n"
    answer, wanted = parsed(mine), parsed(theirs)

    def is_right(functions):
        values = {}
        exec("g = id\n" + text_of(functions), values)
        return values["f"](5, 6)[1:] == (10, 10)

    chosen = that_matter(answer, differences(answer, wanted), is_right, 40)
    assert [(ast.unparse(d.was), ast.unparse(d.should)) for d in chosen] == [("3", "4")]


def test_what_is_given_to_a_helper_is_told_where_it_is_given():
    mine = "def f(x, y):\n    m, n = x.shape\n\n    def at(i, by):\n        return i * by + 1\n\n"
    mine += "    return g(at(0, n), at(1, n), n)\n"
    theirs = "def f(x, y):\n    m, n = x.shape\n    return g(0 * m + 1, 1 * n + 1, n)\n"
    (node,), answer, wanted = ast.parse(mine).body, parsed(mine), parsed(theirs)
    found = differences(answer, wanted)
    (told,) = corrections(answer, found, {}, {})
    assert (told.line, told.words) == (7, "in `f`, `n` should be `x.shape[0]`")
    assert "g(at(0, x.shape[0]), at(1, n), n)" in ast.unparse(followed(node, told.edits))


UNDER = """\
def kernel(x_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        x = x_ref[...]
        acc_ref[...] = acc_ref[...] + x.sum(axis=1)
        o_ref[...] = jnp.maximum(o_ref[...], x)

    @pl.when(pl.program_id(1) == 1)
    def _():
        o_ref[...] = x_ref[...] / acc_ref[...]
"""
AT_EVERY_STEP = """\
def kernel(x_ref, o_ref, total_ref):
    sweep, x = pl.program_id(1), x_ref[...]
    total_ref[...] = total_ref[...] + x.sum(axis=1)
    o_ref[...] = jnp.maximum(o_ref[...], x)

    @pl.when(sweep == 1)
    def _():
        o_ref[...] = x / total_ref[...]
"""


def test_statements_without_their_condition_are_told_with_it():
    (node,), (theirs,) = ast.parse(AT_EVERY_STEP).body, ast.parse(UNDER).body
    mine, right = as_both(*side_by_side(node, theirs))

    def is_right(functions):
        tests = [ast.unparse(condition_of(n)) for n in ast.walk(functions["kernel"]) if condition_of(n) is not None]
        return tests == ["pl.program_id(1) == 0", "pl.program_id(1) == 1"]

    chosen = that_matter({"kernel": mine}, differences({"kernel": mine}, {"kernel": right}), is_right, 40)
    (told,) = corrections({"kernel": mine}, chosen, {}, {"kernel": values_with_names(node)})
    assert told.words == "in `kernel`, lines 3 to 4 belong under `@pl.when(sweep == 0)`"
    assert is_right({"kernel": straightened(followed(node, told.edits))})


def test_a_condition_that_is_too_much_is_told():
    always = "def f(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 1\n"
    mine = (
        "def f(x_ref, o_ref):\n    @pl.when(pl.program_id(0) > 0)\n    def _():\n        o_ref[...] = x_ref[...] + 1\n"
    )
    (node,), (theirs,) = ast.parse(mine).body, ast.parse(always).body
    answer, right = ({"f": each} for each in as_both(*side_by_side(node, theirs)))
    (told,) = corrections(answer, differences(answer, right), {}, {})
    assert "`@pl.when(pl.program_id(0) > 0)` does not belong here" in told.words
    assert ast.dump(followed(node, told.edits)) == ast.dump(
        *ast.parse(mine.replace("pl.program_id(0) > 0", "True")).body
    )


def test_what_is_wrong_with_an_expression_may_be_a_value_that_it_uses():
    mine = (
        "def f(x_ref, y_ref, o_ref, own):\n"
        "    part = jnp.dot(clean(x_ref[...]), y_ref[...] * own, precision='highest')\n"
        "    o_ref[...] = jnp.where(first(own), part, o_ref[...] + part)\n"
    )
    theirs = (
        "def f(x_ref, y_ref, o_ref, own):\n    o_ref[...] = jnp.where(first(own), 0, o_ref[...]) + "
        "jnp.dot(jnp.where(own, x_ref[...], 0), y_ref[...] * own, precision='highest')\n"
    )
    answer = parsed(mine)

    def is_right(functions):
        text = text_of(functions)
        _, _, stored = text.partition("o_ref[...] = ")
        used = text if "part" in stored else stored
        return "jnp.where(own, x_ref" in used and "clean" not in used

    (only,) = that_matter(answer, differences(answer, parsed(theirs)), is_right, 40)
    assert (only.line, ast.unparse(only.was)) == (2, "clean(x_ref[...])")


def test_a_small_function_that_serves_twice_is_changed_where_one_of_its_uses_is_wrong():
    mine = "def f(m):\n    rows = lambda i, k: (i, 0)\n    return Spec(m, rows), Spec(8, rows)\n"
    theirs = "def f(m):\n    return Spec(m, lambda i, k: (k, 0)), Spec(8, lambda i, k: (i, 0))\n"
    answer = parsed(mine)
    (told,) = corrections(answer, differences(answer, parsed(theirs)), {}, {})
    assert (told.line, told.said) == (
        3,
        "`(Spec(m, rows), Spec(8, rows))` should be `(Spec(m, lambda i, k: (k, 0)), Spec(8, rows))`",
    )
    both = parsed(theirs.replace("8, lambda i, k: (i,", "8, lambda i, k: (k,"))
    assert {c.line for c in corrections(answer, differences(answer, both), {}, {})} == {2}


@pytest.mark.parametrize("mine", ["tile(n, most=x, unit=8)", "tile(n, x, 8)", "tile(size=n, unit=8, most=x)"])
def test_arguments_are_given_by_name_or_by_place(mine):
    given = "def tile(size, most, unit):\n    return size\n\n\n"
    kernel = "def kernel(n, x):\n    return {}\n"
    assert beside(kernel.format(mine), given + kernel.format("tile(n, x, unit=8)")) == []
    assert len(beside(kernel.format(mine).replace("8", "4"), given + kernel.format("tile(n, x, unit=8)"))) == 1


def test_a_part_of_what_should_be_there_is_enough_where_the_answer_goes_one_way():
    masked = "online(hide(scores(i), top(i) + column(m), left(j)), values)"
    mine = f"def f(i, j):\n    @pl.when(j * n <= i * m)\n    def _():\n        {masked}\n"
    theirs = (
        "def f(i, j):\n    @pl.when(j * n + n <= i * m)\n    def _():\n        online(scores(i), values)\n\n"
        f"    @pl.when((j * n <= i * m + m - 1) & ~(j * n + n <= i * m))\n    def _():\n        {masked}\n"
    )
    answer, right = parsed(mine), parsed(theirs)
    enough = text_of(right), text_of(parsed(mine.replace("i * m", "i * m + m - 1")))
    found = differences(answer, right)
    (only,) = that_matter(answer, found, lambda functions: text_of(functions) in enough, 40)
    assert ast.unparse(only.should) == "j * n <= i * m + m - 1"


def test_a_place_in_a_function_that_is_written_another_way_is_found():
    mine = (
        "def f(n, most):\n    found = {}\n    for b in sizes(n):\n        for c in shapes(n):\n"
        "            if fits(b, c) <= most:\n                found[b, c] = cost(b, c, n)\n"
        "    return min(found, key=found.get)\n"
    )
    theirs = (
        "def f(n, most):\n    plans = [(b, c) for b in sizes(n, 64) for c in shapes(n)]\n"
        "    return min([p for p in plans if fits(*p) <= most], key=lambda p: cost(*p, n))\n"
    )
    answer, right = parsed(mine), parsed(theirs)

    def is_right(functions):
        text = text_of(functions)
        return "sizes(n, 64)" in text and ("= {}" in text) == ("found.get" in text)

    (only,) = that_matter(answer, differences(answer, right), is_right, 40)
    assert (only.line, ast.unparse(only.should)) == (3, "64")


def test_what_comes_behind_the_statements_of_a_helper_comes_behind_its_call():
    mine = "def product(acc, x):\n    start(acc, x)\n    wait(1)\n\n\ndef kernel(acc, x):\n    product(acc, x)\n"
    theirs = "def kernel(acc, x):\n    start(acc, x)\n    wait(1)\n    return acc\n"
    (product, kernel), (right,) = ast.parse(mine).body, ast.parse(theirs).body
    form = paired(kernel, right, {"product": product}, {})
    written, answer, right = form.mine, form.answer, form.right
    (told,) = corrections({"kernel": answer}, differences({"kernel": answer}, {"kernel": right}), {}, {})
    assert (told.line, told.said) == (7, "`return acc` is missing here")
    assert ast.unparse(followed(written, told.edits)).endswith("    product(acc, x)\n    return acc")


def test_short_names_of_modules_are_the_same_modules():
    mine = "def kernel(x):\n    return lax.exp(x) + nn.relu(x)\n"
    assert beside(mine, mine.replace("lax.", "jax.lax.").replace("nn.", "jax.nn.")) == []


@pytest.mark.parametrize(("mine", "theirs"), [("jax.lax", "lax"), ("lax", "jax.lax")])
def test_a_module_has_the_name_that_the_answer_uses(mine, theirs):
    one, other = (ast.parse(f"def f(x, n):\n    return {module}.rem(x, n)\n").body[0] for module in (mine, theirs))
    answer, right = as_one(one, other)
    assert differences({"f": answer}, {"f": right}) == []


def test_a_name_that_both_use_is_one_name():
    right = "def f(x_ref):\n    x = x_ref[...]\n    e = jnp.exp(x - x.max(axis=1))\n    return e / e.sum()\n"
    answer = "def f(x_ref):\n    e = jnp.exp(x_ref[...])\n    return e / e.sum()\n"
    (told,) = corrections(mine := parsed(answer), differences(mine, parsed(right)), {}, {})
    assert told.words == "in `f`, `jnp.exp(x_ref[...])` should be `jnp.exp(x_ref[...] - x_ref[...].max(axis=1))`"


def test_two_refs_are_no_value_of_one_name():
    head = "def kernel(x_ref, l_ref, o_ref):\n"
    mine = f"{head}    x = x_ref[...]\n    o_ref[...] = f(x) + x\n    o_ref[...] += 1 / l_ref[...]\n"
    theirs = f"{head}    o_ref[...] = f(x_ref[...]) + x_ref[...]\n    o_ref[...] += 2 / l_ref[...]\n"
    assert beside(mine, theirs)[-1] == "`1 / l_ref[...]` should be `2 / l_ref[...]`"


def test_one_more_place_beside_one_that_is_known_is_found_in_few_trials():
    places = "".join(f"    y{n}_ref[...] = g{n}(x, {n})\n" for n in range(20))
    mine = f"def f(x):\n{places}".replace("(x, 3)", "(x, -3)").replace("(x, 17)", "(x, -17)")
    answer, right = ({"f": ast.parse(text).body[0]} for text in (mine.replace("g", "h"), f"def f(x):\n{places}"))
    found = differences(answer, right)
    first = next(d for d in found if ast.unparse(d.was) == "-3")

    def is_right(functions):
        text = ast.unparse(functions["f"])
        return "-3" not in text and "-17" not in text

    chosen = that_matter(answer, found, is_right, 60, needed=[first])
    assert [ast.unparse(d.was) for d in chosen] == ["-3", "-17"]


def test_what_is_missing_in_front_of_a_place_that_is_known_is_another_one():
    """What is missing stands at the path of the statement behind it, and around nothing that is inside of that."""
    right = "def f(x, a, b):\n    h(a)\n    a[...] = g(x, 1) + g(x, 2)\n    b[...] = g(x, 3)\n    k(b)"
    mine = "def f(x, a, b):\n    a[...] = g(x, -1) + g(x, 2)\n    b[...] = g(x, -3)"
    answer, there = ({"f": ast.parse(text).body[0]} for text in (mine, right))
    found = differences(answer, there)
    first = next(d for d in found if d.was is not None and ast.unparse(d.was) == "-1")

    def is_right(functions):
        text = ast.unparse(functions["f"])
        return "-" not in text and ("h(a)" in text) == ("k(b)" in text)

    chosen = that_matter(answer, found, is_right, 8, needed=[first])
    assert [ast.unparse(d.was) for d in chosen] == ["-1", "-3"]


def test_functions_under_other_decorators_are_other_things():
    plain, looped = (
        ast.parse(f"{decorator}def move(i):\n    o_ref[i] = x_ref[i]\n").body[0]
        for decorator in ("", "@pl.loop(0, 4)\n")
    )
    assert likeness(plain, plain) == 1
    assert likeness(plain, looped) == 0


def test_calls_of_two_functions_that_share_nothing_are_not_compared_part_by_part():
    right = "def f(q):\n    return jax.lax.map(g, q.reshape(4)).swapaxes(0, 1)\n"
    (d,) = differences(parsed("def f(q):\n    return jax.lax.map(g, q)\n"), parsed(right))
    assert ast.unparse(d.should) == "jax.lax.map(g, q.reshape(4)).swapaxes(0, 1)"


WITH_HELPERS = """
def start(m, l):
    m[...] = jnp.full(m.shape, -jnp.inf)
    l[...] = jnp.zeros(l.shape)


def larger(m, x):
    most = x.max(axis=1, keepdims=True)
    return jnp.maximum(m[...], most)


def kernel(x_ref, o_ref, m_ref, l_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        start(m_ref, l_ref)

    m_new = larger(m_ref, x_ref[...])
    l_ref[...] += jnp.exp(x_ref[...] - m_new)
    m_ref[...] = m_new
"""
WRITTEN_OUT = """
def kernel(x_ref, o_ref, m_ref, l_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)

    m_new = jnp.maximum(m_ref[...], x_ref[...].max(axis=1, keepdims=True))
    l_ref[...] += jnp.exp(x_ref[...] - m_new)
    m_ref[...] = m_new
"""


def beside(mine, theirs):
    """What is said of the kernel of one text beside that of the other, each with the functions around it."""
    own, given = ({n.name: n for n in ast.parse(text).body} for text in (mine, theirs))
    answer, right = as_one(own.pop("kernel"), given.pop("kernel"), own, given)
    found = differences({"kernel": answer}, {"kernel": right})
    return [c.said for c in corrections({"kernel": answer}, found, {}, {})]


@pytest.mark.parametrize(("mine", "theirs"), [(WRITTEN_OUT, WITH_HELPERS), (WITH_HELPERS, WRITTEN_OUT)])
def test_what_one_program_calls_and_the_other_writes_out_is_no_difference(mine, theirs):
    assert beside(mine, theirs) == []
    assert beside(mine.replace("axis=1", "axis=0"), theirs) == [
        "`{}.max(axis=0, keepdims=True)` should be `{}.max(axis=1, keepdims=True)`".format(*[SAME[mine]] * 2)
    ]


SAME = {WRITTEN_OUT: "x_ref[...]", WITH_HELPERS: "x"}


def test_a_call_that_is_forgotten_is_told_as_a_call():
    forgotten = WITH_HELPERS.replace("        start(m_ref, l_ref)\n", "        pass\n")
    assert "`start(m_ref, l_ref)`" in " ".join(beside(forgotten, WITH_HELPERS))


def test_values_that_get_their_names_together_are_known_by_them():
    right = "def kernel(o_ref):\n    o_ref[...] = f(pl.program_id(0), pl.program_id(1) + 1)\n"
    for way in (
        "(pl.program_id(n) for n in (0, 1))",
        "[pl.program_id(n) for n in range(2)]",
    ):
        mine = f"def kernel(o_ref):\n    i, j = {way}\n    o_ref[...] = f(i, j)\n"
        (node,) = ast.parse(mine).body
        answer, theirs = as_one(node, ast.parse(right).body[0])
        found = differences({"kernel": answer}, {"kernel": theirs})
        (told,) = corrections({"kernel": answer}, found, {}, {"kernel": values_with_names(node)})
        assert told.said == "`f(i, j)` should be `f(i, j + 1)`"


def test_a_given_function_is_looked_into_and_never_blamed():
    given = "def load(x, n):\n    start(x, n)\n    start(n, x)\n"
    right = "def kernel(x):\n    start(x, 3)\n    start(3, x)\n    wait(x)\n"
    (load, kernel) = ast.parse(given + right).body

    def told(mine):
        answer, theirs = as_one(ast.parse(mine).body[0], kernel, {}, {"load": load})
        found = differences({"kernel": answer}, {"kernel": theirs})
        return [c.said for c in corrections({"kernel": answer}, found, {}, {})]

    mine = "def kernel(x):\n    load(x, 3)\n    wait(x)\n"
    assert told(mine) == []
    assert told(mine.replace("wait(x)", "wait(2)")) == ["`wait(2)` should be `wait(x)`"]
    assert told(mine.replace("3", "x")) == ["`load(x, x)` should be `start(x, 3)`", "`start(3, x)` is missing here"]


def test_a_statement_under_a_condition_that_is_for_others_alone_is_told_to_leave_it():
    mine = "def f(i):\n    @pl.when(i < 9)\n    def _():\n        load(i + 1)\n        work(i)\n"
    theirs = "def f(i):\n    @pl.when(i < 9)\n    def _():\n        load(i + 1)\n\n    work(i)\n"
    (node,), answer, right = ast.parse(mine).body, parsed(mine), parsed(theirs)
    found = differences(answer, right)
    (told,) = corrections(answer, found, {}, {}, moved=found)
    assert (told.line, told.said) == (5, "`work(i)` belongs behind `@pl.when(i < 9)`, and not under it")
    assert ast.unparse(followed(node, told.edits)).replace("        pass\n", "") == ast.unparse(ast.parse(theirs))


def test_a_call_in_a_loop_is_compared_there():
    mine = "def kernel(a, b):\n    a[0] = 1\n    b[0] = 1\n\n    def step(i):\n        g(i)\n\n"
    mine += "    for i in range(n):\n        step(i)\n"
    theirs = "def kernel(a, b):\n    a[0] = 1\n    b[0] = 1\n    for i in range(n):\n        g(i + 1)\n"
    assert beside(mine, theirs) == ["`i` should be `i + 1`"]


def test_a_mistake_in_one_function_is_found_beside_two_that_only_fit_each_other():
    mine = "def kernel(y):\n    return y + 2, z(y) * 3\n\n\ndef fwd(x):\n    return (x,)\n\n\n"
    mine += "def bwd(kept):\n    (x,) = kept\n    return g(x)\n"
    theirs = "def kernel(y):\n    return y + 1, z(y) * 4\n\n\ndef fwd(x):\n    return x\n\n\n"
    theirs += "def bwd(kept):\n    return g(kept)\n"
    answer, right = parsed(mine), parsed(theirs)

    def is_right(functions):
        text = text_of(functions)
        return (
            "y + 1" in text
            and "* 4" in text
            and ("return (x,)" in text) == ("(x,) = kept" in text or "x, = kept" in text)
        )

    chosen = that_matter(answer, differences(answer, right), is_right, 40, str)
    assert {d.function for d in chosen} == {"kernel"}


def test_what_reads_memory_stays_in_front_of_what_happens_next():
    """Moved behind `arrive`, the same call reads another block."""
    right = "def f(j, k, v):\n    s = scores(k.at[j])\n    arrive(k.empty)\n    return weigh(s, v)\n"
    mine = "def f(j, k, v):\n    out = weigh(scores(k.at[j]), v)\n    arrive(k.empty)\n    return out\n"
    answer, wanted = parsed(mine), parsed(right)
    (node,) = applied(answer, differences(answer, wanted)).values()
    text = ast.unparse(node)
    assert text.index("scores(") < text.index("arrive(") < text.index("weigh(")


def test_what_comes_and_goes_among_the_arguments_of_one_call_is_one_place():
    right = "def f(m, x):\n    y = g(m.a, m.b, m.c, x)\n    z[...] = h(x, y, 1)\n    return y * z\n"
    answer, wanted = parsed(right.replace("m.a, m.b, m.c", "*m[:3]").replace("1", "2")), parsed(right)
    tried = []

    def is_right(functions):
        tried.append(text_of(functions))
        return "y, 1)" in tried[-1] and ("*m[:3], x" in tried[-1]) != ("m.a, m.b, m.c" in tried[-1])

    (only,) = that_matter(answer, differences(answer, wanted), is_right, 12)
    assert ast.unparse(only.should) == "1"
    assert len(tried) < 10


def test_a_map_that_needs_other_arguments_is_told_as_a_whole_and_can_be_written():
    inner = "    def out_map(j, v, *_):\n        return v, j\n"
    mine = f"def f(x):\n{inner}\n    return call(pl.BlockSpec((8, 128), out_map))(x)\n"
    right = mine.replace("*_", "ids_ref").replace("return v,", "return ids_ref[v],")
    (node,), answer, wanted = ast.parse(mine).body, parsed(mine), parsed(right)
    (told,) = corrections(answer, differences(answer, wanted), {}, {})
    assert (told.line, told.said) == (
        2,
        "`lambda j, v, *_: (v, j)` should be `lambda j, v, ids_ref: (ids_ref[v], j)`",
    )
    assert not differences({"f": straightened(followed(node, told.edits))}, wanted)


def test_numbers_of_axes_are_given_one_by_one_or_together():
    assert (
        beside(
            "def kernel(x):\n    return jnp.transpose(x, (0, 2, 1)).reshape(4, -1)\n",
            "def kernel(x):\n    return jnp.reshape(x.transpose(0, 2, 1), (4, -1))\n",
        )
        == []
    )


def test_a_value_that_is_missing_is_told_with_what_uses_it():
    mine = "def f(sizes, bm):\n    return jnp.diff(ends(sizes) // bm) + 1\n"
    right = "def f(sizes, bm):\n    e = ends(sizes)\n    return pl.cdiv(e[1:], bm) - e[:-1] // bm\n"
    (node,), answer, wanted = ast.parse(mine).body, parsed(mine), parsed(right)
    (told,) = corrections(answer, differences(answer, wanted), {}, {})
    assert told.said == (
        "`jnp.diff(ends(sizes) // bm) + 1` should be `pl.cdiv(e[1:], bm) - e[:-1] // bm`, with `e = ends(sizes)`"
    )
    assert not differences({"f": straightened(followed(node, told.edits))}, wanted)


def test_of_statements_that_could_be_moved_the_one_that_is_missing_is():
    start = "        @pl.when(j == 0)\n        def _():\n            start(m)\n"
    body = f"    @pl.when(live)\n    def _():\n{start}\n        step(x)\n"
    store = "@pl.when(j == last)\n{0}def _():\n{0}    o_ref[...] = m\n"
    mine = f"def f(x, m, o_ref, j, last, live):\n{body}\n        {store.format('        ')}"
    right = f"def f(x, m, o_ref, j, last, live):\n{body}\n    {store.format('    ')}"
    answer, wanted = parsed(mine), parsed(right)
    found = differences(answer, wanted)
    told = corrections(answer, found, {}, {}, moved=found)
    assert [c.said for c in told] == ["`@pl.when(j == last) ...` belongs behind `@pl.when(live)`, and not under it"]


def test_what_is_told_of_a_long_expression_is_not_what_stands_there():
    loop = "jax.lax.fori_loop(0, pl.cdiv(n, 128), lambda t, a: a + g(x, t), jnp.zeros((8, 128), jnp.float32))"
    right = f"def f(x, n):\n    y[...] = k(x)\n    z[...] = n * x\n    return {loop}.astype(d)\n"
    answer = parsed("def f(x, n):\n    y[...] = k(x)\n    z[...] = n * x\n    return n.astype(d)\n")
    (told, *_) = corrections(answer, [d for d in differences(answer, parsed(right)) if d.was and d.should], {}, {})
    assert "which is like `jax.lax.fori_loop(" in told.said


CLEARED = """
def kernel(x_ref, o_ref, acc_ref, {more}):
    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...]
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
"""
BEGUN = """
def kernel(x_ref, o_ref, acc_ref, {more}):
    before = jnp.where(pl.program_id(1) == 0, 0, acc_ref[...])
    acc_ref[...] = before + x_ref[...]
    o_ref[...] = acc_ref[...].astype(o_ref.dtype)
"""


def between(mine: str, theirs: str) -> list[tuple[str, str]]:
    """What one program has and the other should have, the two in one form."""
    functions = [ast.parse(text).body[0] for text in (mine, theirs)]
    answer, right = as_one(*functions)
    found = differences({"kernel": answer}, {"kernel": right})
    return [tuple(ast.unparse(n) if n is not None else "" for n in (d.was, d.should)) for d in found]


@pytest.mark.parametrize(("mine", "theirs"), [(CLEARED, BEGUN), (BEGUN, CLEARED)])
def test_a_sum_begins_anew_under_a_condition_or_with_where(mine, theirs):
    assert between(mine.format(more="y_ref"), theirs.format(more="y_ref")) == []
    wrong = mine.replace("(1) == 0", "(0) == 0").format(more="y_ref")
    assert between(wrong, theirs.format(more="y_ref")) == [("pl.program_id(0)", "pl.program_id(1)")]


def test_a_ref_that_begins_with_another_value_is_no_cleared_one():
    full = CLEARED.replace("zeros_like(acc_ref)", "full_like(acc_ref, -jnp.inf)").format(more="y_ref")
    (difference,) = between(full, BEGUN.format(more="y_ref"))
    assert difference == ("jnp.full_like(acc_ref, -jnp.inf)", "jnp.zeros_like(acc_ref)")


def test_a_value_is_stored_at_once_or_by_its_name():
    named = BEGUN.replace("acc_ref[...] = before +", "acc = before +").replace("o_ref[...] = acc_ref[...]", "{}")
    named = named.replace("{}", "acc_ref[...] = acc\n    o_ref[...] = acc").format(more="y_ref")
    assert between(CLEARED.format(more="y_ref"), named) == []
    again = named + "    acc_ref[...] = acc + 1\n"  # what it holds is not that value any more
    assert between(CLEARED.format(more="y_ref"), again) != []


def test_what_comes_for_the_sake_of_what_goes_again_is_not_told():
    stores = "    o[...] = x[0] * x[1] + {0} + x[2] + {1}\n    p[...] = x[3] - x[4] - {0} - {1} * x[5]"
    right = "def f(x, o, p, t):\n    j, h = at(x), made(x[...])\n" + stores.format("h", "j")
    mine = "def f(x, o, p, t):\n" + stores.format("made(x[...])", "t")
    answer, there = ({"f": straightened(ast.parse(text).body[0])} for text in (mine, right))
    found = differences(answer, there)

    def is_right(functions):
        text = ast.unparse(functions["f"])
        fits = ("h = " in text) >= ("+ h" in text or "- h" in text)
        return fits and "+ j" in text and "- j" in text and "j = at(x)" in text

    told = {ast.unparse(d.should) for d in that_matter(answer, found, is_right, 40)}
    assert told == {"j = at(x)", "j"}


def test_a_name_that_is_given_elsewhere_stands_for_nothing():
    right = "def f(r):\n    m = r[...]\n    r[...] = new(m)\n    return g(r[...] - 1, m)"
    mine = "def f(r):\n    r[...] = new(r[...])\n    m = r[...]\n    return g(m - 1, r[...])"
    function = ast.parse(mine).body[0]
    answer, there = as_one(function, ast.parse(right).body[0])
    found = differences({"f": answer}, {"f": there})
    said = corrections({"f": answer}, found, {}, {"f": values_with_names(function)}, moved=found)
    assert any("comes too late" in c.words for c in said)
    assert not any("should be `g(m - 1" in c.words for c in said), [c.words for c in said]


def test_a_step_has_no_name_of_its_own():
    """The answer calls the step j, the right one something else: the two are not the same j."""
    stores = "    o_ref[...] = at(j) + at(j + 1) + g({})"
    right = "def f(t_ref, o_ref):\n    i = pl.program_id(0)\n    j = t_ref[i]\n" + stores.format("i")
    mine = "def f(t_ref, o_ref):\n    j = pl.program_id(0)\n" + stores.format("j")
    answer, there = as_one(*(ast.parse(text).body[0] for text in (mine, right)))
    told = [ast.unparse(d.should) for d in differences({"f": answer}, {"f": there})]
    assert told == ["t_ref[pl.program_id(0)]"] * 2, "and not the last one"


@pytest.mark.parametrize("added", ["total = before\n    total += x_ref[...]", "total = before + x_ref[...]"])
def test_a_value_goes_on_under_its_name_or_in_its_ref(added):
    before = "jnp.where(pl.program_id(1) == 0, 0, acc_ref[...])"
    mine = f"""
def kernel(x_ref, o_ref, acc_ref, y_ref):
    {added.replace("before", before)}
    acc_ref[...] = total
    o_ref[...] = total.astype(o_ref.dtype)
"""
    assert between(mine, BEGUN.format(more="y_ref")) == []


def test_what_differs_in_the_value_of_a_name_alone_is_not_told_to_be_like_itself():
    right = "def f(m, k, n):\n    return block((m, k), x_map), block((k, n), y_map)\n"
    mine = right.replace("    return", "    k = min(k, 256)\n    return")
    answer, there = as_one(*(ast.parse(text).body[0] for text in (mine, right)))
    found = differences({"f": answer}, {"f": there})
    said = [c.said for c in corrections({"f": answer}, found, {}, {})]
    assert said[-2:] == ["`block((m, k), x_map)` is what is wrong", "`block((k, n), y_map)` is what is wrong"]


def test_the_body_of_a_loop_is_told_by_its_name_where_it_is_written():
    mine = """
def kernel(x_ref, o_ref):
    def body(k, total):
        tile = x_ref[k]
        tile = jnp.where(tile > 0, tile, tile * 0.5)
        return total + tile
    o_ref[...] = jax.lax.fori_loop(0, x_ref.shape[0], body, jnp.zeros(o_ref.shape))
"""
    right = """
def kernel(x_ref, o_ref):
    o_ref[...] = jax.lax.fori_loop(0, x_ref.shape[0], lambda k, acc: acc + x_ref[k], jnp.zeros(o_ref.shape))
"""
    answer, wanted = parsed(mine), parsed(right)
    chosen = that_matter(answer, differences(answer, wanted), lambda functions: "acc +" in text_of(functions), 40)
    (told,) = corrections(answer, chosen, {}, {})
    assert (told.line, told.said) == (3, "`body` should be `lambda k, acc: acc + x_ref[k]`")


def test_one_use_of_a_value_is_changed_in_a_function_that_is_written_another_way():
    mine = """
def kernel(x_ref, o_ref, acc_ref):
    i, g = pl.program_id(1), pl.program_id(2)
    results = ((x_ref, acc_ref), (o_ref, acc_ref))
    @pl.when(jnp.logical_and(g == 0, i == 0))
    def _():
        for _, ref in results:
            ref[...] = jnp.zeros_like(ref)
    add(i, x_ref, acc_ref)
"""
    right = """
def kernel(x_ref, o_ref, acc_ref):
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        acc_ref[...] = jnp.zeros(acc_ref.shape)
        o_ref[...] = jnp.zeros(o_ref.shape)
    add(pl.program_id(2), x_ref, acc_ref)
"""
    answer, wanted = parsed(mine), parsed(right)

    def is_right(functions):
        text = text_of(functions)
        return "add(pl.program_id(2)" in text and ("for _, ref" in text) == ("logical_and" in text)

    (only,) = that_matter(answer, differences(answer, wanted), is_right, 40)
    assert (ast.unparse(only.was), ast.unparse(only.should)) == ("i", "pl.program_id(2)")
