"""Questions to a kernel's program: what makes a value, what is cast, compared, squared, stored."""

from collections.abc import Iterator
from typing import Any

from ..ir.capture import (
    SourceLine,
    line_of,
    subprograms,
)
from ..ir.ops import is_floating, np_dtype


def times_held(jaxpr: Any, name: str) -> int:
    """How many equations anywhere inside `jaxpr` are of a primitive."""
    inner = (sum(times_held(sub, name) for sub in subprograms(e)) for e in jaxpr.eqns)
    return sum(e.primitive.name == name for e in jaxpr.eqns) + sum(inner)


def lines_of(program: Any) -> Iterator[SourceLine]:
    """The reader's lines that a kernel or an index map is made of, in the order of its equations."""
    program = getattr(program, "jaxpr", program)
    for eqn in getattr(program, "eqns", ()):
        line = line_of(eqn)
        if line is not None:
            yield line
        for inner in subprograms(eqn):
            yield from lines_of(inner)


def lines_where(program: Any, primitives: frozenset[str], floats: bool = False) -> Iterator[SourceLine]:
    """The reader's lines with one of these primitives, in the order of the equations. floats: of floats alone."""
    program = getattr(program, "jaxpr", program)
    for eqn in getattr(program, "eqns", ()):
        line = line_of(eqn) if eqn.primitive.name in primitives else None
        if line is not None and not (floats and not is_floating(np_dtype(eqn.outvars[0].aval))):
            yield line
        for inner in subprograms(eqn):
            yield from lines_where(inner, primitives, floats)


def after(jaxpr: Any, first: Any) -> Iterator[Any]:
    """An equation, and all that depend on it, in order."""
    held: set[Any] = set()
    for e in jaxpr.eqns:
        if e is first or any(not hasattr(v, "val") and v in held for v in e.invars):
            yield e
            held |= set(e.outvars)


def one_number(made: dict[Any, Any], v: Any) -> bool:
    """Whether an array holds one number, broadcast."""
    while not hasattr(v, "val") and v.aval.shape:
        e = made.get(v)
        if e is None or e.primitive.name not in SAME_VALUE:
            return False
        v = e.invars[0]
    return True


SAME_VALUE = frozenset("reshape squeeze expand_dims convert_element_type copy broadcast_in_dim select_n".split())


def behind(jaxpr: Any, names: dict[Any, str], ref: str) -> list[Any]:
    """The equations that the values stored into a Ref are made by, within one program; what it held before left out."""
    wanted = {
        e.invars[1]
        for e in jaxpr.eqns
        if e.primitive.name == "swap" and names[e.invars[0]] == ref
        if not hasattr(e.invars[1], "val")
    }
    found = []
    for e in reversed(jaxpr.eqns):
        if (
            e.primitive.name == "swap"
            or wanted.isdisjoint(e.outvars)
            or (e.primitive.name == "get" and names[e.invars[0]] == ref)
        ):
            continue
        found.append(e)
        wanted |= {v for v in e.invars if not hasattr(v, "val")}
    return found[::-1]


def producers(jaxpr: Any) -> dict[Any, Any]:
    return {v: e for e in jaxpr.eqns for v in e.outvars}


def made_by(made: dict[Any, Any], v: Any, through: frozenset[str]) -> Any:
    """The equation that made a value, looking through operations that keep or merely scale it."""
    e = None if hasattr(v, "val") else made.get(v)
    while e is not None and e.primitive.name in through and not hasattr(e.invars[0], "val"):
        before = made.get(e.invars[0])
        if before is None:
            break
        e = before
    return e


_ARITHMETIC = frozenset("add add_any sub mul div max min dot_general exp".split())


_SCALED = frozenset("div mul reshape squeeze expand_dims convert_element_type copy broadcast_in_dim".split())


_SQUARES = frozenset("square integer_pow".split())


_COMPARISONS = frozenset("eq ne lt le gt ge".split())


