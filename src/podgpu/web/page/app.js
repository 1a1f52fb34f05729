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
import { byId, h, place, plain, setAttribute, setTab, setText, showText } from "./dom.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import { Filters } from "./filters.js";
import { count, dotted, moment, parts, percent, perHour, plural } from "./format.js";
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
import { Savings } from "./savings.js";
import { startTheme } from "./theme.js";
import { Tiles } from "./tiles.js";
import { totalsOf, totalsOfServer } from "./totals.js";

const MOST_TILES = 400; // more GPUs are shown as a heat map
const WRITE_AFTER_MS = 150;
// If the page was hidden for more sparkline steps than this, the gap is filled from the server.
const AWAY_STEPS = 2;
const YOUNG_SECONDS = 600;
const TYPING_MS = 400;
/** @type {[string, string][]} */
const COUNTED = [
  ["allocated", "allocated"],
  ["used", "used"],
  ["idle", "idle"],
  ["unknown", "use unknown"],
  ["free", "free"],
  ["unheld", "holder unknown"],
  ["broken", "broken"],
];

class Page {
  constructor() {
    this.history = new History();
    this.criteria = readHash(location.hash);
    this.feed = new Feed(
      viewPath(),
      (picture) => this.take(picture),
      () => this.turned(),
    );
    // Criteria of the last list of GPUs, for the way back.
    this.list = { ...this.criteria, pod: "", job: "", gpu: "", view: "" };
    this.listTop = 0;
    this.trail = []; // addresses of the previous views, to which Escape returns
    this.devices = [];
    this.main = byId("main");
    this.message = h("p", { class: "message" });
    this.addViews(this.makeContext());
    this.keys = new Keys(
      this.main,
      byId("q"),
      byId("help"),
      () => this.escape(),
      (isLast) => this.map.reach(isLast),
    );
    startTheme(byId("theme"));
    byId("help-open").addEventListener("click", () => byId("help").showModal());
    byId("skip").addEventListener("click", () => this.main.focus());
    document.addEventListener("click", () => this.writeAddress(), { capture: true });
    addEventListener("hashchange", () => this.follow());
  }

  // Returns what views need of the page.
  makeContext() {
    const { feed } = this;
    const prices = () => feed.picture.currency ?? "";
    return {
      history: this.history,
      now: () => feed.picture.taken_at,
      clock: () => feed.now(),
      interval: () => Math.max(feed.picture.interval_seconds ?? 0, feed.pause),
      prices,
      // Tiles show costs only on request.
      currency: () => (this.criteria.cost ? prices() : undefined),
    };
  }

  addViews(context) {
    const again = () => this.render(false);
    const order = (by) => this.change({ order: by });
    const showTime = (at) => (location.hash = writeHash(this.criteria, at));
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
    this.past = new Past(context.clock, showTime, again);
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
    const shown = this.feed.picture?.at;
    return pastTime() ? shown === Number(pastTime()) : shown === undefined;
  }

  // Shows a new view.
  take(picture) {
    const isFirst = !this.devices.length;
    this.devices = devicesOf(picture, picture.taken_at);
    this.nodesByName = new Map((picture.nodes ?? []).map((node) => [node.name, node]));
    this.addToHistory(picture);

    this.priced = Boolean(picture.currency);
    const totals = picture.paged ? totalsOfServer(picture) : totalsOf(this.devices, this.priced);
    this.overview.show(picture, totals, this.devices);
    this.filters.offerFrom(this.devices, picture, this.criteria);
    this.nameHolders(hasPods(picture));
    this.draw(isFirst);
    this.card.refresh(new Map(this.devices.map((device) => [device.key, device])));

    const { figuresAt } = this.feed;
    const isKnown = figuresAt !== undefined;
    setText(byId("updated"), isKnown ? `Figures of ${moment(figuresAt)}` : NO_FIGURES);
  }

  addToHistory(picture) {
    const now = this.feed.now();
    const pause = now - (this.takenAt ?? now);
    const longest = Math.max(AWAY_STEPS * this.history.step, 3 * picture.interval_seconds);
    this.takenAt = now;
    if (picture.at === undefined) this.history.add(now, this.devices);

    const wasAway = pause > longest;
    // A server that started late may have a history by now.
    const mayHaveHistory = !this.hasHistory && now - this.filledAt > YOUNG_SECONDS;
    if ((wasAway || mayHaveHistory) && !picture.paged) this.fillHistory();
  }

  // Without Kubernetes, holders are users.
  nameHolders(isKube) {
    setText(byId("tab-pods"), isKube ? "Pods" : "Users");
    const holder = isKube ? "pod" : "user";
    setAttribute(byId("q"), "placeholder", `Filter: ${holder}, node, model`);
  }

