// A table that is sorted by a click on a column title; the order is stored in the address.

import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { plural, UNKNOWN } from "./format.js";

const AT_ONCE = 200;
const ONE_LINE = 18; // a text of up to this many characters is not wrapped

// A column has name, title, value(row) and, except for texts, write(value). `hint` is the tooltip of its title. The first column is the name of the row.
// `link(row)` is the target of a link. `isLong`: its text may need two lines. `isDetail`: hidden below 1600 px. `isWide`: hidden below 1200 px. `isWarm(value, row)` and `isBad(value, row)` return true for an amber and a red value.
export class Table {
  // `onOrder` is called with the new order: the column name, prefixed with - if the smallest values come first.
  // A table that a view has several of is not a landmark.
  constructor(label, onOrder, isLandmark = true) {
    this.rows = new Map();
    this.limit = AT_ONCE;
    this.head = h("tr");
    this.body = h("tbody");
    this.more = h("button", { type: "button", class: "more" });
    const table = h("table", {}, h("thead", {}, this.head), this.body);
    this.scroll = h(
      "div",
      {
        class: "scroll",
        tabindex: "0",
        role: isLandmark ? "region" : "group",
        "aria-label": label,
      },
      table,
    );
    this.element = h("div", {}, this.scroll, this.more);
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
    const names = columns.map((column) => column.name).join();
    if (names !== this.names) {
      this.names = names;
      this.rows.clear();
      const button = (column) =>
        h("button", { type: "button", name: column.name, title: column.hint }, column.title);
      place(
        this.head,
        columns.map((column) => h("th", { scope: "col", class: kindOf(column) }, button(column))),
      );
    }
    this.columns = columns;
    this.order = columns.some((column) => column.name === order.replace(/^-/, ""))
      ? order
      : columns[0].name;
    const by = this.order.replace(/^-/, "");
    const isUp = this.order.startsWith("-");
    columns.forEach((column, i) => {
      const direction = isUp ? "ascending" : "descending";
      setAttribute(this.head.children[i], "aria-sort", column.name === by ? direction : undefined);
    });
    this.ordered = ordered(
      rows,
      columns.find((column) => column.name === by),
      isUp,
    );
    const drawn = this.ordered.slice(0, this.limit);
    const kept = new Map();
    for (const row of drawn) kept.set(keyOf(row), this.row(row, keyOf(row)));
    this.rows = kept;
    place(this.body, [...kept.values()]);
    this.more.hidden = rows.length <= this.limit;
    setText(this.more, `Show more: ${plural(rows.length - this.limit, "row")} left`);
  }

  row(row, key) {
    let element = this.rows.get(key);
    if (!element)
      element = h("tr", {}, ...this.columns.map((column, i) => cellOf(column, i === 0)));
    this.columns.forEach((column, i) => {
      const cell = element.children[i];
      if (column.link) setAttribute(cell.firstElementChild, "href", column.link(row));
      const text = textOf(column, row);
      setText(cell.querySelector("bdi"), text);
      const isShort = !column.write && text.length <= ONE_LINE;
      const value = column.value(row);
      const kinds = [
        i > 0 && kindOf(column),
        text === UNKNOWN && "is-unknown",
        isShort && "is-short",
      ];
      kinds.push(column.isWarm?.(value, row) && "wasted", column.isBad?.(value, row) && "bad");
      setClass(cell, kinds.filter(Boolean).join(" "));
    });
    return element;
  }

  // Returns all rows in their order as tab-separated lines for a spreadsheet.
  asText() {
    const cell = (text) => text.replace(/[\t\n]/g, " ");
    const lines = this.ordered.map((row) =>
      this.columns.map((column) => cell(textOf(column, row))).join("\t"),
    );
    return [this.columns.map((column) => column.title).join("\t"), ...lines].join("\n");
  }
}

function cellOf(column, isName) {
  const text = column.link ? h("a", {}, h("bdi")) : h("bdi");
  return isName
    ? h("th", { scope: "row" }, text)
    : h("td", { class: kindOf(column), "data-title": column.title }, text);
}

function kindOf(column) {
  if (column.isDetail) return "is-detail";
  if (column.isWide) return "is-wide";
  return column.isLong ? "is-long" : column.write ? "" : "is-text";
}

function textOf(column, row) {
  const value = column.value(row);
  if (value === undefined || value === "") return UNKNOWN;
  return column.write ? column.write(value, row) : plain(value);
}

// Sorts the rows. Unknown values come last in both directions.
function ordered(rows, by, isUp) {
  const sign = isUp ? 1 : -1;
  const isKnown = (value) => value !== undefined && value !== "";
  return rows
    .map((row) => [by.value(row), row])
    .sort(([a], [b]) => {
      if (!isKnown(a) || !isKnown(b)) return Number(isKnown(b)) - Number(isKnown(a));
      return (
        sign * (by.write ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }))
      );
    })
    .map(([, row]) => row);
}
