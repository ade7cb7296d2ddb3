"""Four ways to cut a model, on one device and on several: checked, timed, and how they scale. Writes scaling.md.

    python benchmarks/scaling.py [--devices 2] [--size large|small] [--out FILE]

Needs jax and numpy alone; on a CPU, JAX_NUM_CPU_DEVICES=2 makes two devices of it. Sharding and lax collectives only:

    data parallel     the gradients of a layer; the rows are cut, the gradients summed (psum)
    tensor parallel   an MLP; the hidden layer is cut, the results summed (psum)
    FSDP              the gradients of several layers; rows and weights are cut, and each layer's weights gathered
                      before use (all_gather); their gradients come back as parts of a sum (psum_scatter)
    experts           a layer of experts; rows and experts are cut, rows go to their experts and back (all_to_all)

Values: at a small size in float32 against the same computation in NumPy, and at the size that is timed against one
device. Strong scaling: the same work on more devices. Weak scaling: as much work for each device as the one had.
Times: median and spread of ROUNDS rounds, each of as many calls in a row as take ROUND_S, by the clock of the host.
"""

import argparse
import dataclasses
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

OUT = Path(__file__).with_suffix(".md")
ROUNDS, ROUND_S = 9, 0.15
ROWS, COLUMNS, ALL = P("x", None), P(None, "x"), P()


@dataclasses.dataclass(frozen=True)
class Size:
    """rows: of the batch, on one device. layers: of FSDP. experts: of the layer of experts."""

    rows: int
    d: int
    f: int
    layers: int
    experts: int
    dtype: Any


