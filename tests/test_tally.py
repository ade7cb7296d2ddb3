"""Counting a kernel without its arithmetic gives what running it gives."""

import numpy as np
import pytest

from pallas_puzzles.lens import machine as lens
from pallas_puzzles.lens.tally import tally
from production_kernels import PRODUCTION
from zoo import ZOO

EVERYTHING = {**ZOO, **PRODUCTION}


@pytest.mark.parametrize("name", EVERYTHING)
def test_counts_what_the_machine_counts(name):
    exhibit = EVERYTHING[name]
    traces = lens.trace(exhibit.fn, *exhibit.args, detail=False).traces
    assert traces
    for trace in traces:
        counted, run = tally(trace.call), lens.figures(trace)
        if counted.exact:
            assert counted.flops == run.flops
            assert counted.transcendentals == run.transcendentals
        else:  # what is unknown is counted as happening, a loop of unknown length once
            assert counted.branches or counted.trips
        assert counted.copies == bool(run.dma_bytes)


def test_most_of_them_are_counted_exactly():
    exact = [
        tally(trace.call).exact
        for exhibit in EVERYTHING.values()
        for trace in lens.trace(exhibit.fn, *exhibit.args, detail=False).traces
    ]
    assert np.mean(exact) > 0.9
