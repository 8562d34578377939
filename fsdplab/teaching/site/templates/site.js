// The switch between light and dark pages.
function paper(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("switch").textContent = dark ? "light page" : "dark page";
}
document.getElementById("switch").onclick = () => {
  const dark = !document.documentElement.classList.contains("dark");
  paper(dark);
  try { localStorage.setItem("fsdplab-paper", dark ? "dark" : "light"); } catch (refused) { /* a page may not store */ }
};
paper(document.documentElement.classList.contains("dark"));
