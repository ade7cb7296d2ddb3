"""One computation at several levels, side by side: what each level moves, holds and runs, and how long it takes."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import jax
import numpy as np

from ..course import curriculum
from ..course.holes import unwritten
from ..ir.eager import operations, products
from ..lens.machine import listed
from ..targets.tpu import compiler
from ..targets.tpu.chips import CHIPS, Chip, chips
from ..targets.tpu.hlo import Instruction, instructions
from ..targets.tpu.lowering import exported, for_tpu
from ..text import cut, wrapped
from ..view.draw import FONT, LEFT, RIGHT, Displayed, card_html, row_html, table
from ..view.paper import NEUTRAL
from ..view.roofline import count_words, human_time
from ..view.tpu_report import KernelReport, Report, tpu_report
from .choose import is_here, kernels_for
from .estimate import described, shapes
from .run import measure, sentence
from .work import ESTIMATE, MEASURED, OpByOp, Size, Work

UNKNOWN = "unknown"
MARKS = {MEASURED: "=", ESTIMATE: "~", UNKNOWN: "?"}
_KEY = (
    "~ the compiler's estimate, = measured, ? unknown. HBM: bytes between HBM and the chip. temp: what is held in HBM "
    "beside arguments and results. floor: the time that HBM's bandwidth and the MXU's peak allow. time: by the "
    "compiler's cycles, to compare levels with."
)
_NEGLIGIBLE_BYTES = 1024
_STARTING_COLUMNS, _COLUMNS = 30, 80


@dataclasses.dataclass
class Level:
    """One level on one chip. Sizes in bytes, times in seconds; None: unknown, and `problem` says why.

    instructions: those that run, without copies in the background; kernels: how many of them are Pallas kernels. kind:
    MEASURED, where time_s is measured and nothing else is known, or ESTIMATE. beforehand: made by the course.
    """

    name: str
    chip: str
    kind: str = ESTIMATE
    hbm_bytes: float | None = None
    temporary_bytes: float | None = None
    instructions: int | None = None
    kernels: int | None = None
    floor_s: float | None = None
    time_s: float | None = None
    problem: str = ""
    beforehand: bool = False

    @property
    def title(self) -> str:
        return self.name + (" *" if self.beforehand else "")

    def figures(self) -> Iterator[tuple[str, str]]:
        """(kind, in words) of each column."""
        for name, words in _FIGURES.values():
            value = getattr(self, name)
            yield (UNKNOWN, "") if value is None else (self.kind, words(value))


def _mib(nbytes: float) -> str:
    size = nbytes / (1 << 20)
    return f"{size:.3g}" if size < 99.95 else count_words(round(size))


_FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {  # head of the column -> field of a Level, its words
    "HBM MiB": ("hbm_bytes", _mib),
    "temp MiB": ("temporary_bytes", _mib),
    "instr.": ("instructions", str),
    "kernels": ("kernels", str),
    "floor": ("floor_s", human_time),
    "time": ("time_s", human_time),
}


@dataclasses.dataclass(eq=False, repr=False)
class Comparison(Displayed):
    """What `compare` found: a row for each level on each chip. Truthy where there is a figure.

    conditions: versions, of figures that were made beforehand.
    """

    rows: list[Level] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    conditions: dict[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(row.hbm_bytes is not None or row.time_s is not None for row in self.rows)

    def text(self) -> str:
        return "\n".join(self._lines())

    def _blocks(self) -> Iterator[tuple[str, list[Level]]]:
        for chip, kind in dict.fromkeys((row.chip, row.kind) for row in self.rows):
            how = "measured here" if kind == MEASURED else "estimated by its compiler"
            yield f"on a {chip}, {how}", [row for row in self.rows if (row.chip, row.kind) == (chip, kind)]

    def _about(self) -> Iterator[str]:
        """What stands below the tables."""
        if self.rows:
            yield _KEY
        if any(row.beforehand for row in self.rows):
            versions = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
            yield f"* made beforehand by the course, with its own solutions, {versions}."
        yield from self.notes

    def _lines(self) -> Iterator[str]:
        for title, rows in self._blocks():
            cells = [[MARKS[kind] + words for kind, words in row.figures()] for row in rows]
            widths = [max(map(len, column)) for column in zip(_FIGURES, *cells, strict=True)]
            wide = max(len(cut(row.title, _STARTING_COLUMNS)) for row in rows)
            yield from ("", title)
            yield "  " + " " * wide + "".join(f"  {h:>{w}}" for h, w in zip(_FIGURES, widths, strict=True))
            for row, each in zip(rows, cells, strict=True):
                values = "".join(f"  {c:>{w}}" for c, w in zip(each, widths, strict=True))
                yield f"  {cut(row.title, _STARTING_COLUMNS):{wide}}{values}"
                yield from (line for _, line in wrapped(row.problem, "", "      ", columns=_COLUMNS))
        for words in self._about():
            yield ""
            yield from (line for _, line in wrapped(words, "", columns=_COLUMNS))

    def _repr_html_(self) -> str:
        parts = []
        for title, rows in self._blocks():
            heads = (f'<th style="{RIGHT}">{head}</th>' for head in _FIGURES)
            lines = [row_html([f'<th style="{LEFT}"></th>', *heads])]
            for row in rows:
                cells = (f'<td style="{RIGHT}" title="{k}">{MARKS[k]}{escape(told)}</td>' for k, told in row.figures())
                lines.append(row_html([f'<th scope="row" style="{LEFT}">{escape(row.title)}</th>', *cells]))
                if row.problem:
                    wide = f'<td colspan="7" style="{LEFT};white-space:normal;opacity:.8">{escape(row.problem)}</td>'
                    lines.append(row_html([wide]))
            parts.append(f'<div style="margin-top:8px"><b>{escape(title)}</b></div>{table(lines)}')
        for words in self._about():
            parts.append(f'<div style="opacity:.8;font-size:92%;margin-top:4px">{escape(words)}</div>')
        return card_html(NEUTRAL, "".join(parts), FONT)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data, as `made` reads them."""
        return {"conditions": self.conditions, "rows": [dataclasses.asdict(row) for row in self.rows]}


