"""Reading a course, laying answers over its holes, and running a reader's file up to a check."""

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import demo_course
from demo_course import ADD_ONE, ADD_TWO, DEMO, solved
from pallas_puzzles.course import cases, curriculum, session
from pallas_puzzles.course.curriculum import CurriculumError, ast_equal
from pallas_puzzles.course.session import run


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    folder = demo_course.make(tmp_path / "course")
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(folder))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    return folder


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def line_number(text: str, part: str) -> int:
    assert part in text
    return text[: text.index(part)].count("\n") + 1


def words(verdict) -> str:
    """All that a verdict says, wherever it stands."""
    return " ".join(
        [
            verdict.headline,
            *verdict.notes,
            *(text for each in verdict.findings for text in [each.cause, *each.evidence]),
        ]
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_notebooks_come_in_their_order():
    demo, other = curriculum.notebooks()
    assert [demo.name, other.name] == ["demo", "a_second"]
    assert demo.title == "A small demonstration"
    assert demo.order == 1
    assert [each.id for each in demo.puzzles] == ["demo/1", "demo/2a"]


def test_a_puzzle():
    one, two = curriculum.notebooks()[0].puzzles
    assert (one.title, one.goal) == ("Add one", "Add one to every element of `x`.")
    assert one.holes == ("add_one_kernel",)
    assert two.holes == ("x_map", "add_two_kernel"), "a comment after the body belongs to the function"
    assert [hint.split("\n")[0] for hint in one.hints] == [
        "What does `x_ref[...]` give?",
        "`o_ref[...] = ...`",
        "```python",
    ]
    assert ast_equal(one.solution, ADD_ONE)
    assert ast_equal(two.solution, ADD_TWO)


def test_cells_know_where_they_stand():
    book = curriculum.notebooks()[0]
    lines = DEMO.splitlines()
    code = [each for each in book.cells if each.kind == "code"]
    assert len(code) == 5
    for each in code:
        assert each.source.splitlines()[0] == lines[each.line - 1]
    assert [each.section for each in code] == ["", "1", "1", "2a", "2a"]
    assert book.cells[-1].section == "", "what follows the last puzzle belongs to none"
    assert book.cells[0].source == "# A small demonstration\n\nIt has two puzzles."
    assert 'check("demo/2a"' in book.cells[book.puzzles[1].check_cell].source


def test_an_unknown_puzzle_names_its_neighbours():
    with pytest.raises(CurriculumError, match=r"demo/2a.*puzzles list"):
        curriculum.puzzle("demo/2")
    for wrong in ("", "demo", "../demo/1", "nonsense/17"):
        with pytest.raises(CurriculumError, match="puzzles list"):
            curriculum.puzzle(wrong)


def test_next_puzzle():
    assert curriculum.next_puzzle("demo/1").id == "demo/2a"
    assert curriculum.next_puzzle("demo/2a").id == "a_second/1"
    assert curriculum.next_puzzle("a_second/1") is None


def test_pristine_code_tells_an_untouched_hole():
    (pristine, _) = curriculum.pristine_codes(curriculum.puzzle("demo/2a"), "add_two_kernel")
    names: dict = {}
    exec("def add_two_kernel(x_ref, o_ref):\n    # thinking\n\n    ...", names)
    assert names["add_two_kernel"].__code__.co_code == pristine.co_code
    exec(ADD_TWO, names)
    assert names["add_two_kernel"].__code__.co_code != pristine.co_code


def test_signature_leaves_annotations_out(course):
    text = DEMO.replace("def x_map(i):", "def x_map(i: int, /, j=0, *, k: 'int' = 2) -> tuple:")
    write(course / "puzzles" / "demo.py", text)
    puzzle = curriculum.puzzle("demo/2a")
    function = curriculum.notebook(puzzle.path).functions["x_map"]
    assert curriculum.bare_signature(function) == "x_map(i, /, j=0, *, k=2)"


def test_ast_equal():
    assert ast_equal("def f(x):\n    '''Doc.'''\n    return (x)  # why\n", "def f(x): return x")
    assert ast_equal("def f():\n    '''Doc.'''", "def f(): pass")
    assert not ast_equal("def f(x): return x + 1", "def f(x): return 1 + x")
    assert not ast_equal("def f(x): return x", "def f(y): return y")


def test_a_changed_file_is_read_again(course):
    assert curriculum.puzzle("demo/1").title == "Add one"
    write(course / "puzzles" / "demo.py", DEMO.replace("Add one\n", "Add the number one\n"))
    assert curriculum.puzzle("demo/1").title == "Add the number one"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{order: 1}", "{}", "order"),
        ('check("demo/2a"', 'check("demo/3"', r'Puzzle 2a has no cell with check\("demo/2a"'),
        ("## Puzzle 2a", "## Puzzle 1", "Puzzle 1 is there 2 times"),
        ("    return x + 1.0", "    return (x + 1.0", r"demo.py:\d+: "),
    ],
)
def test_a_malformed_notebook_says_what_it_lacks(course, old, new, message):
    write(course / "puzzles" / "demo.py", DEMO.replace(old, new))
    with pytest.raises(CurriculumError, match=message):
        curriculum.notebooks()


