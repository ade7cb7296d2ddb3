"""What was measured, as data: rows with their conditions, as JSON and CSV, and two runs compared."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_whole
from ..view.draw import Displayed
from . import plot, show

VERSION = 1
Saved = Callable[["Results"], None]  # is told all that there is, after each size


@dataclasses.dataclass
class Row:
    """One function at one size on one chip. Times in seconds; None: there is none, and `problem` says why.

    low_s, high_s: see meter.Timing; wall_s: a call with its dispatch. light_s: at the datasheet's peaks, None where the
    chip's are not known; bound: which peak. kind: MEASURED or ESTIMATE.
    """

    work: str
    size: str
    dtype: str
    who: str
    chip: str
    kind: str
    hbm_bytes: float = 0.0
    flops: float = 0.0
    median_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    count: int = 0
    how: str = ""
    l2_flushed: bool = False
    wall_s: float | None = None
    light_s: float | None = None
    bound: str = ""
    problem: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return (self.work, self.size, self.dtype, self.who, self.chip, self.kind)

    @property
    def share(self) -> float | None:
        """Of the speed of light."""
        return self.light_s / self.median_s if self.light_s and self.median_s else None

    @property
    def spread(self) -> float | None:
        """Half the distance from low_s to high_s, as a share of the median."""
        if self.median_s is None or self.low_s is None or self.high_s is None:
            return None
        return (self.high_s - self.low_s) / 2 / self.median_s

    @property
    def rate(self) -> tuple[float, str] | None:
        """(what it reaches of what bounds it, the unit): FLOP/s, or B/s."""
        if not self.median_s:
            return None
        amount, unit = (self.hbm_bytes, "B/s") if self.bound == "HBM" else (self.flops, "FLOP/s")
        return amount / self.median_s, unit


@dataclasses.dataclass(eq=False, repr=False)
class Results(Displayed):
    """All rows of a run. conditions: what they hold under (conditions.py). notes: sentences for whoever reads them."""

    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was measured or estimated."""
        return any(row.median_s is not None for row in self.rows)

    def text(self) -> str:
        return show.text(self)

    def _repr_html_(self) -> str:
        return show.html(self)

    def note(self, sentence: str) -> None:
        """Keeps a sentence, once."""
        if sentence and sentence not in self.notes:
            self.notes.append(sentence)

    def svg(self) -> str:
        """The picture: see plot.py."""
        return plot.svg(self)

    def to_json(self) -> dict[str, Any]:
        """The results as plain data with stable keys, for programs."""
        rows = [{**dataclasses.asdict(row), "share": row.share} for row in self.rows]
        told = {"version": VERSION, "conditions": self.conditions, "notes": self.notes, "rows": rows}
        return _plain(told)

    def to_csv(self) -> str:
        """A line for each row, with the device and the versions in each."""
        constant = {k: v for k, v in self.conditions.items() if not isinstance(v, dict | list)}
        names = [field.name for field in dataclasses.fields(Row)]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*names, "share", *constant])
        for row in self.rows:
            values = [getattr(row, name) for name in names]
            writer.writerow(["" if v is None else v for v in [*values, row.share, *constant.values()]])
        return out.getvalue()

    def save(self, path: Path) -> None:
        """Writes .json, .csv or .svg, by the name of the file. Raises OSError, and ValueError for another name."""
        kinds = {".json": lambda: json.dumps(self.to_json(), indent=1) + "\n", ".csv": self.to_csv, ".svg": self.svg}
        if path.suffix not in kinds:
            raise ValueError(f"{path} has to end in {', '.join(kinds)}")
        write_whole(path, kinds[path.suffix]().encode())


def _plain(value: Any) -> Any:
    """Only what JSON knows, which has neither tuples nor NaN nor infinities."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def of_json(told: Any) -> Results:
    """The results of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    if told["version"] != VERSION:
        raise ValueError(f"these results have version {told['version']} of their format; {VERSION} is known")
    rows = [Row(**{name: value for name, value in row.items() if name != "share"}) for row in told["rows"]]
    return Results(told["conditions"], rows, told["notes"])


def read(path: Path) -> Results:
    """Results that were saved as JSON. Raises ValueError, with what is wrong with the file."""
    try:
        return of_json(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} has no results of `puzzles bench --json`, or of another version") from None
