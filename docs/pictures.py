"""The pictures in README.md and docs/, made from real runs. PNGs need Chromium.

uv run --all-groups python docs/pictures.py [NAME ...]
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_puzzles import normal
from pallas_puzzles.course import curriculum, session
from pallas_puzzles.course.check import collecting
from pallas_puzzles.speed.results import read
from pallas_puzzles.view.show import show
from pallas_puzzles.view.tpu_report import tpu_report

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
        return session.run(puzzle.id, overlay=answer)._repr_html_()


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


def watched() -> str:
    """The screen of `puzzles watch` after a save: a run of the command in a terminal, as an SVG."""
    import pexpect
    from rich.console import Console
    from rich.text import Text

    puzzle, columns = curriculum.puzzle("basics/10"), 100
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PALLAS_PUZZLES_HOME": f"{folder}/home", "TERM": "xterm-256color"}
        env.pop("NO_COLOR", None)
        command = ["-m", "pallas_puzzles"]
        subprocess.run([sys.executable, *command, "init", f"{folder}/workspace"], env=env, check=True)
        words = [*command, "watch", puzzle.id, "--any"]
        child = pexpect.spawn(sys.executable, words, env=env, dimensions=(40, columns), encoding="utf-8", timeout=300)
        child.expect("q:quit")
        answer = Path(folder) / "workspace" / "basics.py"
        skeleton = puzzle.skeletons["matmul_kernel"].strip("\n").rstrip()
        written = answer.read_text("utf-8").replace(skeleton, FORGOTTEN_ZERO.strip())
        for hole in puzzle.holes:
            given = re.search(rf"^def {hole}\(.*?(?=^\S|\Z)", puzzle.solution, re.MULTILINE | re.DOTALL)
            assert given, hole
            if hole != "matmul_kernel":
                written = written.replace(puzzle.skeletons[hole].strip("\n").rstrip(), given[0].rstrip())
        answer.write_text(written, "utf-8")
        child.expect("not yet")
        child.expect("q:quit")
        screen = (child.before + child.after).replace("\r\n", "\n")
        child.send("q")
        child.expect(pexpect.EOF)
    shown = (f"\x1b[1;33m{puzzle.id} {puzzle.title}: not yet" + screen).rpartition("\x1b[2J\x1b[H")[2]
    console = Console(record=True, width=columns, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="puzzles watch", unique_id="watch")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture fetches nothing


def write(text: str, name: str) -> None:
    (HERE / name).write_text(text, "utf-8")


def measured() -> str:
    """Four puzzles and two libraries on an H200, from the run that is kept in benchmarks/h200."""
    results = read(HERE.parent / "benchmarks" / "h200" / "bench.json")
    names = ("gpu_basics/2", "gpu_basics/3", "gpu_basics/4", "gpu_basics/9", "matmul", "attention")
    results.rows = [row for row in results.rows if row.work.split()[0] in names]
    return results.svg()


PICTURES: dict[str, Callable[[str], None]] = {
    "verdict.png": lambda name: photograph(wrong_answer(), name, 980, 330),
    "show.png": lambda name: photograph(right_answer(), name, 770, 630),
    "tpu.png": lambda name: photograph(compiled(), name, 850, 890),
    "bench.svg": lambda name: write(measured(), name),
    "watch.svg": lambda name: write(watched(), name),
}

if __name__ == "__main__":
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture](picture)
