"""What ir/, the interpreters in lens/ and targets/gpu read of JAX, on the oldest and the newest: a failure names the
attribute."""

import gc
import importlib
import inspect
import logging
import os
import sys

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import inline_ptx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import PartitionSpec as P

from pallas_puzzles.ir import asked, eager, folded, gpu_program, gpu_reader, meshes, ops, program
from pallas_puzzles.ir import capture as ir
from pallas_puzzles.ir.gpu import as_on_gpu, describe_gpu
from pallas_puzzles.lens import machine
from pallas_puzzles.targets import simulate

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
ROWS, X = jax.ShapeDtypeStruct((16, 128), F32), np.zeros((16, 128), F32)
ARGS = np.array([1, 0], I32), np.int32(3), np.zeros((2, 16, 384), F32), X, X, X
VMEM, SMEM, SEMAPHORES = pltpu.VMEM((8, 128), F32), pltpu.SMEM((4,), I32), pltpu.SemaphoreType.DMA((2,))
DMA, HBM = pltpu.SemaphoreType.DMA, pl.BlockSpec(memory_space=pl.ANY)


def too_old(since):
    """Whether this JAX is older than a version, such as 0.12."""
    return tuple(map(int, jax.__version__.split(".")[:2])) < tuple(map(int, since.split(".")))


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
    count_ref[0] = pl.num_programs(1)


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
    scratch = [pltpu.VMEM(x.shape, F32), DMA, pltpu.SemaphoreType.REGULAR]
    return pl.kernel(whole_kernel, out_type=ROWS, mesh=mesh, scratch_types=scratch, name="whole")(x)


def piped(x):
    """A pipeline inside of a kernel, which is one equation."""
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))

    def kernel(x_hbm, o_hbm):
        pltpu.emit_pipeline(pltpu.sync_copy, grid=(2,), in_specs=[rows], out_specs=[rows])(x_hbm, o_hbm)

    return pl.pallas_call(kernel, ROWS, in_specs=[HBM], out_specs=HBM)(x)


def seen_kernel(x_ref, y_ref, o_ref, sem_ref):
    """Refs in another shape, with another type, in part, and by number."""
    o_ref[...] = x_ref.reshape(8, 256)[...].reshape(16, 128)
    o_ref[...] = x_ref.bitcast(I32)[...].astype(F32) + pltpu.bitcast(y_ref[...], F32)
    jax.ref.addupdate(o_ref, ..., x_ref[...])
    pltpu.sync_copy(x_ref.at[0:8], o_ref.at[0:8])
    pltpu.async_copy(pl.select_ref(y_ref[0, 0], x_ref, o_ref), o_ref, sem_ref).wait()


def seen(x, y):
    return pl.pallas_call(seen_kernel, ROWS, scratch_shapes=[DMA])(x, y)


def remote_kernel(x_ref, o_ref, sent_ref, came_ref):
    pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id={"x": 0})
    pltpu.make_async_remote_copy(x_ref, o_ref, sent_ref, came_ref, device_id={"x": 0}).start()


def spread(x):
    """On several devices: a kernel that copies to others, and each lax collective."""
    asked_for = pltpu.CompilerParams(collective_id=3)
    options = {"in_specs": [HBM], "out_specs": HBM, "scratch_shapes": [DMA, DMA], "compiler_params": asked_for}
    pl.pallas_call(remote_kernel, jax.ShapeDtypeStruct(x.shape, F32), **options)(x)
    reduced = lax.psum(x, "x"), lax.pmax(x, "x"), lax.pmin(x, "x"), lax.psum_scatter(x, "x", tiled=True)
    moved = lax.all_gather(x, "x", tiled=True), lax.all_to_all(x, "x", 0, 1, tiled=True), lax.ppermute(x, "x", [(0, 1)])
    return reduced, moved, lax.axis_index("x") + lax.broadcasted_iota(I32, (8, 8), 0)


