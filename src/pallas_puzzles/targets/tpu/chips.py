"""The TPUs that a kernel can be compiled for: what JAX itself says of each, and the little that it does not."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
from jax.experimental.pallas import tpu as pltpu

from ...ir.meshes import tpu_mesh

# Seconds that every grid step takes beyond its arithmetic or its copies: what is left of the times that JAX's matmul
# guide measured on a v5e. Nobody has published such times for v6e and TPU7x; the same is assumed there.
STEP_OVERHEAD_S = 0.25e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """One TensorCore, which is what a kernel runs on. A TPU7x has two of them, each a device of its own to JAX."""

    name: str
    kind: str  # what JAX calls the device
    version: str  # a member of pltpu.ChipVersion
    scoped_vmem_bytes: int  # what a kernel may use of VMEM if it asks for nothing
    topology: Mapping[int, str]  # devices -> the smallest topology that the compiler knows with at least as many

    @property
    def title(self) -> str:
        """How it is written: v5e, v6e, TPU7x."""
        return self.name.replace("tpu", "TPU")

    @functools.cached_property
    def info(self) -> pltpu.TpuInfo:
        return pltpu.get_tpu_info_for_chip(getattr(pltpu.ChipVersion, self.version), 1)

    @property
    def vmem_bytes(self) -> int:
        return self.info.vmem_capacity_bytes

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.info.mem_bw_bytes_per_second

    def flops_per_s(self, dtype: str = "bfloat16") -> float:
        """The MXU's peak for operands of `dtype`; types without a peak of their own are multiplied as bfloat16."""
        if dtype.startswith("int8"):
            return self.info.int8_ops_per_second or self.info.bf16_ops_per_second
        if dtype.startswith("float8"):
            return self.info.fp8_ops_per_second or self.info.bf16_ops_per_second
        return self.info.bf16_ops_per_second

    @property
    def clock_hz(self) -> float:
        """Cycles per second, which JAX does not state: its bf16 peak over the multiply-adds of all MXUs in a cycle.

        From v6e on an MXU finishes two rows a cycle by this account: 1.50, 1.75, 2.20 GHz for v5e, v6e, TPU7x.
        """
        per_cycle = self.info.num_mxus * self.info.mxu_column_size**2 * (2 if self.info.generation >= 6 else 1)
        return self.info.bf16_ops_per_second / (2 * per_cycle)

    def mesh(self, axes: Mapping[str, int] | None = None) -> jax.sharding.AbstractMesh:
        """A mesh of these chips that exists only for tracing."""
        return tpu_mesh(self.kind, axes)

    def topology_for(self, devices: int) -> str:
        for most, name in sorted(self.topology.items()):
            if devices <= most:
                return name
        raise ValueError(f"{devices} devices are more than the {max(self.topology)} of {self.name} that are offered")


# scoped_vmem_bytes: the limit that libtpu 0.0.50 names when it refuses a kernel; a test compares the two.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "TPU v5 lite", "TPU_V5E", 16 << 20, {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}),
        Chip("v6e", "TPU v6 lite", "TPU_V6E", 32 << 20, {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"}),
        Chip("tpu7x", "TPU7x", "TPU_7X", 32 << 20, {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"}),
    )
}
_ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "tpu7": "tpu7x", "trillium": "v6e", "ironwood": "tpu7x"}


def named[C](known: Mapping[str, C], what: str, name: str) -> C:
    """The chip of that name. what: "TPU" or "GPU". Raises ValueError, naming the ones there are."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in known:
        raise ValueError(f"there is no {what} {name!r} to compile for: {', '.join(known)}")
    return known[key]


def all_named[C](known: Mapping[str, C], what: str, names: str | Sequence[str]) -> list[C]:
    """'v5e,v6e' or ['v5e', 'v6e'] as chips, each once. Raises ValueError."""
    words = names.split(",") if isinstance(names, str) else list(names)
    found = [named(known, what, word) for word in words if word.strip()]
    if not found:
        raise ValueError(f"no {what} is named: {', '.join(known)}")
    return list(dict.fromkeys(found))


chip, chips = functools.partial(named, CHIPS, "TPU"), functools.partial(all_named, CHIPS, "TPU")
