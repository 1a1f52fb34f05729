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
    // "Show 1 more" would need as much space as the alert.
    const isShort = alerts.length <= FEW + 1;
    const limit = this.isOpen || isShort ? MOST : FEW;
    const shown = alerts.slice(0, limit);
    this.element.hidden = !alerts.length;

    while (this.lines.length < shown.length) this.lines.push(new Line());
    this.lines.length = shown.length;
    shown.forEach((alert, i) => this.lines[i].show(alert));
    const elements = this.lines.map((line) => line.element);
    place(this.list, elements);

    this.more.hidden = isShort;
    setAttribute(this.more, "aria-expanded", String(this.isOpen));
    if (isShort) return;
    const text = this.isOpen ? "Show fewer" : `Show ${count(alerts.length - FEW)} more`;
    setText(this.more, text);
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
    if (alert.text !== this.shown) {
      this.shown = alert.text;
      this.text.replaceChildren(...textNodes(alert.text));
    }
    const { text, href } = targetOf(alert);
    this.link.hidden = !href;
    setAttribute(this.link, "href", href);
    setText(this.link, text);
  }
}

// Returns the text and the address of the link of an alert.
function targetOf({ job, uuid, node }) {
  if (job) return { text: "Show the job", href: writeHash({ job }) };
  if (uuid) return { text: "Show the GPU", href: gpuHash(uuid) };
  if (node) return { text: "Show the node", href: nodeHash(node) };
  return { text: "", href: undefined };
}

// Returns the server's alerts. Older servers send none; for these, collects the conditions of the
// GPUs.
function alertsOf(picture, devices) {
  if (!Array.isArray(picture.alerts)) return gathered(picture, devices);
  const worded = picture.alerts.filter((alert) => typeof alert?.text === "string");
  const alerts = worded.map((alert) => ({
    ...alert,
    severity: alert.severity === "broken" ? "broken" : "warning",
  }));
  const broken = alerts.filter((alert) => alert.severity === "broken");
  const warnings = alerts.filter((alert) => alert.severity === "warning");
  return [...nodesFirst(broken), ...nodesFirst(warnings)];
}

// A node before single GPUs. Further problems of a GPU come last, so that the few that are shown
// are of different GPUs.
function nodesFirst(alerts) {
  const repeated = repeatedOf(alerts);
  const ofNodes = alerts.filter((alert) => !alert.uuid);
  const ofGpus = alerts.filter((alert) => alert.uuid && !repeated.has(alert));
  return [...ofNodes, ...ofGpus, ...repeated];
}

// Returns the alerts about a GPU that already has one.
function repeatedOf(alerts) {
  const alerted = new Set();
  const repeated = new Set();
  for (const alert of alerts) {
    if (alert.uuid && alerted.has(alert.uuid)) repeated.add(alert);
    alerted.add(alert.uuid);
  }
  return repeated;
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
    text: `${device.node}: ${device.name}: ${problemText(device)}`,
  }));
  return [...ofNodes, ...ofGpus];
}

function problemText({ conditions: [first] }) {
  if (!first) return conditionTitle("lost");
  return first.says || conditionTitle(first.name);
}

function notesOf(picture, alerts) {
  const alerted = new Set(alerts.map((alert) => alert.text));
  const nodes = picture.nodes ?? [];
  const notes = (picture.notes ?? []).filter((text) => !alerted.has(text));

  for (const node of nodes) {
    const { name, old, gone, age_seconds: age } = node;
    if (old && !gone && age !== undefined)
      notes.push(`${name}: old, last seen ${duration(age)} ago`);
  }
  for (const { name, notes: texts = [] } of nodes) {
    for (const text of texts) {
      const named = `${name}: ${text}`;
      if (!alerted.has(text) && !alerted.has(named)) notes.push(named);
    }
  }
  return notes;
}

function textNodes(text) {
  return coded(withoutDouble(localTimes(text)));
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
    const items = notes.slice(0, MOST).map((text) => h("li", {}, ...textNodes(text)));
    place(byId("notes-list"), items);
    if (!notes.length || alone === this.alone) return;
    this.alone = alone;
    if (alone) this.unfolded = !this.element.open;
    if (this.unfolded) this.element.open = alone;
  }
}
