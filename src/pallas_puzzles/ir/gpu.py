"""The seam to Pallas on GPUs: a plgpu.kernel of JAX's Mosaic GPU -> our own Kernel, made of Programs and Instrs.

JAX's equations are read once, here, into instructions whose operands are slots of a table; the machine in lens/gpu runs
those and knows nothing of JAX. The primitives' names and parameters are not public API: seen on jax 0.11.2 and
0.12.0.1.
"""

import ast
import contextlib
import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import backend

from .capture import (
    Evaluator,
    SourceLine,
    _own_lines,
    arg_names,
    callers_of,
    for_the_reader,
    is_call,
    line_of,
    space_of,
    where_defined,
)
from .ops import (
    OPS,
    TAKES_NO_PARAMS,
    Beyond,
    cost,
    evaluate,
    inlined,
    is_floating,
    is_literal,
    nbytes_of,
    np_dtype,
    scan_groups,
    to_numpy,
)
from .places import Place, locate

# How JAX says how an array lies in SMEM or TMEM: nothing that a value depends on.
_LAYOUTS = frozenset(
    "UnswizzleRef UntilingTransform CollapseLeadingBatchDimensionsTransform ExpandLeadingBatchDimensionsTransform "
    "IdentityTransform MemorySpaceCastTransform MulticastRef".split()
)
_ELSEWHERE = _LAYOUTS | {"ExtractAliasedRef", "ClusterRefTransform"}  # which memory, not where in it


@dataclasses.dataclass(frozen=True)
class Alloc:
    """What run_scoped allocates. kind: "memory", "acc", "barrier", "semaphore" or "union".

    shape: as the kernel sees it. arrivals: of a barrier; axes: the cluster axes whose CTAs share it. nbytes: what it
    takes of SMEM or TMEM.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    space: str
    arrivals: int = 0
    axes: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        return 8 * int(np.prod(self.shape, dtype=int)) if self.kind == "barrier" else nbytes_of(self.shape, self.dtype)


class View:
    """A Ref operand seen through `.at[...]`: the slot of the Ref, and of the numbers that say where.

    at(ref_shape, dtype, numbers, out_of_bounds, clips) is the Place; the same numbers give the same Place.
    """

    __slots__ = ("_places", "_tree", "alias", "leaves", "peer", "ref")

    def __init__(self, ref: int, tree: Any, leaves: Sequence[int]):
        self.ref, self._tree, self.leaves = ref, tree, tuple(leaves)
        self._places: dict[Any, Place] = {}
        first = self._transforms([0] * len(self.leaves)) if tree is not None else []
        self.alias = _alias(first)  # a part of a RefUnion: (byte offset, shape, dtype, group)
        # a Ref of another CTA of the cluster: the axes along which it is another one
        self.peer = next((t.dims for t in first if _is(t, "ClusterRefTransform")), None)
        if any(_is(t, "PeerMemRef") for t in first):
            raise Beyond("a Ref of another device")

    def _transforms(self, numbers: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(
            jax.tree.unflatten(self._tree, list(numbers)), is_leaf=lambda t: hasattr(t, "transform_type")
        )

    def block(self, numbers: Sequence[Any]) -> dict[Any, int]:
        """Which CTA of the cluster a Ref belongs to that is not one's own: {axis: index}."""
        t = next(t for t in self._transforms(numbers) if _is(t, "ClusterRefTransform"))
        return {axis: int(np.asarray(i)) for axis, i in zip(t.dims, t.idxs, strict=True)}

    def at(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        numbers: Sequence[Any],
        out_of_bounds: Callable[[int, int, int], None],
        clips: bool,
    ) -> Place:
        key: Any = None
        if all(np.ndim(n) == 0 for n in numbers):
            key = (shape, clips, *map(int, numbers))
            if (found := self._places.get(key)) is not None:
                return found
        transforms = self._transforms(numbers) if self._tree is not None else []
        kept = [t for t in transforms if type(t).__name__ not in _ELSEWHERE]
        noted: list[Any] = []

        def note(*where: int) -> None:
            noted.append(where)
            out_of_bounds(*where)

        place = locate(shape, dtype, kept, note, clips=clips)
        if key is not None and not noted:
            self._places[key] = place
        return place


