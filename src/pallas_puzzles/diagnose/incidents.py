"""What the machine saw while the kernel ran, as findings: reads of garbage, hangs, races, blocks out of bounds."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.capture import (
    EXPONENTIALS,
    Operand,
    SourceLine,
    callers_of,
    filled_with,
    holds_exponential,
    holds_primitive,
    line_of,
    subprograms,
    where_defined,
    with_ref_names,
)
from ..ir.ops import is_floating
from ..lens.machine import Incident, Trace, listed, run_call, spans
from ..lens.program import (
    SAME_VALUE,
    after,
    asks_for,
    lines_of,
    made_by,
    one_number,
    producers,
    unscaled_sums,
)
from ..text import plural
from .findings import FATAL, Finding


def at(trace: Trace, step: int) -> str:
    """'step 4, grid index (1, 0)'."""
    index = tuple(int(i) for i in trace.steps[step]) if trace.n else ()
    return f"step {step}, grid index {index}" if index else "the only step"


def incidents_of(trace: Trace, wrong: bool, steps: frozenset[int]) -> Iterator[Finding]:
    """One finding per kind, ref and line; those that harm only a wrong result are left out of a right one."""
    groups: dict[Any, list[Incident]] = collections.OrderedDict()
    for incident in trace.incidents:
        groups.setdefault((incident.kind, incident.ref, id(incident.eqn)), []).append(incident)
    seen: set[tuple[str, str]] = set()
    harmless = _harmless_padding(trace, {ref for kind, ref, _ in groups if kind == "padding"}) if wrong else set()
    # what is NaN comes of a NaN: an inf may well be meant
    in_order = sorted(groups.items(), key=lambda item: item[0][0] == "born" and "NaN" not in item[1][0].detail["what"])
    for (kind, ref, _), group in in_order:
        if (kind not in FATAL and not wrong) or (kind == "padding" and ref in harmless):
            continue
        if (kind, ref) in seen or kind not in _EXPLAIN:
            continue
        if kind == "carry":
            group = [i for i in group if _grows_here(trace, i)]
            if not group:
                continue
        seen.add((kind, ref))
        if kind == "padding":  # elsewhere it may well be harmless
            group = [i for i in group if i.step in steps] or group
        first = group[0]
        cause = _explain_map_bounds(trace, first, wrong) if kind == "map-bounds" else _EXPLAIN[kind](trace, first)
        if cause:
            more = f"the same happens at {plural(len(group) - 1, 'more step')}, up to step {group[-1].step}"
            evidence = [more] if len(group) > 1 else []
            line = first.line or _map_line(trace, ref, kind)
            maps = index_maps(trace) if line is None or kind in ("map-bounds", "revisit") else []
            operand = next((o for o in trace.call.operands if o.name == ref and o.index_map is not None), None)
            in_map = operand is not None and kind == "map-bounds"
            near = callers_of(first.eqn) if first.eqn is not None else []  # it may lie in something that was given
            near += lines_of(operand.index_map if in_map and operand else trace.call.kernel)
            yield Finding(kind, cause, evidence, line, first.step, first.at, ref, first.block, maps, near=near)


def _harmless_padding(trace: Trace, refs: set[str]) -> set[str]:
    """Which of these Refs' padding has no say in the result: with zeros in its place, the same comes out."""

    def matters(clean: set[str]) -> bool:
        again = run_call(trace.call, detail=False, clean=frozenset(clean)).outputs
        return not all(
            np.array_equal(a, b, equal_nan=is_floating(a.dtype)) for a, b in zip(again, outputs, strict=True)
        )

    outputs = trace.outputs
    fills = [filled_with(e, producers(jaxpr)) for jaxpr, _ in with_ref_names(trace.call) for e in jaxpr.eqns]
    if any(fill is not None and (math.isnan(fill) or fill == math.inf) for fill in fills):
        return set()  # what a mask has put there is no better than garbage
    if not refs or not matters(refs):
        return refs
    guilty = {ref for ref in refs if matters({ref})} if len(refs) > 1 else refs
    return refs - guilty if guilty else set()


def _grows_here(trace: Trace, i: Incident) -> bool:
    """Whether the visit in which a buffer is read also stores into it. One that is only read is carried on purpose."""
    last = i.step
    moves = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    while last + 1 < trace.n and all(trace.blocks[k][last + 1] == trace.blocks[k][i.step] for k in moves):
        last += 1
    return any(e.op == "store" and e.ref == i.ref and i.step <= e.step <= last for e in trace.events)


def index_maps(trace: Trace) -> list[SourceLine]:
    """Where the index maps of a call are defined, outputs last."""
    lines = [where_defined(o.index_map) for o in trace.call.operands if o.index_map is not None]
    return [line for line in lines if line is not None]


def _map_line(trace: Trace, ref: str, kind: str) -> SourceLine | None:
    operand = next((o for o in trace.call.operands if o.name == ref), None)
    if operand is None or operand.index_map is None or kind not in ("map-bounds", "revisit"):
        return None
    return where_defined(operand.index_map)


