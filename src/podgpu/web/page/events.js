// Shows what happened: errors, lost and recovered GPUs and nodes, pods that started and ended, idle alarms.

import { noneText, Question } from "./ask.js";
import { conditionTitle, severityOf } from "./conditions.js";
import {
  gpuHash,
  nodeHash,
  pastTime,
  podHash,
  rangeFor,
  RANGES as ALL_RANGES,
  wordsOf,
  writeHash,
} from "./criteria.js";
import { h, place, plain, setAttribute, setText } from "./dom.js";
import { duration, moment, plural } from "./format.js";

const EVERY_SECONDS = 15;
const HOUR = 3600;
const RANGES = ["1h", "24h", "7d"];
const KINDS = { "": "All", problems: "Problems", pods: "Pods", idle: "Idle" };
const TITLES = { started: "Started", ended: "Ended", recovered: "Recovered" };
const OF_PODS = ["started", "ended"];
const AROUND = 1800; // events up to this many seconds after the past time are listed
const MISSING = "This server records no events: its podgpu is older than this page.";

// Returns the query for events around the past time in the address. Empty if the page shows now.
export function aroundQuery() {
  return pastTime() ? `&to=${Math.round(Number(pastTime()) + AROUND)}` : "";
}

// The tab with the events of all GPUs.
export class Events {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.kinds = Object.values(KINDS).map((title) => h("a", {}, title));
    this.about = h("p", { class: "about" });
    this.message = h("p", { class: "message" });
    this.list = new EventRows(true);
    const tabs = (label, links) => h("nav", { class: "tabs", "aria-label": label }, ...links);
    const head = h(
      "div",
      { class: "table-head" },
      tabs("Range", this.ranges),
      tabs("Kind", this.kinds),
      this.about,
    );
    this.element = h("div", { class: "events" }, head, this.message, this.list.element);
  }

  leave() {
    this.question.forget();
  }

  // `now`: time by the server's clock.
  show(criteria, isKube, now) {
    setText(this.kinds[2], isKube ? KINDS.pods : "Users and jobs");
    const range = chooseRange(criteria.range);
    const kind = criteria.by in KINDS ? criteria.by : "";
    this.linkTabs(criteria, range, kind);

    const { state, data, message } = this.question.want(
      `api/v1/events?range=${range}${aroundQuery()}`,
      EVERY_SECONDS,
    );
    const words = wordsOf(criteria.q);
    const events = (data?.events ?? []).filter(
      (event) => isOfKind(event, kind) && isMatch(event, words, criteria.ns),
    );
    this.message.hidden = events.length > 0;
    this.list.element.hidden = !events.length;
    const isFiltered = criteria.q || criteria.ns || kind;
    const none = isFiltered ? "No event matches the filter." : "Nothing happened in this time.";
    setText(this.message, state === "ready" ? none : noneText(state, message, MISSING));
    setText(this.about, events.length ? aboutText(events, data) : "");
    this.list.show(events, (event) => ageText(now - event.at), now);
  }

  linkTabs(criteria, range, kind) {
    const here = { view: "events", q: criteria.q, ns: criteria.ns, range, by: kind };
    RANGES.forEach((other, i) =>
      markTab(this.ranges[i], { ...here, range: other }, other === range),
    );
    Object.keys(KINDS).forEach((other, i) =>
      markTab(this.kinds[i], { ...here, by: other }, other === kind),
    );
  }
}

// The events of one GPU, pod or node, for its own page.
export class OwnEvents {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.list = new EventRows(false);
    this.about = h("p", { class: "about" });
    this.element = h("section", {}, h("h2", {}, "Events"), this.about, this.list.element);
  }

  forget() {
    this.question.forget();
  }

  // `selector`: query that selects a GPU, pod or node, such as gpu=UUID.
  show(selector, range) {
    const { state, data, message } = this.question.want(
      `api/v1/events?range=${range}&${selector}`,
      EVERY_SECONDS,
    );
    const events = data?.events ?? [];
    this.element.hidden = state === "missing";
    this.about.hidden = events.length > 0;
    setText(
      this.about,
      state === "ready" ? "Nothing happened in this time." : noneText(state, message, MISSING),
    );
    this.list.show(events);
  }
}

