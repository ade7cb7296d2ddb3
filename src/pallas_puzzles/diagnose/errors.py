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
_NO_NAME = (
    r"name '(\w+)' is not defined", "name",
    "this name does not exist here: a misspelling, or a cell that has not been run",
)  # fmt: skip
_ERRORS: list[tuple[str, str, str]] = [
    # (pattern in the exception text, after what JAX was calling: "a kernel: "; kind; what to tell the reader)
    (r"'?(AbstractRef|Ref)\b.*(has no attribute|unsupported operand)|unsupported operand type.*Ref|"
     r"a Ref can't be passed|not a valid JAX type.*Ref|Cannot interpret value of type.*Ref|JAX array type.*Ref|Ref\{|"
     r"requires ndarray or scalar arguments, got .*(Ref|DynamicJaxprTracer)",
     "ref-arithmetic",
     "a Ref is used as if it were an array: read it first, x_ref[...]"),
    (r"TransformedRefs? cannot be abstractified|cannot be abstractified.*TransformedRef", "ref-arithmetic",
     "a Ref is used as if it were an array: read it first, x_ref[...], and transpose or reshape what you get"),
    (r"PjitFunction|returned a value of type <class 'function'>|of type .*function.* is not a valid JAX type",
     "not-called",
     "the function returns another function instead of an array: call what pl.pallas_call returns, "
     "pl.pallas_call(...)(x, y)"),
    (r"should return None|must return None|kernel function.*return", "returns",
     "a kernel returns nothing: store the result, o_ref[...] = value"),
    (r"Custom VJP fwd rule.*must produce a pair", "vjp-forward",
     "the forward function of a custom_vjp returns two things, the result and the residuals: return y, residuals"),
    (r"Custom VJP bwd rule", "vjp-backward",
     "the backward function of a custom_vjp returns a tuple with one gradient for each input, in the order of the "
     "inputs and of their shapes; with one input: return (dx,)"),
    (r"Index map function.*must not capture constants", "map-constants",
     "an index map uses an array from outside. Python numbers may be used there; an array of indices is prefetched "
     "(pltpu.PrefetchScalarGridSpec), and index maps get it as a Ref behind the grid indices"),
    (r"captures constants", "constants",
     "the kernel uses an array from outside: pass it as an input, or build it inside with jnp.zeros, jnp.full or "
     "lax.broadcasted_iota. An update such as x.at[:].set(...) makes one, too: store into a Ref instead"),
    (r"Pred must be a scalar", "when-array",
     "pl.when asks for one yes or no, and this condition is an array: jnp.where(condition, a, b) chooses element by "
     "element"),
    (r"Pytree for `(in|out)_specs`", "specs-count",
     "each operand of the call needs one entry in in_specs, except for the first num_scalar_prefetch operands, and "
     "each result one in out_specs and one in out_shape, in the same order"),
    (r"a kernel: .*\(\) (takes|missing) \d+ (required )?positional arguments?", "kernel-arity",
     "a kernel gets one Ref per operand, in this order: inputs, outputs, scratch (what is prefetched comes before "
     "all)"),
    (r"TracerArrayConversionError", "numpy",
     "NumPy is applied to a JAX value: use jnp inside kernels and wrappers"),
    (r"Linearization failed to produce known values", "no-gradient",
     "JAX does not know the derivative of a pallas_call: wrap the function in jax.custom_vjp, and give it a forward "
     "and a backward function"),
    (r"dot_general requires contracting dimensions to have the same shape", "product-shape",
     "the two factors of a product do not fit: the dimensions that are summed over differ in length. jnp.dot sums over "
     "the last of the first factor and the first of the second; jax.lax.dot_general lets you choose"),
    (r"incompatible shapes for broadcasting: \((\d+), (\d+)\), \(\2, \1\)", "turned",
     "two arrays do not fit, because rows and columns of one are exchanged. The rows of a product come from its first "
     "factor: look at the order of the factors, or of the operands"),
    (r"\bwhen\(\) takes \d+ positional|_when_body|when\.<locals>", "when",
     "pl.when is a decorator: @pl.when(condition) above a function without arguments, def _():"),
    (r"TracerIntegerConversionError", "python-index",
     "Python needs a number here, and this one is known only when the kernel runs. For a loop of n turns, take "
     "jax.lax.fori_loop(0, n, body, start). Instead of an index into a list, use arithmetic"),
    (r"^AssertionError: DShapedArray", "dynamic-slice",
     "the size of a slice is known only when the kernel runs: take pl.ds(start, size) with a size that is a Python "
     "int, and mask what is too much"),
    (r"Attempted boolean conversion|ConcretizationTypeError|TracerBoolConversion", "python-if",
     "a value that is only known when the kernel runs (a program id, an element) is used in a Python if or while: use "
     "@pl.when(condition) for a block of code, jnp.where for a value"),
    (r"Invalid dtype for `swap`", "store-dtype",
     "the value has another dtype than the Ref it is stored in: add .astype(o_ref.dtype), or, if the Ref is scratch "
     "for a sum, give it the value's dtype (float32)"),
    (r"must return integer scalars|Index map.*float|block ind\w+ must be integer", "map-float",
     "an index map returns integer block indices: use // instead of /"),
    (r"Grid must be a tuple of integers", "grid-float",
     "a grid is a tuple of integers: use // (or pl.cdiv, which rounds up) instead of /"),
    (r"Index map function.*must return|index_map.*must return", "map-length",
     "an index map returns one block index per dimension of the array"),
    (r"Out of bound (slice|indexer)", "ref-bounds",
     "a Ref is indexed past its end, out of bounds: look at the start and the size of the slice. The Ref of a block "
     "has the shape of that block, and counts from its start"),
    (r"Block shape.*must have the same number of dimensions|block_shape.*rank", "block-rank",
     "a block shape needs one entry per dimension of the array; None stands for a squeezed dimension of size 1"),
    (r"unexpected tree structure", "vjp-forward",
     "the forward function of a custom_vjp returns a pair, (result, residuals), and its result has the same form as "
     "the function's own: if the function returns one array, so does this"),
    _NO_AXIS,
    _NO_NAME,
]  # fmt: skip


