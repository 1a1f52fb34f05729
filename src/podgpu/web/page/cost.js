// Shows GPU-hours, energy, cost and waste of a range of time, by pod, owner, namespace, model or label, with totals and CSV.

import { copyButton } from "./actions.js";
import { noneText, Question } from "./ask.js";
import { CostChart } from "./cost_chart.js";
import { podHash, wordsOf, writeHash } from "./criteria.js";
import { jobText } from "./devices.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import {
  amount,
  LEAST_MONEY,
  localTimes,
  moment,
  money,
  percent,
  plural,
  span,
  totalMoney,
} from "./format.js";
import { groupsFor } from "./pods.js";
import { Table } from "./table.js";
import { hasTokens, tokenColumns } from "./tokens.js";
import { Waste, wasteOf } from "./totals.js";

const EVERY_SECONDS = 60;
const LOW_USE = 0.2; // less is hardly used, as in the verdict on a pod
const MOST_LABELS = 4; // further labels can be typed into the field
const MOST_HARDLY_USED = 8;
const RANGES = ["1h", "24h", "7d", "30d"];
const MONTH = "This month";
const TEAM_LABELS = ["team", "cost_center", "project"]; // labels to group by if nothing else is chosen
const DAY_SECONDS = 86_400;
/** @type {import("./ask.js").Answer} */
const FUTURE = { state: "missing", message: "This range is in the future." };
/** @type {import("./ask.js").Answer} */
const BACKWARDS = { state: "missing", message: "The start of the range must be before its end." };
const LIMIT =
  "Stored in SQLite, for up to 8,000 GPUs and 90 days. For more, run podgpu cluster with --prometheus.";
const MEMORY =
  "Kept in memory, for up to 90 days: a restart of podgpu loses it. To keep it, set --history-dir.";
const EXAMPLE_PRICES = "The prices are examples: set yours with --prices FILE";
const MISSING =
  "This server does not compute costs of a range: its podgpu is older than this page.";
// Tooltips of columns.
const HINTS = {
  allocated_hours: "Hours for which GPUs, or fractions of GPUs, were allocated",
  used_hours:
    "Hours weighted by utilisation: 2 hours at 50 % are 1 busy hour. The other allocated hours are idle, unknown, or the unused share of hours in use.",
  idle_hours: "Allocated hours without any use",
  unknown_hours: "Allocated hours for which the use is unknown",
  mean_use:
    "Busy hours divided by the allocated hours for which the use is known. On a shared GPU, only the share of the pod is counted, so a pod that uses more than its share is above 100 %.",
  waited_hours: "Hours in which it waited for another holder of a shared GPU",
  wasted:
    "Cost of idle, under-used and unallocated GPUs. Time in which the use is unknown, or in which a GPU is busy without a known holder, is not wasted.",
  idle_cost: "Cost of the allocated hours without any use",
  underused_cost:
    "Cost of the unused rest of shares that were in use. Older exporters do not count it.",
  unallocated_cost: "Cost of the hours in which no pod or job had the GPU, and nothing ran on it",
};

