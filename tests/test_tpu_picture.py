"""How a report shows itself: every figure is there, nothing is longer than a screen, the dots lie where they belong."""

import base64
import dataclasses
import html.parser
import itertools
import math
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from pallas_puzzles.ir.capture import SourceLine
from pallas_puzzles.targets.tpu.chips import CHIPS
from pallas_puzzles.targets.tpu.compiler import HOW_TO_GET_IT
from pallas_puzzles.targets.tpu.lowering import Refusal
from pallas_puzzles.text import COLUMNS as TEXT_COLUMNS
from pallas_puzzles.text import LINES as TEXT_LINES
from pallas_puzzles.view import report as pages
from pallas_puzzles.view import roofline
from pallas_puzzles.view.draw import Displayed
from pallas_puzzles.view.paper import SANS_EM, THEMES
from pallas_puzzles.view.tpu_report import STEP_OVERHEAD_S, KernelReport, Report, _estimate

SVG = "{http://www.w3.org/2000/svg}"
US = 1e-6
WHERE = SourceLine("/home/reader/basics.py", 214, "def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):")
MATMUL = KernelReport(
    name="matmul_kernel",
    hlo_name="matmul.1",
    where=WHERE,
    grid=(4, 5, 3),
    dynamic=False,
    steered=False,
    steps=60,
    runs=1,
    buffers={"x_ref": 1 << 20, "acc_ref": 3 << 20, "o_ref": 1 << 19, "(spilled registers)": 348 << 10},
    vmem_limit_bytes=16 << 20,
    spills=87,
    fills=257,
    bundles=2428,
    least_step=2011,
    mean_step=2109.25,
    most_step=2270,
    slots={"MXU": 0.7375, "VALU": 0.1465, "XLU": 0.01, "EUP": 0.02, "load": 0.1785, "store": 0.3024, "scalar": 0.0358},
    mxu_cycles=2048.0,
    mxu_dtype="bfloat16",
    flops=17_196_646_400.0,
    hbm_bytes=72 << 20,
    hbm_exact=True,
    times={"MXU": 87.2 * US, "bundles": 89.8 * US, "steps": 16.1 * US, "HBM": 92.1 * US},
    time_s=108 * US,
    cycles=159_116,
    notes=[],
)


def kernel(**more):
    return dataclasses.replace(MATMUL, **{"notes": [], **more})


def report(*kernels, tpu="v5e", name="matmul", **more):
    return Report(CHIPS[tpu], name, list(kernels) or [kernel()], **more)


def at(intensity, speed, **more):
    """A kernel at so many FLOP per byte and FLOP/s."""
    flops = speed * 100 * US
    return kernel(flops=flops, hbm_bytes=round(flops / intensity), time_s=100 * US, **more)


def svg(one):
    return pages.roofline_of(one).svg()


def roofline_words(one):
    return pages.roofline_of(one).words()


def words(value):
    """A text without its line ends."""
    return " ".join(str(value).split())


