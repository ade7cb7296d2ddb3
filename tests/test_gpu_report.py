"""The GPU compiler and the report on a kernel: its figures against calculations by hand, and what it refuses."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gpu_compiled import copied, matmul, needs_compiler, shape, softmax
from pallas_puzzles import gpu_report, normal
from pallas_puzzles.targets.gpu import compiler, lowering, sass, work
from pallas_puzzles.targets.gpu.chips import CHIPS, LAUNCH_S, REACHED, chip, chips, occupancy
from pallas_puzzles.text import COLUMNS, LINES
from pallas_puzzles.view.gpu_report import KernelReport
from pallas_puzzles.view.gpu_report import gpu_report as read

BF16 = jnp.bfloat16
H100 = CHIPS["h100"]
SQUARE = [shape(512, 512, dtype=BF16)] * 2


def only_kernel(report) -> KernelReport:
    assert report, report.refusal or report.unavailable
    (kernel,) = report.kernels
    return kernel


@pytest.fixture(scope="session")
def product():
    """A matrix product of 8 x 8 CTAs, compiled once."""
    return gpu_report(matmul, *SQUARE)


# --- what needs no compiler ------------------------------------------------------------------------------------------


def followed(fn, *args):
    program, _ = lowering.exported(fn, [shape(*x.shape, dtype=x.dtype) for x in args], H100)
    (call,) = work.calls(program, args)
    assert not call.notes
    return call


def test_the_work_of_a_matrix_product_by_hand():
    call = followed(lambda a, b: matmul(a, b, tm=64, tn=128), shape(256, 512, dtype=BF16), shape(512, 384, dtype=BF16))
    assert call.grid == {"i": 4, "j": 3}
    assert call.mean.tensor_flops == {"bfloat16": 2 * 64 * 128 * 512}
    assert call.mean.loaded == {0: 64 * 512 * 2, 1: 512 * 128 * 2}
    assert call.mean.stored == {2: 64 * 128 * 2}


def test_loops_of_a_length_that_only_data_knows_are_followed_where_the_data_is_there():
    def summed(x, counts):
        def kernel(x_gmem, counts_gmem, o_gmem):
            row = jax.lax.axis_index("row")
            zero = plgpu.layout_cast(jnp.zeros(256, jnp.float32), plgpu.Layout.WG_STRIDED((256,), 2))
            o_gmem[row] = jax.lax.fori_loop(0, counts_gmem[row], lambda i, s: s + x_gmem[i], zero)

        return plgpu.kernel(kernel, out_type=shape(2, 256), grid=(2,), grid_names=("row",))(x, counts)

    x, counts = shape(64, 256), np.array([10, 30], np.int32)
    program, _ = lowering.exported(summed, [x, shape(2, dtype=jnp.int32)], H100)
    (known,) = work.calls(program, [x, counts])
    (unknown,) = work.calls(program, [x, shape(2, dtype=jnp.int32)])
    assert known.mean.loaded[0] == 20 * 256 * 4
    assert known.most.loaded[0] == 30 * 256 * 4
    assert not known.notes
    assert any("data says so" in note for note in unknown.notes)


def test_a_line_that_is_called_before_a_loop_and_in_it_has_two_copies():
    def power(x):
        return jnp.exp2(x)

    def summed(x):
        def kernel(x_gmem, o_gmem):
            o_gmem[...] = jax.lax.fori_loop(1, 8, lambda i, s: s + power(x_gmem[i]), power(x_gmem[0]))

        return plgpu.kernel(kernel, out_type=shape(256))(x)

    call, at = followed(summed, shape(8, 256)), (__file__, power.__code__.co_firstlineno + 1)
    assert call.lines(lambda place: place == at, call.mean) == {at: (1 + 7) / 2}


@pytest.mark.parametrize(
    ("fn", "args", "words", "line"),
    [
        (lambda a, b: matmul(a, b, tm=32), SQUARE, "wgmma makes 64 rows at a time", "plgpu.wgmma(acc_ref"),
        (lambda x: copied(x, bm=256), [shape(256, 512)], "asks for 1048584 bytes of SMEM", "jax.lax.axis_index"),
        (lambda x: x.nothing, [shape(8)], "nothing", "x.nothing"),
        (lambda x: x * jax.devices()[0].core_count, [shape(8)], "how many SMs there are", "core_count"),
    ],
)
def test_what_the_front_end_refuses_is_a_sentence_with_the_readers_line(fn, args, words, line):
    refusal = gpu_report(fn, *args).refusal
    assert words in refusal.sentence
    assert line in refusal.line.text


def test_a_primitive_that_does_not_exist_on_a_gpu_is_named_with_its_line():
    def ordered(x):
        def kernel(x_gmem, o_gmem):
            o_gmem[...] = jnp.sort(x_gmem[...])

        return plgpu.kernel(kernel, out_type=x, grid=(1,), grid_names=("i",))(x)

    refusal = gpu_report(ordered, shape(128)).refusal
    assert "`sort`" in refusal.sentence
    assert "jnp.sort" in refusal.line.text


def test_a_kernel_for_tpus_is_told_apart():
    refusal = gpu_report(lambda x: pl.pallas_call(lambda x_ref, o_ref: None, out_shape=x)(x), shape(8, 128)).refusal
    assert "plgpu.kernel" in refusal.sentence


def test_without_the_compiler_a_report_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    report = gpu_report(softmax, shape(64, 256))
    assert not report
    assert "--extra gpu-compiler" in str(report)
    assert gpu_report(lambda x: x.nothing, shape(8)).refusal, "the front end needs no compiler"


def test_a_gpu_that_is_not_known():
    with pytest.raises(ValueError, match="h100, h200, b200"):
        gpu_report(softmax, shape(64, 256), chip="a100")
    assert chips("b200,h100,b200") == [chip("b200"), chip("H100")]
    with pytest.raises(ValueError, match="no GPU is named"):
        chips(" ,")


def test_what_is_not_written_yet():
    report = read(softmax, unwritten=["kernel"])
    assert "kernel is still to be written" in str(report)


def test_occupancy_by_hand():
    assert occupancy(80, 128, 2048).by == {"registers": 6, "SMEM": 76, "threads": 16, "CTAs": 32}
    assert occupancy(168, 384, 229_440).ctas == 1
    assert occupancy(168, 384, 229_440).limits == ["registers", "SMEM"]
    assert occupancy(32, 128, 0, tmem_columns=256).ctas == 2


UNROLLED = """
	//## File "/home/reader/k.py", line 7
        /*0000*/                   MOV R0, RZ ;