export class Cost {
  constructor(onOrder, onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = [...RANGES, MONTH, "Custom"].map((range) => h("a", {}, range));
    this.from = h("input", { type: "datetime-local", "aria-label": "From" });
    this.to = h("input", { type: "datetime-local", "aria-label": "To" });
    this.bounds = h(
      "span",
      { class: "filter bounds" },
      this.from,
      h("span", { "aria-hidden": "true" }, "to"),
      this.to,
    );
    this.ways = h("nav", { class: "tabs", "aria-label": "Cost by" });
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
    const ranges = h("nav", { class: "tabs", "aria-label": "Range" }, ...this.ranges);
    const head = h(
      "div",
      { class: "table-head" },
      ranges,
      this.bounds,
      this.ways,
      this.labelField,
      this.about,
      this.copy,
      this.csv,
    );
    this.element = h(
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
    this.label.addEventListener("change", () => {
      const name = this.label.value.trim();
      location.hash = writeHash({ ...this.here, by: name ? `label:${name}` : "" });
    });
    for (const field of [this.from, this.to]) {
      field.addEventListener(
        "change",
        () =>
          (location.hash = writeHash({
            ...this.here,
            from: unixOf(this.from),
            to: unixOf(this.to),
          })),
      );
    }
  }

  leave() {
    this.question.forget();
    this.chart.forget();
  }

  // `isKube`: holders are pods. `now`: time by the server's clock. `isCluster`: false on the page of a single node.
  show(criteria, isKube, now, isCluster) {
    /** @type {Record<string, string>} */
    const groups = { ...groupsFor(isKube) };
    if (this.knowsTokens || criteria.by === "model") groups.model = "Models";
    const isLabel = criteria.by.startsWith("label:") && criteria.by !== "label:";
    const isChosen = isLabel || criteria.by in groups;
    const by = isChosen ? criteria.by : isKube ? (this.team ?? "namespace") : "pod";
    const isCustom = Number(criteria.from) > 0;
    const isMonth = !isCustom && criteria.range === "month";
    const range = isMonth || RANGES.includes(criteria.range) ? criteria.range : "24h";
    const { q, cluster, ns, order } = criteria;
    const bounds = isCustom ? { from: criteria.from, to: criteria.to } : { range };
    this.here = { view: "cost", ...bounds, by: criteria.by, q, cluster, ns, order };
    this.showRanges(
      isMonth ? MONTH : isCustom ? "Custom" : range,
      isCustom ? criteria : { from: now - DAY_SECONDS, to: now },
    );
    const start = isMonth ? monthStart(now) : criteria.from;
    const time =
      isMonth || (isCustom && !criteria.to) ? `from=${start}` : new URLSearchParams(bounds);
    const url = `api/v1/range?${time}&by=${encodeURIComponent(by)}`;
    const isBackwards = isCustom && criteria.to && Number(criteria.from) >= Number(criteria.to);
    const isFuture = isCustom && Number(criteria.from) >= now;
    const { state, data, message } = isBackwards
      ? BACKWARDS
      : isFuture
        ? FUTURE
        : this.question.want(url, EVERY_SECONDS);
    // With Prometheus, usage by label is slow, because there is no recording rule for it. So it is not the default.
    if (!isChosen && by === "namespace" && data?.labels && !data.source) {
      const team = TEAM_LABELS.find((name) => data.labels.includes(name));
      this.team = `${team ? "label:" : ""}${team ?? by}`;
      if (team) return this.show(criteria, isKube, now, isCluster);
    }
    if (hasTokens(data) && !this.knowsTokens) {
      this.knowsTokens = true;
      return this.show(criteria, isKube, now, isCluster);
    }
    this.showWays(groups, by, isKube ? data?.labels : []);
    this.labelField.hidden = !isKube;
    if (document.activeElement !== this.label) this.label.value = ""; // a chosen label is shown as a tab
    setAttribute(this.csv, "href", `${url}&format=csv`);
    const wanted = by.startsWith("label:") ? { ...criteria, ns: "" } : criteria; // pods of several namespaces may have the label
    const isFiltered = Boolean(q || cluster || wanted.ns);
    setText(this.csv, isFiltered ? "CSV of all rows" : "CSV");
    const rows = state === "ready" ? matching(data.rows ?? [], wanted) : [];
    const isEmpty = !rows.length;
    this.copy.hidden = this.csv.hidden = this.table.element.hidden = isEmpty;
    this.message.hidden = !isEmpty;
    const none = isFiltered
      ? "Nothing matches the filter. Press Escape to clear it."
      : "There is no record in this range.";
    setText(this.message, state === "ready" ? none : noneText(state, message, MISSING));
    const scope = isFiltered ? "Filtered rows" : ns ? "All namespaces" : "";
    setText(this.about, isEmpty ? "" : aboutText(data, scope));
    place(
      this.sums,
      isEmpty ? [] : sumsText(isFiltered ? sumOf(rows) : (data.totals ?? {}), data.currency),
    );
    const limit = data?.in_memory ? [MEMORY] : isCluster && data && !data.source ? [LIMIT] : [];
    const example = data?.prices === "example" ? [EXAMPLE_PRICES] : [];
    setText(
      this.notes,
      [...example, ...(data?.notes ?? []).map(localTimes), ...limit].join(" \u00b7 "),
    );
    const title = groups[by] ?? plain(by.slice("label:".length));
    if (!isEmpty)
      this.table.show(rows, columnsOf(by, title, rows, data, this.here), order || "cost", (row) =>
        nameOf(row, by),
      );
    const ranged =
      isMonth || !isCustom
        ? { range }
        : { from: criteria.from, ...(criteria.to ? { to: criteria.to } : {}) };
    if (isEmpty) this.chart.element.hidden = true;
    else
      this.chart.show(
        ranged,
        by,
        (found) => matching(found, wanted),
        (row) => nameOf(row, by),
      );
    this.hardlyUsed.show(isEmpty ? [] : rows, by, data);
    this.toPods.hidden = isEmpty || by === "pod" || by === "owner";
    setAttribute(this.toPods, "href", writeHash({ ...this.here, by: "pod", order: "-mean_use" }));
  }

  showRanges(chosen, { from, to }) {
    this.ranges.forEach((link) => {
      const name = link.textContent;
      const custom = { from: Math.floor(from), to: to && Math.floor(to), range: "" };
      const bounds =
        name === "Custom" ? custom : { range: name === MONTH ? "month" : name, from: "", to: "" };
      choose(link, { ...this.here, ...bounds }, name === chosen);
    });
    this.bounds.hidden = chosen !== "Custom";
    for (const [field, unix] of [
      [this.from, from],
      [this.to, to],
    ]) {
      if (document.activeElement !== field) field.value = localText(unix);
    }
  }

  // `labels` come from the answer. Until the next answer, the previous labels are shown.
  showWays(groups, by, labels = this.labels ?? []) {
    this.labels = labels;
    const label = (name) => `label:${name}`;
    const chosen = by.startsWith("label:") ? [by.slice("label:".length)] : [];
    const names = [...new Set([...labels.slice(0, MOST_LABELS), ...chosen])];
    const ways = [
      ...Object.entries(groups),
      ...names.map((name) => [label(name), `Label ${plain(name)}`]),
    ];
    const written = JSON.stringify([ways, labels]);
    if (written !== this.written) {
      this.written = written;
      place(
        this.ways,
        ways.map(([, title]) => h("a", {}, title)),
      );
      place(
        this.names,
        labels.map((name) => h("option", { value: name })),
      );
    }
    ways.forEach(([way], i) =>
      choose(this.ways.children[i], { ...this.here, by: way }, way === by),
    );
  }
}

// Lists pods that held GPUs and hardly used them, the most expensive first.
class HardlyUsed {
  constructor() {
    this.about = h("summary");
    this.list = h("ul", { class: "marks" });
    this.element = h("details", { class: "under-used" }, this.about, this.list);
  }

