"""Changes of operations: one left out, another in its place, one more, at another place, of two values."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from ..capture import Call, is_readers_file, line_of
from ..ops import inlined, is_floating, np_dtype
from .trial import Change

_FACTORS = (1.0, 2.0, 0.5, -1.0)

Edit = tuple[Any, str, Any]  # a program, in words how it differs, and the equation where

_BINARY: dict[str, tuple[Callable[..., Any], str]] = {
    "mul": (lambda a, b: a * b, "multiplication"),
    "add": (lambda a, b: a + b, "addition"),
    "sub": (lambda a, b: a - b, "subtraction"),
    "div": (lambda a, b: a / b, "division"),
    "max": (jnp.maximum, "maximum"),
    "min": (jnp.minimum, "minimum"),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": lambda a: jnp.maximum(a, 0),
    "square": lambda a: a * a,
    "gelu": jax.nn.gelu,
    "silu": lambda a: a * jax.nn.sigmoid(a),
    "exp": jnp.exp,
}
_UNARY = frozenset("exp exp2 log tanh logistic sqrt rsqrt neg integer_pow square abs erf".split())
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_KEPT = frozenset("broadcast_in_dim convert_element_type reshape squeeze expand_dims copy".split())


def changes(call: Call, steering: bool = False) -> Iterator[Change]:
    """Kernels that differ from a call's by one operation, the likelier ones first. steering: by ids and comparisons."""
    kernel = getattr(call.kernel, "jaxpr", call.kernel)
    names = [*call.scalar_names, *(o.name for o in call.operands), *(s.name for s in call.scratch)]
    known = dict(zip(kernel.invars, names, strict=False))
    others: list[Any] = [_fewer, _others, _all_others, _more, _moved, _combined]
    for kind in [_steering(len(call.grid)), *([] if steering else others)]:
        for edited, words, eqn in _everywhere(kernel, known, kind):
            whole = call.kernel.replace(jaxpr=edited) if hasattr(call.kernel, "jaxpr") else edited
            line = line_of(eqn)
            yield Change(words, (line,) if line else (), kernel=whole, factors=_FACTORS)


def _everywhere(jaxpr: Any, names: dict[Any, str], kind: Any) -> Iterator[Edit]:
    """One kind of change, at every equation of a program and of the bodies under its branches."""
    yield from kind(jaxpr, names)
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "cond":
            continue
        for n, branch in enumerate(eqn.params["branches"]):
            inner = branch.jaxpr
            given = zip(inner.invars, eqn.invars[1:], strict=True)
            inside = {v: names[a] for v, a in given if not isinstance(a, jec.Literal) and a in names}
            for edited, words, where in _everywhere(inner, inside, kind):
                branches = list(eqn.params["branches"])
                branches[n] = branch.replace(jaxpr=edited)
                changed = eqn.replace(params={**eqn.params, "branches": tuple(branches)})
                yield _with(jaxpr, [*jaxpr.eqns[:i], changed, *jaxpr.eqns[i + 1 :]]), words, where


