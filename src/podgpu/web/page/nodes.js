// Shows the nodes as a table, and one node with its GPUs and pods.

import { Commands, copyButton, evictedText, ForgetButton, nodeCommands } from "./actions.js";
import { goneText } from "./conditions.js";
import { nodeHash, pastTime, RANGES, wordsOf, writeHash } from "./criteria.js";
import { coded, fact, h, place, plain, setAttribute, setText } from "./dom.js";
import { OwnEvents } from "./events.js";
import {
  duration,
  localTimes,
  memoryOf,
  money,
  parts,
  percent,
  perHour,
  plural,
  watts,
} from "./format.js";
import { groupsFor, holderColumns, holderRows } from "./pods.js";
import { showText } from "./rows.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";
import { refusedText, Sum, totalsOf } from "./totals.js";

export class Nodes {
  constructor(context, onOrder) {
    this.context = context;
    this.about = h("p", { class: "about" });
    this.message = h(
      "p",
      { class: "message" },
      "No node matches the filter. Press Escape to clear it.",
    );
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
    this.message.hidden = rows.length > 0;
    this.copy.hidden = this.table.element.hidden = !rows.length;
    setText(
      this.about,
      `${plural(rows.length, "node")} \u00b7 ${plural(
        rows.reduce((sum, row) => sum + row.gpus, 0),
        "GPU",
      )}`,
    );
    if (rows.length)
      this.table.show(
        rows,
        columnsOf(rows, this.context.prices()),
        criteria.order || "-name",
        (row) => row.name,
      );
  }
}

function rowsOf(picture, devices, priced) {
  const members = Map.groupBy(devices, (device) => device.node);
  return (picture.nodes ?? []).map((node) => {
    const own = members.get(node.name) ?? [];
    const models = [...new Set(own.map((device) => device.model))].join(", ");
    const totals = totalsOf(own, priced);
    const state = {
      state: stateText(node, totals),
      isGone: Boolean(node.gone),
      isOld: Boolean(node.old && !node.gone),
    };
    return {
      ...totals,
      ...memoryTotals(own),
      ...state,
      name: node.name,
      models,
      text: `${node.name}\n${models}`.toLowerCase(),
    };
  });
}

function memoryTotals(devices) {
  const [used, all] = [new Sum(), new Sum()];
  for (const device of devices) {
    if (!device.gone) used.add(device.memoryUsed);
    all.add(device.memoryTotal);
  }
  return {
    memoryUsed: used.known ? used.total : undefined,
    memoryTotal: all.known ? all.total : undefined,
  };
}

function stateText(node, totals) {
  const seen = node.age_seconds === undefined ? "" : `, seen ${duration(node.age_seconds)} ago`;
  if (node.gone) return `gone${seen}`;
  if (node.old) return `old${seen}`;
  const problems = [totals.broken ? `${totals.broken} broken` : "", refusedText(totals)];
  return problems.filter(Boolean).join(", ") || "ok";
}

function badgeKind(node, totals) {
  if (node?.gone || totals.broken) return "broken";
  return totals.kubernetes_unhealthy && !node?.old ? "warning" : "old";
}

