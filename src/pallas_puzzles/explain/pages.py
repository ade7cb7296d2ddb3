"""Wrong attention over lists of blocks and over pages that is known by what comes out of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from .attention import LOG2_E, NO_BASE_2, NO_SCALE_BASE_2, products
from .suspects import recognise

Spec = Callable[..., Any]

_LOST_SCALE = "if the scores are multiplied by LOG2_E and not by D**-0.5, in what `block_scores` is given."


def _weighed(s: Any, seen: Any, v: Any) -> Any:
    """softmax of s where something is seen, times v; 0 for rows that see nothing. float32"""
    s = jnp.where(seen, s, -jnp.inf)
    top = s.max(axis=-1, keepdims=True)
    e = jnp.where(seen, jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = e.sum(axis=-1, keepdims=True)
    return jnp.einsum("bhqk,bhkd->bhqd", e / jnp.where(total == 0, 1, total), v.astype(jnp.float32))


# --- lists of blocks -------------------------------------------------------------------------------------------------


def _blocks(mask: Callable[..., Any], Sq: int, Skv: int, bq: int, bkv: int) -> SimpleNamespace:
    """For each query and key: does the one see the other; is their block live, and is it full."""
    x = SimpleNamespace(rows=np.arange(Sq)[:, None], cols=np.arange(Skv)[None, :], bq=bq, bkv=bkv, mask=mask)
    x.seen = np.asarray(mask(x.rows, x.cols))
    x.live, x.full = np.zeros_like(x.seen), np.zeros_like(x.seen)
    for i in range(0, Sq, bq):
        for j in range(0, Skv, bkv):
            block = x.seen[i : i + bq, j : j + bkv]
            x.live[i : i + bq, j : j + bkv] = block.any()
            x.full[i : i + bq, j : j + bkv] = block.all() and j + bkv <= Skv
    return x


def _splash(seen: Callable[[SimpleNamespace], Any], scale: float = 1.0, power: float = -0.5) -> Spec:
    """Attention where `seen` says so."""

    def spec(q: Any, k: Any, v: Any, *, mask: Callable[..., Any], bq: int, bkv: int) -> Any:
        x = _blocks(mask, q.shape[2], k.shape[2], bq, bkv)
        return _weighed(products(q, k) * (scale * q.shape[3] ** power), seen(x), v).astype(q.dtype)

    return spec


splash = recognise(
    {
        _LOST_SCALE: _splash(lambda x: x.seen, power=0.0),
        NO_SCALE_BASE_2: _splash(lambda x: x.seen, 1 / LOG2_E, 0.0),
        NO_BASE_2: _splash(lambda x: x.seen, 1 / LOG2_E),
        "if partial blocks go without the `mask`: it says who sees whom inside of them.": _splash(lambda x: x.live),
        "if partial blocks are left out: kind 1 has its work, too, behind the `mask`.": _splash(lambda x: x.full),
        "if full blocks are left out: kind 2 has its work, too, without a mask.": _splash(lambda x: x.live & ~x.full),
        "if rows are counted from the top of their block: the `mask` wants row i * bq + r of the whole array.": _splash(
            lambda x: x.full | (x.live & x.mask(x.rows % x.bq, x.cols))
        ),
        "if columns are counted from the start of their block: the `mask` wants those of the whole array.": _splash(
            lambda x: x.full | (x.live & x.mask(x.rows, x.cols % x.bkv))
        ),
        "if `mask` is asked for columns and rows: rows come first.": _splash(
            lambda x: x.full | (x.live & x.mask(x.cols, x.rows))
        ),
        "if block i of the queries is taken to start at row i * bkv: it has bq rows.": _splash(
            lambda x: x.full | (x.live & x.mask(x.rows % x.bq + x.rows // x.bq * x.bkv, x.cols))
        ),
    }
)


# --- pages -----------------------------------------------------------------------------------------------------------

Lengths = Callable[[Any, int], Any]


def _paged(
    *,
    table: Callable[[Any], Any] = lambda table: table,
    seen: Lengths = lambda n, page: n,
    there: Lengths = lambda n, page: n,
    heads: Callable[[Any], Any] = lambda pages: pages,
    scale: float = 1.0,
    power: float = -0.5,
) -> Spec:
    """Attention of each user's query over its pages. seen: how many keys; there: before which one values are not 0."""

    def spec(q: Any, k_pages: Any, v_pages: Any, page_table: Any, lengths: Any) -> Any:
        (B, H, D), (Hkv, _, page, _) = q.shape, k_pages.shape
        pages, positions = table(page_table), jnp.arange(page_table.shape[1] * page)
        k, v = (
            jnp.nan_to_num(jnp.moveaxis(heads(a)[:, pages].reshape(Hkv, B, -1, D), 0, 1).astype(jnp.float32))
            for a in (k_pages, v_pages)
        )
        most, real = (rule(lengths, page)[:, None, None, None] for rule in (seen, there))
        v = jnp.where(positions[:, None] < real, v, 0)
        s = products(q.reshape(B, Hkv, H // Hkv, D), k) * (scale * D**power)
        return _weighed(s, positions < most, v).astype(q.dtype).reshape(q.shape)

    return spec


def _whole_pages(n: Any, page: int) -> Any:
    return -(-n // page) * page


paged = recognise(
    {
        _LOST_SCALE: _paged(power=0.0),
        NO_SCALE_BASE_2: _paged(scale=1 / LOG2_E, power=0.0),
        NO_BASE_2: _paged(scale=1 / LOG2_E),
        "if every key of a user's last page counts: those beyond `lengths_ref[b]` have to be -inf.": _paged(
            seen=_whole_pages
        ),
        "if every key and value of a user's last page counts: those beyond `lengths_ref[b]` are somebody else's.": (
            _paged(seen=_whole_pages, there=_whole_pages)
        ),
        "if values are 0 from the second page on (`rows_inside`): the size is the length, not that of a page.": _paged(
            there=lambda n, page: jnp.minimum(n, page)
        ),
        "if a page counts only if all of it is there: one key is enough, the first, at t * page.": _paged(
            seen=lambda n, page: n // page * page
        ),
        "if key `lengths_ref[b]` is seen, too: keys are counted from 0.": _paged(
            seen=lambda n, page: jnp.minimum(n + 1, _whole_pages(n, page))
        ),
        "if the pages of user 0 are read for all: row b of the table (`table_ref`) is user b's.": _paged(
            table=lambda table: jnp.broadcast_to(table[:1], table.shape)
        ),
        "if the length of user 0 counts for all: `lengths_ref[b]` is user b's.": _paged(
            seen=lambda n, page: n[:1] + 0 * n, there=lambda n, page: n[:1] + 0 * n
        ),
        "if page t of the pool is read for page t of a user: where that one lies, `table_ref` says.": _paged(
            table=lambda table: jnp.broadcast_to(jnp.arange(table.shape[1]), table.shape)
        ),
        "if every step reads the first page of its user: step t reads page t of the table (`table_ref`).": _paged(
            table=lambda table: jnp.broadcast_to(table[:, :1], table.shape)
        ),
        "if all heads read the keys and values of head 0: head h of the pages is for group h.": _paged(
            heads=lambda pages: jnp.broadcast_to(pages[:1], pages.shape)
        ),
    }
)
