"""Who knows of what: vector clocks, with one entry for each agent that does something in its own time.

Agents are warpgroups, their queues of stores and of wgmmas, and the phases of barriers, which copies end in. A clock
says up to which of an agent's own times one knows what it has done.

Generic and async proxies: `fenced` is what one knew, or was told of, at the last commit_smem on the way: what the async
proxy (TMA, wgmma, tcgen05) may rely on of what ordinary loads and stores have done in SMEM. PTX ISA 9.0: causality
order keeps to accesses through one proxy (8.9.5, "Causality Order"), and fence.proxy.async joins two of them
(9.7.9.25.2, "Async Proxy"), in both directions: the example of clusterlaunchcontrol.try_cancel fences a read by
ordinary loads before an asynchronous write to the same place. The other way needs no fence: a copy, and a wgmma, ends
in one of its own, which whoever has waited for it relies on (9.7.9.25.2; "wgmma.mma_async").

Agents of tcgen05 (its products; loads and stores of TMEM) have numbers below 0. A barrier passes on what is known of
them only if it orders the tensor cores, which it does by a tcgen05.fence on both of its sides ("tcgen05.fence"), or if
a thread has fenced before it arrives: `tensor` is what it knew of them then.
"""

import dataclasses
import itertools
from typing import Any

Clock = dict[int, int]
_numbers = itertools.count(1)


def new_agent() -> int:
    """A number that stands for one more agent."""
    return next(_numbers)


def join(into: Clock, other: Clock) -> None:
    """From now on `into` knows all that `other` knows."""
    for agent, time in other.items():
        if time > into.get(agent, 0):
            into[agent] = time


@dataclasses.dataclass(slots=True)
class Knowledge:
    """clock: what has happened before; fenced: the part of it that the async proxy sees, too; tensor: the part of it,
    of tcgen05, that any barrier passes on."""

    clock: Clock = dataclasses.field(default_factory=dict)
    fenced: Clock = dataclasses.field(default_factory=dict)
    tensor: Clock = dataclasses.field(default_factory=dict)

    def learn(self, other: "Knowledge", tensor: bool = True) -> None:
        """tensor: all that is known of tcgen05, too."""
        join(self.clock, other.clock if tensor else {a: n for a, n in other.clock.items() if a > 0} | other.tensor)
        join(self.fenced, other.fenced)

    def copy(self) -> "Knowledge":
        return Knowledge(dict(self.clock), dict(self.fenced), dict(self.tensor))

    def knows(self, access: Any) -> bool:
        """Whether an access (memory.Access) is among what has happened before."""
        return bool(access.time <= self.clock.get(access.agent, 0))
