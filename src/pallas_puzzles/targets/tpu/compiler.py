"""The TPU compiler in a child process that stays warm: an exported program in, the compiler's own dumps out.

libtpu is an optional extra; `missing()` says how to get it. The flags below are libtpu's own, seen on libtpu 0.0.50 and
0.0.51.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...installation import install_line
from ..warm import Compiler, CompilerError
from ..warm import CompilerDied as CompilerDied

if TYPE_CHECKING:
    from .chips import Chip

HOW_TO_GET_IT = f"the TPU compiler is not installed: {install_line('tpu-compiler')} (600 MB, Linux x86-64)"
TIME_LIMIT_S = 120.0

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the child asks libtpu for its compiler, never for a device
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to a cloud's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # without these two libtpu complains on stderr
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock: any number of processes may compile
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel in a compiled program. results, operands: HLO shapes, as 'f32[8,128]'."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program. text: as XLA writes it; files: what the compiler dumped, name -> text."""

    text: str
    temporary_bytes: int | None
    files: Mapping[str, str]

    @property
    def kernels(self) -> list[Kernel]:
        """Its kernels, in order."""
        found = re.finditer(
            r"%(\S+) = (.*?) custom-call\(.*?custom_call_target=\"tpu_custom_call\""
            r"(?:.*?operand_layout_constraints=\{(.*?\})\})?",
            self.text,
        )
        return [Kernel(match[1], _hlo_shapes(match[2]), _hlo_shapes(match[3] or "")) for match in found]

    @property
    def copies(self) -> int:
        """XLA's own, around the kernels."""
        return len(re.findall(r" copy(?:-start)?\(", self.text))

    @property
    def operands_in_vmem(self) -> bool:
        """XLA moves arrays into VMEM before some kernel starts."""
        return any("inlined_call_operand.vmem" in text for text in self.files.values())

    def of(self, kernel: str, suffix: str) -> str | None:
        """The text of the dump of one kernel whose name ends in `suffix`."""
        for name in sorted(self.files):
            if re.fullmatch(rf"\d+-{re.escape(kernel)}-\d+-{suffix}", name):
                return self.files[name]
        return None


def _hlo_shapes(hlo: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\b([a-z]\w*\[[\d,]*\])", hlo))


def nothing_in_vmem(chip: Chip) -> dict[str, str]:
    """Options that give a kernel all of VMEM: XLA otherwise moves small arrays there before the kernel starts."""
    return {"xla_tpu_scoped_vmem_limit_kib": str(chip.vmem_bytes >> 10)}


def missing() -> str | None:
    """Why there is no TPU compiler here and how to get it, or None when there is one."""
    absent = [name for name in ("libtpu", "flatbuffers") if importlib.util.find_spec(name) is None]
    return HOW_TO_GET_IT if absent else None


def _with_libtpu(flags: str) -> Compiler:
    """A process with libtpu in it. `flags` may name its folder as {folder}."""
    return Compiler("TPU", r"^F\d+ .*?\] (.*)$", {**_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags})


_SIMULATOR_S = 30.0  # a program may take
_COMPILER = _with_libtpu("--xla_jf_dump_to={folder}/dumps --xla_jf_dump_llo_pass_label_regex=^final_")
_SIMULATOR = _with_libtpu("--xla_jf_dump_static_llo_profile_to={folder}/dumps")


def compile_program(
    blob: bytes,
    chip: Chip,
    axes: Mapping[str, int] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    timeout_s: float = TIME_LIMIT_S,
    process: Compiler = _COMPILER,
) -> Compiled:
    """Compiles what jax.export serialised. Raises CompilerError, or CompilerDied."""
    axes = dict(axes or {"x": 1})
    topology = chip.topology_for(math.prod(axes.values()))
    answer = process.compiled(timeout_s, blob=blob, topology=topology, axes=axes, options=dict(options or {}))
    if "error" in answer:
        raise CompilerError(answer["error"])
    return Compiled(**answer)


def simulate_cycles(blob: bytes, chip: Chip, options: Mapping[str, str]) -> dict[str, int]:
    """Kernel name -> cycles, by libtpu's simulator of the compiled program. Raises CompilerError, or CompilerDied."""
    cycles = {}
    compiled = compile_program(blob, chip, options=options, timeout_s=_SIMULATOR_S, process=_SIMULATOR)
    for name, text in compiled.files.items():
        found = re.search(r"estimated_cycles: (\d+)", text)
        if found and name.endswith("static_llo_profile.textproto"):
            cycles[name.partition(f"_{chip.kind}")[0]] = int(found[1])
    return cycles


def warm(*, simulator: bool = True) -> None:
    """Starts the processes in the background: each takes some two seconds until it can compile."""
    _COMPILER.warm()
    if simulator:
        _SIMULATOR.warm()
