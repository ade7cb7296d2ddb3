"""The machine for plgpu.kernel on kernels that JAX ships: it agrees with plain JAX, and finds nothing wrong."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gpu_library
from gpu_kernels import RIGHT
from gpu_library import BLACKWELL, LIBRARY
from pallas_puzzles.lens import gpu

ROUNDING = 5e-3  # of the largest value: one rounding to 16 bits


@pytest.mark.parametrize("name", LIBRARY)
def test_library(name: str) -> None:
    with gpu_library.on_a_gpu():
        fn, args, want = LIBRARY[name]()
        run = gpu.run(fn, *args, sms=gpu_library.SMS)
    assert run.findings == []
    assert gpu_library.error(run.outputs, want) < ROUNDING
    assert run.counts.tensor_busy > 0


@pytest.mark.parametrize("name", BLACKWELL)
def test_blackwell(name: str) -> None:
    """The results are right. The kernel ends without waiting for its last copies out of SMEM: JAX's own simulator
    refuses it for that (jax 0.12.0.1, inline_mgpu="ignore")."""
    fn, args, want = BLACKWELL[name]()
    run = gpu.run(fn, *args, chip="b200")
    assert ({f.kind for f in run.findings}, run.notes) == ({"store-in-flight"}, [])
    assert gpu_library.error(run.outputs, want) < ROUNDING
    assert run.counts.tensor_busy > 0


def test_a_product_that_nobody_waits_for() -> None:
    """JAX's transposed ragged dot counts on a wait that wgmma has not: a slot is refilled while a product may read it.

    Neither its PTX nor its SASS has one there (jax 0.11.2, sm_90a), though 60 runs on an H200 were right.
    """
    with gpu_library.on_a_gpu():
        fn, args, _ = gpu_library.grouped_backward()
        run = gpu.run(fn, *args, sms=gpu_library.SMS)
    assert {(f.kind, f.engine) for f in run.findings} == {("reused", "wgmma")}


@pytest.mark.parametrize("name", ["copies", "matmul", "handed over", "multicast", "ragged"])
def test_jaxs_simulator_agrees(name: str) -> None:
    kernel, args, _ = RIGHT[name]()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=False)):
        want = jax.block_until_ready(RIGHT[name]()[0](*args))
    np.testing.assert_allclose(gpu.run(kernel, *args).outputs, want, rtol=1e-5, atol=1e-5)
