"""Where an answer differs from one that is right, and which of the differences matter: delta debugging of programs.

The answer is led towards the right one in as few places as will do (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", 2002): what has to change for it to be right is what is wrong with it.
"""

import ast
import dataclasses
import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Functions = Mapping[str, ast.FunctionDef]
Path = tuple[tuple[str, int | None], ...]  # from a function to one of its nodes: (field, position in a list of nodes)

_ALIKE = 0.1  # two functions with less than this in common are two ways to write it, and one is not led to the other
_SHARED = 0.25  # of two expressions with less in common, one is put in the place of the other
_FEW = 2  # so many places are worth naming whatever their size
_IGNORED = frozenset("ctx type_comment annotation returns lineno end_lineno col_offset end_col_offset kind".split())
_UNORDERED = frozenset({"keywords"})


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place of `function` where the answer has `was` and the right one has `should`; either may be missing.

    path: where it stands, () for the whole function. line: of the answer's own file. after: what is missing comes
    behind that line.
    """

    function: str
    path: Path
    was: ast.AST | None
    should: ast.AST | None
    line: int

    @property
    def whole(self) -> bool:
        return not self.path

    @property
    def size(self) -> int:
        """How much there is to read, in nodes."""
        return max(_size(node) for node in (self.was, self.should) if node is not None)


def straightened(function: ast.FunctionDef, beside: ast.FunctionDef | None = None) -> ast.FunctionDef:
    """The same function, with the values of names that it uses for convenience in the places of these names.

    beside: another one that is straightened; a value that has a name there keeps its own, and a name that is there.
    """
    tree = copy_of(function)
    if ast.get_docstring(tree, clean=False) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    values = {_key(n.value) for n in ast.walk(beside) if isinstance(n, ast.Assign)} if beside is not None else set()
    kinds = _kinds_of_names(beside) if beside is not None else {}
    names = {name for name, kind in kinds.items() if ast.Assign in kind}
    functions = {name for name, kind in kinds.items() if ast.FunctionDef in kind}
    blocks: list[Any] = [n for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]
    for block in blocks:
        block.body = [one for each in block.body for plain in _unfolded(each) for one in _one_by_one(plain)]
    for block in blocks:
        if isinstance(block, ast.FunctionDef):
            _name_versions(block)
    for block in reversed(blocks):  # the inner ones first: one that only returns something is a lambda outside
        block.body = [each if getattr(each, "name", "") in functions else _as_lambda(each) for each in block.body]
        _straighten(block.body, tree, names, values)
    return ast.fix_missing_locations(_Spread().visit(tree))


def _unfolded(statement: ast.stmt) -> list[ast.stmt]:
    """A statement with the names that it gives inside of an expression, `(x := value)`, given in front of it."""
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
        return [statement]
    if any(_is_inner(n) or isinstance(n, ast.IfExp | ast.BoolOp) for n in ast.walk(statement)):
        return [statement]
    given = [n for n in _in_order(statement) if isinstance(n, ast.NamedExpr)]
    front = [ast.copy_location(ast.Assign([n.target], n.value), n) for n in reversed(given)]
    return [_Unfolded().visit(each) for each in (*front, statement)]


class _Unfolded(ast.NodeTransformer):
    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.Name:
        return ast.copy_location(ast.Name(node.target.id, ast.Load()), node)


class _Spread(ast.NodeTransformer):
    """`f(*(a, b), **{"c": d})` as `f(a, b, c=d)`."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.args = [one for each in node.args for one in _elements(each)]
        node.keywords = [one for each in node.keywords for one in _keywords(each)]
        return node


def _elements(argument: ast.expr) -> list[ast.expr]:
    match argument:
        case ast.Starred(ast.Tuple(elements)):
            return elements
    return [argument]


def _keywords(keyword: ast.keyword) -> list[ast.keyword]:
    match keyword:
        case ast.keyword(None, ast.Dict(keys, values)) if all(isinstance(getattr(k, "value", None), str) for k in keys):
            pairs = zip(keys, values, strict=True)
            return [ast.copy_location(ast.keyword(k.value, v), v) for k, v in pairs]  # type: ignore[union-attr]
    return [keyword]


VERSION = "·"  # x·2 is the second value that a function gives to its name x


