"""Bank conflicts in SMEM: how often a warp, or the tensor cores, wait for a bank that is busy with a word of theirs.

SMEM has 32 banks; successive words of 4 bytes lie in successive banks, and a bank gives one word at a time ("Shared
Memory", CUDA C++ Programming Guide). A warp's access of 4, 8 or 16 bytes a lane is done for 32, 16 or 8 lanes at once:
that is a wavefront where their words lie in different banks, and more of them where they do not. A conflict is each
wavefront beyond the first.

What is known of layouts: a swizzle of 128, 64 or 32 bytes exchanges the groups of 16 bytes of a row by the row's number
("Swizzling Modes", PTX ISA); Layout.WGMMA is the layout of wgmma's accumulators (PTX ISA, "wgmma.mma_async", register
fragments); the tensor cores read their operands in core matrices of 8 rows of 16 bytes (PTX ISA, "Matrix fragments in
shared memory"). A Ref without transforms has those that the compiler finds for it: none of its conflicts are counted.
"""

import functools
from collections.abc import Iterator

import numpy as np

from ...ir.gpu_program import Instr, Program

_BANKS, _WORD, _LANES, _CHUNK = 32, 4, 32, 16
_ROWS, _COLUMNS = 64, 8  # of a tile of Layout.WGMMA

Tiling = tuple[tuple[int, ...] | None, int | None]  # the tile's shape, and its swizzle in bytes, where there are any


def wavefronts(addresses: np.ndarray, width: int) -> int:
    """How many wavefronts accesses of `width` bytes a lane take. addresses: in bytes, (accesses, lanes)."""
    at_once = min(addresses.shape[1], _LANES * _WORD // max(width, _WORD))
    words = addresses.reshape(-1, at_once, 1) // _WORD + np.arange(max(1, width // _WORD))
    return sum(int(np.bincount(np.unique(group) % _BANKS).max()) for group in words.reshape(len(words), -1))


def _address(
    rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int], tiling: Tiling, itemsize: int
) -> np.ndarray:
    """Where elements of a tiled and swizzled array lie, in bytes."""
    (tr, tc), swizzle = tiling[0] or (1, shape[1]), tiling[1]
    tile = (rows // tr) * (shape[1] // tc) + columns // tc
    found: np.ndarray = (tile * tr * tc + rows % tr * tc + columns % tc) * itemsize
    return found if swizzle is None else found ^ (found // 128 % (swizzle // _CHUNK) * _CHUNK)


@functools.lru_cache(1024)
def of_warps(shape: tuple[int, ...], itemsize: int, tiling: Tiling, optimized: bool = True) -> int:
    """The conflicts of a warpgroup that loads or stores a value of Layout.WGMMA. optimized: the compiler may let every
    second group of lanes take another column of tiles first, where that avoids conflicts, as Mosaic GPU does."""
    if not _fits(shape, tiling) or shape[-2] % _ROWS or shape[-1] % _COLUMNS:
        return 0
    rows, columns = shape[-2:]
    lane, column = np.arange(_LANES), np.arange(0, columns, _COLUMNS)[:, None]
    first = np.arange(0, rows, 8)[:, None, None]  # each of a warp's 16 rows is one of two groups of 8
    width = 2 * itemsize

    def conflicts(shift: np.ndarray | int) -> int:
        at = _address(first + lane // 4, (column + shift) % columns + lane % 4 * 2, (rows, columns), tiling, itemsize)
        at = np.broadcast_to(at, (rows // 8, len(column), _LANES)).reshape(-1, _LANES)
        return wavefronts(at, width) - len(at) * max(1, width // _WORD)

    plans = (lane // group % 2 * step for group in (1, 2, 4, 8, 16) for step in range(_COLUMNS, columns, _COLUMNS))
    found = conflicts(0)
    if found and optimized and any(not conflicts(plan) for plan in plans):
        return 0
    return found


@functools.lru_cache(1024)
def of_operand(shape: tuple[int, ...], itemsize: int, tiling: Tiling) -> int:
    """The conflicts of the tensor cores that read an operand once."""
    per_row = _CHUNK // itemsize
    if tiling == (None, None) or not _fits(shape, tiling) or shape[-2] % 8 or shape[-1] % per_row:
        return 0
    rows, columns = shape[-2:]
    eight, chunk = np.arange(8), np.arange(0, columns, per_row)[:, None]
    at = _address(eight, chunk, (rows, columns), tiling, itemsize)
    return (wavefronts(at, _CHUNK) - len(at)) * (rows // 8)


def _fits(shape: tuple[int, ...], tiling: Tiling) -> bool:
    """Whether an array has two dimensions that the tiles divide; the others have one element."""
    tile = tiling[0]
    if len(shape) < 2 or any(n != 1 for n in shape[:-2]) or (tile is not None and len(tile) != 2):
        return False
    return tile is None or not (shape[-2] % tile[0] or shape[-1] % tile[1])


# --- layouts of values -----------------------------------------------------------------------------------------------


def note_layouts(program: Program, known: dict[int, str] | None = None) -> list[str | None]:
    """Notes at each load and store the layout of its value, as far as the program says it: `p["layout"]`. known: of the
    slots that it is given. Returns that of its results."""
    known = dict(known or {})
    made_by: dict[int, Instr] = {}
    for instr in program.instrs:
        made_by |= dict.fromkeys(instr.outs, instr)
        if instr.kind == "acc_read":
            known[instr.outs[0]] = "WGMMA"
        elif instr.kind == "same":
            layouts = [instr.p.get("layout") or known.get(i) for i in instr.ins]
            known |= {slot: layout for slot, layout in zip(instr.outs, layouts, strict=True) if layout}
            for slot in instr.ins if "layout" in instr.p else ():
                if (source := made_by.get(slot)) is not None and source.kind == "read":
                    source.p["layout"] = instr.p["layout"]
        elif instr.kind == "array":
            found = [known[i] for i in instr.ins if i in known and instr.keeps_shape(i)]
            known |= dict.fromkeys(instr.outs, found[0]) if found else {}
        elif instr.kind == "write":
            instr.p["layout"] = known.get(instr.p["value"])
        for inner, slots in inside(instr):
            given = {to: known[i] for to, i in zip(inner.ins, slots, strict=False) if i in known}
            results = note_layouts(inner, given)
            if instr.kind in ("inline", "run_scoped", "cond"):
                known |= {slot: layout for slot, layout in zip(instr.outs, results, strict=False) if layout}
    return [known.get(i) for i in program.outs]


def inside(instr: Instr) -> Iterator[tuple[Program, tuple[int, ...]]]:
    """The programs inside of an instruction, each with the slots that it is given."""
    programs, ins = instr.p.get("programs", ()), instr.ins
    if instr.kind == "while":
        nt, nb = instr.p["consts"]
        yield programs[0], (*ins[:nt], *ins[nt + nb :])
        yield programs[1], ins[nt:]
        return
    for program in programs:
        yield program, ins[1:] if instr.kind == "cond" else ins
