"""JAX's TPU simulator behind one call: right results, one-line errors, and it comes back from everything."""

import _thread
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import check_call
from pallas_puzzles.lens.watchdog import TimeLimit, time_limit
from pallas_puzzles.targets.simulate import SimulatorError, SimulatorTimeout, simulate, tpu_simulation

X = np.arange(16 * 256, dtype=np.float32).reshape(16, 256)
ROWS = pl.BlockSpec((8, 256), lambda i: (i, 0))
HBM = pl.BlockSpec(memory_space=pl.ANY)


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def by_rows(kernel, x_map=lambda i: (i, 0), o_map=lambda i: (i, 0), scratch=()):
    """(16, 256) -> (16, 256) in two blocks of (8, 256)."""

    def fn(x):
        return pl.pallas_call(
            kernel,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 256), x_map)],
            out_specs=pl.BlockSpec((8, 256), o_map),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=list(scratch),
        )(x)

    return fn


def from_hbm(kernel):
    """(16, 256) -> (16, 256), the input in HBM, with a buffer and a semaphore."""

    def fn(x):
        return pl.pallas_call(
            kernel,
            in_specs=[HBM],
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA(())],
        )(x)

    return fn


double = by_rows(double_kernel)


def still_works():
    x = np.ones((8, 128), np.float32)
    outputs = simulate(lambda x: pl.pallas_call(double_kernel, out_shape=x)(x), x)
    np.testing.assert_array_equal(outputs, 2 * x)


def test_a_matmul_accumulates_over_blocks():
    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...]

    def matmul(x, y, *, b=32):
        (m, k), n = x.shape, y.shape[1]
        return pl.pallas_call(
            kernel,
            grid=(m // b, n // b, k // b),
            in_specs=[pl.BlockSpec((b, b), lambda i, j, k: (i, k)), pl.BlockSpec((b, b), lambda i, j, k: (k, j))],
            out_specs=pl.BlockSpec((b, b), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
            scratch_shapes=[pltpu.VMEM((b, b), jnp.float32)],
        )(x, y)

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 96), np.float32), rng.standard_normal((96, 32), np.float32)
    np.testing.assert_allclose(simulate(matmul, x, y, b=16), x @ y, atol=1e-4)  # b reaches matmul


def test_outputs_are_numpy_arrays_in_the_pytree_of_the_function():
    def fn(pair):
        return {"sum": double(pair[0]) + pair[1], "rest": [pair[1].astype(jnp.bfloat16)]}

    outputs = simulate(fn, (X, X))
    assert jax.tree.map(type, outputs) == {"sum": np.ndarray, "rest": [np.ndarray]}
    np.testing.assert_array_equal(outputs["sum"], 3 * X)


def test_memory_that_nobody_wrote_is_nan():
    def kernel(x_ref, o_ref):
        o_ref[0:4] = x_ref[0:4]

    outputs = simulate(by_rows(kernel), X)
    assert np.isnan(outputs).reshape(2, 8, 256).all(axis=(0, 2)).tolist() == [False] * 4 + [True] * 4


def test_a_pipeline_inside_a_kernel():
    def kernel(x_ref, o_ref):
        pltpu.emit_pipeline(double_kernel, grid=(2,), in_specs=[ROWS], out_specs=[ROWS])(x_ref, o_ref)
        assert pltpu.get_tpu_info().num_lanes == 128

    def fn(x):
        return pl.pallas_call(kernel, in_specs=[HBM], out_specs=HBM, out_shape=x)(x)

    np.testing.assert_array_equal(simulate(fn, X, detect_races=True), 2 * X)


def test_the_switch_is_off_again_after_the_block():
    with tpu_simulation():
        np.testing.assert_array_equal(double(jnp.asarray(X)), 2 * X)
    assert jax.sharding.get_abstract_mesh().empty
    with pytest.raises(ValueError, match=r"[Ii]nterpret"):  # on a CPU, without the simulator
        double(jnp.asarray(X))


def test_what_the_reader_prints_is_shown(capsys):
    def kernel(x_ref, o_ref):
        print("tracing")
        o_ref[...] = x_ref[...]

    simulate(by_rows(kernel), X)
    assert capsys.readouterr().out == "tracing\n"


