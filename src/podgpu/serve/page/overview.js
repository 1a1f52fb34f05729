// The head of the page: what is looked at, how fresh it is, how many GPUs do what.

import { byId, h, place, plain, setAttribute, setText } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";

const COLOURS = [
  ["u4", "80\u2013100\u202f%"],
  ["u3", "60\u201380"],
  ["u2", "40\u201360"],
  ["u1", "20\u201340"],
  ["u0", "0\u201320\u202f%"],
  ["unknown", "not known"],
  ["idle", "idle, allocated"],
  ["free", "free"],
];
const STATE_TEXT = { waiting: "Loading", live: "Live", old: "Old" };
export const NO_FIGURES = "No figures yet";

export class Overview {
  // `onState`: called with the state that a total stands for.
  constructor(onState) {
    this.totals = [
      new Total("", "GPUs", onState),
      new Total("held", "Allocated", onState),
      new Total("used", "Used", onState),
      new Total("free", "Free", onState),
      new Total("idle", "Idle, allocated", onState),
    ];
    this.mean = h("span", { class: "total-value" });
    const mean = h("li", {}, h("div", { class: "total" }, this.mean, h("span", { class: "total-name" }, "Mean of used")));
    place(byId("totals"), [...this.totals.map((total) => total.element), mean]);
    this.spread = COLOURS.map(([colour]) => h("span", { class: `is-${colour}` }));
    place(byId("spread"), this.spread);
    this.notes = new Notes();
    this.legend = COLOURS.map(([colour, text]) => new Entry(colour, text));
    place(byId("legend"), this.legend.map((entry) => entry.element));
  }

  show(picture, counted) {
    const totals = picture.taken_at === undefined ? { colours: {} } : counted; // of nothing, no number is known
    byId("overview").hidden = false;
    setText(byId("scope"), scopeText(picture));
    setAttribute(byId("scope"), "title", scopeText(picture));
    document.title = `${scopeText(picture)} \u00b7 podgpu`;
    byId("simulated").hidden = !picture.simulated;
    const [all, held, used, free, idle] = this.totals;
    all.show(totals.gpus, totals.old ? `${count(totals.old)} more old` : "");
    held.show(totals.held, shareText(totals.held, totals.gpus));
    used.show(totals.used || !totals.unknown ? totals.used : undefined, usedText(totals));
    free.show(totals.free, shareText(totals.free, totals.gpus));
    idle.show(totals.idle, shareText(totals.idle, totals.held, "of allocated"));
    setText(this.mean, percent(totals.mean));
    COLOURS.forEach(([colour], i) => {
      const number = totals.colours[colour] ?? 0;
      this.spread[i].style.flexGrow = number;
      this.spread[i].hidden = !number;
      this.legend[i].show(number);
    });
    this.notes.show(notesOf(picture), !totals.gpus);
  }

  showChosen(criteria) {
    for (const total of this.totals) total.press(!criteria.view && !criteria.pod && criteria.state === total.state);
  }

  showState(feed) {
    const status = byId("status");
    const { state } = feed;
    const age = feed.age === undefined ? "" : `, ${state === "lost" ? "figures " : ""}${duration(feed.age)} old`;
    const lost = feed.lostAt === undefined ? "" : `${feed.failure} ${duration(Date.now() / 1000 - feed.lostAt)} ago`;
    const told = state === "old" && feed.age === undefined ? NO_FIGURES : STATE_TEXT[state];
    const text = state === "lost" ? (feed.failure === "Connection lost" ? lost : feed.failure) : told;
    setText(byId("status-text"), `${text}${state === "waiting" ? "" : age}`);
    if (status.dataset.state !== state) {
      status.dataset.state = state;
      document.body.dataset.feed = state;
      setText(byId("announced"), state === "lost" ? feed.failure : told);
    }
  }
}

class Total {
  constructor(state, name, onState) {
    this.state = state;
    this.value = h("span", { class: "total-value" });
    this.more = h("span", { class: "total-more" });
    this.button = h("button", { type: "button", class: `total total-${state || "all"}` }, this.value, h("span", { class: "total-name" }, name), this.more);
    this.button.addEventListener("click", () => onState(state));
    this.element = h("li", {}, this.button);
  }

  show(number, more) {
    setText(this.value, count(number));
    setText(this.more, more);
    this.button.classList.toggle("is-none", !number);
  }

  press(pressed) {
    setAttribute(this.button, "aria-pressed", String(pressed));
  }
}

class Entry {
  constructor(colour, text) {
    this.number = h("span", { class: "legend-number" });
    this.element = h("li", { class: `legend-${colour}` }, h("span", { class: `key is-${colour}`, "aria-hidden": "true" }), text, " ", this.number);
  }

  show(number) {
    setText(this.number, count(number));
    this.element.classList.toggle("is-none", !number);
  }
}

function scopeText(picture) {
  const nodes = picture.nodes ?? [];
  if (picture.scope === "node" && nodes.length === 1) return plain(nodes[0].name);
  return `Cluster, ${plural(nodes.length, "node")}`;
}

function shareText(part, whole, of = "") {
  return whole ? `${percent(part / whole)} ${of}`.trim() : "";
}

function usedText({ used, unknown, gpus }) {
  return unknown ? `${count(unknown)} not known` : shareText(used, gpus);
}

function notesOf(picture) {
  const ofNodes = (picture.nodes ?? []).flatMap((node) => (node.notes ?? []).map((text) => `${node.name}: ${text}`));
  const old = (picture.nodes ?? []).filter((node) => node.old && node.age_seconds !== undefined);
  const ages = old.map((node) => `${node.name}: old, last seen ${duration(node.age_seconds)} ago`);
  return [...(picture.notes ?? []), ...ages, ...ofNodes];
}

// They unfold by themselves when there is nothing else to see, and fold again when there is.
class Notes {
  constructor() {
    this.element = byId("notes");
    this.unfolded = false;
    this.alone = false;
  }

  show(notes, alone) {
    this.element.hidden = !notes.length;
    setText(byId("notes-summary"), plural(notes.length, "note"));
    place(byId("notes-list"), notes.slice(0, 200).map((text) => h("li", {}, plain(text))));
    if (!notes.length || alone === this.alone) return;
    this.alone = alone;
    if (alone) this.unfolded = !this.element.open;
    if (this.unfolded) this.element.open = alone;
  }
}
