// ---- the page around the instrument: its model, whose kernel is Python in a worker (lab-worker.js)

const SETUP = JSON.parse(document.getElementById("setup").textContent);
const place = document.getElementById("lab"), state = document.getElementById("state"), loaded = document.getElementById("loaded");
const held = { width: 0, scale: 1, asked: {}, pressed: {}, ...JSON.parse(document.getElementById("first").textContent) };
const listeners = new Map(), changed = new Set();
let worker = null, started = false;

function tell(text, bad = false) {
  state.firstElementChild.textContent = text;
  state.classList.toggle("bad", bad);
}

// What anywidget's model is to the instrument in Jupyter.
const model = {
  get: (name) => held[name],
  set(name, value) { held[name] = value; changed.add(name); },
  on: (event, call) => listeners.set(event, [...(listeners.get(event) ?? []), call]),
  off: (event, call) => listeners.set(event, (listeners.get(event) ?? []).filter((each) => each !== call)),
  save_changes() {
    if (changed.has("pressed") && held.pressed.what === "measure") toMeasure();
    if (changed.has("asked")) {
      document.body.dataset.rest = "no";
      worker?.postMessage({ asked: JSON.stringify(held.asked) });
    }
    changed.clear();
  },
};
place.model = model; // what the page and Python say to each other, for whoever looks at it in the console
function receive(values) {
  for (const [name, value] of Object.entries(values)) {
    held[name] = value;
    for (const call of listeners.get(`change:${name}`) ?? []) call();
  }
}
function toMeasure() {
  const where = document.getElementById("measure");
  where.scrollIntoView({ block: "center" });
  where.focus();
}

// A page that has started keeps itself for the next time, where the browser allows it (https, or this machine).
async function keep() {
  if (!navigator.serviceWorker) return "";
  await navigator.serviceWorker.register(SETUP.cache);
  await navigator.serviceWorker.ready;
  return "Kept in this browser: the page opens without a network now.";
}
function ready() {
  started = true;
  loaded.hidden = true;
  tell("");
  document.body.dataset.ready = String(Math.round(performance.now()));
  keep().catch(() => "").then((text) => { tell(text); document.body.dataset.kept = text ? "yes" : "no"; });
}
function failed(reason) {
  // what it still fetches would say that it is being loaded
  if (!started) worker?.terminate();
  loaded.hidden = true;
  held.offers.waiting = `no answer: Python ${started ? "has stopped" : "could not be started"}, as the line above the lab says`;
  const offline = navigator.onLine ? "" : " The browser is offline; once loaded, the page needs no network.";
  const kept = started ? "" : " Below is the first answer; the lab in Jupyter (fsdplab lab) gives the others.";
  tell(`Python ${started ? "has stopped" : "could not be started"} (${reason}).${offline}${kept}`, true);
}

// A full bar would say that Python is ready: behind the last byte it runs on without an end, as starting has no count.
function showLoaded(bytes) {
  const inMB = (count) => (count / 1e6).toFixed(1);
  if (bytes < SETUP.bytes) {
    loaded.value = (100 * bytes) / SETUP.bytes;
    tell(`Python is being loaded: ${inMB(bytes)} of ${inMB(SETUP.bytes)} MB.`);
  } else {
    loaded.removeAttribute("value");
    tell("Python is loaded and is being started; the lab shows its first answer meanwhile.");
  }
}

function start() {
  if (location.protocol === "file:") return failed("a browser starts Python only from a server: python -m http.server in this folder");
  tell("Python is being loaded; the lab shows its first answer meanwhile.");
  loaded.removeAttribute("value");
  loaded.hidden = false;
  worker = new Worker("lab-worker.js", { type: "module" });
  worker.onerror = (event) => failed(event.message || "its script could not be loaded");
  worker.onmessage = ({ data }) => {
    if (data.bytes) showLoaded(data.bytes);
    else if (data.ready) ready();
    else if ("failed" in data) failed(data.failed);
    else {
      receive(JSON.parse(data.values));
      if (data.last && held.answer.n === held.asked.n) document.body.dataset.rest = "yes"; // nothing more follows this answer
    }
  };
  worker.postMessage({ pyodide: new URL(SETUP.pyodide, location.href).href, sources: new URL(SETUP.sources, location.href).href });
}

render({ model, el: place });
start();
