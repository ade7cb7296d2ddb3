"""`bench` without a chip: what is measured is faked, all around it is real. No timing is asserted."""

import csv
import dataclasses
import io
import json
import os
import threading
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from pallas_puzzles import bench
from pallas_puzzles.app import benchmark, serving
from pallas_puzzles.app.cli import app
from pallas_puzzles.course import cases, curriculum
from pallas_puzzles.course.inputs import integers, normal
from pallas_puzzles.ir.asked import Attention
from pallas_puzzles.speed import conditions, libraries, meter, run
from pallas_puzzles.speed.choose import measure_or_estimate
from pallas_puzzles.speed.compare import changes, compared
from pallas_puzzles.speed.estimate import estimate
from pallas_puzzles.speed.puzzles import SOLUTION, sizes_of, solutions, work_of
from pallas_puzzles.speed.results import Results, Row, read
from pallas_puzzles.speed.run import measure
from pallas_puzzles.speed.show import text
from pallas_puzzles.speed.work import Size, Work, drawn, narrowed, size, speed_of_light
from pallas_puzzles.targets.gpu.chips import CHIPS

H200 = CHIPS["h200"]


class FakeMeter:
    """Every call takes a microsecond more than the one before."""

    def times(self, calls):
        samples = [[(9 + i) * 1e-6, (10 + i) * 1e-6, (11 + i) * 1e-6] for i in range(len(calls))]
        return [meter.timing(each, meter.DEVICE, True) for each in samples]


def sines(*shapes, **peers):
    sizes = [size(normal(shape)) for shape in shapes]
    return Work("sin", jnp.sin, sizes, {**peers, "XLA": lambda x: jnp.sin(x)}, accelerator="")


# --- what is measured ------------------------------------------------------------------------------------------------


def test_light_is_what_has_to_move_or_to_be_multiplied() -> None:
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    light = speed_of_light(size(x), x, H200)
    assert (light.bound, light.hbm_bytes) == ("HBM", 2 * 2 * 1024**2)
    assert light.seconds == pytest.approx(light.hbm_bytes / H200.hbm_bytes_per_s)
    work = speed_of_light(size(x, flops=1e12), x, H200)
    assert (work.bound, work.seconds) == ("matrix products", pytest.approx(1e12 / H200.bf16_flops_per_s))
    assert speed_of_light(size(x, hbm_bytes=7.0), x, H200).hbm_bytes == 7


def test_arguments_are_drawn_and_integers_need_values() -> None:
    x, i = drawn((normal((4, 256), "bfloat16", shift=100.0), integers((8,), 3, 5)))
    assert (x.dtype, i.dtype) == (jnp.bfloat16, jnp.int32)
    assert float(x.astype(jnp.float32).mean()) == pytest.approx(100, abs=1)
    assert set(i.tolist()) <= {3, 4}
    with pytest.raises(ValueError, match="give integers as an array"):
        drawn((jax.ShapeDtypeStruct((3,), jnp.int32),))


def test_every_puzzle_for_gpus_has_a_benchmark_of_its_own_arguments() -> None:
    works = solutions("gpu_basics")
    assert [work.name.split()[0] for work in works] == [f"gpu_basics/{n}" for n in (1, 2, 3, 4, "4b", *range(5, 11))]
    assert all(work.own == SOLUTION and work.accelerator == "gpu" for work in works)
    for work in works:
        for each in work.sizes:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in each.args]
            results = {name: jax.eval_shape(call, *shapes) for name, call in work.calls(each).items()}
            assert results[SOLUTION] == results["XLA"], (work.name, each.title)


@pytest.mark.parametrize("book", ["flash_attention", "matmul"])
def test_benchmarks_for_tpus_fit_their_puzzles(book) -> None:
    benched = [p for p in curriculum.notebook(curriculum.puzzle(f"{book}/1").path).puzzles if cases.benchmark(p)]
    assert benched
    for puzzle in benched:
        work = work_of(cases.official(puzzle.id), puzzle.id, every_size=False)
        (largest,) = work.sizes
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in largest.args]
        ours, xla = (jax.eval_shape(work.calls(largest)[name], *shapes) for name in ("yours", "XLA"))
        assert ours == xla
        assert largest.flops > 0


def test_a_puzzle_without_a_benchmark_is_measured_as_it_is_checked() -> None:
    puzzle, subject = curriculum.puzzle("basics/1"), cases.official("basics/1")
    assert cases.benchmark(puzzle) is None
    assert sizes_of(puzzle, subject).sizes[-1] == Size(subject.cases[0].inputs, subject.cases[0].blocks)


