"""The generated notebooks: in line with their sources, the same bytes every time, and they run in a real kernel."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jupytext
import nbclient
import nbformat
import pytest
from nbformat import NotebookNode

from course import lay_solutions
from pallas_puzzles import installation
from pallas_puzzles.app import notebooks
from pallas_puzzles.course import curriculum

ROOT = Path(__file__).resolve().parents[1]
BOOKS = curriculum.notebooks()
NAMES = [book.name for book in BOOKS]

assert NAMES, "no notebook found"

SOURCE = """\
# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   pallas_puzzles: {order: 1}
# ---

# %% [markdown]
# # A title

# %%
x = 1

# %% [markdown]
# ## Puzzle 1: One
# Text.

# %% tags=["kept"]
x = 2

# %% [markdown]
# ## Puzzle 2: Two
# Text.

# %%
x = 2
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one small notebook, in sync."""
    (tmp_path / "puzzles").mkdir()
    (tmp_path / "puzzles" / "small.py").write_text(SOURCE)
    notebooks.update(root=tmp_path)
    assert notebooks.update(check=True, root=tmp_path) == {}
    return tmp_path


def cell_ids(path: Path) -> list[str]:
    return [cell["id"] for cell in json.loads(path.read_text())["cells"]]


def test_the_committed_notebooks_are_in_sync() -> None:
    assert notebooks.update(check=True) == {}, "run ./update_notebooks.sh"


def test_building_twice_gives_the_same_bytes(checkout: Path) -> None:
    path = checkout / "notebooks" / "small.ipynb"
    first = path.read_bytes()
    path.unlink()
    notebooks.update(root=checkout)
    assert path.read_bytes() == first
    assert first.endswith(b"}\n")
    assert b"jupytext" not in first


def test_the_notebook_is_valid_and_bare(checkout: Path) -> None:
    node = nbformat.read(checkout / "notebooks" / "small.ipynb", as_version=4)
    nbformat.validate(node)
    assert [cell.cell_type for cell in node.cells] == ["markdown", "code", *["markdown", "code"] * 3]
    assert node.cells[0].source.splitlines()[0] == notebooks.badge("small")
    assert "File > Save a copy in Drive" in node.cells[0].source
    assert [cell.metadata for cell in node.cells if cell.metadata] == [{"tags": ["kept"]}]
    for cell in node.cells:
        assert cell.get("execution_count") is None
        assert not cell.get("outputs")


def test_what_is_out_of_date_is_named(checkout: Path) -> None:
    source = checkout / "puzzles" / "small.py"
    source.write_text(SOURCE.replace("x = 1", "x = 3"))
    (checkout / "puzzles" / "fresh.py").write_text(SOURCE)
    (checkout / "notebooks" / "gone.ipynb").write_text("{}")
    assert notebooks.update(check=True, root=checkout) == {
        "notebooks/fresh.ipynb": "missing",
        "notebooks/small.ipynb": "not what its source says",
        "notebooks/gone.ipynb": "has no source any more",
    }
    assert len(notebooks.update(root=checkout)) == 3
    assert notebooks.update(check=True, root=checkout) == {}
    assert sorted(path.name for path in (checkout / "notebooks").iterdir()) == ["fresh.ipynb", "small.ipynb"]


def test_the_script_works_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "update_notebooks.sh", "--check"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    stale = notebooks.update(check=True)
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("notebooks/")] == [f"{name}: {why}" for name, why in stale.items()]
    assert done.returncode == (not said[-1].endswith("up to date")), done.stdout + done.stderr


def test_a_new_cell_changes_no_other_id(checkout: Path) -> None:
    path = checkout / "notebooks" / "small.ipynb"
    before = cell_ids(path)
    assert len(before) == len(set(before)), "the same text twice still makes two ids"
    longer = SOURCE.replace("# %% [markdown]\n# ## Puzzle 1", "# %%\ny = 1\n\n# %% [markdown]\n# ## Puzzle 1")
    (checkout / "puzzles" / "small.py").write_text(longer)
    notebooks.update(root=checkout)
    after = cell_ids(path)
    assert len(after) == len(before) + 1
    assert [each for each in after if each in before] == before


def test_a_workspace_notebook_is_paired_and_loses_nothing(checkout: Path) -> None:
    node = notebooks.for_workspace(checkout / "puzzles" / "small.py")
    assert node.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    assert "Colab" not in "".join(cell.source for cell in node.cells)
    # what jupytext writes beside it when the reader saves is the notebook's source again
    (checkout / "saved.py").write_text(jupytext.writes(node, fmt="py:percent"))
    assert curriculum.ORDER.search((checkout / "saved.py").read_text())
    saved = jupytext.read(checkout / "saved.py")
    original = jupytext.read(checkout / "puzzles" / "small.py")
    assert [cell.source for cell in saved.cells] == [cell.source for cell in original.cells]


LINK = re.compile(r"Next: \[Puzzle (\w+): (.+)\]\(#scrollTo=([\w-]+)\)")


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_below_each_check_is_a_link_to_the_heading_of_the_next_puzzle(book: curriculum.Notebook) -> None:
    cells = notebooks.build(book.path).cells
    checks = [i for i, cell in enumerate(cells) if cell.cell_type == "code" and f'check("{book.name}/' in cell.source]
    assert len(checks) == len(book.puzzles)
    for check, puzzle in zip(checks[:-1], book.puzzles[1:], strict=True):
        link = LINK.fullmatch(cells[check + 1].source)
        assert link is not None
        assert link.groups()[:2] == (puzzle.number, puzzle.title)
        (heading,) = [cell for cell in cells if cell.id == link[3]]
        anchor = f'<a id="scrollTo={heading.id}"></a>'  # for JupyterLab
        assert heading.source.startswith(f"## Puzzle {puzzle.number}: {puzzle.title}{anchor}\n")
    last = cells[checks[-1] + 1].source
    if book is BOOKS[-1]:
        assert "Next" not in last
    else:
        following = BOOKS[BOOKS.index(book) + 1].name
        assert last.startswith(f"Next notebook: [{following}, in Colab](")
        assert notebooks.badge(following).endswith(last.partition("](")[2])


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_the_course_reads_a_published_notebook_without_what_is_for_colab(
    book: curriculum.Notebook, tmp_path: Path
) -> None:
    published, unchanged = tmp_path / f"{book.name}.ipynb", tmp_path / f"{book.name}.py"
    notebooks.write(notebooks.build(book.path), published)
    unchanged.write_text(jupytext.writes(jupytext.read(published), fmt="py:percent"), "utf-8")
    for path in (published, unchanged):
        cells = [(each.kind, each.source.rstrip(), each.section) for each in curriculum.read_cells(path)]
        assert cells[0][0] == "code", "the cell that installs; all that follows is the course's own"
        assert cells[1:] == [(each.kind, each.source.rstrip(), each.section) for each in book.cells]


@pytest.mark.parametrize("libtpu", [None, "a TPU machine"])
@pytest.mark.parametrize("installed", [None, "already there"])
def test_the_colab_cell_installs_once(
    installed: str | None, libtpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    found = {"pallas_puzzles": installed, "libtpu": libtpu}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: calls.append(command) or done)
    exec(notebooks.build(BOOKS[0].path).cells[1].source, {})
    address = notebooks.repository()
    wanted = [f"pallas-puzzles @ git+{address}", *(["jax[tpu]"] if libtpu else [])]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-color", *wanted]
    assert calls == ([] if installed else [install])


def test_an_installed_wheel_knows_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = notebooks.repository()
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    urls = [f"Repository, {address}", "Other, nowhere"]
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: SimpleNamespace(get_all=lambda label: urls))
    assert notebooks.repository() == address
    urls.clear()
    with pytest.raises(LookupError, match="names no Repository"):
        notebooks.repository()


# ---- as a script -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_unsolved_as_a_script(
    book: curriculum.Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From top to bottom, with nothing solved, and nothing raises."""
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(book.path))
    out, err = capsys.readouterr()
    for puzzle in book.puzzles:
        assert f"{puzzle.id} {puzzle.title}: not solved yet." in out
    assert "Traceback" not in out
    assert not err


