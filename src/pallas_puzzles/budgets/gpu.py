"""A right answer of kernels for a GPU that costs too much: the figure, the budget, and what to do about it."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ..diagnose.findings import Finding
from ..diagnose.gpu import findings_of
from ..ir.capture import SourceLine
from ..lens.gpu import Run
from ..text import human_bytes, plural
from .budget import Bounds, Budget, exceeded, over

_count, _cycles = "{:,}".format, "{:,.0f}".format
# What is said of each bound that is exceeded; the words in braces are those of _facts
_WORDS: Bounds = {
    "gmem_bytes": (
        human_bytes,
        "it moves {figure} to and from GMEM; the budget is {most}. The arrays hold {arrays} together. {once}",
    ),
    "thread_bytes": (
        human_bytes,
        "its threads move {figure} between GMEM and registers themselves; the budget is {most}. Let the copy engine do "
        "it: plgpu.copy_gmem_to_smem on the way in, plgpu.copy_smem_to_gmem on the way out.",
    ),
    "copies": (_count, "it starts {figure} copies into SMEM; the budget is {most}. {unused}"),
    "stores": (
        _count,
        "it starts {figure} copies out of SMEM; the budget is {most}. Let each copy bring more rows or columns.",
    ),
    "smem_bytes": (
        human_bytes,
        "a CTA holds {figure} of SMEM; the budget is {most}. Use smaller tiles, or fewer slots.",
    ),
    "ctas": (_count, "it takes {figure} CTAs; the budget is {most}. Do more in each: {grids}."),
    "bank_conflicts": (
        _count,
        "it has {figure} bank conflicts in SMEM; the budget is {most}. Rows of a tile that are read together lie in "
        "the same banks. Give the Ref transforms=(plgpu.TilingTransform((8, n)), plgpu.SwizzleTransform(128)), where n "
        "elements are 128 bytes.",
    ),
    "cta_bytes": (
        human_bytes,
        "one of its CTAs moves {figure} to and from GMEM; the budget is {most}. All CTAs run at the same time: let "
        "each of them do an equal part.",
    ),
    "waited": (
        _cycles,
        "its warpgroups wait for {figure} cycles; the budget is {most}. Start what they wait for earlier, while they "
        "still compute: with another slot in SMEM, for instance.",
    ),
    "tensor_idle": (
        _cycles,
        "the tensor cores have nothing to do in {figure} of {tensor_cycles} cycles; the budget is {most}. "
        "{product_first}",
    ),
    "copy_idle": (
        _cycles,
        "the copy engine has nothing to do in {figure} of {copy_cycles} cycles; the budget is {most}. {copy_first}",
    ),
    "flops": (_count, "it computes {figure} FLOPs; the budget is {most}."),
}
_ALSO = frozenset({"calls", "outside_flops"})  # of the fields that are for kernels for a TPU, too


def over_budget(run: Run, budget: Budget) -> list[Finding]:
    """'Right answer, but ...', for each bound that is exceeded."""
    near = [line for each in run.calls for line in each.kernel.callers]
    asked = {f.name for f in dataclasses.fields(budget) if getattr(budget, f.name) is not None}
    ours = ", ".join(_WORDS)
    found = [
        over(bound, f"the budget bounds {bound}, which a kernel for a GPU does not have. Bound one of {ours}.")
        for bound in sorted(asked - _ALSO - _WORDS.keys())[:1]
    ]
    if budget.calls is not None and len(run.calls) != budget.calls:  # then every other figure is another one, too
        text = f"it uses {plural(len(run.calls), 'kernel')}; this puzzle asks for {budget.calls}."
        return [*found, over("calls", text, near=near)]
    for bound, text in exceeded(run.counts, budget, _WORDS, _facts(run)):
        rows = [*_rows(bound, run)]
        lines = [line for line, _ in rows if line is not None]
        evidence = [said for _, said in rows if said]
        found.append(over(bound, text.rstrip(), evidence, next(iter(lines), None), lines + near))
    return found


def _facts(run: Run) -> dict[str, str]:
    counts = run.counts
    once = sum(a.nbytes for each in run.calls for a in (*each.kernel.arrays, *each.outputs))
    copy_first = "Start the next copy before you compute with the last one, so that the two overlap."
    if counts.copies <= counts.ctas:  # in no CTA is there a next one
        copy_first = "A CTA copies, and then it computes. Compute in less time: with whole tiles, not row by row."
    return {
        "arrays": human_bytes(once),
        "once": "Read a tile into SMEM once, and use it there as often as you need it."
        if counts.copies
        else "Each x_gmem[...] is a load of its own. Load once and give it a name, or copy a tile into SMEM and use "
        "it there.",
        "unused": next((unused.cause for unused in _unused(run)), ""),
        "grids": "; ".join(f"{each.kernel.name} has the grid {each.kernel.grid}" for each in run.calls),
        "tensor_cycles": _cycles(counts.tensor_busy + counts.tensor_idle),
        "copy_cycles": _cycles(counts.copy_busy + counts.copy_idle),
        "copy_first": copy_first,
        "product_first": _INSTEAD[_before_products(run)].replace("{copy_first}", copy_first),
    }


# What the tensor cores waited for -> what to do
_INSTEAD = {
    "copy": "{copy_first} While threads compute, the products of another warpgroup can go on.",
    "compute": "Most of that time, the warpgroup that starts the next product computes. Before it does, start a "
    "product that needs nothing of it. The products of another warpgroup can go on meanwhile, too.",
    "warpgroup": "Most of that time, the warpgroup that starts the next product waits for another one: let that one "
    "arrive earlier.",
}


def _before_products(run: Run) -> str:
    """What the warpgroups did that started a product for idle tensor cores: most of all this."""
    kinds: collections.Counter[str] = collections.Counter()
    for (kind, *_), cycles in run.counts.idle_at.items():
        kinds[kind] += round(cycles)
    return max(kinds, key=lambda kind: kinds[kind], default="copy")


def _unused(run: Run) -> Iterator[Finding]:
    """Copies into SMEM that nobody waits for."""
    return findings_of(note for note in run.notes if note.kind == "load-in-flight")


def _rows(bound: str, run: Run) -> Iterator[tuple[SourceLine | None, str]]:
    """Where it goes: (the reader's line, what there is to say of it), the most first."""
    counts = run.counts
    if bound == "gmem_bytes":
        read, written = human_bytes(counts.gmem_read_bytes), human_bytes(counts.gmem_write_bytes)
        yield None, f"read: {read}, written: {written}"
        for line, nbytes in _most(counts.moved_at):
            yield line, f"{line}: {human_bytes(nbytes)}: {line.text}"
    elif bound == "copies":
        yield from ((unused.line, "") for unused in _unused(run))
    elif bound == "smem_bytes":
        launched = max(run.calls, key=lambda each: each.counts.smem_bytes)
        allocs: list[Any] = [a for i in launched.kernel.program.everything() for a in i.p.get("allocs", ())]
        for a in sorted((a for a in allocs if a.space == "smem"), key=lambda a: -a.nbytes)[:3]:
            yield None, f"{a.name}: {human_bytes(a.nbytes)}, {a.dtype}{list(a.shape)}"
    elif bound == "tensor_idle":
        most = _before_products(run)
        before = {(line, cause): n for (kind, line, cause), n in counts.idle_at.items() if kind == most}
        ended = "After this, no product is on its way" if most == "compute" else _NOT_BEFORE
        yield from _waits(before, "computes" if most == "compute" else "waits", ended)
    elif bound == "waited":
        yield from _waits(counts.waited_at, "waits", _NOT_BEFORE)
    elif bound == "bank_conflicts":
        for line, n in _most(counts.conflicts_at):
            yield line, f"{line}: {n:,.0f} bank conflicts: {line.text}"


_NOT_BEFORE = "What it waits for does not come before this"


def _most(by_line: Mapping[SourceLine | None, float]) -> list[tuple[SourceLine, float]]:
    """The lines with most of something, the first three."""
    return sorted(((line, n) for line, n in by_line.items() if line is not None), key=lambda row: -row[1])[:3]


def _waits(
    cycles: Mapping[tuple[SourceLine | None, SourceLine | None], float], verb: str, ended: str
) -> Iterator[tuple[SourceLine | None, str]]:
    """What most of them come from, and where they go. cycles: by line and cause."""
    by_line: collections.Counter[SourceLine | None] = collections.Counter()
    for (line, _), n in cycles.items():
        by_line[line] += n  # type: ignore[assignment]
    _, cause = max(cycles, key=lambda key: cycles[key], default=(None, None))
    if cause is not None:
        yield cause, f"{cause}: {ended}: {cause.text}"
    for line, n in _most(by_line):
        yield line, f"{line}: {verb} for {n:,.0f} cycles: {line.text}"
