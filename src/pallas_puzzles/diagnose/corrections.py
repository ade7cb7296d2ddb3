"""Differences that matter -> what the reader is told of them: where, what stands there, and what should."""

import ast
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .differences import SHOWN, Difference, Functions, Path, Replaced, applied, moves, share
from .straight import VERSION, condition_of, copy_of, is_step, name_of, reads_of

_BARE = 8  # characters that say nothing without what stands around them
_WORTH_DOTS = 12  # characters of what two programs share: fewer are told
_CONTEXT = 44  # characters of what stands around a small difference
_LIKE = 0.5  # how much of two expressions is the same, if one is shown as an example of the other
_FEW_VALUES = 3  # of which one may be what is wrong


@dataclasses.dataclass(frozen=True)
class Correction:
    """One place that has to change: lines of the reader's file, counted from 1. called: what to call the function.
    said: what is said of the place, without a full stop. helper: the one outside of it that the place is in. told: it
    says what should be there. tried: whoever does all that is said of an answer gets everything right; doubted: whoever
    does it does not.

    whole: the whole function differs, and nothing is said of a place inside of it. values: the lines that give names to
    values which are used there.
    """

    function: str
    line: int
    last_line: int
    called: str
    said: str = ""
    told: bool = True
    whole: bool = False
    edits: "tuple[Edit, ...]" = ()
    values: frozenset[int] = frozenset()
    helper: str = ""
    tried: bool = False
    doubted: bool = False

    @property
    def new_names(self) -> frozenset[str]:
        """The names that are read in what comes."""
        return frozenset().union(*(reads_of(ast.parse(each.new)) for each in self.edits))

    @property
    def words(self) -> str:
        called = f"`{self.helper}`" if self.helper else self.called
        return called if self.whole else f"in {called}, {self.said}"

    def covers(self, line: int) -> bool:
        return self.line <= line <= self.last_line


@dataclasses.dataclass(frozen=True)
class Edit:
    """What a reader who follows a correction does: `new` in the place of `old`, a node of the answer ("": it goes).

    behind, before: where nothing stands that is replaced, the statement that the new one comes next to.
    """

    new: str
    old: ast.AST | None = None
    behind: ast.AST | None = None
    before: ast.AST | None = None

    @property
    def key(self) -> Any:
        """The same for edits that do the same in one place."""
        return self.new, *map(_where, (self.old, self.behind, self.before))

    @property
    def place(self) -> Any:
        """Where the text stands that is replaced."""
        return _where(self.old)


def corrections(
    answer: Functions,
    chosen: Sequence[Difference],
    calls: Mapping[str, str],
    named: Mapping[str, Mapping[str, str]],
    *,
    moved: Sequence[Difference] = (),
    statements: bool = False,
    tell: str = "what",
) -> list[Correction]:
    """What to say of differences that matter, those close together as one: first those that say what should be there.

    calls: how to call a function that belongs to another puzzle than the one that is checked. named: by function, the
    names that the reader has given to values, by the text of the value. moved: where a statement that is missing in one
    place is too much in another, as one of these differences, say where it belongs. statements: say all of whole
    statements. tell: "what" should be there; what it is "like"; only "where" it is.
    """
    found = []
    # a name that the reader is to give in another place, or no more, stands for nothing
    lost = {name_of(d.was.targets[0]) for d in chosen if isinstance(d.was, ast.Assign) and d.should is None}
    for f, names in named.items() if lost else ():
        named = {**named, f: Names({v: n for v, n in names.items() if n not in lost}, arguments(names))}
    for gone, new in moves(chosen, moved):
        chosen = [each for each in chosen if each not in (gone, new)]
        found.append(_moved(answer[gone.function], gone, new, calls, named.get(gone.function, {})))
    for each in [d for d in chosen if hasattr(d.was, "around") or hasattr(d.should, "around")]:
        chosen = [d for d in chosen if d is not each]
        found.append(_conditional(answer[each.function], each, calls, named.get(each.function, {})))
    chosen = [_bound_already(answer, each) for each in chosen]
    for group in _together(answer, chosen, named, statements):
        name = group.differences[0].function
        called = calls.get(name, f"`{name}`")
        if group.differences[0].whole:
            node = answer[name]
            last = node.end_lineno or node.lineno
            found.append(Correction(name, node.lineno, last, called, told=False, whole=True))
        else:
            own = getattr(group.differences[0].was, "use", None)  # a name is not used in its own definition
            names = named.get(name, {})
            was = ast.unparse(group.differences[0].was or ast.Pass())
            unbound = {getattr(own, "id", None), *(each for each, _ in _beside(answer[name], group.path))}
            other = {v: each for v, each in names.items() if each not in unbound and v != was}
            mine = Names(other, arguments(names))
            words, told = _words(answer, group, mine, tell)
            words = _as_written(words)
            edit = _edit(answer, group, mine)
            line, last = group.lines(answer[name])
            values = _lines_of_values(answer[name], _at(answer[name], group.path))
            found.append(Correction(name, line, last, called, words, told, False, (edit,), values))
    if tell != "what":  # nobody has tried what is said
        found = [dataclasses.replace(c, told=False) for c in found]
    else:
        found = _with_values(found)
    once: dict[tuple[int, str], Correction] = {}
    for c in found:
        once.setdefault((c.line, c.words), c)
    return sorted(once.values(), key=lambda c: (not c.told, c.line))


