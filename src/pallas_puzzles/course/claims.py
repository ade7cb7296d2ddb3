"""What a reader's own model says of a kernel, held against what the kernel does: bytes, VMEM, and time by the model."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..ir.readers import for_the_reader
from ..lens.watchdog import time_limit
from .inputs import seed_of

if TYPE_CHECKING:
    from ..diagnose.findings import Finding
    from ..lens.machine import Figures

FORMULA_LIMIT_S = 10.0  # for one call: a formula that has a loop may have one that does not end
_DRAWS = 4  # of sizes that a choice is tried on
_MAX_DEVIATIONS = 3  # more ways than that to be wrong at once: coincidence


def answered(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function of the reader's says. Raises what it raises, and TimeLimit."""
    with time_limit(FORMULA_LIMIT_S, "your function"):
        return for_the_reader(fn, *args)


class Asked(Protocol):
    """What is asked of `fn`, a function of the reader's, beside the kernel. last: when the kernel's result is right."""

    @property
    def fn(self) -> Callable[..., Any]: ...

    @property
    def last(self) -> bool: ...

    def finding(self) -> "Finding | None":
        """What is wrong with it, or None."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """`fn(*args)`, a model, is what `measured(*args)` says of a run, for each of `cases`."""

    fn: Callable[..., Any]
    cases: Sequence[tuple[Any, ...]]
    measured: Callable[..., "_Sum | _Time | Count"]
    last = False  # judged before the kernel

    def finding(self) -> "Finding | None":
        """What is wrong with the model, on the first case where something is, or None."""
        from ..diagnose.findings import Finding
        from ..ir.capture import source_line

        code = self.fn.__code__
        line = source_line(code.co_filename, code.co_firstlineno)
        wrong, slips = None, []
        for args in self.cases:
            said = answered(self.fn, *args)
            call = f"{self.fn.__name__}({', '.join(_shown(a, self.fn) for a in args)})"
            if said is None:
                return Finding("model", f"{call} returns None: return a number.", [], line)
            for_the_reader(float, said)
            try:
                truth = self.measured(*args)
            except Exception:  # the kernel that it is about does not run: that is for its own puzzle to say
                continue
            slips.append([words for words, value in truth.slips() if math.isclose(value, said, rel_tol=1e-6)])
            if wrong is None and not math.isclose(said, truth.value, rel_tol=1e-6):
                cause = f"{call} is {truth.text(float(said))}; {truth.whose} {truth.text(truth.value)}."
                wrong = Finding("model", cause, truth.parts(), line)
                own = slips[-1] or [_in_another_unit(float(said) / truth.value)]
        if wrong is not None:
            common = [words for words in own if all(words in slip for slip in slips)] or own
            fewest = [words for words in common if words.count(" and ") == common[0].count(" and ")]
            if fewest[0]:
                return wrong.but(cause=f"{wrong.cause} Yours is what it would be {', or '.join(fewest[:2])}.")
        return wrong

    def word(self) -> str:
        """What the model is right about, for a puzzle that asks nothing else."""
        truth = self.measured(*self.cases[0])
        call = f"{self.fn.__name__}({', '.join(_shown(a, self.fn) for a in self.cases[0])})"
        tried = f" It is right for all {len(self.cases)} sizes that were tried." if len(self.cases) > 1 else ""
        return f"{call}: {truth.whose} {truth.text(truth.value)}.{tried}"


def _in_another_unit(ratio: float) -> str:
    return next((f"in units of 1e-{n}" for n in (3, 6, 9) if math.isclose(ratio, 10**n, rel_tol=1e-6)), "")


def hbm_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes `run(*case)`, which returns (function, its arguments), moves to and from HBM."""
    return Claim(model, cases, lambda *args: _traffic(_figures(*run(*args))[0]))


def vmem_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes of VMEM the call in `run(*case)` holds."""
    return Claim(model, cases, lambda *args: _holdings(_figures(*run(*args))[0]))


def time_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is the time of the call in `run(*case)`; the last of a case is a chip: its peaks, and step_s.

    The model is that of tpu_report without bundles: max(MXU, HBM - fill) + fill + steps.
    """
    return Claim(model, cases, lambda *args: _duration(*_figures(*run(*args)), args[-1]))


