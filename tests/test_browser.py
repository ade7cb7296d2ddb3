"""A reader's first ten minutes in a real browser and JupyterLab: solve, be told so, look at a picture, share it."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright

from course import functions
from pallas_puzzles.app import notebooks
from pallas_puzzles.course import curriculum, session
from pallas_puzzles.targets.tpu.compiler import missing

pytestmark = pytest.mark.browser

BOOK = next(book for book in curriculum.notebooks() if book.name == "basics")
OTHER = next(book for book in curriculum.notebooks() if book.name == "softmax")
SOLVED = [each.id for each in OTHER.puzzles[:2]]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

# The app, so that the test can wait for what JupyterLab knows instead of guessing from the page
SETTINGS = {
    "LabApp": {"expose_app_in_browser": True},
    "ServerApp": {"port_retries": 0},
    "IdentityProvider": {"token": ""},
}

expect.set_options(timeout=30_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "workspace"


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[str]:
    """`puzzles init` and `puzzles lab`, with a configuration that is nobody's; yields the address."""
    folder = workspace.parent
    (folder / "config").mkdir()
    (folder / "config" / "jupyter_lab_config.json").write_text(json.dumps(SETTINGS))
    places = {"PALLAS_PUZZLES_HOME": "home", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data"}
    places |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "IPYTHONDIR": "ipython"}
    variables = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    puzzles = [sys.executable, "-m", "pallas_puzzles"]
    subprocess.run([*puzzles, "init", str(workspace)], env=variables, check=True, capture_output=True)
    code = f"from pallas_puzzles.course.progress import record; [record(each, True) for each in {SOLVED}]"
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    port = free_port()
    log = folder / "lab.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*puzzles, "lab", "--no-browser", "--port", str(port)], env=variables, stdout=stream, stderr=stream
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    end = monotonic() + 60
    while monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            sleep(0.1)
    raise AssertionError(f"JupyterLab does not answer:\n{log.read_text()}")


