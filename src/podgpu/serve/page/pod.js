// A pod's own view: every GPU it holds, wherever, with its figures.

import { podDevices } from "./criteria.js";
import { h, place, plain, setAttribute, setText } from "./dom.js";
import { duration, energy, memory, percent, plural, watts } from "./format.js";
import { ownUtilization } from "./history.js";
import { Tile } from "./tile.js";

export class PodView {
  constructor(context) {
    this.context = context;
    this.tiles = new Map();
    this.namespace = h("bdi", { class: "row-namespace" });
    this.name = h("bdi");
    this.facts = h("dl", { class: "facts" });
    this.none = h("p", { class: "message" }, "This pod holds no GPU now.");
    this.grid = h("div", { class: "tiles tiles-wide" });
    this.back = h("a", { href: "#", class: "back" }, "All GPUs");
    const title = h("h2", { class: "pod-title" }, this.namespace, h("span", { class: "slash" }, "/"), this.name);
    this.element = h("div", { class: "pod" }, this.back, title, this.facts, this.none, this.grid);
  }

  // `back`: where "All GPUs" leads.
  show(devices, path, back) {
    setAttribute(this.back, "href", back);
    const [namespace, pod] = splitPath(path);
    if (path !== this.path) this.tiles = new Map();
    this.path = path;
    setText(this.namespace, plain(namespace));
    setText(this.name, plain(pod));
    const isOwn = (holder) => holder.pod === pod && holder.namespace === namespace;
    const held = podDevices(devices, namespace, pod);
    this.none.hidden = held.length > 0;
    this.facts.hidden = !held.length;
    place(this.facts, factsOf(held, isOwn, this.context.now()));
    place(this.grid, held.map((one) => this.tile(one, isOwn)));
  }

  tile(one, isOwn) {
    let tile = this.tiles.get(one.key);
    if (!tile) this.tiles.set(one.key, (tile = new Tile(this.context, isOwn)));
    tile.update(one, true);
    return tile.element;
  }
}

// A namespace has no slash; a name that breaks the rules may have.
function splitPath(path) {
  const at = path.indexOf("/");
  return at < 0 ? ["", path] : [path.slice(0, at), path.slice(at + 1)];
}

function factsOf(held, isOwn, now) {
  const own = held.flatMap((one) => one.holders.filter(isOwn).map((holder) => [one, holder]));
  const busy = sum(own, ([one, holder]) => ownUtilization(one, holder));
  const used = sum(own, ([one, holder]) => holder.memory ?? holder.part?.memoryUsed ?? onlyHolder(one)?.memoryUsed);
  const since = own.map(([, holder]) => holder.idleSince);
  const idle = since.every((at) => at !== undefined) ? Math.max(...since) : undefined;
  const power = sum(held, (one) => onlyHolder(one)?.power);
  return [
    fact("Holds", `${plural(held.length, "GPU")} on ${plural(new Set(held.map((one) => one.node)).size, "node")}`),
    fact("Mean utilisation", percent(busy.known ? busy.total / busy.known : undefined)),
    fact("Memory used", memory(used.known ? used.total : undefined)),
    power.known === held.length && fact("Power", watts(power.total)),
    known(own, "busySeconds", "Busy", duration),
    known(own, "energy", "Energy", energy),
    idle !== undefined && fact("Idle for", duration(now - idle)),
  ].filter(Boolean);
}

function onlyHolder(one) {
  return one.holders.length === 1 ? one : undefined;
}

function known(own, name, title, write) {
  const all = sum(own, ([, holder]) => holder[name]);
  return all.known ? fact(title, write(all.total)) : false;
}

function sum(of, value) {
  let total = 0;
  let known = 0;
  for (const one of of) {
    const amount = value(one);
    if (amount === undefined) continue;
    total += amount;
    known += 1;
  }
  return { total, known };
}

function fact(title, text) {
  return h("div", {}, h("dt", {}, title), h("dd", {}, text));
}
