"""Pallas Puzzles: puzzle notebooks for JAX's kernel language, and a lens that tells the truth about your kernels."""

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from .installation import WrongVersion, require_versions, too_old, untested
from .platforms import spare_libtpu

spare_libtpu()  # before anything asks JAX for a device

_problem = too_old()

if TYPE_CHECKING:
    from .app.borrowed import own_kernels, solved_function
    from .course.check import check, check_call
    from .course.hints import hint
    from .course.holes import unwritten
    from .course.inputs import Budget, case, integers, normal, uniform
    from .course.progress import progress
    from .speed.choose import bench
    from .speed.levels import compare
    from .speed.work import op_by_op
    from .targets.simulate import fast_execution
    from .view.curve import Curve
    from .view.gpu_report import gpu_report
    from .view.show import show
    from .view.tpu_report import tpu_report

# Imported when somebody asks for it: the `puzzles` command needs none of it, and it takes most of a second.
_COMES_FROM = {
    **dict.fromkeys(("check", "check_call"), "course.check"),
    **dict.fromkeys(("Budget", "case", "integers", "normal", "uniform"), "course.inputs"),
    "Curve": "view.curve",
    "fast_execution": "targets.simulate",
    "hint": "course.hints",
    "op_by_op": "speed.work",
    "own_kernels": "app.borrowed",
    "progress": "course.progress",
    "solved_function": "app.borrowed",
    "unwritten": "course.holes",
}
# The same, of what is displayed at once
_DISPLAYED = {
    "bench": "speed.choose",
    "compare": "speed.levels",
    "gpu_report": "view.gpu_report",
    "show": "view.show",
    "tpu_report": "view.tpu_report",
}

__all__ = [
    "Budget", "Curve", "bench", "case", "check", "check_call", "compare", "fast_execution", "gpu_report", "hint",
    "integers", "normal", "op_by_op", "own_kernels", "progress", "setup", "show", "solved_function", "tpu_report",
    "uniform", "unwritten",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What these two name. With a JAX that is too old, says so; the `puzzles` command can still be imported."""
    module = _COMES_FROM.get(name) or _DISPLAYED.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _problem:
        raise WrongVersion(_problem)
    found = getattr(importlib.import_module(f".{module}", __name__), name)
    return _displaying(found) if name in _DISPLAYED else found


@functools.cache
def _displaying(make: Any) -> Any:
    """A function of ours that displays what it returns, and is told which holes are still to be filled."""
    from .course.holes import unwritten
    from .view.verdict import emit

    asks = "unwritten" in inspect.signature(make).parameters

    @functools.wraps(make)
    def displayed(*args: Any, **options: Any) -> Any:
        holes = {"unwritten": unwritten(args[0])} if asks and args else {}
        return emit(make(*args, **holes, **options))

    return displayed


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def setup(accelerator: str = "tpu", devices: int = 1) -> None:
    """Lets kernels run on this machine, whatever it has, and says in one line how they run.

    accelerator: what the notebook's kernels are for. "tpu": JAX's TPU simulator runs them, unless there is a TPU.
    "gpu": our own machine runs them on the CPU, unless there is an H100, H200 or B200.
    devices: how many a notebook for TPUs needs. Without TPUs, the CPU counts as so many.
    Raises ValueError for another word, and WrongVersion when JAX is too old; says so when it is newer than any that was
    tested.
    """
    if accelerator not in ("tpu", "gpu"):
        raise ValueError(f'setup({accelerator!r}): choose "tpu" or "gpu"; setup() is for TPU kernels')
    require_versions()
    if note := untested():
        print(note)
    # The checker is imported here, before the set-up starts a thread that imports parts of it: two threads that import
    # the same modules at once may each get half of one.
    from .course import check  # noqa: F401

    if accelerator == "gpu":
        from .targets.gpu_here import setup as turn_on_gpu

        turn_on_gpu()
    else:
        from .targets.simulate import setup as turn_on

        turn_on(devices)
