"""The notebook around this kernel: its file, links into it, a cell that was edited and not run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..view.draw import running_shell

if TYPE_CHECKING:
    from .curriculum import Puzzle

_watched: list[bool] = []  # whether cells are watched for another `check`
_began: list[float] = []  # when this module began to look, once it has
_ran: dict[int, float] = {}  # number of a cell -> when it ran, since then
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


def edited_since_run(holes: Mapping[str, CodeType]) -> str:
    """The first function whose cell on disk was edited, and not run, after the kernel got it; "" if that is not sure.

    Sure means: the file was written after the cell ran, it still carries the number under which the cell ran, and its
    definition is another program.
    """
    with contextlib.suppress(Exception):  # magics, a notebook half written: nothing is said
        _watch_cells()
        path = file()
        if path is None:
            return ""
        written, cells = path.stat().st_mtime, _code_cells(path)
        for name, code in holes.items():
            number = _cell_that_defined(name, code)
            mine = [each for each in cells if _definition(each[0], name)]
            if number is None or len(mine) != 1 or written <= _ran.get(number, _began[0]):
                continue
            executed = _definition(running_shell().user_ns["In"][number], name)
            ((source, ran_as),) = mine
            if ran_as == number and _definition(source, name) != executed:
                return name
    return ""


def _code_cells(path: Path) -> list[tuple[str, int | None]]:
    """(source, number under which it ran) of the code cells of a notebook; nbformat would take a second to import."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [("".join(each["source"]), each["execution_count"]) for each in cells if each["cell_type"] == "code"]


def unchanged_since_check(puzzle: Puzzle, holes: Mapping[str, CodeType]) -> bool:
    """Whether no function in the holes of a puzzle was defined again since it was last asked about here."""
    before, _checked[puzzle.id] = _checked.get(puzzle.id), dict(holes)
    return before is not None and bool(holes) and all(before.get(name) is code for name, code in holes.items())


def watch_for_stubs(ours: Callable[..., Any]) -> None:
    """From now on, a cell that calls another `check` than ours for a puzzle says so below its output."""
    shell = running_shell()
    if shell is None or _watched:
        return
    _watched.append(True)

    def look(result: Any) -> None:
        called = re.search(r"^check\(\s*[\"'](\w+/\w+)", result.info.raw_cell or "", re.MULTILINE)
        if called and shell.user_ns.get("check", ours) is not ours:
            print(
                f"`check` is not that of pallas_puzzles here, so {called[1]} was neither judged nor recorded. To have "
                "it judged: from pallas_puzzles import check"
            )

    shell.events.register("post_run_cell", look)


def _watch_cells() -> None:
    """From the first question on, remembers when each cell ran; what ran before that, ran before that."""
    if not _began:
        shell = running_shell()
        _began.append(time.time())
        shell.events.register("pre_run_cell", lambda info: _ran.update({shell.execution_count: time.time()}))


def _cell_that_defined(name: str, code: CodeType) -> int | None:
    """The number of the cell whose function this is; None unless it is the last cell that defines one of this name."""
    sources = running_shell().user_ns["In"]
    number = next((i for i in reversed(range(len(sources))) if _definition(sources[i], name)), None)
    if number is None:
        return None
    return number if _definition(sources[number], name) == _definition(inspect.getsource(code), name) else None


def _definition(source: str, name: str) -> str:
    """The program of a function that a cell defines, "" if it does not; spaces and comments are no part of it."""
    if f"def {name}" not in source:
        return ""
    nodes = ast.parse(source).body
    return next((ast.dump(node) for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name), "")
