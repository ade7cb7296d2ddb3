"""Pallas Puzzles: puzzle notebooks for JAX's kernel language, and a lens that tells the truth about your kernels."""

import importlib
from typing import TYPE_CHECKING, Any

from .installation import WrongVersion, require_versions, too_old, untested
from .platforms import spare_libtpu

spare_libtpu()  # before anything asks JAX for a device

_problem = too_old()

if TYPE_CHECKING:
    from .app.borrowed import own_kernels
    from .course.check import check, check_call
    from .course.holes import unwritten
    from .course.inputs import Budget, case, integers, normal, uniform
    from .course.progress import progress
    from .speed.levels import Comparison
    from .speed.results import Results
    from .speed.work import OpByOp
    from .targets.fast import fast_execution
    from .view.curve import Curve
    from .view.gpu_report import Report as GpuReport
    from .view.tpu_report import Report

# Imported when somebody asks for it: the `puzzles` command needs none of it, and it takes most of a second.
_COMES_FROM = {
    **dict.fromkeys(("check", "check_call"), "course.check"),
    **dict.fromkeys(("Budget", "case", "integers", "normal", "uniform"), "course.inputs"),
    "Curve": "view.curve",
    "fast_execution": "targets.fast",
    "own_kernels": "app.borrowed",
    "progress": "course.progress",
    "unwritten": "course.holes",
}

__all__ = [
    "Budget", "Curve", "bench", "case", "check", "check_call", "compare", "fast_execution", "gpu_report", "hint",
    "integers", "normal", "op_by_op", "own_kernels", "progress", "setup", "show", "solved_function", "tpu_report",
    "uniform", "unwritten",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What _COMES_FROM names. With a JAX that is too old, says so; the `puzzles` command can still be imported."""
    if name not in _COMES_FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _problem:
        raise WrongVersion(_problem)
    return getattr(importlib.import_module(f".{_COMES_FROM[name]}", __name__), name)


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


def solved_function(puzzle_id: str, name: str) -> Any:
    """A function of another notebook, with the reader's own answers in it; None where the puzzle is not solved."""
    from .app.workspace import solved_function as find

    return find(puzzle_id, name)


def hint(puzzle_id: str, solution: bool = False) -> None:
    """Shows the next hint of a puzzle, and counts it. solution=True: the solution, once the hints are used up."""
    from .course.hints import hint as tell

    tell(puzzle_id, solution)


def show(fn: Any, *args: Any, live: bool = False, **blocks: Any) -> Any:
    """A picture of every pallas_call in `fn(*args, **blocks)`: grid, blocks, traffic, VMEM; of every plgpu.kernel: a
    timeline of its copies, products and waits. See view/draw.py and view/timeline.py.

    args: arrays, or Inputs such as normal((24, 512)). live=True: sliders that change the block sizes and re-run.
    first_step: which 512 steps of a longer grid are drawn; the table counts all of them.
    """
    from .course.holes import unwritten
    from .lens.machine import listed
    from .view.show import show as draw
    from .view.verdict import emit

    picture = draw(fn, *args, live=live, **blocks)
    if holes := unwritten(fn):
        missing = f"{listed(holes)} {'is' if len(holes) == 1 else 'are'} still to be written."
        picture.note = f"{'Nothing to show yet' if picture.empty else 'Only what is given runs'}: {missing}"
    return emit(picture)


def tpu_report(fn: Any, *args: Any, tpu: str = "v5e", **options: Any) -> "Report":
    """Compiles `fn(*args, **blocks)` for a TPU that need not be there: VMEM, spills, bundles, bytes, time, its bound.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs. tpu: "v5e", "v6e" or "tpu7x". options: the
    block sizes, and those of pallas_puzzles.view.tpu_report.tpu_report, which also says how far to trust the time.
    """
    from .course.holes import unwritten
    from .view.tpu_report import nothing_yet
    from .view.tpu_report import tpu_report as compile_and_read
    from .view.verdict import emit

    holes = unwritten(fn)
    return emit(nothing_yet(fn, tpu, holes) if holes else compile_and_read(fn, *args, tpu=tpu, **options))


def gpu_report(fn: Any, *args: Any, chip: str = "h100", **options: Any) -> "GpuReport":
    """Compiles `fn(*args, **blocks)` for a GPU that need not be there: registers, SMEM, spills, SASS, time, its bound.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs. chip: "h100", "h200" or "b200". options:
    the block sizes, and those of pallas_puzzles.view.gpu_report.gpu_report, which also says how far to trust the time.
    """
    from .course.holes import unwritten
    from .view.gpu_report import gpu_report as compile_and_read
    from .view.gpu_report import nothing_yet
    from .view.verdict import emit

    holes = unwritten(fn)
    return emit(nothing_yet(fn, chip, holes) if holes else compile_and_read(fn, *args, chip=chip, **options))


def bench(fn: Any, *args: Any, **options: Any) -> "Results":
    """Times `fn(*args, **blocks)` on this machine's GPU or TPU: median, spread, share of the speed of light.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs. options: the block sizes, and peers={name:
    function} to compare with; see pallas_puzzles.speed.choose.bench. Without the chip: the compiler's estimates.
    """
    from .course.holes import unwritten
    from .lens.machine import listed
    from .speed.choose import bench as run
    from .speed.results import Results
    from .view.verdict import emit

    if holes := unwritten(fn):
        words = f"Nothing to measure yet: {listed(holes)} {'is' if len(holes) == 1 else 'are'} still to be written."
        return emit(Results(notes=[words]))
    return emit(run(fn, *args, **options))


def compare(levels: Any, *args: Any, **options: Any) -> "Comparison":
    """A table of what each of several functions of the same arrays costs on a TPU: bytes, temporaries, time.

    levels: name -> function, or one function, which stands for itself op by op and jitted. args: arrays, Inputs such as
    normal((24, 512)), or jax.ShapeDtypeStructs. options: tpu="v5e,v6e", made=; see speed/levels.py.
    """
    from .speed.levels import compare as table
    from .view.verdict import emit

    return emit(table(levels, *args, **options))


def op_by_op(fn: Any) -> "OpByOp":
    """fn, for `compare`, as eager JAX runs it: every operation a program of its own, its result in HBM."""
    from .speed.work import OpByOp

    return OpByOp(fn)
