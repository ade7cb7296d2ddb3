"""What a measurement holds under: device, versions, clocks, and whoever else is at the device."""

import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib

from ..installation import version
from ..targets.gpu.chips import CHIPS as GPUS
from ..targets.tpu.chips import CHIPS as TPUS
from ..view.roofline import Chip

SAME = ("device", "driver", "jax", "jaxlib", "pallas_puzzles")  # what two runs should share to be compared
_BUSY_PERCENT = 5  # what a GPU may be used while we do nothing
_SLOW = 0.9  # a clock below this share of the highest is told
_FIELDS = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "utilization.gpu")
_TIMEOUT_S = 10.0

Ask = Callable[[Sequence[str]], str]


def device_chip() -> Chip | None:
    """The chip of the default device, where its peaks are known: an H100 on a PCIe card has others than one on SXM."""
    chips: list[Chip] = [*GPUS.values(), *TPUS.values()]
    return next((chip for chip in chips if chip.kind == jax.devices()[0].device_kind), None)  # type: ignore[attr-defined]


def conditions() -> dict[str, Any]:
    """Device, versions and time, as plain data."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "pallas_puzzles": version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


# --- nvidia-smi ------------------------------------------------------------------------------------------------------


def smi(arguments: Sequence[str]) -> str:
    """What nvidia-smi prints; "" where there is none, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", *_index(), *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    return ""


def _index() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return ["-i", visible or "0"]


def driver() -> str:
    return smi(["--query-gpu=driver_version", "--format=csv,noheader"]).strip().partition("\n")[0]


def others(ask: Ask = smi, wait_s: float = 0.5) -> str:
    """Who else is at the GPU, in a sentence; "" if nobody is, or nobody can tell. Nothing of ours may be running."""
    time.sleep(wait_s)
    used = _numbers(ask(["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]).strip())
    told = ask(["--query-compute-apps=pid,process_name", "--format=csv,noheader"])
    found = [line.split(",", 1) for line in told.splitlines() if "," in line]
    names = [name.strip().rpartition("/")[2] for pid, name in found if pid.strip() != str(os.getpid())]
    if len(names) == len(found):
        names = names[1:]  # in a container, one of them is this program under another number
    who = ", ".join(sorted(set(names)))
    if used and used[0] > _BUSY_PERCENT:
        beside = f" ({who})" if who else ""
        busy = f"it is used {used[0]:.0f}% while we do nothing{beside}"
        return f"The GPU is busy: {busy}. Expect slower and unsteady times."
    return f"Other programs hold memory of the GPU, but do not use it now: {who}." if who else ""


@contextlib.contextmanager
def watched(results: Any) -> Iterator[None]:
    """What is measured meanwhile has its driver, its clocks, and notes on who else is at the GPU and how it ran."""
    results.conditions["driver"] = driver()
    results.note(others())
    query = f"--query-gpu={','.join(_FIELDS)}"
    words = ["nvidia-smi", *_index(), query, "--format=csv,noheader,nounits", "-lms", "250"]
    with tempfile.TemporaryFile("w+") as file, contextlib.ExitStack() as running:
        with contextlib.suppress(OSError):  # there is no nvidia-smi
            process = running.enter_context(subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL, text=True))
            running.callback(process.terminate)
        yield
        running.close()
        file.seek(0)
        results.conditions |= summary(file.read())
    results.note(slowed(results.conditions))


def summary(lines: str) -> dict[str, float]:
    """Medians and extremes of what nvidia-smi saw while the GPU was used, by name; empty where nothing was.

    In MHz, degrees Celsius, watts.
    """
    seen = [values for line in lines.splitlines() if len(values := _numbers(line)) == len(_FIELDS)]
    used = [values for values in seen if values[4] > 50]
    if not used:
        return {}
    clocks, highest, heat, power, _ = zip(*used, strict=True)
    return {
        "sm_clock_mhz": statistics.median(clocks),
        "lowest_sm_clock_mhz": min(clocks),
        "highest_sm_clock_mhz": max(highest),
        "temperature_c": max(heat),
        "power_w": statistics.median(power),
    }


def slowed(clocks: Mapping[str, Any]) -> str:
    """A sentence if the GPU ran clearly below its highest clock at times, as hot or power-limited ones do; else ""."""
    lowest = clocks.get("lowest_sm_clock_mhz")
    if lowest is None or lowest >= _SLOW * clocks["highest_sm_clock_mhz"]:
        return ""
    return (
        f"At times the GPU ran at {lowest:.0f} MHz, of {clocks['highest_sm_clock_mhz']:.0f} MHz at the most (up to "
        f"{clocks['temperature_c']:.0f} C): it was hot, or at its power limit. That slows matrix products first."
    )


def _numbers(line: str) -> list[float]:
    try:
        return [float(word) for word in line.split(",")]
    except ValueError:
        return []
