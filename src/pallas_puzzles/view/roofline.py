"""A roofline: what chips could do at any number of FLOP per byte, and where kernels are. Numbers as they are shown."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from ..ir.capture import SourceLine
from ..text import cut
from .paper import BOLD, END, SANS, SANS_EM, card, px, svg_text


class Chip(Protocol):
    """What a roof is made of."""

    @property
    def title(self) -> str: ...
    @property
    def hbm_bytes_per_s(self) -> float: ...
    def flops_per_s(self, dtype: str = "bfloat16") -> float: ...


@dataclasses.dataclass(kw_only=True)
class Kernel:
    """What is known of a kernel on any chip: also what a dot is made of.

    hbm_bytes, time_s: None where nobody could know. mxu_dtype: of the operands of
    its matrix products (of most of them). times: what the kernel would take if nothing but this bounded it, in seconds;
    reached: the share of its peak that each of these reaches, where that is not all of it.
    """

    name: str
    where: SourceLine | None
    mxu_dtype: str | None = None
    flops: float = 0.0
    hbm_bytes: float | None = None
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    time_s: float | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    reached: ClassVar[Mapping[str, float]] = {}

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of HBM."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None

    @property
    def bound(self) -> str | None:
        """Which of `times` decides."""
        if self.time_s is None:
            return None
        return max(self.times, key=lambda name: self.times[name] / self.reached.get(name, 1))


# --- numbers ---------------------------------------------------------------------------------------------------------


def digits(number: float) -> str:
    """Three significant digits, never an exponent for large numbers: 2109.25 -> '2109', 14.25 -> '14.2'."""
    if number >= 99.95:
        return count_words(round(number))
    return f"{number:.3g}"


def count_words(count: int) -> str:
    return f"{count:,}" if count >= 10_000 else str(count)


def human_time(seconds: float) -> str:
    """Microseconds, the unit of kernels, unless that gives long numbers."""
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if seconds * scale < (99.95 if unit == "ns" else 999.5):
            return f"{digits(seconds * scale)} {unit}" if seconds else "0 us"
    return f"{digits(seconds)} s"


def human_count(count: float, unit: str) -> str:
    """17.2e9 -> '17.2 GFLOP'; decimal, as peaks and bandwidths are stated."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 999.5 or prefix == "P":
            break
        count /= 1000
    return f"{digits(count)} {prefix}{unit}"


def percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}" if 0 < share < 0.0995 else f"{share:.0%}"


def ridge(chip: Chip, dtype: str = "bfloat16") -> float:
    """FLOP per byte from which on the MXU's peak for `dtype` is the roof, and no longer HBM."""
    return chip.flops_per_s(dtype) / chip.hbm_bytes_per_s


def roof_at(intensity: float, chip: Chip, dtype: str = "bfloat16") -> float:
    """The most FLOP/s at so many FLOP per byte."""
    return min(chip.flops_per_s(dtype), intensity * chip.hbm_bytes_per_s)


def achieved(kernel: Kernel, chip: Chip) -> tuple[float, float] | None:
    """(FLOP/s at the estimated time, its share of the roof); None where nobody can know, or there are no FLOPs."""
    if not kernel.intensity or not kernel.time_s:
        return None
    speed = kernel.flops / kernel.time_s
    return speed, speed / roof_at(kernel.intensity, chip, kernel.mxu_dtype or "bfloat16")


# --- the picture -----------------------------------------------------------------------------------------------------

_LEFT, _TOP, _RIGHT, _BOTTOM, _HEIGHT = 62.0, 66.0, 590.0, 372.0, 430.0  # the axes, and all of it
_MARGIN, _WIDE_MARGIN = 150.0, 200.0  # right of the axes: for the names of the roofs, and for a key to several dots
_TEXT, _LINE, _SMALL = 12.0, 15.0, 11.0  # sizes in px: of text, from line to line, of ticks
_MOST_KEYS, _MOST_LABEL, _MOST_WORDS = 7, 23, 32
_MIDDLE = ' text-anchor="middle"'
_HALO = ' stroke="var(--paper)" stroke-width="4" paint-order="stroke"'  # of a label that may lie on a line
_DASHES = ("", "9 4", "2 3")  # of the first chip, the second, ...


class Entry(NamedTuple):
    """A kernel, and what is said of it. x: FLOP per byte, y: FLOP/s, roof: what y could be; x is 0 without a dot."""

    label: str
    words: str
    x: float = 0.0
    y: float = 0.0
    roof: float = 0.0


