"""From a JAX function to the pallas_calls in it, with concrete operands.

This is the one reader of JAX's pallas_call equation. The equation's parameters are not public API: every field read
here was seen on jax 0.11.2 and 0.12.0.1.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import linecache
import math
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..installation import PACKAGE
from .effort import READ, spend
from .meshes import mesh_of, on_tpus, tpu_mesh
from .ops import (
    Beyond,
    cost,
    evaluate,
    holding,
    inlined,
    interpret,
    is_key,
    is_literal,
    nbytes_of,
    np_dtype,
    run_scan,
    run_while,
    to_numpy,
)
from .readers import COURSE_DIR, for_the_reader

_JAX_DIR = os.path.dirname(jax.__file__) + os.sep
_JAXLIB_DIR = os.path.dirname(jaxlib.__file__) + os.sep
_OUR_DIR = str(PACKAGE) + os.sep
_STDLIB_DIR = os.path.dirname(contextlib.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of the reader's own code."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        cell = _notebook_cell(self.file)
        if cell:
            return f"{cell}, line {self.line}"
        name = self.file if self.file.startswith("<") else os.path.basename(self.file)
        return f"{name}:{self.line}"


def _notebook_cell(file: str) -> str | None:
    """'In [5]' for a file name that ipykernel made up for a cell, else None."""
    if "ipykernel" not in file and "ipython-input" not in file:
        return None
    try:
        from IPython import get_ipython

        number = get_ipython().compile._filename_map.get(file)  # seen on IPython 8 and 9
    except (ImportError, AttributeError):
        number = None
    return f"In [{number}]" if number is not None else "your cell"


@functools.lru_cache(1024)
def is_readers_file(file: str) -> bool:
    """True for code that is neither JAX's, nor ours, nor the standard library's."""
    if file.startswith(COURSE_DIR):
        return True
    if file.startswith((_JAX_DIR, _JAXLIB_DIR, _OUR_DIR, "<frozen", "<string>", "<attrs")):
        return False
    return not file.startswith(_STDLIB_DIR) or "site-packages" in file


def source_line(file: str, line: int) -> SourceLine:
    return SourceLine(file, line, linecache.getline(file, line).strip())


def places_of(eqn: Any) -> Iterator[tuple[str, int]]:
    """(file, line) of the frames in which an equation was made, the innermost first."""
    # source_info.traceback.frames: seen on jax 0.11.2 and 0.12.0.1
    trace = eqn.source_info.traceback
    return ((frame.file_name, frame.line_num) for frame in (trace.frames if trace is not None else ()))


def callers_of(eqn: Any) -> Iterator[SourceLine]:
    """The reader's lines on the way to an equation, the innermost first."""
    return (source_line(*place) for place in places_of(eqn) if is_readers_file(place[0]))


def line_of(eqn: Any) -> SourceLine | None:
    """The reader's line that made an equation: the innermost frame outside JAX and this package. Or None."""
    return next(callers_of(eqn), None) if eqn is not None else None


def instruction_of(eqn: Any) -> tuple[Any, int] | None:
    """(code object, offset) of the reader's instruction that made an equation: the same one in each turn of a loop."""
    # traceback.raw_frames: seen on jax 0.11.2 and 0.12.0.1
    trace = eqn.source_info.traceback
    frames = zip(*trace.raw_frames(), strict=True) if trace is not None else ()
    return next((frame for frame in frames if is_readers_file(frame[0].co_filename)), None)


