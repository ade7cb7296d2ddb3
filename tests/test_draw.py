"""Pictures: every kernel draws, the words are right, an untrusted page keeps what matters, sliders change figures."""

import base64
import html.parser
import itertools
import json
import re
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import zoo
from mistakes import MISTAKES
from pallas_puzzles.course.inputs import normal
from pallas_puzzles.lens.machine import figures
from pallas_puzzles.text import human_bytes
from pallas_puzzles.view import draw, live, words
from pallas_puzzles.view.paper import HOSTS, PALETTE, STYLE
from pallas_puzzles.view.show import show
from pallas_puzzles.view.words import in_range, state_words, step_words
from production_kernels import PRODUCTION
from zoo import ZOO, like

DRAWABLE = {**ZOO, **PRODUCTION}
SVG = "{http://www.w3.org/2000/svg}"


def picture_of(name: str) -> draw.Picture:
    exhibit = {**DRAWABLE, **MISTAKES}[name]
    return show(exhibit.fn, *exhibit.args)


def matmul_64(**blocks: int) -> draw.Picture:
    """Grid (4, 4, 4)."""
    return show(zoo.matmul, normal((64, 128)), normal((128, 512)), **{"bm": 16, "bn": 128, "bk": 32, **blocks})


class Page(html.parser.HTMLParser):
    """What a browser would find in a piece of HTML: images, table cells, text."""

    def __init__(self, source: str):
        super().__init__()
        self.images: list[dict[str, Any]] = []
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def untrusted(source: str) -> str:
    """What JupyterLab leaves of an output that nobody trusts: no scripts, SVG, styles, hidden, ids, data-*."""
    source = re.sub(r"<(script|svg|style)\b.*?</\1>", "", source, flags=re.S)
    return re.sub(r'\s(id|hidden|class|data-\w+|on\w+)(="[^"]*")?(?=[\s>])', "", source)


