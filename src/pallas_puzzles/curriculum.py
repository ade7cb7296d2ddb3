"""Reads puzzles/*.py: notebooks, puzzles, cells, hints, holes; lays a solution over the holes, and runs a puzzle."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import io
import itertools
import linecache
import os
import re
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .watchdog import TimeLimit, time_limit

if TYPE_CHECKING:
    from .lens.capture import SourceLine
    from .verdict import Verdict

HOLE = "YOUR CODE HERE"
STATEMENT_LIMIT_S = 60.0  # for one statement before the check, which has limits of its own

CELL_MARKER = re.compile(r"^# %%(?:\s.*)?$")
PUZZLE_HEADING = re.compile(r"^## Puzzle (\w+): *(.+?) *$", re.MULTILINE)
SECTION_HEADING = re.compile(r"\s*##? \S")  # of the first line alone: a code block may hold comments
TITLE = re.compile(r"^# (.+?) *$", re.MULTILINE)
GOAL = re.compile(r"\*\*Goal\.\*\*\s*(.+?)(?:\n\s*\n|\Z)", re.DOTALL)
ORDER = re.compile(r"^#.*\border: *(\d+)", re.MULTILINE)
HINT = re.compile(r"<details>\s*<summary>.*?</summary>(.*?)</details>", re.DOTALL)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^(\s*)(?:[%!].*|\??[\w.]+\?{1,2}\s*)$")
PYTHON_MAGIC = re.compile(r"^\s*%%(?:time|timeit|capture|prun)\b")

SHOWS = {"check", "show", "hint", "progress"}  # what a notebook calls to display something


DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom  # what ends by itself


class CurriculumError(Exception):
    """What was asked for is not there, or does not fit; the message says what to do next."""


# ---- what a notebook is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell: its source starts on `line` of `file`; `section` is the number of the puzzle that it belongs to."""

    kind: str  # "code" | "markdown" | "raw"
    source: str  # markdown is uncommented
    line: int
    file: str = ""
    section: str = ""


@dataclass(frozen=True)
class Puzzle:
    """One puzzle. `skeletons` has the unsolved source of every hole, padded so that line numbers are the notebook's."""

    notebook: str  # "basics"
    number: str  # "9", "2a"
    title: str
    goal: str
    holes: tuple[str, ...]
    hints: tuple[str, ...]  # markdown
    solution: str  # the code of the last hint
    check_cell: int  # index into Notebook.cells
    path: Path
    line: int  # of the cell with its heading
    skeletons: dict[str, str] = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.notebook}/{self.number}"


@dataclass(frozen=True)
class Notebook:
    """One puzzles/NAME.py."""

    name: str
    order: int
    title: str
    path: Path
    cells: tuple[Cell, ...] = field(repr=False)
    puzzles: tuple[Puzzle, ...] = field(repr=False)


# ---- finding things --------------------------------------------------------------------------------------------------


def course_folder() -> Path:
    """The folder that holds puzzles/ and solutions/: inside the installed package, else the checkout.

    Authors of a course elsewhere name its folder in PALLAS_PUZZLES_COURSE.
    """
    if elsewhere := os.environ.get("PALLAS_PUZZLES_COURSE"):
        return Path(elsewhere).expanduser().resolve()
    package = Path(__file__).resolve().parent
    installed = package / "_course"
    return installed if installed.is_dir() else package.parents[1]


def notebooks(course: Path | None = None) -> list[Notebook]:
    """Every notebook of the course, in teaching order."""
    folder = (course or course_folder()) / "puzzles"
    found = [notebook(path) for path in sorted(folder.glob("*.py"))]
    if not found:
        raise CurriculumError(f"no puzzles in {folder}: install pallas-puzzles again, or run inside a checkout of it")
    return sorted(found, key=lambda each: (each.order, each.name))


def notebook(path: Path) -> Notebook:
    """One notebook, read again only when its file has changed."""
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


def all_puzzles(course: Path | None = None) -> list[Puzzle]:
    """Every puzzle of the course, in teaching order."""
    return [each for book in notebooks(course) for each in book.puzzles]


