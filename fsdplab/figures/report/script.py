"""What a page does without a server: draws its figures when they are first seen, switches tabs, follows dark rooms,
moves the time cursor.

Figures are kept as JSON and drawn when their tab opens: a page of eight runs opens as fast as a page of one.
"""

from __future__ import annotations

from html import escape

from fsdplab.figures.plotly_go import go
from fsdplab.figures.static.svg import svg
from fsdplab.figures.style import DARK_TEXT, FONT, TEXT, alt_text

_MOST_STATIC = 400  # marks above which a reader without scripts gets the words instead of the picture

STYLE = f"""
:root {{ --paper: #ffffff; --ink: {TEXT}; --soft: #5a616b; --line: #d9dce1; --panel: #f5f6f8; --good: #00704f; --bad: #c01f25; }}
:root.dark {{ --paper: #12151a; --ink: {DARK_TEXT}; --soft: #aab2bd; --line: #333a44; --panel: #1a1f26; --good: #3fd0a0; --bad: #ff6a6a; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 28px 32px 64px; max-width: 1320px; background: var(--paper); color: var(--ink); font: 17px/1.5 {FONT}; }}
h1 {{ font-size: 30px; margin: 0 0 4px; }} h2 {{ font-size: 21px; margin: 36px 0 8px; }}
p.soft, caption, footer {{ color: var(--soft); }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }}
caption {{ caption-side: bottom; text-align: left; padding-top: 6px; font-size: 14px; }}
th, td {{ text-align: left; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }} .wide td {{ white-space: nowrap; }} .wide td:first-child {{ white-space: normal; }}
th {{ background: var(--panel); }} td.number {{ text-align: right; white-space: nowrap; }}
.good {{ color: var(--good); font-weight: 600; }} .bad {{ color: var(--bad); font-weight: 600; }}
figure {{ margin: 20px 0; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }}
.wide {{ overflow-x: auto; }} .beside {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0 40px; }}
button {{ font: inherit; font-size: 15px; color: var(--ink); background: var(--panel); border: 1px solid var(--line); }}
button {{ border-radius: 6px; padding: 4px 12px; cursor: pointer; }}
#switch {{ float: right; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.tabs {{ display: flex; flex-wrap: wrap; gap: 6px; margin: 22px 0 18px; border-bottom: 1px solid var(--line); }}
.tabs button {{ font-size: 16px; padding: 7px 16px; border-radius: 8px 8px 0 0; border-bottom: none; }}
.tabs button[aria-selected="true"] {{ background: var(--ink); color: var(--paper); font-weight: 600; }}
.js .panel:not(.open) {{ display: none; }}
.finding {{ border-left: 5px solid var(--bad); padding: 2px 18px; margin: 18px 0; }}
.finding h3 {{ margin: 0; font-size: 19px; }} .finding p {{ margin: 4px 0; }}
.cursor {{ display: flex; gap: 12px; align-items: center; }} .cursor input {{ flex: 1; accent-color: #d0105a; }} .cursor output {{ min-width: 92px; }}
.slices svg {{ width: 100%; height: auto; }} .key {{ display: flex; gap: 22px; font-size: 14px; }}
.key i {{ display: inline-block; width: 14px; height: 14px; margin-right: 6px; border: 1px solid #3c4046; vertical-align: -2px; }}
"""

