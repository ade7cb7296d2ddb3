"""setup("gpu"): what it says, what a plain call of a plgpu.kernel does without a GPU, and a GPU as second opinion."""

import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import gpu_kernels
import pallas_puzzles
from gpu_kernels import MISTAKES, S, normal
from pallas_puzzles.course.check import check_call
from pallas_puzzles.ir.gpu_calls import run_on_cpu
from pallas_puzzles.lens.gpu.findings import NOTES
from pallas_puzzles.platforms import gpu_attached
from pallas_puzzles.targets import gpu_here, gpu_simulator
from pallas_puzzles.targets.gpu_here import KernelError
from pallas_puzzles.targets.simulate import SimulatorTimeout, SimulatorUnable

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the tests are about a machine without a GPU")


@pytest.fixture
def gpu_notebook(capsys: pytest.CaptureFixture) -> None:
    pallas_puzzles.setup("gpu")
    capsys.readouterr()


def plus_one(x: jax.Array, *, bm: int = 64) -> jax.Array:
    def body(x_gmem, o_gmem):
        rows = pl.ds(lax.axis_index("i") * bm, bm)
        o_gmem[rows] = jnp.exp(x_gmem[rows]) + 1

    out = S(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=out, grid=(x.shape[0] // bm,), grid_names=("i",))(x)


def plus_one_spec(x: jax.Array) -> jax.Array:
    return jnp.exp(x) + 1


@pytest.mark.usefixtures("gpu_notebook")
@pytest.mark.parametrize("how", [lambda fn: fn, jax.jit], ids=["eagerly", "under jit"])
@pytest.mark.parametrize("name", gpu_kernels.RIGHT)
def test_a_plain_call_runs(name: str, how: Callable[..., Any]) -> None:
    """Also emit_pipeline with outputs, and others that JAX's simulator cannot run."""
    fn, args, want = gpu_kernels.RIGHT[name]()
    got = how(fn)(*args)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(right, np.float32), rtol=0.02, atol=0.2)


@pytest.mark.usefixtures("gpu_notebook")
def test_inside_of_other_work() -> None:
    x = normal(3, 128, 64)
    want = np.stack([plus_one_spec(each) for each in x])
    for run in (jax.vmap(plus_one), jax.jit(jax.vmap(plus_one)), lambda x: lax.map(plus_one, x)):
        np.testing.assert_allclose(run(x), want, rtol=1e-5)
    both = jax.jit(lambda x: plus_one(jnp.sin(x)) @ jnp.ones((64, 8)))
    np.testing.assert_allclose(both(x[0]), plus_one_spec(jnp.sin(x[0])) @ jnp.ones((64, 8)), rtol=1e-4)
    big = normal(2048, 1024)
    np.testing.assert_allclose(jax.jit(lambda x: plus_one(x * 2))(big), plus_one_spec(big * 2), rtol=1e-5)


@pytest.mark.usefixtures("gpu_notebook")
@pytest.mark.parametrize("name", [name for name, (_, kind, *_) in MISTAKES.items() if kind not in NOTES])
def test_a_wrong_kernel_says_why(name: str) -> None:
    fn, args, want = MISTAKES[name][0]()
    with pytest.raises(KernelError) as caught:
        fn(*args)
    told = check_call(fn, args, want, confirm=False).findings[0]
    cause, line = str(caught.value).splitlines()
    assert cause.endswith(told.cause)
    assert told.line is not None
    assert line.strip() == f"{told.line}   {told.line.text}"
    assert caught.value._render_traceback_() == [f"KernelError: {caught.value}"]


@pytest.mark.usefixtures("gpu_notebook")
def test_a_wrong_kernel_under_jit_says_why(caplog: pytest.LogCaptureFixture) -> None:
    fn, args, _ = MISTAKES["slot never released"][0]()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(fn)(*args)
    assert "KernelError: " in str(caught.value)
    assert "waits for ever" in str(caught.value)
    assert not caplog.records


@pytest.mark.usefixtures("gpu_notebook")
def test_what_the_machine_cannot_run_is_said() -> None:
    def body(x_gmem, o_gmem):
        @pl.when(lax.axis_index("i") == 0)
        def _():
            o_gmem[...] = x_gmem[...]

    kernel = plgpu.kernel(body, out_type=S((8, 8), jnp.float32), grid=(1 << 20,), grid_names=("i",))
    with pytest.raises(NotImplementedError, match=r"cannot run here, on the CPU: .* 65536 CTAs"):
        kernel(normal(8, 8))


@pytest.mark.usefixtures("gpu_notebook")
def test_a_kernel_for_jaxs_simulator_runs_in_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_here, "launched", None)
    x = normal(128, 64)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        np.testing.assert_allclose(plus_one(x), plus_one_spec(x), rtol=1e-5)