def still_axes(trace: Trace, k: int) -> list[int]:
    """The grid axes along which the block of operand k does not change: those it is revisited or reduced over."""
    grid, blocks = trace.call.grid, trace.blocks[k]
    by_step = dict(zip(trace.steps, blocks, strict=True))
    axes = []
    for d, size in enumerate(grid):
        if size < 2 or d in trace.call.vmapped:
            continue
        if all(by_step[s] == by_step[(*s[:d], 0, *s[d + 1 :])] for s in trace.steps):
            axes.append(d)
    return axes


def _reduction_axes(trace: Trace) -> list[int]:
    """Grid axes that every pipelined output stays put on, as program_id counts them."""
    outs = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    shared = set.intersection(*(set(still_axes(trace, k)) for k in outs)) if outs else set()
    return _own_axes(trace, shared)


def _own_axes(trace: Trace, axes: Iterable[int]) -> list[int]:
    """Grid axes as program_id counts them."""
    own = [d for d in range(len(trace.call.grid)) if d not in trace.call.vmapped]
    return sorted(own.index(d) for d in axes)


def first_step_test(trace: Trace, ref: str = "") -> str:
    """When a buffer is to be set: an output by the steps that it stays for, scratch by those of all outputs."""
    own = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and o.name == ref and not o.in_hbm]
    axes = _own_axes(trace, still_axes(trace, own[0])) if own else _reduction_axes(trace)
    looked_up = {} if axes and not own else _looked_up(trace)
    told = looked_up.get(ref, "") if own else next(iter(looked_up.values()), "")
    if told:
        return f"on the first step of every output block: where {told} differs from that of the step before"
    if not axes:
        return "before the first read"
    tests = " & ".join(f"(pl.program_id({d}) == 0)" if len(axes) > 1 else f"pl.program_id({d}) == 0" for d in axes)
    return f"on the first step of every output block: @pl.when({tests}), or jnp.where with this condition"


def _looked_up(trace: Trace) -> dict[str, str]:
    """Outputs whose block is data, and the number that says which: 'ids_ref[...]', as their index map looks it up."""
    looked_up = {o.name: _prefetched(trace, o) for o in trace.call.outs if o.index_map is not None}
    return {name: f"{refs[0]}[...]" for name, refs in looked_up.items() if refs}


def _prefetched(trace: Trace, o: Operand) -> list[str]:
    """The prefetched Refs, as the kernel calls them, that an operand's index map looks numbers up in."""
    call, program = trace.call, getattr(o.index_map, "jaxpr", o.index_map)
    names = dict(zip(program.invars[len(call.grid) :], call.scalar_names, strict=False))
    found = [names.get(e.invars[0]) for e in program.eqns if e.primitive.name == "get"]
    return list(dict.fromkeys(name for name in found if name))


def _starting_values(trace: Trace) -> str:
    maximum = holds_primitive(trace.call.kernel, "reduce_max")
    return "(zero for a sum, -inf for a maximum)" if maximum else "(zero, for a sum)"


def _explain_hbm(trace: Trace, i: Incident) -> str:
    verb, way = ("reads", "from HBM into VMEM") if i.kind == "hbm-load" else ("writes", "from VMEM out to HBM")
    return (
        f"{at(trace, i.step)}: the kernel {verb} {i.ref} directly, but {i.ref} lives in HBM (memory_space=pl.ANY) and "
        f"a kernel can only touch VMEM and SMEM. Copy it {way} first, with pltpu.sync_copy or make_async_copy."
    )


def _explain_hang(trace: Trace, i: Incident) -> str:
    d = i.detail
    if d["dma"]:
        flight = "no copy that uses it is in flight" if not d["got"] else f"only {d['got']} bytes are in flight"
        return (
            f"{at(trace, i.step)}: the kernel waits for {d['needed']} bytes on DMA semaphore {i.ref}, but {flight}: "
            "on a "
            "TPU it waits for ever. Call .start() on the copy before .wait(), and wait once per copy."
        )
    return (
        f"{at(trace, i.step)}: the kernel waits for {d['needed']} on semaphore {i.ref}, whose count is {d['got']}, and "
        "nobody will signal it: on a TPU it waits for ever. Signal it first (pl.semaphore_signal), or drop the wait."
    )


def _explain_unwaited(trace: Trace, i: Incident) -> str:
    return (
        f"{i.count} copy into {i.ref} is started but never waited for: what the kernel reads from {i.ref} is what was "
        "there before. Call .wait() on the copy before reading."
    )


def _axis_range(o: Operand, start: Sequence[int], d: int) -> str:
    return f"elements {start[d]} to {start[d] + o.block[d] - 1} of {o.shape[d]}"


