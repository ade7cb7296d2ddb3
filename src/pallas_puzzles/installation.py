"""What is installed and what is needed: versions of JAX, the project's address, the command for what is missing."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]  # the checkout, when there is one
NEWEST_TESTED = "0.12.0.1"  # of JAX, as uv.lock has it; the oldest is the lower bound in pyproject.toml

_TITLES = {"jax": "JAX", "jaxlib": "jaxlib", "numpy": "NumPy"}


class WrongVersion(RuntimeError):
    """What is installed is too old; the message says what to do. A notebook shows the message and no traceback.

    No ImportError: Google Colab renders those itself, with a traceback and advice of its own.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def require_versions() -> None:
    """Raises WrongVersion when JAX or NumPy is too old."""
    if problem := too_old():
        raise WrongVersion(problem)


def too_old() -> str | None:
    """Which of JAX, jaxlib and NumPy is too old and what to do about it, in one sentence; None when all is well."""
    for name, oldest in _oldest().items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # its import says so better
            continue
        imported = getattr(sys.modules.get(name), "__version__", installed)
        title = _TITLES[name]
        if _numbers(installed) < _numbers(oldest):
            upgrade = "uv sync" if _in_checkout() else f'pip install "{name}>={oldest}"'
            then = f", then {_again()}" if "ipykernel" in sys.modules else ""
            return f"{title} {installed} is installed; Pallas Puzzles needs {oldest} or newer: {upgrade}{then}"
        if _numbers(imported) < _numbers(oldest):
            return f"{title} {imported} was imported before {title} {installed} was installed: {_again()}"
    return None


def untested() -> str | None:
    """One sentence when JAX is newer than any that Pallas Puzzles was tested with, else None."""
    import jax

    if _numbers(jax.__version__) <= _numbers(NEWEST_TESTED):
        return None
    tested = "uv sync" if _in_checkout() else f'pip install "jax=={NEWEST_TESTED}"'
    return (
        f"JAX {jax.__version__} is newer than {NEWEST_TESTED}, the newest that Pallas Puzzles was tested with. "
        f"If something looks wrong: {tested}"
    )


def install_line(extra: str) -> str:
    """The command that installs one of the extras in pyproject.toml, without taking another one away."""
    if _in_checkout():
        return f"uv sync --inexact --extra {extra}"
    return f'pip install "pallas-puzzles[{extra}] @ git+{repository()}"'


def upgrade_line() -> str:
    """The command that brings the newest version."""
    return "git pull" if _in_checkout() else f'pip install --upgrade "pallas-puzzles @ git+{repository()}"'


def repository() -> str:
    """The project's address, written once, in pyproject.toml; an installed wheel carries it in its metadata."""
    if _in_checkout():
        return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
    for line in importlib.metadata.metadata("pallas-puzzles").get_all("Project-URL") or []:
        label, _, url = line.partition(", ")
        if label == "Repository":
            return url
    raise LookupError("the installed package pallas-puzzles names no Repository: install it again")


def version() -> str:
    """Of this package; "" where it is run from its sources and not installed."""
    try:
        return importlib.metadata.version("pallas-puzzles")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _in_checkout() -> bool:
    return (ROOT / "pyproject.toml").exists()


def _oldest() -> dict[str, str]:
    """The lower bounds of pyproject.toml, out of the metadata of the installed package."""
    try:
        requirements = importlib.metadata.requires("pallas-puzzles") or []
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH, not installed: nothing is known
        return {}
    bounds = [re.fullmatch(r"(\w+)>=([\d.]+)", requirement) for requirement in requirements]
    return {bound[1]: bound[2] for bound in bounds if bound and bound[1] in _TITLES}


def _numbers(version: str) -> list[int]:
    """ "0.12.1.dev20261122" -> [0, 12, 1], in the order in which versions follow one another."""
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in release[0].split(".")] if release else []


def _again() -> str:
    if "google.colab" in sys.modules:
        return "restart the runtime (Runtime > Restart session) and run this cell again"
    if "ipykernel" in sys.modules:
        return "restart the kernel and run this cell again"
    return "start Python again"
