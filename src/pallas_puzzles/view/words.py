"""A trace in words: what happens at a step, the table of costs, and a picture made of characters."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.capture import Call, Operand
from ..lens.machine import Figures, OperandFigures, Trace, figures, is_outside
from ..text import COLUMNS, LINES, cut, human_bytes, plural, times
from .paper import Axis, axes_of, even_axes

Block = tuple[int, ...]


def block_words(operand: Operand) -> str:
    """The block shape as it stands in a BlockSpec: '(None, 8, 128)'."""
    if operand.in_hbm:
        return "in HBM"
    sizes = {"squeezed": "None", "element": "Element({})"}
    parts = [sizes.get(d.kind, "{}").format(d.size) for d in operand.dims]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def moved_word(operand: Operand) -> str:
    """What it is called when a block of this operand is copied."""
    return "fetched" if operand.role == "in" else "written back"


def in_range(trace: Trace, k: int, step: int) -> bool:
    block = trace.blocks[k][step]
    return block is None or not is_outside(trace.call.operands[k], block)


def state_words(trace: Trace, k: int, step: int) -> str:
    """What happens to the block of operand k at a step: 'fetched', 'kept', 'written back' ..."""
    operand = trace.call.operands[k]
    if trace.blocks[k][step] is None:
        return "stays in HBM"
    if not in_range(trace, k, step):
        return "out of range"
    return moved_word(operand) if trace.moved[k][step] else "kept"


def step_words(trace: Trace, step: int) -> str:
    """'step 3, grid index (0, 3): x_ref block (0, 3) fetched; o_ref block (0, 0) written back'."""
    parts = []
    for k, operand in enumerate(trace.call.operands):
        block = trace.blocks[k][step]
        where = "" if block is None else f" block {block}"
        parts.append(f"{operand.name}{where} {state_words(trace, k, step)}")
    index = tuple(int(i) for i in trace.steps[step])
    return f"step {trace.first + step:,}, grid index {index}: {'; '.join(parts)}"


def window_words(trace: Trace) -> str:
    """'steps 512 to 1,023 of 4,096' where that is not all of them."""
    total = math.prod(trace.call.grid)
    if trace.n == total:
        return ""
    return f"steps {trace.first:,} to {trace.first + trace.n - 1:,} of {total:,}"


def title_words(call: Call) -> str:
    """'grid (4, 2) = 8 steps (parallel, arbitrary), basics.py:214'."""
    told = any(s != "arbitrary" for s in call.semantics)  # the default goes without saying
    semantics = f" ({', '.join(call.semantics)})" if told else ""
    where = f", {call.where}" if call.where else ""
    inside = f"pipeline in {call.inside}, " if call.inside else ""
    return f"{inside}grid {call.grid} = {plural(math.prod(call.grid), 'step')}{semantics}{where}"


def moves_words(row: OperandFigures) -> str:
    """'1,024', or 'about 537,000,000' where it is estimated."""
    return f"{row.moves:,}" if row.exact else f"about {float(f'{row.moves:.3g}'):,.0f}"


def totals_words(trace: Trace, costs: Figures) -> str:
    """VMEM, HBM traffic and, where the kernel was run, arithmetic and intensity, in one line."""
    ratio = f" ({times(costs.hbm_bytes / costs.once_bytes)} the arrays)" if costs.once_bytes else ""
    more = f" and about {human_bytes(costs.temporary_bytes)} of temporaries" if costs.temporary_bytes else ""
    about = "" if costs.exact else "about "
    parts = [f"VMEM {human_bytes(costs.vmem_bytes)}{more}", f"HBM traffic {about}{human_bytes(costs.hbm_bytes)}{ratio}"]
    if costs.computed:
        parts.append(f"{plural(costs.flops, 'FLOP')}")
        if costs.transcendentals:
            parts.append(f"{costs.transcendentals:,} transcendental")
        if costs.intensity is not None:
            parts.append(f"{costs.intensity:.3g} FLOP per HBM byte")
    return ", ".join(parts)


HEADS = {
    "array": "the Ref's name in the kernel",
    "shape": "of the whole array",
    "dtype": "",
    "block": "what the kernel sees of it at a time; None: a dimension of size 1, squeezed away",
    "VMEM": "buffers x bytes of a block: two buffers, so that one is copied while the kernel works on the other",
    "moves": "how many times a block is copied between HBM and VMEM",
    "HBM traffic": "bytes copied between HBM and VMEM",
    "vs. once": "the traffic compared with moving the whole array once",
}


SIDES = "<<<<>>>>"  # array, shape, dtype and block are words, the others are numbers


def table_rows(trace: Trace, costs: Figures) -> list[tuple[str, ...]]:
    """The rows under HEADS: operands, then scalars, scratch, and the kernel's own copies."""
    rows: list[tuple[str, ...]] = []
    for r in costs.operands:
        o, once = r.operand, times(r.hbm_bytes / r.once_bytes) if r.once_bytes else "–"
        place = f"{r.buffers} × {human_bytes(o.block_bytes)}" if o.space == "vmem" else o.space.upper()
        counted = (moves_words(r), f"{'' if r.exact else 'about '}{human_bytes(r.hbm_bytes)}", once)
        numbers = ("–",) * 4 if o.in_hbm else (place, *counted)
        rows.append((o.name, str(o.shape), str(o.dtype), block_words(o), *numbers))
    call = trace.call
    for name, values in zip(call.scalar_names, call.scalars, strict=False):
        rows.append((name, str(values.shape), str(values.dtype), "scalars", "SMEM", "–", "–", "–"))
    for s in call.scratch:
        kind, size = str(s.dtype), human_bytes(s.nbytes) if s.space == "vmem" else s.space.upper()
        if s.space == "semaphore":
            kind, size = "semaphore", "–"
        rows.append((s.name, str(s.shape), kind, "scratch", size, "–", "–", "–"))
    for p in trace.pipelines:
        name = p.traces[0].call.name if p.traces else "pipeline"
        runs = plural(round(p.runs), "run")
        rows.append((name, "–", "–", "pipeline", human_bytes(p.vmem_bytes), runs, human_bytes(p.hbm_bytes), "–"))
    if own := costs.dma_bytes - sum(p.hbm_bytes for p in trace.pipelines):
        steps = sum(b > 0 for b in trace.dma_bytes)
        where = f"in {plural(steps, 'step')}" if trace.total is None else "–"
        rows.append(("own copies", "–", "–", "–", "–", where, human_bytes(own), "–"))
    return rows