def _explain_map_bounds(trace: Trace, i: Incident, wrong: bool = True) -> str:
    o: Operand = i.detail["operand"]
    start, block = i.detail["start"], i.block or ()
    d = next(d for d, (s, size) in enumerate(zip(start, o.shape, strict=True)) if s < 0 or s >= size)
    head = (
        f"{at(trace, i.step)}: the index map of {o.name} returns block {block}, out of bounds: along dimension {d} "
        "that "
        f"is {_axis_range(o, start, d)}, where the block indices run from 0 to {o.tiles[d] - 1}. "
    )
    if o.dims[d].kind == "blocked" and o.block[d] > 1 and block[d] % o.block[d] == 0 and block[d] > 0:
        return head + f"An index map returns block indices, not element offsets: leave out the factor {o.block[d]}."
    if block[d] == o.tiles[d] and len(trace.call.grid) == 1 and trace.n > math.prod(o.tiles):
        return head + f"The grid is longer than the array: it has {plural(o.tiles[d], 'block')} along this dimension."
    why = ("" if wrong else _idle_there(trace, o)) or _turned(trace, o) or _shifted(trace, o, d)
    if why:
        return head + why
    names = trace.call.scalar_names
    refs = _prefetched(trace, o) if names else []
    if names and not refs:
        return head + f"The map looks nothing up: a number that is data is in what was prefetched, {listed(names)}."
    given = _grid_index(trace, o, d) if refs else ""
    if given:
        return f"{head}The map returns {given}, there: which grid index counts blocks along this dimension?"
    if refs:
        return head + (
            f"The map looks up {listed(refs)}, by the name that the kernel has for it; prefetched are {listed(names)}. "
            "Is it the right one, and by the right grid index?"
        )
    return head + (
        _on_its_side(o)
        or _other_axis(trace, o, d)
        or "Look at what the index map returns, and at the order and the size of the grid's axes."
    )


def _astray(trace: Trace, o: Operand) -> tuple[list[Any], list[int]]:
    """The block of an operand at each step, and the steps at which it lies outside of the array."""
    blocks = trace.blocks[trace.call.operands.index(o)]
    return blocks, [s for s, b in enumerate(blocks) if not all(0 <= x < n for x, n in zip(b, o.tiles, strict=True))]


def _idle_there(trace: Trace, o: Operand) -> str:
    """Blocks that are asked for only at steps that compute nothing."""
    _, steps = _astray(trace, o)
    if not steps or len(trace.flops) < trace.n or max(trace.flops) == 0 or any(trace.flops[s] for s in steps):
        return ""
    return (
        "The kernel computes nothing at such a step, but the map is asked at every step, and what it returns is "
        "copied: have it return a block that is there, best the one before, which need not be copied again "
        "(jnp.minimum, jnp.maximum)."
    )


def _turned(trace: Trace, o: Operand) -> str:
    """Two dimensions of a block index that have changed places."""
    blocks, steps = _astray(trace, o)
    everything = math.prod(o.tiles)
    for a, b in itertools.combinations(range(len(o.tiles)), 2) if steps and everything > 1 else ():
        turned = [(*x[:a], x[b], *x[a + 1 : b], x[a], *x[b + 1 :]) for x in blocks]
        inside = all(0 <= i < n for x in turned for i, n in zip(x, o.tiles, strict=True))
        if inside and len(set(turned)) == everything:
            return (
                f"Two of its numbers have changed places: with {turned[steps[0]]} in the place of "
                f"{tuple(blocks[steps[0]])}, and so at every step, all the blocks that {o.name} has would come in, and "
                "no others."
            )
    return ""


def _shifted(trace: Trace, o: Operand, d: int) -> str:
    """Block indices that run through as many numbers as there are blocks, and are all off by one and the same."""
    mine = sorted({b[d] for b in trace.blocks[trace.call.operands.index(o)]})
    if len(mine) < 2 or mine != list(range(mine[0], mine[0] + o.tiles[d])):
        return ""
    first, last = mine[0], mine[-1]
    if last == -1:
        return (
            f"In the course of the grid it returns {last} to {first}: negative indices do not count from the end here."
        )
    off = f"{abs(first)} too {'large' if first > 0 else 'small'}"
    return f"In the course of the grid it returns {first} to {last}: each is {off}."


def _other_axis(trace: Trace, o: Operand, d: int) -> str:
    """What belongs there instead of a grid index that runs too far: 0, or the one grid index that fits."""
    given = _grid_index(trace, o, d)
    if o.tiles[d] == 1:
        instead = f", where it returns {given}" if given else ""
        return f"There is one block along this dimension: the map has to return 0{instead}."
    program = getattr(o.index_map, "jaxpr", o.index_map)
    fit = [
        axis
        for axis, size in enumerate(trace.call.grid)
        if size == o.tiles[d] and program.invars[axis] not in [v for v in program.outvars if not hasattr(v, "val")]
    ]
    if not given or len(fit) != 1:
        return ""
    other = _axis_named(trace, program, fit[0])
    return f"The map returns {given}, there. It is {other}, that counts as far as there are blocks: is that one meant?"


