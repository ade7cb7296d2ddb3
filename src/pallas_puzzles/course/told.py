"""What was seen, and what trying has shown of the answer -> one story: what happens, and which line it comes from."""

from collections.abc import Mapping, Sequence

from ..diagnose.corrections import Correction
from ..diagnose.findings import Finding
from ..diagnose.origin import Origin
from ..ir.capture import source_line
from ..lens.machine import listed
from ..text import cut


def told(
    findings: Sequence[Finding],
    found: Sequence[Correction],
    files: Mapping[str, str],
    formulas: bool = False,
    seen_in: str = "",
) -> list[Finding]:
    """The findings of a verdict with corrections: the first with what was seen of it, each further one on its own.

    files: the file that each of the functions is in. formulas: the puzzle asks for nothing else, so a correction of one
    would be the answer. seen_in: the function that the first finding is in.
    """
    seen = findings[0]
    if seen.kind == "narrow" and (len(found) > 1 or not all(c.told for c in found)):  # it says which place rounds
        return list(findings)
    doubted = any(c.doubted for c in found)
    if not found or (doubted and (seen.kind == "budget" or (len(found) > 1 and seen.kind == "explained"))):
        return list(findings)  # it says itself what to look for
    at = seen.line
    here = [c for c in found if at and at.file == files[c.function]]
    covered = [c for c in here if at and (c.covers(at.line) or (seen.kind in _TOO_EARLY and at.line in c.values))]
    found = [*covered, *(c for c in found if c not in covered)]
    first, *others = (
        Finding("correction", words, (), source_line(files[c.function], c.line), function=c.helper or c.function)
        for c, words in zip(found, _sentences(found), strict=False)
    )
    if seen.kind == "model" and seen.evidence and (formulas or not found[0].told):  # what it should come to is told
        if len({c.line for c in found if c.function == found[0].function}) == 1:  # else: a formula in another form
            seen = seen.but(line=first.line, function=first.function)
        return [seen, *findings[1:]]
    elsewhere = seen_in not in {"", *(c.function for c in found)} and all(c.told or c.tried for c in found)
    if seen.kind == "budget":
        first = first.but(kind=seen.kind, cause=f"{seen.seen} {first.cause}")
        first = first.but(line=seen.line) if covered and found[0].whole else first
        first = first.but(evidence=(seen.advice,)) if seen.advice and not all(c.told for c in found) else first
    elif covered and (found[0].whole or (seen.kind not in SAYS_LITTLE and not found[0].told)):
        # it says more, of a line that the correction is about
        first = seen.but(evidence=(first.cause, *seen.evidence)) if found[0].said and found[0].tried else seen
    elif (
        (others or not found[0].told)
        and not (covered or elsewhere)
        and seen.kind not in SAYS_LITTLE | _GUESSED | _ALSO_RIGHT
        and seen.line is not None
    ):
        proven = all(c.told and c.tried for c in found)  # that says what to do
        return [seen.but(cause=seen.seen) if proven else seen, first, *others]
    elif covered and seen.kind not in SAYS_LITTLE | _GUESSED and not (found[0].told and _is_symptom(seen, len(found))):
        at_def = seen.line is not None and seen.line.text.startswith("def ")
        cause = seen.seen if found[0].told and seen.step is not None else seen.cause  # it says what helped
        first = seen.but(cause=cause, evidence=(first.cause, *seen.evidence), line=first.line if at_def else seen.line)
    else:
        briefly = found[0].told and not (others and seen.kind == "rounding")
        first = first.but(evidence=(seen.seen if briefly else seen.cause,))
    return [first, *others]


def with_origin(findings: Sequence[Finding], origin: Origin) -> list[Finding]:
    """The findings, the first at the line where the answer parts from the course's solution."""
    first, *rest = findings
    shown = [f"`{cut(text, 60)}`" for text in origin.right]
    what = "Something that goes into it is not right, or what is done with it."
    if origin.used:
        same, right, at = origin.used
        what = (
            f"But `{cut(right, 60)}` does (line {at.line}), and is made of the same `{cut(same, 60)}`: what is done "
            "with that there has to be done here, too, or something in its place."
        )
    elif len(shown) == 1:
        what = f"The numbers of {shown[0]}, which goes into it, do: look at their order, and at what is done with them."
    elif shown:
        what = f"What goes into it does, each by itself: {listed(shown)}. So look at how, and when, they come together."
    elif origin.stored:
        what = f"What it holds was last stored in line {origin.stored.line}."
    made = f"`{cut(origin.expression, 90)}` makes" if origin.expression else "is made here"
    cause = (
        f"Look at what {made}: neither this value nor any that is made of it occurs in the course's solution. {what}"
    )
    return [first.but(cause=cause, evidence=(first.cause, *first.evidence), line=origin.line, function=""), *rest]


def with_unused(findings: Sequence[Finding], unused: Sequence[tuple[str, str]]) -> list[Finding]:
    """The findings, the first with the one or two arguments that a function never uses.

    More of them are another way to do it; and what ends a check comes before what is missing.
    """
    first, *rest = findings
    if len(unused) > 2 or first.kind in {"unused", "error"}:
        return [*findings]
    more = [f"`{name}` never uses its argument `{argument}`." for name, argument in unused if argument != first.operand]
    return [first.but(evidence=(*more, *first.evidence)), *rest]


# Kinds that see that something is wrong, and not how it came about.
SAYS_LITTLE = frozenset("structure shape dtype moved unread unused values explained".split())

_TOO_EARLY = frozenset({"early", "no-wait", "reused"})  # what is read is right, and the time is not

_ALSO_RIGHT = frozenset({"padding"})  # a right answer reads it as well, and does not use it
_GUESSED = frozenset({"error", "rounding", "narrow"})  # of where it comes from: what has been tried is no guess


def _is_symptom(finding: Finding, places: int) -> bool:
    """Whether a finding about a GPU, which has no step, sees that two accesses meet, and not which is out of place."""
    return finding.step is None and (finding.kind == "reused" or (finding.kind == "no-wait" and places == 1))


def _sentences(found: Sequence[Correction]) -> list[str]:
    """What has to change, with what has come of trying it: a sentence for each place, one for whole functions alone."""
    if found and all(c.whole for c in found):
        called = listed([c.words for c in found])
        places = "its place" if len(found) == 1 else "their places"
        tried = f": with the course's in {places}, everything is right" if all(c.tried for c in found) else ""
        return [f"The mistake is in {called}{tried}."]
    words = [
        f"{c.words} is a part of the mistake: put the course's in its place, too" if c.whole else c.words for c in found
    ]
    if found and all(c.told for c in found):
        words[-1] += ": then everything is right"
    if all(c.told and c.tried for c in found):
        words[:-1] = [f"{each}; the change below is needed, too" for each in words[:-1]]
    elif not any(c.whole for c in found):  # alone, none of them is enough
        words[:-1] = [
            f"{w}; the place below has to change with it" if c.told else w for c, w in zip(found, words, strict=True)
        ][:-1]
    return [f"{each[:1].upper()}{each[1:]}." for each in words]
