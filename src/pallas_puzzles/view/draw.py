"""A trace as a picture: HTML that works in Colab, Jupyter, VS Code, on GitHub and in a static page.

An untrusted notebook strips scripts, inline SVG, <style> and ids. So the picture is an <img> that carries its SVG in
its address, and a table with inline styles. The script, where it may run, puts the same SVG into the page and moves it.
"""

import dataclasses
import html
import itertools
import json
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.capture import Call, ForGpu, ForMesh, Operand, capture, wrapped
from ..ir.program import count_operations
from ..lens.machine import WRITTEN, Beyond, Trace, figures, listed, run_call
from ..lens.survey import clip, survey
from ..lens.tally import Tally, tally
from ..lens.watchdog import TimeLimit, time_limit
from ..text import LINES, capital, cut, plain, plural
from . import words
from .flights import flights
from .paper import (
    BOLD,
    END,
    MONO,
    MONO_EM,
    SANS,
    SANS_EM,
    SMALL,
    Map,
    axes_of,
    card,
    even_axes,
    image,
    legend,
    px,
    svg_text,
    swatch,
)
from .words import Block, block_words, moved_word, state_words

MAX_DRAWN_STEPS = 512
MAX_DRAWN_CALLS = 8
TIME_LIMIT_S = 20.0

_LEGEND = {  # what happens to a block: its colour, and that in words
    "fetched": ("var(--blue)", "fetched from HBM before the step"),
    "kept": ("var(--orange)", "kept in VMEM"),
    "written back": ("var(--green)", "written back to HBM after the step"),
    "out of range": ("var(--vermilion)", "out of range"),
    "own copy": ("var(--purple)", "copied by the kernel itself"),
    "visited": ("var(--tint)", "visited before"),
}
_COLOURS = {state: colour for state, (colour, _) in _LEGEND.items()}


# --- panels: the grid and the operands, side by side -----------------------------------------------------------------


@dataclasses.dataclass
class _Panel:
    """A map with its name above and what happens to its block below.

    blocks, states: by step, which block it is and what happens to it; blocks are None in HBM. copied: what that is
    called where a block is copied, "" for the grid. state_chars: the longest text between title and map.
    """

    map: Map
    title: str
    lines: list[str]
    blocks: Sequence[Block | None]
    states: list[str]
    copied: str
    state_chars: int
    x: float = 0.0
    y: float = 0.0

    @property
    def w(self) -> float:
        texts = [len(self.title) * 13 * MONO_EM, *(len(t) * 10 * MONO_EM for t in self.lines)]
        return max(self.map.w, 21 + self.state_chars * 11 * MONO_EM, *texts)

    @property
    def h(self) -> float:
        return _HEAD_PX + self.map.h


_HEAD_PX, _GAP_PX, _PAGE_PX = 72.0, 24.0, 800.0
_GRID_BOX, _BOX_H, _LEAST = (150.0, 150.0), 170.0, 64.0


def _panels(trace: Trace) -> list[_Panel]:
    """The grid, then the operands at one common scale where that leaves them large enough to see."""
    call = trace.call
    grid = Map(even_axes(call.grid, (1,) * len(call.grid)))
    grid.scale(min(grid.fit(*_GRID_BOX), 18.0 if len(call.grid) != 1 else 26.0))
    total = math.prod(call.grid)
    last = len(f"step {total - 1:,}{tuple(n - 1 for n in call.grid)}")
    indices = [tuple(map(int, index)) for index in trace.steps]
    states = [f"step {trace.first + s:,}" for s in range(max(1, trace.n))]
    panels = [_Panel(grid, "grid", [str(call.grid), plural(total, "step")], indices, states, "", last)]
    for k, o in enumerate(call.operands):
        axes = even_axes(o.shape, o.shape) if o.in_hbm else axes_of(o.shape, o.dims)
        block = "the whole array" if not o.in_hbm and o.block == o.shape else f"block {block_words(o)}"
        where = " in SMEM" if o.space == "smem" else ""
        lines = [str(o.shape), ("in HBM" if o.in_hbm else block) + where]
        blocks, states = trace.blocks[k], [state_words(trace, k, s) for s in range(trace.n)]
        wide = len("never touched")
        if not o.in_hbm and trace.n:
            wide = len("out of range" if "out of range" in states else moved_word(o)) + max(map(len, map(str, blocks)))
        panels.append(_Panel(Map(axes), o.name, lines, blocks, states or ["never touched"], moved_word(o), wide))
    _scale_together([p.map for p in panels[1:]], _PAGE_PX - panels[0].w)
    return panels


