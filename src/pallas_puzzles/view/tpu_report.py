"""What a TPU would make of a kernel, on a machine without one: does it compile, what does it cost, what bounds it."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import Beyond, Call, capture, describe, name_of_call, on_chip
from ..ir.modes import axes_of as own_axes
from ..ir.modes import on_mesh
from ..ir.ops import in_avals, is_key, np_dtype, out_avals, to_keys
from ..ir.program import calls_in
from ..lens.machine import SURELY, Figures, figures, listed, run_call
from ..lens.survey import survey
from ..lens.tally import Tally, tally
from ..targets.tpu import compiler, schedule
from ..targets.tpu.chips import CHIPS, STEP_OVERHEAD_S, Chip, chip
from ..targets.tpu.explain import explain, explain_abort, over_vmem
from ..targets.tpu.lowering import Refusal, exported, for_tpu, refusal_on
from .draw import name_of
from .report import matched
from .tpu_picture import KernelReport, Report

_SIMULATED_CYCLES = 1_500_000  # more than this takes libtpu's simulator a quarter of a minute
_FAR_TOO_LARGE = 1.5  # times the limit
_FOLLOWED_FLOPS = 5e9
_DRAWN_BYTES = 256 << 20  # inputs up to this size are drawn, larger ones only described


def tpu_report(
    fn: Callable[..., Any],
    *args: Any,
    tpu: str = "v5e",
    simulate: bool = True,
    unwritten: Sequence[str] = (),
    **blocks: Any,
) -> Report:
    """Compiles `fn(*args, **blocks)` for a TPU that need not be there, and reads what the compiler made of it.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs; where a kernel is steered by prefetched
    scalars, bytes and steps are known only from real values. tpu: "v5e", "v6e" or "tpu7x" (one of its two cores). The
    mesh of a jax.shard_map is made of as many of these chips. simulate: ask libtpu's simulator for cycles, too.
    unwritten: parts of fn that the reader has still to write; then nothing is compiled. blocks: static keyword
    arguments of fn. Never raises for a kernel that does not compile: see Report.refusal.
    Raises ValueError for a TPU that is not known.

    The estimate is max(FLOPs of matrix products / MXU peak, bundles / clock, HBM bytes / bandwidth - fill) + fill +
    steps * 0.25 us. Copies and arithmetic overlap, but for the fill: the first blocks have to arrive before anything
    starts, and the last ones to leave. The 0.25 us for each step are what the v5e times of JAX's matmul guide
    (docs.jax.dev/en/latest/pallas/tpu/matmul.html) leave unexplained; with them, and with the guide's own cost of a
    launch taken off, the estimate is within 10% of all six of its Pallas times, for 1024^3 to 8192^3 and tiles of 128
    and of 512 x 1024 x 1024. That is all that it was compared with: matrix products, on v5e. It leaves out what a
    launch costs (some 0.1 ms from Python, microseconds inside a jitted program), copies that a kernel makes itself, and
    how much slower short or strided copies are. Trust it to compare two versions of a kernel and to say what bounds
    them, less for its absolute value, and least for kernels of a few microseconds.
    """
    target = chip(tpu)
    report = Report(target, name_of(fn))
    if unwritten:
        return report.without(unwritten)
    axes: dict[str, int] = {}
    call = functools.partial(fn, **blocks) if blocks else fn
    try:
        values, twins = _values(args)
    except TypeError as error:  # a string, an object
        words = f"An argument is no array: {error} Give arrays, Inputs or ShapeDtypeStructs, and all else by keyword."
        report.refusal = Refusal(words, "", None)
        return report
    with contextlib.suppress(Exception), on_chip(target.kind):  # what is wrong with fn is said below
        if own := own_axes(call, values):
            call, axes = on_mesh(call, values, target.mesh(own)), own
    target_mesh = target.mesh(axes)
    placed = jax.sharding.NamedSharding(target_mesh, jax.sharding.PartitionSpec()) if axes else None
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=placed), values)
    if compiler.missing() is None:
        compiler.warm(simulator=simulate and not axes)
    if (refusal := refusal_on(target_mesh, call, shapes)) is not None:
        if "SparseCore" in refusal.sentence and target.info.sparse_core is None:
            others = [f'tpu="{each.name}"' for each in CHIPS.values() if each.info.sparse_core is not None]
            words = f"A {target.title} has no SparseCores, and this kernel runs on them: ask for {' or '.join(others)}."
            refusal = Refusal(words, refusal.sentence, refusal.line)
        report.refusal = refusal
        return report
    with on_chip(target.kind):
        works, missed = _works(call, values, twins, shapes, target_mesh)
    if missed:
        report.notes.append(f"{missed} could not be followed: nothing is known of it but what the compiler says")
    report.refusal = _too_large(works, target)
    report.unavailable = "" if report.refusal is not None else compiler.missing() or ""
    if report:
        _compile(report, call, shapes, works, missed, axes, simulate)
    return report


# --- what goes in ----------------------------------------------------------------------------------------------------


def _values(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments as arrays, twice: what is only a shape is zeros in the one and ones in the other, without memory.

    What comes out the same in both does not depend on values that nobody gave.
    """
    rng = np.random.default_rng(0)
    random = [x for arg in args for x in jax.tree.leaves(arg) if hasattr(x, "draw")]
    drawn = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in random) <= _DRAWN_BYTES

    def value(x: Any) -> Any:
        if hasattr(x, "draw"):
            if drawn or np.issubdtype(np.dtype(x.dtype), np.integer):
                return x.draw(rng)
        elif isinstance(x, (np.ndarray, jax.Array)):
            return x if is_key(x) else np.asarray(x)
        elif not isinstance(x, jax.ShapeDtypeStruct):
            return np.asarray(jax.numpy.asarray(x))
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def filled(x: Any, number: int) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if is_key(x):
            return to_keys(np.full(x.shape, number, np_dtype(x)), x)
        return np.broadcast_to(np.full((), number, x.dtype), x.shape)

    given = jax.tree.map(value, tuple(args))
    return jax.tree.map(lambda x: filled(x, 0), given), jax.tree.map(lambda x: filled(x, 1), given)


