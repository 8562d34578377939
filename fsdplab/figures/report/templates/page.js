// Switches tabs, and between a light and a dark page; follows the reader's own setting.
document.documentElement.classList.add("js");
function paper(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, {"font.color": ink(plot)});
}
// A table that is wider than its place says so below it.
function sayCut() {
  for (const wide of document.querySelectorAll(".wide")) {
    const line = wide.nextElementSibling;
    if (line && line.classList.contains("cut")) line.hidden = wide.scrollWidth <= wide.clientWidth + 1;
  }
}
function show(name) {
  for (const panel of document.querySelectorAll(".panel")) panel.classList.toggle("open", panel.id === name);
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.panel === name);
  drawIn(document.getElementById(name));
  sayCut();
}
// Every tab shows the run that was picked in one of them.
function pick(place) {
  for (const picker of document.querySelectorAll(".picker")) {
    [...picker.children].forEach((button, at) => button.setAttribute("aria-pressed", at === place));
    [...picker.parentElement.querySelectorAll(":scope > .one")].forEach((part, at) => part.classList.toggle("open", at === place));
  }
  drawIn(document);
  sayCut();
}
document.getElementById("switch").onclick = () => paper(!document.documentElement.classList.contains("dark"));
paper(matchMedia("(prefers-color-scheme: dark)").matches);
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.forEach((tab, place) => {
  tab.onclick = () => { show(tab.dataset.panel); tab.parentElement.scrollIntoView(); };
  tab.onkeydown = event => {
    const turn = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (turn) { const next = tabs[(place + turn + tabs.length) % tabs.length]; next.focus(); next.click(); }
  };
});
for (const picker of document.querySelectorAll(".picker")) [...picker.children].forEach((button, at) => button.onclick = () => pick(at));
for (const each of document.querySelectorAll("details")) each.ontoggle = () => { if (each.open) drawIn(each); sayCut(); };
addEventListener("resize", sayCut);
if (tabs.length) show(tabs[0].dataset.panel);
drawIn(document);
sayCut();
