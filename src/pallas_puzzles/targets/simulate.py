"""JAX's own TPU simulator behind one call, which always comes back."""

import contextlib
import functools
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ir.capture import CHIP, SourceLine, forget_other_grids
from ..ir.meshes import on_tpus, tpu_mesh
from ..ir.modes import built_for
from ..lens.watchdog import TimeLimit, plant, reader_line, time_limit
from ..platforms import tpu_attached

_CLOCKS = 256  # for devices and copies; JAX's default leaves all copies of a device one between them
_LOOK_S = 0.1  # how often a waiting caller looks up, so that Ctrl-C and time limits reach it
_GRACE_S = 3.0  # how long a stopped simulation may take to unwind before it is left behind
_COMPILED = "Kernels run compiled, on this machine's {}."
_FAST = (
    "Fast mode: no TPU here, so XLA runs the kernels' programs on the {0}, by JAX's HLO interpreter. It forgives "
    "mistakes that a TPU does not; verdicts come from elsewhere."
)
_SIMULATOR_ALONE = threading.Lock()  # the simulated memory is one global of JAX's


class SimulatorError(Exception):
    """What JAX's simulator objects to, in one line; `line` is the reader's, where known; `__cause__` the original.

    running: the kernel ran, and this was seen in it; else it did not come to that.
    """

    def __init__(self, message: str, line: SourceLine | None = None, running: bool = True) -> None:
        super().__init__(message)
        self.line, self.running = line, running


class SimulatorUnable(SimulatorError):
    """JAX's simulator cannot run the kernel, which says nothing about the kernel."""


class SimulatorTimeout(SimulatorError):
    """The kernel did not end under JAX's simulator."""


def setup(devices: int = 1) -> None:
    """Turns JAX's TPU simulator on for this process, unless it has a TPU, and says in one line which of the two it is.

    Kernels then need no `interpret=`. On a machine with a GPU, JAX's default device becomes the CPU. devices: how many
    there have to be. Where there is no TPU, JAX makes them out of the CPU, which it can do before it starts.
    """
    if devices > 1 and (problem := _make_devices(devices)):
        print(problem)
    if jax.default_backend() == "tpu":
        print(_COMPILED.format(jax.devices()[0].device_kind))
        return
    from jax.experimental.pallas import tpu as pltpu

    pltpu.set_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))
    if jax.sharding.get_abstract_mesh() != tpu_mesh(CHIP):
        jax.sharding.use_abstract_mesh(tpu_mesh(CHIP)).__enter__()  # in this thread, for good: a notebook has one
    gpu = ""
    if jax.default_backend() != "cpu":
        jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
        gpu = f", and the {jax.default_backend()} device stays idle"
    threading.Thread(target=_warm, name="warm up", daemon=True).start()
    many = f", and this CPU counts as {len(jax.devices())} devices" if len(jax.devices()) > 1 else ""
    print(f"No TPU here: kernels run on the CPU, in JAX's TPU simulator{many}{gpu}.")


@contextlib.contextmanager
def fast_execution() -> Iterator[None]:
    """In the block, every pallas_call for a TPU that is traced runs as fast as this machine can, and one line says how.

    On a TPU kernels run compiled. Elsewhere JAX's HLO interpreter turns each into a plain XLA program, a loop over its
    grid, for this machine's GPU if JAX has one, else for its CPU. No wait, no race and no uninitialised memory is seen
    there: it is to train with, and never to judge by. Functions under jax.jit are traced anew in the block, and again
    behind it.
    """
    device = jax.devices()[0]
    if jax.default_backend() == "tpu":
        print(_COMPILED.format(device.device_kind))
        yield
        return
    from jax.experimental.pallas import tpu as pltpu

    print(_FAST.format("CPU" if device.platform == "cpu" else f"GPU ({device.device_kind})"))
    # without the TPU that setup() has told JAX of: what is compiled here is for this device
    empty = jax.sharding.AbstractMesh((), ())
    with jax.default_device(device), jax.sharding.use_abstract_mesh(empty), pltpu.force_tpu_interpret_mode(True):  # type: ignore[arg-type]
        yield


