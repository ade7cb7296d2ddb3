"""How fast the lens is beside JAX's simulator of the TPU, on the same kernels in one run, printed as a table.

    uv run python benchmarks/engines.py [NAME ...] [--list] [--runs 2]

The kernels of the tests (tests/zoo.py, tests/production_kernels.py), JAX's own attention and matmul kernels on larger
shapes, and kernels with large blocks, where the arithmetic ought to cost what it costs in NumPy. A row has the best of
so many runs after a first one. The goals are those of the project: ten times as fast as the simulator in the median,
and never slower by more than 1.2 times.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import matmul as jax_matmul
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_puzzles.lens.machine import trace
from pallas_puzzles.targets.simulate import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from production_kernels import PRODUCTION
from zoo import ZOO, matmul

MEDIAN, WORST = 10.0, 1 / 1.2  # simulator / lens
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def row_blocks(body: Callable[[Any], Any], x: Any, rows: int, **scratch: Any) -> Any:
    """body(block) of so many whole rows at a time."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = body(x_ref[...])

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    grid = (x.shape[0] // rows,)
    return pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=x)(x)


def softmax(x: Any) -> Any:
    e = jnp.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def layer_norm(x: Any) -> Any:
    y = x.astype(jnp.float32)
    y = y - y.mean(1, keepdims=True)
    return (y * jax.lax.rsqrt((y * y).mean(1, keepdims=True) + 1e-6)).astype(x.dtype)


def masked(x: Any) -> Any:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (0, 1))
    return jnp.where(rows >= columns, x, -jnp.inf)


def gelu(x: Any) -> Any:
    return jax.nn.gelu(x)


def row_by_row(x: Any) -> Any:
    """Loads and stores of a row at a time."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        def body(i: Any, _: Any) -> None:
            o_ref[pl.ds(i, 1), :] = x_ref[pl.ds(i, 1), :] * 2

        jax.lax.fori_loop(0, x.shape[0], body, None)

    return pl.pallas_call(kernel, out_shape=x)(x)


def piped(x: Any, y: Any, *, bm: int = 256, bn: int = 256, bk: int = 256) -> Any:
    """A matmul by emit_pipeline."""
    (m, k), n = x.shape, y.shape[1]

    def kernel(x_hbm: Any, y_hbm: Any, o_hbm: Any) -> None:
        def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
            @pl.when(pl.program_id(2) == 0)
            def _() -> None:
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        pltpu.emit_pipeline(
            body,
            grid=(m // bm, n // bn, k // bk),
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
            out_specs=[pl.BlockSpec((bm, bn), lambda i, j, k: (i, j))],
        )(x_hbm, y_hbm, o_hbm)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = jax.ShapeDtypeStruct((m, n), jnp.float32)
    return pl.pallas_call(kernel, in_specs=[hbm, hbm], out_specs=hbm, out_shape=out)(x, y)


def splash_attention(q: Any, k: Any, v: Any) -> Any:
    heads, rows, _ = q.shape
    mask = masks.MultiHeadMask([masks.CausalMask((rows, rows))] * heads)
    return splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)(q, k, v)


def large() -> dict[str, Case]:
    bf16, wide = jnp.bfloat16, numbers(2048, 2048)
    x, y, q = numbers(1024, 1024), numbers(1024, 1024), numbers(1, 4, 512, 64)
    xs, ys, qs = x.astype(bf16), y.astype(bf16), q.astype(bf16)
    blocks = {"bm": 128, "bn": 128, "bk": 128}
    groups = np.array([200, 300, 0, 524], np.int32)
    return {
        "matmul 1024^3 in 512 steps": (functools.partial(matmul, **blocks), (x, y)),
        "matmul 1024^3 in 512 steps, bf16": (functools.partial(matmul, **blocks), (xs, ys)),
        "matmul 1024^3 in 8 steps": (functools.partial(matmul, bm=512, bn=512, bk=512), (x, y)),
        "matmul of jax, bf16": (
            functools.partial(jax_matmul.matmul, block_shape=(256, 256), block_k=256),
            (xs, ys),
        ),
        "matmul in a pipeline": (piped, (x, y)),
        "gmm": (gmm, (x, numbers(4, 1024, 512), groups)),
        "flash attention, causal": (functools.partial(flash.flash_attention, causal=True), (q, q, q)),
        "flash attention, bf16": (flash.flash_attention, (qs, qs, qs)),
        "splash attention": (splash_attention, (q[0], q[0], q[0])),
        "softmax of large blocks": (lambda a: row_blocks(softmax, a, 256), (wide,)),
        "softmax in bf16": (lambda a: row_blocks(softmax, a, 256), (wide.astype(bf16),)),
        "layer norm in bf16": (lambda a: row_blocks(layer_norm, a, 256), (wide.astype(bf16),)),
        "a mask over large blocks": (lambda a: row_blocks(masked, a, 256), (wide,)),
        "gelu of large blocks": (lambda a: row_blocks(gelu, a, 256), (wide,)),
        "row by row": (row_by_row, (numbers(512, 1024),)),
    }


def cases() -> dict[str, Case]:
    exhibits = {**ZOO, **PRODUCTION}.values()
    return {**large(), **{e.name: (e.fn, e.args) for e in exhibits}}


def best(run: Callable[[], Any], runs: int) -> tuple[float, float]:
    """(seconds of the first run, of the fastest after it)."""
    taken = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return taken[0], min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernels whose names hold one of these; all of them if there is none")
    parser.add_argument("--runs", type=int, default=2, help="runs after the first one")
    parser.add_argument("--list", action="store_true", help="name the kernels, and run none")
    given = parser.parse_args()
    chosen = {n: c for n, c in cases().items() if not given.names or any(part in n for part in given.names)}
    if given.list:
        print("\n".join(chosen))
        return
    ratios: dict[str, tuple[float, float]] = {}
    print(f"{'kernel':36} {'lens':>10} {'simulator':>10} {'times':>7} {'first':>7}")
    for name, (fn, args) in chosen.items():
        try:
            first_lens, lens = best(lambda: trace(fn, *args).outputs, given.runs)  # noqa: B023
            first_simulator, simulator = best(lambda: simulate(fn, *args), given.runs)  # noqa: B023
        except Exception as error:
            print(f"{name:36} {type(error).__name__}: {str(error).splitlines()[0][:60]}")
            continue
        ratios[name] = simulator / lens, first_simulator / first_lens
        again, first = ratios[name]
        print(f"{name:36} {1e3 * lens:7.1f} ms {1e3 * simulator:7.1f} ms {again:7.1f} {first:7.1f}", flush=True)
    for what, column in (("again", 0), ("first run", 1)):
        of_all = [each[column] for each in ratios.values()]
        median, worst = statistics.median(of_all), min(of_all, default=math.inf)
        met = "" if median >= MEDIAN and worst >= WORST else "  MISSED"
        print(
            f"{what}: the simulator takes {median:.1f} times as long (median of {len(of_all)}), least {worst:.2f}{met}"
        )


if __name__ == "__main__":
    main()
