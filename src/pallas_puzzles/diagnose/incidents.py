"""What the machine saw while the kernel ran, as findings: reads of garbage, hangs, races, blocks out of bounds."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

from ..ir.capture import Operand, SourceLine, callers_of, where_defined
from ..ir.program import lines_of
from ..lens.machine import Incident, Trace
from ..text import plural
from .findings import FATAL, Finding
from .steps import at, first_step_test, is_first_step


def incidents_of(trace: Trace, wrong: bool, steps: frozenset[int]) -> Iterator[Finding]:
    """One finding per kind and Ref, about the first time; those that harm only a wrong result where it is wrong.

    steps: those that visit a wrong block. What is read of padding at others may well be harmless.
    """
    groups: dict[Any, list[Incident]] = collections.defaultdict(list)
    for incident in trace.incidents:
        if incident.kind in FATAL or (wrong and _matters(trace, incident)):
            groups[incident.kind, incident.ref].append(incident)
    for (kind, ref), group in groups.items():
        here = [i for i in group if i.step in steps] if kind == "padding" else []
        first, *others = here or group
        more = f"the same happens at {plural(len(others), 'more step')}, up to step {others[-1].step}" if others else ""
        if others and others[-1].step == first.step:
            more = f"the same happens {plural(len(others), 'more time')} at this step"
        operand = next((o for o in trace.call.operands if o.name == ref and o.index_map is not None), None)
        in_map = operand is not None and kind in ("map-bounds", "revisit")
        line = where_defined(operand.index_map) if in_map and operand else first.line
        near = [*callers_of(first.eqn)] if first.eqn is not None else []  # it may lie in something that was given
        near += lines_of(operand.index_map if in_map and operand else trace.call.kernel)
        cause = f"{at(trace, first.step)}: {_WORDS[kind](trace, first)}"
        maps = index_maps(trace) if in_map or line is None else []
        place = (line, first.step, first.at, ref, first.block)
        yield Finding(kind, cause, [more] if more else [], *place, maps, near=near)


def index_maps(trace: Trace) -> list[SourceLine]:
    """Where the index maps of a call are defined, outputs last."""
    lines = [where_defined(o.index_map) for o in trace.call.operands if o.index_map is not None]
    return [line for line in lines if line is not None]


def _matters(trace: Trace, i: Incident) -> bool:
    """A buffer that is carried from one output block to the next, and never stored into, is carried on purpose."""
    if i.kind != "carry":
        return i.kind in _WORDS
    last = i.step
    moves = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    while last + 1 < trace.n and all(trace.blocks[k][last + 1] == trace.blocks[k][i.step] for k in moves):
        last += 1
    return any(e.op == "store" and e.ref == i.ref and i.step <= e.step <= last for e in trace.events)


def _in_hbm(trace: Trace, i: Incident) -> str:
    verb, way = ("reads", "from HBM into VMEM") if i.kind == "hbm-load" else ("writes", "from VMEM out to HBM")
    return (
        f"the kernel {verb} {i.ref} directly, but {i.ref} is in HBM (memory_space=pl.ANY) and a kernel can only touch "
        f"VMEM and SMEM. Copy it {way} first, with pltpu.sync_copy or make_async_copy."
    )


def _hang(trace: Trace, i: Incident) -> str:
    needed, got = i.detail["needed"], i.detail["got"]
    what = f"{needed} on semaphore {i.ref}, whose count is {got}, and no signal is on its way"
    advice = "Signal it first (pl.semaphore_signal), or drop the wait."
    if i.detail["dma"]:
        flight = f"only {got} bytes are in flight" if got else "no copy that uses it is in flight"
        what = f"{needed} bytes on DMA semaphore {i.ref}, but {flight}"
        advice = "Call .start() on the copy before .wait(), and wait once per copy."
    return f"the kernel waits for {what}: on a TPU it never returns. {advice}"


def _unwaited(trace: Trace, i: Incident) -> str:
    if i.detail.get("out"):
        return (
            f"a copy out to {i.ref} is started but never waited for: the kernel may end before it has arrived. Wait "
            "once for each copy that you start, for the last ones at the end of the kernel."
        )
    return (
        f"a copy into {i.ref} is started but never waited for: what it brings is not used, or was read before it had "
        "arrived. Call .wait() on the copy before reading; where nobody needs it, do not start it."
    )


def _no_wait(trace: Trace, i: Incident) -> str:
    d = i.detail
    copy = "this copy" if d["started"] is None else f"the copy started at {d['started']}"
    advice = (
        "Wait for that copy first. If it brings the next tile, start it later, when this one has been read"
        if d["verb"] == "reads"
        else "Wait for that copy first"
    )
    return f"the kernel {d['verb']} {d['part']}, while {copy} still writes there: nobody has waited for it. {advice}."


def _copy_shape(trace: Trace, i: Incident) -> str:
    source, target = i.detail["shapes"]
    return f"this copy is from a part of shape {source} to one of shape {target}: both have to have the same shape."


def _reused(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"the kernel {d['verb']} {d['part']}, while the copy started at {d['started']} still reads it: nobody has "
        "waited for it, and it may copy the new values. If these are what it is for, start it later. If not, wait for "
        "it first."
    )


def _shared_semaphore(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"the kernel {d['verb']} {d['part']} after a wait on {d['semaphore']}, but the copy started at {d['started']} "
        f"may not have arrived: {d['others']} copies on their way use this semaphore. A semaphore "
        "counts bytes, and copies may arrive in any order, so the wait may have ended with another one. Start the next "
        "copy only after this wait, or give each slot a semaphore of its own."
    )


def _map_bounds(trace: Trace, i: Incident) -> str:
    o: Operand = i.detail["operand"]
    start, block = i.detail["start"], i.block or ()
    d = next(d for d, (s, size) in enumerate(zip(start, o.shape, strict=True)) if s < 0 or s >= size)
    head = (
        f"the index map of {o.name} returns block {block}, out of bounds: dimension {d} has "
        f"{plural(o.tiles[d], 'block')}, 0 to {o.tiles[d] - 1}."
    )
    if o.dims[d].kind == "blocked" and o.block[d] > 1 and block[d] % o.block[d] == 0 and block[d] > 0:
        return f"{head} An index map returns block indices, not element offsets: leave out the factor {o.block[d]}."
    computed = len(trace.flops) == trace.n and max(trace.flops, default=0) > 0 and not trace.flops[i.step]
    if computed:
        return f"{head} The kernel computes nothing at this step, but its blocks are copied all the same."
    return f"{head} The grid is {tuple(map(int, trace.call.grid))}."


def _ref_bounds(trace: Trace, i: Incident) -> str:
    d = i.detail
    what = f"index {d['first']}" if d["first"] == d["last"] else f"elements {d['first']} to {d['last']}"
    head = f"the kernel {d['verb']} {i.ref} at {what}, out of bounds: this dimension has {d['dim']} elements."
    operand = next((o for o in trace.call.operands if o.name == i.ref), None)
    if operand is not None and not operand.in_hbm:
        return f"{head} A blocked Ref is one block, and counts from the start of that block."
    return f"{head} Look at the start and the size of the slice."


def _unwritten(trace: Trace, i: Incident) -> str:
    scratch = i.ref in {s.name for s in trace.call.scratch}
    kind = "scratch memory" if scratch else "an output block"
    late = not is_first_step(trace, i.ref, i.step)  # whoever sets it may do that already
    before = f"No step before has stored anything there. Store in {i.ref} what the next step goes on from, or set"
    return (
        f"the kernel reads {i.count} elements of {i.ref} that nobody has written: {kind} starts out as garbage. "
        f"{f'{before} it' if late else f'Set {i.ref}'} to its starting value (0 for a sum, -inf for a maximum) "
        f"{first_step_test(trace, i.ref)}."
    )


def _stale(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    left = i.detail["left_at"]
    return (
        f"the kernel reads {i.ref} before storing anything in block {trace.blocks[k][i.step]}: the buffer still holds "
        f"what step {left} left there for block {trace.blocks[k][left]}. Set it to its starting value "
        f"{first_step_test(trace, i.ref)}, not only once."
    )


def _padding(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    return (
        f"{i.count} of the {i.total} elements that the kernel reads from {i.ref} lie beyond the edge of the array: "
        f"block {trace.blocks[k][i.step]} hangs over shape {trace.call.operands[k].shape}, and that padding holds "
        "garbage. Choose by position before it mixes with real data: jnp.where(position < size, x, 0) in a sum, with "
        "-jnp.inf before a maximum or exp. Multiplying by zero does not help: 0 times NaN is NaN."
    )


_WORDS: dict[str, Callable[[Trace, Incident], str]] = {
    "hbm-load": _in_hbm,
    "hbm-store": _in_hbm,
    "hang": _hang,
    "unwaited": _unwaited,
    "no-wait": _no_wait,
    "reused": _reused,
    "copy-shape": _copy_shape,
    "shared-semaphore": _shared_semaphore,
    "map-bounds": _map_bounds,
    "ref-bounds": _ref_bounds,
    "revisit": lambda trace, i: (
        f"output block {i.block} of {i.ref} is visited again, after it was left at step {i.detail['left_at']} and "
        "written back; on a TPU its earlier contents do not come back. All steps of an output block have to follow one "
        "another: make the axis that returns to the same block the last one of the grid."
    ),
    "unwritten": _unwritten,
    "stale": _stale,
    "carry": lambda trace, i: (
        f"the kernel reads {i.ref} as step {i.detail['left_at']} left it, and that step belonged to another output "
        "block. Scratch keeps its contents from step to step: set it to its starting value "
        f"{first_step_test(trace)}, not only once."
    ),
    "padding": _padding,
    "input-store": lambda trace, i: (
        f"the kernel stores into {i.ref}, which is an input: that changes the copy in VMEM and never reaches HBM. "
        "Store into the output Ref."
    ),
    "overflow": lambda trace, i: (
        f"exp of values up to {i.detail['largest']:.4g} overflows to infinity. In a softmax, subtract the maximum of "
        "each row, over all that has been read of it, before taking exp: the quotient stays the same. Elsewhere, write "
        "it with exp(-x), which is 0 where exp(x) is infinite."
    ),
    "born": lambda trace, i: f"{i.detail['what']}, in {i.count} of {i.total} elements; the operands were not NaN yet.",
}


def races(trace: Trace) -> Iterator[Finding]:
    """Output blocks that steps along a parallel axis share."""
    call = trace.call
    parallel = call.parallel_axes
    for d in sorted(set(parallel) & set(call.dynamic_axes)):
        cause = (
            f"grid axis {d} is as long as a value says, and marked 'parallel': which of its steps share a block is "
            f"data, too. Mark axis {d} 'arbitrary' in dimension_semantics."
        )
        yield Finding("race", cause, [], call.where, near=call.callers)
        parallel.remove(d)
    for k, o in enumerate(call.operands):
        if o.role != "out" or o.in_hbm or not parallel:
            continue
        writers: dict[Any, set[tuple[int, ...]]] = collections.defaultdict(set)
        for step, block in zip(trace.steps, trace.blocks[k], strict=True):
            writers[block].add(tuple(step[d] for d in parallel))
        block = next((b for b, w in writers.items() if len(w) > 1), None)
        if block is None:
            continue
        guilty = [d for p, d in enumerate(parallel) if len({w[p] for w in writers[block]}) > 1]
        axes = ", ".join(map(str, guilty))
        cause = (
            f"data race: grid axis {axes} is marked 'parallel', but {len(writers[block])} of its steps write the same "
            f"block {block} of {o.name}, and on two cores they would run at the same time. Mark axis {axes} "
            "'arbitrary' in dimension_semantics, or give each step its own block."
        )
        yield Finding("race", cause, [], call.where, operand=o.name, block=block, near=call.callers)
