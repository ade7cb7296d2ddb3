"""Every solution for a GPU runs compiled on the GPU of this machine, where there is one, and check says so.

It needs JAX with GPU support, pytest, pytest-xdist and what this package imports to judge: cloudpickle, jaxtyping,
threadpoolctl. Without uv: PYTHONPATH=src python -m pytest -n 0 tests/test_gpu_compiled.py
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import gpu_kernels
from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.course.arrays import expected, keywords_of
from pallas_puzzles.course.inputs import draw
from pallas_puzzles.diagnose.diagnose import diagnose
from pallas_puzzles.lens.machine import Run
from pallas_puzzles.platforms import gpu_attached
from pallas_puzzles.targets import gpu_simulator

ROOT = Path(__file__).parents[1]

# In a process of its own, which may use the GPU: the tests run on the CPU.
ASK = """
import jax
from pallas_puzzles.targets.gpu_here import gpu_here
found = gpu_here()
print(found.name if found else f"its devices are {', '.join(d.device_kind for d in jax.devices())}")
"""
CHECK = """
import sys
sys.path.insert(0, "tests")
import gpu_kernels, pallas_puzzles
from pallas_puzzles import check_call
pallas_puzzles.setup("gpu")
for name in ("copies", "matmul", "emit_pipeline"):
    kernel, args, want = gpu_kernels.RIGHT[name]()
    kernel(*args)
    print(name, bool(check_call(kernel, args, want)), check_call(kernel, args, want).notes)
for name in ("half arrives", "no barrier_wait", "slot never released"):
    kernel, args, want = gpu_kernels.MISTAKES[name][0]()
    print(name, check_call(kernel, args, want).findings[0].kind)
"""


def in_a_process(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@functools.cache
def why_not() -> str:
    """Why nothing can run compiled here; "" where it can."""
    if not gpu_attached():
        return "this machine has no GPU"
    said = in_a_process(ASK).splitlines()[-1]
    return f"needs an H100, H200 or B200 that JAX can use: {said}" if said.startswith("its devices") else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
FOR_GPUS = [each for book in curriculum.notebooks() if book.accelerator == "gpu" for each in book.puzzles]


@pytest.mark.parametrize("puzzle", FOR_GPUS, ids=lambda puzzle: puzzle.id)
def test_a_solution_runs_compiled(puzzle: curriculum.Puzzle) -> None:
    official = cases.official(puzzle.id)
    for case in official.cases:
        args = draw(case.inputs, np.random.default_rng(0))
        right(official.fn, args, expected(official.spec, args, keywords_of(official.spec, case.blocks)), **case.blocks)


BLACKWELL = {"dynamic_scheduling_loop", "accumulators in TMEM", "fenced by hand", "through TMEM"}


@pytest.mark.parametrize("name", gpu_kernels.RIGHT)
def test_a_right_kernel_runs_compiled(name: str) -> None:
    if name in BLACKWELL and "B200" not in in_a_process(ASK):
        pytest.skip("needs a B200: an H100 or H200 has neither TMEM nor try_cluster_cancel")
    if name == "semaphore" and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.11.2 cannot compile a semaphore as scratch: Pass pipeline failed")
    kernel, args, want = gpu_kernels.RIGHT[name]()
    right(kernel, args, want)


def right(fn: Any, args: Any, want: Any, **blocks: Any) -> None:
    outputs = gpu_simulator.run_compiled(fn, *args, **blocks)
    findings = diagnose(Run([], jax.tree.map(np.asarray, outputs), [], [], []), want).findings
    assert not findings, findings[0].cause


def test_check_asks_the_gpu() -> None:
    said = in_a_process(CHECK)
    assert "Kernels run compiled, on this machine's NVIDIA" in said
    lines = said.splitlines()
    for name in ("copies", "matmul", "emit_pipeline"):
        assert any(line.startswith(f"{name} True ['Confirmed by the GPU (NVIDIA") for line in lines), said
    for last in ("half arrives deadlock", "no barrier_wait no-wait", "slot never released deadlock"):
        assert last in lines
