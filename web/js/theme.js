// Sets the color theme. It is a classic script in the head, so that the first paint has the colors.
(() => {
  const KEY = "moesaic.theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = null; // where the browser blocks site data, it lasts until the page is left
  try {
    choice = localStorage.getItem(KEY);
  } catch { /* The browser blocks site data. */ }
  const apply = () => {
    root.dataset.theme = choice ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  apply();
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const chosen = root.dataset.theme === "dark" ? "light" : "dark";
      // The choice of the system's colors is not stored, so that the page follows the system again.
      choice = (chosen === "dark") === system.matches ? null : chosen;
      try {
        if (choice) localStorage.setItem(KEY, choice);
        else localStorage.removeItem(KEY);
      } catch { /* The storage is blocked or full. */ }
      apply();
    });
  });
})();
