// The tile of one GPU: its values, its problems and its holders.

import { conditionTitle, KUBERNETES_UNHEALTHY } from "./conditions.js";
import { gpuHash } from "./criteria.js";
import {
  classes,
  coded,
  h,
  place,
  plain,
  setAttribute,
  setClass,
  setText,
  showText,
} from "./dom.js";
import {
  celsius,
  count,
  duration,
  listed,
  memoryOf,
  moment,
  percent,
  perHour,
  watts,
} from "./format.js";
import { ownUtilization, Sparkline } from "./history.js";
import { holderText, Rows, TINTS } from "./rows.js";
import { sumOf } from "./totals.js";

const FEWEST_VALUES = 5; // a holder's sparkline with fewer is left out
const LEAST_REST = 0.005; // a smaller part of the bar is not seen
const DAY = 86_400;

export class Tile {
  // `context`: history, now(), interval(), currency(). `chosen`: in the view of a pod, that pod.
  constructor(context, chosen) {
    this.context = context;
    this.chosen = chosen;
    this.node = h("bdi", { class: "tile-node" });
    this.name = h("a", { class: "tile-name" });
    this.model = h("bdi", { class: "tile-model" });
    this.badge = h("span", { class: "badge" });
    this.ratio = h("span", { class: "tile-ratio" });
    this.whole = h("span", { class: "tile-whole" });
    this.spark = new Sparkline("Recent utilisation");
    this.load = h("div", { class: "tile-load" }, this.ratio, this.whole, this.spark.element);
    this.bar = h("div", { class: "bar", "aria-hidden": "true" });
    this.memory = new Figure("Memory");
    this.power = new Figure("Power");
    this.temperature = new Figure("Temperature");
    this.price = new Figure("Cost per hour");
    const figures = [this.memory, this.power, this.temperature, this.price];
    const elements = figures.map((figure) => figure.element);
    this.figures = h("dl", { class: "figures" }, ...elements);
    this.gaugeFill = h("span", { class: "gauge-fill" });
    this.gauge = h("span", { class: "gauge", "aria-hidden": "true" }, this.gaugeFill);
    this.troubles = new Troubles();
    this.rows = new Rows();
    this.element = h(
      "article",
      { class: "tile", tabindex: "-1" },
      h("div", { class: "tile-head" }, this.name, this.model, this.node, this.badge),
      this.troubles.element,
      this.load,
      this.bar,
      this.figures,
      this.gauge,
      this.rows.element,
    );
  }

  update(device, showNode) {
    this.device = device;
    const now = this.context.now();
    setClass(this.element, classOf(device, showNode));
    setAttribute(this.element, "data-key", device.key);
    setAttribute(this.element, "aria-label", labelOf(device, now));
    setText(this.name, device.name);
    setAttribute(this.name, "href", gpuHash(device.uuid));
    setAttribute(this.name, "title", plain(device.uuid));
    setText(this.model, plain(briefModel(device.model)));
    setAttribute(this.model, "title", plain(device.model));
    setText(this.node, showNode ? plain(device.node) : "");
    this.updateBadge(device, now);
    this.troubles.show(device, now);
    // Such a GPU has no up-to-date values.
    const isGone = device.absent || device.gone;
    for (const element of [this.load, this.bar, this.figures, this.gauge]) element.hidden = isGone;
    if (!isGone) {
      const own = this.ownHolder(device);
      this.updateLoad(device, own);
      this.updateFigures(device);
    }
    this.rows.show(device, { chosen: this.chosen, now, cost: this.context.currency() });
  }

  // Returns the chosen pod, if its values differ from those of the GPU.
  ownHolder(device) {
    const isShared = device.holders.length > 1 || device.parts.length > 0;
    return this.chosen && isShared ? device.holders.find(this.chosen) : undefined;
  }

  // `own`: the holder whose use is shown instead of that of the GPU.
  updateLoad(device, own) {
    const utilization = own ? ownUtilization(device, own) : device.utilization;
    const isMean = device.parts.length > 0 && !own;
    setText(this.ratio, percent(utilization));
    setAttribute(this.ratio, "title", isMean && "Mean of its instances, by compute slices");
    showText(this.whole, own ? wholeText(device, own.part) : "");
    place(this.bar, segments(device, own));

    const { history, interval } = this.context;
    const values = own
      ? history.ofHolder(device, own, interval())
      : history.ofDevice(device, interval());
    const known = values.filter((value) => value !== undefined).length;
    setAttribute(this.spark.element, "hidden", Boolean(own) && known < FEWEST_VALUES);
    this.spark.draw(values);
  }

  updateFigures(device) {
    this.memory.show(memoryOf(device.memoryUsed, device.memoryTotal));
    this.power.show(watts(device.power));
    this.temperature.show(celsius(device.temperature));
    const currency = this.context.currency();
    // The row of the only holder shows the price.
    const isInRow = device.holders.length === 1 && !device.parts.length;
    this.price.element.hidden = currency === undefined || device.price === undefined || isInRow;
    this.price.show(perHour(device.price, currency));

    const filled = device.memoryUsed / device.memoryTotal || 0; // 0 if one is unknown
    this.gaugeFill.style.width = `${100 * Math.min(1, filled)}%`;
  }

  updateBadge(device, now) {
    const text = badgeText(device, now);
    this.badge.hidden = !text;
    setText(this.badge, text);
    setClass(this.badge, badgeClass(device));
    const idle = device.idleSince ? `Idle since ${moment(device.idleSince)}` : "Idle now";
    setAttribute(this.badge, "title", isMarked(device) ? undefined : idle);
  }
}

