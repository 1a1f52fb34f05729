// Shows GPU-hours, energy, cost and waste of a range of time, by pod, owner, namespace, model or
// label, with totals and CSV.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { CostChart } from "./cost_chart.js";
import { isOfScope, podHash, wordsOf, writeHash } from "./criteria.js";
import { jobText } from "./devices.js";
import { fact, h, place, plain, setAttribute, setTab, setText, tabs } from "./dom.js";
import {
  amount,
  bounded,
  dotted,
  LEAST_MONEY,
  listed,
  localInput,
  localTimes,
  moment,
  money,
  percent,
  plural,
  span,
  totalMoney,
} from "./format.js";
import { groupsFor } from "./pods.js";
import { fieldColumn, filledColumns, Table, wasteColumns } from "./table.js";
import { hasTokens, tokenColumns } from "./tokens.js";
import { Sum, sumOf, Waste, wasteOf } from "./totals.js";

const EVERY_SECONDS = 60;
const LOW_USE = 0.2; // less is hardly used, as in the verdict on a pod
const MOST_LABELS = 4; // further labels can be typed into the field
const MOST_HARDLY_USED = 8;
const RANGES = ["1h", "24h", "7d", "30d"];
const MONTH = "This month";
const CUSTOM = "Custom";
const RANGE_NAMES = { [MONTH]: "month" }; // in the address
const LABEL = "label:";
// Labels to group by if nothing else is chosen.
const TEAM_LABELS = ["team", "cost_center", "project"];
const DAY_SECONDS = 86_400;
const LEAST_HOURS = 0.005; // less is shown as <0.01
// What the totals of filtered rows are added up of.
const SUMMED = [
  "gpu_hours",
  "allocated_hours",
  "used_hours",
  "idle_hours",
  "unknown_hours",
  "unpriced_hours",
  "unheld_hours",
  "cost",
];
const FUTURE = "This range is in the future.";
const BACKWARDS = "The start of the range must be before its end.";
const NO_MATCH = "Nothing matches the filter. Press Escape to clear it.";
const LIMIT = [
  "Stored in SQLite, for up to 8,000 GPUs and 90 days.",
  "For more, run podgpu cluster with --prometheus.",
].join(" ");
const MEMORY = [
  "Kept in memory, for up to 90 days: a restart of podgpu loses it.",
  "To keep it, set --history-dir.",
].join(" ");
const EXAMPLE_PRICES = "The prices are examples: set yours with --prices FILE";
const MISSING =
  "This server does not compute costs of a range: its podgpu is older than this page.";
// Tooltips of columns.
const HINTS = {
  allocated_hours: "Hours for which GPUs, or fractions of GPUs, were allocated",
  used_hours: [
    "Hours weighted by utilisation: 2 hours at 50 % are 1 busy hour.",
    "The other allocated hours are idle, unknown, or the unused share of hours in use.",
  ].join(" "),
  idle_hours: "Allocated hours without any use",
  unknown_hours: "Allocated hours for which the use is unknown",
  mean_use: [
    "Busy hours divided by the allocated hours for which the use is known.",
    "On a shared GPU, only the share of the pod is counted,",
    "so a pod that uses more than its share is above 100 %.",
  ].join(" "),
  waited_hours: "Hours in which it waited for another holder of a shared GPU",
  wasted: [
    "Cost of idle, under-used and unallocated GPUs.",
    "Time in which the use is unknown,",
    "or in which a GPU is busy without a known holder, is not wasted.",
  ].join(" "),
  idle_cost: "Cost of the allocated hours without any use",
  underused_cost: [
    "Cost of the unused rest of shares that were in use.",
    "Older exporters do not count it.",
  ].join(" "),
  unallocated_cost: "Cost of the hours in which no pod or job had the GPU, and nothing ran on it",
};

