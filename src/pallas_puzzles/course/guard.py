"""Whose an exception is, the reader's or ours; a bug of ours costs a verdict its explanation, and nothing else."""

import contextlib
import os
import traceback
from collections.abc import Iterator

from ..installation import PACKAGE, repository, version
from ..ir.readers import for_the_reader, is_readers_code
from ..lens.watchdog import TimeLimit
from ..targets.simulate import SimulatorError
from ..text import cut
from ..view.verdict import Traceback, Verdict

_LONGEST_LINE = 160
_OUR_DIR = str(PACKAGE) + os.sep


def is_ours(error: BaseException) -> bool:
    """Whether an exception is a bug of this package: its innermost frame, libraries left out, is here."""
    if isinstance(error, SimulatorError | TimeLimit):  # raised on purpose, about the reader's code
        return False
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_code is for_the_reader.__code__ or is_readers_code(frame.f_code):
            return False
        if frame.f_code.co_filename.startswith(_OUR_DIR):
            return True
    return False


class Guard:
    """Keeps the bugs of ours that turn up during a check, and says so in its verdict."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Around code that does not run the reader's: where it raises, the verdict goes on without what it does."""
        try:
            yield
        except Exception as error:
            self.keep(error)

    @contextlib.contextmanager
    def showing(self, verdict: object) -> Iterator[None]:
        """Around what displays a verdict: where that raises, its text is printed, and that there is a bug."""
        try:
            yield
        except Exception as error:
            text = ""
            with self.explaining():
                text = str(verdict)
            print("\n".join(filter(None, [text, _sentence(_last_line(error))])))

    def keep(self, error: Exception) -> None:
        self.errors.setdefault(_last_line(error), error)  # one for all draws

    def tell(self, verdict: Verdict) -> None:
        """Adds a sentence about the first bug, and all tracebacks, to a verdict that was reached without that code."""
        for line in [*self.errors][:1]:
            verdict.notes.insert(0, _sentence(line))
        texts = ["".join(traceback.format_exception(error)) for error in self.errors.values()]
        verdict.traceback = Traceback("\n".join(filter(None, [verdict.traceback, *texts])))


def _last_line(error: Exception) -> str:
    line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    return cut(line, _LONGEST_LINE)


def _sentence(line: str) -> str:
    return (
        f"Pallas Puzzles{f' {version()}'.rstrip()} has a bug, which is not in your code, and cannot explain this in "
        f"full: please report it at {repository()}/issues with this line: {line}"
    )
