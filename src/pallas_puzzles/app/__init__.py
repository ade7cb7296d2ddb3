"""The `puzzles` command and what runs around it."""
