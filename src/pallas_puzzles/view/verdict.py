"""What a check found: as a value, as text for a terminal, as a card for a notebook, as JSON."""

import dataclasses
import html
import json
import re
import shutil
import sys
import sysconfig
from typing import Any

from ..diagnose.findings import Finding
from ..installation import PACKAGE
from ..ir.capture import Operand
from ..lens.gpu.timeline import Counts
from ..lens.machine import Figures
from ..text import COLUMNS, LINES, Lines, capital, cut, fitted, plain, plural, rich_text, wrapped
from . import costs
from .draw import Displayed, card_html, running_shell, source_html, tile_map_html
from .paper import BAD, GOOD, NEUTRAL
from .words import tile_map_text

SHOW_TRACEBACK = "`verdict = check(...)`, then `print(verdict.traceback)`"
_BADGES = {  # word and colour
    "passed": ("Solved", GOOD),
    "failed": ("Not yet", BAD),
    "error": ("Not yet", BAD),
    "unsolved": ("Not solved yet", NEUTRAL),
    "unrecorded": ("Not recorded", NEUTRAL),
    "unjudged": ("Not judged", NEUTRAL),
}


@dataclasses.dataclass
class TileMap:
    """Right and wrong blocks of one output: block index -> "ok", or what is wrong with it."""

    operand: Operand
    status: dict[tuple[int, ...], str]


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far the reader is: in words, as an <img>, and an address that leads to the next puzzle, "" without one."""

    words: str
    drawing: str
    link: str


class Traceback(str):
    """A string that shows itself as it would print."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclasses.dataclass(eq=False, repr=False)
class Verdict(Displayed):
    """The outcome of a check; true when it passed.

    status: "unsolved", "passed", "failed" (wrong, or over its budget), "error" (the reader's code raised), or
    "unrecorded" (right, but not as the course asks: a note says why), or "unjudged": nobody can say (a note says why),
    or nobody was asked (see check.collecting), with the subject that was not judged.
    findings: the likeliest cause first. word: how it is, in a line; title: of what, to stand before it. gained: what a
    right answer costs, in a line. next: where to look next.
    traceback: the full one when code raised, else "". picture: text that is shown to scale, below the first finding.
    standing: of a pass that is recorded. help: which call shows more. below: a widget to display under it, or None.
    """

    puzzle: str
    status: str
    findings: list[Finding]
    word: str
    gained: str = ""
    next: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    tiles: TileMap | None = None
    figures: list[Figures | Counts] = dataclasses.field(default_factory=list)
    traceback: str = ""
    subject: Any = None  # of an unjudged one: course.check.Subject
    picture: str = ""
    draw: tuple[int, int] | None = None  # number of the case that it is about, and of its draw
    standing: Standing | None = None
    help: str = ""
    below: Any = None
    title: str = ""

    @property
    def headline(self) -> str:
        return f"{self.title}: {self.word}" if self.title else self.word

    def __post_init__(self) -> None:
        self.traceback = Traceback(self.traceback)

    def __bool__(self) -> bool:
        return self.status == "passed"

    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int = COLUMNS, traceback: str = SHOW_TRACEBACK) -> str:
        """The verdict for a terminal that is so wide; never wider than is good to read. traceback: how to see it."""
        return "\n".join(line for _, line in _text(self, columns, traceback))

    def __rich__(self) -> Any:
        """The text with a little colour, at its full width."""
        return self.coloured(COLUMNS)

    def coloured(self, columns: int, traceback: str = SHOW_TRACEBACK) -> Any:
        """`text`, as rich can print it."""
        first = {"passed": "bold green", "unsolved": "bold"}.get(self.status, "bold yellow")
        styles = {"headline": first, "cause": "bold", "line": "cyan", "next": "bold"}
        return rich_text(_text(self, columns, traceback), styles)

    def _repr_html_(self) -> str:
        return _card(self)

    def display(self) -> None:
        super().display()
        if self.below is not None:
            from IPython.display import display

            from .live import widget_bundle

            display({"text/html": "", "text/plain": "", **widget_bundle(self.below)}, raw=True)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data with stable keys, for programs."""
        names = ("puzzle", "status", "headline", "gained", "notes", "picture", "next")
        findings, figures = [_finding_json(f) for f in self.findings], [costs.to_json(f) for f in self.figures]
        told = {name: getattr(self, name) for name in names} | {"passed": bool(self)}
        told |= {"findings": findings, "figures": figures}
        return json.loads(json.dumps(told, default=lambda number: number.item()))  # NumPy's


# --- text ------------------------------------------------------------------------------------------------------------


def _text(v: Verdict, columns: int, traceback: str) -> Lines:
    """At most a screen."""
    sections = _sections(v, min(columns, COLUMNS), traceback)
    room = LINES * COLUMNS // min(columns, COLUMNS)
    chosen = fitted(sections, room)
    first = next((i for i, (role, _) in enumerate(chosen) if role in ("note", "figures", "next")), None)
    if first and v.findings and len(chosen) < room:
        chosen.insert(first, ("", ""))
    return chosen


def _sections(v: Verdict, columns: int, traceback: str) -> list[tuple[int, Lines]]:
    """(rank, lines) from top to bottom; rank 0 matters most."""
    sections = [(0, wrapped(v.headline, "headline", "", 2, columns))]
    for i, finding in enumerate(v.findings[:3]):
        start, role, most, rank = ("", "cause", 8, 0) if i == 0 else ("Also: ", "also", 6, 3 + 2 * i)
        cause = wrapped(start + _sentence(finding.cause), role, "  ", most, columns)
        sections.append((rank, [("", ""), *cause]))
        if finding.line is not None:
            line = cut(f"    {_place(finding)}   {finding.line.text}", columns)
            sections.append((rank + 1, [("line", line)]))
        if i == 0:
            items = [wrapped(item, "evidence", "  - ", 3, columns) for item in finding.evidence]
            sections += [(3 if n == 0 else 4, item) for n, item in enumerate(items[:4])]
            some_right = v.tiles is not None and "ok" in v.tiles.status.values()
            blocks = tile_map_text(v.tiles.status) if v.tiles is not None and some_right else []
            sections.append((9, [("tiles", f"    {line}") for line in blocks]))
            sections.append((1, [("tiles", f"    {line}".rstrip()) for line in v.picture.splitlines()]))
    if len(v.findings) > 3:
        sections.append((8, [("also", f"  and {plural(len(v.findings) - 3, 'more finding')}")]))
    sections += [(2, wrapped(note, "note", "  ", 3, columns)) for note in v.notes[:3]]
    sections.append((2 if v else 10, wrapped(v.gained or _cost(v), "figures", "  ", 2, columns)))
    following = f"{v.standing.words} {v.next}" if v.standing else v.next
    sections.append((1, wrapped(following, "next", "  ", 2, columns)))
    sections.append((5, wrapped(v.help, "note", "  ", 1, columns)))
    if v.traceback and traceback:
        sections.append((2, wrapped(f"The full traceback: {traceback}", "note", "  ", 1, columns)))
    return sections


def _place(finding: Finding) -> str:
    """File, line and function of a finding."""
    return f"{finding.line}, {finding.function}" if finding.function else str(finding.line)


def _sentence(words: str) -> str:
    """With a capital, unless it starts with a name of the reader's (x_ref, jnp.dot)."""
    word = words.split(" ", 1)[0]
    return words if set("_(") & set(word) or "." in word.rstrip(".,:") else capital(words)


