"""How long calls take on this machine's accelerator: warm, L2 flushed, by the device's own clock where JAX has it."""

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DEVICE, WALL = "device time, from JAX's profiler", "wall time of calls that were enqueued in a row"
FLUSH_BYTES = 256 << 20  # more than twice the L2 of a B200
_SECONDS, _FEWEST, _MOST = 0.25, 10, 60  # that a measurement takes, and how often everything is called in it
_TRIES = 6  # of a profiler that fails
_SETS, _SET_S = 7, 0.03  # for wall time: sets of calls, and how long one should take

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call. low, high: between them lie four fifths of `count` calls (of sets of calls, for WALL)."""

    median_s: float
    low_s: float
    high_s: float
    count: int
    how: str
    l2_flushed: bool
    wall_s: float | None = None  # the same call in a row of calls, with its dispatch, L2 as it is


def timing(samples: Sequence[float], how: str, flushed: bool, wall_s: float | None = None) -> Timing:
    low, high = np.quantile(samples, [0.1, 0.9])
    return Timing(statistics.median(samples), float(low), float(high), len(samples), how, flushed, wall_s)


class DeviceMeter:
    """Times calls on JAX's default device.

    Before each call the L2 is filled with other data. Where the profiler gives no times that fit the calls, twice, the
    wall has to do, L2 not flushed; `why` then says what was wrong.
    """

    def __init__(self) -> None:
        has_device = jax.default_backend() != "cpu"
        self.why = "" if has_device else "a CPU has no device time"
        self._left = _TRIES if has_device else 0  # failures of the profiler until it is asked no more

    def times(self, calls: Sequence[Call]) -> list[Timing]:
        """One timing for each call, which is warm. The calls take turns, so that a clock that sinks is fair to all."""
        walls = [wall_times(call) for call in calls]
        middles = [statistics.median(each) for each in walls]
        rounds = round(_SECONDS / (sum(middles) + len(calls) * 2e-4))
        for _ in range(min(2, self._left)):
            samples, why = profiled_times(calls, max(_FEWEST, min(_MOST, rounds)))
            if samples:
                return [timing(s, DEVICE, True, wall) for s, wall in zip(samples, middles, strict=True)]
            self.why, self._left = why, self._left - 1
        return [timing(each, WALL, False, wall) for each, wall in zip(walls, middles, strict=True)]


def profiled_times(calls: Sequence[Call], rounds: int) -> tuple[list[list[float]], str]:
    """(seconds on the device of each call, in each round; ""), or ([], why there are none)."""
    buffer = jax.block_until_ready(flush_l2(jnp.zeros(FLUSH_BYTES // 4, jnp.int32)))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                flush_l2(buffer)
                out = call()
            jax.block_until_ready(out)

    try:
        found = device_times(profiled(run))
    except Exception as error:  # a profiler that does not work costs us no more than itself
        lines = str(error).strip().splitlines() or [""]
        return [], f"the profiler failed ({type(error).__name__}: {lines[0][:120]})"
    if len(found) != rounds * len(calls):
        return [], f"the profiler saw {len(found)} calls, and there were {rounds * len(calls)}"
    return [found[i :: len(calls)] for i in range(len(calls))], ""


def wall_times(call: Call) -> list[float]:
    """Seconds a call, in each of some sets of calls that are enqueued one after the other."""
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(2)])
    once = (time.perf_counter() - start) / 2
    count = max(2, min(200, round(_SET_S / max(once, 1e-9))))
    found = []
    for _ in range(_SETS):
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / count)
    return found


@jax.jit
def flush_l2(buffer: Any) -> Any:
    """Reads and writes more than an L2 holds. Its kernel marks where one call ends and the next one begins."""
    return buffer ^ 1


# --- JAX's profiler --------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that ran on the device. Times in ns."""

    name: str
    module: str
    start: float
    end: float


def profiled(run: Callable[[], None]) -> list[Event]:
    """What ran on the device while `run` did, in order. `run` waits for all that it starts."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory(prefix="pallas-puzzles-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = [*Path(folder).rglob("*.xplane.pb")]
        return [event for file in files for event in events_in(jax.profiler.ProfileData.from_file(str(file)))]


def events_in(data: Any) -> list[Event]:
    """The device's events in a ProfileData: of each stream of a GPU, or the programs of a TPU."""
    found = []
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        lines = [*plane.lines]
        ours = [line for line in lines if line.name.startswith("Stream") or line.name == "XLA Modules"]
        found += [event for line in ours for event in _events(line.events)]
    return sorted(found, key=lambda event: event.start)


def _events(events: Iterable[Any]) -> Iterator[Event]:
    for each in events:
        module = ""
        with contextlib.suppress(TypeError, ValueError, UnicodeDecodeError):
            module = str(dict(each.stats).get("hlo_module", ""))
        yield Event(each.name, module, each.start_ns, each.start_ns + each.duration_ns)


def device_times(events: Sequence[Event]) -> list[float]:
    """Seconds in which the device worked on each call: what lies between two flushes, without the gaps."""
    calls: list[list[Event]] = [[]]
    for event in events:
        if "flush_l2" in event.module + event.name or (not event.module and "xor" in event.name):
            calls.append([])
        else:
            calls[-1].append(event)
    return [_busy(call) for call in calls[1:] if call]


def _busy(events: Sequence[Event]) -> float:
    total, until = 0.0, 0.0
    for event in events:
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total / 1e9