LONG = "the scheduler of this kernel has a property that takes a great many words to be told in full " * 2
REFUSED = Refusal("`sort` does not exist in a TPU kernel: sort outside the kernel.", "NotImplementedError: sort", WHERE)
REPORTS = {
    "matmul": report(),
    "TPU7x": report(tpu="tpu7x", copies=1, notes=["the function is something else"]),
    "dynamic": report(kernel(dynamic=True, steps=None, times={}, time_s=None), simulator="a grid set at run time"),
    "own copies": report(kernel(hbm_bytes=None, time_s=None, notes=["its own copies are not counted"])),
    "crowded": report(
        kernel(
            name="a_kernel_" * 12,
            buffers={f"a_reference_with_a_long_name_{i}_ref" * 2: 1 << i for i in range(20)},
            notes=[LONG, LONG, LONG],
            dynamic=True,
            runs=12,
        ),
        name="a_function_" * 20,
        simulator=LONG,
        copies=3,
        notes=[LONG, LONG],
    ),
    "no arithmetic": report(kernel(flops=0.0, mxu_cycles=0.0, mxu_dtype=None, spills=0, fills=0)),
    "int8": report(at(400, 350e12, mxu_dtype="int8")),
    "at the roof": report(at(30, 30 * CHIPS["v6e"].hbm_bytes_per_s), tpu="v6e"),
    "at the peak": report(at(9000, CHIPS["tpu7x"].flops_per_s()), tpu="tpu7x"),
    "tiny": report(at(0.0004, 3e5), tpu="v6e"),
    "far below": report(at(0.1, 1e7)),
    "far out": report(at(3e6, 8e14), tpu="v6e"),
    "none": Report(CHIPS["v5e"], "spec", notes=["the function reaches no pallas_call"]),
    "two": report(kernel(name="k"), at(0.6, 4e11, name="k")),
    "five": report(*(at(4.0**i, 0.6e12 * 4**i) for i in range(4)), kernel(flops=0.0), name="<lambda>"),
    "twelve": report(*(at(2.0**i, 0.3e12 * 2**i, name="a_kernel_" * 5) for i in range(12)), tpu="tpu7x"),
    "the same": report(*[kernel()] * 5),
}


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPORTS)
def test_a_kernel_takes_a_screen_at_most(name):
    lines = str(REPORTS[name]).splitlines()
    assert len(lines) <= TEXT_LINES * max(1, len(REPORTS[name].kernels))
    assert max(map(len, lines)) <= TEXT_COLUMNS
    assert all(line == line.rstrip() for line in lines)


FIGURES = {
    "name": "matmul_kernel (",
    "where": "(basics.py:214)",
    "grid": "(4, 5, 3)",
    "dynamic": "60 steps, set at run time",
    "steps": "= 60 steps",
    "runs": "7; the figures are those of one call",
    "buffers": "(spilled registers) 348 KiB 2.1%",
    "vmem_limit_bytes": "of the 16 MiB that it may use; a TensorCore has 128 MiB",
    "spills": "87 vector registers are spilled to VMEM",
    "fills": "257 reloaded: ",
    "bundles": "2428 in all",
    "least_step": "(2011 to",
    "mean_step": "2109 per step",
    "most_step": "to 2270, by what pl.when leaves out)",
    "slots": "MXU 74%, VALU 15%, XLU 1%, EUP 2%, load 18%, store 30%, scalar 4% in use",
    "mxu_cycles": "2048 cycles per step",
    "flops": "17.2 GFLOP",
    "hbm_bytes": "72 MiB between HBM and VMEM",
    "hbm_exact": "HBM at most 72 MiB",
    "times": "HBM 92.1 us, bundles 89.8 us, MXU 87.2 us, steps 16.1 us",
    "time_s": "takes about 108 us",
    "cycles": "159,116 cycles, 106 us at 1.5 GHz",
    "notes": "note a loop of unknown length",
}
DERIVED = {
    "vmem_bytes": "VMEM 4.84 MiB, 30%",
    "intensity": "at least 228 per byte: below the ridge point of the v5e, 240",
    "bound": "bounded by HBM: the copies",
    "achieved": "159 TFLOP/s is 85% of the roof",
    "formula": Report.formula,
    "together": "together 756 us",
}


def test_every_figure_is_told():
    """A field that is added to the dataclass must be shown, too."""
    fields = {field.name for field in dataclasses.fields(KernelReport)}
    unseen = {"hlo_name", "steered", "mxu_dtype"}  # the compiler's own name, and what only words depend on
    assert set(FIGURES) == fields - unseen
    many = report(kernel(dynamic=True, runs=7, hbm_exact=False, notes=["a loop of unknown length"]))
    page = Page(many._repr_html_())
    table = [page.text, *(" ".join(row) for row in page.rows)]
    for figure, told in {**FIGURES, **DERIVED}.items():
        assert told in words(str(many)), figure
        assert any(told in words(part) for part in table), figure