def svg_in(image: dict[str, Any]) -> ET.Element:
    kind, _, data = image["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    return ET.fromstring(base64.b64decode(data))


# --- every kernel ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWABLE)
def test_every_kernel_draws(name: str) -> None:
    picture = picture_of(name)
    assert picture.traces, picture.note
    assert picture.note == ""
    for call, trace in enumerate(picture.traces):
        for step in {0, trace.n // 2, max(0, trace.n - 1)}:
            root = ET.fromstring(picture.svg(step, call))
            shown = "".join(root.itertext())
            assert all(o.name in shown for o in trace.call.operands)
            assert not list(root.iter(SVG + "script"))
            assert [e.text for e in root.iter(SVG + "style")] == [STYLE.removesuffix("</style>").partition(">")[2]]


@pytest.mark.parametrize("name", DRAWABLE)
def test_text_is_at_most_a_screen_per_call(name: str) -> None:
    for trace in picture_of(name).traces:
        lines = words.text_lines(trace)
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100
        assert lines[0].startswith(f"{trace.call.name}: grid {trace.call.grid}")


@pytest.mark.parametrize("name", DRAWABLE)
def test_blocks_are_drawn_where_they_are(name: str) -> None:
    """Every block at its place, in true proportions to its array unless it is a sliver, and inside the paper."""
    for trace in picture_of(name).traces:
        for panel in draw._panels(trace):
            m = panel.map
            steps = panel.blocks
            for block in {b for b in steps if b is not None}:
                x, y = m.place(block) or pytest.fail(f"{panel.title}: no place for block {block}")
                assert -0.01 <= x <= m.w - m.block_w + 0.01, (panel.title, block)
                assert -0.01 <= y <= m.h - m.block_h + 0.01, (panel.title, block)


def test_a_block_has_its_true_proportions() -> None:
    (trace,) = matmul_64().traces
    x, y, o = (p.map for p in draw._panels(trace)[1:])
    assert x.block_w / x.block_h == pytest.approx(32 / 16)
    assert y.block_w / y.block_h == pytest.approx(128 / 32)
    assert x.group_w / x.block_w == pytest.approx(128 / 32)
    assert o.group_w / y.group_w == pytest.approx(512 / 512), "one scale for all operands"
    assert x.place((1, 2)) == (pytest.approx(2 * x.block_w), pytest.approx(x.block_h))
    assert x.place((4, 0)) is None, "there are four rows of blocks"


def test_four_vectors_stand_side_by_side() -> None:
    panels = draw._panels(picture_of("add_vectors").traces[0])
    assert len(panels) == 4
    width, _ = draw._flow(panels, 0)
    assert {p.y for p in panels} == {0}
    assert all(a.x + a.w < b.x for a, b in itertools.pairwise(panels))
    assert width <= 801


@pytest.mark.parametrize("rank", range(6))
def test_every_rank_draws(rank: int) -> None:
    shape = (2, 3, 2, 16, 128)[5 - rank :]

    def copy(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        grid = tuple(shape[:-2]) if rank > 2 else (2,) if rank else ()
        block = tuple([None] * (rank - 2) + [8, 128])[:rank] if rank > 1 else (64,) * rank

        def index(*at):
            return (*at, 0, 0) if rank > 2 else (*at, 0)[:rank]

        spec = pl.BlockSpec(block, index)
        return pl.pallas_call(kernel, grid=grid, in_specs=[spec], out_specs=spec, out_shape=like(x))(x)

    picture = show(copy, np.ones(shape, np.float32))
    assert picture.traces, picture.note
    (trace,) = picture.traces
    assert trace.call.operands[0].shape == shape
    shown = "".join(ET.fromstring(picture.svg()).itertext())
    assert str(shape) in shown
    if rank > 2:
        assert "None" in shown
        assert draw._panels(trace)[1].map.groups == np.prod(shape[:-2])


# --- words -----------------------------------------------------------------------------------------------------------


def test_words_of_a_step() -> None:
    (trace,) = matmul_64().traces
    assert step_words(trace, 7) == (
        "step 7, grid index (0, 1, 3): x_ref block (0, 3) fetched; y_ref block (3, 1) fetched; "
        "o_ref block (0, 1) written back"
    )
    assert state_words(trace, 2, 6) == "kept"


def test_out_of_range_is_said_and_drawn() -> None:
    picture = picture_of("input_block_past_the_end")
    assert "x_ref block (4, 0) out of range" in step_words(picture.traces[0], 9)
    assert "out of range" not in step_words(picture.traces[0], 8)
    marks = {e.get("stroke") for e in ET.fromstring(picture.svg(0)).iter(SVG + "path")}
    assert "var(--vermilion)" in marks, "the strip shows it at every step of the picture"
    assert "out of range" in "".join(ET.fromstring(picture.svg(9)).itertext())


def test_arrays_that_stay_in_hbm() -> None:
    picture = picture_of("swap_halves_by_copies")
    assert "x_hbm stays in HBM" in step_words(picture.traces[0], 0)
    rows = {row[0]: row for row in Page(picture._repr_html_()).rows}
    assert rows["x_hbm"][3] == "in HBM"
    assert rows["own copies"][6] == human_bytes(sum(picture.traces[0].dma_bytes))
    assert "own copies" in "".join(ET.fromstring(picture.svg()).itertext())


def test_the_table_adds_up() -> None:
    picture = matmul_64()
    rows = {row[0]: row[1:] for row in Page(picture._repr_html_()).rows}
    assert rows["array"] == ["shape", "dtype", "block", "VMEM", "moves", "HBM traffic", "vs. once"]
    assert rows["x_ref"] == ["(64, 128)", "float32", "(16, 32)", "2 × 2 KiB", "64", "128 KiB", "4×"]
    assert rows["o_ref"] == ["(64, 512)", "float32", "(16, 128)", "2 × 8 KiB", "16", "128 KiB", "1×"]
    assert rows["acc_ref"][2:4] == ["scratch", "8 KiB"]
    costs = figures(picture.traces[0])
    text = Page(picture._repr_html_()).text
    for total in ("VMEM 60 KiB", "HBM traffic 1.25 MiB", f"{costs.flops:,} FLOPs", "6.5 FLOP per HBM byte"):
        assert total in text
        assert total in str(picture)


def test_scalars_squeezed_dimensions_and_smem_have_words() -> None:
    assert "scalars" in str(picture_of("gather_blocks"))
    assert "(None, None, 8, 32)" in str(picture_of("scores_per_batch_and_head"))
    assert "SMEM" in str(picture_of("polynomial_with_coefficients_in_smem"))


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (49_248, "48.09 KiB"), (49_280, "48.12 KiB"), (3 << 20, "3 MiB")],
)
def test_human_bytes(nbytes: int, said: str) -> None:
    assert human_bytes(nbytes) == said


def test_a_terminal_that_knows_only_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = matmul_64()
    assert "█" in str(picture)
    assert "×" in str(picture)
    monkeypatch.setattr("sys.stdout", types.SimpleNamespace(encoding="ascii"))
    text = str(picture)
    text.encode("ascii")
    assert "#" in text
    assert "2 x 2 KiB" in text
    assert "?" not in text


def test_the_strip_in_text() -> None:
    lines = str(matmul_64()).splitlines()
    assert lines[-3].split() == ["x_ref", "█" * 64]
    assert lines[-1].split() == ["o_ref", "───█" * 16]


# --- HTML ------------------------------------------------------------------------------------------------------------


def test_an_untrusted_page_keeps_picture_and_table() -> None:
    picture = matmul_64()
    source = untrusted(picture._repr_html_())
    page = Page(source)
    assert not {"script", "svg", "style"} & set(page.tags)
    (image,) = page.images
    assert source.index("<img") < source.index("<table")
    assert "Step 32, grid index (2, 0, 0): x_ref block (2, 0) fetched" in image["alt"], "half way there is most to see"
    assert "o_ref (64, 512) in blocks (16, 128) is written back 16 times" in image["alt"]
    assert len(svg_in(image)) > 0
    assert [row[0] for row in page.rows] == ["array", "x_ref", "y_ref", "o_ref", "acc_ref"]
    assert "VMEM 60 KiB" in page.text


def test_nothing_is_loaded_from_anywhere() -> None:
    source = matmul_64()._repr_html_()
    svg = ET.tostring(svg_in(Page(source).images[0])).decode().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in source
    assert "http" not in svg
    assert "url(" not in source
    assert "url(" not in svg
    assert "<link" not in source


def test_sizes() -> None:
    assert len(matmul_64()._repr_html_()) < 27_500
    large = show(zoo.matmul, normal((256, 256)), normal((256, 512)), bm=16, bn=128, bk=32)
    assert large.traces[0].n == 512
    assert len(large._repr_html_()) < 65_000


def hidden_in_run_state(x: Any) -> Any:
    def body(refs: Any) -> None:
        x_ref, o_ref = refs

        @pl.core_map(pltpu.TensorCoreMesh(axis_name="core", num_cores=1))
        def _() -> None:
            pltpu.sync_copy(x_ref, o_ref)

    return pl.run_state(body)((x, jnp.zeros_like(x)))[1]


@pytest.mark.filterwarnings("ignore:.*core_map is deprecated:DeprecationWarning")
def test_a_kernel_that_cannot_be_followed_is_not_said_to_be_absent() -> None:
    picture = show(hidden_in_run_state, np.ones((8, 128), np.float32))
    assert not picture.traces
    assert "the lens cannot follow a kernel inside of run_state" in picture.note
    assert "reaches no pallas_call" not in picture.note
    assert "reaches no pallas_call" in show(lambda x: x + 1, np.ones(8, np.float32)).note


def test_long_kernels_are_cut_and_say_so() -> None:
    picture = show(zoo.matmul, normal((256, 256)), normal((256, 1024)), bm=16, bn=128, bk=32)
    assert picture.traces[0].n == 1024
    source = picture._repr_html_()
    assert len(source) < 75_000
    image = svg_in(Page(source).images[0])
    assert "steps 0 to 511 of 1,024" in "".join(image.itertext())
    assert "Drawn are steps 0 to 511 of 1,024." in Page(source).images[0]["alt"]
    assert "show(..., first_step=n)" in Page(source).text
    assert script_data(source)["n"] == 512
    assert "of 1,024" in str(picture)
    assert "1,024" in Page(source).rows[1][5], "the figures are those of all steps"


def test_many_calls_are_cut_and_say_so() -> None:
    def often(x):
        for _ in range(11):
            x = zoo.double_and_add(x, x)
        return x

    picture = show(often, normal((16, 128)))
    assert len(picture.traces) == 11
    assert len(Page(picture._repr_html_()).images) == 8
    assert "and 3 more calls that are not drawn" in Page(picture._repr_html_()).text
    assert "and 3 more calls that are not drawn" in str(picture)


def test_names_are_escaped() -> None:
    def hostile(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]

        return pl.pallas_call(kernel, out_shape=like(x), name="a<b>&'c\"</script>")(x)

    picture = show(hostile, normal((8, 128)))
    assert picture.traces, picture.note
    source = picture._repr_html_()
    assert "<b>&" not in source
    assert "</script></script>" not in source
    assert "a<b>&'c\"</script>" in "".join(svg_in(Page(source).images[0]).itertext())


def script_data(source: str) -> dict[str, Any]:
    found = re.search(r"const D = (\{.*?\}), C = ", source)
    assert found
    return json.loads(found[1])


def test_ids_are_unique() -> None:
    ids = re.findall(r'id="(\w+)"', "".join(matmul_64()._repr_html_() for _ in range(3)))
    assert len(ids) == len(set(ids)) == 3


# --- nothing to show -------------------------------------------------------------------------------------------------


def unsolved(x):
    pass


def kernel_not_written(x):
    def kernel(x_ref, o_ref):
        pass

    return pl.pallas_call(kernel, grid=(2,), in_specs=[zoo.rows(8, 128)], out_specs=zoo.rows(8, 128),
                          out_shape=like(x))(x)  # fmt: skip


def grid_not_written(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, grid=unsolved(x), in_specs=[zoo.rows(8, 128)], out_specs=zoo.rows(8, 128),
                          out_shape=like(x))(x)  # fmt: skip


def raises(x):
    raise RuntimeError("to be <done>\nsecond line")


def loops(x):
    while True:
        pass


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (unsolved, "Nothing to show yet: unsolved reaches no pallas_call."),
        (jnp.sin, "reaches no pallas_call"),
        (raises, "Nothing to show yet: raises stopped with RuntimeError: to be <done> (test_draw.py:"),
        (grid_not_written, "Nothing to show yet: grid_not_written"),
    ],
)
def test_what_cannot_be_shown_is_one_calm_sentence(fn: Any, said: str) -> None:
    picture = show(fn, normal((16, 128)))
    assert said in str(picture)
    assert "\n" not in str(picture)
    assert "Traceback" not in str(picture)
    page = Page(picture._repr_html_())
    assert said in page.text
    assert not page.images


