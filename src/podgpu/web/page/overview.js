// The head of the page: name, age of the data, problems, number of GPUs by state, and cost.

import { Alerts } from "./alerts.js";
import { byId, h, place, plain, setAttribute, setText } from "./dom.js";
import {
  bounded,
  count,
  dotted,
  duration,
  gpuCount,
  listed,
  money,
  moment,
  parts,
  percent,
  plural,
  totalMoney,
  watts,
  UNKNOWN,
} from "./format.js";
import { CONNECTION_LOST } from "./feed.js";
import { refusedText } from "./totals.js";

const COLOURS = [
  ["u4", "80\u2013100\u202f%"],
  ["u3", "60\u201380"],
  ["u2", "40\u201360"],
  ["u1", "20\u201340"],
  ["u0", "0\u201320\u202f%"],
  ["idle", "idle"],
  ["resting", "idle for a short time"],
  ["unknown", "not known"],
  ["free", "free"],
  ["broken", "broken"],
];
const STATE_TEXT = { waiting: "Loading", live: "Live", old: "Old", past: "Past" };
export const NO_FIGURES = "No figures yet";

export class Overview {
  // `onState` is called with the state of the total that was clicked.
  constructor(onState) {
    const total = (state, name) => new Total(state, name, onState);
    this.all = total("", "GPUs");
    this.held = total("held", "Allocated");
    this.used = total("used", "Used");
    this.idle = total("idle", "Idle");
    this.unknown = total("unknown", "Use unknown");
    this.unheld = total("unheld", "Holder unknown");
    this.free = total("free", "Free");
    this.broken = total("broken", "Broken");
    this.buttons = [
      this.all,
      this.held,
      this.used,
      this.idle,
      this.unknown,
      this.free,
      this.unheld,
      this.broken,
    ];
    this.power = new Plain("Power", "power");
    this.cost = new Plain("Cost/h", "cost", "#view=cost&range=month");
    this.wasted = new Plain("Wasted/h", "wasted", "#view=savings&range=24h");
    this.spread = COLOURS.map(([colour]) => h("span", { class: `is-${colour}` }));
    place(byId("spread"), this.spread);
    this.legend = COLOURS.map(([colour, text]) => new Entry(colour, text));
    const entries = this.legend.map((entry) => entry.element);
    place(byId("legend"), entries);
    this.alerts = new Alerts();
    this.health = { level: "", words: "", isOld: false };
  }

  show(picture, counted, devices) {
    // Before the first reading, the totals are unknown.
    const totals = picture.taken_at === undefined ? { colours: {} } : counted;
    const scope = scopeText(picture);
    byId("overview").hidden = false;
    setText(byId("scope"), scope);
    setAttribute(byId("scope"), "title", scope);
    byId("simulated").hidden = !picture.simulated;
    this.showTotals(totals);
    setAttribute(this.used.button, "title", meanText(picture));
    this.showCost(picture, totals);
    this.showWaste(picture, totals);
    showSetup(picture.setup ?? []);
    this.showColours(totals.colours, picture.paged);
    const isAllOld = devices.every((device) => device.old);
    this.alerts.show(picture, devices, isAllOld);
    this.health = healthOf(devices, this.alerts, totals);
  }

  // `isPaged`: the server does not list all GPUs, so there are no numbers.
  showColours(numbers, isPaged) {
    COLOURS.forEach(([colour], i) => {
      const number = numbers[colour] ?? 0;
      this.spread[i].style.flexGrow = number;
      this.spread[i].hidden = !number;
      this.legend[i].show(isPaged ? "" : count(number), !number);
    });
  }

  // `view`: name of the view, for the title of the browser's tab.
  showTitle(picture, view) {
    const { words } = this.health;
    const sign = words ? `(${words}) ` : "";
    const title = dotted([view, scopeText(picture), "podgpu"]);
    document.title = `${sign}${title}`;
  }

