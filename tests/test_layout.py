"""The packages of src/pallas_puzzles: arrows between modules point one way, and no circle, in functions either."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "pallas_puzzles"
# Each may use itself and those before it. What stands directly in src/pallas_puzzles is for all.
ORDER = [
    "files",
    "installation",
    "platforms",
    "text",
    "ir",
    "lens",
    "diagnose",
    "budgets",
    "targets",
    "view",
    "course",
    "speed",
    "app",
]


def modules() -> dict[str, Path]:
    """Every module by its name inside of the package, "" for the package itself."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if "_course" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def arrows(name: str) -> Iterator[str]:
    """The modules that a module imports, anywhere in it; imports for type checkers alone do not count."""
    path = MODULES[name]
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    for_types = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in for_types:
            continue
        here = name.split(".") if name else []
        here = here if path.name == "__init__.py" else here[:-1]
        base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            yield full if full in MODULES else ".".join(base)


@functools.cache
def graph() -> dict[str, set[str]]:
    return {name: set(arrows(name)) - {name} for name in MODULES}


def test_the_modules_are_found() -> None:
    assert len(MODULES) > 60
    assert "lens.machine" in graph()["course.judge"]


def test_every_package_has_its_place() -> None:
    assert {name.split(".")[0] for name in MODULES} - {"", "__main__"} == set(ORDER)


def test_arrows_point_one_way() -> None:
    def rank(name: str) -> int:
        top = name.split(".")[0]
        return ORDER.index(top) if top in ORDER else len(ORDER)

    against = [f"{name} imports {other}" for name in graph() for other in graph()[name] if rank(other) > rank(name)]
    assert against == []


def test_there_is_no_circle() -> None:
    left = {name: others & graph().keys() for name, others in graph().items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert left == {}, "these import one another"


# Attributes of JAX's programs, none of them public API.
INTERNAL = {"aval", "constvars", "debug_info", "eqns", "invars", "outvars", "source_info"}


def reads_of_jax(path: Path) -> Iterator[str]:
    """Where a module reads what only ir/ should know of JAX."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.ImportFrom(module=str(name)) | ast.Import(names=[ast.alias(name=name)]):
                if name.startswith(("jax._src", "jax.extend")):
                    yield f"{path.name}:{node.lineno} imports {name}"
            case ast.Attribute(attr=name) if name in INTERNAL:
                yield f"{path.name}:{node.lineno} reads .{name}"
            case (
                ast.Subscript(ast.Attribute(attr="params" as name))
                | ast.Attribute(ast.Attribute(attr="params" as name), "get")
                | ast.Attribute(ast.Attribute(attr="primitive" as name), "name")
            ):
                yield f"{path.name}:{node.lineno} reads .{name}"


def test_jax_is_behind_one_seam() -> None:
    outside = {name for name in MODULES if name.split(".")[0] not in ("ir", "targets")}
    interpreters = {"lens.machine", "lens.copies", "lens.sparse", "lens.tally", "lens.devices.machine"}
    assert [line for name in outside - interpreters for line in reads_of_jax(MODULES[name])] == []
    assert all(any(reads_of_jax(MODULES[name])) for name in ["ir.capture", *interpreters])
