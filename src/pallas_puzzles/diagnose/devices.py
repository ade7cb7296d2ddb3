"""What the machine for several devices saw and what is wrong with its results, as findings; and what costs too much."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..ir.capture import SourceLine
from ..lens.devices import Run
from ..lens.devices.findings import Access, Waiter
from ..lens.devices.findings import Finding as Seen
from ..lens.machine import listed
from ..text import plural
from .diagnose import SEEN_IN_VALUES, makers, structure, wrong_results
from .findings import GARBAGE_READS, Diagnosis, Finding, Tolerance, at
from .incidents import incidents_of
from .wrong import Result, part_named, pattern_of, what_it_holds, where_in

Box = tuple[slice, ...]
_ASTRAY = frozenset({"map-bounds", "ref-bounds"})


def diagnose_devices(run: Run, want: object, tolerance: Tolerance | None = None) -> Diagnosis:
    """Compares a run with the expected result (a pytree of arrays) and explains what is wrong.

    What the machine has seen to be wrong counts even where the values agree: they agree by luck.
    """
    calls = [*reversed(run.calls)] if run.hangs else [t.call for t in run.traces]  # it is the last one that waits
    near = [line for call in calls for line in (*call.callers, call.where) if line is not None]
    seen = [f.but(near=[*f.near, *near]) for f in findings_of(run.findings)]
    if run.hangs:
        return Diagnosis(seen)
    wrong = structure(run.outputs, want, "function", "out_specs") or [
        _output(run, each).but(near=near) for each in wrong_results(run.outputs, want, tolerance)
    ]
    noted = [f.but(near=[*f.near, *near]) for f in _incidents(run, bool(wrong))]
    astray = [f for f in noted if f.kind in _ASTRAY]  # what goes beyond the end of an array, meets others there
    seen = [*astray, *seen, *(f for f in noted if f not in astray)]
    if wrong:
        seen += findings_of(run.notes)
    if seen and wrong:  # how wrong it is, is evidence of it
        seen[0] = seen[0].but(evidence=[*wrong[0].evidence[:1], *seen[0].evidence])
        wrong = [f for f in wrong if not seen or f.kind not in SEEN_IN_VALUES]  # it follows
    return Diagnosis([*seen, *wrong])


def _incidents(run: Run, wrong: bool) -> list[Finding]:
    """What the machine of each device saw, once where several saw the same."""
    found: dict[object, tuple[Finding, list[int]]] = {}
    for device, traces in enumerate(run.devices):
        for trace in (inner for outer in traces for inner in outer.with_pipelines()):
            for f in incidents_of(trace, wrong, frozenset()):
                if wrong or f.kind not in GARBAGE_READS:
                    found.setdefault((f.kind, f.operand, f.line), (f, []))[1].append(device)
    return [
        f.but(cause=f"On {run.mesh.name(on[0])}: {f.cause}", evidence=[*f.evidence, *_also(run, on[1:])])
        for f, on in found.values()
    ]


def _also(run: Run, devices: Sequence[int]) -> Iterator[str]:
    if devices:
        yield f"The same happens on {plural(len(set(devices)), 'other device')}."


def _output(run: Run, wrong: Result) -> Finding:
    parts = dict(run.parts_of(wrong.made))
    on = [device for device, part in parts.items() if wrong.bad[part].any()]
    where, evidence = where_in(wrong.bad), [wrong.summary()]
    cause = f"{wrong.name} is wrong" + (f": {where}" if where else "")
    if not on:
        return Finding("values", f"{cause}.", evidence, size=wrong.want.size)
    device, part = on[0], parts[on[0]]
    several = len(set(map(str, parts.values()))) > 1
    whole = {f"the part of {run.mesh.name(d)}": p for d, p in parts.items() if several and d != device}
    kind, words = _holds(wrong, part, whole)
    for piece, others in _pieces(wrong, part, run.mesh.size) if kind != "moved" else ():
        if wrong.bad[piece].any() and (found := _holds(wrong, piece, others))[0] == "moved":
            part, (kind, words) = piece, found
            break
    if words != "wrong values":
        cause = f"{part_named(wrong.name, part, wrong.want.shape)}, which {run.mesh.name(device)} "
        cause += f"makes, {what_it_holds(kind, words)}"
    from_all = len(on) == len(parts)
    cause += f". What is wrong comes from {'every device' if from_all else listed([*map(run.mesh.name, on)])}"
    line = next(_stores(run, device, wrong.made[parts[device]]), None)
    return Finding(kind, f"{cause}.", evidence, line, size=wrong.want.size)


def _holds(wrong: Result, part: Box, others: Mapping[str, Box]) -> tuple[str, str]:
    belongs = {name: wrong.want[each] for name, each in others.items()}
    return pattern_of(wrong.got[part], wrong.want[part], wrong.bad[part], wrong.tolerance, belongs)


def _pieces(wrong: Result, part: Box, count: int) -> Iterator[tuple[Box, dict[str, Box]]]:
    """The pieces of a device's part, if it is cut into so many along a dimension, each with the others by name."""
    for d, along in enumerate(part):
        size, rest = divmod(along.stop - along.start, count)
        if size and not rest:
            cuts = [slice(along.start + i * size, along.start + (i + 1) * size) for i in range(count)]
            boxes = [(*part[:d], cut, *part[d + 1 :]) for cut in cuts]
            names = [part_named(wrong.name, box, wrong.want.shape) for box in boxes]
            for box in boxes:
                yield box, {name: other for name, other in zip(names, boxes, strict=True) if other is not box}


