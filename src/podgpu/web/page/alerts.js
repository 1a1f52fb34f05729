// Shows alerts: problems in colour, and notes below them in a section that is folded at first.

import { conditionTitle, goneText } from "./conditions.js";
import { gpuHash, nodeHash, writeHash } from "./criteria.js";
import { byId, coded, h, place, setAttribute, setClass, setText } from "./dom.js";
import { count, duration, localTimes, plural } from "./format.js";

const FEW = 2;
const MOST = 200;
const WORDS = { broken: "Broken", warning: "Warning" };

export class Alerts {
  constructor() {
    this.element = byId("alerts");
    this.list = byId("alerts-list");
    this.more = byId("alerts-more");
    this.isOpen = false;
    this.alerts = [];
    this.lines = [];
    this.more.addEventListener("click", () => {
      this.isOpen = !this.isOpen;
      this.render();
    });
    this.notes = new Notes();
  }

  // `alone`: the page shows only alerts and notes.
  show(picture, devices, alone) {
    this.alerts = alertsOf(picture, devices);
    this.render();
    this.notes.show(notesOf(picture, this.alerts), alone);
  }

  render() {
    const { alerts } = this;
    const isShort = alerts.length <= FEW + 1; // "Show 1 more" would need as much space as the alert
    const shown = alerts.slice(0, this.isOpen || isShort ? MOST : FEW);
    this.element.hidden = !alerts.length;
    while (this.lines.length < shown.length) this.lines.push(new Line());
    shown.forEach((alert, i) => this.lines[i].show(alert));
    place(
      this.list,
      this.lines.slice(0, shown.length).map((line) => line.element),
    );
    this.lines.length = shown.length;
    this.more.hidden = isShort;
    setAttribute(this.more, "aria-expanded", String(this.isOpen));
    if (this.more.hidden) return;
    setText(this.more, this.isOpen ? "Show fewer" : `Show ${count(alerts.length - FEW)} more`);
  }

  // Returns the highest severity: broken, warning or nothing.
  get severity() {
    if (this.alerts.some((alert) => alert.severity === "broken")) return "broken";
    return this.alerts.length ? "warning" : "";
  }

  get number() {
    return this.alerts.length;
  }
}

class Line {
  constructor() {
    this.word = h("span", { class: "alert-word" });
    this.text = h("span", { class: "alert-text" });
    this.link = h("a", { class: "alert-link" });
    this.element = h("li", {}, this.word, this.text, this.link);
  }

  show(alert) {
    setClass(this.element, `alert is-${alert.severity}`);
    setText(this.word, WORDS[alert.severity]);
    if (alert.text !== this.shown)
      this.text.replaceChildren(...coded(withoutDouble(localTimes((this.shown = alert.text)))));
    const [text, href] = targetOf(alert);
    this.link.hidden = !href;
    setAttribute(this.link, "href", href);
    setText(this.link, text);
  }
}

function targetOf({ job, uuid, node }) {
  if (job) return ["Show the job", writeHash({ job })];
  if (uuid) return ["Show the GPU", gpuHash(uuid)];
  return node ? ["Show the node", nodeHash(node)] : ["", undefined];
}

// Returns the server's alerts. Older servers send none; for these, collects the conditions of the GPUs.
function alertsOf(picture, devices) {
  if (!Array.isArray(picture.alerts)) return gathered(picture, devices);
  const worded = picture.alerts.filter((alert) => typeof alert?.text === "string");
  const alerts = worded.map((alert) => ({
    ...alert,
    severity: alert.severity === "broken" ? "broken" : "warning",
  }));
  const again = repeatedOf(alerts);
  // A node before single GPUs. Further problems of a GPU come last, so that the few that are shown are of different GPUs.
  const rank = (alert) =>
    (alert.severity === "broken" ? 0 : 3) + (again.has(alert) ? 2 : alert.uuid ? 1 : 0);
  return alerts.sort((a, b) => rank(a) - rank(b));
}

// Returns the alerts about a GPU that already has one of this severity.
function repeatedOf(alerts) {
  const named = new Set();
  const again = new Set();
  for (const alert of alerts) {
    const key = `${alert.severity} ${alert.uuid}`;
    if (alert.uuid && named.has(key)) again.add(alert);
    named.add(key);
  }
  return again;
}

function gathered(picture, devices) {
  const gone = (picture.nodes ?? []).filter((node) => node.gone);
  const ofNodes = gone.map((node) => ({
    severity: "broken",
    node: node.name,
    text: `${node.name} is ${goneText(node)}`,
  }));
  const broken = devices.filter((device) => device.broken && !device.gone);
  const ofGpus = broken.map((device) => ({
    severity: device.severity,
    uuid: device.uuid,
    text: `${device.node}: ${device.name}: ${device.conditions[0]?.says || conditionTitle(device.conditions[0]?.name ?? "lost")}`,
  }));
  return [...ofNodes, ...ofGpus];
}

function notesOf(picture, alerts) {
  const alerted = new Set(alerts.map((alert) => alert.text));
  const nodes = picture.nodes ?? [];
  const ofNodes = nodes.flatMap((node) =>
    (node.notes ?? []).map((text) => [`${node.name}: ${text}`, text]),
  );
  const old = nodes.filter((node) => node.old && !node.gone && node.age_seconds !== undefined);
  const ages = old.map((node) => `${node.name}: old, last seen ${duration(node.age_seconds)} ago`);
  return [
    ...(picture.notes ?? []).filter((text) => !alerted.has(text)),
    ...ages,
    ...ofNodes.filter((texts) => !texts.some((text) => alerted.has(text))).map(([text]) => text),
  ];
}

// Shortens "node node-3" to "node-3".
function withoutDouble(text) {
  return text.replace(/\bnode (?=node\b)/gi, "");
}

// The notes. They are unfolded only if the page shows nothing but alerts and notes.
class Notes {
  constructor() {
    this.element = byId("notes");
    this.unfolded = false;
    this.alone = false;
  }

  show(notes, alone) {
    this.element.hidden = !notes.length;
    setText(byId("notes-summary"), plural(notes.length, "note"));
    place(
      byId("notes-list"),
      notes.slice(0, MOST).map((text) => h("li", {}, ...coded(withoutDouble(localTimes(text))))),
    );
    if (!notes.length || alone === this.alone) return;
    this.alone = alone;
    if (alone) this.unfolded = !this.element.open;
    if (this.unfolded) this.element.open = alone;
  }
}
