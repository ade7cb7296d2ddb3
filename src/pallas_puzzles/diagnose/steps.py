"""How to speak of the steps of a grid: which one, and which of them come first for an output block."""

from ..lens.machine import Trace


def at(trace: Trace, step: int) -> str:
    """'step 4, grid index (1, 0)'."""
    index = tuple(int(i) for i in trace.steps[step]) if trace.n else ()
    inside = f" of the pipeline in {trace.call.inside}" if trace.call.inside else ""
    return f"step {step}{inside}, grid index {index}" if index else f"the only step{inside}"


def still_axes(trace: Trace, k: int) -> list[int]:
    """The grid axes along which the block of operand k does not change: those it is revisited or reduced over."""
    grid, by_step = trace.call.grid, dict(zip(trace.steps, trace.blocks[k], strict=True))
    moving = [d for d, size in enumerate(grid) if size > 1 and d not in trace.call.vmapped]
    return [d for d in moving if all(by_step[s] == by_step[(*s[:d], 0, *s[d + 1 :])] for s in trace.steps)]


def _kept_over(trace: Trace, ref: str) -> set[int]:
    """The grid axes over which a buffer is kept: an output by the steps that it stays for, scratch by all outputs'."""
    outs = [k for k, o in enumerate(trace.call.operands) if o.role == "out" and not o.in_hbm]
    own = [k for k in outs if trace.call.operands[k].name == ref] or outs
    return set.intersection(*(set(still_axes(trace, k)) for k in own)) if own else set()


def is_first_step(trace: Trace, ref: str, step: int) -> bool:
    """Whether a buffer is to be set at this step: no step before it belongs to the same output block."""
    return not any(trace.steps[step][d] for d in _kept_over(trace, ref))


def first_step_test(trace: Trace, ref: str = "") -> str:
    """When a buffer is to be set."""
    axes = [d for d in range(len(trace.call.grid)) if d not in trace.call.vmapped]  # as program_id counts them
    tests = [f"pl.program_id({axes.index(d)}) == 0" for d in sorted(_kept_over(trace, ref))]
    if not tests:
        return "on the first step of every output block"
    both = " & ".join(f"({test})" for test in tests) if len(tests) > 1 else tests[0]
    return f"on the first step of every output block, where {both}"
