"""Numbers and plain text, as they are shown everywhere."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

LINES, COLUMNS = 24, 100  # of a screen
Lines = list[tuple[str, str]]  # (role, line); the role decides the colour

_ASCII = str.maketrans({"█": "#", "▒": "+", "·": ".", "─": "-", "×": "x", "–": "-", "…": "~", "→": ">", "✗": "X"})


def human_bytes(nbytes: float) -> str:
    """1536 -> '1.5 KiB': four significant digits, so that a figure just above its budget looks it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if nbytes >= 1000 or unit == "B" else f"{nbytes:.4g} {unit}"


def times(ratio: float) -> str:
    """1.3333 -> '1.33×'."""
    return f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def cut(line: str, columns: int = COLUMNS, end: str = "...") -> str:
    return line if len(line) <= columns else line[: columns - len(end)] + end


def wrapped(words: str, role: str, indent: str = "", most: int = LINES, columns: int = COLUMNS) -> Lines:
    """`most` is how many lines there may be at the full width; a narrow terminal gets as many words in more lines."""
    lines = textwrap.wrap(words, columns, initial_indent=indent, subsequent_indent=" " * len(indent))
    most = most * COLUMNS // columns
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(f"{lines[most - 1]} ...", columns)]
    return [(role, line) for line in lines]


def fitted(parts: Sequence[tuple[int, Lines]], room: int) -> Lines:
    """Parts of a text, each with its rank. Where not all fit, the highest ranks are left out; the order stays."""
    kept = set()
    for i, (_, lines) in sorted(enumerate(parts), key=lambda pair: pair[1][0]):
        if len(lines) <= room:
            kept.add(i)
            room -= len(lines)
    return [line for i, (_, lines) in enumerate(parts) if i in kept for line in lines]


def rich_text(lines: Lines, styles: Mapping[str, str]) -> Any:
    """Lines, as rich can print them. styles: by role."""
    from rich.text import Text

    return Text("\n").join(Text(line, style=styles.get(role, "")) for role, line in lines)


def plain(text: str, encoding: str | None) -> str:
    """The text as an output with this encoding can print it."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode()
    return text
