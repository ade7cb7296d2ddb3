"""What an answer costs, in a line and as plain data: of kernels for TPUs, and of those for GPUs."""

from collections.abc import Sequence
from typing import Any

from ..lens.devices.timeline import Counts as DeviceCounts
from ..lens.gpu.timeline import Counts
from ..lens.machine import Figures
from ..text import human_bytes, plural, times

AnyCounts = Figures | Counts | DeviceCounts


def gained(figures: Sequence[AnyCounts]) -> str:
    """One line on what an answer costs, over all of its kernels: bytes, steps or CTAs, fast memory, waits."""
    if on_devices := [f for f in figures if isinstance(f, DeviceCounts)]:
        return _of_devices(on_devices[0])
    if counts := [f for f in figures if isinstance(f, Counts)]:
        return _of_gpu(counts)
    return _of_tpu([f for f in figures if isinstance(f, Figures)]) if figures else ""


def _of_tpu(figures: list[Figures]) -> str:
    all_of = totals(figures)
    hbm, once, flops = all_of["hbm_bytes"], all_of["once_bytes"], all_of["flops"]
    who = "It moves" if len(figures) == 1 else f"Its {len(figures)} pallas_calls move"
    ratio = f" ({times(hbm / once)} the arrays)" if once else ""
    words = f"{who} {human_bytes(hbm)}{ratio} between HBM and VMEM in {plural(all_of['steps'], 'step')}"
    words += f", and {'holds' if len(figures) == 1 else 'hold at most'} {human_bytes(all_of['vmem_bytes'])} of VMEM"
    own, exposed = (sum(getattr(f, name) for f in figures) for name in ("dma_bytes", "exposed_bytes"))
    in_flight = max(f.in_flight_bytes for f in figures)
    if own and (exposed or in_flight):
        return f"{words}; {human_bytes(exposed)} are exposed, {human_bytes(int(in_flight))} in flight on average."
    return words + (f"; {flops / hbm:.3g} FLOP per byte." if flops and hbm else ".")


def _of_gpu(each: list[Counts]) -> str:
    c = Counts.together(each)
    who = "It moves" if len(each) == 1 else f"Its {len(each)} kernels move"
    to = "SMEM" if c.copies or c.stores else "registers"
    ratio = f" ({times(c.gmem_bytes / c.once_bytes)} the arrays)" if c.once_bytes else ""
    words = f"{who} {human_bytes(c.gmem_bytes)}{ratio} between GMEM and {to} in {plural(c.ctas, 'CTA')}"
    if c.smem_bytes:
        words += f", and {'holds' if len(each) == 1 else 'hold at most'} {human_bytes(c.smem_bytes)} of SMEM"
    engine, busy, idle = "tensor cores wait", c.tensor_busy, c.tensor_idle
    if not busy and to == "SMEM":
        engine, busy, idle = "copy engine waits", c.copy_busy, c.copy_idle
    ends = busy > 0 and idle >= 0  # before everything that it has started does
    return words + (f"; the {engine} {idle:,.0f} of {busy + idle:,.0f} cycles." if ends else ".")


def _of_devices(c: DeviceCounts) -> str:
    if not c.ici_bytes:
        return f"Its {c.devices} devices send nothing to one another."
    words = f"Its {c.devices} devices send {human_bytes(c.ici_bytes)} to one another, {human_bytes(c.bytes_hops)} over "
    words += f"all links, {human_bytes(c.link_bytes)} over the busiest"
    hidden = c.ici_bytes - c.exposed_ici_bytes
    return words + (f"; {hidden / c.ici_bytes:.0%} of it while a device computes." if hidden else ".")


_TPU_SUMS = ("hbm_bytes", "once_bytes", "steps", "flops")
_GPU_SUMS = tuple(
    "gmem_bytes once_bytes ctas arrivals bank_conflicts flops cycles waited tensor_idle copy_idle".split()
)
_DEVICE_SUMS = ("ici_bytes", "bytes_hops", "link_bytes", "exposed_ici_bytes")


def totals(figures: Sequence[AnyCounts]) -> dict[str, int]:
    """What an answer costs, over all of its kernels; of fast memory the most that one of them holds. {} without any."""
    if not figures:
        return {}
    if isinstance(figures[0], DeviceCounts):
        return {name: int(getattr(figures[0], name)) for name in _DEVICE_SUMS}
    sums, held = (_GPU_SUMS, "smem_bytes") if isinstance(figures[0], Counts) else (_TPU_SUMS, "vmem_bytes")
    found = {name: int(sum(getattr(f, name) for f in figures)) for name in sums}
    return {**found, held: int(max(getattr(f, held) for f in figures))}


def to_json(f: AnyCounts) -> dict[str, Any]:
    """The costs of one kernel as plain data."""
    if isinstance(f, DeviceCounts):
        return {name: getattr(f, name) for name in (*_DEVICE_SUMS, "devices", "copies", "signals", "waited", "ticks")}
    if isinstance(f, Counts):
        return {name: getattr(f, name) for name in (*_GPU_SUMS, "smem_bytes", "gmem_read_bytes", "gmem_write_bytes")}
    names = ("name", "steps", "hbm_bytes", "once_bytes", "vmem_bytes", "flops", "transcendentals", "intensity")
    each = ("moves", "hbm_bytes", "vmem_bytes")
    operands = [{"name": r.operand.name} | {name: getattr(r, name) for name in each} for r in f.operands]
    return {name: getattr(f, name) for name in names} | {"operands": operands}
