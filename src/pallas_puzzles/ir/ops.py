"""What JAX's array primitives mean in NumPy: the arithmetic of the lens.

`evaluate` runs one equation on NumPy values. Primitives without an entry here go to JAX itself, one at a time, on the
CPU. Nothing in this module knows of Refs or grids.
"""

import contextlib
import contextvars
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from .effort import holding, spend
from .gathers import gather, scatter, scatter_add

Op = Callable[..., Any]


class Beyond(Exception):
    """The lens cannot follow this program. The message says which part, in a few plain words."""


@contextlib.contextmanager
def following(name: Any) -> Iterator[None]:
    """What JAX or a rule of ours does not know about a kernel ends as a Beyond, and is no mistake of the reader's."""
    try:
        yield
    except (NotImplementedError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        what = str(error).splitlines()[0] if str(error) else ""
        raise Beyond(f"{name} ({type(error).__name__}: {what})") from error


def np_dtype(aval: Any) -> np.dtype:
    """The NumPy dtype that stands for `aval`'s. PRNG keys become records of their words, semaphores int32."""
    try:
        return np.dtype(aval.dtype)
    except TypeError:
        if not is_key(aval):
            return np.dtype(np.int32)
        # the key's type has _impl.key_shape: seen on jax 0.11.2 and 0.12.0.1
        return np.dtype([(_KEY, np.uint32, aval.dtype._impl.key_shape)])


_KEY = "key"


def is_key(x: Any) -> bool:
    """Whether an array, or its shape and dtype, is of PRNG keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def holds_keys(dtype: Any) -> bool:
    return bool(getattr(dtype, "names", None))


def holds_dma_semaphore(aval: Any) -> bool:
    """Whether a Ref is to semaphores that copies signal."""
    return "dma" in str(getattr(aval, "dtype", ""))


def to_numpy(x: Any) -> np.ndarray:
    """An array of NumPy's; PRNG keys as records of their words."""
    if not is_key(x):
        return np.asarray(x)
    words = np.ascontiguousarray(jax.random.key_data(x))
    return words.view(np_dtype(x)).reshape(x.shape)


def to_keys(records: np.ndarray, aval: Any) -> Any:
    """PRNG keys, of the type of `aval`, from records of their words."""
    with jax.default_device(_cpu()):
        return jax.random.wrap_key_data(jax.numpy.asarray(records[_KEY]), impl=aval.dtype._impl)


_NARROW = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}  # NumPy gives each of them a whole byte


def bits_of(dtype: Any) -> int:
    """How many bits of memory one element takes."""
    dtype = np.dtype(dtype)
    return _NARROW.get(dtype.name, 8 * dtype.itemsize)