.L_x_0:
        /*0010*/                   FFMA R4, R4, R5, R6 ;
        /*0020*/                   UIADD3 UR4, UR4, -0x8, URZ ;
        /*0030*/                   UISETP.NE.AND UP0, UPT, UR4, URZ, UPT ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
	//## File "/home/reader/k.py", line 8
        /*0050*/              @!P1 HGMMA.64x128x16.F32.BF16 R88, gdesc[UR20].tnspB, R88 ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP ;
"""


def test_sass_is_read_with_its_lines_and_unrolled_loops():
    instructions = [*sass.read(UNROLLED)]
    assert [i.name for i in instructions] == ["MOV", "FFMA", "UIADD3", "UISETP", "BRA", "HGMMA", "EXIT"]
    assert [i.copies for i in instructions] == [1, 8, 8, 8, 8, 1, 1]
    assert instructions[0].where == ("/home/reader/k.py", 7)
    assert instructions[5].where == ("/home/reader/k.py", 8)
    assert instructions[5].kind == "tensor core"


# --- what the compiler makes of kernels ------------------------------------------------------------------------------


@needs_compiler
def test_a_matrix_product_by_hand(product):
    kernel = only_kernel(product)
    assert kernel.name == "kernel"
    assert kernel.grid == {"i": 8, "j": 8}
    assert (kernel.ctas, kernel.threads, kernel.cluster) == (64, 128, 1)
    assert kernel.smem_bytes == 3 * 64 * 64 * 2 + 8
    assert kernel.opcodes["HGMMA"] == 64 // 16
    assert kernel.opcodes["UTMALDG"] == 2
    assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0
    assert 0 < kernel.registers <= 255
    assert kernel.instructions == sum(line.instructions for line in kernel.lines)
    assert kernel.flops == 2 * 512**3
    assert kernel.gmem_bytes == 2 * 8 * 512 * 512 * 2 + 512 * 512 * 2
    assert kernel.hbm_bytes == 3 * 512 * 512 * 2
    assert kernel.times["HBM"] == pytest.approx(kernel.hbm_bytes / H100.hbm_bytes_per_s)
    busiest = 2 * 64 * 64 * 512 / (H100.flops_per_s() / H100.sms)
    assert kernel.times["tensor"] == pytest.approx(busiest)
    longest = max(seconds / REACHED.get(name, 1) for name, seconds in kernel.times.items())
    assert kernel.time_s == pytest.approx(longest + LAUNCH_S)


@needs_compiler
def test_instructions_stand_at_the_readers_lines_as_often_as_they_run(product):
    lines = {line.line.text.partition("(")[0]: line for line in only_kernel(product).lines if line.line}
    (product_line,) = [line for line in lines.values() if "HGMMA" in line.opcodes]
    assert product_line.opcodes["HGMMA"] == 4
    assert product_line.runs == 512 // 64
    assert lines["plgpu.wgmma"].runs == 512 // 64
    assert lines["plgpu.copy_smem_to_gmem"].opcodes["UTMASTG"] == 1
    assert lines["plgpu.copy_smem_to_gmem"].runs == 1


@needs_compiler
def test_a_report_fits_on_a_screen_and_has_every_figure(product):
    kernel, text = only_kernel(product), str(product)
    assert len(text.splitlines()) <= LINES
    assert max(map(len, text.splitlines())) <= COLUMNS
    for told in (f"{kernel.registers} per thread", "64 CTAs", "HGMMA 4", "gpu_compiled.py:", "(an estimate)"):
        assert told in text
        assert told in product._repr_html_()


@needs_compiler
def test_what_spills_is_said_at_the_readers_line():
    kernel = only_kernel(gpu_report(matmul, *SQUARE, tm=128, tn=256))
    assert kernel.spill_store_bytes > 0
    serialised = [line for words, line in kernel.warnings if "serialized" in words]
    assert "plgpu.wgmma" in serialised[0].text


@needs_compiler
def test_a_kernel_that_was_compiled_before_and_twice_in_a_program():
    """The compiler prints a kernel only once."""
    x = normal((64, 256))
    once = only_kernel(gpu_report(softmax, x))
    several = gpu_report(lambda x: softmax(softmax(x) + 1), x)
    assert [kernel.registers for kernel in several.kernels] == [once.registers] * 2
    assert several.fusions == 1
    assert "together" in str(several)


@needs_compiler
def test_plain_jax_compiles_and_has_no_figures():
    report = gpu_report(lambda x: x + 1, shape(64, 256))
    assert report
    assert "no plgpu.kernel" in str(report)


@needs_compiler
def test_instructions_of_another_generation_are_refused_in_a_sentence():
    refusal = gpu_report(matmul, *SQUARE, chip="b200").refusal
    assert "The B200 has no `wgmma`" in refusal.sentence
    assert "plgpu.ACC" in refusal.line.text, "where the first wgmma instruction comes from"


@needs_compiler
def test_a_killed_compiler_is_replaced(product):
    child = compiler._child(H100)
    if child._process is None:
        pytest.skip("nothing was compiled in this process")
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    assert only_kernel(gpu_report(softmax, shape(64, 256))).registers > 0
