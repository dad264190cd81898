// Colors. A classic script in the head, so that the first paint has them.
(() => {
  const KEY = "moesaic.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    root.dataset.theme = localStorage.getItem(KEY) ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  apply();
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const chosen = root.dataset.theme === "dark" ? "light" : "dark";
      // The choice of the system's own colors is not stored: the page then follows the system again.
      if ((chosen === "dark") === system.matches) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, chosen);
      apply();
    });
  });
})();
