"""A wrong output: its blocks, the steps that visited them, and how to say where."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.capture import Operand, SourceLine
from ...lens.machine import Trace, spans
from ...lens.program import lines_of
from ..findings import Block, Finding, Tolerance


@dataclasses.dataclass
class WrongOutput:
    """A wrong output, block by block."""

    trace: Trace
    j: int
    got: np.ndarray
    want: np.ndarray
    bad: np.ndarray
    tolerance: Tolerance

    def __post_init__(self) -> None:
        self.o: Operand = self.trace.call.outs[self.j]
        self.k = [k for k, o in enumerate(self.trace.call.operands) if o.role == "out"][self.j]
        tiles = self.o.tiles if not self.o.in_hbm else (1,) * len(self.o.shape)
        self.tiles = list(np.ndindex(*tiles))
        self.count = tiles
        self.atol = max(self.tolerance.atol(self.want.astype(np.float64)), 1e-12)
        finite = self.want[np.isfinite(self.want.astype(np.float64))]
        self.noise = 2e-6 * float(np.abs(finite).max(initial=0))  # what float32 rounding can make of a constant
        self.corners: np.ndarray | None = None
        self.elementwise = any(d.kind == "element" for d in self.o.dims)

    def cut(self, array: np.ndarray, tile: Block) -> np.ndarray:
        if self.o.in_hbm:
            return array
        return array[tuple(slice(i * b, (i + 1) * b) for i, b in zip(tile, self.o.block, strict=True))]

    def steps_of(self, tile: Block) -> list[int]:
        if self.o.in_hbm or self.elementwise:
            return []
        return [s for visit in self.trace.visits[self.j].get(tile, []) for s in visit]

    def _store_line(self, tile: Block) -> tuple[SourceLine | None, int | None]:
        """The line and step that last stored into a block."""
        writer = self.cut(self.trace.writer[self.j], tile)
        step = int(writer.max()) if writer.size else -1
        stores = [e for e in self.trace.events if e.op != "load" and e.ref == self.o.name and e.step == step]
        return (stores[-1].line, step) if stores else (None, None)

    def _finding(self, kind: str, cause: str, tile: Block, evidence: Sequence[str] = ()) -> Finding:
        line, step = self._store_line(tile)
        index = self.trace.steps[step] if step is not None else None
        near = list(lines_of(self.trace.call.kernel))
        return Finding(kind, cause, list(evidence), line, step, index, self.o.name, tile, [], self.want.size, near)

    def _axis_of(self, d: int) -> int | None:
        """The grid axis that dimension d of the output's blocks follows, as program_id counts it."""
        own = [a for a in range(len(self.trace.call.grid)) if a not in self.trace.call.vmapped]
        for a in own:
            if self.trace.call.grid[a] > 1 and all(
                b[d] == step[a] for b, step in zip(self.trace.blocks[self.k], self.trace.steps, strict=True)
            ):
                return own.index(a)
        return None


def sample_of(got: np.ndarray, want: np.ndarray, bad: np.ndarray, name: str) -> str:
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{name}{list(index)} is {got[index]:.6g}, expected {want[index]:.6g}"


def joined(numbers: Any) -> str:
    return " and ".join(map(str, numbers))


def verb(tiles: Any) -> str:
    return "is" if len(tiles) == 1 else "are"


def in_words(where: str) -> str:
    return f" in {where}" if where else ""


def named_blocks(tiles: Sequence[Block]) -> str:
    """'block (3, 0)' or 'blocks (0, 0), (0, 1), ... (12 of them)'."""
    if len(tiles) == 1:
        return f"block {tuple(tiles[0])}"
    shown = ", ".join(str(tuple(t)) for t in tiles[:3])
    return f"blocks {shown}" + (f", ... ({len(tiles)} of them)" if len(tiles) > 3 else "")


def where_in(bad: np.ndarray) -> str:
    """Which rows or columns of a block are wrong, in words; '' for all of it."""
    if bad.ndim == 0 or bad.all():
        return ""
    hit = np.nonzero(bad)
    names = (
        ["elements"]
        if bad.ndim == 1
        else ["rows", "columns"]
        if bad.ndim == 2
        else [f"dim {d}:" for d in range(bad.ndim)]
    )
    parts = []
    for d, name in enumerate(names):
        values = np.unique(hit[d])
        if len(values) < bad.shape[d]:
            parts.append(f"{name} {_short_spans(values)}")
    return ", ".join(parts) or "scattered elements"


def _short_spans(values: np.ndarray) -> str:
    text = spans(values.tolist())
    return text if text.count(",") < 4 else ", ".join(text.split(", ")[:3]) + ", ..."
