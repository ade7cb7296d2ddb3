"""Wrong routing: of tokens to experts, of rows to their slots, and back."""

from typing import Any

import numpy as np

from ...lens.machine import listed
from .groups import Explained, close, first_wrong


def any_order(num_slots: int) -> np.ndarray:
    """A permutation of slots that no router has made, int32; it is not its own inverse."""
    return np.arange(num_slots, dtype=np.int32) * 13 % num_slots


def gate(logits: Any, *, got: Any, want: Any, k: int, **_: Any) -> Explained:
    """The k best experts of each token, the best first, and a softmax of their logits."""
    logits = np.asarray(logits, np.float64)
    if got.weights.shape != want.weights.shape or got.experts.shape != want.experts.shape:
        return f"Of each token's {logits.shape[1]} logits, k = {k} are kept.", ""
    if (got.experts != want.experts).any():
        t = int(np.flatnonzero((got.experts != want.experts).any(axis=1))[0])
        mine, right = got.experts[t].tolist(), want.experts[t].tolist()
        shown = ", ".join(f"{logits[t, e]:.3g} of expert {e}" for e in right)
        if sorted(mine) == sorted(right):
            return f"Token {t} has the right experts in another order, {mine}: the best comes first, {right}.", ""
        with np.errstate(under="ignore"):
            p = np.exp(logits[t] - logits[t].max())
        p = np.where(p < np.finfo(np.float32).tiny, 0, p)
        if mine == np.argsort(-p, kind="stable")[:k].tolist():
            zeros = np.flatnonzero(p == 0).tolist()
            return (
                f"Token {t}'s largest logits are {shown}. Yours are {mine}, as if its softmax had been asked: that "
                f"underflows to 0 for experts {listed([str(e) for e in zeros])}, these zeros tie, and the lower number "
                "wins. Choose by the logits."
            ), ""
        return f"Token {t}'s largest logits are {shown}. With {mine}, it would go to experts it likes less.", ""
    return _about_weights(logits, got, want, k), ""


def _about_weights(logits: np.ndarray, got: Any, want: Any, k: int) -> str:
    with np.errstate(all="ignore"):
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        over_all = np.take_along_axis(p / p.sum(axis=1, keepdims=True), want.experts, axis=1)
        over_tokens = np.exp(logits - logits.max(axis=0)) / np.exp(logits - logits.max(axis=0)).sum(axis=0)
    best = np.take_along_axis(logits, want.experts, axis=1)
    down = np.exp(best - best.max(axis=0)) / np.exp(best - best.max(axis=0)).sum(axis=0)
    if not np.isfinite(got.weights).all():
        t = int(np.flatnonzero(~np.isfinite(got.weights).all(axis=1))[0])
        largest = f"Token {t} has a logit of {logits[t].max():.3g}"
        return f"{largest}: its exp overflows, or all of them vanish. Subtract the largest first."
    t = int(np.flatnonzero(~np.isclose(got.weights, want.weights, rtol=1e-4).all(axis=1))[0])
    total = float(got.weights[t].sum())
    if np.allclose(got.weights, over_all, rtol=1e-4):
        return (
            f"Token {t}'s weights add up to {total:.3f}: they are shares among all {logits.shape[1]} experts, of which "
            f"{k} are kept, and {1 - total:.1%} of its result is lost. The shares are among the k that were chosen."
        )
    among = [np.take_along_axis(over_tokens, want.experts, axis=1), down]
    if any(np.allclose(got.weights, each, rtol=1e-4) for each in among):
        return f"Token {t}'s weights add up to {total:.3f}: the softmax runs down the tokens. Each token has its own."
    if np.allclose(np.sort(got.weights, axis=1), np.sort(want.weights, axis=1), rtol=1e-4):
        return (
            f"Token {t} has the right weights in another order: {want.experts[t, 0]}, its best expert, has the largest."
        )
    if abs(total - 1) > 1e-3:
        return f"Token {t}'s weights add up to {total:.3f}, not to 1: its result comes out {total:.3f} times as large."
    return f"Token {t}'s best logits are {best[t].round(3).tolist()}: softmax of these, and of no others."


def permuted(x: Any, experts: Any, weights: Any, *, got: Any, want: Any, num_experts: int, **_: Any) -> Explained:
    """Rows sorted by expert, and brought back to their slots."""
    slots = np.asarray(experts).reshape(-1)
    if got.order.shape != want.order.shape:
        return f"There are {slots.size} slots, k for each token, and each has one place in the order.", ""
    if (got.order != want.order).any():
        return _about_order(slots, got.order, want.order, np.shape(experts)[1]), ""
    if got.group_sizes.shape != want.group_sizes.shape:
        return f"One number for each of the {num_experts} experts, chosen or not.", ""
    if (got.group_sizes != want.group_sizes).any():
        e = first_wrong(got.group_sizes, want.group_sizes)
        mine = int(got.group_sizes[e])
        best = (
            ", which is how often it is a token's best" if mine == int(np.sum(np.asarray(experts)[:, 0] == e)) else ""
        )
        return (
            f"Expert {e} is chosen in {want.group_sizes[e]} slots. With {mine}{best}, the rows of every expert behind "
            "it would meet the wrong weights."
        ), ""
    if got.result.shape != want.result.shape:
        return "One row for each token: the rows of its k slots, weighted and added.", ""
    return _about_combined(np.asarray(x), np.asarray(experts), np.asarray(weights), got, want), ""


