"""What authors of a course need, and readers do not: `puzzles dev`."""
