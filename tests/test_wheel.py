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
from nbformat import NotebookNode

from pallas_puzzles import installation
from pallas_puzzles.app import lab, notebooks
from pallas_puzzles.course import curriculum

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
import contextlib, sys, nbclient, nbformat
node = nbformat.read(sys.argv[1], as_version=4)
with contextlib.suppress(nbclient.exceptions.CellExecutionError):  # "run all" ends there; its output is in the cell
    nbclient.NotebookClient(node, timeout=120, kernel_name="python3").execute()
nbformat.write(node, sys.argv[2])
"""

OLD = "0.7.2"  # a JAX, as a notebook service may have had it for a year
NOWHERE = "http://127.0.0.1:9"  # nobody listens there


def uv(*arguments: str | Path) -> None:
    command = os.environ.get("UV") or shutil.which("uv")
    assert command, "uv is needed to build the wheel: run `uv run --all-groups pytest`"
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--offline", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path) -> Path:
    """A fresh environment. What the wheel depends on is this environment's, by links: no checkout, no JupyterLab."""
    uv("venv", "--offline", "--python", sys.executable, folder / "venv")
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (shown := folder / "dependencies").mkdir()
    for entry in Path(nbformat.__file__).parents[1].iterdir():
        lab = entry.name.startswith(("jupyter_server", "jupyterlab")) and "widgets" not in entry.name
        if not entry.name.startswith("pallas_puzzles") and entry.suffix != ".pth" and not lab:
            (shown / entry.name).symlink_to(entry)
    (packages / "dependencies.pth").write_text(str(shown))
    (packages / "sitecustomize.py").write_text(NO_NETWORK)
    return folder / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it."""
    interpreter = environment(tmp_path_factory.mktemp("environment"))
    uv("pip", "install", "--offline", "--no-deps", "--python", interpreter, wheel)
    return interpreter


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip and without the wheel, as Colab starts."""
    interpreter = environment(tmp_path_factory.mktemp("bare"))
    subprocess.run([interpreter, "-m", "ensurepip"], capture_output=True, check=True)
    return interpreter