def _beside(function: ast.FunctionDef, path: Path) -> list[tuple[str, ast.expr]]:
    """The names that are given together with the one of a statement, and their values."""
    return getattr(_at(function, _statement(function, path)), "beside", []) if path else []


def _bound_already(answer: Functions, d: Difference) -> Difference:
    """The difference, with values in the places of names that are given in the same assignment."""
    should = d.should
    for name, value in _beside(answer[d.function], d.path) if should is not None else ():
        should = Replaced(ast.Name(name, ast.Load()), value).visit(copy_of(should))
    return dataclasses.replace(d, should=should)


def _with_values(found: Sequence[Correction]) -> list[Correction]:
    """The corrections; what only gives a name to a value is told with the first one that uses the name."""
    given = {c: name for c in found if (name := _gives(c))}
    used = {name: next((c for c in found if c not in given and name in c.new_names), None) for name in given.values()}
    kept = []
    for c in found:
        mine = [each for each, name in given.items() if used[name] is c]
        if used.get(given.get(c, "")) is None:
            more = "".join(f", with `{each.edits[0].new}`" for each in mine)
            edits = (*(edit for each in mine for edit in each.edits), *c.edits)
            kept.append(dataclasses.replace(c, said=f"{c.said}{more}", edits=edits))
    return kept


def _gives(c: Correction) -> str:
    """The name of the value that a correction puts in front of what is there, "" if it does anything else."""
    if len(c.edits) != 1 or not c.told or isinstance(c.edits[0].old, ast.expr):
        return ""
    match ast.parse(c.edits[0].new).body:
        case [ast.Assign([ast.Name(name)])] if name not in _named_by(c.edits[0].old):
            return name
    return ""


def _moved(
    function: ast.FunctionDef, gone: Difference, new: Difference, names: Mapping[str, str], named: Mapping[str, str]
) -> Correction:
    """What to say of a statement in the wrong place. It is the reader's own that is moved."""
    field, n = new.path[-1]
    body = getattr(_at(function, new.path[:-1]), field)
    beside = body[n - 1] if n else body[0]
    called, when = names.get(gone.function, f"`{gone.function}`"), "late" if new.line < gone.line else "early"
    mine = getattr(gone.was, "written", gone.was)
    what, where = (_beginning(_text(each, named)) for each in (mine, getattr(beside, "written", beside)))
    side, around = "behind" if n else "in front of", (*new.path[:-1], (field, max((n or 0) - 1, 0)))
    words = f"{what} comes too {when}: it belongs {side} {where}"
    if gone.path[: len(around)] == around and condition_of(beside) is not None:
        words = f"{what} belongs {side} `@{_text(beside.decorator_list[0], named)}`, and not under it"
    there = Edit(_program(mine, named), **{"behind" if n else "before": beside})
    last = getattr(gone.was, "end_lineno", None) or gone.line
    return Correction(gone.function, gone.line, last, called, _as_written(words), edits=(Edit("", gone.was), there))


