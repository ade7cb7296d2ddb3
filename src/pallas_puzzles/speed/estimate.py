"""What the compilers say of a function on chips that are not here."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..targets.gpu.chips import CHIPS as GPUS
from ..targets.tpu.chips import CHIPS as TPUS
from ..view.gpu_report import Report as GpuReport
from ..view.gpu_report import gpu_report
from ..view.roofline import Chip
from ..view.tpu_report import Report as TpuReport
from ..view.tpu_report import tpu_report
from .results import Results, Row
from .work import ESTIMATE, Size, Work, nbytes_of, speed_of_light

# How far such estimates have been off, wherever anybody could measure: benchmarks/gpu.md, and `tpu_report` for TPUs
HOW_FAR = {
    "gpu": "How far to trust the estimates: on an H200 they were 0.91 to 1.20 times the measured time of 16 kernels, "
    "and 0.66 to 1.02 times that of ten solutions of gpu_basics.",
    "tpu": "How far to trust the estimates: on a v5e they were within 10% of six published times of matrix products. "
    "Nothing else could be compared.",
}
_ESTIMATED = {"gpu": ("h100",), "tpu": tuple(TPUS)}
_STEERS_BYTES = 1 << 20

Report = GpuReport | TpuReport
Reporter = Callable[..., Report]


def estimate(
    works: Iterable[Work],
    results: Results | None = None,
    saved: Callable[[Results], None] = lambda results: None,
    report_of: Reporter | None = None,
) -> Results:
    """Adds a row for each Pallas kernel of all works at all sizes, on each of the chips that it could be for.

    saved: called after each size, with all there is. report_of: called as report_of(chip, fn, *args, **blocks).
    """
    results = results if results is not None else Results()
    report_of = report_of or _report
    for work in works:
        results.note(HOW_FAR[work.accelerator])
        for chip in _ESTIMATED[work.accelerator]:
            target: Chip = GPUS[chip] if work.accelerator == "gpu" else TPUS[chip]
            for size in work.sizes:
                for row, sentence in _rows(work, size, target, chip, report_of):
                    if sentence:
                        results.note(sentence)
                        return results
                    if size.tried and row.problem:
                        results.note(
                            f"{work.name} has no estimate in {size.tried} on {target.title}: {row.problem.rstrip('.')}."
                        )
                        continue
                    results.rows.append(row)
                saved(results)
    return results


def _report(chip: str, fn: Callable[..., Any], *args: Any, **blocks: Any) -> Report:
    if chip in GPUS:
        return gpu_report(fn, *args, chip=chip, **blocks)
    return tpu_report(fn, *args, tpu=chip, simulate=False, **blocks)


def _rows(work: Work, size: Size, target: Chip, chip: str, report_of: Reporter) -> Iterator[tuple[Row, str]]:
    """(a row, "" or why there can be no estimate of anything)."""
    functions: Mapping[str, Callable[..., Any]] = {work.own: work.fn, **work.peers}
    for name, fn in functions.items():
        row = Row(work.name, size.title, size.dtype, name, target.title, ESTIMATE)
        own = name == work.own
        try:
            report = report_of(chip, fn, *described(size.args), **(size.blocks if own else {}))
            results = jax.eval_shape(work.calls(size)[name], *shapes(size.args))
        except Exception as error:
            if own:
                row.problem = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                yield row, ""
            continue
        if report.unavailable:
            yield row, report.unavailable
            return
        if not own and not report.kernels:
            continue
        light = speed_of_light(size, results, target)
        row.light_s, row.bound, row.hbm_bytes, row.flops = light
        if report.refusal is not None:
            row.problem = report.refusal.sentence
        elif not report.kernels or any(kernel.time_s is None for kernel in report.kernels):
            row.problem = "a part of its time cannot be known without a chip"
        else:
            kernels: Sequence[Any] = report.kernels
            row.median_s = sum(kernel.time_s * getattr(kernel, "runs", 1) for kernel in kernels)
            row.how = "estimated by the compiler"
        yield row, ""


def described(args: Any) -> Any:
    """Shapes in place of large arrays and of floats, so that nobody computes with them; small integers may steer."""

    def value(x: Any) -> Any:
        steers = not hasattr(x, "dtype") or (np.issubdtype(x.dtype, np.integer) and nbytes_of(x) <= _STEERS_BYTES)
        return x if steers else jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(value, args)


def shapes(args: Any) -> Any:
    """The arguments as what JAX needs to trace a function of them."""

    def shape(x: Any) -> Any:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return jax.tree.map(shape, args)
