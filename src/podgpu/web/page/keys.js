// Keyboard control: arrow keys move between GPUs, / focuses the filter, ? shows the keys, Escape closes the innermost
// open element.

const MOVES = {
  ArrowRight: [1, 0],
  ArrowLeft: [-1, 0],
  ArrowDown: [0, 1],
  ArrowUp: [0, -1],
};
const SELECTOR = ".tile[data-key], .square";

export class Keys {
  // `escape` closes the innermost open element. `reach(isLast)` brings the first or last GPU into the page, before it
  // is focused.
  constructor(main, filter, help, escape, reach) {
    this.reach = reach;
    this.main = main;
    this.filter = filter;
    this.current = undefined;
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/" && !isTyping(event.target)) {
        event.preventDefault();
        filter.focus();
        filter.select();
      } else if (event.key === "?" && !isTyping(event.target)) {
        help.showModal();
      } else if (event.key === "Escape" && !help.open) {
        escape(event);
      }
    });
    main.addEventListener("keydown", (event) => this.move(event));
    main.addEventListener("focusin", (event) => this.choose(event.target.closest(SELECTOR)));
  }

  // Exactly one GPU is in the Tab order: the last focused one, or the first.
  refresh() {
    if (!this.current?.isConnected || !this.main.contains(this.current))
      this.choose(this.main.querySelector(SELECTOR));
  }

  choose(element) {
    if (!element || element === this.current) return;
    this.current?.setAttribute("tabindex", "-1");
    this.current = element;
    element.setAttribute("tabindex", "0");
  }

  move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const from = event.target.closest(SELECTOR);
    if (!from || event.target !== from) return;
    if (event.key === "Enter") {
      from.querySelector(".tile-name")?.click();
      return;
    }
    const to = event.key in MOVES ? this.next(from, ...MOVES[event.key]) : this.edge(event.key);
    if (!to) return;
    event.preventDefault();
    this.choose(to);
    to.focus({ preventScroll: true });
    to.scrollIntoView({ block: "nearest" });
  }

  edge(key) {
    if (key !== "Home" && key !== "End") return undefined;
    this.reach(key === "End");
    const all = this.main.querySelectorAll(SELECTOR);
    return key === "Home" ? all[0] : all[all.length - 1];
  }

  // Left and right follow the reading order; up and down follow the position on the screen.
  next(from, x, y) {
    const all = [...this.main.querySelectorAll(SELECTOR)];
    if (x) return all[all.indexOf(from) + x];
    const here = from.getBoundingClientRect();
    const middle = here.left + here.width / 2;
    let best;
    let least = Infinity;
    for (const other of all) {
      const there = other.getBoundingClientRect();
      const rows = y * (there.top - here.top);
      if (rows < here.height / 2) continue;
      const far = rows * 1000 + Math.abs(there.left + there.width / 2 - middle);
      if (far < least) [best, least] = [other, far];
    }
    return best;
  }
}

function isTyping(target) {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}
