"""Time limits that really stop a Python loop which never ends, in whatever thread it runs."""

import contextlib
import ctypes
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..ir.readers import is_library_file

if TYPE_CHECKING:
    from ..ir.capture import SourceLine

_POLL_S = 0.005
_UNWINDING_S = 0.5  # how long the reader's `finally` may take before the block is stopped once more
_PATIENCE_S = 0.25  # how long to wait for the loop to come back into the reader's own code
_LAST_S = 2.0  # after this, anywhere will do
# An exception that arrives while one of these is at work leaves a context half undone, is lost, or turns into another:
# `remove` and `_remove` are what the standard library's weak sets and dictionaries call when something dies.
_FRAGILE = {"__enter__", "__exit__", "__del__", "__eq__", "__hash__", "remove", "_remove"}


class TimeLimit(BaseException):
    """A block took longer than its limit. Not an Exception: `except Exception` in the reader's loop lets it pass."""

    limit: "time_limit | None" = None

    @property
    def line(self) -> "SourceLine | None":
        """The reader's own line at which the block was stopped, where it has one."""
        if self.limit is None or self.limit.stopped_at is None:
            return None
        from ..ir.capture import source_line

        return source_line(*self.limit.stopped_at)

    def __str__(self) -> str:
        if self.limit is None:
            return super().__str__()
        stopped = f"stopped at {self.line}: {self.line.text}" if self.line else "stopped"
        return f"{self.limit.what} ran for more than {self.limit.seconds:g} s and was {stopped.rstrip(': ')}"


class time_limit:
    """Stops the block with TimeLimit after `seconds`, `what` being its subject: "your kernel".

    A second thread plants an exception in the thread that runs the block, which is CPython's only way to stop a loop
    from outside on every system and in every thread. It arrives between two bytecodes: a call into C that does not
    return is not stopped. Limits nest. Nothing arrives after the block has ended.
    """

    def __init__(self, seconds: float, what: str = "this") -> None:
        self.seconds = seconds
        self.what = what
        self.stopped_at: tuple[str, int] | None = None  # file and line of the reader's
        self._lock = threading.Lock()
        self._wake = threading.Event()  # set: the block is over, or has to be
        self._over = False
        self._planted = False
        self._arrivals = 0
        self._insisting = False

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._outside: FrameType | None = sys._getframe(1)
        self._stop = _stop_class(self)
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()
        return self

    def expire(self) -> None:
        """Ends the block now, as if its time were up. For other threads."""
        self._wake.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._over = True
            if self._planted:
                plant(self._thread, None)
        if self._insisting:
            sys.settrace(None)
        self._wake.set()
        self._outside = None
        if self._arrivals and isinstance(error, Exception):
            raise self._stop from error  # somebody made another error of it

    def _watch(self) -> None:
        self._wake.wait(self.seconds)
        if not self._over:
            with _without_noise():
                self._stop_it()

    def _stop_it(self) -> None:
        since = time.monotonic()
        while True:
            with self._lock:
                frame = sys._current_frames().get(self._thread)
                if self._over or frame is None:
                    return
                # This thread has just been given the interpreter, so the other one stands between two bytecodes of this
                # very frame, or in C: the exception arrives in this frame and nowhere else. Unless the other one has
                # been given a turn since, which is why the frame is looked up once more.
                planted = self._may_stop(frame, time.monotonic() - since)
                if planted:
                    at = frame.f_lasti
                    self._planted = True
                    if sys._current_frames().get(self._thread) is frame and frame.f_lasti == at:
                        plant(self._thread, self._stop)
                del frame
            time.sleep(_UNWINDING_S if planted else _POLL_S)

    def _may_stop(self, frame: FrameType, late_s: float) -> bool:
        if late_s > _LAST_S:
            return True
        if late_s < _PATIENCE_S and is_library_file(frame.f_code.co_filename):
            return False
        collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]  # raising in one is in vain
        at: FrameType | None = frame
        while at is not None and at is not self._outside:
            if at.f_code.co_name in _FRAGILE or at.f_code in collecting:
                return False
            at = at.f_back
        return True

    def _arrived(self, frame: FrameType) -> None:
        """The exception is being raised, in `frame`; from now on there is nothing left to take back."""
        self._planted = False
        self._arrivals += 1
        self.stopped_at = _readers_place(frame) or self.stopped_at
        if frame.f_code is _EXIT:  # __exit__ will not get any further
            self._over = True
        elif self._arrivals > 1:
            self._insist(frame)

    def _insist(self, frame: FrameType | None) -> None:
        """The last one was swallowed, by a bare `except:`: has this one raised once more, inside the handler."""

        def trace(at: FrameType, event: str, arg: Any) -> None:
            if event == "line":
                sys.settrace(None)
                self._insisting, self._arrivals = False, 0
                raise self._stop

        self._insisting = True
        while frame is not None and frame is not self._outside:
            if not is_library_file(frame.f_code.co_filename):
                frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(lambda at, event, arg: None)


_EXIT: CodeType = time_limit.__exit__.__code__


def _stop_class(limit: time_limit) -> type[TimeLimit]:
    """An exception class of this limit alone: what is planted is a class, and nested limits must not be mixed up."""

    def __init__(self: TimeLimit) -> None:
        limit._arrived(sys._getframe(1))

    return type("TimeLimit", (TimeLimit,), {"limit": limit, "__init__": __init__})


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Where an exception is lost (a destructor, a callback of the garbage collector), Python would print it."""
    before = sys.unraisablehook

    def hook(lost: Any) -> None:
        if not isinstance(lost.exc_value, TimeLimit):
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def plant(thread: int, error: type[BaseException] | None) -> None:
    """Has `error` raised in the thread with that ident at its next bytecode; None takes back one not yet raised."""
    planted = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), planted)


def _readers_place(frame: FrameType) -> tuple[str, int] | None:
    places = ((at.f_code.co_filename, line) for at, line in traceback.walk_stack(frame))
    return next((place for place in places if not is_library_file(place[0])), None)


def reader_line(tb: TracebackType | None) -> "SourceLine | None":
    """The innermost line of a traceback that is neither a library's nor ours, else None."""
    from ..ir.capture import source_line

    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb)]
    readers = [place for place in places if not is_library_file(place[0])]
    return source_line(*readers[-1]) if readers else None
