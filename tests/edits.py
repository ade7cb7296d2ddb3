"""Small mistakes, made by program: every edit of a function's syntax tree that a slip could have made."""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pallas_puzzles.diagnose.slips import COMPARISONS, OPERATORS, Place, places

_ATTRIBUTES = {"float32": "bfloat16", "bfloat16": "float32", "maximum": "minimum", "cumsum": "sum", "exp2": "exp"}
_REDUCTIONS = {"sum": "max", "max": "sum", "mean": "sum", "min": "max", "any": "all", "all": "any"}
_OF_ONE_ARRAY = "abs exp exp2 log log2 sqrt rsqrt sigmoid tanh relu silu gelu logical_not cumsum".split()
_WORDS = {"parallel": "arbitrary", "arbitrary": "parallel"}
# Exchanged, the arguments of these are the same, are tried elsewhere, or make no program at all
_ARGUMENTS_IN_ORDER = set(
    "where maximum minimum max min logical_and logical_or pallas_call VMEM SMEM when BlockSpec ShapeDtypeStruct full "
    "zeros ones full_like".split()
)
_NEEDED = {None, "grid", "in_specs", "out_specs", "out_shape", "grid_spec", "num_scalar_prefetch", "scratch_shapes"}
_TOO_LARGE = 1.005  # half a percent: what rounding to bfloat16 could hide

Values = Mapping[str, str]  # an expression -> the text of the value that it has in the notebook's own example


@dataclass(frozen=True)
class Edit:
    """One edit: the line that it is on, in words, and the function after it."""

    line: int
    text: str
    code: str


def _statement(place: Place) -> ast.stmt:
    return next(each for each in (place.node, *reversed(place.around)) if isinstance(each, ast.stmt))


def edits(source: str, values: Values) -> Iterator[Edit]:
    """Every edit of a function, in the order of its text; no two of them make the same program."""
    tree = ast.parse(source)
    function = tree.body[0]
    before = ast.unparse(tree)
    programs, texts = {before}, dict[str, int]()
    for place in places(function):
        for new in _changes(place, values):
            old_statement = _first_line(_statement(place))
            place.put(new)
            try:
                code = ast.unparse(ast.fix_missing_locations(tree))
                new_statement = _first_line(new if place.node is _statement(place) else _statement(place))
            finally:
                place.put(place.node)
            if code in programs:
                continue
            programs.add(code)
            text = _difference(old_statement, new_statement)
            texts[text] = texts.get(text, 0) + 1
            number = f" ({texts[text]})" if texts[text] > 1 else ""
            yield Edit(getattr(place.node, "lineno", _statement(place).lineno), f"{text}{number}", code)


# ---- edits of one node -----------------------------------------------------------------------------------------------


def _changes(place: Place, values: Values) -> Iterator[ast.AST]:
    """What may take the place of a node."""
    families = (_of_statements, _of_operators, _of_constants, _of_calls, _of_positions, _of_values)
    return itertools.chain.from_iterable(family(place, values) for family in families)


def _of_statements(place: Place, values: Values) -> Iterator[ast.AST]:
    match place.node:
        case ast.FunctionDef(decorator_list=[ast.Call()], body=body):  # under pl.when
            yield ast.If(ast.Constant(True), body, [])
            yield ast.Pass()
        case ast.If(body=body, orelse=orelse):
            yield ast.If(ast.Constant(True), body, [])
            yield ast.If(ast.Constant(True), orelse or [ast.Pass()], [])
        case ast.Expr(value=value) if not isinstance(value, ast.Constant):
            yield ast.Pass()
        case ast.AugAssign(target=target, op=op, value=value):
            yield ast.Pass()
            yield ast.Assign([target], value, lineno=place.node.lineno)
            yield ast.AugAssign(target, op, _in_16_bits(value))
        case ast.Assign(targets=[ast.Subscript() as target], value=value):
            yield ast.Pass()
            if not _is_filled(value):
                yield ast.Assign([target], _scaled(value), lineno=place.node.lineno)


