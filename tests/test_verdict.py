"""Verdicts: the cause first, never more than a screen, safe as HTML, shown once."""

import contextlib
import dataclasses
import html.parser
import io
import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from typing import Any

import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import pallas_puzzles.view.verdict as verdict_module
from mistakes import MISTAKES
from pallas_puzzles.course.check import check_call
from pallas_puzzles.diagnose.findings import Finding
from pallas_puzzles.ir.capture import Operand, SourceLine
from pallas_puzzles.lens.machine import figures
from pallas_puzzles.text import human_bytes
from pallas_puzzles.view.costs import gained
from pallas_puzzles.view.show import show
from pallas_puzzles.view.verdict import Standing, TileMap, Verdict, emit
from zoo import ZOO

LINE = SourceLine("/home/reader/basics.py", 214, "acc_ref[...] += x_ref[...] @ y_ref[...]")
CAUSE = "step 0, grid index (0, 0): the kernel reads 1024 elements of acc_ref that nobody has written. Zero it first."


def finding(**more: Any) -> Finding:
    return Finding(**{"kind": "unwritten", "cause": CAUSE, "evidence": ["3 of 4 blocks wrong"], "line": LINE, **more})


def failed(*findings: Finding, **more: Any) -> Verdict:
    return Verdict("basics/9", "failed", list(findings) or [finding()], "basics/9 Row sum: not yet.", **more)


def costs(name: str = "row_sum") -> Any:
    return figures(show(ZOO[name].fn, *ZOO[name].args).traces[0])


def output() -> Operand:
    return show(ZOO["transpose"].fn, *ZOO["transpose"].args).traces[0].call.outs[0]


def mistaken(name: str) -> Verdict:
    mistake = MISTAKES[name]
    return check_call(mistake.fn, mistake.args, jnp.asarray(mistake.expected).astype(mistake.args[0].dtype))