# --- measuring -------------------------------------------------------------------------------------------------------


def test_each_function_has_a_row_with_its_conditions() -> None:
    results = measure([sines((8, 128), (16, 128))], meter=FakeMeter(), chip=H200)
    assert [(r.size, r.who, r.problem) for r in results.rows] == [
        ("8 x 128", "yours", ""), ("8 x 128", "XLA", ""), ("16 x 128", "yours", ""), ("16 x 128", "XLA", ""),
    ]  # fmt: skip
    first = results.rows[0]
    assert (first.median_s, first.count, first.l2_flushed, first.dtype) == (pytest.approx(1e-5), 3, True, "f32")
    assert first.share == pytest.approx(2 * 4 * 8 * 128 / H200.hbm_bytes_per_s / 1e-5)
    assert {"device", "jax", "jaxlib", "python", "date"} <= results.conditions.keys()


def test_who_fails_or_is_wrong_gets_a_sentence_and_the_others_their_times() -> None:
    def fails(x):
        raise ValueError("no such layout\nand much more")

    work = sines((8, 128), fails=fails, wrong=jnp.cos, nan=lambda x: jnp.sin(x) * jnp.nan, shaped=lambda x: x[:3])
    rows = {row.who: row for row in measure([work], meter=FakeMeter(), chip=H200).rows}
    assert rows["fails"].problem == "ValueError: no such layout"
    for name in ("wrong", "nan", "shaped"):
        assert "the time of a wrong answer means nothing" in rows[name].problem
        assert rows[name].median_s is None
    assert rows["yours"].median_s
    assert rows["XLA"].median_s


def test_who_breaks_while_it_is_timed_is_alone_without_a_time() -> None:
    def breaks(x):
        return jnp.sin(x)

    class Meter(FakeMeter):
        def times(self, calls):
            if len(calls) > 1 or self.seen == 1:
                self.seen = self.seen + 1 if len(calls) == 1 else 0
                raise RuntimeError("INTERNAL: launch failed\nmore")
            self.seen += 1
            return super().times(calls)

        seen = 0

    rows = {row.who: row for row in measure([sines((8, 128), breaks=breaks)], meter=Meter(), chip=H200).rows}
    assert rows["breaks"].problem == "RuntimeError: INTERNAL: launch failed"
    assert rows["yours"].median_s
    assert rows["XLA"].median_s