function columnsOf(rows, currency) {
  const number = (name, title, write, isWarm) => ({
    name,
    title,
    value: (row) => row[name],
    write,
    isWarm,
  });
  const isSome = (value) => value > 0;
  const hourly = (price) => money(price, currency);
  const memoryRatio = ({ memoryUsed, memoryTotal }) =>
    memoryTotal && memoryUsed !== undefined ? memoryUsed / memoryTotal : undefined;
  const columns = [
    { name: "name", title: "Node", value: (row) => row.name, link: (row) => nodeHash(row.name) },
    {
      name: "state",
      title: "State",
      value: (row) => row.state,
      isWarm: (_, row) => row.isOld || row.kubernetes_unhealthy > 0,
      isBad: (_, row) => row.isGone || row.broken > 0,
    },
    { name: "models", title: "Model", value: (row) => row.models },
    number("gpus", "GPUs", parts),
    number("allocated", "Allocated", parts),
    number("used", "Used", parts),
    number("idle", "Idle", parts, isSome),
    rows.some((row) => row.unknown) && { ...number("unknown", "Use unknown", parts), isWide: true },
    number("free", "Free", parts),
    rows.some((row) => row.unheld) && {
      ...number("unheld", "Holder unknown", parts),
      isWide: true,
    },
    { ...number("broken", "Broken", parts), isBad: isSome, isWide: true }, // the state shows it too
    { name: "mean", title: "Utilisation", value: (row) => row.mean, write: percent },
    { name: "memory", isWide: true, title: "Memory", value: memoryRatio, write: percent },
    number("power", "Power", watts),
    number("cost", "Cost/h", hourly),
    number("wasted", "Wasted/h", hourly, isSome),
    {
      name: "idle_cost",
      isDetail: true,
      title: "Idle cost/h",
      value: (row) => row.waste?.rounded(currency).idle,
      write: hourly,
    },
    {
      name: "underused_cost",
      isDetail: true,
      title: "Under-used cost/h",
      value: (row) => row.waste?.rounded(currency).underused,
      write: hourly,
    },
    {
      name: "unallocated_cost",
      isDetail: true,
      title: "Unallocated cost/h",
      value: (row) => row.waste?.rounded(currency).unallocated,
      write: hourly,
    },
  ].filter(Boolean);
  return columns.filter(({ value }, i) => i === 0 || rows.some((row) => value(row) !== undefined));
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
    setAttribute(this.back, "href", writeHash({ view: "nodes" }));
    const node = (picture.nodes ?? []).find((candidate) => candidate.name === name);
    const own = devices.filter((device) => device.node === name);
    const isKube = hasPods(picture, name);
    const totals = totalsOf(own, Boolean(picture.currency));
    this.target = { uuids: own.map((device) => device.uuid), node: "the host of podgpu cluster" };
    setText(this.name, plain(name));
    setText(this.models, plain([...new Set(own.map((device) => device.model))].join(", ")));
    this.plain.hidden =
      isKube || !own.some((device) => device.holders.some((holder) => holder.user));
    const isMarked = node?.old || totals.broken || totals.kubernetes_unhealthy;
    showText(
      this.badge,
      !node ? "not present" : node.gone ? goneText(node) : isMarked ? stateText(node, totals) : "",
    );
    this.badge.className = `badge badge-${badgeKind(node, totals)}`;
    const notes = node?.notes ?? [];
    this.notes.hidden = !notes.length;
    place(
      this.notes,
      notes.map((text) => h("li", {}, ...coded(localTimes(text)))),
    );
    const isRepairable = (node?.gone || totals.broken) && !pastTime();
    this.commands.show(
      isRepairable ? nodeCommands(name, own, isKube) : [],
      isRepairable ? evictedText(own) : "",
    );
    this.forget.element.hidden = !node?.gone || Boolean(pastTime());
    this.none.hidden = Boolean(node);
    this.facts.hidden = !node || node.gone;
    place(this.facts, factsOf(totals, memoryTotals(own), this.context.prices()));
    this.tiles.show(own, new Map([[name, node]]), true, anew);
    const rows = holderRows(own, "pod");
    setText(this.podsTitle, groupsFor(isKube).pod);
    this.pods.hidden = !rows.length;
    const columns = holderColumns("pod", rows, this.context, isKube).filter(
      (column) => column.name !== "node",
    );
    if (rows.length) this.table.show(rows, columns, criteria.order || "gpus", (row) => row.key);
    this.events.show(
      `node=${encodeURIComponent(name)}`,
      RANGES.indexOf(criteria.range) > RANGES.indexOf("24h") ? criteria.range : "24h",
    );
  }
}

// Returns whether holders are pods, on all nodes or on the node `name`. On nodes without Kubernetes they are users and jobs.
export function hasPods(picture, name) {
  const nodes = (picture.nodes ?? []).filter((node) => name === undefined || node.name === name);
  const holders = nodes.flatMap((node) => (node.gpus ?? []).flatMap((gpu) => gpu.holders ?? []));
  if (
    name === undefined
      ? (picture.namespaces ?? []).length
      : holders.some((holder) => holder.namespace)
  )
    return true;
  return picture.scope !== "node" && !holders.some((holder) => holder.user || holder.job);
}

function factsOf(totals, memory, currency) {
  return [
    fact("GPUs", parts(totals.gpus)),
    fact("Allocated", parts(totals.allocated)),
    fact("Used", parts(totals.used)),
    totals.idle > 0 && fact("Idle", parts(totals.idle)),
    totals.unknown > 0 && fact("Use unknown", parts(totals.unknown)),
    fact("Free", parts(totals.free)),
    totals.unheld > 0 && fact("Holder unknown", parts(totals.unheld)),
    totals.mean !== undefined && fact("Mean of used", percent(totals.mean)),
    fact("Memory", memoryOf(memory.memoryUsed, memory.memoryTotal)),
    fact("Power", watts(totals.power)),
    totals.cost !== undefined && fact("Cost", perHour(totals.cost, currency)),
    totals.wasted > 0 && fact("Wasted", totals.waste.fullText(perHour, currency)),
  ].filter(Boolean);
}
