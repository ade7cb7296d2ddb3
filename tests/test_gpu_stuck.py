"""Which wait a deadlock of a GPU kernel is told of; and a copy that is started too early, as it is told."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gpu_kernels import S, normal, specialised
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.diagnose.gpu import findings_of
from pallas_puzzles.ir.effort import counted
from pallas_puzzles.lens import gpu

STREAM = [plgpu.SMEM((2, 64, 128), jnp.float32), *[plgpu.Barrier(num_barriers=2)] * 2]


def told(body: Callable[..., None], *scratch: Any, **threads: Any) -> Finding:
    """The finding of a kernel that gets x, eight tiles, and stores two rows."""
    kernel = plgpu.kernel(body, out_type=S((2, 128), jnp.float32), scratch_types=scratch, **threads)
    first, *_ = findings_of(gpu.run(kernel, normal(8, 64, 128)).findings)
    return first


def in_two(zero: Callable[[], None], one: Callable[[], None]) -> None:
    wg = lax.axis_index("wg")
    pl.when(wg == 0)(zero)
    pl.when(wg == 1)(one)


def by_turns(x_gmem, o_gmem, turns):
    wg = lax.axis_index("wg")
    plgpu.barrier_wait(turns.at[wg])
    plgpu.barrier_arrive(turns.at[1 - wg])


def waits_twice(x_gmem, o_gmem, x_smem, full, empty):
    plgpu.copy_gmem_to_smem(x_gmem.at[0], x_smem.at[0], full.at[0])
    plgpu.barrier_wait(full.at[0])
    plgpu.barrier_wait(full.at[0])


def given_back(slot: Callable[[Any], Any]) -> Callable[..., None]:
    """A producer, and a consumer that arrives at empty.at[slot(i)]."""

    def body(x_gmem, o_gmem, x_smem, full, empty):
        def produce():
            @pl.loop(0, 8)
            def _(i):
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[i % 2]))
                plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[i % 2], full.at[i % 2])

        def consume():
            @pl.loop(0, 8)
            def _(i):
                plgpu.barrier_wait(full.at[i % 2])
                plgpu.commit_smem()
                plgpu.barrier_arrive(empty.at[slot(i)])

        in_two(consume, produce)

    return body


def refilled(x_gmem, o_gmem, x_smem, full, empty):
    for i in range(2):
        plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[0], full.at[0])
        plgpu.barrier_wait(full.at[0]) if i == 0 else None
    o_gmem[0] = x_smem[0, 0]


def two_on_one(x_gmem, o_gmem, x_smem, full, empty):
    for i in range(2):
        plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[i], full.at[0])
    plgpu.barrier_wait(full.at[0])
    for i in range(2):
        o_gmem[i] = x_smem[i, 0]


def waits_for_the_second(pair):
    _, late = pair
    plgpu.barrier_wait(late.at[0])


def handed_on(x_gmem, o_gmem, *refs):
    _, *barriers = refs
    waits_for_the_second(barriers)


TWO = {"num_threads": 2, "thread_name": "wg"}
ARRIVES, INDEX = "barrier_arrive", "is an index wrong"
EARLY = ["overwrites what was there", "Start that copy"]
TOLD = {
    "each waits for the other": (by_turns, [plgpu.Barrier(num_barriers=2)], TWO, "barrier_wait", ["for each other"]),
    "one wait too many": (waits_twice, STREAM, {}, "barrier_wait", ["this is wait number 2: wait once"]),
    "always the same slot": (given_back(lambda i: 0), STREAM, TWO, ARRIVES, ["warpgroup 1", INDEX]),
    "refilled before it is read": (refilled, STREAM, {}, "copy_gmem_to_smem", EARLY),
    "a tuple of Refs": (handed_on, STREAM, {}, "barrier_wait(late", ["late[0] has 0 of 1 arrival"]),
    "more copies than arrivals": (two_on_one, STREAM, {}, "o_gmem[i]", ["after 1 arrival, and 2 copies"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told(name: str) -> None:
    body, scratch, threads, line, said = TOLD[name]
    finding = told(body, *scratch, **threads)
    assert finding.line is not None
    assert line in finding.line.text
    assert [words for words in said if words not in finding.cause] == []


def test_the_wait_that_others_hang_on_comes_first() -> None:
    """The consumer waits for a copy, the producer for a slot that nobody gives back."""
    kernel, args, _ = specialised(release=False)
    (finding,) = findings_of(gpu.run(kernel, *args).findings)
    assert finding.cause.startswith("warpgroup 1 waits for ever: empty[0] has 0 of 1 arrival in its round 0")
    assert "No line of the kernel arrives on it" in finding.cause
    assert any("warpgroup 0 waits for full[0]" in row and "warpgroup 1 arrives" in row for row in finding.evidence)


def test_effort_is_the_same_in_every_run() -> None:
    kernel, args, _ = specialised()
    with counted() as both:
        efforts = []
        for _ in range(2):
            with counted() as effort:
                gpu.run(kernel, *args)
            efforts.append(effort.instructions)
    assert efforts[0] == efforts[1] > 0
    assert both.instructions == sum(efforts)