def _make_devices(count: int) -> str:
    """Has JAX take the CPU for so many devices. Where that is no longer possible, a sentence on what to do."""
    if not tpu_attached():
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
            jax.config.update("jax_platforms", "cpu")
    if (found := len(jax.devices())) >= count:
        return ""
    if tpu_attached():
        return f"This notebook needs {count} devices, and this machine has {found}: open it on one without a TPU."
    return (
        f"This notebook needs {count} devices, and JAX has already started with {found}. Restart Python (in Jupyter: "
        "Kernel, Restart; in Colab: Runtime, Restart session), and run this cell before any other that uses JAX."
    )


def _warm() -> None:
    """Imports what the first check would import, ours and JAX's simulator's, half a second, while the reader reads."""
    from ..diagnose import diagnose  # noqa: F401
    from .tpu import lowering  # noqa: F401

    with contextlib.suppress(ImportError):
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401


@contextlib.contextmanager
def tpu_simulation(chip: str = CHIP, **params: Any) -> Iterator[Any]:
    """Every pallas_call that is built in the block runs in JAX's TPU simulator, on the CPU. Yields the mode of it.
    params: of pltpu.InterpretParams."""
    from jax.experimental.pallas import tpu as pltpu

    strict = pltpu.InterpretParams(uninitialized_memory="nan", **params)
    with contextlib.ExitStack() as stack:
        if jax.default_backend() != "cpu":
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(on_tpus(tpu_mesh(chip)))
        stack.enter_context(pltpu.force_tpu_interpret_mode(strict))
        forget_other_grids()
        yield strict


def simulate(
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 30.0,
    chip: str = CHIP,
    detect_races: bool = False,
    modes: Sequence[str] = ("on_wait",),
    **kwargs: Any,
) -> Any:
    """The outputs of `fn(*args, **kwargs)` under JAX's TPU simulator: the pytree that fn returns, of NumPy arrays.

    Uninitialised memory is NaN (integers: their maximum). detect_races follows every DMA and semaphore; its cost grows
    with the square of the number of grid steps (512 steps: twice the time), so ask for it where a kernel has DMAs.
    Raises SimulatorError for anything that goes wrong, in one line, and SimulatorTimeout when the kernel waits for
    ever or takes too long. Afterwards the simulator is as good as new, whatever happened.
    modes: when copies take place, "on_wait" (as late as possible) or "eager" (at once). A kernel has to be right in
    both; the outputs are those of the last one.
    """
    outputs = None
    for mode in modes:
        outputs = _simulated(fn, args, kwargs, timeout_s, chip, detect_races=detect_races, dma_execution_mode=mode)
    return outputs


def _simulated(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], timeout_s: float, chip: str, **params: Any
) -> Any:
    """`simulate` in one mode. params: of pltpu.InterpretParams."""
    from jax.experimental.pallas import tpu as pltpu

    def work() -> Any:
        with tpu_simulation(chip, vector_clock_size=_CLOCKS, **params) as mode:
            arrays = jax.tree.map(jnp.asarray, args)
            try:
                outputs = fn(*arrays, **kwargs)
            except ValueError as error:
                if "Only interpret mode is supported" not in str(error):
                    raise
                # it was built before there was a simulator
                outputs = built_for(functools.partial(fn, **kwargs), mode)(*arrays)
            outputs = jax.tree.map(np.asarray, outputs)
            jax.effects_barrier()
            return outputs

    with _SIMULATOR_ALONE, objections() as heard:
        try:
            outputs = _bounded(work, timeout_s)
        finally:
            pltpu.reset_tpu_interpret_mode_state()
    if heard.words:
        raise SimulatorError(_one_line(RuntimeError(heard.words[0])))
    return outputs