  showTotals(totals) {
    const { gpus, allocated, used, idle, unknown, unheld, free, broken } = totals;
    const isMeanKnown = used && totals.mean !== undefined;
    this.all.show(gpus, totals.old ? `${count(totals.old)} old` : "");
    this.held.show(allocated, shareText(allocated, gpus));
    this.used.show(used, isMeanKnown ? `mean ${percent(totals.mean)}` : "");
    this.idle.show(idle, shareText(idle, allocated));
    this.unknown.show(unknown, shareText(unknown, allocated));
    this.unheld.show(unheld, unheldText(totals));
    this.free.show(free, someText(totals.freeBroken, "broken"));
    this.broken.show(broken, brokenText(totals));
    this.power.show(watts(totals.power), "");

    const buttons = this.buttons.filter((total) => total !== this.unheld || unheld > 0);
    const elements = buttons.map((total) => total.element);
    elements.push(this.power.element);
    if (totals.cost !== undefined) elements.push(this.cost.element, this.wasted.element);
    place(byId("totals"), elements);
  }

  showCost({ currency }, { cost, unpriced }) {
    const text = bounded(totalMoney(cost, currency), unpriced);
    const more = unpriced ? unpricedText(unpriced) : "this month \u2192";
    this.cost.show(text, more, money(cost, currency));
  }

  showWaste({ currency, at }, { waste, wasted, allocated }) {
    const parts = waste?.text(totalMoney, currency);
    // A past state has no under-used time, except that of idle GPUs, which is 0.
    const isUnderusedKnown = at === undefined && waste?.parts.underused !== undefined;
    const missing = allocated > 0 && !isUnderusedKnown && "under-used not known";
    const more = dotted([listed([parts, missing]), "by whom \u2192"]);
    this.wasted.show(totalMoney(wasted, currency), more, money(wasted, currency));
    this.wasted.element.classList.toggle("is-none", !wasted);
  }

  // `shows`: kind of view: a list of GPUs, a table, or one GPU, pod or node. The stylesheet hides
  // the totals of the latter.
  showChosen(criteria, shows) {
    document.body.dataset.shows = shows;
    for (const total of this.buttons) {
      total.press(shows === "list" && criteria.state === total.state);
    }
  }

  showState(feed) {
    const status = byId("status");
    const { state } = feed;
    const isHealthKnown = !feed.isRejected && !["lost", "failed", "waiting"].includes(state);
    const health = isHealthKnown ? this.health.level : "";
    const isSaid = state === "old" && this.health.isOld;
    const words = health && !isSaid ? `${this.health.words}. ` : "";
    setText(byId("status-text"), `${words}${stateText(feed)}`);

    const isSame = status.dataset.state === state && status.dataset.health === health;
    if (isSame) return;
    status.dataset.state = state;
    status.dataset.health = health;
    document.body.dataset.feed = state;
    const announced = feed.failure || feed.fault || `${words}${STATE_TEXT[state] ?? ""}`;
    setText(byId("announced"), announced);
  }
}

function someText(number, text) {
  return number ? `${parts(number)} ${text}` : "";
}

function unheldText({ freeBusy, freeGone }) {
  const busy = someText(freeBusy, "busy, so not wasted");
  const gone = someText(freeGone, "not answering");
  return listed([busy, gone]);
}

function brokenText(totals) {
  const gone = someText(totals.gone, "not answering");
  const share = shareText(totals.broken, totals.gpus);
  return listed([gone || share, refusedText(totals)]);
}

// Shows what the page cannot show yet, and the settings that add it.
function showSetup(hints) {
  const box = byId("setup");
  const shown = JSON.stringify(hints);
  if (box.dataset.shown === shown) return;
  box.dataset.shown = shown;
  box.hidden = !hints.length;
  const names = hints.map((hint) => SETUP_NAMES[hint.missing] ?? plain(hint.missing));
  setText(byId("setup-summary"), `To set up: ${names.join(", ")}`);
  const items = hints.map((hint) =>
    h("li", {}, `${plain(hint.says)} `, h("code", {}, plain(hint.do))),
  );
  place(byId("setup-list"), items);
}

const SETUP_NAMES = {
  prices: "your prices",
  owners: "owners",
  labels: "cost by team",
  history: "last month",
  queue: "waiting pods",
};

// Says that costs do not include some of the allocated GPUs.
export function unpricedText(gpus) {
  const verb = gpus === 1 ? "has" : "have";
  return `without ${gpuCount(gpus)} that ${verb} no price`;
}

