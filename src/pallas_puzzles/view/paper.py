"""Where the blocks of an array lie on paper, and the ink they are drawn with: geometry and SVG, no traces."""

import base64
import dataclasses
import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# (on a light page, on a dark one). The first five are Okabe and Ito's palette, which every kind of colour vision can
# tell apart, and its lighter sisters; beside each colour stands a word. Text is drawn in ink, muted, blue or warning.
# An SVG takes them as var(--blue).
PALETTE = {
    "blue": ("#0072B2", "#56B4E9"),
    "orange": ("#E69F00", "#F0B43C"),
    "green": ("#009E73", "#2FC295"),
    "vermilion": ("#D55E00", "#FF8B4D"),
    "purple": ("#CC79A7", "#E29CC3"),
    "warning": ("#b14a00", "#ffa468"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#a3adb8"),
    "frame": ("#6b7580", "#8b949e"),
    "line": ("#c9d1d9", "#414952"),
    "tint": ("#cfe1ef", "#25537a"),
    "padding": ("#e6e8eb", "#30363d"),
    "paper": ("#fff", "#1b1f24"),
    "right": ("#d5efe5", "#1c4a3c"),
    "wrong": ("#fbdcc8", "#5c2f18"),
}

# The theme of a page that has one of its own: (light, dark) in JupyterLab, in Colab, in VS Code
HOSTS = (
    ("[data-jp-theme-light=true]", "[data-jp-theme-light=false]"),
    ("[theme=light]", "[theme=dark]"),
    (".vscode-light", ".vscode-dark"),
    (".vscode-high-contrast-light", ".vscode-high-contrast:not(.vscode-high-contrast-light)"),
)


# Rules by which everything of class "pallas" follows the theme of the page around it
_FOLLOW = "".join(
    f"{','.join(f'{host} .pallas' for host in hosts)}{{color-scheme:{name}}}"
    for name, hosts in zip(("light", "dark"), zip(*HOSTS, strict=True), strict=True)
)
# The palette for everything of class "pallas". A browser that does not know light-dark() keeps the light one
_LIGHT = ";".join(f"--{name}:{one}" for name, (one, _) in PALETTE.items())
_BOTH = ";".join(f"--{name}:light-dark({one},{other})" for name, (one, other) in PALETTE.items())
_COLOURS = f".pallas{{color-scheme:light dark;{_LIGHT}}}@supports(color:light-dark(red,red)){{.pallas{{{_BOTH}}}}}"

THEMES = f"<style>{_FOLLOW}</style>"  # for a page around an <img>, whose color-scheme the SVG in it follows
STYLE = f"<style>{_COLOURS}{_FOLLOW}</style>"  # in an SVG, wherever that is
GOOD, BAD, NEUTRAL = "#00795A", "#B84A00", "#59636E"  # white letters on them can be read, and they on any page
SANS, MONO = "system-ui,sans-serif", "ui-monospace,Menlo,Consolas,monospace"
MONO_EM, SANS_EM = 0.61, 0.6  # width of a character in units of the font size: that of the widest usual font
SMALL = f"margin:2px 12px 8px;font:12px {SANS}"
_LEAST_SCALE = 0.9  # 10 px, the size of most letters, must not become less than 9
BOLD, END = ' font-weight="700"', ' text-anchor="end"'


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of an array cut into blocks. All but `count` are in elements.

    count: how many block indices there are. pitch: from one block index to the next. extent: all blocks together.
    first, size: where the array lies in that.
    """

    count: int
    block: int
    pitch: int
    extent: int
    first: int
    size: int


def axes_of(shape: Sequence[int], dims: Sequence[Any]) -> list[Axis]:
    axes = []
    for size, d in zip(shape, dims, strict=True):
        if d.kind == "element":
            low, high = d.padding
            extent = max(1, size + low + high)
            axes.append(Axis(extent, max(1, d.size), 1, extent, low, size))
        else:
            axes += even_axes((size,), (d.size,))
    return axes


def even_axes(shape: Sequence[int], block: Sequence[int]) -> list[Axis]:
    pairs = [(n, max(1, b)) for n, b in zip(shape, block, strict=True)]
    counts = [max(1, -(-n // b)) for n, b in pairs]
    return [Axis(c, b, b, c * b, 0, n) for c, (n, b) in zip(counts, pairs, strict=True)]


_POINT = Axis(1, 1, 1, 1, 0, 1)
_MOST_GROUPS = 256
_STRIP_PX, _LABEL_PX, _LABEL_SIZE, _SMEAR_PX = 22.0, 12.0, 9.0, 2.5


class Map:
    """One array on paper, in px: the last two dimensions as a matrix, the leading ones as groups of such matrices.

    Groups are labelled above each one, or, in a table of two leading dimensions or more, at its top and left side.
    """

    def __init__(self, axes: Sequence[Axis]):
        self.axes = tuple(axes)
        self.lead = self.axes[:-2]
        self.rows = self.axes[-2] if len(axes) > 1 else _POINT
        self.cols = self.axes[-1] if axes else _POINT
        self.flat = len(axes) < 2
        self.folded: tuple[Axis, ...] = ()
        self.group_counts = [max(1, -(-a.extent // a.block)) for a in self.lead]
        self.groups = math.prod(self.group_counts)
        if self.groups > _MOST_GROUPS:  # one tall matrix, all of them below one another
            tall, n = self.rows, self.groups
            extent = n * tall.extent
            self.rows = Axis(n * tall.count, tall.block, tall.pitch, extent, 0, extent)
            self.lead, self.folded, self.groups, self.group_counts = (), (*self.lead, tall), 1, []
        self.gap, self.labelled, self.across = 0.0, False, 1

    # -- sizes

    def fit(self, box_w: float, box_h: float) -> float:
        """The largest scale, in px per element, at which the map fits the box. Settles how its groups are arranged."""
        for gap, labelled in ((8.0, True), (4.0, True), (2.0, False), (0.0, False)):
            self.gap, self.labelled = gap, labelled and self.groups > 1
            across = max(self._arrangements(), key=lambda across: self._scale_of(across, box_w, box_h))
            if (best := self._scale_of(across, box_w, box_h)) > 0:
                self.across = across
            if self.groups == 1 or min(best * self.cols.extent, best * self.rows.extent) >= 6:
                break
        return max(best, 1e-9)

    def _scale_of(self, across: int, box_w: float, box_h: float) -> float:
        down = -(-self.groups // across)
        left, top, above = self._margins(across)
        w = (box_w - left - self.gap * (across - 1)) / across
        h = (box_h - top - self.gap * (down - 1)) / down - above
        return min(w / self.cols.extent, math.inf if self.flat else h / self.rows.extent)

    def _arrangements(self) -> Iterable[int]:
        """How many groups may stand side by side: one, the last leading dimension, or any number if it is alone."""
        real = [n for n in self.group_counts if n > 1]
        return [real[-1], 1] if len(real) > 1 else range(1, min(self.groups, 64) + 1)

    def _margins(self, across: int) -> tuple[float, float, float]:
        """Space for labels: at the left, at the top, and above every group."""
        if not self.labelled:
            return 0.0, 0.0, 0.0
        wide = max(len(self._label(g)) for g in (0, self.groups - 1)) * _LABEL_SIZE * MONO_EM + 4
        if across == 1:
            return wide, 0.0, 0.0
        if len([n for n in self.group_counts if n > 1]) > 1:
            return wide, _LABEL_PX, 0.0
        return 0.0, 0.0, _LABEL_PX

    def scale(self, ratio: float, least_block: float = 0.0) -> None:
        """Fixes the sizes at so many px per element; slivers are widened until they can be seen.

        least_block: how high and wide a block has to be at the least, whatever its true proportions.
        """
        least = 12.0 if self.groups == 1 else 5.0
        self.group_w = max(least, ratio * self.cols.extent, least_block * self.cols.count)
        self.group_h = max(least, ratio * self.rows.extent, least_block * self.rows.count)
        self.group_h = _STRIP_PX if self.flat else self.group_h
        longest = max(len(self._label(g).rpartition(",")[2]) for g in range(self.across))
        if self.across > 1 and self.group_w + self.gap < longest * _LABEL_SIZE * MONO_EM:
            self.labelled = False
        down = -(-self.groups // self.across)
        self.left, self.top, self.above = self._margins(self.across)
        self.pitch_x, self.pitch_y = self.group_w + self.gap, self.group_h + self.gap + self.above
        self.w = self.left + self.pitch_x * self.across - self.gap
        self.h = self.top + self.pitch_y * down - self.gap
        self.unit_x = self.group_w / self.cols.extent * self.cols.pitch
        self.unit_y = self.group_h / self.rows.extent * self.rows.pitch
        self.block_w = max(2.0, min(self.group_w, self.group_w / self.cols.extent * self.cols.block))
        self.block_h = max(2.0, min(self.group_h, self.group_h / self.rows.extent * self.rows.block))

    # -- places

    def origin(self, group: int) -> tuple[float, float]:
        down, along = divmod(group, self.across)
        return self.left + along * self.pitch_x, self.top + down * self.pitch_y + self.above

    def _label(self, group: int) -> str:
        """'1, 0:2': the leading indices of a group, without dimensions of one."""
        index = np.unravel_index(group, self.group_counts) if self.lead else ()
        spans = [
            f"{i * a.block}" if a.block == 1 else f"{i * a.block}:{(i + 1) * a.block}"
            for i, a, n in zip(index, self.lead, self.group_counts, strict=True)
            if n > 1
        ]
        return ",".join(spans)

    def labels(self) -> str:
        if not self.labelled:
            return ""
        marks = []
        for g, (x, y) in enumerate(self._origins()):
            down, along = divmod(g, self.across)
            label = self._label(g)
            left, _, top = label.rpartition(",")
            if self.above or (self.top and down == 0):
                marks.append(svg_text(x, y - 3, label if self.above else top, _LABEL_SIZE, "muted"))
            if self.left and along == 0:
                words, middle = label if self.across == 1 else left, y + min(self.group_h / 2, 24) + 3
                marks.append(svg_text(self.left - 4, middle, words, _LABEL_SIZE, "muted", "", END))
        return "".join(marks)

    def place(self, block: Sequence[int]) -> tuple[float, float] | None:
        """Top left corner of a block, None if there is no such block."""
        if not all(0 <= i < a.count for i, a in zip(block, self.axes, strict=True)):
            return None
        if self.folded:
            row = 0
            for i, a in zip(block, self.folded, strict=False):
                row = row * a.count + i
            block = (row, block[-1])
        group = 0
        for i, a, n in zip(block, self.lead, self.group_counts, strict=False):
            group = group * n + min(n - 1, i * a.pitch // a.block)
        x, y = self.origin(group)
        row, col = (block[-2] if len(block) > 1 else 0), (block[-1] if block else 0)
        return (
            x + min(col * self.unit_x, self.group_w - self.block_w),
            y + min(row * self.unit_y, self.group_h - self.block_h),
        )

    # -- marks

    def paper(self) -> str:
        """The empty map: white arrays, grey padding beyond their edges, lines between blocks, labels of groups."""
        marks = []
        if self.rows.extent != self.rows.size or self.cols.extent != self.cols.size:
            sx, sy = self.group_w / self.cols.extent, self.group_h / self.rows.extent
            dx, dy, w, h = self.cols.first * sx, self.rows.first * sy, self.cols.size * sx, self.rows.size * sy
            inside = "".join(_box(x + dx, y + dy, w, h) for x, y in self._origins())
            marks.append(f'<path d="{self.frames()}" fill="var(--padding)"/>')
            marks.append(f'<path d="{inside}" fill="var(--paper)" stroke="var(--frame)" stroke-width="1.5"/>')
        if lines := self._lines():
            marks.append(f'<path d="{lines}" stroke="var(--line)" fill="none"/>')
        marks.append(f'<path d="{self.frames()}" stroke="var(--frame)" fill="none"/>{self.labels()}')
        return "".join(marks)

    def _origins(self) -> list[tuple[float, float]]:
        return [self.origin(g) for g in range(self.groups)]

    def frames(self) -> str:
        """The path around every group."""
        return "".join(_box(x, y, self.group_w, self.group_h) for x, y in self._origins())

    def _lines(self) -> str:
        """The path of the lines between blocks, without those that would be a smear."""
        lines = []
        rows = self.rows.count if self.rows.pitch == self.rows.block and self.unit_y >= _SMEAR_PX else 0
        cols = self.cols.count if self.cols.pitch == self.cols.block and self.unit_x >= _SMEAR_PX else 0
        for x, y in self._origins():
            lines += [f"M{px(x)} {px(y + i * self.unit_y)}h{px(self.group_w)}" for i in range(1, rows)]
            lines += [f"M{px(x + i * self.unit_x)} {px(y)}v{px(self.group_h)}" for i in range(1, cols)]
        return "".join(lines)

    def boxes(self, blocks: Iterable[Sequence[int]]) -> str:
        """One path around all these blocks."""
        places = map(self.place, dict.fromkeys(map(tuple, blocks)))
        return "".join(_box(*place, self.block_w, self.block_h) for place in places if place)


def _box(x: float, y: float, w: float, h: float) -> str:
    return f"M{px(x)} {px(y)}h{px(w)}v{px(h)}h-{px(w)}z"


def px(length: float) -> str:
    """A length for an SVG attribute, to a tenth."""
    text = f"{length:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def svg_text(x: float, y: float, words: str, size: float, colour: str = "ink", family: str = "", more: str = "") -> str:
    font = f' font-family="{family}"' if family else ""
    look = f'font-size="{px(size)}" fill="var(--{colour})"{font}{more}'
    return f'<text x="{px(x)}" y="{px(y)}" {look}>{html.escape(words)}</text>'


def swatch(colour: str, more: str = "") -> str:
    """A colour of a legend."""
    return f'<rect y="-9" width="11" height="11" rx="2" fill="{colour}"{more}/>'


def legend(entries: Iterable[tuple[str, str]], wide: float, y: float) -> tuple[list[str], float]:
    """(mark, words) side by side, from a baseline y on; (SVG, the last baseline). A mark lies on (0, 0)."""
    marks, x = [], 0.0
    for mark, words in entries:
        w = 34 + len(words) * 11 * 0.56
        if x and x + w > wide:
            x, y = 0.0, y + 17
        marks.append(
            f'<g transform="translate({px(x)},{px(y)})">{mark}</g>{svg_text(x + 16, y, words, 11, "ink", SANS)}'
        )
        x += w
    return marks, y


def card(w: float, h: float, marks: str) -> str:
    """A standalone SVG on a card, so that it can be read on any page. (0, 0) of the marks is its corner."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pallas" viewBox="0 0 {px(w)} {px(h)}" width="{px(w)}" '
        f'height="{px(h)}" font-family="{MONO}">{STYLE}<rect x=".5" y=".5" width="{px(w - 1)}" height="{px(h - 1)}" '
        f'rx="8" fill="var(--paper)" stroke="var(--line)"/>{marks}</svg>'
    )


def image(svg: str, alt: str) -> str:
    """An <img> that holds the SVG itself. On a narrow page it shrinks a little, so that it can be read, and scrolls."""
    data = base64.b64encode(svg.encode()).decode()
    least = round(_LEAST_SCALE * float(re.search(r'width="([\d.]+)"', svg)[1]))  # type: ignore[index]
    return (
        f'{THEMES}<div style="overflow-x:auto"><img class="pallas" alt="{html.escape(alt)}" '
        f'src="data:image/svg+xml;base64,{data}" '
        f'style="min-width:{least}px;max-width:100%;height:auto;display:block"></div>'
    )