def _grid_index(trace: Trace, o: Operand, d: int) -> str:
    """'grid index 0, j', where that is what an index map returns for a dimension, as it is."""
    program = getattr(o.index_map, "jaxpr", o.index_map)
    made, v = {v: e for e in program.eqns for v in e.outvars}, program.outvars[d]
    while not hasattr(v, "val") and v in made and made[v].primitive.name == "convert_element_type":
        v = made[v].invars[0]
    axes = program.invars[: len(trace.call.grid)]
    if hasattr(v, "val") or v not in axes or trace.call.vmapped:
        return ""
    return _axis_named(trace, program, axes.index(v))


def _axis_named(trace: Trace, program: Any, axis: int) -> str:
    names = getattr(program.debug_info, "arg_names", None) or ()  # seen on jax 0.11.2 and 0.12.0.1
    name = f", {names[axis]}," if axis < len(names) and str(names[axis]).isidentifier() else ""
    return f"grid index {axis}{name} of {trace.call.grid[axis]} steps"


def _on_its_side(o: Operand) -> str:
    """Blocks that do not fit into an array, and would if their two sides changed places."""
    turned = o.block[::-1]
    if len(o.block) != 2 or any(n % b for n, b in zip(o.shape, turned, strict=True)):
        return ""
    if not any(n % b for n, b in zip(o.shape, o.block, strict=True)):
        return ""
    return (
        f"Blocks of {o.block} do not fit into {o.shape}, and blocks of {turned} would: in the BlockSpec of {o.name}, "
        "rows and columns look exchanged."
    )


def _explain_ref_bounds(trace: Trace, i: Incident) -> str:
    d = i.detail
    what = f"index {d['first']}" if d["first"] == d["last"] else f"elements {d['first']} to {d['last']}"
    head = (
        f"{at(trace, i.step)}: the kernel {d['verb']} {i.ref} at {what}, out of bounds: this dimension of the Ref has "
        f"{d['dim']} elements. "
    )
    operand = next((o for o in trace.call.operands if o.name == i.ref), None)
    if i.ref in trace.call.scalar_names and d["first"] == d["last"]:
        head += (
            "The index is computed, and comes out below 0 at this step: keep it at 0 or above, with jnp.maximum."
            if d["first"] < 0
            else f"{i.ref} has shape {trace.call.scalars[trace.call.scalar_names.index(i.ref)].shape}: are the indices "
            "in the order of its dimensions, and does the step belong to it?"
        )
    elif d["first"] == d["last"] < 0 and -d["first"] <= d["dim"]:
        head += f"A Ref does not count from the end: write {d['dim'] + d['first']} instead of {d['first']}."
    elif operand is not None and not operand.in_hbm:
        head += (
            "A blocked Ref is one block and counts from its own start: the index map has already chosen which block, "
            "so no offset is to be added."
        )
    else:
        head += "Look at the start and the size of the slice."
    return head


def _explain_revisit(trace: Trace, i: Incident) -> str:
    left = i.detail["left_at"]
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    first = left
    while first and trace.blocks[k][first - 1] == i.block:
        first -= 1
    if not any(e.op == "store" and e.ref == i.ref and first <= e.step <= left for e in trace.events):
        return (
            f"{at(trace, first)}: output block {i.block} of {i.ref} is in VMEM, nothing is stored in it before it "
            f"leaves at {at(trace, left)}, and so garbage is written to HBM; at {at(trace, i.step)} it comes a second "
            f"time. An output block leaves whenever its number changes: {_until_it_is_stored(trace, k)}"
        )
    axes = _reduction_axes(trace)
    axis = f" (grid axis {axes[0]})" if axes else ""
    return (
        f"{at(trace, i.step)}: output block {i.block} of {i.ref} is visited again, after it was left at step "
        f"{i.detail['left_at']} and written back; on a TPU its earlier contents do not come back. Make the axis{axis} "
        "that returns to the same block the last one of the grid, so that all its steps follow each other."
    )


def _until_it_is_stored(trace: Trace, k: int) -> str:
    """What to do about an output block that comes and goes before there is anything to store."""
    axes = _reduction_axes(trace)
    block = tuple(b for b in trace.call.operands[k].block if b != 1)
    sums = [s.name for s in trace.call.scratch if tuple(b for b in s.shape if b != 1) == block]
    if not axes or not sums:
        return "let the index map stay on one block as long as there is nothing to store."
    return (
        f"while {sums[0]} holds a sum for it, it has to stay. Make grid axis {axes[0]}, along which the sum runs, the "
        "last one of the grid."
    )


def _explain_unwritten(trace: Trace, i: Incident) -> str:
    kind = "scratch memory" if i.ref in {s.name for s in trace.call.scratch} else "an output block"
    if not any(o.name == i.ref for o in trace.call.outs) and kind == "an output block":
        kind = "scoped memory"
    copying = any(p.kind == "unwaited" and p.ref == i.ref for p in trace.incidents)
    if copying:
        return ""
    multiplied = _multiplied_by_a_condition(trace, i.ref)
    if kind == "scratch memory" and not any(e.ref == i.ref and e.op != "load" for e in trace.events):
        return (
            f"{at(trace, i.step)}: the kernel reads {i.count} elements of {i.ref} that nobody has written: {kind} "
            f"starts out as garbage, and nothing is ever stored into {i.ref}. What a step computes is lost to the "
            f"next, unless it is kept: {i.ref}[...] = value."
        )
    return (
        f"{at(trace, i.step)}: the kernel reads {i.count} elements of {i.ref} that nobody has written: {kind} starts "
        f"out as garbage. {multiplied}Set {i.ref} to its starting value {_starting_values(trace)} "
        f"{first_step_test(trace, i.ref)}."
    )