def programs_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes the programs of `run(*case)`, which returns (function, shapes), move one by one.

    Each operation is a program that takes its arrays from HBM and puts its results there; a jitted function is one.
    """
    return Claim(model, cases, lambda *args: _by_programs(*run(*args)))


def _by_programs(fn: Callable[..., Any], shapes: Sequence[Any]) -> "Count":
    from ..ir.eager import operations
    from ..text import plural

    programs = operations(fn, shapes)
    total, whole = (sum(f(each) for each in programs) for f in (lambda p: p.moved_bytes, _out_bytes))
    parts = [f"{each.name}: {_bytes(each.moved_bytes)}" for each in programs]
    slips = [("if no program read anything", whole), ("if no program wrote anything", total - whole)]
    for each in programs:
        slips.append((f"without {each.name}", total - each.moved_bytes))
    return Count(f"the {plural(len(programs), 'program')} move", total, parts, slips)


def _out_bytes(program: Any) -> int:
    return sum(out.nbytes for out in program.outs)


# --- helpers ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Helper:
    """`call(*args)`, which uses the function `fn`, is what `spec(*args)` is: more than the puzzle's own call asks."""

    fn: Callable[..., Any]
    call: Callable[..., Any]
    spec: Callable[..., Any]
    inputs: Sequence[Any]
    last = True  # a kernel that is wrong says more

    def finding(self) -> "Finding | None":
        """What is wrong with what the call returns, or None."""
        import numpy as np

        from ..diagnose.diagnose import diagnose
        from ..ir.capture import source_line
        from ..lens.machine import trace
        from .arrays import quickly_expected
        from .inputs import draw

        args = draw(self.inputs, np.random.default_rng(0))
        findings = diagnose(trace(self.call, *args), quickly_expected(self.spec, args, {})).findings
        if not findings:
            return None
        code = self.fn.__code__
        cause = f"Right here, but {self.fn.__name__} is used in other ways, too. {findings[0].cause}"
        return findings[0].but(cause=cause, line=source_line(code.co_filename, code.co_firstlineno))


def helper_claim(
    fn: Callable[..., Any], spec: Callable[..., Any], *inputs: Any, call: Callable[..., Any] | None = None
) -> Helper:
    """call(*inputs), by default fn(*inputs), is spec(*inputs). inputs: arrays, or Inputs to be drawn."""
    return Helper(fn, call or fn, spec, inputs)