@pytest.mark.parametrize(
    ("tpu", "target"), [("v5e", "TPU v5e"), ("v6e", "TPU v6e"), ("tpu7x", "TPU7x (one of its two TensorCores)")]
)
def test_the_first_line_says_whether_it_compiles_and_for_what(tpu, target):
    assert str(report(tpu=tpu)).splitlines()[0] == f"matmul compiles for a {target}."
    refused = Report(CHIPS[tpu], "matmul", refusal=REFUSED)
    assert str(refused).splitlines()[0] == f"matmul does not compile for a {target}."


def test_a_refusal_is_the_sentence_the_line_and_the_detail():
    refused = Report(CHIPS["v5e"], "matmul", refusal=REFUSED)
    _, empty, sentence, line, detail = str(refused).splitlines()
    assert not refused
    assert empty == ""
    assert sentence.strip() == REFUSED.sentence
    assert line.split() == ["basics.py:214", *WHERE.text.split()]
    assert detail.strip() == REFUSED.detail
    bare = Report(CHIPS["v5e"], "matmul", refusal=Refusal("It is too large.", "", None))
    assert str(bare).splitlines()[2:] == ["  It is too large."]


def test_a_long_refusal_is_still_a_screen():
    line = SourceLine("basics.py", 3, "    return " + "x_ref[...] + " * 20)
    refused = Report(CHIPS["v5e"], "f" * 300, refusal=Refusal(LONG * 9, LONG * 9, line))
    lines = str(refused).splitlines()
    assert len(lines) <= TEXT_LINES
    assert max(map(len, lines)) <= TEXT_COLUMNS
    assert sum("..." in each for each in lines) >= 3, "what is cut says so"


@pytest.mark.parametrize("reason", [HOW_TO_GET_IT, "nothing to compile yet: f is still to be written"])
def test_what_is_unavailable_is_one_line(reason):
    absent = Report(CHIPS["v5e"], "matmul", unavailable=reason)
    assert not absent
    assert str(absent) == reason[0].upper() + reason[1:]
    assert len(str(absent)) <= TEXT_COLUMNS
    assert "<img" not in absent._repr_html_()
    assert reason[1:] in Page(absent._repr_html_()).text


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        ("MXU", "bounded by the MXU: the matrix products take longer than all else"),
        ("bundles", "bounded by its bundles: the instructions of a step take longer than its copies"),
        ("HBM", "bounded by HBM: the copies take longer than all else"),
        ("steps", "bounded by its steps: their fixed costs take longer than all else; larger blocks need"),
    ],
)
def test_what_bounds_it_in_words(bound, says):
    times = {name: (2.0 if name == bound else 1.0) * US for name in MATMUL.times}
    told = words(str(report(kernel(times=times))))
    assert says in told
    assert told.count("bounded by") == 1
    assert f"times {bound} 2 us, " in told, "the longest comes first"


def test_the_range_stands_there_only_if_steps_differ():
    same = kernel(least_step=318, mean_step=318.0, most_step=318)
    assert "bundles 318 per step, one a cycle; 2428 in all" in words(str(report(same)))
    assert "pl.when" not in str(report(same))


def test_spilled_registers():
    none = words(str(report(kernel(spills=0, fills=0))))
    assert "no vector register is spilled to VMEM" in none
    assert "smaller blocks" not in none
    one = words(str(report(kernel(spills=1, fills=12_345))))
    assert "1 vector register is spilled to VMEM, 12,345 reloaded: a step has more values at hand than there" in one
    assert "with smaller blocks it has fewer" in one


