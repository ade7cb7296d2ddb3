"""The GPUs that a kernel can be compiled for: figures of their datasheets, and what the compiler asks of a device.

Peaks (dense, no sparsity) and bandwidths are those of NVIDIA's datasheets for H100 SXM, H200 SXM and HGX B200; what an
SM has is in the tables of compute capability 9.0 and 10.0 in the CUDA Programming Guide.
"""

import dataclasses
import functools

import jax

from ...lens.gpu.timeline import Chip as _Rates
from ..tpu.chips import all_named, named

MAX_THREADS_PER_SM, MAX_CTAS_PER_SM, REGISTERS_PER_SM = 2048, 32, 65536
SMEM_PER_SM, SMEM_PER_CTA, SMEM_RESERVED_PER_CTA = 228 << 10, 227 << 10, 1 << 10
TMEM_COLUMNS = 512
_REGISTERS_AT_ONCE = 256  # a warp's registers are handed out in such pieces

# What of a peak can be reached: by cuBLAS, by a copy, and by a kernel that only reads, see benchmarks/gpu.md. Measured
# on an H200; nobody has measured the others here, and the same is assumed of them.
REACHED = {"tensor": 0.72, "HBM": 0.88}
LAUNCH_S = 3e-6  # from one kernel's end to the next one's first instruction, and back


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """One GPU. Bandwidths in bytes/s, peaks in FLOP/s, `clock_hz` is the boost clock that the peaks imply."""

    name: str
    kind: str  # what JAX calls the device
    capability: tuple[int, int]
    sms: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    clock_hz: float
    l2_bytes: int
    hbm_bytes: int

    @property
    def title(self) -> str:
        """How it is written: H100."""
        return self.name.upper()

    @property
    def arch(self) -> str:
        """What ptxas calls it: sm_90a."""
        return "sm_{}{}a".format(*self.capability)

    @property
    def l2_bytes_per_s(self) -> float:
        """What the L2 gives to all SMs; 64 bytes a cycle is the most that it could be."""
        return _Rates.l2_bytes * self.sms * self.clock_hz

    def flops_per_s(self, dtype: str = "bfloat16") -> float:
        """The tensor cores' peak for operands of `dtype`."""
        if dtype.startswith(("int8", "uint8", "float8")):
            return 2 * self.bf16_flops_per_s
        return self.bf16_flops_per_s / 2 if dtype == "float32" else self.bf16_flops_per_s  # float32: as TF32

    def mesh(self) -> jax.sharding.AbstractMesh:
        """One such GPU that exists only for tracing and lowering: the front end compiles for it."""
        device = _Device(self.kind, self.sms, "cuda", "{}.{}".format(*self.capability))
        return jax.sharding.AbstractMesh((), (), abstract_device=device)

    def target_config(self) -> str:
        """The device as XLA's compiler wants it described, a GpuTargetConfigProto; it compiles for no other one."""
        major, minor = self.capability
        return _MESSAGE.format(
            sms=self.sms, bandwidth=int(self.hbm_bytes_per_s), l2=self.l2_bytes, clock=self.clock_hz / 1e9,
            memory=self.hbm_bytes, major=major, minor=minor, kind=self.kind, threads=MAX_THREADS_PER_SM,
            registers=REGISTERS_PER_SM, smem=SMEM_PER_SM, smem_cta=SMEM_PER_CTA,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Device(jax.sharding.AbstractDevice):
    """An abstract device with a compute capability, which Mosaic GPU asks for: seen on jax 0.11.2 and 0.12.0.1."""

    compute_capability: str = "9.0"


_MESSAGE = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {smem} shared_memory_per_block_optin: {smem_cta}
  threads_per_core_limit: {threads} core_count: {sms} fpus_per_core: 128
  registers_per_core_limit: {registers} registers_per_block_limit: {registers}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock:.3f} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" name: "{kind}" device_address_bits: 64
  platform_version: "Compute Capability {major}.{minor}a"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How many CTAs an SM holds at once, by each of its resources."""

    by: dict[str, int]

    @property
    def ctas(self) -> int:
        return min(self.by.values())

    @property
    def limits(self) -> list[str]:
        """The resources that allow no more."""
        return [name for name, ctas in self.by.items() if ctas == self.ctas]


def occupancy(registers: int, threads: int, smem_bytes: int, tmem_columns: int = 0) -> Occupancy:
    """CTAs per SM. registers: per thread; smem_bytes, threads, tmem_columns: per CTA."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    by = {
        "registers": REGISTERS_PER_SM // max(1, per_warp * warps),
        "SMEM": SMEM_PER_SM // (smem_bytes + SMEM_RESERVED_PER_CTA),
        "threads": MAX_THREADS_PER_SM // threads,
        "CTAs": MAX_CTAS_PER_SM,
    }
    if tmem_columns:
        by["TMEM"] = TMEM_COLUMNS // tmem_columns
    return Occupancy(by)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 3.35e12, 989.4e12, 1.83e9, 50 << 20, 80 << 30),
        Chip("h200", "NVIDIA H200", (9, 0), 132, 4.8e12, 989.4e12, 1.83e9, 60 << 20, 141 << 30),
        Chip("b200", "NVIDIA B200", (10, 0), 148, 7.7e12, 2250e12, 1.86e9, 126 << 20, 180 << 30),
    )
}
chip, chips = functools.partial(named, CHIPS, "GPU"), functools.partial(all_named, CHIPS, "GPU")
