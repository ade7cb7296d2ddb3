"""How long a reader waits for a verdict, warm: every wrong answer of the bank, and every solution.

    uv run python benchmarks/verdicts.py [REGEX] [--every N]

REGEX: puzzles by name, "basics|softmax/1". --every 5: every fifth wrong answer. One process; each puzzle is checked
once before its answers are timed. Prints a markdown table of seconds, and says what was accepted or raised.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # what distributed.py's set-up asks for
os.environ["PALLAS_PUZZLES_HOME"] = tempfile.mkdtemp()
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import bank  # noqa: E402
from pallas_puzzles.course import curriculum, session  # noqa: E402


def seconds(puzzle: curriculum.Puzzle, overlay: Path | str) -> tuple[bool, float]:
    """Whether an answer passes, and how long its verdict takes."""
    start = time.perf_counter()
    passed = bool(session.run(puzzle.id, overlay=overlay))
    return passed, time.perf_counter() - start


def row(name: str, times: list[float]) -> str:
    times = sorted(times)
    middle, most = times[len(times) // 2], times[min(len(times) - 1, int(len(times) * 0.95))]
    return f"| {name} | {len(times)} | {middle:.2f} | {most:.2f} | {times[-1]:.2f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    answers = bank.read_all()[:: given.every]
    strange, tables = [], []
    everything: dict[str, list[float]] = {"refused": [], "passed": []}
    for book in curriculum.notebooks():
        refused: list[float] = []
        passed: list[float] = []
        for puzzle in (each for each in book.puzzles if re.search(given.only, each.id)):
            solution = ROOT / "solutions" / f"{book.name}.py"
            seconds(puzzle, solution)
            right, took = seconds(puzzle, solution)
            passed.append(took)
            strange += [] if right else [f"refused: the solution of {puzzle.id}"]
            for answer in (each for each in answers if each.puzzle == puzzle.id):
                right, took = seconds(puzzle, answer.code)
                refused.append(took)
                strange += [f"accepted: {answer}"] if right else []
        for kind, times in (("refused", refused), ("passed", passed)):
            everything[kind] += times
            tables += [row(f"{book.name}, {kind}", times)] if times else []
    tables += [row(f"all, {kind}", times) for kind, times in everything.items()]
    print("| answers | count | median s | 95% s | worst s |", "|---|---|---|---|---|", *tables, *strange, sep="\n")
    return int(bool(strange))


if __name__ == "__main__":
    sys.exit(main())