def _cost(v: Verdict) -> str:
    """The figures of an answer that did not pass, unless the findings are about nothing else."""
    return "" if any(f.kind == "budget" for f in v.findings) else costs.gained(v.figures)


# --- HTML ------------------------------------------------------------------------------------------------------------

_SHOWN_EVIDENCE, _SHOWN_FINDINGS, _LONGEST_TRACEBACK = 3, 3, 20_000
_MUTED = "opacity:.8;font-size:92%;margin-top:6px"


def _card(v: Verdict) -> str:
    badge, colour = _BADGES[v.status]
    if v.title:
        badge = v.word.rstrip(".").capitalize()
    parts = [
        f'<span style="background:{colour};color:#fff;border-radius:9px;padding:1px 9px;font-weight:600;'
        f'margin-right:4px">{badge}</span> <b>{html.escape(v.title or v.word)}</b>'
    ]
    findings = [_finding_html(f, first=i == 0) for i, f in enumerate(v.findings)]
    parts += findings[:_SHOWN_FINDINGS]
    if rest := findings[_SHOWN_FINDINGS:]:
        parts.append(_folded(plural(len(rest), "more finding"), "".join(rest)))
    if v.tiles is not None and len(v.tiles.status) > 1 and set(v.tiles.status.values()) != {"ok"}:
        parts.append(f'<div style="margin-top:8px">{tile_map_html(v.tiles.operand, v.tiles.status)}</div>')
    if v.picture:
        parts.append(f'<pre style="margin:8px 0 0;overflow-x:auto;line-height:1.3">{html.escape(v.picture)}</pre>')
    parts += [_line_html(note, _MUTED) for note in v.notes]
    parts.append(_line_html(v.gained or _cost(v), "margin-top:6px" if v else _MUTED))
    parts += [_next_html(v), _line_html(v.help, _MUTED)]
    if v.traceback:
        parts.append(_traceback_html(v.traceback))
    if v.below is not None:
        parts.append(_WITHOUT_KERNEL)
    return card_html(colour, "".join(parts))


