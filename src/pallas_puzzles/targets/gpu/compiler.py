"""The GPU compiler (XLA, Mosaic GPU, ptxas) in a child process for each chip: an exported program in, SASS out.

The compiler is an optional extra; `missing()` says how to get it. It needs neither a GPU nor a driver. Seen on jax
0.11.2 and 0.12.0.1 with their CUDA 13 plugins, and on ptxas and nvdisasm 13.5.
"""

import dataclasses
import functools
import importlib.util
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...installation import install_line
from ..warm import Compiler, CompilerDied, CompilerError
from .chips import Chip
from .sass import Instruction, read

HOW_TO_GET_IT = f"the GPU compiler is not installed: {install_line('gpu-compiler')} (750 MB, Linux x86-64, no GPU)"
TIME_LIMIT_S = 120.0

Place = tuple[str, int]  # (file, line)
PtxasWarning = tuple[str, Place | None]  # what ptxas says, and where

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the child asks the plugin for its compiler, never for a device
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_HOST_LLVM": "1",  # the code that launches a kernel: its grid, and the SMEM that it asks for
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as machine code. grid, cluster, block: as it is launched, in CTAs, CTAs, threads.

    smem_bytes: of a CTA. registers: of a thread, at the start. spill_store_bytes, spill_load_bytes: of a thread.
    warnings: of ptxas.
    """

    name: str
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    tmem_columns: int
    warnings: tuple[PtxasWarning, ...]
    instructions: tuple[Instruction, ...]

    @property
    def threads(self) -> int:
        return math.prod(self.block)

    @property
    def ctas(self) -> int:
        return math.prod(self.grid)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program. fusions: XLA's own kernels around those of Pallas."""

    kernels: tuple[Kernel, ...]
    fusions: int


def missing() -> str | None:
    """Why there is no GPU compiler here and how to get it, or None when there is one."""
    absent = [name for name in ("jax_cuda13_plugin", "flatbuffers") if importlib.util.find_spec(name) is None]
    return HOW_TO_GET_IT if absent or _cuda() is None else None


@functools.cache
def _cuda() -> Path | None:
    """The folder with CUDA's compiler: ptxas, nvdisasm and libdevice, each out of a wheel of its own."""
    spec = importlib.util.find_spec("nvidia")
    needed = ("bin/ptxas", "bin/nvdisasm", "nvvm/libdevice/libdevice.10.bc")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "cu13"
        if all((folder / name).is_file() for name in needed):
            return folder
    return None


def compile_program(blob: bytes, chip: Chip) -> Compiled:
    """Compiles what jax.export serialised. Raises CompilerError, with "at FILE:LINE" where known, or CompilerDied."""
    answer = _child(chip).compiled(TIME_LIMIT_S, blob=blob, target=chip.target_config())
    if "error" in answer:
        place = _place(re.search(r"line (\d+); error", answer["error"]), answer["printed"])
        raise CompilerError(answer["error"] + (f"\nat {place[0]}:{place[1]}" if place else ""))
    return Compiled(tuple(_kernel(printed, chip) for printed in answer["printed"]), answer["fusions"])


@functools.cache
def _child(chip: Chip) -> Compiler:
    """The process that compiles for one chip."""
    libdevice = {"cuda_sdk_lib": _cuda() or Path("/nonexistent")}  # XLA looks for it there; without it, it aborts
    return Compiler("GPU", r"^(?:F\d+ .*?\] |.*LLVM ERROR: )(.*)$", _ENVIRONMENT, libdevice)


def warm(chip: Chip) -> None:
    """Starts the process in the background: it takes some seconds until it can compile."""
    _child(chip).warm()


# --- from PTX to SASS ------------------------------------------------------------------------------------------------

# The code that launches a kernel, on jax 0.11.2 and 0.12.0.1: pointer, grid, cluster, block, bytes of SMEM.
_LAUNCH = re.compile(r"@mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr %\d+, ((?:i32 \d+, ){10})")


def _kernel(printed: str, chip: Chip) -> Kernel:
    """What was printed of a kernel -> its machine code. Raises CompilerError."""
    launch = _LAUNCH.search(printed)
    ptx, found, _ = printed.partition("; ModuleID")
    if launch is None or not found:
        raise CompilerError("the compiler printed no PTX of a kernel, or no launch: its format has changed")
    sizes = [int(size) for size in re.findall(r"i32 (\d+)", launch[1])]
    log, sass = _assembled(ptx, chip)
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    entry = re.search(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", ptx)
    if used is None or spilled is None:
        raise CompilerError("ptxas told neither registers nor spills: its format has changed")
    return Kernel(
        name=entry[1] if entry else "kernel",
        grid=(sizes[0], sizes[1], sizes[2]),
        cluster=(max(1, sizes[3]), max(1, sizes[4]), max(1, sizes[5])),
        block=(sizes[6], sizes[7], sizes[8]),
        smem_bytes=sizes[9],
        registers=int(used[1]),
        spill_store_bytes=int(spilled[1]),
        spill_load_bytes=int(spilled[2]),
        tmem_columns=_tmem_columns(ptx),
        warnings=tuple(dict.fromkeys(_warnings(log, ptx))),
        instructions=tuple(read(sass)),
    )


def _tmem_columns(ptx: str) -> int:
    """Columns of TMEM that a CTA allocates; PTX takes their number from a register."""
    registers = re.findall(r"tcgen05\.alloc\S*\s+\[[^\]]*\], *(%r\d+)", ptx)
    return sum(int(n) for r in registers for n in re.findall(rf"mov\.b32\s+{r}, (\d+);", ptx)[:1])


def _assembled(ptx: str, chip: Chip) -> tuple[str, str]:
    """(what ptxas says, SASS with the source's lines). Raises CompilerError."""
    cuda = _cuda()
    assert cuda is not None
    with tempfile.TemporaryDirectory(prefix="pallas-puzzles-ptx-") as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        flags = ["-v", "-lineinfo", "--warn-on-spills", f"-arch={chip.arch}"]
        log = _run(cuda / "bin" / "ptxas", *flags, str(source), "-o", str(cubin))
        sass = _run(cuda / "bin" / "nvdisasm", "-c", "-ndf", "-g", str(cubin))
    return log, sass


def _run(tool: Path, *words: str) -> str:
    try:
        done = subprocess.run([str(tool), *words], capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise CompilerDied(f"{tool.name} did not finish within {TIME_LIMIT_S:g} s") from None
    if done.returncode:
        raise CompilerError(f"{tool.name}: {(done.stderr + done.stdout).strip()}")
    return done.stdout + done.stderr


def _warnings(log: str, ptx: str) -> Iterator[PtxasWarning]:
    """(a warning of ptxas, where in the source the instruction comes from that it is about)."""
    for line in log.splitlines():
        if not re.search(r"\bwarning\b|Potential Performance Loss", line):
            continue
        words = re.sub(
            r"^ptxas.*?(?:warning|info)\s*:\s*|\s+in line \d+.*$|\s+in (?:the )?function .*$", "", line
        ).strip()
        yield words, _place(re.search(r"line (\d+)", line), ptx)


def _place(at: re.Match[str] | None, ptx: str) -> Place | None:
    """Where in the source a line of PTX comes from that ptxas names."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx))
    for line in reversed(ptx.splitlines()[: int(at[1])] if at else []):
        if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            return files.get(found[1], ""), int(found[2])
    return None
