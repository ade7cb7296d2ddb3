"""Which equations of a kernel no compiler leaves in the program: constants, and what has been computed before."""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .capture import subprograms
from .ops import ELEMENTWISE, inlined, is_literal

_SPREAD = frozenset("broadcast_in_dim broadcast_to reshape squeeze transpose".split())  # of one number: that number
_ALONE = frozenset(["mul", "div", "pow"])  # which leave a value as it is, given a 1
_found: "weakref.WeakKeyDictionary[Any, frozenset[int]]" = weakref.WeakKeyDictionary()

Number = int  # of a value: two values with the same one are equal
_Key = tuple[Any, ...]


def folded(program: Any) -> frozenset[int]:
    """id() of the equations whose arithmetic is not there when a program has been compiled.

    Those are arithmetic on numbers that stand in the program, a product with 1, and whatever has been computed before
    of the same values. An equation that is reached on several ways is among them if it is folded on each of them.
    """
    found = _found.get(program)
    if found is None:
        walk = _Walk()
        walk.run(program, walk.fresh(len(program.invars)), {})
        found = _found[program] = frozenset(walk.gone - walk.kept)
    return found


class _Walk:
    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.kept: set[int] = set()
        self._numbers: Iterator[Number] = itertools.count()
        self._literals: dict[_Key, Number] = {}
        self._constant: dict[Number, Any] = {}  # one number for all elements, None: not known which

    def fresh(self, count: int) -> list[Number]:
        return list(itertools.islice(self._numbers, count))

    def run(self, program: Any, given: Sequence[Number], before: dict[_Key, list[Number]]) -> list[Number]:
        """Numbers of the results. before: what has been computed, and is there still."""
        env = dict(zip(program.constvars, self.fresh(len(program.constvars)), strict=True))
        env.update(zip(program.invars, given, strict=True))

        def number(atom: Any) -> Number:
            return self._literal(atom) if is_literal(atom) else env[atom]

        for eqn in program.eqns:
            env.update(zip(eqn.outvars, self._results(eqn, [number(v) for v in eqn.invars], before), strict=True))
        return [number(v) for v in program.outvars]

    def _literal(self, atom: Any) -> Number:
        value = np.asarray(atom.val)
        key = (str(value.dtype), value.tobytes())
        if key not in self._literals:
            (self._literals[key],) = self.fresh(1)
            self._constant[self._literals[key]] = value[()]
        return self._literals[key]

    def _results(self, eqn: Any, given: list[Number], before: dict[_Key, list[Number]]) -> list[Number]:
        inner = inlined(eqn)
        if inner is not None:
            return self.run(inner, given, before)
        bodies = [*subprograms(eqn)]
        for body in bodies:  # its values are of no use outside of it
            self.run(body, self.fresh(len(body.invars)), dict(before))
        if eqn.effects or bodies:
            return self.fresh(len(eqn.outvars))
        name = eqn.primitive.name
        key = (name, repr(sorted(eqn.params.items(), key=lambda item: item[0])), *given)
        known = before.get(key)
        constant = bool(given) and all(n in self._constant for n in given)
        others = given if name == "mul" else given[1:]
        by_one = name in _ALONE and any(self._constant.get(n) == 1 for n in others)
        free = known is not None or by_one or (constant and name in ELEMENTWISE)
        (self.gone if free else self.kept).add(id(eqn))
        if known is None:
            known = before[key] = self.fresh(len(eqn.outvars))
            if constant and (name in ELEMENTWISE or name in _SPREAD):
                spread = name in _SPREAD or name == "convert_element_type"
                self._constant[known[0]] = self._constant[given[0]] if spread else None
        return known
