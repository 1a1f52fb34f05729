// Assembles the page. The feed delivers the state, and the page's address determines what is shown.

import { answerOf } from "./ask.js";
import { Card } from "./card.js";
import { Cost } from "./cost.js";
import { SmallCosts } from "./cost_chart.js";
import {
  isFiltered,
  isList,
  jobOf,
  matching,
  neighbours,
  pageOf,
  pagePath,
  placeOf,
  pastTime,
  readHash,
  sorted,
  viewPath,
  VIEWS,
  without,
  writeHash,
  wrongText,
} from "./criteria.js";
import { devicesOf } from "./devices.js";
import { byId, h, place, plain, setAttribute, setText } from "./dom.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import { Filters } from "./filters.js";
import { count, moment, parts, percent, perHour, plural } from "./format.js";
import { GpuView } from "./gpu.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { JobView } from "./job.js";
import { Keys } from "./keys.js";
import { hasPods, Nodes, NodeView } from "./nodes.js";
import { NO_FIGURES, Overview, unpricedText } from "./overview.js";
import { Past, rejection } from "./past.js";
import { PodView } from "./pod.js";
import { Pods } from "./pods.js";
import { Queue } from "./queue.js";
import { showText } from "./rows.js";
import { Savings } from "./savings.js";
import { startTheme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { totalsOf, totalsOfServer } from "./totals.js";

const MOST_TILES = 400; // more GPUs are shown as a heat map
const WRITE_AFTER_MS = 150;
const AWAY_STEPS = 2; // if the page was hidden for more sparkline steps than this, the gap is filled from the server
const YOUNG_SECONDS = 600;
const TYPING_MS = 400;

class Page {
  constructor() {
    this.history = new History();
    this.criteria = readHash(location.hash);
    this.feed = new Feed(
      viewPath(),
      (picture) => this.take(picture),
      () => this.turned(),
    );
    this.list = { ...this.criteria, pod: "", job: "", gpu: "", view: "" }; // criteria of the last list of GPUs, for the way back
    this.listTop = 0;
    this.trail = []; // addresses of the previous views, to which Escape returns
    this.devices = [];
    const prices = () => this.feed.picture.currency ?? "";
    const context = {
      history: this.history,
      now: () => this.feed.picture.taken_at,
      clock: () => this.feed.now(),
      interval: () => Math.max(this.feed.picture.interval_seconds ?? 0, this.feed.pause),
      prices,
      currency: () => (this.criteria.cost ? prices() : undefined), // tiles show costs only on request
    };
    const again = () => this.render(false);
    const order = (by) => this.change({ order: by });
    this.overview = new Overview((state) => this.go({ ...this.list, state }));
    this.filters = new Filters((changed, isTyping) => this.change(changed, isTyping));
    this.tiles = new Tiles(context);
    this.card = new Card(context);
    this.map = new HeatMap(context, this.card);
    this.pod = new PodView(context, again);
    this.job = new JobView(context, order, again);
    this.gpu = new GpuView(context, again);
    this.node = new NodeView(context, order, again);
    this.pods = new Pods(context, order, again);
    this.nodes = new Nodes(context, order);
    this.cost = new Cost(order, again);
    this.savings = new Savings(again);
    this.queue = new Queue(again);
    this.smallCosts = new SmallCosts(byId("small-costs"), again);
    this.events = new Events(again);
    this.past = new Past(
      () => this.feed.now(),
      (at) => (location.hash = writeHash(this.criteria, at)),
      again,
    );
    this.main = byId("main");
    this.message = h("p", { class: "message" });
    this.keys = new Keys(
      this.main,
      byId("q"),
      byId("help"),
      () => this.escape(),
      (last) => this.map.reach(last),
    );
    startTheme(byId("theme"));
    byId("help-open").addEventListener("click", () => byId("help").showModal());
    byId("skip").addEventListener("click", () => this.main.focus());
    document.addEventListener("click", () => this.writeAddress(), { capture: true });
    addEventListener("hashchange", () => this.follow());
  }

  start() {
    this.fillHistory();
    this.feed.start();
    setInterval(() => this.overview.showState(this.feed), 1000);
  }

  // Fills the sparklines from the server's history, if it has one.
  async fillHistory() {
    this.filledAt = this.feed.now();
    const { state, data } = await answerOf("api/v1/history", AbortSignal.timeout(20_000));
    this.hasHistory = state === "ready" && this.history.seed(data);
    if (!this.hasHistory || !this.feed.picture) return;
    if (!pastTime()) this.history.add(this.feed.now(), this.devices);
    this.render(false);
  }

  // True if the view of the time in the address has arrived.
  get isCurrent() {
    return (this.feed.picture?.at ?? "") === (pastTime() && Number(pastTime()));
  }

  take(picture) {
    const first = !this.devices.length;
    this.devices = devicesOf(picture, picture.taken_at);
    this.nodesByName = new Map((picture.nodes ?? []).map((node) => [node.name, node]));
    const now = this.feed.now();
    const away =
      now - (this.takenAt ?? now) >
      Math.max(AWAY_STEPS * this.history.step, 3 * picture.interval_seconds);
    const isYoung = !this.hasHistory && now - this.filledAt > YOUNG_SECONDS; // the server may have a history by now
    this.takenAt = now;
    if (picture.at === undefined) this.history.add(now, this.devices);
    if ((away || isYoung) && !picture.paged) this.fillHistory();
    this.priced = Boolean(picture.currency);
    this.overview.show(
      picture,
      picture.paged ? totalsOfServer(picture) : totalsOf(this.devices, this.priced),
      this.devices,
    );
    this.filters.offerFrom(this.devices, picture, this.criteria);
    const isKube = hasPods(picture);
    setText(byId("tab-pods"), isKube ? "Pods" : "Users");
    setAttribute(byId("q"), "placeholder", `Filter: ${isKube ? "pod" : "user"}, node, model`);
    this.draw(first);
    this.card.refresh(new Map(this.devices.map((device) => [device.key, device])));
    const { figuresAt } = this.feed;
    setText(
      byId("updated"),
      figuresAt === undefined ? NO_FIGURES : `Figures of ${moment(figuresAt)}`,
    );
  }

  turned() {
    this.overview.showState(this.feed);
    if (this.feed.picture && !this.isCurrent) this.render(false);
    if (!this.feed.picture) {
      this.past.show(this.criteria, this.viewOf(this.criteria));
      if (this.feed.isRejected) this.showTabs(this.viewOf(this.criteria), "");
      this.message.replaceChildren(...rejection(this.feed, this.criteria));
      place(this.main, [this.message]);
    }
  }

  go(criteria) {
    location.hash = writeHash(criteria);
  }

  // Each choice, and each completed filter text, is one step in the browser's history. The address is written a moment
  // later, because that is slow in some browsers.
  change(changed, isTyping = false) {
    if (this.writing && !(isTyping && this.isTyping)) this.writeAddress();
    this.criteria = { ...this.criteria, page: "", ...changed };
    clearTimeout(this.writing);
    this.isStep = this.isStep || !isTyping || !this.isTyping;
    this.isTyping = isTyping;
    this.writing = setTimeout(() => this.writeAddress(), WRITE_AFTER_MS);
    this.render(true);
  }

  writeAddress() {
    if (!this.writing) return;
    clearTimeout(this.writing);
    this.writing = undefined;
    const hash = writeHash(this.criteria);
    if (this.isStep) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
    this.isStep = false;
  }

  follow() {
    clearTimeout(this.writing);
    this.writing = undefined;
    this.isTyping = this.isStep = false;
    const before = this.criteria;
    this.criteria = readHash(location.hash);
    this.remember(before);
    if (isList(before) && !isList(this.criteria)) this.listTop = scrollY;
    this.render(true);
    if (isList(this.criteria)) {
      if (!isList(before)) scrollTo(0, this.listTop);
    } else if (placeOf(before) !== placeOf(this.criteria)) {
      scrollTo(0, 0);
    }
  }

  remember(before) {
    const { criteria, trail } = this;
    if (isList(criteria)) trail.length = 0;
    else if (trail.at(-1) === writeHash(criteria)) trail.pop();
    else if (placeOf(before) !== placeOf(criteria)) trail.push(writeHash(before));
  }

  // Returns to the previous view.
  escape() {
    const field = byId("q");
    if (this.card.hide()) return;
    this.writeAddress();
    if (isFiltered(this.criteria) && VIEWS.includes(this.view)) this.change(without(this.criteria));
    else if (!isList(this.criteria)) location.hash = this.trail.at(-1) ?? writeHash(this.list);
    else if (isFiltered(this.criteria)) this.change(without(this.criteria));
    else if (document.activeElement === field) field.blur();
  }

  // Returns the view that the address selects.
  viewOf(criteria) {
    if (criteria.gpu) return "gpu";
    if (criteria.pod) return "pod";
    if (jobOf(criteria.job).name) return "job";
    if (criteria.view === "nodes" && criteria.node) return "node";
    return VIEWS.includes(criteria.view) ? criteria.view : "";
  }

  // Returns the title of a view; empty for the list of GPUs.
  titleOf(view) {
    const { gpu, pod, job, node } = this.criteria;
    if (VIEWS.includes(view)) return byId(`tab-${view}`).firstChild.textContent.trim();
    const device = view === "gpu" && this.devices.find((each) => each.uuid === gpu.split("/")[0]);
    if (device) return `${device.name} of ${plain(device.node)}`;
    return view ? plain({ gpu, pod, job, node }[view]) : "";
  }

  render(anew) {
    if (!this.feed.picture) return this.feed.aim(viewPath());
    try {
      this.draw(anew);
    } catch (error) {
      this.feed.fail(error);
      this.overview.showState(this.feed);
    }
  }

  draw(anew) {
    const { picture } = this.feed;
    const { criteria } = this;
    const view = this.viewOf(criteria);
    if (!view)
      this.list = { ...criteria, view: "", range: "", from: "", to: "", by: "", order: "" };
    const at = this.main.getBoundingClientRect();
    if (this.view && this.view !== view) this[this.view].leave?.();
    this.view = view;
    if (picture.paged ? anew || !this.isAimed : this.feed.url !== viewPath())
      this.aim(picture.paged);
    this.past.show(criteria, view, this.isCurrent ? picture : undefined);
    this.showPager(picture, view);
    this.overview.showChosen(criteria, !view ? "list" : VIEWS.includes(view) ? "table" : "one");
    this.smallCosts.show(!view && !pastTime());
    this.overview.showTitle(picture, this.titleOf(view));
    this.filters.show(criteria, view);
    showText(byId("wrong"), wrongText(criteria));
    byId("controls").hidden = view !== "" && !VIEWS.includes(view);
    byId("shown").hidden = true;
    this.showTabs(view);
    this.showWaiting(picture, view);
    if (this.isCurrent) this.showView(view, picture, anew, at);
    else this.clear();
    if (!this.map.element.isConnected) this.card.hide();
    this.keys.refresh();
  }

  // `at`: the time of the views to which the tabs lead; an empty text is now.
  showTabs(view, at) {
    byId("views").hidden = false;
    setAttribute(byId("status-text"), "href", writeHash({}, at));
    for (const name of ["", ...VIEWS]) {
      setAttribute(
        byId(`tab-${name || "gpus"}`),
        "href",
        writeHash(name ? { view: name } : this.list, at),
      );
      setAttribute(
        byId(`tab-${name || "gpus"}`),
        "aria-current",
        name === view ? "page" : undefined,
      );
    }
  }

  // Shows in the tab how many pods wait for GPUs, if the server reads them.
  showWaiting({ scope, setup = [] }, view) {
    const isRead = scope === "cluster" && !setup.some(({ missing }) => missing === "queue");
    const pods = isRead || view === "queue" ? this.queue.count(view === "queue") : undefined;
    this.waiting = pods;
    byId("queue-count").hidden = !pods;
    setText(byId("queue-count"), pods ? count(pods) : "");
    setAttribute(
      byId("tab-queue"),
      "title",
      pods ? `${plural(pods, "pod")} ${pods === 1 ? "waits" : "wait"} for GPUs` : undefined,
    );
  }

  // There is no view of this time yet, or no record of it.
  clear() {
    for (const id of ["overview", "alerts", "notes", "controls"]) byId(id).hidden = true;
    this.message.replaceChildren(
      ...(this.feed.isRejected ? rejection(this.feed, this.criteria) : ["Loading"]),
    );
    place(this.main, [this.message]);
  }

  // Requests the nodes that the address selects, if the server does not list all of them. Waits while the user is typing.
  aim(isPaged) {
    this.isAimed = isPaged;
    clearTimeout(this.aiming);
    this.aiming = setTimeout(
      () => this.feed.aim(isPaged ? pagePath(this.criteria) : viewPath()),
      this.isTyping ? TYPING_MS : 0,
    );
  }

  showPager({ paged, found, nodes }, view) {
    const pager = byId("pager");
    pager.hidden = !paged || found === undefined || !["", "pods", "nodes"].includes(view);
    if (pager.hidden) return;
    const links = neighbours(this.criteria, found);
    setText(
      byId("pager-text"),
      `${count(nodes.length)} of ${plural(found, "node")} with such GPUs, page ${count(pageOf(this.criteria))}`,
    );
    ["previous", "next"].forEach((name, i) => {
      byId(`pager-${name}`).hidden = !links[i];
      setAttribute(byId(`pager-${name}`), "href", links[i]);
    });
  }

  showView(view, picture, anew, at) {
    const { criteria, devices } = this;
    const back = writeHash(this.list);
    if (view === "gpu")
      this.gpu.show(
        devices,
        criteria,
        back,
        hasPods(picture, devices.find((device) => criteria.gpu.startsWith(device.uuid))?.node),
      );
    else if (view === "pod") this.pod.show(devices, criteria, back);
    else if (view === "job") this.job.show(devices, criteria);
    else if (view === "node") this.node.show(picture, devices, criteria, anew);
    else if (view === "nodes") this.nodes.show(picture, devices, criteria);
    else if (view === "pods") this.pods.show(devices, criteria, hasPods(picture), picture);
    else if (view === "cost")
      this.cost.show(criteria, hasPods(picture), this.feed.now(), picture.scope === "cluster");
    else if (view === "savings") this.savings.show(criteria, this.waiting);
    else if (view === "queue") this.queue.show(criteria);
    else if (view === "events") this.events.show(criteria, hasPods(picture), this.feed.now());
    else return this.showDevices(anew, at);
    place(this.main, [this[view].element]);
  }

  showDevices(anew, at) {
    const { criteria } = this;
    const found = sorted(matching(this.devices, criteria), criteria.sort);
    if (isFiltered(criteria) && !this.feed.picture.paged) this.showCount(found);
    if (!found.length) {
      setText(this.message, emptyText(this.devices, criteria));
      place(this.main, [this.message]);
    } else if (isMap(found, criteria)) {
      place(this.main, [this.map.element]);
      this.map.show(found, this.nodesByName, anew, at);
    } else {
      place(this.main, [this.tiles.element]);
      this.tiles.show(found, this.nodesByName, !criteria.sort, anew);
    }
  }

  showCount(found) {
    const totals = totalsOf(found, this.priced);
    const { currency } = this.feed.picture;
    const texts = [`${count(found.length)} of ${plural(this.devices.length, "GPU")}`];
    for (const [name, text] of [
      ["allocated", "allocated"],
      ["used", "used"],
      ["idle", "idle"],
      ["unknown", "use unknown"],
      ["free", "free"],
      ["unheld", "holder unknown"],
      ["broken", "broken"],
    ]) {
      if (totals[name]) texts.push(`${parts(totals[name])} ${text}`);
    }
    if (totals.mean !== undefined) texts.push(`mean of used ${percent(totals.mean)}`);
    if (totals.cost) texts.push(perHour(totals.cost, currency));
    if (totals.unpriced) texts.push(unpricedText(totals.unpriced));
    if (totals.wasted) {
      const wasteText = totals.waste.text(perHour, currency);
      texts.push(`${perHour(totals.wasted, currency)} wasted (${wasteText})`);
    }
    byId("shown").hidden = false;
    setText(byId("shown"), texts.join(" \u00b7 "));
  }
}

// Returns whether to show the heat map. It is always ordered by node, so sorted lists are shown as tiles.
function isMap(found, criteria) {
  if (criteria.sort) return false;
  return criteria.show ? criteria.show === "map" : found.length > MOST_TILES;
}

function emptyText(devices, criteria) {
  if (devices.length && criteria.state === "broken") return "No GPU is broken.";
  if (devices.length || isFiltered(criteria))
    return "No GPU matches the filter. Press Escape to clear it.";
  return "No GPU to show. See the notes above for the reason.";
}

new Page().start();
