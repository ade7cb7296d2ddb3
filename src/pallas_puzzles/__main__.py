"""`python -m pallas_puzzles` is the `puzzles` command."""

from .app.cli import main

main()
