"""What the kernels of a function have to do: how often each of its equations runs, its bytes, its matrix products.

Nothing is computed but integers: those that say where a loop ends and which branch is taken. A few of a kernel's CTAs
are followed, spread evenly over its grid. Primitives and their parameters are not public API of JAX: seen on jax 0.11.2
and 0.12.0.1.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...ir.capture import SourceLine, line_of, subprograms
from ...ir.folded import folded
from ...ir.ops import OPS, cost, evaluate, inlined, is_literal, nbytes_of, np_dtype, scan_groups
from ...ir.places import locate
from ...ir.program import equations

_MOST_EQUATIONS = 300_000  # followed, of one kernel: some seconds
_MOST_CTAS = 32
_KNOWN_SIZE = 4096  # larger arrays are not known, whatever is in them
_WARPS = 4  # in a warpgroup

Axes = Mapping[Any, int]


class _TooLong(Exception):
    """A kernel has more equations to follow than there is time for."""


@dataclasses.dataclass(eq=False)
class _Ref:
    """An operand of a kernel, in GMEM. value: where it is known."""

    number: int
    value: np.ndarray | None


@dataclasses.dataclass
class Work:
    """What CTAs do, on average. Bytes and FLOPs are of one CTA.

    tensor_flops: dtype -> FLOPs of matrix products. loaded, stored: operand -> bytes between GMEM and an SM.
    runs: id of an equation -> how many warpgroups' runs of it. equations: id -> equation.
    """

    tensor_flops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    flops: float = 0.0
    specials: float = 0.0
    loaded: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    stored: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    runs: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Work", share: float) -> None:
        for mine, its in (
            (self.tensor_flops, other.tensor_flops),
            (self.loaded, other.loaded),
            (self.stored, other.stored),
            (self.runs, other.runs),
        ):
            for key, amount in its.items():
                mine[key] += amount * share  # type: ignore[index, assignment]
        self.flops += other.flops * share
        self.specials += other.specials * share


@dataclasses.dataclass
class Call:
    """A plgpu.kernel that a function reaches.

    grid: CTAs by name of the axis, clusters multiplied out. names, sizes: of the operands, inputs first. mean, most: of
    a CTA, and of the CTA with the most to do; None where that could not be found out, for a reason in `notes`.
    """

    name: str
    where: SourceLine | None
    grid: dict[str, int]
    threads: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    mean: Work | None
    most: Work | None
    notes: list[str]
    equations: dict[int, Any]

    @property
    def ctas(self) -> int:
        return math.prod(self.grid.values())

    def lines(self, known: Callable[[tuple[str, int]], bool], work: Work) -> dict[tuple[str, int], float]:
        """(file, line) that is `known` -> how many warpgroups run it, the median of the equations that stand there."""
        runs: dict[tuple[str, int], list[float]] = {}
        for key, eqn in self.equations.items():
            place = next((at for at in _places(eqn) if known(at)), None)
            if place is not None:
                runs.setdefault(place, []).append(work.runs[key])
        return {place: statistics.median_low(each) for place, each in runs.items()}


def calls(program: Any, values: Sequence[Any]) -> list[Call]:
    """The kernels of a traced function, in order. values: its arguments, flat; what is only a shape is not known."""
    found: list[Call] = []
    known = [_known(value) for value in values]
    follow = _Follow({}, on_call=lambda eqn, given: found.append(_call(eqn, given)))
    follow.closed(program, known)
    return found


def _known(value: Any) -> np.ndarray | None:
    if isinstance(value, jax.ShapeDtypeStruct) or not np.issubdtype(np.dtype(value.dtype), np.integer):
        return None
    return np.asarray(value) if math.prod(np.shape(value)) <= _KNOWN_SIZE else None


def _call(eqn: Any, given: Sequence[Any]) -> Call:
    mesh, body = eqn.params["meshes"][0], eqn.params["jaxprs"][0]
    clusters = dict(zip(mesh.grid_names, mesh.grid, strict=True))
    inside = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    warpgroups = mesh.num_threads or 1
    refs = [_Ref(i, v) for i, v in enumerate([*given, *[None] * (len(body.invars) - len(given))])]
    call = Call(
        name=str(eqn.params["name"]),
        where=line_of(eqn) or next((line for _, line in equations(body) if line), None),
        grid={str(name): size for name, size in {**clusters, **inside}.items()},
        threads=warpgroups,
        names=tuple(
            f"input {i + 1}" if i < len(given) else f"output {i - len(given) + 1}" for i in range(len(body.invars))
        ),
        sizes=tuple(nbytes_of(v.aval.shape, np_dtype(v.aval)) for v in body.invars),
        mean=None,
        most=None,
        notes=[],
        equations={},
    )

    def cta(number: int) -> Work:
        index = np.unravel_index(number, [*clusters.values(), *inside.values()]) if call.grid else ()
        here: dict[Any, int] = {name: int(i) for name, i in zip([*clusters, *inside], index, strict=True)}
        total = Work()
        for thread in range(warpgroups):
            axes = {**here, mesh.thread_name: thread} if mesh.thread_name is not None else here
            follow = _Follow(axes, sizes=inside, notes=call.notes, equations=call.equations, gone=folded(body))
            follow.open(body, [], refs)
            total.add(follow.work, 1)
            steps[0] += follow.steps
        return total

    steps = [0]
    try:
        first = cta(0)
        count = max(1, min(_MOST_CTAS, call.ctas, _MOST_EQUATIONS // max(1, steps[0])))
        several = [first, *(cta(round(i * (call.ctas - 1) / (count - 1))) for i in range(1, count))]
    except _TooLong:
        call.notes.append("the kernel runs too many steps to follow: no time is estimated")
        return call
    except Exception as error:
        call.notes.append(f"the kernel could not be followed ({type(error).__name__}: {error}): no time is estimated")
        return call
    call.mean, call.most = Work(), max(several, key=_weight)
    for each in several:
        call.mean.add(each, 1 / count)
    call.notes[:] = dict.fromkeys(call.notes)
    return call


def _weight(work: Work) -> float:
    return sum(work.runs.values())


def _places(eqn: Any) -> Iterator[tuple[str, int]]:
    """(file, line) of the frames in which an equation was made, the innermost first."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        yield frame.file_name, frame.line_num


