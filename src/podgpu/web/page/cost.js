// Shows GPU-hours, energy and cost of a range of time, by pod, owner, namespace or label, with totals and CSV.

import { noneText, Question } from "./ask.js";
import { podHash, GROUPS, writeHash } from "./criteria.js";
import { h, setAttribute, setText } from "./dom.js";
import { amount, money, percent, totalMoney } from "./format.js";
import { GROUP_TITLES } from "./pods.js";
import { Table } from "./table.js";
import { choose, ownerText, podText, RANGES } from "./waste.js";

const EVERY_SECONDS = 60;
const MISSING = "This server does not compute costs of a range: its podgpu is older than this page.";

export class Cost {
  constructor(onOrder, onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.ways = GROUPS.map((by) => h("a", {}, GROUP_TITLES[by]));
    this.label = h("input", { type: "search", placeholder: "Pod label, such as team", "aria-label": "Pod label" });
    this.about = h("p", { class: "about" });
    this.csv = h("a", { class: "quiet", download: "" }, "CSV");
    this.message = h("p", { class: "message" });
    this.notes = h("p", { class: "message" });
    this.table = new Table("Cost", onOrder);
    const tabs = (label, links) => h("nav", { class: "tabs", "aria-label": label }, ...links);
    const head = h("div", { class: "table-head" }, tabs("Range", this.ranges), tabs("Cost by", this.ways), h("span", { class: "filter" }, this.label), this.about, this.csv);
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
    choose(this.ranges, RANGES, range, (way) => ({ view: "cost", range: way, by }));
    choose(this.ways, GROUPS, by, (way) => ({ view: "cost", range, by: way }));
    if (document.activeElement !== this.label) this.label.value = isLabel ? by.slice("label:".length) : "";
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const rows = state === "ready" ? (data.rows ?? []) : [];
    const isEmpty = !rows.length;
    this.csv.hidden = this.table.element.hidden = isEmpty;
    this.message.hidden = !isEmpty;
    setText(this.message, state === "ready" ? "There is no record in this range." : noneText(state, message, MISSING));
    setText(this.about, isEmpty ? "" : aboutText(data.totals ?? {}, data.currency));
    setText(this.notes, (data?.notes ?? []).join(" \u00b7 "));
    if (!isEmpty) this.table.show(rows, columnsOf(by, rows, data.currency), criteria.order || "cost", nameOf);
  }
}

function aboutText(totals, currency) {
  const texts = [`${amount(totals.gpu_hours)} GPU-hours`, `${amount(totals.idle_hours)} idle`];
  if (totals.mean_use !== undefined) texts.push(`mean use ${percent(totals.mean_use)}`);
  if (totals.cost !== undefined) texts.push(`${totalMoney(totals.cost, currency)}`);
  if (totals.wasted !== undefined) texts.push(`${totalMoney(totals.wasted, currency)} wasted`);
  if (totals.unallocated_cost !== undefined) texts.push(`${totalMoney(totals.unallocated_cost, currency)} unallocated`);
  return texts.join(" \u00b7 ");
}

function nameOf(row) {
  if (row.unallocated) return [row.cluster, "unallocated"].filter(Boolean).join("/");
  return [row.cluster, row.namespace, podText(row) ?? ownerText(row), row.label].filter(Boolean).join("/") || "(none)";
}

function columnsOf(by, rows, currency) {
  const number = (name, title, write, isWarm) => ({ name, title, value: (row) => row[name], write, isWarm });
  const title = by.startsWith("label:") ? by.slice("label:".length) : GROUP_TITLES[by];
  const columns = [
    { name: by, title, value: nameOf, link: by === "pod" ? (row) => (row.pod ? podHash(row.namespace ?? "", row.pod) : undefined) : undefined },
    number("gpu_hours", "GPU-hours", amount),
    number("used_hours", "Used hours", amount),
    number("idle_hours", "Idle hours", amount),
    number("mean_use", "Mean use", percent),
    number("energy_kwh", "Energy, kWh", amount),
    number("cost", "Cost", (price) => money(price, currency)),
    number("wasted", "Wasted", (price) => money(price, currency), (price) => price > 0),
  ];
  return columns.filter((column) => rows.some((row) => column.value(row) !== undefined));
}