# --- choices ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """`fn(*sizes, limits)` is the cheapest of `plans(*sizes)` that fits, whatever `draw(rng)` -> (*sizes, limits)
    says: there is no list of cases to be right about. The plans are counted one by one, in `run(*sizes, *plan)`."""

    fn: Callable[..., Any]
    run: Callable[..., Any]
    plans: Callable[..., Sequence[tuple[int, ...]]]
    draw: Callable[[Any], tuple[Any, ...]]
    cost: Callable[["Figures", float, Any], float]
    text: Callable[[float], str]
    room: Callable[[Any], int]  # limits -> bytes of VMEM
    last = True  # judged when the kernel's result is right

    def finding(self) -> "Finding | None":
        """What is wrong with the choice, on the first draw where something is, or None."""
        import numpy as np

        rng = np.random.default_rng(seed_of(self.fn.__name__, 0))
        return next((f for f in (self._on(*self.draw(rng)) for _ in range(_DRAWS)) if f), None)

    def _on(self, *args: Any) -> "Finding | None":
        from ..diagnose.findings import Finding
        from ..ir.capture import source_line

        *sizes, limits = args
        code, room = self.fn.__code__, self.room(limits)
        plan = answered(self.fn, *args)
        call = f"Right answer, but {self.fn.__name__}({', '.join(_shown(a, self.fn) for a in args)}) is {plan}"
        line = source_line(code.co_filename, code.co_firstlineno)
        counted = {p: _counted(*self.run(*sizes, *p)) for p in self.plans(*sizes)}
        fitting = {p: self.cost(*c, limits) for p, c in counted.items() if c[0].vmem_bytes <= room}
        best = min(fitting, key=lambda p: fitting[p])
        rest = f"{best} takes {self.text(fitting[best])}, and fits. These sizes are drawn at random."
        if not isinstance(plan, tuple) or plan not in counted:
            return Finding(
                "choice", f"{call}, which is none of the {len(counted)} plans that there are. {rest}", [], line
            )
        if plan not in fitting:
            held = f"{counted[plan][0].vmem_bytes:,} bytes of VMEM; there are {room:,}"
            return Finding("choice", f"{call}, which holds {held}. {rest}", [], line)
        if fitting[plan] > fitting[best] * (1 + 1e-6):
            return Finding("choice", f"{call}, which takes {self.text(fitting[plan])}. {rest}", [], line)
        return None


@dataclasses.dataclass(frozen=True)
class Cheapest:
    """For each of these sizes, no plan of `plans(*sizes)` is cheaper by `cost(*sizes, *plan)` than `fn(*sizes)`.

    cost: anything that has an order, also a tuple. text: a cost in words.
    """

    fn: Callable[..., Any]
    plans: Callable[..., Sequence[tuple[Any, ...]]]
    cost: Callable[..., Any]
    sizes: Sequence[tuple[Any, ...]]
    text: Callable[[Any], str]
    last = True

    def finding(self) -> "Finding | None":
        """What is wrong with the choice, at the first sizes where something is, or None."""
        return next((f for f in (self._at(*sizes) for sizes in self.sizes) if f), None)

    def _at(self, *sizes: Any) -> "Finding | None":
        from ..diagnose.findings import Finding
        from ..ir.capture import source_line

        plan, costs = answered(self.fn, *sizes), {p: self.cost(*sizes, *p) for p in self.plans(*sizes)}
        best = min(costs, key=lambda p: costs[p])
        known = isinstance(plan, tuple) and plan in costs
        if known and costs[plan] <= costs[best]:
            return None
        found = f"which takes {self.text(costs[plan])}" if known else f"none of the {len(costs)} plans that can be used"
        code = self.fn.__code__
        call = f"Right answer, but {self.fn.__name__}({', '.join(_shown(a, self.fn) for a in sizes)}) is {plan}"
        cause = f"{call}, {found}. {best} takes {self.text(costs[best])}."
        return Finding("choice", cause, [], source_line(code.co_filename, code.co_firstlineno))


def hbm_choice(pick: Callable[..., Any], run: Any, plans: Any, draw: Any) -> Choice:
    """pick(*sizes, vmem_bytes) is the plan that moves the fewest bytes, of those whose VMEM fits."""
    return Choice(pick, run, plans, draw, lambda costs, *_: costs.hbm_bytes, _bytes, lambda room: room)


def time_choice(pick: Callable[..., Any], run: Any, plans: Any, draw: Any) -> Choice:
    """pick(*sizes, chip) is the plan that takes the least time by the model of time_claim, of those whose VMEM fits."""

    def seconds(costs: "Figures", mxu_flops: float, chip: Any) -> float:
        return _duration(costs, mxu_flops, chip).value

    return Choice(pick, run, plans, draw, seconds, lambda s: f"{s:.4e} s", lambda chip: chip.vmem_bytes)


def _counted(fn: Callable[..., Any], args: Sequence[Any]) -> "tuple[Figures, float]":
    """What _figures returns, without the arithmetic."""
    import numpy as np

    from ..ir.capture import capture
    from ..lens.machine import figures, run_call
    from ..lens.tally import tally

    found = []

    def count(call: Any, *_: Any) -> list[Any]:
        found.append((figures(run_call(call, plan_only=True)), sum(tally(call).mxu_flops.values())))
        return [np.zeros(o.shape, o.dtype) for o in call.outs]

    capture(fn, *args, on_call=count)
    (counted,) = found
    return counted


def _figures(fn: Callable[..., Any], args: Sequence[Any]) -> "tuple[Figures, float]":
    """The figures of the one call in fn(*args), and the FLOPs of its matrix products."""
    from ..lens.machine import figures, trace
    from ..lens.tally import tally

    (traced,) = trace(fn, *args).traces
    return figures(traced), sum(tally(traced.call).mxu_flops.values())


def _shown(arg: Any, fn: Callable[..., Any]) -> str:
    """An argument as the reader would write it: a name of their notebook, or its value."""
    if isinstance(arg, int):
        return str(arg)
    names = getattr(fn, "__globals__", {})
    constants = ((name, value) for name, value in names.items() if name.isupper() and type(value) is type(arg))
    return next((name for name, value in constants if value == arg), repr(arg))


@dataclasses.dataclass(frozen=True)
class Count:
    """A number, the sentences that explain it, and (words, number) for mistakes: "if registers had no end"."""

    whose: str
    value: float
    explained: Sequence[str] = ()
    mistakes: Sequence[tuple[str, float]] = ()

    def text(self, value: float) -> str:
        return f"{value:,.10g}"

    def parts(self) -> list[str]:
        return [*self.explained]

    def slips(self) -> list[tuple[str, float]]:
        return [*self.mistakes]


# --- sums of bytes ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    """One term of a sum: its size, what it consists of, and (factor, words) for other sizes that it may be given."""

    size: float
    text: str
    slips: tuple[tuple[float, str], ...]


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A number of bytes, in parts."""

    whose: str
    terms: tuple[_Part, ...]
    together: tuple[tuple[str, float], ...] = ()  # changes to several terms at once, and the sums that follow
    itemsize: int = 2  # of an element

    @property
    def value(self) -> float:
        return sum(part.size for part in self.terms)

    def text(self, value: float) -> str:
        return f"{value:,.0f}"

    def parts(self) -> list[str]:
        return [part.text for part in self.terms]

    def slips(self) -> Iterator[tuple[str, float]]:
        """(in words, the sum that follows): other sizes of the terms, the fewest changes first."""
        for size, word in ((1, "one byte"), (2, "two bytes"), (4, "four bytes")):
            if size != self.itemsize:
                yield f"if an element had {word}", self.value * size / self.itemsize
        yield from self.together
        options = [((1.0, ""), *part.slips) for part in self.terms]
        for chosen in sorted(itertools.product(*options), key=lambda c: sum(bool(words) for _, words in c)):
            words = [words for _, words in chosen if words]
            if 0 < len(words) <= _MAX_DEVIATIONS:
                total = sum(part.size * factor for part, (factor, _) in zip(self.terms, chosen, strict=True))
                yield " and ".join(words), total


