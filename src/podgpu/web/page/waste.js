// Answers "what is wasted, by whom, and what to do?" at the top of the tab Waste. The server
// decides what is wasted.

import { noneText, Question } from "./ask.js";
import { nameOf, ownerText } from "./cost.js";
import { isOfScope, podHash, wordsOf, writeHash } from "./criteria.js";
import { h, place, plain, setText, showText } from "./dom.js";
import {
  amount,
  decimals,
  dotted,
  LEAST_MONEY,
  listed,
  localTimes,
  money,
  percent,
  plural,
} from "./format.js";
import { roundParts, sumOf, wasteOf } from "./totals.js";

const EVERY_SECONDS = 60;
const MOST_ROWS = 8;
const LEAST_HOURS = 0.005; // less is not worth a sentence
const ALL = 0.995; // of the allocated hours
const MISSING = "This server does not compute waste: its podgpu is older than this page.";
const MEASURED = ["shrink", "share"]; // recommendations for pods in use
const PARTS = [
  { name: "idle", title: "idle", meaning: "held, and nothing ran on it" },
  {
    name: "underused",
    title: "under-used",
    meaning: "something ran, but less than what is held; a service may need it as a reserve",
  },
  {
    name: "unallocated",
    title: "unallocated",
    meaning: "no pod or job held it, and nothing ran on it",
  },
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

  // `waiting`: how many pods wait for GPUs; undefined if it is not known. `savings`: the answer of
  // /api/v1/savings, if there is one.
  show(range, criteria, waiting, savings) {
    const url = `api/v1/waste?range=${range}&by=owner`;
    const answer = this.question.want(url, EVERY_SECONDS);
    const { state, data } = answer;
    const isReady = state === "ready";
    for (const part of [this.bar, this.legend, this.list, this.more]) part.hidden = !isReady;
    const { q, cluster, ns } = criteria;
    const written = JSON.stringify([data?.to, savings?.to, state, range, q, cluster, ns, waiting]);
    if (written === this.written) return;
    this.written = written;
    if (!isReady) {
      setText(this.headline, noneText(answer, MISSING));
      this.notes.hidden = true;
      return;
    }
    this.draw(data, range, criteria, waiting, savings);
  }

  draw(data, range, criteria, waiting, savings) {
    const unit = unitOf(data);
    const totals = data.totals ?? {};
    const waste = wasteOf(totals.waste?.[unit.kind]);
    const wasted = waste.total ?? 0;
    const whole = totals[unit.whole] ?? 0;
    const isFiltered = criteria.q || criteria.cluster || criteria.ns;
    const headline = headlineText(wasted, whole, range, unit);
    setText(this.headline, isFiltered ? `Of all: ${headline}` : headline);
    this.drawParts(waste, whole, totals, unit);

    const rows = rowsOf(data, unit, waste.parts.unallocated, waiting, savings);
    const matches = rows.filter((row) => isMatch(row, criteria));
    this.drawRows(matches, wasted, unit);
    this.more.href = writeHash({ view: "cost", range, by: "owner", order: "wasted" });
    const isUncounted = totals.allocated_hours && waste.parts.underused === undefined;
    const notes = (data.notes ?? []).map(localTimes);
    showText(this.notes, dotted([isUncounted && UNCOUNTED, ...notes]));
  }

  // Draws the bar and its legend.
  drawParts(waste, whole, totals, unit) {
    const parts = PARTS.filter(({ name }) => waste.parts[name] !== undefined);
    const wasted = waste.total ?? 0;
    // As the texts show them, so that they add up.
    const digits = unit.digits(wasted);
    const rounded = waste.roundedTo(digits);
    const rest = Math.max(0, Number(whole.toFixed(digits)) - Number(wasted.toFixed(digits)));
    const isPartlyUnknown = [totals.unknown_hours, totals.unheld_hours].some(isNotable);

    const segments = parts.map(({ name }) => segment(name, waste.parts[name]));
    place(this.bar, [...segments, segment("used", rest)]);
    const entries = parts.map(({ name, title, meaning }) =>
      entry(name, title, unit.write(rounded[name]), meaning),
    );
    const used = isPartlyUnknown ? "used, or not known" : "used";
    place(this.legend, [...entries, entry("used", used, unit.write(rest), "not wasted")]);
  }

  drawRows(rows, whole, unit) {
    const shown = rows.slice(0, MOST_ROWS);
    const others = rows.slice(MOST_ROWS);
    const most = shown[0]?.wasted || 1; // the rows are sorted
    this.list.hidden = !shown.length;
    const elements = shown.map((row) => rowElement(row, most, whole, unit));
    place(this.list, elements);

    const all = "All figures, by pod, owner, namespace or team";
    const left = sumOf(others.map((row) => row.wasted));
    const rest = `${plural(others.length, "other")}: ${unit.write(left)}`;
    setText(this.more, others.length ? `${rest}. ${all}` : all);
  }
}

