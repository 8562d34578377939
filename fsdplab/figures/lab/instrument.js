// The strategy lab's instrument. The page keeps what the reader asks for; Python answers with plain data (messages.py),
// and this module draws it: no figure library, so that an answer is on screen some milliseconds after it came. Python is a
// kernel of Jupyter's, behind anywidget's model, or runs beside the page (the first page of the course's site).

const BUSY_AFTER_MS = 400;
const ROW = 27, TITLE = 24, AXIS = 18, LEGEND = 16, LANE = 17, NAMES = 148, GAP = 16;
const NARROW = 640, LINE = 18, LANE_NAMES = 78; // a narrow page: names have a line of their own above each bar
const escape = (text) => String(text ?? "").replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const words = (name) => name.replaceAll("_", " ");
const digits = (value, count) => Number(value.toPrecision(count));
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function inUnits(value, count, kinds) {
  const [unit, scale] = kinds.find(([, size]) => value >= size * 0.9995) ?? kinds.at(-1);
  return [digits(value / scale, count), unit];
}
const SIZES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
const sized = (bytes) => inUnits(bytes, 3, SIZES).join(" ");
const asRate = (bytes) => inUnits(bytes, 2, SIZES).join("") + "/s";
const asTime = (seconds) => inUnits(seconds, 3, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]).join(" ");

// The end of an axis: a round number, so that bars move and the axis stays while a slider moves.
function roundUp(value) {
  // of 0.919 s: power 0.1, and the first of 0.1, 0.15, 0.2, ... that is not below it is 1.0
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((end) => end >= value * 1.0001) ?? value;
}

function element(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...inside);
  return made;
}

// ---- the controls: each has `show(asked, answer)`, which writes the state onto it

// `many`: several may be on at a time, and each has a box of its own to show it.
function buttons(label, values, named, isOn, choose, many = false) {
  const row = element("div", { class: many ? "fl-group fl-many" : "fl-group", role: "group", "aria-label": label });
  const fill = (list, asked) => {
    row.replaceChildren(...list.map((value) => element("button", {
      type: "button", "data-key": `${label}:${value}`, "aria-pressed": String(isOn(asked, value)),
      onclick: () => choose(value),
    }, named(value))));
  };
  return { node: row, show: (asked, preset) => keepFocus(row, () => fill(values(preset, asked), asked)) };
}

// Drawing replaces the elements, so the focus goes to the new one with the same key.
function keepFocus(place, draw) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  draw();
  if (key) [...place.querySelectorAll("[data-key]")].find((each) => each.dataset.key === key)?.focus();
}

function menu(label, name, values, ask) {
  const select = element("select", { "aria-label": label, "data-of": name, onchange: () => {
    const chosen = select.selectedOptions[0].value;
    ask({ [name]: typeof values()[0] === "number" ? Number(chosen) : chosen });
  } });
  const show = (asked) => {
    const current = asked.choices[name], list = values(asked);
    // a value that was set from Python may not be among those offered
    const all = list.includes(current) ? list : [...list, current];
    select.replaceChildren(...all.map((value) => element("option", { value, selected: value === current }, String(value))));
  };
  return { node: element("label", { class: "fl-menu" }, element("span", {}, label), select), show };
}

function typed(label, name, ask) {
  const field = element("input", { type: "text", "aria-label": label, "data-of": name, onchange: () => ask({ [name]: name === "steps" ? Number(field.value) : field.value }) });
  const show = (asked) => { if (document.activeElement !== field) field.value = asked.choices[name]; };
  return { node: element("label", { class: "fl-menu" }, element("span", {}, label), field), show };
}

// A slider over a logarithmic scale, with the value as text beside it, which can be typed too.
function slider(name, { label, ends, at, text, asked: wanted, stops }, ask) {
  const range = element("input", { type: "range", min: 0, step: 1, "data-of": name });
  const field = element("input", { type: "text", class: "fl-value", "data-of": `${name} typed` });
  const title = element("span", {}), marks = element("div", { class: "fl-marks", "aria-hidden": "true" });
  // 0 at the slider's left end, 1 at its right: of 10 MB/s to 10 GB/s, 316 MB/s are in the middle
  const place = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
  let bounds = [1, 10];
  range.addEventListener("input", () => {
    const value = bounds[0] * (bounds[1] / bounds[0]) ** (range.value / range.max);
    field.value = text(value);
    range.setAttribute("aria-valuetext", field.value);
    ask({ [name]: wanted(value) });
  });
  field.addEventListener("change", () => ask({ [name]: name === "link" ? field.value : Number(field.value) }));
  const show = (state, preset, answer) => {
    bounds = ends(preset);
    range.max = stops(bounds);
    title.textContent = label(preset);
    range.setAttribute("aria-label", label(preset));
    field.setAttribute("aria-label", `${label(preset)}, typed`);
    const value = at(state, answer);
    if (value) range.value = Math.round(clamp(place(value, bounds), 0, 1) * range.max);
    if (document.activeElement !== field) field.value = state.choices[name];
    range.setAttribute("aria-valuetext", String(state.choices[name]));
  };
  const mark = (list) => {
    marks.replaceChildren(...list.map((each, index) => {
      // a side that waits at every speed has no tick, only its words
      const share = each.at ? clamp(place(each.at, bounds), 0, 1) : 1;
      const tick = element("i", { class: `fl-mark fl-${each.side}`, title: each.words + (each.more ?? "") });
      tick.style.left = `calc(8px + ${share} * (100% - 16px))`;
      tick.hidden = !each.at;
      const said = element("span", { class: `fl-said fl-${each.side}`, title: each.words + (each.more ?? "") }, each.words);
      return element("div", {}, tick, said);
    }));
  };
  const node = element("div", { class: "fl-slider" }, element("div", { class: "fl-head" }, title, field), element("div", { class: "fl-track" }, range), marks);
  return { node, show, mark };
}

