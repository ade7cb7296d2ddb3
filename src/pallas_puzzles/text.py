"""Numbers and plain text, as they are shown everywhere."""

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


def cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 3]}..."


def plain(text: str, encoding: str | None) -> str:
    """The text as an output with this encoding can print it."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode()
    return text
