"""One wrong block: transposed, shifted, scaled, rounded, or simply wrong."""

import itertools
from typing import Any

import numpy as np

from ...ir.capture import line_of, with_ref_names
from ...lens.machine import NOT_STORED, NOT_VISITED, STALE
from ...lens.program import has_narrow_floats, lines_where, whole_sums_in_floats
from ..findings import Block, Finding
from .base import where_in
from .clues import Clues


class Statuses(Clues):
    """What kind of wrong one block is."""

    def named_by_products(self, findings: list[Finding]) -> None:
        """Findings of rounding, or of a factor, say which product of the program it comes from."""
        whole = [x for jaxpr, names in with_ref_names(self.trace.call) for x in whole_sums_in_floats(jaxpr, names)]
        for f in findings:
            if f.kind in ("precision", "rounding", "values") and whole and self._nearly():
                ref, store, scaled = whole[0]
                first = ", each scaled before it is added" if scaled else ""
                f.cause = (
                    f"The products are whole numbers, and their sum grows in {ref}, in float32{first}, which holds "
                    "whole numbers up to 16,777,216 exactly, and seven digits of any other: every addition rounds, and "
                    f"what large sums have lost is missing when they cancel.{self._whole_scratch()}"
                )
                f.line, f.where = line_of(store) or f.line, ""
                f.kind = "precision"
            elif f.kind == "scaled":
                factors = list(lines_where(self.trace.call.kernel, frozenset({"mul", "div"}), floats=True))
                f.near = [*reversed(factors), *f.near]

    def _nearly(self) -> bool:
        got, want = self.got.astype(np.float64), self.want.astype(np.float64)
        finite = bool(np.isfinite(got).all())
        return finite and bool(np.sqrt(np.mean(np.square(got - want))) < 0.01 * np.sqrt(np.mean(np.square(want))))

    def _whole_scratch(self) -> str:
        whole = next((s for s in self.trace.call.scratch if s.dtype.kind == "i" and s.space == "vmem"), None)
        where = f"{whole.name}, which is {whole.dtype} and exact" if whole else "an int32 scratch buffer"
        return f" Carry the sum in {where}: make floats of it, and scale it, in what is stored as the result."

    def _status(self, tile: Block) -> tuple[Any, ...]:
        bad = self.cut(self.bad, tile)
        if not bad.any():
            return ("ok",)
        state = self.cut(self.trace.state[self.j], tile)[bad]
        if not self.o.in_hbm and not self.elementwise and not self.steps_of(tile):
            return ("unvisited",)
        if (state == NOT_VISITED).all():
            return ("unvisited",) if not self.o.in_hbm else ("never stored",)
        if (state == NOT_STORED).all():
            return ("never stored",) if bad.all() else ("partly stored", where_in(bad))
        if (state == STALE).all():
            return ("left over",)
        return self._values(tile, bad)

    def _values(self, tile: Block, bad: np.ndarray) -> tuple[Any, ...]:
        got, want = self.cut(self.got, tile), self.cut(self.want, tile)
        here = where_in(bad)
        if np.isnan(got[bad].astype(np.float64)).all() and not np.isnan(want[bad].astype(np.float64)).any():
            return ("nan", here)
        if got.ndim >= 2 and got.shape[-1] == got.shape[-2] and self._same(got, np.swapaxes(want, -1, -2)):
            return ("transposed",)
        for axis in range(got.ndim):
            if got.shape[axis] > 1 and self._same(got, np.flip(want, axis)):
                return ("flipped", axis)
        for other in self._candidates(got) if got.size > 1 and got.any() else ():  # zeros come from nowhere
            if other != tile and self._same(got, self.cut(self.want, other)):
                return ("holds", other)
        if got.size > 1 and np.array_equal(np.sort(got, axis=None), np.sort(want, axis=None)):
            return ("permuted",)
        with np.errstate(all="ignore"):
            difference = (got.astype(np.float64) - want.astype(np.float64))[bad]
            ratio = got[bad].astype(np.float64) / want[bad].astype(np.float64)
        if not np.isfinite(difference).all():
            return ("values", here)
        if (got[bad] == 0).all():
            return ("zeros", here)
        middle = float(difference.mean())
        if got.size > 1 and self._same(got * want, np.ones_like(want, np.float64)):
            return ("reciprocal",)
        if difference.size > 1 and abs(middle) > self.atol and np.ptp(difference) <= 1e-3 * abs(middle) + self.noise:
            return ("offset", middle, here)
        if self._only_rounding(tile):
            return ("rounding", float(np.abs(difference).max()), here)
        if ratio.size > 1 and np.isfinite(ratio).all() and np.ptp(ratio) <= 1e-3 * max(1.0, float(np.abs(ratio).max())):
            return ("scaled", float(ratio.mean()), here)
        factor = self._factor(got[bad].astype(np.float64), want[bad].astype(np.float64))
        if factor is not None:
            return ("scaled", factor, here)
        return self._by_rows(tile) or ("values", here)

    def _factor(self, got: np.ndarray, want: np.ndarray) -> float | None:
        """The one factor that `want` has to be multiplied by, also where next to 0 only rounding is left of it."""
        total = float(np.square(want).sum())
        if got.size < 8 or not total:
            return None
        factor = float((got * want).sum()) / total
        rest = np.abs(got - factor * want)
        close = rest <= max(1.0, abs(factor)) * (self.atol + self.tolerance.relative * np.abs(want))
        far = abs(factor - 1) > 0.05 and abs(factor) > 0.01
        return factor if far and self.tolerance.relative < 1e-3 and close.all() else None

    def _only_rounding(self, tile: Block) -> bool:
        """Float32 errors of a few dozen units in the last place that follow no rule."""
        got, want = (self.cut(x, tile).astype(np.float64) for x in (self.got, self.want))
        if has_narrow_floats(self.trace.call) or self.tolerance.relative > 1e-3 or [*self._arithmetic()]:
            return False
        with np.errstate(all="ignore"):
            relative = (got - want) / want
        bad = self.cut(self.bad, tile)
        near = np.isfinite(relative[bad]).all() and np.abs(relative[bad]).max() < 40 * self.tolerance.relative
        relative = relative[np.isfinite(relative)]
        return bool(near and relative.size > 1 and np.ptp(relative) > 0.2 * np.abs(relative).max())

    def _by_rows(self, tile: Block) -> tuple[Any, ...] | None:
        """Every wrong row is off by a constant of its own, by a factor of its own, or by a multiple of an input's row:
        (kind, name of that input, the number of each wrong row)."""
        got, want = (self.cut(x, tile).astype(np.float64) for x in (self.got, self.want))
        if got.ndim != 2 or got.shape[1] < 8:
            return None
        rows = np.flatnonzero(self.cut(self.bad, tile).any(axis=1)).tolist()
        if len(rows) < 2:
            return None
        ones = np.ones_like(want)
        candidates = [("row-offset", "", [ones]), ("row-scaled", "", [want])]
        ins = zip(self.trace.call.ins, self.trace.call.inputs, strict=True)
        same = [(o.name, self.cut(x, tile).astype(np.float64)) for o, x in ins if x.shape == self.want.shape]
        candidates += [("row-term", name, [x]) for name, x in same]
        candidates += [("row-term", name, [x, ones]) for name, x in same]
        for kind, name, basis in candidates:
            numbers = [self._fit(got[r], want[r], [b[r] for b in basis]) for r in rows]
            factors = [1 + n for n in numbers if n is not None]
            if kind == "row-scaled" and len(factors) == len(rows) and np.ptp(factors) < 5e-3:
                return ("scaled", round(float(np.mean(factors)), 3), "")  # one for all, and 16-bit rounding
            if all(n is not None for n in numbers):
                return (kind, name, dict(zip(rows, numbers, strict=True)), len(basis) > 1)
        missing = self._missing_number(want, rows, same)
        return missing or (("wrong-axis",) if self._separable(got, want) else None)

    def _missing_number(self, want: np.ndarray, rows: list[int], same: list[Any]) -> tuple[Any, ...] | None:
        """A kernel that reduces nothing, where what is expected is a * b plus one number per row times a."""
        if any(e.primitive.name.startswith("reduce_") for j, _ in with_ref_names(self.trace.call) for e in j.eqns):
            return None
        for (a, x), (b, y) in itertools.permutations(same, 2):
            numbers = [self._fit(want[r], x[r] * y[r], [x[r]]) for r in rows]
            if all(n is not None for n in numbers):
                return ("row-missing", a, dict(zip(rows, numbers, strict=True)), b)
        return None

    @staticmethod
    def _separable(got: np.ndarray, want: np.ndarray) -> bool:
        """Whether got / want is a factor of the row times a factor of the column."""
        with np.errstate(all="ignore"):
            factor = np.log(got / want)
        if not np.isfinite(factor).all() or np.ptp(factor) < 1e-2:
            return False
        rest = factor - factor.mean(axis=0, keepdims=True) - factor.mean(axis=1, keepdims=True) + factor.mean()
        return bool(np.abs(rest).max() < 1e-3)

    def _fit(self, got: np.ndarray, want: np.ndarray, basis: list[np.ndarray]) -> float | None:
        """The first coefficient of the basis in got - want, where nothing else is wrong with the row."""
        error, columns = got - want, np.stack(basis, axis=1)
        if not np.isfinite(columns).all():
            return None
        numbers = np.linalg.lstsq(columns, error, rcond=None)[0]
        rest = error - columns @ numbers
        explained = np.square(rest).sum() < 0.04 * np.square(error).sum()
        size = np.maximum(np.abs(got), np.abs(want))
        close = np.abs(rest) <= self.atol + 2 * self.tolerance.relative * size + 1e-3 * np.abs(error)
        return float(numbers[0]) if explained and close.all() else None

    def _candidates(self, got: np.ndarray) -> list[Block]:
        """The blocks whose first expected element is the first one of `got`."""
        if self.corners is None:
            self.corners = np.array([self.cut(self.want, t).flat[0] for t in self.tiles])
        near = np.isclose(self.corners.astype(np.float64), float(got.flat[0]), rtol=0.05, atol=10 * self.atol)
        return [self.tiles[i] for i in np.flatnonzero(near)]

    def _same(self, a: np.ndarray, b: np.ndarray) -> bool:
        return a.shape == b.shape and bool(self.tolerance.close(a, b).all())
