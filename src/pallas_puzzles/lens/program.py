"""Questions to a kernel's program: what makes a value, what is cast, compared, squared, stored."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..ir.capture import (
    EXPONENTIALS,
    Call,
    SourceLine,
    filled_with,
    holds_exponential,
    line_of,
    subprograms,
    with_ref_names,
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


def asks_for(made: dict[Any, Any], v: Any, primitives: frozenset[str]) -> bool:
    """Whether a value is a comparison of one of these kinds, or made of nothing but such and constants."""
    for _ in range(8):
        e = None if hasattr(v, "val") else made.get(v)
        if e is None or e.primitive.name in primitives:
            return e is not None
        inside = [w for w in e.invars if not hasattr(w, "val")]
        if e.primitive.name not in SAME_VALUE | {"mul", "and", "not", "or"} or not inside:
            return False
        v = inside[0]
    return False


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


def unscaled_sums(jaxpr: Any, names: dict[Any, str]) -> Iterator[tuple[str, str, Any, bool]]:
    """(sum, maximum, the store into the sum, whether it has a factor that knows no old maximum) within one program."""
    labels = _labels(jaxpr, names)

    def of(v: Any) -> frozenset[Any]:
        return frozenset() if hasattr(v, "val") else labels.get(v, frozenset())  # a literal depends on nothing

    stores = {names[e.invars[0]]: (n, e) for n, e in enumerate(jaxpr.eqns) if e.primitive.name == "swap"}
    for maximum, (when, store) in stores.items():
        if ("new", maximum) not in of(store.invars[1]):
            continue
        for total, (_, into) in stores.items():
            if total == maximum or ("exp", maximum) not in of(into.invars[1]):
                continue
            use, other = first_use(jaxpr, names, total)
            with_it = frozenset().union(*map(of, other))
            if use not in ("add", "mul") or ("exp", maximum) not in with_it:
                continue
            old = any(label[:2] == ("load", maximum) and label[2] < when for label in with_it)
            if use == "add" or not old:
                yield total, maximum, into, use == "mul"


SAME_VALUE = frozenset("reshape squeeze expand_dims convert_element_type copy broadcast_in_dim select_n".split())


def _labels(jaxpr: Any, names: dict[Any, str]) -> dict[Any, frozenset[Any]]:
    """What each value of a program depends on: ("load", ref, n) a Ref read by equation n, ("new", ref) the maximum of a
    Ref and something else, ("exp", ref) an exponential of either."""
    labels: dict[Any, frozenset[Any]] = {}
    for n, e in enumerate(jaxpr.eqns):
        found = frozenset().union(*(labels.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name == "get":
            found = frozenset({("load", names[e.invars[0]], n)})
        elif e.primitive.name == "max":
            found = frozenset(("new", label[1]) if label[0] == "load" else label for label in found)
        elif e.primitive.name in EXPONENTIALS or any(holds_exponential(inner) for inner in subprograms(e)):
            found |= {("exp", label[1]) for label in found}
        labels.update((v, found) for v in e.outvars)
    return labels


def first_use(jaxpr: Any, names: dict[Any, str], ref: str) -> tuple[str, list[Any]]:
    """The first arithmetic that is done with what is read from a Ref: its primitive, and its other operands."""
    held: list[Any] = []
    for e in jaxpr.eqns:
        mine = [v for v in e.invars if any(v is h for h in held)]
        if (e.primitive.name == "get" and names[e.invars[0]] == ref) or (mine and e.primitive.name in SAME_VALUE):
            held += e.outvars
        elif mine:
            return e.primitive.name, [v for v in e.invars if not any(v is h for h in held)]
    return "", []


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


def stores_toward(call: Call, ref: str) -> Iterator[SourceLine]:
    """The reader's lines that store into a Ref, then into those that its values are read from; not what only clears."""
    programs, todo, seen = list(with_ref_names(call)), [ref], set()
    while todo:
        name = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for jaxpr, names in programs:
            made = producers(jaxpr)
            for e in reversed(jaxpr.eqns):
                if e.primitive.name == "swap" and names[e.invars[0]] == name and not one_number(made, e.invars[1]):
                    line = line_of(e)
                    yield from [line] if line else []
            todo += [names[e.invars[0]] for e in behind(jaxpr, names, name) if e.primitive.name == "get"]


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


