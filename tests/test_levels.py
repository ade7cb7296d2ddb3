"""`compare`: the compiler's program, read; eager runs, counted; tables with and without the compiler. No times."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_puzzles import compare, op_by_op
from pallas_puzzles.ir.eager import operations, products
from pallas_puzzles.speed import levels
from pallas_puzzles.speed.results import Results, Row
from pallas_puzzles.targets.tpu import compiler
from pallas_puzzles.targets.tpu.chips import CHIPS
from pallas_puzzles.targets.tpu.hlo import instructions
from tpu_kernels import needs_compiler, remembered, shape

HLO = """
HloModule jit_f

%same (p.9: f32[8,1024]) -> f32[8192] {
  %p.9 = f32[8,1024]{1,0:T(8,128)} parameter(0)
  ROOT %flat = f32[8192]{0:T(1024)} bitcast(%p.9)
}

%sums (p.8: f32[8,1024]) -> f32[1024] {
  %p.8 = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %inner = f32[8192]{0:T(1024)} fusion(%p.8), kind=kLoop, calls=%same
  ROOT %sum = f32[1024]{0:T(1024)S(1)} reduce(%inner), to_apply=%add
}

%slices (p.0: f32[8,1024], p.1: s32[]) -> f32[1,1024] {
  %p.0 = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  ROOT %piece = f32[1,1024]{1,0:T(8,128)} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,1024}
}

%updates (p.2: f32[8,1024], p.3: f32[1,1024]) -> f32[8,1024] {
  %p.2 = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %p.3 = f32[1,1024]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %new = f32[8,1024]{1,0:T(8,128)} dynamic-update-slice(%p.2, %p.3)
}

%body (c: (s32[], f32[8,1024])) -> (s32[], f32[8,1024]) {
  %c = (s32[], f32[8,1024]) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%c), index=0
  %x = f32[8,1024]{1,0:T(8,128)} get-tuple-element(%c), index=1
  %read = f32[1,1024]{1,0:T(8,128)S(1)} fusion(%x, %i), kind=kLoop, calls=%slices, "estimated_cycles":"10"
  %write = f32[8,1024]{1,0:T(8,128)} fusion(%x, %read), kind=kLoop, calls=%updates, "estimated_cycles":"20"
  ROOT %t = (s32[], f32[8,1024]) tuple(%i, %write)
}

%condition (c.1: (s32[], f32[8,1024])) -> pred[] {
  %c.1 = (s32[], f32[8,1024]) parameter(0)
  %bound = s32[]{:T(128)} constant(5)
}