def _multiplied_by_a_condition(trace: Trace, ref: str) -> str:
    """What to say when what is read is multiplied by a comparison, 0 or 1, in place of a choice."""
    for jaxpr, names in with_ref_names(trace.call):
        made = producers(jaxpr)
        for e in (e for e in jaxpr.eqns if e.primitive.name == "mul"):
            for v, other in (e.invars, e.invars[::-1]):
                source = None if hasattr(v, "val") else made_by(made, v, SAME_VALUE)
                read = source is not None and source.primitive.name == "get" and names[source.invars[0]] == ref
                if read and asks_for(made, other, _ORDERED | {"eq", "ne"}):
                    return (
                        f"Multiplied by 0 ({line_of(e)}), NaN is NaN: jnp.where chooses, and lets none of it through. "
                    )
    return ""


def _explain_stale(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    here, before = trace.blocks[k][i.step], trace.blocks[k][i.detail["left_at"]]
    return (
        f"{at(trace, i.step)}: the kernel reads {i.ref} before storing anything in block {here}: the buffer still "
        "holds "
        f"what step {i.detail['left_at']} left there for block {before}. Set it to its starting value "
        f"{_starting_values(trace)} {first_step_test(trace, i.ref)}, not only once."
    )


def _explain_carry(trace: Trace, i: Incident) -> str:
    gathered = _gathered_before(trace, i)
    if gathered:
        return (
            f"{at(trace, i.step)}: {i.ref} is complete after steps {spans(gathered)}, and is changed again here, where "
            "a result is stored from it: the results of one sweep are measured with different numbers. Guard the "
            "update with @pl.when, so that it runs in the sweep that gathers and in no other."
        )
    return (
        f"{at(trace, i.step)}: the kernel reads {i.ref} as step {i.detail['left_at']} left it, and that step "
        "belonged to "
        f"another output block. Scratch keeps its contents from step to step: set it to its starting value "
        f"{_starting_values(trace)} {first_step_test(trace)}, not only once."
    )


def _gathered_before(trace: Trace, i: Incident) -> list[int]:
    """The steps that only gather in a buffer, when it is updated once more at a step that stores a result from it."""

    def steps(op: str, names: set[str], first: int = 0) -> set[int]:
        return {e.step for e in trace.events if e.op == op and e.ref in names and first <= e.step <= i.step}

    outs = {o.name for o in trace.call.outs}
    loads = {(e.step, e.ref): n for n, e in reversed(list(enumerate(trace.events))) if e.op == "load"}
    sets = [
        e.step
        for n, e in enumerate(trace.events)
        if e.op == "store" and e.ref == i.ref and e.whole and e.step <= i.step and n < loads.get((e.step, e.ref), n + 1)
    ]
    if not sets or _reduction_axes(trace):
        return []
    updated, results = steps("store", {i.ref}, sets[-1]), steps("store", outs, sets[-1])
    if i.step not in updated & results or not results <= updated:
        return []
    return sorted(s for s in updated if s < min(results))


def _explain_padding(trace: Trace, i: Incident) -> str:
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    o = trace.call.operands[k]
    told = _way_past_the_mask(trace, i)
    masked = told or (
        "some of it passes the mask: the mask must be true for the positions of real data, counted in the whole array,"
    )
    masked += "" if told else " and for no others."
    if not told and not masks_by_position(trace):
        masked = (
            "mask it before it mixes with real data, with jnp.where(position < size, x, 0); multiplying by zero leaves "
            "NaN NaN."
        )
        masked = _on_its_side(o) or masked
    return (
        f"{at(trace, i.step)}: {i.count} of the {i.total} elements that the kernel reads from {i.ref} lie beyond the "
        "edge "
        f"of the array: block {trace.blocks[k][i.step]} hangs over shape {o.shape}, and that padding holds garbage. "
        f"{masked[0].upper()}{masked[1:]}"
    )


_REACHED = {"reduce_max": "a maximum", "reduce_sum": "a sum", "dot_general": "a matrix product"}


_REACHED |= {name: name for name in EXPONENTIALS}


_ORDERED = frozenset("lt le gt ge".split())


def _way_past_the_mask(trace: Trace, i: Incident) -> str:
    """How padding gets past a mask by position, or what comes of a right one; "" where neither is plain."""
    raw: list[tuple[Any, Any]] = []
    chosen: list[tuple[Any, Any]] = []
    for jaxpr, names in with_ref_names(trace.call):
        made = producers(jaxpr)
        held = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "get" and names[e.invars[0]] == i.ref}
        for e in jaxpr.eqns:
            mine = [n for n, v in enumerate(e.invars) if not hasattr(v, "val") and v in held]
            if not mine:
                continue
            if e.primitive.name in SAME_VALUE - {"select_n"}:
                held |= set(e.outvars)
            elif e.primitive.name == "select_n" or e.params.get("name") == "_where":
                chosen += [(jaxpr, e)] if asks_for(made, e.invars[0], _ORDERED) else []
            elif any(asks_for(made, v, _ORDERED) for n, v in enumerate(e.invars) if n not in mine):
                word = {"mul": "multiplied by", "add": "added to", "sub": "added to"}.get(e.primitive.name)
                if word and not chosen:
                    return _MASK_BY_ARITHMETIC.format(word, line_of(e))
            else:
                raw.append((jaxpr, e))
    return _unmasked_use(trace, i, raw, chosen)


