"""Where an answer differs from one that is right, and which of the differences matter: delta debugging of programs.

The answer is led towards the right one in as few places as will do (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", 2002): what has to change for it to be right is what is wrong with it.
"""

import ast
import dataclasses
import difflib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .straight import (
    IGNORED,
    UNORDERED,
    VERSION,
    Inlined,
    copy_of,
    in_order,
    is_step,
    is_work,
    key_of,
    kinds_of_names,
    may_change,
    must_follow,
    name_of,
    reads_of,
    size_of,
    uses_of,
)

Functions = Mapping[str, ast.FunctionDef]
Path = tuple[tuple[str, int | None], ...]  # from a function to one of its nodes: (field, position in a list of nodes)

_ALIKE = 0.1  # two functions with less than this in common are two ways to write it, and one is not led to the other
_SHARED = 0.25  # of two expressions with less in common, one is put in the place of the other
_FEW_PLACES = 12  # statements that are tried one by one, before half of them
_PARTS = 8  # of a function that has little in common with the right one: so many are tried alone
_FEW = 2  # so many places are worth naming whatever their size
_LIKE_VALUES, _ALIKE_VALUES = 10, 0.4  # votes for two names if their values are the same; how much of them has to be
_SAME_NAME = 5  # votes for two names that are the same
_WHOLE = 60  # nodes of a value that is compared with what it is made of
_SHORT = 24  # nodes of a value of the right program that may stand where it is used
_MOVED = 0.6  # of two statements, from 0 to 1: more than that, and one is the other in another place
SHOWN = 90  # characters: more than that is not told, it is for the reader to write
_PLAIN = 60  # characters of an expression that is told as a whole
_SIMPLE = 8  # nodes: an expression that is told as it is
_PART, _MUCH = 3, 0.7  # nodes of a part of the answer's that may stay, and how much of it is as in the right one
_FINER = 10  # trials to find a smaller one
_WAYS, _FINE = 4, 8  # other ways to see a larger one that are tried, and the places in one of them


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place of `function` where the answer has `was` and the right one has `should`; either may be missing.

    path: where it stands, () for the whole function. line: of the answer's own file; what is missing comes behind it.
    parts: of two functions that have little in common, where they differ.
    """

    function: str
    path: Path
    was: ast.AST | None
    should: ast.AST | None
    line: int
    parts: "tuple[Difference, ...]" = ()

    @property
    def whole(self) -> bool:
        return not self.path

    @property
    def size(self) -> int:
        """How much there is to read, in nodes."""
        return max(size_of(node) for node in (self.was, self.should) if node is not None)


def differences(answer: Functions, right: Functions) -> list[Difference]:
    """Where the functions of an answer differ from the right ones of the same names, in the order of their lines.

    Both are to be `straightened`.
    """
    found = []
    for name, mine in answer.items():
        if name in right and mine is not right[name]:
            found += _at_their_uses(mine, _of_whole_functions(mine, list(_of_function(mine, right[name]))))
    return found


def _of_whole_functions(function: ast.FunctionDef, found: list[Difference]) -> list[Difference]:
    """The differences, those inside of a small function that has a name as one of the whole of it, where another use of
    the name is right, or is to be something else."""
    inside: dict[Path, list[Difference]] = {}
    there: dict[Path, Any] = {path: n for path, n in _inside(function, ()) if isinstance(n, ast.Lambda)}
    there = {path: n for path, n in there.items() if hasattr(n, "defined")}
    for d in found:
        around = next((d.path[:n] for n in range(len(d.path)) if d.path[:n] in there), None)
        inside.setdefault(d.path if around is None else around, []).append(d)
    kinds = defaultdict[Any, set[Any]](set)
    for path, n in there.items():
        changes = ((d.path[len(path) :], key_of(d.was), key_of(d.should)) for d in inside.get(path, ()))
        kinds[n.defined].add(frozenset(changes))
    whole = []
    for path, mine in inside.items():
        if path not in there or mine[0].path == path or len(kinds[there[path].defined]) == 1:
            whole += mine
            continue
        changed: Any = applied({function.name: function}, mine)[function.name]
        for field, at in path:
            changed = getattr(changed, field) if at is None else getattr(changed, field)[at]
        use = there[path].use
        whole.append(Difference(function.name, path, use, changed, use.lineno))
    return whole


def _at_their_uses(function: ast.FunctionDef, found: list[Difference]) -> list[Difference]:
    """The differences, those of a value that has a name where the name is used, unless no use of it is right.

    A value that has a name in the right program, too, and does not stand alone there, is used in the wrong way.
    """

    def definition(node: Any) -> Any:
        return getattr(node, "defined", None)

    uses = Counter(map(definition, ast.walk(function)))
    alike = Counter((definition(d.was), key_of(d.should)) for d in found)
    there = []
    for d in found:
        defined, use = definition(d.was), getattr(d.was, "use", None)
        inside = ast.walk(d.should) if d.should is not None else ()
        part = any(n is not d.should and hasattr(n, "use") and key_of(n) == key_of(d.was) for n in inside)
        if use is not None and (part or hasattr(d.was, "unpacked") or alike[defined, key_of(d.should)] < uses[defined]):
            d = dataclasses.replace(d, was=use, line=use.lineno)
        there.append(d)
    return there


def applied(answer: Functions, chosen: Sequence[Difference]) -> dict[str, ast.FunctionDef]:
    """The functions of an answer with these differences undone, so that it is right in those places."""
    changed = dict(answer)
    for name in {d.function for d in chosen}:
        mine = [d for d in chosen if d.function == name]
        if mine[0].whole:
            assert isinstance(mine[0].should, ast.FunctionDef)
            changed[name] = mine[0].should
            continue
        tree = copy_of(answer[name])
        # from the end: positions stay as they are. In one place, what goes goes before anything comes
        in_order = sorted(enumerate(mine), key=lambda pair: (_place(pair[1].path), pair[1].was is not None, pair[0]))
        for _, each in reversed(in_order):
            _put(tree, each)
        changed[name] = ast.fix_missing_locations(tree)
    return changed


def that_matter(
    answer: Functions,
    found: Sequence[Difference],
    is_right: Callable[[Functions], bool | None],
    most: int,
    group_of: Callable[[str], str] = str,
    needed: Sequence[Difference] = (),
) -> list[Difference]:
    """The differences that have to be undone before an answer is right, as few as can be found in `most` trials.

    [] where it would not be right even with all of them undone. group_of: the functions of one group are tried together
    first. is_right: None if there is no more to try with. needed: some of them that have to be undone, as is known.
    """
    search = _Search(answer, found, is_right, most)
    everything = list(range(len(found)))
    if not found or search.right_with([]) or not search.right_with(everything):  # what is wrong may be none of them
        return []
    kept = _kept(search, found, group_of, needed)
    # two that only fit each other may both have stayed: is there one that does it alone?
    left = [unit for unit in _one_in_the_text(found) if unit[0] in kept]
    if 1 < len(left) <= search.left:
        kept = next((unit for unit in left if search.right_with(unit)), kept)
    told = [
        n for unit in left if unit[0] in kept for n in unit if n == unit[0] or None in (found[n].was, found[n].should)
    ]
    chosen = _in_part(search, told, needed)
    several = {n for unit in left if len(unit) > 1 for n in unit}
    chosen = _in_small(search, chosen, several)
    smaller = [search.every[n] for n in chosen if n >= len(found)]
    for name in {d.function for d in smaller}:
        smaller = _at_their_uses(answer[name], smaller)
    return [search.every[n] for n in chosen if n < len(found)] + smaller


class _Search:
    """Tries an answer with some of its differences undone: each of `every`, by its number. left: trials."""

    def __init__(
        self, answer: Functions, found: Sequence[Difference], is_right: Callable[[Functions], bool | None], most: int
    ) -> None:
        self.answer, self.every, self.is_right, self.left, self.most = answer, list(found), is_right, most, most
        self.known: dict[frozenset[int], bool] = {}

    def right_with(self, numbers: Sequence[int]) -> bool:
        key = frozenset(numbers)
        if key not in self.known:
            right = self.is_right(applied(self.answer, [self.every[n] for n in sorted(key)]))
            self.left = 0 if right is None else self.left - 1
            self.known[key] = bool(right)
        return self.known[key]

    def added(self, places: Sequence[Difference]) -> list[int]:
        """The numbers of more differences."""
        self.every += places
        return [*range(len(self.every) - len(places), len(self.every))]


def _kept(
    search: _Search, found: Sequence[Difference], group_of: Callable[[str], str], needed: Sequence[Difference]
) -> list[int]:
    """Whole functions first, then their statements, then parts of these: what can go is not what is wrong."""
    kept = list(range(len(found)))
    base = [n for n, d in enumerate(found) if any(_overlap(d, each) for each in needed)]
    there = {found[n].function for n in base}
    others = [u for u in _one_in_the_text(found) if found[u[0]].function in there and not set(u) & set(base)]
    if len(others) < search.most // 2:  # it may take one more
        kept = next(([*base, *unit] for unit in others if search.right_with([*base, *unit])), kept)
    statements: dict[tuple[str, Path], list[list[int]]] = {}
    moved = {id(new): gone for gone, new in moves(found, found)}
    for same in _one_in_the_text(found):
        first = moved.get(id(found[same[0]]), found[same[0]])
        statements.setdefault((first.function, _statement_of(first.path)), []).append(same)
    functions: dict[str, list[Any]] = {}
    for (name, _), units in statements.items():
        functions.setdefault(group_of(name), []).append(units)
    groups = list(functions.values())
    if len(kept) == len(found) and 1 < len(groups) < search.most // 4:
        alone = next((g for g in groups if search.right_with([*_numbers(g)])), None)
        kept, groups = (sorted(_numbers(alone)), [alone]) if alone else (kept, groups)
    while groups and search.left > 0:
        group = groups.pop(0)
        gone = set(_numbers(group))
        rest = [n for n in kept if n not in gone]
        if rest and search.right_with(rest):
            kept = rest
            continue
        while len(group) == 1 and isinstance(group[0], list):
            (group,) = group
        if len(group) <= _FEW_PLACES and gone >= set(kept):  # most answers have one mistake
            alone = next((p for p in group if isinstance(p, list) and search.right_with([*_numbers(p)])), None)
            if alone is not None:
                kept, groups = sorted(_numbers(alone)), [alone]
                continue
        if len(group) > 1:
            half = len(group) // 2
            groups[:0] = [part for part in (group[:half], group[half:]) if isinstance(part[0], list)]
    for n in [n for n in kept if found[n].was is None and len(kept) > 1]:  # what needed it may be gone by now
        rest = [k for k in kept if k != n]
        needless = _is_needless(found[n], [search.answer[found[n].function], *(found[k].should for k in rest)])
        kept = rest if needless or (rest and search.left > 0 and search.right_with(rest)) else kept
    return kept


def _is_needless(missing: Difference, others: Sequence[ast.AST | None]) -> bool:
    """Whether what is missing gives a name alone, and nobody else reads it."""
    name = name_of(missing.should.targets[0]) if isinstance(missing.should, ast.Assign) else ""
    return name != "" and not any(name in reads_of(other) for other in others if other is not None)


def _in_part(search: _Search, chosen: list[int], needed: Sequence[Difference]) -> list[int]:
    """The same in a part of each place, where that is enough."""
    every = search.every
    ways = _alike(every[chosen[0]], needed) if len(chosen) == 1 else (p for n in chosen for p in _less(every[n]))
    for places in itertools.islice(ways, max(0, search.left)):
        elsewhere = [n for n in chosen if every[n].function not in {each.function for each in places}]
        if search.right_with(small := [*elsewhere, *search.added(places)]):
            for unit in dict.fromkeys(map(_side_by_side, (every[n] for n in small))):
                fewer = [n for n in small if _side_by_side(every[n]) != unit]
                small = fewer if fewer and search.left > 0 and search.right_with(fewer) else small
            return small
    return chosen


def _in_small(search: _Search, chosen: list[int], several: set[int]) -> list[int]:
    """The same in smaller places. several: those that are one in the text with others, and stay as they are."""
    every, queue = search.every, [n for n in chosen if n not in several]
    search.left = min(search.left, _FINER)
    while queue:
        n = queue.pop(0)
        for places in _finer(search.answer[every[n].function], every[n]) if search.left > 0 else ():
            small = search.added(places)
            less = [*(k for k in chosen if k != n), *small]
            if search.right_with(less):
                # a part may need less than the whole; of what changes in one expression, all or some
                units: dict[Path, list[int]] = {}
                for k in small:
                    units.setdefault(every[k].path[:-1], []).append(k)
                alone = [[k] for k in less if k in small or every[k].was is None]
                for unit in [*(unit for unit in units.values() if len(unit) > 1), *alone]:
                    fewer = [k for k in less if k not in unit]
                    less = fewer if fewer and search.right_with(fewer) else less
                if len(less) <= len(chosen) or len(ast.unparse(every[n].should or ast.Pass())) > SHOWN:
                    chosen = sorted(less)
                    queue += [k for k in small if k in chosen]
                    break
    return chosen


def _side_by_side(d: Difference) -> Any:
    """What comes and what goes in one list of arguments goes together."""
    return d.path if d.was and d.should else (d.path[:-1], d.path[-1][0])


def _overlap(a: Difference, b: Difference) -> bool:
    """Whether one of two differences is inside of the other."""
    short, long = sorted((a, b), key=lambda d: len(d.path))
    inside = a.function == b.function and long.path[: len(short.path)] == short.path
    return inside and (short.was is not None or short == long)  # what is missing stands in front of what is there


def moves(found: Sequence[Difference], among: Sequence[Difference]) -> Iterator[tuple[Difference, Difference]]:
    """The statements that `found` miss, while one of `among` has much the same too much: (too much, missing)."""
    missing = [(d.should, d) for d in found if d.was is None and isinstance(d.should, ast.stmt)]
    gone = [(d.was, d) for d in among if d.should is None and isinstance(d.was, ast.stmt)]
    both = [(likeness(x, y), old, new) for x, old in gone for y, new in missing if old.function == new.function]
    taken: set[int] = set()
    for much, old, new in sorted(both, key=lambda pair: -pair[0]):
        if much > _MOVED and not {id(old), id(new)} & taken:
            taken |= {id(old), id(new)}
            yield old, new


def _finer(function: ast.FunctionDef, difference: Difference) -> Iterator[list[Difference]]:
    """Other ways to see what one expression of a function has to become, to be tried one after the other.

    Part by part; with the answer's own parts where they are much like those of the right one; in a value that it uses;
    and with parts that are much alike but stand in other surroundings, so that the surroundings stay.
    """
    was, should = difference.was, difference.should
    if not (isinstance(was, ast.expr) and isinstance(should, ast.expr)) or difference.size <= _SIMPLE:
        return
    here = list(_inside(was, difference.path))
    pairs = [(_shared(x, y), path, x, y) for path, x in here for y in ast.walk(should) if type(x) is type(y)]
    alike = sorted((p for p in pairs if p[0] > 2 and _in_parts(p[2], p[3])), key=lambda p: (p[2] is not was, -p[0]))
    own = _with_parts_of(was, should)
    if own is not None:
        yield [dataclasses.replace(difference, should=own)]
    if len(ast.unparse(should)) <= _PLAIN:
        return
    yield from itertools.islice(_of_values(function, difference), _WAYS)
    seen = set()
    for _, path, x, y in alike[:_WAYS]:
        places = [place for place in _between(x, y, path, difference.line, fine=True) if place[0] != difference.path]
        key = frozenset(str(place[0]) for place in places)
        little = x is was or sum(place[-1] for place in places) < difference.size
        if 0 < len(places) <= _FINE and key not in seen and little:
            seen.add(key)
            yield [_made(difference.function, place) for place in places]


def _of_values(function: ast.FunctionDef, difference: Difference) -> Iterator[list[Difference]]:
    """The same in one of the values that an expression uses by name, which may be what is wrong with it: as what is
    most like it in the right expression."""
    was: Any = difference.was
    should: Any = difference.should
    values = defaultdict[Any, list[tuple[Path, ast.AST]]](list)
    for path, n in _inside(was, difference.path):
        if hasattr(n, "defined") and n is not was:
            values[n.defined].append((path, n))
    for path, n in _inside(function, ()):
        if isinstance(n, ast.Assign) and name_of(n.targets[0]) in reads_of(was) - reads_of(should):
            values[name_of(n.targets[0])].append(((*path, ("value", None)), n.value))
    ways = []
    for places in values.values():
        x = places[0][1]
        like = [(share(x, y), n, y) for n, y in enumerate(ast.walk(should)) if type(y) is type(x)]
        much, _, y = max(like, default=(0.0, 0, x))
        if much > _ALIKE_VALUES and key_of(x) != key_of(y):
            ways.append((much, [(path, n, y) for path, n in places]))
    for _, way in sorted(ways, key=lambda way: -way[0]):
        found = [place for path, x, y in way for place in _between(x, y, path, difference.line, fine=True)]
        if 0 < len(found) <= _FINE:
            yield [_made(difference.function, place) for place in found]


def _less(difference: Difference) -> Iterator[list[Difference]]:
    """With a part of what should be there: where the right one goes two ways, the answer may go one."""
    was, should = difference.was, difference.should
    for part in ast.walk(should) if isinstance(was, ast.expr) and should is not None else ():
        if part is not should and type(part) is type(was) and _in_parts(part, was) and _shared(part, was) > _PART:
            yield [dataclasses.replace(difference, should=part)]


def _alike(difference: Difference, needed: Sequence[Difference]) -> Iterator[list[Difference]]:
    """Places in two functions that have little in common, where they differ, one by one; in these, and in expressions
    that are too long to be told, calls and comparisons that are the same with other parts, the most alike first."""
    was, should = difference.was, difference.should
    if was is None or should is None or not (difference.whole or len(ast.unparse(should)) > SHOWN):
        return
    more = [part for part in difference.parts if not any(_overlap(part, d) for d in needed)]
    yield from ([*needed, part] for part in more[:_PARTS])
    inside = _inside(was, difference.path)
    here = [(p, x) for p, x in inside if isinstance(x, ast.Call | ast.Compare) and x is not was]
    there = {key_of(y): y for y in ast.walk(should) if isinstance(y, ast.Call | ast.Compare)}
    mine = {key_of(x) for _, x in here}
    new = [y for key, y in there.items() if key not in mine]
    here = [(p, x) for p, x in here if key_of(x) not in there]
    pairs = [(share(x, y), n, p, x, y) for n, (p, x) in enumerate(here) for y in new if type(x) is type(y)]
    together: dict[int, tuple[ast.AST, list[Difference]]] = {}
    for much, n, path, x, y in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:_PARTS]:
        if much > _ALIKE_VALUES and _in_parts(x, y):
            places = [_made(difference.function, place) for place in _between(x, y, path, difference.line, fine=True)]
            apart = not any(_overlap(a, b) for _, others in together.values() for a in others for b in places)
            if n not in together and apart and all(y is not used for used, _ in together.values()):
                together[n] = y, places
            yield places
    if len(together) > 1:
        yield [each for _, places in together.values() for each in places]


def _in_parts(x: ast.AST, y: ast.AST) -> bool:
    """Whether two expressions of one type are the same thing with other parts."""
    ops, others = ([type(op) for op in getattr(n, "ops", [getattr(n, "op", None)])] for n in (x, y))
    alike = _head(x) == _head(y) if isinstance(x, ast.Call) else _comparable(x, y)
    return isinstance(x, ast.expr) and not isinstance(x, ast.Attribute) and ops == others and alike


def _with_parts_of(was: ast.expr, should: ast.expr) -> ast.expr | None:
    """The right expression with parts of the answer's in the places of parts that are much like them; None for none."""
    parts = [n for n in ast.walk(was) if isinstance(n, ast.expr) and n is not was and size_of(n) > _PART]
    # of sizes, x.shape[0] and x.shape[1], none is the other
    mine = [n for n in parts if getattr(getattr(n, "value", None), "attr", "") != "shape"]
    keys = {key_of(n) for n in mine}
    exchanged = []

    def part(node: Any) -> Any:
        if isinstance(node, list):
            return [part(each) for each in node]
        if not isinstance(node, ast.AST) or key_of(node) in keys:
            return node
        like = [m for m in mine if type(m) is type(node) and _in_parts(m, node)] if node is not should else []
        best = max(like, key=lambda m: share(m, node), default=None)
        if best is not None and share(best, node) > _MUCH:
            exchanged.append(copy_of(best))
            exchanged[-1].own = True
            return exchanged[-1]
        new = copy_of(node)
        for field, value in ast.iter_fields(node):
            setattr(new, field, part(value))
        return new

    changed = part(should)
    return changed if exchanged else None


