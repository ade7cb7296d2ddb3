"""What the compiler made of a kernel, read from its dumps: the VLIW program, its loops and branches, its use of slots.

A TPU issues one bundle a cycle; a bundle holds one instruction for each slot. The formats are libtpu's own, seen on
libtpu 0.0.50 and 0.0.51: a bundle is a line such as `0x1a LB: >> { %3 = vld ...;; %4 = vadd ... } /* Start region 7
*/`, where every `>` is a loop around it, and LB marks the first bundle of a loop.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# slot -> what the dump calls it: libtpu 0.0.50 has one column for the MXU, 0.0.51 tells its two uses apart
SLOTS = {
    "MXU": ("MXU", "MATMUL"),
    "VALU": ("VALU",),
    "XLU": ("XLU",),
    "EUP": ("EUP",),
    "load": ("VLOAD",),
    "store": ("VSTORE",),
    "scalar": ("SALU",),
}

_BUNDLE = re.compile(r"^ *(?P<pc>0x[0-9a-f]+|0) +(?P<mark>[A-Z]{2})? *: *(?P<depth>(?:> *)*)\{", re.MULTILINE)
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.(?:rel|abs) (?:\(!?%\w+\) )?target = \$region(?P<target>\d+)")
_TRIPS = re.compile(r"= scmp\.\w+\.s32\.totalorder %\S+, (\d+) /\* loop exit test")
_STAGE_WAIT = "pipeline-emitter-dma-wait"
_IN_VMEM = re.compile(r"inlined_call_operand\.vmem \[shape: [^]]*\], index: (\d+)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """Bundles `first` to `last`, run `trips` times (None: known only at run time). depth 1 is the outermost."""

    first: int
    last: int
    depth: int
    trips: float | None

    @property
    def length(self) -> int:
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Skip:
    """Bundles `first` to `last`, which a branch may jump over."""

    first: int
    last: int
    copies: bool  # they only start or await copies between HBM and VMEM


@dataclasses.dataclass
class Schedule:
    """The program of one kernel.

    body: the loop over grid steps, None when there is no such loop (one step). skips: what `pl.when` may leave out in a
    step, outermost first, in program order. use: slot -> the share of it that each bundle has in use. spills, fills:
    vector registers stored to VMEM for want of room, and loaded back.
    """

    bundles: int
    body: Loop | None
    inner: list[Loop]
    skips: list[Skip]
    use: dict[str, np.ndarray]
    spills: int
    fills: int
    operands_in_vmem: int
    weights: np.ndarray  # how often each bundle runs in a step in which nothing is skipped

    @property
    def longest_step(self) -> int:
        """Bundles of a step in which nothing is skipped. A loop of unknown length counts once."""
        return int(self.weights.sum())

    @property
    def shortest_step(self) -> int:
        return self.longest_step - int(sum(self.own(i) for i in range(len(self.skips))))

    def own(self, number: int) -> float:
        """Bundles that skip `number` leaves out and no skip inside of it does."""
        skip = self.skips[number]
        mine = np.zeros(self.bundles, bool)
        mine[skip.first : skip.last + 1] = True
        for other in self.skips:
            if other is not skip and skip.first <= other.first and other.last <= skip.last:
                mine[other.first : other.last + 1] = False
        return float(self.weights[mine].sum())

    def step_lengths(self, taken: Sequence[np.ndarray]) -> np.ndarray:
        """Bundles of every step. taken[i][s]: does step s run skip i? (A fraction, if it runs in a loop.)"""
        base = np.full(taken[0].shape if taken else 1, float(self.shortest_step))
        for number, mask in enumerate(taken):
            base = base + self.own(number) * mask
        return base

    def slot_use(self) -> dict[str, float]:
        """Slot -> share of its capacity in use, over a step in which nothing is skipped."""
        total = max(1, self.longest_step)
        return {slot: float((share * self.weights).sum()) / total for slot, share in self.use.items()}


@dataclasses.dataclass(frozen=True)
class _Bundle:
    pc: int
    mark: str
    depth: int
    text: str


def read(program: str, utilisation: str, *, looped: bool, trips: Sequence[float | None] = ()) -> Schedule:
    """The schedule in two dumps, `final_bundles` and `final_hlo-static-per-bundle-utilization`.

    looped: the grid has more than one step, so that the outermost loop is the one over its steps. trips: how often the
    kernel's own loops run, in program order, where that is known; for loops whose length the program does not hold.
    Raises ValueError when the text is not what libtpu 0.0.50 and 0.0.51 write.
    """
    bundles = list(_bundles(program))
    if not bundles:
        raise ValueError("no bundles in the compiler's dump: its format has changed")
    columns = _utilisation(utilisation, len(bundles))
    loops = _loops(bundles)
    outer = [loop for loop in loops if loop.depth == 1]
    body = max(outer, key=lambda loop: loop.length, default=None) if looped else None
    first, last = (body.first, body.last) if body else (0, len(bundles) - 1)
    inner = [loop for loop in loops if loop is not body and first <= loop.first and loop.last <= last]
    longer = [count for count in trips if count is None or count > 1]  # a loop of one round is none
    if len(longer) == len(inner):
        known = zip(inner, longer, strict=True)
        inner = [dataclasses.replace(loop, trips=loop.trips or count) for loop, count in known]
    weights = np.zeros(len(bundles))
    weights[first : last + 1] = 1
    for loop in inner:
        weights[loop.first : loop.last + 1] *= loop.trips or 1
    called = {slot: name for slot, names in SLOTS.items() for name in names if name in columns}
    return Schedule(
        bundles=len(bundles),
        body=body,
        inner=inner,
        skips=_skips(bundles, first, last, pipelined=body is not None),
        use={slot: columns[name][0] / columns[name][1] for slot, name in called.items()},
        spills=int(columns["VSTORE:SPILL"][0].sum()),
        fills=int(columns["VLOAD:FILL"][0].sum()),
        operands_in_vmem=len(set(_IN_VMEM.findall(program))),
        weights=weights,
    )


def _bundles(program: str) -> Iterator[_Bundle]:
    starts = list(_BUNDLE.finditer(program))
    ends = [match.start() for match in starts[1:]] + [len(program)] * bool(starts)
    for number, (match, end) in enumerate(zip(starts, ends, strict=True)):
        if int(match["pc"], 0) != number:
            raise ValueError(f"bundle {number} is missing from the compiler's dump: its format has changed")
        yield _Bundle(number, match["mark"] or "", match["depth"].count(">"), program[match.end() : end])


def _utilisation(text: str, bundles: int) -> dict[str, tuple[np.ndarray, int]]:
    """Column -> (how many of its instructions each bundle holds, how many one could hold)."""
    lines = [*text.splitlines(), "", "", ""]
    names = [name.strip() for name in lines[1].split(",")]
    capacity = [int(n) for n in lines[2].split()]
    rows = [[int(n) for n in line.split()] for line in lines[4:] if line.strip()]
    if len(names) != len(capacity) or any(len(row) != len(names) for row in rows) or len(rows) != bundles:
        raise ValueError("the compiler's table of slots has another shape than expected")
    return {name: (column, most) for name, column, most in zip(names, np.array(rows).T, capacity, strict=True)}


def _loops(bundles: list[_Bundle]) -> list[Loop]:
    found = []
    for bundle in bundles:
        if bundle.mark != "LB":
            continue
        last = bundle.pc
        for other in bundles[bundle.pc + 1 :]:
            closed = other.depth < bundle.depth and other.text.split("}")[0].strip()
            if closed or (other.mark == "LB" and other.depth <= bundle.depth):
                break
            if other.depth >= bundle.depth:
                last = other.pc
        own = "".join(b.text for b in bundles[bundle.pc : last + 1] if b.depth == bundle.depth)
        trips = _TRIPS.search(own)
        found.append(Loop(bundle.pc, last, bundle.depth, int(trips[1]) if trips else None))
    return found


def _skips(bundles: list[_Bundle], first: int, last: int, *, pipelined: bool) -> list[Skip]:
    """Forward branches within a step. One that jumps over the waits of the pipeline is the loop's own: its first and
    last rounds have nothing to compute."""
    starts: dict[str, int] = {}
    for bundle in bundles:
        for region in _STARTS.findall(bundle.text):
            starts.setdefault(region, bundle.pc)
    slots = _delay_slots(bundles, starts)
    found: list[Skip] = []
    for bundle in bundles[first : last + 1]:
        for match in _BRANCH.finditer(bundle.text):
            target = starts.get(match["target"], -1)
            begin, end = bundle.pc + slots + 1, min(target - 1, last)
            if target <= bundle.pc or end < begin:
                continue
            text = "".join(b.text for b in bundles[begin : end + 1])
            waits = any(_STAGE_WAIT in b.text for b in bundles[bundle.pc + 1 : end + 1])
            if pipelined and (waits or ((end - begin) > 0.9 * (last - first) and not found)):
                continue
            found.append(Skip(begin, end, _only_copies(text)))
    return found


def _delay_slots(bundles: list[_Bundle], starts: dict[str, int]) -> int:
    """How many bundles after a branch still run: from a loop's branch back to where the loop ends. 4, or 6 on TPU7x."""
    for bundle in bundles:
        match = _BRANCH.search(bundle.text)
        if match and bundle.depth and 0 <= starts.get(match["target"], 1 << 30) <= bundle.pc:
            after = bundle.pc
            while after + 1 < len(bundles) and bundles[after + 1].depth >= bundle.depth:
                after += 1
            if 0 < after - bundle.pc <= 8:
                return after - bundle.pc
    return 4


