"""A curve that grows while something is trained: a picture in a notebook, a line of text in a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..text import plain
from .draw import image, running_shell
from .paper import END, SANS, card, px, svg_text

_WIDE, _HIGH, _LEFT, _TOP, _RIGHT, _BOTTOM = 560.0, 240.0, 48.0, 56.0, 540.0, 210.0  # px
_LOOKS = (("blue", ""), ("vermilion", "6 4"), ("green", "2 3"))  # colour and dashes: each differs in both
_PAUSE_S = 0.3  # between two pictures
_COLUMNS, _ROWS = 60, 12  # of the text


class Curve:
    """curve(value) adds a point and shows how far things are: a bar, the time, what is left, and the curve so far.

    steps: how many points there will be; the last one is always shown. name: of the quantity. beside: name -> finished
    curves to draw along with it. In a terminal one line is rewritten, and the curve is printed at the end; where
    neither is there, only the end is.
    """

    def __init__(self, steps: int, name: str = "loss", beside: Mapping[str, Sequence[float]] | None = None) -> None:
        self.steps, self.name = steps, name
        self.values: list[float] = []
        self.beside = {label: [*map(float, values)] for label, values in (beside or {}).items()}
        self._began, self._shown, self._handle = time.monotonic(), -math.inf, None

    def __call__(self, value: Any) -> None:
        self.values.append(float(value))
        now = time.monotonic()
        if now - self._shown >= _PAUSE_S or len(self.values) >= self.steps:
            self._shown = now
            self._show()

    def _show(self) -> None:
        if running_shell() is not None:
            from IPython.display import HTML, display

            if self._handle is None:
                self._handle = display(HTML(self._repr_html_()), display_id=True)
            else:
                self._handle.update(HTML(self._repr_html_()))
            return
        ended = len(self.values) >= self.steps
        if sys.stdout.isatty():
            print(f"\r{plain(self.status(), sys.stdout.encoding)}", end="\n" if ended else "", flush=True)
        if ended:
            print(plain(str(self), sys.stdout.encoding))

    def status(self) -> str:
        """The bar, the step, the last value, and the seconds that have gone and are left."""
        done, gone = len(self.values), time.monotonic() - self._began
        full = round(24 * done / self.steps)
        left = gone / done * (self.steps - done) if done else math.nan
        last = f"{self.name} {self.values[-1]:.4f}" if done else ""
        time_words = f"{gone:.0f} s" + (f", {left:.0f} s left" if done < self.steps else "")
        return f"[{'#' * full}{'.' * (24 - full)}] {done}/{self.steps}  {last}  {time_words}   "

    def __str__(self) -> str:
        """The curves as text: `o` this one, letters the others, `=` where two meet."""
        curves = {**self.beside, self.name: self.values}
        high = _high(curves.values())
        grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
        marks = {label: "o" if label == self.name else label[:1] for label in curves}
        for label, values in curves.items():
            for column in range(_COLUMNS):
                step = column * self.steps // _COLUMNS
                if step < len(values) and math.isfinite(values[step]):
                    row = grid[_ROWS - 1 - min(_ROWS - 1, int(values[step] / high * _ROWS))]
                    row[column] = marks[label] if row[column] in (" ", marks[label]) else "="
        lines = [f"{high * (_ROWS - n) / _ROWS:7.2f} |{''.join(row).rstrip()}" for n, row in enumerate(grid)]
        key = "   ".join(f"{mark} {label}" for label, mark in marks.items())
        return "\n".join([*lines, f"        +{'-' * _COLUMNS} {self.steps} steps", f"         {key}"])

    def _repr_html_(self) -> str:
        return image(self.svg(), f"{self.name}: {self.status()}")

    def svg(self) -> str:
        """The bar and the curves, as a standalone SVG."""
        curves = {self.name: self.values, **self.beside}
        high, share = _high(curves.values()), len(self.values) / self.steps
        marks = [svg_text(_LEFT, 20, self.status().partition("] ")[2].strip(), 12, "ink", SANS)]
        for part, colour in ((1, "padding"), (share, "blue")):
            size = f'width="{px(part * (_RIGHT - _LEFT))}" height="8" rx="4"'
            marks.append(f'<rect x="{px(_LEFT)}" y="28" {size} fill="var(--{colour})"/>')
        for tick in (0, 0.5, 1):
            y = _BOTTOM - tick * (_BOTTOM - _TOP)
            marks.append(f'<path d="M{px(_LEFT)} {px(y)}H{px(_RIGHT)}" stroke="var(--line)"/>')
            marks.append(svg_text(_LEFT - 6, y + 4, f"{tick * high:.3g}", 10.5, "muted", SANS, END))
        for number, (label, values) in enumerate(curves.items()):
            colour, dashes = _LOOKS[number % len(_LOOKS)]
            across, up = (_RIGHT - _LEFT) / max(1, self.steps - 1), (_BOTTOM - _TOP) / high
            seen = [(n, v) for n, v in enumerate(values[: self.steps]) if math.isfinite(v)]
            points = [f"{px(_LEFT + n * across)} {px(_BOTTOM - v * up)}" for n, v in seen]
            if points:
                dash = f' stroke-dasharray="{dashes}"' if dashes else ""
                path = f'd="M{"L".join(points)}" fill="none" stroke="var(--{colour})" stroke-width="1.8"{dash}'
                marks.append(f"<path {path}/>")
            marks.append(svg_text(_RIGHT - 130, _TOP + 14 + 16 * number, label, 12, colour, SANS))
        return card(_WIDE, _HIGH, "".join(marks))


def _high(curves: Any) -> float:
    """The top of the picture: the largest of all values."""
    return max((v for values in curves for v in values if math.isfinite(v)), default=1.0) or 1.0