def share(a: ast.AST, b: ast.AST) -> float:
    """How much of two expressions is the same, from 0 to 1."""
    return 2 * _shared(a, b) / (len(_words(a)) + len(_words(b)))


def _inside(node: Any, path: Path) -> Iterator[tuple[Path, ast.AST]]:
    """A node and the expressions and statements inside of it, each with its path. path: of the node."""
    yield path, node
    if hasattr(node, "unpacked") or getattr(node, "often", False):
        return
    for field, value in ast.iter_fields(node):
        for n, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(each, ast.expr | ast.keyword | ast.stmt | ast.comprehension):
                yield from _inside(each, (*path, (field, n)))


def _statement_of(path: Path) -> Path:
    """The path to the innermost statement around a node."""
    ends = [n for n, (field, place) in enumerate(path, 1) if field in ("body", "orelse") and place is not None]
    return path[: max(ends, default=0)]


def _numbers(group: Any) -> Iterator[int]:
    if isinstance(group, int):
        yield group
    else:
        for each in group:
            yield from _numbers(each)


def _one_in_the_text(found: Sequence[Difference]) -> list[list[int]]:
    """The differences, by number; those together that are one in the text, where a name stood for a value, and what
    comes and goes among the arguments of one call."""
    same: dict[Any, list[int]] = {}
    for n, d in enumerate(found):
        text = d.was is not None and (d.line, getattr(d.was, "col_offset", 0), key_of(d.was), key_of(d.should))
        beside = None in (d.was, d.should) and d.path and d.path[-1][0] == "args" and d.path[:-1]
        same.setdefault((d.function, beside or text) if beside or text else n, []).append(n)
    return list(same.values())


