"""What a check found, as a value, as text for a terminal and as HTML for a notebook."""

import base64
import dataclasses
import html
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .lens.capture import Operand, SourceLine
    from .lens.diagnose import Finding
    from .lens.machine import Figures

MAX_LINES = 24
WIDTH = 100
_WORDS = {"passed": "Passed", "failed": "Not yet", "error": "Not yet", "unsolved": "Not solved yet"}
# Okabe-Ito: told apart by everyone; the word says the same.
_COLOURS = {"passed": "#009E73", "failed": "#D55E00", "error": "#D55E00", "unsolved": "#767676"}


@dataclasses.dataclass
class TileMap:
    """Right and wrong blocks of one output: block index -> "ok", or what is wrong with it."""

    operand: "Operand"
    status: dict[tuple[int, ...], str]

    @property
    def wrong(self) -> list[tuple[int, ...]]:
        return [t for t, s in self.status.items() if s != "ok"]


@dataclasses.dataclass
class Verdict:
    """The outcome of a check; true when it passed. `traceback` holds the full one when code raised.

    status: "unsolved", "passed", "failed" (wrong, or over its budget) or "error" (the reader's code raised).
    findings: the most likely cause first.
    """

    puzzle: str
    status: str
    findings: "list[Finding]"
    headline: str
    gained: str = ""
    next: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    tiles: TileMap | None = None
    figures: "list[Figures]" = dataclasses.field(default_factory=list)
    traceback: str = ""

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        return "\n".join(_text_lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _card(self)

    def _ipython_display_(self) -> None:
        _display_once(self)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data with stable keys, for programs."""
        return {
            "puzzle": self.puzzle,
            "status": self.status,
            "passed": bool(self),
            "headline": self.headline,
            "findings": [_finding_json(f) for f in self.findings],
            "figures": [_figures_json(f) for f in self.figures],
            "gained": self.gained,
            "notes": list(self.notes),
            "next": self.next,
        }


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def gained(figures: "Sequence[Figures]") -> str:
    """One line on what a right answer costs: bytes, steps, intensity."""
    if not figures:
        return ""
    hbm, once = sum(f.hbm_bytes for f in figures), sum(f.once_bytes for f in figures)
    steps, flops = sum(f.steps for f in figures), sum(f.flops for f in figures)
    text = f"It moves {human_bytes(hbm)} between HBM and VMEM in {steps} step{'s' if steps != 1 else ''}"
    if once and hbm != once:
        text += f", {hbm / once:.2g} times the arrays themselves"
    return text + (f"; {flops / hbm:.2g} FLOP per byte." if flops and hbm else ".")


# --- text ------------------------------------------------------------------------------------------------------------


def _text_lines(v: Verdict) -> list[str]:
    lines = [v.headline]
    for i, finding in enumerate(v.findings[:3]):
        room = MAX_LINES - len(lines) - 2 - len(v.notes)
        block = _finding_lines(finding, first=i == 0)
        if len(block) > room:
            break
        lines += ["", *block]
    for extra in (v.gained, v.next, *v.notes):
        if extra:
            lines += textwrap.wrap(extra, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return lines[:MAX_LINES]


def _finding_lines(finding: "Finding", *, first: bool) -> list[str]:
    cause = finding.cause if first else f"Also: {finding.cause}"
    lines = textwrap.wrap(_capital(cause), WIDTH, initial_indent="  ", subsequent_indent="  ")
    if finding.line is not None:
        lines.append(_clip(f"    {finding.line}   {finding.line.text}"))
    for item in finding.evidence[: 4 if first else 1]:
        lines += textwrap.wrap(item, WIDTH, initial_indent="  - ", subsequent_indent="    ")[:3]
    return lines


def _clip(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _capital(text: str) -> str:
    """A sentence's capital, unless it starts with a name of the reader's (x_ref, acc_ref)."""
    word = text.split(" ", 1)[0]
    return text if "_" in word or "." in word else text[:1].upper() + text[1:]


# --- HTML ------------------------------------------------------------------------------------------------------------


def _card(v: Verdict) -> str:
    colour = _COLOURS[v.status]
    parts = [
        f'<div style="border-left:5px solid {colour};padding:6px 14px;margin:6px 0;max-width:62em;line-height:1.45">',
        f'<div><b style="color:{colour}">{_WORDS[v.status]}</b> &nbsp;{html.escape(v.headline)}</div>',
    ]
    parts += [_finding_html(f, first=i == 0) for i, f in enumerate(v.findings[:3])]
    if v.tiles is not None and v.tiles.wrong and len(v.tiles.status) > 1:
        parts.append(_tiles_html(v.tiles))
    for text in (v.gained, *v.notes):
        if text:
            parts.append(f'<div style="margin-top:4px">{html.escape(text)}</div>')
    if v.next:
        parts.append(f'<div style="margin-top:4px"><b>{html.escape(v.next)}</b></div>')
    return "".join(parts) + "</div>"


def _finding_html(finding: "Finding", *, first: bool) -> str:
    cause = html.escape(_capital(finding.cause))
    weight = "font-weight:600" if first else "opacity:.85"
    lead = "" if first else "Also: "
    out = f'<div style="margin-top:8px;{weight}">{lead}{cause}</div>'
    if finding.line is not None:
        out += _line_html(finding.line)
    items = [f"<li>{html.escape(e)}</li>" for e in finding.evidence]
    if items and first:
        out += f'<ul style="margin:4px 0 0 0">{"".join(items[:2])}</ul>'
        if len(items) > 2:
            out += f"<details><summary>more</summary><ul>{''.join(items[2:])}</ul></details>"
    return out


def _line_html(line: "SourceLine") -> str:
    code = f"<code>{html.escape(line.text)}</code>" if line.text else ""
    return (
        f'<div style="margin:4px 0 0 1em"><code style="opacity:.7">{html.escape(str(line))}</code> &nbsp;{code}</div>'
    )


def _tiles_html(tiles: TileMap) -> str:
    from .lens.draw import tile_map_svg

    svg = tile_map_svg(tiles.operand, tiles.status)
    source = base64.b64encode(svg.encode()).decode()
    wrong = tiles.wrong
    named = ", ".join(map(str, wrong[:20])) + (" and more" if len(wrong) > 20 else "")
    alt = html.escape(f"{tiles.operand.name}: wrong blocks {named}")
    caption = f"{html.escape(tiles.operand.name)}, block by block: crossed ones are wrong"
    return (
        f'<div style="margin-top:8px"><img alt="{alt}" src="data:image/svg+xml;base64,{source}">'
        f'<div style="font-size:85%;opacity:.8">{caption}</div></div>'
    )


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Tuples and NumPy numbers as what JSON knows."""
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    return value.item() if isinstance(value, np.generic) else value


def _finding_json(f: "Finding") -> dict[str, Any]:
    line = None if f.line is None else {"file": f.line.file, "line": f.line.line, "text": f.line.text}
    return {
        "kind": f.kind,
        "cause": f.cause,
        "evidence": list(f.evidence),
        "line": line,
        "step": _plain(f.step),
        "at": _plain(f.at),
        "operand": f.operand,
        "block": _plain(f.block),
    }


def _figures_json(f: "Figures") -> dict[str, Any]:
    return {
        "name": f.name,
        "steps": f.steps,
        "hbm_bytes": f.hbm_bytes,
        "once_bytes": f.once_bytes,
        "vmem_bytes": f.vmem_bytes,
        "flops": f.flops,
        "transcendentals": f.transcendentals,
        "intensity": f.intensity,
        "operands": [
            {"name": r.operand.name, "moves": r.moves, "hbm_bytes": r.hbm_bytes, "vmem_bytes": r.vmem_bytes}
            for r in f.operands
        ],
    }


# --- display ---------------------------------------------------------------------------------------------------------

_shown_in: dict[int, int] = {}  # id of what was displayed -> the IPython execution in which it was


def emit(thing: Any) -> Any:
    """Displays a verdict or a picture once, at once, and returns it.

    In IPython it is displayed as HTML; being the last expression of the same cell does not display it twice. In a
    terminal its text is printed.
    """
    shell = _ipython()
    if shell is None:
        _print(str(thing))
        return thing
    from IPython.display import HTML, display

    if hasattr(thing, "widget") and thing.widget is not None:
        display(thing.widget)
    elif _has_frontend(shell):
        display(HTML(thing._repr_html_()))
    else:
        _print(str(thing))
    _shown_in.clear()
    _shown_in[id(thing)] = shell.execution_count
    return thing


def _display_once(thing: Any) -> None:
    """IPython's display hook for what `emit` may already have shown in this cell."""
    shell = _ipython()
    if shell is not None and _shown_in.get(id(thing)) == shell.execution_count:
        return
    emit(thing)


def _ipython() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def _has_frontend(shell: Any) -> bool:
    """A notebook, rather than IPython in a terminal."""
    return hasattr(shell, "kernel")


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
