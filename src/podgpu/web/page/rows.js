// Shows a row for each holder of a GPU or MIG instance.

import { gpuHash, holderHash } from "./criteria.js";
import { commandsOf } from "./devices.js";
import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { duration, memory, percent, perHour } from "./format.js";
import { ownMemory, ownUtilization } from "./history.js";

export const TINTS = 4;
const LEAST_WAIT = 0.005; // less is shown as 0

export class Rows {
  constructor() {
    this.element = h("ul", { class: "rows" });
    this.list = [];
  }

  // `chosen`: in the view of a pod, that pod. `cost`: the currency, if costs are shown.
  // `isFull`: also shows the utilisation of a sole holder, which a tile already shows above the row.
  show(device, { chosen = undefined, now, cost, isFull = false }) {
    const rows = rowsOf(device, chosen);
    while (this.list.length < rows.length) this.list.push(new Row());
    this.list.length = rows.length;
    rows.forEach((row, i) => this.list[i].show(device, row, chosen, now, cost, isFull));
    place(
      this.element,
      this.list.map((row) => row.element),
    );
  }
}

// Lists the holders of each instance, then the holders of the GPU itself, or the last holders of a missing GPU.
function rowsOf(device, chosen) {
  const rows = [];
  for (const part of device.parts) {
    if (!part.ownHolders.length && !chosen)
      rows.push({ profile: part.profile, part, text: freeText(part.isFree) });
    part.ownHolders.forEach((holder, i) =>
      rows.push({ profile: i ? "" : part.profile, part, holder }),
    );
  }
  const shared = device.holders.length > 1;
  device.ownHolders.forEach((holder, i) =>
    rows.push({ tint: shared ? (i % TINTS) + 1 : 0, holder }),
  );
  if (!device.held) for (const holder of device.lastHolders) rows.push({ holder, isLast: true });
  if (!rows.length) rows.push({ text: holderText(device) });
  return rows;
}

export function freeText(isFree) {
  return isFree ? "Free" : "Holder unknown";
}

export function holderText(device) {
  if (device.absent || (device.old && !device.gone)) return "No holder";
  return freeText(!device.unheld);
}

// Rows are reused after updates, so that a focused link keeps the focus.
class Row {
  constructor() {
    this.profile = h("a", { class: "profile" });
    this.swatch = h("span", { "aria-hidden": "true" });
    this.last = h("span", { class: "row-last", hidden: true }, "last held by");
    this.namespace = h("bdi", { class: "row-namespace" });
    this.pod = h("bdi", { class: "row-pod" });
    this.link = h("a", {}, this.namespace, this.pod);
    this.container = h("bdi", { class: "row-container" });
    this.name = h("span", { class: "row-name" }, this.link, this.container);
    this.idle = h("span", { class: "row-idle" });
    this.ratio = h("span", { class: "row-figure" });
    this.wait = h("span", { class: "row-wait" });
    this.memory = h("span", { class: "row-figure row-memory" });
    this.cost = h("span", { class: "row-figure row-cost" });
    const parts = [
      this.profile,
      this.swatch,
      this.last,
      this.name,
      this.idle,
      this.ratio,
      this.wait,
      this.memory,
      this.cost,
    ];
    this.element = h("li", {}, ...parts);
  }

  show(
    device,
    { holder, part, profile = "", tint = 0, text = "", isLast = false },
    chosen,
    now,
    currency,
    isFull,
  ) {
    const isOther = holder && chosen && !chosen(holder);
    setClass(this.element, `row${holder ? "" : " row-free"}${isOther ? " row-other" : ""}`);
    showText(this.profile, plain(profile));
    setAttribute(this.profile, "href", part ? gpuHash(`${device.uuid}/${part.id}`) : undefined);
    this.swatch.hidden = !tint;
    setClass(this.swatch, `swatch tint-${tint}`);
    this.last.hidden = !isLast;
    this.showName(holder, text);
    const alone =
      !holder || isLast || (!isFull && device.holders.length < 2 && !device.parts.length);
    const since = holder?.use === "idle" ? holder.idleSince : undefined;
    const idle =
      alone || device.isIdle || since === undefined ? "" : `idle ${duration(now - since)}`;
    showText(this.idle, idle);
    const isPast = device.absent || device.old; // its usage is out of date
    const repeats =
      isPast || (alone && (device.utilization !== undefined || holder?.utilization === undefined));
    showText(this.ratio, repeats || idle ? "" : percent(ownUtilization(device, holder)));
    const hasWaited = holder?.waited >= LEAST_WAIT && !isPast;
    showText(this.wait, hasWaited ? `waited ${waitText(holder.waited, holder.waitsFor[0])}` : "");
    showText(this.memory, alone || isPast ? "" : memory(ownMemory(device, holder)));
    const priced = currency !== undefined && holder?.cost !== undefined;
    showText(this.cost, priced ? perHour(holder.cost, currency) : "");
    this.cost.classList.toggle("wasted", holder?.use === "idle");
  }

  showName(holder, text) {
    const linked = Boolean(holder?.pod);
    setAttribute(this.link, "href", holder ? holderHash(holder) : undefined);
    showText(this.namespace, linked && holder.namespace ? `${plain(holder.namespace)}/` : "");
    const user = holder?.name.startsWith("job ") && holder.user ? ` (${holder.user})` : "";
    setText(this.pod, plain(linked ? holder.pod : `${holder?.name ?? text}${user}`));
    showText(
      this.container,
      plain(holder?.shownContainer || (holder?.running ? commandsOf(holder) : "")),
    );
    const full = holder && plain([holder.name, holder.container].filter(Boolean).join("/"));
    const owner = holder?.owner ? ` (${plain(holder.owner)})` : "";
    setAttribute(this.name, "title", full && `${full}${owner}`);
  }
}

// Returns a text about waiting. `longest`: the holder that caused the longest wait.
export function waitText(waited, longest) {
  if (!longest) return percent(waited);
  const part = percent(longest.ratio);
  return part === percent(waited)
    ? `${part} for ${plain(longest.name)}`
    : `${percent(waited)} (${part} for ${plain(longest.name)})`;
}

export function showText(element, text) {
  element.hidden = !text;
  setText(element, text);
}
