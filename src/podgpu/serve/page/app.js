// Puts the page together: the feed brings pictures, the address says what to show of them.

import { Card } from "./card.js";
import { isFiltered, matching, readHash, sorted, without, writeHash } from "./criteria.js";
import { devicesOf, totalsOf } from "./devices.js";
import { byId, h, place, setAttribute, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { Filters } from "./filters.js";
import { count, moment, percent, plural } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { Keys } from "./keys.js";
import { Namespaces } from "./namespaces.js";
import { NO_FIGURES, Overview } from "./overview.js";
import { PodView } from "./pod.js";
import { startTheme } from "./theme.js";
import { Tiles } from "./tiles.js";

const MOST_TILES = 400; // more than that, and squares say more
const LONGEST_SPAN = 600;
const SHORTEST_SPAN = 60;
const WRITE_AFTER_MS = 150;

class Page {
  constructor() {
    this.history = new History();
    this.feed = new Feed("api/v1/view", (picture) => this.take(picture), () => this.turned());
    this.criteria = readHash(location.hash);
    this.list = { ...this.criteria, pod: "", view: "" }; // as the list of GPUs was last looked at
    this.devices = [];
    const context = {
      history: this.history,
      now: () => this.feed.picture.taken_at,
      pause: () => this.feed.pause,
      span: () => this.span,
    };
    this.overview = new Overview((state) => this.change({ ...this.list, state }));
    this.filters = new Filters((changed) => this.change(changed));
    this.tiles = new Tiles(context);
    this.card = new Card(context);
    this.map = new HeatMap(context, this.card);
    this.pod = new PodView(context);
    this.namespaces = new Namespaces();
    this.main = byId("main");
    this.message = h("p", { class: "message" });
    this.keys = new Keys(this.main, byId("q"), () => this.escape(), (last) => this.map.reach(last));
    startTheme(byId("theme"));
    byId("skip").addEventListener("click", () => this.main.focus());
    document.addEventListener("click", () => this.writeAddress(), { capture: true });
    addEventListener("hashchange", () => this.follow());
  }

  start() {
    this.feed.start();
    setInterval(() => this.overview.showState(this.feed), 1000);
  }

  take(picture) {
    const first = !this.devices.length;
    this.devices = devicesOf(picture, picture.taken_at);
    this.nodes = new Map((picture.nodes ?? []).map((node) => [node.name, node]));
    this.history.add(this.feed.now(), this.devices);
    this.span = Math.min(LONGEST_SPAN, Math.max(SHORTEST_SPAN, this.history.seconds()));
    this.totals = totalsOf(this.devices);
    this.overview.show(picture, this.totals);
    this.filters.offerFrom(this.devices, picture, this.criteria);
    this.render(first);
    this.card.refresh(new Map(this.devices.map((one) => [one.key, one])));
    const { figuresAt } = this.feed;
    setText(byId("updated"), figuresAt === undefined ? NO_FIGURES : `Figures of ${moment(figuresAt)}`);
  }

  turned() {
    this.overview.showState(this.feed);
    if (!this.feed.picture) {
      setText(this.message, this.feed.failure);
      place(this.main, [this.message]);
    }
  }

  // A step in what is shown goes into the browser's history; a filter only changes the address, a moment later: that is
  // slow in some browsers.
  change(changed) {
    this.criteria = { ...this.criteria, ...changed };
    clearTimeout(this.writing);
    this.writing = setTimeout(() => this.writeAddress(), WRITE_AFTER_MS);
    this.render(true);
  }

  writeAddress() {
    if (!this.writing) return;
    clearTimeout(this.writing);
    this.writing = undefined;
    history.replaceState(null, "", writeHash(this.criteria));
  }

  follow() {
    clearTimeout(this.writing);
    this.writing = undefined;
    this.criteria = readHash(location.hash);
    if (this.criteria.pod) scrollTo(0, 0);
    this.render(true);
  }

  escape() {
    const field = byId("q");
    if (this.card.hide()) return;
    this.writeAddress();
    if (this.criteria.pod || this.criteria.view) location.hash = writeHash(this.list);
    else if (isFiltered(this.criteria)) this.change(without(this.criteria));
    else if (document.activeElement === field) field.blur();
  }

  render(anew) {
    const { picture } = this.feed;
    if (!picture) return;
    const { criteria } = this;
    const hasNamespaces = (picture.namespaces ?? []).length > 0;
    const isTable = criteria.view === "namespaces" && hasNamespaces && !criteria.pod;
    if (!isTable && !criteria.pod) this.list = { ...criteria, view: "" };
    const place = this.main.getBoundingClientRect();
    this.overview.showChosen(criteria);
    this.filters.show(criteria);
    byId("controls").hidden = false;
    byId("tabs").hidden = !hasNamespaces;
    byId("filters").hidden = isTable || Boolean(criteria.pod);
    byId("shown").hidden = true;
    setAttribute(byId("tab-gpus"), "href", writeHash(this.list));
    setCurrent("tab-gpus", !isTable && !criteria.pod);
    setCurrent("tab-namespaces", isTable);
    if (criteria.pod) this.showPod();
    else if (isTable) this.showNamespaces(picture);
    else this.showDevices(anew, place);
    if (!this.map.element.isConnected) this.card.hide();
    this.keys.refresh();
  }

  showPod() {
    this.pod.show(this.devices, this.criteria.pod, writeHash(this.list));
    place(this.main, [this.pod.element]);
  }

  showNamespaces(picture) {
    this.namespaces.show(picture);
    place(this.main, [this.namespaces.element]);
  }

  showDevices(anew, at) {
    const { criteria } = this;
    const found = sorted(matching(this.devices, criteria), criteria.sort);
    if (isFiltered(criteria)) this.showCount(found);
    if (!found.length) {
      setText(this.message, emptyText(this.devices, criteria));
      place(this.main, [this.message]);
    } else if (isMap(found, criteria)) {
      place(this.main, [this.map.element]);
      this.map.show(found, this.nodes, anew, at);
    } else {
      place(this.main, [this.tiles.element]);
      this.tiles.show(found, this.nodes, !criteria.sort, anew);
    }
  }

  showCount(found) {
    const { gpus, held, idle, mean, old } = totalsOf(found);
    const said = [`${count(found.length)} of ${plural(this.devices.length, "GPU")}`];
    if (gpus) said.push(`${count(held)} allocated`, `${count(idle)} idle`, `mean of used ${percent(mean)}`);
    if (old) said.push(`${count(old)} old`);
    byId("shown").hidden = false;
    setText(byId("shown"), said.join(" \u00b7 "));
  }
}

// A map has no order but that of the nodes; sorted lists are tiles, which have names on them.
function isMap(found, criteria) {
  if (criteria.sort) return false;
  return criteria.show ? criteria.show === "map" : found.length > MOST_TILES;
}

function emptyText(devices, criteria) {
  if (devices.length || isFiltered(criteria)) return "No GPU matches the filter. Press Escape to clear it.";
  return "No GPU to show. The notes above say why, if podgpu knows.";
}

function setCurrent(id, current) {
  if (current) byId(id).setAttribute("aria-current", "page");
  else byId(id).removeAttribute("aria-current");
}

new Page().start();