# --- what the program does -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Work:
    """One pallas_call equation: what it costs, how often it runs. known: its scalars and bounds are the real ones.

    twin: the same call with other values in place of those that nobody gave.
    """

    call: Call
    costs: Figures
    tally: Tally
    known: bool
    results: tuple[str, ...]
    operands: tuple[str, ...]
    runs: int
    twin: Call


def _works(
    fn: Callable[..., Any], values: Sequence[Any], twins: Sequence[Any], shapes: Sequence[Any], mesh: Any
) -> tuple[list[_Work], str]:
    """(the pallas_calls that the function reaches, what is left out of them, in words)."""
    with contextlib.suppress(Exception):  # whatever a kernel has that nobody has seen before
        seen = _seen(fn, values)
        steered = any(call.scalar_names or call.dynamic_bounds or _steers_itself(call) for call, _, _ in seen)
        other = _seen(fn, twins) if steered else seen
        works = [
            _work(call, eqn, _steered_alike(call, twin), runs, twin)
            for (call, eqn, runs), (twin, _, _) in zip(seen, other, strict=True)
        ]
        if works:
            return works, ""
    with for_tpu(mesh):  # what cannot be followed with values, such as several devices, is read as it stands
        traced = jax.jit(lambda *a: fn(*a)).trace(*shapes)
    works, missed = [], []
    for eqn in calls_in(traced.jaxpr):
        try:
            call = describe(eqn)
            call.scalars = [np.zeros(aval.shape, aval.dtype) for aval in call.scalar_avals]
            works.append(_work(call, eqn, known=not call.dynamic_bounds and not call.scalars))
        except Exception:
            missed.append(name_of_call(eqn))
    return works, listed(list(dict.fromkeys(missed)))


def _seen(fn: Callable[..., Any], values: Sequence[Any]) -> list[tuple[Call, Any, int]]:
    """(call, its equation, how often it runs) of every pallas_call equation that the function reaches."""
    found: dict[int, list[Any]] = {}

    def on_call(call: Call, eqn: Any, _: list[Any]) -> list[Any]:
        found.setdefault(id(eqn), [call, eqn, 0])[2] += 1  # the equation is kept, so that its id stays its own
        return [np.broadcast_to(np.zeros((), o.dtype), o.shape) for o in call.outs]

    capture(fn, *values, on_call=on_call)
    return [(call, eqn, runs) for call, eqn, runs in found.values()]


def _steers_itself(call: Call) -> bool:
    """Whether numbers in memory may say which blocks a kernel copies by itself."""
    return any(o.in_hbm for o in call.operands) and any(o.space == "smem" for o in call.ins)