def early_casts(jaxpr: Any) -> Iterator[Any]:
    """Casts from float32 to a 16-bit float whose result goes into arithmetic other than a matrix product."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from early_casts(inner)
        if eqn.primitive.name != "convert_element_type" or not hasattr(eqn.invars[0].aval, "shape"):
            continue
        before, after = np_dtype(eqn.invars[0].aval), np_dtype(eqn.outvars[0].aval)
        if not (is_floating(before) and is_floating(after) and before.itemsize == 4 and after.itemsize == 2):
            continue
        users = {
            str(e.params.get("name", e.primitive.name))
            for e in jaxpr.eqns
            if any(v is eqn.outvars[0] for v in e.invars)
        }
        if users - {"swap", "masked_swap", "dot_general", "reshape", "broadcast_in_dim", "select_n", "_where"}:
            yield eqn


def rounded_factors(jaxpr: Any) -> Iterator[Any]:
    """Multiplications by one number whose result, in 16 bits, is an operand of a matrix product."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    made = producers(jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from rounded_factors(inner)
        for v in eqn.invars if eqn.primitive.name == "dot_general" else ():
            narrow = is_floating(np_dtype(v.aval)) and np_dtype(v.aval).itemsize == 2
            factor = made_by(made, v, SAME_VALUE) if narrow else None
            if factor is not None and factor.primitive.name in ("mul", "div"):
                yield from [factor] if any(one_number(made, x) for x in factor.invars) else []


def rounded_operands(jaxpr: Any) -> Iterator[Any]:
    """Casts to a 16-bit float of what was computed in float32, and goes into a matrix product."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    made = producers(jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from rounded_operands(inner)
        for v in eqn.invars if eqn.primitive.name == "dot_general" else ():
            cast = None if hasattr(v, "val") else made.get(v)
            if cast is None or cast.primitive.name != "convert_element_type" or hasattr(cast.invars[0], "val"):
                continue
            before, after = np_dtype(cast.invars[0].aval), np_dtype(v.aval)
            source = made.get(cast.invars[0])
            if is_floating(after) and after.itemsize == 2 and is_floating(before) and before.itemsize == 4:
                yield from [cast] if source is not None and source.primitive.name in NARROWED else []


def narrow_arithmetic(jaxpr: Any) -> Iterator[Any]:
    """Sums, products and the like of whole tiles that are made in a 16-bit float, and go into more arithmetic."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from narrow_arithmetic(inner)
        if eqn.primitive.name not in NARROWED or not getattr(eqn.outvars[0].aval, "shape", ()):
            continue
        dtype = np_dtype(eqn.outvars[0].aval)
        users = [e.primitive.name for e in jaxpr.eqns if any(v is eqn.outvars[0] for v in e.invars)]
        if is_floating(dtype) and dtype.itemsize == 2 and {*users} - {"swap"}:
            yield eqn


NARROWED = {"mul": "multiplication", "add": "addition", "sub": "subtraction", "div": "division", "reduce_sum": "sum"}


def narrow_products(jaxpr: Any) -> Iterator[Any]:
    """Matrix products of 16-bit floats whose result has 16 bits, too."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        for inner in subprograms(eqn):
            yield from narrow_products(inner)
        if eqn.primitive.name == "dot_general":
            dtypes = [np_dtype(v.aval) for v in (*eqn.invars, *eqn.outvars)]
            if all(is_floating(d) and d.itemsize == 2 for d in dtypes):
                yield eqn


def store_into(jaxpr: Any, ref: Any) -> Any | None:
    """The first equation that stores into `ref`, anywhere in a kernel, reached or not."""
    for eqn in jaxpr.eqns:
        if not any(v is ref for v in eqn.invars):
            continue
        if eqn.primitive.name in ("swap", "masked_swap", "addupdate", "dma_start"):
            return eqn
        for inner in subprograms(eqn):
            inner = getattr(inner, "jaxpr", inner)
            shift = len(eqn.invars) - len(inner.invars)  # a cond's predicate, a while's other half
            for i, v in enumerate(eqn.invars):
                if v is ref and 0 <= i - shift < len(inner.invars):
                    found = store_into(inner, inner.invars[i - shift])
                    if found is not None:
                        return found
    return None
