// A table that is sorted by a click on a column title; the order is stored in the address.

import { classes, h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { plural, UNKNOWN } from "./format.js";

const AT_ONCE = 200;
const ONE_LINE = 18; // a text of up to this many characters is not wrapped

// A column has:
//   name, title
//   value(row)
//   write(value, row)        formats a number; without it, the values are texts
//   hint                     tooltip of the title
//   link(row)                target of a link
//   isWarm(value, row), isBad(value, row)   true for an amber and a red value
//   isLong                   its text may need two lines
//   isDetail, isWide         hidden below 1600 px, and below 1200 px
// The first column is the name of the row.
export class Table {
  // `onOrder` is called with the new order: the column name, prefixed with - if the smallest values
  // come first. A table that a view has several of is not a landmark.
  constructor(label, onOrder, isLandmark = true) {
    this.rows = new Map();
    this.limit = AT_ONCE;
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button", { type: "button", class: "more" });
    const table = h("table", {}, h("thead", {}, this.head), this.body);
    const role = isLandmark ? "region" : "group";
    const scroll = h("div", { class: "scroll", tabindex: "0", role, "aria-label": label }, table);
    this.element = h("div", {}, scroll, this.more);
    this.more.addEventListener("click", () => {
      this.limit += AT_ONCE;
      this.show(...this.shown);
    });
    this.head.addEventListener("click", (event) => {
      const name = event.target.closest("button")?.name;
      if (!name) return;
      onOrder(this.next(name));
      this.head.querySelector(`button[name="${CSS.escape(name)}"]`)?.focus();
    });
  }

  next(name) {
    const column = this.columns.find((candidate) => candidate.name === name);
    const down = name;
    const up = `-${name}`;
    // The first click sorts numbers from the largest, and texts from A.
    const first = column.write ? down : up;
    const second = column.write ? up : down;
    return this.order === first ? second : first;
  }

  // `keyOf(row)` identifies a row across updates, so that a focused link keeps the focus.
  show(rows, columns, order, keyOf) {
    this.shown = [rows, columns, order, keyOf];
    this.showHead(columns);
    this.columns = columns;
    const by = this.chooseOrder(order);
    this.ordered = ordered(rows, by, this.isUp);

    const elements = new Map();
    for (const row of this.ordered.slice(0, this.limit)) {
      const key = keyOf(row);
      elements.set(key, this.row(row, this.rows.get(key)));
    }
    this.rows = elements;
    place(this.body, [...elements.values()]);

    const left = rows.length - this.limit;
    this.more.hidden = left <= 0;
    setText(this.more, `Show more: ${plural(left, "row")} left`);
  }

  // Creates the titles if there are other columns than before. Then no row can be reused.
  showHead(columns) {
    const names = columns.map((column) => column.name).join();
    if (names === this.names) return;
    this.names = names;
    this.rows.clear();
    place(this.head, columns.map(titleOf));
  }

  // Returns the column to sort by: the first one if the order names another column.
  chooseOrder(order) {
    const [first] = this.columns;
    const name = order.replace(/^-/, "");
    const by = this.columns.find((column) => column.name === name) ?? first;
    this.order = by.name === name ? order : by.name;
    this.columns.forEach((column, i) => {
      const direction = this.isUp ? "ascending" : "descending";
      setAttribute(this.head.children[i], "aria-sort", column === by && direction);
    });
    return by;
  }

  get isUp() {
    return this.order.startsWith("-");
  }

  // `known`: the element that showed this row before.
  row(row, known) {
    const element = known ?? this.emptyRow();
    this.columns.forEach((column, i) => showCell(element.children[i], column, row, i === 0));
    return element;
  }

  emptyRow() {
    return h("tr", {}, ...this.columns.map((column, i) => cellOf(column, i === 0)));
  }

  // Returns all rows in their order as tab-separated lines for a spreadsheet.
  asText() {
    const cell = (text) => text.replace(/[\t\n]/g, " ");
    const line = (row) => this.columns.map((column) => cell(textOf(column, row))).join("\t");
    const titles = this.columns.map((column) => column.title).join("\t");
    return [titles, ...this.ordered.map(line)].join("\n");
  }
}

// A table that keeps its own order. The order of other tables is in the address.
export function sortableTable(label) {
  const table = new Table(
    label,
    (order) => {
      const [rows, columns, , keyOf] = table.shown;
      table.show(rows, columns, order, keyOf);
    },
    false,
  );
  return table;
}

// A column of numbers that are a field of the row.
export function fieldColumn(name, title, write, options = {}) {
  return { name, title, value: (row) => row[name], write, ...options };
}

// Returns the columns that have a value in any row. The first column is the name.
export function filledColumns(columns, rows) {
  const isFilled = ({ value }) => rows.some((row) => value(row) !== undefined);
  const [name, ...others] = columns;
  return [name, ...others.filter(isFilled)];
}

// The columns of the parts of waste. `wasteOf(row)`: a Waste, or undefined. `unit` is added to the
// titles. `hints`: tooltips by name. `options`: further properties of all these columns.
export function wasteColumns(wasteOf, currency, { unit = "", hints = {}, ...options }) {
  const column = (part, title) => {
    const name = `${part}_cost`;
    const value = (row) => wasteOf(row)?.rounded(currency)[part];
    return { name, title: `${title} cost${unit}`, hint: hints[name], value, ...options };
  };
  return [
    column("idle", "Idle"),
    column("underused", "Under-used"),
    column("unallocated", "Unallocated"),
  ];
}

function titleOf(column) {
  const attributes = { type: "button", name: column.name, title: column.hint };
  const button = h("button", attributes, column.title);
  return h("th", { scope: "col", class: kindOf(column) }, button);
}

function cellOf(column, isName) {
  const text = column.link ? h("a", {}, h("bdi")) : h("bdi");
  if (isName) return h("th", { scope: "row" }, text);
  return h("td", { class: kindOf(column), "data-title": column.title }, text);
}

function showCell(cell, column, row, isName) {
  const text = textOf(column, row);
  setText(cell.querySelector("bdi"), text);
  if (column.link) setAttribute(cell.firstElementChild, "href", column.link(row));

  const value = column.value(row);
  const isShort = !column.write && text.length <= ONE_LINE;
  const kinds = classes(
    !isName && kindOf(column),
    text === UNKNOWN && "is-unknown",
    isShort && "is-short",
    column.isWarm?.(value, row) && "wasted",
    column.isBad?.(value, row) && "bad",
  );
  setClass(cell, kinds);
}

function kindOf(column) {
  if (column.isDetail) return "is-detail";
  if (column.isWide) return "is-wide";
  if (column.isLong) return "is-long";
  return column.write ? "" : "is-text";
}

function textOf(column, row) {
  const value = column.value(row);
  if (!isKnown(value)) return UNKNOWN;
  return column.write ? column.write(value, row) : plain(value);
}

function isKnown(value) {
  return value !== undefined && value !== "";
}

// Sorts the rows. Unknown values come last in both directions.
function ordered(rows, by, isUp) {
  const pairs = rows.map((row) => ({ row, value: by.value(row) }));
  const known = pairs.filter(({ value }) => isKnown(value));
  const unknown = pairs.filter(({ value }) => !isKnown(value));
  const compare = by.write ? compareNumbers : compareTexts;
  const direction = isUp ? 1 : -1;
  known.sort((a, b) => direction * compare(a.value, b.value));
  return [...known, ...unknown].map(({ row }) => row);
}

function compareNumbers(a, b) {
  return a - b;
}

// Compares "node-2" with "node-10" as people do.
function compareTexts(a, b) {
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
