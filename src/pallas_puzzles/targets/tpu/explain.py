"""What the TPU compiler refuses, in one sentence that a learner understands, with the reader's own line.

The messages are libtpu's and Mosaic's; those known here were seen on libtpu 0.0.50 and 0.0.51, with jax 0.11.2 and
0.12.0.1. What the front end refuses before them is explained in lowering.py.
"""

import dataclasses
import linecache
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...ir.capture import Call, SourceLine, arg_names, is_readers_file, source_line, space_of
from ...ir.ops import in_avals, out_avals
from ...ir.program import equations
from ...lens.machine import listed
from ...text import cut, human_bytes
from .chips import Chip
from .lowering import Refusal, line_of_primitive, numbers


class _Failure:
    """A refusal of the compiler's, taken apart. What is unknown is None, or empty."""

    def __init__(self, text: str, calls: Sequence[Call], chip: Chip) -> None:
        self.text, self.chip = text, chip
        place = (re.findall(r"at location: (loc\(.*)", text) or [""])[0]
        named = re.match(r'loc\((?:fused\[)?"(\w+):"', place)
        self.primitive = named[1] if named else ""  # the operation at fault, by JAX's name
        self.call = _call(text, calls)  # the kernel
        self.line, self.code = _reader_line(place)  # the reader's, and the expression at fault as it stands there
        if self.line is None and self.call is not None:
            # what stands nowhere in the kernel, JAX has made: of the reader's, it is the pipeline
            known = list(equations(self.call.kernel))
            its = line_of_primitive(self.primitive, known) or line_of_primitive("emit_pipeline", known)
            self.line = its or self.call.where
        operation = re.search(r"failed to legalize operation '[^']*': (.*)|The MLIR operation involved:\s*(.*)", text)
        # the operation at fault, by the compiler's name, with its operands and types
        self.mlir = operation[1] or operation[2] if operation else ""
        # shape and type of every Ref and of every vector in that: operands, then results
        self.memrefs, self.vectors = (_shaped(kind, self.mlir) for kind in ("memref", "vector"))

    @property
    def ref(self) -> str:
        """What the reader calls the Ref at fault."""
        if named := re.match(r"\s*(\w+)(?:\.at|\.reshape\([^)]*\))?\s*\[", self.code):
            return named[1]
        argument = re.search(r"\(%arg(\d+)[,)]", self.mlir)
        if self.call and argument:  # the compiled function takes the grid index, then what the kernel takes
            names = arg_names(self.call.kernel)
            number = int(argument[1]) - len(self.call.grid)
            if 0 <= number < len(names):
                return names[number]
        return ""

    @property
    def dtype(self) -> str:
        """The type that the operation works on. The compiler's integers have no sign: JAX's equation knows it."""
        narrow = [name for _, name in self.vectors if name not in _FULL_WIDTH]
        seen = narrow[0] if narrow else self.vectors[0][1] if self.vectors else ""
        unsigned = re.search(r'"arith\.\w+ui"', self.mlir) or f"u{seen}" in self.operand_types
        return f"u{seen}" if unsigned else seen

    @property
    def operand_types(self) -> list[str]:
        """The types of what JAX's equation takes."""
        call = self.call
        found = [each for each in equations(call.kernel) if each[0].primitive.name == self.primitive] if call else []
        here = [eqn for eqn, line in found if line == self.line] or [eqn for eqn, _ in found]
        return [str(getattr(aval, "dtype", "")) for eqn in here[:1] for aval in in_avals(eqn)]


_FULL_WIDTH = ("float32", "int32")
_Words = tuple[str, SourceLine | None]  # and whose line it is, where that is not the one that the compiler names
_Sentence = str | Callable[[re.Match[str], _Failure], str | _Words]