def _stores(run: Run, device: int, made: np.ndarray) -> Iterator[SourceLine]:
    """The lines that store into what a device has made, the last one first."""
    traces = run.devices[device]
    for which, number in makers([t.outputs for t in traces], made):
        events = [e for e in traces[which].events if e.op != "load" and e.ref == traces[which].call.outs[number].name]
        yield from (e.line for e in reversed(events) if e.line is not None)


# --- what the machine found ------------------------------------------------------------------------------------------


def findings_of(seen: Iterable[Seen]) -> list[Finding]:
    """What a reader is told, the causes before what follows from them."""
    found, seen = [], list(seen)
    reused = {_base(f) for f in seen if _overwrites(f)}  # places that copies fill again: that explains the rest
    seen = [dataclasses.replace(f, semaphore="") if _base(f) in reused else f for f in seen]
    for f in sorted(seen, key=lambda f: (_ORDER.index(f.kind), not _overwrites(f))):
        near = [x for x in (f.second.line if f.second else None, *_lines_of(f.waiters)) if x is not None]
        times = [f"This happens {plural(f.times, 'time')} in all."] if f.times > 1 else []
        kind, evidence = _KINDS.get(f.kind, f.kind), [*_waiting(f), *times]
        found.append(Finding(kind, _WORDS[f.kind](f), evidence, f.first.line, operand=f.ref, near=near))
    return found


def _base(f: Seen) -> str:
    return f.ref.split("[")[0]


def _overwrites(f: Seen) -> bool:
    """Whether this is a race of two copies into one place."""
    return f.second is not None and all(
        a.verb == "writes" and a.who.startswith("the copy") for a in (f.first, f.second)
    )


_KINDS = {"deadlock": "hang", "unread": "ignored"}


def _lines_of(waiters: Iterable[Waiter]) -> Iterator[SourceLine | None]:
    for waiter in waiters:
        yield waiter.line
        yield from waiter.lines


def _race(f: Seen) -> str:
    assert f.second is not None, "a race has two sides"
    does = {"reads": "reads it", "writes": "writes it"}
    one, two = (f"{a.who} {does[a.verb]}{at(a.line)}" for a in (f.first, f.second))
    if f.first.who == f.second.who:  # two turns of a loop
        one = one.replace("the copy", "an earlier copy", 1)
    return (
        f"Nothing orders two accesses to {f.ref} of {f.device}: {one}, and {two}. They may happen in either order. "
        f"{_mistaken(f) if f.semaphore else _advice(f.first, f.second)}"
    )


def _mistaken(f: Seen) -> str:
    return (
        f"There is a wait on {f.semaphore}, but other copies signal it, too, and a wait cannot tell which of them has "
        "come. Give each copy that may be on its way at the same time a semaphore of its own."
    )