def test_a_lost_device_ends_the_run_and_what_was_measured_stays(monkeypatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr("pallas_puzzles.speed.run._alive", lambda: next(answers))
    saved = []
    results = measure(
        [sines((8, 128), (16, 128), (24, 128))], meter=FakeMeter(), chip=H200, saved=lambda r: saved.append(len(r.rows))
    )
    assert [row.size for row in results.rows] == ["8 x 128"] * 2 + ["16 x 128"] * 2
    assert "What came before is kept" in results.notes[-1]
    assert saved == [2, 4, 4]


def test_a_call_that_does_not_end_is_left_behind() -> None:
    ended = threading.Event()
    with pytest.raises(run.Hangs, match=r"did not end within 0\.2 s"):
        run.in_time(lambda: ended.wait(60), 0.2)
    ended.set()
    assert run.in_time(lambda: 7, 60) == 7
    with pytest.raises(KeyError):
        run.in_time(lambda: {}[0], 60)


def test_what_was_measured_before_a_kernel_that_hangs_stays(monkeypatch) -> None:
    class Meter(FakeMeter):
        def times(self, calls):
            self.seen += 1
            if self.seen == 2:
                raise run.Hangs("it did not end")
            return super().times(calls)

        seen = 0

    saved = []
    work = sines((8, 128), (16, 128), (24, 128))
    results = measure([work], meter=Meter(), chip=H200, saved=lambda r: saved.append(len(r.rows)))
    assert [(row.size, bool(row.median_s)) for row in results.rows] == [
        ("8 x 128", True), ("8 x 128", True), ("16 x 128", False), ("16 x 128", False),
    ]  # fmt: skip
    assert results.rows[2].problem == "while yours, XLA took turns: it did not end"
    assert "nothing else could be measured. What came before is kept" in results.notes[-1]
    assert saved[-1] == 4

    def first(call, limit_s):
        if limit_s == 9 and len(tried) == 2:  # the arguments, XLA, ours
            raise run.Hangs("it did not end")
        tried.append(limit_s)
        return call()

    tried: list[float] = []
    monkeypatch.setattr(run, "in_time", first)
    rows = {row.who: row.problem for row in measure([work], meter=FakeMeter(), chip=H200, limit_s=9).rows}
    assert rows == {"yours": "it did not end", "XLA": "another call keeps the device, and does not end"}


def test_dtypes_of_one_byte_are_tried_where_a_function_takes_them() -> None:
    def product(a, b):
        return jnp.dot(a, b, preferred_element_type=jnp.int32 if a.dtype == jnp.int8 else jnp.float32)

    def floats(a, b):
        assert a.dtype != jnp.int8, "floats only"
        return product(a, b)

    pair = size(normal((16, 32), "bfloat16"), normal((32, 16), "bfloat16"))
    both = Work("product", product, [pair], {"XLA": lambda a, b: product(a, b)}, accelerator="")
    assert [(each.tried, each.dtype) for each in narrowed(both)] == [
        ("int8", "i8"), ("float8_e4m3fn", "f8_e4m3fn"),
    ]  # fmt: skip
    assert [each.tried for each in narrowed(dataclasses.replace(both, fn=floats))] == ["float8_e4m3fn"]
    results = measure([dataclasses.replace(both, sizes=narrowed(both))], meter=FakeMeter(), chip=H200)
    assert [(row.dtype, row.who, row.problem) for row in results.rows] == [
        (dtype, who, "") for dtype in ("i8", "f8_e4m3fn") for who in ("yours", "XLA")
    ]


def test_a_dtype_that_a_kernel_refuses_is_left_out_with_a_sentence() -> None:
    def refuses(x):
        return jax.pure_callback(lambda x: 1 / 0, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    sizes = [size(normal((8, 128))), dataclasses.replace(size(normal((8, 128), "int8")), tried="int8")]
    work = Work("sin", refuses, sizes, {"XLA": jnp.negative}, accelerator="")
    results = measure([work], meter=FakeMeter(), chip=H200)
    assert [row.dtype for row in results.rows] == ["f32", "f32"]
    assert results.notes[0].startswith("sin is not measured in int8: ")


def test_a_kernel_that_fails_beside_a_library_leaves_it_its_time() -> None:
    def fails(a, b):
        raise ValueError("no such layout")

    spec = cases.official("gpu_matmul/6").spec
    args = normal((16, 32), "bfloat16"), normal((32, 64), "bfloat16")
    work = Work("product", fails, [size(*args)], {**libraries.peers(spec, args), "XLA": spec}, accelerator="")
    results = measure([work], meter=FakeMeter(), chip=H200)
    rows = {row.who: row for row in results.rows}
    assert rows["yours"].problem == "ValueError: no such layout"
    assert rows["cuBLAS"].median_s
    assert not benchmark.has_own(results)
    assert benchmark.has_own(measure([sines((8, 128))], meter=FakeMeter(), chip=H200))


def test_the_process_that_measures_keeps_what_libraries_put_into_its_environment(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {"LEFT_OVER": "1"})  # of whoever started it
    monkeypatch.setattr(serving, "_by_imports", {"LIBRARY": "its files", "SHARED": "of the library"})
    serving._be_where({"environment": {"MINE": "2", "SHARED": "of the command"}})
    told = {"LIBRARY": "its files", "MINE": "2", "SHARED": "of the command"}
    assert {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} == told


# --- libraries -------------------------------------------------------------------------------------------------------

HEADS = jax.ShapeDtypeStruct((1, 2, 64, 16), jnp.bfloat16)


def test_a_spec_that_is_a_product_has_cublas_beside_it() -> None:
    a, b = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    spec = cases.official("gpu_matmul/6").spec
    (peer,) = libraries.peers(spec, [a, b]).values()
    assert jax.eval_shape(peer, a, b) == jax.eval_shape(spec, a, b)
    x, y = np.ones(a.shape, a.dtype), np.ones(b.shape, b.dtype)
    assert (np.asarray(peer(x, y)) == np.asarray(spec(x, y))).all()
    for other in (lambda a, b: jnp.exp(a @ b), lambda a, b: a + 1, lambda a, b: (a @ b) @ b.T, lambda a, b: 1 / 0):
        assert libraries.peers(other, [a, b]) == {}


@pytest.mark.parametrize(("puzzle", "causal"), [("flash_attention/5", False), ("flash_attention/6", True)])
def test_a_spec_that_is_attention_has_cudnn_beside_it(puzzle, causal) -> None:
    spec = cases.official(puzzle).spec
    peer = libraries.peers(spec, [HEADS] * 3)["cuDNN"]
    assert peer.attention == Attention(heads_first=True, scale=16**-0.5, causal=causal)
    q, k, v = (jax.random.normal(jax.random.key(i), HEADS.shape, HEADS.dtype) for i in range(3))
    plain = dataclasses.replace(peer, call=jax.nn.dot_product_attention)  # by XLA, which runs anywhere
    np.testing.assert_allclose(
        np.asarray(plain(q, k, v), np.float32), np.asarray(spec(q, k, v), np.float32), rtol=3e-2, atol=3e-2
    )


def test_a_library_is_no_peer_of_a_function_of_other_arrays() -> None:
    wide = jax.ShapeDtypeStruct(HEADS.shape, jnp.float32)
    assert libraries.peers(cases.official("flash_attention/5").spec, [wide] * 3) == {}
    assert libraries.peers(jnp.sin, [HEADS]) == {}


def test_on_a_cpu_it_is_the_wall_and_said_to_be() -> None:
    results = bench(lambda x: x + 1, normal((64, 128)))
    (row,) = results.rows
    assert (row.how, row.l2_flushed, row.share) == (meter.WALL, False, None)
    assert row.median_s
    assert row.median_s > 0
    assert any("a CPU has no device time" in note for note in results.notes)
    assert any("peaks of this cpu are not known" in note for note in results.notes)


def test_a_function_that_cannot_be_traced_is_a_sentence() -> None:
    results = bench(lambda x: x @ x, normal((64, 128)))
    assert not results
    assert "cannot be traced: TypeError" in results.notes[0]


# --- the profiler ----------------------------------------------------------------------------------------------------


def event(name: str, module: str, start: float, length: float) -> meter.Event:
    return meter.Event(name, module, start, start + length)


def test_a_call_is_what_lies_between_two_flushes() -> None:
    events = [
        event("loop_xor_fusion", "jit_flush_l2", 0, 100), event("a", "jit_f", 110, 20), event("b", "jit_f", 120, 30),
        event("loop_xor_fusion", "", 200, 100), event("c", "", 310, 5), event("d", "", 320, 5),
    ]  # fmt: skip
    assert meter.device_times(events) == pytest.approx([40e-9, 10e-9])
    assert meter.device_times([]) == []


def test_the_streams_of_a_gpu_are_read_from_a_profile() -> None:
    text = """
    planes { name: "/host:CPU" lines { name: "Stream #9" events { metadata_id: 1 duration_ps: 5 } }
             event_metadata { key: 1 value { id: 1 name: "host" } } }
    planes { name: "/device:GPU:0"
      lines { name: "Stream #13(Compute)" timestamp_ns: 1000
              events { metadata_id: 2 offset_ps: 9000000 duration_ps: 2000000
                       stats { metadata_id: 1 str_value: "jit_f" } }
              events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000 } }
      lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 2 offset_ps: 0 duration_ps: 1 } }
      event_metadata { key: 1 value { id: 1 name: "loop_xor_fusion" } }
      event_metadata { key: 2 value { id: 2 name: "kernel" } }
      stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }
    }
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the extension's own types
        data = jax.profiler.ProfileData.from_serialized_xspace(
            jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
        )
        found = meter.events_in(data)
    assert [(e.name, e.module, e.end - e.start) for e in found] == [
        ("loop_xor_fusion", "", 3000), ("kernel", "jit_f", 2000),
    ]  # fmt: skip
    assert meter.device_times(found) == pytest.approx([2e-6])


def test_the_programs_of_a_tpu_are_read_from_a_profile() -> None:
    text = """
    planes { name: "/device:TPU:0"
      lines { name: "Steps" timestamp_ns: 1000 events { metadata_id: 3 offset_ps: 0 duration_ps: 99000000 } }
      lines { name: "XLA Modules" timestamp_ns: 1000
              events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000 }
              events { metadata_id: 2 offset_ps: 5000000 duration_ps: 2000000 }
              events { metadata_id: 1 offset_ps: 8000000 duration_ps: 3000000 }
              events { metadata_id: 2 offset_ps: 12000000 duration_ps: 1000000 }
              events { metadata_id: 4 offset_ps: 14000000 duration_ps: 4000000 } }
      lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 5 offset_ps: 5000000 duration_ps: 1000000 } }
      event_metadata { key: 1 value { id: 1 name: "jit_flush_l2(8446744073709551615)" } }
      event_metadata { key: 2 value { id: 2 name: "jit_f(123)" } }
      event_metadata { key: 3 value { id: 3 name: "0" } }
      event_metadata { key: 4 value { id: 4 name: "jit_g(456)" } }
      event_metadata { key: 5 value { id: 5 name: "%fusion.1" } }
    }
    planes { name: "/device:TPU:0 SparseCore 0" }
    planes { name: "/host:CPU" lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 5 } }
             event_metadata { key: 1 value { id: 1 name: "jit_f(123)" } } }
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the extension's own types
        data = jax.profiler.ProfileData.from_serialized_xspace(
            jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
        )
        found = meter.events_in(data)
    assert [e.name.partition("(")[0] for e in found] == ["jit_flush_l2", "jit_f", "jit_flush_l2", "jit_f", "jit_g"]
    assert meter.device_times(found) == pytest.approx([2e-6, 5e-6])


