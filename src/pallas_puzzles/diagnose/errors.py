"""Exceptions raised while the reader's code is traced, in plain words, with the reader's own line."""

import re
import traceback as tb

from ..ir.capture import SourceLine, is_readers_file, source_line
from ..lens.watchdog import TimeLimit
from ..text import cut
from .findings import Finding

_NO_AXIS = (
    r"unbound axis name", "name",
    "there is no axis of this name where this is called, maybe in some cases only: look at the names of the grid, "
    "cluster or mesh there, and ask for an axis only where it exists",
)  # fmt: skip
_ERRORS: list[tuple[str, str, str]] = [
    # (pattern in the exception text, after "index map: " where JAX was calling one; kind; what to tell the reader)
    (r"'?(AbstractRef|Ref)\b.*(has no attribute|unsupported operand)|unsupported operand type.*Ref|"
     r"a Ref can't be passed|not a valid JAX type.*Ref|Cannot interpret value of type.*Ref|JAX array type.*Ref|Ref\{|"
     r"requires ndarray or scalar arguments, got .*(Ref|DynamicJaxprTracer)|cannot be abstractified.*TransformedRef|"
     r"TransformedRefs? cannot be abstractified", "ref-arithmetic",
     "a Ref is used as if it were an array: read it first, x_ref[...], and transpose or reshape what you get"),
    (r"PjitFunction|returned a value of type <class 'function'>|of type .*function.* is not a valid JAX type",
     "not-called",
     "the function returns another function instead of an array: call what pl.pallas_call returns, "
     "pl.pallas_call(...)(x, y)"),
    (r"should return None|must return None|kernel function.*return", "returns",
     "a kernel returns nothing: store the result, o_ref[...] = value"),
    (r"Custom VJP fwd rule.*must produce a pair|unexpected tree structure", "vjp-forward",
     "the forward function of a custom_vjp returns a pair, (result, residuals), and its result has the same form as "
     "the function's own: if the function returns one array, so does this"),
    (r"Custom VJP bwd rule", "vjp-backward",
     "the backward function of a custom_vjp returns a tuple with one gradient for each input, in the order of the "
     "inputs and of their shapes; with one input: return (dx,)"),
    (r"captures constants", "constants",
     "the kernel uses an array from outside: pass it as an input, or build it inside with jnp.zeros, jnp.full or "
     "lax.broadcasted_iota"),
    (r"Linearization failed to produce known values", "no-gradient",
     "JAX does not know the derivative of a pallas_call: wrap the function in jax.custom_vjp, and give it a forward "
     "and a backward function"),
    (r"dot_general requires contracting dimensions to have the same shape", "product-shape",
     "the two factors of a product do not fit: the dimensions that are summed over differ in length. jnp.dot sums over "
     "the last of the first factor and the first of the second; jax.lax.dot_general lets you choose"),
    (r"ncompatible shapes for broadcasting", "broadcast",
     "arrays of incompatible shapes meet: only a dimension of 1 is widened. A reduction drops the dimension that it "
     "reduces, and keepdims=True keeps it. The rows of a product come from its first factor"),
    (r"Invalid shape for `swap`", "store-shape",
     "a value is stored in a Ref, or in part of one, of another shape, and a store does not broadcast: keepdims=True "
     "keeps a reduced dimension, jnp.broadcast_to widens, and None in a block shape squeezes a dimension of 1 away"),
    (r"\bwhen\(\) takes \d+ positional|_when_body|when\.<locals>", "when",
     "pl.when is a decorator: @pl.when(condition) above a function without arguments, def _():"),
    (r"index map: .*\(\) (takes|missing)", "map-arity",
     "an index map takes one argument per axis of the grid (and one per prefetched operand after them)"),
    (r"TracerIntegerConversionError", "python-index",
     "Python needs a number here, and this one is known only when the kernel runs. For a loop of n turns, take "
     "jax.lax.fori_loop(0, n, body, start). Instead of an index into a list, use arithmetic"),
    (r"Attempted boolean conversion|ConcretizationTypeError|TracerBoolConversion|^AssertionError: DShapedArray",
     "python-if",
     "a value that is only known when the kernel runs (a program id, an element) is used in a Python if or while, or "
     "as a size or a bound: use @pl.when(condition) for a block of code, jnp.where for a value, and "
     "x_ref[pl.ds(start, size)] for a slice, with a size that is a Python int"),
    (r"Invalid dtype for `swap`", "store-dtype",
     "the value has another dtype than the Ref it is stored in: add .astype(o_ref.dtype), or, if the Ref is scratch "
     "for a sum, give it the value's dtype (float32)"),
    (r"must return integer scalars|Index map.*float|block ind\w+ must be integer|Grid must be a tuple of integers",
     "float",
     "a grid is a tuple of integers, and an index map returns integers: use // (or pl.cdiv, which rounds up) instead "
     "of /"),
    (r"Out of bound (slice|indexer)", "ref-bounds",
     "a Ref is indexed past its end, out of bounds: look at the start and the size of the slice. The Ref of a block "
     "has the shape of that block, and counts from its start"),
    _NO_AXIS,
]  # fmt: skip