// ---- the figure: memory and step bars on the same rows, below them the timeline of A above that of B

// Where the panels of memory and of the step stand: side by side, or on a narrow page one above the other.
// `tops` and `bottoms` are those of the bars with their titles; `keys` are the places of the legends: left, room, top.
function placesOf(answer, offers, width) {
  const count = answer.rows.length, all = [used(answer, offers), stepKeys(offers)];
  if (width >= NARROW) {
    const panel = (width - NAMES - GAP) / 2, left = [NAMES, NAMES + panel + GAP], bottom = TITLE + count * ROW;
    const keys = [[0, left[1] - GAP], [left[1], width - left[1]]].map(([from, room]) => [from, room, bottom + AXIS + 12]);
    const high = Math.max(2 * LEGEND, ...all.map((list, which) => legend(list, ...keys[which]).height));
    return { narrow: false, left, panel, room: panel - Math.max(140, 0.17 * width), tops: [0, 0], bottoms: [bottom, bottom], pitch: ROW, first: 4, keys, height: bottom + AXIS + 10 + high };
  }
  const pitch = ROW + LINE, high = TITLE + count * pitch, second = high + AXIS + 8 + legend(all[0], 0, width, 0).height;
  const tops = [0, second], bottoms = tops.map((top) => top + high), keys = bottoms.map((bottom) => [0, width, bottom + AXIS + 10]);
  return { narrow: true, left: [0, 0], panel: width, room: width - 2, tops, bottoms, pitch, first: LINE + 4, keys, height: bottoms[1] + AXIS + 8 + legend(all[1], ...keys[1]).height };
}
const stepKeys = (offers) => [...offers.step, ["measured", "fl-measured"]].filter(([name]) => offers.measures || name !== "measured");

