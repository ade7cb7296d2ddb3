"""What ir/ and the interpreters in lens/ read of JAX, on the oldest and the newest: a failure names the attribute."""

import gc

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import source_info_util
from jax._src.interpreters import partial_eval
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc  # noqa: F401 # its primitives are compared, too

from pallas_puzzles.ir import capture as ir
from pallas_puzzles.ir import ops, program
from pallas_puzzles.lens import machine

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
ROWS, X = jax.ShapeDtypeStruct((16, 128), F32), np.zeros((16, 128), F32)
ARGS = np.array([1, 0], I32), np.int32(3), np.zeros((2, 16, 384), F32), X, X, X
VMEM, SMEM, SEMAPHORES = pltpu.VMEM((8, 128), F32), pltpu.SMEM((4,), I32), pltpu.SemaphoreType.DMA((2,))


def described(fn, *args):
    """The only call of a function, and its equation."""
    found = []
    ir.capture(fn, *args, on_call=lambda call, eqn, values: found.append((call, eqn)) or [X])
    (only,) = found
    return only


def cut_kernel(ids_ref, table_ref, window_ref, whole_ref, y_ref, o_ref, acc_ref, count_ref, sem_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = table_ref[...]

    @lambda body: pl.run_scoped(body, VMEM)
    def _(tmp_ref):
        tmp_ref[...] = acc_ref[...]
        acc_ref[...] = tmp_ref[...]

    o_ref[...] = jax.lax.fori_loop(0, ids_ref[0], lambda _, x: x * 2, window_ref[pl.ds(ids_ref[1], 8), :])


@jax.custom_vjp
def cut(ids, n, *arrays):
    window = pl.Element(16, (1, 2)), pl.Blocked(128)
    specs = [
        pl.BlockSpec((None, 8, 128), lambda i, j, ids: (ids[i], i, j)),
        pl.BlockSpec(window, lambda i, j, ids: (i, 0), pipeline_mode=pl.Buffered(3)),
        pl.BlockSpec((16, 128), lambda i, j, ids: (0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(memory_space=pl.ANY),
        pl.BlockSpec((8, 128), lambda i, j, ids: (i, 0)),
    ]
    grid_spec = pltpu.PrefetchScalarGridSpec(1, (2, n), specs[:4], specs[4], [VMEM, SMEM, SEMAPHORES])
    asked = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=1 << 20)
    options = {"input_output_aliases": {4: 0}, "compiler_params": asked, "name": "cut"}
    return pl.pallas_call(cut_kernel, ROWS, grid_spec=grid_spec, **options)(ids, *arrays)


cut.defvjp(lambda *args: (cut(*args), None), lambda kept, g: (None,) * len(ARGS))


def whole_kernel(x_hbm, o_hbm, x_ref, dma_ref, done_ref):
    pltpu.make_async_copy(x_hbm, x_ref, dma_ref).start()
    pltpu.make_async_copy(x_hbm, x_ref, dma_ref).wait()
    pl.semaphore_signal(done_ref, 1 + jax.lax.axis_index("core"))
    pl.semaphore_wait(done_ref, pl.semaphore_read(done_ref))
    y = pltpu.roll(pltpu.load(x_ref.at[0:8], mask=jnp.full((8, 128), True)), 1, 0)
    y = jax.lax.fori_loop(0, 3, lambda _, y: jax.checkpoint(jax.nn.relu)(y), y)
    pltpu.store(x_ref.at[0:8], y, mask=y > 0)


def whole(x):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    scratch = [pltpu.VMEM(x.shape, F32), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR]
    return pl.kernel(whole_kernel, out_type=ROWS, mesh=mesh, scratch_types=scratch, name="whole")(x)


def test_a_call_has_what_its_kernel_was_written_with():
    call, _ = described(jax.jit(cut), *ARGS)
    rows, columns, all_rows = (ir.Dim("blocked", size) for size in (8, 128, 16))
    assert {o.name: (o.role, o.shape, o.dtype, o.space, o.dims, o.buffer_count) for o in call.operands} == {
        "table_ref": ("in", (2, 16, 384), F32, "vmem", (ir.Dim("squeezed", 1), rows, columns), 2),
        "window_ref": ("in", (16, 128), F32, "vmem", (ir.Dim("element", 16, (1, 2)), columns), 3),
        "whole_ref": ("in", (16, 128), F32, "smem", (all_rows, columns), 2),
        "y_ref": ("in", (16, 128), F32, "any", (all_rows, columns), 2),
        "o_ref": ("out", (16, 128), F32, "vmem", (rows, columns), 2),
    }
    assert [o.name for o in call.operands if o.stays_whole and not o.in_hbm] == ["whole_ref"]
    assert (call.name, call.grid, call.dynamic_bounds, call.dynamic_axes) == ("cut", (2, 3), 1, (1,))
    assert (call.vmapped, call.grid_names, call.semantics) == ((), (), ("parallel", "arbitrary"))
    assert (call.aliases, call.vmem_limit_bytes) == ({3: 0}, 1 << 20)  # inputs are counted after the scalars
    assert (call.scalar_names, [(a.shape, a.dtype) for a in call.scalar_avals]) == (["ids_ref"], [((2,), I32)])
    scratch = {s.name: (s.shape, s.dtype, s.space) for s in call.scratch}
    assert scratch.pop("sem_ref") == ((2,), I32, "semaphore")
    assert scratch == {"acc_ref": ((8, 128), F32, "vmem"), "count_ref": ((4,), I32, "smem")}
    assert (call.where.text[:15], call.callers[0].text[:20]) == ("def cut_kernel(", "return pl.pallas_cal")
    assert ["lambda i, j" in ir.where_defined(o.index_map).text for o in call.ins[:3]] == [True] * 3
    assert [x.tolist() for x in call.scalars] == [[1, 0]]
    assert [x.shape for x in call.inputs] == [o.shape for o in call.ins]


def test_a_kernel_of_whole_arrays():
    call, _ = described(whole, X)
    assert (call.name, call.grid, call.grid_names, call.aliases) == ("whole", (1,), ("core",), {})
    arrays = [("x_hbm", "in", "hbm", (16, 128), None), ("o_hbm", "out", "hbm", (16, 128), None)]
    assert [(o.name, o.role, o.space, o.block, o.index_map) for o in call.operands] == arrays
    scratch = {s.name: s.space for s in call.scratch}
    assert scratch == {"x_ref": "vmem", "dma_ref": "semaphore", "done_ref": "semaphore"}


# What describe() does not read, and the tests above do not reach. Where, the type that is expected there, and what is
# read: a step of a path is an attribute, or a key of `params`.
ANY, PROGRAM = object, jec.Jaxpr
READ = [
    ("pallas_call", ANY, "primitive.bind primitive.get_bind_params"),
    ("pallas_call", bool, "primitive.multiple_results"),
    ("kernel", list, "eqns invars outvars constvars consts"),
    ("literal", ANY, "val aval.dtype"),
    ("ref", ANY, "aval.shape aval.dtype aval.memory_space"),
    ("program_id", int, "params.axis"),
    ("axis_index", str, "params.axis_name"),
    ("roll", ANY, "params.axis params.stride params.stride_axis"),
    ("cond", tuple, "params.branches"),
    ("scan", int, "params.length params.reverse"),
    ("scan", ANY, "params.ft_in.update"),
    ("while", int, "params.cond_nconsts params.body_nconsts"),
    ("while", PROGRAM, "params.cond_jaxpr params.body_jaxpr"),
    ("run_scoped scan jit remat2", PROGRAM, "params.jaxpr"),
    ("custom_jvp_call", PROGRAM, "params.call_jaxpr"),
    ("get swap dma_start dma_wait", ANY, "params.tree"),
    ("masked_load masked_swap semaphore_read semaphore_signal semaphore_wait", ANY, "params.args_tree"),
    ("dma_start", bool, "params.add"),
    ("indexer", tuple, "indices"),
    ("indexer", ANY, "get_indexer_shape_static"),
    ("slice", int, "size stride"),
    ("slice", jec.Var, "start"),
    ("source_info_util", ANY, "current xla_client.Traceback.get_traceback"),
    ("partial_eval", ANY, "trace_to_jaxpr.cache_clear"),
]
EACH = [(where, kind, path) for places, kind, paths in READ for where in places.split() for path in paths.split()]


@pytest.fixture(scope="module")
def things():
    """What the table has a name for: parts of the two kernels, and the first equation of each primitive in them."""
    call, eqn = described(jax.jit(cut), *ARGS)
    other, _ = described(whole, X)
    first = {e.primitive.name: e for c in (call, other) for _, e in ir.everywhere(c.kernel)}
    get = [e for e in ir.named(call.kernel, "get") if len(e.invars) > 1][-1]
    (indexer,) = jax.tree.unflatten(get.params["tree"], get.invars[1:])
    parts = {"kernel": call.kernel, "ref": get.invars[0], "literal": first["eq"].invars[1]}
    parts |= {"indexer": indexer, "slice": indexer.indices[0]}
    return first | parts | {"pallas_call": eqn, "source_info_util": source_info_util, "partial_eval": partial_eval}


@pytest.mark.parametrize(("where", "kind", "path"), EACH)
def test_an_attribute_is_there(things, where, kind, path):
    assert where in things, f"no primitive is called {where}"
    thing = things[where]
    for step in path.split("."):
        assert step in thing if isinstance(thing, dict) else hasattr(thing, step), f"{where} has no {path}: {step}"
        thing = thing[step] if isinstance(thing, dict) else getattr(thing, step)
    assert isinstance(thing, kind), f"{path} of {where} is {thing!r}, not {kind}"


def test_every_name_of_a_primitive_that_is_compared_exists():
    gc.unfreeze()  # what pytest has collected is out of sight of get_objects
    known = {each.name for each in gc.get_objects() if issubclass(type(each), jec.Primitive)}
    gc.freeze()
    rules = {name[4:] for name in dir(machine.Machine) if name.startswith("_do_")}
    tables = [ops.OPS, ops.TRANSCENDENTAL, ops.INLINED, ir.MOVES, program.NARROWED, rules]
    assert {*machine._SILENT}.union(*tables) - known == set()
