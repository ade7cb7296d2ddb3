"""What a puzzle may bound, and what is said where a bound is exceeded."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..diagnose.findings import Finding
from ..ir.capture import SourceLine


@dataclasses.dataclass(frozen=True)
class Budget:
    """Upper bounds on what an answer may cost; None leaves a cost unbounded.

    hbm_bytes: bytes moved between HBM and VMEM. vmem_bytes: VMEM held by one call (blocks x buffers + scratch), and by
    values that it keeps over a copy into the memory that they were loaded from, or over the wait for one. grid_steps:
    steps over all calls. calls: exact number of pallas_calls. output_stores: in how many steps of one visit an output
    block may be stored. flops: arithmetic over all calls; transcendentals: exponentials, roots and their like, which
    are not among these. serial_steps: steps of one call that have to follow one another, when every index along its
    parallel axes has a core of its own. mxu_bits: how wide the operands of matrix products may be; there has to be a
    product, too. branches: pl.when, cond and loops in a kernel. selected: elements of the results of jnp.where, over
    all calls and steps, which is what masks cost. operations: how many primitives a kernel, or array code without one,
    may consist of. elements: of such code, how many the largest array that it makes may have. Of such code, flops and
    mxu_bits are those of its matrix products, and hbm_bytes what moves when each operation is a program of its own,
    also inside of a jit of the reader's. outside_flops: arithmetic of matrix products outside of the kernels.
    exposed_bytes: of copies between HBM and VMEM that a kernel starts itself, those that nothing overlaps: no
    arithmetic is done between the start and the wait. in_flight_bytes, the one lower bound: bytes of such copies that
    are on their way while the kernel computes, on average over its FLOPs. new_bytes: HBM that the calls take for
    results that are written over no input.

    Of kernels for a GPU, beside calls, flops and outside_flops: gmem_bytes: bytes between GMEM and the SMs.
    thread_bytes: those of them that threads load and store themselves; cta_bytes: those that one CTA moves. copies: out
    of GMEM into SMEM; stores: out of SMEM into GMEM. smem_bytes: SMEM held by one CTA. ctas: over all kernels.
    bank_conflicts: in SMEM. waited: cycles that warpgroups wait for copies, products and barriers; tensor_idle,
    copy_idle: cycles of a CTA's life in which the tensor cores or the copy engine have nothing to do; all three over
    all CTAs, on the machine's logical clock.

    Of a shard_map over several devices, over all of them (lens.devices.timeline.Counts): bytes_hops: sent from device
    to device, each byte counted on every link of its way; link_bytes: over the busiest link, in one direction;
    exposed_ici_bytes: sent while neither of the two devices computes; copies: to other devices. The bounds on kernels
    hold on each device.
    """

    hbm_bytes: int | None = None
    vmem_bytes: int | None = None
    grid_steps: int | None = None
    calls: int | None = None
    output_stores: int | None = None
    flops: int | None = None
    transcendentals: int | None = None
    serial_steps: int | None = None
    mxu_bits: int | None = None
    branches: int | None = None
    selected: int | None = None
    operations: int | None = None
    elements: int | None = None
    outside_flops: int | None = None
    exposed_bytes: int | None = None
    in_flight_bytes: int | None = None
    new_bytes: int | None = None
    gmem_bytes: int | None = None
    thread_bytes: int | None = None
    copies: int | None = None
    stores: int | None = None
    cta_bytes: int | None = None
    smem_bytes: int | None = None
    ctas: int | None = None
    bank_conflicts: int | None = None
    waited: int | None = None
    tensor_idle: int | None = None
    copy_idle: int | None = None
    bytes_hops: int | None = None
    link_bytes: int | None = None
    exposed_ici_bytes: int | None = None


def over(
    bound: str,
    text: str,
    evidence: Iterable[str] = (),
    line: SourceLine | None = None,
    near: Iterable[SourceLine | None] = (),
) -> Finding:
    """A right answer that costs too much. bound: which of the budget's it exceeds."""
    lines = [each for each in near if each is not None]
    return Finding("budget", f"Right answer, but {text}", [*evidence], line, operand=bound, near=lines)


Bounds = Mapping[str, tuple[Callable[[Any], str], str]]  # by name: how its figures are shown, and what is said of it


def exceeded(counts: Any, budget: Budget, bounds: Bounds, facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(bound, what is said) for each of the bounds that the counts of that name exceed."""
    for bound, (shown, words) in bounds.items():
        figure, most = getattr(counts, bound), getattr(budget, bound)
        if most is not None and figure > most:
            yield bound, words.format(figure=shown(figure), most=shown(most), **facts)
