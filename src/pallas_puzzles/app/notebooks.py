"""puzzles/NAME.py -> notebooks/NAME.ipynb: the same bytes every time, so that a stale notebook shows."""

import hashlib
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ..course.curriculum import FOR_GPU, ORDER, PUZZLE_HEADING, Cell, find_check
from ..installation import ROOT, repository
from .formats import NotebookNode, jupytext, nbformat

BADGE_IMAGE = "https://colab.research.google.com/assets/colab-badge.svg"
COLAB = "https://colab.research.google.com/github"

COLAB_KEEP = """\
In Colab, choose **File > Save a copy in Drive** before you start: only the copy keeps what you write. A new runtime
forgets which puzzles you have solved, until you run your checks again."""

COLAB_SETUP = """\
# Google Colab starts without Pallas Puzzles: this installs it there, in about a minute.
# Where it is installed already, this cell does nothing.
import importlib
import importlib.util
import subprocess
import sys


class NotInstalled(Exception):
    def _render_traceback_(self):
        return [str(self)]  # the message, without a traceback


if importlib.util.find_spec("pallas_puzzles") is None:
    wanted = ["pallas-puzzles @ git+{repository}"]
{extras}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-color", *wanted]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode:
        lines = pip.stderr.strip().splitlines() or ["pip says nothing"]
        why = next((line.strip() for line in lines if "fatal:" in line or "ERROR:" in line), lines[-1])
        raise NotInstalled(f"Pallas Puzzles could not be installed. Mend this, then run this cell again: {{why}}")
    importlib.invalidate_caches()

from pallas_puzzles import check  # says so if JAX is too old, or was imported too early"""

# What a machine with the notebook's accelerator needs beside the package: JAX and its compiler for it are of one age
EXTRAS = {
    "tpu": """\
    if importlib.util.find_spec("libtpu"):
        wanted.append("jax[tpu]")  # on a TPU machine, JAX and its TPU compiler must be of one age""",
    "gpu": """\
    import pathlib

    for cuda in ("cuda12", "cuda13"):
        if pathlib.Path("/dev/nvidia0").exists() and importlib.util.find_spec(f"jax_{cuda}_plugin"):
            wanted.append(f"jax[{cuda}]")  # on a GPU machine, JAX and its CUDA plugin must be of one age""",
}

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def badge(name: str) -> str:
    """The markdown that opens notebooks/NAME.ipynb in Google Colab."""
    return f"[![Open in Colab]({BADGE_IMAGE})]({_in_colab(name)})"


def _in_colab(name: str) -> str:
    slug = repository().removeprefix("https://github.com/")
    return f"{COLAB}/{slug}/blob/main/notebooks/{name}.ipynb"


def build(source: Path) -> NotebookNode:
    """The notebook to publish: a badge, the cell that sets Colab up, then the cells of `source` (puzzles/NAME.py).

    Below each check, a link leads to what is next.
    """
    keep = nbformat.v4.new_markdown_cell(f"{badge(source.stem)}\n\n{COLAB_KEEP}")
    cells = _read(source).cells
    for_gpu = any(cell.cell_type == "code" and FOR_GPU.search(cell.source) for cell in cells)
    extras = EXTRAS["gpu" if for_gpu else "tpu"]
    set_up = nbformat.v4.new_code_cell(COLAB_SETUP.format(repository=repository(), extras=extras))
    node = _notebook(source.stem, [keep, set_up, *cells], {})
    _link(node, source)
    return node


def _link(node: NotebookNode, source: Path) -> None:
    """Adds a cell below each check that leads to the next puzzle; below the last, to the next notebook.

    From a text cell, and only from there, Colab follows a link to the id of a cell. JupyterLab follows it to an anchor
    of that name. The course reads a notebook without any of this: see curriculum.PUBLISHED.
    """
    found = [(each, PUZZLE_HEADING.search(each.source)) for each in node.cells if each.cell_type == "markdown"]
    puzzles = [(cell, heading) for cell, heading in found if heading]
    links = [f"Next: [Puzzle {at[1]}: {at[2]}](#scrollTo={cell.id})" for cell, at in puzzles[1:]]
    books = sorted(source.parent.glob("*.py"), key=_order)
    following = books[books.index(source) + 1 :][:1]
    links += [f"Next notebook: [{each.stem}, in Colab]({_in_colab(each.stem)})" for each in following]
    for (_, heading), link in zip(puzzles, links, strict=False):  # the last notebook has one link less
        check = find_check([Cell(each.cell_type, each.source, 1) for each in node.cells], f"{source.stem}/{heading[1]}")
        if check is not None:
            below = nbformat.v4.new_markdown_cell(link, id=f"{source.stem}-{heading[1]}-next")
            node.cells.insert(check + 1, below)
    for cell, heading in puzzles:
        end = heading.end()
        cell.source = f'{cell.source[:end]}<a id="scrollTo={cell.id}"></a>{cell.source[end:]}'


