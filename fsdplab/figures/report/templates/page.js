// Switches tabs, and between a light and a dark page; follows the reader's own setting.
document.documentElement.classList.add("js");
function paper(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, {"font.color": ink(plot)});
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
