"""What is measured: a function at some sizes, beside others that compute the same, and what no chip can beat."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..course.inputs import Input
from ..view.roofline import Chip

YOURS, XLA = "yours", "XLA"
MEASURED, ESTIMATE = "measured", "estimate"  # what a time is


@dataclasses.dataclass(frozen=True)
class Size:
    """The arguments of one measurement. args: arrays, Inputs, or jax.ShapeDtypeStructs, which are drawn as normal.

    blocks: static keywords, for the function that is measured and for no peer. flops: of its matrix products.
    hbm_bytes: what has to come from HBM and go there at the least; None: every argument and every result once.
    tried: a dtype that the function may not take; where it does not, the size is left out, with a sentence.
    """

    args: tuple[Any, ...]
    blocks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flops: float = 0.0
    hbm_bytes: float | None = None
    name: str = ""
    tried: str = ""

    @property
    def long_dtype(self) -> str:
        """Of the largest argument."""
        arrays = [x for x in jax.tree.leaves(self.args) if hasattr(x, "dtype")]
        return str(max(arrays, key=nbytes_of).dtype) if arrays else ""

    @property
    def dtype(self) -> str:
        """The same in short: bf16, f8_e4m3fn."""
        return self.long_dtype.replace("float", "f").replace("uint", "u").replace("int", "i")

    @property
    def title(self) -> str:
        """The shape of the first argument, unless it has a name."""
        shapes = [getattr(x, "shape", ()) for x in jax.tree.leaves(self.args)]
        return self.name or (" x ".join(map(str, shapes[0])) if shapes and shapes[0] else "scalars")


def size(*args: Any, flops: float = 0.0, hbm_bytes: float | None = None, name: str = "", **blocks: Any) -> Size:
    """One of the sizes of a benchmark: see Size."""
    return Size(args, blocks, flops, hbm_bytes, name)


class Sizes:
    """What `bench_9` in cases/NAME.py returns: the smallest size first. `puzzles bench` without --sweep takes the last.

    peers: what a user would take in place of the kernel, name -> a function of the same arrays. xla: what XLA is given
    in place of the puzzle's spec.
    """

    def __init__(
        self,
        *sizes: Size,
        peers: Mapping[str, Callable[..., Any]] | None = None,
        xla: Callable[..., Any] | None = None,
    ):
        self.sizes, self.peers, self.xla = sizes, peers or {}, xla


sweep = Sizes  # the name in cases/


@dataclasses.dataclass(frozen=True)
class OpByOp:
    """fn, for `compare`, as eager JAX runs it: every operation a program of its own, its result in HBM."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


op_by_op = OpByOp  # the name in notebooks


@dataclasses.dataclass(frozen=True)
class Work:
    """A function to measure. own: what it is called in the table. accelerator: what its kernels are for."""

    name: str
    fn: Callable[..., Any]
    sizes: Sequence[Size]
    peers: Mapping[str, Callable[..., Any]]
    own: str = YOURS
    accelerator: str = "tpu"

    def calls(self, size: Size) -> dict[str, Callable[..., Any]]:
        """All that is measured at one size, by name: functions of its arguments."""
        own = (lambda *a: self.fn(*a, **size.blocks)) if size.blocks else self.fn
        return {self.own: own, **self.peers}


class Light(NamedTuple):
    """What a chip needs at its datasheet's peaks. bound: which of them decides."""

    seconds: float
    bound: str
    hbm_bytes: float
    flops: float


_NARROW = {"int8": 20.0, "float8_e4m3fn": 1.0}  # dtypes to try, and the standard deviation of what is drawn in them


def narrowed(work: Work) -> list[Size]:
    """The largest size in the dtypes of one byte that a function can be traced in, as its last peer can."""
    last = work.sizes[-1]
    leaves = [x for x in jax.tree.leaves(last.args) if isinstance(x, Input | jax.ShapeDtypeStruct)]
    if not leaves or np.dtype(last.long_dtype).itemsize not in (2, 4):
        return []
    wide = max(leaves, key=nbytes_of).dtype
    own, *_, peer = work.calls(last).values()
    found = []
    for dtype, scale in _NARROW.items():

        def cast(x: Any, dtype: str = dtype, scale: float = scale) -> Any:
            if not isinstance(x, Input | jax.ShapeDtypeStruct) or x.dtype != wide or len(x.shape) < 2:
                return x
            before, shift = _spread(x)
            return Input("normal", x.shape, np.dtype(jax.numpy.dtype(dtype)), (before * scale, shift))

        args = jax.tree.map(cast, last.args)
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        with contextlib.suppress(Exception):
            if jax.eval_shape(own, *given) == jax.eval_shape(peer, *given):
                found.append(dataclasses.replace(last, args=args, tried=dtype))
    return found


def speed_of_light(size: Size, results: Any, chip: Chip) -> Light:
    """The time that nothing on this chip can beat. results: shapes of what the function returns."""
    nbytes = size.hbm_bytes if size.hbm_bytes is not None else nbytes_of((size.args, results))
    hbm, tensor = nbytes / chip.hbm_bytes_per_s, size.flops / chip.flops_per_s(size.long_dtype)
    return Light(max(hbm, tensor), "HBM" if hbm >= tensor else "matrix products", nbytes, size.flops)


def nbytes_of(tree: Any) -> float:
    leaves: Iterable[Any] = (x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tree))
    return float(sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves))


def drawn(args: Any) -> Any:
    """The arguments as arrays on the device; what can be is drawn there, as large arrays take long on the host."""
    leaves, tree = jax.tree.flatten(args)
    return jax.tree.unflatten(tree, [_drawn(x, i) for i, x in enumerate(leaves)])


def _drawn(x: Any, seed: int) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            raise ValueError(f"{x} has no values: give integers as an array, or as integers(shape, low, high)")
    elif not isinstance(x, Input) or x.kind != "normal":
        return jax.numpy.asarray(x.draw(np.random.default_rng(seed)) if isinstance(x, Input) else x)
    scale, shift = _spread(x)
    return jax.jit(lambda k: (jax.random.normal(k, x.shape) * scale + shift).astype(str(x.dtype)))(jax.random.key(seed))


def _spread(x: Input | jax.ShapeDtypeStruct) -> Any:
    """The scale and shift with which floats are drawn."""
    return x.params if isinstance(x, Input) and x.kind == "normal" else (1.0, 0.0)