def compare(
    levels: Mapping[str, Callable[..., Any] | None] | Callable[..., Any],
    *args: Any,
    tpu: str | Sequence[str] = "v5e,v6e",
    made: str = "",
) -> Comparison:
    """Rows of levels, columns of figures: what each of several functions of the same arrays costs on a TPU.

    levels: name -> a function of the arrays; op_by_op(f) for f as eager JAX runs it. One function alone stands for
    {"op by op": op_by_op(f), "jit": f}. args: arrays, Inputs such as normal((24, 512)), or jax.ShapeDtypeStructs; give
    integers that choose blocks as arrays. tpu: which chips the compiler is asked about. made: the name of figures that
    the course has made beforehand: for levels that are None, and for all where there is no TPU compiler.

    HBM bytes, temporaries and instructions are those of the program that the TPU compiler makes. Its cycles stand for
    the time of everything but Pallas kernels, whose time is that of `tpu_report`. Where there is a chip, the levels
    that can run on it are measured, too, as `bench` does. What nobody could know is None, and shown as unknown. Never
    raises for a level that does not compile: its row says why. Raises ValueError for a TPU that is not known.
    """
    targets = chips(tpu)
    if callable(levels):
        levels = {"op by op": OpByOp(levels), "jit": levels}
    found = Comparison()
    written: dict[str, Callable[..., Any]] = {}
    for name, fn in levels.items():
        if fn is not None and (holes := unwritten(_inside(fn))):
            verb = "is" if len(holes) == 1 else "are"
            found.notes.append(f"{name} is missing: {listed(holes)} {verb} still to be written.")
        elif fn is not None:
            written[name] = fn
    missing = compiler.missing()
    if missing:
        found.notes.append(f"{missing[0].upper()}{missing[1:]}.")
    elif written:
        compiler.warm(simulator=False)
    told = _made_beforehand(made)
    found.conditions = told["conditions"]
    for target in targets:
        for name, fn in levels.items():
            if name in written and not missing:
                found.rows.append(_level(name, written[name], args, target))
            elif fn is None or name in written:
                found.rows += [row for row in told["rows"] if (row.name, row.chip) == (name, target.title)]
    _measure(found, written, args)
    return found


