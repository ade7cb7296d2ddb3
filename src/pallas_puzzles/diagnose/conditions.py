"""Statements that one of two programs has under a condition, while the other does them at every step.

The other one gets `pl.when(True)` around them, so that the two differ in the condition alone. Where one clears a Ref
under a condition, and the other begins anew with `jnp.where(condition, 0, ref[...])`, the right one does as the answer.
"""

import ast
from collections.abc import Iterator

from .differences import Replaced, likeness, read_of, with_arguments_of
from .straight import condition_of, copy_of, key_of, kinds_of_names, may_change, name_of, reads_of, uses_of

_LIKE = 0.5  # of two statements, from 0 to 1: more than that, and they are the same in two places


def as_both(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Two functions, both with conditions where one of them has one. They are changed."""
    theirs = with_arguments_of(mine, theirs)
    pairs = [*_blocks(mine, theirs)]
    for block, other in pairs:
        _store_as(block, other)
        _name_as(block, other)
        _clear_as(block, other)
        _begin_as(block, other)
    added = [(b, _guarded(b, other)) for a, c in pairs for b, other in ((a, c), (c, a))]
    for block, body in added:
        block.body = body
    return mine, theirs


def _store_as(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """Where mine stores a value in all of a Ref and theirs gives it a name first, theirs stores it at once, too."""
    stores = [n for n in mine.body if isinstance(n, ast.Assign | ast.AugAssign) and not isinstance(n.value, ast.Name)]
    at_once = {key_of(n.targets[0] if isinstance(n, ast.Assign) else n.target) for n in stores}
    for store in list(theirs.body):
        match store:
            case ast.Assign([ast.Subscript(ast.Name(ref), ast.Constant(v)) as target], ast.Name(name)) if v is ...:
                named = [n for n in theirs.body if isinstance(n, ast.Assign) and name_of(n.targets[0]) == name]
                start, end = theirs.body.index(named[0]) if len(named) == 1 else -1, theirs.body.index(store)
                behind = [n for n in theirs.body[start + 1 :] if n is not store]
                before = theirs.body[start + 1 : end]
                again = any(ref in uses_of(n)[1] for n in behind) or any(ref in reads_of(n) for n in before)
                if -1 < start < end and key_of(target) in at_once and not again:
                    at_the_end = ast.copy_location(ast.Assign([target], named[0].value), store)
                    read = Replaced(ast.Name(name, ast.Load()), read_of(target))
                    theirs.body[start:] = [at_the_end, *map(read.visit, behind)]


def _name_as(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """Where mine gives a value a name, stores that in all of a Ref and goes on with it, theirs does so, too."""
    for each in mine.body:
        match each:
            case ast.Assign([ast.Subscript(ast.Name(ref), ast.Constant(v)) as target], ast.Name(name)) if v is ...:
                stores = [
                    n for n in theirs.body if isinstance(n, ast.Assign) and key_of(n.targets[0]) == key_of(target)
                ]
                if len(stores) != 1 or isinstance(stores[0].value, ast.Name) or name in kinds_of_names(theirs):
                    continue
                at, read = theirs.body.index(stores[0]), read_of(target)
                behind, load = theirs.body[at + 1 :], ast.Name(name, ast.Load())
                used = sum(getattr(n, "id", "") == name for other in mine.body for n in ast.walk(other))
                if used > 2 and not any(ref in uses_of(n)[1] for n in behind):
                    named = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], stores[0].value), stores[0])
                    stores[0].value = load
                    theirs.body[at:] = [named, stores[0], *(Replaced(read, load).visit(n) for n in behind)]


def _clear_as(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """Where mine clears a Ref under a condition and theirs begins anew with `jnp.where`, theirs clears it, too."""
    cleared, cleared_there = _clears(mine), _clears(theirs)
    for ref, (statement, where) in _begins(theirs).items():
        if ref in cleared and ref not in cleared_there:
            (under, store), (condition, value, read) = cleared[ref], where.args
            assert isinstance(read, ast.Subscript)
            at, store = theirs.body.index(statement), copy_of(store)
            theirs.body[at] = Replaced(where, read).visit(statement)
            if not (_is_zero(store.value) and _is_zero(value)):
                store.value = _full_of(value, ast.unparse(read.value))
            body = _always(store, under)
            body.decorator_list[0].args = [condition]  # type: ignore[attr-defined]
            theirs.body.insert(at, body)


def _begin_as(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """Where theirs clears a Ref under a condition and mine begins anew with `jnp.where`, theirs does so, too."""
    begun, begun_there = _begins(mine), _begins(theirs)
    for ref, (under, store) in _clears(theirs).items():
        behind = theirs.body[theirs.body.index(under) + 1 :]
        uses = [n for n in behind if any(key_of(x) == ref for x in ast.walk(n))]
        if ref in begun and ref not in begun_there and uses and not isinstance(uses[0], ast.FunctionDef):
            condition, read, where = condition_of(under), read_of(store.targets[0]), copy_of(begun[ref][1])
            both = _is_zero(store.value) and _is_zero(where.args[1])
            where.args = [condition, where.args[1] if both else store.value, read]
            new = uses[0]
            if isinstance(new, ast.AugAssign) and key_of(new.target) == ref:
                new = ast.copy_location(ast.Assign([new.target], ast.BinOp(read, new.op, new.value)), new)
            theirs.body[theirs.body.index(uses[0])] = ast.fix_missing_locations(Replaced(read, where).visit(new))
            under.body.remove(store)
            theirs.body = [n for n in theirs.body if n is not under or under.body]


def _clears(block: ast.FunctionDef) -> dict[str, tuple[ast.FunctionDef, ast.Assign]]:
    """By Ref: the store of a value into all of it that a block makes under a condition, and what it stands under."""
    found: dict[str, tuple[ast.FunctionDef, ast.Assign]] = {}
    for under in [n for n in block.body if isinstance(n, ast.FunctionDef) and condition_of(n) is not None]:
        for each in under.body:
            match each:
                case ast.Assign([ast.Subscript(ast.Name(), ast.Constant(v)) as ref], made) if v is ...:
                    if not any(map(may_change, ast.walk(made))):
                        found[key_of(ref)] = under, each
    return found


def _begins(block: ast.FunctionDef) -> dict[str, tuple[ast.stmt, ast.Call]]:
    """By Ref: the statement of a block with `jnp.where(condition, value, ref[...])`, and that call."""
    found: dict[str, tuple[ast.stmt, ast.Call]] = {}
    for each in [n for n in block.body if not isinstance(n, ast.FunctionDef)]:
        for n in ast.walk(each):
            match n:
                case ast.Call(
                    ast.Attribute(attr="where"), [_, _, ast.Subscript(ast.Name(), ast.Constant(value)) as ref], []
                ) if value is ...:
                    found.setdefault(key_of(ref), (each, n))
    return found


def _full_of(value: ast.expr, ref: str) -> ast.expr:
    """What fills a Ref with one value: a number alone has no shape."""
    full = ast.parse(f"jnp.zeros_like({ref})" if _is_zero(value) else f"jnp.full_like({ref}, 0)", mode="eval").body
    assert isinstance(full, ast.Call)
    full.args[1:] = [] if _is_zero(value) else [value]
    return full


def _is_zero(value: ast.expr) -> bool:
    match value:
        case ast.Constant(number):
            return number == 0
        case ast.Call(ast.Attribute(attr="zeros" | "zeros_like")):
            return True
        case ast.Call(ast.Attribute(attr="full" | "full_like"), [_, number, *_]):
            return _is_zero(number)
    return False


def _blocks(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> Iterator[tuple[ast.FunctionDef, ast.FunctionDef]]:
    """The functions, and those inside of them that are alike: bodies of loops."""
    yield mine, theirs
    inner = [n for n in theirs.body if isinstance(n, ast.FunctionDef) and condition_of(n) is None]
    for each in mine.body:
        if isinstance(each, ast.FunctionDef) and condition_of(each) is None and inner:
            like = max(inner, key=lambda n: likeness(each, n))
            if likeness(each, like) > 0:
                yield from _blocks(each, like)


def _guarded(block: ast.FunctionDef, beside: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of a block, with `pl.when(True)` around those that `beside` has under a condition alone."""
    theirs = [n for n in beside.body if isinstance(n, ast.FunctionDef) and condition_of(n) is not None]
    open_there = [n for n in beside.body if condition_of(n) is None]
    own = [n for n in block.body if isinstance(n, ast.FunctionDef) and condition_of(n) is not None]
    body: list[ast.stmt] = []
    last: ast.FunctionDef | None = None  # their body under a condition that the last statement belongs to
    for each in block.body:
        there = _there(each, theirs, open_there, own)
        if there is not None and there is last:
            assert isinstance(body[-1], ast.FunctionDef)
            body[-1].body.append(each)
        else:
            body.append(each if there is None else _always(each, there))
        last = there
    for n in [n for n in body if isinstance(n, ast.FunctionDef) and n not in block.body]:
        n.written, n.end_lineno = n.body[-1], n.body[-1].end_lineno  # type: ignore[attr-defined]
        there = _there(n.body[0], theirs, open_there, own)
        if there is None or any(_shared(o, there) >= _shared(n, there) for o in own):  # that condition is there
            return block.body
    return body


def _shared(body: ast.FunctionDef, other: ast.FunctionDef) -> float:
    """How many statements of another body this one has."""
    return sum(max(likeness(s, t) for s in body.body) for t in other.body)


def _there(
    each: ast.stmt, theirs: list[ast.FunctionDef], open_there: list[ast.stmt], own: list[ast.FunctionDef]
) -> ast.FunctionDef | None:
    """The body under a condition in which the other program has a statement, if it has it nowhere else."""
    match each:
        case ast.AugAssign() | ast.Expr() | ast.Assign([ast.Subscript()]):
            pass
        case _:
            return None
    pairs = [(likeness(each, t), n, t) for n, g in enumerate(theirs) for t in g.body]
    much, n, t = max(pairs, default=(0.0, 0, each), key=lambda pair: pair[0])
    else_where = [likeness(each, o) for o in open_there] + [likeness(o, t) for g in own for o in g.body]
    return theirs[n] if much > max([_LIKE, *else_where]) else None


def _always(each: ast.stmt, there: ast.FunctionDef) -> ast.FunctionDef:
    when = copy_of(there.decorator_list[0])
    when.args = [ast.Constant(True)]
    node = ast.FunctionDef("_", copy_of(there.args), [each], [when], type_params=[])
    for n in [node, *ast.walk(when)]:
        ast.copy_location(n, each)
    when.args[0].around = node.body
    return node