class Tree(html.parser.HTMLParser):
    """Text in order, images, and which text is folded away."""

    VOID = ("img", "br", "input")

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.text = self.folded = self.bold = self.code = ""
        self.images: list[dict[str, Any]] = []
        self.tags: set[str] = set()
        self.feed(source)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag + ("!code" if "monospace" in str(dict(attrs).get("style")) else ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().removesuffix("!code") == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            return
        self.text += data
        self.folded += data if "details" in self.open else ""
        self.bold += data if "b" in self.open else ""
        self.code += data if any(tag.endswith("!code") for tag in self.open) else ""


# --- value -----------------------------------------------------------------------------------------------------------


def test_only_a_pass_is_true() -> None:
    assert Verdict("p", "passed", [], "")
    for status in ("failed", "error", "unsolved"):
        assert not Verdict("p", status, [], "")


def test_json_has_stable_keys_and_survives_json() -> None:
    one = finding(step=np.int32(3), at=(np.int64(1), 0), block=(np.int32(2), 1), operand="acc_ref")
    data = json.loads(json.dumps(failed(one, figures=[costs()], notes=["draw 2"], next="hint").to_json()))
    assert {"puzzle", "status", "headline", "findings", "figures", "notes", "next"} <= set(data)
    assert data["status"] == "failed"
    assert data["puzzle"] == "basics/9"
    (found,) = data["findings"]
    assert found["line"] == {"file": LINE.file, "line": 214, "text": LINE.text}
    assert (found["step"], found["at"], found["block"], found["operand"]) == (3, [1, 0], [2, 1], "acc_ref")
    assert data["figures"][0]["hbm_bytes"] == costs().hbm_bytes
    assert data["figures"][0]["operands"][0]["name"] == "x_ref"


def test_json_of_nothing() -> None:
    data = json.loads(json.dumps(Verdict("p", "unsolved", [Finding("k", "c")], "h").to_json()))
    assert data["findings"][0]["line"] is None
    assert data["figures"] == []


RAISED = f"""Traceback (most recent call last):
  File "{verdict_module.__file__}", line 3, in run
    inner()
  File "/tmp/ipykernel_7/42.py", line 7, in kernel
    o_ref[...] = boom
                 ^^^^
  File "/usr/lib/python3/dist-packages/jax/core.py", line 1, in bind
    raise
NameError: name 'boom' is not defined
"""


def test_the_traceback_is_kept_and_the_text_says_how_to_get_it() -> None:
    verdict = failed(traceback="Traceback:\n  boom")
    assert str(verdict.traceback) == repr(verdict.traceback) == "Traceback:\n  boom"
    assert "boom" not in str(verdict)
    assert "`verdict = check(...)`, then `print(verdict.traceback)`" in str(verdict)
    assert "verdict.traceback" not in verdict.text(traceback="puzzles check --traceback"), "a terminal has no variable"
    assert "traceback" not in str(failed()).lower()
    assert "boom" in Tree(verdict._repr_html_()).folded


def test_the_readers_frames_come_first() -> None:
    folded = Tree(failed(traceback=RAISED)._repr_html_()).folded
    first, _, everything = folded.partition("with the frames of JAX and of this package")
    assert "42.py" in first
    assert "NameError: name 'boom' is not defined" in first
    assert "^^^^" in first
    assert "inner()" not in first
    assert "core.py" not in first
    assert RAISED in everything
    alone = Tree(failed(traceback=RAISED.replace("/tmp/ipykernel_7", "/x/site-packages"))._repr_html_()).folded
    assert "with the frames" not in alone, "none of them is the reader's"
    assert "inner()" in alone


def test_gained() -> None:
    one = costs()
    assert human_bytes(one.hbm_bytes) in gained([one])
    assert "12 steps" in gained([one])
    assert "FLOP per byte" in gained([one])
    assert "2 pallas_calls" in gained([one, one])
    assert human_bytes(2 * one.hbm_bytes) in gained([one, one])
    assert human_bytes(one.vmem_bytes) in gained([one, one]), "VMEM is used again, not added up"
    assert gained([]) == ""


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_cause_then_the_line_then_the_evidence() -> None:
    text = str(failed(notes=["draw 2 (seed 123)"], next="Look at hint 1.", figures=[costs()]))
    order = ["not yet", "Step 0, grid index", "basics.py:214", LINE.text, "3 of 4 blocks", "draw 2 (seed 123)"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "Look at hint 1." in text
    assert f"It moves {human_bytes(costs().hbm_bytes)}" in text


def crowded() -> Verdict:
    long = " ".join(["words"] * 80) + " the end."
    findings = [finding(cause=f"{i}: {long}", evidence=[f"{j} {long}" for j in range(9)]) for i in range(7)]
    tiles = TileMap(output(), {(i, j): "zero" if i == j else "ok" for i in range(6) for j in range(6)})
    return failed(
        *findings, notes=[f"note {i} {long}" for i in range(5)], next=f"next {long}", tiles=tiles, figures=[costs()] * 9
    )


def test_never_more_than_a_screen() -> None:
    lines = str(crowded()).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "0: words" in text
    assert LINE.text in text
    assert "note 0" in text
    assert "next" in text


@pytest.mark.parametrize("name", MISTAKES)
def test_no_real_verdict_is_more_than_a_screen(name: str) -> None:
    verdict = mistaken(name)
    lines = str(verdict).splitlines()
    assert 1 <= len(lines) <= 24
    assert max(map(len, lines)) <= 100
    if verdict.findings:
        assert verdict.findings[0].cause.split()[-1] in str(verdict), "the first cause is said to its end"
        if verdict.findings[0].line:
            assert str(verdict.findings[0].line) in str(verdict)
    tree = Tree(verdict._repr_html_())
    assert not verdict.findings or tree.images or not verdict.tiles or len(verdict.tiles.status) == 1


def test_right_and_wrong_blocks_in_text() -> None:
    status = {(i, j): "zero" if (i, j) == (1, 2) else "ok" for i in range(2) for j in range(3)}
    assert "    · · ·\n    · · ✗" in str(failed(tiles=TileMap(output(), status)))
    every = dict.fromkeys(status, "zero")
    assert "✗" not in str(failed(tiles=TileMap(output(), every))), "says nothing that the evidence does not"


def test_names_keep_their_case() -> None:
    assert "  o_ref is never stored." in str(failed(finding(cause="o_ref is never stored.")))
    assert "  The result" in str(failed(finding(cause="the result is wrong.")))


def test_unsolved_is_calm() -> None:
    verdict = Verdict("basics/9", "unsolved", [], "basics/9 Row sum: not solved yet.", next="Write row_sum_kernel.")
    assert str(verdict).splitlines() == ["basics/9 Row sum: not solved yet.", "  Write row_sum_kernel."]
    assert "Not solved yet" in Tree(verdict._repr_html_()).text


def test_passed_says_what_was_gained_and_what_is_next() -> None:
    text = str(Verdict("p", "passed", [], "p: solved.", gained="It moves 3 KiB.", next="Next: q"))
    assert text.splitlines() == ["p: solved.", "  It moves 3 KiB.", "  Next: q"]


# --- HTML ------------------------------------------------------------------------------------------------------------


def test_the_card() -> None:
    status = {(i, j): "wrong values" if i == j else "ok" for i in range(3) for j in range(3)}
    verdict = failed(
        finding(evidence=[f"evidence {i}" for i in range(6)]), notes=["draw 2"], tiles=TileMap(output(), status),
        figures=[costs()], next="Hint 1",
    )  # fmt: skip
    source = verdict._repr_html_()
    tree = Tree(source)
    assert tree.text.startswith("Not yet")
    assert re.match(r'<div style="border-left:5px solid #\w{6}', source)
    assert "Step 0, grid index" in tree.bold
    assert "Zero it first." in tree.bold
    assert LINE.text in tree.code
    assert "basics.py:214" in tree.code
    assert "evidence 5" in tree.folded
    assert "evidence 0" not in tree.folded
    (image,) = tree.images
    assert "wrong values in (0, 0), (1, 1), (2, 2)" in image["alt"]
    assert "wrong values in (0, 0), (1, 1), (2, 2)" in tree.text, "words for the crosses"
    svg = ET.fromstring(b64decode(image["src"].partition(",")[2]))
    assert "3 of 9 blocks wrong" in "".join(svg.itertext())
    for words in ("draw 2", "Hint 1", human_bytes(costs().hbm_bytes)):
        assert words in tree.text


@pytest.mark.parametrize(
    ("status", "word"),
    [("passed", "Solved"), ("failed", "Not yet"), ("error", "Not yet"), ("unsolved", "Not solved yet")],
)
def test_a_word_for_every_colour(status: str, word: str) -> None:
    assert Tree(Verdict("p", status, [], "headline")._repr_html_()).text.startswith(word)


@pytest.mark.parametrize(
    ("status", "title", "word", "said"),
    [
        ("failed", "basics/9 Row sum", "not yet.", "Not yet basics/9 Row sum"),
        ("passed", "basics/9 Row sum", "solved.", "Solved basics/9 Row sum"),
        ("unsolved", "basics/9 Sum: of rows", "not solved yet.", "Not solved yet basics/9 Sum: of rows"),
        ("unrecorded", "basics/9 Row sum", "right, but not recorded.", "Right, but not recorded basics/9 Row sum"),
        ("error", "", "basics.py:7 stops the notebook.", "Not yet basics.py:7 stops the notebook."),
    ],
)
def test_badge_and_headline_say_a_thing_once(status: str, title: str, word: str, said: str) -> None:
    verdict = Verdict("p", status, [], word, title=title)
    assert Tree(verdict._repr_html_()).text == said
    assert str(verdict) == (f"{title}: {word}" if title else word)


def test_where_the_reader_stands() -> None:
    standing = Standing("3 of 13 solved in basics.", '<img alt="tiles">', "#Puzzle-4:-A-2-D-grid")
    verdict = Verdict("p", "passed", [], "p: solved.", next="Next: q", standing=standing)
    assert str(verdict).splitlines()[-1] == "  3 of 13 solved in basics. Next: q"
    source = verdict._repr_html_()
    assert '3 of 13 solved in basics. <a href="#Puzzle-4:-A-2-D-grid">Next: q</a>' in source
    assert [each["alt"] for each in Tree(source).images] == ["tiles"]
    verdict.standing = dataclasses.replace(standing, link="")
    assert "<a " not in verdict._repr_html_(), "a link that leads nowhere is not shown"


def test_code_in_a_sentence_is_code_on_the_card() -> None:
    verdict = failed(finding(cause="In `f`, `a < b` should be `a`.", evidence=["`x` is never used."]))
    source = verdict._repr_html_()
    assert "In <code>f</code>, <code>a &lt; b</code> should be <code>a</code>." in source
    assert "<li><code>x</code> is never used.</li>" in source
    assert "`a < b`" in str(verdict)


def test_more_findings_are_folded() -> None:
    tree = Tree(failed(*(finding(cause=f"cause number {i}.") for i in range(6)))._repr_html_())
    assert "number 5" in tree.folded
    assert "number 1" not in tree.folded
    assert "3 more findings" in tree.folded


def test_everything_is_escaped() -> None:
    evil = "<script>alert(1)</script><img src=x>&\"'"
    status = {(0, 0): evil, (0, 1): "ok"}
    verdict = Verdict(
        evil, "failed", [finding(cause=evil, evidence=[evil] * 6, line=SourceLine(evil, 1, evil))] * 5, evil,
        evil, evil, [evil], TileMap(output(), status), [costs()], evil,
    )  # fmt: skip
    source = verdict._repr_html_()
    assert "alert(1)</script>" not in source
    assert len(Tree(source).images) == 1
    assert evil in Tree(source).text


def test_an_untrusted_card_keeps_words_and_image() -> None:
    status = {(0, 0): "zero", (0, 1): "ok"}
    source = failed(tiles=TileMap(output(), status))._repr_html_()
    tree = Tree(re.sub(r'\s(id|style)="[^"]*"', "", re.sub(r"<script.*?</script>", "", source, flags=re.S)))
    assert tree.images
    assert "zero in (0, 0)" in tree.text
    assert "Zero it first." in tree.text


# --- display ---------------------------------------------------------------------------------------------------------


def test_in_a_terminal_emit_prints_and_returns(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = failed()
    assert emit(verdict) is verdict
    assert capsys.readouterr().out == f"{verdict}\n"


def test_without_unicode_it_prints_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    emit(failed(finding(cause="4× the arrays – … ✗")))
    assert b"4x the arrays" in raw.getvalue()


def test_a_terminal_gets_a_little_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    verdict = failed(finding(cause="an [bold]odd[/bold] cause"))
    with contextlib.redirect_stdout(terminal):
        emit(verdict)
    shown = terminal.getvalue()
    assert "\x1b[" in shown
    assert re.sub(r"\x1b\[[\d;]*m", "", shown).rstrip() == str(verdict), "the same words, no mark-up read into them"


CELLS = [
    "from pallas_puzzles.view.verdict import Verdict, emit\n"
    "from pallas_puzzles.view.draw import Picture\n"
    "v = Verdict('p', 'passed', [], 'shown')",
    "emit(v)",  # 1: once, though it is the last expression
    "emit(v); None",  # 2: once
    "w = emit(v)\nw",  # 3: once
    "v",  # 4: asked for in another cell
    "for _ in range(3):\n    emit(v)",  # 5: three times
    "emit(v)\n1 + 1",  # 6: the verdict and the 2
    "emit(Picture([], 'Nothing to show yet.'))",  # 7
    "[v]",  # 8: inside something else it is its text
    "import jax.numpy as jnp, jax\nfrom jax.experimental import pallas as pl\nfrom pallas_puzzles import show, normal\n"
    "def copy(x, *, b=128):\n"
    "    def kernel(x_ref, o_ref):\n"
    "        o_ref[...] = x_ref[...]\n"
    "    spec = pl.BlockSpec((b,), lambda i: (i,))\n"
    "    return pl.pallas_call(kernel, grid=x.shape[0] // b, in_specs=[spec], out_specs=spec,\n"
    "        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)\n"
    "show(copy, normal((1024,)))",  # 9
    "show(copy, normal((1024,)), live=True)",  # 10
    "v.traceback",  # 11
]


def test_in_a_notebook_everything_is_shown_exactly_once() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for cell in (1, 2, 3, 4):
        assert len(outputs[cell]) == 1, (cell, outputs[cell])
        assert "shown" in outputs[cell][0]["data"]["text/html"]
        assert outputs[cell][0]["data"]["text/plain"] == "shown"
    assert len(outputs[5]) == 3
    assert len(outputs[6]) == 2
    assert "Nothing to show yet." in outputs[7][0]["data"]["text/html"]
    assert outputs[8][0]["data"]["text/plain"] == "[shown]"
    (drawn,) = outputs[9]
    assert "<img" in drawn["data"]["text/html"]
    assert "x_ref" in drawn["data"]["text/plain"]
    (alive,) = outputs[10]
    assert "application/vnd.jupyter.widget-view+json" in alive["data"]
    assert "<img" in alive["data"]["text/html"], "for pages where no kernel runs"
    assert outputs[11][0]["data"]["text/plain"] == ""
