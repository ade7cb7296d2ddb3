"""Who knows of what: vector clocks, with one entry for each agent that does something in its own time.

Agents are warpgroups, their queues of stores and of wgmmas, and the phases of barriers, which copies end in. A clock
says up to which of an agent's own times one knows what it has done. `fenced` is what one knew, or was told of, at the
last commit_smem on the way: what the async proxy (TMA, wgmma) may rely on of what ordinary loads and stores have done
in SMEM (PTX ISA 9, section 8.9.5 "Causality Order": operations of two proxies are ordered by a proxy fence only; and
9.7.15 "fence.proxy.async"). The other way needs none: a copy that has been waited for, and a wgmma, end in such a fence
of their own.
"""

import dataclasses
import itertools

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
    """clock: what has happened before; fenced: the part of it that the async proxy sees, too."""

    clock: Clock = dataclasses.field(default_factory=dict)
    fenced: Clock = dataclasses.field(default_factory=dict)

    def learn(self, other: "Knowledge") -> None:
        join(self.clock, other.clock)
        join(self.fenced, other.fenced)

    def copy(self) -> "Knowledge":
        return Knowledge(dict(self.clock), dict(self.fenced))

    def knows(self, agent: int, time: int) -> bool:
        return time <= self.clock.get(agent, 0)

    def fence_knows(self, agent: int, time: int) -> bool:
        return time <= self.fenced.get(agent, 0)