_OF_A_LINE: list[tuple[str, str, str, str]] = [
    # (the same, or "index map: ..."; pattern in the line; kind; advice)
    (r"index map: .*TracerBoolConversion", "", "python-if",
     "An index map is traced: a Python if cannot look at its arguments. Use arithmetic, or jnp.where."),
    (r"index map: .*\(\) (takes|missing)", "", "map-arity",
     "An index map takes one argument per axis of the grid (and one per prefetched operand after them)."),
    (r"Invalid dtype for `swap`.*Ref dtype: float32.*Value dtype: b?float16", "", "store-dtype",
     "A 16-bit value is stored in a float32 Ref. If it is a matrix product, ask for float32 where it is made "
     "(preferred_element_type=jnp.float32): its sums were rounded before any cast. Else add .astype(jnp.float32)."),
    (r"(not enough|too many) values to unpack", "dot_general", "dot-dims",
     "The dimension numbers of jax.lax.dot_general are two pairs, ((a_dims, b_dims), (a_batch, b_batch)): without "
     "batch dimensions ((a_dims, b_dims), ((), ()))."),
    (r"^ConcretizationTypeError", "arange", "arange",
     "The bounds of jnp.arange have to be known before the kernel runs: write jnp.arange(size), and add to it what "
     "depends on the program id."),
    (r"^TracerBoolConversion", r"^(?!.*\b(if|while|and|or|not)\b).*\[[^\]]*:[^\]]*\]", "dynamic-slice",
     "The bounds of a slice are known only when the kernel runs: write x_ref[pl.ds(start, size)], with a size that is "
     "a Python int."),
]  # fmt: skip
_LOST_DIMENSION = (
    "Two arrays of different rank meet, and their shapes do not broadcast. A reduction drops the dimension that it "
    "reduces: keepdims=True keeps it, so that (16, 1) fits beside (16, 384)."
)
_ARRAY_AND = (
    "Python's `{0}` asks for one bool, and these conditions are arrays, with one for each element: join them with "
    "`{1}`, each in brackets: (a > 0) {1} (b != 0)."
)


