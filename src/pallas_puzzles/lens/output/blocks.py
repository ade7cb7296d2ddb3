"""A wrong output, block by block: missing, lost, masked, or of the wrong values."""

import numpy as np

from ..findings import Diagnosis
from .base import sample_of
from .masks import Masks
from .patterns import Patterns
from .stores import Stores

_STATUS_WORDS = {
    "holds": "holds another block's values",
    "values": "wrong values",
    "offset": "off by a constant",
    "scaled": "off by a factor",
    "row-offset": "off by a constant per row",
    "row-scaled": "off by a factor per row",
    "row-term": "off by a term per row",
    "row-missing": "without a term per row",
    "precision": "rounded too often",
    "rounding": "rounded too roughly",
    "reciprocal": "upside down",
    "wrong-axis": "off by row and column factors",
    "nan": "NaN",
    "zeros": "zero",
    "unvisited": "never visited",
}


class Blocks(Masks, Stores, Patterns):
    """All that can be said of a wrong output."""

    def diagnose(self) -> Diagnosis:
        status = {t: self._status(t) for t in self.tiles}
        wrong = {t: s for t, s in status.items() if s != ("ok",)}
        findings = (
            list(self._missing(wrong))
            + list(self._lost())
            + list(self._unmoving())
            + list(self._misfits())
            + list(self._never_read())
        )
        findings += list(self._mask()) or list(self._pattern(wrong))
        for finding in findings:
            finding.operand = finding.operand or self.o.name
        texts = {t: _STATUS_WORDS.get(s[0], s[0]) for t, s in status.items()}
        steps = frozenset(s for t in wrong for s in self.steps_of(t))
        return Diagnosis(findings, self.o, texts, self._summary(len(wrong)), steps)

    def rounded_twice(self, calls: int) -> Diagnosis:
        """Every value is within tolerance, and too many are off by their last bit."""
        status = {t: ("ok",) if not self.cut(self.bad, t).any() else ("precision",) for t in self.tiles}
        wrong = [t for t, s in status.items() if s != ("ok",)]
        cause = (
            f"{self.o.name} is rounded once too often: each value is nearly right, but {self.bad.mean():.0%} of them "
            f"are off by the last bit of {self.o.dtype}; one cast at the very end would leave next to none. "
        )
        stored = "What an earlier call has stored in 16 bits is rounded already, and this call computes with it."
        look = "Look for a cast to 16 bits whose result is computed with."
        early = [*self._narrowed_early(), stored if calls > 1 else look]
        finding = self._finding("precision", cause + early[0], wrong[0])
        texts = {t: _STATUS_WORDS.get(s[0], s[0]) for t, s in status.items()}
        steps = frozenset(s for t in wrong for s in self.steps_of(t))
        return Diagnosis([finding], self.o, texts, self._summary(len(wrong)), steps)

    def _summary(self, wrong: int) -> str:
        with np.errstate(invalid="ignore"):
            error = np.abs(self.got.astype(np.float64) - self.want.astype(np.float64))[self.bad]
        error = error[np.isfinite(error)]
        size = f"largest error {error.max():.3g}" if error.size else "no finite value among them"
        n = int(self.bad.sum())
        sample = sample_of(self.got, self.want, self.bad, self.o.name.removesuffix("_ref"))
        return (
            f"{self.o.name}: {wrong} of {len(self.tiles)} blocks wrong ({n} of {self.bad.size} elements, {size}; "
            f"{sample})"
        )
