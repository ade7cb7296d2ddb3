// Scrolls a notebook to its next puzzle when it is opened. JupyterLab loads this file as it is: nothing is built.
// lab.py puts `pallasPuzzles` into the page, as JSON: the path of each notebook -> the cell where its next puzzle begins.
(() => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));

  const scroll = async (panel, id) => {
    await panel.revealed;
    const cells = panel.content.widgets;
    const index = cells.findIndex((cell) => cell.model.id === id);
    if (index < 0) return;
    panel.content.activeCellIndex = index;
    const node = cells[index].node;
    // The cells above are drawn one after another and change their height: again, until the place stays what it is.
    let away = false; // the reader scrolls
    panel.node.addEventListener("wheel", () => (away = true), { once: true, passive: true });
    for (let tries = 0, still = 0; tries < 50 && still < 5 && !away; tries++) {
      const top = node.getBoundingClientRect().top;
      if (!node.isConnected) panel.content.scrollToItem(index, "start");
      node.scrollIntoView();
      await wait(100);
      still = node.isConnected && node.getBoundingClientRect().top === top ? still + 1 : 0;
    }
  };

  const activate = (app) => {
    const page = JSON.parse(document.getElementById("jupyter-config-data").textContent);
    const places = JSON.parse(page.pallasPuzzles ?? "{}");
    const opened = () => {
      const panel = app.shell.currentWidget;
      const id = places[panel?.context?.path];
      if (!id) return;
      delete places[panel.context.path]; // once: after that the reader is somewhere else
      scroll(panel, id);
    };
    app.restored.then(() => {
      app.shell.currentChanged.connect(opened);
      opened();
    });
  };

  const plugin = { id: "pallas-puzzles:next", autoStart: true, activate };
  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB["pallas-puzzles"] = {
    init: () => {},
    get: async () => () => ({ __esModule: true, default: plugin }),
  };
})();
