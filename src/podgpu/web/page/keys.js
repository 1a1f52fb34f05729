// Keyboard control: arrow keys move between GPUs, / focuses the filter, ? shows the keys, Escape
// closes the innermost open element.

const SELECTOR = ".tile[data-key], .square";

export class Keys {
  // `escape` closes the innermost open element. `reach(isLast)` brings the first or last GPU into
  // the page, before it is focused.
  constructor(main, filter, help, escape, reach) {
    this.reach = reach;
    this.main = main;
    this.current = undefined;
    document.addEventListener("keydown", (event) => {
      if (hasModifier(event)) return;
      if (event.key === "Escape") {
        // The browser closes the help.
        if (!help.open) escape();
        return;
      }
      if (isTyping(event.target)) return;
      if (event.key === "?") help.showModal();
      if (event.key === "/") {
        event.preventDefault();
        filter.focus();
        filter.select();
      }
    });
    main.addEventListener("keydown", (event) => this.move(event));
    main.addEventListener("focusin", (event) => this.choose(event.target.closest(SELECTOR)));
  }

  // Exactly one GPU is in the Tab order: the last focused one, or the first.
  refresh() {
    if (!this.main.contains(this.current ?? null)) this.choose(this.main.querySelector(SELECTOR));
  }

  choose(element) {
    if (!element || element === this.current) return;
    this.current?.setAttribute("tabindex", "-1");
    this.current = element;
    element.setAttribute("tabindex", "0");
  }

  move(event) {
    const from = event.target;
    if (hasModifier(event) || !from.matches(SELECTOR)) return;
    if (event.key === "Enter") {
      from.querySelector(".tile-name")?.click();
      return;
    }
    const to = this.targetOf(event.key, from);
    if (!to) return;
    event.preventDefault();
    this.choose(to);
    to.focus({ preventScroll: true });
    to.scrollIntoView({ block: "nearest" });
  }

  // Returns the GPU to which a key leads. Left and right follow the reading order; up and down
  // follow the position on the screen.
  targetOf(key, from) {
    if (key === "Home" || key === "End") this.reach(key === "End");
    const all = [...this.main.querySelectorAll(SELECTOR)];
    const place = all.indexOf(from);
    switch (key) {
      case "Home":
        return all[0];
      case "End":
        return all.at(-1);
      case "ArrowLeft":
        return all[place - 1];
      case "ArrowRight":
        return all[place + 1];
      case "ArrowUp":
        return nearest(all, from, -1);
      case "ArrowDown":
        return nearest(all, from, 1);
      default:
        return undefined;
    }
  }
}

// Returns the nearest element in the next row. `direction`: 1 is down, -1 is up.
function nearest(all, from, direction) {
  const here = from.getBoundingClientRect();
  let best;
  let least = Infinity;
  for (const other of all) {
    const there = other.getBoundingClientRect();
    const rows = direction * (there.top - here.top);
    const isSameRow = rows < here.height / 2;
    if (isSameRow) continue;
    // The factor makes the row more important than the column.
    const distance = rows * 1000 + Math.abs(middleOf(there) - middleOf(here));
    if (distance < least) {
      best = other;
      least = distance;
    }
  }
  return best;
}

function middleOf({ left, width }) {
  return left + width / 2;
}

function hasModifier(event) {
  return event.ctrlKey || event.metaKey || event.altKey;
}

function isTyping(target) {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}