def test_no_course(tmp_path, monkeypatch):
    monkeypatch.setattr(curriculum, "course_folder", lambda: tmp_path)
    with pytest.raises(CurriculumError, match="no puzzles in"):
        curriculum.notebooks()


def test_reading_needs_no_jax():
    code = "import sys, pallas_puzzles.course.curriculum as c; c.notebooks(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "jupytext", "nbformat"} & set(done.stdout.split())


# ---- running ---------------------------------------------------------------------------------------------------------


def test_the_course_itself_is_not_solved():
    verdict = run("demo/1")
    assert verdict.status == "unsolved"
    assert verdict.puzzle == "demo/1"


def test_a_readers_file(tmp_path, capsys):
    mine = write(tmp_path / "demo.py", solved())
    assert run("demo/1", source=mine).status == "passed"
    assert run("demo/2a", source=mine).status == "unsolved"
    assert capsys.readouterr().out == "", "a run displays nothing"


@pytest.mark.parametrize(
    ("line", "displays"),
    [
        ("show(kernel, x)", True),
        ("picture = show(kernel, x)", True),
        ("show_cost(kernel, x)", True),
        ("if len(jax.devices()) >= 8:\n    jax.debug.visualize_array_sharding(x)\n    show_cost(kernel)", True),
        ("if len(jax.devices()) >= 8:\n    show(kernel)\nelse:\n    x = 1", False),
        ("swap(x, table)[:, 0]", False),
        ("kernel.defvjp(forward, backward)", False),
        ("showing(kernel)", False),
        ("shape = show_shape(x)", False),
    ],
)
def test_what_only_displays_something_does_not_run(line, displays):
    (node,) = ast.parse(line).body
    assert curriculum.only_displays(node) == displays


def test_windows_line_endings_and_a_byte_order_mark(tmp_path):
    mine = tmp_path / "demo.py"
    mine.write_bytes(b"\xef\xbb\xbf" + solved().replace("\n", "\r\n").encode())
    assert run("demo/1", source=mine).status == "passed"


def test_only_what_the_check_needs_is_run(tmp_path):
    text = solved().replace('check("demo/2a"', 'print("too far")\ncheck("demo/2a"')
    text = text.replace(
        'check("demo/1", add_one, add_one_spec, normal((8, 128)))',
        'assert __name__ != "__main__"\n'
        'check("demo/0", 1 / 0)\nresult = show(1 / 0)\nhint(1 / 0)\ntpu_report(1 / 0)\ncompare(1 / 0)\n'
        "if unwritten(add_one) or unwritten(nobody):\n    1 / 0\nelse:\n    1 / 0\n"
        'verdict = check("demo/1", add_one, add_one_spec, normal((8, 128)))\n'
        'raise RuntimeError("after the check")',
    )
    mine = write(tmp_path / "demo.py", text)
    assert run("demo/1", source=mine).status == "passed"