def _with(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    return jaxpr.replace(eqns=list(eqns))


def _equation(like: Any, fn: Callable[..., Any], out: Any, *args: Any) -> Any:
    """An equation that computes fn(*args) into out, at the line of another one."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args]
    (eqn,) = jax.make_jaxpr(jax.jit(lambda *a: fn(*a)))(*avals).jaxpr.eqns
    return eqn.replace(invars=list(args), outvars=[out], source_info=like.source_info)


def _fresh(v: Any) -> Any:
    """A new variable of the same type."""
    return jax.make_jaxpr(lambda a: a)(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)).jaxpr.invars[0]


def _replaced(jaxpr: Any, i: int, fn: Callable[..., Any], *args: Any) -> Any:
    """The program with equation i computing fn(*args) instead."""
    eqn = jaxpr.eqns[i]
    return _with(jaxpr, [*jaxpr.eqns[:i], _equation(eqn, fn, eqn.outvars[0], *args), *jaxpr.eqns[i + 1 :]])


def _behind_it(jaxpr: Any, i: int, fn: Callable[..., Any], *args: Any) -> Any:
    """The program with fn of what equation i computes, and of args, in the place of what it computes."""
    eqn, before = jaxpr.eqns[i], _fresh(jaxpr.eqns[i].outvars[0])
    two = [eqn.replace(outvars=[before]), _equation(eqn, fn, eqn.outvars[0], before, *args)]
    return _with(jaxpr, [*jaxpr.eqns[:i], *two, *jaxpr.eqns[i + 1 :]])


def _steering(axes: int) -> Any:
    def kind(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
        for i, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            if name in ("program_id", "num_programs"):
                for axis in range(axes):
                    if axis != eqn.params["axis"]:
                        changed = eqn.replace(params={**eqn.params, "axis": axis})
                        words = f"With pl.{name}({axis}) in place of pl.{name}({eqn.params['axis']})"
                        yield _with(jaxpr, [*jaxpr.eqns[:i], changed, *jaxpr.eqns[i + 1 :]]), words, eqn
            if name in _COMPARISONS and eqn.outvars[0].aval.shape == ():
                for other, sign in _COMPARISONS.items():
                    if other != name:
                        fn = getattr(jax.lax, other)
                        words = f"With {sign} in place of {_COMPARISONS[name]}"
                        yield _replaced(jaxpr, i, fn, *eqn.invars), words, eqn

    return kind


def _fewer(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """Without an operation."""
    for i, eqn in _sites(jaxpr):
        for kept in eqn.invars if _doing(eqn) else ():
            if _type(kept) == _type(eqn.outvars[0]) and not isinstance(kept, jec.Literal):
                yield _replaced(jaxpr, i, lambda a: a, kept), f"Without {_deed(jaxpr, names, eqn, kept)}", eqn


def _others(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """With another operation in the place of one."""
    for i, eqn in _sites(jaxpr):
        name = eqn.primitive.name
        if name in _BINARY:
            for other, (fn, noun) in _BINARY.items():
                if other != name:
                    words = f"With a {noun} in place of the {_BINARY[name][1]}"
                    yield _replaced(jaxpr, i, fn, *eqn.invars), words, eqn
        own = _function(eqn)
        for other, fn in _FUNCTIONS.items() if own in _FUNCTIONS else ():
            if other != own:
                yield _replaced(jaxpr, i, fn, eqn.invars[0]), f"With {other} in place of {own}", eqn


def _all_others(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """With another operation wherever there is one."""
    for name, (_, noun) in _BINARY.items():
        mine = [i for i, eqn in _sites(jaxpr) if eqn.primitive.name == name]
        for other, (fn, better) in _BINARY.items() if len(mine) > 1 else ():
            if other != name:
                changed = jaxpr
                for i in mine:
                    changed = _replaced(changed, i, fn, *jaxpr.eqns[i].invars)
                yield changed, f"With a {better} in place of every {noun}", jaxpr.eqns[mine[0]]


def _more(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """With one function more."""
    for i, eqn in _sites(jaxpr):
        for name in ("relu", "square", "exp", "gelu"):
            words = f"With {name} applied to {_value(jaxpr, names, eqn)}"
            yield _behind_it(jaxpr, i, _FUNCTIONS[name]), words, eqn


def _moved(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """With an operation of two values, or of one, at another place."""
    for i, eqn in _sites(jaxpr):
        if eqn.primitive.name not in _BINARY and not _function(eqn):
            continue
        for kept in eqn.invars:
            if isinstance(kept, jec.Literal) or _type(kept) != _type(eqn.outvars[0]):
                continue
            rest = [v for v in eqn.invars if v is not kept]
            if len(rest) != len(eqn.invars) - 1:
                continue  # a square, written as a product
            fn = _BINARY[eqn.primitive.name][0] if rest else _call_of(eqn)
            without = _replaced(jaxpr, i, lambda a: a, kept)
            needed = _chain(jaxpr, rest, i)
            for k, target in _sites(jaxpr):
                if k == i or k in needed or (rest and _type(target.outvars[0]) != _type(kept)):
                    continue
                other = _at(target) if line_of(target) != line_of(eqn) else ""
                words = (
                    f"With {_deed(jaxpr, names, eqn, kept)} applied to {_value(jaxpr, names, target)}{other} instead"
                )
                yield _hoisted(without, k, needed, fn, rest), words, eqn


def _combined(jaxpr: Any, names: dict[Any, str]) -> Iterator[Edit]:
    """With two values of the kernel multiplied, or added, that were not."""
    sites = list(_sites(jaxpr))
    for (k, early), (i, eqn) in itertools.permutations(sites, 2):
        if k < i and _type(early.outvars[0]) == _type(eqn.outvars[0]):
            for fn, word in ((_BINARY["mul"][0], "multiplied by"), (_BINARY["add"][0], "increased by")):
                other = _at(early) if line_of(early) != line_of(eqn) else ""
                words = f"With {_value(jaxpr, names, eqn)} {word} {_value(jaxpr, names, early)}{other}"
                yield _behind_it(jaxpr, i, fn, early.outvars[0]), words, eqn


def _sites(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """The equations that compute one array of floats."""
    for i, eqn in enumerate(jaxpr.eqns):
        aval = getattr(eqn.outvars[0], "aval", None) if len(eqn.outvars) == 1 else None
        if not getattr(aval, "shape", ()) or not is_floating(np_dtype(aval)) or eqn.primitive.name in ("swap", "cond"):
            continue
        if not (_inside(eqn) and i + 1 < len(jaxpr.eqns) and _inside(jaxpr.eqns[i + 1]) == _inside(eqn)):
            yield i, eqn


def _inside(eqn: Any) -> str:
    """The function of jax.nn that an equation is part of."""
    traceback = eqn.source_info.traceback  # its frames: seen on jax 0.11.2 and 0.12.0.1
    for frame in traceback.frames if traceback is not None else ():
        if is_readers_file(frame.file_name):
            return ""
        if frame.function_name in _FUNCTIONS and "nn" in frame.file_name:
            return str(frame.function_name)
    return ""


def _chain(jaxpr: Any, values: Sequence[Any], before: int) -> set[int]:
    """The equations that lead to these values, back to the Refs."""
    made = {v: i for i, eqn in enumerate(jaxpr.eqns[:before]) for v in eqn.outvars}
    found: set[int] = set()
    todo = [v for v in values if not isinstance(v, jec.Literal)]
    while todo:
        i = made.get(todo.pop())
        if i is not None and i not in found:
            found.add(i)
            todo += [v for v in jaxpr.eqns[i].invars if not isinstance(v, jec.Literal)]
    return found


def _hoisted(jaxpr: Any, k: int, needed: set[int], fn: Callable[..., Any], rest: Sequence[Any]) -> Any:
    """fn of what equation k computes and of `rest`, with all that rest is made of brought before it."""
    eqn, before = jaxpr.eqns[k], _fresh(jaxpr.eqns[k].outvars[0])
    early = [jaxpr.eqns[i] for i in sorted(needed) if i > k]
    two = [eqn.replace(outvars=[before]), _equation(eqn, fn, eqn.outvars[0], before, *rest)]
    late = [e for i, e in enumerate(jaxpr.eqns) if i > k and i not in needed]
    return _with(jaxpr, [*jaxpr.eqns[:k], *early, *two, *late])


# --- in words --------------------------------------------------------------------------------------------------------


def _type(v: Any) -> tuple[Any, Any]:
    return getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)


def _doing(eqn: Any) -> bool:
    return eqn.primitive.name in _BINARY or eqn.primitive.name in _UNARY or bool(_function(eqn))


def _function(eqn: Any) -> str:
    """What a function of one value is called."""
    name = eqn.primitive.name
    if name in ("jit", "pjit", "custom_jvp_call") and len(eqn.invars) == 1:
        body: Any = inlined(eqn)
        inner = getattr(body, "jaxpr", body).eqns
        return str(eqn.params["name"]) if "name" in eqn.params else _function(inner[0]) if len(inner) == 1 else ""
    if name == "integer_pow" and eqn.params["y"] == 2:
        return "square"
    return name if name in _UNARY and name != "integer_pow" else ""


def _call_of(eqn: Any) -> Callable[..., Any]:
    own = _function(eqn)
    return _FUNCTIONS.get(own, lambda a: eqn.primitive.bind(a, **eqn.params))


def _at(eqn: Any) -> str:
    line = line_of(eqn)
    return f" ({line})" if line else ""


def _ref(jaxpr: Any, names: dict[Any, str], v: Any) -> str:
    """The Ref that a value was read from, if nothing but its shape has changed since."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while not isinstance(v, jec.Literal) and v in made:
        eqn = made[v]
        if eqn.primitive.name == "get":
            return names.get(eqn.invars[0], "")
        if eqn.primitive.name not in _KEPT:
            return ""
        v = eqn.invars[0]
    return ""


def _deed(jaxpr: Any, names: dict[Any, str], eqn: Any, kept: Any) -> str:
    """'the multiplication by a_ref'."""
    name = eqn.primitive.name
    if name not in _BINARY:
        return _function(eqn) or name
    other = next((v for v in eqn.invars if v is not kept), kept)
    ref = f"{other.val:g}" if isinstance(other, jec.Literal) and np.ndim(other.val) == 0 else _ref(jaxpr, names, other)
    preposition = {"add": "of", "sub": "of"}.get(name, "by" if name in ("mul", "div") else "with")
    return f"the {_BINARY[name][1]}" + (f" {preposition} {ref}" if ref else "")


def _value(jaxpr: Any, names: dict[Any, str], eqn: Any) -> str:
    """'the matrix product', 'x_ref', 'the sum'."""
    name = eqn.primitive.name
    ref = _ref(jaxpr, names, eqn.outvars[0])
    if ref:
        return ref
    if _inside(eqn):
        return f"the {_inside(eqn)}"
    nouns = {"dot_general": "the matrix product", "mul": "the product", "add": "the sum", "sub": "the difference"}
    more = {"div": "the quotient", "reduce_sum": "the sum", "select_n": "what where picks"}
    return {**nouns, **more}.get(name) or (f"the {_function(eqn)}" if _function(eqn) else "the value")