@pytest.fixture(scope="module")
def page(chromium: str, server: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser.new_page(viewport={"width": 1300, "height": 1100})
        browser.close()


# ---- what a reader does ----------------------------------------------------------------------------------------------


def open_notebook(page: Page, server: str, name: str) -> None:
    page.goto(f"{server}/lab/tree/{name}?reset")
    page.wait_for_function(f"window.jupyterapp?.shell.currentWidget?.context?.path == {json.dumps(name)}")
    page.wait_for_function("window.jupyterapp.shell.currentWidget.context.isReady")


def wait_for_kernel(page: Page) -> None:
    session = "window.jupyterapp.shell.currentWidget.context.sessionContext.session"
    page.wait_for_function(f"{session}?.kernel?.status == 'idle'", timeout=60_000)


def command(page: Page, name: str) -> None:
    """Runs a command of JupyterLab's menus and waits until it is done."""
    page.evaluate("name => window.jupyterapp.commands.execute(name).then(() => null)", name)


def cell_with(page: Page, text: str) -> Locator:
    """The one code cell whose source holds the text, scrolled into view."""
    number = page.evaluate(
        """text => [...window.jupyterapp.shell.currentWidget.content.model.cells]
            .flatMap((cell, i) => cell.type == 'code' && cell.sharedModel.getSource().includes(text) ? [i] : [])""",
        text,
    )
    assert len(number) == 1, f"{len(number)} cells with {text!r}"
    page.evaluate(
        """i => { const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.deselectAll(); notebook.activeCellIndex = i; return notebook.scrollToItem(i, 'start'); }""",
        number[0],
    )
    return page.locator(".jp-Notebook .jp-Cell.jp-mod-active")


def run(page: Page, text: str) -> Locator:
    """Runs the cell with this text; returns its output."""
    cell = cell_with(page, text)
    command(page, "notebook:run-cell")
    # JupyterLab takes the focus a moment after a run; what is typed before goes elsewhere
    page.wait_for_function("document.activeElement.matches('.jp-Cell.jp-mod-active')")
    return cell.locator(".jp-OutputArea")


def solve(page: Page, puzzle: curriculum.Puzzle) -> Locator:
    """Types the last hint over the holes, runs the cell and the check; returns the verdict."""
    answers = functions(puzzle.solution)
    for hole in puzzle.holes:
        cell = cell_with(page, f"def {hole}(")
        after = f"def {hole}("
        lines = cell.locator(".cm-line")
        texts = lines.all_inner_texts()
        start = next(i for i, text in enumerate(texts) if text.startswith(after))
        place = next(i for i, text in enumerate(texts) if i > start and curriculum.HOLE in text)
        lines.nth(place).click()
        page.keyboard.press("Home")
        page.keyboard.press("Shift+End")
        body = [line for line in answers[hole].splitlines()[1:] if line.strip()]
        page.keyboard.type("\n".join(line.strip() for line in body))
    run(page, f"def {puzzle.holes[0]}(")
    return run(page, f'"{puzzle.id}"')


REPORT = """
# %%
import pallas_puzzles

pallas_puzzles.tpu_report(vector_add, normal((5120,)), normal((5120,)))

# %%
show(vector_add, normal((1024,)), normal((1024,)), live=True)
"""


def words_at(drawn: Locator, step: int) -> str:
    """What the picture says in words, once it is at this step."""
    status = drawn.get_by_role("status")
    expect(status).to_contain_text(f"step {step},")
    return status.inner_text()


def is_loaded(picture: Locator) -> bool:
    return picture.evaluate("image => image.complete && image.naturalWidth > 100")


def test_what_a_reader_finds_who_comes_back(page: Page, server: str, workspace: Path) -> None:
    page.goto(server)
    page.wait_for_function("window.jupyterapp?.shell.currentWidget?.context?.path == 'softmax.ipynb'")
    upcoming = page.get_by_role("heading", name=f"Puzzle {OTHER.puzzles[2].number}: {OTHER.puzzles[2].title}")
    expect(upcoming).to_be_in_viewport()
    wait_for_kernel(page)
    page.wait_for_function("document.querySelector('.jp-Cell.jp-mod-active').getBoundingClientRect().top < 200")
    expect(page.locator(".jp-Cell.jp-mod-active")).to_contain_text(OTHER.puzzles[2].title)

    # the files in the order of the course, the notebooks first
    names = page.locator(".jp-DirListing-itemText").all_inner_texts()
    course = [book.name for book in curriculum.notebooks()]
    assert names == [f"{name}.{kind}" for kind in ("ipynb", "py") for name in course]

    # nothing in the way, and nothing to be saved before a key is pressed
    expect(page.get_by_text("Jupyter news")).to_have_count(0)
    assert page.evaluate("window.jupyterapp.shell.currentWidget.context.model.dirty") is False
    expect(page.locator(".lm-mod-current.jp-mod-dirty")).to_have_count(0)
    page.screenshot(path=workspace.parent / "0-opened.png")


def test_jupyterlab_follows_the_links_for_colab(page: Page, server: str, workspace: Path) -> None:
    notebooks.write(notebooks.build(BOOK.path), workspace / "published.ipynb")
    open_notebook(page, server, "published.ipynb")
    cell_with(page, f'check("{BOOK.puzzles[0].id}"')
    title = f"Puzzle {BOOK.puzzles[1].number}: {BOOK.puzzles[1].title}"
    heading = page.get_by_role("heading", name=title).element_handle()
    top = "heading => heading.getBoundingClientRect().top"
    assert heading.evaluate(top) > 300
    page.locator(".jp-Notebook").get_by_role("link", name=title, exact=True).click()
    page.wait_for_function(f"heading => heading.isConnected && ({top})(heading) < 200", arg=heading)


def test_a_readers_first_ten_minutes(page: Page, server: str, workspace: Path) -> None:
    pictures = workspace.parent
    with (workspace / "basics.py").open("a", encoding="utf-8") as mine:
        mine.write(REPORT)
    open_notebook(page, server, "basics.ipynb")
    wait_for_kernel(page)
    run(page, "from pallas_puzzles import")
    first, second = BOOK.puzzles[:2]

    # unsolved, then solved by typing
    run(page, f"def {first.holes[0]}(")
    expect(run(page, f'"{first.id}"')).to_contain_text(f"Not solved yet {first.id} {first.title}")
    hints = page.get_by_role("button", name="Next hint (2 left)")
    hints.click()
    expect(page.get_by_role("button", name="Next hint (1 left)")).to_be_visible()
    expect(page.get_by_text(f"{first.title}: hint 1 of 3")).to_be_visible()
    verdict = solve(page, first)
    expect(verdict).to_contain_text(f"Solved {first.id} {first.title}")
    expect(verdict).to_contain_text(f"1 of {len(BOOK.puzzles)} solved in basics.")
    expect(verdict).not_to_contain_text(re.compile("not solved yet", re.IGNORECASE))
    expect(page.get_by_role("button", name="Next hint")).to_have_count(0)
    page.screenshot(path=pictures / "1-solved.png")

    # on to the next
    verdict.get_by_role("link", name=f"Next: {second.id} {second.title}").click()
    expect(page.get_by_role("heading", name=f"Puzzle {second.number}: {second.title}")).to_be_in_viewport()

    # a picture, stepped through by the keyboard
    expect(solve(page, second)).to_contain_text(f"Solved {second.id} {second.title}")
    drawn = run(page, "show(vector_add, normal((1280")
    slider = drawn.get_by_role("slider", name="grid step")
    expect(slider).to_be_visible()
    before = words_at(drawn, 0)
    for _ in range(2):
        slider.press("ArrowRight")
    after = words_at(drawn, 2)
    assert "block (0,)" in before
    assert "block (2,)" in after
    page.screenshot(path=pictures / "2-picture.png")

    # the same with sliders for block sizes: a change runs the kernel again
    live = run(page, "live=True").first  # the second is in it, around the picture
    expect(live).to_contain_text("(4,) = 4 steps")
    live.get_by_role("slider").first.press("ArrowLeft")
    expect(live).to_contain_text("(8,) = 8 steps")
    live.get_by_role("slider", name="grid step").press("ArrowRight")
    assert "block (1,)" in words_at(live, 1)

    # what the TPU compiler makes of it, or how to get one
    report = run(page, "tpu_report(vector_add")
    if missing() is None:
        expect(report).to_contain_text("vector_add compiles for a TPU v5e.", timeout=60_000)
        expect(report).to_contain_text("VMEM")
        assert is_loaded(report.locator("img").first)
        report.scroll_into_view_if_needed()
        page.screenshot(path=pictures / "3-report.png")
    else:
        expect(report).to_contain_text("--extra tpu-compiler")

    # what is saved is saved in the .py as well, for whoever prefers an editor and `puzzles check`
    command(page, "docmanager:save")
    assert session.run(first.id, source=workspace / "basics.py")

    # what the reader sends to somebody else: the same outputs, signed by nobody
    node = json.loads((workspace / "basics.ipynb").read_text("utf-8"))
    node["cells"][0]["source"] = ["# Sent by mail"]
    (workspace / "sent.ipynb").write_text(json.dumps(node), "utf-8")
    open_notebook(page, server, "sent.ipynb")
    cell_with(page, "show(vector_add, normal((1280")
    drawn = page.locator(".jp-Notebook .jp-Cell.jp-mod-active .jp-OutputArea")
    picture = drawn.locator("img").first
    expect(picture).to_be_visible()
    assert is_loaded(picture)
    expect(drawn.get_by_role("slider")).to_have_count(0)
    assert "script" not in drawn.first.inner_html()
    page.screenshot(path=pictures / "4-untrusted.png")
    if missing() is None:
        cell_with(page, "tpu_report(vector_add")
        assert is_loaded(drawn.locator("img").first)
        expect(drawn.first).to_contain_text("bundles")
        page.screenshot(path=pictures / "5-untrusted-report.png")
