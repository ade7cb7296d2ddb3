"""A process in which JAX's GPU simulator runs, or a GPU: functions in, their outputs out."""

import contextlib
import functools
import pickle
import sys
import traceback
from typing import Any

from .child import serve

_STORE = "it has no stores into accumulators, such as acc[...] = ..."


def main() -> None:
    import jax  # noqa: F401 - the slow part of the first request, done before it comes
    from jax.experimental.pallas import mosaic_gpu  # noqa: F401

    serve(_simulated)


def _simulated(paths: list[str], packed: bytes, compiled: bool) -> Any:
    """The outputs of a function, or a SimulatorError. packed: it, its arrays and keywords; compiled: on a GPU."""
    import jax
    import numpy as np
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from ..ir.gpu import as_on_gpu
    from ..ir.modes import built_for
    from .simulate import SimulatorError, SimulatorUnable, _is_inability, _line_of, _listening, _one_line, raised_in_jax

    try:
        sys.path[:] = list(dict.fromkeys([*sys.path, *paths]))
        fn, args, kwargs = pickle.loads(packed)
    except Exception as error:
        return SimulatorUnable(f"the function cannot be read in another process: {_one_line(error)}", running=False)
    if compiled and jax.default_backend() != "gpu":
        return SimulatorUnable("JAX finds no GPU here")
    mode = False if compiled else plgpu.InterpretGPUParams(uninitialized_memory="nan")
    run = built_for(functools.partial(fn, **kwargs), mode)
    with _listening() as heard:
        try:
            with contextlib.nullcontext() if compiled else as_on_gpu():
                outputs = jax.tree.map(np.asarray, (jax.jit(run) if compiled else run)(*args))
                jax.effects_barrier()
            return outputs
        except Exception as error:
            cause = heard.errors[0] if heard.errors else error
            # it has a ValueError for what it does not support
            unable = _is_inability(cause) or (isinstance(cause, ValueError) and raised_in_jax(cause))
            kind = SimulatorUnable if unable else SimulatorError
            return kind(_STORE if _stores(cause) else _one_line(cause), _line_of(cause), running=bool(heard.errors))


def _stores(error: BaseException) -> bool:
    """Whether this is how it fails at `acc[...] = ...` (jax 0.11.2, 0.12.0): it takes its own key for the accumulator.

    The error is of shapes, as if the kernel had a wrong one.
    """
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) and frames[-1].startswith("_wgmma_accumulator_store")


if __name__ == "__main__":
    main()
