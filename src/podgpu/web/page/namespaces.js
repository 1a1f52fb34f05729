// Shows the GPUs of each namespace and their cost per hour. The Cost view has its hours.

import { writeHash } from "./criteria.js";
import { h } from "./dom.js";
import { parts, perHour } from "./format.js";
import { Sum } from "./totals.js";
import { Table } from "./table.js";

export class Namespaces {
  constructor(onOrder) {
    this.table = new Table("Namespaces", onOrder);
    this.element = h("div", { class: "namespaces" }, this.table.element);
  }

  show(picture, devices, criteria) {
    const costs = costsOf(devices);
    const rows = (picture.namespaces ?? []).map((row) => ({ ...row, ...costs.get(row.namespace) }));
    const columns = columnsOf(rows, picture.currency ?? "");
    this.table.show(rows, columns, criteria.order || "allocated_gpus", (row) => row.namespace);
  }
}

function costsOf(devices) {
  const found = new Map();
  for (const device of devices) {
    for (const holder of device.holders) {
      if (holder.cost === undefined) continue;
      const sums = found.get(holder.namespace) ?? [new Sum(), new Sum()];
      found.set(holder.namespace, sums);
      sums[0].add(holder.cost);
      sums[1].add(holder.use === "idle" ? holder.cost : 0);
    }
  }
  return new Map([...found].map(([name, [cost, wasted]]) => [name, { costNow: cost.total, wastedNow: wasted.total }]));
}

function columnsOf(rows, currency) {
  const has = (value) => rows.some((row) => value(row) !== undefined);
  const number = (name, title, write, isWarm) => ({ name, title, value: (row) => row[name], write, isWarm });
  const isSome = (value) => value > 0;
  const hourly = (price) => perHour(price, currency);
  const columns = [
    { name: "namespace", title: "Namespace", value: (row) => row.namespace, link: (row) => writeHash({ ns: row.namespace }) },
    number("allocated_gpus", "Allocated", parts),
    number("used_gpus", "Used", parts),
    number("idle_gpus", "Idle", parts, isSome),
    number("costNow", "Cost now", hourly),
    number("wastedNow", "Wasted now", hourly, isSome),
  ];
  return columns.filter((column) => has(column.value));
}
