"""How much there is to do, counted in instructions: the same number in every run, on every computer."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

READ = 16  # to trace and read an instruction takes as long as to run so many
AMONG = 4  # one among several devices takes as long as so many: clocks, semaphores, who goes on


@dataclasses.dataclass
class Effort:
    """instructions: that were run, on all devices together; one that is read counts as READ."""

    instructions: int = 0


_effort: contextvars.ContextVar[Effort | None] = contextvars.ContextVar("effort", default=None)


@contextlib.contextmanager
def holding[T](variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """While active, a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def counted() -> Iterator[Effort]:
    """While active, what is done is added to what it yields."""
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
