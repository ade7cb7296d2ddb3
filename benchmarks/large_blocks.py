"""What the lens costs beside the same arithmetic in NumPy, on kernels with large blocks, printed as a table.

    uv run python benchmarks/large_blocks.py [NAME ...] [--runs 9]

Each kernel runs as a whole: traced by JAX, run step by step, every load and store noted. NumPy does the same products
and sums, block by block, and notes nothing. NumPy has no arithmetic in bfloat16: there
it converts each operand to float32, computes, and rounds what the kernel rounds. CPU time in one thread, the best of so
many runs, the two in turn; other programs on the machine matter less that way. The goal: at most 1.3 times for matrix
products of 512^3, at most 1.5 times for the rest.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is loaded

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from engines import gelu, layer_norm, masked, numbers, row_blocks, softmax

from pallas_puzzles.lens.machine import trace
from zoo import matmul

Kernel, Plain = Callable[[], Any], Callable[[], Any]
BF16 = np.dtype(jnp.bfloat16)


def plain_matmul(x: np.ndarray, y: np.ndarray, b: int) -> np.ndarray:
    """Blocks of b x b, summed over K in a float32 block, as the kernel does."""
    (m, k), n = x.shape, y.shape[1]
    out = np.empty((m, n), x.dtype)
    for i in range(0, m, b):
        for j in range(0, n, b):
            acc = np.zeros((b, b), np.float32)
            for step in range(0, k, b):
                left, right = x[i : i + b, step : step + b], y[step : step + b, j : j + b]
                acc += left.astype(np.float32, copy=False) @ right.astype(np.float32, copy=False)
            out[i : i + b, j : j + b] = acc
    return out


def plain_rows(body: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rows: int) -> np.ndarray:
    out = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        out[i : i + rows] = body(x[i : i + rows])
    return out


def plain_softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(np.float32)


def plain_softmax_bf16(x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float32)
    e = rounded(np.exp(rounded(y - y.max(1, keepdims=True))))
    return (e / rounded(e.sum(1, keepdims=True))).astype(BF16)


def plain_layer_norm(x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float32)
    y = y - y.mean(1, keepdims=True)
    return (y / np.sqrt((y * y).mean(1, keepdims=True) + 1e-6)).astype(x.dtype)


def plain_mask(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(x.shape[0])[:, None] >= np.arange(x.shape[1]), x, np.float32(-np.inf))


def plain_gelu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + np.float32(0.044715) * (x * x * x)))))


def pairs() -> dict[str, tuple[Kernel, Plain]]:
    x, y, wide = numbers(2048, 2048), numbers(2048, 2048), numbers(8192, 2048)
    narrow = wide.astype(BF16)

    def product(b: int, dtype: Any = np.float32) -> tuple[Kernel, Plain]:
        left, right = x.astype(dtype), y.astype(dtype)
        return (
            lambda: trace(functools.partial(matmul, bm=b, bn=b, bk=b), left, right).outputs,
            lambda: plain_matmul(left, right, b),
        )

    def rows(kernel: Any, plain: Any, array: np.ndarray, size: int) -> tuple[Kernel, Plain]:
        return lambda: trace(lambda a: row_blocks(kernel, a, size), array).outputs, lambda: plain_rows(
            plain, array, size
        )

    return {
        "matmul, 512^3": product(512),
        "matmul, 512^3, bf16": product(512, BF16),
        "matmul, 256^3": product(256),
        "matmul, 128^3": product(128),
        "softmax, 2048 x 2048": rows(softmax, plain_softmax, wide, 2048),
        "softmax, 256 x 2048": rows(softmax, plain_softmax, wide, 256),
        "softmax, 512 x 2048, bf16": rows(softmax, plain_softmax_bf16, narrow, 512),
        "layer norm, 512 x 2048, bf16": rows(layer_norm, plain_layer_norm, narrow, 512),
        "mask, 512 x 2048": rows(masked, plain_mask, wide, 512),
        "gelu, 512 x 2048": rows(gelu, plain_gelu, wide, 512),
    }


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernels whose names hold one of these; all of them if there is none")
    parser.add_argument("--runs", type=int, default=9)
    given = parser.parse_args()
    print(f"{'kernel, block':32} {'lens':>10} {'NumPy':>10} {'times':>6}")
    for name, (kernel, plain) in pairs().items():
        if given.names and not any(part in name for part in given.names):
            continue
        got, want = np.asarray(kernel(), np.float64), np.asarray(plain(), np.float64)
        assert np.allclose(got, want, rtol=2e-2, atol=2e-2), f"{name}: the two do not agree"
        taken = [(seconds(kernel), seconds(plain)) for _ in range(given.runs)]
        lens, numpy = (min(column) for column in zip(*taken, strict=True))
        print(f"{name:32} {1e3 * lens:7.1f} ms {1e3 * numpy:7.1f} ms {lens / numpy:6.2f}", flush=True)


if __name__ == "__main__":
    main()
