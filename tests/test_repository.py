"""What holds for the repository as a whole: one address, no registry, a small public API that is cheap to import."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pallas_puzzles
from pallas_puzzles.app import cli, notebooks
from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.targets.tpu.chips import CHIPS

ROOT = Path(__file__).resolve().parents[1]

# In two halves each, or this file would be the one that names them.
REGISTRIES = [first + second for first, second in [("pypi.", "org"), ("pythonhosted.", "org"), ("anaconda.", "org")]]

# Imported by nobody before it is needed: each costs a reader's first cell some tenths of a second.
EXPENSIVE = ["jax.experimental.pallas", "rich", "jupytext", "nbformat", "click", "ipywidgets", "IPython"]


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


def test_no_message_names_the_package_on_an_index() -> None:
    """It is on none: whoever installs it names the repository."""
    name = "pallas-" + "puzzles"
    install = re.compile(rf"""\b(?:pip3?|pipx|uvx?) [^`\n]*[\s"']{name}(?:\[[^]]*\])?["'`\s](?! *@ git\+)""")
    assert install.search(f'pip install --upgrade "{name}"')
    assert install.search(f"uvx --from {name}[lab] puzzles")
    assert not install.search(f'pip install "{name}[lab] @ git+https://example.org"')
    assert not [f"{file}: {found[0]}" for file, text in texts().items() for found in install.finditer(text)]


def test_no_text_leaves_the_plural_to_the_reader() -> None:
    """ "1 step", "2 steps", as text.plural writes them: never "1 step(s)"."""
    for source in sorted((ROOT / "src").rglob("*.py")):
        strings = (
            each.value for each in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(each, ast.Constant)
        )
        assert not [each for each in strings if isinstance(each, str) and re.search(r"\w\(s\)", each)], source


def test_the_readme_repeats_the_address_faithfully() -> None:
    slug = notebooks.repository().removeprefix("https://github.com/")
    readme = (ROOT / "README.md").read_text("utf-8")
    for source in sorted((ROOT / "puzzles").glob("*.py")):
        assert notebooks.badge(source.stem) in readme, f"README.md lacks the badge of {source.stem}"
        readme = readme.replace(notebooks.badge(source.stem), "")
    assert slug not in readme.replace(notebooks.repository(), ""), "an address in README.md is not the project's"
    assert "colab.research.google.com" not in readme, "a Colab badge in README.md has no notebook"


def code_lines(text: str) -> list[str]:
    """The command lines of a page: indented by four, up to a gap of two spaces, and cut at &&."""
    lines = [line[4:].split("  ")[0] for line in text.splitlines() if re.match(r"    [a-z]", line)]
    return [part.strip() for line in lines for part in line.split("&&")]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = [each for each in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")) if "://" not in each]
    assert links or page.name == "own_kernels.md"
    for each in links:
        assert (page.parent / each).exists(), each


def test_every_command_in_readme_and_docs_is_taken() -> None:
    command = cli.app
    seen = set()
    for page in PAGES:
        for line in code_lines(page.read_text("utf-8")):
            words = line.split()
            if "puzzles" not in words:
                continue
            words = words[words.index("puzzles") + 1 :]
            with command.make_context("puzzles", list(words)) as context:
                if words:
                    sub = command.commands[words[0]]
                    sub.make_context(words[0], words[1:], parent=context)
                    seen.add(words[0])
    shown = {name for name, each in command.commands.items() if not each.hidden}
    assert seen == shown, "docs/terminal.md lists every command"


def test_readme_and_ci_give_the_two_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = code_lines((ROOT / "README.md").read_text("utf-8"))
    start, test = "uv run puzzles lab", "uv run --all-groups pytest"
    assert lines[:3] == [f"git clone {notebooks.repository()}", "cd pallas-puzzles", start]
    without_uv = ["pip install uv", start, "sudo apt install -y pipx", f"pipx run {start}"]
    assert lines[3:] == [*without_uv, test, "pip install uv", test], "all other commands are in docs/"
    assert "uv run --all-groups pytest" in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()[-1]
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert project["tool"]["uv"]["default-groups"] == ["lab"], "what `uv run puzzles lab` fetches"
    assert project["dependency-groups"]["lab"] == ["pallas-puzzles[lab]"]
    extras = project["project"]["optional-dependencies"]
    for page in PAGES:
        for extra in re.findall(r"--extra ([\w-]+)", page.read_text("utf-8")):
            assert extra in extras


def test_what_is_fetched_for_the_first_command() -> None:
    """By uv.lock: JupyterLab and JAX, neither the TPU compiler nor what only the tests need."""
    packages = {each["name"]: each for each in tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]}
    ours = packages["pallas-puzzles"]
    reached, ahead = set(), [*ours["dependencies"], *ours["optional-dependencies"]["lab"]]
    while ahead:
        name = ahead.pop()["name"]
        if name not in reached:
            reached.add(name)
            ahead += packages[name].get("dependencies", [])
    assert {"jupyterlab", "jaxlib", "jupytext"} <= reached
    assert not reached & {"libtpu", "playwright", "pytest", "mypy", "ruff", "nodejs"}


@pytest.mark.parametrize("works", [True, False])
def test_the_tests_say_what_they_fetch_before_they_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, works: bool
) -> None:
    import conftest

    (uv := tmp_path / "uv").write_text(f"#!/bin/sh\necho uv $*\nexit {0 if works else 2}\n")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(conftest, "missing", lambda: "there is none")
    quick: dict[str, Any] = {"getoption": lambda name: False, "option": SimpleNamespace(markexpr="")}
    conftest.pytest_configure(SimpleNamespace(workerinput={}, **quick))
    assert capfd.readouterr().out == "", "the workers fetch nothing"
    conftest.pytest_configure(SimpleNamespace(**quick))
    said = capfd.readouterr().out.splitlines()
    assert said[:2] == [conftest.FETCHES, "uv sync --locked --inexact --extra tpu-compiler"]
    assert said[2:] == ([] if works else [conftest.NOT_FETCHED])
    monkeypatch.setattr(conftest, "missing", lambda: None)
    conftest.pytest_configure(SimpleNamespace(**quick))
    assert capfd.readouterr().out == "", "once"


def test_the_code_of_own_kernels_runs(capsys: pytest.CaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_kernels.md").read_text("utf-8"), re.DOTALL)
    exec(compile(code, "own_kernels.py", "exec"), {})
    said = capsys.readouterr().out
    assert "add_kernel: grid (4,)" in said
    assert said.rstrip().count("\nRight.\n") == 1


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    exec(compile(code, "readme.py", "exec"), {})
    said = capsys.readouterr().out
    assert "grid (2, 2, 4)" in said
    assert said.rstrip().count("\nRight.\n") == 1


def test_the_readme_repeats_the_table_of_foreign_kernels() -> None:
    table = (ROOT / "benchmarks" / "foreign.md").read_text("utf-8")
    (ran,) = re.findall(r"The lens ran (\d+ of \d+), ", table)
    assert f"The lens runs {ran} calls" in (ROOT / "README.md").read_text("utf-8")
    assert ran.endswith(f" of {len(re.findall('^[|] [a-z-]+: ', table, re.MULTILINE))}")


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


@pytest.mark.parametrize("accelerator", ["tpu", "gpu"])
def test_the_table_of_the_compiler_has_every_solution(accelerator: str) -> None:
    """Its figures are those of benchmarks/tpu.py and gpu.py. A puzzle is missing where nobody has run them."""
    table = (ROOT / "benchmarks" / f"{accelerator}.md").read_text("utf-8")
    books = [book for book in curriculum.notebooks() if book.accelerator == accelerator]
    for puzzle in (each for book in books for each in book.puzzles):
        if not cases.official(puzzle.id).kernel:
            continue
        for chip in {"tpu": list(CHIPS), "gpu": ["h100", "h200"]}[accelerator]:
            assert re.search(rf"^\| {puzzle.id} .*\| {chip} \|", table, re.MULTILINE), f"{puzzle.id} on {chip}"
    assert {"tpu": "jax ops.tpu.matmul", "gpu": "hopper_matmul"}[accelerator] in table
