"""The notebook around this kernel: its file, links into it, a cell that was not run again."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType

from ..view.draw import running_shell
from .curriculum import Puzzle

_checked: dict[str, dict[str, CodeType]] = {}  # puzzle -> what was in its holes at its last check


def file() -> Path | None:
    """The .ipynb that this kernel runs, where its server or editor says so."""
    shell = running_shell()
    named = shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") if shell else None
    path = Path(named) if named else None
    return path if path is not None and path.suffix == ".ipynb" and path.is_file() else None


def in_colab() -> bool:
    return "google.colab" in sys.modules


def link(puzzle: Puzzle) -> str:
    """An address that leads to a puzzle from an output of this kernel, "" where no address does.

    JupyterLab and Notebook follow a heading's anchor in the same notebook, and a file's name. Outputs in Colab lie in a
    frame of another site, which knows neither the notebook's address nor its cells: there the link is in a text cell,
    see app/notebooks.py. VS Code follows neither form.
    """
    here, shell = file(), running_shell()
    if here is None or in_colab() or "__vsc_ipynb_file__" in shell.user_ns:
        return ""
    if here.stem == puzzle.notebook:
        return f"#Puzzle {puzzle.number}: {puzzle.title}".replace(" ", "-")
    other = here.with_name(f"{puzzle.notebook}.ipynb")
    return other.name if other.is_file() else ""


def unchanged_since_check(puzzle: Puzzle, holes: Mapping[str, CodeType]) -> bool:
    """Whether no function in the holes of a puzzle was defined again since it was last asked about here."""
    before, _checked[puzzle.id] = _checked.get(puzzle.id), dict(holes)
    return before is not None and bool(holes) and all(before.get(name) is code for name, code in holes.items())
