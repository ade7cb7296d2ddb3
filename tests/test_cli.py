"""The `puzzles` command: exit codes, JSON, workspaces that lose nothing, and whose file it was that was checked."""

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
from demo_course import ADD_ONE, solved
from pallas_puzzles import cli, workspace
from pallas_puzzles.tpu.compiler import HOW_TO_GET_IT
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


@pytest.fixture
def puzzles(capsys):
    """Runs the command in this process: exit code, stdout, stderr."""

    def command(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return command


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


def test_inside_a_checkout_the_workspace_is_its_own(place, monkeypatch):
    below = place / "checkout" / "src" / "pallas_puzzles"
    below.mkdir(parents=True)
    (below / "curriculum.py").touch()
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
    mine.write_text(solved())
    code, out, _ = puzzles("check", "demo/1")
    assert code == 0
    assert "solved" in out
    assert recorded(place)["demo/1"]["attempts"] == 2
    assert recorded(place)["demo/1"]["solved"]
    assert "demo/2a" in puzzles("check")[1]


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
    code = "import sys; from pallas_puzzles import cli\ntry: cli.main(['list'])\nfinally: print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_hint(place, puzzles):
    assert "hint 1 of 3" in puzzles("hint", "demo/1")[1]
    assert "hint 2 of 3" in puzzles("hint", "demo/1")[1]
    assert recorded(place)["demo/1"]["hints"] == 2


COMMANDS = [each.name or each.callback.__name__ for each in cli.app.registered_commands]


def test_every_command_that_the_design_lists_is_there():
    assert sorted(COMMANDS) == sorted("init lab start check watch hint solution show tpu reset list".split())


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


def complete(line: str) -> list[str]:
    """What a shell would offer after `line`, as bash asks for it."""
    words = line.split(" ")
    asked = {"_PUZZLES_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-m", "pallas_puzzles"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def test_completion(place):
    assert complete("puzzles sol") == ["solution"]
    assert complete("puzzles check dem") == ["demo", "demo/1", "demo/2a"]
    assert complete("puzzles hint demo/2") == ["demo/2a"]
    assert complete("puzzles tpu demo/1 --tpu v") == ["v5e", "v6e"]


def test_lab_opens_the_notebook_with_the_next_puzzle(place, puzzles, monkeypatch):
    def become(command):
        started.append(command)
        raise SystemExit(0)

    started: list[list[str]] = []
    monkeypatch.setattr(cli, "_become", become)
    code, out, err = puzzles("lab", "--port", "8899", "--no-browser", "--", "--ServerApp.token=abc", "-y")
    assert code == 0, err
    (command,) = started
    assert command[1:3] == ["-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={place / 'workspace'}" in command
    assert "--LabApp.default_url=/lab/tree/demo.ipynb" in command
    assert command[-4:] == ["--ServerApp.port=8899", "--no-browser", "--ServerApp.token=abc", "-y"]
    assert "added" in out, "the workspace is made when there is none"
    puzzles("lab", "--dir", "other")
    assert f"--ServerApp.root_dir={place / 'other'}" in started[-1]


def test_lab_without_jupyterlab(puzzles, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = puzzles("lab")
    assert code == 2
    assert err.count("\n") == 1
    assert 'pip install "pallas-puzzles[lab]"' in err


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
def test_tpu_in_json(place, puzzles):
    answer = place / "answer.py"
    answer.write_text(ADD_ONE)
    code, out, _ = puzzles("tpu", "demo/1", "--tpu", "v5e,tpu7x", "--with", answer, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["version"] == 1
    assert told["source"] == str(answer)
    assert [(each["tpu"], each["compiles"]) for each in told["reports"]] == [("v5e", True), ("tpu7x", True)]
    (kernel,) = told["reports"][0]["kernels"]
    assert kernel["name"] == "add_one_kernel"
    assert kernel["hbm_bytes"] == 2 * 8 * 128 * 4


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


def test_tpu_without_the_compiler_is_one_line(place, puzzles, monkeypatch):
    monkeypatch.setattr("pallas_puzzles.tpu.compiler.missing", lambda: HOW_TO_GET_IT)
    answer = place / "answer.py"
    answer.write_text(ADD_ONE)
    code, out, _ = puzzles("tpu", "demo/1", "--tpu", "v5e,v6e", "--with", answer)
    assert code == 2
    assert out.count("pallas-puzzles[tpu-compiler]") == 1
