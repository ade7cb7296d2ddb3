"""The process that runs a reader's file: what it may do to itself, and that nothing of that is ever a pass."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import demo_course
from demo_course import ADD_ONE, solved
from pallas_puzzles import check, normal
from pallas_puzzles.app import cli, worker
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.course.curriculum import CurriculumError

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process waits to be forked")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A workspace to stand in, with a course and a home of its own."""
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    cli.workspace.init(tmp_path / "mine")
    return tmp_path


def solved_ones(place: Path) -> list[str]:
    file = place / "home" / "progress.json"
    entries = json.loads(file.read_text())["puzzles"] if file.exists() else {}
    return [name for name, entry in entries.items() if entry["solved"]]


def squeezed(text: str) -> str:
    return " ".join(text.split())


def after_setup(code: str) -> str:
    return solved().replace("setup()\n", f"setup()\n{code}\n", 1)


SPOILED = {
    "leaves": ("import os\nos._exit(0)", "Your code ended the whole process (exit code 0), as os._exit does"),
    "kills": ("import os\nos.kill(os.getpid(), 9)", "was killed (SIGKILL) and gave no verdict"),
    "patches": (
        "import sys\nsys.modules['pallas_puzzles.course.judge'].judge_cases = lambda *a, **k: None",
        "Your file changes the checker (pallas_puzzles.course.judge.judge_cases): there is no verdict",
    ),
    "shadows": (
        "import sys\nsys.modules['pallas_puzzles.course.check'].all = lambda x: True",
        "Your file changes the checker (pallas_puzzles.course.check.all)",
    ),
    "new code": (
        "import sys\nsys.modules['pallas_puzzles.course.holes'].untouched.__code__ = (lambda a, b: []).__code__",
        "Your file changes the checker (pallas_puzzles.course.holes.untouched)",
    ),
    "true": (
        "from pallas_puzzles.view.verdict import Verdict\nVerdict.__bool__ = lambda self: True",
        "Your file changes the checker (pallas_puzzles.view.verdict.Verdict.__bool__)",
    ),
    "numpy": ("import numpy\nnumpy.asarray = print", "changes what the checker stands on (numpy.asarray)"),
    "json": ("import json\njson.dumps = print", "changes what the checker stands on (json.dumps)"),
    "records": (
        "import importlib\nimportlib.import_module('pallas_puzzles.course.progress').record('demo/1', True)",
        "Your file writes to the record of what is solved",
    ),
    "writes": (
        "import contextlib, os\nwith contextlib.suppress(OSError):\n"
        "    open(os.environ['PALLAS_PUZZLES_HOME'] + '/progress.json', 'w')",
        "Your file writes to the record of what is solved",
    ),
}


@pytest.mark.parametrize("code", SPOILED)
def test_no_verdict_is_not_a_pass(place, puzzles, code):
    (place / "mine" / "demo.py").write_text(after_setup(SPOILED[code][0]))
    exit_code, out, err = puzzles("check", "demo/1")
    assert exit_code == 1
    assert "demo/1 Add one: no verdict." in out
    assert SPOILED[code][1] in squeezed(out)
    assert "solved." not in out
    assert "Traceback" not in out + err
    assert solved_ones(place) == []


def test_a_check_that_is_not_ours(place, puzzles):
    text = solved().replace('check("demo/1"', 'check = lambda *a: True\ncheck("demo/1"')
    (place / "mine" / "demo.py").write_text(text.replace("x_ref[...] + 1.0", "x_ref[...] + 3.0", 1))
    code, out, _ = puzzles("check", "demo/1")
    assert code == 1
    assert "off by the constant +2" in out
    assert "demo.py is not that of pallas_puzzles. This verdict is that of the course's own check." in squeezed(out)
    assert solved_ones(place) == []