def is_added_to(call: Call, ref: str) -> bool:
    """Whether arithmetic is done with what is read from a Ref: a masked store only keeps it."""
    for jaxpr, names in with_ref_names(call):
        held: set[Any] = set()
        for e in jaxpr.eqns:
            mine = any(not hasattr(v, "val") and v in held for v in e.invars)
            if mine and e.primitive.name in _ARITHMETIC:
                return True
            if mine or (e.primitive.name == "get" and names[e.invars[0]] == ref):
                held |= set(e.outvars)
    return False


_ARITHMETIC = frozenset("add add_any sub mul div max min dot_general exp".split())


def guarding_axes(call: Call, eqn: Any) -> set[int]:
    """The grid axes whose program ids decide whether an equation under a pl.when is reached."""
    for jaxpr, _ in with_ref_names(call):
        for cond in (e for e in jaxpr.eqns if e.primitive.name == "cond"):
            if not any(eqn is e for branch in cond.params["branches"] for e in branch.jaxpr.eqns):
                continue
            made, asked, axes = producers(jaxpr), [cond.invars[0]], set()
            while asked:
                e = made.get(v) if not hasattr(v := asked.pop(), "val") else None
                if e is not None and e.primitive.name == "program_id":
                    axes.add(e.params["axis"])
                asked += e.invars if e is not None else []
            return axes
    return set()


_SCALED = frozenset("div mul reshape squeeze expand_dims convert_element_type copy broadcast_in_dim".split())


_SQUARES = frozenset("square integer_pow".split())


def _is_square(e: Any) -> bool:
    return e is not None and (
        e.primitive.name in _SQUARES or (e.primitive.name == "mul" and e.invars[0] is e.invars[1])
    )


def cancelling(jaxpr: Any) -> Iterator[Any]:
    """Subtractions of the square of a mean from the mean of squares of what was read."""
    made = producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name != "sub" or not _is_square(
            made.get(e.invars[1]) if not hasattr(e.invars[1], "val") else None
        ):
            continue
        total = made_by(made, e.invars[0], _SCALED)
        squared = total is not None and total.primitive.name == "reduce_sum" and made.get(total.invars[0])
        mean = made_by(made, made[e.invars[1]].invars[0], _SCALED)
        if _is_square(squared) and mean is not None and mean.primitive.name == "reduce_sum":
            yield e


def filled_exponentials(jaxpr: Any) -> Iterator[tuple[Any, float]]:
    """Exponentials of values where a mask has put a finite number, and that number."""
    made = producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name not in EXPONENTIALS:
            continue
        shifted = made.get(e.invars[0])
        if shifted is not None and shifted.primitive.name == "sub" and not hasattr(shifted.invars[0], "val"):
            masked = made.get(shifted.invars[0])
            fill = filled_with(masked, made) if masked is not None else None
            if fill is not None and math.isfinite(fill) and fill > -1e6:
                yield e, fill


def bare_roots(jaxpr: Any) -> Iterator[Any]:
    """Roots of a mean of squares."""
    made = producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name in ("sqrt", "rsqrt"):
            total = made_by(made, e.invars[0], _SCALED)
            summed = total.invars[0] if total is not None and total.primitive.name == "reduce_sum" else None
            if summed is not None and _is_square(made_by(made, summed, SAME_VALUE - {"select_n"})):
                yield e


def eps_outside(jaxpr: Any) -> Iterator[Any]:
    """Additions of a small constant to what has just come out of a root."""
    made = producers(jaxpr)
    for e in jaxpr.eqns:
        if e.primitive.name == "add" and any(hasattr(v, "val") and 0 < float(np.max(v.val)) < 1e-2 for v in e.invars):
            roots = [made.get(v) for v in e.invars if not hasattr(v, "val")]
            if any(r is not None and r.primitive.name in ("sqrt", "rsqrt") for r in roots):
                yield e


_COMPARISONS = frozenset("eq ne lt le gt ge".split())


