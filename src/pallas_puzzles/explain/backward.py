"""Wrong gradients of attention that are known by what comes out of them: one piece of the way back, made otherwise."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .attention import NO_SCALE, products
from .suspects import recognise

Piece = Callable[[SimpleNamespace], Any]
Spec = Callable[..., Any]


def _masked(seen: Any, x: Any) -> Any:
    return jnp.where(seen, x, 0)


# The way back, in the order in which it is made. `back` and `visible`: scores and mask, made a second time.
_PIECES: dict[str, Piece] = {
    "back": lambda x: x.s,
    "visible": lambda x: x.seen,
    "delta": lambda x: (x.o * x.do).sum(axis=-1, keepdims=True),
    "dp": lambda x: products(x.do, x.v),
    "p_everywhere": lambda x: jnp.where(x.live, jnp.exp(x.back - x.lse), 0),
    "p": lambda x: _masked(x.visible, jnp.exp(x.back - x.lse)),
    "ds": lambda x: _masked(x.visible, x.p * (x.dp - x.delta)),
    "dq": lambda x: x.scale * jnp.einsum("bhqk,bhkd->bhqd", x.ds, x.k),
    "dk": lambda x: x.scale * jnp.einsum("bhqk,bhqd->bhkd", x.ds, x.q),
    "dv": lambda x: jnp.einsum("bhqk,bhqd->bhkd", x.p, x.do),
}


def _forward(q: Any, k: Any, v: Any, do: Any, causal: bool, bq: int, bkv: int) -> SimpleNamespace:
    x = SimpleNamespace(causal=causal, scale=q.shape[3] ** -0.5)
    x.q, x.k, x.v, x.do = (a.astype(jnp.float32) for a in (q, k, v, do))
    x.s, x.every = products(q, k) * x.scale, jnp.ones((1, 1, q.shape[2], k.shape[2]), bool)
    x.query, x.key = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])[None, :]
    x.offset = k.shape[2] - q.shape[2]
    x.causally = x.every & (x.key <= x.query + x.offset)
    x.seen = x.causally if causal else x.every
    x.live_first = x.every & (x.key // bkv * bkv <= x.query // bq * bq + x.offset) if causal else x.every
    x.live = x.every & (x.key // bkv * bkv <= x.query // bq * bq + bq - 1 + x.offset) if causal else x.every
    lse = jax.nn.logsumexp(jnp.where(x.seen, x.s, -jnp.inf), axis=-1, keepdims=True)
    x.lse = jnp.where(jnp.isfinite(lse), lse, 0)
    x.o = jnp.einsum("bhqk,bhkd->bhqd", _masked(x.seen, jnp.exp(x.s - x.lse)), x.v)
    return x


def _otherwise(pieces: Mapping[str, Piece], only: Sequence[str] = ("dq", "dk", "dv")) -> Spec:
    """dq, dk and dv, where these pieces are made otherwise. only: the gradients that the mistake gets into."""

    def spec(q: Any, k: Any, v: Any, do: Any, *, causal: bool, bq: int, bkv: int) -> tuple[Any, Any, Any]:
        right, wrong = (_forward(q, k, v, do, causal, bq, bkv) for _ in range(2))
        for name, piece in _PIECES.items():
            setattr(right, name, piece(right))
            setattr(wrong, name, pieces.get(name, piece)(wrong))
        made = [getattr(wrong if name in only else right, name) for name in ("dq", "dk", "dv")]
        return tuple(gradient.astype(like.dtype) for gradient, like in zip(made, (q, k, v), strict=True))

    return spec


def _dq_of(spec: Spec) -> Spec:
    return lambda q, k, v, do, *, causal, bq, bkv: spec(q, k, v, do, causal=causal, bq=bq, bkv=bkv)[0]


# What is true of both kernels: what p and ds are made of.
_IN_A_KERNEL: dict[str, dict[str, Piece]] = {
    NO_SCALE: {"back": lambda x: x.s / x.scale},
    "if `dp` is scaled like a score: it is do @ v.T, times 1.": {"dp": lambda x: products(x.do, x.v) * x.scale},
    "if p is jnp.exp(s): softmax of s is jnp.exp(s - lse).": {"p": lambda x: _masked(x.visible, jnp.exp(x.back))},
    "if p is `s - lse`: exp of it is missing.": {"p": lambda x: _masked(x.visible, x.back - x.lse)},
    "if p is made with jnp.exp2: s and lse are in base e here.": {
        "p": lambda x: _masked(x.visible, jnp.exp2(x.back - x.lse))
    },
    "if p is jnp.exp(s) over lse: lse is the logarithm of the sum, and p is jnp.exp(s - lse).": {
        "p": lambda x: _masked(x.visible, jnp.exp(x.back) / x.lse)
    },
    "if the two sides of jnp.where are in each other's place: 0 belongs where nothing is `seen`.": {
        "ds": lambda x: jnp.where(x.visible, 0, x.p_everywhere * (x.dp - x.delta))
    },
    "if blocks are skipped unless their first query sees a key of them: the last query sees more (your pl.when).": {
        "visible": lambda x: x.seen & x.live_first
    },
    "if delta is left out: ds is p * (`dp` - delta).": {"ds": lambda x: _masked(x.visible, x.p * x.dp)},
    "if delta is added: ds is p * (`dp` - delta).": {"ds": lambda x: _masked(x.visible, x.p * (x.dp + x.delta))},
    "if ds has lost its factor p: it is p * (`dp` - delta).": {"ds": lambda x: _masked(x.visible, x.dp - x.delta)},
    "if delta is taken from p * `dp`: p belongs to the difference, p * (dp - delta).": {
        "ds": lambda x: _masked(x.visible, x.p * x.dp - x.delta)
    },
    "if ds is made of s instead of p: it is p * (`dp` - delta).": {
        "ds": lambda x: _masked(x.visible, x.back * (x.dp - x.delta))
    },
    "if nothing is masked: `seen` says where p and ds are 0.": {"visible": lambda x: x.live},
    "if ds is not masked: where nothing is `seen`, p and ds are 0.": {
        "ds": lambda x: jnp.where(x.live, jnp.exp(x.back - x.lse) * (x.dp - x.delta), 0)
    },
    "if lse and delta have changed places: p is made of lse, ds of delta.": {
        "p": lambda x: _masked(x.visible, jnp.exp(x.back - x.delta)),
        "ds": lambda x: _masked(x.visible, x.p * (x.dp - x.lse)),
    },
}

_IN_DQ: dict[str, dict[str, Piece]] = {
    **_IN_A_KERNEL,
    "if p stands where ds belongs: dq is jnp.dot(ds, k), scaled.": {
        "dq": lambda x: x.scale * jnp.einsum("bhqk,bhkd->bhqd", x.p, x.k)
    },
    "if ds is multiplied by v: dq is jnp.dot(ds, k), scaled.": {
        "dq": lambda x: x.scale * jnp.einsum("bhqk,bhkd->bhqd", x.ds, x.v)
    },
}

_IN_DKV: dict[str, dict[str, Piece]] = {
    **_IN_A_KERNEL,
    "if the p that goes into dv is not masked: `p_and_ds` returns one that is.": {
        "dv": lambda x: jnp.einsum("bhqk,bhqd->bhkd", _masked(x.live, jnp.exp(x.back - x.lse)), x.do)
    },
    "if `dv_acc_ref` gathers ds.T @ do: dv is p.T @ do.": {"dv": lambda x: jnp.einsum("bhqk,bhqd->bhkd", x.ds, x.do)},
    "if `dv_acc_ref` gathers ds.T @ do, scaled: dv is p.T @ do.": {
        "dv": lambda x: x.scale * jnp.einsum("bhqk,bhqd->bhkd", x.ds, x.do)
    },
    "if `dv_acc_ref` gathers p.T @ q: dv is p.T @ do.": {"dv": lambda x: jnp.einsum("bhqk,bhqd->bhkd", x.p, x.q)},
    "if `dv_acc_ref` is scaled, too: D**-0.5 stood between q and k, and v never met it.": {
        "dv": lambda x: x.scale * jnp.einsum("bhqk,bhqd->bhkd", x.p, x.do)
    },
    "if `dk_acc_ref` gathers p.T @ q: dk is ds.T @ q, scaled.": {
        "dk": lambda x: x.scale * jnp.einsum("bhqk,bhqd->bhkd", x.p, x.q)
    },
    "if `dk_acc_ref` gathers ds.T @ do: dk is ds.T @ q, scaled.": {
        "dk": lambda x: x.scale * jnp.einsum("bhqk,bhqd->bhkd", x.ds, x.do)
    },
}

# Where the three calls of the way back are made: (the gradients it gets into, what is made otherwise).
_BETWEEN_CALLS: dict[str, tuple[tuple[str, ...], dict[str, Piece]]] = {}
for _made, _words in (
    (lambda x: (x.q * x.do).sum(axis=-1, keepdims=True), "q and do"),
    (lambda x: (x.o * x.o).sum(axis=-1, keepdims=True), "o alone"),
    (lambda x: (x.do * x.do).sum(axis=-1, keepdims=True), "do alone"),
    (lambda x: (x.q * x.o).sum(axis=-1, keepdims=True), "q and o"),
):
    _BETWEEN_CALLS[f"if delta is made of {_words}: `attention_delta` wants o, the result of the way there, and do."] = (
        ("dq", "dk", "dv"),
        {"delta": _made},
    )
for _only, _call in (
    (("dq", "dk", "dv"), "`attention_dq` and attention_dkv"),
    (("dq",), "`attention_dq`"),
    (("dk", "dv"), "`attention_dkv`"),
):
    _BETWEEN_CALLS[f"if {_call} work causally whatever causal says: hand it on, causal=causal."] = (
        _only,
        {"visible": lambda x: x.causally},
    )
    _BETWEEN_CALLS[f"if {_call} do not work causally: hand it on, causal=causal."] = (
        _only,
        {"visible": lambda x: x.every},
    )
    _BETWEEN_CALLS[f"if lse and delta have changed places in what is given to {_call}."] = (
        _only,
        _IN_A_KERNEL["if lse and delta have changed places: p is made of lse, ds of delta."],
    )


def _one_number_a_block(q: Any, k: Any, v: Any, do: Any, *, bq: int) -> Any:
    rows = _forward(q, k, v, do, False, 1, 1)
    each = (rows.o * rows.do).sum(axis=-1, keepdims=True)
    whole = each.reshape(*each.shape[:2], -1, bq, 1).sum(axis=3, keepdims=True)
    return jnp.broadcast_to(whole, (*each.shape[:2], each.shape[2] // bq, bq, 1)).reshape(each.shape)


delta = recognise(
    {
        "if all rows of a block share one number, the sum over the whole block: sum over D alone, axis=1.": (
            _one_number_a_block
        ),
    }
)

dq = recognise({words: _dq_of(_otherwise(pieces)) for words, pieces in _IN_DQ.items()})

gradients = recognise(
    {
        **{f"{words[:-1]}, in add_dkv.": _otherwise(pieces, ("dk", "dv")) for words, pieces in _IN_DKV.items()},
        **{words: _otherwise(pieces, only) for words, (only, pieces) in _BETWEEN_CALLS.items()},
    }
)