def _order(source: Path) -> int:
    order = ORDER.search(source.read_text("utf-8"))
    return int(order[1]) if order else 0


def for_workspace(source: Path) -> NotebookNode:
    """The notebook to solve in: the cells of `source` alone, paired by jupytext with the .py beside it."""
    origin = _read(source)
    ours = {key: value for key, value in origin.metadata.items() if key not in ("jupytext", "kernelspec")}
    pairing = {"formats": "ipynb,py:percent"}
    if ours:
        pairing["notebook_metadata_filter"] = ",".join(sorted(ours))  # else jupytext leaves them out of the .py
    return _notebook(source.stem, origin.cells, {**_kernel(), **ours, "jupytext": pairing})


def _kernel() -> dict[str, Any]:
    """What JupyterLab writes into a notebook when its kernel starts. If it is there already, nothing has changed."""
    about = {
        "name": "python",
        "version": platform.python_version(),
        "mimetype": "text/x-python",
        "codemirror_mode": {"name": "ipython", "version": sys.version_info.major},
        "pygments_lexer": f"ipython{sys.version_info.major}",
        "nbconvert_exporter": "python",
        "file_extension": ".py",
    }
    return {"kernelspec": {**KERNELSPEC, "display_name": "Python 3 (ipykernel)"}, "language_info": about}


def write(node: NotebookNode, path: Path) -> None:
    """Writes `node` to `path`, the same bytes for the same cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_as_bytes(node))


def update(check: bool = False, *, root: Path = ROOT) -> dict[str, str]:
    """Brings root/notebooks in line with root/puzzles: see `in_line`."""
    sources = sorted((root / "puzzles").glob("*.py"))
    if not sources:
        raise FileNotFoundError(f"no puzzles/*.py in {root}: the notebooks are built in a checkout of the project")
    made = {root / "notebooks" / f"{source.stem}.ipynb": _as_bytes(build(source)) for source in sources}
    return in_line(made, root / "notebooks", check, root)


def in_line(made: dict[Path, bytes], folder: Path, check: bool, root: Path = ROOT) -> dict[str, str]:
    """Writes generated files, and removes what else of their kinds is in `folder`; `check` changes nothing.

    Returns what was out of date: file, below root -> why.
    """
    stale = {}
    for path, content in made.items():
        if path.exists() and path.read_bytes() == content:
            continue
        stale[path] = "not what its source says" if path.exists() else "missing"
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    kinds = {path.suffix for path in made}
    for path in sorted(each for each in folder.glob("*") if each.suffix in kinds and each not in made):
        stale[path] = "has no source any more"
        if not check:
            path.unlink()
    return {path.relative_to(root).as_posix(): why for path, why in stale.items()}


def _read(source: Path) -> NotebookNode:
    return jupytext.reads(source.read_text("utf-8"), fmt="py:percent")


def _notebook(name: str, cells: list[NotebookNode], metadata: dict[str, Any]) -> NotebookNode:
    """A notebook of these cells, each with an id made of the notebook, the puzzle and the cell's text: a cell added
    elsewhere changes no other id, so that a change to one puzzle is a small difference in the committed notebook."""
    puzzle, seen = "start", Counter[str]()
    for cell in cells:
        if cell.cell_type == "markdown" and (heading := PUZZLE_HEADING.search(cell.source)):
            puzzle = heading[1]
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()
        cell.id = f"{name}-{puzzle}-{digest[:8]}"
        seen[cell.id] += 1
        if seen[cell.id] > 1:
            cell.id += f"-{seen[cell.id]}"
        # jupytext's own notes (lines_to_next_cell, ...) are about the .py file, not about the notebook
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
    base = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata={**base, **metadata})


def _as_bytes(node: NotebookNode) -> bytes:
    return (nbformat.writes(node, version=4).rstrip("\n") + "\n").encode()
