// Tiles grouped by node, or ungrouped if they are sorted. More tiles are added on scrolling, to keep the page fast.

import { goneText } from "./conditions.js";
import { groupedByNode, holderHash, nodeHash, pastTime } from "./criteria.js";
import { coded, h, place, plain, setAttribute, setClass, setText } from "./dom.js";
import { duration, localTimes, parts, plural } from "./format.js";
import { Tile } from "./tile.js";
import { refusedText } from "./totals.js";

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
    new IntersectionObserver((seen) => seen.some((s) => s.isIntersecting) && this.showMore(), {
      rootMargin: "400px",
    }).observe(this.more);
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
    const kept = new Map();
    const spare = this.spare(drawn);
    const sections = [];
    for (const [name, members] of groups) {
      const section = this.section(name);
      section.show(byNode ? nodes.get(name) : undefined, members);
      const tiled = section.isGone ? [] : members;
      place(
        section.grid,
        tiled.map((device) => this.tile(device, kept, spare, !byNode)),
      );
      sections.push(section.element);
    }
    this.tiles = kept;
    place(this.list, sections);
    for (const name of this.sections.keys()) if (!groups.has(name)) this.sections.delete(name);
    this.more.hidden = devices.length <= this.limit;
    setText(this.more, `Show more: ${plural(devices.length - this.limit, "GPU")} left`);
  }

  section(name) {
    let section = this.sections.get(name);
    if (!section) this.sections.set(name, (section = new NodeSection(this.context)));
    return section;
  }

  // Reuses tiles that are no longer shown, because creating one is slower than filling it.
  spare(devices) {
    const wanted = new Set(devices.map((device) => device.key));
    const unused = [...this.tiles].filter(([key]) => !wanted.has(key)).map(([, tile]) => tile);
    return unused.filter((tile) => !tile.element.contains(document.activeElement));
  }

  tile(device, kept, spare, showNode) {
    const tile = this.tiles.get(device.key) ?? spare.pop() ?? new Tile(this.context);
    tile.update(device, showNode);
    kept.set(device.key, tile);
    return tile.element;
  }
}

class NodeSection {
  constructor(context) {
    this.context = context;
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

  // A node that does not respond is shown as one row with its pods, because its GPUs have no figures.
  show(node, members) {
    this.head.hidden = !node;
    this.isGone = Boolean(node?.gone);
    this.pods.hidden = !this.isGone;
    if (!node) return;
    setText(this.name, plain(node.name));
    setAttribute(this.link, "href", nodeHash(node.name));
    if (this.isGone) this.showPods(members);
    setClass(this.element, node.gone ? "node is-gone" : node.old ? "node is-old" : "node");
    setText(this.about, aboutText(members));
    this.age.hidden = !node.old && !node.gone;
    setClass(this.age, `badge ${node.gone ? "badge-broken" : "badge-old"}`);
    setText(this.age, node.gone ? goneText(node) : oldText(node));
    const notes = node.notes ?? [];
    this.notes.hidden = !notes.length;
    place(
      this.notes,
      notes.map((text) => h("li", {}, ...coded(localTimes(text)))),
    );
  }

  showPods(members) {
    const pods = podsOf(members);
    const written = [pastTime(), ...pods.map((holder) => holder.name)].join("\n");
    if (written === this.writtenPods) return;
    this.writtenPods = written;
    const links = pods.slice(0, MOST_PODS).flatMap((holder, i) => {
      return [
        i ? ", " : "",
        h("a", { href: holderHash(holder) }, h("bdi", {}, plain(holder.name))),
      ];
    });
    const more = pods.length > MOST_PODS ? ` and ${pods.length - MOST_PODS} more` : "";
    this.pods.replaceChildren(pods.length ? "Held by " : "No pod held its GPUs.", ...links, more);
  }
}

function podsOf(members) {
  const holders = members.flatMap((device) => (device.held ? device.holders : device.lastHolders));
  return [...new Map(holders.map((holder) => [holder.name, holder])).values()];
}

function aboutText(members) {
  const held = members.reduce((sum, device) => sum + device.amounts.allocated, 0);
  const broken = members.filter((device) => device.broken).length;
  const refused = members.filter((device) => device.refused).length;
  const texts = [
    plural(members.length, "GPU"),
    `${parts(held)} allocated`,
    broken ? `${broken} broken` : "",
  ];
  return [...texts, refusedText({ kubernetes_unhealthy: refused })].filter(Boolean).join(", ");
}

function oldText(node) {
  return node.age_seconds === undefined
    ? "old"
    : `old: last seen ${duration(node.age_seconds)} ago`;
}