@contextlib.contextmanager
def objections(*unable: type[Exception]) -> "Iterator[_Listener]":
    """What goes wrong in the block is a SimulatorError. unable: what else JAX raises for what it does not support."""
    heard, logger = _Listener(sys.stdout), logging.getLogger("jax._src.callback")
    logger.addFilter(heard)
    try:
        with contextlib.redirect_stdout(heard):
            yield heard
    except SimulatorTimeout:
        raise
    except Exception as error:
        cause = heard.first or error
        kind = SimulatorUnable if _is_inability(cause, *unable) else SimulatorError
        raise kind(_one_line(cause), _line_of(cause), running=bool(heard.errors)) from error
    finally:
        logger.removeFilter(heard)


def _is_inability(error: BaseException, *unable: type[Exception]) -> bool:
    """Whether JAX's simulator has met something that it does not know, rather than a mistake in the kernel."""
    if _not_there(error):
        return False
    if isinstance(error, NotImplementedError) or re.search(
        r"NotImplementedError|XLA CPU\S* backend does not|passing `AbstractMesh`", str(error)
    ):
        return True
    unforeseen = (AssertionError, AttributeError, KeyError, TypeError, UnboundLocalError, *unable)
    return isinstance(error, unforeseen) and raised_in_jax(error)


def raised_in_jax(error: BaseException) -> bool:
    """Whether it is JAX's own code that has raised an exception."""
    innermost = _frames(error)[-1:]
    return any(frame.f_globals.get("__name__", "").startswith("jax.") for frame in innermost)


def _stores_into_accumulator(error: BaseException) -> bool:
    """Whether this is how JAX's GPU simulator (jax 0.11.2, 0.12.0) fails at `acc[...] = ...`: it takes its own key for
    the accumulator. The error is of shapes, as if the kernel had a wrong one."""
    innermost = _frames(error)[-1:] if isinstance(error, ValueError) else []
    return any(frame.f_code.co_name.startswith("_wgmma_accumulator_store") for frame in innermost)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _not_there(error: BaseException) -> bool:
    """Whether memory was asked for that a device has not allocated: (space, buffer, device, core)."""
    return isinstance(error, KeyError) and bool(re.fullmatch(r"\('\w+', \d+, \d+, \d+\)", str(error)))


class _Released(BaseException):
    """Raised in a thread that waits in the simulator for something that will never happen."""


