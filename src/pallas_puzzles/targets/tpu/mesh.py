"""A TPU that JAX believes to be there."""

import jax

CHIP = "TPU v5e"


def tpu_mesh(chip: str = CHIP) -> jax.sharding.AbstractMesh:
    """What tells JAX that one `chip` is there. pltpu.emit_pipeline and pltpu.get_tpu_info() ask for it."""
    device = jax.sharding.AbstractDevice(chip, 1, "tpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)
