// Shows the nodes as a table, and one node with its GPUs and pods.

import { Commands, copyButton, evictedText, ForgetButton, nodeCommands } from "./actions.js";
import { goneText } from "./conditions.js";
import { nodeHash, pastTime, wordsOf, writeHash } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText, showText } from "./dom.js";
import { OwnEvents } from "./events.js";
import {
  dotted,
  duration,
  listed,
  memoryOf,
  money,
  parts,
  percent,
  perHour,
  plural,
  watts,
} from "./format.js";
import { groupsFor, holderColumns, holderRows } from "./pods.js";
import { fieldColumn, filledColumns, Table, wasteColumns } from "./table.js";
import { showNotes, Tiles } from "./tiles.js";
import { refusedText, Sum, sumOf, totalsOf } from "./totals.js";

// The events of a node go back at least a day.
const EVENT_RANGES = ["24h", "7d", "30d"];

export class Nodes {
  constructor(context, onOrder) {
    this.context = context;
    this.about = h("p", { class: "about" });
    const none = "No node matches the filter. Press Escape to clear it.";
    this.message = h("p", { class: "message" }, none);
    this.table = new Table("Nodes", onOrder);
    this.copy = copyButton("Copy", () => this.table.asText());
    this.element = h(
      "div",
      { class: "nodes-table" },
      h("div", { class: "table-head" }, this.about, this.copy),
      this.message,
      this.table.element,
    );
  }

  show(picture, devices, criteria) {
    const words = wordsOf(criteria.q);
    const all = rowsOf(picture, devices, Boolean(picture.currency));
    const rows = all.filter((row) => words.every((word) => row.text.includes(word)));
    const gpus = sumOf(rows.map((row) => row.gpus));
    setText(this.about, dotted([plural(rows.length, "node"), plural(gpus, "GPU")]));

    const isEmpty = !rows.length;
    this.message.hidden = !isEmpty;
    this.copy.hidden = isEmpty;
    this.table.element.hidden = isEmpty;
    if (isEmpty) return;
    const columns = filledColumns(columnsOf(rows, this.context.prices()), rows);
    this.table.show(rows, columns, criteria.order || "-name", (row) => row.name);
  }
}

function rowsOf(picture, devices, priced) {
  const members = Map.groupBy(devices, (device) => device.node);
  return (picture.nodes ?? []).map((node) => {
    const own = members.get(node.name) ?? [];
    const models = modelsOf(own);
    const totals = totalsOf(own, priced);
    return {
      ...totals,
      ...memoryTotals(own),
      state: stateText(node, totals),
      isGone: Boolean(node.gone),
      isOld: Boolean(node.old && !node.gone),
      name: node.name,
      models,
      text: `${node.name}\n${models}`.toLowerCase(),
    };
  });
}

function modelsOf(devices) {
  return [...new Set(devices.map((device) => device.model))].join(", ");
}

function memoryTotals(devices) {
  const used = new Sum();
  const total = new Sum();
  for (const device of devices) {
    if (!device.gone) used.add(device.memoryUsed);
    total.add(device.memoryTotal);
  }
  return { memoryUsed: used.value, memoryTotal: total.value };
}

function stateText(node, totals) {
  const seen = node.age_seconds === undefined ? "" : `, seen ${duration(node.age_seconds)} ago`;
  if (node.gone) return `gone${seen}`;
  if (node.old) return `old${seen}`;
  return listed([totals.broken && `${totals.broken} broken`, refusedText(totals)]) || "ok";
}

function badgeText(node, totals) {
  if (!node) return "not present";
  if (node.gone) return goneText(node);
  const isMarked = node.old || totals.broken || totals.kubernetes_unhealthy;
  return isMarked ? stateText(node, totals) : "";
}

function badgeKind(node, totals) {
  if (node?.gone || totals.broken) return "broken";
  return totals.kubernetes_unhealthy && !node?.old ? "warning" : "old";
}

const STATE_COLUMN = {
  name: "state",
  title: "State",
  value: (row) => row.state,
  isWarm: (_, row) => row.isOld || row.kubernetes_unhealthy > 0,
  isBad: (_, row) => row.isGone || row.broken > 0,
};

function columnsOf(rows, currency) {
  const isSome = (value) => value > 0;
  const hourly = (price) => money(price, currency);
  const optional = (name, title) => {
    const isUsed = rows.some((row) => row[name]);
    return isUsed ? [fieldColumn(name, title, parts, { isWide: true })] : [];
  };
  const nodeName = (row) => row.name;
  const waste = (row) => row.waste;
  return [
    { name: "name", title: "Node", value: nodeName, link: (row) => nodeHash(row.name) },
    STATE_COLUMN,
    { name: "models", title: "Model", value: (row) => row.models },
    fieldColumn("gpus", "GPUs", parts),
    fieldColumn("allocated", "Allocated", parts),
    fieldColumn("used", "Used", parts),
    fieldColumn("idle", "Idle", parts, { isWarm: isSome }),
    ...optional("unknown", "Use unknown"),
    fieldColumn("free", "Free", parts),
    ...optional("unheld", "Holder unknown"),
    // The state shows it too.
    fieldColumn("broken", "Broken", parts, { isBad: isSome, isWide: true }),
    fieldColumn("mean", "Utilisation", percent),
    { name: "memory", title: "Memory", value: memoryRatio, write: percent, isWide: true },
    fieldColumn("power", "Power", watts),
    fieldColumn("cost", "Cost/h", hourly),
    fieldColumn("wasted", "Wasted/h", hourly, { isWarm: isSome }),
    ...wasteColumns(waste, currency, { unit: "/h", write: hourly, isDetail: true }),
  ];
}

