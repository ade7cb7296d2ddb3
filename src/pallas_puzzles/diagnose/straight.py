"""One way to write what programs write in many: an answer in this form can be compared with one that is right.

Values stand in the places of names that serve convenience alone, what is given inside of an expression is given in
front of it, and so on. Every node keeps its place in the reader's text.
"""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

VERSION = "·"  # x·2 is the second value that a function gives to its name x
_STEPS = frozenset("program_id num_programs axis_index axis_size".split())
_CHEAP = frozenset("arange rem div cdiv ds partial".split())
_SHORT = 16  # nodes of a value that may stand in several places
IGNORED = frozenset("ctx type_comment annotation returns lineno end_lineno col_offset end_col_offset kind".split())
UNORDERED = frozenset({"keywords"})


def side_by_side(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Two functions that do the same, each `straightened` with the other one in view."""
    calls = not (_helpers(mine, inner=True) and _helpers(theirs, inner=True))
    mine = straightened(mine, straightened(theirs, None, calls), calls)
    return mine, straightened(theirs, mine, calls)


def straightened(
    function: ast.FunctionDef,
    beside: ast.FunctionDef | None = None,
    calls: bool = True,
) -> ast.FunctionDef:
    """The same function, with the values of names that it uses for convenience in the places of these names.

    beside: another one that is straightened; a value that has a name there keeps its own, and a name that is there.
    calls: the statements of helpers stand where they are called.
    """
    tree = _Plain().visit(copy_of(function))
    given = [n for n in ast.walk(beside) if isinstance(n, ast.Assign)] if beside is not None else []
    values = {key_of(n.value) for n in given if isinstance(n.targets[0], ast.Name)}
    kinds = kinds_of_names(beside) if beside is not None else {}
    names = {name for name, kind in kinds.items() if ast.Assign in kind}
    functions = {name for name, kind in kinds.items() if ast.FunctionDef in kind}
    tree = _Unrolled(beside is None or _loops(tree) > _loops(beside)).visit(_called_out(tree, calls))
    blocks: list[Any] = [n for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]
    for block in blocks:
        plain = [one for each in block.body for one in _one_by_one(each)]
        block.body = plain or [ast.Pass()]
    for block in blocks:
        if isinstance(block, ast.FunctionDef):
            _name_versions(block)
    for block in reversed(blocks):  # the inner ones first: one that only returns something is a lambda outside
        block.body = [each if getattr(each, "name", "") in functions else _as_lambda(each) for each in block.body]
        _straighten(block.body, block if isinstance(block, ast.FunctionDef) else tree, names, values)
    return ast.fix_missing_locations(_Spread().visit(tree))


class _Plain(ast.NodeTransformer):
    """Without what changes no value: `del x`, a text or a number by itself, the type in `x: int = v`. `x = x + v` for
    `x += v`."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Delete(self, node: ast.Delete) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value), node))


def _loops(function: ast.FunctionDef) -> int:
    return sum(isinstance(n, ast.For) for n in ast.walk(function))


def with_helper(function: ast.FunctionDef, helper: ast.FunctionDef) -> ast.FunctionDef:
    """A function, with another one that it calls inside of it."""
    function, inner = copy_of(function), copy_of(helper)
    inner.outer = True
    function.body.insert(0, inner)
    return function


def _helpers(function: ast.FunctionDef, inner: bool = False) -> dict[str, ast.FunctionDef]:
    """The functions inside of a function whose statements can stand where they are called.

    inner: without those that stood outside of it.
    """
    found = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
    counts = Counter(n.name for n in found)
    plain = [n for n in found if not n.decorator_list and counts[n.name] == 1 and _is_plain(n)]
    return {n.name: n for n in plain if n.name not in reads_of(n) and not (inner and hasattr(n, "outer"))}


def _called_out(function: ast.FunctionDef, calls: bool) -> ast.FunctionDef:
    """The statements of helpers where they are called, and `pl.when(c)(f)` as a body under `@pl.when(c)`."""
    inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
    helpers = {name: n for name, n in _helpers(function).items() if calls or hasattr(n, "outer")}
    blocks: list[Any] = [n for n in ast.walk(function) if isinstance(getattr(n, "body", None), list)]
    for n in blocks:
        n.body = [one for each in n.body for one in _without_calls(each, helpers)]
    called = reads_of(function)
    for n in [function, *inner]:
        n.body = [e for e in n.body if not (getattr(e, "name", "") in helpers and e.name not in called)] or [ast.Pass()]  # type: ignore[attr-defined]
    return function


def condition_of(node: ast.AST) -> ast.expr | None:
    """Of a body under `@pl.when(condition)`."""
    match node:
        case ast.FunctionDef(decorator_list=[ast.Call(ast.Attribute(attr="when"), [condition])]):
            return condition
    return None


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether the statements of a function can stand where it is called: it returns nothing, or does so at its end."""
    a, (*body, last) = function.args, function.body
    named = a.kwonlyargs or a.defaults or a.vararg or a.kwarg
    rest = body if isinstance(last, ast.Return) and last.value and body else function.body
    return not named and not any(isinstance(n, ast.Return | ast.Nonlocal) for each in rest for n in ast.walk(each))


def _without_calls(statement: ast.stmt, helpers: Mapping[str, ast.FunctionDef]) -> list[ast.stmt]:
    match statement:
        case (
            ast.Expr(ast.Call(ast.Name(name), args, []))
            | ast.Assign(_, ast.Call(ast.Name(name), args, []))
            | ast.AugAssign(_, _, ast.Call(ast.Name(name), args, []))
            | ast.Return(ast.Call(ast.Name(name), args, []))
        ) if name in helpers:
            names, ends = [a.arg for a in helpers[name].args.args], isinstance(helpers[name].body[-1], ast.Return)
            fits = len(names) == len(args) and not any(isinstance(a, ast.Starred) for a in args)
            if fits and (ends or isinstance(statement, ast.Expr)):
                body = [copy_of(each) for each in helpers[name].body]
                for argument, value in zip(names, args, strict=True):
                    body = [Inlined(argument, value).visit(each) for each in body]
                if ends:
                    last, body[-1] = body[-1], copy_of(statement)
                    body[-1].value = last.value
                body[-1].after = statement  # what comes next, comes behind the call
                body = [one for each in body for one in _without_calls(each, helpers)]
                for each in body:
                    each.call = statement
                return body
        case ast.Expr(ast.Call(ast.Call(ast.Attribute(attr="when"), [_]) as when, [done], [])):
            body = [ast.Expr(done.body if isinstance(done, ast.Lambda) else ast.Call(done, [], []))]
            body = [one for each in body for one in _without_calls(each, helpers)]
            under = ast.FunctionDef("_", ast.arguments([], [], None, [], [], None, []), body, [when], type_params=[])
            under.written = statement  # type: ignore[attr-defined]  # as it stands in the text
            return [ast.fix_missing_locations(ast.copy_location(under, statement))]
    return [statement]


_MOST = 4  # times that a loop over things that stand in the text is written out


class _Unrolled(ast.NodeTransformer):
    """Loops over a tuple that stands in the text, as what they do one time after the other.

    statements: also those that are no expressions.
    """

    def __init__(self, statements: bool) -> None:
        self.statements = statements

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        times = _times(node.target, node.iter) if self.statements else None
        if times is None or node.orelse or any(isinstance(n, ast.Break | ast.Continue) for n in ast.walk(node)):
            return node
        return [put(each) for put in times for each in node.body]

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        self.generic_visit(node)
        only, *more = node.generators
        times = None if more or only.ifs else _times(only.target, only.iter)
        if times is None:
            return node
        return ast.copy_location(ast.Tuple([put(node.elt) for put in times], ast.Load()), node)

    visit_GeneratorExp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("tuple" | "list"), [ast.Tuple() as made], []):
                return made
        return node


def _times(target: ast.expr, values: ast.expr) -> list[Callable[[Any], Any]] | None:
    """For each time of a loop, what puts the values of its variables into a node; None where they are not known."""
    match values:
        case ast.Tuple(items) | ast.List(items):
            pass
        case ast.Call(ast.Name("enumerate"), [ast.Tuple(all_of)], []):
            items = [ast.Tuple([ast.copy_location(ast.Constant(n), x), x], ast.Load()) for n, x in enumerate(all_of)]
        case ast.Call(ast.Name("range"), [ast.Constant(int(times))], []):
            items = [ast.copy_location(ast.Constant(n), values) for n in range(times)]
        case _:
            return None
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    rows = [x.elts if isinstance(target, ast.Tuple) and isinstance(x, ast.Tuple) else [x] for x in items]
    known = all(isinstance(n, ast.Name) for n in names) and all(len(row) == len(names) for row in rows)
    if not known or not 0 < len(rows) <= _MOST or any(isinstance(x, ast.Starred) for x in items):
        return None
    return [functools.partial(_filled, [n.id for n in names], row) for row in rows]  # type: ignore[attr-defined]


def _filled(names: Sequence[str], values: Sequence[ast.expr], node: Any) -> Any:
    """A program with values in the places of names. Each is what stands in the call, and there it is changed."""
    node = copy_of(node)
    for name, value in zip(names, values, strict=True):
        node = Inlined(name, value, at=getattr(value, "use", value)).visit(node)
    return node


class _Spread(ast.NodeTransformer):
    """`functools.partial(f, a)(b, c=d)` as `f(a, b, c=d)`, and a lambda that is called. A lambda that only calls f with
    what it gets, and keywords, is a partial."""

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Lambda(ast.arguments([], names, None, [], [], None, []), ast.Call(called, args, [_, *_] as known)):
                own = {a.arg for a in names}
                same = [getattr(a, "id", "") for a in args] == [a.arg for a in names]
                if same and not own & {name for n in (called, *(k.value for k in known)) for name in reads_of(n)}:
                    partial = ast.Attribute(ast.Name("functools", ast.Load()), "partial", ast.Load())
                    new = ast.copy_location(ast.Call(partial, [called], known), node)
                    vars(new).update({k: v for k, v in vars(node).items() if k not in node._fields})
                    return ast.fix_missing_locations(new)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node.func:
            case ast.Call(ast.Attribute(attr="partial"), [called, *first], known) as part:
                whole: Any = ast.copy_location(ast.Call(called, [*first, *node.args], [*known, *node.keywords]), node)
                if hasattr(part, "use"):
                    whole.use = ast.copy_location(ast.Call(part.use, node.args, node.keywords), node)
                    whole.shared = whole.often = part.shared  # type: ignore[attr-defined]
                return whole
            case ast.Lambda(ast.arguments([], names, None, [], [], None, []), body) as called if (
                len(names) == len(node.args) and not node.keywords
            ):
                value = _filled([n.arg for n in names], node.args, body)
                if hasattr(called, "use"):
                    value.use = ast.copy_location(ast.Call(called.use, node.args, []), node)
                return value
        return node


def _name_versions(function: ast.FunctionDef) -> None:
    """A name that is given another value becomes another name, where one statement comes after the other."""
    arguments = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
    given: Counter[str] = Counter(arguments)
    here = [n for each in function.body if isinstance(each, ast.Assign) for n in _names_in(each.targets)]
    given.update(n.id for n in here)
    inner = [n for each in function.body for n in ast.walk(each)]
    bound = [n.id for n in inner if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load) and n not in here]
    elsewhere = {*bound, *(name_of(n) for n in inner if isinstance(n, ast.arg | ast.FunctionDef))}
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
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return [statement]
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Tuple) or any(isinstance(each, ast.Starred) for each in target.elts):
        return [statement]
    shape = _shape_in(value)
    if shape is not None:
        sizes = [_size_along(shape, axis) for axis in range(len(target.elts))]
        parts = [(name, size) for name, size in zip(target.elts, sizes, strict=True) if getattr(name, "id", "") != "_"]
        return [ast.copy_location(ast.Assign([each], new), each) for each, new in parts]
    if not isinstance(value, ast.Tuple | ast.List):
        named = [(n, each) for n, each in enumerate(target.elts) if getattr(each, "id", "") != "_"]
        return [_element(value, *named[0])] if len(named) == 1 < len(target.elts) else [statement]
    if len(target.elts) != len(value.elts):
        return [statement]
    pairs = [(t, v) for t, v in zip(target.elts, value.elts, strict=True) if name_of(t) != name_of(v) or not name_of(t)]
    given = [{n.id for n in ast.walk(t) if isinstance(n, ast.Name)} for t, _ in pairs]
    starred = any(isinstance(each, ast.Starred) for each in value.elts)
    placed = any(isinstance(n, ast.Subscript | ast.Call) for n in ast.walk(target))
    if starred or placed or any(names & reads_of(v) for n, names in enumerate(given) for _, v in pairs[n + 1 :]):
        return [statement]
    split = [ast.copy_location(ast.Assign([t], v), t) for t, v in pairs]
    for each in split:
        each.beside = [(name_of(t), v) for t, v in pairs if t is not each.targets[0]]  # type: ignore[attr-defined]
    return [one for each in split for one in _one_by_one(each)]


def _element(value: ast.expr, number: int, name: ast.expr) -> ast.stmt:
    """`_, name = value` as `name = value[1]`."""
    part = ast.copy_location(ast.Subscript(value, ast.Constant(number), ast.Load()), value)
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([name], part), name))


def _shape_in(value: ast.expr) -> ast.Attribute | None:
    """The `x.shape` or `x.y.shape` that a value is, or begins with: `x.shape[:2]`."""
    match value:
        case ast.Subscript(shape, ast.Slice(lower=None, upper=ast.Constant(), step=None)):
            pass
        case shape:
            pass
    owner = shape.value if isinstance(shape, ast.Attribute) and shape.attr == "shape" else None
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return shape if isinstance(shape, ast.Attribute) and isinstance(owner, ast.Name) else None


def _size_along(shape: ast.Attribute, axis: int) -> ast.expr:
    size = ast.copy_location(ast.Subscript(shape, ast.Constant(axis), ast.Load()), shape)
    size.unpacked = True  # type: ignore[attr-defined]  # it stands nowhere in the text
    return ast.fix_missing_locations(size)


def values_with_names(function: ast.FunctionDef) -> dict[str, str]:
    """The names that a function gives to one value each, by the text of the value."""
    nodes = ast.walk(_Unrolled(False).visit(copy_of(function)))
    every = [one for n in nodes if isinstance(n, ast.Assign) for one in _one_by_one(n)]
    given = [n for n in every if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    texts: dict[str, set[str]] = defaultdict(set)
    for n in given:
        texts[n.targets[0].id].add(ast.unparse(n.value))  # type: ignore[attr-defined]
    values = {text: name for name, (text, *more) in texts.items() if not more}
    return {text: name for text, name in values.items() if not text.isidentifier() and not text.isnumeric()}


def _straighten(body: list[ast.stmt], whole: ast.FunctionDef, names: set[str], values: set[str]) -> None:
    """Puts values in the places of their names: first what is short, then what is used once, later in this body."""
    for short in (True, False):
        for n in reversed(range(len(body) - 1)):
            each = body[n]
            if not (isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name)):
                continue
            name, kept = each.targets[0].id, names if not is_step(each.value) else set[str]()
            if name in kept or not (_is_steady(each.value) if short else key_of(each.value) not in values):
                continue
            used = [u for u in _in_scope_of(name, whole) if isinstance(u, ast.Name) and u.id == name]
            if sum(isinstance(u.ctx, ast.Store) for u in used) != 1 or _is_filled(each.value, used, whole):
                continue
            if short or _alone(used, body[n:]):
                inline = Inlined(name, each.value, shared=len(used) > 2)
                body[n + 1 :] = [inline.visit(other) for other in body[n + 1 :]]
                del body[n]


def _is_filled(value: ast.expr, used: Sequence[ast.Name], whole: ast.FunctionDef) -> bool:
    """Whether a name is of a list or a dictionary that changes: something is appended to it, or put into a place."""
    if not isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp):
        return False
    inside = [n for n in ast.walk(whole) if isinstance(n, ast.Attribute | ast.Subscript) and n.value in used]
    return any(isinstance(n, ast.Attribute) or not isinstance(n.ctx, ast.Load) for n in inside)


def _is_steady(value: ast.expr) -> bool:
    """Whether a value is short, and the same wherever it stands."""
    changes = any(may_change(u) or is_work(u) for u in ast.walk(value))
    most = 3 * _SHORT if hasattr(value, "outer") else _SHORT
    return (isinstance(value, ast.Lambda) or not changes) and size_of(value) < most


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
    inner = {id(n) for each in ast.walk(there) if _is_inner(each) for n in ast.walk(each)}
    one_of_many = inner and isinstance(getattr(body[0], "value", None), ast.Lambda)  # which of them it is may be wrong
    if not simple or one_of_many or not any(u in used and id(u) not in inner for u in ast.walk(there)):
        return False
    return not any(must_follow(between, body[0]) for between in body[1:m])


def is_naming(node: Any) -> bool:
    """Whether a statement gives names to values, and does nothing else."""
    targets = [n for t in getattr(node, "targets", ()) for n in getattr(t, "elts", [t])]
    return isinstance(node, ast.Assign) and all(isinstance(n, ast.Name) for n in targets)


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
    value.written = statement  # type: ignore[attr-defined]
    vars(value).update({"outer": True} if hasattr(statement, "outer") else {})
    return ast.copy_location(ast.Assign([ast.Name(statement.name, ast.Store())], value), statement)


def may_change(node: ast.AST) -> bool:
    """Whether a node may have another value where its name is used: what is read of a Ref, not its shape or a part."""
    steady = isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") in ("shape", "at")
    return isinstance(node, ast.Subscript | ast.Lambda) and not steady


def is_work(node: ast.AST) -> bool:
    """Whether a node is a call that would be made twice if it stood in two places; of numbers, that is no work."""
    called = getattr(node, "func", None)
    return isinstance(node, ast.Call) and not is_step(node) and getattr(called, "attr", "") not in _CHEAP


def is_step(node: ast.AST) -> bool:
    """Whether a node is the index of a step or a CTA, or their number: as good as a name."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _STEPS


def _hides(node: ast.AST, name: str) -> bool:
    """Whether a node is a function with an argument of that name."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    return any(a.arg == name for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _in_scope_of(name: str, tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without functions inside of it in which the name is another one."""
    for node in ast.iter_child_nodes(tree):
        outside = _outside(node) if _hides(node, name) else [node]
        for each in outside:
            yield each
            yield from _in_scope_of(name, each)


def _outside(function: Any) -> list[ast.expr]:
    """What is worked out where a function stands, and not inside of it."""
    every = (*getattr(function, "decorator_list", ()), *function.args.defaults, *function.args.kw_defaults)
    return [each for each in every if each is not None]


class Inlined(ast.NodeTransformer):
    """Puts a value in the place of its name. It keeps the name (use), and where it stands in the text (defined).

    shared: other places have the value, too, so it is right or wrong as a whole. Of a function (often) that is so where
    it is called. at: where the reader has written it, if that is not where the name stands.
    """

    def __init__(self, name: str, value: ast.expr, shared: bool = False, at: ast.expr | None = None) -> None:
        self.name, self.value, self.often, self.at = name, value, shared, at
        self.shared = shared and not isinstance(value, ast.Lambda)

    def visit(self, node: Any) -> Any:
        if not _hides(node, self.name):
            return super().visit(node)
        for holder, field in ((node, "decorator_list"), (node.args, "defaults"), (node.args, "kw_defaults")):
            values = getattr(holder, field, None)
            if values:
                setattr(holder, field, [each and self.visit(each) for each in values])
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != self.name or not isinstance(node.ctx, ast.Load):
            return node
        value: Any = copy_of(self.value)
        value.use, value.defined = self.at or node, (value.lineno, value.col_offset)
        value.shared, value.often = self.shared, self.often
        return value


def copy_of(tree: Any) -> Any:
    """A copy of a syntax tree, to be changed. What its nodes carry beside their fields is shared, not copied."""
    if isinstance(tree, list):
        return [copy_of(each) for each in tree]
    if not isinstance(tree, ast.AST) or isinstance(tree, ast.expr_context):
        return tree
    new = type(tree)()
    vars(new).update({k: copy_of(value) if k in tree._fields else value for k, value in vars(tree).items()})
    return new


def in_order(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.expr_context):
            yield from in_order(child)


def reads_of(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def uses_of(statement: Any) -> tuple[set[str], set[str]]:
    """The names that a statement reads, and those it writes, or hands to a function that may write to a Ref."""
    nodes = list(ast.walk(statement))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    into = [n.value for n in nodes if isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    handed = [a for n in nodes if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))]
    refs = {n.id for n in (*into, *handed) if isinstance(n, ast.Name) and (n in into or n.id.endswith("_ref"))}
    return reads_of(statement), stored | refs


def must_follow(later: ast.stmt, earlier: ast.stmt) -> bool:
    """Whether two statements cannot change places: one writes what the other reads or writes, or they do more."""
    if any(isinstance(n, ast.Return | ast.Expr) for n in (later, earlier)):
        return True
    (reads, writes), (read, written) = uses_of(later), uses_of(earlier)
    return bool(reads & written or writes & read or writes & written)


def key_of(node: Any) -> str:
    """A text that two nodes share if they are the same program."""
    if isinstance(node, ast.AST):
        unnamed = isinstance(node, ast.FunctionDef) and node.decorator_list  # under pl.when: nobody calls it
        fields = [(f, v) for f, v in ast.iter_fields(node) if f not in IGNORED and not (unnamed and f == "name")]
        body = ",".join(f"{f}={sorted(map(key_of, v)) if f in UNORDERED else key_of(v)}" for f, v in fields)
        return f"{type(node).__name__}({body})"
    if isinstance(node, list):
        return "[" + ",".join(map(key_of, node)) + "]"
    return repr(node)


def size_of(node: ast.AST) -> int:
    """How many nodes a program has; the index of a step counts as one, as the name that it often has."""
    if is_step(node):
        return 1
    return 1 + sum(size_of(n) for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr_context))


def kinds_of_names(function: ast.FunctionDef) -> dict[str, set[type]]:
    """What binds each name inside of a function: an argument, a function, a comprehension, or an assignment.

    Names of different kinds are not the same thing in two programs.
    """
    nodes = [n for n in ast.walk(function) if n is not function]
    inner = {id(n) for c in nodes if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    kinds: dict[str, set[type]] = defaultdict(set)
    for n in nodes:
        if isinstance(n, ast.arg | ast.FunctionDef) and name_of(n):
            kinds[name_of(n)].add(type(n))
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            kinds[n.id].add(ast.comprehension if id(n) in inner else ast.Assign)
    return kinds


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef) and not node.decorator_list else ""
