"""check and check_call of a plgpu.kernel: the same verdicts as of a pallas_call, JAX's simulator beside the machine."""

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import gpu_kernels
import gpu_library
from gpu_kernels import MISTAKES, S, normal
from pallas_puzzles import check, show
from pallas_puzzles.course import cases, curriculum, inputs
from pallas_puzzles.course.check import check_call
from pallas_puzzles.course.inputs import Budget, case
from pallas_puzzles.lens.gpu.timeline import Event
from pallas_puzzles.lens.watchdog import TimeLimit
from pallas_puzzles.targets import gpu_simulator
from pallas_puzzles.targets.gpu import lowering
from pallas_puzzles.targets.gpu.chips import CHIPS
from pallas_puzzles.targets.simulate import SimulatorTimeout
from pallas_puzzles.view.costs import totals
from pallas_puzzles.view.slots import MOST_SLOTS, slot_events


def scaled(factor: float = 2.0, shift: int = 0, once: bool = False, last: int = 4):
    """o = 2 x, a CTA for each 64 rows; with mistakes in the values."""

    def body(x_gmem, o_gmem, x_smem, o_smem, bar):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(lax.rem(i + shift, 4) * 64, 64)], x_smem, bar)
        plgpu.barrier_wait(bar)
        o_smem[...] = x_smem[...] * (jnp.where(i == 2, factor, 2.0) if once else factor)
        plgpu.commit_smem()

        @pl.when(i < last)
        def _():
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(i * 64, 64)])

        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((64, 128), jnp.float32)
    out = S((256, 128), jnp.float32)
    return plgpu.kernel(body, out_type=out, grid=(4,), grid_names=("i",), scratch_types=[tile, tile, plgpu.Barrier()])


X = normal(256, 128)


@pytest.mark.parametrize("name", ["copies", "matmul", "multicast"])
def test_a_right_kernel_is_confirmed(name: str) -> None:
    kernel, args, want = gpu_kernels.RIGHT[name]()
    verdict = check_call(kernel, args, want)
    assert verdict, str(verdict)
    assert verdict.notes == []
    assert "between GMEM and SMEM in" in verdict.gained
    assert "TPU" not in str(verdict)


@pytest.mark.parametrize("name", ["emit_pipeline", "A from registers"])
def test_what_the_simulator_cannot_run_is_said(name: str) -> None:
    kernel, args, want = gpu_kernels.RIGHT[name]()
    verdict = check_call(kernel, args, want)
    assert verdict, str(verdict)
    assert "GPU simulator cannot run it" in verdict.notes[0]


@pytest.mark.parametrize("name", ["no barrier_wait", "no commit_smem", "slot never released", "CTAs store one row"])
def test_mistakes_are_refused(name: str) -> None:
    made, kind, line, said = MISTAKES[name]
    kernel, args, want = made()
    verdict = check_call(kernel, args, want)
    assert verdict.status == "failed"
    assert verdict.findings[0].kind == kind
    assert verdict.findings[0].line is not None
    assert line in verdict.findings[0].line.text
    assert said in verdict.findings[0].cause


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"factor": 3.0}, "o_gmem[0:64, :] is 1.5 times what is expected, as 3 other parts. CTA 0 stored it."),
        ({"factor": 3.0, "once": True}, "o_gmem[128:192, :] is 1.5 times what is expected. CTA 2 stored it."),
        ({"shift": 1}, "o_gmem[0:64, :] holds what belongs in o_gmem[64:128, :], as 3 other parts."),
        ({"last": 3}, "8,192 elements of o_gmem are never stored: rows 192-255."),
    ],
)
def test_wrong_values_say_where_and_who(mistake: dict, said: str) -> None:
    (finding,) = check_call(scaled(**mistake), (X,), 2 * X).findings
    assert said in finding.cause
    assert "elements are wrong: o_gmem[" in finding.evidence[0]
    assert finding.line is not None
    assert ("copy_smem_to_gmem(o_smem" in finding.line.text) == ("last" not in mistake)