def test_the_last_check_of_a_puzzle_counts(tmp_path):
    again = f'\n\n# %%\n{ADD_ONE}\ncheck("demo/1", add_one, add_one_spec, normal((8, 128)))\n'
    assert run("demo/1", source=write(tmp_path / "demo.py", DEMO + again)).status == "passed"


CHECK = 'check("demo/1", add_one, add_one_spec, normal((8, 128)))'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (CHECK, 'check("demo/1", add_one, add_one, normal((8, 128)))', 'The call check("demo/1", ...) in'),
        (CHECK, 'check("demo/1", add_one_spec, add_one_spec, normal((8, 128)))', 'The call check("demo/1", ...) in'),
        (CHECK, f"if False:\n    {CHECK}", ""),
        (CHECK, f"def check(*a, **k):\n    return True\n\n\n{CHECK}", "`check` in"),
        ("setup()\n", "setup()\n\n\ndef check(*a, **k):\n    return True\n", "`check` in"),
    ],
)
def test_the_courses_own_check_judges(tmp_path, old, new, says):
    assert DEMO.count(old) == 1
    right = solved().replace(old, new)
    wrong = right.replace("o_ref[...] = x_ref[...] + 1.0", "o_ref[...] = x_ref[...] + 2.0", 1)
    assert wrong != right
    verdict = run("demo/1", source=write(tmp_path / "demo.py", wrong))
    assert verdict.status == "failed", "neither a stub nor another call lets it pass"
    assert not says or any(note.startswith(says) for note in verdict.notes)
    verdict = run("demo/1", source=write(tmp_path / "demo.py", right))
    assert verdict.status == "passed"
    assert [note.startswith(says) for note in verdict.notes] == ([True] if says else [])
    assert not says or verdict.notes[0].endswith("This verdict is that of the course's own check.")


CASES = """
from pallas_puzzles.course.inputs import normal, question

read = []


def puzzle_1(nb):
    read.append(1)
    return question(nb.add_one_spec, normal((8, 128)))


def puzzle_2a(nb):
    raise AssertionError("nobody has asked for it")
"""


def test_cases_in_a_file_of_their_own(tmp_path, course):
    (course / "cases").mkdir()
    write(course / "cases" / "demo.py", CASES)
    short = 'check("demo/1", add_one)'
    write(course / "puzzles" / "demo.py", DEMO.replace(CHECK, short))
    mine = write(tmp_path / "demo.py", solved().replace(CHECK, short))
    assert run("demo/1", source=mine).status == "passed"
    cases.official.cache_clear()
    official = cases.official("demo/1")
    assert (official.fn.__name__, official.spec.__name__) == ("add_one", "add_one_spec")
    assert official is cases.official("demo/1"), "once a process"
    assert run("demo/1", source=write(mine, mine.read_text().replace("return x + 1.0", "return x + 2.0"))).notes == [
        "add_one_spec was given and has been changed. The check has used the course's own."
    ]
    older = write(mine, solved())
    assert run("demo/1", source=older).status == "passed", "a file from before the cases had a file"
    assert 'The call check("demo/1", ...) in' in run("demo/1", source=older).notes[0]


def test_a_check_without_cases_says_what_is_missing(tmp_path, course):
    write(course / "puzzles" / "demo.py", DEMO.replace(CHECK, 'check("demo/1", add_one)'))
    verdict = run("demo/1", source=write(tmp_path / "demo.py", solved()))
    assert 'demo/1 is not in the course\'s cases: check("demo/1", fn, spec, *inputs, ...)' in words(verdict)


