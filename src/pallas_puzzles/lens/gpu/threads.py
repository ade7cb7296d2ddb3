"""Who runs: warpgroups, the CTAs that they are in, and clusters of CTAs."""

import collections
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

from ...ir.capture import SourceLine
from ...ir.gpu_program import Instr
from .barriers import Slot, Wait
from .clocks import Knowledge, new_agent
from .timeline import At, Engine, Product, TensorCores

# What a thread does; it yields why it cannot go on, and None where others may go first.
Going = Generator["Wait | Spawn | None", None, list[Any]]

_Store = tuple[int, Callable[[], None], float, float, Instr, Any]


@dataclasses.dataclass(eq=False)
class Cluster:
    """CTAs that run at the same time. ctas: by their place in the cluster.

    claimed: which clusters its tries to cancel have brought, in order; None where there was none left.
    """

    index: dict[Any, int]
    ctas: "dict[tuple[int, ...], Cta]" = dataclasses.field(default_factory=dict)
    claimed: list[dict[Any, int] | None] = dataclasses.field(default_factory=list)
    start: float = 0.0
    end: float = 0.0


@dataclasses.dataclass(eq=False)
class Cta:
    """One CTA. index: of its axes, those of the grid and of the cluster."""

    number: int
    name: str
    index: dict[Any, int]
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

    going: what it runs; wait: why it does not go on. width: threads. epoch: counts up where others learn of it. groups:
    stores that it has committed; stores: those that it has not waited for, (group, effect, when it has read, when it is
    done, instruction, source); wgmmas: (number, effect, product, accumulator). held: until when it last waited at a
    barrier, and the cause (Counts.idle_at); finished: the line of its last wait after which it had no product on its
    way. tmem: how many times it has loaded from TMEM and stored into it.
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
    going: Going = dataclasses.field(init=False)
    wait: "Wait | Spawn | None" = None
    stores: list[_Store] = dataclasses.field(default_factory=list)
    products: int = 0
    wgmmas: list[tuple[int, Callable[[], None], Product, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.at: At = self.cta.number, self.lane
        self.knowledge.clock[self.agent] = self.epoch

    def tell(self) -> Knowledge:
        """What others learn from it now. What it does next is new to them."""
        told = self.knowledge.copy()
        self.epoch += 1
        self.knowledge.clock[self.agent] = self.epoch
        return told


class Spawn:
    """Threads that run until all are done; the one that yields this goes on then."""

    def __init__(self, children: list[Thread]):
        self.children = children

    def ready(self) -> bool:
        return all(t.done for t in self.children)
