"""shard_map over several devices: how it cuts arguments and joins results, and what lax collectives mean in NumPy.

The parameters of these equations are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .ops import Beyond, np_dtype

Coordinates = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices by their coordinates, row-major. Each axis is taken for a ring of links, two axes for a torus."""

    axes: dict[str, int]

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def coordinates(self, device: int) -> Coordinates:
        at = np.unravel_index(device, tuple(self.axes.values()))
        return {name: int(i) for name, i in zip(self.axes, at, strict=True)}

    def device(self, at: Coordinates) -> int | None:
        """The number of a device; None where there is none with these coordinates."""
        if any(not 0 <= at[name] < size for name, size in self.axes.items()):
            return None
        return self._number(at)

    def _number(self, at: Coordinates) -> int:
        return int(np.ravel_multi_index([at[name] for name in self.axes], tuple(self.axes.values())))

    def name(self, device: int) -> str:
        """'device 3', on a mesh of several axes 'device (0, 3)'."""
        at = tuple(self.coordinates(device).values())
        return f"device {at[0] if len(at) == 1 else at}"

    def route(self, source: int, target: int) -> list[tuple[int, str, int]]:
        """The links of a shortest way, axis by axis: (the device that a link leaves, its axis, +1 or -1)."""
        at, end = self.coordinates(source), self.coordinates(target)
        links = []
        for name, size in self.axes.items():
            ahead = (end[name] - at[name]) % size
            direction = 1 if ahead <= size - ahead else -1
            for _ in range(min(ahead, size - ahead)):
                links.append((self._number(at), name, direction))
                at[name] = (at[name] + direction) % size
        return links

    def group(self, device: int, names: Sequence[str]) -> list[int]:
        """The devices that differ from this one along these axes alone, in the order of their indices there."""
        at = self.coordinates(device)
        indices = np.ndindex(*[self.axes[name] for name in names])
        return [self._number({**at, **dict(zip(names, index, strict=True))}) for index in indices]


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A shard_map equation. ins, outs: by operand, by dimension, the axes that it is cut along."""

    mesh: Mesh
    body: Any
    ins: list[tuple[tuple[str, ...], ...]]
    outs: list[tuple[tuple[str, ...], ...]]


def mesh_of(eqn: Any) -> Mesh:
    """What a shard_map equation runs on."""
    return Mesh({str(name): int(size) for name, size in dict(eqn.params["mesh"].shape).items()})


def sharded(eqn: Any) -> Sharded:
    """What a shard_map equation holds. Raises Beyond where only some of the mesh's axes are its own."""
    p, mesh = eqn.params, mesh_of(eqn)
    manual = {str(name) for name in p.get("newly_manual_axes", p.get("manual_axes", mesh.axes))}
    if any(size > 1 for name, size in mesh.axes.items() if name not in manual):
        raise Beyond(f"a shard_map over the axes {sorted(manual)} of a mesh with the axes {list(mesh.axes)}")
    return Sharded(mesh, p["jaxpr"], *([_cuts(spec) for spec in p[key]] for key in ("in_specs", "out_specs")))


