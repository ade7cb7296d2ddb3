"""What a GPU would make of a kernel, on a machine without one: does it compile, what does it cost, what bounds it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import is_pallas_call, line_of, source_line
from ..ir.program import calls_in
from ..targets.gpu import compiler, lowering, sass, work
from ..targets.gpu.chips import LAUNCH_S, REACHED, Chip, occupancy
from ..targets.gpu.chips import chip as named
from ..targets.tpu.lowering import Refusal
from .draw import name_of
from .gpu_picture import KernelReport, Line, Report
from .report import matched

_MUFU_CYCLES = 8  # of a scheduler for a warp's instruction: 16 results a cycle in an SM


def gpu_report(
    fn: Callable[..., Any],
    *args: Any,
    chip: str = "h100",
    unwritten: Sequence[str] = (),
    **blocks: Any,
) -> Report:
    """Compiles `fn(*args, **blocks)` for a GPU that need not be there, and reads what the compiler made of it.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs; where integers in an array say what a
    kernel does, give the array. chip: "h100", "h200" or "b200". unwritten: parts of fn that the reader has still to
    write; then nothing is compiled. blocks: static keyword arguments of fn. Never raises for a kernel that does not
    compile: see Report.refusal. Raises ValueError for a GPU that is not known.

    The estimate is max(tensor / 0.72, HBM / 0.88, L2, instructions, MUFU) + 3 us. tensor: FLOPs of matrix products on
    the busiest SM, at the datasheet's dense peak. HBM: each array that is touched, once, at the datasheet's bandwidth.
    L2: all bytes between L2 and the SMs, at 39 bytes a cycle and SM. instructions: those that the busiest SM
    issues, one a cycle on each of its four schedulers: SASS instructions of a line, times how often the line runs.
    MUFU: the same for special functions, eight cycles each. 0.72, 0.88 and 39 are what cuBLAS, a copy and a kernel that
    only reads reach on an H200. The estimate takes it that all of this overlaps; a kernel that waits for its copies, or
    does arithmetic between its matrix products, takes longer. On an H200 it was 0.91 to 1.20 times the measured time of
    16 kernels (benchmarks/gpu.md): matrix products, attention, a ragged dot, softmax; of the solutions of gpu_basics it
    was 0.66 to 1.02 times (docs/bench.md). No B200 was measured.
    """
    target = named(chip)
    report = Report(target, name_of(fn))
    if unwritten:
        return report.without(unwritten)
    given, shapes = _given(args)
    if compiler.missing() is None:
        compiler.warm(target)
    program, exported = lowering.exported(lambda *a: fn(*a, **blocks), shapes, target)
    kernels = list(calls_in(program)) if program is not None else []
    if made_for_tpus := [eqn for eqn in kernels if is_pallas_call(eqn)]:
        words = "The GPU compiler takes kernels written with plgpu.kernel; this one is a pl.pallas_call, for TPUs."
        report.refusal = Refusal(words, "", line_of(made_for_tpus[0]))
        return report
    if isinstance(exported, Refusal):
        report.refusal = exported
        return report
    report.unavailable = compiler.missing() or ""
    if report.unavailable:
        return report
    try:
        compiled = compiler.compile_program(bytes(exported.serialize()), target)
    except compiler.CompilerError as error:
        report.refusal = lowering.refused(str(error), target)
        return report
    except compiler.CompilerDied as error:
        report.refusal = lowering.refused_by_abort(str(error), target)
        if report.refusal is None:
            report.unavailable = f"{error}; the next report starts it afresh"
        return report
    report.fusions = compiled.fusions
    with jax.sharding.use_abstract_mesh(target.mesh()):
        works = work.calls(program, jax.tree.leaves(given))
    if not compiled.kernels:
        report.notes.append("the function reaches no plgpu.kernel")
    for kernel, call in matched(compiled.kernels, works, ("ctas", "name"), ("ctas",)):
        report.kernels.append(_kernel_report(kernel, call, target))
    return report


def _given(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(the arguments, integers as arrays and all else as shapes; all of them as shapes)."""
    rng = np.random.default_rng(0)

    def value(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if not hasattr(x, "dtype"):
            x = np.asarray(x)
        if not np.issubdtype(np.dtype(x.dtype), np.integer):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x.draw(rng) if hasattr(x, "draw") else np.asarray(x)

    given = jax.tree.map(value, tuple(args))
    return given, jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), given)


