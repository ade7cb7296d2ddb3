"""What a reader's own model says of a kernel, held against what the kernel does; what they choose, against the rest."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..diagnose.findings import Finding
from ..ir.capture import SourceLine, capture, source_line
from ..ir.ops import nbytes_of
from ..ir.readers import for_the_reader
from ..lens import gpu
from ..lens.machine import Figures, figures, run_call
from ..lens.tally import tally
from ..lens.watchdog import time_limit
from . import machines
from .arrays import quickly_expected
from .inputs import draw, seed_of
from .values import made, occurs

FORMULA_LIMIT_S = 10.0  # for one call: a formula that has a loop may have one that does not end
_DRAWS = 4  # of sizes that a choice is tried on
_MAX_DEVIATIONS = 3  # more ways than that to be wrong at once: coincidence


def answered(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function of the reader's says. Raises what it raises, and TimeLimit."""
    with time_limit(FORMULA_LIMIT_S, "your function"):
        return for_the_reader(fn, *args)


def line_of(fn: Callable[..., Any]) -> SourceLine | None:
    """The line at which a function of the reader's begins."""
    return source_line(fn.__code__.co_filename, fn.__code__.co_firstlineno)


def call_of(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """A call as the reader would write it: an argument is a name of their notebook, or its value."""

    def shown(arg: Any) -> str:
        names = getattr(fn, "__globals__", {}) if not isinstance(arg, int) else {}
        constants = ((name, value) for name, value in names.items() if name.isupper() and type(value) is type(arg))
        return next((name for name, value in constants if value == arg), repr(arg))

    return f"{fn.__name__}({', '.join(map(shown, args))})"


class Asked(Protocol):
    """What is asked of `fn`, a function of the reader's, beside the kernel. last: when the kernel's result is right."""

    @property
    def fn(self) -> Callable[..., Any]: ...

    @property
    def last(self) -> bool: ...

    def finding(self) -> Finding | None:
        """What is wrong with it, or None."""


# --- models ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Count:
    """A number, the sentences that explain it, and (words, number) for mistakes: "if registers had no end".

    form: how a number of its kind is shown. terms: (words, number) of what it is made of.
    """

    whose: str
    value: float
    explained: Sequence[str] = ()
    mistakes: Sequence[tuple[str, float]] = ()
    form: str = ",.10g"
    terms: Sequence[tuple[str, float]] = ()

    def text(self, value: float) -> str:
        return format(value, self.form)


@dataclasses.dataclass(frozen=True)
class Claim:
    """`fn(*args)`, a model, is what `measured(*args)` says of a run, for each of `cases`."""

    fn: Callable[..., Any]
    cases: Sequence[tuple[Any, ...]]
    measured: Callable[..., Count]
    last = False  # judged before the kernel

    def finding(self) -> Finding | None:
        """What is wrong with the model, on the first case where something is, or None."""
        wrong, slips = None, []
        for args in self.cases:
            said, call = answered(self.fn, *args), call_of(self.fn, args)
            if said is None:
                return Finding("model", f"{call} returns None: return a number.", [], line_of(self.fn))
            for_the_reader(float, said)
            try:
                truth = self.measured(*args)
            except Exception:  # the kernel that it is about does not run: that is for its own puzzle to say
                continue
            slips.append([words for words, value in truth.mistakes if math.isclose(value, said, rel_tol=1e-6)])
            if wrong is None and not math.isclose(said, truth.value, rel_tol=1e-6):
                cause = f"{call} is {truth.text(float(said))}; {truth.whose} {truth.text(truth.value)}."
                evidence = [*truth.explained, *(words for words, _ in truth.terms)]
                wrong = Finding("model", cause, evidence, line_of(self.fn))
                own, unit, asked = slips[-1], _in_another_unit(float(said), truth.value), (truth, args)
        if wrong is None:
            return None
        common = [words for words in own if all(words in slip for slip in slips)] or [unit]
        fewest = [words for words in common if words.count(" and ") == common[0].count(" and ")]
        if fewest[0]:
            return wrong.but(cause=f"{wrong.cause} Yours is what it would be {', or '.join(fewest[:2])}.")
        return self._beside_its_terms(wrong, *asked)

    def _beside_its_terms(self, wrong: Finding, truth: Count, args: Sequence[Any]) -> Finding:
        """The finding, with those terms of a number first that the model never makes, if it makes most of them."""
        name, numbers = self.fn.__name__, made(self.fn, args, FORMULA_LIMIT_S)
        missing = [words for words, value in truth.terms if value and not occurs(value, numbers)]
        if 2 * len(missing) > len(truth.terms) or not truth.terms:  # it is put together in another way
            return wrong
        if not missing and len({value for _, value in truth.terms}) < len(truth.terms):  # one value may be for two
            return wrong
        if not missing:
            cause = f"{wrong.cause} All numbers below are values in {name}: look at how they are put together."
            return wrong.but(cause=cause)
        others = [words for words in wrong.evidence if words not in missing]
        return wrong.but(evidence=[*(f"no value in {name} is this: {words}" for words in missing), *others])

    def word(self) -> str:
        """What the model is right about, for a puzzle that asks nothing else."""
        truth = self.measured(*self.cases[0])
        tried = f" It is right for all {len(self.cases)} sizes that were tried." if len(self.cases) > 1 else ""
        return f"{call_of(self.fn, self.cases[0])}: {truth.whose} {truth.text(truth.value)}.{tried}"


def _in_another_unit(said: float, value: float) -> str:
    return next((f"in units of 1e-{n}" for n in (3, 6, 9) if math.isclose(said, value * 10**n, rel_tol=1e-6)), "")


def hbm_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes `run(*case)`, which returns (function, its arguments), moves to and from HBM."""
    return Claim(model, cases, lambda *args: _traffic(measured(*run(*args))[0]))


def vmem_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes of VMEM the call in `run(*case)` holds."""
    return Claim(model, cases, lambda *args: _holdings(measured(*run(*args))[0]))


def gmem_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes `run(*case)`, a kernel for a GPU and its arguments, moves to and from GMEM."""
    return Claim(model, cases, lambda *args: _gmem_traffic(*run(*args)))


def measured(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Figures, float]:
    """The figures of the one call in fn(*args), and the FLOPs of its matrix products, without the arithmetic."""
    found = []

    def count(call: Any, *_: Any) -> list[Any]:
        found.append((figures(run_call(call, plan_only=True)), sum(tally(call).mxu_flops.values())))
        return [np.zeros(o.shape, o.dtype) for o in call.outs]

    capture(fn, *args, on_call=count)
    (counted,) = found
    return counted


# --- sums of bytes ---------------------------------------------------------------------------------------------------

# One term of a sum: its size, what it consists of, and (factor, words) for other sizes that it may be given
_Term = tuple[float, str, list[tuple[float, str]]]


def _sum(whose: str, terms: Sequence[_Term], also: Sequence[tuple[str, float]] = (), itemsize: int = 2) -> Count:
    """A number of bytes, and the sums that follow from other sizes of the terms, the fewest changes first.

    also: changes to several terms at once. itemsize: of an element.
    """
    total = sum(size for size, *_ in terms)
    widths = [(1, "one byte"), (2, "two bytes"), (4, "four bytes")]
    slips = [(f"if an element had {word}", total * size / itemsize) for size, word in widths if size != itemsize]
    slips += also
    options = [[(1.0, ""), *slips_of] for _, _, slips_of in terms]
    for chosen in sorted(itertools.product(*options), key=lambda c: sum(bool(words) for _, words in c)):
        words = [words for _, words in chosen if words]
        if 0 < len(words) <= _MAX_DEVIATIONS:
            changed = sum(size * factor for (size, *_), (factor, _) in zip(terms, chosen, strict=True))
            slips.append((" and ".join(words), changed))
    return Count(whose, total, (), slips, ",.0f", [(text, size) for size, text, _ in terms])


def _traffic(costs: Figures) -> Count:
    dims = [pair for row in costs.operands for pair in zip(row.operand.shape, row.operand.block, strict=True)]
    blocks = {-(-size // block) for size, block in dims}
    counts = sorted({1, *blocks, *(row.moves for row in costs.operands if row.moves)})
    terms = []
    for row in costs.operands:
        o, times = row.operand, row.hbm_bytes / row.once_bytes
        way, came = ("goes out", "went out") if o.role == "out" else ("comes in", "came in")
        slips = [(0.0, f"if {o.name} moved nothing")]
        slips += [(n / times, f"if all of {o.name} {came} {_times(n)}") for n in counts if n != times]
        text = f"{o.name}, {_bytes(row.once_bytes)} in blocks of {tuple(o.block)}: {way} {_times(times)}"
        terms.append((row.hbm_bytes, text, slips))
    return _sum("your kernel moves", terms)


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _gmem_traffic(fn: Callable[..., Any], args: Sequence[Any]) -> Count:
    (launched,) = gpu.run(fn, *args).calls
    if launched.findings:
        raise ValueError("the kernel goes wrong, which is for its own verdict to say")
    kernel, counts = launched.kernel, launched.counts
    ways = [(kernel.inputs, counts.gmem_read_bytes, "read"), (kernel.outputs, counts.gmem_write_bytes, "written")]
    terms = []
    for arrays, moved, verb in ways:
        if arrays:
            names, once = " and ".join(name for name, *_ in arrays), sum(nbytes_of(s, d) for _, s, d in arrays)
            times = moved / once
            other = sorted({1.0, *map(float, kernel.grid.values())} - {times})
            slips = [(0.0, f"if {names} moved nothing")]
            slips += [(count / times, f"if all of {names} was {verb} {_times(count)}") for count in other if times]
            terms.append((moved, f"{names}, {_bytes(once)}: {verb} {_times(times)}", slips))
    return _sum("your kernel moves", terms, itemsize=kernel.outputs[0][2].itemsize)


def _holdings(costs: Figures) -> Count:
    terms = []
    for row in costs.operands:
        name = row.operand.name
        text = f"{name}: {row.buffers} buffers of {_bytes(row.operand.block_bytes)}, a block of {row.operand.block}"
        slips = [(0.0, f"without {name}"), (2.0, f"if an element of {name} had twice as many bytes")]
        if row.buffers == 2:
            slips.append((0.5, f"if {name} had one buffer (one is filled while the other one is used)"))
        terms.append((row.vmem_bytes, text, slips))
    if costs.scratch_bytes:
        slips = [(0.0, "without the scratch"), (2.0, "if the scratch had two buffers (nothing is copied into it)")]
        slips.append((0.5, "if an element of the scratch had half as many bytes"))
        terms.append((costs.scratch_bytes, f"scratch: {_bytes(costs.scratch_bytes)}, once", slips))
    doubled = sum(row.vmem_bytes for row in costs.operands if row.buffers == 2)
    one = "if each block had one buffer (one is filled while the other one is used)"
    return _sum("your kernel holds", terms, [(one, sum(size for size, *_ in terms) - doubled / 2)])


def _bytes(count: float) -> str:
    return f"{count:,.0f} bytes"


# --- helpers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Helper:
    """`call(*args)`, which uses the function `fn`, is what `spec(*args)` is: more than the puzzle's own call asks."""

    fn: Callable[..., Any]
    call: Callable[..., Any]
    spec: Callable[..., Any]
    inputs: Sequence[Any]
    last = True  # a kernel that is wrong says more

    def finding(self) -> Finding | None:
        """What is wrong with what the call returns, or None."""
        args = draw(self.inputs, np.random.default_rng(0))
        run = machines.trace(self.call, *args)
        findings = machines.machine_of(run).diagnose(run, quickly_expected(self.spec, args, {}), None).findings
        if not findings:
            return None
        wrong = findings[0].cause
        cause = f"Right here, but {self.fn.__name__} is used in other ways, too. {wrong[:1].upper()}{wrong[1:]}"
        return findings[0].but(cause=cause, line=line_of(self.fn))


def helper_claim(
    fn: Callable[..., Any], spec: Callable[..., Any], *inputs: Any, call: Callable[..., Any] | None = None
) -> Helper:
    """call(*inputs), by default fn(*inputs), is spec(*inputs). inputs: arrays, or Inputs to be drawn."""
    return Helper(fn, call or fn, spec, inputs)


# --- choices ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cheapest:
    """For each of these sizes, no plan of `plans(*sizes)` is cheaper by `cost(*sizes, *plan)` than `fn(*sizes)`.

    cost: anything that has an order, also a tuple; of a plan that does not fit, a str that says so. text: a cost in
    words.
    """

    fn: Callable[..., Any]
    plans: Callable[..., Sequence[tuple[Any, ...]]]
    cost: Callable[..., Any]
    sizes: Sequence[tuple[Any, ...]]
    text: Callable[[Any], str]
    last = True  # judged when the kernel's result is right

    def finding(self) -> Finding | None:
        """What is wrong with the choice, at the first sizes where something is, or None."""
        return next((f for f in (self._at(*sizes) for sizes in self.sizes) if f), None)

    def _at(self, *sizes: Any) -> Finding | None:
        plan, costs = answered(self.fn, *sizes), {p: self.cost(*sizes, *p) for p in self.plans(*sizes)}
        fitting = {p: cost for p, cost in costs.items() if not isinstance(cost, str)}
        best = min(fitting, key=lambda p: fitting[p])
        found = f"none of the {len(costs)} plans that can be used"
        if isinstance(plan, tuple) and plan in costs:
            if plan in fitting and fitting[plan] <= fitting[best]:
                return None
            found = f"which takes {self.text(fitting[plan])}" if plan in fitting else costs[plan]
        cause = (
            f"Right answer, but {call_of(self.fn, sizes)} is {plan}, {found}. {best} takes {self.text(fitting[best])}."
        )
        return Finding("choice", cause, [], line_of(self.fn))


def cheapest_that_fits(
    pick: Callable[..., Any],
    run: Callable[..., Any],
    plans: Callable[..., Any],
    draw: Callable[[Any], tuple[Any, ...]],
    cost: Callable[[Figures, float, Any], float],
    text: Callable[[float], str],
    room: Callable[[Any], int],
    own: Sequence[tuple[Any, ...]] = (),
) -> Cheapest:
    """pick(*sizes, limits) is the cheapest of `plans(*sizes)` whose VMEM fits, for the puzzle's own sizes and for
    others that `draw(rng)` makes up.

    There is no list of cases to be right about. The plans are counted one by one, in `run(*sizes, *plan)`. cost: of the
    figures, the FLOPs of matrix products, and the limits. room: limits -> bytes of VMEM.
    """

    rng = np.random.default_rng(seed_of(pick.__name__, 0))
    drawn = [*own, *(draw(rng) for _ in range(_DRAWS))]
    count = len(drawn[0])

    def counted(*sizes_and_plan: Any) -> float | str:
        (*sizes, limits), plan = sizes_and_plan[:count], sizes_and_plan[count:]
        costs, flops = measured(*run(*sizes, *plan))
        if costs.vmem_bytes > room(limits):
            return f"which holds {costs.vmem_bytes:,} bytes of VMEM; there are {room(limits):,}"
        return cost(costs, flops, limits)

    return Cheapest(pick, lambda *sizes: plans(*sizes[:-1]), counted, drawn, text)


def hbm_choice(pick: Callable[..., Any], run: Any, plans: Any, draw: Any, own: Any = ()) -> Cheapest:
    """pick(*sizes, vmem_bytes) is the plan that moves the fewest bytes, of those whose VMEM fits."""
    return cheapest_that_fits(pick, run, plans, draw, lambda costs, *_: costs.hbm_bytes, _bytes, lambda room: room, own)
