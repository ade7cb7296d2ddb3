"""Who runs: warpgroups, the CTAs that they are in, and clusters of CTAs."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from ...ir.capture import SourceLine
from ...ir.gpu import Kernel
from ...ir.gpu_program import Instr
from .barriers import Slot
from .clocks import Knowledge, new_agent
from .timeline import At, Engine, Product, TensorCores


@dataclasses.dataclass(eq=False)
class Cluster:
    """CTAs that run at the same time. number: in the order of launching; ctas: by their place in the cluster.

    claimed: which clusters its tries to cancel have brought, in order; None where there was none left.
    """

    number: int
    index: dict[Any, int]
    ctas: "dict[tuple[int, ...], Cta]" = dataclasses.field(default_factory=dict)
    claimed: list[dict[Any, int] | None] = dataclasses.field(default_factory=list)
    start: float = 0.0
    end: float = 0.0


@dataclasses.dataclass(eq=False)
class Cta:
    """One CTA. index: of its axes, those of the grid and of the cluster; place: in its cluster."""

    number: int
    name: str
    index: dict[Any, int]
    place: tuple[int, ...]
    cluster: Cluster
    copy: Engine = dataclasses.field(default_factory=Engine)
    tensor: TensorCores = dataclasses.field(default_factory=TensorCores)
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what scopes hold
    tensor_agent: int = dataclasses.field(default_factory=lambda: -new_agent())
    products: int = 0
    mmas: list[tuple[int, Callable[[], None], float]] = dataclasses.field(default_factory=list)
    moved: int = 0  # bytes of GMEM
    coming: dict[int, Any] = dataclasses.field(default_factory=dict)  # copies that nobody has waited for: (access, Ref)
    named: dict[int, Slot] = dataclasses.field(default_factory=dict)  # PTX's named barriers, by number


@dataclasses.dataclass(eq=False)
class Thread:
    """A warpgroup, or a warp of one. now: its time; seen: how many rounds it has waited for, by barrier.

    width: threads. epoch: counts up where others learn of it. groups: stores that it has committed; stores: those that
    it has not waited for, (group, effect, when it has read, when it is done, instruction, source); wgmmas: (number,
    effect, product, accumulator). held: until when it last waited at a barrier, and the cause (Counts.idle_at);
    finished: the line of its last wait after which it had no product on its way. tmem: how many times it has loaded
    from TMEM and stored into it.
    """

    cta: Cta
    name: str
    lane: str
    index: dict[Any, int]
    now: float
    width: int = 128
    agent: int = dataclasses.field(default_factory=new_agent)
    reading: int = dataclasses.field(default_factory=new_agent)  # the agent of its stores' reads of SMEM
    storing: int = dataclasses.field(default_factory=new_agent)  # of their writes to GMEM
    multiplying: int = dataclasses.field(default_factory=new_agent)  # of its wgmmas
    knowledge: Knowledge = dataclasses.field(default_factory=Knowledge)
    loading: int = dataclasses.field(default_factory=lambda: -new_agent())  # of its loads from TMEM
    filling: int = dataclasses.field(default_factory=lambda: -new_agent())  # of its stores into TMEM
    held: tuple[float, SourceLine | None] = (-1.0, None)
    finished: SourceLine | None = None
    tmem: int = 0
    epoch: int = 1
    seen: "collections.Counter[Any]" = dataclasses.field(default_factory=collections.Counter)
    scopes: "collections.Counter[Any]" = dataclasses.field(default_factory=collections.Counter)
    tries: int = 0
    groups: int = 0
    done: bool = False
    stores: "collections.deque[tuple[int, Callable[[], None], float, float, Instr, Any]]" = dataclasses.field(
        default_factory=collections.deque
    )
    products: int = 0
    wgmmas: "collections.deque[tuple[int, Callable[[], None], Product, Any]]" = dataclasses.field(
        default_factory=collections.deque
    )

    def __post_init__(self) -> None:
        self.at: At = self.cta.number, self.lane
        self.knowledge.clock[self.agent] = self.epoch

    def tell(self) -> Knowledge:
        """What others learn from it now. What it does next is new to them."""
        told = self.knowledge.copy()
        self._next()
        return told

    def fence(self) -> None:
        """commit_smem: the async proxy sees all that it knows of."""
        self.knowledge.fenced = dict(self.knowledge.clock)
        self._next()

    def _next(self) -> None:
        self.epoch += 1
        self.knowledge.clock[self.agent] = self.epoch


def names_of(kernel: Kernel, index: dict[Any, int], thread: int) -> tuple[str, str]:
    """("CTA (0, 3)", "warpgroup 1 of CTA (0, 3)"), as short as the kernel allows."""
    sizes = {**kernel.grid, **kernel.cluster}
    at = tuple(index[axis] for axis in sizes)
    cta = f"CTA {at if len(at) != 1 else at[0]}" if at else ""
    one = kernel.threads == 1 and bool(cta)
    return cta, cta if one else f"warpgroup {thread}" + (f" of {cta}" if cta else "")
