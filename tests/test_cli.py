"""The `puzzles` command: exit codes, JSON, workspaces that lose nothing, and whose file it was that was checked."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jupytext
import pytest

import demo_course
from demo_course import ADD_ONE, ADD_TWO, HOLES_OF_TWO, solved
from pallas_puzzles import normal
from pallas_puzzles.app import cli, lab, workspace
from tpu_kernels import needs_compiler


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder to stand in, with a course and a home of its own."""
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def recorded(place: Path) -> dict:
    path = place.parent / "home" / "progress.json"
    return json.loads(path.read_text())["puzzles"] if path.exists() else {}


def as_subprocess(*words: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pallas_puzzles", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def files(folder: Path) -> dict[str, bytes]:
    """The reader's files; what starts with a dot is ours."""
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if not each.name.startswith(".")}


# ---- workspaces ------------------------------------------------------------------------------------------------------


def test_init_makes_pairs(place, puzzles):
    code, out, _ = puzzles("init")
    made = place / "workspace"
    assert code == 0
    assert str(made) in out
    assert sorted(files(made)) == ["a_second.ipynb", "a_second.py", "demo.ipynb", "demo.py"]
    for each in (made / name for name in files(made)):
        assert jupytext.read(each).metadata["jupytext"]["formats"] == "ipynb,py:percent", each.name
    script, paired = (jupytext.read(made / name).cells for name in ("demo.py", "demo.ipynb"))
    assert [each.source for each in script] == [each.source for each in paired]
    assert (made / "demo.py").stat().st_mtime_ns >= (made / "demo.ipynb").stat().st_mtime_ns


def test_init_twice_loses_nothing(place, puzzles):
    puzzles("init", "mine")
    (place / "mine" / "demo.py").write_text(solved())
    (place / "mine" / "a_second.ipynb").write_text("my notes")
    before = files(place / "mine")
    code, out, _ = puzzles("init", "mine")
    assert code == 0
    assert files(place / "mine") == before
    assert "kept" in out
    assert "added" not in out


def test_init_completes_a_pair_with_the_readers_own_work(place, puzzles):
    puzzles("init", "mine")
    mine = place / "mine"
    (mine / "demo.py").write_text(solved())
    (mine / "demo.ipynb").unlink()
    (mine / "a_second.py").unlink()
    before = files(mine)
    _, out, _ = puzzles("init", "mine")
    assert re.search(r"added .*a_second.py, demo.ipynb|added .*demo.ipynb, a_second.py", out)
    assert {name: files(mine)[name] for name in before} == before
    assert "x_ref[...] + 1.0" in (mine / "demo.ipynb").read_text(), "not the unsolved one"
    assert workspace.current_file(mine, "demo").suffix == ".py"
    assert 'check("a_second/1"' in (mine / "a_second.py").read_text()


def test_init_stays_out_of_the_course(place, puzzles):
    course = place.parent / "course"
    before = files(course / "puzzles")
    package = Path(cli.__file__).parent
    (place / "link").symlink_to(course / "puzzles")
    for folder in (course / "puzzles", course / "puzzles" / "below", course / "notebooks", package, place / "link"):
        code, _, err = puzzles("init", folder)
        assert code == 2, folder
        assert "belongs to the course" in err, folder
    assert files(course / "puzzles") == before
    assert not (course / "notebooks").exists()


def test_init_where_nothing_can_be_written(place, puzzles):
    (place / "file").write_text("")
    code, _, err = puzzles("init", "file")
    assert code == 2
    assert "name another folder" in err


def test_the_workspace_is_found_from_anywhere(place, puzzles, monkeypatch):
    puzzles("init", "mine")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert workspace.find() == place / "mine"
    assert f"your files: {place / 'mine'}" in puzzles()[1].replace("\n", "")


def test_the_workspace_one_stands_in_comes_first(place, puzzles, monkeypatch):
    puzzles("init", "mine")
    puzzles("init", "later")
    (place / "mine" / "below").mkdir()
    assert workspace.find() == place / "later"
    for folder in (place / "mine", place / "mine" / "below"):
        monkeypatch.chdir(folder)
        assert workspace.find() == place / "mine"
        assert workspace.default_folder() == place / "mine"
    code, out, _ = puzzles("check", "demo/1")
    assert code == 1
    assert str(place / "mine" / "demo.py") in out