def test_what_is_around_a_kernel() -> None:
    refused = check_call(lambda x: jnp.sin(scaled()(x)), (X,), np.sin(2 * X), allow=())
    assert refused.findings[0].kind == "outside"
    assert "sin" in refused.findings[0].cause
    wrong = check_call(lambda x: scaled()(x)[:8], (X,), 2 * X)
    assert "(8, 128)" in wrong.findings[0].cause
    assert "out_type" in wrong.findings[0].cause


def test_the_front_end_has_its_say() -> None:
    def body(x_gmem, o_gmem, x_smem, bar):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, bar)
        plgpu.barrier_wait(bar)
        o_gmem[...] = x_smem[...]

    x = normal(512, 16)
    kernel = plgpu.kernel(
        body, out_type=S(x.shape, x.dtype), scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()]
    )
    (finding,) = check_call(kernel, (x,), x).findings
    assert finding.kind == "lowering"
    assert "at most 256 elements" in finding.cause


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: x * (jnp.sum(x, axis=1)[:, None] / 2), ("shape (64, 1)", "(64,) numbers", "x * s[:, None]")),
        (lambda x: x * (jnp.sum(x, axis=1, keepdims=True) / 2), ("shape (64, 1)", "without keepdims=True")),
        (lambda x: x * (jnp.sum(x, axis=0)[None] / 2), ("shape (1, 128)", "(128,) numbers", "x * s[None, :]")),
        (lambda x: x * jnp.sum(plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED), axis=1)[:, None], ("Name one",)),
    ],
)
def test_an_array_without_a_layout(body: Any, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do is said where the kernel shows it: numbers of rows are widened last."""

    def kernel(x_gmem, o_gmem, x_smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.barrier_wait(loaded)
        o_gmem[...] = body(plgpu.load(x_smem, layout=plgpu.Layout.WGMMA))

    tile = S((64, 128), jnp.float32)
    fn = plgpu.kernel(kernel, out_type=tile, scratch_types=[plgpu.SMEM(tile.shape, tile.dtype), plgpu.Barrier()])
    monkeypatch.setattr(lowering, "FRONT_END_LIMIT_S", 0.5)
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)  # busy with this alone
    refused = lowering.refusal(fn, jnp.zeros(tile.shape), chip=CHIPS["h100"])
    assert refused is not None
    assert [words for words in said if words not in refused.sentence] == []
    assert ("Name one" in refused.sentence) == (said == ("Name one",))
    assert refused.line is not None
    assert "lambda x: x *" in refused.line.text


@pytest.mark.parametrize("busy", [False, True])
def test_a_search_that_takes_long(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for layouts, unless the processor was busy with something else."""

    @contextlib.contextmanager
    def too_long(seconds: float, what: str) -> Iterator[None]:
        yield
        raise TimeLimit

    monkeypatch.setattr(lowering, "time_limit", too_long)
    monkeypatch.setattr(lowering, "FRONT_END_LIMIT_S", 1e-3)
    if busy:
        monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    refused = lowering.refusal(scaled(2.0), jnp.zeros((256, 128)), chip=CHIPS["h100"])
    assert (refused is None) == busy


def test_check_draws_and_varies() -> None:
    def double(x: jax.Array, *, factor: float = 2.0) -> jax.Array:
        return scaled(factor)(x)

    x = inputs.normal((256, 128))
    assert check("mine/1", double, lambda x: x * 2, x, variants=[case(x, factor=2.0)])
    wrong = check("mine/1", double, lambda x: x * 2, x, variants=[case(x, factor=5.0, about="five times")])
    assert "2.5 times" in wrong.findings[0].cause
    assert "variant 1 (five times)" in wrong.notes[-1]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(gmem_bytes=1 << 10), "it moves 256 KiB to and from GMEM; the budget is 1 KiB"),
        (Budget(smem_bytes=1 << 10), "a CTA holds 64.01 KiB of SMEM; the budget is 1 KiB"),
        (Budget(stores=0), "copies out of SMEM; the budget is 0"),
        (Budget(ctas=2), "it takes 4 CTAs; the budget is 2"),
        (Budget(waited=10), "cycles; the budget is 10"),
        (Budget(copy_idle=10), "the copy engine has nothing to do in"),
        (Budget(copy_idle=20), "Compute in less time: with whole tiles, not row by row"),  # a copy a CTA
        (Budget(calls=2), "it uses 1 kernel; this puzzle asks for 2"),
        (Budget(vmem_bytes=1), "the budget bounds vmem_bytes, which a kernel for a GPU does not have"),
    ],
)
def test_budgets(budget: Budget, said: str) -> None:
    (finding,) = check_call(scaled(), (X,), 2 * X, budget=budget).findings
    assert (finding.kind, finding.cause.startswith("Right answer, but ")) == ("budget", True)
    assert said in finding.cause


