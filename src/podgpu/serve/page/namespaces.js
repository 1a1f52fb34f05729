// What each namespace has, uses and costs.

import { writeHash } from "./criteria.js";
import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { amount, money, moment, parts, percent, UNKNOWN } from "./format.js";

const KINDS = [
  ["allocated", "Cost, allocated"],
  ["used", "Cost, used"],
  ["energy", "Cost, energy"],
];

export class Namespaces {
  constructor() {
    this.sort = "allocated_gpus";
    this.down = true;
    this.rows = new Map();
    this.head = h("tr");
    this.body = h("tbody");
    this.about = h("p", { class: "about" });
    this.table = h("table", {}, h("thead", {}, this.head), this.body);
    this.element = h("div", { class: "namespaces" }, this.about, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Namespaces" }, this.table));
    this.head.addEventListener("click", (event) => this.order(event.target.closest("button")?.name));
  }

  order(name) {
    if (!name) return;
    this.down = name === this.sort ? !this.down : name !== "namespace";
    this.sort = name;
    this.render();
    this.head.querySelector(`button[name="${name}"]`).focus();
  }

  show(picture) {
    this.picture = picture;
    this.render();
  }

  render() {
    const rows = this.picture.namespaces ?? [];
    const columns = columnsOf(rows, this.picture.currency ?? "");
    const by = columns.find((column) => column.name === this.sort) ?? columns[0];
    const sign = this.down ? -1 : 1;
    this.renderHead(columns, by);
    const ordered = [...rows].sort((a, b) => sign * compare(by.value(a), by.value(b)));
    place(this.body, ordered.map((row) => this.row(row, columns)));
    setText(this.about, aboutText(this.picture));
  }

  // Kept from picture to picture, so that a link that has the focus does not lose it.
  row(row, columns) {
    let element = this.rows.get(row.namespace);
    if (!element) {
      const link = h("a", { href: writeHash({ ns: row.namespace }) }, h("bdi", {}, plain(row.namespace)));
      element = h("tr", {}, h("th", { scope: "row" }, link), ...columns.slice(1).map(() => h("td")));
      this.rows.set(row.namespace, element);
    }
    columns.slice(1).forEach((column, i) => {
      const value = column.value(row);
      const cell = element.children[i + 1];
      setClass(cell, column.name === "idle_gpus" && value > 0 ? "wasted" : "");
      setText(cell, value === undefined ? UNKNOWN : column.write(value));
    });
    return element;
  }

  renderHead(columns, by) {
    const names = columns.map((column) => column.name).join();
    if (names !== this.columns) {
      this.columns = names;
      this.rows.clear();
      const button = (column) => h("button", { type: "button", name: column.name }, column.title);
      place(this.head, columns.map((column) => h("th", { scope: "col" }, button(column))));
    }
    columns.forEach((column, i) => {
      const order = this.down ? "descending" : "ascending";
      setAttribute(this.head.children[i], "aria-sort", column === by ? order : undefined);
    });
  }
}

function aboutText(picture) {
  if (!(picture.namespaces ?? []).some((row) => row.allocated_gpu_hours !== undefined)) return "";
  const since = picture.counting_since;
  return since ? `Hours, energy and cost since ${moment(since)}.` : "Hours and energy since the exporter started.";
}

function columnsOf(rows, currency) {
  const has = (value) => rows.some((row) => value(row) !== undefined);
  const number = (name, title, write) => ({ name, title, value: (row) => row[name], write });
  const columns = [
    { name: "namespace", title: "Namespace", value: (row) => row.namespace },
    number("allocated_gpus", "Allocated", parts),
    number("used_gpus", "Used", parts),
    number("idle_gpus", "Idle", parts),
    number("allocated_gpu_hours", "GPU-hours", amount),
    number("busy_gpu_hours", "Busy GPU-hours", amount),
    { name: "efficiency", title: "Busy of allocated", value: efficiency, write: percent },
    number("energy_kwh", "kWh", amount),
    ...KINDS.map(([kind, title]) => ({
      name: `cost-${kind}`,
      title,
      value: (row) => row.cost?.[kind],
      write: (price) => money(price, currency),
    })),
  ];
  return columns.filter((column) => has(column.value));
}

function efficiency(row) {
  if (row.busy_gpu_hours === undefined || !row.allocated_gpu_hours) return undefined;
  return Math.min(1, row.busy_gpu_hours / row.allocated_gpu_hours);
}

// What is not known comes last in either direction of what people look for: the largest first.
function compare(a, b) {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b));
  return (a ?? -Infinity) - (b ?? -Infinity) || 0;
}
