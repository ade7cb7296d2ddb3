"""Reads the equations of a kernel for a GPU into instructions: one builder for each primitive.

The primitives' names and parameters are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import ast
import dataclasses
import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .capture import SourceLine, arg_names, space_of, where_defined
from .gpu_inline import read_inline
from .gpu_program import Alloc, Instr, Program, View
from .ops import Beyond, cost, inlined, is_literal, np_dtype


class _Reader:
    """Reads one program of JAX's into a Program."""

    def __init__(self, jaxpr: Any, open_consts: bool):
        inner, consts = getattr(jaxpr, "jaxpr", jaxpr), () if open_consts else getattr(jaxpr, "consts", ())
        self.slots: dict[Any, int] = {}
        self.template: list[Any] = []
        for var, value in zip(inner.constvars, consts, strict=False):
            self._new(var, np.asarray(value))
        given = tuple(self._new(var) for var in (*(() if consts else inner.constvars), *inner.invars))
        instrs = [self._instr(eqn) for eqn in inner.eqns]
        self.program = Program(self.template, given, tuple(self._slot(v) for v in inner.outvars), instrs)

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
        flops = specials = 0
        if name in _BUILDERS:
            kind, build = _BUILDERS[name]
            more = build(p, ins, eqn)
        elif name == "inline_mgpu":
            kind, more = read_inline(p, ins)
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


# --- one builder for each primitive: (parameters, slots of the operands, equation) -> what is known, by name

Known = dict[str, Any]
_TREE, _TREEDEF = "{}_transforms_tree", "{}_transforms_treedef"  # the parameter with the transforms of a name


def _views(p: Any, names: Sequence[str], ins: Sequence[int], tree: str = _TREE) -> Known:
    """A View for each Ref, which are the first operands, by its name; and the slot of a predicate, if it has one."""
    found, rest = Known(), tuple(ins[len(names) :])
    for name, ref in zip(names, ins, strict=False):
        transforms = p[tree.format(name)]
        n = transforms.num_leaves if transforms is not None else 0
        found[name] = View(ref, transforms, rest[:n])
        rest = rest[n:]
    return found | ({"predicate": rest[-1]} if p.get("has_user_predicate") else {})


def _flat(axes: Any) -> tuple[Any, ...]:
    """Names of axes: JAX has one name, or several, of which some may stand together in a tuple, or None."""
    if not isinstance(axes, tuple | list):
        return () if axes is None else (axes,)
    return tuple(name for each in axes for name in _flat(each))


def _read(p: Any, ins: Any, eqn: Any) -> Known:
    return {**_views(p, ["view"], ins, "tree"), "optimized": p.get("optimized", True)}


def _write(p: Any, ins: Any, eqn: Any) -> Known:
    ref, value, *leaves = ins
    return {**_read(p, [ref, *leaves], eqn), "value": value, "add": eqn.primitive.name == "addupdate"}


def _load_tma(p: Any, ins: Any, eqn: Any) -> Known:
    if not p.get("has_barrier", True):
        raise Beyond("copies without a barrier (cp.async), which GPUs before Hopper make")
    tracked = p.get("leader_tracked")
    leader = None if tracked is None else getattr(tracked, "axis", -1)
    views = _views(p, ["src", "dst", "barrier"], ins, _TREEDEF)
    return {**views, "axes": _flat(p.get("collective_axes")), "leader": leader}


def _store_tma(p: Any, ins: Any, eqn: Any) -> Known:
    views = _views(p, ["src", "dst"], ins, _TREEDEF)
    return {**views, "commit": p.get("commit_group", True), "reduce": p.get("reduction_op")}


def _barrier(p: Any, ins: Any, eqn: Any) -> Known:
    tree = "transforms_treedef" if "transforms_treedef" in p else "barrier_transforms_tree"
    return {**_views(p, ["barrier"], ins, tree), "axes": _flat(p.get("collective_axis"))}


def _tcgen05(p: Any, ins: Any, eqn: Any) -> Known:
    if p.get("scaled") or p.get("sparse"):
        raise Beyond("tcgen05_mma with scales or sparsity")
    acc, a, b, accumulate, *rest = ins
    views = _views(p, ["acc", "a", "b", *(["barrier"] if p["arrive"] else [])], [acc, a, b, *rest])
    return {**views, "accumulate": accumulate, "axes": _flat(p.get("collective_axis"))}


