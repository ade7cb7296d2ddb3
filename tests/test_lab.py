"""`puzzles lab`: the order of the files, where a notebook opens, and whose settings are whose."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest

from pallas_puzzles.app import lab, notebooks, workspace
from pallas_puzzles.course import curriculum
from pallas_puzzles.course.progress import load, record

NAMES = [book.name for book in curriculum.notebooks()]


@pytest.fixture
def folder(laid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    workspace.init(shutil.copytree(laid, tmp_path / "mine"))
    return tmp_path / "mine"


def test_files_are_listed_in_the_order_of_the_course(folder: Path) -> None:
    from pallas_puzzles.app.lab_files import CourseOrder

    (folder / "mine.txt").write_text("a file of the reader's")
    (folder / f"{NAMES[0]}.py").touch()
    listed = asyncio.run(CourseOrder(root_dir=str(folder)).get(""))["content"]
    listed = sorted((each for each in listed if each["name"] != "mine.txt"), key=lambda each: each["created"])
    assert [each["name"] for each in listed] == [f"{name}.{kind}" for kind in ("ipynb", "py") for name in NAMES]
    assert asyncio.run(CourseOrder(root_dir=str(folder)).get("mine.txt"))["content"] == "a file of the reader's"


def test_a_notebook_opens_at_its_next_puzzle(folder: Path) -> None:
    assert lab.next_places(folder, load()) == {}, "nothing is solved: the top is the right place"
    book = curriculum.notebooks()[0]
    for each in book.puzzles[:2]:
        record(each.id, True)
    ((name, place),) = lab.next_places(folder, load()).items()
    assert name == f"{book.name}.ipynb"
    cells = {cell.id: cell.source for cell in nbformat.read(folder / name, as_version=4).cells}
    assert cells[place].startswith(f"## Puzzle {book.puzzles[2].number}: ")
    (folder / name).write_text("{")
    assert lab.next_places(folder, load()) == {}, "a damaged notebook stops nobody"


def test_the_terminal_says_how_to_go_on(folder, monkeypatch, capsys) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(lab, "_become", lambda command, variables: started.append(variables))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "theirs")
    lab.launch(folder, load(), [])
    assert started[0]["JUPYTER_CONFIG_PATH"] == f"{folder / lab.SETTINGS}{os.pathsep}theirs"
    assert "Ctrl-C stops JupyterLab." in capsys.readouterr().out
    record(curriculum.notebooks()[0].puzzles[0].id, True)
    lab.launch(folder, load(), [])
    assert "first choose Run > Run All Above Selected Cell" in capsys.readouterr().out


def test_an_edited_script_leaves_the_metadata_of_its_notebook(folder: Path) -> None:
    notebook = folder / f"{NAMES[0]}.ipynb"
    before = nbformat.read(notebook, as_version=4).metadata
    script = folder / f"{NAMES[0]}.py"
    script.write_text(script.read_text("utf-8").replace("pass  # YOUR CODE HERE", "pass  # mine", 1), "utf-8")
    workspace.synced_file(folder, NAMES[0])
    after = nbformat.read(notebook, as_version=4)
    assert any("# mine" in cell.source for cell in after.cells)
    assert {key: after.metadata[key] for key in ("kernelspec", "language_info")} == {
        key: before[key] for key in ("kernelspec", "language_info")
    }


def test_settings_stay_in_the_workspace_and_a_layout_is_kept(folder: Path) -> None:
    lab.write_settings(folder, {})
    (layout,) = (folder / lab.SETTINGS / "layout").iterdir()
    assert json.loads(layout.read_text())["data"] == lab.LAYOUT
    layout.write_text("the reader's")
    lab.write_settings(folder, {"basics.ipynb": "a-cell"})
    assert layout.read_text() == "the reader's"
    page = json.loads((folder / lab.SETTINGS / "labconfig" / "page_config.json").read_text())
    assert json.loads(page["pallasPuzzles"]) == {"basics.ipynb": "a-cell"}


def test_a_new_notebook_says_what_the_kernel_says(folder: Path) -> None:
    """Else JupyterLab writes it, and marks the tab as changed before a key is pressed."""
    from ipykernel.ipkernel import IPythonKernel
    from ipykernel.kernelspec import get_kernel_dict

    metadata = notebooks.for_workspace(curriculum.notebooks()[0].path).metadata
    assert metadata["language_info"] == IPythonKernel.language_info
    assert metadata["kernelspec"]["display_name"] == get_kernel_dict()["display_name"]
