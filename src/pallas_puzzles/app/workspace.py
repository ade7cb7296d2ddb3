"""The reader's own copies of the notebooks: where they are, how they get there, and how they go back to the start."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..course import curriculum
from ..course.progress import load, state_folder
from ..files import locked, write_whole
from ..installation import PACKAGE
from ..text import plural
from . import pairing


class WorkspaceError(curriculum.CurriculumError):
    """There is no usable workspace; the message says what to do next."""


def default_folder() -> Path:
    """Where `puzzles init` goes: the workspace one is in, else that of the checkout, else the last one, else a new."""
    return _around() or _of_checkout() or _remembered() or Path.cwd() / "workspace"


def find() -> Path:
    """The workspace in use: the one that one stands in, else the last one made. Raises WorkspaceError without any."""
    for folder in (_around(), _remembered(), _of_checkout(), Path.cwd() / "workspace"):
        if folder is not None and folder.is_dir():
            return folder
    raise WorkspaceError("there is no workspace yet: `puzzles init` makes one, with your own copies of the notebooks")


@dataclass
class Made:
    """What `init` did: names of files, and where the text of a file is not the course's, notebook -> puzzles."""

    added: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    differ: dict[str, list[str]] = field(default_factory=dict)


def init(folder: Path) -> Made:
    """Copies every notebook that `folder` lacks, as a .py and an .ipynb, and the tutor. Overwrites and merges nothing.

    Raises WorkspaceError where it may not, or cannot, write.
    """
    folder = folder.expanduser().resolve()
    _refuse_course(folder)
    made = Made()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / pairing.LOCK):
            for book in curriculum.notebooks():
                _init_one(folder, book, made)
            _lay_tutor(folder, made)
    except OSError as error:
        why = error.strerror or str(error)
        raise WorkspaceError(f"{folder} cannot be written ({why}): name another folder") from None
    _remember(folder)
    return made


def _init_one(folder: Path, book: curriculum.Notebook, made: Made) -> None:
    both = pairing.halves(folder, book.name)
    there = [each for each in both if each.exists()]
    made.kept += [each.name for each in there]
    made.added += [each.name for each in both if each not in there]
    if not there:
        return _lay(folder, book)
    if len(there) == 1:
        pairing.complete(folder, book.name)
    newest = pairing.current(folder, book.name) or there[0]
    ours, mine = (pairing.by_puzzle(path, "markdown") for path in (book.path, newest))
    # the text, not the code: few readers rewrite that
    if differ := [number for number in ours if mine.get(number) != ours[number]]:
        made.differ[book.name] = differ


def _lay(folder: Path, book: curriculum.Notebook) -> None:
    """Writes both halves of a notebook in which nothing is solved."""
    from . import notebooks
    from .formats import jupytext

    node = notebooks.for_workspace(book.path)
    script, _ = pairing.halves(folder, book.name)
    pairing.create(script, jupytext.writes(node, fmt="py:percent"))
    pairing.complete(folder, book.name)


def current_file(folder: Path, notebook: str) -> Path:
    """The reader's file of a notebook: the newer of the pair, the .py when they are of one age."""
    newest = pairing.current(folder, notebook)
    if newest is None:
        raise WorkspaceError(f"{folder} has no {notebook}.py: `puzzles init {folder}` adds what is missing")
    return newest


def synced_file(folder: Path, notebook: str) -> pairing.Pair:
    """The same after the pair has been brought in step, with what there is to say about that."""
    pair = pairing.sync(folder, notebook)
    return pair or pairing.Pair(current_file(folder, notebook))


# ---- back to the start -----------------------------------------------------------------------------------------------


def losses(folder: Path, puzzles: list[curriculum.Puzzle]) -> list[str]:
    """What `reset` would take away, in lines: for every puzzle that has something to lose."""
    state, lines = load(), []
    for each in puzzles:
        entry = state.entry(each.id)
        losses = [f"solved on {entry['solved'][:10]}"] if entry["solved"] else []
        losses += [plural(entry[f"{noun}s"], noun) for noun in ("attempt", "hint") if entry[f"{noun}s"]]
        with contextlib.suppress(WorkspaceError):
            if edited := edited_lines(folder, each):
                losses.insert(0, f"{plural(edited, 'line')} of yours")
        if losses:
            lines.append(f"{each.id}: {', '.join(losses)}")
    if not lines:
        return ["nothing of yours is in there yet"]
    return ["this will be taken back to the start (your file as it is now is kept beside the new one):", *lines]


def edited_lines(folder: Path, puzzle: curriculum.Puzzle) -> int:
    """How many lines of code in a reader's file are not those that the puzzle gives. Raises as `current_file` does."""

    def lines(path: Path) -> Counter[str]:
        code = "\n".join(pairing.by_puzzle(path, "code").get(puzzle.number, []))
        return Counter(line for line in code.splitlines() if line.strip())

    return (lines(current_file(folder, puzzle.notebook)) - lines(puzzle.path)).total()


