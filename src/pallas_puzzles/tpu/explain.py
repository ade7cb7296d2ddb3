"""What the TPU compiler refuses, in one sentence that a learner understands, with the reader's own line.

The messages are libtpu's and Mosaic's; those known here were seen on libtpu 0.0.50 and 0.0.51, with jax 0.11.2 and
0.12.0.1. What the front end refuses before them is explained in lowering.py.
"""

import re
from collections.abc import Callable, Sequence

from ..lens.capture import Call, SourceLine, is_readers_file, source_line
from .chips import Chip
from .lowering import Refusal

_Sentence = str | Callable[[re.Match[str], Sequence[Call], Chip], str]


def explain(text: str, calls: Sequence[Call], chip: Chip) -> Refusal:
    """The compiler's error as a refusal. calls: the kernels of the program, to name their buffers."""
    line = _line(text)
    for pattern, sentence in _REASONS:
        if match := re.search(pattern, text, re.DOTALL):
            words = sentence if isinstance(sentence, str) else sentence(match, calls, chip)
            return Refusal(words, _detail(text), line)
    return Refusal(f"The TPU compiler refuses this kernel: {_detail(text)}.", "", line)


def _line(text: str) -> SourceLine | None:
    """The reader's line: Mosaic names the operation's own place and then those it was called from."""
    places = re.findall(r'"?(/[^"\s:()]+\.py|<[^"\s:()]+>)"?:(\d+)', text)
    for file, number in places:
        if is_readers_file(file):
            return source_line(file, int(number))
    return None


def _detail(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no reason given")[:220]


_REASONS: list[tuple[str, _Sentence]] = []
