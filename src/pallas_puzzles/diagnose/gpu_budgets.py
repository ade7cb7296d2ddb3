"""A right answer of kernels for a GPU that costs too much: the figure, the budget, and what to do about it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..ir.capture import SourceLine
from ..lens.gpu import Launched, Run
from ..text import human_bytes, plural
from .budgets import Budget
from .findings import Finding
from .gpu import findings_of

_ALSO = frozenset("calls flops outside_flops".split())  # of the fields that are for kernels for a TPU
_OWN = [
    *("gmem_bytes", "thread_bytes", "cta_bytes", "copies", "stores", "smem_bytes", "ctas", "arrivals"),
    *("bank_conflicts", "waited", "tensor_idle", "copy_idle"),
]


def over_budget(run: Run, budget: Budget) -> list[Finding]:
    """'Right answer, but ...', for each bound that is exceeded."""
    return [f.but(cause=f"Right answer, but {f.cause}") for f in _over(run, budget)]


def _over(run: Run, budget: Budget) -> Iterator[Finding]:
    counts, near = run.counts, [line for each in run.calls for line in each.kernel.callers]

    def over(kind: str, text: str, *evidence: str, line: SourceLine | None = None) -> Finding:
        return Finding("budget", text, evidence, line, operand=kind, near=near)

    asked = {f.name for f in dataclasses.fields(budget) if getattr(budget, f.name) is not None}
    if strange := sorted(asked - _ALSO - {*_OWN}):
        text = (
            f"the budget bounds {strange[0]}, which a kernel for a GPU does not have. Bound one of {', '.join(_OWN)}."
        )
        yield over(strange[0], text)
    if budget.calls is not None and len(run.calls) != budget.calls:
        yield over("calls", f"it uses {plural(len(run.calls), 'kernel')}; this puzzle asks for {budget.calls}.")
        return  # then every other figure is another one, too
    if _exceeds(counts.gmem_bytes, budget.gmem_bytes):
        once = sum(a.nbytes for each in run.calls for a in (*each.kernel.arrays, *each.outputs))
        yield over(
            "gmem_bytes",
            f"it moves {human_bytes(counts.gmem_bytes)} to and from GMEM; the budget is "
            f"{human_bytes(budget.gmem_bytes or 0)}. The arrays hold {human_bytes(once)} together. Read a tile into "
            "SMEM once, and use it there as often as you need it.",
            f"read: {human_bytes(counts.gmem_read_bytes)}, written: {human_bytes(counts.gmem_write_bytes)}",
        )
    if _exceeds(counts.thread_bytes, budget.thread_bytes):
        allowed = f"may move {human_bytes(budget.thread_bytes or 0)}" if budget.thread_bytes else "may move nothing"
        yield over(
            "thread_bytes",
            f"its threads move {human_bytes(counts.thread_bytes)} between GMEM and registers themselves; here they "
            f"{allowed}. Let the copy engine do it: plgpu.copy_gmem_to_smem on the way in, plgpu.copy_smem_to_gmem on "
            "the way out.",
        )
    if _exceeds(counts.copies, budget.copies):
        text = f"it starts {counts.copies:,} copies into SMEM; the budget is {budget.copies}."
        unused = next(findings_of(note for note in run.notes if note.kind == "load-in-flight"), None)
        yield over("copies", text if unused is None else f"{text} {unused.cause}", line=unused.line if unused else None)
    if _exceeds(counts.stores, budget.stores):
        text = f"it starts {counts.stores:,} copies out of SMEM; the budget is {budget.stores}. "
        yield over("stores", text + "Let each copy bring more rows or columns.")
    if _exceeds(counts.smem_bytes, budget.smem_bytes):
        yield over(
            "smem_bytes",
            f"a CTA holds {human_bytes(counts.smem_bytes)} of SMEM; the budget is "
            f"{human_bytes(budget.smem_bytes or 0)}. Use smaller tiles, or fewer slots.",
            *_held(max(run.calls, key=lambda each: each.counts.smem_bytes)),
        )
    if _exceeds(counts.ctas, budget.ctas):
        grids = "; ".join(f"{each.kernel.name} has the grid {each.kernel.grid}" for each in run.calls)
        text = f"it takes {plural(counts.ctas, 'CTA')}; the budget is {budget.ctas}. Do more in each: {grids}."
        yield over("ctas", text)
    if _exceeds(counts.arrivals, budget.arrivals):
        text = f"it makes {plural(counts.arrivals, 'arrival')} on barriers; the budget is {budget.arrivals}. Wait for "
        yield over("arrivals", text + "larger copies, or for several at one barrier.")
    if _exceeds(counts.bank_conflicts, budget.bank_conflicts):
        lines = _most(counts.conflicts_at)
        text = (
            f"it has {plural(counts.bank_conflicts, 'bank conflict')} in SMEM; the budget is {budget.bank_conflicts}. "
            "Rows of a tile that are read together lie in the same banks. Give the Ref "
            "transforms=(plgpu.TilingTransform((8, n)), plgpu.SwizzleTransform(128)), where n elements are 128 bytes."
        )
        where = (f"{line}: {plural(n, 'conflict')}: {line.text}" for n, line in lines[:3])
        yield over("bank_conflicts", text, *where, line=lines[0][1] if lines else None)
    if _exceeds(counts.cta_bytes, budget.cta_bytes):
        text = f"one of its CTAs moves {human_bytes(counts.cta_bytes)} to and from GMEM; the budget is "
        text += (
            f"{human_bytes(budget.cta_bytes or 0)}. All CTAs run at the same time: let each of them do an equal part."
        )
        yield over("cta_bytes", text)
    if _exceeds(counts.waited, budget.waited):
        lines = _most(counts.waited_at)
        text = f"its warpgroups wait for {counts.waited:,.0f} cycles; the budget is {budget.waited:,}. Start what they "
        text += "wait for earlier, while they still compute: with another slot in SMEM, for instance."
        where = (f"{line}: {n:,.0f} cycles: {line.text}" for n, line in lines[:3])
        yield over("waited", text, *where, line=lines[0][1] if lines else None)
    copy_first = "Start the next copy before you compute with the last one, so that the two overlap."
    if counts.copies <= counts.ctas:  # in no CTA is there a next one
        copy_first = "A CTA copies, and then it computes. Compute in less time: with whole tiles, not row by row."
    others = " While threads compute, the products of another warpgroup can go on."
    for kind, what, busy, idle, advice in (
        ("tensor_idle", "the tensor cores have", counts.tensor_busy, counts.tensor_idle, copy_first + others),
        ("copy_idle", "the copy engine has", counts.copy_busy, counts.copy_idle, copy_first),
    ):
        if _exceeds(idle, most := getattr(budget, kind)):
            text = f"{what} nothing to do in {idle:,.0f} of {busy + idle:,.0f} cycles; the budget is {most:,}. {advice}"
            yield over(kind, text)
    if _exceeds(counts.flops, budget.flops):
        yield over("flops", f"it computes {counts.flops:,} FLOPs; the budget is {budget.flops:,}.")


def _most(by_line: dict[SourceLine | None, Any]) -> list[tuple[Any, SourceLine]]:
    """(figure, the reader's line), the largest first."""
    return sorted(((n, line) for line, n in by_line.items() if line is not None), key=lambda each: -each[0])


def _exceeds(figure: float, most: float | None) -> bool:
    return most is not None and figure > most


def _held(launched: Launched) -> Iterator[str]:
    """The largest Refs in SMEM."""
    allocs: list[Any] = [a for i in launched.kernel.program.everything() for a in i.p.get("allocs", ())]
    for a in sorted((a for a in allocs if a.space == "smem"), key=lambda a: -a.nbytes)[:3]:
        yield f"{a.name}: {human_bytes(a.nbytes)}, {a.dtype}{list(a.shape)}"