def test_a_kernel_without_a_body_is_drawn_and_said() -> None:
    picture = show(kernel_not_written, normal((16, 128)))
    assert picture.traces
    assert "kernel has not stored anything in o_ref yet" in str(picture)
    assert "kernel has not stored anything in o_ref yet" in Page(picture._repr_html_()).text


@pytest.mark.parametrize("name", MISTAKES)
def test_no_mistake_makes_it_raise(name: str) -> None:
    picture = picture_of(name)
    assert picture.traces or picture.note.startswith("Nothing to show yet: ")
    assert str(picture)
    assert picture._repr_html_()


def test_an_endless_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "TIME_LIMIT_S", 0.2)
    assert "Nothing to show yet: loops stopped with TimeLimit" in str(show(loops, normal((8, 128))))


def test_wrong_arguments_are_no_exception() -> None:
    assert "missing 1 required positional argument" in str(show(zoo.matmul, normal((8, 128))))
    assert "Nothing to show yet" in str(show(zoo.matmul, "not an array", 3))


def test_what_the_machine_cannot_run_is_drawn_without_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    run_call = draw.run_call

    def refuses(call: Any, *, plan_only: bool = False, **more: Any) -> Any:
        if not plan_only:
            raise draw.Beyond("remote copies")
        return run_call(call, plan_only=True, **more)

    monkeypatch.setattr(draw, "run_call", refuses)
    picture = matmul_64()
    assert "cannot follow remote copies" in picture.note
    page = Page(picture._repr_html_())
    assert page.images
    assert page.rows[1][5] == "64"
    assert "HBM traffic 1.25 MiB" in page.text
    assert "FLOP" not in page.text