def reset(folder: Path, what: curriculum.Notebook | curriculum.Puzzle) -> list[Path]:
    """Puts a notebook, or a puzzle of one, as the course has it in the place of the reader's.

    Returns the reader's files as they were, under new names. Raises WorkspaceError when the halves of a puzzle's
    notebook are not in step, when the puzzle is not in the file, and where nothing can be written.
    """
    if isinstance(what, curriculum.Puzzle):
        pair = synced_file(folder, what.notebook)
        if pair.problem:
            raise WorkspaceError(pair.problem)
    try:
        with locked(folder / pairing.LOCK):
            if isinstance(what, curriculum.Notebook):
                kept = _set_aside([each for each in pairing.halves(folder, what.name) if each.exists()], move=True)
                _lay(folder, what)
                return kept
            script, _ = pairing.halves(folder, what.notebook)
            fresh = _replaced(script, what)
            kept = _set_aside([pair.current], move=False)
            write_whole(script, fresh)
        pairing.sync(folder, what.notebook)
    except OSError as error:
        raise WorkspaceError(f"{folder} cannot be written ({error.strerror or error}): nothing is reset") from None
    return kept


def _replaced(script: Path, puzzle: curriculum.Puzzle) -> bytes:
    """The reader's script with one puzzle as the course has it, in the reader's line endings."""
    from . import notebooks
    from .formats import jupytext

    content = script.read_bytes()
    mine = pairing.decoded(content)
    course = jupytext.writes(notebooks.for_workspace(puzzle.path), fmt="py:percent")
    (before, _, after), (_, ours, _) = (_three_parts(script, text, puzzle) for text in (mine, course))
    return pairing.encoded_as(content, "".join(f"{line}\n" for line in [*before, *ours, *after]))


def _three_parts(path: Path, text: str, puzzle: curriculum.Puzzle) -> tuple[list[str], list[str], list[str]]:
    """The lines before a puzzle, of it, from the marker of its first cell, and after it. Raises WorkspaceError."""
    cells, lines = curriculum.cells_of(text), text.splitlines()
    mine = [n for n, each in enumerate(cells) if each.section == puzzle.number]
    if not mine or mine != list(range(mine[0], mine[-1] + 1)):
        raise WorkspaceError(
            f"{path} does not have Puzzle {puzzle.number} in one piece: "
            f"`puzzles reset {puzzle.notebook}` starts the whole notebook anew"
        )
    start = cells[mine[0]].line - 2
    end = cells[mine[-1] + 1].line - 2 if mine[-1] + 1 < len(cells) else len(lines)
    return lines[:start], lines[start:end], lines[end:]


def _set_aside(paths: list[Path], *, move: bool) -> list[Path]:
    """Keeps files beside themselves under names of their own: basics.old-20260131-120000.py."""
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (f"old-{stamp}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
    name = next(each for each in names if not any(p.with_name(f"{p.stem}.{each}{p.suffix}").exists() for p in paths))
    kept = [path.with_name(f"{path.stem}.{name}{path.suffix}") for path in paths]
    for path, aside in zip(paths, kept, strict=True):
        if move:
            path.rename(aside)
        else:
            shutil.copy2(path, aside)
    return kept


# ---- the tutor -------------------------------------------------------------------------------------------------------


def _lay_tutor(folder: Path, made: Made) -> None:
    """Copies the tutor for those who work with an assistant, file by file, where there is none."""
    origin = curriculum.course_folder() / ".claude"
    for source in sorted(each for each in origin.rglob("*.md") if each.is_file()):
        name = Path(".claude") / source.relative_to(origin)
        target = folder / name
        if target.exists():
            made.kept.append(name.as_posix())
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        pairing.create(target, source.read_text("utf-8"))
        made.added.append(name.as_posix())


def _refuse_course(folder: Path) -> None:
    course = curriculum.course_folder()
    own = [course / name for name in ("puzzles", "solutions", "notebooks")] + [PACKAGE]
    for each in own:
        if folder == each or each in folder.parents:
            raise WorkspaceError(
                f"{folder} belongs to the course, whose files stay as they are: name a folder of your own, "
                f"for instance {default_folder()}"
            )


def _around() -> Path | None:
    """The workspace that the current directory is, or is in."""
    return _above(pairing.RECORD)


def _of_checkout() -> Path | None:
    """The workspace of the checkout that the current directory is in."""
    root = _above("src/pallas_puzzles")
    return root and root / "workspace"


def _above(name: str) -> Path | None:
    here = Path.cwd()
    return next((each for each in (here, *here.parents) if (each / name).exists()), None)


def _memory() -> Path:
    return state_folder() / "workspace.json"


def _remembered() -> Path | None:
    try:
        name = json.loads(_memory().read_text("utf-8"))["folder"]
        folder = Path(os.fsdecode(name.encode("utf-8", "surrogateescape")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if folder.is_dir() else None


def _remember(folder: Path) -> None:
    # a convenience: without it `puzzles` looks in ./workspace
    name = os.fsencode(folder).decode("utf-8", "surrogateescape")  # the same under any locale
    with contextlib.suppress(OSError):
        _memory().parent.mkdir(parents=True, exist_ok=True)
        _memory().write_text(json.dumps({"version": 1, "folder": name}) + "\n", "utf-8")
