// The head of the page: name, age of the data, problems, number of GPUs by state, and cost.

import { Alerts } from "./alerts.js";
import { byId, h, place, plain, setAttribute, setText } from "./dom.js";
import {
  count,
  duration,
  money,
  moment,
  parts,
  percent,
  plural,
  totalMoney,
  watts,
  UNKNOWN,
} from "./format.js";
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
    place(
      byId("legend"),
      this.legend.map((entry) => entry.element),
    );
    this.alerts = new Alerts();
    this.health = { level: "", words: "", isOld: false };
  }

  show(picture, counted, devices) {
    const totals = picture.taken_at === undefined ? { colours: {} } : counted; // no reading yet: totals are unknown
    byId("overview").hidden = false;
    setText(byId("scope"), scopeText(picture));
    setAttribute(byId("scope"), "title", scopeText(picture));
    byId("simulated").hidden = !picture.simulated;
    this.showTotals(totals);
    setAttribute(this.used.button, "title", meanText(picture));
    this.showMoney(picture, totals);
    showSetup(picture.setup ?? []);
    COLOURS.forEach(([colour], i) => {
      const number = totals.colours[colour] ?? 0;
      this.spread[i].style.flexGrow = number;
      this.spread[i].hidden = !number;
      this.legend[i].show(picture.paged ? "" : count(number), !number);
    });
    this.alerts.show(picture, devices, !devices.some((device) => !device.old));
    this.health = healthOf(devices, this.alerts, totals);
  }

  // `view`: name of the view, for the title of the browser's tab.
  showTitle(picture, view) {
    const sign = this.health.words ? `(${this.health.words}) ` : "";
    document.title = `${sign}${[view, scopeText(picture), "podgpu"].filter(Boolean).join(" \u00b7 ")}`;
  }

  showTotals(totals) {
    this.all.show(totals.gpus, totals.old ? `${count(totals.old)} old` : "");
    this.held.show(totals.allocated, shareText(totals.allocated, totals.gpus));
    this.used.show(
      totals.used,
      totals.mean === undefined || !totals.used ? "" : `mean ${percent(totals.mean)}`,
    );
    this.idle.show(totals.idle, shareText(totals.idle, totals.allocated));
    const some = (number, text) => (number ? `${parts(number)} ${text}` : "");
    this.unknown.show(totals.unknown, shareText(totals.unknown, totals.allocated));
    this.unheld.show(
      totals.unheld,
      [some(totals.freeBusy, "busy, so not wasted"), some(totals.freeGone, "not answering")]
        .filter(Boolean)
        .join(", "),
    );
    this.free.show(totals.free, some(totals.freeBroken, "broken"));
    const ofBroken = [
      some(totals.gone, "not answering") || shareText(totals.broken, totals.gpus),
      refusedText(totals),
    ];
    this.broken.show(totals.broken, ofBroken.filter(Boolean).join(", "));
    this.power.show(watts(totals.power), "");
    const shown = this.buttons.filter((total) => total !== this.unheld || totals.unheld > 0);
    const money = totals.cost === undefined ? [] : [this.cost, this.wasted];
    place(
      byId("totals"),
      [...shown, this.power, ...money].map((figure) => figure.element),
    );
  }

  showMoney(picture, totals) {
    const { cost, waste, wasted, unpriced } = totals;
    this.cost.show(
      `${unpriced ? "\u2265\u202f" : ""}${totalMoney(cost, picture.currency)}`,
      unpriced ? unpricedText(unpriced) : "this month \u2192",
      money(cost, picture.currency),
    );
    const parts = waste?.text(totalMoney, picture.currency) ?? "";
    // A past state has no under-used time, except that of idle GPUs, which is 0.
    const isPartly =
      totals.allocated > 0 && (picture.at !== undefined || waste?.parts.underused === undefined);
    const missing = isPartly ? "under-used not known" : "";
    this.wasted.show(
      totalMoney(wasted, picture.currency),
      [[parts, missing].filter(Boolean).join(", "), "by whom \u2192"]
        .filter(Boolean)
        .join(" \u00b7 "),
      money(wasted, picture.currency),
    );
    this.wasted.element.classList.toggle("is-none", !totals.wasted);
  }

  // `shows`: kind of view: a list of GPUs, a table, or one GPU, pod or node. The stylesheet hides the totals of the latter.
  showChosen(criteria, shows) {
    document.body.dataset.shows = shows;
    for (const total of this.buttons)
      total.press(shows === "list" && criteria.state === total.state);
  }

  showState(feed) {
    const status = byId("status");
    const { state } = feed;
    const health =
      feed.isRejected || state === "lost" || state === "failed" || state === "waiting"
        ? ""
        : this.health.level;
    const text = stateText(feed);
    const isSaid = state === "old" && this.health.isOld;
    const words = health && !isSaid ? `${this.health.words}. ` : "";
    setText(byId("status-text"), `${words}${text}`);
    if (status.dataset.state !== state || status.dataset.health !== health) {
      status.dataset.state = state;
      status.dataset.health = health;
      document.body.dataset.feed = state;
      setText(
        byId("announced"),
        feed.failure || feed.fault || `${words}${STATE_TEXT[state] ?? ""}`,
      );
    }
  }
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
  place(
    byId("setup-list"),
    hints.map((hint) => h("li", {}, `${plain(hint.says)} `, h("code", {}, plain(hint.do)))),
  );
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
  return `without ${parts(gpus)} ${gpus === 1 ? "GPU" : "GPUs"} that ${gpus === 1 ? "has" : "have"} no price`;
}

function stateText(feed) {
  const { state } = feed;
  if (state === "failed") return feed.fault;
  if (state === "past") return feed.isRejected ? "No record" : `As of ${moment(feed.picture.at)}`;
  const age =
    feed.age === undefined || state === "waiting"
      ? ""
      : `, ${state === "lost" ? "figures " : ""}${duration(feed.age)} old`;
  if (state === "lost") {
    const since =
      feed.failure === "Connection lost" ? ` ${duration(Date.now() / 1000 - feed.lostAt)} ago` : "";
    return `${feed.failure}${since}${age}`;
  }
  return state === "old" && feed.age === undefined ? NO_FIGURES : `${STATE_TEXT[state]}${age}`;
}

// Green only if there is no problem; problems are also shown as text.
function healthOf(devices, alerts, totals) {
  const grave =
    alerts.severity === "broken" || devices.some((device) => device.severity === "broken");
  const level = grave ? "broken" : "warning";
  if (totals.broken) return { level, words: `${count(totals.broken)} broken`, isOld: false };
  if (alerts.number)
    return { level, words: plural(alerts.number, grave ? "alert" : "warning"), isOld: false };
  if (totals.kubernetes_unhealthy)
    return { level: "warning", words: refusedText(totals), isOld: false };
  if (totals.old) return { level, words: `${count(totals.old)} old`, isOld: true };
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
    const inside = [this.value, h("span", { class: "total-name" }, name), this.more];
    const total = h(href ? "a" : "div", { class: `total total-${kind}`, href }, ...inside);
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

// `avg_GPU_utilization` is the mean of the field in --used-field, so it may differ from the mean below "Used".
function meanText({ used_field: field, used_utilization_ratio: ratio }) {
  if (!field) return undefined;
  return `The mean shown here is of the GPU utilisation. The metric avg_GPU_utilization is ${percent(ratio)}: it is the mean of the field ${plain(field)} (option --used-field) over the GPUs in use.`;
}

function shareText(part, whole) {
  return whole && part ? percent(part / whole) : "";
}