function isNotable(hours) {
  return hours >= LEAST_HOURS;
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
  const part = `${unit.write(wasted)} of ${unit.write(whole)} (${percent(wasted / whole)})`;
  return `${part} was wasted in ${time}.`;
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
  if (unallocated >= unit.least) rows.push(unallocatedRow(unallocated, waiting));

  const notable = rows.filter(({ wasted }) => wasted >= unit.least);
  notable.sort((a, b) => b.wasted - a.wasted);
  const exact = notable.map(({ wasted }) => wasted);
  const rounded = roundParts(exact, unit.digits(sumOf(exact)));
  return notable.map((row, i) => ({ ...row, wasted: rounded[i] }));
}

function unallocatedRow(wasted, waiting) {
  return {
    row: {},
    name: "unallocated GPUs",
    href: writeHash({ state: "free" }),
    wasted,
    why: "held by nobody",
    todo: waitingText(waiting),
  };
}

function waitingText(waiting) {
  if (waiting === undefined) return "if no pod waits for them, fewer nodes would do";
  if (waiting === 0) return "no pod waits for them: fewer nodes would do";
  const verb = waiting === 1 ? "waits" : "wait";
  return `${plural(waiting, "pod")} ${verb} for GPUs: the tab Queue says why`;
}

// Returns what the savings below recommend for pods of this owner: they were measured, the row only
// has a hint.
function measuredText(row, savings) {
  const owner = holderName(row);
  const isOwn = (pod) => holderName(pod) === owner;
  const isForOwner = ({ kind, pods }) => MEASURED.includes(kind) && pods.some(isOwn);
  const line = (savings?.advice ?? []).find(isForOwner);
  if (!line) return "";

  const own = line.pods.filter(isOwn);
  const pods = own.length === 1 ? own[0].pod : plural(own.length, "pod");
  const gain = `${gainText(line, savings.currency)} (measured, below)`;
  if (line.kind === "shrink") return `give ${pods} ${line.target}: ${gain}`;
  const others = line.pods.length - own.length;
  const partners = others ? ` with ${plural(others, "other pod")}` : "";
  return `let ${pods} share a GPU${partners}: ${gain}`;
}

function gainText({ saved }, currency) {
  if (saved?.cost) return `saves ${money(saved.cost, currency)} per month`;
  return `saves ${plural(saved?.gpus ?? 0, "GPU")}`;
}

// Returns the name of the owner or, without one, of the pod.
function holderName({ cluster, namespace, owner, pod }) {
  const holder = owner?.name ? { owner } : { pod };
  return nameOf({ cluster, namespace, ...holder }, "owner");
}

function whyText(row, { parts }) {
  const { idle_hours: idle, allocated_hours: allocated, mean_use: use } = row;
  const isMostlyIdle = (parts.idle ?? 0) >= (parts.underused ?? 0);
  if (isMostlyIdle && idle >= ALL * allocated) {
    return `idle for all of ${amount(allocated)} GPU-hours`;
  }
  return listed([
    use !== undefined && `used ${percent(use)} of ${amount(allocated)} GPU-hours`,
    idle >= LEAST_HOURS && `idle for ${amount(idle)} of them`,
  ]);
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

function isMatch({ row, name }, criteria) {
  const text = name.toLowerCase();
  return isOfScope(row, criteria) && wordsOf(criteria.q).every((word) => text.includes(word));
}

// `most`: the longest bar. `whole`: all that was wasted.
function rowElement({ name, href, wasted, why, todo }, most, whole, unit) {
  const title = h(href ? "a" : "span", { href }, h("bdi", {}, plain(name)));
  const amount = h("strong", {}, unit.write(wasted));
  const bar = h("span", { class: "waste-fill" });
  bar.style.width = `${(100 * wasted) / most}%`;
  return h(
    "li",
    { class: "waste-row" },
    h("span", { class: "waste-who" }, title),
    h("span", { class: "waste-sum" }, amount, ` ${percent(wasted / whole)}`),
    h("span", { class: "waste-track", "aria-hidden": "true" }, bar),
    h("span", { class: "waste-why" }, why),
    h("span", { class: "waste-do" }, todo ? `To do: ${plain(todo)}` : ""),
  );
}
