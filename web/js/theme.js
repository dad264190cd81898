// Colors. A classic script in the head, so that the first paint has them.
(() => {
  const KEY = "moesaic.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = null; // where site data is blocked, it holds until the page is left
  try {
    choice = localStorage.getItem(KEY);
  } catch { /* blocked */ }
  const apply = () => {
    root.dataset.theme = choice ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  apply();
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const chosen = root.dataset.theme === "dark" ? "light" : "dark";
      // The choice of the system's own colors is not stored: the page then follows the system again.
      choice = (chosen === "dark") === system.matches ? null : chosen;
      try {
        if (choice) localStorage.setItem(KEY, choice);
        else localStorage.removeItem(KEY);
      } catch { /* blocked or full */ }
      apply();
    });
  });
})();