_MASK_BY_ARITHMETIC = (
    "the mask is {} it ({}), and that does not remove it: NaN times anything is NaN, and so is NaN plus anything. "
    "Choose instead: jnp.where(position < size, x, what the reduction does not notice)."
)


def _summed_in_product(trace: Trace, i: Incident, eqn: Any) -> bool | None:
    """Whether a matrix product of a Ref sums over the dimension that hangs over the edge; None: no such product."""
    k = next(k for k, o in enumerate(trace.call.operands) if o.name == i.ref)
    o, block = trace.call.operands[k], trace.blocks[k][i.step]
    kept = [d for d, dim in enumerate(o.dims) if dim.kind != "squeezed"]
    over = {n for n, d in enumerate(kept) if (block[d] + 1) * o.block[d] > o.shape[d]}
    if eqn.primitive.name != "dot_general" or len(kept) != len(o.ref_shape):
        return None
    for v, dims in zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=True):
        if getattr(v.aval, "shape", None) == o.ref_shape and over & set(dims):
            return True
    return False


def _unmasked_use(trace: Trace, i: Incident, raw: list[tuple[Any, Any]], chosen: list[tuple[Any, Any]]) -> str:
    """What to say of padding by the equations that use it as it is, and those that choose by position."""
    maximum = holds_primitive(trace.call.kernel, "reduce_max")
    fill = "-inf" if maximum else "0"
    for jaxpr, eqn in reversed(raw):
        what = next((_REACHED[e.primitive.name] for e in after(jaxpr, eqn) if e.primitive.name in _REACHED), "")
        if what and chosen:
            return (
                f"a mask is there ({line_of(chosen[0][1])}), but what goes into {what} ({line_of(eqn)}) is what was "
                "read, without it: go on with what jnp.where returns, and with nothing else."
            )
        summed = _summed_in_product(trace, i, eqn)
        if summed:
            return (
                f"it goes into the sum of a matrix product ({line_of(eqn)}), and 0 times NaN is NaN: that the other "
                "factor is 0 there does not keep it out. Replace it by 0 first, with jnp.where(position < size, x, 0)."
            )
        if what and maximum and summed is False:
            return (
                f"a matrix product ({line_of(eqn)}) makes whole rows or columns of garbage of it, and no mask by "
                "position stands between them and the maximum: replace them, with jnp.where(position < size, product, "
                "-inf)."
            )
        kept = _multiplied_by_masked(jaxpr, eqn)
        if kept is not None:
            return (
                f"it makes columns of NaN in a matrix product ({line_of(eqn)}), and what comes of that is multiplied "
                f"({line_of(kept)}) by numbers that a mask has set to 0: 0 times NaN is NaN. Choose once more, last: "
                "jnp.where(seen, product, 0)."
            )
        if what and maximum:
            return (
                f"no mask by position keeps it out of {what} ({line_of(eqn)}): replace it before it mixes with real "
                f"data, with jnp.where(position < size, x, {fill})."
            )
    for jaxpr, eqn in [] if raw else chosen:
        value = filled_with(eqn, producers(jaxpr))
        if value is not None and (math.isnan(value) or value == math.inf):
            stays = "NaN stays NaN in whatever it goes into"
            why = stays if math.isnan(value) else "it is the maximum of every row that it is in"
            return (
                f"the mask ({line_of(eqn)}) puts {value:g} in its place, and {why}. Fill with {fill}"
                f"{': no maximum notices it, and exp(-inf) is 0' if maximum else ', which no sum notices'}."
            )
    return ""


def _multiplied_by_masked(jaxpr: Any, first: Any) -> Any:
    """A product of what depends on an equation with what a jnp.where returns, when no jnp.where chooses from it."""
    made, later = producers(jaxpr), list(after(jaxpr, first))
    results = {v for e in later for v in e.outvars}
    for e in (e for e in later if e.primitive.name == "mul"):
        others = [made.get(v) for v in e.invars if not hasattr(v, "val") and v not in results]
        masked = any(o is not None and _chooses(o) for o in others)
        chosen = any(_chooses(u) and set(e.outvars) & {v for v in u.invars if not hasattr(v, "val")} for u in later)
        if masked and not chosen:
            return e
    return None