def _of_operators(place: Place, values: Values) -> Iterator[ast.AST]:
    match place.node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            for other in COMPARISONS.get(type(op), []):
                yield ast.Compare(left, [other()], right)
        case ast.BoolOp(op=op, values=parts):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), parts)
            yield from parts
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in OPERATORS:
                yield ast.BinOp(left, OPERATORS[type(op)](), right)
            if isinstance(op, ast.FloorDiv) and not _in_a_grid(place):  # there it is the same, or allows for more
                yield ast.Call(_expression("pl.cdiv"), [left, right], [])
            yield left
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.BitAnd | ast.BitOr):
                yield right
        case ast.UnaryOp(op=ast.USub(), operand=ast.Attribute(attr="inf")):
            yield ast.Constant(0)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand


def _of_constants(place: Place, values: Values) -> Iterator[ast.AST]:
    match place.node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int(n)):
            if _is_an_axis(place):
                yield ast.Constant(n - 1 if n else 1)
                return
            yield ast.Constant(n + 1)
            if n > 0 and not (n == 1 and isinstance(place.parent, ast.BinOp)):  # x + 0 is x, which is tried, too
                yield ast.Constant(n - 1)
        case ast.Constant(value=float(x)):
            yield ast.Constant(x * 2 if x else 1.0)
            if x:
                yield ast.Constant(x * _TOO_LARGE)
        case ast.Constant(value=str(word)) if word in _WORDS:
            yield ast.Constant(_WORDS[word])
        case ast.Attribute(value=value, attr=attr) if attr in _ATTRIBUTES:
            yield ast.Attribute(value, _ATTRIBUTES[attr], ast.Load())
        case ast.Attribute(value=value, attr="T" | "mT"):
            yield value


def _of_calls(place: Place, values: Values) -> Iterator[ast.AST]:
    node = place.node
    if not isinstance(node, ast.Call):
        return
    name, args = _name(node.func), node.args
    match name, args:
        case "astype", [_] if isinstance(node.func, ast.Attribute):
            yield node.func.value
        case "where", [mask, yes, no]:
            yield yes
            yield no
            yield ast.Call(node.func, [mask, no, yes], [])
        case "maximum" | "minimum" | "max" | "min" | "logical_and" | "logical_or", [one, other]:
            yield one
            yield other
        case "cdiv", [one, other]:
            yield ast.BinOp(one, ast.FloorDiv(), other)
        case _, [one] if name in _OF_ONE_ARRAY and not _is_method(node):
            yield one
        case "program_id", _:
            yield ast.Constant(0)
            yield ast.BinOp(node, ast.Add(), ast.Constant(1))
        case "num_programs", _:
            yield ast.Constant(1)
            yield ast.Constant(2)
        case _ if name in _REDUCTIONS and (_is_method(node) or "." in ast.unparse(node.func)):
            yield ast.Call(_renamed(node.func, _REDUCTIONS[name]), args, node.keywords)
    if name not in _ARGUMENTS_IN_ORDER:
        for i in range(len(args) - 1):
            yield ast.Call(node.func, [*args[:i], args[i + 1], args[i], *args[i + 2 :]], node.keywords)
    for keyword in node.keywords:
        if keyword.arg not in _NEEDED:
            yield ast.Call(node.func, args, [each for each in node.keywords if each is not keyword])


def _of_positions(place: Place, values: Values) -> Iterator[ast.AST]:
    """Index maps, grids, and the shapes of blocks and scratch."""
    node = place.node
    if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Load):
        return
    about = _about_positions(place)
    for i, part in enumerate(node.elts):
        if about == "map" and not isinstance(part, ast.Constant):
            yield _with(node, i, ast.Constant(0))
            yield _with(node, i, ast.BinOp(part, ast.Add(), ast.Constant(1)))
        if about == "grid":
            yield _with(node, i, ast.Constant(1))
        if about == "shape" and i == len(node.elts) - 1:
            yield _with(node, i, ast.BinOp(ast.Constant(2), ast.Mult(), part))
        if about and i + 1 < len(node.elts):
            yield ast.Tuple([*node.elts[:i], node.elts[i + 1], part, *node.elts[i + 2 :]], ast.Load())


def _of_values(place: Place, values: Values) -> Iterator[ast.AST]:
    """An expression gives way to the value that it has in the notebook's own example."""
    node = place.node
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return
    text = ast.unparse(node)
    if (
        text in values
        and not _is_filled(place.parent)
        and not (values[text] == "0" and isinstance(place.parent, ast.Compare))
    ):
        yield _expression(values[text])
    if isinstance(node, ast.Attribute) and node.attr == "dtype" and not _is_filled(place.parent):
        yield _expression("jnp.float32")
        yield _expression("jnp.bfloat16")


