"""Calls of other projects' kernels, as their own tests make them.

A test runs until it calls the kernel. The call is kept, and the test ends there. The tests need not be made for a CPU:
what they would skip for want of a TPU runs, and what is not installed is an empty module.
"""

import collections
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import jax
import numpy as np
import pytest
from foreign_jobs import Job, cpu_limit
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.lens.watchdog import TimeLimit

VARIANTS = 1  # of one test, from which the smallest call is taken
ENOUGH = 3  # tests of one kernel
MOST_BYTES = 40 << 20
TEST_S = 20.0  # CPU time, as the next
MOST_S = 30.0  # of looking for calls of one kernel


_REFUSED = re.compile("reject|raise|invalid|cannot|should_be|_oom_")  # tests of calls that a project refuses


class Called(Exception):
    """The test has reached the kernel, and need not go on."""


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules with nothing in them, in place of those of some packages that are not there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        ours = any(name == n or name.startswith(n + ".") for n in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__dict__["__getattr__"] = lambda name: mock.MagicMock(name=name)
        return module

    def exec_module(self, module: Any) -> None:
        del module


def readable(root: Path, package: str, missing: tuple[str, ...]) -> None:
    """Makes `package` below `root` importable, without what its __init__ would start."""
    sys.path.insert(0, str(root))
    if missing:
        sys.meta_path.append(Empty(missing))
    module = types.ModuleType(package)
    module.__path__ = [str(root / package)]
    sys.modules[package] = module


class Recorder:
    """A pytest plugin: `kernel` is replaced, everywhere, by something that keeps what it is called with."""

    def __init__(self, kernel: Callable[..., Any], tests: str) -> None:
        self.kernel, self.tests = kernel, re.compile(tests)
        self.running, self.start = "", time.process_time()
        self.calls: dict[str, list[Job]] = collections.defaultdict(list)

    def __call__(self, *args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        where = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        if any(isinstance(x, jax.core.Tracer) for x in leaves) or not where:
            return self.kernel(*args, **options)

        def fn(*arrays: Any, kernel: Callable[..., Any] = self.kernel) -> Any:
            full = list(leaves)
            for i, x in zip(where, arrays, strict=True):
                full[i] = x
            args, options = jax.tree.unflatten(tree, full)
            return kernel(*args, **options)

        call = fn, tuple(np.asarray(leaves[i]) for i in where)
        if nbytes(call) <= MOST_BYTES:
            self.calls[self.running].append(call)
        raise Called

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen: dict[str, list[Any]] = collections.defaultdict(list)
        for item in items:
            item.own_markers = [m for m in item.own_markers if not m.name.startswith("skip")]
            if self.tests.search(item.nodeid) and not _REFUSED.search(family(item)):
                chosen[family(item)].append(item)
        items[:] = [item for same in chosen.values() for item in same[:VARIANTS]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        if len(self.calls) >= ENOUGH or time.process_time() - self.start > MOST_S:
            item.session.shouldstop = "enough"
        self.running = family(item)
        with self.everywhere(), contextlib.suppress(Called), cpu_limit(TEST_S):
            yield

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        places = [
            (vars(module), name)
            for module in list(sys.modules.values())
            for name, value in list(getattr(module, "__dict__", {}).items())
            if value is self.kernel and module is not sys.modules[__name__]
        ]
        for names, name in places:
            names[name] = self
        try:
            yield
        finally:
            for names, name in places:
                names[name] = self.kernel

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.calls.get(self.running):
            self.why = str(report.longrepr).splitlines()[-1][:150]

    why = ""


def replace(entry: str, function: Callable[..., Any]) -> None:
    """Puts another function in the place of module:function, before other modules import it."""
    name, _, function_name = entry.partition(":")
    setattr(importlib.import_module(name), function_name, function)


def family(item: Any) -> str:
    """The test's name in its source: parametrized ones have the same."""
    return re.sub(r"(_?\d+)?( \(.*)?$", "", getattr(item, "originalname", None) or item.name)


def harvest(entry: str, tests: str, chip: str = "TPU v6e", only: str = "") -> tuple[dict[str, Job], str]:
    """(a test's name -> the smallest call of `entry` that it makes, why there is none)."""
    name, _, function = entry.partition(":")
    recorder = Recorder(getattr(importlib.import_module(name), function), only)
    quiet = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--import-mode=importlib", "--tb=line", tests]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(TestCase, "skipTest"))
        stack.enter_context(mock.patch.object(pltpu, "get_tpu_info", on(chip, pltpu.get_tpu_info)))
        with contextlib.suppress(ModuleNotFoundError):
            from jax._src import test_util

            stack.enter_context(mock.patch.object(test_util, "is_device_tpu_at_least", return_value=True))
            stack.enter_context(mock.patch.object(test_util, "is_device_tpu", return_value=True))
        said = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            pytest.main(quiet, plugins=[recorder])
            if not recorder.calls and not recorder.why:
                recorder.why = said.getvalue()[-1500:]
        except TimeLimit:
            recorder.why = "its tests take too long"
    smallest = {test: min(calls, key=nbytes) for test, calls in recorder.calls.items()}
    return smallest, recorder.why


def on(kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice(kind, 1, "tpu"))

    def asked(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return fn(*args)

    return asked


def nbytes(call: Job) -> int:
    return sum(x.nbytes for x in call[1])
