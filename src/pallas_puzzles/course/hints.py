"""Hints in a notebook: the next one at every call or press of a button, the solution only after them."""

from __future__ import annotations

from typing import Any

from ..text import plural
from ..view.draw import running_shell
from . import curriculum
from .curriculum import Puzzle
from .progress import hint_text, hints_left, load, next_hint, record_solution_seen


def hint(puzzle_id: str, solution: bool = False) -> None:
    """Shows the next hint of a puzzle, and counts it. solution=True: the solution, once the hints are used up."""
    text = next_words(curriculum.puzzle(puzzle_id), solution)
    if running_shell() is not None:
        from IPython.display import Markdown, display

        display(Markdown(text))
    else:
        print(text)


def next_words(puzzle: Puzzle, solution: bool = False) -> str:
    """What `hint` shows, as markdown."""
    unseen = hints_left(puzzle)
    if solution and unseen and not load().solved(puzzle.id):
        verb = "comes" if unseen == 1 else "come"
        return (
            f'{plural(unseen, "hint")} of {puzzle.id} {verb} before the solution: `hint("{puzzle.id}")` shows the next.'
        )
    if solution and puzzle.hints:
        if not load().solved(puzzle.id):
            record_solution_seen(puzzle)
        return hint_text(puzzle, len(puzzle.hints))
    return next_hint(puzzle, f'hint("{puzzle.id}", solution=True)')


def offered(puzzle: Puzzle) -> tuple[str, Any]:
    """What stands under a verdict that is no pass: the call that shows more in a line, and a button where one works.

    The button is for a puzzle whose turn it is: a notebook that is run as a whole is not strewn with them.
    """
    from ..view.live import why_not_live

    if not puzzle.hints:
        return "", None
    first = "" if "hint" in running_shell().user_ns else "from pallas_puzzles import hint; "
    last, what = ("", "the next hint") if hints_left(puzzle) else (", solution=True", "the solution")
    words = f'Stuck? {first}hint("{puzzle.id}"{last}) shows {what}.'
    works = not why_not_live() and load().waits_for(puzzle) is None
    return words, button(puzzle) if works else None


def button(puzzle: Puzzle) -> Any:
    """A button that says how many hints are left, and shows the next one below: an ipywidgets.VBox."""
    import ipywidgets
    from markdown_it import MarkdownIt  # rich brings it

    press, shown = ipywidgets.Button(layout={"width": "auto"}), ipywidgets.HTML()

    def label() -> None:
        unseen = hints_left(puzzle)
        press.description = f"Next hint ({unseen} left)" if unseen else "Show the solution"
        press.tooltip = f"{press.description}: {puzzle.id} {puzzle.title}"

    def show(_: Any) -> None:
        last = not hints_left(puzzle)
        text = MarkdownIt().render(next_words(puzzle, solution=last))
        shown.value += f'<div style="line-height:1.45;max-width:60em">{text}</div>'
        press.layout.display = "none" if last else None
        label()

    press.on_click(show)
    label()
    return ipywidgets.VBox([press, shown], layout={"align_items": "flex-start"})
