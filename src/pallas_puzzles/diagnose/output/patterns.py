"""Wrong blocks together: moved, off by a rule, off by a factor."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...ir.capture import SourceLine, where_defined
from ...lens.program import constant_added, has_narrow_floats
from ...text import plural
from ..findings import Block, Finding
from ..incidents import at, first_step_test
from ..narrow import SUMS, narrow_places
from ..rounding import excess
from .base import in_words, named_blocks, verb
from .statuses import Statuses

_OFFSET = "something is added once too often or left out, or a position is off by one."


class Patterns(Statuses):
    """What the blocks that are wrong have in common."""

    def _pattern(self, wrong: dict[Block, tuple[Any, ...]]) -> Iterator[Finding]:
        by_kind: dict[str, dict[Block, tuple[Any, ...]]] = collections.defaultdict(dict)
        for tile, status in wrong.items():
            by_kind[status[0]][tile] = status
        near = {t: s for kind in ("values", "scaled", "offset") for t, s in by_kind[kind].items()}
        constant = len({round(s[1], 4) for s in by_kind["offset"].values()}) == 1 and len(by_kind["offset"]) == len(
            wrong
        )
        if near and len(near) == len(wrong) and not constant and self._imprecise() and not [*self._arithmetic()]:
            yield self._precision(near)
            return
        moved = {t: s[1] for t, s in by_kind["holds"].items()}
        if moved:
            yield self._moved(moved)
        offsets = {t: s[1] for t, s in by_kind["offset"].items()}
        if offsets:
            yield self._offset(offsets, by_kind["offset"])
        for kind in ("row-offset", "row-scaled", "row-term", "row-missing"):
            if by_kind[kind]:
                yield self._row_error(kind, by_kind[kind])
        for kind in (
            "rounding",
            "transposed",
            "permuted",
            "flipped",
            "scaled",
            "reciprocal",
            "wrong-axis",
            "zeros",
            "nan",
            "values",
        ):
            if by_kind[kind]:
                yield self._plain(kind, by_kind[kind])

    def _row_error(self, kind: str, tiles: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, (_, name, numbers, shifted) = next(iter(tiles.items()))
        sample = list(numbers.items())[:2]
        head = f"{named_blocks(list(tiles))} of {self.o.name} {verb(tiles)} wrong in one way, row by row: "
        if kind == "row-offset":
            rows = ", ".join(f"row {r} by {v:+.4g}" for r, v in sample)
            cause = f"each row is off by a constant of its own ({rows}). A number that belongs to the row, such as its "
            cause += (
                "mean or its maximum, is left out, is added or subtracted wrongly, or is not that of the whole row."
            )
        elif kind == "row-scaled":
            rows = ", ".join(f"row {r} is {1 + v:.4g} times" for r, v in sample)
            cause = (
                f"each row has a factor of its own ({rows} what is expected). A number that belongs to the row, such "
            )
            cause += "as its sum or its variance, is left out, or is not that of the whole row."
        elif kind == "row-missing":
            rows = ", ".join(f"{v:.4g} in row {r}" for r, v in sample)
            cause = (
                f"a term is missing. Nothing is reduced in this kernel, so each element of {self.o.name} knows its own "
                f"column alone; what is expected holds {name} times one number of the whole row, too ({rows})."
            )
        else:
            rows = ", ".join(f"row {r}: {v:.4g} times" for r, v in sample)
            plus = ", and a constant" if shifted else ""
            cause = (
                f"the error is a multiple of the same row of {name}{plus} ({rows}). A term of that form, one number "
            )
            cause += f"per row times {name}, is missing, or has the wrong sign or the wrong number."
        clues = self._clues(tile)
        if kind == "row-scaled" and clues and "(eps)" in clues[0]:
            cause += f" {clues.pop(0)}"
        return self._finding(kind, head + cause, tile, clues)

    def _moved(self, moved: dict[Block, Block]) -> Finding:
        left_over = self._left_over(moved)
        if left_over:
            return left_over
        tile, source = next(iter(moved.items()))
        rule = _permutation(moved, self.count)
        example = f"block {tile} of {self.o.name} holds what belongs in block {source}"
        step = (self.steps_of(tile) or [0])[-1]
        cause = (
            f"{at(self.trace, step)}: {example}. "
            f"{rule or 'Look at the index maps: some block goes to the wrong place.'}"
        )
        more = [f"block {t} holds what belongs in block {s}" for t, s in list(moved.items())[1:4]]
        line = self._suspect_map()
        return Finding("moved", cause, more, line, step, self.trace.steps[step], self.o.name, tile)

    def _left_over(self, moved: dict[Block, Block]) -> Finding | None:
        """A block that holds the result of an earlier one, because the scratch it is stored from still did."""
        blocks = self.trace.blocks[self.k]
        for i in self.trace.incidents:
            if i.kind != "carry" or moved.get(blocks[i.step]) != blocks[i.detail["left_at"]]:
                continue
            cause = (
                f"{at(self.trace, i.step)}: block {blocks[i.step]} of {self.o.name} is stored from {i.ref} as step "
                f"{i.detail['left_at']} left it, with the result of block {blocks[i.detail['left_at']]}. Scratch keeps "
                f"its contents from step to step. Also where nothing is added, set {i.ref} to its starting value "
                f"{first_step_test(self.trace, i.ref)}."
            )
            return Finding("carry", cause, [], i.line, i.step, i.at, i.ref, blocks[i.step])
        return None

    def _suspect_map(self) -> SourceLine | None:
        """The index map that most likely errs. Where an input and the output disagree: the one that is not plainly the
        grid index, and the input's where neither is; else the output's."""
        mine, plain = self.trace.blocks[self.k], self.trace.steps
        for k, o in enumerate(self.trace.call.operands):
            theirs = self.trace.blocks[k]
            if o.role == "in" and o.index_map is not None and o.tiles == self.o.tiles and theirs != mine:
                return where_defined(self.o.index_map if theirs == plain else o.index_map)
        return where_defined(self.o.index_map)

    def _offset(self, offsets: dict[Block, float], statuses: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, value = next(iter(offsets.items()))
        slopes = self._slopes(offsets)
        if len(offsets) == len(self.tiles) and len({round(v, 4) for v in offsets.values()}) == 1:
            return self._off_everywhere(tile, value)
        head = f"block {tile} of {self.o.name} is off by the constant {value:+.6g}"
        more = [f"block {t}: off by {v:+.6g}" for t, v in list(offsets.items())[1:4]]
        if slopes:
            return self._finding("local-position", f"{head}, {self._position_words(slopes)}", tile, more)
        return self._finding("offset", f"{head}{in_words(statuses[tile][2])}: {_OFFSET}", tile, more)

    def _off_everywhere(self, tile: Block, value: float) -> Finding:
        """One constant for all elements: the kernel's own, where it adds one to what it stores."""
        cause = f"every element of {self.o.name} is off by the constant {value:+.6g}"
        added = constant_added(self.trace.call, self.o.name)
        if added is None:
            return self._finding("offset", f"{cause}: {_OFFSET}", tile)
        number, sign, line = added
        meant = number - sign * value
        done = "added" if sign > 0 else "subtracted"
        finding = self._finding("offset", f"{cause}. {number:g} is {done} here; {meant:.6g} would be right.", tile)
        finding.line = line or finding.line
        return finding

    def _position_words(self, slopes: dict[int, float]) -> str:
        """What to look at when the error grows from block to block: where a block starts is computed wrongly."""
        starts = []
        for d, slope in slopes.items():
            axis = self._axis_of(d)
            what = "" if axis is None else f", where block i starts at pl.program_id({axis}) * {self.o.block[d]}"
            starts.append(f"by {slope:+.6g} per block along dimension {d}{what}")
        return (
            f"and that constant changes {' and '.join(starts)}. So the start of the block is left out "
            "or computed wrongly: check that it is the right program id, times the right size."
        )

    def _slopes(self, offsets: dict[Block, float]) -> dict[int, float] | None:
        """The offset as a linear function of the block index, block 0 being right: {dimension: slope}, or None."""
        slopes = {}
        for d in range(len(self.count)):
            unit = tuple(int(e == d) for e in range(len(self.count)))
            if self.count[d] > 1 and abs(offsets.get(unit, 0.0)) > 0:
                slopes[d] = offsets[unit]
        allowed = 10 * self.atol + 1e-4 * max(map(abs, offsets.values()))
        for t in self.tiles:
            if abs(sum(t[d] * v for d, v in slopes.items()) - offsets.get(t, 0.0)) > allowed:
                return None
        return slopes or None

    def _imprecise(self) -> bool:
        got, want = self.got.astype(np.float64), self.want.astype(np.float64)
        if not np.isfinite(got).all() or not has_narrow_floats(self.trace.call):
            return False
        scale = np.sqrt(np.mean(np.square(want))) or 1.0
        return bool(np.sqrt(np.mean(np.square(got - want))) < 0.03 * scale) and bool(
            np.abs(got - want).max() < 0.3 * scale
        )

    def _precision(self, tiles: dict[Block, Any]) -> Finding:
        error = np.abs(self.got.astype(np.float64) - self.want.astype(np.float64)).max()
        place = next(narrow_places(self.trace, self.j), None)
        shift = excess(self.got.astype(self.o.dtype), self.want.astype(self.o.dtype), self.want)
        if shift is not None and shift.one_way and (place is None or place.kind not in SUMS):
            return self._finding(
                shift.kind_of_finding, f"{self.o.name}: {shift.words} {shift.advice}", next(iter(tiles))
            )
        head = f"the values are nearly right (largest error {error:.2g}): rounding, not logic. "
        found = self._finding("precision", head + (place.words if place else _SOMEWHERE), next(iter(tiles)))
        found.line = (place and place.line) or found.line
        return found

    def _plain(self, kind: str, tiles: dict[Block, tuple[Any, ...]]) -> Finding:
        tile, status = next(iter(tiles.items()))
        which = named_blocks(list(tiles))
        steps = self.steps_of(tile)
        when = f" (last stored at {at(self.trace, self._store_line(tile)[1] or 0)})" if steps else ""
        name = self.o.name
        if kind == "transposed":
            cause = (
                f"{which} of {name} {verb(tiles)} transposed inside the block{when}: rows and columns have changed "
                "places."
            )
        elif kind == "permuted":
            cause = (
                f"{which} of {name} {verb(tiles)} made of the right numbers in the wrong places{when}: a reshape "
                "keeps the order "
                "of the elements, a transpose (.T) turns rows into columns."
            )
        elif kind == "flipped":
            cause = f"{which} of {name} {verb(tiles)} reversed inside the block along dimension {status[1]}{when}."
        elif kind == "scaled":
            cause = (
                f"{which} of {name} {verb(tiles)} {status[1]:.6g} times what is expected{in_words(status[2])}{when}: a "
                f"factor too much or too little.{self._known_factor(status[1])}"
            )
        elif kind == "reciprocal":
            cause = f"{which} of {name} {verb(tiles)} one divided by what is expected{when}."
        elif kind == "wrong-axis":
            cause = (
                f"{which} of {name} {verb(tiles)} wrong by a factor of the row times a factor of the column{when}: "
                "something is reduced along the wrong axis, or the two are mixed up. axis=1 goes along a row, axis=0 "
                "down a column, over the rows of this block only."
            )
        elif kind == "zeros":
            cause = (
                f"{which} of {name} {verb(tiles)} zero{in_words(status[1])}{when}: the result is never added, is "
                "masked away, or is set to zero after the last addition."
            )
        elif kind == "rounding":
            cause = (
                f"{which} of {name} {verb(tiles)} nearly right{in_words(status[2])}{when}, off by no more than "
                f"{status[1]:.2g}, and by no rule: rounding, not logic. A float32 keeps seven digits of a number, "
                "however large it is: a "
                "small difference of large numbers, or exp of a large number that was rounded, keeps fewer. Subtract "
                "first, while the numbers are exact."
            )
        elif kind == "nan":
            cause = (
                f"{which} of {name} {verb(tiles)} NaN{in_words(status[1])}{when}: uninitialised memory is NaN here, "
                "and so is 0/0 or inf - inf."
            )
        else:
            cause = f"{which} of {name} {verb(tiles)} wrong{in_words(status[1])}{when}. "
            repeated = [*self._overhanging(tiles), *self._clues(tile)]
            if repeated:
                return self._finding(kind, cause + repeated[0], tile, repeated[1:])
            made = "".join(self._made_of()) or "Follow one element of that block by hand."
            return dataclasses.replace(self._finding(kind, cause + made, tile), where=cause)
        found = self._finding(kind, cause, tile, self._clues(tile))
        return dataclasses.replace(found, where=f"{which} of {name} {verb(tiles)} wrong{when}. ")

    def _known_factor(self, factor: float) -> str:
        """Where a factor comes from, when it is one that everybody meets."""
        if abs(factor + 1) < 1e-6:
            return " A sign is wrong."
        if min(abs(factor - math.log2(math.e)), abs(factor - math.log(2))) < 1e-4:
            return (
                f" It is {'log2(e)' if factor > 1 else 'log(2)'}: exp2 and log2 count in base 2, exp and log in base e."
            )
        for n in sorted({n for o in self.trace.call.ins for n in o.shape if n > 7}):
            for power, words in ((0.5, f"the square root of {n}"), (-0.5, f"one over the square root of {n}")):
                if abs(factor / n**power - 1) < 1e-3:
                    wherefrom = next(o for o in self.trace.call.ins if n in o.shape)
                    return (
                        f" It is {words}, dimension {wherefrom.shape.index(n)} of {wherefrom.name}: look at the scale."
                    )
            for power, words in ((0.5, "the square root of "), (1.0, "")):
                for exponent in (power, -power):
                    if abs(factor / ((n - 1) / n) ** exponent - 1) < 2e-5 and abs(factor - 1) > 1e-4:
                        ratio = f"{n - 1} / {n}" if exponent > 0 else f"{n} / {n - 1}"
                        return f" It is {words}{ratio}: one divides by N, the other by N - 1."
        return ""


