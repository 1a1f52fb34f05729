// The view of one pod: all GPUs that it holds, with their values and history.

import { noneText, Question } from "./ask.js";
import { jobHash, pastRange, pastTime, podDevices, RANGES } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import { OwnEvents } from "./events.js";
import { duration, energy, gpuCount, memory, percent, plural, watts } from "./format.js";
import { heldTotals, idleAndCost } from "./held.js";
import { linesOf } from "./job.js";
import { Summary } from "./summary.js";
import { Tile } from "./tile.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { Engines } from "./tokens.js";
import { Sum } from "./totals.js";

const EVERY_SECONDS = 10;
const HOUR = 3600;
const LIFE = "whole run";
const NONE_NOW = "This pod holds no GPU now.";
const NONE_THEN = "This pod held no GPU at this time.";

export class PodView {
  constructor(context, onAnswer) {
    this.context = context;
    this.past = new Question(onAnswer);
    this.summary = new Summary(onAnswer);
    this.events = new OwnEvents(onAnswer);
    this.engines = new Engines();
    this.tiles = new Map();
    this.namespace = h("bdi", { class: "row-namespace" });
    this.name = h("bdi");
    this.facts = h("dl", { class: "facts" });
    this.none = h("p", { class: "message" });
    this.grid = h("div", { class: "tiles" });
    this.back = h("a", { href: "#", class: "back" }, "All GPUs");
    this.timeline = new Timeline(({ pod, cluster }) => ({ pod, cluster }), [...RANGES, LIFE]);
    const slash = h("span", { class: "slash" }, "/");
    const title = h("h2", { class: "pod-title" }, this.namespace, slash, this.name);
    this.element = h(
      "div",
      { class: "pod" },
      this.back,
      title,
      this.summary.head,
      this.facts,
      this.none,
      this.grid,
      this.engines.element,
      this.summary.element,
      this.timeline.element,
      this.events.element,
    );
  }

  leave() {
    for (const question of [this.past, this.summary, this.events]) question.forget();
  }

  // `back` is the target of "All GPUs".
  show(devices, criteria, back) {
    setAttribute(this.back, "href", back);
    const { pod: path, cluster } = criteria;
    const [namespace, pod] = splitPath(path);
    const isOwn = (holder) => holder.pod === pod && holder.namespace === namespace;
    const ownDevices = podDevices(devices, namespace, pod, cluster);
    const held = ownDevices.flatMap((device) =>
      device.holders.filter(isOwn).map((holder) => ({ device, holder })),
    );
    if (path !== this.path || cluster !== this.cluster) this.tiles = new Map();
    this.path = path;
    this.cluster = cluster;
    setText(this.namespace, plain([cluster, namespace].filter(Boolean).join("/")));
    setText(this.name, plain(pod));
    this.none.hidden = ownDevices.length > 0;
    setText(this.none, pastTime() ? NONE_THEN : NONE_NOW);
    this.showTiles(ownDevices, isOwn);
    this.engines.show(held.map(({ holder }) => holder));
    this.showHistory(ownDevices, namespace, pod, criteria, clusterOf(devices, ownDevices, cluster));

    // A summary already shows energy and busy time since the pod's start.
    const isAll = !this.summary.life;
    this.facts.hidden = !ownDevices.length;
    place(this.facts, factsOf(held, this.context, isAll));
  }

  showTiles(devices, isOwn) {
    this.tiles = new Map(devices.map((device) => [device.key, this.tile(device, isOwn)]));
    const elements = [...this.tiles.values()].map((tile) => tile.element);
    place(this.grid, elements);
  }

  tile(device, isOwn) {
    const tile = this.tiles.get(device.key) ?? new Tile(this.context, isOwn);
    tile.update(device, true);
    return tile;
  }

  // Returns the range of the charts. Undefined while it is not known when the pod started.
  chooseRange(wanted, isHolding) {
    const { life, isWaiting } = this.summary;
    const usual = isHolding ? pastRange(this.context.clock()) : LIFE;
    const range = [...RANGES, LIFE].includes(wanted) ? wanted : usual;
    if (range !== LIFE || life) return range;
    return isWaiting ? undefined : RANGES[0];
  }