# --- a picture of characters


def text_lines(trace: Trace, lines_left: int = LINES) -> list[str]:
    call, costs = trace.call, figures(trace)
    lines = [cut(f"{call.name}: {title_words(call)}", end="…")]
    table, most = _text_table([tuple(HEADS), *table_rows(trace, costs)]), lines_left - 3
    if len(table) > most:
        table = [*table[: most - 1], f"... and {len(table) - most + 1} more"]
    lines += [*table, *textwrap.wrap(totals_words(trace, costs), COLUMNS)]
    lanes = [k for k, o in enumerate(call.operands) if not o.in_hbm]
    spare = lines_left - len(lines)
    if not trace.n or spare < 3 or not lanes:
        return lines
    strip = _text_strip(trace, lanes[: spare - 2])
    maps = _text_maps(trace, spare - len(strip) - 1)
    return [*lines, "", *maps, *strip]


def _text_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - COLUMNS
    for i in (0, 3, 1):  # names, blocks and shapes give way first
        give = max(0, min(excess, widths[i] - 8))
        widths[i], excess = widths[i] - give, excess - give
    cells = [[f"{cut(c, w, '…'):{side}{w}}" for c, w, side in zip(row, widths, SIDES, strict=True)] for row in rows]
    return [cut("  ".join(row).rstrip(), end="…") for row in cells]


def _text_strip(trace: Trace, operands: list[int]) -> list[str]:
    """One line per operand, one character per step."""
    name_w = min(24, max(len(trace.call.operands[k].name) for k in operands))
    n = min(trace.n, COLUMNS - name_w - 4)
    first, total = trace.first, math.prod(trace.call.grid)
    which = f"steps {first:,} to {first + n - 1:,}" + (f" of {total:,}" if n < total else "")
    which = which if total > 1 else "the only step"
    lines = [f"{which}: █ moved between HBM and VMEM, ─ kept in VMEM"]
    for k in operands:
        cells = "".join("█" if on else "─" for on in trace.moved[k][:n])
        name = trace.call.operands[k].name
        lines.append(f"  {name[:name_w]:{name_w}}  {cells}{'…' if n < trace.n else ''}")
    return lines