def _bounded(work: Callable[[], Any], timeout_s: float) -> Any:
    """The result of work(), which runs in a thread of its own so that this one stays free to stop it."""
    done = threading.Event()
    result: list[Any] = []
    errors: list[BaseException] = []
    limit = time_limit(timeout_s, "the kernel")

    def body() -> None:
        try:
            with limit:
                result.append(work())
        except BaseException as error:  # also what the reader's code raises to get out: SystemExit and its like
            errors.append(error)
        done.set()

    thread = threading.Thread(target=body, name="simulator", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    try:
        while not done.wait(_LOOK_S) and time.monotonic() < deadline:
            pass
        late = not done.is_set()
        waiting = _waiting(timeout_s) if late else None
    finally:  # also on Ctrl-C, and when a time limit of the caller's strikes
        stopped = done.is_set() or _stop(limit, thread, done)
    if waiting is not None:
        raise waiting
    if not stopped:
        raise SimulatorTimeout(
            f"the kernel ran for more than {timeout_s:g} s and could not be stopped: most likely it holds a loop that "
            "never ends, which goes on in the background until Python is restarted"
        )
    if errors and isinstance(errors[0], TimeLimit):
        raise SimulatorTimeout(str(errors[0]), errors[0].line)
    if late and not result:
        raise SimulatorTimeout(f"the kernel ran for more than {timeout_s:g} s and was stopped")
    if errors:
        raise errors[0]
    return result[0]


def _stop(limit: time_limit, thread: threading.Thread, done: threading.Event) -> bool:
    """Ends a simulation: Python code by its time limit, what waits in the simulator by an exception. False: in vain."""
    limit.expire()
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        for ident, _ in _simulator_frames():
            if ident != thread.ident:
                plant(ident, _Released)
        if done.wait(_LOOK_S):
            return True
    return False


# JAX's simulator runs a kernel's loads, stores and waits as Python callbacks, in threads of XLA's. A wait for a
# semaphore is a loop around Condition.wait(0.1 s), so an exception planted in its thread gets through, and XLA hands it
# to whoever called the kernel. Not public API: the module's name, and that each callback has the `source_info` of its
# equation as an argument. Both seen on jax 0.11.2 and 0.12.0.1; without them a wait that never ends is left behind in
# its thread, and a message has no line.
_SIMULATOR_MODULE = "jax._src.pallas.mosaic.interpret"


def _simulator_frames() -> Iterator[tuple[int, FrameType]]:
    """Thread and frame, innermost first, of everything that the simulator does at this moment."""
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith(_SIMULATOR_MODULE):
                yield ident, frame
            frame = frame.f_back


def _line_in(frames: Iterable[FrameType]) -> SourceLine | None:
    for frame in frames:
        traceback = getattr(frame.f_locals.get("source_info"), "traceback", None)
        if traceback is not None:
            return reader_line(traceback.as_python_traceback())
    return None


def _waiting(timeout_s: float) -> SimulatorTimeout | None:
    """What to say when the kernel waits in the simulator right now."""
    frames = [frame for _, frame in _simulator_frames()]
    names = {frame.f_code.co_name for frame in frames}
    if "wait" not in names:
        return None
    line = _line_in(frames)
    where = f" at {line}" if line else ""
    if "dma_wait" in names:
        why = "for a DMA: it was never started, or somebody has waited for it already"
    else:
        why = "for a semaphore that nobody signals any more"
    return SimulatorTimeout(f"after {timeout_s:g} s the kernel still waits{where} {why}", line)


def _line_of(error: BaseException) -> SourceLine | None:
    return _line_in(reversed(_frames(error))) or reader_line(error.__traceback__)


class _Listener:
    """Stands in for stdout: keeps what the simulator prints about a kernel for itself, passes everything else on."""

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout
        self._newline_due = False
        self.words: list[str] = []
        self.errors: list[BaseException] = []

    @property
    def first(self) -> BaseException | None:
        """The first error. Where there are several devices, the others only say that this one has failed."""
        told = [e for e in self.errors if not str(e).startswith("Computation failed on ")]
        return next(iter(told or self.errors), None)

    def write(self, text: str) -> int:
        if text.startswith("RACE DETECTED") or re.match(r"Semaphore \d+ has non-zero count", text):
            self.words.append(text)
            self._newline_due = True
            return len(text)
        if self._newline_due and text == "\n":
            self._newline_due = False
            return 1
        return self._stdout.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def filter(self, record: logging.LogRecord) -> bool:
        """Of the logger that JAX reports a failing callback to: takes the error, and drops the wall of text."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, _Released | TimeLimit):
            self.errors.append(error)
        return False


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    if _not_there(error):
        return "a copy goes to a device that has not entered the kernel: wait for it at a barrier first"
    if _stores_into_accumulator(error):
        return "it has no stores into accumulators, such as acc[...] = ..."
    if text.startswith("RACE DETECTED"):
        accesses = re.findall(r"(read|write) of .*, (\S+?):(\d+)(?::\d+)? \(", text)
        where = " and ".join(f"the {kind} at {re.split(r'[\\/]', file)[-1]}:{line}" for kind, file, line in accesses)
        return f"data race: nothing orders {where or 'two accesses'} to the same buffer; wait for the DMA in between"
    if left := re.match(r"Semaphore \d+ has non-zero count .*: (\d+)$", text):
        return f"a semaphore still counts {left[1]} when the kernel ends: every signal and every DMA needs its wait"
    if isinstance(error, jax.errors.JaxRuntimeError):
        causes = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", text, re.MULTILINE)
        if causes:
            return ": ".join(causes[-1])
    first = text.splitlines()[0].rstrip() if text else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
