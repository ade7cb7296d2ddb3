"""The `puzzles` command."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import curriculum, workspace
from .progress import Progress, load, next_hint, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tpu.chips import Chip
    from .tpu.report import Report
    from .verdict import Verdict

SOLVED, NOT_SOLVED, WRONG_USE = 0, 1, 2  # exit codes
WORDS = {"passed": "solved", "unsolved": "not solved yet", "failed": "wrong", "error": "error"}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Puzzle notebooks that teach JAX Pallas. Without a command: the map of what is solved and what is next.",
    epilog="Example: puzzles init && puzzles lab",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main(argv: list[str] | None = None) -> None:
    """Runs the command, and exits; what cannot be done is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        app(args=words, prog_name="puzzles")
    except (curriculum.CurriculumError, workspace.WorkspaceError) as error:
        if "--json" in words:
            print(json.dumps({"version": 1, "error": str(error)}))
        print(f"puzzles: {error}", file=sys.stderr)
        sys.exit(WRONG_USE)


@app.callback(invoke_without_command=True)
def overview(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        _print_map()


@app.command(epilog="Example: puzzles init ~/pallas")
def init(folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Default: ./workspace")] = None) -> None:
    """Make a workspace: your own copies of the notebooks. Never overwrites a file."""
    _init(folder or workspace.default_folder())
    print("next: `puzzles lab`, or open a file there in your editor and run `puzzles check`")


@app.command(
    epilog="Example: puzzles lab --port 8889 -- --ServerApp.token=secret",
    context_settings={"allow_extra_args": True},
)
def lab(
    ctx: typer.Context,
    port: Annotated[int | None, typer.Option(help="The server's port.")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    folder: Annotated[Path | None, typer.Option("--dir", help="The workspace to open.")] = None,
) -> None:
    """Open JupyterLab on the workspace, at the next puzzle. What follows -- goes to Jupyter."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise workspace.WorkspaceError('JupyterLab is not installed: pip install "pallas-puzzles[lab]"')
    folder = _workspace_for_lab(folder)
    upcoming = load().next()
    page = f"/lab/tree/{upcoming.notebook}.ipynb" if upcoming else "/lab"
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}", f"--LabApp.default_url={page}"]
    command += [f"--ServerApp.port={port}"] if port is not None else []
    command += ["--no-browser"] if no_browser else []
    if upcoming:
        print(f"next: {upcoming.id}  {upcoming.title}", flush=True)
    _become([*command, *ctx.args])


@app.command(epilog="Example: puzzles check basics/9")
def check(
    what: Annotated[str, typer.Argument(metavar="basics[/9]", help="Default: the next unsolved puzzle")] = "",
    overlay: Annotated[
        Path | None, typer.Option("--with", metavar="FILE", help="Functions to lay over the holes; not recorded.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check your file: one puzzle, or every puzzle of a notebook. Exits with 0 if solved, 1 if not, 2 on wrong use."""
    ids = _puzzle_ids(what)
    if not ids:
        print(json.dumps({"version": 1, "source": None, "verdicts": []}) if as_json else "every puzzle is solved")
        raise typer.Exit(SOLVED)
    if overlay is not None and not overlay.is_file():
        raise curriculum.CurriculumError(f"there is no file {overlay}")
    name = ids[0].partition("/")[0]
    source = None if overlay else workspace.current_file(workspace.find(), name)
    verdicts = []
    if not as_json:
        print(f"{what or ids[0]}: {overlay or source}", flush=True)
    for puzzle_id in ids:
        verdict = _run(puzzle_id, source, overlay, quiet=as_json)
        verdicts.append(verdict)
        if not as_json:
            print(_line(verdict) if what == name else verdict, flush=True)
    if as_json:
        print(json.dumps({"version": 1, "source": str(overlay or source), "verdicts": [v.to_json() for v in verdicts]}))
    raise typer.Exit(SOLVED if all(verdicts) else NOT_SOLVED)


@app.command(epilog="Example: puzzles tpu basics/10 --tpu v5e,v6e")
def tpu(
    puzzle_id: Annotated[str, typer.Argument(metavar="ID")],
    names: Annotated[str, typer.Option("--tpu", metavar="NAMES", help="Of v5e, v6e, tpu7x; commas between.")] = "v5e",
    overlay: Annotated[
        Path | None, typer.Option("--with", metavar="FILE", help="Functions to lay over the holes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile your kernel for a TPU, without one: VMEM, bundles, time. Exits with 0 if it compiles, 1 if not."""
    from .tpu.chips import chips

    try:
        targets = chips(names)
    except ValueError as error:
        raise curriculum.CurriculumError(str(error)) from None
    if overlay is not None and not overlay.is_file():
        raise curriculum.CurriculumError(f"there is no file {overlay}")
    name = curriculum.puzzle(puzzle_id).notebook
    source = None if overlay else workspace.current_file(workspace.find(), name)
    if not as_json:
        print(f"{puzzle_id}: {overlay or source}", flush=True)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        verdict = curriculum.run(puzzle_id, source=source, overlay=overlay, judge=False)
    reports = _tpu_reports(verdict, targets, quiet=as_json)
    if as_json:
        told = {"version": 1, "source": str(overlay or source), "reports": [each.to_json() for each in reports]}
        print(json.dumps(told if verdict.subject else {**told, "verdict": verdict.to_json()}))
    elif verdict.subject is None:
        print(verdict)
    if any(each.unavailable for each in reports):
        raise typer.Exit(WRONG_USE)
    raise typer.Exit(SOLVED if reports and all(reports) else NOT_SOLVED)


@app.command("list", epilog="Example: puzzles list --json")
def list_puzzles(as_json: Json = False) -> None:
    """Name every puzzle."""
    state = load()
    books = curriculum.notebooks()
    if as_json:
        rows = [_row(book, each, state) for book in books for each in book.puzzles]
        print(json.dumps({"version": 1, "puzzles": rows}))
        return
    everything = curriculum.all_puzzles()
    width = max((len(each.id) for each in everything), default=0)
    for each in everything:
        print(f"{each.id:{width}}  {'solved' if state.solved(each.id) else '':6}  {each.title}".rstrip())


@app.command(epilog="Example: puzzles hint basics/9")
def hint(puzzle_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Show the next hint of a puzzle."""
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(next_hint(puzzle_id)))


# ---- the parts -------------------------------------------------------------------------------------------------------


def _print_map() -> None:
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    state = load()
    upcoming = state.next()
    table = Table.grid(padding=(0, 2))
    for book in curriculum.notebooks():
        done, total = state.solved_in(book), len(book.puzzles)
        table.add_row(book.name, ProgressBar(total=total, completed=done, width=20), f"{done}/{total}", book.title)
        for each in book.puzzles if upcoming and upcoming.notebook == book.name else ():
            word = "solved" if state.solved(each.id) else "next" if each == upcoming else ""
            table.add_row(f"{each.number:>5}", word, "", each.title, style="bold" if each == upcoming else "")
    console = Console(highlight=False)
    console.print(table)
    console.print(state.advice(), markup=False)
    try:
        folder = workspace.find()
        console.print(f"your files: {folder}", markup=False, soft_wrap=True)
    except workspace.WorkspaceError as error:
        console.print(str(error), markup=False, soft_wrap=True)


def _init(folder: Path) -> None:
    added, kept = workspace.init(folder)
    if added:
        print(f"added to {folder}: {', '.join(added)}")
    if kept:
        print(f"kept as they are in {folder}: {', '.join(kept)}")


def _workspace_for_lab(folder: Path | None) -> Path:
    if folder is None:
        with contextlib.suppress(workspace.WorkspaceError):
            folder = workspace.find()
    folder = folder or workspace.default_folder()
    books = curriculum.notebooks()
    if not all((folder / f"{book.name}.ipynb").exists() for book in books):
        _init(folder)
    return folder.expanduser().resolve()


def _become(command: list[str]) -> None:
    """Hands the terminal over, Ctrl-C included."""
    if os.name == "posix":
        sys.stdout.flush()
        os.execv(command[0], command)
    process = subprocess.Popen(command)
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:
            continue  # the server has it too, and asks whether to stop


def _puzzle_ids(what: str) -> list[str]:
    """What to check: nothing said is the next puzzle, a notebook's name is all of its puzzles."""
    if not what:
        upcoming = load().next()
        return [upcoming.id] if upcoming else []
    for book in curriculum.notebooks():
        if book.name == what:
            return [each.id for each in book.puzzles]
    return [curriculum.puzzle(what).id]


def _run(puzzle_id: str, source: Path | None, overlay: Path | None, quiet: bool) -> Verdict:
    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
        verdict = curriculum.run(puzzle_id, source=source, overlay=overlay)
    # what is laid over the holes is not the reader's own work, and an untouched hole is no attempt
    if overlay is None and verdict.status != "unsolved":
        record(puzzle_id, verdict.status == "passed")
    return verdict


def _tpu_reports(verdict: Verdict, targets: Sequence[Chip], quiet: bool) -> list[Report]:
    """One report for each TPU on what the puzzle's check would run first; none while there is no answer."""
    from .tpu.report import tpu_report
    from .verdict import emit

    if verdict.subject is None:
        return []
    subject, reports = verdict.subject, []
    for target in targets:
        first = subject.cases[0]
        reports.append(tpu_report(subject.fn, *first.inputs, tpu=target.name, **first.blocks))
        if not quiet:
            emit(reports[-1])
        if reports[-1].unavailable:
            break
    return reports


def _line(verdict: Verdict) -> str:
    about = verdict.findings[0].cause if verdict.findings else curriculum.puzzle(verdict.puzzle).title
    line = f"{verdict.puzzle:12}  {WORDS[verdict.status]:14}  {about}"
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else line[: width - 3] + "..."


def _row(book: curriculum.Notebook, puzzle: curriculum.Puzzle, state: Progress) -> dict[str, Any]:
    entry = state.entry(puzzle.id)
    return {
        "id": puzzle.id,
        "notebook": book.name,
        "number": puzzle.number,
        "title": puzzle.title,
        "goal": puzzle.goal,
        "holes": list(puzzle.holes),
        "hints": len(puzzle.hints),
        "hints_seen": entry["hints"],
        "attempts": entry["attempts"],
        "solved": entry["solved"],
    }
