// One GPU: its figures, and whoever holds it or a part of it.

import { podHash } from "./criteria.js";
import { h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { celsius, count, duration, memory, memoryOf, moment, percent, watts } from "./format.js";
import { holderKey, ownUtilization, Sparkline } from "./history.js";

const LONGEST_GAP_TURNS = 4;
const TINTS = 4;

export class Tile {
  // `context`: history, now(), span(), pause(). `chosen` of a pod's own view: whose line and rows it is about.
  constructor(context, chosen) {
    this.context = context;
    this.chosen = chosen;
    this.node = h("bdi", { class: "tile-node" });
    this.name = h("span", { class: "tile-name" });
    this.model = h("bdi", { class: "tile-model" });
    this.badge = h("span", { class: "badge badge-idle" });
    this.ratio = h("span", { class: "tile-ratio" });
    this.whole = h("span", { class: "tile-whole" });
    this.spark = new Sparkline("Utilisation in the last minutes");
    this.bar = h("div", { class: "bar", "aria-hidden": "true" });
    this.memory = new Figure("Memory");
    this.power = new Figure("Power");
    this.temperature = new Figure("Temperature");
    this.gauge = h("span", { class: "gauge-fill" });
    this.rows = h("ul", { class: "rows" });
    this.rowList = [];
    this.element = h(
      "article",
      { class: "tile", tabindex: "-1" },
      h("div", { class: "tile-head" }, this.name, this.model, this.node, this.badge),
      h("div", { class: "tile-load" }, this.ratio, this.whole, this.spark.element),
      this.bar,
      h("dl", { class: "figures" }, this.memory.element, this.power.element, this.temperature.element),
      h("span", { class: "gauge", "aria-hidden": "true" }, this.gauge),
      this.rows,
    );
    this.charts = chosen ? new Charts(this.element) : undefined;
  }

  update(one, showNode) {
    this.device = one;
    setClass(this.element, `tile is-${one.colour}${one.old ? " is-old" : ""}${showNode ? " has-node" : ""}`);
    setAttribute(this.element, "data-key", one.key);
    setAttribute(this.element, "aria-label", labelOf(one, this.context.now()));
    setText(this.name, one.name);
    setText(this.model, plain(one.model));
    setAttribute(this.name, "title", plain(one.uuid));
    setText(this.node, showNode ? plain(one.node) : "");
    this.updateBadge(one);
    const own = this.chosen && one.holders.length > 1 ? one.holders.find(this.chosen) : undefined;
    setText(this.ratio, percent(own ? ownUtilization(one, own) : one.utilization));
    setAttribute(this.ratio, "title", one.parts.length && !own ? "Mean of its instances, by compute slices" : undefined);
    showText(this.whole, own ? `of ${percent(one.utilization)} in all` : "");
    place(this.bar, segments(one, own));
    this.memory.show(memoryOf(one.memoryUsed, one.memoryTotal));
    this.power.show(watts(one.power));
    this.temperature.show(celsius(one.temperature));
    this.gauge.style.width = `${100 * Math.min(1, one.memoryUsed / one.memoryTotal || 0)}%`;
    this.updateRows(one);
    this.draw(one, own);
  }

  updateRows(one) {
    const said = rowsOf(one, this.chosen);
    while (this.rowList.length < said.length) this.rowList.push(new Row());
    this.rowList.length = said.length;
    said.forEach((row, i) => this.rowList[i].show(one, row, this.chosen, this.context.now()));
    place(this.rows, this.rowList.map((row) => row.element));
  }

  updateBadge(one) {
    const text = idleText(one, this.context.now());
    this.badge.hidden = !text;
    setText(this.badge, text);
    setAttribute(this.badge, "title", one.idleSince ? `Idle since ${moment(one.idleSince)}` : "Idle now");
  }

  draw(one, own) {
    const { history } = this.context;
    const gap = LONGEST_GAP_TURNS * this.context.pause();
    const key = own ? holderKey(one, own) : `${one.key} utilization`;
    this.spark.draw(history.points(key), this.context.span(), 1, gap);
    this.charts?.draw(one, this.context, gap);
  }
}

// Memory and power over time, in a pod's own view.
class Charts {
  constructor(into) {
    this.memory = new Sparkline("Memory used in the last minutes");
    this.power = new Sparkline("Power in the last minutes");
    const chart = (name, line) => h("figure", {}, h("figcaption", {}, name), line.element);
    into.append(h("div", { class: "charts" }, chart("Memory", this.memory), chart("Power", this.power)));
  }

  draw(one, { history, span }, gap) {
    this.memory.draw(history.points(`${one.key} memory`), span(), one.memoryTotal, gap);
    const power = history.points(`${one.key} power`);
    const most = power.reduce((top, [, value]) => (value > top ? value : top), 1);
    this.power.draw(power, span(), most * 1.15, gap);
  }
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
    const slices = Math.max(7, one.parts.reduce((sum, part) => sum + part.slices, 0));
    return one.parts.map((part) => {
      const kind = part.free ? "segment is-free" : "segment";
      return segment(kind, part.slices / slices, [[!own || own.part === part ? 1 : "rest", part.utilization]]);
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

// What the rows say: every instance with whoever holds it, then whoever holds the GPU itself.
function rowsOf(one, chosen) {
  const rows = [];
  for (const part of one.parts) {
    if (!part.holders.length && !chosen) rows.push({ profile: part.profile, text: freeText(part.free) });
    part.holders.forEach((holder, i) => rows.push({ profile: i ? "" : part.profile, holder }));
  }
  const whole = one.holders.filter((holder) => !holder.part);
  const shared = one.holders.length > 1;
  whole.forEach((holder, i) => rows.push({ tint: shared ? (i % TINTS) + 1 : 0, holder }));
  if (!rows.length) rows.push({ text: freeText(one.free) });
  return rows;
}

function freeText(free) {
  return free ? "Free" : "Nobody is known to hold it";
}

// Kept from picture to picture, so that a link that has the focus does not lose it.
class Row {
  constructor() {
    this.profile = h("span", { class: "profile" });
    this.swatch = h("span", { "aria-hidden": "true" });
    this.namespace = h("bdi", { class: "row-namespace" });
    this.pod = h("bdi", { class: "row-pod" });
    this.link = h("a", {}, this.namespace, this.pod);
    this.container = h("bdi", { class: "row-container" });
    this.name = h("span", { class: "row-name" }, this.link, this.container);
    this.idle = h("span", { class: "row-idle" });
    this.ratio = h("span", { class: "row-figure" });
    this.memory = h("span", { class: "row-figure row-memory" });
    const parts = [this.profile, this.swatch, this.name, this.idle, this.ratio, this.memory];
    this.element = h("li", {}, ...parts);
  }

  show(one, { holder, profile = "", tint = 0, text = "" }, chosen, now) {
    const kind = holder ? (chosen && !chosen(holder) ? "row row-other" : "row") : "row row-free";
    setClass(this.element, kind);
    showText(this.profile, plain(profile));
    this.swatch.hidden = !tint;
    setClass(this.swatch, `swatch tint-${tint}`);
    this.showName(holder, text);
    const alone = !holder || (one.holders.length < 2 && !one.parts.length);
    const idle = alone || one.idle || holder.idleSince === undefined ? "" : `idle ${duration(now - holder.idleSince)}`;
    showText(this.idle, idle);
    const repeats = alone && (one.utilization !== undefined || holder?.utilization === undefined);
    showText(this.ratio, repeats || idle ? "" : percent(ownUtilization(one, holder)));
    showText(this.memory, alone ? "" : memory(holder.memory ?? holder.part?.memoryUsed));
  }

  showName(holder, text) {
    const linked = Boolean(holder?.pod);
    setAttribute(this.link, "href", linked ? podHash(holder.namespace, holder.pod) : undefined);
    showText(this.namespace, linked && holder.namespace ? `${plain(holder.namespace)}/` : "");
    setText(this.pod, plain(linked ? holder.pod : (holder?.name ?? text)));
    showText(this.container, plain(holder?.container ?? ""));
    const full = holder && plain([holder.name, holder.container].filter(Boolean).join("/"));
    setAttribute(this.name, "title", full);
  }
}

function showText(element, text) {
  element.hidden = !text;
  setText(element, text);
}

export function idleText(one, now) {
  if (!one.idle) return "";
  return one.idleSince ? `idle ${duration(now - one.idleSince)}` : "idle";
}

// Made once for each device of a picture: there are thousands, and filters show them again and again.
export function labelOf(one, now) {
  one.label ??= label(one, now);
  return one.label;
}

function label(one, now) {
  const who = one.holders.length
    ? `held by ${one.holders.map((holder) => plain(holder.name)).join(", ")}`
    : freeText(one.free).toLowerCase();
  const said = [`${one.name} of ${plain(one.node)}`, plain(one.model), percent(one.utilization), who, idleText(one, now)];
  if (one.parts.length) said.push(`${count(one.parts.length)} instances`);
  return [...said, one.old ? "old figures" : ""].filter(Boolean).join(", ");
}