def test_idle_tensor_cores_are_told_with_what_happened_before_a_product() -> None:
    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            acc[...] = jnp.minimum(jnp.exp2(acc[...]), 1)
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64)))

    a, b = (gpu_kernels.normal(64, 64).astype(jnp.bfloat16) for _ in range(2))
    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=gpu_kernels.TILES)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=2)]
    fn = plgpu.kernel(kernel, out_type=S((64, 64), jnp.float32), scratch_types=scratch)
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    right = np.minimum(np.exp2(product), 1) + product
    (finding,) = check_call(fn, (a, b), right, budget=Budget(tensor_idle=10)).findings
    assert "start a product that needs nothing of it" in finding.cause
    assert "next copy" not in finding.cause
    after, first, *_ = finding.evidence
    assert "no product is on its way: acc[...] = jnp.minimum" in after  # it waits for the product that it reads
    assert "computes for" in first
    assert "jnp.exp2" in first


def test_a_copy_that_comes_late_is_told_with_the_arrival_that_lets_it_start() -> None:
    def kernel(x_gmem, o_gmem, x_smem, full, empty):
        def compute() -> None:
            @pl.loop(0, 8)
            def _(i):
                plgpu.barrier_wait(full)
                x = x_smem[...]
                o_gmem[i] = jnp.exp2(x)
                plgpu.commit_smem()
                plgpu.barrier_arrive(empty)  # x has been read long before

        def copy() -> None:
            @pl.loop(0, 8)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(empty))
                plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem, full)

        wg = lax.axis_index("wg")
        pl.when(wg == 0)(compute)
        pl.when(wg == 1)(copy)

    x = gpu_kernels.normal(8, 64, 128)
    scratch = [plgpu.SMEM((64, 128), jnp.float32), plgpu.Barrier(), plgpu.Barrier()]
    fn = plgpu.kernel(kernel, out_type=S(x.shape, x.dtype), scratch_types=scratch, num_threads=2, thread_name="wg")
    (finding,) = check_call(fn, (x,), np.exp2(x), budget=Budget(waited=100)).findings
    assert finding.line is not None
    assert finding.line.text.endswith("# x has been read long before")
    assert "does not come before this" in finding.evidence[0]


def test_a_budget_that_holds() -> None:
    budget = Budget(gmem_bytes=256 << 10, smem_bytes=66 << 10, ctas=4, tensor_idle=0, calls=1)
    verdict = check_call(scaled(), (X,), 2 * X, budget=budget, confirm=False)
    assert verdict, str(verdict)
    assert totals(verdict.figures)["gmem_bytes"] == 256 << 10
    assert verdict.to_json()["figures"][0]["smem_bytes"] == (64 << 10) + 8


def test_show_draws_who_is_busy_when() -> None:
    kernel, args, _ = gpu_kernels.specialised()
    picture = show(kernel, *args)
    svg, text, page = picture.svg(), str(picture), picture._repr_html_()
    for lane in ("warpgroup 0", "warpgroup 1", "copy engine"):
        assert lane in svg
        assert lane in text
    assert "tensor cores" not in svg
    assert "copy from GMEM of x_gmem, cycles 0-" in svg  # on hovering
    assert "var(--blue)" in svg
    assert "#0072B2" in page or "<img" in page
    assert "plgpu.barrier_wait(full.at[i % 2])" in page
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines[1:5])