# In the place of a widget whose kernel is gone JupyterLab writes an error, on a page that is opened again
_WITHOUT_KERNEL = (
    '<style class="pallas-below">.jp-OutputArea-child:has(.pallas-below)+.jp-OutputArea-child '
    ".jp-OutputArea-output.jupyter-widgets:not(:has(*)){display:none}</style>"
)


def _next_html(v: Verdict) -> str:
    """How far the reader is, the next puzzle, as a link where one works, and the course as a drawing."""
    standing = v.standing or Standing("", "", "")
    following = html.escape(v.next)
    if standing.link and v.next:
        following = f'<a href="{html.escape(standing.link)}">{following}</a>'
    told = " ".join(filter(None, (html.escape(standing.words), following)))
    told = f'<div style="margin-top:6px;font-weight:600">{told}</div>' if told else ""
    return told + (f'<div style="margin-top:8px">{standing.drawing}</div>' if standing.drawing else "")


_NOT_THE_READERS = (str(PACKAGE), sysconfig.get_paths()["stdlib"], "<frozen")
_FRAME = re.compile(r'^  File "([^"]*)", line .*\n(?:    .*\n)*', re.MULTILINE)


def _traceback_html(text: str) -> str:
    """Folded: the reader's own frames and the error; in it, folded once more, everything."""
    shown = text if len(text) <= _LONGEST_TRACEBACK else f"... {text[-_LONGEST_TRACEBACK:]}"
    everything = _folded("with the frames of JAX and of this package", _pre(shown))
    mine = _FRAME.sub(lambda frame: frame[0] if _is_readers(frame[1]) else "", text)
    few = len(mine) <= _LONGEST_TRACEBACK and any(_is_readers(frame[1]) for frame in _FRAME.finditer(text))
    return _folded("the traceback", _pre(mine) + everything if few else _pre(shown))


def _is_readers(file: str) -> bool:
    return not (file.startswith(_NOT_THE_READERS) or "site-packages" in file or "dist-packages" in file)


def _pre(text: str) -> str:
    return f'<pre style="white-space:pre-wrap;font-size:85%">{html.escape(text)}</pre>'


def _line_html(words: str, style: str) -> str:
    return f'<div style="{style}">{_words_html(words)}</div>' if words else ""


def _words_html(words: str) -> str:
    """A sentence, with `code` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))


def _finding_html(finding: Finding, *, first: bool) -> str:
    cause = _words_html(_sentence(finding.cause))
    words = f"<b>{cause}</b>" if first else f"Also: {cause}"
    items = [f"<li>{_words_html(item)}</li>" for item in finding.evidence]
    most = _SHOWN_EVIDENCE if first else 1
    shown, left = items[:most], items[most:]
    parts = [f'<div style="margin-top:8px">{words}</div>']
    if finding.line is not None:
        parts.append(source_html(_place(finding), finding.line.text))
    if shown:
        parts.append(f'<ul style="margin:4px 0 0;padding-left:1.6em">{"".join(shown)}</ul>')
    if left:
        parts.append(_folded(f"{len(left)} more", f'<ul style="margin:0;padding-left:1.6em">{"".join(left)}</ul>'))
    return "".join(parts)


def _folded(summary: str, body: str) -> str:
    return f'<details style="margin-top:4px"><summary>{summary}</summary>{body}</details>'


# --- JSON ------------------------------------------------------------------------------------------------------------


def _finding_json(f: Finding) -> dict[str, Any]:
    names = ("kind", "cause", "evidence", "function", "step", "at", "operand", "block")
    return {name: getattr(f, name) for name in names} | {"line": f.line and dataclasses.asdict(f.line)}


# --- display ---------------------------------------------------------------------------------------------------------


def emit(thing: Any) -> Any:
    """Displays a verdict or a picture at once, and returns it.

    In IPython, being the last expression of the same cell does not display it twice. Outside of IPython its text is
    printed, with a little colour where stdout is a terminal.
    """
    shell = running_shell()
    if shell is not None:
        thing.display()
        thing._emitted_at = shell.execution_count
    elif sys.stdout.isatty() and hasattr(thing, "__rich__"):
        from rich.console import Console

        width = shutil.get_terminal_size().columns
        shown = thing.coloured(width) if isinstance(thing, Verdict) else thing
        Console(highlight=False, width=max(width, COLUMNS)).print(shown, soft_wrap=True)
    else:
        print(plain(str(thing), sys.stdout.encoding))
    return thing
