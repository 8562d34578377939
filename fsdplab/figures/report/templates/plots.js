// Draws figures when they are first seen (they wait as JSON beside their places, so a page of eight runs opens as fast
// as a page of one), and moves the time cursor of linked views.
// The colour of text where a figure stands: the page's, which follows dark rooms.
function ink(place) { return getComputedStyle(place).getPropertyValue("--ink").trim(); }

// What lies in a closed tab, in a folded part or in the part of a run that is not picked is drawn when it is seen.
function hidden(place) { return place.closest(".js .panel:not(.open), .js .one:not(.open), details:not([open])"); }

function drawIn(place) {
  for (const div of place.querySelectorAll(".plot")) {
    if (div.dataset.drawn || hidden(div)) continue;
    div.dataset.drawn = "yes";
    const figure = JSON.parse(div.nextElementSibling.textContent);
    draw(div, figure).then(() => { if (figure.frames) Plotly.addFrames(div, figure.frames); });
    follow(div, figure);
    for (const key of div.parentElement.querySelectorAll(".keys button")) key.onclick = () => toggle(div, key);
  }
  for (const view of place.querySelectorAll(".linked")) if (!hidden(view)) link(view);
}

function draw(div, figure) {
  const {data, layout} = fitted(figure, div.offsetWidth);
  layout.font = Object.assign({}, layout.font, {color: ink(div)});
  div.style.height = layout.height + "px";
  return Plotly.react(div, data, layout, {displayModeBar: false}).then(() => settled(div));
}

// A key of a page's own legend hides its traces, and shows them again.
function toggle(div, key) {
  const off = key.classList.toggle("off");
  const named = div.data.flatMap((trace, place) => trace.name === key.textContent ? [place] : []);
  Plotly.restyle(div, {visible: !off}, named);
}

// A place changes its width with the window, but also when a scroll bar or a notebook's side panel comes or goes.
function follow(div, figure) {
  let width = div.offsetWidth;
  new ResizeObserver(() => {
    if (!div.offsetWidth || div.offsetWidth === width) return;
    const other = (div.offsetWidth < NARROW) !== (width < NARROW);
    width = div.offsetWidth;
    other ? draw(div, figure) : Plotly.Plots.resize(div).then(() => settled(div));
  }).observe(div);
}

// The slider of a linked view moves the cursor through the first figure, and fills the cells of the second.
function link(view) {
  if (view.dataset.linked) return;
  view.dataset.linked = "yes";
  const [plot, slices] = view.querySelectorAll(".plot"), slider = view.querySelector("input"), told = view.querySelector("output");
  const drawn = {shapes: plot.layout.shapes, annotations: plot.layout.annotations};
  const data = JSON.parse(view.querySelector(".states").textContent);
  const stateAt = (changes, at) => changes.reduce((state, [since, next]) => since <= at ? next : state, 0);
  function fill(at) {
    const states = data.changes.flatMap(row => row.map(changes => stateAt(changes, at)));
    const cell = index => `rank ${data.ranks[Math.floor(index / data.units.length)]}, ${data.units[index % data.units.length]}`;
    const words = states.map((state, index) => `${cell(index)}: ${data.words[state]}`);
    Plotly.restyle(slices, {"marker.color": [states.map(state => data.colours[state])], hovertext: [words]}, [0]);
    Plotly.restyle(slices, {hovertext: [words]}, [slices.data.length - 1]);
  }
  slider.oninput = () => {
    const at = Number(slider.value), text = at.toFixed(2) + " ms";
    told.textContent = text;
    fill(at);
    const {yaxis, yaxis3} = plot.layout, pen = {color: "#d0105a", width: 2.5}, x = {xref: "x", yref: "paper"};
    const line = {...x, type: "line", x0: at, x1: at, y0: yaxis3.domain[0], y1: 1, line: pen};
    const note = {...x, x: at, y: yaxis.domain[0], text: `<b>${text}</b>`, showarrow: false, xanchor: "left", yanchor: "top", font: {color: pen.color, size: 14}};
    Plotly.relayout(plot, {shapes: [...drawn.shapes, line], annotations: [...drawn.annotations, note]});
  };
  told.textContent = Number(slider.value).toFixed(2) + " ms";
}

