"""A notebook with kernels for a GPU: what is said of wrong answers, of claims, in the command, at the end, in Colab."""

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import demo_course
import gpu_course
import gpu_kernels
from course import lay_solutions
from gpu_course import SOLUTIONS
from gpu_kernels import S, normal
from pallas_puzzles.app import notebooks
from pallas_puzzles.course import curriculum, session
from pallas_puzzles.course.claims import gmem_claim
from pallas_puzzles.course.finale import finale
from pallas_puzzles.course.machines import trace
from pallas_puzzles.course.progress import record
from pallas_puzzles.diagnose.diagnose import rounded
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.diagnose.narrow import kernels_of, narrow_kinds
from pallas_puzzles.diagnose.rounding import Course
from pallas_puzzles.targets import gpu_simulator
from pallas_puzzles.targets.simulate import SimulatorUnable
from pallas_puzzles.view.costs import totals
from pallas_puzzles.view.verdict import Verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_course.make(tmp_path_factory.mktemp("gpu") / "course")


@pytest.fixture(autouse=True)
def course(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(folder))
    monkeypatch.setenv("PALLAS_PUZZLES_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    return folder


HOLES = {
    "1": ["softmax_kernel"],
    "2": ["double_kernel"],
    "3": ["bytes_moved", "slots_kernel"],
    "4": ["tile_map", "centred_kernel"],
}


def answered(number: str, edits: dict[str, str]) -> Verdict:
    """The verdict on a solution with some text in other places."""
    code = "\n\n".join(SOLUTIONS[name] for name in HOLES[number])
    for old, new in edits.items():
        assert old in code
        code = code.replace(old, new, 1)
    return session.run(f"gpudemo/{number}", overlay=code)


@pytest.mark.parametrize("number", HOLES)
def test_a_solution_passes(number: str) -> None:
    if number == "1" and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.11 stores registers of this layout in SMEM alone")
    verdict = answered(number, {})
    assert verdict, str(verdict)
    assert "the arrays) between GMEM and" in verdict.gained
    assert all("GPU simulator cannot run it" in note for note in verdict.notes)
    assert len(verdict.notes) == (number == "4")  # emit_pipeline with outputs


# title -> puzzle, what is changed, and what the first finding says, its function and its line
WRONG: dict[str, tuple[str, dict[str, str], str, str, str]] = {
    "rows of half a tile": (
        "1", {'"i") * 64,': '"i") * 32,'}, "be `pl.ds(lax.axis_index('i') * 64, 64)`", "softmax_kernel", "rows =",
    ),
    "the maximum over columns": (
        "1", {"jnp.max(x, axis=1)[:, None]": "jnp.max(x, axis=0)[None, :]"}, "axis=1)", "softmax_kernel", "axis=0",
    ),
    "the sum over columns": (
        "1", {"jnp.sum(p, axis=1)[:, None]": "jnp.sum(p, axis=0)[None, :]"}, "axis=1)", "softmax_kernel", "axis=0",
    ),
    "transposed": (
        "1", {"= p / jnp.sum(p, axis=1)[:, None]": "= (p / jnp.sum(p, axis=1)[:, None]).T"},
        "is stored in part of a Ref, of shape (64, 128)", "softmax_kernel", ".T",
    ),
    "every CTA stores the first rows": (
        "1", {"o_gmem[rows]": "o_gmem[pl.ds(0, 64)]"}, "CTA 1 stores into o_gmem", "softmax_kernel", "pl.ds(0, 64)",
    ),
    "in 16 bits": (
        "1", {"jnp.exp(x - jnp.max(x, axis=1)[:, None])":
              "jnp.exp((x - jnp.max(x, axis=1)[:, None]).astype(jnp.bfloat16)).astype(jnp.float32)"},
        "should be `jnp.exp(", "softmax_kernel", "bfloat16",
    ),
    "no wait for the copy": (
        "2", {"    plgpu.barrier_wait(barrier)\n": ""}, "`plgpu.barrier_wait(barrier)` is missing here",
        "double_kernel", "copy_gmem_to_smem",
    ),
    "no commit": (
        "2", {"    plgpu.commit_smem()\n": ""}, "plgpu.commit_smem()` is missing", "double_kernel", "o_smem[...] =",
    ),
    "no last wait": (
        "2", {"    plgpu.wait_smem_to_gmem(0)\n": ""}, "End with plgpu.wait_smem_to_gmem(0)", "double_kernel", "o_gmem",
    ),
    "one wait too many": (
        "2", {"plgpu.barrier_wait(barrier)": "plgpu.barrier_wait(barrier)\n    plgpu.barrier_wait(barrier)"},
        "waits for ever", "double_kernel", "barrier_wait",
    ),
    "the input goes out": (
        "2", {"copy_smem_to_gmem(o_smem": "copy_smem_to_gmem(x_smem"}, "o_smem", "double_kernel", "x_smem, o_gmem",
    ),
    "another barrier": (
        "3", {"barrier_wait(barriers.at[slot])": "barrier_wait(barriers.at[0])"}, "barriers.at[slot]", "slots_kernel",
        "barriers.at[0]",
    ),
    "one slot": (
        "3", {"x_smem.at[slot], barriers": "x_smem.at[0], barriers"}, "x_smem", "slots_kernel", "x_smem.at[0]",
    ),
    "the next tile": (
        "3", {"step * bm, bm)], x_smem": "(step + 1) * bm, bm)], x_smem"}, "step * bm", "slots_kernel", "(step + 1)",
    ),
    "what is read alone": ("3", {"2 * 4 * m * n": "4 * m * n"}, "2 * 4 * m * n", "bytes_moved", "return"),
    "the index map turned": ("4", {"return i, 0": "return 0, i"}, "(i, 0)", "tile_map", "0, i"),
    "the wrong number of elements": (
        "4", {"x.shape[1]": "x.shape[0]"}, "x.shape[1]", "centred_kernel", "x.shape[0]",
    ),
}  # fmt: skip


def unable(*_: object, **__: object) -> None:
    raise SimulatorUnable("it is not asked")


@pytest.mark.parametrize("title", WRONG)
def test_a_wrong_answer_is_explained(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, edits, said, function, line = WRONG[title]
    if number == "1" and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.11 stores registers of this layout in SMEM alone: it refuses the right answer, too")
    monkeypatch.setattr(gpu_simulator, "simulate", unable)  # the machine says all of it
    verdict = answered(number, edits)
    assert verdict.status in ("failed", "error"), str(verdict)
    first = verdict.findings[0]
    assert said in first.cause, str(verdict)
    assert first.function == function
    assert first.line is not None
    assert line in first.line.text
    assert "TPU" not in str(verdict)
    assert len(str(verdict).splitlines()) <= 24


# ---- claims ----------------------------------------------------------------------------------------------------------


def slots(m: int, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    kernel, (x,), _ = gpu_kernels.double(steps=m // 64)
    return kernel, (x[:, :n],)


def claim(make: Callable[..., Any], model: Callable[..., Any], *args: int) -> Finding | None:
    return make(model, slots, args).finding()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda m, n: 8 * m * n, ""),
        (lambda m, n: 4 * m * n, "Yours is what it would be if an element had two bytes"),
        (lambda m, n: 12 * m * n, "your kernel moves 262,144"),
    ],
)
def test_claims(model: Callable[..., Any], said: str) -> None:
    finding = claim(gmem_claim, model, 256, 128)
    assert (finding is None) == (not said)
    if finding is not None:
        assert said in finding.cause
        assert finding.evidence or "None" in said


def test_a_claim_about_a_kernel_that_goes_wrong_is_left_to_its_verdict() -> None:
    kernel, args, _ = gpu_kernels.double(wait=False)
    assert gmem_claim(lambda m: 0, lambda m: (kernel, args), (64,)).finding() is None


# ---- where values part, and where they are rounded -------------------------------------------------------------------


def softmax(base_two: bool = False, axis: int = 1, dtype: Any = jnp.float32) -> Callable[..., Any]:
    def body(x_gmem, o_gmem, x_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        plgpu.barrier_wait(barrier)
        x = x_smem[...]
        if base_two:
            scaled = x * 1.4426950408889634
            p = jnp.exp2(scaled - jnp.max(scaled, axis=1)[:, None])
        else:
            p = jnp.exp((x - jnp.max(x, axis=1)[:, None]).astype(dtype)).astype(x.dtype)
        total = jnp.sum(p, axis=axis)
        o_gmem[...] = p / (total[:, None] if axis else total[None, :])

    scratch = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=S((64, 64), jnp.float32), scratch_types=scratch)


def test_a_line_that_rounds_is_named() -> None:
    x = normal(64, 64)
    right, rough = (trace(softmax(dtype=dtype), x) for dtype in (jnp.float32, jnp.bfloat16))
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    exact = [e / e.sum(1, keepdims=True)]
    want = np.asarray(exact[0], np.float32)
    course = Course([np.asarray(right.outputs)], exact, narrow_kinds(kernels_of(right)))
    assert rounded(right, want, course) is None
    diagnosis = rounded(rough, want, course)
    assert diagnosis is not None
    (finding,) = diagnosis.findings
    assert "cast to 16-bit bfloat16" in finding.cause
    assert finding.line is not None
    assert ".astype(dtype)" in finding.line.text
    assert finding.operand == "o_gmem"


def test_an_accumulator_in_16_bits_is_named() -> None:
    def product(dtype: Any) -> Callable[..., Any]:
        def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, barrier):
            plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
            plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
            plgpu.barrier_wait(barrier)

            def scope(acc_ref):
                for k in range(4):
                    part = pl.ds(k * 64, 64)
                    plgpu.wgmma(acc_ref, a_smem.at[:, part], b_smem.at[part])
                plgpu.wgmma_wait(0)
                return acc_ref[...]

            o_gmem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), dtype)).astype(jnp.float32)

        tiles = [plgpu.SMEM(s, jnp.float16, transforms=gpu_kernels.TILES) for s in ((64, 256), (256, 64))]
        scratch = [*tiles, plgpu.Barrier(num_arrivals=2)]
        return plgpu.kernel(body, out_type=S((64, 64), jnp.float32), scratch_types=scratch)

    a, b = normal(64, 256, dtype=np.float16), normal(256, 64, dtype=np.float16, seed=1)
    right, rough = (trace(product(dtype), a, b) for dtype in (jnp.float32, jnp.float16))
    exact = [a.astype(np.float64) @ b.astype(np.float64)]
    course = Course([np.asarray(right.outputs)], exact, narrow_kinds(kernels_of(right)))
    diagnosis = rounded(rough, exact[0].astype(np.float32), course)
    assert diagnosis is not None
    assert "acc_ref is float16, and every addition to it rounds" in diagnosis.findings[0].cause


