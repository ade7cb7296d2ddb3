"""NAME.py and NAME.ipynb of a workspace are one notebook: solving in one is seen in the other, losing nothing.

A record of what both halves last had in common (RECORD, in the workspace) says which half has changed since. One half:
the other follows. Both: a conflict, which is reported and left to the reader.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..course import curriculum
from ..files import locked, signature_of, write_whole

if TYPE_CHECKING:
    from .formats import NotebookNode

RECORD = ".pallas-puzzles.json"
LOCK = ".pallas-puzzles.lock"
VERSION = 1

Cells = list[tuple[str, str]]  # (kind, source)


@dataclass(frozen=True)
class Pair:
    """The half of a notebook to read; `problem` says what keeps the other from following, if anything."""

    current: Path
    problem: str = ""


@dataclass(frozen=True)
class _Half:
    """One file as it was read: `signature` tells whether it has changed since."""

    path: Path
    signature: tuple[int, int]
    content: bytes
    cells: Cells
    digest: str


def halves(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.py", folder / f"{name}.ipynb"


def current(folder: Path, name: str) -> Path | None:
    """The newer half, the .py when they are of one age, None without any. Reads nothing but dates."""
    there = [each for each in halves(folder, name) if each.is_file()]
    return max(there, key=lambda each: each.stat().st_mtime_ns, default=None)  # max keeps the first of equals


def known(folder: Path, name: str) -> Path | None:
    """The half to read, where that shows without reading: one at the most was written since they were in step."""
    before, now = record(folder).get(name, {}).get("files", {}), _looks(folder, name)
    written = [each for each in halves(folder, name) if before.get(each.suffix) != now.get(each.suffix)]
    if len(now) < 2 or len(written) > 1:
        return None
    return written[0] if written else current(folder, name)


def sync(folder: Path, name: str) -> Pair | None:
    """Brings the halves of a notebook in step where only one has changed, and says which one is current.

    None where there is no file of that name. Never raises for a file that cannot be read or written: `problem` says so.
    """
    newest = current(folder, name)
    if newest is None:
        return None
    looks = _looks(folder, name)
    if len(looks) == 2 and record(folder).get(name, {}).get("files") == looks:
        return Pair(newest)  # nothing has changed since they were last in step: the usual case, decided without reading
    try:
        with locked(folder / LOCK):
            return _sync(folder, name, newest)
    except TimeoutError:
        return Pair(newest, problem=f"another program works on {folder}: {name}.py and {name}.ipynb stay as they are")
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror or error})"
        return Pair(newest, problem=f"{why}: {name}.py and {name}.ipynb are not kept in step")


def _sync(folder: Path, name: str, newest: Path) -> Pair:
    read: list[_Half] = []
    there = [each for each in halves(folder, name) if each.is_file()]
    for path in there:
        try:
            read.append(_read(path))
        except ValueError as error:
            good = next((each for each in there if each != path), path)
            return Pair(good, problem=f"{path} is damaged ({error}), and stays as it is: mend it or move it away")
    if len(read) < 2:
        complete(folder, name)
        return Pair(newest)
    a, b = read
    if a.digest == b.digest:
        _remember(folder, name, a.digest)
        return Pair(newest)
    base = record(folder).get(name, {}).get("cells")
    before = base or _course_digest(name)
    changed = [each for each in read if each.digest != before]
    if len(changed) != 1:
        return Pair(newest, problem=_conflict(a, b, newest, unknown=base is None))
    source, target = (a, b) if changed == [a] else (b, a)
    if not any(quote + name + "/" in code for kind, code in source.cells if kind == "code" for quote in "\"'"):
        lost = f"{source.path} has no puzzle left in it, and is not carried over to {target.path.name}"
        return Pair(source.path, problem=lost)
    _follow(source, target)
    _remember(folder, name, source.digest)
    return Pair(source.path)


def _conflict(a: _Half, b: _Half, newest: Path, unknown: bool) -> str:
    mine, theirs = (_by_section(each.cells) for each in (a, b))
    apart = [s for s in dict.fromkeys([*mine, *theirs]) if mine.get(s) != theirs.get(s)]
    named = [f"Puzzle {each}" if each else "the cells around the puzzles" for each in apart]
    where = f"{', '.join(named[:4])}{' and more' if len(named) > 4 else ''}"
    older = a.path if newest == b.path else b.path
    how = "differ" if unknown else "have both changed since they were last the same"
    return (
        f"{a.path.name} and {b.path.name} {how} ({where}). The newer, {newest.name}, is used for now. Copy what you "
        f"need out of {older.name}, and rename {older.name}: the next command makes it anew"
    )


def complete(folder: Path, name: str) -> None:
    """Makes the half that is missing of the half that is there, never newer than it. Raises OSError."""
    from . import notebooks
    from .formats import jupytext

    script, paired = halves(folder, name)
    if paired.exists():
        create(script, jupytext.writes(jupytext.read(paired), fmt="py:percent"))
        made, like = script, paired
    else:
        notebooks.write(notebooks.for_workspace(script), paired)
        made, like = paired, script
    _same_age(made, like)
    with contextlib.suppress(ValueError):
        _remember(folder, name, _read(like).digest)


def create(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as stream:  # "x": never over another file
        stream.write(text)


def _follow(source: _Half, target: _Half) -> None:
    """Writes the cells of one half into the other; outputs and the script's line endings stay. Raises OSError."""
    from .formats import combine_inputs_with_outputs, jupytext

    node = _node(source.content, source.path.suffix)
    if target.path.suffix == ".py":
        content = encoded_as(target.content, jupytext.writes(node, fmt="py:percent"))
    else:
        outputs, script = _node(target.content, ".ipynb"), {"extension": ".py", "format_name": "percent"}
        merged = combine_inputs_with_outputs(node, outputs, fmt=script)
        content = (jupytext.writes(merged, fmt="ipynb").rstrip("\n") + "\n").encode()
    if signature_of(target.path) != target.signature:
        raise OSError(0, f"{target.path.name} has just been changed by another program")
    write_whole(target.path, content)
    _same_age(target.path, source.path)