// On a phone letters are smaller, and a bar's row has its name and its words above the bar.
const NARROW = 540;
function fitted(figure, width) {
  const {data, layout} = structuredClone({data: figure.data, layout: figure.layout});
  if (width >= NARROW) return {data, layout};
  const notes = layout.annotations || [], rows = notes.filter(note => typeof note.y === "string");
  for (const note of notes) note.font = {...note.font, size: 12};
  for (const note of notes) if (note.xshift && note.yshift !== undefined) beside(note);
  for (const name of Object.keys(layout).filter(name => /^[xy]axis/.test(name))) {
    const axis = layout[name];
    axis.tickfont = {...axis.tickfont, size: 11};
    const [low, high] = axis.domain || [0, 1];
    // pixels along the axis: beside the labels of the rows, or above those of the columns and their title
    const along = name[0] === "x" ? width - 110 : layout.height - layout.margin.t - 60, letters = along * (high - low) / 7;
    if (axis.title && axis.title.text) axis.title = {...axis.title, text: wrapped(axis.title.text, letters), font: {size: 12}};
  }
  for (const trace of data) {
    if (trace.type === "bar") {
      trace.textposition = "none";
      // the edges of many thin bars would hide their colour; a cell that is empty is nothing but its edge
      if (!Array.isArray(trace.marker.color)) trace.marker = {...trace.marker, line: {width: 0}};
    }
    if (trace.type === "heatmap") {
      Object.assign(trace, {text: null, texttemplate: null});
      const scale = trace.colorbar || {}, words = {size: 11};
      trace.colorbar = {...scale, thickness: 10, nticks: 3, tickfont: words, title: {...scale.title, font: words, side: "right"}};
    }
  }
  if (rows.length) stack(data, layout, rows, width);
  return {data, layout};
}

function wrapped(text, letters) {
  const [first, ...words] = text.split(" "), lines = [first];
  for (const word of words) if (`${lines.at(-1)} ${word}`.length > letters) lines.push(word); else lines.push(`${lines.pop()} ${word}`);
  return lines.join("<br>");
}

// The words at a point, shortened to its name, below it.
function beside(note) { Object.assign(note, {text: note.text.split(" · ")[0], xshift: 0, yshift: -20}); }

// The words of a row that fit: `shortened("zero1 · 765 ms · 76 % hidden", 20) === "zero1 · 765 ms"`.
function shortened(words, letters) {
  const parts = words.split(" · ");
  while (parts.length > 1 && parts.join(" · ").replace(/<[^>]+>/g, "").length > letters) parts.pop();
  return parts.join(" · ");
}

function stack(data, layout, rows, width) {
  const reach = rows.map(row => data.filter(trace => trace.type === "bar").reduce((sum, trace) => sum + (trace.x[trace.y.indexOf(row.y)] || 0), 0));
  const levels = (layout.shapes || []).map(shape => shape.x1).filter(Number.isFinite), marks = data.filter(trace => trace.type === "scatter").flatMap(trace => trace.x);
  const end = 1.06 * Math.max(...reach, ...levels, ...marks);
  layout.xaxis.range = [0, end];
  layout.height = layout.margin.t + 62 + 50 * rows.length;
  layout.bargap = 0.6;
  Object.assign(layout.yaxis, {showticklabels: false, ticks: "", autorange: false, range: [rows.length - 0.5, -0.75]});
  const letters = (width - 40) / 6.2;
  for (const row of rows) Object.assign(row, {text: shortened(`${row.y} · ${row.text.replace("<br>", " · ")}`, letters), x: 0, xshift: 0, yshift: 19, align: "left"});
  for (const note of layout.annotations) if (typeof note.x === "number" && !rows.includes(note)) note.xanchor = note.x > end / 2 ? "right" : "left";
}

function settled(div) {
  apart(div);
  scalable(div);
}

// A page of paper is not as wide as the window, and nothing draws anew for it: the style sheet scales the picture.
function scalable(div) {
  const {width, height} = div._fullLayout;
  for (const picture of div.querySelectorAll(".main-svg")) picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  div.style.setProperty("--width", width + "px");
  div.style.setProperty("--ratio", `${width} / ${height}`);
}

// Words that would stand over others, or leave the picture, are left out: a hover still tells them.
function apart(div) {
  if (div.offsetWidth >= NARROW) return;
  const edge = div.getBoundingClientRect(), taken = [];
  for (const note of div.querySelectorAll(".annotation")) {
    note.style.visibility = "";
    const box = note.getBoundingClientRect();
    const free = taken.every(other => box.right <= other.left || other.right <= box.left || box.bottom <= other.top || other.bottom <= box.top);
    if (free && box.left >= edge.left - 1 && box.right <= edge.right + 1) taken.push(box);
    else note.style.visibility = "hidden";
  }
}
