"""What the reports on every compiler share: a refusal, rows of facts, tables."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from ..targets.tpu.lowering import Refusal
from ..text import Lines, cut, wrapped
from .draw import LEFT, source_html
from .draw import row_html as cells_html
from .paper import SANS

FONT = f";font-size:13px;font-family:{SANS}"
WIDE = ";width:100%"
CELL = "vertical-align:top;white-space:normal"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def refusal_lines(refusal: Refusal) -> Lines:
    lines = [("", ""), *wrapped(refusal.sentence, "cause", "  ", most=10)]
    if refusal.line is not None:
        lines.append(("line", cut(f"    {refusal.line}   {refusal.line.text.strip()}")))
    return lines + wrapped(refusal.detail, "detail", "  ", most=6)


def refusal_html(refusal: Refusal) -> str:
    parts = [f'<div style="margin-top:8px"><b>{escape(refusal.sentence)}</b></div>']
    if refusal.line is not None:
        parts.append(source_html(str(refusal.line), refusal.line.text.strip()))
    if refusal.detail:
        parts.append(f'<div style="opacity:.8;font-size:92%">{escape(refusal.detail)}</div>')
    return "".join(parts)


def fact_html(name: str, inner: str) -> str:
    head = f'<th scope="row" style="{LEFT};{CELL};width:6em">{name}</th>'
    return cells_html([head, f'<td style="{LEFT};{CELL}">{inner}</td>'])


def table(rows: Sequence[str], more: str = "") -> str:
    style = f"border-collapse:collapse;margin:4px 0;font-size:12px;border:0{more}"
    return f'<table style="{style}">{"".join(rows)}</table>' if rows else ""


def as_json(value: Any) -> Any:
    """Only what JSON knows, which has neither tuples nor NaN nor infinities."""
    if isinstance(value, dict):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
