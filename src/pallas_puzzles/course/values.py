"""The numbers that a reader's plain Python function makes on its way to its result."""

import ast
import contextlib
import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..lens.watchdog import TimeLimit, time_limit
from .holes import parsed

_NOTED = "__noted__"
_MAKES = (ast.BinOp, ast.Call, ast.Name, ast.Subscript, ast.Attribute, ast.IfExp, ast.UnaryOp)
_MOST = 100  # elements of an array, each of which somebody may have meant


def made(fn: Callable[..., Any], args: Sequence[Any], limit_s: float) -> list[float]:
    """What the expressions in `fn` are while it runs on these arguments; [] where that cannot be told."""
    found: list[float] = []

    def noted(value: Any) -> Any:
        if isinstance(value, int | float | np.ndarray | np.generic | jax.Array) and np.size(value) <= _MOST:
            with contextlib.suppress(Exception):  # a tracer has no number
                found.extend(map(float, np.ravel(value)))
        return value

    function = copy.deepcopy(parsed(fn))
    with contextlib.suppress(Exception, TimeLimit), contextlib.redirect_stdout(io.StringIO()):
        assert function is not None, "its source is gone"
        function.body = [_Noting().visit(statement) for statement in function.body]
        names = {**fn.__globals__, _NOTED: noted}
        exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "<noted>", "exec"), names)
        with time_limit(limit_s, "your function"):
            names[function.name](*args)
        return found
    return []


class _Noting(ast.NodeTransformer):
    """Each expression in a call that notes its value."""

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if not isinstance(node, _MAKES) or isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return node
        return ast.Call(ast.Name(_NOTED, ast.Load()), [node], [])


def occurs(value: float, among: Sequence[float]) -> bool:
    return any(math.isclose(value, other, rel_tol=1e-6) for other in among)
