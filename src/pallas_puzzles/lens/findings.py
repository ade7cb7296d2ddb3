"""What the machines for GPUs and for several devices find wrong, kept as data."""

import dataclasses
from collections.abc import Hashable
from typing import Any


class Hangs(Exception):
    """Somebody waits for ever: nothing that a function does after that runs."""


class Findings:
    """Findings, each `key` once, with how often it was seen."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def add(self, finding: Any) -> None:
        known = self._found.get(finding.key)
        again = finding if known is None else dataclasses.replace(known, times=known.times + 1)
        self._found[finding.key] = again

    def all(self) -> list[Any]:
        return list(self._found.values())

    @property
    def hangs(self) -> bool:
        return any(f.kind == "deadlock" for f in self._found.values())
