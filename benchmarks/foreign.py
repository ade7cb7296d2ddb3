"""Kernels that nobody wrote for this project, through the lens: writes benchmarks/foreign.md.

    uv run --extra tpu-compiler python benchmarks/foreign.py [-k WORD] [--no-report]

The lock does not have the other projects. tokamax is a package:

    uv run --extra tpu-compiler --with tokamax --with chex --with hypothesis python benchmarks/foreign.py

The others are read from checkouts, and so are the tests whose calls are used (see foreign_tests.py):

    git clone https://github.com/vllm-project/tpu-inference /tmp/src/tpu-inference
    git clone https://github.com/sgl-project/sglang-jax /tmp/src/sglang-jax
    git clone https://github.com/AI-Hypercomputer/maxtext /tmp/src/maxtext
    uv run ... --with sympy --with pybase64 python benchmarks/foreign.py --source /tmp/src

What MaxText imports besides tokamax: --with filelock --with pyyaml --with pydantic --with omegaconf --with aqtp
--with flax.

Rows of kernels that do not run this time (-k, a project that is not there) stay in the table as they are.
"""

import argparse
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import foreign_guides
import foreign_jax
import foreign_tokamax
import jax
import numpy as np
from foreign_jobs import JOBS, REFERENCES, Job, cpu_limit
from foreign_tests import PROJECTS, calls_of, folder_of

from pallas_puzzles.diagnose.diagnose import diagnose
from pallas_puzzles.ir.capture import SPARSE_CHIP
from pallas_puzzles.lens import machine
from pallas_puzzles.lens.watchdog import TimeLimit
from pallas_puzzles.targets.simulate import SimulatorError, simulate
from pallas_puzzles.view.tpu_report import tpu_report

TABLE = Path(__file__).with_name("foreign.md")
COLUMNS = ["kernel", "the lens", "findings", "agrees with JAX's simulator to", "report", "lens, s", "simulator, s"]
REPORT = COLUMNS.index("report") - 1  # a row is what stands behind the name
LIMIT_S = 200.0  # of CPU time, as in the table
WAIT_S = 600.0  # for a simulation, which may hang
IN_FLIGHT = {"no-wait", "reused"}  # findings on memory that a copy on its way uses: JAX's race detector knows of them
GROUPS = [foreign_jax, foreign_guides, foreign_tokamax]  # each of them puts its calls into JOBS


# --- one row ---------------------------------------------------------------------------------------------------------


def row(make: Callable[[], Job], report: bool, reference: Callable[..., Any] | None = None) -> list[str]:
    """What the table says of one kernel, behind its name."""
    try:
        fn, args = make()
        (run, error), lens_s = timed(lambda: machine.trace(fn, *args))
    except Exception as e:
        return [f"the call: {short(e)}", "", "", "", "", ""]
    (outputs, simulator), simulator_s = (
        ((None, SimulatorError("it has no SparseCores")), 0.0)
        if run is not None and run.chip == SPARSE_CHIP
        else timed(lambda: simulate(fn, *args, timeout_s=WAIT_S))
    )
    ran = f"{len(run.traces)} kernel{'s' if len(run.traces) != 1 else ''}" if run is not None else short(error)
    findings = ""
    if run is not None:
        found = diagnose(run, outputs if outputs is not None else run.outputs).findings
        findings = ", ".join(f.kind for f in found) or "none"
        if any(f.kind in IN_FLIGHT for f in found):
            (_, race), _ = timed(lambda: simulate(fn, *args, timeout_s=WAIT_S, detect_races=True))
            findings += f" (JAX's race detector: {short(race)})" if race else " (JAX's race detector sees none)"
    agrees = (
        f"cannot run it: {short(simulator)}"
        if outputs is None
        else difference(run.outputs, outputs)
        if run is not None
        else ""
    )
    if outputs is None and run is not None and reference is not None:
        want, error = timed(lambda: jax.block_until_ready(reference(*args)))[0]
        plain = (
            f"{difference(run.outputs, want)}, with plain arrays" if error is None else f"no reference: {short(error)}"
        )
        agrees = f"{plain}; the simulator {agrees}"
    chip = "tpu7x" if run is not None and run.chip == SPARSE_CHIP else "v5e"
    said = told(fn, args, chip) if report else ""
    return [ran, findings, agrees, said, f"{lens_s:.2f}", f"{simulator_s:.2f}" if outputs is not None else ""]