def _entry(label: str, kernel: Kernel, chip: Chip) -> Entry:
    if kernel.intensity and kernel.time_s and (reached := achieved(kernel, chip)):
        speed, share = reached
        words = f"{human_time(kernel.time_s)}, {percent(share)} of the roof"
        return Entry(label, words, kernel.intensity, speed, speed / share)
    why = "no HBM bytes" if kernel.hbm_bytes == 0 else "HBM bytes unknown"
    why = "no arithmetic" if not kernel.flops else why if kernel.intensity is None else "time unknown"
    return Entry(label, f"no dot: {why}")


class Roofline:
    """The picture. target: the chip in words; chips: whose roofs are drawn; between: where the bytes are counted;
    kernels: by their labels."""

    def __init__(
        self, name: str, target: str, chip: Chip, chips: Sequence[Chip], between: str, kernels: Mapping[str, Kernel]
    ) -> None:
        self.name, self.target, self.chip, self.chips, self.between = name, target, chip, chips, between
        self.entries = [_entry(label, kernel, chip) for label, kernel in kernels.items()]
        # int8's peak where all products are of int8
        self.dtype = "int8" if {kernel.mxu_dtype for kernel in kernels.values()} == {"int8"} else "bfloat16"

    def svg(self) -> str:
        """As a standalone SVG."""
        dots = [entry for entry in self.entries if entry.x]
        axes, several = _Axes(dots, self.chips, self.dtype), len(self.entries) > 1
        caption = f"roofs: HBM bandwidth up to the ridge point (ring), then {_PEAKS[self.dtype]} peak"
        caption += f"; {'dot' if len(dots) == 1 else 'dots'}: at the estimated time" if dots else ""
        marks = [
            svg_text(_LEFT, 24, cut(f"{self.name} on {self.target}", 60, "…"), 14, "ink", SANS, BOLD),
            svg_text(_LEFT, 42, caption, _SMALL, "muted", SANS),
            *_ticks(axes, self.between),
            *(_roof_marks(axes, each, self.chip) for each in sorted(self.chips, key=lambda each: each is self.chip)),
            *_roof_labels(axes, self.chip),
            *_dot_marks(axes, self.entries),
            *(_key(self.entries) if several else []),
        ]
        return card(_RIGHT + (_WIDE_MARGIN if several else _MARGIN), _HEIGHT, "".join(marks))

    def words(self) -> str:
        """The picture in words."""
        roofs = [
            f"{each.title} {human_count(each.hbm_bytes_per_s, 'B/s')} up to {digits(ridge(each, self.dtype))} "
            f"FLOP per byte, then {human_count(each.flops_per_s(self.dtype), 'FLOP/s')}"
            for each in self.chips
        ]
        parts = [f"Roofline of {self.name} on {self.target}. Roofs, in {_PEAKS[self.dtype]}: {'; '.join(roofs)}."]
        for entry in self.entries:
            at = f"{digits(entry.x)} FLOP per byte, {human_count(entry.y, 'FLOP/s')}, " if entry.x else ""
            parts.append(f"{entry.label}: {at}{entry.words}.")
        return " ".join(parts)


_PEAKS = {"bfloat16": "bf16", "int8": "int8"}


class _Axes:
    """Decades on paper: FLOP per byte to the right, FLOP/s upwards."""

    def __init__(self, dots: Sequence[Entry], chips: Sequence[Chip], dtype: str):
        self.dtype, self.chips = dtype, chips
        least = min([0.1, *(dot.x / 1.5 for dot in dots)])
        most = max([1e4, *(dot.x * 1.5 for dot in dots)])
        self.x0, self.x1 = math.floor(math.log10(least)), math.ceil(math.log10(most))
        slowest = min(chip.hbm_bytes_per_s for chip in chips) * 10.0**self.x0
        fastest = max(chip.flops_per_s(dtype) for chip in chips)
        self.y0 = math.floor(math.log10(min([slowest, *(dot.y / 1.5 for dot in dots)])))
        self.y1 = math.log10(max([2 * fastest, *(2 * dot.y for dot in dots)]))

    def x(self, intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - self.x0) / (self.x1 - self.x0) * (_RIGHT - _LEFT)

    def y(self, speed: float) -> float:
        return _BOTTOM - (math.log10(speed) - self.y0) / (self.y1 - self.y0) * (_BOTTOM - _TOP)

    def roof(self, chip: Chip) -> list[tuple[float, float]]:
        """Corners, in px."""
        ends = (10.0**self.x0, min(ridge(chip, self.dtype), 10.0**self.x1), 10.0**self.x1)
        return [(self.x(x), self.y(roof_at(x, chip, self.dtype))) for x in ends]


