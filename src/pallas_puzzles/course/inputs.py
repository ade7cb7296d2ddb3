"""What a check asks: a spec, inputs drawn afresh for every seed, variants, budgets."""

import dataclasses
import functools
import math
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..budgets.budget import Budget

if TYPE_CHECKING:
    from .claims import Asked


@dataclasses.dataclass(frozen=True)
class Input:
    """An array to be drawn: `draw(rng)` gives a new one of this shape and dtype."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    params: tuple[float, ...]

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        a, b = self.params
        if self.kind == "normal":
            return (rng.standard_normal(self.shape, np.float32) * a + b).astype(self.dtype)
        if self.kind == "uniform":
            return rng.uniform(a, b, self.shape).astype(self.dtype)
        if self.kind == "groups":
            cuts = np.sort(rng.integers(0, int(a) + 1, self.shape))
            empty = rng.random(self.shape) < b
            sizes = np.diff(cuts, prepend=0)
            return np.where(empty, 0, sizes).astype(self.dtype)
        return rng.integers(int(a), int(b), self.shape).astype(self.dtype)


def _input(kind: str, shape: Any, dtype: Any, *params: float) -> Input:
    return Input(kind, tuple(map(int, np.atleast_1d(shape))), jax.numpy.dtype(dtype), params)


def normal(shape: Any, dtype: Any = "float32", *, scale: float = 1.0, shift: float = 0.0) -> Input:
    """Normally distributed values with standard deviation `scale` around `shift`."""
    return _input("normal", shape, dtype, scale, shift)


def uniform(shape: Any, low: float = 0.0, high: float = 1.0, dtype: Any = "float32") -> Input:
    """Values spread evenly over [low, high)."""
    return _input("uniform", shape, dtype, low, high)


def integers(shape: Any, low: int, high: int, dtype: Any = "int32") -> Input:
    """Whole numbers from low to high - 1."""
    return _input("integers", shape, dtype, low, high)


def groups(num_groups: int, num_rows: int, *, empty: float = 0.2) -> Input:
    """Sizes of groups, int32, that sum to num_rows at most; at least about the fraction `empty` of them is 0."""
    return _input("groups", num_groups, "int32", num_rows, empty)


# With PALLAS_PUZZLES_RANDOM in the environment, draws differ from process to process, and from those that readers get:
# all but the first of the notebook's own example
SALT = secrets.token_hex(8) if os.environ.get("PALLAS_PUZZLES_RANDOM") else ""


def seed_of(name: str, number: int) -> int:
    """The seed of a draw: the same for the same name and number, so that the same answer gets the same verdict."""
    return zlib.crc32(f"{name}, draw {number}{SALT}".encode())


def draw(inputs: Any, rng: np.random.Generator) -> tuple[Any, ...]:
    """Every Input of a sequence drawn; arrays pass through."""
    return tuple(x.draw(rng) if isinstance(x, Input) else x for x in inputs)


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs and block sizes that a check runs. about: what is special about it, for the verdict.

    l2: whether a kernel for a GPU finds its arrays in L2 (lens.gpu.in_l2), which budgets of cycles depend on.
    """

    inputs: tuple[Any, ...]
    blocks: dict[str, Any]
    budget: Budget | None = None
    about: str = ""
    l2: bool = False


def case(*inputs: Any, budget: Budget | None = None, about: str = "", l2: bool = False, **blocks: Any) -> Case:
    """A variant for `check`: other inputs, and block sizes to call the function with.

    about: what is special about it, in words that may stand in brackets: "64 queries see nothing". l2: see Case.
    """
    return Case(inputs, blocks, budget, about, l2)


@dataclasses.dataclass
class Draw:
    """One draw of a case. place: number of the case, and of the draw. want: what is expected of `args`, once known."""

    case: Case
    place: tuple[int, int] = (0, 0)
    seed: int = 0
    want: Any = None

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        return draw(self.case.inputs, np.random.default_rng(self.seed))

    @property
    def first(self) -> bool:
        return self.place == (0, 0)

    @property
    def size(self) -> int:
        """How many elements the inputs have."""
        return sum(math.prod(getattr(x, "shape", ())) for x in self.case.inputs)


Explain = Callable[..., tuple[str, str]]  # (*args, got=, want=, **keywords) -> in words, and as a picture

# What a puzzle forbids whose gradient is written by hand
GRADIENTS = tuple("vjp jvp grad value_and_grad linearize jacobian jacfwd jacrev hessian linear_transpose".split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """All that a check asks of an answer. `question` makes one, and says what the fields are."""

    spec: Callable[..., Any]
    cases: tuple[Case, ...]
    tol: float | None = None
    allow: Sequence[str] = ()
    forbid: Sequence[str] | Mapping[str, str] = ()
    seed: int | None = None
    kernel: bool = True
    explain: Explain | None = None
    claims: "Sequence[Asked]" = ()


def question(
    spec: Callable[..., Any],
    *inputs: Any,
    variants: Sequence[Case] = (),
    budget: Budget | None = None,
    l2: bool = False,
    **more: Any,
) -> Question:
    """What a check asks of an answer.

    spec: what the answer should compute, arrays -> arrays in plain jnp; it is given those keywords of a case that it
    has, too. inputs: Inputs such as normal((24, 512)), or arrays. variants: more inputs and block sizes that the answer
    must get right. budget: what it may cost on `inputs`. l2: see Case.
    tol: relative tolerance; by default that of the result's dtype (lens.findings.default_tolerance). What is within it
    must be rounded no worse than the course's solution (rounding.py).
    allow: names of JAX primitives that may work on arrays outside of the kernels, or of dtypes ("int32"), where all
    work whose results are of them is allowed. forbid: names that the reader's code may not use, because they do the
    puzzle's work, or name -> another reason; also JAX primitives that may not work outside of a kernel, unless on a
    dtype that is allowed: "scatter-add", when several values go to one place. seed: repeats given draws.
    kernel=False: the answer is plain array code. It runs under jit; value, shape and dtype must be the spec's. The only
    budgets that count are Budget(operations=, elements=, flops=, hbm_bytes=). explain: called as explain(*args, got=,
    want=, **keywords) when values are wrong; it returns what they mean, in words, and a picture as text, either of
    which may be "".
    claims: what functions of the reader's say of a kernel, compared with the kernel before it is judged; and what they
    choose for it, compared with every other choice when its result is right (claims.py).
    """
    return Question(spec=spec, cases=(Case(inputs, {}, budget, l2=l2), *variants), **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject(Question):
    """What a check is about: the reader's function, and what is asked of it."""

    fn: Callable[..., Any]
