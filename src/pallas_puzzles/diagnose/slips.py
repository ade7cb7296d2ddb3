"""Small changes of a program, each of which would undo a slip: a sign, an order or a name."""

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .differences import Difference, Functions, Path
from .straight import copy_of, kinds_of_names

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.Gt],
    ast.LtE: [ast.Lt, ast.GtE],
    ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.LtE],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Place:
    """Where a node stands: the nodes around it, outermost first, and how to put another one there."""

    node: Any
    around: tuple[Any, ...]
    path: Path
    put: Callable[[ast.AST], None]

    @property
    def parent(self) -> Any:
        return self.around[-1]


def places(node: ast.AST, around: tuple[ast.AST, ...] = (), path: Path = ()) -> Iterator[Place]:
    """Every node inside of another, in the order of the text; signatures and annotations are left out."""
    for field, value in ast.iter_fields(node):
        if field in ("ctx", "annotation", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                there = (*path, (field, i))
                yield Place(child, (*around, node), there, _setter(node, field, value, i))
                yield from places(child, (*around, node), there)


def _setter(node: ast.AST, field: str, value: Any, i: int | None) -> Callable[[ast.AST], None]:
    def put(new: ast.AST) -> None:
        if i is None:
            setattr(node, field, new)
        else:
            value[i] = new

    return put


def slips(functions: Functions) -> Iterator[Difference]:
    """One change of these functions after the other, the likeliest kinds first; none in a loop that may never end."""
    there = [(name, [*filter(_may_slip, places(f))], kinds_of_names(f)) for name, f in functions.items()]
    for kind in (_compared, _named_alike, _ordered, _calculated, _named):
        for name, inside, names in there:
            for place in inside:
                line = next((n.lineno for n in (place.node, *reversed(place.around)) if hasattr(n, "lineno")), 0)
                for new in kind(place, names):
                    yield Difference(name, place.path, place.node, ast.copy_location(new, place.node), line)


def _may_slip(place: Place) -> bool:
    return not any(isinstance(n, ast.While) for n in place.around)


Names = Mapping[str, set[type]]


def _compared(place: Place, names: Names) -> Iterator[ast.AST]:
    match place.node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for other in COMPARISONS.get(type(op), []):
                yield ast.Compare(left, [other()], [right])


def _ordered(place: Place, names: Names) -> Iterator[ast.AST]:
    node = place.node
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            yield from (type(node)(swapped, node.ctx) for swapped in _swapped(parts))
        case ast.Call(func=ast.Call() as func, args=args, keywords=keywords):
            yield from (ast.Call(func, swapped, keywords) for swapped in _swapped(args))
        case ast.Lambda(args=args, body=body):
            for swapped in _swapped(args.args):
                other = copy_of(args)
                other.args = swapped
                yield ast.Lambda(other, body)
        case ast.BinOp(left=left, op=ast.Sub() | ast.Div() as op, right=right):
            yield ast.BinOp(right, op, left)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)


def _swapped(parts: list[Any]) -> Iterator[list[Any]]:
    for i, j in itertools.combinations(range(len(parts)), 2):
        if ast.dump(parts[i]) != ast.dump(parts[j]):
            yield [*parts[:i], parts[j], *parts[i + 1 : j], parts[i], *parts[j + 1 :]]


def _calculated(place: Place, names: Names) -> Iterator[ast.AST]:
    match place.node:
        case ast.BinOp(left=left, op=op, right=right):
            yield left
            if isinstance(op, ast.FloorDiv):
                yield ast.Call(ast.Attribute(ast.Name("pl", ast.Load()), "cdiv", ast.Load()), [left, right], [])
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.BitAnd | ast.BitOr):
                yield right
            if type(op) in OPERATORS:
                yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op=op, values=parts):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), parts)
            yield from parts
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand


def _named_alike(place: Place, names: Names) -> Iterator[ast.AST]:
    """`first_query` for `last_query`."""
    words = _words(getattr(place.node, "id", ""))
    yield from (name for name in _named(place, names) if words & _words(name.id))


def _words(name: str) -> set[str]:
    return {*name.split("_")} - {"ref", ""}


def _named(place: Place, names: Names) -> Iterator[ast.Name]:
    match place.node:
        case ast.Name(name, ast.Load()) if name in names and getattr(place.parent, "func", None) is not place.node:
            for other, kinds in names.items():
                same_kind = (ast.FunctionDef in kinds) == (ast.FunctionDef in names[name])
                if other not in (name, "_") and same_kind and _is_ref(other) == _is_ref(name):
                    yield ast.Name(other, ast.Load())


def _is_ref(name: str) -> bool:
    return name.endswith("_ref")