export class Cost {
  constructor(onOrder, onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = [...RANGES, MONTH, CUSTOM].map((range) => h("a", {}, range));
    this.from = h("input", { type: "datetime-local", "aria-label": "From" });
    this.to = h("input", { type: "datetime-local", "aria-label": "To" });
    this.bounds = h("span", { class: "filter bounds" });
    this.bounds.append(this.from, h("span", { "aria-hidden": "true" }, "to"), this.to);
    this.ways = tabs("Cost by");
    this.names = h("datalist", { id: "label-names" });
    this.label = h("input", {
      type: "search",
      list: "label-names",
      placeholder: "Other pod label",
      "aria-label": "Pod label",
    });
    this.labelField = h("span", { class: "filter" }, this.label, this.names);
    this.about = h("p", { class: "about" });
    this.sums = h("dl", { class: "facts sums" });
    this.csv = h("a", { class: "quiet", download: "" }, "CSV");
    this.message = h("p", { class: "message" });
    this.notes = h("p", { class: "message" });
    this.table = new Table("Cost", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    this.hardlyUsed = new HardlyUsed();
    this.chart = new CostChart(onAnswer);
    this.toPods = h("a", { class: "to-pods" }, "Show pods, the least used first");
    this.element = this.makeElement();
    this.label.addEventListener("change", () => this.chooseLabel());
    this.from.addEventListener("change", () => this.chooseBounds());
    this.to.addEventListener("change", () => this.chooseBounds());
  }

  makeElement() {
    const head = h(
      "div",
      { class: "table-head" },
      tabs("Range", this.ranges),
      this.bounds,
      this.ways,
      this.labelField,
      this.about,
      this.copy,
      this.csv,
    );
    return h(
      "div",
      { class: "cost" },
      head,
      this.sums,
      this.message,
      this.chart.element,
      this.hardlyUsed.element,
      this.toPods,
      this.table.element,
      this.notes,
    );
  }

  chooseLabel() {
    const name = this.label.value.trim();
    location.hash = writeHash({ ...this.here, by: name ? `${LABEL}${name}` : "" });
  }

  chooseBounds() {
    const bounds = { from: unixOf(this.from), to: unixOf(this.to) };
    location.hash = writeHash({ ...this.here, ...bounds });
  }

  leave() {
    this.question.forget();
    this.chart.forget();
  }

  // `isKube`: holders are pods. `now`: time by the server's clock. `isCluster`: false on the page
  // of a single node.
  show(criteria, isKube, now, isCluster) {
    const groups = this.groups(criteria, isKube);
    const isChosen = criteria.by in groups || labelOf(criteria.by) !== "";
    const by = isChosen ? criteria.by : this.usualGroup(isKube);
    const period = periodOf(criteria, now);
    this.linkRanges(criteria, period, now);

    const url = `api/v1/range?${period.query}&by=${encodeURIComponent(by)}`;
    const answer = period.error ?? this.question.want(url, EVERY_SECONDS);
    const { data } = answer;
    if (this.learn(data, isChosen, by)) {
      this.show(criteria, isKube, now, isCluster);
      return;
    }
    this.showWays(groups, by, isKube ? data?.labels : []);
    this.labelField.hidden = !isKube;
    // A chosen label is shown as a tab.
    if (document.activeElement !== this.label) this.label.value = "";
    setAttribute(this.csv, "href", `${url}&format=csv`);
    setAttribute(this.toPods, "href", writeHash({ ...this.here, by: "pod", order: "-mean_use" }));
    setText(this.notes, dotted(notesOf(data, isCluster)));
    const title = groups[by] ?? plain(labelOf(by));
    this.showAnswer(answer, criteria, by, title, period.bounds);
  }

  // `title`: of the first column. `bounds`: of the chart.
  showAnswer(answer, criteria, by, title, bounds) {
    const { state, data } = answer;
    // Pods of several namespaces may have the label.
    const filter = labelOf(by) ? { ...criteria, ns: "" } : criteria;
    const isFiltered = Boolean(filter.q || filter.cluster || filter.ns);
    const rows = state === "ready" ? matching(data.rows ?? [], filter) : [];
    setText(this.csv, isFiltered ? "CSV of all rows" : "CSV");
    this.hideEmpty(!rows.length, by);
    if (!rows.length) {
      this.showNone(answer, isFiltered);
      return;
    }
    setText(this.about, aboutText(data, scopeText(isFiltered, criteria)));
    const totals = isFiltered ? totalsOf(rows) : (data.totals ?? {});
    place(this.sums, sumsText(totals, data.currency));
    this.showTable(title, by, rows, data, criteria.order);
    const pick = (all) => matching(all, filter);
    this.chart.show(bounds, by, pick, (row) => nameOf(row, by));
    this.hardlyUsed.show(rows, by, data);
  }

  // Returns the ways to group, with their titles.
  groups(criteria, isKube) {
    /** @type {Record<string, string>} */
    const groups = { ...groupsFor(isKube) };
    if (this.knowsTokens || criteria.by === "model") groups.model = "Models";
    return groups;
  }

  usualGroup(isKube) {
    if (!isKube) return "pod";
    return this.team ?? "namespace";
  }

  // Learns from an answer by which label teams are named, and whether there are tokens. Returns
  // true if the view changes by this.
  learn(data, isChosen, by) {
    // With Prometheus, usage by label is slow, because there is no recording rule for it. So it is
    // not the default.
    const hasLabels = data?.labels && !data.source;
    if (hasLabels && !isChosen && by === "namespace") {
      const team = TEAM_LABELS.find((name) => data.labels.includes(name));
      this.team = team ? `${LABEL}${team}` : by;
      if (team) return true;
    }
    if (this.knowsTokens || !hasTokens(data)) return false;
    this.knowsTokens = true;
    return true;
  }

  hideEmpty(isEmpty, by) {
    this.copy.hidden = isEmpty;
    this.csv.hidden = isEmpty;
    this.table.element.hidden = isEmpty;
    this.toPods.hidden = isEmpty || by === "pod" || by === "owner";
    this.message.hidden = !isEmpty;
  }

  // Says why there are no rows.
  showNone(answer, isFiltered) {
    const none = isFiltered ? NO_MATCH : "There is no record in this range.";
    setText(this.message, noneText(answer, MISSING, none));
    setText(this.about, "");
    place(this.sums, []);
    this.chart.element.hidden = true;
    this.hardlyUsed.element.hidden = true;
  }

  showTable(title, by, rows, data, order) {
    const columns = columnsOf(by, title, rows, data, this.here);
    const filled = filledColumns(columns, rows);
    this.table.show(rows, filled, order || "cost", (row) => nameOf(row, by));
  }

  linkRanges(criteria, period, now) {
    const { name, from, to, address } = period;
    const { by, q, cluster, ns, order } = criteria;
    this.here = { view: "cost", ...address, by, q, cluster, ns, order };
    // If no range is chosen, the fields have the last 24 hours.
    const start = from ?? now - DAY_SECONDS;
    const end = from === undefined ? now : to;
    this.ranges.forEach((link) => {
      const range = link.textContent;
      const bounds = { range: RANGE_NAMES[range] ?? range, from: "", to: "" };
      const custom = { range: "", from: Math.floor(start), to: end && Math.floor(end) };
      const href = writeHash({ ...this.here, ...(range === CUSTOM ? custom : bounds) });
      setTab(link, href, range === name);
    });
    this.bounds.hidden = name !== CUSTOM;
    showTime(this.from, start);
    showTime(this.to, end);
  }

  // `labels` come from the answer. Until the next answer, the previous labels are shown.
  showWays(groups, by, labels = this.labels ?? []) {
    this.labels = labels;
    const names = new Set(labels.slice(0, MOST_LABELS));
    if (labelOf(by)) names.add(labelOf(by));
    const ofLabels = [...names].map((name) => [`${LABEL}${name}`, `Label ${plain(name)}`]);
    const ways = [...Object.entries(groups), ...ofLabels];
    const written = JSON.stringify([ways, labels]);
    if (written !== this.written) {
      this.written = written;
      const links = ways.map(([, title]) => h("a", {}, title));
      const options = labels.map((name) => h("option", { value: name }));
      place(this.ways, links);
      place(this.names, options);
    }
    ways.forEach(([way], i) => {
      setTab(this.ways.children[i], writeHash({ ...this.here, by: way }), way === by);
    });
  }
}

/**
 * Returns the period that the address selects: the `name` of its tab, its bounds (`from` and `to`;
 * undefined if they are not chosen), its part of the page's `address`, the `query` of api/v1/range,
 * the `bounds` of the chart, and an `error` if there is no such period.
 *
 * @returns {Record<string, any>}
 */
function periodOf(criteria, now) {
  const { range, from, to } = criteria;
  const isCustom = Number(from) > 0;
  if (!isCustom && range === "month") {
    const bounds = { range };
    return { name: MONTH, address: bounds, query: `from=${monthStart(now)}`, bounds };
  }
  if (!isCustom) {
    const bounds = { range: RANGES.includes(range) ? range : "24h" };
    return { name: bounds.range, address: bounds, query: new URLSearchParams(bounds), bounds };
  }
  const bounds = to ? { from, to } : { from };
  const period = { name: CUSTOM, from, to, address: { from, to }, bounds };
  const query = to ? new URLSearchParams(bounds) : `from=${from}`;
  return { ...period, query, error: periodError(from, to, now) };
}

/** @returns {import("./ask.js").Answer | undefined} */
function periodError(from, to, now) {
  if (to && Number(from) >= Number(to)) return { state: "missing", message: BACKWARDS };
  if (Number(from) >= now) return { state: "missing", message: FUTURE };
  return undefined;
}

// Returns the label in label:NAME; empty if the text is something else.
function labelOf(by) {
  return by.startsWith(LABEL) ? by.slice(LABEL.length) : "";
}

function scopeText(isFiltered, { ns }) {
  if (isFiltered) return "Filtered rows";
  // With a label, the namespace is not a filter.
  return ns ? "All namespaces" : "";
}

function notesOf(data, isCluster) {
  if (!data) return [];
  const notes = (data.notes ?? []).map(localTimes);
  if (data.prices === "example") notes.unshift(EXAMPLE_PRICES);
  if (data.in_memory) notes.push(MEMORY);
  else if (isCluster && !data.source) notes.push(LIMIT);
  return notes;
}

// Lists pods that held GPUs and hardly used them, the most expensive first.
class HardlyUsed {
  constructor() {
    this.about = h("summary");
    this.list = h("ul", { class: "marks" });
    this.element = h("details", { class: "under-used" }, this.about, this.list);
  }

