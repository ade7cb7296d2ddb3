"""Measures one function after the other, and keeps what there is when one of them fails."""

import contextvars
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..view.roofline import Chip
from .conditions import conditions, device_chip
from .meter import WALL, DeviceMeter, Timing
from .results import Results, Row, Saved
from .work import MEASURED, OpByOp, Size, Work, drawn, speed_of_light

_TOLERANCE = {2: 2e-2, 1: 5e-1}  # by the bytes of an element, relative to the largest element; for all else:
_FINE_TOLERANCE = 2e-3  # float32, whose products may be computed as TF32
LIMIT_S = 120.0  # for one call with its compilation, and for timing one
_LOOK_S = 0.2  # how often a waiting caller looks up, so that Ctrl-C reaches it
_DEAD = "The device answers no more after this: nothing else could be measured. What came before is kept."


class Hangs(Exception):
    """A call has not come back from the device, and nothing can end it but the end of the process."""


def measure(
    works: Iterable[Work],
    results: Results | None = None,
    meter: DeviceMeter | None = None,
    chip: Chip | None = None,
    saved: Saved = lambda results: None,
    limit_s: float = LIMIT_S,
) -> Results:
    """Times all functions of all works at all sizes on the default device.

    results: where the rows are added. meter: whoever times (None: the device's own clock). chip: whose peaks count, by
    default the device's. saved: called after each size, with all there is. limit_s: how long a call may take. A
    function that raises, that does not end, or that computes something else than its peers, gets a row that says so,
    and no time. One that does not end keeps the device: nothing is measured after it.
    """
    results = results if results is not None else Results()
    results.conditions |= conditions()
    chip = chip or device_chip()
    if chip is None:
        device = results.conditions["device"]
        results.note(f"The peaks of this {device} are not known here: no share of the speed of light is given.")
    meter = meter or DeviceMeter()
    for work in works:
        for size in work.sizes:
            alive = _one_size(work, size, chip, meter, results, limit_s)
            saved(results)
            if not alive:
                results.note(_DEAD)
                saved(results)
                return results
    if why := getattr(meter, "why", ""):
        results.note(
            f"{sum(row.how == WALL for row in results.rows)} of {len(results.rows)} times are of the wall, with the "
            f"dispatch, and with the L2 as it is: {why}."
        )
    return results


def _one_size(work: Work, size: Size, chip: Chip | None, meter: DeviceMeter, results: Results, limit_s: float) -> bool:
    """Adds the rows of one size. False if the device is lost."""
    blank = Row(work.name, size.title, size.dtype, "", results.conditions["device"], MEASURED)
    rows = {name: dataclasses.replace(blank, who=name) for name in work.calls(size)}
    try:
        _fill(rows, work, size, chip, meter, limit_s)
        alive = _alive()
    except Hangs:
        for row in rows.values():
            if row.median_s is None and not row.problem:
                row.problem = "another call keeps the device, and does not end"
        alive = False
    own = rows[work.own].problem
    if size.tried and own and alive:
        results.note(f"{work.name} is not measured in {size.tried}: {own.rstrip('.')}.")
    else:
        results.rows += rows.values()
    return alive


def _fill(rows: dict[str, Row], work: Work, size: Size, chip: Chip | None, meter: DeviceMeter, limit_s: float) -> None:
    """Enters what is found into the rows. Raises Hangs."""
    try:
        args = in_time(lambda: jax.block_until_ready(drawn(size.args)), limit_s)
    except Exception as error:
        for row in rows.values():
            row.problem = f"its arguments could not be made: {sentence(error)}"
        return
    ready = _ready(work.calls(size), args, rows, limit_s)
    if not ready:
        return
    shapes = jax.eval_shape(work.calls(size)[next(iter(ready))], *args)
    light = speed_of_light(dataclasses.replace(size, args=args), shapes, chip) if chip else None
    for row in rows.values():
        row.light_s, row.bound, row.hbm_bytes, row.flops = light or (None, "", 0.0, size.flops)
    for name, timing in _timings(meter, ready, rows, limit_s).items():
        rows[name] = dataclasses.replace(rows[name], **dataclasses.asdict(timing))


