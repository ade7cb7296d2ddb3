"""How often each part of a kernel runs, and what that costs, without running its arithmetic.

Only the scalars that steer a kernel are followed: the grid indices, what is computed from them, prefetched scalars. So
a kernel of any size is counted in milliseconds, where the machine would multiply every matrix.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..ir.capture import UNKNOWN, Call, SourceLine, describe_pipeline, everywhere, line_of, subprograms
from ..ir.folded import folded
from ..ir.ops import ELEMENTWISE, Beyond, cost, evaluate, in_dtypes, inlined, interpret, is_literal, scan_groups
from .machine import Figures, figures, plan_pipeline

_FOLLOWED = 1 << 21  # grid steps that are told apart
_UNROLLED = 64  # iterations of an inner loop that are followed one by one

Known = np.ndarray | None  # one value per grid step (or one for all of them); None: not followed


@dataclasses.dataclass
class Branch:
    """A body under `pl.when` or `lax.cond`.

    elements: how many its equations make. often: how often it runs at each step, and would, were it always taken.
    known: whether it is known when it is taken.
    """

    line: SourceLine | None
    elements: int
    often: Any = 0.0
    known: bool = True

    @property
    def taken(self) -> np.ndarray | None:
        """The share of its chances at each step; None where that is unknown."""
        runs, chances = self.often
        return np.divide(runs, chances, out=np.ones_like(runs), where=chances > 0) if self.known else None


@dataclasses.dataclass
class PipelineRuns:
    """An emit_pipeline, what one run of it costs (None: unknown), and how often it runs."""

    call: Call
    costs: Figures | None
    runs: float

    @property
    def steps(self) -> float:
        return math.prod(self.call.grid) * self.runs


@dataclasses.dataclass
class Tally:
    """What a call does, summed over its grid.

    mxu_flops: type of the operands -> FLOPs in matrix products. trips: iterations of each inner loop, in program order,
    None where unknown. exact: nothing was unknown; where it is False, everything unknown is counted as happening.
    selected: line -> elements of what jnp.where returns there. copies: the kernel starts copies of its own, whose bytes
    are not counted here; those of an emit_pipeline in it are among `pipelines`. lines: the reader's line -> its FLOPs
    in products, its other FLOPs, and at how many steps.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    selected: dict[SourceLine | None, float] = dataclasses.field(default_factory=dict)
    mxu_flops: dict[str, float] = dataclasses.field(default_factory=dict)
    branches: list[Branch] = dataclasses.field(default_factory=list)
    trips: list[float | None] = dataclasses.field(default_factory=list)
    exact: bool = True
    copies: bool = False
    pipelines: list[PipelineRuns] = dataclasses.field(default_factory=list)
    lines: dict[SourceLine, tuple[float, float, int]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Tally", times: float) -> None:
        """What is done besides, so often; without its branches and loops."""
        self.flops += other.flops * times
        self.transcendentals += other.transcendentals * times
        for place, elements in other.selected.items():
            self.selected[place] = self.selected.get(place, 0.0) + elements * times
        for dtype, flops in other.mxu_flops.items():
            self.mxu_flops[dtype] = self.mxu_flops.get(dtype, 0.0) + flops * times
        for line, (mxu, others, steps) in other.lines.items():
            before = self.lines.get(line, (0.0, 0.0, 0))
            self.lines[line] = (before[0] + mxu * times, before[1] + others * times, max(before[2], steps))
        self.exact &= other.exact
        self.copies |= other.copies
        self.pipelines += [dataclasses.replace(p, runs=p.runs * times) for p in other.pipelines]


def tally(call: Call, *, scalars_known: bool = True) -> Tally:
    """Counts one call. scalars_known: whether call.scalars hold the values that the kernel will see."""
    counter = _Counter(call)
    scalars: list[Any] = [np.asarray(v) if scalars_known else None for v in call.scalars]
    scalars += [None] * (len(call.scalar_names) - len(scalars))
    refs = [*scalars, *[None] * (len(call.kernel.invars) - len(scalars))]
    counter.run(call.kernel, refs, np.ones((2, counter.steps)))
    return counter.result()


class _Counter:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.followed = math.prod(call.grid) <= _FOLLOWED  # else one step is counted, which may be any
        grid = call.grid if self.followed else (1,)
        self.index = np.indices(grid).reshape(len(grid), -1) if grid else np.zeros((0, 1), int)
        self.steps = self.index.shape[1]
        self.axes = [d for d in range(len(call.grid)) if d not in call.vmapped]
        self.total = Tally()
        self.folded = folded(call.kernel)
        self.site: SourceLine | None = None  # of a jnp function, inside of it
        self.branches: dict[tuple[int, int], Branch] = {}  # by equation and number
        self.loops: dict[int, list[float | None]] = {}

    def result(self) -> Tally:
        trips = [None if None in each else float(np.mean(each)) for each in self.loops.values()]  # type: ignore[arg-type]
        total = Tally(branches=list(self.branches.values()), trips=trips)
        total.add(self.total, 1 if self.followed else math.prod(self.call.grid))
        return total

    def run(
        self, jaxpr: Any, values: Sequence[Any], often: np.ndarray, consts: Sequence[Any] | None = None
    ) -> list[Any]:
        """Counts a program. often: how often it runs at each step; and how often it would, were every branch taken."""
        given = [None if isinstance(c, jax.core.Tracer) else c for c in (jaxpr.consts if consts is None else consts)]
        return interpret(jaxpr, values, lambda eqn, operands: self.apply(eqn, operands, often), given)

    def apply(self, eqn: Any, values: list[Any], often: np.ndarray) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        match name:
            case "program_id":
                return [self.index[self.axes[params["axis"]]] if self.followed else None]
            case "num_programs":
                return [np.asarray(self.call.grid[self.axes[params["axis"]]])]
            case "cond":
                return self._cond(eqn, values, often)
            case "scan":
                return self._scan(eqn, values, often)
            case "while":
                return self._while(eqn, values, often)
            case "emit_pipeline":
                return self._pipeline(eqn, values, often)
            case "get":
                return [self._get(eqn, values)]
        if name == "dma_start":
            self.total.copies = True
        inner = inlined(eqn)
        if inner is not None:
            before, self.site = self.site, self.site or line_of(eqn)
            try:
                return self.run(inner, values, often)
            finally:
                self.site = before
        unknown: list[Any] = [None] * len(eqn.outvars)
        nested = list(subprograms(eqn))
        if nested:  # run_scoped, which is given what its body refers to, and whatever else runs a body once
            for body in nested:
                consts = values if name == "run_scoped" else None
                self.run(body, [None] * len(body.invars), often, consts)
            return unknown
        self._count(eqn, often[0])
        scalar = all(getattr(v.aval, "shape", None) == () for v in [*eqn.invars, *eqn.outvars])
        if scalar and name in ELEMENTWISE and all(v is not None for v in values):
            return [evaluate(eqn, values)]
        return unknown

    def _count(self, eqn: Any, weight: np.ndarray) -> None:
        flops, transcendentals = (0, 0) if id(eqn) in self.folded else cost(eqn)
        line, product = line_of(eqn), eqn.primitive.name == "dot_general"
        once = Tally(flops, transcendentals)
        if eqn.primitive.name == "select_n":
            once.selected = {self.site or line: math.prod(eqn.outvars[0].aval.shape)}
        if line is not None and flops + transcendentals:
            work = (flops, 0.0) if product else (0.0, flops)
            once.lines = {line: (*work, int(np.count_nonzero(weight)))}
        if product and flops:
            once.mxu_flops = {in_dtypes(eqn)[0].name: flops}
        self.total.add(once, float(weight.sum()))

    def _cond(self, eqn: Any, values: list[Any], often: np.ndarray) -> list[Any]:
        which, operands = values[0], values[1:]
        bodies, known = eqn.params["branches"], which is not None
        results: list[list[Any]] = []
        for number in reversed(range(len(bodies))):  # the compiler lays out the true branch first
            inside = np.array([often[0] * (np.asarray(which).astype(int) == number), often[1]]) if known else often
            if bodies[number].eqns:
                branch = self.branches.setdefault((id(eqn), number), Branch(line_of(eqn), _elements(bodies[number])))
                branch.often = branch.often + inside
                branch.known &= known
                self.total.exact &= known or (not self.followed and _is_free(bodies[number]))
            results.append(self.run(bodies[number], operands, inside))
        if which is None or any(v is None for result in results for v in result):
            return [None] * len(eqn.outvars)
        cases = list(reversed(results))
        return [np.choose(np.asarray(which).astype(int), [case[i] for case in cases]) for i in range(len(eqn.outvars))]

    def _scan(self, eqn: Any, values: list[Any], often: np.ndarray) -> list[Any]:
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        consts, carry, xs = scan_groups(eqn, values)
        self.loops.setdefault(id(eqn), []).append(float(length))
        per_row: list[Any] = [None] * len(xs)
        if length <= _UNROLLED:
            for _ in range(length):
                out = self.run(body, [*consts, *carry, *per_row], often)
                carry = out[: len(carry)]
            return [*carry, *[None] * (len(eqn.outvars) - len(carry))]
        self.run(body, [*consts, *[None] * len(carry), *per_row], often * length)
        return [None] * len(eqn.outvars)

    def _while(self, eqn: Any, values: list[Any], often: np.ndarray) -> list[Any]:
        """A fori_loop whose bounds are known at each step, or else a loop that is counted once."""
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        state = values[n_cond + n_body :]
        trips = self._trips(params["cond_jaxpr"], [*values[:n_cond], *state])
        self.loops.setdefault(id(eqn), []).append(None if trips is None else float(np.mean(trips)))
        self.total.exact &= trips is not None
        inside = [*values[n_cond : n_cond + n_body], *[None] * len(state)]
        self.run(params["body_jaxpr"], inside, often if trips is None else often * trips)
        return [None] * len(eqn.outvars)

    def _trips(self, test: Any, values: list[Any]) -> Known:
        if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt" or test.outvars != test.eqns[0].outvars:
            return None
        ends = dict(zip(test.invars, values, strict=True))
        low, high = (np.asarray(v.val) if is_literal(v) else ends.get(v) for v in test.eqns[0].invars)
        return None if low is None or high is None else np.maximum(high - low, 0)

    def _pipeline(self, eqn: Any, values: list[Any], often: np.ndarray) -> list[Any]:
        """A grid inside of this one. What differs from step to step of the outer one is not known in it."""
        once = [v if v is None or var.aval.shape else _same(v) for v, var in zip(values, eqn.invars, strict=True)]
        given = [UNKNOWN if v is None else v for v in once]
        call, _ = describe_pipeline(eqn, given, self.call.name)
        inner, times = _Counter(call), float(often[0].sum())
        inner.site = self.site
        consts = [None if c is UNKNOWN else c for c in call.consts or ()]
        inner.run(call.kernel, [None] * len(call.kernel.invars), np.ones((2, inner.steps)), consts)
        mine = inner.result()
        self.total.add(mine, times)
        for number, branch in enumerate(mine.branches):
            share = 1.0 if branch.taken is None else float(np.mean(branch.taken))
            found = dataclasses.replace(branch, often=np.array([often[0] * share, often[0]]))
            self.branches.setdefault((id(eqn), number), found)
        self.loops.setdefault(id(eqn), []).append(float(math.prod(call.grid)))
        for loop, trips in inner.loops.items():
            self.loops.setdefault(loop, []).extend(trips)
        self.total.exact &= call.bounds_known
        self.total.pipelines.append(PipelineRuns(call, _planned(call), times))
        return []

    def _get(self, eqn: Any, values: list[Any]) -> Known:
        """A prefetched scalar, where its index is known."""
        table = values[0]
        if table is None:
            return None
        transforms = jax.tree.unflatten(eqn.params["tree"], values[1:])
        indices = getattr(transforms[0], "indices", None) if len(transforms) == 1 else None
        if indices is None or len(indices) != table.ndim or any(i is None for i in indices):
            return None
        try:
            places = tuple(np.clip(np.asarray(i, int), 0, n - 1) for i, n in zip(indices, table.shape, strict=True))
        except TypeError:
            return None  # a slice
        return table[places]


def _is_free(body: Any) -> bool:
    """Whether a program does no arithmetic with floats."""
    return not any(any(cost(eqn)) or eqn.primitive.name == "emit_pipeline" for _, eqn in everywhere(body))


def _same(values: Any) -> Any:
    """A value that is the same at every step, else None."""
    flat = np.asarray(values).reshape(-1)
    return flat[0] if flat.size and (flat == flat[0]).all() else None


def _planned(call: Call) -> Figures | None:
    try:
        return figures(plan_pipeline(call)) if call.bounds_known else None
    except Beyond:
        return None


def _elements(jaxpr: Any) -> int:
    """How many array elements the equations of a program make or store, each run once."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(_elements(body) for body in subprograms(eqn))
        shapes = [getattr(v.aval, "shape", ()) for v in [*eqn.invars[:1], *eqn.outvars]]
        total += max((math.prod(shape) for shape in shapes), default=0)
    return total