def _cuts(spec: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(() if part is None else (part,) if isinstance(part, str) else tuple(map(str, part)) for part in spec)


def shard(x: Any, cuts: Sequence[tuple[str, ...]], mesh: Mesh, device: int) -> np.ndarray:
    """A device's part of an array."""
    x = np.asarray(x)
    return x[part(x.shape, cuts, mesh, device)]


def part(shape: Sequence[int], cuts: Sequence[tuple[str, ...]], mesh: Mesh, device: int) -> tuple[slice, ...]:
    """Where a device's shard is in an array of this shape."""
    at, key = mesh.coordinates(device), []
    for size, names in zip(shape, cuts, strict=False):
        sizes = [mesh.axes[name] for name in names]
        n = int(np.ravel_multi_index([at[name] for name in names], sizes)) if names else 0
        size //= math.prod(sizes)
        key.append(slice(n * size, (n + 1) * size))
    return tuple(key)


def joined(shards: Sequence[np.ndarray], cuts: Sequence[tuple[str, ...]], mesh: Mesh) -> tuple[np.ndarray, int | None]:
    """(the array that shards are the parts of, a device that holds another value where there should be one or None)."""
    first = np.asarray(shards[0])
    grown = [math.prod(mesh.axes[name] for name in names) for names in cuts]
    grown += [1] * (first.ndim - len(grown))
    whole = np.empty(tuple(n * k for n, k in zip(first.shape, grown, strict=True)), first.dtype)
    filled, apart = np.zeros(whole.shape, bool), None
    for device, one in enumerate(shards):
        key = part(whole.shape, cuts, mesh, device)
        if filled[key].all():
            if apart is None and not _same(whole[key], np.asarray(one)):
                apart = device
            continue
        whole[key], filled[key] = one, True
    return whole, apart


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether these are one value, up to the order of a sum."""
    if a.dtype.kind in "iub":
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.allclose(a, b, rtol=1e-2, atol=1e-3 * float(np.nanmax(np.abs(a), initial=0)), equal_nan=True))


# --- lax collectives -------------------------------------------------------------------------------------------------


def names_in(eqn: Any) -> set[str]:
    """The mesh axes that an equation names, if any."""
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    return {name for name in (names if isinstance(names, tuple | list) else (names,)) if isinstance(name, str)}


def axes_of(eqn: Any) -> tuple[str, ...]:
    """The mesh axes that a collective goes over."""
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = names if isinstance(names, tuple | list) else (names,)
    if eqn.params.get("axis_index_groups") is not None:
        raise Beyond(f"{eqn.primitive.name} with axis_index_groups")
    if any(not isinstance(name, str) for name in names):
        raise Beyond(f"{eqn.primitive.name} over an axis of an array")
    return tuple(names)


def _sum(xs: Sequence[np.ndarray], p: Any) -> list[np.ndarray]:
    wide = np.float32 if xs[0].dtype.kind not in "iub" and xs[0].dtype.itemsize < 4 else xs[0].dtype
    total = np.sum([x.astype(wide) for x in xs], axis=0, dtype=wide)
    return [total.astype(xs[0].dtype)] * len(xs)


def _all_gather(xs: Sequence[np.ndarray], p: Any) -> list[np.ndarray]:
    axis = p["all_gather_dimension"]
    return [(np.concatenate if p["tiled"] else np.stack)(xs, axis=axis)] * len(xs)


def _reduce_scatter(xs: Sequence[np.ndarray], p: Any) -> list[np.ndarray]:
    axis = p["scatter_dimension"]
    parts = np.split(_sum(xs, p)[0], len(xs), axis)
    return parts if p["tiled"] else [part.squeeze(axis) for part in parts]


def _all_to_all(xs: Sequence[np.ndarray], p: Any) -> list[np.ndarray]:
    split, concat = p["split_axis"], p["concat_axis"]
    parts = [np.split(x, len(xs), split) for x in xs]
    if p["tiled"]:
        return [np.concatenate([of[i] for of in parts], concat) for i in range(len(xs))]
    return [np.stack([of[i].squeeze(split) for of in parts], concat) for i in range(len(xs))]


def _permute(xs: Sequence[np.ndarray], p: Any) -> list[np.ndarray]:
    source = {target: source for source, target in p["perm"]}
    return [xs[source[i]] if i in source else np.zeros_like(x) for i, x in enumerate(xs)]


COLLECTIVES: dict[str, Callable[[Sequence[np.ndarray], Any], list[np.ndarray]]] = {
    "psum": _sum,
    "psum_invariant": _sum,
    "pmax": lambda xs, p: [np.max(np.stack(xs), axis=0)] * len(xs),
    "pmin": lambda xs, p: [np.min(np.stack(xs), axis=0)] * len(xs),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _permute,
}
SAME = frozenset(["pvary", "reshard", "sharding_constraint"])  # what a device has stays as it is


def collective(eqn: Any, given: Sequence[Sequence[Any]]) -> list[list[np.ndarray]]:
    """The results of a collective for each member of a group. given: their operands."""
    by_operand = [
        COLLECTIVES[eqn.primitive.name]([np.asarray(x) for x in xs], eqn.params) for xs in zip(*given, strict=True)
    ]
    return [list(of) for of in zip(*by_operand, strict=True)]


def sends(eqn: Any, group: Sequence[int], member: int) -> Iterator[tuple[int, int]]:
    """(to which device, how many bytes) a member of a group sends in a collective, where it goes around rings."""
    name, count = eqn.primitive.name, len(group)
    nbytes = sum(math.prod(v.aval.shape) * np_dtype(v.aval).itemsize for v in eqn.invars)
    if name == "ppermute":
        yield from ((group[t], nbytes) for s, t in eqn.params["perm"] if s == member and t != member)
    elif name == "all_to_all":
        yield from ((other, nbytes // count) for other in group if other != group[member])
    elif count > 1:
        share = {"reduce_scatter": nbytes // count, "all_gather": nbytes, "all_gather_invariant": nbytes}
        rounds = count - 1 if name in share else 2 * (count - 1)  # a sum is scattered, and gathered again
        yield group[(member + 1) % count], rounds * share.get(name, nbytes // count)


# --- TPUs that are not there -----------------------------------------------------------------------------------------


def tpu_mesh(kind: str, axes: Mapping[str, int] | None = None) -> jax.sharding.AbstractMesh:
    """TPUs by JAX's name of them that exist only for tracing: pltpu.get_tpu_info() and emit_pipeline ask for them."""
    axes = axes or {}
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    device = jax.sharding.AbstractDevice(kind, 1, "tpu")
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=auto, abstract_device=device)


@contextlib.contextmanager
def on_tpus(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """While active, functions are traced as if the TPUs of a `tpu_mesh` were there, and the devices of a mesh of CPUs
    were such ones: emit_pipeline asks what they are."""
    from jax._src import tpu_info  # get_device_kind: seen on jax 0.11.2 and 0.12.0.1

    before, kind = tpu_info.get_device_kind, mesh.abstract_device.device_kind
    tpu_info.get_device_kind = lambda: found if (found := before()) != "cpu" else kind
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        tpu_info.get_device_kind = before
