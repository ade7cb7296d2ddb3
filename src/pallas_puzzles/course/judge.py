"""Runs an answer on one case after the other: the lens, the budget, the TPU front end, and JAX's own simulator."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

import jax
import numpy as np

from ..budgets.costs import too_much_outside
from ..budgets.tpu import dropped
from ..diagnose.diagnose import SEEN_IN_VALUES, explain_garbage, wrong_results
from ..diagnose.errors import explain_error
from ..diagnose.findings import GARBAGE_READS, Diagnosis, Finding
from ..diagnose.outside import explain_barred, explain_outside
from ..ir.capture import CHIP, SPARSE_CHIP, Programs
from ..ir.ops import garbage
from ..lens.gpu.timeline import in_l2
from ..lens.machine import Beyond, Refused, Run
from ..lens.watchdog import TimeLimit, time_limit
from ..targets.simulate import SimulatorError, SimulatorTimeout, SimulatorUnable
from ..view.verdict import TileMap, Verdict
from .arrays import TIME_LIMIT_S, ArrayJudge, compare, wanted
from .claims import Asked
from .collecting import is_brief
from .guard import is_ours
from .inputs import SALT, Budget, Case, Draw, Input, Question, seed_of
from .machines import TPU, Machine, machine_of, reached, remembered, trace
from .reference import mark_of

CONFIRM_LIMIT_S = 90.0  # what the lens has passed does end: JAX's simulator may take its time on a busy machine
DRAWS = 3
CLAIMS = (-1, 0)  # in the place of a case and draw: what functions of the reader's say, and not what a kernel returns
OTHER_GARBAGE = 0.7  # in the second run of a kernel that reads uninitialised memory: a value like any other


def judge_cases(puzzle: str, judge: ArrayJudge, asked: Question, only: tuple[int, int] | None = None) -> Verdict:
    """The verdict on every case. JAX is yet to be asked about what passes: see `ArrayJudge.confirmed`."""
    drawn: Iterable[Draw] = draws(puzzle, asked.cases, asked.seed)
    if only is not None:
        drawn = [each for each in drawn if each.place == only]
    elif is_brief():  # where one draw of a case is right, others are
        drawn = sorted((each for each in drawn if each.place[1] == 0), key=lambda each: each.size)
    programs: list[Programs] = [{} for _ in asked.cases]  # of the spec
    for each in drawn:
        each.want = wanted(judge.wanted, each, asked.spec, programs[each.place[0]])
        verdict = judge.run_case(each)
        if verdict is not None:
            verdict.draw = each.place
            if not each.first:
                verdict.notes.append(_which(each))
            return verdict
        judge.example = each if each.first else judge.example
    return judge.passed()


def draws(puzzle: str, cases: Sequence[Case], seed: int | None) -> Iterator[Draw]:
    """Several draws of the first case, one of others."""
    for number, case in enumerate(cases):
        drawn = any(isinstance(x, Input) for x in case.inputs)
        for i in range(DRAWS if number == 0 and drawn else 1):
            own = 0 if number == 0 or not SALT else seed_of(f"{puzzle}, variant {number}", i)
            yield Draw(case, (number, i), seed if seed is not None else own if i == 0 else seed_of(puzzle, i))


def _which(draw: Draw) -> str:
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in map(np.asarray, draw.args))
    blocks = "".join(f", {k}={_said(v)}" for k, v in draw.case.blocks.items())
    what = "other random values" if draw.place[0] == 0 else f"variant {draw.place[0]}"
    what += f" ({draw.case.about})" if draw.case.about else ""
    return f"The notebook's own example passes. This is {what}: {shapes}{blocks} (seed={draw.seed})."


def _said(value: Any) -> str:
    """A keyword's value; a function by its name, and what it is given, rather than by its address."""
    if isinstance(value, functools.partial):
        given = [*map(_said, value.args), *(f"{k}={_said(v)}" for k, v in value.keywords.items())]
        return f"{_said(value.func)}({', '.join([*given, '...'])})"
    return getattr(value, "__name__", str(value))


def claimed(claims: Sequence[Asked], judge: ArrayJudge) -> Verdict | None:
    """The verdict on the first claim that is not true, or None."""
    for claim in claims:
        try:
            with time_limit(CONFIRM_LIMIT_S, "your function"):  # many plans are tried
                finding = claim.finding()
        except (Exception, TimeLimit) as error:
            return judge.error(error)
        if finding is not None:
            return Verdict("", "failed", [finding], "Not yet.", draw=CLAIMS)
    return None


_OTHERWISE_WRONG = frozenset(
    "structure shape dtype map-bounds ref-bounds unvisited revisit never-stored hang deadlock unwaited copy-shape "
    "no-wait early reused shared-semaphore hbm-load hbm-store".split()
)
_MAY_BE_RIGHT = frozenset("carry stale born overflow unread padding".split())


