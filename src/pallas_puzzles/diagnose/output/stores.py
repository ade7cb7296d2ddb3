"""Blocks that were not stored, not read, or lost again."""

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...ir.capture import callers_of, holds_primitive, line_of, where_defined, with_ref_names
from ...ir.ops import is_floating
from ...lens.machine import Event, history, listed, spans
from ...lens.program import block_products, guarding_axes, store_into
from ...text import plural
from ..findings import Block, Finding
from ..incidents import at, first_step_test, still_axes
from .base import WrongOutput, joined, named_blocks, verb


class Stores(WrongOutput):
    """Blocks that were not stored, and values that a later store or a reset has lost."""

    def _missing(self, wrong: dict[Block, tuple[Any, ...]]) -> Iterator[Finding]:
        groups = collections.defaultdict(list)
        for tile, status in wrong.items():
            groups[status[0]].append(tile)
        if groups["unvisited"]:
            yield self._unvisited(groups["unvisited"])
        stored = any(e.op != "load" and e.ref == self.o.name for e in self.trace.events)
        if not stored and not self.o.in_hbm and self.trace.n:
            yield self._never_stored()
            return
        if groups["never stored"] or groups["left over"]:
            yield self._sometimes_stored(sorted(groups["never stored"] + groups["left over"]))
        if groups["partly stored"]:
            yield self._partly_stored(groups["partly stored"], wrong)

    def _unvisited(self, tiles: list[Block]) -> Finding:
        o, call = self.o, self.trace.call
        count = math.prod(self.count)
        cause = (
            f"{named_blocks(tiles)} of {o.name} {verb(tiles)} never visited: the grid {call.grid} has "
            f"{plural(self.trace.n, 'step')}, the array has {plural(count, 'block')} of {o.block}. "
        )
        visited = self.trace.visits[self.j]
        extent = [max((t[d] for t in visited), default=-1) + 1 for d in range(len(o.shape))]
        short = [d for d in range(len(o.shape)) if extent[d] < self.count[d] and self._axis_of(d) is not None]
        if not self.trace.n:
            axes = [d for d, length in enumerate(call.grid) if length == 0]
            cause += (
                f"Grid axis {axes[0]} has no steps at all: a block that is longer than its array divides it 0 times."
                if axes
                else ""
            )
        elif self.trace.n < count or (short and all(any(t[d] >= extent[d] for d in short) for t in tiles)):
            axes = [d for d in range(len(o.shape)) if max(t[d] for t in tiles) + 1 == self.count[d]]
            d = (short or axes or [0])[0]
            cause += (
                f"The grid is too short: pl.cdiv({o.shape[d]}, {o.block[d]}) = {self.count[d]} steps along dimension "
                f"{d}."
            )
        else:
            cause += "No step's index map returns it: look at the index map of the output."
        return Finding("unvisited", cause, [], where_defined(o.index_map), block=tiles[0], operand=o.name)

    def _never_stored(self) -> Finding:
        name, call = self.o.name, self.trace.call
        store = store_into(call.kernel, call.kernel.invars[len(call.scalar_names) + self.k])
        line = call.where if store is None else line_of(store)
        if store is None:
            cause = (
                f"the kernel never stores anything into {name}: what you see is uninitialised memory. Write "
                f"{name}[...] = value; {name} = value only gives the name to something else."
            )
        else:
            last = tuple(size - 1 for size in call.grid)
            cause = (
                f"the store into {name} is never reached: the condition around it holds at no step. Program ids count "
                f"from 0; at the last step they are {last}."
            )
        return Finding("never-stored", cause, [], line, 0, self.trace.steps[0], name)

    def _sometimes_stored(self, tiles: list[Block]) -> Finding:
        steps = [s for t in tiles for s in self.steps_of(t)]
        first = min(steps) if steps else 0
        cause = (
            f"{named_blocks(tiles)} of {self.o.name} {verb(tiles)} visited, but nothing is stored there: at "
            f"{at(self.trace, first)}, the kernel stores nothing into {self.o.name}, and what is written back is "
            "whatever "
            "the buffer held. Look at the condition around the store."
        )
        line = next((e.line for e in self.trace.events if e.op == "store" and e.ref == self.o.name), None)
        return Finding("sometimes-stored", cause, [], line, first, self.trace.steps[first], self.o.name, tiles[0])

    def _partly_stored(self, tiles: list[Block], wrong: dict[Block, tuple[Any, ...]]) -> Finding:
        tile = tiles[0]
        stores = [e for e in self.trace.events if e.op == "store" and e.ref == self.o.name]
        step = next((e.step for e in stores if e.step in self.steps_of(tile)), 0)
        which = wrong[tile][1]
        cause = (
            f"the kernel stores only part of {self.o.name}: in {named_blocks(tiles)} nobody writes {which}, which keep "
            "whatever "
            f"was in memory. Store the whole block: {self.o.name}[...] = value."
        )
        line = stores[0].line if stores else None
        return Finding("partly-stored", cause, [], line, step, self.trace.steps[step], self.o.name, tile)

    def _lost(self) -> Iterator[Finding]:
        """Outputs and accumulators that are overwritten, or reset, at every step of one output block."""
        visits = [v for vs in self.trace.visits[self.j].values() for v in vs if len(v) > 1]
        if not visits or self.o.in_hbm:
            return
        names = [self.o.name, *(s.name for s in self.trace.call.scratch if s.space in ("vmem", "smem"))]
        events = collections.defaultdict(list)
        for e in self.trace.events:
            if e.ref in names:
                events[e.ref, e.step].append(e)
        clobbered = self._clobbered(events)
        if clobbered and not any(self._repeated(name, visits[0], events) for name in names):
            yield clobbered
            return
        for look in (self._reset, self._reset_late, self._reset_midway, self._reset_again):
            found = [f for f in (look(name, visits[0], events) for name in names) if f]
            if found:
                yield found[-1]
                return
        busiest = max(visits, key=lambda visit: sum(len(events[name, s]) for name in names for s in visit))
        found = [f for f in (self._replaced(name, busiest, events) for name in names) if f]
        if found:
            yield from found
            return
        finding = self._overwritten(visits[0], events)
        if finding:
            yield finding
            return
        repeated = (f for visit in visits for name in names if (f := self._repeated(name, visit, events)))
        yield from itertools.islice(repeated, 1)

    def _reset(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """At every step of a visit the first thing that happens to `name` is a store of all of it, then it is read."""
        lines = []
        for s in visit:
            mine = events[name, s]
            if len(mine) < 2 or mine[0].op != "store" or not mine[0].whole:
                return None
            if not any(e.op == "load" for e in mine[1:]) or not any(e.op == "store" for e in mine[2:]):
                return None
            lines.append(mine[0])
        if self._first_of_one(lines[0]):
            return None
        block = self.trace.blocks[self.k][visit[0]]
        cause = (
            f"{name} is reset at every step: steps {spans(visit)} all belong to block {block} of {self.o.name}, and "
            "each "
            f"throws away what the one before had added. Reset it only {first_step_test(self.trace, name)}."
        )
        s = visit[1]
        return Finding("reset", cause, [], lines[1].line, s, self.trace.steps[s], name, block)

    def _first_of_one(self, store: Event) -> bool:
        """A store under `program_id == 0` along an axis with a single step: each step is a sum of its own."""
        axes = guarding_axes(self.trace.call, store.eqn)
        return bool(axes) and all(self.trace.call.grid[d] == 1 for d in axes)

    def _reset_late(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """On the first step `name` is added to, and only then set to its starting value."""
        mine = events[name, visit[0]]
        if len(mine) < 3 or mine[0].op != "load" or not mine[-1].whole:
            return None
        if [e.op for e in mine[-2:]] != ["store", "store"] or len(events[name, visit[1]]) >= len(mine):
            return None
        s = visit[0]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value after this step has added to it: what the "
            "step added "
            f"is lost, and what it added to was garbage. Set it before the first read of {name}."
        )
        return Finding("reset", cause, [], mine[-1].line, s, self.trace.steps[s], name, self.trace.blocks[self.k][s])

    def _reset_midway(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """One step sets `name` to its starting value before adding, and it is not the first."""
        setting = [
            s
            for s in visit
            if len(mine := events[name, s]) > 2 and mine[0].op == "store" and mine[0].whole and mine[1].op == "load"
        ]
        if len(setting) != 1 or setting[0] == visit[0] or not any(e.op == "load" for e in events[name, visit[0]]):
            return None
        s = setting[0]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value only here, so what steps "
            f"{spans(visit[: visit.index(s)])} "
            f"have added is lost, and the first of them added to garbage. Set it {first_step_test(self.trace, name)}."
        )
        line, block = events[name, s][0].line, self.trace.blocks[self.k][s]
        return Finding("reset", cause, [], line, s, self.trace.steps[s], name, block)

    def _reset_again(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """What sets `name` on the first step of a visit does so once more, after other steps have stored into it."""
        first = events[name, visit[0]]
        if not first or first[0].op != "store" or not first[0].whole or self._first_of_one(first[0]):
            return None
        again = [s for s in visit[1:] if any(e.eqn is first[0].eqn for e in events[name, s])]
        gathered = [s for s in visit if any(e.op == "store" and e.eqn is not first[0].eqn for e in events[name, s])]
        if not again or len(again) > len(visit) // 2 or not any(s < again[0] for s in gathered):
            return None
        s, block = again[0], self.trace.blocks[self.k][visit[0]]
        before = [g for g in gathered if g < s]
        cause = (
            f"{at(self.trace, s)}: {name} is set to its starting value again, though block {block} of {self.o.name} is "
            f"still the same: what steps {spans(before)} have gathered in it is lost. Set it only "
            f"{first_step_test(self.trace, name)}."
        )
        return Finding("reset", cause, [], first[0].line, s, self.trace.steps[s], name, block)

    def _replaced(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """A scratch buffer that one step after the other overwrites, before anybody has read it."""
        if name == self.o.name:
            return None
        steps: list[int] = []  # that overwrite it in a row
        for s in visit:
            mine = events[name, s]
            if mine and (mine[0].op != "store" or not mine[0].whole):
                break
            steps += [s] if mine else []
            if any(e.op == "load" for e in mine):
                break
        stores = [[e.eqn for e in events[name, s] if e.op == "store"][-1] for s in steps]
        if len(steps) < 2 or stores[0] is not stores[-1]:
            return None
        s, block = steps[-1], self.trace.blocks[self.k][visit[0]]
        maximum = holds_primitive(self.trace.call.kernel, "reduce_max")
        cause = (
            f"{name} is overwritten: steps {spans(steps)}, all of block {block} of {self.o.name}, store into it and "
            f"only the last, {at(self.trace, s)}, survives. Add to it instead ({name}[...] += ...), and set it to zero"
            f"{', or take jnp.maximum with what it holds, starting from -inf,' if maximum else ''} "
            f"{first_step_test(self.trace, name)}."
        )
        return Finding("overwritten", cause, [], events[name, s][0].line, s, self.trace.steps[s], name, block)

    def _overwritten(self, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """The output is stored at several steps of a visit, and nothing remembers the earlier ones."""
        stores = [s for s in visit if any(e.op == "store" for e in events[self.o.name, s])]
        remembers = any(
            any(e.op == "load" for e in es) and not (es[0].op == "store" and es[0].whole)
            for (_, s), es in events.items()
            if s in visit
        )
        if len(stores) < 2 or remembers:
            return None
        block = self.trace.blocks[self.k][visit[0]]
        scratch = (s.name for s in self.trace.call.scratch if all(events[s.name, v] for v in stores))
        name = next(scratch, self.o.name)  # where the output only passes on what a scratch buffer holds
        last = events[name, stores[-1]][0 if name != self.o.name else -1]
        head = f"block {block} of {self.o.name} is overwritten"
        if name != self.o.name:
            head = f"{name} is overwritten, and with it block {block} of {self.o.name}"
        cause = (
            f"{head}: steps {spans(stores)} all store into it and only the last, {at(self.trace, stores[-1])}, "
            f"survives. Add to it instead ({name}[...] += ...), and set it to zero "
            f"{first_step_test(self.trace, name)}."
        )
        return Finding("overwritten", cause, [], last.line, stores[-1], self.trace.steps[stores[-1]], name, block)

    def _clobbered(self, events: dict[Any, list[Event]]) -> Finding | None:
        """Whole rows that an earlier step of a visit had right, and that a later step of it has stored over."""
        for tile in (t for t in self.tiles if self.cut(self.bad, t).any()):
            for visit in self.trace.visits[self.j].get(tile, []):
                stores = [s for s in visit if any(e.op == "store" for e in events[self.o.name, s])]
                if not 2 <= len(stores) <= _FOLLOWED_STORES:
                    continue
                found = self._clobbered_in(tile, stores)
                if found is not None:
                    before, after, rows = found
                    line = next(e.line for e in reversed(events[self.o.name, after]) if e.op == "store")
                    cause = (
                        f"{at(self.trace, after)}: {self.o.name} is stored over. Rows {spans(rows)} of block {tile} "
                        f"were right: step {before} had stored them, and this step has replaced them. Where steps "
                        "share a block, each stores its own rows and keeps the others: "
                        f"jnp.where(own, new, {self.o.name}[...])."
                    )
                    return Finding("clobbered", cause, [], line, after, self.trace.steps[after], self.o.name, tile)
                return None
        return None

    def _clobbered_in(self, tile: Block, stores: list[int]) -> tuple[int, int, list[int]] | None:
        """(a step that stored rows rightly, the step that spoilt them, the rows of the block), the first there is."""
        want, bad = self.cut(self.want, tile), self.cut(self.bad, tile)
        kept = tuple(slice(0, n) for n in want.shape)
        width = want.shape[-1] if want.ndim else 1

        def right_rows(values: np.ndarray) -> np.ndarray:
            got = values.reshape(self.o.block)[kept].astype(np.float64)
            close = np.isclose(got, want, rtol=self.tolerance.relative, atol=self.atol) & np.isfinite(got)
            return np.asarray(close.reshape(-1, width).all(axis=1))

        spoilt = bad.reshape(-1, width).any(axis=1) & (want.reshape(-1, width) != 0).any(axis=1)
        if width < 2 or not spoilt.any():
            return None
        held = history(self.trace.call, self.o.name, stores)
        right = {s: right_rows(held[s]) & spoilt for s in stores}
        for before, after in itertools.pairwise(stores):
            rows = np.flatnonzero(right[before] & ~right[after])
            if rows.size:
                return before, after, rows.tolist()
        return None

    def _repeated(self, name: str, visit: list[int], events: dict[Any, list[Event]]) -> Finding | None:
        """A sum grows at a step that has the same input blocks as the step before, which has added them already."""
        ins = [k for k, o in enumerate(self.trace.call.operands) if o.role == "in" and not o.in_hbm]
        blocks = {s: tuple(self.trace.blocks[k][s] for k in ins) for s in visit}
        adds = [e for s in visit for e in events[name, s] if e.op == "store"]
        grown = {s for s in visit if {e.op for e in events[name, s]} == {"load", "store"}}
        again = [s for s in visit[1:] if s in grown and s - 1 in grown and blocks[s] == blocks[s - 1]]
        if not again or not ins or not self.trace.call.scalar_names or not adds:
            return None
        s = again[0]
        held = history(self.trace.call, name, [s - 1, s])
        if np.array_equal(held[s - 1], held[s], equal_nan=is_floating(held[s].dtype)):
            return None  # it stores again what was there
        same = ", ".join(f"{self.trace.call.operands[k].name} {b}" for k, b in zip(ins, blocks[s], strict=True))
        top = getattr(self.trace.call.kernel, "jaxpr", self.trace.call.kernel).eqns
        always = any(e.eqn is eqn for e in events[name, s] for eqn in top)
        cause = (
            f"{at(self.trace, s)}: {name} is added to, though the input blocks are those of the step before ({same}): "
            f"they count twice. Where an index map stays because there is nothing more to add, the kernel has to skip "
            f"the addition ({'pl.when' if always else 'the condition of its pl.when holds here'})."
        )
        eqn = next(e.eqn for e in events[name, s] if e.op == "store")
        block, near = self.trace.blocks[self.k][s], callers_of(eqn)
        return Finding("repeated", cause, [], line_of(eqn), s, self.trace.steps[s], name, block, near=near)

    def _unmoving(self) -> Iterator[Finding]:
        """Blocks of the output that are to differ, and are made of the same block of every input."""
        call = self.trace.call
        ins = [(k, o) for k, o in enumerate(call.operands) if o.role == "in"]
        if call.scalar_names or not ins or any(o.in_hbm or o.index_map is None for _, o in ins):
            return
        if holds_primitive(call.kernel, "program_id") or self.o.in_hbm or self.elementwise:
            return
        for d, size in enumerate(self.o.tiles):
            axis = self._axis_of(d) if size > 1 else None
            own = [a for a in range(len(call.grid)) if a not in call.vmapped]
            if axis is None or not all(own[axis] in still_axes(self.trace, k) for k, _ in ins):
                continue
            cut = (self.o.shape[d], self.o.dims[d].size)
            like = [(o, e) for _, o in ins for e in range(len(o.shape)) if (o.shape[e], o.dims[e].size) == cut]
            cause = (
                f"No index map of an input moves along grid axis {axis}: all blocks of {self.o.name} along its "
                f"dimension {d} are made of the same blocks of {listed([o.name for _, o in ins])}."
            )
            if like:
                o, e = like[0]
                cause += f" {o.name} is cut along its dimension {e} as {self.o.name} is: its index map has to follow."
            line = where_defined(like[0][0].index_map) if like else None
            yield Finding("unmoved", cause, [], line, operand=like[0][0].name if like else None)
            return

    def _misfits(self) -> Iterator[Finding]:
        """Products that sum over dimensions which fit in a block, and not in the arrays."""
        call = self.trace.call
        refs = {o.name: o for o in call.ins if not o.in_hbm}
        for jaxpr, names in with_ref_names(call) if not call.scalar_names else ():  # lists say which blocks meet
            for eqn, sides in block_products(jaxpr, names):
                if not all(name in refs and len(refs[name].ref_shape) == 2 for name, _ in sides):
                    continue
                sizes = [
                    [n for n, d in zip(o.shape, o.dims, strict=True) if d.kind != "squeezed"]
                    for o in (refs[name] for name, _ in sides)
                ]
                lengths = [s[axis] for s, (_, axis) in zip(sizes, sides, strict=True)]
                whole = [
                    o.ref_shape[axis] == n
                    for (o, axis), n in zip(((refs[name], axis) for name, axis in sides), lengths, strict=True)
                ]
                if lengths[0] == lengths[1] or not any(whole):
                    continue
                (a, i), (b, j) = sides
                cause = (
                    f"The matrix product sums over dimension {i} of {a} and dimension {j} of {b}. In these blocks both "
                    f"are {refs[a].ref_shape[i]} long, but the arrays are {lengths[0]} and {lengths[1]} long there: "
                    "they are not the same dimension. jnp.dot sums over the last of the first factor and the first of "
                    "the second; jax.lax.dot_general lets you choose."
                )
                yield Finding("misfit", cause, [], line_of(eqn), operand=b)
                return

    def _never_read(self) -> Iterator[Finding]:
        call = self.trace.call
        if call.scalar_names:
            return
        for k, o in enumerate(call.operands):
            if o.role != "in" or o.in_hbm or any(d.kind == "element" for d in o.dims):
                continue
            if not any(e.op != "store" and e.ref == o.name for e in self.trace.events):
                cause = f"the kernel never reads {o.name}: the result cannot depend on it yet."
                yield Finding("unused", cause, [], call.where, operand=o.name)
                continue
            missing = sorted(set(np.ndindex(*o.tiles)) - set(self.trace.blocks[k]))
            if not missing:
                continue
            idle = [a for a in still_axes(self.trace, k) if any(t > 1 and call.grid[a] == t for t in o.tiles)]
            own = [a for a in range(len(call.grid)) if a not in call.vmapped]
            axes = f" It does not move along grid axis {joined([own.index(a) for a in idle])}." if idle else ""
            cause = (
                f"{named_blocks(missing)} of {o.name} {verb(missing)} never read: no step's index map "
                f"returns {'it' if len(missing) == 1 else 'them'}.{axes} Look at the index map of {o.name}."
            )
            yield Finding("unread", cause, [], where_defined(o.index_map), operand=o.name, block=missing[0])


_FOLLOWED_STORES = 64  # into one block: with more, nobody looks what each of them did