def replicated(x):
    """Collectives whose results JAX knows to be the same on each device."""
    return lax.psum(x + lax.pcast(1.0, "x", to="varying"), "x"), lax.all_gather(x, "x", tiled=True, to="invarying")


def arrays(x, seed):
    """Outside of kernels."""
    image, filters = x.reshape(1, 1, 16, 128), jnp.ones((2, 1, 3, 3))
    products = x @ x.T, lax.conv_general_dilated(image, filters, (1, 1), "SAME")
    return products, jax.random.bits(jax.random.key(seed)), jax.jit(lambda x: x)(x)


def sparse_kernel(x_hbm, o_hbm, x_ref, o_ref):
    x = x_ref[...]
    mask = x > 0
    plsc.store_compressed(o_ref.at[...], x, mask=mask)
    plsc.store_scatter(o_ref, [x], plsc.load_expanded(o_ref.at[...], mask=mask))
    plsc.load_gather(o_ref, [x])

    @plsc.parallel_loop(0, 16, 16)
    def _(i):
        jnp.sum(x_ref[pl.ds(i, 16)])


def sparse(x):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="c", subcore_axis_name="s", num_cores=1)
    options = {"mesh": mesh, "scratch_types": [pltpu.VMEM((16,), I32)] * 2}
    return pl.kernel(sparse_kernel, out_type=jax.ShapeDtypeStruct((16,), I32), **options)(x)


def gpu_kernel(x_gmem, o_gmem, x_smem, union, acc_tmem, taken_smem, bar, mma, met, done):
    c = lax.axis_index("c")
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, bar, collective_axes="c", predicate=c == 0)
    plgpu.barrier_wait(bar)
    plgpu.barrier_test(bar)
    plgpu.barrier_arrive(met)
    product = pl.run_state(lambda acc: plgpu.wgmma(acc, x_smem, x_smem.transpose((1, 0))))
    plgpu.layout_cast(product(plgpu.ACC.init(jnp.zeros((64, 64)))), plgpu.Layout.WGMMA)
    pl.run_scoped(lambda acc: plgpu.wgmma_wait(0) or acc[...], plgpu.ACC((64, 64)))
    plgpu.tcgen05_mma(acc_tmem, x_smem, x_smem, accumulate=False)
    plgpu.tcgen05_commit_arrive(mma)
    plgpu.async_store_tmem(acc_tmem, plgpu.async_load_tmem(acc_tmem))
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: plgpu.copy_smem_to_gmem(x_smem, o_gmem)))
    plgpu.wait_smem_to_gmem(0)
    (one,), (other,) = union
    other[...] = plgpu.load(one, optimized=False)
    if not too_old("0.12"):
        plgpu.barrier_arrive_and_wait(met)
        plgpu.store(other, one[...], optimized=False)
    plgpu.cluster_ref(one, {"c": 1})[...] = other[...]
    pl.semaphore_signal(done)
    pl.semaphore_wait(done)
    pl.loop(0, 4, unroll=2)(lambda i: None)
    lax.while_loop(lambda n: n > 0, lambda n: n - 1, pl.semaphore_read(done))
    plgpu.try_cluster_cancel(taken_smem, bar)
    plgpu.query_cluster_cancel(taken_smem, ("i",))
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(named_barrier)(c)


def named_barrier(_, number):
    inline_ptx("bar.sync $0, 256;", number.registers[()])


def on_gpu(x):
    tiles, half = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)), plgpu.SMEM((64, 64), F32)
    scratch = [plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiles), plgpu.RefUnion([half], [half])]
    scratch += [plgpu.TMEM((64, 64), F32), plgpu.TryClusterCancelResult(), plgpu.Barrier(num_arrivals=2)]
    scratch += [plgpu.Barrier(orders_tensor_core=True), plgpu.ClusterBarrier(collective_axes=("c",))]
    scratch += [plgpu.SemaphoreType.REGULAR]
    options = {"grid": (2,), "grid_names": ("i",), "cluster": (2,), "cluster_names": ("c",), "scratch_types": scratch}
    return plgpu.kernel(gpu_kernel, out_type=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), **options)(x)


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


