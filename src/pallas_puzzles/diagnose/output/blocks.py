"""A wrong output, block by block: missing, lost, masked, or of the wrong values."""

from collections.abc import Sequence

import numpy as np

from ...lens.machine import Trace
from ...lens.program import lines_where
from ..findings import Diagnosis
from ..narrow import SUMS, handed_on, narrow_places
from ..rounding import Excess, times
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

    def rounded(self, excess: Excess, calls: Sequence[Trace], known: frozenset[str]) -> Diagnosis:
        """Every value is within tolerance, and all of them together are not. known: narrow_kinds of a right answer."""
        places = [p for p in (*narrow_places(self.trace, self.j), *handed_on(calls, self.trace)) if p.kind not in known]
        place = next((p for p in places if p.kind in SUMS or not excess.one_way), None)
        if place is None:
            cause = f"{self.o.name}: {excess.words} {excess.advice}"
        else:  # a sum in 16 bits may lose more than it rounds: its errors may well point one way
            size = f"the error is {times(excess.ratio)} the course's, though each value is nearly right."
            seen = size if excess.one_way else f"rounding, not logic: {excess.words}"
            cause = f"{self.o.name}: {seen} {place.words}"
        finding = self._finding("precision" if place else excess.kind_of_finding, cause, self.tiles[0])
        finding.line = (place and place.line) or finding.line
        if place is None:
            factors = lines_where(self.trace.call.kernel, frozenset({"mul", "div", "add", "sub"}), floats=True)
            finding.near = [*reversed([*factors]), *finding.near]
        return Diagnosis([finding], self.o, dict.fromkeys(self.tiles, "a little off"))

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