function bars(answer, offers, places, tips) {
  const { narrow, left, panel, room, tops, bottoms, pitch } = places, rows = answer.rows;
  const ends = (row, which) => row.bands[which]?.ends ?? [0];
  const peaks = rows.flatMap((row) => [row.peak ?? 0, row.measured?.peak ?? 0, ...ends(row, 0)]);
  const times = rows.flatMap((row) => [row.step_s ?? 0, row.measured?.step_s ?? 0, ...ends(row, 1)]);
  const most = [roundUp(Math.max(...peaks, 1)), roundUp(Math.max(...times, 1e-9))];
  // a card that is much larger than all bars does not squeeze them
  if (answer.card && answer.card <= 2 * most[0]) most[0] = roundUp(Math.max(...peaks, answer.card));
  const x = (which, value) => left[which] + (room * value) / most[which];
  const tip = (text) => `data-tip="${tips.push(text) - 1}"`;
  const out = [];
  for (const [which, text] of [answer.memory_title, answer.step_title].entries())
    out.push(title(left[which], tops[which] + 14, panel, text));
  const at = answer.card ? x(0, Math.min(answer.card, most[0])) : -1000, right = at > left[0] + room - 44;
  const badge = [at - (right ? 76 : 42), at + (right ? 10 : 42)]; // the card's name, which stands on the axis
  // without any memory, or any step, there is nothing to give an axis
  const known = [peaks.some(Boolean), times.some(Boolean)];
  for (const [which, say] of [[0, sized], [1, asTime]].filter(([which]) => known[which]))
    for (const part of [0, 0.5, 1]) {
      const tick = x(which, most[which] * part), covered = !which && tick + (part < 1 ? 24 : 0) > badge[0] && tick - (part < 1 ? 24 : 48) < badge[1];
      const anchor = narrow && !part ? "start" : part < 1 ? "middle" : "end";
      out.push(`<path class="fl-grid" d="M${tick},${tops[which] + TITLE - 2}V${bottoms[which]}"/>`);
      if (!covered) out.push(`<text class="fl-small" text-anchor="${anchor}" x="${tick}" y="${bottoms[which] + 13}">${part ? say(most[which] * part) : 0}</text>`);
    }
  if (!narrow) for (const [which, origin] of [[0, "predicted"], [1, `on ${answer.clock.replace("simulated on ", "")}`]].filter(([which]) => known[which]))
    out.push(`<text class="fl-small" x="${left[which] + room + 12}" y="${bottoms[which] + 13}">${escape(origin)}</text>`);
  const high = ROW - 9, cuts = [];
  rows.forEach((row, index) => {
    const [y, ofStep] = tops.map((top) => top + TITLE + index * pitch + places.first), name = narrow ? y - LINE : y, middle = name + high / 2 + 4;
    cuts.push(`M${at},${y - 2}v${high + 4}`);
    const sides = { A: row.pinned || (row.strategy === answer.a && !answer.asked.pin), B: !row.pinned && row.strategy === answer.b };
    for (const [place, side] of ["A", "B"].entries())
      if (!(row.pinned && side === "B") && !(answer.asked.pin && !row.pinned && side === "A"))
        out.push(`<g class="fl-pick fl-${side}${sides[side] ? " fl-on" : ""}" role="button" tabindex="0" aria-pressed="${Boolean(sides[side])}" aria-label="${side} is ${escape(row.name)}" data-key="${side}:${row.strategy}:${row.pinned ?? ""}" data-pick="${side}" data-strategy="${row.pinned ? "" : row.strategy}"><rect x="${place * 20}" y="${name}" width="17" height="${high - (narrow ? 2 : 0)}" rx="4"/><text x="${place * 20 + 8.5}" y="${middle}" text-anchor="middle">${side}</text></g>`);
    out.push(`<text class="fl-name" x="43" y="${row.note && !narrow ? middle - 5 : middle}">${escape(row.strategy)}</text>`);
    if (narrow) out.push(`<text class="fl-name" x="0" y="${ofStep - LINE + high / 2 + 4}">${escape(row.name)}</text>`);
    if (row.note && !narrow) out.push(`<text class="fl-small" ${tip(`A is pinned with ${row.note}`)} x="43" y="${middle + 7}">${escape(short(row.note, 17))}</text>`);
    let from = 0;
    for (const [name, bytes] of row.memory) {
      out.push(`<rect ${tip(`${row.name}: ${words(name)} ${sized(bytes)}`)} x="${x(0, from)}" y="${y}" width="${Math.max(0, x(0, from + bytes) - x(0, from))}" height="${high}" fill="${offers.categories[name]}" class="fl-part"/>`);
      from += bytes;
    }
    if (row.over) out.push(`<rect class="fl-over" ${tip(`${row.name}: ${sized(row.over)} over the card of ${sized(answer.card)}`)} x="${x(0, answer.card)}" y="${y - 2}" width="${x(0, row.peak) - x(0, answer.card)}" height="${high + 4}"/>`);
    from = 0;
    for (const [place, name] of offers.step.entries()) {
      const part = row.step?.[place] ?? 0;
      if (part) out.push(`<rect ${tip(`${row.name}: ${name[0]} ${asTime(part)}`)} x="${x(1, from)}" y="${ofStep}" width="${x(1, from + part) - x(1, from)}" height="${high}" fill="${name[1]}" class="fl-part"/>`);
      from += part;
    }
    for (const [which, key, first] of [[0, "peak", row.peak ? sized(row.peak) : row.why_no_memory], [1, "step_s", row.step_words || row.why_no_step]]) {
      const real = row.measured?.[key], over = !which && row.over, barTop = which ? ofStep : y, line = barTop + high / 2 + 4;
      const seen = real ? `measured ${(which ? asTime : sized)(real)}` : "", beyond = over ? `${sized(over)} over` : "", here = which && row.here, band = row.bands[which], told = here ? `predicted here from the run of ${here.of}: ${here.words}` : "", below = seen || (over ? `${beyond} the card` : here ? `here ${here.words}` : band?.words ?? "");
      if (band) out.push(`<path class="fl-band" ${tip(`${row.name}: ${band.words} ${band.of}`)} d="M${x(which, band.ends[0])},${barTop + high / 2 - 4}v8m0,-4H${x(which, band.ends[1])}m0,-4v8"/>`);
      if (real) out.push(`<rect class="fl-measured" ${tip(`${row.name}: ${[seen, told].filter(Boolean).join(", ")}`)} x="${left[which]}" y="${barTop - 2}" width="${x(which, real) - left[which]}" height="${high + 4}"/>`);
      const missing = !(row[key] || real); // its reason stands where the bar would
      if (narrow && !missing) {
        const [look, rest] = [over ? " fl-alarm" : "", below && `<tspan class="fl-small">${escape(below)}</tspan> `];
        out.push(`<text class="fl-label${look}" text-anchor="end" x="${left[which] + room}" y="${line - LINE}">${rest}<tspan>${escape(first)}</tspan></text>`);
        continue;
      }
      const end = left[which] + room + 12, beside = over && seen ? `<tspan class="fl-small" dx="4">${beyond}</tspan>` : "";
      const at = missing ? left[which] : end;
      out.push(`<text class="fl-label${over ? " fl-alarm" : ""}" x="${at}" y="${below ? line - 5 : line}">${escape(first)}${beside}</text>`);
      if (below) out.push(`<text class="fl-small${over && !seen ? " fl-alarm" : ""}" ${told && tip(`${row.name}: ${told}`)} x="${end}" y="${line + 7}">${escape(below)}</text>`);
    }
    if (answer.guessed && sides.B) out.push(`<path class="fl-guess" ${tip(`your guess: ${sized(answer.guessed)}`)} d="M${x(0, Math.min(answer.guessed, most[0]))},${y - 4}v${high + 8}"/>`);
  });
  if (narrow && answer.card) out.push(`<path class="fl-cut" d="${cuts.join("")}"/>`); // beside the bars only: it crosses no name
  const card = answer.card ? { at, right, beyond: answer.card > most[0], top: TITLE - 4, bottom: bottoms[0], end: most[0], per: most[0] / room, left: left[0] } : null;
  const lists = [used(answer, offers), stepKeys(offers)].map((list, which) => legend(list, ...places.keys[which]).svg);
  return { svg: [...out, ...lists].join(""), card };
}

