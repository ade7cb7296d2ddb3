"""An answer and a right program in one form, with the functions outside of them that only one of the two calls."""

import ast
import dataclasses
import math
from typing import Any

from .conditions import as_both
from .differences import Difference, Functions, differences
from .straight import copy_of, key_of, reads_of, side_by_side, straightened, with_helper

_OWN = 1.5  # a function of the reader's own is looked into also where the two then differ by somewhat more


@dataclasses.dataclass(frozen=True)
class Form:
    """mine: an answer as it is written, with its helpers. answer, right: both in one form. found: their differences."""

    mine: ast.FunctionDef
    answer: ast.FunctionDef
    right: ast.FunctionDef
    found: list[Difference]


def paired(mine: ast.FunctionDef, theirs: ast.FunctionDef, own: Functions, given: Functions) -> Form:
    """An answer and a right program in one form.

    own, given: functions outside of the two that each may call; the answer may call given ones, too. What only one of
    them calls is put inside of it where the two have more in common then: somebody has written out what the other one
    calls. In what is given, nothing can be wrong.
    """
    if key_of(mine) == key_of(theirs):
        same = straightened(mine)
        return Form(mine, same, same, [])
    theirs = _Imported(reads_of(mine)).visit(copy_of(theirs))
    theirs = ast.fix_missing_locations(_ByName({**given, **own}, mine).visit(theirs))
    best, size = _formed(mine, theirs)
    tried: set[str] = set()
    while names := (reads_of(mine) ^ reads_of(theirs)) & (own.keys() | given.keys()) - tried:
        name = min(names)
        tried.add(name)
        mine_too = own if name in own else {name: _marked(given[name])}
        pair = _within(mine, theirs, name, mine_too), _within(theirs, mine, name, given)
        form, less = _formed(*pair)
        if less < size * (_OWN if pair[0] is not mine else 1):
            best, size, (mine, theirs) = form, less, pair  # and what is called in there comes next
    return best


def _within(function: ast.FunctionDef, other: ast.FunctionDef, name: str, functions: Functions) -> ast.FunctionDef:
    there = name in reads_of(function) - reads_of(other) and name in functions
    return with_helper(function, functions[name]) if there else function


def _marked(given: ast.FunctionDef) -> ast.FunctionDef:
    function = copy_of(given)
    for n in [n for n in ast.walk(function) if isinstance(n, ast.expr | ast.stmt)]:
        vars(n)["given"] = True
    return function


def _is_given(answer: ast.FunctionDef, d: Difference) -> bool:
    """Whether a difference is in what is given."""
    nodes: list[Any] = [answer]
    for field, n in d.path:
        node = getattr(nodes[-1], field)
        nodes.append(node if n is None else node[n] if n < len(node) else None)
    return any(hasattr(n, "given") for n in (nodes if d.was is not None else nodes[:-1]))


def _formed(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> tuple[Form, float]:
    """Both in one form, and in how much they differ."""
    answer, right = as_both(*side_by_side(mine, theirs))
    apart = differences({mine.name: answer}, {mine.name: right})
    return Form(mine, answer, right, apart), sum(math.inf if _is_given(answer, d) else d.size for d in apart)


class _ByName(ast.NodeTransformer):
    """Calls of these functions with arguments by name where another program gives them by name, else by place."""

    def __init__(self, functions: Functions, beside: ast.FunctionDef) -> None:
        self.functions = functions
        calls = [n for n in ast.walk(beside) if isinstance(n, ast.Call)]
        called = [(n, getattr(f, "id", "")) for n in calls for f in (n.func, *n.args[:1])]  # or the partial of one
        self.by_name = {(name, k.arg) for n, name in called for k in n.keywords}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = getattr(node.func, "id", "")
        names = [a.arg for a in self.functions[called].args.args] if called in self.functions else []
        starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
        if starred or len(node.args) > len(names):
            return node
        values = dict(zip(names, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
        ends = (n for n, name in enumerate(names) if name not in values or (called, name) in self.by_name)
        args = [values.pop(name) for name in names[: next(ends, len(names))]]
        keywords = [ast.keyword(name, value) for name, value in values.items()]
        return ast.copy_location(ast.Call(node.func, args, keywords), node)


class _Imported(ast.NodeTransformer):
    """`jax.lax` as `lax`, and so on, where a program uses the short names, and `lax` as `jax.lax` where it does not."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        short = getattr(node.value, "id", "") == "jax" and node.attr in self.names
        return ast.copy_location(ast.Name(node.attr, node.ctx), node) if short else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        long = node.id == "lax" and "lax" not in self.names
        return ast.copy_location(ast.Attribute(ast.Name("jax", ast.Load()), "lax", ast.Load()), node) if long else node