def test_notebooks_for_both_take_turns(capsys: pytest.CaptureFixture) -> None:
    x = normal(128, 64)

    def on_tpu(x: jax.Array) -> jax.Array:
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1

        return pl.pallas_call(body, out_shape=S(x.shape, x.dtype))(x)

    for _ in range(2):
        pallas_puzzles.setup()
        np.testing.assert_allclose(on_tpu(x), x + 1)
        pallas_puzzles.setup("gpu")
        np.testing.assert_allclose(plus_one(x), plus_one_spec(x), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(plus_one)(x), plus_one_spec(x), rtol=1e-5)
        assert check_call(plus_one, (x,), plus_one_spec(x), allow=())
    tpu, gpu = capsys.readouterr().out.splitlines()[-2:]
    assert "simulator" in tpu
    assert gpu.startswith("No H100, H200 or B200 here: kernels run on the CPU")


@pytest.mark.usefixtures("gpu_notebook")
def test_switched_off_again() -> None:
    run_on_cpu(None)
    with pytest.raises(ValueError, match="interpret"):
        plus_one(normal(128, 64))


@pytest.mark.parametrize("notebook", [True, False])
def test_a_notebook_has_the_simulator_ready(notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    if not notebook:
        monkeypatch.delitem(sys.modules, "ipykernel")
    gpu_simulator._SIMULATOR.stop()
    gpu_here._warm()
    process = gpu_simulator._SIMULATOR._process
    assert (process is not None and process.poll() is None) == notebook
    x = normal(128, 64)
    np.testing.assert_allclose(gpu_simulator.simulate(plus_one, x), plus_one_spec(x), rtol=1e-5)
    assert not notebook or gpu_simulator._SIMULATOR._process is process


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match='choose "tpu" or "gpu"'):
        pallas_puzzles.setup("cuda")


# ---- with a GPU ------------------------------------------------------------------------------------------------------


def with_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: str) -> None:
    """As far as `setup` can tell."""
    device = types.SimpleNamespace(device_kind=name, compute_capability=capability)
    monkeypatch.setattr(gpu_here, "_first_gpu", lambda: device)


def test_an_old_gpu_stays_idle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with_gpu(monkeypatch, "Tesla T4", "7.5")
    pallas_puzzles.setup("gpu")
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("No H100, H200 or B200 here")
    assert said.endswith("and the Tesla T4 stays idle.")
    assert jax.config.jax_default_device == jax.devices("cpu")[0]
    x = normal(128, 64)
    np.testing.assert_allclose(plus_one(x), plus_one_spec(x), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "capability"), [("NVIDIA H100", "9.0"), ("NVIDIA H200", "9.0"), ("NVIDIA B200", "10.0")]
)
def test_a_new_gpu_is_used(
    name: str, capability: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with_gpu(monkeypatch, "Tesla T4", "7.5")
    pallas_puzzles.setup("gpu")
    with_gpu(monkeypatch, name, capability)
    pallas_puzzles.setup("gpu")
    assert capsys.readouterr().out.splitlines()[-1] == f"Kernels run compiled, on this machine's {name}."
    assert jax.config.jax_default_device is None
    with pytest.raises(ValueError, match="interpret"):  # nothing of ours runs it
        plus_one(normal(128, 64))


def on_gpu(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    with_gpu(monkeypatch, "NVIDIA H200", "9.0")
    monkeypatch.setattr(gpu_simulator, "run_compiled", lambda fn, *args, timeout_s: run(fn, *args))


def test_a_gpu_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(128, 64)
    on_gpu(monkeypatch, lambda fn, x: np.asarray(plus_one_spec(x)))
    verdict = check_call(plus_one, (x,), plus_one_spec(x))
    assert verdict
    assert verdict.notes == ["Confirmed by the GPU (NVIDIA H200), compiled."]


@pytest.mark.parametrize("name", ["slot never released", "half arrives", "no barrier_wait", "waits twice"])
def test_a_wrong_kernel_never_reaches_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    on_gpu(monkeypatch, lambda *given: asked.append(given))
    made, kind, *_ = MISTAKES[name]
    kernel, args, want = made()
    verdict = check_call(kernel, args, want)
    assert verdict.findings[0].kind == kind
    assert not asked


def test_a_gpu_that_disagrees_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(128, 64)
    on_gpu(monkeypatch, lambda fn, x: np.zeros_like(x))
    verdict = check_call(plus_one, (x,), plus_one_spec(x))
    assert verdict.status == "failed"
    assert "this machine's GPU (NVIDIA H200) did not" in verdict.notes[-1]

    def late(fn: Any, x: Any) -> Any:
        raise SimulatorTimeout("the kernel ran for more than 90 s and was stopped")

    on_gpu(monkeypatch, late)
    verdict = check_call(plus_one, (x,), plus_one_spec(x))
    assert verdict.status == "error"
    assert "was not done in time" in verdict.notes[-1]


def test_a_gpu_that_cannot_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(fn: Any, x: Any) -> Any:
        raise SimulatorUnable("it is a kernel for another GPU")

    x = normal(128, 64)
    on_gpu(monkeypatch, unable)
    verdict = check_call(plus_one, (x,), plus_one_spec(x))
    assert verdict
    assert "this machine's GPU (NVIDIA H200) cannot run it" in verdict.notes[0]


@pytest.mark.skipif(gpu_attached(), reason="there is a GPU")
def test_compiled_without_a_gpu_is_impossible() -> None:
    try:
        with pytest.raises(SimulatorUnable, match="no GPU"):
            gpu_simulator.run_compiled(plus_one, normal(128, 64))
    finally:
        gpu_simulator._GPU.stop()