def _conditional(
    function: ast.FunctionDef, found: Difference, names: Mapping[str, str], named: Mapping[str, str]
) -> Correction:
    """What to say of statements that belong under a condition, or of a condition that does not belong there."""
    called, under = names.get(found.function, f"`{found.function}`"), _at(function, found.path[:-2])
    if hasattr(found.should, "around"):
        words = f"`@{_text(under.decorator_list[0], named)}` does not belong here, as what is under it is for all cases"
        goes = Edit("True", getattr(found.was, "use", found.was))
        return Correction(found.function, found.line, found.line, called, _as_written(words), edits=(goes,))
    body: list[Any] = found.was.around  # type: ignore[union-attr]
    when: Any = copy_of(under.decorator_list[0])
    when.args = [found.should]
    condition = _text(when, named)
    first, last, told = body[0].lineno, body[-1].end_lineno, len(condition) <= SHOWN
    what = f"lines {first} to {last} belong" if len(body) > 1 else f"{_beginning(_text(body[0], named))} belongs"
    words = f"{what} under {f'`@{condition}`' if told else 'a condition'}"
    new = "\n    ".join([f"@{_program(when, named)}\ndef _():", *(_program(each, named) for each in body)])
    edits = (Edit(new, body[0]), *(Edit("", each) for each in body[1:]))
    return Correction(found.function, first, last, called, _as_written(words), told, edits=edits)


def _beginning(text: str) -> str:
    """A statement, or as much of its first line as is shown."""
    first, *more = text.splitlines()
    return f"`{first[:SHOWN].rstrip()} ...`" if more or len(first) > SHOWN else f"`{first}`"


def _lines_of_values(function: ast.FunctionDef, node: ast.AST | None) -> frozenset[int]:
    """The lines of a function at which the values get their names that one of its nodes uses."""
    nodes = list(ast.walk(node)) if node is not None else []
    used = {n.id for n in nodes if isinstance(n, ast.Name)}
    given = {n.lineno for n in ast.walk(function) if isinstance(n, ast.Assign) and _named_by(n) & used}
    return frozenset(given | {n.defined[0] for n in nodes if hasattr(n, "defined")})


def _named_by(node: Any) -> set[str]:
    """The names that a statement gives to values."""
    return {each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)}


@dataclasses.dataclass
class _Group:
    """Differences that are shown as one, inside of the node at `path`."""

    path: Path
    differences: list[Difference]

    def overlaps(self, other: "_Group") -> bool:
        """Whether one is inside of the other; a statement that is missing is inside of none."""
        both = [(g.path, g.differences[0]) for g in (self, other)]
        if any(d.was is None and path == d.path and isinstance(d.should, ast.stmt) for path, d in both):
            return False
        short, long = sorted((self.path, other.path), key=len)
        return long[: len(short)] == short

    def lines(self, tree: ast.FunctionDef) -> tuple[int, int]:
        """First and last line. A value that stands elsewhere, under a name, counts where it is used."""
        there = [d.line for d in self.differences if d.was is not None]
        one = self.differences[0]
        if (inner := _inner_function(tree, one)) is not None:
            return inner.lineno, inner.end_lineno or inner.lineno
        first = min(there or [d.line for d in self.differences])
        last = max(first, *(getattr(d.was, "end_lineno", None) or d.line for d in self.differences))
        node = one.was if self.path == one.path else _at(tree, self.path)
        start, end = getattr(node, "lineno", first), getattr(node, "end_lineno", last)
        return (first, last) if not there or start <= first <= end else (start, end)