SIZES = {
    "large": Size(16_384, 4_096, 16_384, 4, 8, jnp.bfloat16),  # 4.4 TFLOP for each MLP: it keeps an H200 busy
    "small": Size(64, 32, 64, 2, 8, jnp.float32),
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """local: what each device does with its parts. shapes, cuts: of the arguments, and how they are cut.

    flops: of all devices, without what is computed twice. sent: bytes that each device sends, where every collective
    goes around a ring. routed: whether the last argument says which expert a row goes to.
    """

    name: str
    local: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    cuts: list[Any]
    out_cuts: Any
    flops: float
    sent: float
    routed: bool = False


# --- the four schemes ------------------------------------------------------------------------------------------------


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jax.nn.relu(x @ w1) @ w2


def loss(weights: Any, x: Any, y: Any) -> Any:
    """Half of the summed squares, in float32. weights: pairs of matrices."""
    for w1, w2 in weights:
        x = x + mlp(x, w1, w2)
    return 0.5 * jnp.sum((x - y).astype(jnp.float32) ** 2) / x.shape[1]


def data_parallel(n: int, s: Size, rows: int) -> Scheme:
    def local(x: Any, y: Any, w1: Any, w2: Any) -> Any:
        return lax.psum(jax.grad(loss)([(w1, w2)], x, y), "x")[0]

    nbytes = 2 * s.d * s.f * jnp.dtype(s.dtype).itemsize
    return Scheme(
        "data parallel", local, [(rows, s.d)] * 2 + [(s.d, s.f), (s.f, s.d)], [ROWS, ROWS, ALL, ALL], (ALL, ALL),
        10 * rows * s.d * s.f, 2 * (n - 1) / n * nbytes,
    )  # fmt: skip


def tensor_parallel(n: int, s: Size, rows: int, f: int) -> Scheme:
    def local(x: Any, w1: Any, w2: Any) -> Any:
        return lax.psum(mlp(x, w1, w2), "x")

    return Scheme(
        "tensor parallel", local, [(rows, s.d), (s.d, f), (f, s.d)], [ALL, COLUMNS, ROWS], ALL,
        4 * rows * s.d * f, 2 * (n - 1) / n * rows * s.d * jnp.dtype(s.dtype).itemsize,
    )  # fmt: skip


def fsdp(n: int, s: Size, rows: int) -> Scheme:
    def whole(parts: Any) -> Any:
        return jax.tree.map(lambda part: lax.all_gather(part, "x", tiled=True), parts)

    def gathered_loss(parts: Any, x: Any, y: Any) -> Any:
        layer = jax.checkpoint(lambda x, part: x + mlp(x, *whole(part)))  # gathers again on the way back
        for part in parts:
            x = layer(x, part)
        return 0.5 * jnp.sum((x - y).astype(jnp.float32) ** 2) / x.shape[1]

    def local(x: Any, y: Any, *parts: Any) -> Any:
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        return jax.tree.leaves(jax.grad(gathered_loss)(pairs, x, y))  # the gradient of all_gather is psum_scatter

    nbytes = 2 * s.layers * s.d * s.f * jnp.dtype(s.dtype).itemsize
    return Scheme(
        "FSDP", local, [(rows, s.d)] * 2 + [(s.d, s.f), (s.f, s.d)] * s.layers, [ROWS] * (2 + 2 * s.layers),
        [ROWS] * (2 * s.layers), (12 * s.layers - 2) * rows * s.d * s.f, 3 * (n - 1) / n * nbytes,
    )  # fmt: skip


def experts(n: int, s: Size, rows: int) -> Scheme:
    def local(x: Any, w1: Any, w2: Any, to: Any) -> Any:
        order = jnp.argsort(to)  # each expert gets as many rows: see route
        sent = x[order].reshape(s.experts, -1, x.shape[1])
        came = lax.all_to_all(sent, "x", split_axis=0, concat_axis=1, tiled=True)  # (experts / n, rows of all, d)
        h = jax.nn.relu(jnp.einsum("erd,edf->erf", came, w1))
        back = lax.all_to_all(jnp.einsum("erf,efd->erd", h, w2), "x", split_axis=1, concat_axis=0, tiled=True)
        return jnp.zeros_like(x).at[order].set(back.reshape(x.shape))

    d, f = s.d // 2, s.f // 2
    cut = P("x", None, None)
    return Scheme(
        "experts", local, [(rows, d), (s.experts, d, f), (s.experts, f, d), (rows,)], [ROWS, cut, cut, P("x")], ROWS,
        4 * rows * d * f, 2 * (n - 1) / n * rows / n * d * jnp.dtype(s.dtype).itemsize, routed=True,
    )  # fmt: skip


def schemes(n: int, s: Size, grown: int) -> Iterator[Scheme]:
    """The four on n devices. grown: how many times the work of one device."""
    rows = s.rows * grown
    yield data_parallel(n, s, rows)
    yield tensor_parallel(n, s, s.rows, s.f * grown)
    yield fsdp(n, s, rows)
    yield experts(n, s, rows)


# --- running them ----------------------------------------------------------------------------------------------------


def route(rows: int, count: int, chunks: int) -> np.ndarray:
    """Which expert each row goes to: in each of so many chunks as many rows for each expert, in random order."""
    rng = np.random.default_rng(1)
    return np.concatenate([rng.permutation(np.arange(rows // chunks) % count) for _ in range(chunks)]).astype(np.int32)


def program(scheme: Scheme, mesh: Any) -> Callable[..., Any]:
    return jax.jit(
        jax.shard_map(scheme.local, mesh=mesh, in_specs=tuple(scheme.cuts), out_specs=scheme.out_cuts, check_vma=False)
    )


def mesh_of(n: int) -> Any:
    return jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def arguments(scheme: Scheme, mesh: Any, s: Size, chunks: int) -> list[Any]:
    """Drawn by the devices, each array as its cut says; the same values on any number of devices."""

    def one(i: int, shape: tuple[int, ...], cut: Any) -> Any:
        place = NamedSharding(mesh, cut)
        if scheme.routed and i == len(scheme.shapes) - 1:
            return jax.device_put(route(shape[0], s.experts, chunks), place)
        scale = 1.0 if i == 0 else shape[-2] ** -0.5
        key = jax.random.key(i)
        draw = jax.jit(lambda: (scale * jax.random.normal(key, shape)).astype(s.dtype), out_shardings=place)
        return draw()

    return [one(i, shape, cut) for i, (shape, cut) in enumerate(zip(scheme.shapes, scheme.cuts, strict=True))]


def off(got: Any, want: Any) -> float:
    """The largest relative distance of two lists of arrays: |a - b| / |b|."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    arrays = ((np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)) for a, b in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in arrays)


def in_numpy(name: str, args: list[np.ndarray]) -> Any:
    """What a scheme should return, from whole arrays in float64."""
    if name == "tensor parallel":
        x, w1, w2 = args
        return np.maximum(x @ w1, 0) @ w2
    if name == "experts":
        x, w1, w2, to = args
        rows = [np.maximum(row @ w1[e], 0) @ w2[e] for row, e in zip(x, to.astype(int), strict=True)]
        return np.stack(rows)
    x, y, *weights = args
    pairs, seen = list(zip(weights[::2], weights[1::2], strict=True)), []
    for w1, w2 in pairs:
        h = x @ w1
        seen.append((x, h))
        x = x + np.maximum(h, 0) @ w2
    back = (x - y) / x.shape[1]
    found: list[np.ndarray] = []
    for (w1, w2), (x, h) in zip(reversed(pairs), reversed(seen), strict=True):
        inner = (back @ w2.T) * (h > 0)
        found = [x.T @ inner, np.maximum(h, 0).T @ back, *found]
        back = back + inner @ w1.T
    return found


def time_of(fn: Callable[..., Any], args: list[Any]) -> list[float]:
    """Seconds of a call, round by round."""
    jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    calls = max(2, math.ceil(ROUND_S / (time.perf_counter() - start)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
            if jax.devices()[0].platform == "cpu":  # where devices are threads, collectives of many calls may block
                jax.block_until_ready(out)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - start) / calls)
    return rounds


def check_small(n: int) -> Iterator[str]:
    s = SIZES["small"]
    with jax.default_matmul_precision("highest"):
        for scheme in schemes(n, s, 1):
            args = arguments(scheme, mesh_of(n), s, n)
            wide = [np.asarray(a).astype(np.float64) for a in args]
            got, want = program(scheme, mesh_of(n))(*args), in_numpy(scheme.name, wide)
            far = off(got, want)
            if not far < 1e-5:
                raise SystemExit(f"{scheme.name} on {n} devices is wrong: {far:.1e} from NumPy")
            yield f"{scheme.name} {far:.0e}"


def row(scheme: Scheme, n: int, s: Size, chunks: int, one: float | None, grown: int) -> tuple[str, Any, float]:
    """(a line of the table, the values, the median in seconds). one: the median of one device."""
    args = arguments(scheme, mesh_of(n), s, chunks)
    fn = program(scheme, mesh_of(n))
    values = fn(*args)
    rounds = time_of(fn, args)
    median, spread = statistics.median(rounds), max(rounds) - min(rounds)
    faster = "" if one is None else f"{one * grown / median:.2f} x"
    share = "" if one is None else f"{one * grown / median / n:.0%}"
    kind = "one device" if n == 1 else "weak" if grown > 1 else "strong"
    cells = [scheme.name, kind, str(n), f"{scheme.flops / 1e12:.2f}", f"{scheme.sent / 2**20:,.0f}"]
    cells += [f"{median * 1e3:.3f}", f"{spread * 1e3:.3f}", f"{scheme.flops / median / 1e12 / n:,.0f}", faster, share]
    return "| " + " | ".join(cells) + " |", values, median


def links(n: int, nbytes: int) -> str:
    """How fast a psum alone is."""
    x = jax.device_put(jnp.ones((n, nbytes // 2), jnp.bfloat16), NamedSharding(mesh_of(n), ROWS))
    summed = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh_of(n), in_specs=ROWS, out_specs=ALL, check_vma=False)
    seconds = statistics.median(time_of(jax.jit(summed), [x]))
    rate = 2 * (n - 1) / n * nbytes / seconds / 1e9
    return (
        f"A psum of {nbytes / 2**20:,.0f} MiB a device, alone, takes {seconds * 1e3:.2f} ms: "
        f"each device sends {rate:,.0f} GB/s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    n, s = asked.devices, SIZES[asked.size]
    if len(jax.devices()) < n:
        raise SystemExit(f"{n} devices are needed, {len(jax.devices())} are here. On a CPU: JAX_NUM_CPU_DEVICES={n}")
    checked = [f"{k}: {', '.join(check_small(k))}" for k in (1, n)]
    print(*checked, sep="\n", flush=True)
    table, apart, began = [], [], time.perf_counter()
    for first, strong, weak in zip(schemes(1, s, 1), schemes(n, s, 1), schemes(n, s, n), strict=True):
        line, alone, one = row(first, 1, s, n, None, 1)
        table.append(line)
        print(line, flush=True)
        line, values, _ = row(strong, n, s, n, one, 1)
        table.append(line)
        far = off(values, alone)
        if not far < 2e-2:
            raise SystemExit(f"{first.name} on {n} devices is {far:.1e} from one device")
        apart.append(f"{first.name} {far:.0e}")
        print(line, apart[-1], flush=True)
        del values, alone
        table.append(row(weak, n, s, n, one, n)[0])
        print(table[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    device = jax.devices()[0]
    psum = links(n, 2 * s.d * s.f * 2)
    text = [
        "# One device and several: sharding and lax collectives",
        "",
        f"`python benchmarks/scaling.py --devices {n} --size {asked.size}`; jax {importlib.metadata.version('jax')}, "
        f"{n} x {device.device_kind}, {jnp.dtype(s.dtype).name}. Rows {s.rows:,}, d {s.d:,}, f {s.f:,}; FSDP: "
        f"{s.layers} layers; {s.experts} experts of {s.d // 2:,} x {s.f // 2:,}.",
        f"Median of {ROUNDS} rounds of {ROUND_S:g} s at least; spread: the slowest less the fastest.",
        "",
        "Strong: the work of one device, on all of them. Weak: as much work for each device. Scales: how many times",
        "the work of one device is done in its time. FSDP computes x @ w1 again on the way back; TFLOP has it once.",
        "",
        "| scheme | scaling | devices | TFLOP | MiB sent by each | ms | spread, ms | TFLOP/s, each | scales | ideal |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *table,
        "",
        psum,
        "",
        "Values, relative distance from NumPy in float64 at a small size in float32, by number of devices: "
        f"{'; '.join(checked)}.",
        f"At this size, from one device: {', '.join(apart)}.",
        "",
    ]
    asked.out.write_text("\n".join(text), "utf-8")
    print(*text, sep="\n")


if __name__ == "__main__":
    main()
