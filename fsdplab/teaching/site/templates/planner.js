"use strict";
// The planner's page: starts Python, and shows what it answers to the choice of the controls.
{ // names of its own; a module would not run from a file, where it has to say why Python does not
const SETUP = JSON.parse(document.getElementById("setup").textContent);
const byId = name => document.getElementById(name), form = byId("controls"), state = byId("state");
const inputs = [...form.querySelectorAll("select, input")];
let answered = null, drawn = 0;

function say(words, bad = false) { state.firstElementChild.textContent = words; state.classList.toggle("bad", bad); }

const valuesOf = input => input.type === "range" ? input.dataset.values.split(" ") : [...input.options].map(each => each.value);
const valueOf = input => input.type === "range" ? valuesOf(input)[input.value] : input.value;
function choose(input, value) {
  const place = valuesOf(input).indexOf(value);
  if (place < 0) return false;
  input.value = input.type === "range" ? place : value;
  return true;
}
const chosen = () => Object.fromEntries(inputs.map(input => [input.id, valueOf(input)]));

function readable(input) {
  if (input.type !== "range") return;
  const words = Number(valueOf(input)).toLocaleString("en");
  input.previousElementSibling.textContent = words;
  input.setAttribute("aria-valuetext", words);
}

// The address keeps the choice: what is at its default is left out.
function toAddress() {
  const other = inputs.filter(input => valueOf(input) !== input.dataset.default).map(input => [input.id, valueOf(input)]);
  history.replaceState(null, "", "#" + new URLSearchParams(other));
}
function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1)), unknown = [];
  for (const input of inputs) choose(input, asked.get(input.id) ?? input.dataset.default) || unknown.push(input.id);
  for (const name of asked.keys()) if (!inputs.some(input => input.id === name)) unknown.push(name);
  for (const input of inputs) {
    readable(input);
    if (asked.has(input.id) && input.closest("details")) input.closest("details").open = true;
  }
  return unknown.length ? `The address names ${unknown.map(name => `${name}=${asked.get(name)}`).join(", ")}, which this page does not offer.` : "";
}

function show() {
  if (!answered) return;
  const found = JSON.parse(answered(JSON.stringify(chosen()), byId("results").clientWidth));
  for (const [name, content] of Object.entries(found)) byId(name).innerHTML = content;
  document.body.dataset.shown = ++drawn;
}
let waiting = 0;
function showSoon() { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(show); }

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", event => { readable(event.target); toAddress(); showSoon(); });
window.addEventListener("hashchange", () => { say(fromAddress()); showSoon(); });
window.addEventListener("resize", showSoon);
// A remedy is a choice of all controls; those that are folded are shown.
byId("remedies").addEventListener("click", event => {
  const button = event.target.closest(".remedy");
  if (!button || !answered) return;
  for (const [name, value] of Object.entries(JSON.parse(button.dataset.choice))) {
    const input = byId(name);
    if (valueOf(input) === value) continue;
    choose(input, value);
    readable(input);
    if (input.closest("details")) input.closest("details").open = true;
  }
  toAddress();
  showSoon();
});
byId("reset").onclick = () => { history.replaceState(null, "", "#"); fromAddress(); showSoon(); };
for (const button of document.querySelectorAll(".copy")) button.onclick = async () => {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.of === "link" ? location.href : byId(button.dataset.of).textContent);
    button.textContent = "Copied";
  } catch (refused) { button.textContent = "The browser allows no copying here"; }
  setTimeout(() => { button.textContent = words; }, 1500);
};

// Counts what is fetched until Python is ready; Pyodide itself reports nothing.
function counting(plain) {
  let got = 0;
  const bar = byId("loaded");
  bar.hidden = false;
  return async (...asked) => {
    const answer = await plain(...asked);
    if (!answer.ok || !answer.body) return answer;
    const count = new TransformStream({transform(piece, passed) {
      got += piece.byteLength;
      bar.value = Math.min(100, 100 * got / SETUP.bytes);
      say(`Python is being loaded: ${(got / 1e6).toFixed(1)} of ${(SETUP.bytes / 1e6).toFixed(1)} MB.`);
      passed.enqueue(piece);
    }});
    return new Response(answer.body.pipeThrough(count), {status: answer.status, headers: answer.headers});
  };
}

async function start() {
  if (location.protocol === "file:") throw new Error("a browser starts Python only from a server: python -m http.server in this folder");
  const plain = window.fetch.bind(window);
  window.fetch = counting(plain);
  try {
    say("Python is being loaded.");
    const base = new URL(SETUP.pyodide, location.href).href;
    const {loadPyodide} = await import(base + "pyodide.mjs");
    const python = await loadPyodide({indexURL: base});
    const sources = await fetch(SETUP.sources);
    if (!sources.ok) throw new Error(`${SETUP.sources}: ${sources.status}`);
    python.unpackArchive(await sources.arrayBuffer(), "zip");
    byId("loaded").removeAttribute("value");  // a full bar would say that the planner is ready
    say("The planner is being started.");
    answered = python.runPython("from fsdplab.figures.live.answer import answered\nanswered");
  } finally {
    window.fetch = plain;
    byId("loaded").hidden = true;
  }
}

// A page that has started keeps itself for the next time, where the browser allows it (https, or this machine).
async function keep() {
  if (!navigator.serviceWorker) return "";
  await navigator.serviceWorker.register("planner-cache.js");
  await navigator.serviceWorker.ready;
  return "Kept in this browser: the page opens without a network now.";
}

const unknown = fromAddress();
start().then(() => {
  form.firstElementChild.disabled = false;
  say(unknown);
  show();
  return keep();
}).then(words => { if (words && !state.textContent.trim()) say(words); document.body.dataset.kept = words ? "yes" : "no"; })
  .catch(error => {
    if (answered) return;  // the page works, and is not kept
    const offline = navigator.onLine ? "" : " The browser is offline; once loaded, the page needs no network.";
    say(`Python could not be started (${error.message}).${offline} Below is the plan of the first choice; fsdplab plan prints others.`, true);
  });
}
