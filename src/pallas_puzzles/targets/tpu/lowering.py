"""Does the Pallas front end for TPU take this kernel? Milliseconds, on any machine; a refusal is one sentence.

JAX's messages are not public API. The patterns here were seen on jax 0.11.2 and 0.12.0.1; a message that none of them
knows is passed on as it is.
"""

import contextlib
import dataclasses
import functools
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from ...diagnose.errors import explain_error, readers_frame
from ...ir.capture import CHIP, Beyond, Call, Operand, Scratch, SourceLine, describe, line_of
from ...ir.meshes import on_tpus, tpu_mesh
from ...ir.modes import built_for, compiled, is_built_for
from ...ir.ops import in_avals, out_avals
from ...ir.program import calls_in, equations, inside
from ...text import cut

_SUBLANES, _LANES = 8, 128


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why no TPU compiler takes a kernel."""

    sentence: str  # for the reader: what is wrong, and what to try
    detail: str  # what JAX says, shortened
    line: SourceLine | None


def refusal(fn: Callable[..., Any], *args: Any, chip: str = CHIP, **kwargs: Any) -> Refusal | None:
    """None when the front end takes every kernel of `fn(*args, **kwargs)`, else why not. Compiles and runs nothing.

    args: arrays, or pytrees of arrays; kwargs: static (block sizes and the like).
    """
    return refusal_on(tpu_mesh(chip), functools.partial(fn, **kwargs) if kwargs else fn, args)


def refusal_on(mesh: jax.sharding.AbstractMesh, fn: Callable[..., Any], args: Sequence[Any]) -> Refusal | None:
    """`refusal` for the chips of a mesh. args: arrays or jax.ShapeDtypeStructs, or pytrees of them."""
    with for_tpu(mesh):
        try:
            traced = jax.jit(lambda *a: fn(*a)).trace(*args)
        except Exception as error:
            finding = explain_error(error)
            return Refusal(finding.cause, "; ".join(finding.evidence), finding.line)
        kernels = list(calls_in(traced.jaxpr))
        if not all(is_built_for(kernel, False) for kernel in kernels):  # before this, for a simulator
            traced = jax.jit(built_for(fn, False)).trace(*args)
            kernels = list(calls_in(traced.jaxpr))
        if (absent := _absent_type(kernels)) is not None:
            return absent
        try:
            with warnings.catch_warnings(action="ignore"):  # a warning is no refusal, whatever the reader makes of it
                traced.lower(lowering_platforms=("tpu",))
        except Exception as error:
            return _explain(error, kernels)
    return None


def exported(fn: Callable[..., Any], shapes: Sequence[Any]) -> bytes:
    """The program of `fn(*arrays)` as jax.export writes it, for the TPU of `for_tpu`; its results are a flat list.

    Raises whatever tracing, lowering or serialising it raises.
    """
    from jax import export

    fn = compiled(fn, shapes)
    # leaves alone: a NamedTuple of the reader's cannot be serialised
    flat = jax.jit(lambda *a: jax.tree.leaves(fn(*a)))
    with warnings.catch_warnings(action="ignore"):
        return bytes(export.export(flat, platforms=["tpu"])(*shapes).serialize())


@contextlib.contextmanager
def for_tpu(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """Trace and lower as on a machine with these TPUs: kernels are compiled there, not interpreted."""
    interpreted = pltpu.force_tpu_interpret_mode(None)  # type: ignore[arg-type] # None: not at all
    with on_tpus(mesh), interpreted:
        yield


# Types that no TPU has. The front end lets them pass, and the compiler behind it does not.
_INSTEAD = {
    "float16": "bfloat16 or float32",
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex64": "two float32 arrays, the real and the imaginary part",
    "complex128": "two float32 arrays, the real and the imaginary part",
}


def _absent_type(kernels: list[Any]) -> Refusal | None:
    if kernels and jax.dtypes.canonicalize_dtype("int64") == np.dtype("int64"):
        sentence = "64-bit types are switched on (jax_enable_x64), and a TPU kernel has none: switch them off."
        return Refusal(sentence, "", line_of(kernels[0]))
    for kernel in kernels:
        refs: list[Operand | Scratch] = []
        for call in _described([kernel]):
            refs += [*call.operands, *call.scratch]
        for ref in refs:
            if instead := _INSTEAD.get(ref.dtype.name):
                sentence = f"{ref.name} is {ref.dtype.name}, which no TPU has: use {instead}."
                return Refusal(sentence, "", line_of(kernel))
        for eqn, line in inside([kernel]):
            for dtype in (str(getattr(aval, "dtype", "")) for aval in out_avals(eqn)):
                if instead := _INSTEAD.get(dtype):
                    sentence = f"`{eqn.primitive.name}` makes {dtype} here, which no TPU has: use {instead}."
                    return Refusal(sentence, "", line)
    return None


def _described(kernels: list[Any]) -> list[Call]:
    found = []
    for eqn in kernels:
        with contextlib.suppress(Beyond):
            found.append(describe(eqn))
    return found


def _explain(error: Exception, kernels: list[Any]) -> Refusal:
    text, detail = str(error), _detail(error)
    lowered = _lowered_primitive(error)
    for pattern, explain in _REASONS:
        if match := re.search(pattern, text, re.DOTALL):
            named = match.groupdict().get("primitive")
            line = line_of_primitive(named, inside(kernels)) or _line_at_fault(error, lowered, kernels)
            sentence = explain if isinstance(explain, str) else explain(match, _described(kernels), line)
            return Refusal(sentence, detail, line)
    line = _line_at_fault(error, lowered, kernels)
    if lowered == "dot_general" and _multiplies_vectors(kernels, line):
        return Refusal("The MXU multiplies matrices, and these are two vectors: write jnp.sum(x * y).", detail, line)
    if lowered and re.fullmatch(r"(bool|(u?int|float|bfloat)\d+\w*)?", text):
        of = f"on {text}" if text else "like this"
        sentence = f"A TPU kernel cannot do `{lowered}` {of}, and JAX does not say why: try other types or shapes."
        return Refusal(sentence, detail, line)
    return Refusal(f"The TPU front end refuses this kernel: {detail}.", "", line)


def _line_at_fault(error: Exception, lowered: str | None, kernels: list[Any]) -> SourceLine | None:
    """The reader's line in the traceback, else of the operation that was lowered, else of the only call."""
    line = readers_frame(error) or line_of_primitive(lowered, inside(kernels))
    # jnp.searchsorted and the like: on jax 0.12.0.1 one equation, whose program is not to be seen
    line = line or line_of_primitive("call_hi_primitive", inside(kernels))
    return line or (line_of(kernels[0]) if len(kernels) == 1 else None)


