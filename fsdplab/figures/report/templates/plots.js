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
