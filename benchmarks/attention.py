"""The kernels of gpu_attention.py beside those of cuDNN, JAX and tokamax (if installed), on a Hopper GPU.

Writes a JSON file:

    PYTHONPATH=src python benchmarks/attention.py benchmarks/h200/attention.json [--seconds 200]

B4 S8192 H16 D128, bfloat16 (JAX's own: float16), normal inputs. The jobs take turns, in another order each round. An
H200 is at its power limit in most of them, and needs some calls to find a clock that it can keep: so a round calls each
job ten times, and then times thirty calls, one after the other. What differs from cuDNN's result has no time. Jobs with
"backward" in their names also compute the gradients of all three arrays; the values serve as the gradient that arrives.
They count 3.5 times the FLOPs. Then decoding, beside a copy of as many bytes, with rounds of one call and eight.
benchmarks/gpu.py makes the tables in gpu.md of the file.
"""

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measured
from jax.experimental.pallas.ops.gpu import attention_mgpu

B, S, H, D = 4, 8192, 16, 128
FLOPS = 4 * B * H * S * S * D  # causal: half of it
CLOSE = 0.02
CAUSAL_PAIRS = "the configuration that is chosen, causal (Puzzle 11)"
LONG, SHORT = (7, 10, 30), (9, 1, 8)  # rounds; in each, calls that are not timed, and calls that are
Job = tuple[str, bool, Callable[..., Any], bool]  # name, causal, function, whether its arrays are (B, S, H, D)


def jobs() -> Iterator[Job]:
    nb = measured.notebook("gpu_attention")
    yield "one warpgroup, slots (Puzzle 4)", False, functools.partial(nb.slotted, bkv=128), False
    yield "two warpgroups and a producer (Puzzle 5)", False, nb.shared, False
    yield "ping-pong (Puzzle 6)", False, nb.flash, False
    yield "ping-pong, 3 slots", False, functools.partial(nb.flash, slots=3), False
    yield "ping-pong, 64 keys, 4 slots", False, functools.partial(nb.flash, bkv=64, slots=4), False
    yield "the next scores first (Puzzle 6b)", False, nb.overlapped, False
    yield "the configuration that is chosen (Puzzle 11)", False, nb.best, False
    yield "no turns, causal (Puzzle 7)", True, nb.masked, False
    yield "causal (Puzzle 7b)", True, nb.causal, False
    yield CAUSAL_PAIRS, True, functools.partial(nb.best, causal=True), False
    for name, step in (("10b", nb.plain_step), ("10c", nb.queued_step)):
        for causal in (False, True):
            grads = functools.partial(_backward, nb, step, causal)
            yield f"forward + backward (Puzzle {name}){', causal' if causal else ''}", causal, grads, False
    for causal in (False, True):
        kind = ", causal" if causal else ""
        cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
        yield f"cuDNN{kind}", causal, cudnn, True
        yield f"cuDNN, forward + backward{kind}", causal, functools.partial(_vjp, cudnn), True
        if importlib.util.find_spec("tokamax"):
            tokamax = functools.partial(_tokamax, is_causal=causal)
            yield f"tokamax{kind}", causal, tokamax, True
            yield f"tokamax, forward + backward{kind}", causal, functools.partial(_vjp, tokamax), True
        tuned = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal)
        yield f"JAX's attention_mgpu{kind}", causal, functools.partial(_unscaled, tuned), True

    blocks: dict[str, Any] = {
        "block_q_dkv": 64,
        "block_kv_dkv": 64,
        "block_q_dq": 64,
        "block_kv_dq": 128,
        "compute_wgs_bwd": 2,
    }
    tuned = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, **blocks)
    mgpu = functools.partial(_vjp, functools.partial(_scaled, tuned))
    yield "JAX's attention_mgpu, forward + backward", False, mgpu, True  # it has no causal one


def _backward(nb: Any, step: Any, causal: bool, q: Any, k: Any, v: Any) -> Any:
    o, lse = nb.forward(q, k, v, causal=causal)
    return o, *nb.backward(q, k, v, o, lse, v, step=step, causal=causal)


def _tokamax(*arrays: Any, **how: Any) -> Any:
    sys.argv[1:] = []  # some versions read the flags of whoever calls them
    return importlib.import_module("tokamax").dot_product_attention(*arrays, implementation="mosaic", **how)