# --- right and wrong blocks ------------------------------------------------------------------------------------------


def test_right_and_wrong_blocks() -> None:
    operand = matmul_64().traces[0].call.outs[0]
    status = dict.fromkeys(itertools.product(range(4), range(4)), "ok")
    status[1, 2] = "wrong <values>"
    root = ET.fromstring(draw.tile_map_svg(operand, status))
    right, wrong, crosses = [e.get("d").count("M") for e in root.iter(SVG + "path")][-4:-1]
    assert (right, wrong, crosses) == (15, 1, 2), "a cross has two strokes"
    assert "o_ref: 1 of 16 blocks wrong" in "".join(root.itertext())
    page = Page(untrusted(draw.tile_map_html(operand, status)))
    assert page.images[0]["alt"] == "o_ref: crossed: wrong <values> in (1, 2)"
    assert "crossed: wrong <values> in (1, 2)" in page.text
    assert words.tile_map_text(status)[1] == "· · ✗ ·"


def test_thousands_of_blocks_stay_small() -> None:
    operand = show(zoo.double_and_add, normal((1024, 128)), normal((1024, 128))).traces[0].call.outs[0]
    operand.shape = (1024, 8192)
    status = {block: "zero" if block[0] % 2 else "ok" for block in np.ndindex(*operand.tiles)}
    assert len(status) >= 4096
    assert len(draw.tile_map_svg(operand, status)) < 600_000
    assert words.tile_map_text(status) == []


