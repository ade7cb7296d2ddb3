"""DMAs and semaphores, counted as a TPU counts them: a DMA semaphore holds the bytes that have arrived, a regular one
how often it was signalled, which a copy does once.

A copy happens when a wait needs it: until then the old content is read, as in JAX's simulator. What has arrived beyond
what a wait asks for stays in the semaphore.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.ops import Beyond, holds_dma_semaphore, nbytes_of, poison
from ..ir.places import Place, index_of
from .flight import Flight, Semaphore, Transfer, label
from .memory import Buffer
from .regions import region_of

_DELIVERED = np.empty(0)  # stands for what a copy has brought: it may be large, and copies are kept


class Copies:
    """The rules of a Machine for dma_start, dma_wait and semaphores."""

    dma_bytes: int
    semaphores: dict[tuple[Buffer, int], Semaphore]
    flight: Flight
    incident: Callable[..., None]
    locate: Callable[..., Place]
    note: Callable[..., None]
    _put: Callable[..., None]

    def _number(self, sem: Any, eqn: Any, transforms: Any = ()) -> tuple[Buffer, int, str]:
        """(the Ref that a semaphore is in, its number there, its name)."""
        ref, transforms = plain_ref(sem, transforms)
        number = index_of(ref.shape, self.locate(ref, transforms, "waits for", eqn))
        at = [int(i) for i in np.unravel_index(number, ref.shape)] if ref.shape else []
        return ref, number, ref.name + (str(at) if at else "")

    def _semaphore(self, sem: Any, eqn: Any, transforms: Any = ()) -> Semaphore:
        ref, number, name = self._number(sem, eqn, transforms)
        return self.semaphores.setdefault((ref, number), Semaphore(name))

    def _do_dma_start(self, eqn: Any, values: list[Any]) -> None:
        src, dst, dst_sem, src_sem, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        nbytes = self._nbytes(dst, eqn)
        if not nbytes:  # an empty copy brings nothing that one could wait for
            return
        (source, here), (target, there) = plain_ref(src), plain_ref(dst)
        reads, writes = self.locate(source, here, "copies from", eqn), self.locate(target, there, "copies to", eqn)
        copy = Transfer(source, reads, target, writes, eqn)
        for at, sem, happen in ((3, src_sem, self._read), (2, dst_sem, self._deliver)):
            if sem is not None:
                amount = nbytes if self._counts_bytes(eqn, at) else 1
                semaphore = self._semaphore(sem, eqn)
                semaphore.due.append((happen, copy, amount))
        self.note_clash(source, reads, "copies out of", False, eqn)
        self.note_clash(target, writes, "copies into", True, eqn)
        semaphore.open.append(copy)
        self.flight.start(copy, semaphore, amount)

    def note_clash(self, ref: Buffer, place: Place, verb: str, writes: bool, eqn: Any) -> None:
        """Notes an access to memory that a copy on its way uses."""
        for kind, copy, semaphore in self.flight.clashes(ref, place, writes):
            told = {"started": copy.line, "semaphore": semaphore.name, "others": len(semaphore.flying)}
            part = label(ref.name, region_of(place, ref.shape))
            self.incident(kind, ref.name, eqn, verb=verb, part=part, **told)

    def _counts_bytes(self, eqn: Any, at: int) -> bool:
        """Whether a copy's semaphore, operand `at`, is one of the kind DMA."""
        ref = jax.tree.unflatten(eqn.params["tree"], eqn.invars)[at]
        while hasattr(ref, "transforms"):
            ref = ref.ref[0] if isinstance(ref.ref, list | tuple) else ref.ref
        return holds_dma_semaphore(ref.aval)

    def _do_dma_wait(self, eqn: Any, values: list[Any]) -> None:
        _, dst, sem, _, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        ref, transforms = plain_ref(dst)
        there = self.locate(ref, transforms, "", eqn)
        self._semaphore(sem, eqn).named(label(ref.name, region_of(there, ref.shape)))
        needed = there.nbytes if self._counts_bytes(eqn, 2) else min(there.nbytes, 1)
        self._wait(sem, (), needed, eqn, dma=True)

    def _wait(self, sem: Any, transforms: Any, needed: int, eqn: Any, *, dma: bool, take: bool = True) -> None:
        semaphore = self._semaphore(sem, eqn, transforms)
        semaphore.arrive(needed)
        self.flight.waited(semaphore, needed if take else None, eqn)
        if semaphore.count < needed:
            self.incident("hang", semaphore.name, eqn, needed=needed, got=semaphore.count, dma=dma)
            semaphore.count = 0 if dma else semaphore.count
        elif take:
            semaphore.count -= needed

    def _nbytes(self, view: Any, eqn: Any) -> int:
        ref, transforms = plain_ref(view)
        return self.locate(ref, transforms, "", eqn).nbytes

    def _read(self, copy: Transfer) -> None:
        if copy.value is None:
            copy.value = copy.reads.read(copy.src.values)
            known = known_in(copy.src, copy.reads)
            copy.known = np.array(known) if np.ndim(known) else known

    def _deliver(self, copy: Transfer) -> None:
        self._read(copy)
        there, target, value, known = copy.writes, copy.dst, copy.value, copy.known
        assert value is not None, "what is delivered has been read"
        copy.value, copy.known = _DELIVERED, True
        if value.size != math.prod(there.shape):
            self.incident("copy-shape", target.name, copy.eqn, shapes=(value.shape, there.shape))
            value, known = poison(there.shape, there.dtype), np.zeros(there.shape, bool)
        value = value.reshape(there.shape)
        known = known.reshape(there.shape) if np.ndim(known) else known
        if copy.eqn.params.get("add"):
            value = there.read(target.values) + value
        self._put(target, there, value, known)
        if self._is_traffic(copy):
            self.dma_bytes += there.nbytes
        self.note("dma", target, there.nbytes == nbytes_of(target.shape, target.values.dtype), copy.eqn)

    def _is_traffic(self, copy: Transfer) -> bool:
        """Whether it is between HBM and memory on the chip."""
        return copy.hbm

    def _do_semaphore_signal(self, eqn: Any, values: list[Any]) -> None:
        ref, transforms, amount, device, core = jax.tree.unflatten(eqn.params["args_tree"], values)[:5]
        if device is not None or core is not None:
            raise Beyond("a signal to another device or core")
        semaphore = self._semaphore(ref, eqn, transforms)
        semaphore.count += int(np.asarray(amount))
        semaphore.owed += int(np.asarray(amount))

    def _do_semaphore_wait(self, eqn: Any, values: list[Any]) -> None:
        ref, transforms, amount, decrement = jax.tree.unflatten(eqn.params["args_tree"], values)[:4]
        take = decrement is None or bool(np.asarray(decrement).all())
        self._wait(ref, transforms, int(np.asarray(amount)), eqn, dma=False, take=take)

    def _do_semaphore_read(self, eqn: Any, values: list[Any]) -> Any:
        """What a semaphore holds when all that is on its way has arrived: a loop that looks at it ends."""
        ref, transforms = jax.tree.unflatten(eqn.params["args_tree"], values)[:2]
        semaphore = self._semaphore(ref, eqn, transforms)
        semaphore.arrive(float("inf"))
        self.flight.waited(semaphore, None, eqn)
        return np.int32(semaphore.count)


def known_in(ref: Buffer, place: Place) -> Any:
    """Which elements of a part of a buffer hold something: an array, or one answer for all of them."""
    if ref.written is None:
        return place.marked(np.ones(ref.shape, bool)) if place.clipped else True
    return ref.written.at(place)


def plain_ref(ref: Any, transforms: Sequence[Any] = ()) -> tuple[Buffer, tuple[Any, ...]]:
    """(buffer, transforms) of a Ref, or of a Ref seen through `.at[...]`, `pl.select_ref` and the like."""
    while hasattr(ref, "transforms"):  # a Ref that is seen through others
        own, ref = tuple(ref.transforms), ref.ref
        if isinstance(ref, list | tuple):  # one of several, by its number
            ref, own = ref[int(np.asarray(own[0].idx))], own[1:]
        transforms = (*own, *transforms)
    return ref, tuple(transforms or ())
