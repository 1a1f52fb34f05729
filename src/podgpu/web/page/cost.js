// Shows GPU-hours, energy, cost and waste of a range of time, by pod, owner, namespace or label, with totals and CSV.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { GROUPS, podHash, wordsOf, writeHash } from "./criteria.js";
import { h, setAttribute, setText } from "./dom.js";
import { amount, money, percent, totalMoney } from "./format.js";
import { GROUP_TITLES } from "./pods.js";
import { Table } from "./table.js";

const EVERY_SECONDS = 60;
const LOW_USE = 0.1; // a lower mean use is shown in colour
const RANGES = ["1h", "24h", "7d", "30d"];
const MISSING = "This server does not compute costs of a range: its podgpu is older than this page.";

export class Cost {
  constructor(onOrder, onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.ways = GROUPS.map((by) => h("a", {}, GROUP_TITLES[by]));
    this.label = h("input", { type: "search", placeholder: "Pod label: team", "aria-label": "Pod label" });
    this.about = h("p", { class: "about" });
    this.csv = h("a", { class: "quiet", download: "" }, "CSV");
    this.message = h("p", { class: "message" });
    this.notes = h("p", { class: "message" });
    this.table = new Table("Cost", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    const tabs = (label, links) => h("nav", { class: "tabs", "aria-label": label }, ...links);
    const head = h("div", { class: "table-head" }, tabs("Range", this.ranges), tabs("Cost by", this.ways), h("span", { class: "filter" }, this.label), this.about, this.copy, this.csv);
    this.element = h("div", { class: "cost" }, head, this.message, this.table.element, this.notes);
    this.label.addEventListener("change", () => {
      const name = this.label.value.trim();
      location.hash = writeHash({ view: "cost", range: this.range, by: name ? `label:${name}` : "namespace" });
    });
  }

  leave() {
    this.question.forget();
  }

  show(criteria) {
    const range = (this.range = RANGES.includes(criteria.range) ? criteria.range : "24h");
    const isLabel = criteria.by.startsWith("label:") && criteria.by !== "label:";
    const by = isLabel || GROUPS.includes(criteria.by) ? criteria.by : "namespace";
    const url = `api/v1/range?range=${range}&by=${encodeURIComponent(by)}`;
    const { state, data, message } = this.question.want(url, EVERY_SECONDS);
    const { q, ns, order } = criteria;
    choose(this.ranges, RANGES, range, (way) => ({ view: "cost", range: way, by, q, ns, order }));
    choose(this.ways, GROUPS, by, (way) => ({ view: "cost", range, by: way, q, ns, order }));
    if (document.activeElement !== this.label) this.label.value = isLabel ? by.slice("label:".length) : "";
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const rows = state === "ready" ? matching(data.rows ?? [], criteria) : [];
    const isEmpty = !rows.length;
    this.copy.hidden = this.csv.hidden = this.table.element.hidden = isEmpty;
    this.message.hidden = !isEmpty;
    const none = q || ns ? "Nothing matches the filter. Press Escape to clear it." : "There is no record in this range.";
    setText(this.message, state === "ready" ? none : noneText(state, message, MISSING));
    setText(this.about, isEmpty ? "" : aboutText(data.totals ?? {}, data));
    setText(this.notes, (data?.notes ?? []).join(" \u00b7 "));
    if (!isEmpty) this.table.show(rows, columnsOf(by, rows, data.currency), order || "cost", nameOf);
  }
}

function choose(links, values, chosen, hashOf) {
  links.forEach((link, i) => {
    setAttribute(link, "href", writeHash(hashOf(values[i])));
    setAttribute(link, "aria-current", values[i] === chosen ? "page" : undefined);
  });
}

function matching(rows, { q, ns }) {
  const words = wordsOf(q);
  return rows.filter((row) => {
    const text = `${nameOf(row)}\n${ownerText(row) ?? ""}`.toLowerCase();
    return (!ns || row.namespace === ns) && words.every((word) => text.includes(word));
  });
}

function aboutText(totals, { currency, source }) {
  const texts = [`${amount(totals.gpu_hours)} GPU-hours`, `${amount(totals.idle_hours)} idle`];
  if (totals.mean_use !== undefined) texts.push(`mean use ${percent(totals.mean_use)}`);
  if (totals.cost !== undefined) texts.push(`${totalMoney(totals.cost, currency)}`);
  if (totals.wasted !== undefined) texts.push(`${totalMoney(totals.wasted, currency)} wasted`);
  if (totals.unallocated_cost !== undefined) texts.push(`${totalMoney(totals.unallocated_cost, currency)} unallocated`);
  if (source) texts.push(`from ${source}`);
  return texts.join(" \u00b7 ");
}

function ownerText(row) {
  return row.owner?.name ? `${row.owner.kind ?? ""}/${row.owner.name}` : undefined;
}

// A pod without an owner, or a holder that is not a pod, is its own group.
function podText(row) {
  if (row.pod) return row.pod;
  if (row.job) return row.job.startsWith("user ") ? row.job : `job ${row.job}`;
  if (row.container_id) return `container ${row.container_id.slice(0, 12)}`;
  return row.uid ? `pod ${row.uid}` : undefined;
}

function nameOf(row) {
  if (row.unallocated) return [row.cluster, "unallocated"].filter(Boolean).join("/");
  return [row.cluster, row.namespace, podText(row) ?? ownerText(row), row.label].filter(Boolean).join("/") || "(none)";
}

function linkOf(row, by) {
  if (row.pod) return podHash(row.namespace ?? "", row.pod);
  if (by === "owner" && row.owner) return writeHash({ ns: row.namespace, q: ownerText(row) });
  return by === "namespace" && row.namespace ? writeHash({ ns: row.namespace }) : undefined;
}

function columnsOf(by, rows, currency) {
  const number = (name, title, write, isWarm) => ({ name, title, value: (row) => row[name], write, isWarm });
  const price = (name, title, isWarm) => number(name, title, (value) => money(value, currency), isWarm);
  const isSome = (value) => value >= 0.005; // less is shown as 0.00
  const title = by.startsWith("label:") ? by.slice("label:".length) : GROUP_TITLES[by];
  const idlePart = (row) => (row.allocated_hours ? Math.min(1, (row.idle_hours ?? 0) / row.allocated_hours) : undefined);
  const columns = [
    { name: by, title, value: nameOf, link: (row) => linkOf(row, by) },
    number("gpu_hours", "GPU-hours", amount),
    number("used_hours", "Used hours", amount),
    number("idle_hours", "Idle hours", amount, isSome),
    { name: "idle_part", title: "Idle", value: idlePart, write: percent },
    number("mean_use", "Mean use", percent, (ratio) => ratio < LOW_USE),
    { name: "unknown_because", title: "Use unknown", value: (row) => row.unknown_because },
    number("energy_kwh", "Energy, kWh", amount),
    price("cost", "Cost"),
    price("wasted", "Wasted", isSome),
  ];
  return columns.filter((column) => rows.some((row) => column.value(row) !== undefined));
}
