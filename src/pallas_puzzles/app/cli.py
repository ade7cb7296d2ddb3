"""The `puzzles` command."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click
from click.exceptions import Exit

from .. import installation
from ..course import curriculum
from ..course.progress import (
    Progress,
    forget,
    hint_text,
    hints_left,
    load,
    next_hint,
    record,
    record_opened,
    record_solution_seen,
)
from ..text import cut, plural
from . import pairing, terminal, workspace
from .worker import Judge, Message, judged

SOLVED, NOT_SOLVED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130  # exit codes
WORDS = {
    "passed": "solved",
    "unsolved": "not solved yet",
    "failed": "wrong",
    "error": "error",
    "unrecorded": "not recorded",
}


class _InOrder(click.Group):
    """Lists its commands as they stand here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Puzzles; notebooks, too, for a command that takes them."""
    names = [book.name for book in curriculum.notebooks()] if param.name == "what" else []
    return [each for each in (*names, *(p.id for p in curriculum.all_puzzles())) if each.startswith(incomplete)]


FILE = click.Path(path_type=Path)
AND_NEXT = "Without a name it is about the next unsolved puzzle."

with_overlay = click.option(
    "--with", "overlay", type=FILE, metavar="FILE", help="Functions to lay over the holes; not recorded."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
any_order = click.option("--any", "any_order", is_flag=True, help="Open a puzzle before its turn.")
which_puzzle = click.argument("puzzle_id", metavar="[ID]", default="", shell_complete=_complete)
anything = click.argument("what", metavar="[basics[/9]]", default="", shell_complete=_complete)


def main(argv: list[str] | None = None) -> None:
    """Runs the command, and exits; what cannot be done is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        installation.require_versions()
        try:
            code = app(args=words, prog_name="puzzles", standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(code or SOLVED)
    except click.ClickException as error:
        error.show()
        sys.exit(WRONG_USE)
    except (installation.WrongVersion, curriculum.CurriculumError) as error:
        if "--json" in words:
            print(json.dumps({"version": 1, "error": str(error)}))
        terminal.warn(str(error))
        sys.exit(WRONG_USE)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `puzzles list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOT_SOLVED)  # nobody has read a verdict


@click.group(
    cls=_InOrder,
    invoke_without_command=True,
    epilog="Example: puzzles init && puzzles watch. Exits: 0 solved, 1 not, 2 wrong use",
)
@click.pass_context
def app(ctx: click.Context) -> None:
    """Puzzles that teach JAX Pallas. No command: what is solved, and what is next."""
    if ctx.invoked_subcommand is None:
        terminal.say_map(load())
        try:
            print(f"your files: {workspace.find()}")
        except workspace.WorkspaceError as error:
            print(error)


@app.command(epilog="Example: puzzles init ~/pallas")
@click.argument("folder", metavar="[DIR]", type=FILE, default=None)
def init(folder: Path | None) -> None:
    """Make a workspace: your own copies of the notebooks.

    Without a DIR, in ./workspace. Never overwrites a file, never merges into one. After an upgrade: adds what is new,
    and says which puzzles in your files have another text.
    """
    _init(folder or workspace.default_folder())
    print("next: `puzzles lab`, or `puzzles watch` and a file there in your editor")


@app.command(
    epilog="Example: puzzles lab --port 8889 --no-browser -- --ServerApp.token=secret",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@click.pass_context
def lab(ctx: click.Context) -> None:
    """Open JupyterLab on the workspace, at the next puzzle. Options, and what follows --, go to JupyterLab."""
    from . import lab as jupyter

    jupyter.require()
    folder = workspace.default_folder()
    with contextlib.suppress(workspace.WorkspaceError):
        folder = workspace.find()
    books = curriculum.notebooks()
    if not all((folder / f"{book.name}.ipynb").exists() for book in books):
        _init(folder)
    for book in books:
        _in_step(folder, book.name)
    jupyter.launch(folder.resolve(), load(), ctx.args)


@app.command(epilog=f"Example: puzzles start basics/3. {AND_NEXT}")
@which_puzzle
@any_order
@as_json
def start(puzzle_id: str, any_order: bool, as_json: bool) -> None:
    """Read what a puzzle asks, and where to edit."""
    from .watch import hole_line

    puzzle = _open_puzzle(puzzle_id, any_order)
    text = curriculum.instructions(puzzle)
    file, line = None, 1
    with contextlib.suppress(workspace.WorkspaceError):
        file = workspace.current_file(workspace.find(), puzzle.notebook)
        line = hole_line(file, puzzle)
    if as_json:
        row = _row(puzzle, load())
        print(json.dumps({"version": 1, **row, "text": text, "file": str(file) if file else None, "line": line}))
        return
    terminal.say_markdown(text)
    terminal.say(f"\nGoal of {puzzle.id}: {puzzle.goal}")  # that of the text may have left the screen
    print(f"\nedit: {file}:{line}" if file else "\n`puzzles init` makes the file to edit")
    print(f"then: `puzzles check {puzzle.id}`, or `puzzles watch` at every save")


@app.command(epilog=f"Example: puzzles check basics/9. {AND_NEXT}")
@anything
@with_overlay
@click.option("--traceback", is_flag=True, help="With the full traceback of an error.")
@any_order
@as_json
def check(what: str, overlay: Path | None, traceback: bool, any_order: bool, as_json: bool) -> None:
    """Check your file: one puzzle, or every puzzle of a notebook. Exits with 0 if solved, 1 if not, 2 on wrong use."""
    ids = _puzzle_ids(what)
    if not ids:
        print(json.dumps({"version": 1, "source": None, "verdicts": []}) if as_json else "every puzzle is solved")
        raise Exit(SOLVED)
    name = ids[0].partition("/")[0]
    if overlay is None and what != name:
        _open_puzzle(ids[0], any_order)
    verdicts, newly = [], False
    with _source(name, overlay) as source, Judge() as judge:
        if not as_json:
            print(f"{what or ids[0]}: {source}", flush=True)
        for puzzle_id in ids:
            answer = judged(puzzle_id, judge.answer("check", puzzle_id, source, overlay))
            verdict = answer["verdict"]
            verdicts.append({**verdict, "traceback": answer["traceback"]} if traceback else verdict)
            # what is laid over the holes is not the reader's own work; an untouched hole, or no verdict, is no attempt
            if overlay is None and verdict["status"] != "unsolved" and "none" not in answer:
                newly |= record(puzzle_id, verdict["passed"], answer["totals"])
            if as_json or what == name:
                _say_printed(answer["printed"], sys.stderr)
            if not as_json:
                _say_verdict(answer, short=what == name, traceback=traceback)
        passed = all(each["passed"] for each in verdicts)
        if as_json:
            print(json.dumps({"version": 1, "source": str(source), "verdicts": verdicts}))
        elif passed and overlay is None:
            terminal.say_laid_out(f"\n{terminal.standing_line(curriculum.puzzle(ids[0]))}")
            if newly or what == name:
                terminal.say_finale(ids[0])
    raise Exit(SOLVED if passed else NOT_SOLVED)


@app.command(epilog=f"Example: puzzles watch basics. {AND_NEXT}")
@anything
@any_order
def watch(what: str, any_order: bool) -> None:
    """Check the puzzle you are editing at every save. Keys: next, hint, show, list, reset, quit."""
    from .watch import Watch

    folder = workspace.find()
    book, state = _notebook(what), load()
    if book:
        first = next((each for each in book.puzzles if not state.solved(each.id)), book.puzzles[0])
    puzzle = _open_puzzle(first.id if book else what, any_order)
    curriculum.read_cells(workspace.current_file(folder, puzzle.notebook))
    _in_step(folder, puzzle.notebook)
    Watch(folder, puzzle, only=what if book else "", any_order=any_order).run()
    sys.stdout.flush()
    os._exit(SOLVED)  # Python would take up to a second to put everything away, and whoever quits would wait


@app.command(epilog=f"Example: puzzles hint basics/9. {AND_NEXT}")
@which_puzzle
@click.option("--seen", is_flag=True, help="Show the hints that you have seen, and no other.")
@any_order
def hint(puzzle_id: str, seen: bool, any_order: bool) -> None:
    """Show the next hint of a puzzle."""
    puzzle = _open_puzzle(puzzle_id, any_order)
    if not seen:
        return terminal.say_markdown(next_hint(puzzle, f"puzzles solution {puzzle.id}"))
    number = min(load().entry(puzzle.id)["hints"], len(puzzle.hints))
    text = "\n\n".join(hint_text(puzzle, n + 1) for n in range(number))
    return terminal.say_markdown(text or f"You have seen no hint of {puzzle.id}.")


@app.command(epilog=f"Example: puzzles solution basics/9. {AND_NEXT}")
@which_puzzle
@yes
@any_order
def solution(puzzle_id: str, yes: bool, any_order: bool) -> None:
    """Show the solution of a puzzle. Asks first, unless it is solved or its hints are used up."""
    puzzle = _open_puzzle(puzzle_id, any_order)
    if not load().solved(puzzle.id):
        left = hints_left(puzzle)
        first = f"{plural(left, 'hint')} would come first (`puzzles hint {puzzle.id}`)"
        if left and not terminal.agreed(f"{puzzle.id} is not solved, and {first}. Show the solution?", yes):
            raise Exit(NOT_SOLVED)
        record_solution_seen(puzzle)
    terminal.say_markdown(f"```python\n{puzzle.solution}```")


@app.command(epilog=f"Example: puzzles show basics/9 --browser. {AND_NEXT}")
@which_puzzle
@click.option("--browser", is_flag=True, help="As a page in the browser.")
@with_overlay
def show(puzzle_id: str, browser: bool, overlay: Path | None) -> None:
    """Draw what your kernel does: blocks, copies, traffic. In the terminal, or as a page. Exits with 1 if unwritten."""
    puzzle = _puzzle_or_next(puzzle_id)
    with _source(puzzle.notebook, overlay) as source, Judge() as judge:
        answer = judge.answer("show", puzzle.id, source, overlay)
    if "picture" not in answer:
        _say_verdict(judged(puzzle.id, answer))
        raise Exit(NOT_SOLVED)
    if not browser:
        return terminal.say(answer["picture"])
    page = Path(tempfile.mkdtemp(prefix="puzzles-")) / f"{puzzle.notebook}-{puzzle.number}.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><title>{puzzle.id}</title>{answer['html']}", "utf-8")
    print(page)
    if not webbrowser.open(page.as_uri()):
        terminal.warn("there is no browser here: open that file in one")


@app.command(epilog="Example: puzzles reset basics/3. Without a name it is about everything.")
@anything
@yes
def reset(what: str, yes: bool) -> None:
    """Take a puzzle, a notebook or everything back to the start. Says what will be lost, asks, keeps the old file."""
    folder = workspace.find()
    book = _notebook(what)
    books = [book] if book else [] if what else curriculum.notebooks()
    puzzles = [each for book in books for each in book.puzzles] if books else [curriculum.puzzle(what)]
    for line in workspace.losses(folder, puzzles):
        print(line)
    if not terminal.agreed(f"Reset {what or 'everything'}?", yes):
        print("nothing is reset")
        raise Exit(NOT_SOLVED)
    kept = [aside for each in books or puzzles for aside in workspace.reset(folder, each)]
    forget(each.id for each in puzzles)
    print(f"{what or 'everything'} is as it was at the start")
    if kept:
        print(f"your files of before: {', '.join(each.name for each in kept)}, in {folder}")


def _add_compiler(machine: str, default: str, known: str, example: str, about: str) -> None:
    """Adds the command that compiles a puzzle's answer for chips that need not be there."""

    def chips() -> Any:
        return importlib.import_module(f"..targets.{machine}.chips", __package__)

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in chips().CHIPS if name.startswith(incomplete)]

    @app.command(machine, help=f"{about} Exits with 0 if it compiles, 1 if not.", epilog=f"Example: puzzles {example}")
    @click.argument("puzzle_id", metavar="ID", shell_complete=_complete)
    @click.option(
        f"--{machine}",
        "names",
        metavar="NAMES",
        default=default,
        show_default=True,
        help=f"Of {known}; commas between.",
        shell_complete=complete,
    )
    @with_overlay
    def command(puzzle_id: str, names: str, overlay: Path | None) -> None:
        try:
            targets = chips().chips(names)
        except ValueError as error:
            raise curriculum.CurriculumError(str(error)) from None
        code = SOLVED
        with _source(curriculum.puzzle(puzzle_id).notebook, overlay) as source, Judge() as judge:
            print(f"{puzzle_id}: {source}", flush=True)
            for target in targets:
                answer = judged(puzzle_id, judge.answer(machine, puzzle_id, source, overlay, chip=target.name))
                _say_verdict(answer)
                code = max(code, SOLVED if answer.get("compiles") else NOT_SOLVED)
                if answer.get("unavailable"):
                    raise Exit(WRONG_USE)
                if "verdict" in answer:
                    break  # the next would say the same
        raise Exit(code)


_add_compiler(
    "tpu", "v5e", "v5e, v6e, tpu7x", "tpu basics/10 --tpu v5e,v6e",
    "Compile your kernel for a TPU, without one: VMEM, bundles, time.",
)  # fmt: skip
_add_compiler(
    "gpu", "h100", "h100, h200, b200", "gpu NAME/3 --gpu h100,b200",
    "Compile your kernel for a GPU, without one: registers, SMEM, time.",
)  # fmt: skip


@app.command(epilog="Example: puzzles bench flash_attention/6 --sweep --json mine.json")
@click.argument("puzzle_id", metavar="ID", shell_complete=_complete)
@with_overlay
@click.option("--sweep", is_flag=True, help="At all sizes and dtypes, not at the largest alone.")
@click.option("--csv", "as_csv", metavar="FILE.csv", type=FILE, help="Write the table there.")
@click.option("--json", "as_data", metavar="FILE.json", type=FILE, help="The same as JSON.")
@click.option("--picture", metavar="FILE.svg", type=FILE, help="Draw it there.")
@click.option("--compare", metavar="OLD.json", type=FILE, help="What has changed since that run.")
def bench(
    puzzle_id: str,
    overlay: Path | None,
    sweep: bool,
    as_csv: Path | None,
    as_data: Path | None,
    picture: Path | None,
    compare: Path | None,
) -> None:
    """Time your kernel beside XLA's; estimates where its chip is not here. Exits with 1 if it has no time."""
    from . import benchmark

    files = benchmark.files(as_csv, as_data, picture)
    old = benchmark.older(compare)
    with _source(curriculum.puzzle(puzzle_id).notebook, overlay) as source, Judge() as judge:
        print(f"{puzzle_id}: {source}", flush=True)
        with tempfile.TemporaryDirectory(prefix="puzzles-") as folder:
            kept = Path(folder) / "kept.json"
            try:
                answer = judge.answer("bench", puzzle_id, source, overlay, sweep=sweep, kept=str(kept))
            except KeyboardInterrupt:
                benchmark.say(benchmark.kept(kept, "You stopped it."), files, old)
                raise
            results = benchmark.results_of(answer, kept)
    if results is None:
        _say_verdict(judged(puzzle_id, answer))
        raise Exit(NOT_SOLVED)
    benchmark.say(results, files, old)
    _say_printed(answer.get("printed", ""), sys.stdout)
    raise Exit(SOLVED if benchmark.has_own(results) else NOT_SOLVED)


@app.group(hidden=True)
def dev() -> None:
    """For authors of puzzles, in a clone of the project."""


@dev.command(
    epilog="Example: puzzles dev mutants basics/9",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
@click.pass_context
def mutants(ctx: click.Context) -> None:
    """Make small mistakes in the solutions by program, and show which of them the checks accept."""
    script = installation.ROOT / "tests" / "mutants.py"
    if not script.is_file():
        raise curriculum.CurriculumError("mutants are for authors, and made in a clone of the project")
    raise Exit(subprocess.call([sys.executable, str(script), *ctx.args]))


@app.command("list", epilog="Example: puzzles list --json")
@as_json
def list_puzzles(as_json: bool) -> None:
    """Name every puzzle."""
    state = load()
    everything = curriculum.all_puzzles()
    if as_json:
        print(json.dumps({"version": 1, "puzzles": [_row(each, state) for each in everything]}))
        return
    width = max((len(each.id) for each in everything), default=0)
    for each in everything:
        print(f"{each.id:{width}}  {state.word(each):6}  {each.title}".rstrip())


# ---- the parts -------------------------------------------------------------------------------------------------------


def _init(folder: Path) -> None:
    made = workspace.init(folder)
    tutor = [each for each in made.added if each.startswith(".claude/")]
    added = [each for each in made.added if each not in tutor]
    if added:
        print(f"added to {folder}: {', '.join(added)}")
    if tutor:
        print("added for an assistant: .claude (the command /tutor, and a skill)")
    if made.kept:
        kept = [each for each in made.kept if not each.startswith(".claude/")]
        names = ", ".join([*kept, *([".claude"] if len(kept) < len(made.kept) else [])])
        print(f"kept as they are in {folder}: {names}. Nothing is merged into a file that is there")
    for name, puzzles in made.differ.items():
        print(f"{name} differs from the current course in {_numbered(puzzles)} (an older version, or your edits).")
        print(f"    Nothing was changed. `puzzles reset {name}/N` takes the new text and keeps your file beside it")


def _numbered(puzzles: list[str]) -> str:
    """ "Puzzles 3, 7 and the cells around the puzzles"."""
    numbers = [each for each in puzzles if each]
    words = [f"Puzzle{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []
    return " and ".join([*words, *(["the cells around the puzzles"] if "" in puzzles else [])])


def _notebook(name: str) -> curriculum.Notebook | None:
    return next((each for each in curriculum.notebooks() if each.name == name), None)


def _puzzle_or_next(puzzle_id: str) -> curriculum.Puzzle:
    """The puzzle of that name, or the next one, or the very last when all are solved."""
    if puzzle_id:
        return curriculum.puzzle(puzzle_id)
    return load().next() or curriculum.all_puzzles()[-1]


def _open_puzzle(puzzle_id: str, any_order: bool) -> curriculum.Puzzle:
    """The same, if it is open. Raises CurriculumError when another has to be solved first, and nobody said --any."""
    puzzle = _puzzle_or_next(puzzle_id)
    first = load().waits_for(puzzle)
    if first is not None and any_order:
        record_opened(puzzle.id)
    elif first is not None:
        raise curriculum.CurriculumError(f"{puzzle.id} opens when {first.id} is solved; --any opens it now")
    return puzzle


def _in_step(folder: Path, name: str) -> Path:
    """Brings a notebook's pair in step, with a warning where it cannot; the file of the two to read."""
    pair = workspace.synced_file(folder, name)
    if pair.problem:
        terminal.warn(pair.problem)
    return pair.current


@contextlib.contextmanager
def _source(name: str, overlay: Path | None) -> Iterator[Path]:
    """Whose functions are asked about: those of the file of --with, else the reader's own.

    The other half of the reader's notebook follows after the answer, which should not wait for it. Raises
    CurriculumError if the half that was saved last cannot be read: the reader means no other.
    """
    if overlay is not None:
        if not overlay.is_file():
            raise curriculum.CurriculumError(f"there is no file {overlay}")
        yield overlay
        return
    folder = workspace.find()
    known = pairing.known(folder, name)
    curriculum.read_cells(known or workspace.current_file(folder, name))
    try:
        yield known or _in_step(folder, name)
    finally:
        if known:
            sys.stdout.flush()
            _in_step(folder, name)


def _say_verdict(answer: Message, short: bool = False, traceback: bool = False) -> None:
    """A verdict, or a report, and then what the reader's code has printed."""
    if short:
        verdict, findings = answer["verdict"], answer["verdict"]["findings"]
        about = findings[0]["cause"] if findings else curriculum.puzzle(verdict["puzzle"]).title
        line = f"{verdict['puzzle']:12}  {WORDS[verdict['status']]:14}  {about}"
        terminal.say_laid_out(cut(line, terminal.columns()))
    else:
        terminal.say_laid_out(answer["text"])
        _say_printed(answer["printed"], sys.stdout)
    if traceback and answer["traceback"]:
        terminal.say_laid_out(f"\n{answer['traceback'].rstrip()}")
    sys.stdout.flush()


def _say_printed(printed: str, stream: TextIO) -> None:
    if printed.strip():
        print(terminal.printable(f"\nprinted by your code:\n{printed.rstrip()}"), file=stream)


def _puzzle_ids(what: str) -> list[str]:
    """What to check: nothing said is the next puzzle, a notebook's name is all of its puzzles."""
    if not what:
        upcoming = load().next()
        return [upcoming.id] if upcoming else []
    book = None if "/" in what else _notebook(what)  # one notebook to read, not all of them
    return [each.id for each in (book.puzzles if book else [curriculum.puzzle(what)])]


def _row(puzzle: curriculum.Puzzle, state: Progress) -> dict[str, Any]:
    entry = state.entry(puzzle.id)
    return {
        "id": puzzle.id,
        "notebook": puzzle.notebook,
        "number": puzzle.number,
        "title": puzzle.title,
        "goal": puzzle.goal,
        "holes": list(puzzle.holes),
        "hints": len(puzzle.hints),
        "hints_seen": entry["hints"],
        "attempts": entry["attempts"],
        "solved": entry["solved"],
        "locked": state.waits_for(puzzle) is not None,
    }