def test_a_kernel_for_a_gpu(programs):
    (eqn,) = filter(ir.is_gpu_kernel, ir.named(programs["gpu"], "mpmd_map"))
    kernel = describe_gpu(eqn)
    assert (kernel.name, kernel.grid, kernel.cluster, kernel.threads) == ("gpu_kernel", {"i": 2}, {"c": 2}, 1)
    assert [name for name, *_ in kernel.inputs + kernel.outputs] == ["x_gmem", "o_gmem"]
    (scope,) = kernel.program.instrs
    assert {a.name: (a.kind, a.space, a.shape, a.arrivals, a.tensor, a.axes) for a in scope.p["allocs"]} == {
        "x_smem": ("memory", "smem", (64, 64), 0, False, ()),
        "union": ("union", "smem", (4 * 64 * 64,), 0, False, ()),
        "acc_tmem": ("memory", "tmem", (64, 64), 0, False, ()),
        "taken_smem": ("memory", "smem", (16,), 0, False, ()),
        "bar": ("barrier", "smem", (), 2, False, ()),
        "mma": ("barrier", "smem", (), 1, True, ()),
        "met": ("barrier", "smem", (), 1, False, ("c",)),
        "done": ("semaphore", "gmem", (), 0, False, ()),
    }
    everything = list(kernel.program.everything())
    assert [i.p["allocs"][0].kind for i in everything if i.kind == "run_scoped"] == ["memory", "acc"]
    assert [cell.kind for i in everything for cell in i.p.get("cells", ()) if cell is not None] == ["acc"]
    views = [view for i in everything for view in i.p.values() if isinstance(view, gpu_program.View)]
    assert {view.tiling for view in views} == {(None, None), ((8, 64), 128)}
    assert {view.alias for view in views} == {None, *((0, (64, 64), F32, group) for group in (0, 1))}
    assert [view.peer for view in views if view.peer is not None] == [("c",)]
    assert [view.transposed for view in views].count(True) == 1
    assert everything[-1].kind == "named"  # what inline_mgpu writes


