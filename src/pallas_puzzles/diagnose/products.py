"""A product of two matrices, which programs write in many ways, in the way in which another one is written."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SUMS_OVER = {  # `dot_general`: (whether the first matrix is turned, whether the second one is)
    "(((1,), (0,)), ((), ()))": (False, False),
    "(((1,), (1,)), ((), ()))": (False, True),
    "(((0,), (0,)), ((), ()))": (True, False),
}
_INDICES = re.compile(r"(\w)(\w),(\w)(\w)->(\w)(\w)")


@dataclass
class _Product:
    """left @ right, both as they are multiplied. turned: which of them is written the other way round. way: how it is
    written. made: writes the product of two other matrices so."""

    left: ast.expr
    right: ast.expr
    keywords: Sequence[ast.keyword]
    turned: tuple[bool, bool]
    way: str
    made: Callable[[ast.expr, ast.expr, Sequence[ast.keyword]], ast.expr | None]


def product_as(a: ast.AST, b: ast.AST) -> ast.expr | None:
    """Product b in the way in which product a is written; None where one of them is none, or both are written so."""
    mine, theirs = _product(a), _product(b)
    if mine is None or theirs is None or mine.way == theirs.way:
        return None
    left = _turned(theirs.left) if mine.turned[0] else theirs.left
    right = _turned(theirs.right) if mine.turned[1] else theirs.right
    made = mine.made(left, right, theirs.keywords)
    return ast.fix_missing_locations(ast.copy_location(made, b)) if made is not None else None


def _turned(matrix: ast.expr) -> ast.expr:
    match matrix:
        case ast.Attribute(inside, "T"):
            return inside
    return ast.copy_location(ast.Attribute(matrix, "T", ast.Load()), matrix)


def _product(node: ast.AST) -> _Product | None:
    turned, first, last = (False, False), list[ast.expr](), list[ast.expr]()
    match node:
        case ast.BinOp(left, ast.MatMult(), right):
            return _Product(left, right, (), turned, "@", lambda x, y, k: None if k else ast.BinOp(x, ast.MatMult(), y))
        case ast.Call(ast.Attribute(attr="dot" | "matmul"), [left, right]):
            pass
        case ast.Call(ast.Attribute(attr="dot_general"), [left, right, axes]) if ast.unparse(axes) in _SUMS_OVER:
            turned, last = _SUMS_OVER[ast.unparse(axes)], [axes]
        case ast.Call(ast.Attribute(attr="einsum"), [ast.Constant(str(text)) as indices, left, right]):
            found = _INDICES.fullmatch(text.replace(" ", ""))
            if found is None:
                return None
            a, b, c, d, row, column = found.groups()
            turned, first = (a != row, d != column), [indices]
            (i, over), (same, j) = (b, a) if turned[0] else (a, b), (d, c) if turned[1] else (c, d)
            if not (i == row and j == column and over == same and len({i, j, over}) == 3):
                return None
        case _:
            return None
    func, keywords = node.func, node.keywords
    way = " ".join(map(ast.unparse, [func, *first, *last]))
    left, right = (_turned(each) if turn else each for turn, each in zip(turned, (left, right), strict=True))
    return _Product(left, right, keywords, turned, way, lambda x, y, k: ast.Call(func, [*first, x, y, *last], [*k]))
