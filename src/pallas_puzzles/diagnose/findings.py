"""What a diagnosis is made of: findings, tolerances, and the verdict on each block."""

import dataclasses

import numpy as np

from ..ir.capture import Operand, SourceLine
from ..ir.ops import is_floating
from ..lens.machine import Trace

Block = tuple[int, ...]


@dataclasses.dataclass
class Finding:
    """One thing that is wrong. `cause`: one or two sentences, with what to try. `evidence`: which blocks, how wrong."""

    kind: str
    cause: str
    evidence: list[str] = dataclasses.field(default_factory=list)
    line: SourceLine | None = None
    step: int | None = None
    at: tuple[int, ...] | None = None
    operand: str | None = None
    block: Block | None = None
    maps: list[SourceLine] = dataclasses.field(default_factory=list)  # the index maps that may be to blame
    size: int = 0  # elements of the output that it is about
    near: list[SourceLine] = dataclasses.field(default_factory=list)  # whatever the kernel or index map is made of
    output: "WrongOutput | None" = None  # the one that it is about
    unsure: bool = False  # of an explained one: the lens had seen no more than wrong values
    placed: bool = False  # its line was found by trying changes there
    where: str = ""  # the cause up to its advice, when the advice is a weak one: a change that helps is a better one
    function: str = ""  # the reader's, that the line stands in


@dataclasses.dataclass(frozen=True)
class WrongOutput:
    """Output `number` of a call, and what is expected of it, of its shape."""

    trace: Trace
    number: int
    want: np.ndarray
    tolerance: "Tolerance"


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|got - want| <= atol + rtol * |want|; atol is `relative` times the root mean square of `want`."""

    relative: float

    def close(self, got: np.ndarray, want: np.ndarray) -> np.ndarray:
        """Element by element; NaN is never close."""
        if self.relative == 0:
            return got == want
        return np.isclose(got, want, rtol=self.relative, atol=self.atol(want))

    def atol(self, want: np.ndarray) -> float:
        return self.relative * _rms(want) or _BESIDE_ZERO


_BESIDE_ZERO = 1e-12  # where every expected value is 0: what is left when numbers of an ordinary size cancel


def _rms(x: np.ndarray) -> float:
    finite = x[np.isfinite(x)].astype(np.float64)
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def default_tolerance(dtype: np.dtype) -> Tolerance:
    """A few units in the last place after a long sum: 3e-5 for float32, 2e-2 for bfloat16, 4e-3 for float16, 0 else."""
    if not is_floating(dtype):
        return Tolerance(0.0)
    return Tolerance({8: 1e-9, 4: 3e-5}.get(dtype.itemsize, 4e-3 if dtype == np.float16 else 2e-2))


@dataclasses.dataclass
class Diagnosis:
    """What is wrong with a run. Empty findings: nothing. `tiles`: block -> "ok" or what is wrong with it."""

    findings: list[Finding]
    operand: Operand | None = None
    tiles: dict[Block, str] = dataclasses.field(default_factory=dict)
    summary: str = ""
    steps: frozenset[int] = frozenset()  # those that visit a wrong block
    outputs: list[WrongOutput] = dataclasses.field(default_factory=list)


# Reads of memory that holds whatever it held: what comes of them must not depend on it.
GARBAGE_READS = frozenset("padding unwritten stale".split())


FATAL = frozenset("hbm-load hbm-store hang map-bounds ref-bounds unwaited revisit".split())
