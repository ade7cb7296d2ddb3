"""A right answer that costs too much: what a puzzle may bound, the figure, and where it goes."""