@pytest.mark.parametrize(("tpu", "place"), [("v5e", "above"), ("v6e", "below"), ("tpu7x", "below")])
def test_the_ridge_point_is_that_of_the_chip(tpu, place):
    told = words(str(report(at(300, 1e12), tpu=tpu)))
    chip = CHIPS[tpu]
    point = f"{chip.flops_per_s() / chip.hbm_bytes_per_s:.0f}"
    assert f"300 per byte: {place} the ridge point of the {tpu.replace('tpu', 'TPU')}, {point}, so HBM" in told
    assert ("could keep its MXU busy" if place == "above" else "cannot keep its MXU busy") in told


def test_the_roof_of_int8_is_twice_as_high():
    told = words(str(REPORTS["int8"]))
    assert "400 per byte: below the ridge point of the v5e, 480, so HBM cannot keep its MXU busy" in told
    assert "350 TFLOP/s is 107% of the roof" in told, "328 TFLOP/s is what HBM lets through at 400 per byte"


def test_the_roofs_of_an_int8_kernel_are_those_of_int8():
    assert "then int8 peak" in svg(REPORTS["int8"])
    assert "Roofs, in int8: v5e 820 GB/s up to 480 FLOP per byte, then 394 TFLOP/s" in roofline_words(REPORTS["int8"])
    assert "then bf16 peak" in svg(report(kernel(mxu_dtype="int8"), kernel()))


def test_without_matrix_products_no_mxu_is_kept_busy():
    told = words(str(report(at(300, 1e12, mxu_dtype=None))))
    assert "300 per byte: above the ridge point of the v5e, 240; 1 TFLOP/s" in told
    assert "busy" not in told


def test_what_is_not_known_is_not_told():
    unknown = words(str(REPORTS["dynamic"]))
    assert "matmul_kernel (basics.py:214): no time is estimated" in unknown
    assert "set at run time: nobody can know how many steps" in unknown
    assert "bounded by" not in unknown
    assert Report.formula not in unknown
    own = words(str(REPORTS["own copies"]))
    assert "how many bytes it moves is not known" in own
    assert "ridge point" not in own
    assert "note its own copies are not counted" in own
    assert "None" not in unknown + own


def test_simulated_cycles_or_why_there_are_none():
    clock = CHIPS["v6e"].clock_hz
    told = words(str(report(kernel(cycles=round(clock * 5 * US)), tpu="v6e")))
    assert "cycles, 5 us at 1.75 GHz" in told
    without = words(str(report(kernel(cycles=None), simulator="libtpu's simulator gave up")))
    assert "simulator libtpu's simulator gave up" in without
    assert without.count("simulator ") == 2
    assert "gives no cycles for this kernel" in str(report(kernel(cycles=None)))


def test_what_xla_copies_and_what_else_there_is_to_say():
    told = words(str(REPORTS["TPU7x"]))
    assert "XLA 1 array is copied around the kernels" in told
    assert "note the function is something else" in told
    assert "2 arrays are copied" in words(str(report(copies=2)))
    assert "copied around" not in words(str(report()))
    assert words(str(REPORTS["none"])) == ("spec compiles for a TPU v5e. note the function reaches no pallas_call")


def test_several_kernels_are_numbered_and_added_up():
    told = str(report(kernel(time_s=10 * US, runs=3), kernel(name="other_kernel", time_s=5 * US)))
    assert [line.split(" (")[0] for line in told.splitlines() if "basics.py:214" in line] == [
        "1. matmul_kernel",
        "2. other_kernel",
    ]
    assert "together  35 us" in told
    assert told.count(Report.formula) == 1
    unknown = str(report(kernel(), kernel(time_s=None)))
    assert "together" not in unknown
    assert "together" not in str(report())


def test_the_largest_buffers_come_first_and_the_rest_is_summed():
    sizes = {f"b{i}_ref": (i + 1) << 12 for i in range(20)}
    rows = [line.split() for line in str(report(kernel(buffers=sizes))).splitlines() if re.search("_ref", line)]
    assert rows[0] == ["b19_ref", "80", "KiB", "0.5%"]
    shown = len(rows)
    assert 2 < shown < 20
    rest = sum(sorted(sizes.values())[: 20 - shown]) >> 10
    assert f"and {20 - shown} more {rest} KiB" in words(str(report(kernel(buffers=sizes))))
    table = Page(report(kernel(buffers=sizes))._repr_html_()).rows
    assert sum(row[0].endswith("_ref") for row in table) == 15 > shown, "there is room for more in a table"


