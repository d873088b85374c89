"use strict";
(() => {
  const items = JSON.parse(document.getElementById("items").textContent);
  const charts = new Map();
  const spoken = document.getElementById("spoken");
  const byId = (id) => document.getElementById(id);
  const PAPER = 660; // pixels: the width of A4 and of Letter, within their margins
  let moving = false;

  const figure = (value, unit) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "not measured";
    const size = Math.abs(value);
    if (size > 0 && size < 0.001) return (value < 0 ? "> -" : "< ") + "0.001" + (unit ? " " + unit : "");
    const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
    return value.toFixed(digits) + (unit ? " " + unit : "");
  };
  const clock = (ms) => new Date(ms).toISOString().replace("T", " ").slice(0, 19);

  // The shared time range.
  const ranges = () => [...charts.values()].filter((c) => c.time).map((c) => c.plot.x_range);
  const setRange = (start, end) => {
    moving = true;
    for (const range of ranges()) range.setv({start, end});
    moving = false;
  };
  const zoom = (what) => {
    const [first] = ranges();
    if (!first) return;
    const [low, high] = first.bounds;
    const span = first.end - first.start, middle = (first.start + first.end) / 2;
    let size = span, at = middle;
    if (what === "in") size = Math.max(span / 2, first.min_interval || 0);
    if (what === "out") size = span * 2;
    if (what === "left") at -= span / 4;
    if (what === "right") at += span / 4;
    if (what === "all" || size >= high - low) return setRange(low, high);
    at = Math.min(Math.max(at, low + size / 2), high - size / 2);
    setRange(at - size / 2, at + size / 2);
  };

  // What is at the cursor: in the legend, in the line above the chart, and spoken.
  const parts = (chart, index) => chart.item.fields.map(([field, label]) =>
    [field, label, figure(chart.source.data[field][index], chart.item.unit)]);
  const show = (chart, index, text) => {
    for (const [field, , value] of parts(chart, index)) {
      const place = chart.element.querySelector(`[data-field="${field}"] .value`);
      if (place) place.textContent = value;
    }
    chart.readout.textContent = text;
  };
  const cursorAt = (ms, from) => {
    for (const chart of charts.values()) {
      if (!chart.time) continue;
      chart.cursor.setv({location: ms, visible: true});
      if (chart.item.fields) {
        const x = chart.source.data.x;
        const index = Math.min(x.length - 1, Math.max(0, Math.round((ms - x[0]) / window.BIN_MS)));
        chart.index = index;
        show(chart, index, clock(x[index]));
      } else if (chart.item.marks) {
        const slack = (chart.plot.x_range.end - chart.plot.x_range.start) / 150;
        const near = chart.item.marks.filter((m) => m.begin * 1e3 - slack <= ms && (m.end || m.begin) * 1e3 + slack >= ms);
        const texts = near.slice(0, 3).map((m) => `${m.kind}: ${m.text}`);
        if (near.length > 3) texts.push(`${near.length - 3} more`);
        chart.readout.textContent = `${clock(ms)} ${texts.join(" · ")}`;
      } else if (chart === from || chart.row !== undefined) {
        heatAt(chart, ms, chart.row);
      }
    }
  };
  const heatAt = (chart, ms, row) => {
    const item = chart.item, image = chart.shown, data = image.data_source.data;
    const glyph = image.glyph;
    const left = chart.plot.x_range.bounds[0], wide = window.BIN_MS * item.per;
    const column = Math.floor((ms - left) / wide);
    if (row === undefined || row < 0 || row >= item.rows.length || column < 0 || column >= item.bins) return;
    chart.row = row;
    chart.column = column;
    const cells = Array.isArray(data.image) ? data.image[0] : data.image.get ? data.image.get(0) : data.image[0];
    const value = cells[(item.rows.length - 1 - row) * item.bins + column];
    const of = item.metrics[image.name];
    chart.readout.textContent = `${clock(left + column * wide)} · ${item.rows[row]} · ${of.label}: ${figure(value, of.unit)}`;
  };
  const barAt = (chart, index) => {
    if (index < 0 || index >= chart.item.labels.length) return;
    chart.index = index;
    if (chart.plot.tags.includes("bars")) chart.cursor.setv({location: index, visible: true});
    show(chart, index, chart.item.labels[index]);
  };
  const leave = () => {
    for (const chart of charts.values()) {
      chart.cursor.visible = false;
      chart.readout.textContent = "\u00a0";
      for (const place of chart.element.querySelectorAll(".value")) place.textContent = "";
      chart.row = undefined;
      if (chart.plot.tags.includes("rows") && chart.item.labels.length === 1) barAt(chart, 0);
    }
  };
  const say = (chart) => {
    const texts = chart.item.fields ? parts(chart, chart.index).map(([, label, value]) => `${label} ${value}`) : [];
    spoken.textContent = [chart.readout.textContent, ...texts].join(", ");
  };

  const pointed = (chart, event) => {
    if (chart.time) {
      if (chart.item.rows) chart.row = chart.item.rows.length - 1 - Math.floor(event.y);
      cursorAt(event.x, chart);
    } else {
      barAt(chart, Math.round(chart.plot.tags.includes("rows") ? event.y : event.x));
    }
  };
  const keyed = (chart, event) => {
    const steps = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    const zooms = {"+": "in", "=": "in", "-": "out", "0": "all"}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !(steps || zooms)) {
      if (event.key === "Escape") leave();
      return;
    }
    event.preventDefault();
    if (zooms) return zoom(zooms);
    if (event.shiftKey && steps[0] && chart.time) return zoom(steps[0] < 0 ? "left" : "right");
    if (chart.item.rows) {
      const row = Math.min(chart.item.rows.length - 1, Math.max(0, (chart.row ?? 0) + steps[1]));
      const column = Math.min(chart.item.bins - 1, Math.max(0, (chart.column ?? 0) + steps[0]));
      chart.row = row;
      cursorAt(chart.plot.x_range.bounds[0] + (column + 0.5) * window.BIN_MS * chart.item.per, chart);
    } else if (chart.item.marks) {
      const times = chart.item.marks.map((m) => m.begin * 1e3).sort((a, b) => a - b);
      chart.index = Math.min(times.length - 1, Math.max(0, (chart.index ?? -steps[0]) + (steps[0] || steps[1])));
      cursorAt(times[chart.index], chart);
    } else {
      const length = chart.item.labels ? chart.item.labels.length : chart.source.data.x.length;
      const index = Math.min(length - 1, Math.max(0, (chart.index ?? 0) + (steps[0] || steps[1])));
      if (chart.time) cursorAt(chart.source.data.x[index], chart); else barAt(chart, index);
    }
    say(chart);
  };

  const choose = (chart, key) => {
    for (const image of chart.images) image.visible = image.name === key;
    chart.shown = chart.images.find((image) => image.name === key);
    const of = chart.item.metrics[key];
    chart.element.querySelector("[data-low]").textContent = figure(of.low, of.unit);
    chart.element.querySelector("[data-high]").textContent = figure(of.high, of.unit) + (of.more ? " or more" : "");
  };

  const draw = async (key) => {
    const element = document.querySelector(`[data-chart="${key}"]`), item = items[key];
    const place = byId(`plot-${key}`);
    const views = await Bokeh.embed.embed_item(item.item, place);
    const view = views.roots[0], plot = view.model;
    const chart = {element, item, plot, view, time: plot.tags.includes("time"), readout: element.querySelector(".readout"),
      cursor: plot.center.find((each) => each.name === "cursor"), source: plot.renderers[0].data_source};
    charts.set(key, chart);
    place.style.minHeight = "0";
    if (item.rows) {
      chart.images = plot.renderers.filter((each) => item.metrics[each.name]);
      const select = element.querySelector("[data-metrics]");
      choose(chart, select.value);
      select.addEventListener("change", () => choose(chart, select.value));
    } else if (item.fields) {
      chart.source = plot.renderers.map((each) => each.data_source).find((each) => each && each.data.c0);
    }
    if (chart.time) plot.x_range.change.connect(() => { if (!moving) setRange(plot.x_range.start, plot.x_range.end); });
    plot.on_event("mousemove", (event) => pointed(chart, event));
    plot.on_event("mouseleave", leave);
    plot.on_event("doubletap", () => zoom("all"));
    place.addEventListener("keydown", (event) => keyed(chart, event));
    if (plot.tags.includes("rows") && item.labels.length === 1) barAt(chart, 0);
  };

  // At once: a print does not wait for the next frame.
  const repaint = () => {
    for (const {view} of charts.values()) {
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
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => zoom(button.dataset.zoom));
  }
  matchMedia("print").addEventListener("change", repaint);
  // Nor until the charts have noticed that the paper is narrower than the screen: they are drawn smaller. Of a canvas that
  // is given another size now, the print would have nothing.
  const shrink = () => {
    for (const place of document.querySelectorAll(".plot")) {
      const wide = place.clientWidth;
      Object.assign(place.style, {width: `${wide}px`, zoom: Math.min(1, PAPER / wide)});
    }
  };
  const restore = () => {
    for (const place of document.querySelectorAll(".plot")) Object.assign(place.style, {width: "", zoom: ""});
  };
  addEventListener("beforeprint", shrink);
  addEventListener("afterprint", restore);

  // What is in view is drawn first: the page may be opened at one of its sections. The rest follows at once, so that a
  // print has all of it.
  const inView = (key) => {
    const box = document.querySelector(`[data-chart="${key}"]`).getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  };
  const nextTask = () => new Promise((resolve) => setTimeout(resolve, 0));
  const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 0)));
  const all = async () => {
    const keys = Object.keys(items), seen = keys.filter(inView);
    for (const key of [...seen, ...keys.filter((each) => !seen.includes(each))]) {
      await draw(key);
      if (charts.size > 1) {
        await nextTask();
      } else {
        await painted();
        performance.mark("first-chart", {detail: key});
      }
    }
    label();
    document.documentElement.dataset.drawn = String(charts.size);
  };
  requestAnimationFrame(() => setTimeout(all, 0));
})();