# What the tests above do not reach. Where, the type that is expected there, and what is read: a step of a path is an
# attribute, or a key of `params`. A place or a path that ends in @0.12 is there from that version on, and not before,
# when the code does without. A place with a dot is a module.
ANY, PROGRAM, TREE = object, jec.Jaxpr, jax.tree_util.PyTreeDef
READ = [
    ("pallas_call", ANY, "primitive.bind primitive.get_bind_params params.interpret"),
    ("pallas_call", bool, "primitive.multiple_results"),
    ("pallas_call", ANY, "params.compiler_params.collective_id"),
    ("pallas_call", tuple, "params.out_avals"),
    ("kernel", list, "eqns invars outvars constvars consts"),
    ("kernel", str, "debug_info.func_name debug_info.func_src_info debug_info.func_filename"),
    ("kernel", tuple, "debug_info.arg_names"),
    ("literal", ANY, "val aval.dtype"),
    ("ref", ANY, "aval.shape aval.dtype aval.memory_space aval.inner_aval"),
    ("array", ANY, "update sharding.spec"),
    ("get", ANY, "effects source_info.traceback.frames source_info.traceback.raw_frames"),
    ("get", ANY, "source_info.traceback.as_python_traceback"),
    ("frame", ANY, "file_name line_num"),
    ("key", tuple, "dtype._impl.key_shape"),
    ("key", str, "dtype._impl.name"),
    ("program_id num_programs", int, "params.axis"),
    ("axis_index", str, "params.axis_name"),
    ("roll", ANY, "params.axis params.stride params.stride_axis"),
    ("bitcast", ANY, "params.ty params.dim@0.12"),
    ("dot_general", tuple, "params.dimension_numbers"),
    ("conv_general_dilated", tuple, "params.dimension_numbers.rhs_spec"),
    ("iota", ANY, "params.sharding"),
    ("cond", tuple, "params.branches"),
    ("scan", int, "params.length params.reverse"),
    ("scan", ANY, "params.ft_in.update"),
    ("while", int, "params.cond_nconsts params.body_nconsts"),
    ("while", PROGRAM, "params.cond_jaxpr params.body_jaxpr"),
    ("run_scoped scan jit remat2 shard_map", PROGRAM, "params.jaxpr"),
    ("jit", str, "params.name params.jaxpr.jaxpr.debug_info.func_filename"),
    ("custom_jvp_call", PROGRAM, "params.call_jaxpr"),
    ("get swap addupdate dma_start dma_wait", TREE, "params.tree"),
    ("masked_load masked_swap semaphore_read semaphore_signal semaphore_wait", TREE, "params.args_tree"),
    ("dma_start", bool, "params.add"),
    ("dma_start semaphore_signal", ANY, "params.device_id_type"),
    ("indexer", tuple, "indices"),
    ("indexer", ANY, "get_indexer_shape get_indexer_shape_static"),
    ("slice", int, "size stride"),
    ("slice", jec.Var, "start"),
    ("seen", tuple, "transforms"),
    ("seen", jec.Var, "ref"),
    ("chosen", ANY, "ref transforms"),
    ("ReshapeTransform", tuple, "shape"),
    ("BitcastTransform", ANY, "dtype"),
    ("chooses", ANY, "idx"),
    # a pipeline inside of a kernel
    ("emit_pipeline", PROGRAM, "params.body_jaxpr"),
    ("emit_pipeline", TREE, "params.args_tree params.refs_tree"),
    ("emit_pipeline", ANY, "params._explicit_indices params.num_cores params.dimension_semantics"),
    ("emit_pipeline", tuple, "params.grid_mapping.grid params.grid_mapping.vmapped_dims"),
    ("emit_pipeline", int, "params.grid_mapping.num_inputs"),
    ("piped", ANY, "allocations dynamic_grid_spec refs_flat all_index_map_consts body_consts"),
    ("block", ANY, "array_aval transformed_block_aval block_shape pipeline_mode index_map_jaxpr.consts"),
    # several devices
    ("shard_map", tuple, "params.in_specs params.out_specs"),
    ("shard_map", bool, "params.check_vma"),
    ("shard_map", frozenset, "params.newly_manual_axes"),
    ("shard_map", ANY, "params.mesh.shape"),
    ("psum pmax pmin psum_invariant", tuple, "params.axes"),
    ("ppermute all_gather all_gather_invariant reduce_scatter", tuple, "params.axis_name"),
    ("all_to_all", str, "params.axis_name"),
    ("psum pmax pmin all_gather reduce_scatter all_to_all", ANY, "params.axis_index_groups"),
    ("all_gather all_gather_invariant reduce_scatter all_to_all", bool, "params.tiled"),
    ("all_gather all_gather_invariant", int, "params.all_gather_dimension"),
    ("reduce_scatter", int, "params.scatter_dimension"),
    ("all_to_all", int, "params.split_axis params.concat_axis"),
    ("ppermute", tuple, "params.perm"),
    ("tpu_mesh", str, "abstract_device.device_kind"),
    # a SparseCore
    ("sparse/swap sparse/load", bool, "params.has_mask"),
    ("sparse/swap sparse/scatter", bool, "params.add"),
    ("sparse/swap", bool, "params.compress@0.12"),
    ("sparse/swap sparse/load sparse/gather sparse/scatter sparse/parallel_loop", TREE, "params.tree"),
    ("sparse/parallel_loop", PROGRAM, "params.jaxpr"),
    ("sparse/mesh", ANY, "core_type shape"),
    # a kernel for a GPU
    ("gpu/mpmd_map sparse/mpmd_map", tuple, "params.meshes params.jaxprs"),
    ("sparse/mpmd_map", ANY, "params.compiler_params"),
    ("gpu/mpmd_map sparse/mpmd_map", ANY, "params.name params.input_output_aliases params.interpret"),
    ("gpu/mesh", tuple, "grid grid_names cluster cluster_names"),
    ("gpu/mesh", ANY, "num_threads thread_name"),
    ("gpu/warps", ANY, "axis_name"),
    ("gpu/run_scoped", tuple, "params.ref_transforms params.collective_axes"),
    ("gpu/tiling", ANY, "transform_type"),
    ("gpu/ref", ANY, "aval.inner_aval.dtype aval.inner_aval.shape aval.memory_space"),
    ("gpu/bar gpu/met", int, "num_arrivals"),
    ("gpu/bar gpu/met", bool, "orders_tensor_core"),
    ("gpu/met", tuple, "collective_axes"),
    ("gpu/UntilingTransform", tuple, "tiling"),
    ("gpu/UnswizzleRef", int, "swizzle"),
    ("gpu/TransposeTransform", tuple, "permutation"),
    ("gpu/ClusterRefTransform", tuple, "dims idxs"),
    ("gpu/ExtractAliasedRef", int, "offset alias_group_idx"),
    ("gpu/ExtractAliasedRef", ANY, "dtype transform_type"),
    ("gpu/run_state gpu/run_scoped gpu/scan", PROGRAM, "params.jaxpr"),
    ("gpu/run_state", tuple, "params.is_initialized"),
    ("gpu/scan", int, "params.unroll"),
    ("gpu/custom_vmap_call", PROGRAM, "params.call"),
    ("gpu/get gpu/swap gpu/load gpu/store@0.12 gpu/async_load gpu/async_store_tmem", TREE, "params.tree"),
    ("gpu/load gpu/store@0.12", bool, "params.optimized"),
    ("gpu/copy_gmem_to_smem gpu/copy_smem_to_gmem", TREE, "params.src_transforms_treedef"),
    ("gpu/copy_gmem_to_smem gpu/copy_smem_to_gmem", TREE, "params.dst_transforms_treedef"),
    ("gpu/copy_gmem_to_smem", TREE, "params.barrier_transforms_treedef"),
    ("gpu/copy_gmem_to_smem", ANY, "params.has_barrier params.collective_axes params.leader_tracked"),
    ("gpu/copy_gmem_to_smem gpu/copy_smem_to_gmem gpu/barrier_arrive", bool, "params.has_user_predicate"),
    ("gpu/leader", int, "axis"),
    ("gpu/copy_smem_to_gmem", ANY, "params.commit_group params.reduction_op"),
    ("gpu/wait_smem_to_gmem", ANY, "params.n params.wait_read_only"),
    ("gpu/barrier_arrive gpu/barrier_wait gpu/barrier_test", TREE, "params.transforms_treedef"),
    ("gpu/barrier_arrive_and_wait@0.12", TREE, "params.transforms_treedef"),
    ("gpu/tcgen05_commit_arrive", ANY, "params.barrier_transforms_tree params.collective_axis"),
    ("gpu/tcgen05_commit_arrive", bool, "params.has_user_predicate@0.12"),
    ("gpu/tcgen05_mma", ANY, "params.barrier_transforms_tree params.collective_axis"),
    ("gpu/tcgen05_mma", bool, "params.arrive params.scaled params.sparse"),
    ("gpu/tcgen05_mma gpu/wgmma_ref", ANY, "params.acc_transforms_tree"),
    ("gpu/tcgen05_mma gpu/wgmma_ref", TREE, "params.a_transforms_tree params.b_transforms_tree"),
    ("gpu/wgmma_wait", int, "params.n"),
    ("gpu/wgmma_accumulator_deref", int, "params.wait_n"),
    ("gpu/layout_cast", str, "params.new_layout.name"),
    ("gpu/semaphore_signal gpu/semaphore_wait gpu/semaphore_read", TREE, "params.args_tree"),
    ("gpu/try_cluster_cancel", ANY, "params.result_transforms_tree params.barrier_transforms_tree"),
    ("gpu/query_cluster_cancel", ANY, "params.transforms_tree params.grid_names"),
    ("gpu/inline_mgpu", tuple, "params.flat_arg_types params.flat_ret_ty"),
    ("gpu/inline_mgpu", ANY, "params.mgpu_fn params.pytree_args.unflatten"),
    ("gpu/layout", ANY, "to_mgpu"),
    # modules, and what has no public name
    ("jax._src.config", ANY, "use_emit_pipeline_primitive"),
    ("jax._src.interpreters.mlir", ANY, "_lowerings make_ir_context"),
    ("jax._src.interpreters.partial_eval", ANY, "trace_to_jaxpr.cache_clear"),
    ("jax._src.pallas.mosaic.interpret.shared_memory", ANY, "Semaphore.wait"),
    ("jax._src.pallas.mpmd", jec.Primitive, "mpmd_map_p"),
    ("jax._src.pallas.mpmd", ANY, "mpmd_map_p.impl mpmd_map_p.def_impl"),
    ("jax._src.source_info_util", ANY, "current xla_client.Traceback.get_traceback"),
    ("jax._src.state.discharge", ANY, "discharge_state"),
    ("jax._src.tpu_info", ANY, "get_device_kind"),
    ("jax.experimental.mosaic.gpu", ANY, "FragmentedArray.splat"),
    ("jax.experimental.pallas", jec.Primitive, "pallas_call_p"),
    ("jax.experimental.pallas.tpu", ANY, "force_tpu_interpret_mode get_tpu_info_for_chip ChipVersion"),
    ("jax.extend.backend", ANY, "get_default_device"),
    ("jax.interpreters.mlir", ANY, "lower_fun register_lowering"),
    ("jaxlib.mlir.dialects.func", ANY, "FuncOp"),
    ("jaxlib.mlir.ir", ANY, "Location.unknown Module.create IntegerType.get_signless IntegerAttr.get FunctionType.get"),
    ("jaxlib.mlir.ir", ANY, "InsertionPoint StringAttr"),
    ("lowering", ANY, "rule"),
]
EACH = [(where, kind, path) for places, kind, paths in READ for where in places.split() for path in paths.split()]

