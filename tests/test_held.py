"""What a kernel's values take of VMEM besides blocks and scratch: by the lens, and by the compiler."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import show, tpu_report
from pallas_puzzles.ir.capture import capture
from pallas_puzzles.ir.held import held
from pallas_puzzles.lens import machine as lens
from tpu_kernels import needs_compiler, remembered

N = 1024
ARRAY = N * N * 4  # bytes
Body = Callable[[Any, Any], Any]


def dot(x: Any, y: Any) -> Any:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def softmax(x: Any, y: Any) -> Any:
    e = jnp.exp(x[...] - x[...].max())
    return e / e.sum() + y[...]


BODIES: dict[str, tuple[Body, int]] = {
    "elementwise": (lambda x, y: jnp.tanh(x[...] * 2) + y[...], 0),
    "transposed": (lambda x, y: x[...].T + y[...], 0),
    "a product, then elementwise": (lambda x, y: jnp.tanh(dot(x[...], y[...])), 0),
    "a computed right side": (lambda x, y: dot(x[...], jnp.exp(y[...])), 0),
    "a computed left side": (lambda x, y: dot(x[...] * 2, y[...]), 1),
    "softmax": (softmax, 1),
    "two products": (lambda x, y: dot(x[...], y[...]) * dot(y[...], x[...]), 1),
    "a loop": (lambda x, y: jax.lax.fori_loop(0, 4, lambda i, a: a * 0.5 + x[...], y[...]), 2),
}


def kernel(body: Body, n: int = N) -> Callable[..., Any]:
    def run(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = body(x_ref, y_ref)

    out = jax.ShapeDtypeStruct((n, n), jnp.float32)
    params = pltpu.CompilerParams(vmem_limit_bytes=100 << 20)
    return lambda x, y: pl.pallas_call(run, out_shape=out, compiler_params=params)(x, y)


def estimated(fn: Callable[..., Any], *args: Any) -> int:
    found = []

    def on_call(call: Any, _eqn: Any, _args: Any) -> list[Any]:
        found.append(held(call.kernel)[0])
        return [np.zeros(o.shape, o.dtype) for o in call.outs]

    capture(fn, *args, on_call=on_call)
    return found[0]


@pytest.mark.parametrize("name", BODIES)
def test_what_waits_for_a_reduction_or_a_product_is_held(name: str) -> None:
    body, arrays = BODIES[name]
    x = np.zeros((N, N), np.float32)
    assert estimated(kernel(body), x, x) == arrays * ARRAY


IN_EVERY_RUN = ("a product, then elementwise", "softmax", "a loop")


@needs_compiler
@remembered
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_EVERY_RUN else pytest.mark.thorough) for each in BODIES]
)
def test_the_estimate_is_near_what_the_compiler_spills(name: str) -> None:
    body, arrays = BODIES[name]
    x = jax.ShapeDtypeStruct((N, N), jnp.float32)
    (report,) = tpu_report(kernel(body), x, x, simulate=False).kernels
    spilled = report.buffers.get("(spilled registers)", 0) / ARRAY
    assert 0.4 * arrays <= spilled <= 1.2 * arrays + 0.1


def waiting(x: Any) -> Any:
    """Seven arrays of 100 MiB, each of which would fit, and all of which wait for the last sum."""

    def run(x_ref: Any, o_ref: Any) -> None:
        parts = [jnp.exp(jnp.full((5120, 5120), x_ref[0, n])) for n in range(7)]
        total = sum(part.sum() for part in parts)
        o_ref[...] = x_ref[...] + sum((part / total).max() for part in parts)

    return pl.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_temporaries_that_do_not_fit_together_are_refused_before_they_are_made() -> None:
    with pytest.raises(lens.Refused, match=r"2 buffers and the values that wait for others, takes 350 MiB"):
        lens.trace(waiting, np.zeros((8, 128), np.float32))


def test_the_drawing_names_them() -> None:
    x = np.zeros((256, 256), np.float32)
    assert "temporaries" not in str(show(kernel(BODIES["elementwise"][0], 256), x, x))
    assert "VMEM 768 KiB and about 256 KiB of temporaries" in str(show(kernel(softmax, 256), x, x))
