"""A deadlock of a kernel for a GPU, in words: followed from who waits to what they all wait for."""

from collections.abc import Iterator, Sequence

from ..ir.capture import SourceLine
from ..lens.gpu.findings import Brought, Finding, Waiter
from ..lens.machine import listed
from ..text import plural
from .findings import Finding as Told
from .findings import at

_MOST = 4  # rows of evidence


def explain_deadlock(f: Finding) -> Told:
    """The one wait that the others hang on, or the waits that hang on each other, and what to do."""
    tried = f.brought()
    brought = tried or [[()] * len(f.waiters)] * len(f.waiters)
    way, closed = _followed(f.waiters, brought)
    root = f.waiters[way[-1]]
    if closed:
        arrivals = [brought[then][n] for n, then in zip(way, [*way[1:], way[0]], strict=True)]
        cause = _circle([f.waiters[n] for n in way], arrivals)
    else:
        own = brought[way[-1]][way[-1]]
        cause = f"{root.who} waits for ever: {_missing(root, bool(tried))} {_advice(root, own, f.ended)}"
    evidence = [*_rows(f.waiters, brought, [] if closed else way[-1:], closed)]
    others = sum(1 + w.alike for w in f.waiters) - 1
    if len(evidence) > _MOST or others > len(evidence):
        evidence = [*evidence[:_MOST], f"In all, {others + 1} warpgroups wait."]
    # what another barrier has had too much of is looked at first: there, the arrival that is missing may have gone
    spare = [] if closed else [line for _, _, lines in root.spare for line in reversed(lines)]
    mine = [line for who, line, _ in root.waited if who == root.who]
    came = [] if closed else [line for who, line, _ in root.came if who != root.who]  # where those arrive who do
    near = [*came, *spare, root.line, *mine, *(line for w in (root, *f.waiters) for line in (*w.candidates, w.line))]
    lines = [line for line in near if line is not None]
    return Told(f.kind, cause, evidence, next(iter(lines), None), operand=root.what, near=lines)


def _followed(waiters: Sequence[Waiter], brought: Brought) -> tuple[list[int], bool]:
    """The numbers of the waiters on the way from the first to the last one that hangs on the next, or the circle that
    the way ends in."""
    way = [0]
    while True:
        here = way[-1]
        ahead = [n for n in range(len(waiters)) if n != here and brought[n][here]]
        if not ahead or waiters[here].got:  # some arrivals have come: it is about the others
            return way, False
        last = [n for n in ahead if not any(brought[m][n] for m in range(len(waiters)) if m != n) or waiters[n].got]
        then = (last or ahead)[0]
        if then in way:
            return way[way.index(then) :], True
        way.append(then)


def _circle(waiters: Sequence[Waiter], arrivals: Sequence[Sequence[tuple[str, SourceLine | None]]]) -> str:
    """waiters: each waits for what comes when the next one goes on; arrivals: these."""
    first = waiters[0].who
    waits = [
        f"{_short(w.who, first) if n else first} waits for {w.what}{at(w.line)}, on which {_short(who, first)} "
        f"arrives{at(line)} only after a wait of its own"
        for n, (w, [(who, line), *_]) in enumerate(zip(waiters, arrivals, strict=True))
    ]
    advice = "Let one of them arrive before it waits, or wait less often."
    return f"{'; '.join(waits)}. So they wait for each other for ever. {advice}"


def _short(who: str, beside: str) -> str:
    """'warpgroup 1', beside the name of somebody in the same CTA."""
    name, of, cta = who.partition(" of ")
    return name if of and beside.endswith(of + cta) else who


