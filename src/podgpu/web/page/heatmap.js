// The heat map for many GPUs: a square for each GPU, a cell for each node. Only the visible part is
// in the DOM.

import { groupedByNode } from "./criteria.js";
import { classes, h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { isMarked, labelOf } from "./tile.js";
import { nodeClass } from "./tiles.js";

const NARROWEST_CELL = 138;
const USUAL_PER_LINE = 8;
const MOST_LINES = 2;
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
    this.element.addEventListener("mouseover", (event) => this.point(event));
    this.element.addEventListener("focusin", (event) => this.point(event));
    this.element.addEventListener("mouseleave", () => card.leave());
    this.element.addEventListener("focusout", () => card.leave());
    this.element.addEventListener("click", (event) => this.point(event, true));
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.point(event, true);
    });
  }

  // `measured`: width, and top in the window, measured before this update changed anything.
  // Measuring later would make the browser lay the page out twice.
  show(devices, nodes, anew, measured) {
    this.nodes = nodes;
    this.groups = [...groupedByNode(devices)];
    const sizes = this.groups.map(([, members]) => members.length);
    this.largest = Math.max(1, ...sizes);
    if (anew) this.card.leave();
    this.render(measured, anew);
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

  // All cells have the same size, so positions can be computed: eight squares per line, or more if
  // two lines are not enough.
  layout(width) {
    const half = Math.ceil(this.largest / MOST_LINES);
    const usual = Math.min(USUAL_PER_LINE, this.largest);
    const perLine = Math.max(usual, half);
    const lines = Math.ceil(this.largest / perLine);
    const columns = Math.max(1, Math.floor((width + GAP) / (NARROWEST_CELL + GAP)));
    const square = this.touched.matches ? TOUCHED_HEIGHT : SQUARE_HEIGHT;
    const height = NAME_HEIGHT + lines * (square + SQUARE_GAP) + GAP;
    return { perLine, columns, square, height };
  }

  // Draws the visible nodes. After scrolling, nodes keep their cells, and only newly visible nodes
  // are drawn. `anew`: assigns the cells to the nodes in order, because filling elements costs less
  // than moving them.
  render({ width, top } = this.measure(), anew = false) {
    const { perLine, columns, square, height } = this.layout(width);
    const rows = Math.ceil(this.groups.length / columns);
    const firstVisible = Math.min(rows - 1, Math.floor(-top / height));
    const lastVisible = Math.ceil((innerHeight - top) / height);
    const first = Math.max(0, firstVisible - SPARE_ROWS);
    const last = Math.min(rows, lastVisible + SPARE_ROWS);

    this.element.style.height = `${rows * height}px`;
    this.element.style.setProperty("--per-line", perLine);
    this.element.style.setProperty("--square", `${square}px`);
    this.window.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    this.window.style.gridAutoRows = `${height}px`;
    this.window.style.transform = `translateY(${first * height}px)`;

    const end = Math.max(first + 1, last);
    const drawn = this.groups.slice(first * columns, end * columns);
    const hasFocus = this.element.contains(document.activeElement);
    if (anew && !hasFocus) this.assignCells(drawn);
    this.draw(drawn);
  }

  // Scrolls so that the first or last square is in the DOM.
  reach(isLast) {
    if (!this.element.isConnected) return;
    const top = isLast ? document.documentElement.scrollHeight : 0;
    scrollTo(0, top);
    this.render();
  }

  measure() {
    const { width, top } = this.element.getBoundingClientRect();
    return { width, top };
  }

  // Gives the first cell to the first node, and so on. Cells that are left get a number as key.
  assignCells(groups) {
    const assigned = new Map();
    [...this.cells.values()].forEach((cell, i) => {
      const [name] = groups[i] ?? [i];
      assigned.set(name, cell);
    });
    this.cells = assigned;
  }

  draw(groups) {
    const spare = this.spare(groups);
    const cells = new Map();
    for (const [name, members] of groups) {
      const cell = this.cells.get(name) ?? spare.pop() ?? new Cell();
      cell.show(this.nodes.get(name), members, this.context.now());
      cells.set(name, cell);
    }
    this.cells = cells;
    const elements = [...cells.values()].map((cell) => cell.element);
    place(this.window, elements);
  }

  // Returns the cells of nodes that are no longer drawn. A cell with the focus is not reused.
  spare(groups) {
    const wanted = new Set(groups.map(([name]) => name));
    const unused = [...this.cells].filter(([name]) => !wanted.has(name)).map(([, cell]) => cell);
    return unused.filter((cell) => !cell.element.contains(document.activeElement));
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
    setClass(this.element, nodeClass("cell", node));
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
  const severity = isMarked(device) && `has-${device.severity}`;
  setClass(square, classes("square", `is-${device.colour}`, severity, device.old && "is-old"));
  square.setAttribute("aria-label", labelOf(device, now));
}
