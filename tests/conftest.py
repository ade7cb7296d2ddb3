"""What every test stands on: no accelerator but a TPU, and nobody's progress but its own."""

import gc
import importlib
import importlib.metadata
import os

# Before NumPy is imported: several processes whose BLAS threads wait for one another take many times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before JAX is imported: kernels on several devices

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# The tests start some hundred Pythons. Where none may leave bytecode beside the sources, each of them would compile all
# of JAX's: a fifth of the time of the tests. It is kept in build/ there.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / "build" / "bytecode")
    os.environ.setdefault("PYTHONPYCACHEPREFIX", sys.pycache_prefix)

import pytest

from pallas_puzzles.platforms import tpu_attached
from pallas_puzzles.targets.tpu.compiler import missing

ROOT = Path(__file__).parents[1]
FETCH = "sync --locked --inexact --extra tpu-compiler"
FETCHES = "Fetching the TPU compiler for the tests, once: 0.2 GB to download (.venv then takes 1.6 GB)."
NOT_FETCHED = "The TPU compiler could not be fetched: the tests that need it are skipped."

# Whatever else is there, the puzzles run on the CPU. Set before anything asks JAX for a device.
ON_TPU = tpu_attached()
if not ON_TPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


# What XLA has compiled once, in any worker, kernel or command, is read from there: half of the time of many a test.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_xdist_auto_num_workers() -> int:
    if ON_TPU:
        return 0  # a TPU belongs to one process at a time
    return min((os.cpu_count() or 1) + 1, 4)  # some tests wait, for a browser or another process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every wrong answer of the bank; every notebook in a kernel, unsolved and solved; JAX's "
        "simulator confirms, and the front ends and the TPU compiler take for every chip, every variant of a solution; "
        "and what takes long and shows the same of another shape or chip",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fetches the TPU compiler, as in uv.lock, when `uv run` starts the tests. Whoever solves puzzles needs none."""
    if not config.getoption("--thorough") and not config.option.markexpr:
        config.option.markexpr = "not thorough"
    uv = os.environ.get("UV")
    there_is_one = sys.platform == "linux" and platform.machine() == "x86_64"
    if uv is None or hasattr(config, "workerinput") or missing() is None or not there_is_one:
        return
    print(FETCHES, flush=True)
    here = {**os.environ, "UV_PROJECT_ENVIRONMENT": sys.prefix}
    done = subprocess.run([uv, *FETCH.split()], cwd=ROOT, env=here, check=False)
    importlib.invalidate_caches()
    if done.returncode and os.environ.get("CI"):
        pytest.exit(NOT_FETCHED, returncode=1)
    elif done.returncode:
        print(NOT_FETCHED, flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what takes long and shares a browser or an environment: no worker takes half of it over at the end."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("browser", "wheel"))))


def pytest_collection_finish() -> None:
    """What is there before the first test stays. JAX makes so many objects while it traces, and keeps so many, that
    looking through them for garbage as often as Python does by default takes a quarter of the time of most tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 20)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """pytest looks for garbage five times at the end, to warn of files that were never closed. Once is enough."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    return f"{versions}, JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["PALLAS_PUZZLES_HOME"] = str(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True, scope="session")
def _own_sockets() -> Iterator[None]:
    """What waits there for the next `puzzles check` leaves when the tests are over."""
    with tempfile.TemporaryDirectory(prefix="pallas-puzzles-") as folder:  # short: a socket's path must be
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield


@pytest.fixture(autouse=True)
def _simulator_off_again() -> Iterator[None]:
    """A notebook's `setup()` changes who runs kernels in the whole process; the next test starts without."""
    import jax
    from jax.experimental.pallas import tpu as pltpu

    mesh = jax.sharding.get_abstract_mesh()
    yield
    pltpu.set_tpu_interpret_mode(None)
    if calls := sys.modules.get("pallas_puzzles.ir.gpu_calls"):
        calls.run_on_cpu(None)
        jax.config.update("jax_default_device", None)
    if jax.sharding.get_abstract_mesh() != mesh:
        jax.sharding.use_abstract_mesh(mesh).__enter__()


@pytest.fixture
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import kept  # not above: with JAX, which the process that hands out the tests does without

    kept.simulate_once(monkeypatch)


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import kept

    kept.compile_once(monkeypatch)


@pytest.fixture(scope="session")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the whole course, to copy: to make one takes two seconds."""
    from pallas_puzzles.app import workspace

    place = tmp_path_factory.mktemp("laid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALLAS_PUZZLES_HOME", str(place / "home"))
        workspace.init(place / "workspace")
    return place / "workspace"


@pytest.fixture
def puzzles(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: exit code, stdout, stderr."""
    from pallas_puzzles.app import cli

    def command(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return command


@pytest.fixture(scope="session")
def chromium() -> str:
    """A Chromium to drive. Without one the test is skipped, but not in CI, where it must not go missing unnoticed."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine: install it to run the tests in a browser")
    assert found, "no Chromium in CI"
    return found