def _run_scoped(p: Any, ins: Any, eqn: Any) -> Known:
    jaxpr = p["jaxpr"]
    names = _unpacked(arg_names(jaxpr)[-len(jaxpr.invars) :] if jaxpr.invars else [], where_defined(jaxpr))
    transforms = p.get("ref_transforms") or ((),) * len(jaxpr.invars)
    allocs = [_alloc(n, v.aval, t) for n, v, t in zip(names, jaxpr.invars, transforms, strict=True)]
    programs = [read_program(jaxpr, open_consts=True)]
    return {"programs": programs, "allocs": allocs, "axes": _flat(p.get("collective_axes"))}


Written = ast.FunctionDef | ast.Lambda


def written_at(where: SourceLine | None) -> Written | None:
    """The function on a line as it is written: JAX forgets the names of a kernel's operands."""
    return _functions_of(where).get(where.line) if where is not None else None


def _functions_of(where: SourceLine) -> dict[int, Written]:
    return _by_line("".join(linecache.getlines(where.file)))


@functools.lru_cache(16)
def _by_line(source: str) -> dict[int, Written]:
    """Each function by its first line."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magics
        return {}
    found: dict[int, Written] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            found.setdefault(min(n.lineno for n in (node, *getattr(node, "decorator_list", ()))), node)
    return found


def _unpacked(names: list[str], where: SourceLine | None) -> list[str]:
    """The names of Refs, where a function has them as a tuple, *refs, those that it gives them when it unpacks it."""
    function = written_at(where)
    if where is None or not isinstance(function, ast.FunctionDef) or function.args.vararg is None:
        return names
    every = {f.name: f for f in _functions_of(where).values() if isinstance(f, ast.FunctionDef)}
    tuple_of = function.args.vararg.arg
    found: dict[str, str] = {}
    _give(function, {tuple_of: [name for name in names if name.startswith(f"{tuple_of}[")]}, every, found)
    return [found.get(name, name) for name in names]


def _give(
    function: ast.FunctionDef,
    tuples: dict[str, list[str]],
    every: Mapping[str, ast.FunctionDef],
    found: dict[str, str],
) -> None:
    """Finds the names that a function, or one that it calls, gives to the elements of tuples of Refs."""
    for statement in function.body:
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Name(of)) if of in tuples:
                refs = tuples[of]
                star = next((n for n, t in enumerate(targets) if isinstance(t, ast.Starred)), len(targets))
                more = len(refs) - len(targets) + 1  # that the one with a star takes
                if star < len(targets):
                    rest = ast.unparse(targets[star].value)  # type: ignore[attr-defined]
                    tuples[rest] = refs[star : star + more]
                    if rest != of:
                        found.update({ref: f"{rest}[{n}]" if more > 1 else rest for n, ref in enumerate(tuples[rest])})
                    refs = [*refs[:star], *refs[star + more :]]
                plain = [ast.unparse(t) for t in targets if not isinstance(t, ast.Starred)]
                found.update(zip(refs, plain, strict=False))
        for call in ast.walk(statement):
            match call:
                case ast.Call(ast.Name(name), args) if name in every and every[name] is not function:
                    given = zip(every[name].args.args, args, strict=False)
                    inner = {p.arg: tuples[a.id] for p, a in given if isinstance(a, ast.Name) and a.id in tuples}
                    if inner:
                        _give(every[name], inner, every, found)


def _alloc(name: str, aval: Any, transforms: Sequence[Any]) -> Alloc:
    inner = getattr(aval, "inner_aval", aval)
    dtype_name, space = str(inner.dtype), str(getattr(aval, "memory_space", "") or "").lower().split(".")[-1]
    shape = tuple(inner.shape)
    if "barrier" in dtype_name:
        arrivals, axes = inner.dtype.num_arrivals, _flat(getattr(inner.dtype, "collective_axes", ()))
        tensor = bool(getattr(inner.dtype, "orders_tensor_core", False))
        return Alloc(name, "barrier", shape, np.dtype(np.int64), "smem", arrivals, tensor, axes)
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


def _run_state(p: Any, ins: Any, eqn: Any) -> Known:
    jaxpr, atoms = p["jaxpr"], iter(eqn.invars)
    given = p.get("is_initialized") or (True,) * len(jaxpr.invars)
    cells = []
    for name, var, ok in zip(arg_names(jaxpr), jaxpr.invars, given, strict=True):
        passed = ok and hasattr(next(atoms).aval, "inner_aval")  # a Ref from outside stays what it is
        cells.append(None if passed else dataclasses.replace(_alloc(name, var.aval, ()), kind="acc"))
    return {"programs": [read_program(jaxpr)], "cells": cells, "given": tuple(given)}


def _scan(p: Any, ins: Any, eqn: Any) -> Known:
    return {"programs": [read_program(p["jaxpr"])], "length": p["length"]}


def _while(p: Any, ins: Any, eqn: Any) -> Known:
    programs = [read_program(p["cond_jaxpr"]), read_program(p["body_jaxpr"])]
    return {"programs": programs, "consts": (p["cond_nconsts"], p["body_nconsts"])}


def _cond(p: Any, ins: Any, eqn: Any) -> Known:
    return {"programs": [read_program(b) for b in p["branches"]]}


def _mpmd(p: Any, ins: Any, eqn: Any) -> Known:
    """pl.core_map over the warps of a warpgroup."""
    (jaxpr,), (mesh,) = p["jaxprs"], p["meshes"]
    if type(mesh).__name__ != "WarpMesh":
        raise Beyond(f"a {type(mesh).__name__} inside of a kernel for a GPU")
    return {"programs": [read_program(jaxpr)], "axis": mesh.axis_name, "warps": 4}


def _semaphore(p: Any, ins: Any, eqn: Any) -> Known:
    ref, transforms, *rest = jax.tree.unflatten(p["args_tree"], list(ins))
    if "signal" in eqn.primitive.name and any(device is not None for device in rest[1:]):
        raise Beyond("a signal to another device")
    leaves, tree = jax.tree.flatten(transforms)
    return {"barrier": View(ref, tree, leaves), **dict(zip(["amount", "decrement"], rest, strict=False))}


def _query(p: Any, ins: Any, eqn: Any) -> Known:
    return {**_views(p, ["result"], ins, "transforms_tree"), "names": tuple(p["grid_names"])}


def _same(p: Any, ins: Any, eqn: Any) -> Known:
    layout = p.get("new_layout")
    return {} if layout is None else {"layout": getattr(layout, "name", str(layout))}


def _refs(*names: str) -> Callable[..., Known]:
    return lambda p, ins, eqn: _views(p, names, ins)


def _with(*names: str) -> Callable[..., Known]:
    return lambda p, ins, eqn: {n: p[n] for n in names if n in p}


# Primitives that change nothing here: hints, fences that the machine does not need, and printing.
_SILENT = (
    "set_max_registers debug_print debug_callback print_layout async_prefetch griddepcontrol_wait "
    "griddepcontrol_launch_dependents check delay"
)
_BUILDERS: dict[str, tuple[str, Callable[..., Known]]] = {  # primitive -> kind of the instruction, builder
    **dict.fromkeys(_SILENT.split(), ("silent", _with())),
    **dict.fromkeys(["get", "load", "async_load"], ("read", _read)),
    **dict.fromkeys(["swap", "store", "async_store_tmem", "addupdate"], ("write", _write)),
    **dict.fromkeys(["layout_cast", "optimization_barrier"], ("same", _same)),
    **{name: (name, _with()) for name in ("commit_group", "commit_smem", "commit_tmem", "mma")},
    "copy_gmem_to_smem": ("load_tma", _load_tma),
    "copy_smem_to_gmem": ("store_tma", _store_tma),
    "wait_smem_to_gmem": ("wait_stores", _with("n", "wait_read_only")),
    "wait_load_tmem": ("wait_tmem", _with()),
    "barrier_arrive": ("arrive", _barrier),
    "barrier_wait": ("wait", _barrier),
    "barrier_arrive_and_wait": ("arrive_wait", _barrier),
    "barrier_test": ("test", _barrier),
    "tcgen05_commit_arrive": ("tcgen05_arrive", _barrier),
    "tcgen05_mma": ("tcgen05", _tcgen05),
    "wgmma_ref": ("wgmma", _refs("acc", "a", "b")),
    "wgmma_wait": ("wgmma_wait", _with("n")),
    "wgmma_accumulator_deref": ("acc_read", _with("wait_n")),
    "wgmma_accumulator_store": ("acc_write", _with()),
    "run_scoped": ("run_scoped", _run_scoped),
    "run_state": ("run_state", _run_state),
    "scan": ("scan", _scan),
    "while": ("while", _while),
    "cond": ("cond", _cond),
    "mpmd_map": ("warps", _mpmd),
    "axis_index": ("axis_index", _with("axis_name")),
    "semaphore_signal": ("signal", _semaphore),
    "semaphore_wait": ("sem_wait", _semaphore),
    "semaphore_read": ("sem_read", _semaphore),
    "try_cluster_cancel": ("cancel", _refs("result", "barrier")),
    "query_cluster_cancel": ("query", _query),
}
