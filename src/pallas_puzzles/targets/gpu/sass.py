"""Machine code as nvdisasm prints it: instructions with the source's lines, and what they are for."""

import collections
import dataclasses
import re
from collections.abc import Iterable

# Kind -> opcodes, by their beginnings; the first that fits. The names are NVIDIA's, of its CUDA Binary Utilities guide.
_KINDS = {
    "tensor core": "HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA HMMA IMMA QMMA",
    "TMA": "UTMALDG UTMASTG UTMAPF UTMAREDG UBLKCP UBLKRED UBLKPF",
    "TMEM": "LDTM STTM UTCCP UTCATOMSWS UTCSHIFT",
    "barrier": "SYNCS BAR WARPGROUP WARPSYNC DEPBAR UTCBAR UTMACMDFLUSH UCGABAR MEMBAR FENCE ERRBAR B2R NANOSLEEP CCTL "
    "LDGDEPBAR UTMACCTL",
    "GMEM": "LDG STG RED ATOMG LDGSTS",
    "SMEM": "LDS STS LDSM STSM ATOMS",
    "local": "LDL STL",
    "MUFU": "MUFU",
    "shuffle": "SHFL REDUX VOTE",
    "conversion": "F2F F2I I2F F2FP F2IP I2FP FRND",
    "float": "FADD FMUL FFMA FMNMX FSETP FSEL FCHK HADD HMUL HFMA HMNMX DADD DMUL DFMA FSET FSWZADD",
    "control": "BRA EXIT CALL RET BSSY BSYNC BREAK YIELD NOP ELECT BRX JMP USETMAXREG PLOP3 UPLOP3",
}
KINDS = (*_KINDS, "integer")
_OPCODES = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

_LINE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')
_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_STEP = re.compile(r"\bU?IADD3?(?:\.\w+)? (U?R\d+), (?:U?PT, )*\1, (-?)0x([0-9a-f]+)\b")
_COMPARES = re.compile(r"\bU?ISETP\b")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a warp. opcode: with its modifiers; where: (file, line) of the source, None where unknown.

    copies: how many iterations of a loop the compiler has laid out one after the other, this one's among them.
    """

    opcode: str
    where: tuple[str, int] | None
    copies: int = 1

    @property
    def name(self) -> str:
        """The opcode without modifiers: HGMMA."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return _OPCODES.get(self.name) or _OPCODES.get(self.name.rstrip("0123456789")) or "integer"


def read(sass: str) -> list[Instruction]:
    """The instructions of a program, up to the branch to itself that fills the end of its memory."""
    where, lines, instructions = None, sass.splitlines(), []
    copies = _copies(lines)
    for number, line in enumerate(lines):
        if found := _LINE.match(line):
            where = (found[1], int(found[2]))
        elif found := _INSTRUCTION.match(line):
            instructions.append(Instruction(found[2], where, copies.get(number, 1)))
    while instructions and instructions[-1].name == "NOP":
        instructions.pop()
    return instructions


def _copies(lines: list[str]) -> dict[int, int]:
    """Line of a loop that is unrolled -> how often: by how much its counter moves on, which is one in the source."""
    labels: dict[str, int] = {}
    copies: dict[int, int] = {}
    for end, line in enumerate(lines):
        if found := _LABEL.match(line):
            labels[found[1]] = end
        elif (found := _BRANCH.search(line)) and found[1] in labels:  # back
            start = labels[found[1]]
            body = lines[start:end]
            nested = any((inner := _BRANCH.search(each)) and labels.get(inner[1], end) >= start for each in body)
            if not nested and (step := _step(body)) > 1:
                copies.update(dict.fromkeys(range(start, end + 1), step))
    return copies


def _step(body: list[str]) -> int:
    """By how much the counter of a loop moves on; 1 where that is not clear."""
    compared = " ".join(line for line in body if _COMPARES.search(line))
    steps = {
        int(found[3], 16) for found in map(_STEP.search, body) if found and re.search(rf"\b{found[1]}\b", compared)
    }
    (step,) = steps if len(steps) == 1 else (1,)
    return step if step in (2, 4, 8, 16) else 1


def count[T](items: Iterable[T]) -> dict[T, int]:
    """How often each occurs, the most frequent first."""
    return dict(collections.Counter(items).most_common())