def test_where_a_screen_is_too_small_the_notes_and_figures_stay():
    told = words(str(REPORTS["crowded"]))
    assert "= 60 steps" in told
    assert "2109 per step" in told
    assert "228 per byte" in told
    assert LONG.strip() in told


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0, "0 us"),
        (4.4e-9, "4.4 ns"),
        (266e-9, "0.266 us"),
        (99.96e-9, "0.1 us"),
        (12.345e-6, "12.3 us"),
        (108.07e-6, "108 us"),
        (999.6e-6, "1 ms"),
        (0.0123, "12.3 ms"),
        (2.5, "2.5 s"),
    ],
)
def test_times(seconds, says):
    assert roofline.human_time(seconds) == says


def test_counts():
    assert roofline.human_count(0, "FLOP") == "0 FLOP"
    assert roofline.human_count(999.6, "FLOP") == "1 kFLOP"
    assert roofline.human_count(17.2e9, "FLOP") == "17.2 GFLOP"
    assert roofline.human_count(5e18, "FLOP") == "5000 PFLOP"
    assert [roofline.digits(n) for n in (0.08333, 14.25, 999.7, 2109.25, 123456.7)] == [
        "0.0833",
        "14.2",
        "1000",
        "2109",
        "123,457",
    ]
    assert [roofline.percent(n) for n in (0, 0.0001, 0.0625, 0.0996, 1.5)] == ["0%", "<0.1%", "6.2%", "10%", "150%"]


def test_the_formula_is_the_one_that_is_computed():
    formula, _, fill = Report.formula.partition(";")
    assert "fill: first blocks in, last out" in fill
    overhead = f"{STEP_OVERHEAD_S * 1e6:g} us a step"
    assert overhead in formula
    for hbm, bundles in ((92.1, 40.0), (20.0, 89.8)):
        times = {"MXU": 30.0 * US, "bundles": bundles * US, "steps": 16 * US, "HBM": hbm * US}
        value = eval(formula.replace(overhead, "steps"), {"max": max, "fill": 3 * US, **times})
        assert value == pytest.approx(_estimate(times, 3 * US))


# --- a report as a value ---------------------------------------------------------------------------------------------


def test_a_report_shows_itself():
    one = report()
    assert isinstance(one, Displayed)
    assert one
    assert str(one) == repr(one) == str(one)
    assert one._repr_html_() == one._repr_html_()
    assert one._mimebundle() == {"text/plain": str(one), "text/html": one._repr_html_()}
    assert len({one, report()}) == 2, "it is one report, not what it says"


@pytest.mark.parametrize(
    ("one", "code"),
    [(report(), "1;32"), (Report(CHIPS["v5e"], "f", refusal=REFUSED), "1;33"), (REPORTS["two"], "1;32")],
)
def test_a_little_colour(one, code):
    console = Console(force_terminal=True, color_system="standard", width=TEXT_COLUMNS)
    with console.capture() as captured:
        console.print(one)
    coloured = captured.get()
    assert coloured.startswith(f"\x1b[{code}m")
    assert ("\x1b[36m    basics.py:214" in coloured) == (one.refusal is not None)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).rstrip("\n") == str(one)


class Ascii:
    encoding = "ascii"


