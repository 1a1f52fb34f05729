// Shows the GPUs, the usage and the cost of each namespace.

import { writeHash } from "./criteria.js";
import { h, setText } from "./dom.js";
import { amount, money, moment, parts, percent, perHour } from "./format.js";
import { Sum } from "./totals.js";
import { Table } from "./table.js";

const KINDS = [
  ["allocated", "Cost, allocated"],
  ["used", "Cost, used"],
  ["energy", "Cost, energy"],
];

export class Namespaces {
  constructor(onOrder) {
    this.about = h("p", { class: "about" });
    this.table = new Table("Namespaces", onOrder);
    this.element = h("div", { class: "namespaces" }, this.about, this.table.element);
  }

  show(picture, devices, criteria) {
    const costs = costsOf(devices);
    const rows = (picture.namespaces ?? []).map((row) => ({ ...row, ...costs.get(row.namespace) }));
    const columns = columnsOf(rows, picture.currency ?? "");
    this.table.show(rows, columns, criteria.order || "allocated_gpus", (row) => row.namespace);
    setText(this.about, aboutText(picture));
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

function aboutText(picture) {
  if (!(picture.namespaces ?? []).some((row) => row.allocated_gpu_hours !== undefined)) return "";
  const since = picture.counting_since;
  return since ? `Hours, energy and cost since ${moment(since)}.` : "Hours and energy since the exporter started.";
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
    number("allocated_gpu_hours", "Allocated GPU-hours", amount),
    number("busy_gpu_hours", "Used GPU-hours", amount),
    { name: "efficiency", title: "Used of allocated", value: efficiency, write: percent },
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
