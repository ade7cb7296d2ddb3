"""Where a reader stands: after a puzzle; after a notebook or everything: what was built, at what cost, what is next."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

from ..lens.machine import listed
from ..text import human_bytes, plural, times
from ..view.draw import Displayed, running_shell
from ..view.paper import GOOD
from ..view.verdict import Standing, Verdict
from . import curriculum, hints, page
from .curriculum import Notebook
from .progress import Progress, load

BUILT = re.compile(r"^## What you (?:have )?built *\n+(.*)", re.DOTALL)
# What each kind of kernel costs, by its name in view/costs.py: what it moves, in how many steps, what it holds
_COSTS = {
    "tpu": {"HBM": "hbm_bytes", "steps": "steps", "VMEM": "vmem_bytes"},
    "gpu": {"GMEM": "gmem_bytes", "CTAs": "ctas", "SMEM": "smem_bytes"},
}

FROM_HERE = """\
Where to go from here: kernels of your own. show(), tpu_report(), gpu_report() and check_call() take any of them. The
kernels that ship with JAX are in jax.experimental.pallas.ops, and you can read all of them now."""


@dataclass(eq=False, repr=False)
class Finale(Displayed):
    """The end of one notebook; of the whole course, where nothing is left."""

    book: Notebook
    state: Progress

    def title(self) -> str:
        entries = [self.state.entry(each.id) for each in self.book.puzzles]
        attempts, hints = (sum(entry[key] for entry in entries) for key in ("attempts", "hints"))
        counts = f"{plural(len(entries), 'puzzle')}, {plural(attempts, 'attempt')}, {plural(hints, 'hint')}"
        return f"You have finished {self.book.name}: {counts}."

    def built(self) -> str:
        """What the notebook itself says in its closing words, as one paragraph; "" where it has none."""
        for cell in self.book.cells:
            if cell.kind == "markdown" and (found := BUILT.match(cell.source)):
                words = " ".join(found[1].split("\n\n", 1)[0].split())
                return re.sub(r"(^|(?<=[.?!]) )[^.?!]*:$", "", words).strip()  # "Here it is:" points at a picture
        return ""

    def rows(self) -> list[tuple[str, ...]]:
        """The reader's own kernels: puzzle and cost, those alone whose cost is known."""
        return [
            (each.number, each.title, *_cells(figures, self.book.accelerator))
            for each in self.book.puzzles
            if (figures := self.state.entry(each.id).get("figures"))
        ]

    def columns(self) -> tuple[str, ...]:
        moved, steps, held = _COSTS[self.book.accelerator]
        return ("", "puzzle", moved, "the arrays", steps, held, "FLOP/byte")

    def whither(self) -> str:
        """What is next; of the whole course, where nothing is left."""
        upcoming = self.state.next()
        if upcoming is None:
            return course_text(self.state)
        book = curriculum.notebook(upcoming.path)
        return f"Next notebook: {book.name}. {book.title}. It begins with {upcoming.id} {upcoming.title}."

    def __str__(self) -> str:
        parts = [self.title(), self.built(), _table(self.columns(), self.rows()), self.whither()]
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(x)}</td>' for x in row)}</tr>" for row in self.rows())
        head = "".join(f"<th>{x}</th>" for x in self.columns())
        table = f"<table><tr>{head}</tr>{rows}</table>" if rows else ""
        end = html.escape(self.whither())
        end = end if self.state.next() else f"<pre>{end}</pre>"
        return (
            f'<div style="border-left:5px solid {GOOD};padding:6px 14px;margin:6px 0;max-width:60em">'
            f"<b>{html.escape(self.title())}</b><p>{html.escape(self.built())}</p>{table}<p>{end}</p></div>"
        )


def around(verdict: Verdict, puzzle: curriculum.Puzzle, holes: Mapping[str, CodeType]) -> None:
    """Adds to a verdict what the reader's progress and their notebook have to say."""
    if verdict:
        verdict.standing = standing(puzzle)
    if running_shell() is None:  # in a terminal the command says the rest
        return
    if verdict and verdict.next and page.in_colab():
        verdict.next += ": the link is below this cell."
    again = page.unchanged_since_check(puzzle, holes)
    if verdict.status == "unsolved":
        verdict.next += " Then run that cell, and check again."
    elif verdict.status in ("failed", "error") and again:
        same = f"{listed([*holes])} {'is' if len(holes) == 1 else 'are'} the same as at your last check."
        verdict.notes[:0] = [f"{same} If you have made an edit, run its cell, then check again."]
    if verdict.status in ("unsolved", "failed", "error"):
        verdict.help, verdict.below = hints.offered(puzzle)


def standing(puzzle: curriculum.Puzzle) -> Standing | None:
    """Where a reader stands who has just solved this puzzle; None where that is not recorded."""
    state, book, following = load(), curriculum.notebook(puzzle.path), curriculum.next_puzzle(puzzle.id)
    if not state.solved(puzzle.id):
        return None
    words = f"{state.standing(book)} in {book.name}."
    return Standing(words, state.drawing(), page.link(following) if following else "")


def finale(puzzle_id: str) -> Finale | None:
    """The end of the notebook that a puzzle belongs to, if all of it is solved. Raises CurriculumError."""
    state, book = load(), curriculum.notebook(curriculum.puzzle(puzzle_id).path)
    return Finale(book, state) if all(state.solved(each.id) for each in book.puzzles) else None


def course_text(state: Progress) -> str:
    """The moment when nothing is left: every notebook as a row of tiles, all of them written."""
    books = curriculum.notebooks()
    width = max(len(book.name) for book in books)
    entries = [state.entry(each.id) for book in books for each in book.puzzles]
    dates = sorted(str(entry["solved"])[:10] for entry in entries if entry["solved"])
    attempts, hints = (sum(entry[key] for entry in entries) for key in ("attempts", "hints"))
    counts = f"{plural(attempts, 'attempt')}, {plural(hints, 'hint')}"
    costs = [entry.get("figures", {}) for entry in entries]
    moved = sum(each.get("hbm_bytes", 0) + each.get("gmem_bytes", 0) for each in costs)
    tiles = [f"    {book.name:{width}}  {'[#]' * len(book.puzzles)}" for book in books]
    when = f"on {dates[0]}" if dates and dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}" if dates else ""
    carried = f" Your kernels moved {human_bytes(moved)}, every one of them on purpose." if moved else ""
    return "\n\n".join(
        [
            "And that was the last one. Every puzzle is solved:",
            "\n".join(tiles),
            "    no block unvisited, no garbage read, nothing left to write back",
            f"{plural(len(entries), 'puzzle')} {when}, {counts}.{carried}",
            FROM_HERE,
        ]
    )


def _cells(figures: dict[str, float], accelerator: str) -> tuple[str, ...]:
    moved, steps, held = (figures.get(key, 0) for key in _COSTS[accelerator].values())
    once, flops = (figures.get(key, 0) for key in ("once_bytes", "flops"))
    return (
        human_bytes(moved),
        times(moved / once) if once else "",
        f"{int(steps)}",
        human_bytes(held),
        f"{flops / moved:.3g}" if flops and moved else "",
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [("", "your kernels", *columns[2:]), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[f"{x:{'<' if n == 1 else '>'}{widths[n]}}" for n, x in enumerate(row)] for row in lines]
    return "\n".join("  ".join(row).rstrip() for row in padded)