def _inside(fn: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(fn, OpByOp | functools.partial):
        fn = fn.fn if isinstance(fn, OpByOp) else fn.func
    return fn


# --- one level on one chip -------------------------------------------------------------------------------------------


def _level(name: str, fn: Callable[..., Any], args: Sequence[Any], target: Chip) -> Level:
    try:
        if isinstance(fn, OpByOp):
            ran = operations(fn.fn, shapes(args))
            costs = [_cost(each.run, list(map(shapes, each.arrays)), target, each.held_bytes) for each in ran]
        else:
            costs = [_cost(fn, described(args), target)]
    except Exception as error:  # of the reader's function, or of the compiler
        return Level(name, target.title, problem=sentence(error))
    found = Level(name, target.title, problem=next((problem for _, problem in reversed(costs) if problem), ""))
    for figure, _ in _FIGURES.values():
        amounts = [cost[figure] for cost, _ in costs]
        total = max(amounts, default=0) if figure == "temporary_bytes" else sum(amounts)
        setattr(found, figure, None if any(map(math.isnan, amounts)) else total)
    return found


def _number(amount: float | None) -> float:
    return math.nan if amount is None else amount


def _cost(
    fn: Callable[..., Any], args: Sequence[Any], target: Chip, held_bytes: float = 0
) -> tuple[dict[str, float], str]:
    """(what one program costs, by the fields of a Level; why some of it is NaN, which is unknown).

    held_bytes: of others' arrays. Raises whatever tracing or compiling it raises.
    """
    given = shapes(args)
    with for_tpu(target.mesh()):
        blob = exported(fn, given)
        text, temporary_bytes = _compiled(blob, target)
        mxu_s = sum(flops / target.flops_per_s(dtype) for dtype, flops in products(fn, given).items())
    found = [each for each in instructions(text) if not _negligible(each)]
    mine = [each for each in found if not each.is_kernel]
    hbm_bytes = sum((each.hbm_bytes * each.times for each in mine), 0.0)
    time_s = sum((each.cycles or 0.0) * each.times for each in mine) / target.clock_hz
    silent, problem = [each.name for each in mine if each.cycles is None and not each.copies], ""
    if math.isnan(time_s):
        problem = "unknown: how often a loop runs is known only at run time"
    elif silent:
        rest = f"; all else in that program takes {human_time(time_s)}" if time_s else ""
        time_s, problem = math.nan, f"time unknown: the compiler gives no cycles for {listed(silent[:2])}{rest}"
    for kernel in _kernels(fn, args, target, blob) if len(found) > len(mine) else ():
        if kernel.time_s is None or kernel.hbm_bytes is None:
            problem = f"{kernel.name}: {'; '.join(kernel.notes)}"
        hbm_bytes += _number(kernel.hbm_bytes) * kernel.runs
        time_s += _number(kernel.time_s) * kernel.runs
        mxu_s += kernel.times.get("MXU", 0.0) * kernel.runs
    floor_s = float(np.maximum(mxu_s, hbm_bytes / target.hbm_bytes_per_s))
    cost = {
        "hbm_bytes": hbm_bytes,
        "temporary_bytes": _number(temporary_bytes) + held_bytes,
        "instructions": sum(not each.copies for each in found),
        "kernels": len(found) - len(mine),
        "floor_s": floor_s,
        "time_s": float(np.maximum(time_s, floor_s)),
    }
    return cost, problem


def _negligible(each: Instruction) -> bool:
    """Scalars of a loop."""
    of_a_loop = each.op in ("copy", "add", "convert", "compare", "broadcast", "multiply")
    return each.cycles is None and of_a_loop and each.hbm_bytes < _NEGLIGIBLE_BYTES


def _kernels(fn: Callable[..., Any], args: Sequence[Any], target: Chip, blob: bytes) -> Sequence[KernelReport]:
    """What `tpu_report` says of all Pallas kernels that a function runs."""
    steering = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(args) if isinstance(x, np.ndarray | jax.Array))
    key = blob, target.name, steering
    if key not in _REPORTS:
        _REPORTS[key] = tpu_report(fn, *args, tpu=target.name, simulate=False)
    report = _REPORTS[key]
    if not report:
        raise ValueError(report.unavailable or (report.refusal.sentence if report.refusal else ""))
    return report.kernels


_REPORTS: dict[tuple[bytes, str, bytes], Report] = {}


@functools.cache
def _compiled(blob: bytes, target: Chip) -> tuple[str, int | None]:
    """The compiler's program and its temporaries; the same program is compiled once."""
    compiled = compiler.compile_program(blob, target)
    return compiled.text, compiled.temporary_bytes


# --- without the compiler, and with a chip ---------------------------------------------------------------------------


def _made_beforehand(name: str) -> dict[str, Any]:
    """The figures called "notebook/name" in cases/notebook.json: rows, and the conditions that they were made under."""
    notebook, _, which = name.partition("/")
    file = curriculum.course_folder() / "cases" / f"{notebook}.json"
    if not which or not file.is_file():
        return {"conditions": {}, "rows": []}
    told = json.loads(file.read_text("utf-8"))
    rows = [Level(**{**row, "beforehand": True}) for row in told["figures"].get(which, ())]
    return {"conditions": told["conditions"], "rows": rows}


def _measure(found: Comparison, levels: Mapping[str, Callable[..., Any]], args: Sequence[Any]) -> None:
    """Adds a measured row for every level that runs compiled on this machine's accelerator."""
    if jax.default_backend() == "cpu":
        return
    here = dict(levels)
    for name, fn in levels.items():
        with contextlib.suppress(Exception):  # one that cannot be traced gets a row that says so
            if not is_here(kernels_for(fn, args)):
                del here[name]
    if not here:
        return
    (own, fn), *others = sorted(here.items(), key=lambda pair: isinstance(pair[1], OpByOp))
    results = measure([Work("levels", fn, [Size(tuple(args))], dict(others), own=own)])
    by_name = {row.who: row for row in results.rows}
    for name in here:
        row = by_name[name]
        chip = next((c.title for c in CHIPS.values() if c.kind == row.chip), row.chip)
        found.rows.append(Level(name, chip, MEASURED, time_s=row.median_s, problem=row.problem))
    found.notes += results.notes