def explain(text: str, calls: Sequence[Call], chip: Chip) -> Refusal:
    """The compiler's error as a refusal. calls: the kernels of the program, to name their buffers."""
    failure = _Failure(text, calls, chip)
    said: str | _Words = _unforeseen(failure)
    for pattern, sentence in _REASONS:
        if match := re.search(pattern, text, re.DOTALL):
            said = sentence if isinstance(sentence, str) else sentence(match, failure)
            break
    words, line = said if isinstance(said, tuple) else (said, None)
    return Refusal(words, _message(text), line or failure.line)


def explain_abort(text: str, calls: Sequence[Call]) -> Refusal | None:
    """The end of the compiler's process as a refusal, where it is the kernel's doing; else None."""
    if "Check failed: rem == 0" not in text:  # on libtpu 0.0.50
        return None
    call = calls[0] if len(calls) == 1 else None
    words = (
        f"Booleans change their shape in {call.name if call else 'a kernel'}, and the compiler aborts on it: make them "
        "numbers first, `.astype(jnp.int32)`, and compare after the reshape."
    )
    return Refusal(words, text, call.where if call else None)


# --- reading the compiler's text -------------------------------------------------------------------------------------


def _call(text: str, calls: Sequence[Call]) -> Call | None:
    """The kernel that the text is about: by its name, else by the shapes of its results; of several, the largest."""
    module = re.search(r"MLIR module name `([^`]*)`", text)
    results = re.search(r" = (\S.*?) custom-call\(", text)
    same = list(calls)
    if module:
        same = [call for call in calls if re.sub(r"\W", "_", call.name) == re.sub(r"\W", "_", module[1])]
    elif results:  # '(f32[8,128]{1,0:T(8,128)}, s32[])' -> [(8, 128), ()]
        shapes = [numbers(sizes) for sizes in re.findall(r"\w\[([\d,]*)\]", results[1])]
        same = [call for call in calls if shapes == [o.shape for o in call.outs]]
    return max(same or calls, key=lambda call: sum(each.nbytes for each in _held(call)), default=None)


def _reader_line(place: str) -> tuple[SourceLine | None, str]:
    """The reader's innermost line in a location, and the expression in it: '"file":74:30 to :51', columns from 0."""
    for file, first, start, last, end in re.findall(r'"([^"\n]+)":(\d+)(?::(\d+)(?: to (\d*):(\d+))?)?', place):
        if is_readers_file(file):
            row = linecache.getline(file, int(first)).encode()  # Python counts columns in bytes
            stop = int(end) if end and last in ("", first) else len(row)
            code = row[int(start) : stop].decode(errors="ignore") if start else ""
            return source_line(file, int(first)), code.strip()
    return None, ""


def _message(text: str) -> str:
    """The first line that means something, without who says it to whom, and with shapes as JAX writes them."""
    text = re.sub(r"^(\w*Error: |[A-Z_]+: |Mosaic failed to compile.*?HLO name `[^`]*`: |E\d+: \w+:\s*)+", "", text)
    text = re.sub(r"^(XLA:TPU compile permanent error\.|[Nn]ot [Ii]mplemented:|[\w-]+-layout:)\s*", "", text)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason is given")
    first = re.sub(r"(: [%\"]| :: #).*", "", first)
    first = re.sub(r" while allocating on stack for .*?\}\.", ":", first)
    first = re.sub(r"'?(?:vector|memref)<((?:\d+x)*)(\w+)[^>]*>+'?", _readable, first)
    first = re.sub(r"'\w+\.(\w+)'", r"\1", first).rstrip(".")
    return cut(first, 220)


def _readable(match: re.Match[str]) -> str:
    """'vector<8x128xbf16>' -> '(8, 128) bfloat16'."""
    shape = f"{numbers(match[1])} " if match[1] else ""
    return shape + _jax_type(match[2])


def _shaped(kind: str, mlir: str) -> list[tuple[tuple[int, ...], str]]:
    """'vector<8x128xbf16>' -> ((8, 128), 'bfloat16'), each one in the text. kind: 'vector' or 'memref'."""
    found = re.findall(rf"{kind}<((?:\d+x)*)(\w+)", mlir)
    return [(numbers(sizes), _jax_type(name)) for sizes, name in found]


