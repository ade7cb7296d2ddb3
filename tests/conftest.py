"""What every test stands on: no accelerator but a TPU, and nobody's progress but its own."""

import importlib.metadata
import os

# Before NumPy is imported: several processes whose BLAS threads wait for one another take many times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_puzzles.platforms import tpu_attached

# Whatever else is there, the puzzles run on the CPU. Set before anything asks JAX for a device.
ON_TPU = tpu_attached()
if not ON_TPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


# What XLA has compiled once, in any worker, kernel or command, is read from there: half of the time of many a test.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_xdist_auto_num_workers() -> int:
    if ON_TPU:
        return 0  # a TPU belongs to one process at a time
    return min(os.cpu_count() or 1, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as-a-reader",
        action="store_true",
        help="JAX's simulator confirms a solution's first example, not every variant",
    )


def pytest_report_header() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    return f"{versions}, JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["PALLAS_PUZZLES_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="session")
def _all_the_time_that_trials_take() -> None:
    """What a verdict says must not depend on how busy the machine is."""
    from pallas_puzzles.lens.changes import trial

    trial.SECONDS = 120.0


@pytest.fixture(autouse=True)
def _simulator_off_again() -> Iterator[None]:
    """A notebook's `setup()` turns the simulator on for the whole process; the next test starts without."""
    import jax
    from jax.experimental.pallas import tpu as pltpu

    mesh = jax.sharding.get_abstract_mesh()
    yield
    pltpu.set_tpu_interpret_mode(None)
    if jax.sharding.get_abstract_mesh() != mesh:
        jax.sharding.use_abstract_mesh(mesh).__enter__()


@pytest.fixture(scope="session")
def chromium() -> str:
    """A Chromium to drive. Without one the test is skipped, but not in CI, where it must not go missing unnoticed."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine: install it to run the tests in a browser")
    assert found, "no Chromium in CI"
    return found
