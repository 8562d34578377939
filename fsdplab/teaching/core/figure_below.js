// Draws figures that a kernel sends onto the element of the figure that the same cell shows already, and says how wide
// outputs are. JupyterLab's renderer draws an output once and ignores its updates; a renderer made anew takes four times
// as long as `Plotly.react`.
const CHANGES = 8; // pixels from which a width is another one
export default {
  render({ model, el }) {
    const area = el.closest(".jp-OutputArea");
    if (!area) return; // a page that draws each update of an output itself
    const draw = (text) => {
      const place = area.querySelector(".js-plotly-plot"), figure = JSON.parse(text);
      if (place) window.Plotly.react(place, figure.data, figure.layout); // else it is not drawn yet
    };
    const measure = new ResizeObserver(() => {
      const width = area.querySelector(".jp-OutputArea-output")?.clientWidth;
      if (!width || Math.abs(width - model.get("width")) < CHANGES) return;
      model.set("width", width);
      model.save_changes();
    });
    model.on("msg:custom", draw);
    measure.observe(area);
    return () => {
      measure.disconnect();
      model.off("msg:custom", draw);
    };
  },
};
