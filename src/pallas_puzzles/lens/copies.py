"""DMAs and semaphores, counted as a TPU counts them: a DMA semaphore holds the bytes that have arrived, a regular one
how often it was signalled, which a copy does once.

A copy happens when a wait needs it: until then the old content is read, as in JAX's simulator. What has arrived beyond
what a wait asks for stays in the semaphore.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..ir.ops import Beyond, holds_dma_semaphore, poison
from ..ir.places import Place, index_of
from .flight import Clash, Flight, Transfer, label, part_of

if TYPE_CHECKING:
    from .memory import Buffer


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
    """One DMA that has been started. value, known: what it has read, once it has."""

    src: Any
    dst: Any
    eqn: Any
    value: np.ndarray | None = None
    known: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Semaphore:
    """count: what has been signalled, or has arrived. due: (what brings more, how much), in the order of the starts."""

    count: int = 0
    due: list[tuple[Callable[[Copy], None], Copy, int]] = dataclasses.field(default_factory=list)

    def arrive(self, needed: float) -> None:
        """Lets as many copies arrive as it takes."""
        while self.due and self.count < needed:
            happen, copy, nbytes = self.due.pop(0)
            happen(copy)
            self.count += nbytes


class Copies:
    """The rules of a Machine for dma_start, dma_wait and semaphores."""

    detail: bool
    dma_bytes: int
    semaphores: "dict[tuple[Buffer, int], Semaphore]"
    dma_semaphores: dict[tuple[int, int], bool]
    flight: Flight
    incident: Callable[..., None]
    locate: Callable[..., Place]
    note_copy: Callable[..., None]
    _put: Callable[..., None]

    def _semaphore(self, sem: Any, eqn: Any, transforms: Any = ()) -> "tuple[Semaphore, str]":
        ref, transforms = plain_ref(sem, transforms)
        place = self.locate(ref, transforms, "waits for", eqn)
        number = index_of(ref.shape, place)
        at = [int(i) for i in np.unravel_index(number, ref.shape)] if ref.shape else []
        return self.semaphores.setdefault((ref, number), Semaphore()), ref.name + (str(at) if at else "")

    def _do_dma_start(self, eqn: Any, values: list[Any]) -> list[Any]:
        src, dst, dst_sem, src_sem, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        copy, nbytes = Copy(src, dst, eqn), self._nbytes(dst, eqn)
        if nbytes:  # an empty copy brings nothing that one could wait for
            for at, sem, happen in ((3, src_sem, self._read), (2, dst_sem, self._deliver)):
                if sem is not None:
                    amount = nbytes if self._counts_bytes(eqn, at) else 1
                    self._semaphore(sem, eqn)[0].due.append((happen, copy, amount))
            self._take_off(src, dst, dst_sem, eqn, amount)
        return []

    def _take_off(self, src: Any, dst: Any, sem: Any, eqn: Any, amount: int) -> None:
        """Notes that a copy is on its way, and whether another one on its way uses the same memory."""
        ends = []
        for view, verb in ((src, "copies from"), (dst, "copies to")):
            ref, transforms = plain_ref(view)
            ends.append((ref, self.locate(ref, transforms, "", eqn), verb == "copies to"))
        for ref, place, written in ends:
            self.note_clash(ref, place, "copies into" if written else "copies out of", written, eqn)
        semaphore, name = self._semaphore(sem, eqn)
        parts = [(ref, part_of(place, ref.shape), written) for ref, place, written in ends]
        source, target = (label(ref.name, part, ref.shape) for ref, part, _ in parts)
        hbm = any(ref.space in ("any", "hbm") for ref, _, _ in ends)
        nbytes, work = ends[1][1].nbytes, self.flight.work
        self.flight.start(Transfer(source, target, nbytes, hbm, eqn, name, 0, work, parts), semaphore, amount)

    def note_clash(self, ref: "Buffer", place: Place, verb: str, writes: bool, eqn: Any) -> None:
        """Notes an access to memory that a copy on its way uses."""
        for clash in self.flight.clashes(ref, place, writes):
            self._clash(clash, ref, place, verb, eqn)

    def _clash(self, clash: Clash, ref: "Buffer", place: Place, verb: str, eqn: Any) -> None:
        copy = clash.transfer
        self.incident(
            clash.kind,
            ref.name,
            eqn,
            verb=verb,
            part=label(ref.name, part_of(place, ref.shape), ref.shape),
            into=any(other is ref and written for other, _, written in copy.parts),
            started=copy.line,
            semaphore=copy.semaphore,
            others=clash.others,
        )

    def _counts_bytes(self, eqn: Any, at: int) -> bool:
        """Whether a copy's semaphore, operand `at`, is one of the kind DMA."""
        found = self.dma_semaphores.get((id(eqn), at))
        if found is None:
            ref = jax.tree.unflatten(eqn.params["tree"], eqn.invars)[at]
            while hasattr(ref, "transforms"):
                ref = ref.ref[0] if isinstance(ref.ref, list | tuple) else ref.ref
            found = self.dma_semaphores[id(eqn), at] = holds_dma_semaphore(ref.aval)
        return found

    def _do_dma_wait(self, eqn: Any, values: list[Any]) -> list[Any]:
        _, dst, sem, _, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        nbytes = self._nbytes(dst, eqn)
        self._wait(sem, (), nbytes if self._counts_bytes(eqn, 2) else min(nbytes, 1), eqn, dma=True)
        return []

    def _wait(self, sem: Any, transforms: Any, needed: int, eqn: Any, *, dma: bool, take: bool = True) -> None:
        semaphore, name = self._semaphore(sem, eqn, transforms)
        semaphore.arrive(needed)
        self.flight.waited(semaphore, needed if take else None, eqn)
        if semaphore.count < needed:
            self.incident("hang", name, eqn, needed=needed, got=semaphore.count, dma=dma)
            semaphore.count = 0 if dma else semaphore.count
        elif take:
            semaphore.count -= needed

    def _nbytes(self, view: Any, eqn: Any) -> int:
        ref, transforms = plain_ref(view)
        return self.locate(ref, transforms, "", eqn).nbytes

    def _read(self, copy: Copy) -> None:
        if copy.value is None:
            source, transforms = plain_ref(copy.src)
            here = self.locate(source, transforms, "copies from", copy.eqn)
            copy.value = here.read(source.values)
            known = known_in(source, here)
            copy.known = np.array(known) if np.ndim(known) else known

    def _deliver(self, copy: Copy) -> None:
        self._read(copy)
        source, (target, transforms) = plain_ref(copy.src)[0], plain_ref(copy.dst)
        there = self.locate(target, transforms, "copies to", copy.eqn)
        assert copy.value is not None, "what is delivered has been read"
        if copy.value.size != math.prod(there.shape):
            self.incident("copy-shape", target.name, copy.eqn, shapes=(copy.value.shape, there.shape))
            copy.value, copy.known = poison(there.shape, there.dtype), np.zeros(there.shape, bool)
        value = copy.value.reshape(there.shape)
        known = copy.known.reshape(there.shape) if np.ndim(copy.known) else copy.known
        if copy.eqn.params.get("add"):
            value = there.read(target.values) + value
        self._put(target, there, value, known)
        if {"hbm", "any"} & {source.space, target.space}:
            self.dma_bytes += there.nbytes
        if self.detail:
            self.note_copy(target, there, value.size, copy.eqn)

    def _do_semaphore_signal(self, eqn: Any, values: list[Any]) -> list[Any]:
        ref, transforms, amount, device, core = jax.tree.unflatten(eqn.params["args_tree"], values)[:5]
        if device is not None or core is not None:
            raise Beyond("a signal to another device or core")
        semaphore, _ = self._semaphore(ref, eqn, transforms)
        semaphore.count += int(np.asarray(amount))
        self.flight.signalled(semaphore, int(np.asarray(amount)))
        return []

    def _do_semaphore_wait(self, eqn: Any, values: list[Any]) -> list[Any]:
        ref, transforms, amount, decrement = jax.tree.unflatten(eqn.params["args_tree"], values)[:4]
        take = decrement is None or bool(np.asarray(decrement).all())
        self._wait(ref, transforms, int(np.asarray(amount)), eqn, dma=False, take=take)
        return []

    def _do_semaphore_read(self, eqn: Any, values: list[Any]) -> Any:
        """What a semaphore holds when all that is on its way has arrived: a loop that looks at it ends."""
        ref, transforms = jax.tree.unflatten(eqn.params["args_tree"], values)[:2]
        semaphore, _ = self._semaphore(ref, eqn, transforms)
        semaphore.arrive(float("inf"))
        self.flight.waited(semaphore, None, eqn)
        return np.int32(semaphore.count)


def known_in(ref: "Buffer", place: Place) -> Any:
    """Which elements of a part of a buffer hold something: an array, or one answer for all of them."""
    if ref.written is None:
        return place.marked(np.ones(ref.shape, bool)) if place.clipped else True
    return ref.written.at(place)


def plain_ref(ref: Any, transforms: Sequence[Any] = ()) -> "tuple[Buffer, tuple[Any, ...]]":
    """(buffer, transforms) of a Ref, or of a Ref seen through `.at[...]`, `pl.select_ref` and the like."""
    while hasattr(ref, "transforms"):  # a Ref that is seen through others
        own = tuple(ref.transforms)
        if isinstance(ref.ref, list | tuple):  # one of several, by its number
            ref, own = ref.ref[int(np.asarray(own[0].idx))], own[1:]
            transforms = (*own, *transforms)
            continue
        ref, transforms = ref.ref, (*own, *transforms)
    return ref, tuple(transforms or ())
