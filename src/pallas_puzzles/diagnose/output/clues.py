"""Hints at the cause of wrong values, from events and from the program."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...ir.capture import holds_exponential, holds_primitive, line_of, where_defined, with_ref_names
from ...ir.ops import is_floating, np_dtype
from ...lens.machine import Event, listed, spans
from ...lens.program import (
    SAME_VALUE,
    bare_roots,
    behind,
    cancelling,
    early_casts,
    eps_outside,
    filled_exponentials,
    first_use,
    is_added_to,
    lines_of,
    local_comparisons,
    made_by,
    producers,
    times_held,
)
from ..findings import Block
from ..incidents import masks_by_position
from .base import WrongOutput


class Clues(WrongOutput):
    """What else the trace and the program say about wrong values."""

    def _clues(self, tile: Block) -> list[str]:
        """What the steps of one block have in common, or not, that may explain wrong values; the likeliest first."""
        steps = self.steps_of(tile)
        if len(steps) < 2:
            return [*self._narrowed_early(), *self._arithmetic(), *self._down_the_columns()]
        events = [e for e in self.trace.events if e.step in set(steps)]
        clues = [
            *self._narrowed_early(),
            *self._arithmetic(),
            *self._stored_early(events),
            *self._stored_once(events, steps),
            *self._scaled_again(events),
            *self._left_behind(events),
            *self._uneven(events, steps),
            *self._read_every_step(events, steps),
        ]
        clues += [
            *self._cut_to_integers(),
            *self._divided_again(events),
            *self._local_positions(),
            *self._down_the_columns(),
        ]
        measured = holds_primitive(self.trace.call.kernel, "reduce_max")  # against a maximum: exponentials do add up
        between = times_held(self.trace.call.kernel, "dot_general") > 1  # two products: exp may stand between them
        if self.trace.flops and not measured and not between and all(self.trace.transcendentals[s] for s in steps):
            clues.append(
                f"Exp, tanh or the like is applied at every step of the sum (steps {spans(steps)}): what is not "
                "linear has "
                "to wait for the last step."
            )
        clues = clues or [*self._kept(events, steps), *self._same_work(events, steps)]
        clues = clues or list(self._left_unread(events))
        if not clues and holds_primitive(self.trace.call.kernel, "exp2") and not self._scaled_for_exp2():
            clues.append("It takes exp2: exp(x) is exp2(x * log2(e)). Has all that goes into it been scaled by that?")
        return clues

    def _scaled_for_exp2(self) -> bool:
        """Whether something is multiplied by log2(e), or by that over the root of a size."""
        sizes = {1, *(n for o in self.trace.call.ins for n in o.shape)}
        wanted = [math.log2(math.e) / math.sqrt(n) for n in sizes]
        for jaxpr, _ in with_ref_names(self.trace.call):
            for e in (e for e in jaxpr.eqns if e.primitive.name == "mul"):
                numbers = [np.asarray(v.val, float) for v in e.invars if np.ndim(getattr(v, "val", [0])) == 0]
                if any(np.isclose(number, wanted, rtol=1e-5).any() for number in numbers):
                    return True
        return False

    def _overhanging(self, tiles: dict[Block, Any]) -> Iterator[str]:
        """Only blocks at the ragged edge are wrong, in a kernel that masks: the sum is right, the count is not."""
        if self.o.in_hbm or len(tiles) == len(self.tiles) or not masks_by_position(self.trace):
            return
        cuts = {t: self.cut(self.want, t).shape for t in tiles}
        if all(shape != self.o.block for shape in cuts.values()):
            tile, shape = next(iter(cuts.items()))
            yield (
                f"Only blocks that hang over the edge are wrong, and no garbage gets in: block {tile} has {shape} real "
                f"elements, not {self.o.block}. Divide by, or count, the real ones only."
            )

    def _narrowed_early(self) -> Iterator[str]:
        """A float32 value that is cast to 16 bits, and only then computed with."""
        for eqn in early_casts(self.trace.call.kernel):
            dtype, line = np_dtype(eqn.outvars[0].aval), line_of(eqn)
            yield (
                f"A float32 value is cast to 16-bit {dtype} ({line}), and computed with afterwards: stay in float32 "
                "until the "
                "result is stored."
            )
            return

    def _stored_early(self, events: list[Event]) -> Iterator[str]:
        """The output is stored from a scratch buffer that goes on growing afterwards."""
        name = self.o.name
        order = list(enumerate(events))
        last = max((n for n, e in order if e.op == "store" and e.ref == name), default=None)
        if last is None:
            return
        step = events[last].step
        for scratch in self.trace.call.scratch:
            final = max((n for n, e in order if e.op == "store" and e.ref == scratch.name), default=-1)
            read = any(e.op == "load" and e.ref == scratch.name and e.step == step for _, e in order[:last])
            if read and final > last:
                when = f"until step {events[final].step}" if events[final].step > step else "in the same step"
                yield (
                    f"{name} is stored from {scratch.name} at step {step}, but {scratch.name} still grows "
                    f"afterwards, {when}: "
                    "store it on the last step of the block, after the last addition."
                )

    def _stored_once(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """A result that is stored in some steps of a block only, and takes nothing along from the others."""
        name = self.o.name
        stored = sorted({e.step for e in events if e.op == "store" and e.ref == name})
        carried = {e.ref for e in events if e.op == "load"} & {name, *(s.name for s in self.trace.call.scratch)}
        idle = [s for s in steps if s not in stored]
        ins = [(o.name, self.trace.blocks[k]) for k, o in enumerate(self.trace.call.operands) if o.role == "in"]
        moving = [n for n, blocks in ins if stored and idle and {blocks[s] for s in idle} - {blocks[stored[-1]]}]
        if stored and idle and not carried and moving:
            yield (
                f"{name} is stored at {len(stored)} of the {len(steps)} steps of this block ({spans(stored)}), and "
                f"nothing is taken along: what {listed(moving)} {'bring' if moving[1:] else 'brings'} at the others "
                f"({spans(idle)}) has no part in it. A sum over steps has to be added to at every step."
            )

    def _scaled_again(self, events: list[Event]) -> Iterator[str]:
        """A sum that is carried on from step to step, and multiplied by the same input in each of them."""
        loaded = {e.ref for e in events if e.op == "load"}
        for jaxpr, names in with_ref_names(self.trace.call):
            made = producers(jaxpr)
            ins = {o.name for k, o in enumerate(self.trace.call.operands) if o.role == "in" and self._still(k, events)}
            for store in (e for e in jaxpr.eqns if e.primitive.name == "swap" and names[e.invars[0]] in loaded):
                name, value = names[store.invars[0]], store.invars[1]
                factors: list[str] = []
                while (e := made_by(made, value, SAME_VALUE)) is not None and e.primitive.name == "mul":
                    sources = [made_by(made, v, SAME_VALUE) for v in e.invars]
                    refs = [names[s.invars[0]] if s is not None and s.primitive.name == "get" else "" for s in sources]
                    known = [i for i, ref in enumerate(refs) if ref in ins]
                    if not known:
                        break
                    factors.append(refs[known[0]])
                    value = e.invars[1 - known[0]]
                last = made_by(made, value, SAME_VALUE)
                if factors and last is not None and last.primitive.name == "add":
                    yield (
                        f"{name} carries the sum from step to step, and all of it is multiplied by "
                        f"{listed(factors[::-1])} at every step ({line_of(store)}): what was added first is multiplied "
                        "most often. Carry the plain sum, and multiply what is stored as the result."
                    )
                    return

    def _still(self, k: int, events: list[Event]) -> bool:
        """Whether operand k has one block during these events."""
        return len({self.trace.blocks[k][e.step] for e in events}) == 1

    def _left_behind(self, events: list[Event]) -> Iterator[str]:
        """Two factors of a product that is summed over steps, of which one moves on and the other one does not."""
        at = {o.name: k for k, o in enumerate(self.trace.call.operands) if o.role == "in"}
        for jaxpr, names in with_ref_names(self.trace.call):
            made = producers(jaxpr)
            for product in (e for e in jaxpr.eqns if e.primitive.name == "dot_general"):
                reads = [made_by(made, v, SAME_VALUE) for v in product.invars]
                refs = [names[e.invars[0]] if e is not None and e.primitive.name == "get" else "" for e in reads]
                if not all(ref in at for ref in refs):
                    continue
                steps = sorted({e.step for e in events if any(e.eqn is read for read in reads)})
                blocks = [[self.trace.blocks[at[ref]][s] for s in steps] for ref in refs]
                cut = [
                    self._cut_along(at[ref], d)
                    for ref, d in zip(refs, product.params["dimension_numbers"][0], strict=True)
                ]
                sides = zip(refs, blocks, cut, strict=True)
                for (moving, path, _), (still, stay, in_parts) in itertools.permutations(sides):
                    if in_parts and len(set(path)) == len(steps) > 1 and len(set(stay)) == 1:
                        yield (
                            f"The product at {line_of(product)} is summed over steps {spans(steps)}, and while "
                            f"{moving} goes through blocks {', '.join(map(str, path[:3]))}, the index map of {still} "
                            f"stays at {stay[0]}: which block of {still} belongs to each of those?"
                        )
                        return

    def _cut_along(self, k: int, dims: Iterable[int]) -> bool:
        """Whether a block of operand k has only a part of the array along one of these dimensions of its Ref."""
        o = self.trace.call.operands[k]
        seen = [(size, d.size) for size, d in zip(o.shape, o.dims, strict=True) if d.kind != "squeezed"]
        return any(seen[d][1] < seen[d][0] for d in dims if d < len(seen))

    def _cut_to_integers(self) -> Iterator[str]:
        """Floats that are cast to integers, and summed."""
        for jaxpr, _ in with_ref_names(self.trace.call):
            for e in jaxpr.eqns:
                if e.primitive.name == "convert_element_type" and e.invars[0].aval.shape:
                    before, after = (np_dtype(v.aval) for v in (e.invars[0], e.outvars[0]))
                    summed = any(u.primitive.name == "add" and e.outvars[0] in u.invars for u in jaxpr.eqns)
                    if is_floating(before) and after.kind in "iu" and summed:
                        yield (
                            f"A {before} value is cast to {after} ({line_of(e)}): what stands behind the point is cut "
                            "off, at every step. Add integers up as they are, and turn to floats when the sum is "
                            "finished."
                        )
                        return

    def _uneven(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """A buffer that most steps of a block add to, and one does not."""
        for name in (self.o.name, *(s.name for s in self.trace.call.scratch)):
            stored = {e.step for e in events if e.op == "store" and e.ref == name}
            loaded = {e.step for e in events if e.op == "load" and e.ref == name}
            adding = stored & loaded
            idle = [s for s in steps if s not in adding]
            if len(adding) > 1 and len(idle) == 1 and not self._seen_before(idle[0], adding):
                yield (
                    f"Step {idle[0]} adds nothing to {name}, though the other steps of the block do "
                    f"({spans(sorted(adding))}): "
                    "every step has its share in the sum."
                )

    def _divided_again(self, events: list[Event]) -> Iterator[str]:
        """A sum that is carried on from step to step, and divided in each of them."""
        for jaxpr, names in with_ref_names(self.trace.call):
            made = producers(jaxpr)
            for store in (e for e in jaxpr.eqns if e.primitive.name == "swap"):
                name = names[store.invars[0]]
                steps = {e.step for e in events if e.op == "store" and e.ref == name and e.eqn is store}
                division = made_by(made, store.invars[1], SAME_VALUE)
                if len(steps) < 2 or division is None or division.primitive.name != "div":
                    continue
                above = made_by(made, division.invars[0], SAME_VALUE)
                if above is not None and (
                    above.primitive.name == "add" or (above.primitive.name == "get" and names[above.invars[0]] == name)
                ):
                    yield (
                        f"{name} is divided at every step ({line_of(division)}, steps {spans(sorted(steps))}), and "
                        "the quotient is added to and divided again: keep the plain sum, and divide it once, on the "
                        "last step."
                    )
                    return

    def _seen_before(self, step: int, others: Iterable[int]) -> bool:
        """Whether a step gets the same blocks of all inputs as one of the others: a second look at the same data."""
        ins = [self.trace.blocks[k] for k, o in enumerate(self.trace.call.operands) if o.role == "in"]
        return any(all(blocks[step] == blocks[other] for blocks in ins) for other in others)

    def _read_every_step(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """An input whose block stays the same along a sum, and that takes part in every step."""
        for k, o in enumerate(self.trace.call.operands):
            reads = [e for e in events if e.op == "load" and e.ref == o.name]
            same = len({self.trace.blocks[k][s] for s in steps}) == 1
            added = {first_use(j, n, o.name)[0] for j, n in with_ref_names(self.trace.call)} & {"add", "sub"}
            everywhere = len({e.step for e in reads}) == len(steps)
            if o.role == "in" and same and added and everywhere and self._joins_a_sum(o.name):
                yield (
                    f"{o.name} is read at every step of the sum ({reads[0].line}), though its block stays the same: "
                    "what is "
                    f"added at every step is added {len(steps)} times."
                )

    def _joins_a_sum(self, name: str) -> bool:
        """Whether what is read from an input may meet, in an addition, what a step before has left."""
        call = self.trace.call
        kept = {o.name for o in call.outs} | {s.name for s in call.scratch}
        for jaxpr, names in with_ref_names(call):
            given = {v for v in jaxpr.invars if v not in names}  # of a branch: whatever the kernel passes in
            carried, mine = set(given), set(given)
            for e in jaxpr.eqns:
                operands = [v for v in e.invars if not hasattr(v, "val")]
                ref = names.get(operands[0]) if operands else None
                old, new = (any(v in held for v in operands) for held in (carried, mine))
                if e.primitive.name == "addupdate" or (e.primitive.name in ("add", "sub") and old and new):
                    return True
                if old or (e.primitive.name == "get" and ref in kept):
                    carried |= set(e.outvars)
                if new or (e.primitive.name == "get" and ref == name):
                    mine |= set(e.outvars)
        return False

    def _local_positions(self) -> Iterator[str]:
        """Positions within the block are compared with data, as if every block were the first one."""
        if self.trace.n < 2:
            return
        for jaxpr, _ in with_ref_names(self.trace.call):
            for eqn in local_comparisons(jaxpr):
                yield (
                    f"Positions are counted from 0 in every block ({line_of(eqn)}): the block starts at "
                    "pl.program_id(axis) times its size, and that has to be added."
                )
                return

    def _down_the_columns(self) -> Iterator[str]:
        """Blocks hold whole rows, and everything is reduced over the rows that happen to share a block."""
        o = self.o
        if len(o.block) != 2 or o.block[1] != o.shape[1] or o.block[0] in (1, o.shape[0]):
            return
        for jaxpr, names in with_ref_names(self.trace.call):
            for e in behind(jaxpr, names, o.name):
                if e.primitive.name.startswith("reduce_") and tuple(e.params["axes"]) == (0,):
                    yield (
                        f"A reduction goes down the columns (axis=0, {line_of(e)}), over the {o.block[0]} rows "
                        "that happen to share a block. Along a row it is axis=1."
                    )
                    return

    def _made_of(self) -> Iterator[str]:
        """Which inputs take part in an output, and which do not."""
        parts: set[str] = set()
        top, names = next(with_ref_names(self.trace.call))
        if not any(e.primitive.name == "swap" and names[e.invars[0]] == self.o.name for e in top.eqns):
            return  # stored under a branch, and what a branch is given is not followed
        for jaxpr, names in with_ref_names(self.trace.call):
            parts |= {names[e.invars[0]] for e in behind(jaxpr, names, self.o.name) if e.primitive.name == "get"}
        ins = [o.name for o in self.trace.call.ins]
        mine, rest = [n for n in ins if n in parts], [n for n in ins if n not in parts]
        if len(self.trace.call.outs) > 1 and mine and rest:
            yield (
                f"{self.o.name} is made of {listed(mine)}; {listed(rest)} {'have' if rest[1:] else 'has'} no part "
                "in it. Compare that with its formula, factor by factor."
            )

    def _kept(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """Scratch that every step reads, and that holds its starting value all along."""
        for s in self.trace.call.scratch:
            mine = [e for e in events if e.ref == s.name]
            loads, stores = ([n for n, e in enumerate(mine) if (e.op == "store") == stored] for stored in (False, True))
            if not stores or {mine[n].step for n in loads} < set(steps) or max(stores) > min(loads):
                continue
            yield (
                f"{s.name} keeps its starting value: steps {spans(steps)} read it ({mine[loads[0]].line}), and after "
                f"step {mine[stores[-1]].step} has set it nothing is stored in it. Store there what the next step has "
                "to go on from."
            )

    def _same_work(self, events: list[Event], steps: list[int]) -> Iterator[str]:
        """Two steps of a sum that get the same block of every input."""
        own = [n for n in (self.o.name, *(s.name for s in self.trace.call.scratch)) if is_added_to(self.trace.call, n)]
        did = {op: {e.step for e in events if e.op == op and e.ref in own} for op in ("load", "store")}
        adding = sorted(did["load"] & did["store"])
        ins = [(k, o) for k, o in enumerate(self.trace.call.operands) if o.role == "in" and not o.in_hbm]
        for a, b in itertools.pairwise(adding):
            read = [(k, o) for k, o in ins if any(e.ref == o.name and e.op == "load" and e.step == b for e in events)]
            if not read or any(self.trace.blocks[k][a] != self.trace.blocks[k][b] for k, _ in read):
                continue
            moving = [(k, o) for k, o in read if len({self.trace.blocks[k][s] for s in range(self.trace.n)}) > 1]
            along = [(k, o) for k, o in moving if o.shape != self.o.shape] or moving
            if not along:
                continue
            the_map = along[0][1].index_map
            where = next(lines_of(the_map), None) or where_defined(the_map)
            yield (
                f"Steps {a} and {b} add to the same block of {self.o.name} and get the same block of every input, "
                f"{listed([f'{self.trace.blocks[k][b]} of {o.name}' for k, o in along])}: it counts twice, and "
                f"another block not at all. Look at what the index map of {along[0][1].name} ({where}) returns there."
            )
            return

    def _left_unread(self, events: list[Event]) -> Iterator[str]:
        """Scratch whose last value nobody reads."""
        for s in self.trace.call.scratch:
            mine = [e for e in events if e.ref == s.name]
            kernel = self.trace.call.kernel  # a running maximum has done its work, unless a log still needs it
            measured = any(e.op == "load" for e in mine) and holds_exponential(kernel)
            measured = measured and not holds_primitive(kernel, "log")
            if mine and mine[-1].op == "store" and not measured:
                line = mine[-1].line
                yield f"What {s.name} holds in the end is never read ({line} stores it): is it part of the result?"

    def _arithmetic(self) -> Iterator[str]:
        """Formulas that are right on paper, or look like one that is."""
        for jaxpr, _ in with_ref_names(self.trace.call):
            for eqn in _products_of_sums(jaxpr):
                yield (
                    f"Two sums are multiplied ({line_of(eqn)}), and a product of sums is not the sum of products: "
                    "multiply element by element first, and sum once."
                )
            for product, total in _summed_products(jaxpr):
                yield (
                    f"A matrix product ({line_of(product)}) pairs each row with all {product.outvars[0].aval.shape[1]} "
                    f"rows of the other factor, and all of these are summed ({line_of(total)}). For row i with row i "
                    "alone, multiply element by element."
                )
            for eqn in cancelling(jaxpr):
                yield (
                    f"Mean of squares minus square of mean ({line_of(eqn)}) is the variance on paper; in float32 two "
                    "nearly equal numbers cancel. Subtract the mean first, then square."
                )
            for eqn, fill in filled_exponentials(jaxpr):
                yield (
                    f"exp is taken where a mask has put {fill:g} ({line_of(eqn)}), and the result is summed: so the "
                    "padding has a share in the sum. Fill with -inf: exp(-inf) is 0, and no maximum notices it."
                )
            for eqn in [] if [*eps_outside(jaxpr)] else bare_roots(jaxpr):
                yield (
                    f"The root is taken of a mean of squares with nothing added to it ({line_of(eqn)}). If a small "
                    "constant (eps) belongs inside, leaving it out is right where the variance is large, and wrong "
                    "where it is as small as eps."
                )
            for eqn in jaxpr.eqns:
                out = np_dtype(eqn.outvars[0].aval) if eqn.primitive.name == "dot_general" else None
                if out is not None and out.kind in "iu" and out.itemsize < 4:
                    yield (
                        f"A matrix product has the type {out} ({line_of(eqn)}), and its sums wrap around beyond "
                        f"{np.iinfo(out).max}: ask for an int32 result, with preferred_element_type."
                    )
            for eqn in eps_outside(jaxpr):
                yield f"The small constant is added outside of the root ({line_of(eqn)}): 1 / sqrt(variance + eps)."


def _products_of_sums(jaxpr: Any) -> Iterator[Any]:
    made = producers(jaxpr)
    for e in (e for e in jaxpr.eqns if e.primitive.name == "mul"):
        sums = [None if hasattr(v, "val") else made_by(made, v, SAME_VALUE) for v in e.invars]
        if all(s is not None and s.primitive.name == "reduce_sum" for s in sums) and sums[0] is not sums[1]:
            yield e


def _summed_products(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Matrix products of rows with rows that are summed along one dimension at once."""
    made = producers(jaxpr)
    for e in (e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and tuple(e.params["axes"]) == (1,)):
        product = None if hasattr(e.invars[0], "val") else made_by(made, e.invars[0], SAME_VALUE)
        if product is None or product.primitive.name != "dot_general":
            continue
        right, dims = product.invars[1], product.params["dimension_numbers"][0]
        turned = not hasattr(right, "val") and right in made and made[right].primitive.name == "transpose"
        if turned or dims == ((1,), (1,)):
            yield product, e
