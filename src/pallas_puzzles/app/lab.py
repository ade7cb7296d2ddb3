"""JupyterLab on the reader's copies: open at the next puzzle, files in the order of the course, nothing in the way.

What JupyterLab is told is in SETTINGS, in the workspace. The reader's own settings of Jupyter stay, and win.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from ..course import curriculum
from ..course.progress import Progress
from .pairing import halves
from .workspace import WorkspaceError

SETTINGS = ".jupyter"  # in the workspace
EXTENSIONS = Path(__file__).parent / "labextension"

# Defaults: what the reader chose in JupyterLab's settings wins
DEFAULTS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
# The first layout. Oldest first, which JupyterLab calls descending, is the course's order: see lab_files.py
LAYOUT = {"file-browser-filebrowser:columns": {"sortState": {"direction": "descending", "key": "date_created"}}}


def require() -> None:
    """Raises WorkspaceError when JupyterLab is not installed."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkspaceError(
            "JupyterLab is not installed. In a clone `uv run puzzles lab` brings it; elsewhere `pip install jupyterlab`"
        )


def launch(folder: Path, state: Progress, more: list[str]) -> None:
    """Hands the terminal over to JupyterLab on a workspace. `more` is what the reader adds to its command line."""
    upcoming = state.next()
    page = f"/lab/tree/{upcoming.notebook}.ipynb" if upcoming else "/lab"
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}", f"--LabApp.default_url={page}"]
    command += ["--ServerApp.contents_manager_class=pallas_puzzles.app.lab_files.CourseOrder"]
    command += [f"--LabApp.extra_labextensions_path={EXTENSIONS}", "--log-level=WARN"]
    variables, places = dict(os.environ), next_places(folder, state)
    with contextlib.suppress(OSError):  # a folder that cannot be written: JupyterLab as it is elsewhere
        write_settings(folder, places)
        command += [f"--LabApp.workspaces_dir={folder / SETTINGS / 'layout'}"]
        known = variables.get("JUPYTER_CONFIG_PATH")
        variables["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, (str(folder / SETTINGS), known)))
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in more:
        print("You are root. JupyterLab refuses to run as root, so this starts it with --allow-root.", flush=True)
        command += ["--allow-root"]
    if upcoming:
        print(f"next: {upcoming.id}  {upcoming.title}", flush=True)
        if f"{upcoming.notebook}.ipynb" in places:
            print("The kernel is new: first choose Run > Run All Above Selected Cell.", flush=True)
    print("Ctrl-C stops JupyterLab.", flush=True)
    _become([*command, *more], variables)


def write_settings(folder: Path, places: dict[str, str]) -> None:
    """Writes what JupyterLab reads at its start; a layout that is there stays. Raises OSError."""
    config, layout = folder / SETTINGS / "labconfig", folder / SETTINGS / "layout"
    config.mkdir(parents=True, exist_ok=True)
    (config / "default_setting_overrides.json").write_text(json.dumps(DEFAULTS, indent=1) + "\n", "utf-8")
    page = {"pallasPuzzles": json.dumps(places)}  # of a dict JupyterLab would keep the keys alone
    (config / "page_config.json").write_text(json.dumps(page, indent=1) + "\n", "utf-8")
    if not layout.exists():
        from jupyterlab_server.workspaces_handler import WorkspacesManager

        WorkspacesManager(str(layout)).save("default", json.dumps({"data": LAYOUT, "metadata": {"id": "default"}}))


def next_places(folder: Path, state: Progress) -> dict[str, str]:
    """Notebook -> the id of the cell where its next puzzle begins, for each notebook that has been started."""
    places = {}
    for book in curriculum.notebooks():
        upcoming = next((each for each in book.puzzles if not state.solved(each.id)), None)
        if upcoming is None or upcoming == book.puzzles[0]:
            continue  # the top is the right place
        _, notebook = halves(folder, book.name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            for cell in json.loads(notebook.read_text("utf-8-sig"))["cells"]:
                heading = curriculum.PUZZLE_HEADING.search("".join(cell["source"]))
                if cell["cell_type"] == "markdown" and heading and heading[1] == upcoming.number:
                    places[notebook.name] = cell["id"]
    return places


def _become(command: list[str], variables: dict[str, str]) -> None:
    """Hands the terminal over, Ctrl-C included."""
    if os.name == "posix":
        sys.stdout.flush()
        os.execve(command[0], command, variables)
    process = subprocess.Popen(command, env=variables)
    while True:
        try:
            sys.exit(process.wait())
        except KeyboardInterrupt:
            continue  # the server has it too, and asks whether to stop
