"use strict";
// Readouts: pointer or arrow keys select a position on one chart; all charts with the same x axis show it.
const charts = [...document.querySelectorAll("figure .plot")].map((plot) => {
  const data = JSON.parse(plot.closest("figure").querySelector('script[type="application/json"]').textContent);
  const places = [...new Set(data.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  return { plot, data, places, cross: plot.querySelector(".cross"), readout: plot.querySelector(".readout"), at: -1 };
});

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}

function line(name, value) {
  const row = document.createElement("div");
  const label = document.createElement("span");
  label.textContent = name + " ";
  row.append(label, value);
  return row;
}

function show(chart, x) {
  const { data, places, readout, cross, plot } = chart;
  chart.at = nearest(places, x);
  const place = places[chart.at];
  const share = (place - data.low) / (data.high - data.low);
  cross.hidden = readout.hidden = false;
  cross.style.left = 100 * share + "%";
  readout.style.left = share < 0.5 ? `calc(${100 * share}% + 12px)` : "auto";
  readout.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 12px)`;
  const title = document.createElement("b");
  const exact = plot.dataset.columns === undefined ? "" : "around ";
  const unit = data.unit ? " " + data.unit : "";
  title.textContent = data.names[place] ?? `${exact}${data.x} ${Math.round(place * 100) / 100}${unit}`;
  readout.replaceChildren(title, ...data.series.map((one) => {
    const index = nearest(one.x, place);
    const elsewhere = one.x[index] === place ? "" : ` (at ${one.x[index]})`;
    return line(one.name, one.y[index] + elsewhere);
  }));
}

function hide(chart) { chart.cross.hidden = chart.readout.hidden = true; chart.at = -1; }

const alike = (chart) => charts.filter((other) => other.data.x === chart.data.x);

for (const chart of charts) {
  const { plot, data, places } = chart;
  if (!places.length) continue;
  // Dots have their own tooltips.
  if (!plot.closest(".scatter")) plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    for (const other of alike(chart)) show(other, data.low + share * (data.high - data.low));
  });
  plot.addEventListener("pointerleave", () => alike(chart).forEach(hide));
  plot.addEventListener("blur", () => alike(chart).forEach(hide));
  plot.addEventListener("keydown", (event) => {
    const last = places.length - 1, far = Math.max(1, Math.round(last / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: far, PageUp: -far, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return alike(chart).forEach(hide);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = chart.at < 0 && moves[event.key] < 0 ? last + 1 : chart.at;
    const index = Math.min(last, Math.max(0, from + moves[event.key]));
    for (const other of alike(chart)) show(other, places[index]);
  });
}

// Clicking a heading sorts its table by that column; numbers with units sort as numbers.
const units = {
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, PiB: 2 ** 50,
  ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, k: 1e3, M: 1e6, T: 1e12,
};
function weight(text) {
  const parts = [...text.replaceAll(",", "").matchAll(/(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-z]*)/g)];
  return parts.length ? parts.reduce((sum, [, value, unit]) => sum + value * (units[unit] ?? 1), 0) : -Infinity;
}
for (const table of document.querySelectorAll("table[data-sortable]")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const known = head.getAttribute("aria-sort");
      const down = known ? known === "ascending" : numeric;
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const key = (row) => row.cells[column].textContent;
      const order = (a, b) => numeric ? weight(key(a)) - weight(key(b)) : key(a).localeCompare(key(b), "en", { numeric: true });
      body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * order(a, b)));
    });
  });
}

// Adds a copy button to each command; if the browser denies copying, the text is selected instead.
for (const block of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy: " + block.dataset.copy);
  button.addEventListener("click", async () => {
    const code = block.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}

// Pointing at a device or tile, or moving to it with arrow keys, highlights the same devices in every picture.
const holders = [...document.querySelectorAll("[data-devices]")].map((node) => [node, node.dataset.devices.split(" ")]);
const light = (chosen) => {
  for (const [node, devices] of holders) node.classList.toggle("lit", devices.some((device) => chosen.includes(device)));
};
for (const [node, devices] of holders) {
  node.addEventListener("pointerenter", () => light(devices));
  node.addEventListener("pointerleave", () => light([]));
  node.addEventListener("focus", () => light(devices));
  node.addEventListener("blur", () => light([]));
}
for (const lattice of document.querySelectorAll(".lattice")) {
  const nodes = [...lattice.querySelectorAll(".node")].sort((a, b) => a.dataset.devices - b.dataset.devices);
  // The Tab key reaches the first node; arrow keys move from there.
  nodes.forEach((node, number) => {
    node.tabIndex = number ? -1 : 0;
    node.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (!move || !nodes[number + move]) return;
      event.preventDefault();
      node.tabIndex = -1;
      nodes[number + move].tabIndex = 0;
      nodes[number + move].focus();
    });
  });
}

// Tooltips: at the pointer, at once, and also for a tap.
const tip = document.createElement("div");
tip.className = "readout tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("figure svg title")) {
  const holder = title.parentElement;
  holder.dataset.tip = title.textContent;
  title.remove();
}
function showTip(event) {
  const holder = event.target.closest?.("[data-tip]");
  tip.hidden = !holder;
  if (!holder) return;
  tip.textContent = holder.dataset.tip;
  tip.style.left = Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.top = (above > 8 ? above : event.clientY + 16) + "px";
}
for (const kind of ["pointerover", "pointermove", "pointerdown"]) document.addEventListener(kind, showTip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

// Timelines zoom by making the picture wider inside of a box that scrolls.
const FARTHEST = 300000; // pixels
const shortTime = (seconds) => {
  const [size, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  return seconds ? `${+(seconds * size).toPrecision(6)} ${unit}` : "0 s";
};
function roundStep(wanted) {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= wanted);
}
function zoomable(zoom) {
  const wide = zoom.firstElementChild, svg = wide.querySelector("svg");
  const spans = [...svg.querySelectorAll(".span")].map((rect) => ({
    rect, left: parseFloat(rect.getAttribute("x")) / 100, share: parseFloat(rect.getAttribute("width")) / 100,
    name: rect.dataset.tip.split(": ")[0],
  }));
  const seconds = parseFloat(svg.dataset.seconds), bottom = svg.getAttribute("height") - 24;
  const layer = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
  const lines = document.createElementNS(svg.namespaceURI, "g");
  svg.prepend(lines);
  let scale = 1;
  const draw = (name, attributes, text = "") => {
    const node = document.createElementNS(svg.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    layer.append(node);
    return node;
  };
  const label = () => {
    layer.replaceChildren();
    lines.replaceChildren();
    svg.classList.toggle("zoomed", scale > 1);
    for (const name of svg.querySelectorAll(".lane-name")) name.setAttribute("x", scale > 1 ? zoom.scrollLeft : 0);
    if (scale === 1) return;
    const width = wide.clientWidth, from = zoom.scrollLeft, to = from + zoom.clientWidth;
    for (const { rect, left, share, name } of spans) {
      const start = Math.max(left * width, from), end = Math.min((left + share) * width, to);
      // "attention, backward", or at least "attention".
      const fits = [name, name.split(", ")[0]].find((text) => end - start >= 7.5 * text.length + 8);
      if (!fits) continue;
      const tone = rect.getAttribute("fill").match(/\d+/)[0] % 6;
      draw("text", { x: (start + end) / 2, y: +rect.getAttribute("y") + 16, class: `part-label halo-${tone}` }, fits);
    }
    if (!(seconds > 0)) return;
    const step = roundStep(seconds * zoom.clientWidth / width / Math.max(2, zoom.clientWidth / 160));
    for (let tick = Math.ceil(seconds * from / width / step); tick * step <= seconds * to / width; tick++) {
      const x = tick * step / seconds * width;
      lines.append(draw("line", { x1: x, x2: x, y1: 0, y2: bottom, class: "grid" }));
      draw("text", { x, y: bottom + 16, class: "tick x" }, shortTime(tick * step));
    }
  };
  const set = (wanted, x = zoom.clientWidth / 2) => {
    const next = Math.min(Math.max(1, wanted), FARTHEST / zoom.clientWidth);
    const at = (zoom.scrollLeft + x) / scale;
    scale = next;
    wide.style.width = 100 * scale + "%";
    zoom.scrollLeft = at * scale - x;
    label();
  };
  const inside = (event) => event.clientX - zoom.getBoundingClientRect().left;
  const bar = document.createElement("div");
  bar.className = "zoom-bar";
  const actions = [["\u2212", "Zoom out", () => set(scale / 2)], ["+", "Zoom in", () => set(scale * 2)], ["Whole", "Show all", () => set(1)]];
  for (const [text, name, act] of actions) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    bar.append(button);
  }
  const hint = document.createElement("span");
  hint.textContent = "or Ctrl and wheel, two fingers, + and \u2212 keys; drag to move";
  bar.append(hint);
  zoom.before(bar);
  zoom.addEventListener("keydown", (event) => {
    const next = { "+": 2 * scale, "=": 2 * scale, "-": scale / 2, "0": 1 }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    set(next);
  });
  zoom.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    set(scale * Math.exp(-event.deltaY / 200), inside(event));
  }, { passive: false });
  const fingers = new Map();
  let apart = 0;
  zoom.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event);
    apart = 0;
  });
  zoom.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    fingers.set(event.pointerId, event);
    const [one, other] = [...fingers.values()];
    if (other) {
      const now = Math.abs(one.clientX - other.clientX);
      if (apart && now) set(scale * now / apart, (inside(one) + inside(other)) / 2);
      apart = now;
    } else if (event.pointerType === "mouse") zoom.scrollLeft -= event.clientX - before.clientX;
  });
  for (const kind of ["pointerup", "pointercancel", "pointerleave"]) {
    zoom.addEventListener(kind, (event) => { fingers.delete(event.pointerId); apart = 0; });
  }
  zoom.addEventListener("scroll", () => requestAnimationFrame(label));
}
document.querySelectorAll(".zoom").forEach(zoomable);
