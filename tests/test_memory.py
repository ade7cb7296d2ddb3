"""What a kernel's Refs hold: shared until a part is stored into, and noted once for a buffer whose elements agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import zoo
from pallas_puzzles.ir import ops
from pallas_puzzles.ir.places import Place
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens.memory import Buffer, Marks
from zoo import ZOO


def place(*keys, shape=(4, 3)):
    made = Place(shape, np.dtype(np.float32))
    made.steps = list(keys)
    return made


TOP = place((slice(0, 2, 1), ...), shape=(2, 3))
ALL = place((slice(0, 4, 1), slice(0, 3, 1), ...))
WHOLE = place()


def buffer(role="scratch"):
    made = Buffer.empty("acc_ref", (4, 3), np.dtype(np.float32), "vmem", role)
    assert made.written.one is False
    assert np.isnan(made.values).all()
    return made


@pytest.mark.parametrize(
    ("part", "covers"),
    [
        (WHOLE, True),
        (ALL, True),
        (TOP, False),
        (place((slice(0, 4, 2), ...)), False),
        (place((slice(3, None, -1), ...)), False),
        (place((slice(0, 4, 1), np.array([0, 1, 2]))), False),
        (place((0, ...)), False),
        (place((slice(0, 4, 1), ...), (slice(0, 4, 1), ...)), False),
    ],
)
def test_what_covers_a_buffer(part, covers):
    assert part.covers((4, 3)) == covers


def test_a_single_row_is_all_of_its_buffer():
    assert place((0, slice(0, 3, 1), ...)).covers((1, 3))


def test_what_was_loaded_does_not_change_when_something_is_stored():
    b, ones = buffer(), np.ones((4, 3), np.float32)
    b.store(ALL, ones, whole=True)
    before = b.load(ALL, whole=True)
    assert np.shares_memory(before, b.values)  # no copy
    b.store(TOP, 5, whole=False)
    assert (before == 1).all()
    assert (ones == 1).all()
    assert b.values[:, 0].tolist() == [5, 5, 1, 1]
    part = b.load(TOP, whole=False)
    b.store(TOP, 7, whole=False)
    assert (part == 5).all()


def test_a_new_visit_starts_from_garbage_each_time():
    b = buffer("out")
    b.arrive(0)
    b.store(TOP, 1, whole=False)
    b.mark(TOP, True, 3, whole=False)
    b.arrive(3)
    assert np.isnan(b.values).all()
    assert (b.written.one, b.written.each, b.writer.one, b.left_at) == (False, None, -1, 3)


def test_what_another_core_has_stored_is_not_there_and_can_be_told():
    b = buffer("scratch")
    b.store(TOP, 1, whole=False)
    b.mark(TOP, True, 3, whole=False)
    b.lose()
    assert np.isnan(b.values).all()
    assert b.writer.at(TOP).max() == 3


def test_marks_agree_until_a_part_differs():
    marks = Marks((4, 3), np.int32, -1)
    marks.put(TOP, -1, whole=False)
    assert marks.each is None  # nothing new
    marks.put(TOP, 2, whole=False)
    assert marks.at(ALL)[:, 0].tolist() == [2, 2, -1, -1]
    marks.put(ALL, 3, whole=True)
    assert (marks.one, marks.each) == (3, None)
    marks.put(WHOLE, np.arange(12).reshape(4, 3), whole=True)
    assert marks.at(TOP)[1].tolist() == [3, 4, 5]


def test_a_kernel_that_stores_whole_blocks_needs_no_mark_for_each_element(monkeypatch):
    made = []
    each = Marks.each

    def noted(self):
        if (found := each.fget(self)) is not None:
            made.append(self.shape)
        return found

    monkeypatch.setattr(Marks, "each", property(noted))
    args = np.ones((64, 128), np.float32), np.ones((128, 256), np.float32)
    run = lens.trace(zoo.matmul, *args, bm=16, bn=128, bk=32)
    assert (np.asarray(run.outputs) == 128).all()
    assert made == []
    exhibit = ZOO["swap_halves_by_copies"]
    lens.trace(exhibit.fn, *exhibit.args)
    assert made


def test_a_part_of_which_all_agree_is_noted_and_set_when_it_is_asked_for():
    marks = Marks((4, 3), np.int32, -1)
    marks.put(TOP, 2, whole=False)
    marks.put(place((1, ...), shape=(3,)), 5, whole=False)
    assert marks.seen()[:, 0].tolist() == [2, 5, -1, -1]
    marks.put(TOP, 7, whole=False)
    marks.put(WHOLE, 3, whole=True)  # nobody has seen the 7
    assert marks.at(TOP) == 3


def test_an_operand_is_written_over_only_where_nobody_else_has_it():
    shape = (256, 256)

    def free(values):
        return ops._free(values, shape, np.dtype(np.float32))

    kept = np.ones(shape, np.float32)
    assert free([kept, np.ones(shape, np.float32)]) is not None
    assert free([kept]) is None
    assert free([kept[:, :]]) is None  # a view
    assert free([np.broadcast_to(np.float32(1), shape)]) is None
    assert free([np.ones((1, 256), np.float32)]) is None
    assert free([np.ones(shape, np.float64)]) is None


def test_values_that_are_needed_again_survive_the_arithmetic():
    def kernel(x_ref, o_ref, p_ref):
        y = x_ref[...] + 1
        e = jnp.exp(y)
        o_ref[...] = jnp.maximum(e, 2) + y
        p_ref[...] = e

    x = np.linspace(-1, 1, 512 * 256, dtype=np.float32).reshape(512, 256)
    before = x.copy()
    run = lens.trace(lambda x: pl.pallas_call(kernel, out_shape=(x, x))(x), x)
    e = np.exp(before + 1)
    np.testing.assert_allclose(run.outputs[0], np.maximum(e, 2) + before + 1, rtol=1e-5)
    np.testing.assert_allclose(run.outputs[1], e, rtol=1e-5)
    assert (x == before).all()


def test_an_output_is_not_the_memory_of_an_input():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = np.ones((8, 128), np.float32)
    (made,) = jax.tree.leaves(lens.trace(lambda x: pl.pallas_call(kernel, out_shape=x)(x), x).outputs)
    x[...] = 2
    assert (np.asarray(made) == 1).all()


def test_what_no_block_covers_is_garbage():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    x = np.ones((32, 128), np.float32)
    run = lens.trace(lambda x: pl.pallas_call(kernel, grid=(3,), in_specs=[block], out_specs=block, out_shape=x)(x), x)
    (made,) = jax.tree.leaves(run.outputs)
    assert (made[:24] == 1).all()
    assert np.isnan(made[24:]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_element_that_is_not_finite_is_found(dtype, bad):
    x = np.full((16, 128), jnp.finfo(dtype).max, dtype)
    assert ops.all_finite(x)
    x[7, 3] = bad
    assert not ops.all_finite(x)
    assert not ops.all_finite(x.T)
    assert ops.all_finite(x[:, :3])


def test_small_products_leave_the_number_of_threads_as_it_was():
    before = [library.num_threads for library in ops._blas()]
    with ops._one_thread(1000):
        assert all(library.num_threads == 1 for library in ops._blas())
    with ops._one_thread(ops._SHARED_OUT):
        assert [library.num_threads for library in ops._blas()] == before
    assert [library.num_threads for library in ops._blas()] == before


@pytest.mark.parametrize("y", [-3, -1, 0, 1, 2, 3, 5, 8])
def test_integer_powers(y):
    x = np.array([-2.0, -0.5, 0.25, 3.0], np.float32)
    np.testing.assert_allclose(ops.OPS["integer_pow"](x, y=y), x.astype(np.float64) ** y, rtol=1e-6)
