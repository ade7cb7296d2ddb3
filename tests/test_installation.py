"""Versions that are too old or too new, and the command that installs what is missing."""

import importlib.metadata
import json
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import pallas_puzzles
from pallas_puzzles import installation
from pallas_puzzles.app import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, for a test to change; nothing of it has been imported, and no notebook is there."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    monkeypatch.setattr("importlib.metadata.version", found.__getitem__)
    for thread in threading.enumerate():
        if thread.name == "warm up":  # of an earlier setup(): it still imports what is taken away here
            thread.join()
    for name in (*found, "ipykernel", "google.colab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return found


@pytest.fixture
def no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the wheel is installed: the address comes from its metadata."""
    monkeypatch.setattr(installation, "ROOT", tmp_path)


def test_the_newest_that_was_tested_is_the_locked_one() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))
    assert [each["version"] for each in lock["package"] if each["name"] == "jax"] == [installation.NEWEST_TESTED]


def test_the_lower_bounds_are_those_of_pyproject() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    bounds = installation._oldest()
    assert sorted(bounds) == ["jax", "jaxlib", "numpy"]
    for name, oldest in bounds.items():
        assert f"{name}>={oldest}" in wanted


@pytest.mark.usefixtures("no_checkout")
def test_what_is_too_old_is_named(versions: dict[str, str]) -> None:
    oldest = installation._oldest()["jax"]
    versions["jax"] = oldest
    assert installation.too_old() is None
    versions["jax"] = "0.7.2"
    said = f'JAX 0.7.2 is installed; Pallas Puzzles needs {oldest} or newer: pip install "jax>={oldest}"'
    assert installation.too_old() == said
    with pytest.raises(installation.WrongVersion) as caught:
        pallas_puzzles.setup()
    assert caught.value._render_traceback_() == [said]
    versions["jax"] = "0.100.0.dev20301231+abc"  # a number, not a text
    versions["numpy"] = "1.26.4"
    assert str(installation.too_old()).startswith("NumPy 1.26.4 is installed; Pallas Puzzles needs ")


def test_in_a_checkout_uv_brings_the_right_version(versions: dict[str, str]) -> None:
    versions["jax"] = "0.7.2"
    said = str(installation.too_old())
    assert said.endswith("or newer: uv sync")
    assert "pip" not in said


@pytest.mark.parametrize(
    ("module", "again"),
    [
        ("google.colab", "restart the runtime (Runtime > Restart session) and run this cell again"),
        ("ipykernel", "restart the kernel and run this cell again"),
        ("", "start Python again"),
    ],
)
def test_what_was_imported_before_it_was_upgraded(
    module: str, again: str, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__="0.7.2"))
    assert installation.too_old() == f"JAX 0.7.2 was imported before JAX {versions['jax']} was installed: {again}"


def test_a_jax_that_is_newer_than_tested_is_named_and_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "NEWEST_TESTED", jax.__version__)
    pallas_puzzles.setup()
    assert "newer" not in capsys.readouterr().out
    monkeypatch.setattr(installation, "NEWEST_TESTED", "0.11.1")
    pallas_puzzles.setup()
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        f"JAX {jax.__version__} is newer than 0.11.1, the newest that Pallas Puzzles was tested with. "
        "If something looks wrong: uv sync"
    )
    assert second.startswith("No TPU here")
    monkeypatch.setattr(installation, "ROOT", ROOT / "nowhere")
    assert str(installation.untested()).endswith('If something looks wrong: pip install "jax==0.11.1"')


def test_a_command_says_it_in_one_line(versions: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    versions["jax"] = "0.7.2"
    with pytest.raises(SystemExit) as done:
        cli.main(["check", "basics/1", "--json"])
    out, err = capsys.readouterr()
    assert done.value.code == 2
    assert err.count("\n") == 1
    assert "JAX 0.7.2 is installed" in err
    assert "setup()" not in out + err
    assert json.loads(out)["error"] in err


def test_the_install_line_in_a_checkout() -> None:
    assert installation.install_line("lab") == "uv sync --inexact --extra lab"


@pytest.mark.usefixtures("no_checkout")
def test_the_install_line_elsewhere_names_the_repository() -> None:
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    assert installation.install_line("lab") == f'pip install "pallas-puzzles[lab] @ git+{repository}"'
    assert installation.upgrade_line() == f'pip install --upgrade "pallas-puzzles @ git+{repository}"'