  showHistory(devices, namespace, pod, criteria, cluster) {
    const name = [namespace, pod].map(encodeURIComponent).join("/");
    this.summary.show(name, kindOf(devices));
    const chosen = this.chooseRange(criteria.range, devices.length > 0);
    if (!chosen) {
      this.timeline.showNone("Loading");
      return;
    }
    this.timeline.showRange(chosen, criteria);
    const { life } = this.summary;
    const isLife = chosen === LIFE;
    const range = isLife ? `${Math.ceil((this.context.clock() - life[0]) / HOUR)}h` : chosen;
    this.events.show(`pod=${encodeURIComponent(criteria.pod)}`, range);

    const ofCluster = cluster === undefined ? "" : `&cluster=${encodeURIComponent(cluster)}`;
    const url = `api/v1/history/pods/${name}?range=${range}${ofCluster}`;
    const answer = this.past.want(url, EVERY_SECONDS);
    const { data } = answer;
    if (answer.state !== "ready") {
      this.timeline.showNone(noneText(answer, NO_HISTORY));
      return;
    }
    const recorded = Array.isArray(data.devices) ? data.devices : [];
    const shownLife = isLife ? [life[0], life[1] ?? data.to] : undefined;
    this.timeline.show(data, linesOf(recorded), undefined, shownLife);
  }
}

// Returns the cluster for the query of the history; undefined if there is only one.
function clusterOf(devices, ownDevices, chosen) {
  const clusters = new Set(ownDevices.map((device) => device.cluster));
  const hasClusters = devices.some((device) => device.cluster);
  if (hasClusters && clusters.size === 1) return ownDevices[0].cluster;
  return chosen || undefined;
}

// Returns what a use of 100 % refers to.
function kindOf(devices) {
  if (!devices.length) return "GPU or MIG instance";
  return devices.every((device) => device.parts.length) ? "MIG instance" : "GPU";
}

// Splits NAMESPACE/POD at the first slash, because an invalid pod name may contain a slash.
function splitPath(path) {
  const at = path.indexOf("/");
  return at < 0 ? ["", path] : [path.slice(0, at), path.slice(at + 1)];
}

// `isAll`: with energy and busy time since the pod's start.
function factsOf(held, context, isAll) {
  const totals = heldTotals(held);
  const facts = [];
  const first = held[0]?.holder;
  if (first?.owner) facts.push(fact("Owner", ownerLink(first)));

  const nodes = new Set(held.map(({ device }) => device.node));
  facts.push(fact("Holds", `${gpuCount(totals.gpus)} on ${plural(nodes.size, "node")}`));
  facts.push(useFact(held, totals));
  facts.push(fact("Memory used", memory(totals.memory.value)));
  const isPowerKnown = totals.power.known === held.length;
  facts.push(fact("Power", watts(isPowerKnown ? totals.power.value : undefined)));
  if (isAll) {
    const busy = addUp(held, "busySeconds");
    const joules = addUp(held, "energy");
    if (busy !== undefined) facts.push(fact("Busy since start", duration(busy)));
    if (joules !== undefined) facts.push(fact("Energy since start", energy(joules)));
  }
  return [...facts, ...idleAndCost(totals, context, "Wasted")];
}

function useFact(held, { busy }) {
  const unit = held.every(({ holder }) => holder.part) ? "MIG instance" : "GPU";
  const title = `Use of the ${unit}`;
  const reason = held.map(({ holder }) => holder.unknownBecause).find(Boolean);
  return fact(pastTime() ? title : `${title} now`, reason ?? percent(busy.value));
}

// Links to the page of all pods of the same owner.
function ownerLink(holder) {
  return h("a", { href: jobHash(holder) }, h("bdi", {}, plain(holder.owner)));
}

function addUp(held, name) {
  const sum = new Sum();
  for (const { holder } of held) sum.add(holder[name]);
  return sum.value;
}