# The operands of an equation, as the interpreters unpack them: in this order, and no more. A dash: one without a name.
OPERANDS = {
    "masked_load": "x_ref - - None",
    "masked_swap": "x_ref - - -",
    "dma_start": "x_hbm x_ref dma_ref None None",
    "dma_wait": "x_hbm x_ref dma_ref None None",
    "away": "x_ref o_ref came_ref sent_ref -",
    "semaphore_signal": "done_ref - - None None",
    "semaphore_wait": "done_ref - - -",
    "semaphore_read": "done_ref -",
    "sparse/gather": "o_ref - - None",
    "sparse/scatter": "o_ref - - - None",
    "sparse/parallel_loop": "- - - - -",
}


@pytest.fixture(scope="module")
def calls():
    """Kernels, each as a Call and an equation."""
    made = [(cut, ARGS), (whole, [X]), (seen, [X, X.astype(I32)]), (piped, [X]), (sparse, [X[0, :16].astype(I32)])]
    return {fn.__name__: described(jax.jit(fn), *args) for fn, args in made}


@pytest.fixture(scope="module")
def programs(calls):
    """Kernels, and functions around kernels."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = {"mesh": mesh, "in_specs": P("x")}
    found = {name: call.kernel for name, (call, _) in calls.items()} | {"arrays": jax.make_jaxpr(arrays)(X, 3)}
    found["replicated"] = jax.make_jaxpr(jax.shard_map(replicated, out_specs=P(), **split))(X)
    with ir.tracing():
        found["spread"] = jax.make_jaxpr(jax.shard_map(spread, out_specs=P("x"), check_vma=False, **split))(X)
    with as_on_gpu("NVIDIA B200", 148):
        found["gpu"] = jax.make_jaxpr(on_gpu)(np.zeros((64, 64), jnp.bfloat16))
    return found


def operands(eqn, key="tree"):
    tree = eqn.params[key]
    return jax.tree.unflatten(tree, eqn.invars[len(eqn.invars) - tree.num_leaves :])


def transforms(eqn):
    """Those of its Refs, with 0 for a number in them where each Ref has a tree of its own."""
    own = [tree for name, tree in eqn.params.items() if "_transforms_tree" in name and tree is not None]
    made = [jax.tree.unflatten(tree, [0] * tree.num_leaves) for tree in own]
    made += [operands(eqn, key) for key in ("tree", "args_tree") if key in eqn.params]
    leaves = jax.tree.leaves(made, is_leaf=lambda x: hasattr(x, "transform_type"))
    return [each for each in leaves if hasattr(each, "transform_type")]


@pytest.fixture(scope="module")
def things(calls, programs):
    """What the table has a name for: an equation of each primitive in the programs, the Refs' transforms, and parts."""
    found = {"pallas_call": calls["cut"][1], "sparse/mpmd_map": calls["sparse"][1]}
    for name, jaxpr in programs.items():
        before = f"{name}/" if name in ("gpu", "sparse") else ""
        for _, eqn in ir.everywhere(jaxpr):
            own = eqn.primitive.name
            found.setdefault(before + (own.removesuffix("_p") if before else own), eqn)  # 0.11 has "inline_mgpu_p"
            for each in transforms(eqn):
                found.setdefault(before + type(each).__name__, each)
    get = [e for e in ir.named(programs["cut"], "get") if len(e.invars) > 1][-1]
    (indexer,) = operands(get)
    found |= {"kernel": programs["cut"], "ref": get.invars[0], "indexer": indexer, "slice": indexer.indices[0]}
    found |= {"literal": found["eq"].invars[1], "frame": get.source_info.traceback.frames[0]}
    found |= {"array": found["pallas_call"].outvars[0].aval, "key": found["random_bits"].invars[0].aval}
    first, *_, last = ir.named(programs["seen"], "dma_start")
    found |= {"seen": operands(first)[0], "chosen": operands(last)[0], "chooses": operands(last)[0].transforms[0]}
    (found["away"],) = ir.named(programs["spread"], "dma_start")
    pipeline = found["emit_pipeline"]
    found |= {"piped": operands(pipeline, "args_tree"), "block": pipeline.params["grid_mapping"].block_mappings[0]}
    found |= {"tpu_mesh": meshes.tpu_mesh("TPU v5e"), "sparse/mesh": found["sparse/mpmd_map"].params["meshes"][0]}
    (mesh,), (warps,) = (e.params["meshes"] for e in ir.named(programs["gpu"], "mpmd_map"))
    found |= {"gpu/mesh": mesh, "gpu/warps": warps, "gpu/layout": found["gpu/inline_mgpu"].params["flat_arg_types"][0]}
    scope = found["gpu/run_scoped"].params
    refs = dict(zip(ir.arg_names(scope["jaxpr"]), scope["jaxpr"].invars, strict=True))
    found |= {f"gpu/{name}": refs[name].aval.inner_aval.dtype for name in ("bar", "met")}
    found |= {"gpu/ref": refs["x_smem"], "gpu/tiling": scope["ref_transforms"][0][0]}
    lowerings = getattr(importlib.import_module("jax._src.interpreters.mlir"), "_lowerings", {})
    found["lowering"] = lowerings.get(found["gpu/mpmd_map"].primitive)
    return found | {"gpu/leader": plgpu.CopyPartition.PARTITIONED(0)}