def notebook(path: Path, text: str, *first: str) -> Path:
    """A percent-format text as an .ipynb, with some code cells in front."""
    cells = [nbformat.v4.new_code_cell(each) for each in first]
    for each in curriculum.read_cells(write(path.with_suffix(".txt"), text)):
        new = nbformat.v4.new_code_cell if each.kind == "code" else nbformat.v4.new_markdown_cell
        cells.append(new(each.source))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_an_ipynb_with_magics(tmp_path):
    magics = (
        "%load_ext autoreload\n!ls\nprint?\nx = (7\n% 4)\nif x:\n    %time\nassert x == 3",
        "%%bash\nrm nothing",
        "%%time\ny = x",
        "display(y)",
    )
    verdict = run("demo/1", source=notebook(tmp_path / "mine.ipynb", solved(), *magics))
    assert verdict.status == "passed", words(verdict)


def test_an_untouched_hole_of_an_ipynb(tmp_path):
    assert run("demo/1", source=notebook(tmp_path / "mine.ipynb", DEMO)).status == "unsolved"


def test_an_error_in_an_ipynb_names_the_cell(tmp_path):
    text = DEMO.replace("    pass  # YOUR CODE HERE", "    o_ref[...] = x_ref[...] + one")
    verdict = run("demo/1", source=notebook(tmp_path / "mine.ipynb", text))
    line = verdict.findings[0].line
    assert (line.file, line.line, line.text) == ("mine.ipynb[cell 4]", 7, "o_ref[...] = x_ref[...] + one")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    return x + 1.0", "    return (x + 1.0", "never closed"),
        ("def add_one(x):", "add_oen(3)\n\n\ndef add_one(x):", "name 'add_oen' is not defined"),
        ("setup()\n", "setup()\nimport no_such_module\n", "no_such_module"),
        ("def add_one(x):", "raise SystemExit('enough')\n\n\ndef add_one(x):", "enough"),
    ],
)
def test_what_fails_before_the_check_is_named(tmp_path, old, new, says):
    text = solved().replace(old, new)
    verdict = run("demo/1", source=write(tmp_path / "demo.py", text))
    assert verdict.status == "error"
    assert not verdict
    finding = verdict.findings[0]
    assert finding.kind == "error"
    assert says in finding.cause
    assert "Traceback" not in str(verdict), "a traceback is never the first thing seen"
    wrong = next(number for number, line in enumerate(text.splitlines(), 1) if line not in solved().splitlines())
    assert finding.line.line == wrong
    assert finding.line.text == text.splitlines()[wrong - 1].strip()
    assert str(verdict).count(f"demo.py:{wrong}") == 1, "the place is said once"


@pytest.mark.parametrize("wrong", ["    return (x + 1.0", "    return x + 1.0\n\n\n1 / 0"])
def test_another_puzzles_cell_does_not_stand_in_the_way(tmp_path, course, wrong):
    text = DEMO.replace("    return add_one_spec(x) + 1.0", "    return x + 2.0")
    write(course / "puzzles" / "demo.py", text)
    text = text.replace("    return x + 1.0", wrong)
    text = text.replace(
        "    # YOUR CODE HERE\n\n\ndef add_two_kernel(x_ref, o_ref):\n    pass\n",
        "    return i, 0\n\n\ndef add_two_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 2.0\n",
    )
    verdict = run("demo/2a", source=write(tmp_path / "demo.py", text))
    assert verdict.status == "passed", words(verdict)
    assert "Puzzle 1" in verdict.notes[-1]
    assert "demo.py:" in verdict.notes[-1]


def test_a_file_without_the_check(tmp_path):
    mine = write(tmp_path / "demo.py", DEMO.replace('check("demo/1", add_one, add_one_spec, normal((8, 128)))', ""))
    with pytest.raises(CurriculumError, match=r'no call check\("demo/1", \.\.\.\)'):
        run("demo/1", source=mine)


@pytest.mark.parametrize(
    ("name", "content"), [("a.py", b"\xff\xfe"), ("a.ipynb", b"{"), ("a.ipynb", b"{}"), ("missing.py", None)]
)
def test_a_file_that_cannot_be_read(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CurriculumError, match=name):
        run("demo/1", source=tmp_path / name)