# --- live ------------------------------------------------------------------------------------------------------------


def live_matmul() -> live.LivePicture:
    args, blocks = (zoo.normal(64, 512), zoo.normal(512, 512)), {"bk": 128}
    return live.LivePicture(show(zoo.matmul, *args, **blocks).traces, "", zoo.matmul, args, blocks)


def widgets_of(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from widgets_of(child)


def test_only_sizes_that_run_are_offered() -> None:
    assert live.block_sizes(zoo.matmul, {"bk": 64}) == {"bm": 16, "bn": 128, "bk": 64}
    choices = live_matmul().choices()
    assert choices["bm"] == [8, 16, 32, 64], "4 is no multiple of 8"
    assert choices["bn"] == [128, 256, 512], "64 is no multiple of 128"
    assert choices["bk"] == [128, 256, 512], "32 and 64 are no multiples of 128, the last dimension of x"


def test_moving_a_slider_runs_the_kernel_again() -> None:
    bench = live._Bench(live_matmul())
    sliders = {w.description: w for w in widgets_of(bench.widget) if hasattr(w, "options")}
    assert set(sliders) == {"bm", "bn", "bk"}
    before = drawn_by(bench)
    assert "HBM traffic 4.625 MiB" in before.text
    sliders["bm"].value = 64
    after = drawn_by(bench)
    assert after.rows[1][3:6] == ["(64, 128)", "2 × 32 KiB", "16"]
    assert "HBM traffic 1.625 MiB" in after.text, "y is read once, not four times"
    assert "Step 8, grid index (0, 2, 0)" in after.images[0]["alt"], "half of the 16 steps"
    start, now = Page(bench.costs.value).rows[1:]
    assert start == ["at the start", "bm=16, bn=128, bk=128", "64", "168 KiB", "4.625 MiB", start[5]]
    assert now == ["now", "bm=64, bn=128, bk=128", "16", "288 KiB", "1.625 MiB", now[5]]
    assert float(now[5]) > 2 * float(start[5]), "FLOPs per byte"


def drawn_by(bench: live._Bench) -> Page:
    (shown,) = bench.drawn.outputs
    assert "<script>" in shown["data"]["text/html"], "it steps through the picture, here as anywhere"
    return Page(shown["data"]["text/html"])


def test_sizes_that_do_not_go_together_are_said() -> None:
    picture = live_matmul().with_sizes({"bm": 7})
    assert isinstance(picture, draw.Picture)
    assert str(picture)


def test_live_without_a_kernel_is_the_plain_picture() -> None:
    picture = show(zoo.matmul, normal((64, 128)), normal((128, 512)), live=True)
    assert type(picture) is draw.Picture
    assert "live=True needs a notebook with a running kernel" in str(picture)
    assert Page(picture._repr_html_()).images


def test_live_without_ipywidgets_is_the_plain_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    picture = show(zoo.matmul, normal((64, 128)), normal((128, 512)), live=True)
    assert "live=True needs ipywidgets" in picture.note
    assert len(picture.note.splitlines()) == 1
    assert picture.traces


def test_live_of_something_broken_does_not_raise() -> None:
    picture = live.LivePicture([], "Nothing to show yet: no.", raises, (jnp.ones(3),), {})
    assert "Nothing to show yet" in live._Bench(picture).drawn.outputs[0]["data"]["text/html"]


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_the_script(tmp_path: Path, chromium: str) -> None:
    """Two pictures on a page: each says at every step what Python says, and leaves the other alone."""
    from playwright.sync_api import sync_playwright

    names = ["scores_per_batch_and_head", "input_block_past_the_end", "moving_average_over_windows", "gather_blocks",
             "swap_halves_by_copies", "difference_with_padded_windows", "vmapped_twice_over_one_operand"]  # fmt: skip
    pictures = {name: picture_of(name) for name in names}
    blocks = "".join(f'<section id="{n}">{p._repr_html_()}</section>' for n, p in pictures.items())
    file = tmp_path / "pictures.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{blocks}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("http*://**", lambda route: errors.append(route.request.url))
        page.goto(file.as_uri())
        page.evaluate("window.heard = 0; document.addEventListener('keydown', () => window.heard++)")
        for name, picture in pictures.items():
            (trace,) = picture.traces
            section = page.locator(f"#{name}")
            if trace.n < 2:
                expected = 2 if trace.flight.transfers else 1  # its own copies have a picture, too
                assert section.locator("img").count() == expected, "one step needs no slider"
                continue
            assert section.locator("img").count() == 0
            status, slider = section.locator("[role=status]"), section.locator("input[type=range]")
            others = {n: page.locator(f"#{n} [role=status]").all_inner_texts() for n in names if n != name}
            slider.focus()
            for step in range(trace.n):
                assert status.inner_text() == step_words(trace, step)
                assert section.locator("svg[role=img]").get_attribute("aria-label") == step_words(trace, step)
                check_positions(section, trace, step)
                page.keyboard.press("ArrowRight")
            section.get_by_label("previous step").click()
            assert status.inner_text() == step_words(trace, trace.n - 2)
            assert others == {n: page.locator(f"#{n} [role=status]").all_inner_texts() for n in others}
        assert page.evaluate("window.heard") == 0, "an arrow key is also a shortcut of the notebook"
        gather = page.locator("#gather_blocks")
        gather.get_by_role("button", name="play").click()
        gather.get_by_role("button", name="play").wait_for(timeout=10_000)  # "stop" in between
        assert "step 4," in gather.get_by_role("status").inner_text()
        gather.get_by_role("button", name="play").press("Enter")
        gather.get_by_role("button", name="stop").press("Space")
        stopped = gather.get_by_role("status").inner_text()
        page.wait_for_timeout(1000)
        assert gather.get_by_role("status").inner_text() == stopped
        browser.close()
    assert errors == []


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", ["ink", "muted", "blue", "warning"])
@pytest.mark.parametrize("theme", [0, 1])
def test_text_can_be_read_in_both_themes(name: str, theme: int) -> None:
    low, high = sorted(luminance(PALETTE[each][theme]) for each in (name, "paper"))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_styles_reach_nothing_but_our_own() -> None:
    style = STYLE + "<style>" + draw._CONTROLS
    selectors = re.findall(r"(?:^|[{}>,])([^{}<>,;]*?)(?=[,{])", re.sub(r"@supports\([^{]*\)|\{[^{}]*\}", "{}", style))
    assert (named := [each for each in selectors if each])
    assert all(".pallas" in each for each in named), named


def paper_of(page: Any, image: bytes) -> bool:
    """Whether a screenshot is dark where the picture's card is."""
    script = """data => new Promise(done => { const image = new Image(); image.onload = () => {
        const c = document.createElement("canvas"), x = c.getContext("2d");
        c.width = image.width; c.height = image.height;
        x.drawImage(image, 0, 0); done(x.getImageData(image.width - 12, 12, 1, 1).data[0]) };
        image.src = "data:image/png;base64," + data })"""
    shade = page.evaluate(script, base64.b64encode(image).decode())
    assert shade < 64 or shade > 192
    return shade < 64


def test_pictures_follow_the_theme_of_the_page_else_that_of_the_system(tmp_path: Path, chromium: str) -> None:
    """As an <img> and brought to life, wherever a page has a theme of its own; without styles, that of the system."""
    from playwright.sync_api import sync_playwright

    alive, trace = picture_of("scores_per_batch_and_head")._repr_html_(), matmul_64().traces[0]
    still = draw.image(matmul_64().svg(), draw.alt_words(trace))
    attributes = [
        host.strip("[]") if "[" in host else f'class="{host.split(":")[0][1:]}"' for two in HOSTS for host in two
    ]
    pages = {f"<body {a}>{alive}{still}": i % 2 == 1 for i, a in enumerate(attributes)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
            system = {f"<body>{alive}{still}": scheme == "dark", f"<body>{untrusted(alive + still)}": scheme == "dark"}
            for body, dark in {**pages, **system}.items():
                page.set_content(f"<!doctype html>{body}")
                seen = [paper_of(page, card.screenshot()) for card in page.locator("img, svg[role=img]").all()]
                assert seen == [dark, dark], (body[:60], scheme)
        browser.close()


def test_a_narrow_page_scrolls_and_keeps_letters_readable(tmp_path: Path, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    source = matmul_64()._repr_html_()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for body in (source, untrusted(source)):
            page = browser.new_page(viewport={"width": 600, "height": 900})
            page.set_content(f"<!doctype html>{body}")
            card = page.locator("img, svg[role=img]").first
            natural = card.evaluate("e => e.naturalWidth || e.viewBox.baseVal.width")
            assert card.bounding_box()["width"] >= 0.89 * natural > 600
            assert page.evaluate("document.documentElement.scrollWidth") <= 600, "the picture scrolls, not the page"
        browser.close()


def check_positions(section: Any, trace: Any, step: int) -> None:
    for number, panel in enumerate(draw._panels(trace)):
        if number == 0 or not in_range(trace, number - 1, step) or panel.blocks[step] is None:
            continue
        mark = section.locator(f'[data-p="{number}"] [data-k="r"]')
        x, y = panel.map.place(panel.blocks[step])
        assert float(mark.get_attribute("x")) == pytest.approx(x, abs=0.11), (panel.title, step)
        assert float(mark.get_attribute("y")) == pytest.approx(y, abs=0.11), (panel.title, step)


def test_jit_and_friends_draw() -> None:
    picture = show(jax.jit(zoo.double_and_add), normal((16, 128)), np.ones((16, 128), np.float32))
    assert len(picture.traces) == 1
