"""What runs kernels for a GPU here: this machine's GPU, or our own machine on the CPU. A notebook's setup("gpu")."""

import dataclasses
import sys
import threading
from typing import Any

import jax
import numpy as np

from ..ir.gpu import Kernel
from ..ir.gpu_calls import run_on_cpu
from ..lens.gpu import launched
from ..platforms import gpu_attached


class KernelError(RuntimeError):
    """What is wrong with a kernel that was called, with the reader's line. IPython shows no traceback of JAX's."""

    def _render_traceback_(self) -> list[str]:
        return [f"KernelError: {self}"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU of this machine that the course's kernels run on. chip: as which of ours they are compiled."""

    name: str
    chip: str


_CHIPS = {"9.0": "h100", "10.0": "b200", "10.3": "b200"}  # by their compute capability


def gpu_here() -> Gpu | None:
    """The GPU that JAX's kernels run on by default, where the course's kernels are for such a one."""
    device = _first_gpu()
    chip = _CHIPS.get(str(getattr(device, "compute_capability", "")))
    return Gpu(device.device_kind, chip) if chip else None


def _first_gpu() -> Any:
    return jax.local_devices()[0] if jax.default_backend() == "gpu" else None


def setup() -> None:
    """Has kernels run compiled where there is a GPU for them, else in our own machine, and says in one line which.

    With a GPU that is too old, JAX's default device becomes the CPU.
    """
    from jax.experimental.pallas import tpu as pltpu

    # that of another notebook: a kernel for a GPU would be built for it
    pltpu.set_tpu_interpret_mode(None)  # type: ignore[arg-type]
    threading.Thread(target=_warm, name="warm up", daemon=True).start()
    if found := gpu_here():
        run_on_cpu(None)
        jax.config.update("jax_default_device", None)
        print(f"Kernels run compiled, on this machine's {found.name}.")
        return
    run_on_cpu(_run)
    idle = ""
    if device := _first_gpu():
        jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
        idle = f", and the {device.device_kind} stays idle"
    elif gpu_attached():
        idle = ", as JAX finds no GPU that it can use"
    print(f"No H100, H200 or B200 here: kernels run on the CPU, in a machine of Pallas Puzzles' own{idle}.")


def _run(kernel: Kernel) -> list[np.ndarray]:
    """The outputs of a kernel that somebody has called. Raises KernelError."""
    from ..diagnose.gpu import findings_of

    ran = launched(kernel)
    for finding in findings_of(ran.findings):
        line = f"\n    {finding.line}   {finding.line.text}" if finding.line is not None else ""
        raise KernelError(f"{kernel.name}: {finding.cause}{line}")
    return ran.outputs


def _warm() -> None:
    """Does what the first check would have to do first, while the reader reads; the process, where it will be kept."""
    from ..diagnose import diagnose, gpu_run  # noqa: F401
    from . import gpu_simulator
    from .gpu import lowering  # noqa: F401

    if "ipykernel" in sys.modules:
        gpu_simulator.start(compiled=gpu_here() is not None)
