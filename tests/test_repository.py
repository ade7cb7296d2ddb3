"""What holds for the repository as a whole: one address, no registry, a small public API that is cheap to import."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_puzzles
from pallas_puzzles import curriculum, notebooks
from pallas_puzzles.tpu.chips import CHIPS

ROOT = Path(__file__).resolve().parents[1]

# In two halves each, or this file would be the one that names them.
REGISTRIES = [first + second for first, second in [("pypi.", "org"), ("pythonhosted.", "org"), ("anaconda.", "org")]]

# Imported by nobody before it is needed: each costs a reader's first cell some tenths of a second.
EXPENSIVE = ["jax.experimental.pallas", "rich", "jupytext", "nbformat", "typer", "ipywidgets", "IPython"]


def texts() -> dict[str, str]:
    """Every text file that is, or is about to be, under version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the project is not known")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    found = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        try:
            found[name] = (ROOT / name).read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    assert "pyproject.toml" in found, "git lists no files"
    return found


def test_no_registry_is_named() -> None:
    named = [
        f"{name}: {host}" for name, text in texts().items() if name != "uv.lock" for host in REGISTRIES if host in text
    ]
    assert not named, "a registry is a setting of the reader's machine, not of this project"


def test_the_address_is_written_once() -> None:
    address = notebooks.repository()
    slug = address.removeprefix("https://github.com/")
    generated = re.compile(r"notebooks/\w+\.ipynb")
    elsewhere = [
        name
        for name, text in texts().items()
        if slug in text and name not in ("pyproject.toml", "uv.lock", "README.md") and not generated.fullmatch(name)
    ]
    assert not elsewhere, f"{address} belongs into pyproject.toml alone"


def test_the_readme_repeats_the_address_faithfully() -> None:
    slug = notebooks.repository().removeprefix("https://github.com/")
    readme = (ROOT / "README.md").read_text("utf-8")
    for source in sorted((ROOT / "puzzles").glob("*.py")):
        assert notebooks.badge(source.stem) in readme, f"README.md lacks the badge of {source.stem}"
        readme = readme.replace(notebooks.badge(source.stem), "")
    assert slug not in readme.replace(notebooks.repository(), ""), "an address in README.md is not the project's"
    assert "colab.research.google.com" not in readme, "a Colab badge in README.md has no notebook"


def test_the_public_api_is_what_init_says() -> None:
    names = pallas_puzzles.__all__
    assert sorted(names) == sorted(set(names))
    for name in names:
        assert getattr(pallas_puzzles, name).__doc__, f"{name} has no docstring"
    assert set(names) <= set(dir(pallas_puzzles))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pallas_puzzles.no_such_name


def test_importing_is_cheap() -> None:
    code = "import json, sys, pallas_puzzles; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "pallas_puzzles" in loaded
    assert not loaded.intersection(EXPENSIVE)


def test_the_table_of_the_compiler_has_every_solution() -> None:
    """Its figures are a benchmark's. That a puzzle is missing means that nobody has run it: benchmarks/tpu.py."""
    table = (ROOT / "benchmarks" / "tpu.md").read_text("utf-8")
    for puzzle in curriculum.all_puzzles():
        answer = curriculum.course_folder() / "solutions" / f"{puzzle.notebook}.py"
        subject = curriculum.run(puzzle.id, overlay=answer, judge=False).subject
        assert subject is not None
        if not subject.kernel:
            continue
        for chip in CHIPS:
            assert re.search(rf"^\| {puzzle.id} .*\| {chip} \|", table, re.MULTILINE), f"{puzzle.id} on {chip}"
    assert "jax ops.tpu.matmul" in table