@pytest.mark.parametrize(("where", "kind", "path"), EACH)
def test_an_attribute_is_there(things, where, kind, path):
    where, _, where_since = where.partition("@")
    path, _, path_since = path.partition("@")
    *way, last = path.split(".")
    if where_since and too_old(where_since):
        assert where not in things, f"{where} is there before {where_since}"
        return
    thing = importlib.import_module(where) if "." in where else things.get(where)
    assert thing is not None, f"nothing is called {where}"
    for step in [*way, last]:
        there = step in thing if isinstance(thing, dict) else hasattr(thing, step)
        if step == last and path_since and too_old(path_since):
            assert not there, f"{where} has {path} before {path_since}"
            return
        assert there, f"{where} has no {path}: {step}"
        thing = thing[step] if isinstance(thing, dict) else getattr(thing, step)
    assert isinstance(thing, kind), f"{path} of {where} is {thing!r}, not {kind}"


@pytest.mark.parametrize("where", OPERANDS)
def test_operands_come_in_this_order(programs, things, where):
    kernels = [*programs.values(), *(e.params["jaxpr"] for e in ir.named(programs["spread"], "pallas_call"))]
    names = {id(v): name for jaxpr in kernels for name, v in zip(ir.arg_names(jaxpr), jaxpr.invars, strict=True)}
    eqn = things[where]
    given = operands(eqn, "tree" if "tree" in eqn.params else "args_tree")
    said = [names.get(id(getattr(x, "ref", x)), "None" if x is None else "-") for x in given]
    assert said == OPERANDS[where].split()