def _jax_type(mlir: str) -> str:
    if small := re.fullmatch(r"f(\d)(E\dM\d\w*)", mlir):
        return f"float{small[1]}_{small[2].lower()}"
    known = {"i1": "bool", "bf16": "bfloat16"}
    return known.get(mlir) or re.sub(r"^i(?=\d)", "int", re.sub(r"^f(?=\d)", "float", mlir))


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Held:
    """Something in a kernel that takes memory. nbytes: as it lies there, in whole tiles. line: None for a buffer."""

    name: str
    nbytes: int
    space: str
    shape: tuple[int, ...]
    copies: int = 1
    line: SourceLine | None = None

    @property
    def narrow(self) -> bool:
        """Most of it is filling: a row of a tile is 128 long, whatever is in it."""
        return len(self.shape) > 1 and self.shape[-1] <= 64

    def __str__(self) -> str:
        copies = f"{self.copies} x " if self.copies > 1 else ""
        row = f", where a row of {self.shape[-1]} takes the place of 128" if self.narrow else ""
        return f"{self.name} ({copies}{human_bytes(self.nbytes / self.copies)}{row})"


def _tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes in VMEM or SMEM: the last dimension is filled up to 128, the one before it to 8."""
    if len(shape) < 2:
        return math.prod(shape) * itemsize
    rows, columns = -(-shape[-2] // 8) * 8, -(-shape[-1] // 128) * 128
    return math.prod(shape[:-2]) * rows * columns * itemsize


def _held(call: Call) -> list[_Held]:
    """What takes memory in a kernel, the largest first: its buffers, and the largest value that it computes."""
    steps = math.prod(call.grid)
    found = []
    for o in call.operands:
        copies = o.buffer_count if steps > 1 and o.block != o.shape else 1
        found.append(_Held(o.name, copies * _tiled_bytes(o.block, o.itemsize), o.space, o.ref_shape, copies))
    found += [_buffer(name, aval, "smem") for name, aval in zip(call.scalar_names, call.scalar_avals, strict=True)]
    found += [_buffer(s.name, s, s.space) for s in call.scratch]
    values = []
    for eqn, line in equations(call.kernel):
        if eqn.primitive.name == "run_scoped":  # its jaxpr takes the buffers: seen on jax 0.11.2 and 0.12.0.1
            inner = eqn.params["jaxpr"]
            refs = zip(arg_names(inner), (var.aval for var in inner.invars), strict=True)
            found += [_buffer(name, aval, space_of(aval)) for name, aval in refs]
            continue
        for aval in out_avals(eqn):
            if getattr(aval, "shape", ()) and hasattr(aval.dtype, "itemsize"):
                name = f"the {aval.dtype} of shape {tuple(aval.shape)} that `{eqn.primitive.name}` makes"
                values.append(_buffer(name, aval, "value", line))
    found += sorted(values, key=lambda each: -each.nbytes)[:1]
    return sorted(found, key=lambda each: -each.nbytes)


def _buffer(name: str, like: Any, space: str, line: SourceLine | None = None) -> _Held:
    nbytes = _tiled_bytes(like.shape, getattr(like.dtype, "itemsize", 4))  # that of a semaphore has none
    return _Held(name, nbytes, space, tuple(like.shape), line=line)


def _bytes(text: str) -> float:
    """'19.14M' as the compiler writes sizes, rounded."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMGT]?)", text.rstrip(".")).groups()  # type: ignore[union-attr]
    return float(number) * 1024.0 ** "BKMGT".index(unit or "B")


