"""What several tests need to know of the course: every puzzle, and a notebook with its solutions in place."""

import ast

from pallas_puzzles.app.formats import NotebookNode
from pallas_puzzles.course import curriculum

PUZZLES = curriculum.all_puzzles()
assert PUZZLES, "no puzzle found"


def functions(code: str) -> dict[str, str]:
    """The top-level functions of some code, name -> source."""
    lines = code.splitlines()
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def lay_solutions(node: NotebookNode, book: curriculum.Notebook) -> None:
    """Writes the third hints into a notebook, as a reader would who copies them out of the page."""
    for puzzle in book.puzzles:
        answers = functions(puzzle.solution)
        for hole in puzzle.holes:
            skeleton = puzzle.skeletons[hole].strip("\n").rstrip()
            (cell,) = [each for each in node.cells if each.cell_type == "code" and skeleton in each.source]
            cell.source = cell.source.replace(skeleton, answers[hole])