def expression_of(eqn: Any, line: SourceLine) -> str:
    """What stands on a reader's line and made an equation, as it is written; "" where it goes over several lines."""
    trace = eqn.source_info.traceback
    for code, offset in zip(*trace.raw_frames(), strict=True) if trace is not None else ():
        if code.co_filename == line.file:
            first, last, start, end = next(itertools.islice(code.co_positions(), offset // 2, None))
            if first == last == line.line:
                return linecache.getline(line.file, line.line).encode()[start:end].decode()
    return ""


Ranges = Sequence[tuple[str, int, int]]  # (file, first line, last line)
_asked: contextvars.ContextVar[Ranges] = contextvars.ContextVar("asked", default=())


def pointing_into(ranges: Ranges) -> contextlib.AbstractContextManager[None]:
    """While active, `asked_line_of` prefers lines of these ranges: what somebody is asked about."""
    return holding(_asked, ranges)


def is_asked(line: SourceLine) -> bool:
    """Whether a line is in what somebody is asked about; everything is, where that is not said."""
    ranges = _asked.get()
    return not ranges or any(line.file == file and a <= line.line <= b for file, a, b in ranges)


def asked_line_of(eqns: Iterable[Any]) -> SourceLine | None:
    """The line of an equation that a reader is to look at: in what they were asked to write, if it was called there.

    eqns: the equation, and those that it stands inside of, from the inside out: JAX forgets who called them.
    """
    eqn, *around = eqns
    callers = (line for each in (eqn, *around) for line in callers_of(each)) if _asked.get() else iter(())
    return next(filter(is_asked, callers), None) or line_of(eqn)


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of a block: `kind` is "blocked", "squeezed" or "element"."""

    kind: str
    size: int
    padding: tuple[int, int] = (0, 0)


@dataclasses.dataclass
class Operand:
    """An input or output array of a pallas_call and how it is cut into blocks."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dims: tuple[Dim, ...]
    space: str
    index_map: Any
    buffer_count: int = 2
    index_consts: Sequence[Any] | None = None  # what the index map of a pipeline inside of a kernel refers to
    copied: bool = True  # False: a pipeline's operand that is in VMEM already

    @property
    def block(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims)

    @property
    def ref_shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims if d.kind != "squeezed")

    @property
    def in_hbm(self) -> bool:
        return self.space in ("any", "hbm")

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return nbytes_of(self.block, self.dtype)

    @property
    def array_bytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)

    @property
    def stays_whole(self) -> bool:
        """The whole array in one block, by an index map of literal zeros: Pallas keeps that in a single buffer."""
        outs = self.index_map.outvars if self.index_map is not None else ()
        return self.block == self.shape and all(is_literal(v) and v.val == 0 for v in outs)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Number of blocks along each dimension, the last one possibly ragged."""
        return tuple(-(-size // max(1, d.size)) for size, d in zip(self.shape, self.dims, strict=True))


@dataclasses.dataclass(frozen=True)
class Scratch:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    space: str

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.dtype)


@dataclasses.dataclass
class Call:
    """One pallas_call with the values that it was given."""

    name: str
    where: SourceLine | None
    grid: tuple[int, ...]
    operands: list[Operand]
    semantics: tuple[str, ...]
    kernel: Any
    grid_names: tuple[Any, ...] = ()
    vmapped: tuple[int, ...] = ()
    scalar_names: list[str] = dataclasses.field(default_factory=list)
    scratch: list[Scratch] = dataclasses.field(default_factory=list)
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)  # input (counted after the scalars) -> output
    vmem_limit_bytes: int | None = None
    dynamic_bounds: int = 0  # dimensions of the grid that are known only at run time
    dynamic_axes: tuple[int, ...] = ()  # which they are
    on_cores: bool = False  # its grid are the cores of a mesh, each of which has scratch memory of its own
    sparse: bool = False  # these are SparseCores
    scalars: list[np.ndarray] = dataclasses.field(default_factory=list)
    inputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    callers: list[SourceLine] = dataclasses.field(default_factory=list)  # the innermost first
    consts: Sequence[Any] | None = None  # what the body of a pipeline inside of a kernel refers to
    bounds_known: bool = True  # of a pipeline inside of a kernel; else they count as 1
    inside: str = ""  # the kernel that a pipeline is in

    @property
    def ins(self) -> list[Operand]:
        return [o for o in self.operands if o.role == "in"]

    @property
    def outs(self) -> list[Operand]:
        return [o for o in self.operands if o.role == "out"]

    @property
    def parallel_axes(self) -> list[int]:
        """The dimensions of the grid whose indices may run in any order, and on several cores."""
        return [d for d, s in enumerate(self.semantics) if "parallel" in s and d not in self.vmapped]

    @property
    def scalar_avals(self) -> list[Any]:
        """Shape and dtype of each prefetched operand."""
        return [v.aval for v in self.kernel.invars[: len(self.scalar_names)]]


@dataclasses.dataclass
class Outside:
    """Array work done outside every pallas_call."""

    primitive: str
    shape: tuple[int, ...]
    line: SourceLine | None
    dtypes: frozenset[str] = frozenset()  # of its results
    flops: int = 0  # of matrix products, over all equations of this line
    crowded: bool = False  # a scatter that brings more than there are places for


@dataclasses.dataclass
class Capture:
    """A function run eagerly: its calls in order, its results, and the work it did outside of its kernels."""

    calls: list[Call]
    outputs: Any
    outside: list[Outside]
    from_kernel: list[bool]  # per flat output: does it come out of a pallas_call?
    chip: str  # that it was traced for


def space_of(aval: Any) -> str:
    name = str(getattr(aval, "memory_space", None) or "default").lower().split(".")[-1]
    if "semaphore" in name:
        return "semaphore"
    return {"default": "vmem", "none": "vmem", "vmem_shared": "vmem"}.get(name, name)


def _dim(dim: Any) -> Dim:
    kind = type(dim).__name__.lower()
    if isinstance(dim, int):
        return Dim("blocked", dim)
    if kind == "squeezed":
        return Dim("squeezed", 1)
    if kind in ("blocked", "element"):
        return Dim(kind, int(dim.block_size), tuple(getattr(dim, "padding", (0, 0))))
    raise Beyond(f"block dimensions of the kind pl.{type(dim).__name__}")


def arg_names(jaxpr: Any) -> list[str]:
    names = list(jaxpr.debug_info.arg_names or ())
    names += [f"ref{i}" for i in range(len(names), len(jaxpr.invars))]
    return [str(n) if n else f"ref{i}" for i, n in enumerate(names)]


def where_defined(jaxpr: Any) -> SourceLine | None:
    """The line where the reader defined a kernel or an index map."""
    match = re.search(r" at (.*):(\d+)$", str(jaxpr.debug_info.func_src_info or ""))
    return source_line(match[1], int(match[2])) if match else None


def _semantics(given: Sequence[Any] | None, rank: int) -> tuple[str, ...]:
    return tuple(str(getattr(s, "name", s)).lower() for s in given or ("arbitrary",) * rank)


def _buffer_count(mapping: Any) -> int:
    count = getattr(getattr(mapping, "pipeline_mode", None), "buffer_count", 2)
    return count if isinstance(count, int) else max(count)


def describe(eqn: Any, values: Sequence[Any] | None = None) -> Call:
    """A pallas_call equation as a Call without values. `values`: its operands, of which the first are the dynamic
    bounds of its grid; None: unknown, and counted as 1."""
    if eqn.primitive.name == "mpmd_map":
        return _describe_whole_array_kernel(eqn)
    p = eqn.params
    mapping, kernel = p["grid_mapping"], p["jaxpr"]
    names, n_scalars, n_in = iter(arg_names(kernel)), mapping.num_index_operands, mapping.num_inputs
    return Call(
        name=str(p.get("name") or kernel.debug_info.func_name),
        grid_names=tuple(mapping.grid_names or ()),
        scalar_names=[next(names) for _ in range(n_scalars)],
        operands=[_operand(next(names), i < n_in, each) for i, each in enumerate(mapping.block_mappings)],
        scratch=[_scratch(next(names), aval) for aval in mapping.scratch_avals],
        semantics=_semantics(getattr(p.get("compiler_params"), "dimension_semantics", None), len(mapping.grid)),
        aliases={i - n_scalars: o for i, o in dict(p["input_output_aliases"]).items()},
        vmem_limit_bytes=getattr(p.get("compiler_params"), "vmem_limit_bytes", None),
        **_of_grid(mapping, kernel, itertools.repeat(UNKNOWN) if values is None else iter(values)),
    )


UNKNOWN = object()  # in place of a value that nobody knows yet


def _of_grid(mapping: Any, kernel: Any, bounds: Iterator[Any]) -> dict[str, Any]:
    """What a call and a pipeline inside of a kernel have in common. bounds: of the dynamic dimensions of the grid."""
    grid = [g if isinstance(g, int) else next(bounds) for g in mapping.grid]
    return {
        "where": where_defined(kernel),
        "kernel": kernel,
        "grid": tuple(1 if g is UNKNOWN else int(np.asarray(g)) for g in grid),
        "vmapped": tuple(mapping.vmapped_dims),
        "dynamic_bounds": mapping.num_dynamic_grid_bounds,
        "dynamic_axes": tuple(d for d, g in enumerate(mapping.grid) if not isinstance(g, int)),
        "bounds_known": all(g is not UNKNOWN for g in grid),
    }


def _operand(name: str, is_input: bool, mapping: Any, **more: Any) -> Operand:
    return Operand(
        name,
        "in" if is_input else "out",
        tuple(mapping.array_aval.shape),
        np_dtype(mapping.array_aval),
        tuple(_dim(d) for d in mapping.block_shape),
        space_of(mapping.transformed_block_aval),
        mapping.index_map_jaxpr,
        _buffer_count(mapping),
        **more,
    )


def describe_pipeline(eqn: Any, values: Sequence[Any], inside: str = "") -> tuple[Call, list[Any]]:
    """(an emit_pipeline equation as a Call, the Refs that it is given, which may be seen through `.at[...]`).

    values: its operands; a bound of the grid that is UNKNOWN counts as 1. inside: the kernel around it. Raises Beyond
    for what is no plain pipeline.
    """
    p, given = eqn.params, eqn.params["args_tree"].unflatten(values)
    mapping, body = p["grid_mapping"], p["body_jaxpr"]
    if given.allocations is not None or p["_explicit_indices"] or (p["num_cores"] or 1) != 1:
        raise Beyond("a pipeline with buffers of its own, or over several cores")
    refs = jax.tree.leaves(p["refs_tree"].unflatten(given.refs_flat), is_leaf=lambda x: hasattr(x, "transforms"))
    names, consts = arg_names(body), iter(given.all_index_map_consts)
    operands = []
    for i, (bm, ref) in enumerate(zip(mapping.block_mappings, refs, strict=True)):
        its = tuple(itertools.islice(consts, len(bm.index_map_jaxpr.consts)))
        operand = _operand(names[i], i < mapping.num_inputs, bm, index_consts=its)
        if operand.in_hbm and (getattr(ref, "transforms", None) or operand.block != operand.shape):
            raise Beyond("a pipeline whose blocks stay in HBM")
        operands.append(operand)
    call = Call(
        name=str(body.debug_info.func_name or "the pipeline"),
        operands=operands,
        semantics=_semantics(p["dimension_semantics"], len(mapping.grid)),
        callers=[*callers_of(eqn)],
        consts=given.body_consts,
        inside=inside,
        **_of_grid(mapping, body, iter(given.dynamic_grid_spec)),
    )
    return call, refs


def _scratch(name: str, aval: Any) -> Scratch:
    return Scratch(name, tuple(getattr(aval, "shape", ())), np_dtype(aval), space_of(aval))


def _describe_whole_array_kernel(eqn: Any) -> Call:
    """pl.kernel and pl.core_map: one program per core, every operand a whole array, most of them in HBM."""
    p = eqn.params
    if len(p["jaxprs"]) != 1:
        raise Beyond("several programs in one kernel (mpmd)")
    (kernel,), (mesh,) = p["jaxprs"], p["meshes"]
    names, avals, count = arg_names(kernel), [v.aval for v in kernel.invars], len(eqn.invars) + len(eqn.outvars)
    operands = []
    for i, (name, aval) in enumerate(zip(names[:count], avals, strict=False)):
        dims = tuple(Dim("blocked", size) for size in aval.shape)
        space = "hbm" if aval.memory_space is None or space_of(aval) == "any" else space_of(aval)
        role = "in" if i < len(eqn.invars) else "out"
        operands.append(Operand(name, role, tuple(aval.shape), np_dtype(aval), dims, space, None, 1))
    cores = {str(name): size for name, size in mesh.shape.items()}
    if math.prod(cores.values()) > 1:
        if (shared := next(named(kernel, *_TOGETHER), None)) is not None:
            raise Beyond(f"{shared.primitive.name}, with which the cores {cores} of a kernel wait for one another")
        if any("shared" in str(aval.memory_space).lower() for aval in avals):
            raise Beyond(f"memory that the cores {cores} of a kernel share")
    return Call(
        name=str(p.get("name") or kernel.debug_info.func_name),
        where=where_defined(kernel),
        grid=tuple(cores.values()),
        grid_names=tuple(cores),
        operands=operands,
        scratch=[*map(_scratch, names[count:], avals[count:])],
        semantics=("parallel",) * len(cores),
        kernel=kernel,
        aliases=dict(p.get("input_output_aliases") or {}),
        vmem_limit_bytes=getattr(p.get("compiler_params"), "vmem_limit_bytes", None),
        on_cores=True,
        sparse=str(mesh.core_type).lower().startswith("sc_"),  # core_type: seen on jax 0.11.2 and 0.12.0.1
    )


# What the cores of one kernel do together: here they run one after the other.
_TOGETHER = ("barrier", "sc_fetch_and_add", "get_barrier_semaphore")


CHIP, SPARSE_CHIP = "TPU v5e", "TPU7x"  # what kernels are traced for; the second has SparseCores
_chip: contextvars.ContextVar[str] = contextvars.ContextVar("chip", default=CHIP)


def on_chip(kind: str) -> contextlib.AbstractContextManager[None]:
    """While active, functions are traced for this chip, by the name that JAX has for it."""
    return holding(_chip, kind)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Trace kernels as if a TPU were there: every pallas_call interpretable, emit_pipeline and get_tpu_info at home."""
    as_tpu = pltpu.force_tpu_interpret_mode(True)  # type: ignore[arg-type]
    forget_other_grids()
    with as_tpu, on_tpus(tpu_mesh(_chip.get())):
        yield


