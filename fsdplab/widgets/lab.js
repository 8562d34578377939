function atOnce(told) {
  // One set of listeners a page, however many labs it shows; a lab is found from the element that was touched.
  const known = window.fsdplabAtOnce;
  window.fsdplabAtOnce = told;
  if (known) return;
  const now = () => window.fsdplabAtOnce;

  const nameOf = (cell) => [...cell.classList].find((each) => each.startsWith("fsdplab-of-"))?.slice(11);

  function wrong(rule, value) {
    const right = new RegExp(`^(?:${rule.form})$`, "i").test(value);
    const bounded = (rule.least === null || Number(value) >= rule.least) && (rule.most === null || Number(value) <= rule.most);
    return !(right && bounded);
  }

  function mark(cell, words) {
    let line = cell.querySelector(":scope > .fsdplab-at-once");
    if (words && !line) {
      line = document.createElement("div");
      line.className = "fsdplab-error fsdplab-at-once";
      line.setAttribute("role", "alert");
      cell.append(line);
    }
    if (line) line.textContent = words;
    cell.classList.toggle("fsdplab-wrong", Boolean(words));
  }

  function judge(event) {
    const cell = event.target.closest?.(".fsdplab-lab .fsdplab-cell");
    const rule = cell && now().rules[nameOf(cell)];
    if (rule) mark(cell, wrong(rule, event.target.value) ? rule.words.replace("{got}", event.target.type === "number" ? event.target.value || "empty" : `'${event.target.value}'`) : "");
  }

  // A control's second change waits until the kernel has answered its first, and a press does not: a busy kernel would
  // get the press before the change that was made before it. So the press takes along what the page shows.
  function tell(lab) {
    const shown = {};
    for (const cell of lab.querySelectorAll(".fsdplab-cell")) {
      const field = cell.querySelector("select, input");
      const pressed = [...cell.querySelectorAll("button.mod-active")].map((each) => each.textContent.trim());
      if (nameOf(cell)) shown[nameOf(cell)] = field ? (field.selectedOptions?.[0]?.text ?? field.value) : pressed;
    }
    write(lab, ".fsdplab-shown", JSON.stringify(shown));
  }

  function write(lab, place, words) {
    const hidden = lab.querySelector(`${place} input`);
    if (!hidden || hidden.value === words) return;
    hidden.value = words;
    for (const kind of ["input", "change"]) hidden.dispatchEvent(new Event(kind, { bubbles: true }));
  }

  // Figures are drawn by the kernel, which does not see how wide the page is.
  function measure() {
    for (const lab of document.querySelectorAll(".fsdplab-lab"))
      if (lab.clientWidth) write(lab, ".fsdplab-wide", lab.clientWidth >= now().wide_px ? "wide" : "");
  }

  // The kernel answers a press with a new line; while the old one stands, the page says what it waits for.
  function waitFor(lab) {
    const line = lab.querySelector(".fsdplab-message");
    setTimeout(() => {
      if (line && line.isConnected) {
        line.textContent = lab.matches(".jupyter-widgets-disconnected") ? now().gone : now().waiting;
        line.classList.add("fsdplab-waiting");
      }
    }, now().after_ms);
  }

  function pressed(event) {
    const button = event.target.closest?.(".fsdplab-lab button");
    if (!button) return;
    const lab = button.closest(".fsdplab-lab");
    const row = button.closest(".fsdplab-chips");
    if (row) setTimeout(() => mark(row, row.querySelector(".mod-active") ? "" : now().nothing), 0);
    if (button.matches(".fsdplab-answers")) {
      tell(lab);
      waitFor(lab);
    }
  }

  setInterval(measure, 1000);
  document.addEventListener("input", judge, true);
  document.addEventListener("click", pressed, true);
}
