"""Mutants of the solutions: what edits are made, who is refused, and that the list of equivalents says what is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import demo_course
from demo_course import ADD_ONE, ADD_TWO
from edits import edits
from mutants import equivalents, equivalents_file, main
from pallas_puzzles.course import curriculum


def made(source: str, **values: str) -> dict[str, str]:
    """Edit -> the program after it."""
    return {each.text: each.code for each in edits(source, values)}


# ---- edits -----------------------------------------------------------------------------------------------------------

KERNEL = """\
def sum_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype)

    o_ref[...] += x_ref[...].astype(jnp.float32).sum(axis=1, keepdims=True)
"""

CALL = """\
def total(x, *, bm=64):
    M, N = x.shape
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(M, bm), N // 128),
        in_specs=[pl.BlockSpec((bm, 128), lambda i, j: (i, j))],
        out_shape=jax.ShapeDtypeStruct((M, 1), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, 1), jnp.float32)],
    )(x)
"""


@pytest.mark.parametrize(
    "line",
    [
        "if True:",  # pl.when
        "@pl.when(pl.program_id(1) != 0)",
        "@pl.when(pl.program_id(1) == 1)",
        "@pl.when(pl.program_id(0) == 0)",
        "@pl.when(pl.program_id(1) + 1 == 0)",
        "o_ref[...] = x_ref[...].astype(jnp.float32).sum(axis=1, keepdims=True)",  # += -> =
        "o_ref[...] += x_ref[...].sum(axis=1, keepdims=True)",  # astype dropped
        "o_ref[...] += x_ref[...].astype(jnp.bfloat16).sum(axis=1, keepdims=True)",
        "o_ref[...] += x_ref[...].astype(jnp.float32).max(axis=1, keepdims=True)",
        "o_ref[...] += x_ref[...].astype(jnp.float32).sum(axis=0, keepdims=True)",
        "o_ref[...] += x_ref[...].astype(jnp.float32).sum(keepdims=True)",
    ],
)
def test_an_edit_of_a_kernel(line: str) -> None:
    programs = made(KERNEL).values()
    assert sum(line in [each.strip() for each in code.splitlines()] for code in programs) == 1


@pytest.mark.parametrize(
    "part",
    [
        "grid=(M // bm, N // 128)",
        "grid=(1, N // 128)",
        "grid=(pl.cdiv(M, bm), 384 // 128)",  # the example's size
        "grid=(pl.cdiv(M, 64), N // 128)",
        "lambda i, j: (0, j)",
        "lambda i, j: (i, j + 1)",
        "lambda i, j: (j, i)",
        "ShapeDtypeStruct((M, 1), jnp.bfloat16)",
        "pltpu.VMEM((bm, 1), jnp.bfloat16)",
        "pltpu.VMEM((64, 1), jnp.float32)",
        "pltpu.VMEM((bm, 2 * 1), jnp.float32)",
    ],
)
def test_an_edit_of_a_call(part: str) -> None:
    programs = made(CALL, N="384", bm="64").values()
    assert sum(part in code for code in programs) == 1


def test_edits_are_all_different_and_always_the_same() -> None:
    first, again = list(edits(KERNEL, {})), list(edits(KERNEL, {}))
    assert first == again
    assert len({each.code for each in first}) == len({each.text for each in first}) == len(first) >= 15
    assert not any(curriculum.ast_equal(each.code, KERNEL) for each in first)


def test_an_edit_is_said_in_few_words_and_has_its_line() -> None:
    lines = {each.text: each.line for each in edits(KERNEL, {})}
    assert lines["pl.program_id(1) == 0) -> pl.program_id(1) != 0)"] == 2
    assert lines["o_ref[...] = jnp.zeros(o_ref.shape, o_ref.dtype) -> (nothing)"] == 4
    assert max(map(len, made(CALL, N="384"))) <= 160


def test_the_same_edit_of_the_same_words_is_counted() -> None:
    texts = list(made("def f(x):\n    g(x, 1.5)\n    h(x)\n    g(x, 1.5)\n"))
    assert "g(x, 1.5) -> g(x, 3.0)" in texts
    assert "g(x, 1.5) -> g(x, 3.0) (2)" in texts


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo course with its solutions."""
    folder = demo_course.make(tmp_path / "course")
    (folder / "solutions").mkdir()
    (folder / "solutions" / "demo.py").write_text(f"# the answers\n{ADD_ONE}\n\n{ADD_TWO}")
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(folder))
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def listed(course: Path, *lines: str) -> None:
    path = equivalents_file("demo")
    assert course in path.parents
    path.parent.mkdir(parents=True)
    path.write_text("# a comment\n\n" + "".join(f"{each}\n" for each in lines))


def test_the_checks_refuse_what_is_wrong(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo/2a")
    rows = [line.split() for line in out.splitlines()]
    numbers = dict(zip(rows[-3][1:], rows[-2][1:], strict=True))
    assert int(numbers["made"]) >= 8
    assert code == 0, out
    assert numbers["refused"] == numbers["made"]
    assert "survived" not in out.partition("notebook")[0]


def test_a_survivor_is_shown_with_hole_line_and_edit(
    course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = course / "solutions" / "demo.py"
    path.write_text(path.read_text().replace("x_ref[...] + 1.0", "jnp.maximum(x_ref[...], x_ref[...]) + 1.0"))
    code, out, _ = run(capsys, "demo/1")
    assert code == 1
    assert re.search(r"^survived [0-9a-f]{7}  demo/1 add_one_kernel: .* -> .*  \[solutions/demo.py:3\]$", out, re.M)
    keys = re.findall(r"^survived \w+  (.*?)  \[", out, re.M)
    listed(course, *(f"{key}  # both operands are x" for key in keys))
    code, out, _ = run(capsys, "demo/1")
    assert code == 0
    assert "survived " not in out.partition("notebook")[0]


def test_a_stale_line_is_said(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed(course, "demo/1 add_one_kernel: x + 1 -> x  # once it was so")
    code, out, _ = run(capsys, "demo/1")
    assert code == 1
    assert "stale: demo/1 add_one_kernel: x + 1 -> x\n" in out


def test_a_line_needs_a_reason(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed(course, "demo/1 add_one_kernel: x + 1 -> x")
    with pytest.raises(SystemExit, match="2"):
        main(["demo/1"])
    assert "demo.txt:3: this line has no reason" in capsys.readouterr().err


# ---- the course ------------------------------------------------------------------------------------------------------

SHIPPED = [puzzle.notebook for puzzle in curriculum.all_puzzles()]


@pytest.mark.parametrize("notebook", sorted(set(SHIPPED)))
def test_each_line_of_the_equivalents_is_of_a_puzzle(notebook: str) -> None:
    holes = {(puzzle.id, hole) for puzzle in curriculum.in_notebook(notebook) for hole in puzzle.holes}
    for key in equivalents(notebook):
        puzzle, hole = key.partition(": ")[0].split()
        assert (puzzle, hole) in holes, key


@pytest.mark.parametrize("puzzle_id", ["basics/9", "matmul/3"])
def test_the_course_refuses_the_mutants_of_a_puzzle(puzzle_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, puzzle_id)
    assert code == 0, out


def test_the_command_runs_them() -> None:
    command = [sys.executable, "-m", "pallas_puzzles", "dev", "mutants", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nowhere" in done.stderr
