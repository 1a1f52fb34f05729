// Shows a row for each holder of a GPU or MIG instance.

import { gpuHash, holderHash } from "./criteria.js";
import { commandsOf } from "./devices.js";
import { classes, h, place, plain, setAttribute, setClass, setText, showText } from "./dom.js";
import { duration, memory, percent, perHour } from "./format.js";
import { ownMemory, ownUtilization } from "./history.js";

export const TINTS = 4;
const LEAST_WAIT = 0.005; // less is shown as 0

export class Rows {
  constructor() {
    this.element = h("ul", { class: "rows" });
    this.list = [];
  }

  // `options`:
  //   chosen(holder)  in the view of a pod: whether the holder is that pod
  //   now             time by the server's clock
  //   cost            the currency, if costs are shown
  //   isFull          shows also the figures of a sole holder, which a tile shows above the row
  show(device, options) {
    const rows = rowsOf(device, options.chosen);
    while (this.list.length < rows.length) this.list.push(new Row());
    this.list.length = rows.length;
    rows.forEach((row, i) => this.list[i].show(device, row, options));
    const elements = this.list.map((row) => row.element);
    place(this.element, elements);
  }
}

// Lists the holders of each instance, then the holders of the GPU itself, or the last holders of a
// missing GPU.
function rowsOf(device, chosen) {
  const rows = device.parts.flatMap((part) => partRows(part, chosen));
  const isShared = device.holders.length > 1;
  device.ownHolders.forEach((holder, i) => {
    const tint = isShared ? (i % TINTS) + 1 : 0;
    rows.push({ tint, holder });
  });
  if (!device.held) {
    for (const holder of device.lastHolders) rows.push({ holder, isLast: true });
  }
  if (!rows.length) rows.push({ text: holderText(device) });
  return rows;
}

// The first row of an instance shows its profile. In the view of a pod, instances without a holder
// are left out.
function partRows(part, chosen) {
  const { profile, ownHolders } = part;
  if (ownHolders.length) {
    return ownHolders.map((holder, i) => ({ profile: i === 0 ? profile : "", part, holder }));
  }
  return chosen ? [] : [{ profile, part, text: freeText(part.isFree) }];
}

export function freeText(isFree) {
  return isFree ? "Free" : "Holder unknown";
}

export function holderText(device) {
  const hasOldFigures = device.old && !device.gone;
  if (device.absent || hasOldFigures) return "No holder";
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
    this.element = h(
      "li",
      {},
      this.profile,
      this.swatch,
      this.last,
      this.name,
      this.idle,
      this.ratio,
      this.wait,
      this.memory,
      this.cost,
    );
  }

  show(device, row, { chosen, now, cost: currency, isFull }) {
    const { holder, part, profile = "", tint = 0, text = "", isLast = false } = row;
    const isOther = holder && chosen && !chosen(holder);
    setClass(this.element, classes("row", !holder && "row-free", isOther && "row-other"));
    showText(this.profile, plain(profile));
    setAttribute(this.profile, "href", part && gpuHash(`${device.uuid}/${part.id}`));
    this.swatch.hidden = !tint;
    setClass(this.swatch, `swatch tint-${tint}`);
    this.last.hidden = !isLast;
    this.showName(holder, text);
    this.showFigures(device, holder, isFigured(device, row, isFull), now);
    this.showCost(holder, currency);
  }

  // `isFigured`: the row shows the figures of its holder.
  showFigures(device, holder, isFigured, now) {
    const isIdle = isFigured && !device.isIdle && holder.use === "idle";
    const hasIdleTime = isIdle && holder.idleSince !== undefined;
    showText(this.idle, hasIdleTime ? `idle ${duration(now - holder.idleSince)}` : "");

    // The usage of these is out of date.
    const isPast = device.absent || device.old;
    // A sole holder without figures in the tile above has its own use.
    const isOnlyFigure = device.utilization === undefined && holder?.utilization !== undefined;
    const hasRatio = !isPast && !hasIdleTime && (isFigured || isOnlyFigure);
    showText(this.ratio, hasRatio ? percent(ownUtilization(device, holder)) : "");

    const hasWaited = !isPast && holder?.waited >= LEAST_WAIT;
    showText(this.wait, hasWaited ? `waited ${waitText(holder.waited, holder.waitsFor[0])}` : "");
    const hasMemory = isFigured && !isPast;
    showText(this.memory, hasMemory ? memory(ownMemory(device, holder)) : "");
  }

  showCost(holder, currency) {
    const isPriced = currency !== undefined && holder?.cost !== undefined;
    showText(this.cost, isPriced ? perHour(holder.cost, currency) : "");
    this.cost.classList.toggle("wasted", holder?.use === "idle");
  }

  // `text`: shown if there is no holder.
  showName(holder, text) {
    setAttribute(this.link, "href", holder && holderHash(holder));
    setAttribute(this.name, "title", holder && fullName(holder));
    showText(this.namespace, namespaceText(holder));
    setText(this.pod, plain(holder ? shortName(holder) : text));
    showText(this.container, plain(holder ? containerText(holder) : ""));
  }
}

// Whether the row of a holder has figures. The tile above already shows those of a sole holder.
function isFigured(device, { holder, isLast }, isFull) {
  if (!holder || isLast) return false;
  return isFull || device.holders.length > 1 || device.parts.length > 0;
}

function namespaceText(holder) {
  return holder?.pod && holder.namespace ? `${plain(holder.namespace)}/` : "";
}

function shortName(holder) {
  if (holder.pod) return holder.pod;
  const hasUser = holder.name.startsWith("job ") && holder.user;
  return hasUser ? `${holder.name} (${holder.user})` : holder.name;
}

// Returns the container or, on a node without Kubernetes, the programs.
function containerText(holder) {
  if (holder.shownContainer) return holder.shownContainer;
  // Last holders have no programs.
  return holder.running ? commandsOf(holder) : "";
}

function fullName(holder) {
  const path = [holder.name, holder.container].filter(Boolean).join("/");
  const owner = holder.owner ? ` (${plain(holder.owner)})` : "";
  return `${plain(path)}${owner}`;
}

// Returns a text about waiting. `longest`: the holder that caused the longest wait.
export function waitText(waited, longest) {
  const all = percent(waited);
  if (!longest) return all;
  const part = `${percent(longest.ratio)} for ${plain(longest.name)}`;
  const isAll = percent(longest.ratio) === all;
  return isAll ? part : `${all} (${part})`;
}