@dataclasses.dataclass(eq=False)
class Judge(ArrayJudge):
    """Judges an answer with kernels.

    allow, barred: what may and what may not work outside of them, and why. kind: see machines.remembered. chip: that
    the answer asks for. machine: of the kind of kernel that it reaches. programs: of the blocks that were asked for
    last. beyond: whether JAX's simulator has run what the lens could not.
    """

    allow: Sequence[str] | None = None
    barred: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kind: Programs = dataclasses.field(default_factory=dict)
    chip: str = CHIP
    machine: Machine = TPU
    programs: tuple[dict[str, Any], Programs] = dataclasses.field(default_factory=lambda: ({}, {}))
    beyond: bool = False

    explain_error = staticmethod(explain_error)

    def run_case(self, draw: Draw) -> Verdict | None:
        """The verdict on one draw when it is not a pass, else None."""
        case, want = draw.case, draw.want
        try:
            run = self._run(draw)
        except Refused as error:
            line = next(iter(error.lines), None)
            return self.failed([Finding(error.kind, error.cause, [], line, near=error.lines)])
        except CannotJudge as error:
            return self._unjudged(str(error))
        except (Exception, TimeLimit) as error:
            if self.lookout.found is None:
                return self.error(error)
        if self.lookout.found is not None:
            return self.failed([self.lookout.found])
        if is_brief() and (wrong := compare(jax.tree.map(np.asarray, run.outputs), want, self.tolerance)) is not None:
            return self.failed([wrong])
        guard, picture = self.guard, ""
        costs: list[Any] = []
        if draw.first or case.budget:
            with guard.explaining():
                costs = self.machine.figures(run)
        if draw.first:
            self.figures = costs
        diagnosis = self._diagnosis(run, want)
        if not is_brief() and {f.kind for f in diagnosis.findings} & _MAY_BE_RIGHT:
            diagnosis = self._of_its_own(diagnosis, run, draw)
        if any(i.kind == "hardware-random" for t in run.traces for i in t.incidents):
            if diagnosis.findings and {f.kind for f in diagnosis.findings} <= SEEN_IN_VALUES:
                return self._unjudged(_RANDOM)
            self._note(_RANDOM)
        if diagnosis.findings and {f.kind for f in diagnosis.findings} <= {"rounding"}:
            diagnosis = self.rounded(run, draw) or diagnosis
        around = self._around(run)
        part = [f for f in around if f.operand == "result"]  # no news as long as the result is wrong
        findings = [*(f for f in around if f not in part), *diagnosis.findings] or part
        if len(findings) > 1 and not is_brief() and not {f.kind for f in findings} & {"structure", "shape", "dtype"}:
            harmful = self._harmful({f.operand for f in findings if f.kind == "padding"}, run, draw)
            findings = [f for f in findings if f.kind != "padding" or not harmful or f.operand in harmful]
        if findings and not is_brief():
            with guard.explaining():
                findings, picture = self._explained(findings, run, draw)
        findings = findings or self._with_other_garbage(run, draw)
        if not findings and (rough := self.rounded(run, draw)) is not None:
            diagnosis, findings = rough, [*rough.findings]
        with guard.explaining():
            findings = findings or dropped(run, case.blocks)
        with guard.explaining():
            findings = findings or self._over_budget(run, costs, case.budget)
        if not findings:
            return None
        verdict = self.failed(findings, diagnosis)
        with guard.explaining():
            verdict.figures = costs or self.machine.figures(run)
        verdict.picture = picture
        return verdict

    def _diagnosis(self, run: Run, want: Any) -> Diagnosis:
        """What is wrong with a result, and why; only what is wrong, if a rule of ours raises."""
        with self.guard.explaining():
            return machine_of(run).diagnose(run, want, self.tolerance)
        finding = compare(jax.tree.map(np.asarray, run.outputs), want, self.tolerance)
        return Diagnosis([finding] if finding else [])

    def _of_its_own(self, found: Diagnosis, run: Run, draw: Draw) -> Diagnosis:
        """The diagnosis without what the machine sees in the course's solution, too."""
        with self.guard.explaining():
            right = self.also(draw)
            refs = {f.operand for f in found.findings if f.kind == "padding"}
            harmful = self._harmful(refs, run, draw)
            for t in [*run.traces, *(t for device in getattr(run, "devices", ()) for t in device)]:
                t.incidents = [
                    i
                    for i in t.incidents
                    if i.kind not in _MAY_BE_RIGHT or i.ref in harmful or mark_of(t, i) not in right
                ]
            diagnosis = self._diagnosis(run, draw.want)
            places = {(o.name, k) for t in run.traces for k, o in enumerate(t.call.operands)}
            too = {(name, block) for name, k in places for kind, at, block in right if (kind, at) == ("unread", k)}
            own = [f for f in diagnosis.findings if f.kind != "unread" or (f.operand, str(f.block)) not in too]
            return dataclasses.replace(diagnosis, findings=own)
        return self._diagnosis(run, draw.want)

    def _around(self, run: Run) -> list[Finding]:
        """What is done outside of the kernels, and may not be."""
        with self.guard.explaining():
            bypass = explain_barred(run.outside, self.barred, self.allow or ())
            if bypass is None and self.allow is not None:
                bypass = explain_outside(run.outside, self.allow)
            no_kernel = self._no_kernel(run) if self.allow is not None else None
            return [f for f in ([bypass] if bypass and run.calls else [no_kernel, bypass]) if f]
        return []

    def _over_budget(self, run: Run, costs: list[Any], budget: Budget | None) -> list[Finding]:
        """A right answer that costs too much."""
        findings = self.machine.over_budget(run, costs, budget) if budget else []
        if budget and budget.outside_flops is not None:
            outside = too_much_outside(run.outside, budget.outside_flops)
            findings[:0] = [outside] if outside else []
        return findings

    def _explained(self, findings: list[Finding], run: Run, draw: Draw) -> tuple[list[Finding], str]:
        """The findings with the puzzle's own word about what the values mean, and its picture of them."""
        if any(f.kind in _OTHERWISE_WRONG for f in findings):
            return findings, ""
        words, picture = self.explained(run.outputs, draw)
        first, *others = findings
        if words and first.kind in SEEN_IN_VALUES:
            first = first.but(cause=words, evidence=(*first.evidence, first.cause))
            others = [f for f in others if f.kind not in SEEN_IN_VALUES]
        elif words:  # the lens has seen how it came about; what it has led to is evidence
            first = first.but(evidence=(*first.evidence, words))
        return [first, *others], picture

    def _harmful(self, refs: Iterable[str | None], run: Run, draw: Draw) -> list[str]:
        """Those of these Refs whose garbage does harm: less is wrong with zeros in its place."""

        def wrong(run: Run) -> int:
            return sum(int(each.bad.sum()) for each in wrong_results(run.outputs, draw.want, self.tolerance))

        harmful: list[str] = []
        for ref in filter(None, refs):
            with contextlib.suppress(TimeLimit), self.guard.explaining(), garbage(0.0, ref):
                harmful += [ref] if wrong(self._run(draw)) < wrong(run) else []
        return harmful

    def _with_other_garbage(self, run: Run, draw: Draw) -> list[Finding]:
        """A kernel that reads uninitialised memory runs a second time, with other bits in it."""
        traces = (each for t in run.traces for each in t.with_pipelines())
        if not any(i.kind in GARBAGE_READS for t in traces for i in t.incidents):
            return []
        found = None
        with contextlib.suppress(TimeLimit), self.guard.explaining(), garbage(OTHER_GARBAGE):
            found = explain_garbage(run, self._run(draw), draw.want, self.tolerance)
        return [found] if found else []

    def _run(self, draw: Draw) -> Run:
        why, args, blocks = "it has a bug", draw.args, draw.case.blocks
        try:
            with in_l2(draw.case.l2), time_limit(TIME_LIMIT_S, "your kernel"), self.lookout.watching():
                if self.programs[0] is not blocks:
                    self.programs = blocks, dict(self.kind)
                run = trace(_with(self.fn, blocks), *args, programs=self.programs[1])
                self.kind.update(remembered(self.programs[1]))
                self.chip, self.machine = run.chip, machine_of(run)
                return run
        except Refused:
            raise
        except Beyond as e:
            why = str(e)
            if isinstance(e.__cause__, Exception) and not isinstance(e.__cause__, NotImplementedError):
                self.guard.keep(e.__cause__)
        except Exception as e:
            if not is_ours(e):
                raise
            self.guard.keep(e)
        self.beyond = True
        told = bool(self.guard.errors)  # of a bug, by the guard
        self.machine = reached(self.programs[1])
        if is_brief() and not self.machine.runs_all:  # no trial is worth a simulator that may wait for ever
            raise CannotJudge(why)
        instead = "" if told else f"The lens cannot follow this: {why}. JAX's simulator judges instead."
        try:
            outputs = self.machine.simulate(_with(self.fn, blocks), args, TIME_LIMIT_S, self.chip)
        except SimulatorError as e:
            if e.running and not isinstance(e, SimulatorUnable):
                self._note(instead)
                raise
            why, because = (shorten(text, _LONGEST_REASON, placeholder=" ...") for text in (why, str(e)))
            raise CannotJudge(f"Neither the lens can run this ({why}) nor JAX's simulator ({because}).") from e
        self._note(instead)
        return Run([], outputs, [], [], [])

    def _note(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def confirm(self, draw: Draw, want: Callable[[], Any]) -> Verdict | None:
        """The compiler's front end, and JAX's simulator or the GPU of this machine: None when both agree with a pass.

        want: makes what is right.
        """
        sparse = self.chip == SPARSE_CHIP  # the simulator runs kernels of SparseCores as if they were a TensorCore's
        refused, fn = None, _with(self.fn, draw.case.blocks)
        with self.guard.explaining():
            refused = self.machine.refusal(fn, draw.args, self.chip)
        if refused is not None:
            details = [refused.detail] if refused.detail else []
            return self.failed([Finding("lowering", refused.sentence, details, refused.line)])
        if is_brief():
            return None
        try:
            outputs = self.machine.run_again(fn, draw.args, CONFIRM_LIMIT_S, self.chip)
        except (Exception, TimeLimit) as error:
            if isinstance(error, SimulatorUnable) and not self.machine.runs_all:
                self._note(_ALONE.format(self.machine.second, error))
                return None
            if (sparse and isinstance(error, SimulatorError)) or isinstance(error, SimulatorUnable):
                return self._unjudged(_UNCONFIRMED.format(error), "Right, but not confirmed.")
            verdict = self.error(error)
            late = isinstance(error, SimulatorTimeout | TimeLimit)
            verdict.notes.append((_TOO_LATE if late else _REFUSED).format(self.machine.second))
            return verdict
        findings = self._diagnosis(Run([], outputs, [], [], []), want()).findings
        if not findings:
            self._note(self.machine.confirmed)
            return None
        if sparse:
            return self._unjudged(_UNCONFIRMED.format("other values"), "Right, but not confirmed.")
        verdict = self.failed(findings)
        verdict.notes.append(_DISAGREE.format(self.machine.second))
        return verdict

    def _no_kernel(self, run: Run) -> Finding | None:
        made = jax.tree.leaves(run.outputs)
        if run.calls and all(own or _is_constant(x) for own, x in zip(run.from_kernel, made, strict=True)):
            return None
        if not run.calls and (self.beyond or run.hangs):
            return None
        what = "no kernel is reached" if not run.calls else "part of the result does not come out of a kernel"
        cause = f"{what}: the work is done outside of one, and this puzzle is about doing it inside."
        return Finding("outside", cause, operand="result" if run.calls else None)

    def failed(self, findings: Sequence[Finding], diagnosis: Diagnosis | None = None, **more: Any) -> Verdict:
        tiles = TileMap(diagnosis.operand, diagnosis.tiles) if diagnosis and diagnosis.operand is not None else None
        return super().failed(findings, tiles=tiles, **more)

    def _unjudged(self, why: str, word: str = "Cannot judge.") -> Verdict:
        return dataclasses.replace(
            self.verdict("unjudged", []), word=word, notes=[why, *(note for note in self.notes if note != why)]
        )


def _is_constant(result: Any) -> bool:
    """Whether a result is the same everywhere, which is nobody's work: a gradient that is cut off, say."""
    x = np.asarray(result)
    return x.size > 1 and bool((x == x.flat[0]).all())


def _with(fn: Callable[..., Any], blocks: dict[str, Any]) -> Callable[..., Any]:
    """fn with its keywords, which may have any name: `chip`, for instance."""
    return functools.update_wrapper(functools.partial(fn, **blocks), fn) if blocks else fn


class CannotJudge(Exception):
    """Nobody here can run an answer. The message says why, for the reader."""


_RANDOM = (
    "This kernel draws random numbers from the TPU's own generator. Only a TPU has them: the lens and JAX's simulator "
    "take 0 for each, and what you expect has to be made of zeros, too."
)
_LONGEST_REASON = 90  # a note has three lines
_UNCONFIRMED = (
    "The lens passed this. JAX's simulator cannot run it, so nobody has confirmed it. check_call(..., confirm=False) "
    "takes the lens's word. JAX says: {0}"
)
_TOO_LATE = (
    "The lens passed this; {0}, which has the last word, was not done in time. On a busy machine that "
    "says nothing about your kernel: check again when there is less to do."
)
_REFUSED = "The lens passed this. {0} refuses it, and its word counts. If your kernel is right, please report it."
_ALONE = (
    "The lens passed this, and JAX's front end for GPUs takes it. {0} cannot run it, so nobody else has confirmed its "
    "values. The reason: {1}"
)
_DISAGREE = (
    "The lens passed this, {0} did not. One of the two has a bug, most likely the lens, so its word does not count. "
    "Please report it."
)