def test_a_profile_that_misses_calls_is_not_believed(monkeypatch) -> None:
    monkeypatch.setattr(meter, "FLUSH_BYTES", 4096)
    monkeypatch.setattr(meter, "profiled", lambda run: [event("xor", "", 0, 1), event("a", "", 2, 3)])
    assert meter.profiled_times([lambda: 0], 10) == ([], "the profiler saw 1 calls, and there were 10")

    def fails(run):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(meter, "profiled", fails)
    assert meter.profiled_times([lambda: 0], 10) == ([], "the profiler failed (RuntimeError: no CUPTI)")


# --- conditions ------------------------------------------------------------------------------------------------------


def smi(used: str, apps: str):
    return lambda words: apps if "compute-apps" in words[0] else used


def test_a_busy_gpu_is_noticed() -> None:
    told = conditions.others(smi("37\n", "1, /usr/bin/train\n2, me\n"), wait_s=0)
    assert told.startswith("The GPU is busy: it is used 37% while we do nothing (me).")
    assert conditions.others(smi("0\n", "1, /usr/bin/other\n2, me\n"), wait_s=0).endswith("do not use it now: me.")
    assert conditions.others(smi("0\n", "99, a container's name for us\n"), wait_s=0) == ""
    assert conditions.others(smi("", ""), wait_s=0) == ""