def _steered_alike(call: Call, twin: Call) -> bool:
    """Do grid and prefetched scalars stay the same whatever the inputs hold?"""
    same = all(np.array_equal(a, b) for a, b in zip(call.scalars, twin.scalars, strict=True))
    return same and call.grid == twin.grid


def _work(call: Call, eqn: Any, known: bool, runs: int = 1, twin: Call | None = None) -> _Work:
    counted = tally(call, scalars_known=known)
    own_blocks = survey(call, dataclasses.replace(counted, pipelines=[]), 0, 1)
    return _Work(
        call=call,
        costs=figures(own_blocks),
        tally=counted,
        known=known,
        results=tuple(map(_hlo_type, out_avals(eqn))),
        operands=tuple(map(_hlo_type, in_avals(eqn))),
        runs=runs,
        twin=twin or call,
    )


_HLO_TYPES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}


def _hlo_type(aval: Any) -> str:
    name = str(getattr(aval, "dtype", ""))
    kind, bits = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    hlo = "pred" if name == "bool" else _HLO_TYPES[kind] + bits if kind in _HLO_TYPES else name.replace("float", "f")
    return f"{hlo}[{','.join(map(str, aval.shape))}]"


# --- before compiling ------------------------------------------------------------------------------------------------


def _too_large(works: Sequence[_Work], target: Chip) -> Refusal | None:
    """Buffers that are far too large, by arithmetic: the compiler takes up to a minute to say the same.

    What is only somewhat too large is left to the compiler, which may find room elsewhere in VMEM.
    """
    for work in works:
        asked = work.call.vmem_limit_bytes
        limit = min(asked or target.scoped_vmem_bytes, target.vmem_bytes)
        needed = sum(s.nbytes for s in work.call.scratch if s.space == "vmem") + work.costs.temporary_bytes // SURELY
        needed += max((p.costs.vmem_bytes for p in work.tally.pipelines if p.costs is not None), default=0)
        needed += sum(
            row.vmem_bytes // (1 if work.costs.steps != 1 else row.buffers or 1) for row in work.costs.operands
        )
        if needed > _FAR_TOO_LARGE * limit:
            told = (needed, limit) if limit < target.vmem_bytes else ()
            words, line = over_vmem(work.call, target, *told)
            return Refusal(words, "", line or work.call.where)
    return None


# --- compiling -------------------------------------------------------------------------------------------------------


def _compile(
    report: Report,
    fn: Callable[..., Any],
    shapes: Sequence[Any],
    works: list[_Work],
    missed: str,
    axes: Mapping[str, int],
    simulate: bool,
) -> None:
    target, calls = report.chip, [work.call for work in works]
    with for_tpu(target.mesh(axes)):
        try:
            program = exported(fn, shapes)
        except Exception as error:
            report.refusal = explain(str(error), calls, target)
            return
    options: dict[str, str] = {}
    try:
        compiled = compiler.compile_program(program, target, axes)
        if compiled.operands_in_vmem:  # then the step's copies are not those that a larger array would see
            with contextlib.suppress(compiler.CompilerError):
                again = compiler.nothing_in_vmem(target)
                compiled = compiler.compile_program(program, target, axes, options=again)
                options = again
    except compiler.CompilerError as error:
        report.refusal = explain(str(error), calls, target)
        return
    except compiler.CompilerDied as error:
        report.refusal = explain_abort(str(error), calls)
        if report.refusal is None:
            report.unavailable = f"{error}; the next report starts it afresh"
        return
    report.copies = compiled.copies
    if not works and not missed:
        report.notes.append("the function reaches no pallas_call")
    if sparse := [call.name for call in calls if call.sparse]:
        words = "runs" if len(sparse) == 1 else "run"
        report.notes.append(f"{listed(sparse)} {words} on SparseCores, of which the compiler shows no schedule")
    works = [work for work in works if not work.call.sparse]
    for kernel, work in matched(compiled.kernels, works, ("results", "operands"), ("results",), ()):
        if work is None:
            continue  # a second copy of a kernel that stands once in the source
        try:
            report.kernels.append(_kernel_report(compiled, kernel, work, target))
        except Exception as error:
            report.notes.append(f"{work.call.name} compiles, but its report cannot be read: {error}")
    if missing := len(works) - len(report.kernels):
        report.notes.append(f"{missing} of {len(works)} kernels are not in the compiled program, or look the same")
    _simulate(report, program, axes, options, simulate)


