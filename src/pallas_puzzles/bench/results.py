"""What was measured, as data: rows with their conditions, as JSON and CSV, and two runs compared."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..text import plain
from ..view.draw import Displayed
from ..view.facts import as_json

VERSION = 1
MEASURED, ESTIMATE = "measured", "estimate"
_NOISE = 0.03  # what two runs on the same GPU differ by, whatever each of them says of its own spread


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
        return (
            (self.hbm_bytes / self.median_s, "B/s") if self.bound == "HBM" else (self.flops / self.median_s, "FLOP/s")
        )


@dataclasses.dataclass(eq=False, repr=False)
class Results(Displayed):
    """All rows of a run. conditions: what they hold under (conditions.py). notes: sentences for whoever reads them."""

    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was measured or estimated."""
        return any(row.median_s is not None for row in self.rows)

    def __str__(self) -> str:
        from .show import text

        return plain(text(self), getattr(sys.stdout, "encoding", None))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from .show import html

        return html(self)

    def note(self, sentence: str) -> None:
        """Keeps a sentence, once."""
        if sentence and sentence not in self.notes:
            self.notes.append(sentence)

    def svg(self) -> str:
        """The picture: see plot.py."""
        from .plot import svg

        return svg(self)

    def to_json(self) -> dict[str, Any]:
        """The results as plain data with stable keys, for programs."""
        rows = [{**dataclasses.asdict(row), "share": row.share} for row in self.rows]
        told = {"version": VERSION, "conditions": self.conditions, "notes": self.notes, "rows": rows}
        return {name: as_json(value) for name, value in told.items()}

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
        kinds = {
            ".json": lambda: json.dumps(self.to_json(), indent=1) + "\n",
            ".csv": self.to_csv,
            ".svg": self.svg,
        }
        if path.suffix not in kinds:
            raise ValueError(f"{path} has to end in {', '.join(kinds)}")
        write_whole(path, kinds[path.suffix]().encode())


def read(path: Path) -> Results:
    """Results that were saved as JSON. Raises ValueError, with what is wrong with the file."""
    try:
        told = json.loads(path.read_text("utf-8"))
        names = {field.name for field in dataclasses.fields(Row)}
        if told["version"] != VERSION:
            raise ValueError(f"{path} is of version {told['version']} of this format, and {VERSION} is known")
        rows = [Row(**{k: v for k, v in row.items() if k in names}) for row in told["rows"]]
        return Results(told["conditions"], rows, told["notes"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (TypeError, KeyError, json.JSONDecodeError):
        raise ValueError(f"{path} has no results of `puzzles bench --json`") from None


# --- two runs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """A row, and the same row of an older run. ratio: new over old time. beyond_noise: whether it counts."""

    row: Row
    ratio: float
    beyond_noise: bool

    @property
    def words(self) -> str:
        if not self.beyond_noise:
            return "the same"
        return f"faster: {self.ratio:.2f}" if self.ratio < 1 else f"slower: {self.ratio:.2f}"


def changes(new: Results, old: Results) -> list[Change]:
    """What both runs have. A change counts when four fifths of the one run lie outside of those of the other, and it is
    more than 3%, which is what two runs of the same program may differ by.
    """
    before = {row.key: row for row in old.rows if row.median_s}
    found = []
    for row in new.rows:
        other = before.get(row.key)
        if other is None or not row.median_s or not other.median_s:
            continue
        ratio = row.median_s / other.median_s
        apart = _low(row) > _high(other) or _high(row) < _low(other)
        found.append(Change(row, ratio, apart and max(ratio, 1 / ratio) > 1 + _NOISE))
    return found


def _low(row: Row) -> float:
    return row.low_s if row.low_s is not None else row.median_s or 0.0


def _high(row: Row) -> float:
    return row.high_s if row.high_s is not None else row.median_s or 0.0


def differ(new: Results, old: Results, names: Iterable[str]) -> list[str]:
    """Conditions that the two runs do not share, in words: they may be why a time has changed."""
    pairs: Sequence[tuple[str, Any, Any]] = [(n, old.conditions.get(n), new.conditions.get(n)) for n in names]
    return [f"{name}: {then}, now {now}" for name, then, now in pairs if then != now]
