// Light or dark, on every page of the site: what the reader has chosen on any of them, else what the system has. It runs
// before the page is painted, and alone: pages of lessons allow no other script.
(() => {
  const KEPT = "fsdplab-paper";
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // where a page may not store, the choice holds as long as the page is open
  const isDark = () => root.classList.contains("dark");
  function show() {
    try { chosen = localStorage.getItem(KEPT) ?? chosen; } catch (refused) { /* a page may not store */ }
    const dark = chosen ? chosen === "dark" : system.matches;
    root.classList.toggle("dark", dark);
    root.classList.toggle("light", !dark);
    const button = document.getElementById("switch");
    if (!button) return;
    button.hidden = false; // without scripts there is none
    button.textContent = dark ? "light page" : "dark page";
  }
  function turn() {
    chosen = isDark() ? "light" : "dark";
    try { localStorage.setItem(KEPT, chosen); } catch (refused) { /* a page may not store */ }
    show();
  }
  show();
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("switch").addEventListener("click", turn);
    show();
  });
  addEventListener("storage", show); // the switch of another tab
  addEventListener("pageshow", show); // Back shows a page as it was left
  system.addEventListener("change", show);
  addEventListener("beforeprint", () => root.classList.replace("dark", "light")); // paper is light
  addEventListener("afterprint", show);
})();
