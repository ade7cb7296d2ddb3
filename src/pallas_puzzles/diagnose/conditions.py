"""Statements that one of two programs has under a condition, while the other does them at every step.

The other one gets `pl.when(True)` around them, so that the two differ in the condition alone.
"""

import ast
from collections.abc import Iterator

from .differences import likeness, with_arguments_of
from .straight import condition_of, copy_of

_LIKE = 0.5  # of two statements, from 0 to 1: more than that, and they are the same in two places


def as_both(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Two functions, both with conditions where one of them has one. They are changed."""
    theirs = with_arguments_of(mine, theirs)
    pairs = [*_blocks(mine, theirs)]
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