def _kernel_report(kernel: compiler.Kernel, call: work.Call | None, target: Chip) -> KernelReport:
    fits = occupancy(kernel.registers, kernel.threads, kernel.smem_bytes, kernel.tmem_columns)
    x, y, z = kernel.cluster
    found = KernelReport(
        name=kernel.name,
        where=call.where if call else None,
        grid=call.grid if call else dict(zip("xyz", kernel.grid, strict=True)),
        ctas=kernel.ctas,
        cluster=x * y * z,
        threads=kernel.threads,
        registers=kernel.registers,
        spill_store_bytes=kernel.spill_store_bytes,
        spill_load_bytes=kernel.spill_load_bytes,
        smem_bytes=kernel.smem_bytes,
        tmem_columns=kernel.tmem_columns,
        occupancy=fits,
        waves=kernel.ctas / (target.sms * max(1, fits.ctas)),
        kinds=sass.count(i.kind for i in kernel.instructions),
        opcodes=sass.count(i.name for i in kernel.instructions),
        lines=_lines(kernel, call, call.mean if call else None),
        warnings=[(words, source_line(*at) if at else None) for words, at in kernel.warnings],
        notes=list(call.notes) if call else ["which call this is could not be told: no time is estimated"],
    )
    if call is not None and call.mean is not None and call.most is not None:
        _estimate(found, kernel, call, call.mean, call.most, target)
    return found


def _lines(kernel: compiler.Kernel, call: work.Call | None, its: work.Work | None) -> list[Line]:
    by_place: dict[Any, list[sass.Instruction]] = {}
    for instruction in kernel.instructions:
        by_place.setdefault(instruction.where, []).append(instruction)
    runs: Mapping[Any, float] = call.lines(by_place.__contains__, its) if call and its else {}
    lines = []
    for at, instructions in by_place.items():
        once: dict[str, float] = {}
        for each in instructions:
            once[each.name] = once.get(each.name, 0) + 1 / each.copies
        opcodes = sass.count(each.name for each in instructions)
        lines.append(Line(source_line(*at) if at else None, opcodes, once, runs.get(at)))
    return sorted(lines, key=lambda line: -line.cycles)


def _estimate(
    found: KernelReport, kernel: compiler.Kernel, call: work.Call, mean: work.Work, most: work.Work, target: Chip
) -> None:
    turns = -(-kernel.ctas // target.sms)  # CTAs that the busiest SM runs
    busiest = most if turns == 1 else mean
    lines = _lines(kernel, call, busiest)
    issued = turns * sum(line.cycles for line in lines)
    special = turns * sum(line.once.get("MUFU", 0) * (line.runs or 0.0) for line in lines)
    moved = {i: kernel.ctas * (mean.loaded[i] + mean.stored[i]) for i in {*mean.loaded, *mean.stored}}
    tensor_s = sum(flops / target.flops_per_s(dtype) for dtype, flops in busiest.tensor_flops.items())
    products = mean.tensor_flops
    found.mxu_dtype = max(products, key=lambda dtype: products[dtype], default=None)
    found.flops = kernel.ctas * (sum(products.values()) + mean.flops + mean.specials)
    found.gmem_bytes = sum(moved.values())
    found.hbm_bytes = sum(min(nbytes, call.sizes[i]) for i, nbytes in moved.items())
    found.times = {
        "tensor": turns * target.sms * tensor_s,
        "instructions": issued / target.clock_hz,
        "MUFU": special * _MUFU_CYCLES / target.clock_hz,
        "L2": found.gmem_bytes / target.l2_bytes_per_s,
        "HBM": found.hbm_bytes / target.hbm_bytes_per_s,
    }
    found.time_s = max(seconds / REACHED.get(name, 1) for name, seconds in found.times.items()) + LAUNCH_S
