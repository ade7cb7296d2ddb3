"""`puzzles watch`, the real command in a real terminal: a verdict at every save, and no save that kills it."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import demo_course
from demo_course import ADD_TWO, HOLES_OF_TWO, solved
from pallas_puzzles.app import watch, workspace
from pallas_puzzles.course import curriculum

# A terminal is made by os.fork, and JAX, which another test of this process has imported, warns of that.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

pexpect = pytest.importorskip("pexpect", reason="no pseudo-terminals on this system")

progress = importlib.import_module("pallas_puzzles.course.progress")  # the package's own `progress` is the function

PROMPT = r"q:quit"
HOLE = "    # x_ref: (8, 128)      o_ref: (8, 128)\n    pass  # YOUR CODE HERE"
WRONG = solved().replace("x_ref[...] + 1.0\n\n\ndef add_one(", "x_ref[...] + 2.0\n\n\ndef add_one(")
BOTH = solved().replace(HOLES_OF_TWO, f"{ADD_TWO}\n\n")

assert WRONG != solved() != BOTH


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder to stand in, with a workspace beside a course and a home of its own."""
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "course")))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    # COLUMNS and LINES are also set by readline, behind Python's back: so what is started is given os.environ
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)
    workspace.init(tmp_path / "mine")
    return tmp_path


@pytest.fixture
def start(place):
    """Starts `puzzles watch` in a terminal, and waits for its first prompt."""
    started = []

    def spawn(*words: str, columns: int = 100, prompt: str = PROMPT):
        command = ["-m", "pallas_puzzles", "watch", *words]
        options = {"dimensions": (40, columns), "encoding": "utf-8", "timeout": 180, "env": dict(os.environ)}
        child = pexpect.spawn(sys.executable, command, preexec_fn=_hear_ctrl_c, **options)
        started.append(child)
        child.expect(prompt)
        return child

    yield spawn
    for child in started:
        child.close(force=True)