def test_clocks_count_while_the_gpu_works() -> None:
    seen = conditions.summary("345, 1980, 30, 70, 0\n1500, 1980, 60, 650, 99\n1400, 1980, 61, 640, 100\n[N/A], 1\n")
    assert (seen["sm_clock_mhz"], seen["lowest_sm_clock_mhz"], seen["temperature_c"]) == (1450, 1400, 61)
    assert "At times the GPU ran at 1400 MHz, of 1980 MHz" in conditions.slowed(seen)
    assert conditions.slowed({**seen, "lowest_sm_clock_mhz": 1900}) == ""
    assert conditions.slowed({}) == ""


# --- estimates -------------------------------------------------------------------------------------------------------


REPORT = "pallas_puzzles.speed.estimate._report"


@dataclasses.dataclass
class FakeReport:
    kernels: list
    refusal: object = None
    unavailable: str = ""


@dataclasses.dataclass
class FakeKernel:
    time_s: float | None


def test_estimates_are_marked_and_peers_without_kernels_left_out(monkeypatch) -> None:
    work = dataclasses.replace(sines((8, 128)), accelerator="gpu")
    own = work.fn
    monkeypatch.setattr(REPORT, lambda chip, fn, *a, **k: FakeReport([FakeKernel(2e-6)] if fn is own else []))
    results = estimate([work])
    (row,) = results.rows
    assert (row.who, row.chip, row.kind, row.median_s) == ("yours", "H100", "estimate", 2e-6)
    assert "0.66 to 1.02 times" in results.notes[0]
    assert "on H100, ESTIMATED by its compiler" in text(results)


def test_no_compiler_is_a_sentence(monkeypatch) -> None:
    words = "gpu_report needs the compiler: install it"
    monkeypatch.setattr(REPORT, lambda *a, **k: FakeReport([], None, words))
    results = estimate([dataclasses.replace(sines((8, 128)), accelerator="gpu")])
    assert (results.rows, results.notes[-1]) == ([], words)


