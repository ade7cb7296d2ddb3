"""What a kernel's Refs hold: shared until a part is stored into, and noted once for a buffer whose elements agree."""

import numpy as np
import pytest

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
    array = Marks.array

    def noted(self):
        made.append(self.shape)
        return array(self)

    monkeypatch.setattr(Marks, "array", noted)
    args = np.ones((64, 128), np.float32), np.ones((128, 256), np.float32)
    run = lens.trace(zoo.matmul, *args, bm=16, bn=128, bk=32)
    assert (np.asarray(run.outputs) == 128).all()
    assert made == []
    exhibit = ZOO["swap_halves_by_copies"]
    lens.trace(exhibit.fn, *exhibit.args)
    assert made


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