# ---- what is compared ------------------------------------------------------------------------------------------------


def _node(content: bytes, suffix: str) -> NotebookNode:
    from .formats import jupytext

    return jupytext.reads(decoded(content), fmt="ipynb" if suffix == ".ipynb" else "py:percent")


def _read(path: Path) -> _Half:
    """A half, its cells as a script would have them: there, magics are comments.

    Raises ValueError for a file that is no notebook, OSError where it cannot be read.
    """
    from .formats import jupytext

    signature, content = signature_of(path), path.read_bytes()
    try:
        node = _node(content, path.suffix)
        if path.suffix == ".ipynb":
            node = jupytext.reads(jupytext.writes(node, fmt="py:percent"), fmt="py:percent")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except ValueError:
        raise ValueError("not JSON") from None
    except Exception as error:  # nbformat has many of its own
        raise ValueError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from None
    cells = [(cell.cell_type, cell.source.rstrip()) for cell in node.cells if cell.source.strip()]
    return _Half(path, signature, content, cells, hashlib.sha256(json.dumps(cells).encode()).hexdigest())


def decoded(content: bytes) -> str:
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def encoded_as(content: bytes, text: str) -> bytes:
    """The text with the line endings that `content` has, and with its byte order mark."""
    text = text.replace("\n", "\r\n") if b"\r\n" in content else text
    return text.encode("utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8")


def _by_section(cells: Cells) -> dict[str, Cells]:
    sections = curriculum.sections(curriculum.Cell(kind, source, 1) for kind, source in cells)
    return _grouped((each.section, (each.kind, each.source)) for each in sections)


def by_puzzle(path: Path, kind: str) -> dict[str, list[str]]:
    """The cells of one kind by puzzle, "" for those around them; {} for a file that cannot be read just now."""
    try:
        cells = curriculum.read_cells(path)
    except curriculum.CurriculumError:
        return {}
    return _grouped((each.section, each.source.strip()) for each in cells if each.kind == kind)


def _grouped[T](pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _course_digest(name: str) -> str | None:
    """What a half has in which nothing is solved yet, as far as the course of today knows."""
    path = curriculum.course_folder() / "puzzles" / f"{name}.py"
    return _read(path).digest if path.is_file() else None


def _same_age(path: Path, like: Path) -> None:
    age = like.stat()
    os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))


# ---- the record ------------------------------------------------------------------------------------------------------


def record(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of the notebooks of a workspace: name -> {"cells": digest, "files": how they look from outside}."""
    try:
        found = json.loads((folder / RECORD).read_text("utf-8"))
        pairs = found["pairs"] if found["version"] == VERSION else {}
        return {name: known for name, known in pairs.items() if isinstance(known, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(folder: Path, name: str, cells: str) -> None:
    """Records what both halves have in common, and how their files look from outside. Raises OSError."""
    known, fresh = record(folder), {"cells": cells, "files": _looks(folder, name)}
    if known.get(name) != fresh:
        text = json.dumps({"version": VERSION, "pairs": {**known, name: fresh}}, indent=1, sort_keys=True)
        write_whole(folder / RECORD, f"{text}\n".encode())


def _looks(folder: Path, name: str) -> dict[str, list[int]]:
    return {each.suffix: list(signature_of(each)) for each in halves(folder, name) if each.is_file()}
