"""The two halves of a notebook: solving in one is seen in the other, a conflict is reported, nothing is lost."""

import json
import multiprocessing
import os
from pathlib import Path

import jupytext
import nbformat
import pytest

import demo_course
from pallas_puzzles.app import pairing, workspace
from pallas_puzzles.files import locked

HOLE = "# x_ref: (8, 128)      o_ref: (8, 128)\n    pass  # YOUR CODE HERE"
ANSWER = "o_ref[...] = x_ref[...] + 1.0"


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A workspace with both halves of `demo`, unsolved and in step."""
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    workspace.init(tmp_path / "mine")
    assert pairing.sync(tmp_path / "mine", "demo") == pairing.Pair(tmp_path / "mine" / "demo.py")
    return tmp_path / "mine"


def later(path: Path, seconds: int = 10) -> None:
    age = path.stat().st_mtime + seconds
    os.utime(path, (age, age))


def solve_script(folder: Path, answer: str = ANSWER) -> Path:
    path = folder / "demo.py"
    text = path.read_bytes().decode()
    ending = "\r\n" if "\r\n" in text else "\n"
    assert HOLE.replace("\n", ending) in text
    path.write_bytes(text.replace(HOLE.replace("\n", ending), answer).encode())
    later(path)
    return path


def solve_notebook(folder: Path, answer: str = ANSWER) -> Path:
    path = folder / "demo.ipynb"
    node = nbformat.read(path, as_version=4)
    (cell,) = [each for each in node.cells if HOLE in each.source]
    cell.source = cell.source.replace(HOLE, answer)
    cell.outputs = [nbformat.v4.new_output("stream", text="ran here")]
    nbformat.write(node, path)
    later(path)
    return path


def sources(path: Path) -> list[str]:
    return [each.source for each in jupytext.read(path).cells]


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("demo.py", "demo.ipynb")}


def test_the_notebook_follows_the_script(mine):
    script = solve_script(mine)
    before = nbformat.read(mine / "demo.ipynb", as_version=4)
    assert pairing.sync(mine, "demo") == pairing.Pair(script)
    node = nbformat.read(mine / "demo.ipynb", as_version=4)
    nbformat.validate(node)
    assert sources(script) == sources(mine / "demo.ipynb")
    assert ANSWER in (mine / "demo.ipynb").read_text()
    ids = {each.source: each.id for each in before.cells}
    kept = [each.id == ids[each.source] for each in node.cells if each.source in ids]
    assert all(kept)
    assert len(kept) == len(before.cells) - 1
    assert script.stat().st_mtime_ns == (mine / "demo.ipynb").stat().st_mtime_ns, "jupytext asks for the newer"


def test_the_script_follows_the_notebook(mine):
    notebook = solve_notebook(mine)
    assert pairing.sync(mine, "demo") == pairing.Pair(notebook)
    assert sources(notebook) == sources(mine / "demo.py")
    assert ANSWER in (mine / "demo.py").read_text()
    after = contents(mine)
    assert pairing.sync(mine, "demo") == pairing.Pair(mine / "demo.py")
    assert contents(mine) == after


def test_outputs_stay_when_the_script_changes(mine):
    solve_notebook(mine)
    pairing.sync(mine, "demo")
    script = mine / "demo.py"
    script.write_text(script.read_text().replace("Two additions.", "Two additions, both mine."))
    later(script, 60)
    pairing.sync(mine, "demo")
    node = nbformat.read(mine / "demo.ipynb", as_version=4)
    assert [each.outputs[0].text for each in node.cells if each.get("outputs")] == ["ran here"]
    assert "both mine" in node.cells[-1].source


def test_which_half_to_read_often_shows_without_reading(mine):
    script, notebook = pairing.halves(mine, "demo")
    assert pairing.known(mine, "demo") == script, "in step"
    notebook.write_text("it could be anything")
    os.utime(notebook, (1, 1))
    assert pairing.known(mine, "demo") == notebook, "written last, whatever its date"
    script.write_text(script.read_text() + "# mine")
    assert pairing.known(mine, "demo") is None, "which one counts takes a comparison"
    notebook.unlink()
    assert pairing.known(mine, "demo") is None, "the other one has to be made"
    (mine / pairing.RECORD).unlink()
    assert pairing.known(mine, "demo") is None


def test_a_conflict_is_reported_and_nothing_is_written(mine):
    solve_script(mine, "o_ref[...] = x_ref[...] + 2.0")
    newer = solve_notebook(mine)
    later(newer, 20)
    before = contents(mine)
    pair = pairing.sync(mine, "demo")
    assert pair.current == newer
    for part in ("demo.py and demo.ipynb have both changed", "Puzzle 1", "newer, demo.ipynb", "rename"):
        assert part in pair.problem
    assert contents(mine) == before
    assert pairing.sync(mine, "demo").problem, "and it is reported again"
    (mine / "demo.py").rename(mine / "demo.py.mine")
    assert not pairing.sync(mine, "demo").problem
    assert sources(mine / "demo.py") == sources(newer), "what is missing is made anew"


def test_the_same_change_in_both_is_no_conflict(mine):
    solve_script(mine)
    solve_notebook(mine)
    assert not pairing.sync(mine, "demo").problem


@pytest.mark.parametrize("damage", ["no record", "a damaged record", "a record of another kind"])
def test_a_workspace_without_a_record(mine, damage):
    record = mine / pairing.RECORD
    if damage == "no record":
        record.unlink()
    else:
        record.write_text("{" if damage == "a damaged record" else '{"version": 1, "pairs": [], "texts": 3}')
    solve_script(mine)
    assert not pairing.sync(mine, "demo").problem, "the other half is as the course gives it"
    assert ANSWER in (mine / "demo.ipynb").read_text()
    record.unlink()
    (mine / "demo.py").write_text((mine / "demo.py").read_text().replace(ANSWER, "o_ref[...] = x_ref[...] + 3.0"))
    pair = pairing.sync(mine, "demo")
    assert "demo.py and demo.ipynb differ (Puzzle 1)" in pair.problem, "nothing says which one is right"


def test_line_endings_and_a_mark_at_the_start_survive(mine):
    script = mine / "demo.py"
    script.write_bytes(b"\xef\xbb\xbf" + script.read_bytes().replace(b"\n", b"\r\n"))
    later(script)
    notebook = (mine / "demo.ipynb").read_bytes()
    assert not pairing.sync(mine, "demo").problem
    assert (mine / "demo.ipynb").read_bytes() == notebook, "only the line endings differ"
    later(solve_notebook(mine), 60)
    pairing.sync(mine, "demo")
    written = script.read_bytes()
    assert ANSWER.encode() in written
    assert written.startswith(b"\xef\xbb\xbf")
    assert written.count(b"\n") == written.count(b"\r\n") > 50


def test_an_emptied_script_empties_no_notebook(mine):
    (mine / "demo.py").write_text("")
    later(mine / "demo.py")
    before = contents(mine)
    pair = pairing.sync(mine, "demo")
    assert "no puzzle left" in pair.problem
    assert contents(mine) == before


@pytest.mark.parametrize("content", [b'{"cells": [', b"\xff\xfe\x00", b"[]"])
def test_a_damaged_notebook_stays_as_it_is(mine, content):
    (mine / "demo.ipynb").write_bytes(content)
    later(mine / "demo.ipynb")
    pair = pairing.sync(mine, "demo")
    assert pair.current == mine / "demo.py"
    assert "demo.ipynb is damaged" in pair.problem
    assert (mine / "demo.ipynb").read_bytes() == content


def test_a_half_that_is_missing_is_made(mine):
    solve_script(mine)
    (mine / "demo.ipynb").unlink()
    pair = pairing.sync(mine, "demo")
    assert pair == pairing.Pair(mine / "demo.py")
    assert ANSWER in (mine / "demo.ipynb").read_text()
    assert pairing.sync(mine, "another") is None


def test_a_folder_in_which_nothing_can_be_written(mine):
    (mine / pairing.LOCK).unlink()
    (mine / pairing.LOCK).mkdir()  # root may write anywhere, so chmod would prove nothing
    script = solve_script(mine)
    before = contents(mine)
    pair = pairing.sync(mine, "demo")
    assert pair.current == script
    assert "cannot be written" in pair.problem
    assert contents(mine) == before


def test_another_program_at_work(mine, monkeypatch):
    script = solve_script(mine)
    before = contents(mine)
    monkeypatch.setattr(pairing, "locked", lambda path: locked(path, timeout_s=0.05))
    with locked(mine / pairing.LOCK):
        pair = pairing.sync(mine, "demo")
    assert pair.current == script
    assert "another program" in pair.problem
    assert contents(mine) == before


def _sync_often(folder: str, course: str) -> None:
    os.environ["PALLAS_PUZZLES_COURSE"] = course
    for _ in range(20):
        pair = pairing.sync(Path(folder), "demo")
        assert pair is not None
        assert not pair.problem, pair.problem


def test_two_at_once(mine):
    solve_script(mine)
    spawn = multiprocessing.get_context("spawn")
    course = os.environ["PALLAS_PUZZLES_COURSE"]
    both = [spawn.Process(target=_sync_often, args=(str(mine), course)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(timeout=60)
    assert [each.exitcode for each in both] == [0, 0]
    assert sources(mine / "demo.py") == sources(mine / "demo.ipynb")
    assert json.loads((mine / pairing.RECORD).read_text())["pairs"]["demo"]["cells"]
    assert [each.name for each in mine.iterdir() if each.name.endswith(".new")] == []


def test_magics_are_the_same_in_both(mine):
    node = nbformat.read(mine / "demo.ipynb", as_version=4)
    node.cells[1].source += "\n%time x = 1"
    nbformat.write(node, mine / "demo.ipynb")
    later(mine / "demo.ipynb")
    assert not pairing.sync(mine, "demo").problem
    assert "# %time x = 1" in (mine / "demo.py").read_text()
    assert not pairing.sync(mine, "demo").problem
