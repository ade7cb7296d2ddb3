"""Kernels for a TPU where there is none, as fast as XLA runs them: to train with, and never to judge by."""

import contextlib
from collections.abc import Iterator

import jax

from .simulate import backend

_INSTEAD = (
    "Fast mode: no TPU here, so XLA runs the kernels' programs on the {0}, by JAX's HLO interpreter. It forgives "
    "mistakes that a TPU does not; verdicts come from elsewhere."
)


@contextlib.contextmanager
def fast_execution() -> Iterator[None]:
    """In the block, every pallas_call for a TPU that is traced runs as fast as this machine can, and one line says how.

    On a TPU kernels run compiled. Elsewhere JAX's HLO interpreter turns each into a plain XLA program, a loop over its
    grid, for this machine's GPU if JAX has one, else for its CPU. No wait, no race and no uninitialised memory is seen
    there. Functions under jax.jit are traced anew in the block, and again behind it.
    """
    if backend() == "tpu":
        print(f"Kernels run compiled, on this machine's {jax.devices()[0].device_kind}.")
        yield
        return
    from jax.experimental.pallas import tpu as pltpu

    device = jax.devices()[0]
    print(_INSTEAD.format("CPU" if device.platform == "cpu" else f"GPU ({device.device_kind})"))
    # without the TPU that setup() has told JAX of: what is compiled here is for this device
    empty = jax.sharding.AbstractMesh((), ())
    with jax.default_device(device), jax.sharding.use_abstract_mesh(empty), pltpu.force_tpu_interpret_mode(True):  # type: ignore[arg-type]
        yield
