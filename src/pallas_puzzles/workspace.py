"""The reader's own copies of the notebooks: where they are, how they get there, and which of a pair is current."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from . import curriculum
from .progress import state_folder


class WorkspaceError(Exception):
    """There is no usable workspace; the message says what to do next."""


def default_folder() -> Path:
    """Where `puzzles init` goes: ./workspace of the checkout that one is in, else the last one, else ./workspace."""
    return _of_checkout() or _remembered() or Path.cwd() / "workspace"


def find() -> Path:
    """The workspace in use: the one last made with `init`. Raises WorkspaceError when there is none."""
    for folder in (_remembered(), _of_checkout(), Path.cwd() / "workspace"):
        if folder is not None and folder.is_dir():
            return folder
    raise WorkspaceError("there is no workspace yet: `puzzles init` makes one, with your own copies of the notebooks")


def init(folder: Path) -> tuple[list[str], list[str]]:
    """Copies every notebook that `folder` lacks, as a .py and an .ipynb that jupytext keeps in step.

    Returns the names of the files that were added and of those that were there and stay as they are.
    """
    folder = folder.expanduser().resolve()
    _refuse_course(folder)
    added: list[str] = []
    kept: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for book in curriculum.notebooks():
            script, paired = folder / f"{book.name}.py", folder / f"{book.name}.ipynb"
            kept += [each.name for each in (script, paired) if each.exists()]
            added += [each.name for each in (script, paired) if not each.exists()]
            _complete_pair(book.path, script, paired)
    except OSError as error:
        raise WorkspaceError(f"{folder} cannot be written ({error.strerror}): name another folder") from None
    _remember(folder)
    return added, kept


def current_file(folder: Path, notebook: str) -> Path:
    """The reader's file of a notebook: the newer of the pair, the .py when they are of one age."""
    there = [each for each in (folder / f"{notebook}.py", folder / f"{notebook}.ipynb") if each.is_file()]
    if not there:
        raise WorkspaceError(f"{folder} has no {notebook}.py: `puzzles init {folder}` adds what is missing")
    return max(there, key=lambda each: each.stat().st_mtime_ns)  # max keeps the first of equals


def _complete_pair(source: Path, script: Path, paired: Path) -> None:
    """Adds what is missing. The half that is added is made of the half that is there, and never newer than it."""
    import jupytext

    from . import notebooks

    if script.exists() and paired.exists():
        return
    if paired.exists():
        _create(script, jupytext.writes(jupytext.read(paired), fmt="py:percent"))
        made, like = script, paired
    elif script.exists():
        notebooks.write(notebooks.for_workspace(script), paired)
        made, like = paired, script
    else:
        node = notebooks.for_workspace(source)
        notebooks.write(node, paired)
        _create(script, jupytext.writes(node, fmt="py:percent"))
        made, like = paired, script
    age = like.stat()
    os.utime(made, ns=(age.st_atime_ns, age.st_mtime_ns))


def _create(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as stream:  # "x": never over another file
        stream.write(text)


def _refuse_course(folder: Path) -> None:
    course = curriculum.course_folder()
    own = [course / name for name in ("puzzles", "solutions", "notebooks")] + [Path(__file__).resolve().parent]
    for each in own:
        if folder == each or each in folder.parents:
            raise WorkspaceError(
                f"{folder} belongs to the course, whose files stay as they are: name a folder of your own, "
                f"for instance {default_folder()}"
            )


def _of_checkout() -> Path | None:
    """The workspace of the checkout that the current directory is in."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "src" / "pallas_puzzles" / "curriculum.py").is_file():
            return folder / "workspace"
    return None


def _memory() -> Path:
    return state_folder() / "workspace.json"


def _remembered() -> Path | None:
    try:
        folder = Path(json.loads(_memory().read_text("utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if folder.is_dir() else None


def _remember(folder: Path) -> None:
    # a convenience: without it `puzzles` looks in ./workspace
    with contextlib.suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        _memory().write_text(json.dumps({"version": 1, "folder": str(folder)}) + "\n", "utf-8")