def _chooses(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "select_n" or eqn.params.get("name") == "_where")


def masks_by_position(trace: Trace) -> bool:
    """Whether the kernel chooses element by element (jnp.where), by a comparison of more than one number."""
    for jaxpr, _ in with_ref_names(trace.call):
        for e in jaxpr.eqns:
            chooses = e.primitive.name == "select_n" or e.params.get("name") == "_where"
            if chooses and e.invars[0].aval.shape and not one_number(producers(jaxpr), e.invars[0]):
                return True
    return False


def _explain_input_store(trace: Trace, i: Incident) -> str:
    return (
        f"{at(trace, i.step)}: the kernel stores into {i.ref}, which is an input: that changes the copy in VMEM and "
        "never "
        "reaches HBM. Store into the output Ref."
    )


def _explain_overflow(trace: Trace, i: Incident) -> str:
    head = f"{at(trace, i.step)}: exp of values up to {i.detail['largest']:.4g} overflows to infinity. "
    if i.detail.get("maxima"):
        return head + (
            "What is subtracted before is not the largest value: subtract the maximum of each row, over all that has "
            "been read of it, and nothing above 0 is left."
        )
    return head + "Subtract the maximum before taking exp: the quotient stays the same."


def _explain_exp_positive(trace: Trace, i: Incident) -> str:
    return (
        f"{at(trace, i.step)}: exp gets values up to {i.detail['largest']:.4g}. With the maximum subtracted none is "
        "above 0: x - maximum, and in a rescaling old maximum - new maximum, where the maximum is that of all that has "
        "been read so far."
    )


def _explain_born(trace: Trace, i: Incident) -> str:
    what = i.detail["what"]
    head = f"{at(trace, i.step)}: {what}, in {i.count} of {i.total} elements; the operands were not NaN yet. "
    if "0 / 0" in what and holds_exponential(trace.call.kernel):
        masked = " Or all that these rows see is masked: then divide by jnp.where(sum == 0, 1, sum)."
        vanished = "All the exponentials of these rows vanished: subtract each row's own maximum before exp."
        return head + vanished + (masked if holds_primitive(trace.call.kernel, "iota") else "")
    if "inf - inf" in what and holds_primitive(trace.call.kernel, "reduce_max"):
        return head + (
            "Of a row of which all is masked so far the maximum is -inf, too, and -inf - (-inf) is NaN: keep what is "
            "subtracted finite. A running maximum may start from the most negative finite number as well."
        )
    if "log(0)" in what and holds_exponential(trace.call.kernel):
        return head + "An exponential vanished before its log was taken: log(exp(a) / b) is a - log(b)."
    started = _infinite_start(trace, i) if "times infinity" in what else ""
    return head + (started or "A factor of 0 removes no infinity: choose with jnp.where, behind the product.")


def _infinite_start(trace: Trace, i: Incident) -> str:
    """Where an infinite factor comes from, when it was read from a Ref."""
    for jaxpr, names in with_ref_names(trace.call):
        if not any(e is i.eqn for e in jaxpr.eqns):
            continue
        made = producers(jaxpr)
        for n in i.detail["infinite"]:
            source = made_by(made, i.eqn.invars[n], SAME_VALUE)
            if source is None or source.primitive.name != "get":
                continue
            ref = names[source.invars[0]]
            maxima = [e for e in jaxpr.eqns if e.primitive.name == "max"]
            if any(made_by(made, v, SAME_VALUE) is source for e in maxima for v in e.invars):
                return (
                    f"The infinite factor is the maximum in {ref} itself. A rescaling is an exponential: exp(old "
                    "maximum - new maximum), which is 0 as long as the old one is -inf."
                )
            return f"The infinite factor was read from {ref}. A sum starts from 0: adding 0 changes nothing."
    return ""


def _explain_max_fill(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"{at(trace, i.step)}: a mask has put {d['fill']:g} in the place of what is not real, and in {i.count} rows "
        f"that is the maximum; all real values there lie below (the highest at {d['high']:.4g}). {d['fill']:g} is a "
        "value like any other. Fill with -inf: no maximum notices it, and exp(-inf) is 0."
    )


def _explain_max_start(trace: Trace, i: Incident) -> str:
    d = i.detail
    return (
        f"{at(trace, i.step)}: the maximum in {i.ref} starts from {d['start']:.4g}, and {i.count} of {i.total} maxima "
        f"of the data lie below (the lowest at {d['low']:.4g}): there it is never the maximum of the data. Start from "
        "-inf (jnp.full(shape, -jnp.inf)), which every number exceeds."
    )


