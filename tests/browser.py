"""Opens a page in a real browser and returns what it saw: Chromium without a window, without a network.

Not a test; the `browse` fixtures of tests/pages and tests/loop/report load it by its path.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

# Runs in the page, after its own script: uses it as a reader would, and writes down what is there.
SCRIPT = """
const found = { problems: [], curves: 0, pictures: 0, network: [] };
const seen = (node) => node.checkVisibility() && !node.closest(".patterns, .swatch");
const name = (node) => node.closest("figure")?.querySelector("figcaption")?.textContent ?? node.outerHTML.slice(0, 80);
for (const details of document.querySelectorAll("details")) details.open = true;
for (const svg of document.querySelectorAll("figure svg")) {
  if (!seen(svg) || svg.parentElement.closest("svg")) continue;
  const box = svg.getBoundingClientRect();
  found.pictures += 1;
  if (!(box.width > 0 && box.height > 0)) found.problems.push(`no size: ${name(svg)}`);
}
for (const curve of document.querySelectorAll(".plot path")) {
  const place = curve.closest(".plot").getBoundingClientRect(), box = curve.getBoundingClientRect();
  found.curves += 1;
  const drawn = curve.getAttribute("d") && Number.isFinite(curve.getTotalLength());
  if (!drawn) found.problems.push(`not drawn: ${name(curve)}`);
  const across = box.left >= place.left - 8 && box.right <= place.right + 8;
  const down = box.top >= place.top - 8 && box.bottom <= place.bottom + 8;
  if (!across || !down) found.problems.push(`outside of its frame: ${name(curve)}`);
}
for (const node of document.querySelectorAll("figure svg *"))
  for (const { name: key, value } of node.attributes)
    if (key !== "aria-label" && /NaN|Infinity|undefined|\\b(nan|inf)\\b/.test(value))
      found.problems.push(`${key}="${value}"`);
if (document.documentElement.scrollWidth > innerWidth) found.problems.push("wider than the window");
const plots = [...document.querySelectorAll(".plot")];
const press = (key) => plots[0].dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const read = () => [...document.querySelectorAll(".readout:not([hidden])")].map((one) => one.innerText);
if (plots.length) {
  plots[0].focus();
  press("End");
  found.last = read();
  press("ArrowLeft");
  found.before = read();
  press("Escape");
  found.after_escape = read();
}
const table = document.querySelector("table[data-sortable]");
if (table) {
  const heads = [...table.querySelectorAll("th button")];
  heads.at(-1).click();
  found.sorted = [...table.tBodies[0].rows].map((row) => row.cells[heads.length - 1].textContent);
}
const device = document.querySelector('.node[data-devices="0"]');
if (device) {
  device.dispatchEvent(new PointerEvent("pointerenter"));
  found.lit = [...document.querySelectorAll(".lit")].map((node) => node.dataset.devices);
  device.dispatchEvent(new PointerEvent("pointerleave"));
  device.focus();
  device.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  // A window without the system's focus moves its own, and may tell nobody.
  document.activeElement.dispatchEvent(new FocusEvent("focus"));
  found.lit_by_key = document.querySelector(".lit")?.dataset.devices;
  document.activeElement.dispatchEvent(new FocusEvent("blur"));
  document.activeElement.blur();
  found.dark_again = document.querySelectorAll(".lit").length === 0;
}
const zoom = document.querySelector(".zoom");
if (zoom) {
  const wide = () => zoom.firstElementChild.getBoundingClientRect().width;
  const before = wide();
  for (let times = 0; times < 4; times++) zoom.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
  found.zoomed = Math.round(100 * wide() / before) / 100;
  const layer = zoom.querySelector(".zoomed > g:last-child");
  found.finer_ticks = [...layer.querySelectorAll(".tick")].map((tick) => tick.textContent);
  const event = new WheelEvent("wheel", { ctrlKey: true, deltaY: -100, clientX: innerWidth / 2, cancelable: true });
  zoom.dispatchEvent(event);
  found.zoomed_by_wheel = event.defaultPrevented && Math.round(100 * wide() / before) / 100 > found.zoomed;
  zoom.previousElementSibling.querySelector('[aria-label="Show all"]').click();
  found.zoomed_out = wide() === before;
}
found.tips = {};
for (const kind of [".span", ".plot .point.front"]) {
  const node = document.querySelector(kind);
  if (!node) continue;
  node.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, clientX: 40, clientY: 40 }));
  const tip = document.querySelector(".tip");
  found.tips[kind] = [tip.textContent, getComputedStyle(tip).display];
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
}
found.width = innerWidth;
const squeezed = [...document.querySelectorAll("td:not(.number)")].filter((cell) => cell.clientHeight > 120);
found.squeezed = squeezed.map((cell) => cell.textContent);
found.buttons = [...document.querySelectorAll(".command button")].map((button) => button.textContent);
found.paper = getComputedStyle(document.body).backgroundColor;
found.network = performance.getEntriesByType("resource").map((entry) => entry.name);
document.documentElement.dataset.found = JSON.stringify(found);
parent.postMessage(document.documentElement.dataset.found, "*");
"""
# Windows are at least 500 pixels wide; a narrower page is shown in a frame, which sends what it found.
FRAME = """<body><iframe src="looked_at.html" style="border:0" width="WIDTH" height="900"></iframe><script>
addEventListener("message", (event) => { document.documentElement.dataset.found = event.data; });
</script></body>"""
NARROWEST = 500


@dataclass(frozen=True)
class Seen:
    """What the browser found in the page, and what it wrote to its console."""

    found: dict
    console: list


def browse(path, folder, *, width=1200, dark=False):
    """Loads a page; the console holds errors of scripts and everything that the page was kept from loading."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    html = Path(path).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # The page runs no script but its own, so the copy that is looked at must allow this one too.
    html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    html = html.replace("</body>", f"<script>{SCRIPT}</script></body>")
    copy = Path(folder) / "looked_at.html"
    copy.write_text(html, encoding="utf-8")
    if width < NARROWEST:
        copy = copy.with_name("frame.html")
        copy.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--no-first-run"]
    options += [
        f"--user-data-dir={Path(folder) / 'profile'}",
        f"--window-size={max(width, NARROWEST)},1000",
        "--dump-dom",
    ]
    options += ["--virtual-time-budget=5000"] if width < NARROWEST else []
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run([program, *options, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    console = [line.partition("CONSOLE")[2] for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, f"the page did not get as far as its end: {console}"
    return Seen(json.loads(unescape(found[1])), console)
