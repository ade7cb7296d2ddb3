"""Whether a result is rounded no worse than the course's own: statistics of its errors, in NumPy alone.

Each result lies within the ordinary tolerance. What a tolerance for single elements cannot see shows in all of them
together: errors that point one way, and errors that are larger than one rounding explains.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

BINS = 16  # of the values, in the order of their size
_LEAST_IN_BIN = 40
_SIGNIFICANT, _SIGNIFICANT_IN_BIN = 10, 20  # standard errors
_ROUNDED = 2.0**-8  # relative: by more, no single rounding to bfloat16 is off
_HALF_ULP = 2.0**-24  # of float32, relative: nobody has to be more exact than that


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Below these, a difference from the course's errors is nothing. eps: of the result's dtype."""

    rms: float  # times the course's
    shift: float  # of the slope and the mean, in eps
    digits: float  # half units in the last place of float32 that everybody may be off by


_NARROW = _Limits(rms=1.1, shift=0.01, digits=1.0)  # right answers reach 1.03; one more rounding makes 1.41
_WIDE = _Limits(rms=3.0, shift=8.0, digits=4.0)  # sums in another order, exp2 for exp: a few digits of float32


@dataclasses.dataclass(frozen=True)
class Excess:
    """How the errors of a result differ from the course's.

    kind: "factor" (all too large or too small), "formula" (off by an amount that depends on the value) or "scatter"
    (errors without a rule that are too large). size: of a factor, less 1; the largest bias of a bin, in units of the
    values' size. ratio: RMS error to the course's. words: what is seen. advice: what to look for, when no place in the
    kernel is known that does it.
    """

    kind: str
    size: float
    ratio: float
    words: str
    advice: str

    @property
    def one_way(self) -> bool:
        """Whether the errors point one way."""
        return self.kind in ("factor", "formula")

    @property
    def rounds(self) -> bool:
        """Whether something that is kept in 16 bits may explain them."""
        return not self.one_way or abs(self.size) < _ROUNDED


@dataclasses.dataclass(frozen=True)
class Course:
    """What the course's own solution makes of the same data, the same in float64 without rounding, and the kinds of
    places where the solution rounds (lens.narrow)."""

    results: list[np.ndarray]
    exact: list[np.ndarray]
    narrow: frozenset[str]


def excess(got: np.ndarray, course: np.ndarray, exact: np.ndarray) -> Excess | None:
    """What is wrong with the rounding of `got`, or None. course: the course's result, of the same shape and dtype.
    exact: the same in float64, without rounding."""
    if np.array_equal(got, course):
        return None
    errors = _errors(got, course, exact)
    return None if errors is None else _judged(errors)