def _detail(error: Exception) -> str:
    """The first line of JAX's message that means something, without its plea to file a bug."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":") and len(lines) > 1:
        lines = [" ".join(lines[:2])]
    text = re.sub(r"Please file an? \w+ at \S+\s*", "", lines[0]) if lines else ""
    text = re.sub(r"^Pallas encountered an internal verification error\. Error details: ", "", text)
    text = re.sub(r'error: ".*"\(.*\): ', "", text)  # where in JAX's own program
    text = cut(re.sub(r"\. Block spec for .*", "", text).strip().rstrip("."), 220)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _lowered_primitive(error: BaseException) -> str | None:
    """The operation that JAX was lowering: its functions are called `_NAME_lowering_rule` (jax 0.11.2 to 0.12.0.1)."""
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    rules = [match[1] for name in frames if (match := re.fullmatch(r"_(\w+)_lowering_rule", name))]
    return rules[-1] if rules and rules[-1] != "pjit" else None


def _multiplies_vectors(kernels: list[Any], line: SourceLine | None) -> bool:
    products = [eqn for eqn, where in inside(kernels) if eqn.primitive.name == "dot_general" and where == line]
    return any(all(aval.ndim == 1 for aval in in_avals(eqn)) for eqn in products)


def line_of_primitive(name: str | None, found: Iterable[tuple[Any, SourceLine | None]]) -> SourceLine | None:
    """Where the reader uses an operation: neither JAX nor the compiler says so inside a function of jax.numpy.

    found: the equations of a kernel, each with its line.
    """
    return next((line for eqn, line in found if eqn.primitive.name == name and line is not None), None)


# What to do in a kernel without an operation that the TPU lacks.
_WITHOUT = {
    "sort": "sort outside the kernel; a largest value or its place is jnp.max or jnp.argmax",
    "cumsum": "multiply by a triangular matrix of ones, or carry the sum along a lax.fori_loop over rows",
    "scatter": "store into a slice of the ref, `o_ref[0:1, :] = value`, or choose with jnp.where and "
    "lax.broadcasted_iota",
    "scatter-add": "add into a slice of the ref, `o_ref[0:1, :] += value`, or multiply by a one-hot matrix",
    "gather": "slice the ref, `x_ref[pl.ds(start, size)]`, or multiply by a one-hot matrix",
    "dynamic_slice": "slice the ref instead of the value, `x_ref[pl.ds(start, size)]`",
    "rev": "reverse outside the kernel, or let the index map walk the blocks backwards",
    "pallas_call": "a kernel cannot start another: call its body with refs, or run pltpu.emit_pipeline",
    "pure_callback": "a kernel cannot call Python; pl.debug_print prints a value",
}


def _missing(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    name = match["primitive"]
    maps = [o.index_map for call in calls for o in call.operands if o.index_map is not None]
    if any(eqn.primitive.name == name for index_map in maps for eqn, _ in equations(index_map)):
        return (
            f"`{name}` does not exist in an index map: compute with whole numbers, or give the blocks as a prefetched "
            "operand (pltpu.PrefetchScalarGridSpec), table_ref[i]."
        )
    instead = _WITHOUT.get(name, "write it with simpler operations, or do it outside the kernel")
    return f"`{name}` does not exist in a TPU kernel: {instead}."


def _refused_operand(text: str, calls: list[Call]) -> tuple[Operand | None, str]:
    """The operand that JAX complains about, found by its block and array shape, and what to call it."""
    shapes = re.search(r"Block spec for (\S+) .*?has block shape (\(.*?\)), array shape (\([\d, ]*\)), and", text)
    if shapes is None:
        return None, "an operand"
    block = tuple(int(size) if size else 1 for size in re.findall(r"block_size=(\d+)|Squeezed\(\)|\bNone\b", shapes[2]))
    alike = (o for call in calls for o in call.operands if (o.block, o.shape) == (block, numbers(shapes[3])))
    operand = next(alike, None)
    return operand, operand.name if operand else shapes[1]


def numbers(text: str) -> tuple[int, ...]:
    """'8x128x' or '(8, 128)' -> (8, 128)."""
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _blocks(operand: Operand) -> str:
    """What the reader has written of an operand."""
    block = tuple(None if d.kind == "squeezed" else d.size for d in operand.dims)
    return f"{operand.name} has blocks of {block} in an array of {operand.shape}"


def _fitting(operand: Operand) -> tuple[int, ...]:
    """The nearest block that keeps the rule: its last two dimensions multiples of 8 and 128, or whole."""
    fitted = list(operand.block)
    for axis, tile in ((-2, _SUBLANES), (-1, _LANES)):
        size, whole = operand.block[axis], operand.shape[axis]
        if size % tile and size != whole:
            fitted[axis] = min(-(-size // tile) * tile, whole)
    return tuple(fitted)


def _tiled(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    operand, name = _refused_operand(match.string, calls)
    rule = "on a TPU the last two dimensions of a block are multiples of 8 and 128, or the whole dimension"
    if operand is None:
        return f"The blocks of {name} do not fit the hardware: {rule}."
    if operand.space == "smem":
        return (
            f"{_blocks(operand)}, and {rule}, in SMEM too: leave the array whole, "
            "pl.BlockSpec(memory_space=pltpu.SMEM), and pick its elements with pl.program_id."
        )
    advice = f"{_fitting(operand)} would do"
    if any(d.kind == "squeezed" for d in operand.dims[-2:]):
        advice += ", or squeeze (None) only dimensions before the last two"
    return f"{_blocks(operand)}, and {rule}: {advice}."


def _flat(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    operand, name = _refused_operand(match.string, calls)
    if operand is None:
        return (
            f"The blocks of {name} do not fit the hardware: a one-dimensional block is the whole array, a multiple of "
            "1024, or a power of two from 128 up."
        )
    (size,), (length,) = operand.block, operand.shape
    smallest = _LANES * 32 // (8 * operand.itemsize)
    fitting = max(smallest, 1 << (size - 1).bit_length())
    return (
        f"{_blocks(operand)}, and on a TPU a one-dimensional block of {operand.dtype.name} is the whole array, a "
        f"multiple of 1024, or a power of two from {smallest} up: {(min(fitting, length),)} would do, or an array of "
        f"({length}, 1) with blocks of ({-(-size // _SUBLANES) * _SUBLANES}, 1)."
    )


def _without_dimension(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    _, name = _refused_operand(match.string, calls)
    return f"{name} has no dimension, and a TPU wants at least one: give it the shape (1,), in SMEM (memory_space)."


def _in_hbm(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    names = [o.name for call in calls for o in call.operands if o.in_hbm]
    used = [name for name in names if line is not None and re.search(rf"\b{re.escape(name)}\b", line.text)]
    return (
        f"{(used or names or ['This ref'])[0]} stays in HBM, where a kernel can neither load nor store: copy a piece "
        "to VMEM with pltpu.sync_copy or pltpu.make_async_copy, or give it a BlockSpec with a block."
    )


def _without_elements(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    empty = next((o for call in calls for o in call.operands if 0 in o.shape), None)
    if empty is not None:
        return (
            f"{empty.name} has no elements, its shape is {empty.shape}, and a TPU kernel needs some: leave out the "
            "call when a dimension is 0."
        )
    return (
        f"A value of shape {numbers(match[1])} is made here, and a TPU kernel has no values without elements: do this "
        "without slices that may be empty, in a Python loop or outside the kernel."
    )


def _single_number(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    wide = "float32" if "float" in match[1] else "int32"
    return (
        f"A single {match[1]} is taken out of an array here, and only 32-bit numbers leave a vector: cast the array "
        f"first, .astype(jnp.{wide})."
    )


def _unlike_copy(match: re.Match[str], calls: list[Call], line: SourceLine | None) -> str:
    shapes = [numbers(sizes) for sizes in re.findall(r"memref<((?:\d+x)*)\w+", match.string)[:2]]
    what = "type" if match[1] == "element type" else "shape"
    differ = f", and these are {shapes[0]} and {shapes[1]}" if what == "shape" and len(shapes) == 2 else ""
    then = ", and cast in VMEM" if what == "type" else ""
    return f"A copy needs the same {what} on both sides{differ}: give the buffer the {what} of the slice{then}."


_REASONS: list[tuple[str, str | Callable[[re.Match[str], list[Call], SourceLine | None], str]]] = [
    (r"divisible by 8 and 128 respectively", _tiled),
    (r"rank 1 block shapes", _flat),
    (r"only blocks of rank >= 1", _without_dimension),
    (r"Unimplemented primitive in Pallas TPU lowering.*?: (?P<primitive>[\w-]+)", _missing),
    (r"Cannot do int indexing on TPU|Only take_along_axis-like gathers",
     "An array of integers picks the elements here, and a TPU kernel cannot gather: take one row at a time, "
     "`x_ref[pl.ds(i, 1)]`, multiply by a one-hot matrix, or let an index map with scalar prefetch pick the blocks."),
    (r"Cannot store scalars to VMEM",
     "A single number is stored to VMEM, which takes whole vectors: compute the whole block at once, "
     "`o_ref[...] = ...`, or put this ref into SMEM (memory_space=pltpu.SMEM)."),
    (r"Loads.* are only allowed on VMEM and SMEM", _in_hbm),
    (r"Can only (load|store) scalars (from|to) SMEM",
     "SMEM holds single numbers: give one index per dimension, `s_ref[0, i]`, or put this array into VMEM."),
    (r"Scan with \d+ extensive",
     "lax.scan can neither walk over an array nor stack its results in a TPU kernel: use lax.fori_loop, and load "
     "and store each step through the refs, `x_ref[pl.ds(i, 1)]`."),
    (r"matmul acc to be 32-bit",
     "A product of 16-bit tiles is asked for in 16 bits, and the TPU accumulates in 32: give jnp.dot "
     "preferred_element_type=jnp.float32, and cast when you store."),
    (r"expected strides to be confined",
     "A value cannot be sliced with a step in a TPU kernel: split the dimension, `x.reshape(rows // 2, 2, "
     "columns)[:, 0]`, or slice a ref that is 128 wide, `x_ref[pl.ds(0, size, stride=2)]`."),
    (r"'tpu\.(?P<primitive>iota)' op result",
     "A TPU counts in integers: make the range with lax.broadcasted_iota(jnp.int32, shape, axis), and cast it."),
    (r"positive constant sizes but got ([\d, ]+)", _without_elements),
    (r"32-bit element types can be converted to scalars, but got: (\w+)", _single_number),
    (r"DMA source and target (shape|element type) mismatch", _unlike_copy),
    (r"collective_id has to be specified",
     "A barrier needs a number of its own: compiler_params=pltpu.CompilerParams(collective_id=0)."),
    (r"#tpu\.dimension_semantics<(\w+)>",
     'A dimension of the grid is "parallel" or "arbitrary", and this dimension_semantics says something else.'),
]  # fmt: skip
