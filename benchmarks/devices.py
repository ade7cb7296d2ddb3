"""The machine for several devices beside JAX's TPU simulator, written to benchmarks/devices.md.

    uv run --all-groups python benchmarks/devices.py [--devices 8] [--limit 20]

The kernels of tests/device_kernels.py, right and wrong. The simulator runs with race detection, in both of its modes,
as `check` asks it; it is stopped after so many seconds. Seconds of the machine and of the simulator: the second run of
a right kernel, tracing included, and the only run of a wrong one. The TPU's front end is asked, too.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

from device_kernels import CASES, HARMLESS, MISTAKES, SLOW
from pallas_puzzles.lens import devices
from pallas_puzzles.targets.simulate import SimulatorError, SimulatorTimeout, simulate
from pallas_puzzles.targets.tpu.lowering import refusal

OUT = Path(__file__).with_suffix(".md")


def right(got: Any, want: np.ndarray) -> bool:
    return np.allclose(got, want, atol=1e-3, equal_nan=True)


def machine(name: str, n: int, bug: str) -> tuple[str, float, devices.Run]:
    fn, args, want = CASES[name](n, bug)
    for _ in range(1 if bug else 2):
        start = time.perf_counter()
        run = devices.run(fn, *args)
        seconds = time.perf_counter() - start
    kinds = dict.fromkeys(f.kind for f in run.findings)
    said = ", ".join(kinds) or ("right" if right(run.outputs, want) else "other values")
    return said, seconds, run


def simulator(name: str, n: int, bug: str, mode: str, limit: float) -> tuple[str, float]:
    fn, args, want = CASES[name](n, bug)
    for _ in range(1 if bug else 2):
        start = time.perf_counter()
        try:
            got = simulate(fn, *args, timeout_s=limit, detect_races=True, modes=(mode,))
            said = (
                "right" if right(got, want) else "NaN" if np.isnan(got).sum() > np.isnan(want).sum() else "other values"
            )
        except SimulatorTimeout:
            said = "hangs"
        except SimulatorError as error:
            said = "race" if "race" in str(error) else "error" if "entered" not in str(error) else "not entered"
        seconds = time.perf_counter() - start
    return said, seconds


def rows(n: int, limit: float) -> Iterator[str]:
    harmless = {*HARMLESS, *SLOW}
    for name in CASES:
        for bug in ["", *MISTAKES[name], *(b for k, b in harmless if k == name)]:
            fn, args, _ = CASES[name](n, bug)
            refused = "refuses" if refusal(fn, *args) is not None else "takes it"
            said, seconds, run = machine(name, n, bug)
            modes = [simulator(name, n, bug, mode, limit) for mode in ("on_wait", "eager")]
            cells = [f"{word}, {s:.2f} s" for word, s in modes]
            what = bug + (" (no mistake)" if (name, bug) in harmless else "")
            yield f"| {name} | {what} | {said}, {seconds:.2f} s | {' | '.join(cells)} | {refused} |"
            print(name, bug, said, modes, refused, flush=True)
            if not bug:
                COSTS.append((name, run.counts))


COSTS: list[tuple[str, devices.Counts]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--limit", type=float, default=20.0)
    asked = parser.parse_args()
    table = list(rows(asked.devices, asked.limit))
    costs = [
        f"| {name} | {c.ici_bytes:,} | {c.bytes_hops:,} | {c.link_bytes:,} | {c.exposed_ici_bytes:,} | {c.ticks:,.1f} |"
        for name, c in COSTS
    ]
    versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
    text = [
        "# Kernels on several devices: the machine beside JAX's simulator",
        "",
        "`uv run --all-groups python benchmarks/devices.py "
        f"--devices {asked.devices} --limit {asked.limit:g}`; {versions}, "
        f"{os.cpu_count()} cores, {asked.devices} devices. Kernels: tests/device_kernels.py.",
        "",
        "| kernel | mistake | machine | simulator, on_wait | simulator, eager | TPU front end |",
        "|---|---|---|---|---|---|",
        *table,
        "",
        "What the right ones cost, over all devices, on a ring; ticks: of the machine's logical clock.",
        "",
        "| kernel | bytes sent | bytes x hops | busiest link | sent while nobody computes | ticks |",
        "|---|---:|---:|---:|---:|---:|",
        *costs,
        "",
    ]
    OUT.write_text("\n".join(text), "utf-8")


if __name__ == "__main__":
    main()