def puzzle(puzzle_id: str, *, course: Path | None = None) -> Puzzle:
    """The puzzle "basics/9". Raises CurriculumError, with the nearest names, when there is none."""
    # only the notebook that is asked for, when it is there: a check should not read the others
    path = (course or course_folder()) / "puzzles" / f"{puzzle_id.partition('/')[0]}.py"
    if re.fullmatch(r"\w+/\w+", puzzle_id) and path.is_file():
        for each in notebook(path).puzzles:
            if each.id == puzzle_id:
                return each
    ids = [each.id for each in all_puzzles(course)]
    close = difflib.get_close_matches(puzzle_id, ids, n=3, cutoff=0.5)
    near = f"did you mean {' or '.join(close)}? " if close else ""
    raise CurriculumError(f"there is no puzzle {puzzle_id!r}: {near}`puzzles list` shows them all")


def in_notebook(name: str, *, course: Path | None = None) -> list[Puzzle]:
    """The puzzles of one notebook, in order."""
    return [each for each in all_puzzles(course) if each.notebook == name]


def instructions(puzzle: Puzzle) -> str:
    """What a puzzle says before its first code cell, as markdown."""
    texts = []
    for each in notebook(puzzle.path).cells:
        if each.section == puzzle.number:
            if each.kind == "code":
                break
            texts.append(each.source)
    return "\n\n".join(texts)


def next_puzzle(puzzle_id: str, *, course: Path | None = None) -> Puzzle | None:
    """The puzzle after this one, in the next notebook if need be; None after the last."""
    here = puzzle(puzzle_id, course=course)
    everything = all_puzzles(course)
    position = [each.id for each in everything].index(here.id) + 1
    return everything[position] if position < len(everything) else None


def pristine_code(puzzle: Puzzle) -> dict[str, types.CodeType]:
    """The code object of every skeleton, to tell an untouched hole from the reader's work."""
    return {name: _code(source, name, puzzle.path) for name, source in puzzle.skeletons.items()}