def _vjp(fn: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
    o, vjp = jax.vjp(fn, q, k, v)
    return o, *vjp(v)


def _scaled(tuned: Any, q: Any, k: Any, v: Any) -> Any:
    return attention_mgpu.attention((q * D**-0.5).astype(q.dtype), k, v, tuned)


def _unscaled(tuned: Any, q: Any, k: Any, v: Any) -> Any:
    return attention_mgpu.attention(q, k, v, tuned)  # it does not scale: its queries are scaled beforehand


def given(name: str, by_token: bool) -> list[Any]:
    key = jax.random.key(0)
    arrays = [jax.random.normal(jax.random.fold_in(key, i), (B, S, H, D), jnp.float32) for i in range(3)]
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    if "mgpu" in name:
        scale = 1 if "backward" in name else D**-0.5
        return [(arrays[0] * scale).astype(jnp.float16), *(x.astype(jnp.float16) for x in arrays[1:])]
    return arrays if by_token else [jnp.moveaxis(x, 2, 1).reshape(B * H, S, D) for x in arrays]


def compared(out: Any, by_token: bool) -> Any:
    """The first head of the first sequence, in float32; of all results, one below the other."""
    return jnp.concatenate([(x[0, :, 0] if by_token else x[0]).astype(jnp.float32) for x in jax.tree.leaves(out)])


def flops_of(name: str, causal: bool) -> float:
    return FLOPS / (2 if causal else 1) * (3.5 if "backward" in name else 1)


def measure(all_jobs: list[Job], seconds: float) -> dict[str, Any]:
    start = time.time()
    runs: dict[str, Any] = {}
    right: dict[tuple[bool, bool], Any] = {}
    for name, causal, fn, by_token in sorted(all_jobs, key=lambda job: "cuDNN" not in job[0]):
        run = jax.jit(lambda *a, fn=fn: fn(*a))
        args = given(name, by_token)
        try:
            out = compared(run(*args), by_token)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        want = right.setdefault((causal, "backward" in name), out)
        far = float(jnp.linalg.norm(out - want) / jnp.linalg.norm(want))
        if not far < CLOSE:
            print(f"{name}: differs from cuDNN by {far:.3f} of its norm", flush=True)
            continue
        runs[name] = run, args, flops_of(name, causal)
    rows = {}
    for name, each in in_turns({name: row[:2] for name, row in runs.items()}, LONG, start + seconds).items():
        median = statistics.median(each)
        rows[name] = {"seconds": median, "flops": runs[name][2], "rounds": len(each)}
        low, high, rate = min(each) * 1e3, max(each) * 1e3, runs[name][2] / median / 1e12
        print(f"{name}: {median * 1e3:.3f} ms ({low:.3f} to {high:.3f}), {rate:.0f} TFLOP/s", flush=True)
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}