def _inner_function(tree: ast.FunctionDef, difference: Difference) -> ast.FunctionDef | None:
    """The function of several statements that is what differs, where it is given by its name: to a loop, say."""
    if not (isinstance(difference.was, ast.Name) and isinstance(difference.should, ast.Lambda)):
        return None
    inner = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == difference.was.id)
    return next(inner, None)


def _together(
    answer: Functions, chosen: Sequence[Difference], named: Mapping[str, Mapping[str, str]], statements: bool
) -> list[_Group]:
    groups: list[_Group] = []
    for each in chosen:
        tree, path = answer[each.function], each.path
        if statements:
            path = _statement(tree, path)
        elif not each.whole:
            path = _around(tree, each, named.get(each.function, {}))
        mine = _Group(path, [each])
        for other in [g for g in groups if g.differences[0].function == each.function and g.overlaps(mine)]:
            groups.remove(other)
            path = min(other.path, mine.path, key=len)
            path = path[:-1] if isinstance(_at(tree, path), ast.keyword | None) else path
            mine = _Group(path, [*other.differences, *mine.differences])
        groups.append(mine)
    return groups


def _statement(tree: ast.FunctionDef, path: Path) -> Path:
    """The path to the statement around a node; a statement that is missing is there as well."""
    while len(path) > 1 and not (path[-1][0] in _BODIES or isinstance(_at(tree, path), ast.stmt)):
        path = path[:-1]
    return path


_BODIES = frozenset("body orelse finalbody decorator_list".split())


def _around(tree: ast.FunctionDef, difference: Difference, named: Mapping[str, str]) -> Path:
    """The path to the largest expression around a difference that is still short, and on its line."""
    path = difference.path
    if isinstance(difference.was or difference.should, ast.stmt):
        return path
    if _inner_function(tree, difference) is not None:
        return path
    if isinstance(difference.was or difference.should, ast.keyword) and None in (difference.was, difference.should):
        return path
    if difference.was is None or difference.should is None:
        path = path[:-1]  # an argument, an element: it says little alone
    best = path
    while path:
        path = path[:-1]
        node = _at(tree, path)
        if isinstance(node, ast.stmt) or node is None:
            break
        if getattr(node, "lineno", difference.line) != difference.line:
            break
        alone, around = (_text(each, named) for each in (_at(tree, best), node))
        vague = len(alone) <= _BARE or around.count(alone) > 1  # or nobody could tell which one
        if len(around) > (SHOWN if vague else _CONTEXT):
            break
        if isinstance(node, ast.expr) and path[-1][0] != "func":  # a method without its call says nothing
            best = path
    return best


def _at(tree: ast.AST, path: Path) -> Any:
    node: Any = tree
    for field, n in path:
        node = getattr(node, field, None)
        if n is not None:
            node = node[n] if isinstance(node, list) and n < len(node) else None
    return node


def _edit(answer: Functions, group: _Group, named: Mapping[str, str]) -> Edit:
    """What to do in one place; where there is no text of its own, in the expression or statement around it."""
    first = group.differences[0]
    tree, path = answer[first.function], group.path
    if first.was is None and path == first.path and isinstance(first.should, ast.stmt):
        field, n = path[-1]
        body = getattr(_at(tree, path[:-1]), field)
        beside = {"behind": getattr(body[n - 1], "after", body[n - 1])} if n else {"before": body[0]} if body else {}
        return Edit(_program(first.should, named), **beside)
    if isinstance(first.was, ast.Name) and path == first.path:  # a value, where its name is used
        return Edit(_program(first.should, named), first.was)
    while not (isinstance(was := _at(tree, path), ast.stmt) or (isinstance(was, ast.expr) and _stands_alone(was))):
        path = path[:-1]
    gone = path == first.path and first.should is None
    should = None if gone else _at(applied(answer, group.differences)[first.function], path)
    there = getattr(was, "written", None)
    if isinstance(should, ast.Lambda) and isinstance(there, ast.FunctionDef):
        function = copy_of(there)
        function.args, function.body = should.args, [ast.Return(should.body)]
        return Edit(_program(ast.fix_missing_locations(function), named), was)
    return Edit(_program(should, named), was)


