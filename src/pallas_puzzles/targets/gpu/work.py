"""What the kernels of a function have to do: how often each of its equations runs, its bytes, its matrix products.

Nothing is computed but integers: those that say where a loop ends and which branch is taken. A few of a kernel's CTAs
are followed, spread evenly over its grid.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...ir.capture import SourceLine, is_gpu_kernel, line_of, places_of, subprograms
from ...ir.folded import folded
from ...ir.gpu_program import Instr, Program, View
from ...ir.gpu_reader import read_program
from ...ir.ops import OPS, cost, evaluate, inlined, interpret, nbytes_of, np_dtype, scan_groups
from ...ir.places import Place
from ...ir.program import equations

_MOST_EQUATIONS = 300_000  # followed, of one kernel: some seconds
_MOST_CTAS = 32
_KNOWN_SIZE = 4096  # larger arrays are not known, whatever is in them

Axes = Mapping[Any, int]
Env = list[Any]  # by slot


class _TooLong(Exception):
    """A kernel has more equations to follow than there is time for."""


@dataclasses.dataclass(eq=False)
class _Ref:
    """Memory. number: of the operand of the kernel that it is; value: where it is known."""

    shape: tuple[int, ...]
    dtype: np.dtype
    number: int | None = None
    value: np.ndarray | None = None


@dataclasses.dataclass
class Work:
    """What CTAs do, on average. Bytes and FLOPs are of one CTA.

    tensor_flops: dtype -> FLOPs of matrix products. loaded, stored: operand -> bytes between GMEM and an SM.
    runs: copy of an equation -> how many warpgroups' runs of it. Code that is called in several places has a copy in
    each, in the machine code, too.
    """

    tensor_flops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    flops: float = 0.0
    specials: float = 0.0
    loaded: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    stored: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    runs: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Work", share: float = 1, copies: int = 1) -> None:
        """copies: so many of its equations stand for what is one in the program."""
        for name in ("tensor_flops", "loaded", "stored", "runs"):
            mine, part = getattr(self, name), share / copies if name == "runs" else share
            for key, amount in getattr(other, name).items():
                mine[key] += amount * part
        self.flops += other.flops * share
        self.specials += other.specials * share


@dataclasses.dataclass
class Call:
    """A plgpu.kernel that a function reaches.

    grid: CTAs by name of the axis, clusters multiplied out. sizes: of the operands, inputs first. mean, most: of a CTA,
    and of the CTA with the most to do; None where that could not be found out, for a reason in `notes`. copies: where a
    copy stands -> its number; equations: number of a copy -> the equation, and the loop, branch or scope that it is in.
    """

    name: str
    where: SourceLine | None
    grid: dict[str, int]
    sizes: tuple[int, ...]
    mean: Work | None = None
    most: Work | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    copies: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    equations: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)

    @property
    def ctas(self) -> int:
        return math.prod(self.grid.values())

    def lines(self, known: Callable[[tuple[str, int]], bool], work: Work) -> dict[tuple[str, int], float]:
        """(file, line) that is `known` -> how many warpgroups run it, on average over its copies in the machine code.

        Those in one loop run as often as their median: what is written there may also belong to the loop's control.
        """
        runs: dict[tuple[str, int], dict[int, list[float]]] = {}
        for key, (eqn, inside) in self.equations.items():
            place = next((at for at in places_of(eqn) if known(at)), None)
            if place is not None:
                runs.setdefault(place, {}).setdefault(inside, []).append(work.runs[key])
        return {
            place: sum(len(each) * statistics.median_low(each) for each in by.values()) / sum(map(len, by.values()))
            for place, by in runs.items()
        }


def calls(program: Any, values: Sequence[Any]) -> list[Call]:
    """The kernels of a traced function, in order. values: its arguments, flat; what is only a shape is not known."""
    found: list[Call] = []

    def apply(eqn: Any, given: list[Any]) -> list[Any]:
        if is_gpu_kernel(eqn):
            found.append(_call(eqn, given))
        elif (inner := inlined(eqn)) is not None:
            return interpret(inner, given, apply)
        elif bodies := [*subprograms(eqn)]:  # a loop or a branch, of which each program is run once
            for body in bodies:
                interpret(body, [None] * len(body.invars), apply, [None] * len(body.constvars))
        else:
            return _integers(eqn, given) or [None] * len(eqn.outvars)
        return [None] * len(eqn.outvars)

    interpret(program, [_known(value) for value in values], apply)
    return found


def _known(value: Any) -> np.ndarray | None:
    known = not isinstance(value, jax.ShapeDtypeStruct) and _is_small_integer(value)
    return np.asarray(value) if known else None


def _integers(eqn: Any, given: Sequence[Any]) -> list[Any] | None:
    """What small arrays of integers come out of an equation; None where others do, or nobody knows."""
    known = eqn.primitive.name in OPS and all(isinstance(v, np.ndarray | np.generic | int) for v in given)
    if not known or not all(_is_small_integer(v.aval) for v in eqn.outvars):
        return None
    out = evaluate(eqn, given)
    return list(out) if eqn.primitive.multiple_results else [np.asarray(out)]


def _call(eqn: Any, given: Sequence[Any]) -> Call:
    mesh, body = eqn.params["meshes"][0], eqn.params["jaxprs"][0]
    clusters = dict(zip(mesh.grid_names, mesh.grid, strict=True))
    inside = dict(zip(mesh.cluster_names, mesh.cluster, strict=True))
    warpgroups = mesh.num_threads or 1
    kinds = [(tuple(v.aval.shape), np_dtype(v.aval)) for v in body.invars]
    known = [v if isinstance(v, np.ndarray) else None for v in given] + [None] * (len(kinds) - len(given))
    refs = [_Ref(*kind, i, value) for i, (kind, value) in enumerate(zip(kinds, known, strict=True))]
    call = Call(
        name=str(eqn.params["name"]),
        where=line_of(eqn) or next((line for _, line in equations(body) if line), None),
        grid={str(name): size for name, size in {**clusters, **inside}.items()},
        sizes=tuple(nbytes_of(*kind) for kind in kinds),
    )

    def cta(number: int) -> Work:
        index = np.unravel_index(number, [*clusters.values(), *inside.values()]) if call.grid else ()
        here: dict[Any, int] = {name: int(i) for name, i in zip([*clusters, *inside], index, strict=True)}
        total = Work()
        for thread in range(warpgroups):
            axes = {**here, mesh.thread_name: thread} if mesh.thread_name is not None else here
            follow = _Follow(axes, inside, call, gone)
            follow.run(program, refs)
            total.add(follow.work)
            steps[0] += follow.steps
        return total

    steps = [0]
    try:
        program, gone = read_program(body), folded(body)
        first = cta(0)
        count = max(1, min(_MOST_CTAS, call.ctas, _MOST_EQUATIONS // max(1, steps[0])))
        several = [first, *(cta(round(i * (call.ctas - 1) / (count - 1))) for i in range(1, count))]
    except _TooLong:
        call.notes.append("the kernel runs too many steps to follow: no time is estimated")
        return call
    except Exception as error:
        call.notes.append(f"the kernel could not be followed ({type(error).__name__}: {error}): no time is estimated")
        return call
    call.mean, call.most = Work(), max(several, key=lambda work: work.runs.total())
    for each in several:
        call.mean.add(each, 1 / count)
    call.notes[:] = dict.fromkeys(call.notes)
    return call


# --- following a program ---------------------------------------------------------------------------------------------


class _Follow:
    """Runs a program on what is known of its values: numpy arrays of integers, _Refs, and None for all else.

    gone: id() of the equations that a compiler folds. A kind of instruction without a method computes.
    """

    def __init__(self, axes: Axes, sizes: Axes, call: Call, gone: Container[int]) -> None:
        self.work, self.steps = Work(), 0
        self._axes, self._sizes, self._call, self._gone = dict(axes), sizes, call, gone
        self._times = 1.0
        self._at = self._inside = 0  # the copies of instructions that this is in: any, those with control

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        env = program.template.copy()
        for slot, value in zip(program.ins, values, strict=True):
            env[slot] = value
        for instr in program.instrs:
            for slot, value in zip(instr.outs, self._instr(instr, env), strict=False):
                env[slot] = value
        return [env[i] for i in program.outs]

    def _run_copies(self, program: Program, values: Sequence[Any], copies: int) -> None:
        outer, self.work = self.work, Work()
        self.run(program, values)
        outer.add(self.work, copies=copies)
        self.work = outer

    def _instr(self, instr: Instr, env: Env) -> Sequence[Any]:
        self.steps += 1
        if self.steps > _MOST_EQUATIONS:
            raise _TooLong
        before, copies = (self._at, self._inside), self._call.copies
        self._at = copies.setdefault((self._at, id(instr.eqn)), len(copies) + 1)
        self._call.equations.setdefault(self._at, (instr.eqn, self._inside))
        if instr.kind != "inline":
            self._inside = self._at
        self._again(1)
        out = getattr(self, "does_" + instr.kind, self._arithmetic)(instr, env) or [None] * len(instr.outs)
        self._at, self._inside = before
        return out

    def _arithmetic(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        if (out := _integers(instr.eqn, [env[i] for i in instr.ins])) is not None:
            return out
        flops, specials = (0, 0) if id(instr.eqn) in self._gone else cost(instr.eqn)
        self.work.flops += flops * self._times
        self.work.specials += specials * self._times
        return None

    def _again(self, times: int) -> None:
        self.work.runs[self._at] += self._times * times  # type: ignore[assignment]

    # -- control

    def does_axis_index(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        names = instr.p["axis_name"]
        names = names if isinstance(names, tuple) else (names,)
        index = 0
        for name in names:
            if name not in self._axes:
                return None
            index = index * self._sizes.get(name, 1) + self._axes[name]
        return [np.asarray(index, np.int32)]

    def does_inline(self, instr: Instr, env: Env) -> Sequence[Any]:
        return self.run(instr.p["programs"][0], [env[i] for i in instr.ins])

    def does_cond(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        which, *rest = (env[i] for i in instr.ins)
        branches = instr.p["programs"]
        if which is None:
            self._note("which branch is taken depends on data: the longer one is counted", instr)
            self.run(max(branches, key=lambda b: len(b.instrs)), rest)
            return None
        return self.run(branches[min(max(int(which), 0), len(branches) - 1)], rest)

    def does_while(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        (test, body), (nt, nb) = instr.p["programs"], instr.p["consts"]
        given = [env[i] for i in instr.ins]
        tests, consts, state = given[:nt], given[nt : nt + nb], given[nt + nb :]
        while True:
            more = self.run(test, [*tests, *state])[0]
            if more is None:
                self._note("a loop ends when data says so: it is counted once", instr)
                self.run(body, [*consts, *state])
                return None
            if not bool(more):
                return state
            state = self.run(body, [*consts, *state])
            self._again(1)  # what the compiler places at a loop's own line, its counter and branch

    def does_scan(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        (body,), length = instr.p["programs"], instr.p["length"]
        consts, carry, stacked = scan_groups(instr.eqn, [env[i] for i in instr.ins])
        self._again(length - 1)
        if not any(each.kind in ("cond", "while") for each in body.everything()):  # then each iteration costs the same
            self._times *= length
            # the machine code has the body of an unrolled loop several times: each copy runs as much less often
            self._run_copies(body, [*consts, *carry, *[None] * len(stacked)], max(1, int(instr.eqn.params["unroll"])))
            self._times /= length
            return None
        for i in range(length):
            rows = [x[i] if isinstance(x, np.ndarray) else None for x in stacked]
            carry = self.run(body, [*consts, *carry, *rows])[: len(carry)]
        return carry

    def does_run_scoped(self, instr: Instr, env: Env) -> Sequence[Any]:
        refs = [_Ref(alloc.shape, alloc.dtype) for alloc in instr.p["allocs"]]
        return self.run(instr.p["programs"][0], [*(env[i] for i in instr.ins), *refs])

    def does_run_state(self, instr: Instr, env: Env) -> None:
        values = iter([env[i] for i in instr.ins])
        given = [next(values) if ok else None for ok in instr.p["given"]]
        cells = [
            v if cell is None else _Ref(cell.shape, cell.dtype) for v, cell in zip(given, instr.p["cells"], strict=True)
        ]
        self.run(instr.p["programs"][0], cells)

    def does_warps(self, instr: Instr, env: Env) -> None:
        """A program for each warp of a warpgroup."""
        axes, count = self._axes, instr.p["warps"]
        for warp in range(count):
            self._axes = {**axes, instr.p["axis"]: warp}
            self._run_copies(instr.p["programs"][0], [env[i] for i in instr.ins], count)
        self._axes = axes

    def does_query(self, instr: Instr, env: Env) -> Sequence[Any]:
        """No CTA takes over the work of another: each does its own, which is the same in all."""
        return [np.asarray(0, np_dtype(v.aval)) for v in instr.eqn.outvars]

    # -- memory

    def does_read(self, instr: Instr, env: Env) -> Sequence[Any] | None:
        ref, aval = env[instr.p["view"].ref], instr.eqn.outvars[0].aval
        self._moved(self.work.loaded, ref, nbytes_of(aval.shape, np_dtype(aval)))
        numbers = [env[i] for i in instr.ins[1:]]
        if ref.value is None or any(number is None for number in numbers):
            return None
        return [self._place(instr.p["view"], env).read(ref.value).reshape(aval.shape)]

    def does_write(self, instr: Instr, env: Env) -> None:
        aval = instr.eqn.invars[1].aval
        self._moved(self.work.stored, env[instr.p["view"].ref], nbytes_of(aval.shape, np_dtype(aval)))

    def does_load_tma(self, instr: Instr, env: Env) -> None:
        shared = instr.p["axes"] if instr.p["leader"] is None else ()
        together = math.prod(self._sizes.get(axis, 1) for axis in shared)
        self._moved(self.work.loaded, env[instr.p["src"].ref], self._place(instr.p["dst"], env).nbytes / together)

    def does_store_tma(self, instr: Instr, env: Env) -> None:
        self._moved(self.work.stored, env[instr.p["dst"].ref], self._place(instr.p["src"], env).nbytes)

    def _moved(self, counter: collections.Counter[int], ref: _Ref, nbytes: float) -> None:
        if ref.number is not None:
            counter[ref.number] += nbytes * self._times  # type: ignore[assignment]

    def _place(self, view: View, env: Env) -> Place:
        """The part of a Ref, with 0 for an index that is not known."""
        ref = env[view.ref]
        shape, dtype = (ref.shape, ref.dtype) if view.alias is None else view.alias[1:3]
        numbers = [0 if env[i] is None else env[i] for i in view.leaves]
        return view.at(shape, dtype, numbers, lambda *_: None, True)

    # -- matrix products

    def does_wgmma(self, instr: Instr, env: Env) -> None:
        """wgmma and tcgen05.mma: an (M, N) accumulator, and A of (M, K)."""
        acc, a, b = (self._shape(instr, name, env) for name in ("acc", "a", "b"))
        # (M N) (M K) (K N) = (M N K)^2
        flops = 2 * math.sqrt(math.prod(acc) * math.prod(a) * math.prod(b))
        if instr.p.get("axes"):  # two CTAs' SMs multiply together what one of them has asked for
            flops = 2 * 2 * math.prod(acc) * math.prod(a) / instr.eqn.invars[0].aval.shape[0]
        self.work.tensor_flops[str(np_dtype(instr.eqn.invars[1].aval))] += flops * self._times  # type: ignore[assignment]

    does_tcgen05 = does_wgmma

    def _shape(self, instr: Instr, name: str, env: Env) -> tuple[int, ...]:
        view = instr.p[name]
        if isinstance(env[view.ref], _Ref):
            return self._place(view, env).shape
        return instr.eqn.invars[instr.ins.index(view.ref)].aval.shape

    def _note(self, words: str, instr: Instr) -> None:
        self._call.notes.append(f"{words} ({instr.line})" if instr.line else words)


def _is_small_integer(aval: Any) -> bool:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return False
    return math.prod(aval.shape) <= _KNOWN_SIZE and np_dtype(aval).kind in "iub"