function memoryRatio({ memoryUsed, memoryTotal }) {
  if (!memoryTotal || memoryUsed === undefined) return undefined;
  return memoryUsed / memoryTotal;
}

export class NodeView {
  constructor(context, onOrder, onAnswer) {
    this.context = context;
    this.events = new OwnEvents(onAnswer);
    this.back = h("a", { href: "#view=nodes", class: "back" }, "All nodes");
    this.name = h("bdi");
    this.badge = h("span", { class: "badge" });
    this.models = h("bdi", { class: "title-more" });
    this.plain = h("span", { class: "title-more" }, "no Kubernetes");
    const title = h("h2", { class: "pod-title" }, this.name, this.models, this.plain, this.badge);
    this.facts = h("dl", { class: "facts" });
    this.notes = h("ul", { class: "node-notes" });
    this.commands = new Commands();
    this.forget = new ForgetButton("Forget this node", () => this.target);
    this.tiles = new Tiles(context);
    this.none = h("p", { class: "message" }, "This node is not listed.");
    this.table = new Table("Pods of this node", onOrder);
    this.podsTitle = h("h2");
    this.pods = h("section", {}, this.podsTitle, this.table.element);
    this.element = h(
      "div",
      { class: "pod node-view" },
      this.back,
      title,
      this.notes,
      this.commands.element,
      this.forget.element,
      this.facts,
      this.none,
      this.tiles.element,
      this.pods,
      this.events.element,
    );
  }

  leave() {
    this.forget.clear();
    this.events.forget();
  }

  show(picture, devices, criteria, anew) {
    const name = criteria.node;
    const node = (picture.nodes ?? []).find((candidate) => candidate.name === name);
    const own = devices.filter((device) => device.node === name);
    const isKube = hasPods(picture, name);
    const totals = totalsOf(own, Boolean(picture.currency));
    this.target = { uuids: own.map((device) => device.uuid), node: "the host of podgpu cluster" };
    setAttribute(this.back, "href", writeHash({ view: "nodes" }));
    setText(this.name, plain(name));
    setText(this.models, plain(modelsOf(own)));
    const hasUsers = own.some((device) => device.holders.some((holder) => holder.user));
    this.plain.hidden = isKube || !hasUsers;
    showText(this.badge, badgeText(node, totals));
    this.badge.className = `badge badge-${badgeKind(node, totals)}`;

    showNotes(this.notes, node?.notes);
    this.showRepair(name, node, own, totals.broken, isKube);
    this.none.hidden = Boolean(node);
    this.facts.hidden = !node || node.gone;
    place(this.facts, factsOf(totals, memoryTotals(own), this.context.prices()));
    this.tiles.show(own, new Map([[name, node]]), true, anew);
    this.showPods(own, criteria, isKube);
    const range = EVENT_RANGES.includes(criteria.range) ? criteria.range : EVENT_RANGES[0];
    this.events.show(`node=${encodeURIComponent(name)}`, range);
  }

  // A node can be repaired only now.
  showRepair(name, node, own, broken, isKube) {
    const isNow = !pastTime();
    const isGone = Boolean(node?.gone);
    if (isNow && (isGone || broken)) {
      this.commands.show(nodeCommands(name, own, isKube), evictedText(own));
    } else {
      this.commands.show([]);
    }
    this.forget.element.hidden = !isGone || !isNow;
  }

  showPods(own, criteria, isKube) {
    const rows = holderRows(own, "pod");
    setText(this.podsTitle, groupsFor(isKube).pod);
    this.pods.hidden = !rows.length;
    if (!rows.length) return;
    const all = holderColumns("pod", rows, this.context, isKube);
    const columns = all.filter((column) => column.name !== "node");
    this.table.show(rows, columns, criteria.order || "gpus", (row) => row.key);
  }
}

// Returns whether holders are pods, on all nodes or on the node `name`. On nodes without Kubernetes
// they are users and jobs.
export function hasPods(picture, name) {
  if (name === undefined && picture.namespaces?.length) return true;
  const nodes = (picture.nodes ?? []).filter((node) => name === undefined || node.name === name);
  const gpus = nodes.flatMap((node) => node.gpus ?? []);
  const holders = gpus.flatMap((gpu) => gpu.holders ?? []);
  if (name !== undefined && holders.some((holder) => holder.namespace)) return true;
  const hasUsers = holders.some((holder) => holder.user || holder.job);
  return picture.scope !== "node" && !hasUsers;
}

function factsOf(totals, { memoryUsed, memoryTotal }, currency) {
  const facts = [];
  const add = (title, text) => facts.push(fact(title, text));
  const addSome = (title, number) => {
    if (number > 0) add(title, parts(number));
  };
  add("GPUs", parts(totals.gpus));
  add("Allocated", parts(totals.allocated));
  add("Used", parts(totals.used));
  addSome("Idle", totals.idle);
  addSome("Use unknown", totals.unknown);
  add("Free", parts(totals.free));
  addSome("Holder unknown", totals.unheld);
  if (totals.mean !== undefined) add("Mean of used", percent(totals.mean));
  add("Memory", memoryOf(memoryUsed, memoryTotal));
  add("Power", watts(totals.power));
  if (totals.cost !== undefined) add("Cost", perHour(totals.cost, currency));
  if (totals.wasted > 0) add("Wasted", totals.waste.fullText(perHour, currency));
  return facts;
}
