"""Where a wrong value comes from: the first in a run that does not occur in a run of the course's solution."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir.capture import SourceLine, asked_line_of, expression_of, is_asked, is_call, primitive_of, subprograms
from ..ir.ops import is_floating

_LIKE = 1e-3  # of the size of an array: how far its mean may be from that of another, in another order or rounded
_EXTREMES = 1e-2  # the same of its largest and smallest element


@dataclasses.dataclass
class _Value:
    """What an equation has made, or stored. made_of: the numbers of other values. seen: see _seen, None: not told."""

    eqn: Any
    made_of: list[int]
    seen: np.ndarray | None


class Values:
    """The values of a run, in the order in which they were made; a witness of `ir.ops.witnessed`."""

    def __init__(self) -> None:
        self.made: list[_Value] = []
        self._numbers: dict[int, int] = {}  # by the identity of an array
        self._stored: dict[int, int] = {}  # the last store into a Ref, by its identity
        self._alive: list[Any] = []

    def __call__(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        made_of = {self._numbers[id(x)] for x in operands if id(x) in self._numbers}
        refs = [x for x in operands if not isinstance(x, np.ndarray | np.generic | int | float)]
        held = {self._stored[id(ref)] for ref in refs if id(ref) in self._stored}
        if is_call(eqn):
            self._stored.clear()
        stores = primitive_of(eqn) in _STORES or (refs and not results and not any(subprograms(eqn)))
        for x in () if stores else results:
            before = self._numbers.get(id(x))
            if before is None:
                self._numbers[id(x)] = len(self.made)
                self.made.append(_Value(eqn, [*made_of | held], _seen(x)))
            elif asked_line_of((self.made[before].eqn,)) is None:  # inside of a function of JAX's
                self.made[before].eqn = eqn
        if stores:
            new = [x for x in operands if isinstance(x, np.ndarray | np.generic)]
            whole = primitive_of(eqn) == "swap" and [np.shape(x) for x in new] == [np.shape(x) for x in refs]
            self._stored.update((id(ref), len(self.made)) for ref in refs)
            self.made.append(_Value(eqn, [*(made_of if whole else made_of | held)], None))
        self._alive += [*results, *refs]


_STORES = frozenset({"swap", "addupdate", "masked_swap"})


def _seen(x: Any) -> np.ndarray | None:
    """What is the same for the elements of an array in any order, and of several copies of it. None of what has no
    fractions, or is the same everywhere: that occurs in every run."""
    if not isinstance(x, np.ndarray | np.generic) or not x.size or not is_floating(x.dtype):
        return None
    wide = np.asarray(x, np.float64).ravel()
    some = wide[np.isfinite(wide)]
    if not some.size or (some.max() == some.min() and (some.size > 1 or not some[0])):
        return None
    sizes = some.mean(), np.sqrt((some * some).mean()), np.abs(some).mean(), some.max(), some.min()
    return np.array([*sizes, *((wide == at).mean() for at in (np.inf, -np.inf)), np.isnan(wide).mean()])


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an answer first makes a value which does not occur in the course's run, nor does any that is made of it.

    line: one that somebody is asked about. expression: on it, "" if that has several lines. right: what goes into it,
    if all of that occurs. used: something that goes into it, and what else is made of that and occurs, and where.
    stored: where a Ref was last stored into, of which it is a load.
    """

    line: SourceLine
    expression: str
    right: tuple[str, ...] = ()
    used: tuple[str, str, SourceLine] | None = None
    stored: SourceLine | None = None


def origin(answer: Values, course: Values) -> Origin | None:
    """Where an answer parts from the course's run; None where it does not, or only in what a kernel returns.

    An equation whose values are not the course's, and lead to some that are, is another way to do it.
    """
    occurs = _Occurs(course)
    known = [value.seen is not None and occurs(value.seen) for value in answer.made]
    leads = [*known]
    for number in reversed(range(len(leads))):
        if leads[number]:
            for other in answer.made[number].made_of:
                leads[other] = True
    other_way = {id(v.eqn) for v, same, fine in zip(answer.made, known, leads, strict=True) if fine and not same}
    for value, fine in zip(answer.made, leads, strict=True):
        if value.seen is not None and not fine and id(value.eqn) not in other_way:
            line, expression = _written(value.eqn)
            if line is not None and is_asked(line):
                return None if is_call(value.eqn) else _told(answer, value, known, leads, line, expression)
    return None


def _told(
    answer: Values, value: _Value, known: list[bool], leads: list[bool], line: SourceLine, expression: str
) -> Origin:
    """The origin, with what is known of what goes into it."""
    goes_in = [(n, *_written(answer.made[n].eqn)) for n in sorted(value.made_of)]
    stores = [at for n, at, _ in goes_in if primitive_of(answer.made[n].eqn) in _STORES]
    floats = [(n, text) for n, _, text in goes_in if answer.made[n].seen is not None]
    told = Origin(line, expression, stored=stores[-1] if stores else None)
    if not floats or not all(text and text != expression for _, text in floats):
        return told
    if all(known[n] for n, _ in floats):
        return dataclasses.replace(told, right=tuple(dict.fromkeys(text for _, text in floats)))
    for number, text in floats:
        made_of = {number}
        for n, other in enumerate(answer.made[number + 1 :], number + 1) if leads[number] and not known[number] else ():
            if made_of & {*other.made_of}:
                made_of.add(n)
                at, use = _written(other.eqn)
                if known[n] and at is not None and use:
                    return dataclasses.replace(told, used=(text, use, at))
    return told


def _written(eqn: Any) -> tuple[SourceLine | None, str]:
    """The reader's line of an equation, and the expression on it."""
    line = asked_line_of((eqn,))
    return line, expression_of(eqn, line) if line is not None else ""


class _Occurs:
    """Whether a value occurs in a run."""

    def __init__(self, run: Values) -> None:
        seen = [value.seen for value in run.made if value.seen is not None]
        self.rows = np.unique(np.array(seen), axis=0) if seen else np.zeros((0, 8))  # sorted by their mean

    def __call__(self, seen: np.ndarray) -> bool:
        size = seen[1]
        first, last = np.searchsorted(self.rows[:, 0], [seen[0] - _LIKE * size, seen[0] + _LIKE * size])
        far = np.abs(self.rows[first : last + 1] - seen)
        limits = [_LIKE * size] * 3 + [_EXTREMES * size] * 2 + [_LIKE] * 3
        return bool((far <= limits).all(axis=1).any())