function stateText(feed) {
  const { state, age } = feed;
  if (state === "failed") return feed.fault;
  if (state === "past") return feed.isRejected ? "No record" : `As of ${moment(feed.picture.at)}`;
  if (state === "lost") return lostText(feed);
  if (state === "waiting") return STATE_TEXT.waiting;
  if (age !== undefined) return `${STATE_TEXT[state]}, ${duration(age)} old`;
  return state === "old" ? NO_FIGURES : STATE_TEXT[state];
}

function lostText({ failure, lostAt, age }) {
  const texts = [failure];
  if (failure === CONNECTION_LOST) texts.push(` ${duration(Date.now() / 1000 - lostAt)} ago`);
  if (age !== undefined) texts.push(`, figures ${duration(age)} old`);
  return texts.join("");
}

// Green only if there is no problem; problems are also shown as text.
function healthOf(devices, alerts, totals) {
  const hasBrokenGpu = devices.some((device) => device.severity === "broken");
  const isGrave = hasBrokenGpu || alerts.severity === "broken";
  const level = isGrave ? "broken" : "warning";
  const problem = (words) => ({ level, words, isOld: false });
  if (totals.broken) return problem(`${count(totals.broken)} broken`);
  if (alerts.number) return problem(plural(alerts.number, isGrave ? "alert" : "warning"));
  if (totals.kubernetes_unhealthy) return { ...problem(refusedText(totals)), level: "warning" };
  if (totals.old) return { ...problem(`${count(totals.old)} old`), isOld: true };
  return { level: "", words: "", isOld: false };
}

class Total {
  constructor(state, name, onState) {
    this.state = state;
    this.value = h("span", { class: "total-value" });
    this.more = h("span", { class: "total-more" });
    this.button = h(
      "button",
      { type: "button", class: `total total-${state || "all"}` },
      this.value,
      h("span", { class: "total-name" }, name),
      this.more,
    );
    this.button.addEventListener("click", () => onState(state));
    this.element = h("li", {}, this.button);
  }

  show(number, more) {
    setText(this.value, number === undefined ? UNKNOWN : parts(number));
    setText(this.more, more);
    this.button.classList.toggle("is-none", !number);
  }

  press(pressed) {
    setAttribute(this.button, "aria-pressed", String(pressed));
  }
}

// A total that is not a filter. `href` links to more details.
class Plain {
  constructor(name, kind, href) {
    this.value = h("span", { class: "total-value" });
    this.more = h("span", { class: "total-more" });
    const title = h("span", { class: "total-name" }, name);
    const tag = href ? "a" : "div";
    const total = h(tag, { class: `total total-${kind}`, href }, this.value, title, this.more);
    this.element = h("li", { class: "is-plain" }, total);
  }

  show(value, more, exact) {
    setText(this.value, value);
    setAttribute(this.value, "title", exact);
    setText(this.more, more);
  }
}

class Entry {
  constructor(colour, text) {
    this.number = h("span", { class: "legend-number" });
    this.element = h(
      "li",
      { class: `legend-${colour}` },
      h("span", { class: `key is-${colour}`, "aria-hidden": "true" }),
      text,
      " ",
      this.number,
    );
  }

  show(number, isNone) {
    setText(this.number, number);
    this.element.classList.toggle("is-none", isNone);
  }
}

function scopeText(picture) {
  const nodes = picture.nodes ?? [];
  if (picture.scope === "node" && nodes.length === 1) return plain(nodes[0].name);
  return picture.paged ? "Cluster" : `Cluster, ${plural(nodes.length, "node")}`;
}

// `avg_GPU_utilization` is the mean of the field in --used-field, so it may differ from the mean
// below "Used".
function meanText({ used_field: field, used_utilization_ratio: ratio }) {
  if (!field) return undefined;
  const shown = "The mean shown here is of the GPU utilisation.";
  const metric = `The metric avg_GPU_utilization is ${percent(ratio)}`;
  const mean = `it is the mean of the field ${plain(field)} (option --used-field)`;
  return `${shown} ${metric}: ${mean} over the GPUs in use.`;
}

function shareText(part, whole) {
  return whole && part ? percent(part / whole) : "";
}
