// Tiles grouped by node, or ungrouped if they are sorted. More tiles are added on scrolling, to
// keep the page fast.

import { goneText } from "./conditions.js";
import { groupedByNode, holderHash, nodeHash, pastTime } from "./criteria.js";
import { coded, h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { duration, listed, localTimes, parts, plural } from "./format.js";
import { Tile } from "./tile.js";
import { refusedText, sumOf } from "./totals.js";

const AT_ONCE = 32;
const MOST_PODS = 8;

export class Tiles {
  constructor(context) {
    this.context = context;
    this.tiles = new Map();
    this.sections = new Map();
    this.limit = AT_ONCE;
    this.more = h("button", { type: "button", class: "more" });
    this.more.addEventListener("click", () => this.showMore());
    this.list = h("div", { class: "nodes" });
    this.element = h("div", {}, this.list, this.more);
    const observe = (entries) => {
      if (entries.some((entry) => entry.isIntersecting)) this.showMore();
    };
    new IntersectionObserver(observe, { rootMargin: "400px" }).observe(this.more);
  }

  showMore() {
    if (!this.shown || this.shown.devices.length <= this.limit) return;
    this.limit += AT_ONCE;
    this.render();
  }

  // `nodes` maps names to nodes of the view. `byNode` groups the tiles under headings.
  show(devices, nodes, byNode, anew) {
    if (anew) this.limit = AT_ONCE;
    this.shown = { devices, nodes, byNode };
    this.render();
  }

  render() {
    const { devices, nodes, byNode } = this.shown;
    const drawn = devices.slice(0, this.limit);
    const groups = byNode ? groupedByNode(drawn) : new Map([["", drawn]]);
    const spare = this.spare(drawn);
    const tiles = new Map();
    const sections = new Map();
    for (const [name, members] of groups) {
      const section = this.sections.get(name) ?? new NodeSection();
      const node = byNode ? nodes.get(name) : undefined;
      section.show(node, members);
      sections.set(name, section);

      const tiled = section.isGone ? [] : members;
      const own = tiled.map((device) => this.tile(device, spare, !byNode));
      for (const tile of own) tiles.set(tile.device.key, tile);
      place(
        section.grid,
        own.map((tile) => tile.element),
      );
    }
    this.tiles = tiles;
    this.sections = sections;
    const elements = [...sections.values()].map((section) => section.element);
    place(this.list, elements);
    this.more.hidden = devices.length <= this.limit;
    setText(this.more, `Show more: ${plural(devices.length - this.limit, "GPU")} left`);
  }

  // Reuses tiles that are no longer shown, because creating one is slower than filling it.
  spare(devices) {
    const wanted = new Set(devices.map((device) => device.key));
    const unused = [...this.tiles].filter(([key]) => !wanted.has(key)).map(([, tile]) => tile);
    return unused.filter((tile) => !tile.element.contains(document.activeElement));
  }

  tile(device, spare, showNode) {
    const tile = this.tiles.get(device.key) ?? spare.pop() ?? new Tile(this.context);
    tile.update(device, showNode);
    return tile;
  }
}

class NodeSection {
  constructor() {
    this.name = h("bdi");
    this.link = h("a", {}, this.name);
    this.about = h("span", { class: "node-about" });
    this.age = h("span", { class: "badge badge-old", hidden: true });
    this.notes = h("ul", { class: "node-notes", hidden: true });
    this.head = h("div", { class: "node-head" }, h("h2", {}, this.link), this.age, this.about);
    this.pods = h("p", { class: "node-about" });
    this.grid = h("div", { class: "tiles" });
    this.element = h("section", { class: "node" }, this.head, this.notes, this.pods, this.grid);
  }

  // A node that does not respond is shown as one row with its pods, because its GPUs have no
  // figures.
  show(node, members) {
    this.head.hidden = !node;
    this.isGone = Boolean(node?.gone);
    this.pods.hidden = !this.isGone;
    if (!node) return;
    setText(this.name, plain(node.name));
    setAttribute(this.link, "href", nodeHash(node.name));
    if (this.isGone) this.showPods(members);
    setClass(this.element, nodeClass("node", node));
    setText(this.about, aboutText(members));
    this.showAge(node);
    showNotes(this.notes, node.notes);
  }

  showAge(node) {
    this.age.hidden = !node.old && !node.gone;
    setClass(this.age, node.gone ? "badge badge-broken" : "badge badge-old");
    setText(this.age, node.gone ? goneText(node) : oldText(node));
  }

  showPods(members) {
    const pods = podsOf(members);
    const written = [pastTime(), ...pods.map((holder) => holder.name)].join("\n");
    if (written === this.writtenPods) return;
    this.writtenPods = written;
    if (!pods.length) {
      this.pods.replaceChildren("No pod held its GPUs.");
      return;
    }
    const content = [];
    for (const holder of pods.slice(0, MOST_PODS)) {
      content.push(content.length ? ", " : "Held by ", podLink(holder));
    }
    if (pods.length > MOST_PODS) content.push(` and ${pods.length - MOST_PODS} more`);
    this.pods.replaceChildren(...content);
  }
}

// Returns the class of an element that shows a node.
export function nodeClass(name, node) {
  if (node.gone) return `${name} is-gone`;
  return node.old ? `${name} is-old` : name;
}

// Shows the notes of a node as a list.
export function showNotes(list, notes = []) {
  list.hidden = !notes.length;
  const items = notes.map((text) => h("li", {}, ...coded(localTimes(text))));
  place(list, items);
}

function podLink(holder) {
  return h("a", { href: holderHash(holder) }, h("bdi", {}, plain(holder.name)));
}

function podsOf(members) {
  const holders = members.flatMap((device) => (device.held ? device.holders : device.lastHolders));
  return [...new Map(holders.map((holder) => [holder.name, holder])).values()];
}

function aboutText(members) {
  const allocated = sumOf(members.map((device) => device.amounts.allocated));
  const broken = members.filter((device) => device.broken).length;
  const refused = members.filter((device) => device.refused).length;
  return listed([
    plural(members.length, "GPU"),
    `${parts(allocated)} allocated`,
    broken && `${broken} broken`,
    refusedText({ kubernetes_unhealthy: refused }),
  ]);
}

function oldText(node) {
  if (node.age_seconds === undefined) return "old";
  return `old: last seen ${duration(node.age_seconds)} ago`;
}