def _name_versions(function: ast.FunctionDef) -> None:
    """A name that is given another value becomes another name, where one statement comes after the other."""
    arguments = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    given: Counter[str] = Counter(arguments)
    here = [n for each in function.body if isinstance(each, ast.Assign) for n in _names_in(each.targets)]
    given.update(n.id for n in here)
    inner = [n for each in function.body for n in ast.walk(each)]
    bound = [n.id for n in inner if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load) and n not in here]
    elsewhere = {*bound, *(_name(n) for n in inner if isinstance(n, ast.arg | ast.FunctionDef))}
    names = {name for name, times in given.items() if times > 1 and name not in elsewhere}
    now: Counter[str] = Counter(dict.fromkeys(names & arguments, 1))
    for each in function.body if names else ():
        stored = _names_in(each.targets) if isinstance(each, ast.Assign) else []
        for n in ast.walk(each):
            if isinstance(n, ast.Name) and n not in stored and now[n.id] > 1:
                n.id = f"{n.id}{VERSION}{now[n.id]}"
        for n in stored:
            if n.id in names:
                now[n.id] += 1
                n.id += f"{VERSION}{now[n.id]}" if now[n.id] > 1 else ""


def _names_in(targets: Sequence[ast.AST]) -> list[ast.Name]:
    """The names that an assignment gives to values; what is stored into a Ref gives none."""
    return [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _one_by_one(statement: ast.stmt) -> list[ast.stmt]:
    """`a, b = x, y` as two statements, where x and y do not use a and b; `M, N = x.shape` as well."""
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return [statement]
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Tuple) or any(isinstance(each, ast.Starred) for each in target.elts):
        return [statement]
    if isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name):
        sizes = [_size_along(value, axis) for axis in range(len(target.elts))]
        parts = [(name, size) for name, size in zip(target.elts, sizes, strict=True) if getattr(name, "id", "") != "_"]
        return [ast.copy_location(ast.Assign([each], new), each) for each, new in parts]
    if not isinstance(value, ast.Tuple):
        named = [(n, each) for n, each in enumerate(target.elts) if getattr(each, "id", "") != "_"]
        return [_element(value, *named[0])] if len(named) == 1 < len(target.elts) else [statement]
    if len(target.elts) != len(value.elts):
        return [statement]
    names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    starred = any(isinstance(each, ast.Starred) for each in value.elts)
    if starred or any(isinstance(n, ast.Subscript | ast.Call) for n in ast.walk(target)) or names & _reads(value):
        return [statement]
    split = [ast.copy_location(ast.Assign([t], v), t) for t, v in zip(target.elts, value.elts, strict=True)]
    return [one for each in split for one in _one_by_one(each)]


def _element(value: ast.expr, number: int, name: ast.expr) -> ast.stmt:
    """`_, name = value` as `name = value[1]`."""
    part = ast.copy_location(ast.Subscript(value, ast.Constant(number), ast.Load()), value)
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([name], part), name))


def _size_along(shape: ast.Attribute, axis: int) -> ast.expr:
    size = ast.copy_location(ast.Subscript(shape, ast.Constant(axis), ast.Load()), shape)
    size.unpacked = True  # type: ignore[attr-defined]  # it stands nowhere in the text
    return ast.fix_missing_locations(size)