@dataclasses.dataclass(frozen=True)
class _Errors:
    """Errors of a result (`mine`) and of the course's (`theirs`) around `want`, where all three are finite."""

    want: np.ndarray
    mine: np.ndarray
    theirs: np.ndarray
    dtype: np.dtype
    once: float  # the RMS error of one rounding of the exact values

    @property
    def narrow(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def limits(self) -> _Limits:
        return _NARROW if self.narrow else _WIDE

    @property
    def floor(self) -> float:
        return self.limits.digits * _HALF_ULP * _rms(self.want)

    @property
    def shift(self) -> float:
        """The smallest relative shift that counts."""
        return self.limits.shift * float(ml_dtypes.finfo(self.dtype).eps)

    @property
    def ratio(self) -> float:
        return _rms(self.mine) / max(_rms(self.theirs), self.floor, 1e-300)


def _errors(got: np.ndarray, course: np.ndarray, exact: np.ndarray) -> _Errors | None:
    g, s, w = (np.asarray(x).astype(np.float64) for x in (got, course, exact))
    with np.errstate(all="ignore"):
        mine, theirs = g - w, s - w
        once = np.asarray(exact).astype(course.dtype).astype(np.float64) - w
    usable = np.isfinite(mine) & np.isfinite(theirs)
    if not w[usable].any():
        return None
    return _Errors(w[usable], mine[usable], theirs[usable], course.dtype, _rms(once[usable & np.isfinite(once)]))


def _judged(e: _Errors) -> Excess | None:
    shifted, bias, too_large = _factor(e), _bias(e), _too_large(e)
    if shifted is not None:
        rest = dataclasses.replace(e, mine=_without_line(e))
        left = _bias(rest)
        hardly = left is None or (bias is not None and abs(left.size) < 0.25 * abs(bias.size))
        if hardly and not _too_large(rest):
            return shifted
    if too_large and not (bias is not None and _explains(e, _without_bins(e))):
        return _scatter(e)
    return bias or shifted


def _explains(e: _Errors, left: np.ndarray) -> bool:
    """Whether most of what the errors are too large by is gone in `left`."""
    allowed = _sum(e.theirs) + e.theirs.size * e.floor**2
    return _sum(left) - allowed < 0.4 * (_sum(e.mine) - allowed)


# --- errors that point one way ----------------------------------------------------------------------------------------


def _factor(e: _Errors) -> Excess | None:
    total = _sum(e.want)
    mine, theirs = float(e.mine @ e.want) / total, float(e.theirs @ e.want) / total
    error = max(float(np.sqrt(_sum(e.theirs * e.want))) / total, e.floor / np.sqrt(total))
    off = mine - theirs
    if abs(off) <= max(_SIGNIFICANT * error, e.shift):
        return None
    words = f"the values are {_percent(off)} too {_way(off)} on average, a factor of {1 + off:.{_digits(off)}f}."
    advice = f"{_ONE_WAY} Look for what is a little off: a constant, a factor, a value of an earlier step."
    return Excess("factor", off, e.ratio, words, _rounded(e) if abs(off) < _ROUNDED else advice)


def _bias(e: _Errors) -> Excess | None:
    """Values of one size are off one way: what is computed is another function, close to the right one."""
    if not e.narrow or e.want.size < BINS * _LEAST_IN_BIN:
        return None
    least = 0.001 * float(ml_dtypes.finfo(e.dtype).eps) * _rms(e.want)
    worst: tuple[float, np.ndarray] | None = None
    for part in _bins(e):
        off = float((e.mine[part] - e.theirs[part]).mean())
        error = max(_rms(e.theirs[part]), e.floor) / np.sqrt(part.size)
        allowed = max(_SIGNIFICANT_IN_BIN * error, e.shift * _rms(e.want[part]), least)
        if abs(off) > allowed and (worst is None or abs(off) > abs(worst[0])):
            worst = off, part
    if worst is None:
        return None
    off, part = worst
    low, high = float(e.want[part].min()), float(e.want[part].max())
    words = f"values from {low:.3g} to {high:.3g} are too {_way(off)} by {abs(off):.2g} on average."
    advice = (
        f"{_ONE_WAY} By how much depends on the value. So the formula is another one, close to the right one: an "
        "approximation, or a constant in it that is a little off."
    )
    return Excess("formula", off / _rms(e.want), e.ratio, words, advice)


_ONE_WAY = "Rounding goes up as often as down, so this is no rounding."


def _bins(e: _Errors) -> list[np.ndarray]:
    return np.array_split(np.argsort(e.want, kind="stable"), BINS)


def _without_bins(e: _Errors) -> np.ndarray:
    left = e.mine.copy()
    for part in _bins(e) if e.want.size >= BINS * _LEAST_IN_BIN else []:
        slope, mean = np.polyfit(e.want[part], left[part], 1) if np.ptp(e.want[part]) else (0.0, left[part].mean())
        left[part] -= slope * e.want[part] + mean
    return left


def _without_line(e: _Errors) -> np.ndarray:
    basis = np.stack([e.want, np.ones_like(e.want)], axis=1)
    line, *_ = np.linalg.lstsq(basis, e.mine, rcond=None)
    return e.mine - basis @ line


# --- errors that are too large ----------------------------------------------------------------------------------------


def _too_large(e: _Errors) -> bool:
    """RMS above the limit, and not by a few elements alone: with few values there is no telling."""
    over = np.square(e.mine) - e.limits.rms**2 * np.square(e.theirs) - e.floor**2
    return float(over.sum()) > 4 * float(np.sqrt(_sum(over)))


def _scatter(e: _Errors) -> Excess:
    once = e.narrow and e.once > 0 and 0.95 < _rms(e.theirs) / e.once < 1.05
    than = f"one rounding to {e.dtype}" if once else "the course's solution"
    words = f"the error is {times(e.ratio)} that of {than}, though each value is nearly right."
    return Excess("scatter", e.ratio, e.ratio, words, _rounded(e))


def _rounded(e: _Errors) -> str:
    """What to look for where something may have been rounded."""
    if e.narrow:
        return (
            f"Something is rounded to {e.dtype} once too often: a product, a sum, or a function that is worked out in "
            f"{e.dtype}. Or the formula is another one, close to the right one."
        )
    return (
        "Either something is rounded: a float32 keeps seven digits of a number, so few are left where two large "
        "numbers nearly cancel. Subtract them before anything is added, and scale a sum once, at its end. Or the "
        "formula is another one, close to the right one."
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def _sum(x: np.ndarray) -> float:
    return float(np.square(x).sum())


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if np.size(x) else 0.0


def _way(off: float) -> str:
    return "large" if off > 0 else "small"


def times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio < 1000 else f"{ratio:,.0f} times"


def _percent(off: float) -> str:
    return f"{100 * abs(off):.2g}%"


def _digits(off: float) -> int:
    """Decimals that show a factor's distance from 1 with two digits."""
    return int(np.ceil(-np.log10(abs(off)))) + 1
