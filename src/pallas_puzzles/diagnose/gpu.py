"""What the machine for GPU kernels saw, as findings: a sentence or two each, with the reader's lines and what to do."""

from collections.abc import Callable, Iterable, Iterator

from ..lens.gpu.findings import Finding as Seen
from ..lens.machine import listed
from ..text import human_bytes, plural
from .findings import Finding, at
from .gpu_stuck import explain_deadlock


def findings_of(seen: Iterable[Seen]) -> Iterator[Finding]:
    """What a reader is told, the causes before what follows from them."""
    seen = [*seen]
    early = {(f.ref, f.other_line) for f in seen if f.kind == "early"}
    told = [f for f in seen if f.kind != "no-wait" or (f.ref, f.other_line) not in early]  # that follows from it
    for found in sorted(told, key=lambda f: _ORDER.index(f.kind)):
        if found.kind == "deadlock":
            yield explain_deadlock(found)
            continue
        lines = found.line, found.other_line
        line, other = reversed(lines) if found.kind == "early" and not found.other else lines
        near = [other] if other is not None else []
        evidence = [f"This happens {plural(found.times, 'time')}."] if found.times > 1 else []
        yield Finding(found.kind, _WORDS[found.kind](found), evidence, line, operand=found.ref, near=near)


def _head(f: Seen) -> str:
    between = ": " if f.verb.startswith(("the ", "wgmma", "tcgen05")) else " "
    return f"{f.who}{between}" if f.who else ""


def _other(f: Seen) -> str:
    """'the copy into it (a.py:7)'."""
    verb = {"the copy into": "the copy into it", "stores into": "the store into it", "reads": "the read of it"}
    what = verb.get(f.other_verb, f.other_verb)
    return f"{what}{at(f.other_line)}" + (f" by {f.other}" if f.other else "")


_WAITS = {
    "copy": "Wait for the barrier of that copy first: plgpu.barrier_wait.",
    "store": "Wait for that copy first: plgpu.wait_smem_to_gmem(0).",
    "reduce": "Wait for that copy first: plgpu.wait_smem_to_gmem(0).",
    "wgmma": "Wait for that product first: plgpu.wgmma_wait(0).",
    "load": "Call plgpu.wait_load_tmem() first, and let a Barrier with orders_tensor_core=True say so to others.",
    "fill": "Call plgpu.commit_tmem() first, and let a Barrier with orders_tensor_core=True say so to others.",
    "tcgen05": "Wait first for the barrier that the product arrives on: plgpu.barrier_wait.",
}


def _no_wait(f: Seen) -> str:
    head = f"{_head(f)}{_does(f)} while {_other(f)} may still be on its way."
    if f.detail:
        name, needed, came, lines = f.detail
        where = listed([*dict.fromkeys(map(str, lines))])
        return (
            f"{head} {name} ends a round after {plural(needed, 'arrival')}, and {came} copies arrive on it ({where}): "
            f"the wait is over before all of them are there. Let {needed} arrive in a round, or give the barrier "
            f"num_arrivals={came}."
        )
    if f.later:
        return (
            f"{head} It is a later one than you have waited for: wait for it, too (plgpu.barrier_wait), or, if it "
            "fills the slot again, let it wait until you have read this."
        )
    return f"{head} {_WAITS[f.engine]}"


def _early(f: Seen) -> str:
    where = f" at {f.line}" if f.line and not f.other else ""
    started = f"{_head(f)}{_does(f)}{where}, but {_other(f)} has been started before, and overwrites what was there."
    if f.other:
        return (
            f"{started} Arrive on the barrier that it waits for when this has been read, not before; or, if this is "
            "not the slot that you have waited for, read that one."
        )
    return f"{started} Start that copy when this has been read."


_READERS = {"store": "the copy to GMEM", "wgmma": "wgmma", "tcgen05": "tcgen05_mma", "load": "a load from TMEM"}