def over_vmem(call: Call | None, chip: Chip, needed: float = 0, limit: float = 0) -> _Words:
    """A kernel that needs more VMEM than it may use, or, where that is not told, than there is."""
    kernel = call.name if call else "This kernel"
    if needed:
        whose = "its vmem_limit_bytes" if call and call.vmem_limit_bytes else f"the default of a {chip.title}"
        sentence = f"{kernel} needs {human_bytes(needed)} of VMEM and may use {human_bytes(limit)}, {whose}"
    else:
        sentence = f"{kernel} needs more VMEM than the {human_bytes(chip.vmem_bytes)} of a {chip.title}"
    held = [each for each in _held(call) if each.space in ("vmem", "value")] if call else []
    held = [each for each in held[:3] if each.nbytes >= held[0].nbytes / 8]
    if held:
        sentence += f"; the largest in it {'are' if len(held) > 1 else 'is'} {listed([str(each) for each in held])}"
    advice, more = ["use smaller blocks"], int(needed / 2**20) + 1
    if needed and more << 20 <= chip.vmem_bytes:
        advice.append(f"ask for more, compiler_params=pltpu.CompilerParams(vmem_limit_bytes={more} << 20)")
    if held and held[0].narrow:
        advice.insert(0, f"put a long dimension of {held[0].name} last")
    elif held and held[0].line is not None:
        advice.insert(0, "compute it in pieces")
    *others, last = advice
    line = held[0].line if held else None
    return f"{sentence}: {f'{", ".join(others)}, or ' if others else ''}{last}.", line


def _over_smem(match: re.Match[str], failure: _Failure) -> str:
    held = [each for each in _held(failure.call) if each.space == "smem" and each.nbytes] if failure.call else []
    size = human_bytes(failure.chip.info.smem_capacity_bytes)
    what = f", {held[0]}" if held else ""
    advice = "keep there only the numbers that steer the kernel, and give arrays blocks in VMEM"
    if held and held[0].narrow:
        advice = f"flatten {held[0].name} to one dimension, which is not filled up"
    kernel = failure.call.name if failure.call else "This kernel"
    return f"{kernel} keeps more than the {size} of a {failure.chip.title} in SMEM{what}: {advice}."


# --- slices and copies -----------------------------------------------------------------------------------------------


def _unaligned(match: re.Match[str], failure: _Failure) -> str:
    axis, multiple = int(match[1]), int(match[2])
    ref = failure.ref or "x_ref"
    shape = failure.memrefs[0][0] if failure.memrefs else ()
    size = f"{shape[axis]}" if axis < len(shape) else "size"
    said = (
        f"{failure.ref or 'A ref'} is sliced along dimension {axis} from a start that is not known to be a multiple of "
        f"{multiple}, the size of a tile there: where it always is one, say so, pl.multiple_of(start, {multiple})"
    )
    if failure.primitive == "swap":
        chosen = f"jnp.where(lax.broadcasted_iota(jnp.int32, {ref}.shape, {axis}) == start, value, {ref}[...])"
        return f"{said}; else store all of it, {ref}[...] = {chosen}."
    turned = f"pltpu.roll({ref}[...], {size} - start, {axis})"
    if len(shape) == 1:
        turned = f"pltpu.roll({ref}[...].reshape(1, {size}), {size} - start, 1)[0]"
    return f"{said}; else load all of it and turn what you want to the front, {turned}."


def _unaligned_copy(match: re.Match[str], failure: _Failure) -> str:
    what, axis, tile = match[1], int(match[2]), int(match[3])
    ref = failure.ref or "an array in HBM"
    shapes = [shape for shape, _ in failure.memrefs]
    rows = bool(shapes) and len(shapes[0]) == 2 and axis == 0
    said = f"A copy takes whole tiles of {ref}, and "
    if what == "size":
        size = shapes[-1][axis] if shapes else 0
        said += f"this one takes {size} along dimension {axis}: copy {-(-size // tile) * tile}, a multiple of {tile}"
    else:
        said += f"this one has to start at a multiple of {tile} along dimension {axis}: say so where the start is "
        said += f"computed, pl.multiple_of(start, {tile}), or copy the tiles around it"
    if rows:
        own = shapes[0][0], 1, shapes[0][1]
        return f"{said}, or give every row a tile of its own, an array of {own}."
    return f"{said}, and cut in VMEM."


