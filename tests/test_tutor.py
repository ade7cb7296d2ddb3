"""The tutor: what it knows of each puzzle is what the bank of wrong answers says, and what it tells to run exists."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bank
from pallas_puzzles.app import cli
from pallas_puzzles.course import curriculum
from pallas_puzzles.diagnose import devices, gpu
from pallas_puzzles.diagnose.diagnose import ORDER

ROOT = Path(__file__).resolve().parents[1]
TUTOR = ROOT / ".claude"
SKILL = TUTOR / "skills" / "pallas-tutor"


@pytest.fixture(scope="module")
def generator():
    specification = importlib.util.spec_from_file_location("tutor", ROOT / "docs" / "tutor.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_it_is_in_line_with_the_bank(generator):
    assert generator.stale() == {}, "run ./update_notebooks.sh"


def test_a_change_to_the_bank_makes_it_stale(generator, monkeypatch):
    answers = bank.read_all()
    answers[0].title = "a mistake that nobody has made yet"
    monkeypatch.setattr(bank, "read_all", lambda: answers)
    assert [Path(each).name for each in generator.stale()] == [f"{answers[0].puzzle.partition('/')[0]}.md"]


def test_check_changes_nothing(tmp_path):
    """--check, in a copy in which a notebook is old, one table is missing and one belongs to nobody."""
    for each in ("docs", "tests", ".claude", "puzzles", "solutions", "notebooks"):
        shutil.copytree(ROOT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    mistakes = tmp_path / ".claude" / "skills" / "pallas-tutor" / "mistakes"
    (mistakes / "basics.md").unlink()
    (mistakes / "nobody.md").write_text("")
    (tmp_path / "notebooks" / "basics.ipynb").write_text("old")
    command = [sys.executable, str(tmp_path / "docs" / "tutor.py")]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [line.partition(":")[0].rpartition("/")[2] for line in done.stdout.splitlines() if ":" in line] == [
        "basics.ipynb",
        "basics.md",
        "nobody.md",
    ]
    assert (tmp_path / "notebooks" / "basics.ipynb").read_text() == "old"
    assert not (mistakes / "basics.md").exists()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert (mistakes / "basics.md").read_text() == (SKILL / "mistakes" / "basics.md").read_text()
    assert not (mistakes / "nobody.md").exists()
    for each in ("notebooks", ".claude"):
        made, ours = ([p for p in sorted((root / each).rglob("*.*")) if p.is_file()] for root in (tmp_path, ROOT))
        assert [(p.name, p.read_bytes()) for p in made] == [(p.name, p.read_bytes()) for p in ours]


def test_every_wrong_answer_is_known():
    answers = bank.read_all()
    for book in curriculum.notebooks():
        text = (SKILL / "mistakes" / f"{book.name}.md").read_text("utf-8")
        mine = [answer for answer in answers if answer.puzzle.startswith(f"{book.name}/")]
        assert mine
        for answer in mine:
            assert f"| {answer.title.replace('|', chr(92) + '|')} |" in text, str(answer)


def test_every_kind_of_finding_is_explained(generator):
    text = (SKILL / "messages.md").read_text("utf-8")
    table = text.partition("## Errors")[0]
    for kind in [*ORDER, *gpu._WORDS, *devices._WORDS, "budget", "forbidden", "outside", "lowering"]:
        assert re.search(rf"[ ,]{re.escape(kind)}[ ,]", table), kind
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "src" / "pallas_puzzles").rglob("*.py"))
    for kind in (kind for kinds in generator.FAMILIES for kind in kinds.split()):
        assert re.search(rf"[\"' ]{re.escape(kind)}[\"' ]", sources), f"no finding is of the kind {kind!r}"


def test_the_commands_that_it_names_exist():
    text = "".join(path.read_text("utf-8") for path in TUTOR.rglob("*.md"))
    named = set(re.findall(r"`puzzles (\w+)", text))
    known = set(cli.app.commands)
    assert {"check", "start", "hint"} <= named <= known
    assert "puzzles check ID --json" in text


def test_it_does_not_tell_before_the_third_question():
    text = (SKILL / "SKILL.md").read_text("utf-8")
    assert "Before the third question you do not give the answer" in text
    front = text.split("---")[1]
    assert "name: pallas-tutor" in front
    assert "description: " in front
    for link in re.findall(r"\]\(([\w/.]+\.md)\)", text):
        assert (SKILL / link).is_file(), link
