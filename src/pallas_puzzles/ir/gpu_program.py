"""What a kernel for a GPU consists of once it is read: instructions over slots, what they allocate, parts of Refs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .capture import SourceLine, asked_line_of
from .ops import Beyond, evaluate, is_floating, meaning, nbytes_of, np_dtype
from .places import OutOfBounds, Place, locate

# How JAX says how an array lies in SMEM or TMEM: nothing that a value depends on.
_LAYOUTS = frozenset(
    "UnswizzleRef UntilingTransform CollapseLeadingBatchDimensionsTransform ExpandLeadingBatchDimensionsTransform "
    "IdentityTransform MemorySpaceCastTransform MulticastRef".split()
)
_ELSEWHERE = _LAYOUTS | {"ExtractAliasedRef", "ClusterRefTransform"}  # which memory, not where in it


@dataclasses.dataclass(frozen=True)
class Alloc:
    """What run_scoped allocates. kind: "memory", "acc", "barrier", "semaphore" or "union".

    shape: as the kernel sees it. arrivals: of a barrier; tensor: whether it orders what tcgen05 does; axes: the cluster
    axes whose CTAs share it. nbytes: what it takes of SMEM or TMEM.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    space: str
    arrivals: int = 0
    tensor: bool = False
    axes: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        return 8 * int(np.prod(self.shape, dtype=int)) if self.kind == "barrier" else nbytes_of(self.shape, self.dtype)


class View:
    """A Ref operand seen through `.at[...]`: the slot of the Ref, and of the numbers that say where.

    at(ref_shape, dtype, numbers, out_of_bounds, clips) is the Place; the same numbers give the same Place. tiling: the
    shape of the tiles that the Ref is made of, and their swizzle in bytes, where it has any. transposed: whether it is
    seen with its dimensions exchanged.
    """

    def __init__(self, ref: int, tree: Any, leaves: Sequence[int]):
        self.ref, self._tree, self.leaves = ref, tree, tuple(leaves)
        self._places: dict[Any, Place] = {}
        self._first = first = self._unflattened([0] * len(self.leaves)) if tree is not None else []
        self.alias = _alias(first)  # a part of a RefUnion: (byte offset, shape, dtype, group)
        # a Ref of another CTA of the cluster: the axes along which it is another one
        self.peer = next((t.dims for t in first if _is(t, "ClusterRefTransform")), None)
        if any(_is(t, "PeerMemRef") for t in first):
            raise Beyond("a Ref of another device")
        tile = next((tuple(t.tiling) for t in first if _is(t, "UntilingTransform")), None)
        self.tiling = tile, next((int(t.swizzle) for t in first if _is(t, "UnswizzleRef")), None)
        self.transposed = any(_is(t, "TransposeTransform") for t in first)

    def _transforms(self, numbers: Sequence[Any]) -> list[Any]:
        return self._unflattened(numbers) if self.leaves else self._first

    def _unflattened(self, numbers: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(
            jax.tree.unflatten(self._tree, list(numbers)), is_leaf=lambda t: hasattr(t, "transform_type")
        )

    def block(self, numbers: Sequence[Any]) -> dict[Any, int]:
        """Which CTA of the cluster a Ref belongs to that is not one's own: {axis: index}."""
        t = next(t for t in self._transforms(numbers) if _is(t, "ClusterRefTransform"))
        return {axis: int(np.asarray(i)) for axis, i in zip(t.dims, t.idxs, strict=True)}

    def at(
        self, shape: tuple[int, ...], dtype: np.dtype, numbers: Sequence[Any], out_of_bounds: OutOfBounds, clips: bool
    ) -> Place:
        key: Any = None
        if all(np.ndim(n) == 0 for n in numbers):
            key = (shape, clips, *map(int, numbers))
            if (found := self._places.get(key)) is not None:
                return found
        kept = [t for t in self._transforms(numbers) if type(t).__name__ not in _ELSEWHERE]
        noted: list[Any] = []

        def note(*where: int) -> None:
            noted.append(where)
            out_of_bounds(*where)

        place = locate(shape, dtype, kept, note, clips=clips)
        if key is not None and not noted:
            self._places[key] = place
        return place


def _alias(transforms: Sequence[Any]) -> tuple[int, tuple[int, ...], np.dtype, int] | None:
    """Which part of a RefUnion is meant, with the shape that it has for the kernel."""
    if not any(_is(t, "ExtractAliasedRef") for t in transforms):
        return None
    part, *rest = itertools.dropwhile(lambda t: not _is(t, "ExtractAliasedRef"), transforms)
    seen = part.transform_type(jax.core.ShapedArray((), np.int8))
    for t in itertools.takewhile(lambda t: type(t).__name__ in _LAYOUTS, rest):
        seen = t.transform_type(seen)
    return part.offset, tuple(seen.shape), np.dtype(part.dtype), part.alias_group_idx


def _is(transform: Any, name: str) -> bool:
    return type(transform).__name__ == name


@dataclasses.dataclass(eq=False)
class Instr:
    """One instruction. ins, outs: slots. p: what else is known, by name; programs: those inside of it.

    flops, specials: floating-point operations and transcendentals of array arithmetic. around: what it stands inside.
    """

    kind: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    p: dict[str, Any]
    eqn: Any
    flops: int = 0
    specials: int = 0
    around: "Instr | None" = None

    def __post_init__(self) -> None:
        for each in (i for inner in self.p.get("programs", ()) for i in inner.instrs):
            each.around = self

    @functools.cached_property
    def line(self) -> SourceLine | None:
        """The reader's line."""
        chain = [self]
        while chain[-1].around is not None:
            chain.append(chain[-1].around)
        return asked_line_of(each.eqn for each in chain)

    def evaluate(self, values: Sequence[Any]) -> list[Any]:
        """Array arithmetic in NumPy."""
        if self._index is not None:
            op, dtype = self._index
            return [np.asarray(op(*values)).astype(dtype, copy=False)]
        out = evaluate(self.eqn, values)
        return list(out) if self.eqn.primitive.multiple_results else [out]

    @functools.cached_property
    def _index(self) -> tuple[Callable[..., Any], np.dtype] | None:
        """(how to compute it, dtype of the result) of arithmetic on single integers, which is most of a kernel."""
        atoms, op = (*self.eqn.invars, *self.eqn.outvars), meaning(self.eqn)
        if op is None or any(v.aval.shape or is_floating(np_dtype(v.aval)) for v in atoms):
            return None
        return op, np_dtype(self.eqn.outvars[0].aval)

    def keeps_shape(self, slot: int) -> bool:
        """Whether the first result has the shape of an operand."""
        return bool(self.eqn.invars[self.ins.index(slot)].aval.shape == self.eqn.outvars[0].aval.shape)


@dataclasses.dataclass(eq=False)
class Program:
    """Instructions over a table of slots. template: the table at the start, with what is written into the program."""

    template: list[Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    instrs: list[Instr]

    def everything(self) -> Iterator[Instr]:
        """Every instruction, those of programs inside included."""
        for instr in self.instrs:
            yield instr
            for inner in instr.p.get("programs", ()):
                yield from inner.everything()
