"""Statements that one of two programs has under a condition, while the other does them at every step.

The other one gets `pl.when(True)` around them, so that the two differ in the condition alone.
"""

import ast
from collections.abc import Iterator

from .differences import Replaced, likeness, read_of, with_arguments_of
from .straight import condition_of, copy_of, key_of, reads_of, uses_of

_LIKE = 0.5  # of two statements, from 0 to 1: more than that, and they are the same in two places


def as_both(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Two functions, both with conditions where one of them has one. They are changed."""
    theirs = with_arguments_of(mine, theirs)
    _start_as_in(mine, theirs)
    _chosen_as_in(mine, theirs)
    pairs = [*_blocks(mine, theirs)]
    for block, beside in pairs:
        block.body = [part for each in block.body for part in _parted(each, beside)]
    added = [(b, _guarded(b, other)) for a, c in pairs for b, other in ((a, c), (c, a))]
    for block, body in added:
        block.body = body
    return mine, theirs


def _blocks(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> Iterator[tuple[ast.FunctionDef, ast.FunctionDef]]:
    """The functions, and those inside of them that are alike: bodies of loops."""
    yield mine, theirs
    inner = [n for n in theirs.body if isinstance(n, ast.FunctionDef) and condition_of(n) is None]
    for each in mine.body:
        if isinstance(each, ast.FunctionDef) and condition_of(each) is None and inner:
            like = max(inner, key=lambda n: likeness(each, n))
            if likeness(each, like) > 0:
                yield from _blocks(each, like)


def _start_as_in(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """The right program with a starting value under `pl.when(c)`, in the place of `jnp.where(c, start, ref[...])`, if
    the answer sets the Ref under a condition."""
    conditional = [each for n in mine.body if condition_of(n) is not None for each in getattr(n, "body", [])]
    set_there = {key_of(n.targets[0]) for n in conditional if isinstance(n, ast.Assign)}
    for each in list(theirs.body):
        match each:
            case ast.Assign([ast.Subscript(ref) as target], value) if key_of(target) in set_there:
                for where in _choices(value, target)[:1]:
                    condition, start, kept = map(ast.unparse, where.args)
                    make = (
                        "jnp.zeros({0}.shape, {0}.dtype)"
                        if start == "0"
                        else f"jnp.full({{0}}.shape, {start}, {{0}}.dtype)"
                    )
                    text = f"@pl.when({condition})\ndef _():\n    {kept} = {make}"
                    theirs.body.insert(theirs.body.index(each), ast.parse(text.format(ast.unparse(ref))).body[0])
                    Replaced(where, where.args[2]).visit(each)


def _choices(value: ast.expr, target: ast.expr) -> list[ast.Call]:
    """The parts `jnp.where(c, start, ref[...])` of a value that is stored into the same place."""
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and len(n.args) == 3]
    held = key_of(read_of(target))
    return [n for n in calls if getattr(n.func, "attr", "") == "where" and key_of(n.args[2]) == held]


def _chosen_as_in(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> None:
    """The other way round: `jnp.where(c, 0, ref[...])` where the right program sets the Ref to 0 under `pl.when(c)`."""
    for each in [n for n in mine.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)]:
        target = each.targets[0]
        chosen = _choices(each.value, target)
        for n, add in enumerate(theirs.body) if len(chosen) == 1 else ():
            if not (isinstance(add, ast.AugAssign) and key_of(add.target) == key_of(target)):
                continue
            for under in [u for u in theirs.body[:n] if condition_of(u) is not None]:
                body: list[ast.stmt] = under.body  # type: ignore[attr-defined]
                starts = [s for s in body if isinstance(s, ast.Assign) and key_of(s.targets[0]) == key_of(target)]
                for start in [s for s in starts if _is_zero(s.value) and _is_zero(chosen[0].args[1])]:
                    body.remove(start)
                    args = [copy_of(condition_of(under)), copy_of(chosen[0].args[1]), read_of(target)]
                    kept = ast.BinOp(ast.Call(copy_of(chosen[0].func), args, []), add.op, add.value)
                    theirs.body[n] = ast.fix_missing_locations(ast.copy_location(ast.Assign([add.target], kept), add))
    theirs.body = [n for n in theirs.body if getattr(n, "body", None) != []]


def _is_zero(value: ast.expr) -> bool:
    match value:
        case ast.Constant(0) | ast.Call(ast.Attribute(attr="zeros" | "zeros_like")):
            return True
    return False


def _parted(each: ast.stmt, beside: ast.FunctionDef) -> list[ast.stmt]:
    """A body under a condition as two, under the same one, where the other program has a part of it under no condition.

    The part knows what it is a part of, and whether it comes last there.
    """
    condition, body = condition_of(each), getattr(each, "body", [])
    open_there = [n for n in beside.body if condition_of(n) is None]
    under = [t for n in beside.body if condition_of(n) is not None for t in getattr(n, "body", [])]

    def is_free(statement: ast.stmt) -> bool:
        free, bound = (max((likeness(statement, t) for t in all_of), default=0.0) for all_of in (open_there, under))
        return free > max(_LIKE, bound)

    free = [is_free(n) for n in body] if condition is not None else []
    cuts = [n for n in range(1, len(body)) if len(free) > n and free[n] != free[n - 1]]
    if len(cuts) != 1:
        return [each]
    parts = body[: cuts[0]], body[cuts[0] :]
    given = {name for n in parts[0] if isinstance(n, ast.Assign) for name in uses_of(n)[1]}
    if given & {name for n in parts[1] for name in reads_of(n)}:
        return [each]
    both = [copy_of(each), copy_of(each)]
    for n, (new, part) in enumerate(zip(both, parts, strict=True)):
        new.body, last = part, n == 1
        new.written = each
        if free[0] != last:
            new.part_of = each, last
    return both


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