  show(rows, by, data) {
    const shortest = Math.min(1, (data?.to - data?.from) / 36_000); // GPU-hours; less is not significant
    const low = rows.filter((row) => row.mean_use < LOW_USE && row.allocated_hours >= shortest);
    const hoursOf = (row) => wasteOf(row.waste?.hours).total ?? 0;
    const costOf = (row) => wasteOf(row.waste?.cost).total ?? 0;
    low.sort((a, b) => costOf(b) - costOf(a) || hoursOf(b) - hoursOf(a));
    this.element.hidden = !low.length || by === "namespace" || by.startsWith("label:");
    if (this.element.hidden) return;
    const hours = low.reduce((sum, row) => sum + hoursOf(row), 0);
    const cost = low.reduce((sum, row) => sum + costOf(row), 0);
    const price = cost ? ` (${totalMoney(cost, data.currency)})` : "";
    const least = low.some(isPartlyKnown) ? "at least " : "";
    const who = `${plural(low.length, by === "owner" ? "owner" : low[0].pod ? "pod" : "holder")} used less than ${percent(LOW_USE)} of the allocated time`;
    setText(
      this.about,
      `Hardly used: ${who}. ${least}${amount(hours)} GPU-hours${price} were wasted, idle time included.`,
    );
    place(
      this.list,
      low.slice(0, MOST_HARDLY_USED).map((row) => {
        const name = h("a", { href: linkOf(row, by) }, h("bdi", {}, plain(nameOf(row))));
        const cost =
          row.cost === undefined
            ? ""
            : `, ${isPartlyKnown(row) ? "\u2265\u202f" : ""}${money(costOf(row), data.currency)} wasted`;
        return h(
          "li",
          {},
          name,
          h(
            "span",
            {},
            `held ${amount(row.allocated_hours)} GPU-hours at ${percent(row.mean_use)}${cost}`,
          ),
        );
      }),
    );
  }
}

// Returns true if no exporter counted the under-used time of some hours.
function isPartlyKnown(row) {
  return Boolean(row.waste?.unknown_hours);
}

function choose(link, hash, isChosen) {
  setAttribute(link, "href", writeHash(hash));
  setAttribute(link, "aria-current", isChosen ? "page" : undefined);
}

// The first of the month in UTC, as in the chart and in budgets. Usage of last week and before is stored by UTC day.
function monthStart(now) {
  const at = new Date(now * 1000);
  return Date.UTC(at.getUTCFullYear(), at.getUTCMonth()) / 1000;
}

function unixOf(field) {
  const unix = Math.floor(new Date(field.value).getTime() / 1000);
  return unix > 0 ? String(unix) : "";
}

// Formats local time for the input field: 2026-11-17T10:40.
function localText(unix) {
  const at = new Date(unix * 1000);
  if (!unix || Number.isNaN(at.getTime())) return "";
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function matching(rows, { q, cluster, ns }) {
  const words = wordsOf(q);
  return rows.filter((row) => {
    const text = `${nameOf(row)}\n${ownerText(row) ?? ""}`.toLowerCase();
    const labels = Object.entries(row.labels ?? {}).map(([name, value]) =>
      `${name}=${value}`.toLowerCase(),
    );
    const isMatch = (word) => text.includes(word) || labels.includes(word);
    return (
      (!cluster || row.cluster === cluster) && (!ns || row.namespace === ns) && words.every(isMatch)
    );
  });
}

// Returns the totals of the rows that match the filter, computed as on the server.
function sumOf(rows) {
  const sum = (name, of = rows) => {
    const known = of.filter((row) => row[name] !== undefined);
    return known.length ? known.reduce((total, row) => total + row[name], 0) : undefined;
  };
  const names = [
    "gpu_hours",
    "allocated_hours",
    "used_hours",
    "idle_hours",
    "unknown_hours",
    "unpriced_hours",
    "unheld_hours",
    "cost",
  ];
  const totals = Object.fromEntries(names.map((name) => [name, sum(name)]));
  const measured = totals.allocated_hours - (totals.unknown_hours ?? 0);
  const mean = measured > 0 ? totals.used_hours / measured : undefined;
  const waste = new Waste();
  for (const row of rows) waste.add(row.waste?.cost);
  return { ...totals, mean_use: mean, waste: { cost: waste.parts } };
}

function aboutText({ source, from, to, recorded_from: since }, scope) {
  return [
    scope,
    span(since > from && since < to ? since : from, to),
    since > from && `records since ${moment(since)}`,
    source && `from ${source}`,
  ]
    .filter(Boolean)
    .join(" \u00b7 ");
}

function sumsText(totals, currency) {
  const held = totals.allocated_hours ?? totals.gpu_hours;
  const unheld = totals.unheld_hours ?? 0; // in use without a known holder
  const unallocated = totals.gpu_hours - held - unheld;
  const wasted = wasteOf(totals.waste?.cost);
  const parts = wasted.rounded(currency);
  const hours = (title, number) => number >= 0.005 && fact(title, `${amount(number)} h`);
  const cost = (title, number) =>
    number !== undefined && fact(title, costText(number, totals, currency));
  return [
    cost("Cost", totals.cost),
    cost("Wasted", wasted.total),
    cost("Wasted: idle", parts.idle),
    cost("Wasted: under-used", parts.underused),
    cost("Wasted: unallocated", parts.unallocated),
    totals.mean_use !== undefined && fact("Use of what is held", percent(totals.mean_use)),
    hours("Allocated", held),
    hours("Busy (weighted)", totals.used_hours),
    hours("Idle", totals.idle_hours),
    hours("Not known", totals.unknown_hours),
    hours("Unallocated", unallocated),
    hours("In use, holder not known", unheld),
  ].filter(Boolean);
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
  return `${unpriced && cost ? "\u2265\u202f" : ""}${money(cost, currency)}`;
}

function useText(ratio) {
  return ratio >= 1.005 ? `${percent(ratio)} of its share` : percent(ratio);
}

function columnsOf(by, title, rows, { currency, source }, here) {
  // With Prometheus, the rows of pods have no labels.
  const label = by.slice("label:".length).replaceAll(/\W/g, "_"); // as exporters write it
  const toPods = (row) =>
    row.label && !source
      ? writeHash({ ...here, by: "pod", q: `${label}=${row.label}` })
      : undefined;
  const number = (name, title, write, isWarm) => ({
    name,
    title,
    hint: HINTS[name],
    value: (row) => row[name],
    write,
    isWarm,
  });
  const ofHeld = (column) => ({
    ...column,
    value: (row) => (row.unallocated ? undefined : row[column.name]),
  });
  const price = (name, title, isWarm) =>
    number(name, title, (value, row) => costText(value, row, currency), isWarm);
  const waste = (name, title, read, isWarm) => ({
    ...price(name, title, isWarm),
    value: (row) => read(row.waste?.cost),
  });
  const isIdle = (hours) => hours >= 0.005; // less is shown as <0.01
  const isWasted = (cost) => cost >= LEAST_MONEY;
  const tokens = tokenColumns((value) => money(value, currency), rows);
  const columns = [
    {
      name: by,
      title,
      value: (row) => nameOf(row, by),
      link: (row) => linkOf(row, by) ?? toPods(row),
    },
    price("cost", "Cost"),
    ...(by === "model" ? tokens : []),
    waste("wasted", "Wasted", (cost) => wasteOf(cost).total, isWasted),
    {
      ...waste("idle_cost", "Idle cost", (cost) => wasteOf(cost).rounded(currency).idle),
      isWide: true,
    },
    {
      ...waste(
        "underused_cost",
        "Under-used cost",
        (cost) => wasteOf(cost).rounded(currency).underused,
      ),
      isWide: true,
    },
    {
      ...waste(
        "unallocated_cost",
        "Unallocated cost",
        (cost) => wasteOf(cost).rounded(currency).unallocated,
      ),
      isWide: true,
    },
    number("mean_use", "Use\u00a0of what it\u00a0holds", useText, (ratio) => ratio < LOW_USE),
    ofHeld(number("allocated_hours", "Allocated,\u00a0h", amount)),
    ofHeld(number("used_hours", "Busy (weighted),\u00a0h", amount)),
    ofHeld(number("idle_hours", "Idle,\u00a0h", amount, isIdle)),
    { ...ofHeld(number("unknown_hours", "Not\u00a0known,\u00a0h", amount)), isWide: true },
    number("waited_hours", "Waited,\u00a0h", amount),
    { name: "unknown_because", title: "Use unknown", value: (row) => row.unknown_because },
    number("energy_kwh", "Energy, kWh", amount),
    ...(by === "model"
      ? []
      : tokens.map((column) => ({ ...column, isDetail: column.name !== "per_million" }))),
  ];
  return columns.filter((column) => rows.some((row) => column.value(row) !== undefined));
}
