"""The Pallas front end for TPU, and one sentence for each of its refusals: what is wrong, and what would do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles.targets.tpu.lowering import refusal

F32 = jnp.float32
X = np.zeros((32, 256), np.float32)
CONSTANT = jnp.arange(256, dtype=F32)


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def whole(kernel, **options):
    """One step, whole arrays; the output is like the first input."""
    return lambda *xs: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(xs[0].shape, xs[0].dtype), **options)(*xs)


def blocked(block, shape=None, dtype=F32, **where):
    """A copy of an array of `shape` by blocks, and the array. None in a block: squeezed."""
    shape = shape or (32, 256)
    spec = pl.BlockSpec(block, lambda *i: i, **where)
    grid = tuple(-(-n // (b or 1)) for n, b in zip(shape, block, strict=True))

    def fn(x):
        return pl.pallas_call(copy_kernel, grid=grid, in_specs=[spec], out_specs=spec, out_shape=x)(x)

    return fn, jnp.zeros(shape, dtype)


def computed(compute):
    """A kernel that stores compute(its block)."""

    def kernel(x_ref, o_ref):
        o_ref[...] = compute(x_ref[...])

    return whole(kernel)


@pytest.mark.parametrize(
    ("block", "shape", "dtype"),
    [
        ((8, 128), (32, 256), F32),
        ((32, 64), (64, 64), F32),  # 64 is the whole dimension
        ((None, 8, 128), (4, 32, 256), F32),
        ((1000,), (1000,), F32),
        ((1024,), (5000,), F32),
        ((128,), (5000,), F32),
        ((256,), (5000,), jnp.bfloat16),
    ],
)
def test_taken(block, shape, dtype):
    fn, x = blocked(block, shape, dtype)
    assert refusal(fn, x) is None


@pytest.mark.parametrize(
    ("block", "shape", "dtype", "fits"),
    [
        ((4, 64), (32, 256), F32, (8, 128)),
        ((4, 256), (32, 256), F32, (8, 256)),
        ((32, 100), (32, 256), F32, (32, 128)),
        ((8, 100), (32, 120), F32, (8, 120)),
        ((2, 128), (4, 256), F32, (4, 128)),
        ((1, 1, 128), (2, 4, 128), F32, (1, 4, 128)),
        ((None, None, 128), (2, 4, 128), F32, (1, 4, 128)),
        ((8,), (32,), F32, (32,)),
        ((100,), (1000,), F32, (128,)),
        ((500,), (5000,), F32, (512,)),
        ((128,), (5000,), jnp.bfloat16, (256,)),
    ],
)
def test_a_block_that_does_not_fit(block, shape, dtype, fits):
    """The sentence names operand, block and array, and the block that it proposes is taken."""
    fn, x = blocked(block, shape, dtype)
    refused = refusal(fn, x)
    assert refused.sentence.startswith(f"x_ref has blocks of {block} in an array of {shape}, and on a TPU ")
    assert f"{fits} would do" in refused.sentence
    rule = "from 256 up" if dtype is jnp.bfloat16 else "from 128 up" if len(block) == 1 else "multiples of 8 and 128"
    assert rule in refused.sentence
    assert "Pallas TPU lowering" in refused.detail
    assert "pl.pallas_call" in refused.line.text
    taken, x = blocked(fits, shape, dtype)
    assert refusal(taken, x) is None


def test_the_operand_at_fault_is_named():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(1)

    def fn(x, *, bm):
        return pl.pallas_call(
            kernel,
            grid=(x.shape[0] // bm,),
            in_specs=[pl.BlockSpec((bm, x.shape[1]), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((bm,), lambda i: (i,)),
            out_shape=jax.ShapeDtypeStruct(x.shape[:1], x.dtype),
        )(x)

    sentence = refusal(fn, X, bm=8).sentence
    assert sentence.startswith("o_ref has blocks of (8,) in an array of (32,)")
    assert "(32, 1) with blocks of (8, 1)" in sentence
    assert refusal(fn, X, bm=32) is None


def test_scalars_in_smem_by_blocks():
    def kernel(s_ref, o_ref):
        o_ref[...] = jnp.full_like(o_ref, s_ref[0, 0])

    def fn(s):
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec((1, 1), lambda i: (i, 0), memory_space=pltpu.SMEM)],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((32, 128), F32),
        )(s)

    sentence = refusal(fn, np.zeros((4, 1), np.float32)).sentence
    assert sentence.startswith("s_ref has blocks of (1, 1) in an array of (4, 1)")
    assert "pl.BlockSpec(memory_space=pltpu.SMEM)" in sentence


def scalar_store(x_ref, o_ref):
    o_ref[0, 0] = jnp.sum(x_ref[...])


def scalar_output(x_ref, o_ref):
    o_ref[()] = jnp.sum(x_ref[...])


def gather_rows(x_ref, i_ref, o_ref):
    o_ref[...] = x_ref[i_ref[...]]


def captures(x_ref, o_ref):
    o_ref[...] = x_ref[...] + CONSTANT


def adds_to_a_ref(x_ref, o_ref):
    o_ref[...] = x_ref + 1


def python_if(x_ref, o_ref):
    if x_ref[0, 0] > 0:
        o_ref[...] = x_ref[...]


def smem_rows(x_ref, o_ref):
    o_ref[0] = x_ref[0]


def summed(x):
    return jnp.cumsum(x, axis=1)


def halves(x):
    return x.at[0].set(0.0)


def stacked(x):
    return jax.lax.scan(lambda carry, row: (carry + row, carry), x[0], x)[1]


HBM = pl.BlockSpec(memory_space=pl.ANY)
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
REFUSED = {
    "missing": (computed(summed), "`cumsum` does not exist in a TPU kernel: multiply by a triangular", "jnp.cumsum"),
    "sort": (computed(lambda x: jnp.sort(x)), "`sort` does not exist in a TPU kernel", "jnp.sort"),
    "scatter": (computed(halves), "`scatter` does not exist in a TPU kernel: store into a slice", "x.at[0]"),
    "reversed": (computed(lambda x: x[::-1]), "`rev` does not exist in a TPU kernel", "x[::-1]"),
    "rare": (computed(lambda x: jnp.cbrt(x)), "`cbrt` does not exist in a TPU kernel: write it with", "jnp.cbrt"),
    "gather": (whole(gather_rows), "a TPU kernel cannot gather: take one row at a time", "x_ref[i_ref[...]]"),
    "captured": (whole(captures), "array from outside: pass it as an input", "captures(x_ref"),
    "scalar store": (whole(scalar_store), "compute the whole block at once", "o_ref[0, 0] ="),
    "scalar output": (
        lambda x: pl.pallas_call(scalar_output, out_shape=jax.ShapeDtypeStruct((), F32))(x),
        "o_ref has no dimension",
        "pl.pallas_call(scalar_output",
    ),
    "HBM load": (whole(copy_kernel, in_specs=[HBM]), "x_ref stays in HBM", "o_ref[...] = x_ref[...]"),
    "HBM store": (whole(copy_kernel, out_specs=HBM), "o_ref stays in HBM", "o_ref[...] = x_ref[...]"),
    "SMEM vector": (whole(smem_rows, in_specs=[SMEM]), "SMEM holds single numbers", "o_ref[0] = x_ref[0]"),
    "ref as array": (whole(adds_to_a_ref), "read it first, x_ref[...]", "x_ref + 1"),
    "Python if": (whole(python_if), "@pl.when", "if x_ref[0, 0] > 0"),
    "scan": (computed(stacked), "use lax.fori_loop, and load and store each step", "jax.lax.scan"),
    "step": (computed(lambda x: jnp.repeat(x[::2], 2, 0)), "x_ref[pl.ds(0, size, stride=2)]", "x[::2]"),
    "float range": (computed(lambda x: x + jnp.arange(256.0)), "A TPU counts in integers", "jnp.arange(256.0)"),
    "half": (
        computed(lambda x: x.astype("float16").astype(F32)),
        "float16 here, which no TPU has: use bfloat16",
        "float16",
    ),
    "complex": (computed(lambda x: (x * 1j).real), "complex64 here, which no TPU has", "1j"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_refused(mistake):
    fn, says, text = REFUSED[mistake]
    args = (X, np.zeros(32, np.int32)) if mistake == "gather" else (X,)
    refused = refusal(fn, *args)
    assert says in refused.sentence
    assert refused.sentence.endswith(".")
    assert "\n" not in refused.sentence + refused.detail
    assert "file an issue" not in refused.detail
    assert refused.line.file == __file__
    assert text in refused.line.text


def test_an_array_of_a_type_that_no_tpu_has():
    refused = refusal(whole(copy_kernel), X.astype(np.float16))
    assert refused.sentence == "x_ref is float16, which no TPU has: use bfloat16 or float32."


def test_64_bit_types():
    fn, x = blocked((8, 128))
    with jax.enable_x64(True):
        assert "64-bit types are switched on (jax_enable_x64)" in refusal(fn, x).sentence
    assert refusal(fn, x) is None


def test_what_nobody_foresaw_is_passed_on():
    """A message that no pattern knows: the type and the first line that means something."""
    fn = whole(copy_kernel, grid=(2, 2), compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)))
    sentence = refusal(fn, X).sentence
    assert sentence.startswith("The TPU front end refuses this kernel: ValueError: ")
    assert "dimension semantics" in sentence


def suggested_scalar_store(x_ref, o_ref):
    o_ref[0:1, 0:1] = jnp.full((1, 1), jnp.sum(x_ref[...]))


def suggested_row_store(x_ref, o_ref):
    o_ref[0:1, :] = x_ref[0:1, :]


def suggested_add(x_ref, o_ref):
    o_ref[0:1, :] += x_ref[0:1, :]


def suggested_stride(x_ref, o_ref):
    o_ref[pl.ds(0, 16)] = x_ref[pl.ds(0, 16, stride=2)]


def suggested_range(x_ref, o_ref):
    o_ref[...] = x_ref[...] + jax.lax.broadcasted_iota(jnp.int32, (32, 256), 1).astype(F32)


def suggested_triangle(x_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], jnp.triu(jnp.ones((256, 256), F32)))


def suggested_loop(x_ref, o_ref):
    def step(i, carry):
        o_ref[pl.ds(i, 1)] = carry + x_ref[pl.ds(i, 1)]
        return carry + x_ref[pl.ds(i, 1)]

    jax.lax.fori_loop(0, 32, step, jnp.zeros((1, 256), F32))


def suggested_copy(x_ref, o_ref):
    pl.run_scoped(lambda buf_ref: pltpu.sync_copy(x_ref, buf_ref), pltpu.VMEM((32, 256), F32))


SUGGESTED = [
    whole(suggested_scalar_store),
    whole(suggested_row_store),
    whole(suggested_add),
    whole(suggested_stride),
    whole(suggested_range),
    whole(suggested_triangle),
    whole(suggested_loop),
    whole(suggested_copy, in_specs=[HBM]),
]


@pytest.mark.parametrize("fn", SUGGESTED)
def test_what_the_sentences_suggest_is_taken(fn):
    assert refusal(fn, X) is None


def test_the_simulator_being_on_changes_nothing():
    from pallas_puzzles.targets.simulate import tpu_simulation

    fn, x = blocked((4, 64))
    with tpu_simulation():
        assert refusal(fn, x) is not None


def test_a_pipeline_inside_a_kernel_is_taken():
    spec = pl.BlockSpec((8, 256), lambda i: (i, 0))

    def kernel(x_ref, o_ref):
        pltpu.emit_pipeline(copy_kernel, grid=(4,), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    assert refusal(whole(kernel, in_specs=[HBM], out_specs=HBM), X) is None