def _kernel_report(compiled: compiler.Compiled, kernel: compiler.Kernel, work: _Work, target: Chip) -> KernelReport:
    call, counts = work.call, work.tally
    notes = []
    program = compiled.of(kernel.name, r"final_bundles\.txt")
    slots = compiled.of(kernel.name, r"final_hlo-static-per-bundle-utilization\.txt")
    if program is None or slots is None:
        raise ValueError(f"the compiler left no dump of {kernel.name}: its format has changed")
    steps = work.costs.steps if work.known or not call.dynamic_bounds else None
    plan = schedule.read(program, slots, looped=steps is None or steps > 1, trips=counts.trips)
    if any(loop.trips is None for loop in plan.inner):
        notes.append("a loop of a length known only at run time is counted once")
    if plan.operands_in_vmem:
        notes.append(f"XLA moves {plan.operands_in_vmem} of the arrays into VMEM before the kernel starts")
    least, mean, most = _step_bundles(plan, counts, steps)
    if mean is None:
        notes.append("the compiler's branches do not match those of the kernel: the longest step is taken for all")
        mean = float(most)
    hbm_bytes, exact = _hbm_bytes(work, notes)
    mxu_s = sum(flops / target.flops_per_s(dtype) for dtype, flops in counts.mxu_flops.items())
    limit = call.vmem_limit_bytes or target.scoped_vmem_bytes
    if limit > target.vmem_bytes:
        notes.append("vmem_limit_bytes is more than the chip has")
    found = KernelReport(
        name=call.name,
        hlo_name=kernel.name,
        where=call.where,
        grid=call.grid,
        dynamic=call.dynamic_bounds > 0,
        steered=bool(call.scalar_names),
        steps=steps,
        runs=work.runs,
        buffers=_buffers(compiled, kernel, work),
        vmem_limit_bytes=limit,
        spills=plan.spills,
        fills=plan.fills,
        bundles=plan.bundles,
        least_step=least,
        mean_step=mean,
        most_step=most,
        slots=plan.slot_use(),
        mxu_cycles=mxu_s * target.clock_hz / max(1, work.costs.steps),
        mxu_dtype=max(counts.mxu_flops, key=lambda dtype: counts.mxu_flops[dtype], default=None),
        flops=counts.flops + counts.transcendentals,
        hbm_bytes=hbm_bytes,
        hbm_exact=exact,
        notes=notes,
    )
    if steps is not None:
        overhead_s = (steps + sum(p.steps for p in counts.pipelines)) * STEP_OVERHEAD_S
        found.times = {"MXU": mxu_s, "bundles": steps * mean / target.clock_hz, "steps": overhead_s}
        if hbm_bytes is not None:
            found.times["HBM"] = hbm_bytes / target.hbm_bytes_per_s
        if counts.copies:
            notes.append("the kernel starts copies of its own; how far they overlap is not known: no time is estimated")
        elif hbm_bytes is not None:
            # the first blocks in and the last blocks out, which nothing overlaps with
            ends: list[float] = [min(row.operand.block_bytes, row.hbm_bytes) for row in work.costs.operands]
            ends += [p.runs * o.block_bytes for p in counts.pipelines for o in p.call.operands if not o.in_hbm]
            found.time_s = _estimate(found.times, min(sum(ends), hbm_bytes) / target.hbm_bytes_per_s)
    return found


def _estimate(times: Mapping[str, float], fill_s: float) -> float:
    overlapped = max(times["MXU"], times["bundles"], times["HBM"] - fill_s)
    return overlapped + fill_s + times["steps"]


def _step_bundles(plan: schedule.Schedule, counts: Tally, steps: int | None) -> tuple[int, float | None, int]:
    """(least, mean, most) bundles of a step; mean None when branches of program and kernel cannot be matched."""
    skips = [skip for skip in plan.skips if not skip.copies]
    branches = counts.branches
    if len(skips) < len(branches):  # the compiler runs short bodies under a mask, without a branch
        shortest = sorted(range(len(branches)), key=lambda i: branches[i].elements)[: len(branches) - len(skips)]
        branches = [branch for i, branch in enumerate(branches) if i not in shortest]
    if len(skips) != len(branches) or not steps:
        return plan.shortest_step, None if skips else float(plan.longest_step), plan.longest_step
    bounds, n = [], max((len(b.taken) for b in branches if b.taken is not None), default=1)  # 1: steps told not apart
    for unknown in (0.0, 1.0):
        shares = iter(branches)
        taken = []
        for skip in plan.skips:
            branch = None if skip.copies else next(shares)
            share = np.ones(n) if branch is None else branch.taken
            taken.append(np.full(n, unknown) if share is None else np.broadcast_to(share, n))
        bounds.append(plan.step_lengths(taken))
    return round(float(bounds[0].min())), float(bounds[1].mean()), round(float(bounds[1].max()))


