// The view of one pod: all GPUs that it holds, with their values and history.

import { noneText, Question } from "./ask.js";
import { jobHash, pastRange, pastTime, podDevices, RANGES } from "./criteria.js";
import { fact, h, place, plain, setAttribute, setText } from "./dom.js";
import { OwnEvents } from "./events.js";
import { duration, energy, memory, parts, percent, perHour, plural, watts } from "./format.js";
import { ownMemory, ownPower, ownUtilization } from "./history.js";
import { lineName } from "./job.js";
import { Summary } from "./summary.js";
import { Tile } from "./tile.js";
import { NO_HISTORY, Timeline } from "./timeline.js";
import { Engines } from "./tokens.js";
import { Mean, Sum, Waste } from "./totals.js";

const EVERY_SECONDS = 10;
const HOUR = 3600;
const LIFE = "whole run";

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
    const title = h(
      "h2",
      { class: "pod-title" },
      this.namespace,
      h("span", { class: "slash" }, "/"),
      this.name,
    );
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
    const path = criteria.pod;
    const { cluster } = criteria;
    const [namespace, pod] = splitPath(path);
    if (path !== this.path || cluster !== this.cluster) this.tiles = new Map();
    this.path = path;
    this.cluster = cluster;
    setText(this.namespace, plain([cluster, namespace].filter(Boolean).join("/")));
    setText(this.name, plain(pod));
    const isOwn = (holder) => holder.pod === pod && holder.namespace === namespace;
    const held = podDevices(devices, namespace, pod, cluster);
    this.none.hidden = held.length > 0;
    setText(
      this.none,
      pastTime() ? "This pod held no GPU at this time." : "This pod holds no GPU now.",
    );
    this.facts.hidden = !held.length;
    this.tiles = new Map(held.map((device) => [device.key, this.tile(device, isOwn)]));
    this.engines.show(
      held.flatMap((device) => device.holders.filter(isOwn).map((holder) => [device, holder])),
    );
    place(
      this.grid,
      [...this.tiles.values()].map((tile) => tile.element),
    );
    const clusters = new Set(held.map((device) => device.cluster));
    const isOne = clusters.size === 1 && devices.some((device) => device.cluster);
    this.showHistory(
      held,
      namespace,
      pod,
      criteria,
      isOne ? [...clusters][0] : cluster || undefined,
    );
    place(this.facts, factsOf(held, isOwn, this.context, !this.summary.life));
  }

  tile(device, isOwn) {
    const tile = this.tiles.get(device.key) ?? new Tile(this.context, isOwn);
    tile.update(device, true);
    return tile;
  }

  // Returns the range of the charts. Undefined while it is not known when the pod started.
  chooseRange(wanted, isHolding) {
    const { life, isWaiting } = this.summary;
    let range = isHolding ? pastRange(this.context.clock()) : LIFE;
    if ([...RANGES, LIFE].includes(wanted)) range = wanted;
    if (range !== LIFE || life) return range;
    return isWaiting ? undefined : RANGES[0];
  }

  showHistory(held, namespace, pod, criteria, cluster) {
    const name = [namespace, pod].map(encodeURIComponent).join("/");
    this.summary.show(name, kindOf(held));
    const chosen = this.chooseRange(criteria.range, held.length > 0);
    if (!chosen) return this.timeline.showNone("Loading");

    this.timeline.showRange(chosen, criteria);
    const { life } = this.summary;
    const isLife = chosen === LIFE;
    const range = isLife ? `${Math.ceil((this.context.clock() - life[0]) / HOUR)}h` : chosen;
    const ofCluster = cluster === undefined ? "" : `&cluster=${encodeURIComponent(cluster)}`;
    this.events.show(`pod=${encodeURIComponent(criteria.pod)}`, range);
    const { state, data, message } = this.past.want(
      `api/v1/history/pods/${name}?range=${range}${ofCluster}`,
      EVERY_SECONDS,
    );
    if (state !== "ready") return this.timeline.showNone(noneText(state, message, NO_HISTORY));
    const devices = Array.isArray(data.devices) ? data.devices : [];
    const several = new Set(devices.map((device) => device.node)).size > 1;
    const lines = devices.map((device) => ({
      name: lineName(device, several),
      series: device.series,
    }));
    this.timeline.show(data, lines, undefined, isLife ? [life[0], life[1] ?? data.to] : undefined);
  }
}

// Returns what a use of 100 % refers to.
function kindOf(held) {
  if (!held.length) return "GPU or MIG instance";
  return held.every((device) => device.parts.length) ? "MIG instance" : "GPU";
}

// Splits NAMESPACE/POD at the first slash, because an invalid pod name may contain a slash.
function splitPath(path) {
  const at = path.indexOf("/");
  return at < 0 ? ["", path] : [path.slice(0, at), path.slice(at + 1)];
}

// `isAll`: true if there is no summary. A summary already shows energy and busy time since the pod's start.
function factsOf(held, isOwn, context, isAll) {
  const own = held.flatMap((device) =>
    device.holders.filter(isOwn).map((holder) => [device, holder]),
  );
  const current = own.filter(([device]) => !device.gone);
  const busy = new Mean();
  for (const [device, holder] of current) busy.add(ownUtilization(device, holder), holder.amount);
  const used = sum(current, ([device, holder]) => ownMemory(device, holder));
  const since = own.map(([, holder]) => holder.idleSince);
  const idle =
    since.length && since.every((at) => at !== undefined) ? Math.max(...since) : undefined;
  const power = sum(current, ([device, holder]) => ownPower(device, holder));
  const amount = own.reduce((total, [, holder]) => total + holder.amount, 0);
  const cost = sum(own, ([, holder]) => holder.cost);
  const waste = new Waste();
  for (const [, holder] of own) waste.add(holder.waste);
  const currency = context.prices();
  const [, first] = own[0] ?? [];
  const unknown = own.map(([, holder]) => holder.unknownBecause).find(Boolean);
  return [
    first?.owner && fact("Owner", ownerLink(first)),
    fact(
      "Holds",
      `${gpuText(amount)} on ${plural(new Set(held.map((device) => device.node)).size, "node")}`,
    ),
    fact(
      `Use of the ${own.every(([, holder]) => holder.part) ? "MIG instance" : "GPU"}${pastTime() ? "" : " now"}`,
      unknown ?? percent(busy.value),
    ),
    fact("Memory used", memory(used.known ? used.total : undefined)),
    fact("Power", watts(power.known && power.known === own.length ? power.total : undefined)),
    isAll && known(own, "busySeconds", "Busy since start", duration),
    isAll && known(own, "energy", "Energy since start", energy),
    idle !== undefined && fact("Idle for", duration(context.now() - idle)),
    cost.known > 0 && fact("Cost", perHour(cost.total, currency)),
    waste.total > 0 && fact("Wasted", waste.fullText(perHour, currency)),
  ].filter(Boolean);
}

function gpuText(amount) {
  return `${parts(amount)} ${amount === 1 ? "GPU" : "GPUs"}`;
}

// Links to the page of all pods of the same owner.
function ownerLink(holder) {
  return h("a", { href: jobHash(holder) }, h("bdi", {}, plain(holder.owner)));
}

function known(own, name, title, write) {
  const all = sum(own, ([, holder]) => holder[name]);
  return all.known ? fact(title, write(all.total)) : false;
}

function sum(of, value) {
  const found = new Sum();
  for (const member of of) found.add(value(member));
  return found;
}