ENTRY %main (a: f32[8,1024], n: s32[]) -> f32[8,1024] {
  %a = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %n = s32[]{:T(128)S(6)} parameter(1)
  %there = ((f32[8,1024]{1,0:T(8,128)(2,1)}), f32[8,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) slice-start(%a)
  %here = f32[8,1024]{1,0:T(8,128)S(1)} slice-done(%there)
  %both = f32[8,1024]{1,0:T(8,128)} add(%here, %a), backend_config={"estimated_cycles":"7"}
  %seen = f32[1024]{0:T(1024)S(1)} fusion(%both), kind=kOutput, calls=%sums, "estimated_cycles":"3"
  %k = f32[8,1024]{1,0:T(8,128)} custom-call(%both), custom_call_target="tpu_custom_call"
  %s = (s32[], f32[8,1024]) tuple(%n, %k)
  %loop = (s32[], f32[8,1024]) while(%s), condition=%condition, body=%body
  ROOT %out = f32[8,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
WHOLE, ROW = 8 * 1024 * 4, 1024 * 4


def test_a_program_is_read() -> None:
    """By hand: VMEM costs nothing, a slice costs the slice, an update what is written, a loop its five rounds."""
    told = {each.name: (each.hbm_bytes, each.cycles, each.times) for each in instructions(HLO)}
    assert told == {
        "there": (WHOLE, None, 1),
        "both": (2 * WHOLE, 7, 1),
        "seen": (WHOLE, 3, 1),
        "k": (2 * WHOLE, None, 1),
        "read": (ROW, 10, 5),
        "write": (ROW, 20, 5),
    }
    assert [each.name for each in instructions(HLO) if each.is_kernel] == ["k"]
    assert [each.name for each in instructions(HLO) if each.copies] == ["there"]
    endless = instructions(HLO.replace("constant(5)", "parameter(1)"))
    assert {str(each.times) for each in endless} == {"1.0", "nan"}
    with pytest.raises(ValueError, match="format has changed"):
        instructions("HloModule something else")


def rows_of_softmax(x):
    e = jnp.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_an_eager_run_is_counted() -> None:
    found = operations(rows_of_softmax, [shape(64, 1024)])
    whole, column = 64 * 1024 * 4, 64 * 4
    names = [each.name for each in found]
    assert names == ["reduce_max", "sub", "exp", "reduce_sum", "div"], "keepdims=True is no program of its own"
    assert [each.moved_bytes for each in found] == [
        whole + column, 2 * whole + column, 2 * whole, whole + column, 2 * whole + column,
    ]  # fmt: skip
    assert found[names.index("exp")].held_bytes == 2 * whole, "x - max still exists"
    assert found[names.index("div")].held_bytes == whole + column, "the result itself is not counted"
    x = jax.random.normal(jax.random.key(0), (64, 1024))
    assert jnp.array_equal(found[names.index("exp")].run(x)[0], jnp.exp(x))


def test_matrix_products_are_counted_in_loops_too() -> None:
    def fn(x, w, image, filters):
        y = jax.lax.map(lambda row: row @ w, x)
        return y, jax.lax.conv_general_dilated(
            image, filters, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, w, image = shape(5, 8, 16), shape(16, 32), shape(2, 16, 16, 3, dtype=jnp.bfloat16)
    found = products(fn, [x, w, image, shape(4, 4, 3, 7, dtype=jnp.bfloat16)])
    assert found == {"float32": 5 * 2 * 8 * 16 * 32, "bfloat16": 2 * (2 * 4 * 4) * (4 * 4 * 3) * 7}


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x, bm=256):
    block = pl.BlockSpec((bm, x.shape[1]), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double_kernel, grid=(x.shape[0] // bm,), in_specs=[block], out_specs=block, out_shape=out)(x)


def scattered(x, where):
    return jnp.zeros_like(x).at[where].add(x)


def broken(x):
    return x @ x


@needs_compiler
@remembered
def test_levels_of_any_function() -> None:
    x = shape(2048, 1024)
    whole = 2048 * 1024 * 4
    found = compare({"eager": op_by_op(lambda x: 2 * jnp.exp(x)), "kernel": double, "wrong": broken}, x, tpu="v5e")
    eager, kernel, wrong = found.rows
    assert (eager.hbm_bytes, eager.temporary_bytes, eager.kernels) == (4 * whole, whole, 0), "each operation in and out"
    assert (kernel.hbm_bytes, kernel.temporary_bytes, kernel.kernels, kernel.instructions) == (2 * whole, 0, 1, 1)
    assert kernel.floor_s == pytest.approx(2 * whole / CHIPS["v5e"].hbm_bytes_per_s)
    assert kernel.time_s is not None
    assert kernel.floor_s is not None
    assert kernel.time_s >= kernel.floor_s
    assert (wrong.hbm_bytes, wrong.time_s) == (None, None)
    assert "TypeError" in wrong.problem
    words = str(found)
    assert "~16 " in words
    assert "?" in words
    assert "TypeError" in words
    assert 'title="unknown"' in found._repr_html_()
    (row,) = compare({"scatter": scattered}, x, jax.ShapeDtypeStruct((2048,), jnp.int32), tpu="v5e").rows
    assert row.time_s is None
    assert "no cycles for" in row.problem


def test_without_the_compiler(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "missing", lambda: "the TPU compiler is not installed: get it")
    monkeypatch.setattr(levels.curriculum, "course_folder", lambda: tmp_path)
    monkeypatch.setattr(levels, "unwritten", lambda fn: [])
    known = [
        dataclasses.asdict(levels.Level(name, chip, hbm_bytes=3 << 20))
        for name in ("a", "b")
        for chip in ("v5e", "v6e")
    ]
    (tmp_path / "cases").mkdir()
    told = {"conditions": {"jax": "1.2.3"}, "figures": {"copies": known}}
    (tmp_path / "cases" / "demo.json").write_text(json.dumps(told))
    none = compare({"a": double}, shape(256, 1024))
    assert not none
    assert "not installed: get it" in str(none)
    found = compare({"a": double}, shape(256, 1024), tpu="v5e", made="demo/copies")
    (row,) = found.rows
    assert (row.name, row.chip, row.hbm_bytes) == ("a", "v5e", 3 << 20), "what was asked for, and no more"
    assert "made beforehand by the course, with its own solutions, jax 1.2.3" in " ".join(str(found).split())
    assert "made beforehand by the course, with its own solutions, jax 1.2.3" in found._repr_html_()
    assert "a *" in str(found)
    assert not compare({"a": double}, shape(256, 1024), made="demo/nothing").rows


def test_a_level_with_an_empty_hole_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "unwritten", lambda fn: ["double_kernel"] if fn is double else [])
    monkeypatch.setattr(compiler, "missing", lambda: "none")
    found = compare({"mine": double}, shape(256, 1024))
    assert "mine is missing: double_kernel is still to be written." in str(found)


def test_what_is_measured_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "missing", lambda: "none")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def fake(works):
        (work,) = works
        assert work.own == "jit", "what runs op by op is a peer"
        assert isinstance(work.peers["op by op"], levels.OpByOp)
        return Results(rows=[Row("", "", "", who, "H200", "measured", median_s=2e-6) for who in ("jit", "op by op")])

    monkeypatch.setattr(levels, "measure", fake)
    found = compare(
        {"op by op": op_by_op(rows_of_softmax), "jit": rows_of_softmax, "for a TPU": double}, shape(256, 1024)
    )
    assert [(row.name, row.kind, row.time_s) for row in found.rows] == [
        ("op by op", "measured", 2e-6),
        ("jit", "measured", 2e-6),
    ]
    assert "on a H200, measured here" in str(found)
    assert "=2 us" in str(found)