def _reused(f: Seen) -> str:
    reader = _READERS.get(f.engine, "a copy")
    return f"{_head(f)}{_does(f)} while {reader}{at(f.other_line)} may still be reading it. {_WAITS[f.engine]}"


def _does(f: Seen) -> str:
    """'reads s', 'the copy into s starts'."""
    return f"{f.verb} {f.ref}" + (" starts" if f.verb == "the copy into" else "")


def _own(f: Seen) -> str:
    if len(f.apart) != 1:
        return "Let one of the two wait for the other with a barrier, or give each its own part."
    (axis,) = f.apart
    if not f.same:
        return f'The two differ along "{axis}" alone, and their parts overlap: give each its own.'
    return (
        f'The two differ along "{axis}" alone: let where this line stores depend on lax.axis_index("{axis}"), so that '
        "each has its own part."
    )


def _unwritten(f: Seen) -> str:
    return (
        f"{_head(f)}{f.verb} {plural(f.count, 'element')} of {f.ref} that nobody has written: memory starts out as "
        "garbage. Copy or store into it first, and wait for the copy."
    )


def _bounds(f: Seen) -> str:
    first, last, size = f.detail
    what = f"index {first}" if first == last else f"elements {first} to {last}"
    return f"{_head(f)}{f.verb} {f.ref} at {what}, but this dimension has {plural(size, 'element')}."


def _lapped(f: Seen) -> str:
    number, reached = f.detail
    return (
        f"{_head(f)}waits for round {number} of {f.ref}, which is in round {reached} already. A barrier remembers only "
        "whether a round is odd or even: wait once for each round, before the next one can end."
    )


def _unwaited(f: Seen) -> str:
    return f"{_head(f)}{_does(f)} after a load from it{at(f.other_line)} that nobody has waited for. {_WAITS['load']}"


_WORDS: dict[str, Callable[[Seen], str]] = {
    "smem": lambda f: (
        f"A CTA holds {human_bytes(f.count)} of SMEM at once, and the chip has {human_bytes(f.total)} for one. Use "
        "smaller blocks, or fewer slots."
    ),
    "bounds": _bounds,
    "early": _early,
    "no-wait": _no_wait,
    "reused": _reused,
    "no-commit": lambda f: (
        f"{_head(f)}{_does(f)}, but {_other(f)} was not committed. The copy engine and the tensor cores see what "
        "threads store in SMEM only after plgpu.commit_smem(): call it after the store, before the copy or product."
    ),
    "race": lambda f: (
        f"{_head(f)}{_does(f)}, and nothing orders that and {_other(f)}: they may happen at the same time. {_own(f)}"
    ),
    "acc-in-flight": lambda f: (
        f"{_head(f)}reads the accumulator {f.ref} while a wgmma may still add to it. Call plgpu.wgmma_wait(0) first."
    ),
    "store-in-flight": lambda f: (
        f"{_head(f)}ends while the copy out of {f.ref} may still read its SMEM. End with plgpu.wait_smem_to_gmem(0)."
    ),
    "load-in-flight": lambda f: (
        f"{_head(f)}ends while this copy into {f.ref} may still be on its way: it would write into the SMEM of the "
        "next CTA. Start no copy that you do not wait for."
    ),
    "deadlock": lambda f: explain_deadlock(f).cause,
    "unwritten": _unwritten,
    "lapped": _lapped,
    "output-unwritten": lambda f: f"{f.count} of {f.total} elements of {f.ref} are never written.",
    "unfenced-read": lambda f: (
        f"{_head(f)}{_does(f)} after {_other(f)}, without a plgpu.commit_smem() between them. The PTX memory model "
        "orders a read and a copy that overwrites it by that fence only."
    ),
    "unwaited-load": _unwaited,
    "padding": lambda f: (
        f"{_head(f)}{f.verb} {f.ref} beyond its end: the copy engine brings zeros for what is not there, which count "
        "unless something masks them."
    ),
    "garbage": lambda f: f"{_unwritten(f)} Here, no output depends on them.",
}
_ORDER = list(_WORDS)
