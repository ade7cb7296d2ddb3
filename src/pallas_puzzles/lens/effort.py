"""How much a machine has to do, counted in instructions: the same number in every run, on every computer."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from ..ir.ops import holding


@dataclasses.dataclass
class Effort:
    """instructions: that were run; one that is read, which takes JAX a while, counts as several."""

    instructions: int = 0


_effort: contextvars.ContextVar[Effort | None] = contextvars.ContextVar("effort", default=None)


@contextlib.contextmanager
def counted() -> Iterator[Effort]:
    """While active, what is done is added to what it yields. Kernels for a GPU are counted, others are not."""
    effort = Effort()
    try:
        with holding(_effort, effort):
            yield effort
    finally:
        spend(effort.instructions)  # of whoever counts around it


def spend(instructions: int) -> None:
    effort = _effort.get()
    if effort is not None:
        effort.instructions += instructions
