"""What a reader has put into a puzzle's holes, and what of the course's around them they have changed."""

import ast
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..diagnose.findings import Finding
from ..ir.capture import source_line, wrapped
from . import curriculum


def code_of(function: Any) -> Any:
    """The code of a Python function, whatever it is wrapped in; None of all else."""
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def holes_of(known: Any, names: Mapping[str, Any]) -> dict[str, types.CodeType]:
    """The code of the functions that the reader has put into the holes of a puzzle."""
    return {name: code for name in known.holes if (code := code_of(names.get(name))) is not None}


def as_function(statement: ast.stmt) -> ast.FunctionDef | None:
    """A function, also one that is written as `name = lambda ...`; None for other statements."""
    match statement:
        case ast.FunctionDef():
            return statement
        case ast.Assign([ast.Name(name)], ast.Lambda() as value):
            body = ast.copy_location(ast.Return(value.body), value.body)
            function = ast.FunctionDef(name, value.args, [body], [], type_params=[])
            return ast.fix_missing_locations(ast.copy_location(function, statement))
    return None


def parsed(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function, with the line numbers of its file; None where there is no source."""
    code = code_of(function)
    if code is None:
        return None
    try:
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]  # inspect looks through all modules
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))), code.co_filename)
    except SyntaxError:
        return None
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    return as_function(tree.body[0]) if tree.body else None


def unwritten(fn: Callable[..., Any], puzzles: Sequence[Any] | None = None) -> list[str]:
    """The holes of these puzzles, by default of all, that `fn` uses and that still hold the skeleton's code."""
    plain = wrapped(fn)
    names = getattr(plain, "__globals__", {})
    used = names_used(plain)
    found = []
    for puzzle in curriculum.all_puzzles() if puzzles is None else puzzles:
        holes = {n: getattr(names.get(n), "__code__", None) for n in puzzle.holes if n in used}
        found += untouched(puzzle, {n: c for n, c in holes.items() if c is not None})
    return [*dict.fromkeys(found)]  # two notebooks may have holes of one name


def unwritten_before(known: Any, fn: Callable[..., Any]) -> list[str]:
    """The holes of earlier puzzles that `fn` uses and that still hold the skeleton's code: "row_sum of basics/9"."""
    *earlier, _ = curriculum.until(known)
    missing = unwritten(fn, earlier)
    return [f"{hole} of {each.id}" for each in earlier for hole in each.holes if hole in missing]


def names_used(fn: Any) -> set[str]:
    """The names in a function, and in the functions of its own file that it calls, also by way of a custom_vjp."""
    names: dict[str, Any] = getattr(inspect.unwrap(fn), "__globals__", {})
    used: set[str] = set()
    seen, todo = set(), [fn]
    while todo:
        function = todo.pop()
        code = code_of(function)
        if code is None or code.co_name in seen or getattr(inspect.unwrap(function), "__globals__", None) is not names:
            continue
        seen.add(code.co_name)
        here = {code.co_name, *(name for inner in _with_inner([code]) for name in inner.co_names)}
        used |= here
        values = [names[name] for name in here if name in names]
        todo += [part for each in values for part in (each, getattr(each, "fwd", None), getattr(each, "bwd", None))]
    return used


def untouched(known: Any, holes: dict[str, types.CodeType]) -> list[str]:
    """The holes of a puzzle that still hold the skeleton's code."""
    return [name for name, code in holes.items() if _is_pristine(known, name, code)]


def _is_pristine(known: Any, name: str, code: types.CodeType) -> bool:
    return _program(code) in map(_program, curriculum.pristine_codes(known, name))


def helpers_of(known: Any, holes: dict[str, types.CodeType], names: Mapping[str, Any]) -> list[types.CodeType]:
    """The code of functions that the reader has written beside the holes."""
    files, given = {code.co_filename for code in holes.values()}, curriculum.notebook(known.path).given
    codes = [code_of(value) for name, value in names.items() if name not in given and callable(value)]
    return [c for c in codes if isinstance(c, types.CodeType) and c.co_filename in files]


_OURS = "The check has used the course's own."
_NOT_RECORDED = "This is about your version of the puzzle, and is not recorded."


def why_apart(
    known: Any,
    fn: Callable[..., Any],
    spec: Callable[..., Any],
    says_itself: bool,
    in_cases: bool,
    given: Mapping[str, Any],
    names: Mapping[str, Any],
) -> tuple[list[str], list[str]]:
    """Why a verdict is not one on the puzzle as the course asks it, and what else to say of changes; [] if it is.

    says_itself: the call says what to check. in_cases: the course does. given: what its notebook defines.
    """
    wanted, name = curriculum.checked(known), getattr(fn, "__name__", "something else")
    spec_name = getattr(spec, "__name__", "")
    changed_spec = [f"{each} was given and has been changed." for each in _changed(known, [spec_name], names)]
    if says_itself and in_cases:
        plain = f'check("{known.id}", {wanted})'
        why = [f"This call says itself what to check, so its verdict is not recorded. The course's check is {plain}."]
    elif not isinstance(fn, types.FunctionType) or name != wanted:
        why = [f"The course checks {wanted} here; you have checked {name}. So this verdict is not recorded."]
    else:
        changed = _changed(known, [wanted, *sorted(names_used(fn) - {wanted})], names)
        if wanted in given and wanted not in known.holes and _defaults(fn) != _defaults(given[wanted]):
            changed.insert(0, wanted)
        why = [f"{each} was given and has been changed. {_NOT_RECORDED}" for each in changed[:1]]
    if says_itself:
        return why + [f"{each} {_NOT_RECORDED}" for each in changed_spec], []
    return why, [f"{each} {_OURS}" for each in changed_spec]


def _defaults(fn: Callable[..., Any]) -> list[Any]:
    """The default values of a function's arguments; functions among them by their names."""
    parameters = inspect.signature(fn).parameters.values()
    return [(p.name, repr(getattr(p.default, "__name__", p.default))) for p in parameters]


def _changed(known: Any, names_of: Iterable[str], names: Mapping[str, Any]) -> list[str]:
    """Which of these functions the notebook gives, and the reader has changed."""
    book = curriculum.notebook(known.path)
    given = {name for name, node in book.functions.items() if name not in book.holes and not node.decorator_list}
    codes = [(name, code_of(names.get(name))) for name in names_of if name in given]
    return [name for name, code in codes if code is not None and not _is_pristine(known, name, code)]


def ranges_of(codes: Iterable[types.CodeType]) -> list[tuple[str, int, int]]:
    """(file, first line, last line) of each."""
    return [(code.co_filename, code.co_firstlineno, _last_line(code)) for code in codes]


def pointed_into_holes(
    findings: Sequence[Finding], holes: dict[str, types.CodeType], helpers: Sequence[types.CodeType]
) -> list[Finding]:
    """The findings with a line that the reader has written: not one of what was given around it."""
    called = {name for code in holes.values() for name in code.co_names}
    outermost = [code for name, code in holes.items() if name not in called]

    def line_for(finding: Finding) -> Any:
        near = (x for x in (finding.line, *finding.near, *finding.maps) if _is_in(x, [*holes.values(), *helpers]))
        named = (code for name, code in holes.items() if name in finding.cause)
        code = next(named, None) or [*outermost, *holes.values()][0]
        return next(near, None) or source_line(code.co_filename, code.co_firstlineno)

    return [f.but(line=line_for(f)) if holes else f for f in findings]


def function_at(line: Any, holes: dict[str, types.CodeType]) -> str:
    """The hole that a line of the reader's stands in, "" if it is in none."""
    return next((name for name, code in holes.items() if _is_in(line, [code])), "")


def _is_in(line: Any, codes: Iterable[types.CodeType]) -> bool:
    return line is not None and any(line.file == f and a <= line.line <= b for f, a, b in ranges_of(codes))


def _last_line(code: types.CodeType) -> int:
    lines = (line for each in _with_inner([code]) for _, _, line in each.co_lines() if line is not None)
    return max(lines, default=code.co_firstlineno)


def _with_inner(codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """Code objects, and those of the functions defined inside of them."""
    for code in codes:
        yield code
        yield from _with_inner([c for c in code.co_consts if isinstance(c, types.CodeType)])


def _program(code: types.CodeType) -> tuple[Any, ...]:
    """What a code object does, whatever file and line it stands in."""
    consts = tuple(_program(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, consts
