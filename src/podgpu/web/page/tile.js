// The tile of one GPU: its values, its problems and its holders.

import { conditionTitle, KUBERNETES_UNHEALTHY } from "./conditions.js";
import { gpuHash } from "./criteria.js";
import { coded, h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { celsius, count, duration, memoryOf, moment, percent, perHour, watts } from "./format.js";
import { ownUtilization, Sparkline } from "./history.js";
import { holderText, Rows, showText, TINTS } from "./rows.js";

const FEWEST_VALUES = 5; // a holder's sparkline with fewer is left out

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
    const figures = [this.memory, this.power, this.temperature, this.price].map(
      (figure) => figure.element,
    );
    this.figures = h("dl", { class: "figures" }, ...figures);
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
    setText(
      this.model,
      plain(device.model.replace(/-(SXM\d?|PCIe)-/i, " ").replace(/ HBM\w+$/, "")),
    );
    setAttribute(this.model, "title", plain(device.model));
    setText(this.node, showNode ? plain(device.node) : "");
    this.updateBadge(device, now);
    this.troubles.show(device, now);
    const isGone = device.absent || device.gone; // there are no up-to-date values
    for (const element of [this.load, this.bar, this.figures, this.gauge]) element.hidden = isGone;
    if (!isGone) this.updateFigures(device);
    this.rows.show(device, { chosen: this.chosen, now, cost: this.context.currency() });
  }

  updateFigures(device) {
    const own =
      this.chosen && (device.holders.length > 1 || device.parts.length)
        ? device.holders.find(this.chosen)
        : undefined;
    setText(this.ratio, percent(own ? ownUtilization(device, own) : device.utilization));
    setAttribute(
      this.ratio,
      "title",
      device.parts.length && !own ? "Mean of its instances, by compute slices" : undefined,
    );
    showText(this.whole, own ? wholeText(device, own.part) : "");
    place(this.bar, segments(device, own));
    this.memory.show(memoryOf(device.memoryUsed, device.memoryTotal));
    this.power.show(watts(device.power));
    this.temperature.show(celsius(device.temperature));
    const currency = this.context.currency();
    const isInRow = device.holders.length === 1 && !device.parts.length; // the only holder's row shows the price
    this.price.element.hidden = currency === undefined || device.price === undefined || isInRow;
    this.price.show(perHour(device.price, currency));
    this.gaugeFill.style.width = `${100 * Math.min(1, device.memoryUsed / device.memoryTotal || 0)}%`;
    const { history, interval } = this.context;
    const values = own
      ? history.ofHolder(device, own, interval())
      : history.ofDevice(device, interval());
    setAttribute(
      this.spark.element,
      "hidden",
      own && values.filter((value) => value !== undefined).length < FEWEST_VALUES,
    );
    this.spark.draw(values);
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
  return part.ownHolders.length > 1
    ? `of ${percent(part.utilization)} of its instance`
    : "of its instance";
}

function classOf(device, showNode) {
  const severity = isMarked(device) ? ` has-${device.severity}` : "";
  return `tile is-${device.colour}${severity}${device.old ? " is-old" : ""}${showNode ? " has-node" : ""}`;
}

// Shows each problem, since when it exists, and what to do.
export class Troubles {
  constructor() {
    this.element = h("ul", { class: "troubles" });
    this.written = "";
  }

  show(device, now) {
    this.element.hidden = !device.conditions.length;
    const texts = device.conditions.map((condition) => [
      condition,
      sinceText(condition.since, now),
    ]);
    const written = JSON.stringify(texts);
    if (written === this.written) return;
    this.written = written;
    place(
      this.element,
      texts.map(([condition, since]) => trouble(condition, since)),
    );
  }
}

function trouble(condition, since) {
  const says = h(
    "span",
    { class: "trouble-says" },
    plain(condition.says || conditionTitle(condition.name)),
  );
  const when = since && h("span", { class: "trouble-since" }, since);
  const advice = condition.do && h("span", { class: "trouble-do" }, ...coded(condition.do));
  return h("li", {}, says, when || undefined, advice || undefined);
}

function sinceText(since, now) {
  return since === undefined ? "" : `since ${moment(since)}, for ${duration(now - since)}`;
}

// Returns whether the GPU is shown with its conditions: it is broken, or Kubernetes calls it unhealthy.
export function isMarked(device) {
  return device.broken || device.refused;
}

export function badgeText(device, now) {
  if (device.refused) return conditionTitle(KUBERNETES_UNHEALTHY);
  return device.broken ? brokenText(device) : idleText(device, now);
}

export function badgeClass(device) {
  if (isMarked(device)) return `badge badge-${device.severity}`;
  return `badge badge-${device.isMuted ? "resting" : "idle"}`;
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

// The bar: MIG instances side by side, each filled by its usage; for a shared GPU, the usage of each holder.
function segments(device, own) {
  if (device.parts.length) {
    return device.parts.map((part) => {
      const kind = part.isFree ? "segment is-free" : "segment";
      return segment(kind, part.amount, [
        [!own || own.part === part ? 1 : "rest", part.utilization],
      ]);
    });
  }
  const known = device.holders.filter((holder) => holder.utilization !== undefined);
  if (device.holders.length < 2 || !known.length)
    return [segment("segment", 1, [[1, device.utilization]])];
  const fills = device.holders.map((holder, i) => [
    !own || holder === own ? (i % TINTS) + 1 : "rest",
    holder.utilization,
  ]);
  const rest = device.utilization - known.reduce((sum, holder) => sum + holder.utilization, 0);
  return [segment("segment", 1, rest > 0.005 ? [...fills, ["rest", rest]] : fills)];
}

function segment(kind, width, fills) {
  const element = h("span", { class: kind });
  element.style.flexBasis = `${100 * width}%`;
  for (const [tint, ratio] of fills) {
    const fill = h("span", { class: `fill tint-${tint}` });
    fill.style.width = `${100 * Math.min(1, ratio ?? 0)}%`;
    element.append(fill);
  }
  return element;
}

export function idleText(device, now) {
  if (!device.isIdle) return "";
  if (!device.idleSince) return "idle";
  const seconds = now - device.idleSince;
  // The badge of a narrow tile has room for one unit.
  return `idle ${seconds < DAY ? duration(seconds) : `${Math.floor(seconds / DAY)}\u00a0d`}`;
}

// Returns the label of a device. Cached per update, because there may be thousands and filters show them repeatedly.
export function labelOf(device, now) {
  device.label ??= label(device, now);
  return device.label;
}

function label(device, now) {
  const names = (holders) => holders.map((holder) => plain(holder.name)).join(", ");
  const who = device.held
    ? `held by ${names(device.holders)}`
    : device.lastHolders.length
      ? `last held by ${names(device.lastHolders)}`
      : holderText(device).toLowerCase();
  const wrong = device.broken
    ? `broken: ${brokenText(device)}`
    : device.refused
      ? conditionTitle(KUBERNETES_UNHEALTHY)
      : "";
  const load = device.absent || device.gone ? "" : percent(device.utilization);
  const texts = [
    `${device.name} of ${plain(device.node)}`,
    plain(device.model),
    wrong,
    load,
    who,
    idleText(device, now),
  ];
  if (device.parts.length) texts.push(`${count(device.parts.length)} instances`);
  return [...texts, device.old ? "old figures" : ""].filter(Boolean).join(", ");
}
