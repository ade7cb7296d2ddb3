"""A verdict, and what trying has shown of the answer -> one story: what was seen, and which line it comes from."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..diagnose.corrections import Correction

if TYPE_CHECKING:
    from ..diagnose.findings import Finding
    from ..view.verdict import Verdict


def tell(verdict: "Verdict", found: Sequence[Correction], files: Mapping[str, str]) -> None:
    """Puts corrections into a verdict: the first with what was seen of it, each further one as a finding of its own.

    files: the file that each of the functions stands in.
    """
    from ..diagnose.diagnose import SEEN_IN_VALUES
    from ..diagnose.findings import Finding
    from ..ir.capture import source_line

    if not found:
        return
    seen = verdict.findings[0]
    told = [
        Finding("correction", _sentence(c, len(found)), [], source_line(files[c.function], c.line), function=c.function)
        for c in found
    ]
    covered = [c for c in found if seen.line and seen.line.file == files[c.function] and c.covers(seen.line.line)]
    if seen.kind == "budget":
        head, _, advice = seen.cause.partition(". ")
        told[0].cause = f"{head.rstrip('.')}. {told[0].cause}"
        told[0].kind, told[0].evidence = seen.kind, [advice] if advice and found[0].whole else []
    elif found[0].whole and covered:
        told[0] = seen
    elif not covered or (found[0].told and seen.kind in SEEN_IN_VALUES | _BLIND) or seen.kind in _VAGUE:
        told[0].evidence = [_head(seen)]
    else:
        seen.evidence[:0] = [told[0].cause] if found[0].told else []
        if seen.line is not None and seen.line.text.startswith("def "):
            seen.line = told[0].line
        told[0] = seen
    verdict.findings = told


# Kinds that see that something is wrong, and guess at most what; and those that do not even guess.
_BLIND = frozenset("explained structure shape dtype".split())
_VAGUE = frozenset("values zeros nan".split())


def _sentence(correction: Correction, places: int) -> str:
    """The words of a correction as a sentence, with what has come of trying it."""
    words = correction.words[:1].upper() + correction.words[1:]
    return f"{words}: then everything is right." if places == 1 and correction.told else f"{words}."


def _head(finding: "Finding") -> str:
    """What was seen, without what to try."""
    return re.split(r"(?<!\.)\.\s+(?=[A-Z`])", finding.cause)[0].rstrip(".") + "."