PLOTS = f"""
function ink() {{ return document.documentElement.classList.contains("dark") ? "{DARK_TEXT}" : "{TEXT}"; }}
function drawIn(place) {{
  for (const div of place.querySelectorAll(".plot")) {{
    if (div.dataset.drawn) {{ Plotly.Plots.resize(div); continue; }}
    div.dataset.drawn = "yes";
    const figure = JSON.parse(div.nextElementSibling.textContent);
    figure.layout.font = Object.assign({{}}, figure.layout.font, {{color: ink()}});
    Plotly.newPlot(div, figure.data, figure.layout, {{displayModeBar: false, responsive: true}});
  }}
  for (const view of place.querySelectorAll(".linked")) link(view);
}}
function link(view) {{
  if (view.dataset.linked) return;
  view.dataset.linked = "yes";
  const plot = view.querySelector(".plot"), slider = view.querySelector("input"), told = view.querySelector("output");
  const data = JSON.parse(view.querySelector(".states").textContent), n = data.ranks.length, wide = 1100 / data.units.length;
  const draw = (x, y, w, h, fill) =>
    `<rect x="${{x}}" y="${{y}}" width="${{w}}" height="${{h}}" fill="${{fill}}" stroke="currentColor" stroke-width="0.8"/>`;
  const say = (x, y, text, anchor) => {{
    const safe = document.createElement("i"); safe.textContent = text;
    return `<text x="${{x}}" y="${{y}}" font-size="15" text-anchor="${{anchor}}" fill="currentColor">${{safe.innerHTML}}</text>`;
  }};
  function map(at) {{
    let body = "";
    data.ranks.forEach((rank, row) => {{
      body += say(70, row * 36 + 20, "rank " + rank, "end");
      data.units.forEach((unit, column) => {{
        let state = 0;
        for (const [since, next] of data.changes[row][column]) if (since <= at) state = next;
        const x = 84 + column * wide, w = wide * 0.9;
        body += draw(x, row * 36, w, 28, ["none", data.colours[2], data.colours[1]][state]);
        body += draw(x + w * row / data.shares, row * 36, w / data.shares, 28, data.colours[0]);
      }});
    }});
    const every = Math.ceil(data.units.length / 20);
    data.units.forEach((unit, column) => {{ if (column % every === 0) body += say(84 + column * wide + wide * 0.45, n * 36 + 14, unit, "middle"); }});
    view.querySelector(".slices").innerHTML = `<svg viewBox="0 0 1200 ${{n * 36 + 24}}">${{body}}</svg>`;
  }}
  function move() {{
    const at = Number(slider.value), text = at.toFixed(2) + " ms";
    told.textContent = text;
    map(at);
    const line = `shapes[${{plot.layout.shapes.length - 1}}]`, note = `annotations[${{plot.layout.annotations.length - 1}}]`;
    Plotly.relayout(plot, {{[line + ".x0"]: at, [line + ".x1"]: at, [note + ".x"]: at, [note + ".text"]: `<b>${{text}}</b>`}});
  }}
  slider.oninput = move;
  told.textContent = Number(slider.value).toFixed(2) + " ms";
  map(Number(slider.value));
}}
"""

PAGE = """
document.documentElement.classList.add("js");
function paper(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, {"font.color": ink()});
}
function show(name) {
  for (const panel of document.querySelectorAll(".panel")) panel.classList.toggle("open", panel.id === name);
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.panel === name);
  drawIn(document.getElementById(name));
}
document.getElementById("switch").onclick = () => paper(!document.documentElement.classList.contains("dark"));
paper(matchMedia("(prefers-color-scheme: dark)").matches);
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.forEach((tab, place) => {
  tab.onclick = () => show(tab.dataset.panel);
  tab.onkeydown = event => {
    const turn = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (turn) { const next = tabs[(place + turn + tabs.length) % tabs.length]; next.focus(); next.click(); }
  };
});
tabs.length ? show(tabs[0].dataset.panel) : drawIn(document);
"""


def plot_div(figure: go.Figure) -> str:
    """A figure as JSON beside an empty place, drawn when it is first seen; without scripts its picture, or its words if
    it has many marks.
    """
    marks = sum(
        sum(map(len, trace.z)) if isinstance(trace, go.Heatmap) else len(trace.x or ()) for trace in figure.data
    )
    still = svg(figure) if marks <= _MOST_STATIC else f"<p>{escape(alt_text(figure))}</p>"
    data = figure.to_json().replace("<", "\\u003c")
    place = f'<div class="plot" style="height:{figure.layout.height or 420}px"></div>'
    return (
        f'<figure role="img" aria-label="{escape(alt_text(figure), quote=True)}">{place}'
        f'<script type="application/json">{data}</script><noscript>{still}</noscript></figure>'
    )