def _in_index_map(error: BaseException) -> bool:
    """Whether JAX was calling an index map (names of its frames: seen on jax 0.11.2 and 0.12.0.1)."""
    return any("block_spec" in f.name or "index_map" in f.name for f in tb.extract_tb(error.__traceback__))


def readers_frame(error: BaseException) -> SourceLine | None:
    """The innermost line of the reader's own code in a traceback, following causes."""
    found: SourceLine | None = None
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame in tb.extract_tb(current.__traceback__):
            if is_readers_file(frame.filename) and not frame.filename.endswith("runpy.py"):
                found = source_line(frame.filename, frame.lineno or 0)
        if found:
            return found
        current = current.__cause__ or current.__context__
    return found


def explain_error(error: BaseException) -> Finding:
    """An exception raised while tracing the reader's code, in one sentence, with the reader's own line."""
    if isinstance(error, TimeLimit):
        return _too_late(error)
    text, line = str(error), readers_frame(error)
    first = _first_line(error)
    named = re.search(r" at (/[^\s:]+|<\w+>|\S+\.py):(\d+)\b", first)  # "kernel at file.py:12": JAX names the function
    if named and is_readers_file(named[1]):
        line = source_line(named[1], int(named[2]))
    words = f"{'index map: ' if _in_index_map(error) else ''}{type(error).__name__}: {text}"
    for pattern, kind, advice in _ERRORS:
        if re.search(pattern, words, re.S):
            return _found(kind, _sentence(advice), error, line)
    return Finding("error", f"{type(error).__name__}: {_shorten(first)}", [], line)


def _found(kind: str, cause: str, error: BaseException, line: SourceLine | None) -> Finding:
    return Finding(kind, cause, [_shorten(f"{type(error).__name__}: {_first_line(error)}")], line)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _sentence(advice: str) -> str:
    return f"{advice if advice.startswith('pl.') else advice[0].upper() + advice[1:]}."


def _too_late(error: TimeLimit) -> Finding:
    words = str(error)
    cause = f"{words[:1].upper()}{words[1:]}. Does a loop in it never end?"
    return Finding("time-limit", cause, line=readers_frame(error))


_ARRAY_ERRORS: list[tuple[str, str, str]] = [
    # the same; all of it happens under jit, without a kernel
    (r"TracerArrayConversionError", "numpy",
     "NumPy asks for the values, and under jit there are none yet: use jnp"),
    (r"TracerIntegerConversionError|ConcretizationTypeError|TracerBoolConversion|Attempted boolean conversion|"
     r"truth value of an array with more than one|total_repeat_length|NonConcreteBooleanIndexError|"
     r"slice indices must have static|Shapes must be 1D sequences of concrete|"
     r"can(no|')t be interpreted as an integer", "python-loop",
     "Python's range, if, and, int(), list indices and lengths of arrays need a number, and under jit the values are "
     "not known yet: work on the whole array at once (jnp.cumsum, jnp.where, & for and), and where a length depends on "
     "values, give size= or total_repeat_length="),
    (r"do(es)? not support (in-place )?item assignment", "item-assignment",
     "JAX arrays do not change: x.at[i].add(v) and x.at[i].set(v) return a new one"),
    _NO_AXIS,
]  # fmt: skip


def explain_array_error(error: BaseException) -> Finding:
    """An exception raised by array code under jit, in one sentence, with the reader's own line."""
    if isinstance(error, TimeLimit):
        return _too_late(error)
    line, words = readers_frame(error), f"{type(error).__name__}: {error}"
    for pattern, kind, advice in _ARRAY_ERRORS:
        if re.search(pattern, words, re.S):
            return _found(kind, _sentence(advice), error, line)
    return Finding("error", f"{type(error).__name__}: {_shorten(_first_line(error))}", [], line)


def _shorten(text: str) -> str:
    return cut(text, _LONGEST)


_LONGEST = 220  # characters of JAX's own words