def _traffic(costs: "Figures") -> _Sum:
    counts = sorted({max(1, row.moves) for row in costs.operands} | {1})
    return _Sum("your kernel moves", tuple(_moved(row, counts, costs) for row in costs.operands))


def _moved(row: Any, counts: Sequence[int], costs: "Figures") -> _Part:
    o, times = row.operand, row.hbm_bytes / row.once_bytes
    way = "goes out" if o.role == "out" else "comes in"
    blocks = [-(-size // block) for other in costs.operands for size, block in _dims(other.operand)]
    slips = [(0.0, f"if {o.name} moved nothing")]
    for other in sorted({1, *blocks, *counts}):
        if other != times:
            slips.append(
                (other / times, f"if all of {o.name} {'went out' if o.role == 'out' else 'came in'} {_times(other)}")
            )
    text = f"{o.name}, {_bytes(row.once_bytes)} in blocks of {tuple(o.block)}: {way} {_times(times)}"
    return _Part(row.hbm_bytes, text, tuple(slips))


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _dims(o: Any) -> Iterator[tuple[int, int]]:
    return zip(o.shape, o.block, strict=True)


def _holdings(costs: "Figures") -> _Sum:
    terms = []
    for row in costs.operands:
        name = row.operand.name
        text = f"{name}: {row.buffers} buffers of {_bytes(row.operand.block_bytes)}, a block of {row.operand.block}"
        slips = [(0.0, f"without {name}"), (2.0, f"if an element of {name} had twice as many bytes")]
        if row.buffers == 2:
            slips.append((0.5, f"if {name} had one buffer (one is filled while the other one is used)"))
        terms.append(_Part(row.vmem_bytes, text, tuple(slips)))
    if costs.scratch_bytes:
        text = f"scratch: {_bytes(costs.scratch_bytes)}, once"
        slips = [(0.0, "without the scratch"), (2.0, "if the scratch had two buffers (nothing is copied into it)")]
        slips.append((0.5, "if an element of the scratch had half as many bytes"))
        terms.append(_Part(costs.scratch_bytes, text, tuple(slips)))
    doubled = sum(row.vmem_bytes for row in costs.operands if row.buffers == 2)
    one = "if each block had one buffer (one is filled while the other one is used)"
    return _Sum("your kernel holds", tuple(terms), ((one, sum(t.size for t in terms) - doubled / 2),))


def _bytes(count: float) -> str:
    return f"{count:,.0f} bytes"


# --- time ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Time:
    """Seconds by the model: max(mxu, hbm - fill) + fill + steps, with the fill block by block."""

    mxu: float
    hbm: float
    fills: Mapping[str, float]
    steps: float
    count: int
    scratch: float  # what copying the scratch would take
    whose: str = "the model says"

    @property
    def fill(self) -> float:
        return sum(self.fills.values())

    @property
    def value(self) -> float:
        return max(self.mxu, self.hbm - self.fill) + self.fill + self.steps

    def text(self, value: float) -> str:
        return f"{value:.4e}"

    def parts(self) -> list[str]:
        fill = f"{_us(self.fill)} of it fill: {', '.join(f'{n} {_us(f)}' for n, f in self.fills.items())}"
        return [f"MXU {_us(self.mxu)}; HBM {_us(self.hbm)}, {fill}", f"{self.count} steps: {_us(self.steps)}"]

    def slips(self) -> list[tuple[str, float]]:
        """(in words, the time that follows): other models, the fewest changes first."""
        others = sorted(self._others(), key=lambda other: len(other[0]))
        return [(f"if {' and '.join(words)}", value) for words, value in others if 0 < len(words) <= _MAX_DEVIATIONS]

    def _others(self) -> Iterator[tuple[list[str], float]]:
        """(what is done otherwise, the time that follows)."""
        mxus = [(self.mxu, ""), (self.mxu / 2, "a multiplication and an addition were one FLOP")]
        steps = [(self.steps, ""), (0.0, "steps cost nothing")]
        for (mxu, a), (step, b), (fill, c) in itertools.product(mxus, steps, self._other_fills()):
            fills = [
                (fill, fill, ""),
                (0.0, 0.0, "there were no fill: beside a longer MXU, it has nothing to hide behind"),
                (0.0, fill, "the fill counted twice: it is put in by itself, and still in HBM"),
                (fill, 0.0, "the fill were taken off HBM and never put in"),
            ]
            for off, put, d in fills:
                hbm = self.hbm - off
                overlaps = [
                    (max(mxu, hbm), ""),
                    (mxu + hbm, "the MXU waited for HBM: the two overlap, the longer one counts"),
                    (mxu, "HBM took no time"),
                    (hbm, "the MXU took no time"),
                    (min(mxu, hbm), "the shorter of MXU and HBM counted"),
                ]
                for overlap, e in overlaps:
                    yield [words for words in (a, b, c, d, e) if words], overlap + put + step
                if not b:
                    yield (
                        [w for w in (a, c, d, "the cost of a step overlapped with the rest") if w],
                        max(mxu, hbm, step) + put,
                    )

    def _other_fills(self) -> Iterator[tuple[float, str]]:
        yield self.fill, ""
        yield self.fill / 2, "an element of the fill had one byte"
        yield self.fill * 2, "the fill were both buffers of each block"
        yield self.fill * 2 + self.scratch, "the fill were all that VMEM holds, and not one block of each array"
        for left_out in self.fills:
            yield self.fill - self.fills[left_out], f"{left_out} had no part in the fill"


def _duration(costs: "Figures", mxu_flops: float, chip: Any) -> _Time:
    fills = {r.operand.name: min(r.operand.block_bytes, r.hbm_bytes) for r in costs.operands}
    return _Time(
        mxu=mxu_flops / chip.flops_per_s,
        hbm=costs.hbm_bytes / chip.hbm_bytes_per_s,
        fills={name: size / chip.hbm_bytes_per_s for name, size in fills.items()},
        steps=costs.steps * chip.step_s,
        count=costs.steps,
        scratch=costs.scratch_bytes / chip.hbm_bytes_per_s,
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"
