"""The commands of `puzzles dev`."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...course import curriculum
from .. import terminal

if TYPE_CHECKING:
    from .mutants import Judged, Mutant

app = typer.Typer(help="For authors of a course.", rich_markup_mode=None, no_args_is_help=True)

COLUMNS = ("made", "refused", "equivalent", "survived", "crashed", "stale")


@app.callback()
def dev() -> None:
    """For authors of a course."""


@app.command(epilog="Example: puzzles dev mutants matmul/2")
def mutants(
    what: Annotated[str, typer.Argument(metavar="[NAME[/N]]", help="Default: the whole course.")] = "",
    holding: Annotated[str, typer.Option("-k", metavar="TEXT", help="Only mutants whose hole or edit holds it.")] = "",
    jobs: Annotated[int, typer.Option(help="How many processes judge.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Make small mistakes in the solutions by program, and show which of them the checks accept.

    Exits with 1 if a mutant survives that is not listed as an equivalent, or if a line of that list is stale.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there: its threads wait for one another
    from .mutants import equivalents, judged, stale
    from .mutants import mutants as mutants_of

    rows, problems = [], 0
    for puzzle in _puzzles(what):
        made = [each for each in mutants_of(puzzle) if holding in each.key]
        results = []
        for result in judged(made, equivalents(puzzle.notebook), jobs):
            results.append(result)
            if result.outcome in ("survived", "crashed") and not as_json:
                print(_line(result), flush=True)
        old = [] if holding else stale(puzzle, results)
        for key in old if not as_json else []:
            print(f"stale: {key}", flush=True)
        counts = Counter(each.outcome for each in results)
        problems += counts["survived"] + counts["crashed"] + len(old)
        rows.append(_row(puzzle.id, made, results, old))
        print(f"{puzzle.id}: {len(made)} mutants, {counts['survived']} survived", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"version": 1, "puzzles": rows}, indent=1))
    else:
        _say_table(rows)
    raise typer.Exit(1 if problems else 0)


def _puzzles(what: str) -> list[curriculum.Puzzle]:
    if what in ("", *(book.name for book in curriculum.notebooks())):
        return [each for each in curriculum.all_puzzles() if what in ("", each.notebook)]
    return [curriculum.puzzle(what)]


def _line(result: "Judged") -> str:
    mutant = result.mutant
    place = f"solutions/{mutant.puzzle.partition('/')[0]}.py:{mutant.line}"
    words = f"  ({result.words})" if result.words else ""
    return f"{result.outcome} {mutant.id}  {mutant.key}  [{place}]{words}"


def _row(puzzle: str, made: "Sequence[Mutant]", results: "Sequence[Judged]", old: Sequence[str]) -> dict[str, Any]:
    left = [each for each in results if each.outcome != "refused"]
    told = [{"id": r.mutant.id, "key": r.mutant.key, "line": r.mutant.line} for r in left]
    for row, result in zip(told, left, strict=True):
        row |= {"outcome": result.outcome, "words": result.words}
    counts = Counter(each.outcome for each in results)
    numbers = {"made": len(made), **{name: counts[name] for name in COLUMNS[1:-1]}, "stale": len(old)}
    return {"puzzle": puzzle, **numbers, "mutants": told, "stale_lines": list(old)}


def _say_table(rows: Iterable[dict[str, Any]]) -> None:
    """One line a notebook, and their sum."""
    from rich.table import Table

    sums: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (row["puzzle"].partition("/")[0], "together"):
            sums.setdefault(name, Counter()).update({c: row[c] for c in COLUMNS} | {"puzzles": 1})
    table = Table("notebook", "puzzles", *COLUMNS, box=None)
    together = sums.pop("together")
    for name, counts in [*sums.items(), ("together", together)]:
        table.add_row(name, *(str(counts[c]) for c in ("puzzles", *COLUMNS)))
    terminal.console().print(table)
