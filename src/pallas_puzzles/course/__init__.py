"""Puzzles, answers, checks, progress."""