# Names that 0.11 does not have yet.
NEW = {"store", "barrier_arrive_and_wait", "MemorySpaceCastTransform"} if too_old("0.12") else set()


def test_every_name_of_a_primitive_that_is_compared_exists():
    gc.unfreeze()  # what pytest has collected is out of sight of get_objects
    known = {each.name for each in gc.get_objects() if issubclass(type(each), jec.Primitive)}
    gc.freeze()
    rules = {name[4:] for name in dir(machine.Machine) if name.startswith("_do_")}
    tables = [ops.OPS, ops.TRANSCENDENTAL, ops.INLINED, ir.MOVES, program.NARROWED, rules, asked._PLAIN, folded._SPREAD]
    tables += [ir._TOGETHER, eager._VIEWS, meshes.COLLECTIVES, meshes.SAME]
    assert {*machine._SILENT}.union(*tables) - known == set()
    of_gpus = {*gpu_reader._BUILDERS, "inline_mgpu"}
    assert of_gpus - {name.removesuffix("_p") for name in known} == NEW & of_gpus


def test_every_name_of_a_type_that_is_compared_exists():
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("jax")]
    known = {each.__name__ for module in modules for each in [*vars(module).values()] if isinstance(each, type)}
    others = "PeerMemRef TransposeTransform ReshapeTransform BitcastTransform NDIndexer WarpMesh InterpretGPUParams"
    assert {*gpu_program._ELSEWHERE, *others.split(), "DropVar"} - known == NEW & gpu_program._ELSEWHERE


def test_what_is_found_by_its_place_is_there():
    """Frames of emit_pipeline, those of a wait in JAX's simulator and what they know, and whom JAX's callbacks tell."""
    assert inspect.getfile(pltpu.emit_pipeline).endswith(os.path.join("pallas", "mosaic", "pipeline.py"))
    simulator = importlib.import_module(f"{simulate._SIMULATOR_MODULE}.interpret_pallas_call")
    assert "source_info" in inspect.signature(simulator.dma_wait).parameters
    assert importlib.import_module("jax._src.callback").logger is logging.getLogger("jax._src.callback")
