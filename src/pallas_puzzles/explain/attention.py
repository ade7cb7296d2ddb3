"""Wrong attention that is known by what comes out of it: scales, masks, skipped blocks, logarithms."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from .suspects import recognise

LOG2_E = 1.4426950408889634
_LOWEST = float(jnp.finfo(jnp.float32).min)
Spec = Callable[..., Any]
Rule = Callable[[SimpleNamespace], Any]  # positions of queries, keys and blocks -> who sees whom


# --- attention in plain jnp, piece by piece ---------------------------------------------------------------------------


def products(q: Any, k: Any) -> Any:
    """(B, H, Sq, D), (B, H, Skv, D) -> (B, H, Sq, Skv), float32"""
    return jnp.einsum("bhqd,bhkd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32))


def _scores(q: Any, k: Any) -> Any:
    return products(q, k) * q.shape[3] ** -0.5


def _weigh(s: Any, v: Any) -> Any:
    """softmax(s) @ v, and 0 where a row of s is -inf throughout."""
    e = jnp.exp(s - jnp.maximum(s.max(axis=-1, keepdims=True), _LOWEST))
    total = e.sum(axis=-1, keepdims=True)
    o = jnp.einsum("bhqk,bhkd->bhqd", e / jnp.where(total == 0, 1, total), v.astype(jnp.float32))
    return o.astype(v.dtype)


def _seen(rule: Rule) -> Spec:
    """Scores where `rule` says so, -inf elsewhere."""

    def spec(q: Any, k: Any, *, bq: int, bkv: int) -> Any:
        (Sq, Skv), x = (q.shape[2], k.shape[2]), SimpleNamespace(bq=bq, bkv=bkv, Sq=q.shape[2], Skv=k.shape[2])
        x.offset, x.query, x.key = Skv - Sq, jnp.arange(Sq)[:, None] + Skv - Sq, jnp.arange(Skv)[None, :]
        x.first_query, x.first_key = (x.query - x.offset) // bq * bq + x.offset, x.key // bkv * bkv
        x.last_query, x.last_key = x.first_query + bq - 1, x.first_key + bkv - 1
        return jnp.where(rule(x), _scores(q, k), -jnp.inf)

    return spec


def _seen_by_heads(q: Any, k: Any, bq: int, bkv: int) -> Any:
    """Scores whose blocks stand where batch and head say, instead of their own two indices."""
    (B, H, Sq, _), Skv = q.shape, k.shape[2]
    queries = jnp.arange(B)[:, None, None, None] * bq + jnp.arange(Sq)[:, None] % bq + Skv - Sq
    keys = jnp.arange(H)[None, :, None, None] * bkv + jnp.arange(Skv)[None, :] % bkv
    return jnp.where(keys <= queries, _scores(q, k), -jnp.inf)


def _causal(q: Any, k: Any) -> Any:
    return _seen(lambda x: x.key <= x.query)(q, k, bq=1, bkv=1)


def _attention_seen(rule: Rule) -> Spec:
    return lambda q, k, v, *, bq, bkv: _weigh(_seen(rule)(q, k, bq=bq, bkv=bkv), v)


def _attention_and_lse_seen(rule: Rule, when: bool = True) -> Spec:
    """Both results where `rule` says who sees whom. It is a mistake that one makes when `causal` is `when`."""

    def spec(q: Any, k: Any, v: Any, *, causal: bool, bq: int, bkv: int) -> tuple[Any, Any] | None:
        if causal != when:
            return None
        s = _seen(rule)(q, k, bq=bq, bkv=bkv)
        return _weigh(s, v), jax.nn.logsumexp(s, axis=-1, keepdims=True)

    return spec


def _values_cut_at_Sq(q: Any, k: Any, v: Any, *, causal: bool, bq: int, bkv: int) -> tuple[Any, Any]:
    """Values from row Sq on are 0 in blocks that need a mask."""
    s = _causal(q, k) if causal else _scores(q, k)

    def kept(x: SimpleNamespace) -> Any:
        whole = x.last_key <= (x.first_query if causal else x.Skv - 1)
        return whole | (x.key < x.Sq)

    m = jnp.maximum(s.max(axis=-1, keepdims=True), _LOWEST)
    e = jnp.exp(s - m)
    total = e.sum(axis=-1, keepdims=True)
    counted = jnp.where(jnp.isfinite(_seen(kept)(q, k, bq=bq, bkv=bkv)), e, 0) / jnp.where(total == 0, 1, total)
    o = jnp.einsum("bhqk,bhkd->bhqd", counted, v.astype(jnp.float32)).astype(v.dtype)
    return o, jax.nn.logsumexp(s, axis=-1, keepdims=True)


def _lse(rule: Callable[[Any, Any], Any]) -> Spec:
    """Both results, where `rule`, of a row's maximum and its sum of exp(s - maximum), makes the second."""

    def spec(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
        s = _causal(q, k) if causal else _scores(q, k)
        m = jnp.maximum(s.max(axis=-1, keepdims=True), _LOWEST)
        return _weigh(s, v), rule(m, jnp.exp(s - m).sum(axis=-1, keepdims=True))

    return spec


def _whole_blocks_twice(q: Any, k: Any, v: Any, *, bq: int, bkv: int) -> Any:
    whole = _seen(lambda x: x.last_key <= x.first_query)(q, k, bq=bq, bkv=bkv)
    return _weigh(jnp.logaddexp(_causal(q, k), whole), v)


# --- mistakes --------------------------------------------------------------------------------------------------------

NO_SCALE = "if the scores are the plain products: `block_scores` wants the scale, D**-0.5, as its third argument."
NO_SCALE_BASE_2 = "if the scores are the plain products: online_step wants them times D**-0.5 * LOG2_E."
NO_BASE_2 = (
    "if online_step, which counts in base 2, gets scores times D**-0.5 alone: exp(x) is exp2(x * LOG2_E), and that "
    "factor is missing from what `block_scores` is given."
)
_SEEN_WRONGLY: dict[str, Rule] = {
    "if query 0 stands at position 0: it stands at Skv - Sq.": lambda x: x.key <= x.query - x.offset,
    "if no block is masked (`hide_after`): in a block that the diagonal cuts, early queries see later keys.": (
        lambda x: x.first_key <= x.last_query
    ),
    (
        "if a block goes unmasked as soon as its last query sees all of it: its first query has to (the condition of "
        "that pl.when)."
    ): (lambda x: (x.key <= x.query) | (x.last_key <= x.last_query)),
    (
        "if a block goes unmasked as soon as its first query sees its first key: it has to see the last (the "
        "condition of that pl.when)."
    ): (lambda x: (x.key <= x.query) | (x.first_key <= x.first_query)),
    (
        "if a block is skipped unless its first query sees a key of it: the last query sees more (the condition of "
        "your pl.when)."
    ): (lambda x: (x.key <= x.query) & (x.first_key <= x.first_query)),
    (
        "if a block is skipped unless its last query sees all of it: one key is enough (the condition of your pl.when)."
    ): (lambda x: (x.key <= x.query) & (x.last_key <= x.last_query)),
    (
        "if a block is skipped whose first key is its last query's own: <= instead of < (the condition of your "
        "pl.when)."
    ): (lambda x: (x.key <= x.query) & (x.first_key < x.last_query)),
    "if keys are counted from the start of their block (`hide_after`): block j starts at key j * bkv.": (
        lambda x: (x.key - x.first_key <= x.query) & (x.first_key <= x.last_query) | (x.last_key <= x.first_query)
    ),
    "if all queries of a block see what its last one sees: count their positions, one by one, from the first's.": (
        lambda x: (x.key <= x.query + x.bq - 1) & (x.first_key <= x.last_query) | (x.last_key <= x.first_query)
    ),
}

scores = recognise(
    {
        "if the scale is made of bq, the rows of `q_ref`: D is how many columns it has.": (
            lambda q, k, *, bq: products(q, k) * bq**-0.5
        ),
        "if the scale is made of bkv, the rows of `k_ref`: D is how many columns it has.": (
            lambda q, k, *, bkv: products(q, k) * bkv**-0.5
        ),
    }
)

causal_scores = recognise(
    {
        "if all queries of a block stand where its first does: a column counts along dimension 0.": _seen(
            lambda x: x.key <= x.first_query
        ),
        "if block i of the queries starts at row i * bkv: it has bq rows.": _seen(
            lambda x: x.key <= x.query + (x.first_query - x.offset) // x.bq * (x.bkv - x.bq)
        ),
        "if block j of the keys starts at key j * bq: it has bkv keys.": _seen(
            lambda x: x.key - x.first_key + x.first_key // x.bkv * x.bq <= x.query
        ),
        "if `offset` is subtracted: query 0 stands at Skv - Sq, that much after key 0.": _seen(
            lambda x: x.key <= x.query - 2 * x.offset
        ),
        "if query 0 stands at position 0: it stands at `offset`, Skv - Sq.": _seen(
            lambda x: x.key <= x.query - x.offset
        ),
        "if grid indices 0 and 1, b and h, count the blocks: those of queries and keys are 2 and 3 (pl.program_id).": (
            lambda q, k, *, bq, bkv: _seen_by_heads(q, k, bq, bkv)
        ),
        "if keys stand where the queries are, and queries where the keys are: `hide_after` gets the positions of the "
        "queries, then the first key.": _seen(
            lambda x: (
                x.key - x.first_key + (x.first_query - x.offset) <= x.first_key + x.offset + x.query - x.first_query
            )
        ),
    }
)

naive = recognise(
    {
        "if every query sees every key: call causal_scores, not `scores`.": lambda q, k, v: _weigh(_scores(q, k), v),
        "if the scores weigh the values as they are: they have to go through softmax_rows first.": lambda q, k, v: (
            jnp.einsum("bhqk,bhkd->bhqd", _causal(q, k), v.astype(jnp.float32)).astype(v.dtype)
        ),
    }
)

one_block = recognise({NO_SCALE: lambda q, k, v: _weigh(products(q[None, None], k[None, None]), v[None, None])[0, 0]})

flash = recognise(
    {
        "if the scores are multiplied by LOG2_E and not by D**-0.5.": lambda q, k, v: _weigh(products(q, k), v),
        NO_SCALE_BASE_2: lambda q, k, v: _weigh(products(q, k) / LOG2_E, v),
        NO_BASE_2: lambda q, k, v: _weigh(_scores(q, k) / LOG2_E, v),
    }
)

causal_flash = recognise(
    {
        NO_SCALE_BASE_2: lambda q, k, v: _weigh(_causal(q, k) * q.shape[3] ** 0.5 / LOG2_E, v),
        NO_BASE_2: lambda q, k, v: _weigh(_causal(q, k) / LOG2_E, v),
        "if a block that every query sees is worked on twice, with the mask and without it.": _whole_blocks_twice,
        **{words: _attention_seen(rule) for words, rule in _SEEN_WRONGLY.items()},
    }
)

flash_and_lse = recognise(
    {
        "if lse is the maximum alone: log(l), what the row sums to beyond it, is missing.": _lse(lambda m, l: m),
        "if m goes into lse in base 2, and log(l) in base e: divide m by LOG2_E.": _lse(
            lambda m, l: m * LOG2_E + jnp.log(l)
        ),
        "if m goes into lse in base e, and log2(l) in base 2: take jnp.log of l.": _lse(lambda m, l: m + jnp.log2(l)),
        "if log(l) is divided by LOG2_E as well: only m is in base 2.": _lse(lambda m, l: m + jnp.log(l) / LOG2_E),
        "if lse is m plus l: it is m plus the logarithm of l.": _lse(lambda m, l: m + l),
        "if m is multiplied by LOG2_E once more: m is in base 2 already, divide it by LOG2_E.": _lse(
            lambda m, l: m * LOG2_E**2 + jnp.log(l)
        ),
        "if the mask is causal whatever `causal` says: without it every query sees up to Skv - 1.": (
            _attention_and_lse_seen(lambda x: x.key <= x.query, when=False)
        ),
        "if blocks are skipped as if `causal` were True: without it every query sees up to Skv - 1.": (
            _attention_and_lse_seen(lambda x: x.first_key <= x.last_query, when=False)
        ),
        "if the mask ends at key Sq: there are Skv of them (`hide_after`).": _attention_and_lse_seen(
            lambda x: (x.last_key < x.Skv) | (x.key < x.Sq), when=False
        ),
        "if the mask ends at key Sq, and at the diagonal: there are Skv keys (`hide_after`).": _attention_and_lse_seen(
            lambda x: (x.last_key <= x.first_query) | ((x.key < x.Sq) & (x.key <= x.query))
        ),
        "if values from Sq on are taken for 0: the keys and values end at Skv (`rows_inside`).": _values_cut_at_Sq,
        **{words: _attention_and_lse_seen(rule) for words, rule in _SEEN_WRONGLY.items()},
    }
)
