"""What the compilers say of a function on chips that are not here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..targets.gpu.chips import CHIPS as GPUS
from ..targets.tpu.chips import CHIPS as TPUS
from ..view.gpu_report import gpu_report
from ..view.report import Report
from ..view.tpu_report import tpu_report
from .results import Results, Row, Saved
from .run import sentence
from .work import ESTIMATE, Size, Work, nbytes_of, speed_of_light

# How far such estimates have been off, wherever anybody could measure: benchmarks/gpu.md, and `tpu_report` for TPUs
HOW_FAR = {
    "gpu": "How far to trust the estimates: on an H200 they were 0.91 to 1.20 times the measured time of 16 kernels, "
    "and 0.66 to 1.02 times that of ten solutions of gpu_basics.",
    "tpu": "How far to trust the estimates: on a v5e they were within 10% of six published times of matrix products. "
    "Nothing else could be compared.",
}
_TARGETS: dict[str, Sequence[Any]] = {"gpu": [GPUS["h100"]], "tpu": [*TPUS.values()]}
_STEERS_BYTES = 1 << 20


def estimate(works: Iterable[Work], results: Results | None = None, saved: Saved = lambda results: None) -> Results:
    """Adds a row for each Pallas kernel of all works at all sizes, on each of the chips that it could be for.

    saved: called after each size, with all there is.
    """
    results = results if results is not None else Results()
    for work in works:
        results.note(HOW_FAR[work.accelerator])
        for target in _TARGETS[work.accelerator]:
            for size in work.sizes:
                for row in _rows(work, size, target):
                    if isinstance(row, str):
                        results.note(row)
                        return results
                    if size.tried and row.problem:
                        why = row.problem.rstrip(".")
                        results.note(f"{work.name} has no estimate in {size.tried} on {target.title}: {why}.")
                    else:
                        results.rows.append(row)
                saved(results)
    return results


def _report(chip: str, fn: Callable[..., Any], *args: Any, **blocks: Any) -> Report[Any, Any]:
    if chip in GPUS:
        return gpu_report(fn, *args, chip=chip, **blocks)
    return tpu_report(fn, *args, tpu=chip, simulate=False, **blocks)


def _rows(work: Work, size: Size, target: Any) -> Iterator[Row | str]:
    """The rows; a string says why there can be no estimate of anything."""
    for name, fn in {work.own: work.fn, **work.peers}.items():
        row = Row(work.name, size.title, size.dtype, name, target.title, ESTIMATE)
        own = name == work.own
        try:
            report = _report(target.name, fn, *described(size.args), **(size.blocks if own else {}))
            results = jax.eval_shape(work.calls(size)[name], *shapes(size.args))
        except Exception as error:
            if own:
                row.problem = sentence(error)
                yield row
            continue
        if report.unavailable:
            yield report.unavailable
            return
        if not own and not report.kernels:
            continue
        row.light_s, row.bound, row.hbm_bytes, row.flops = speed_of_light(size, results, target)
        if report.refusal is not None:
            row.problem = report.refusal.sentence
        elif not report.kernels or any(kernel.time_s is None for kernel in report.kernels):
            row.problem = "a part of its time cannot be known without a chip"
        else:
            row.median_s = sum(kernel.time_s * getattr(kernel, "runs", 1) for kernel in report.kernels)
            row.how = "estimated by the compiler"
        yield row


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
