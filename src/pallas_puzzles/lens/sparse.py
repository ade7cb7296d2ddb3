"""What only a SparseCore's vector subcore does: gathers, scatters and compressed stores of a vector, and its scans.

The primitives and their parameters are not public API: seen on jax 0.11.2 and 0.12.0.1. JAX's simulator has none.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..ir.ops import evaluate
from ..ir.places import Place
from .copies import plain_ref
from .memory import Buffer


class SparseCore:
    """The rules of a Machine for these primitives."""

    run: Callable[..., list[Any]]
    locate: Callable[..., Place]
    incident: Callable[..., None]
    note: Callable[..., None]
    load_from: Callable[..., np.ndarray]
    _put: Callable[..., None]

    def _do_parallel_loop(self, eqn: Any, values: list[Any]) -> list[Any]:
        lower, upper, step, consts, carry = jax.tree.unflatten(eqn.params["tree"], values)
        for i in range(*(int(np.asarray(bound)) for bound in (lower, upper, step))):
            carry = self.run(eqn.params["jaxpr"], [*consts, np.int32(i), *carry])
        return list(carry)

    # -- Refs

    def _do_load(self, eqn: Any, values: list[Any]) -> Any:
        """The first elements of a Ref, in the places where the mask is set."""
        ref, *leaves = values
        mask = np.asarray(leaves.pop(), bool) if eqn.params["has_mask"] else None
        place = self.locate(ref, jax.tree.unflatten(eqn.params["tree"], leaves), "reads", eqn)
        if mask is None:
            return self.load_from(ref, place, eqn)
        taken = np.arange(mask.size) < np.count_nonzero(mask)
        value = self.load_from(ref, place, eqn, taken)
        return value[np.where(mask, np.cumsum(mask) - 1, 0)]

    def store_vector(self, eqn: Any, values: list[Any]) -> np.ndarray:
        """A store that adds, has a mask, or puts the elements under the mask one behind the other."""
        ref, x, *leaves = values
        mask = np.asarray(leaves.pop(), bool) if eqn.params["has_mask"] else np.ones(np.shape(x), bool)
        place = self.locate(ref, jax.tree.unflatten(eqn.params["tree"], leaves), "writes", eqn)
        chosen = np.nonzero(mask)
        compressed = eqn.params["has_mask"] and eqn.params.get("compress", True)  # 0.11 has no other
        where = (np.arange(len(chosen[0])),) if compressed else chosen
        return self._scatter(ref, place, where, np.asarray(x)[chosen], eqn.params["add"], eqn)

    def _do_gather(self, eqn: Any, values: list[Any]) -> Any:
        if "tree" not in eqn.params:  # that of arrays
            return evaluate(eqn, values)
        ref, transforms, indices, mask = jax.tree.unflatten(eqn.params["tree"], values)
        ref, place, where, mask = self._within(ref, transforms, indices, mask, "reads", eqn)
        place.steps.append(where)
        place.shape = mask.shape
        return self.load_from(ref, place, eqn, mask)

    def _do_scatter(self, eqn: Any, values: list[Any]) -> Any:
        if "tree" not in eqn.params:
            return evaluate(eqn, values)
        ref, transforms, indices, x, mask = jax.tree.unflatten(eqn.params["tree"], values)
        ref, place, where, mask = self._within(ref, transforms, indices, mask, "writes", eqn)
        self._scatter(ref, place, tuple(i[mask] for i in where), np.asarray(x)[mask], eqn.params["add"], eqn)
        return []

    def _within(
        self, ref: Any, transforms: Any, indices: Any, mask: Any, verb: str, eqn: Any
    ) -> tuple[Buffer, Place, tuple[np.ndarray, ...], np.ndarray]:
        """(buffer, place, indices of a vector in it, mask). The indices are 0 where there is no mask, and in bounds."""
        ref, transforms = plain_ref(ref, transforms)
        place, key = self.locate(ref, transforms, verb, eqn), []
        mask = np.ones(np.shape(indices[0]), bool) if mask is None else np.asarray(mask, bool)
        for index, dim in zip(indices, place.shape, strict=True):
            index = np.where(mask, np.asarray(index), 0)
            if index.size and (index.min() < 0 or index.max() >= dim):
                first, last = int(index.min()), int(index.max())
                self.incident("ref-bounds", ref.name, eqn, verb=verb, first=first, last=last, dim=dim)
            key.append(np.clip(index, 0, dim - 1))
        return ref, place, tuple(key), mask

    def _scatter(self, ref: Buffer, place: Place, where: Any, x: np.ndarray, add: bool, eqn: Any) -> np.ndarray:
        touched = np.zeros(place.shape, bool)
        touched[where] = True
        before = self.load_from(ref, place, eqn, touched) if add else place.read(ref.values)
        after = before.copy()
        if add:
            np.add.at(after, where, x)
        else:
            after[where] = x
        self._put(ref, place, after, mask=touched)
        self.note("store", ref, False, eqn)
        return before

    # -- vectors

    def _do_scan_count(self, eqn: Any, values: list[Any]) -> list[Any]:
        """(how often each element has come up to here, whether it comes here for the last time), under a mask."""
        x, mask = np.asarray(values[0]), np.asarray(values[1], bool)
        same = (x[:, None] == x[None, :]) & mask[:, None] & mask[None, :]
        return [np.tril(same).sum(1, dtype=np.int32), mask & ~np.triu(same, 1).any(1)]

    def _do_masked_cumsum(self, eqn: Any, values: list[Any]) -> Any:
        return np.cumsum(np.where(values[1], values[0], 0), -1, dtype=np.asarray(values[0]).dtype)

    def _do_all_reduce_population_count(self, eqn: Any, values: list[Any]) -> Any:
        return np.full(eqn.outvars[0].aval.shape, np.count_nonzero(values[0]), np.int32)

    def _do_all_reduce_ffs(self, eqn: Any, values: list[Any]) -> Any:
        mask = np.asarray(values[0], bool)
        return np.full(eqn.outvars[0].aval.shape, mask.argmax() if mask.any() else mask.size, np.int32)
