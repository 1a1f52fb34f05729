// Answers "what is wasted, by whom, and what to do?" at the top of the tab Waste. The server decides what is wasted.

import { noneText, Question } from "./ask.js";
import { nameOf, ownerText } from "./cost.js";
import { podHash, wordsOf, writeHash } from "./criteria.js";
import { h, place, plain, setText } from "./dom.js";
import { amount, decimals, LEAST_MONEY, localTimes, money, percent, plural } from "./format.js";
import { roundParts, wasteOf } from "./totals.js";

const EVERY_SECONDS = 60;
const MOST_ROWS = 8;
const LEAST_HOURS = 0.005; // less is not worth a sentence
const ALL = 0.995; // of the allocated hours
const MISSING = "This server does not compute waste: its podgpu is older than this page.";
const PARTS = [
  ["idle", "idle", "held, and nothing ran on it"],
  [
    "underused",
    "under-used",
    "something ran, but less than what is held; a service may need it as a reserve",
  ],
  ["unallocated", "unallocated", "no pod or job held it, and nothing ran on it"],
];
const UNCOUNTED = "Under-used time is not known: no exporter counts it, so this is a lower bound.";

export class WasteSummary {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.headline = h("p", { class: "waste-headline" });
    this.bar = h("div", { class: "waste-bar", "aria-hidden": "true" });
    this.legend = h("ul", { class: "waste-legend" });
    this.list = h("ol", { class: "waste-rows" });
    this.more = h("a", { class: "to-pods" });
    this.notes = h("p", { class: "message" });
    this.element = h(
      "section",
      { class: "waste" },
      h("h2", {}, "What is wasted, and by whom?"),
      this.headline,
      this.bar,
      this.legend,
      this.list,
      this.more,
      this.notes,
    );
  }

  forget() {
    this.question.forget();
  }

  // `waiting`: how many pods wait for GPUs; undefined if it is not known. `savings`: the answer of /api/v1/savings, if there is one.
  show(range, criteria, waiting, savings) {
    const { state, data, message } = this.question.want(
      `api/v1/waste?range=${range}&by=owner`,
      EVERY_SECONDS,
    );
    const isReady = state === "ready";
    for (const part of [this.bar, this.legend, this.list, this.more]) part.hidden = !isReady;
    const { q, cluster, ns } = criteria;
    const written = JSON.stringify([data?.to, savings?.to, state, range, q, cluster, ns, waiting]);
    if (written === this.written) return;
    this.written = written;
    if (!isReady) {
      setText(this.headline, noneText(state, message, MISSING));
      this.notes.hidden = true;
      return;
    }
    this.draw(data, range, criteria, waiting, savings);
  }

  draw(data, range, criteria, waiting, savings) {
    const totals = data.totals ?? {};
    const unit = unitOf(data);
    const waste = wasteOf(totals.waste?.[unit.kind]);
    const whole = totals[unit.whole] ?? 0;
    const wasted = waste.total ?? 0;
    const { q, cluster, ns } = criteria;
    const scope = q || cluster || ns ? "Of all: " : ""; // the filter selects rows
    setText(this.headline, scope + headlineText(wasted, whole, range, unit));
    const parts = PARTS.filter(([name]) => waste.parts[name] !== undefined);
    const digits = unit.digits(wasted);
    const rounded = waste.roundedTo(digits);
    const rest = Math.max(0, whole.toFixed(digits) - wasted.toFixed(digits));
    place(this.bar, [
      ...parts.map(([name]) => segment(name, waste.parts[name])),
      segment("used", rest),
    ]);
    const used =
      totals.unknown_hours >= LEAST_HOURS || totals.unheld_hours >= LEAST_HOURS
        ? "used, or not known"
        : "used";
    place(this.legend, [
      ...parts.map(([name, title, meaning]) =>
        entry(name, title, unit.write(rounded[name]), meaning),
      ),
      entry("used", used, unit.write(rest), "not wasted"),
    ]);
    const rows = rowsOf(data, unit, waste.parts.unallocated, waiting, savings).filter((row) =>
      isMatch(row, criteria),
    );
    const shown = rows.slice(0, MOST_ROWS);
    const most = Math.max(...shown.map((row) => row.wasted), 0) || 1;
    this.list.hidden = !shown.length;
    place(
      this.list,
      shown.map((row) => rowElement(row, most, wasted, unit)),
    );
    const left = rows.slice(MOST_ROWS).reduce((sum, row) => sum + row.wasted, 0);
    const more =
      rows.length > MOST_ROWS
        ? `${plural(rows.length - MOST_ROWS, "other")}: ${unit.write(left)}. `
        : "";
    setText(this.more, `${more}All figures, by pod, owner, namespace or team`);
    this.more.href = writeHash({ view: "cost", range, by: "owner", order: "wasted" });
    const uncounted =
      totals.allocated_hours && waste.parts.underused === undefined ? [UNCOUNTED] : [];
    const notes = [...uncounted, ...(data.notes ?? []).map(localTimes)].join(" \u00b7 ");
    this.notes.hidden = !notes;
    setText(this.notes, notes);
  }
}

// In money or, without prices, in GPU-hours. `digits`: decimals of the parts of a sum.
function unitOf({ totals, currency }) {
  if (totals?.cost === undefined) {
    return {
      kind: "hours",
      whole: "gpu_hours",
      least: LEAST_HOURS,
      digits: (hours) => (hours < 1 ? 2 : 1),
      write: (hours) => `${amount(hours)} GPU-hours`,
    };
  }
  return {
    kind: "cost",
    whole: "cost",
    least: LEAST_MONEY,
    digits: (cost) => decimals(cost, currency),
    write: (cost) => money(cost, currency),
  };
}