def test_no_verdict_in_json(place, puzzles):
    (place / "mine" / "demo.py").write_text(after_setup("import os\nos._exit(0)"))
    code, out, _ = puzzles("check", "demo/1", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert code == 1
    assert verdict["passed"] is False
    assert verdict["status"] == "error"
    with collecting():
        real = check("own", lambda x: x + 1, lambda x: x, normal((8,)), kernel=False).to_json()
    assert verdict.keys() == real.keys()
    assert verdict["findings"][0].keys() == real["findings"][0].keys()


def test_the_next_puzzle_of_a_notebook_gets_a_process_of_its_own(place, puzzles):
    """Puzzle 2a is run with what Puzzle 1 has left behind: nothing."""
    text = after_setup("import os\nif 'LEFT' not in os.environ:\n    os.environ['LEFT'] = 'here'\n    os._exit(3)")
    (place / "mine" / "demo.py").write_text(text)
    code, out, _ = puzzles("check", "demo")
    assert code == 1
    assert out.count("Your code ended the whole process (exit code 3)") == 2


def test_what_a_check_leaves_behind_is_gone(place, puzzles):
    mine = place / "mine" / "demo.py"
    mine.write_text(after_setup("import jax.numpy as again, sys\nagain.zeros_like = None\nsys.modules['left'] = sys"))
    assert puzzles("check", "demo/1")[0] == 1
    mine.write_text(after_setup("import sys\nassert 'left' not in sys.modules and jnp.zeros_like"))
    code, out, _ = puzzles("check", "demo/1")
    assert code == 0, out
    assert solved_ones(place) == ["demo/1"]


def test_printed_output_is_capped(place, puzzles):
    loop = "for n in range(100_000):\n    print('line', n)"
    (place / "mine" / "demo.py").write_text(solved().replace("def add_one_spec(", f"{loop}\n\n\ndef add_one_spec(", 1))
    code, out, _ = puzzles("check", "demo/1")
    assert code == 0
    assert len(out) < 10_000
    assert out.index("solved.") < out.index("printed by your code:") < out.index("line 99999")
    assert "(the end of 1,088,890 characters)" in out
    assert len(out.splitlines()) < 40, "the verdict stays on the screen"


def test_a_traceback_is_asked_for_in_the_command(place, puzzles):
    (place / "mine" / "demo.py").write_text(after_setup("1 / 0"))
    code, out, _ = puzzles("check", "demo/1")
    assert code == 1
    assert "The full traceback: `puzzles check demo/1 --traceback`" in out
    assert "verdict.traceback" not in out
    assert "Traceback (most recent call last)" not in out
    code, out, _ = puzzles("check", "demo/1", "--traceback")
    assert code == 1
    assert "Traceback (most recent call last)" in out
    assert "ZeroDivisionError: division by zero" in out.splitlines()[-1]


def test_leaving_the_program(place, puzzles):
    kernel = solved().replace("    o_ref[...] = x", "    import sys\n    sys.exit(0)\n    o_ref[...] = x", 1)
    (place / "mine" / "demo.py").write_text(kernel)
    code, out, _ = puzzles("check", "demo/1")
    words = squeezed(out)
    line = kernel.splitlines().index("    sys.exit(0)") + 1
    assert code == 1
    assert "Your code ends the check of demo/1, which had begun." in words
    assert words.count(f"demo.py:{line}") == 1
    assert "as sys.exit(0) does." in words
    assert "before the check" not in words
    (place / "mine" / "demo.py").write_text(after_setup("import sys\nsys.exit('enough')"))
    words = squeezed(puzzles("check", "demo/1")[1])
    assert "as sys.exit('enough') does" in words
    assert "before the check of demo/1" in words


def test_a_syntax_error_is_found_before_anything_runs(place, puzzles):
    text = after_setup("print('it has run')").replace("x_ref[...] + 1.0\n", "x_ref[...] + (1.0\n", 1)
    (place / "mine" / "demo.py").write_text(text)
    code, out, _ = puzzles("check", "demo/1")
    assert code == 1
    assert "Python cannot read this line: '(' was never closed" in out
    assert "it has run" not in out


@pytest.mark.parametrize("command", [["show", "demo/1"], ["tpu", "demo/1"]])
def test_the_other_commands_do_not_pass_either(place, puzzles, command):
    (place / "mine" / "demo.py").write_text(after_setup("import os\nos._exit(0)"))
    code, out, _ = puzzles(*command)
    assert code == 1
    assert "Your code ended the whole process" in out


# ---- where the process comes from ------------------------------------------------------------------------------------


def ask(place: Path) -> dict:
    (place / "answer.py").write_text(ADD_ONE)
    with worker.Judge() as judge:
        return judge.answer("check", "demo/1", place / "answer.py", place / "answer.py")


@linux
def test_a_process_waits_and_is_used_again(place, monkeypatch):
    assert ask(place)["verdict"]["passed"]
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a))
    assert ask(place)["verdict"]["passed"]
    assert started == []


@linux
def test_another_environment_gets_another(monkeypatch):
    before = worker._address()
    assert worker._address() == before
    assert before.parent.stat().st_mode & 0o077 == 0, "nobody else may connect"
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert worker._address() != before
    monkeypatch.delenv("JAX_ENABLE_X64")
    monkeypatch.setenv("EDITOR", "ed")
    assert worker._address() == before


def test_without_one_that_waits(place, monkeypatch):
    """Where no socket can be had, and where the one that waited has gone."""
    monkeypatch.setattr(worker, "_address", lambda: place / "no such folder" / "socket")
    assert ask(place)["verdict"]["passed"]


@linux
def test_a_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"pallas-puzzles-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert worker._address() is None


@linux
def test_the_one_that_waits_leaves_when_its_socket_is_gone(place, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "0")  # one of this test's own
    assert ask(place)["verdict"]["passed"]
    address = str(worker._address())
    running = [each for each in Path("/proc").glob("[0-9]*/cmdline") if address in _text(each)]
    assert running
    Path(address).unlink()
    deadline = time.monotonic() + 60
    while any(address in _text(each) for each in running) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(address in _text(each) for each in running)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_wrong_questions_are_no_verdicts(place):
    with worker.Judge() as judge, pytest.raises(CurriculumError, match="there is no puzzle 'demo/9'"):
        judge.answer("check", "demo/9", place / "mine" / "demo.py")


def test_a_worker_that_is_killed_takes_another_process(place):
    said = []
    one = worker.Worker(said.append)
    one.ask(worker.request(1, "check", "demo/1", place / "mine" / "demo.py"))
    one.kill()
    one.ask(worker.request(2, "check", "demo/1", place / "mine" / "demo.py"))
    deadline = time.monotonic() + 120
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    one.kill()
    assert [each["id"] for each in said] == [2]
    assert said[0]["verdict"]["status"] == "unsolved"


def test_how_a_process_ended_is_said():
    assert "(SIGSEGV)" in worker._ending(-signal.SIGSEGV, "")
    assert worker._ending(1, "out of paper").endswith("Its last words: out of paper")
    assert "Check again" in worker._ending(None, "")
