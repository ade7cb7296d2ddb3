"""A function -> a program for the GPU compiler, by the Pallas front end, on any machine; or why it takes it not.

JAX's messages are not public API. The patterns here were seen on jax 0.11.2 and 0.12.0.1; a message that none of them
knows is passed on as it is.
"""

import dataclasses
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ...diagnose.errors import explain_error, readers_frame
from ...ir.capture import SourceLine, is_readers_file, source_line
from ...ir.program import calls_in, inside
from ...lens.watchdog import TimeLimit, time_limit
from ..simulate import raised_in_jax
from ..tpu.lowering import Refusal
from .chips import SMEM_PER_CTA, Chip

FRONT_END_LIMIT_S = 4.0  # right kernels take 0.02 to 0.3 s
NO_LAYOUT = (
    "Pallas finds no layout for the arrays of this kernel: which thread holds which element. Name one where a tile is "
    "loaded, plgpu.load(ref, layout=plgpu.Layout.WGMMA), or with plgpu.layout_cast."
)
_SM_COUNT = (
    "The function asks jax.devices() how many SMs there are, and no GPU is here. "
    "Ask jax.sharding.get_abstract_mesh().abstract_device.num_cores, or pass the number."
)
_NO_THIN_LAYOUT = (
    "No layout has an array of shape {0}, and this kernel computes with one. Compute with the {1} numbers, without "
    "keepdims=True, and widen last, where they meet the tile: x * s[{2}]."
)


def exported(fn: Callable[..., Any], shapes: Sequence[Any], chip: Chip) -> tuple[Any, Any]:
    """(the traced program or None, what it is for the compiler, of jax.export, or the Refusal of the front end)."""
    from jax import export

    return _taken(fn, shapes, chip, lambda flat, _: export.export(flat, platforms=["cuda"])(*shapes))


def refusal(fn: Callable[..., Any], *args: Any, chip: Chip) -> Refusal | None:
    """Why the front end does not take a function for a chip, or None. args: arrays, or pytrees of them."""
    return _taken(fn, args, chip, _lowered_in_time)[1]


def _taken(fn: Callable[..., Any], args: Sequence[Any], chip: Chip, lower: Callable[..., Any]) -> tuple[Any, Any]:
    """(the traced program or None, what `lower` makes of it, or the Refusal of the front end)."""
    program = None
    with jax.sharding.use_abstract_mesh(chip.mesh()), warnings.catch_warnings(action="ignore"):
        try:
            flat = jax.jit(lambda *a: jax.tree.leaves(fn(*a)))
            traced = flat.trace(*args)
            program = traced.jaxpr
            return program, lower(flat, traced)
        except Exception as error:
            return program, _placed(_explain(error), program)


def _lowered_in_time(flat: Any, traced: Any) -> Refusal | None:
    """None where the front end takes what was traced. Only its search for layouts takes long: it tries them in turn."""
    for patience in (1, 4, 16):  # on a machine that is busy with other work
        started = time.thread_time()
        try:
            with time_limit(patience * FRONT_END_LIMIT_S, "the front end"):
                traced.lower(lowering_platforms=("cuda",))
            return None
        except TimeLimit:
            if time.thread_time() - started > FRONT_END_LIMIT_S / 2 or any(_computed_thin(traced.jaxpr)):
                return _placed(Refusal(NO_LAYOUT, "", None), traced.jaxpr)
    return None


def _placed(refused: Refusal, program: Any) -> Refusal:
    """A refusal with the reader's line, as far as the program shows it. program: None where tracing has failed."""
    if program is None:
        return refused
    if refused.sentence == NO_LAYOUT and (thin := next(_computed_thin(program), None)):
        shape, line = thin
        numbers = tuple(size for size in shape if size != 1)
        index = ", ".join("None" if size == 1 else ":" for size in shape)
        return Refusal(_NO_THIN_LAYOUT.format(shape, numbers, index), refused.detail, line)
    return dataclasses.replace(refused, line=refused.line or _line_in(program, refused.detail or refused.sentence))


def _computed_thin(program: Any) -> Iterator[tuple[tuple[int, ...], SourceLine | None]]:
    """(shape, line) of what is computed of arrays that were widened by an axis of 1 before: s[:, None] / 2."""
    thin: set[tuple[int, ...]] = set()
    for eqn, line in inside(calls_in(program)):
        inputs = [_shape(v) for v in eqn.invars]
        for shape in map(_shape, eqn.outvars):
            if eqn.primitive.name in ("broadcast_in_dim", "reshape"):
                thin |= {shape} if 1 in shape and 0 < len(inputs[0]) < len(shape) else set()
            elif shape in thin and shape in inputs:
                yield shape, line


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _line_in(program: Any, text: str) -> SourceLine | None:
    """The reader's line with the primitive that a message names; where it names none, that of the kernel.

    A layout is missing where an array of several dimensions is reduced along one of them.
    """
    named = re.search(r"Unimplemented primitive in Pallas Mosaic GPU lowering: (\w+)", text)
    found = [*inside(calls_in(program))]
    at_fault = [line for eqn, line in found if named and eqn.primitive.name == named[1] and line]
    if re.search("layout", text, re.I):
        at_fault += [line for eqn, line in found if eqn.primitive.name.startswith("reduce_") and line]
    anywhere = [line for _, line in found if line and not named]
    return next(iter([*at_fault, *anywhere]), None)