def _stands_alone(node: ast.expr) -> bool:
    parts = [node, *getattr(node, "elts", ())]  # x[:, 0]
    return not any(isinstance(n, ast.Slice) for n in parts) and not (
        isinstance(node, ast.Starred) or isinstance(getattr(node, "ctx", None), ast.Store)
    )


def followed(function: ast.FunctionDef, edits: Iterable[Edit]) -> ast.FunctionDef | None:
    """A function as it is after these edits; None where there is no place for one of them."""
    changes: dict[Any, list[Edit]] = {}
    for each in edits:
        changes.setdefault(_where(each.old or each.behind or each.before), []).append(each)
    tree = _Followed(changes).visit(copy_of(function))
    tree = tree[0] if isinstance(tree, list) else tree  # the function itself is replaced, where its arguments change
    return None if changes else ast.fix_missing_locations(tree)


def _where(node: Any) -> Any:
    node = getattr(node, "written", node)
    ends = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return (type(node).__name__, *(getattr(node, end, None) for end in ends))


class _Followed(ast.NodeTransformer):
    """Makes the changes, and takes each out of the list."""

    def __init__(self, changes: dict[Any, list[Edit]]) -> None:
        self.changes = changes

    def visit(self, node: ast.AST) -> Any:
        edits = self.changes.pop(_where(node), []) if isinstance(node, ast.expr | ast.stmt) else []
        if not edits:
            return self.generic_visit(node)
        new = [ast.parse(e.new or "pass").body for e in edits]
        if isinstance(node, ast.expr):
            return new[0][0].value  # type: ignore[attr-defined]
        kept = [] if any(e.old is not None for e in edits) else [self.generic_visit(node)]
        ahead = [each for e, body in zip(edits, new, strict=True) if e.before is not None for each in body]
        behind = [each for e, body in zip(edits, new, strict=True) if e.before is None for each in body]
        return [*ahead, *kept, *behind]


def _words(answer: Functions, group: _Group, named: Mapping[str, str], tell: str) -> tuple[str, bool]:
    """What is wrong in one place, and whether that says what should be there."""
    tree = answer[group.differences[0].function]
    first = group.differences[0]
    inside = group.path != first.path or len(group.differences) > 1
    was = _at(tree, group.path) if inside else first.was
    should = _at(applied(answer, group.differences)[first.function], group.path) if inside else first.should
    old, new = _text(was, named), _text(should, named)
    if old == new:  # the reader's names hide what differs
        old = ast.unparse(was) if was is not None else old
    if was is not None and _as_written(old) == _as_written(new):  # a name that is given twice: another value of it
        tell = "where"
    if max(len(old), len(new)) > SHOWN and was is not None and should is not None:
        dotted = _dotted(was, should, named)
        old, new = dotted if max(map(len, dotted)) <= SHOWN else (old, new)
    short_old, short_new = (0 < len(x) <= SHOWN and "\n" not in x for x in (old, new))
    if should is None and tell != "where":
        return f"{_beginning(old)} does not belong here", True
    if was is None and tell != "where":
        match should:
            case ast.FunctionDef(body=[only], decorator_list=[when]) if not _is_always(should):
                new, under = _text(only, named), _text(when, named)  # one statement under a condition
                return f"{_beginning(new)} is missing here, under `@{under}`", max(len(new), len(under)) <= SHOWN
        return f"{_beginning(new)} is missing here", short_new
    if short_new and tell == "what":
        return f"`{old}` should be `{new}`" if short_old else f"this should be `{new}`", True
    if was is None:
        return "something is missing here", False
    mine = f"`{old}`" if short_old else "this"
    if isinstance(should, ast.expr | ast.Assign | ast.AugAssign | ast.Return) and tell != "where":
        outline = _outline(should, was, named)
        if inside and len(group.differences) == 1 and first.was and first.should and _fits(outline, old):
            return _words(answer, _Group(first.path, group.differences), named, tell)  # all that differs is in the dots
        compared = tell == "like" and isinstance(was, ast.expr) and not isinstance(was, ast.Name)
        unlike = compared and share(was, should) < _LIKE  # another way to do it
        if unlike or not re.search(r"\w", outline):  # nothing but dots
            return "", False
        if not _fits(outline, old):
            values = [f"`{v}`" for v in _values_in(tree, was, old) if v not in outline] if was and short_old else []
            mine += f", or {' or '.join(values)} in it," if 0 < len(values) <= _FEW_VALUES else ""
            return f"{mine} differs from a right one, which is like `{outline}`", False
    return f"{mine} is what is wrong" if tell == "where" else f"{mine} differs from a right one", False