def in_turns(
    runs: dict[str, tuple[Callable[..., Any], list[Any]]], plan: tuple[int, int, int], until: float
) -> dict[str, list[float]]:
    """The seconds of a call in each round, of all that had a turn before `until`. plan: LONG or SHORT."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    rounds, *calls = plan
    for turn in range(rounds):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if time.time() < until:
                found[name].append(_timed(*runs[name], *calls))
    return {name: each for name, each in found.items() if each}


def _timed(run: Callable[..., Any], args: list[Any], untimed: int, timed: int) -> float:
    for calls in (untimed, timed):
        start = time.perf_counter()
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)
    return (time.perf_counter() - start) / timed


# --- decoding: one query a sequence ----------------------------------------------------------------------------------

MANY, ALONE = (64, 8192), (1, 131_072)  # sequences, keys
HEADS, KV_HEADS, PAGE = 32, 8, 64
Decoding = dict[str, tuple[Callable[..., Any], list[Any], int, Any]]  # name -> function, arrays, bytes, right result


def bits(i: int, *shape: int) -> Any:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(i), shape, jnp.bfloat16)


def decoding_jobs(nb: types.SimpleNamespace, sequences: int, keys: int) -> Decoding:
    q, k, v = bits(0, sequences, HEADS, D), *(bits(i, sequences, KV_HEADS, keys, D) for i in (1, 2))
    lengths = jnp.full((sequences,), keys, jnp.int32)
    first = slice(0, min(sequences, 4))
    right = nb.decoding_spec(q[first], k[first], v[first], lengths[first])
    tokens = [q[:, None], *(jnp.moveaxis(x, 2, 1) for x in (k, v))]
    own, once = [q, k, v, lengths], k.nbytes + v.nbytes
    found: Decoding = {"copy": (jnp.copy, [k], once, None)}
    for parts in (1, 2, 4) if sequences > 1 else (1, 4, 16, 64):
        found[f"decode, {parts} parts"] = functools.partial(nb.decode, parts=parts), own, once, right
    found["cuDNN"] = cudnn_decode, tokens, once, right
    if sequences > 1:
        table = jax.random.permutation(jax.random.key(3), sequences * keys // PAGE).reshape(sequences, -1)
        pages = [x.reshape(KV_HEADS, -1, PAGE, D) for x in (k, v)]
        spread = nb.paged_spec(q[first], *pages, table[first], lengths[first])
        paged = functools.partial(nb.paged, parts=2)
        found[f"paged, pages of {PAGE}, 2 parts"] = paged, [q, *pages, table.astype(jnp.int32), lengths], once, spread
    return found


def cudnn_decode(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")[:, 0]


def measure_decoding(found: Decoding, seconds: float) -> dict[str, Any]:
    until, runs = time.time() + seconds, {}
    for name, (fn, args, _, right) in found.items():
        run = jax.jit(fn)
        try:
            out = run(*args)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        got, want = (jnp.zeros(1), jnp.ones(1)) if right is None else (out[: len(right)].astype(jnp.float32), right)
        far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        if right is not None and not far < CLOSE:
            print(f"{name}: differs from the spec by {far:.3f} of its norm", flush=True)
            continue
        runs[name] = run, args
    rows = {}
    for name, each in in_turns(runs, SHORT, until).items():
        median, nbytes = statistics.median(each), found[name][2]
        rows[name] = {"seconds": median, "bytes": nbytes, "rounds": len(each)}
        low, high = min(each) * 1e6, max(each) * 1e6
        print(f"{name}: {median * 1e6:.1f} us ({low:.1f} to {high:.1f}), {nbytes / median / 1e9:.0f} GB/s", flush=True)
    return rows


def decoding_table(found: dict[str, Any]) -> str:
    lines = [["sequences x keys", "kernel", "time", "rate", "of the copy's rate"]]
    for size, rows in found["decoding"].items():
        for name, row in rows.items():
            took, rate = row["seconds"] * 1e6, row["bytes"] / row["seconds"] / 1e9
            copied = rows["copy"]["seconds"] / row["seconds"]
            lines.append([size, name, f"{took:.1f} us", f"{rate:.0f} GB/s", f"{copied:.2f}"])
    told = (
        f"By the same command: one query of each head, {HEADS} heads over {KV_HEADS} of keys and values, D = {D}, "
        f"bfloat16; medians of {SHORT[0]} rounds of {SHORT[2]} calls. The copy is of the keys alone: it reads half of "
        "the bytes, and writes the other half."
    )
    return "\n\n".join(["## Decoding, measured", told, measured.markdown(lines)])


# --- the file --------------------------------------------------------------------------------------------------------


def table(file: Path) -> str:
    """What `main` has written, for gpu.md."""
    found = json.loads(file.read_text())
    told = (
        f"Written by `PYTHONPATH=src python benchmarks/attention.py benchmarks/h200/attention.json` on an "
        f"{found['device']} with jax {found['jax']}: B4 S8192 H16 D128, bfloat16 (JAX's own: float16), normal inputs, "
        f"medians of {LONG[0]} rounds in which all took turns, each with the dispatch of {LONG[2]} calls after "
        f"{LONG[1]} that were not timed. Causal kernels count half of the FLOPs, and the backward pass two and a half "
        "times those of the forward pass."
    )
    attention = ["## Attention, measured", told, _rates(found["rows"])]
    return "\n\n".join(attention + ([decoding_table(found)] if "decoding" in found else []))


def _rates(rows: dict[str, Any]) -> str:
    lines = [["kernel", "time", "rate", "of cuDNN's rate"]]
    for name, row in rows.items():
        kind = (", forward + backward" if "backward" in name else "") + (", causal" if "causal" in name else "")
        peer = rows[f"cuDNN{kind}"]["seconds"]
        took, rate = row["seconds"], row["flops"] / row["seconds"] / 1e12
        lines.append([name, f"{took * 1e3:.3f} ms", f"{rate:.0f} TFLOP/s", f"{peer / took:.2f}"])
    return measured.markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    asked = parser.parse_args()
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    found, nb = measure(list(jobs()), asked.seconds), measured.notebook("gpu_attention")
    found["decoding"] = {}
    for sequences, keys in (MANY, ALONE):
        rows = measure_decoding(decoding_jobs(nb, sequences, keys), 40)
        found["decoding"][f"{sequences} x {keys:,}"] = rows
    asked.file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