export class EventRows {
  // `isFull`: rows link to their GPU, pod and node.
  constructor(isFull) {
    this.isFull = isFull;
    this.element = h("div");
  }

  // `titleOf(event)` returns the heading above the event. `now`: time by the server's clock.
  show(events, titleOf = () => "", now = undefined) {
    const ages = events.map(titleOf);
    const ranges = events.map((event) => (now === undefined ? "" : rangeFor(now - event.at)));
    const shown = JSON.stringify([events, ages, ranges, pastTime()]);
    if (this.shown === shown) return;
    this.shown = shown;
    place(
      this.element,
      [...new Set(ages)].flatMap((age) => {
        const rows = events.flatMap((event, i) =>
          ages[i] === age ? [this.row(event, ranges[i])] : [],
        );
        return [age && h("h2", {}, age), h("ul", { class: "marks" }, ...rows)].filter(Boolean);
      }),
    );
  }

  row(event, range) {
    const when = h(
      "time",
      { class: "mark-when", datetime: new Date(event.at * 1000).toISOString?.() },
      moment(event.at),
    );
    const badge = h(
      "span",
      { class: `badge badge-${badgeOf(event)}` },
      TITLES[event.kind] ?? conditionTitle(event.kind),
    );
    const links = this.isFull ? linksOf(event, range) : [];
    const then = h(
      "a",
      { href: writeHash({}, String(event.at)), title: "Show all GPUs at this time" },
      "GPUs then",
    );
    return h(
      "li",
      {},
      when,
      badge,
      h("span", { class: "mark-says" }, textOf(event)),
      ...links,
      then,
    );
  }
}

function ageText(seconds) {
  const hours = Math.floor(Math.max(0, seconds) / HOUR);
  if (hours < 1) return "Last hour";
  if (hours < 2) return "1 to 2 hours ago";
  return hours < 24 ? "2 to 24 hours ago" : "Earlier";
}

function textOf({ text = "", kind, seconds }) {
  if (seconds === undefined) return plain(text);
  return `${plain(text)} (${kind === "recovered" ? "recovered " : ""}after ${duration(seconds)})`;
}

function chooseRange(wanted) {
  if (RANGES.includes(wanted)) return wanted;
  return pastTime() ? "1h" : "24h";
}

function aboutText(events, { truncated, from, to }) {
  const cut = truncated ? ", the newest only" : "";
  const period = pastTime() ? `, ${moment(from)} to ${moment(to)}` : "";
  return `${plural(events.length, "event")}${cut}${period}`;
}

function markTab(link, hash, isChosen) {
  setAttribute(link, "href", writeHash(hash));
  setAttribute(link, "aria-current", isChosen ? "true" : undefined);
}

function badgeOf({ kind }) {
  if (OF_PODS.includes(kind)) return "old";
  return kind === "recovered" ? "good" : severityOf([{ name: kind }]);
}

function isOfKind({ kind }, wanted) {
  if (wanted === "pods") return OF_PODS.includes(kind);
  if (wanted === "idle") return kind === "idle";
  return !wanted || (!OF_PODS.includes(kind) && kind !== "idle");
}

function isMatch(event, words, namespace) {
  const text = [event.text, event.kind, event.node, event.uuid, event.namespace, event.pod]
    .filter(Boolean)
    .join("\n")
    .toLowerCase();
  return (
    (!namespace || event.namespace === namespace) && words.every((word) => text.includes(word))
  );
}

// The pages open with a range that contains the event. The shortest range is their default.
function linksOf({ uuid, namespace, pod, node }, shortest) {
  const range = shortest === ALL_RANGES[0] ? "" : shortest;
  const link = (href, text) => h("a", { href }, text);
  return [
    uuid && link(gpuHash(uuid, range), "GPU"),
    pod && link(podHash(namespace ?? "", pod, "", range), "Pod"),
    node && link(nodeHash(node, range), "Node"),
  ].filter(Boolean);
}