@contextlib.contextmanager
def _own_lines() -> Iterator[None]:
    """Every equation gets the line that it is traced from. Without this, all that the backward function of a custom_vjp
    does, kernels included, would have the line that asked for the gradient."""
    # source_info_util.current and its Traceback: seen on jax 0.11.2 and 0.12.0.1
    from jax._src import source_info_util as info

    before = info.current
    info.current = lambda: before().replace(traceback=info.xla_client.Traceback.get_traceback())
    try:
        yield
    finally:
        info.current = before


def forget_traces() -> None:
    """The next trace of any kernel runs the reader's function again."""
    # Where all traces of kernels are remembered: seen on jax 0.11.2 and 0.12.0.1
    from jax._src.interpreters import partial_eval

    partial_eval.trace_to_jaxpr.cache_clear()


def forget_other_grids() -> None:
    """Makes the next trace of a kernel one of its own grid.

    JAX 0.11.2 remembers the trace of a kernel by its blocks alone: on another grid, pl.num_programs would be that of
    the first. 0.12.0.1 does not.
    """
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
        forget_traces()


def is_gpu_kernel(eqn: Any) -> bool:
    """Whether an equation is a plgpu.kernel: its meshes have clusters. Seen on jax 0.11.2 and 0.12.0.1."""
    if eqn.primitive.name != "mpmd_map":
        return False
    return all(hasattr(mesh, "cluster_names") for mesh in eqn.params["meshes"])