# ---- around a verdict ------------------------------------------------------------------------------------------------


def test_which_notebooks_are_for_gpus(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [book.accelerator for book in curriculum.notebooks()] == ["gpu"]
    monkeypatch.setenv("PALLAS_PUZZLES_COURSE", str(demo_course.make(tmp_path / "other")))
    assert {book.accelerator for book in curriculum.notebooks()} == {"tpu"}


def test_the_end_of_a_notebook_counts_what_gpus_count() -> None:
    for number in HOLES:
        figures = trace(*CALLS[number]()).calls
        record(f"gpudemo/{number}", True, totals([launched.counts for launched in figures]))
    end = finale("gpudemo/4")
    assert end is not None
    head, *rows = [line for line in str(end).splitlines() if re.search("KiB +1×|GMEM", line)]
    assert head.split() == "your kernels GMEM the arrays CTAs SMEM FLOP/byte".split()
    assert len(rows) == 4
    assert re.search(r"The copy engine +256 KiB +1× +4 +64.01 KiB", rows[1])
    assert "<th>GMEM</th>" in end._repr_html_()
    assert "HBM" not in str(end) + end._repr_html_()
    assert "Your kernels moved" in str(end)


def made(number: str, *shape: int) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        from pallas_puzzles.course import cases

        return cases.official(f"gpudemo/{number}").fn, normal(*shape)

    return make


CALLS = {"1": made("1", 192, 128), "2": made("2", 256, 128), "3": made("3", 256, 128), "4": made("4", 256, 64)}


def puzzles(*words: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pallas_puzzles", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    right, wrong = course / "solutions" / "gpudemo.py", tmp_path / "wrong.py"
    wrong.write_text(right.read_text("utf-8").replace("    plgpu.commit_smem()\n", "", 1), "utf-8")
    passed = puzzles("check", "gpudemo/2", "--with", right)
    assert (passed.returncode, passed.stderr) == (0, ""), passed.stdout
    assert "The copy engine: solved." in passed.stdout
    failed = puzzles("check", "gpudemo/2", "--with", wrong, "--json")
    (verdict,) = json.loads(failed.stdout)["verdicts"]
    assert "plgpu.commit_smem()" in verdict["findings"][0]["cause"]
    assert verdict["figures"][0]["gmem_bytes"] == verdict["figures"][0]["once_bytes"] == 2 * 192 * 128 * 4
    shown = puzzles("show", "gpudemo/3", "--with", right)
    assert "copy engine" in shown.stdout, shown.stderr


WRONG_CELL = """\
def slots_kernel(x_gmem, o_gmem, x_smem, o_smem, barriers):
    plgpu.barrier_wait(barriers.at[0])

slots(x)"""


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.11 stores registers of WGMMA's layout in SMEM alone")
def test_in_a_kernel(course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    (book,) = curriculum.notebooks()
    node = notebooks.build(book.path)
    lay_solutions(node, book)
    called = "x = jnp.ones((256, 128))\nprint(double(x).sum(), jax.jit(slots)(x).sum())"
    code = nbformat.v4.new_code_cell
    node.cells += [code(called), code(WRONG_CELL, metadata={"tags": ["raises-exception"]})]
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(node, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in node.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "No H100, H200 or B200 here: kernels run on the CPU" in said
    assert said.count(": solved.") == 4
    assert "You have finished gpudemo" in said
    assert "65536.0 65536.0" in said
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    (shown,) = outputs[-1].traceback  # and nothing of JAX's
    assert "waits for ever" in shown
    assert re.search(r"In \[\d+\], line 2 +plgpu.barrier_wait", shown)


@pytest.mark.parametrize("there", [True, False])
def test_the_colab_cell_brings_cuda_of_the_same_age(course: Path, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    installed = {"jax_cuda12_plugin": "with a GPU or without"}
    monkeypatch.setattr("importlib.util.find_spec", installed.get)
    monkeypatch.setattr("pathlib.Path.exists", lambda path: there)
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr("subprocess.run", lambda command, **_: calls.append(command) or done)
    cell = notebooks.build(course / "puzzles" / "gpudemo.py").cells[1].source
    exec(cell, {})
    ((*_, last),) = calls
    assert (last == "jax[cuda12]") == there


@pytest.mark.parametrize("words", ["", " under jit"])
def test_a_reader_calls_a_kernel(course: Path, words: str) -> None:
    """As in a cell of theirs: what the notebook defines, with the solution in the hole."""
    from pallas_puzzles.course import cases

    fn, x = cases.official("gpudemo/4").fn, normal(256, 64)
    jax.clear_caches()
    import pallas_puzzles

    pallas_puzzles.setup("gpu")
    got = (jax.jit(fn) if words else fn)(x)
    np.testing.assert_allclose(got, x - x.mean(1, keepdims=True), atol=1e-5)
