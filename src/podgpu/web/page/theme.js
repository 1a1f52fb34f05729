// Light, dark, or the system's theme; stored in this browser.

const KEY = "podgpu-theme";
const ORDER = ["auto", "light", "dark"];

export function startTheme(button) {
  let theme = remembered();
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.querySelector("#theme-name").textContent = theme;
  };
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    remember(theme);
    apply();
  });
  apply();
}

function remembered() {
  try {
    const theme = localStorage.getItem(KEY);
    return ORDER.includes(theme) ? theme : "auto";
  } catch {
    return "auto"; // storage is disabled
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // storage is disabled: the theme is used until the page is closed
  }
}