# ---- questions to a node ---------------------------------------------------------------------------------------------


def _about_positions(place: Place) -> str:
    """What a tuple says: where a block is ("map"), how many steps there are ("grid"), or how large something is."""
    inner: ast.AST = place.node
    for each in reversed(place.around):
        if isinstance(each, ast.Lambda):
            return "map" if each.body is inner else ""
        if isinstance(each, ast.Return):
            function = next(f for f in reversed(place.around) if isinstance(f, ast.FunctionDef))
            return "map" if function.name.endswith("map") and each.value is inner else ""
        if isinstance(each, ast.keyword):
            return "grid" if each.arg == "grid" and each.value is inner else ""
        if isinstance(each, ast.Call):
            return "shape" if _name(each.func) in ("VMEM", "SMEM") and each.args[0] is inner else ""
        inner = each
    return ""


def _in_a_grid(place: Place) -> bool:
    functions = (each.name for each in place.around if isinstance(each, ast.FunctionDef))
    keywords = (each.arg or "" for each in place.around if isinstance(each, ast.keyword))
    return any(name.endswith("grid") for name in (*functions, *keywords))


def _is_an_axis(place: Place) -> bool:
    """The number of an axis: x.shape[1], axis=1, pl.program_id(1)."""
    match place.parent:
        case ast.Subscript(value=ast.Attribute(attr="shape")) | ast.keyword(arg="axis"):
            return True
        case ast.Call(func=func):
            return _name(func) in ("program_id", "num_programs")
    return False


def _is_filled(node: ast.AST) -> bool:
    """jnp.zeros(...) and its like: one value, whatever its dtype."""
    return isinstance(node, ast.Call) and _name(node.func) in ("zeros", "zeros_like", "full", "full_like")


def _is_method(call: ast.Call) -> bool:
    """x.sum(), and not jnp.sum(x)."""
    return isinstance(call.func, ast.Attribute) and _name(call.func.value) not in ("jnp", "jax", "lax", "nn", "np")


def _name(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


# ---- making nodes ----------------------------------------------------------------------------------------------------


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _renamed(node: ast.expr, name: str) -> ast.expr:
    return ast.Attribute(node.value, name, ast.Load()) if isinstance(node, ast.Attribute) else ast.Name(name)


def _with(node: ast.Tuple, i: int, part: ast.expr) -> ast.Tuple:
    return ast.Tuple([*node.elts[:i], part, *node.elts[i + 1 :]], ast.Load())


def _scaled(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Mult(), ast.Constant(_TOO_LARGE))


def _in_16_bits(node: ast.expr) -> ast.expr:
    there = ast.Call(ast.Attribute(node, "astype", ast.Load()), [_expression("jnp.bfloat16")], [])
    return ast.Call(ast.Attribute(there, "astype", ast.Load()), [_expression("jnp.float32")], [])


# ---- edits in words --------------------------------------------------------------------------------------------------

_CONTEXT = 16  # letters before and after what differs, and the rest of the word
_LONG = 64  # letters: of anything longer the middle is left out


def _first_line(node: ast.AST) -> str:
    return "(nothing)" if isinstance(node, ast.Pass) else ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]


def _difference(old: str, new: str) -> str:
    """What differs between two lines, with a little around it, cut between words: "old -> new"."""
    before = _alike(old, new)
    after = _alike(old[before:][::-1], new[before:][::-1])
    start, end = before - _edge(old[:before][::-1]), after - _edge(old[len(old) - after :])
    return f"{_shortened(old[start : len(old) - end])} -> {_shortened(new[start : len(new) - end])}"


def _alike(one: str, other: str) -> int:
    """How many letters at the start of two texts are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _edge(text: str) -> int:
    """How many letters at the start of a text are context: up to the end of a word."""
    word = re.compile(r"\w*").match(text, min(_CONTEXT, len(text)))
    return word.end() if word else len(text)


def _shortened(text: str) -> str:
    return text.strip() if len(text) <= _LONG else f"{text[: _LONG // 2].strip()} ... {text[-_LONG // 2 :].strip()}"
