"""puzzles/NAME.py -> notebooks/NAME.ipynb: the same bytes every time, so that a stale notebook shows.

`python -m pallas_puzzles.app.notebooks` builds all of them; with `--check` it changes nothing, names what is out of
date, and exits with 1 if anything is.
"""

import argparse
import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import nbformat
from nbformat import NotebookNode

from ..course.curriculum import ORDER, PUZZLE_HEADING, Cell, find_check
from ..installation import ROOT, repository

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
    if importlib.util.find_spec("libtpu"):
        wanted.append("jax[tpu]")  # on a TPU machine, JAX and its TPU compiler must be of one age
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-color", *wanted]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode:
        lines = pip.stderr.strip().splitlines() or ["pip says nothing"]
        why = next((line.strip() for line in lines if "fatal:" in line or "ERROR:" in line), lines[-1])
        raise NotInstalled(f"Pallas Puzzles could not be installed. Mend this, then run this cell again: {{why}}")
    importlib.invalidate_caches()

from pallas_puzzles import check  # says so if JAX is too old, or was imported too early"""

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


class Text(NamedTuple):
    """A cell before it is one."""

    kind: str  # "code" or "markdown"
    text: str
    tags: tuple[str, ...] = ()


class Stale(NamedTuple):
    """A notebook that is not what its source says."""

    notebook: str  # relative to the checkout: "notebooks/basics.ipynb"
    why: str

    def __str__(self) -> str:
        return f"{self.notebook}: {self.why}"


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
    head = [
        Text("markdown", f"{badge(source.stem)}\n\n{COLAB_KEEP}"),
        Text("code", COLAB_SETUP.format(repository=repository())),
    ]
    node = _notebook(source.stem, [*head, *_cells(_read(source))], {})
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
    return _notebook(source.stem, _cells(origin), {**_kernel(), **ours, "jupytext": pairing})


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


def update(check: bool = False, *, root: Path = ROOT) -> list[Stale]:
    """Brings root/notebooks in line with root/puzzles and says what was out of date; `check` changes nothing."""
    sources = sorted((root / "puzzles").glob("*.py"))
    if not sources:
        raise FileNotFoundError(f"no puzzles/*.py in {root}: the notebooks are built in a checkout of the project")
    stale = []
    for source in sources:
        path = root / "notebooks" / f"{source.stem}.ipynb"
        node = build(source)
        if not path.exists():
            stale.append(Stale(f"notebooks/{path.name}", "missing"))
        elif path.read_bytes() != _as_bytes(node):
            stale.append(Stale(f"notebooks/{path.name}", f"not what puzzles/{source.name} says"))
        else:
            continue
        if not check:
            write(node, path)
    known = {source.stem for source in sources}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if path.stem not in known:
            stale.append(Stale(f"notebooks/{path.name}", f"has no source puzzles/{path.stem}.py any more"))
            if not check:
                path.unlink()
    return stale


def _read(source: Path) -> NotebookNode:
    return jupytext.reads(source.read_text("utf-8"), fmt="py:percent")


def _cells(node: NotebookNode) -> list[Text]:
    # jupytext's own notes (lines_to_next_cell, ...) are about the .py file, not about the notebook
    return [Text(cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ()))) for cell in node.cells]


def _notebook(name: str, cells: list[Text], metadata: dict[str, Any]) -> NotebookNode:
    identify = _identifier(name)
    made = []
    for cell in cells:
        new = nbformat.v4.new_code_cell if cell.kind == "code" else nbformat.v4.new_markdown_cell
        made.append(new(cell.text, id=identify(cell), metadata={"tags": list(cell.tags)} if cell.tags else {}))
    base = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=made, metadata={**base, **metadata})


def _identifier(name: str) -> Callable[[Text], str]:
    """A function from a cell to its id, made of the notebook, the puzzle and the cell's text: a cell added elsewhere
    changes no other id, so that a change to one puzzle is a small difference in the committed notebook."""
    puzzle = "start"
    seen: Counter[str] = Counter()

    def identify(cell: Text) -> str:
        nonlocal puzzle
        heading = PUZZLE_HEADING.search(cell.text) if cell.kind == "markdown" else None
        if heading:
            puzzle = heading[1]
        digest = hashlib.sha256(f"{cell.kind}\n{cell.text}".encode()).hexdigest()
        cell_id = f"{name}-{puzzle}-{digest[:8]}"
        seen[cell_id] += 1
        return cell_id if seen[cell_id] == 1 else f"{cell_id}-{seen[cell_id]}"

    return identify


def _as_bytes(node: NotebookNode) -> bytes:
    return (nbformat.writes(node, version=4).rstrip("\n") + "\n").encode()


def main(argv: list[str] | None = None) -> int:
    """Builds or checks; the exit status is 1 when `--check` finds a notebook out of date."""
    parser = argparse.ArgumentParser("update_notebooks.sh", description="Builds notebooks/*.ipynb from puzzles/*.py.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is out of date")
    check = parser.parse_args(argv).check
    try:
        stale = update(check)
    except FileNotFoundError as error:
        parser.error(str(error))
    for notebook in stale:
        print(notebook)
    if check and stale:
        print("run ./update_notebooks.sh")
    elif not stale:
        print("the notebooks are up to date")
    else:
        print(f"updated {len(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
