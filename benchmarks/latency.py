"""How long a reader waits: medians over fresh processes, printed as a table.

    uv run python benchmarks/latency.py [--runs 5]

Each row is measured in processes of its own; verdicts after the imports and the `setup()` of a notebook's first cell.
The goals are those of the project: a failing verdict within 0.15 s, a passing one (with JAX's simulator) within 1.2 s,
the lens at least 5 times faster than JAX's TPU simulator on the same kernel in the same run, at most 0.3 s on top of
`import jax`, 4096 grid steps within 1.5 s, a second `tpu_report` within a second, in `puzzles watch` a second from a
save to the verdict on a puzzle of basics, and, in `puzzles check`, half a second to a syntax error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from pallas_puzzles.targets.tpu.compiler import missing

TESTS = Path(__file__).resolve().parents[1] / "tests"

# What every measuring process starts with: a tiled matmul, 4 x 4 x 4 = 64 grid steps, as a reader writes it.
PRELUDE = """
import json, time
import numpy as np
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import pallas_puzzles
from pallas_puzzles import check, normal
from pallas_puzzles.course.collecting import collecting

def spec(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)

def kernel(x_ref, y_ref, o_ref, acc_ref, *, zeroed):
    if zeroed:
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)
    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]

def matmul(x, y, *, bm=32, bn=128, bk=128, zeroed=True):
    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        lambda *refs: kernel(*refs, zeroed=zeroed),
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
    )(x, y)

inputs = normal((128, 512)), normal((512, 512))
pallas_puzzles.setup()  # as every notebook does in its first cell
time.sleep(1)  # the reader reads
def report(**seconds):
    print(json.dumps(seconds))
"""

IMPORT_JAX = """
import json, time
start = time.perf_counter()
import jax
print(json.dumps({"seconds": time.perf_counter() - start}))
"""

IMPORT_OURS = """
import json, time
import jax
start = time.perf_counter()
import pallas_puzzles
print(json.dumps({"seconds": time.perf_counter() - start}))
"""

VERDICT = """
start = time.perf_counter()
with collecting() as verdicts:
    check("a kernel of mine", lambda x, y: matmul(x, y, zeroed={zeroed}), spec, *inputs)
shown = verdicts[0]._repr_html_()
seconds = time.perf_counter() - start
assert verdicts[0].status == {status!r}, str(verdicts[0])
report(seconds=seconds)
"""

LENS_AND_SIMULATOR = """
from pallas_puzzles.lens import machine as lens
from pallas_puzzles.targets.simulate import simulate
x, y = (i.draw(np.random.default_rng(0)) for i in inputs)
def timed(run):
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out
first_lens, run = timed(lambda: lens.trace(matmul, x, y))
first_simulator, simulated = timed(lambda: simulate(matmul, x, y))
again_lens, _ = timed(lambda: lens.trace(matmul, x, y))
again_simulator, _ = timed(lambda: simulate(matmul, x, y))
np.testing.assert_allclose(run.outputs, simulated, rtol=1e-4, atol=1e-3)
report(lens=first_lens, simulator=first_simulator, lens_again=again_lens, simulator_again=again_simulator)
"""

MANY_STEPS = """
from pallas_puzzles.lens import machine as lens
x, y = (normal(s).draw(np.random.default_rng(0)) for s in ((512, 2048), (2048, 2048)))
start = time.perf_counter()
run = lens.trace(matmul, x, y)
seconds = time.perf_counter() - start
assert run.traces[0].n == 4096
report(seconds=seconds)
"""

TPU_REPORTS = """
from pallas_puzzles.view.tpu_report import tpu_report
start = time.perf_counter()
assert tpu_report(matmul, *inputs)
first = time.perf_counter() - start
start = time.perf_counter()
again = tpu_report(matmul, *inputs, bn=256)
seconds = time.perf_counter() - start
assert again and again.kernels[0].cycles
report(first=first, second=seconds)
"""

# From a save to the line with the verdict, on every puzzle of basics, each of which has been checked once before.
WATCH = """
import json, os, statistics, subprocess, sys, tempfile, time
from pathlib import Path
from pallas_puzzles.course import curriculum
sys.path.insert(0, {tests!r})
import bank
from course import functions

def laid(text, puzzle, answers):
    for hole in puzzle.holes:
        skeleton = puzzle.skeletons[hole].strip("\\n").rstrip()
        assert skeleton in text, hole
        text = text.replace(skeleton, answers.get(hole, skeleton))
    return text