def _missing(w: Waiter, tried: bool) -> str:
    """tried: it is known that nobody else would arrive."""
    if w.parts > 0 and w.got >= w.needed:
        return f"{w.what} lacks {plural(w.parts, 'part')} of a multicast copy, which other CTAs of its cluster bring."
    if w.round < 0:
        return f"semaphore {w.what} has {w.got} of {plural(w.needed, 'signal')}, and nobody is left to signal it."
    came = f", by {_arrivals(w.came, w.who)}" if w.came else ", and nobody is left who arrives on it" * tried
    return f"{w.what} has {w.got} of {plural(w.needed, 'arrival')} in its round {w.round}{came}."


def _arrivals(arrived: Sequence[tuple[str, SourceLine | None, int]], beside: str) -> str:
    times = ((f"{_short(who, beside)}{at(line)}", f" {n} times" if n > 1 else "") for who, line, n in arrived)
    return ", ".join(f"{who}{often}" for who, often in times)


def _advice(w: Waiter, own: Sequence[tuple[str, SourceLine | None]], ended: Sequence[str]) -> str:
    """own: what arrives there once this wait is over. ended: who is done."""
    if w.parts > 0 and w.got >= w.needed:
        return "Every CTA along collective_axes has to start the copy."
    if w.round < 0:
        return "Signal it as often as you wait for it."
    if not w.candidates:
        return f"No line of the kernel arrives on it: call plgpu.barrier_arrive.{_spare(w)}"
    later = next((line for _, line in own if line is not None), None)
    if w.got:
        return "Give the barrier as many arrivals (num_arrivals) as really come, or let the others arrive, too."
    arrived = [*dict.fromkeys(_short(who, w.who) for who, _, _ in w.arrived if who != w.who)]
    done = arrived and {who for who, _, _ in w.arrived} <= {*ended}
    gone = f" ({listed(arrived)}, which arrived, {'has' if len(arrived) == 1 else 'have'} ended)" if done else ""
    if spare := _spare(w):
        return f"It has ended {plural(w.round, 'round')}{gone}.{spare}" if w.round else spare.strip()
    if w.round > 0:
        again = f", and {later} arrives again only after it" if later is not None else ""
        number = f"It has ended {plural(w.round, 'round')}{gone}, and this is wait number {w.round + 1}"
        return f"{number}{again}: wait once for each round."
    if later is not None:
        return f"What arrives on it ({later}) comes only after this wait: one of the two has to come earlier."
    return f"{_listed(w.candidates)} would arrive on it, and nobody gets there: look at the conditions around that."


def _spare(w: Waiter) -> str:
    """What another barrier has had too much of, where this one lacks it."""
    if not w.spare:
        return ""
    name, rounds, lines = max(w.spare, key=lambda each: (_base(each[0]) == _base(w.what), each[1]))
    meant = f"{'is it' if rounds == 1 else 'are they'} meant for {w.what}"
    meant = "is an index wrong, or an arrival missing" if _base(name) == _base(w.what) else meant
    ended = plural(rounds, "round")
    return f" {name} has ended {ended} more than anybody has waited for ({_listed(lines)}): {meant}?"


def _base(name: str) -> str:
    return name.split("[")[0]


def _listed(lines: Sequence[SourceLine]) -> str:
    return ", ".join(map(str, lines[:3])) + (", ..." if len(lines) > 3 else "")


def _rows(waiters: Sequence[Waiter], brought: Brought, root: Sequence[int], closed: bool) -> Iterator[str]:
    for n in root:
        w = waiters[n]
        if w.arrived and not w.came:
            yield f"Arrived on {w.what} so far: {_arrivals(w.arrived, w.who)}."
        if mine := [each for each in w.waited if each[0] == w.who]:
            yield f"It has waited for {w.what} before: {_arrivals(mine, w.who)}."
    for n, w in enumerate(waiters):
        if n in root or closed:
            continue
        after = next((brought[m][n] for m in (*root, *range(len(waiters))) if m != n and brought[m][n]), None)
        then = f", on which {_short(after[0][0], w.who)} arrives{at(after[0][1])} when it goes on" if after else ""
        yield f"{w.who} waits for {w.what}{at(w.line)}{then}."