  // Called after each request, also if there is no new view.
  turned() {
    this.overview.showState(this.feed);
    if (this.feed.picture) {
      if (!this.isCurrent) this.render(false);
      return;
    }
    const view = this.viewOf(this.criteria);
    this.past.show(this.criteria, view);
    if (this.feed.isRejected) this.showTabs(view, "");
    this.message.replaceChildren(...rejection(this.feed, this.criteria));
    place(this.main, [this.message]);
  }

  go(criteria) {
    location.hash = writeHash(criteria);
  }

  // Each choice, and each completed filter text, is one step in the browser's history. The address
  // is written a moment later, because that is slow in some browsers.
  change(changed, isTyping = false) {
    const isSameText = isTyping && this.isTyping;
    if (this.writing && !isSameText) this.writeAddress();
    this.criteria = { ...this.criteria, page: "", ...changed };
    clearTimeout(this.writing);
    if (!isSameText) this.isStep = true;
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
    this.isTyping = false;
    this.isStep = false;
    const before = this.criteria;
    this.criteria = readHash(location.hash);
    this.remember(before);

    const wasList = isList(before);
    const isListNow = isList(this.criteria);
    const isOtherPlace = placeOf(before) !== placeOf(this.criteria);
    if (wasList && !isListNow) this.listTop = scrollY;
    this.render(true);
    if (isListNow && !wasList) scrollTo(0, this.listTop);
    if (!isListNow && isOtherPlace) scrollTo(0, 0);
  }

  // Keeps the way back to the list of GPUs.
  remember(before) {
    const { criteria, trail } = this;
    const isBack = trail.at(-1) === writeHash(criteria);
    if (isList(criteria)) trail.length = 0;
    else if (isBack) trail.pop();
    else if (placeOf(before) !== placeOf(criteria)) trail.push(writeHash(before));
  }

  // Clears the filter of a list or a table. Otherwise, returns to the previous view.
  escape() {
    const { criteria } = this;
    const field = byId("q");
    if (this.card.hide()) return;
    this.writeAddress();
    const hasFilter = isList(criteria) || VIEWS.includes(this.view);
    if (hasFilter && isFiltered(criteria)) this.change(without(criteria));
    else if (!isList(criteria)) location.hash = this.trail.at(-1) ?? writeHash(this.list);
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
    if (VIEWS.includes(view)) return byId(`tab-${view}`).firstChild.textContent.trim();
    if (!view) return "";
    const device = view === "gpu" ? this.shownDevice : undefined;
    if (device) return `${device.name} of ${plain(device.node)}`;
    return plain(this.criteria[view]);
  }

  // The GPU in the address, if the server lists it.
  get shownDevice() {
    const [uuid] = this.criteria.gpu.split("/"); // without the MIG instance
    return this.devices.find((device) => device.uuid === uuid);
  }

  // `anew`: the address changed, so the view starts at its beginning.
  render(anew) {
    if (!this.feed.picture) {
      this.feed.aim(viewPath());
      return;
    }
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
    const hasFilter = !view || VIEWS.includes(view);
    if (!view)
      this.list = { ...criteria, view: "", range: "", from: "", to: "", by: "", order: "" };
    // Measured before anything changes: later, the browser would lay the page out twice.
    const measured = this.main.getBoundingClientRect();
    if (this.view && this.view !== view) this[this.view].leave?.();
    this.view = view;
    this.aimAgain(picture.paged, anew);

    this.past.show(criteria, view, this.isCurrent ? picture : undefined);
    this.showPager(picture, view);
    this.overview.showChosen(criteria, kindOf(view));
    this.overview.showTitle(picture, this.titleOf(view));
    this.smallCosts.show(!view && !pastTime());
    this.filters.show(criteria, view);
    byId("controls").hidden = !hasFilter;
    byId("shown").hidden = true;
    showText(byId("wrong"), wrongText(criteria));
    this.showTabs(view);
    this.showWaiting(picture, view);

    if (!this.isCurrent) this.clear();
    else if (view) this.showView(view, picture, anew);
    else this.showDevices(anew, measured);
    if (!this.map.element.isConnected) this.card.hide();
    this.keys.refresh();
  }

  // `at`: the time of the views to which the tabs lead; an empty text is now.
  showTabs(view, at) {
    byId("views").hidden = false;
    setAttribute(byId("status-text"), "href", writeHash({}, at));
    setTab(byId("tab-gpus"), writeHash(this.list, at), view === "");
    for (const name of VIEWS) {
      setTab(byId(`tab-${name}`), writeHash({ view: name }, at), name === view);
    }
  }

  // Shows in the tab how many pods wait for GPUs, if the server reads them.
  showWaiting({ scope, setup = [] }, view) {
    const isRead = scope === "cluster" && !setup.some(({ missing }) => missing === "queue");
    const isShown = view === "queue";
    const pods = isRead || isShown ? this.queue.count(isShown) : undefined;
    const verb = pods === 1 ? "waits" : "wait";
    this.waiting = pods;
    showText(byId("queue-count"), pods ? count(pods) : "");
    const title = pods ? `${plural(pods, "pod")} ${verb} for GPUs` : undefined;
    setAttribute(byId("tab-queue"), "title", title);
  }

