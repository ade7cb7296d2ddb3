"""What a diagnosis is made of: findings, tolerances, and the verdict on each block."""

import dataclasses
import math
import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ..ir.capture import Operand, SourceLine
from ..ir.ops import is_floating

Block = tuple[int, ...]
_SENTENCES = re.compile(r"(?<!\.)\.\s+(?=[A-Z`])")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `cause`: a sentence that says what was seen, and then what to try. `evidence`: which
    blocks, how wrong.

    maps: the index maps that may be to blame. size: elements of the output that it is about. near: lines that it hangs
    on, the likeliest first, where `line` is none of the reader's. function: the reader's, that the line is in.
    """

    kind: str
    cause: str
    evidence: Sequence[str] = ()
    line: SourceLine | None = None
    step: int | None = None
    at: tuple[int, ...] | None = None
    operand: str | None = None
    block: Block | None = None
    maps: Sequence[SourceLine] = ()
    size: int = 0
    near: Sequence[SourceLine] = ()
    function: str = ""

    @property
    def seen(self) -> str:
        """What was seen, without what to try; a puzzle's own words ("explained") say nothing of that."""
        return self.cause if self.kind == "explained" else _SENTENCES.split(self.cause)[0].rstrip(".") + "."

    @property
    def advice(self) -> str:
        return self.cause[len(self.seen) :].strip()

    def but(self, **changes: object) -> "Finding":
        """The same finding with other values in some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def at(line: SourceLine | None) -> str:
    """' (a.py:7)', behind what was seen there."""
    return f" ({line})" if line is not None else ""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|got - want| <= atol + rtol * |want|; atol is `relative` times the root mean square of `want`."""

    relative: float

    def close(self, got: np.ndarray, want: np.ndarray) -> np.ndarray:
        """Element by element. NaN is close to an expected NaN alone, and not where nothing else is expected."""
        if self.relative == 0:
            return (got == want) | self._both_unknown(got, want)
        g, w = (x.astype(np.float32) if is_floating(x.dtype) and x.dtype.itemsize < 4 else x for x in (got, want))
        with np.errstate(invalid="ignore", over="ignore"):
            within = np.abs(g - w) <= self.atol(want) + self.relative * np.abs(w)
        finite = np.isfinite(w)
        if finite.all():
            return within
        return (within & finite) | (g == w) | self._both_unknown(g, w)

    @staticmethod
    def _both_unknown(got: np.ndarray, want: np.ndarray) -> np.ndarray:
        unknown = want != want
        return (got != got) & unknown & (not unknown.all())

    def atol(self, want: np.ndarray) -> float:
        return self.relative * _rms(want) or _BESIDE_ZERO


_BESIDE_ZERO = 1e-12  # where every expected value is 0: what is left when numbers of an ordinary size cancel


def _rms(x: np.ndarray) -> float:
    flat = np.ravel(x).astype(np.float64)
    squares = float(np.dot(flat, flat))
    if not math.isfinite(squares):
        flat = flat[np.isfinite(flat)]
        squares = float(np.dot(flat, flat))
    return math.sqrt(squares / flat.size) if flat.size else 0.0


def default_tolerance(dtype: np.dtype) -> Tolerance:
    """A few units in the last place after a long sum: 3e-5 for float32, 2e-2 for bfloat16, 4e-3 for float16; one unit
    of a float of 8 bits or fewer; 0 for what is no float."""
    if not is_floating(dtype):
        return Tolerance(0.0)
    if dtype.itemsize == 1:
        return Tolerance(float(ml_dtypes.finfo(dtype).eps))
    return Tolerance({8: 1e-9, 4: 3e-5}.get(dtype.itemsize, 4e-3 if dtype == np.float16 else 2e-2))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run. Empty findings: nothing. `tiles`: block -> "ok" or what is wrong with it.

    operand: the output that is wrong first. summary: how much of it is. steps: those that visit a wrong block.
    """

    findings: Sequence[Finding]
    operand: Operand | None = None
    tiles: dict[Block, str] = dataclasses.field(default_factory=dict)
    summary: str = ""
    steps: frozenset[int] = frozenset()


# Reads of memory that holds whatever it held: what comes of them must not depend on it.
GARBAGE_READS = frozenset("padding unwritten stale".split())


# Wrong whatever the values are: where they agree, they agree by luck.
FATAL = frozenset(
    "hbm-load hbm-store hang map-bounds ref-bounds unwaited copy-shape no-wait reused shared-semaphore revisit "
    "input-store".split()
)
