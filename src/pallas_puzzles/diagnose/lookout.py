"""Which of the functions that a puzzle forbids the reader's code calls: the function counts, not what it is called."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import jax

from ..installation import PACKAGE
from ..ir.capture import forget_traces, source_line
from ..ir.readers import is_readers_code
from .findings import Finding

_ON_THE_HOST = "{name} hands the work to Python on the host, and this puzzle is about doing it in JAX."
_HOST = ("pure_callback", "io_callback")
_OUR_DIR = str(PACKAGE) + os.sep


class Lookout:
    """Sees the forbidden calls that the reader's code makes while it is traced.

    Every call in that code is looked at, and in the functions that it calls. Python tells nothing of f(*args) or of an
    operator, and it is JAX that calls what is handed to lax.cond: so whenever a forbidden function starts, who has
    called it, or has handed it on, is looked at, too.

    reasons: name -> why it may not be used. own: what a name stands for, besides JAX's functions of that name. codes:
    where to begin. given: whether code is the course's, and may call what it likes. jitted: functions whose traces JAX
    remembers. found: the first forbidden call, or None.
    """

    def __init__(
        self,
        reasons: Mapping[str, str],
        own: Mapping[str, Any],
        codes: Sequence[CodeType],
        given: Callable[[CodeType], bool] = lambda code: False,
        jitted: Sequence[Any] = (),
    ):
        self.found: Finding | None = None
        self.reasons = {**dict.fromkeys(_HOST, _ON_THE_HOST), **reasons}
        self.given, self.jitted = given, [f for f in jitted if hasattr(f, "clear_cache")]
        self.codes: dict[CodeType, None] = {}
        for code in codes:
            self._add(code)
        self.names = {
            id(stage): (name, stage)
            for name in self.reasons
            for fn in [*_functions_of_jax(name), *([own[name]] if name in own else [])]
            for stage in _stages(fn)
        }
        self.bodies = {
            stage.__code__: name
            for name, stage in self.names.values()
            if codes
            and isinstance(stage, FunctionType)
            and not hasattr(stage, "__wrapped__")
            and not _is_closure(stage)
        }
        self.fresh = not codes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a trace of the reader's code. Before the first one, JAX forgets the traces that it has."""
        if not self.fresh:
            self.fresh = True
            forget_traces()
            for fn in self.jitted:
                fn.clear_cache()
        events, tool = sys.monitoring, next(n for n in (4, 3, 5, 2, 1, 0) if sys.monitoring.get_tool(n) is None)
        events.use_tool_id(tool, "pallas_puzzles")
        self.watch = lambda code: events.set_local_events(tool, code, events.events.CALL)
        sees = {events.events.CALL: self._called, events.events.PY_START: self._started}
        try:
            for event, see in sees.items():
                events.register_callback(tool, event, see)
            for code in self.codes:
                self.watch(code)
            for code in self.bodies:
                events.set_local_events(tool, code, events.events.PY_START)
            yield
        finally:
            for code in {**self.codes, **self.bodies}:
                events.set_local_events(tool, code, events.events.NO_EVENTS)
            for event in sees:
                events.register_callback(tool, event, None)
            events.free_tool_id(tool)

    def _called(self, code: CodeType, offset: int, *called: object) -> None:
        for stage in (stage for each in called for stage in _stages(each)):
            if name := self._name(stage):
                line = next((p[0] for p in [*code.co_positions()][offset // 2 :]), None) or code.co_firstlineno
                self._report(name, code, line)
            elif isinstance(stage, FunctionType) and is_readers_code(stage.__code__) and not self.given(stage.__code__):
                self._add(stage.__code__, self.watch)

    def _started(self, code: CodeType, offset: int) -> None:
        name, frame, called = self.bodies[code], sys._getframe(1).f_back, None
        while frame is not None and not is_readers_code(frame.f_code):
            if frame.f_code.co_filename.startswith(_OUR_DIR):
                return
            if frame.f_code.co_filename != "<string>":  # what eval runs is whose who calls it
                called = frame
            frame = frame.f_back
        if frame is None or (self.given(frame.f_code) and frame.f_code not in self.codes):
            return
        if called is None or self._has(called, name):
            self._report(name, frame.f_code, frame.f_lineno)

    def _has(self, called: FrameType, name: str) -> bool:
        """Whether the library's function that the reader has called was given a forbidden one, or stands for it."""
        return any(self._name(stage) == name for value in _inside(called.f_locals) for stage in _stages(value))

    def _name(self, stage: object) -> str:
        return self.names.get(id(stage), ("", None))[0]

    def _report(self, name: str, code: CodeType, line: int) -> None:
        cause = self.reasons[name].replace("{name}", name)
        self.found = self.found or Finding("forbidden", cause, [], source_line(code.co_filename, line))

    def _add(self, code: CodeType, watch: Callable[[CodeType], object] = lambda code: None) -> None:
        """A code object, and those of the functions defined inside of it."""
        if code in self.codes:
            return
        self.codes[code] = None
        watch(code)
        for inner in (c for c in code.co_consts if isinstance(c, CodeType)):
            self._add(inner, watch)


def _functions_of_jax(name: str) -> list[Any]:
    """What JAX calls by a name, in any of its public modules, and as a method of arrays."""
    return _functions_in(name, len(sys.modules))


@functools.lru_cache(maxsize=1024)
def _functions_in(name: str, modules: int) -> list[Any]:
    """modules: how many of them are imported; with another one, there may be more functions."""
    public = [m for n, m in [*sys.modules.items()] if n == "jax" or (n.startswith("jax.") and "._" not in n)]
    found = [vars(module).get(name) for module in public]
    if name == "at":  # x.at[i] alone does nothing yet
        ref = type(jax.numpy.zeros(1).at[0])
        found += [fn for method, fn in vars(ref).items() if method != "get" and method[:1] != "_"]
        found += [fn for method, fn in vars(jax.lax).items() if method.startswith("scatter")]
    return [fn for fn in found if callable(fn)]


def _stages(fn: Any) -> Iterator[Any]:
    """A function, and what it is made of: what a partial, a bound method, jit, vmap and their like stand for."""
    todo, seen = [fn], set()
    while todo:
        fn = todo.pop()
        if callable(fn) and not isinstance(fn, jax.core.Tracer) and id(fn) not in seen:
            yield fn
            seen.add(id(fn))
            todo += [getattr(fn, name, None) for name in ("func", "__func__", "__wrapped__")]
            if isinstance(fn, FunctionType) and _is_closure(fn) and not is_readers_code(fn.__code__):
                kept = [cell.cell_contents for cell in fn.__closure__ or () if cell != CellType()]  # none is empty
                # x.name of a tracer is such a function, and knows its name: seen on jax 0.11.2 and 0.12.0.1
                todo += [getattr(jax.numpy, each, None) if isinstance(each, str) else each for each in kept]


def _is_closure(fn: FunctionType) -> bool:
    """Whether other functions may have the same code: it is made anew for each that it is wrapped around."""
    return "<locals>" in fn.__qualname__


def _inside(value: object) -> Iterator[Any]:
    """A value, or what is in a dict, list or tuple, and in those in there."""
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each)
    else:
        yield value
