"""Hints at the cause of wrong values, from events and from the program."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..capture import (
    holds_exponential,
    holds_primitive,
    line_of,
    with_ref_names,
)
from ..findings import Block
from ..incidents import masks_by_position
from ..machine import Event, listed, spans
from ..ops import np_dtype
from ..program import (
    SAME_VALUE,
    bare_roots,
    behind,
    cancelling,
    early_casts,
    eps_outside,
    filled_exponentials,
    first_use,
    local_comparisons,
    made_by,
    producers,
    times_held,
)
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
            *self._uneven(events, steps),
            *self._read_every_step(events, steps),
        ]
        clues += [*self._divided_again(events), *self._local_positions(), *self._down_the_columns()]
        measured = holds_primitive(self.trace.call.kernel, "reduce_max")  # against a maximum: exponentials do add up
        between = times_held(self.trace.call.kernel, "dot_general") > 1  # two products: exp may stand between them
        if self.trace.flops and not measured and not between and all(self.trace.transcendentals[s] for s in steps):
            clues.append(
                f"Exp, tanh or the like is applied at every step of the sum (steps {spans(steps)}): what is not "
                "linear has "
                "to wait for the last step."
            )
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
            if o.role == "in" and same and added and len({e.step for e in reads}) == len(steps):
                yield (
                    f"{o.name} is read at every step of the sum ({reads[0].line}), though its block stays the same: "
                    "what is "
                    f"added at every step is added {len(steps)} times."
                )

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
        for jaxpr, names in with_ref_names(self.trace.call):
            parts |= {names[e.invars[0]] for e in behind(jaxpr, names, self.o.name) if e.primitive.name == "get"}
        ins = [o.name for o in self.trace.call.ins]
        mine, rest = [n for n in ins if n in parts], [n for n in ins if n not in parts]
        if len(self.trace.call.outs) > 1 and mine and rest:
            yield (
                f"{self.o.name} is made of {listed(mine)}; {listed(rest)} {'have' if rest[1:] else 'has'} no part "
                "in it. Compare that with its formula, factor by factor."
            )

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
        """Formulas that are right on paper."""
        for jaxpr, _ in with_ref_names(self.trace.call):
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
