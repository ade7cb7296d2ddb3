"""A bug of ours is never shown as the reader's, nor as a traceback: the verdict stays, without its explanation."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_puzzles
from pallas_puzzles import Budget, check, normal
from pallas_puzzles.app.notebooks import repository
from pallas_puzzles.budgets import tpu as budgets_module
from pallas_puzzles.course import cases, isolate, session
from pallas_puzzles.course import check as check_module
from pallas_puzzles.course.check import check_call
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.diagnose import diagnose
from pallas_puzzles.ir import capture
from pallas_puzzles.lens import machine
from pallas_puzzles.view.verdict import Verdict

X = normal((24, 128))
TILE = pl.BlockSpec((8, 128), lambda i: (i, 0))


def by_rows(kernel: Any, x: Any) -> Any:
    return pl.pallas_call(kernel, grid=(x.shape[0] // 8,), in_specs=[TILE], out_specs=TILE, out_shape=x)(x)


def right(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    return by_rows(kernel, x)


def wrong(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 3 * x_ref[...]

    return by_rows(kernel, x)


def spec(x: Any) -> Any:
    return 2 * x


def judged(fn: Any, *inputs: Any, spec: Any = spec, **options: Any) -> Verdict:
    with collecting() as verdicts:
        check("mine/1", fn, spec, *(inputs or [X]), **options)
    (verdict,) = verdicts
    return verdict


def bug(statement: str) -> Any:
    """A function with a bug, in a file of ours."""
    names: dict[str, Any] = {}
    code = f"def bug(*args, **kwargs):\n    {statement}"
    exec(compile(code, str(Path(pallas_puzzles.__file__).with_name("a_file_of_ours.py")), "exec"), names)
    return names["bug"]


broken, stumbling = bug("return {}['our own mistake']"), bug("raise RuntimeError('our own mistake')")


PLACES = [
    pytest.param(diagnose, "_roots", broken, id="a rule"),
    pytest.param(diagnose, "incidents_of", broken, id="a rule about incidents"),
    pytest.param(capture, "describe", broken, id="capture"),
    pytest.param(capture.Evaluator, "run", stumbling, id="the outer program"),
    pytest.param(machine.Machine, "apply", broken, id="the machine, called beyond the lens"),
    pytest.param(machine.Machine, "apply", stumbling, id="the machine"),
    pytest.param(machine, "figures", broken, id="the figures"),
]


def a_bug_is_told(verdict: Verdict) -> None:
    (note,) = [note for note in verdict.notes if "has a bug" in note]
    assert note in str(verdict).replace("\n  ", " "), "one sentence, not cut"
    assert f"report it at {repository()}/issues" in note
    assert "which is not in your code" in note
    assert note.rstrip().endswith("our own mistake") or note.endswith("'our own mistake'")
    assert "our own mistake" in verdict.traceback
    assert "Traceback" in verdict.traceback
    assert not any("our own mistake" in f.cause + "".join(f.evidence) for f in verdict.findings), "blamed on the reader"


@pytest.mark.parametrize(("module", "name", "mistake"), PLACES)
def test_a_right_answer_stays_right(module: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, mistake)
    verdict = judged(right)
    assert verdict.status == "passed", verdict
    a_bug_is_told(verdict)


@pytest.mark.parametrize(("module", "name", "mistake"), PLACES)
def test_a_wrong_answer_stays_wrong(module: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, mistake)
    verdict = judged(wrong)
    assert verdict.status == "failed", verdict
    assert verdict.findings
    a_bug_is_told(verdict)


def test_a_bug_in_a_budget_or_in_the_word_of_a_puzzle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(wrong, explain=stumbling)
    assert "3 times" in verdict.findings[0].cause or "1.5" in verdict.findings[0].cause, "what the lens says, stays"
    a_bug_is_told(verdict)
    monkeypatch.setattr(budgets_module, "over_budget", broken)
    verdict = judged(right, budget=Budget(hbm_bytes=1 << 20))
    assert verdict.status == "passed"
    a_bug_is_told(verdict)


def test_where_nothing_is_left_to_judge_with_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_puzzles.course import arrays

    monkeypatch.setattr(arrays, "compare", stumbling)
    verdict = judged(lambda x: 2 * x, kernel=False)
    assert verdict.status == "error"
    assert verdict.headline == "mine/1: not judged."
    a_bug_is_told(verdict)


def test_check_call_has_the_same_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((24, 128), np.float32)
    monkeypatch.setattr(diagnose, "_roots", broken)
    assert check_call(right, (x,), 2 * x)
    verdict = check_call(wrong, (x,), 2 * x)
    assert verdict.status == "failed"
    a_bug_is_told(verdict)


# --- what is the reader's stays the reader's -------------------------------------------------------------------------


def with_a_missing_key(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = {}["a key"] * x_ref[...]

    return by_rows(kernel, x)


def returns_a_function(x: Any) -> Any:
    return lambda: x


def wants_two(x: Any, y: Any) -> Any:
    return x + y


def adds_what_does_not_fit(x: Any) -> Any:
    return x + jnp.ones((3, 3))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("fn", [with_a_missing_key, returns_a_function, wants_two, adds_what_does_not_fit])
def test_an_error_in_the_readers_code_is_theirs(fn: Any, kernel: bool) -> None:
    verdict = judged(fn, kernel=kernel)
    assert verdict.status == "error"
    assert verdict.findings
    assert "has a bug" not in str(verdict)
    assert "report it" not in str(verdict)


def test_an_error_in_a_spec_of_the_readers_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="a key"):
        judged(right, spec=with_a_missing_key)


def test_a_bug_in_what_is_tried_costs_the_correction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "isolated", stumbling)
    verdict = session.run("basics/1", overlay="def add_ten_kernel(x_ref, o_ref):\n    o_ref[...] = x_ref[...] + 11\n")
    assert verdict.status == "failed"
    assert "constant +1" in verdict.findings[0].cause
    a_bug_is_told(verdict)


@pytest.mark.parametrize("name", ["why_apart", "holes_of", "unwritten_before", "record", "around", "emit"])
def test_what_stands_around_the_judging_may_break_too(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cases.official("basics/1").fn
    monkeypatch.setattr(check_module, name, broken)
    check("basics/1", right if name != "unwritten_before" else lambda x: right(x) + 1)
    shown = " ".join(capsys.readouterr().out.split())
    assert "basics/1" in shown
    assert "has a bug, which is not in your code" in shown
    assert "our own mistake" in shown
    assert "Traceback" not in shown