def _only_copies(text: str) -> bool:
    computes = re.search(r"= (?:v(?!ld|st|sync|trace|settm|mov)\w+)", text)
    return not computes and bool(re.search(r"dma\.|vld|sync", text))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of a kernel in VMEM."""

    name: str
    nbytes: int
    window: tuple[str, int] | None  # ("input" | "output", number): blocks of an operand, counted from the scalars on


_WINDOW = re.compile(r"(input|output) window allocation for operator (?:input|output) (\d+)")


def vmem_buffers(report: str, kernel: str) -> list[Buffer]:
    """The buffers of one kernel, from the compiler's `vmem_report.html`."""
    data = _vmem_data(report)
    kernels = data.get("hlo_breakdowns") or {}  # null where nothing is in VMEM
    blocks = (kernels.get(kernel) or {}).get("blocks") or []
    return [
        Buffer(each["tag"], int(each["size"]), (window[1], int(window[2])) if window else None)
        for block in blocks
        if block["block_type"] == "SCOPED"
        for each in block["allocations"] or []
        for window in [_WINDOW.match(each["tag"])]
    ]


@functools.lru_cache(maxsize=8)
def _vmem_data(report: str) -> dict[str, Any]:
    start = report.find("const DATA")
    if start < 0:
        raise ValueError("no data in the compiler's VMEM report: its format has changed")
    data, _ = json.JSONDecoder().raw_decode(report, report.index("{", start))
    return data
