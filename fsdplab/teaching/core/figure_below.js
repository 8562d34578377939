// Draws figures that a kernel sends onto the element of the figure that the same cell shows already, and says how wide
// outputs are. JupyterLab's renderer draws an output once and ignores its updates; a renderer made anew takes four times
// as long as `Plotly.react`. A page without JupyterLab's elements draws each update of an output itself.
const CHANGES = 8; // pixels from which a width is another one
export default {
  render({ model, el }) {
    const inOutputs = (selector) => el.closest(".jp-OutputArea")?.querySelector(selector);
    const tell = (name, value) => { model.set(name, value); model.save_changes(); };
    const draw = (text) => {
      if (!text) return tell("answers", true);
      const place = inOutputs(".js-plotly-plot"), figure = JSON.parse(text);
      if (place) window.Plotly.react(place, figure.data, figure.layout); // else it is not drawn yet
    };
    const measure = new ResizeObserver(() => {
      const width = inOutputs(".jp-OutputArea-output")?.clientWidth;
      if (!width || Math.abs(width - model.get("width")) < CHANGES) return;
      tell("width", width);
    });
    model.on("msg:custom", draw);
    measure.observe(el);
    return () => {
      measure.disconnect();
      model.off("msg:custom", draw);
    };
  },
};
