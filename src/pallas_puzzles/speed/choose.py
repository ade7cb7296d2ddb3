"""What `bench` does on this machine: measures where a function's chip is here, asks the compilers where it is not."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..ir.capture import is_pallas_call
from ..ir.program import calls_in
from ..lens.machine import listed
from ..targets.gpu_here import gpu_here
from ..view.draw import name_of
from . import conditions
from .estimate import estimate, shapes
from .results import Results, Saved
from .run import measure, sentence
from .work import Size, Work

_FOR = {"tpu": "a TPU", "gpu": "an H100, H200 or B200"}


def bench(
    fn: Callable[..., Any],
    *args: Any,
    peers: Mapping[str, Callable[..., Any]] | None = None,
    unwritten: Sequence[str] = (),
    **blocks: Any,
) -> Results:
    """Times `fn(*args, **blocks)` on this machine's GPU or TPU, beside what else computes the same.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs. peers: name -> a function of the same
    arrays; the last one's result is what the others must agree with. unwritten: parts of fn that the reader has still
    to write; then nothing is measured. blocks: static keyword arguments of fn.

    Returns Results: shown as a table and a picture; `.save(Path("x.json"))`, also .csv and .svg. Where the chip that
    fn's kernels are for is not here, they are the compiler's estimates, marked as such. Never raises for a kernel that
    fails: its row says why.
    """
    if unwritten:
        words = f"{listed(unwritten)} {'is' if len(unwritten) == 1 else 'are'} still to be written."
        return Results(notes=[f"Nothing to measure yet: {words}"])
    name = name_of(fn)
    try:
        accelerator = kernels_for(functools.partial(fn, **blocks), args)
    except Exception as error:
        return Results(notes=[f"{name} cannot be traced: {sentence(error)}"])
    return measure_or_estimate([Work(name, fn, [Size(args, blocks)], dict(peers or {}), accelerator=accelerator)])


def measure_or_estimate(works: Sequence[Work], saved: Saved = lambda results: None) -> Results:
    """Both, each for the works that it is for. saved: called after each size, with all there is so far."""
    results = Results()
    here = [work for work in works if is_here(work.accelerator)]
    if here:
        with conditions.watched(results):
            measure(here, results, saved=saved)
    away = [work for work in works if not is_here(work.accelerator)]
    for accelerator in dict.fromkeys(work.accelerator for work in away):
        device = jax.devices()[0]
        idle = "" if device.platform == "cpu" else f" The {device.device_kind} that is here stays idle."
        results.note(
            f"Nothing was run: the kernels are for {_FOR[accelerator]}, and there is none here.{idle} "
            "The times are the compiler's estimates."
        )
    if away:
        results.conditions = results.conditions or conditions.conditions()
        estimate(away, results, saved)
    saved(results)
    return results


def is_here(accelerator: str) -> bool:
    """Whether kernels for it run compiled on JAX's default device. "" (no kernels) runs anywhere."""
    if accelerator == "gpu":
        return gpu_here() is not None
    return not accelerator or jax.default_backend() == accelerator


def kernels_for(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """What fn's kernels are for: "tpu", "gpu", or "" where it has none. Raises whatever tracing fn raises."""
    kernels = [*calls_in(jax.make_jaxpr(lambda *a: fn(*a))(*shapes(tuple(args))).jaxpr)]
    return "" if not kernels else "tpu" if any(map(is_pallas_call, kernels)) else "gpu"