def test_a_workspace_is_remembered_under_any_locale(place):
    as_subprocess("init", place / "\u00fcn\u00ef")
    bare = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "pallas_puzzles"]
    done = subprocess.run(command, capture_output=True, env=bare, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"your files: {place / 'ünï'}".encode() in done.stdout
    assert b"no workspace" not in done.stdout


def test_nobody_reads_to_the_end(place):
    command = f"{sys.executable} -m pallas_puzzles list --json | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


def test_a_file_in_another_encoding_is_refused(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    mine.write_bytes(
        solved().replace("Two additions.", "Zwei B\u00e4ume.").replace("# # A", "# # \u00c4").encode("latin-1")
    )
    code, out, err = puzzles("check", "demo/1")
    assert code == 2
    assert f"{mine} is not UTF-8 (line 11): save it as UTF-8, then check again" in err
    assert "not solved yet" not in out
    mine.unlink()
    (place / "workspace" / "demo.ipynb").write_text("no notebook")
    code, out, err = puzzles("check", "demo/1")
    assert code == 2
    assert "is not a notebook that can be read: it is not JSON" in err
    assert "NotJSONError" not in err


def test_inside_a_checkout_the_workspace_is_its_own(place, monkeypatch):
    below = place / "checkout" / "src" / "pallas_puzzles"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert workspace.default_folder() == place / "checkout" / "workspace"


# ---- check -----------------------------------------------------------------------------------------------------------


def test_without_a_workspace(puzzles):
    code, out, err = puzzles("check", "demo/1")
    assert code == 2
    assert "puzzles init" in err
    assert out == ""


def test_check_judges_the_readers_file_and_names_it(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    code, out, _ = puzzles("check", "demo/1")
    assert code == 1
    assert str(mine) in out
    assert "not solved yet" in out
    assert recorded(place) == {}, "an untouched hole is no attempt"
    mine.write_text(solved().replace("+ 1.0\n\n\ndef add_one(", "+ 2.0\n\n\ndef add_one("))
    assert puzzles("check")[0] == 1, "nothing said is the next puzzle"
    assert recorded(place)["demo/1"]["attempts"] == 1
    assert not recorded(place)["demo/1"]["solved"]
    assert "of 2 solved" not in out
    mine.write_text(solved())
    code, out, _ = puzzles("check", "demo/1")
    assert code == 0
    assert out.splitlines()[-1] == "demo  ##########..........  1 of 2 solved"
    assert recorded(place)["demo/1"]["attempts"] == 2
    assert recorded(place)["demo/1"]["solved"]
    assert "demo/2a" in puzzles("check")[1]


BRINGS_IN_STEP = """
import sys
from pallas_puzzles.app import cli, pairing
def sync(folder, name):
    print("imported:", *{"jax", "numpy", "rich.console", "jupytext", "nbformat"} & set(sys.modules))
    return pairing.Pair(pairing.current(folder, name))
pairing.sync = sync
cli.main(["check", "demo/1"])
"""


@pytest.mark.parametrize("suffix", ["py", "ipynb"])
def test_until_it_has_told_the_command_imports_little(place, puzzles, suffix):
    """The other half of the notebook, for which jupytext is needed, follows after the verdict."""
    puzzles("init")
    mine = place / "workspace" / f"demo.{suffix}"
    mine.write_text(mine.read_text().replace("pass  # YOUR CODE HERE", "o_ref[...] = (x_ref[...]", 1))
    done = subprocess.run([sys.executable, "-c", BRINGS_IN_STEP], capture_output=True, text=True)
    assert "'(' was never closed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def test_what_only_a_server_needs_is_not_imported_with_jupytext():
    code = "import sys; from pallas_puzzles.app import formats; print(*formats.NOT_NEEDED & sys.modules.keys())\n"
    code += "import jupyter_server, jupytext; print(formats.jupytext is jupytext)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "True"]


def test_the_newer_of_a_pair_is_checked(place, puzzles):
    puzzles("init")
    paired = place / "workspace" / "demo.ipynb"
    answer = "o_ref[...] = x_ref[...] + 1.0"
    paired.write_text(paired.read_text().replace("pass  # YOUR CODE HERE", answer))
    later_s = time.time() + 10
    os.utime(paired, (later_s, later_s))
    code, out, _ = puzzles("check", "demo/1")
    assert code == 0
    assert str(paired) in out


def test_check_a_whole_notebook(place, puzzles):
    puzzles("init")
    (place / "workspace" / "demo.py").write_text(solved())
    code, out, _ = puzzles("check", "demo")
    lines = out.splitlines()
    assert code == 1
    assert len(lines) == 3
    assert re.match(r"demo/1 +solved", lines[1])
    assert re.match(r"demo/2a +not solved yet", lines[2])


def test_check_with_a_file_records_nothing(place, puzzles):
    answer = place / "answer.py"
    answer.write_text(ADD_ONE)
    code, out, _ = puzzles("check", "demo/1", "--with", answer)
    assert code == 0
    assert str(answer) in out
    answer.write_text(ADD_ONE.replace("1.0", "1.5"))
    assert puzzles("check", "demo/1", "--with", answer)[0] == 1
    assert recorded(place) == {}


def test_everything_solved(place, puzzles):
    (place.parent / "home").mkdir()
    entries = {each: {"solved": "2026-01-31T12:00:00Z"} for each in ("demo/1", "demo/2a", "a_second/1")}
    (place.parent / "home" / "progress.json").write_text(json.dumps({"version": 1, "puzzles": entries}))
    assert puzzles("check") == (0, "every puzzle is solved\n", "")
    assert json.loads(puzzles("check", "--json")[1]) == {"version": 1, "source": None, "verdicts": []}


def test_json(place, puzzles):
    answer = place / "answer.py"
    answer.write_text(f"print('said at the top')\n\n\n{ADD_ONE}".replace("1.0", "1.5"))
    code, out, _ = puzzles("check", "demo/1", "--with", answer, "--json")
    said = json.loads(out)
    assert code == 1
    assert sorted(said) == ["source", "verdicts", "version"]
    assert said["source"] == str(answer)
    (verdict,) = said["verdicts"]
    assert {"puzzle", "status", "headline", "findings", "figures", "notes", "next"} <= verdict.keys()
    assert (verdict["puzzle"], verdict["status"]) == ("demo/1", "failed")
    assert {"kind", "cause", "evidence", "line", "step", "at", "operand", "block"} <= verdict["findings"][0].keys()


@pytest.mark.parametrize(
    "words",
    [
        ["check", "demo/7"],
        ["check", "nonsense"],
        ["check", "demo/1", "--with", "missing.py"],
        ["check", "--no-such-option"],
        ["no-such-command"],
        ["hint", "demo/7"],
        ["solution", "demo/1"],  # it asks, and here is nobody to answer
        ["hint", "demo/2a"],  # locked
        ["start", "demo/2a"],
        ["start", "nonsense"],
        ["watch"],
        ["show", "demo/1", "--with", "missing.py"],
        ["reset", "demo/1"],
        ["tpu"],
        ["tpu", "demo/7"],
        ["tpu", "demo/1", "--tpu", "v9"],
        ["tpu", "demo/1", "--with", "missing.py"],
        ["gpu"],
        ["gpu", "demo/1", "--gpu", "a100"],
    ],
)
def test_wrong_use(puzzles, words):
    code, out, err = puzzles(*words)
    assert code == 2
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_wrong_use_in_json(puzzles):
    code, out, _ = puzzles("check", "demo/7", "--json")
    assert code == 2
    assert "demo/1" in json.loads(out)["error"]


def test_exit_codes_and_streams_of_the_real_command(place):
    (place / "right.py").write_text(ADD_ONE.replace("    o_ref", "    print('from the kernel')\n    o_ref"))
    right = as_subprocess("check", "demo/1", "--with", "right.py", "--json")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["verdicts"][0]["status"] == "passed", "JSON and nothing else"
    assert "from the kernel" in right.stderr
    (place / "wrong.py").write_text("def add_one_kernel(x_ref):\n    pass\n")
    wrong = as_subprocess("check", "demo/1", "--with", "wrong.py")
    assert wrong.returncode == 2
    assert wrong.stdout.count("\n") <= 1
    assert len(wrong.stderr.splitlines()) == 1
    assert "add_one_kernel(x_ref, o_ref)" in wrong.stderr


# ---- the map, the list, hints, JupyterLab ----------------------------------------------------------------------------


def test_the_map(place, puzzles):
    code, out, _ = puzzles()
    assert code == 0
    for part in ("demo", "0/2", "A small demonstration", "next: demo/1  Add one", "puzzles init"):
        assert part in out


def test_list(puzzles):
    code, out, _ = puzzles("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["demo/1", "demo/2a", "a_second/1"]
    said = json.loads(puzzles("list", "--json")[1])
    assert said["version"] == 1
    assert said["puzzles"][1] == {
        "id": "demo/2a",
        "notebook": "demo",
        "number": "2a",
        "title": "Add two, block by block",
        "goal": "Add two to every element.",
        "holes": ["x_map", "add_two_kernel"],
        "hints": 1,
        "hints_seen": 0,
        "attempts": 0,
        "solved": None,
        "locked": True,
    }


def test_list_needs_no_jax():
    code = (
        "import sys; from pallas_puzzles.app import cli\ntry: cli.main(['list'])\nfinally: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_hint(place, puzzles):
    assert "hint 1 of 3" in puzzles("hint", "demo/1")[1]
    assert "hint 2 of 3" in puzzles("hint", "demo/1")[1]
    assert puzzles("hint", "demo/1")[1] == (
        "You have seen every hint of demo/1. `puzzles solution demo/1` shows the solution.\n"
    )
    assert recorded(place)["demo/1"]["hints"] == 2


COMMANDS = [name for name, each in cli.app.commands.items() if not each.hidden]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_has_an_example(puzzles, command):
    code, out, _ = puzzles(command, "--help")
    assert code == 0
    assert f"Example: puzzles {command}" in out
    assert len(out.splitlines()) <= 24


def test_help_fits_on_a_screen(puzzles, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = puzzles("--help")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "Example: puzzles init" in out
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", out, re.MULTILINE), command


def test_completion(puzzles, monkeypatch):
    def complete(line: str) -> list[str]:
        """What a shell would offer after `line`, as bash asks for it."""
        words = line.split(" ")
        asked = {"_PUZZLES_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        return [each.removeprefix("plain,") for each in puzzles()[1].split()]

    assert complete("puzzles sol") == ["solution"]
    assert complete("puzzles check dem") == ["demo", "demo/1", "demo/2a"]
    assert complete("puzzles hint demo/2") == ["demo/2a"]
    assert complete("puzzles tpu demo/1 --tpu v") == ["v5e", "v6e"]
    assert complete("puzzles gpu demo/1 --gpu h") == ["h100", "h200"]


def test_lab_opens_the_notebook_with_the_next_puzzle(place, puzzles, monkeypatch):
    def become(command, variables):
        started.append(command)
        raise SystemExit(0)

    started: list[list[str]] = []
    monkeypatch.setattr(lab, "_become", become)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    code, out, err = puzzles("lab", "--port", "8899", "--no-browser", "--", "--ServerApp.token=abc", "-y")
    assert code == 0, err
    (command,) = started
    assert command[1:3] == ["-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={place / 'workspace'}" in command
    assert "--LabApp.default_url=/lab/tree/demo.ipynb" in command
    assert command[-5:] == ["--port", "8899", "--no-browser", "--ServerApp.token=abc", "-y"]
    assert "added" in out, "the workspace is made when there is none"
    (place / "workspace" / "demo.py").write_text(solved())
    puzzles("lab")
    assert "pass  # YOUR CODE HERE" not in (place / "workspace" / "demo.ipynb").read_text(), "it opens up to date"
    assert "--allow-root" not in started[-1]
    assert "You are root" not in out


def test_lab_as_root_says_so_in_one_line(place, puzzles, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(lab, "_become", lambda command, variables: started.append(command) or sys.exit(0))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    out = puzzles("lab")[1]
    assert "--allow-root" in started[-1]
    assert len([line for line in out.splitlines() if "--allow-root" in line]) == 1


def test_lab_without_jupyterlab(puzzles, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = puzzles("lab")
    assert code == 2
    assert err.count("\n") == 1
    assert "uv run puzzles lab" in err
    assert "pip install jupyterlab" in err
    assert "pallas-puzzles[lab]" not in err, "no index has that package"


# ---- start, hints, solutions, locks ----------------------------------------------------------------------------------


def test_start_tells_what_to_do_and_where(place, puzzles):
    assert "`puzzles init` makes the file to edit" in puzzles("start", "demo/1")[1]
    puzzles("init")
    code, out, _ = puzzles("start")
    assert code == 0
    for part in ("## Puzzle 1: Add one", "**Goal.** Add one", "A kernel reads and writes refs."):
        assert part in out
    assert "YOUR CODE" not in out
    assert "Goal of demo/1: Add one to every element of `x`." in out.splitlines()[-5:], "where it stays in sight"
    path, line = re.search(r"edit: (.+):(\d+)$", out, re.MULTILINE).groups()
    assert Path(path).read_text().splitlines()[int(line) - 1] == "def add_one_kernel(x_ref, o_ref):"
    told = json.loads(puzzles("start", "demo/1", "--json")[1])
    assert (told["id"], told["file"], told["line"]) == ("demo/1", path, int(line))
    assert "**Goal.** Add one" in told["text"]


def test_puzzles_open_in_order(place, puzzles):
    puzzles("init")
    for command in ("start", "hint", "solution", "check", "watch"):
        code, _, err = puzzles(command, "demo/2a")
        assert code == 2, command
        assert "demo/2a opens when demo/1 is solved; --any opens it now" in err
    assert puzzles("start", "a_second/1")[0] == 0, "the first puzzle of a notebook is open"
    assert puzzles("start", "demo/2a", "--any")[0] == 0
    assert puzzles("start", "demo/2a")[0] == 0, "and it stays open"
    assert not json.loads(puzzles("list", "--json")[1])["puzzles"][1]["locked"]


def test_a_solved_puzzle_opens_the_next(place, puzzles):
    puzzles("init")
    (place / "workspace" / "demo.py").write_text(solved())
    assert puzzles("check", "demo/1")[0] == 0
    assert puzzles("start", "demo/2a")[0] == 0


def test_what_was_tried_in_a_notebook_is_open(place, puzzles):
    store = importlib.import_module("pallas_puzzles.course.progress")
    store.record("demo/2a", False)
    assert puzzles("hint", "demo/2a")[0] == 0


def test_hints_once_more(place, puzzles):
    assert puzzles("hint", "demo/1", "--seen")[1] == "You have seen no hint of demo/1.\n"
    assert "What does `x_ref[...]` give?" in puzzles("hint", "demo/1")[1]
    assert "hint 2 of 3" in puzzles("hint")[1], "by default the next puzzle"
    shown = puzzles("hint", "demo/1", "--seen")[1]
    assert shown.index("hint 1 of 3") < shown.index("hint 2 of 3")
    assert "hint 3" not in shown
    assert recorded(place)["demo/1"]["hints"] == 2, "to look again costs nothing"
    assert re.search(r"1 +next +\?\? +Add one", puzzles()[1])


def test_the_hints_are_those_of_the_notebook(place, puzzles, capsys):
    from pallas_puzzles import hint

    hint("demo/1")
    first = capsys.readouterr().out
    assert "hint 1 of 3" in first
    assert puzzles("hint", "demo/1", "--seen")[1].strip() == first.strip(), "one source, one count"


def test_the_solution_asks_until_the_hints_are_used_up(place, puzzles):
    code, out, err = puzzles("solution", "demo/1")
    assert code == 2
    assert "x_ref" not in out
    assert "2 hints would come first" in err
    assert "pass --yes" in err
    assert recorded(place) == {}
    puzzles("hint", "demo/1")
    assert "1 hint would come first" in puzzles("solution", "demo/1")[2]
    puzzles("hint", "demo/1")
    code, out, _ = puzzles("solution", "demo/1")
    assert code == 0
    assert "o_ref[...] = x_ref[...] + 1.0" in out
    assert recorded(place)["demo/1"]["hints"] == 3


def test_the_solution_of_a_solved_puzzle(place, puzzles):
    store = importlib.import_module("pallas_puzzles.course.progress")
    store.record("demo/1", True)
    assert puzzles("solution", "demo/1")[1].endswith("x_ref[...] + 1.0\n```\n")
    assert recorded(place)["demo/1"]["hints"] == 0


def test_the_solution_all_the_same(place, puzzles):
    assert puzzles("solution", "demo/1", "--yes")[0] == 0
    assert recorded(place)["demo/1"]["hints"] == 3, "it counts as every hint"


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show(place, puzzles, monkeypatch):
    puzzles("init")
    code, out, _ = puzzles("show", "demo/1")
    assert code == 1
    assert "not solved yet" in out
    (place / "workspace" / "demo.py").write_text(solved())
    code, out, _ = puzzles("show", "demo/1")
    assert code == 0
    assert "add_one_kernel" in out
    for opened in (True, False):
        monkeypatch.setattr("webbrowser.open", lambda address, opened=opened: opened)
        code, out, err = puzzles("show", "demo/1", "--browser")
        assert code == 0
        assert "<img" in Path(out.strip()).read_text("utf-8")
        assert ("there is no browser here" in err) is not opened
    assert recorded(place) == {}, "looking is no attempt"


# ---- finishing -------------------------------------------------------------------------------------------------------


def test_finishing_a_notebook_and_everything(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    mine.write_text(solved())
    assert "finished" not in puzzles("check", "demo/1")[1]
    mine.write_text(solved().replace(HOLES_OF_TWO, f"{ADD_TWO}\n\n"))
    code, out, _ = puzzles("check", "demo/2a")
    assert code == 0
    assert "You have finished demo: 2 puzzles, 2 attempts, 0 hints." in out
    assert "Two additions." in out, "what the notebook says was built"
    assert re.search(r"1 +Add one +8 KiB +1× +1 +8 KiB", out)
    assert re.search(r"2a +Add two, block by block +24 KiB +1× +3", out)
    assert "Next notebook: a_second. Another one. It begins with a_second/1 Nothing much." in out
    assert "finished" not in puzzles("check", "demo/2a")[1], "once is enough"
    assert "You have finished demo" in puzzles("check", "demo")[1], "and when asked for all of it"
    store = importlib.import_module("pallas_puzzles.course.progress")
    finale = importlib.import_module("pallas_puzzles.course.finale").finale
    assert finale("a_second/1") is None
    store.record("a_second/1", True)
    moment = str(finale("a_second/1"))
    assert re.search(r"demo +\[#\]\[#\]\n", moment)
    assert "3 puzzles" in moment
    assert "32 KiB" in moment, "all that the reader's kernels have moved"
    assert "every puzzle is solved" in puzzles()[1]
    page = finale("demo/1")._repr_html_()
    assert "<td>24 KiB</td>" in page


def test_a_notebook_that_is_finished_in_jupyter(place, capsys):
    from pallas_puzzles import check

    store = importlib.import_module("pallas_puzzles.course.progress")
    store.record("demo/2a", True)
    names: dict = {"check": check}
    code = solved().partition("# %%\ncheck(")[0]
    exec(compile(code, "demo.py", "exec"), names)
    capsys.readouterr()
    check("demo/1", names["add_one"], names["add_one_spec"], normal((8, 128)))
    out = capsys.readouterr().out
    assert out.index("demo/1 Add one: solved") < out.index("You have finished demo")


# ---- back to the start -----------------------------------------------------------------------------------------------


def test_reset_a_puzzle(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    unsolved, text = mine.read_text(), solved(mine.read_text()).replace("Two additions.", "Two of mine.")
    mine.write_bytes(text.replace("\n", "\r\n").encode())
    puzzles("check", "demo/1")
    puzzles("hint", "demo/1")
    before = files(place / "workspace")
    code, out, err = puzzles("reset", "demo/1")
    assert code == 2
    assert re.search(r"demo/1: 1 line of yours, solved on 20\S+, 1 attempt, 1 hint", out), out
    assert "pass --yes" in err
    assert files(place / "workspace") == before
    code, out, _ = puzzles("reset", "demo/1", "--yes")
    assert code == 0
    (kept,) = (place / "workspace").glob("demo.old-*.py")
    assert kept.name in out
    assert kept.read_bytes() == before["demo.py"]
    expected = unsolved.replace("Two additions.", "Two of mine.")
    assert mine.read_bytes() == expected.replace("\n", "\r\n").encode(), "one puzzle, in the reader's line endings"
    assert "pass  # YOUR CODE HERE" in (place / "workspace" / "demo.ipynb").read_text()
    assert recorded(place) == {}
    assert "nothing of yours" in puzzles("reset", "demo/1", "--yes")[1]


def test_reset_a_notebook_and_everything(place, puzzles):
    puzzles("init")
    folder = place / "workspace"
    fresh = files(folder)
    (folder / "demo.py").write_text(solved())
    (folder / "a_second.ipynb").unlink()
    puzzles("check", "demo/1")
    before = files(folder)
    assert puzzles("reset", "demo", "--yes")[0] == 0
    after = files(folder)
    assert {name: after[name] for name in ("demo.py", "demo.ipynb")} == {
        name: fresh[name] for name in ("demo.py", "demo.ipynb")
    }
    assert after["a_second.py"] == before["a_second.py"]
    assert before["demo.py"] in [text for name, text in after.items() if ".old-" in name]
    assert recorded(place) == {}
    assert puzzles("reset", "--yes")[0] == 0
    assert files(folder)["a_second.ipynb"] == fresh["a_second.ipynb"]
    assert len([name for name in files(folder) if ".old-" in name]) == 2 + 2 + 1


def test_reset_refuses_a_conflict(place, puzzles):
    puzzles("init")
    folder = place / "workspace"
    for name, text in (("demo.py", "mine"), ("demo.ipynb", "also mine")):
        (folder / name).write_text((folder / name).read_text().replace("Two additions.", text))
    before = files(folder)
    code, _, err = puzzles("reset", "demo/1", "--yes")
    assert code == 2
    assert "have both changed" in err
    assert files(folder) == before
    code, _, err = puzzles("check", "demo/1")
    assert "have both changed" in err, "a check goes on, with the newer one"
    assert code == 1


# ---- an upgrade, and who else is there -------------------------------------------------------------------------------


def test_init_after_an_upgrade(place, puzzles):
    puzzles("init")
    (place / "workspace" / "demo.py").write_text(solved())
    course = place.parent / "course" / "puzzles"
    (course / "demo.py").write_text(demo_course.DEMO.replace("Add two to every", "Add exactly two to every"))
    (course / "third.py").write_text(demo_course.OTHER.replace("other/1", "third/1").replace("order: 2", "order: 3"))
    before = files(place / "workspace")
    code, out, _ = puzzles("init")
    assert code == 0
    assert "third.py, third.ipynb" in out
    assert "demo differs from the current course in Puzzle 2a (an older version, or your edits)" in out
    assert "a_second differs" not in out
    assert {name: files(place / "workspace")[name] for name in before} == before
    assert "demo differs" in puzzles("init")[1], "until something is done about it"
    puzzles("reset", "demo/2a", "--yes")
    assert "Add exactly two" in (place / "workspace" / "demo.py").read_text()
    assert "x_ref[...] + 1.0\n\n\ndef add_one(" in (place / "workspace" / "demo.py").read_text(), "only that puzzle"
    assert "differs" not in puzzles("init")[1]


def test_init_lays_the_tutor_and_keeps_another(place, puzzles):
    course = place.parent / "course" / ".claude" / "commands"
    course.mkdir(parents=True)
    (course / "tutor.md").write_text("ours")
    (course / "other.md").write_text("ours, too")
    theirs = place / "workspace" / ".claude" / "commands" / "tutor.md"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    code, out, _ = puzzles("init")
    assert code == 0
    assert theirs.read_text() == "theirs"
    assert (theirs.parent / "other.md").read_text() == "ours, too"
    assert "/tutor" in out


def test_the_courses_own_tutor_is_laid(place, puzzles, monkeypatch):
    monkeypatch.delenv("PALLAS_PUZZLES_COURSE")
    puzzles("init", "mine")
    for name in ("commands/tutor.md", "skills/pallas-tutor/SKILL.md", "skills/pallas-tutor/mistakes/basics.md"):
        assert (place / "mine" / ".claude" / name).is_file(), name


def test_two_commands_at_once(place):
    """Both check, and both keep the pair in step: nothing is lost, nothing is counted twice."""
    as_subprocess("init")
    mine = place / "workspace" / "demo.py"
    mine.write_text(solved())
    command = [sys.executable, "-m", "pallas_puzzles", "check", "demo/1"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=180) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert all("solved" in out and "Traceback" not in err for out, err in said)
    assert recorded(place)["demo/1"]["attempts"] == 2
    assert mine.read_text() == solved()
    assert "x_ref[...] + 1.0" in jupytext.writes(jupytext.read(mine.with_suffix(".ipynb")), fmt="py:percent")


def test_a_folder_that_can_only_be_read(place, monkeypatch):
    """Checked all the same; what cannot be kept is said on stderr, and the JSON stays JSON."""
    as_subprocess("init")
    folder, home = place / "workspace", place.parent / "home"
    (folder / "demo.py").write_text(solved())
    for lock in (folder / ".pallas-puzzles.lock", home / "progress.lock"):
        lock.unlink(missing_ok=True)
        lock.mkdir(parents=True)  # root may write anywhere, so chmod alone would prove nothing
    done = as_subprocess("check", "demo/1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdicts"][0]["status"] == "passed"
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    done = as_subprocess("reset", "demo/1", "--yes")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_no_home(place, monkeypatch):
    as_subprocess("init", place / "mine")
    (place / "mine").rename(place / "workspace")
    for name in ("PALLAS_PUZZLES_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")  # where nobody can make a folder
    done = as_subprocess("check", "demo/1")
    assert done.returncode == 1, done.stderr
    assert "not solved yet" in done.stdout
    assert "PALLAS_PUZZLES_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_windows_line_endings(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    mine.write_bytes(solved().replace("\n", "\r\n").encode())
    before = mine.read_bytes()
    assert puzzles("check", "demo/1")[0] == 0
    assert mine.read_bytes() == before


def test_what_is_piped_has_no_colours(place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for words in ([], ["list"], ["hint", "demo/1"], ["start", "demo/1"]):
        done = as_subprocess(*words)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout, words
    assert max(map(len, as_subprocess().stdout.splitlines()[:3])) <= 40, "the map fits"


# ---- the TPU compiler ------------------------------------------------------------------------------------------------


@needs_compiler
def test_tpu_compiles_the_readers_kernel_for_each_chip(place, puzzles):
    puzzles("init")
    mine = place / "workspace" / "demo.py"
    mine.write_text(solved())
    code, out, _ = puzzles("tpu", "demo/1", "--tpu", "v5e,v6e")
    assert code == 0
    assert str(mine) in out
    assert "v5e" in out
    assert "v6e" in out
    assert "add_one_kernel" in out
    assert recorded(place) == {}, "compiling is no attempt"


@needs_compiler
def test_tpu_says_why_a_kernel_does_not_compile(place, puzzles):
    answer = place / "answer.py"
    answer.write_text(ADD_ONE.replace("x_ref[...] + 1.0", "jnp.sort(x_ref[...]) + 1.0"))
    code, out, _ = puzzles("tpu", "demo/1", "--with", answer)
    assert code == 1
    assert "sort" in out
    assert "jnp.sort(x_ref[...])" in out, "the reader's own line"


def test_tpu_of_what_is_not_written_yet(place, puzzles):
    puzzles("init")
    code, out, _ = puzzles("tpu", "demo/1")
    assert code == 1
    assert "not solved yet" in out


def test_gpu_says_that_a_kernel_is_for_tpus(place, puzzles):
    answer = place / "answer.py"
    answer.write_text(ADD_ONE)
    code, out, _ = puzzles("gpu", "demo/1", "--with", answer)
    assert code == 1
    assert "plgpu.kernel" in out


def test_tpu_without_the_compiler_is_one_line(place, puzzles, monkeypatch):
    (place / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'libtpu' else find(name, *more)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(place))
    answer = place / "answer.py"
    answer.write_text(ADD_ONE)
    code, out, _ = puzzles("tpu", "demo/1", "--tpu", "v5e,v6e", "--with", answer)
    assert code == 2
    assert " ".join(out.split()).count("--extra tpu-compiler") == 1
