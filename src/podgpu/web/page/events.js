// Shows what happened: errors, lost and recovered GPUs and nodes, pods that started and ended, idle
// alarms.

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
import { h, place, plain, setTab, setText, tabs } from "./dom.js";
import { duration, moment, plural } from "./format.js";

const EVERY_SECONDS = 15;
const HOUR = 3600;
const RANGES = ["1h", "24h", "7d"];
const KINDS = { "": "All", problems: "Problems", pods: "Pods", idle: "Idle" };
const NOTHING = "Nothing happened in this time.";
const TITLES = { started: "Started", ended: "Ended", recovered: "Recovered" };
const OF_PODS = ["started", "ended"];
const AROUND = 1800; // events up to this many seconds after the past time are listed
const MISSING = "This server records no events: its podgpu is older than this page.";

// Returns the query for events around the past time in the address. Empty if the page shows now.
export function aroundQuery() {
  if (!pastTime()) return "";
  const until = Math.round(Number(pastTime()) + AROUND);
  return `&to=${until}`;
}

// The tab with the events of all GPUs.
export class Events {
  constructor(onAnswer) {
    this.question = new Question(onAnswer);
    this.ranges = RANGES.map((range) => h("a", {}, range));
    this.kinds = Object.values(KINDS).map((title) => h("a", {}, title));
    const head = h("div", { class: "table-head" });
    this.about = h("p", { class: "about" });
    this.message = h("p", { class: "message" });
    this.list = new EventRows(true);
    head.append(tabs("Range", this.ranges), tabs("Kind", this.kinds), this.about);
    this.element = h("div", { class: "events" }, head, this.message, this.list.element);
  }

  leave() {
    this.question.forget();
  }

  // `now`: time by the server's clock.
  show(criteria, isKube, now) {
    const range = chooseRange(criteria.range);
    const kind = criteria.by in KINDS ? criteria.by : "";
    this.linkTabs(criteria, range, kind, isKube);

    const url = `api/v1/events?range=${range}${aroundQuery()}`;
    const answer = this.question.want(url, EVERY_SECONDS);
    const { data } = answer;
    const words = wordsOf(criteria.q);
    const isWanted = (event) => isOfKind(event, kind) && isMatch(event, words, criteria.ns);
    const events = (data?.events ?? []).filter(isWanted);

    const isFiltered = criteria.q || criteria.ns || kind;
    const none = isFiltered ? "No event matches the filter." : NOTHING;
    this.message.hidden = events.length > 0;
    setText(this.message, noneText(answer, MISSING, none));
    this.list.element.hidden = !events.length;
    setText(this.about, events.length ? aboutText(events, data) : "");
    this.list.show(events, (event) => ageText(now - event.at), now);
  }

  linkTabs(criteria, range, kind, isKube) {
    const here = { view: "events", q: criteria.q, ns: criteria.ns, range, by: kind };
    RANGES.forEach((other, i) => {
      const href = writeHash({ ...here, range: other });
      setTab(this.ranges[i], href, other === range, "true");
    });
    Object.keys(KINDS).forEach((other, i) => {
      const href = writeHash({ ...here, by: other });
      setTab(this.kinds[i], href, other === kind, "true");
    });
    const pods = this.kinds[Object.keys(KINDS).indexOf("pods")];
    setText(pods, isKube ? KINDS.pods : "Users and jobs");
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
    const url = `api/v1/events?range=${range}&${selector}`;
    const answer = this.question.want(url, EVERY_SECONDS);
    const events = answer.data?.events ?? [];
    this.element.hidden = answer.state === "missing";
    this.about.hidden = events.length > 0;
    setText(this.about, noneText(answer, MISSING, NOTHING));
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
  show(events, titleOf = (_event) => "", now = undefined) {
    const rows = events.map((event) => ({
      event,
      title: titleOf(event),
      range: now === undefined ? "" : rangeFor(now - event.at),
    }));
    const written = JSON.stringify([rows, pastTime()]);
    if (written === this.written) return;
    this.written = written;

    const elements = [];
    for (const [title, group] of Map.groupBy(rows, (row) => row.title)) {
      const items = group.map(({ event, range }) => this.row(event, range));
      if (title) elements.push(h("h2", {}, title));
      elements.push(h("ul", { class: "marks" }, ...items));
    }
    place(this.element, elements);
  }

  row(event, range) {
    const datetime = new Date(event.at * 1000).toISOString();
    const when = h("time", { class: "mark-when", datetime }, moment(event.at));
    const title = TITLES[event.kind] ?? conditionTitle(event.kind);
    const badge = h("span", { class: `badge badge-${badgeOf(event)}` }, title);
    const text = h("span", { class: "mark-says" }, textOf(event));
    const links = this.isFull ? linksOf(event, range) : [];
    const href = writeHash({}, String(event.at));
    const then = h("a", { href, title: "Show all GPUs at this time" }, "GPUs then");
    return h("li", {}, when, badge, text, ...links, then);
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
  const end = kind === "recovered" ? "recovered after" : "after";
  return `${plain(text)} (${end} ${duration(seconds)})`;
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

function badgeOf({ kind }) {
  if (OF_PODS.includes(kind)) return "old";
  return kind === "recovered" ? "good" : severityOf([{ name: kind }]);
}

function isOfKind({ kind }, wanted) {
  const isOfPod = OF_PODS.includes(kind);
  const isIdle = kind === "idle";
  if (wanted === "pods") return isOfPod;
  if (wanted === "idle") return isIdle;
  if (wanted === "problems") return !isOfPod && !isIdle;
  return true;
}

function isMatch(event, words, namespace) {
  if (namespace && event.namespace !== namespace) return false;
  const texts = [event.text, event.kind, event.node, event.uuid, event.namespace, event.pod];
  const text = texts.filter(Boolean).join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
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