def _hear_ctrl_c() -> None:
    """Who runs the tests in the background of a script has Ctrl-C ignored, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def save(place: Path, text: str, name: str = "demo.py") -> None:
    (place / "mine" / name).write_text(text, "utf-8")


def verdict(child, pattern: str) -> str:
    """What is on the screen at the next prompt, which must match."""
    child.expect(PROMPT)
    screen = child.before.rpartition("\x1b[2J")[2]
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen).replace("\r\n", "\n").lstrip()
    assert re.search(pattern, " ".join(shown.split())), shown
    return shown


def test_a_session(place, start):
    child = start()
    save(place, WRONG)
    shown = verdict(child, "demo/1 Add one: not yet")
    assert shown.startswith("demo/1 Add one: not yet"), "the verdict first"
    assert "off by the constant +1" in shown
    assert "demo.py" in shown
    save(place, solved())
    assert "demo/2a" in verdict(child, "demo/1 Add one: solved"), "it says what is next"
    save(place, solved().replace("# It has two", "# It still has two"))
    verdict(child, "demo/1 Add one: solved"), "and does not go there by itself"
    child.send("n")
    shown = verdict(child, "demo/2a .*: not solved yet")
    assert "Goal: Add two to every element." in shown
    line = int(re.search(r"demo\.py:(\d+)", shown)[1])
    assert (place / "mine" / "demo.py").read_text().splitlines()[line - 1] == "def x_map(i):"
    save(place, BOTH)
    shown = verdict(child, "demo/2a .*: solved")
    assert "You have finished demo: 2 puzzles" in shown
    assert re.search(r"2a +Add two, block by block +\S+ KiB", shown), "the figures of the reader's own kernels"
    assert "Next notebook: a_second" in shown
    child.send("q")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    state = progress.load()
    assert state.solved("demo/1")
    assert state.solved("demo/2a")
    assert state.entry("demo/1")["attempts"] == 3
    node = nbformat.read(place / "mine" / "demo.ipynb", as_version=4)
    assert any("x_ref[...] + 2.0" in each.source for each in node.cells if each.cell_type == "code"), "it follows"


def test_the_keys(place, start):
    child = start()
    assert child.before.endswith("demo/1  n:next h:hint s:show l:list r:reset "), "a letter and its name, and no more"
    child.send("h")
    verdict(child, "hint 1 of 3")
    child.send("h")
    verdict(child, "hint 2 of 3")
    child.send("h")
    assert "o_ref" not in verdict(child, "You have seen every hint of demo/1")
    child.send("l")
    shown = verdict(child, r"demo +\.+ +0/2 +2 hints")
    assert re.search(r"1 +next +\?\? +Add one", shown)
    assert re.search(r"2a +locked +Add two", shown)
    child.send("s")
    verdict(child, "Nothing to show yet")
    child.send("n")
    verdict(child, "demo/2a opens when demo/1 is solved")
    save(place, WRONG)
    verdict(child, "not yet")
    child.send("s")
    verdict(child, "add_one_kernel: ")
    child.send("x")
    child.expect(PROMPT)
    child.send("r")
    child.expect(r"Reset demo/1\? \[y/N\] ")
    assert "1 line of yours" in child.before
    assert "2 hints" in child.before
    child.send("n")
    verdict(child, "Nothing is reset")
    assert (place / "mine" / "demo.py").read_text() == WRONG
    child.send("r")
    child.expect(r"\[y/N\] ")
    child.send("y")
    shown = verdict(child, "not solved yet")
    kept = re.search(r"demo\.old-[\d-]+\.py", shown)[0]
    assert (place / "mine" / kept).read_text() == WRONG
    assert HOLE in (place / "mine" / "demo.py").read_text()
    assert progress.load().entry("demo/1") == progress.NEW
    child.sendeof()
    child.expect(pexpect.EOF)


def test_the_puzzle_that_is_edited_is_checked(place, start):
    save(place, BOTH.replace("x_ref[...] + 1.0\n\n\ndef add_one(", "x_ref[...] + 2.0\n\n\ndef add_one("))
    child = start("--any")
    text = (place / "mine" / "demo.py").read_text()
    save(place, text.replace("    return i, 0", "    return 0, 0"))
    verdict(child, "demo/2a .*: not yet")
    save(place, text)
    verdict(child, "demo/2a .*: solved")
    save(place, text.replace("+ 2.0\n\n\ndef add_one(", "+ 1.0\n\n\ndef add_one("))
    verdict(child, "demo/1 Add one: solved")


def test_a_locked_puzzle_is_not_checked(place, start):
    child = start()
    save(place, (place / "mine" / "demo.py").read_text().replace(HOLES_OF_TWO, f"{ADD_TWO}\n\n"))
    shown = verdict(child, "demo/1 .*: not solved yet")
    assert "demo/2a opens when demo/1 is solved" in shown


def test_saves_that_break_the_file(place, start):
    """A syntax error, a file that is gone for a moment or for longer, or emptied first; editors that rename."""
    child = start()
    mine = place / "mine" / "demo.py"
    save(place, solved().replace("x_ref[...] + 1.0\n", "x_ref[...] + (1.0\n", 1))
    verdict(child, "Python cannot read this line")
    fresh = mine.with_name(".demo.py.swp")
    fresh.write_text(solved())
    fresh.replace(mine)
    verdict(child, "demo/1 Add one: solved")
    mine.rename(mine.with_name("demo.py~"))
    time.sleep(0.3)
    mine.write_text(WRONG)
    verdict(child, "demo/1 Add one: not yet")
    mine.write_text("")
    time.sleep(0.3)
    mine.write_text(solved())
    verdict(child, "demo/1 Add one: solved")
    mine.unlink()
    verdict(child, r"demo\.py is gone")
    mine.write_text(WRONG)
    verdict(child, "demo/1 Add one: not yet")
    mine.write_bytes(solved().encode("utf-16"))
    verdict(child, r"demo\.py is not UTF-8 \(line 1\): save it as UTF-8")
    mine.write_text(solved().replace('check("demo/1"', 'print("demo/1"'))
    verdict(child, r'has no call check\("demo/1"')
    mine.write_bytes(solved().replace("\n", "\r\n").encode())
    verdict(child, "demo/1 Add one: solved")
    assert b"\r\n" in mine.read_bytes()


def test_code_that_never_ends_or_ends_everything(place, start):
    child = start()
    endless = solved().replace("    o_ref[...] = x_ref[...] + 1.0\n", "    while True:\n        pass\n", 1)
    save(place, endless)
    child.expect("checking demo/1")
    save(place, solved())
    verdict(child, "demo/1 Add one: solved")
    save(place, solved().replace("setup()\n", "setup()\nimport os\nos._exit(7)\n", 1))
    verdict(child, r"ended the whole process \(exit code 7\), as os\._exit does: there is no verdict")
    save(place, solved())
    verdict(child, "demo/1 Add one: solved")
    # in C, where no exception arrives
    save(place, solved().replace("setup()\n", "setup()\nimport time\ntime.sleep(1000)\n", 1))
    child.expect("checking demo/1")
    save(place, solved())
    verdict(child, "demo/1 Add one: solved")


def test_what_the_code_prints_comes_after_the_verdict(place, start):
    child = start()
    save(place, solved().replace("    o_ref[...] =", "    print('from the', 'kernel')\n    o_ref[...] =", 1))
    shown = verdict(child, "demo/1 Add one: solved")
    assert shown.index("solved") < shown.index("printed by your code") < shown.index("from the kernel")


def test_a_save_in_jupyter(place, start):
    child = start()
    notebook = place / "mine" / "demo.ipynb"
    node = nbformat.read(notebook, as_version=4)
    (cell,) = [each for each in node.cells if HOLE in each.source]
    cell.source = cell.source.replace(HOLE, "    o_ref[...] = x_ref[...] + 1.0")
    nbformat.write(node, notebook)
    verdict(child, "demo/1 Add one: solved")
    assert HOLE not in (place / "mine" / "demo.py").read_text(), "and the script has it, too"
    node.cells[-1].source += " Mine."
    nbformat.write(node, notebook)
    save(place, WRONG)
    assert "have both changed" in verdict(child, "have both changed")


def test_ctrl_c(place, start):
    child = start()
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before


def test_the_terminal_is_given_back(place, start):
    """After a quit, a kill, and a stop with Ctrl-Z, keys are shown again."""
    shell = pexpect.spawn("/bin/sh", encoding="utf-8", timeout=180, dimensions=(40, 100))
    shell.sendline(f"{sys.executable} -m pallas_puzzles watch; stty -a | tr ';' '\\n'; echo en''d")
    shell.expect(PROMPT)
    shell.send("q")
    shell.expect("end")
    assert re.search(r"\bicanon\b", shell.before)
    assert not re.search(r"-icanon|-echo\b", shell.before)
    shell.close(force=True)


def test_killed(place, start):
    """The process that runs the file goes, too: what is left is the one that waits for the next."""
    before = _serving()
    child = start()
    assert _serving() - before
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    deadline = time.monotonic() + 60
    while len(_serving() - before) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_serving() - before) <= 1


def _serving() -> set[str]:
    place = os.environ["XDG_RUNTIME_DIR"]
    said = subprocess.run(["ps", "-eo", "pid,args"], env=dict(os.environ), capture_output=True, text=True).stdout
    return {line for line in said.splitlines() if "pallas_puzzles.app.serving" in line and place in line}


def test_what_runs_can_be_stopped(place, start):
    child = start()
    save(place, solved().replace("setup()\n", "setup()\nwhile True:\n    pass\n", 1))
    child.expect(r"checking demo/1 \.\.\. 1 s \(x stops it, q quits\)")
    child.send("x")
    verdict(child, "The check of demo/1 is stopped. Save again, or press c, to check again.")
    save(place, solved())
    shown = verdict(child, "demo/1 Add one: solved")
    assert re.search(r"demo +#+\.+ +1 of 2 solved", shown)


def test_what_is_typed_after_q_is_for_the_shell(place, start):
    shell = pexpect.spawn("/bin/sh", encoding="utf-8", timeout=180, dimensions=(40, 100))
    shell.sendline(f"{sys.executable} -m pallas_puzzles watch")
    shell.expect(PROMPT)
    shell.send("qecho ty''ped\n")
    shell.expect(r"\Wtyped\W")
    shell.close(force=True)


def test_a_narrow_terminal(place, start):
    child = start(columns=40, prompt=r"reset quit")
    save(place, WRONG)
    child.expect(r"reset quit")
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", child.before.rpartition("\x1b[2J")[2])
    assert "off by the constant +1" in re.sub(r"\s+", " ", shown)
    assert max(len(line) for line in shown.splitlines()) <= 40


def test_without_colour(place, start, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    child = start()
    save(place, WRONG)
    child.expect(PROMPT)
    assert not re.search(r"\x1b\[[\d;]*3[0-7]m", child.before)
    assert "not yet" in child.before


def test_a_terminal_that_can_do_nothing(place, start, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    child = start()
    save(place, WRONG)
    child.expect(PROMPT)
    assert "\x1b" not in child.before
    assert "not yet" in child.before


def test_on_a_pipe(place):
    """No terminal on either side: text without control characters, letters as keys."""
    command = [sys.executable, "-m", "pallas_puzzles", "watch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "q:quit" in line:
                break
        save(place, WRONG)
        said = ""
        for line in process.stdout:
            said += line
            if "q:quit" in line:
                break
        rest, _ = process.communicate("h\nq\n", timeout=60)
    assert process.returncode == 0
    assert "demo/1 Add one: not yet" in said
    assert "hint 1 of 3" in rest
    assert "\x1b" not in said + rest


def test_a_locked_puzzle_needs_any(place):
    command = [sys.executable, "-m", "pallas_puzzles", "watch", "demo/2a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "demo/2a opens when demo/1 is solved" in done.stderr


def test_next_after(place):
    puzzles = curriculum.all_puzzles()
    assert watch.next_after(puzzles[0], lambda each: False).id == "demo/2a"
    assert watch.next_after(puzzles[-1], lambda each: each != "demo/2a").id == "demo/2a", "from the top again"
    assert watch.next_after(puzzles[0], lambda each: True) is None


def test_a_save_is_seen_once(place, monkeypatch):
    """A save is seen once, as soon as the file rests."""
    session = watch.Watch(place / "mine", curriculum.puzzle("demo/1"))
    checked = []
    monkeypatch.setattr(session, "check", checked.append)
    session._look(first=True)
    session._look()
    assert checked == []
    save(place, WRONG)
    ahead = time.time() + 10  # a clock of another machine's
    os.utime(place / "mine" / "demo.py", (ahead, ahead))
    session._look()
    assert checked == [""]
    session._look()
    assert checked == [""]
