"""A right answer whose own copies do not overlap with what it computes."""

import collections

from ..ir.capture import SourceLine
from ..lens.flight import Transfer
from ..lens.machine import Figures, Run
from ..text import human_bytes, plural
from .findings import Finding


def overlap_findings(run: Run, most_exposed: int | None, least_in_flight: int | None) -> list[Finding]:
    """What more is exposed than that, or fewer bytes in flight than that while it computes; see Budget."""
    flights = [trace.flight for trace in run.traces]
    exposed = sum(flight.exposed_bytes for flight in flights)
    if most_exposed is not None and exposed > most_exposed:
        alone = [t for flight in flights for t in flight.transfers if t.hbm and t.exposed]
        return [_exposed(alone, exposed, most_exposed)]
    if least_in_flight is None:
        return []
    lowest = min((flight.in_flight_bytes for flight in flights), default=0.0)
    return [_too_few(run, lowest, least_in_flight)] if lowest < least_in_flight else []


def kept_findings(run: Run, costs: list[Figures], most: int) -> list[Finding]:
    """A call whose buffers fit into so many bytes, but not with the values that it keeps over a copy."""
    for trace, costs_of in zip(run.traces, costs, strict=True):
        kept = trace.flight.kept_bytes
        if kept and costs_of.vmem_bytes + kept > most:
            copy = max(trace.flight.transfers, key=lambda t: t.kept_bytes)
            cause = (
                f"Right answer, but it keeps {human_bytes(kept)} of values over the start of a copy into "
                f"{copy.target}, where they were loaded from. That is more than the registers hold. So these values "
                f"take as much VMEM again, {human_bytes(costs_of.vmem_bytes + kept)} in all, where the budget is "
                f"{human_bytes(most)}; or the compiler uses them up before the copy starts, and nothing overlaps. "
                "Start the copy into a slot that nobody reads."
            )
            evidence = [f"loaded at {copy.loaded_at}, needed after the copy that is started at {copy.line}"]
            near = [line for line in (copy.line, copy.loaded_at) if line is not None]
            return [Finding("budget", cause, evidence, copy.line, operand="vmem_bytes", near=near)]
    return []


def _exposed(alone: list[Transfer], exposed: int, most: int) -> Finding:
    by_line: dict[tuple[SourceLine | None, SourceLine | None], list[Transfer]] = collections.defaultdict(list)
    for transfer in alone:
        by_line[transfer.line, transfer.waited_at].append(transfer)
    rows = sorted(by_line.items(), key=lambda row: -sum(t.nbytes for t in row[1]))
    (started, waited), worst = rows[0]
    cause = (
        f"Right answer, but {human_bytes(exposed)} of its copies are exposed: they are waited for before anything is "
        f"computed, so nothing runs while they are on their way. The budget is {human_bytes(most)}. "
    )
    cause += (
        "Start the copy of the next tile before you compute on this one."
        if worst[0].comes_in
        else "Start a copy out, compute the next tile, and only then wait for it."
    )
    evidence = [
        f"{plural(len(each), 'time')}, {human_bytes(sum(t.nbytes for t in each))} in all: {each[0].source} to "
        f"{each[0].target} and so on, started at {a}, waited for at {b}"
        for (a, b), each in rows[:4]
    ]
    near = [line for pair, _ in rows for line in pair if line is not None]
    return Finding("budget", cause, evidence, waited or started, operand="exposed_bytes", near=near)


def _too_few(run: Run, got: float, least: int) -> Finding:
    lines = [t.line for trace in run.traces for t in trace.flight.transfers]
    near = [line for line in dict.fromkeys(lines) if line is not None]
    cause = (
        f"Right answer, but while it computes, only {human_bytes(int(got))} of its copies are on their way, on "
        f"average; this puzzle asks for {human_bytes(least)}. Start copies earlier: every slot but the one that is "
        "being read can be on its way."
    )
    return Finding("budget", cause, [], next(iter(near), None), operand="in_flight_bytes", near=near)