class ForGpu(Beyond):
    """A function reaches a kernel for a GPU, which another machine runs."""


class ForMesh(Beyond):
    """A function reaches a shard_map over several devices, which another machine runs."""


def primitive_of(eqn: Any) -> str:
    """The name of an equation's primitive."""
    return eqn.primitive.name


def is_pallas_call(eqn: Any) -> bool:
    """Whether it is a call of the kernel for a TPU."""
    return eqn.primitive is pl.pallas_call_p


def is_call(eqn: Any) -> bool:
    return is_pallas_call(eqn) or primitive_of(eqn) == "mpmd_map"


def name_of_call(eqn: Any) -> str:
    """What a kernel is called, or "a kernel"."""
    return str(eqn.params.get("name") or "a kernel")


def subprograms(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(item, "eqns"):
                yield item


def everywhere(jaxpr: Any, in_kernels: bool = True) -> Iterator[tuple[Any, Any]]:
    """(program, equation) of every equation of a program and of those inside of it, in order.

    in_kernels=False: kernels themselves, too, but nothing inside of them.
    """
    for eqn in jaxpr.eqns:
        yield jaxpr, eqn
        for inner in subprograms(eqn) if in_kernels or not is_call(eqn) else ():
            yield from everywhere(inner, in_kernels)


def named(jaxpr: Any, *primitives: str) -> Iterator[Any]:
    """The equations with one of these primitives, anywhere inside of a program."""
    return (eqn for _, eqn in everywhere(jaxpr) if eqn.primitive.name in primitives)


def depends_on(jaxpr: Any, number: int) -> list[int]:
    """Which of its first arguments the results of a program can depend on."""
    reached: dict[Any, set[int]] = {v: {i} for i, v in enumerate(jaxpr.invars[:number])}

    def of(atoms: Sequence[Any]) -> set[int]:
        return set().union(*(reached.get(a, set()) for a in atoms if not is_literal(a)))

    for eqn in jaxpr.eqns:
        reached.update(dict.fromkeys(eqn.outvars, of(eqn.invars)))
    return sorted(of(jaxpr.outvars))


def holds_call(jaxpr: Any) -> bool:
    """True when a kernel is anywhere inside of a program."""
    return any(is_call(eqn) or eqn.primitive.name == "core_map" for _, eqn in everywhere(jaxpr))


# Moves that do no arithmetic: allowed outside of a kernel. A broadcast counts as one only when it starts from a scalar.
MOVES = frozenset(
    "reshape squeeze convert_element_type copy broadcast_in_dim stop_gradient sharding_constraint "
    "optimization_barrier".split()
)

_MOST_CALLS = 4096
OnCall = Callable[[Call, Any, list[Any]], list[Any]]
OnMesh = Callable[["Evaluator", Any, list[Any]], list[Any]]


class Evaluator:
    """Runs the outer program eagerly, equation by equation, in NumPy, and hands every pallas_call to `on_call`.

    on_mesh: runs a shard_map over several devices. Without it, one that holds a kernel is beyond. on_gpu(equation,
    values): runs a plgpu.kernel, which is none of `calls`.
    """

    every_scan = False  # whether each turn of a scan is run by itself, and not of those alone that hold a kernel

    def __init__(self, on_call: OnCall, on_mesh: OnMesh | None = None, on_gpu: Callable[..., list[Any]] | None = None):
        self.on_call, self.on_mesh, self.on_gpu = on_call, on_mesh, on_gpu
        self.calls: list[Call] = []
        self.outside: dict[tuple[str, Any, frozenset[str], bool], Outside] = {}
        self.made: dict[int, Any] = {}  # what came out of a kernel, by its id(), which is not used twice while it lives
        self.site: SourceLine | None = None

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        return interpret(jaxpr, values, self.apply)

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if is_call(eqn):
            return self.keep(self._call(eqn, values))
        inner = inlined(eqn)
        if inner is not None:
            return self._inline(eqn, inner, values)
        if name == "shard_map":
            mesh = mesh_of(eqn)
            if mesh.size == 1:
                return self.run(params["jaxpr"], values)
            if self.on_mesh is None:
                raise ForMesh(f"a shard_map over {mesh.size} devices, {mesh.axes}")
            return self.on_mesh(self, eqn, values)
        if name == "cond":
            return self.run(params["branches"][int(np.asarray(values[0]))], values[1:])
        if name == "scan" and (self.every_scan or holds_call(params["jaxpr"])):
            return self.keep(run_scan(eqn, values, lambda xs: self.run(params["jaxpr"], xs)))
        if name == "while":
            return self.keep(run_while(eqn, values, self.run))
        if any(holds_call(inner) for inner in subprograms(eqn)):
            raise Beyond(f"a kernel inside of {name}")
        if any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars)):
            raise Beyond(f"a Ref outside of a kernel ({name})")
        out = evaluate(eqn, values)
        outputs = list(out) if eqn.primitive.multiple_results else [out]
        self._note_work(eqn, values, outputs)
        return outputs

    def _inline(self, eqn: Any, inner: Any, values: list[Any]) -> list[Any]:
        """Inside a library's own jit, the line that counts is the one that called it."""
        file, before = str(inner.debug_info.func_filename or ""), self.site
        if before is None and not (file and is_readers_file(file)):
            self.site = line_of(eqn)
        try:
            return self.run(inner, values)
        finally:
            self.site = before

    def _call(self, eqn: Any, values: list[Any]) -> list[Any]:
        if len(self.calls) >= _MOST_CALLS:
            raise Beyond(f"more than {_MOST_CALLS} pallas_calls in one run")
        if is_gpu_kernel(eqn):
            if self.on_gpu is None:
                raise ForGpu("a kernel for a GPU")
            return self.on_gpu(eqn, values)
        call = describe(eqn, values)
        if handed := [o.name for o in call.operands if o.space == "semaphore"]:
            raise Beyond(f"{handed[0]}, a semaphore that one kernel hands to another")
        operands = values[call.dynamic_bounds :]
        n_scalars = len(call.scalar_names)
        call.scalars = [to_numpy(v) for v in operands[:n_scalars]]
        call.inputs = [to_numpy(v) for v in operands[n_scalars:]]
        call.callers = [*callers_of(eqn)]
        self.calls.append(call)
        return self.on_call(call, eqn, values)

    def capture(self, closed: Any, shape: Any, leaves: Sequence[Any], chip: str) -> Capture:
        """Runs a traced function. shape: of its results, as a pytree."""
        flat = self.run(discharged(closed), leaves)
        outputs = jax.tree.unflatten(jax.tree.structure(shape), flat)
        return Capture(self.calls, outputs, list(self.outside.values()), [id(y) in self.made for y in flat], chip)

    def keep(self, outputs: list[Any]) -> list[Any]:
        """Remembers that these came out of a kernel."""
        self.made.update((id(y), y) for y in outputs)
        return outputs

    def _note_work(self, eqn: Any, values: list[Any], outputs: list[Any]) -> None:
        name = eqn.primitive.name
        sizes = [math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        move = name in MOVES and not (
            name == "broadcast_in_dim" and sizes[0] > np.size(values[0]) > 1  # a copy that grows
        )
        if any(id(v) in self.made for v in values):
            self.keep(outputs)
        if move:
            return
        if max(sizes, default=0) > 1 or any(np.size(v) > 1 for v in values if hasattr(v, "shape")):
            line = self.site or line_of(eqn)
            shape = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
            dtypes = frozenset(str(v.aval.dtype) for v in eqn.outvars if hasattr(v.aval, "dtype"))
            crowded = name.startswith("scatter") and np.size(values[-1]) > sizes[0]
            key = (name, line, dtypes, crowded)
            work = self.outside.setdefault(key, Outside(name, shape, line, dtypes, crowded=crowded))
            if name == "dot_general":
                work.flops += cost(eqn)[0]


def _traced(fn: Callable[..., Any], leaves: list[Any]) -> Any:
    """make_jaxpr's (program, shape of its results), in which a plain emit_pipeline is one equation."""
    # The flag, and the parameters of the equation: seen on jax 0.11.2 and 0.12.0.1
    from jax._src import config

    trace = jax.make_jaxpr(fn, return_shape=True)
    try:
        with config.use_emit_pipeline_primitive(True):
            closed, shape = for_the_reader(trace, *leaves)
        for pipeline in named(closed, "emit_pipeline"):
            describe_pipeline(pipeline, [UNKNOWN] * len(pipeline.invars))
    except Exception as error:
        if not isinstance(error, Beyond) and not _came_through(error, _PIPELINE):
            raise
        closed, shape = for_the_reader(jax.make_jaxpr(fn, return_shape=True), *leaves)  # spelt out, as loops and copies
    return closed, shape


# Parts of the names of files: of emit_pipeline, and of JAX's own code for GPUs, which may ask what GPU is there
_PIPELINE = os.path.join("pallas", "mosaic", "pipeline.py")
_GPU_CODE = (os.path.join("", "mosaic_gpu", ""), os.path.join("", "ops", "gpu", ""))


def _came_through(error: BaseException, *parts: str) -> bool:
    """Whether an exception came while such code of JAX's was traced."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(file.startswith(_JAX_DIR) and any(part in file for part in parts) for file in files)


def discharged(program: Any) -> Any:
    """A program without the Refs that it makes outside of kernels (jax.new_ref): each is a value that is handed on."""
    if not any(eqn.primitive.name in ("new_ref", "empty_ref") for _, eqn in everywhere(program, in_kernels=False)):
        return program
    from jax._src.state.discharge import discharge_state  # seen on jax 0.11.2 and 0.12.0.1

    return discharge_state(program)


Programs = dict[Any, Any]  # what the traces of one function have made, by the shapes of its arguments


def capture(
    fn: Callable[..., Any],
    *args: Any,
    on_call: OnCall,
    on_mesh: OnMesh | None = None,
    programs: Programs | None = None,
    **kwargs: Any,
) -> Capture:
    """Traces `fn(*args, **kwargs)` and runs it eagerly; every pallas_call that is reached goes to `on_call`.

    args: arrays, or pytrees of arrays; kwargs: static (block sizes and the like).
    on_call(call, equation, values) returns the outputs of that call as arrays. on_mesh(evaluator, equation, values):
    those of a shard_map over several devices.
    programs: shared by captures of the same function with the same kwargs. As under jit, equal shapes are traced once.
    Raises whatever tracing the reader's code raises, ForGpu at a kernel for a GPU, and `Beyond` for what cannot be
    followed.
    """
    leaves, tree = jax.tree.flatten(args)

    def flat_fn(*flat: Any) -> Any:
        return for_the_reader(fn, *jax.tree.unflatten(tree, flat), **kwargs)

    flat_fn.__name__ = getattr(fn, "__name__", "fn")
    leaves = [x if is_key(x) else np.asarray(x) for x in leaves]

    known: Programs = {} if programs is None else programs

    def on(chip: str) -> Capture:
        key = chip, tree, tuple((np.shape(x), str(x.dtype)) for x in leaves)
        with on_chip(chip), tracing():
            if key not in known:
                with _own_lines():
                    known[key] = _traced(flat_fn, leaves)
                spend(READ * sum(1 for _ in everywhere(known[key][0])))
            closed, shape = known[key]
            return Evaluator(on_call, on_mesh).capture(closed, shape, leaves, chip)

    try:
        return on(_chip.get())
    except Exception as error:
        if not isinstance(error, Beyond) and _came_through(error, *_GPU_CODE):
            raise ForGpu("a kernel for a GPU") from error
        if "SparseCore" not in str(error) or _chip.get() == SPARSE_CHIP:
            raise
    return on(SPARSE_CHIP)


def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The plain Python function under jit, custom_vjp, functools.partial and the like."""
    seen = inspect.unwrap(fn)
    return wrapped(seen.func) if hasattr(seen, "func") else seen