def past_the_end(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(8 * pl.program_id(0), 8)]


def overwritten_while_copied(x_ref, o_ref, buf_ref, sem):
    copy = pltpu.make_async_copy(x_ref, buf_ref, sem)
    copy.start()
    buf_ref[...] = jnp.zeros_like(buf_ref)
    copy.wait()
    o_ref[...] = buf_ref[...]


def signals_too_often(x_ref, o_ref, sem):
    pl.semaphore_signal(sem, 2)
    pl.semaphore_wait(sem, 1)
    o_ref[...] = x_ref[...]


def without_copy(x_ref, o_ref, buf_ref, sem):
    o_ref[...] = x_ref[...]


def misspelt(x_ref, o_ref):
    o_ref[...] = x_rfe[...]  # noqa: F821


SEM = [pltpu.SemaphoreType.REGULAR]
ERRORS = {
    "block out of bounds": (by_rows(double_kernel, x_map=lambda i: (i + 1, 0)), 'block index (2, 0) for input "x_ref"'),
    "read out of bounds": (by_rows(past_the_end), "Out-of-bounds read"),
    "race": (from_hbm(overwritten_while_copied), "data race: nothing orders the write at test_simulate.py:"),
    "semaphore": (by_rows(signals_too_often, scratch=SEM), "a semaphore still counts 2 when the kernel ends"),
    "load from HBM": (from_hbm(without_copy), "HBM"),
    "Python": (by_rows(misspelt), "NameError: name 'x_rfe' is not defined"),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_an_error_is_one_line(mistake, capfd, caplog):
    fn, says = ERRORS[mistake]
    with pytest.raises(SimulatorError) as caught:
        simulate(fn, X, detect_races=mistake == "race")
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert "Traceback" not in message
    assert not isinstance(caught.value, SimulatorTimeout)
    still_works()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_an_error_knows_the_line():
    for name, text in {"read out of bounds": "x_ref[pl.ds(8", "Python": "x_rfe[...]"}.items():
        with pytest.raises(SimulatorError) as caught:
            simulate(ERRORS[name][0], X)
        assert text in caught.value.line.text
        assert caught.value.__cause__ is not None


def test_a_block_left_and_visited_again():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def fn(x):
        return pl.pallas_call(
            kernel,
            grid=(2, 2),
            in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((8, 128), lambda i, j: (0, j)),
            out_shape=jax.ShapeDtypeStruct((8, 256), x.dtype),
        )(x)

    with pytest.raises(SimulatorError, match="Revisited block"):
        simulate(fn, X)


def waits_for_a_signal(x_ref, o_ref, sem):
    pl.semaphore_wait(sem, 1)
    o_ref[...] = x_ref[...]


def waits_for_a_copy(x_ref, o_ref, buf_ref, sem):
    pltpu.make_async_copy(x_ref, buf_ref, sem).wait()
    o_ref[...] = buf_ref[...]


def loops_in_python(x_ref, o_ref):
    while True:
        pass


def loops_over_a_ref(x_ref, o_ref):
    def body(carry):
        o_ref[...] += x_ref[...]
        return carry

    jax.lax.while_loop(lambda carry: carry == 0, body, 0)


def loop_in_map(i):
    while True:
        i += 1


def loop_in_wrapper(x):
    while True:
        x = x + 1


HANGS = {
    "semaphore": (by_rows(waits_for_a_signal, scratch=SEM), "the kernel still waits for a semaphore", None),
    "DMA": (from_hbm(waits_for_a_copy), "still waits at test_simulate.py:", "async_copy(x_ref, buf_ref, sem).wait"),
    "Python": (by_rows(loops_in_python), "stopped at test_simulate.py:", None),
    "index map": (by_rows(double_kernel, x_map=loop_in_map), "stopped at test_simulate.py:", None),
    "wrapper": (loop_in_wrapper, "stopped at test_simulate.py:", None),
    "while_loop": (by_rows(loops_over_a_ref), "the kernel ran for more than 2 s and was stopped", None),
}


OF_A_KIND = ("index map", "wrapper")  # Python that does not end, as "Python"


@pytest.mark.parametrize(
    "hang", [pytest.param(each, marks=pytest.mark.thorough if each in OF_A_KIND else ()) for each in HANGS]
)
def test_it_comes_back_from(hang, capfd, caplog):
    fn, says, line = HANGS[hang]
    still_works()  # and has imported all that it needs: two seconds are for the kernel, on a busy machine, too
    start = time.monotonic()
    with pytest.raises(SimulatorTimeout) as caught:
        simulate(fn, X, timeout_s=2)
    assert time.monotonic() - start < 8
    assert says in str(caught.value)
    assert line is None or line in caught.value.line.text
    still_works()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_limit_of_the_caller_ends_it():
    with pytest.raises(TimeLimit), time_limit(0.5, "the check"):
        simulate(HANGS["semaphore"][0], X, timeout_s=60)
    still_works()


def test_ctrl_c_ends_it():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        simulate(HANGS["semaphore"][0], X, timeout_s=60)
    timer.join()
    signal.signal(signal.SIGINT, before)
    still_works()


def run(program, **environment):
    """A program in a fresh process: its exit code, output and errors."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=env, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_setup_and_the_end_of_a_process():
    """A fresh process after two hangs, a wait and a loop inside XLA that nothing can stop, still ends as it should."""
    code, out, err = run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu
        from pallas_puzzles.targets.simulate import SimulatorTimeout, setup, simulate

        assert setup() is None
        setup()
        x = np.ones((8, 128), np.float32)

        def double_kernel(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        def pipeline_kernel(x_ref, o_ref):
            block = pl.BlockSpec((8, 128), lambda i: (i, 0))
            pltpu.emit_pipeline(double_kernel, grid=(1,), in_specs=[block], out_specs=[block])(x_ref, o_ref)

        hbm = pl.BlockSpec(memory_space=pl.ANY)
        print(pl.pallas_call(double_kernel, out_shape=x)(x)[0, 0])
        print(pl.pallas_call(pipeline_kernel, in_specs=[hbm], out_specs=hbm, out_shape=x)(x)[0, 0])
        print(jax.jit(jnp.sum)(x))

        def waits(x_ref, o_ref, sem):
            pl.semaphore_wait(sem, 1)

        def loops(x_ref, o_ref):
            turns = jax.lax.while_loop(lambda n: n < 10, lambda n: 1 - n, x_ref[0, 0].astype(jnp.int32))
            o_ref[...] = x_ref[...] + turns

        for kernel, scratch in [(waits, [pltpu.SemaphoreType.REGULAR]), (loops, [])]:
            call = pl.pallas_call(kernel, out_shape=x, scratch_shapes=scratch)
            try:
                simulate(call, x, timeout_s=0.5)
            except SimulatorTimeout as e:
                print(e)
        print(simulate(pl.pallas_call(double_kernel, out_shape=x), x)[0, 0])
        """
    )
    assert err == ""
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == lines[1] == "No TPU here: kernels run on the CPU, in JAX's TPU simulator."
    assert lines[2:5] == ["2.0", "2.0", "1024.0"]
    assert "still waits for a semaphore" in lines[5]
    assert "could not be stopped" in lines[6]
    assert lines[7:] == ["2.0"]


def last_column_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _():
        o_ref[...] = x_ref[...]


def last_column(x):
    return pl.pallas_call(
        last_column_kernel,
        grid=(x.shape[1] // 128,),
        in_specs=[pl.BlockSpec((8, 128), lambda j: (0, j))],
        out_specs=pl.BlockSpec((8, 128), lambda j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype),
    )(x)


@pytest.mark.parametrize("columns", [512, 256])
def test_a_kernel_of_the_same_blocks_on_another_grid_is_another_program(columns):
    x = np.random.default_rng(columns).standard_normal((8, columns), np.float32)
    want = x[:, -128:]
    assert check_call(last_column, (x,), want)
    np.testing.assert_array_equal(simulate(last_column, x), want)