def given_codes(puzzle: Puzzle, name: str) -> list[types.CodeType]:
    """The code object of a function that the course's notebook defines, [] where it defines no such function.

    Two of them: as compiled in a cell of its own, and in one file with the imports. Python 3.12 compiles a call on a
    module in another way when the same file imports that module.
    """
    book = notebook(puzzle.path)
    source = _given(book).get(name)
    if not source or not source.lstrip().startswith("def "):
        return []
    trees = [ast.parse(cell.source) for cell in book.cells if cell.kind == "code"]
    imports = [ast.unparse(n) for tree in trees for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    return [_code(text, name, puzzle.path) for text in (source, "\n".join([*imports, source]))]


def _code(source: str, name: str, path: Path) -> types.CodeType:
    module = compile(source, str(path), "exec", dont_inherit=True)
    return next(each for each in module.co_consts if isinstance(each, types.CodeType) and each.co_name == name)


def given_names(puzzle: Puzzle) -> frozenset[str]:
    """What the course's own notebook defines, holes included: every other name is the reader's."""
    return frozenset(_given(notebook(puzzle.path)))


def signature(puzzle: Puzzle, hole: str) -> str:
    """The signature of a hole as the puzzle gives it, without annotations: "row_sum_kernel(x_ref, o_ref)"."""
    if hole not in puzzle.skeletons:
        raise CurriculumError(f"{puzzle.id} has no hole {hole!r}: it has {', '.join(puzzle.holes) or 'none'}")
    return _signature(_functions(ast.parse(puzzle.skeletons[hole]))[hole])


def ast_equal(code_a: str, code_b: str) -> bool:
    """True if the two are the same program: comments, layout and docstrings do not count."""
    return _dump(ast.parse(code_a)) == _dump(ast.parse(code_b))


def _dump(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _signature(function: ast.FunctionDef) -> str:
    bare = ast.parse(ast.unparse(function.args).join(("def f(", "): pass"))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for node in ast.walk(bare.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"{function.name}({ast.unparse(bare.args)})"


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


# ---- parsing the percent format --------------------------------------------------------------------------------------


def read_cells(path: Path) -> list[Cell]:
    """The cells of a percent-format .py or of an .ipynb, each with the name its code is compiled under."""
    try:
        if path.suffix == ".ipynb":
            return sections(_ipynb_cells(path))
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise CurriculumError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or not a notebook
        raise CurriculumError(f"{path} is not a {path.suffix or 'text'} file that can be read: {error}") from None
    _remember(str(path), text)
    return cells_of(text, str(path))


def cells_of(text: str, file: str = "") -> list[Cell]:
    """The cells of a text in percent format."""
    return sections(_percent_cells(text, file))


def _percent_cells(text: str, file: str) -> Iterator[Cell]:
    lines = text.splitlines()
    markers = [number for number, line in enumerate(lines) if CELL_MARKER.match(line)]
    first = _header_length(lines)
    edges = [*markers, len(lines)]
    if any(line.strip() for line in lines[first : edges[0]]):
        yield Cell("code", "\n".join(lines[first : edges[0]]).rstrip(), first + 1, file)
    for start, end in itertools.pairwise(edges):
        body = lines[start + 1 : end]
        named = re.search(r"\[(markdown|md|raw)\]", lines[start])
        kind = "code" if named is None else "raw" if named[1] == "raw" else "markdown"
        if kind != "code":
            body = [re.sub(r"^# ?", "", line) for line in body]
        yield Cell(kind, "\n".join(body).rstrip(), start + 2, file)


def _header_length(lines: list[str]) -> int:
    """How many lines the YAML header takes, with its two rulers."""
    if not lines or lines[0].rstrip() != "# ---":
        return 0
    for number, line in enumerate(lines[1:], start=1):
        if line.rstrip() == "# ---":
            return number + 1
        if not line.startswith("#"):
            break
    return 0


def _ipynb_cells(path: Path) -> Iterator[Cell]:
    import nbformat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing cell id does not matter here
        try:
            node = nbformat.reads(path.read_text("utf-8-sig"), as_version=4)
        except (nbformat.ValidationError, AttributeError, KeyError) as error:
            raise ValueError(f"it has no {error}") from None
    for number, each in enumerate(node.cells, start=1):
        file = f"{path.name}[cell {number}]"
        source = "\n".join(each.source.splitlines())
        _remember(file, source)
        yield Cell(each.cell_type, source, 1, file)


def sections(cells: Iterator[Cell]) -> list[Cell]:
    """Says of each cell which puzzle it belongs to: the one whose heading came last."""
    section = ""
    made = []
    for each in cells:
        if each.kind == "markdown" and SECTION_HEADING.match(each.source):
            heading = PUZZLE_HEADING.search(each.source)
            section = heading[1] if heading else ""
        made.append(Cell(each.kind, each.source, each.line, each.file, section))
    return made


def _remember(file: str, text: str) -> None:
    """Lets tracebacks and the lens quote what was run, even when the file changes afterwards."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


@functools.lru_cache(maxsize=64)
def _parse(path: Path, mtime_ns: int, size: int) -> Notebook:
    cells = read_cells(path)
    text = path.read_text("utf-8-sig")
    header = "\n".join(text.splitlines()[: _header_length(text.splitlines())])
    order = ORDER.search(header)
    title = next((match[1] for each in cells if each.kind == "markdown" and (match := TITLE.search(each.source))), None)
    if order is None or title is None:
        missing = "`pallas_puzzles: {order: N}` in its header" if order is None else "a `# Title` in its first cell"
        raise CurriculumError(f"{path} is not a puzzle notebook: it has no {missing}")
    numbers = list(dict.fromkeys(each.section for each in cells if each.section))
    puzzles = tuple(_puzzle(path, cells, number) for number in numbers)
    return Notebook(path.stem, int(order[1]), title, path, tuple(cells), puzzles)


def _puzzle(path: Path, cells: list[Cell], number: str) -> Puzzle:
    mine = [each for each in cells if each.section == number]
    prose = "\n\n".join(each.source for each in mine if each.kind == "markdown")
    headings = PUZZLE_HEADING.findall(prose)
    check = _check_cell(cells, f"{path.stem}/{number}")
    where = f"{path}:{mine[0].line}"
    if len(headings) != 1:
        raise CurriculumError(f"{where}: Puzzle {number} is there {len(headings)} times: number the puzzles anew")
    if check is None:
        raise CurriculumError(f'{where}: Puzzle {number} has no cell with check("{path.stem}/{number}", ...): add one')
    goal = GOAL.search(prose)
    hints = tuple(match.strip() for match in HINT.findall(prose))
    skeletons: dict[str, str] = {}
    for each in mine:
        if each.kind == "code" and HOLE in each.source:
            skeletons |= _skeletons(each)
    return Puzzle(
        notebook=path.stem,
        number=number,
        title=headings[0][1],
        goal=" ".join(goal[1].split()) if goal else "",
        holes=tuple(skeletons),
        hints=hints,
        solution="\n\n".join(match.strip() for match in PYTHON_BLOCK.findall(hints[-1])) + "\n" if hints else "",
        check_cell=check,
        path=path,
        line=mine[0].line,
        skeletons=skeletons,
    )


def _skeletons(cell: Cell) -> dict[str, str]:
    """The top-level functions of a cell that hold the mark, each padded to its own line number."""
    try:
        body = ast.parse(cell.source).body
    except SyntaxError as error:
        raise CurriculumError(f"{cell.file}:{cell.line - 1 + (error.lineno or 1)}: {error.msg}") from None
    lines = cell.source.splitlines()
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.FunctionDef):
            continue
        start = _first_line(node)
        end = _first_line(following) - 1 if following else len(lines)  # a comment may end the function
        source = "\n".join(lines[start - 1 : end])
        if HOLE in source:
            found[node.name] = "\n" * (cell.line + start - 2) + source + "\n"
    return found


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _check_cell(cells: list[Cell], puzzle_id: str) -> int | None:
    """The last cell that checks this puzzle: the reader may have copied the call while trying things out."""
    call = re.compile(rf"\bcheck\(\s*[\"']{re.escape(puzzle_id)}[\"']")
    for number in range(len(cells) - 1, -1, -1):
        if cells[number].kind == "code" and puzzle_id in cells[number].source and call.search(cells[number].source):
            return number
    return None


# ---- running a puzzle ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statement:
    node: ast.stmt
    file: str


class _Stop(Exception):
    """Something failed before the check."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def run(
    puzzle_id: str,
    *,
    source: Path | None = None,
    overlay: Path | str | None = None,
    course: Path | None = None,
    judge: bool = True,
) -> Verdict:
    """Runs a notebook up to and including the check of one puzzle, and returns the verdict.

    `source` is the reader's .py or .ipynb (default: the course's own notebook). `overlay`, a file or a string of code,
    has functions to lay over the holes of this puzzle; the holes of earlier puzzles then get the course's solutions.
    Functions keep the file names and line numbers of where they are written. Checks of other puzzles, and whatever
    only displays something, are left out. What fails in the cells of other puzzles becomes a note of the verdict.
    judge=False: the check is reached and not run; the verdict on an answer then carries its `subject`.

    Raises CurriculumError for an unknown puzzle, a file that does not check it, or an overlay that does not fit.
    """
    target = puzzle(puzzle_id, course=course)
    path = source or target.path
    cells = read_cells(path)
    last = _check_cell(cells, puzzle_id)
    if last is None:
        raise CurriculumError(
            f'{path} has no call check("{puzzle_id}", ...): copy the cell with it from {target.path}, '
            f"or move the file away and run `puzzles init`"
        )
    session = _Session(target, path, cells[: last + 1])
    try:
        if overlay is not None:
            session.lay(overlay, notebook(target.path))
        return session.verdict(judge)
    except _Stop as stop:
        return session.stopped(stop.error)


class _Session:
    """One run of one puzzle: the reader's names, what replaces the holes, and what went wrong on the way."""

    def __init__(self, target: Puzzle, path: Path, cells: list[Cell]) -> None:
        self.target = target
        self.cells = cells
        # not "__main__": what stands behind that guard is for running the file as a script
        self.names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
        self.replaced: dict[str, list[_Statement]] = {}  # hole -> what runs in its place
        self.files = {each.file for each in cells}
        self.notes: list[str] = []
        self.elsewhere: dict[str, tuple[str, str]] = {}  # a hole of another puzzle -> its id, and the course's answer
        if path.suffix == ".ipynb":
            self.names["display"] = lambda *objects, **options: None  # IPython gives a notebook this name

    def verdict(self, judge: bool = True) -> Verdict:
        """Runs the cells; the verdict is the last one about this puzzle."""
        from .check import collecting

        with collecting(judge=judge) as verdicts:
            for each in self.cells:
                if each.kind == "code":
                    self._run_cell(each, final=each is self.cells[-1])
        mine = [each for each in verdicts if each.puzzle == self.target.id]
        if not mine:
            raise CurriculumError(
                f"the check of {self.target.id} in {self.cells[-1].file} was reached and gave no verdict: "
                f"is `check` there the one of pallas_puzzles, and is the call not behind an `if`?"
            )
        mine[-1].notes.extend(self.notes[:1])
        return mine[-1]

    def _run_cell(self, cell: Cell, final: bool) -> None:
        try:
            statements = _statements(cell)
        except SyntaxError as error:
            return self._failed(cell, error, final)
        checks = [number for number, each in enumerate(statements) if _checks(each.node, self.target.id)]
        end = checks[-1] + 1 if final and checks else len(statements)
        for number, each in enumerate(statements[:end]):
            wanted = final and checks and number == checks[-1]
            if _only_displays(each.node) and not wanted:
                continue
            limit = None if wanted or isinstance(each.node, DEFINITIONS) else time_limit(STATEMENT_LIMIT_S, "your code")
            try:
                with limit or contextlib.nullcontext():
                    self._run_statement(each, quiet=cell.section != self.target.number)
            except TimeLimit as stop:
                if stop.limit is not limit:
                    raise  # somebody else's, around all of this
                self._failed(cell, stop, final)
            except (Exception, SystemExit) as error:
                self._failed(cell, error, final)

    def _run_statement(self, statement: _Statement, quiet: bool) -> None:
        replaced = [statement]
        if isinstance(statement.node, ast.FunctionDef):
            replaced = self.replaced.get(statement.node.name, replaced)
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            for each in replaced:
                module = ast.Module([each.node], type_ignores=[])
                exec(compile(module, each.file, "exec", dont_inherit=True), self.names)

    def _failed(self, cell: Cell, error: BaseException, final: bool) -> None:
        """A failure in this puzzle, or in the set-up before the first, ends the run; elsewhere it is a note."""
        before = self.cells[: self.cells.index(cell)]
        set_up = not cell.section and not any(each.section for each in before)
        if final or set_up or cell.section == self.target.number:
            raise _Stop(error) from error
        place = f"Puzzle {cell.section}" if cell.section else "between the puzzles"
        where = _where(error, self.files)
        self.notes.append(f"{where or cell.file} ({place}) does not run: {_what(error)}")

    # -- overlays

    def lay(self, overlay: Path | str, book: Notebook) -> None:
        """Prepares what replaces the holes of this puzzle, and of the ones before it."""
        if isinstance(overlay, Path):
            cells, name = read_cells(overlay), str(overlay)
        else:
            cells, name = [Cell("code", overlay, 1, "<overlay>")], "<overlay>"
            _remember(name, overlay)
        given = _given(book)
        self.elsewhere = {
            name: (each.id, ast.unparse(node))
            for each in book.puzzles
            if each.id != self.target.id
            for name, node in _functions(ast.parse(each.solution)).items()
        }
        for each in book.puzzles[: book.puzzles.index(self.target)]:
            file = f"<solution of {each.id}>"
            _remember(file, each.solution)
            self._lay_one(each, [Cell("code", each.solution, 1, file)], given, file)
        self.files |= {each.file for each in cells}
        if not self._lay_one(self.target, cells, given, name) and self.target.holes:
            holes = ", ".join(self.target.holes)
            raise CurriculumError(f"{name} defines no function for {self.target.id}: it has to define {holes}")

    def _lay_one(self, puzzle: Puzzle, cells: list[Cell], given: dict[str, str], name: str) -> bool:
        try:
            statements = [each for cell in cells if cell.kind == "code" for each in _statements(cell)]
        except SyntaxError as error:
            raise _Stop(error) from error
        fills, helpers = self._sort(puzzle, statements, given)
        for hole, each in fills.items():
            assert isinstance(each.node, ast.FunctionDef)
            theirs, ours = _signature(each.node), signature(puzzle, hole)
            if theirs != ours:
                raise CurriculumError(
                    f"{name}:{each.node.lineno}: {theirs} is not what {puzzle.id} asks for: write it as {ours}"
                )
            self.replaced[hole] = [each]
        for first in [hole for hole in puzzle.holes if hole in fills][:1]:
            self.replaced[first] = [*helpers, fills[first]]
        return bool(fills)

    def _sort(
        self, puzzle: Puzzle, statements: list[_Statement], given: dict[str, str]
    ) -> tuple[dict[str, _Statement], list[_Statement]]:
        """What fills a hole, and what comes along: imports, constants, helpers. What the notebook gives stays."""
        fills, helpers = {}, []
        for each in statements:
            node = each.node
            if isinstance(node, ast.FunctionDef) and node.name in puzzle.holes:
                fills[node.name] = each
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in given:
                place, mine = f"{each.file}:{node.lineno}: {node.name}", ast.unparse(node)
                where, theirs = self.elsewhere.get(node.name, ("", ""))
                if where and puzzle is self.target and not ast_equal(theirs, mine):
                    self.notes.append(f"{place} belongs to {where}, and is left out: the course's own answer is used")
                elif HOLE not in given[node.name] and not ast_equal(given[node.name], mine):
                    self.notes.append(f"{place} is left out: the notebook's own is used")
            elif isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef) or (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and not _names(node) & given.keys()
                and not _only_displays(node)
            ):
                helpers.append(each)
        return fills, helpers

    # -- errors

    def stopped(self, error: BaseException) -> Verdict:
        """The verdict on a file that does not get as far as the check."""
        from .lens.findings import Finding
        from .verdict import Verdict

        line = _where(error, self.files)
        place = f"It stands at {line}" if line else "It happens"
        cause = f"{_what(error)}. {place}, before the check is reached."
        earlier = [f"earlier, {self.notes[0]}"] if self.notes and isinstance(error, NameError) else []
        return Verdict(
            puzzle=self.target.id,
            status="error",
            findings=[Finding("error", cause, earlier, line)],
            headline=f"{line or 'Your file'} stops the notebook before the check of {self.target.id}",
            next="Fix that line, then check again.",
            notes=self.notes[:1],
            traceback="".join(traceback.format_exception(error)),
        )


def _statements(cell: Cell) -> list[_Statement]:
    """The top-level statements of a code cell, with the line numbers of its file. Raises SyntaxError."""
    return [_Statement(node, cell.file) for node in _tree(cell).body]


@functools.lru_cache(maxsize=1024)
def _tree(cell: Cell) -> ast.Module:
    padding = "\n" * (cell.line - 1)
    if cell.source.lstrip().startswith("%%"):
        first, _, rest = cell.source.lstrip().partition("\n")
        return ast.parse("\n" + padding + rest if PYTHON_MAGIC.match(first) else "", cell.file)
    lines = cell.source.splitlines()
    while True:
        try:
            return ast.parse(padding + "\n".join(lines), cell.file)
        except SyntaxError as error:
            # only here: a line of a string, or of a long sum, may start with % too
            at = (error.lineno or 0) - cell.line
            if not (0 <= at < len(lines) and MAGIC.match(lines[at])):
                raise
            lines[at] = MAGIC.sub(r"\1pass", lines[at])


def _call_name(node: ast.AST) -> str:
    """The name of the function that an expression calls, "" if it does not call one."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def _only_displays(node: ast.stmt) -> bool:
    """True for `show(...)` and its like, alone or assigned to a name, and for what waits until a hole is filled."""
    if isinstance(node, ast.If):
        return any(_call_name(each) == "unwritten" for each in ast.walk(node.test))
    if isinstance(node, ast.Expr) and _call_name(node.value) == "tpu_report":
        return True
    value = node.value if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) else getattr(node, "test", None)
    if isinstance(node, ast.While) or value is None:
        return False
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in SHOWS


def _checks(node: ast.stmt, puzzle_id: str) -> bool:
    for each in ast.walk(node):
        if _call_name(each) == "check" and isinstance(each, ast.Call) and each.args:
            first = each.args[0]
            if isinstance(first, ast.Constant) and first.value == puzzle_id:
                return True
    return False


def _names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _given(book: Notebook) -> dict[str, str]:
    """What the notebook itself defines, name -> source."""
    found = {}
    for cell in book.cells:
        if cell.kind != "code":
            continue
        for node in _tree(cell).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = _first_line(node) - cell.line
                found[node.name] = "\n".join(cell.source.splitlines()[start : (node.end_lineno or 0) - cell.line + 1])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= dict.fromkeys(_names(node), "")
    return found


def _where(error: BaseException, files: set[str]) -> SourceLine | None:
    """The reader's line that failed: the innermost frame in one of their files."""
    from .lens.capture import SourceLine

    if isinstance(error, SyntaxError) and error.filename in files:
        place = (error.filename, error.lineno or 1)
    else:
        frames = [(each.f_code.co_filename, line) for each, line in traceback.walk_tb(error.__traceback__)]
        mine = [each for each in frames if each[0] in files]
        if not mine:
            return None
        place = mine[-1]
    assert place[0] is not None
    return SourceLine(place[0], place[1], linecache.getline(*place).strip())


def _what(error: BaseException) -> str:
    """One sentence, without a full stop: what Python says in the first line of its message."""
    if isinstance(error, SyntaxError):
        return f"Python cannot read this line: {error.msg}"
    text = str(error).strip().splitlines()
    if isinstance(error, TimeLimit):
        return text[0][:1].upper() + text[0][1:].rstrip(".")
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__