# --- two trees -------------------------------------------------------------------------------------------------------


def _of_function(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> Iterator[Difference]:
    theirs = _in_order_of(mine, _inlined_as_in(mine, _with_names_of(mine, theirs)))
    whole = Difference(mine.name, (), mine, theirs, mine.lineno)
    places = list(_between(mine, theirs, (), mine.lineno))
    found = [Difference(mine.name, *place) for *place, _ in places]
    for d in found:
        _mark(d.should)
    again = [new for _, new in moves(found, found)]  # what is in another place counts once
    much = sum(much for d, (*_, much) in zip(found, places, strict=True) if d not in again)
    alike = much <= (1 - _ALIKE) * max(size_of(mine), size_of(theirs))
    yield from found if alike or len(found) <= _FEW else [dataclasses.replace(whole, parts=tuple(found))]


def _made(function: str, place: "_Place") -> Difference:
    path, was, should, line, _ = place
    _mark(should)
    use = getattr(was, "use", None)
    in_place = hasattr(was, "unpacked") or getattr(was, "often", False)
    if isinstance(use, ast.Name) and (in_place or (should is not None and _is_around(was, should))):
        was, line = use, use.lineno  # told where it is used
    return Difference(function, path, was, should, line)


def _mark(node: Any) -> None:
    """Marks what is not of the answer's text."""
    if isinstance(node, ast.AST) and not hasattr(node, "own"):
        if "lineno" in node._attributes:  # of operators and the like, Python makes one for all programs
            node.theirs = True  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            _mark(child)


def _inlined_as_in(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function without names for values that have none in the answer."""
    plain = {key_of(n) for n in ast.walk(mine) if isinstance(n, ast.expr)}
    there = _bound(mine) | {n.id for n in ast.walk(mine) if isinstance(n, ast.Name)}
    for body in [n.body for n in ast.walk(theirs) if isinstance(n, ast.FunctionDef | ast.For)]:
        for each in list(body):
            if not (isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)):
                continue
            name, value, behind = each.targets[0].id, each.value, body[body.index(each) + 1 :]
            uses = [n for n in ast.walk(theirs) if isinstance(n, ast.Name) and n.id == name]
            here = sum(isinstance(n, ast.Name) and n.id == name for other in behind for n in ast.walk(other))
            again = len(uses) > 2 and any(is_work(n) and _is_costly(n) for n in ast.walk(value))
            short = key_of(value) in plain or size_of(value) < _SHORT
            if name in there or again or not short or len(_stores_of(name, theirs)) != 1 or here != len(uses) - 1:
                continue
            if _stays(value, name, behind):
                body.remove(each)
                body[:] = [Inlined(name, value).visit(other) for other in body]
    return theirs


def _is_costly(call: Any) -> bool:
    """Whether a call does more than an operation for each element."""
    module = getattr(getattr(call.func, "value", None), "id", "")
    return _head(call) != "astype" and (module != "jnp" or _head(call) in _PRODUCTS)


_PRODUCTS = frozenset("dot einsum matmul tensordot".split())


def _stays(value: ast.expr, name: str, behind: Sequence[ast.stmt]) -> bool:
    """Whether a value is the same at all places in the statements behind it where its name is used."""
    using = [n for n, each in enumerate(behind) if name in reads_of(each)]
    if not using or any(isinstance(n, ast.Lambda) for n in ast.walk(value)):
        return False
    later = [behind[n] for n in using if isinstance(behind[n], ast.FunctionDef) and not behind[n].decorator_list]  # type: ignore[attr-defined]
    if later and any(map(may_change, ast.walk(value))):
        return False
    between = behind[: using[-1] + (not isinstance(behind[using[-1]], ast.Assign | ast.AugAssign | ast.Return))]
    if any(isinstance(n, ast.Expr) for each in between for n in ast.walk(each)) and _may_read(value):
        return False
    return not any(uses_of(each)[1] & reads_of(value) for each in between)


def _may_read(value: ast.expr) -> bool:
    """Whether a value may depend on what is in memory, as it is then."""
    return any(may_change(n) or isinstance(getattr(n, "func", None), ast.Name) for n in ast.walk(value))


def _stores_of(name: str, function: ast.FunctionDef) -> list[ast.Name]:
    stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [n for n in stored if n.id == name]


def _in_order_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function with its statements in the order of the answer's, as far as none overtakes one it needs."""
    ordered = copy_of(theirs)
    x, y = mine.body, ordered.body
    like = sorted(((likeness(a, b), -i, -j) for i, a in enumerate(x) for j, b in enumerate(y)), reverse=True)
    place: dict[int, int] = {}
    for share, i, j in like:
        if share > 0 and -j not in place and -i not in place.values():
            place[-j] = -i
    wanted = [place.get(j, max((place[k] for k in place if k < j), default=-1)) for j in range(len(y))]
    left, body = list(range(len(y))), []
    while left:
        free = [j for j in left if not any(must_follow(y[j], y[k]) for k in left if k < j)]
        left.remove(first := min(free, key=lambda j: (wanted[j], j)))
        body.append(y[first])
    ordered.body = body
    return ordered


_Place = tuple[Path, Any, Any, int, int]


def _between(a: ast.AST, b: ast.AST, path: Path, line: int, fine: bool = False) -> Iterator[_Place]:
    """The places where tree b differs from tree a: (path in a, what a has there, what b has, line of a, how much).

    fine: as small as can be, also where the two have little in common.
    """
    line = getattr(a, "lineno", line)
    b = _written_as(a, b)
    if key_of(a) == key_of(b):
        return
    whole = hasattr(a, "unpacked") or getattr(a, "often" if fine else "shared", False)
    apart = type(a) is not type(b) or not _comparable(a, b) or whole
    if apart or (path and _is_around(a, b)):
        yield path, a, b, line, _change(a, b)
        return
    inner: list[_Place] = []
    for field, x in ast.iter_fields(a):
        y = getattr(b, field)
        if field in IGNORED or (field == "name" and getattr(a, "decorator_list", None)):
            continue
        if isinstance(x, ast.AST) and isinstance(y, ast.AST):
            inner += _between(x, y, (*path, (field, None)), line, fine)
        elif isinstance(x, list) and isinstance(y, list):
            inner += _between_lists(x, y, (*path, (field, None)), line, field, fine)
        elif x != y:
            inner = [(path, a, b, line, _change(a, b))]
            break
    own = [each for each in inner if not getattr(each[1], "shared", False)]  # the others are wrong where they get names
    changed = sum(much for *_, much in own)
    little = changed >= (1 - _SHARED) * max(size_of(a), size_of(b))  # in common: it is replaced as a whole
    other_way = isinstance(a, ast.Compare) and any(isinstance(x, ast.cmpop) for _, x, *_ in inner)
    if path and own and len(inner) > 1 and not fine and (other_way or (isinstance(a, ast.expr) and little)):
        yield path, a, b, line, changed
    else:
        yield from inner


_TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq}


def _written_as(a: Any, b: Any) -> Any:
    """Tree b in the form that tree a has, where there are two ways to write one thing."""
    if isinstance(a, ast.Assign) and isinstance(b, ast.AugAssign):
        longer = ast.copy_location(ast.Assign([b.target], ast.BinOp(read_of(b.target), b.op, b.value)), b)
        return longer if _added_to(a) is not None else b
    if isinstance(a, ast.AugAssign) and isinstance(b, ast.Assign) and (added := _added_to(b)) is not None:
        return ast.copy_location(ast.AugAssign(b.targets[0], b.value.op, added), b)  # type: ignore[arg-type, attr-defined]
    if isinstance(a, ast.Call) and isinstance(b, ast.Call):
        return _called_as(a, b)
    if isinstance(a, _MADE) and isinstance(b, _MADE):
        return _made_as(a, b)
    turned: ast.expr | None = None
    if isinstance(a, ast.BinOp) and isinstance(b, ast.BinOp) and type(a.op) is type(b.op) in _EITHER_WAY:
        turned = ast.BinOp(b.right, b.op, b.left)
        pairs = [(a.left, b.left, b.right), (a.right, b.right, b.left)]
    elif isinstance(a, ast.Compare) and isinstance(b, ast.Compare) and len(a.ops) == len(b.ops) == 1:
        other = _TURNED.get(type(b.ops[0]))
        turned = ast.Compare(b.comparators[0], [other()], [b.left]) if other else None
        pairs = [(a.left, b.left, b.comparators[0]), (a.comparators[0], b.comparators[0], b.left)]
    if turned is None:
        return b
    straight, crossed = (sum(_shared(p[0], p[n]) for p in pairs) for n in (1, 2))
    return ast.copy_location(turned, b) if crossed > straight else b


def read_of(target: ast.expr) -> Any:
    """A place that is stored into, as an expression."""
    copied: Any = copy_of(target)
    copied.ctx = ast.Load()
    return copied


def _added_to(store: ast.Assign) -> ast.expr | None:
    """v of `x = x + v`, whatever the operator."""
    if not isinstance(store.value, ast.BinOp):
        return None
    before, left, right = (key_of(n) for n in (read_of(store.targets[0]), store.value.left, store.value.right))
    if before == left:
        return store.value.right
    return store.value.left if before == right and type(store.value.op) in _EITHER_WAY else None


_EITHER_WAY = (ast.Mult, ast.Add, ast.BitAnd, ast.BitOr)


_MODULES = frozenset("jnp lax jax np jax.lax jax.nn jax.numpy".split())


def _called_as(a: ast.Call, b: ast.Call) -> ast.Call:
    """`x.sum(axis=0)` as `jnp.sum(x, axis=0)`, where that is how call a is written, and the other way round."""
    if not (isinstance(a.func, ast.Attribute) and isinstance(b.func, ast.Attribute)) or a.func.attr != b.func.attr:
        return b
    mine, theirs = (ast.unparse(n.func.value) in _MODULES for n in (a, b))  # type: ignore[attr-defined]
    if mine and not theirs:
        several = a.func.attr in _OF_AXES and len(b.args) > 1
        args = [ast.copy_location(ast.Tuple(b.args, ast.Load()), b)] if several else b.args
        b = ast.copy_location(ast.Call(copy_of(a.func), [b.func.value, *args], b.keywords), b)
    elif theirs and not mine and b.args:
        method = ast.copy_location(ast.Attribute(b.args[0], a.func.attr, ast.Load()), b)
        args = b.args[1:]
        if a.func.attr in _OF_AXES and len(a.args) > 1 and isinstance(args[0], ast.Tuple):
            args = args[0].elts
        b = ast.copy_location(ast.Call(method, args, b.keywords), b)
    return b


_OF_AXES = frozenset("transpose reshape".split())  # methods that take several numbers, or a tuple of them


_MADE = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def _made_as(a: _MADE, b: _MADE) -> Any:
    """A comprehension with the variables of another one."""
    names = {name_of(y.target): name_of(x.target) for x, y in zip(a.generators, b.generators, strict=False)}
    new = {mine for theirs, mine in names.items() if mine != theirs}
    return b if "" in new or new & reads_of(b) else _Renamed(names).visit(copy_of(b))


def _shared(a: ast.AST, b: ast.AST) -> int:
    """How many words two trees have in common; all of them and one, if they are the same."""
    return (Counter(_words(a)) & Counter(_words(b))).total() + (key_of(a) == key_of(b))


def _change(x: ast.AST | None, y: ast.AST | None) -> int:
    """How many nodes change; what one program has around all of the other does not count as a change of the other."""
    large, small = sorted((size_of(n) if n is not None else 0 for n in (x, y)), reverse=True)
    if x is None or y is None:
        return large
    return large - small if _is_around(x, y) else large


def _is_around(x: ast.AST, y: ast.AST) -> bool:
    """Whether one of two programs is a part of the other."""
    outer, inner = (x, y) if size_of(x) >= size_of(y) else (y, x)
    return any(key_of(n) == key_of(inner) for n in ast.walk(outer) if type(n) is type(inner))


def _comparable(a: ast.AST, b: ast.AST) -> bool:
    """Whether two nodes of one type may be compared part by part."""
    if isinstance(a, ast.Name | ast.Constant | ast.arguments) or is_step(a):
        return False
    if isinstance(a, ast.Lambda) and isinstance(b, ast.Lambda):
        return len(a.args.args) == len(b.args.args)  # the body may use what has no name in the other
    if isinstance(a, ast.Call) and isinstance(b, ast.Call):
        same = [key_of(x) == key_of(y) for x, y in zip(a.args, b.args, strict=False)]
        return _head(a) == _head(b) or (len(a.args) == len(b.args) and (not same or any(same)))
    if isinstance(a, ast.Compare) and isinstance(b, ast.Compare):
        return len(a.ops) == len(b.ops)
    if isinstance(a, ast.Tuple | ast.List):
        return len(a.elts) == len(b.elts)  # type: ignore[attr-defined]
    return all(
        (x is None) == (y is None) and isinstance(x, list) == isinstance(y, list) and not _has_gaps(x) | _has_gaps(y)
        for (_, x), (_, y) in zip(ast.iter_fields(a), ast.iter_fields(b), strict=False)
    )


def _head(node: ast.AST) -> str:
    """The last name of what is called, also where what is called is the result of a call."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has_gaps(field: Any) -> bool:
    return isinstance(field, list) and None in field


def _between_lists(x: list[Any], y: list[Any], path: Path, line: int, field: str, fine: bool) -> Iterator[_Place]:
    """Of two lists of nodes: what stands in one place of both, and what only one has."""
    at = lambda n: (*path[:-1], (path[-1][0], n))  # noqa: E731
    if field in UNORDERED:
        theirs = {k.arg: k for k in y}
        for n, mine in enumerate(x):
            if mine.arg in theirs:
                yield from _between(mine, theirs.pop(mine.arg), at(n), line, fine)
            else:
                yield at(n), mine, None, line, size_of(mine)
        for extra in theirs.values():
            yield at(len(x)), None, extra, line, size_of(extra)
        return
    pairs = _paired(x, y)
    for i, j in pairs:
        if i is None and j is not None:
            before = max((a for a, b in pairs if a is not None and b is not None and b < j), default=-1)
            ahead = x[before] if before >= 0 else None
            ahead = getattr(ahead, "after", getattr(ahead, "use", ahead))  # a value, where its name stands
            there = getattr(ahead, "end_lineno", line) if before >= 0 else _first_line(x, line)
            yield at(before + 1), None, y[j], there, size_of(y[j])
        elif i is not None and j is None:
            yield at(i), x[i], None, getattr(x[i], "lineno", line), size_of(x[i])
        elif i is not None and j is not None:
            yield from _between(x[i], y[j], at(i), line, fine)


def _paired(x: list[Any], y: list[Any]) -> list[tuple[int | None, int | None]]:
    """Positions that belong together, in order; None where the other list has nothing for it."""
    if len(x) == len(y) and not (x and isinstance(x[0], ast.stmt)):
        return [(n, n) for n in range(len(x))]
    like = [[likeness(a, b) * min(size_of(a), size_of(b)) for b in y] for a in x]  # what is smaller was moved
    best = [[0.0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i in reversed(range(len(x))):
        for j in reversed(range(len(y))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], like[i][j] + best[i + 1][j + 1])
    pairs: list[tuple[int | None, int | None]] = []
    i, j = 0, 0
    while i < len(x) or j < len(y):
        if i < len(x) and j < len(y) and like[i][j] > 0 and best[i][j] == like[i][j] + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif i < len(x) and (j == len(y) or best[i][j] == best[i + 1][j]):
            pairs.append((i, None))
            i += 1
        else:
            pairs.append((None, j))
            j += 1
    return pairs


def _first_line(body: list[Any], line: int) -> int:
    """The line at which a list of statements begins. line: of what is around it."""
    if not body or not isinstance(body[0], ast.stmt):
        return line
    return body[0].lineno - len(getattr(body[0], "decorator_list", []))


_STORES = (ast.Assign, ast.AugAssign)


def _ref_of(store: Any) -> str:
    """The Ref that a value is stored in, "" if it is given a name."""
    target = store.targets[0] if isinstance(store, ast.Assign) else store.target
    return key_of(target.value) if isinstance(target, ast.Subscript) else ""


def _target(store: Any) -> str:
    return key_of(store.targets[0] if isinstance(store, ast.Assign) else store.target)


def likeness(a: ast.AST, b: ast.AST) -> float:
    """How much two statements have in common, from 0 to 1; 0 for those of other kinds."""
    under = [[_head(d) for d in getattr(n, "decorator_list", [])] for n in (a, b)]
    if under[0] != under[1]:
        return 0.0
    stores = isinstance(a, _STORES) and isinstance(b, _STORES)
    if type(a) is not type(b) and not (stores and _target(a) == _target(b)):
        return 0.0
    if stores:
        functions = [isinstance(n.value, ast.Lambda) for n in (a, b)]  # type: ignore[attr-defined]
        if _ref_of(a) != _ref_of(b) or functions[0] != functions[1]:
            return 0.0
    mine, theirs = Counter(_words(a)), Counter(_words(b))
    if mine == theirs and key_of(a) == key_of(b):
        return 1.0
    named = [word for word in mine & theirs if word.partition(" ")[2]]
    if isinstance(a, ast.Expr) and not named:  # two calls without a name in common
        return 0.0
    share = 2 * (mine & theirs).total() / max(1, (mine.total() + theirs.total()))
    same_target = stores and (_ref_of(a) != "" or _target(a) == _target(b))
    return share if same_target or isinstance(a, ast.Return) or share > 0.3 else 0.0


def _words(node: ast.AST) -> list[str]:
    return [_label(n) for n in ast.walk(node)]


def _label(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"FunctionDef {name_of(node)}"
    own = next((getattr(node, f) for f in ("id", "attr", "arg", "value") if hasattr(node, f)), "")
    return f"{type(node).__name__} {own}" if isinstance(own, str | int | float) else type(node).__name__


# --- names -----------------------------------------------------------------------------------------------------------


def _with_names_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function, its own names replaced by those that the answer has for the same things."""
    own, other = _bound(theirs), _bound(mine)
    votes: Counter[tuple[str, str]] = Counter()
    for pair in _arguments_of(mine, theirs).items():
        votes[pair] += 100
    renamed = with_arguments_of(mine, theirs)
    full = defaultdict[str, list[str]](list)  # the answer's names by their values, with what these are made of
    for value, name in _values_of_names(mine, whole=True):
        full[key_of(value)].append(name)
    for value, name in _values_of_names(renamed, whole=True):
        for to in full[key_of(value)]:
            votes[name, to] += 50
    for value, name in _values_of_names(renamed):
        for given, to in _values_of_names(mine):
            same = share(value, given) if type(value) is type(given) and not _of_others(value, given) else 0
            votes[name, to] += 50 if same > 1 else round(_LIKE_VALUES * same) if same > _ALIKE_VALUES else 0
    a, b = [_word(n, other) for n in in_order(mine)], [_word(n, own) for n in in_order(theirs)]
    nodes, others = list(in_order(mine)), list(in_order(theirs))
    kinds, their_kinds = kinds_of_names(mine), kinds_of_names(theirs)
    calls, their_calls = (
        {name for value, name in _values_of_names(f) if isinstance(value, ast.Lambda)} for f in (mine, theirs)
    )
    for start, first, size in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        for node, match in zip(nodes[start : start + size], others[first : first + size], strict=True):
            same_kind = kinds[name_of(node)] & their_kinds[name_of(match)]
            if same_kind and (name_of(node) in calls) == (name_of(match) in their_calls):
                votes[name_of(match), name_of(node)] += 1
    for name in own & other:
        votes[name, name] += _SAME_NAME if kinds[name] & their_kinds[name] else 0
    names: dict[str, str] = {}
    for (from_, to), count in votes.most_common():
        if count and from_ not in names and to not in names.values() and to != "_":
            names[from_] = to
    # a name that the answer has for a value that stands in its place is taken, too
    uses = [getattr(n, "use", None) for n in ast.walk(mine)]
    taken = {*names.values(), *(n.id for n in uses if isinstance(n, ast.Name))}
    # a value that replaces another one under its name, where nothing does in the answer, is under that name still
    names |= {n: names.get(base := n.partition(VERSION)[0], base) for n in own - names.keys() if VERSION in n}
    names |= {n: f"{n}_" for n in own - names.keys() if n in taken}
    return _Renamed(names).visit(copy_of(theirs))


def _of_others(a: ast.expr, b: ast.expr) -> bool:
    """Whether two values are what two Refs hold, or parts of two arrays."""
    read = [n.value for n in (a, b) if isinstance(n, ast.Subscript)]
    return len(read) == 2 and all(isinstance(n, ast.Name) for n in read) and key_of(read[0]) != key_of(read[1])


def _values_of_names(function: ast.FunctionDef, whole: bool = False) -> Iterator[tuple[ast.expr, str]]:
    """(value, name) for every name that is given to a value. whole: with what it is made of in the place of names."""
    known: dict[str, ast.expr] = {}
    for n in in_order(function) if whole else ast.walk(function):
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            value, name = n.value, n.targets[0].id
            for used in reads_of(value) & known.keys() if whole else ():
                value = Inlined(used, known[used]).visit(copy_of(value))
            known[name] = value if size_of(value) < _WHOLE else n.value
            yield known[name], name


def _word(node: ast.AST, bound: set[str]) -> str:
    return f"{type(node).__name__} ?" if name_of(node) in bound else _label(node)


def with_arguments_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> ast.FunctionDef:
    """The right function, its arguments under the names that they have in the answer."""
    return _Renamed(_arguments_of(mine, theirs)).visit(copy_of(theirs))


def _arguments_of(mine: ast.FunctionDef, theirs: ast.FunctionDef) -> dict[str, str]:
    """What each argument of theirs is called in mine: by its place, and by its name where it is given by name."""
    (a, by_name), (b, theirs_by_name) = (
        ([x.arg for x in (*f.args.posonlyargs, *f.args.args)], [x.arg for x in f.args.kwonlyargs])
        for f in (mine, theirs)
    )
    return dict(zip(b, a, strict=False)) | {name: name for name in theirs_by_name if name in by_name}


def _bound(function: ast.FunctionDef) -> set[str]:
    """The names that a function gives to its own values."""
    return set(kinds_of_names(function))


class Replaced(ast.NodeTransformer):
    """Puts another program, or a name, where one has what is the same as `node`."""

    def __init__(self, node: ast.AST, new: ast.expr | str) -> None:
        self.text, self.new = ast.dump(node), ast.Name(new, ast.Load()) if isinstance(new, str) else new

    def visit(self, node: ast.AST) -> Any:
        return copy_of(self.new) if ast.dump(node) == self.text else self.generic_visit(node)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self.names.get(node.name, node.name)
        self.generic_visit(node)
        return node


# --- changing a tree -------------------------------------------------------------------------------------------------


def _place(path: Path) -> list[tuple[str, int]]:
    return [(field, -1 if n is None else n) for field, n in path]


def _put(tree: ast.FunctionDef, difference: Difference) -> None:
    node: Any = tree
    for field, n in difference.path[:-1]:
        node = getattr(node, field) if n is None else getattr(node, field)[n]
    field, n = difference.path[-1]
    new = copy_of(difference.should)
    if new is not None and difference.was is not None:
        new = ast.copy_location(new, difference.was)
    for each in ast.walk(new) if new is not None else ():
        if hasattr(each, "lineno"):
            each.lineno = each.end_lineno = difference.line  # type: ignore[attr-defined]
            each.col_offset = each.end_col_offset = 0  # type: ignore[attr-defined]
    if isinstance(node, ast.expr) and "lineno" not in getattr(new, "_attributes", ()):
        node.theirs = True  # type: ignore[attr-defined] # what changes in it has no place for a mark: see _mark
    if n is None:
        setattr(node, field, new)
    elif new is None:
        del getattr(node, field)[n]
        if field == "body" and not node.body:
            node.body = [ast.Pass()]
    elif difference.was is None:
        body = getattr(node, field)
        body[:] = [*body[:n], new, *body[n:]] if [*map(type, body)] != [ast.Pass] else [new]
    else:
        getattr(node, field)[n] = new