folder = Path(tempfile.mkdtemp())
os.environ["PALLAS_PUZZLES_HOME"] = str(folder / "home")
subprocess.run([sys.executable, "-m", "pallas_puzzles", "init", folder / "mine"], check=True, capture_output=True)
mine = folder / "mine" / "basics.py"
command = [sys.executable, "-m", "pallas_puzzles", "watch", "basics", "--any"]
watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def verdict(puzzle, text, word):
    start, heard = time.perf_counter(), ""
    mine.write_text(text)
    for line in watch.stdout:
        if line.startswith(puzzle.id + " ") and puzzle.title in line:
            seconds, heard = time.perf_counter() - start, line
        if "q:quit" in line:
            break
    assert heard.rstrip().endswith(word), heard
    return seconds

for line in watch.stdout:
    if "q:quit" in line:
        break
text, right, wrong = mine.read_text(), [], []
for puzzle in curriculum.in_notebook("basics"):
    mistakes = [each for each in bank.read_all() if each.puzzle == puzzle.id]
    # one that runs, and fills every hole
    mistake = next(each for each in mistakes if set(puzzle.holes) <= set(functions(each.code)))
    solved = laid(text, puzzle, functions(puzzle.solution))
    failing = laid(text, puzzle, functions(mistake.code))
    for number in range(2):
        note = "\\n# " + str(number)
        seconds = verdict(puzzle, failing + note, "not yet.")
        wrong += [seconds] * number
        seconds = verdict(puzzle, solved + note, "solved.")
        right += [seconds] * number
    text = solved
watch.communicate("q")
print(json.dumps({{"right": statistics.median(right), "worst": max(right), "wrong": statistics.median(wrong)}}))
"""

# From Enter to the verdict on a file that was just saved, when a process waits for it already.
SYNTAX_ERROR = """
import json, os, statistics, subprocess, sys, tempfile, time
from pathlib import Path
folder = Path(tempfile.mkdtemp())
os.environ["PALLAS_PUZZLES_HOME"] = str(folder / "home")
puzzles = [sys.executable, "-m", "pallas_puzzles"]
subprocess.run([*puzzles, "init", folder / "mine"], check=True, capture_output=True)
mine, seconds = folder / "mine" / "basics.py", []
text = mine.read_text().replace("pass  # YOUR CODE HERE", "o_ref[...] = (x_ref[...]", 1)
for number in range(4):
    mine.write_text(text + "# " + str(number))
    start = time.perf_counter()
    with subprocess.Popen([*puzzles, "check", "basics/1"], stdout=subprocess.PIPE, text=True) as check:
        assert any("was never closed" in line for line in check.stdout)
        seconds.append(time.perf_counter() - start)
print(json.dumps({"seconds": statistics.median(seconds[1:])}))
"""


def measure(code: str, runs: int) -> dict[str, float]:
    """Medians of what `code` reports, over `runs` fresh processes."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    results = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: statistics.median(r[key] for r in results) for key in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes per row")
    runs = parser.parse_args().runs
    rows: list[tuple[str, str, str, bool]] = []

    def row(what: str, value: float, goal: float, unit: str = "s", at_most: bool = True) -> None:
        met = value <= goal if at_most else value >= goal
        rows.append((what, f"{value:.3f} {unit}", f"{'<=' if at_most else '>='} {goal} {unit}", met))

    def seconds(code: str) -> float:
        return measure(code, runs)["seconds"]

    row("a failing verdict, 64 grid steps", seconds(PRELUDE + VERDICT.format(zeroed=False, status="failed")), 0.15)
    row("a passing verdict, 64 grid steps", seconds(PRELUDE + VERDICT.format(zeroed=True, status="passed")), 1.2)
    both = measure(PRELUDE + LENS_AND_SIMULATOR, runs)
    row("simulator / lens, first run", both["simulator"] / both["lens"], 5, "times", at_most=False)
    row("simulator / lens, again", both["simulator_again"] / both["lens_again"], 5, "times", at_most=False)
    row("import pallas_puzzles, after jax", seconds(IMPORT_OURS), 0.3)
    row("the lens, 4096 grid steps", seconds(PRELUDE + MANY_STEPS), 1.5)
    watch = measure(WATCH.format(tests=str(TESTS)), max(1, runs // 2))
    row("watch, from save to a wrong verdict", watch["wrong"], 1)
    row("watch, from save to a right one", watch["right"], 1)
    row("watch, the slowest puzzle of basics", watch["worst"], 1)
    row("puzzles check, a syntax error, warm", seconds(SYNTAX_ERROR), 0.5)
    if missing() is None:
        reports = measure(PRELUDE + TPU_REPORTS, runs)
        row("tpu_report, the first in a session", reports["first"], 10)
        row("tpu_report, the second", reports["second"], 1)

    print(f"medians of {runs} fresh processes, {os.cpu_count()} cores\n")
    print(f"{'what':36} {'measured':>14} {'goal':>14}")
    for what, measured, goal, met in rows:
        print(f"{what:36} {measured:>14} {goal:>14}  {'' if met else 'MISSED'}")
    print(f"\nimport jax alone: {seconds(IMPORT_JAX):.3f} s")


if __name__ == "__main__":
    main()