// Returns the text after the use of a holder: "12 %" is followed by "of 34 % total".
function wholeText(device, part) {
  if (!part) return `of ${percent(device.utilization)} total`;
  if (part.ownHolders.length === 1) return "of its instance";
  return `of ${percent(part.utilization)} of its instance`;
}

function classOf(device, showNode) {
  return classes(
    "tile",
    `is-${device.colour}`,
    isMarked(device) && `has-${device.severity}`,
    device.old && "is-old",
    showNode && "has-node",
  );
}

// Leaves out what a tile has no room for: "H100-SXM5-80GB HBM3" becomes "H100 80GB".
function briefModel(model) {
  return model.replace(/-(SXM\d?|PCIe)-/i, " ").replace(/ HBM\w+$/, "");
}

// Shows each problem, since when it exists, and what to do.
export class Troubles {
  constructor() {
    this.element = h("ul", { class: "troubles" });
    this.written = "";
  }

  show(device, now) {
    this.element.hidden = !device.conditions.length;
    const troubles = device.conditions.map((condition) => ({
      says: condition.says || conditionTitle(condition.name),
      since: sinceText(condition.since, now),
      advice: condition.do,
    }));
    const written = JSON.stringify(troubles);
    if (written === this.written) return;
    this.written = written;
    place(this.element, troubles.map(troubleLine));
  }
}

function troubleLine({ says, since, advice }) {
  const line = h("li", {}, h("span", { class: "trouble-says" }, plain(says)));
  if (since) line.append(h("span", { class: "trouble-since" }, since));
  if (advice) line.append(h("span", { class: "trouble-do" }, ...coded(advice)));
  return line;
}

function sinceText(since, now) {
  if (since === undefined) return "";
  return `since ${moment(since)}, for ${duration(now - since)}`;
}

// Returns whether the GPU is shown with its conditions: it is broken, or Kubernetes calls it
// unhealthy.
export function isMarked(device) {
  return device.broken || device.refused;
}

export function badgeText(device, now) {
  if (device.refused) return conditionTitle(KUBERNETES_UNHEALTHY);
  return device.broken ? brokenText(device) : idleText(device, now);
}

export function badgeClass(device) {
  if (isMarked(device)) return `badge badge-${device.severity}`;
  return device.isMuted ? "badge badge-resting" : "badge badge-idle";
}

function brokenText(device) {
  const [first, ...others] = device.conditions;
  const title = first ? conditionTitle(first.name) : "Lost";
  return others.length ? `${title} +${others.length}` : title;
}

class Figure {
  constructor(name) {
    this.value = h("dd");
    this.element = h("div", { title: name }, h("dt", {}, name), this.value);
  }

  show(text) {
    setText(this.value, text);
  }
}

// The bar: MIG instances side by side, each filled by its usage; for a shared GPU, the usage of
// each holder. If there is an `own` holder, the others have no tint.
function segments(device, own) {
  if (device.parts.length) return device.parts.map((part) => partSegment(part, own));
  const known = device.holders
    .map((holder) => holder.utilization)
    .filter((ratio) => ratio !== undefined);
  const isDivided = device.holders.length > 1 && known.length > 0;
  if (!isDivided) return [segment("segment", 1, [fill(1, device.utilization)])];

  const fills = device.holders.map((holder, i) => {
    const isTinted = !own || holder === own;
    const tint = isTinted ? (i % TINTS) + 1 : "rest";
    return fill(tint, holder.utilization);
  });
  const rest = device.utilization - sumOf(known);
  if (rest > LEAST_REST) fills.push(fill("rest", rest));
  return [segment("segment", 1, fills)];
}

function partSegment(part, own) {
  const kind = part.isFree ? "segment is-free" : "segment";
  const isTinted = !own || own.part === part;
  const tint = isTinted ? 1 : "rest";
  return segment(kind, part.amount, [fill(tint, part.utilization)]);
}

// `width`: fraction of the bar.
function segment(kind, width, fills) {
  const element = h("span", { class: kind }, ...fills);
  element.style.flexBasis = `${100 * width}%`;
  return element;
}

// `ratio`: fraction of the segment; undefined if it is not known.
function fill(tint, ratio = 0) {
  const element = h("span", { class: `fill tint-${tint}` });
  element.style.width = `${100 * Math.min(1, ratio)}%`;
  return element;
}

export function idleText(device, now) {
  if (!device.isIdle) return "";
  if (!device.idleSince) return "idle";
  const seconds = now - device.idleSince;
  if (seconds < DAY) return `idle ${duration(seconds)}`;
  // The badge of a narrow tile has room for one unit.
  return `idle ${Math.floor(seconds / DAY)}\u00a0d`;
}

// Returns the label of a device. Cached per update, because there may be thousands and filters show
// them repeatedly.
export function labelOf(device, now) {
  device.label ??= label(device, now);
  return device.label;
}

function label(device, now) {
  const texts = [`${device.name} of ${plain(device.node)}`, plain(device.model)];
  texts.push(problemLabel(device));
  if (!device.absent && !device.gone) texts.push(percent(device.utilization));
  texts.push(holderLabel(device), idleText(device, now));
  if (device.parts.length) texts.push(`${count(device.parts.length)} instances`);
  if (device.old) texts.push("old figures");
  return listed(texts);
}

function problemLabel(device) {
  if (device.broken) return `broken: ${brokenText(device)}`;
  return device.refused ? conditionTitle(KUBERNETES_UNHEALTHY) : "";
}

function holderLabel(device) {
  const names = (holders) => holders.map((holder) => plain(holder.name)).join(", ");
  if (device.held) return `held by ${names(device.holders)}`;
  if (device.lastHolders.length) return `last held by ${names(device.lastHolders)}`;
  return holderText(device).toLowerCase();
}
