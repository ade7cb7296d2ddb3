"""What the TPU compiler, JAX's simulators and the front ends have answered once, kept in build/: the same question, the
same answer.

A question is all that has a say in the answer: the program, the chip, the options, the versions, and the code of the
process that holds the compiler; of a simulator, what it is given, too. A process that was killed, or was late, is
asked again, and so are a simulator that objects to what a kernel did, and a front end that objects to anything.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_puzzles.ir.gpu import as_on_gpu
from pallas_puzzles.targets import gpu_simulator, simulate, warm
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.warm import CompilerDied

FOLDER = Path(__file__).parents[1] / "build" / "tpu-cache"
SIMULATED = FOLDER.with_name("simulator-cache")
CHILD = Path(warm.__file__).with_name("child.py").read_bytes()
ITS_PACKAGES = ("libtpu", "jax", "jaxlib")
LAST_WORDS = re.compile(r"ended (by signal|with exit code) \d+: ")  # libtpu's, before it aborts


def _place(environment: dict[str, str], blob: bytes, request: dict[str, Any]) -> Path:
    versions = [importlib.metadata.version(name) for name in ITS_PACKAGES]
    asked = ascii((versions, environment, sorted(request.items())))
    return FOLDER / hashlib.sha256(b"\0".join([asked.encode(), CHILD, blob])).hexdigest()


def keeping(process: Any) -> Callable[..., dict[str, Any]]:
    """The method `compiled` of a compiler's process, which looks whether it has been asked the same before."""
    ask = process.compiled

    def asked(timeout_s: float, *, blob: bytes, **request: Any) -> dict[str, Any]:
        place, answer = _place(process._environment, blob, request), None
        with contextlib.suppress(OSError, EOFError, zlib.error, pickle.UnpicklingError):
            answer = pickle.loads(zlib.decompress(place.read_bytes()))
        if answer is None:
            try:
                answer = ask(timeout_s, blob=blob, **request)
            except CompilerDied as error:
                if not LAST_WORDS.search(str(error)):
                    raise
                answer = error
            _write(place, zlib.compress(pickle.dumps(answer), 1))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked


def _write(place: Path, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    half = place.with_name(f"{place.name}.{os.getpid()}")
    half.write_bytes(data)
    half.replace(place)


def simulating(run: Callable[..., Any]) -> Callable[..., Any]:
    """`simulate._simulated`, which looks whether the same program has run on the same data before."""

    def simulated(fn: Any, args: Any, kwargs: Any, timeout_s: float, chip: str, **params: Any) -> Any:
        with simulate.tpu_simulation(chip, **params):
            program = jax.make_jaxpr(functools.partial(fn, **kwargs))(*args)
        place = _simulated(program, args, f"{chip} {params}")
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            return pickle.loads(place.read_bytes())
        outputs = run(fn, args, kwargs, timeout_s, chip, **params)
        _write(place, pickle.dumps(outputs))
        return outputs

    return simulated


def simulating_gpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same of `gpu_simulator.simulate`; also of what that simulator cannot run."""

    def simulate_gpu(fn: Any, *args: Any, timeout_s: float = 30.0, **kwargs: Any) -> Any:
        with as_on_gpu():
            program = jax.make_jaxpr(functools.partial(fn, **kwargs))(*args)
        place, answer = _simulated(program, args, "gpu"), None
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            answer = pickle.loads(place.read_bytes())
        if answer is None:
            try:
                answer = run(fn, *args, timeout_s=timeout_s, **kwargs)
            except simulate.SimulatorUnable as error:
                if error.running:
                    raise
                answer = error
            _write(place, pickle.dumps(answer))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return simulate_gpu


def lowering(lower: Callable[..., Any]) -> Callable[..., Any]:
    """`Traced.lower` for those who ask whether it raises, and need no more of what it returns."""

    def lowered(self: Any, **asked: Any) -> Any:
        place = _simulated(self.jaxpr, (), f"{asked} {jax.sharding.get_abstract_mesh()}")
        if asked.get("lowering_platforms") is None:  # somebody goes on with it
            return lower(self, **asked)
        if place.exists():
            return None
        result = lower(self, **asked)
        _write(place, b"")
        return result

    return lowered


def _simulated(program: Any, args: Any, asked: str) -> Path:
    """Where the answer to what is asked of a program is kept."""
    data = jax.tree.map(np.asarray, (args, program.consts))
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")]
    text = re.sub(r"\b0x[0-9a-f]+", "", f"{versions} {asked} {program}")  # addresses of functions
    return SIMULATED / hashlib.sha256(text.encode() + pickle.dumps(data)).hexdigest()


def simulate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that ask JAX's simulators, and the front ends, whether what is right is right."""
    monkeypatch.setattr(jax.stages.Traced, "lower", lowering(jax.stages.Traced.lower))
    monkeypatch.setattr(simulate, "_simulated", simulating(simulate._simulated))
    monkeypatch.setattr(gpu_simulator, "simulate", simulating_gpu(gpu_simulator.simulate))


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is made of the compiler's answers, not of its process."""
    for process in (compiler._COMPILER, compiler._SIMULATOR):
        monkeypatch.setattr(process, "compiled", keeping(process))
    monkeypatch.setattr(compiler, "warm", lambda **_: None)  # it starts when it is needed
