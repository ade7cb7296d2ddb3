"""A right answer on several devices that costs too much, in what goes over their links or on each of them."""

import dataclasses
import itertools
from collections import Counter

from ..diagnose.findings import Finding
from ..ir.capture import SourceLine
from ..lens.devices import Run, Transfer
from ..lens.machine import figures
from ..text import human_bytes, plural
from .budget import Bounds, Budget, exceeded, over
from .tpu import over_budget as over_on_each

_PASS_ON = (
    "A copy to a distant device uses the links of all devices between: pass the data on from neighbour to neighbour."
)
_OVERLAP = (
    "They wait meanwhile{0}. Wait for each copy only where what it brings is needed: first compute what needs none of "
    "it, and start the other copies."
)
_SEND_LESS = "All of it goes from neighbour to neighbour already: send less."
_COSTS: Bounds = {
    "bytes_hops": (
        human_bytes,
        "its copies take {figure} over the links, each byte counted on every link of its way; the budget is {most}. "
        "{fewer}",
    ),
    "link_bytes": (
        human_bytes,
        "{figure} go over its busiest link in one direction; the budget is {most}. Spread them over more links: those "
        "of the other direction, or of the other axis.",
    ),
    "exposed_ici_bytes": (
        human_bytes,
        "{figure} are sent while neither the sender nor the receiver computes; the budget is {most}. {meanwhile}",
    ),
    "copies": (
        str,
        "{figure} copies go from device to device; the budget is {most}. Send in one copy what lies together.",
    ),
}


def over_budget(run: Run, budget: Budget) -> list[Finding]:
    """'Right answer, but ...', for each bound that is exceeded. Bounds on a kernel hold on each device."""
    near = [line for t in run.traces for line in t.call.callers]
    found = []
    waits = _waits(run)
    facts = {"fewer": _PASS_ON if any(t.hops > 1 for t in run.transfers) else _SEND_LESS}
    facts["meanwhile"] = _OVERLAP.format(f", mostly at {waits[0]}" if waits else "")
    for bound, text in exceeded(run.counts, budget, _COSTS, facts):
        rows = _sent(run, by_links=bound != "copies")
        lines = [*(waits if bound == "exposed_ici_bytes" else ()), *(line for line, _ in rows)]
        found.append(over(bound, text, [said for _, said in rows], next(iter(lines), None), [*lines, *near]))
    on_each = dataclasses.replace(budget, **dict.fromkeys(_COSTS))
    return [*found, *over_on_each(run, [figures(t) for t in run.traces], on_each)]


def _waits(run: Run) -> list[SourceLine]:
    """The lines at which devices wait while something is sent to them, the longest wait first."""
    waits: Counter[SourceLine] = Counter()
    for t, e in itertools.product(run.transfers, (e for e in run.events if e.kind == "wait")):
        if e.device == t.target and e.line is not None and e.start < t.end and t.start < e.end:
            waits[e.line] += min(e.end, t.end) - max(e.start, t.start)  # type: ignore[assignment]
    return [line for line, _ in waits.most_common()]


def _sent(run: Run, by_links: bool) -> list[tuple[SourceLine, str]]:
    """The lines that send most, by bytes on every link or by copies, and how much."""
    by_line: dict[SourceLine, list[Transfer]] = {}
    for t in run.transfers:
        if t.line is not None:
            by_line.setdefault(t.line, []).append(t)
    rows = [
        (line, len(ts), sum(t.nbytes * t.hops for t in ts), sum(t.nbytes for t in ts)) for line, ts in by_line.items()
    ]
    return [
        (line, f"{line}: {plural(n, 'time')}, {human_bytes(sent)}, {human_bytes(hops)} over all links: {line.text}")
        for line, n, hops, sent in sorted(rows, key=lambda row: -(row[2] if by_links else row[1]))[:3]
    ]
