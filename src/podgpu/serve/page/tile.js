// One GPU: its figures, what is wrong with it, and whoever holds it or a part of it.

import { conditionTitle } from "./conditions.js";
import { gpuHash } from "./criteria.js";
import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { celsius, count, duration, memoryOf, moment, percent, perHour, watts } from "./format.js";
import { ownUtilization, Sparkline } from "./history.js";
import { holderText, Rows, showText, TINTS } from "./rows.js";

export class Tile {
  // `context`: history, now(), interval(), currency(). `chosen` of a pod's own view: whose line and rows it is about.
  constructor(context, chosen) {
    this.context = context;
    this.chosen = chosen;
    this.node = h("bdi", { class: "tile-node" });
    this.name = h("a", { class: "tile-name" });
    this.model = h("bdi", { class: "tile-model" });
    this.badge = h("span", { class: "badge" });
    this.ratio = h("span", { class: "tile-ratio" });
    this.whole = h("span", { class: "tile-whole" });
    this.spark = new Sparkline("Utilisation of late");
    this.load = h("div", { class: "tile-load" }, this.ratio, this.whole, this.spark.element);
    this.bar = h("div", { class: "bar", "aria-hidden": "true" });
    this.memory = new Figure("Memory");
    this.power = new Figure("Power");
    this.temperature = new Figure("Temperature");
    this.price = new Figure("Cost per hour");
    const figures = [this.memory, this.power, this.temperature, this.price].map((figure) => figure.element);
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

  update(one, showNode) {
    this.device = one;
    const now = this.context.now();
    setClass(this.element, classOf(one, showNode));
    setAttribute(this.element, "data-key", one.key);
    setAttribute(this.element, "aria-label", labelOf(one, now));
    setText(this.name, one.name);
    setAttribute(this.name, "href", gpuHash(one.uuid));
    setAttribute(this.name, "title", plain(one.uuid));
    setText(this.model, plain(one.model));
    setText(this.node, showNode ? plain(one.node) : "");
    this.updateBadge(one, now);
    this.troubles.show(one, now);
    const isGone = one.absent || one.gone; // it has no figures that are of now
    for (const element of [this.load, this.bar, this.figures, this.gauge]) element.hidden = isGone;
    if (!isGone) this.updateFigures(one);
    this.rows.show(one, { chosen: this.chosen, now, cost: this.context.currency() });
  }

  updateFigures(one) {
    const own = this.chosen && one.holders.length > 1 ? one.holders.find(this.chosen) : undefined;
    setText(this.ratio, percent(own ? ownUtilization(one, own) : one.utilization));
    setAttribute(this.ratio, "title", one.parts.length && !own ? "Mean of its instances, by compute slices" : undefined);
    showText(this.whole, own ? `of ${percent(one.utilization)} in all` : "");
    place(this.bar, segments(one, own));
    this.memory.show(memoryOf(one.memoryUsed, one.memoryTotal));
    this.power.show(watts(one.power));
    this.temperature.show(celsius(one.temperature));
    const currency = this.context.currency();
    const isSaid = one.holders.length === 1 && !one.parts.length; // in the only row
    this.price.element.hidden = currency === undefined || one.price === undefined || isSaid;
    this.price.show(perHour(one.price, currency));
    this.gaugeFill.style.width = `${100 * Math.min(1, one.memoryUsed / one.memoryTotal || 0)}%`;
    const { history, interval } = this.context;
    this.spark.draw(own ? history.ofHolder(one, own, interval()) : history.ofDevice(one, interval()));
  }

  updateBadge(one, now) {
    const text = one.broken ? brokenText(one) : idleText(one, now);
    this.badge.hidden = !text;
    setText(this.badge, text);
    setClass(this.badge, `badge badge-${one.broken ? one.severity : one.isMuted ? "resting" : "idle"}`);
    const idle = one.idleSince ? `Idle since ${moment(one.idleSince)}` : "Idle now";
    setAttribute(this.badge, "title", one.broken ? undefined : idle);
  }
}

function classOf(one, showNode) {
  const severity = one.broken ? ` has-${one.severity}` : "";
  return `tile is-${one.colour}${severity}${one.old ? " is-old" : ""}${showNode ? " has-node" : ""}`;
}

// What is wrong, since when, and what to do about it.
export class Troubles {
  constructor() {
    this.element = h("ul", { class: "troubles" });
    this.said = "";
  }

  show(one, now) {
    this.element.hidden = !one.conditions.length;
    const texts = one.conditions.map((condition) => [condition, sinceText(condition.since, now)]);
    const said = JSON.stringify(texts);
    if (said === this.said) return;
    this.said = said;
    place(this.element, texts.map(([condition, since]) => trouble(condition, since)));
  }
}

function trouble(condition, since) {
  const says = h("span", { class: "trouble-says" }, plain(condition.says || conditionTitle(condition.name)));
  const when = since && h("span", { class: "trouble-since" }, since);
  const advice = condition.do && h("span", { class: "trouble-do" }, plain(condition.do));
  return h("li", {}, says, when || undefined, advice || undefined);
}

function sinceText(since, now) {
  return since === undefined ? "" : `since ${moment(since)}, for ${duration(now - since)}`;
}

export function brokenText(one) {
  const [first, ...others] = one.conditions;
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

// The bar: a MIG GPU's instances side by side, each filled by its own use; of a shared GPU whose use is whose.
function segments(one, own) {
  if (one.parts.length) {
    return one.parts.map((part) => {
      const kind = part.isFree ? "segment is-free" : "segment";
      return segment(kind, part.amount, [[!own || own.part === part ? 1 : "rest", part.utilization]]);
    });
  }
  const known = one.holders.filter((holder) => holder.utilization !== undefined);
  if (one.holders.length < 2 || !known.length) return [segment("segment", 1, [[1, one.utilization]])];
  const fills = one.holders.map((holder, i) => [!own || holder === own ? (i % TINTS) + 1 : "rest", holder.utilization]);
  const rest = one.utilization - known.reduce((sum, holder) => sum + holder.utilization, 0);
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

export function idleText(one, now) {
  if (!one.isIdle) return "";
  return one.idleSince ? `idle ${duration(now - one.idleSince)}` : "idle";
}

// Made once for each device of a picture: there are thousands, and filters show them again and again.
export function labelOf(one, now) {
  one.label ??= label(one, now);
  return one.label;
}

function label(one, now) {
  const names = (holders) => holders.map((holder) => plain(holder.name)).join(", ");
  const who = one.held
    ? `held by ${names(one.holders)}`
    : one.lastHolders.length
      ? `last held by ${names(one.lastHolders)}`
      : holderText(one).toLowerCase();
  const wrong = one.broken ? `broken: ${brokenText(one)}` : "";
  const load = one.absent || one.gone ? "" : percent(one.utilization);
  const said = [`${one.name} of ${plain(one.node)}`, plain(one.model), wrong, load, who, idleText(one, now)];
  if (one.parts.length) said.push(`${count(one.parts.length)} instances`);
  return [...said, one.old ? "old figures" : ""].filter(Boolean).join(", ");
}
