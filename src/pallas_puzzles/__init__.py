"""Pallas Puzzles: puzzle notebooks for JAX's kernel language, and a lens that tells the truth about your kernels."""

from typing import Any

from .check import check
from .inputs import Budget, case, integers, normal, uniform
from .progress import hint, progress

__all__ = ["Budget", "case", "check", "hint", "integers", "normal", "progress", "setup", "show", "uniform"]


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
    from .verdict import emit

    picture = draw(fn, *args, live=live, **blocks)
    holes = unwritten(fn) if not picture.traces else []
    if holes:
        picture.note = (
            f"Nothing to show yet: {' and '.join(holes)} {'is' if len(holes) == 1 else 'are'} still to be written."
        )
    return emit(picture)
