"""What a reader gets who installs the wheel and has no checkout: Google Colab, above all."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from pallas_puzzles import curriculum

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parents[1]
BOOK = curriculum.notebooks()[0]

# Python runs this at its start, in the environment of the wheel: whoever reaches out of the machine is stopped.
NO_NETWORK = """\
import socket
connect = socket.socket.connect
def guarded(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"reached out to {address}")
    return connect(self, address)
socket.socket.connect = guarded
"""

RUN_NOTEBOOK = """\
import sys, nbclient, nbformat
node = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(node, timeout=120, kernel_name="python3").execute()
nbformat.write(node, sys.argv[2])
"""


def uv(*arguments: str | Path) -> None:
    command = os.environ.get("UV") or shutil.which("uv")
    assert command, "uv is needed to build the wheel: run `uv run pytest`"
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--offline", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it. What the wheel depends on is seen through a .pth file, which shows it
    this environment's packages, but not the checkout: that hangs on a .pth file of its own, and those do not nest."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    uv("venv", "--offline", "--python", sys.executable, folder)
    interpreter = folder / "bin" / "python"
    uv("pip", "install", "--offline", "--no-deps", "--python", interpreter, wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    import jax

    (packages / "dependencies.pth").write_text(str(Path(jax.__file__).parents[1]))
    (packages / "sitecustomize.py").write_text(NO_NETWORK)
    return interpreter


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """The environment variables of somebody who has no checkout."""
    ours = ("PYTHONPATH", "PALLAS_PUZZLES_COURSE", "VIRTUAL_ENV", "JUPYTER_PATH")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    home, data = str(tmp_path / "home"), str(tmp_path / "jupyter")
    return {**variables, "PALLAS_PUZZLES_HOME": home, "JUPYTER_DATA_DIR": data, "IPYTHONDIR": data}


def run(command: list[str | Path], folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_course(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for book in curriculum.notebooks():
        for folder in ("puzzles", "solutions"):
            assert f"pallas_puzzles/_course/{folder}/{book.name}.py" in names
    for path in (ROOT / ".claude").rglob("*.md"):
        assert f"pallas_puzzles/_course/.claude/{path.relative_to(ROOT / '.claude').as_posix()}" in names
    assert not [name for name in names if re.search(r"(^|/)(tests|notebooks|benchmarks|__pycache__)/", name)]


def test_the_wheel_stands_alone(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    code = "import sys, pallas_puzzles; print(pallas_puzzles.__file__); print(*sys.path, sep='\\n')"
    file, *path = run([python, "-c", code], tmp_path, outside).splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert not [each for each in path if each in (str(ROOT), str(ROOT / "src"))]


def test_the_network_is_really_out_of_reach(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert "reached out to" in done.stderr


def test_a_notebook_runs_from_an_empty_folder(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    (folder := tmp_path / "empty").mkdir()
    done = tmp_path / "done.ipynb"
    run([python, "-c", RUN_NOTEBOOK, ROOT / "notebooks" / f"{BOOK.name}.ipynb", done], folder, outside)
    cells = nbformat.read(done, as_version=4).cells
    assert all(cell.execution_count for cell in cells if cell.cell_type == "code"), "a cell did not run"
    shown = "\n".join(str(cell.get("outputs", "")) for cell in cells)
    assert shown.count("not solved yet") >= len(BOOK.puzzles)


def test_the_command_runs(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    listed = run([python.parent / "puzzles", "list", "--json"], tmp_path, outside)
    for puzzle in BOOK.puzzles:
        assert puzzle.id in listed
    run([python.parent / "puzzles", "init", tmp_path / "mine"], tmp_path, outside)
    assert (tmp_path / "mine" / ".claude" / "commands" / "tutor.md").is_file()
