"""What a notebook borrows from another: the reader's own functions, once they are solved."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import functions
from pallas_puzzles import own_kernels, solved_function
from pallas_puzzles.app import workspace
from pallas_puzzles.course import curriculum
from pallas_puzzles.course.curriculum import CurriculumError
from pallas_puzzles.course.progress import record

BORROWED = [("matmul/9", "product"), ("softmax/8", "smooth_layer_norm")]


def solve(folder, name):
    """Lays the hidden solutions over the holes of a workspace's script."""
    script = folder / f"{name}.py"
    text = script.read_text("utf-8")
    answers = functions((curriculum.course_folder() / "solutions" / f"{name}.py").read_text("utf-8"))
    for puzzle in curriculum.in_notebook(name):
        for hole, skeleton in puzzle.skeletons.items():
            text = text.replace(skeleton.strip("\n"), answers[hole])
    script.write_text(text, "utf-8")


@pytest.fixture
def folder(laid, tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    workspace.init(shutil.copytree(laid, tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.mark.parametrize(("puzzle", "name"), BORROWED)
def test_nothing_is_borrowed_before_it_is_solved(folder, puzzle, name):
    assert solved_function(puzzle, name) is None
    record(puzzle, True)  # recorded, and yet the file has only the skeleton
    assert solved_function(puzzle, name) is None


def test_nothing_is_borrowed_without_a_workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    record("matmul/9", True)
    assert solved_function("matmul/9", "product") is None


def test_own_kernels_are_the_readers_where_they_fit(folder):
    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    product = "matmul/9", floats(16, 128), floats(128, 128), 16, 128, 128
    norm = "softmax/8", floats(16, 128), floats(1, 128), floats(1, 128), 16
    theirs = own_kernels(product=product, smooth_layer_norm=norm)
    assert str(theirs).splitlines() == [
        "product            the course's: matmul.py Puzzle 9 is not solved here",
        "smooth_layer_norm  the course's: softmax.py Puzzle 8 is not solved here",
    ]
    solve(folder, "matmul")
    record("matmul/9", True)
    mine = own_kernels(product=product)
    assert str(mine) == "product  yours, matmul.py Puzzle 9"
    assert mine.product is not theirs.product
    assert mine.product is own_kernels(product=product).product, "one and the same, as long as nothing changes"
    script = folder / "matmul.py"
    text = script.read_text("utf-8")
    script.write_text(text.replace("acc_ref[...].astype(o_ref.dtype)", "acc_ref[...].astype(jnp.bfloat16)"), "utf-8")
    rough = own_kernels(product=product)
    assert rough.product is theirs.product
    assert str(rough).startswith("product  the course's: yours (matmul.py Puzzle 9) ")


def test_own_kernels_knows_no_other_names(folder):
    with pytest.raises(CurriculumError, match=r"matmul\.py Puzzle 9 defines no function 'produkt'"):
        own_kernels(produkt=("matmul/9",))
    with pytest.raises(CurriculumError, match="no puzzle 'matmul/99'"):
        own_kernels(product=("matmul/99",))


@pytest.mark.parametrize(("puzzle", "name"), BORROWED)
def test_what_is_solved_is_borrowed_and_works(folder, puzzle, name):
    solve(folder, puzzle.partition("/")[0])
    assert solved_function(puzzle, name) is None  # not recorded as solved
    record(puzzle, True)
    fn = solved_function(puzzle, name)
    assert fn is not None
    rng = np.random.default_rng(0)
    x, w, gamma = (rng.standard_normal(s, np.float32) for s in ((128, 256), (256, 128), (1, 256)))
    from jax.experimental.pallas import tpu as pltpu

    with pltpu.force_tpu_interpret_mode(), jax.default_matmul_precision("highest"):
        if name == "product":
            got, want = fn(x, w, 128, 128, 128), x @ w
        else:
            mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
            got, want = fn(x, gamma, jnp.zeros_like(gamma), 64), (x - mean) / np.sqrt(var + 1e-5) * gamma
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4)
