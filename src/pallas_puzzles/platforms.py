"""Which accelerator is there, asked of the operating system: JAX need not be imported, nor look for one itself."""

import importlib.util
import os
import sys
from pathlib import Path


def tpu_attached() -> bool:
    """A TPU shows as a device file."""
    return bool([*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")])


def gpu_attached() -> bool:
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def spare_libtpu() -> None:
    """Keeps JAX from looking for a TPU or a GPU that is not there.

    Where libtpu is installed, for its compiler, JAX otherwise loads it to look: a second, five lines of complaints, and
    a lock that only one process can hold. With a plugin for GPUs it prints a traceback. Does nothing where the reader
    has chosen a platform, or there is a TPU or a GPU.
    """
    if "JAX_PLATFORMS" in os.environ or tpu_attached() or gpu_attached():
        return
    if all(importlib.util.find_spec(name) is None for name in ("libtpu", "jax_cuda13_plugin")):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