def _alias(transforms: Sequence[Any]) -> tuple[int, tuple[int, ...], np.dtype, int] | None:
    """Which part of a RefUnion is meant, with the shape that it has for the kernel."""
    if not any(_is(t, "ExtractAliasedRef") for t in transforms):
        return None
    part, *rest = itertools.dropwhile(lambda t: not _is(t, "ExtractAliasedRef"), transforms)
    seen = part.transform_type(jax.core.ShapedArray((), np.int8))
    for t in itertools.takewhile(lambda t: type(t).__name__ in _LAYOUTS, rest):
        seen = t.transform_type(seen)
    return part.offset, tuple(seen.shape), np.dtype(part.dtype), part.alias_group_idx


def _is(transform: Any, name: str) -> bool:
    return type(transform).__name__ == name


@dataclasses.dataclass(eq=False)
class Instr:
    """One instruction. ins, outs: slots. p: what else is known, by name; programs: those inside of it.

    flops, specials: floating-point operations and transcendentals of array arithmetic.
    """

    kind: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    p: dict[str, Any]
    eqn: Any
    flops: int = 0
    specials: int = 0

    @functools.cached_property
    def line(self) -> SourceLine | None:
        """The reader's line."""
        return line_of(self.eqn)

    def evaluate(self, values: Sequence[Any]) -> list[Any]:
        """Array arithmetic in NumPy."""
        if self._index is not None:
            op, dtype = self._index
            return [np.asarray(op(*values)).astype(dtype, copy=False)]
        out = evaluate(self.eqn, values)
        return list(out) if self.eqn.primitive.multiple_results else [out]

    @functools.cached_property
    def _index(self) -> tuple[Callable[..., Any], np.dtype] | None:
        """(how to compute it, dtype of the result) of arithmetic on single integers, which is most of a kernel."""
        name, out = self.eqn.primitive.name, self.eqn.outvars[0].aval if len(self.eqn.outvars) == 1 else None
        if out is None or name not in TAKES_NO_PARAMS or out.shape or is_floating(np_dtype(out)):
            return None
        if any(v.aval.shape or is_floating(np_dtype(v.aval)) for v in self.eqn.invars):
            return None
        return OPS[name], np_dtype(out)

    def scan_groups(self, values: Sequence[Any]) -> list[list[Any]]:
        """[constants, initial carry, scanned-over arrays] of a loop."""
        return scan_groups(self.eqn, values)


