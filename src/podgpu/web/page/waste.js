// Shows idle GPU time by holder, in hours and money, as a table that can be sorted, copied and downloaded as CSV.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { podHash, GROUPS, wordsOf, writeHash } from "./criteria.js";
import { h, setAttribute, setText } from "./dom.js";
import { amount, duration, money, moment, parts, percent, perHour, plural } from "./format.js";
import { GROUP_TITLES } from "./pods.js";
import { Table } from "./table.js";

const EVERY_SECONDS = 60;
export const RANGES = ["1h", "24h", "7d", "30d"];
const MISSING = "This server keeps no account of waste: its podgpu is older than this page.";

export class Waste {
  // `context` has now(). `onOrder` is called with the new order of the table.
  constructor(context, onOrder, onAnswer) {
    this.context = context;
    this.question = new Question(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.ways = GROUPS.map((by) => h("a", {}, GROUP_TITLES[by]));
    this.about = h("p", { class: "about" });
    this.csv = h("a", { class: "quiet", download: "" }, "CSV");
    this.message = h("p", { class: "message" });
    this.table = new Table("Waste", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    const tabs = (label, links) => h("nav", { class: "tabs", "aria-label": label }, ...links);
    const head = h("div", { class: "table-head" }, tabs("Waste by", this.ways), tabs("Range", this.ranges), this.about, this.copy, this.csv);
    this.element = h("div", { class: "waste" }, head, this.message, this.table.element);
  }

  leave() {
    this.question.forget();
  }

  show(criteria) {
    const by = GROUPS.includes(criteria.by) ? criteria.by : "pod";
    const range = RANGES.includes(criteria.range) ? criteria.range : "24h";
    const url = `api/v1/waste?range=${range}&by=${by}`;
    const { state, data, message } = this.question.want(url, EVERY_SECONDS);
    const kept = { view: "waste", q: criteria.q, ns: criteria.ns };
    choose(this.ranges, RANGES, range, (way) => ({ ...kept, range: way, by }));
    choose(this.ways, GROUPS, by, (way) => ({ ...kept, range: criteria.range, by: way }));
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const rows = state === "ready" ? matching(data.rows ?? [], criteria) : [];
    const isEmpty = !rows.length;
    this.copy.hidden = this.csv.hidden = this.table.element.hidden = isEmpty;
    this.message.hidden = !isEmpty;
    setText(this.message, emptyText(state, message, criteria));
    setText(this.about, state === "ready" ? aboutText(rows, data) : "");
    if (isEmpty) return;
    const columns = columnsOf(by, rows, data.currency ?? "", this.context.now());
    this.table.show(rows, columns, criteria.order || firstOrder(columns), keyOf);
  }
}

export function choose(links, values, chosen, hashOf) {
  links.forEach((link, i) => {
    setAttribute(link, "href", writeHash(hashOf(values[i])));
    setAttribute(link, "aria-current", values[i] === chosen ? "page" : undefined);
  });
}

function matching(rows, { q, ns }) {
  const words = wordsOf(q);
  return rows.filter((row) => {
    const text = [row.cluster, row.namespace, podText(row), ownerText(row)].filter(Boolean).join("\n").toLowerCase();
    return (!ns || row.namespace === ns) && words.every((word) => text.includes(word));
  });
}

export function ownerText(row) {
  if (typeof row.owner === "string") return row.owner;
  return row.owner?.name ? `${row.owner.kind ?? ""}/${row.owner.name}` : undefined;
}

function keyOf(row) {
  return JSON.stringify([row.cluster, row.namespace, podText(row), ownerText(row)]);
}

function firstOrder(columns) {
  return columns.some((column) => column.name === "wasted") ? "wasted" : "idle_hours";
}

function emptyText(state, message, criteria) {
  if (state !== "ready") return noneText(state, message, MISSING);
  if (criteria.q || criteria.ns) return "Nothing matches the filter. Press Escape to clear it.";
  return "Nothing was wasted in this range: no pod has held a GPU and let it idle.";
}

function aboutText(rows, data) {
  const hours = rows.reduce((sum, row) => sum + (row.idle_hours ?? 0), 0);
  const priced = rows.filter((row) => row.wasted !== undefined);
  const lost = priced.reduce((sum, row) => sum + row.wasted, 0);
  const texts = [`${amount(hours)} idle GPU-hours`];
  if (priced.length) texts.push(`${money(lost, data.currency)} wasted`);
  texts.push(`since ${moment(data.from)}`);
  if (data.source) texts.push(`from ${data.source}`);
  return [...texts, plural(rows.length, "row")].join(" \u00b7 ");
}

function columnsOf(by, rows, currency, now) {
  const number = (name, title, write, isWarm) => ({ name, title, value: (row) => row[name], write, isWarm });
  const isSome = (value) => value > 0;
  const columns = [
    nameColumn(by),
    { name: "cluster", title: "Cluster", value: (row) => row.cluster },
    { name: "namespace", title: "Namespace", value: (row) => row.namespace },
    { name: "owner", title: "Owner", value: ownerText },
    number("gpus", "GPUs", parts),
    number("idle_gpus", "Idle now", parts, isSome),
    { name: "idle_for", title: "Idle for", value: (row) => (row.idle_since ? now - row.idle_since : undefined), write: duration },
    { name: "unknown_because", title: "Idle time", value: (row) => row.unknown_because },
    number("idle_hours", "Idle hours", amount),
    number("allocated_hours", "Allocated hours", amount),
    { name: "idle_part", title: "Idle of allocated", value: idlePart, write: percent },
    number("cost_per_hour", "Cost now", (price) => perHour(price, currency)),
    number("wasted", "Wasted", (price) => money(price, currency), isSome),
  ];
  const seen = new Set();
  return columns.filter((column, i) => {
    const isNew = !seen.has(column.name);
    seen.add(column.name);
    return isNew && (i === 0 || rows.some((row) => column.value(row) !== undefined));
  });
}

function nameColumn(by) {
  if (by === "namespace") {
    return { name: "namespace", title: "Namespace", value: (row) => row.namespace, link: (row) => writeHash({ ns: row.namespace }) };
  }
  const pod = (row) => (row.pod ? podHash(row.namespace ?? "", row.pod) : undefined);
  if (by === "pod") return { name: "pod", title: "Pod", value: podText, link: pod };
  const owner = (row) => (ownerText(row) ? writeHash({ ns: row.namespace, q: ownerText(row) }) : pod(row));
  return { name: "owner", title: "Owner", value: (row) => ownerText(row) ?? podText(row), link: owner };
}

// A pod without an owner, or a holder that is not a pod, is its own group.
export function podText(row) {
  if (row.pod) return row.pod;
  if (row.job) return row.job.startsWith("user ") ? row.job : `job ${row.job}`;
  if (row.container_id) return `container ${row.container_id.slice(0, 12)}`;
  return row.uid ? `pod ${row.uid}` : undefined;
}

function idlePart(row) {
  if (row.idle_hours === undefined || !row.allocated_hours) return undefined;
  return Math.min(1, row.idle_hours / row.allocated_hours);
}