_EXPLAIN: dict[str, Callable[[Trace, Incident], str]] = {
    "hbm-load": _explain_hbm,
    "hbm-store": _explain_hbm,
    "hang": _explain_hang,
    "unwaited": _explain_unwaited,
    "map-bounds": _explain_map_bounds,
    "ref-bounds": _explain_ref_bounds,
    "revisit": _explain_revisit,
    "unwritten": _explain_unwritten,
    "stale": _explain_stale,
    "carry": _explain_carry,
    "padding": _explain_padding,
    "input-store": _explain_input_store,
    "overflow": _explain_overflow,
    "exp-positive": _explain_exp_positive,
    "born": _explain_born,
    "max-start": _explain_max_start,
    "max-fill": _explain_max_fill,
}


def unscaled(trace: Trace) -> Iterator[Finding]:
    """Sums of exponentials that grow while the maximum they are measured against does, and are not rescaled."""
    seen = set()
    for jaxpr, names in with_ref_names(trace.call):
        for total, maximum, eqn, reread in unscaled_sums(jaxpr, names):
            grown = sorted({e.step for e in trace.events if e.op == "store" and e.ref == total and e.eqn is eqn})
            if total in seen or len(grown) < 2:
                continue
            seen.add(total)
            why = (
                f"the factor that is to mend it is made of two numbers read after {maximum} was overwritten, so it is "
                f"exp(0) = 1. Read the old maximum before you store the new one."
                if reread
                else "multiply what it holds by exp(old maximum - new maximum), and only then add."
            )
            cause = (
                f"{total} adds up exponentials while the maximum in {maximum} is still growing: at "
                f"{at(trace, grown[1])}, what it holds was measured against an older maximum than what is added; {why}"
            )
            yield Finding("no-rescale", cause, [], line_of(eqn), grown[1], trace.steps[grown[1]], total)


def crossed_lookups(trace: Trace) -> Iterator[Finding]:
    """A prefetched Ref that the kernel indexes by one axis of the grid, and the index maps by another."""
    call = trace.call
    if not call.scalar_names or call.vmapped:
        return
    in_maps: dict[str, set[int]] = collections.defaultdict(set)
    for o in (o for o in call.operands if o.index_map is not None):
        program = getattr(o.index_map, "jaxpr", o.index_map)
        axes = {v: (d, None) for d, v in enumerate(program.invars[: len(call.grid)])}
        refs = dict(zip(program.invars[len(call.grid) :], call.scalar_names, strict=False))
        for name, axis, _ in _lookups(program, {**axes, **refs}):
            in_maps[name].add(axis)
    in_kernel: dict[str, list[tuple[int, Any]]] = collections.defaultdict(list)
    for name, axis, eqn in _lookups(call.kernel, dict(zip(call.kernel.invars, call.scalar_names, strict=False))):
        in_kernel[name].append((axis, eqn))
    for name, uses in in_kernel.items():
        axis, eqn = uses[0]
        if in_maps[name] and not in_maps[name] & {used for used, _ in uses}:
            (right, *_) = sorted(in_maps[name])
            cause = (
                f"the kernel looks {name} up by pl.program_id({axis}), the index maps by grid index {right}: what it "
                f"finds there belongs to another step. The grid is {tuple(map(int, call.grid))}; count its axes from 0."
            )
            yield Finding("crossed-lookup", cause, [], line_of(eqn), operand=name)
            return


def _lookups(jaxpr: Any, known: dict[Any, Any]) -> Iterator[tuple[str, int, Any]]:
    """(Ref, grid axis, where the program id was asked for) wherever a Ref is indexed by a program id as it is.

    known: variable -> the name of a Ref, or (the axis of a grid index, None).
    """
    known = dict(known)
    for e in jaxpr.eqns:
        if e.primitive.name == "program_id":
            known[e.outvars[0]] = (e.params["axis"], e)
        found = [known.get(v) if not hasattr(v, "val") else None for v in e.invars]
        if e.primitive.name == "get" and isinstance(found[0], str):
            yield from ((found[0], *by) for by in found[1:] if isinstance(by, tuple))
        for inner in (getattr(p, "jaxpr", p) for p in subprograms(e)):
            passed = found[len(e.invars) - len(inner.invars) :]  # a cond has its predicate first
            inside = {v: f for v, f in zip(inner.invars, passed, strict=False) if f is not None}
            yield from _lookups(inner, inside)


def races(trace: Trace) -> Iterator[Finding]:
    call = trace.call
    parallel = [d for d, s in enumerate(call.semantics) if "parallel" in s and d not in call.vmapped]
    for d in sorted(set(parallel) & set(call.dynamic_axes)):
        cause = (
            f"grid axis {d} is as long as a value says, and marked 'parallel': JAX's simulator cannot run that, and "
            f"which of its steps share a block is data, too. Mark axis {d} 'arbitrary' in dimension_semantics."
        )
        yield Finding("race", cause, [], call.where)
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
            f"data race: grid axis {axes} is marked 'parallel', but {len(writers[block])} of its steps write the "
            "same block "
            f"{block} of {o.name}, and on two cores they would run at the same time. Mark axis {axes} 'arbitrary' in "
            "dimension_semantics, or give each step its own block."
        )
        yield Finding("race", cause, [], call.where, operand=o.name, block=block)