def _reads(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def values_with_names(function: ast.FunctionDef) -> dict[str, str]:
    """The names that a function gives to values, once each, by the text of the value."""
    every = [one for n in ast.walk(function) if isinstance(n, ast.Assign) for one in _one_by_one(n)]
    given = [n for n in every if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    counts = Counter(n.targets[0].id for n in given)  # type: ignore[attr-defined]
    values = {ast.unparse(n.value): n.targets[0].id for n in given if counts[n.targets[0].id] == 1}  # type: ignore[attr-defined]
    return {text: name for text, name in values.items() if not text.isidentifier() and not text.isnumeric()}


def differences(answer: Functions, right: Functions) -> list[Difference]:
    """Where the functions of an answer differ from the right ones of the same names, in the order of their lines.

    Both are to be `straightened`.
    """
    found = []
    for name, mine in answer.items():
        if name in right:
            found += _at_their_uses(mine, list(_of_function(mine, right[name])))
    return found


def _at_their_uses(function: ast.FunctionDef, found: list[Difference]) -> list[Difference]:
    """The differences, those of a value that has a name where the name is used, unless no use of it is right.

    A value that has a name in the right program, too, and does not stand alone there, is used in the wrong way.
    """

    def definition(node: Any) -> Any:
        return getattr(node, "defined", None)

    uses = Counter(map(definition, ast.walk(function)))
    alike = Counter((definition(d.was), _key(d.should)) for d in found)
    there = []
    for d in found:
        defined, use = definition(d.was), getattr(d.was, "use", None)
        inside = ast.walk(d.should) if d.should is not None else ()
        part = any(n is not d.should and hasattr(n, "use") and _key(n) == _key(d.was) for n in inside)
        if use is not None and (part or hasattr(d.was, "unpacked") or alike[defined, _key(d.should)] < uses[defined]):
            d = dataclasses.replace(d, was=use, line=use.lineno)
        there.append(d)
    return there


def applied(answer: Functions, chosen: Sequence[Difference]) -> dict[str, ast.FunctionDef]:
    """The functions of an answer with these differences undone, so that it is right in those places."""
    changed = dict(answer)
    for name in {d.function for d in chosen}:
        mine = [d for d in chosen if d.function == name]
        if mine[0].whole:
            assert isinstance(mine[0].should, ast.FunctionDef)
            changed[name] = mine[0].should
            continue
        tree = copy_of(answer[name])
        # from the end: positions stay as they are. In one place, what goes goes before anything comes
        in_order = sorted(enumerate(mine), key=lambda pair: (_place(pair[1].path), pair[1].was is not None, pair[0]))
        for _, each in reversed(in_order):
            _put(tree, each)
        changed[name] = ast.fix_missing_locations(tree)
    return changed


def that_matter(
    answer: Functions,
    found: Sequence[Difference],
    is_right: Callable[[Functions], bool],
    most: int,
    group_of: Callable[[str], str] = str,
) -> list[Difference]:
    """The differences that have to be undone before an answer is right, as few as can be found in `most` trials.

    [] where it would not be right even with all of them undone, or where the trials do not suffice. group_of: the
    functions of one group are tried together first.
    """
    trials = 0
    known: dict[frozenset[int], bool] = {}

    def right_with(numbers: Sequence[int]) -> bool:
        nonlocal trials
        key = frozenset(numbers)
        if key not in known:
            trials += 1
            known[key] = is_right(applied(answer, [found[n] for n in sorted(key)]))
        return known[key]

    kept = list(range(len(found)))
    if not kept or right_with([]) or not right_with(kept):  # what is wrong may be none of them
        return []
    # whole functions first, then their statements, then parts of these: what can go is not what is wrong
    statements: dict[tuple[str, Path], list[list[int]]] = {}
    for same in _one_in_the_text(found):
        first = found[same[0]]
        statements.setdefault((first.function, _statement_of(first.path)), []).append(same)
    functions: dict[str, list[Any]] = {}
    for (name, _), units in statements.items():
        functions.setdefault(group_of(name), []).append(units)
    groups = list(functions.values())
    while groups:
        group = groups.pop(0)
        if trials >= most:
            return []
        gone = set(_numbers(group))
        rest = [n for n in kept if n not in gone]
        if rest and right_with(rest):
            kept = rest
            continue
        while len(group) == 1 and isinstance(group[0], list):
            (group,) = group
        if len(group) > 1:
            half = len(group) // 2
            groups[:0] = [part for part in (group[:half], group[half:]) if isinstance(part[0], list)]
    # two that only fit each other may both have stayed: is there one that does it alone?
    left = [unit for unit in _one_in_the_text(found) if unit[0] in kept]
    if 1 < len(left) <= most - trials:
        kept = next((unit for unit in left if right_with(unit)), kept)
    return [found[unit[0]] for unit in left if unit[0] in kept]


def _statement_of(path: Path) -> Path:
    """The path to the innermost statement around a node."""
    ends = [n for n, (field, place) in enumerate(path, 1) if field in ("body", "orelse") and place is not None]
    return path[: max(ends, default=0)]


def _numbers(group: Any) -> Iterator[int]:
    if isinstance(group, int):
        yield group
    else:
        for each in group:
            yield from _numbers(each)


def _one_in_the_text(found: Sequence[Difference]) -> list[list[int]]:
    """The differences, by number; those together that are one in the text, where a name stood for a value."""
    same: dict[Any, list[int]] = {}
    for n, d in enumerate(found):
        text = d.was is not None and (d.line, getattr(d.was, "col_offset", 0), _key(d.was), _key(d.should))
        same.setdefault((d.function, text) if text else n, []).append(n)
    return list(same.values())


def copy_of(tree: Any) -> Any:
    """A copy of a syntax tree, to be changed. What its nodes carry beside their fields is shared, not copied."""
    if isinstance(tree, list):
        return [copy_of(each) for each in tree]
    if not isinstance(tree, ast.AST) or isinstance(tree, ast.expr_context):
        return tree
    new = type(tree)()
    vars(new).update({k: copy_of(value) if k in tree._fields else value for k, value in vars(tree).items()})
    return new


# --- two trees -------------------------------------------------------------------------------------------------------


def _of_function(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> Iterator[Difference]:
    theirs = _in_order_of(mine, _inlined_as_in(mine, _with_names_of(mine, theirs)))
    whole = Difference(mine.name, (), mine, theirs, mine.lineno)
    places = list(_between(mine, theirs, (), mine.lineno))
    found = [Difference(mine.name, *place) for *place, _ in places]
    for node in [n for d in found if d.should is not None for n in ast.walk(d.should)]:
        if "lineno" in node._attributes:  # of operators and the like, Python makes one for all programs
            node.theirs = True  # type: ignore[attr-defined]  # not of the answer's text
    alike = sum(much for *_, much in places) <= (1 - _ALIKE) * max(_size(mine), _size(theirs))
    yield from found if alike or len(found) <= _FEW else [whole]


def _inlined_as_in(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function without names for values that stand in the answer without one."""
    plain = {_key(n) for n in ast.walk(mine) if isinstance(n, ast.expr)}
    there = _bound(mine) | {n.id for n in ast.walk(mine) if isinstance(n, ast.Name)}
    for each in list(theirs.body):
        if not (isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and _key(each.value) in plain):
            continue
        name, behind = each.targets[0].id, theirs.body[theirs.body.index(each) + 1 :]
        uses = [n for n in ast.walk(theirs) if isinstance(n, ast.Name) and n.id == name]
        again = len(uses) > 2 and any(map(_is_work, ast.walk(each.value)))
        if name in there or again or len(_stores_of(name, theirs)) != 1 or not _stays(each.value, name, behind):
            continue
        theirs.body.remove(each)
        theirs = _Inlined(name, each.value).visit(theirs)
    return theirs


def _stays(value: ast.expr, name: str, behind: Sequence[ast.stmt]) -> bool:
    """Whether a value is the same at all places in the statements behind it where its name is used."""
    if any(isinstance(n, ast.Lambda) for n in ast.walk(value)):
        return False
    using = [n for n, each in enumerate(behind) if name in _reads(each)]
    between = behind[: max(using, default=0)]
    if any(not isinstance(each, ast.Assign | ast.AugAssign | ast.Return) for each in (behind[n] for n in using)):
        return not any(map(_may_change, ast.walk(value)))
    return not any(_uses(each)[1] & _reads(value) for each in between)


def _stores_of(name: str, function: ast.FunctionDef) -> list[ast.Name]:
    stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [n for n in stored if n.id == name]


def _in_order_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function with its statements in the order of the answer's, as far as none overtakes one it needs."""
    ordered = copy_of(theirs)
    x, y = mine.body, ordered.body
    like = sorted(((likeness(a, b), -i, -j) for i, a in enumerate(x) for j, b in enumerate(y)), reverse=True)
    place: dict[int, int] = {}
    for share, i, j in like:
        if share > 0 and -j not in place and -i not in place.values():
            place[-j] = -i
    wanted = [place.get(j, max((place[k] for k in place if k < j), default=-1)) for j in range(len(y))]
    left, body = list(range(len(y))), []
    while left:
        free = [j for j in left if not any(_must_follow(y[j], y[k]) for k in left if k < j)]
        left.remove(first := min(free, key=lambda j: (wanted[j], j)))
        body.append(y[first])
    ordered.body = body
    return ordered


def _must_follow(later: ast.stmt, earlier: ast.stmt) -> bool:
    """Whether two statements cannot change places: one writes what the other reads or writes, or they do more."""
    if any(isinstance(n, ast.Return | ast.Expr) for n in (later, earlier)):
        return True
    (reads, writes), (read, written) = _uses(later), _uses(earlier)
    return bool(reads & written or writes & read or writes & written)


def _uses(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement reads, and those it writes, or hands to a function that may write to a Ref."""
    nodes = list(ast.walk(statement))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    into = [n.value for n in nodes if isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    handed = [a for n in nodes if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))]
    refs = {n.id for n in (*into, *handed) if isinstance(n, ast.Name) and (n in into or n.id.endswith("_ref"))}
    return _reads(statement), stored | refs


_Place = tuple[Path, Any, Any, int, int]


def _between(a: ast.AST, b: ast.AST, path: Path, line: int) -> Iterator[_Place]:
    """The places where tree b differs from tree a: (path in a, what a has there, what b has, line of a, how much)."""
    line = getattr(a, "lineno", line)
    b = _written_as(a, b)
    if _key(a) == _key(b):
        return
    apart = type(a) is not type(b) or not _comparable(a, b) or hasattr(a, "unpacked")
    if apart or (path and _is_around(a, b)):
        yield path, a, b, line, _change(a, b)
        return
    inner: list[_Place] = []
    for field, x in ast.iter_fields(a):
        y = getattr(b, field)
        if field in _IGNORED or (field == "name" and getattr(a, "decorator_list", None)):
            continue
        if isinstance(x, ast.AST) and isinstance(y, ast.AST):
            inner += _between(x, y, (*path, (field, None)), line)
        elif isinstance(x, list) and isinstance(y, list):
            inner += _between_lists(x, y, (*path, (field, None)), line, field)
        elif x != y:
            inner = [(path, a, b, line, _change(a, b))]
            break
    changed = sum(much for *_, much in inner)
    little = changed >= (1 - _SHARED) * max(_size(a), _size(b))  # in common with the other: it is replaced as a whole
    other_way = isinstance(a, ast.Compare) and any(isinstance(x, ast.cmpop) for _, x, *_ in inner)
    if path and len(inner) > 1 and (other_way or (isinstance(a, ast.expr) and little)):
        yield path, a, b, line, changed
    else:
        yield from inner


_TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}


def _written_as(a: Any, b: Any) -> Any:
    """Tree b in the form that tree a has, where there are two ways to write one thing."""
    if isinstance(a, ast.Assign) and isinstance(b, ast.AugAssign):
        longer = ast.copy_location(ast.Assign([b.target], ast.BinOp(_read(b.target), b.op, b.value)), b)
        return longer if _added_to(a) is not None else b
    if isinstance(a, ast.AugAssign) and isinstance(b, ast.Assign) and (added := _added_to(b)) is not None:
        return ast.copy_location(ast.AugAssign(b.targets[0], b.value.op, added), b)  # type: ignore[arg-type, attr-defined]
    if isinstance(a, ast.Call) and isinstance(b, ast.Call):
        return _called_as(a, b)
    turned: ast.expr | None = None
    if isinstance(a, ast.BinOp) and isinstance(b, ast.BinOp) and type(a.op) is type(b.op) in _EITHER_WAY:
        turned = ast.BinOp(b.right, b.op, b.left)
        pairs = [(a.left, b.left, b.right), (a.right, b.right, b.left)]
    elif isinstance(a, ast.Compare) and isinstance(b, ast.Compare) and len(a.ops) == len(b.ops) == 1:
        other = _TURNED.get(type(b.ops[0]))
        turned = ast.Compare(b.comparators[0], [other()], [b.left]) if other else None
        pairs = [(a.left, b.left, b.comparators[0]), (a.comparators[0], b.comparators[0], b.left)]
    if turned is None:
        return b
    straight, crossed = (sum(_shared(p[0], p[n]) for p in pairs) for n in (1, 2))
    return ast.copy_location(turned, b) if crossed > straight else b


def _read(target: ast.expr) -> Any:
    """A place that is stored into, as an expression."""
    copied: Any = copy_of(target)
    copied.ctx = ast.Load()
    return copied


def _added_to(store: ast.Assign) -> ast.expr | None:
    """v of `x = x + v`, whatever the operator."""
    if not isinstance(store.value, ast.BinOp):
        return None
    before, left, right = (_key(n) for n in (_read(store.targets[0]), store.value.left, store.value.right))
    if before == left:
        return store.value.right
    return store.value.left if before == right and type(store.value.op) in _EITHER_WAY else None


_EITHER_WAY = (ast.Mult, ast.Add, ast.BitAnd, ast.BitOr)


def _called_as(a: ast.Call, b: ast.Call) -> ast.Call:
    """`x.sum(axis=0)` as `jnp.sum(x, axis=0)`, where that is how call a is written, and the other way round."""
    if not (isinstance(a.func, ast.Attribute) and isinstance(b.func, ast.Attribute)) or a.func.attr != b.func.attr:
        return b
    mine, theirs = (isinstance(n.func.value, ast.Name) and n.func.value.id == "jnp" for n in (a, b))  # type: ignore[attr-defined]
    if mine and not theirs:
        b = ast.copy_location(ast.Call(copy_of(a.func), [b.func.value, *b.args], b.keywords), b)
    elif theirs and not mine and b.args:
        method = ast.copy_location(ast.Attribute(b.args[0], a.func.attr, ast.Load()), b)
        b = ast.copy_location(ast.Call(method, b.args[1:], b.keywords), b)
    return b


def _shared(a: ast.AST, b: ast.AST) -> int:
    """How many words two trees have in common; all of them and one, if they are the same."""
    return (Counter(_words(a)) & Counter(_words(b))).total() + (_key(a) == _key(b))


def _change(x: ast.AST | None, y: ast.AST | None) -> int:
    """How many nodes change; what one program has around all of the other does not count as a change of the other."""
    large, small = sorted((_size(n) if n is not None else 0 for n in (x, y)), reverse=True)
    if x is None or y is None:
        return large
    return large - small if _is_around(x, y) else large


def _is_around(x: ast.AST, y: ast.AST) -> bool:
    """Whether one of two programs is a part of the other."""
    outer, inner = (x, y) if _size(x) >= _size(y) else (y, x)
    return any(_key(n) == _key(inner) for n in ast.walk(outer) if type(n) is type(inner))


def _straighten(body: list[ast.stmt], whole: ast.FunctionDef, names: set[str], values: set[str]) -> None:
    """Puts values in the places of their names: first what is short, then what is used once, later in this body."""
    for short in (True, False):
        for n in reversed(range(len(body) - 1)):
            each = body[n]
            if not (isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name)):
                continue
            name = each.targets[0].id
            if name in names or not (_is_steady(each.value) if short else _key(each.value) not in values):
                continue
            used = [u for u in _in_scope_of(name, whole) if isinstance(u, ast.Name) and u.id == name]
            if sum(isinstance(u.ctx, ast.Store) for u in used) != 1:
                continue
            if short or _alone(used, body[n:]):
                inline = _Inlined(name, each.value)
                body[n + 1 :] = [inline.visit(other) for other in body[n + 1 :]]
                del body[n]


def _is_steady(value: ast.expr) -> bool:
    """Whether a value is short, and the same wherever it stands."""
    changes = any(_may_change(u) or _is_work(u) for u in ast.walk(value))
    return (isinstance(value, ast.Lambda) or not changes) and _size(value) < _SHORT


def _alone(used: Sequence[ast.Name], body: Sequence[ast.stmt]) -> bool:
    """Whether the name that a body begins with is used once, in a statement of it that its value can move into.

    used: where the name stands, with where it is stored.
    """
    if len(used) != 2:
        return False
    m, there = next(((m, n) for m, n in enumerate(body) if m and any(u in used for u in ast.walk(n))), (0, body[0]))
    own = getattr(there, "decorator_list", [])  # of a function under pl.when: its condition
    if own:
        there = ast.Expr(ast.Tuple(own))
    simple = isinstance(there, ast.Assign | ast.AugAssign | ast.Return | ast.Expr)
    if not simple or any(map(_is_inner, ast.walk(there))) or not any(u in used for u in ast.walk(there)):
        return False
    return not any(_must_follow(between, body[0]) for between in body[1:m])


def _is_inner(node: ast.AST) -> bool:
    """Whether a node is a program that runs at another time than what stands around it, or more than once."""
    return isinstance(node, ast.Lambda | ast.comprehension)


def _as_lambda(statement: ast.stmt) -> ast.stmt:
    """A function inside of another that only returns something, as a name for a lambda; else the statement itself."""
    if not isinstance(statement, ast.FunctionDef) or statement.decorator_list or len(statement.body) != 1:
        return statement
    (only,) = statement.body
    if not isinstance(only, ast.Return) or only.value is None:
        return statement
    value = ast.copy_location(ast.Lambda(statement.args, only.value), statement)
    return ast.copy_location(ast.Assign([ast.Name(statement.name, ast.Store())], value), statement)


def _may_change(node: ast.AST) -> bool:
    """Whether a node may have another value where its name is used: what is read of a Ref, not its shape or a part."""
    steady = isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") in ("shape", "at")
    return isinstance(node, ast.Subscript | ast.Lambda) and not steady


def _is_work(node: ast.AST) -> bool:
    """Whether a node is a call that would be made twice if it stood in two places; of numbers, that is no work."""
    called = getattr(node, "func", None)
    return isinstance(node, ast.Call) and not is_step(node) and getattr(called, "attr", "") not in _CHEAP


def is_step(node: ast.AST) -> bool:
    """Whether a node is the index of a step or a CTA, or their number: as good as a name."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _STEPS


_STEPS = frozenset("program_id num_programs axis_index axis_size".split())
_CHEAP = frozenset("arange rem div cdiv ds".split())


def _hides(node: ast.AST, name: str) -> bool:
    """Whether a node is a function with an argument of that name."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    return any(a.arg == name for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _in_scope_of(name: str, tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without functions inside of it in which the name is another one."""
    for node in ast.iter_child_nodes(tree):
        if not _hides(node, name):
            yield node
            yield from _in_scope_of(name, node)


_SHORT = 16  # nodes of a value that may stand in several places


class _Inlined(ast.NodeTransformer):
    """Puts a value in the place of its name. It keeps the name (use), and where it stands in the text (defined)."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit(self, node: ast.AST) -> Any:
        return node if _hides(node, self.name) else super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != self.name or not isinstance(node.ctx, ast.Load):
            return node
        value: Any = copy_of(self.value)
        value.use, value.defined = node, (value.lineno, value.col_offset)
        return value


def _comparable(a: ast.AST, b: ast.AST) -> bool:
    """Whether two nodes of one type may be compared part by part."""
    if isinstance(a, ast.Name | ast.Constant | ast.arguments) or is_step(a):
        return False
    if isinstance(a, ast.Call) and isinstance(b, ast.Call):
        return len(a.args) == len(b.args) or _key(a.func) == _key(b.func)
    if isinstance(a, ast.Compare) and isinstance(b, ast.Compare):
        return len(a.ops) == len(b.ops)
    if isinstance(a, ast.Tuple | ast.List):
        return len(a.elts) == len(b.elts)  # type: ignore[attr-defined]
    return all(
        (x is None) == (y is None) and isinstance(x, list) == isinstance(y, list) and not _has_gaps(x) | _has_gaps(y)
        for (_, x), (_, y) in zip(ast.iter_fields(a), ast.iter_fields(b), strict=False)
    )


def _has_gaps(field: Any) -> bool:
    return isinstance(field, list) and None in field


def _between_lists(x: list[Any], y: list[Any], path: Path, line: int, field: str) -> Iterator[_Place]:
    """Of two lists of nodes: what stands in one place of both, and what only one has."""
    at = lambda n: (*path[:-1], (path[-1][0], n))  # noqa: E731
    if field in _UNORDERED:
        theirs = {k.arg: k for k in y}
        for n, mine in enumerate(x):
            if mine.arg in theirs:
                yield from _between(mine, theirs.pop(mine.arg), at(n), line)
            else:
                yield at(n), mine, None, line, _size(mine)
        for extra in theirs.values():
            yield at(len(x)), None, extra, line, _size(extra)
        return
    pairs = _paired(x, y)
    for i, j in pairs:
        if i is None and j is not None:
            before = max((a for a, b in pairs if a is not None and b is not None and b < j), default=-1)
            there = getattr(x[before], "end_lineno", line) if before >= 0 else line
            yield at(before + 1), None, y[j], there, _size(y[j])
        elif i is not None and j is None:
            yield at(i), x[i], None, getattr(x[i], "lineno", line), _size(x[i])
        elif i is not None and j is not None:
            yield from _between(x[i], y[j], at(i), line)


def _paired(x: list[Any], y: list[Any]) -> list[tuple[int | None, int | None]]:
    """Positions that belong together, in order; None where the other list has nothing for it."""
    if len(x) == len(y) and not (x and isinstance(x[0], ast.stmt)):
        return [(n, n) for n in range(len(x))]
    like = [[likeness(a, b) for b in y] for a in x]
    best = [[0.0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i in reversed(range(len(x))):
        for j in reversed(range(len(y))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], like[i][j] + best[i + 1][j + 1])
    pairs: list[tuple[int | None, int | None]] = []
    i, j = 0, 0
    while i < len(x) or j < len(y):
        if i < len(x) and j < len(y) and like[i][j] > 0 and best[i][j] == like[i][j] + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif i < len(x) and (j == len(y) or best[i][j] == best[i + 1][j]):
            pairs.append((i, None))
            i += 1
        else:
            pairs.append((None, j))
            j += 1
    return pairs


_STORES = (ast.Assign, ast.AugAssign)


def _ref_of(store: Any) -> str:
    """The Ref that a value is stored in, "" if it is given a name."""
    target = store.targets[0] if isinstance(store, ast.Assign) else store.target
    return ast.unparse(target.value) if isinstance(target, ast.Subscript) else ""


def _target(store: Any) -> str:
    return _key(store.targets[0] if isinstance(store, ast.Assign) else store.target)


def likeness(a: ast.AST, b: ast.AST) -> float:
    """How much two statements have in common, from 0 to 1; 0 for those of other kinds."""
    if _key(a) == _key(b):
        return 1.0
    if type(a) is not type(b) and not (isinstance(a, _STORES) and isinstance(b, _STORES) and _target(a) == _target(b)):
        return 0.0
    if isinstance(a, _STORES) and isinstance(b, _STORES) and _ref_of(a) != _ref_of(b):
        return 0.0
    mine, theirs = Counter(_words(a)), Counter(_words(b))
    share = 2 * (mine & theirs).total() / max(1, (mine.total() + theirs.total()))
    same_target = isinstance(a, _STORES) and isinstance(b, _STORES) and _target(a) == _target(b)
    return share if same_target or isinstance(a, ast.Return) or share > 0.3 else 0.0


def _words(node: ast.AST) -> list[str]:
    return [_label(n) for n in ast.walk(node)]


def _label(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"FunctionDef {_name(node)}"
    own = next((getattr(node, f) for f in ("id", "attr", "arg", "value") if hasattr(node, f)), "")
    return f"{type(node).__name__} {own}" if isinstance(own, str | int | float) else type(node).__name__


def _key(node: Any) -> str:
    """A text that two nodes share if they are the same program."""
    if isinstance(node, ast.AST):
        unnamed = isinstance(node, ast.FunctionDef) and node.decorator_list  # under pl.when: nobody calls it
        fields = [(f, v) for f, v in ast.iter_fields(node) if f not in _IGNORED and not (unnamed and f == "name")]
        body = ",".join(f"{f}={sorted(map(_key, v)) if f in _UNORDERED else _key(v)}" for f, v in fields)
        return f"{type(node).__name__}({body})"
    if isinstance(node, list):
        return "[" + ",".join(map(_key, node)) + "]"
    return repr(node)


def _size(node: ast.AST) -> int:
    """How many nodes a program has; the index of a step counts as one, as the name that it often has."""
    if is_step(node):
        return 1
    return 1 + sum(_size(n) for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr_context))


# --- names -----------------------------------------------------------------------------------------------------------


def _with_names_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function, its own names replaced by those that the answer has for the same things."""
    own, other = _bound(theirs), _bound(mine)
    votes: Counter[tuple[str, str]] = Counter()
    arguments = _arguments_of(mine, theirs)
    for pair in arguments.items():
        votes[pair] += 100
    with_mine = _Renamed(arguments).visit(copy_of(theirs))
    given = dict(_values_of_names(mine))
    for value, name in _values_of_names(with_mine):
        votes[name, given.get(value, "")] += 50 if value in given else 0
    a, b = [_word(n, other) for n in _in_order(mine)], [_word(n, own) for n in _in_order(theirs)]
    nodes, others = list(_in_order(mine)), list(_in_order(theirs))
    kinds, their_kinds = _kinds_of_names(mine), _kinds_of_names(theirs)
    for start, first, size in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for node, match in zip(nodes[start : start + size], others[first : first + size], strict=True):
            if kinds[_name(node)] & their_kinds[_name(match)]:
                votes[_name(match), _name(node)] += 1
    names: dict[str, str] = {}
    for (from_, to), count in votes.most_common():
        if count and from_ not in names and to not in names.values():
            names[from_] = to
    taken = set(names.values())
    names |= {n: f"{n}_" for n in own - names.keys() if n in taken}
    return _Renamed(names).visit(copy_of(theirs))


def _values_of_names(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """(value, name) for every name that is given to a value."""
    for n in ast.walk(function):
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            yield _key(n.value), n.targets[0].id


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr_context):
            yield from _in_order(child)


def _word(node: ast.AST, bound: set[str]) -> str:
    return f"{type(node).__name__} ?" if _name(node) in bound else _label(node)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef) and not node.decorator_list else ""


def _arguments_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> dict[str, str]:
    """What each argument of theirs is called in mine: by its place, and by its name where it is given by name."""
    (a, by_name), (b, theirs_by_name) = (
        ([x.arg for x in (*f.args.posonlyargs, *f.args.args)], [x.arg for x in f.args.kwonlyargs])
        for f in (mine, theirs)
    )
    return dict(zip(b, a, strict=False)) | {name: name for name in theirs_by_name if name in by_name}


def _bound(function: ast.FunctionDef) -> set[str]:
    """The names that a function gives to its own values."""
    return set(_kinds_of_names(function))


def _kinds_of_names(function: ast.FunctionDef) -> dict[str, set[type]]:
    """What binds each name inside of a function: an argument, a function, a comprehension, or an assignment.

    Names of different kinds are not the same thing in two programs.
    """
    nodes = [n for n in ast.walk(function) if n is not function]
    inner = {id(n) for c in nodes if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    kinds: dict[str, set[type]] = defaultdict(set)
    for n in nodes:
        if isinstance(n, ast.arg | ast.FunctionDef) and _name(n):
            kinds[_name(n)].add(type(n))
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            kinds[n.id].add(ast.comprehension if id(n) in inner else ast.Assign)
    return kinds


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self.names.get(node.name, node.name)
        self.generic_visit(node)
        return node


# --- changing a tree -------------------------------------------------------------------------------------------------


def _place(path: Path) -> list[tuple[str, int]]:
    return [(field, -1 if n is None else n) for field, n in path]


def _put(tree: ast.FunctionDef, difference: Difference) -> None:
    node: Any = tree
    for field, n in difference.path[:-1]:
        node = getattr(node, field) if n is None else getattr(node, field)[n]
    field, n = difference.path[-1]
    new = copy_of(difference.should)
    if new is not None and difference.was is not None:
        new = ast.copy_location(new, difference.was)
    for each in ast.walk(new) if new is not None else ():
        if hasattr(each, "lineno"):
            each.lineno = each.end_lineno = difference.line  # type: ignore[attr-defined]
            each.col_offset = each.end_col_offset = 0  # type: ignore[attr-defined]
    if n is None:
        setattr(node, field, new)
    elif new is None:
        del getattr(node, field)[n]
        if field == "body" and not node.body:
            node.body = [ast.Pass()]
    elif difference.was is None:
        body = getattr(node, field)
        body[:] = [*body[:n], new, *body[n:]] if [*map(type, body)] != [ast.Pass] else [new]
    else:
        getattr(node, field)[n] = new
