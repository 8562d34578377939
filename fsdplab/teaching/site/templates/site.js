// The switch between light and dark pages, figures drawn when they come near, and the search.
function paper(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, {"font.color": ink(plot)});
}
document.getElementById("switch").onclick = () => {
  const dark = !document.documentElement.classList.contains("dark");
  paper(dark);
  try { localStorage.setItem("fsdplab-paper", dark ? "dark" : "light"); } catch (refused) { /* a page may not store */ }
};
paper(document.documentElement.classList.contains("dark"));

const near = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); drawIn(entry.target); }
}, {rootMargin: "600px"});
for (const figure of document.querySelectorAll("figure")) near.observe(figure);

// A hit is a section that holds every word; a word in a heading counts more than one in the text.
function found(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean), hits = [];
  if (!words.length) return hits;
  for (const page of PAGES) for (const part of page.sections) {
    const heading = (page.title + " " + part.heading).toLowerCase(), text = part.words.toLowerCase();
    if (!words.every(word => heading.includes(word) || text.includes(word))) continue;
    const weight = words.reduce((sum, word) => sum + (heading.includes(word) ? 8 : 0) + Math.min(text.split(word).length - 1, 5), 0);
    hits.push({page, part, weight, words});
  }
  return hits.sort((one, other) => other.weight - one.weight).slice(0, 12);
}

function piece(hit) {
  const text = hit.part.words, at = Math.max(0, text.toLowerCase().indexOf(hit.words[0]));
  const around = (at > 60 ? "… " : "") + text.slice(Math.max(0, at - 60), at + 110) + (text.length > at + 110 ? " …" : "");
  const line = document.createElement("small");
  let rest = around;
  while (rest) {
    const places = hit.words.map(word => [rest.toLowerCase().indexOf(word), word.length]).filter(pair => pair[0] >= 0);
    if (!places.length) { line.append(rest); break; }
    const [start, length] = places.sort((one, other) => one[0] - other[0])[0];
    line.append(rest.slice(0, start));
    const mark = document.createElement("mark");
    mark.textContent = rest.slice(start, start + length);
    line.append(mark);
    rest = rest.slice(start + length);
  }
  return line;
}

const query = document.getElementById("query"), box = document.getElementById("hits");
query.oninput = () => {
  const hits = found(query.value);
  box.replaceChildren(...hits.map(hit => {
    const link = document.createElement("a");
    link.href = hit.page.page + (hit.part.anchor ? "#" + hit.part.anchor : "");
    link.append(hit.page.title + (hit.part.anchor ? ": " + hit.part.heading : ""), piece(hit));
    link.onclick = () => { box.hidden = true; };
    return link;
  }));
  if (!hits.length) { const none = document.createElement("p"); none.textContent = "Nothing holds all of these words."; box.append(none); }
  box.hidden = !query.value.trim();
};
query.onkeydown = event => {
  if (event.key === "Escape") { query.value = ""; box.hidden = true; }
  if (event.key === "Enter" && box.querySelector("a")) box.querySelector("a").click();
};
document.addEventListener("keydown", event => {
  if (event.key === "/" && document.activeElement !== query) { event.preventDefault(); query.focus(); }
});
document.addEventListener("click", event => { if (!event.target.closest(".find")) box.hidden = true; });
