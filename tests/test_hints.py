"""Hints one at a time, the solution after them; what a notebook around a verdict knows, and when it says nothing."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import demo_course
from pallas_puzzles.course import curriculum, finale, hints, page
from pallas_puzzles.view.verdict import Verdict

store = importlib.import_module("pallas_puzzles.course.progress")  # the package's own `progress` is the function


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    return tmp_path


@pytest.fixture
def shell(monkeypatch) -> Any:
    """A notebook's shell, as far as these modules ask for one."""
    fake = types.SimpleNamespace(user_ns={}, kernel=object(), execution_count=3)
    for module in (hints, page, finale, importlib.import_module("pallas_puzzles.view.live")):
        monkeypatch.setattr(module, "running_shell", lambda: fake)
    monkeypatch.setattr(page, "_checked", {})
    return fake


def seen(puzzle_id: str) -> int:
    return store.load().entry(puzzle_id)["hints"]


# --- hints -------------------------------------------------------------------------------------------------------


def test_hints_climb_are_counted_and_stop_before_the_solution(capsys):
    for _ in range(4):
        hints.hint("demo/1")
    shown = capsys.readouterr().out
    assert [shown.count(f"hint {number} of 3") for number in (1, 2, 3)] == [1, 1, 0]
    assert shown.index("x_ref[...]` give?") < shown.index("`o_ref[...] = ...`")
    assert shown.count('You have seen every hint of demo/1. `hint("demo/1", solution=True)` shows the solution.') == 2
    assert "```python" not in shown
    assert "<details>" not in shown
    assert seen("demo/1") == 2


def test_the_solution_comes_after_the_hints(capsys):
    hints.hint("demo/1", solution=True)
    assert capsys.readouterr().out.startswith("2 hints of demo/1 come before the solution")
    hints.hint("demo/1")
    hints.hint("demo/1", solution=True)
    assert "1 hint of demo/1 comes before the solution" in (shown := capsys.readouterr().out)
    assert "hint 3" not in shown
    assert seen("demo/1") == 1, "to be refused costs nothing"
    hints.hint("demo/1")
    hints.hint("demo/1", solution=True)
    assert "```python" in capsys.readouterr().out
    assert seen("demo/1") == 3


def test_whoever_has_solved_a_puzzle_may_see_its_solution_at_once(capsys):
    store.record("demo/1", True)
    hints.hint("demo/1", solution=True)
    assert "```python" in capsys.readouterr().out
    assert seen("demo/1") == 0


def test_the_button_counts_down_and_shows_the_solution_last(shell):
    puzzle = curriculum.puzzle("demo/1")
    words, box = hints.offered(puzzle)
    assert words == 'Stuck? from pallas_puzzles import hint; hint("demo/1") shows the next hint.'
    press, shown = box.children
    labels = []
    for _ in range(3):
        labels.append(press.description)
        press.click()
    assert labels == ["Next hint (2 left)", "Next hint (1 left)", "Show the solution"]
    assert [shown.value.count(f"hint {number} of 3") for number in (1, 2, 3)] == [1, 1, 1]
    assert "<pre><code" in shown.value
    assert press.layout.display == "none"
    shell.user_ns["hint"] = hints.hint
    assert hints.offered(puzzle)[0] == 'Stuck? hint("demo/1", solution=True) shows the solution.'


def test_only_the_puzzle_whose_turn_it_is_has_a_button(shell):
    words, nothing = hints.offered(curriculum.puzzle("demo/2a"))
    assert "hint(" in words
    assert nothing is None
    shell.kernel = None
    assert hints.offered(curriculum.puzzle("demo/1"))[1] is None, "no kernel, no button"


# --- what stands around a verdict ----------------------------------------------------------------------------------


def around(status: str, following: str = "Write it.") -> Verdict:
    verdict = Verdict("demo/1", status, [], "demo/1 Add one.", next=following)
    finale.around(verdict, curriculum.puzzle("demo/1"), {})
    return verdict


def test_a_pass_says_how_far_the_reader_is():
    assert around("passed").standing is None, "not recorded, so nothing to count"
    store.record("demo/1", True)
    standing = around("passed").standing
    assert standing.words == "1 of 2 solved in demo."
    assert "demo: 1 of 2 solved; a_second: 0 of 1 solved." in standing.drawing
    assert standing.link == "", "no page that would follow it"


def test_in_a_notebook_a_verdict_says_what_to_run_and_offers_hints(shell):
    verdict = around("unsolved")
    assert verdict.next == "Write it. Then run that cell, and check again."
    assert verdict.below is not None
    assert "hint(" in verdict.help
    assert ":has(.pallas-below)" in verdict._repr_html_(), "no error in its place when the kernel is gone"
    assert around("failed").next == "Write it."


def test_a_function_that_was_not_run_again_is_named(shell):
    source = "def kernel(x):\n    return x + 1\n"

    def checked(status: str, *holes: Any) -> list[str]:
        verdict = Verdict("demo/1", status, [], "demo/1 Add one.")
        finale.around(verdict, curriculum.puzzle("demo/1"), {each.__name__: each.__code__ for each in holes})
        return verdict.notes

    def defined() -> Any:  # what running its cell does
        names: dict[str, Any] = {}
        exec(source, names)
        return names["kernel"]

    first, second = defined(), defined()
    assert checked("failed", first) == []
    assert checked("failed", first) == [
        "kernel is the same as at your last check. If you have made an edit, run its cell, then check again."
    ]
    assert checked("passed", first) == []
    assert checked("failed", second) == []
    assert checked("error", second, seen) == [], "one of two was run"
    assert "kernel and seen are the same as at your last check." in checked("error", second, seen)[0]


def test_in_colab_a_pass_says_where_the_link_is(shell, monkeypatch):
    assert around("passed", "Next: demo/2a Add two").next == "Next: demo/2a Add two"
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    assert around("passed", "Next: demo/2a Add two").next == "Next: demo/2a Add two: the link is below this cell."
    assert around("passed", "").next == "", "after the last puzzle there is no link"
    assert "below this cell" not in around("failed").next


def test_outside_of_a_notebook_nothing_is_added():
    verdict = around("unsolved")
    assert (verdict.next, verdict.help, verdict.below) == ("Write it.", "", None)


def test_links_are_those_that_lead_somewhere(shell, tmp_path, monkeypatch):
    here, there = tmp_path / "demo.ipynb", curriculum.puzzle("a_second/1")
    here.write_text("{}")
    monkeypatch.setenv("JPY_SESSION_NAME", str(here))
    assert page.link(curriculum.puzzle("demo/2a")) == "#Puzzle-2a:-Add-two,-block-by-block"
    assert page.link(there) == "", "there is no such file"
    (tmp_path / "a_second.ipynb").write_text("{}")
    assert page.link(there) == "a_second.ipynb"
    with monkeypatch.context() as colab:
        colab.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
        assert page.link(there) == ""
    shell.user_ns["__vsc_ipynb_file__"] = str(here)
    assert page.file() == here
    assert page.link(there) == ""