def nbytes_of(shape: Sequence[int], dtype: Any) -> int:
    """How many bytes of memory an array takes."""
    return -(-math.prod(shape) * bits_of(dtype) // 8)


def is_integer(dtype: Any) -> bool:
    """Whether these are integers, those of four bits among them."""
    return np.dtype(dtype).kind in "iu" or np.dtype(dtype).name.startswith(("int", "uint"))


def in_avals(eqn: Any) -> list[Any]:
    """The types of an equation's operands: shape and dtype, and a memory space for Refs."""
    return [v.aval for v in eqn.invars]


def out_avals(eqn: Any) -> list[Any]:
    return [v.aval for v in eqn.outvars]


def in_dtypes(eqn: Any) -> list[np.dtype]:
    return [np_dtype(aval) for aval in in_avals(eqn)]


def out_dtype(eqn: Any) -> np.dtype:
    return np_dtype(eqn.outvars[0].aval)


def number_of(literal: Any) -> Any:
    """The number that a program holds, rounded to its dtype: 0.1 in bfloat16 is 0.1001."""
    return np.asarray(literal.val, np_dtype(literal.aval))[()]


def is_literal(atom: Any) -> bool:
    """Whether an operand is written into the program (its `val`), rather than computed."""
    return isinstance(atom, jec.Literal)


@functools.cache
def is_floating(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.floating) or jax.numpy.issubdtype(dtype, np.floating)


_garbage: contextvars.ContextVar[tuple[float | None, str]] = contextvars.ContextVar("garbage", default=(None, ""))


def garbage(value: float, ref: str = "") -> contextlib.AbstractContextManager[None]:
    """While active, uninitialised memory holds `value` instead of NaN: on a TPU it can be any bits at all.

    ref: only the memory beyond the edge of the array of this Ref.
    """
    return holding(_garbage, (value, ref))


def poison(shape: tuple[int, ...], dtype: np.dtype, ref: str = "") -> np.ndarray:
    """Uninitialised memory, made visible: NaN for floats, the largest value for integers, True for bools.

    ref: whose array ends there.
    """
    value, only = _garbage.get()
    dtype, value = np.dtype(dtype), value if only in ("", ref) else None
    if holds_keys(dtype):
        return np.zeros(shape, dtype)
    if is_floating(dtype):
        one = np.full((), np.nan if value is None else value, dtype)
        if dtype.itemsize == 2:  # filled as integers, which is ten times as fast
            return np.full(shape, one.view(np.uint16), np.uint16).view(dtype)
        return np.full(shape, one, dtype)
    if dtype == np.bool_:
        return np.full(shape, value is None, dtype)
    # NumPy's iinfo knows no integers of four bits
    return np.full(shape, int(jax.numpy.iinfo(dtype).max) if value is None else round(value), dtype)


def all_finite(x: np.ndarray) -> bool:
    """Whether an array of floats has neither inf nor NaN."""
    if x.dtype == jax.numpy.bfloat16 and x.flags.c_contiguous:  # by its exponents: a tenth of what np.isfinite takes
        return bool(np.max(x.view(np.uint16) & _EXPONENT, initial=0) < _EXPONENT)
    return bool(np.isfinite(x).all())


_EXPONENT = np.uint16(0x7F80)  # of a bfloat16; all of its bits are set in inf and NaN


def _wide(x: np.ndarray) -> np.ndarray:
    """float32 for the 16- and 8-bit floats, which NumPy would otherwise reduce in their own precision."""
    return x.astype(np.float32) if is_floating(x.dtype) and x.dtype.itemsize < 4 else x


def _div(x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
    """Of integers: `meaning` divides floats."""
    safe = np.where(y == 0, 1, y).astype(y.dtype)
    inexact_and_negative = (np.fmod(x, safe) != 0) & ((x < 0) != (safe < 0))
    quotient = np.floor_divide(x, safe) + inexact_and_negative  # rounded towards zero
    return np.where(y == 0, np.array(-1).astype(x.dtype), quotient)  # XLA: x / 0 is -1


def _rem(x: np.ndarray, y: np.ndarray, **_: Any) -> np.ndarray:
    if is_floating(x.dtype):
        return np.fmod(x, y)
    safe = np.where(y == 0, 1, y)
    return np.where(y == 0, x, np.fmod(x, safe))


def _convert(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray:
    """A cast. From float to integer XLA saturates and makes NaN 0, where NumPy's result is undefined."""
    dtype = np.dtype(new_dtype)
    if not is_floating(x.dtype) or not is_integer(dtype):
        return x  # the result is cast to the equation's dtype in any case
    limits = jax.numpy.iinfo(dtype)
    whole = np.trunc(x.astype(np.float64))
    return np.clip(np.where(np.isnan(whole), 0, whole), int(limits.min), int(limits.max)).astype(dtype)


def _integer_pow(x: np.ndarray, *, y: int) -> np.ndarray:
    """By multiplications, as XLA does: np.power costs thirty times as much."""
    if y < 0:
        return 1 / _integer_pow(x, y=-y)
    if y < 2:
        return x if y else np.ones_like(x)
    x = _wide(x)
    half = _integer_pow(x * x, y=y // 2)
    return half * x if y % 2 else half


def _round(x: np.ndarray, *, rounding_method: Any) -> np.ndarray:
    if int(rounding_method) == 1:  # to nearest even
        return np.round(x)
    return np.trunc(x + np.copysign(np.asarray(0.5, x.dtype), x))


def _erf(x: np.ndarray, **_: Any) -> np.ndarray:
    from scipy import special

    return special.erf(_wide(x))


def _select(which: np.ndarray, *cases: np.ndarray, **_: Any) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which.astype(bool, copy=False), cases[1], cases[0])
    if which.ndim == 0:
        return cases[int(which)]
    return np.choose(which, cases)


def _broadcast_in_dim(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = iter(x.shape)
    expanded = [next(sizes) if d in broadcast_dimensions else 1 for d in range(len(shape))]
    return np.broadcast_to(x.reshape(expanded) if x.ndim else x, shape)


def _reshape(x: np.ndarray, *, new_sizes: Any, dimensions: Any, **_: Any) -> np.ndarray:
    return (x if dimensions is None else np.transpose(x, dimensions)).reshape(new_sizes)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    strides = strides or (1,) * len(start_indices)
    return x[tuple(slice(*s) for s in zip(start_indices, limit_indices, strides, strict=True))]


def _window(x: np.ndarray, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Where so large a part is that is moved until it lies inside."""
    begins = [min(max(int(s), 0), d - n) for s, d, n in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))


def _dynamic_update_slice(x: np.ndarray, update: np.ndarray, *starts: Any) -> np.ndarray:
    out = np.array(x)
    out[_window(x, starts, update.shape)] = update
    return out


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray:
    ramp = np.arange(shape[dimension]).astype(dtype)
    return np.broadcast_to(ramp.reshape([-1 if d == dimension else 1 for d in range(len(shape))]), shape)


def _reduction(ufunc: Op) -> Op:
    return lambda x, *, axes, **_: ufunc(_wide(x), axis=tuple(axes))


def _arg(which: Op) -> Op:
    return lambda x, *, axes, **_: which(x, axis=axes[0])


def _cumulative(ufunc: Op) -> Op:
    def op(x: np.ndarray, *, axis: int, reverse: bool) -> np.ndarray:
        x = _wide(x)
        return np.flip(ufunc(np.flip(x, axis), axis=axis), axis) if reverse else ufunc(x, axis=axis)

    return op


def _pad(x: np.ndarray, value: Any, *, padding_config: Any) -> np.ndarray:
    if any(lo < 0 or hi < 0 or inner for lo, hi, inner in padding_config):  # rare
        with jax.enable_x64(True), jax.default_device(_cpu()):
            return np.asarray(jax.lax.pad(x, value, padding_config))
    return np.pad(x, [(lo, hi) for lo, hi, _ in padding_config], constant_values=value)


_SHARED_OUT = 1 << 31  # FLOPs of a product from which several threads are worth waiting for


@functools.cache
def _blas() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]


@contextlib.contextmanager
def _one_thread(flops: int) -> Iterator[None]:
    """Small matrix products in one thread: on busy cores, threads that wait for one another cost a hundred times it."""
    before = [(library, library.num_threads) for library in _blas()] if flops < _SHARED_OUT else []
    before = [(library, number) for library, number in before if number != 1]
    for library, _ in before:
        library.set_num_threads(1)
    try:
        yield
    finally:
        for library, number in before:
            library.set_num_threads(number)


def _dot_general(x: np.ndarray, y: np.ndarray, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    (xc, yc), (xb, yb) = dimension_numbers
    if is_floating(x.dtype) or is_floating(y.dtype):
        x, y = _wide(x), _wide(y)
    else:  # exact in float64 up to 2^53, and far faster than NumPy's integer product
        x, y = x.astype(np.float64), y.astype(np.float64)
    xf = [d for d in range(x.ndim) if d not in (*xc, *xb)]
    yf = [d for d in range(y.ndim) if d not in (*yc, *yb)]
    batch, rows, columns = ([a.shape[d] for d in dims] for a, dims in ((x, xb), (x, xf), (y, yf)))
    depth = math.prod(x.shape[d] for d in xc)
    left = np.transpose(x, (*xb, *xf, *xc)).reshape(*batch, math.prod(rows), depth)
    right = np.transpose(y, (*yb, *yc, *yf)).reshape(*batch, depth, math.prod(columns))
    with _one_thread(2 * left.size * right.shape[-1]):
        return np.matmul(left, right).reshape((*batch, *rows, *columns))


def matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The product of two matrices, in float32 for narrower floats and int32 for integers."""
    product = _dot_general(x, y, dimension_numbers=(([1], [0]), ([], [])))
    return product if is_floating(x.dtype) else product.astype(np.int32)


def bitcast(x: np.ndarray, dtype: Any, dim: int = -2) -> np.ndarray:
    """The same bits as another type: `dim` grows or shrinks by the ratio of the widths."""
    x, dtype = np.asarray(x), np.dtype(dtype)
    if bits_of(x.dtype) == bits_of(dtype) >= 8:
        return np.ascontiguousarray(x).view(dtype)
    octets = np.ascontiguousarray(np.moveaxis(x, dim, -1)).view(np.uint8)
    if bits_of(x.dtype) < 8:
        octets = _packed(octets, bits_of(x.dtype))
    out = _unpacked(octets, dtype) if bits_of(dtype) < 8 else np.ascontiguousarray(octets).view(dtype)
    return np.moveaxis(out, -1, dim)


def _packed(x: np.ndarray, bits: int) -> np.ndarray:
    """Several elements of a few bits in one byte, the first one in its lowest bits."""
    each = 8 // bits
    parts = (x & (2**bits - 1)).reshape(*x.shape[:-1], -1, each)
    return np.bitwise_or.reduce(parts << (bits * np.arange(each, dtype=np.uint8)), -1)


def _unpacked(octets: np.ndarray, dtype: np.dtype) -> np.ndarray:
    bits = bits_of(dtype)
    parts = (octets[..., None] >> (bits * np.arange(8 // bits, dtype=np.uint8))) & (2**bits - 1)
    parts = parts.reshape(*octets.shape[:-1], -1)
    if is_floating(dtype):
        return parts.view(dtype)
    signed = dtype.name.startswith("int")
    return ((parts.astype(np.int8) ^ 2 ** (bits - 1)) - 2 ** (bits - 1) if signed else parts).astype(dtype)


_AS_IN_NUMPY = "abs ceil cos exp exp2 expm1 floor log log1p log2 sign sin sqrt square tanh".split()
ELEMENTWISE: dict[str, Op] = {
    **{name: getattr(np, name) for name in _AS_IN_NUMPY},
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "rem": _rem,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "round": _round,
    "integer_pow": _integer_pow,
    "pow": np.power,
    "logistic": lambda x, **_: 1 / (1 + np.exp(-_wide(x))),
    "rsqrt": lambda x, **_: 1 / np.sqrt(_wide(x)),
    "erf": _erf,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "is_finite": np.isfinite,
    "select_n": _select,
    "clamp": lambda lo, x, hi, **_: np.minimum(np.maximum(x, lo), hi),
    "convert_element_type": _convert,
    "copy": lambda x, **_: x,
    "stop_gradient": lambda x, **_: x,
    "reciprocal": lambda x, **_: 1 / _wide(x),
}

STRUCTURAL: dict[str, Op] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "broadcast_to": lambda x, *, shape: np.broadcast_to(x, shape),
    "reshape": _reshape,
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, tuple(dimensions)),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, axis=dimension),
    "stack": lambda *xs, axis: np.stack(xs, axis=axis),
    "tile": lambda x, *, reps: np.tile(x, reps),
    "slice": _slice,
    "dynamic_slice": lambda x, *starts, slice_sizes: x[_window(x, starts, slice_sizes)],
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "bitcast": lambda x, *, ty, dim=-2: bitcast(x, ty, dim),  # 0.11 has no `dim`: the second minor
    "pad": _pad,
    "gather": gather,
    "scatter": scatter,
    "scatter-add": scatter_add,
}

REDUCING: dict[str, Op] = {
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_prod": _reduction(np.prod),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "dot_general": _dot_general,
}

OPS: dict[str, Op] = {**ELEMENTWISE, **STRUCTURAL, **REDUCING}  # of arrays; ufuncs take no parameters

TRANSCENDENTAL = frozenset(
    "exp exp2 log log1p log2 expm1 tanh logistic sqrt rsqrt pow sin cos tan erf erf_inv cbrt".split()
)
_FREE = frozenset("select_n convert_element_type copy stop_gradient eq ne lt le gt ge".split())
_ARITHMETIC = frozenset(ELEMENTWISE) - _FREE - TRANSCENDENTAL

# Equations that only hold another program: primitive name -> the parameter that is this program.
INLINED = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


def inlined(eqn: Any) -> Any | None:
    """The program inside a call-like equation (jit, custom_vjp, remat, ...), or None."""
    name = eqn.primitive.name
    return eqn.params[INLINED[name]] if name in INLINED else None


def summed_over(eqn: Any) -> int:
    """How many products a dot_general adds up for each element of its result."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[d] for d in contracted)


def cost(eqn: Any) -> tuple[int, int]:
    """(floating-point operations, transcendentals) of one equation; a multiply-add counts as two."""
    name = eqn.primitive.name
    if not eqn.outvars or not hasattr(eqn.outvars[0].aval, "shape"):
        return 0, 0
    out = eqn.outvars[0].aval
    size = math.prod(out.shape)
    if name == "dot_general":
        return 2 * size * summed_over(eqn), 0
    if name in REDUCING and is_floating(np_dtype(eqn.invars[0].aval)):
        return math.prod(eqn.invars[0].aval.shape), 0
    if not is_floating(np_dtype(out)):
        return 0, 0
    return (0, size) if name in TRANSCENDENTAL else (size, 0) if name in _ARITHMETIC else (0, 0)


Apply = Callable[[Any, list[Any]], list[Any]]
Witness = Callable[[Any, Sequence[Any], Sequence[Any]], None]  # of (equation, its operands, its results)

_witness: contextvars.ContextVar[Witness | None] = contextvars.ContextVar("witness", default=None)


def witnessed(witness: Witness) -> contextlib.AbstractContextManager[None]:
    """While active, it is told of each equation that has run, of those inside of another one first."""
    return holding(_witness, witness)


def witness_now() -> Witness | None:
    return _witness.get()


def interpret(jaxpr: Any, values: Sequence[Any], apply: Apply, consts: Sequence[Any] | None = None) -> list[Any]:
    """Runs a program: apply(equation, its operands) -> a list of its results.

    consts: in place of the program's own, which are tracers where an equation takes them (run_scoped).
    """
    env = dict(zip(jaxpr.constvars, jaxpr.consts if consts is None else consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    plan, witness = _plan(jaxpr), witness_now()
    spend(len(plan))
    for eqn, atoms, done, unused in plan:
        operands = [a if literal else env[a] for a, literal in atoms]
        for v in done:  # memory that is free again is still in the caches
            del env[v]
        results = apply(eqn, operands)
        if witness is not None:
            witness(eqn, operands, results)
        env.update(zip(eqn.outvars, results, strict=True))
        for v in unused:
            del env[v]
    return [number_of(v) if is_literal(v) else env[v] for v in jaxpr.outvars]


Plan = list[tuple[Any, list[tuple[Any, bool]], list[Any], list[Any]]]
_plans: "weakref.WeakKeyDictionary[Any, Plan]" = weakref.WeakKeyDictionary()


def _plan(jaxpr: Any) -> Plan:
    """Per equation: its operands, each with whether it is a literal, those that no later one needs, unused results."""
    found = _plans.get(jaxpr)
    if found is None:
        found, needed = [], {v for v in jaxpr.outvars if not is_literal(v)}
        for eqn in reversed(jaxpr.eqns):
            atoms = [(number_of(a), True) if is_literal(a) else (a, False) for a in eqn.invars]
            done = {a for a, literal in atoms if not literal} - needed
            unused = [v for v in eqn.outvars if v not in needed]
            needed |= done
            found.append((eqn, atoms, [*done], unused))
        found.reverse()
        _plans[jaxpr] = found
    return found


def scan_groups(eqn: Any, values: Sequence[Any]) -> list[list[Any]]:
    """[constants, initial carry, scanned-over arrays] of a scan equation."""
    return [list(group) for group in eqn.params["ft_in"].update(values).unpack()]


def run_scan(eqn: Any, values: Sequence[Any], body: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """A scan equation, one Python iteration at a time."""
    consts, carry, xs = scan_groups(eqn, values)
    stacked = []
    for i in scan_order(eqn):
        out = body([*consts, *carry, *[np.asarray(x)[i] for x in xs]])
        carry = out[: len(carry)]
        stacked.append(out[len(carry) :])
    return scan_results(eqn, carry, stacked)


def scan_order(eqn: Any) -> range:
    """The numbers of what a scan goes over, as it comes to them."""
    return range(eqn.params["length"])[:: -1 if eqn.params["reverse"] else 1]


def scan_results(eqn: Any, carry: list[Any], stacked: list[list[Any]]) -> list[Any]:
    """What a scan returns. stacked: what each iteration gives beside the carry, in their order."""
    if eqn.params["reverse"]:
        stacked.reverse()
    if not stacked:
        ys = [np.zeros(v.aval.shape, np_dtype(v.aval)) for v in eqn.outvars[len(carry) :]]
    else:
        ys = [np.stack([np.asarray(y) for y in column]) for column in zip(*stacked, strict=True)]
    return [*carry, *ys]


def run_while(eqn: Any, values: Sequence[Any], run: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A while equation, one Python iteration at a time."""
    params = eqn.params
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, state = values[:first], values[first:last], [*values[last:]]
    while bool(np.asarray(run(params["cond_jaxpr"], [*cond_consts, *state])[0])):
        state = run(params["body_jaxpr"], [*body_consts, *state])
    return state


# The equations that what runs is inside of, the innermost first: JAX forgets who called them.
around: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("around", default=())


def inside_of(eqn: Any) -> contextlib.AbstractContextManager[None]:
    return holding(around, (eqn, *around.get()))


def evaluate(eqn: Any, values: Sequence[Any]) -> Any:
    """One array equation on NumPy values. Returns an array, or a list where the primitive has several results."""
    return evaluator(eqn)(values)


Run = Callable[..., Any]  # (values, reuse=False): an operand that nobody else needs may become the result


def meaning(eqn: Any) -> Op | None:
    """What an equation makes of arrays, up to the dtype; None where that is left to JAX."""
    op = OPS.get(eqn.primitive.name)
    if op is None or eqn.primitive.multiple_results:
        return None
    if op is _div and is_floating(out_dtype(eqn)):
        return np.true_divide
    return op if isinstance(op, np.ufunc) else functools.partial(op, **eqn.params)


def evaluator(eqn: Any) -> Run:
    """`evaluate` for one equation, to be called again and again."""
    op = meaning(eqn)
    if op is None:
        return lambda values, reuse=False: _by_jax(eqn, values)
    if isinstance(op, np.ufunc):
        return _by_ufunc(eqn, op)
    dtype = out_dtype(eqn)

    def run(values: Sequence[Any], reuse: bool = False) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(op(*map(np.asarray, values))).astype(dtype, copy=False)

    return run


def _by_ufunc(eqn: Any, ufunc: np.ufunc) -> Run:
    dtype, shape = out_dtype(eqn), eqn.outvars[0].aval.shape
    large = math.prod(shape) * dtype.itemsize >= _LARGE
    # one element at a time in its own type costs several times as much, and computes in float32, too
    wide = jax.numpy.bfloat16 in in_dtypes(eqn)

    def run(values: Sequence[Any], reuse: bool = False) -> Any:
        with np.errstate(all="ignore"):
            if wide:
                values = [_wide(np.asarray(v)) for v in values]
            out = _free(values, shape, dtype) if reuse and large and not wide else None
            return np.asarray(ufunc(*values, out=out)).astype(dtype, copy=False)

    return run


_LARGE = 1 << 18  # bytes: from here on new memory costs more than to look whether there is old


def _free(values: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """An operand that the result can be written over: nobody but this sequence knows of it."""
    for i in range(len(values)):
        if sys.getrefcount(values[i]) == _ALONE and isinstance(values[i], np.ndarray):
            x = values[i]
            if x.dtype == dtype and x.shape == shape and x.flags.owndata and x.flags.writeable:
                return x
    return None


_known_here = [np.empty(0)]
_ALONE = sys.getrefcount(_known_here[0])


def _by_jax(eqn: Any, values: Sequence[Any]) -> Any:
    with jax.default_device(_cpu()):
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    several = eqn.primitive.multiple_results
    results = [y if is_key(y) else np.asarray(y) for y in (out if several else [out])]
    return results if several else results[0]


@functools.cache
def _cpu() -> Any:
    return jax.devices("cpu")[0]
