"""Progress survives two writers, a damaged file, a newer version and a folder that cannot be written."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from base64 import b64decode
from pathlib import Path

import pytest

import demo_course
from pallas_puzzles.course import curriculum
from pallas_puzzles.files import locked

store = importlib.import_module("pallas_puzzles.course.progress")  # the package's own `progress` is the function

WRITER = """
import sys
from pallas_puzzles.course.progress import record
for number in range(50):
    record("demo/1", False)
    record(f"{sys.argv[1]}/{number}", True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(folder))
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.setattr(store, "_said", set())
    monkeypatch.setattr(store, "_unsaved", [])
    return folder


def read(home: Path) -> dict:
    return json.loads((home / "progress.json").read_text("utf-8"))


def test_what_is_recorded(home):
    store.record("demo/1", False)
    store.record("demo/1", True)
    solved = read(home)["puzzles"]["demo/1"]["solved"]
    store.record("demo/1", False)
    entry = read(home)["puzzles"]["demo/1"]
    assert read(home)["version"] == 1
    assert entry == {"solved": solved, "hints": 0, "attempts": 3}, "what is solved once stays solved"
    assert solved.startswith("20")
    assert solved.endswith("Z")
    assert [each.name for each in home.iterdir() if ".new" in each.name] == []


def test_two_writers_lose_nothing(home):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in ("a", "b")]
    assert [each.wait(timeout=60) for each in writers] == [0, 0]
    puzzles = read(home)["puzzles"]
    assert puzzles["demo/1"]["attempts"] == 100
    assert all(puzzles[f"{name}/{number}"]["solved"] for name in "ab" for number in range(50))


def test_two_threads_lose_nothing(home):
    threads = [threading.Thread(target=lambda: [store.record("demo/1", False) for _ in range(25)]) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert read(home)["puzzles"]["demo/1"]["attempts"] == 50


def test_a_crash_while_writing_leaves_the_old_file(home, monkeypatch):
    store.record("demo/1", True)
    before = (home / "progress.json").read_bytes()

    def crash(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    store.record("demo/2a", True)
    assert (home / "progress.json").read_bytes() == before
    assert sorted(each.name for each in home.iterdir()) == ["progress.json", "progress.lock"]
    assert store.load().solved("demo/2a"), "this process still knows"


def test_what_could_not_be_written_is_written_later(home, monkeypatch):
    store.record("demo/1", True)
    solved = read(home)["puzzles"]["demo/1"]["solved"]
    with monkeypatch.context() as broken, locked(home / "progress.lock"):
        broken.setattr(store, "LOCK_TIMEOUT_S", 0.0)
        store.record("demo/1", False)
        assert store.load().entry("demo/1") == {"solved": solved, "hints": 0, "attempts": 2}
    store.record("demo/2a", False)
    assert read(home)["puzzles"]["demo/1"] == {"solved": solved, "hints": 0, "attempts": 2}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"version": 1, "puzzles": {"demo/1": ',
        b"\xff\xfe\x00",
        b"[]",
        b'{"version": "1", "puzzles": {}}',
        b'{"version": 1, "puzzles": []}',
        b'{"version": 1, "puzzles": {"demo/1": {"attempts": "many"}}}',
    ],
)
def test_a_damaged_file_is_kept_aside(home, capsys, content):
    home.mkdir()
    (home / "progress.json").write_bytes(content)
    assert store.load().puzzles == {}
    store.record("demo/1", True)
    aside = list(home.glob("progress.json.damaged-*"))
    assert [each.read_bytes() for each in aside] == [content]
    assert read(home)["puzzles"]["demo/1"]["solved"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert aside[0].name in said[0]


def test_two_damaged_files_are_both_kept(home):
    home.mkdir()
    for content in ("first", "second"):
        (home / "progress.json").write_text(content)
        store.load()
    assert sorted(each.read_text() for each in home.glob("progress.json.damaged-*")) == ["first", "second"]


def test_a_newer_version_is_not_touched(home, capsys):
    home.mkdir()
    content = '{"version": 2, "puzzles": "in another form"}'
    (home / "progress.json").write_text(content)
    store.record("demo/1", True)
    assert store.record_hint("demo/1") == 1
    assert (home / "progress.json").read_text() == content
    assert list(home.glob("*.damaged-*")) == []
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "was written by a newer pallas-puzzles and is left alone" in said[0]
    assert said[0].endswith("`git pull` brings it back")


def test_unknown_keys_survive(home):
    home.mkdir()
    (home / "progress.json").write_text('{"version": 1, "puzzles": {"demo/1": {"attempts": 1, "mood": "calm"}}}')
    store.record("demo/1", False)
    assert read(home)["puzzles"]["demo/1"] == {"attempts": 2, "hints": 0, "mood": "calm", "solved": None}


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "file" / "home"))
    store.record("demo/1", True)
    assert [store.record_hint("demo/1"), store.record_hint("demo/1")] == [1, 2], "hints still move on"
    assert store.load().solved("demo/1")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "PALLAS_PUZZLES_HOME" in said[0]