# ---- overlays --------------------------------------------------------------------------------------------------------


def test_the_solution_passes_as_text_and_as_a_file(tmp_path):
    for puzzle in curriculum.notebooks()[0].puzzles:
        assert run(puzzle.id, overlay=puzzle.solution).status == "passed"
        assert run(puzzle.id, overlay=write(tmp_path / "answer.py", puzzle.solution)).status == "passed"


def test_one_file_may_answer_every_puzzle(tmp_path):
    answers = write(tmp_path / "answers.py", f"import jax.numpy as jnp\n\n{ADD_ONE}\n{ADD_TWO}")
    assert [run(each, overlay=answers).status for each in ("demo/1", "demo/2a")] == ["passed", "passed"]


def test_a_wrong_answer_is_refused():
    assert run("demo/1", overlay=ADD_ONE.replace("1.0", "1.5")).status == "failed"


def test_holes_that_an_overlay_leaves_stay_unsolved():
    assert run("demo/2a", overlay=ADD_TWO[: ADD_TWO.index("def add_two")]).status == "unsolved"


def test_earlier_puzzles_get_the_solutions(course):
    text = DEMO.replace(
        "def add_two_spec(x):", "def three(x):\n    return add_one(add_two(x))\n\n\ndef add_two_spec(x):"
    )
    text = text.replace("add_one_spec(x) + 1.0", "add_one_spec(x) + 2.0").replace(
        '"demo/2a", add_two,', '"demo/2a", three,'
    )
    write(course / "puzzles" / "demo.py", text)
    assert run("demo/2a", overlay=ADD_TWO).status == "passed"


def test_helpers_come_along_and_what_the_notebook_gives_stays(tmp_path):
    answer = "import functools\n\nONE = 1.0\n\n\n@functools.cache\ndef one():\n    return ONE\n\n\n"
    answer += ADD_ONE.replace("+ 1.0", "+ one()")
    answer += "\n\ndef add_one_spec(x):\n    return x\n\n\nprint('never')\nadd_one(1 / 0)\n"
    verdict = run("demo/1", overlay=write(tmp_path / "answer.py", answer))
    assert verdict.status == "passed", words(verdict)
    assert "answer.py:15: add_one_spec is left out" in " ".join(verdict.notes)


def test_a_value_that_is_made_of_a_hole_comes_behind_it():
    answer = f"{ADD_TWO}\nboth = functools.partial(add_two_kernel)\nagain = [both]\n".replace("+ 2.0", "+ 1.0 + one")
    verdict = run("demo/2a", overlay=f"import functools\none = 1.0\n{answer}")
    assert verdict.status == "passed", words(verdict)


def test_an_answer_to_another_puzzle_is_left_out_and_that_is_said():
    verdict = run("demo/2a", overlay=f"{ADD_ONE}\n{ADD_TWO}")
    assert verdict.status == "passed"
    assert not verdict.notes, "it is the course's own"
    verdict = run("demo/2a", overlay=ADD_ONE.replace("1.0", "7.0") + "\n" + ADD_TWO)
    assert verdict.status == "passed"
    assert verdict.notes == [
        "<overlay>:1: add_one_kernel belongs to demo/1, and is left out: the course's own answer is used"
    ]


def test_a_hole_is_replaced_before_the_next_statement_uses_it(course):
    text = DEMO.replace("def add_one(x):", "kernel_at_once = add_one_kernel\n\n\ndef add_one(x):")
    write(course / "puzzles" / "demo.py", text.replace("pallas_call(add_one_kernel", "pallas_call(kernel_at_once"))
    assert run("demo/1", overlay=ADD_ONE).status == "passed"