def in_time[T](call: Callable[[], T], limit_s: float) -> T:
    """What a call returns, in a thread that is left behind where it waits on the device for ever. Raises Hangs then."""
    found: list[tuple[bool, Any]] = []

    def work() -> None:
        try:
            found.append((True, call()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(work,), name="a call on the device", daemon=True
    )
    thread.start()
    end = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < end:
        thread.join(min(_LOOK_S, limit_s))
    if not found:
        raise Hangs(f"it did not end within {limit_s:g} s, like a kernel that waits for what never comes")
    returned, value = found[0]
    if not returned:
        raise value
    return value


def _got[T](row: Row, call: Callable[[], T], limit_s: float) -> T | None:
    """What a call returns; None where it raises, and the row says why. Raises Hangs."""
    try:
        return in_time(call, limit_s)
    except Exception as error:
        row.problem = sentence(error)
        if isinstance(error, Hangs):
            raise
        return None


def _ready(
    calls: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], rows: Mapping[str, Row], limit_s: float
) -> dict[str, Callable[[], Any]]:
    """The calls that run and agree, compiled and warm. The last peer's result is what the others are compared with."""
    ready: dict[str, Callable[[], Any]] = {}
    want: tuple[str, Any] | None = None

    def told(call: Callable[[], Any]) -> tuple[Any, str]:
        """(its results, what is wrong with them)."""
        got = jax.block_until_ready(call())
        if want is None or not (off := _difference(got, want[1], args)):
            return got, ""
        return got, f"{off} those of {want[0]}: the time of a wrong answer means nothing"

    for name in reversed([*calls]):
        options = getattr(calls[name], "compiler_options", None)
        run = calls[name] if isinstance(calls[name], OpByOp) else jax.jit(calls[name], compiler_options=options)
        call = functools.partial(run, *args)
        if (found := _got(rows[name], functools.partial(told, call), limit_s)) is not None:
            got, rows[name].problem = found
        if not rows[name].problem:
            want = want or (name, got)
            ready[name] = call
    return dict(reversed(ready.items()))


def _difference(got: Any, want: Any, args: Any) -> str:
    """ "" or in what the results differ from others."""
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(want)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return f"its results have the shapes {[x.shape for x in ours]}, not"
    floats = [x.dtype.itemsize for x in jax.tree.leaves(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    least = 2 if 1 in floats else 4  # products of 8-bit floats are added with fewer bits than float32 has
    same = all(bool(_agree(a, b, least=least)) for a, b in zip(ours, theirs, strict=True))
    return "" if same else "its results differ from"


@functools.partial(jax.jit, static_argnames="least")
def _agree(got: Any, want: Any, *, least: int) -> Any:
    """Whether no element differs by more than is allowed, or is NaN in only one of the two."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return jnp.all(got == want)
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    scale = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0))
    allowed = max(_TOLERANCE.get(size, _FINE_TOLERANCE) for size in (want.dtype.itemsize, least)) * scale
    return jnp.all((jnp.abs(a - b) <= allowed) | (a == b) | (jnp.isnan(a) & jnp.isnan(b)))


def _timings(
    meter: DeviceMeter, ready: Mapping[str, Callable[[], Any]], rows: Mapping[str, Row], limit_s: float
) -> dict[str, Timing]:
    """All of them in turns; one by one where that fails, so that only the one that fails has no time."""
    try:
        return dict(zip(ready, in_time(lambda: meter.times([*ready.values()]), limit_s * len(ready)), strict=True))
    except Hangs as error:
        for name in ready:
            rows[name].problem = f"while {', '.join(ready)} took turns: {error}"
        raise
    except Exception:
        found = {
            name: _got(rows[name], functools.partial(meter.times, [call]), limit_s) for name, call in ready.items()
        }
        return {name: times[0] for name, times in found.items() if times is not None}


def _alive() -> bool:
    """Whether the device still computes: after an illegal access a GPU refuses everything until the process ends."""
    try:
        return in_time(lambda: int(jax.block_until_ready(jnp.arange(8).sum())), LIMIT_S) == 28
    except Exception:
        return False


def sentence(error: BaseException) -> str:
    """What went wrong, in a sentence for the table."""
    if isinstance(error, Hangs):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    words = lines[0][:200].rstrip(".")
    if "RESOURCE_EXHAUSTED" in words or "out of memory" in words.lower():
        return f"there is not enough memory on the device ({words}); other programs may hold it"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
