"""Time limits: whatever a reader's Python does for ever is stopped, with a word that helps, and leaves no trace."""

import random
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_puzzles.lens.watchdog import TimeLimit, time_limit
from pallas_puzzles.targets.simulate import tpu_simulation

LIMIT_S = 0.05
GENEROUS_S = 10.0  # on a busy machine


def forever():
    while True:
        pass


def forever_swallowing():
    while True:
        try:
            raise ValueError
        except Exception:
            pass


def forever_swallowing_everything():
    while True:
        try:  # noqa: SIM105 (a bare except is the point)
            sum(len(str(i)) for i in range(50))
        except:  # noqa: E722
            pass


def forever_renaming():
    try:
        forever()
    except BaseException as error:
        raise ValueError("something else") from error


def stopped(fn, limit_s=LIMIT_S, what="your kernel"):
    """The TimeLimit that stops fn()."""
    start = time.monotonic()
    with pytest.raises(TimeLimit) as caught, time_limit(limit_s, what):
        fn()
    assert time.monotonic() - start < GENEROUS_S
    return caught.value


@pytest.mark.parametrize("loop", [forever, forever_swallowing, forever_swallowing_everything, forever_renaming])
def test_a_loop_is_stopped(loop):
    assert "stopped at test_watchdog.py:" in str(stopped(loop))


def test_the_message_says_limit_and_line():
    error = stopped(forever)
    assert str(error).startswith(f"your kernel ran for more than {LIMIT_S} s and was stopped at test_watchdog.py:")
    assert error.line.text in ("while True:", "pass")
    assert error.line.file == __file__


def test_in_another_thread_too():
    caught = []
    thread = threading.Thread(target=lambda: caught.append(stopped(forever)))
    thread.start()
    thread.join(GENEROUS_S)
    assert [type(e).__name__ for e in caught] == ["TimeLimit"]


def test_a_block_in_time_is_left_alone():
    with time_limit(GENEROUS_S, "this"):
        result = sum(range(1000))
    assert result == 499500
    with pytest.raises(ZeroDivisionError), time_limit(GENEROUS_S, "this"):
        _ = 1 / 0


def test_limits_nest():
    def inner_first():
        assert "inner ran" in str(stopped(forever, LIMIT_S, "inner"))
        forever()

    def outer_first():
        with time_limit(GENEROUS_S, "inner"):
            forever()

    assert "outer ran" in str(stopped(inner_first, 3 * LIMIT_S, "outer"))
    assert "outer ran" in str(stopped(outer_first, LIMIT_S, "outer"))


def test_clean_up_of_the_reader_runs():
    log = []

    def kernel():
        try:
            forever()
        finally:
            log.append("finally")

    stopped(kernel)
    assert log == ["finally"]


def test_nothing_arrives_after_the_block():
    """Blocks that end just as their time is up: hit or not, the code behind them runs undisturbed."""
    rng = random.Random(0)
    hits, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for _ in range(400):
            try:
                with time_limit(0.001, "this"):
                    end = time.perf_counter() + 0.001 + 0.001 * rng.random()
                    while time.perf_counter() < end:
                        pass
            except TimeLimit:
                hits += 1
            end = time.perf_counter() + 0.0005
            while time.perf_counter() < end:  # a TimeLimit here would fail the test
                pass
    finally:
        sys.setswitchinterval(interval)
    assert 0 < hits < 400


def test_no_thread_is_left():
    before = threading.active_count()
    for _ in range(50):
        with time_limit(GENEROUS_S, "this"):
            pass
    deadline = time.monotonic() + GENEROUS_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(kernel, out_shape=x)(x)


def loop_in_kernel(x):
    def kernel(x_ref, o_ref):
        value = x_ref[...]
        while True:
            value = jnp.sin(value) + jax.lax.fori_loop(0, 3, lambda i, c: c + 1, value)

    return pl.pallas_call(kernel, out_shape=x)(x)


def loop_in_index_map(x):
    def x_map(i):
        while True:
            i = i + 1

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    block = pl.BlockSpec((8, 128), x_map)
    return pl.pallas_call(kernel, grid=(2,), in_specs=[block], out_specs=block, out_shape=x)(x)


def loop_in_wrapper(x):
    while True:
        x = x + 1


@pytest.mark.parametrize("fn", [loop_in_kernel, loop_in_index_map, loop_in_wrapper])
def test_jax_survives_being_stopped(fn):
    x = np.ones((16, 128), np.float32)
    for _ in range(3):
        with tpu_simulation():
            error = stopped(lambda: fn(x), limit_s=0.2)
        assert error.line.file == __file__
        assert jax.sharding.get_abstract_mesh().empty
    with tpu_simulation():
        np.testing.assert_array_equal(double(x), 2 * x)
        np.testing.assert_array_equal(jax.jit(double)(x), 2 * x)