def _narrow_copy(match: re.Match[str], failure: _Failure) -> str:
    moved = [shape for shape, _ in failure.memrefs if shape and shape[-1] % 128]
    what = f", and this one moves {moved[0]}" if moved else ""
    return (
        f"A copy between HBM and VMEM starts and ends at multiples of 128 along the last dimension{what}: copy whole "
        "tiles, and cut in VMEM."
    )


def _strided(match: re.Match[str], failure: _Failure) -> str:
    ref = failure.ref or "A ref"
    steps = re.search(r"strides = array<i32: ([\d, ]+)>", failure.mlir)
    strides = numbers(steps[1]) if steps else ()
    axis = next((i for i, stride in enumerate(strides) if stride > 1), 0)
    step, shape = strides[axis] if strides else 2, failure.memrefs[0][0] if failure.memrefs else ()
    if failure.primitive == "swap":
        return (
            f"{ref} is stored to with a step, which takes 32-bit values and a ref that is 128 wide: store one row at a "
            f"time, {ref}[{step} * i] = value[i]."
        )
    advice = "load all of it, and split the dimension of the value with reshape"
    if len(shape) == len(strides) and shape[axis] % step == 0:
        split = ", ".join(map(str, (*shape[:axis], shape[axis] // step, step, *shape[axis + 1 :])))
        advice = f"load all of it and split the dimension, {ref}[...].reshape({split})[{':, ' * (axis + 1)}0]"
    return f"{ref} is read with a step, which takes the rows of a ref that is 128 wide: {advice}."


def _reshape(match: re.Match[str], failure: _Failure) -> str:
    shapes = failure.vectors or failure.memrefs
    if len(shapes) < 2:
        return "A value cannot be reshaped like this in a TPU kernel: reshape the array outside of the kernel."
    (before, dtype), (after, _) = shapes[0], shapes[-1]
    said = f"A value of shape {before} and type {dtype} cannot be reshaped to {after} in a TPU kernel"
    if dtype not in _FULL_WIDTH:
        return f"{said}: cast it to float32 first, or reshape the array outside of the kernel."
    return (
        f"{said}, where it lies in tiles of 8 x 128: reshape the array outside of the kernel, or store slices of it "
        "one by one."
    )


# --- types -----------------------------------------------------------------------------------------------------------


def _product(match: re.Match[str], failure: _Failure) -> str:
    dtype = (failure.operand_types or [failure.dtype])[0]
    if "contract_precision" in failure.mlir:
        return (
            f"A product of {dtype} is asked for with a precision that only float32 has: leave precision out, or cast "
            "both operands to float32."
        )
    if dtype in ("int8", "int4"):
        return (
            f"A product of {dtype} is asked for in floating point, and a {failure.chip.title} multiplies integers into "
            "integers: give jnp.dot preferred_element_type=jnp.int32, and cast what comes out."
        )
    return (
        f"The MXU of a {failure.chip.title} does not multiply {dtype}: cast both operands to bfloat16 (whole numbers "
        "are exact up to 256) or float32 (up to 16,777,216)."
    )


def _wide(primitive: str, dtype: str) -> str:
    """The type in which an operation exists that a narrow type lacks."""
    if dtype.startswith("uint32"):
        return "int32"
    whole = dtype.startswith(("int", "uint", "bool"))
    # Through int32, the compiler finds the maximum of what was narrow, is narrow again, and narrows it itself.
    return "int32" if whole and primitive not in ("max", "min", "clamp", "abs") else "float32"


def _narrow_type(match: re.Match[str], failure: _Failure) -> str:
    dtype, primitive, chip = failure.dtype, failure.primitive, failure.chip.title
    if dtype in ("", *_FULL_WIDTH):
        return _unforeseen(failure)
    made = re.match(r".*\"arith\.(max|min)", failure.mlir)
    wide = _wide(made[1] if made else primitive, dtype)
    after = {"bool": "and compare with 0 in the end", "uint32": "which is right below 2**31"}.get(dtype)
    after = after or "and cast back what you store"
    if made and primitive not in ("max", "min", "clamp"):
        return (
            f"The compiler makes a `{made[1]}` of {dtype} of this, and a {chip} has none: go through {wide}, "
            f".astype(jnp.{wide}), {after}."
        )
    if primitive == "convert_element_type":
        return f"A {chip} cannot cast {dtype}: cast the array outside of the kernel, to bfloat16 or float32."
    return f"`{primitive}` does not exist for {dtype} on a {chip}: cast first, .astype(jnp.{wide}), {after}."


def _single_number(match: re.Match[str], failure: _Failure) -> str:
    ref = failure.ref or "A ref"
    return (
        f"A single {failure.dtype} is read from {ref}, and only 32-bit numbers leave a vector: cast first, "
        f"{ref}[...].astype(jnp.float32)[i, j], or to jnp.int32."
    )


def _not_legal(match: re.Match[str], failure: _Failure) -> str:
    """'failed to legalize operation': an operation that is missing, for its type, or for single numbers."""
    types = {name for _, name in failure.vectors}
    if not types and failure.primitive:
        return (
            f"`{failure.primitive}` of a single number does not exist on a {failure.chip.title}: make an array of it "
            "first, jnp.full(o_ref.shape, x)."
        )
    return _narrow_type(match, failure)


def _unforeseen(failure: _Failure) -> str:
    message = _message(failure.text)
    if not failure.primitive:
        return f"The TPU compiler refuses {failure.call.name if failure.call else 'this kernel'}: {message}."
    return (
        f"The TPU compiler cannot do `{failure.primitive}` like this ({message}): try other shapes or types, "
        "or do it outside of the kernel."
    )


_REASONS: list[tuple[str, _Sentence]] = [
    (r"Scoped allocation with size ([\d.]+\w?) and limit ([\d.]+\w?)",
     lambda match, failure: over_vmem(failure.call, failure.chip, _bytes(match[1]), _bytes(match[2]))),
    (r"Used [\d.]+\w? of [\d.]+\w? vmem|would exceed memory.*?space=vmem",
     lambda _, failure: over_vmem(failure.call, failure.chip)),
    (r"Used [\d.]+\w? of [\d.]+\w? smem|would exceed memory.*?space=smem", _over_smem),
    (r"cannot statically prove that index in dimension (\d+) is a multiple of (\d+)", _unaligned),
    (r"verify that the (index|size) at dimension (\d+) is divisible by the tile dimension (\d+)", _unaligned_copy),
    (r"not a multiple of the memory space word size|must be divisible by 512 bytes", _narrow_copy),
    (r"last dim size is not 128|Stride on last dim is not 1|Strided (?:store|load) with", _strided),
    (r"unsupported shape cast", _reshape),
    (r"Multiple source vregs along gather",
     "jnp.take_along_axis picks from one register in a TPU kernel, 8 rows or 128 columns: take from slices of that "
     "size, or multiply by a one-hot matrix."),
    (r"Bad lhs|Bad rhs|acc with int lhs|as matmul/accumulator inputs|Unsupported type for matmul", _product),
    (r"Only 32-bit scalar vector.extracts", _single_number),
    (r"Only vector<i16> and vector<i32>|Unsupported element type|Unsupported data type|Unsupported type '|"
     r"Target does not support this comparison|different bitwidths|i1 transpose|Invalid vector register cast|"
     r"Invalid input layout", _narrow_type),
    (r"failed to legalize operation '([\w.]+)'", _not_legal),
]  # fmt: skip