def test_a_folder_that_can_only_be_read(home, monkeypatch, capsys):
    store.record("demo/1", True)
    before = (home / "progress.json").read_bytes()
    really_open = open

    def read_only(path, mode="r", *args, **options):
        if set(mode) & set("wax+"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, mode, *args, **options)

    monkeypatch.setattr("builtins.open", read_only)  # root may write anywhere, so chmod would prove nothing
    assert store.load().solved("demo/1"), "it can still be read"
    store.record("demo/2a", True)
    assert (home / "progress.json").read_bytes() == before
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_home(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("PALLAS_PUZZLES_HOME")
    monkeypatch.setattr("platformdirs.user_data_path", lambda *args, **options: Path("~/.local/share/pallas-puzzles"))
    monkeypatch.chdir(tmp_path)
    store.record("demo/1", True)
    assert not (tmp_path / "~").exists()
    assert "PALLAS_PUZZLES_HOME" in capsys.readouterr().err


def test_the_map(home):
    assert "next: demo/1  Add one" in str(store.progress())
    store.record("a_second/1", True)
    assert store.progress().next().id == "demo/1", "a finished notebook leads back to the first gap"
    store.record("demo/1", True)
    state = store.progress()
    assert state.next().id == "demo/2a"
    text, page = str(state), state._repr_html_()
    assert "1/2" in text
    assert "1/1" in text
    assert re.search(r"2a +next +Add two", text)
    for part in ("A small demonstration", "1 of 2 solved", "next: demo/2a", "<td style='text-align:left'>solved</td>"):
        assert part in page
    assert 'alt="demo: 1 of 2 solved; a_second: 1 of 1 solved."' in page
    drawn = ET.fromstring(b64decode(page.partition("base64,")[2].partition('"')[0]))
    fills = [each.get("fill") for each in drawn.iter() if each.get("width") == "12"]
    assert fills == ["var(--green)", "none", "var(--green)"]
    assert "1 of 2" in "".join(drawn.itertext()), "words back the tiles"
    store.record("demo/2a", True)
    assert "every puzzle is solved" in str(store.progress())


def test_next_stays_in_the_notebook_one_works_in(home, tmp_path, monkeypatch):
    course = demo_course.make(tmp_path / "longer")
    path = course / "puzzles" / "a_second.py"
    path.write_text(
        path.read_text() + '\n# %% [markdown]\n# ## Puzzle 2: More\n\n# %%\ncheck("a_second/2", None, None)\n'
    )
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(course))
    store.record("a_second/1", True)
    assert store.progress().next().id == "a_second/2"


def test_no_title_of_the_course_is_cut_at_80_columns(home, monkeypatch):
    monkeypatch.delenv("PALLAS_PUZZLES_COURSE")
    store.record_hint("basics/1")
    for book in curriculum.notebooks():
        lines = [line for _, line in store.load().lines(80, here=book.name)]
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith("...")]
        for each in book.puzzles:
            assert any(line.endswith(f"  {each.title}") for line in lines), each.id


def test_a_bar_is_full_only_when_all_is_solved():
    assert store.bar(99, 100).endswith(".")
    assert store.bar(1, 100).startswith("#")
    assert "." not in store.bar(3, 3)
    assert "#" not in store.bar(0, 3)
