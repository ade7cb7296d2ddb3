"""Mistakes that are known by what comes out of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays import Explain, keywords_of, quickly_expected

# Times the tolerance of a right result: a mistake may make large numbers, and its steps are others than ours.
_LOOSE = 5


def recognise(mistakes: Mapping[str, Callable[..., Any]]) -> Explain:
    """An `explain` for `check`: which of the mistakes makes the result that an answer has made.

    mistakes: what it takes to get there ("without the scale: ...") -> a spec that makes it, in plain jnp; it is given
    those keywords of a case that it has. The closest of those that agree within tolerance is named, or none.
    """

    def explain(*args: Any, got: Any, want: Any, **keywords: Any) -> tuple[str, str]:
        found = {}
        for words, spec in mistakes.items():
            off = _distance(got, quickly_expected(spec, args, keywords_of(spec, keywords)))
            if off is not None:
                found[words] = off
        words = min(found, key=lambda words: found[words], default="")
        return (f"The result is what comes out {words}", "") if words else ("", "")

    return explain


def _distance(got: Any, made: Any) -> float | None:
    """How far two results are from one another, or None when they differ. NaN and infinity are like themselves."""
    import jax

    from ..lens.findings import Tolerance, default_tolerance

    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(made), strict=False))
    total = 0.0
    for a, b in pairs:
        dtype = np.asarray(a).dtype
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return None
        real = ~np.isnan(a)
        if not Tolerance(_LOOSE * default_tolerance(dtype).relative).close(a[real], b[real]).all():
            return None
        finite = real & np.isfinite(a)
        total += float(np.square(a[finite] - b[finite]).sum())
    return total if pairs else None