def _about_order(slots: np.ndarray, got: np.ndarray, want: np.ndarray, k: int) -> str:
    p = first_wrong(got, want)
    mine, right = int(got[p]), int(want[p])
    if np.array_equal(got, np.argsort(want, kind="stable")):
        return "This is the inverse: at which position a slot stands. The order says which slot stands at a position."
    if np.array_equal(got, want // k):
        return "These are tokens, slot // k. The order lists the slots themselves; the token is worked out from them."
    if sorted(got.tolist()) != list(range(slots.size)):
        return (
            f"Position {p} has {mine}, and not every slot from 0 to {slots.size - 1} occurs once: rows would be lost."
        )
    if np.array_equal(got, np.argsort(slots.reshape(-1, k).T.reshape(-1), kind="stable")):
        return (
            "The slots are numbered choice by choice, all first choices before all second ones: slot s would be token "
            f"s % {slots.size // k}'s. They go token by token, s // k: flatten experts as it is."
        )
    if slots[mine] == slots[right]:
        return (
            f"Slots {mine} and {right} both go to expert {slots[mine]}, and have changed places: equal ones keep their "
            "order in a stable sort. The sums come out the same up to rounding, and no two sorts the same way."
        )
    return (
        f"Position {p} has slot {mine}, of expert {slots[mine]}; slot {right}, of expert {slots[right]}, comes first."
    )


def _about_combined(x: np.ndarray, experts: np.ndarray, weights: np.ndarray, got: Any, want: Any) -> str:
    T, k = experts.shape
    order, position = want.order, np.argsort(want.order, kind="stable")
    rows = (1 + experts.reshape(-1)[order])[:, None] * x[order // k]

    def combined(fetched: np.ndarray, shares: np.ndarray) -> np.ndarray:
        return (shares[:, :, None] * fetched.reshape(T, k, -1)).sum(axis=1)

    wrong = ~np.isclose(got.result, want.result, rtol=1e-4, atol=1e-4).all(axis=1)
    t = int(np.flatnonzero(wrong)[0])
    places = listed([str(int(n)) for n in position[t * k : (t + 1) * k]])
    many, width = int(wrong.sum()), x.shape[1] * 4
    cost = f" {many} of {T} tokens: {many * k} rows of {width:,} bytes, {many * k * width:,} bytes, for nothing."
    head = f"Token {t}'s rows stand at position{'s' if k > 1 else ''} {places} of the sorted ones. "
    ones, by_slot = np.ones_like(weights), weights.reshape(-1)
    mine = listed([str(int(n)) for n in order[t * k : (t + 1) * k]])
    known = [
        (combined(rows[order], weights), f"Yours come from {mine}: order says which slot stands "
         "at a position, and here the position of a slot is wanted, its inverse."),
        (combined(by_slot[order][:, None] * rows, ones), "They are added k at a time as they come, still sorted by "
         "expert, and belong to other tokens. Bring them back to the order of their slots first."),
        (combined(rows, weights), f"Yours come from {listed([str(n) for n in range(t * k, (t + 1) * k)])}: they are "
         "still sorted by expert. Bring them back to the order of their slots first."),
        (combined(rows[position], ones), "They are added without their weights."),
        (combined(rows[position], ones / k), "They are averaged, without their weights."),
        (combined(rows[position], by_slot[order].reshape(T, k)), "They are weighted with the weights of others: "
         "weights are in the order of slots, and so are the rows once they are back; do not sort the weights."),
        (combined((by_slot[:, None] * rows)[position], ones), "They were weighted while still sorted, with the weights "
         "of other slots: bring them back first, or sort the weights as well."),
        (combined(rows[position], weights[:, ::-1]), "Their weights have changed places."),
    ]  # fmt: skip
    for value, text in known:
        if np.allclose(got.result, value, rtol=1e-4, atol=1e-4):
            return head + text + cost
    first = rows[position].reshape(T, k, -1)[:, 0]
    if k > 1 and (np.allclose(got.result, first * weights[:, :1], rtol=1e-4, atol=1e-4)):
        return f"{head}Only the first of them is in the result.{cost}"
    return f"{head}Fetch them by slot, (T, k, N), times weights of shape (T, k, 1), summed over k.{cost}"


def moe(x: Any, router: Any, w1: Any, w2: Any, g: Any, *, got: Any, want: Any, k: int, **_: Any) -> Explained:
    """A mixture of experts, its gradients, and a sum of rows over slots."""
    x, router, w1, w2 = (np.asarray(a, np.float32) for a in (x, router, w1, w2))
    fields = {
        name: (np.asarray(a, np.float32), np.asarray(b, np.float32))
        for name, a, b in zip(want._fields, got, want, strict=True)
    }
    wrong = [name for name, (a, b) in fields.items() if not close(a, b)]
    if "y" in wrong:
        return _about_layer(x, router, w1, w2, fields["y"][0], k), ""
    if "spread" in wrong:
        return _about_spread(*fields["spread"], fields["y"][0], k), ""
    zero = [name for name in wrong if not fields[name][0].any()]
    if zero:
        return (
            f"The result y is right, and result.{zero[0]} is 0: on the way through moe_layer something does not let a "
            "gradient back (stop_gradient, a cast to integers, a value computed anew)."
        ), ""
    if wrong:
        return (
            f"The result y is right, and so is what expand_grad returns by itself; result.{wrong[0]} is not. Inside "
            "moe_layer, what reaches it on another way forward, or through other functions than expand and ragged?"
        ), ""
    return "", ""


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _about_layer(x: np.ndarray, router: np.ndarray, w1: np.ndarray, w2: np.ndarray, y: np.ndarray, k: int) -> str:
    """Which step of a mixture of experts was left out, or done in another order."""
    logits = x @ router
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    best = np.take_along_axis(p, experts, axis=1)
    shares, T = best / best.sum(axis=1, keepdims=True), len(x)
    order = np.argsort(experts.reshape(-1), kind="stable")
    sorted_experts, position = experts.reshape(-1)[order], np.argsort(order, kind="stable")

    def layer(
        rows: np.ndarray, weights: np.ndarray, *, act: Any = _silu, after: Any = None, back: Any = position
    ) -> Any:
        h = np.stack([act(row @ w1[e]) @ w2[e] for row, e in zip(rows, sorted_experts, strict=True)])
        h = after(h) if after else h
        return (weights[:, :, None] * h[back].reshape(T, k, -1)).sum(axis=1)

    rows, plain = x[order // k], lambda h: h
    known = [
        (layer(rows, shares, act=plain), "as if there were no silu between the two products: two matrices in a row "
         "are one matrix."),
        (layer(rows, shares, act=plain, after=_silu), "as if silu came behind w2: it belongs in front of it."),
        (layer(rows, shares, act=lambda h: np.maximum(h, 0)), "that of relu in place of silu."),
        (layer(rows, np.ones_like(shares)), "the sum of the experts' results without their weights."),
        (layer(rows, best / p.sum(axis=1, keepdims=True)), "weighted by shares among all experts, not among the k."),
        (layer(x[np.arange(T * k) // k], shares), "that of rows which were not sorted by expert: groups were "
         "counted, but x was repeated token by token, and rows meet the weights of others. expand takes the order."),
        (layer(rows, shares, back=order), "that of rows fetched back by the order in place of its inverse."),
        (layer(rows, shares, back=np.arange(T * k)), "that of rows which are still sorted by expert."),
        (layer(x[order % T], shares), "that of the wrong tokens: slot s belongs to token s // k."),
    ]  # fmt: skip
    for value, text in known:
        if close(y, value):
            return f"moe_layer: result.y is {text}"
    t = int(np.argmax(np.abs(y - layer(rows, shares)).max(axis=1)))
    return (
        f"moe_layer: result.y is furthest off for token {t}, which goes to experts {experts[t].tolist()} with weights "
        f"{shares[t].round(3).tolist()}. Compare step by step with the drawing: the rows after expand, after w1, after "
        "w2, after combine."
    )


def _about_spread(got: np.ndarray, want: np.ndarray, y: np.ndarray, k: int) -> str:
    """result.spread: expand_grad of k copies of y, one behind the other, for a known permutation of the slots."""
    T = len(y)
    order, g = any_order(T * k), np.concatenate([y] * k)
    position = np.argsort(order)
    by_slot = g[position].reshape(T, k, -1)
    slots, order_says = position[:k].tolist(), order[:k].tolist()
    head = f"expand_grad: token 0's {k} rows of g stand at positions {slots}; result.spread is "
    known = [
        (g[order].reshape(T, k, -1).sum(axis=1), f"the sum of others, at {order_says}: order says which slot stands "
         "at a position, and its inverse at which position a slot stands."),
        (g.reshape(T, k, -1).sum(axis=1), "the sum of rows 0 and on as they come, sorted by expert: they "
         "are not brought back to their slots."),
        (by_slot[:, 0], "the first of them alone. Every token has gone to k places, and each sends something back."),
        (by_slot.mean(axis=1), "their mean: a gradient is the sum of what comes back."),
    ]  # fmt: skip
    for value, text in known:
        if close(got, value):
            return head + text
    return f"{head}not their sum: fetch by the inverse of order, (T, k, D), and sum over k, in float32."
