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
  title.textContent = `${exact}${data.x} ${Math.round(place * 100) / 100}`;
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
  plot.addEventListener("pointermove", (event) => {
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