def _text_maps(trace: Trace, lines_left: int) -> list[str]:
    """The grid and the operands half way through, side by side: █ now, ▒ before, · later."""
    rows_left = min(8, lines_left - 2)
    if rows_left < 1:
        return []
    step = trace.n // 2
    grid = even_axes(trace.call.grid, (1,) * len(trace.call.grid))
    columns = [_text_map(grid, trace.steps, step, "grid", rows_left)]
    for k, o in enumerate(trace.call.operands):
        if trace.blocks[k][step] is not None:
            columns.append(_text_map(axes_of(o.shape, o.dims), trace.blocks[k], step, o.name, rows_left))
    shown, width = [], 2
    for column in columns:
        width += len(column[0]) + 3
        if width > COLUMNS:
            break
        shown.append(column)
    height = max(len(c) for c in shown)
    padded = [c + [" " * len(c[0])] * (height - len(c)) for c in shown]
    index = tuple(int(i) for i in trace.steps[step])
    head = f"at step {trace.first + step:,}, grid index {index}: █ now, ▒ before, · not yet"
    return [head, *("  " + "   ".join(row).rstrip() for row in zip(*padded, strict=True))]


def _matrix(block: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """A block's place: which matrix of blocks it is in, by its leading indices, and its row and column there."""
    *lead, row, col = (0,) * (2 - len(block)) + tuple(block)
    return tuple(lead), row, col


def _text_map(axes: list[Axis], blocks: Sequence[Any], step: int, name: str, max_rows: int) -> list[str]:
    """One array: its name, and the matrix of blocks that the current block lies in, shrunk to fit."""
    now = tuple(blocks[step])
    rows, cols = (axes[-2].count if len(axes) > 1 else 1), (axes[-1].count if axes else 1)
    high, wide = min(rows, max_rows), min(cols, 24)
    chars = [["·"] * wide for _ in range(high)]
    lead = _matrix(now)[0]
    for mark, seen in (("▒", blocks[:step]), ("█", [now])):
        for above, r, c in (_matrix(b) for b in seen if b is not None):
            if above == lead and 0 <= r < rows and 0 <= c < cols:
                chars[r * high // rows][c * wide // cols] = mark
    spread = 2 if wide <= 8 else 1  # characters are twice as high as wide
    lines = ["".join(c * spread for c in row) for row in chars]
    if lead:
        name = f"{name}[{', '.join(map(str, lead))}]"
    if (high, wide) != (rows, cols):
        name = f"{name} {rows}×{cols}"
    width = max(len(name), len(lines[0]))
    return [name.ljust(width), *(line.ljust(width) for line in lines)]


def tile_map_words(status: Mapping[Block, str]) -> str:
    """'crossed: wrong values in (0, 1), (1, 1); zero in (2, 0)'."""
    parts = []
    for word in dict.fromkeys(word for word in status.values() if word != "ok"):
        blocks = [str(block) for block, its in status.items() if its == word]
        more = f" and {len(blocks) - 8} more" if len(blocks) > 8 else ""
        parts.append(f"{word} in {', '.join(blocks[:8])}{more}")
    return f"crossed: {'; '.join(parts)}" if parts else "every block is right"


def tile_map_text(status: Mapping[Block, str]) -> list[str]:
    """The first matrix of blocks that holds a wrong one: '·' right, '✗' wrong. Empty where it would not fit."""
    wrong = [b for b, word in status.items() if word != "ok"]
    if not wrong or len(status) < 2:
        return []
    lead = _matrix(wrong[0])[0]
    cells = {_matrix(b)[1:]: word for b, word in status.items() if _matrix(b)[0] == lead}
    rows, cols = (max(i[d] for i in cells) + 1 for d in (0, 1))
    if rows > 6 or cols > 40:
        return []
    where = f"[{', '.join(map(str, lead))}]: " if lead else ""
    lines = ["".join(f" {'·' if cells.get((r, c), 'ok') == 'ok' else '✗'}" for c in range(cols)) for r in range(rows)]
    return [f"{where}{line.strip()}" if i == 0 else " " * len(where) + line.strip() for i, line in enumerate(lines)]