function headlineText(wasted, whole, range, unit) {
  const time = range === "24h" ? "the last 24 hours" : "the last 7 days";
  if (!whole) return `There is no record in ${time}.`;
  if (wasted < unit.least) return `Nothing of ${unit.write(whole)} was wasted in ${time}.`;
  return `${unit.write(wasted)} of ${unit.write(whole)} (${percent(wasted / whole)}) was wasted in ${time}.`;
}

function segment(name, value) {
  const element = h("span", { class: `waste-part is-${name}` });
  element.style.flexGrow = value;
  element.hidden = !(value > 0);
  return element;
}

function entry(name, title, value, meaning) {
  return h(
    "li",
    {},
    h("span", { class: `key waste-part is-${name}`, "aria-hidden": "true" }),
    h("strong", {}, `${title} ${value}`),
    h("span", { class: "waste-meaning" }, meaning),
  );
}

// Returns who wasted most, first. Unallocated GPUs are nobody's.
function rowsOf(data, unit, unallocated, waiting, savings) {
  const rows = (data.rows ?? []).map((row) => {
    const waste = wasteOf(row.waste?.[unit.kind]);
    return {
      row,
      name: nameOf(row, "owner"),
      href: linkOf(row),
      wasted: waste.total ?? 0,
      why: whyText(row, waste),
      todo: measuredText(row, savings) || row.do || "",
    };
  });
  if (unallocated >= unit.least) {
    const todo = waiting
      ? `${plural(waiting, "pod")} ${waiting === 1 ? "waits" : "wait"} for GPUs: the tab Queue says why`
      : waiting === 0
        ? "no pod waits for them: fewer nodes would do"
        : "if no pod waits for them, fewer nodes would do";
    rows.push({
      row: {},
      name: "unallocated GPUs",
      href: writeHash({ state: "free" }),
      wasted: unallocated,
      why: "held by nobody",
      todo,
    });
  }
  const found = rows
    .filter(({ wasted }) => wasted >= unit.least)
    .sort((a, b) => b.wasted - a.wasted);
  const sums = found.map(({ wasted }) => wasted);
  const digits = unit.digits(sums.reduce((total, sum) => total + sum, 0));
  const rounded = roundParts(sums, digits);
  return found.map((row, i) => ({ ...row, wasted: rounded[i] }));
}

// Returns what the savings below recommend for pods of this owner: they were measured, the row only has a hint.
function measuredText(row, savings) {
  const ownerOf = ({ cluster, namespace, owner, pod }) =>
    nameOf(owner?.name ? { cluster, namespace, owner } : { cluster, namespace, pod }, "owner");
  const isOwn = (pod) => ownerOf(pod) === ownerOf(row);
  const line = (savings?.advice ?? []).find(
    ({ kind, pods }) => (kind === "shrink" || kind === "share") && pods.some(isOwn),
  );
  if (!line) return "";
  const own = line.pods.filter(isOwn);
  const who = own.length === 1 ? own[0].pod : plural(own.length, "pod");
  const others = line.pods.length - own.length;
  const gain = line.saved?.cost
    ? ` saves ${money(line.saved.cost, savings.currency)} per month`
    : ` saves ${plural(line.saved?.gpus ?? 0, "GPU")}`;
  if (line.kind === "shrink") return `give ${who} ${line.target}:${gain} (measured, below)`;
  const partners = others ? ` with ${plural(others, "other pod")}` : "";
  return `let ${who} share a GPU${partners}:${gain} (measured, below)`;
}

function whyText(row, { parts }) {
  const isIdle = (parts.idle ?? 0) >= (parts.underused ?? 0);
  if (isIdle && row.idle_hours >= ALL * row.allocated_hours)
    return `idle for all of ${amount(row.allocated_hours)} GPU-hours`;
  const use =
    row.mean_use === undefined
      ? ""
      : `used ${percent(row.mean_use)} of ${amount(row.allocated_hours)} GPU-hours`;
  const idle = row.idle_hours >= LEAST_HOURS ? `idle for ${amount(row.idle_hours)} of them` : "";
  return [use, idle].filter(Boolean).join(", ");
}

function linkOf(row) {
  if (row.pod) return podHash(row.namespace ?? "", row.pod, row.cluster);
  if (!row.owner) return undefined;
  return writeHash({
    view: "pods",
    cluster: row.cluster,
    ns: row.namespace,
    q: ownerText(row),
    order: "wasted",
  });
}

function isMatch({ row, name }, { q, cluster, ns }) {
  const text = name.toLowerCase();
  return (
    (!cluster || row.cluster === cluster) &&
    (!ns || row.namespace === ns) &&
    wordsOf(q).every((word) => text.includes(word))
  );
}

function rowElement({ name, href, wasted, why, todo }, most, whole, unit) {
  const fill = h("span", { class: "waste-fill" });
  fill.style.width = `${(100 * wasted) / most}%`;
  return h(
    "li",
    { class: "waste-row" },
    h("span", { class: "waste-who" }, h(href ? "a" : "span", { href }, h("bdi", {}, plain(name)))),
    h(
      "span",
      { class: "waste-sum" },
      h("strong", {}, unit.write(wasted)),
      ` ${percent(wasted / whole)}`,
    ),
    h("span", { class: "waste-track", "aria-hidden": "true" }, fill),
    h("span", { class: "waste-why" }, why),
    h("span", { class: "waste-do" }, todo ? `To do: ${plain(todo)}` : ""),
  );
}