def test_kernels_for_a_chip_that_is_not_here_are_not_run(monkeypatch) -> None:
    monkeypatch.setattr("pallas_puzzles.speed.choose.estimate", lambda works, results, saved: results)
    results = measure_or_estimate([dataclasses.replace(sines((8, 128)), accelerator="tpu")])
    assert results.rows == []
    assert "the kernels are for a TPU, and there is none here" in results.notes[0]


# --- tables, files, two runs -----------------------------------------------------------------------------------------


@pytest.fixture
def results() -> Results:
    works = [sines((1024, 128), (4096, 128), bad=jnp.cos)]
    return measure(works, meter=FakeMeter(), chip=H200)


def test_the_table_fits_a_terminal(results) -> None:
    lines = text(results).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["1024x128", "f32", "yours", "10"] for line in lines)
    assert "1.10x" in text(results)
    assert "the time of a wrong answer means nothing" in " ".join(text(results).split())


def test_json_comes_back_and_csv_has_the_conditions_in_each_line(results, tmp_path) -> None:
    results.save(tmp_path / "a.json")
    assert read(tmp_path / "a.json").rows == results.rows
    lines = [*csv.DictReader(io.StringIO(results.to_csv()))]
    assert len(lines) == len(results.rows)
    assert all(line["jax"] == jax.__version__ for line in lines)
    with pytest.raises(ValueError, match=r"has to end in \.json, \.csv, \.svg"):
        results.save(tmp_path / "a.txt")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 0, "rows": []}', '{"version": 1, "rows": [{}]}'])
def test_a_file_with_something_else_is_refused(content, tmp_path) -> None:
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(ValueError, match="has no results of `puzzles bench --json`"):
        read(tmp_path / "old.json")


def test_the_picture_has_a_line_for_each_and_the_roof(results) -> None:
    svg = results.svg()
    words = "".join(ET.fromstring(svg).itertext())
    for expected in ("speed of light: the bandwidth of HBM", "yours", "XLA", "100%"):
        assert expected in words
    assert "bad" not in words
    assert svg.count("<circle") == 3  # two points of ours, and one beside the name
    assert "Nothing to draw" in Results().svg()
    assert "data:image/svg+xml" in results._repr_html_()


def scaled(results: Results, ratio: float) -> Results:
    def row(r: Row) -> Row:
        times = {name: getattr(r, name) and getattr(r, name) * ratio for name in ("median_s", "low_s", "high_s")}
        return dataclasses.replace(r, **times)

    return Results(dict(results.conditions), [row(r) for r in results.rows], [])


def test_only_what_is_beyond_the_noise_counts_as_a_change(results) -> None:
    assert [change.beyond_noise for change in changes(scaled(results, 1.02), results)] == [False] * 4
    assert [change.beyond_noise for change in changes(scaled(results, 1.05), results)] == [False] * 4  # spreads overlap
    slower = compared(scaled(results, 1.5), results)
    assert slower.count("slower: 1.50") == 4
    assert compared(scaled(results, 0.5), results).count("faster: 0.50") == 4
    other = scaled(results, 1)
    other.conditions["jax"] = "0.1"
    assert "jax: 0.1, now" in compared(results, other)
    assert "nothing in common" in compared(results, Results())


def refused(*words: str) -> str:
    outcome = CliRunner().invoke(app, ["bench", *words])
    return str(outcome.exception)


def test_bad_input_is_told_before_anything_runs(tmp_path) -> None:
    (tmp_path / "old.json").write_text("{}")
    answers = "solutions/gpu_basics.py"
    assert "has to end in .csv" in refused("gpu_basics/2", "--with", answers, "--csv", "table.txt")
    assert "there is no folder" in refused("gpu_basics/2", "--with", answers, "--json", str(tmp_path / "no" / "a.json"))
    assert "has no results" in refused("gpu_basics/2", "--with", answers, "--compare", str(tmp_path / "old.json"))
    assert "cannot be read" in refused("gpu_basics/2", "--with", answers, "--compare", str(tmp_path / "none.json"))


def test_what_was_saved_before_a_process_died_is_kept(results, tmp_path) -> None:
    path = tmp_path / "kept.json"
    dead = {"none": "The process was killed.", "printed": ""}
    assert benchmark.results_of(dead, path) is None
    results.save(path)
    found = benchmark.results_of(dead, path)
    assert found is not None
    assert found.rows == results.rows
    assert found.notes[-1] == "It did not get to its end. The process was killed. What was measured before is kept."
    assert benchmark.results_of({"results": json.loads(path.read_text())}, Path("none")).rows == results.rows