def _values_in(function: ast.FunctionDef, node: ast.AST, text: str) -> list[str]:
    """The names in the text of a node that the reader's function gives to calculations and the like, no mere sizes."""
    given: dict[str, ast.AST] = {
        name: n.value for n in ast.walk(function) if isinstance(n, ast.Assign) for name in _named_by(n)
    }
    given |= {name_of(n.use): n for n in ast.walk(node) if n is not node and hasattr(n, "use")}
    worked = (name for name, value in given.items() if isinstance(value, ast.BinOp | ast.Call) and not is_step(value))
    return [name for name in worked if re.search(rf"\b{re.escape(name)}\b", text)]


def _fits(outline: str, text: str) -> bool:
    """Whether a text is what an outline shows, with something in the places of its dots."""
    return re.fullmatch(".*".join(map(re.escape, re.split(r"\(?\.\.\.\)?", outline))), text, re.S) is not None


def _outline(node: Any, was: Any, named: Mapping[str, str]) -> str:
    """A program with dots in the places of parts, as few and as small as will do for it to be short: first of what the
    other one has, too, then of plain numbers. What is called says much, and stays."""
    tree, there = _with_names(node, named), {ast.dump(n) for n in ast.walk(_with_names(was, named))}
    while len(text := ast.unparse(tree)) > SHOWN:
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        parts = [n for n in ast.walk(tree) if isinstance(n, ast.expr) and n is not tree and id(n) not in called]
        shared = [n for n in parts if ast.dump(n) in there and len(ast.unparse(n)) > _WORTH_DOTS]
        shared = shared or [n for n in parts if not reads_of(n) and len(ast.unparse(n)) > _WORTH_DOTS]
        enough = [n for n in shared or parts if len(text) - len(ast.unparse(n)) + len("...") <= SHOWN]
        hidden = min(enough, key=lambda n: len(ast.unparse(n)), default=None)
        hidden = hidden or max(shared or parts, key=lambda n: len(ast.unparse(n)), default=tree)
        if len(ast.unparse(hidden)) <= len("..."):
            break
        tree = Replaced(hidden, "...").visit(tree)
    return re.sub(r"\.{4}(?=\w)", "(...).", text)


def _dotted(was: ast.AST, should: ast.AST, named: Mapping[str, str]) -> tuple[str, str]:
    """Two programs, with dots in the places of the largest parts that both have: f(...) for a call of f."""
    old, new = (_with_names(node, named) for node in (was, should))
    while max(len(ast.unparse(node)) for node in (old, new)) > SHOWN:
        theirs = {ast.dump(n) for n in ast.walk(new) if isinstance(n, ast.expr)}
        shared = [n for n in ast.walk(old) if isinstance(n, _HIDDEN) and ast.dump(n) in theirs]
        largest = max(shared, key=lambda n: len(ast.unparse(n)), default=None)
        if largest is None or len(ast.unparse(largest)) < _WORTH_DOTS:
            break
        dots = f"{_short_name(largest.func)}(...)" if isinstance(largest, ast.Call) else "(...)"
        old, new = (Replaced(largest, dots).visit(node) for node in (old, new))
    return ast.unparse(old), ast.unparse(new)


_HIDDEN = (ast.Call, ast.BinOp, ast.Tuple, ast.Attribute)


