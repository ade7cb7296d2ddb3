"""How verdicts, runs and reports are shown."""