# ---- in a real kernel ------------------------------------------------------------------------------------------------


@pytest.fixture
def in_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[NotebookNode], NotebookNode]:
    """Runs a notebook in an empty folder and with no progress; the first cell that raises fails the test."""
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # not the kernels of whoever runs the tests
    (folder := tmp_path / "empty").mkdir()

    def execute(node: NotebookNode) -> NotebookNode:
        client = nbclient.NotebookClient(
            node, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        return client.execute()

    return execute


def check_outputs(node: NotebookNode, book: curriculum.Notebook) -> dict[str, str]:
    """What the check cell of each puzzle shows, as text."""
    shown = {}
    for puzzle in book.puzzles:
        source = book.cells[puzzle.check_cell].source
        (cell,) = [each for each in node.cells if each.cell_type == "code" and each.source == source]
        texts = [output.get("text") or output["data"].get("text/plain", "") for output in cell.outputs]
        shown[puzzle.id] = "\n".join(texts)
    return shown


def complaints(node: NotebookNode) -> list[str]:
    """What the cells wrote to stderr: a reader sees it in red."""
    outputs = [output for cell in node.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.text for output in outputs if output.get("name") == "stderr"]


@pytest.mark.thorough
@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_unsolved_in_a_kernel(book: curriculum.Notebook, in_kernel: Callable) -> None:
    node = in_kernel(notebooks.build(book.path))
    shown = check_outputs(node, book)
    for puzzle in book.puzzles:
        assert shown[puzzle.id].startswith(f"{puzzle.id} {puzzle.title}: not solved yet."), shown[puzzle.id]
    assert not complaints(node)


@pytest.mark.thorough  # tests/test_browser.py solves one in every run, tests/test_gpu_course.py one for GPUs
@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_solved_in_a_kernel(book: curriculum.Notebook, in_kernel: Callable) -> None:
    node = notebooks.build(book.path)
    lay_solutions(node, book)
    for cell in node.cells:  # whatever trains: long enough to see that it runs
        cell.source = cell.source.replace("STEPS = 300", "STEPS = 6")
    shown = check_outputs(in_kernel(node), book)
    for puzzle in book.puzzles:
        assert shown[puzzle.id].startswith(f"{puzzle.id} {puzzle.title}: solved."), shown[puzzle.id]
    pictures = [cell for cell in node.cells if cell.cell_type == "code" and cell.source.startswith("show(")]
    for cell in pictures:
        assert "<img " in cell.outputs[0].data["text/html"], cell.source
    assert not complaints(node)
