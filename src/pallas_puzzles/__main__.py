"""`python -m pallas_puzzles` is the `puzzles` command."""

from .cli import main

main()