def _called(error: BaseException) -> str:
    """What JAX was calling, with nothing of the reader's running inside of it (seen on jax 0.11.2 and 0.12.0.1)."""
    frames = [*tb.extract_tb(error.__traceback__)]
    if any("block_spec" in f.name or "index_map" in f.name for f in frames):
        return "index map: "
    last = max((n for n, f in enumerate(frames) if "pallas_call" in f.filename), default=len(frames))
    return "a kernel: " if frames[last:] and not any(is_readers_file(f.filename) for f in frames[last:]) else ""


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
    code, words = line.text if line else "", f"{_called(error)}{type(error).__name__}: {text}"
    for pattern, of_line, kind, advice in _OF_A_LINE:
        if re.search(pattern, words, re.S) and re.search(of_line, code):
            return _found(kind, advice, error, line)
    shapes = re.search(r"Ref shape: (.*?)\. (?:Expected shape: (.*?)\. )?Value shape: (\([^)]*\))", text, re.S)
    if shapes and "Invalid shape for `swap`" in text:
        into = shapes[2] or shapes[1]
        return _found("store-shape", _shape_advice(into, shapes[3], into == shapes[1]), error, line)
    if re.search("ncompatible shapes for broadcasting", text):
        met = re.findall(r"\(\d[^()]*\)", first)
        ranks = {shape.count(",") + 1 - shape.endswith(",)") for shape in met}
        if differ := _LOST_DIMENSION if len(ranks) > 1 else _different_lengths(met):
            return _found("broadcast", differ, error, line)
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
    (r"total_repeat_length|repeats.*concrete|NonConcreteBooleanIndexError|slice indices must have static|"
     r"size.*(argument|must be).*(nonzero|where|unique|bincount)|\b(nonzero|unique|bincount|where)\(.*size|"
     r"\.(nonzero|unique|bincount|where)\(", "static-shape",
     "the length of this result depends on the values, and under jit lengths are known first: give it size=, length= "
     "or total_repeat_length=, or keep every element, and choose with jnp.where"),
    (r"TracerArrayConversionError", "numpy",
     "NumPy asks for the values, and under jit there are none yet: use jnp"),
    (r"TracerIntegerConversionError|ConcretizationTypeError|TracerBoolConversion|Attempted boolean conversion|"
     r"truth value of an array with more than one|"
     r"Shapes must be 1D sequences of concrete|can't be interpreted as an integer|cannot be interpreted as an integer",
     "python-loop",
     "Python's range, if and int(), list indices and lengths of arrays need a number, and under jit the values are not "
     "known yet: work on the whole array at once (jnp.cumsum, jnp.where, jnp.repeat, ...)"),
    (r"do(es)? not support (in-place )?item assignment", "item-assignment",
     "JAX arrays do not change: x.at[i].add(v) and x.at[i].set(v) return a new one"),
    _NO_AXIS,
    _NO_NAME,
]  # fmt: skip


def explain_array_error(error: BaseException) -> Finding:
    """An exception raised by array code under jit, in one sentence, with the reader's own line."""
    if isinstance(error, TimeLimit):
        return _too_late(error)
    line, words = readers_frame(error), f"{type(error).__name__}: {error}"
    code = f" {line.text}" if line else ""
    joined = re.search(r"\b(and|or)\b", code)
    if joined and re.search("truth value of an array|TracerBoolConversion", words):
        return _found("python-and", _ARRAY_AND.format(joined[1], "&|"[joined[1] == "or"]), error, line)
    for pattern, kind, advice in _ARRAY_ERRORS:
        more = code if kind == "static-shape" and "Concretization" in words else ""
        if re.search(pattern, words + more, re.S):
            return _found(kind, _sentence(advice), error, line)
    return Finding("error", f"{type(error).__name__}: {_shorten(_first_line(error))}", [], line)


def _different_lengths(shapes: list[str]) -> str:
    """What to say when arrays of one rank meet and do not broadcast."""
    sizes = [tuple(int(n) for n in re.findall(r"\d+", shape)) for shape in shapes]
    if len(sizes) == 2 and sizes[0] == sizes[1][::-1]:
        return ""  # one is the other on its side, and there is a better word for that
    for d, lengths in enumerate(zip(*sizes, strict=True)):
        longer = sorted({n for n in lengths if n != 1})
        if len(longer) > 1:
            return (
                f"Arrays of incompatible shapes meet, {' and '.join(shapes)}: along dimension {d} they have "
                f"{' and '.join(map(str, longer))} elements: only a dimension of 1 is widened. Which Ref has the shape "
                "that is wanted here?"
            )
    return ""


def _shape_advice(ref: str, value: str, whole: bool = True) -> str:
    """What to do about a value of one shape that is stored in a Ref, or in part of it, of another."""
    r, v = (tuple(int(n) for n in re.findall(r"\d+", shape)) for shape in (ref, value))
    into = f"a Ref of shape {r}" if whole else f"part of a Ref, of shape {r}"
    head = f"A value of shape {v} is stored in {into}, and a store does not broadcast. "
    if len(v) > len(r) and 1 in v:
        return head + (
            "A block of size 1 along a dimension keeps that dimension in the Ref; None in the block shape squeezes "
            "it away."
        )
    if len(v) < len(r):
        return head + "keepdims=True keeps a reduced dimension; jnp.broadcast_to widens."
    if len(v) == len(r) and all(a in (1, b) for a, b in zip(r, v, strict=True)):
        return (
            f"{head}keepdims=True keeps a reduced dimension, so that nothing grows when shapes are broadcast; axis=1 "
            "reduces along a row."
        )
    return head + "Compare the two, and look at the block shapes."


def _shorten(text: str) -> str:
    return cut(text, _LONGEST)


_LONGEST = 220  # characters of JAX's own words
