"""What trains a model: the fast mode, the curve that grows, and the example that uses both."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_puzzles import Curve, fast_execution
from pallas_puzzles.targets.simulate import tpu_simulation

ROOT = Path(__file__).parents[1]
X = np.arange(24 * 128, dtype=np.float32).reshape(24, 128)


def doubled(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(3,), in_specs=[rows], out_specs=rows, out_shape=x)(x)


def test_fast_execution_is_in_its_block_alone(capsys):
    jitted = jax.jit(doubled)
    with tpu_simulation():
        assert "callback" in jitted.lower(X).as_text(), "the simulator's kernels are callbacks"
        with fast_execution():
            assert "callback" not in jitted.lower(X).as_text(), "a plain program of XLA's"
            np.testing.assert_array_equal(jitted(jnp.asarray(X)), 2 * X)
        assert "callback" in jitted.lower(X).as_text()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Fast mode: no TPU here, so XLA runs the kernels' programs on the CPU")


def test_a_curve_is_printed_at_its_end(capsys):
    curve = Curve(4, "yours", beside={"plain": [4.0, 2.0, 2.0, 1.0]})
    for value in (4.0, 3.0, 2.0):
        curve(value)
    assert capsys.readouterr().out == "", "no terminal and no notebook: only the end"
    assert curve.status().startswith("[##################......] 3/4  yours 2.0000")
    curve(jnp.float32(0.0))
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split("|") == ["   4.00 ", "=" * 15]
    assert rows[-1].split() == ["p", "plain", "o", "yours"]
    marks = {mark: sum(row.partition("|")[2].count(mark) for row in rows[:12]) for mark in "op="}
    assert marks == {"o": 30, "p": 30, "=": 30}
    assert "yours" in curve.svg()
    assert curve.svg().count("<path d=") == 5, "three lines of the grid, and two curves"


def test_a_curve_takes_what_is_not_finite():
    curve = Curve(2)
    curve(np.nan)
    assert "nan" not in curve.svg().partition("</text>")[2]
    assert str(curve)


@pytest.fixture
def transformer(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("transformer", ROOT / "examples" / "transformer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("transformer", None)


@pytest.mark.thorough
def test_the_example_trains_as_plain_jnp_does(transformer):
    """Gradients of every weight to rounding, experts and all; then three steps."""
    parts = transformer.kernels()
    assert str(parts).count("the course's") == 6
    tokens, targets = transformer.problems(np.random.default_rng(1), 4)
    assert (np.sort(tokens[:, :8], axis=1) == targets[:, 8:]).all(), "what comes next is in order"
    model = transformer.new_model(0, experts=4)
    with fast_execution(), jax.default_matmul_precision("highest"):
        gradients = [jax.jit(jax.grad(lambda *a, p=p: transformer.loss(*a, p))) for p in (parts, transformer.plain())]
        mine, plain = (jax.tree.leaves(gradient(model, tokens, targets)) for gradient in gradients)
        losses = []
        transformer.train(transformer.new_model(0, experts=0), parts, 3, losses.append)
    assert len(mine) == 22
    for a, b in zip(mine, plain, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)
    assert losses[2] < losses[0]