# --- following a program ---------------------------------------------------------------------------------------------


class _Follow:
    """Runs a program on what is known of its values: numpy arrays of integers, _Refs, and None for all else."""

    def __init__(
        self,
        axes: Axes,
        *,
        sizes: Axes | None = None,
        notes: list[str] | None = None,
        equations: dict[int, Any] | None = None,
        on_call: Callable[[Any, Sequence[Any]], None] | None = None,
        gone: Container[int] = (),
    ) -> None:
        """gone: id() of the equations that a compiler folds."""
        self.work, self.steps = Work(), 0
        self._axes, self._sizes, self._on_call = dict(axes), sizes or {}, on_call
        self._notes = notes if notes is not None else []
        self._equations = equations if equations is not None else {}
        self._times, self._gone = 1.0, gone

    def closed(self, program: Any, values: Sequence[Any]) -> list[Any]:
        body = getattr(program, "jaxpr", program)
        return self.open(body, list(getattr(program, "consts", [])) or [None] * len(body.constvars), values)

    def open(self, body: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        env = {**dict(zip(body.constvars, consts, strict=False)), **dict(zip(body.invars, values, strict=False))}
        for eqn in body.eqns:
            given = [np.asarray(v.val) if is_literal(v) else env.get(v) for v in eqn.invars]
            out = self._equation(eqn, given)
            env.update(zip(eqn.outvars, out, strict=False))
        return [np.asarray(v.val) if is_literal(v) else env.get(v) for v in body.outvars]

    def _equation(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        self.steps += 1
        if self.steps > _MOST_EQUATIONS:
            raise _TooLong
        name = eqn.primitive.name.removesuffix("_p")
        if name == "mpmd_map" and self._on_call is not None:
            self._on_call(eqn, given)
            return []
        self.work.runs[id(eqn)] += self._times  # type: ignore[assignment]
        self._equations.setdefault(id(eqn), eqn)
        special = _RULES.get(name)
        if special is not None:
            return special(self, eqn, given)
        inner = inlined(eqn)
        if inner is not None:
            return self.closed(inner, given)
        bodies = list(subprograms(eqn))
        if bodies:  # what no rule knows: its programs run once
            for body in bodies[:1]:
                self.closed(
                    body, [None] * (len(body.invars) - len(given)) + given if len(body.invars) >= len(given) else given
                )
            return []
        return self._arithmetic(eqn, given)

    def _arithmetic(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        known = eqn.primitive.name in OPS and all(isinstance(v, np.ndarray) for v in given)
        if known and all(_is_small_integer(v.aval) for v in eqn.outvars):
            out = evaluate(eqn, given)
            return list(out) if eqn.primitive.multiple_results else [np.asarray(out)]
        flops, specials = (0, 0) if id(eqn) in self._gone else cost(eqn)
        self.work.flops += flops * self._times
        self.work.specials += specials * self._times
        return []

    # -- control

    def axis_index(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        names = eqn.params["axis_name"]
        names = names if isinstance(names, tuple) else (names,)
        index = 0
        for name in names:
            if name not in self._axes:
                return []
            index = index * self._sizes.get(name, 1) + self._axes[name] if len(names) > 1 else self._axes[name]
        return [np.asarray(index, np.int32)]

    def cond(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        which, *rest = given
        branches = eqn.params["branches"]
        if which is None:
            self._note("which branch is taken depends on data: the longer one is counted", eqn)
            return self.closed(max(branches, key=lambda b: len(b.eqns)), rest)[:0]
        return self.closed(branches[min(max(int(which), 0), len(branches) - 1)], rest)

    def while_(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        p = eqn.params
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        tests, consts, state = given[:nc], given[nc : nc + nb], list(given[nc + nb :])
        while True:
            more = self.closed(p["cond_jaxpr"], [*tests, *state])[0]
            if more is None:
                self._note("a loop ends when data says so: it is counted once", eqn)
                self.closed(p["body_jaxpr"], [*consts, *state])
                return []
            if not bool(more):
                return state
            state = self.closed(p["body_jaxpr"], [*consts, *state])
            self._again(eqn, 1)

    def _again(self, eqn: Any, iterations: int) -> None:
        """What the compiler places at a loop's own line, its counter and branch, runs in each iteration."""
        self.work.runs[id(eqn)] += self._times * iterations  # type: ignore[assignment]

    def scan(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carry, stacked = scan_groups(eqn, given)
        self._again(eqn, length - 1)
        if not _has_control(body):  # then each iteration costs the same
            before, unrolled = self._times, eqn.params["unroll"]
            self._times = before * length
            self._per_copy(unrolled, lambda: self.closed(body, [*consts, *carry, *[None] * len(stacked)]))
            self._times = before
            return []
        for i in range(length):
            rows = [x[i] if isinstance(x, np.ndarray) else None for x in stacked]
            carry = self.closed(body, [*consts, *carry, *rows])[: len(carry)]
        return carry

    def _per_copy(self, unrolled: Any, run: Callable[[], Any]) -> None:
        """The machine code has the body of an unrolled loop several times: each copy runs as much less often."""
        before, self.work = self.work, Work()
        run()
        inside, self.work = self.work, before
        copies = int(unrolled) if int(unrolled) > 1 else 1
        for key in inside.runs:
            inside.runs[key] /= copies  # type: ignore[assignment]
        self.work.add(inside, 1)

    def scoped(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        body = eqn.params["jaxpr"]
        return self.open(body, given, [None] * len(body.invars))

    def state(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        body = eqn.params["jaxpr"]
        self.open(body, [None] * len(body.constvars), given)
        return []

    def mapped(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        """A program for each warp of a warpgroup."""
        meshes = eqn.params.get("meshes") or (eqn.params["mesh"],)
        bodies = eqn.params.get("jaxprs") or (eqn.params["jaxpr"],)
        axis = getattr(meshes[0], "axis_name", None)
        before, axes, total = self.work, dict(self._axes), Work()
        for warp in range(_WARPS):
            self.work, self._axes = Work(), {**axes, axis: warp}
            body = bodies[0]
            body = getattr(body, "jaxpr", body)
            if len(body.invars) == len(given):
                self.open(body, [], given)
            else:
                self.open(body, given, [None] * len(body.invars))
            for key in self.work.runs:
                self.work.runs[key] /= _WARPS  # type: ignore[assignment]
            total.add(self.work, 1)
        self.work, self._axes = before, axes
        self.work.add(total, 1)
        return []

    def cancelled(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        """No CTA takes over the work of another: each does its own, which is the same in all."""
        return [np.asarray(0, np_dtype(v.aval)) for v in eqn.outvars]

    # -- memory

    def load(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        ref, *leaves = given
        if not isinstance(ref, _Ref):
            return []
        shape, dtype = eqn.outvars[0].aval.shape, np_dtype(eqn.outvars[0].aval)
        self._moved(self.work.loaded, ref, nbytes_of(shape, dtype))
        if ref.value is None or any(leaf is None for leaf in leaves):
            return []
        tree = eqn.params.get("tree") or eqn.params.get("args_tree")
        transforms = _transforms(tree, leaves)
        place = locate(ref.value.shape, ref.value.dtype, transforms, lambda *_: None)
        return [np.asarray(place.read(ref.value)).reshape(shape)]

    def store(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        ref = given[0]
        if isinstance(ref, _Ref):
            aval = eqn.invars[1].aval
            self._moved(self.work.stored, ref, nbytes_of(aval.shape, np_dtype(aval)))
        return []

    def copy_in(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        source, p = given[0], eqn.params
        if isinstance(source, _Ref):
            first = len(given) - p["dst_transforms_treedef"].num_leaves - p["barrier_transforms_treedef"].num_leaves
            size = _size(eqn.invars[1], p["dst_transforms_treedef"], given[first:])
            shared = p["collective_axes"] if p.get("leader_tracked") is None else None
            shared = shared if isinstance(shared, tuple) else (shared,) if shared else ()
            together = math.prod(self._sizes.get(axis, 1) for axis in shared)
            self._moved(self.work.loaded, source, size * _itemsize(eqn.invars[1]) / together)
        return []

    def copy_out(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        target, p = given[1], eqn.params
        if isinstance(target, _Ref):
            size = _size(eqn.invars[0], p["src_transforms_treedef"], given[2:])
            self._moved(self.work.stored, target, size * _itemsize(eqn.invars[0]))
        return []

    def _moved(self, counter: collections.Counter[int], ref: _Ref, nbytes: float) -> None:
        counter[ref.number] += nbytes * self._times  # type: ignore[assignment]

    # -- matrix products

    def product(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        """wgmma and tcgen05.mma: an (M, N) accumulator, and A of (M, K)."""
        p = eqn.params
        accumulator, a, b = eqn.invars[:3]
        trees = [p.get(f"{each}_transforms_tree") for each in ("acc", "a", "b")]
        m_times_n = _size(accumulator, trees[0], [])
        a_size, b_size = _size(a, trees[1], []), _size(b, trees[2], [])
        # (M N) (M K) (K N) = (M N K)^2
        flops = 2 * math.sqrt(m_times_n * a_size * b_size)
        if p.get("collective_axis") is not None:  # two CTAs' SMs multiply together what one of them has asked for
            flops = 2 * 2 * m_times_n * a_size / _rows(accumulator)
        self.work.tensor_flops[str(np_dtype(a.aval))] += flops * self._times  # type: ignore[assignment]
        return []

    def _note(self, words: str, eqn: Any) -> None:
        line = line_of(eqn)
        self._notes.append(f"{words} ({line})" if line else words)


def _rows(accumulator: Any) -> int:
    return accumulator.aval.shape[0]


_RULES: dict[str, Callable[[_Follow, Any, list[Any]], Sequence[Any]]] = {
    "axis_index": _Follow.axis_index,
    "cond": _Follow.cond,
    "while": _Follow.while_,
    "scan": _Follow.scan,
    "run_scoped": _Follow.scoped,
    "run_state": _Follow.state,
    "core_map": _Follow.mapped,
    "mpmd_map": _Follow.mapped,
    "query_cluster_cancel": _Follow.cancelled,
    "get": _Follow.load,
    "load": _Follow.load,
    "swap": _Follow.store,
    "store": _Follow.store,
    "copy_gmem_to_smem": _Follow.copy_in,
    "copy_smem_to_gmem": _Follow.copy_out,
    "wgmma_ref": _Follow.product,
    "tcgen05_mma": _Follow.product,
}


def _is_small_integer(aval: Any) -> bool:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return False
    return math.prod(aval.shape) <= _KNOWN_SIZE and np_dtype(aval).kind in "iub"


def _has_control(program: Any) -> bool:
    """Whether iterations of this program may differ in what they do."""
    for eqn in program.eqns:
        if eqn.primitive.name in ("cond", "while"):
            return True
        if any(_has_control(body) for body in subprograms(eqn)):
            return True
    return False


def _transforms(tree: Any, leaves: Sequence[Any]) -> list[Any]:
    if tree is None:
        return []
    padded = [*leaves[: tree.num_leaves], *[0] * (tree.num_leaves - len(leaves))]
    transforms = jax.tree.unflatten(tree, [0 if leaf is None else leaf for leaf in padded])
    return jax.tree.leaves(transforms, is_leaf=lambda t: hasattr(t, "transform_type") or _is_indexer(t))


def _is_indexer(transform: Any) -> bool:
    return type(transform).__name__ == "NDIndexer"


def _size(ref: Any, tree: Any, leaves: Sequence[Any]) -> float:
    """Elements of a Ref through its transforms: the last index decides, layouts change nothing."""
    indexers = [t for t in _transforms(tree, leaves) if _is_indexer(t)]
    shape = indexers[-1].get_indexer_shape() if indexers else ref.aval.shape
    return float(math.prod(int(n) for n in shape))


def _itemsize(ref: Any) -> float:
    return nbytes_of((8,), np_dtype(ref.aval)) / 8