// A title, which fitTitles makes smaller where it is longer than its room.
const title = (x, y, room, text) => `<text class="fl-title" x="${x}" y="${y}" data-room="${room}">${escape(text)}</text>`;

function fitTitles(figure) {
  for (const text of figure.querySelectorAll("[data-room]")) {
    const long = text.getComputedTextLength(), room = Number(text.dataset.room);
    if (long > room) text.style.fontSize = `${parseFloat(getComputedStyle(text).fontSize) * room / long}px`;
  }
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Coloured names in rows of at most `room` pixels from `left`, and the height of these rows.
function legend(list, left, room, top) {
  let x = 0, y = top;
  const svg = list.map(([name, look]) => {
    // pixels of the coloured square and of the letters
    const wide = 19 + 6.2 * name.length;
    // the next row, unless this one is empty
    if (x && x + wide > room) [x, y] = [0, y + LEGEND];
    const drawn = `<rect x="${left + x + 0.5}" y="${y - 9}" width="10" height="10" ${look.startsWith("#") ? `fill="${look}" class="fl-part"` : `class="${look}"`}/><text class="fl-small" x="${left + x + 14}" y="${y}">${escape(words(name))}</text>`;
    x += wide + 6;
    return drawn;
  }).join("");
  return { svg, height: y - top + LEGEND };
}

function timeline(answer, offers, width, top, tips) {
  const runs = answer.timeline;
  if (!runs.length) return { svg: "", height: 0 };
  const narrow = width < NARROW, names = narrow ? LANE_NAMES : NAMES, above = narrow ? 16 : 0;
  const end = roundUp(Math.max(...runs.map((run) => run.step))), room = width - names - (narrow ? 16 : 70);
  const x = (ms) => names + (room * ms) / end;
  const tip = (text) => `data-tip="${tips.push(text) - 1}"`;
  const box = (from, to, y, colour, look, text) => `<rect ${tip(text)} x="${x(from).toFixed(2)}" y="${y}" width="${Math.max(0.6, x(to) - x(from)).toFixed(2)}" height="${LANE - 2}" fill="${colour}" class="${look}"/>`;
  const keys = narrow ? legend(offers.kinds, 0, width, top + 32) : legend(offers.kinds, NAMES + GAP, width - NAMES - GAP, top + 13);
  const out = [title(0, top + 14, narrow ? width : NAMES, "One step, A above B"), keys.svg];
  const start = top + TITLE + (narrow ? keys.height : 0), pitch = 2 * LANE + 8 + above;
  runs.forEach((run, index) => {
    const y = start + above + index * pitch;
    out.push(`<text class="fl-name" x="0" y="${y + 12}"><tspan class="fl-side fl-${run.side}">${run.side}</tspan> computes</text><text class="fl-name" x="0" y="${y + LANE + 12}"><tspan visibility="hidden">${run.side}</tspan> sends</text>`);
    for (const [from, to, unit, phase] of run.compute)
      out.push(box(from, to, y, offers.lanes[phase] ?? offers.lanes.forward, "fl-block", `${run.side} computes: ${[...new Set([unit, phase])].filter(Boolean).join(" ")}, ${asTime((to - from) / 1e3)}`));
    for (const [from, to] of run.exposed)
      out.push(box(from, to, y, offers.lanes.exposed, "fl-block", `${run.side} waits for the link: ${asTime((to - from) / 1e3)} exposed`));
    for (const [from, to, unit, phase, kind, size, waited, cause] of run.messages)
      out.push(box(from, to, y + LANE, offers.lanes[kind] ?? offers.lanes["other-communication"], "fl-block",
        `${run.side}: ${kind} of ${unit || "root"} in ${phase}, ${size}, ${asTime((to - from) / 1e3)}; ${waited ? `${asTime(waited / 1e3)} exposed: ${cause}` : "all hidden"}`));
    out.push(`<path class="fl-end" d="M${x(run.step)},${y - 2}v${2 * LANE + 2}"/><text class="fl-label" ${narrow ? `text-anchor="end" x="${x(run.step)}" y="${y - 5}"` : `x="${x(run.step) + 5}" y="${y + 18}"`}>${asTime(run.step / 1e3)}</text>`);
  });
  const bottom = start + runs.length * pitch - 4;
  // ends that three divide into round numbers; all others are divided by four
  const pieces = [1.5, 3, 6].includes(digits(end / 10 ** Math.floor(Math.log10(end)), 3)) ? 3 : 4;
  for (const part of [...Array(pieces + 1).keys()].map((place) => place / pieces))
    out.push(`<path class="fl-grid" d="M${x(end * part)},${start - 2}V${bottom}"/><text class="fl-small" text-anchor="middle" x="${x(end * part)}" y="${bottom + 12}">${part ? asTime((end * part) / 1e3) : 0}</text>`);
  return { svg: out.join(""), height: bottom + AXIS - top };
}

// The categories of memory that some run has, with their colours.
function used(answer, offers) {
  const there = new Set(answer.rows.flatMap((row) => row.memory.filter(([, bytes]) => bytes > row.peak / 200).map(([name]) => name)));
  return Object.entries(offers.categories).filter(([name]) => there.has(name));
}

function spoken(answer) {
  const lines = answer.rows.map((row) => `${row.name}: ${[row.peak_words && `memory ${row.peak_words}`, row.step_words ? `step ${row.step_words}` : `step ${row.why_no_step}`, ...row.bands.filter(Boolean).map((band) => `${band.words} ${band.of}`), row.measured && `measured ${row.measured.peak_words}, ${row.measured.step_words}`, row.here && `step here predicted from the run of ${row.here.of} ${row.here.words}`].filter(Boolean).join(", ")}`);
  return `${answer.memory_title}. ${answer.step_title} (${answer.clock}). ${lines.join("; ")}. ${answer.difference}`;
}

// ---- the instrument

function render({ model, el }) {
  const offers = model.get("offers");
  let answer = model.get("answer"), asked = structuredClone(answer.asked), drawn = null, number = answer.n, waiting = 0;
  const presetOf = () => offers.presets[asked.choices.preset];

  function send(press) {
    // the answer repeats the number: one to an older question moves no control
    asked.n = ++number;
    model.set("asked", structuredClone(asked));
    if (press) model.set("pressed", { n: number, what: press });
    model.save_changes();
    awaitAnswer();
    showControls();
  }
  // Python may be at work or still be loaded: after a moment this is said, and what is drawn is marked as old. A slider
  // that goes on moving does not begin that moment anew.
  function awaitAnswer() {
    waiting ||= setTimeout(() => {
      // JupyterLab marks the widgets of a kernel that has ended; no answer will come
      const ended = Boolean(root.closest(".jupyter-widgets-disconnected"));
      root.classList.toggle("fl-old", !ended);
      say(ended ? "no answer: the kernel has ended, as the line above the lab says" : offers.waiting, "fl-waits");
    }, BUSY_AFTER_MS);
  }
  function noLongerAwaits() {
    clearTimeout(waiting);
    waiting = 0;
    root.classList.remove("fl-old");
  }
  function ask(choices = {}, look = {}) {
    Object.assign(asked.choices, choices);
    Object.assign(asked, look);
    // another choice is another question, so the guess begins anew
    // another job is another question; what is only unfolded beside the answer is none
    const same = "guess" in look || ("more" in look && !Object.keys(choices).length);
    if (asked.guess.on && !same) asked.guess = { on: true, given: false, faster: "", memory: "" };
    send();
  }

  const guess = (changes) => ask({}, { guess: { ...asked.guess, ...changes } });
  const toggled = (value) => {
    const now = asked.choices.strategies, order = offers.values.strategies;
    const next = now.includes(value) ? now.filter((each) => each !== value) : order.filter((each) => each === value || now.includes(each));
    // the last strategy stays chosen
    if (next.length) ask({ strategies: next });
  };
  const engines = (value) => {
    const now = asked.choices.engines;
    ask({ engines: now.includes(value) ? now.filter((each) => each !== value) : [...now, value] });
  };
  const guessing = buttons("Guess", () => ["Guess first"], (name) => name, (state) => state.guess.on, () => guess({ on: !asked.guess.on, given: false, faster: "", memory: "" }));
  const top = [
    buttons("Preset", () => Object.keys(offers.presets), (name) => name, (state, value) => state.choices.preset === value, (value) => ask({ preset: value })),
    menu("Model", "model", () => presetOf().models, ask), menu("Ranks", "ranks", () => presetOf().ranks, ask),
    menu("Precision", "precision", () => offers.values.precision, ask),
    guessing,
    buttons("Pin", () => ["Pin A"], (name) => name, (state) => state.pin, () => ask({}, { pin: !asked.pin })),
  ];
  const second = [
    buttons("Strategies", () => offers.values.strategies, (name) => name, (state, value) => state.choices.strategies.includes(value), toggled, true),
    buttons("Prefetch", (preset, state) => [...new Set([0, 1, 2, state.choices.prefetch])], (value) => `prefetch ${value}`, (state, value) => state.choices.prefetch === value, (value) => ask({ prefetch: value })),
  ];
  const link = slider("link", { label: (preset) => preset.link_words, ends: (preset) => preset.links, at: (state, given) => (given.asked.choices.link === state.choices.link ? given.link : null), text: asRate, asked: asRate, stops: ([low, high]) => Math.round(40 * Math.log10(high / low)) }, ask);
  const tokens = slider("tokens", { label: () => "Tokens a rank and step", ends: (preset) => preset.tokens, at: (state) => state.choices.tokens, text: (value) => String(Math.round(value)), asked: Math.round, stops: ([low, high]) => Math.round(Math.log2(high / low)) }, ask);
  const sequence = slider("sequence", { label: () => "Sequence length", ends: (preset) => preset.sequences, at: (state) => state.choices.sequence, text: (value) => String(Math.round(value)), asked: Math.round, stops: ([low, high]) => Math.round(Math.log2(high / low)) }, ask);
  const ofRuns = [
    typed("Timed steps", "steps", ask),
    buttons("Engines", () => offers.values.engines, (name) => name, (state, value) => state.choices.engines.includes(value), engines, true),
  ];
  const more = [
    typed("Card", "card", ask), menu("Units", "units", () => offers.values.units, ask), menu("Recompute", "checkpoint", () => offers.values.checkpoint, ask), menu("Optimizer", "optimizer", () => offers.values.optimizer, ask),
    menu("Ranks a shard group", "shard_size", () => offers.values.shard_size, ask), buttons("Wind tunnel", () => ["on"], (name) => name, (state) => state.choices.link === offers.wind_tunnel, () => ask({ link: asked.choices.link === offers.wind_tunnel ? presetOf().choices.link : offers.wind_tunnel })),
    typed("its cards", "tunnel", ask), menu("their model", "as_model", () => offers.values.as_model, ask),
    ...(offers.measures ? ofRuns : []),
  ];
  const figure = element("div", { class: "fl-figure" }), tooltip = element("div", { class: "fl-tip", role: "tooltip", hidden: true });
  const handle = element("div", { class: "fl-card", role: "slider", tabindex: 0, "aria-label": "Card", "aria-valuemin": 0 });
  const stage = element("div", { class: "fl-stage" }, figure, handle, tooltip);
  const memory = element("input", { type: "text", "aria-label": "Guess of B's memory", onchange: () => { asked.guess.memory = memory.value; }, onkeydown: (event) => { if (event.key === "Enter") reveal.click(); } });
  const question = element("p", {}), unit = element("span", {}), faster = element("div", { class: "fl-group", role: "group", "aria-label": "Guess of the shorter step" });
  const reveal = element("button", { type: "button", class: "fl-go", onclick: () => guess({ memory: memory.value, given: true }) }, "Show the answer");
  const lacking = element("span", { class: "fl-lacking", role: "alert" }); // what a guess lacks, beside its button
  const asks = element("div", { class: "fl-asks", hidden: true }, question, element("div", { class: "fl-line" }, element("span", {}, "Shorter step:"), faster, element("label", {}, "B needs ", memory, unit), reveal, lacking));
  const sentence = element("p", { class: "fl-sentence" });
  const measure = element("button", { type: "button", class: "fl-go", onclick: measureNow }, "Measure");
  const cancel = element("button", { type: "button", onclick: () => send("cancel") }, "Cancel");
  const bar = element("progress", { max: 1, "aria-label": "Progress of the runs" });
  const message = element("div", { class: "fl-message", role: "status" });
  const unfolded = () => {
    const more = folds.some((each) => each.open);
    if (more !== Boolean(asked.more)) ask({}, { more });
  };
  const folded = (title, ...inside) => element("details", { class: "fl-fold", ontoggle: unfolded }, element("summary", {}, title), ...inside);
  const changes = element("div", { class: "fl-changes" }), copyText = element("pre", {}), forms = element("div", { class: "fl-group", role: "group", "aria-label": "Copy as" });
  const copied = element("button", { type: "button", class: "fl-go", onclick: () => navigator.clipboard?.writeText(copyText.textContent).then(() => { copied.textContent = "Copied"; }) }, "Copy");
  const folds = [folded("What would change if", changes), folded("Copy as", element("div", { class: "fl-line" }, forms, copied), copyText)];
  let form = null;
  const moreBox = element("details", { class: "fl-more" }, element("summary", {}, "More"), element("div", {}, ...more.map((each) => each.node.matches(".fl-group") ? element("div", { class: "fl-menu" }, element("span", {}, each.node.ariaLabel), each.node) : each.node)));
  const head = element("div", { class: "fl-line" }, ...top.map((each) => each.node), moreBox);
  const root = element("div", { class: "fl-instrument" }, head, element("div", { class: "fl-line" }, ...second.map((each) => each.node)),
    element("div", { class: "fl-sliders" }, link.node, tokens.node, sequence.node), asks, stage, sentence, element("div", { class: "fl-line fl-run" }, measure, cancel, ...folds, bar, message));
  el.append(root);

  function say(text, look = "") {
    message.textContent = text;
    message.className = `fl-message ${look}`;
  }
  // Measured runs would show the answer before the guess, and nothing is drawn over which they could lie.
  function measureNow() {
    if (!answer.hidden || !offers.measures) return send("measure");
    lacking.textContent = "Measuring would show the answer: make your guess, then measure. Or press Guess first again to go on without one.";
    toWhatLacks();
  }
  // To the first part of the guess that is missing.
  function toWhatLacks() {
    const place = asked.guess.faster ? memory : faster.firstElementChild;
    place.focus();
    asks.scrollIntoView({ block: "nearest" });
  }
  function showControls() {
    const preset = presetOf();
    for (const each of [...top, ...second, ...more]) each.show(asked, preset);
    link.show(asked, preset, answer);
    tokens.show(asked, preset, answer);
    sequence.show(asked, preset, answer);
    tokens.node.hidden = offers.own_batches.includes(asked.choices.model);
    sequence.node.hidden = tokens.node.hidden || (preset.measured && offers.fixed.includes("sequence_length"));
    keepFocus(faster, () => faster.replaceChildren(...["A", "B", "equal"].map((each) => element("button", { type: "button", "data-key": each, "aria-pressed": String(asked.guess.faster === each), onclick: () => guess({ faster: each, memory: memory.value, given: false }) }, each))));
    // what the reader is typing is left alone
    if (document.activeElement !== memory) memory.value = asked.guess.memory;
    // `link typed` is of the control `link`, too
    for (const field of root.querySelectorAll("[data-of]")) field.classList.toggle("fl-wrong", field.dataset.of.split(" ")[0] in (answer.errors ?? {}));
  }
  function showMore() {
    const more = model.get("more"), rows = more.what_if ?? [], texts = more.copies ?? {};
    const cells = (row) => [row.speed, row.step, `${row.memory}${row.fits ? "" : ", over the card"}`, row.sent].map((text) => element("td", {}, text));
    const line = (row) => element("tr", {}, element("td", {}, element("button", { type: "button", "data-key": `if:${row.words}`, title: "choose it", onclick: () => ask(row.choices) }, row.words)), ...cells(row));
    const heads = [`${more.b} with`, "speed", "step", "memory of a rank", "sent"].map((text) => element("th", {}, text));
    keepFocus(changes, () => changes.replaceChildren(...(rows.length ? [element("table", {}, element("tr", {}, ...heads), ...rows.map(line))] : [answer.hidden ? "hidden until the answer is shown" : "nothing to change is known"])));
    const names = Object.keys(texts);
    // the form that was shown is kept while it is offered
    if (!names.includes(form)) form = names[0] ?? null;
    keepFocus(forms, () => forms.replaceChildren(...names.map((name) => element("button", { type: "button", "data-key": name, "aria-pressed": String(name === form), onclick: () => { form = name; showMore(); } }, name))));
    copyText.textContent = texts[form] ?? "";
    copied.textContent = "Copy";
  }
  let measureIsNext = false; // whether Cancel was pressed by its key, so that the focus goes to Measure
  function showProgress() {
    const now = model.get("progress"), { guess: _, ...wrong } = answer.errors ?? {}, error = Object.values(wrong)[0]; // what a guess lacks stands beside it
    const had = document.activeElement;
    measure.disabled = now.busy || !presetOf().measured;
    measure.textContent = presetOf().measured ? now.what : "Simulated only";
    measure.title = presetOf().measured ? offers.measures ? "train these runs on this machine" : "say where runs can be measured" : "these GPUs are not here: their runs are simulated and cannot be measured";
    cancel.disabled = !now.cancels;
    // a disabled button loses the focus: it goes to the one that can be pressed next
    if (had === measure && measure.disabled) cancel.focus();
    if (had === cancel && cancel.disabled) measureIsNext = true;
    // while the ranks are being ended neither can be pressed; whoever has gone elsewhere meanwhile stays there
    if (measureIsNext && !measure.disabled) {
      measureIsNext = false;
      if ([document.body, cancel].includes(document.activeElement)) measure.focus();
    }
    bar.value = now.share;
    bar.hidden = !now.busy && !now.share;
    say(error ?? now.message, error || now.alarm ? "fl-alarm" : "");
  }
  function draw() {
    const hidden = Boolean(answer.hidden), left = !hidden && asks.contains(document.activeElement);
    asks.hidden = !hidden;
    // the question disappears with the focus in it, which goes to the button that asked for it
    if (left) guessing.node.querySelector("button").focus();
    stage.hidden = sentence.hidden = hidden;
    question.textContent = answer.asks ?? "";
    unit.textContent = ` ${answer.unit ?? ""}`;
    // the drawing is laid out in its own units, which are larger on wide pages and on projectors
    const width = el.clientWidth - 4, scale = model.get("scale") * (width > 1250 ? 1.3 : 1), inside = width / scale;
    if (el.clientWidth) root.classList.toggle("fl-narrow", inside < NARROW); // controls are there without an answer, too
    if (answer.rows && el.clientWidth) {
      const tips = [], places = placesOf(answer, offers, inside), top = bars(answer, offers, places, tips);
      const below = timeline(answer, offers, inside, places.height, tips), height = places.height + below.height;
      keepFocus(figure, () => { figure.innerHTML = `<svg viewBox="0 0 ${inside} ${height}" width="${width}" height="${height * scale}" role="group" aria-label="${escape(spoken(answer))}">${top.svg}${below.svg}</svg>`; });
      fitTitles(figure);
      drawn = { tips, card: top.card, scale };
      root.style.setProperty("--fl-scale", scale);
      placeCard();
    }
    // after a wrong choice the last figure stays, and is marked as old
    stage.classList.toggle("fl-stale", !answer.rows);
    sentence.replaceChildren(...(answer.judged ? [element("b", {}, `${answer.judged} `)] : []), `${answer.difference ?? ""} `, element("span", { class: "fl-clock" }, answer.clock ? `All ${answer.clock}. ` : ""), element("b", {}, answer.job ?? ""));
  }
  function placeCard() {
    const card = drawn.card;
    handle.hidden = !card;
    if (!card) return;
    Object.assign(handle.style, { left: `${card.at * drawn.scale - 8}px`, top: `${card.top * drawn.scale}px`, height: `${(card.bottom - card.top) * drawn.scale}px` });
    handle.setAttribute("aria-valuenow", answer.card);
    handle.setAttribute("aria-valuemax", Math.max(answer.card, Math.round(card.end)));
    handle.setAttribute("aria-valuetext", sized(answer.card));
    handle.dataset.words = `card ${sized(answer.card)}${card.beyond ? " ▸" : ""}`;
    handle.classList.toggle("fl-right", card.right);
    handle.title = `card ${sized(answer.card)}: drag it`;
  }
  function moveCard(bytes) {
    const card = inUnits(Math.max(bytes, 1e6), 3, SIZES).join("");
    if (card !== asked.choices.card) ask({ card });
  }
  handle.addEventListener("pointerdown", (event) => { handle.setPointerCapture(event.pointerId); event.preventDefault(); handle.focus(); });
  handle.addEventListener("pointermove", (event) => {
    if (!handle.hasPointerCapture(event.pointerId)) return;
    const at = (event.clientX - stage.getBoundingClientRect().left) / drawn.scale;
    // the handle follows at once, before the answer comes
    handle.style.left = `${at * drawn.scale - 8}px`;
    moveCard((at - drawn.card.left) * drawn.card.per);
  });
  handle.addEventListener("keydown", (event) => {
    // 1 % a key, 10 % with the page keys
    const step = { ArrowLeft: 0.99, ArrowDown: 0.99, ArrowRight: 1.01, ArrowUp: 1.01, PageDown: 0.9, PageUp: 1.1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    moveCard(answer.card * step);
  });
  const pick = (target) => {
    const group = target.closest?.("[data-pick]");
    if (group?.dataset.strategy) ask({}, { [group.dataset.pick.toLowerCase()]: group.dataset.strategy });
  };
  figure.addEventListener("click", (event) => pick(event.target));
  figure.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); pick(event.target); } });
  figure.addEventListener("pointermove", (event) => {
    const tip = event.target.dataset?.tip;
    tooltip.hidden = tip === undefined;
    if (tip === undefined) return;
    tooltip.textContent = drawn.tips[tip];
    const place = stage.getBoundingClientRect();
    tooltip.style.left = `${clamp(event.clientX - place.left + 12, 0, place.width - tooltip.offsetWidth - 4)}px`;
    tooltip.style.top = `${event.clientY - place.top - tooltip.offsetHeight - 10}px`;
  });
  figure.addEventListener("pointerleave", () => { tooltip.hidden = true; });
  moreBox.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !moreBox.open) return;
    moreBox.open = false;
    moreBox.firstElementChild.focus();
  });
  // JupyterLab's own keys must not act on a control that is typed into or moved.
  root.addEventListener("keydown", (event) => event.stopPropagation());

  const answered = () => {
    answer = model.get("answer");
    lacking.textContent = answer.errors?.guess ?? "";
    noLongerAwaits();
    if (answer.n < number) awaitAnswer(); // to what was asked since
    else {
      number = answer.n;
      asked = structuredClone(answer.asked);
      showControls();
      showProgress();
    }
    draw();
    showMarks();
    root.dataset.answered = answer.n;
  };
  const resized = new ResizeObserver(() => {
    if (!el.clientWidth) return;
    draw();
    stayInView();
    if (Math.abs(model.get("width") - el.clientWidth) > 40) { model.set("width", el.clientWidth); model.save_changes(); }
  });
  // A cell that was just run has displayed the lab: it stays in view, though the notebook has gone on to the next cell.
  function stayInView() {
    if (!model.get("shown")) return;
    model.set("shown", false);
    model.save_changes();
    const cell = el.closest(".jp-Cell");
    if (cell?.matches(".jp-mod-active") || cell?.nextElementSibling?.matches(".jp-mod-active")) root.scrollIntoView({ block: "nearest" });
  }
  // Marks come behind the answer: while it is hidden, those of the answer before would tell a part of it.
  const showMarks = () => link.mark(answer.hidden ? [] : model.get("marks"));
  model.on("change:answer", answered);
  model.on("change:marks", showMarks);
  model.on("change:more", showMore);
  model.on("change:progress", showProgress);
  model.on("change:scale", draw);
  resized.observe(el);
  showControls();
  showProgress();
  draw();
  showMarks();
  showMore();
  return () => {
    resized.disconnect();
    model.off("change:answer", answered);
    model.off("change:marks", showMarks);
    model.off("change:more", showMore);
    model.off("change:progress", showProgress);
    model.off("change:scale", draw);
  };
}

export default { render };
