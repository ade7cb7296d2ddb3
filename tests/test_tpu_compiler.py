"""The process with the TPU compiler in it: warm, quiet, and replaced when it dies."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest
from jax import export

from pallas_puzzles.platforms import gpu_attached, tpu_attached
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.chips import CHIPS, chip, chips
from pallas_puzzles.targets.tpu.lowering import for_tpu
from pallas_puzzles.view.tpu_report import tpu_report
from tpu_kernels import double, needs_compiler, shape

V5E = CHIPS["v5e"]


def program(fn=double, *shapes):
    with for_tpu(V5E.mesh()):
        return bytes(export.export(jax.jit(fn), platforms=["tpu"])(*shapes or [shape(32, 256)]).serialize())


def compiles(blob, **options):
    return [kernel.results for kernel in compiler.compile_program(blob, V5E, **options).kernels] == [("f32[32,256]",)]


@pytest.fixture
def pid():
    """The process id of a compiler that has done some work."""
    assert compiles(program())
    return compiler._COMPILER._process.pid


@needs_compiler
def test_one_process_serves_many_requests_for_all_chips(pid):
    for each in CHIPS.values():
        assert compiler.compile_program(program(), each).kernels
    assert compiler._COMPILER._process.pid == pid


@needs_compiler
def test_each_answer_has_only_its_own_dumps():
    def triple(x):
        return double(double(x)) + 1

    once = compiler.compile_program(program(), V5E)
    twice = compiler.compile_program(program(triple, shape(64, 128)), V5E)
    again = compiler.compile_program(program(), V5E)
    assert len(twice.kernels) == 2
    assert len(again.files) == len(once.files) > 0
    assert all(twice.of(kernel.name, r"final_bundles\.txt") for kernel in twice.kernels)


@needs_compiler
def test_a_killed_process_is_replaced(pid):
    os.kill(pid, signal.SIGKILL)
    while compiler._COMPILER._process.poll() is None:
        time.sleep(0.01)
    assert compiles(program())
    assert compiler._COMPILER._process.pid != pid


@needs_compiler
def test_a_process_that_dies_at_work_is_a_sentence_and_the_next_report_works(pid, monkeypatch):
    monkeypatch.setattr(compiler._COMPILER, "_exchange", _dying(compiler._COMPILER._exchange))
    report = tpu_report(double, shape(32, 256), simulate=False)
    assert not report
    assert "signal 9" in report.unavailable
    assert "next report" in report.unavailable
    assert report.refusal is None
    monkeypatch.undo()
    assert tpu_report(double, shape(32, 256), simulate=False)


def _dying(exchange):
    """An exchange whose process is killed while it works."""

    def killed(request, timeout_s):
        os.kill(compiler._COMPILER._process.pid, signal.SIGSTOP)  # it would be done before the signal comes
        os.kill(compiler._COMPILER._process.pid, signal.SIGKILL)
        return exchange(request, timeout_s)

    return killed


@needs_compiler
def test_a_compiler_that_hangs_is_stopped_in_time_and_the_next_report_works(pid):
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(compiler.CompilerDied, match=r"did not finish within 0\.2 s"):
        compiles(program(), timeout_s=0.2)
    assert compiles(program())


@needs_compiler
def test_an_abort_is_told_in_the_compilers_own_words(tmp_path):
    """A flag that libtpu does not know makes it abort when it is loaded."""
    child = compiler._with_libtpu("--xla_there_is_no_such_flag=1 --unused={folder}")
    try:
        with pytest.raises(compiler.CompilerDied, match=r"the TPU compiler (was ended by signal|ended with exit code)"):
            compiler.compile_program(program(), V5E, process=child)
    finally:
        child.stop()


@needs_compiler
def test_what_is_no_program_is_refused_and_the_process_lives(pid):
    with pytest.raises(compiler.CompilerError):
        compiler.compile_program(b"no program at all", V5E)
    assert compiles(program())
    assert compiler._COMPILER._process.pid == pid


@needs_compiler
def test_threads_take_turns():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        shapes = [(8 * n, 128) for n in range(1, 9)]
        answers = pool.map(lambda s: compiler.compile_program(program(double, shape(*s)), V5E), shapes)
        assert [answer.kernels[0].results for answer in answers] == [(f"f32[{m},{n}]",) for m, n in shapes]


@needs_compiler
@pytest.mark.thorough
def test_two_processes_compile_at_once_and_stay_silent():
    """No lock that one of them would wait for, and nothing on stderr."""
    source = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from jax.experimental import pallas as pl
        import pallas_puzzles
        from pallas_puzzles.view.tpu_report import tpu_report

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] + 1

        fn = lambda x: pl.pallas_call(kernel, out_shape=x)(x)
        report = tpu_report(fn, jax.ShapeDtypeStruct((8, 128), jnp.float32))
        print(bool(report), report.unavailable, jax.devices())
        input()
        print(bool(tpu_report(fn, jax.ShapeDtypeStruct((16, 128), jnp.float32))))
    """)
    command = [sys.executable, "-W", "error", "-c", source]
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, env=env, text=True, **pipes) for _ in range(2)]
    for each in both:  # both have their compiler now, and keep it
        assert each.stdout.readline().startswith("True")
    for each in both:
        out, err = each.communicate("\n", timeout=120)
        assert out == "True\n"
        assert err == ""
        assert each.returncode == 0


