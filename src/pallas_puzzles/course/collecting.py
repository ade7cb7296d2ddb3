"""Verdicts that are collected, instead of shown and recorded: what the tests, the command and the tries go by."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from ..view.verdict import Verdict


@dataclasses.dataclass
class Collection:
    """What is collected, and how it is judged: see `collecting`."""

    verdicts: list[Verdict]
    judge: bool
    brief: bool


_collection: contextvars.ContextVar[Collection | None] = contextvars.ContextVar("collection", default=None)


current = _collection.get  # the collection that is active, if there is one


def is_brief() -> bool:
    """Whether verdicts only have to say right or wrong."""
    collection = current()
    return collection is not None and collection.brief


@contextlib.contextmanager
def collecting(*, judge: bool = True, brief: bool = False) -> Iterator[list[Verdict]]:
    """While active, verdicts are appended to the list it yields, and neither displayed nor recorded as progress.

    judge=False: nothing is run; the verdicts of answers that are there are "unjudged" and carry their Subject.
    brief: verdicts say right or wrong as readers get it, and no more: without explanations, and without JAX's
    simulator, which is only asked about what is right. A collection inside another inherits it, too.
    """
    verdicts: list[Verdict] = []
    token = _collection.set(Collection(verdicts, judge, brief or is_brief()))
    try:
        yield verdicts
    finally:
        _collection.reset(token)