def test_a_terminal_without_utf8(monkeypatch):
    line = SourceLine("café.py", 1, "α = x_ref[...] × 2 → …")
    refused = Report(CHIPS["v5e"], "f", refusal=Refusal("It is too large – by far.", "", line))
    assert "café.py:1   α" in str(refused)
    monkeypatch.setattr(sys, "stdout", Ascii())
    plain = str(refused)
    monkeypatch.undo()
    assert plain.isascii()
    assert "caf?.py:1   ? = x_ref[...] x 2 > ~" in plain
    assert plain.count("\n") == str(refused).count("\n")
    assert str(report()).isascii()


# --- HTML ------------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """What a browser would find in a piece of HTML; complains about tags that are not closed."""

    def __init__(self, source):
        super().__init__()
        self.images, self.rows, self.tags, self.open, self.text = [], [], [], [], ""
        self.feed(source)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        else:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.rows:
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", REPORTS)
def test_html_is_an_image_and_a_table_without_scripts(name):
    one = REPORTS[name]
    source = one._repr_html_()
    page = Page(source)
    assert set(page.tags) <= {"img", "div", "b", "table", "tr", "th", "td", "code", "style"}
    assert not re.search(r'\s(id|on\w+)="', re.sub(r"base64,[^\"]*", "", source))
    assert not re.search(r"[;\"](color|background):", source), "the colours of text are the page's own"
    if one.kernels:
        assert source.startswith(f'{THEMES}<div style="overflow-x:auto"><img ')
        kind, _, data = page.images[0]["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(data).decode() == svg(one)
        assert page.images[0]["alt"] == roofline_words(one)
    for line in str(one).splitlines()[:1]:
        assert line.removesuffix(" ...") in page.text


def test_html_escapes_names():
    one = report(kernel(name="<lambda>", notes=["x <u> y & z"], buffers={"<b>": 1024}), name="<script>f</script>")
    one.notes.append("<i>note</i>")
    page = Page(one._repr_html_())
    assert "<script>f</script> compiles for a TPU v5e." in page.text
    assert "<lambda> (basics.py:214) takes about" in page.text
    assert ["note", "x <u> y & z"] in page.rows
    assert ["note", "<i>note</i>"] in page.rows
    assert ["<b>", "1 KiB", "<0.1%"] in page.rows
    assert "<script>f</script>" in texts(one)[0].words
    refused = Report(CHIPS["v5e"], "<lambda>", refusal=Refusal("a <b> c", "<br>", SourceLine("<stdin>", 1, "a<b>c")))
    assert Page(refused._repr_html_()).text == "<lambda> does not compile for a TPU v5e.a <b> c<stdin>:1   a<b>c<br>"


# --- the roofline ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Text:
    """A text in a picture, and the box that it fills in the widest usual font."""

    words: str
    size: float
    bold: bool
    left: float
    top: float
    right: float
    bottom: float


def texts(one):
    found = []
    for each in ET.fromstring(svg(one)).iter(f"{SVG}text"):
        said, size = "".join(each.itertext()), float(each.get("font-size"))
        wide, x, y = len(said) * size * SANS_EM, float(each.get("x")), float(each.get("y"))
        left = x - wide * {"end": 1, "middle": 0.5}.get(each.get("text-anchor"), 0)
        bold = each.get("font-weight") == "700"
        found.append(Text(said, size, bold, left, y - 0.75 * size, left + wide, y + 0.25 * size))
    return found


def circles(one, radius):
    found = ET.fromstring(svg(one)).iter(f"{SVG}circle")
    return [(float(each.get("cx")), float(each.get("cy"))) for each in found if each.get("r") == str(radius)]


def paths(one):
    """(corners, attributes) of every line."""
    found = []
    for each in ET.fromstring(svg(one)).iter(f"{SVG}path"):
        corners = []
        for letter, numbers in re.findall(r"([MLHV])([\d. -]+)", each.get("d")):
            n = [float(word) for word in numbers.split()]
            x, y = corners[-1] if corners else (0.0, 0.0)
            corners.append({"H": (n[0], y), "V": (x, n[0])}.get(letter) or (n[0], n[1]))
        found.append((corners, each.attrib))
    return found


POWERS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def scales(one):
    """Functions from FLOP per byte and FLOP/s to px, by the numbers that stand at the axes."""
    ticks = [t for t in texts(one) if t.size == 11]
    across = {
        float(t.words.replace(",", "")): (t.left + t.right) / 2 for t in ticks if re.fullmatch(r"[\d.,]+", t.words)
    }
    upwards = {}
    for t in ticks:
        if match := re.fullmatch(r"(10*) ([kMGTP])", t.words):
            upwards[float(match[1]) * POWERS[match[2]]] = t.bottom - 0.25 * t.size - 4
    assert len(across) > 3
    assert len(upwards) > 3

    def scale(points):
        slope, start = np.polyfit(np.log10(list(points)), list(points.values()), 1)
        assert np.allclose(np.log10(list(points)) * slope + start, list(points.values()), atol=0.2), "decades are even"
        return lambda value: math.log10(value) * slope + start

    return scale(across), scale(upwards)


DRAWN = {name: one for name, one in REPORTS.items() if one.kernels}


@pytest.mark.parametrize("name", DRAWN)
def test_no_text_leaves_the_picture_or_covers_another(name):
    root = ET.fromstring(svg(DRAWN[name]))
    left, top, right, bottom = map(float, root.get("viewBox").split())
    found = texts(DRAWN[name])
    assert len(found) > 15
    for each in found:
        assert left + 2 <= each.left < each.right <= right - 2, each
        assert top + 2 <= each.top < each.bottom <= bottom - 2, each
        assert each.size >= 11, each
    for a, b in itertools.combinations(found, 2):
        apart = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
        assert apart, (a, b)


@pytest.mark.parametrize("tpu", CHIPS)
def test_the_roofs_are_those_of_the_three_chips(tpu):
    one = report(tpu=tpu)
    x, y = scales(one)
    named = {t.words.split(",")[0]: t for t in texts(one) if ", ridge " in t.words}
    assert set(named) == {"v5e", "v6e", "TPU7x"}
    roofs = [(corners, attributes) for corners, attributes in paths(one) if attributes.get("fill") == "none"]
    assert len({attributes.get("stroke-dasharray") for _, attributes in roofs}) == len(roofs) == 3
    rings = circles(one, 3)
    for each in CHIPS.values():
        peak, bandwidth = each.flops_per_s(), each.hbm_bytes_per_s
        ridge = (x(peak / bandwidth), y(peak))
        ((corners, attributes),) = [roof for roof in roofs if math.dist(roof[0][1], ridge) < 0.5]
        assert min(math.dist(ring, ridge) for ring in rings) < 0.5
        assert corners[2][1] == pytest.approx(y(peak), abs=0.3)
        start = 10 ** ((corners[0][0] - x(1)) / (x(10) - x(1)))
        assert corners[0][1] == pytest.approx(y(start * bandwidth), abs=0.5)
        label = named[each.name.replace("tpu", "TPU")]
        assert label.words.endswith(f"ridge {peak / bandwidth:.0f}")
        assert label.left > corners[2][0]
        assert abs((label.top + label.bottom) / 2 - corners[2][1]) < 14, "the name stands at the end of its roof"
        assert label.bold == (each.name == tpu), "the chip of the report is told apart by more than its colour"
        assert (float(attributes["stroke-width"]) > 2) == (each.name == tpu)


@pytest.mark.parametrize("name", [name for name, one in DRAWN.items() if len(one.kernels) == 1 and circles(one, 5)])
def test_the_dot_lies_at_intensity_and_speed(name):
    one = DRAWN[name]
    (k,) = one.kernels
    x, y = scales(one)
    (dot,) = circles(one, 5)
    speed, bandwidth = k.flops / k.time_s, one.chip.hbm_bytes_per_s
    peak = one.chip.flops_per_s("int8" if k.mxu_dtype == "int8" else "bfloat16")
    roof = min(peak, k.flops / k.hbm_bytes * bandwidth)
    assert dot[0] == pytest.approx(x(k.flops / k.hbm_bytes), abs=0.5)
    assert dot[1] == pytest.approx(y(speed), abs=0.5)
    up = [corners for corners, _ in paths(one) if corners[0] == dot and corners[1][0] == dot[0]]
    assert any(abs(corners[1][1] - y(roof)) < 0.5 for corners in up), "a line leads to the roof"
    (label,) = [t.words for t in texts(one) if t.words.endswith("of the roof")]
    assert label == f"{roofline.human_time(k.time_s)}, {roofline.percent(speed / roof)} of the roof"


def test_a_label_lies_near_its_dot():
    for name, one in DRAWN.items():
        for t in texts(one):
            if len(one.kernels) == 1 and t.words.endswith("of the roof"):
                (dot,) = circles(one, 5)
                near = min(max(dot[0], t.left), t.right), min(max(dot[1], t.top), t.bottom)
                assert math.dist(near, dot) < 24, name


def test_several_dots_are_numbered_and_the_numbers_are_named():
    one = DRAWN["five"]
    assert len(circles(one, 5)) == 4
    said = [t.words for t in texts(one)]
    assert {"1", "2", "3", "4"} <= set(said)
    for number, each in enumerate(pages.labels(one), 1):
        assert each == f"{number}. matmul_kernel"
        place = said.index(each)
        assert said[place + 1].endswith("of the roof" if number < 5 else "no dot: no arithmetic")
    x, y = scales(one)
    numbers = {t.words: t for t in texts(one) if re.fullmatch(r"\d", t.words) and t.size == 12}
    for number, k in enumerate(one.kernels[:4], 1):
        t = numbers[str(number)]
        dot = x(k.flops / k.hbm_bytes), y(k.flops / k.time_s)
        assert min(math.dist(dot, place) for place in circles(one, 5)) < 0.5
        assert math.dist(((t.left + t.right) / 2, (t.top + t.bottom) / 2), dot) < 25


def test_kernels_at_the_same_place_share_a_dot():
    one = DRAWN["the same"]
    assert len(circles(one, 5)) == 1
    assert "1, 2, 3, 4, 5" in [t.words for t in texts(one)]


def test_more_kernels_than_there_is_room_for_are_counted():
    one = DRAWN["twelve"]
    said = [t.words for t in texts(one)]
    assert len(circles(one, 5)) == 12
    named = sum(bool(re.match(r"\d+\. ", each)) for each in said)
    assert 3 < named < 12
    assert f"and {12 - named} more in the table" in said
    assert all(f"{number}. a_kernel_" in roofline_words(one) for number in range(1, 13))


@pytest.mark.parametrize(
    ("k", "why"),
    [
        (kernel(flops=0.0), "no dot: no arithmetic"),
        (kernel(hbm_bytes=None, time_s=None), "no dot: HBM bytes unknown"),
        (kernel(hbm_bytes=0), "no dot: no HBM bytes"),
        (kernel(time_s=None), "no dot: time unknown"),
    ],
)
def test_a_kernel_without_a_dot_says_why(k, why):
    one = report(k)
    assert circles(one, 5) == []
    assert why in [t.words for t in texts(one)]
    assert f"matmul_kernel: {why}." in roofline_words(one)
    assert "of the roof" not in roofline_words(one)


def test_the_picture_in_words():
    alt = roofline_words(report(tpu="tpu7x"))
    assert alt.startswith("Roofline of matmul on a TPU7x (one of its two TensorCores). ")
    assert "v5e 820 GB/s up to 240 FLOP per byte, then 197 TFLOP/s" in alt
    assert "TPU7x 3.7 TB/s up to 312 FLOP per byte" in alt
    assert "matmul_kernel: 228 FLOP per byte, 159 TFLOP/s, 108 us, 19% of the roof." in alt