_SOMEWHERE = (
    "Somewhere a sum or a product is kept in a 16-bit float: keep it in float32 "
    "(preferred_element_type=jnp.float32 for jnp.dot) and cast once at the end."
)


def _permutation(moved: dict[Block, Block], count: tuple[int, ...]) -> str | None:
    """A rule that says where every moved block came from, with what to look for."""
    if all(len(t) == 2 and s == (t[1], t[0]) for t, s in moved.items()):
        return "Row and column are swapped: look for an index map that returns (j, i) where (i, j) is meant."
    for a, b in itertools.combinations(range(len(count)), 2):
        if all(s == tuple(t[{a: b, b: a}.get(d, d)] for d in range(len(t))) for t, s in moved.items()):
            return (
                f"Dimensions {a} and {b} are swapped: index maps of the inputs take the grid indices of those two in "
                "each other's place."
            )
    for axis in range(len(count)):
        rest = [d for d in range(len(count)) if d != axis]
        if any(t[d] != s[d] for t, s in moved.items() for d in rest):
            continue
        shifts = {s[axis] - t[axis] for t, s in moved.items()}
        if len({s[axis] for s in moved.values()}) == 1 and len(moved) > 1:
            return f"Every block comes from the same place: an index map does not move along dimension {axis}."
        if all(s[axis] == count[axis] - 1 - t[axis] for t, s in moved.items()):
            return f"The blocks are in reverse order along dimension {axis}: look at the index maps."
        if len(shifts) == 1:
            far = plural(abs(shifts.pop()), "block")
            return f"Every block comes from {far} further along dimension {axis}: an index map is off by that much."
        if len({(s[axis] - t[axis]) % count[axis] for t, s in moved.items()}) == 1:
            return f"The blocks are rotated along dimension {axis}: an index map is off by a constant."
        if len({s[axis] + t[axis] for t, s in moved.items()}) == 1 and len(moved) > 1:
            return f"The blocks run backwards along dimension {axis}: check both ends of the index map."
    return None
