"""DMAs and semaphores, counted as a TPU counts them: a DMA semaphore holds the bytes that have arrived, a regular one
how often it was signalled, which a copy does once.

A copy happens when a wait needs it: until then the old content is read, as in JAX's simulator. What has arrived beyond
what a wait asks for stays in the semaphore.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.ops import Beyond, holds_dma_semaphore, nbytes_of, poison
from ..ir.places import Place, index_of
from .flight import Flight, Transfer, label
from .memory import Buffer
from .regions import region_of


@dataclasses.dataclass(eq=False, slots=True)
class Copy:
    """One DMA that has been started, from a part of a Ref to one of another. value, known: what it has read, if it has.

    It reads and writes as late as possible: when somebody waits for it.
    """

    source: Buffer
    reads: Place
    target: Buffer
    writes: Place
    eqn: Any
    value: np.ndarray | None = None
    known: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Semaphore:
    """count: what has been signalled, or has arrived. due: (what brings more, how much), in the order of the starts.

    open: (where to, copy) of those that no wait has named. A wait takes bytes, whichever copy has brought them.
    """

    count: int = 0
    due: list[tuple[Callable[[Copy], None], Copy, int]] = dataclasses.field(default_factory=list)
    open: list[tuple[str, Copy]] = dataclasses.field(default_factory=list)

    def arrive(self, needed: float) -> None:
        """Lets as many copies arrive as it takes."""
        while self.due and self.count < needed:
            happen, copy, nbytes = self.due.pop(0)
            happen(copy)
            self.count += nbytes

    def named(self, target: str) -> None:
        """A wait names a copy; or another one of as many bytes, and then it is for the oldest."""
        if self.open:
            self.open.pop(next((n for n, (to, _) in enumerate(self.open) if to == target), 0))

    def missed(self) -> Copy:
        """A copy that is due, and that nobody waits for."""
        return (self.open[0] if len(self.open) == len(self.due) else self.due[0])[1]


class Copies:
    """The rules of a Machine for dma_start, dma_wait and semaphores."""

    dma_bytes: int
    semaphores: dict[tuple[Buffer, int], Semaphore]
    dma_semaphores: dict[tuple[int, int], bool]
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

    def _semaphore(self, sem: Any, eqn: Any, transforms: Any = ()) -> tuple[Semaphore, str]:
        ref, number, name = self._number(sem, eqn, transforms)
        return self.semaphores.setdefault((ref, number), Semaphore()), name

    def _do_dma_start(self, eqn: Any, values: list[Any]) -> None:
        src, dst, dst_sem, src_sem, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        nbytes = self._nbytes(dst, eqn)
        if nbytes:  # an empty copy brings nothing that one could wait for
            (source, here), (target, there) = plain_ref(src), plain_ref(dst)
            reads, writes = self.locate(source, here, "copies from", eqn), self.locate(target, there, "copies to", eqn)
            copy = Copy(source, reads, target, writes, eqn)
            for at, sem, happen in ((3, src_sem, self._read), (2, dst_sem, self._deliver)):
                if sem is not None:
                    amount = nbytes if self._counts_bytes(eqn, at) else 1
                    self._semaphore(sem, eqn)[0].due.append((happen, copy, amount))
            self._take_off(copy, dst_sem, amount)

    def _take_off(self, copy: Copy, sem: Any, amount: int) -> None:
        """Notes that a copy is on its way, and whether another one on its way uses the same memory."""
        ends = (copy.source, copy.reads, False), (copy.target, copy.writes, True)
        for ref, place, written in ends:
            self.note_clash(ref, place, "copies into" if written else "copies out of", written, copy.eqn)
        semaphore, name = self._semaphore(sem, copy.eqn)
        parts = [(ref, region_of(place, ref.shape), written) for ref, place, written in ends]
        source, target = (label(ref.name, part) for ref, part, _ in parts)
        semaphore.open.append((target, copy))
        hbm, work = any(ref.space in ("any", "hbm") for ref, _, _ in ends), self.flight.work
        transfer = Transfer(source, target, copy.writes.nbytes, hbm, copy.eqn, name, 0, work, parts)
        self.flight.start(transfer, semaphore, amount)

    def note_clash(self, ref: Buffer, place: Place, verb: str, writes: bool, eqn: Any) -> None:
        """Notes an access to memory that a copy on its way uses."""
        for kind, copy, others in self.flight.clashes(ref, place, writes):
            part = label(ref.name, region_of(place, ref.shape))
            into = any(other is ref and written for other, _, written in copy.parts)
            told = {"started": copy.line, "semaphore": copy.semaphore, "others": others}
            self.incident(kind, ref.name, eqn, verb=verb, part=part, into=into, **told)

    def _counts_bytes(self, eqn: Any, at: int) -> bool:
        """Whether a copy's semaphore, operand `at`, is one of the kind DMA."""
        found = self.dma_semaphores.get((id(eqn), at))
        if found is None:
            ref = jax.tree.unflatten(eqn.params["tree"], eqn.invars)[at]
            while hasattr(ref, "transforms"):
                ref = ref.ref[0] if isinstance(ref.ref, list | tuple) else ref.ref
            found = self.dma_semaphores[id(eqn), at] = holds_dma_semaphore(ref.aval)
        return found

    def _do_dma_wait(self, eqn: Any, values: list[Any]) -> None:
        _, dst, sem, _, device = jax.tree.unflatten(eqn.params["tree"], values)[:5]
        if device is not None:
            raise Beyond("a copy to another device (remote DMA)")
        (ref, transforms), nbytes = plain_ref(dst), self._nbytes(dst, eqn)
        there = region_of(self.locate(ref, transforms, "", eqn), ref.shape)
        self._semaphore(sem, eqn)[0].named(label(ref.name, there))
        self._wait(sem, (), nbytes if self._counts_bytes(eqn, 2) else min(nbytes, 1), eqn, dma=True)

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
            copy.value = copy.reads.read(copy.source.values)
            known = known_in(copy.source, copy.reads)
            copy.known = np.array(known) if np.ndim(known) else known

    def _deliver(self, copy: Copy) -> None:
        self._read(copy)
        there, target = copy.writes, copy.target
        assert copy.value is not None, "what is delivered has been read"
        if copy.value.size != math.prod(there.shape):
            self.incident("copy-shape", target.name, copy.eqn, shapes=(copy.value.shape, there.shape))
            copy.value, copy.known = poison(there.shape, there.dtype), np.zeros(there.shape, bool)
        value = copy.value.reshape(there.shape)
        known = copy.known.reshape(there.shape) if np.ndim(copy.known) else copy.known
        if copy.eqn.params.get("add"):
            value = there.read(target.values) + value
        self._put(target, there, value, known)
        if self._is_traffic(copy):
            self.dma_bytes += there.nbytes
        self.note("dma", target, there.nbytes == nbytes_of(target.shape, target.values.dtype), copy.eqn)

    def _is_traffic(self, copy: Copy) -> bool:
        """Whether it is to or from HBM."""
        return bool({"hbm", "any"} & {copy.source.space, copy.target.space})

    def _do_semaphore_signal(self, eqn: Any, values: list[Any]) -> None:
        ref, transforms, amount, device, core = jax.tree.unflatten(eqn.params["args_tree"], values)[:5]
        if device is not None or core is not None:
            raise Beyond("a signal to another device or core")
        semaphore, _ = self._semaphore(ref, eqn, transforms)
        semaphore.count += int(np.asarray(amount))
        self.flight.signalled(semaphore, int(np.asarray(amount)))

    def _do_semaphore_wait(self, eqn: Any, values: list[Any]) -> None:
        ref, transforms, amount, decrement = jax.tree.unflatten(eqn.params["args_tree"], values)[:4]
        take = decrement is None or bool(np.asarray(decrement).all())
        self._wait(ref, transforms, int(np.asarray(amount)), eqn, dma=False, take=take)

    def _do_semaphore_read(self, eqn: Any, values: list[Any]) -> Any:
        """What a semaphore holds when all that is on its way has arrived: a loop that looks at it ends."""
        ref, transforms = jax.tree.unflatten(eqn.params["args_tree"], values)[:2]
        semaphore, _ = self._semaphore(ref, eqn, transforms)
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
        own = tuple(ref.transforms)
        if isinstance(ref.ref, list | tuple):  # one of several, by its number
            ref, own = ref.ref[int(np.asarray(own[0].idx))], own[1:]
            transforms = (*own, *transforms)
            continue
        ref, transforms = ref.ref, (*own, *transforms)
    return ref, tuple(transforms or ())
