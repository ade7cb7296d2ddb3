"""ladder.py: figures that were made beforehand, what its budgets say of costs, and the examples on its kernels."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pallas_puzzles import setup
from pallas_puzzles.course import cases, curriculum, session
from pallas_puzzles.targets.tpu import compiler

ROOT = Path(__file__).parents[1]


def notebook() -> dict[str, Any]:
    last = curriculum.puzzle("ladder/10")
    return cases.laid(last, cases.solutions(last), {}, {})


def made() -> dict[tuple[str, str, str], dict[str, Any]]:
    told = json.loads((ROOT / "cases" / "ladder.json").read_text("utf-8"))
    return {(part, row["name"], row["chip"]): row for part, rows in told["figures"].items() for row in rows}


def test_every_level_of_the_closing_table_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "missing", lambda: "none")
    book = curriculum.notebook(ROOT / "puzzles" / "ladder.py")
    (code,) = [cell.source for cell in book.cells if "PARTS = {" in cell.source]
    names: dict[str, Any] = {}
    exec(code.partition("\nfor part")[0], names)
    figures = made()
    assert set(figures) == {(p, n, c) for p, levels in names["PARTS"].items() for n in levels for c in ("v5e", "v6e")}
    assert all(row["hbm_bytes"] and row["floor_s"] for row in figures.values())
    unknown = [row for row in figures.values() if row["time_s"] is None]
    assert all("the compiler gives no cycles for" in row["problem"] for row in unknown)
    assert {row["name"] for row in unknown} <= {"1 op by op", "2 jit, scatter", "3 cut, product"}


def test_the_compiler_moves_what_the_puzzles_count() -> None:
    """Puzzles 1, 2 and 4 count; the compiler for a v6e makes just that."""
    nb, figures = notebook(), made()
    sizes = 8, 4096, 128
    counted = {
        "1 op by op": nb["eager_bytes"](*sizes),
        "2 jit": nb["fused_bytes"](*sizes),
        "4 tiles of 128 x 128": nb["flash_bytes"](*sizes, 128, 128),
    }
    for level, count in counted.items():
        assert figures["attention", level, "v6e"]["hbm_bytes"] == pytest.approx(count, rel=2e-3), level


def test_a_restructuring_that_costs_more_is_refused_with_the_cost() -> None:
    right = (ROOT / "solutions" / "ladder.py").read_text("utf-8")
    product = "jnp.dot(x, folded, preferred_element_type=jnp.float32)"
    assert f"r * {product}" in right
    verdict = session.run("ladder/6", overlay=right.replace(f"r * {product}", f"0.5 * r * ({product} + {product})"))
    assert "its matrix products take 12,582,912 FLOPs; the budget is 8,388,608" in " ".join(str(verdict).split())


def test_a_formula_that_is_all_of_the_answer_is_not_corrected() -> None:
    right = (ROOT / "solutions" / "ladder.py").read_text("utf-8")
    verdict = session.run("ladder/4", overlay=right.replace("seconds - flash_floor(H, T, D, bq, bkv, chip)", "seconds"))
    assert "if the floors were equal" in (said := " ".join(str(verdict).split()))
    assert not any(words in said for words in ("Also: ", "should be", "is missing", "a right one", "is what is wrong"))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_vision_transformer_on_the_kernels(capsys: pytest.CaptureFixture) -> None:
    setup()
    vit = example("vit")
    parts = vit.kernels()
    assert "flash: the course's; yours is ladder/4" in capsys.readouterr().out
    assert vit.difference(parts) < 0.02
    assert vit.difference(vit.plain()) == 0


def test_a_graph_network_on_the_kernel() -> None:
    setup()
    gnn = example("gnn")
    assert gnn.difference(gnn.kernel()) < 0.02
    src, dst = np.array([5, 0, 0], np.int32), np.array([0, 9, 9], np.int32)
    src, dst, weight = gnn.with_weights(src, dst, 16)
    rows, cols, blocks = gnn.block_lists(src, dst, weight, 16, 8)
    assert (rows.tolist(), cols.tolist()) == ([0, 1, 1], [0, 0, 1]), "an edge that is there twice counts once"
    assert float(blocks[1][1, 0]) == pytest.approx((2 * 2) ** -0.5, rel=1e-2)
    with pytest.raises(ValueError, match="16 nodes are no whole number of blocks of 6"):
        gnn.block_lists(src, dst, weight, 16, 6)
