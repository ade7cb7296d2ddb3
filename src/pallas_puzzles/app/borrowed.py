"""Kernels of earlier notebooks that a notebook is built on: the reader's own, or the course's where one is missing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..course import cases, curriculum
from ..course.progress import load
from .workspace import WorkspaceError, current_file, find


class Kernels(SimpleNamespace):
    """Functions by name. As text: whose each of them is, and why not the reader's."""

    def __init__(self, found: dict[str, tuple[Any, str]]) -> None:
        super().__init__(**{name: fn for name, (fn, _) in found.items()})
        self._words = {name: words for name, (_, words) in found.items()}

    def __str__(self) -> str:
        width = max(map(len, self._words))
        return "\n".join(f"{name:{width}}  {words}" for name, words in self._words.items())

    __repr__ = __str__


def own_kernels(**wanted: Sequence[Any]) -> Kernels:
    """Functions of other notebooks: the reader's own where they are solved, else the course's.

    wanted: name=(puzzle, *arguments): the puzzle that has to be solved, "matmul/9", and what the function will be
    called with, jax.ShapeDtypeStructs for arrays. A reader's function with which that does not work as with the
    course's (its results, its gradients, 16-bit numbers on the way) is left out, and the text says why.
    Raises CurriculumError for a puzzle or a name that the course does not have.
    """
    return Kernels({name: _found(name, *each, solved=_solved_in(each[0])) for name, each in wanted.items()})


def solved_function(puzzle_id: str, name: str) -> Callable[..., Any] | None:
    """A function of another notebook, with the reader's own answers in it; None where there is no such thing.

    puzzle_id: the puzzle that has to be solved, in the workspace's file. name: a function that is there once it is.
    """
    from ..course import session
    from ..course.holes import unwritten

    try:
        solved = _solved_in(puzzle_id)
        subject = session.run(puzzle_id, source=solved[0], judge=False).subject if solved else None
    except curriculum.CurriculumError:
        return None
    found = inspect.unwrap(subject.fn).__globals__.get(name) if subject is not None else None
    return found if callable(found) and not unwritten(found) else None


def _solved_in(puzzle_id: str) -> tuple[Path, int] | None:
    """The reader's file, and when it was written; None where the puzzle is not solved there."""
    try:
        if not load().solved(puzzle_id):
            return None
        file = current_file(find(), curriculum.puzzle(puzzle_id).notebook)
    except WorkspaceError:
        return None
    return file, file.stat().st_mtime_ns


@functools.lru_cache(maxsize=64)  # of a file that has not changed
def _found(name: str, puzzle_id: str, *args: Any, solved: tuple[Path, int] | None) -> tuple[Any, str]:
    puzzle = curriculum.puzzle(puzzle_id)
    where = f"{puzzle.notebook}.py Puzzle {puzzle.number}"
    course = cases.official(puzzle_id).fn.__globals__.get(name)
    if not callable(course):
        raise curriculum.CurriculumError(f"{where} defines no function {name!r}: look for its name in {puzzle.path}")
    mine = solved_function(puzzle_id, name) if solved else None
    if mine is None:
        return course, f"the course's: {where} is not solved here"
    why = _unfit(mine, course, args)
    return (course, f"the course's: yours ({where}) {why}") if why else (mine, f"yours, {where}")


def _unfit(mine: Callable[..., Any], course: Callable[..., Any], args: Sequence[Any]) -> str:
    """Why a reader's function cannot take the place of the course's for these arguments; "" if it can."""
    for differentiated in (False, True):
        try:
            right = _program(course, args, differentiated)
        except Exception:
            continue  # the course's has no gradient either
        try:
            own = _program(mine, args, differentiated)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            return f"cannot be called with these shapes and dtypes: {type(error).__name__}: {first}"
        if [(x.shape, x.dtype) for x in own.out_avals] != [(x.shape, x.dtype) for x in right.out_avals]:
            return "returns other shapes or dtypes for these arguments"
        if "bf16[" in str(own) and "bf16[" not in str(right):
            return "rounds float32 to bfloat16 on the way"
    return ""


def _program(fn: Callable[..., Any], args: Sequence[Any], differentiated: bool) -> Any:
    """fn(*args) as a jaxpr, the gradients of all floating arrays along with it."""
    import jax
    import jax.numpy as jnp

    arrays = [i for i, x in enumerate(args) if isinstance(x, jax.ShapeDtypeStruct)]
    floats = [i for i in arrays if jnp.issubdtype(args[i].dtype, jnp.floating)]

    def call(*given: Any) -> Any:
        values = [*args]
        for i, x in zip(arrays, given, strict=True):
            values[i] = x
        if not differentiated:
            return fn(*values)

        def of_floats(*some: Any) -> Any:
            for i, x in zip(floats, some, strict=True):
                values[i] = x
            return fn(*values)

        results, back = jax.vjp(of_floats, *[values[i] for i in floats])
        return back(jax.tree.map(jnp.ones_like, results))

    return jax.make_jaxpr(call)(*[args[i] for i in arrays])
