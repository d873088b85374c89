"use strict";
(async () => {
  const PAPER = 660; // pixels: the width of A4 and of Letter, within their margins
  const byId = (id) => document.getElementById(id);

  // Nothing here waits for a frame or a timer: all charts are drawn when the page has loaded, which is when a screenshot
  // or a print of it is made.
  const places = [...document.querySelectorAll(".plot")];
  const json = JSON.parse(byId("drawings").textContent);
  const roots = [byId("content"), ...places]; // the first root is not drawn
  const [views] = await Bokeh.embed.embed_items({json}, [{docid: "json", root_ids: [...roots.keys()], roots}]);
  const drawing = Bokeh.documents[0], [{data: {plots}}] = drawing.roots();

  // The time range, which all charts over time share.
  const time = drawing.get_model_by_name("time");
  const zoom = (what) => {
    const [low, high] = time.bounds, span = time.end - time.start;
    const size = {in: Math.max(span / 2, time.min_interval), out: Math.min(span * 2, high - low), all: high - low}[what] ?? span;
    const middle = (time.start + time.end) / 2 + ({left: -span / 4, right: span / 4}[what] ?? 0);
    const start = Math.min(Math.max(middle - size / 2, low), high - size);
    time.setv({start, end: start + size});
  };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => zoom(button.dataset.zoom));
  }

  // The heat map shows one figure.
  const select = document.querySelector("[data-metrics]");
  select?.addEventListener("change", () => {
    for (const image of plots.find((plot) => plot.name === "ranks").renderers) {
      if (image.name) image.visible = image.name === select.value;
    }
    for (const scale of document.querySelectorAll("[data-metric]")) scale.hidden = scale.dataset.metric !== select.value;
  });

  // At once: a print does not wait for the next frame.
  const repaint = () => {
    for (const view of plots.map((plot) => views.get(plot)).filter(Boolean)) {
      view.invalidate_painters();
      view.repaint();
    }
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = byId("theme");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const label = () => {
    theme.textContent = isDark() ? "Light theme" : "Dark theme";
    repaint();
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  byId("print").addEventListener("click", () => print());
  matchMedia("print").addEventListener("change", repaint);
  // A print does not wait until the charts have noticed that the paper is narrower than the screen: they are drawn
  // smaller. Of a canvas that is given another size now, the print would have nothing.
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll(".plot")) {
      const wide = each.clientWidth;
      Object.assign(each.style, {width: `${wide}px`, zoom: Math.min(1, PAPER / wide)});
    }
  });
  addEventListener("afterprint", () => {
    for (const each of document.querySelectorAll(".plot")) Object.assign(each.style, {width: "", zoom: ""});
  });

  for (const plot of plots) {
    drawing.add_root(plot);
    plot.on_event("doubletap", () => zoom("all"));
  }
  label();
  document.documentElement.dataset.drawn = String(plots.length);
})();