def local_comparisons(jaxpr: Any) -> Iterator[Any]:
    """Comparisons of an iota with something else, with no program id in it."""
    kinds: dict[Any, frozenset[str]] = {
        v: frozenset({"given"}) for v in jaxpr.invars if getattr(v.aval, "shape", 1) == ()
    }
    for e in jaxpr.eqns:
        found = frozenset().union(*(kinds.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name in ("iota", "program_id"):
            found |= {e.primitive.name}
        elif e.primitive.name in _COMPARISONS and found == {"iota"}:
            sides = [kinds.get(v, frozenset()) if not hasattr(v, "val") else frozenset() for v in e.invars]
            if sides.count(frozenset({"iota"})) == 1:
                yield e
        kinds.update((v, found) for v in e.outvars)


def has_narrow_floats(call: Call) -> bool:
    """Whether a float of fewer than 32 bits takes part in a call: without one there is no rounding to speak of."""

    def narrow(aval: Any) -> bool:
        dtype = np_dtype(aval)
        return is_floating(dtype) and dtype.itemsize < 4

    def anywhere(jaxpr: Any) -> bool:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        return any(
            any(narrow(v.aval) for v in (*e.invars, *e.outvars) if hasattr(v.aval, "dtype"))
            or any(anywhere(inner) for inner in subprograms(e))
            for e in jaxpr.eqns
        )

    return anywhere(call.kernel)


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


def whole_sums_in_floats(jaxpr: Any, names: dict[Any, str]) -> Iterator[tuple[str, Any, bool]]:
    """(Ref, the store into it, whether it is scaled first): floats that a product of integers is added to, within one
    program."""
    made_of: dict[Any, frozenset[str]] = {}
    for e in jaxpr.eqns:
        found = frozenset().union(*(made_of.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")))
        if e.primitive.name == "get":
            found = frozenset({names.get(e.invars[0], "")})
        elif e.primitive.name == "dot_general" and not is_floating(np_dtype(e.outvars[0].aval)):
            found = frozenset({"integers"})
        elif e.primitive.name == "mul" and "integers" in found:
            found |= {"scaled"}
        elif e.primitive.name == "add" and any(
            {"integers", "scaled"} <= made_of.get(v, frozenset()) for v in e.invars if not hasattr(v, "val")
        ):
            found |= {"scaled first"}
        elif e.primitive.name == "swap" and is_floating(np_dtype(e.invars[0].aval)):
            ref, value = names.get(e.invars[0], ""), e.invars[1]
            held = frozenset() if hasattr(value, "val") else made_of.get(value, frozenset())
            if {"integers", ref} <= held:
                yield ref, e, "scaled first" in held
        made_of.update((v, found) for v in e.outvars)


def block_products(jaxpr: Any, names: dict[Any, str]) -> Iterator[tuple[Any, list[tuple[str, int]]]]:
    """Matrix products of two Refs as they are, with the name of each and the dimension of it that is summed over."""
    made = producers(jaxpr)
    for eqn in (e for e in jaxpr.eqns if e.primitive.name == "dot_general"):
        axes, batch = eqn.params["dimension_numbers"]
        reads = [made_by(made, v, SAME_VALUE) for v in eqn.invars]
        plain = all(e is not None and e.primitive.name == "get" for e in reads) and not any(batch)
        if plain and all(len(a) == 1 for a in axes):
            yield eqn, [(names[e.invars[0]], int(a[0])) for e, a in zip(reads, axes, strict=True) if e is not None]


def constant_added(call: Call, ref: str) -> tuple[float, int, SourceLine | None] | None:
    """(number, 1, line) if `value + number` is what a kernel stores in a Ref; -1 for `value - number`."""
    for jaxpr, names in with_ref_names(call):
        made = producers(jaxpr)
        for store in (e for e in jaxpr.eqns if e.primitive.name == "swap" and names[e.invars[0]] == ref):
            eqn = made_by(made, store.invars[1], frozenset({"convert_element_type"}))
            if eqn is not None and eqn.primitive.name in ("add", "sub"):
                sign = 1 if eqn.primitive.name == "add" else -1
                for v in eqn.invars if sign > 0 else eqn.invars[1:]:
                    if hasattr(v, "val") and np.ndim(v.val) == 0:
                        return float(v.val), sign, line_of(eqn)
    return None


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