def _ticks(axes: _Axes, between: str) -> Iterator[str]:
    """A line and a number for every decade, and what the axes are."""
    line = 'stroke="var(--line)" stroke-width=".7"'
    for decade in range(axes.x0, axes.x1 + 1):
        x, words = axes.x(10.0**decade), f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:g}"
        yield f'<path d="M{px(x)} {px(_TOP)}V{px(_BOTTOM)}" {line}/>'
        yield svg_text(x, _BOTTOM + 17, words, _SMALL, "muted", SANS, _MIDDLE)
    for decade in range(axes.y0, math.floor(axes.y1) + 1):
        y = axes.y(10.0**decade)
        yield f'<path d="M{px(_LEFT)} {px(y)}H{px(_RIGHT)}" {line}/>'
        yield svg_text(_LEFT - 7, y + 4, human_count(10.0**decade, "").strip(), _SMALL, "muted", SANS, END)
    middle = (_LEFT + _RIGHT) / 2
    yield svg_text(middle, _BOTTOM + 38, f"FLOP per byte between {between}", _TEXT, "ink", SANS, _MIDDLE)
    yield svg_text(_LEFT - 7, _TOP - 8, "FLOP/s", _TEXT, "ink", SANS, END)


def _roof_marks(axes: _Axes, chip: Chip, mine: Chip) -> str:
    corners = axes.roof(chip)
    path = "L".join(f"{px(x)} {px(y)}" for x, y in corners)
    dashes = _DASHES[list(axes.chips).index(chip) % len(_DASHES)]
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    colour, width = ("var(--blue)", "2.4") if chip is mine else ("var(--frame)", "1.3")
    x, y = corners[1]
    return (
        f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>'
        f'<circle cx="{px(x)}" cy="{px(y)}" r="3" fill="var(--paper)" stroke="{colour}" stroke-width="1.3"/>'
    )


def _roof_labels(axes: _Axes, mine: Chip) -> Iterator[str]:
    """Beside the roofs' ends, from the highest down, with room for each."""
    lowest = -math.inf
    for chip in sorted(axes.chips, key=lambda each: -each.flops_per_s(axes.dtype)):
        end = axes.roof(chip)[-1][1]
        y = lowest = max(end - 4, lowest + _LINE + 1)
        colour, more = ("blue", BOLD) if chip is mine else ("ink", "")
        yield f'<path d="M{px(_RIGHT)} {px(end)}L{px(_RIGHT + 8)} {px(y)}" stroke="var(--frame)" stroke-width=".8"/>'
        words = f"{chip.title}, ridge {digits(ridge(chip, axes.dtype))}"
        yield svg_text(_RIGHT + 11, y + 4, words, _TEXT, colour, SANS, more)


def _dot_marks(axes: _Axes, entries: Sequence[Entry]) -> Iterator[str]:
    """The dots, each with its time and share or, where there are several, with its number in the key."""
    places = collections.defaultdict(list)
    for number, entry in enumerate(entries, 1):
        if entry.x:
            x, y = axes.x(entry.x), axes.y(entry.y)
            line = f"M{px(x)} {px(y)}V{px(axes.y(entry.roof))}"
            yield f'<path d="{line}" stroke="var(--vermilion)" stroke-width="1"/>'
            places[x, y].append(str(number) if len(entries) > 1 else entry.words)
        elif len(entries) == 1:
            yield svg_text(_RIGHT - 8, _BOTTOM - 10, entry.words, _TEXT, "ink", SANS, END)
    for (x, y), words in places.items():
        ink = 'fill="var(--vermilion)" stroke="var(--paper)" stroke-width="1"'
        yield f'<circle cx="{px(x)}" cy="{px(y)}" r="5" {ink}/>'
        said = cut(", ".join(words), _MOST_WORDS, "…")
        left = min(x + 9, _RIGHT - len(said) * _TEXT * SANS_EM)  # below the dot, and below the slope to its left
        lower = 16 + min(14, 0.55 * (x + 9 - left))
        yield svg_text(left, min(y + lower, _BOTTOM - 4), said, _TEXT, "ink", SANS, _HALO)


def _key(entries: Sequence[Entry]) -> Iterator[str]:
    """The numbered dots by name, right of the axes and below the roofs' names."""
    shown = len(entries) if len(entries) <= _MOST_KEYS else _MOST_KEYS - 1
    x, y = _RIGHT + 11, _BOTTOM - _MOST_KEYS * (2 * _LINE + 2) + 30
    for entry in entries[:shown]:
        yield svg_text(x, y, cut(entry.label, _MOST_LABEL, "…"), _TEXT, "ink", SANS, BOLD)
        yield svg_text(x, y + _LINE - 1, entry.words, _SMALL, "ink", SANS)
        y += 2 * _LINE + 2
    if shown < len(entries):
        yield svg_text(x, y, f"and {len(entries) - shown} more in the table", _SMALL, "ink", SANS)
