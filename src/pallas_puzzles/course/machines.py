"""Who judges which kind of kernel: all in which a pallas_call for a TPU and a plgpu.kernel differ, in one place."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..diagnose.budgets import Budget
    from ..diagnose.findings import Diagnosis, Finding, Tolerance
    from ..diagnose.rounding import Course
    from ..ir.capture import Programs
    from ..lens.machine import Run
    from ..targets.tpu.lowering import Refusal


class Machine(Protocol):
    """What is asked about one kind of kernel.

    runs_all: whether JAX's own simulator runs whatever the course asks for, so that what it cannot run is not taken for
    right.
    """

    runs_all: bool

    @property
    def second(self) -> str:
        """Whose word counts beside the lens's."""

    @property
    def confirmed(self) -> str:
        """What a pass says of it, in a sentence; "" where that goes without saying."""

    def figures(self, run: "Run") -> list[Any]:
        """What each kernel costs."""

    def diagnose(self, run: "Run", want: Any, tolerance: "Tolerance | None") -> "Diagnosis":
        """What is wrong with a run."""

    def rounded(self, run: "Run", want: Any, course: "Course") -> "Diagnosis | None":
        """What is wrong with how its results are rounded."""

    def narrow_kinds(self, run: "Run") -> frozenset[str]:
        """The kinds of places where it rounds to 16 bits."""

    def over_budget(self, run: "Run", costs: list[Any], budget: "Budget") -> "list[Finding]":
        """A right answer that costs too much."""

    def refusal(self, fn: Callable[..., Any], args: Sequence[Any], chip: str) -> "Refusal | None":
        """Why the front end of the compiler refuses a function."""

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        """The outputs under JAX's own simulator. Raises SimulatorError."""

    def run_again(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        """The outputs of what the lens has passed, by whoever has the second word. Raises SimulatorError."""


class Tpu:
    """Kernels for a TPU."""

    runs_all, second, confirmed = True, "JAX's TPU simulator", ""

    def figures(self, run: "Run") -> list[Any]:
        from ..lens.machine import figures

        return [figures(t) for t in run.traces]

    def diagnose(self, run: "Run", want: Any, tolerance: "Tolerance | None") -> "Diagnosis":
        from ..diagnose.diagnose import diagnose

        return diagnose(run, want, tolerance)

    def rounded(self, run: "Run", want: Any, course: "Course") -> "Diagnosis | None":
        from ..diagnose.diagnose import rounded

        return rounded(run, want, course)

    def narrow_kinds(self, run: "Run") -> frozenset[str]:
        from ..diagnose.narrow import narrow_kinds, of_call

        return narrow_kinds([of_call(trace) for trace in run.traces])

    def over_budget(self, run: "Run", costs: list[Any], budget: "Budget") -> "list[Finding]":
        from ..diagnose.budgets import over_budget

        return over_budget(run, costs, budget)

    def refusal(self, fn: Callable[..., Any], args: Sequence[Any], chip: str) -> "Refusal | None":
        from ..targets.tpu.lowering import refusal

        return refusal(fn, *args, chip=chip)

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        from ..targets.simulate import simulate

        return simulate(fn, *args, timeout_s=timeout_s, chip=chip)

    run_again = simulate


class Gpu:
    """Kernels for a GPU."""

    runs_all = False

    @property
    def second(self) -> str:
        from ..targets.gpu_here import gpu_here

        found = gpu_here()
        return f"this machine's GPU ({found.name})" if found else "JAX's GPU simulator"

    @property
    def confirmed(self) -> str:
        from ..targets.gpu_here import gpu_here

        found = gpu_here()
        return f"Confirmed by the GPU ({found.name}), compiled." if found else ""

    def figures(self, run: "Run") -> list[Any]:
        return [launched.counts for launched in run.calls]

    def diagnose(self, run: "Run", want: Any, tolerance: "Tolerance | None") -> "Diagnosis":
        from ..diagnose.gpu_run import diagnose_gpu
        from ..lens import gpu

        assert isinstance(run, gpu.Run), "see machine_of"
        return diagnose_gpu(run, want, tolerance)

    def rounded(self, run: "Run", want: Any, course: "Course") -> "Diagnosis | None":
        from ..diagnose.gpu_run import rounded_gpu
        from ..lens import gpu

        assert isinstance(run, gpu.Run), "see machine_of"
        return rounded_gpu(run, want, course)

    def narrow_kinds(self, run: "Run") -> frozenset[str]:
        from ..diagnose.narrow import narrow_kinds, of_launched
        from ..lens import gpu

        assert isinstance(run, gpu.Run), "see machine_of"
        return narrow_kinds([of_launched(launched) for launched in run.calls])

    def over_budget(self, run: "Run", costs: list[Any], budget: "Budget") -> "list[Finding]":
        from ..diagnose.gpu_budgets import over_budget
        from ..lens import gpu

        assert isinstance(run, gpu.Run), "see machine_of"
        return over_budget(run, budget)

    def refusal(self, fn: Callable[..., Any], args: Sequence[Any], chip: str) -> "Refusal | None":
        from ..targets.gpu.chips import chip as chip_named
        from ..targets.gpu.lowering import NO_LAYOUT, refusal

        refused = refusal(fn, *args, chip=chip_named("h100"))
        if refused is not None and refused.sentence == NO_LAYOUT:  # of any chip, and the search takes seconds
            return refused
        if refused is None or refusal(fn, *args, chip=chip_named("b200")) is None:  # it may be for one of them alone
            return None
        return refused

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        from ..targets.gpu_simulator import simulate

        return simulate(fn, *args, timeout_s=timeout_s)

    def run_again(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        from ..targets.gpu.chips import chip as chip_named
        from ..targets.gpu.lowering import refusal
        from ..targets.gpu_here import gpu_here
        from ..targets.gpu_simulator import run_compiled
        from ..targets.simulate import SimulatorUnable

        found = gpu_here()
        if found is None:
            return self.simulate(fn, args, timeout_s, chip)
        if refusal(fn, *args, chip=chip_named(found.chip)) is not None:
            raise SimulatorUnable("it is a kernel for another GPU")
        return run_compiled(fn, *args, timeout_s=timeout_s)


class Devices(Tpu):
    """A shard_map over several TPUs, with kernels or without."""

    def figures(self, run: "Run") -> list[Any]:
        from ..lens.devices import Run as OnDevices

        return [run.counts] if isinstance(run, OnDevices) else []

    def diagnose(self, run: "Run", want: Any, tolerance: "Tolerance | None") -> "Diagnosis":
        from ..diagnose.devices import diagnose_devices
        from ..lens import devices

        assert isinstance(run, devices.Run), "see machine_of"
        return diagnose_devices(run, want, tolerance)

    def over_budget(self, run: "Run", costs: list[Any], budget: "Budget") -> "list[Finding]":
        from ..diagnose.devices import over_budget
        from ..lens import devices

        assert isinstance(run, devices.Run), "see machine_of"
        return over_budget(run, budget)

    def simulate(self, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float, chip: str) -> Any:
        from ..targets.simulate import simulate

        modes = ("eager", "on_wait")  # each finds what the other does not
        return simulate(fn, *args, timeout_s=timeout_s, chip=chip, detect_races=True, modes=modes)

    run_again = simulate


TPU, GPU, DEVICES = Tpu(), Gpu(), Devices()


def machine_of(run: "Run") -> Machine:
    """Who judges what ran."""
    from ..lens import devices, gpu

    return GPU if isinstance(run, gpu.Run) else DEVICES if isinstance(run, devices.Run) else TPU


def reached(programs: "Programs") -> Machine:
    """Who judges a function whose traces are these, also when none of them came to its end."""
    return GPU if _FOR_GPU in programs else DEVICES if _ON_A_MESH in programs else TPU


def trace(
    fn: Callable[..., Any],
    *args: Any,
    programs: "Programs | None" = None,
    detail: bool = True,
    **kwargs: Any,
) -> "Run":
    """Runs `fn(*args, **kwargs)` with every kernel in the machine of its kind.

    programs: see ir.capture.capture. detail: see lens.machine.trace.
    """
    from ..ir.capture import ForGpu, ForMesh
    from ..lens import devices, gpu, machine

    known: Programs = {} if programs is None else programs
    if _FOR_GPU not in known and _ON_A_MESH not in known:
        try:
            return machine.trace(fn, *args, programs=known, detail=detail, **kwargs)
        except ForGpu:
            known[_FOR_GPU] = True
        except ForMesh:
            known[_ON_A_MESH] = True
    if _FOR_GPU in known:
        return gpu.run(fn, *args, **kwargs)
    return devices.run(fn, *args, programs=known, detail=detail, **kwargs)


_FOR_GPU = "for a GPU"  # in the programs of a function that reaches such a kernel
_ON_A_MESH = "on a mesh"  # the same of a shard_map over several devices
