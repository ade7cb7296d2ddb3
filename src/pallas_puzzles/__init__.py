"""Pallas Puzzles: puzzle notebooks for JAX's kernel language, and a lens that tells the truth about your kernels."""

from typing import TYPE_CHECKING, Any

from .platforms import spare_libtpu

spare_libtpu()  # before anything asks JAX for a device

from .check import check  # noqa: E402
from .inputs import Budget, case, integers, normal, uniform  # noqa: E402
from .progress import hint, progress  # noqa: E402

if TYPE_CHECKING:
    from .tpu.report import Report

__all__ = [
    "Budget", "case", "check", "hint", "integers", "normal", "progress", "setup", "show", "tpu_report", "uniform",
]  # fmt: skip


def setup() -> None:
    """Turns JAX's TPU simulator on, unless this machine has a TPU, and says in one line which of the two it is."""
    from .simulate import setup as turn_on

    turn_on()


def show(fn: Any, *args: Any, live: bool = False, **blocks: Any) -> Any:
    """A picture of every pallas_call in `fn(*args, **blocks)`: grid, blocks, traffic, VMEM. See lens/draw.py.

    args: arrays, or Inputs such as normal((24, 512)). live=True: sliders that change the block sizes and re-run.
    """
    from .check import unwritten
    from .lens.draw import show as draw
    from .lens.machine import listed
    from .verdict import emit

    picture = draw(fn, *args, live=live, **blocks)
    holes = unwritten(fn) if not picture.traces else []
    if holes:
        picture.note = f"Nothing to show yet: {listed(holes)} {'is' if len(holes) == 1 else 'are'} still to be written."
    return emit(picture)


def tpu_report(fn: Any, *args: Any, tpu: str = "v5e", **options: Any) -> "Report":
    """Compiles `fn(*args, **blocks)` for a TPU that need not be there: VMEM, spills, bundles, bytes, time, its bound.

    args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs. tpu: "v5e", "v6e" or "tpu7x". options: the
    block sizes, and those of pallas_puzzles.tpu.report.tpu_report, which also says how far to trust the time.
    """
    from .check import unwritten
    from .tpu.report import nothing_yet
    from .tpu.report import tpu_report as compile_and_read
    from .verdict import emit

    holes = unwritten(fn)
    return emit(nothing_yet(fn, tpu, holes) if holes else compile_and_read(fn, *args, tpu=tpu, **options))