def _hbm_bytes(work: _Work, notes: list[str]) -> tuple[int | None, bool]:
    """(bytes between HBM and VMEM, is that exact)."""
    call = work.call
    pipelines = work.tally.pipelines
    if not work.costs.exact:
        notes.append("the grid is too long for its copies to be counted: their bytes are estimated")
    if pipelines and work.known and not work.tally.copies and all(p.costs is not None for p in pipelines):
        return work.costs.hbm_bytes + round(sum(p.costs.hbm_bytes * p.runs for p in pipelines if p.costs)), True
    if work.tally.copies or any(o.in_hbm for o in call.operands):
        dma = _followed(work) if work.known else None
        if dma is None:
            notes.append("the bytes of its own copies could not be counted")
            return None, False
        return dma, True
    if call.dynamic_bounds and not work.known:
        notes.append("the grid is known only at run time: give arrays instead of shapes")
        return None, False
    if not work.known and call.scalar_names:
        n = work.costs.steps
        notes.append("prefetched scalars choose the blocks: give arrays instead of shapes to count the bytes")
        return sum(n * o.block_bytes for o in call.operands if o.space == "vmem"), False
    return work.costs.hbm_bytes, True


def _followed(work: _Work) -> int | None:
    """Bytes of a kernel with copies of its own, by running it in the lens where that is quick."""
    if len(work.call.inputs) != len(work.call.ins) or work.tally.flops > _FOLLOWED_FLOPS or work.costs.steps > 4096:
        return None
    with contextlib.suppress(Beyond):
        found = figures(run_call(work.call)).hbm_bytes
        if not _steers_itself(work.call) or figures(run_call(work.twin)).hbm_bytes == found:
            return found
    return None


def _buffers(compiled: compiler.Compiled, kernel: compiler.Kernel, work: _Work) -> dict[str, int]:
    """Name of the Ref -> bytes of VMEM, all its copies, by the compiler's own account."""
    call = work.call
    text = next((t for name, t in compiled.files.items() if name.endswith("vmem_report.html")), None)
    if text is None:
        return {}
    before = len(call.scalar_names)
    scratch = iter([s.name for s in call.scratch if s.space == "vmem"])
    found: dict[str, int] = {}
    for buffer in schedule.vmem_buffers(text, kernel.name):
        name = buffer.name
        if buffer.window is not None:
            role, number = buffer.window
            refs, place = (call.ins, number - before) if role == "input" else (call.outs, number)
            name = refs[place].name if 0 <= place < len(refs) else name
        elif name == "scratch operand":
            name = next(scratch, name)
        elif name == "SPILL":
            name = "(spilled registers)"
        found[name] = found.get(name, 0) + buffer.nbytes
    return found


def _simulate(
    report: Report, program: bytes, axes: Mapping[str, int], options: Mapping[str, str], wanted: bool
) -> None:
    """Fills in the cycles, or says why there are none."""
    expected = sum((k.steps or 1) * k.mean_step for k in report.kernels)
    reasons = {
        "not asked for": not wanted,
        "libtpu's simulator follows one device only": bool(axes),
        "libtpu's simulator does not know a grid that is set at run time": any(k.dynamic for k in report.kernels),
        f"left out: libtpu's simulator takes some 15 s a million cycles, and these are {expected:.2g}": (
            expected > _SIMULATED_CYCLES
        ),
    }
    report.simulator = next((why for why, holds in reasons.items() if holds), "")
    if report.simulator:
        return
    try:
        cycles = compiler.simulate_cycles(program, report.chip, options)
    except (compiler.CompilerError, compiler.CompilerDied):
        report.simulator = "libtpu's simulator gave up on this program"
        return
    for kernel in report.kernels:
        kernel.cycles = cycles.get(kernel.hlo_name) or None
        if kernel.cycles and kernel.steered:
            kernel.notes.append("the simulator does not know the prefetched scalars: its cycles are a guess")
