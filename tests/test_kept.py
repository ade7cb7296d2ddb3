"""The tests' own memory of the TPU compiler and the simulator: one question is asked once, and an answer is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kept
from pallas_puzzles.targets import simulate
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.lowering import refusal
from tpu_kernels import needs_compiler


class Process:
    """Answers with the number of the question."""

    def __init__(self, error=None):
        self.asked, self.error, self._environment = 0, error, {"FLAGS": "--some"}

    def compiled(self, timeout_s, **request):
        self.asked += 1
        if isinstance(self.error, Exception):
            raise self.error
        return {"error": self.error} if self.error else {"number": self.asked}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(kept, "SIMULATED", tmp_path / "simulated")
    return tmp_path / "cache"


def ask(process, blob=b"program", chip="v5e", axes=None, options=None):
    return kept.keeping(process)(1.0, blob=blob, chip=chip, axes=axes, options=options)


@needs_compiler  # its version is a part of every question
def test_the_same_question_is_asked_once():
    process = Process()
    assert ask(process) == ask(process) == {"number": 1}
    others = [{"blob": b"another"}, {"chip": "v6e"}, {"axes": {"x": 2}}, {"options": {"a": "b"}}]
    assert [ask(process, **each)["number"] for each in others] == [2, 3, 4, 5]
    process._environment = {"FLAGS": "--other"}
    assert ask(process)["number"] == 6


@needs_compiler  # its version is a part of every question
def test_another_version_is_another_compiler(monkeypatch):
    process = Process()
    ask(process)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7")
    assert ask(process)["number"] == 2


@needs_compiler  # its version is a part of every question
def test_a_damaged_answer_is_asked_for_again(folder):
    process = Process()
    ask(process)
    (only,) = folder.iterdir()
    only.write_bytes(only.read_bytes()[:10])
    assert ask(process)["number"] == 2


@needs_compiler  # its version is a part of every question
def test_a_refusal_is_kept():
    process = Process("not like this")
    assert ask(process) == ask(process) == {"error": "not like this"}
    assert process.asked == 1


@pytest.mark.parametrize(
    ("words", "questions"),
    [
        ("the TPU compiler was ended by signal 6: Check failed: true", 1),
        ("the TPU compiler was ended by signal 9", 2),
        ("the TPU compiler did not finish within 1 s", 2),
    ],
)
@needs_compiler  # its version is a part of every question
def test_last_words_are_kept_and_an_accident_is_not(words, questions):
    process = Process(compiler.CompilerDied(words))
    for _ in range(2):
        with pytest.raises(compiler.CompilerDied, match=words):
            ask(process)
    assert process.asked == questions


def test_a_program_is_simulated_once_for_each_data():
    ran = []

    def run(fn, args, kwargs, timeout_s, chip, **params):
        ran.append((args, kwargs, chip, params))
        return fn(*args, **kwargs)

    def twice(x, n=2):
        return n * x

    once = kept.simulating(run)
    x = np.arange(4, dtype=np.float32)
    for _ in range(2):
        assert (once(twice, (x,), {}, 1.0, "v5e") == 2 * x).all()
    assert len(ran) == 1
    for fn, args, kwargs, chip, params in [
        (twice, (x + 1,), {}, "v5e", {}),
        (twice, (x,), {"n": 3}, "v5e", {}),
        (twice, (x,), {}, "v6e", {}),
        (twice, (x,), {}, "v5e", {"detect_races": True}),
        (lambda x: x + x, (x,), {}, "v5e", {}),
        (lambda x: x + jnp.asarray(ran[0][0][0]), (x,), {}, "v5e", {}),
    ]:
        before = len(ran)
        once(fn, args, kwargs, 1.0, chip, **params)
        assert len(ran) == before + 1


def test_what_the_gpu_simulator_cannot_run_is_kept_and_an_accident_is_not():
    ran = []

    def unable(*args, running, **_):
        ran.append(args)
        raise simulate.SimulatorUnable("not this one", running=running)

    for fn, running, times in [(jnp.sin, False, 1), (jnp.cos, True, 3)]:
        for _ in range(2):
            with pytest.raises(simulate.SimulatorUnable, match="not this one"):
                kept.simulating_gpu(functools.partial(unable, running=running))(fn, np.ones(2))
        assert len(ran) == times
    again = kept.simulating_gpu(lambda fn, *args, **_: ran.append(fn) or fn(*args))
    for _ in range(2):
        assert (again(jnp.tan, np.ones(2)) == jnp.tan(np.ones(2))).all()
    assert len(ran) == 4


def test_what_the_front_end_takes_is_lowered_once_for_each_chip(monkeypatch):
    lowered = []
    monkeypatch.setattr(jax.stages.Traced, "lower", kept.lowering(lambda self, **_: lowered.append(self)))
    for fn, chip, times in [(jnp.sin, "v5e", 1), (jnp.sin, "v6e", 2), (jnp.cos, "v6e", 3)]:
        for _ in range(2):
            assert refusal(fn, jnp.ones(2), chip=chip) is None
        assert len(lowered) == times
    monkeypatch.setattr(kept, "_write", lambda *_: pytest.fail("a refusal is not kept"))
    monkeypatch.setattr(jax.stages.Traced, "lower", kept.lowering(lambda self, **_: {}["not taken"]))
    assert refusal(jnp.tan, jnp.ones(2), chip="v5e")


def test_what_the_simulator_objects_to_is_not_kept(folder):
    def refuses(*_, **__):
        raise RuntimeError("a race")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="a race"):
            kept.simulating(refuses)(jnp.sin, (np.ones(2),), {}, 1.0, "v5e")
