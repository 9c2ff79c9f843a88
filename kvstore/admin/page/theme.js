// Runs before the first paint, so that the page never flashes in the wrong colours.
(() => {
  const KEY = "kvstore-theme";
  const ORDER = ["auto", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(KEY);
      return ORDER.includes(theme) ? theme : "auto";
    } catch {
      return "auto";
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[theme];
      button.setAttribute("aria-label", `Colours: ${theme}. Change.`);
    }
  }

  apply(stored());
  addEventListener("DOMContentLoaded", () => {
    apply(stored());
    document.getElementById("theme").addEventListener("click", () => {
      const next = ORDER[(ORDER.indexOf(root.dataset.theme) + 1) % ORDER.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // Without storage the choice lasts until the page is closed.
      }
      apply(next);
    });
  });
})();
