// The heat map for many GPUs: a square for each GPU, a cell for each node. Only the visible part is in the DOM.

import { groupedByNode } from "./criteria.js";
import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { isMarked, labelOf } from "./tile.js";

const NARROWEST_CELL = 138;
const GAP = 12;
const SPARE_ROWS = 2;
const NAME_HEIGHT = 17;
const SQUARE_GAP = 2;
const SQUARE_HEIGHT = 15;
const TOUCHED_HEIGHT = 28; // larger for touch screens

export class HeatMap {
  // `card` shows a device next to its square.
  constructor(context, card) {
    this.context = context;
    this.card = card;
    this.cells = new Map();
    this.groups = [];
    this.window = h("div", { class: "map-window" });
    this.element = h("div", { class: "map" }, this.window);
    this.scheduled = false;
    this.touched = matchMedia("(pointer: coarse), (max-width: 500px)");
    const again = () => this.schedule();
    addEventListener("scroll", again, { passive: true });
    addEventListener("resize", again);
    for (const event of ["mouseover", "focusin"])
      this.element.addEventListener(event, (e) => this.point(e));
    this.element.addEventListener("mouseleave", () => card.leave());
    this.element.addEventListener("focusout", () => card.leave());
    this.element.addEventListener("click", (e) => this.point(e, true));
    this.element.addEventListener("keydown", (e) => {
      if (e.key !== "Enter" && e.key !== " ") return;
      e.preventDefault();
      this.point(e, true);
    });
  }

  // `place`: width, and top in the window, measured before this update changed anything. Measuring later would make the
  // browser lay the page out twice.
  show(devices, nodes, anew, place) {
    this.nodes = nodes;
    this.groups = [...groupedByNode(devices)];
    this.largest = this.groups.reduce((most, [, members]) => Math.max(most, members.length), 1);
    if (anew) this.card.leave();
    this.render(place, anew);
    this.schedule();
  }

  schedule() {
    if (this.scheduled || !this.element.isConnected) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      if (this.element.isConnected) this.render();
    });
  }

  // All cells have the same size, so positions can be computed: eight squares per line, at most two lines.
  layout(width) {
    const perLine = this.largest > 16 ? Math.ceil(this.largest / 2) : Math.min(8, this.largest);
    const lines = Math.ceil(this.largest / perLine);
    const columns = Math.max(1, Math.floor((width + GAP) / (NARROWEST_CELL + GAP)));
    const square = this.touched.matches ? TOUCHED_HEIGHT : SQUARE_HEIGHT;
    return { perLine, columns, square, height: NAME_HEIGHT + lines * (square + SQUARE_GAP) + GAP };
  }

  // Draws the visible nodes. After scrolling, nodes keep their cells, and only newly visible nodes are drawn. `anew`:
  // assigns the cells to the nodes in order, because filling elements costs less than moving them.
  render({ width, top: from } = this.measure(), anew = false) {
    const { perLine, columns, square, height } = this.layout(width);
    const rows = Math.ceil(this.groups.length / columns);
    const top = -from;
    const first = Math.max(0, Math.min(rows - 1, Math.floor(top / height)) - SPARE_ROWS);
    const last = Math.min(rows, Math.ceil((top + innerHeight) / height) + SPARE_ROWS);
    this.element.style.height = `${rows * height}px`;
    this.element.style.setProperty("--per-line", perLine);
    this.element.style.setProperty("--square", `${square}px`);
    this.window.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    this.window.style.gridAutoRows = `${height}px`;
    this.window.style.transform = `translateY(${first * height}px)`;
    const drawn = this.groups.slice(first * columns, Math.max(first + 1, last) * columns);
    this.draw(drawn, anew && !this.element.contains(document.activeElement));
  }

  // Scrolls so that the first or last square is in the DOM.
  reach(last) {
    if (!this.element.isConnected) return;
    scrollTo(0, last ? document.documentElement.scrollHeight : 0);
    this.render();
  }

  measure() {
    const { width, top } = this.element.getBoundingClientRect();
    return { width, top };
  }

  draw(groups, anew) {
    const kept = new Map();
    if (anew)
      this.cells = new Map([...this.cells.values()].map((cell, i) => [groups[i]?.[0] ?? i, cell]));
    const wanted = new Set(groups.map(([name]) => name));
    const spare = [];
    for (const [name, cell] of this.cells) {
      if (!wanted.has(name) && !cell.element.contains(document.activeElement)) spare.push(cell);
    }
    for (const [name, members] of groups) {
      const cell = this.cells.get(name) ?? spare.pop() ?? new Cell();
      cell.show(this.nodes.get(name), members, this.context.now());
      kept.set(name, cell);
    }
    this.cells = kept;
    place(
      this.window,
      [...kept.values()].map((cell) => cell.element),
    );
  }

  point(event, pinned = false) {
    const square = event.target.closest(".square");
    if (square) this.card.show(square.device, square, pinned);
    else if (event.type === "mouseover") this.card.leave();
  }
}

class Cell {
  constructor() {
    this.name = h("bdi");
    this.squares = h("div", { class: "squares" });
    this.element = h(
      "section",
      { class: "cell" },
      h("h2", { class: "cell-name" }, this.name),
      this.squares,
    );
  }

  show(node, members, now) {
    setText(this.name, plain(node.name));
    setAttribute(this.name, "title", plain(node.name));
    setClass(this.element, node.gone ? "cell is-gone" : node.old ? "cell is-old" : "cell");
    const squares = this.squares.children;
    while (squares.length > members.length) squares[squares.length - 1].remove();
    while (squares.length < members.length) {
      this.squares.append(h("span", { role: "button", class: "square", tabindex: "-1" }));
    }
    members.forEach((device, i) => showSquare(squares[i], device, now));
  }
}

function showSquare(square, device, now) {
  if (square.device === device) return;
  square.device = device;
  const severity = isMarked(device) ? ` has-${device.severity}` : "";
  setClass(square, `square is-${device.colour}${severity}${device.old ? " is-old" : ""}`);
  square.setAttribute("aria-label", labelOf(device, now));
}