def timed(work: Callable[[], Any]) -> tuple[tuple[Any, BaseException | None], float]:
    start = time.process_time()
    result: tuple[Any, BaseException | None]
    try:
        with cpu_limit(LIMIT_S):
            result = work(), None
    except (Exception, TimeLimit) as error:
        result = None, error
    return result, time.process_time() - start


def short(error: BaseException | None) -> str:
    if isinstance(error, TimeLimit):
        return f"more than {LIMIT_S:g} s of CPU time"
    kind = "" if isinstance(error, machine.Beyond | SimulatorError) else f"{type(error).__name__}: "
    text = (kind + " ".join(str(error).split())).replace("|", "/")
    return text if len(text) < 90 else text[:87] + "..."


def difference(got: Any, want: Any) -> str:
    """The largest difference, by the largest number that is wanted."""
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        if not np.array_equal(np.isfinite(g), np.isfinite(w)):
            return "not at all: inf or NaN"
        finite = np.isfinite(w)
        worst = max(
            worst, float(np.abs(g - w)[finite].max(initial=0)) / max(1.0, float(np.abs(w[finite]).max(initial=0)))
        )
    return f"{worst:.1e}" if worst else "the bit"


def told(fn: Callable[..., Any], args: tuple[Any, ...], chip: str) -> str:
    (report, error), _ = timed(lambda: tpu_report(fn, *args, tpu=chip, simulate=False))
    if report is None:
        return f"raises {short(error)}"
    if report.refusal is not None:
        return f"refused: {short(Exception(report.refusal.sentence))}".replace("Exception: ", "")
    if report.unavailable or report.kernels:
        return report.unavailable or f"{len(report.kernels)} compiled"
    return f"compiles on {chip}: {'; '.join(report.notes)}"


def rows_before() -> dict[str, list[str]]:
    lines = TABLE.read_text("utf-8").splitlines() if TABLE.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {first: rest for first, *rest in cells if ": " in first}


def written(rows: dict[str, list[str]], missing: dict[str, str]) -> str:
    ran = sum(r[0].endswith(("kernel", "kernels")) and not r[0].startswith("0 ") for r in rows.values())
    clean = sum(r[1] == "none" for r in rows.values())
    known = list(dict.fromkeys([package for package, _ in JOBS.values()] + list(PROJECTS)))
    order = sorted(rows, key=lambda name: known.index(name.split(": ")[0]))
    head = [
        "# Kernels that nobody wrote for this project",
        "",
        "Written by `benchmarks/foreign.py`. Small shapes, one process on a CPU, first runs: the seconds are for",
        f"orientation only. JAX {jax.__version__}.",
        "",
        f"The lens ran {ran} of {len(rows)}, {clean} of them without a finding.",
        "The rows of `guides` were written for this table, after what JAX's guides teach.",
        "Behind a finding about a copy on its way stands what JAX's own race detector says of the same call. That of",
        "tokamax's gradient is true: a block of w_grad is read again after 2 steps, with 2 buffers each way, for which",
        "JAX asks for 3. No value is wrong, since what is written there is what was read, as tokamax's source says.",
        *[f"{name} {why}: its rows are of an earlier run, or left out." for name, why in missing.items()],
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    return "\n".join(head + [f"| {' | '.join([name, *rows[name]])} |" for name in order]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only rows whose name has this in it")
    parser.add_argument("--source", type=Path, help="a folder with checkouts of the other projects")
    parser.add_argument(
        "--no-report", action="store_true", help="what tpu_report said before, which takes seconds a kernel"
    )
    asked = parser.parse_args()
    word = asked.k.lower()
    rows = rows_before()
    found = {name: folder_of(name, asked.source) for name in PROJECTS}
    missing = {name: why for name, why in found.items() if isinstance(why, str)}
    for name, make, reference in jobs(missing, asked.source, word):
        before = rows.get(name, [""] * len(COLUMNS))
        rows[name] = row(make, not asked.no_report, reference)
        if asked.no_report:
            rows[name][REPORT] = before[REPORT]
        print(name, *rows[name], sep=" | ", flush=True)
        TABLE.write_text(written(rows, missing), "utf-8")


def jobs(
    missing: Container[str], source: Path | None, word: str
) -> Iterator[tuple[str, Callable[[], Job], Callable[..., Any] | None]]:
    """(name of a row, what makes its job, the same in plain arrays), those that can be had here."""
    for name, (package, make) in JOBS.items():
        if word in name.lower() and package not in missing:
            yield name, make, REFERENCES.get(name)
    for project in PROJECTS:
        if project not in missing:
            for name, call, reference in calls_of(project, source, word):
                yield name, lambda call=call: call, reference  # type: ignore[misc]


if __name__ == "__main__":
    main()
