"""A right answer whose own copies do not overlap with what it computes."""

import collections

from ..diagnose.findings import Finding
from ..lens.flight import Flight
from ..lens.machine import Figures, Run
from ..text import human_bytes, plural
from .budget import over


def overlap_findings(run: Run, most_exposed: int | None, least_in_flight: int | None) -> list[Finding]:
    """What more is exposed than that, or fewer bytes in flight than that while it computes; see Budget."""
    flights = [trace.flight for trace in run.traces]
    exposed = sum(flight.exposed_bytes for flight in flights)
    if most_exposed is not None and exposed > most_exposed:
        return [_exposed(flights, exposed, most_exposed)]
    lowest = min((flight.in_flight_bytes for flight in flights), default=0.0)
    if least_in_flight is None or lowest >= least_in_flight:
        return []
    near = [t.line for flight in flights for t in flight.transfers if t.line is not None]
    there, asked = human_bytes(int(lowest)), human_bytes(least_in_flight)
    there, asked = (there, asked) if there != asked else (f"{int(lowest):,} bytes", f"{least_in_flight:,}")
    text = (
        f"while it computes, only {there} of its copies are on their way, on average; this puzzle asks for {asked}. "
        "Start copies earlier: every slot but the one that is being read can be on its way."
    )
    return [over("in_flight_bytes", text, line=next(iter(near), None), near=dict.fromkeys(near))]


def kept_findings(run: Run, costs: list[Figures], most: int) -> list[Finding]:
    """A call whose buffers fit into so many bytes, but not with the values that it keeps over a copy."""
    for trace, costs_of in zip(run.traces, costs, strict=True):
        kept = trace.flight.kept_bytes
        if kept and costs_of.vmem_bytes + kept > most:
            copy = max(trace.flight.transfers, key=lambda t: t.kept_bytes)
            over_what, line = f"the start of a copy into {copy.target}, where they were loaded from", copy.line
            advice = "; or the compiler uses them up before the copy starts, and nothing overlaps. Start the copy into "
            advice += "a slot that nobody reads."
            evidence = f"loaded at {copy.loaded_at}, needed after the copy that is started at {copy.line}"
            if copy.kept_of is None:
                over_what, line = f"the wait for the copy from {copy.source} to {copy.target}", copy.waited_at
                advice = ". Wait first. Then compute and store, into a slot that no copy uses."
                evidence = "computed before this wait, and needed after it"
            text = (
                f"it keeps {human_bytes(kept)} of values over {over_what}. That is more than the registers hold. So "
                f"these values take as much VMEM again, {human_bytes(costs_of.vmem_bytes + kept)} in all, where the "
                f"budget is {human_bytes(most)}{advice}"
            )
            return [over("vmem_bytes", text, [evidence], line, [line, copy.line, copy.loaded_at])]
    return []


def _exposed(flights: list[Flight], exposed: int, most: int) -> Finding:
    by_line = collections.defaultdict(list)
    for transfer in (t for flight in flights for t in flight.transfers if t.hbm and t.exposed):
        by_line[transfer.line, transfer.waited_at].append(transfer)
    rows = sorted(by_line.items(), key=lambda row: -sum(t.nbytes for t in row[1]))
    (started, waited), worst = rows[0]
    text = (
        f"{human_bytes(exposed)} of its copies are exposed: they are waited for before anything is computed, so "
        f"nothing runs while they are on their way. The budget is {human_bytes(most)}. "
    )
    text += (
        "Start a copy, compute on what is already here, and only then wait for it: start the next tile before you "
        "compute on this one."
        if worst[0].comes_in
        else "Start a copy out, compute the next tile, and only then wait for it."
    )
    evidence = [
        f"{plural(len(each), 'time')}, {human_bytes(sum(t.nbytes for t in each))} in all: {each[0].source} to "
        f"{each[0].target} and so on, started at {a}, waited for at {b}"
        for (a, b), each in rows[:4]
    ]
    return over("exposed_bytes", text, evidence, waited or started, [line for pair, _ in rows for line in pair])