# --- reasons ---------------------------------------------------------------------------------------------------------

_REASONS = [
    (r"available shared memory: smem_bytes=(\d+) > max_smem_bytes=(\d+)",
     "The kernel asks for {0} bytes of SMEM; a CTA has {1}. Use smaller blocks, or fewer steps at once."),
    (r"accumulator's first dimension must be a multiple of 64, but got (\d+)",
     "wgmma makes 64 rows at a time, and the accumulator has {0}. Use a multiple of 64."),
    (r"Async copies only support copying <=256 elements along each dimension",
     "A TMA copy takes at most 256 elements along each dimension. Copy a larger block in parts."),
    (r"[Ss]wizzle (\d+) requires the trailing dimension to be of size (\d+)",
     "With a swizzle of {0} bytes the last dimension of a tile has {1} elements. Use TilingTransform((8, {1}))."),
    (r"no optimized SMEM <-> registers transfer plan .* register layout (\w+) and ref with transforms \((.*?),?\)$",
     "Threads cannot reach this SMEM without bank conflicts: the layout {0} of the value does not fit "
     "transforms=({1}). Use (plgpu.TilingTransform((8, n)), plgpu.SwizzleTransform(128)), where n elements are "
     "128 bytes."),
    (r"Failed to infer a possible set of layouts|Layout inference failed|remaining unsatisfied constraints",
     NO_LAYOUT),
    (r"(?:object|Device)'? (?:has no attribute|.*)'?core_count", _SM_COUNT),
    (r"Unimplemented primitive in Pallas Mosaic GPU lowering: (\w+)", "Pallas cannot compile `{0}` for a GPU."),
]  # fmt: skip


def _explain(error: Exception) -> Refusal:
    text = str(error).strip() or _last_frame(error)
    known = _sentence(text)
    if known is None and isinstance(error, AttributeError) and "core_count" in _last_frame(error):
        known = _SM_COUNT
    if known is not None:
        return Refusal(known, _first_line(text), _readers_line(error))
    if isinstance(error, AssertionError):
        words = f"Mosaic GPU cannot compile this: an assertion fails in it ({_last_frame(error)})."
        return Refusal(words, "", _readers_line(error))
    if isinstance(error, NotImplementedError | ValueError) or raised_in_jax(error):
        return Refusal(_first_line(text), "", _readers_line(error))
    finding = explain_error(error)
    return Refusal(finding.cause, "; ".join(finding.evidence), finding.line or _readers_line(error))


def refused(text: str, chip: Chip) -> Refusal:
    """What XLA, Mosaic GPU or ptxas say when they refuse a program."""
    at, detail = re.search(r"\nat (/\S+):(\d+)$", text), _first_line(text)
    line = source_line(at[1], int(at[2])) if at else None
    if match := re.search(r"uses too much shared data \((0x[0-9a-f]+|\d+) bytes", text):
        words = f"The kernel asks for {int(match[1], 0)} bytes of SMEM; a CTA of a {chip.title} has {SMEM_PER_CTA}."
        return Refusal(f"{words} Use smaller blocks.", detail, line)
    if absent := re.search(r"Instruction '(\w+)[^']*' not supported|Cannot select: intrinsic %llvm\.nvvm\.(\w+)", text):
        family = (absent[1] or absent[2]).partition("_")[0]
        words = f"The {chip.title} has no `{family}`: this kernel is written for another generation of GPUs."
        return Refusal(words, detail, line)
    return Refusal(_sentence(text) or f"The GPU compiler refuses the program: {detail}", "", line)


def refused_by_abort(text: str, chip: Chip) -> Refusal | None:
    """What the compiler's last words say of the program; None where they say nothing of it."""
    return refused(text, chip) if "Cannot select" in text else None


def _sentence(text: str) -> str | None:
    for pattern, words in _REASONS:
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason is given")


def _last_frame(error: BaseException) -> str:
    """The statement of JAX's that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def _readers_line(error: BaseException) -> SourceLine | None:
    """The reader's line at fault: the one that JAX names, or the innermost one on the way."""
    cause: BaseException | None = error
    while cause is not None:
        # a lowering error says in which line of the kernel the operation stands
        for note in [str(cause), *getattr(cause, "__notes__", [])]:
            for file, line in re.findall(r'(?:File "|at )?(/[^\s":]+\.py)(?:", line |:)(\d+)', note):
                if is_readers_file(file):
                    return source_line(file, int(line))
        cause = cause.__cause__
    return readers_frame(error)