def _short_name(function: ast.expr) -> str:
    """jnp.dot, and (...).mean for a method of a longer expression."""
    if isinstance(function, ast.Attribute) and not isinstance(function.value, ast.Name | ast.Attribute):
        return f"(...).{function.attr}"
    return ast.unparse(function)


_X = ast.Name("x", ast.Load())


def _text(node: ast.AST | None, named: Mapping[str, str]) -> str:
    """The program of a node, with the reader's names for values where they have some."""
    if node is None:
        return ""
    if isinstance(node, ast.operator | ast.cmpop | ast.unaryop | ast.boolop):
        return _sign(node)
    node = _with_names(node, named)
    if isinstance(node, ast.FunctionDef) and node.decorator_list:  # a body under pl.when
        under = [] if _is_always(node) else [f"@{ast.unparse(d)}" for d in node.decorator_list]
        return "\n".join([*under, *map(ast.unparse, node.body)])
    return ast.unparse(node)


def _is_always(node: ast.AST) -> bool:
    """Whether a body is under a condition in our form alone."""
    return isinstance(condition_of(node), ast.Constant)


def _program(node: ast.AST | None, named: Mapping[str, str]) -> str:
    """The program of a node as a reader would write it down, "" for none."""
    return "" if node is None else _as_written(ast.unparse(_with_names(node, named)))


def _as_written(text: str) -> str:
    """A text with names instead of their versions."""
    return re.sub(rf"{VERSION}\d+", "", text)


def _sign(operator: ast.AST) -> str:
    """How an operator is written."""
    if isinstance(operator, ast.cmpop):
        return ast.unparse(ast.Compare(_X, [operator], [_X]))[2:-2]
    if isinstance(operator, ast.unaryop):
        return ast.unparse(ast.UnaryOp(operator, _X))[:-1].strip()
    if isinstance(operator, ast.boolop):
        return ast.unparse(ast.BoolOp(operator, [_X, _X]))[2:-2]
    assert isinstance(operator, ast.operator)
    return ast.unparse(ast.BinOp(_X, operator, _X))[2:-2]


def _with_names(node: ast.AST, named: Mapping[str, str]) -> Any:
    """A copy of a node, with names for the values inside of it, and not for the whole of it."""
    copied = copy_of(node)
    written = _Named(named).visit(copied) if isinstance(node, ast.stmt) else _Named(named).generic_visit(copied)
    return _Given(given).visit(copy_of(written)) if (given := arguments(named)) else written


class Names(dict[str, str]):
    """Names of values, by their text, in a helper; arguments: what it calls what is given to it."""

    def __init__(self, names: Mapping[str, str], arguments: Mapping[str, str]) -> None:
        super().__init__(names)
        self.arguments = arguments


def arguments(named: Mapping[str, str]) -> Mapping[str, str]:
    return named.arguments if isinstance(named, Names) else {}


class _Given(ast.NodeTransformer):
    """Puts the name that an argument has in a helper in the place of what is given to it."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self.arguments = arguments

    def visit(self, node: ast.AST) -> Any:
        name = self.arguments.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        return ast.Name(name, ast.Load()) if name else self.generic_visit(node)


class _Named(ast.NodeTransformer):
    """Leaves what is of the answer as it is written there, and gives its names to values of the right program."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self.named = named

    def visit(self, node: ast.AST) -> Any:
        if not hasattr(node, "theirs"):
            as_written = hasattr(node, "use") and not any(hasattr(n, "theirs") for n in ast.walk(node))
            return node.use if as_written else self.generic_visit(node)  # type: ignore[attr-defined]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # not in the place of its own value
            node.value = self.generic_visit(node.value)  # type: ignore[assignment]
            return node
        node = self.generic_visit(node)  # what is inside comes first: the reader's values are written in these names
        name = self.named.get(_as_written(ast.unparse(node))) if isinstance(node, ast.expr) and self.named else None
        return ast.Name(name, ast.Load()) if name else node
