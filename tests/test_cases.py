"""What a puzzle takes varies in its cases: an answer that is right for the sizes of the example alone is refused."""

import inspect
import re
from collections import defaultdict

import pytest

from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.course.curriculum import Puzzle

# What has to stay as it is, by the puzzles that it is true of. All else takes two values or more, one of them no power
# of two.
FIXED = {
    r"matmul/12": "M N K vmem_limit_bytes",  # its claims choose tiles for other sizes
    r"ragged_dot/5": "K",  # so do these
    r"ladder/[124]": "q.0 q.1 q.2 k.0 k.1 k.2 v.0 v.1 v.2 bq bkv",  # claims about other sizes, which are not run
    r"flash_attention/.*": "D q.2 q.3 k.3 v.3 k_pages.3 v_pages.3",  # 64 or 128, says the notebook
    r"gpu_attention/.*": "D",  # 64 or 128: what a swizzle and the registers hold
    r"gpu_attention/9b?": "H Hkv page",  # a group fills a tile of 64 rows, pages a block of keys
    r"gpu_basics/6": "bn",  # of what has no power of two, Pallas finds no layout
    r"gpu_matmul/[489]|gpu_matmul/10": "bm bn",  # warpgroups of 64 rows; two parts of 64 columns take turns in SMEM
}


def _is_power_of_two(n: object) -> bool:
    return isinstance(n, int) and n > 0 and n & (n - 1) == 0


def _taken(puzzle: Puzzle) -> dict[str, set[object]]:
    """The values of each size and of each number that a puzzle's function takes, over all cases."""
    subject = cases.official(puzzle.id)
    parameters = inspect.signature(inspect.unwrap(subject.fn)).parameters
    taken = defaultdict(set)
    for case in subject.cases:
        for name, given in zip(parameters, case.inputs, strict=False):
            named = getattr(parameters[name].annotation, "dim_str", "").split()
            names = named if len(named) == len(given.shape) else [f"{name}.{i}" for i in range(len(given.shape))]
            for size, n in zip(names, given.shape, strict=True):
                taken[size].add(n)
        for name, parameter in parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                taken[name].add(case.blocks.get(name, parameter.default))
    return {name: values for name, values in taken.items() if not name.isdigit()}


@pytest.mark.parametrize("puzzle", [p for book in curriculum.notebooks() for p in book.puzzles], ids=lambda p: p.id)
def test_what_a_puzzle_takes_varies(puzzle: Puzzle) -> None:
    fixed = {name for what, names in FIXED.items() if re.fullmatch(what, puzzle.id) for name in names.split()}
    for name, values in _taken(puzzle).items():
        numbers = {n for n in values if isinstance(n, int) and not isinstance(n, bool)}
        if name in fixed or numbers == {1}:  # a row or a column
            continue
        assert len(values) > 1, f"{name} is {values} in every case"
        powers = max(numbers, default=0) > 2 and all(map(_is_power_of_two, numbers))  # and not just a few
        assert not powers, f"{name} is a power of two in every case: {sorted(numbers)}"