@pytest.fixture(scope="module")
def old_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an old JAX in it: on PYTHONPATH, it is the JAX that is installed."""
    folder = tmp_path_factory.mktemp("old-jax")
    uv("pip", "install", "--no-deps", "--python", sys.executable, "--target", folder, f"jax=={OLD}", f"jaxlib=={OLD}")
    return folder


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
        for folder in ("puzzles", "solutions", "cases"):
            assert f"pallas_puzzles/_course/{folder}/{book.name}.py" in names
    for path in lab.EXTENSIONS.rglob("*.js*"):
        assert f"pallas_puzzles/{path.relative_to(ROOT / 'src' / 'pallas_puzzles').as_posix()}" in names
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


def run_all(node: NotebookNode | Path, python: Path, variables: dict[str, str], folder: Path) -> list[NotebookNode]:
    """The code cells of a notebook after "run all" in an empty folder."""
    (empty := folder / "empty").mkdir(exist_ok=True)
    if not isinstance(node, Path):
        nbformat.write(node, folder / "given.ipynb")
        node = folder / "given.ipynb"
    run([python, "-c", RUN_NOTEBOOK, node, folder / "done.ipynb"], empty, variables)
    return [cell for cell in nbformat.read(folder / "done.ipynb", as_version=4).cells if cell.cell_type == "code"]


def beginning(wheel: Path | str, *, before: str = "", after: str = "") -> NotebookNode:
    """The first cell of a published notebook, which finds the package at the address `wheel`, and the cell of imports.

    before: a cell in front of them, as a reader's own; after: one behind them.
    """
    node = notebooks.build(BOOK.path)
    first, imports, *_ = [cell for cell in node.cells if cell.cell_type == "code"]
    address = f"git+{notebooks.repository()}"
    assert address in first.source
    first.source = first.source.replace(address, wheel.as_uri() if isinstance(wheel, Path) else wheel)
    own = [nbformat.v4.new_code_cell(text) for text in (before, after)]
    node.cells = [own[0], first, imports, own[1]]
    return node


def only_says(cell: NotebookNode) -> str:
    """The one line that a cell shows, which stopped the notebook."""
    (output,) = cell.outputs
    assert output.output_type == "error"
    (line,) = output.traceback
    assert "\n" not in line
    return line


def test_a_notebook_runs_from_an_empty_folder(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    cells = run_all(ROOT / "notebooks" / f"{BOOK.name}.ipynb", python, outside, tmp_path)
    assert all(cell.execution_count for cell in cells), "a cell did not run"
    assert not cells[0].outputs, "the cell for Colab has nothing to say"
    shown = "\n".join(str(cell.get("outputs", "")) for cell in cells)
    assert shown.count("not solved yet") >= len(BOOK.puzzles)


@pytest.mark.thorough
def test_the_first_cell_without_a_way_to_the_repository_and_with_one(
    wheel: Path, bare: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    _, first, imports, _ = run_all(beginning(f"git+{NOWHERE}"), bare, outside, tmp_path)
    said = only_says(first)
    assert said.startswith("Pallas Puzzles could not be installed. Mend this, then run this cell again: fatal: ")
    assert NOWHERE in said
    assert not imports.execution_count, "run all went on"

    offline = {**outside, "PIP_NO_INDEX": "1"}
    _, first, imports, after = run_all(beginning(wheel, after="print(check.__module__)"), bare, offline, tmp_path)
    assert not first.outputs
    assert imports.outputs[0].text.startswith("No TPU here")
    assert after.outputs[0].text == "pallas_puzzles.course.check\n"


@pytest.mark.thorough  # installation.py says it; tests/test_installation.py has its words in every run
def test_an_old_jax_imported_before_the_first_cell(
    python: Path, old_jax: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    """It is upgraded then, but what has been imported stays: here a folder that leaves sys.path plays the upgrade."""
    early = f"import sys; sys.path.insert(0, {str(old_jax)!r}); import jax; sys.path.remove({str(old_jax)!r})"
    early += "; sys.modules['google.colab'] = sys"  # a name is enough to know Colab by
    _, first, imports, _ = run_all(beginning(NOWHERE, before=early), python, outside, tmp_path)
    new = installation.importlib.metadata.version("jax")
    again = "restart the runtime (Runtime > Restart session) and run this cell again"
    assert only_says(first) == f"JAX {OLD} was imported before JAX {new} was installed: {again}"
    assert not imports.execution_count


@pytest.mark.thorough
def test_a_jax_that_stays_too_old(python: Path, old_jax: Path, outside: dict[str, str], tmp_path: Path) -> None:
    variables = {**outside, "PYTHONPATH": str(old_jax)}
    _, first, imports, _ = run_all(beginning(NOWHERE), python, variables, tmp_path)
    said = only_says(first)
    assert said.startswith(f"JAX {OLD} is installed; Pallas Puzzles needs ")
    assert said.endswith(", then restart the kernel and run this cell again")
    assert not imports.execution_count
    without = beginning(NOWHERE)
    del without.cells[1]  # a notebook of a workspace has no cell for Colab
    _, imports, _ = run_all(without, python, variables, tmp_path)
    assert only_says(imports) == said

    command = [python.parent / "puzzles", "check", BOOK.puzzles[0].id]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"puzzles: JAX {OLD} is installed; Pallas Puzzles needs ")
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_jax_that_is_newer_than_tested(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    early = "from pallas_puzzles import installation; installation.NEWEST_TESTED = '0.11.1'"
    _, first, imports, after = run_all(beginning(NOWHERE, before=early, after="print(1)"), python, outside, tmp_path)
    new = installation.importlib.metadata.version("jax")
    said, simulator, *_ = "".join(each.text for each in imports.outputs).splitlines()
    assert not first.outputs
    assert said.startswith(f"JAX {new} is newer than 0.11.1, the newest that Pallas Puzzles was tested with.")
    assert said.endswith('pip install "jax==0.11.1"')
    assert simulator.startswith("No TPU here")
    assert after.outputs[0].text == "1\n"


def test_no_message_names_a_package_on_an_index(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    code = "from pallas_puzzles.targets.tpu.compiler import HOW_TO_GET_IT; print(HOW_TO_GET_IT)"
    said = run([python, "-c", code], tmp_path, outside)
    assert f'pip install "pallas-puzzles[tpu-compiler] @ git+{notebooks.repository()}"' in said


def test_the_command_runs(python: Path, outside: dict[str, str], tmp_path: Path) -> None:
    listed = run([python.parent / "puzzles", "list", "--json"], tmp_path, outside)
    for puzzle in BOOK.puzzles:
        assert puzzle.id in listed
    run([python.parent / "puzzles", "init", tmp_path / "mine"], tmp_path, outside)
    assert (tmp_path / "mine" / ".claude" / "commands" / "tutor.md").is_file()
    answer = tmp_path / "answer.py"
    answer.write_text("def add_ten_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 10\n")
    assert "solved" in run([python.parent / "puzzles", "check", "basics/1", "--with", answer], tmp_path, outside)
