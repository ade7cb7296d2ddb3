"""Reads puzzles/*.py: notebooks, puzzles, cells, hints, holes; lays a solution over the holes, and runs a puzzle."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import itertools
import json
import linecache
import os
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..files import signature_of
from ..installation import PACKAGE, ROOT

HOLE = "YOUR CODE HERE"

CELL_MARKER = re.compile(r"^# %%(?:\s.*)?$")
PUZZLE_HEADING = re.compile(r"^## Puzzle (\w+): *(.+?) *$", re.MULTILINE)
# What app/notebooks.py adds to text for Colab: two kinds of cells, and an anchor in a heading
PUBLISHED = re.compile(r'\A\[!\[Open in Colab\].*|\ANext(?: notebook)?: \[.*|<a id="scrollTo=[\w-]+"></a>', re.DOTALL)
SECTION_HEADING = re.compile(r"\s*##? \S")  # of the first line alone: a code block may hold comments
TITLE = re.compile(r"^# (.+?) *$", re.MULTILINE)
GOAL = re.compile(r"\*\*Goal\.\*\*\s*(.+?)(?:\n\s*\n|\Z)", re.DOTALL)
ORDER = re.compile(r"^#.*\border: *(\d+)", re.MULTILINE)
HEADER = re.compile(r"\A# --- *\n(?:#.*\n)*?# --- *\n")  # YAML, with its two rulers
HINT = re.compile(r"<details>\s*<summary>.*?</summary>(.*?)</details>", re.DOTALL)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MAGIC = re.compile(r"^(\s*)(?:[%!].*|\??[\w.]+\?{1,2}\s*)$")
FOR_GPU = re.compile(r"""^setup\(["']gpu["']\)""", re.MULTILINE)
PYTHON_MAGIC = re.compile(r"^\s*%%(?:time|timeit|capture|prun)\b")

SHOWS = {"check", "show", "hint", "progress"}  # what a notebook calls to display something; in a line alone, show_...
REPORTS = {"tpu_report", "compare", "visualize_array_sharding"}  # for a result, or, in a line alone, to display one


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

    @property
    def holes(self) -> set[str]:
        """The functions that are for the reader to write, in all of its puzzles."""
        return {hole for puzzle in self.puzzles for hole in puzzle.holes}

    @functools.cached_property
    def statements(self) -> list[tuple[Cell, ast.stmt]]:
        """What its code consists of at the top level, each with its cell."""
        return [(cell, node) for cell in self.cells if cell.kind == "code" for node in syntax_tree(cell).body]

    @functools.cached_property
    def definitions(self) -> list[tuple[str, types.CodeType]]:
        """(name, code) of all that it defines at its top level, in order; "" where a name is bound elsewhere."""
        found = []
        for cell, node in self.statements:
            method = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.func
            completes = isinstance(method, ast.Attribute) and method.attr == "defvjp"
            defines = isinstance(node, DEFINITIONS | ast.Assign | ast.AnnAssign)
            if completes or (defines and not only_displays(node)):
                code = compile(ast.Module([node], type_ignores=[]), cell.file, "exec", dont_inherit=True)
                found.append((getattr(node, "name", ""), code))
        return found

    @functools.cached_property
    def given(self) -> dict[str, ast.FunctionDef | ast.ClassDef | None]:
        """Its names, holes included, each with its function or class, or None: all other names are the reader's."""
        found: dict[str, ast.FunctionDef | ast.ClassDef | None] = {}
        for _, node in self.statements:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= dict.fromkeys(names_bound(node))
        return found

    @functools.cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The functions that it gives, by their names."""
        return {node.name: node for _, node in self.statements if isinstance(node, ast.FunctionDef)}

    @property
    def accelerator(self) -> str:
        """What its kernels are for: the "tpu" or "gpu" of its call of `setup`."""
        return "gpu" if any(cell.kind == "code" and FOR_GPU.search(cell.source) for cell in self.cells) else "tpu"


# ---- finding things --------------------------------------------------------------------------------------------------


def course_folder() -> Path:
    """The folder that holds puzzles/ and solutions/: inside the installed package, else the checkout.

    Authors of a course elsewhere name its folder in PALLAS_PUZZLES_COURSE.
    """
    if elsewhere := os.environ.get("PALLAS_PUZZLES_COURSE"):
        return Path(elsewhere).expanduser().resolve()
    installed = PACKAGE / "_course"
    return installed if installed.is_dir() else ROOT


def notebooks() -> list[Notebook]:
    """Every notebook of the course, in teaching order."""
    folder = course_folder() / "puzzles"
    found = [notebook(path) for path in sorted(folder.glob("*.py"))]
    if not found:
        raise CurriculumError(f"no puzzles in {folder}: install pallas-puzzles again, or run inside a checkout of it")
    return sorted(found, key=lambda each: (each.order, each.name))


def notebook(path: Path) -> Notebook:
    """One notebook, read again only when its file has changed."""
    return _parse(path, *signature_of(path))


def all_puzzles() -> list[Puzzle]:
    """Every puzzle of the course, in teaching order."""
    return [each for book in notebooks() for each in book.puzzles]


def puzzle(puzzle_id: str) -> Puzzle:
    """The puzzle "basics/9". Raises CurriculumError, with the nearest names, when there is none."""
    # only the notebook that is asked for, when it is there: a check should not read the others
    path = course_folder() / "puzzles" / f"{puzzle_id.partition('/')[0]}.py"
    if re.fullmatch(r"\w+/\w+", puzzle_id) and path.is_file():
        for each in notebook(path).puzzles:
            if each.id == puzzle_id:
                return each
    ids = [each.id for each in all_puzzles()]
    close = difflib.get_close_matches(puzzle_id, ids, n=3, cutoff=0.5)
    near = f"did you mean {' or '.join(close)}? " if close else ""
    raise CurriculumError(f"there is no puzzle {puzzle_id!r}: {near}`puzzles list` shows them all")


def in_notebook(name: str) -> list[Puzzle]:
    """The puzzles of one notebook, in order."""
    return [each for each in all_puzzles() if each.notebook == name]


def until(puzzle: Puzzle) -> tuple[Puzzle, ...]:
    """The puzzles of its notebook up to this one, which is the last."""
    book = notebook(puzzle.path).puzzles
    return book[: book.index(puzzle) + 1]


def instructions(puzzle: Puzzle) -> str:
    """What a puzzle says before its first code cell, as markdown."""
    mine = [each for each in notebook(puzzle.path).cells if each.section == puzzle.number]
    return "\n\n".join(each.source for each in itertools.takewhile(lambda each: each.kind != "code", mine))


def next_puzzle(puzzle_id: str) -> Puzzle | None:
    """The puzzle after this one, in the next notebook if need be; None after the last."""
    everything = all_puzzles()
    position = [each.id for each in everything].index(puzzle(puzzle_id).id) + 1
    return everything[position] if position < len(everything) else None


def pristine_codes(puzzle: Puzzle, name: str) -> list[types.CodeType]:
    """The code object of a function as the course's notebook has it, [] where it has no such function.

    Two of them: as compiled in a cell of its own, and in one file with the imports. Python 3.12 compiles a call on a
    module in another way when the same file imports that module.
    """
    book = notebook(puzzle.path)
    if name not in book.functions:
        return []
    alone: list[ast.stmt] = [book.functions[name]]
    imports = [node for _, node in book.statements if isinstance(node, ast.Import | ast.ImportFrom)]
    bodies = alone, [*imports, *alone]
    modules = [compile(ast.Module(each, type_ignores=[]), name, "exec", dont_inherit=True) for each in bodies]
    codes = [each for module in modules for each in module.co_consts if isinstance(each, types.CodeType)]
    return [each for each in codes if each.co_name == name]


def checked(puzzle: Puzzle) -> str:
    """The name of the function that the course's check cell checks."""
    call = check_in(syntax_tree(notebook(puzzle.path).cells[puzzle.check_cell]), puzzle.id)
    return ast.unparse(call.args[1]) if call and len(call.args) > 1 else ""


def ast_equal(code_a: str, code_b: str) -> bool:
    """True if the two are the same program: comments, layout and docstrings do not count."""
    return code_a == code_b or _dump(ast.parse(code_a)) == _dump(ast.parse(code_b))


def _dump(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            node.body = node.body[ast.get_docstring(node, clean=False) is not None :] or [ast.Pass()]
    return ast.dump(tree)


def bare_signature(function: ast.FunctionDef) -> str:
    """Without annotations: "row_sum_kernel(x_ref, o_ref)"."""
    bare = copy.deepcopy(function.args)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return f"{function.name}({ast.unparse(bare)})"


def called_alike(function: ast.FunctionDef, other: ast.FunctionDef) -> bool:
    """Whether a function takes all that another one takes, its first arguments by other names or as *args."""
    mine, theirs = function.args, other.args
    names, wanted = ([arg.arg for arg in (*args.posonlyargs, *args.args)] for args in (mine, theirs))
    exchanged = names != wanted and sorted(names) == sorted(wanted)
    named = {arg.arg for arg in mine.kwonlyargs}
    return (
        not exchanged
        and (len(names) == len(wanted) or (mine.vararg is not None and len(names) < len(wanted)))
        and (mine.kwarg is not None or named >= {arg.arg for arg in theirs.kwonlyargs})
        and (theirs.vararg is None or mine.vararg is not None)
        and not theirs.defaults[len(mine.defaults) :]
    )


def top_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
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
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CurriculumError(f"{path} is not UTF-8 (line {line}): save it as UTF-8, then check again") from None
    except ValueError as error:
        raise CurriculumError(f"{path} is not a notebook that can be read: {error}") from None
    remember(str(path), text)
    return cells_of(text, str(path))


def cells_of(text: str, file: str = "") -> list[Cell]:
    """The cells of a text in percent format."""
    return sections(_percent_cells(text, file))


def _percent_cells(text: str, file: str) -> Iterator[Cell]:
    lines = text.splitlines()
    markers = [number for number, line in enumerate(lines) if CELL_MARKER.match(line)]
    header = HEADER.match(text)
    first = header[0].count("\n") if header else 0
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


def _ipynb_cells(path: Path) -> Iterator[Cell]:
    text = path.read_text("utf-8-sig")
    try:
        cells = [(each["cell_type"], "".join(each["source"])) for each in json.loads(text)["cells"]]
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    except (KeyError, TypeError):
        raise ValueError("its JSON is not that of a notebook") from None
    for number, (kind, written) in enumerate(cells, start=1):
        file = f"{path.name}[cell {number}]"
        source = "\n".join(written.splitlines())
        remember(file, source)
        yield Cell(kind, source, 1, file)


def sections(cells: Iterator[Cell]) -> list[Cell]:
    """Says of each cell which puzzle it belongs to: the one whose heading came last. Leaves out what is PUBLISHED."""
    section = ""
    made = []
    for each in cells:
        source = PUBLISHED.sub("", each.source) if each.kind == "markdown" else each.source
        if each.source and not source:
            continue
        if each.kind == "markdown" and SECTION_HEADING.match(source):
            heading = PUZZLE_HEADING.search(source)
            section = heading[1] if heading else ""
        made.append(Cell(each.kind, source, each.line, each.file, section))
    return made


def remember(file: str, text: str) -> None:
    """Lets tracebacks and the lens quote what was run, even when the file changes afterwards."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


@functools.lru_cache(maxsize=64)
def _parse(path: Path, mtime_ns: int, size: int) -> Notebook:
    cells = read_cells(path)
    header = HEADER.match(path.read_text("utf-8-sig"))
    order = ORDER.search(header[0]) if header else None
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
    check = find_check(cells, f"{path.stem}/{number}")
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


def find_check(cells: list[Cell], puzzle_id: str) -> int | None:
    """The last cell that checks this puzzle: the reader may have copied the call while trying things out."""
    call = re.compile(rf"\bcheck\(\s*[\"']{re.escape(puzzle_id)}[\"']")
    return max((n for n, each in enumerate(cells) if each.kind == "code" and call.search(each.source)), default=None)


@functools.lru_cache(maxsize=1024)
def syntax_tree(cell: Cell) -> ast.Module:
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


def only_displays(node: ast.stmt) -> bool:
    """True for `show(...)` and its like, alone, assigned to a name or under a condition, and for what waits until a
    hole is filled."""
    match node:
        case ast.If(test, body, orelse):
            waits = any(_call_name(each) == "unwritten" for each in ast.walk(test))
            return waits or all(map(only_displays, [*body, *orelse]))
        case ast.Expr(value) if _call_name(value) in REPORTS:
            return True
        case ast.Expr(ast.Call(ast.Name(name))) | ast.Assert(ast.Call(ast.Name(name))):
            return name in SHOWS or name.startswith("show_")
        case ast.Assign(value=ast.Call(ast.Name(name))) | ast.AnnAssign(value=ast.Call(ast.Name(name))):
            return name in SHOWS
    return False


def check_in(node: ast.AST, puzzle_id: str) -> ast.Call | None:
    """The call in a statement that checks a puzzle."""
    for each in ast.walk(node):
        match each:
            case ast.Call(args=[ast.Constant(value), *_]) if value == puzzle_id and _call_name(each) == "check":
                return each
    return None


def names_bound(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
