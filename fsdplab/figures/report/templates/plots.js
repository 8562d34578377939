// Draws figures when they are first seen (they wait as JSON beside their places, so a page of eight runs opens as fast
// as a page of one), and moves the time cursor of linked views.
// The colour of text where a figure stands: the page's, which follows dark rooms.
function ink(place) { return getComputedStyle(place).getPropertyValue("--ink").trim(); }

function drawIn(place) {
  for (const div of place.querySelectorAll(".plot")) {
    if (div.dataset.drawn) continue;
    div.dataset.drawn = "yes";
    const figure = JSON.parse(div.nextElementSibling.textContent);
    figure.layout.font = Object.assign({}, figure.layout.font, {color: ink(div)});
    const made = Plotly.newPlot(div, figure.data, figure.layout, {displayModeBar: false});
    if (figure.frames) made.then(() => Plotly.addFrames(div, figure.frames));
    follow(div);
  }
  for (const view of place.querySelectorAll(".linked")) link(view);
}

// A place changes its width with the window, but also when a scroll bar or a notebook's side panel comes or goes.
function follow(div) {
  let width = div.offsetWidth;
  new ResizeObserver(() => {
    if (!div.offsetWidth || div.offsetWidth === width) return;
    width = div.offsetWidth;
    Plotly.Plots.resize(div);
  }).observe(div);
}

function link(view) {
  if (view.dataset.linked) return;
  view.dataset.linked = "yes";
  const plot = view.querySelector(".plot"), slider = view.querySelector("input"), told = view.querySelector("output");
  const data = JSON.parse(view.querySelector(".states").textContent), n = data.ranks.length, wide = 1100 / data.units.length;
  const draw = (x, y, w, h, fill) =>
    `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="${fill}" stroke="currentColor" stroke-width="0.8"/>`;
  const say = (x, y, text, anchor) => {
    const safe = document.createElement("i"); safe.textContent = text;
    return `<text x="${x}" y="${y}" font-size="15" text-anchor="${anchor}" fill="currentColor">${safe.innerHTML}</text>`;
  };
  function map(at) {
    let body = "";
    data.ranks.forEach((rank, row) => {
      body += say(70, row * 36 + 20, "rank " + rank, "end");
      data.units.forEach((unit, column) => {
        let state = 0;
        for (const [since, next] of data.changes[row][column]) if (since <= at) state = next;
        const x = 84 + column * wide, w = wide * 0.9;
        body += draw(x, row * 36, w, 28, ["none", data.colours[2], data.colours[1]][state]);
        body += draw(x + w * row / data.shares, row * 36, w / data.shares, 28, data.colours[0]);
      });
    });
    const every = Math.ceil(data.units.length / 20);
    data.units.forEach((unit, column) => { if (column % every === 0) body += say(84 + column * wide + wide * 0.45, n * 36 + 14, unit, "middle"); });
    view.querySelector(".slices").innerHTML = `<svg viewBox="0 0 1200 ${n * 36 + 24}">${body}</svg>`;
  }
  function move() {
    const at = Number(slider.value), text = at.toFixed(2) + " ms";
    told.textContent = text;
    map(at);
    const line = `shapes[${plot.layout.shapes.length - 1}]`, note = `annotations[${plot.layout.annotations.length - 1}]`;
    Plotly.relayout(plot, {[line + ".x0"]: at, [line + ".x1"]: at, [note + ".x"]: at, [note + ".text"]: `<b>${text}</b>`});
  }
  slider.oninput = move;
  told.textContent = Number(slider.value).toFixed(2) + " ms";
  map(Number(slider.value));
}