def _advice(*sides: Access) -> str:
    reading, writing = ([a for a in sides if a.verb == verb] for verb in ("reads", "writes"))
    copies = [a for a in sides if a.who.startswith("the copy")]
    if not copies:
        return "Let one of the two devices signal a semaphore that the other waits for."
    if not reading:
        return (
            "Is each of them meant for this place? If not, look at where they copy to. If so, let the receiver signal "
            "that the place is free again, and let the later one wait for that."
        )
    if writing[0] not in copies:
        return "Wait until the copy has been sent (wait_send) before you write into its source again."
    return (
        "If the reader needs what the copy brings, it has to wait for it first (wait_recv). If it needs what was there "
        "before, it has to signal the sender when all is done with it: used, and sent on (wait_send). And the sender "
        "has to wait for that signal."
    )


def _deadlock(f: Seen) -> str:
    w = f.waiters[0]
    needs = f"{w.what} holds {w.got:,}{f' {w.unit}' if w.unit else ''}, and {w.needed:,} are needed"
    if w.what.startswith(("the other", "device")):
        needs = f"it waits for {w.what}"
    if not w.sources and not w.lines:
        advice = "Nothing that ran has ever signalled it: start the copy, or signal the semaphore."
    elif not w.sources:
        lines = listed([str(x) for x in w.lines])
        advice = f"It is signalled on other devices ({lines}), never on this one: is the device_id right, and does "
        advice += "each device get there?"
    else:
        came = listed([f"{who}{at(line)}" for who, line in w.sources[:3]])
        advice = f"So far it was signalled by {came}. Either one more has to come, or this waits for too much."
    return f"{w.device} waits for ever{at(w.line)}: {needs}. {advice}"


def _waiting(f: Seen) -> Iterator[str]:
    for w in f.waiters[1:6]:
        yield f"{w.device} waits, too{at(w.line)}: {w.what} holds {w.got:,} of {w.needed:,}."
    if len(f.waiters) > 6:
        yield f"{plural(len(f.waiters) - 6, 'more device')} wait, too."
    if f.ended:
        yield f"{listed(f.ended)} {'has' if len(f.ended) == 1 else 'have'} ended."


def _unwaited(f: Seen) -> str:
    many = " Nor for another one." if f.count == 2 else f" Nor for {f.count - 1} others." if f.count > 2 else ""
    return (
        f"{f.device} never waits on {f.ref} for {f.first.who}{at(f.first.line)}.{many} A kernel that ends before its "
        "copies leaves them to write into memory that somebody else has by then: call wait_send() and wait_recv()."
    )


_WORDS: dict[str, Callable[[Seen], str]] = {
    "no-device": lambda f: (
        f"{f.first.who} addresses {f.ref}, and the mesh has no such device. Is the index right? If it only has to "
        "go on at 0 behind the last device, take it modulo lax.axis_size(axis)."
    ),
    "deadlock": _deadlock,
    "not-entered": lambda f: (
        f"{f.first.who} copies into {f.ref} of {f.device}, and nothing says that {f.device} has entered the kernel: "
        "its memory may still belong to somebody else. Before the first copy, signal the barrier semaphore of each "
        "device that copies to you, and wait for as many signals (pltpu.get_barrier_semaphore, collective_id)."
    ),
    "race": _race,
    "unwaited": _unwaited,
    "left-over": lambda f: (
        f"The semaphore {f.ref} of {f.device} still holds {f.count:,} when the kernel has ended; the last signal was "
        f"by {f.first.who}{at(f.first.line)}. A semaphore has to be 0 at the end: wait once for each signal, "
        "or signal less often."
    ),
    "unequal": lambda f: (
        f"{f.ref.capitalize()} of the shard_map is the same on every device, says out_specs; {f.device} and "
        f"{f.first.who} return different values. Sum or gather over the axis first (lax.psum, lax.all_gather), or name "
        "the axis in out_specs."
    ),
    "unwritten": lambda f: (
        f"{f.first.who} sends {f.ref}, of which {plural(f.count, 'element')} hold nothing yet. Wait for the copy that "
        "brings them, or store into them, before you send."
    ),
    "unread": lambda f: (
        f"Nobody reads what {f.first.who} brings into {f.ref} of {f.device}{at(f.first.line)}. Use it when it has "
        "come: the part that comes last as well."
    ),
}
_ORDER = list(_WORDS)
