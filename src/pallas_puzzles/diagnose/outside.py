"""Work outside of the kernels that a puzzle does not allow."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..ir.capture import Outside
from ..lens.machine import listed
from .findings import Finding


def explain_barred(outside: Sequence[Outside], barred: Mapping[str, str], allow: Sequence[str]) -> Finding | None:
    """A primitive that nobody may make, by whatever name; a scatter, when several values go to one place."""
    for o in outside:
        harmless = o.primitive.startswith("scatter") and not o.crowded
        if o.primitive in barred and not harmless and not o.dtypes <= frozenset(allow):
            cause = barred[o.primitive].replace("{name}", o.primitive).replace("{shape}", str(o.shape))
            return Finding("forbidden", cause, [], o.line)
    return None


def explain_outside(outside: Sequence[Outside], allow: Sequence[str]) -> Finding | None:
    """Array work outside of the kernels, beyond reshapes, casts and what is allowed: primitives, or dtypes made."""
    allowed = frozenset(allow) | {several for several, one in _SEVERAL.items() if one in allow}
    refused = [o for o in outside if o.primitive not in allowed and not (o.dtypes and o.dtypes <= allowed)]
    if not refused:
        return None
    names = ", ".join(dict.fromkeys(o.primitive for o in refused))
    first = refused[0]
    cause = (
        f"{names} {'are' if ', ' in names else 'is'} done outside of the kernel, on arrays of shape {first.shape}: "
        f"this puzzle is about doing the work inside pallas_call. Only {_permitted(allow)} may happen outside."
    )
    more = [f"{o.primitive} on shape {o.shape}{place_of(o)}" for o in refused[1:4]]
    return Finding("outside", cause, more, first.line)


# What JAX does at once, or with another name, on some versions (seen on jax 0.12.0.1)
_SEVERAL = {
    "split": "slice",
    "unstack": "slice",
    "stack": "concatenate",
    "tile": "broadcast_in_dim",
    "dynamic_update_slice": "scatter",
}


def _permitted(allow: Sequence[str]) -> str:
    """What may happen outside, in words."""
    dtypes = [name for name in allow if _is_dtype(name)]
    primitives = [name for name in allow if name not in dtypes]
    made = [f"work that makes arrays of {' or '.join(dtypes)}"] if dtypes else []
    return listed(["reshapes", "casts", *primitives, *made])


def _is_dtype(name: str) -> bool:
    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def place_of(o: Outside) -> str:
    """' at a.py:7: y = x + 1', behind what is done there."""
    return f" at {o.line}: {o.line.text}" if o.line else ""
