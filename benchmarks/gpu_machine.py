"""The machine for plgpu.kernel beside plain JAX and JAX's simulator of the GPU, written to benchmarks/gpu_machine.md.

    uv run --all-groups python benchmarks/gpu_machine.py [--limit 15]

The kernels of tests/gpu_kernels.py, right and wrong, those that JAX ships (tests/gpu_library.py), and those of tokamax
(gpu_tokamax.py) where it is installed: the lock does not have it, add `--with tokamax`. The simulator runs in processes
of its own, which are ended after so many seconds: it hangs on some. Seconds of the machine: the second run, tracing
included; of the simulator: its only run, without the start of the process. Neither needs a GPU.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
from gpu_tokamax import ON_B200, TOKAMAX
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import backend

import gpu_library
from gpu_kernels import MISTAKES, RIGHT
from gpu_library import BLACKWELL, LIBRARY, SMS
from pallas_puzzles.lens import gpu

OUT = Path(__file__).with_suffix(".md")
KERNELS: dict[str, Callable[[], Any]] = {**RIGHT, **LIBRARY, **BLACKWELL}
KERNELS["transposed_ragged_dot"] = gpu_library.grouped_backward


def machine(make: Callable[[], Any], chip: str) -> tuple[gpu.Run, Any, float]:
    """(the second run, what is right, its seconds)."""
    with gpu_library.on_a_gpu():
        fn, args, want = make()
        gpu.run(fn, *args, sms=SMS, chip=chip)
        start = time.perf_counter()
        run = gpu.run(fn, *args, sms=SMS, chip=chip)
    return run, want, time.perf_counter() - start


@contextlib.contextmanager
def _four_sms() -> Iterator[None]:
    before = backend.get_default_device
    backend.get_default_device = lambda: gpu_library._DEVICE
    try:
        yield
    finally:
        backend.get_default_device = before


def simulate(names: list[str], limit: float) -> None:
    """Prints what JAX's simulator makes of each kernel: seconds and error, or the end of its message, and ends the
    process. After the first that fails or hangs nothing more is run."""
    params = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")
    for name in names:
        timer = threading.Timer(limit, _result, (name, f"> {limit:g}", "not done"))
        timer.start()
        make = KERNELS[name] if name in KERNELS else MISTAKES[name][0]
        with gpu_library.on_a_gpu(), _four_sms(), plgpu.force_gpu_interpret_mode(params):
            fn, args, want = make()
            start = time.perf_counter()
            try:
                got = jax.block_until_ready(fn(*args))
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                word = next((line for line in lines if "RACE" in line), lines[-1]).replace("|", "/")
                word = re.sub(r" at 0x\w+", "", word)[:90]
                _result(name, f"{time.perf_counter() - start:.2f}", word)
        timer.cancel()
        _result(name, f"{time.perf_counter() - start:.2f}", f"{gpu_library.error(got, want):.1e}", last=False)
    os._exit(0)


def _result(name: str, seconds: str, word: str, last: bool = True) -> None:
    print(f"RESULT {name}|{seconds}|{word}", flush=True)
    if last:
        os._exit(0)


def simulated(names: list[str], limit: float) -> dict[str, tuple[str, str]]:
    """(seconds, error or message) of JAX's simulator for each kernel."""
    found: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in found]:
        command = [sys.executable, __file__, "--limit", str(limit), "--simulate", *left]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        for line in results:
            name, seconds, word = line.removeprefix("RESULT ").split("|", 2)
            found[name] = seconds, word
        if not results:
            found[left[0]] = "", "the process ends"
        print(f"simulated {len(found)} of {len(names)}", flush=True)
    return found


def ours(name: str, make: Callable[[], Any], chip: str) -> tuple[str, ...]:
    """What the machine makes of a kernel: its error, findings, notes, seconds and cycles."""
    try:
        run, want, seconds = machine(make, chip)
    except gpu.Beyond as error:
        return name, f"not followed: {error}", "", "", "", ""
    kinds = ", ".join(dict.fromkeys(f.kind for f in run.findings)) or "none"
    notes = ", ".join(dict.fromkeys(f.kind for f in run.notes))
    error = f"{gpu_library.error(run.outputs, want):.1e}"
    return name, error, kinds, notes, f"{seconds:.3f}", f"{run.counts.cycles:.0f}"


_NOTES = """\
What stands under findings is true of these kernels. store-in-flight: blackwell_matmul ends without waiting for its last
copies out of SMEM, for which JAX's simulator refuses it, too. reused: transposed_ragged_dot refills a slot of SMEM
while a wgmma that nobody has waited for may still read it; its error is what comes of that when the product takes
place as late as it may. On an H200 60 runs of it were right. Where the simulator finds a race in a right kernel, it
skips inline_mgpu (the named barriers), or compares Refs that share memory as a whole (memory shared by two Refs)."""


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=15, help="seconds that the simulator gets for a kernel")
    parser.add_argument("--simulate", nargs="+", metavar="NAME", help="run these in the simulator, and print")
    options = parser.parse_args()
    if options.simulate:
        simulate(options.simulate, options.limit)
    theirs = simulated([*KERNELS, *MISTAKES], options.limit)
    lines = [
        "# The machine for GPU kernels",
        "",
        f"Written by `benchmarks/gpu_machine.py`. JAX {jax.__version__}, on a CPU with {os.cpu_count()} cores. "
        "Small shapes; errors are relative to the largest value of plain JAX.",
        "",
        "| kernel | error | findings | notes | machine, s | cycles | JAX's simulator, s | its error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, make in KERNELS.items():
        lines.append(row(*ours(name, make, "b200" if name in BLACKWELL else "h100"), *theirs[name]))
        print(lines[-1], flush=True)
    lines += ["", _NOTES]
    if importlib.util.find_spec("tokamax") is not None:
        lines += ["", f"tokamax {importlib.metadata.version('tokamax')}, its kernels for Hopper and for Blackwell:", ""]
        lines += ["| kernel | error | findings | notes | machine, s | cycles |", "|---|---|---|---|---|---|"]
        for name, make in {**TOKAMAX, **ON_B200}.items():
            lines.append(row(*ours(name, make, "b200" if name in ON_B200 else "h100")))
            print(lines[-1], flush=True)
    lines += ["", "| mistake | the machine finds | machine, s | simulator, s | what it says, or its error |"]
    lines += ["|---|---|---|---|---|"]
    for name, (make, *_) in MISTAKES.items():
        run, _, seconds = machine(make, "h100")
        kinds = ", ".join(dict.fromkeys(f.kind for f in [*run.findings, *run.notes]))
        lines.append(row(name, kinds, f"{seconds:.3f}", *theirs[name]))
        print(lines[-1], flush=True)
    OUT.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