def _scale_together(maps: list[Map], page_w: float) -> None:
    widest = 230.0 if all(m.flat for m in maps) else 190.0
    box_w = min(widest, max(110.0, page_w / max(1, len(maps)) - _GAP_PX))
    fits = [m.fit(box_w, _BOX_H if len(maps) < 6 else 0.6 * _BOX_H) for m in maps]
    common = min(fits, default=1.0)
    for m, fit in zip(maps, fits, strict=True):
        longest = max(m.cols.extent * m.across, 1 if m.flat else m.rows.extent * -(-m.groups // m.across))
        m.scale(min(fit, max(common, _LEAST / longest)))


def _flow(panels: list[_Panel], top: float) -> tuple[float, float]:
    """Sets panels side by side, as many to a row as the page holds; returns the width and the bottom."""
    x, y, row_h, width = 0.0, top, 0.0, 0.0
    for p in panels:
        if x and x + p.w > _PAGE_PX + 1:
            x, y, row_h = 0.0, y + row_h + 20, 0.0
        p.x, p.y = x, y
        x += p.w + _GAP_PX
        row_h, width = max(row_h, p.h), max(width, x - _GAP_PX)
    return width, y + row_h


def _panel_svg(p: _Panel, step: int, number: int) -> str:
    m, state, block = p.map, p.states[step], p.blocks[step] if p.blocks else None
    colour = _COLOURS.get(state, "var(--frame)") if p.copied else "var(--ink)"
    place = m.place(block) if block is not None else None
    (x, y), hidden = (place, "") if place else ((0.0, 0.0), ' visibility="hidden"')
    sheet = m.paper()
    if p.copied and block is None:  # no pipeline cuts it into blocks
        sheet = f'<path d="{m.frames()}" fill="var(--padding)" stroke="var(--frame)" stroke-dasharray="4 3"/>'
    lines = "".join(svg_text(0, 29 + 13 * i, line, 10, "muted") for i, line in enumerate(p.lines))
    return (
        f'<g transform="translate({px(p.x)},{px(p.y)})" data-p="{number}">'
        f'{svg_text(0, 14, p.title, 13, "ink", "", BOLD)}{lines}<rect data-k="m" y="52" '
        f'width="10" height="10" rx="2" fill="{colour}"/>'
        f'<text x="15" y="61" font-size="11" fill="var(--ink)"><tspan data-k="w" font-weight="700">{state}</tspan>'
        f'<tspan data-k="b" dx="6">{block if block is not None else ""}</tspan></text>'
        f'<g transform="translate(0,{px(_HEAD_PX)})">{sheet}'
        f'<path data-k="v" fill="var(--tint)" fill-opacity=".8" stroke="var(--blue)" stroke-opacity=".3" '
        f'd="{m.boxes(b for b in p.blocks[:step] if b is not None)}"/>'
        f'<rect data-k="r" x="{px(x)}" y="{px(y)}" width="{px(m.block_w)}" height="{px(m.block_h)}" fill="{colour}" '
        f'fill-opacity=".85" stroke="{colour}" stroke-width="1.5"{hidden}/></g></g>'
    )


# --- the strip: which step moves which block -------------------------------------------------------------------------

_LANE_PX = 19.0


@dataclasses.dataclass
class _Strip:
    """One lane per pipelined operand, one cell per step."""

    lanes: list[tuple[str, list[str]]]  # name, and what happens at each step: a key of _COLOURS
    n: int
    label_w: float
    cell: float

    @property
    def w(self) -> float:
        return self.label_w + self.cell * self.n

    @property
    def h(self) -> float:
        return _LANE_PX * len(self.lanes) + 18


def _strip(trace: Trace, panels: list[_Panel]) -> _Strip:
    n, operands = trace.n, zip(panels[1:], trace.call.operands, strict=True)
    lanes = [(p.title, p.states[:n]) for p, o in operands if not o.in_hbm]
    if any(trace.dma_bytes):
        lanes.append(("own copies", ["own copy" if nbytes else "" for nbytes in trace.dma_bytes[:n]]))
    label_w = max((len(name) for name, _ in lanes), default=4) * 11 * MONO_EM + 14
    return _Strip(lanes, n, label_w, min(22.0, (_PAGE_PX - label_w) / max(1, n)))


def _strip_svg(strip: _Strip, trace: Trace, step: int) -> str:
    cell, x0 = strip.cell, strip.label_w
    gap = 1.5 if cell >= 5 else 0.0
    bottom = _LANE_PX * len(strip.lanes)
    marks = [_separators(strip, trace, bottom)]
    for i, (name, states) in enumerate(strip.lanes):
        y = _LANE_PX * i + _LANE_PX / 2
        marks.append(svg_text(0, y + 4, name, 11))
        marks.append(_lane_svg(states, x0, y, cell, gap))
    marks.append(
        f'<rect data-k="c" x="{px(x0 + step * cell - 1)}" y="-1" width="{px(max(cell - gap, 2.0) + 2)}" '
        f'height="{px(bottom + 2)}" fill="none" stroke="var(--ink)" stroke-width="1.5" rx="2"/>'
    )
    return "".join(marks) + _ticks(strip, bottom + 13, trace.first)


def _lane_svg(states: list[str], x0: float, y: float, cell: float, gap: float) -> str:
    """One path per colour; dashes cut a run of equal cells into its steps."""
    runs: dict[str, list[str]] = {}
    first = 0
    for state, group in itertools.groupby(states):
        length = len(list(group))
        runs.setdefault(state, []).append(f"M{px(x0 + first * cell)} {px(y)}h{px(length * cell - gap)}")
        first += length
    dash = f' stroke-dasharray="{cell - gap:.2f} {gap:.2f}"' if gap else ""
    return "".join(
        f'<path d="{"".join(run)}" stroke="{_COLOURS[state]}" stroke-width="{3 if state == "kept" else 13}"{dash}/>'
        for state, run in runs.items()
        if state
    )


def _separators(strip: _Strip, trace: Trace, bottom: float) -> str:
    """A line wherever the last grid axis starts again, unless the lines would be a smear."""
    grid = trace.call.grid
    inner = grid[-1] if len(grid) > 1 else 0
    if inner < 2 or inner * strip.cell < 10:
        return ""
    again = range(inner - trace.first % inner if trace.first % inner else inner, strip.n, inner)
    xs = [strip.label_w + s * strip.cell - 0.75 for s in again]
    path = "".join(f"M{px(x)} 0v{px(bottom)}" for x in xs)
    return f'<path d="{path}" stroke="var(--line)"/>' if path else ""


def _ticks(strip: _Strip, y: float, first: int) -> str:
    room = len(str(first + strip.n - 1)) * 10 * MONO_EM + 8
    every = next((e for e in (1, 2, 4, 8, 16, 32, 64, 128, 256) if e * strip.cell >= room), 512)
    middles = ((s, strip.label_w + (s + 0.5) * strip.cell) for s in range(0, strip.n, every))
    free = room / 2 + len("step") * 10 * MONO_EM  # the label's own place
    ticks = "".join(f'<text x="{px(x)}" y="{px(y)}">{first + s}</text>' for s, x in middles if x > free)
    label = svg_text(0, y, "step", 10, "muted")
    return f'{label}<g font-size="10" fill="var(--muted)" text-anchor="middle">{ticks}</g>'


# --- the whole picture as SVG ----------------------------------------------------------------------------------------

_MARGIN = 16.0


def _drawing(trace: Trace, step: int) -> tuple[str, list[_Panel], _Strip]:
    panels = _panels(trace)
    width, y = _flow(panels, 50)
    strip = _strip(trace, panels)
    name, about, window = trace.call.name, words.title_words(trace.call), words.window_words(trace)
    beside = len(window) * 12 * SANS_EM
    width = max(width, strip.w, len(name) * 15 * MONO_EM + 12 + beside, len(about) * 12 * SANS_EM, 420.0)
    body = [svg_text(0, 15, name, 15, "ink", "", BOLD), svg_text(0, 34, about, 12, "muted", SANS)]
    if window:
        body.append(svg_text(width, 15, window, 12, "warning", SANS, END + BOLD))
    body += [_panel_svg(p, step, i) for i, p in enumerate(panels)]
    y += 20
    if strip.n and strip.lanes:
        body.append(f'<g transform="translate(0,{px(y)})">{_strip_svg(strip, trace, step)}</g>')
        y += strip.h + 14
    used = {"visited"}.union(*(states for _, states in strip.lanes))
    keys, y = legend([(swatch(colour), about) for s, (colour, about) in _LEGEND.items() if s in used], width, y + 9)
    body += keys
    w, h = width + 2 * _MARGIN, y + 5 + 2 * _MARGIN - 4
    marks = f'<g transform="translate({px(_MARGIN)},{px(_MARGIN - 2)})">{"".join(body)}</g>'
    return card(w, h, marks), panels, strip


def alt_words(trace: Trace, step: int = 0) -> str:
    """The picture in words."""
    call = trace.call
    parts = [f"{'Pipeline' if call.inside else 'Kernel'} {call.name}, {words.title_words(call)}."]
    if window := words.window_words(trace):
        parts.append(f"Drawn are {window}.")
    if trace.n:
        parts.append(f"{capital(words.step_words(trace, step))}.")
    counts, rows = [], figures(trace).operands
    for k, o in enumerate(call.operands):
        if not o.in_hbm:
            count = plural(rows[k].moves, "time") if rows[k].exact else f"{words.moves_words(rows[k])} times"
            counts.append(f"{o.name} {o.shape} in blocks {block_words(o)} is {moved_word(o)} {count}")
    return " ".join([*parts, "; ".join(counts) + "." if counts else ""]).strip()


# --- HTML ------------------------------------------------------------------------------------------------------------

LEFT, RIGHT = "text-align:left;padding:2px 12px", "text-align:right;padding:2px 12px"
FONT = f";font-size:13px;font-family:{SANS}"
_RULE = "border-bottom:1px solid rgba(128,128,128,.35)"


_CELLS = {  # by where the words are: to the left, to the right, as code, as code that heads the row, on several lines
    "<": f'<td style="{LEFT}">{{}}</td>',
    ">": f'<td style="{RIGHT}">{{}}</td>',
    "c": f'<td style="{LEFT}"><code>{{}}</code></td>',
    "h": f'<th scope="row" style="{LEFT}"><code>{{}}</code></th>',
    "w": f'<td style="{LEFT};white-space:normal;overflow-wrap:anywhere;min-width:12em"><code>{{}}</code></td>',
}


def cells_html(cells: Iterable[str], sides: str) -> list[str]:
    """The cells of a row. sides: a letter for each of them, see _CELLS."""
    return [_CELLS[side].format(html.escape(cell)) for cell, side in zip(cells, sides, strict=True)]


def html_table(heads: Mapping[str, str], rows: Iterable[Iterable[str]], sides: str) -> str:
    """A table that scrolls; colours are the page's own. heads: words -> what they mean, "" where that is plain."""
    head = [
        f'<th scope="col" style="{RIGHT if side == ">" else LEFT}" title="{html.escape(about)}">{name}</th>'
        for (name, about), side in zip(heads.items(), sides, strict=True)
    ]
    body = "".join(row_html(cells) for cells in [head, *(cells_html(row, sides) for row in rows)])
    style = f"border-collapse:collapse;white-space:nowrap;margin:6px 0;font:12px {SANS}"
    return f'<div style="overflow-x:auto"><table style="{style}">{body}</table></div>'


def row_html(cells: Iterable[str]) -> str:
    return f'<tr style="{_RULE}">{"".join(cells)}</tr>'


def table(rows: Sequence[str], more: str = "") -> str:
    """Rows as a small table within a card."""
    style = f"border-collapse:collapse;margin:4px 0;font-size:12px;border:0{more}"
    return f'<table style="{style}">{"".join(rows)}</table>' if rows else ""


def card_html(colour: str, inner: str, more: str = "") -> str:
    style = f"border-left:5px solid {colour};padding:6px 14px;margin:6px 0;max-width:60em;line-height:1.45{more}"
    return f'<div style="{style}">{inner}</div>'


def source_html(place: str, text: str) -> str:
    """A line of the reader's, after where it is."""
    return (
        f'<div style="margin:5px 0;padding:3px 10px;background:rgba(128,128,128,.14);border-radius:4px;overflow-x:auto;'
        f'display:flex;flex-wrap:wrap;column-gap:1.5em;white-space:pre;font-family:{MONO};font-size:92%">'
        f'<span style="opacity:.75">{html.escape(place)}</span>   <span>{html.escape(text)}</span></div>'
    )


def _html_of(trace: Trace) -> str:
    """The image shows the step half way through, where there is most to see; the script starts at the first."""
    half = trace.n // 2
    svg, panels, strip = _drawing(trace, half)
    costs = figures(trace)
    table = html_table(words.HEADS, words.table_rows(trace, costs), "h" + words.SIDES[1:])
    uid = f"pp{secrets.token_hex(5)}"
    script = f"<script>{_script(trace, panels, strip, uid)}</script>" if trace.n > 1 else ""
    return (
        f'<div id="{uid}" style="margin:4px 0">{image(svg, alt_words(trace, half))}'
        f'{table}<div style="{SMALL}"><b>{html.escape(words.totals_words(trace, costs))}</b></div>{script}</div>'
    )


def _script_panel(p: _Panel) -> dict[str, Any]:
    """For the script: a panel's blocks (u: x, y, index; x null out of range), and per step which (s), moved (m)?"""
    if None in p.blocks:
        return {"n": p.title}
    keys = [(block or (), state != "out of range") for block, state in zip(p.blocks, p.states, strict=True)]
    about = {"v": p.copied, "m": "".join(str(int(state == p.copied)) for state in p.states)} if p.copied else {}
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    places = [(p.map.place(block) if inside else None) or (None, None) for block, inside in number]
    blocks = [[x and round(x, 1), y and round(y, 1), *block] for (x, y), (block, _) in zip(places, number, strict=True)]
    size = [round(p.map.block_w, 1), round(p.map.block_h, 1)]
    return {"n": p.title, "u": blocks, "s": [number[key] for key in keys], "z": size, **about}


def _script(trace: Trace, panels: list[_Panel], strip: _Strip, uid: str) -> str:
    told = [*map(_script_panel, panels)]
    data = {"n": strip.n, "f": trace.first, "c": round(strip.cell, 3), "x": round(strip.label_w - 1, 2), "p": told}
    sent = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return _SCRIPT.replace("@CONTROLS", _CONTROLS).replace("@UID", uid).replace("@DATA", sent)


_THUMB = "width:16px;height:16px;border-radius:50%;border:2px solid var(--paper);background:var(--blue)"
_CONTROLS = (
    ".pallas-steps{display:flex;gap:6px;align-items:center}"
    ".pallas-steps button{display:flex;gap:6px;align-items:center;height:30px;padding:0 10px;font:inherit;"
    "color:var(--ink);background:var(--paper);border:1px solid var(--frame);border-radius:6px;cursor:pointer}"
    ".pallas-steps button:last-child{min-width:5em}.pallas-steps button:hover{border-color:var(--blue)}"
    ".pallas-steps :focus-visible{outline:2px solid var(--blue);outline-offset:2px}"
    ".pallas-steps input{flex:1;min-width:80px;height:6px;margin:0 6px;border-radius:3px;appearance:none;"
    "cursor:pointer;background:linear-gradient(var(--blue),var(--blue)) 0/var(--done) 100% no-repeat var(--line)}"
    f".pallas-steps input::-webkit-slider-thumb{{appearance:none;{_THUMB}}}"
    f".pallas-steps input::-moz-range-thumb{{box-sizing:border-box;{_THUMB}}}"
)

_SCRIPT = """(() => {
const D = @DATA, C = {fetched: "var(--blue)", kept: "var(--orange)", "written back": "var(--green)",
  "out of range": "var(--vermilion)"};
function start(root) {
  const img = root.querySelector("img"); if (!img || root.dataset.live) return; root.dataset.live = 1;
  const box = document.createElement("div"), ui = document.createElement("div");
  box.innerHTML = new TextDecoder().decode(Uint8Array.from(atob(img.src.split(",")[1]), c => c.charCodeAt(0)));
  const svg = box.firstElementChild; svg.setAttribute("role", "img"); svg.style.cssText = img.style.cssText;
  ui.className = "pallas"; ui.style.cssText = "font:13px system-ui,sans-serif;margin:8px 0 4px;max-width:" +
    svg.getAttribute("width") + "px";
  const icon = d => '<svg width="12" height="12" aria-hidden="true"><path d="' + d + '" fill="currentColor"/></svg>';
  const PLAY = icon("M2 1l9 5-9 5z") + "play", STOP = icon("M2 2h8v8H2z") + "stop";
  ui.innerHTML = `<style>@CONTROLS</style><div class="pallas-steps">
    <button type="button" aria-label="previous step">${icon("M9 1L2 6l7 5z")}</button>
    <button type="button" aria-label="next step">${icon("M3 1l7 5-7 5z")}</button>
    <input type="range" min="0" aria-label="grid step"><button type="button"></button></div>
    <div role="status" style="min-height:2.6em;margin:6px 2px"></div>`;
  const [prev, next, play] = ui.querySelectorAll("button"), range = ui.querySelector("input");
  const status = ui.querySelector("[role=status]"), cursor = svg.querySelector('[data-k="c"]');
  const panels = D.p.map((p, q) => { const g = svg.querySelector('[data-p="' + q + '"]'), e = {};
    g.querySelectorAll("[data-k]").forEach(x => e[x.dataset.k] = x); return e });
  let timer = 0; range.max = D.n - 1;
  ui.onkeydown = e => e.stopPropagation();  // the page's own shortcuts: an arrow key would leave the cell
  ui.dataset.lmSuppressShortcuts = true;    // the same to JupyterLab
  function go(k) {
    k = Math.max(0, Math.min(D.n - 1, k)); range.value = k; let say = "";
    D.p.forEach((p, q) => {
      if (q) say += q == 1 ? ": " : "; ";
      if (!p.s) { say += p.n + " stays in HBM"; return }
      const e = panels[q], [x, y, ...b] = p.u[p.s[k]], out = x === null;
      const word = !q ? "step " + (D.f + k).toLocaleString("en") : out ? "out of range" : p.m[k] == "0" ? "kept" : p.v;
      const ink = q ? C[word] : "var(--ink)", name = "(" + b.join(", ") + (b.length == 1 ? ",)" : ")");
      if (!out) { e.r.setAttribute("x", x); e.r.setAttribute("y", y) }
      e.r.setAttribute("visibility", out ? "hidden" : "visible");
      e.r.setAttribute("fill", ink); e.r.setAttribute("stroke", ink); e.m.setAttribute("fill", ink);
      e.v.setAttribute("d", [...new Set(p.s.slice(0, k))].map(i => p.u[i]).filter(u => u[0] !== null).map(u =>
        "M" + u[0] + " " + u[1] + "h" + p.z[0] + "v" + p.z[1] + "h-" + p.z[0] + "z").join(""));
      e.w.textContent = word; e.b.textContent = name;
      say += q ? p.n + " block " + name + " " + word : word + ", grid index " + name });
    if (cursor) cursor.setAttribute("x", (D.x + k * D.c).toFixed(1));
    status.textContent = say; svg.setAttribute("aria-label", say);
    range.setAttribute("aria-valuetext", say.split(":")[0]);
    range.style.setProperty("--done", 100 * k / (D.n - 1) + "%")
  }
  function stop() {
    clearInterval(timer); timer = 0; play.innerHTML = PLAY; status.setAttribute("aria-live", "polite") }
  const turn = k => { stop(); go(k) };
  range.oninput = () => turn(+range.value); prev.onclick = () => turn(+range.value - 1);
  next.onclick = () => turn(+range.value + 1);
  play.onclick = () => {
    if (timer) return stop();
    if (+range.value >= D.n - 1) go(0);
    play.innerHTML = STOP; status.setAttribute("aria-live", "off");
    timer = setInterval(() => { if (!root.isConnected || +range.value >= D.n - 1) stop(); else go(+range.value + 1) },
      Math.max(60, Math.min(450, 24000 / D.n))) };
  img.replaceWith(box); box.parentNode.after(ui); stop(); go(0)
}
document.querySelectorAll("[id=@UID]").forEach(start) })()"""


def sentence_html(sentence: str) -> str:
    return f'<div style="margin:4px 0;font:13px {SANS}">{html.escape(sentence)}</div>' if sentence else ""


# --- right and wrong blocks ------------------------------------------------------------------------------------------


def tile_map_svg(operand: Operand, status: Mapping[Block, str]) -> str:
    """The blocks of an output: right ones tinted, wrong ones crossed. status: block -> "ok" or what is wrong."""
    m = Map(even_axes(operand.shape, operand.shape if operand.in_hbm else operand.block))
    ratio = min(m.fit(300, 190), 46 / max(1, min(m.rows.block, m.cols.block)))
    most = max(m.rows.count * -(-m.groups // m.across), m.cols.count * m.across)
    m.scale(ratio, least_block=min(18.0, 300 / most))
    right = [b for b, word in status.items() if word == "ok"]
    wrong = [b for b, word in status.items() if word != "ok"]
    w, h = px(m.block_w), px(m.block_h)
    corners = (place for place in map(m.place, wrong) if place)
    crosses = "".join(f"M{px(x)} {px(y)}l{w} {h}M{px(x + m.block_w)} {px(y)}l-{w} {h}" for x, y in corners)
    marks = [
        m.paper(),
        f'<path d="{m.boxes(right)}" fill="var(--right)" stroke="var(--line)"/>',
        f'<path d="{m.boxes(wrong)}" fill="var(--wrong)" stroke="var(--vermilion)"/>',
        f'<path d="{crosses}" stroke="var(--vermilion)" stroke-width="1.5" fill="none"/>',
        f'<path d="{m.frames()}" stroke="var(--frame)" fill="none"/>',
    ]
    note = f"{operand.name}: {len(wrong)} of {plural(len(status), 'block')} wrong"
    drawn = f'<g transform="translate(0,32)">{"".join(marks)}</g>'
    wide = max(m.w, len(note) * 12 * MONO_EM) + 24
    return card(wide, m.h + 46, f'<g transform="translate(12,0)">{svg_text(0, 20, note, 12)}{drawn}</g>')


def tile_map_html(operand: Operand, status: Mapping[Block, str]) -> str:
    """The blocks of an output as an image, its words below."""
    told = words.tile_map_words(status)
    picture = image(tile_map_svg(operand, status), f"{operand.name}: {told}")
    return f'{picture}<div style="font-size:92%;opacity:.8;margin-top:4px">{html.escape(told)}</div>'


# --- showing ---------------------------------------------------------------------------------------------------------


def running_shell() -> Any:
    """The IPython that runs this code, None outside of one. Imports nothing."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


class Displayed:
    """Shows itself in IPython, once per cell: as a call's own display, or as the last expression of the cell."""

    _emitted_at: int | None = None

    def text(self) -> str:
        """It in characters, for a terminal."""
        raise NotImplementedError

    def __str__(self) -> str:
        return plain(self.text(), getattr(sys.stdout, "encoding", None))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _mimebundle(self) -> dict[str, Any]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def display(self) -> None:
        """Displays in IPython now."""
        from IPython.display import display

        display(self._mimebundle(), raw=True)

    def _ipython_display_(self) -> None:
        shell, emitted_at, self._emitted_at = running_shell(), self._emitted_at, None
        if shell is None or emitted_at != shell.execution_count:
            self.display()


@dataclasses.dataclass(eq=False, repr=False)
class Picture(Displayed):
    """What `show` returns: one drawing per pallas_call. `note`: what is missing and why."""

    traces: list[Trace]
    note: str = ""
    # of the steps that are drawn, where they are more than MAX_DRAWN_STEPS
    first_step: int = dataclasses.field(default=0, kw_only=True)

    @property
    def empty(self) -> bool:
        return not self.traces

    def _drawn(self, traces: Iterable[Trace]) -> Iterator[Trace]:
        """What is drawn: the steps that there is room for, and the pipelines inside of each kernel after it."""
        return (clip(trace, self.first_step, MAX_DRAWN_STEPS) for trace in _one_by_one(traces))

    def svg(self, step: int = 0, call: int = 0) -> str:
        """One call, or one pipeline inside of a call, at one of the drawn steps as a standalone SVG file."""
        return _drawing(list(self._drawn(self.traces))[call], step)[0]

    def text(self) -> str:
        """The picture in characters: tables, tile maps half way through, strips."""
        parts = [self.note]
        for t in self._drawn(self.traces[:MAX_DRAWN_CALLS]):
            if (chart := flights(t)) is not None:
                parts.append("\n".join(chart.lines()))
            parts.append("\n".join(words.text_lines(t, LINES - (2 if self.note else 0))))
        return "\n\n".join(filter(None, [*parts, self._left_out()]))

    def _left_out(self) -> str:
        """What is not in the drawings."""
        more, parts = len(self.traces) - MAX_DRAWN_CALLS, []
        if any(math.prod(t.call.grid) > MAX_DRAWN_STEPS for t in self.traces):
            steps = f"{MAX_DRAWN_STEPS} steps are drawn, the table counts all of them"
            parts.append(f"{steps}: show(..., first_step=n) draws those from step n on")
        if more > 0:
            parts.append(f"and {plural(more, 'more call')} that {'is' if more == 1 else 'are'} not drawn")
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        parts = []
        for trace in self._drawn(self.traces[:MAX_DRAWN_CALLS]):
            chart = flights(trace)
            parts += [chart.html() if chart is not None else "", _html_of(trace)]
        return "".join(parts) + sentence_html(self.note) + sentence_html(self._left_out())


def _one_by_one(traces: Iterable[Trace]) -> Iterator[Trace]:
    for trace in traces:
        yield trace
        yield from _one_by_one(p.traces[0] for p in trace.pipelines if p.traces)


def look(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], plan_only: bool = False, first_step: int = 0
) -> Picture:
    """Runs the function in the lens; whatever goes wrong becomes the picture's note. Raises ForGpu at a kernel for a
    GPU, ForMesh at several devices: see timeline.timeline, devices.on_devices."""
    traces: list[Trace] = []
    notes: list[str] = []

    def on_call(call: Call, eqn: Any, values: list[Any]) -> list[Any]:
        trace = _run(call, plan_only, first_step, notes)
        if call.scalar_names and any(t.total is not None for t in traces):
            steer = f"The scalars that steer {call.name}"
            notes.append(f"{steer} may come from a kernel that was not run: zeros are taken.")
        traces.append(trace)
        return list(trace.outputs) or [np.zeros(o.shape, o.dtype) for o in call.outs]

    name = name_of(fn)
    try:
        with time_limit(TIME_LIMIT_S, name):
            capture(fn, *args, on_call=on_call, **kwargs)
    except (ForGpu, ForMesh):
        raise
    except (Exception, TimeLimit) as error:
        notes.append(reason(error, name, nothing=not traces))
    else:
        if not traces:
            notes.append(f"Nothing to show yet: {name} reaches no pallas_call.")
    for t in traces:
        for o, state in zip(t.call.outs, t.state, strict=False):
            if t.n and math.prod(o.shape) and not (state.seen() == WRITTEN).any():
                notes.append(f"{t.call.name} has not stored anything in {o.name} yet.")
    return Picture(traces, " ".join(dict.fromkeys(notes)), first_step=first_step)


def _run(call: Call, plan_only: bool, first_step: int, notes: list[str]) -> Trace:
    if plan_only:
        return run_call(call, plan_only=True)
    counted = tally(call)
    if _quick(call, counted):
        try:
            return run_call(call)
        except Beyond as error:
            notes.append(f"The lens cannot follow {error}: the blocks are drawn, the arithmetic is not counted.")
            return run_call(call, plan_only=True)
    trace = survey(call, counted, first_step, MAX_DRAWN_STEPS)
    if counted.copies:
        notes.append(f"{call.name} is too long to be run here: the copies that it makes itself are not counted.")
    return trace


_RUN_S = 1.0  # so long may a kernel take to be run for its picture, by this estimate:
_OPERATION_S, _FLOP_S, _MXU_FLOP_S = 15e-6, 1e-9, 3e-11


def _quick(call: Call, counted: Tally) -> bool:
    """Whether a kernel can be run while somebody waits for its picture."""
    operations = count_operations(call.kernel) + 3 * len(call.operands)
    products = sum(counted.mxu_flops.values())
    work_s = products * _MXU_FLOP_S + (counted.flops - products + counted.transcendentals) * _FLOP_S
    return math.prod(call.grid) * operations * _OPERATION_S + work_s <= _RUN_S


def tried(
    fn: Callable[..., Any], run: Callable[[], Any], findings_of: Callable[[Any], Iterable[Any]]
) -> tuple[Any, str]:
    """(what a machine makes of a function, None where that goes wrong; in a sentence, what is wrong)."""
    name = name_of(fn)
    try:
        with time_limit(TIME_LIMIT_S, name):
            made = run()
    except (Exception, TimeLimit) as error:
        return None, reason(error, name, nothing=True)
    wrong = next(iter(findings_of(made.findings)), None)
    where = f" ({wrong.line})" if wrong is not None and wrong.line is not None else ""
    return made, f"{wrong.cause}{where}" if wrong is not None else ""


def name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(wrapped(fn), "__name__", "") or "the function")


def still_to_be_written(holes: Sequence[str]) -> str:
    return f"{listed(holes)} {'is' if len(holes) == 1 else 'are'} still to be written"


def reason(error: BaseException, name: str, nothing: bool) -> str:
    """One calm sentence."""
    from ..diagnose.errors import explain_error

    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    finding = explain_error(error) if isinstance(error, Exception) else None
    where = f" ({finding.line})" if finding is not None and finding.line is not None else ""
    start = "Nothing to show yet" if nothing else "There is more, which cannot be shown yet"
    if isinstance(error, Beyond):
        return f"{start}: the lens cannot follow {error}"
    if finding is not None and finding.kind != "error":
        return f"{start}: {name} stopped{where}. {finding.cause}"
    return f"{start}: {name} stopped with {type(error).__name__}{f': {cut(first, 200)}' if first else ''}{where}"