@needs_compiler
@pytest.mark.skipif(tpu_attached() or gpu_attached(), reason="JAX may look for the accelerator that is here")
@pytest.mark.parametrize("first", ["import jax", "import pallas_puzzles"])
def test_an_ordinary_run_never_loads_libtpu(first):
    """With libtpu installed and no TPU, JAX would load it to look for one: with complaints, and with a lock."""
    source = f"""
{first}
import pallas_puzzles, jax, jax.numpy as jnp
pallas_puzzles.setup()
print(jnp.arange(3).sum(), [d.platform for d in jax.devices()])
print("libtpu.so" in open("/proc/self/maps").read())
"""
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    run = subprocess.run([sys.executable, "-c", source], env=env, text=True, capture_output=True, timeout=120)
    assert run.stderr == ""
    assert run.stdout.splitlines()[-2:] == ["3 ['cpu']", "False"]


def test_a_chosen_platform_is_left_alone():
    source = "import pallas_puzzles, os; print(os.environ['JAX_PLATFORMS'])"
    env = {**os.environ, "JAX_PLATFORMS": "cpu,tpu"}
    run = subprocess.run([sys.executable, "-c", source], env=env, text=True, capture_output=True, timeout=60)
    assert run.stdout == "cpu,tpu\n"


@needs_compiler
def test_nothing_is_left_behind(tmp_path):
    """When the reader's process ends, so do the compiler's, and their folders are gone."""
    source = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from jax.experimental import pallas as pl
        from pallas_puzzles.targets.tpu import compiler
        from pallas_puzzles.view.tpu_report import tpu_report

        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        assert tpu_report(lambda x: pl.pallas_call(kernel, out_shape=x)(x), jax.ShapeDtypeStruct((8, 128), jnp.float32))
        print(compiler._COMPILER._process.pid, compiler._SIMULATOR._process.pid)
    """)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", source], env=env, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr
    for pid in map(int, run.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(tmp_path.glob("pallas-puzzles-tpu-*"))


@needs_compiler
def test_ctrl_c_stops_the_compilation_and_the_next_report_works(pid, monkeypatch):
    def interrupted(request, timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiler._COMPILER, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiles(program())
    monkeypatch.undo()
    assert compiler._COMPILER._process is None
    assert compiles(program())


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_starts_its_own(pid):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = b"ok" if compiles(program()) and compiler._COMPILER._process.pid != pid else b"not"
            compiler._COMPILER.stop()
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    assert os.read(read, 1000) == b"ok"
    os.waitpid(child, 0)
    assert compiler._COMPILER._process.pid == pid
    assert compiles(program())


def test_without_libtpu_a_report_says_in_one_line_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    report = tpu_report(double, shape(32, 256))
    assert not report
    assert report.refusal is None
    assert "uv sync --inexact --extra tpu-compiler" in report.unavailable
    assert "pip install" not in report.unavailable
    assert "\n" not in report.unavailable


def test_without_libtpu_the_front_end_still_has_its_say(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    report = tpu_report(double, shape(36, 256), bm=6)
    assert "multiples of 8 and 128" in report.refusal.sentence


def test_an_unwritten_kernel_has_no_report():
    report = tpu_report(double, tpu="v6e", unwritten=["double_kernel", "x_map"])
    assert not report
    assert report.unavailable == "nothing to compile yet: double_kernel and x_map are still to be written"


# --- the chips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ghz", "ridge"), [("v5e", 1.50, 240), ("v6e", 1.755, 561), ("tpu7x", 2.20, 312)])
def test_clock_and_ridge_follow_from_what_jax_says(name, ghz, ridge):
    each = chip(name)
    assert each.clock_hz / 1e9 == pytest.approx(ghz, rel=0.01)
    assert each.flops_per_s() / each.hbm_bytes_per_s == pytest.approx(ridge, rel=0.01)


def test_chips_are_found_by_any_usual_name():
    assert [each.name for each in chips("v5e, 7x,V6E,v5e")] == ["v5e", "tpu7x", "v6e"]
    with pytest.raises(ValueError, match=r"no TPU 'v9'.*v5e, v6e, tpu7x"):
        chip("v9")
    with pytest.raises(ValueError, match="no TPU is named"):
        chips(" , ")
