"""Runs a puzzle: a reader's file, or a solution laid over the holes, up to the course's own check."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..diagnose.findings import Finding
from ..ir.capture import SourceLine, source_line
from ..lens.watchdog import TimeLimit, time_limit
from ..view.verdict import Verdict
from .check import check
from .collecting import collecting
from .curriculum import (
    DEFINITIONS,
    Cell,
    CurriculumError,
    Puzzle,
    ast_equal,
    bare_signature,
    called_alike,
    check_in,
    find_check,
    names_bound,
    notebook,
    only_displays,
    puzzle,
    read_cells,
    remember,
    syntax_tree,
    top_functions,
    until,
)
from .holes import as_function

STATEMENT_LIMIT_S = 60.0  # for one statement before the check, which has limits of its own


@dataclass(frozen=True)
class _Statement:
    node: ast.stmt
    file: str


class _Stop(Exception):
    """Something failed before the check: the exception that it is given."""


def run(
    puzzle_id: str, *, source: Path | None = None, overlay: Path | str | None = None, judge: bool = True
) -> Verdict:
    """Runs a notebook up to and including the check of one puzzle, and returns the verdict.

    `source` is the reader's .py or .ipynb (default: the course's own notebook). `overlay`, a file or a string of code,
    has functions to lay over the holes of this puzzle; the holes of earlier puzzles then get the course's solutions.
    Functions keep the file names and line numbers of where they are written. Checks of other puzzles, and whatever
    only displays something, are left out. The check is the course's own, whatever `source` has in its place. What fails
    in the cells of other puzzles becomes a note of the verdict.
    judge=False: the check is reached and not run; the verdict on an answer then carries its `subject`.

    Raises CurriculumError for an unknown puzzle, a file that does not check it, or an overlay that does not fit.
    """
    target = puzzle(puzzle_id)
    path = source or target.path
    cells = read_cells(path)
    last = find_check(cells, puzzle_id)
    if last is None:
        raise CurriculumError(
            f'{path} has no call check("{puzzle_id}", ...): copy the cell with it from {target.path}, '
            f"or move the file away and run `puzzles init`"
        )
    session = _Session(target, path, cells[: last + 1])
    try:
        if overlay is not None:
            session.lay(overlay)
        return session.verdict(judge)
    except _Stop as stop:
        return session.stopped(stop.args[0])


_OURS = "This verdict is that of the course's own check."


class _Session:
    """One run of one puzzle: the reader's names, what replaces the holes, and what went wrong on the way."""

    def __init__(self, target: Puzzle, path: Path, cells: list[Cell]) -> None:
        self.target, self.book = target, notebook(target.path)
        self.cells = cells
        # not "__main__": what stands behind that guard is for running the file as a script
        self.names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
        self.replaced: dict[str, list[_Statement]] = {}  # hole -> what runs in its place
        self.files = {each.file for each in cells}
        self.notes: list[str] = []
        if path.suffix == ".ipynb":
            self.names["display"] = lambda *objects, **options: None  # IPython gives a notebook this name

    def verdict(self, judge: bool = True) -> Verdict:
        """Runs the cells, and then the course's own check, whatever the one in the reader's file says."""
        try:  # before anything runs: a syntax error should not have to wait for JAX
            for each in self.cells:
                if each.kind == "code" and self._matters(each):
                    _statements(each)
        except SyntaxError as error:
            raise _Stop(error) from error
        with collecting(judge=judge) as verdicts:
            for each in self.cells:
                if each.kind == "code":
                    self._run_cell(each, final=each is self.cells[-1])
            try:
                *before, call = self._own_check()
                if self.names.get("check", check) is not check:
                    self.notes.insert(0, f"`check` in {self.cells[-1].file} is not that of pallas_puzzles. {_OURS}")
                for statement in before:
                    self._run_statement(statement, quiet=False)
                module = ast.Module([call.node], type_ignores=[])
                exec(compile(module, call.file, "exec", dont_inherit=True), self.names, {"check": check})
            except (Exception, SystemExit) as error:
                self._failed(self.cells[-1], error)
        verdicts[-1].notes.extend(self.notes[:1])
        return verdicts[-1]

    def _own_check(self) -> list[_Statement]:
        """The course's check cell, up to its check; with a note if the reader's call is another one."""
        statements = _statements(self.book.cells[self.target.check_cell])
        calls = [check_in(each.node, self.target.id) for each in statements]
        last = max(number for number, call in enumerate(calls) if call)
        ours = calls[last]
        theirs = [call for each in _statements(self.cells[-1]) if (call := check_in(each.node, self.target.id))]
        assert ours is not None
        if theirs and ast.dump(theirs[-1]) != ast.dump(ours):
            said = f'check("{self.target.id}", ...)'
            self.notes.insert(0, f"The call {said} in {self.cells[-1].file} is not the course's. {_OURS}")
        return [each for each in statements[: last + 1] if each is statements[last] or not only_displays(each.node)]

    def _run_cell(self, cell: Cell, final: bool) -> None:
        try:
            statements = _statements(cell)
        except SyntaxError as error:
            return self._failed(cell, error)
        if final and (checks := [n for n, each in enumerate(statements) if check_in(each.node, self.target.id)]):
            statements = statements[: checks[-1]]
        for each in statements:
            if only_displays(each.node):
                continue
            limit = None if isinstance(each.node, DEFINITIONS) else time_limit(STATEMENT_LIMIT_S, "your code")
            try:
                with limit or contextlib.nullcontext():
                    self._run_statement(each, quiet=cell.section != self.target.number)
            except TimeLimit as stop:
                if stop.limit is not limit:
                    raise  # somebody else's, around all of this
                self._failed(cell, stop)
            except (Exception, SystemExit) as error:
                self._failed(cell, error)

    def _run_statement(self, statement: _Statement, quiet: bool) -> None:
        replaced = [statement]
        if isinstance(statement.node, ast.FunctionDef):
            replaced = self.replaced.get(statement.node.name, replaced)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if quiet else sys.stdout):
            for each in replaced:
                module = ast.Module([each.node], type_ignores=[])
                exec(compile(module, each.file, "exec", dont_inherit=True), self.names)

    def _matters(self, cell: Cell) -> bool:
        """True for the cells of this puzzle, and for the set-up before the first puzzle."""
        before = self.cells[: self.cells.index(cell)]
        set_up = not cell.section and not any(each.section for each in before)
        return cell is self.cells[-1] or set_up or cell.section == self.target.number

    def _failed(self, cell: Cell, error: BaseException) -> None:
        """A failure where it matters ends the run; elsewhere it is a note."""
        if self._matters(cell):
            raise _Stop(error) from error
        place = f"Puzzle {cell.section}" if cell.section else "between the puzzles"
        where = _where(error, self.files)
        self.notes.append(f"{where or cell.file} ({place}) does not run: {_what(error)}")

    # -- overlays

    def lay(self, overlay: Path | str) -> None:
        """Prepares what replaces the holes of this puzzle, and of the ones before it."""
        if isinstance(overlay, Path):
            cells, name = read_cells(overlay), str(overlay)
        else:
            cells, name = [Cell("code", overlay, 1, "<overlay>")], "<overlay>"
            remember(name, overlay)
        for each in until(self.target)[:-1]:
            file = f"<solution of {each.id}>"
            remember(file, each.solution)
            self._lay_one(each, [Cell("code", each.solution, 1, file)], file)
        self.files |= {each.file for each in cells}
        if not self._lay_one(self.target, cells, name) and self.target.holes:
            holes = ", ".join(self.target.holes)
            raise CurriculumError(f"{name} defines no function for {self.target.id}: it has to define {holes}")

    def _lay_one(self, puzzle: Puzzle, cells: list[Cell], name: str) -> bool:
        try:
            statements = [each for cell in cells if cell.kind == "code" for each in _statements(cell)]
        except SyntaxError as error:
            raise _Stop(error) from error
        fills, helpers = self._sort(puzzle, statements)
        for hole, each in fills.items():
            if isinstance(each.node, ast.FunctionDef):
                wanted = self.book.functions[hole]
                theirs, ours = map(bare_signature, (each.node, wanted))
                if theirs != ours and not called_alike(each.node, wanted):
                    raise CurriculumError(
                        f"{name}:{each.node.lineno}: {theirs} is not what {puzzle.id} asks for: write it as {ours}"
                    )
            self.replaced[hole] = [each]
        filled = [hole for hole in puzzle.holes if hole in fills]
        late = {hole: hole for hole in filled}  # what is there behind which hole
        early: list[_Statement] = []
        for each in helpers:  # before all holes; what a value is made of, before that value
            names = names_bound(each.node) if isinstance(each.node, ast.Assign | ast.AnnAssign) else set()
            read = {n.id for n in ast.walk(each.node) if isinstance(n, ast.Name)} if names else set()
            if after := max((late[name] for name in read & late.keys()), key=filled.index, default=""):
                self.replaced[after].append(each)
                late |= dict.fromkeys(names, after)
            else:
                early.append(each)
        for first in filled[:1]:
            self.replaced[first] = [*early, *self.replaced[first]]
        return bool(fills)

    def _sort(self, puzzle: Puzzle, statements: list[_Statement]) -> tuple[dict[str, _Statement], list[_Statement]]:
        """What fills a hole, and what comes along: imports, constants, helpers. What the notebook gives stays."""
        fills, helpers, given = {}, [], self.book.given
        for each in statements:
            node, function = each.node, as_function(each.node)
            if function is not None and function.name in puzzle.holes:
                fills[function.name] = replace(each, node=function)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and (made := names_bound(node) & {*puzzle.holes}):
                fills |= dict.fromkeys(made, each)  # functions that others have made
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in given:
                place, mine = f"{each.file}:{node.lineno}: {node.name}", ast.unparse(node)
                ours = given[node.name]
                where, theirs = self._elsewhere.get(node.name, ("", None))
                if theirs and puzzle is self.target and not ast_equal(ast.unparse(theirs), mine):
                    self.notes.append(f"{place} belongs to {where}, and is left out: the course's own answer is used")
                elif node.name not in self.book.holes and not (ours and ast_equal(ast.unparse(ours), mine)):
                    self.notes.append(f"{place} is left out: the notebook's own is used")
            elif isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) or (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and not names_bound(node) & given.keys()
                and not only_displays(node)
            ):
                helpers.append(each)
        return fills, helpers

    @functools.cached_property
    def _elsewhere(self) -> dict[str, tuple[str, ast.FunctionDef]]:
        """Of the holes of other puzzles: its id, and the course's answer."""
        return {
            name: (each.id, node)
            for each in self.book.puzzles
            if each.id != self.target.id
            for name, node in top_functions(ast.parse(each.solution)).items()
        }

    # -- errors

    def stopped(self, error: BaseException) -> Verdict:
        """The verdict on a file that does not get as far as the check."""
        line = _where(error, self.files)
        begun = any(frame.f_code is check.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
        what = _what(error)
        cause = what if what.endswith("?") else f"{what}."
        here = f"the check of {self.target.id}"
        stops = f"ends {here}, which had begun" if begun else f"stops the notebook before {here}"
        earlier = [f"earlier, {self.notes[0]}"] if self.notes and isinstance(error, NameError) else []
        return Verdict(
            puzzle=self.target.id,
            status="error",
            findings=[Finding("error", cause, earlier, line)],
            word=f"Your code {stops}.",  # its line stands below, once
            next=f"{'Remove' if isinstance(error, SystemExit) else 'Fix'} that line, then check again.",
            notes=self.notes[:1],
            traceback="".join(traceback.format_exception(error)),
        )


def _statements(cell: Cell) -> list[_Statement]:
    """The top-level statements of a code cell, with the line numbers of its file. Raises SyntaxError."""
    return [_Statement(node, cell.file) for node in syntax_tree(cell).body]


def _where(error: BaseException, files: set[str]) -> SourceLine | None:
    """The reader's line that failed: the innermost frame in one of their files."""
    if isinstance(error, SyntaxError) and error.filename in files:
        return source_line(error.filename, error.lineno or 1)
    frames = [(each.f_code.co_filename, line) for each, line in traceback.walk_tb(error.__traceback__)]
    mine = [each for each in frames if each[0] in files]
    return source_line(*mine[-1]) if mine else None


def _what(error: BaseException) -> str:
    """One sentence, without a full stop: what Python says in the first line of its message."""
    if isinstance(error, SyntaxError):
        return f"Python cannot read this line: {error.msg}"
    if isinstance(error, SystemExit):
        return f"Your code leaves the program, as sys.exit({'' if error.code is None else repr(error.code)}) does"
    text = str(error).strip().splitlines()
    if isinstance(error, TimeLimit):
        return text[0][:1].upper() + text[0][1:].rstrip(".")
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__