def test_double_buffering_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two slots a copy is on its way while another one is, and while the warpgroup computes."""
    monkeypatch.setenv("COLUMNS", "100")  # on a narrow terminal a copy is two letters
    deep, flat = (str(show(*gpu_kernels.pipeline(depth=d)[:1], *gpu_kernels.pipeline()[1])) for d in (2, 1))
    rows = [[line for line in text.splitlines() if "LLL" in line] for text in (deep, flat)]
    assert [len(found) for found in rows] == [4, 2]  # copies that are on their way at once, and slots that they fill
    assert ["refs[0][1]" in text for text in (deep, flat)] == [True, False]


def test_show_draws_slots_and_barriers() -> None:
    kernel, args, _ = gpu_kernels.specialised()
    svg = show(kernel, *args).svg()
    for words in ("x_smem[0]", "x_smem[1]", "full[0]: warpgroup 0 goes on", "empty[1]: warpgroup 1 goes on"):
        assert words in svg
    assert "var(--tint)" in svg  # a slot that is full


def test_show_says_what_it_costs() -> None:
    kernel, args, _ = gpu_kernels.matmul(tiles=(plgpu.TilingTransform((8, 64)),))
    text, page = " ".join(str(show(kernel, *args)).split()), show(kernel, *args)._repr_html_()
    for words in ("A CTA has 2 barriers; 8 arrivals in all.", "computes 2,097,152 FLOPs: 25.6 per byte", "3,584 bank"):
        assert words in text
        assert words in page


def test_show_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with gpu_library.on_a_gpu():
        fn, args, _ = gpu_library.matmul()
        lines = str(show(fn, *args)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.strip().startswith("tensor cores  ") and "P" in line for line in lines)


def test_what_happens_in_a_slot() -> None:
    """It is filled, holds what is read, is copied out, and is filled again."""
    uses = [Event(0, "s[0]", kind, a, b) for kind, a, b in (("load", 0, 4), ("read", 5, 6), ("store", 8, 9))]
    uses += [Event(0, "s[0]", "compute", 12, 13), Event(0, "s[0]", "read", 13, 15), Event(0, "s[1]", "load", 1, 2)]
    events, left_out = slot_events(uses)
    assert [(e.lane, e.kind, e.start, e.end) for e in events] == [
        ("s[0]", "load", 0, 4),
        ("s[0]", "full", 4, 8),
        ("s[0]", "store", 8, 9),
        ("s[0]", "compute", 12, 13),
        ("s[0]", "full", 13, 15),
        ("s[1]", "load", 1, 2),
    ]
    assert left_out == 0
    assert slot_events([Event(0, f"s[{i}]", "load", 0, 1) for i in range(MOST_SLOTS + 2)])[1] == 2


def test_show_of_a_kernel_that_never_ends() -> None:
    kernel, args, _ = gpu_kernels.specialised(release=False)
    picture = show(kernel, *args)
    assert "waits for ever" in picture.note
    assert "It never ends" in str(picture)
    assert "a warpgroup waits for empty[0]" in picture.svg()


def test_show_of_broken_code() -> None:
    def broken(x: jax.Array) -> jax.Array:
        return plgpu.kernel(lambda x_gmem, o_gmem: 1 / 0, out_type=S((4, 128), jnp.float32))(x)

    picture = show(broken, X)
    assert picture.empty
    assert "ZeroDivisionError" in picture.note


def test_show_says_what_is_still_to_be_written() -> None:
    puzzle = curriculum.puzzle("gpu_matmul/5")
    names = cases.laid(puzzle, {}, {}, {})
    a, b = (normal(*shape, dtype=jnp.bfloat16) for shape in ((128, 128), (128, 256)))
    for name, missing in (("k_loop", "multiply_step is"), ("specialised", "produce and consume are")):
        picture = show(functools.partial(names[name], slots=2), a, b)
        assert picture.note == f"Only what is given runs: {missing} still to be written."
        assert picture.note in picture._repr_html_()


@pytest.fixture
def no_child() -> Iterator[None]:
    gpu_simulator._SIMULATOR.stop()
    yield
    gpu_simulator._SIMULATOR.stop()


def test_a_kernel_that_never_ends_is_stopped(no_child: None) -> None:
    kernel, args, _ = gpu_kernels.turns(both=False)
    with pytest.raises(SimulatorTimeout, match="more than 2 s"):
        gpu_simulator.simulate(kernel, *args, timeout_s=2)
    right, args, want = gpu_kernels.turns()
    np.testing.assert_array_equal(gpu_simulator.simulate(right, *args), want)
