"""What a compiled program says of itself: the HBM bytes and the estimated cycles of every instruction that runs.

The format is XLA's own text of an optimised module, seen on libtpu 0.0.50 and 0.0.51. A layout with S(1) is VMEM; what
moves there costs no HBM traffic. Bytes in loops count as often as the loop runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_BYTES = {"pred": 1, "bf16": 2, "token": 0}
# Operations, and targets of custom calls, that only say where an array is
_FREE = frozenset(
    "parameter constant bitcast tuple get-tuple-element copy-done slice-done async-done async-update after-all "
    "partition-id iota opt-barrier AllocateBuffer ConcatBitcast".split()
)
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<shape>.*?) (?P<op>[\w-]+)\((?P<operands>.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a program. times: how often it runs, NaN where nobody could know.

    hbm_bytes, cycles: of one run; cycles: None where the compiler gives none. target: of a custom call.
    """

    op: str
    name: str
    hbm_bytes: float
    cycles: float | None
    times: float
    target: str

    @property
    def is_kernel(self) -> bool:
        return self.target == "tpu_custom_call"

    @property
    def copies(self) -> bool:
        """A copy in the background: it costs bandwidth, and no cycles."""
        return self.op.endswith("-start")


@dataclasses.dataclass(frozen=True)
class _Line:
    """An instruction in a computation. body: of a fusion."""

    root: bool
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    body: Sequence["_Line"]
    text: str


def instructions(text: str) -> list[Instruction]:
    """Every instruction that runs, those in loops included. Raises ValueError for text of another format."""
    computations = _computations(text)
    if "ENTRY" not in computations:
        raise ValueError("the compiled program has no ENTRY: the compiler's format has changed")
    return list(_walk(computations, "ENTRY", 1.0))


def _computations(text: str) -> dict[str, list[_Line]]:
    """Name -> instructions. What a computation calls stands before it."""
    found: dict[str, list[_Line]] = {}
    name = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = "ENTRY" if header[1] else header[2]
            found[name] = []
        elif line.startswith("}"):
            name = ""
        elif name and (match := _INSTRUCTION.match(line)):
            operands = tuple(re.findall(r"%([\w.\-]+)", re.split(r"\)(?:,|$)", match["operands"])[0]))
            called = re.search(r"calls=%([\w.\-]+)", line) if match["op"] == "fusion" else None
            body = found.get(called[1], ()) if called else ()
            root = match["root"] is not None
            found[name].append(_Line(root, match["name"], match["shape"], match["op"], operands, body, line))
    return found


def _walk(computations: Mapping[str, Sequence[_Line]], name: str, times: float) -> Iterator[Instruction]:
    lines = computations.get(name, ())
    shapes = {line.name: line.shape for line in lines}
    for line in lines:
        custom = re.search(r'custom_call_target="([^"]*)"', line.text)
        target = custom[1] if custom else ""
        if {line.op, target} & _FREE:
            continue
        if line.op in ("while", "call", "conditional"):
            for body in _bodies(line):
                yield from _walk(computations, body, _trips(computations, line) * times)
            continue
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line.text)
        yield Instruction(
            op=line.op,
            name=line.name,
            hbm_bytes=_traffic(line, shapes),
            cycles=float(cycles[1]) if cycles else None,
            times=times,
            target=target,
        )


def _bodies(line: _Line) -> list[str]:
    if found := re.search(r"(?:body|to_apply)=%([\w.\-]+)", line.text):
        return [found[1]]
    return re.findall(r"%([\w.\-]+)", line.text.partition("branch_computations={")[2].split("}")[0])


def _trips(computations: Mapping[str, Sequence[_Line]], line: _Line) -> float:
    """How often a loop runs: what the compiler knows, or the constant that its condition compares with."""
    if line.op == "call":
        return 1.0
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line.text):
        return float(known[1])
    condition = re.search(r"condition=%([\w.\-]+)", line.text)
    bounds = [
        int(found[1])
        for each in (computations.get(condition[1], ()) if condition else ())
        if (found := re.search(r"s32\[\]\S* constant\((\d+)\)", each.text))
    ]
    return float(max(bounds, default=math.nan))


# --- bytes -----------------------------------------------------------------------------------------------------------


def _nbytes(shape: str, anywhere: bool = False) -> float:
    """Of the arrays in a shape that are in HBM; `anywhere`: of all of them."""
    return sum(
        math.prod(map(int, filter(None, dims.split(",")))) * _itemsize(kind)
        for kind, dims, layout in _ARRAY.findall(shape)
        if anywhere or "S(" not in layout
    )


def _itemsize(kind: str) -> float:
    digits = re.search(r"\d+", kind)
    return _BYTES.get(kind, int(digits[0]) / 8 if digits else 4)


def _traffic(line: _Line, shapes: Mapping[str, str]) -> float:
    if line.op.endswith("-start"):  # an array comes from one memory and goes to another
        arrays = [m[0] for m in _ARRAY.finditer(line.shape)][:2]
        moved = min((_nbytes(each, anywhere=True) for each in arrays), default=0.0)
        return moved * sum(bool(_nbytes(each)) for each in arrays)
    read = 0.0
    for number, operand in enumerate(line.operands):
        whole = _nbytes(shapes.get(operand, ""))
        parts, passed_on = _read(line.body, number) if line.body and whole else (whole, False)
        read += whole if passed_on else min(whole, parts)
    written = min(_nbytes(line.shape), _updated(line.body) if line.body else math.inf)
    if line.op in ("dynamic-slice", "slice", "gather"):
        read = min(read, written)
    return read + written


def _root(body: Sequence[_Line]) -> _Line:
    return next(each for each in body if each.root)


def _read(body: Sequence[_Line], number: int) -> tuple[float, bool]:
    """(bytes that a fusion reads of its operand `number`: of one that is only sliced, the slices; is it its result?)"""
    parameter = next((each for each in body if each.op == "parameter" and f"parameter({number})" in each.text), None)
    if parameter is None:
        return math.inf, False
    total = 0.0
    names = {parameter.name}
    for each in body:
        if not names.intersection(each.operands):
            continue
        if each.op == "bitcast":
            names.add(each.name)
        elif each.op in ("dynamic-slice", "slice", "gather") and each.operands[0] in names:
            total += _nbytes(each.shape, anywhere=True)
        elif each.op == "dynamic-update-slice" and each.operands[0] in names and each.operands[1] not in names:
            continue  # what is not updated stays where it is
        elif each.body:
            for i in (i for i, operand in enumerate(each.operands) if operand in names):
                parts, passed_on = _read(each.body, i)
                total += parts
                if passed_on:
                    names.add(each.name)
        else:
            return math.inf, False
    return total, _root(body).name in names


def _updated(body: Sequence[_Line]) -> float:
    """Bytes that are written where a fusion updates a part of its result in place, else infinity."""
    made, root = {each.name: each for each in body}, _root(body)
    while root.op == "bitcast" and root.operands[0] in made:
        root = made[root.operands[0]]
    if root.op == "dynamic-update-slice" and root.operands[1] in made:
        return _nbytes(made[root.operands[1]].shape, anywhere=True)
    return _updated(root.body) if root.body else math.inf
