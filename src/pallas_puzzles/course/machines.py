"""Who judges which kind of kernel: all in which a pallas_call for a TPU and a plgpu.kernel differ, in one place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..budgets import devices as budgets_of_devices
from ..budgets import gpu as budgets_of_gpus
from ..budgets import tpu as budgets
from ..budgets.budget import Budget
from ..diagnose import devices, diagnose, gpu_run
from ..diagnose.findings import Diagnosis, Finding, Tolerance
from ..ir.capture import ForGpu, ForMesh, Programs
from ..lens import devices as lens_of_devices
from ..lens import gpu, machine
from ..targets import gpu_simulator, simulate
from ..targets.gpu.chips import chip as chip_named
from ..targets.gpu_here import gpu_here


class Machine:
    """What is asked about one kind of kernel: here those for a TPU, below what differs for others.

    runs_all: whether JAX's own simulator runs whatever the course asks for, so that what it cannot run is not taken for
    right. second: whose word counts beside the lens's. confirmed: what a pass says of it, in a sentence; "" where that
    goes without saying. figures: what each kernel costs. diagnose: what is wrong with a run. over_budget: what is said
    of a right answer that costs too much; it is given the figures.
    """

    runs_all = True
    second = property(lambda self: "JAX's TPU simulator")
    confirmed = property(lambda self: "")
    figures: Callable[[Any], list[Any]] = staticmethod(lambda run: [machine.figures(t) for t in run.traces])
    diagnose: Callable[[Any, Any, Tolerance | None], Diagnosis] = staticmethod(diagnose.diagnose)
    over_budget: Callable[[Any, list[Any], Budget], list[Finding]] = staticmethod(
        lambda run, costs, budget: budgets.over_budget(run, costs, budget)
    )

    def refusal(self, fn: Callable[..., Any], args: Sequence[Any], chip: str) -> Any:
        """Why the front end of the compiler refuses a function, a Refusal, or None."""
        from ..targets.tpu.lowering import refusal

        return refusal(fn, *args, chip=chip)

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        """The outputs under JAX's own simulator. Raises SimulatorError."""
        return simulate.simulate(fn, *args, timeout_s=timeout_s, chip=chip)

    def run_again(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        """The outputs of what the lens has passed, by whoever has the second word. Raises SimulatorError."""
        # Without jit, JAX compiles each operation around the kernels by itself: that takes long. But it knows the line
        # of what it objects to, and takes values that decide a shape, and a mesh without devices.
        try:
            return self.simulate(jax.jit(fn), args, timeout_s, chip)
        except simulate.SimulatorTimeout:
            raise
        except simulate.SimulatorError:
            return self.simulate(fn, args, timeout_s, chip)


class _Gpu(Machine):
    """Kernels for a GPU."""

    runs_all = False
    figures = staticmethod(lambda run: [launched.counts for launched in run.calls])
    diagnose = staticmethod(gpu_run.diagnose_gpu)
    over_budget = staticmethod(lambda run, costs, budget: budgets_of_gpus.over_budget(run, budget))

    @property
    def second(self) -> str:
        found = gpu_here()
        return f"this machine's GPU ({found.name})" if found else "JAX's GPU simulator"

    @property
    def confirmed(self) -> str:
        found = gpu_here()
        return f"Confirmed by the GPU ({found.name}), compiled." if found else ""

    def refusal(self, fn: Callable[..., Any], args: Sequence[Any], chip: str) -> Any:
        from ..targets.gpu.lowering import NO_LAYOUT, refusal

        refused = refusal(fn, *args, chip=chip_named("h100"))
        if refused is not None and refused.sentence == NO_LAYOUT:  # of any chip, and the search takes seconds
            return refused
        if refused is None or refusal(fn, *args, chip=chip_named("b200")) is None:  # it may be for one of them alone
            return None
        return refused

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        return gpu_simulator.simulate(fn, *args, timeout_s=timeout_s)

    def run_again(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        from ..targets.gpu.lowering import refusal

        found = gpu_here()
        if found is None:
            return self.simulate(fn, args, timeout_s, chip)
        if refusal(fn, *args, chip=chip_named(found.chip)) is not None:
            raise simulate.SimulatorUnable("it is a kernel for another GPU")
        return gpu_simulator.run_compiled(fn, *args, timeout_s=timeout_s)


class _Devices(Machine):
    """A shard_map over several TPUs, with kernels or without."""

    figures = staticmethod(lambda run: [run.counts] if isinstance(run, lens_of_devices.Run) else [])
    diagnose = staticmethod(devices.diagnose_devices)
    over_budget = staticmethod(lambda run, costs, budget: budgets_of_devices.over_budget(run, budget))

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        modes = ("eager", "on_wait")  # each finds what the other does not
        return simulate.simulate(fn, *args, timeout_s=timeout_s, chip=chip, detect_races=True, modes=modes)


TPU, GPU, DEVICES = Machine(), _Gpu(), _Devices()


def machine_of(run: machine.Run) -> Machine:
    """Who judges what ran."""
    return GPU if isinstance(run, gpu.Run) else DEVICES if isinstance(run, lens_of_devices.Run) else TPU


def reached(programs: Programs) -> Machine:
    """Who judges a function whose traces are these, also when none of them came to its end."""
    return GPU if _FOR_GPU in programs else DEVICES if _ON_A_MESH in programs else TPU


def remembered(programs: Programs) -> Programs:
    """What of the traces of one function holds for others of the same puzzle: that their kernels are for a GPU."""
    return {_FOR_GPU: True} if _FOR_GPU in programs else {}


def trace(fn: Callable[..., Any], *args: Any, programs: Programs | None = None, **kwargs: Any) -> machine.Run:
    """Runs `fn(*args, **kwargs)` with every kernel in the machine of its kind. programs: see ir.capture."""
    known: Programs = {} if programs is None else programs
    if _FOR_GPU not in known and _ON_A_MESH not in known:
        try:
            return machine.trace(fn, *args, programs=known, **kwargs)
        except ForGpu:
            known[_FOR_GPU] = True
        except ForMesh:
            known[_ON_A_MESH] = True
    if _FOR_GPU in known:
        return gpu.run(fn, *args, **kwargs)
    return lens_of_devices.run(fn, *args, programs=known, **kwargs)


_FOR_GPU = "for a GPU"  # in the programs of a function that reaches such a kernel
_ON_A_MESH = "on a mesh"  # the same of a shard_map over several devices