  // There is no view of this time yet, or no record of it.
  clear() {
    for (const id of ["overview", "alerts", "notes", "controls"]) byId(id).hidden = true;
    const content = this.feed.isRejected ? rejection(this.feed, this.criteria) : ["Loading"];
    this.message.replaceChildren(...content);
    place(this.main, [this.message]);
  }

  // Requests another view if the address selects one. `isPaged`: the server does not list all
  // nodes.
  aimAgain(isPaged, anew) {
    if (!isPaged && this.feed.url === viewPath()) return;
    if (isPaged && this.isAimed && !anew) return;
    this.isAimed = isPaged;
    clearTimeout(this.aiming);
    const wait = this.isTyping ? TYPING_MS : 0;
    this.aiming = setTimeout(() => {
      this.feed.aim(isPaged ? pagePath(this.criteria) : viewPath());
    }, wait);
  }

  showPager({ paged, found, nodes }, view) {
    const pager = byId("pager");
    const hasPages = paged && found !== undefined && ["", "pods", "nodes"].includes(view);
    pager.hidden = !hasPages;
    if (!hasPages) return;
    const page = count(pageOf(this.criteria));
    const shown = `${count(nodes.length)} of ${plural(found, "node")} with such GPUs`;
    setText(byId("pager-text"), `${shown}, page ${page}`);
    const [previous, next] = neighbours(this.criteria, found);
    showLink(byId("pager-previous"), previous);
    showLink(byId("pager-next"), next);
  }

  showView(view, picture, anew) {
    const { criteria, devices } = this;
    const back = writeHash(this.list);
    const isKube = hasPods(picture);
    const isCluster = picture.scope === "cluster";
    switch (view) {
      case "gpu":
        this.gpu.show(devices, criteria, back, hasPods(picture, this.shownDevice?.node));
        break;
      case "pod":
        this.pod.show(devices, criteria, back);
        break;
      case "job":
        this.job.show(devices, criteria);
        break;
      case "node":
        this.node.show(picture, devices, criteria, anew);
        break;
      case "nodes":
        this.nodes.show(picture, devices, criteria);
        break;
      case "pods":
        this.pods.show(devices, criteria, isKube, picture);
        break;
      case "cost":
        this.cost.show(criteria, isKube, this.feed.now(), isCluster);
        break;
      case "savings":
        this.savings.show(criteria, this.waiting);
        break;
      case "queue":
        this.queue.show(criteria);
        break;
      case "events":
        this.events.show(criteria, isKube, this.feed.now());
        break;
    }
    place(this.main, [this[view].element]);
  }

  // Shows the list of GPUs. `measured`: position and size of its place.
  showDevices(anew, measured) {
    const { criteria } = this;
    const found = sorted(matching(this.devices, criteria), criteria.sort);
    if (isFiltered(criteria) && !this.feed.picture.paged) this.showCount(found);
    if (!found.length) {
      setText(this.message, emptyText(this.devices, criteria));
      place(this.main, [this.message]);
      return;
    }
    if (isMap(found, criteria)) {
      place(this.main, [this.map.element]);
      this.map.show(found, this.nodesByName, anew, measured);
      return;
    }
    place(this.main, [this.tiles.element]);
    const isByNode = !criteria.sort;
    this.tiles.show(found, this.nodesByName, isByNode, anew);
  }

  showCount(found) {
    const totals = totalsOf(found, this.priced);
    const { currency } = this.feed.picture;
    const texts = [`${count(found.length)} of ${plural(this.devices.length, "GPU")}`];
    for (const [name, text] of COUNTED) {
      if (totals[name]) texts.push(`${parts(totals[name])} ${text}`);
    }
    if (totals.mean !== undefined) texts.push(`mean of used ${percent(totals.mean)}`);
    if (totals.cost) texts.push(perHour(totals.cost, currency));
    if (totals.unpriced) texts.push(unpricedText(totals.unpriced));
    if (totals.wasted) {
      const wasteText = totals.waste.text(perHour, currency);
      texts.push(`${perHour(totals.wasted, currency)} wasted (${wasteText})`);
    }
    showText(byId("shown"), dotted(texts));
  }
}

// Returns the kind of a view, for the stylesheet.
function kindOf(view) {
  if (!view) return "list";
  return VIEWS.includes(view) ? "table" : "one";
}

function showLink(link, href) {
  link.hidden = !href;
  setAttribute(link, "href", href);
}

// Returns whether to show the heat map. It is always ordered by node, so sorted lists are shown as
// tiles.
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
