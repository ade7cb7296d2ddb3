"""The pictures in README.md, made from real runs: `uv run python docs/pictures.py` (needs Chromium)."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import curriculum, normal
from pallas_puzzles.check import collecting
from pallas_puzzles.lens.draw import show
from pallas_puzzles.tpu.report import tpu_report

HERE = Path(__file__).parent
FORGOTTEN_ZERO = """
def matmul_kernel(x_ref, y_ref, o_ref, acc_ref, *, num_k):
    k = pl.program_id(2)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(k == num_k - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)
"""


def photograph(body: str, name: str, width: int, height: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "install Chromium to make the pictures"
    style = "font:15px system-ui,sans-serif;margin:14px;background:#fff"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<html><meta charset=utf-8><body style='{style}'>{body}</body></html>", "utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1.5",
        ]
        shot = [f"--window-size={width},{height}", f"--screenshot={HERE / name}", "--virtual-time-budget=2000"]
        subprocess.run([chromium, *options, *shot, str(page)], check=True, capture_output=True)


def wrong_answer() -> str:
    """The card that a reader sees who forgets to zero the accumulator of Puzzle 10."""
    puzzle = curriculum.puzzle("basics/10")
    above = puzzle.skeletons["matmul_kernel"].splitlines()
    padding = next(i for i, line in enumerate(above) if line.startswith("def matmul_kernel"))
    with tempfile.TemporaryDirectory() as folder, collecting():
        answer = Path(folder) / "basics.py"
        answer.write_text("\n" * (padding - 1) + FORGOTTEN_ZERO, "utf-8")
        return curriculum.run(puzzle.id, overlay=answer)._repr_html_()


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, *, bm=32, bn=256, bk=256):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        matmul_kernel,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, y)


def right_answer() -> str:
    """The picture that `show` draws of a tiled matmul, as a page without scripts keeps it: half-way through."""
    live = show(matmul, normal((96, 1024), "bfloat16"), normal((1024, 512), "bfloat16"))._repr_html_()
    return re.sub(r"<script.*?</script>", "", live, flags=re.DOTALL)


def compiled() -> str:
    """What tpu_report says of the same matmul, at the size of real work."""
    matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    report = tpu_report(matmul, matrix, matrix, tpu="v5e", bm=512, bn=1024, bk=1024)
    assert report, report.refusal or report.unavailable
    return report._repr_html_()


if __name__ == "__main__":
    photograph(wrong_answer(), "verdict.png", 980, 330)
    photograph(right_answer(), "show.png", 740, 640)
    photograph(compiled(), "tpu.png", 850, 890)
