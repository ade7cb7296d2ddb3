"""show(): a picture of every kernel that a function reaches: block by block on a TPU, else a timeline."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import ForGpu, ForMesh
from ..lens.gpu.timeline import in_l2
from .devices import on_devices
from .draw import Picture, look, still_to_be_written
from .live import LivePicture, why_not_live
from .timeline import Timeline, timeline


def show(
    fn: Callable[..., Any],
    *args: Any,
    live: bool = False,
    first_step: int = 0,
    l2: bool = False,
    unwritten: Sequence[str] = (),
    **kwargs: Any,
) -> Picture | Timeline:
    """A picture of every kernel that `fn(*args, **kwargs)` reaches. Never raises for a broken or unsolved kernel.

    Of pallas_calls for a TPU: the grid, the blocks, what moves. Of a plgpu.kernel: who is busy when on the machine's
    logical clock, in its first CTAs. Of a shard_map over several devices: what each does when, and who sends to whom.

    args: arrays, or objects with `.draw(rng)` such as normal((24, 512)); kwargs: static, such as block sizes.
    live: in a notebook, sliders that change the block sizes, run the kernel again, and step through it.
    first_step: from which step on a long grid is drawn; its table has the totals of all steps.
    l2: whether a kernel for a GPU finds its arrays in L2, not in HBM. unwritten: parts of fn that the reader has still
    to write, which the picture's note tells.
    """
    rng = np.random.default_rng(0)  # as a check's first draw
    args = jax.tree.map(lambda x: x.draw(rng) if hasattr(x, "draw") else x, args)
    picture: Picture | Timeline
    try:
        picture = drawn = look(fn, args, kwargs, first_step=first_step)
        if live and (reason := why_not_live()):
            drawn.note = f"{drawn.note} {reason}".strip()
        elif live:
            picture = LivePicture(drawn.traces, drawn.note, fn, args, kwargs, first_step=first_step)
    except ForGpu:
        with in_l2(l2):
            picture = timeline(fn, args, kwargs)
    except ForMesh:
        picture = on_devices(fn, args, kwargs)
    if unwritten:
        start = "Nothing to show yet" if picture.empty else "Only what is given runs"
        picture.note = f"{start}: {still_to_be_written(unwritten)}."
    return picture