@pytest.mark.parametrize(
    "theirs",
    [
        "(x_ref)",
        "(x_ref, o_ref, extra=0)",
        "(o_ref, x_ref)",
        "(x_ref, *, o_ref)",
    ],
)
def test_another_signature_is_refused(tmp_path, theirs):
    answer = write(tmp_path / "answer.py", f"# a comment\ndef add_one_kernel{theirs}:\n    x_ref[...]\n")
    with pytest.raises(CurriculumError) as error:
        run("demo/1", overlay=answer)
    assert "answer.py:2: " in str(error.value)
    assert "add_one_kernel(x_ref, o_ref)" in str(error.value)


@pytest.mark.parametrize("theirs", ["(x_ref, out_ref)", "(a, b)", "(x_ref, *rest)", "(*refs)"])
def test_a_signature_that_is_called_alike_is_taken(theirs):
    names = {"(x_ref, *rest)": "x_ref, (o_ref,) = x_ref, rest", "(*refs)": "x_ref, o_ref = refs"}
    first = names.get(theirs) or f"x_ref, o_ref = {theirs[1:-1]}"
    kernel = f"def add_one_kernel{theirs}:\n    {first}\n    o_ref[...] = x_ref[...] + 1\n"
    assert run("demo/1", overlay=kernel).status == "passed"


def test_annotations_may_differ():
    assert run("demo/1", overlay=ADD_ONE.replace("(x_ref, o_ref)", "(x_ref: 'ref', o_ref) -> None")).status == "passed"


def test_an_overlay_without_an_answer():
    with pytest.raises(CurriculumError, match="add_one_kernel"):
        run("demo/1", overlay=ADD_TWO)


def test_line_numbers_point_into_the_overlay(tmp_path):
    text = "# one\n# two\n\n\ndef helper(x):\n    return x + undefined\n\n\n" + ADD_ONE.replace(
        "+ 1.0", "+ helper(1.0)"
    )
    path = write(tmp_path / "answer.py", text)
    for overlay, file in ((path, str(path)), (text, "<overlay>")):
        verdict = run("demo/1", overlay=overlay)
        assert verdict.status == "error", words(verdict)
        line = verdict.findings[0].line
        assert (line.file, line.line, line.text) == (file, 6, "return x + undefined")


def test_an_overlay_that_does_not_parse(tmp_path):
    verdict = run("demo/1", overlay=write(tmp_path / "answer.py", ADD_ONE.replace("1.0", "(1.0")))
    assert verdict.status == "error"
    assert verdict.findings[0].line is not None
    assert verdict.findings[0].line.line == 2


# ---- the real course -------------------------------------------------------------------------------------------------


def test_the_real_course_can_be_read(monkeypatch):
    monkeypatch.delenv("PALLAS_PUZZLES_COURSE")
    if not any((curriculum.course_folder() / "puzzles").glob("*.py")):
        pytest.skip("no puzzles yet")
    for book in curriculum.notebooks():
        assert book.puzzles, f"{book.path} has no puzzle"
        for puzzle in book.puzzles:
            assert all(curriculum.pristine_codes(puzzle, hole) for hole in puzzle.holes)


def test_a_loop_that_never_ends_before_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "STATEMENT_LIMIT_S", 0.5)
    mine = write(tmp_path / "demo.py", solved().replace("setup()\n", "setup()\nn = 0\nwhile True:\n    n += 1\n", 1))
    verdict = run("demo/1", source=mine)
    assert verdict.status == "error"
    assert "ran for more than 0.5 s" in verdict.findings[0].cause
    assert verdict.findings[0].line.text in ("while True:", "n += 1")


def test_a_loop_that_never_ends_in_another_puzzle_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "STATEMENT_LIMIT_S", 0.5)
    first_check = 'check("demo/1", add_one'
    mine = write(tmp_path / "demo.py", solved().replace(first_check, f"while True:\n    pass\n{first_check}", 1))
    mine.write_text(mine.read_text().replace(demo_course.HOLES_OF_TWO, f"{ADD_TWO}\n\n"))
    verdict = run("demo/2a", source=mine)
    assert verdict, str(verdict)
    assert "(Puzzle 1) does not run" in verdict.notes[0]