@dataclasses.dataclass(eq=False)
class Program:
    """Instructions over a table of slots. template: the table at the start, with what is written into the program."""

    template: list[Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    instrs: list[Instr]
    names: list[str]

    def everything(self) -> Iterator[Instr]:
        """Every instruction, those of programs inside included."""
        for instr in self.instrs:
            yield instr
            for inner in instr.p.get("programs", ()):
                yield from inner.everything()


@dataclasses.dataclass
class Kernel:
    """A plgpu.kernel with the arrays that it was given.

    grid, cluster: how many clusters there are, and CTAs in each, by the names of their axes. threads: warpgroups a CTA.
    inputs, outputs: (name, shape, dtype). aliases: input -> output that share memory.
    """

    name: str
    where: SourceLine | None
    callers: list[SourceLine]
    grid: dict[Any, int]
    cluster: dict[Any, int]
    threads: int
    thread_name: Any
    program: Program
    inputs: list[tuple[str, tuple[int, ...], np.dtype]]
    outputs: list[tuple[str, tuple[int, ...], np.dtype]]
    aliases: dict[int, int]
    arrays: list[np.ndarray] = dataclasses.field(default_factory=list)


# Primitives that change nothing here: hints, fences that the machine does not need, and printing.
_SILENT = frozenset(
    "set_max_registers debug_print debug_callback print_layout async_prefetch griddepcontrol_wait "
    "griddepcontrol_launch_dependents check delay".split()
)
_SAME = frozenset(["layout_cast", "optimization_barrier"])


class _Reader:
    """Reads one program of JAX's into a Program."""

    def __init__(self, jaxpr: Any, open_consts: bool):
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        self.slots: dict[Any, int] = {}
        self.template: list[Any] = []
        consts = () if open_consts else tuple(getattr(jaxpr, "consts", ()))
        first = list(inner.constvars)
        for i, var in enumerate(first):
            self._new(var, np.asarray(consts[i]) if consts else None)
        for var in inner.invars:
            self._new(var)
        bound = [] if consts else first
        names = arg_names(inner)
        names = names[-len(inner.invars) :] if inner.invars else []
        instrs = [self._instr(eqn) for eqn in inner.eqns]
        self.program = Program(
            self.template,
            tuple(self.slots[v] for v in [*bound, *inner.invars]),
            tuple(self._slot(v) for v in inner.outvars),
            instrs,
            ["", *names][-len(inner.invars) :] if inner.invars else [],
        )

    def _new(self, var: Any, value: Any = None) -> int:
        self.slots[var] = len(self.template)
        self.template.append(value)
        return self.slots[var]

    def _slot(self, atom: Any) -> int:
        if is_literal(atom):
            self.template.append(np.asarray(atom.val, np_dtype(atom.aval)))
            return len(self.template) - 1
        found = self.slots.get(atom)
        return self._new(atom) if found is None else found

    def _instr(self, eqn: Any) -> Instr:
        name, p = eqn.primitive.name.removesuffix("_p"), eqn.params  # 0.11 has "inline_mgpu_p" and the like
        ins = tuple(self._slot(v) for v in eqn.invars)
        build = _BUILDERS.get(name)
        flops = specials = 0
        if build is not None:
            kind, more = build(p, ins, eqn)
        elif name in _SILENT:
            kind, more = "silent", {}
        elif name in _SAME:
            kind, more = "same", {}
        elif (inner := inlined(eqn)) is not None:
            kind, more = "inline", {"programs": [read_program(inner)]}
        elif any(hasattr(v.aval, "inner_aval") for v in eqn.invars):
            raise Beyond(f"the primitive {name} on a Ref, in a kernel for a GPU")
        else:
            kind, more = "array", {}
            flops, specials = cost(eqn)
        return Instr(kind, ins, tuple(self._new(v) for v in eqn.outvars), more, eqn, flops, specials)


def read_program(jaxpr: Any, open_consts: bool = False) -> Program:
    """Reads a program of JAX's. open_consts: what it closes over are its first inputs."""
    return _Reader(jaxpr, open_consts).program


# --- one builder for each primitive: (parameters, slots of the operands, equation) -> (kind, what is known)


def _views(refs: Sequence[int], trees: Sequence[Any], leaves: Sequence[int]) -> tuple[list[View], tuple[int, ...]]:
    """(a View for each Ref, the leaves that are left)."""
    views, rest = [], tuple(leaves)
    for ref, tree in zip(refs, trees, strict=True):
        n = tree.num_leaves if tree is not None else 0
        views.append(View(ref, tree, rest[:n]))
        rest = rest[n:]
    return views, rest


def _read(p: Any, ins: Any, eqn: Any) -> Any:
    views, rest = _views(ins[:1], [p["tree"]], ins[1:])
    return "read", {"view": views[0], "mask": rest[0] if rest else None}


def _write(p: Any, ins: Any, eqn: Any) -> Any:
    views, _ = _views(ins[:1], [p["tree"]], ins[2:])
    return "write", {"view": views[0], "value": ins[1], "add": eqn.primitive.name == "addupdate"}


def _predicate(p: Any, rest: Sequence[int]) -> int | None:
    return rest[-1] if p.get("has_user_predicate") else None


def _load_tma(p: Any, ins: Any, eqn: Any) -> Any:
    n = 3 if p.get("has_barrier", True) else 2
    names = ("src", "dst", "barrier")[:n]
    views, rest = _views(ins[:n], [p[f"{name}_transforms_treedef"] for name in names], ins[n:])
    if n == 2:
        raise Beyond("copies without a barrier (cp.async), which GPUs before Hopper make")
    tracked = p.get("leader_tracked")
    return "load_tma", {
        "src": views[0],
        "dst": views[1],
        "barrier": views[2],
        "predicate": _predicate(p, rest),
        "axes": tuple(p.get("collective_axes") or ()),
        "leader": None if tracked is None else getattr(tracked, "axis", -1),
    }


def _store_tma(p: Any, ins: Any, eqn: Any) -> Any:
    views, rest = _views(ins[:2], [p["src_transforms_treedef"], p["dst_transforms_treedef"]], ins[2:])
    return "store_tma", {
        "src": views[0],
        "dst": views[1],
        "predicate": _predicate(p, rest),
        "commit": p.get("commit_group", True),
        "reduce": p.get("reduction_op"),
    }


def _barrier(kind: str) -> Callable[..., Any]:
    def build(p: Any, ins: Any, eqn: Any) -> Any:
        tree = p["transforms_treedef"] if "transforms_treedef" in p else p["barrier_transforms_tree"]
        views, rest = _views(ins[:1], [tree], ins[1:])
        return kind, {"barrier": views[0], "predicate": _predicate(p, rest), "axis": p.get("collective_axis")}

    return build


def _wgmma(p: Any, ins: Any, eqn: Any) -> Any:
    views, _ = _views(ins[:3], [p["acc_transforms_tree"], p["a_transforms_tree"], p["b_transforms_tree"]], ins[3:])
    return "wgmma", {"acc": views[0], "a": views[1], "b": views[2]}


def _tcgen05(p: Any, ins: Any, eqn: Any) -> Any:
    if p.get("scaled") or p.get("sparse"):
        raise Beyond("tcgen05_mma with scales or sparsity")
    acc, a, b, accumulate, *rest = ins
    refs, names = [acc, a, b], ["acc", "a", "b"]
    if p["arrive"]:
        refs, names, rest = [*refs, rest[0]], [*names, "barrier"], rest[1:]
    views, _ = _views(refs, [p[f"{n}_transforms_tree"] for n in names], rest)
    return "tcgen05", {
        **dict(zip(names, views, strict=True)),
        "accumulate": accumulate,
        "axis": p.get("collective_axis"),
    }


def _run_scoped(p: Any, ins: Any, eqn: Any) -> Any:
    jaxpr = p["jaxpr"]
    names = arg_names(jaxpr)[-len(jaxpr.invars) :] if jaxpr.invars else []
    transforms = p.get("ref_transforms") or ((),) * len(jaxpr.invars)
    allocs = [_alloc(n, v.aval, t) for n, v, t in zip(names, jaxpr.invars, transforms, strict=True)]
    return "run_scoped", {
        "programs": [read_program(jaxpr, open_consts=True)],
        "allocs": allocs,
        "axes": tuple(p.get("collective_axes") or ()),
    }


def _alloc(name: str, aval: Any, transforms: Sequence[Any]) -> Alloc:
    inner = getattr(aval, "inner_aval", aval)
    dtype_name, space = str(inner.dtype), str(getattr(aval, "memory_space", "") or "").lower().split(".")[-1]
    shape = tuple(inner.shape)
    if "barrier" in dtype_name:
        arrivals, axes = inner.dtype.num_arrivals, tuple(getattr(inner.dtype, "collective_axes", ()))
        return Alloc(name, "barrier", shape, np.dtype(np.int64), "smem", arrivals, axes)
    if space_of(aval) == "semaphore" or "sem" in dtype_name:
        return Alloc(name, "semaphore", shape, np.dtype(np.int32), "gmem")
    if "Accumulator" in type(aval).__name__:
        return Alloc(name, "acc", shape, np_dtype(inner), "regs")
    if "Union" in type(aval).__name__:
        return Alloc(name, "union", shape, np_dtype(inner), space)
    seen = inner
    for t in transforms:
        seen = t.transform_type(seen)
    return Alloc(name, "memory", tuple(seen.shape), np_dtype(inner), space)


def _run_state(p: Any, ins: Any, eqn: Any) -> Any:
    jaxpr, atoms = p["jaxpr"], iter(eqn.invars)
    given = p.get("is_initialized") or (True,) * len(jaxpr.invars)
    cells = []
    for name, var, ok in zip(arg_names(jaxpr), jaxpr.invars, given, strict=True):
        passed = ok and hasattr(next(atoms).aval, "inner_aval")  # a Ref from outside stays what it is
        cells.append(None if passed else dataclasses.replace(_alloc(name, var.aval, ()), kind="acc"))
    return "run_state", {"programs": [read_program(jaxpr)], "cells": cells, "given": tuple(given)}


def _scan(p: Any, ins: Any, eqn: Any) -> Any:
    outs = [(tuple(v.aval.shape), np_dtype(v.aval)) if hasattr(v.aval, "shape") else None for v in eqn.outvars]
    return "scan", {
        "programs": [read_program(p["jaxpr"])],
        "length": p["length"],
        "reverse": p["reverse"],
        "results": outs,
    }


def _while(p: Any, ins: Any, eqn: Any) -> Any:
    programs = [read_program(p["cond_jaxpr"]), read_program(p["body_jaxpr"])]
    return "while", {"programs": programs, "consts": (p["cond_nconsts"], p["body_nconsts"])}


def _cond(p: Any, ins: Any, eqn: Any) -> Any:
    return "cond", {"programs": [read_program(b) for b in p["branches"]]}


def _mpmd(p: Any, ins: Any, eqn: Any) -> Any:
    """pl.core_map over the warps of a warpgroup."""
    (jaxpr,), (mesh,) = p["jaxprs"], p["meshes"]
    if type(mesh).__name__ != "WarpMesh":
        raise Beyond(f"a {type(mesh).__name__} inside of a kernel for a GPU")
    return "warps", {"programs": [read_program(jaxpr)], "axis": mesh.axis_name, "warps": 4}


def _signal(p: Any, ins: Any, eqn: Any) -> Any:
    ref, transforms, amount, *device = jax.tree.unflatten(p["args_tree"], list(ins))
    if any(d is not None for d in device):
        raise Beyond("a signal to another device")
    return "signal", {"barrier": _semaphore(ref, transforms, p, ins), "amount": amount}


def _sem_wait(p: Any, ins: Any, eqn: Any) -> Any:
    ref, transforms, amount, *rest = jax.tree.unflatten(p["args_tree"], list(ins))
    decrement = rest[0] if rest else None
    return "sem_wait", {"barrier": _semaphore(ref, transforms, p, ins), "amount": amount, "decrement": decrement}


def _sem_read(p: Any, ins: Any, eqn: Any) -> Any:
    ref, transforms = jax.tree.unflatten(p["args_tree"], list(ins))[:2]
    return "sem_read", {"barrier": _semaphore(ref, transforms, p, ins)}


def _semaphore(ref: int, transforms: Any, p: Any, ins: Any) -> View:
    leaves, tree = jax.tree.flatten(transforms)
    return View(ref, tree, leaves)


def _cancel(p: Any, ins: Any, eqn: Any) -> Any:
    views, _ = _views(ins[:2], [p["result_transforms_tree"], p["barrier_transforms_tree"]], ins[2:])
    return "cancel", {"result": views[0], "barrier": views[1], "axes": tuple(p["collective_axes"])}


def _query(p: Any, ins: Any, eqn: Any) -> Any:
    views, _ = _views(ins[:1], [p["transforms_tree"]], ins[1:])
    return "query", {"result": views[0], "names": tuple(p["grid_names"])}


def _inline_mgpu(p: Any, ins: Any, eqn: Any) -> Any:
    """Code of a level below Pallas. Fences are known by the names that they use; the rest is not followed."""
    fn = p["mgpu_fn"]
    names, ptx = set(fn.__code__.co_names), [c.cell_contents for c in fn.__closure__ or ()]
    if "fence_proxy" in names:
        return "commit_smem", {}
    fences = names & {"tcgen05_wait", "tcgen05_fence", "warpgroup_barrier"}
    if fences or any(isinstance(text, str) and text.startswith("fence") for text in ptx):
        return "silent", {}
    raise Beyond("inline_mgpu: code of a level below Pallas")


def _with(kind: str, *names: str) -> Callable[..., Any]:
    return lambda p, ins, eqn: (kind, {n: p[n] for n in names if n in p})


def _wait_stores(p: Any, ins: Any, eqn: Any) -> Any:
    return "wait_stores", {"n": p["n"], "read_only": bool(p.get("wait_read_only"))}


_BUILDERS: dict[str, Callable[..., Any]] = {
    "get": _read,
    "load": _read,
    "async_load": _read,
    "swap": _write,
    "store": _write,
    "async_store_tmem": lambda p, ins, eqn: _write(p, ins, eqn),
    "addupdate": _write,
    "copy_gmem_to_smem": _load_tma,
    "copy_smem_to_gmem": _store_tma,
    "wait_smem_to_gmem": _wait_stores,
    "commit_group": _with("commit_group"),
    "commit_smem": _with("commit_smem"),
    "commit_tmem": _with("silent"),
    "wait_load_tmem": _with("wait_tmem"),
    "barrier_arrive": _barrier("arrive"),
    "barrier_wait": _barrier("wait"),
    "barrier_arrive_and_wait": _barrier("arrive_wait"),
    "barrier_test": _barrier("test"),
    "tcgen05_commit_arrive": _barrier("tcgen05_arrive"),
    "tcgen05_mma": _tcgen05,
    "wgmma_ref": _wgmma,
    "wgmma_wait": _with("wgmma_wait", "n"),
    "wgmma_accumulator_deref": _with("acc_read", "wait_n"),
    "wgmma_accumulator_store": _with("acc_write"),
    "mma": _with("mma"),
    "run_scoped": _run_scoped,
    "run_state": _run_state,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "mpmd_map": _mpmd,
    "axis_index": _with("axis_index", "axis_name"),
    "semaphore_signal": _signal,
    "semaphore_wait": _sem_wait,
    "semaphore_read": _sem_read,
    "try_cluster_cancel": _cancel,
    "query_cluster_cancel": _query,
    "inline_mgpu": _inline_mgpu,
}


# --- a whole function -----------------------------------------------------------------------------------------------


def is_gpu_kernel(eqn: Any) -> bool:
    """Whether an equation is a plgpu.kernel."""
    if eqn.primitive.name != "mpmd_map":
        return False
    return all(hasattr(mesh, "cluster_names") for mesh in eqn.params["meshes"])


def describe_gpu(eqn: Any) -> Kernel:
    """A plgpu.kernel equation as a Kernel without arrays. Raises Beyond."""
    p = eqn.params
    if len(p["jaxprs"]) != 1:
        raise Beyond("several programs in one kernel (mpmd)")
    (jaxpr,), (mesh,) = p["jaxprs"], p["meshes"]
    body = _innermost(jaxpr)
    n_in = len(eqn.invars)
    kinds = [(tuple(v.aval.shape), np_dtype(v.aval)) for v in jaxpr.invars]
    own = _written_names(where_defined(body))[: len(kinds)]
    names = [*own, *(f"in{i}" if i < n_in else f"out{i - n_in}" for i in range(len(own), len(kinds)))]
    described = [(name, *kind) for name, kind in zip(names, kinds, strict=True)]
    return Kernel(
        name=str(p.get("name") or body.debug_info.func_name),
        where=where_defined(body),
        callers=callers_of(eqn),
        grid=dict(zip(mesh.grid_names, mesh.grid, strict=True)),
        cluster=dict(zip(mesh.cluster_names, mesh.cluster, strict=True)),
        threads=mesh.num_threads or 1,
        thread_name=mesh.thread_name,
        program=read_program(jaxpr),
        inputs=described[:n_in],
        outputs=described[n_in:],
        aliases=dict(p.get("input_output_aliases") or {}),
    )


def _innermost(jaxpr: Any) -> Any:
    """The reader's body inside of the run_scoped that JAX puts around it."""
    first = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
    return first.params["jaxpr"] if first is not None and first.primitive.name == "run_scoped" else jaxpr


def _written_names(where: SourceLine | None) -> list[str]:
    """The names of the arguments of the function on a line: JAX forgets those of a kernel's operands."""
    if where is None:
        return []
    try:
        tree = ast.parse("".join(linecache.getlines(where.file)))
    except SyntaxError:  # a cell with magics
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            first = [node, *getattr(node, "decorator_list", ())]
            if min(n.lineno for n in first) == where.line:
                return [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return []


OnKernel = Callable[[Kernel], list[np.ndarray]]


class _Outer(Evaluator):
    """Runs what is around the kernels eagerly, and hands each plgpu.kernel to `on_kernel`."""

    def __init__(self, on_kernel: OnKernel):
        super().__init__(self._no_tpu)
        self.on_kernel = on_kernel

    def _no_tpu(self, *_: Any) -> list[Any]:
        raise Beyond("a kernel for a TPU beside one for a GPU")

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        if is_call(eqn) and is_gpu_kernel(eqn):
            kernel = describe_gpu(eqn)
            kernel.arrays = [to_numpy(v) for v in values]
            return self._mark(self.on_kernel(kernel))
        return super().apply(eqn, values)


@contextlib.contextmanager
def _traced_for(kind: str, cores: int) -> Iterator[None]:
    """Functions are traced as if a GPU with so many SMs were there."""
    device = jax.sharding.AbstractDevice(kind, cores, "gpu")
    before = backend.get_default_device  # kernels that fill a chip ask it how many SMs there are
    backend.get_default_device = lambda: _Device(before(), kind, cores)
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            yield
    finally:
        backend.get_default_device = before


class _Device:
    """The device that is there, as if it were a GPU."""

    def __init__(self, real: Any, kind: str, cores: int):
        self._real, self.device_kind, self.core_count, self.platform = real, kind, cores, "gpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def capture_gpu(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], on_kernel: OnKernel, device: tuple[str, int]
) -> Any:
    """Runs `fn(*args, **kwargs)` eagerly; every plgpu.kernel goes to on_kernel, which returns its outputs.

    args: arrays or pytrees of arrays; kwargs: static; device: JAX's name of a GPU, and how many SMs it has.
    Raises what the reader's code raises, and Beyond.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [np.asarray(x) for x in leaves]

    def flat(*xs: Any) -> Any:
        return for_the_reader(fn, *jax.tree.unflatten(tree, xs), **kwargs)

    with _traced_for(*device), _own_lines():
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    out = _Outer(on_kernel).run(closed, leaves)
    return jax.tree.unflatten(jax.tree.structure(shape), out)