  show(rows, by, data) {
    // In GPU-hours. Less is not significant.
    const shortest = Math.min(1, (data.to - data.from) / 36_000);
    const isLow = (row) => row.mean_use < LOW_USE && row.allocated_hours >= shortest;
    const low = rows.filter(isLow);
    low.sort((a, b) => costOf(b) - costOf(a) || hoursOf(b) - hoursOf(a));
    const isOfPods = by !== "namespace" && !by.startsWith(LABEL);
    this.element.hidden = !low.length || !isOfPods;
    if (this.element.hidden) return;

    setText(this.about, `Hardly used: ${whoText(low, by)}. ${wastedText(low, data.currency)}`);
    const shown = low.slice(0, MOST_HARDLY_USED);
    const items = shown.map((row) => hardlyUsedItem(row, by, data.currency));
    place(this.list, items);
  }
}

function whoText(rows, by) {
  const podOrHolder = rows[0].pod ? "pod" : "holder";
  const unit = by === "owner" ? "owner" : podOrHolder;
  return `${plural(rows.length, unit)} used less than ${percent(LOW_USE)} of the allocated time`;
}

function wastedText(rows, currency) {
  const hours = sumOf(rows.map(hoursOf));
  const cost = sumOf(rows.map(costOf));
  const price = cost ? ` (${totalMoney(cost, currency)})` : "";
  const least = rows.some(isPartlyKnown) ? "at least " : "";
  return `${least}${amount(hours)} GPU-hours${price} were wasted, idle time included.`;
}

function hardlyUsedItem(row, by, currency) {
  const name = h("a", { href: linkOf(row, by) }, h("bdi", {}, plain(nameOf(row))));
  const texts = [`held ${amount(row.allocated_hours)} GPU-hours at ${percent(row.mean_use)}`];
  if (row.cost !== undefined) {
    const cost = bounded(money(costOf(row), currency), isPartlyKnown(row));
    texts.push(`${cost} wasted`);
  }
  return h("li", {}, name, h("span", {}, listed(texts)));
}

function hoursOf(row) {
  return wasteOf(row.waste?.hours).total ?? 0;
}

function costOf(row) {
  return wasteOf(row.waste?.cost).total ?? 0;
}

// Returns true if no exporter counted the under-used time of some hours.
function isPartlyKnown(row) {
  return Boolean(row.waste?.unknown_hours);
}

// Keeps what the user is typing.
function showTime(field, unix) {
  if (document.activeElement === field) return;
  field.value = unix ? localInput(unix) : "";
}

// The first of the month in UTC, as in the chart and in budgets. Usage of last week and before is
// stored by UTC day.
function monthStart(now) {
  const at = new Date(now * 1000);
  return Date.UTC(at.getUTCFullYear(), at.getUTCMonth()) / 1000;
}

function unixOf(field) {
  const unix = Math.floor(new Date(field.value).getTime() / 1000);
  return unix > 0 ? String(unix) : "";
}

function matching(rows, criteria) {
  const words = wordsOf(criteria.q);
  return rows.filter((row) => {
    const text = `${nameOf(row)}\n${ownerText(row) ?? ""}`.toLowerCase();
    const labels = labelsOf(row);
    const isMatch = (word) => text.includes(word) || labels.includes(word);
    return isOfScope(row, criteria) && words.every(isMatch);
  });
}

function labelsOf({ labels = {} }) {
  return Object.entries(labels).map(([name, value]) => `${name}=${value}`.toLowerCase());
}

// Returns the totals of the rows that match the filter, computed as on the server.
function totalsOf(rows) {
  /** @type {Record<string, any>} */
  const totals = {};
  for (const name of SUMMED) {
    const sum = new Sum();
    for (const row of rows) sum.add(row[name]);
    totals[name] = sum.value;
  }
  const measured = totals.allocated_hours - (totals.unknown_hours ?? 0);
  const mean = measured > 0 ? totals.used_hours / measured : undefined;
  const waste = new Waste();
  for (const row of rows) waste.add(row.waste?.cost);
  return { ...totals, mean_use: mean, waste: { cost: waste.parts } };
}

function aboutText({ source, from, to, recorded_from: since }, scope) {
  const isCut = since > from;
  const start = isCut && since < to ? since : from;
  return dotted([
    scope,
    span(start, to),
    isCut && `records since ${moment(since)}`,
    source && `from ${source}`,
  ]);
}

function sumsText(totals, currency) {
  const held = totals.allocated_hours ?? totals.gpu_hours;
  const unheld = totals.unheld_hours ?? 0; // in use without a known holder
  const unallocated = totals.gpu_hours - held - unheld;
  const wasted = wasteOf(totals.waste?.cost);
  const parts = wasted.rounded(currency);
  const facts = [];
  const addCost = (title, cost) => {
    if (cost !== undefined) facts.push(fact(title, costText(cost, totals, currency)));
  };
  const addHours = (title, hours) => {
    if (hours >= LEAST_HOURS) facts.push(fact(title, `${amount(hours)} h`));
  };
  addCost("Cost", totals.cost);
  addCost("Wasted", wasted.total);
  addCost("Wasted: idle", parts.idle);
  addCost("Wasted: under-used", parts.underused);
  addCost("Wasted: unallocated", parts.unallocated);
  if (totals.mean_use !== undefined) {
    facts.push(fact("Use of what is held", percent(totals.mean_use)));
  }
  addHours("Allocated", held);
  addHours("Busy (weighted)", totals.used_hours);
  addHours("Idle", totals.idle_hours);
  addHours("Not known", totals.unknown_hours);
  addHours("Unallocated", unallocated);
  addHours("In use, holder not known", unheld);
  return facts;
}

export function ownerText(row) {
  return row.owner?.name ? `${row.owner.kind ?? ""}/${row.owner.name}` : undefined;
}

// A pod without an owner, or a holder that is not a pod, is its own group.
function podText(row) {
  if (row.pod) return row.pod;
  if (row.job) return jobText(row.job);
  if (row.container_id) return `container ${row.container_id.slice(0, 12)}`;
  return row.uid ? `pod ${row.uid}` : undefined;
}

export function nameOf(row, by) {
  if (row.unallocated) return [row.cluster, "unallocated"].filter(Boolean).join("/");
  if (row.hidden) return [row.cluster, "other namespaces"].filter(Boolean).join("/");
  const group = by === "namespace" ? "(no namespace)" : "(without this label)";
  const model = by === "model" ? row.model || "(no model)" : undefined;
  const name = [row.namespace, podText(row) ?? ownerText(row), row.label, model]
    .filter(Boolean)
    .join("/");
  return [row.cluster, name || group].filter(Boolean).join("/");
}

function linkOf(row, by) {
  const { cluster, namespace: ns } = row;
  if (row.pod) return podHash(ns ?? "", row.pod, cluster);
  if (by === "owner" && row.owner) return writeHash({ cluster, ns, q: ownerText(row) });
  return by === "namespace" && ns ? writeHash({ cluster, ns }) : undefined;
}

// A cost that leaves out hours without a price is a lower bound.
function costText(cost, { unpriced_hours: unpriced }, currency) {
  const isLowerBound = Boolean(unpriced && cost);
  return bounded(money(cost, currency), isLowerBound);
}

function useText(ratio) {
  const isMoreThanShare = ratio >= 1.005; // shown as more than 100 %
  return isMoreThanShare ? `${percent(ratio)} of its share` : percent(ratio);
}

function columnsOf(by, title, rows, { currency, source }, here) {
  const isWasted = (cost) => cost >= LEAST_MONEY;
  const price = (value, row) => costText(value, row, currency);
  const wasteOfRow = (row) => wasteOf(row.waste?.cost);
  const wasted = (row) => wasteOfRow(row).total;
  const parts = wasteColumns(wasteOfRow, currency, { write: price, hints: HINTS, isWide: true });
  const tokens = tokenColumns((value) => money(value, currency), rows);
  const tokenDetails = tokens.map((column) => ({
    ...column,
    isDetail: column.name !== "per_million",
  }));
  const isByModel = by === "model";
  return [
    nameColumn(by, title, source, here),
    number("cost", "Cost", price),
    ...(isByModel ? tokens : []),
    { ...number("wasted", "Wasted", price), value: wasted, isWarm: isWasted },
    ...parts,
    ...hourColumns(),
    { name: "unknown_because", title: "Use unknown", value: (row) => row.unknown_because },
    number("energy_kwh", "Energy, kWh", amount),
    ...(isByModel ? [] : tokenDetails),
  ];
}

function nameColumn(by, title, source, here) {
  const label = labelOf(by).replaceAll(/\W/g, "_"); // as exporters write it
  // Leads to the pods with the label. With Prometheus, the rows of pods have no labels.
  const toPods = (row) => {
    if (!row.label || source) return undefined;
    return writeHash({ ...here, by: "pod", q: `${label}=${row.label}` });
  };
  const link = (row) => linkOf(row, by) ?? toPods(row);
  return { name: by, title, value: (row) => nameOf(row, by), link };
}

function hourColumns() {
  const isLow = (ratio) => ratio < LOW_USE;
  const isIdle = (hours) => hours >= LEAST_HOURS;
  // The row of unallocated GPUs has no such hours.
  const held = (name, title) => {
    const value = (row) => (row.unallocated ? undefined : row[name]);
    return { ...number(name, title, amount), value };
  };
  return [
    { ...number("mean_use", "Use\u00a0of what it\u00a0holds", useText), isWarm: isLow },
    held("allocated_hours", "Allocated,\u00a0h"),
    held("used_hours", "Busy (weighted),\u00a0h"),
    { ...held("idle_hours", "Idle,\u00a0h"), isWarm: isIdle },
    { ...held("unknown_hours", "Not\u00a0known,\u00a0h"), isWide: true },
    number("waited_hours", "Waited,\u00a0h", amount),
  ];
}

function number(name, title, write) {
  return fieldColumn(name, title, write, { hint: HINTS[name] });
}
